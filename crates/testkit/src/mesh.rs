//! A mesh that runs until its test ends.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::{fs::chown, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::{cache::envoy, load::Load, program::install, wait::eventually};

/// Configuration of a mesh to start.
#[derive(Clone, Debug)]
pub struct Setup {
    binary: PathBuf,
    /// Temporary folder: `config` holds the mesh's configuration, `run` its run-time files.
    folder: Arc<TempDir>,
    arguments: Vec<String>,
    user: Option<u32>,
    /// The user's default parent folder of run folders, if the mesh uses it instead of `run`.
    default_run_folder: Option<PathBuf>,
    /// Mesh and workload inside which this mesh runs.
    host: Option<(Box<Setup>, String)>,
}

/// A running mesh. It ends with the test, even if the test fails.
#[derive(Debug)]
pub struct Mesh {
    setup: Setup,
    child: Option<Child>,
    output: Arc<Mutex<Text>>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Text {
    stdout: String,
    stderr: String,
}

/// Exit status and output of a mesh that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Result of a call.
#[derive(Debug)]
pub struct Answer {
    /// Status of the response; `None` if there was no response.
    pub status: Option<u16>,
    /// Body of the response; without a response, the error.
    pub body: String,
}

impl Setup {
    /// Configures a mesh with a copy of the files in `config`, so that a test may change them.
    pub fn of_folder(binary: &str, config: &Path) -> Self {
        let setup = Self::empty(binary);
        copy_folder(config, &setup.config());
        setup
    }

    /// Configures a mesh with one file of this text.
    pub fn of_text(binary: &str, text: &str) -> Self {
        let setup = Self::empty(binary);
        fs::create_dir(setup.config()).unwrap();
        fs::write(setup.config().join("mesh.yaml"), text).unwrap();
        setup
    }

    fn empty(binary: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("skysail-test-").tempdir().unwrap();
        fs::create_dir(folder.path().join("run")).unwrap();
        Self {
            binary: binary.into(),
            folder: Arc::new(folder),
            arguments: Vec::new(),
            user: None,
            default_run_folder: None,
            host: None,
        }
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("config")
    }

    /// Adds a file to the configuration.
    pub fn add(&self, file: &Path) {
        fs::copy(file, self.config().join(file.file_name().unwrap())).unwrap();
    }

    /// Writes a file of the configuration.
    pub fn put(&self, file: &str, text: &str) {
        fs::write(self.config().join(file), text).unwrap();
    }

    /// Adds arguments of `skysail up`.
    #[must_use]
    pub fn with(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// Runs a real Envoy in place of the sidecars of these workloads, `NAMESPACE/NAME`.
    #[must_use]
    pub fn with_envoys(mut self, workloads: &[&str]) -> Self {
        for workload in workloads {
            self.arguments.extend(["--envoy".to_owned(), format!("{workload}={}", envoy().display())]);
        }
        self
    }

    /// Runs the mesh as this user. Only root can run it as another user.
    #[must_use]
    pub fn as_user(mut self, user: u32) -> Self {
        // The user cannot execute a program in a folder that it cannot enter.
        let copy = self.folder.path().join("skysail");
        install(&self.binary, &copy);
        self.binary = copy;
        own(self.folder.path(), user).unwrap();
        self.user = Some(user);
        self
    }

    /// Runs the mesh without `XDG_RUNTIME_DIR` and under this name, which no other mesh of the user may have.
    #[must_use]
    pub fn in_default_run_folder(mut self, name: &str) -> Self {
        let user = self.user.unwrap_or_else(|| Uid::current().as_raw());
        self.default_run_folder = Some(PathBuf::from(format!("/tmp/skysail-{user}")));
        self.with(&["--name", name])
    }

    /// Runs the mesh inside a workload of another mesh. The mesh then uses the workload's network as the
    /// machine's network.
    #[must_use]
    pub fn inside(mut self, mesh: &Mesh, workload: &str) -> Self {
        if let Some(user) = mesh.setup.user {
            own(self.folder.path(), user).unwrap();
        }
        self.binary.clone_from(&mesh.setup.binary);
        self.host = Some((Box::new(mesh.setup.clone()), workload.to_owned()));
        self
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let run = self.folder.path().join("run");
        if let Some((host, workload)) = &self.host {
            let (run, binary) = (format!("XDG_RUNTIME_DIR={}", run.display()), self.binary.to_string_lossy());
            return host.command(&[&["exec", workload, "--", "env", &run, &binary], arguments].concat());
        }
        let mut command = Command::new(&self.binary);
        command.args(arguments);
        match &self.default_run_folder {
            Some(_) => command.env_remove("XDG_RUNTIME_DIR"),
            None => command.env("XDG_RUNTIME_DIR", run),
        };
        command.current_dir(self.folder.path());
        if let Some(user) = self.user {
            command.uid(user).gid(user);
        }
        command
    }

    /// Starts the mesh.
    pub fn start(self) -> Mesh {
        let config = self.config();
        let mut command = self.command(&["up", &config.to_string_lossy()]);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = Arc::new(Mutex::new(Text::default()));
        let readers = vec![
            read(child.stdout.take().unwrap(), &output, |text| &mut text.stdout),
            read(child.stderr.take().unwrap(), &output, |text| &mut text.stderr),
        ];
        Mesh { setup: self, child: Some(child), output, readers }
    }

    /// Starts the mesh and waits until all workloads are ready.
    pub fn ready(self) -> Mesh {
        let mesh = self.start();
        mesh.wait_ready();
        mesh
    }
}

impl Mesh {
    /// Waits until every workload is ready.
    pub fn wait_ready(&self) {
        self.wait_for_output(" ready after ");
    }

    /// Waits until the output contains this text.
    pub fn wait_for_output(&self, what: &str) {
        self.wait(&format!("the output of the mesh contains {what:?}"), |output| {
            if output.contains(what) { Ok(()) } else { Err(format!("the output is:\n{output}")) }
        });
    }

    /// Waits until `look` finds something in the output so far.
    pub fn wait<T>(&self, what: &str, mut look: impl FnMut(&str) -> Result<T, String>) -> T {
        eventually(what, || look(&self.output()))
    }

    /// Returns the address of a published port. `target` is `NAMESPACE/NAME:PORT`.
    pub fn published(&self, target: &str) -> SocketAddr {
        let output = self.output();
        let target = format!(" -> {target}");
        let is_it = |line: &&str| line.split_once(" (").map_or(*line, |(line, _)| line).ends_with(&target);
        let mut lines = output.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let line = lines.find(is_it).unwrap_or_else(|| panic!("{target}: {output}"));
        let address = line.split_whitespace().nth(1).unwrap();
        address.split("//").last().unwrap().parse().unwrap()
    }

    /// Returns the output so far.
    pub fn output(&self) -> String {
        let text = self.output.lock().unwrap();
        format!("{}{}", text.stdout, text.stderr)
    }

    /// Returns the folder of the configuration.
    pub fn config(&self) -> PathBuf {
        self.setup.config()
    }

    /// Returns the folder of the mesh's run-time files.
    pub fn run_folder(&self) -> PathBuf {
        self.setup.default_run_folder.clone().unwrap_or_else(|| self.setup.folder.path().join("run/skysail"))
    }

    /// Returns the process id of `skysail up`.
    pub fn process(&self) -> u32 {
        self.child.as_ref().expect("the mesh runs").id()
    }

    /// Replaces text in a file of the configuration.
    pub fn edit(&self, file: &str, from: &str, to: &str) {
        let path = self.config().join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{file} has no {from:?}");
        self.put(file, &text.replacen(from, to, 1));
    }

    /// Writes a file of the configuration as editors do: a temporary file, then a rename.
    pub fn put(&self, file: &str, text: &str) {
        let path = self.config().join(file);
        let new = self.config().join(format!(".{file}.swp"));
        fs::write(&new, text).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// Runs `skysail` against this mesh.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Returns the command that runs `skysail` with these arguments against this mesh.
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.setup.command(arguments)
    }

    /// Returns the output of `skysail status` as JSON.
    pub fn status(&self) -> Value {
        let output = self.run(&["status", "--output", "json"]);
        let text = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr)))
    }

    /// Returns the number of ready pods of a workload and the number of all its pods.
    pub fn pods(&self, workload: &str) -> (usize, usize) {
        let status = self.status();
        let pods = status["pods"].as_array().unwrap().iter().filter(|pod| pod["workload"] == workload);
        pods.fold((0, 0), |(ready, all), pod| (ready + usize::from(pod["ready"] == true), all + 1))
    }

    /// Returns the names of a workload's pods.
    pub fn names(&self, workload: &str) -> Vec<String> {
        let status = self.status();
        let pods = status["pods"].as_array().unwrap().iter().filter(|pod| pod["workload"] == workload);
        pods.map(|pod| pod["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until the removed pods of `before` have ended, as the last log lines of their sidecars show.
    pub fn wait_gone(&self, namespace: &str, workload: &str, before: &[String]) {
        let now = self.names(workload);
        for name in before.iter().filter(|name| !now.contains(name)) {
            let log = self.run_folder().join(format!("config/logs/{namespace}/{name}/proxy.log"));
            eventually("the pod has ended", || {
                let text = fs::read_to_string(&log).unwrap();
                if text.contains("drained") { Ok(()) } else { Err(text) }
            });
        }
    }

    /// Sends one request from inside a workload.
    pub fn call(&self, workload: &str, url: &str, arguments: &[&str]) -> Answer {
        let output = self.run(&[&["call", workload, url], arguments].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        match stderr.trim().parse() {
            Ok(status) => {
                let body = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
                Answer { status: Some(status), body }
            }
            Err(_) => Answer { status: None, body: stderr.into_owned() },
        }
    }

    /// Waits until a call gets this status. A pod is ready shortly before every other sidecar has its endpoint.
    pub fn wait_status(&self, workload: &str, url: &str, arguments: &[&str], status: u16) {
        eventually(&format!("{url} answers {workload} with {status}"), || {
            let answer = self.call(workload, url, arguments);
            if answer.status == Some(status) { Ok(()) } else { Err(format!("{answer:?}")) }
        });
    }

    /// Starts load from inside a workload; the arguments are those of `skysail workload load`.
    pub fn load(&self, workload: &str, arguments: &[&str]) -> Load {
        let binary = self.setup.binary.to_string_lossy();
        let command =
            self.command(&[&["exec", workload, "--", &binary, "workload", "load"], arguments].concat());
        Load::start(command)
    }

    /// Sends a signal to `skysail up`.
    pub fn signal(&self, signal: Signal) {
        let process = i32::try_from(self.process()).unwrap();
        kill(Pid::from_raw(process), signal).unwrap();
    }

    /// Ends the mesh as Ctrl-C does.
    pub fn interrupt(mut self) -> Ended {
        assert_no_panic(&self.run_folder());
        self.signal(Signal::SIGINT);
        self.ended()
    }

    /// Starts the same mesh again after it has ended.
    pub fn again(&self) -> Mesh {
        assert!(self.child.is_none(), "the mesh still runs");
        self.setup.clone().start()
    }

    /// Waits for the mesh to end.
    pub fn ended(&mut self) -> Ended {
        let mut child = self.child.take().expect("the mesh runs");
        let status = eventually("the mesh ends", || match child.try_wait().unwrap() {
            Some(status) => Ok(status),
            None => Err(self.output()),
        });
        for reader in self.readers.drain(..) {
            reader.join().unwrap();
        }
        let text = self.output.lock().unwrap();
        Ended { status, stdout: text.stdout.clone(), stderr: text.stderr.clone() }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // All processes of the mesh end with `skysail up`.
        let _ = child.kill();
        let _ = child.wait();
        if thread::panicking() {
            eprintln!("output of the mesh:\n{}", self.output());
            show_logs(&self.run_folder());
        } else {
            assert_no_panic(&self.run_folder());
        }
    }
}

impl Answer {
    /// Parses the body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// Prints the failed requests and the ends of all logs, for a failed test.
fn show_logs(folder: &Path) {
    each_log(folder, &mut |path, text| {
        let lines: Vec<_> = text.lines().collect();
        let (earlier, last) = lines.split_at(lines.len().saturating_sub(20));
        eprintln!("--- {}", path.display());
        let failed = earlier.iter().filter(|line| line.contains("HTTP/1.1\" 5")).take(20);
        failed.chain(last).for_each(|line| eprintln!("{line}"));
    });
}

/// Fails if a log contains a panic. Failed programs are restarted, so a test might otherwise overlook a
/// panic.
fn assert_no_panic(folder: &Path) {
    each_log(folder, &mut |path, text| {
        assert!(!text.contains("panicked at"), "{}:\n{text}", path.display());
    });
}

fn each_log(folder: &Path, act: &mut impl FnMut(&Path, &str)) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            each_log(&path, act);
        } else if path.extension().is_some_and(|end| end == "log") {
            act(&path, &fs::read_to_string(&path).unwrap_or_default());
        }
    }
}

/// Copies the files of a folder.
pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}

fn own(path: &Path, user: u32) -> io::Result<()> {
    chown(path, Some(user), Some(user))?;
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            own(&entry?.path(), user)?;
        }
    }
    Ok(())
}

fn read(
    mut from: impl io::Read + Send + 'static,
    output: &Arc<Mutex<Text>>,
    part: fn(&mut Text) -> &mut String,
) -> JoinHandle<()> {
    let output = Arc::clone(output);
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            part(&mut output.lock().unwrap()).push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    })
}
