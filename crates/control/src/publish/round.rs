//! Compilation after a change, without the lock: a round is taken from the state, compiled, and its result is put back.
//!
//! Rounds run one at a time until all scopes and views are up to date. A round has sibling scopes and a batch of views:
//!
//! - Sibling scopes ([`ClientScope::is_sibling`]) differ only in properties that routes depend on, so one reuses the
//!   services of another.
//! - Scopes with the most proxies come first, so that many scopes with few proxies do not delay them.
//! - Identities take turns in a batch, so that an identity with many views does not delay others.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
    sync::{Arc, OnceLock},
};

use skysail_model::{ClientScope, Diagnostic, NamespaceFacts, Outline, ProxyView, World, compile_secrets};
use skysail_xds::{Kind, Layer, interest::Change, layer::Edits};

use super::{
    compiler::{CompilePanic, Compiler, PanicReport, catch_panic},
    nodes::{NodeName, Nodes},
    scope_resources::{ScopeChanges, ScopeResources, Sibling},
    scopes::{FailedCompile, Published, ScopeEntry},
    state::State,
    views::ViewEntry,
};
use crate::parallel;

/// Maximum number of views per round. Their proxies receive the change before the next round begins.
pub(super) const BATCH: usize = 128;

/// Scopes and views to compile after a change.
pub(super) struct Round {
    world: World,
    facts: Arc<OnceLock<NamespaceFacts>>,
    revision: u64,
    generation: u64,
    scopes: Vec<ScopeJob>,
    views: Vec<ViewJob>,
}

/// A scope to compile.
pub(super) struct ScopeJob {
    pub(super) scope: Arc<ClientScope>,
    pub(super) id: u64,
    pub(super) resources: ScopeResources,
    pub(super) changes: ScopeChanges,
    /// Base over which the scope lies; the base of the same round takes precedence.
    pub(super) base: Option<ScopeResources>,
}

/// A view whose own resources are to be compiled.
struct ViewJob {
    view: Arc<ProxyView>,
    scope: Arc<ClientScope>,
    outline: Arc<Outline>,
    own: Arc<Layer>,
    /// Secrets that changed, if nothing else of its own resources may differ.
    only_secrets: Option<BTreeSet<(String, String)>>,
}

/// Result of a round.
pub(super) struct RoundResult {
    revision: u64,
    generation: u64,
    scopes: Vec<(ScopeJob, Result<ScopeChange, CompilePanic>)>,
    views: Vec<(ViewJob, Result<OwnUpdate, CompilePanic>)>,
}

/// Changed names of a scope's layers, for proxies on each node.
struct ScopeChange {
    /// Layer over the shared one, for proxies on other nodes.
    local: Arc<Change>,
    shared: Arc<Change>,
    nodes: BTreeMap<NodeName, Arc<Change>>,
}

/// New own resources of a view.
struct OwnUpdate {
    own: Arc<Layer>,
    has_changed: bool,
    /// Findings about all own resources; `None` if only secrets were compiled.
    findings: Option<Vec<Diagnostic>>,
}

/// New resources of a scope.
struct ScopeUpdate {
    changes: ScopeChange,
    /// The change may concern all proxies, whatever their subscriptions.
    concerns_all: bool,
    published: Published,
}

impl Round {
    /// Compiles the round. Blocks.
    pub(super) fn run(self, compiler: &Compiler) -> RoundResult {
        let Self { world, facts, revision, generation, scopes, views } = self;
        let scopes = compile_scopes(scopes, compiler, &world, &facts, generation);
        let compiled = scopes.iter().filter(|(_, result)| result.is_ok() && !views.is_empty());
        let outlines: HashMap<_, _> = compiled.map(|(job, _)| (&job.scope, &job.resources.outline)).collect();
        let updates = parallel::map(&views, |job| {
            let outline = *outlines.get(&job.scope).unwrap_or(&&job.outline);
            if let Some(changed) = &job.only_secrets {
                return job.compile_secrets(&world, changed, generation);
            }
            let own = catch_panic(
                || "the workload's own resources".to_owned(),
                || (compiler.own)(&world, &job.view, outline),
            );
            own.map(|(resources, findings)| {
                let mut own = Arc::clone(&job.own);
                let has_changed = Arc::make_mut(&mut own).replace(generation, &resources);
                OwnUpdate { own, has_changed, findings: Some(findings) }
            })
        });
        RoundResult { revision, generation, scopes, views: views.into_iter().zip(updates).collect() }
    }
}

impl ViewJob {
    /// Compiles the secrets that may differ.
    fn compile_secrets(
        &self,
        world: &World,
        changed: &BTreeSet<(String, String)>,
        generation: u64,
    ) -> Result<OwnUpdate, CompilePanic> {
        let is_sent = |name: &str| self.own.get(Kind::Secret, name).is_some();
        let secrets = catch_panic(
            || "the gateway's secrets".to_owned(),
            || compile_secrets(world, &self.view, changed, is_sent),
        )?;
        let mut edits = Edits::default();
        for (name, secret) in secrets {
            match secret {
                Some(secret) => edits.set(secret),
                None => edits.remove(Kind::Secret, name),
            }
        }
        let mut own = Arc::clone(&self.own);
        let has_changed = !edits.is_empty() && Arc::make_mut(&mut own).edit(generation, edits, None);
        Ok(OwnUpdate { own, has_changed, findings: None })
    }
}

/// Compiles scopes one after another, each with the parts of a sibling before it. Bases come first.
fn compile_scopes(
    mut scopes: Vec<ScopeJob>,
    compiler: &Compiler,
    world: &World,
    facts: &OnceLock<NamespaceFacts>,
    generation: u64,
) -> Vec<(ScopeJob, Result<ScopeChange, CompilePanic>)> {
    let mut compiled: Vec<(ScopeJob, Result<ScopeChange, CompilePanic>, Arc<Layer>)> =
        Vec::with_capacity(scopes.len());
    let mut siblings: HashMap<ClientScope, usize> = HashMap::new();
    let mut bases: HashMap<Arc<ClientScope>, usize> = HashMap::new();
    let none = Arc::<Change>::default();
    scopes.sort_by_key(|job| !job.scope.is_base());
    for mut job in scopes {
        let layer_before = Arc::clone(&job.resources.layer);
        let nodes_before = Arc::clone(&job.resources.nodes);
        if job.resources.is_over(&job.scope) {
            let base = job.scope.base().and_then(|base| compiled.get(*bases.get(&base)?));
            let result = match base {
                Some((_, Err(panic), _)) => Err(panic.clone()),
                Some((base, Ok(change), _)) => Ok((base.resources.clone(), Arc::clone(&change.shared))),
                None => {
                    let base = job.base.take().unwrap_or_default();
                    Ok((base, Arc::new(Change::everything())))
                }
            };
            let result = result.and_then(|(base, shared)| {
                let facts = facts.get_or_init(|| world.namespace_facts());
                let ScopeJob { scope, resources, changes, .. } = &mut job;
                resources.update_over(compiler, (world, facts), scope, changes, generation, &base)?;
                let is_same = Arc::ptr_eq(&layer_before, &resources.layer);
                let own = || Arc::new(Change::since(&resources.layer, generation - 1));
                let local = if is_same { Arc::clone(&none) } else { own() };
                let nodes = changes_on_nodes(&nodes_before, &resources.nodes, generation);
                Ok(ScopeChange { local, shared, nodes })
            });
            compiled.push((job, result, layer_before));
            continue;
        }
        let sibling = siblings.get(&job.scope.sibling_key()).and_then(|index| compiled.get(*index));
        let sibling = sibling.map(|(other, _, layer_before)| Sibling {
            scope: &other.scope,
            resources: &other.resources,
            layer_before,
        });
        let result =
            job.resources.update(compiler, (world, facts), &job.scope, &job.changes, generation, sibling);
        let result = result.map(|()| {
            siblings.entry(job.scope.sibling_key()).or_insert(compiled.len());
            let shared = Arc::new(Change::since(&job.resources.layer, generation - 1));
            let nodes = changes_on_nodes(&nodes_before, &job.resources.nodes, generation);
            ScopeChange { local: Arc::clone(&none), shared, nodes }
        });
        if job.scope.is_base() {
            bases.insert(Arc::clone(&job.scope), compiled.len());
        }
        compiled.push((job, result, layer_before));
    }
    compiled.into_iter().map(|(job, result, _)| (job, result)).collect()
}

/// Returns the changed names of the layers of nodes.
fn changes_on_nodes(before: &Nodes, after: &Nodes, generation: u64) -> BTreeMap<NodeName, Arc<Change>> {
    let changed = after.iter().filter_map(|(node, of_node)| {
        let layer = of_node.layer.as_ref()?;
        let before = before.get(node).and_then(|before| before.layer.as_ref());
        let is_same = before.is_some_and(|before| Arc::ptr_eq(before, layer));
        let change = if is_same { None } else { Some(Change::since(layer, generation - 1)) };
        Some((Arc::clone(node), Arc::new(change.unwrap_or_default())))
    });
    changed.collect()
}

impl State {
    /// Takes the next round. Returns `None` if everything is up to date or cannot be compiled.
    pub(super) fn take_round(&mut self) -> Option<Round> {
        let scopes = self.take_scope_jobs();
        let views = self.take_view_jobs();
        if scopes.is_empty() && views.is_empty() {
            return None;
        }
        let (world, revision, generation) = (self.world.clone(), self.revision, self.generation + 1);
        let facts = Arc::clone(&self.facts);
        Some(Round { world, facts, revision, generation, scopes, views })
    }

    /// Takes the pending scope with the most proxies and its pending siblings.
    fn take_scope_jobs(&mut self) -> Vec<ScopeJob> {
        let revision = self.revision;
        // A scope waits until its base can be compiled or is up to date.
        let may_compile = |base: &ScopeEntry| {
            base.is_pending(revision)
                || base.published.is_some() && base.resources.is_some() && base.pending.is_empty()
        };
        let ready: Vec<_> = self
            .scopes
            .iter()
            .filter(|(_, entry)| entry.is_pending(revision))
            .filter_map(|(scope, entry)| {
                let is_over = entry.resources.as_ref().is_some_and(|resources| resources.is_over(scope));
                let Some(base) = scope.base().filter(|_| is_over) else { return Some((scope, entry, None)) };
                let base = self.scopes.get(&base).filter(|base| may_compile(base))?;
                Some((scope, entry, Some(base)))
            })
            .collect();
        let Some((first, ..)) = ready.iter().max_by_key(|(_, entry, _)| entry.clients) else {
            return Vec::new();
        };
        // With the base, if it is up to date and thus not in the round.
        let taken: Vec<_> = ready
            .iter()
            .filter(|(scope, ..)| first.is_sibling(scope))
            .map(|(scope, _, base)| {
                let base = base.filter(|base| !base.is_pending(revision));
                (Arc::clone(scope), base.and_then(|base| base.resources.clone()))
            })
            .collect();
        let mut nodes = if self.uses_nodes { self.nodes_in_use() } else { HashMap::new() };
        let job = |(scope, base)| {
            let entry = self.scopes.get_mut(&scope)?;
            let resources = entry.resources.take()?;
            entry.has_new_nodes = false;
            let nodes = nodes.remove(&scope).unwrap_or_default();
            let changes = ScopeChanges { world: std::mem::take(&mut entry.pending), nodes };
            Some(ScopeJob { scope, id: entry.id, resources, changes, base })
        };
        taken.into_iter().filter_map(job).collect()
    }

    /// Returns a batch of stale views whose scopes are up to date or in this round.
    fn take_view_jobs(&self) -> Vec<ViewJob> {
        let revision = self.revision;
        let mut stale = Vec::new();
        for (view, entry) in &self.views {
            if !entry.is_outdated() || !FailedCompile::may_retry(&entry.failed, revision) {
                continue;
            }
            let Some(scope) = self.scopes.get(&entry.scope) else { continue };
            // A view receives its own resources together with those of its scope. After a reassignment of views, a
            // scope without published resources is in this round, or it cannot be compiled.
            if scope.is_pending(revision) || scope.published.is_none() && scope.resources.is_some() {
                continue;
            }
            let outline = scope.published.as_ref().map_or(&entry.outline, |published| &published.outline);
            stale.push((view, entry, outline));
        }
        let in_turns = round_robin(stale, |(view, ..)| (&view.namespace, &view.service_account)).into_iter();
        let jobs = in_turns.take(BATCH).map(|(view, entry, outline)| ViewJob {
            view: Arc::clone(view),
            scope: Arc::clone(&entry.scope),
            outline: Arc::clone(outline),
            own: Arc::clone(&entry.own),
            only_secrets: (!entry.is_stale).then(|| entry.stale_secrets.clone()),
        });
        jobs.collect()
    }

    /// Publishes the result of a round. Returns reports of its panics.
    pub(super) fn finish_round(&mut self, result: RoundResult) -> Vec<PanicReport> {
        let RoundResult { revision, generation, scopes, views } = result;
        self.generation = generation;
        let mut reports = Vec::new();
        let scopes = self.finish_scopes(revision, scopes, &mut reports);
        let mut own = self.finish_views(revision, views, &mut reports);
        for (view, entry) in &mut self.views {
            // Avoids the lookup for thousands of views: most changes affect no own resources.
            let own = if own.is_empty() { None } else { own.remove(view) };
            let scope = scopes.get(&entry.scope);
            // A later round sends this view both kinds of resources together.
            let is_later =
                entry.is_outdated() && own.is_none() && FailedCompile::may_retry(&entry.failed, revision);
            if is_later || (scope.is_none() && own.is_none()) {
                continue;
            }
            let of_state = || self.scopes.get(&entry.scope)?.published.as_ref();
            // Without published resources of the scope, its proxies keep their last configuration.
            if let Some(published) = scope.map(|scope| &scope.published).or_else(of_state) {
                entry.update(own, scope, published);
            }
        }
        reports
    }

    fn finish_scopes(
        &mut self,
        revision: u64,
        scopes: Vec<(ScopeJob, Result<ScopeChange, CompilePanic>)>,
        reports: &mut Vec<PanicReport>,
    ) -> HashMap<Arc<ClientScope>, ScopeUpdate> {
        let mut updates = HashMap::with_capacity(scopes.len());
        let has_nodes = scopes.iter().any(|(job, _)| !job.resources.nodes.is_empty());
        let nodes = if has_nodes { self.nodes_in_use() } else { HashMap::new() };
        for (job, result) in scopes {
            let ScopeJob { scope, id, mut resources, changes, .. } = job;
            let Some(entry) = self.scopes.get_mut(&scope).filter(|entry| entry.id == id) else { continue };
            match result {
                Ok(of_layers) => {
                    // Proxies may have connected and left since the round was taken.
                    let used = nodes.get(&scope);
                    let is_used = |node: &NodeName| used.is_some_and(|used| used.contains(node));
                    if !resources.nodes.keys().all(is_used) {
                        Arc::make_mut(&mut resources.nodes).retain(|node, _| is_used(node));
                    }
                    let published = entry.publish(resources);
                    let concerns_all = changes.world.everything;
                    updates.insert(scope, ScopeUpdate { changes: of_layers, concerns_all, published });
                }
                Err(panic) => {
                    entry.resources = Some(resources);
                    entry.add_pending(&changes.world);
                    reports.push(entry.fail(revision, panic, &scope));
                }
            }
        }
        updates
    }

    fn finish_views(
        &mut self,
        revision: u64,
        views: Vec<(ViewJob, Result<OwnUpdate, CompilePanic>)>,
        reports: &mut Vec<PanicReport>,
    ) -> HashMap<Arc<ProxyView>, OwnUpdate> {
        let mut updates = HashMap::new();
        for (job, result) in views {
            // An equal view may have replaced this one; its proxies have received other layers.
            let is_same =
                self.views.get_key_value(&job.view).is_some_and(|(view, _)| Arc::ptr_eq(view, &job.view));
            let Some(entry) = self.views.get_mut(&job.view).filter(|_| is_same) else { continue };
            match result {
                Ok(update) => {
                    updates.insert(job.view, update);
                }
                Err(panic) => {
                    let (namespace, name) = (&job.view.namespace, &job.view.canonical_service);
                    let target = format!("workload {name} in namespace {namespace}");
                    reports.push(FailedCompile::record(&mut entry.failed, revision, panic, &target));
                }
            }
        }
        updates
    }
}

impl ScopeEntry {
    /// Returns whether the next round can compile the scope.
    fn is_pending(&self, revision: u64) -> bool {
        self.resources.is_some()
            && !self.is_opening
            && (!self.pending.is_empty() || self.has_new_nodes)
            && FailedCompile::may_retry(&self.failed, revision)
    }
}

impl ViewEntry {
    /// Returns whether own resources are to be compiled.
    fn is_outdated(&self) -> bool {
        self.is_stale || !self.stale_secrets.is_empty()
    }

    /// Publishes new own resources, new resources of the scope, or both. Wakes the streams that the change concerns.
    fn update(&mut self, own: Option<OwnUpdate>, scope: Option<&ScopeUpdate>, published: &Published) {
        let mut concerns_all = scope.is_some_and(|scope| scope.concerns_all);
        let (has_own, mut is_whole) = (own.is_some(), false);
        if let Some(OwnUpdate { own, has_changed, findings }) = own {
            self.own = own;
            self.stale_secrets.clear();
            self.failed = None;
            if let Some(findings) = findings {
                is_whole = true;
                (self.findings, self.is_stale) = (findings, false);
                self.outline = Arc::clone(&published.outline);
            }
            concerns_all |= has_changed;
        }
        if !is_whole && std::mem::take(&mut self.was_added_early) {
            self.is_stale |= !Arc::ptr_eq(&self.outline, &published.outline);
        }
        for (node, feed) in &self.feeds {
            let snapshot = published.snapshot(node, &self.own);
            feed.snapshots.send_if_modified(|current| {
                let has_changed = current.generation() != snapshot.generation();
                // An earlier round may have changed the scope.
                let has_layers = Arc::ptr_eq(&current.local, &snapshot.local)
                    && Arc::ptr_eq(&current.shared, &snapshot.shared);
                let is_late = has_own && scope.is_none() && !has_layers;
                *current = snapshot;
                let mut changes = scope.iter().flat_map(|scope| scope.changes.on_node(node));
                has_changed
                    && (concerns_all || is_late || changes.any(|change| feed.interest.concerns(change)))
            });
        }
    }
}

impl ScopeChange {
    /// Returns the changes for proxies on a node.
    fn on_node(&self, node: &str) -> [&Change; 2] {
        [self.nodes.get(node).unwrap_or(&self.local), &self.shared]
    }
}

/// Orders items so that the first item of each owner precedes the second item of any owner.
fn round_robin<T, K: Hash + Eq>(items: Vec<T>, owner: impl Fn(&T) -> K) -> Vec<T> {
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
