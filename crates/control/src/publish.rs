//! Publishes configuration: from changed files to the resources of each connected proxy.
//!
//! | Part | File |
//! |---|---|
//! | Application and publication of changes | this file |
//! | State under one lock: World, scopes, views, clients | `state` |
//! | Shared resources of a scope, and their compilation | `scopes`, `scope_resources` |
//! | Endpoints that proxies of a node prefer | `nodes` |
//! | Views, and the admission of proxies | `views`, `admission` |
//! | WorkloadEntries of connected machines, and their health | `registrations` |
//! | Compilation after a change, and of a new scope | `round`, `first_compile` |
//! | Key sets of token issuers | `key_sets` |
//! | Isolation of panics in the compile functions | `compiler` |
//! | Limits and lifetime of scopes by identity | `identities` |
//! | Client status, findings, change log and gauges | `status`, `findings`, `change_log`, `gauges` |
//! | Status of configuration objects | `objects` |
//!
//! One lock protects the state, so that all parts are read at one version. The lock is held briefly: scopes are
//! compiled from a clone of the World. A change does not delay a proxy that connects. A proxy that needs a new scope
//! delays only others that need a new scope.
//!
//! Services are compiled once for all proxies of a scope. A change compiles again only the parts that it may affect.
//! Resources that depend on the workload are compiled for each view. A change without effect pushes nothing. A
//! compilation that panics leaves its scope unchanged.

mod admission;
mod change_log;
mod compiler;
mod findings;
mod first_compile;
mod gauges;
mod identities;
mod key_sets;
mod nodes;
mod objects;
mod registrations;
mod round;
mod scope_resources;
mod scopes;
mod state;
mod status;
mod views;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use skysail_model::{Files, ObjectKey, Parsed, Resolved, Validator, World, parse};
use skysail_source::{FileChange, FileState};
use tokio::sync::watch;
use tracing::{error, info};

use self::{
    admission::LimitLog,
    change_log::AppliedChange,
    compiler::{PanicReport, catch_panic},
    registrations::{HEALTH_LINES, HealthReports},
    state::State,
    status::{REJECTION_LINES, lock},
};
pub(crate) use self::{
    admission::{NewClient, Refused},
    compiler::Compiler,
    identities::ScopeLimits,
    key_sets::KeyFetches,
    status::{ClientStatus, TypeStatus},
};
use crate::{
    audit::{AuditEvent, AuditLog, ExternalText},
    metrics::{Metrics, count},
    parallel,
    platform::Platform,
    rate_limit::TokenBuckets,
};

/// DNS names to look up, each with the services that use it.
pub(crate) type LookupNames = BTreeMap<Arc<str>, Vec<String>>;

/// Holds the state of the mesh and publishes it to proxies.
pub(crate) struct Publisher {
    state: RwLock<State>,
    /// Held while a change is published: changes are published one at a time.
    publishing: Mutex<()>,
    /// Held while a round is compiled.
    round: Mutex<()>,
    /// Held while a new scope is compiled. Each compilation uses all cores, and the next one reuses most of its result.
    first_compile: Arc<tokio::sync::Mutex<()>>,
    /// Held while the status of objects is computed.
    object_status: Mutex<()>,
    compiler: Compiler,
    validator: Mutex<Validator>,
    pub(crate) settings: PublishSettings,
    pub(crate) metrics: Arc<Metrics>,
    /// DNS names to look up, and the default interval of lookups; `None` if proxies look up names.
    lookup_names: Option<watch::Sender<(Arc<LookupNames>, Duration)>>,
    /// Key sets to fetch; `None` if none are fetched.
    key_fetches: Option<watch::Sender<Arc<KeyFetches>>>,
    pub(crate) platform: Arc<Platform>,
    limit_log: Mutex<LimitLog>,
    /// Rate limit of log lines about rejected configuration, by identity.
    rejection_lines: TokenBuckets,
    /// Health reports of machines.
    health_reports: HealthReports,
    /// Rate limit of log lines about the health of machines, by identity.
    health_lines: TokenBuckets,
    audit: Arc<AuditLog>,
}

/// Settings of the publisher.
#[derive(Clone, Debug)]
pub(crate) struct PublishSettings {
    /// Cluster of the pods in the configuration.
    pub(crate) cluster_id: String,
    /// Layer of the files with generated objects; see [`Files::with_generated`].
    pub(crate) generated: Option<usize>,
    /// Access log if the mesh configuration has none; empty for no access log.
    pub(crate) access_log: String,
    pub(crate) limits: ScopeLimits,
}

impl Publisher {
    /// Creates a publisher of an empty mesh.
    pub(crate) fn new(metrics: Arc<Metrics>, settings: PublishSettings, compiler: Compiler) -> Self {
        let files = settings.generated.map_or_else(Files::new, Files::with_generated);
        let state = State::new(files, World::new().with_access_log(&settings.access_log));
        let platform = Arc::clone(&state.platform);
        Self {
            state: RwLock::new(state),
            publishing: Mutex::default(),
            round: Mutex::default(),
            first_compile: Arc::default(),
            object_status: Mutex::default(),
            compiler,
            validator: Mutex::default(),
            settings,
            metrics,
            lookup_names: None,
            key_fetches: None,
            platform,
            limit_log: Mutex::default(),
            rejection_lines: TokenBuckets::new(REJECTION_LINES),
            health_reports: HealthReports::default(),
            health_lines: TokenBuckets::new(HEALTH_LINES),
            audit: AuditLog::none(),
        }
    }

    /// Records changes of the configuration in an audit log.
    pub(crate) fn with_audit_log(self, audit: Arc<AuditLog>) -> Self {
        Self { audit, ..self }
    }

    /// Enables DNS lookups in the control plane. The receiver yields the names to look up.
    pub(crate) fn with_dns_lookups(mut self) -> (Self, watch::Receiver<(Arc<LookupNames>, Duration)>) {
        let rate = self.read().world.mesh().dns_refresh_rate.0;
        let (sender, receiver) = watch::channel((Arc::default(), rate));
        self.lookup_names = Some(sender);
        (self, receiver)
    }

    // Poisoning of the lock is ignored. The only compilation under it is that of a view's own resources. It only reads
    // the state, so a panic leaves nothing inconsistent.

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a function with the objects of the configuration, and with whether the last version of an object is refused.
    pub(crate) fn with_served<T>(&self, call: impl FnOnce(&World, &dyn Fn(&ObjectKey) -> bool) -> T) -> T {
        let (world, refused) = {
            let state = self.read();
            (state.world.clone(), state.refused_objects())
        };
        call(&world, &|key| refused.contains(&key.to_string()))
    }

    /// Applies changed files and publishes the result. Blocks during the compilation.
    pub(crate) fn apply(&self, changes: Vec<FileChange>) {
        let start = Instant::now();
        let parsed = parallel::map(&changes, |change| match &change.state {
            FileState::Text(text) => catch_panic(|| change.path.clone(), || parse(text, &change.path)),
            FileState::Unreadable(_) | FileState::Deleted => Ok(Parsed::default()),
        });
        let publishing = lock(&self.publishing);
        let (before, applied, files_at_start) = {
            let mut state = self.write();
            let before = state.world.policies();
            let applied = state.apply_files(changes, parsed);
            state.apply_probes(&applied);
            if !applied.is_empty() {
                state.mark_changes(&self.settings.cluster_id);
            }
            let is_start = !std::mem::replace(&mut state.is_loaded, true);
            if !is_start {
                state.object_generations.change(&applied);
            }
            (before, applied, is_start.then_some(state.arrived_files()))
        };
        let has_changed = !applied.is_empty();
        self.record_changes(files_at_start, &applied);
        let mut took = Duration::ZERO;
        if has_changed {
            self.send_lookup_names();
            self.send_key_fetches();
            self.publish();
            took = start.elapsed();
            let mut state = self.write();
            let generation = state.generation;
            state.object_generations.publish(generation, &applied);
        }
        self.write().publish_files();
        // Proxies do not wait for the validation.
        let descriptions =
            if has_changed { self.validate(applied, &before, files_at_start.is_some()) } else { Vec::new() };
        let (views, clients) = {
            let mut state = self.write();
            state.change_log.append(descriptions);
            state.log_findings();
            (state.views.len(), state.clients.len())
        };
        drop(publishing);
        if has_changed {
            self.metrics.record_publication(took);
            info!(views, clients, ?took, "configuration published");
        }
    }

    /// Records changes in the audit log. At the start, one record holds the numbers of files and of changes.
    fn record_changes(&self, files_at_start: Option<usize>, applied: &[AppliedChange]) {
        if let Some(files) = files_at_start {
            self.audit.record(AuditEvent::ConfigurationLoaded { files, changes: applied.len() });
            return;
        }
        for AppliedChange { file, object, action, .. } in applied {
            let object = object.to_string();
            let (file, object) = (ExternalText(file), ExternalText(&object));
            self.audit.record(AuditEvent::ConfigurationChanged { file, object, action });
        }
    }

    /// Applies results of DNS lookups and publishes them. Blocks during the compilation.
    pub(crate) fn resolve(&self, names: Vec<(Arc<str>, Option<Resolved>)>) {
        self.change_world(|world| {
            names.into_iter().fold(false, |changed, (name, found)| world.resolve(&name, found) || changed)
        });
    }

    /// Changes the World and publishes it, unless `change` returns false. Blocks during the compilation.
    fn change_world(&self, change: impl FnOnce(&mut World) -> bool) {
        let start = Instant::now();
        let _publishing = lock(&self.publishing);
        let has_changed = {
            let mut state = self.write();
            let has_changed = change(&mut state.world);
            if has_changed {
                state.mark_changes(&self.settings.cluster_id);
            }
            has_changed
        };
        if has_changed {
            self.publish();
            self.metrics.record_publication(start.elapsed());
        }
    }

    /// Sets the roots of the mesh's own authority and publishes them. Blocks during the compilation.
    pub(crate) fn set_roots(&self, roots: &str) {
        self.change_world(|world| world.set_roots(roots));
    }

    /// Compiles and sends changes until all scopes and views are up to date.
    fn publish(&self) {
        loop {
            let _round = lock(&self.round);
            let Some(round) = self.write().take_round() else { return };
            let result = round.run(&self.compiler);
            let reports = self.write().finish_round(result);
            reports.iter().for_each(|report| self.report_panic(report));
        }
    }

    /// Counts a panic of a compilation. Logs it if the previous compilation did not panic in the same way.
    fn report_panic(&self, report: &PanicReport) {
        count(&self.metrics.compile_panics);
        if report.is_new {
            error!(
                panic = report.text,
                "compilation of the configuration panicked, which is a bug in skysaild; proxies keep their last valid configuration"
            );
        }
    }

    /// Sends the names to look up to the resolver, if they have changed.
    fn send_lookup_names(&self) {
        let Some(lookup_names) = &self.lookup_names else { return };
        let current = {
            let state = self.read();
            (Arc::new(state.world.names_to_resolve()), state.world.mesh().dns_refresh_rate.0)
        };
        lookup_names.send_if_modified(|before| {
            let has_changed = *before != current;
            *before = current;
            has_changed
        });
    }
}

#[cfg(test)]
mod tests;
