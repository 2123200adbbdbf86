//! What clusters and listeners need before they come into effect.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, atomic::Ordering},
};

use super::{
    inventory::Assignment,
    slot::{AcceptedResource, Slot},
    uses,
};
use crate::translate;
use skysail_policy::config::{Cluster, Listener, RouteTable, cluster::Discovery};

/// What a warming version still waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WarmingNeed {
    /// Nothing: it is warm.
    Nothing,
    /// Only secrets.
    Secrets,
    /// Other resources.
    Resources,
}

impl WarmingNeed {
    /// Returns what a resource waits for. `has_resources` tells whether all but its secrets are present.
    pub(super) fn new(has_resources: bool, has_secrets: bool) -> Self {
        match (has_resources, has_secrets) {
            (true, true) => Self::Nothing,
            (true, false) => Self::Secrets,
            (false, _) => Self::Resources,
        }
    }
}

/// Returns what a cluster waits for: its endpoints, and the secrets of its TLS contexts.
pub(super) fn of_cluster(
    accepted: &AcceptedResource<Cluster>,
    assignments: &HashMap<Arc<str>, Assignment>,
) -> WarmingNeed {
    let cluster = &accepted.value;
    let has_endpoints = match &cluster.discovery {
        Discovery::Eds(name) => assignments.contains_key(name),
        Discovery::Dns { .. } => accepted.resolved.load(Ordering::Acquire),
        Discovery::Static | Discovery::OriginalDst(_) | Discovery::Dynamic(_) => true,
    };
    let tls = cluster.transport_matches.iter().filter_map(|found| found.tls.as_ref()).chain(&cluster.tls);
    WarmingNeed::new(has_endpoints, tls.into_iter().all(|tls| translate::client_ready(tls)))
}

/// Returns what a listener waits for: its route tables, and the secrets of its TLS contexts. `others` tells whether all
/// other resources are present.
pub(super) fn of_listener(
    listener: &Listener,
    routes: &BTreeMap<Arc<str>, Slot<RouteTable>>,
    others: bool,
) -> WarmingNeed {
    let chains = || listener.chains.iter().chain(&listener.default_chain);
    let is_known =
        |name: &Arc<str>| routes.get(name).is_some_and(|slot| slot.active.is_some() || slot.absent);
    let has_secrets = chains().filter_map(|chain| chain.tls.as_ref()).all(|tls| translate::server_ready(tls));
    WarmingNeed::new(others && uses::tables(listener).all(is_known), has_secrets)
}
