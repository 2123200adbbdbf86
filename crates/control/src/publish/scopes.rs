//! Scopes: sets of resources that the proxies of one [`ClientScope`] share, with the state of their compilation.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Instant,
};

use skysail_model::{ChangeSet, ClientScope, Outline, World};
use skysail_xds::{Layer, Snapshot};
use tokio::sync::watch;

use super::{
    PublishSettings,
    compiler::{CompilePanic, PanicReport},
    nodes::{NodeName, Nodes},
    scope_resources::ScopeResources,
    state::State,
};
use crate::metrics::Limit;

/// A scope and the state of its compilation.
pub(super) struct ScopeEntry {
    /// Distinguishes the entry from a later one of the same scope.
    pub(super) id: u64,
    /// Resources that its proxies receive; `None` before the first successful compilation.
    pub(super) published: Option<Published>,
    /// Resources to update; `None` while a task compiles them.
    pub(super) resources: Option<ScopeResources>,
    /// Changes since the last compilation.
    pub(super) pending: Arc<ChangeSet>,
    /// Its proxies may have nodes for which nothing is compiled yet.
    pub(super) has_new_nodes: bool,
    /// The first compilation is in progress; proxies wait for it.
    pub(super) is_opening: bool,
    /// The last compilation panicked.
    pub(super) failed: Option<FailedCompile>,
    /// Notifies waiting proxies when the scope is published or its compilation fails. Closed when the scope is removed.
    pub(super) ready: watch::Sender<()>,
    /// Number of identities that use it.
    identities: usize,
    /// Number of connected proxies.
    pub(super) clients: usize,
}

/// Published resources of a scope.
#[derive(Clone)]
pub(super) struct Published {
    /// Differences from the base; empty if the scope lies over none.
    pub(super) local: Arc<Layer>,
    pub(super) shared: Arc<Layer>,
    pub(super) outline: Arc<Outline>,
    /// Differences on some nodes.
    pub(super) nodes: Arc<Nodes>,
}

impl Published {
    /// Returns the resources of proxies on a node. `own` are those of their view.
    pub(super) fn snapshot(&self, node: &str, own: &Arc<Layer>) -> Snapshot {
        let of_node = self.nodes.get(node).and_then(|of_node| of_node.layer.as_ref());
        let (own, local) = (Arc::clone(own), Arc::clone(of_node.unwrap_or(&self.local)));
        Snapshot { own, local, shared: Arc::clone(&self.shared) }
    }
}

/// A compilation that panicked. It is repeated after the next change.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct FailedCompile {
    /// Revision of the World that was compiled.
    pub(super) revision: u64,
    pub(super) panic: CompilePanic,
}

impl FailedCompile {
    /// Records a panic in `failed`. The report is new if the previous compilation did not panic in the same way.
    pub(super) fn record(
        failed: &mut Option<Self>,
        revision: u64,
        panic: CompilePanic,
        target: &str,
    ) -> PanicReport {
        let is_new = failed.as_ref().is_none_or(|before| before.panic != panic);
        let text = format!("{target}: {panic}");
        *failed = Some(Self { revision, panic });
        PanicReport { text, is_new }
    }

    /// Returns whether to compile again: the last compilation succeeded, or the World has changed since.
    pub(super) fn may_retry(failed: &Option<Self>, revision: u64) -> bool {
        failed.as_ref().is_none_or(|failed| failed.revision != revision)
    }
}

impl ScopeEntry {
    /// Returns whether changes may affect its resources. May return true if they do not.
    pub(super) fn is_affected(&self, world: &World, scope: &ClientScope, changes: &ChangeSet) -> bool {
        let Some(resources) = &self.resources else { return true };
        // Until earlier changes are compiled, the resources do not show which services the scope has.
        !self.pending.is_empty()
            || changes.affects_scope(world, scope, |service| resources.has_service(service))
    }

    /// Adds changes to those that are not compiled yet.
    pub(super) fn add_pending(&mut self, changes: &Arc<ChangeSet>) {
        if self.pending.is_empty() {
            self.pending = Arc::clone(changes);
        } else {
            Arc::make_mut(&mut self.pending).add(ChangeSet::clone(changes));
        }
    }

    /// Continues the entry of the same scope from before the views were reassigned. The counts are those of this entry.
    fn resume(&mut self, before: Self) {
        let Self { id, published, resources, pending, has_new_nodes, is_opening, failed, ready, .. } = before;
        (self.id, self.published, self.resources) = (id, published, resources);
        (self.pending, self.has_new_nodes, self.is_opening, self.failed, self.ready) =
            (pending, has_new_nodes, is_opening, failed, ready);
    }

    /// Publishes compiled resources and notifies waiting proxies.
    pub(super) fn publish(&mut self, resources: ScopeResources) -> Published {
        let (local, shared) = match &resources.below {
            Some(below) => (Arc::clone(&resources.layer), Arc::clone(below)),
            None => (Arc::default(), Arc::clone(&resources.layer)),
        };
        let (outline, nodes) = (Arc::clone(&resources.outline), Arc::clone(&resources.nodes));
        let published = Published { local, shared, outline, nodes };
        self.published = Some(published.clone());
        self.resources = Some(resources);
        self.failed = None;
        self.is_opening = false;
        self.ready.send_replace(());
        published
    }

    /// Records a panic of a compilation and notifies waiting proxies.
    pub(super) fn fail(&mut self, revision: u64, panic: CompilePanic, scope: &ClientScope) -> PanicReport {
        self.is_opening = false;
        self.ready.send_replace(());
        FailedCompile::record(&mut self.failed, revision, panic, &scope.to_string())
    }
}

impl State {
    /// Reserves a scope for an identity, within the limits. Returns true if the scope is new.
    pub(super) fn reserve(
        &mut self,
        identity: &Arc<str>,
        scope: ClientScope,
        settings: &PublishSettings,
        now: Instant,
    ) -> Result<(Arc<ClientScope>, bool), Limit> {
        self.check_scope(identity, &scope, settings, now)?;
        let (scope, is_new) = self.scope_entry(scope, true);
        self.use_scope(identity, &scope, now);
        Ok((scope, is_new))
    }

    /// Checks that an identity may use a scope.
    fn check_scope(
        &mut self,
        identity: &Arc<str>,
        scope: &ClientScope,
        settings: &PublishSettings,
        now: Instant,
    ) -> Result<(), Limit> {
        if self.identities.renew(identity, scope, now) {
            return Ok(());
        }
        if self.identities.scopes_of(identity) >= settings.limits.scopes_per_identity {
            return Err(Limit::Identity);
        }
        if !self.scopes.contains_key(scope) && self.scopes_in_use() >= settings.limits.scopes {
            return Err(Limit::Total);
        }
        Ok(())
    }

    /// Returns the number of scopes that are not bases.
    pub(super) fn scopes_in_use(&self) -> usize {
        self.scopes.keys().filter(|scope| !scope.is_base()).count()
    }

    /// Finds or creates the base of a new scope, within the limits. Returns `None` if the scope needs none.
    pub(super) fn open_base(
        &mut self,
        identity: &Arc<str>,
        scope: &ClientScope,
        settings: &PublishSettings,
        now: Instant,
    ) -> Result<Option<(Arc<ClientScope>, bool)>, Limit> {
        if self.scopes.get(scope).is_some_and(|entry| entry.published.is_some()) {
            return Ok(None);
        }
        let Some(base) = scope.base() else { return Ok(None) };
        self.check_scope(identity, scope, settings, now)?;
        let bases = self.scopes.keys().filter(|scope| scope.is_base()).count();
        if !self.scopes.contains_key(&base) && bases >= settings.limits.scopes {
            return Err(Limit::Total);
        }
        Ok(Some(self.scope_entry(base, true)))
    }

    /// Finds or creates the entry of a scope. Returns true if it is new.
    fn scope_entry(&mut self, scope: ClientScope, is_opening: bool) -> (Arc<ClientScope>, bool) {
        if let Some((scope, _)) = self.scopes.get_key_value(&scope) {
            return (Arc::clone(scope), false);
        }
        self.last_scope_id += 1;
        let entry = ScopeEntry {
            id: self.last_scope_id,
            published: None,
            resources: Some(ScopeResources::default()),
            pending: Arc::new(ChangeSet::everything()),
            has_new_nodes: false,
            is_opening,
            failed: None,
            ready: watch::Sender::default(),
            identities: 0,
            clients: 0,
        };
        let scope = Arc::new(scope);
        self.scopes.insert(Arc::clone(&scope), entry);
        (scope, true)
    }

    /// Records that an identity uses a scope.
    fn use_scope(&mut self, identity: &Arc<str>, scope: &Arc<ClientScope>, now: Instant) {
        if !self.identities.renew(identity, scope, now) {
            self.identities.add(identity, scope, now);
            if let Some(entry) = self.scopes.get_mut(scope) {
                entry.identities += 1;
            }
        }
    }

    /// Records that a proxy uses a scope. Returns the shared copy of its identity.
    pub(super) fn enter_scope(&mut self, identity: &str, scope: &ClientScope) -> Option<Arc<str>> {
        if let Some(entry) = self.scopes.get_mut(scope) {
            entry.clients += 1;
        }
        self.identities.client_entered(identity, scope)
    }

    /// Records that a proxy no longer uses a scope.
    pub(super) fn leave_scope(&mut self, identity: &str, scope: &ClientScope, now: Instant) {
        self.identities.client_left(identity, scope, now);
        if let Some(entry) = self.scopes.get_mut(scope) {
            entry.clients = entry.clients.saturating_sub(1);
        }
    }

    /// Removes and returns the scopes that no identity uses, and the bases that no scope needs.
    pub(super) fn drop_idle(&mut self, now: Instant) -> Vec<ScopeEntry> {
        let (scopes, mut unused) = (&self.scopes, Vec::new());
        let keep = |scope: &ClientScope| scopes.get(scope).is_some_and(is_busy);
        self.identities.drop_idle(now, keep, |scope| unused.push(Arc::clone(scope)));
        let mut removed = Vec::new();
        for scope in unused {
            let Some(entry) = self.scopes.get_mut(&scope) else { continue };
            entry.identities = entry.identities.saturating_sub(1);
            if entry.identities == 0 {
                removed.extend(self.scopes.remove(&scope));
            }
        }
        let needed: HashSet<ClientScope> = self.scopes.keys().filter_map(|scope| scope.base()).collect();
        let is_unused = |scope: &Arc<ClientScope>, entry: &mut ScopeEntry| {
            scope.is_base() && !is_busy(entry) && !needed.contains(&**scope)
        };
        removed.extend(self.scopes.extract_if(is_unused).map(|(_, entry)| entry));
        removed
    }

    /// Returns the nodes of the connected proxies of each scope, and of the scopes over each base.
    pub(super) fn nodes_in_use(&self) -> HashMap<Arc<ClientScope>, BTreeSet<NodeName>> {
        let mut nodes: HashMap<Arc<ClientScope>, BTreeSet<NodeName>> = HashMap::new();
        for entry in self.views.values() {
            let of_scope = nodes.entry(Arc::clone(&entry.scope)).or_default();
            of_scope.extend(entry.feeds.keys().cloned());
        }
        let bases = nodes.iter().filter_map(|(scope, nodes)| {
            let (base, _) = self.scopes.get_key_value(&scope.base()?)?;
            Some((Arc::clone(base), nodes.clone()))
        });
        for (base, of_scope) in bases.collect::<Vec<_>>() {
            nodes.entry(base).or_default().extend(of_scope);
        }
        nodes
    }

    /// Reassigns views to scopes after the properties that assign them have changed. If several scopes become
    /// one, their proxies receive the resources that only the other scopes had, and the deletions. With `keeps`, scopes
    /// with the same views as before stay as they are.
    pub(super) fn regroup(&mut self, keeps: bool) {
        let mut before = std::mem::take(&mut self.scopes);
        // Bases stay as they are: they depend on none of these properties.
        self.scopes.extend(before.extract_if(|scope, _| scope.is_base()));
        self.identities.clear();
        let clients = std::mem::take(&mut self.clients);
        for client in clients.values() {
            let scope = self.scope_entry(ClientScope::of(&client.view, &self.grouping), false).0;
            self.use_scope(&client.accounted_to, &scope, Instant::now());
            self.enter_scope(&client.accounted_to, &scope);
        }
        self.clients = clients;
        let mut origins: HashMap<Arc<ClientScope>, HashSet<Arc<ClientScope>>> = HashMap::new();
        for (view, entry) in &mut self.views {
            let scope = ClientScope::of(view, &self.grouping);
            let Some((scope, _)) = self.scopes.get_key_value(&scope) else { continue };
            let origin = std::mem::replace(&mut entry.scope, Arc::clone(scope));
            origins.entry(Arc::clone(scope)).or_default().insert(origin);
        }
        let generation = self.generation + 1;
        let bases: HashMap<Arc<ClientScope>, ScopeResources> = self
            .scopes
            .iter()
            .filter(|(scope, _)| scope.is_base())
            .filter_map(|(scope, entry)| Some((Arc::clone(scope), entry.resources.clone()?)))
            .collect();
        let is_kept = |scope: &Arc<ClientScope>| {
            keeps && origins.get(scope).is_some_and(|origins| origins.iter().all(|origin| origin == scope))
        };
        for (scope, entry) in self.scopes.iter_mut().filter(|(scope, _)| !scope.is_base() && !is_kept(scope))
        {
            let origins = origins.get(scope).into_iter().flatten();
            let origins: Vec<(&Arc<ClientScope>, &ScopeResources)> = origins
                .filter_map(|origin| Some((origin, before.get(origin)?.resources.as_ref()?)))
                .collect();
            let resources = entry.resources.get_or_insert_default();
            let flat = |(origin, resources): &(&Arc<ClientScope>, &ScopeResources)| {
                resources.flatten(origin.base().and_then(|base| bases.get(&base)))
            };
            match origins[..] {
                [] => {}
                [(origin, of_origin)] if of_origin.is_over(origin) && origin.base() == scope.base() => {
                    *resources = of_origin.clone();
                }
                [one] => {
                    *resources = flat(&one);
                    resources.inherit_nodes(one.1, generation);
                }
                _ => {
                    resources.is_flat = true;
                    origins.iter().for_each(|origin| resources.inherit(&flat(origin), generation));
                    origins.iter().for_each(|origin| resources.inherit_nodes(origin.1, generation));
                }
            }
        }
        for (scope, entry) in self.scopes.iter_mut().filter(|(scope, _)| is_kept(scope)) {
            if let Some(same) = before.remove(scope) {
                entry.resume(same);
            }
        }
        // Proxies that moved to a scope over a base may have nodes that are new to the base.
        let uses_nodes = self.uses_nodes;
        self.scopes.values_mut().for_each(|entry| entry.has_new_nodes |= uses_nodes);
    }
}

fn is_busy(entry: &ScopeEntry) -> bool {
    entry.is_opening || entry.resources.is_none()
}
