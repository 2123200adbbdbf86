//! A mesh from the host: `skysail call` with curl's options, and ports of pods on the loopback.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{SocketAddr, TcpListener},
    process::{Child, Command, ExitStatus, Output, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid},
};
use serde_json::Value;
use skysail_sandbox::http::{self, Call};
use skysail_testkit::{Mesh, Setup, eventually, script};

const STOCK: &str = "http://stock.shop";

fn shop() -> Setup {
    Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml"))
}

#[test]
fn a_mesh_is_used_from_the_host() {
    let mesh = shop().ready();
    mesh.wait_status("front", STOCK, &[], 200);
    heads_are_shown(&mesh);
    bodies_are_posted_byte_by_byte(&mesh);
    requests_are_counted_and_limited(&mesh);
    ports_are_forwarded(&mesh);
    the_control_plane_is_forwarded(&mesh);
    dashboards_are_opened(&mesh);
    a_port_in_use_is_refused(&mesh);
    a_forward_ends_with_its_pod(&mesh);
}

#[test]
fn a_mesh_is_used_by_an_ordinary_user() {
    let setup = if Uid::effective().is_root() { shop().as_user(65534) } else { shop() };
    let mesh = setup.in_default_run_folder(&format!("ordinary-{}", std::process::id())).ready();
    mesh.wait_status("front", STOCK, &[], 200);
    bodies_are_posted_byte_by_byte(&mesh);
    ports_are_forwarded(&mesh);
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn heads_are_shown(mesh: &Mesh) {
    let plain = mesh.run(&["call", "front", STOCK]);
    let body: Value = serde_json::from_slice(&plain.stdout).unwrap();
    assert_eq!((&body["method"], text(&plain.stderr).as_str()), (&"GET".into(), "200\n"));
    assert_eq!(plain.stdout.last(), Some(&b'}'), "the body has no line break, so none is printed");
    for (flags, first) in [(&["-i"][..], "HTTP/1.1 200 OK\r\n"), (&["-i", "--http2"], "HTTP/2 200\r\n")] {
        let output = mesh.run(&[&["call", "front", STOCK], flags].concat());
        let shown = text(&output.stdout);
        let (head, body) = shown.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(first) && head.contains("\r\nx-version: v1"), "{shown}");
        assert!(serde_json::from_str::<Value>(body).is_ok(), "{shown}");
    }
    let head = text(&mesh.run(&["call", "front", STOCK, "-I"]).stdout);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    let output = mesh.run(&["call", "front", "stock.shop/status/503", "-v", "-X", "PATCH", "-H", "x-one: 1"]);
    let stderr = text(&output.stderr);
    for line in ["> PATCH /status/503 HTTP/1.1", "> host: stock.shop", "> x-one: 1", "< x-version: v1"] {
        assert!(stderr.lines().any(|stderr| stderr == line), "{line}: {stderr}");
    }
    assert!(stderr.starts_with("* Connected to ") && stderr.contains("\n< HTTP/1.1 503"), "{stderr}");
    assert_eq!((stderr.lines().last(), output.status.code()), (Some("503"), Some(1)), "{stderr}");
}

fn bodies_are_posted_byte_by_byte(mesh: &Mesh) {
    let folder = mesh.config().parent().unwrap().to_owned();
    fs::write(folder.join("body.txt"), "a=b\r\n\n").unwrap();
    let report = |output: Output| -> Value {
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    // The path is relative to the working directory of the command.
    let posted = report(mesh.run(&["call", "front", STOCK, "-d", "@body.txt"]));
    assert_eq!(
        (&posted["method"], &posted["body"], &posted["headers"]["content-type"]),
        (&"POST".into(), &"a=b\r\n\n".into(), &"application/x-www-form-urlencoded".into())
    );
    // Larger than an argument of a command can be, and not text.
    let bytes: Vec<u8> = (0..300_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    for flags in [&[][..], &["--http2"]] {
        let arguments = [&["call", "front", STOCK, "-d", "@-"], flags].concat();
        let mut command = mesh.command(&arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert_eq!(report(child.wait_with_output().unwrap())["body_bytes"], bytes.len());
    }
    let missing = mesh.run(&["call", "front", STOCK, "-d", "@missing.txt"]);
    assert_eq!(missing.status.code(), Some(2), "{missing:?}");
    assert!(text(&missing.stderr).contains("reading missing.txt: No such file"), "{missing:?}");
}

fn requests_are_counted_and_limited(mesh: &Mesh) {
    let output = mesh.run(&["call", "front", STOCK, "--count", "3"]);
    let stderr = text(&output.stderr);
    let lines: Vec<_> = stderr.lines().collect();
    assert_eq!(lines[..3], ["200"; 3], "{stderr}");
    assert!(lines[3].starts_with("3 requests: 3 x 200; latency min ") && lines.len() == 4, "{stderr}");
    let late = mesh.run(&["call", "front", &format!("{STOCK}/delay/3600s"), "--max-time", "0.2"]);
    assert_eq!(late.status.code(), Some(1), "{late:?}");
    assert!(text(&late.stderr).contains("no complete response within 200ms"), "{late:?}");
    let health = mesh.run(&["call", "front", STOCK, "--grpc-health"]);
    assert_eq!(health.status.code(), Some(1), "{health:?}");
    assert!(text(&health.stderr).contains("not valid gRPC: its content-type is"), "{health:?}");
    let wrong = mesh.run(&["call", "front", "https://stock.shop"]);
    assert!(wrong.status.code() == Some(2) && text(&wrong.stderr).contains("write http://"), "{wrong:?}");
}

/// A running `skysail port-forward`, which ends with its test.
struct Forward {
    child: Child,
    /// Lines of output, and the addresses in them.
    lines: Vec<String>,
    addresses: Vec<SocketAddr>,
}

impl Forward {
    fn start(mesh: &Mesh, workload: &str, ports: &[&str]) -> Self {
        Self::of(mesh.command(&[&["port-forward", workload], ports].concat()), ports.len(), 2)
    }

    /// Starts a command that prints `count` lines, each with an address as this word.
    fn of(mut command: Command, count: usize, word: usize) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let printed = BufReader::new(child.stdout.take().unwrap()).lines().take(count);
        let lines: Vec<String> = printed.map(Result::unwrap).collect();
        assert_eq!(lines.len(), count, "{lines:?}");
        let address = |line: &String| {
            let word = line.split(' ').nth(word).unwrap();
            word.trim_start_matches("http://").trim_end_matches('/').parse().unwrap()
        };
        Self { child, addresses: lines.iter().map(address).collect(), lines }
    }

    /// Returns how it ended, and its output.
    fn ended(&mut self) -> (ExitStatus, String) {
        let status = eventually("the forward ends", || {
            self.child.try_wait().unwrap().ok_or_else(|| "it runs".to_owned())
        });
        let stderr = BufReader::new(self.child.stderr.take().unwrap()).lines().map(Result::unwrap);
        (status, stderr.collect())
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Requests a page from the host.
fn get(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    block_on(http::get(address, path, Duration::from_secs(60)))
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn ports_are_forwarded(mesh: &Mesh) {
    let mut forward = Forward::start(mesh, "stock-v1", &[":15090", ":15000", "0:9090"]);
    assert!(forward.lines[0].starts_with("Forwarding from 127.0.0.1:"), "{:?}", forward.lines);
    assert!(forward.lines[0].ends_with(" -> 15090"), "{:?}", forward.lines);
    let (status, metrics) = get(forward.addresses[0], "/stats/prometheus").unwrap();
    assert!(status == 200 && metrics.contains("istio_requests_total"), "{metrics}");
    // The admin page answers callers in the pod's network only.
    assert_eq!(get(forward.addresses[1], "/config_dump").unwrap().0, 200);
    let (_, report) = get(forward.addresses[2], "/a").unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["path"], &report["caller"]), (&"/a".into(), &Value::Null), "{report:#}");
    // Longer than the interval at which the command looks for the pod.
    assert_eq!(get(forward.addresses[2], "/delay/1500ms").unwrap().0, 200);
    kill(Pid::from_raw(forward.child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
    let (status, stderr) = forward.ended();
    assert!(status.success() && stderr.is_empty(), "{status} {stderr}");
}

fn the_control_plane_is_forwarded(mesh: &Mesh) {
    let forward = Forward::start(mesh, "control", &[":15014"]);
    let (status, page) = get(forward.addresses[0], "/debug/syncz").unwrap();
    assert!(status == 200 && page.contains("stock-v1"), "{page}");
}

fn dashboards_are_opened(mesh: &Mesh) {
    // Takes the place of the browser, and writes its arguments to a file.
    let folder = mesh.config().parent().unwrap().to_owned();
    let (tools, opened) = (folder.join("tools"), folder.join("opened"));
    fs::create_dir(&tools).unwrap();
    script(&tools.join("xdg-open"), "#!/bin/sh\necho \"$1\" > opened.new\nmv opened.new opened\n");
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    for (arguments, what, page, title) in [
        (&["stock-v1"][..], "the sidecar of shop/stock-v1-", "/config_dump", "skysail-proxy"),
        (&["control", "--browser=false"], "the control plane", "/debug/syncz", "skysaild"),
        (&[], "the control plane", "/debug/syncz", "skysaild"),
    ] {
        let _ = fs::remove_file(&opened);
        let mut command = mesh.command(&[&["dashboard"], arguments].concat());
        command.env("PATH", &path).env("DISPLAY", ":0");
        let mut forward = Forward::of(command, 1, 0);
        let line = &forward.lines[0];
        assert!(line.contains(&format!("/ -> {what}")), "{line}");
        let (status, list) = get(forward.addresses[0], "/").unwrap();
        assert!(status == 200 && list.contains(page), "{list}");
        let url = format!("http://{}/", forward.addresses[0]);
        let accept = "accept: text/html".to_owned();
        let call =
            Call { method: "GET".to_owned(), url: url.clone(), headers: vec![accept], ..Call::default() };
        let (_, html) = block_on(http::call(&call, Duration::from_secs(60))).unwrap();
        assert!(html.contains(title) && html.contains(&format!("<a href=\"{page}\">")), "{html}");
        assert_eq!(get(forward.addresses[0], page).unwrap().0, 200);
        if arguments.contains(&"--browser=false") {
            assert!(!opened.exists());
        } else {
            let seen = eventually("the browser is started", || {
                fs::read_to_string(&opened).map_err(|error| error.to_string())
            });
            assert_eq!(seen, format!("{url}\n"));
        }
        kill(Pid::from_raw(forward.child.id().try_into().unwrap()), Signal::SIGINT).unwrap();
        let (status, stderr) = forward.ended();
        assert!(status.success() && stderr.is_empty(), "{status} {stderr}");
    }
}

fn a_port_in_use_is_refused(mesh: &Mesh) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let output = mesh.run(&["port-forward", "stock-v1", &format!("{port}:9090")]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(&format!("127.0.0.1:{port} is in use; choose another port")), "{stderr}");
    let unknown = mesh.run(&["port-forward", "nobody", "80"]);
    assert!(unknown.status.code() == Some(2) && text(&unknown.stderr).contains("nobody"), "{unknown:?}");
}

fn a_forward_ends_with_its_pod(mesh: &Mesh) {
    let mut forward = Forward::start(mesh, "stock-v1", &[":9090", ":1"]);
    assert!(get(forward.addresses[1], "/").is_err());
    mesh.edit("mesh.yaml", "replicas: 1 # stock-v1", "replicas: 0 # stock-v1");
    let (status, stderr) = forward.ended();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("-> 1: ") && stderr.contains("refused"), "{stderr}");
    assert!(stderr.contains("was removed; run the command again"), "{stderr}");
}

/// Accepts plain text from outside the mesh as well, on a free port of the host.
const OPEN: &str = "
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: open, namespace: shop}
spec:
  selector: {matchLabels: {app: stock}}
  mtls: {mode: PERMISSIVE}
---
apiVersion: v1
kind: Service
metadata: {name: door, namespace: shop}
spec: {type: LoadBalancer, selector: {app: front}, ports: [{name: http, port: 80, targetPort: 8080}]}
";

#[test]
fn published_ports_outlive_pods() {
    let text = [include_str!("shop.yaml"), OPEN].join("---");
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).with(&[
        "-p",
        "0:stock:80",
        "--publish",
        "127.0.0.1:0:shop/stock-v1:9090",
    ]);
    let setup = if Uid::effective().is_root() { setup.as_user(65534) } else { setup };
    let mesh = setup.ready();
    let service = mesh.published("shop/stock:80");
    let workload = mesh.published("shop/stock-v1:9090");
    let closed = mesh.published("shop/door:80");
    let pod = |address| -> Value {
        let (status, report) = get(address, "/a").unwrap();
        let report: Value = serde_json::from_str(&report).unwrap_or_else(|error| panic!("{error}: {report}"));
        assert_eq!((status, &report["caller"]), (200, &Value::Null), "{report:#}");
        // Only a sidecar adds this header.
        assert!(report["headers"]["x-request-id"].is_string(), "{report:#}");
        report["pod"].clone()
    };
    // The pods of the service are used in turn, without the routes of the mesh.
    assert_ne!(pod(service)["version"], pod(service)["version"]);
    let before = pod(workload)["name"].as_str().unwrap().to_owned();
    // STRICT applies to callers from the host as to any others.
    let refused = get(closed, "/");
    assert!(refused.is_err(), "{refused:?}");
    mesh.wait_for_output("the published shop/door:80: the pod closed the connection without an answer; a PeerAuthentication of mode STRICT refuses plain text");

    let label = "    metadata: {labels: {app: stock, version: v1";
    mesh.edit("mesh.yaml", label, &format!("{label}, n: '2'"));
    // No request fails meanwhile.
    eventually("another pod answers", || match pod(workload)["name"].as_str() {
        Some(name) if name != before => Ok(()),
        name => Err(format!("{name:?} answers")),
    });
    // `up` sees the readiness of the new pod shortly after its address is published.
    mesh.wait("the workload is ready once more", |output| {
        let times = output.matches("ready      shop/stock-v1 (1 pod)").count();
        if times == 2 { Ok(()) } else { Err(format!("{times} times so far:\n{output}")) }
    });
    mesh.put("late.yaml", &OPEN.replace("name: door", "name: late"));
    mesh.wait_for_output(
        "Service shop/late:80 (LoadBalancer) was added after the start and is not published; restart `skysail up`",
    );
    let ended = mesh.interrupt();
    assert!(ended.status.success(), "{ended:?}");
}

#[test]
fn invalid_published_ports_are_refused_at_the_start() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    for (wish, problem) in [
        (format!("{address}:stock:80"), format!("{address} is in use; choose another port")),
        ("0:nobody:80".to_owned(), "there is no Service or workload nobody; there are shop/front".to_owned()),
        ("80".to_owned(), "such as 8080:web:80".to_owned()),
    ] {
        let ended = shop().with(&["--publish", &wish]).start().ended();
        assert_eq!(ended.status.code(), Some(2), "{ended:?}");
        assert!(ended.stderr.contains(&problem), "{ended:?}");
    }
}
