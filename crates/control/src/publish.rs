//! From changed files to what each connected proxy is sent.
//!
//! One lock holds the World, the compiled views and who is connected, so each sees the others as of one moment.
//! A change is applied, each view compiled once whatever the number of proxies that share it, and what came out
//! equal is shared with what was there: an apply without effect pushes nothing.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime},
};

use serde::Serialize;
use skysail_core::fingerprint;
use skysail_model::{Diagnostic, Files, ProxyNode, ProxyView, Severity, World, compile};
use skysail_xds::{Kind, Resources, client::Form, server::Event};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::{
    metrics::{Gauges, Metrics, count},
    source::{FileChange, FileState},
};

/// Holds the mesh and tells proxies.
pub(crate) struct Publisher {
    state: Mutex<State>,
    pub(crate) metrics: Arc<Metrics>,
}

#[derive(Default)]
struct State {
    world: World,
    files: Files,
    /// The files taken in, with the fingerprints of their texts.
    taken: BTreeMap<String, u64>,
    /// Files that cannot be read, and why.
    unreadable: BTreeMap<String, String>,
    /// What is wrong with the World, apart from views.
    findings: Vec<Diagnostic>,
    views: HashMap<ProxyView, Compiled>,
    clients: BTreeMap<u64, Client>,
    /// What has been logged and still holds.
    said: BTreeSet<Diagnostic>,
    next_client: u64,
    closed: bool,
}

/// What a view is sent.
struct Compiled {
    resources: Arc<Resources>,
    findings: Vec<Diagnostic>,
    clients: usize,
}

/// A connected proxy.
struct Client {
    view: ProxyView,
    sender: watch::Sender<Arc<Resources>>,
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
    /// By type.
    types: BTreeMap<&'static str, TypeStatus>,
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
        Self { state: Mutex::default(), metrics }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes changed files in and tells everybody what follows from them. Blocks while it compiles.
    pub(crate) fn apply(&self, changes: Vec<FileChange>) {
        let start = Instant::now();
        let mut state = self.lock();
        let changed = state.apply_files(changes);
        if changed {
            state.compile_all();
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

    /// Lets a proxy in; `None` when the control plane is shutting down.
    pub(crate) fn connect(
        self: &Arc<Self>,
        mut client: NewClient,
    ) -> Option<(watch::Receiver<Arc<Resources>>, Connected)> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        state.world.place(&mut client.node);
        let view = client.node.view.clone();
        let views = state.views.len();
        let resources = state.enter(&view);
        let (sender, receiver) = watch::channel(resources);
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
            types: BTreeMap::new(),
        };
        let status = Arc::new(Mutex::new(status));
        state.clients.insert(id, Client { view, sender, status: Arc::clone(&status) });
        if state.views.len() > views {
            state.log_findings();
        }
        count(&self.metrics.connections);
        Some((receiver, Connected { publisher: Arc::clone(self), id, status }))
    }

    /// Ends all streams and lets nobody in any more.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.clients.clear();
        state.views.clear();
    }

    /// The mesh's trust domain.
    pub(crate) fn trust_domain(&self) -> String {
        self.lock().world.mesh().trust_domain.clone()
    }

    /// Everybody who is connected.
    pub(crate) fn clients(&self) -> Vec<ClientStatus> {
        self.lock().clients.values().map(|client| lock(&client.status).clone()).collect()
    }

    /// The files that what is published stands for, with the fingerprints of their texts.
    pub(crate) fn taken(&self) -> BTreeMap<String, u64> {
        self.lock().taken.clone()
    }

    /// What is wrong with the configuration now.
    pub(crate) fn findings(&self) -> Vec<Diagnostic> {
        self.lock().all_findings().into_iter().collect()
    }

    /// Numbers for the metrics page.
    pub(crate) fn gauges(&self) -> Gauges {
        let state = self.lock();
        let of = |severity| state.said.iter().filter(|finding| finding.severity == severity).count();
        Gauges {
            clients: state.clients.len(),
            views: state.views.len(),
            services: state.world.services().count(),
            config_errors: of(Severity::Error),
            config_warnings: of(Severity::Warning),
            root_expiry: 0,
        }
    }
}

/// Takes a lock even after a panic: if a compile panics, proxies keep what they have.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// True if the World changed.
    fn apply_files(&mut self, changes: Vec<FileChange>) -> bool {
        let mut changed = false;
        for FileChange { layer, path, state } in changes {
            self.unreadable.remove(&path);
            let changes = match state {
                FileState::Text(text) => {
                    self.taken.insert(path.clone(), fingerprint(&text));
                    self.files.set(layer, &path, &text)
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
                changed |= change.apply_to(&mut self.world);
            }
        }
        if changed {
            self.findings = self.world.validate();
        }
        changed
    }

    /// Compiles every view that somebody uses, and tells them.
    fn compile_all(&mut self) {
        for (view, compiled) in &mut self.views {
            let (resources, findings) = compile(&self.world, view);
            compiled.resources = Arc::new(resources.sharing(&compiled.resources));
            compiled.findings = findings;
        }
        for client in self.clients.values() {
            let Some(compiled) = self.views.get(&client.view) else { continue };
            let differs = |kind| !client.sender.borrow().same(&compiled.resources, kind);
            if Kind::ALL.into_iter().any(differs) {
                client.sender.send_replace(Arc::clone(&compiled.resources));
            }
        }
    }

    /// A view's resources, compiled now if nobody used it so far.
    fn enter(&mut self, view: &ProxyView) -> Arc<Resources> {
        if let Some(compiled) = self.views.get_mut(view) {
            compiled.clients += 1;
            return Arc::clone(&compiled.resources);
        }
        let (resources, findings) = compile(&self.world, view);
        // Most of what two views are sent is the same.
        let resources = match self.views.values().next() {
            Some(other) => resources.sharing(&other.resources),
            None => resources,
        };
        let resources = Arc::new(resources);
        let compiled = Compiled { resources: Arc::clone(&resources), findings, clients: 1 };
        self.views.insert(view.clone(), compiled);
        resources
    }

    fn leave(&mut self, id: u64) {
        let Some(client) = self.clients.remove(&id) else { return };
        if let Some(compiled) = self.views.get_mut(&client.view) {
            compiled.clients -= 1;
            if compiled.clients == 0 {
                self.views.remove(&client.view);
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
            match finding.severity {
                Severity::Error => error!("{finding}"),
                Severity::Warning => warn!("{finding}"),
                Severity::Info => info!("{finding}"),
            }
        }
        self.said = now;
    }
}

impl Connected {
    /// Records what happened on the proxy's stream.
    pub(crate) fn report(&self, event: Event<'_>) {
        let metrics = &self.publisher.metrics;
        let mut status = lock(&self.status);
        let ClientStatus { proxy, types, .. } = &mut *status;
        match event {
            Event::Asked { kind } => {
                let status = TypeStatus { synced: true, ..TypeStatus::default() };
                types.insert(kind.short(), status);
            }
            Event::Sent { kind, nonce, bytes, .. } => {
                count(&metrics.pushes[kind as usize]);
                let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
                metrics.push_bytes[kind as usize].fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
                let status = types.entry(kind.short()).or_default();
                status.sent = nonce;
                status.responses += 1;
                status.synced = false;
            }
            Event::Acked { kind, nonce } => {
                let status = types.entry(kind.short()).or_default();
                let TypeStatus { sent, responses, .. } = *status;
                *status = TypeStatus { sent, responses, acked: nonce, synced: true, ..TypeStatus::default() };
            }
            Event::Rejected { kind, nonce, reason } => {
                count(&metrics.rejects[kind as usize]);
                warn!(%proxy, %kind, reason, "the proxy refused its configuration");
                let status = types.entry(kind.short()).or_default();
                status.nacked = nonce;
                status.error = reason.to_owned();
                status.synced = false;
            }
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.publisher.lock().leave(self.id);
    }
}
