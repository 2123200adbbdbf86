//! Flame graphs of sidecars during a turn: `perf record` samples their stacks, [`flame`](crate::flame) draws them.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, bail, ensure};
use tokio::process::Command;

use crate::{
    child::{Running, Scheduling},
    flame::FlameFrame,
    peers::in_path,
};

/// Samples per second and CPU. The event is a timer of the kernel, which virtual machines have too.
const FREQUENCY: &str = "499";
const EVENT: &str = "cpu-clock";
/// Unwinding by tables, because programs are built without frame pointers.
const CALL_GRAPH: &str = "dwarf,16384";
/// What to do if `perf` does not work.
const REMEDY: &str =
    "run as root, or permit it with sysctl kernel.perf_event_paranoid=1, or leave --perf out";

/// Recording of the sidecars of a turn.
pub(crate) struct PerfRecording {
    program: PathBuf,
    sidecars: Vec<(String, Running, PathBuf)>,
}

/// Checks that stacks can be sampled.
///
/// # Errors
/// `perf` is not installed or not permitted. The error has the remedy.
pub(crate) fn check() -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("cannot make a folder")?;
    let data = folder.path().join("check.data");
    let mut command = std::process::Command::new(program()?);
    command.args(["record", "--event", EVENT, "--output"]).arg(&data).args(["--", "true"]);
    let output = command.stdin(Stdio::null()).output().context("cannot start perf")?;
    ensure!(
        output.status.success(),
        "--perf: perf record is not permitted: {}; {REMEDY}",
        last_line(&output.stderr)
    );
    Ok(())
}

fn program() -> anyhow::Result<PathBuf> {
    in_path("perf").context(
        "--perf: perf is not installed: install the package linux-perf (Debian) or linux-tools-generic (Ubuntu), or leave \
         --perf out",
    )
}

fn last_line(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message").trim().to_owned()
}

impl PerfRecording {
    /// Starts to record these sidecars: their names, with their processes.
    ///
    /// # Errors
    /// `perf` is not installed, or cannot be started.
    pub(crate) fn start(sidecars: &[(&str, Vec<i32>)], folder: &Path) -> anyhow::Result<Self> {
        let program = program()?;
        let mut recorded = Vec::new();
        for (name, pids) in sidecars {
            let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
            let data = folder.join(format!("{name}.data"));
            let mut command = vec![program.clone().into_os_string()];
            command.extend(["record", "--event", EVENT, "--freq", FREQUENCY].map(OsString::from));
            command.extend(
                ["--call-graph", CALL_GRAPH, "--pid", &pids.join(","), "--output"].map(OsString::from),
            );
            command.push(data.clone().into_os_string());
            let running = Running::start(&format!("{name}-perf"), &command, folder, Scheduling::default())?;
            recorded.push(((*name).to_owned(), running, data));
        }
        Ok(Self { program, sidecars: recorded })
    }

    /// Ends the recording, and writes a flame graph of each sidecar. `prefix` is the start of the names of the files, and
    /// `title` that of the headings.
    ///
    /// # Errors
    /// A recording has no sample, or a file cannot be written.
    pub(crate) async fn finish(self, prefix: &Path, title: &str) -> anyhow::Result<()> {
        for (name, running, data) in self.sidecars {
            let output = running.output_tail();
            // perf writes the end of the file before it ends.
            running.stop().await;
            let mut command = Command::new(&self.program);
            command.args(["script", "--no-inline", "--fields", "comm,ip,sym", "--input"]).arg(&data);
            let script = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
            if !script.status.success() {
                bail!(
                    "perf script failed: {}; perf record wrote: {output}; {REMEDY}",
                    last_line(&script.stderr)
                );
            }
            let root = FlameFrame::fold(&String::from_utf8_lossy(&script.stdout));
            ensure!(
                root.samples > 0,
                "perf recorded no sample of {name}: it used no CPU time; raise the rate"
            );
            let heading = format!("{title}: {name}");
            let subtitle = format!(
                "{} samples, {FREQUENCY} per second of CPU time, with the warm-up. The width of a function is its share of the \
                 CPU time.",
                root.samples
            );
            let mut file = prefix.as_os_str().to_owned();
            file.push(format!("-{name}.svg"));
            let file = PathBuf::from(file);
            fs::write(&file, root.svg(&heading, &subtitle))
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
        Ok(())
    }
}
