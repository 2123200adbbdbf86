//! Resources that all proxies of the same surroundings share.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use skysail_model::{ChangeSet, ClientScope, Outline, Part, World, compile_host, is_alike, outline, parts};
use skysail_xds::{Kind, Layer, Resource, layer::Edits};

use super::compiler::{Compiler, Panicked, contain};
use crate::parallel;

/// Services, routes and names as seen by proxies of the same surroundings. Clones share all maps.
#[derive(Clone, Default)]
pub(super) struct Scope {
    pub(super) layer: Arc<Layer>,
    parts: Arc<Parts>,
    pub(super) outline: Arc<Outline>,
}

/// The resources of each part.
type Parts = HashMap<Part, Vec<(Kind, Arc<str>)>>;

/// A scope of kin that is up to date.
#[derive(Clone, Copy)]
pub(super) struct Like<'a> {
    pub(super) surroundings: &'a ClientScope,
    pub(super) scope: &'a Scope,
    /// Its layer before.
    pub(super) before: &'a Layer,
}

/// Updated resources of a scope.
struct Compiled {
    outline: Option<Outline>,
    /// Routes of hosts that are compiled separately.
    edits: Edits,
    /// Parts with all their resources.
    parts: Vec<(Part, Vec<Arc<Resource>>)>,
}

impl Scope {
    /// Takes over the resources that the proxies of another scope have.
    pub(super) fn inherit(&mut self, before: &Self, generation: u64) {
        let (layer, parts) = (Arc::make_mut(&mut self.layer), Arc::make_mut(&mut self.parts));
        for (part, names) in before.parts.iter() {
            if !parts.contains_key(part) {
                let resources = names.iter().filter_map(|(kind, name)| before.layer.get(*kind, name));
                resources.for_each(|resource| {
                    layer.set(generation, Arc::clone(resource));
                });
                parts.insert(part.clone(), names.clone());
            }
        }
    }

    /// The resources of a part.
    fn made(&self, part: &Part) -> Vec<Arc<Resource>> {
        let names = self.parts.get(part).into_iter().flatten();
        names.filter_map(|(kind, name)| self.layer.get(*kind, name)).cloned().collect()
    }

    /// Compiles the parts that may have changed, or takes them from a scope in which they are the same. A panic changes nothing.
    pub(super) fn update(
        &mut self,
        compiler: &Compiler,
        world: &World,
        surroundings: &ClientScope,
        touched: &ChangeSet,
        generation: u64,
        like: Option<Like<'_>>,
    ) -> Result<(), Panicked> {
        let compiled = contain(
            || "what its proxies listen for, or which services they see".to_owned(),
            || self.compile(compiler, world, surroundings, touched, like),
        )??;
        self.take(compiled, generation, like);
        Ok(())
    }

    fn compile(
        &self,
        compiler: &Compiler,
        world: &World,
        surroundings: &ClientScope,
        touched: &ChangeSet,
        like: Option<Like<'_>>,
    ) -> Result<Compiled, Panicked> {
        let outline = (touched.everything || touched.names).then(|| outline(world, surroundings));
        let mut anew: BTreeSet<Part> = BTreeSet::new();
        if touched.everything {
            anew.extend(self.parts.keys().cloned());
            anew.extend(parts(world, surroundings));
        }
        let services = touched.services.iter().cloned();
        anew.extend(services.map(|(namespace, name)| Part::Service(namespace, name)));
        // Where routes come whole, a part of them is all of them.
        let routes = touched.routes || (!touched.hosts.is_empty() && !surroundings.routes_by_host());
        anew.extend(routes.then_some(Part::Routes));
        anew.extend(touched.names.then_some(Part::Names));

        let mut edits = Edits::default();
        if !anew.contains(&Part::Routes) {
            for host in &touched.hosts {
                let made = |kind, name: &str| match edits.get(kind, name) {
                    Some(edit) => edit.clone(),
                    None => self.layer.get(kind, name).cloned(),
                };
                let resources = contain(
                    || format!("the routes of host {host}"),
                    || compile_host(world, surroundings, host, made),
                )?;
                resources.into_iter().for_each(|resource| edits.set(resource));
            }
        }
        let anew: Vec<Part> = anew.into_iter().collect();
        let all = parallel::map(&anew, |part| match like {
            Some(like) if is_alike(world, surroundings, like.surroundings, part) => Ok(like.scope.made(part)),
            _ => contain(|| name(part), || (compiler.part)(world, surroundings, part)),
        });
        let all: Vec<Vec<Arc<Resource>>> = all.into_iter().collect::<Result<_, _>>()?;
        Ok(Compiled { outline, edits, parts: anew.into_iter().zip(all).collect() })
    }

    fn take(&mut self, compiled: Compiled, generation: u64, like: Option<Like<'_>>) {
        let Compiled { outline, mut edits, parts: compiled } = compiled;
        if let Some(outline) = outline {
            self.outline = Arc::new(outline);
        }
        if !compiled.is_empty() {
            let parts = Arc::make_mut(&mut self.parts);
            // First, as a host can become another service's.
            for (kind, name) in compiled.iter().filter_map(|(part, _)| parts.remove(part)).flatten() {
                edits.remove(kind, name);
            }
            for (part, made) in compiled {
                if !made.is_empty() {
                    let names = made.iter().map(|resource| (resource.kind, Arc::clone(&resource.name)));
                    parts.insert(part, names.collect());
                }
                made.into_iter().for_each(|resource| edits.set(resource));
            }
        }
        if !edits.is_empty() {
            let like = like.map(|like| (like.before, &*like.scope.layer));
            Arc::make_mut(&mut self.layer).edit(generation, edits, like);
        }
    }
}

/// A part as logs name it.
fn name(part: &Part) -> String {
    match part {
        Part::Service(namespace, name) => format!("the clusters and endpoints of service {namespace}/{name}"),
        Part::Routes => "the routes".to_owned(),
        Part::Names => "the names of services".to_owned(),
        Part::Trust => "the roots of trust domains".to_owned(),
    }
}
