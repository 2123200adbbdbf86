//! Views: configuration for proxies with equal properties. A view has the resources of its scope and its own.

use std::{
    collections::{BTreeSet, HashSet},
    sync::{Arc, Mutex},
    time::Instant,
};

use skysail_model::{ChangeSet, ClientScope, Diagnostic, Outline, ProxyView};
use skysail_xds::{Resources, Snapshot, interest::Interest, server::ResourceFeed};
use tokio::sync::watch;
use tracing::info;

use super::{
    NewClient, PublishSettings, Refused,
    compiler::{Compiler, catch_panic},
    scopes::{FailedCompile, Published},
    state::{ClientEntry, State},
    status::{ClientStatus, SharedStatus},
};

/// A view and its published resources.
pub(super) struct ViewEntry {
    pub(super) scope: Arc<ClientScope>,
    pub(super) snapshots: watch::Sender<Snapshot>,
    /// Subscriptions of its proxies. A change that concerns none of them wakes no stream.
    pub(super) interest: Arc<Interest>,
    pub(super) findings: Vec<Diagnostic>,
    /// Identity to whose limit of declared views it counts; `None` for the view of a known pod.
    declared_by: Option<Arc<str>>,
    /// Number of connected proxies.
    clients: usize,
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

/// A view's own resources and the findings about them.
type OwnResources = (Resources, Vec<Diagnostic>);

/// A proxy that is ready for admission.
pub(super) struct Prepared {
    revision: u64,
    view: ProxyView,
    /// The pod is in the configuration; the view then describes the pod.
    is_known: bool,
    scope: ClientScope,
    /// Own resources of a new view and the outline of their compilation; `None` if the view exists or its scope is not
    /// compiled.
    own: Option<(OwnResources, Arc<Outline>)>,
}

/// Result of the admission of a proxy.
pub(super) enum Entry {
    Admitted(ResourceFeed, u64, SharedStatus),
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
        let view = node.view;
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
        Ok(Prepared { revision: self.revision, view, is_known, scope, own })
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
        let Prepared { revision, view, is_known, scope, own } = prepared;
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
        let (view, feed) = if let Some((view, entry)) = self.views.get_key_value(&view) {
            let interest = Arc::clone(&entry.interest);
            (Arc::clone(view), ResourceFeed { snapshot: entry.snapshots.subscribe(), interest })
        } else {
            let Some((own, outline)) = own else { return Ok(Entry::Retry) };
            if !Arc::ptr_eq(&outline, &published.outline) {
                return Ok(Entry::Retry);
            }
            let view = Arc::new(view);
            let declared_by = (!is_known).then(|| Arc::clone(&client.accounted_to));
            let feed = self.add_view(&view, &scope, published, own, declared_by, is_early);
            (view, feed)
        };
        Ok(self.add_client(client, view, &scope, feed))
    }

    fn add_view(
        &mut self,
        view: &Arc<ProxyView>,
        scope: &Arc<ClientScope>,
        Published { local, shared, outline }: Published,
        (own, findings): OwnResources,
        declared_by: Option<Arc<str>>,
        is_early: bool,
    ) -> ResourceFeed {
        let mut snapshot = Snapshot { local, shared, ..Snapshot::default() };
        Arc::make_mut(&mut snapshot.own).replace(self.generation, &own);
        self.log_view_findings(&findings);
        let (snapshots, snapshot) = watch::channel(snapshot);
        let interest = Arc::<Interest>::default();
        declared_by.iter().for_each(|identity| self.declared_views.add(identity));
        let entry = ViewEntry {
            scope: Arc::clone(scope),
            snapshots,
            interest: Arc::clone(&interest),
            findings,
            declared_by,
            clients: 0,
            outline,
            is_stale: false,
            stale_secrets: BTreeSet::new(),
            was_added_early: is_early,
            failed: None,
        };
        self.views.insert(Arc::clone(view), entry);
        ResourceFeed { snapshot, interest }
    }

    fn add_client(
        &mut self,
        client: &NewClient,
        view: Arc<ProxyView>,
        scope: &ClientScope,
        feed: ResourceFeed,
    ) -> Entry {
        if let Some(entry) = self.views.get_mut(&view) {
            entry.clients += 1;
        }
        let shared_identity = self.enter_scope(&client.accounted_to, scope);
        let accounted_to = shared_identity.unwrap_or_else(|| Arc::clone(&client.accounted_to));
        self.last_client_id += 1;
        let id = self.last_client_id;
        let status = Arc::new(Mutex::new(ClientStatus::new(id, client)));
        let pod = client.node.pod.as_str().into();
        let ips = client.node.ips.as_slice().into();
        self.clients.insert(id, ClientEntry { view, pod, ips, accounted_to, status: Arc::clone(&status) });
        Entry::Admitted(feed, id, status)
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
        entry.clients -= 1;
        if entry.clients == 0 {
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
            let is_addressed = || client.ips.iter().any(|ip| changes.addresses.contains(ip));
            if !changes.everything && !is_named() && !is_addressed() {
                continue;
            }
            let mut current = ProxyView::clone(&client.view);
            let identified = self.world.identify_pod(&client.pod, &client.ips, cluster_id, &mut current);
            let is_valid = identified.is_ok() && current == *client.view;
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
