//! Endpoints that the proxies of one Kubernetes node prefer (`kubernetes.io/hostname`).
//!
//! The node is no part of a scope. The resources of a scope are those for a node without endpoints. A scope holds the
//! differences for each node of its proxies: the endpoints of services that have endpoints on that node. They are a
//! layer over that of the scope. If the scope lies over a base, they are in a copy of its layer, which lies over the base.
//!
//! Without a service whose endpoints depend on the node, there are no entries. The memory is bounded by the nodes of the
//! connected proxies, and by the number of endpoints: a node that a proxy makes up has no differences.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use skysail_model::{ChangeSet, ClientScope, World, compile_on_nodes, services_by_node};
use skysail_xds::{Kind, Layer, Resource, layer::Edits};

use super::compiler::{CompilePanic, catch_panic};
use crate::parallel;

/// Name of a Kubernetes node; empty: unknown.
pub(super) type NodeName = Arc<str>;
/// Differences by node.
pub(super) type Nodes = BTreeMap<NodeName, NodeResources>;
/// Namespace and name of a service.
type ServiceName = (String, String);
/// Compiled resources of services, by node; empty without a difference.
pub(super) type NodeChanges = BTreeMap<NodeName, Vec<(ServiceName, Vec<Arc<Resource>>)>>;

/// Differences of a scope's resources on a node. Clones share the layer.
#[derive(Clone, Default)]
pub(super) struct NodeResources {
    /// Layer that proxies on the node receive in place of the scope's differences from the layer below. `None` if there
    /// never was a difference.
    pub(super) layer: Option<Arc<Layer>>,
    /// Types and names of the resources that differ, by service.
    services: BTreeMap<ServiceName, Vec<(Kind, Arc<str>)>>,
}

impl NodeResources {
    fn resources_of(&self, service: &ServiceName) -> Vec<Arc<Resource>> {
        let Some(layer) = &self.layer else { return Vec::new() };
        let names = self.services.get(service).into_iter().flatten();
        names.filter_map(|(kind, name)| layer.get(*kind, name)).cloned().collect()
    }

    /// Returns all resources that differ.
    fn resources(&self) -> Vec<Arc<Resource>> {
        self.services.keys().flat_map(|service| self.resources_of(service)).collect()
    }
}

/// Layers of a scope around an update. `below` is the layer under those of the nodes.
pub(super) struct UpdatedLayers<'a> {
    /// Layer of the scope over the base; empty if the scope lies over none.
    pub(super) local_before: &'a Arc<Layer>,
    pub(super) local: &'a Layer,
    pub(super) below_before: &'a Layer,
    pub(super) below: &'a Layer,
}

impl UpdatedLayers<'_> {
    /// Returns a resource of the scope.
    fn get(&self, kind: Kind, name: &str) -> Option<&Arc<Resource>> {
        let layer = if self.local.hides(kind, name) { self.local } else { self.below };
        layer.get(kind, name)
    }
}

/// Compiles what may have changed on the nodes, for a scope that lies over no base. `new` are the nodes of its proxies.
pub(super) fn compile(
    world: &World,
    scope: &ClientScope,
    changes: &ChangeSet,
    nodes: &Nodes,
    new: &BTreeSet<NodeName>,
) -> Result<NodeChanges, CompilePanic> {
    let new: BTreeSet<&NodeName> = new.iter().filter(|node| !nodes.contains_key(*node)).collect();
    let mut made: NodeChanges = new.iter().map(|node| (Arc::clone(node), Vec::new())).collect();
    if nodes.is_empty() && new.is_empty() {
        return Ok(made);
    }
    let mut services: BTreeMap<ServiceName, Vec<&NodeName>> = BTreeMap::new();
    if changes.everything || !new.is_empty() {
        let by_node = catch_panic(|| "the services by node".to_owned(), || services_by_node(world, scope))?;
        services.extend(by_node.into_iter().map(|service| (service, new.iter().copied().collect())));
    }
    if changes.everything {
        let known = nodes.values().flat_map(|of_node| of_node.services.keys());
        known.for_each(|service| _ = services.entry(service.clone()).or_default());
        services.values_mut().for_each(|of| of.extend(nodes.keys()));
    }
    for service in &changes.services {
        let of = services.entry(service.clone()).or_default();
        of.extend(nodes.keys().filter(|_| !changes.everything));
    }
    compile_services(world, scope, services, nodes, &mut made)?;
    Ok(made)
}

/// Compiles what may have changed on the nodes, for a scope over a base. Only `special` services may differ from those of
/// the base.
pub(super) fn compile_over(
    world: &World,
    scope: &ClientScope,
    changes: &ChangeSet,
    (nodes, new): (&Nodes, &BTreeSet<NodeName>),
    (base, special): (&Nodes, &BTreeSet<ServiceName>),
) -> Result<NodeChanges, CompilePanic> {
    let mut made = NodeChanges::new();
    let mut specials: BTreeMap<ServiceName, Vec<&NodeName>> = BTreeMap::new();
    let none = NodeResources::default();
    for node in nodes.keys().chain(new.iter().filter(|node| !nodes.contains_key(*node))) {
        // The base compiles the node in a later round.
        let Some(of_base) = base.get(node) else { continue };
        let is_new = !nodes.contains_key(node);
        let of_node = nodes.get(node).unwrap_or(&none);
        let services = of_base.services.keys().chain(of_node.services.keys()).chain(special);
        let may_differ =
            |service: &&ServiceName| is_new || changes.everything || changes.services.contains(*service);
        let of_made = made.entry(Arc::clone(node)).or_default();
        for service in services.filter(may_differ).collect::<BTreeSet<_>>() {
            if special.contains(service) {
                specials.entry(service.clone()).or_default().push(node);
            } else {
                of_made.push((service.clone(), of_base.resources_of(service)));
            }
        }
    }
    compile_services(world, scope, specials, nodes, &mut made)?;
    Ok(made)
}

/// Compiles services, each for some nodes.
fn compile_services(
    world: &World,
    scope: &ClientScope,
    services: BTreeMap<ServiceName, Vec<&NodeName>>,
    known: &Nodes,
    made: &mut NodeChanges,
) -> Result<(), CompilePanic> {
    let services: Vec<_> = services.into_iter().filter(|(_, nodes)| !nodes.is_empty()).collect();
    let compiled = parallel::map(&services, |((namespace, name), nodes)| {
        catch_panic(
            || format!("the endpoints of service {namespace}/{name} by node"),
            || compile_on_nodes(world, scope, (namespace, name), nodes.iter().copied()),
        )
    });
    for ((service, nodes), compiled) in services.into_iter().zip(compiled) {
        let mut compiled: BTreeMap<&NodeName, Vec<Arc<Resource>>> = compiled?.into_iter().collect();
        for node in nodes {
            let resources = compiled.remove(node);
            let had = known.get(node).is_some_and(|of_node| of_node.services.contains_key(&service));
            if resources.is_some() || had {
                let of_node = made.entry(Arc::clone(node)).or_default();
                of_node.push((service.clone(), resources.unwrap_or_default()));
            }
        }
    }
    Ok(())
}

/// Applies the changes of a scope. `edits` are those of its layer, if it lies over a base.
pub(super) fn apply(
    nodes: &mut Arc<Nodes>,
    mut changes: NodeChanges,
    generation: u64,
    layers: &UpdatedLayers<'_>,
    edits: &Edits,
) {
    if nodes.is_empty() && changes.is_empty() {
        return;
    }
    let nodes = Arc::make_mut(nodes);
    changes.keys().for_each(|node| _ = nodes.entry(Arc::clone(node)).or_default());
    for (node, of_node) in nodes {
        let changes = changes.remove(node).unwrap_or_default();
        let mut edits = edits.clone();
        let names = changes.iter().filter_map(|(service, _)| of_node.services.remove(service));
        for (kind, name) in names.flatten().collect::<Vec<_>>() {
            match layers.get(kind, &name) {
                Some(resource) => edits.set(Arc::clone(resource)),
                None => edits.remove(kind, name),
            }
        }
        for (service, resources) in changes {
            let differs = |resource: &Arc<Resource>| {
                let of_scope = layers.get(resource.kind, &resource.name);
                of_scope.is_none_or(|of_scope| of_scope.version != resource.version)
            };
            let resources: Vec<_> = resources.into_iter().filter(differs).collect();
            if !resources.is_empty() {
                let names = resources.iter().map(|resource| (resource.kind, Arc::clone(&resource.name)));
                of_node.services.insert(service, names.collect());
            }
            resources.into_iter().for_each(|resource| edits.set(resource));
        }
        let is_same = std::ptr::eq(layers.below_before, layers.below);
        if of_node.layer.is_none() && of_node.services.is_empty()
            || of_node.layer.is_some() && is_same && edits.is_empty()
        {
            continue;
        }
        // Until the first difference, the proxies on the node receive the layer of the scope.
        let layer = of_node.layer.get_or_insert_with(|| Arc::clone(layers.local_before));
        let below = (layers.below_before, layers.below);
        Arc::make_mut(layer).edit_over(generation, below, edits);
    }
}

/// Takes over the differences of other resources of the same proxies. `layer` is that of the scope, which lies over no
/// base.
pub(super) fn inherit(nodes: &mut Arc<Nodes>, origin: &Nodes, generation: u64, layer: &Layer) {
    for (node, of_origin) in origin.iter().filter(|(_, of_origin)| of_origin.layer.is_some()) {
        let of_node = Arc::make_mut(nodes).entry(Arc::clone(node)).or_default();
        let mut edits = Edits::default();
        of_origin.resources().into_iter().for_each(|resource| edits.set(resource));
        of_node.services.extend(of_origin.services.clone());
        let of_node = Arc::make_mut(of_node.layer.get_or_insert_default());
        of_node.edit_over(generation, (layer, layer), edits);
    }
}
