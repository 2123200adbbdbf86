//! The state of the mesh at one moment: the World, the compiled scopes and views, and the connected proxies.
//!
//! All functions are short except [`State::prepare`], which only reads: many proxies run it at the same time. Scopes are
//! compiled elsewhere (`round`), from a clone of the World.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Instant,
};

use skysail_core::fingerprint;
use skysail_model::{ChangeSet, ClientScope, Diagnostic, Files, Outline, Parsed, ProxyView, Severity, World};
use skysail_source::{FileChange, FileState};
use skysail_xds::{Layer, Resources, Snapshot, interest::Interest, server::ResourceFeed};
use tokio::sync::watch;
use tracing::{error, info, warn};

use super::{
    NewClient, Refused, Settings,
    changes::{Applied, Changes},
    compiler::{Compiler, Panicked, contain},
    identities::{DeclaredViews, Identities},
    scope::Scope,
    status::{ClientStatus, SharedStatus},
};
use crate::{metrics::Limit, platform::Platform};

#[derive(Default)]
pub(super) struct State {
    pub(super) world: World,
    files: Files,
    /// The last changes of the configuration that are in force.
    pub(super) changes: Changes,
    pub(super) platform: Arc<Platform>,
    /// Files read, with the fingerprints of their texts.
    pub(super) taken: BTreeMap<String, u64>,
    /// Files that cannot be read, and why.
    unreadable: BTreeMap<String, String>,
    /// Findings about the World; those of views are kept with them.
    pub(super) findings: Vec<Diagnostic>,
    /// True once the files present at the start were read.
    pub(super) loaded: bool,
    /// Changes of the World so far.
    pub(super) revision: u64,
    /// Last published generation. New proxies are sent this generation; compiles for connected proxies belong to the next.
    pub(super) generation: u64,
    /// Keys of the labels on which shared resources depend.
    pub(super) label_keys: BTreeSet<String>,
    pub(super) slots: HashMap<Arc<ClientScope>, Slot>,
    next_slot: u64,
    pub(super) views: HashMap<Arc<ProxyView>, View>,
    pub(super) clients: BTreeMap<u64, Client>,
    pub(super) identities: Identities,
    declared: DeclaredViews,
    /// Findings that were logged and still hold.
    pub(super) said: BTreeSet<Diagnostic>,
    next_client: u64,
    pub(super) closed: bool,
}

/// A scope and the state of its compilation.
pub(super) struct Slot {
    /// Distinguishes it from a later slot of the same surroundings.
    pub(super) id: u64,
    /// Resources that its proxies are sent; `None` before the first compile.
    pub(super) published: Option<Published>,
    /// The scope; `None` while it is being compiled.
    pub(super) scope: Option<Scope>,
    /// Changes since the scope was compiled.
    pub(super) missed: ChangeSet,
    /// True during the first compile, for which proxies wait.
    pub(super) opening: bool,
    /// The last compile panicked.
    pub(super) broken: Option<Broken>,
    /// Wakes waiting proxies when the scope is published or broken; closed when it is removed.
    pub(super) opened: watch::Sender<()>,
    /// Number of identities that use it.
    uses: usize,
    /// Connected proxies.
    pub(super) clients: usize,
}

/// Resources of a scope.
#[derive(Clone)]
pub(super) struct Published {
    pub(super) layer: Arc<Layer>,
    pub(super) outline: Arc<Outline>,
}

/// A compile that panicked; repeated after the next change.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Broken {
    pub(super) revision: u64,
    pub(super) panicked: Panicked,
}

/// A view: configuration for equal proxies.
pub(super) struct View {
    pub(super) surroundings: Arc<ClientScope>,
    pub(super) sender: watch::Sender<Snapshot>,
    /// Subscriptions of its proxies. A change that concerns none of them wakes no stream.
    pub(super) interest: Arc<Interest>,
    pub(super) findings: Vec<Diagnostic>,
    /// Identity whose limit of declared views it counts against; `None` for the view of a known pod.
    declared: Option<Arc<str>>,
    clients: usize,
    /// Outline with which its own resources were compiled.
    pub(super) outline: Arc<Outline>,
    /// True if a change may affect its own resources.
    pub(super) stale: bool,
    /// True if it was added while its scope was not up to date.
    pub(super) early: bool,
    pub(super) broken: Option<Broken>,
}

/// Resources of one view and the findings about them.
type Own = (Resources, Vec<Diagnostic>);

/// A connected proxy.
pub(super) struct Client {
    pub(super) view: Arc<ProxyView>,
    pod: Box<str>,
    who: Arc<str>,
    pub(super) status: SharedStatus,
}

/// A proxy that is about to be admitted.
pub(super) struct Prepared {
    revision: u64,
    view: ProxyView,
    /// True if its pod is known; the view then describes the pod.
    known: bool,
    surroundings: ClientScope,
    /// Resources of its view and the outline of their compile, if the scope exists and the view does not.
    own: Option<(Own, Arc<Outline>)>,
}

/// Result of admitting a proxy.
pub(super) enum Entry {
    Entered(ResourceFeed, u64, SharedStatus),
    /// The state changed after the proxy was prepared; prepare again.
    Again,
    /// Its scope is being compiled.
    Wait(watch::Receiver<()>),
    /// Its scope is new.
    Open(Arc<ClientScope>, u64, watch::Receiver<()>),
}

impl State {
    pub(super) fn of(files: Files, world: World) -> Self {
        Self { files, world, ..Self::default() }
    }

    /// Applies changed files, whose parsed contents are given. Returns the changes of the World.
    pub(super) fn apply_files(
        &mut self,
        changes: Vec<FileChange>,
        parsed: Vec<Result<Parsed, Panicked>>,
    ) -> Vec<Applied> {
        let mut applied = Vec::new();
        for (FileChange { layer, path, state }, parsed) in changes.into_iter().zip(parsed) {
            self.unreadable.remove(&path);
            let changes = match (state, parsed) {
                (FileState::Text(text), Ok(parsed)) => {
                    self.taken.insert(path.clone(), fingerprint(&text));
                    self.files.take(layer, &path, parsed)
                }
                (FileState::Text(_), Err(panicked)) => {
                    let reason =
                        format!("reading it panicked, which is a mistake in this program: {panicked}");
                    self.unreadable.insert(path, reason);
                    continue;
                }
                (FileState::Gone, _) => {
                    self.taken.remove(&path);
                    self.files.remove(layer, &path)
                }
                (FileState::Unreadable(reason), _) => {
                    self.unreadable.insert(path, reason);
                    continue;
                }
            };
            for change in changes {
                self.platform.note(&change);
                applied.extend(Applied::apply(change, &path, &mut self.world));
            }
        }
        self.platform.configure(self.world.mesh());
        applied
    }

    /// Marks the scopes and views that a change of the World may affect.
    pub(super) fn note_change(&mut self, home: &str) {
        self.revision += 1;
        let mut touched = self.world.take_touched();
        self.end_contradicted(&touched, home);
        touched.pods.clear();
        let label_keys = self.world.label_keys();
        if self.label_keys != label_keys {
            self.label_keys = label_keys;
            self.regroup();
            touched.everything = true;
        }
        if touched.everything {
            touched = ChangeSet::everything();
        }
        if touched.is_nothing() {
            return;
        }
        self.slots.values_mut().for_each(|slot| slot.missed.add(touched.clone()));
        for (view, state) in &mut self.views {
            state.stale |= touched.touches_workloads_in(&view.namespace);
        }
    }

    /// Ends the streams of views that no longer agree with the pods of their proxies. The proxies connect again, list the
    /// versions that they have, and are sent the differences.
    fn end_contradicted(&mut self, touched: &ChangeSet, home: &str) {
        if !touched.everything && touched.pods.is_empty() {
            return;
        }
        let pods: HashSet<(&str, &str)> =
            touched.pods.iter().map(|(namespace, name)| (namespace.as_str(), name.as_str())).collect();
        let mut contradicted: HashSet<Arc<ProxyView>> = HashSet::new();
        for client in self.clients.values() {
            if !touched.everything && !pods.contains(&(&*client.view.namespace, &*client.pod)) {
                continue;
            }
            let mut known = ProxyView::clone(&client.view);
            let agrees =
                self.world.identify_pod(&client.pod, home, &mut known).is_ok() && known == *client.view;
            if !agrees {
                contradicted.insert(Arc::clone(&client.view));
            }
        }
        let ended = contradicted.iter().filter(|view| self.remove_view(view)).count();
        if ended > 0 {
            info!(
                views = ended,
                "pods are not what their proxies were taken for; these are to connect again"
            );
        }
    }

    /// Reassigns views after the label keys that distinguish scopes have changed. Where several scopes become one, their proxies
    /// are sent the resources that only the others had, and the removals.
    fn regroup(&mut self) {
        let before = std::mem::take(&mut self.slots);
        self.identities.clear();
        let clients = std::mem::take(&mut self.clients);
        for client in clients.values() {
            let surroundings = self.slot(ClientScope::of(&client.view, &self.label_keys), false).0;
            self.use_slot(&client.who, &surroundings, Instant::now());
            self.enter_slot(&client.who, &surroundings);
        }
        self.clients = clients;
        let mut origins: HashMap<Arc<ClientScope>, HashSet<Arc<ClientScope>>> = HashMap::new();
        for (view, state) in &mut self.views {
            let surroundings = ClientScope::of(view, &self.label_keys);
            let Some((surroundings, _)) = self.slots.get_key_value(&surroundings) else { continue };
            let origin = std::mem::replace(&mut state.surroundings, Arc::clone(surroundings));
            origins.entry(Arc::clone(surroundings)).or_default().insert(origin);
        }
        for (surroundings, slot) in &mut self.slots {
            let origins = origins.get(surroundings).into_iter().flatten();
            let origins: Vec<&Scope> =
                origins.filter_map(|origin| before.get(origin)?.scope.as_ref()).collect();
            let scope = slot.scope.get_or_insert_default();
            match origins[..] {
                [origin] => *scope = origin.clone(),
                _ => origins.iter().for_each(|origin| scope.inherit(origin, self.generation + 1)),
            }
        }
    }

    /// Determines the view of a proxy, and compiles the view's own resources if there is no such view yet.
    pub(super) fn prepare(
        &self,
        client: &NewClient,
        settings: &Settings,
        compiler: &Compiler,
    ) -> Result<Prepared, Refused> {
        let mut node = client.node.clone();
        let known = self.world.identify(&mut node, &settings.cluster_id).map_err(Refused::OtherAccount)?;
        let view = node.view;
        self.check_view(&client.who, &view, known, settings)?;
        let surroundings = ClientScope::of(&view, &self.label_keys);
        let published = self.slots.get(&surroundings).and_then(|slot| slot.published.as_ref());
        let own = match published {
            Some(Published { outline, .. }) if !self.views.contains_key(&view) => {
                let own = contain(|| node.id, || (compiler.own)(&self.world, &view, outline));
                Some((own.map_err(Refused::Broken)?, Arc::clone(outline)))
            }
            _ => None,
        };
        Ok(Prepared { revision: self.revision, view, known, surroundings, own })
    }

    /// Admits a proxy whose scope is compiled.
    pub(super) fn enter(
        &mut self,
        client: &NewClient,
        prepared: Prepared,
        settings: &Settings,
        now: Instant,
    ) -> Result<Entry, Refused> {
        if self.closed {
            return Err(Refused::Closed);
        }
        let Prepared { revision, view, known, surroundings, own } = prepared;
        if revision != self.revision {
            return Ok(Entry::Again);
        }
        self.check_view(&client.who, &view, known, settings)?;
        let (surroundings, is_new) =
            self.reserve(&client.who, surroundings, settings, now).map_err(Refused::Limit)?;
        let Some(slot) = self.slots.get(&surroundings) else { return Ok(Entry::Again) };
        let Some(Published { layer, outline }) = slot.published.clone() else {
            return match &slot.broken {
                _ if is_new => Ok(Entry::Open(surroundings, slot.id, slot.opened.subscribe())),
                Some(broken) if !slot.opening => Err(Refused::Broken(broken.panicked.clone())),
                _ => Ok(Entry::Wait(slot.opened.subscribe())),
            };
        };
        let is_behind = slot.scope.is_none() || !slot.missed.is_nothing();
        let (view, watched) = if let Some((view, state)) = self.views.get_key_value(&view) {
            (
                Arc::clone(view),
                ResourceFeed { snapshot: state.sender.subscribe(), interest: Arc::clone(&state.interest) },
            )
        } else {
            let Some(((made, findings), with)) = own else { return Ok(Entry::Again) };
            if !Arc::ptr_eq(&with, &outline) {
                return Ok(Entry::Again);
            }
            let mut snapshot = Snapshot { shared: layer, ..Snapshot::default() };
            Arc::make_mut(&mut snapshot.own).replace(self.generation, &made);
            for finding in &findings {
                if self.said.insert(finding.clone()) {
                    say(finding);
                }
            }
            let (sender, snapshot) = watch::channel(snapshot);
            let interest = Arc::<Interest>::default();
            let declared = (!known).then(|| Arc::clone(&client.who));
            declared.iter().for_each(|who| self.declared.add(who));
            let state = View {
                surroundings: Arc::clone(&surroundings),
                sender,
                interest: Arc::clone(&interest),
                findings,
                declared,
                clients: 0,
                outline,
                stale: false,
                early: is_behind,
                broken: None,
            };
            let view = Arc::new(view);
            self.views.insert(Arc::clone(&view), state);
            (view, ResourceFeed { snapshot, interest })
        };
        Ok(self.admit(client, view, &surroundings, watched))
    }

    fn admit(
        &mut self,
        client: &NewClient,
        view: Arc<ProxyView>,
        surroundings: &ClientScope,
        watched: ResourceFeed,
    ) -> Entry {
        if let Some(state) = self.views.get_mut(&view) {
            state.clients += 1;
        }
        let who = self.enter_slot(&client.who, surroundings).unwrap_or_else(|| Arc::clone(&client.who));
        self.next_client += 1;
        let id = self.next_client;
        let status = Arc::new(Mutex::new(ClientStatus::new(id, client)));
        let pod = client.node.pod.as_str().into();
        self.clients.insert(id, Client { view, pod, who, status: Arc::clone(&status) });
        Entry::Entered(watched, id, status)
    }

    /// Checks that an identity may have a view: it exists, it belongs to a known pod, or the limits allow it.
    fn check_view(
        &self,
        who: &str,
        view: &ProxyView,
        known: bool,
        settings: &Settings,
    ) -> Result<(), Refused> {
        if known || self.views.contains_key(view) {
            return Ok(());
        }
        self.declared.check(who, &settings.limits).map_err(Refused::Limit)
    }

    /// Removes a view; true if it was there.
    fn remove_view(&mut self, view: &ProxyView) -> bool {
        let removed = self.views.remove(view);
        if let Some(who) = removed.as_ref().and_then(|view| view.declared.as_ref()) {
            self.declared.remove(who);
        }
        removed.is_some()
    }

    /// Reserves a scope for an identity, within the limits. Returns true if the scope is new.
    fn reserve(
        &mut self,
        who: &Arc<str>,
        surroundings: ClientScope,
        settings: &Settings,
        now: Instant,
    ) -> Result<(Arc<ClientScope>, bool), Limit> {
        if !self.identities.renew(who, &surroundings, now) {
            if self.identities.used_by(who) >= settings.limits.of_identity {
                return Err(Limit::Identity);
            }
            if !self.slots.contains_key(&surroundings) && self.slots.len() >= settings.limits.scopes {
                return Err(Limit::Total);
            }
        }
        let (surroundings, is_new) = self.slot(surroundings, true);
        self.use_slot(who, &surroundings, now);
        Ok((surroundings, is_new))
    }

    /// The slot of a scope; true if it is new.
    fn slot(&mut self, surroundings: ClientScope, opening: bool) -> (Arc<ClientScope>, bool) {
        if let Some((surroundings, _)) = self.slots.get_key_value(&surroundings) {
            return (Arc::clone(surroundings), false);
        }
        self.next_slot += 1;
        let slot = Slot {
            id: self.next_slot,
            published: None,
            scope: Some(Scope::default()),
            missed: ChangeSet::everything(),
            opening,
            broken: None,
            opened: watch::Sender::default(),
            uses: 0,
            clients: 0,
        };
        let surroundings = Arc::new(surroundings);
        self.slots.insert(Arc::clone(&surroundings), slot);
        (surroundings, true)
    }

    /// Notes that an identity uses a slot.
    fn use_slot(&mut self, who: &Arc<str>, surroundings: &Arc<ClientScope>, now: Instant) {
        if !self.identities.renew(who, surroundings, now) {
            self.identities.add(who, surroundings, now);
            if let Some(slot) = self.slots.get_mut(surroundings) {
                slot.uses += 1;
            }
        }
    }

    /// Notes that a proxy uses a slot. Returns the shared copy of its identity.
    fn enter_slot(&mut self, who: &str, surroundings: &ClientScope) -> Option<Arc<str>> {
        if let Some(slot) = self.slots.get_mut(surroundings) {
            slot.clients += 1;
        }
        self.identities.enter(who, surroundings)
    }

    pub(super) fn leave(&mut self, id: u64, now: Instant) {
        let Some(client) = self.clients.remove(&id) else { return };
        let surroundings = ClientScope::of(&client.view, &self.label_keys);
        self.identities.leave(&client.who, &surroundings, now);
        if let Some(slot) = self.slots.get_mut(&surroundings) {
            slot.clients = slot.clients.saturating_sub(1);
        }
        // An equal view may have come after the client's was ended.
        let is_its_own = |(view, _): &(&Arc<ProxyView>, &View)| Arc::ptr_eq(view, &client.view);
        if self.views.get_key_value(&client.view).filter(is_its_own).is_none() {
            return;
        }
        let Some(view) = self.views.get_mut(&client.view) else { return };
        view.clients -= 1;
        if view.clients == 0 {
            self.remove_view(&client.view);
        }
    }

    /// Removes the scopes that were idle for long.
    pub(super) fn drop_idle(&mut self, now: Instant) -> Vec<Slot> {
        let (slots, mut left) = (&self.slots, Vec::new());
        let is_busy = |slot: &Slot| slot.opening || slot.scope.is_none();
        let keeps = |surroundings: &ClientScope| slots.get(surroundings).is_some_and(is_busy);
        self.identities.drop_idle(now, keeps, |surroundings| left.push(Arc::clone(surroundings)));
        let mut gone = Vec::new();
        for surroundings in left {
            let Some(slot) = self.slots.get_mut(&surroundings) else { continue };
            slot.uses = slot.uses.saturating_sub(1);
            if slot.uses == 0 {
                gone.extend(self.slots.remove(&surroundings));
            }
        }
        gone
    }

    pub(super) fn close(&mut self) {
        self.closed = true;
        self.clients.clear();
        self.views.clear();
        self.slots.clear();
        self.identities.clear();
        self.declared = DeclaredViews::default();
    }

    pub(super) fn all_findings(&self) -> BTreeSet<Diagnostic> {
        let unreadable = self.unreadable.iter().map(|(path, reason)| {
            Diagnostic::new(Severity::Error, path, 0, format!("cannot be read: {reason}"))
                .remedy("the content that was read last stays in effect until the file can be read")
        });
        let views = self.views.values().flat_map(|compiled| &compiled.findings).cloned();
        self.files
            .diagnostics()
            .into_iter()
            .chain(self.findings.iter().cloned())
            .chain(unreadable)
            .chain(views)
            .collect()
    }

    /// Logs findings that are new.
    pub(super) fn log_findings(&mut self) {
        let now = self.all_findings();
        for finding in now.difference(&self.said) {
            say(finding);
        }
        self.said = now;
    }
}

fn say(finding: &Diagnostic) {
    match finding.severity {
        Severity::Error => error!("{finding}"),
        Severity::Warning => warn!("{finding}"),
        Severity::Info => info!("{finding}"),
    }
}
