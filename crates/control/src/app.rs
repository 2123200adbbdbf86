//! The control plane, start to end.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use skysail_core::{
    confine::{self, Children},
    connections::Connections,
    descriptors, logging,
    shutdown::{self, Shutdown},
    trim,
};
use skysail_identity::{Authority, Live, rotation::Lifetimes};
use skysail_source::Folders;
use skysail_xds::{certificates::CertificateService, server::DiscoveryService};
use tokio::{net::TcpListener, sync::watch};
use tracing::{error, info, warn};

use crate::{
    access::Access,
    admin::{self, Pages},
    args::Args,
    audit::{Audit, Event},
    authentication::{self, Authentication, Guarded},
    authority::Keeper,
    certificates::Certificates,
    discovery::Discovery,
    habits::Habits,
    metrics::Metrics,
    publish::{Compiler, Limits, Publisher, Settings},
    resolve::{Lookups, Names},
    serving::{self, OwnCertificate},
    tokens::Tokens,
};

/// How often to see whether there is memory to give back.
const BETWEEN_TRIMS: Duration = Duration::from_secs(1);
/// How long calls may take to end after SIGTERM.
const DRAIN: Duration = Duration::from_secs(5);

/// Runs the control plane until SIGTERM or SIGINT.
///
/// # Errors
/// When it cannot start: an unusable folder, authority, key or port.
pub fn run(args: Args) -> anyhow::Result<()> {
    // Before the first further thread, so that all are confined.
    if !args.no_seccomp {
        confine::process(Children::None)?;
    }
    let format = if args.log_json { logging::Format::Json } else { logging::Format::Text };
    let _flush = logging::init(format);
    descriptors::raise();
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(args))
}

async fn serve(args: Args) -> anyhow::Result<()> {
    let (plane, folders) = Plane::open(args).await?;
    let (mut trigger, shutdown) = shutdown::channel();
    let own = plane.listen(shutdown)?;
    let Plane { publisher, keeper, habits, names, audit, .. } = plane;
    tokio::spawn(watch_authority(Arc::clone(&keeper), Arc::clone(&audit)));
    tokio::spawn(Arc::clone(&habits).keep());
    tokio::spawn(Arc::clone(&names).keep());
    start_rest(folders, own, &publisher, keeper);

    let signal = shutdown::terminate().await?;
    info!(signal, "shutting down");
    trigger.drain();
    // Ends the discovery streams; proxies connect again, to our successor.
    publisher.close();
    if tokio::time::timeout(DRAIN, trigger.drained()).await.is_err() {
        info!("some calls did not end in {DRAIN:?}");
    }
    keep(&habits, &names);
    audit.flush().await;
    Ok(())
}

/// The parts that services share.
struct Plane {
    args: Args,
    metrics: Arc<Metrics>,
    audit: Arc<Audit>,
    names: Arc<Names>,
    habits: Arc<Habits>,
    publisher: Arc<Publisher>,
    keeper: Arc<Keeper>,
}

impl Plane {
    /// Reads the configuration and the authority. Returns the folders that are to be watched.
    async fn open(args: Args) -> anyhow::Result<(Self, Folders)> {
        let metrics = Arc::new(Metrics { limits: Arc::new(args.limits()), ..Metrics::default() });
        let audit = audit(&args, &metrics)?;
        let names = Arc::new(Names::open(args.state_dir.as_deref()));
        let (publisher, lookups) = publisher(&args, &metrics, &names, &audit);
        let paths: Vec<PathBuf> = args.config.iter().chain(&args.generated).cloned().collect();
        let mut folders = Folders::new(&paths)?;
        // No client is accepted before all files are read: a restart would take resources away for a moment.
        publisher.apply(folders.look());
        if let Some(lookups) = lookups {
            lookups.start(&publisher).await;
        }
        let lifetimes = Lifetimes { certificate: args.cert_ttl, root: args.ca_root_ttl };
        let keeper = Keeper::open(args.ca_dir.as_deref(), lifetimes).with_context(|| {
            args.ca_dir.as_ref().map_or("--ca-root-ttl".into(), |dir| format!("--ca-dir {}", dir.display()))
        })?;
        publisher.set_roots(keeper.current().roots_pem());
        let (keeper, habits) = (Arc::new(keeper), Arc::new(Habits::open(args.state_dir.as_deref())));
        Ok((Self { args, metrics, audit, names, habits, publisher, keeper }, folders))
    }

    /// Starts all services. Returns the control plane's own certificate, which is to be renewed.
    fn listen(&self, shutdown: Shutdown) -> anyhow::Result<OwnCertificate> {
        let Self { args, metrics, audit, .. } = self;
        let tokens = Tokens {
            key: args.token_key.clone(),
            jwks: args.token_jwks.clone(),
            issuers: args.token_issuer.clone(),
            verifier: Live::empty(),
        };
        let keys = tokens.load()?;
        let authentication = authentication(args, &tokens, &self.publisher);
        let own =
            OwnCertificate::new(&self.keeper, authentication.trust_domain(), args.listen, args.cert_ttl)?;
        let pages = Arc::new(Pages {
            publisher: Arc::clone(&self.publisher),
            names: Arc::clone(&self.names),
            keeper: Arc::clone(&self.keeper),
            habits: Arc::clone(&self.habits),
            shutdown: shutdown.clone(),
        });
        let access = Arc::new(Access::new(
            Arc::clone(&authentication),
            args.admin_allow.clone(),
            Arc::clone(metrics),
            Arc::clone(audit),
        ));
        let views = Discovery::new(
            Arc::clone(&authentication),
            Arc::clone(&pages),
            Arc::clone(&access),
            Arc::clone(audit),
            args.cluster_id.clone(),
        );
        let discovery = DiscoveryService::new(Arc::new(views));
        let signer = Certificates::new(
            Arc::clone(&self.keeper),
            Arc::clone(&authentication),
            args.cert_ttl,
            Arc::clone(metrics),
            Arc::clone(audit),
        );
        let certificates = CertificateService::new(Arc::new(signer));
        let connections = metrics.held.get_or_init(|| Connections::new(args.connections()));
        let limits = || (Arc::clone(connections), Arc::clone(&metrics.limits));
        let tls = bind(args, args.tls_port, "discovery and certificates (TLS)")?;
        let services = (discovery.clone(), certificates);
        let (known_by, kept_in) = (Arc::clone(&authentication), Arc::clone(audit));
        let services = Arc::new(Guarded { services, authentication: known_by, audit: kept_in });
        tokio::spawn(serving::serve(tls, Some(own.config()?), services, limits(), shutdown.clone()));
        if let Some(port) = args.plain_port {
            let plain = bind(args, port, "discovery (plain text, no authentication)")?;
            let services =
                Arc::new(Guarded { services: discovery, authentication, audit: Arc::clone(audit) });
            tokio::spawn(serving::serve(plain, None, services, limits(), shutdown));
        }
        let admin = bind(args, args.admin_port, "admin")?;
        tokio::spawn(tokens.follow(keys, Arc::clone(audit)));
        tokio::spawn(admin::serve(admin, pages, access));
        Ok(own)
    }
}

/// Writes the state for the next start.
fn keep(habits: &Habits, names: &Names) {
    for written in [habits.write(), names.write()] {
        if let Err(error) = written {
            warn!(%error, "cannot be written; what was learned since is forgotten");
        }
    }
}

/// Opens the audit log, if there is to be one.
fn audit(args: &Args, metrics: &Arc<Metrics>) -> anyhow::Result<Arc<Audit>> {
    let Some(target) = &args.audit_log else { return Ok(Audit::none()) };
    let audit = Audit::open(target, args.audit_required, Arc::clone(metrics))
        .with_context(|| format!("--audit-log {target}"))?;
    let audit = Arc::new(audit);
    audit.reopen_on_hangup().context("listening to SIGHUP")?;
    Ok(audit)
}

/// Records changes of the authority in the audit log.
async fn watch_authority(keeper: Arc<Keeper>, audit: Arc<Audit>) {
    let mut authority = keeper.follow();
    authority.mark_unchanged();
    while authority.changed().await.is_ok() {
        audit.record(Event::AuthorityChanged { authority: &keeper.status() });
    }
}

/// Makes the authentication of callers, by these tokens and the known pods.
fn authentication(args: &Args, tokens: &Tokens, publisher: &Publisher) -> Arc<Authentication> {
    let settings = authentication::Settings {
        trust_domain: args.trust_domain.clone(),
        token_interval: args.token_interval,
        clock: Arc::new(SystemTime::now),
    };
    let platform = Arc::clone(&publisher.platform);
    let verifier = Arc::clone(&tokens.verifier);
    let authentication = Authentication::new(verifier, settings, platform, Arc::clone(&publisher.metrics));
    let (domain, mesh) = (authentication.trust_domain(), publisher.platform.domains().own.clone());
    if domain != mesh {
        warn!(
            domain,
            mesh,
            "--trust-domain is not the mesh configuration's: proxies will refuse each other's certificates"
        );
    }
    Arc::new(authentication)
}

/// Holds the mesh, and has names looked up unless proxies are to.
fn publisher(
    args: &Args,
    metrics: &Arc<Metrics>,
    names: &Arc<Names>,
    audit: &Arc<Audit>,
) -> (Arc<Publisher>, Option<Lookups>) {
    let limits = Limits {
        scopes: args.max_scopes,
        of_identity: args.max_scopes_per_identity,
        views: args.max_views,
        views_of_identity: args.max_views_per_identity,
    };
    let settings = Settings {
        cluster_id: args.cluster_id.clone(),
        generated: args.generated.as_ref().map(|_| args.config.len()),
        access_log: args.default_access_log.clone(),
        limits,
    };
    let publisher =
        Publisher::new(Arc::clone(metrics), settings, Compiler::default()).audited(Arc::clone(audit));
    if args.no_dns {
        return (Arc::new(publisher), None);
    }
    let (publisher, wanted) = publisher.looking_up();
    let lookups = Lookups::new(&args.dns_servers, Arc::clone(metrics), Arc::clone(names), wanted);
    (Arc::new(publisher), Some(lookups))
}

/// Starts the background tasks, which run until the process ends.
fn start_rest(folders: Folders, own: OwnCertificate, publisher: &Arc<Publisher>, keeper: Arc<Keeper>) {
    tokio::spawn(own.renew());
    tokio::spawn(keep_roots(keeper.follow(), Arc::clone(publisher)));
    tokio::spawn(keeper.run());
    tokio::spawn(keep_small(Arc::clone(publisher)));
    let publisher = Arc::clone(publisher);
    tokio::spawn(async move {
        let apply = move |changes| {
            let applying = std::panic::AssertUnwindSafe(|| publisher.apply(changes));
            // One change we cannot compile must not end the watching.
            if std::panic::catch_unwind(applying).is_err() {
                error!("a change could not be compiled; proxies keep what they have");
            }
        };
        if let Err(error) = folders.watch(apply).await {
            error!(%error, "configuration is no longer watched; restart to take changes");
        }
    });
}

/// Publishes the authority's roots whenever they change.
async fn keep_roots(mut authority: watch::Receiver<Arc<Authority>>, publisher: Arc<Publisher>) {
    while authority.changed().await.is_ok() {
        let roots = authority.borrow_and_update().roots_pem().to_owned();
        let publisher = Arc::clone(&publisher);
        let _ = tokio::task::spawn_blocking(move || publisher.set_roots(&roots)).await;
    }
}

/// Removes idle scopes, and returns unused memory to the system after many connections came or went.
async fn keep_small(publisher: Arc<Publisher>) {
    let mut events = 0;
    loop {
        tokio::time::sleep(BETWEEN_TRIMS).await;
        publisher.drop_idle(Instant::now());
        let now = publisher.metrics.events();
        if std::mem::replace(&mut events, now) != now {
            let _ = tokio::task::spawn_blocking(trim::heap).await;
        }
    }
}

fn bind(args: &Args, port: u16, what: &str) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(args.listen, port);
    let listener = serving::listen(address).with_context(|| format!("listening on {address} for {what}"))?;
    info!(address = %listener.local_addr()?, "serving {what}");
    Ok(listener)
}
