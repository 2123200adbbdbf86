//! WasmPlugins and TrafficExtensions of a workload.

use std::collections::BTreeSet;

use super::{
    World, policy,
    store::{Age, Entry},
};
use crate::api::{
    Kind, Labels, Meta, TrafficExtension, Typed, WasmPlugin,
    extension::{MAX_SCRIPTS, MAX_SCRIPTS_SIZE, Phase, PluginType, TrafficSelector},
    telemetry::Mode,
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
    /// Refuses requests, as its Wasm module cannot run or its script is beyond the limits.
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
    /// first among equals, then the oldest. In place of scripts beyond the limits, requests are refused.
    pub(crate) fn extensions(&self, namespace: &str, labels: &Labels) -> Vec<AppliedExtension<'_>> {
        let root = self.mesh().root_namespace.as_str();
        let mut scripts = Scripts::default();
        // Those of the mesh are counted first, so that no namespace can displace them.
        let of_mesh = if namespace == root { Vec::new() } else { self.extensions_in(root, false, labels) };
        let of_mesh = scripts.limit(of_mesh);
        let mut applied = scripts.limit(self.extensions_in(namespace, true, labels));
        applied.extend(of_mesh);
        applied.sort_by_key(|extension| (extension.phase, std::cmp::Reverse(extension.priority)));
        applied
    }

    /// Returns the extensions of a namespace that apply to a workload, the oldest first.
    fn extensions_in(&self, of: &str, own: bool, labels: &Labels) -> Vec<AppliedExtension<'_>> {
        let mut found: Vec<(Age<'_>, AppliedExtension<'_>)> = Vec::new();
        let plugins = self.wasm_plugins.in_namespace(of);
        found.extend(plugins.filter_map(|entry| Some((entry.age(), of_plugin(entry, labels, own)?))));
        let extensions = self.traffic_extensions.in_namespace(of);
        found.extend(extensions.filter_map(|entry| Some((entry.age(), of_extension(entry, labels, own)?))));
        found.sort_by(|a, b| a.0.cmp(&b.0));
        found.into_iter().map(|(_, extension)| extension).collect()
    }

    /// Returns whether the script of an extension is beyond the limits at a workload to which all extensions of the
    /// namespace apply. The workloads are not examined, because their number is not limited.
    pub(crate) fn exceeds_scripts(&self, extension: &Typed<TrafficExtension>) -> bool {
        let Some(own) = &extension.spec.lua else { return false };
        let namespace = extension.meta.namespace.as_str();
        let root = Some(self.mesh().root_namespace.as_str()).filter(|root| *root != namespace);
        let mut scripts = Scripts::default();
        for of in root.into_iter().chain([namespace]) {
            let mut entries: Vec<_> = self.traffic_extensions.in_namespace(of).collect();
            entries.sort_by(|a, b| a.age().cmp(&b.age()));
            let before = entries.iter().take_while(|entry| !std::ptr::eq(&*entry.object, extension));
            let mut before = before.filter_map(|entry| entry.object.spec.lua.as_ref());
            // None of the scripts after one that does not fit is counted.
            let _ = before.all(|lua| scripts.add(&lua.inline_code));
        }
        !scripts.add(&own.inline_code)
    }
}

/// The different scripts of a proxy.
#[derive(Default)]
struct Scripts<'a> {
    known: BTreeSet<&'a str>,
    size: usize,
}

impl<'a> Scripts<'a> {
    /// Replaces scripts beyond the limits: they may decide which requests pass.
    fn limit(&mut self, mut extensions: Vec<AppliedExtension<'a>>) -> Vec<AppliedExtension<'a>> {
        for extension in &mut extensions {
            if let ExtensionEffect::Lua(script) = extension.effect
                && !self.add(script)
            {
                extension.effect = ExtensionEffect::RefusesRequests;
            }
        }
        extensions
    }

    /// Adds a script; returns whether it is within the limits.
    fn add(&mut self, script: &'a str) -> bool {
        if self.known.contains(script) {
            return true;
        }
        let fits = self.known.len() < MAX_SCRIPTS && self.size + script.len() <= MAX_SCRIPTS_SIZE;
        if fits {
            self.size += script.len();
            self.known.insert(script);
        }
        fits
    }
}

fn of_plugin<'a>(entry: &'a Entry<WasmPlugin>, labels: &Labels, own: bool) -> Option<AppliedExtension<'a>> {
    let Typed { meta, spec } = &*entry.object;
    let targets = spec.target_ref.iter().chain(&spec.target_refs);
    let applies = spec.must_run() && policy::applies(spec.selector.as_ref(), targets, own, labels);
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
    labels: &Labels,
    own: bool,
) -> Option<AppliedExtension<'a>> {
    let Typed { meta, spec } = &*entry.object;
    let script = spec.lua.as_ref().map(|lua| ExtensionEffect::Lua(&lua.inline_code));
    let refusal = spec.required_module().map(|wasm| ExtensionEffect::without(wasm.filter_type));
    let effect = script.or(refusal)?;
    let applies = policy::applies(spec.selector.as_ref(), spec.target_refs.iter(), own, labels);
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
