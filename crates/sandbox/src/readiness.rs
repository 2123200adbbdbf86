//! Whether a pod is ready: how its programs do, and what its probes say.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Stdio,
    time::Duration,
};

use tokio::{
    process::Command,
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

use crate::http;

/// How to find out whether a container is ready.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    pub(crate) probe: Probe,
    /// How often to probe a container that is ready; `None` where the end of its program says enough.
    pub(crate) period: Option<Duration>,
    pub(crate) limit: Duration,
    /// So many failures in a row make it not ready.
    pub(crate) failures: u32,
}

/// What to try.
#[derive(Clone, Debug)]
pub(crate) enum Probe {
    /// A port accepts.
    Connect(u16),
    /// A page is there.
    Get(u16, String),
    /// A gRPC server's health service says so (grpc.health.v1), for this service.
    Grpc(u16, String),
    /// A command succeeds, with this environment.
    Exec(Vec<String>, BTreeMap<String, String>),
}

impl Check {
    /// The port accepts, as long as the program runs.
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
                match http::get_from(to(*port), Some(PROBES_FROM), path, self.limit).await {
                    Ok((200..=399, _)) => Ok(()),
                    Ok((status, _)) => Err(format!("port {port}: {path} answers {status}")),
                    Err(error) => Err(format!("port {port}: {path}: {error}")),
                }
            }
            Probe::Grpc(port, service) => {
                let server = format!("http://{}", to(*port));
                match http::grpc_health(&server, Some(PROBES_FROM), service, self.limit).await {
                    Ok(health) if health.is_serving() => Ok(()),
                    Ok(health) => Err(format!("port {port}: the gRPC health service says {health}")),
                    Err(error) => Err(format!("port {port}: gRPC health: {error}")),
                }
            }
            Probe::Exec(command, environment) => self.exec(command, environment).await,
        }
    }

    async fn exec(&self, command: &[String], environment: &BTreeMap<String, String>) -> Result<(), String> {
        let shown = command.join(" ");
        let Some((program, arguments)) = command.split_first() else { return Ok(()) };
        let mut command = Command::new(program);
        command.args(arguments).envs(environment).stdin(Stdio::null()).kill_on_drop(true);
        match timeout(self.limit, command.stdout(Stdio::null()).stderr(Stdio::null()).status()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(format!("`{shown}`: {status}")),
            Ok(Err(error)) => Err(format!("`{shown}`: {error}")),
            Err(_) => Err(format!("`{shown}` takes longer than {:?}", self.limit)),
        }
    }
}

/// Connections from here are not intercepted; see [`crate::rules`].
const PROBES_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 6);
/// What is not ready is probed this often at first, and after ten failures ten times as rarely.
const IMPATIENT: Duration = Duration::from_millis(100);
/// A program that has crashed counts as running again after this time.
const PROVED: Duration = Duration::from_secs(1);

/// How a program does.
#[derive(Clone, Debug)]
pub(crate) enum Life {
    /// It is not started yet, with the reason.
    Waiting(String),
    /// It runs since then; the reason for which it was not running before, if it had crashed.
    Running(Instant, Option<String>),
    /// It has crashed, with the reason, and is started again.
    Crashed(String),
    /// It has done its work.
    Done,
}

/// How the programs of a pod do: told by those who run them, read by who tells whether the pod is ready.
#[derive(Debug)]
pub(crate) struct Lives {
    lives: RefCell<Vec<Life>>,
    /// Which of them are ready.
    ready: RefCell<Vec<bool>>,
    changed: Notify,
}

impl Lives {
    pub(crate) fn new(programs: usize) -> Self {
        let waiting = Life::Waiting("starting".to_owned());
        Self {
            lives: RefCell::new(vec![waiting; programs]),
            ready: RefCell::new(vec![false; programs]),
            changed: Notify::new(),
        }
    }

    /// Says how a program does now.
    pub(crate) fn set(&self, program: usize, life: Life) {
        let mut lives = self.lives.borrow_mut();
        let Some(known) = lives.get_mut(program) else { return };
        let before = std::mem::replace(known, life);
        if let (Life::Crashed(reason), Life::Running(_, crashed)) = (before, known) {
            *crashed = Some(reason);
        }
        self.changed.notify_one();
    }

    /// Whether a program was ready when it was looked at last.
    pub(crate) fn is_ready(&self, program: usize) -> bool {
        self.ready.borrow().get(program).is_some_and(|ready| *ready)
    }

    fn get(&self, program: usize) -> Life {
        self.lives.borrow()[program].clone()
    }
}

/// A program of a pod that must run, or be done, for the pod to be ready.
pub(crate) struct Watched {
    /// Its place in [`Lives`].
    pub(crate) program: usize,
    /// What messages call it: `sidecar`, or `container web`.
    pub(crate) name: String,
    pub(crate) check: Option<Check>,
}

/// What is known of one that is watched.
struct Known<'a> {
    watched: &'a Watched,
    state: Result<(), String>,
    failures: u32,
    /// When to look again; `None`: when its program starts or ends.
    due: Option<Instant>,
    /// Since when its program runs.
    since: Option<Instant>,
}

/// Tells of every change of the pod's readiness, for ever.
pub(crate) async fn watch(
    address: Ipv4Addr,
    all: &[Watched],
    lives: &Lives,
    mut say: impl FnMut(Result<(), String>),
) {
    let known = |watched| Known { watched, state: Ok(()), failures: 0, due: None, since: None };
    let mut known: Vec<Known<'_>> = all.iter().map(known).collect();
    let mut told = None;
    loop {
        for one in &mut known {
            one.look(address, lives).await;
            lives.ready.borrow_mut()[one.watched.program] = one.state.is_ok();
        }
        let failed = known.iter().find_map(|one| {
            let reason = one.state.as_ref().err()?;
            Some(format!("{}: {reason}", one.watched.name))
        });
        let state = failed.map_or(Ok(()), Err);
        if told.as_ref() != Some(&state) {
            say(state.clone());
            told = Some(state);
        }
        let due = known.iter().filter_map(|one| one.due).min();
        tokio::select! {
            () = lives.changed.notified() => {}
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
    }
}

impl Known<'_> {
    async fn look(&mut self, address: Ipv4Addr, lives: &Lives) {
        let now = Instant::now();
        let (since, crashed) = match lives.get(self.watched.program) {
            Life::Running(since, crashed) => (since, crashed),
            Life::Done => return self.settle(Ok(()), None),
            Life::Waiting(reason) | Life::Crashed(reason) => return self.settle(Err(reason), None),
        };
        if self.since.replace(since) != Some(since) {
            // It is another process: nothing is known of it.
            (self.state, self.failures, self.due) = (Err("starting".to_owned()), 0, Some(now));
        }
        if self.due.is_none_or(|due| due > now) {
            return;
        }
        if let Some(reason) = crashed.filter(|_| since.elapsed() < PROVED) {
            return self.settle(Err(reason), Some(since + PROVED));
        }
        let Some(check) = &self.watched.check else { return self.settle(Ok(()), None) };
        match check.attempt(address).await {
            Ok(()) => {
                self.failures = 0;
                self.settle(Ok(()), check.period.map(|period| now + period.max(IMPATIENT)));
            }
            Err(reason) => {
                self.failures += 1;
                let is_ready = self.state.is_ok();
                if is_ready && self.failures < check.failures {
                    self.due = Some(now + check.period.unwrap_or(IMPATIENT));
                } else {
                    self.settle(Err(reason), Some(now + IMPATIENT * self.failures.clamp(1, 10)));
                }
            }
        }
    }

    fn settle(&mut self, state: Result<(), String>, due: Option<Instant>) {
        (self.state, self.due) = (state, due);
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Runs `watch` over one program with a check, and gives what it says.
    async fn following(
        lives: &Lives,
        check: Option<Check>,
        mut seen: impl AsyncFnMut(Result<(), String>) -> bool,
    ) {
        let (told, mut heard) = tokio::sync::mpsc::unbounded_channel();
        let watched = [Watched { program: 0, name: "container web".to_owned(), check }];
        tokio::select! {
            () = watch(Ipv4Addr::LOCALHOST, &watched, lives, |state| told.send(state).unwrap()) => {}
            () = async { while seen(heard.recv().await.unwrap()).await {} } => {}
        }
    }

    #[tokio::test]
    async fn a_program_that_crashes_is_not_ready_though_its_port_accepts() {
        let listener = TcpListener::bind((PROBES_FROM, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let _other = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.unwrap();
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
    async fn commands_are_probes_too() {
        let check = |words: &[&str]| Check {
            probe: Probe::Exec(words.iter().map(|word| (*word).to_owned()).collect(), BTreeMap::new()),
            ..Check::accepts(0)
        };
        assert_eq!(check(&["/bin/sh", "-c", "exit 0"]).attempt(Ipv4Addr::LOCALHOST).await, Ok(()));
        let failed = check(&["/bin/sh", "-c", "exit 3"]).attempt(Ipv4Addr::LOCALHOST).await.unwrap_err();
        assert!(failed.contains("exit status: 3"), "{failed}");
        assert!(check(&["/no-such-program"]).attempt(Ipv4Addr::LOCALHOST).await.is_err());
    }
}
