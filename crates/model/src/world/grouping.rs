//! Properties of the World by which views are assigned to scopes.

use std::collections::BTreeSet;

use super::{World, envoy_filters::SharedFilters};

/// Properties of the World by which views are assigned to scopes ([`ClientScope::of`](crate::ClientScope::of)).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grouping {
    /// Keys of the labels of clients on which shared resources depend.
    pub(crate) label_keys: BTreeSet<String>,
    /// EnvoyFilters of shared resources.
    pub(crate) filters: SharedFilters,
}

impl World {
    /// Returns the properties by which views are assigned to scopes.
    pub fn grouping(&self) -> Grouping {
        Grouping { label_keys: self.label_keys(), filters: self.shared_filters() }
    }
}
