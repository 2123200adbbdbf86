//! The inner process of `skysail up`: starts the mesh, prints its progress and its table, and decides whether it is healthy.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use skysail_core::{logging::printable, shutdown, stdio};
use skysail_sandbox::{
    Settings,
    mesh::{self, MeshHandle, Report},
    progress::{self, Progress},
    rundir::{Phase, PodState, State},
};
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinSet,
    time::sleep_until,
};

use crate::{
    changes::Changes,
    console::Console,
    diagnostics::{self, Diagnostic},
    edges::HEALTHY_PERCENT,
    exit,
    input::Input,
    traffic::{Edge, MetricsPage, Traffic},
    view::{self, Output},
    workload::WorkloadStatus,
};

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

/// What the outer process orders.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MonitorOrder {
    pub(super) settings: Settings,
    /// Time from the readiness of all workloads until the mesh ends.
    pub(super) time: Option<Duration>,
    pub(super) output: Output,
    pub(super) ready_within: Duration,
    pub(super) metrics_interval: Duration,
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

/// Runs the mesh until it ends. Returns the exit code.
pub(super) async fn monitor(order: MonitorOrder) -> anyhow::Result<u8> {
    let MonitorOrder { settings, time, output, ready_within, metrics_interval } = order;
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
                    // Includes the traffic since the last poll.
                    monitor.collect(&now, control).await?;
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
