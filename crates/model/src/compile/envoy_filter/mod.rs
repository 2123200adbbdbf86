//! EnvoyFilter: patches of the compiled resources, applied as Istio applies them.
//!
//! Patches see the encoded resources as messages ([`reflect`]), so that the rest of the compile step does
//! not know about them. A proxy without EnvoyFilters pays nothing.
//!
//! - [`edit`]: changes of ordered lists
//! - [`cluster`], [`listener`], [`route`]: conditions and operations by type

mod cluster;
mod edit;
mod listener;
mod route;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, sync::Arc};

use prost_reflect::DynamicMessage;
use skysail_xds::{Kind, Resource, Resources};

use crate::{
    ClientScope, Code, Diagnostic, ObjectKey, ProxyView, Role, World,
    api::{
        self, EnvoyFilter, Typed,
        envoy_filter::{ApplyTo, ConfigPatch, Context, PatchOperation},
        kube::TargetPort,
    },
    origin::Origin,
    reflect::{self, Lists},
    world::FilterSelection,
};

/// A patch that applies to a proxy.
#[derive(Clone, Copy)]
struct ApplicablePatch<'a> {
    filter: &'a Typed<EnvoyFilter>,
    origin: &'a Origin,
    /// Position in the EnvoyFilter.
    index: usize,
    config: &'a ConfigPatch,
    operation: PatchOperation,
}

impl<'a> ApplicablePatch<'a> {
    /// Returns the value; `None` for `REMOVE`.
    fn value(&self) -> Option<&'a DynamicMessage> {
        self.config.value()
    }

    /// Returns how a merge treats lists; `None` for other operations.
    fn merges(&self) -> Option<Lists> {
        match self.operation {
            PatchOperation::Merge => Some(Lists::Append),
            PatchOperation::MergeAndReplaceList => Some(Lists::Replace),
            _ => None,
        }
    }

    /// Returns whether an addition with this patch belongs to a context. Without a context it belongs to the outbound
    /// side of sidecars, and to gateways.
    fn adds_in(&self, context: Context) -> bool {
        let written = self.config.matched.context;
        written == context || written == Context::Any && context != Context::SidecarInbound
    }
}

/// Patches of a proxy or scope in the order of application.
struct Patches<'a>(Vec<ApplicablePatch<'a>>);

impl<'a> Patches<'a> {
    fn new(world: &'a World, selections: &[FilterSelection]) -> Self {
        let found = selections.iter().filter_map(|selection| {
            let (filter, origin) = world.envoy_filter(&selection.namespace, &selection.name)?;
            Some((&**filter, origin, &selection.patches))
        });
        let patches = found.flat_map(|(filter, origin, indexes)| {
            let configs =
                indexes.iter().filter_map(|&index| Some((index, filter.spec.config_patches.get(index)?)));
            configs.map(move |(index, config)| ApplicablePatch {
                filter,
                origin,
                index,
                config,
                operation: config.operation(),
            })
        });
        // A value that is no message was refused before; only REMOVE has none.
        let is_usable = |patch: &ApplicablePatch<'_>| {
            patch.operation == PatchOperation::Remove || patch.value().is_some()
        };
        Self(patches.filter(is_usable).collect())
    }

    /// Returns the patches of a part in a context.
    fn of(&self, apply_to: ApplyTo, context: Context) -> impl Iterator<Item = &ApplicablePatch<'a>> {
        self.0.iter().filter(move |patch| {
            let written = patch.config.matched.context;
            patch.config.apply_to == apply_to && (written == context || written == Context::Any)
        })
    }

    fn has(&self, parts: &[ApplyTo]) -> bool {
        self.0.iter().any(|patch| parts.contains(&patch.config.apply_to))
    }
}

/// Warnings about patches that could not be applied, once each.
#[derive(Default)]
struct Warnings {
    seen: BTreeSet<(String, String, usize)>,
    list: Vec<Diagnostic>,
}

impl Warnings {
    fn add(&mut self, patch: &ApplicablePatch<'_>, message: String) {
        let meta = &patch.filter.meta;
        if !self.seen.insert((meta.namespace.clone(), meta.name.clone(), patch.index)) {
            return;
        }
        let key = ObjectKey {
            kind: api::Kind::EnvoyFilter,
            namespace: meta.namespace.clone(),
            name: meta.name.clone(),
        };
        let field = format!("spec.configPatches[{}].patch.value", patch.index);
        let line = patch.origin.line_of(&field);
        let warning = Diagnostic::new(Code::PatchWithoutEffect, &patch.origin.file, line, message);
        self.list.push(warning.object(&key).field(field).remedy("write a value of the same type"));
    }
}

/// Returns the context of a proxy's outbound resources.
fn outbound_context(role: Role) -> Context {
    if role == Role::Router { Context::Gateway } else { Context::SidecarOutbound }
}

/// Patches shared resources of proxies with this client scope.
pub(super) fn patch_shared(
    world: &World,
    client_scope: &ClientScope,
    made: Vec<Arc<Resource>>,
) -> Vec<Arc<Resource>> {
    if client_scope.filters.is_empty() || client_scope.role == Role::Grpc {
        return made;
    }
    let patches = Patches::new(world, &client_scope.filters);
    let context = outbound_context(client_scope.role);
    let made = cluster::patch_all(&patches, context, made, &mut Warnings::default());
    route::patch_all(&patches, context, &[], made)
}

/// Patches the resources that depend on a proxy's workload, and adds those that patches add.
pub(super) fn patch_own(world: &World, view: &ProxyView, made: Resources) -> (Resources, Vec<Diagnostic>) {
    let selections = if view.role == Role::Grpc { Vec::new() } else { world.filters_of(view) };
    if selections.is_empty() {
        return (made, Vec::new());
    }
    let patches = Patches::new(world, &selections);
    let context = outbound_context(view.role);
    let mut warnings = Warnings::default();
    let all = Kind::ALL.into_iter().flat_map(|kind| made.iter(kind).cloned()).collect();
    let all = cluster::patch_all(&patches, context, all, &mut warnings);
    let all = listener::patch_all(&patches, context, all, &mut warnings);
    let all = route::patch_all(&patches, context, &gateway_ports(world, view), all);
    let mut patched = Resources::default();
    all.into_iter().for_each(|resource| patched.insert(resource));
    cluster::added(&patches, view.role).for_each(|resource| patched.insert(resource));
    for patch in patches.0.iter().filter(|patch| patch.config.apply_to == ApplyTo::ExtensionConfig) {
        if patch.operation == PatchOperation::Add {
            patch.value().into_iter().for_each(|value| patched.insert(encode(Kind::ExtensionConfig, value)));
        }
    }
    (patched, warnings.list)
}

/// Returns the ports of a gateway, each with a port of a service that leads to it.
fn gateway_ports(world: &World, view: &ProxyView) -> Vec<(u32, u32)> {
    if view.role != Role::Router {
        return Vec::new();
    }
    let services = world.services_selecting(&view.namespace, &view.labels);
    let ports = services.into_iter().flat_map(|service| &service.spec.ports);
    let targets = ports.filter_map(|port| {
        let target = match &port.target {
            TargetPort::Number(number) => *number,
            TargetPort::Name(name) => *view.named_ports.get(name)?,
        };
        Some((u32::from(target), u32::from(port.port)))
    });
    targets.collect()
}

/// Encodes a resource under its own name.
fn encode(kind: Kind, message: &DynamicMessage) -> Arc<Resource> {
    Resource::from_body(kind, &reflect::text(message, "name"), reflect::encode(message).into())
}

/// Decodes a resource; `None` if its type has no descriptor.
fn decode(resource: &Resource) -> Option<DynamicMessage> {
    reflect::decode(resource.kind.url().rsplit('/').next()?, &resource.body)
}

/// Merges the content of `typed_config` of a filter of any kind.
fn merge_config(filter: &mut DynamicMessage, patch: &ApplicablePatch<'_>, warnings: &mut Warnings) {
    let from = patch.value().and_then(|value| reflect::child(value, "typed_config"));
    let (Some(from), Some(to)) = (from, reflect::child_mut(filter, "typed_config")) else { return };
    if let Err(reason) = reflect::merge_any(to, from) {
        warnings.add(patch, format!("the patch is not applied: {reason}"));
    }
}
