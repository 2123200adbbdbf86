//! Telemetry: spans of `skysail-proxy` and of a real Envoy, the trace context that they forward, and targets.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use serde_json::Value;
use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, Case, ask, get, mesh_with, wait, with};

const RULES: &str = include_str!("tracing.yaml");
/// Address on which the collector listens; set in the process that collects.
const COLLECTOR: &str = "SKYSAIL_TEST_COLLECTOR";
const GATEWAYS: [&str; 2] = ["edge-skysail", "edge-envoy"];
/// Header of the trace context.
const CONTEXT: &str = "\"x-b3-traceid\"";
/// A tag that Istio adds.
const ISTIO_TAG: &str = "istio.canonical_service";

#[test]
fn spans_have_their_settings() {
    let envoys = ["shop/by-envoy", "shop/api-v2", "shop/edge-envoy", "shop/quiet-envoy"];
    let mesh = mesh_with(RULES, &envoys).ready();
    let mut collector = Collector::start(&mesh);
    for client in CLIENTS {
        for server in ["v1", "v2"] {
            spans(&mesh, &collector, client, server);
        }
        wait(&mesh, client, &get("http://plain/", 200, &[CONTEXT]));
        assert_eq!(mark_of_request(&mesh, client, "http://plain/"), "9", "{client}");
    }
    for client in ["quiet-skysail", "quiet-envoy"] {
        let id: &[&str] = &["\"x-request-id\""];
        let untraced = Case { url: "http://plain/", arguments: &[], status: 200, has: id, lacks: &[CONTEXT] };
        wait(&mesh, client, &untraced);
    }
    gateways(&mesh, &collector);
    metrics(&mesh);
    collector.process.kill().unwrap();
    collector.process.wait().unwrap();
}

/// Checks the spans of both proxies of a request.
fn spans(mesh: &Mesh, collector: &Collector, client: &str, server: &str) {
    let to = format!("x-to: {server}");
    for (path, header, user) in [("named", "x-user: ann", "ann"), ("unnamed", "x-other: ann", "nobody")] {
        let path = format!("/{path}/{client}/{server}");
        // Spans that are sent before the collector is ready are lost.
        let (of_client, of_server) = eventually(&format!("the spans of {path}"), || {
            ask(mesh, client, &with(&["-H", &to, "-H", header], &format!("http://api{path}"), 200, &[]))?;
            Ok((collector.tags(&path, "CLIENT")?, collector.tags(&path, "SERVER")?))
        });
        let home = std::env::var("HOME").unwrap();
        let expected = [
            ("side", "client"),
            ("variable", &home),
            ("unset", "missing"),
            ("user", user),
            ("method", "GET of a client"),
            (ISTIO_TAG, client),
        ];
        for (tag, value) in expected {
            assert_eq!(of_client[tag], value, "{tag} in {of_client:#}");
        }
        assert_eq!(of_server["side"], "server", "{of_server:#}");
        for tag in ["variable", ISTIO_TAG] {
            assert!(of_server[tag].is_null(), "{tag} in {of_server:#}");
        }
    }
}

/// Gateways report spans with a tag of their own. They forward no trace context, and no decision in the request id.
fn gateways(mesh: &Mesh, collector: &Collector) {
    for gateway in GATEWAYS {
        let path = format!("/at/{gateway}");
        let url = format!("http://{gateway}{path}");
        let tags = eventually(&format!("the spans of {path}"), || {
            ask(
                mesh,
                "plain",
                &Case { url: &url, arguments: &[], status: 200, has: &[], lacks: &[CONTEXT] },
            )?;
            collector.tags(&path, "SERVER")
        });
        assert!(tags["gateway"] == "edges" && tags["side"].is_null(), "{tags:#}");
        assert_eq!(mark_of_request(mesh, "plain", &url), "4", "{gateway}");
    }
}

/// Returns the character of a request's id that carries the sampling decision: 4 for none.
fn mark_of_request(mesh: &Mesh, client: &str, url: &str) -> String {
    let report = mesh.call(client, url, &[]).json();
    let id = report["headers"]["x-request-id"].as_str().unwrap();
    id[14..15].to_owned()
}

fn metrics(mesh: &Mesh) {
    let labels = |page: &str, metric: &str| -> Option<String> {
        let mut lines = page.lines().filter_map(|line| line.strip_prefix(metric)?.strip_prefix('{'));
        lines.find(|line| line.contains("api.shop.svc.cluster.local")).map(str::to_owned)
    };
    let page = mesh.call("by-skysail", "http://127.0.0.1:15090/stats/prometheus", &[]).body;
    let changed = labels(&page, "istio_requests_total").unwrap();
    assert!(!changed.contains("request_protocol="), "{changed}");
    let other = labels(&page, "istio_request_bytes_count").unwrap();
    assert!(other.contains("request_protocol="), "{other}");
}

/// Process in a pod that receives spans, and what it has received.
struct Collector {
    process: Child,
    spans: Arc<Mutex<Vec<Value>>>,
}

impl Collector {
    fn start(mesh: &Mesh) -> Self {
        let program = std::env::current_exe().unwrap().to_string_lossy().into_owned();
        let variable = format!("{COLLECTOR}=0.0.0.0:9411");
        let test = ["env", &variable, &program, "--exact", "tracing::the_collector", "--nocapture"];
        let mut command = mesh.command(&[&["exec", "collector", "--"], &test[..]].concat());
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let spans = Arc::new(Mutex::new(Vec::new()));
        let known = Arc::clone(&spans);
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Ok(Value::Array(more)) = serde_json::from_str(&line) {
                    known.lock().unwrap().extend(more);
                }
            }
        });
        Self { process, spans }
    }

    /// Returns the tags of a span of this kind for a request.
    fn tags(&self, path: &str, kind: &str) -> Result<Value, String> {
        let spans = self.spans.lock().unwrap();
        let mut own = spans.iter().filter(|span| {
            span["kind"] == kind && span["tags"]["http.url"].as_str().is_some_and(|url| url.ends_with(path))
        });
        own.next()
            .map(|span| span["tags"].clone())
            .ok_or_else(|| format!("no {kind} span of {path} among {}", spans.len()))
    }
}

/// Prints spans in the process that another test starts within a pod.
#[test]
fn the_collector() {
    let Ok(address) = std::env::var(COLLECTOR) else { return };
    for stream in TcpListener::bind(address).unwrap().incoming() {
        thread::spawn(move || collect(stream.unwrap()));
    }
}

/// Prints the body of one request.
fn collect(mut stream: TcpStream) {
    let mut request = Vec::new();
    let mut part = [0; 65_536];
    while let Ok(length @ 1..) = stream.read(&mut part) {
        request.extend_from_slice(&part[..length]);
        let text = String::from_utf8_lossy(&request);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let head = head.to_ascii_lowercase();
        let lines = head.lines().filter_map(|line| line.strip_prefix("content-length: "));
        let expected: Option<usize> = lines.filter_map(|length| length.parse().ok()).next();
        if expected.is_some_and(|expected| body.len() < expected) {
            continue;
        }
        println!("{body}");
        let _ = stream.write_all(b"HTTP/1.1 202 Accepted\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
        return;
    }
}
