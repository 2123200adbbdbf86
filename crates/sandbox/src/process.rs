//! Processes that are kept running: started again with growing pauses when they end, their output in a file.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io,
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill, killpg},
    unistd::Pid,
};
use tokio::{
    process::{Child, Command},
    sync::watch,
};

/// A program to keep running.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// What messages call it: the container's name, or `proxy`.
    pub(crate) name: String,
    /// The program's file and its arguments.
    pub(crate) command: Vec<String>,
    /// Its environment, besides what all programs get.
    pub(crate) environment: BTreeMap<String, String>,
    /// Gets its standard output and error.
    pub(crate) log: PathBuf,
}

/// Something that happened to a program.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// It runs, under this process number.
    Started(u32),
    /// It could not be started, or has ended; it is started again.
    Ended(String),
}

/// What all programs get from the environment of `skysail up`.
const INHERITED: [&str; 7] = ["PATH", "HOME", "TERM", "LANG", "TMPDIR", "SKYSAIL_LOG", "RUST_BACKTRACE"];
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A program that ran this long is no longer counted as failing.
const SETTLED: Duration = Duration::from_secs(10);

/// Keeps a program running until `stop` holds the time it gets for ending by itself.
///
/// It is started in the namespaces of the calling thread.
pub(crate) async fn keep(
    program: &Program,
    mut stop: watch::Receiver<Option<Duration>>,
    report: impl Fn(Outcome),
) {
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        let ended = match spawn(program) {
            Ok(mut child) => {
                report(Outcome::Started(child.id().unwrap_or_default()));
                let group = child.id();
                tokio::select! {
                    status = child.wait() => {
                        end_group(group);
                        status.map_or_else(|error| error.to_string(), |s| s.to_string())
                    }
                    grace = stopping(&mut stop) => return end(child, grace).await,
                }
            }
            Err(error) => format!("cannot start {}: {error}", program.command.join(" ")),
        };
        if started.elapsed() > SETTLED {
            pause = FIRST_PAUSE;
        }
        report(Outcome::Ended(ended));
        tokio::select! {
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
            _ = stopping(&mut stop) => return,
        }
    }
}

async fn stopping(stop: &mut watch::Receiver<Option<Duration>>) -> Duration {
    match stop.wait_for(Option::is_some).await {
        Ok(grace) => grace.unwrap_or_default(),
        // Nobody is left to tell, so the mesh ends.
        Err(_) => Duration::ZERO,
    }
}

/// Asks a process to end, and makes it end when it takes too long.
async fn end(mut child: Child, grace: Duration) {
    let group = child.id();
    if let Some(id) = group.and_then(|id| i32::try_from(id).ok()) {
        let _ = kill(Pid::from_raw(id), Signal::SIGTERM);
    }
    if tokio::time::timeout(grace, child.wait()).await.is_err() {
        let _ = child.kill().await;
    }
    end_group(group);
}

/// Ends what a program left behind: a container's processes end with its first.
fn end_group(group: Option<u32>) {
    if let Some(group) = group.and_then(|id| i32::try_from(id).ok()) {
        // Mostly there is nothing left.
        let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
    }
}

fn spawn(program: &Program) -> io::Result<Child> {
    let (file, arguments) =
        program.command.split_first().ok_or_else(|| io::Error::other("the command is empty"))?;
    let log = open_log(program)?;
    let inherited = INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    Command::new(file)
        .args(arguments)
        .env_clear()
        .envs(inherited)
        // Their output goes to files.
        .env("NO_COLOR", "1")
        .envs(&program.environment)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        // A Ctrl-C on the terminal is for `skysail up` alone, and what it starts can be ended with it.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

fn open_log(program: &Program) -> io::Result<File> {
    if let Some(folder) = program.log.parent() {
        std::fs::create_dir_all(folder)?;
    }
    OpenOptions::new().create(true).append(true).open(&program.log)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;

    #[tokio::test]
    async fn a_program_is_started_again_until_it_is_stopped() {
        let folder = tempfile::tempdir().unwrap();
        let program = Program {
            name: "p".to_owned(),
            command: ["/bin/sh", "-c", "echo $GREETING; exit 3"].map(str::to_owned).to_vec(),
            environment: BTreeMap::from([("GREETING".to_owned(), "hello".to_owned())]),
            log: folder.path().join("logs/p.log"),
        };
        let (stop, stopped) = watch::channel(None);
        let (told, mut outcomes) = mpsc::unbounded_channel();
        let keeping = tokio::spawn({
            let program = program.clone();
            async move { keep(&program, stopped, |outcome| told.send(outcome).unwrap()).await }
        });
        for _ in 0..2 {
            assert!(matches!(outcomes.recv().await, Some(Outcome::Started(_))));
            let Some(Outcome::Ended(how)) = outcomes.recv().await else { panic!("it ends") };
            assert!(how.contains('3'), "{how}");
        }
        stop.send_replace(Some(Duration::ZERO));
        keeping.await.unwrap();
        assert!(std::fs::read_to_string(&program.log).unwrap().starts_with("hello\nhello\n"));
    }
}
