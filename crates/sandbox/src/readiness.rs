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
    process::{self, Kill, Kills},
};

/// Readiness check of a container.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub(crate) probe: Probe,
    /// Probe interval of a ready container; `None` if the end of its program is sufficient.
    pub(crate) period: Option<Duration>,
    pub(crate) limit: Duration,
    /// Number of consecutive failures after which it is not ready.
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
pub(crate) enum Probe {
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
        Self { probe: Probe::Connect(port), period: None, limit: Duration::from_secs(1), failures: 3 }
    }

    async fn attempt(&self, address: Ipv4Addr) -> Result<(), String> {
        let to = |port| SocketAddr::new(IpAddr::V4(address), port);
        match &self.probe {
            Probe::Connect(port) => {
                let connecting = timeout(self.limit, http::connect(to(*port), Some(PROBES_FROM)));
                let answer = match connecting.await {
                    Ok(Ok(_)) => return Ok(()),
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "no answer".to_owned(),
                };
                Err(format!("port {port}: {answer}"))
            }
            Probe::Get(port, path) => {
                match http::status_from(to(*port), PROBES_FROM, path, self.limit).await {
                    Ok(200..=399) => Ok(()),
                    Ok(status) => Err(format!("port {port}: {path} answers {status}")),
                    Err(error) => Err(format!("port {port}: {path}: {error}")),
                }
            }
            Probe::Grpc(port, service) => {
                let server = format!("http://{}", to(*port));
                match http::grpc_health(&server, Some(PROBES_FROM), service, self.limit).await {
                    Ok(health) if health.is_serving() => Ok(()),
                    Ok(health) => Err(format!("port {port}: the gRPC health service reports {health}")),
                    Err(error) => Err(format!("port {port}: gRPC health: {error}")),
                }
            }
            Probe::Exec(command, environment, view) => self.exec(command, environment, view).await,
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
const IMPATIENT: Duration = Duration::from_millis(100);
/// Reason before the first probe.
pub(crate) const STARTING: &str = "starting";
/// Runtime after which a program that has crashed counts as running again.
const PROVED: Duration = Duration::from_secs(1);

/// Status of a program.
#[derive(Clone, Debug)]
pub(crate) enum Life {
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
pub(crate) struct Lives {
    lives: Vec<watch::Sender<Life>>,
    kills: Vec<watch::Sender<Option<Kill>>>,
    /// Readiness of each program, or the reason why it is not ready.
    ready: RefCell<Vec<Result<(), String>>>,
    changed: Notify,
}

impl Lives {
    pub(crate) fn new(programs: usize) -> Self {
        let waiting = || watch::Sender::new(Life::Waiting(STARTING.to_owned()));
        Self {
            lives: std::iter::repeat_with(waiting).take(programs).collect(),
            kills: std::iter::repeat_with(watch::Sender::default).take(programs).collect(),
            ready: RefCell::new(vec![Err(STARTING.to_owned()); programs]),
            changed: Notify::new(),
        }
    }

    /// Sets the status of a program.
    pub(crate) fn set(&self, program: usize, life: Life) {
        let Some(known) = self.lives.get(program) else { return };
        known.send_modify(|known| {
            let before = std::mem::replace(known, life);
            if let (Life::Crashed(reason), Life::Running(_, crashed)) = (before, known) {
                *crashed = Some(reason);
            }
        });
    }

    /// Returns the requests to end a program.
    pub(crate) fn kills(&self, program: usize) -> Option<Kills> {
        self.kills.get(program).map(watch::Sender::subscribe)
    }

    /// Returns whether a program was ready at its last probe.
    pub(crate) fn is_ready(&self, program: usize) -> bool {
        self.ready.borrow().get(program).is_some_and(Result::is_ok)
    }

    fn settle(&self, program: usize, state: Result<(), String>) {
        if let Some(known) = self.ready.borrow_mut().get_mut(program) {
            *known = state;
        }
        self.changed.notify_one();
    }
}

/// A program that must run, or have succeeded, for the pod to be ready.
pub(crate) struct Watched {
    /// Index in [`Lives`].
    pub(crate) program: usize,
    /// Name in messages: `sidecar`, or `container web`.
    pub(crate) name: String,
    pub(crate) check: Option<Check>,
    pub(crate) restart_probes: RestartProbes,
}

/// Reports every change of the pod's readiness. Does not return.
pub(crate) async fn watch(
    address: Ipv4Addr,
    all: &[Watched],
    lives: &Lives,
    mut say: impl FnMut(Result<(), String>),
) {
    let report = async {
        let mut told = None;
        loop {
            let failed = all.iter().find_map(|one| {
                let reason = lives.ready.borrow().get(one.program)?.clone().err()?;
                Some(format!("{}: {reason}", one.name))
            });
            let state = failed.map_or(Ok(()), Err);
            if told.as_ref() != Some(&state) {
                say(state.clone());
                told = Some(state);
            }
            lives.changed.notified().await;
        }
    };
    // Each program has a task of its own, so that a slow probe delays no other.
    let follow_all = join_all(all.iter().map(|one| follow(address, one, lives)));
    tokio::select! {
        () = report => {}
        _ = follow_all => {}
    }
}

/// Updates the readiness of one program.
async fn follow(address: Ipv4Addr, one: &Watched, lives: &Lives) {
    let Some(sender) = lives.lives.get(one.program) else { return };
    let mut life = sender.subscribe();
    loop {
        let now = life.borrow_and_update().clone();
        let settled = match now {
            Life::Running(since, crashed) => {
                // A probe is dropped when its process ends, because its result would be about the next one.
                tokio::select! {
                    changed = life.changed() => changed,
                    () = probe(address, one, lives, since, crashed) => Ok(()),
                }
            }
            Life::Done => {
                lives.settle(one.program, Ok(()));
                life.changed().await
            }
            Life::Waiting(reason) | Life::Crashed(reason) => {
                lives.settle(one.program, Err(reason));
                life.changed().await
            }
        };
        if settled.is_err() {
            return;
        }
    }
}

/// Probes a process that runs since this time, until the caller drops the future.
async fn probe(address: Ipv4Addr, one: &Watched, lives: &Lives, since: Instant, crashed: Option<String>) {
    let RestartProbes { startup, liveness } = &one.restart_probes;
    let kill = |field: &str, reason: String, grace: Duration| {
        let reason = format!("{field} failed: {reason}");
        lives.settle(one.program, Err(reason.clone()));
        if let Some(kills) = lives.kills.get(one.program) {
            kills.send_replace(Some(Kill { reason, grace }));
        }
    };
    let (started, mut has_started) = watch::channel(startup.is_none());
    let restart = async {
        if let Some(startup) = startup {
            if let Err(reason) = start(address, startup, since).await {
                kill("startupProbe", reason, startup.grace);
                return std::future::pending().await;
            }
            started.send_replace(true);
        }
        if let Some(liveness) = liveness {
            let reason = live(address, liveness, since).await;
            kill("livenessProbe", reason, liveness.grace);
        }
        std::future::pending::<()>().await;
    };
    let ready = async {
        if let Some(reason) = crashed {
            lives.settle(one.program, Err(reason));
            sleep_until(since + PROVED).await;
        } else {
            lives.settle(one.program, Err(STARTING.to_owned()));
        }
        // The sender outlives this future.
        let _ = has_started.wait_for(|started| *started).await;
        be_ready(address, one, lives).await;
    };
    tokio::select! {
        () = restart => {}
        () = ready => {}
    }
}

/// Runs the startup probe until it succeeds. Fails after the number of failures, at the probe's period.
async fn start(address: Ipv4Addr, startup: &RestartProbe, since: Instant) -> Result<(), String> {
    let RestartProbe { check, delay, .. } = startup;
    let period = check.period.unwrap_or(IMPATIENT).max(IMPATIENT);
    let until = since + *delay + period * check.failures;
    sleep_until(since + *delay).await;
    for tried in 1.. {
        match check.attempt(address).await {
            Ok(()) => break,
            Err(reason) if Instant::now() >= until => return Err(reason),
            // Probes more often than the period, so that the pod is ready sooner.
            Err(_) => sleep((IMPATIENT * tried).min(period)).await,
        }
    }
    Ok(())
}

/// Runs the liveness probe until it has failed too often in a row. Returns the last reason.
async fn live(address: Ipv4Addr, liveness: &RestartProbe, since: Instant) -> String {
    let RestartProbe { check, delay, .. } = liveness;
    sleep_until(since + *delay).await;
    let mut failures = 0;
    loop {
        failures = match check.attempt(address).await {
            Ok(()) => 0,
            Err(reason) if failures + 1 >= check.failures => return reason,
            Err(_) => failures + 1,
        };
        sleep(check.period.unwrap_or(IMPATIENT).max(IMPATIENT)).await;
    }
}

/// Runs the readiness probe of a program that has started.
async fn be_ready(address: Ipv4Addr, one: &Watched, lives: &Lives) {
    let settle = |state| lives.settle(one.program, state);
    let Some(check) = &one.check else {
        settle(Ok(()));
        return std::future::pending().await;
    };
    let (mut is_ready, mut failures) = (false, 0);
    loop {
        match check.attempt(address).await {
            Ok(()) => {
                (is_ready, failures) = (true, 0);
                settle(Ok(()));
                match check.period {
                    Some(period) => sleep(period.max(IMPATIENT)).await,
                    None => return std::future::pending().await,
                }
            }
            Err(reason) => {
                failures += 1;
                if is_ready && failures < check.failures {
                    sleep(check.period.unwrap_or(IMPATIENT)).await;
                } else {
                    is_ready = false;
                    settle(Err(reason));
                    sleep(IMPATIENT * failures.clamp(1, 10)).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Runs `watch` over one program with a check. Returns its reports.
    async fn following(
        lives: &Lives,
        check: Option<Check>,
        mut seen: impl AsyncFnMut(Result<(), String>) -> bool,
    ) {
        let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
        let watched = [Watched {
            program: 0,
            name: "container web".to_owned(),
            check,
            restart_probes: RestartProbes::default(),
        }];
        tokio::select! {
            () = watch(Ipv4Addr::LOCALHOST, &watched, lives, |state| told.send(state).unwrap()) => {}
            () = async { while seen(heard.recv().await.unwrap()).await {} } => {}
        }
    }

    #[tokio::test]
    async fn a_crashed_program_is_not_ready_although_its_port_accepts() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = other.local_addr().unwrap().port();
        let lives = Lives::new(1);
        let mut step = 0;
        following(&lives, Some(Check::accepts(port)), async |state| {
            step += 1;
            match step {
                1 => {
                    assert_eq!(state, Err("container web: starting".to_owned()));
                    lives.set(0, Life::Running(Instant::now(), None));
                }
                2 => {
                    assert_eq!(state, Ok(()));
                    lives.set(0, Life::Crashed("CrashLoopBackOff: exit status: 1".to_owned()));
                }
                3 => {
                    let reason = "container web: CrashLoopBackOff: exit status: 1".to_owned();
                    assert_eq!(state, Err(reason));
                    lives.set(0, Life::Running(Instant::now(), None));
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
            probe: Probe::Exec(
                ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
                BTreeMap::new(),
                Arc::default(),
            ),
            period: Some(IMPATIENT),
            limit: Duration::from_secs(3600),
            failures: 2,
        };
        let probe = |command: &str| RestartProbe {
            check: check(command),
            delay: IMPATIENT / 2,
            grace: Duration::from_secs(7),
        };
        for (startup, liveness, reason, after) in [
            // The startup probe has time for all its failures, and the liveness probe does not run.
            (Some("exit 1"), "exit 2", "startupProbe failed: `/bin/sh -c exit 1`: exit status: 1", 250),
            (Some("exit 0"), "exit 2", "livenessProbe failed: `/bin/sh -c exit 2`: exit status: 2", 150),
            (None, "exit 2", "livenessProbe failed: `/bin/sh -c exit 2`: exit status: 2", 150),
        ] {
            let lives = Lives::new(1);
            let mut kills = lives.kills(0).unwrap();
            let restart_probes =
                RestartProbes { startup: startup.map(probe), liveness: Some(probe(liveness)) };
            let watched =
                [Watched { program: 0, name: "container web".to_owned(), check: None, restart_probes }];
            let since = Instant::now();
            lives.set(0, Life::Running(since, None));
            let mut seen = Vec::new();
            tokio::select! {
                () = watch(Ipv4Addr::LOCALHOST, &watched, &lives, |state| seen.push(state)) => {}
                changed = kills.changed() => changed.unwrap(),
            }
            let Kill { reason: told, grace } = kills.borrow().clone().unwrap();
            assert_eq!((told.as_str(), grace), (reason, Duration::from_secs(7)));
            assert!(since.elapsed() >= Duration::from_millis(after), "{startup:?}: {:?}", since.elapsed());
            assert_eq!(seen.contains(&Ok(())), startup != Some("exit 1"), "{seen:?}");
        }
    }

    #[tokio::test]
    async fn a_command_is_a_probe() {
        let check = |words: &[&str]| Check {
            probe: Probe::Exec(
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
