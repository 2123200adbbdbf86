//! Resources that all proxies of a scope share, and the update of those that a change may affect.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use skysail_model::{
    ChangeSet, ClientScope, Outline, Part, World, compile_host, is_equal_for_siblings, outline, parts,
};
use skysail_xds::{Kind, Layer, Resource, layer::Edits};

use super::compiler::{CompilePanic, Compiler, catch_panic};
use crate::parallel;

/// Services, routes and names as the proxies of a scope see them. Clones share all maps.
#[derive(Clone, Default)]
pub(super) struct ScopeResources {
    pub(super) layer: Arc<Layer>,
    parts: Arc<Parts>,
    pub(super) outline: Arc<Outline>,
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
    outline: Option<Outline>,
    /// Routes of hosts that are compiled one by one.
    edits: Edits,
    /// Parts with all their resources.
    parts: Vec<(Part, Vec<Arc<Resource>>)>,
}

impl ScopeResources {
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

    /// Returns the resources of a part.
    fn resources_of(&self, part: &Part) -> Vec<Arc<Resource>> {
        let names = self.parts.get(part).into_iter().flatten();
        names.filter_map(|(kind, name)| self.layer.get(*kind, name)).cloned().collect()
    }

    /// Compiles the parts that may have changed, or takes them from a sibling in which they are equal. A panic changes
    /// nothing.
    pub(super) fn update(
        &mut self,
        compiler: &Compiler,
        world: &World,
        scope: &ClientScope,
        changes: &ChangeSet,
        generation: u64,
        sibling: Option<Sibling<'_>>,
    ) -> Result<(), CompilePanic> {
        let compiled = catch_panic(
            || "the listeners, or the services that the proxies see".to_owned(),
            || self.compile(compiler, world, scope, changes, sibling),
        )??;
        self.apply(compiled, generation, sibling);
        Ok(())
    }

    fn compile(
        &self,
        compiler: &Compiler,
        world: &World,
        scope: &ClientScope,
        changes: &ChangeSet,
        sibling: Option<Sibling<'_>>,
    ) -> Result<CompiledChanges, CompilePanic> {
        // The outline has the services, and the VirtualServices with rules for connections.
        let outlined = changes.everything || changes.names || changes.workloads;
        let outline = outlined.then(|| outline(world, scope));
        let parts = self.parts_to_compile(world, scope, changes);
        let mut edits = Edits::default();
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
        Ok(CompiledChanges { outline, edits, parts: parts.into_iter().zip(compiled).collect() })
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
        let routes = changes.routes || (!changes.hosts.is_empty() && !scope.routes_by_host());
        affected.extend(routes.then_some(Part::Routes));
        affected.extend(changes.names.then_some(Part::Names));
        affected
    }

    fn apply(&mut self, compiled: CompiledChanges, generation: u64, sibling: Option<Sibling<'_>>) {
        let CompiledChanges { outline, mut edits, parts: compiled } = compiled;
        if let Some(outline) = outline {
            self.outline = Arc::new(outline);
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
        if !edits.is_empty() {
            let like = sibling.map(|sibling| (sibling.layer_before, &*sibling.resources.layer));
            Arc::make_mut(&mut self.layer).edit(generation, edits, like);
        }
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
