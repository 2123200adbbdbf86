//! An edited policy ends open connections and WebSockets that it denies, and no others.

#![allow(clippy::unwrap_used, reason = "helpers of tests may end the test")]

use std::{
    env,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    thread,
};

use skysail_testkit::{Mesh, Setup, eventually};

/// Action of this program in a pod: `serve`, or an `ADDRESS` to connect to, or `ADDRESS websocket`.
const PART: &str = "SKYSAIL_TEST_PART";
/// Prefix of its output, because the test harness prints lines as well.
const SAYS: &str = "says ";

const MORE: &str = "
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: back, namespace: shop}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: back, namespace: shop}
spec:
  selector: {matchLabels: {app: back}}
  template:
    metadata: {labels: {app: back}}
    spec:
      serviceAccountName: back
      containers: [{name: web, image: registry.example/shop/back}]
---
apiVersion: v1
kind: Service
metadata: {name: lines, namespace: shop}
spec:
  selector: {app: lines}
  ports: [{name: tcp, port: 9000}, {name: http, port: 9001}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: lines, namespace: shop}
spec:
  selector: {matchLabels: {app: lines}}
  template:
    metadata: {labels: {app: lines}}
    spec:
      # The ports of the service are left to the test.
      containers: [{name: lines, image: registry.example/shop/lines, ports: [{containerPort: 8080}]}]
";

const DENY: &str = "
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: no-back, namespace: shop}
spec:
  selector: {matchLabels: {app: lines}}
  action: DENY
  rules: [{from: [{source: {principals: [cluster.local/ns/shop/sa/back]}}]}]
";

/// A connection that is held open from inside a workload.
struct Talk {
    child: Child,
    into: ChildStdin,
    lines: io::Lines<BufReader<ChildStdout>>,
}

impl Talk {
    fn start(mesh: &Mesh, workload: &str, part: &str) -> Self {
        let (part, program) = (format!("{PART}={part}"), env::current_exe().unwrap());
        let run = ["--ignored", "--exact", "--nocapture", "act_as_a_pod"];
        let program = program.to_string_lossy();
        let mut command =
            mesh.command(&[&["exec", workload, "--", "env", &part, &program], &run[..]].concat());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { into: child.stdin.take().unwrap(), child, lines }
    }

    /// Returns its next line; `None` when it has ended.
    fn next(&mut self) -> Option<String> {
        self.lines.by_ref().find_map(|line| Some(line.unwrap().split_once(SAYS)?.1.to_owned()))
    }

    /// Sends a line, which returns.
    fn echoes(&mut self) {
        writeln!(self.into, "ping").unwrap();
        assert_eq!(self.next().as_deref(), Some("ping"));
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[test]
fn an_edited_policy_ends_connections_and_websockets_that_it_denies() {
    let text = format!("{}{MORE}", include_str!("shop.yaml"));
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    let mut server = Talk::start(&mesh, "lines", "serve");
    assert_eq!(server.next().as_deref(), Some("ready"));
    let talk = |workload: &str, part: &str| {
        eventually("it talks", || {
            let mut talk = Talk::start(&mesh, workload, part);
            if writeln!(talk.into, "ping").is_ok() && talk.next().as_deref() == Some("ping") {
                Ok(talk)
            } else {
                Err(format!("{workload} {part}"))
            }
        })
    };
    let parts = ["lines.shop:9000", "lines.shop:9001 websocket"];
    let mut denied = parts.map(|part| talk("back", part));
    let mut allowed = parts.map(|part| talk("front", part));
    mesh.put("policy.yaml", DENY);
    for talk in &mut denied {
        assert_eq!(talk.next(), None, "it ends");
    }
    allowed.iter_mut().for_each(Talk::echoes);
    let metrics = mesh.call("lines", "http://127.0.0.1:15000/stats/prometheus", &[]).body;
    for metric in ["skysail_listener_downstream_cx_revoked{", "skysail_http_downstream_rq_revoked{"] {
        let one = metrics.lines().any(|line| line.starts_with(metric) && line.ends_with(" 1"));
        assert!(one, "{metric}: {metrics}");
    }
}

#[test]
#[ignore = "not a test: the other test runs it in pods"]
fn act_as_a_pod() {
    let Ok(part) = env::var(PART) else { return };
    if part == "serve" {
        let listeners = [9000, 9001].map(|port| TcpListener::bind(("0.0.0.0", port)).unwrap());
        println!("{SAYS}ready");
        let serving = listeners.map(|listener| thread::spawn(move || listener.incoming().for_each(serve)));
        for one in serving {
            one.join().unwrap();
        }
    }
    let (address, websocket) = part.split_once(' ').map_or((&*part, false), |(address, _)| (address, true));
    let mut stream = TcpStream::connect(address).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    if websocket {
        let host = address.split(':').next().unwrap();
        let head =
            format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        assert!(lines.next().unwrap().starts_with("HTTP/1.1 101 "));
        assert!(lines.any(|line| line.is_empty()));
    }
    thread::spawn(move || {
        for line in io::stdin().lines() {
            writeln!(stream, "{}", line.unwrap()).unwrap();
        }
    });
    lines.for_each(|line| println!("{SAYS}{line}"));
    // The thread that waits for input ends with the process.
    std::process::exit(0);
}

/// Accepts a WebSocket if the client requests one, and echoes the data.
fn serve(stream: io::Result<TcpStream>) {
    thread::spawn(move || {
        let mut answers = stream.unwrap();
        let mut lines = BufReader::new(answers.try_clone().unwrap()).lines().map_while(Result::ok).peekable();
        if lines.peek().is_some_and(|line| line.starts_with("GET ")) {
            assert!(lines.any(|line| line.is_empty()));
            let head =
                "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
            answers.write_all(head.as_bytes()).unwrap();
        }
        for line in lines {
            if writeln!(answers, "{line}").is_err() {
                return;
            }
        }
    });
}
