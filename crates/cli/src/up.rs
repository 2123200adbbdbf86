//! `skysail up`: the outer process prepares and enters namespaces; the inner one runs and monitors the mesh.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    num::NonZeroU32,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use skysail_core::{logging::printable, shutdown, stdio};
use skysail_sandbox::{
    Capacity, Settings, Survey, isolate,
    mesh::{self, MeshHandle, Report},
    progress::{self, Progress},
    rundir::{self, Phase, PodState, State},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::sleep_until,
};

use crate::{
    changes::Changes,
    check,
    console::Console,
    diagnostics::{self, Diagnostic},
    edges::HEALTHY_PERCENT,
    exit,
    input::Input,
    publish,
    traffic::{Edge, MetricsPage, Traffic},
    view::{self, Output},
    workload::WorkloadStatus,
};

/// Arguments of `skysail up`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Each pod of a workload gets a network namespace with an IP address, its processes and a sidecar. Services have virtual \
IP addresses, names resolve as in a cluster, and all connections pass through the sidecars. --image names the program \
for an image; for other images an echo server runs. Files are watched: edits take effect while the mesh runs. \
The machine's own configuration is not changed. At the end, everything that the mesh created is removed, except the \
logs of an unhealthy mesh.\n\n\
On the host, -p 8080:web:80 forwards port 8080 to port 80 of the Service (or workload) web, as plain text from outside of the mesh. \
Services of type LoadBalancer or NodePort are published without it. Sidecars log requests: `skysail logs WORKLOAD -c \
proxy`. `accessLogFile: \"\"` in the mesh configuration (ConfigMap istio in istio-system), or \
--control-arg=--default-access-log= turns that off.\n\n\
A mesh is healthy if every workload is ready, the configuration has no errors, and at least 99 % of the requests \
between each pair of workloads succeed. Status 4xx is not a failure; 403 is counted as denied. The exit code is 0 if \
the mesh was healthy when it ended, by --for or by Ctrl-C, 1 if it was not, and 2 if it could not be run.\n\n\
Files without a workload, such as routing rules alone, are checked and nothing is run.")]
pub(crate) struct UpArgs {
    /// Folders or files of Kubernetes and Istio YAML; - is standard input, as in `kustomize build DIR | skysail up -`.
    #[arg(required = true, value_name = "PATH")]
    config: Vec<PathBuf>,
    /// Name of the mesh, for `skysail exec` and other commands [default: the name of the first path].
    #[arg(long)]
    name: Option<String>,
    /// Program to run for an image, with or without a tag: acme/shop=./shop. May be given several times. The
    /// container's `args` are appended.
    #[arg(long = "image", value_name = "IMAGE=COMMAND", value_parser = image)]
    images: Vec<(String, Vec<String>)>,
    /// Publish a port of a Service or workload on this machine, such as -p 8080:web:80; may be given several times. The
    /// default address is 127.0.0.1; port 0 is any free one.
    #[arg(short, long, value_name = "[ADDRESS:]PORT:NAME:PORT")]
    publish: Vec<publish::PortMapping>,
    /// Let workloads connect to hosts outside of the mesh (TCP, IPv4), as this machine's network allows, and resolve
    /// their names with its resolver. Addresses of this machine itself and of clouds' metadata services stay closed.
    #[arg(long)]
    egress: bool,
    /// Time from the readiness of all workloads until the mesh ends, such as 30s or 5m.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    time: Option<Duration>,
    /// Format of the result. With json it is one document at the end, and progress is written to standard error.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Run the `command` of containers for whose image no --image is given, with this machine's programs and files.
    #[arg(long)]
    run_commands: bool,
    /// Maximum number of pods, 1000 at most [default: derived from this machine's memory and limits].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    max_pods: Option<u16>,
    /// Worker threads of each sidecar.
    #[arg(long, value_name = "N", default_value_t = NonZeroU32::MIN, value_parser = concurrency)]
    concurrency: NonZeroU32,
    /// Time within which all workloads must be ready; otherwise the mesh counts as unhealthy.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    ready_within: Duration,
    /// Interval at which the metrics of all sidecars are read, for the table and the verdict. Large meshes are read less
    /// often. Above 5s, the table has no figures of the last seconds.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    metrics_interval: Duration,
    /// Run an Envoy as the sidecar of a workload, with the same configuration; may be given several times. Any public
    /// build works. The table shows only those of its calls whose destination has a Skysail sidecar.
    #[arg(long = "envoy", value_name = "NAMESPACE/WORKLOAD=PROGRAM", value_parser = envoy)]
    envoys: Vec<(String, PathBuf)>,
    /// Additional argument for the control plane, such as --control-arg=--cert-ttl=1h; may be given several times.
    #[arg(long = "control-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    control_arguments: Vec<String>,
    /// Run pods and Services only, without a control plane and sidecars.
    #[arg(long, conflicts_with_all = ["envoys", "control_arguments", "concurrency"])]
    plain: bool,
}

/// Arguments of the inner process, from the outer one.
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
    metrics_interval: Duration,
}

/// Minimum interval between two polls of the mesh. The table is redrawn after each poll.
const REDRAW: Duration = Duration::from_secs(1);
/// Minimum interval between two polls of the mesh, divided by the number of its pods.
const POLL_PER_POD: Duration = Duration::from_millis(20);
/// Interval and limit of the wait for the sidecars' acknowledgement of their configuration. The wait begins
/// when all pods are ready.
const CONFIRM_INTERVAL: Duration = Duration::from_millis(50);
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);

/// Time without requests after which the hint for a first request is printed.
const HINT_AFTER: Duration = Duration::from_secs(3);
/// Maximum number of worker threads of a sidecar.
const MAX_WORKERS: u32 = 256;
/// Maximum of a duration on the command line: a year.
const MAX_DURATION: Duration = Duration::from_secs(365 * 24 * 3600);

fn duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let parsed = units.iter().find_map(|(unit, seconds)| {
        let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
        Duration::try_from_secs_f64(number * seconds).ok().filter(|time| *time <= MAX_DURATION)
    });
    parsed.ok_or_else(|| format!("{text:?} is not a duration such as 30s, 5m or 500ms"))
}

fn concurrency(text: &str) -> Result<NonZeroU32, String> {
    let number = text.parse().ok().filter(|number: &NonZeroU32| number.get() <= MAX_WORKERS);
    number.ok_or_else(|| format!("write a number of worker threads from 1 to {MAX_WORKERS}"))
}

fn envoy(text: &str) -> Result<(String, PathBuf), String> {
    let parts = text.split_once('=').filter(|(workload, _)| workload.contains('/'));
    let (workload, file) = parts.ok_or("expected NAMESPACE/WORKLOAD=PROGRAM")?;
    let file = program(file)?.canonicalize().map_err(|error| format!("{file}: {error}"))?;
    Ok((workload.to_owned(), file))
}

fn image(text: &str) -> Result<(String, Vec<String>), String> {
    let (image, command) = text.split_once('=').ok_or("expected IMAGE=COMMAND, such as acme/shop=./shop")?;
    let mut command: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    let first = command.first_mut().ok_or("the command is missing after the =")?;
    let file = program(first)?;
    if first.contains('/') {
        // The container may start in another folder (workingDir).
        let file = std::path::absolute(&file).map_err(|error| format!("{first}: {error}"))?;
        *first = file.to_string_lossy().into_owned();
    }
    Ok((image.to_owned(), command))
}

/// Returns the file of a program, searched as shells do.
fn program(name: &str) -> Result<PathBuf, String> {
    let runs = |file: &Path| {
        fs::metadata(file).is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let file = PathBuf::from(name);
        return if runs(&file) { Ok(file) } else { Err(format!("{name} is not an executable file")) };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| runs(file));
    found.ok_or_else(|| format!("no program {name} in PATH; for one in this folder write ./{name}"))
}

pub(crate) fn outside(args: UpArgs) -> anyhow::Result<u8> {
    let input = Input::read(args.config.clone())?;
    let name = args.name.clone().unwrap_or_else(|| input.mesh_name());
    let survey = Survey::read(&input.paths, input.text.as_deref())?;
    args.envoys.iter().try_for_each(|(workload, _)| survey.check_envoy(workload))?;
    args.images.iter().try_for_each(|(image, _)| survey.check_image(image))?;
    if let Some(checked) = &survey.checked {
        return check::report(&name, checked, args.output);
    }
    let capacity = Capacity::of_machine(args.max_pods.map(usize::from), args.plain);
    survey.check_capacity(&capacity)?;
    let published = publish::open(&args.publish, &survey)?;
    isolate::block_signals()?;
    let (folder, _lock) = rundir::create(&name)?;
    let config = input.into_paths(&folder)?;
    published.announce(args.output)?;
    let exe =
        std::env::current_exe().context("cannot find this program's file")?.to_string_lossy().into_owned();
    let own = |words: &[&str]| -> Vec<String> {
        std::iter::once(exe.as_str()).chain(words.iter().copied()).map(str::to_owned).collect()
    };
    let mut images = BTreeMap::from([
        ("skysail/airline".to_owned(), own(&["workload", "airline"])),
        ("skysail/graph".to_owned(), own(&["bench", "graph", "serve"])),
    ]);
    images.extend(args.images);
    let settings = Settings {
        name,
        folder: folder.clone(),
        config,
        images,
        stand_in: own(&["workload", "echo"]),
        control: if args.plain { Vec::new() } else { own(&["control"]) },
        proxy: if args.plain { Vec::new() } else { own(&["proxy"]) },
        runs_commands: args.run_commands,
        max_pods: capacity.pods,
        concurrency: args.concurrency,
        envoys: args.envoys.into_iter().collect(),
        control_arguments: args.control_arguments,
        published: published.targets.clone(),
        egress: args.egress,
    };
    let order = Inside {
        settings,
        time: args.time,
        output: args.output,
        ready_within: args.ready_within,
        metrics_interval: args.metrics_interval,
    };
    let order = serde_json::to_string(&order)?;
    let inside = ["up-inside".into(), OsString::from(order)];
    let forwarder = args.egress.then(|| ["up-egress".into()]);
    let forwarder = forwarder.as_ref().map(<[OsString; 1]>::as_slice);
    let code = isolate::run_inside(&inside, forwarder, published.serve(folder.clone()))?;
    let logs = folder.join("logs");
    if matches!(code, exit::OK | exit::READER_LEFT) || !logs.exists() {
        rundir::remove(&folder).with_context(|| format!("removing {}", folder.display()))?;
    } else {
        // Keys, tokens and Secrets are removed.
        rundir::keep_logs(&folder).with_context(|| format!("clearing {}", folder.display()))?;
        stdio::print_error(format!("logs are kept in {}", logs.display()));
    }
    Ok(code)
}

pub(crate) fn inside(args: InsideArgs) -> anyhow::Result<u8> {
    let order: Inside =
        serde_json::from_str(&args.order).context("reading the settings of the outer process")?;
    isolate::install_handlers()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let code = isolate::with_reaper(|| runtime.block_on(monitor(order)))?;
    // This is process 1 of the PID namespace: when it ends, every process in the namespace ends.
    runtime.shutdown_background();
    Ok(code)
}

/// State of the mesh at the last poll.
struct Monitor {
    output: Output,
    console: Console,
    started: Instant,
    ready: Option<Instant>,
    /// Start of the wait for the sidecars' acknowledgement; `None` while no wait is in progress.
    waiting: Option<Instant>,
    /// Number of consecutive polls in which all sidecars had acknowledged their configuration.
    confirmed: usize,
    late: bool,
    workloads: BTreeMap<String, WorkloadStatus>,
    /// Workloads whose sidecar is an Envoy.
    envoys: BTreeSet<String>,
    findings: Vec<Diagnostic>,
    changes: Changes,
    traffic: Traffic,
    /// Time at which the metrics of all sidecars were last read.
    read: Option<Instant>,
    /// Start of the count of traffic.
    counting: Option<Instant>,
    plain: bool,
    /// Whether the hint for a first request was printed or is unnecessary.
    hinted: bool,
}

async fn monitor(order: Inside) -> anyhow::Result<u8> {
    let Inside { settings, time, output, ready_within, metrics_interval } = order;
    let mut monitor = Monitor::new(output, &settings);
    let from = Input::names(&settings.config, &settings.folder);
    monitor.console.line(&format!("mesh {} from {from}", settings.name))?;
    let folder = settings.folder.clone();
    let mut empty = State::default();
    empty.name.clone_from(&settings.name);
    let terminate = shutdown::terminate();
    tokio::pin!(terminate);
    let MeshHandle { mut state, mut reports, control } = tokio::select! {
        // The first branch is polled first, because its poll installs the signal handlers.
        biased;
        ending = &mut terminate => {
            ending?;
            monitor.console.line("stopping")?;
            return monitor.finish(&empty);
        }
        started = tokio::spawn(mesh::start(settings)) => started??,
    };
    let mut tick = tokio::time::Instant::now();
    let mut confirm = tokio::time::interval(CONFIRM_INTERVAL);
    let mut resized = signal(SignalKind::window_change()).context("watching the terminal's size")?;
    loop {
        let burst_over = monitor.console.deadline().unwrap_or_else(Instant::now);
        tokio::select! {
            report = reports.recv() => match report {
                Some(Report::Note(note)) => monitor.console.message(&note)?,
                Some(Report::Failed(error)) => {
                    monitor.console.count(None)?;
                    return Err(error.into());
                }
                None => bail!("the mesh's main task has ended"),
            },
            _ = state.changed() => {
                let now = state.borrow_and_update().clone();
                monitor.readiness(&now, control).await?;
            }
            _ = resized.recv() => monitor.draw()?,
            () = sleep_until(burst_over.into()), if monitor.console.deadline().is_some() => {
                monitor.console.count(Some(burst_over))?;
            }
            _ = confirm.tick(), if monitor.waiting.is_some() => {
                let now = state.borrow().clone();
                monitor.confirm(&now, control, &folder).await?;
            }
            () = sleep_until(tick) => {
                let now = state.borrow().clone();
                monitor.tick(&now, control, metrics_interval).await?;
                monitor.late |= monitor.ready.is_none() && monitor.started.elapsed() > ready_within;
                let since = monitor.ready.or(monitor.late.then(|| monitor.started + ready_within));
                if since.zip(time).is_some_and(|(since, time)| since.elapsed() >= time) {
                    return monitor.finish(&now);
                }
                tick = next_tick(&now);
            }
            ending = &mut terminate => {
                ending?;
                let now = state.borrow().clone();
                monitor.console.line("stopping")?;
                // Includes the traffic since the last poll.
                monitor.collect(&now, control).await?;
                return monitor.finish(&now);
            }
        }
    }
}

/// Returns the time of the next poll. Large meshes are polled less often, because a poll costs time for every pod.
fn next_tick(state: &State) -> tokio::time::Instant {
    let pods = u32::try_from(state.pods.len()).unwrap_or(u32::MAX);
    tokio::time::Instant::now() + REDRAW.max(POLL_PER_POD * pods)
}

impl Monitor {
    fn new(output: Output, settings: &Settings) -> Self {
        Self {
            output,
            console: Console::new(output, settings.folder.clone()),
            started: Instant::now(),
            ready: None,
            waiting: None,
            confirmed: 0,
            late: false,
            workloads: BTreeMap::new(),
            envoys: settings.envoys.keys().cloned().collect(),
            findings: Vec::new(),
            changes: Changes::default(),
            traffic: Traffic::default(),
            read: None,
            counting: None,
            plain: settings.control.is_empty(),
            hinted: false,
        }
    }

    /// Prints changes of readiness, and pods that were added or removed.
    async fn readiness(&mut self, state: &State, control: std::net::SocketAddr) -> anyhow::Result<()> {
        let mut pods: BTreeMap<String, Vec<&PodState>> = BTreeMap::new();
        for pod in &state.pods {
            pods.entry(format!("{}/{}", pod.namespace, pod.workload)).or_default().push(pod);
        }
        let mut known = std::mem::take(&mut self.workloads);
        for name in known.keys() {
            pods.entry(name.clone()).or_default();
        }
        for (name, pods) in pods {
            let mut status = known.remove(&name).unwrap_or_default();
            for line in status.update(&name, &pods) {
                self.console.line(&line)?;
            }
            if !pods.is_empty() {
                self.workloads.insert(name, status);
            }
        }
        let all =
            !state.pods.is_empty() && state.pods.iter().all(PodState::is_healthy) && state.refused.is_empty();
        self.waiting = (all && self.ready.is_none()).then(|| self.waiting.unwrap_or_else(Instant::now));
        self.confirmed = 0;
        if all && self.plain {
            self.all_ready(state, control).await?;
        }
        Ok(())
    }

    /// Once all pods are ready, checks whether all sidecars have acknowledged their configuration. Two
    /// consecutive polls must agree, because a push may be about to start.
    async fn confirm(
        &mut self,
        state: &State,
        control: std::net::SocketAddr,
        folder: &Path,
    ) -> anyhow::Result<()> {
        let Some(waiting) = self.waiting else { return Ok(()) };
        // Completed pods have no sidecar any more.
        let running = state.pods.iter().filter(|pod| pod.phase == Phase::Running);
        let taken = progress::query(control, folder, running).await == Progress::Taken;
        self.confirmed = if taken { self.confirmed + 1 } else { 0 };
        let late = waiting.elapsed() > CONFIRM_TIMEOUT;
        if late && self.confirmed < 2 {
            self.console
                .line("warning: some sidecars have not acknowledged their configuration within 10 s")?;
        }
        if late || self.confirmed >= 2 {
            self.all_ready(state, control).await?;
        }
        Ok(())
    }

    async fn all_ready(&mut self, state: &State, control: std::net::SocketAddr) -> anyhow::Result<()> {
        self.waiting = None;
        if self.ready.is_none() {
            self.ready = Some(Instant::now());
            // The count of traffic starts here, not at the next poll.
            self.collect(state, control).await?;
            let time = self.started.elapsed().as_secs_f64();
            let workloads = match self.workloads.len() {
                1 => "1 workload is".to_owned(),
                count => format!("all {count} workloads are"),
            };
            self.console.line(&format!("{workloads} ready after {time:.1} s"))?;
        }
        Ok(())
    }

    /// Polls the control plane and, at this interval, the sidecars. Draws the table.
    async fn tick(
        &mut self,
        state: &State,
        control: std::net::SocketAddr,
        metrics_interval: Duration,
    ) -> anyhow::Result<()> {
        if self.read.is_some_and(|read| read.elapsed() < metrics_interval) {
            self.poll_findings(control).await?;
        } else {
            self.collect(state, control).await?;
            self.hint(state)?;
        }
        self.draw()
    }

    /// Prints an example of `skysail call`, once, if the sidecars have seen no request since the mesh was ready.
    fn hint(&mut self, state: &State) -> anyhow::Result<()> {
        let quiet = self.ready.is_some_and(|ready| ready.elapsed() > HINT_AFTER);
        if self.hinted || !quiet {
            return Ok(());
        }
        self.hinted = true;
        match &state.example_call {
            Some((workload, url)) if self.traffic.total(HINT_AFTER).is_empty() => {
                self.console.line(&format!("send a request: skysail call {workload} {url}"))
            }
            _ => Ok(()),
        }
    }

    fn draw(&mut self) -> anyhow::Result<()> {
        if self.ready.is_some() { self.console.table(&self.traffic.live()) } else { Ok(()) }
    }

    /// Prints what the control plane has found since the last poll.
    async fn poll_findings(&mut self, control: std::net::SocketAddr) -> anyhow::Result<()> {
        if self.plain {
            return Ok(());
        }
        if let Some(mut findings) = diagnostics::request(control).await {
            findings.iter_mut().for_each(|finding| finding.text = self.console.named(&finding.text));
            let known = std::mem::take(&mut self.findings);
            for finding in findings.iter().filter(|finding| !known.contains(finding)) {
                self.console.message(&format!("{}: {}", finding.severity, finding.text))?;
            }
            if findings.is_empty() && !known.is_empty() {
                self.console.line("the configuration has no errors or warnings any more")?;
            }
            self.findings = findings;
        }
        for line in self.changes.request(control).await {
            self.console.line(&line)?;
        }
        Ok(())
    }

    /// Polls the control plane, and reads the metrics of all sidecars.
    async fn collect(&mut self, state: &State, control: std::net::SocketAddr) -> anyhow::Result<()> {
        self.poll_findings(control).await?;
        if self.plain {
            return Ok(());
        }
        let mut asking = JoinSet::new();
        for pod in state.pods.iter().filter(|pod| pod.sidecar).cloned() {
            let workload = format!("{}/{}", pod.namespace, pod.workload);
            let envoy = self.envoys.contains(&workload);
            asking.spawn(async move {
                let text = mesh::metrics(&pod).await.ok()?;
                let account = format!("{}/{}", pod.namespace, pod.account);
                Some(MetricsPage {
                    pod: format!("{}/{}", pod.namespace, pod.name),
                    workload,
                    account,
                    envoy,
                    text,
                })
            });
        }
        let pages: Vec<_> = asking.join_all().await.into_iter().flatten().collect();
        let now = Instant::now();
        self.traffic.update(now, &pages);
        self.read = Some(now);
        if self.ready.is_some() && self.counting.is_none() {
            // Earlier calls are not counted: some sidecars did not know all endpoints yet.
            self.traffic.reset();
            self.counting = Some(Instant::now());
        }
        Ok(())
    }

    /// Prints the result. Returns the exit code, which depends on whether the mesh was healthy.
    fn finish(&mut self, state: &State) -> anyhow::Result<u8> {
        self.console.count(None)?;
        let span = self.counting.map_or(Duration::ZERO, |since| since.elapsed());
        let edges = self.traffic.total(span);
        let errors: Vec<&Diagnostic> = self.findings.iter().filter(|finding| finding.is_error()).collect();
        let mut problems = self.problems(state, &edges);
        let healthy = problems.is_empty() && errors.is_empty();
        match self.output {
            Output::Json => {
                problems.extend(errors.iter().map(|error| format!("error: {}", error.text)));
                let result = json!({
                    "mesh": state.name,
                    "healthy": healthy,
                    "problems": problems,
                    "seconds": span.as_secs_f64(),
                    "seconds_to_ready": self.ready.map(|ready| (ready - self.started).as_secs_f64()),
                    "pods": state.pods.iter().map(view::Pod::from).collect::<Vec<_>>(),
                    "diagnostics": self.findings,
                    "edges": edges,
                });
                stdio::print(serde_json::to_string_pretty(&result)?)?;
            }
            Output::Text => {
                // With text output, the errors were printed when they were found.
                match errors.len() {
                    0 => {}
                    1 => problems.push("the configuration has an error (see above)".to_owned()),
                    count => problems.push(format!("the configuration has {count} errors (see above)")),
                }
                self.console.end()?;
                if !edges.is_empty() {
                    stdio::print(format_args!("\ntotal:\n{}", self.console.whole(&edges)))?;
                }
                problems.iter().map(printable).try_for_each(stdio::print)?;
                stdio::print(if healthy { "healthy" } else { "not healthy" })?;
            }
        }
        Ok(exit::of(healthy))
    }

    /// Returns the problems other than errors of the configuration.
    fn problems(&self, state: &State, edges: &[Edge]) -> Vec<String> {
        let mut problems = Vec::new();
        if state.pods.is_empty() {
            let problem = match self.ready {
                Some(_) => "no workload is left",
                None => "the mesh was stopped before its workloads were ready",
            };
            problems.push(problem.to_owned());
        }
        if self.late {
            problems.push("some workloads were not ready in time (--ready-within)".to_owned());
        }
        problems.extend(state.refused.iter().cloned());
        for pod in state.pods.iter().filter(|pod| !pod.is_healthy()) {
            if let Err(problem) = &pod.ready {
                problems.push(format!("{}/{} is not ready: {problem}", pod.namespace, pod.name));
            }
        }
        for edge in edges.iter().filter(|edge| edge.success_percent < HEALTHY_PERCENT) {
            let Edge { source, destination, success_percent, failed, .. } = edge;
            problems.push(format!("{source} -> {destination}: {success_percent} % success, {failed} failed"));
        }
        problems
    }
}

#[cfg(test)]
mod tests;
