//! WasmPlugins and TrafficExtensions of a workload.

use super::{
    World, policy,
    store::{Age, Entry},
};
use crate::{
    ProxyView,
    api::{
        Kind, Meta, TrafficExtension, Typed, WasmPlugin,
        extension::{Phase, PluginType, TrafficSelector},
        telemetry::Mode,
    },
};

/// An extension that applies to a proxy.
#[derive(Clone, Debug)]
pub(crate) struct AppliedExtension<'a> {
    pub(crate) kind: Kind,
    pub(crate) meta: &'a Meta,
    pub(crate) phase: Phase,
    pub(crate) effect: ExtensionEffect<'a>,
    priority: i32,
    matches: &'a [TrafficSelector],
}

/// Effect of an extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExtensionEffect<'a> {
    /// Runs a Lua script.
    Lua(&'a str),
    /// Refuses requests, as its Wasm module cannot run.
    RefusesRequests,
    /// Refuses connections, as its Wasm module cannot run.
    RefusesConnections,
}

impl AppliedExtension<'_> {
    /// Returns whether traffic on this side to this port passes the extension.
    pub(crate) fn matches(&self, side: Mode, port: u16) -> bool {
        self.matches.is_empty() || self.matches.iter().any(|found| found.matches(side, port))
    }
}

impl World {
    /// Returns the extensions of a proxy with an effect, by phase and priority. As in Istio, those of its namespace are
    /// first among equals, then the oldest.
    pub(crate) fn extensions(&self, view: &ProxyView) -> Vec<AppliedExtension<'_>> {
        let root = Some(self.mesh().root_namespace.as_str()).filter(|root| *root != view.namespace);
        let mut applied = Vec::new();
        for of in std::iter::once(view.namespace.as_str()).chain(root) {
            let own = of == view.namespace;
            let mut found: Vec<(Age<'_>, AppliedExtension<'_>)> = Vec::new();
            let plugins = self.wasm_plugins.in_namespace(of);
            found.extend(plugins.filter_map(|entry| Some((entry.age(), of_plugin(entry, view, own)?))));
            let extensions = self.traffic_extensions.in_namespace(of);
            found.extend(extensions.filter_map(|entry| Some((entry.age(), of_extension(entry, view, own)?))));
            found.sort_by(|a, b| a.0.cmp(&b.0));
            applied.extend(found.into_iter().map(|(_, extension)| extension));
        }
        applied.sort_by_key(|extension| (extension.phase, std::cmp::Reverse(extension.priority)));
        applied
    }
}

fn of_plugin<'a>(entry: &'a Entry<WasmPlugin>, view: &ProxyView, own: bool) -> Option<AppliedExtension<'a>> {
    let Typed { meta, spec } = &*entry.object;
    let targets = spec.target_ref.iter().chain(&spec.target_refs);
    let applies = spec.must_run() && policy::applies(spec.selector.as_ref(), targets, own, &view.labels);
    applies.then(|| AppliedExtension {
        kind: Kind::WasmPlugin,
        meta,
        phase: spec.phase,
        effect: ExtensionEffect::without(spec.filter_type),
        priority: spec.priority.unwrap_or(i32::MIN),
        matches: &spec.matches,
    })
}

fn of_extension<'a>(
    entry: &'a Entry<TrafficExtension>,
    view: &ProxyView,
    own: bool,
) -> Option<AppliedExtension<'a>> {
    let Typed { meta, spec } = &*entry.object;
    let script = spec.lua.as_ref().map(|lua| ExtensionEffect::Lua(&lua.inline_code));
    let refusal = spec.required_module().map(|wasm| ExtensionEffect::without(wasm.filter_type));
    let effect = script.or(refusal)?;
    let applies = policy::applies(spec.selector.as_ref(), spec.target_refs.iter(), own, &view.labels);
    applies.then(|| AppliedExtension {
        kind: Kind::TrafficExtension,
        meta,
        phase: spec.phase,
        effect,
        priority: spec.priority.unwrap_or(i32::MIN),
        matches: &spec.matches,
    })
}

impl ExtensionEffect<'_> {
    fn without(module: PluginType) -> Self {
        match module {
            PluginType::Http => Self::RefusesRequests,
            PluginType::Network => Self::RefusesConnections,
        }
    }
}
