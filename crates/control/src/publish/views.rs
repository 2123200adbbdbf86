//! Views: configuration for proxies with equal properties. A view has the resources of its scope and its own.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::{Arc, Mutex},
    time::Instant,
};

use skysail_model::{ChangeSet, ClientScope, Diagnostic, Outline, ProxyView};
use skysail_xds::{Layer, Resources, Snapshot, interest::Interest, server::ResourceFeed};
use tokio::sync::watch;
use tracing::info;

use super::{
    NewClient, PublishSettings, Refused,
    compiler::{Compiler, catch_panic},
    nodes::NodeName,
    scopes::{FailedCompile, Published},
    state::{ClientEntry, State},
    status::{ClientStatus, SharedStatus},
};

/// A view and its published resources.
pub(super) struct ViewEntry {
    pub(super) scope: Arc<ClientScope>,
    /// Its own resources.
    pub(super) own: Arc<Layer>,
    /// Its proxies, by the name of their node.
    pub(super) feeds: BTreeMap<NodeName, NodeFeed>,
    pub(super) findings: Vec<Diagnostic>,
    /// Identity to whose limit of declared views it counts; `None` for the view of a known pod.
    declared_by: Option<Arc<str>>,
    /// Outline with which its own resources were compiled.
    pub(super) outline: Arc<Outline>,
    /// A change may affect its own resources.
    pub(super) is_stale: bool,
    /// Secrets (namespace, name) whose change may affect the secrets among its own resources.
    pub(super) stale_secrets: BTreeSet<(String, String)>,
    /// The view was added while its scope was not up to date.
    pub(super) was_added_early: bool,
    pub(super) failed: Option<FailedCompile>,
}

/// The proxies of a view on one node.
pub(super) struct NodeFeed {
    pub(super) snapshots: watch::Sender<Snapshot>,
    /// Their subscriptions. A change that concerns none of them wakes no stream.
    pub(super) interest: Arc<Interest>,
    /// Number of connected proxies.
    clients: usize,
}

/// A view's own resources and the findings about them.
type OwnResources = (Resources, Vec<Diagnostic>);

/// A proxy that is ready for admission.
pub(super) struct Prepared {
    revision: u64,
    view: ProxyView,
    node: NodeName,
    /// The pod is in the configuration; the view then describes the pod.
    is_known: bool,
    scope: ClientScope,
    /// Own resources of a new view and the outline of their compilation; `None` if the view exists or its scope is not
    /// compiled.
    own: Option<(OwnResources, Arc<Outline>)>,
}

/// Result of the admission of a proxy.
pub(super) enum Entry {
    /// The resources of its scope may depend on its node, for which they are compiled in a round, if the last value is
    /// true.
    Admitted(ResourceFeed, u64, SharedStatus, bool),
    /// The state has changed since the preparation; prepare again.
    Retry,
    /// The scope or its base is being compiled.
    Wait(watch::Receiver<()>),
    /// This scope, or base of a scope, is new and has to be compiled.
    NewScope(Arc<ClientScope>, u64, watch::Receiver<()>),
}

impl State {
    /// Determines the view of a proxy, and compiles the view's own resources if the view is new.
    pub(super) fn prepare(
        &self,
        client: &NewClient,
        settings: &PublishSettings,
        compiler: &Compiler,
    ) -> Result<Prepared, Refused> {
        let mut node = client.node.clone();
        let is_known =
            self.world.identify(&mut node, &settings.cluster_id).map_err(Refused::AccountMismatch)?;
        let (hostname, view) = (node.hostname().into(), node.view);
        // A proxy declares its idle timeout, of which there are many.
        let is_known = is_known && view.idle_timeout.is_none();
        self.check_view(&client.accounted_to, &view, is_known, settings)?;
        let scope = ClientScope::of(&view, &self.grouping);
        let published = self.scopes.get(&scope).and_then(|entry| entry.published.as_ref());
        let own = match published {
            Some(Published { outline, .. }) if !self.views.contains_key(&view) => {
                let own = catch_panic(|| node.id, || (compiler.own)(&self.world, &view, outline));
                Some((own.map_err(Refused::Broken)?, Arc::clone(outline)))
            }
            _ => None,
        };
        Ok(Prepared { revision: self.revision, view, node: hostname, is_known, scope, own })
    }

    /// Admits a proxy if its scope is compiled.
    pub(super) fn enter(
        &mut self,
        client: &NewClient,
        prepared: Prepared,
        settings: &PublishSettings,
        now: Instant,
    ) -> Result<Entry, Refused> {
        if self.is_closed {
            return Err(Refused::Closed);
        }
        let Prepared { revision, view, node, is_known, scope, own } = prepared;
        if revision != self.revision {
            return Ok(Entry::Retry);
        }
        self.check_view(&client.accounted_to, &view, is_known, settings)?;
        let base = self.open_base(&client.accounted_to, &scope, settings, now).map_err(Refused::Limit)?;
        if let Some((base, is_new)) = base
            && let Some(entry) = self.scopes.get(&base)
            && entry.published.is_none()
        {
            return match &entry.failed {
                _ if is_new => Ok(Entry::NewScope(base, entry.id, entry.ready.subscribe())),
                Some(failed) if !entry.is_opening => Err(Refused::Broken(failed.panic.clone())),
                _ => Ok(Entry::Wait(entry.ready.subscribe())),
            };
        }
        let (scope, is_new) =
            self.reserve(&client.accounted_to, scope, settings, now).map_err(Refused::Limit)?;
        let Some(entry) = self.scopes.get(&scope) else { return Ok(Entry::Retry) };
        let Some(published) = entry.published.clone() else {
            return match &entry.failed {
                _ if is_new => Ok(Entry::NewScope(scope, entry.id, entry.ready.subscribe())),
                Some(failed) if !entry.is_opening => Err(Refused::Broken(failed.panic.clone())),
                _ => Ok(Entry::Wait(entry.ready.subscribe())),
            };
        };
        let is_early = entry.resources.is_none() || !entry.pending.is_empty();
        let view = if let Some((view, _)) = self.views.get_key_value(&view) {
            Arc::clone(view)
        } else {
            let Some((own, outline)) = own else { return Ok(Entry::Retry) };
            if !Arc::ptr_eq(&outline, &published.outline) {
                return Ok(Entry::Retry);
            }
            let view = Arc::new(view);
            let declared_by = (!is_known).then(|| Arc::clone(&client.accounted_to));
            self.add_view(&view, &scope, &published, own, declared_by, is_early);
            view
        };
        let Some(entry) = self.views.get_mut(&view) else { return Ok(Entry::Retry) };
        let feed = entry.feeds.entry(Arc::clone(&node)).or_insert_with(|| NodeFeed {
            snapshots: watch::channel(published.snapshot(&node, &entry.own)).0,
            interest: Arc::default(),
            clients: 0,
        });
        feed.clients += 1;
        let (snapshot, interest) = (feed.snapshots.subscribe(), Arc::clone(&feed.interest));
        let needs_round = self.uses_nodes && !published.nodes.contains_key(&node);
        if needs_round {
            self.add_node(&scope);
        }
        Ok(self.add_client(client, (view, node), &scope, ResourceFeed { snapshot, interest }, needs_round))
    }

    /// Marks a scope and its base: nothing may have been compiled for the node of a proxy.
    fn add_node(&mut self, scope: &ClientScope) {
        for scope in scope.base().iter().chain([scope]) {
            if let Some(entry) = self.scopes.get_mut(scope) {
                entry.has_new_nodes = true;
            }
        }
    }

    fn add_view(
        &mut self,
        view: &Arc<ProxyView>,
        scope: &Arc<ClientScope>,
        published: &Published,
        (resources, findings): OwnResources,
        declared_by: Option<Arc<str>>,
        is_early: bool,
    ) {
        let mut own = Layer::default();
        own.replace(self.generation, &resources);
        self.log_view_findings(&findings);
        declared_by.iter().for_each(|identity| self.declared_views.add(identity));
        let entry = ViewEntry {
            scope: Arc::clone(scope),
            own: Arc::new(own),
            feeds: BTreeMap::new(),
            findings,
            declared_by,
            outline: Arc::clone(&published.outline),
            is_stale: false,
            stale_secrets: BTreeSet::new(),
            was_added_early: is_early,
            failed: None,
        };
        self.views.insert(Arc::clone(view), entry);
    }

    fn add_client(
        &mut self,
        client: &NewClient,
        (view, node): (Arc<ProxyView>, NodeName),
        scope: &ClientScope,
        feed: ResourceFeed,
        needs_round: bool,
    ) -> Entry {
        let shared_identity = self.enter_scope(&client.accounted_to, scope);
        let accounted_to = shared_identity.unwrap_or_else(|| Arc::clone(&client.accounted_to));
        self.last_client_id += 1;
        let id = self.last_client_id;
        let status = Arc::new(Mutex::new(ClientStatus::new(id, client)));
        let pod = client.node.pod.as_str().into();
        let ips = client.node.ips.as_slice().into();
        let entry = ClientEntry { view, node, pod, ips, accounted_to, status: Arc::clone(&status) };
        self.clients.insert(id, entry);
        Entry::Admitted(feed, id, status, needs_round)
    }

    /// Removes a proxy, and its view if it was the last one.
    pub(super) fn leave(&mut self, id: u64, now: Instant) {
        let Some(client) = self.clients.remove(&id) else { return };
        let scope = ClientScope::of(&client.view, &self.grouping);
        self.leave_scope(&client.accounted_to, &scope, now);
        // If the client's view was ended, another entry of an equal view may exist.
        let is_same = |(view, _): &(&Arc<ProxyView>, &ViewEntry)| Arc::ptr_eq(view, &client.view);
        if self.views.get_key_value(&client.view).filter(is_same).is_none() {
            return;
        }
        let Some(entry) = self.views.get_mut(&client.view) else { return };
        let Some(feed) = entry.feeds.get_mut(&client.node) else { return };
        feed.clients -= 1;
        if feed.clients == 0 {
            entry.feeds.remove(&client.node);
        }
        if entry.feeds.is_empty() {
            self.remove_view(&client.view);
        }
    }

    /// Checks that an identity may have a view: the view exists, it belongs to a known pod, or the limits allow a new
    /// one.
    fn check_view(
        &self,
        identity: &str,
        view: &ProxyView,
        is_known: bool,
        settings: &PublishSettings,
    ) -> Result<(), Refused> {
        if is_known || self.views.contains_key(view) {
            return Ok(());
        }
        self.declared_views.check(identity, &settings.limits).map_err(Refused::Limit)
    }

    /// Removes a view, which ends its streams. Returns whether the view existed.
    fn remove_view(&mut self, view: &ProxyView) -> bool {
        let removed = self.views.remove(view);
        if let Some(identity) = removed.as_ref().and_then(|entry| entry.declared_by.as_ref()) {
            self.declared_views.remove(identity);
        }
        removed.is_some()
    }

    /// Ends the streams of views that no longer match the pods of their proxies or the services that lead to them.
    /// These proxies connect again, send the versions that they have, and receive the differences.
    pub(super) fn end_outdated_views(&mut self, changes: &ChangeSet, cluster_id: &str) {
        if !changes.everything && changes.pods.is_empty() && changes.addresses.is_empty() {
            return;
        }
        let pods: HashSet<(&str, &str)> =
            changes.pods.iter().map(|(namespace, name)| (namespace.as_str(), name.as_str())).collect();
        let mut outdated: HashSet<Arc<ProxyView>> = HashSet::new();
        for client in self.clients.values() {
            let is_named = || pods.contains(&(&*client.view.namespace, &*client.pod));
            let is_addressed = || {
                let pod = self.world.pod(&client.view.namespace, &client.pod);
                let ips = pod.map_or(&*client.ips, |pod| &pod.spec.ips);
                !changes.addresses.is_empty() && ips.iter().any(|ip| changes.addresses.contains(ip))
            };
            if !changes.everything && !is_named() && !is_addressed() {
                continue;
            }
            let mut current = ProxyView::clone(&client.view);
            let identified = self.world.identify_pod(&client.pod, &client.ips, cluster_id, &mut current);
            let node = self.world.node_of_pod(&client.view.namespace, &client.pod);
            let is_valid = identified.is_ok()
                && current == *client.view
                && node.is_none_or(|node| *node == *client.node);
            if !is_valid {
                outdated.insert(Arc::clone(&client.view));
            }
        }
        let ended = outdated.iter().filter(|view| self.remove_view(view)).count();
        if ended > 0 {
            info!(views = ended, "views no longer match their pods; their proxies have to connect again");
        }
    }
}
