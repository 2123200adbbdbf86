//! The configuration of the request path: small, immutable types, compiled from Envoy's protos off the request path.
//!
//! The types contain no protos, and nothing is parsed per request: matchers are compiled, and header formats are split
//! into parts. The proxy's `translate` builds these types; the workers read them.
//! State that changes while a configuration is in effect is in [`state`](crate::state).
//!
//! A [`Snapshot`] is published as a whole by one swap. It shares unchanged parts with the snapshot before, so that an
//! endpoint change rebuilds no route and a route change rebuilds no listener.

pub mod authorization;
pub mod cluster;
pub mod collector;
pub mod health;
pub mod http;
pub mod jwt;
pub mod limit;
pub mod listener;
pub mod log_filter;
pub mod lua;
pub mod mutation;
pub mod policy;
pub mod processing;
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
    /// All listeners, including those without a socket. They are indexed by address at publication.
    pub listeners: Arc<Listeners>,
    /// Route tables that HTTP connection managers refer to by name (RDS).
    pub routes: Arc<ByName<RouteTable>>,
    /// All clusters. A cluster holds a handle of its endpoints, so that they change without the cluster.
    pub clusters: Arc<ByName<Cluster>>,
    /// Number of times that trusted roots were removed since the start.
    pub distrusted: u64,
}

impl Snapshot {
    /// Returns whether this snapshot may refuse requests or connections that `before` admitted: policies, filter
    /// chains or trusted roots differ.
    pub fn concerns_admission(&self, before: &Self) -> bool {
        let same_listeners = || {
            let (now, then) = (&self.listeners.by_name, &before.listeners.by_name);
            now.len() == then.len() && now.iter().all(|(name, one)| same(Some(one), then.get(name)))
        };
        // In route tables, only per-route settings of filters matter, such as another policy for a route.
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

    /// Returns the terminal filters of all filter chains.
    pub fn terminals(&self) -> impl Iterator<Item = &Terminal> {
        let listeners = self.listeners.by_name.values();
        let chains = listeners.flat_map(|listener| listener.chains.iter().chain(&listener.default_chain));
        chains.map(|chain| &chain.terminal)
    }

    /// Returns the time after which unused series of metrics are dropped: the minimum over all `stats` filters.
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

/// Listeners by name and by address.
#[derive(Clone, Debug, Default)]
pub struct Listeners {
    /// All listeners, by name.
    pub by_name: ByName<Listener>,
    /// Listeners by address, for lookup by original destination. If the accepting listener has `use_original_dst`, the
    /// connection goes to the listener of that address and port, or of the unspecified address and that port.
    pub by_address: Map<std::net::SocketAddr, Arc<Listener>>,
}
