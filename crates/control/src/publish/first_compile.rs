//! First compilation of a new scope, without the lock. The scope entry collects changes during that time; they are
//! compiled before the scope is published.

use std::sync::{Arc, OnceLock};

use skysail_model::{ChangeSet, ClientScope, NamespaceFacts, World};
use skysail_xds::Layer;

use super::{
    compiler::{CompilePanic, Compiler, PanicReport},
    round::ScopeJob,
    scope_resources::{ScopeChanges, ScopeResources, Sibling},
    scopes::ScopeEntry,
    state::State,
};

/// A new scope to compile.
pub(super) struct FirstCompile {
    world: World,
    facts: Arc<OnceLock<NamespaceFacts>>,
    revision: u64,
    generation: u64,
    job: ScopeJob,
    /// Base over which the scope lies.
    base: Option<ScopeResources>,
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

/// Result of [`State::take_first_compile`].
pub(super) enum TakenFirst {
    /// The scope was removed.
    Removed,
    /// The base is being compiled; try again after the round.
    BaseBusy,
    /// The base could not be compiled.
    Failed(PanicReport),
    Compile(Box<FirstCompile>),
}

impl FirstCompile {
    /// Compiles the scope. Blocks.
    pub(super) fn run(mut self, compiler: &Compiler) -> (Self, Result<(), CompilePanic>) {
        let Self { world, facts, generation, job, base, sibling, other, .. } = &mut self;
        let ScopeJob { scope, resources, changes, .. } = job;
        if let Some(base) = base {
            let facts = facts.get_or_init(|| world.namespace_facts());
            let result = resources.update_over(compiler, (world, facts), scope, changes, *generation, base);
            return (self, result);
        }
        let sibling = sibling.as_ref().map(|(scope, resources)| Sibling {
            scope,
            resources,
            layer_before: &resources.layer,
        });
        let result = resources.update(compiler, (world, facts), scope, changes, *generation, sibling);
        if let (Ok(()), Some(other)) = (&result, other) {
            Arc::make_mut(&mut resources.layer).share(other);
        }
        (self, result)
    }
}

impl State {
    /// Takes a new scope to compile.
    pub(super) fn take_first_compile(&mut self, scope: &Arc<ClientScope>, id: u64) -> TakenFirst {
        let base = match scope.base() {
            None => None,
            Some(base) => match self.scopes.get(&base) {
                // The base was removed before the scope was added.
                None => return self.fail_without_base(scope, id),
                Some(ScopeEntry { failed: Some(failed), .. }) if failed.revision == self.revision => {
                    let panic = failed.panic.clone();
                    let Some(entry) = self.scopes.get_mut(scope).filter(|entry| entry.id == id) else {
                        return TakenFirst::Removed;
                    };
                    return TakenFirst::Failed(entry.fail(self.revision, panic, scope));
                }
                Some(entry) => match &entry.resources {
                    Some(resources) if entry.published.is_some() && entry.pending.is_empty() => {
                        Some(resources.clone())
                    }
                    _ => return TakenFirst::BaseBusy,
                },
            },
        };
        self.take_compile(scope, id, base)
            .map_or(TakenFirst::Removed, |compile| TakenFirst::Compile(Box::new(compile)))
    }

    fn fail_without_base(&mut self, scope: &Arc<ClientScope>, id: u64) -> TakenFirst {
        let message = "the base of the scope was removed".to_owned();
        self.fail_first_compile(scope, id, message).map_or(TakenFirst::Removed, TakenFirst::Failed)
    }

    fn take_compile(
        &mut self,
        scope: &Arc<ClientScope>,
        id: u64,
        base: Option<ScopeResources>,
    ) -> Option<FirstCompile> {
        let is_up_to_date = |entry: &ScopeEntry| entry.published.is_some() && entry.pending.is_empty();
        let up_to_date = self.scopes.iter().filter(|(_, entry)| is_up_to_date(entry));
        let siblings = up_to_date.clone().filter(|(other, _)| other.is_sibling(scope));
        let mut sibling =
            siblings.filter_map(|(other, entry)| Some((Arc::clone(other), entry.resources.clone()?)));
        let sibling = sibling.find(|(_, resources)| resources.below.is_none());
        let layer = |(_, entry): (_, &ScopeEntry)| {
            entry.published.as_ref().map(|published| Arc::clone(&published.shared))
        };
        let other = sibling
            .as_ref()
            .map(|(_, resources)| Arc::clone(&resources.layer))
            .or_else(|| up_to_date.filter_map(layer).next());
        let entry = self.scopes.get_mut(scope).filter(|entry| entry.id == id && entry.is_opening)?;
        let resources = entry.resources.take()?;
        // Its proxies are admitted later, and their nodes compiled with them.
        let changes = ScopeChanges { world: std::mem::take(&mut entry.pending), ..ScopeChanges::default() };
        let job = ScopeJob { scope: Arc::clone(scope), id, resources, changes, base: None };
        let (world, revision, generation) = (self.world.clone(), self.revision, self.generation);
        let facts = Arc::clone(&self.facts);
        Some(FirstCompile { world, facts, revision, generation, job, base, sibling, other })
    }

    /// Publishes a new scope if the World has not changed during the compilation.
    pub(super) fn finish_first_compile(
        &mut self,
        (compile, result): (FirstCompile, Result<(), CompilePanic>),
    ) -> FirstCompileResult {
        let ScopeJob { scope, id, resources, changes, .. } = compile.job;
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
                entry.add_pending(&changes.world);
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
        (entry.resources, entry.pending) =
            (Some(ScopeResources::default()), Arc::new(ChangeSet::everything()));
        let panic = CompilePanic { subject: "the publication of the scope".to_owned(), message };
        Some(entry.fail(self.revision, panic, scope))
    }
}
