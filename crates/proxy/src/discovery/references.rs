//! Rules between resources, as in Envoy. A checked route table names existing clusters only. All DNS caches of one name
//! have the same settings. A cluster waits for the secrets of its TLS contexts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{slot::Slot, uses};
use crate::translate::{Reject, TlsContexts};
use skysail_policy::config::{
    Cluster, FilterChain, Listener, RouteTable,
    cluster::{Discovery, HostCacheConfig},
    http::Routes,
    listener::Terminal,
    route::VirtualHost,
};

type ClusterSlots = BTreeMap<Arc<str>, Slot<Cluster>>;
type Listeners = BTreeMap<Arc<str>, Slot<Listener>>;

/// Maximum number of secrets that an access log entry names.
const MAX_NAMED: usize = 3;

/// Returns the first secrets for which the clusters of a virtual host wait, separated by commas; `None` for none.
pub(super) fn missing_secrets(
    host: &VirtualHost,
    clusters: &ClusterSlots,
    tls: &TlsContexts,
) -> Option<Box<str>> {
    let warming = uses::of_host(host).filter_map(|name| clusters.get(name)?.warming.as_ref());
    let contexts = warming.flat_map(|accepted| {
        let matches = accepted.value.transport_matches.iter().filter_map(|found| found.tls.as_ref());
        matches.chain(&accepted.value.tls)
    });
    let names: BTreeSet<&str> = contexts.flat_map(|context| tls.missing(context)).collect();
    let first: Vec<&str> = names.iter().take(MAX_NAMED).copied().collect();
    let others = names.len() - first.len();
    let more = if others > 0 { format!(" and {others} others") } else { String::new() };
    (!names.is_empty()).then(|| format!("{}{more}", first.join(", ")).into())
}

/// Checks the clusters of a listener's own route tables (`validate_clusters`).
///
/// # Errors
/// A cluster is neither in effect nor warming.
pub(super) fn check_tables(listener: &Listener, clusters: &ClusterSlots) -> Result<(), Reject> {
    chains(listener).try_for_each(|chain| match &chain.terminal {
        Terminal::Http(manager) => match &manager.routes {
            Routes::Inline(table) => check_table(table, clusters),
            Routes::Named(_) => Ok(()),
        },
        Terminal::Tcp(_) => Ok(()),
    })
}

/// Checks the clusters of a route table, if `validate_clusters` is in effect.
///
/// # Errors
/// A cluster is neither in effect nor warming.
pub(super) fn check_table(table: &RouteTable, clusters: &ClusterSlots) -> Result<(), Reject> {
    if !table.checks_clusters {
        return Ok(());
    }
    let is_known = |name: &str| clusters.get(name).is_some_and(|slot| slot.newest().is_some());
    match uses::targets_of_table(table).find(|name| *name != "*" && !is_known(name)) {
        Some(name) => Err(Reject::new(format!(
            "route configuration {:?} names cluster {name:?}, which does not exist: add it, or set validate_clusters: false",
            table.name
        ))),
        None => Ok(()),
    }
}

/// Checks the DNS cache of a cluster.
///
/// # Errors
/// Another resource has a DNS cache of this name with other settings.
pub(super) fn check_cluster(
    name: &Arc<str>,
    cluster: &Cluster,
    clusters: &ClusterSlots,
    listeners: &Listeners,
) -> Result<(), Reject> {
    let others = clusters.iter().filter(|(other, _)| *other != name);
    check_caches(cache(cluster).into_iter(), || {
        in_clusters(others.clone()).chain(in_listeners(listeners.iter()))
    })
}

/// Checks the DNS caches of a listener.
///
/// # Errors
/// Another resource has a DNS cache of one of these names with other settings.
pub(super) fn check_listener(
    name: &Arc<str>,
    listener: &Listener,
    clusters: &ClusterSlots,
    listeners: &Listeners,
) -> Result<(), Reject> {
    let others = listeners.iter().filter(|(other, _)| *other != name);
    check_caches(caches(listener), || in_clusters(clusters.iter()).chain(in_listeners(others.clone())))
}

fn check_caches<'a, O: Iterator<Item = &'a HostCacheConfig>>(
    new: impl Iterator<Item = &'a HostCacheConfig>,
    others: impl Fn() -> O,
) -> Result<(), Reject> {
    for cache in new {
        if others().any(|other| other.name == cache.name && other != cache) {
            return Err(Reject::new(format!(
                "another DNS cache has the name {:?} and different settings: use the same settings, or rename it",
                cache.name
            )));
        }
    }
    Ok(())
}

fn in_clusters<'a>(
    slots: impl Iterator<Item = (&'a Arc<str>, &'a Slot<Cluster>)>,
) -> impl Iterator<Item = &'a HostCacheConfig> {
    slots.flat_map(|(_, slot)| slot.both()).filter_map(|accepted| cache(&accepted.value))
}

fn in_listeners<'a>(
    slots: impl Iterator<Item = (&'a Arc<str>, &'a Slot<Listener>)>,
) -> impl Iterator<Item = &'a HostCacheConfig> {
    slots.flat_map(|(_, slot)| slot.both()).flat_map(|accepted| caches(&accepted.value))
}

fn cache(cluster: &Cluster) -> Option<&HostCacheConfig> {
    match &cluster.discovery {
        Discovery::Dynamic(cache) => Some(cache),
        _ => None,
    }
}

fn caches(listener: &Listener) -> impl Iterator<Item = &HostCacheConfig> {
    chains(listener).flat_map(|chain| {
        let of_manager = match &chain.terminal {
            Terminal::Http(manager) => manager.host_cache.as_deref(),
            Terminal::Tcp(_) => None,
        };
        of_manager.into_iter().chain(chain.host_cache.as_deref())
    })
}

fn chains(listener: &Listener) -> impl Iterator<Item = &FilterChain> {
    listener.chains.iter().chain(&listener.default_chain).map(|chain| &**chain)
}
