//! Compiles outside of the lock: work is taken from the state, done, and its result is put back.
//!
//! After a change, [`Round`]s compile all scopes and views that it may affect. Rounds run one at a time, each for scopes of kin.
//! Scopes with the most proxies come first, so that many scopes of few proxies do not delay them. Views are compiled in batches.
//! Identities take turns, so that an identity with many views does not delay others. An [`Opening`] compiles one new scope. A
//! change during that time is noted in the scope's slot and compiled before the scope is published.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use skysail_model::{ChangeSet, ClientScope, Diagnostic, Outline, ProxyView, World};
use skysail_xds::{
    Layer,
    interest::{Change, Interest},
};

use super::{
    compiler::{Compiler, Failure, Panicked, contain},
    scope::{Like, Scope},
    state::{Broken, Published, Slot, State},
};
use crate::parallel;

/// Views compiled in a round: their proxies have the change before the next round begins.
pub(super) const BATCH: usize = 128;

/// Work after a change.
pub(super) struct Round {
    world: World,
    revision: u64,
    generation: u64,
    scopes: Vec<ScopeJob>,
    views: Vec<ViewJob>,
}

/// A scope to compile.
struct ScopeJob {
    surroundings: Arc<ClientScope>,
    id: u64,
    scope: Scope,
    touched: ChangeSet,
}

/// A view whose own resources are to compile.
struct ViewJob {
    view: Arc<ProxyView>,
    surroundings: Arc<ClientScope>,
    outline: Arc<Outline>,
    own: Arc<Layer>,
}

/// Results of a round.
pub(super) struct Done {
    revision: u64,
    generation: u64,
    scopes: Vec<(ScopeJob, Result<Change, Panicked>)>,
    views: Vec<(ViewJob, Result<OwnMade, Panicked>)>,
}

/// A view's own resources.
struct OwnMade {
    own: Arc<Layer>,
    changed: bool,
    findings: Vec<Diagnostic>,
}

impl Round {
    /// Compiles. Blocks.
    pub(super) fn run(self, compiler: &Compiler) -> Done {
        let Self { world, revision, generation, scopes, views } = self;
        let mut done: Vec<(ScopeJob, Result<Change, Panicked>, Arc<Layer>)> =
            Vec::with_capacity(scopes.len());
        let mut kin: HashMap<ClientScope, usize> = HashMap::new();
        for mut job in scopes {
            let like = kin.get(&job.surroundings.kin()).and_then(|index| done.get(*index));
            let like = like.map(|(other, _, before)| Like {
                surroundings: &other.surroundings,
                scope: &other.scope,
                before,
            });
            let before = Arc::clone(&job.scope.layer);
            let result =
                job.scope.update(compiler, &world, &job.surroundings, &job.touched, generation, like);
            let result = result.map(|()| {
                kin.entry(job.surroundings.kin()).or_insert(done.len());
                Change::since(&job.scope.layer, generation - 1)
            });
            done.push((job, result, before));
        }
        let outlines: HashMap<_, _> = done
            .iter()
            .filter(|(_, result, _)| result.is_ok())
            .map(|(job, ..)| (&job.surroundings, &job.scope.outline))
            .collect();
        let made = parallel::map(&views, |job| {
            let outline = *outlines.get(&job.surroundings).unwrap_or(&&job.outline);
            let own = contain(
                || "what it has for itself".to_owned(),
                || (compiler.own)(&world, &job.view, outline),
            );
            own.map(|(made, findings)| {
                let mut own = Arc::clone(&job.own);
                let changed = Arc::make_mut(&mut own).replace(generation, &made);
                OwnMade { own, changed, findings }
            })
        });
        let scopes = done.into_iter().map(|(job, result, _)| (job, result)).collect();
        Done { revision, generation, scopes, views: views.into_iter().zip(made).collect() }
    }
}

impl State {
    /// Takes the next work; `None` if everything is up to date or cannot be compiled.
    pub(super) fn take_round(&mut self) -> Option<Round> {
        let revision = self.revision;
        let is_pending = |slot: &Slot| {
            slot.scope.is_some()
                && !slot.opening
                && !slot.missed.is_nothing()
                && is_due(&slot.broken, revision)
        };
        let pending = self.slots.iter().filter(|(_, slot)| is_pending(slot));
        let first =
            pending.max_by_key(|(_, slot)| slot.clients).map(|(surroundings, _)| Arc::clone(surroundings));
        let mut scopes = Vec::new();
        for (surroundings, slot) in &mut self.slots {
            let is_next = first.as_ref().is_some_and(|first| first.is_kin(surroundings));
            if !is_next || !is_pending(slot) {
                continue;
            }
            let Some(scope) = slot.scope.take() else { continue };
            let touched = std::mem::take(&mut slot.missed);
            scopes.push(ScopeJob { surroundings: Arc::clone(surroundings), id: slot.id, scope, touched });
        }
        let mut views = Vec::new();
        for (view, state) in &self.views {
            if !state.stale || !is_due(&state.broken, revision) {
                continue;
            }
            let Some(slot) = self.slots.get(&state.surroundings) else { continue };
            // A view is sent its own resources together with those of its scope. After views were reassigned, their scope is
            // published by this round or cannot be compiled.
            if is_pending(slot) || slot.published.is_none() && slot.scope.is_some() {
                continue;
            }
            let outline = slot.published.as_ref().map_or(&state.outline, |published| &published.outline);
            views.push((view, state, outline));
        }
        let views = in_turns(views, |(view, ..)| (&view.namespace, &view.service_account)).into_iter();
        let views = views.take(BATCH).map(|(view, state, outline)| ViewJob {
            view: Arc::clone(view),
            surroundings: Arc::clone(&state.surroundings),
            outline: Arc::clone(outline),
            own: Arc::clone(&state.sender.borrow().own),
        });
        let views: Vec<_> = views.collect();
        let world = self.world.clone();
        let any = !scopes.is_empty() || !views.is_empty();
        any.then_some(Round { world, revision, generation: self.generation + 1, scopes, views })
    }

    /// Publishes the results of a round.
    pub(super) fn finish_round(&mut self, done: Done) -> Vec<Failure> {
        let Done { revision, generation, scopes, views } = done;
        self.generation = generation;
        let mut failures = Vec::new();
        let mut changes: HashMap<Arc<ClientScope>, (Change, bool, Published)> = HashMap::new();
        for (job, result) in scopes {
            let ScopeJob { surroundings, id, scope, touched } = job;
            let Some(slot) = self.slots.get_mut(&surroundings).filter(|slot| slot.id == id) else { continue };
            match result {
                Ok(change) => {
                    let published = slot.publish(scope);
                    changes.insert(surroundings, (change, touched.everything, published));
                }
                Err(panicked) => {
                    slot.scope = Some(scope);
                    slot.missed.add(touched);
                    failures.push(slot.fail(revision, panicked, &surroundings));
                }
            }
        }
        let mut owns: HashMap<Arc<ProxyView>, OwnMade> = HashMap::new();
        for (job, result) in views {
            // An equal view may have come in its place, which was sent other layers.
            let is_same =
                self.views.get_key_value(&job.view).is_some_and(|(view, _)| Arc::ptr_eq(view, &job.view));
            let Some(state) = self.views.get_mut(&job.view).filter(|_| is_same) else { continue };
            match result {
                Ok(made) => {
                    owns.insert(job.view, made);
                }
                Err(panicked) => {
                    let (namespace, name) = (&job.view.namespace, &job.view.canonical_service);
                    let whose = format!("workload {name} in namespace {namespace}");
                    failures.push(Broken::note(&mut state.broken, revision, panicked, &whose));
                }
            }
        }
        for (view, state) in &mut self.views {
            // There are thousands of views, and most changes are of none's own.
            let own = if owns.is_empty() { None } else { owns.remove(view) };
            let change = changes.get(&state.surroundings);
            // A view that a later round compiles is sent that together with what its scope has now.
            let is_later = state.stale && own.is_none() && is_due(&state.broken, revision);
            if is_later || (change.is_none() && own.is_none()) {
                continue;
            }
            let of_slot = || self.slots.get(&state.surroundings)?.published.as_ref();
            // Without a scope its proxies keep all that they have.
            let Some(published) = change.map(|(_, _, published)| published).or_else(of_slot) else {
                continue;
            };
            let mut snapshot = state.sender.borrow().clone();
            let mut concerns_all = change.is_some_and(|(_, everything, _)| *everything);
            if let Some(OwnMade { own, changed, findings }) = own {
                (snapshot.own, state.findings) = (own, findings);
                (state.stale, state.broken) = (false, None);
                state.outline = Arc::clone(&published.outline);
                // Its scope may have changed in a round before.
                concerns_all |=
                    changed || change.is_none() && !Arc::ptr_eq(&snapshot.shared, &published.layer);
            } else if std::mem::take(&mut state.early) {
                state.stale |= !Arc::ptr_eq(&state.outline, &published.outline);
            }
            snapshot.shared = Arc::clone(&published.layer);
            let interest: &Interest = &state.interest;
            state.sender.send_if_modified(|now| {
                let changed = now.generation() != snapshot.generation();
                *now = snapshot;
                changed && (concerns_all || change.is_some_and(|(change, ..)| interest.concerns(change)))
            });
        }
        failures
    }
}

/// True unless the last compile panicked and nothing has changed since.
fn is_due(broken: &Option<Broken>, revision: u64) -> bool {
    broken.as_ref().is_none_or(|broken| broken.revision != revision)
}

/// Orders items so that the first of each owner comes before the second of any.
fn in_turns<T, K: Hash + Eq>(items: Vec<T>, owner: impl Fn(&T) -> K) -> Vec<T> {
    let mut turns: HashMap<K, usize> = HashMap::new();
    let mut numbered: Vec<(usize, T)> = Vec::with_capacity(items.len());
    for item in items {
        let turn = turns.entry(owner(&item)).or_default();
        *turn += 1;
        numbered.push((*turn, item));
    }
    numbered.sort_by_key(|(turn, _)| *turn);
    numbered.into_iter().map(|(_, item)| item).collect()
}

impl Slot {
    fn publish(&mut self, scope: Scope) -> Published {
        let published = Published { layer: Arc::clone(&scope.layer), outline: Arc::clone(&scope.outline) };
        self.published = Some(published.clone());
        self.scope = Some(scope);
        self.broken = None;
        self.opening = false;
        self.opened.send_replace(());
        published
    }

    /// Notes that a compile panicked.
    fn fail(&mut self, revision: u64, panicked: Panicked, surroundings: &ClientScope) -> Failure {
        self.opening = false;
        self.opened.send_replace(());
        Broken::note(&mut self.broken, revision, panicked, &surroundings.to_string())
    }
}

impl Broken {
    fn note(before: &mut Option<Self>, revision: u64, panicked: Panicked, whose: &str) -> Failure {
        let is_new = before.as_ref().is_none_or(|before| before.panicked != panicked);
        let text = format!("{whose}: {panicked}");
        *before = Some(Self { revision, panicked });
        Failure { text, is_new }
    }
}

/// A new scope to compile.
pub(super) struct Opening {
    world: World,
    revision: u64,
    generation: u64,
    job: ScopeJob,
    /// A scope of kin that is up to date.
    kin: Option<(Arc<ClientScope>, Scope)>,
    /// A layer of another scope: equal resources are shared with it.
    other: Option<Arc<Layer>>,
}

/// Result of an [`Opening`].
pub(super) enum Opened {
    /// It is published, or no longer wanted.
    Done,
    /// The World changed during the compile.
    Behind,
    /// Its compile panicked.
    Failed(Failure),
}

impl Opening {
    /// Compiles. Blocks.
    pub(super) fn run(mut self, compiler: &Compiler) -> (Self, Result<(), Panicked>) {
        let Self { world, generation, job, kin, other, .. } = &mut self;
        let ScopeJob { surroundings, scope, touched, .. } = job;
        let like =
            kin.as_ref().map(|(surroundings, scope)| Like { surroundings, scope, before: &scope.layer });
        let result = scope.update(compiler, world, surroundings, touched, *generation, like);
        if let (Ok(()), Some(other)) = (&result, other) {
            Arc::make_mut(&mut scope.layer).share(other);
        }
        (self, result)
    }
}

impl State {
    /// Takes a new scope to compile; `None` if it is no longer wanted.
    pub(super) fn begin_opening(&mut self, surroundings: &Arc<ClientScope>, id: u64) -> Option<Opening> {
        let is_ready = |slot: &Slot| slot.published.is_some() && slot.missed.is_nothing();
        let ready = self.slots.iter().filter(|(_, slot)| is_ready(slot));
        let kin = ready.clone().filter(|(other, _)| other.is_kin(surroundings));
        let kin = kin.filter_map(|(other, slot)| Some((Arc::clone(other), slot.scope.clone()?))).next();
        let layer =
            |(_, slot): (_, &Slot)| slot.published.as_ref().map(|published| Arc::clone(&published.layer));
        let other = kin
            .as_ref()
            .map(|(_, scope)| Arc::clone(&scope.layer))
            .or_else(|| ready.filter_map(layer).next());
        let slot = self.slots.get_mut(surroundings).filter(|slot| slot.id == id && slot.opening)?;
        let (scope, touched) = (slot.scope.take()?, std::mem::take(&mut slot.missed));
        let job = ScopeJob { surroundings: Arc::clone(surroundings), id, scope, touched };
        let (world, revision, generation) = (self.world.clone(), self.revision, self.generation);
        Some(Opening { world, revision, generation, job, kin, other })
    }

    /// Marks a new scope as broken after a panic outside of the compile functions.
    pub(super) fn abandon_opening(
        &mut self,
        surroundings: &ClientScope,
        id: u64,
        why: String,
    ) -> Option<Failure> {
        let slot = self.slots.get_mut(surroundings).filter(|slot| slot.id == id)?;
        (slot.scope, slot.missed) = (Some(Scope::default()), ChangeSet::everything());
        let panicked = Panicked { what: "publishing it".to_owned(), message: why };
        Some(slot.fail(self.revision, panicked, surroundings))
    }

    /// Publishes a new scope if nothing changed during the compile.
    pub(super) fn finish_opening(&mut self, (opening, result): (Opening, Result<(), Panicked>)) -> Opened {
        let ScopeJob { surroundings, id, scope, touched } = opening.job;
        let Some(slot) = self.slots.get_mut(&surroundings).filter(|slot| slot.id == id) else {
            return Opened::Done;
        };
        match result {
            Ok(()) if slot.missed.is_nothing() => {
                slot.publish(scope);
            }
            Ok(()) => {
                slot.scope = Some(scope);
                return Opened::Behind;
            }
            Err(panicked) => {
                slot.scope = Some(scope);
                slot.missed.add(touched);
                if opening.revision != self.revision {
                    return Opened::Behind;
                }
                return Opened::Failed(slot.fail(opening.revision, panicked, &surroundings));
            }
        }
        Opened::Done
    }
}
