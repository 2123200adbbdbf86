//! `skysail bench gateway`: measures a gateway with many hosts, each with a certificate of its own.
//!
//! [`config`] writes the Gateways, Secrets and VirtualServices. A control plane serves them to one gateway, which is
//! `skysail-proxy` or an Envoy with the same node, identity and certificates. [`client`] opens TLS connections by host
//! name until the gateway answers with the certificate that is expected.

mod client;
mod config;

use std::{
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde::Serialize;
use serde_json::json;
use skysail_core::{names::TOKEN_AUDIENCE, stdio};
use skysail_identity::TokenSigner;

use self::{client::HttpsClient, config::Hosts};
use crate::{
    accounting, certificates,
    child::{Running, Scheduling},
    control::{self, Server, ServerArgs, Source},
    layout, peers,
    report::Machine,
    results::ResultArgs,
    stage,
};

/// Timeout of each step.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Pause between two attempts to reach a host.
const POLL: Duration = Duration::from_millis(2);
/// Pause after the start, before memory is measured.
const SETTLE: Duration = Duration::from_secs(2);
/// Pause after a change, until both processes have finished the work that the change causes.
const AFTER_EFFECTS: Duration = Duration::from_millis(500);
/// Number of hosts whose answer ends the start.
const SAMPLE: usize = 20;
/// Namespace of the gateway, and name of its pod.
const NAMESPACE: &str = "edge";
const POD: &str = "gateway-0";

/// Settings of `skysail bench gateway`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GatewayArgs {
    /// Number of hosts.
    #[arg(long, value_name = "N", default_value_t = 5_000, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    hosts: u32,

    /// Hosts per Gateway object.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    hosts_per_gateway: u32,

    /// Number of times that each change is made in each turn.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,

    /// Number of turns of each proxy.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Program of Envoy. Default: ~/.cache/skysail/envoy-1.40.0/envoy, then PATH. Skipped if there is none.
    #[arg(long, value_name = "FILE", env = "SKYSAIL_ENVOY")]
    envoy: Option<PathBuf>,

    /// Another build of skysail to measure instead of this one.
    #[arg(long, value_name = "FILE")]
    skysail: Option<PathBuf>,

    #[command(flatten)]
    shown: ResultArgs,
}

/// The result file; `docs/benchmarks.md` describes its format.
#[derive(Debug, Serialize)]
struct GatewayReport {
    format: u32,
    benchmark: &'static str,
    version: &'static str,
    /// Seconds since 1970.
    started: u64,
    machine: Machine,
    settings: GatewaySettings,
    turns: Vec<Turn>,
}

#[derive(Debug, Serialize)]
struct GatewaySettings {
    hosts: u32,
    hosts_per_gateway: u32,
    repeat: u32,
}

/// The proxy of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Proxy {
    Skysail,
    Envoy,
}

/// A change of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum GatewayChange {
    /// The Secret of a host gets another certificate.
    Certificate,
    /// A host is added: Gateway, Secret and VirtualService.
    Host,
}

/// Result of a turn.
#[derive(Debug, Serialize)]
struct Turn {
    proxy: Proxy,
    round: u32,
    /// Seconds from the start of the proxy until it serves a sample of the hosts, the first and the last among them.
    start_seconds: f64,
    /// CPU seconds of the proxy and of the control plane until then and for the pause that follows.
    start_cpu_seconds: f64,
    control_cpu_seconds: f64,
    /// Resident megabytes of the proxy and of the control plane.
    resident_mb: f64,
    control_mb: f64,
    changes: Vec<GatewayChangeResult>,
}

/// Result of a change, as medians of its repetitions.
#[derive(Debug, Serialize)]
struct GatewayChangeResult {
    change: GatewayChange,
    /// Milliseconds until a handshake shows the change.
    ms: f64,
    /// CPU milliseconds of the proxy and of the control plane.
    cpu_ms: f64,
    control_cpu_ms: f64,
}

/// Measures, writes the result file and prints the result.
pub(crate) fn run(args: &GatewayArgs) -> anyhow::Result<bool> {
    let file = args.shown.file("gateway")?;
    control::raise_files()?;
    let machine = stage::enter_network();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(args, machine))?;
    args.shown.publish(file, &report, GatewayReport::table)?;
    Ok(true)
}

async fn measure(args: &GatewayArgs, machine: Machine) -> anyhow::Result<GatewayReport> {
    let envoy = args.envoy.clone().or_else(peers::installed_envoy);
    if envoy.is_none() {
        stdio::print_error(format_args!("Envoy is not installed: give its program with --envoy FILE"));
    }
    let started = stage::now();
    let mut turns = Vec::new();
    for round in 0..args.rounds {
        for (proxy, envoy) in [(Proxy::Skysail, None), (Proxy::Envoy, envoy.as_deref())] {
            if proxy == Proxy::Envoy && envoy.is_none() {
                continue;
            }
            let result = turn(args, proxy, envoy, round).await.with_context(|| proxy.to_string())?;
            stdio::print_error(format_args!(
                "{proxy}: {} hosts after {:.2} s, {:.2} s of CPU, {:.0} MB",
                args.hosts, result.start_seconds, result.start_cpu_seconds, result.resident_mb
            ));
            turns.push(result);
        }
    }
    Ok(GatewayReport {
        format: 1,
        benchmark: "gateway",
        version: env!("CARGO_PKG_VERSION"),
        started,
        machine,
        settings: GatewaySettings {
            hosts: args.hosts,
            hosts_per_gateway: args.hosts_per_gateway,
            repeat: args.repeat,
        },
        turns,
    })
}

async fn turn(args: &GatewayArgs, proxy: Proxy, envoy: Option<&Path>, round: u32) -> anyhow::Result<Turn> {
    let folder =
        tempfile::Builder::new().prefix("skysail-bench-").tempdir().context("cannot make a folder")?;
    let folder = folder.path();
    let (config, ca) = (folder.join("config"), folder.join("ca"));
    let mut hosts = Hosts::write(&config, args.hosts as usize, args.hosts_per_gateway as usize)?;
    certificates::of_control_plane(&ca, std::iter::empty(), "istiod.istio-system.svc")?;
    let signer = TokenSigner::new().context("cannot make a key for tokens")?;
    let (key, token) = (folder.join("token-key.pem"), folder.join("token"));
    std::fs::write(&key, signer.public_key()).context("cannot write the key for tokens")?;
    std::fs::write(&token, signer.token(NAMESPACE, "default", POD, TOKEN_AUDIENCE)?)
        .context("cannot write the token")?;
    let further = ["--token-key".into(), key.into_os_string()];
    let control = Server::start(ServerArgs {
        skysail: args.skysail.as_deref(),
        tls: true,
        further: &further,
        folder,
        source: Source::Folder(&config),
        ca: &ca,
    })
    .await?;

    let mut client = HttpsClient::new(hosts.authority.der())?;
    let (cpu, start) = (control.cpu()?, Instant::now());
    let gateway = Gateway::start(args, folder, &ca, control.target.port(), envoy)?;
    let last = hosts.certificates.len() - 1;
    for number in (0..SAMPLE).map(|step| last * step / (SAMPLE - 1)) {
        client.wait(&config::host(number), &hosts.certificates[number], &gateway.running).await?;
    }
    let start_seconds = start.elapsed().as_secs_f64();
    tokio::time::sleep(SETTLE).await;
    let mut result = Turn {
        proxy,
        round,
        start_seconds,
        start_cpu_seconds: gateway.cpu()? as f64 / 1e9,
        control_cpu_seconds: (control.cpu()? - cpu) as f64 / 1e9,
        resident_mb: gateway.resident(),
        control_mb: control.resident(),
        changes: Vec::new(),
    };
    for change in [GatewayChange::Certificate, GatewayChange::Host] {
        let measured = repeat(args, change, &mut hosts, &mut client, &gateway, &control).await?;
        result.changes.push(measured);
    }
    gateway.running.stop().await;
    control.running.stop().await;
    Ok(result)
}

async fn repeat(
    args: &GatewayArgs,
    change: GatewayChange,
    hosts: &mut Hosts,
    client: &mut HttpsClient,
    gateway: &Gateway,
    control: &Server,
) -> anyhow::Result<GatewayChangeResult> {
    let (mut took, mut cpu, mut control_cpu) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.repeat {
        let (before, control_before) = (gateway.cpu()?, control.cpu()?);
        let prepared = match change {
            GatewayChange::Certificate => hosts.prepare_certificate()?,
            GatewayChange::Host => hosts.prepare_host()?,
        };
        let start = Instant::now();
        let number = hosts.apply(prepared)?;
        client.wait(&config::host(number), &hosts.certificates[number], &gateway.running).await?;
        took.push(start.elapsed().as_secs_f64() * 1e3);
        tokio::time::sleep(AFTER_EFFECTS).await;
        cpu.push((gateway.cpu()? - before) as f64 / 1e6);
        control_cpu.push((control.cpu()? - control_before) as f64 / 1e6);
    }
    Ok(GatewayChangeResult {
        change,
        ms: median(took),
        cpu_ms: median(cpu),
        control_cpu_ms: median(control_cpu),
    })
}

/// The gateway under measurement.
struct Gateway {
    running: Running,
    /// True if the process itself is only the parent that starts Envoy and gets its certificate.
    is_parent: bool,
}

impl Gateway {
    fn start(
        args: &GatewayArgs,
        folder: &Path,
        ca: &Path,
        port: u16,
        envoy: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let program =
            args.skysail.as_deref().map_or_else(std::env::current_exe, |path| Ok(path.to_owned()))?;
        let node = folder.join("node.json");
        std::fs::write(&node, node_of_gateway()).context("cannot write the node")?;
        let mut command: Vec<OsString> = vec![program.into_os_string(), "proxy".into()];
        for (option, value) in [
            ("--discovery", format!("127.0.0.1:{port}").into()),
            ("--ca-root", ca.join("root-cert.pem").into_os_string()),
            ("--token", folder.join("token").into_os_string()),
            ("--node", node.into_os_string()),
            ("--concurrency", "1".into()),
        ] {
            command.extend([OsString::from(option), value]);
        }
        if let Some(envoy) = envoy {
            command.extend(["--envoy".into(), envoy.as_os_str().to_owned()]);
        }
        let scheduling = Scheduling::default();
        let running = Running::start("gateway", &command, folder, scheduling)?;
        Ok(Self { running, is_parent: envoy.is_some() })
    }

    /// Returns the processes that count. The parent of Envoy does not: the measured proxy is Envoy alone.
    fn processes(&self) -> Vec<i32> {
        let mut family = accounting::family(self.running.pid());
        if self.is_parent {
            family.remove(0);
        }
        family
    }

    fn cpu(&self) -> anyhow::Result<u64> {
        Ok(accounting::cpu(&self.processes())?.nanoseconds)
    }

    fn resident(&self) -> f64 {
        accounting::resident(&self.processes()) as f64 / 1_024.0
    }
}

/// Returns the node of the gateway as Istio's agent describes it.
fn node_of_gateway() -> String {
    json!({
        "id": format!("router~10.0.0.1~{POD}.{NAMESPACE}~{NAMESPACE}.svc.cluster.local"),
        "cluster": format!("gateway.{NAMESPACE}"),
        "metadata": {
            "CLUSTER_ID": "Kubernetes",
            "INSTANCE_IPS": "10.0.0.1",
            "ISTIO_VERSION": "1.32.0",
            "LABELS": {"istio": "edge"},
            "MESH_ID": "cluster.local",
            "NAME": POD,
            "NAMESPACE": NAMESPACE,
            "SERVICE_ACCOUNT": "default",
            "WORKLOAD_NAME": "gateway",
        },
    })
    .to_string()
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Skysail => "skysail-proxy",
            Self::Envoy => "Envoy",
        })
    }
}

impl GatewayReport {
    fn table(&self) -> String {
        let of = |proxy| self.turns.iter().filter(move |turn| turn.proxy == proxy);
        let proxies: Vec<Proxy> =
            [Proxy::Skysail, Proxy::Envoy].into_iter().filter(|proxy| of(*proxy).next().is_some()).collect();
        let row = |what: &str, digits: usize, value: &dyn Fn(&Turn) -> f64| {
            let cells =
                proxies.iter().map(|proxy| format!("{:.digits$}", median(of(*proxy).map(value).collect())));
            std::iter::once(what.to_owned()).chain(cells).collect::<Vec<_>>()
        };
        let mut rows = vec![
            row("start until all hosts are served, s", 2, &|turn| turn.start_seconds),
            row("CPU of the start, s", 2, &|turn| turn.start_cpu_seconds),
            row("CPU of the control plane for the start, s", 2, &|turn| turn.control_cpu_seconds),
            row("resident memory, MB", 0, &|turn| turn.resident_mb),
            row("resident memory of the control plane, MB", 0, &|turn| turn.control_mb),
        ];
        for (number, what) in ["another certificate", "one more host"].into_iter().enumerate() {
            rows.extend([
                row(&format!("{what}: until a handshake shows it, ms"), 1, &|turn| turn.changes[number].ms),
                row(&format!("{what}: CPU, ms"), 1, &|turn| turn.changes[number].cpu_ms),
                row(&format!("{what}: CPU of the control plane, ms"), 1, &|turn| {
                    turn.changes[number].control_cpu_ms
                }),
            ]);
        }
        let head: Vec<String> = std::iter::once(format!("gateway with {} hosts", self.settings.hosts))
            .chain(proxies.iter().map(ToString::to_string))
            .collect();
        let note = layout::paragraph(
            "Medians of the turns. Each host has a certificate, a server of a Gateway and a VirtualService. The \
             figures of the control plane stand under the proxy that it serves.",
        );
        format!("{}\n\n{note}", layout::tables(1, &head, &rows))
    }
}

/// Returns the median, 0 of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_fits_a_terminal() {
        let turn = |proxy, start_seconds| Turn {
            proxy,
            round: 0,
            start_seconds,
            start_cpu_seconds: 1_234.5,
            control_cpu_seconds: 1_234.5,
            resident_mb: 12_345.0,
            control_mb: 12_345.0,
            changes: [GatewayChange::Certificate, GatewayChange::Host]
                .map(|change| GatewayChangeResult {
                    change,
                    ms: 12_345.6,
                    cpu_ms: 12_345.6,
                    control_cpu_ms: 12_345.6,
                })
                .into(),
        };
        let report = GatewayReport {
            format: 1,
            benchmark: "gateway",
            version: "0",
            started: 0,
            machine: stage::machine(None, &Ok(()), None),
            settings: GatewaySettings { hosts: 50_000, hosts_per_gateway: 100, repeat: 10 },
            turns: vec![
                turn(Proxy::Skysail, 3.0),
                turn(Proxy::Envoy, 9.0),
                turn(Proxy::Skysail, 1.0),
                turn(Proxy::Skysail, 2.0),
            ],
        };
        let text = report.table();
        layout::assert_fits(&text);
        let first = text.lines().find(|line| line.contains("until all hosts")).unwrap();
        assert!(first.contains(" 2.00 ") && first.contains(" 9.00 "), "{text}");
    }
}
