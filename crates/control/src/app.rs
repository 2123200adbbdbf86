//! The control plane from start to end.
//!
//! 1. [`run`] confines the process, starts the log and the runtime.
//! 2. [`ControlPlane::open`] reads the configuration and the authority. It waits for the first DNS lookups and
//!    the first fetches of key sets.
//! 3. [`ControlPlane::listen`] opens the ports.
//! 4. [`ControlPlane::start_background_tasks`] starts the tasks that run until the process ends.
//! 5. [`ControlPlane::shut_down`] ends the streams and writes the state after SIGTERM or SIGINT.

use std::{
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use skysail_core::{
    confine::{self, Children},
    connections::Connections,
    descriptors, logging,
    shutdown::{self, Shutdown, Trigger},
    trim,
};
use skysail_identity::{Authority, Live, rotation::Lifetimes};
use skysail_inject::{SYSTEM_NAMESPACES, Settings};
use skysail_kubernetes::{ApiServer, Candidate, Cluster, WatchedKind};
use skysail_model::api::Kind;
use skysail_source::{FileChange, Folders};
use skysail_xds::{certificates::CertificateService, limits::Limits, server::DiscoveryService};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tracing::{error, info, warn};

use crate::{
    access::Access,
    admin::{self, Pages},
    args::Args,
    audit::{AuditEvent, AuditLog},
    authentication::{self, AuthenticatedService, Authentication},
    authority::AuthorityManager,
    certificates::CertificateSigner,
    cluster_status::StatusWriter,
    discovery::Discovery,
    gateway_deployments::GatewayDeployer,
    jwks::{KeyFetcher, KeySets},
    metrics::Metrics,
    prefetch::PrefetchHistory,
    publish::{Compiler, PublishSettings, Publisher, ScopeLimits},
    resolve::{DnsCache, Lookups},
    serving::{self, ServerCertificate},
    token_reviews::TokenReviews,
    tokens::TokenKeys,
    webhook,
};

/// Interval at which unused memory is returned to the system and idle scopes are removed.
const TRIM_INTERVAL: Duration = Duration::from_secs(1);
/// Lease of the leader of several replicas.
const LEASE: &str = "skysail-leader";
/// Lease of the replica that deploys gateways, without its revision.
const GATEWAYS_LEASE: &str = "skysail-gateways";
/// Time for calls to end after SIGTERM or SIGINT.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the control plane until SIGTERM or SIGINT.
///
/// # Errors
/// When it cannot start: an unusable directory, authority, key or port.
pub fn run(args: Args) -> anyhow::Result<()> {
    // Before the process starts other threads, so that the filter applies to all of them.
    if !args.no_seccomp {
        confine::process(Children::None)?;
    }
    let format = if args.log_json { logging::Format::Json } else { logging::Format::Text };
    let _flush = logging::init(format);
    descriptors::raise();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(args))
}

async fn serve(args: Args) -> anyhow::Result<()> {
    let mut terminate = pin!(shutdown::terminate());
    let (plane, sources) = tokio::select! {
        opened = ControlPlane::open(args) => opened?,
        // A cluster can keep the start waiting.
        signal = &mut terminate => {
            info!(signal = signal?, "ended before the start was complete");
            return Ok(());
        }
    };
    let (trigger, shutdown) = shutdown::channel();
    let (certificate, injection) = plane.listen(shutdown).await?;
    let leaderships = plane.start_background_tasks(sources, certificate, injection)?;
    let signal = terminate.await?;
    info!(signal, "shutting down");
    for leadership in leaderships {
        leadership.end().await;
    }
    plane.shut_down(trigger).await;
    Ok(())
}

/// Where the configuration is read.
struct Sources {
    folders: Folders,
    cluster: Option<Cluster>,
}

/// The parts that the services share.
struct ControlPlane {
    args: Args,
    metrics: Arc<Metrics>,
    audit: Arc<AuditLog>,
    dns_cache: Arc<DnsCache>,
    key_sets: Arc<KeySets>,
    prefetch: Arc<PrefetchHistory>,
    publisher: Arc<Publisher>,
    authority: Arc<AuthorityManager>,
    /// The API server of the cluster, if one is watched.
    server: Option<ApiServer>,
}

impl ControlPlane {
    /// Reads the configuration and the authority. Returns the sources to watch.
    async fn open(args: Args) -> anyhow::Result<(Self, Sources)> {
        let metrics = Arc::new(Metrics { limits: Arc::new(args.limits()), ..Metrics::default() });
        let audit = open_audit_log(&args, &metrics)?;
        let dns_cache = Arc::new(DnsCache::open(args.state_dir.as_deref()));
        let key_sets = Arc::new(KeySets::open(args.state_dir.as_deref()));
        let (publisher, fetches) = new_publisher(&args, &metrics, &audit).with_key_fetches();
        let fetcher = KeyFetcher::new(&args.dns_servers, &metrics, &key_sets, fetches);
        let (publisher, lookups) = with_lookups(publisher, &args, &metrics, &dns_cache);
        let paths: Vec<PathBuf> = args.config.iter().chain(&args.generated).cloned().collect();
        let mut folders = Folders::new(&paths)?;
        // All objects are read before the first client connects. Otherwise a restart would delete resources for a moment.
        let mut objects = folders.scan();
        let server = match args.watches_cluster() {
            true => Some(ApiServer::new(args.kubeconfig.as_deref()).await?),
            false => None,
        };
        let mut cluster = None;
        if let Some(server) = &server {
            let watched = cluster.insert(Cluster::watch(server, &watched_kinds(), paths.len()).await?);
            objects.extend(watched.initial().await?);
        }
        publisher.apply(objects);
        if let Some(lookups) = lookups {
            lookups.start(&publisher).await;
        }
        fetcher.start(&publisher).await;
        let lifetimes = Lifetimes { certificate: args.cert_ttl, root: args.ca_root_ttl };
        let authority = open_authority(&args, server.as_ref(), lifetimes).await?;
        publisher.set_roots(authority.current().roots_pem());
        let authority = Arc::new(authority);
        let prefetch = Arc::new(PrefetchHistory::open(args.state_dir.as_deref()));
        Ok((
            Self { args, metrics, audit, dns_cache, key_sets, prefetch, publisher, authority, server },
            Sources { folders, cluster },
        ))
    }

    /// Opens all ports and starts their services. Returns the control plane's own certificate, of which the caller starts
    /// the renewal, and the settings of injection.
    async fn listen(&self, shutdown: Shutdown) -> anyhow::Result<(ServerCertificate, Option<Settings>)> {
        let Self { args, audit, .. } = self;
        let token_keys = TokenKeys {
            key: args.token_key.clone(),
            jwks: args.token_jwks.clone(),
            server: self.token_server().cloned(),
            issuers: args.token_issuer.clone(),
            verifier: Live::empty(),
        };
        let key_texts = token_keys.load().await?;
        let authentication = new_authentication(args, &token_keys, &self.publisher);
        let trust_domain = authentication.trust_domain();
        let injection = args.injection.settings(&args.cluster_id, &trust_domain)?;
        let host = args.injection.host();
        let certificate =
            ServerCertificate::new(&self.authority, trust_domain, args.listen, host, args.cert_ttl)?;
        let pages = Arc::new(Pages {
            publisher: Arc::clone(&self.publisher),
            dns_cache: Arc::clone(&self.dns_cache),
            authority: Arc::clone(&self.authority),
            prefetch: Arc::clone(&self.prefetch),
            shutdown: shutdown.clone(),
        });
        let access = Arc::new(Access::new(
            Arc::clone(&authentication),
            args.admin_allow.clone(),
            Arc::clone(&self.metrics),
            Arc::clone(audit),
        ));
        self.listen_for_proxies(&certificate, authentication, &pages, &access, shutdown)?;
        let admin = bind(args, args.admin_port, "admin")?;
        tokio::spawn(token_keys.follow(key_texts, Arc::clone(audit)));
        tokio::spawn(admin::serve(admin, pages, access));
        if let Some(settings) = injection.clone() {
            let listener = bind(args, args.injection.injection_port, "sidecar injection (TLS)")?;
            tokio::spawn(webhook::serve(listener, certificate.webhook_config()?, settings));
        }
        Ok((certificate, injection))
    }

    /// Returns the API server that decides about tokens: that of the cluster, unless keys are given.
    fn token_server(&self) -> Option<&ApiServer> {
        let Args { token_key, token_jwks, .. } = &self.args;
        self.server.as_ref().filter(|_| token_key.is_none() && token_jwks.is_none())
    }

    /// Opens the TLS port, and the plain-text port if it is enabled.
    fn listen_for_proxies(
        &self,
        certificate: &ServerCertificate,
        authentication: Arc<Authentication>,
        pages: &Arc<Pages>,
        access: &Arc<Access>,
        shutdown: Shutdown,
    ) -> anyhow::Result<()> {
        let Self { args, audit, .. } = self;
        let views = Discovery::new(
            Arc::clone(&authentication),
            Arc::clone(pages),
            Arc::clone(access),
            Arc::clone(audit),
            args.cluster_id.clone(),
        );
        let discovery = DiscoveryService::new(Arc::new(views));
        let signer = CertificateSigner::new(
            Arc::clone(&self.authority),
            Arc::clone(&authentication),
            args.cert_ttl,
            Arc::clone(&self.metrics),
            Arc::clone(audit),
        );
        let certificates = CertificateService::new(Arc::new(signer));
        let tls = bind(args, args.tls_port, "discovery and certificates (TLS)")?;
        let services = Arc::new(AuthenticatedService {
            services: (discovery.clone(), certificates),
            authentication: Arc::clone(&authentication),
            audit: Arc::clone(audit),
        });
        let config = Some(certificate.config()?);
        tokio::spawn(serving::serve(tls, config, services, self.connection_limits(), shutdown.clone()));
        let Some(port) = args.plain_port else { return Ok(()) };
        let plain = bind(args, port, "discovery (plain text, no authentication)")?;
        let audit = Arc::clone(audit);
        let services = Arc::new(AuthenticatedService { services: discovery, authentication, audit });
        tokio::spawn(serving::serve(plain, None, services, self.connection_limits(), shutdown));
        Ok(())
    }

    /// Returns the limits that both discovery ports share.
    fn connection_limits(&self) -> (Arc<Connections>, Arc<Limits>) {
        let Self { args, metrics, .. } = self;
        let connections = metrics.open_connections.get_or_init(|| Connections::new(args.connections()));
        (Arc::clone(connections), Arc::clone(&metrics.limits))
    }

    /// Starts the tasks that run until the process ends. Returns the candidacies for leaderships.
    fn start_background_tasks(
        &self,
        Sources { folders, cluster }: Sources,
        certificate: ServerCertificate,
        injection: Option<Settings>,
    ) -> anyhow::Result<Vec<Leadership>> {
        let Self { audit, publisher, authority, .. } = self;
        tokio::spawn(record_authority_changes(Arc::clone(authority), Arc::clone(audit)));
        tokio::spawn(Arc::clone(&self.prefetch).write_changes());
        tokio::spawn(Arc::clone(&self.dns_cache).write_changes());
        tokio::spawn(Arc::clone(&self.key_sets).write_changes());
        tokio::spawn(certificate.renew());
        let (roots, distributed) = watch::channel(authority.current().roots_pem().to_owned());
        tokio::spawn(publish_roots(authority.subscribe(), Arc::clone(publisher), roots));
        // Injected pods mount the trust bundle, and the API server calls the webhook.
        if let Some(server) = &self.server
            && self.args.injection.injection_image.is_some()
        {
            let (server, revision) = (server.clone(), self.args.injection.injection_revision.clone());
            let namespace = self.args.namespace()?;
            let (distributor, receiver, own) = (server.clone(), distributed.clone(), namespace.clone());
            tokio::spawn(
                async move { distributor.distribute_roots(receiver, &own, &SYSTEM_NAMESPACES).await },
            );
            tokio::spawn(async move { server.keep_ca_bundles(distributed, &namespace, &revision).await });
        }
        tokio::spawn(Arc::clone(authority).run());
        tokio::spawn(release_memory(Arc::clone(publisher)));
        tokio::spawn(Arc::clone(publisher).follow_health_reports());
        tokio::spawn(watch_configuration(folders, Arc::clone(publisher)));
        let Some((cluster, server)) = cluster.zip(self.server.as_ref()) else { return Ok(Vec::new()) };
        let (publications, published) = watch::channel(());
        let statuses = cluster.statuses();
        tokio::spawn(watch_cluster(cluster, Arc::clone(publisher), publications));
        let deployed = injection.filter(|_| self.args.deploy_gateways);
        let (namespace, mut leaderships) = (self.args.namespace()?, Vec::new());
        if let Some(settings) = deployed {
            // Each revision deploys its own Gateways.
            let lease = format!("{GATEWAYS_LEASE}-{}", settings.revision);
            let (mut leadership, leads) = Leadership::start(server, &namespace, &lease);
            let (publisher, server) = (Arc::clone(publisher), server.clone());
            let (statuses, published) = (Arc::clone(&statuses), published.clone());
            let deployer = GatewayDeployer { publisher, server, statuses, settings, leads, published };
            leadership.tasks.push(tokio::spawn(deployer.run()));
            leaderships.push(leadership);
        }
        if self.args.write_status {
            let (mut leadership, leads) = Leadership::start(server, &namespace, LEASE);
            let publisher = Arc::clone(publisher);
            let writer = StatusWriter { publisher, statuses, leads, published };
            leadership.tasks.push(tokio::spawn(writer.run()));
            leaderships.push(leadership);
        }
        Ok(leaderships)
    }

    /// Ends all streams and writes the state.
    async fn shut_down(self, mut trigger: Trigger) {
        trigger.drain();
        // Ends the discovery streams. Proxies connect again, to the next control plane.
        self.publisher.close();
        if tokio::time::timeout(DRAIN_TIMEOUT, trigger.drained()).await.is_err() {
            info!("some calls did not end within {DRAIN_TIMEOUT:?}");
        }
        for written in [self.prefetch.write(), self.dns_cache.write(), self.key_sets.write()] {
            if let Err(error) = written {
                warn!(%error, "state file cannot be written; the next start uses older state");
            }
        }
        self.audit.flush().await;
    }
}

/// Opens the audit log, if it is enabled.
fn open_audit_log(args: &Args, metrics: &Arc<Metrics>) -> anyhow::Result<Arc<AuditLog>> {
    let Some(target) = &args.audit_log else { return Ok(AuditLog::none()) };
    let audit = AuditLog::open(target, args.audit_required, Arc::clone(metrics))
        .with_context(|| format!("--audit-log {target}"))?;
    let audit = Arc::new(audit);
    audit.reopen_on_hangup().context("signal handler for SIGHUP")?;
    Ok(audit)
}

/// Creates the publisher.
fn new_publisher(args: &Args, metrics: &Arc<Metrics>, audit: &Arc<AuditLog>) -> Publisher {
    let limits = ScopeLimits {
        scopes: args.max_scopes,
        scopes_per_identity: args.max_scopes_per_identity,
        views: args.max_views,
        views_per_identity: args.max_views_per_identity,
    };
    let settings = PublishSettings {
        cluster_id: args.cluster_id.clone(),
        generated: args.generated.as_ref().map(|_| args.config.len()),
        access_log: args.default_access_log.clone(),
        limits,
    };
    Publisher::new(Arc::clone(metrics), settings, Compiler::default()).with_audit_log(Arc::clone(audit))
}

/// Enables DNS lookups, unless they are disabled.
fn with_lookups(
    publisher: Publisher,
    args: &Args,
    metrics: &Arc<Metrics>,
    dns_cache: &Arc<DnsCache>,
) -> (Arc<Publisher>, Option<Lookups>) {
    if args.no_dns {
        return (Arc::new(publisher), None);
    }
    let (publisher, names) = publisher.with_dns_lookups();
    let lookups = Lookups::new(&args.dns_servers, Arc::clone(metrics), Arc::clone(dns_cache), names);
    (Arc::new(publisher), Some(lookups))
}

/// Creates the authentication of callers, which uses the token keys and the pods in the configuration.
fn new_authentication(args: &Args, token_keys: &TokenKeys, publisher: &Publisher) -> Arc<Authentication> {
    let settings = authentication::AuthenticationSettings {
        trust_domain: args.trust_domain.clone(),
        token_interval: args.token_interval,
        clock: Arc::new(SystemTime::now),
    };
    let platform = Arc::clone(&publisher.platform);
    let verifier = Arc::clone(&token_keys.verifier);
    let reviews = token_keys.server.clone().map(TokenReviews::new);
    let authentication = Authentication::new(verifier, settings, platform, Arc::clone(&publisher.metrics));
    let authentication = authentication.with_reviews(reviews);
    let (domain, mesh) = (authentication.trust_domain(), publisher.platform.trust_domains().own.clone());
    if domain != mesh {
        warn!(
            domain,
            mesh,
            "--trust-domain differs from trustDomain of the mesh configuration; proxies will reject each other's certificates"
        );
    }
    Arc::new(authentication)
}

/// Opens the authority: in --ca-dir, in Secrets of the watched cluster, or in memory.
async fn open_authority(
    args: &Args,
    server: Option<&ApiServer>,
    lifetimes: Lifetimes,
) -> anyhow::Result<AuthorityManager> {
    if let (Some(server), None) = (server, &args.ca_dir) {
        let opened = AuthorityManager::open_in_cluster(server.secrets(&args.namespace()?), lifetimes).await;
        return opened.context("certificate authority of the cluster");
    }
    AuthorityManager::open(args.ca_dir.as_deref(), lifetimes).with_context(|| {
        args.ca_dir.as_ref().map_or("--ca-root-ttl".into(), |dir| format!("--ca-dir {}", dir.display()))
    })
}

/// Records changes of the authority in the audit log.
async fn record_authority_changes(manager: Arc<AuthorityManager>, audit: Arc<AuditLog>) {
    let mut authority = manager.subscribe();
    authority.mark_unchanged();
    while authority.changed().await.is_ok() {
        audit.record(AuditEvent::AuthorityChanged { authority: &manager.status() });
    }
}

/// Publishes the authority's roots when they change.
async fn publish_roots(
    mut authority: watch::Receiver<Arc<Authority>>,
    publisher: Arc<Publisher>,
    distributed: watch::Sender<String>,
) {
    while authority.changed().await.is_ok() {
        let roots = authority.borrow_and_update().roots_pem().to_owned();
        distributed.send_replace(roots.clone());
        let publisher = Arc::clone(&publisher);
        let _ = tokio::task::spawn_blocking(move || publisher.set_roots(&roots)).await;
    }
}

/// Applies changes. A change that cannot be compiled does not end the watch.
fn apply(publisher: &Publisher, changes: Vec<FileChange>) {
    let applying = std::panic::AssertUnwindSafe(|| publisher.apply(changes));
    if std::panic::catch_unwind(applying).is_err() {
        error!("publication of a configuration change panicked; proxies keep their last configuration");
    }
}

/// Applies changes of the configuration files.
async fn watch_configuration(folders: Folders, publisher: Arc<Publisher>) {
    if let Err(error) = folders.watch(move |changes| apply(&publisher, changes)).await {
        error!(%error, "configuration is no longer watched; restart skysaild to apply changes");
    }
}

/// Returns the kinds of the cluster's objects to watch.
fn watched_kinds() -> Vec<WatchedKind> {
    // The workloads of other kinds are known by their pods.
    let kinds = Kind::ALL.iter().filter(|kind| !matches!(kind.group(), "apps" | "batch"));
    kinds.map(|kind| WatchedKind { group: kind.group(), kind: kind.as_str() }).collect()
}

/// Applies changes of the objects of a cluster.
async fn watch_cluster(mut cluster: Cluster, publisher: Arc<Publisher>, publications: watch::Sender<()>) {
    while let Some(changes) = cluster.next().await {
        let publisher = Arc::clone(&publisher);
        let _ = tokio::task::spawn_blocking(move || apply(&publisher, changes)).await;
        publications.send_replace(());
    }
}

/// Candidacy of this replica for the leadership.
struct Leadership {
    candidate: Candidate,
    /// The election, and what the leader does.
    tasks: Vec<JoinHandle<Infallible>>,
}

impl Leadership {
    /// Stands for election. Also returns whether this replica leads.
    fn start(server: &ApiServer, namespace: &str, lease: &str) -> (Self, watch::Receiver<bool>) {
        let name = std::env::var("POD_NAME").unwrap_or_else(|_| "skysaild".to_owned());
        // A container that starts again in its pod is another candidate.
        let identity = format!("{name}_{:016x}", fastrand::u64(..));
        let candidate = || server.candidate(namespace, lease, &identity);
        let (leads, receiver) = watch::channel(false);
        let tasks = vec![tokio::spawn(candidate().run(leads))];
        (Self { tasks, candidate: candidate() }, receiver)
    }

    /// Ends the candidacy. Another replica takes over at once.
    async fn end(self) {
        // What the leader does ends before the Lease is free.
        for task in self.tasks.into_iter().rev() {
            task.abort();
            let _ = task.await;
        }
        match tokio::time::timeout(DRAIN_TIMEOUT, self.candidate.release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => info!(%error, "the Lease is not released; another replica takes over later"),
            Err(_) => info!("the Lease is not released; another replica takes over later"),
        }
    }
}

/// Removes idle scopes and the WorkloadEntries of machines that left. Returns unused memory to the system after
/// connections or publications.
async fn release_memory(publisher: Arc<Publisher>) {
    let mut events = 0;
    loop {
        tokio::time::sleep(TRIM_INTERVAL).await;
        publisher.drop_idle(Instant::now());
        let expiring = Arc::clone(&publisher);
        let _ = tokio::task::spawn_blocking(move || expiring.expire_registrations(Instant::now())).await;
        let now = publisher.metrics.memory_events();
        if std::mem::replace(&mut events, now) != now {
            let _ = tokio::task::spawn_blocking(trim::heap).await;
        }
    }
}

/// Opens a port. `service` names its service in the log.
fn bind(args: &Args, port: u16, service: &str) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(args.listen, port);
    let listener =
        serving::listen(address).with_context(|| format!("listening on {address} for {service}"))?;
    info!(address = %listener.local_addr()?, "serving {service}");
    Ok(listener)
}
