//! Resources that all proxies of a scope share, and the update of those that a change may affect.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, OnceLock},
};

use skysail_model::{
    ChangeSet, ClientScope, NamespaceFacts, Outline, Part, World, compile_host, compile_local_routes,
    compile_service_routes, is_equal_for_siblings, outline, parts,
};
use skysail_xds::{Kind, Layer, Resource, layer::Edits};

use super::{
    compiler::{CompilePanic, Compiler, catch_panic},
    nodes::{self, NodeChanges, NodeName, Nodes, UpdatedLayers},
};
use crate::parallel;

/// Services, routes and names as the proxies of a scope see them. Clones share all maps.
///
/// A scope with a [base](ClientScope::base) has only what differs in its namespace; all else is held by the base.
#[derive(Clone, Default)]
pub(super) struct ScopeResources {
    pub(super) layer: Arc<Layer>,
    /// Layer of the base over which `layer` lies.
    pub(super) below: Option<Arc<Layer>>,
    /// The scope holds all its resources although it has a base, because its proxies had other resources before.
    pub(super) is_flat: bool,
    parts: Arc<Parts>,
    pub(super) outline: Arc<Outline>,
    /// Differences for proxies on some nodes.
    pub(super) nodes: Arc<Nodes>,
}

/// Changes to compile for a scope.
#[derive(Clone, Default)]
pub(super) struct ScopeChanges {
    /// Changes of the World since the last compilation.
    pub(super) world: Arc<ChangeSet>,
    /// Nodes of the scope's proxies, if resources depend on them.
    pub(super) nodes: BTreeSet<NodeName>,
}

/// Types and names of the resources of each part.
type Parts = HashMap<Part, Vec<(Kind, Arc<str>)>>;

/// A sibling scope that is up to date, whose parts can be reused.
#[derive(Clone, Copy)]
pub(super) struct Sibling<'a> {
    pub(super) scope: &'a ClientScope,
    pub(super) resources: &'a ScopeResources,
    /// Its layer before its update.
    pub(super) layer_before: &'a Layer,
}

/// Compiled changes of a scope.
struct CompiledChanges {
    outline: Option<Arc<Outline>>,
    /// Routes of hosts that are compiled one by one.
    edits: Edits,
    /// Parts with all their resources.
    parts: Vec<(Part, Vec<Arc<Resource>>)>,
    /// All routes of the hosts of services, which are a part of [`Part::Routes`].
    of_services: Vec<HostRoutes>,
    nodes: NodeChanges,
}

/// A host with all resources of its routes.
type HostRoutes = (String, Vec<Arc<Resource>>);

impl ScopeResources {
    /// Returns whether the resources of a scope lie over those of its base.
    pub(super) fn is_over(&self, scope: &ClientScope) -> bool {
        !self.is_flat && scope.has_base()
    }

    /// Returns the same resources in one layer. `base` has those of the base.
    pub(super) fn flatten(&self, base: Option<&Self>) -> Self {
        let Some(below) = &self.below else { return Self { is_flat: true, ..self.clone() } };
        let mut flat = Self {
            layer: Arc::new(self.layer.flatten(below)),
            below: None,
            is_flat: true,
            parts: base.map(|base| Arc::clone(&base.parts)).unwrap_or_default(),
            outline: Arc::clone(&self.outline),
            nodes: Arc::default(),
        };
        let parts = Arc::make_mut(&mut flat.parts);
        for (part, names) in self.parts.iter() {
            let all = parts.entry(part.clone()).or_default();
            all.extend(names.iter().cloned());
            all.sort_unstable();
            all.dedup();
        }
        flat
    }

    /// Adds the resources of a former scope of the same proxies.
    pub(super) fn inherit(&mut self, origin: &Self, generation: u64) {
        let (layer, parts) = (Arc::make_mut(&mut self.layer), Arc::make_mut(&mut self.parts));
        for (part, names) in origin.parts.iter() {
            if !parts.contains_key(part) {
                let resources = names.iter().filter_map(|(kind, name)| origin.layer.get(*kind, name));
                resources.for_each(|resource| {
                    layer.set(generation, Arc::clone(resource));
                });
                parts.insert(part.clone(), names.clone());
            }
        }
    }

    /// Takes over the differences on nodes from former scopes of the same proxies, after all other resources.
    pub(super) fn inherit_nodes(&mut self, origin: &Self, generation: u64) {
        nodes::inherit(&mut self.nodes, &origin.nodes, generation, &self.layer);
    }

    /// Returns whether there are resources of a service (namespace, name).
    pub(super) fn has_service(&self, (namespace, name): &(String, String)) -> bool {
        self.parts.contains_key(&Part::Service(namespace.clone(), name.clone()))
    }

    /// Returns the resources of a part.
    fn resources_of(&self, part: &Part) -> Vec<Arc<Resource>> {
        let names = self.parts.get(part).into_iter().flatten();
        names.filter_map(|(kind, name)| self.layer.get(*kind, name)).cloned().collect()
    }

    /// Compiles the parts that may have changed. Equal parts of a sibling are reused. A panic changes nothing.
    pub(super) fn update(
        &mut self,
        compiler: &Compiler,
        world: (&World, &OnceLock<NamespaceFacts>),
        scope: &ClientScope,
        changes: &ScopeChanges,
        generation: u64,
        sibling: Option<Sibling<'_>>,
    ) -> Result<(), CompilePanic> {
        let compiled = catch_panic(
            || "the outline of the outbound listeners".to_owned(),
            || self.compile(compiler, world, scope, changes, sibling),
        )??;
        self.apply(compiled, generation, sibling);
        Ok(())
    }

    /// Compiles what differs from the base in the scope's namespace. A panic changes nothing.
    pub(super) fn update_over(
        &mut self,
        compiler: &Compiler,
        (world, facts): (&World, &NamespaceFacts),
        scope: &ClientScope,
        changes: &ScopeChanges,
        generation: u64,
        base: &Self,
    ) -> Result<(), CompilePanic> {
        let compiled = catch_panic(
            || "the outline of the outbound listeners".to_owned(),
            || self.compile_over(compiler, (world, facts), scope, changes, base),
        )??;
        let CompiledChanges { outline, mut edits, parts: compiled, of_services, nodes } = compiled;
        for (host, resources) in of_services {
            let names = self.parts.get(&Part::Routes).into_iter().flatten();
            let before: Vec<_> = names.filter(|(_, name)| is_of_host(name, &host)).cloned().collect();
            if !before.is_empty() || !resources.is_empty() {
                self.replace_host(&host, resources, &mut edits);
            }
            // A name that no longer differs in the namespace gets the resource of the base again.
            for (kind, name) in &before {
                if matches!(edits.get(*kind, name), Some(None)) {
                    revert(*kind, name, base, &mut edits);
                }
            }
        }
        if let Some(outline) = outline {
            self.outline = outline;
        }
        if !compiled.is_empty() {
            let parts = Arc::make_mut(&mut self.parts);
            for (part, resources) in compiled {
                let names: Vec<_> =
                    resources.iter().map(|resource| (resource.kind, Arc::clone(&resource.name))).collect();
                if names.is_empty() {
                    parts.remove(&part)
                } else {
                    parts.insert(part, names)
                };
            }
        }
        let below = self.below.replace(Arc::clone(&base.layer)).unwrap_or_else(|| Arc::clone(&base.layer));
        let has_nodes = !self.nodes.is_empty() || !nodes.is_empty();
        let of_nodes = if has_nodes { edits.clone() } else { Edits::default() };
        let local_before = Arc::clone(&self.layer);
        if !edits.is_empty() || !Arc::ptr_eq(&below, &base.layer) {
            Arc::make_mut(&mut self.layer).edit_over(generation, (&below, &base.layer), edits);
        }
        let layers = UpdatedLayers {
            local_before: &local_before,
            local: &self.layer,
            below_before: &below,
            below: &base.layer,
        };
        nodes::apply(&mut self.nodes, nodes, generation, &layers, &of_nodes);
        Ok(())
    }

    fn compile_over(
        &self,
        compiler: &Compiler,
        (world, facts): (&World, &NamespaceFacts),
        scope: &ClientScope,
        ScopeChanges { world: changes, nodes }: &ScopeChanges,
        base: &Self,
    ) -> Result<CompiledChanges, CompilePanic> {
        let special = facts.of(&scope.namespace);
        let outline = if !special.outline {
            Some(Arc::clone(&base.outline))
        } else if changes.everything || changes.names || changes.workloads {
            Some(Arc::new(outline(world, scope)))
        } else {
            None
        };
        let mut affected = self.parts_of_namespace(world, scope, changes, &special.services);
        if special.names {
            affected.extend((changes.everything || changes.names).then_some(Part::Names));
        }
        let mut all_routes = affected.remove(&Part::Routes);
        all_routes |= special.routes && !changes.service_hosts.is_empty();
        let mut edits = Edits::default();
        if !all_routes {
            for host in &changes.hosts {
                self.compile_host_over(world, scope, host, &special.services, base, &mut edits)?;
            }
        }
        let of_services = match all_routes {
            true => None,
            false => compile_services_over((world, facts), scope, changes, base)?,
        };
        all_routes |= of_services.is_none();
        let mut compiled = Vec::new();
        for part in affected {
            let differs = match &part {
                Part::Service(namespace, name) => {
                    special.services.contains(&(namespace.clone(), name.clone()))
                        && !is_equal_for_siblings(world, scope, &base_of(scope), &part)
                }
                Part::Names => special.names,
                Part::Routes | Part::Trust => false,
            };
            let made = if differs {
                catch_panic(|| name(&part), || (compiler.part)(world, scope, &part))?
            } else {
                Vec::new()
            };
            compiled.push((part, made, differs));
        }
        if all_routes {
            let has_routes = |port: u16| base.layer.get(Kind::Route, &port.to_string()).is_some();
            let local = catch_panic(
                || name(&Part::Routes),
                || compile_local_routes(world, scope, facts, has_routes),
            )?;
            compiled.push(match local {
                Some(local) => (Part::Routes, local, false),
                None => {
                    let all = || (compiler.part)(world, scope, &Part::Routes);
                    (Part::Routes, catch_panic(|| name(&Part::Routes), all)?, true)
                }
            });
        }
        // Former names of a part get the resources of the base again. If the part differs, the base's names are hidden.
        for (part, _, differs) in &compiled {
            for (kind, name) in self.parts.get(part).into_iter().flatten() {
                revert(*kind, name, base, &mut edits);
            }
            let hidden = differs.then(|| base.parts.get(part)).flatten();
            hidden.into_iter().flatten().for_each(|(kind, name)| edits.remove(*kind, Arc::clone(name)));
        }
        let compiled: Vec<_> = compiled.into_iter().map(|(part, resources, _)| (part, resources)).collect();
        for resource in compiled.iter().flat_map(|(_, resources)| resources) {
            edits.set(Arc::clone(resource));
        }
        let of_services = of_services.unwrap_or_default();
        let special = (&*base.nodes, &special.services);
        let nodes = nodes::compile_over(world, scope, changes, (&self.nodes, nodes), special)?;
        Ok(CompiledChanges { outline, edits, parts: compiled, of_services, nodes })
    }

    /// Returns the parts of a namespace that the changes may affect: those that differ from the base, or did before.
    fn parts_of_namespace(
        &self,
        world: &World,
        scope: &ClientScope,
        changes: &ChangeSet,
        special: &BTreeSet<(String, String)>,
    ) -> BTreeSet<Part> {
        let part = |(namespace, name): &(String, String)| Part::Service(namespace.clone(), name.clone());
        let mut affected: BTreeSet<Part> = BTreeSet::new();
        if changes.everything {
            affected.extend(self.parts.keys().cloned());
            affected.extend(special.iter().map(part));
        }
        for (namespace, name) in &changes.services {
            // Services of one host have resources of the same names, which a part without resources hides.
            let others = world.services_of_host(name).into_iter();
            for namespace in others.chain([namespace.as_str()]) {
                let service = (namespace.to_owned(), name.clone());
                let changed = part(&service);
                if self.parts.contains_key(&changed) || special.contains(&service) {
                    affected.insert(changed);
                }
            }
        }
        affected.extend((changes.names && self.parts.contains_key(&Part::Names)).then_some(Part::Names));
        let has_hosts = !changes.hosts.is_empty() || !changes.service_hosts.is_empty();
        let routes = changes.affects_all_routes() || (has_hosts && !scope.routes_by_host());
        affected.extend(routes.then_some(Part::Routes));
        affected
    }

    /// Compiles the routes of one host, if they differ in the namespace.
    fn compile_host_over(
        &self,
        world: &World,
        scope: &ClientScope,
        host: &str,
        special: &BTreeSet<(String, String)>,
        base: &Self,
        edits: &mut Edits,
    ) -> Result<(), CompilePanic> {
        let service = world.service(host).map(|of| (of.meta.namespace.clone(), of.meta.name.clone()));
        let names = self.parts.get(&Part::Routes).into_iter().flatten();
        let of_host: Vec<_> = names.filter(|(_, name)| is_of_host(name, host)).cloned().collect();
        if service.is_none_or(|service| !special.contains(&service)) {
            of_host.iter().for_each(|(kind, name)| revert(*kind, name, base, edits));
            return Ok(());
        }
        let current = |kind: Kind, name: &str| {
            let own = self.layer.get(kind, name);
            own.or_else(|| base.layer.get(kind, name)).cloned()
        };
        let resources = catch_panic(
            || format!("the routes of host {host}"),
            || compile_host(world, scope, host, current),
        )?;
        resources.into_iter().for_each(|resource| edits.set(resource));
        Ok(())
    }

    fn compile(
        &self,
        compiler: &Compiler,
        (world, facts): (&World, &OnceLock<NamespaceFacts>),
        scope: &ClientScope,
        ScopeChanges { world: changes, nodes }: &ScopeChanges,
        sibling: Option<Sibling<'_>>,
    ) -> Result<CompiledChanges, CompilePanic> {
        // The outline has the services, and the VirtualServices with rules for connections.
        let outlined = changes.everything || changes.names || changes.workloads;
        let outline = outlined.then(|| Arc::new(outline(world, scope)));
        let mut parts = self.parts_to_compile(world, scope, changes);
        let mut edits = Edits::default();
        let mut of_services = Vec::new();
        if !changes.service_hosts.is_empty() && !parts.contains(&Part::Routes) {
            let facts = facts.get_or_init(|| world.namespace_facts());
            let has_routes = |port: u16| self.layer.get(Kind::Route, &port.to_string()).is_some();
            for host in &changes.service_hosts {
                let made = catch_panic(
                    || format!("the routes of host {host}"),
                    || compile_service_routes(world, scope, facts, host, has_routes),
                )?;
                match made {
                    Some(made) => of_services.push((host.clone(), made)),
                    None => _ = parts.insert(Part::Routes),
                }
            }
        }
        if !parts.contains(&Part::Routes) {
            for host in &changes.hosts {
                let current = |kind, name: &str| match edits.get(kind, name) {
                    Some(edit) => edit.clone(),
                    None => self.layer.get(kind, name).cloned(),
                };
                let resources = catch_panic(
                    || format!("the routes of host {host}"),
                    || compile_host(world, scope, host, current),
                )?;
                resources.into_iter().for_each(|resource| edits.set(resource));
            }
        }
        let parts: Vec<Part> = parts.into_iter().collect();
        let compiled = parallel::map(&parts, |part| match sibling {
            Some(sibling) if is_equal_for_siblings(world, scope, sibling.scope, part) => {
                Ok(sibling.resources.resources_of(part))
            }
            _ => catch_panic(|| name(part), || (compiler.part)(world, scope, part)),
        });
        let compiled: Vec<Vec<Arc<Resource>>> = compiled.into_iter().collect::<Result<_, _>>()?;
        let of_services = if parts.contains(&Part::Routes) { Vec::new() } else { of_services };
        let parts = parts.into_iter().zip(compiled).collect();
        let nodes = nodes::compile(world, scope, changes, &self.nodes, nodes)?;
        Ok(CompiledChanges { outline, edits, parts, of_services, nodes })
    }

    /// Returns the parts that the changes may affect.
    fn parts_to_compile(&self, world: &World, scope: &ClientScope, changes: &ChangeSet) -> BTreeSet<Part> {
        let mut affected: BTreeSet<Part> = BTreeSet::new();
        if changes.everything {
            affected.extend(self.parts.keys().cloned());
            affected.extend(parts(world, scope));
        }
        let services = changes.services.iter().cloned();
        affected.extend(services.map(|(namespace, name)| Part::Service(namespace, name)));
        // Without routes by host, a change of one host affects the whole route configuration.
        let has_hosts = !changes.hosts.is_empty() || !changes.service_hosts.is_empty();
        let routes = changes.affects_all_routes() || (has_hosts && !scope.routes_by_host());
        affected.extend(routes.then_some(Part::Routes));
        affected.extend(changes.names.then_some(Part::Names));
        affected
    }

    /// Replaces the routes of a host. Adds the edits.
    fn replace_host(&mut self, host: &str, resources: Vec<Arc<Resource>>, edits: &mut Edits) {
        let names = Arc::make_mut(&mut self.parts).entry(Part::Routes).or_default();
        names.retain(|(kind, name)| {
            let is_of_host = is_of_host(name, host);
            if is_of_host {
                edits.remove(*kind, Arc::clone(name));
            }
            !is_of_host
        });
        names.extend(resources.iter().map(|resource| (resource.kind, Arc::clone(&resource.name))));
        resources.into_iter().for_each(|resource| edits.set(resource));
    }

    fn apply(&mut self, compiled: CompiledChanges, generation: u64, sibling: Option<Sibling<'_>>) {
        let CompiledChanges { outline, mut edits, parts: compiled, of_services, nodes } = compiled;
        for (host, resources) in of_services {
            self.replace_host(&host, resources, &mut edits);
        }
        if let Some(outline) = outline {
            self.outline = outline;
        }
        if !compiled.is_empty() {
            let parts = Arc::make_mut(&mut self.parts);
            // All removals precede the additions, because a host can move from one service to another.
            for (kind, name) in compiled.iter().filter_map(|(part, _)| parts.remove(part)).flatten() {
                edits.remove(kind, name);
            }
            for (part, resources) in compiled {
                if !resources.is_empty() {
                    let names = resources.iter().map(|resource| (resource.kind, Arc::clone(&resource.name)));
                    parts.insert(part, names.collect());
                }
                resources.into_iter().for_each(|resource| edits.set(resource));
            }
        }
        let below = Arc::clone(&self.layer);
        if !edits.is_empty() {
            let like = sibling.map(|sibling| (sibling.layer_before, &*sibling.resources.layer));
            Arc::make_mut(&mut self.layer).edit(generation, edits, like);
        }
        let none = Arc::<Layer>::default();
        let (local_before, below_before) = (&none, &*below);
        let layers = UpdatedLayers { local_before, local: &none, below_before, below: &self.layer };
        nodes::apply(&mut self.nodes, nodes, generation, &layers, &Edits::default());
    }
}

/// Compiles the routes of the changed services that differ from the base; the others get no routes. Returns `None` if
/// all routes of the namespace have to be compiled.
fn compile_services_over(
    (world, facts): (&World, &NamespaceFacts),
    scope: &ClientScope,
    changes: &ChangeSet,
    base: &ScopeResources,
) -> Result<Option<Vec<HostRoutes>>, CompilePanic> {
    let special = &facts.of(&scope.namespace).services;
    let has_routes = |port: u16| base.layer.get(Kind::Route, &port.to_string()).is_some();
    let mut all = Vec::new();
    for host in &changes.service_hosts {
        let service = world.service(host).map(|of| (of.meta.namespace.clone(), of.meta.name.clone()));
        if service.is_none_or(|service| !special.contains(&service)) {
            all.push((host.clone(), Vec::new()));
            continue;
        }
        let made = catch_panic(
            || format!("the routes of host {host}"),
            || compile_service_routes(world, scope, facts, host, has_routes),
        )?;
        let Some(made) = made else { return Ok(None) };
        all.push((host.clone(), made));
    }
    Ok(Some(all))
}

/// Returns whether a resource has routes of this host alone: `PORT/HOST:PORT` or `HOST:PORT`.
fn is_of_host(name: &str, host: &str) -> bool {
    let name = name.split_once('/').map_or(name, |(_, name)| name);
    name.strip_prefix(host).is_some_and(|port| port.starts_with(':'))
}

/// Returns the scope of clients of no namespace.
fn base_of(scope: &ClientScope) -> ClientScope {
    ClientScope { namespace: String::new(), ..scope.clone() }
}

/// Makes a resource equal to that of the base.
fn revert(kind: Kind, name: &Arc<str>, base: &ScopeResources, edits: &mut Edits) {
    match base.layer.get(kind, name) {
        Some(resource) => edits.set(Arc::clone(resource)),
        None => edits.remove(kind, Arc::clone(name)),
    }
}

/// Returns the name of a part for the log.
fn name(part: &Part) -> String {
    match part {
        Part::Service(namespace, name) => format!("the clusters and endpoints of service {namespace}/{name}"),
        Part::Routes => "the routes".to_owned(),
        Part::Names => "the names of services".to_owned(),
        Part::Trust => "the roots of trust domains".to_owned(),
    }
}
