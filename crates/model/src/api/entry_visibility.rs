//! Visibility of ServiceEntries by the labels of their namespaces, in the mesh configuration.

use serde::Deserialize;

use super::namespace_selector::NamespaceSelector;

/// Setting of the mesh (`serviceEntryVisibility`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EntryVisibilityPolicies {
    /// Visibility of an entry to which no policy applies.
    pub default_visibility: EntryVisibility,
    /// Whether sidecars and gateways follow the setting. Without it, it concerns Istio's ambient proxies alone.
    pub apply_to_sidecars: bool,
    /// Policies, of which the first that applies counts.
    pub policies: Vec<EntryVisibilityPolicy>,
}

/// Visibility of the ServiceEntries of some namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EntryVisibilityPolicy {
    /// Visibility.
    pub visibility: EntryVisibility,
    /// Rules, which must all apply.
    pub matching_rules: Vec<EntryVisibilityRule>,
}

/// Rule about the namespace of a ServiceEntry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EntryVisibilityRule {
    /// Selector of the namespace; a rule without one applies to none.
    pub namespace_selector: Option<NamespaceSelector>,
}

/// Upper bound of the visibility of a ServiceEntry, whatever its `exportTo` is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum EntryVisibility {
    /// As [`Self::Public`].
    #[default]
    VisibilityUnspecified,
    /// No client sees the entry.
    None,
    /// Clients of its namespace see the entry.
    Namespace,
    /// All clients see the entry.
    Public,
}
