//! gRPC clients without a proxy: grpc-go takes its configuration from `skysaild` itself (`xds:///echo.shop…:9000`), and
//! its calls follow the rules of the mesh.
//!
//! The client and the servers are `tests/grpc/main.go`, built here with `go`.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Lines, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, SystemTime},
};

use prost_reflect::{
    prost::Message as _,
    prost_types::{
        DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto,
        ServiceDescriptorProto,
    },
};
use serde::Deserialize;
use serde_json::{Value, json};
use skysail_core::SpiffeId;
use skysail_identity::{
    Authority, KeyAndCsr,
    rotation::{Lifetimes, folder::Folder},
};
use skysail_testkit::{Setup, eventually};

const MESH: &str = include_str!("grpc/mesh.yaml");
const ROUTES: &str = include_str!("grpc/routes.yaml");
const DAY: Duration = Duration::from_secs(24 * 3600);
const ECHO: &str = "xds:///echo.shop.svc.cluster.local:9000";

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the program of the client and the servers.
fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    BUILT
        .get_or_init(|| skysail_testkit::go_program(Path::new(env!("CARGO_MANIFEST_DIR")), "grpc", temporary))
}

/// A gRPC server that returns its name with each response.
struct Server {
    _process: Process,
    version: &'static str,
    name: &'static str,
    ip: String,
    port: u16,
}

impl Server {
    fn start(name: &'static str, version: &'static str, ip: &str) -> Self {
        Self::start_with(name, version, ip, None)
    }

    /// With a folder: mutual TLS with the certificate in it.
    fn start_with(name: &'static str, version: &'static str, ip: &str, certificate: Option<&Path>) -> Self {
        let mut command = Command::new(program());
        command.args(["serve", &format!("{ip}:0"), name]).args(certificate).stdout(Stdio::piped());
        let mut process = Process(command.spawn().unwrap());
        let mut address = BufReader::new(process.0.stdout.take().unwrap()).lines();
        let address = address.next().unwrap().unwrap();
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        Self { _process: process, version, name, ip: ip.to_owned(), port }
    }

    /// Returns the Pod object of the server.
    fn pod(&self) -> String {
        let Self { name, version, ip, port, .. } = self;
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, labels: {{app: echo, version: {version}}}}}\n\
             spec: {{serviceAccountName: echo, containers: [{{name: echo, image: echo, ports: [{{name: grpc, containerPort: {port}}}]}}]}}\n\
             status: {{podIP: {ip}, conditions: [{{type: Ready, status: 'True'}}]}}\n"
        )
    }
}

/// A control plane, its files, and its authority.
struct Control {
    _process: Process,
    folder: tempfile::TempDir,
    _ca: tempfile::TempDir,
    authority: Authority,
    /// Addresses of discovery with TLS, and without.
    secure: String,
    plain: String,
    admin: String,
}

impl Control {
    fn start(files: &[(&str, &str)]) -> Self {
        let (folder, ca) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let lifetimes = Lifetimes { certificate: DAY, root: 100 * DAY };
        let made = Folder::open(ca.path()).unwrap().load(lifetimes, SystemTime::now()).unwrap();
        let authority = made.authority().unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_skysail"));
        command
            .args(["control", "--listen", "127.0.0.1", "--log-json", "--no-dns", "--config"])
            .arg(folder.path());
        command.arg("--ca-dir").arg(ca.path());
        command.args(["--tls-port", "0", "--plain-port", "0", "--admin-port", "0"]).stderr(Stdio::piped());
        let mut process = Process(command.spawn().unwrap());
        let log = BufReader::new(process.0.stderr.take().unwrap()).lines();
        let (sender, lines) = mpsc::channel();
        // The control plane's output must always be read.
        thread::spawn(move || {
            for line in log.map_while(Result::ok) {
                let line: Value = serde_json::from_str(&line).unwrap_or_default();
                let _ = sender.send(line["fields"].clone());
            }
        });
        let address = |of: &str| loop {
            let line = lines.recv().unwrap();
            if line["message"].as_str().is_some_and(|message| message.starts_with(of)) {
                return line["address"].as_str().unwrap().to_owned();
            }
        };
        let secure = address("serving discovery and certificates");
        let (plain, admin) = (address("serving discovery (plain text"), address("serving admin"));
        Self { _process: process, folder, _ca: ca, authority, secure, plain, admin }
    }

    /// Writes a file as common tools do.
    fn put(&self, file: &str, text: &str) {
        let part = self.folder.path().join(format!(".{file}.part"));
        fs::write(&part, text).unwrap();
        fs::rename(part, self.folder.path().join(file)).unwrap();
    }

    fn remove(&self, file: &str) {
        fs::remove_file(self.folder.path().join(file)).unwrap();
    }

    /// Returns the state of the clients.
    fn clients(&self) -> Vec<Value> {
        let mut stream = TcpStream::connect(&self.admin).unwrap();
        stream
            .write_all(b"GET /debug/syncz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    }

    /// All clients have acknowledged all resources, and rejected none.
    fn all_is_taken(&self) {
        eventually("all clients are synced", || {
            for client in self.clients() {
                assert_eq!(client["form"], "sotw", "{client}");
                for (kind, status) in client["types"].as_object().unwrap() {
                    assert_eq!(status["nacked"], 0, "{kind} of {client}");
                    if status["synced"] != true {
                        return Err(format!("{kind} of {client}"));
                    }
                }
            }
            Ok(())
        });
    }
}

/// A gRPC client that uses discovery.
struct Client {
    _process: Process,
    orders: ChildStdin,
    outcomes: Lines<BufReader<ChildStdout>>,
}

/// Result of several calls.
#[derive(Debug, Deserialize)]
struct Outcome {
    /// Number of responses by server.
    answers: BTreeMap<String, u64>,
    /// Number of failures by status.
    errors: BTreeMap<String, u64>,
    /// Duration of all calls.
    millis: u64,
}

impl Outcome {
    fn only(&self, server: &str) -> Result<(), String> {
        let is = self.errors.is_empty() && self.answers.keys().eq([server]);
        if is { Ok(()) } else { Err(format!("{self:?}")) }
    }

    /// Checks that no call succeeded, and that an error contains this text.
    fn fails_by(self, reason: &str) -> Result<Self, String> {
        let fails = self.answers.is_empty() && self.errors.keys().any(|error| error.contains(reason));
        if fails { Ok(self) } else { Err(format!("{self:?}")) }
    }

    /// Returns the status of calls of which none succeeded.
    fn error(&self) -> &str {
        assert!(self.answers.is_empty() && self.errors.len() == 1, "{self:?}");
        self.errors.keys().next().unwrap()
    }
}

impl Client {
    /// Starts a client without an identity.
    fn start(control: &Control, namespace: &str) -> Self {
        Self::start_as(&control.plain, namespace, json!({"type": "insecure"}), json!({}))
    }

    /// Starts a client that presents the certificate in a folder to the control plane, and to servers where a rule
    /// requires it.
    fn start_with(control: &Control, namespace: &str, certificate: &Path) -> Self {
        let at = |file: &str| certificate.join(file);
        let files = json!({"certificate_file": at("cert.pem"), "private_key_file": at("key.pem"),
            "ca_certificate_file": at("root.pem")});
        let provider = json!({"plugin_name": "file_watcher", "config": files});
        let credentials = json!({"type": "tls", "config": files});
        Self::start_as(&control.secure, namespace, credentials, json!({"default": provider}))
    }

    fn start_as(server: &str, namespace: &str, credentials: Value, certificates: Value) -> Self {
        let bootstrap = json!({
            "xds_servers": [{
                "server_uri": server,
                "channel_creds": [credentials],
                "server_features": ["xds_v3"],
            }],
            "node": {
                "id": format!("sidecar~127.0.0.1~client.{namespace}~{namespace}.svc.cluster.local"),
                "metadata": {"GENERATOR": "grpc", "NAMESPACE": namespace, "SERVICE_ACCOUNT": "client"},
            },
            "certificate_providers": certificates,
        });
        let mut command = Command::new(program());
        command.arg("call").env("GRPC_XDS_BOOTSTRAP_CONFIG", bootstrap.to_string());
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut process = Process(child);
        let orders = process.0.stdin.take().unwrap();
        let outcomes = BufReader::new(process.0.stdout.take().unwrap()).lines();
        Self { _process: process, orders, outcomes }
    }

    /// Calls a target `calls` times, with headers for routes.
    fn call(&mut self, target: &str, calls: u64, headers: &[(&str, &str)]) -> Outcome {
        let headers: BTreeMap<_, _> = headers.iter().copied().collect();
        let order = json!({"target": target, "calls": calls, "headers": headers, "seconds": 30});
        writeln!(self.orders, "{order}").unwrap();
        serde_json::from_str(&self.outcomes.next().unwrap().unwrap()).unwrap()
    }
}

#[test]
fn calls_follow_services_and_rules() {
    let (one, two) = (Server::start("one", "v1", "127.0.0.1"), Server::start("two", "v2", "127.0.0.2"));
    let files = [("mesh.yaml", MESH), ("one.yaml", &one.pod()), ("two.yaml", &two.pod())];
    let control = Control::start(&files);
    let mut client = Client::start(&control, "shop");

    // Without rules, in round-robin order, by any of the service's names.
    for host in ["echo.shop.svc.cluster.local", "echo.shop.svc", "echo.shop", "echo"] {
        let name = format!("xds:///{host}:9000");
        // Connections are opened one by one, and used once they are open.
        eventually("both are connected", || match client.call(&name, 10, &[]) {
            outcome if outcome.answers.len() == 2 => Ok(()),
            outcome => Err(format!("{host}: {outcome:?}")),
        });
        let outcome = client.call(&name, 100, &[]);
        assert!(outcome.errors.is_empty(), "{host}: {outcome:?}");
        assert!(outcome.answers.values().all(|count| (45..=55).contains(count)), "{host}: {outcome:?}");
        assert_eq!(outcome.answers.len(), 2, "{host}: {outcome:?}");
    }

    control.put("routes.yaml", ROUTES);
    eventually("calls with the header go to v2", || {
        client.call(ECHO, 10, &[("x-case", "version")]).only("two")
    });
    let outcome = client.call(ECHO, 1_000, &[]);
    assert!((140..=260).contains(outcome.answers.get("two").unwrap()), "{outcome:?}");
    assert!(outcome.errors.is_empty(), "{outcome:?}");
    policies_are_enforced(&mut client);

    // Another weight, then another endpoint.
    control
        .put("routes.yaml", &ROUTES.replace("weight: 80", "weight: 0").replace("weight: 20", "weight: 100"));
    eventually("all calls go to v2", || client.call(ECHO, 20, &[]).only("two"));
    let three = Server::start("three", "v2", "127.0.0.3");
    control.put("three.yaml", &three.pod());
    eventually("calls go to the new server too", || {
        let outcome = client.call(ECHO, 20, &[]);
        assert!(outcome.errors.is_empty(), "{outcome:?}");
        outcome.answers.contains_key("three").then_some(()).ok_or(format!("{outcome:?}"))
    });
    control.remove("two.yaml");
    eventually("calls go to the new server only", || {
        let outcome = client.call(ECHO, 20, &[]);
        assert!(outcome.errors.is_empty(), "{outcome:?}");
        outcome.only("three")
    });
    drop(two);
    client.call(ECHO, 20, &[]).only("three").unwrap();
    control.all_is_taken();
}

/// Checks the settings of rules other than destinations.
fn policies_are_enforced(client: &mut Client) {
    let mut call = |case: &str, please: &str| client.call(ECHO, 1, &[("x-case", case), ("please", please)]);
    let late = call("timeout", "hang");
    assert!(late.error().starts_with("DeadlineExceeded"), "{late:?}");
    assert!(late.millis < 5_000, "{late:?}");
    let retried = call("retry", "fail-once");
    assert!(retried.errors.is_empty(), "{retried:?}");
    assert!(call("no-retry", "fail-once").error().contains("this was the first attempt"));
    assert!(call("fault", "").error().starts_with("ResourceExhausted"));
    // Only calls of this rule fail.
    let nowhere = call("nowhere", "");
    assert!(nowhere.error().starts_with("Unavailable"), "{nowhere:?}");
    assert!(nowhere.error().contains("outbound|9000||no-such-service.shop.svc.cluster.local"), "{nowhere:?}");
    assert!(call("", "").errors.is_empty());
}

/// Writes a certificate for an account as Istio's agent does for gRPC clients.
fn certify(authority: &Authority, account: &str) -> tempfile::TempDir {
    let (folder, key) = (tempfile::tempdir().unwrap(), KeyAndCsr::generate(None).unwrap());
    let id = SpiffeId::new("cluster.local", "shop", account);
    let signed = authority.sign(&key.csr_pem, &id, DAY).unwrap();
    let files = [("cert.pem", signed.chain.concat()), ("key.pem", key.key_pem())];
    for (name, text) in files.into_iter().chain([("root.pem", authority.roots_pem().to_owned())]) {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

#[test]
fn a_rule_makes_a_client_use_mutual_tls() {
    let mesh = MESH.replace("loadBalancer: {simple: RANDOM}", "tls: {mode: ISTIO_MUTUAL}");
    let control = Control::start(&[("mesh.yaml", &mesh)]);
    let [own, echo, other] = ["client", "echo", "other"].map(|account| certify(&control.authority, account));
    // Not the client's address: calls from the address of a removed pod are refused.
    let right = Server::start_with("right", "v1", "127.0.0.3", Some(echo.path()));
    let wrong = Server::start_with("wrong", "v1", "127.0.0.2", Some(other.path()));
    control.put("pod.yaml", &right.pod());
    let mut client = Client::start_with(&control, "shop", own.path());
    eventually("the server is trusted", || client.call(ECHO, 10, &[]).only("right"));
    assert_eq!(control.clients()[0]["identity"], "spiffe://cluster.local/ns/shop/sa/client");

    // A certificate of the same authority for another account.
    control.put("pod.yaml", &wrong.pod());
    eventually("the other server is not trusted", || {
        client.call(ECHO, 1, &[]).fails_by("spiffe://cluster.local/ns/shop/sa/other")
    });
    control.all_is_taken();
}

#[test]
fn unknown_names_fail_with_a_reason_and_may_be_added() {
    let one = Server::start("one", "v1", "127.0.0.1");
    let control = Control::start(&[("one.yaml", &one.pod())]);
    let (mut client, mut stranger) = (Client::start(&control, "shop"), Client::start(&control, "elsewhere"));

    // grpc-go treats a late answer like none, and waits for 15 seconds.
    let unknown = client.call(ECHO, 1, &[]);
    assert!(unknown.error().starts_with("Unavailable"), "{unknown:?}");
    assert!(unknown.millis < 25_000, "{unknown:?}");
    // Its resolver first accepts an empty configuration and then reports the reason. The call that waited may fail in
    // between.
    eventually("the error names the service", || {
        client.call(ECHO, 1, &[]).fails_by("echo.shop.svc.cluster.local:9000")
    });
    control.put("mesh.yaml", MESH);
    eventually("the service is there", || client.call(ECHO, 1, &[]).only("one"));
    stranger.call(ECHO, 1, &[]).only("one").unwrap();

    // A removed endpoint gets no more calls at once, and only that one.
    let other = MESH.replace("name: echo", "name: other").replace("host: echo", "host: other");
    control.put("other.yaml", &other);
    let name = "xds:///other.shop.svc.cluster.local:9000";
    eventually("the other service is there", || client.call(name, 1, &[]).only("one"));
    control.remove("other.yaml");
    let removed = eventually("the other service is gone", || {
        client.call(name, 1, &[]).fails_by("other.shop.svc.cluster.local:9000")
    });
    assert!(removed.millis < 5_000, "{removed:?}");
    client.call(ECHO, 1, &[]).only("one").unwrap();
    control.all_is_taken();
}

/// A caller, two servers with different versions of reflection, and a stand-in without reflection.
const SERVERS: &str = "
apiVersion: v1
kind: Pod
metadata: {name: caller, namespace: shop}
spec: {containers: [{name: caller, image: acme/caller}]}
---
apiVersion: v1
kind: Pod
metadata: {name: NAME, namespace: shop, labels: {app: NAME}}
spec: {containers: [{name: server, image: acme/NAME, ports: [{name: grpc, containerPort: 9000}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: shop}
spec: {selector: {app: NAME}, ports: [{name: grpc, port: 9000}]}
";

#[test]
fn methods_are_called_from_the_command_line() {
    let (caller, server) = SERVERS.split_once("---").unwrap();
    let names = ["current", "alpha", "standin"].map(|name| format!("---{}", server.replace("NAME", name)));
    let image = |name: &str| format!("acme/{name}={} serve 0.0.0.0:9000 {name}", program().display());
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &format!("{caller}{}", names.concat()))
        .with(&["--image", &image("current"), "--image", &image("alpha")])
        .ready();
    let call = |arguments: &[&str]| {
        let output = mesh.run(&[&["call", "caller"], arguments].concat());
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (text(output.stdout), text(output.stderr), output.status.code())
    };
    let check = "grpc.health.v1.Health/Check";
    let serving = "{\n  \"status\": \"SERVING\"\n}\n";
    let expect = |out: &str, stderr: &str, code| (out.to_owned(), stderr.to_owned(), Some(code));
    for server in ["current:9000", "http://alpha.shop:9000"] {
        assert_eq!(call(&[server, "--grpc", check]), expect(serving, "OK\n", 0));
        let (list, stderr, code) = call(&[server, "--grpc-list"]);
        let line = "grpc.health.v1.Health/Watch (grpc.health.v1.HealthCheckRequest) returns (stream grpc.health.v1.HealthCheckResponse)";
        assert!(list.lines().any(|one| one == line) && code == Some(0), "{list}{stderr}");
    }
    let unknown = call(&["current:9000", "--grpc", check, "-d", "{\"service\": \"x\"}"]);
    assert_eq!(unknown, expect("", "NOT_FOUND: unknown service\n", 1));
    let (_, stderr, _) = call(&["current:9000", "--grpc", check, "-v", "-H", "x-user: jason"]);
    for line in [
        "> POST /grpc.health.v1.Health/Check HTTP/2",
        "> x-user: jason",
        "< served-by: current",
        "< grpc-status: 0",
    ] {
        assert!(stderr.lines().any(|one| one == line), "{line}: {stderr}");
    }
    let (out, stderr, _) = call(&["current:9000", "--grpc", check, "--count", "2"]);
    assert_eq!(out, serving.repeat(2));
    assert!(stderr.starts_with("OK\nOK\n2 requests: 2 x OK; latency min "), "{stderr}");
    // A stream that does not end by itself.
    eventually("the stream has a message", || {
        let (out, stderr, code) = call(&["current:9000", "--grpc", "grpc.health.v1.Health.Watch", "-m", "1"]);
        let ended =
            stderr.ends_with("DEADLINE_EXCEEDED: no complete response within 1s\n") && code == Some(1);
        if ended && out == serving { Ok(()) } else { Err(format!("{out}{stderr}")) }
    });
    // Errors of the command line.
    for (arguments, problem) in [
        (
            &["current:9000", "--grpc", "grpc.health.v1.Health/Chek"][..],
            "grpc.health.v1.Health has no method Chek; its methods: Check",
        ),
        (
            &["current:9000", "--grpc", "acme.Flights/Talk"],
            "there is no service acme.Flights; known services: grpc.health.v1.Health",
        ),
        (
            &["standin:9000", "--grpc", "acme.Flights/Talk"],
            "standin:9000 has no server reflection; pass --descriptor-set FILE",
        ),
        (&["current:9000", "--grpc", check, "-d", "{\"a\": 1}"], "-d: message 1: "),
        (&["current:9000", "--grpc-list", "--count", "2"], "cannot be used with"),
    ] {
        let (out, stderr, code) = call(arguments);
        assert!(
            out.is_empty() && stderr.contains(problem) && code == Some(2),
            "{arguments:?}: {out}{stderr}"
        );
    }
    let (_, stderr, code) = call(&["nobody:9000", "--grpc-list"]);
    assert!(stderr.contains("skysail: request to nobody:9000: ") && code == Some(1), "{stderr}");

    // With descriptors from a file. A stand-in returns the messages that it receives.
    fs::write(mesh.config().parent().unwrap().join("flights.pb"), flights()).unwrap();
    let talk = ["standin:9000", "--grpc", "acme.Flights/Talk", "--descriptor-set", "flights.pb"];
    let messages = call(&[&talk[..], &["-d", "{\"day\": \"mon\"}", "-d", "{}{\"day\": \"tue\"}"]].concat());
    let out = "{\n  \"day\": \"mon\"\n}\n{}\n{\n  \"day\": \"tue\"\n}\n";
    assert_eq!(messages, expect(out, "OK\n", 0));
    assert!(mesh.interrupt().status.success());
}

/// Returns descriptors of `service Flights { rpc Talk(stream Day) returns (stream Day); }` and `message Day { string
/// day = 1; }`.
fn flights() -> Vec<u8> {
    let text = |text: &str| Some(text.to_owned());
    let day = DescriptorProto {
        name: text("Day"),
        field: vec![FieldDescriptorProto {
            name: text("day"),
            number: Some(1),
            r#type: Some(9),
            label: Some(1),
            ..FieldDescriptorProto::default()
        }],
        ..DescriptorProto::default()
    };
    let talk = MethodDescriptorProto {
        name: text("Talk"),
        input_type: text(".acme.Day"),
        output_type: text(".acme.Day"),
        client_streaming: Some(true),
        server_streaming: Some(true),
        ..MethodDescriptorProto::default()
    };
    let service = ServiceDescriptorProto {
        name: text("Flights"),
        method: vec![talk],
        ..ServiceDescriptorProto::default()
    };
    let file = FileDescriptorProto {
        name: text("flights.proto"),
        package: text("acme"),
        syntax: text("proto3"),
        message_type: vec![day],
        service: vec![service],
        ..FileDescriptorProto::default()
    };
    FileDescriptorSet { file: vec![file] }.encode_to_vec()
}
