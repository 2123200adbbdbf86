//! First compilation of a new scope, without the lock. The scope entry collects changes during that time; they are
//! compiled before the scope is published.

use std::sync::Arc;

use skysail_model::{ChangeSet, ClientScope, World};
use skysail_xds::Layer;

use super::{
    compiler::{CompilePanic, Compiler, PanicReport},
    round::ScopeJob,
    scope_resources::{ScopeResources, Sibling},
    scopes::ScopeEntry,
    state::State,
};

/// A new scope to compile.
pub(super) struct FirstCompile {
    world: World,
    revision: u64,
    generation: u64,
    job: ScopeJob,
    /// A sibling scope that is up to date.
    sibling: Option<(Arc<ClientScope>, ScopeResources)>,
    /// Layer of another scope, with which equal resources are shared.
    other: Option<Arc<Layer>>,
}

/// Result of a [`FirstCompile`].
pub(super) enum FirstCompileResult {
    /// The scope is published, or it was removed.
    Done,
    /// The World has changed during the compilation; compile again.
    Outdated,
    /// The compilation panicked.
    Failed(PanicReport),
}

impl FirstCompile {
    /// Compiles the scope. Blocks.
    pub(super) fn run(mut self, compiler: &Compiler) -> (Self, Result<(), CompilePanic>) {
        let Self { world, generation, job, sibling, other, .. } = &mut self;
        let ScopeJob { scope, resources, changes, .. } = job;
        let sibling = sibling.as_ref().map(|(scope, resources)| Sibling {
            scope,
            resources,
            layer_before: &resources.layer,
        });
        let result = resources.update(compiler, world, scope, changes, *generation, sibling);
        if let (Ok(()), Some(other)) = (&result, other) {
            Arc::make_mut(&mut resources.layer).share(other);
        }
        (self, result)
    }
}

impl State {
    /// Takes a new scope to compile. Returns `None` if the scope was removed.
    pub(super) fn take_first_compile(&mut self, scope: &Arc<ClientScope>, id: u64) -> Option<FirstCompile> {
        let is_up_to_date = |entry: &ScopeEntry| entry.published.is_some() && entry.pending.is_empty();
        let up_to_date = self.scopes.iter().filter(|(_, entry)| is_up_to_date(entry));
        let siblings = up_to_date.clone().filter(|(other, _)| other.is_sibling(scope));
        let sibling =
            siblings.filter_map(|(other, entry)| Some((Arc::clone(other), entry.resources.clone()?))).next();
        let layer = |(_, entry): (_, &ScopeEntry)| {
            entry.published.as_ref().map(|published| Arc::clone(&published.layer))
        };
        let other = sibling
            .as_ref()
            .map(|(_, resources)| Arc::clone(&resources.layer))
            .or_else(|| up_to_date.filter_map(layer).next());
        let entry = self.scopes.get_mut(scope).filter(|entry| entry.id == id && entry.is_opening)?;
        let (resources, changes) = (entry.resources.take()?, std::mem::take(&mut entry.pending));
        let job = ScopeJob { scope: Arc::clone(scope), id, resources, changes };
        let (world, revision, generation) = (self.world.clone(), self.revision, self.generation);
        Some(FirstCompile { world, revision, generation, job, sibling, other })
    }

    /// Publishes a new scope if the World has not changed during the compilation.
    pub(super) fn finish_first_compile(
        &mut self,
        (compile, result): (FirstCompile, Result<(), CompilePanic>),
    ) -> FirstCompileResult {
        let ScopeJob { scope, id, resources, changes } = compile.job;
        let Some(entry) = self.scopes.get_mut(&scope).filter(|entry| entry.id == id) else {
            return FirstCompileResult::Done;
        };
        match result {
            Ok(()) if entry.pending.is_empty() => {
                entry.publish(resources);
                FirstCompileResult::Done
            }
            Ok(()) => {
                entry.resources = Some(resources);
                FirstCompileResult::Outdated
            }
            Err(panic) => {
                entry.resources = Some(resources);
                entry.pending.add(changes);
                if compile.revision != self.revision {
                    return FirstCompileResult::Outdated;
                }
                FirstCompileResult::Failed(entry.fail(compile.revision, panic, &scope))
            }
        }
    }

    /// Marks a new scope as failed after a panic outside of the compile functions.
    pub(super) fn fail_first_compile(
        &mut self,
        scope: &ClientScope,
        id: u64,
        message: String,
    ) -> Option<PanicReport> {
        let entry = self.scopes.get_mut(scope).filter(|entry| entry.id == id)?;
        (entry.resources, entry.pending) = (Some(ScopeResources::default()), ChangeSet::everything());
        let panic = CompilePanic { subject: "the publication of the scope".to_owned(), message };
        Some(entry.fail(self.revision, panic, scope))
    }
}
