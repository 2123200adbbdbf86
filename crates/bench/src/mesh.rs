//! A whole mesh under load: a service graph that `skysail up` runs, and a client in one of its pods.
//!
//! [`measure`] starts the mesh, applies the load, and accounts for sidecars, services and the control plane apart. The
//! mesh has no sidecars, those of Skysail, or Envoys with the same configuration.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::{
    accounting::{self, Cpu},
    child::{Running, Scheduling},
    graph::{CLIENT, GraphDeployment},
    peers::Peer,
};

/// Timeout for all pods to be ready.
const READY: Duration = Duration::from_secs(300);
/// Interval at which the metrics of sidecars are read: the default of Istio's sample of Prometheus.
const METRICS: &str = "15s";
/// Pause between the load and the measurement without load.
const SETTLE: Duration = Duration::from_millis(500);
/// Text that `skysail up` prints once all pods are ready and all sidecars have their configuration.
const IS_READY: &str = " ready after ";
/// Percentiles of the load's result.
const PERCENTILES: [(&str, f64); 4] = [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99_9", 99.9)];

/// Programs of a mesh.
#[derive(Clone, Debug)]
pub(crate) struct MeshPrograms {
    /// Program of the control plane, the services and the load.
    pub(crate) skysail: PathBuf,
    /// Sidecars and their program; `None` for a mesh without sidecars.
    pub(crate) sidecars: Option<(Peer, PathBuf)>,
}

/// Load of the client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeshLoad {
    /// Requests per second, due at even intervals.
    pub(crate) rate: u32,
    pub(crate) connections: u32,
    pub(crate) warmup: Duration,
    pub(crate) window: Duration,
}

/// Result of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeshMeasurement {
    pub(crate) pods: u64,
    pub(crate) sidecars: usize,
    /// Seconds from the start of the mesh until all pods are ready.
    pub(crate) ready_seconds: f64,
    /// Duration of the measured load in seconds.
    pub(crate) seconds: f64,
    /// Requests of the client, and those of them without a response or with a status other than 200.
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    /// Mean number of requests between pods, for all requests of the client together.
    pub(crate) requests_in_mesh: f64,
    /// Latency of the client's requests in microseconds, from when they were due, by percentile.
    pub(crate) latency_us: BTreeMap<String, f64>,
    pub(crate) parts: BTreeMap<MeshPart, PartCost>,
}

/// Processes of a mesh that are accounted for together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MeshPart {
    Sidecars,
    Services,
    Control,
}

/// Cost of a part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PartCost {
    /// CPU time in microseconds during the load.
    pub(crate) cpu_us: f64,
    /// CPU time in microseconds per second without load, after it.
    pub(crate) idle_cpu_us: f64,
    /// Resident memory in kilobytes after the load.
    pub(crate) rss_kb: u64,
}

/// Starts a mesh, measures it under load, and ends it.
///
/// # Errors
/// The mesh does not become ready, or the load does not run.
pub(crate) async fn measure(
    deployment: &GraphDeployment,
    programs: &MeshPrograms,
    load: &MeshLoad,
) -> anyhow::Result<MeshMeasurement> {
    let folder = tempfile::Builder::new().prefix("skysail-bench-").tempdir()?;
    fs::write(folder.path().join("mesh.yaml"), &deployment.objects)?;
    let name = folder.path().file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let scheduling = Scheduling { realtime: false, first: false, cpus: None };
    let began = Instant::now();
    let mut mesh = Running::start("mesh", &up(deployment, programs, &name), folder.path(), scheduling)?;
    mesh.printed(IS_READY, READY).await?;
    let ready_seconds = began.elapsed().as_secs_f64();
    let client = MeshClient { programs, name, url: &deployment.url, folder: folder.path() };
    client.send(load, load.warmup).await?;
    let parts = parts(mesh.pid(), programs);
    let cpu = || parts.iter().map(|(part, pids)| (*part, accounting::cpu(pids))).collect::<BTreeMap<_, _>>();
    let before = cpu();
    let sent = client.send(load, load.window).await?;
    let after = cpu();
    let mut costs: BTreeMap<MeshPart, PartCost> = BTreeMap::new();
    for (part, cpu_us) in used(&before, &after) {
        let rss_kb = parts.get(&part).map_or(0, |pids| accounting::memory(pids).rss_kb);
        costs.insert(part, PartCost { cpu_us, idle_cpu_us: 0.0, rss_kb });
    }
    tokio::time::sleep(SETTLE).await;
    let (before, began) = (cpu(), Instant::now());
    tokio::time::sleep(load.warmup).await;
    let seconds = began.elapsed().as_secs_f64();
    for (part, cpu_us) in used(&before, &cpu()) {
        costs.entry(part).and_modify(|cost| cost.idle_cpu_us = cpu_us / seconds);
    }
    mesh.stop().await;
    Ok(MeshMeasurement {
        pods: deployment.pods,
        sidecars: parts.get(&MeshPart::Sidecars).map_or(0, Vec::len),
        ready_seconds,
        seconds: sent.seconds,
        requests: sent.requests,
        failed: sent.failed,
        requests_in_mesh: sent.requests as f64 * deployment.requests,
        latency_us: sent.latency_us,
        parts: costs,
    })
}

/// Returns the CPU time of each part between two readings, in microseconds.
fn used(before: &BTreeMap<MeshPart, Cpu>, after: &BTreeMap<MeshPart, Cpu>) -> BTreeMap<MeshPart, f64> {
    let of = |(part, now): (&MeshPart, &Cpu)| {
        let used = before.get(part).map_or(*now, |before| now.since(*before));
        (*part, used.nanoseconds as f64 / 1e3)
    };
    after.iter().map(of).collect()
}

/// Returns the command of the mesh.
fn up(deployment: &GraphDeployment, programs: &MeshPrograms, name: &str) -> Vec<OsString> {
    let mut command: Vec<OsString> = vec![programs.skysail.clone().into()];
    command.extend(["up", "mesh.yaml", "--name", name, "--ready-within", "300s"].map(OsString::from));
    command.extend(["--metrics-interval", METRICS].map(OsString::from));
    match &programs.sidecars {
        None => command.push("--plain".into()),
        Some((Peer::Envoy, program)) => {
            for workload in &deployment.workloads {
                command.push("--envoy".into());
                command.push(format!("{workload}={}", program.display()).into());
            }
        }
        Some(_) => {}
    }
    command
}

/// Returns the processes of a mesh by part.
fn parts(mesh: i32, programs: &MeshPrograms) -> BTreeMap<MeshPart, Vec<i32>> {
    let envoy = match &programs.sidecars {
        Some((Peer::Envoy, program)) => Some(program.as_path()),
        _ => None,
    };
    let mut parts: BTreeMap<MeshPart, Vec<i32>> = BTreeMap::new();
    for pid in accounting::family(mesh) {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&str> =
            line.split(|byte| *byte == 0).filter_map(|word| std::str::from_utf8(word).ok()).collect();
        if let Some(part) = part(&words, envoy) {
            parts.entry(part).or_default().push(pid);
        }
    }
    parts
}

/// Returns the part that a process with these arguments belongs to.
fn part(words: &[&str], envoy: Option<&Path>) -> Option<MeshPart> {
    match words {
        [program, ..] if envoy.is_some_and(|envoy| Path::new(program) == envoy) => Some(MeshPart::Sidecars),
        // The agent that starts an Envoy, and is on the path of no request.
        [_, "proxy", rest @ ..] if rest.contains(&"--envoy") => None,
        [_, "proxy", ..] => Some(MeshPart::Sidecars),
        [_, "control", ..] => Some(MeshPart::Control),
        [_, "bench", "graph", "serve", ..] => Some(MeshPart::Services),
        _ => None,
    }
}

/// The client in its pod.
struct MeshClient<'a> {
    programs: &'a MeshPrograms,
    /// Name of the mesh.
    name: String,
    url: &'a str,
    folder: &'a Path,
}

/// Result of a load.
#[derive(Debug, PartialEq)]
struct SentLoad {
    seconds: f64,
    requests: u64,
    failed: u64,
    latency_us: BTreeMap<String, f64>,
}

impl MeshClient<'_> {
    /// Sends requests for some time.
    async fn send(&self, load: &MeshLoad, time: Duration) -> anyhow::Result<SentLoad> {
        let result = self.folder.join("load.json");
        let percentiles = PERCENTILES.map(|(_, percentile)| percentile.to_string()).join(",");
        let output = Command::new(&self.programs.skysail)
            .args(["exec", "--name", &self.name, CLIENT, "--"])
            .arg(&self.programs.skysail)
            .args(["load", "-quiet", "-allow-initial-errors", "-p", &percentiles])
            .args(["-qps", &load.rate.to_string(), "-c", &load.connections.to_string()])
            .args(["-t", &format!("{}s", time.as_secs_f64()), "-json"])
            .arg(&result)
            .arg(self.url)
            .kill_on_drop(true)
            .output()
            .await?;
        let text = fs::read_to_string(&result);
        let text = text.with_context(|| {
            format!("the load did not run: {}", String::from_utf8_lossy(&output.stderr).trim())
        })?;
        fs::remove_file(&result)?;
        SentLoad::parse(&text)
    }
}

impl SentLoad {
    /// Reads a result in Fortio's format.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let result: serde_json::Value = serde_json::from_str(text)?;
        let histogram = &result["DurationHistogram"];
        let requests = histogram["Count"].as_u64().context("the result of the load has no count")?;
        ensure!(requests > 0, "the load had no response");
        let good = result["RetCodes"]["200"].as_u64().unwrap_or_default();
        let percentiles = histogram["Percentiles"].as_array().map(Vec::as_slice).unwrap_or_default();
        let of = |percentile: f64| {
            let is_same = |of: &&serde_json::Value| of["Percentile"].as_f64() == Some(percentile);
            percentiles.iter().find(is_same).and_then(|of| of["Value"].as_f64())
        };
        let latency = PERCENTILES
            .iter()
            .filter_map(|(name, percentile)| Some(((*name).to_owned(), of(*percentile)? * 1e6)));
        Ok(Self {
            seconds: result["ActualDuration"].as_f64().unwrap_or_default() / 1e9,
            requests,
            failed: requests.saturating_sub(good),
            latency_us: latency.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_belong_to_parts() {
        let envoy = Some(Path::new("/opt/envoy"));
        for (words, expected) in [
            (&["/bin/skysail", "proxy", "--concurrency", "1"][..], Some(MeshPart::Sidecars)),
            (&["/opt/envoy", "-c", "x"], Some(MeshPart::Sidecars)),
            (&["/bin/skysail", "proxy", "--envoy", "/opt/envoy"], None),
            (&["/bin/skysail", "control"], Some(MeshPart::Control)),
            (&["/bin/skysail", "bench", "graph", "serve"], Some(MeshPart::Services)),
            (&["/bin/skysail", "workload", "echo"], None),
            (&["/bin/skysail", "up-inside", "proxy"], None),
            (&[], None),
        ] {
            assert_eq!(part(words, envoy), expected, "{words:?}");
        }
    }

    #[test]
    fn a_result_of_the_load_is_read() {
        let text = r#"{"ActualDuration": 2000000000, "RetCodes": {"200": 97, "503": 2, "-1": 1},
            "DurationHistogram": {"Count": 100, "Percentiles": [{"Percentile": 50, "Value": 0.001},
            {"Percentile": 99.9, "Value": 0.01}]}}"#;
        let latency_us = BTreeMap::from([("p50".to_owned(), 1_000.0), ("p99_9".to_owned(), 10_000.0)]);
        let expected = SentLoad { seconds: 2.0, requests: 100, failed: 3, latency_us };
        assert_eq!(SentLoad::parse(text).unwrap(), expected);
        let none = SentLoad::parse(r#"{"DurationHistogram": {"Count": 0}}"#).unwrap_err();
        assert!(none.to_string().contains("no response"), "{none}");
    }
}
