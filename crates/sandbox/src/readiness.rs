//! Readiness of a pod: the status of its programs and the results of its probes.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    http,
    mounts::View,
    process::{self, KillRequest, KillRequests},
};

/// How to probe a program, and how often.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub(crate) probe: ProbeAction,
    /// Probe interval of a ready program; `None` if a ready program is not probed again.
    pub(crate) period: Option<Duration>,
    /// Timeout of an attempt.
    pub(crate) limit: Duration,
    /// Number of consecutive failures after which the probe has failed.
    pub(crate) failures: u32,
}

/// A probe whose failure ends a program.
#[derive(Clone, Debug)]
pub(crate) struct RestartProbe {
    pub(crate) check: Check,
    /// Time between the program's start and the first probe.
    pub(crate) delay: Duration,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
}

/// Startup and liveness probes of a container.
#[derive(Clone, Debug, Default)]
pub(crate) struct RestartProbes {
    /// The other probes wait until it has succeeded.
    pub(crate) startup: Option<RestartProbe>,
    pub(crate) liveness: Option<RestartProbe>,
}

/// Action of a probe.
#[derive(Clone, Debug)]
pub(crate) enum ProbeAction {
    /// A port accepts a connection.
    Connect(u16),
    /// A GET request of this path succeeds.
    Get(u16, String),
    /// A gRPC server's health service (grpc.health.v1) reports this service as serving.
    Grpc(u16, String),
    /// A command succeeds, with this environment and these files.
    Exec(Vec<String>, BTreeMap<String, String>, Arc<View>),
}

impl Check {
    /// Returns a check that succeeds when the port accepts a connection.
    pub(crate) fn accepts(port: u16) -> Self {
        Self { probe: ProbeAction::Connect(port), period: None, limit: Duration::from_secs(1), failures: 3 }
    }

    async fn attempt(&self, address: Ipv4Addr) -> Result<(), String> {
        let to = |port| SocketAddr::new(IpAddr::V4(address), port);
        match &self.probe {
            ProbeAction::Connect(port) => {
                let connecting = timeout(self.limit, http::connect(to(*port), Some(PROBES_FROM)));
                let answer = match connecting.await {
                    Ok(Ok(_)) => return Ok(()),
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "no answer".to_owned(),
                };
                Err(format!("port {port}: {answer}"))
            }
            ProbeAction::Get(port, path) => {
                match http::status_from(to(*port), PROBES_FROM, path, self.limit).await {
                    Ok(200..=399) => Ok(()),
                    Ok(status) => Err(format!("port {port}: {path} answers {status}")),
                    Err(error) => Err(format!("port {port}: {path}: {error}")),
                }
            }
            ProbeAction::Grpc(port, service) => {
                let server = format!("http://{}", to(*port));
                match http::grpc_health(&server, Some(PROBES_FROM), service, self.limit).await {
                    Ok(health) if health.is_serving() => Ok(()),
                    Ok(health) => Err(format!("port {port}: the gRPC health service reports {health}")),
                    Err(error) => Err(format!("port {port}: gRPC health: {error}")),
                }
            }
            ProbeAction::Exec(command, environment, view) => self.exec(command, environment, view).await,
        }
    }

    async fn exec(
        &self,
        command: &[String],
        environment: &BTreeMap<String, String>,
        view: &View,
    ) -> Result<(), String> {
        let shown = command.join(" ");
        match process::run(command, environment, view, self.limit).await {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(Some(status)) => Err(format!("`{shown}`: {status}")),
            Ok(None) => Err(format!("`{shown}` takes longer than {:?}", self.limit)),
            Err(error) => Err(format!("`{shown}`: {error}")),
        }
    }
}

/// Source address of probes. Connections from it are not intercepted; see [`crate::rules`].
const PROBES_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 6);
/// Probe interval of a program that is not ready. It grows with each failure, to ten times this value.
const FAST_PERIOD: Duration = Duration::from_millis(100);
/// Reason before the first probe.
pub(crate) const STARTING: &str = "starting";
/// Runtime after which a program that has crashed counts as running again.
const RUNTIME_AFTER_CRASH: Duration = Duration::from_secs(1);

/// Status of a program.
#[derive(Clone, Debug)]
pub(crate) enum ProgramStatus {
    /// It is not started yet, for this reason.
    Waiting(String),
    /// It runs since this time. The text is the reason of the crash before, if there was one.
    Running(Instant, Option<String>),
    /// It has crashed, for this reason, and is restarted.
    Crashed(String),
    /// It has ended with exit code 0 and is not restarted.
    Done,
}

/// Status of a pod's programs: set by the tasks that run them, read by [`watch()`].
#[derive(Debug)]
pub(crate) struct ProgramStatuses {
    statuses: Vec<watch::Sender<ProgramStatus>>,
    kills: Vec<watch::Sender<Option<KillRequest>>>,
    /// Readiness of each program, or the reason why it is not ready.
    ready: RefCell<Vec<Result<(), String>>>,
    changed: Notify,
}

impl ProgramStatuses {
    pub(crate) fn new(programs: usize) -> Self {
        let waiting = || watch::Sender::new(ProgramStatus::Waiting(STARTING.to_owned()));
        Self {
            statuses: std::iter::repeat_with(waiting).take(programs).collect(),
            kills: std::iter::repeat_with(watch::Sender::default).take(programs).collect(),
            ready: RefCell::new(vec![Err(STARTING.to_owned()); programs]),
            changed: Notify::new(),
        }
    }

    /// Sets the status of a program.
    pub(crate) fn set(&self, program: usize, status: ProgramStatus) {
        let Some(known) = self.statuses.get(program) else { return };
        known.send_modify(|known| {
            let before = std::mem::replace(known, status);
            if let (ProgramStatus::Crashed(reason), ProgramStatus::Running(_, crashed)) = (before, known) {
                *crashed = Some(reason);
            }
        });
    }

    /// Returns the requests to end a program.
    pub(crate) fn kills(&self, program: usize) -> Option<KillRequests> {
        self.kills.get(program).map(watch::Sender::subscribe)
    }

    /// Returns whether a program was ready at its last probe.
    pub(crate) fn is_ready(&self, program: usize) -> bool {
        self.ready.borrow().get(program).is_some_and(Result::is_ok)
    }

    fn set_ready(&self, program: usize, state: Result<(), String>) {
        if let Some(known) = self.ready.borrow_mut().get_mut(program) {
            *known = state;
        }
        self.changed.notify_one();
    }
}

/// A program that must run, or have succeeded, for the pod to be ready.
pub(crate) struct MonitoredProgram {
    /// Index in [`ProgramStatuses`].
    pub(crate) program: usize,
    /// Name in messages: `sidecar`, or `container web`.
    pub(crate) name: String,
    pub(crate) check: Option<Check>,
    pub(crate) restart_probes: RestartProbes,
}

/// Reports every change of the pod's readiness. Does not return.
pub(crate) async fn watch(
    address: Ipv4Addr,
    all: &[MonitoredProgram],
    statuses: &ProgramStatuses,
    mut on_change: impl FnMut(Result<(), String>),
) {
    let report = async {
        let mut last_reported = None;
        loop {
            let failed = all.iter().find_map(|one| {
                let reason = statuses.ready.borrow().get(one.program)?.clone().err()?;
                Some(format!("{}: {reason}", one.name))
            });
            let state = failed.map_or(Ok(()), Err);
            if last_reported.as_ref() != Some(&state) {
                on_change(state.clone());
                last_reported = Some(state);
            }
            statuses.changed.notified().await;
        }
    };
    // Each program has a future of its own, so that a slow probe delays no other.
    let monitor_all = join_all(all.iter().map(|one| monitor(address, one, statuses)));
    tokio::select! {
        () = report => {}
        _ = monitor_all => {}
    }
}

/// Updates the readiness of one program.
async fn monitor(address: Ipv4Addr, one: &MonitoredProgram, statuses: &ProgramStatuses) {
    let Some(sender) = statuses.statuses.get(one.program) else { return };
    let mut status = sender.subscribe();
    loop {
        let now = status.borrow_and_update().clone();
        let changed_result = match now {
            ProgramStatus::Running(since, crashed) => {
                // A probe is dropped when its process ends, because its result would be about the next one.
                tokio::select! {
                    changed = status.changed() => changed,
                    () = probe(address, one, statuses, since, crashed) => Ok(()),
                }
            }
            ProgramStatus::Done => {
                statuses.set_ready(one.program, Ok(()));
                status.changed().await
            }
            ProgramStatus::Waiting(reason) | ProgramStatus::Crashed(reason) => {
                statuses.set_ready(one.program, Err(reason));
                status.changed().await
            }
        };
        if changed_result.is_err() {
            return;
        }
    }
}

/// Probes a process that runs since this time, until the caller drops the future.
async fn probe(
    address: Ipv4Addr,
    one: &MonitoredProgram,
    statuses: &ProgramStatuses,
    since: Instant,
    crashed: Option<String>,
) {
    let RestartProbes { startup, liveness } = &one.restart_probes;
    let kill = |field: &str, reason: String, grace: Duration| {
        let reason = format!("{field} failed: {reason}");
        statuses.set_ready(one.program, Err(reason.clone()));
        if let Some(kills) = statuses.kills.get(one.program) {
            kills.send_replace(Some(KillRequest { reason, grace }));
        }
    };
    let (started, mut has_started) = watch::channel(startup.is_none());
    let restart = async {
        if let Some(startup) = startup {
            if let Err(reason) = run_startup_probe(address, startup, since).await {
                kill("startupProbe", reason, startup.grace);
                return std::future::pending().await;
            }
            started.send_replace(true);
        }
        if let Some(liveness) = liveness {
            let reason = run_liveness_probe(address, liveness, since).await;
            kill("livenessProbe", reason, liveness.grace);
        }
        std::future::pending::<()>().await;
    };
    let ready = async {
        if let Some(reason) = crashed {
            statuses.set_ready(one.program, Err(reason));
            sleep_until(since + RUNTIME_AFTER_CRASH).await;
        } else {
            statuses.set_ready(one.program, Err(STARTING.to_owned()));
        }
        // The sender outlives this future.
        let _ = has_started.wait_for(|started| *started).await;
        check_readiness(address, one, statuses).await;
    };
    tokio::select! {
        () = restart => {}
        () = ready => {}
    }
}

/// Runs the startup probe until it succeeds. Fails if it has not succeeded within `failures` periods after the
/// delay.
async fn run_startup_probe(address: Ipv4Addr, startup: &RestartProbe, since: Instant) -> Result<(), String> {
    let RestartProbe { check, delay, .. } = startup;
    let period = check.period.unwrap_or(FAST_PERIOD).max(FAST_PERIOD);
    let until = since + *delay + period * check.failures;
    sleep_until(since + *delay).await;
    for tried in 1.. {
        match check.attempt(address).await {
            Ok(()) => break,
            Err(reason) if Instant::now() >= until => return Err(reason),
            // Probes more often at first, so that the pod is ready sooner.
            Err(_) => sleep((FAST_PERIOD * tried).min(period)).await,
        }
    }
    Ok(())
}

/// Runs the liveness probe until it has failed too often in a row. Returns the last reason.
async fn run_liveness_probe(address: Ipv4Addr, liveness: &RestartProbe, since: Instant) -> String {
    let RestartProbe { check, delay, .. } = liveness;
    sleep_until(since + *delay).await;
    let mut failures = 0;
    loop {
        failures = match check.attempt(address).await {
            Ok(()) => 0,
            Err(reason) if failures + 1 >= check.failures => return reason,
            Err(_) => failures + 1,
        };
        sleep(check.period.unwrap_or(FAST_PERIOD).max(FAST_PERIOD)).await;
    }
}

/// Runs the readiness probe of a program that has started.
async fn check_readiness(address: Ipv4Addr, one: &MonitoredProgram, statuses: &ProgramStatuses) {
    let set_ready = |state| statuses.set_ready(one.program, state);
    let Some(check) = &one.check else {
        set_ready(Ok(()));
        return std::future::pending().await;
    };
    let (mut is_ready, mut failures) = (false, 0);
    loop {
        match check.attempt(address).await {
            Ok(()) => {
                (is_ready, failures) = (true, 0);
                set_ready(Ok(()));
                match check.period {
                    Some(period) => sleep(period.max(FAST_PERIOD)).await,
                    None => return std::future::pending().await,
                }
            }
            Err(reason) => {
                failures += 1;
                if is_ready && failures < check.failures {
                    sleep(check.period.unwrap_or(FAST_PERIOD)).await;
                } else {
                    is_ready = false;
                    set_ready(Err(reason));
                    sleep(FAST_PERIOD * failures.clamp(1, 10)).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Runs `watch` over one program with a check. Passes its reports to `seen` until `seen` returns false.
    async fn following(
        statuses: &ProgramStatuses,
        check: Option<Check>,
        mut seen: impl AsyncFnMut(Result<(), String>) -> bool,
    ) {
        let (last_reported, mut received) = tokio::sync::mpsc::unbounded_channel();
        let monitored = [MonitoredProgram {
            program: 0,
            name: "container web".to_owned(),
            check,
            restart_probes: RestartProbes::default(),
        }];
        tokio::select! {
            () = watch(Ipv4Addr::LOCALHOST, &monitored, statuses, |state| last_reported.send(state).unwrap()) => {}
            () = async { while seen(received.recv().await.unwrap()).await {} } => {}
        }
    }

    #[tokio::test]
    async fn a_crashed_program_is_not_ready_although_its_port_accepts() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = other.local_addr().unwrap().port();
        let statuses = ProgramStatuses::new(1);
        let mut step = 0;
        following(&statuses, Some(Check::accepts(port)), async |state| {
            step += 1;
            match step {
                1 => {
                    assert_eq!(state, Err("container web: starting".to_owned()));
                    statuses.set(0, ProgramStatus::Running(Instant::now(), None));
                }
                2 => {
                    assert_eq!(state, Ok(()));
                    statuses.set(0, ProgramStatus::Crashed("CrashLoopBackOff: exit status: 1".to_owned()));
                }
                3 => {
                    let reason = "container web: CrashLoopBackOff: exit status: 1".to_owned();
                    assert_eq!(state, Err(reason));
                    statuses.set(0, ProgramStatus::Running(Instant::now(), None));
                }
                _ => assert_eq!(state, Ok(())),
            }
            step < 4
        })
        .await;
    }

    #[tokio::test]
    async fn other_probes_wait_for_the_startup_probe_and_a_failure_ends_the_program() {
        let check = |command: &str| Check {
            probe: ProbeAction::Exec(
                ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
                BTreeMap::new(),
                Arc::default(),
            ),
            period: Some(FAST_PERIOD),
            limit: Duration::from_secs(3600),
            failures: 2,
        };
        let probe = |command: &str| RestartProbe {
            check: check(command),
            delay: FAST_PERIOD / 2,
            grace: Duration::from_secs(7),
        };
        for (startup, liveness, reason, after) in [
            // The startup probe has time for all its failures, and the liveness probe does not run.
            (Some("exit 1"), "exit 2", "startupProbe failed: `/bin/sh -c exit 1`: exit status: 1", 250),
            (Some("exit 0"), "exit 2", "livenessProbe failed: `/bin/sh -c exit 2`: exit status: 2", 150),
            (None, "exit 2", "livenessProbe failed: `/bin/sh -c exit 2`: exit status: 2", 150),
        ] {
            let statuses = ProgramStatuses::new(1);
            let mut kills = statuses.kills(0).unwrap();
            let restart_probes =
                RestartProbes { startup: startup.map(probe), liveness: Some(probe(liveness)) };
            let monitored = [MonitoredProgram {
                program: 0,
                name: "container web".to_owned(),
                check: None,
                restart_probes,
            }];
            let since = Instant::now();
            statuses.set(0, ProgramStatus::Running(since, None));
            let mut seen = Vec::new();
            tokio::select! {
                () = watch(Ipv4Addr::LOCALHOST, &monitored, &statuses, |state| seen.push(state)) => {}
                changed = kills.changed() => changed.unwrap(),
            }
            let KillRequest { reason: last_reported, grace } = kills.borrow().clone().unwrap();
            assert_eq!((last_reported.as_str(), grace), (reason, Duration::from_secs(7)));
            assert!(since.elapsed() >= Duration::from_millis(after), "{startup:?}: {:?}", since.elapsed());
            assert_eq!(seen.contains(&Ok(())), startup != Some("exit 1"), "{seen:?}");
        }
    }

    #[tokio::test]
    async fn a_command_is_a_probe() {
        let check = |words: &[&str]| Check {
            probe: ProbeAction::Exec(
                words.iter().map(|word| (*word).to_owned()).collect(),
                BTreeMap::new(),
                Arc::default(),
            ),
            ..Check::accepts(0)
        };
        assert_eq!(check(&["/bin/sh", "-c", "exit 0"]).attempt(Ipv4Addr::LOCALHOST).await, Ok(()));
        let failed = check(&["/bin/sh", "-c", "exit 3"]).attempt(Ipv4Addr::LOCALHOST).await.unwrap_err();
        assert!(failed.contains("exit status: 3"), "{failed}");
        assert!(check(&["/no-such-program"]).attempt(Ipv4Addr::LOCALHOST).await.is_err());
    }
}
