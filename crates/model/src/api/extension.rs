//! WasmPlugin and TrafficExtension. Fields are Istio's (`extensions.istio.io`).
//!
//! Lua runs. Wasm does not (`docs/experiments.md`): a module that would authenticate or authorize requests, and that
//! may not fail open, is replaced by the refusal of these requests.

use serde::Deserialize;

use super::{
    destination_rule::WorkloadSelector, mesh_config::IgnoredValue, security::TargetRef, telemetry::Mode,
    value::PortSelector,
};

/// `spec` of a WasmPlugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WasmPlugin {
    /// Workloads that it selects; unset: the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Gateway that it is attached to.
    pub target_ref: Option<TargetRef>,
    /// Gateways that it is attached to.
    pub target_refs: Vec<TargetRef>,
    /// URL of the module.
    pub url: String,
    /// Checksum of the module.
    pub sha256: String,
    /// Whether the module is fetched again.
    pub image_pull_policy: String,
    /// Secret for the registry.
    pub image_pull_secret: String,
    /// Key of the module's signature.
    pub verification_key: String,
    /// Configuration of the plugin.
    pub plugin_config: IgnoredValue,
    /// Name of the plugin in the module.
    pub plugin_name: String,
    /// Place among the filters.
    pub phase: Phase,
    /// Rank within the phase; the highest first, the lowest if unset.
    pub priority: Option<i32>,
    /// Treatment of requests while the plugin cannot run.
    pub fail_strategy: FailStrategy,
    /// Environment of the module.
    pub vm_config: VmConfig,
    /// Traffic that passes the plugin; empty: all.
    #[serde(rename = "match")]
    pub matches: Vec<TrafficSelector>,
    /// Type of the filter.
    #[serde(rename = "type")]
    pub filter_type: PluginType,
}

/// `spec` of a TrafficExtension.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TrafficExtension {
    /// Workloads that it selects; unset: the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Gateways that it is attached to.
    pub target_refs: Vec<TargetRef>,
    /// Place among the filters.
    pub phase: Phase,
    /// Rank within the phase; the highest first, the lowest if unset.
    pub priority: Option<i32>,
    /// Traffic that passes the extension; empty: all.
    #[serde(rename = "match")]
    pub matches: Vec<TrafficSelector>,
    /// Wasm module.
    pub wasm: Option<WasmConfig>,
    /// Lua script.
    pub lua: Option<LuaConfig>,
}

/// Wasm module of a TrafficExtension.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WasmConfig {
    /// URL of the module.
    pub url: String,
    /// Checksum of the module.
    pub sha256: String,
    /// Whether the module is fetched again.
    pub image_pull_policy: String,
    /// Secret for the registry.
    pub image_pull_secret: String,
    /// Key of the module's signature.
    pub verification_key: String,
    /// Name of the plugin in the module.
    pub plugin_name: String,
    /// Configuration of the plugin.
    pub plugin_config: IgnoredValue,
    /// Treatment of requests while the plugin cannot run.
    pub fail_strategy: FailStrategy,
    /// Environment of the module.
    pub vm_config: VmConfig,
    /// Type of the filter.
    #[serde(rename = "type")]
    pub filter_type: PluginType,
}

/// Maximum size in bytes of a Lua script. Source: `istio.extensions.v1alpha1.LuaConfig`.
pub const MAX_SCRIPT: usize = 64 << 10;

/// Maximum number of different Lua scripts of one proxy. A worker has a Lua state for each.
pub const MAX_SCRIPTS: usize = 64;
/// Maximum size in bytes of the different Lua scripts of one proxy. Each filter chain has a copy.
pub const MAX_SCRIPTS_SIZE: usize = 1 << 20;

/// Lua script of a TrafficExtension.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LuaConfig {
    /// Text of the script.
    pub inline_code: String,
}

/// Place of an extension among the filters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Phase {
    /// Before the verification of tokens.
    Authn,
    /// After it, and before authorization.
    Authz,
    /// After authorization.
    Stats,
    /// After all of these; `UNSPECIFIED` in a TrafficExtension, `UNSPECIFIED_PHASE` in a WasmPlugin.
    #[default]
    #[serde(alias = "UNSPECIFIED_PHASE")]
    Unspecified,
}

impl Phase {
    /// Returns whether extensions of the phase may decide which requests pass.
    pub const fn decides(self) -> bool {
        matches!(self, Self::Authn | Self::Authz)
    }
}

/// Treatment of requests while a plugin cannot run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum FailStrategy {
    /// Refuses them.
    #[default]
    FailClose,
    /// Passes them on without the plugin.
    FailOpen,
    /// Starts the plugin again, and refuses them if that fails.
    FailReload,
}

/// Type of the filter of a Wasm plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum PluginType {
    /// HTTP filter.
    #[default]
    #[serde(alias = "UNSPECIFIED_PLUGIN_TYPE")]
    Http,
    /// Network filter.
    Network,
}

/// Environment of a module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct VmConfig {
    /// Variables.
    pub env: Vec<IgnoredValue>,
}

/// Traffic that passes an extension; all fields must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TrafficSelector {
    /// Side.
    pub mode: Mode,
    /// Ports of the destination; empty: all.
    pub ports: Vec<PortSelector>,
}

impl TrafficSelector {
    /// Returns whether traffic on this side to this port passes the extension.
    pub fn matches(&self, side: Mode, port: u16) -> bool {
        let is_port = || self.ports.iter().any(|of| of.number == u32::from(port));
        self.mode.covers(side) && (self.ports.is_empty() || is_port())
    }
}

impl WasmPlugin {
    /// Returns whether requests must not pass without the plugin.
    pub fn must_run(&self) -> bool {
        self.phase.decides() && self.fail_strategy != FailStrategy::FailOpen
    }
}

impl TrafficExtension {
    /// Returns its Wasm module if requests must not pass without it.
    pub fn required_module(&self) -> Option<&WasmConfig> {
        self.wasm.as_ref().filter(|wasm| self.phase.decides() && wasm.fail_strategy != FailStrategy::FailOpen)
    }
}
