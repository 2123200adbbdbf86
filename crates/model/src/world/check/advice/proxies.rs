//! Sidecars, Telemetries and EnvoyFilters: several for one workload, hosts that match nothing, and patches that
//! depend on the order of others.

use std::collections::BTreeMap;

use super::{
    super::{ObjectReport, Report, label_text, runs_in, workloads},
    MAX_PAIRS,
};
use crate::{
    analysis::Code,
    api::{
        Kind, Labels, Sidecar, Telemetry,
        envoy_filter::{ApplyTo, ConfigPatch, PatchOperation},
        selects,
    },
    world::{hosts::host_matches, store::Entry},
};

/// Prefixes of filters that each proxy has, so that a patch finds them in any order.
const BUILT_IN: &[&str] = &[
    "envoy.filters.network.http_connection_manager",
    "envoy.filters.network.tcp_proxy",
    "envoy.filters.http.router",
    "istio.",
];

/// Objects with a selector of one kind in one namespace.
type SelectorUsers<'a, T> = Vec<(&'a Entry<T>, Option<&'a Labels>)>;

impl Report<'_> {
    /// Reports Sidecars that select nothing, the same workload, or hosts that do not exist.
    pub(super) fn sidecars(&mut self) {
        let world = self.world.unrecorded();
        let mut namespaces: BTreeMap<&str, SelectorUsers<'_, Sidecar>> = BTreeMap::new();
        for entry in world.sidecars.iter() {
            let selector = entry.object.spec.workload_selector.as_ref().map(|selector| &selector.labels);
            let selector = selector.filter(|labels| !labels.is_empty());
            namespaces.entry(&entry.object.meta.namespace).or_default().push((entry, selector));
            self.sidecar_hosts(&ObjectReport { entry, kind: Kind::Sidecar });
        }
        let codes = [Code::SidecarConflict, Code::SidecarWithoutSelector];
        self.several(namespaces, Kind::Sidecar, codes, "spec.workloadSelector");
    }

    /// Reports Telemetries that select nothing or the same workload.
    pub(super) fn several_telemetries(&mut self) {
        let world = self.world.unrecorded();
        let mut namespaces: BTreeMap<&str, SelectorUsers<'_, Telemetry>> = BTreeMap::new();
        let attached = |of: &Telemetry| of.target_ref.is_some() || !of.target_refs.is_empty();
        for entry in world.telemetries.iter().filter(|entry| !attached(&entry.object.spec)) {
            let selector = entry.object.spec.selector.as_ref().map(|selector| &selector.match_labels);
            let selector = selector.filter(|labels| !labels.is_empty());
            namespaces.entry(&entry.object.meta.namespace).or_default().push((entry, selector));
        }
        let codes = [Code::TelemetryConflict, Code::TelemetryWithoutSelector];
        self.several(namespaces, Kind::Telemetry, codes, "spec.selector");
    }

    /// Reports objects of a namespace that select the same workload, have no selector, or select nothing.
    fn several<T>(
        &mut self,
        namespaces: BTreeMap<&str, SelectorUsers<'_, T>>,
        kind: Kind,
        [same, without]: [Code; 2],
        field: &str,
    ) {
        let any = self.world.unrecorded().pods().next().is_some()
            || self.world.unrecorded().templates().next().is_some();
        let (mut pairs, mut is_cut) = (0, false);
        for (namespace, objects) in namespaces {
            let name = |entry: &Entry<T>| ObjectReport { entry, kind }.name();
            let wide: Vec<&Entry<T>> =
                objects.iter().filter(|(_, selector)| selector.is_none()).map(|(entry, _)| *entry).collect();
            for (index, entry) in wide.iter().enumerate().filter(|_| wide.len() > 1) {
                let other = name(wide[usize::from(index == 0)]);
                let message = format!("{other} of the namespace has no selector either");
                let about = ObjectReport { entry, kind };
                self.report(&about, without, "spec", message, "merge them, or add a selector");
            }
            let narrow: SelectorUsers<'_, T> =
                objects.into_iter().filter(|(_, selector)| selector.is_some()).collect();
            let root = namespace == self.world.unrecorded().mesh().root_namespace;
            for (entry, selector) in &narrow {
                let Some(selector) = selector.filter(|_| any) else { continue };
                let within = (!root).then_some(namespace);
                if workloads(self.world.unrecorded(), within, selector).next().is_none() {
                    let message = format!("no workload has {}, so it has no effect", label_text(selector));
                    let about = ObjectReport { entry, kind };
                    self.report(&about, Code::SelectsNothing, field, message, "check labels and namespace");
                }
            }
            pairs +=
                narrow.len() * workloads(self.world.unrecorded(), Some(namespace), &Labels::new()).count();
            if narrow.len() < 2 {
                continue;
            }
            if pairs > MAX_PAIRS {
                if !std::mem::replace(&mut is_cut, true) {
                    self.incomplete(&ObjectReport { entry: narrow[0].0, kind }, &[same]);
                }
                continue;
            }
            for labels in
                workloads(self.world.unrecorded(), Some(namespace), &Labels::new()).collect::<Vec<_>>()
            {
                let selecting: Vec<&Entry<T>> = narrow
                    .iter()
                    .filter(|(_, selector)| selector.is_some_and(|selector| selects(selector, labels)))
                    .map(|(entry, _)| *entry)
                    .collect();
                for (index, entry) in selecting.iter().enumerate().filter(|_| selecting.len() > 1) {
                    let other = name(selecting[usize::from(index == 0)]);
                    let message = format!("{other} selects the workload with {} too", label_text(labels));
                    let about = ObjectReport { entry, kind };
                    self.report(&about, same, field, message, "merge them, or change a selector");
                }
            }
        }
    }

    /// Reports hosts of egress listeners that match no service.
    fn sidecar_hosts(&mut self, about: &ObjectReport<'_, Sidecar>) {
        let world = self.world.unrecorded();
        if world.services().next().is_none() {
            return;
        }
        for (listener, egress) in about.entry.object.spec.egress.iter().enumerate() {
            for (index, written) in egress.hosts.iter().enumerate() {
                let Some((namespace, host)) = written.split_once('/') else { continue };
                let (namespace, verb) = match namespace.strip_prefix('~') {
                    Some("") => ("*", "excludes"),
                    Some(excluded) => (excluded, "excludes"),
                    None => (namespace, "imports"),
                };
                if host == "*" && (matches!(namespace, "*" | ".") || runs_in(world, namespace)) {
                    continue;
                }
                let within = |of: &str| match namespace {
                    "*" => true,
                    "." => of == about.namespace(),
                    named => of == named,
                };
                let mut services = world.services().filter(|service| within(&service.meta.namespace));
                let is_host = |name: &str| host == "*" || host_matches(host, name);
                let mut rules =
                    world.virtual_services.iter().filter(|rule| within(&rule.object.meta.namespace));
                let found = services.any(|service| is_host(&service.fqdn()))
                    || rules.any(|rule| rule.object.spec.hosts.iter().any(|name| is_host(name)));
                if !found {
                    let message = format!("{written} matches no service, so it {verb} nothing");
                    let field = format!("spec.egress[{listener}].hosts[{index}]");
                    let remedy = "check the namespace, and write full names: NAMESPACE/NAME.NAMESPACE.svc.cluster.local";
                    self.report(about, Code::SidecarHostNotFound, field, message, remedy);
                }
            }
        }
    }

    /// Reports patches that depend on the order of other filters.
    pub(super) fn envoy_filters(&mut self) {
        let world = self.world.unrecorded();
        for entry in world.envoy_filters.iter() {
            let about = ObjectReport { entry, kind: Kind::EnvoyFilter };
            for (index, patch) in entry.object.spec.config_patches.iter().enumerate() {
                let Some(operation) = patch.patch.as_ref().map(|patch| patch.operation) else { continue };
                let field = format!("spec.configPatches[{index}].patch.operation");
                if entry.object.spec.priority == 0 && is_relative(operation, patch) {
                    let message = "depends on the patches before it, and the EnvoyFilter has no priority";
                    let remedy = "set priority, or use INSERT_FIRST or ADD";
                    self.report(&about, Code::RelativePatch, field, message, remedy);
                }
            }
        }
    }
}

/// Returns whether the result of a patch depends on the patches before it.
fn is_relative(operation: PatchOperation, patch: &ConfigPatch) -> bool {
    use {ApplyTo as To, PatchOperation as Op};
    let is_filter = matches!(patch.apply_to, To::HttpFilter | To::NetworkFilter);
    match operation {
        Op::InsertBefore | Op::InsertAfter => true,
        Op::Replace => is_filter || patch.apply_to == To::VirtualHost,
        Op::Remove => !matches!(patch.apply_to, To::RouteConfiguration | To::HttpRoute),
        Op::Merge => is_filter && needs_other_patch(patch),
        _ => false,
    }
}

/// Returns whether a patch names a filter that only another EnvoyFilter adds.
fn needs_other_patch(patch: &ConfigPatch) -> bool {
    let listener = patch.matched.listener.as_ref();
    let filter = listener.and_then(|of| of.filter_chain.as_ref()?.filter.as_ref());
    let name = match patch.apply_to {
        ApplyTo::HttpFilter => {
            filter.and_then(|filter| filter.sub_filter.as_ref()).map(|of| of.name.as_str())
        }
        _ => filter.map(|filter| filter.name.as_str()),
    };
    name.is_some_and(|name| !BUILT_IN.iter().any(|known| name.starts_with(known)))
}
