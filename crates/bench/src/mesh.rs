//! A whole mesh under load: a service graph that `skysail up` runs, and a client in one of its pods.
//!
//! [`measure`] starts the mesh, applies the load, and accounts for sidecars, services and the control plane apart. The
//! mesh has no sidecars, those of Skysail, or Envoys with the same configuration. The load has phases, in which
//! [`workers`] change. [`run`] also starts other meshes.

mod workers;

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

pub(crate) use self::workers::WorkerChange;
use self::workers::Workers;
use crate::{
    accounting::{self, Cpu},
    child::{Running, Scheduling},
    graph::{CLIENT, GraphDeployment},
    peers::Peer,
};

/// Timeout for all pods to be ready.
const READY: Duration = Duration::from_secs(300);
/// Pause between the load and the measurement without load.
const SETTLE: Duration = Duration::from_millis(500);
/// Text that `skysail up` prints once all pods are ready, and a warning before it if sidecars lack their configuration.
const IS_READY: &str = " ready after ";
const IS_LATE: &str = "have not acknowledged their configuration";
/// Share of a phase after which its changes are made, so that requests are in progress.
const CHANGES_AFTER: f64 = 0.1;
/// Code of requests without a response in the load's result, whose reasons have a field of their own.
const NO_RESPONSE: &str = "-1";
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
    /// Duration of each phase.
    pub(crate) window: Duration,
}

/// Phase of a load.
#[derive(Clone, Debug)]
pub(crate) struct MeshPhase {
    /// Rate in percent of that of the load.
    pub(crate) rate_percent: f64,
    /// Changes of workers for the duration of the phase.
    pub(crate) changes: Vec<WorkerChange>,
}

/// Result of a phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeshMeasurement {
    pub(crate) pods: u64,
    pub(crate) sidecars: usize,
    /// Seconds from the start of the mesh until all pods are ready.
    pub(crate) ready_seconds: f64,
    /// Time of the measured load in seconds, with its start and end.
    pub(crate) seconds: f64,
    /// Requests of the client that were due, and those of them without a response of status 200.
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    /// Failed requests by their status or the reason why they have no response.
    #[serde(default)]
    pub(crate) errors: BTreeMap<String, u64>,
    /// Mean number of requests between pods for all requests that the client sent.
    pub(crate) requests_in_mesh: f64,
    /// Latency of the client's requests in microseconds, from when they were due, by percentile.
    pub(crate) latency_us: BTreeMap<String, f64>,
    pub(crate) parts: BTreeMap<MeshPart, PartCost>,
}

/// Processes of a mesh that are accounted for together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MeshPart {
    /// Sidecars, and gateways.
    Sidecars,
    Services,
    Control,
    /// Processes of a database outside of the mesh.
    Database,
}

/// Cost of a part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PartCost {
    /// CPU time in microseconds per second during the load, and without load after it.
    pub(crate) cpu_us_per_second: f64,
    pub(crate) idle_cpu_us_per_second: f64,
    /// Resident memory in kilobytes after the load.
    pub(crate) rss_kb: u64,
}

/// A mesh that is ready.
pub(crate) struct ReadyMesh<'a> {
    programs: &'a MeshPrograms,
    name: String,
    folder: &'a Path,
    pid: i32,
    /// Seconds from the start of the mesh.
    pub(crate) seconds: f64,
}

impl ReadyMesh<'_> {
    /// Returns a command that runs this program in the network of a pod, with these arguments.
    pub(crate) fn command(&self, workload: &str, arguments: &[&str]) -> Command {
        let mut command = self.program(&["exec", workload, "--"]);
        command.arg(&self.programs.skysail).args(arguments);
        command
    }

    /// Returns a command for this mesh: the name of a subcommand and its arguments.
    fn program(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.programs.skysail);
        if let Some((subcommand, arguments)) = words.split_first() {
            command.args([subcommand, "--name", &self.name]).args(arguments);
        }
        command.kill_on_drop(true);
        command
    }

    /// Returns the processes by part.
    ///
    /// # Errors
    /// The number of sidecars is not the expected one.
    pub(crate) fn parts(&self, expected: u64) -> anyhow::Result<BTreeMap<MeshPart, Vec<i32>>> {
        let parts = parts(self.pid, self.programs);
        let sidecars = parts.get(&MeshPart::Sidecars).map_or(0, Vec::len);
        ensure!(sidecars as u64 == expected, "the mesh has {sidecars} sidecars in place of {expected}");
        Ok(parts)
    }
}

/// Starts a mesh with these objects as YAML, calls `measure` once it is ready, and ends it. `workloads` are those with
/// sidecars, as NAMESPACE/NAME. The metrics of all sidecars are read once in the time of a window.
///
/// # Errors
/// The mesh does not become ready, or `measure` fails.
pub(crate) async fn run<T>(
    (objects, workloads): (&str, &[String]),
    programs: &MeshPrograms,
    window: Duration,
    measure: impl AsyncFnOnce(&ReadyMesh<'_>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let folder = tempfile::Builder::new().prefix("skysail-bench-").tempdir()?;
    fs::write(folder.path().join("mesh.yaml"), objects)?;
    let name = format!("bench-{}", std::process::id());
    let scheduling = Scheduling::default();
    let command = up(workloads, programs, (&name, window));
    let began = Instant::now();
    let mut mesh = Running::start("mesh", &command, folder.path(), scheduling)?;
    let measured = async {
        mesh.printed(IS_READY, READY).await?;
        ensure!(mesh.count_lines(IS_LATE) == 0, "not all sidecars have their configuration within 10 s");
        let (folder, pid, seconds) = (folder.path(), mesh.pid(), began.elapsed().as_secs_f64());
        measure(&ReadyMesh { programs, name, folder, pid, seconds }).await
    };
    let measured = measured.await;
    let output = mesh.output_tail();
    mesh.stop().await;
    measured.with_context(|| format!("the mesh printed {output:?}"))
}

/// Starts a mesh, measures it in each phase of a load, and ends it.
///
/// # Errors
/// The mesh does not become ready, a change of a worker fails, or the load does not run.
pub(crate) async fn measure(
    deployment: &GraphDeployment,
    programs: &MeshPrograms,
    load: &MeshLoad,
    phases: &[MeshPhase],
) -> anyhow::Result<Vec<MeshMeasurement>> {
    let mesh = (&*deployment.objects, &*deployment.workloads);
    run(mesh, programs, load.window, async |mesh| under_load(mesh, deployment, load, phases).await).await
}

/// Measures a mesh that is ready, in each phase and then without load.
async fn under_load(
    mesh: &ReadyMesh<'_>,
    deployment: &GraphDeployment,
    load: &MeshLoad,
    phases: &[MeshPhase],
) -> anyhow::Result<Vec<MeshMeasurement>> {
    let client = MeshClient { mesh, url: &deployment.url };
    client.send(load, load.warmup).await?;
    let parts = mesh.parts(if mesh.programs.sidecars.is_some() { deployment.pods } else { 0 })?;
    let sidecars = parts.get(&MeshPart::Sidecars).map_or(0, Vec::len);
    let mut workers = match phases.iter().any(|phase| !phase.changes.is_empty()) {
        true => Workers::of(mesh).await?,
        false => Workers::default(),
    };
    let mut all = Vec::with_capacity(phases.len());
    for phase in phases {
        let rate = (f64::from(load.rate) * phase.rate_percent / 100.0).round().max(1.0) as u32;
        let load = MeshLoad { rate, ..*load };
        let before = cpu(&parts)?;
        let changes = async {
            tokio::time::sleep(load.window.mul_f64(CHANGES_AFTER)).await;
            workers.apply(mesh, &phase.changes).await
        };
        let (sent, changed) = tokio::join!(client.send(&load, load.window), changes);
        changed?;
        let (sent, after) = (sent?, cpu(&parts)?);
        let cost = |(part, cpu_us_per_second): (MeshPart, f64)| {
            let rss_kb = parts.get(&part).map_or(0, |pids| accounting::memory(pids).rss_kb);
            (part, PartCost { cpu_us_per_second, idle_cpu_us_per_second: 0.0, rss_kb })
        };
        all.push(MeshMeasurement {
            pods: deployment.pods,
            sidecars,
            ready_seconds: mesh.seconds,
            seconds: (after.0 - before.0).as_secs_f64(),
            requests: sent.due,
            failed: sent.due - sent.good,
            errors: sent.errors,
            requests_in_mesh: sent.sent as f64 * deployment.requests,
            latency_us: sent.latency_us,
            parts: used(&before, &after).into_iter().map(cost).collect(),
        });
    }
    tokio::time::sleep(SETTLE).await;
    let before = cpu(&parts)?;
    tokio::time::sleep(load.window).await;
    let idle = used(&before, &cpu(&parts)?);
    for (part, cost) in all.iter_mut().flat_map(|measured| &mut measured.parts) {
        cost.idle_cpu_us_per_second = idle.get(part).copied().unwrap_or_default();
    }
    Ok(all)
}

/// Returns the CPU time of each part so far, and when it was read.
fn cpu(parts: &BTreeMap<MeshPart, Vec<i32>>) -> anyhow::Result<(Instant, BTreeMap<MeshPart, Cpu>)> {
    let cpu = parts.iter().map(|(part, pids)| Ok((*part, accounting::cpu(pids)?)));
    Ok((Instant::now(), cpu.collect::<anyhow::Result<_>>()?))
}

/// Returns the CPU time of each part between two readings, in microseconds per second.
fn used(
    before: &(Instant, BTreeMap<MeshPart, Cpu>),
    after: &(Instant, BTreeMap<MeshPart, Cpu>),
) -> BTreeMap<MeshPart, f64> {
    let seconds = (after.0 - before.0).as_secs_f64();
    let of = |(part, now): (&MeshPart, &Cpu)| {
        let used = before.1.get(part).map_or(*now, |before| now.since(*before));
        (*part, used.nanoseconds as f64 / 1e3 / seconds)
    };
    after.1.iter().map(of).collect()
}

/// Returns the command of the mesh. The metrics of all sidecars are read once in the time of a window.
fn up(workloads: &[String], programs: &MeshPrograms, (name, window): (&str, Duration)) -> Vec<OsString> {
    let mut command: Vec<OsString> = vec![programs.skysail.clone().into()];
    command.extend(["up", "mesh.yaml", "--name", name, "--ready-within", "300s"].map(OsString::from));
    command.extend(["--metrics-interval".into(), format!("{}s", window.as_secs_f64()).into()]);
    match &programs.sidecars {
        None => command.push("--plain".into()),
        Some((Peer::Envoy, program)) => {
            for workload in workloads {
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
        // `skysail up` starts the file to which links lead.
        Some((Peer::Envoy, program)) => Some(program.canonicalize().unwrap_or_else(|_| program.clone())),
        _ => None,
    };
    let mut parts: BTreeMap<MeshPart, Vec<i32>> = BTreeMap::new();
    for pid in accounting::family(mesh) {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&str> =
            line.split(|byte| *byte == 0).filter_map(|word| std::str::from_utf8(word).ok()).collect();
        if let Some(part) = part(&words, envoy.as_deref()) {
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
        [_, "bench", "graph", "serve", ..] | [_, "workload", "airline", ..] => Some(MeshPart::Services),
        _ => None,
    }
}

/// The client in its pod.
struct MeshClient<'a> {
    mesh: &'a ReadyMesh<'a>,
    url: &'a str,
}

/// Result of a load.
#[derive(Debug, PartialEq)]
struct SentLoad {
    /// Requests that were due.
    due: u64,
    /// Requests that were sent, with the first one of each connection, which is not part of the result.
    sent: u64,
    /// Responses of status 200.
    good: u64,
    /// Other requests that were due, by status or reason.
    errors: BTreeMap<String, u64>,
    latency_us: BTreeMap<String, f64>,
}

impl MeshClient<'_> {
    /// Sends requests for some time.
    async fn send(&self, load: &MeshLoad, time: Duration) -> anyhow::Result<SentLoad> {
        let result = self.mesh.folder.join("load.json");
        let percentiles = PERCENTILES.map(|(_, percentile)| percentile.to_string()).join(",");
        let output = self
            .mesh
            .command(CLIENT, &["load", "-quiet", "-allow-initial-errors", "-p", &percentiles])
            .args(["-qps", &load.rate.to_string(), "-c", &load.connections.to_string()])
            .args(["-t", &format!("{}s", time.as_secs_f64()), "-json"])
            .arg(&result)
            .arg(self.url)
            .output()
            .await?;
        let text = fs::read_to_string(&result);
        let text = text.with_context(|| {
            format!("the load did not run: {}", String::from_utf8_lossy(&output.stderr).trim())
        })?;
        fs::remove_file(&result)?;
        SentLoad::parse(&text, load.connections)
    }
}

impl SentLoad {
    /// Reads a result in Fortio's format, of a load with this number of connections.
    fn parse(text: &str, connections: u32) -> anyhow::Result<Self> {
        let result: serde_json::Value = serde_json::from_str(text)?;
        let histogram = &result["DurationHistogram"];
        let requests = histogram["Count"].as_u64().context("the result of the load has no count")?;
        ensure!(requests > 0, "the load had no response");
        let counts = |field: &str| -> BTreeMap<String, u64> {
            let counts = result[field].as_object().into_iter().flatten();
            counts.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect()
        };
        let mut errors = counts("RetCodes");
        let good = errors.remove("200").unwrap_or_default();
        errors.remove(NO_RESPONSE);
        errors.extend(counts("Failures"));
        // Requests that were due and not sent, or without a response at the end.
        let unsent = result["Unsent"].as_u64().unwrap_or_default();
        errors.insert("unsent".to_owned(), unsent);
        errors.retain(|_, count| *count > 0);
        let percentiles = histogram["Percentiles"].as_array().map(Vec::as_slice).unwrap_or_default();
        let of = |percentile: f64| {
            let is_same = |of: &&serde_json::Value| of["Percentile"].as_f64() == Some(percentile);
            percentiles.iter().find(is_same).and_then(|of| of["Value"].as_f64())
        };
        let latency = PERCENTILES
            .iter()
            .filter_map(|(name, percentile)| Some(((*name).to_owned(), of(*percentile)? * 1e6)));
        Ok(Self {
            due: (requests + unsent).max(good),
            sent: requests + u64::from(connections),
            good,
            errors,
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
            (&["/bin/skysail", "workload", "airline", "auth"], Some(MeshPart::Services)),
            (&["/bin/skysail", "up-inside", "proxy"], None),
            (&[], None),
        ] {
            assert_eq!(part(words, envoy), expected, "{words:?}");
        }
    }

    #[test]
    fn a_result_of_the_load_is_read() {
        let text = r#"{"RetCodes": {"200": 97, "503": 2, "-1": 1}, "Failures": {"reset": 1, "timeout": 0}, "Unsent": 20,
            "DurationHistogram": {"Count": 100, "Percentiles": [{"Percentile": 50, "Value": 0.001},
            {"Percentile": 99.9, "Value": 0.01}]}}"#;
        let latency_us = BTreeMap::from([("p50".to_owned(), 1_000.0), ("p99_9".to_owned(), 10_000.0)]);
        let errors = [("503", 2), ("reset", 1), ("unsent", 20)].map(|(name, count)| (name.to_owned(), count));
        let expected = SentLoad { due: 120, sent: 108, good: 97, errors: errors.into(), latency_us };
        assert_eq!(SentLoad::parse(text, 8).unwrap(), expected);
        let none = SentLoad::parse(r#"{"DurationHistogram": {"Count": 0}}"#, 8).unwrap_err();
        assert!(none.to_string().contains("no response"), "{none}");
    }
}
