//! Listeners with sockets of their own: those of gateways, and those of Sidecars that intercept nothing.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use skysail_policy::config::Listener;

use super::ProxyConfiguration;

impl ProxyConfiguration {
    /// Returns the name of the listener with this address, or with its port on the wildcard address. For
    /// proxies whose listeners have sockets.
    pub fn listener_at(&self, address: SocketAddr) -> Option<String> {
        let by_address = &self.snapshot.listeners.by_address;
        let any = |listener: &&Arc<Listener>| {
            listener
                .addresses
                .iter()
                .any(|bound| bound.ip().is_unspecified() && bound.port() == address.port())
        };
        let found = by_address.get(&address).or_else(|| by_address.values().find(any));
        found.map(|listener| listener.name.to_string())
    }

    /// Returns the ports of the listeners that have TCP sockets.
    pub fn ports(&self) -> BTreeSet<u16> {
        let has_port = |listener: &&Arc<Listener>| listener.bind && listener.pipe.is_none();
        let bound = self.snapshot.listeners.by_name.values().filter(has_port);
        bound.flat_map(|listener| listener.addresses.iter().map(SocketAddr::port)).collect()
    }

    /// Returns the listener that has a socket at this address.
    pub fn listening_at(&self, address: SocketAddr) -> Option<&str> {
        let find = |ip: IpAddr| {
            let at = SocketAddr::new(ip, address.port());
            let mut listeners = self.snapshot.listeners.by_name.values().filter(|listener| listener.bind);
            listeners.find(|listener| listener.addresses.contains(&at)).map(|listener| &*listener.name)
        };
        find(address.ip()).or_else(|| find(Ipv4Addr::UNSPECIFIED.into()))
    }
}
