//! Names that the mesh's DNS server answers.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Arc};

/// The cluster's domain.
pub(crate) const DOMAIN: &str = "cluster.local";

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// These addresses; none means that the name is there but nothing behind it is ready.
    Addresses(Vec<Ipv4Addr>),
    /// Another name.
    Alias(String),
}

/// Fully qualified names in lower case, without the last dot.
pub(crate) type Names = BTreeMap<String, Answer>;

/// The hosts that a client sees beside the cluster's names, by its address: those of the ServiceEntries for its namespace.
pub(crate) type Hosts = BTreeMap<Ipv4Addr, Arc<Names>>;
