//! Publishes configuration: from changed files to the resources of each connected proxy.
//!
//! One lock protects the World, the compiled resources and the list of proxies (`state`), so that all are read at one moment. The
//! lock is held briefly: scopes are compiled from a clone of the World (`round`). A change does not delay a proxy that connects,
//! and a proxy that needs a new scope delays nothing else.
//!
//! Services are compiled once for all proxies of the same surroundings (`scope`), part by part, and again only where a change may
//! have an effect. Resources that depend on the workload are compiled for each view. A change without effect pushes nothing. A
//! compile that panics leaves its scope unchanged (`compiler`). `identities` limits the number of scopes and their lifetime.

mod changes;
mod compiler;
mod identities;
mod round;
mod scope;
mod state;
mod status;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use skysail_model::{
    ClientScope, Diagnostic, Files, OtherAccount, Parsed, ProxyNode, ProxyView, Resolved, Severity, World,
    parse,
};
use skysail_source::{FileChange, FileState};
use skysail_xds::{
    Snapshot,
    client::Form,
    server::{Event, ResourceFeed},
};
use tokio::sync::watch;
use tracing::{error, info, warn};

use self::{
    changes::{Applied, Changes, Described, describe},
    compiler::{Failure, Panicked, contain},
    round::Opened,
    state::{Entry, State},
    status::{REFUSALS, SharedStatus, lock},
};
pub(crate) use self::{
    compiler::Compiler,
    identities::Limits,
    status::{ClientStatus, TypeStatus},
};
use crate::{
    audit::{Audit, Event as Audited, Text},
    bucket::Buckets,
    metrics::{Gauges, Limit, Metrics, count},
    parallel,
    platform::Platform,
};

/// Names to look up, with the services that use each.
pub(crate) type Wanted = BTreeMap<Arc<str>, Vec<String>>;

/// How often a limit that is reached is logged, at most.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

/// Holds the state of the mesh and publishes it to proxies.
pub(crate) struct Publisher {
    state: RwLock<State>,
    /// Held while a change is published; changes are published one at a time.
    publishing: Mutex<()>,
    /// Held while a new scope is compiled: one at a time on all cores, as the next scope reuses most of it.
    opening: Arc<tokio::sync::Mutex<()>>,
    compiler: Compiler,
    pub(crate) settings: Settings,
    pub(crate) metrics: Arc<Metrics>,
    /// Names to look up; `None` if proxies look them up.
    wanted: Option<watch::Sender<(Arc<Wanted>, Duration)>>,
    pub(crate) platform: Arc<Platform>,
    /// Time of the last log line about a limit, and the number of refusals since.
    limited: Mutex<(Option<Instant>, u64)>,
    /// Log lines about refused configuration, by identity.
    refusals: Buckets,
    audit: Arc<Audit>,
}

/// Settings of the command line.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The cluster of the pods that are known.
    pub(crate) cluster_id: String,
    /// The layer of the files whose objects a program wrote; see [`Files::with_generated`].
    pub(crate) generated: Option<usize>,
    /// Where access logs go if the mesh configuration does not say it. Empty: nowhere.
    pub(crate) access_log: String,
    pub(crate) limits: Limits,
}

/// A proxy that just connected.
pub(crate) struct NewClient {
    /// Node that it declares.
    pub(crate) node: ProxyNode,
    /// Istio version that it declares.
    pub(crate) version: String,
    pub(crate) address: String,
    /// Authenticated identity; empty on the plain port.
    pub(crate) identity: String,
    /// Identity against whose limits scopes count.
    pub(crate) who: Arc<str>,
    pub(crate) form: Form,
}

/// Reason why a proxy is refused.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The control plane is shutting down.
    Closed,
    /// It names another account's pod.
    OtherAccount(OtherAccount),
    /// There are too many scopes.
    Limit(Limit),
    /// Its configuration could not be compiled.
    Broken(Panicked),
}

impl Refused {
    /// The reason, for the proxy and the log.
    pub(crate) fn reason(&self, settings: &Settings) -> String {
        let Limits { scopes, of_identity, views, views_of_identity } = settings.limits;
        match self {
            Self::Closed => "the control plane is shutting down; connect again".to_owned(),
            Self::OtherAccount(error) => error.to_string(),
            Self::Limit(Limit::Total) => format!(
                "{scopes} different configurations are served or were a moment ago, the most that --max-scopes allows"
            ),
            Self::Limit(Limit::Identity) => format!(
                "the proxies of this identity use {of_identity} different configurations or did a moment ago, the most that \
                 --max-scopes-per-identity allows; they differ in place, cluster, address families, or labels that routes match"
            ),
            Self::Limit(Limit::Views) => format!(
                "proxies whose pods are not known have {views} different views, the most that --max-views allows"
            ),
            Self::Limit(Limit::IdentityViews) => format!(
                "the proxies of this identity whose pods are not known have {views_of_identity} different views, the most that \
                 --max-views-per-identity allows; they differ in labels, names of ports or of workloads, or scope"
            ),
            Self::Broken(panicked) => format!(
                "the configuration could not be compiled ({}), which is a mistake in the control plane; its log says more",
                panicked.what
            ),
        }
    }
}

/// Guard of a connected proxy; removes it from the list when dropped.
pub(crate) struct Connected {
    publisher: Arc<Publisher>,
    id: u64,
    status: SharedStatus,
}

impl Publisher {
    /// An empty mesh.
    pub(crate) fn new(metrics: Arc<Metrics>, settings: Settings, compiler: Compiler) -> Self {
        let files = settings.generated.map_or_else(Files::new, Files::with_generated);
        let state = State::of(files, World::new().with_access_log(&settings.access_log));
        let platform = Arc::clone(&state.platform);
        Self {
            state: RwLock::new(state),
            publishing: Mutex::default(),
            opening: Arc::default(),
            compiler,
            settings,
            metrics,
            wanted: None,
            platform,
            limited: Mutex::default(),
            refusals: Buckets::new(REFUSALS),
            audit: Audit::none(),
        }
    }

    /// Puts changes of the configuration on record.
    pub(crate) fn audited(self, audit: Arc<Audit>) -> Self {
        Self { audit, ..self }
    }

    /// Enables DNS lookups in the control plane. The receiver yields the names to look up.
    pub(crate) fn looking_up(mut self) -> (Self, watch::Receiver<(Arc<Wanted>, Duration)>) {
        let rate = self.read().world.mesh().dns_refresh_rate.0;
        let (sender, receiver) = watch::channel((Arc::default(), rate));
        self.wanted = Some(sender);
        (self, receiver)
    }

    // Both also after a panic: nothing is compiled while they are held but a view's own resources, by reading.

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies changed files and publishes the result. Blocks while it compiles.
    pub(crate) fn apply(&self, changes: Vec<FileChange>) {
        let start = Instant::now();
        let parsed = parallel::map(&changes, |change| match &change.state {
            FileState::Text(text) => contain(|| change.path.clone(), || parse(text, &change.path)),
            FileState::Unreadable(_) | FileState::Gone => Ok(Parsed::default()),
        });
        let publishing = lock(&self.publishing);
        let (before, applied, first) = {
            let mut state = self.write();
            let before = state.world.policies();
            let applied = state.apply_files(changes, parsed);
            if !applied.is_empty() {
                state.note_change(&self.settings.cluster_id);
            }
            let is_first = !std::mem::replace(&mut state.loaded, true);
            (before, applied, is_first.then_some(state.taken.len()))
        };
        let changed = !applied.is_empty();
        self.record(first, &applied);
        if changed {
            self.tell_wanted();
            self.publish();
        }
        let described = if changed { self.validate(applied, &before, first.is_some()) } else { Vec::new() };
        let (views, clients) = {
            let mut state = self.write();
            state.changes.note(described);
            state.log_findings();
            (state.views.len(), state.clients.len())
        };
        drop(publishing);
        if changed {
            let took = start.elapsed();
            self.metrics.published(took);
            info!(views, clients, ?took, "configuration published");
        }
    }

    /// Puts changes on record; those at the start, which came from this many files, as one.
    fn record(&self, first: Option<usize>, applied: &[Applied]) {
        if let Some(files) = first {
            self.audit.record(Audited::ConfigurationLoaded { files, changes: applied.len() });
            return;
        }
        for Applied { file, object, action, .. } in applied {
            let object = object.to_string();
            let (file, object) = (Text(file), Text(&object));
            self.audit.record(Audited::ConfigurationChanged { file, object, action });
        }
    }

    /// Applies results of DNS lookups and publishes them. Blocks while it compiles.
    pub(crate) fn resolve(&self, names: Vec<(Arc<str>, Option<Resolved>)>) {
        let start = Instant::now();
        let _publishing = lock(&self.publishing);
        let changed = {
            let mut state = self.write();
            let mut changed = false;
            for (name, now) in names {
                changed |= state.world.resolve(&name, now);
            }
            if changed {
                state.note_change(&self.settings.cluster_id);
            }
            changed
        };
        if changed {
            self.publish();
            self.metrics.published(start.elapsed());
        }
    }

    /// Sets the roots of the mesh's own authority and publishes them. Blocks while it compiles.
    pub(crate) fn set_roots(&self, roots: &str) {
        let _publishing = lock(&self.publishing);
        let changed = {
            let mut state = self.write();
            let changed = state.world.set_roots(roots);
            if changed {
                state.note_change(&self.settings.cluster_id);
            }
            changed
        };
        if changed {
            self.publish();
        }
    }

    /// Compiles and sends changes until everything is up to date.
    fn publish(&self) {
        loop {
            let Some(round) = self.write().take_round() else { return };
            let done = round.run(&self.compiler);
            let failures = self.write().finish_round(done);
            failures.iter().for_each(|failure| self.report(failure));
        }
    }

    /// Finds what is wrong with the World and describes changes that led to it, none at the start. Proxies do not wait for it.
    fn validate(&self, applied: Vec<Applied>, before: &World, is_start: bool) -> Vec<Described> {
        let world = self.read().world.clone();
        let found = contain(
            || "checking the configuration".to_owned(),
            || {
                let findings = world.validate();
                let applied = if is_start { Vec::new() } else { applied };
                let described = describe(applied, before, &world, &findings);
                (findings, described)
            },
        );
        drop(world);
        match found {
            Ok((findings, described)) => {
                self.write().findings = findings;
                described
            }
            Err(panicked) => {
                self.report(&Failure { text: panicked.to_string(), is_new: true });
                Vec::new()
            }
        }
    }

    fn report(&self, failure: &Failure) {
        count(&self.metrics.compile_panics);
        if failure.is_new {
            error!(
                panic = failure.text,
                "a configuration could not be compiled, which is a mistake in this program; proxies keep the last good one"
            );
        }
    }

    /// Sends the names to look up to the task that does it.
    fn tell_wanted(&self) {
        let Some(wanted) = &self.wanted else { return };
        let now = {
            let state = self.read();
            (Arc::new(state.world.wanted_names()), state.world.mesh().dns_refresh_rate.0)
        };
        wanted.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }

    /// Admits a proxy once its scope is compiled.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        mut client: NewClient,
    ) -> Result<(ResourceFeed, Connected), Refused> {
        // There are no virtual hosts by themselves in the other form.
        client.node.view.hosts_apart &= client.form == Form::Delta;
        client.node.view.names_resolved &= self.wanted.is_some();
        loop {
            let prepared = self.read().prepare(&client, &self.settings, &self.compiler);
            if let Err(Refused::Broken(panicked)) = &prepared {
                self.report(&Failure { text: panicked.to_string(), is_new: true });
            }
            let entry = prepared
                .and_then(|prepared| self.write().enter(&client, prepared, &self.settings, Instant::now()));
            let mut opened = match entry.inspect_err(|refused| self.note_limit(refused, &client))? {
                Entry::Entered(watched, id, status) => {
                    count(&self.metrics.connections);
                    return Ok((watched, Connected { publisher: Arc::clone(self), id, status }));
                }
                Entry::Again => continue,
                Entry::Wait(opened) => opened,
                Entry::Open(surroundings, id, opened) => {
                    self.open(&client.who, surroundings, id);
                    opened
                }
            };
            // An error says that the scope is gone.
            let _ = opened.changed().await;
        }
    }

    /// Starts the compile of a new scope. It continues if the proxy that asked for it leaves, as others may wait.
    fn open(self: &Arc<Self>, who: &str, surroundings: Arc<ClientScope>, id: u64) {
        let turn = self.read().identities.turn(who);
        let publisher = Arc::clone(self);
        tokio::spawn(async move {
            let _turn_of_identity = turn.lock_owned().await;
            let _turn = Arc::clone(&publisher.opening).lock_owned().await;
            let (compiling, new) = (Arc::clone(&publisher), Arc::clone(&surroundings));
            let compile = tokio::task::spawn_blocking(move || compiling.compile_new(&new, id));
            if let Err(error) = compile.await {
                let failure = publisher.write().abandon_opening(&surroundings, id, error.to_string());
                failure.iter().for_each(|failure| publisher.report(failure));
            }
        });
    }

    fn compile_new(&self, surroundings: &Arc<ClientScope>, id: u64) {
        count(&self.metrics.scopes_opened);
        loop {
            let Some(opening) = self.write().begin_opening(surroundings, id) else { return };
            let made = opening.run(&self.compiler);
            let opened = self.write().finish_opening(made);
            match opened {
                Opened::Behind => {}
                Opened::Done => return,
                Opened::Failed(failure) => return self.report(&failure),
            }
        }
    }

    /// Counts a proxy that is refused for a limit, and logs that at most once a minute.
    fn note_limit(&self, refused: &Refused, client: &NewClient) {
        let Refused::Limit(limit) = refused else { return };
        count(&self.metrics.scope_refusals[*limit as usize]);
        let mut limited = lock(&self.limited);
        limited.1 += 1;
        let now = Instant::now();
        if limited.0.is_none_or(|last| now.saturating_duration_since(last) >= BETWEEN_WARNINGS) {
            let refusals = std::mem::take(&mut limited.1);
            limited.0 = Some(now);
            let reason = refused.reason(&self.settings);
            warn!(
                identity = &*client.who,
                refusals, reason, "proxies are refused for the number of configurations"
            );
        }
    }

    /// Removes scopes that had no proxy for long.
    pub(crate) fn drop_idle(&self, now: Instant) {
        let gone = self.write().drop_idle(now);
        // They are large, so this takes a while, and nobody has to wait for it.
        drop(gone);
    }

    /// Ends all streams and refuses new proxies.
    pub(crate) fn close(&self) {
        self.write().close();
    }

    /// All connected proxies.
    pub(crate) fn clients(&self) -> Vec<ClientStatus> {
        self.read().clients.values().map(|client| lock(&client.status).clone()).collect()
    }

    /// All connected proxies with their views.
    pub(crate) fn proxies(&self) -> Vec<(Arc<ProxyView>, ClientStatus)> {
        let state = self.read();
        let clients = state.clients.values();
        clients.map(|client| (Arc::clone(&client.view), lock(&client.status).clone())).collect()
    }

    /// All resources of a proxy, by its node id or `POD.NAMESPACE`; `None` if no such proxy is connected.
    pub(crate) fn resources_of(&self, proxy: &str) -> Option<Snapshot> {
        let state = self.read();
        let is_meant = |id: &str| id == proxy || id.split('~').nth(2) == Some(proxy);
        let client = state.clients.values().find(|client| is_meant(&lock(&client.status).proxy))?;
        state.views.get(&client.view).map(|view| view.sender.borrow().clone())
    }

    /// Root namespace of the mesh.
    pub(crate) fn root_namespace(&self) -> String {
        self.read().world.mesh().root_namespace.clone()
    }

    /// Files of the published configuration, with the fingerprints of their texts.
    pub(crate) fn taken(&self) -> BTreeMap<String, u64> {
        self.read().taken.clone()
    }

    /// Current findings about the configuration.
    pub(crate) fn findings(&self) -> Vec<Diagnostic> {
        self.read().all_findings().into_iter().collect()
    }

    /// The last changes of the configuration that are in force.
    pub(crate) fn changes(&self) -> Changes {
        self.read().changes.clone()
    }

    /// Numbers for the metrics page.
    pub(crate) fn gauges(&self) -> Gauges {
        let state = self.read();
        let of = |severity| state.said.iter().filter(|finding| finding.severity == severity).count();
        Gauges {
            clients: state.clients.len(),
            views: state.views.len(),
            scopes: state.slots.len(),
            services: state.world.services().count(),
            config_errors: of(Severity::Error),
            config_warnings: of(Severity::Warning),
            names: BTreeMap::new(),
            authority: None,
        }
    }
}

impl Connected {
    /// Records what happened on the proxy's stream.
    pub(crate) fn report(&self, event: Event<'_>) {
        let metrics = &self.publisher.metrics;
        let mut status = lock(&self.status);
        match event {
            Event::Sent { kind, bytes, .. } => {
                count(&metrics.pushes[kind as usize]);
                let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
                metrics.push_bytes[kind as usize].fetch_add(bytes, Relaxed);
            }
            Event::Rejected { kind, reason, .. } => {
                count(&metrics.rejects[kind as usize]);
                if let Some(more) = status.refusal_to_log(kind, &self.publisher.refusals, Instant::now()) {
                    warn!(proxy = status.proxy, %kind, reason, more, "the proxy refused its configuration");
                }
            }
            Event::Asked { .. } | Event::Acked { .. } | Event::Used { .. } | Event::Unused { .. } => {}
        }
        status.record(event);
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.publisher.write().leave(self.id, Instant::now());
        count(&self.publisher.metrics.departures);
    }
}

#[cfg(test)]
mod tests;
