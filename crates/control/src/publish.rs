//! From changed files to what each connected proxy is sent.
//!
//! One lock holds the World, what was made of it and who is connected, so each sees the others as of one moment. Many read at the
//! same time: what takes long when a proxy comes is made by then. What
//! services are to proxies is made once for all that have the same surroundings ([`Scope`]), part by part, and anew only
//! where a change may have an effect; what depends on the workload is made for each [`View`]. What came out equal is no
//! change: an apply without effect pushes nothing.

mod scope;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant, SystemTime},
};

use serde::{Serialize, Serializer};
use skysail_core::fingerprint;
use skysail_model::{
    Diagnostic, Files, Parsed, ProxyNode, ProxyView, Resolved, Severity, Surroundings, Touched, World,
    compile_own, parse,
};
use skysail_xds::{
    Kind, Layer, Resources, Snapshot,
    client::Form,
    interest::{Change, Interest},
    server::{Event, Resources as Watched},
};
use tokio::sync::watch;
use tracing::{error, info, warn};

use self::scope::{Like, Scope};
use crate::{
    metrics::{Gauges, Metrics, count},
    parallel,
    platform::Platform,
    resolve::Wanted,
    source::{FileChange, FileState},
};

/// Holds the mesh and tells proxies.
pub(crate) struct Publisher {
    state: RwLock<State>,
    pub(crate) metrics: Arc<Metrics>,
    /// The names that are to be looked up; `None`: proxies do so themselves.
    wanted: Option<watch::Sender<(Arc<Wanted>, Duration)>>,
    pub(crate) platform: Arc<Platform>,
}

#[derive(Default)]
struct State {
    world: World,
    files: Files,
    platform: Arc<Platform>,
    /// The files taken in, with the fingerprints of their texts.
    taken: BTreeMap<String, u64>,
    /// Files that cannot be read, and why.
    unreadable: BTreeMap<String, String>,
    /// What is wrong with the World, apart from views.
    findings: Vec<Diagnostic>,
    /// Changes so far.
    generation: u64,
    /// Shared resources depend on their clients' labels.
    regards_labels: bool,
    scopes: HashMap<Surroundings, Scope>,
    views: HashMap<Arc<ProxyView>, View>,
    clients: BTreeMap<u64, Client>,
    /// What has been logged and still holds.
    said: BTreeSet<Diagnostic>,
    next_client: u64,
    closed: bool,
}

/// What proxies are sent that are alike.
struct View {
    surroundings: Surroundings,
    sender: watch::Sender<Snapshot>,
    /// What its proxies ask for. Others are not woken.
    interest: Arc<Interest>,
    findings: Vec<Diagnostic>,
    clients: usize,
}

/// What a view alone is sent, and what is wrong with it.
type Own = (Resources, Vec<Diagnostic>);

/// A connected proxy.
struct Client {
    view: Arc<ProxyView>,
    status: SharedStatus,
}

/// How a proxy gets on, for people.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ClientStatus {
    /// The stream's number.
    connection: u64,
    /// The proxy's node id.
    proxy: String,
    /// Its address.
    address: String,
    /// Whom it proved to be; empty on the plain port.
    identity: String,
    /// `delta` or `sotw`.
    form: &'static str,
    /// Seconds since 1970.
    connected_at: u64,
    /// By type. Few, in thousands of proxies.
    #[serde(serialize_with = "by_type")]
    types: Vec<(Kind, TypeStatus)>,
}

impl ClientStatus {
    fn of(&mut self, kind: Kind) -> &mut TypeStatus {
        let index = self.types.iter().position(|(of, _)| *of == kind).unwrap_or_else(|| {
            self.types.reserve_exact(1);
            self.types.push((kind, TypeStatus::default()));
            self.types.len() - 1
        });
        &mut self.types[index].1
    }
}

fn by_type<S: Serializer>(types: &[(Kind, TypeStatus)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(types.iter().map(|(kind, status)| (kind.short(), status)))
}

/// How a proxy gets on with one type of resource.
#[derive(Clone, Debug, Default, Serialize)]
struct TypeStatus {
    /// How many responses were sent.
    responses: u64,
    /// The last response sent; responses are numbered by stream. 0 if the proxy had all there is.
    sent: u64,
    /// The last response the proxy took.
    acked: u64,
    /// The last response the proxy refused; 0 if none.
    nacked: u64,
    /// Why it refused it.
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
    /// True if nothing is under way and nothing refused.
    synced: bool,
}

/// A proxy that just connected.
pub(crate) struct NewClient {
    pub(crate) node: ProxyNode,
    pub(crate) address: String,
    pub(crate) identity: String,
    pub(crate) form: Form,
}

/// A proxy's status has a lock of its own, so that streams do not wait while the mesh is compiled.
type SharedStatus = Arc<Mutex<ClientStatus>>;

/// Keeps a proxy in the list of the connected.
pub(crate) struct Connected {
    publisher: Arc<Publisher>,
    id: u64,
    status: SharedStatus,
}

impl Publisher {
    /// An empty mesh.
    pub(crate) fn new(metrics: Arc<Metrics>) -> Self {
        let state = State::default();
        let platform = Arc::clone(&state.platform);
        Self { state: RwLock::new(state), metrics, wanted: None, platform }
    }

    /// Has names looked up, by whom what this gives is for.
    pub(crate) fn looking_up(mut self) -> (Self, watch::Receiver<(Arc<Wanted>, Duration)>) {
        let rate = self.read().world.mesh().dns_refresh_rate.0;
        let (sender, receiver) = watch::channel((Arc::default(), rate));
        self.wanted = Some(sender);
        (self, receiver)
    }

    // Both also after a panic: if a compile panics, proxies keep what they have.

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes changed files in and tells everybody what follows from them. Blocks while it compiles.
    pub(crate) fn apply(&self, changes: Vec<FileChange>) {
        let start = Instant::now();
        let parsed = parallel::map(&changes, |change| match &change.state {
            FileState::Text(text) => parse(text, &change.path),
            FileState::Unreadable(_) | FileState::Gone => Parsed::default(),
        });
        let mut state = self.write();
        let changed = state.apply_files(changes, parsed);
        if changed {
            self.tell_wanted(&state.world);
            state.publish();
            // What is wrong can wait until all are told what there is.
            state.findings = state.world.validate();
        }
        state.log_findings();
        let (views, clients) = (state.views.len(), state.clients.len());
        drop(state);
        if changed {
            let took = start.elapsed();
            self.metrics.published(took);
            info!(views, clients, ?took, "configuration published");
        }
    }

    /// Takes in what names are now and tells everybody whom it concerns. Blocks while it compiles.
    pub(crate) fn resolve(&self, names: Vec<(Arc<str>, Option<Resolved>)>) {
        let start = Instant::now();
        let mut state = self.write();
        let mut changed = false;
        for (name, now) in names {
            changed |= state.world.resolve(&name, now);
        }
        if changed {
            state.publish();
            drop(state);
            self.metrics.published(start.elapsed());
        }
    }

    /// Tells who looks up names which those are.
    fn tell_wanted(&self, world: &World) {
        let Some(wanted) = &self.wanted else { return };
        let now = (Arc::new(world.wanted_names()), world.mesh().dns_refresh_rate.0);
        wanted.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }

    /// Lets a proxy in; `None` when the control plane is shutting down.
    pub(crate) fn connect(self: &Arc<Self>, mut client: NewClient) -> Option<(Watched, Connected)> {
        // There are no virtual hosts by themselves in the other form.
        client.node.view.hosts_apart &= client.form == Form::Delta;
        client.node.view.names_resolved &= self.wanted.is_some();
        // What takes long needs no more than a look at the World, which many have at the same time.
        let (generation, mut own) = {
            let state = self.read();
            (state.generation, state.prepare(&mut client.node))
        };
        let mut state = self.write();
        if state.closed {
            return None;
        }
        if state.generation != generation {
            own = state.prepare(&mut client.node);
        }
        let (view, watched) = state.enter(Arc::new(client.node.view), own);
        state.next_client += 1;
        let id = state.next_client;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let status = ClientStatus {
            connection: id,
            proxy: client.node.id,
            address: client.address,
            identity: client.identity,
            form: match client.form {
                Form::Delta => "delta",
                Form::Sotw => "sotw",
            },
            connected_at: now.as_secs(),
            types: Vec::new(),
        };
        let status = Arc::new(Mutex::new(status));
        state.clients.insert(id, Client { view, status: Arc::clone(&status) });
        count(&self.metrics.connections);
        Some((watched, Connected { publisher: Arc::clone(self), id, status }))
    }

    /// Ends all streams and lets nobody in any more.
    pub(crate) fn close(&self) {
        let mut state = self.write();
        state.closed = true;
        state.clients.clear();
        state.views.clear();
        state.scopes.clear();
    }

    /// Everybody who is connected.
    pub(crate) fn clients(&self) -> Vec<ClientStatus> {
        self.read().clients.values().map(|client| lock(&client.status).clone()).collect()
    }

    /// The files that what is published stands for, with the fingerprints of their texts.
    pub(crate) fn taken(&self) -> BTreeMap<String, u64> {
        self.read().taken.clone()
    }

    /// What is wrong with the configuration now.
    pub(crate) fn findings(&self) -> Vec<Diagnostic> {
        self.read().all_findings().into_iter().collect()
    }

    /// Numbers for the metrics page.
    pub(crate) fn gauges(&self) -> Gauges {
        let state = self.read();
        let of = |severity| state.said.iter().filter(|finding| finding.severity == severity).count();
        Gauges {
            clients: state.clients.len(),
            views: state.views.len(),
            services: state.world.services().count(),
            config_errors: of(Severity::Error),
            config_warnings: of(Severity::Warning),
            names: BTreeMap::new(),
            authority: None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Takes changed files in, of which this was read. True if the World changed.
    fn apply_files(&mut self, changes: Vec<FileChange>, parsed: Vec<Parsed>) -> bool {
        let mut changed = false;
        for (FileChange { layer, path, state }, parsed) in changes.into_iter().zip(parsed) {
            self.unreadable.remove(&path);
            let changes = match state {
                FileState::Text(text) => {
                    self.taken.insert(path.clone(), fingerprint(&text));
                    self.files.take(layer, &path, parsed)
                }
                FileState::Gone => {
                    self.taken.remove(&path);
                    self.files.remove(layer, &path)
                }
                FileState::Unreadable(reason) => {
                    self.unreadable.insert(path, reason);
                    continue;
                }
            };
            for change in changes {
                self.platform.note(&change);
                changed |= change.apply_to(&mut self.world);
            }
        }
        self.platform.configure(self.world.mesh());
        changed
    }

    /// Makes anew what may have changed, and tells those whom it concerns.
    fn publish(&mut self) {
        self.generation += 1;
        let mut touched = self.world.take_touched();
        let regards_labels = self.world.regards_labels();
        if self.regards_labels != regards_labels {
            self.regards_labels = regards_labels;
            self.regroup();
            touched.everything = true;
        }
        let mut done: Vec<(Surroundings, Scope, Arc<Layer>)> = Vec::with_capacity(self.scopes.len());
        let mut kin = HashMap::new();
        for (surroundings, mut scope) in std::mem::take(&mut self.scopes) {
            let like = kin.get(&surroundings.kin()).and_then(|index: &usize| done.get(*index));
            let like = like.map(|(surroundings, scope, before)| Like { surroundings, scope, before });
            let before = Arc::clone(&scope.layer);
            scope.update(&self.world, &surroundings, &touched, self.generation, like);
            kin.entry(surroundings.kin()).or_insert(done.len());
            done.push((surroundings, scope, before));
        }
        let scopes = done.into_iter().map(|(surroundings, scope, _)| {
            let change = Change::since(&scope.layer, self.generation - 1);
            (surroundings, (scope, change))
        });
        let scopes: HashMap<Surroundings, (Scope, Change)> = scopes.collect();
        for (view, state) in &mut self.views {
            let Some((scope, change)) = scopes.get(&state.surroundings) else { continue };
            let mut snapshot = state.sender.borrow().clone();
            let mut concerns_all = touched.everything;
            if touched.touches_workloads_in(&view.namespace) {
                let (made, findings) = compile_own(&self.world, view, &scope.outline);
                concerns_all |= Arc::make_mut(&mut snapshot.own).replace(self.generation, &made);
                state.findings = findings;
            }
            snapshot.shared = Arc::clone(&scope.layer);
            let interest = &state.interest;
            state.sender.send_if_modified(|now| {
                let changed = now.generation() != snapshot.generation();
                *now = snapshot;
                changed && (concerns_all || interest.concerns(change))
            });
        }
        self.scopes = scopes.into_iter().map(|(surroundings, (scope, _))| (surroundings, scope)).collect();
    }

    /// Puts views into other scopes, as other things count as surroundings. Where several become one, what there was is news
    /// to their proxies, or gone.
    fn regroup(&mut self) {
        let before = std::mem::take(&mut self.scopes);
        let mut origins: HashMap<Surroundings, HashSet<Surroundings>> = HashMap::new();
        for (view, state) in &mut self.views {
            let surroundings = Surroundings::of(view, self.regards_labels);
            let scope = self.scopes.entry(surroundings.clone()).or_default();
            scope.views += 1;
            let origin = std::mem::replace(&mut state.surroundings, surroundings.clone());
            origins.entry(surroundings).or_default().insert(origin);
        }
        for (surroundings, scope) in &mut self.scopes {
            let origins = origins.get(surroundings).into_iter().flatten();
            let origins: Vec<&Scope> = origins.filter_map(|origin| before.get(origin)).collect();
            match origins[..] {
                [origin] => (scope.layer, scope.parts) = (Arc::clone(&origin.layer), origin.parts.clone()),
                _ => origins.iter().for_each(|origin| scope.inherit(origin, self.generation)),
            }
        }
    }

    /// Places a node, and makes what its view alone is sent, if there is no such view yet and others have its surroundings.
    fn prepare(&self, node: &mut ProxyNode) -> Option<Own> {
        self.world.place(node);
        let view = &node.view;
        if self.views.contains_key(view) {
            return None;
        }
        let scope = self.scopes.get(&Surroundings::of(view, self.regards_labels))?;
        Some(compile_own(&self.world, view, &scope.outline))
    }

    /// What a view is sent, which is `own` if nobody used it so far.
    fn enter(&mut self, view: Arc<ProxyView>, own: Option<Own>) -> (Arc<ProxyView>, Watched) {
        if let Some((view, state)) = self.views.get_key_value(&view) {
            let watched =
                Watched { snapshot: state.sender.subscribe(), interest: Arc::clone(&state.interest) };
            let entered = (Arc::clone(view), watched);
            if let Some(state) = self.views.get_mut(&entered.0) {
                state.clients += 1;
            }
            return entered;
        }
        let surroundings = Surroundings::of(&view, self.regards_labels);
        self.open_scope(&surroundings);
        let mut snapshot = Snapshot::default();
        let mut findings = Vec::new();
        if let Some(scope) = self.scopes.get_mut(&surroundings) {
            scope.views += 1;
            snapshot.shared = Arc::clone(&scope.layer);
            let made;
            (made, findings) = own.unwrap_or_else(|| compile_own(&self.world, &view, &scope.outline));
            Arc::make_mut(&mut snapshot.own).replace(self.generation, &made);
        }
        for finding in &findings {
            if self.said.insert(finding.clone()) {
                say(finding);
            }
        }
        let (sender, receiver) = watch::channel(snapshot);
        let interest = Arc::<Interest>::default();
        let watched = Watched { snapshot: receiver, interest: Arc::clone(&interest) };
        self.views.insert(Arc::clone(&view), View { surroundings, sender, interest, findings, clients: 1 });
        (view, watched)
    }

    /// Makes what these surroundings are sent, if nobody had them so far.
    fn open_scope(&mut self, surroundings: &Surroundings) {
        if self.scopes.contains_key(surroundings) {
            return;
        }
        let mut scope = Scope::default();
        let everything = Touched { everything: true, ..Touched::default() };
        let kin = surroundings.kin();
        let like = self.scopes.iter().find(|(other, _)| other.kin() == kin);
        let like = like.map(|(surroundings, scope)| Like { surroundings, scope, before: &scope.layer });
        scope.update(&self.world, surroundings, &everything, self.generation, like);
        // Most of what two scopes are sent is the same, and kept once.
        if let Some(other) = self.scopes.values().next() {
            Arc::make_mut(&mut scope.layer).share(&other.layer);
        }
        self.scopes.insert(surroundings.clone(), scope);
    }

    fn leave(&mut self, id: u64) {
        let Some(client) = self.clients.remove(&id) else { return };
        let Some(view) = self.views.get_mut(&client.view) else { return };
        view.clients -= 1;
        if view.clients > 0 {
            return;
        }
        let Some(view) = self.views.remove(&client.view) else { return };
        if let Some(scope) = self.scopes.get_mut(&view.surroundings) {
            scope.views -= 1;
            if scope.views == 0 {
                self.scopes.remove(&view.surroundings);
            }
        }
    }

    fn all_findings(&self) -> BTreeSet<Diagnostic> {
        let unreadable = self.unreadable.iter().map(|(path, reason)| {
            Diagnostic::new(Severity::Error, path, 0, format!("cannot be read: {reason}"))
                .remedy("what was read of it before stays in effect until it can be read again")
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

    /// Logs what is new.
    fn log_findings(&mut self) {
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

impl Connected {
    /// Records what happened on the proxy's stream.
    pub(crate) fn report(&self, event: Event<'_>) {
        let metrics = &self.publisher.metrics;
        let mut status = lock(&self.status);
        match event {
            Event::Asked { kind } => {
                *status.of(kind) = TypeStatus { synced: true, ..TypeStatus::default() };
            }
            Event::Sent { kind, nonce, bytes, .. } => {
                count(&metrics.pushes[kind as usize]);
                let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
                metrics.push_bytes[kind as usize].fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
                let status = status.of(kind);
                status.sent = nonce;
                status.responses += 1;
                status.synced = false;
            }
            Event::Acked { kind, nonce } => {
                let status = status.of(kind);
                let TypeStatus { sent, responses, .. } = *status;
                *status = TypeStatus { sent, responses, acked: nonce, synced: true, ..TypeStatus::default() };
            }
            Event::Used { .. } | Event::Unused { .. } => {}
            Event::Rejected { kind, nonce, reason } => {
                count(&metrics.rejects[kind as usize]);
                warn!(proxy = status.proxy, %kind, reason, "the proxy refused its configuration");
                let status = status.of(kind);
                status.nacked = nonce;
                status.error = reason.to_owned();
                status.synced = false;
            }
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.publisher.write().leave(self.id);
        count(&self.publisher.metrics.departures);
    }
}

#[cfg(test)]
mod tests;
