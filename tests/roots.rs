//! The authority of a control plane is replaced as a whole, and `--ca-root` of a sidecar with it. Discovery continues,
//! and the certificate is renewed although that was not due for hours.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::symlink,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, SystemTime},
};

use serde_json::{Value, json};
use skysail_identity::{
    Issuer, ServiceAccount,
    rotation::{Lifetimes, folder::Folder},
};
use skysail_testkit::eventually;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Limits the duration of a failing test only.
const LONG: Duration = Duration::from_secs(60);

/// A program that ends with the test.
struct Program {
    child: Child,
    log: mpsc::Receiver<String>,
}

impl Program {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_skysail"))
            .args(arguments)
            .env("NO_COLOR", "1")
            .env_remove("SKYSAIL_LOG")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (sender, log) = mpsc::channel();
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| drop(sender.send(line))));
        Self { child, log }
    }

    /// Reads the log up to a line with these words.
    fn until(&self, words: &str) -> String {
        loop {
            let line = self.log.recv_timeout(LONG);
            let line = line.unwrap_or_else(|error| panic!("waiting for {words:?}: {error}"));
            println!("{line}");
            if line.contains(words) {
                return line;
            }
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A control plane with an authority.
struct Control {
    _program: Program,
    /// Address of discovery.
    address: String,
    admin: String,
}

impl Control {
    fn start(home: &Path, authority: &str, port: &str) -> Self {
        let at = |name: &str| home.join(name).to_str().unwrap().to_owned();
        let (config, ca, key) = (at("config"), at(authority), at("token-key.pem"));
        let program = Program::start(&[
            "control",
            "--listen",
            "127.0.0.1",
            "--log-json",
            "--no-dns",
            "--admin-port",
            "0",
            "--tls-port",
            port,
            "--config",
            &config,
            "--ca-dir",
            &ca,
            "--token-key",
            &key,
        ]);
        let address = |line: String| -> String {
            let line: Value = serde_json::from_str(&line).unwrap();
            line["fields"]["address"].as_str().unwrap().to_owned()
        };
        let discovery = address(program.until("serving discovery and certificates"));
        let admin = address(program.until("serving admin"));
        Self { _program: program, address: discovery, admin }
    }

    /// Waits until a proxy is connected.
    fn until_connected(&self, proxy: &str) {
        eventually(&format!("discovery of {proxy}"), || {
            let mut stream = TcpStream::connect(&self.admin).unwrap();
            let request = "GET /debug/syncz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            if answer.contains(proxy) { Ok(()) } else { Err(answer) }
        });
    }
}

/// Way of replacing `--ca-root`.
#[derive(Clone, Copy)]
enum Way {
    /// Another file is renamed to it.
    Renamed,
    /// It is a link by way of a folder `..data`, which is a link as well, as Kubernetes mounts it.
    Mounted,
}

/// Replaces `roots/root-cert.pem` by the root of an authority.
fn put_root(home: &Path, authority: &str, way: Way) {
    let (folder, root) = (home.join("roots"), home.join(authority).join("root-cert.pem"));
    fs::create_dir_all(&folder).unwrap();
    match way {
        Way::Renamed => {
            fs::copy(root, folder.join("new")).unwrap();
            fs::rename(folder.join("new"), folder.join("root-cert.pem")).unwrap();
        }
        Way::Mounted => {
            let version = format!("..{authority}");
            fs::create_dir(folder.join(&version)).unwrap();
            fs::copy(root, folder.join(&version).join("root-cert.pem")).unwrap();
            symlink(version, folder.join("..data_tmp")).unwrap();
            fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
            // It stays when there is another version.
            let _ = symlink("..data/root-cert.pem", folder.join("root-cert.pem"));
        }
    }
}

fn discovery_continues(way: Way) {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path();
    let lifetimes = Lifetimes { certificate: DAY, root: 100 * DAY };
    for authority in ["first", "second"] {
        Folder::open(&home.join(authority)).unwrap().load(lifetimes, SystemTime::now()).unwrap();
    }
    let issuer = Issuer::generate().unwrap();
    let account = ServiceAccount { namespace: "default".into(), name: "a".into(), pod: None };
    let node = json!({
        "id": "router~127.0.0.1~a-1.default~default.svc.cluster.local",
        "cluster": "a.default",
        "metadata": {"NAMESPACE": "default", "SERVICE_ACCOUNT": "a", "TRUST_DOMAIN": "cluster.local"},
    });
    fs::create_dir(home.join("config")).unwrap();
    fs::write(home.join("token-key.pem"), issuer.public_pem()).unwrap();
    fs::write(home.join("token"), issuer.issue(&account, "istio-ca", DAY).unwrap()).unwrap();
    fs::write(home.join("node.json"), node.to_string()).unwrap();
    put_root(home, "first", way);

    let before = Control::start(home, "first", "0");
    let at = |name: &str| home.join(name).to_str().unwrap().to_owned();
    let (root, token, node) = (at("roots/root-cert.pem"), at("token"), at("node.json"));
    let sidecar = Program::start(&[
        "proxy",
        "--discovery",
        &before.address,
        "--ca-root",
        &root,
        "--token",
        &token,
        "--node",
        &node,
        "--concurrency",
        "1",
        "--admin-port",
        "0",
        "--health-port",
        "0",
        "--metrics-port",
        "0",
        "--merged-metrics-port",
        "0",
    ]);
    sidecar.until("certificate obtained");
    before.until_connected("a-1.default");

    let port = before.address.rsplit(':').next().unwrap().to_owned();
    drop(before);
    let after = Control::start(home, "second", &port);
    sidecar.until("invalid peer certificate");
    put_root(home, "second", way);
    sidecar.until("certificate obtained");
    after.until_connected("a-1.default");
}

#[test]
fn a_root_that_is_renamed_into_place_is_trusted_at_once() {
    discovery_continues(Way::Renamed);
}

#[test]
fn a_root_that_kubernetes_mounts_is_trusted_at_once() {
    discovery_continues(Way::Mounted);
}
