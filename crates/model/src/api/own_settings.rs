//! Settings of a proxy's own configuration, which the control plane does not send: fields of
//! `istio.mesh.v1alpha1.ProxyConfig`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Duration;

/// Settings of a proxy's own configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OwnSettings {
    /// Time limit of connections that a changed configuration no longer admits.
    pub drain_duration: Option<Duration>,
    /// Statistics of an Envoy besides those that it always has; `None`: all.
    pub proxy_stats_matcher: Option<StatsMatcher>,
    /// Runtime keys and their values.
    pub runtime_values: BTreeMap<String, String>,
}

/// Names of statistics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct StatsMatcher {
    /// Prefixes.
    pub inclusion_prefixes: Vec<String>,
    /// Suffixes.
    pub inclusion_suffixes: Vec<String>,
    /// RE2 expressions.
    pub inclusion_regexps: Vec<String>,
}

impl OwnSettings {
    /// Replaces the settings that `over` sets.
    pub(crate) fn overlay(&mut self, over: Self) {
        self.drain_duration = over.drain_duration.or(self.drain_duration);
        self.proxy_stats_matcher = over.proxy_stats_matcher.or_else(|| self.proxy_stats_matcher.take());
        if !over.runtime_values.is_empty() {
            self.runtime_values = over.runtime_values;
        }
    }
}
