//! Supervised processes: restarted with growing pauses when they end, with their output in a file.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use skysail_core::process_group::ProcessGroup;
use tokio::{
    process::{Child, Command},
    sync::watch,
};

use crate::{log::Output, mounts::View};

/// A program and its restart policy.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// Name in messages: the container's name, `proxy` or `control plane`.
    pub(crate) name: String,
    /// File of the program and its arguments.
    pub(crate) command: Vec<String>,
    /// Environment variables beside [`INHERITED`].
    pub(crate) environment: BTreeMap<String, String>,
    /// File for standard output and standard error.
    pub(crate) log: PathBuf,
    /// Restart policy.
    pub(crate) restart: Restart,
    /// Files that the program sees.
    pub(crate) view: Arc<View>,
}

/// Restart policy of a program: a pod's `restartPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restart {
    Always,
    /// Restart after a failure, at most this number of times.
    OnFailure(u32),
    Never,
}

/// Event of a supervised program.
#[derive(Clone, Debug)]
pub(crate) enum ProcessEvent {
    /// The program runs, with this process id, and this file descriptor of its mount namespace if it has a separate
    /// one.
    Started(u32, Option<i32>),
    /// The program could not be started, or has ended.
    Ended(ProcessExit),
}

/// End of a process.
#[derive(Clone, Debug)]
pub(crate) struct ProcessExit {
    /// Description for messages, such as `exit status: 1`.
    pub(crate) how: String,
    /// Exit code; `None` if a signal ended the process.
    pub(crate) code: Option<i32>,
    /// Number of ends in a row without a run longer than [`STABLE_RUNTIME`] between them. Exit code 0 counts too.
    pub(crate) crashes: u32,
    /// Pause before the next start; `None` if the program is not restarted.
    pub(crate) again: Option<Duration>,
}

/// Request to end a process. The program's restart policy then applies.
#[derive(Clone, Debug)]
pub(crate) struct KillRequest {
    pub(crate) reason: String,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
}

/// Requests to end the process that runs at that time.
pub(crate) type KillRequests = watch::Receiver<Option<KillRequest>>;

/// Reason why a program is no longer supervised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinalState {
    /// The program was stopped.
    Stopped,
    /// The program has ended with exit code 0.
    Succeeded,
    /// The program has failed, and its restart policy forbids a restart.
    Failed,
}

impl Program {
    /// Returns the last line of the program's log, which usually tells why it ended.
    pub(crate) fn last_line(&self) -> String {
        last_line(&self.log).unwrap_or_else(|| format!("{} is empty", self.log.display()))
    }
}

/// Returns the last line of a log that is not blank.
pub(crate) fn last_line(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

/// Variables that programs inherit from the environment of `skysail up`.
const INHERITED: [&str; 7] = ["PATH", "HOME", "TERM", "LANG", "TMPDIR", "SKYSAIL_LOG", "RUST_BACKTRACE"];
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Runtime after which [`ProcessExit::crashes`] and the pause are reset.
const STABLE_RUNTIME: Duration = Duration::from_secs(10);
/// Number of bytes at the end of a log that are searched for its last line.
const TAIL: u64 = 8 << 10;

/// Runs a program and restarts it by its policy, until it has finished or `stop` holds the time between SIGTERM and
/// SIGKILL.
///
/// The program starts in the namespaces of the calling thread.
pub(crate) async fn supervise(
    program: &Program,
    mut stop: watch::Receiver<Option<Duration>>,
    mut kills: Option<KillRequests>,
    report: impl Fn(ProcessEvent),
) -> FinalState {
    let mut pause = FIRST_PAUSE;
    let (mut failures, mut crashes) = (0, 0);
    loop {
        let started = Instant::now();
        // Earlier requests were for the previous process.
        kills.iter_mut().for_each(watch::Receiver::mark_unchanged);
        let ended = match spawn(program) {
            Ok((mut child, mut output)) => {
                report(ProcessEvent::Started(child.id().unwrap_or_default(), program.view.handle()));
                let group = ProcessGroup::new(child.id());
                let run = async {
                    tokio::select! {
                        status = child.wait() => Some(status.map_err(|error| error.to_string())),
                        grace = stopping(&mut stop) => {
                            terminate(&mut child, grace).await;
                            None
                        }
                        KillRequest { reason, grace } = killed(kills.as_mut()) => {
                            terminate(&mut child, grace).await;
                            Some(Err(reason))
                        }
                    }
                };
                let status = tokio::select! {
                    status = run => status,
                    never = output.copy() => match never {},
                };
                // A container ends with its first process.
                drop(group);
                output.finish();
                match status {
                    Some(Ok(status)) => (status.to_string(), status.code()),
                    Some(Err(reason)) => (reason, None),
                    None => return FinalState::Stopped,
                }
            }
            Err(error) => (format!("cannot start {}: {error}", program.command.join(" ")), None),
        };
        let (how, code) = ended;
        if started.elapsed() > STABLE_RUNTIME {
            (pause, crashes) = (FIRST_PAUSE, 0);
        }
        let has_succeeded = code == Some(0);
        failures += u32::from(!has_succeeded);
        crashes += 1;
        let restarts = match program.restart {
            Restart::Always => true,
            Restart::OnFailure(limit) => !has_succeeded && failures <= limit,
            Restart::Never => false,
        };
        report(ProcessEvent::Ended(ProcessExit { how, code, crashes, again: restarts.then_some(pause) }));
        if !restarts {
            return if has_succeeded { FinalState::Succeeded } else { FinalState::Failed };
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(MAX_PAUSE),
            _ = stopping(&mut stop) => return FinalState::Stopped,
        }
    }
}

async fn stopping(stop: &mut watch::Receiver<Option<Duration>>) -> Duration {
    match stop.wait_for(Option::is_some).await {
        Ok(grace) => grace.unwrap_or_default(),
        // The sender is gone, so the mesh ends.
        Err(_) => Duration::ZERO,
    }
}

/// Waits for a request; without a source it never returns.
async fn killed(kills: Option<&mut KillRequests>) -> KillRequest {
    if let Some(kills) = kills
        && kills.changed().await.is_ok()
        && let Some(kill) = kills.borrow_and_update().clone()
    {
        return kill;
    }
    std::future::pending().await
}

/// Sends SIGTERM to a process, and SIGKILL after the grace period.
async fn terminate(child: &mut Child, grace: Duration) {
    if let Some(id) = child.id().and_then(|id| i32::try_from(id).ok()) {
        let _ = kill(Pid::from_raw(id), Signal::SIGTERM);
    }
    if tokio::time::timeout(grace, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
}

fn spawn(program: &Program) -> io::Result<(Child, Output)> {
    let (file, arguments) =
        program.command.split_first().ok_or_else(|| io::Error::other("the command is empty"))?;
    let (log, output) = Output::new(&program.log)?;
    program.view.renew()?;
    let child = program.view.within(|| command(program, file, arguments, log)?.spawn())?;
    Ok((child, output))
}

/// Runs a command with the environment and the files of a container, and returns how it ended; `None` if it exceeds the
/// limit. Discards its output and leaves no process of it, also if the future is dropped.
pub(crate) async fn run(
    words: &[String],
    environment: &BTreeMap<String, String>,
    view: &View,
    limit: Duration,
) -> io::Result<Option<ExitStatus>> {
    let (file, arguments) = words.split_first().ok_or_else(|| io::Error::other("the command is empty"))?;
    let mut command = isolated_command(file, arguments, environment);
    let mut child = view.within(|| command.stdout(Stdio::null()).stderr(Stdio::null()).spawn())?;
    let _group = ProcessGroup::new(child.id());
    tokio::time::timeout(limit, child.wait()).await.ok().transpose()
}

/// Returns the command of a program. The command holds the write end of the log's pipe, so the caller must drop it
/// after the start.
fn command(program: &Program, file: &str, arguments: &[String], log: OwnedFd) -> io::Result<Command> {
    let mut command = isolated_command(file, arguments, &program.environment);
    command.stdout(log.try_clone()?).stderr(log);
    Ok(command)
}

/// Returns a command in a process group of its own, with this environment and the variables of [`INHERITED`].
fn isolated_command(file: &str, arguments: &[String], environment: &BTreeMap<String, String>) -> Command {
    let inherited = INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    let mut command = Command::new(file);
    command
        .args(arguments)
        .env_clear()
        .envs(inherited)
        // The output of programs goes to files.
        .env("NO_COLOR", "1")
        .envs(environment)
        .stdin(Stdio::null())
        // A Ctrl-C on the terminal is for `skysail up` alone, and the group can be ended as a whole.
        .process_group(0)
        .kill_on_drop(true);
    command
}

#[cfg(test)]
mod tests {
    use nix::{sys::stat::Mode, unistd::mkfifo};
    use tokio::{io::AsyncReadExt as _, sync::mpsc};

    use super::*;

    #[tokio::test]
    async fn a_probe_that_is_given_up_leaves_no_process() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        let script = format!("(echo started; sleep 20; echo survived) > {} & wait", pipe.display());
        let (words, none) = (["/bin/sh", "-c", &script].map(str::to_owned), BTreeMap::new());
        let view = View::default();
        let (mut output, mut text) = (None, String::new());
        tokio::select! {
            result = run(&words, &none, &view, Duration::MAX) => panic!("{result:?}"),
            () = async {
                let opened = output.insert(tokio::fs::File::open(&pipe).await.unwrap());
                while !text.contains('\n') {
                    text.push(opened.read_u8().await.unwrap().into());
                }
            } => {}
        }
        // The end of the pipe comes when its last writer has ended.
        output.unwrap().read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "started\n");
    }

    #[tokio::test]
    async fn a_program_is_restarted_until_it_is_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let program = Program {
            name: "p".to_owned(),
            command: ["/bin/sh", "-c", "echo $GREETING; exit 3"].map(str::to_owned).to_vec(),
            environment: BTreeMap::from([("GREETING".to_owned(), "hello".to_owned())]),
            log: folder.path().join("logs/p.log"),
            restart: Restart::Always,
            view: Arc::default(),
        };
        let (stop, stopped) = watch::channel(None);
        let (events, mut outcomes) = mpsc::unbounded_channel();
        let keeping = tokio::spawn({
            let program = program.clone();
            async move { supervise(&program, stopped, None, |outcome| events.send(outcome).unwrap()).await }
        });
        for _ in 0..2 {
            assert!(matches!(outcomes.recv().await, Some(ProcessEvent::Started(..))));
            let Some(ProcessEvent::Ended(ended)) = outcomes.recv().await else { panic!("it ends") };
            assert_eq!((ended.code, ended.again.is_some()), (Some(3), true), "{ended:?}");
        }
        stop.send_replace(Some(Duration::ZERO));
        assert_eq!(keeping.await.unwrap(), FinalState::Stopped);
        assert_eq!(program.last_line(), "hello");
        assert!(std::fs::read_to_string(&program.log).unwrap().starts_with("hello\nhello\n"));
    }

    #[tokio::test]
    async fn the_size_of_a_log_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let program = Program {
            name: "p".to_owned(),
            command: ["/bin/sh", "-c", "head -c 60000000 /dev/zero; echo; echo the end"]
                .map(str::to_owned)
                .to_vec(),
            environment: BTreeMap::new(),
            log: folder.path().join("p.log"),
            restart: Restart::Never,
            view: Arc::default(),
        };
        let (_stop, stopped) = watch::channel(None);
        assert_eq!(supervise(&program, stopped, None, |_| ()).await, FinalState::Succeeded);
        assert_eq!(program.last_line(), "the end");
        let files = std::fs::read_dir(folder.path()).unwrap();
        let taken: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
        assert!((16 << 20..=32 << 20).contains(&taken), "{taken}");
    }

    #[tokio::test]
    async fn a_program_is_not_restarted_after_success_or_too_many_failures() {
        let folder = tempfile::tempdir().unwrap();
        let run = async |command: &str, restart| {
            let program = Program {
                name: "p".to_owned(),
                command: ["/bin/sh", "-c", command].map(str::to_owned).to_vec(),
                environment: BTreeMap::new(),
                log: folder.path().join("p.log"),
                restart,
                view: Arc::default(),
            };
            let starts = std::cell::Cell::new(0);
            let (_stop, stopped) = watch::channel(None);
            let finish = supervise(&program, stopped, None, |outcome| {
                starts.set(starts.get() + u32::from(matches!(outcome, ProcessEvent::Started(..))));
            })
            .await;
            (finish, starts.get())
        };
        assert_eq!(run("exit 0", Restart::OnFailure(1)).await, (FinalState::Succeeded, 1));
        assert_eq!(run("exit 1", Restart::OnFailure(1)).await, (FinalState::Failed, 2));
        assert_eq!(run("exit 1", Restart::Never).await, (FinalState::Failed, 1));
    }
}
