//! Admission of proxies: waits for the scope that a proxy needs, within the limits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_model::{AccountMismatch, ClientScope, ProxyNode};
use skysail_xds::{
    client::Form,
    server::{Event, ResourceFeed},
};
use tracing::warn;

use super::{
    PublishSettings, Publisher, ScopeLimits,
    compiler::{CompilePanic, PanicReport},
    first_compile::{FirstCompileResult, TakenFirst},
    registrations::Registered,
    status::{SharedStatus, lock},
    views::Entry,
};
use crate::metrics::{Limit, count};

/// Minimum time between two log lines about limits.
const LIMIT_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A proxy that has just connected.
pub(crate) struct NewClient {
    /// Node that the proxy declares.
    pub(crate) node: ProxyNode,
    /// Istio version that the proxy declares.
    pub(crate) version: String,
    pub(crate) address: String,
    /// Authenticated identity; empty on the plain-text port.
    pub(crate) identity: String,
    /// Identity to whose limits the proxy counts; on the plain-text port the declared one.
    pub(crate) accounted_to: Arc<str>,
    pub(crate) form: Form,
}

/// Reason why a proxy is refused.
#[derive(Debug)]
pub(crate) enum Refused {
    /// The control plane is shutting down.
    Closed,
    /// The proxy declares a pod of another service account.
    AccountMismatch(AccountMismatch),
    /// A limit of scopes or views is reached.
    Limit(Limit),
    /// The proxy cannot be registered in the WorkloadGroup that it names.
    Registration(String),
    /// Its configuration could not be compiled.
    Broken(CompilePanic),
}

impl Refused {
    /// Returns the reason as text for the proxy and the log.
    pub(crate) fn reason(&self, settings: &PublishSettings) -> String {
        let ScopeLimits { scopes, scopes_per_identity, views, views_per_identity } = settings.limits;
        match self {
            Self::Closed => "the control plane is shutting down; connect again".to_owned(),
            Self::AccountMismatch(error) => error.to_string(),
            Self::Registration(reason) => reason.clone(),
            Self::Limit(Limit::Total) => {
                format!(
                    "the control plane has {scopes} scopes in use or recently used, the limit of --max-scopes"
                )
            }
            Self::Limit(Limit::Identity) => format!(
                "the proxies of this identity have {scopes_per_identity} scopes in use or recently used, the limit of \
                 --max-scopes-per-identity; scopes differ in locality, cluster, address families, or labels that routes match"
            ),
            Self::Limit(Limit::Views) => format!(
                "proxies whose pods are not in the configuration have {views} views, the limit of --max-views"
            ),
            Self::Limit(Limit::IdentityViews) => format!(
                "the proxies of this identity whose pods are not in the configuration have {views_per_identity} views, the limit of \
                 --max-views-per-identity; views differ in labels, port names, workload names, or scope"
            ),
            Self::Broken(panic) => format!(
                "the compilation of {} panicked, which is a bug in the control plane; its log has the details",
                panic.subject
            ),
        }
    }
}

/// Refusals by limits since the last log line about them.
#[derive(Default)]
pub(super) struct LimitLog {
    last_line: Option<Instant>,
    refusals: u64,
}

/// Guard of a connected proxy. Removes the proxy from the state when dropped.
pub(crate) struct Connected {
    publisher: Arc<Publisher>,
    id: u64,
    status: SharedStatus,
    registered: Option<Registered>,
}

impl Publisher {
    /// Admits a proxy once its scope is compiled.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        mut client: NewClient,
    ) -> Result<(ResourceFeed, Connected), Refused> {
        // VHDS requires incremental xDS.
        client.node.view.uses_vhds &= client.form == Form::Delta;
        client.node.view.takes_resolved_addresses &= self.lookup_names.is_some();
        // Before the admission: the view contains the services that lead to the entry.
        let mut registered = self.register(&client).await?;
        loop {
            let prepared = self.read().prepare(&client, &self.settings, &self.compiler);
            if let Err(Refused::Broken(panic)) = &prepared {
                self.report_panic(&PanicReport { text: panic.to_string(), is_new: true });
            }
            let entry = prepared
                .and_then(|prepared| self.write().enter(&client, prepared, &self.settings, Instant::now()));
            let mut ready = match entry.inspect_err(|refused| self.log_limit(refused, &client))? {
                Entry::Admitted(feed, id, status, needs_round) => {
                    count(&self.metrics.connections);
                    let (publisher, registered) = (Arc::clone(self), registered.take());
                    let connected = Connected { publisher, id, status, registered };
                    if needs_round {
                        let publisher = Arc::clone(self);
                        // After a panic, the proxy has no endpoints of its node until the next change.
                        let _ = tokio::task::spawn_blocking(move || publisher.publish()).await;
                    }
                    return Ok((feed, connected));
                }
                Entry::Retry => continue,
                Entry::Wait(ready) => ready,
                Entry::NewScope(scope, id, ready) => {
                    self.start_first_compile(&client.accounted_to, scope, id);
                    ready
                }
            };
            // An error means that the scope was removed; the next iteration creates it again.
            let _ = ready.changed().await;
        }
    }

    /// Starts the compilation of a new scope. It continues if the client disconnects, because other clients may wait
    /// for it.
    fn start_first_compile(self: &Arc<Self>, identity: &str, scope: Arc<ClientScope>, id: u64) {
        let identity_lock = self.read().identities.compile_lock(identity);
        let publisher = Arc::clone(self);
        tokio::spawn(async move {
            let _identity = identity_lock.lock_owned().await;
            let _compile = Arc::clone(&publisher.first_compile).lock_owned().await;
            let (compiling, compiled) = (Arc::clone(&publisher), Arc::clone(&scope));
            let compile = tokio::task::spawn_blocking(move || compiling.compile_new_scope(&compiled, id));
            if let Err(error) = compile.await {
                let report = publisher.write().fail_first_compile(&scope, id, error.to_string());
                report.iter().for_each(|report| publisher.report_panic(report));
            }
        });
    }

    fn compile_new_scope(&self, scope: &Arc<ClientScope>, id: u64) {
        if !scope.is_base() {
            count(&self.metrics.scopes_opened);
        }
        loop {
            let taken = self.write().take_first_compile(scope, id);
            let job = match taken {
                TakenFirst::Compile(job) => job,
                TakenFirst::Removed => return,
                TakenFirst::Failed(report) => return self.report_panic(&report),
                TakenFirst::BaseBusy => {
                    // The round that compiles the base holds the lock, or begins now.
                    drop(lock(&self.round));
                    std::thread::yield_now();
                    continue;
                }
            };
            let compiled = job.run(&self.compiler);
            let result = self.write().finish_first_compile(compiled);
            match result {
                FirstCompileResult::Outdated => {}
                FirstCompileResult::Done if scope.is_base() => {
                    // Rounds skip the scopes over a base that is not compiled. Their proxies wait for this one.
                    return self.publish();
                }
                FirstCompileResult::Done => return,
                FirstCompileResult::Failed(report) => return self.report_panic(&report),
            }
        }
    }

    /// Counts a proxy that is refused by a limit. Logs at most one line per [`LIMIT_LOG_INTERVAL`].
    fn log_limit(&self, refused: &Refused, client: &NewClient) {
        let Refused::Limit(limit) = refused else { return };
        count(&self.metrics.limit_refusals[*limit as usize]);
        let mut log = lock(&self.limit_log);
        log.refusals += 1;
        let now = Instant::now();
        if log.last_line.is_none_or(|last| now.saturating_duration_since(last) >= LIMIT_LOG_INTERVAL) {
            let refusals = std::mem::take(&mut log.refusals);
            log.last_line = Some(now);
            let reason = refused.reason(&self.settings);
            warn!(
                identity = &*client.accounted_to,
                refusals, reason, "proxies refused by a limit of scopes or views"
            );
        }
    }

    /// Removes idle scopes.
    pub(crate) fn drop_idle(&self, now: Instant) {
        let removed = self.write().drop_idle(now);
        // Freed without the lock, because scopes are large.
        drop(removed);
    }

    /// Ends all streams and refuses new proxies.
    pub(crate) fn close(&self) {
        self.write().close();
    }
}

impl Connected {
    #[cfg(test)]
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Records an event of the proxy's stream in its status, the metrics and the log.
    pub(crate) fn report(&self, event: Event<'_>) {
        if let (Event::Health { error }, Some(registered)) = (event, &self.registered) {
            registered.report_health(error);
        }
        self.publisher.record_event(&self.status, event);
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.publisher.write().leave(self.id, Instant::now());
        count(&self.publisher.metrics.disconnects);
    }
}
