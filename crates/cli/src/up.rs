//! `skysail up`: outside, it prepares and enters namespaces; inside, it runs the mesh and shows how it does.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    io::{IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use skysail_core::shutdown;
use skysail_sandbox::{
    Settings, isolate,
    mesh::{self, Report, Started},
    progress::{self, Progress},
    rundir::{self, State},
};
use tokio::task::JoinSet;

use crate::{
    diagnostics::{self, Diagnostic},
    traffic::{Edge, Traffic},
    view::{self, Output},
};

/// Arguments of `skysail up`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Every replica of a Deployment (or StatefulSet, DaemonSet, Pod) gets a network namespace with an address of its own, \
its process and a sidecar. Services have virtual addresses, names are resolved as in a cluster, and all connections \
go through the sidecars. Images stand for programs (--image); an echo server stands in for unknown ones. \
Files are watched: edits take effect while it runs. Nothing of this machine is changed, and all is gone at the end.\n\n\
A mesh is healthy when every workload is ready, the configuration has no errors, and on every edge at least 99 % of \
the requests succeed. Answers 4xx are no failures; 403 is counted by itself. With --for, the exit code is 0 if the mesh was healthy, \
and 1 if it was not.")]
pub(crate) struct Args {
    /// Folders or files of Kubernetes and Istio YAML.
    #[arg(required = true, value_name = "DIR")]
    config: Vec<PathBuf>,
    /// What to call the mesh, so that `skysail exec` finds it [default: the folder's name].
    #[arg(long)]
    name: Option<String>,
    /// The program that stands for an image; may be given several times.
    #[arg(long = "image", value_name = "IMAGE=COMMAND")]
    images: Vec<String>,
    /// End after this time, counted from when all is ready: 30s, 5m.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
    /// How to print the result; with json, progress goes to standard error.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Worker threads of every sidecar.
    #[arg(long, default_value_t = 1)]
    concurrency: u32,
    /// How long the workloads get to become ready; after that, the mesh counts as unhealthy.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    ready_within: Duration,
    /// Give a workload an Envoy in the sidecar's place, with the same configuration; may be given several times.
    /// Any public build will do.
    #[arg(long = "envoy", value_name = "NAMESPACE/WORKLOAD=PROGRAM", value_parser = envoy)]
    envoys: Vec<(String, PathBuf)>,
    /// A further argument for the control plane, such as --control-arg=--cert-ttl=1h; may be given several times.
    #[arg(long = "control-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    control_arguments: Vec<String>,
    /// Run the pods and services only: no control plane and no sidecars.
    #[arg(long)]
    plain: bool,
}

/// What the process inside gets from the one outside.
#[derive(Debug, clap::Args)]
pub(crate) struct InsideArgs {
    order: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Inside {
    settings: Settings,
    time: Option<Duration>,
    output: Output,
    ready_within: Duration,
}

/// The table is drawn anew this often on a terminal, and printed this often elsewhere.
const REDRAW: Duration = Duration::from_secs(1);
const PRINT: Duration = Duration::from_secs(10);
/// How often to ask, once all pods are ready, whether the sidecars know it, and after how long to go on regardless.
const CONFIRM: Duration = Duration::from_millis(50);
const CONFIRM_LIMIT: Duration = Duration::from_secs(10);
/// Less success than this on an edge is unhealthy.
const HEALTHY_PERCENT: f64 = 99.0;

fn duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let parsed = units.iter().find_map(|(unit, seconds)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Duration::try_from_secs_f64(number * seconds).ok()
    });
    parsed.ok_or_else(|| format!("{text:?} is not a time such as 30s, 5m or 500ms"))
}

fn envoy(text: &str) -> Result<(String, PathBuf), String> {
    let parts = text.split_once('=').filter(|(workload, _)| workload.contains('/'));
    let (workload, program) = parts.ok_or("write NAMESPACE/WORKLOAD=PROGRAM")?;
    let program = PathBuf::from(program).canonicalize().map_err(|error| format!("{program}: {error}"))?;
    Ok((workload.to_owned(), program))
}

pub(crate) fn outside(args: Args) -> anyhow::Result<u8> {
    let mut config = Vec::new();
    for path in &args.config {
        config.push(
            path.canonicalize().with_context(|| format!("no such folder or file: {}", path.display()))?,
        );
    }
    let name = match args.name {
        Some(name) => name,
        None => mesh_name(&config[0]),
    };
    let (folder, _lock) = rundir::create(&name)?;
    let exe = std::env::current_exe().context("finding this program's file")?.to_string_lossy().into_owned();
    let program = |words: &[&str]| -> Vec<String> {
        std::iter::once(exe.as_str()).chain(words.iter().copied()).map(str::to_owned).collect()
    };
    let mut images = BTreeMap::from([("skysail/airline".to_owned(), program(&["workload", "airline"]))]);
    for pair in &args.images {
        let Some((image, command)) = pair.split_once('=') else {
            bail!("--image {pair}: write IMAGE=COMMAND, for example --image acme/shop=./shop")
        };
        images.insert(image.to_owned(), command.split_whitespace().map(str::to_owned).collect());
    }
    let settings = Settings {
        name,
        folder: folder.clone(),
        config,
        images,
        stand_in: program(&["workload", "echo"]),
        control: if args.plain { Vec::new() } else { program(&["control"]) },
        proxy: if args.plain { Vec::new() } else { program(&["proxy"]) },
        concurrency: args.concurrency,
        envoys: args.envoys.into_iter().collect(),
        control_arguments: args.control_arguments,
    };
    let order = Inside { settings, time: args.time, output: args.output, ready_within: args.ready_within };
    let order = serde_json::to_string(&order)?;
    let code = isolate::run_inside(&["up-inside".into(), OsString::from(order)])?;
    if code == 0 {
        rundir::remove(&folder).with_context(|| format!("removing {}", folder.display()))?;
    } else {
        eprintln!("logs are kept in {}", folder.join("logs").display());
    }
    Ok(code)
}

/// The folder's name, without what a mesh's name may not hold.
fn mesh_name(path: &std::path::Path) -> String {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    if name.is_empty() { "mesh".to_owned() } else { name }
}

pub(crate) fn inside(args: InsideArgs) -> anyhow::Result<u8> {
    let order: Inside = serde_json::from_str(&args.order).context("reading the order from outside")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let code = isolate::reaping(|| runtime.block_on(show(order)))?;
    // Process 1 of the namespace ends here, and everything in it with it.
    runtime.shutdown_background();
    Ok(code)
}

/// How the mesh does, as far as it has been seen.
struct Show {
    output: Output,
    started: Instant,
    ready: Option<Instant>,
    /// Since when all pods are ready while the sidecars may not know it, and how often in a row they did.
    waiting: Option<Instant>,
    settled: usize,
    late: bool,
    announced: BTreeSet<String>,
    findings: Vec<Diagnostic>,
    traffic: Traffic,
    /// Since when traffic counts.
    counting: Option<Instant>,
    /// Lines of the table on the terminal, to be drawn over.
    drawn: usize,
    printed: Instant,
    plain: bool,
}

async fn show(order: Inside) -> anyhow::Result<u8> {
    let Inside { settings, time, output, ready_within } = order;
    let plain = settings.control.is_empty();
    let mut show = Show {
        output,
        started: Instant::now(),
        ready: None,
        waiting: None,
        settled: 0,
        late: false,
        announced: BTreeSet::new(),
        findings: Vec::new(),
        traffic: Traffic::default(),
        counting: None,
        drawn: 0,
        printed: Instant::now(),
        plain,
    };
    let from: Vec<_> = settings.config.iter().map(|path| path.display().to_string()).collect();
    show.line(&format!("mesh {} from {}", settings.name, from.join(", ")));
    let folder = settings.folder.clone();
    let Started { mut state, mut reports, control } = mesh::start(settings).await?;
    let mut tick = tokio::time::interval(REDRAW);
    let mut confirm = tokio::time::interval(CONFIRM);
    let terminate = shutdown::terminate();
    tokio::pin!(terminate);
    loop {
        tokio::select! {
            report = reports.recv() => match report {
                Some(Report::Note(note)) => show.line(&note),
                Some(Report::Failed(error)) => return Err(error.into()),
                None => bail!("the mesh's main task has ended"),
            },
            _ = state.changed() => {
                let now = state.borrow_and_update().clone();
                show.readiness(&now);
            }
            _ = confirm.tick(), if show.waiting.is_some() => {
                let now = state.borrow().clone();
                show.confirm(&now, control, &folder).await;
            }
            _ = tick.tick() => {
                let now = state.borrow().clone();
                show.tick(&now, control).await;
                show.late |= show.ready.is_none() && show.started.elapsed() > ready_within;
                let since = show.ready.or(show.late.then_some(show.started + ready_within));
                if since.zip(time).is_some_and(|(since, time)| since.elapsed() >= time) {
                    return show.finish(&now);
                }
            }
            signal = &mut terminate => {
                signal?;
                let now = state.borrow().clone();
                show.line("ending");
                show.finish(&now)?;
                return Ok(0);
            }
        }
    }
}

impl Show {
    /// Tells of workloads that have become ready, or have stopped being so.
    fn readiness(&mut self, state: &State) {
        let mut workloads: BTreeMap<String, (usize, usize, Option<String>)> = BTreeMap::new();
        for pod in &state.pods {
            let entry = workloads.entry(format!("{}/{}", pod.namespace, pod.workload)).or_default();
            entry.0 += 1;
            match &pod.ready {
                Ok(()) => entry.1 += 1,
                Err(problem) => entry.2 = Some(problem.clone()),
            }
        }
        for (name, (pods, ready, problem)) in &workloads {
            if pods == ready && self.announced.insert(name.clone()) {
                let plural = if *pods == 1 { "pod" } else { "pods" };
                self.line(&format!("ready      {name} ({pods} {plural})"));
            } else if *ready == 0 && self.announced.remove(name) {
                let problem = problem.as_deref().unwrap_or_default();
                self.line(&format!("not ready  {name}: {problem}"));
            }
        }
        let all = !workloads.is_empty() && workloads.values().all(|(pods, ready, _)| pods == ready);
        self.waiting = (all && self.ready.is_none()).then(|| self.waiting.unwrap_or_else(Instant::now));
        self.settled = 0;
        if all && self.plain {
            self.all_ready(workloads.len());
        }
    }

    /// All pods are ready; the mesh is when every sidecar has heard of it. Two looks in a row must say so, as a
    /// push may be about to begin.
    async fn confirm(&mut self, state: &State, control: std::net::SocketAddr, folder: &Path) {
        let Some(waiting) = self.waiting else { return };
        let taken = progress::look(control, folder, state.pods.iter()).await == Progress::Taken;
        self.settled = if taken { self.settled + 1 } else { 0 };
        let late = waiting.elapsed() > CONFIRM_LIMIT;
        if late && self.settled < 2 {
            self.line("warning: not every sidecar has taken its configuration");
        }
        if late || self.settled >= 2 {
            let workloads: BTreeSet<_> =
                state.pods.iter().map(|pod| (&pod.namespace, &pod.workload)).collect();
            self.all_ready(workloads.len());
        }
    }

    fn all_ready(&mut self, workloads: usize) {
        self.waiting = None;
        if self.ready.is_none() {
            self.ready = Some(Instant::now());
            let time = self.started.elapsed().as_secs_f64();
            self.line(&format!("all {workloads} workloads are ready after {time:.1} s"));
        }
    }

    /// Looks at the sidecars and the control plane, and draws the table.
    async fn tick(&mut self, state: &State, control: std::net::SocketAddr) {
        if self.plain {
            return;
        }
        if let Some(findings) = diagnostics::ask(control).await {
            let known = std::mem::take(&mut self.findings);
            for finding in findings.iter().filter(|finding| !known.contains(finding)) {
                self.line(&format!("{}: {}", finding.severity, finding.text));
            }
            if findings.is_empty() && !known.is_empty() {
                self.line("the configuration is in order again");
            }
            self.findings = findings;
        }
        let mut asking = JoinSet::new();
        for pod in state.pods.iter().filter(|pod| pod.sidecar).cloned() {
            asking.spawn(async move {
                let text = mesh::metrics(&pod).await.ok()?;
                Some((format!("{}/{}", pod.namespace, pod.name), text))
            });
        }
        let answers: Vec<_> = asking.join_all().await.into_iter().flatten().collect();
        self.traffic.look(Instant::now(), &answers);
        if self.ready.is_some() && self.counting.is_none() {
            // Calls made before every sidecar knew every endpoint say nothing about the mesh.
            self.traffic.forget();
            self.counting = Some(Instant::now());
        }
        if self.output == Output::Text && self.ready.is_some() {
            self.draw();
        }
    }

    fn draw(&mut self) {
        let terminal = std::io::stdout().is_terminal();
        let edges = self.traffic.live();
        if edges.is_empty() || !terminal && self.printed.elapsed() < PRINT {
            return;
        }
        self.printed = Instant::now();
        self.erase();
        let table = view::edges(&edges);
        println!("\n{table}");
        self.drawn = if terminal { table.lines().count() + 1 } else { 0 };
    }

    /// Takes the table off the terminal.
    fn erase(&mut self) {
        if self.drawn > 0 {
            print!("\x1b[{}A\x1b[J", self.drawn);
            self.drawn = 0;
        }
    }

    /// Prints a line of progress above the table.
    fn line(&mut self, text: &str) {
        if self.output == Output::Json {
            eprintln!("{text}");
            return;
        }
        self.erase();
        println!("{text}");
        // The table is drawn again at the next tick.
        let _ = std::io::stdout().flush();
    }

    /// Prints the result and says by the exit code whether the mesh was healthy.
    fn finish(&mut self, state: &State) -> anyhow::Result<u8> {
        let span = self.counting.map_or(Duration::ZERO, |since| since.elapsed());
        let edges = self.traffic.total(span);
        let problems = self.problems(state, &edges);
        match self.output {
            Output::Json => {
                let result = json!({
                    "mesh": state.name,
                    "healthy": problems.is_empty(),
                    "problems": problems,
                    "seconds": span.as_secs_f64(),
                    "seconds_to_ready": self.ready.map(|ready| (ready - self.started).as_secs_f64()),
                    "pods": state.pods,
                    "diagnostics": self.findings,
                    "edges": edges,
                });
                println!("{}", serde_json::to_string_pretty(&result)?);
            }
            Output::Text => {
                self.erase();
                if !edges.is_empty() {
                    println!("\nin all:\n{}", view::edges(&edges));
                }
                for problem in &problems {
                    println!("{problem}");
                }
                println!("{}", if problems.is_empty() { "healthy" } else { "not healthy" });
            }
        }
        Ok(u8::from(!problems.is_empty()))
    }

    fn problems(&self, state: &State, edges: &[Edge]) -> Vec<String> {
        let mut problems = Vec::new();
        if state.pods.is_empty() {
            problems.push("there are no workloads".to_owned());
        }
        if self.late {
            problems.push("not all workloads were ready in time".to_owned());
        }
        for pod in &state.pods {
            if let Err(problem) = &pod.ready {
                problems.push(format!("{}/{} is not ready: {problem}", pod.namespace, pod.name));
            }
        }
        let errors = self.findings.iter().filter(|finding| finding.is_error());
        problems.extend(errors.map(|finding| format!("error: {}", finding.text)));
        for edge in edges.iter().filter(|edge| edge.success_percent < HEALTHY_PERCENT) {
            let Edge { source, destination, success_percent, failed, .. } = edge;
            problems.push(format!("{source} -> {destination}: {success_percent} % success, {failed} failed"));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_names_are_read() {
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert!(duration("30").is_err());
        assert!(duration("-1s").is_err());
        assert_eq!(mesh_name(std::path::Path::new("/a/my shop.yaml")), "my-shop");
    }
}
