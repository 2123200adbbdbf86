//! `skysail bench control`: measures the cost of a control plane under the load of many sidecars.
//!
//! [`cluster_file`] reads the size of a mesh from the files of other tools. [`mesh`] writes the configuration and
//! changes it. [`fleet`] runs all sidecars on one thread, with the part
//! of HTTP/2 ([`connection`]) and the messages ([`message`]) that they need. [`sidecar`] holds the
//! subscriptions of each sidecar. [`changes`] measures changes of the control plane ([`server`]); [`report`] has
//! the results. [`mod@learn`] collects the names to subscribe to: the first sidecar finds them for all others.
//! [`hostile`] acts as a workload that attacks the control plane.

mod changes;
mod cluster_file;
mod connection;
mod fleet;
mod hostile;
mod learn;
mod mesh;
mod message;
mod report;
mod server;
mod sidecar;
mod table;

use std::{
    collections::{BTreeSet, HashSet},
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::ValueEnum as _;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use skysail_core::stdio;

use self::{
    cluster_file::ClusterSize,
    mesh::{Change, Size, cluster::Cluster, large},
    report::{ConnectResult, ControlReport, ControlSettings, Quantiles},
};
pub(crate) use self::{
    fleet::Fleet,
    learn::learn,
    mesh::{Mesh, Store},
    message::Form,
    server::{Server, ServerArgs, Source},
    sidecar::{Plan, Subscription},
};
use crate::{
    certificates, clock,
    report::Machine,
    results::ResultArgs,
    stage::{self, seconds},
    stream::Tls,
    tls,
};

/// `:authority` of the sidecars' calls.
const AUTHORITY: &str = "istiod.istio-system.svc:15012";
/// Namespace of istiod.
const ISTIOD_NAMESPACE: &str = "istio-system";
/// Timeout of each step.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Pause after sidecars connect or disconnect, before memory is measured.
const SETTLE: Duration = Duration::from_secs(1);
/// Pause after a change, until the control plane has finished the work that the change causes.
const AFTER_EFFECTS: Duration = Duration::from_millis(300);
/// Maximum number of sidecars of an identity that a control plane serves with its default limits.
const MAX_SIDECARS: usize = 10_000;
/// Scopes of an identity in a large mesh: its workloads with a Sidecar object, and more than the default permits.
const LARGE_SCOPES: &str = "4096";
/// Maximum numbers of a mesh.
const MAX_FLEET: u32 = 200_000;
const MAX_SERVICES: u32 = 60_000;
const MAX_NAMESPACES: u32 = 10_000;
const MAX_ENDPOINTS: u32 = 250;
/// Number of open files besides connections.
const OTHER_FILES: u64 = 100;

/// Settings of `skysail bench control`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ControlArgs {
    /// Number of sidecars, each with its own stream.
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_FLEET)))]
    sidecars: u32,

    /// Number of services.
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SERVICES)))]
    services: u32,

    /// Amount of configuration: a large mesh has objects of most kinds, in proportion to the services, and gateways,
    /// which connect too.
    #[arg(long, value_name = "SIZE", value_enum, default_value_t = Size::Small)]
    mesh: Size,

    /// Number of namespaces over which services are spread.
    #[arg(long, value_name = "N", default_value_t = mesh::NAMESPACES as u32, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_NAMESPACES)))]
    namespaces: u32,

    /// Endpoints per service, which are pods.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_ENDPOINTS)))]
    endpoints: u32,

    /// File with the number of sidecars, services, namespaces, and endpoints per service, and the churn: a cluster of
    /// pilot-load, or a test configuration of ClusterLoader2. Fields that say more are named.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sidecars", "services", "namespaces", "endpoints"])]
    cluster: Option<PathBuf>,

    /// Value that the templates of a ClusterLoader2 test read, such as `Nodes=10` or `CL2_PODS_PER_NODE=30`; may be
    /// repeated.
    #[arg(long = "set", value_name = "NAME=VALUE", requires = "cluster", value_parser = name_and_value)]
    values: Vec<(String, String)>,

    /// Subscription of the sidecars.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Subscription::Mesh)]
    subscribe: Subscription,

    /// Services that each workload uses, with `--subscribe used`.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    used: u32,

    /// Send virtual hosts within their route configuration, as to an Envoy without on-demand virtual hosts. Always so
    /// in the state of the world.
    #[arg(long)]
    whole_routes: bool,

    /// Form of the protocol.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Form::Delta)]
    form: Form,

    /// Use mutual TLS, with a certificate for the identity of each workload. Default: plain text.
    #[arg(long)]
    tls: bool,

    /// Sidecars per connection. Use two if a process may not open a file for each sidecar.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    streams: u32,

    /// Sidecars that connect at the same time.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    at_once: u32,

    /// Changes to make once all sidecars are configured, each `--repeat` times.
    #[arg(long, value_name = "CHANGE,…", value_delimiter = ',', value_enum, default_values = ["endpoint", "route", "policy", "service"])]
    changes: Vec<Change>,

    /// Make all changes that the mesh permits.
    #[arg(long, conflicts_with = "changes")]
    all_changes: bool,

    /// Number of times that each change is made.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,

    /// Share of the sidecars that disconnects and reconnects continuously, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100))]
    churn: u32,

    /// Duration of this churn, during which an endpoint or a route changes ten times per second.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    seconds: Duration,

    /// Write the objects to the cluster of this kubeconfig instead of files; the control plane watches it. The
    /// namespaces `ns-0` and so on are made, and deleted at the end; the cluster may not have others of these names. The
    /// cluster must serve the kinds of Istio that the mesh has. Services have no selectors, and no node runs the pods.
    #[arg(long, value_name = "FILE", conflicts_with = "hostile")]
    kubeconfig: Option<PathBuf>,

    /// Measure this istiod, Istio's `pilot-discovery`, instead of Skysail. Virtual hosts are sent within their routes.
    #[arg(long, value_name = "FILE", requires = "kubeconfig", conflicts_with_all = ["skysail", "tls"])]
    istiod: Option<PathBuf>,

    /// Measure what one workload can make the control plane spend, attack by attack, while an honest sidecar is
    /// connected. Of the other settings, those of the services except --mesh, --tls, --seconds and the last three
    /// apply.
    #[arg(long)]
    hostile: bool,

    /// Attacks, with --hostile. Default: all.
    #[arg(long, value_name = "ATTACK,…", value_delimiter = ',', value_enum, requires = "hostile")]
    attacks: Vec<hostile::Attack>,

    /// Connections of the attacker, with --hostile.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    connections: u32,

    /// Another build of skysail to measure instead of this one.
    #[arg(long, value_name = "FILE")]
    skysail: Option<PathBuf>,

    #[command(flatten)]
    shown: ResultArgs,
}

/// Measures, writes the result file and prints the result.
pub(crate) fn run(args: &ControlArgs) -> anyhow::Result<bool> {
    let args = &args.sized()?;
    let name = if args.hostile { "control-hostile" } else { "control" };
    let file = args.shown.file(name)?;
    let changes = args.changes()?;
    let files = raise_files()?;
    let connections = u64::from(args.sidecars.div_ceil(args.streams)) + args.gateways() as u64;
    ensure!(
        connections + OTHER_FILES <= files,
        "{connections} connections need as many open files, and the limit is {files}: raise --streams to put more sidecars on each connection"
    );
    let machine = match args.kubeconfig {
        // The API server is outside of any other network namespace.
        Some(_) => stage::observe_machine("that of the machine"),
        None => stage::enter_network(),
    };
    let folder =
        tempfile::Builder::new().prefix("skysail-bench-").tempdir().context("cannot make a folder")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if args.hostile {
        let report = runtime.block_on(hostile::measure(args, folder.path(), machine))?;
        args.shown.publish(file, &report, |report| report.table())?;
    } else {
        let report = runtime.block_on(measure(args, &changes, folder.path(), machine))?;
        args.shown.publish(file, &report, ControlReport::table)?;
    }
    Ok(true)
}

/// Raises the limit of open files, for this process and its children, to the maximum.
pub(crate) fn raise_files() -> anyhow::Result<u64> {
    let (_, max) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, max, max)?;
    Ok(max)
}

async fn measure(
    args: &ControlArgs,
    changes: &[Change],
    folder: &Path,
    machine: Machine,
) -> anyhow::Result<ControlReport> {
    let config = folder.join("config");
    let namespaces = args.namespaces as usize;
    let names = (0..namespaces).map(|number| format!("ns-{number}")).chain([large::EDGE.to_owned()]);
    let mut mesh = args.write_mesh(&config, names.clone().collect())?;
    let api_server = mesh.api_server()?;
    let ids = names.map(|name| format!("spiffe://cluster.local/ns/{name}/sa/default"));
    let ca = folder.join("ca");
    let certificates = certificates::of_control_plane(&ca, ids, "istiod.istio-system.svc")?;
    let tls: Vec<Tls> = if args.tls {
        certificates.iter().map(|one| tls::mesh(one, b"h2", false)).collect::<Result<_, _>>()?
    } else {
        Vec::new()
    };
    stdio::print_error(format_args!("starting a control plane with {} services", args.services));
    let further = args.further();
    let mut server = match (&args.istiod, &args.kubeconfig) {
        (Some(istiod), Some(kubeconfig)) => Server::start_istiod(istiod, kubeconfig, folder).await?,
        (_, kubeconfig) => {
            let source = kubeconfig.as_deref().map_or(Source::Folder(&config), Source::Kubeconfig);
            let (skysail, tls) = (args.skysail.as_deref(), args.tls);
            Server::start(ServerArgs { skysail, tls, further: &further, folder, source, ca: &ca }).await?
        }
    };
    let idle_mb = server.resident();
    stdio::print_error(format_args!(
        "the control plane serves after {:.2} s with {idle_mb:.0} MB",
        server.start.as_secs_f64()
    ));

    let mut plan = args.plan();
    if args.subscribe == Subscription::Mesh {
        learn(&mut plan, server.target, tls.first(), TIMEOUT)?;
    }
    let mut fleet = Fleet::new(server.target, tls, &plan, args.streams as usize)?;
    let gateways = plan.sidecars..plan.sidecars + args.gateways();
    fleet.connect(gateways, args.at_once as usize, TIMEOUT).with_context(|| server.running.output_tail())?;
    fleet.rest(SETTLE)?;
    fleet.received = Default::default();
    let connect = connect(&mut fleet, &mut server, args.sidecars as usize, args.at_once as usize)?;
    let mut measured = Vec::new();
    for change in changes {
        measured.push(changes::measure_change(&mut fleet, &mut server, &mut mesh, *change, args.repeat)?);
    }
    let churn =
        (args.churn > 0).then(|| changes::churn(&mut fleet, &mut server, &mut mesh, args)).transpose()?;
    drop(fleet);
    tokio::time::sleep(SETTLE).await;
    let left_mb = server.resident();
    let start_seconds = server.start.as_secs_f64();
    server.running.stop().await;
    let api_server = match (api_server, mesh.api_server()?) {
        (Some(before), Some(after)) => Some(after.since(before)),
        _ => None,
    };
    mesh.end_all()?;
    Ok(ControlReport {
        format: 1,
        benchmark: "control",
        version: env!("CARGO_PKG_VERSION"),
        started: stage::now(),
        machine,
        settings: ControlSettings::of(args),
        start_seconds,
        idle_mb,
        connect,
        changes: measured,
        churn,
        left_mb,
        api_server,
    })
}

impl ControlArgs {
    /// Parses the arguments of a scenario.
    ///
    /// # Errors
    /// An argument is unknown or out of bounds.
    pub(crate) fn parse(arguments: &str) -> Result<Self, String> {
        stage::parse_arguments(arguments)
    }

    /// Returns the settings with the numbers of the cluster file, if there is one.
    fn sized(&self) -> anyhow::Result<Self> {
        let mut args = self.clone();
        let Some(file) = &self.cluster else { return Ok(args) };
        let size = ClusterSize::read(file, &self.values.iter().cloned().collect())?;
        (args.sidecars, args.services) = (size.sidecars, size.services);
        (args.namespaces, args.endpoints) = (size.namespaces, size.endpoints());
        if args.churn == 0 {
            args.churn = size.churn;
        }
        for (name, number, most) in [
            ("sidecars", args.sidecars, MAX_FLEET),
            ("services", args.services, MAX_SERVICES),
            ("namespaces", args.namespaces, MAX_NAMESPACES),
            ("endpoints per service", args.endpoints, MAX_ENDPOINTS),
        ] {
            ensure!((1..=most).contains(&number), "{}: {number} {name}, not 1 to {most}", file.display());
        }
        stdio::print_error(format_args!(
            "{}: {} sidecars, {} services in {} namespaces, {} pods, churn {} %",
            file.display(),
            size.sidecars,
            size.services,
            size.namespaces,
            size.pods,
            size.churn
        ));
        if !size.unused.is_empty() {
            stdio::print_error(format_args!("not used: {}", size.unused.join(", ")));
        }
        Ok(args)
    }

    /// Writes the objects to the folder or to the cluster, where these namespaces may be made.
    fn write_mesh(&self, folder: &Path, mut namespaces: BTreeSet<String>) -> anyhow::Result<Mesh> {
        let store = match &self.kubeconfig {
            None => Store::folder(folder)?,
            Some(kubeconfig) => {
                if self.istiod.is_some() {
                    namespaces.insert(ISTIOD_NAMESPACE.to_owned());
                }
                Store::Cluster(Cluster::connect(kubeconfig, namespaces)?)
            }
        };
        let namespaces = self.namespaces as usize;
        let mesh = Mesh::write(store, self.services as usize, namespaces, self.endpoints as usize)?;
        if self.istiod.is_some() {
            mesh.add_namespace(ISTIOD_NAMESPACE)?;
        }
        if self.mesh == Size::Large {
            mesh.enlarge()?;
        }
        mesh.finish()?;
        Ok(mesh)
    }

    /// Returns true if no argument is one that `bench run` sets, or that selects another report.
    pub(crate) fn is_plain(&self) -> bool {
        let is_own = self.skysail.is_none() && self.istiod.is_none() && self.kubeconfig.is_none();
        !self.hostile && is_own && self.shown.is_default()
    }

    /// Returns further arguments of the control plane. They allow more sidecars and scopes per identity than the
    /// default, because each namespace has one identity.
    fn further(&self) -> Vec<OsString> {
        let mut further: Vec<OsString> = Vec::new();
        if self.sidecars.div_ceil(self.namespaces.min(self.services)) as usize > MAX_SIDECARS {
            further.extend(["--discovery-identity-streams".into(), self.sidecars.to_string().into()]);
        }
        if self.mesh == Size::Large {
            further.extend(["--max-scopes-per-identity".into(), LARGE_SCOPES.into()]);
        }
        further
    }

    /// Returns the changes to make.
    fn changes(&self) -> anyhow::Result<Vec<Change>> {
        let (is_large, in_cluster) = (self.mesh == Size::Large, self.kubeconfig.is_some());
        let is_possible = |change: &Change| change.is_possible(is_large, self.tls, in_cluster);
        if self.all_changes {
            return Ok(Change::value_variants().iter().copied().filter(is_possible).collect());
        }
        let mut impossible = self.changes.iter().filter(|change| !is_possible(change));
        if let Some(change) = impossible.next() {
            let needs = match change {
                Change::Secret => "needs --mesh large and --tls",
                Change::MeshConfig | Change::RateLimitPolicy => "is not possible with --kubeconfig",
                Change::Ingress => "needs --mesh large, and is not possible with --kubeconfig",
                _ => "needs --mesh large",
            };
            bail!("the change {} {needs}", change.name());
        }
        Ok(self.changes.clone())
    }

    /// Returns the number of gateways, which connect besides the sidecars.
    fn gateways(&self) -> usize {
        if self.mesh == Size::Large { large::gateways(self.services as usize) } else { 0 }
    }

    /// Returns the subscriptions of each sidecar.
    fn plan(&self) -> Plan {
        Plan {
            form: self.form,
            subscription: self.subscribe,
            sidecars: self.sidecars as usize,
            is_large: self.mesh == Size::Large,
            has_secrets: self.tls,
            services: self.services as usize,
            namespaces: self.namespaces as usize,
            used: self.used as usize,
            uses_vhds: !self.whole_routes && self.istiod.is_none() && self.form == Form::Delta,
            endpoint_names: Vec::new(),
            first_endpoints: HashSet::new(),
            route_names: Vec::new(),
        }
    }
}

/// Parses `NAME=VALUE`.
fn name_and_value(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn connect(
    fleet: &mut Fleet<'_>,
    server: &mut Server,
    sidecars: usize,
    at_once: usize,
) -> anyhow::Result<ConnectResult> {
    let (cpu, own, start) = (server.cpu()?, clock::thread_cpu(), Instant::now());
    fleet.connect(0..sidecars, at_once, TIMEOUT * 5).with_context(|| server.running.output_tail())?;
    let (took, own) = (start.elapsed().as_secs_f64(), clock::thread_cpu() - own);
    let received = std::mem::take(&mut fleet.received);
    fleet.rest(SETTLE)?;
    let each = |amount: f64| amount / sidecars as f64;
    let connect = ConnectResult {
        seconds: took,
        per_second: sidecars as f64 / took,
        cpu_ms_each: each((server.cpu()? - cpu) as f64 / 1e6),
        driver_cpu_ms_each: each(own as f64 / 1e6),
        ms: Quantiles::of(received.configured),
        kilobytes_each: each(received.bytes as f64 / 1e3),
        resources_each: each(received.resources as f64),
        resident_mb: server.resident(),
        peak_mb: server.peak(),
    };
    stdio::print_error(format_args!(
        "{sidecars} sidecars in {:.2} s: {:.0} per second, {:.2} ms of CPU each, {:.0} MB",
        connect.seconds, connect.per_second, connect.cpu_ms_each, connect.resident_mb
    ));
    Ok(connect)
}
