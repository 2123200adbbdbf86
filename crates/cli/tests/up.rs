//! `skysail up` as users run it: real namespaces, real links, real processes. Fails where the machine forbids them.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");

/// A mesh that runs for one test.
struct Mesh {
    process: Child,
    lines: BufReader<std::process::ChildStdout>,
    folder: tempfile::TempDir,
}

impl Mesh {
    fn start(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("shop");
        fs::create_dir(&config).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plain/shop.yaml");
        fs::copy(source, config.join("shop.yaml")).unwrap();
        let mut process = Command::new(SKYSAIL)
            .arg("up")
            .args(options)
            .arg(&config)
            .env("XDG_RUNTIME_DIR", folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        let mut mesh = Self { process, lines, folder };
        mesh.wait_for("all 2 workloads are ready");
        mesh
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("shop/shop.yaml")
    }

    /// Reads what the mesh prints up to a line that holds this text.
    fn wait_for(&mut self, text: &str) {
        let mut seen = String::new();
        while !seen.lines().last().is_some_and(|line| line.contains(text)) {
            assert_ne!(self.lines.read_line(&mut seen).unwrap(), 0, "no {text:?} in:\n{seen}");
        }
    }

    fn skysail(&self, args: &[&str]) -> Output {
        Command::new(SKYSAIL).args(args).env("XDG_RUNTIME_DIR", self.folder.path()).output().unwrap()
    }

    /// Calls from the web workload and returns the status and the report of the echo server.
    fn call(&self, url: &str) -> (String, Value) {
        let output = self.skysail(&["call", "web", url]);
        let status = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        (status, serde_json::from_slice(&output.stdout).unwrap_or_default())
    }

    fn state(&self) -> Value {
        let output = self.skysail(&["status", "-o", "json"]);
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn names(&self, workload: &str) -> Vec<String> {
        let state = self.state();
        let pods = state["pods"].as_array().unwrap().iter().filter(|pod| pod["workload"] == workload);
        pods.map(|pod| pod["name"].as_str().unwrap().to_owned()).collect()
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.id()).unwrap())
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn pods_reach_services_by_name_and_edits_take_effect() {
    let mut mesh = Mesh::start(&["--plain"]);
    for url in ["http://db/hello", "http://db.shop/hello", "http://dbs:9000/hello"] {
        let (status, report) = mesh.call(url);
        assert_eq!((status.as_str(), report["path"].as_str()), ("200", Some("/hello")), "{url}");
        assert_eq!(report["pod"]["version"], "v2");
    }
    assert_eq!(mesh.call("http://db/status/503").0, "503");
    assert!(mesh.call("http://nobody/").0.contains("nobody"));
    assert_eq!(mesh.skysail(&["exec", "web", "--", "sh", "-c", "exit 7"]).status.code(), Some(7));

    let before = mesh.names("db");
    let text = fs::read_to_string(mesh.file()).unwrap();
    fs::write(mesh.file(), text.replace("version: v2", "version: v3")).unwrap();
    // The old pods stay until the new ones are ready, so some pod answers at any time.
    while mesh.names("db").iter().any(|name| before.contains(name)) {
        assert_eq!(mesh.call("http://db/").0, "200");
    }
    assert_eq!(mesh.call("http://db/").1["pod"]["version"], "v3");
    assert_eq!(mesh.names("db").len(), 2);

    fs::write(mesh.file(), text.replace("replicas: 2", "replicas: many")).unwrap();
    mesh.wait_for("spec.replicas");
}

#[test]
fn sidecars_carry_identities_and_a_control_plane_that_dies_comes_back() {
    let mut mesh = Mesh::start(&[]);
    let (status, report) = mesh.call("http://db/hello");
    assert_eq!(status, "200");
    assert_eq!(report["caller"], "spiffe://cluster.local/ns/shop/sa/default");
    // A call to a service of its own goes through the pod's own sidecar, twice.
    assert_eq!(mesh.call("http://web/").1["caller"], "spiffe://cluster.local/ns/shop/sa/default");

    let control = mesh.state()["control"].to_string();
    assert!(mesh.skysail(&["exec", "web", "--", "kill", "-9", &control]).status.success());
    mesh.wait_for("the control plane ended");
    assert_eq!(mesh.call("http://db/").0, "200");

    let text = fs::read_to_string(mesh.file()).unwrap();
    let strict = "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
                  metadata: {name: none, namespace: shop}\nspec: {}\n";
    fs::write(mesh.file(), text + strict).unwrap();
    while mesh.call("http://db/").0 != "403" {}
}

#[test]
fn nothing_is_left_after_an_end_by_force_or_by_request() {
    for signal in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGINT] {
        let mut mesh = Mesh::start(&["--plain"]);
        let inside = mesh.state()["process"].as_u64().unwrap();
        let children = || fs::read_to_string(format!("/proc/{inside}/task/{inside}/children"));
        assert!(children().is_ok());
        kill(mesh.pid(), signal).unwrap();
        let status = mesh.process.wait().unwrap();
        assert_eq!(status.success(), signal != Signal::SIGKILL, "{signal}: {status}");
        // The output is open in every process of the mesh, so its end is theirs.
        std::io::copy(&mut mesh.lines, &mut std::io::sink()).unwrap();
        assert!(String::from_utf8_lossy(&mesh.skysail(&["status"]).stderr).contains("no mesh is running"));
    }
}

#[test]
fn the_name_of_a_running_mesh_is_taken() {
    let mesh = Mesh::start(&["--plain"]);
    let config = mesh.folder.path().join("shop");
    let second = mesh.skysail(&["up", "--plain", config.to_str().unwrap()]);
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("--name"));
}
