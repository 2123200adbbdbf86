//! What the request path runs on: lean, immutable types, made from Envoy's protos off the hot path.
//!
//! Nothing here refers to a proto, and nothing is parsed per request: matchers are compiled, names resolved
//! to handles, header formats split into parts. `translate` makes these types; the workers read them.
//!
//! A [`Snapshot`] is published whole by one swap, and its parts are shared by reference with the one before, so
//! that an endpoint change rebuilds no route and a route change no listener.

pub mod authorization;
pub mod cluster;
pub mod collector;
pub mod health;
pub mod http;
pub mod jwt;
pub mod limit;
pub mod listener;
pub mod log_filter;
pub mod policy;
pub mod route;
pub mod stats;
pub mod text;
pub mod tls;
pub mod trace;

use std::sync::Arc;

pub use cluster::{Cluster, Endpoint, Endpoints};
pub use http::HttpManager;
use listener::Terminal;
pub use listener::{FilterChain, Listener};
pub use route::RouteTable;

use skysail_http::map::Map;

/// A map by resource name.
pub type ByName<T> = Map<Arc<str>, Arc<T>>;

/// The whole configuration at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Every listener, those without a socket of their own too. Sorted out by address when published.
    pub listeners: Arc<Listeners>,
    /// Route tables that HTTP managers refer to by name (RDS).
    pub routes: Arc<ByName<RouteTable>>,
    /// Every cluster. A cluster holds its endpoints as a handle, so that they change without it.
    pub clusters: Arc<ByName<Cluster>>,
    /// How many times trusted roots were taken away since the start.
    pub distrusted: u64,
}

impl Snapshot {
    /// Whether what `before` admitted may have to be refused by this one: policies, filter chains or trusted roots differ.
    pub fn concerns_admission(&self, before: &Self) -> bool {
        let same_listeners = || {
            let (now, then) = (&self.listeners.by_name, &before.listeners.by_name);
            now.len() == then.len() && now.iter().all(|(name, one)| same(Some(one), then.get(name)))
        };
        // Of route tables only settings for filters matter, such as another policy for a route.
        let same_settings = || {
            let names = self.routes.keys().chain(before.routes.keys());
            names.into_iter().all(|name| {
                let (now, then) = (self.routes.get(name), before.routes.get(name));
                let sets = |table: Option<&Arc<RouteTable>>| table.is_some_and(|table| table.sets_filters());
                same(now, then) || !(sets(now) || sets(then))
            })
        };
        self.distrusted != before.distrusted || !same_listeners() || !same_settings()
    }

    /// The last filters of all chains.
    pub fn terminals(&self) -> impl Iterator<Item = &Terminal> {
        let listeners = self.listeners.by_name.values();
        let chains = listeners.flat_map(|listener| listener.chains.iter().chain(&listener.default_chain));
        chains.map(|chain| &chain.terminal)
    }

    /// How long series of metrics are kept that nothing is counted in, as the filters of metrics say.
    pub fn metrics_expiry(&self) -> Option<std::time::Duration> {
        let stats = self.terminals().filter_map(|terminal| match terminal {
            Terminal::Http(manager) => manager.stats.as_ref(),
            Terminal::Tcp(proxy) => proxy.stats.as_ref(),
        });
        stats.filter_map(|stats| stats.expiry).min()
    }
}

fn same<T>(a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
    a.map(Arc::as_ptr) == b.map(Arc::as_ptr)
}

/// Listeners, in the two ways they are looked up.
#[derive(Clone, Debug, Default)]
pub struct Listeners {
    /// All, by name.
    pub by_name: ByName<Listener>,
    /// Those found by original destination: `use_original_dst` on the socket a connection came in by leads to
    /// the listener of exactly this address and port, else of the unspecified address and this port.
    pub by_address: Map<std::net::SocketAddr, Arc<Listener>>,
}
