//! One turn: starts a server and the sidecars in front of it, applies the load, measures its cost, and ends the
//! processes.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    net::{Ipv4Addr, SocketAddr},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use hdrhistogram::Histogram;
use nix::sched::CpuSet;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{
    access_log::{AccessLog, SidecarLog, StartedLog},
    accounting::{self, Cpu, Memory, Ticks},
    certificates::Certificates,
    child::{Running, Scheduling, Streams},
    clock, cpus,
    load::{self, Load, LoadOutcome, Traffic, WindowBoundary},
    namespace::free_ports,
    node::{AUTHORIZER, Extra, Node, Protocol, Role},
    peers::Peer,
    percentiles,
    perf::PerfRecording,
    stream::Tls,
    tls,
};

/// Topology between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Topology {
    /// No sidecar.
    Baseline,
    /// The client's sidecar, which sends plain HTTP to the server.
    ClientSidecar,
    /// The server's sidecar; the client sends plain HTTP to it.
    ServerSidecar,
    /// The server's sidecar; the client uses mutual TLS itself.
    ServerMtls,
    /// The sidecars of client and server, with mutual TLS between them.
    BothSidecars,
    /// A gateway, to which the client sends plain HTTP, and the server's sidecar, with mutual TLS between them.
    Ingress,
}

impl Topology {
    pub(crate) const ALL: [Self; 6] = [
        Self::Baseline,
        Self::ClientSidecar,
        Self::ServerSidecar,
        Self::ServerMtls,
        Self::BothSidecars,
        Self::Ingress,
    ];

    /// Returns the name on the command line and in result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Baseline => "baseline",
            Self::ClientSidecar => "client-sidecar",
            Self::ServerSidecar => "server-sidecar",
            Self::ServerMtls => "server-mtls",
            Self::BothSidecars => "both-sidecars",
            Self::Ingress => "ingress",
        }
    }

    /// Returns true if sidecars use mutual TLS.
    fn has_mtls(self) -> bool {
        matches!(self, Self::ServerMtls | Self::BothSidecars | Self::Ingress)
    }

    /// Returns the sidecars in the order in which requests pass them.
    fn sidecars(self) -> &'static [Role] {
        match self {
            Self::Baseline => &[],
            Self::ClientSidecar => &[Role::Client],
            Self::ServerSidecar | Self::ServerMtls => &[Role::Server],
            Self::BothSidecars => &[Role::Client, Role::Server],
            Self::Ingress => &[Role::Gateway, Role::Server],
        }
    }
}

/// Network of a side: its address, and its namespace.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    /// Address at which the other side reaches it.
    pub(crate) address: Ipv4Addr,
    /// That of the benchmark if `None`.
    pub(crate) namespace: Option<Arc<OwnedFd>>,
}

impl Default for Host {
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST, namespace: None }
    }
}

/// Networks of client and server, each with its sidecar. Default: all on the loopback of the benchmark.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostPair {
    pub(crate) client: Host,
    pub(crate) server: Host,
    /// Network namespaces between them, which exist as long as this value.
    pub(crate) _nodes: Vec<Arc<OwnedFd>>,
}

/// Settings that all turns share.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// This program, which is also the server.
    pub(crate) executable: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) certificates: Certificates,
    /// Use real-time scheduling.
    pub(crate) realtime: bool,
    /// Program and arguments under which the sidecar nearest to the client runs; empty for none.
    pub(crate) under: Vec<OsString>,
    pub(crate) hosts: HostPair,
    /// Start of the names of files for flame graphs of the sidecars, if there are to be any.
    pub(crate) perf: Option<PathBuf>,
}

/// Settings of a turn.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) topology: Topology,
    pub(crate) protocol: Protocol,
    /// Worker threads or processes of each sidecar.
    pub(crate) workers: u32,
    /// The sidecars have one CPU, client and server the others.
    pub(crate) pinned: bool,
    /// The server shares the sidecars' CPU, so that the client has the others alone.
    pub(crate) client_alone: bool,
    /// The sidecars allow clients to resume TLS sessions, where the peer has such a setting.
    pub(crate) resumption: bool,
    /// Clusters in the configuration of a sidecar.
    pub(crate) clusters: u16,
    /// Configuration of the sidecars beyond the usual one.
    pub(crate) extra: Extra,
    /// Connections that a sidecar must be able to hold.
    pub(crate) connections: usize,
    /// Access log of each sidecar.
    pub(crate) access_log: AccessLog,
}

/// Latencies of a turn in microseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Latencies {
    pub(crate) mean: f64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) p99_9: f64,
    pub(crate) max: f64,
}

/// Cost of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) cpu_us_per_request: f64,
    /// CPU time in user mode; the rest of `cpu_us_per_request` is in the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_user_us_per_request: Option<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(crate) memory: Option<Memory>,
}

/// Measurements of a turn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Measurement {
    /// Requests due in the window.
    pub(crate) requests: u64,
    pub(crate) unanswered: u64,
    pub(crate) refused: u64,
    /// Requests on a connection that resumed an earlier TLS session.
    #[serde(default)]
    pub(crate) resumed: u64,
    pub(crate) answers_per_second: f64,
    /// Latency from the due time of a request.
    pub(crate) latency_us: Latencies,
    /// Latency from the time a request was sent.
    pub(crate) latency_since_sent_us: Latencies,
    /// Cost by process: client, server, client-proxy, gateway-proxy, server-proxy, authorizer.
    pub(crate) parts: BTreeMap<String, Cost>,
    /// Number of CPUs used by work outside of the benchmark.
    pub(crate) other_cpus: f64,
    /// Number of CPUs that the hypervisor gave to other machines.
    pub(crate) stolen_cpus: f64,
    /// P99 of the delay between the due time of a request and the time at which the generator took it up. Absent
    /// without a schedule, and in results of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) generator_late_p99_us: Option<f64>,
    /// Number of entries in the access log of each sidecar, warm-up included.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) log_entries: BTreeMap<String, u64>,
}

impl Measurement {
    /// Returns the number of requests with a latency.
    pub(crate) fn answered(&self) -> u64 {
        self.requests.saturating_sub(self.unanswered + self.refused)
    }

    /// Returns the most important figures, for a line of progress.
    pub(crate) fn short(&self) -> String {
        let latency = &self.latency_us;
        let shown = |metric: &str, value: f64| percentiles::shown(metric, value, self.answered());
        let costs = self.parts.iter().map(|(part, cost)| format!("{part} {:.1}", cost.cpu_us_per_request));
        let costs: Vec<String> = costs.collect();
        format!(
            "P50 {} P99 {} P99.9 {} µs; CPU µs/request {}; others' CPUs {:.2}",
            shown("p50", latency.p50),
            shown("p99", latency.p99),
            shown("p99_9", latency.p99_9),
            costs.join(", "),
            self.other_cpus
        )
    }
}

/// Share of failed requests above which a turn fails.
const MAX_LOST_SHARE: f64 = 0.01;
/// Pause for the sidecars to end their start-up work.
const SETTLE: Duration = Duration::from_millis(300);

/// Runs one turn. `peer` is the proxy and its program; a topology without sidecars needs none.
pub(crate) async fn measure(
    setup: &Setup,
    shape: Shape,
    peer: Option<(Peer, &Path)>,
    load: Load,
) -> anyhow::Result<Measurement> {
    let resume = load.traffic == Traffic::NewConnections { resume: true };
    let mut standing = RunningTopology::start(setup, &shape, peer).await?;
    tokio::time::sleep(SETTLE).await;
    let load = Load { target: standing.entry, tls: standing.tls(setup, resume)?, ..load };
    let recording = setup.perf.as_ref().map(|_| PerfRecording::start(&standing.sidecars(), &setup.folder));
    let recording = recording.transpose()?;
    let mut measured = match observe(load, &standing).await {
        Ok(measurement) => standing.with_log_entries(measurement).await,
        Err(error) => Err(error),
    };
    if let (Some(recording), Some(prefix)) = (recording, &setup.perf) {
        let title = prefix.file_name().unwrap_or_default().to_string_lossy();
        let drawn = recording.finish(prefix, &title).await;
        measured = measured.and_then(|measurement| drawn.map(|()| measurement));
    }
    standing.end(measured).await
}

/// A running server and the sidecars in front of it.
pub(crate) struct RunningTopology {
    /// The server, the authorizer, then the sidecars from the server to the client, each after its collector.
    parts: Vec<Running>,
    logs: Vec<SidecarLog>,
    /// Address to which the client connects.
    pub(crate) entry: SocketAddr,
    /// Scheduling and network of the client.
    scheduling: Scheduling,
    shape: Shape,
}

impl RunningTopology {
    /// Starts server and sidecars, and waits until all listen.
    pub(crate) async fn start(
        setup: &Setup,
        shape: &Shape,
        peer: Option<(Peer, &Path)>,
    ) -> anyhow::Result<Self> {
        let (proxies, ends) =
            if shape.pinned { cpus::split().map(|(a, b)| (Some(a), Some(b)))? } else { (None, None) };
        let HostPair { client, server, .. } = &setup.hosts;
        let on = |host: &Host, first: bool, cpus: Option<CpuSet>| Scheduling {
            realtime: setup.realtime,
            first,
            cpus,
            network: host.namespace.clone(),
        };
        let beside = if shape.client_alone { on(server, true, proxies) } else { on(server, false, ends) };
        let ports = free_ports::<8>()?;
        let sidecars = shape.topology.sidecars();
        // What has no sidecar in front of it is reached at the address of its host.
        let is_behind = sidecars.contains(&Role::Server);
        let mut upstream =
            SocketAddr::from((if is_behind { Ipv4Addr::LOCALHOST } else { server.address }, ports[0]));
        let authorizer = matches!(shape.extra, Extra::Authorizer).then_some(ports[7]);
        let mut parts = vec![start_server("server", setup, shape.protocol, beside.clone(), upstream).await?];
        if let Some(port) = authorizer {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            parts.push(start_server(AUTHORIZER, setup, Protocol::Http1, beside, address).await?);
        }
        let mut logs = Vec::new();
        for (index, role) in sidecars.iter().rev().enumerate() {
            let Some((peer, program)) = peer else { bail!("{} needs a peer", shape.topology.name()) };
            let name = format!("{}-proxy", role.name());
            let (host, address) = match role {
                Role::Client | Role::Gateway => (client, Ipv4Addr::LOCALHOST),
                Role::Server => (server, server.address),
            };
            let scheduling = on(host, false, proxies);
            let StartedLog { log, stdout, collector } = SidecarLog::start(
                shape.access_log,
                &name,
                ports[5 + index],
                (&setup.executable, &setup.folder),
                scheduling.clone(),
            )
            .await?;
            parts.extend(collector);
            let access_log = log.as_ref().map(SidecarLog::destination);
            logs.extend(log);
            let node = Node {
                role: *role,
                listen: (address, ports[1 + 2 * index]).into(),
                upstream,
                admin: ports[2 + 2 * index],
                mtls: shape.topology.has_mtls(),
                protocol: shape.protocol,
                workers: shape.workers,
                resumption: shape.resumption,
                clusters: shape.clusters,
                extra: &shape.extra,
                connections: shape.connections,
                authorizer,
                access_log,
                certificates: &setup.certificates,
                folder: &setup.folder,
            };
            let mut command = peer.command(program, &node)?;
            if index + 1 == sidecars.len() && !setup.under.is_empty() {
                command.splice(..0, setup.under.iter().cloned());
                // The filter would refuse what valgrind does: other system calls, and code in writable memory.
                command.push("--no-seccomp".into());
            }
            let streams = Streams { stdin: None, stdout };
            let mut proxy = Running::start_with(&name, &command, &setup.folder, scheduling, streams)?;
            proxy.ready(node.listen.port()).await?;
            upstream = node.listen;
            parts.push(proxy);
        }
        let scheduling = on(client, false, ends);
        Ok(Self { parts, logs, entry: upstream, scheduling, shape: shape.clone() })
    }

    /// Returns the names and processes of the sidecars.
    fn sidecars(&self) -> Vec<(&str, Vec<i32>)> {
        let sidecars = self.parts.iter().filter(|part| part.name.ends_with("-proxy"));
        sidecars.map(|part| (part.name.as_str(), accounting::family(part.pid()))).collect()
    }

    /// Returns the TLS settings of the client, if it uses TLS.
    pub(crate) fn tls(&self, setup: &Setup, resume: bool) -> anyhow::Result<Option<Tls>> {
        let wanted = self.shape.topology == Topology::ServerMtls;
        wanted.then(|| tls::mesh(&setup.certificates, b"http/1.1", resume)).transpose()
    }

    /// Runs a client on its own thread, with the scheduling of clients.
    pub(crate) async fn client<T: Send + 'static>(
        &self,
        run: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let scheduling = self.scheduling.clone();
        let (done, result) = tokio::sync::oneshot::channel();
        std::thread::Builder::new().name("load".to_owned()).spawn(move || {
            // The receiver is gone if the benchmark is being ended.
            let _ = done.send(scheduling.apply().map_err(anyhow::Error::from).and_then(|()| run()));
        })?;
        result.await.context("the load generator failed")?
    }

    /// Returns the memory of the process to which the client connects.
    pub(crate) fn memory(&self) -> Memory {
        let entry = self.parts.last().map(|part| accounting::family(part.pid()));
        entry.map(|pids| accounting::memory(&pids)).unwrap_or_default()
    }

    /// Returns the resident memory of the process to which the client connects, in kilobytes, at little cost.
    pub(crate) fn resident(&self) -> u64 {
        self.parts.last().map_or(0, |part| accounting::resident(&accounting::family(part.pid())))
    }

    /// Waits until each access log has an entry for each of these responses, and adds the numbers of entries to a
    /// measurement.
    async fn with_log_entries(
        &mut self,
        (mut measurement, responses): (Measurement, u64),
    ) -> anyhow::Result<Measurement> {
        for log in &mut self.logs {
            let entries = log.wait_for(responses).await?;
            measurement.log_entries.extend([entries]);
        }
        Ok(measurement)
    }

    /// Ends all processes. Adds the output of the process to which the client connects to an error.
    pub(crate) async fn end<T>(self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        let result = result.map_err(|error| match self.parts.last() {
            Some(entry) => error.context(format!("{} wrote: {}", entry.name, entry.output_tail())),
            None => error,
        });
        for part in self.parts.into_iter().rev() {
            part.stop().await;
        }
        result
    }
}

/// Starts a server of requests: that of the topology, or one that answers all requests of an authorization with 200.
async fn start_server(
    name: &str,
    setup: &Setup,
    protocol: Protocol,
    scheduling: Scheduling,
    address: SocketAddr,
) -> anyhow::Result<Running> {
    let mut command = vec![setup.executable.clone().into_os_string()];
    command.extend(["bench", "serve", "--protocol", protocol.name(), "--listen"].map(OsString::from));
    command.push(address.to_string().into());
    let mut server = Running::start(name, &command, &setup.folder, scheduling)?;
    server.ready(address.port()).await?;
    Ok(server)
}

/// State of all processes at one time.
struct Sample {
    at: u64,
    cpu: Vec<Cpu>,
    client: u64,
    ticks: Ticks,
}

/// Returns the measurement, and the number of responses from the start of the warm-up on.
async fn observe(load: Load, standing: &RunningTopology) -> anyhow::Result<(Measurement, u64)> {
    let parts = &standing.parts;
    let families: Vec<Vec<i32>> = parts.iter().map(|part| accounting::family(part.pid())).collect();
    let sample = |client: u64| -> anyhow::Result<Sample> {
        let cpu: anyhow::Result<Vec<Cpu>> = families.iter().map(|pids| accounting::cpu(pids)).collect();
        Ok(Sample { at: clock::now(), cpu: cpu?, client, ticks: accounting::ticks() })
    };
    let (sender, mut moments) = mpsc::unbounded_channel();
    let scheduling = standing.scheduling.clone();
    let driver = std::thread::Builder::new().name("load".to_owned()).spawn(move || {
        scheduling.apply()?;
        load::drive(&load, |moment| {
            // The receiver is gone if the benchmark is being ended.
            let _ = sender.send((moment, clock::thread_cpu()));
        })
    })?;
    let (mut begin, mut end, mut memory) = (None, None, Vec::new());
    while let Some((moment, client)) = moments.recv().await {
        match moment {
            WindowBoundary::Begin => begin = Some(sample(client)?),
            WindowBoundary::End => {
                end = Some(sample(client)?);
                memory = families.iter().map(|pids| accounting::memory(pids)).collect();
            }
        }
    }
    let outcome = driver.join().map_err(|_| anyhow::anyhow!("the load generator failed"))??;
    let (Some(begin), Some(end)) = (begin, end) else { bail!("the load generator ended early") };
    let failed = outcome.unanswered + outcome.refused;
    if failed as f64 > MAX_LOST_SHARE * outcome.requests as f64 {
        bail!(
            "of {} requests, {} got no response and {} a status other than 200",
            outcome.requests,
            outcome.unanswered,
            outcome.refused
        );
    }
    // Costs are for each response, so without one there is nothing to report.
    ensure!(outcome.answered_in_window > 0, "no response arrived in the measured time");
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    Ok((summarize(&outcome, &begin, &end, &names, &memory), outcome.answered))
}

fn summarize(
    outcome: &LoadOutcome,
    begin: &Sample,
    end: &Sample,
    names: &[&str],
    memory: &[Memory],
) -> Measurement {
    let seconds = (end.at - begin.at) as f64 / 1e9;
    let answers = outcome.answered_in_window as f64;
    let mut parts = BTreeMap::new();
    let client = end.client.saturating_sub(begin.client);
    parts.insert(
        "client".to_owned(),
        Cost {
            cpu_us_per_request: client as f64 / 1e3 / answers,
            cpu_user_us_per_request: None,
            memory: None,
        },
    );
    let mut ours = client;
    for (index, name) in names.iter().enumerate() {
        let used = end.cpu[index].since(begin.cpu[index]);
        ours += used.nanoseconds;
        let each = used.nanoseconds as f64 / 1e3 / answers;
        let cost = Cost {
            cpu_us_per_request: each,
            cpu_user_us_per_request: used.user_share().map(|share| each * share),
            memory: memory.get(index).copied(),
        };
        parts.insert((*name).to_owned(), cost);
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let (busy, stolen) = end.ticks.busy_since(begin.ticks, cpus);
    Measurement {
        requests: outcome.requests,
        unanswered: outcome.unanswered,
        refused: outcome.refused,
        resumed: outcome.resumed,
        answers_per_second: outcome.answered_in_window as f64 / seconds,
        latency_us: latencies(&outcome.due),
        latency_since_sent_us: latencies(&outcome.sent),
        parts,
        other_cpus: (busy - ours as f64 / 1e9 / seconds).max(0.0),
        stolen_cpus: stolen,
        generator_late_p99_us: (!outcome.late.is_empty()).then(|| latencies(&outcome.late).p99),
        log_entries: BTreeMap::new(),
    }
}

/// Returns the quantiles of a histogram of nanoseconds.
fn latencies(histogram: &Histogram<u64>) -> Latencies {
    let at = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1e3;
    Latencies {
        mean: histogram.mean() / 1e3,
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p99_9: at(0.999),
        max: histogram.max() as f64 / 1e3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_values_in_microseconds() {
        let mut histogram = load::histogram().unwrap();
        for value in 1..=1_000_u64 {
            histogram.record(value * 1_000_000).unwrap();
        }
        let got = latencies(&histogram);
        for (got, expected) in
            [(got.p50, 500e3), (got.p90, 900e3), (got.p99, 990e3), (got.p99_9, 999e3), (got.max, 1e6)]
        {
            assert!((got - expected).abs() <= expected * 0.001, "{got} {expected}");
        }
        assert!((got.mean - 500.5e3).abs() < 1e3);
    }

    #[test]
    fn cost_is_cpu_time_by_answers_within_the_window() {
        let outcome = LoadOutcome {
            due: load::histogram().unwrap(),
            sent: load::histogram().unwrap(),
            late: load::histogram().unwrap(),
            requests: 1_000,
            unanswered: 0,
            refused: 0,
            resumed: 0,
            answered_in_window: 2_000,
            answered: 2_000,
        };
        let sample = |at: u64, cpu: u64, client: u64, busy: u64, all: u64| Sample {
            at,
            cpu: [cpu, 2 * cpu].map(|nanoseconds| Cpu { nanoseconds, user: cpu, kernel: 3 * cpu }).into(),
            client,
            ticks: Ticks { all, idle: all - busy, stolen: 0 },
        };
        let begin = sample(0, 1_000_000, 0, 0, 0);
        let end = sample(2_000_000_000, 101_000_000, 50_000_000, 400, 400);
        let memory = [Memory { rss_kb: 1, ..Memory::default() }; 2];
        let got = summarize(&outcome, &begin, &end, &["server", "server-proxy"], &memory);
        let cpu = |part: &str| got.parts[part].cpu_us_per_request;
        assert_eq!((cpu("client"), cpu("server"), cpu("server-proxy")), (25.0, 50.0, 100.0));
        assert_eq!(got.parts["server-proxy"].cpu_user_us_per_request, Some(25.0));
        assert_eq!(got.answers_per_second, 1_000.0);
        assert!(got.parts["client"].memory.is_none() && got.parts["server"].memory.is_some());
        let cpus = std::thread::available_parallelism().unwrap().get() as f64;
        assert!((got.other_cpus - (cpus - 0.175)).abs() < 1e-9, "{}", got.other_cpus);
    }
}
