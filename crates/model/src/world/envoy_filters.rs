//! EnvoyFilters of a proxy, and the groups of proxies for which shared resources are patched in the same way.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{World, store::Entry};
use crate::{
    ProxyView,
    api::{EnvoyFilter, Labels, Typed, envoy_filter::ConfigPatch, selects},
    origin::Origin,
};

/// Label of the proxies of a gateway: its name.
const GATEWAY: &str = "gateway.networking.k8s.io/gateway-name";
/// Label of the proxies of a gateway: the name of its class.
const GATEWAY_CLASS: &str = "gateway.networking.k8s.io/gateway-class-name";

/// Patches of an EnvoyFilter that apply to a proxy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FilterSelection {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Positions of the patches, ascending.
    pub patches: Vec<usize>,
}

/// EnvoyFilters with patches of shared resources, in the order of application.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SharedFilters {
    root_namespace: String,
    filters: Vec<Arc<Typed<EnvoyFilter>>>,
}

impl SharedFilters {
    /// Returns the patches of shared resources that apply to a proxy, in the order of application.
    pub(crate) fn of(&self, view: &ProxyView) -> Vec<FilterSelection> {
        let applying = self.filters.iter().filter(|filter| applies(filter, view, &self.root_namespace));
        let selections = applying.map(|filter| FilterSelection {
            namespace: filter.meta.namespace.clone(),
            name: filter.meta.name.clone(),
            patches: patches(filter, view, |patch| patch.apply_to.is_shared()),
        });
        selections.filter(|selection| !selection.patches.is_empty()).collect()
    }
}

impl World {
    /// Returns the EnvoyFilters with patches of shared resources.
    pub(super) fn shared_filters(&self) -> SharedFilters {
        let mut entries: Vec<&Entry<EnvoyFilter>> = self.envoy_filters.iter().collect();
        entries
            .retain(|entry| entry.object.spec.config_patches.iter().any(|patch| patch.apply_to.is_shared()));
        if entries.is_empty() {
            return SharedFilters::default();
        }
        let filters = self.sorted(entries).map(|entry| Arc::clone(&entry.object)).collect();
        SharedFilters { root_namespace: self.mesh().root_namespace.clone(), filters }
    }

    /// Returns the patches that apply to a proxy, in the order of application.
    pub(crate) fn filters_of(&self, view: &ProxyView) -> Vec<FilterSelection> {
        let root = self.mesh().root_namespace.as_str();
        let mut entries: Vec<&Entry<EnvoyFilter>> = self.envoy_filters.in_namespace(root).collect();
        if view.namespace != root {
            entries.extend(self.envoy_filters.in_namespace(&view.namespace));
        }
        entries.retain(|entry| applies(&entry.object, view, root));
        let selections = self.sorted(entries).map(|entry| FilterSelection {
            namespace: entry.object.meta.namespace.clone(),
            name: entry.object.meta.name.clone(),
            patches: patches(&entry.object, view, |_| true),
        });
        selections.filter(|selection| !selection.patches.is_empty()).collect()
    }

    /// Returns an EnvoyFilter and where it was read.
    pub(crate) fn envoy_filter(
        &self,
        namespace: &str,
        name: &str,
    ) -> Option<(&Arc<Typed<EnvoyFilter>>, &Origin)> {
        self.envoy_filters.get(namespace, name).map(|entry| (&entry.object, &entry.origin))
    }

    /// Reduces the metadata of a proxy to those that EnvoyFilters compare; a missing one is empty. Views therefore
    /// differ only in metadata that matter.
    pub(super) fn reduce_metadata(&self, view: &mut ProxyView) {
        let patches = self.envoy_filters.iter().flat_map(|entry| &entry.object.spec.config_patches);
        let keys: BTreeSet<&str> = patches.flat_map(ConfigPatch::metadata_keys).collect();
        if keys.is_empty() && view.metadata.is_empty() {
            return;
        }
        let of = |key: &str| view.metadata.get(key).cloned().unwrap_or_default();
        let reduced: BTreeMap<String, String> =
            keys.into_iter().map(|key| (key.to_owned(), of(key))).collect();
        if *view.metadata != reduced {
            view.metadata = Arc::new(reduced);
        }
    }

    /// Sorts EnvoyFilters: by priority, those of the root namespace first, then by age.
    fn sorted<'a>(
        &self,
        mut entries: Vec<&'a Entry<EnvoyFilter>>,
    ) -> impl Iterator<Item = &'a Entry<EnvoyFilter>> {
        let root = &self.mesh().root_namespace;
        entries.sort_by(|a, b| {
            let is_narrow = |entry: &Entry<EnvoyFilter>| entry.object.meta.namespace != *root;
            let first = |entry: &Entry<EnvoyFilter>| (entry.object.spec.priority, is_narrow(entry));
            first(a).cmp(&first(b)).then_with(|| a.age().cmp(&b.age()))
        });
        entries.into_iter()
    }
}

/// Returns whether an EnvoyFilter selects a proxy.
pub(super) fn applies(filter: &Typed<EnvoyFilter>, view: &ProxyView, root: &str) -> bool {
    let namespace = &filter.meta.namespace;
    if namespace != root && *namespace != view.namespace {
        return false;
    }
    if !filter.spec.target_refs.is_empty() {
        let is_named = |label: &str, name: &str| view.labels.get(label).is_some_and(|of| of == name);
        return filter.spec.target_refs.iter().any(|target| match target.kind.as_str() {
            "Gateway" => *namespace == view.namespace && is_named(GATEWAY, &target.name),
            "GatewayClass" => namespace == root && is_named(GATEWAY_CLASS, &target.name),
            _ => false,
        });
    }
    let nothing = Labels::new();
    let labels = filter.spec.workload_selector.as_ref().map_or(&nothing, |selector| &selector.labels);
    selects(labels, &view.labels)
}

fn patches(
    filter: &Typed<EnvoyFilter>,
    view: &ProxyView,
    is_wanted: impl Fn(&ConfigPatch) -> bool,
) -> Vec<usize> {
    let patches = filter.spec.config_patches.iter().enumerate();
    let wanted = patches.filter(|(_, patch)| is_wanted(patch) && patch.takes(&view.metadata));
    wanted.map(|(index, _)| index).collect()
}
