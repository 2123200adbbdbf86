//! `skysail up` with real namespaces, links and processes. Fails where the machine forbids them.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    io::{self, BufRead as _, BufReader},
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

    /// Reads the output of the mesh up to a line with this text.
    fn wait_for(&mut self, text: &str) {
        let mut seen = String::new();
        while !seen.lines().last().is_some_and(|line| line.contains(text)) {
            assert_ne!(self.lines.read_line(&mut seen).unwrap(), 0, "no {text:?} in:\n{seen}");
        }
    }

    fn skysail(&self, args: &[&str]) -> Output {
        Command::new(SKYSAIL).args(args).env("XDG_RUNTIME_DIR", self.folder.path()).output().unwrap()
    }

    /// Calls from the web workload. Returns the status and the report of the echo server.
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
    mesh.wait_for("send a request: skysail call shop/web http://db");
    for url in ["http://db/hello", "http://db.shop/hello", "http://dbs:9000/hello"] {
        let (status, report) = mesh.call(url);
        assert_eq!((status.as_str(), report["path"].as_str()), ("200", Some("/hello")), "{url}");
        assert_eq!(report["pod"]["version"], "v2");
    }
    assert_eq!(mesh.call("http://db/status/503").0, "503");
    assert!(mesh.call("http://nobody/").0.contains("nobody"));
    let posted = mesh.skysail(&["call", "web", "http://db/form", "-d", "a=b"]);
    let posted: Value = serde_json::from_slice(&posted.stdout).unwrap();
    assert_eq!((&posted["method"], &posted["body"]), (&"POST".into(), &"a=b".into()), "{posted}");
    assert_eq!(posted["headers"]["content-type"], "application/x-www-form-urlencoded", "{posted}");

    let before = mesh.names("db");
    let text = fs::read_to_string(mesh.file()).unwrap();
    fs::write(mesh.file(), text.replace("version: v2", "version: v3")).unwrap();
    // The old pods stay until the new ones are ready, so a pod answers at any time.
    while mesh.names("db").iter().any(|name| before.contains(name)) {
        assert_eq!(mesh.call("http://db/").0, "200");
    }
    assert_eq!(mesh.call("http://db/").1["pod"]["version"], "v3");
    assert_eq!(mesh.names("db").len(), 2);

    mesh.wait_for("ready      shop/db (2 pods)");
    fs::write(mesh.file(), text.replace("replicas: 2", "replicas: 3")).unwrap();
    mesh.wait_for("new        shop/db: db-");
    mesh.wait_for("ready      shop/db (3 pods)");
    fs::write(mesh.file(), text.replace("replicas: 2", "replicas: 1")).unwrap();
    mesh.wait_for("gone       shop/db: db-");
    mesh.wait_for("ready      shop/db (1 pod)");

    fs::write(mesh.file(), text.replace("replicas: 2", "replicas: many")).unwrap();
    mesh.wait_for("spec.replicas");
}

#[test]
fn sidecars_have_identities_and_a_killed_control_plane_is_restarted() {
    let mut mesh = Mesh::start(&[]);
    let (status, report) = mesh.call("http://db/hello");
    assert_eq!(status, "200");
    assert_eq!(report["caller"], "spiffe://cluster.local/ns/shop/sa/default");
    // A call to a Service of its own passes through the pod's own sidecar twice.
    assert_eq!(mesh.call("http://web/").1["caller"], "spiffe://cluster.local/ns/shop/sa/default");

    let control = mesh.state()["control"].to_string();
    assert!(mesh.skysail(&["exec", "web", "--", "kill", "-9", &control]).status.success());
    mesh.wait_for("control plane: exited");
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
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", mesh.pid())).unwrap();
        assert_eq!(children.split_whitespace().count(), 1, "the process inside");
        kill(mesh.pid(), signal).unwrap();
        let status = mesh.process.wait().unwrap();
        assert_eq!(status.success(), signal != Signal::SIGKILL, "{signal}: {status}");
        // The output is open in every process of the mesh, so it ends when all of them have ended.
        io::copy(&mut mesh.lines, &mut io::sink()).unwrap();
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

#[test]
fn exit_codes_distinguish_failures_from_errors() {
    let mesh = Mesh::start(&["--plain"]);
    let no_program = mesh.folder.path().to_str().unwrap();
    for (arguments, code) in [
        (&["status"][..], 0),
        (&["call", "web", "http://db/"], 0),
        (&["call", "web", "http://db/status/404"], 1),
        (&["call", "web", "http://nobody/"], 1),
        (&["call", "web", "ftp://db/"], 2),
        (&["call", "nobody", "http://db/"], 2),
        (&["logs", "web", "-c", "nothing"], 2),
        (&["status", "--name", "another"], 2),
        (&["status", "--nonsense"], 2),
        (&["exec", "web", "--", "sh", "-c", "exit 7"], 7),
        (&["exec", "web", "--", "sh", "-c", "kill -TERM $$"], 143),
        (&["exec", "web", "--", "no-such-program"], 127),
        (&["exec", "web", "--", no_program], 126),
    ] {
        let output = mesh.skysail(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
    }
}

/// As in `skysail status | head -0`.
#[test]
fn a_reader_that_closes_the_output_is_no_failure() {
    let mesh = Mesh::start(&["--plain"]);
    let folder = mesh.folder.path();
    let config = folder.join("shop");
    let log = folder.join("skysail/shop/logs/shop").join(&mesh.names("web")[0]).join("web.log");
    fs::write(log, "something to print\n").unwrap();
    for arguments in [
        &["status"][..],
        &["status", "--output", "json"],
        &["call", "web", "http://db/"],
        &["logs", "web"],
        &["completion", "bash"],
        &["up", "--plain", "--name", "second", "--for", "1ms", config.to_str().unwrap()],
    ] {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(SKYSAIL);
        let output = command
            .args(arguments)
            .env("XDG_RUNTIME_DIR", folder)
            .stdout(writer)
            .stderr(Stdio::piped())
            .output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(141), "{arguments:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{arguments:?}: {output:?}");
    }
}

#[test]
fn invalid_arguments_are_refused_before_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let shop = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plain/shop.yaml");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    for (arguments, config, problem) in [
        (&[][..], &empty, "no *.yaml"),
        (&["--envoy", "shop/bd=/bin/true"], &shop, "no such workload; the workloads are shop/db, shop/web"),
        (&["--envoy", "shop/db=/no/envoy"], &shop, "/no/envoy"),
        (&["--image", "acme/nothing=true"], &shop, "no container has this image"),
        (&["--image", "acme/web=./nothing"], &shop, "not an executable file"),
        (&["--plain", "--envoy", "shop/db=/bin/true"], &shop, "cannot be used with"),
    ] {
        let mut command = Command::new(SKYSAIL);
        command.arg("up").args(arguments).arg(config).env("XDG_RUNTIME_DIR", folder.path());
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(problem), "{arguments:?}: {output:?}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}: {output:?}");
        assert!(!folder.path().join("skysail").exists());
    }
}

#[test]
fn the_result_for_scripts_has_the_documented_fields() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("shop.yaml");
    let shop = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plain/shop.yaml");
    // An error of the user is reported once.
    let wrong = "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
                 metadata: {name: none, namespace: shop}\nspec: {acton: DENY}\n";
    fs::write(&config, fs::read_to_string(shop).unwrap() + wrong).unwrap();
    let up = |arguments: &[&str]| {
        let mut command = Command::new(SKYSAIL);
        command.args(["up", "--for", "1ms"]).args(arguments).arg(&config);
        command.env("XDG_RUNTIME_DIR", folder.path()).output().unwrap()
    };
    let output = up(&["--output", "json"]);
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let document =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/scripting.md")).unwrap();
    let assert_documented = |object: &Value| {
        for name in object.as_object().unwrap().keys() {
            assert!(document.contains(&format!("`{name}`")), "{name} is in no document");
        }
    };
    assert_documented(&result);
    let pods = result["pods"].as_array().unwrap();
    assert_eq!(pods.len(), 3);
    for pod in pods {
        assert_documented(pod);
        assert_eq!((&pod["ready"], &pod["reason"]), (&true.into(), &Value::Null), "{pod}");
        assert!(pod.get("handles").is_none() && pod.get("programs").is_none(), "{pod}");
    }
    assert_documented(&result["diagnostics"][0]);
    assert_eq!((output.status.code(), &result["healthy"]), (Some(1), &false.into()), "{result}");
    assert!(result["problems"][0].as_str().unwrap().contains("acton"), "{result}");

    let output = up(&[]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let is_finding = |line: &&str| line.contains("AuthorizationPolicy shop/none");
    let findings: Vec<&str> = stdout.lines().filter(is_finding).collect();
    assert!(
        matches!(findings[..], [error, warning] if error.contains("acton") && warning.contains("until its errors are fixed, every request to the workloads that it selects is denied")),
        "{stdout}"
    );
    assert!(
        stdout.contains("the configuration has an error") && stdout.ends_with("not healthy\n"),
        "{stdout}"
    );
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn completion_has_the_subcommands_of_the_help() {
    for shell in ["bash", "zsh", "fish"] {
        let output = Command::new(SKYSAIL).args(["completion", shell]).output().unwrap();
        let script = String::from_utf8_lossy(&output.stdout);
        assert!(script.contains("status") && !script.contains("up-inside"), "{shell}");
    }
}
