//! `skysail bench dns`: counts the DNS queries for the names in ServiceEntries.
//!
//! A DNS server counts queries ([`server`]). First a control plane resolves the names for all sidecars of a fleet. Then
//! one Envoy resolves them itself, with clusters as istiod sends them. Its queries are multiplied by the number of
//! sidecars, because each would send them.

mod server;

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::{Value, json};
use skysail_core::stdio;

use self::server::QueryCounter;
use crate::{
    certificates,
    child::{Running, Scheduling},
    control::{self, Fleet, Form, Mesh, Plan, Server, ServerArgs, Source, Store, Subscription, learn},
    layout,
    peers::{Peer, PeerPrograms},
    report::{Machine, Program},
    results::ResultArgs,
    stage::{self, seconds},
};

/// Timeout of each step.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Pause after sidecars connect and after a start, before queries are counted.
const SETTLE: Duration = Duration::from_secs(3);
/// Number of services besides the names. The sidecars are their workloads.
const SERVICES: usize = 10;
/// Number of their namespaces.
const NAMESPACES: usize = 10;
/// Number of sidecars that connect at the same time.
const AT_ONCE: usize = 50;
/// Address of endpoints with the resolution STATIC (RFC 5737).
const ADDRESS: &str = "192.0.2.1";
/// Port of Envoy's admin page, in a network namespace of our own.
const ENVOY_ADMIN: u16 = 15_000;

/// Resolution of the ServiceEntries. NONE and DYNAMIC_DNS are missing: with them, only requests cause queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum DnsResolution {
    /// Addresses in the ServiceEntry.
    Static,
    /// All addresses of the name.
    Dns,
    /// One address of the name.
    DnsRoundRobin,
}

impl DnsResolution {
    /// Returns the value in ServiceEntries, and the type of Envoy's cluster.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Static => ("STATIC", "STATIC"),
            Self::Dns => ("DNS", "STRICT_DNS"),
            Self::DnsRoundRobin => ("DNS_ROUND_ROBIN", "LOGICAL_DNS"),
        }
    }
}

/// Settings of `skysail bench dns`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DnsArgs {
    /// Sidecars of the control plane, and multiplier of the queries of one Envoy.
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    sidecars: u32,

    /// Number of names, each of a ServiceEntry.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    names: u32,

    /// Resolution of the ServiceEntries.
    #[arg(long, value_name = "RESOLUTION", value_enum, default_value_t = DnsResolution::Dns)]
    resolution: DnsResolution,

    /// TTL of the addresses, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    ttl: u32,

    /// Duration for which queries are counted, for each of the two.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    seconds: Duration,

    /// Program of Envoy. Default: ~/.cache/skysail/envoy-1.40.0/envoy, then PATH. Skipped if there is none.
    #[arg(long, value_name = "FILE", env = "SKYSAIL_ENVOY")]
    envoy: Option<PathBuf>,

    /// Count the queries of the control plane only.
    #[arg(long)]
    no_envoy: bool,

    /// Another build of skysail to measure instead of this one.
    #[arg(long, value_name = "FILE")]
    skysail: Option<PathBuf>,

    #[command(flatten)]
    shown: ResultArgs,
}

/// The result file; `docs/benchmarks.md` describes its format.
#[derive(Debug, Serialize)]
struct DnsReport {
    format: u32,
    benchmark: &'static str,
    version: &'static str,
    /// Seconds since 1970.
    started: u64,
    machine: Machine,
    settings: DnsSettings,
    /// Programs by peer.
    peers: BTreeMap<String, Program>,
    /// Queries of one control plane, for all sidecars.
    skysail: QueryCount,
    /// Queries of one Envoy; absent if Envoy is not installed.
    envoy: Option<QueryCount>,
    /// Queries of one Envoy times the number of sidecars.
    envoys_per_second: Option<f64>,
}

#[derive(Debug, Serialize)]
struct DnsSettings {
    sidecars: u32,
    names: u32,
    resolution: DnsResolution,
    ttl: u32,
}

/// Counted queries.
#[derive(Debug, Serialize)]
struct QueryCount {
    seconds: f64,
    /// Queries for IPv4 and for IPv6 addresses.
    v4: u64,
    v6: u64,
    per_second: f64,
}

impl DnsArgs {
    /// Parses the arguments of a scenario.
    ///
    /// # Errors
    /// An argument is unknown or out of bounds.
    pub(crate) fn parse(arguments: &str) -> Result<Self, String> {
        stage::parse_arguments(arguments)
    }

    /// Returns the programs to measure: that of the control plane, and Envoy if it is installed.
    fn programs(&self) -> anyhow::Result<Vec<(Peer, PathBuf)>> {
        let places = PeerPrograms { skysail: self.skysail.clone(), envoy: self.envoy.clone() };
        let usual = [Peer::Skysail, Peer::Envoy];
        Peer::choose(&[], if self.no_envoy { &usual[..1] } else { &usual }, &places)
    }

    /// Returns true if no argument is one that `bench run` sets.
    pub(crate) fn is_plain(&self) -> bool {
        self.skysail.is_none() && !self.no_envoy && self.shown.is_default()
    }
}

/// Measures, writes the result file and prints the result.
pub(crate) fn run(args: &DnsArgs) -> anyhow::Result<bool> {
    let file = args.shown.file("dns")?;
    control::raise_files()?;
    let machine = stage::enter_network();
    let folder =
        tempfile::Builder::new().prefix("skysail-bench-").tempdir().context("cannot make a folder")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(args, folder.path(), machine))?;
    args.shown.publish(file, &report, DnsReport::table)?;
    Ok(true)
}

async fn measure(args: &DnsArgs, folder: &Path, machine: Machine) -> anyhow::Result<DnsReport> {
    let peers = args.programs()?;
    let (server, questions) = server::start(args.ttl).context("cannot start a DNS server")?;
    let skysail = with_control_plane(args, folder, server, &questions).await?;
    stdio::print_error(format_args!(
        "{} sidecars, one control plane: {:.1} per second",
        args.sidecars, skysail.per_second
    ));
    let envoy = match peers.iter().find(|(peer, _)| *peer == Peer::Envoy) {
        Some((_, program)) => Some(with_envoy(args, program, folder, server, &questions).await?),
        None => None,
    };
    if let Some(envoy) = &envoy {
        stdio::print_error(format_args!("one Envoy: {:.1} per second", envoy.per_second));
    }
    Ok(DnsReport {
        format: 1,
        benchmark: "dns",
        version: env!("CARGO_PKG_VERSION"),
        started: stage::now(),
        machine,
        settings: DnsSettings {
            sidecars: args.sidecars,
            names: args.names,
            resolution: args.resolution,
            ttl: args.ttl,
        },
        peers: stage::versions(&peers),
        envoys_per_second: envoy.as_ref().map(|one| one.per_second * f64::from(args.sidecars)),
        skysail,
        envoy,
    })
}

/// Returns the host of a name.
fn host(name: u32) -> String {
    format!("name-{name}.example.com")
}

async fn with_control_plane(
    args: &DnsArgs,
    folder: &Path,
    server: SocketAddr,
    questions: &QueryCounter,
) -> anyhow::Result<QueryCount> {
    let (config, ca) = (folder.join("config"), folder.join("ca"));
    let _mesh = Mesh::write(Store::folder(&config)?, SERVICES, NAMESPACES, 1)?;
    let entries: String =
        (0..args.names).map(|name| format!("---\n{}\n", entry(name, args.resolution))).collect();
    fs::write(config.join("names.yaml"), entries).context("cannot write the ServiceEntries")?;
    certificates::of_control_plane(&ca, std::iter::empty(), "istiod.istio-system.svc")?;
    let dns = ["--dns-server".into(), server.to_string().into()];
    let control = Server::start(ServerArgs {
        skysail: args.skysail.as_deref(),
        tls: false,
        further: &dns,
        folder,
        source: Source::Folder(&config),
        ca: &ca,
    })
    .await?;
    let mut plan = Plan {
        form: Form::Delta,
        subscription: Subscription::Mesh,
        sidecars: usize::MAX,
        is_large: false,
        has_secrets: false,
        services: SERVICES,
        namespaces: NAMESPACES,
        used: SERVICES,
        uses_vhds: true,
        endpoint_names: Vec::new(),
        first_endpoints: HashSet::new(),
        route_names: Vec::new(),
    };
    learn(&mut plan, control.target, None, TIMEOUT)?;
    let mut fleet = Fleet::new(control.target, Vec::new(), &plan, 1)?;
    fleet.connect(0..args.sidecars as usize, AT_ONCE, TIMEOUT)?;
    fleet.rest(SETTLE)?;
    let before = questions.now();
    fleet.rest(args.seconds)?;
    let queries = QueryCount::of(before, questions.now(), args.seconds);
    control.running.stop().await;
    Ok(queries)
}

fn entry(name: u32, resolution: DnsResolution) -> Value {
    let mut entry = json!({
        "apiVersion": "networking.istio.io/v1", "kind": "ServiceEntry",
        "metadata": {"name": format!("name-{name}"), "namespace": "default"},
        "spec": {
            "hosts": [host(name)], "location": "MESH_EXTERNAL", "resolution": resolution.names().0,
            "ports": [{"number": 80, "name": "http", "protocol": "HTTP"}],
        },
    });
    if resolution == DnsResolution::Static {
        entry["spec"]["endpoints"] = json!([{ "address": ADDRESS }]);
    }
    entry
}

async fn with_envoy(
    args: &DnsArgs,
    program: &Path,
    folder: &Path,
    server: SocketAddr,
    questions: &QueryCounter,
) -> anyhow::Result<QueryCount> {
    let file = folder.join("envoy.json");
    let clusters: Vec<Value> = (0..args.names).map(|name| cluster(name, server, args.resolution)).collect();
    let bootstrap = json!({
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": ENVOY_ADMIN}}},
        "static_resources": {"clusters": clusters},
    });
    fs::write(&file, bootstrap.to_string()).context("cannot write Envoy's bootstrap file")?;
    let options = [
        "-c".into(),
        file.into_os_string(),
        "--concurrency".into(),
        "1".into(),
        "--use-dynamic-base-id".into(),
    ];
    let command: Vec<_> = std::iter::once(program.as_os_str().to_owned()).chain(options).collect();
    let scheduling = Scheduling::default();
    let mut envoy = Running::start("envoy", &command, folder, scheduling)?;
    envoy.ready(ENVOY_ADMIN).await?;
    tokio::time::sleep(SETTLE).await;
    let before = questions.now();
    tokio::time::sleep(args.seconds).await;
    let queries = QueryCount::of(before, questions.now(), args.seconds);
    envoy.stop().await;
    Ok(queries)
}

/// Returns the cluster as istiod sends it to a sidecar with IPv4, with the address of our DNS server.
fn cluster(name: u32, server: SocketAddr, resolution: DnsResolution) -> Value {
    let address = |host: &str, port: u16| json!({"socket_address": {"address": host, "port_value": port}});
    let (host, cluster) = (host(name), format!("outbound|80||{}", host(name)));
    let resolver = json!({
        "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
        "udp_max_queries": 100,
        "resolvers": [address(&server.ip().to_string(), server.port())],
    });
    let is_static = resolution == DnsResolution::Static;
    let mut made = json!({
        "name": cluster, "type": resolution.names().1, "connect_timeout": "10s", "lb_policy": "LEAST_REQUEST",
        "load_assignment": {
            "cluster_name": cluster,
            "endpoints": [{"lb_endpoints": [{
                "endpoint": {"address": address(if is_static { ADDRESS } else { &host }, 80)},
            }]}],
        },
    });
    if !is_static {
        made["dns_refresh_rate"] = json!("60s");
        made["dns_jitter"] = json!("0.100s");
        made["respect_dns_ttl"] = json!(true);
        made["dns_lookup_family"] = json!("V4_ONLY");
        made["typed_dns_resolver_config"] =
            json!({"name": "envoy.network.dns_resolver.cares", "typed_config": resolver});
    }
    made
}

impl QueryCount {
    fn of(before: [u64; 2], after: [u64; 2], time: Duration) -> Self {
        let [v4, v6] = [after[0] - before[0], after[1] - before[1]];
        let seconds = time.as_secs_f64();
        Self { seconds, v4, v6, per_second: (v4 + v6) as f64 / seconds }
    }
}

impl DnsReport {
    fn table(&self) -> String {
        let Self { settings, skysail, .. } = self;
        let sidecars = settings.sidecars;
        let row = |what: String, queries: &QueryCount, per_second: f64| {
            let counted = format!("{} A and {} AAAA in {:.0} s", queries.v4, queries.v6, queries.seconds);
            vec![what, format!("{per_second:.1} ({counted})")]
        };
        let mut rows = vec![row(format!("skysaild, for {sidecars} sidecars"), skysail, skysail.per_second)];
        if let Some(envoy) = &self.envoy {
            rows.push(row("one Envoy".to_owned(), envoy, envoy.per_second));
        }
        if let Some(all) = self.envoys_per_second {
            rows.push(vec![format!("one Envoy times {sidecars} sidecars"), format!("{all:.0}")]);
        }
        let head = ["DNS queries per second", "measured"].map(str::to_owned);
        layout::tables(2, &head, &rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_are_resolved_have_settings_of_dns() {
        let server = SocketAddr::from(([127, 0, 0, 1], 53));
        for (resolution, of_entry, of_cluster) in [
            (DnsResolution::Static, "STATIC", "STATIC"),
            (DnsResolution::Dns, "DNS", "STRICT_DNS"),
            (DnsResolution::DnsRoundRobin, "DNS_ROUND_ROBIN", "LOGICAL_DNS"),
        ] {
            let (entry, cluster) = (entry(1, resolution), cluster(1, server, resolution));
            assert_eq!(
                (&entry["spec"]["resolution"], &cluster["type"]),
                (&json!(of_entry), &json!(of_cluster))
            );
            let is_static = resolution == DnsResolution::Static;
            assert_eq!(entry["spec"]["endpoints"].is_array(), is_static, "{entry}");
            assert_eq!(cluster["dns_refresh_rate"].is_null(), is_static, "{cluster}");
        }
    }

    #[test]
    fn the_table_fits_a_terminal() {
        let queries = |v4| QueryCount { seconds: 3_600.0, v4, v6: v4, per_second: v4 as f64 / 1_800.0 };
        let report = DnsReport {
            format: 1,
            benchmark: "dns",
            version: "0",
            started: 0,
            machine: stage::machine(None, &Ok(()), None),
            settings: DnsSettings {
                sidecars: 10_000,
                names: 1_000,
                resolution: DnsResolution::DnsRoundRobin,
                ttl: 5,
            },
            peers: BTreeMap::new(),
            skysail: queries(720_000),
            envoy: Some(queries(7_200_000)),
            envoys_per_second: Some(80_000_000.0),
        };
        let text = report.table();
        layout::assert_fits(&text);
        assert!(text.contains("| skysaild, for 10000 sidecars "), "{text}");
        assert!(text.contains("| 400.0 (720000 A and 720000 AAAA in 3600 s) "), "{text}");
        assert!(text.contains("| 80000000 "), "{text}");
    }
}
