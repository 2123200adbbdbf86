//! Names that the mesh's DNS server answers.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Arc};

/// The cluster's domain.
pub(crate) const DOMAIN: &str = "cluster.local";

/// Target of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Addresses; empty if no endpoint is ready.
    Addresses(Vec<Ipv4Addr>),
    /// Another name.
    Alias(String),
}

/// Targets by fully qualified name in lower case, without the last dot.
pub(crate) type Names = BTreeMap<String, Answer>;

/// Hosts that a client sees beside the cluster's names, by its address: those of the ServiceEntries that its namespace
/// sees.
pub(crate) type Hosts = BTreeMap<Ipv4Addr, Arc<Names>>;
