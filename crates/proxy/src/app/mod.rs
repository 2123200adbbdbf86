//! Start and shutdown of the sidecar, in order.

pub(crate) mod args;
mod checks;
pub(crate) mod envoy;
mod health;
pub(crate) mod hooks;
mod merged_metrics;
mod node;
mod probes;
mod settings;
mod status;

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use anyhow::Context as _;
use prost::Message as _;
use serde_json::Value;
use skysail_core::{
    confine::{self, Children},
    descriptors, logging, names, shutdown,
};
use skysail_xds::{
    Kind,
    client::{Form, Options},
    envoy::pb::envoy::config::core::v3::Node,
};
use tokio::{
    sync::Notify,
    task::{LocalSet, spawn_local},
};
use tonic::metadata::{MetadataKey, MetadataMap};

use crate::{
    accept::workers::{Shared, Workers},
    admin::{self, Admin},
    app::{
        args::{Args, Common, Mode},
        envoy::Envoy,
        health::Probe,
    },
    discovery::{
        self, Configuration, Setup,
        secrets::{self, Mesh, OwnCertificate, Secrets},
    },
    overload::{
        Limits,
        pressure::{self, OverloadActions},
    },
    telemetry::AccessLogger,
    translate::{
        TlsContexts,
        bootstrap::{self, Bootstrap, convert, runtime},
    },
    upstream::Dialer,
};
use skysail_policy::peer::LocalWorkload;

/// Runs the sidecar until a signal or a request to the admin page ends it.
///
/// # Errors
/// The sidecar cannot start: a file is unreadable or invalid, a port is taken, or the system refuses a
/// resource.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    let level = args.log_level().map(admin::level).transpose().map_err(anyhow::Error::msg)?;
    let mode = args.mode()?;
    if let Mode::Convert(conversion) = mode {
        // Without formatting: the parent process parses this text.
        if let Err(error) = convert::child(conversion) {
            eprint!("{error:#}");
            std::process::exit(1);
        }
        return Ok(());
    }
    // seccomp must be in effect before a second thread starts, so that it applies to all. Envoy needs other
    // system calls.
    if let Mode::Bootstrap(_, common) | Mode::Mesh(_, _, common) = &mode
        && common.seccomp
    {
        confine::process(Children::Programs)?;
    }
    let _flush = logging::init(logging::Format::Text);
    if let Some(level) = level.filter(|_| std::env::var_os("SKYSAIL_LOG").is_none()) {
        logging::set_level(None, level)?;
    }
    descriptors::raise();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(4)
        .build()
        .context("cannot create an event loop")?;
    let (start, common) = match mode {
        Mode::Convert(_) => return Ok(()),
        Mode::Validate(source) => return validate(&source),
        Mode::Envoy(program, mesh, source, mut common) => {
            let node = node::load(&source)?;
            settings::start(&mut common, &node["metadata"]["PROXY_CONFIG"]);
            return runtime.block_on(run_envoy(Envoy { program, mesh, node, common }));
        }
        Mode::Bootstrap(source, common) => (Start::File(Box::new(bootstrap::load(&source)?)), common),
        Mode::Mesh(mesh, source, mut common) => {
            let node = node::load(&source)?;
            let config = node["metadata"]["PROXY_CONFIG"].clone();
            settings::start(&mut common, &config);
            (Start::Mesh(mesh, Box::new(node::proto(&node)?), config), common)
        }
    };
    let local = LocalSet::new();
    let workers = local.block_on(&runtime, control(start, common))?;
    // Dropping the runtime releases the remaining references to the workers, such as those of open admin pages. Only
    // then can the workers be joined. The last worker's exit flushes the access log.
    drop(local);
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    if let Some(workers) = Arc::into_inner(workers) {
        workers.join();
    }
    Ok(())
}

/// Checks a bootstrap file as a start would, without any effect.
fn validate(source: &bootstrap::Source) -> anyhow::Result<()> {
    let file = bootstrap::load(source)?;
    discovery::check_static(&file)?;
    if let Some(ads) = &file.ads
        && !file.clusters.iter().any(|(name, _)| *name == ads.cluster)
    {
        anyhow::bail!(
            "dynamic_resources.ads_config: static_resources has no cluster {:?}: add it",
            ads.cluster
        );
    }
    println!("configuration '{}' OK", source.path.display());
    Ok(())
}

/// Runs a real Envoy instead of the sidecar.
async fn run_envoy(envoy: Envoy) -> anyhow::Result<()> {
    let node = node::proto(&envoy.node)?;
    let own =
        OwnCertificate::new(&Secrets::new(Arc::default()), envoy.mesh.clone(), node, envoy.common.mark)?;
    envoy.run(own).await
}

/// Source of the initial configuration.
enum Start {
    File(Box<Bootstrap>),
    /// Control plane, node, and the settings of the proxy in the node's metadata.
    Mesh(Mesh, Box<Node>, Value),
}

impl Start {
    fn node(&self) -> &Node {
        match self {
            Self::File(file) => &file.node,
            Self::Mesh(_, node, _) => node,
        }
    }
}

/// Runs discovery, certificate renewal, the admin page and the shutdown on the main thread, which carries no traffic.
async fn control(start: Start, common: Common) -> anyhow::Result<Arc<Workers>> {
    // Installed first, so that a signal during startup is not lost.
    let terminate = spawn_local(shutdown::terminate());
    let secrets = Secrets::new(Arc::new(TlsContexts::default()));
    let shared = shared(&start, &common, &secrets)?;
    let workers = Arc::new(Workers::start(common.concurrency(), shared.clone())?);
    let mut configuration = Configuration::new(Setup {
        workers: Arc::clone(&workers),
        secrets: secrets.clone(),
        node: start.node().clone(),
        mark: common.mark,
        in_mesh: matches!(start, Start::Mesh(..)),
    });
    if let Start::File(file) = &start {
        configuration.add_static(file)?;
    }
    let configuration = Arc::new(configuration);
    let quit = Arc::new(Notify::new());
    let admin = Admin::new(
        Arc::clone(&configuration),
        Arc::clone(&workers),
        shared.clone(),
        &start_body(&start),
        Arc::clone(&quit),
        common.admin.clone(),
    );
    listen(&admin, &start, &common).await?;

    let failed = configuration.refresh().await;
    if let (Start::File(_), Some((_, reason))) = (&start, failed.first()) {
        anyhow::bail!("{reason}");
    }
    let _tasks = start_tasks(&configuration, &workers, &shared.pressure);
    let _discovery = match start {
        Start::File(file) => Task::start(from_file(*file, Arc::clone(&configuration))?),
        Start::Mesh(mesh, node, config) => {
            let probe = Probe::of_settings(&config).unwrap_or_else(|error| {
                // Without reports, the control plane keeps the workload out of load balancing.
                tracing::error!("the health of the workload is not checked: {error:#}");
                None
            });
            Task::start(from_mesh(mesh, *node, probe, common.mark, secrets, Arc::clone(&configuration))?)
        }
    };

    tokio::select! {
        signal = terminate => tracing::info!(signal = signal??, "draining"),
        () = quit.notified() => tracing::info!("quit requested, draining"),
    }
    admin.drain();
    let cut = workers.drain(common.drain()).await;
    tracing::info!(open_connections = cut, "drained");
    Ok(workers)
}

/// Returns the settings and the state that all workers share.
fn shared(start: &Start, common: &Common, secrets: &Secrets) -> anyhow::Result<Shared> {
    let (mut limits, pressure) = match start {
        Start::File(file) => (file.limits, file.pressure.clone()),
        Start::Mesh(..) => (Limits::default(), pressure::Settings::default()),
    };
    limits.series = common.metric_series;
    if let Start::Mesh(_, _, config) = start {
        settings::apply(&mut limits, config);
    }
    for (key, value) in &common.runtime {
        runtime::set(&mut limits, key, value)?;
    }
    Ok(Shared {
        snapshot: Arc::default(),
        local: Arc::new(local_workload(start.node())?),
        dialer: Dialer { mark: common.mark, principal: Arc::clone(&secrets.principal) },
        limits,
        access_log: Arc::new(AccessLogger::start().context("cannot create the access log thread")?),
        pressure: Arc::new(OverloadActions::of(pressure)),
    })
}

/// Starts the tasks of the control thread besides discovery.
fn start_tasks(
    configuration: &Arc<Configuration>,
    workers: &Arc<Workers>,
    pressure: &Arc<OverloadActions>,
) -> [Task; 3] {
    spawn_local({
        let (pressure, workers) = (Arc::clone(pressure), Arc::clone(workers));
        async move { pressure.watch(async |refuse| workers.refuse_requests(refuse).await).await }
    });
    let [refreshed, served, trimmed] = std::array::from_fn(|_| Arc::clone(configuration));
    [
        Task::start(async move { refreshed.keep_fresh().await }),
        Task::start(async move { served.serve_host_requests().await }),
        Task::start(async move { trimmed.trim_memory().await }),
    ]
}

fn local_workload(node: &Node) -> anyhow::Result<LocalWorkload> {
    // Two crates generate the same message as different types.
    let metadata = node.metadata.as_ref().map(prost::Message::encode_to_vec).unwrap_or_default();
    let metadata = prost_types::Struct::decode(metadata.as_slice())?;
    let zone = node.locality.as_ref().map_or("", |locality| &locality.zone).into();
    Ok(LocalWorkload { zone, ..LocalWorkload::new(&node.id, &node.cluster, &metadata) })
}

fn start_body(start: &Start) -> bytes::Bytes {
    match start {
        Start::File(file) => file.body.clone(),
        Start::Mesh(_, node, _) => admin::node_only(node),
    }
}

/// Listens on the ports of the admin page, readiness and metrics.
async fn listen(admin: &Arc<Admin>, start: &Start, common: &Common) -> anyhow::Result<()> {
    use skysail_core::names::{ADMIN_PORT, HEALTH_PORT, MERGED_METRICS_PORT, METRICS_PORT};
    let mesh = matches!(start, Start::Mesh(..));
    let from_file = match start {
        Start::File(file) => file.admin,
        Start::Mesh(..) => None,
    };
    let local = |port: u16| (Ipv4Addr::LOCALHOST, port).into();
    // `::` also accepts IPv4.
    let any_address = match start {
        Start::Mesh(_, node, _) if node::has_ipv6(node) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let any = |port: u16| SocketAddr::new(any_address, port);
    let usual = |given: Option<u16>, usual: u16| given.or(mesh.then_some(usual));
    let address = common.admin_port.map(local).or(from_file).or(mesh.then(|| local(ADMIN_PORT)));
    if let Some(address) = address {
        admin::serve(admin, address, "admin page", admin::Pages::All).await?;
    }
    if let Some(port) = usual(common.health_port, HEALTH_PORT) {
        admin::serve(admin, any(port), "readiness", admin::Pages::Health).await?;
    }
    if let Some(port) = usual(common.metrics_port, METRICS_PORT) {
        let address = admin::serve(admin, any(port), "metrics", admin::Pages::Metrics).await?;
        if let Some(port) = usual(common.merged_metrics_port, MERGED_METRICS_PORT) {
            status::serve(any(port), address.port(), common.mark, admin::agent_pages(admin)).await?;
        }
    }
    Ok(())
}

type Forever = std::pin::Pin<Box<dyn Future<Output = Infallible>>>;

/// Returns discovery as the bootstrap file configures it. Without `ads_config` the future never completes.
fn from_file(file: Bootstrap, configuration: Arc<Configuration>) -> anyhow::Result<Forever> {
    let Some(ads) = file.ads else { return Ok(Box::pin(std::future::pending())) };
    let remote = configuration.remote(&ads.cluster).with_context(|| {
        format!("dynamic_resources.ads_config: static_resources has no usable cluster {:?}", ads.cluster)
    })?;
    let wildcard = [(ads.clusters, Kind::Cluster), (ads.listeners, Kind::Listener)];
    let wildcard = wildcard.into_iter().filter(|(wanted, _)| *wanted).map(|(_, kind)| kind).collect();
    let mut metadata = MetadataMap::new();
    for (key, value) in &ads.metadata {
        let key = MetadataKey::from_bytes(key.as_bytes())
            .context("dynamic_resources.ads_config: initial_metadata")?;
        metadata.insert(key, value.parse().context("dynamic_resources.ads_config: initial_metadata")?);
    }
    let options = Options { node: with_capabilities(file.node, ads.form), form: ads.form, wildcard };
    Ok(Box::pin(async move { configuration.follow(options, remote, || Ok(metadata.clone())).await }))
}

/// Adds node metadata that lets Skysail's control plane send resolved addresses and single virtual hosts. Other
/// control planes ignore the keys.
fn with_capabilities(mut node: Node, form: Form) -> Node {
    let metadata = node.metadata.get_or_insert_default();
    metadata.fields.insert(names::TAKES_RESOLVED_NAMES.to_owned(), skysail_xds::istio::string("true"));
    if form == Form::Delta {
        metadata.fields.insert(names::TAKES_VIRTUAL_HOSTS.to_owned(), skysail_xds::istio::string("true"));
    }
    node
}

/// Obtains the certificate first, then runs discovery with it.
fn from_mesh(
    mesh: Mesh,
    node: Node,
    probe: Option<Probe>,
    mark: Option<u32>,
    secrets: Secrets,
    configuration: Arc<Configuration>,
) -> anyhow::Result<Forever> {
    let token = mesh.token.clone();
    let own = OwnCertificate::new(&secrets, mesh, node.clone(), mark)?;
    let remote = own.remote.clone();
    let node = with_capabilities(node, Form::Delta);
    // The client subscribes to clusters only when it knows whether the server is Skysail.
    let options = Options { node, form: Form::Delta, wildcard: vec![Kind::Listener] };
    Ok(Box::pin(async move {
        let got = Arc::new(Notify::new());
        let _renewal = Task::start({
            let got = Arc::clone(&got);
            own.keep(move |issued| {
                secrets.store_own(issued)?;
                got.notify_one();
                Ok(())
            })
        });
        got.notified().await;
        let _health = probe.map(|probe| Task::start(probe.run(Arc::clone(&configuration), mark)));
        configuration.follow(options, remote, || secrets::authorization(&token)).await
    }))
}

/// A task of this thread, aborted on drop.
struct Task(tokio::task::JoinHandle<()>);

impl Task {
    fn start(future: impl Future<Output = Infallible> + 'static) -> Self {
        Self(spawn_local(async move {
            future.await;
        }))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
