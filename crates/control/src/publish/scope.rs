//! What proxies share that have the same surroundings.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use skysail_model::{
    Outline, Part, Surroundings, Touched, World, compile_host, compile_part, is_alike, outline, parts,
};
use skysail_xds::{Kind, Layer, Resource, layer::Edits};

use crate::parallel;

/// What services, routes and names are to proxies of the same surroundings.
#[derive(Default)]
pub(super) struct Scope {
    pub(super) layer: Arc<Layer>,
    /// The resources of each part.
    pub(super) parts: HashMap<Part, Vec<(Kind, Arc<str>)>>,
    pub(super) outline: Outline,
    /// How many views are of it.
    pub(super) views: usize,
}

/// A scope of kin that is up to date.
#[derive(Clone, Copy)]
pub(super) struct Like<'a> {
    pub(super) surroundings: &'a Surroundings,
    pub(super) scope: &'a Scope,
    /// What it had before.
    pub(super) before: &'a Layer,
}

impl Scope {
    /// Takes in what those have who were of another scope.
    pub(super) fn inherit(&mut self, before: &Self, generation: u64) {
        let layer = Arc::make_mut(&mut self.layer);
        for (part, names) in &before.parts {
            if !self.parts.contains_key(part) {
                let resources = names.iter().filter_map(|(kind, name)| before.layer.get(*kind, name));
                resources.for_each(|resource| {
                    layer.set(generation, Arc::clone(resource));
                });
                self.parts.insert(part.clone(), names.clone());
            }
        }
    }

    /// The resources of a part.
    fn made(&self, part: &Part) -> Vec<Arc<Resource>> {
        let names = self.parts.get(part).into_iter().flatten();
        names.filter_map(|(kind, name)| self.layer.get(*kind, name)).cloned().collect()
    }

    /// Makes anew the parts that may have changed, or takes them from a scope in which they are the same.
    pub(super) fn update(
        &mut self,
        world: &World,
        surroundings: &Surroundings,
        touched: &Touched,
        generation: u64,
        like: Option<Like<'_>>,
    ) {
        if touched.everything || touched.names {
            self.outline = outline(world, surroundings);
        }
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
                for resource in compile_host(world, surroundings, host, made) {
                    edits.set(resource);
                }
            }
        }
        let anew: Vec<Part> = anew.into_iter().collect();
        let all = parallel::map(&anew, |part| match like {
            Some(like) if is_alike(world, surroundings, like.surroundings, part) => like.scope.made(part),
            _ => compile_part(world, surroundings, part),
        });
        // First, as a host can become another service's.
        for (kind, name) in anew.iter().filter_map(|part| self.parts.remove(part)).flatten() {
            edits.remove(kind, name);
        }
        for (part, made) in anew.into_iter().zip(all) {
            if !made.is_empty() {
                let names = made.iter().map(|resource| (resource.kind, Arc::clone(&resource.name)));
                self.parts.insert(part, names.collect());
            }
            made.into_iter().for_each(|resource| edits.set(resource));
        }
        if !edits.is_empty() {
            let like = like.map(|like| (like.before, &*like.scope.layer));
            Arc::make_mut(&mut self.layer).edit(generation, edits, like);
        }
    }
}
