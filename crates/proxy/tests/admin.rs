//! Admin page compared with Envoy's for the same bootstrap, and the effects of `overload_manager` and
//! compression.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/envoy.rs"]
mod envoy;
#[path = "support/pki.rs"]
mod pki;
#[path = "support/program.rs"]
mod program;
mod support;
#[path = "support/tls_config.rs"]
mod tls_config;

use std::{collections::BTreeMap, io::Read as _, net::SocketAddr};

use pki::{Ca, Leaf};
use program::Program;
use rcgen::SanType;
use serde_json::{Value, json};
use support::Client;
use tls_config::{inline, own};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// Starts a server that answers every request with a long text.
async fn server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let text = "hello ".repeat(500);
                let answer = format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{text}",
                    text.len()
                );
                let mut head = [0; 4096];
                while matches!(stream.read(&mut head).await, Ok(read) if read > 0) {
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    address
}

/// Returns a bootstrap with listener `l`, and `bypass`, which is exempt from the overload manager.
fn bootstrap(server: SocketAddr, overload: &str) -> String {
    let listener = |name: &str, more: &str| {
        format!(
            r#"
  - name: {name}
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    {more}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          route_config: {{name: t, virtual_hosts: [{{name: v, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: c}}}}]}}]}}
          http_filters:
          - name: envoy.filters.http.compressor
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor
              compressor_library: {{name: gzip, typed_config: {{"@type": type.googleapis.com/envoy.extensions.compression.gzip.compressor.v3.Gzip}}}}
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}"#
        )
    };
    format!(
        r#"
node: {{id: a, cluster: b, metadata: {{NAMESPACE: n}}, locality: {{region: r, zone: z}}}}
admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}}}
layered_runtime:
  layers:
  - name: global config
    static_layer: {{re2.max_program_size.error_level: "32768", a: {{b: 5}}}}
  - {{name: admin, admin_layer: {{}}}}
overload_manager:
  refresh_interval: 0.01s
  resource_monitors: [{overload}
static_resources:
  listeners:{}{}
  clusters:
  - name: c
    type: STATIC
    connect_timeout: 1s
    load_assignment:
      cluster_name: c
      endpoints:
      - locality: {{region: r, zone: z}}
        lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}}}]
"#,
        listener("l", ""),
        listener("bypass", "bypass_overload_manager: true\n    ignore_global_conn_limit: true"),
        server.port()
    )
}

const CONNECTIONS: &str = r#"{name: envoy.resource_monitors.global_downstream_max_connections, typed_config: {"@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig, max_active_downstream_connections: 2}}]"#;

/// Sends a request on a connection and returns head and body.
async fn request(client: &mut Client, accept: &str) -> (String, Vec<u8>) {
    client.send(&format!("GET / HTTP/1.1\r\nhost: a\r\n{accept}connection: close\r\n\r\n")).await;
    let all = client.rest_of_bytes().await;
    let end = all.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    (String::from_utf8(all[..end].to_vec()).unwrap(), all[end + 4..].to_vec())
}

async fn connect(address: SocketAddr) -> Client {
    Client::new(TcpStream::connect(address).await.unwrap())
}

/// Returns whether a request gets status 200; the connection may be closed before it is sent.
async fn is_answered(address: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    answer.starts_with(b"HTTP/1.1 200 ")
}

/// Decodes a chunked body.
fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    loop {
        let end = body.windows(2).position(|window| window == b"\r\n").unwrap();
        let length = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        if length == 0 {
            return content;
        }
        content.extend(&body[end + 2..end + 2 + length]);
        body = &body[end + 2 + length + 2..];
    }
}

/// Parses the JSON after a head.
fn json(answer: &str) -> Value {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    let body = if head.to_lowercase().contains("transfer-encoding: chunked") {
        String::from_utf8(unchunked(body.as_bytes())).unwrap()
    } else {
        body.to_owned()
    };
    serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"))
}

/// Collects every path in a value with its type; the elements of a list have the same shape.
fn shape(value: &Value, path: &str, shapes: &mut BTreeMap<String, &'static str>) {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(items) => {
            items.iter().for_each(|item| shape(item, &format!("{path}[]"), shapes));
            "list"
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| shape(field, &format!("{path}.{name}"), shapes));
            "object"
        }
    };
    shapes.insert(path.to_owned(), kind);
}

#[tokio::test]
async fn pages_have_envoys_shape() {
    let folder = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(server().await, CONNECTIONS);
    let (envoy, ours) =
        (envoy::Running::start(&bootstrap).await, Program::start(folder.path(), &bootstrap).await);
    for address in [envoy.listener("l").await, ours.listener("l").await] {
        request(&mut connect(address).await, "").await;
    }
    // Fields that the sidecar does not have: limits and load balancing by priority, and what only Envoy counts
    // or its build contains.
    let without = [
        ".cluster_statuses[].circuit_breakers.thresholds[].priority",
        ".command_line_options.enable_mutex_tracing",
        ".command_line_options.log_format_escaped",
        ".command_line_options.use_dynamic_base_id",
        ".command_line_options.base_id_path",
        ".command_line_options.enable_fine_grain_logging",
        ".command_line_options.socket_path",
        ".command_line_options.socket_mode",
        ".command_line_options.enable_core_dump",
        ".command_line_options.stats_tag",
        ".command_line_options.skip_hot_restart_on_no_parent",
        ".command_line_options.skip_hot_restart_parent_stats",
        ".command_line_options.skip_deprecated_logs",
        ".command_line_options.file_flush_min_size",
        ".command_line_options.log_stacktrace_single_entry",
        ".node.user_agent_build_version",
        ".node.extensions",
        ".node.client_features",
        ".node.listening_addresses",
        ".node.dynamic_parameters",
        ".node.locality.sub_zone",
        ".node.metadata.NAMESPACE",
    ];
    for page in [
        "/clusters?format=json",
        "/listeners?format=json",
        "/memory",
        "/runtime",
        "/server_info",
        "/certs",
        "/stats?format=json&type=Counters&filter=upstream_rq_total",
        "/stats?format=json&type=Histograms&filter=none",
        "/config_dump?resource=static_clusters",
    ] {
        let (mut wanted, mut found) = (BTreeMap::new(), BTreeMap::new());
        shape(&json(&envoy.page(page).await), "", &mut wanted);
        shape(&json(&ours.page("GET", page).await), "", &mut found);
        for (path, kind) in &wanted {
            if !without.iter().any(|known| path.starts_with(known)) {
                assert_eq!(found.get(path), Some(kind), "{page}{path}: {found:#?}");
            }
        }
    }
    // Scripts compare these pages literally.
    for page in ["/runtime", "/config_dump?resource=static_clusters&mask=cluster.name"] {
        let strip = |mut value: Value| {
            value["configs"]
                .as_array_mut()
                .into_iter()
                .flatten()
                .for_each(|it| it["last_updated"] = Value::Null);
            value
        };
        let (wanted, found) = (json(&envoy.page(page).await), json(&ours.page("GET", page).await));
        assert_eq!(strip(found), strip(wanted), "{page}");
    }
    // Names of statistics, with values where both must have the same count.
    let names = |answer: String| -> BTreeMap<String, String> {
        let lines = answer.lines().filter_map(|line| line.split_once(": "));
        lines.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    let wanted = names(envoy.page("/stats?usedonly&type=Counters&filter=^(cluster|http)%5C.[cl]%5C.").await);
    let found =
        names(ours.page("GET", "/stats?usedonly&type=Counters&filter=^(cluster|http)%5C.[cl]%5C.").await);
    for name in ["cluster.c.upstream_cx_total", "cluster.c.upstream_rq_total", "http.l.downstream_rq_total"] {
        assert_eq!(
            (found.get(name), wanted.get(name)),
            (Some(&"1".to_owned()), Some(&"1".to_owned())),
            "{found:?}"
        );
    }
    let ready = "/stats?usedonly&filter=^(server%5C.state|listener_manager%5C.workers_started)";
    for answer in [envoy.page(ready).await, ours.page("GET", ready).await] {
        assert!(answer.contains("listener_manager.workers_started: 1\nserver.state: 0\n"), "{answer}");
    }
    let refused = ours.page("GET", "/stats?filter=(").await;
    assert!(refused.starts_with("HTTP/1.1 400 "), "{refused}");
    ours.page("POST", "/healthcheck/fail").await;
    assert!(ours.page("GET", "/ready").await.starts_with("HTTP/1.1 503 "));
    assert!(ours.page("GET", "/stats?filter=server.state").await.contains("server.state: 1\n"));
    ours.page("POST", "/healthcheck/ok").await;
    assert!(ours.page("GET", "/ready").await.starts_with("HTTP/1.1 200 "));
    ours.quit().await;
}

#[tokio::test]
async fn responses_are_compressed_as_by_envoy() {
    let folder = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(server().await, CONNECTIONS);
    let (envoy, ours) =
        (envoy::Running::start(&bootstrap).await, Program::start(folder.path(), &bootstrap).await);
    for address in [envoy.listener("l").await, ours.listener("l").await] {
        let (head, body) = request(&mut connect(address).await, "accept-encoding: gzip\r\n").await;
        assert!(head.contains("\r\ncontent-encoding: gzip") && !head.contains("content-length"), "{head}");
        assert!(head.contains("\r\nvary: Accept-Encoding"), "{head}");
        assert!(body.len() < 300, "{}", body.len());
        let mut text = String::new();
        flate2::read::GzDecoder::new(&*unchunked(&body)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello ".repeat(500));
        for accept in ["", "accept-encoding: br\r\n", "accept-encoding: gzip;q=0\r\n"] {
            let (head, body) = request(&mut connect(address).await, accept).await;
            assert!(
                head.contains("\r\ncontent-length: 3000") && !head.contains("content-encoding"),
                "{head}"
            );
            assert_eq!(body, text.as_bytes());
        }
    }
}

#[tokio::test]
async fn connections_above_the_limit_are_closed_as_by_envoy() {
    let folder = tempfile::tempdir().unwrap();
    let bootstrap = bootstrap(server().await, CONNECTIONS);
    let (envoy, mut ours) =
        (envoy::Running::start(&bootstrap).await, Program::start(folder.path(), &bootstrap).await);
    for (limited, exempt) in [
        (envoy.listener("l").await, envoy.listener("bypass").await),
        (ours.listener("l").await, ours.listener("bypass").await),
    ] {
        let mut open = Vec::new();
        for _ in 0..2 {
            let mut client = connect(limited).await;
            client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
            assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
            open.push(client);
        }
        // The client writes nothing, so that no reset overtakes the FIN.
        assert_eq!(connect(limited).await.rest().await, "");
        assert!(request(&mut connect(exempt).await, "").await.0.starts_with("HTTP/1.1 200 "));
        open.pop();
        support::within(async { while !is_answered(limited).await {} }).await;
    }
    ours.until("there are max_active_downstream_connections connections").await;
    let stats = ours.page("GET", "/stats?usedonly&filter=global_cx_overflow").await;
    assert!(stats.contains("listener.l.downstream_global_cx_overflow: "), "{stats}");
}

#[tokio::test]
async fn requests_are_refused_and_connections_wait_while_memory_is_short() {
    let folder = tempfile::tempdir().unwrap();
    let server = server().await;
    let short = |action: &str| {
        format!(
            r#"{{name: heap, typed_config: {{"@type": type.googleapis.com/envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig, max_heap_size_bytes: 1}}}}]
  actions: [{{name: envoy.overload_actions.{action}, triggers: [{{name: heap, threshold: {{value: 0.5}}}}]}}]"#
        )
    };
    for (action, words) in [
        ("stop_accepting_requests", "HTTP/1.1 503 "),
        ("reject_incoming_connections", ""),
        ("stop_accepting_connections", ""),
        ("shrink_heap", "HTTP/1.1 200 "),
    ] {
        let ours = Program::start(folder.path(), &bootstrap(server, &short(action))).await;
        let active = format!("overload.envoy.overload_actions.{action}.active: 1\n");
        support::within(async { while !ours.page("GET", "/stats?usedonly").await.contains(&active) {} })
            .await;
        let exempt = ours.listener("bypass").await;
        assert!(request(&mut connect(exempt).await, "").await.0.starts_with("HTTP/1.1 200 "), "{action}");
        let mut client = connect(ours.listener("l").await).await;
        if action == "stop_accepting_connections" {
            // It waits in the kernel's queue; the admin page and exempt listeners do not wait.
            let served = ours.page("GET", "/stats?filter=listener.l.downstream_cx_total").await;
            assert!(!served.contains("downstream_cx_total: 1"), "{served}");
        } else if words.is_empty() {
            assert_eq!(client.rest().await, "", "{action}");
        } else {
            let (head, _) = request(&mut client, "").await;
            assert!(head.starts_with(words), "{action}: {head}");
        }
        ours.quit().await;
    }
}

#[tokio::test]
async fn certificates_and_roots_in_the_configuration_are_listed() {
    let (west, east) = (Ca::root("west"), Ca::root("east"));
    let names = vec![SanType::DnsName("server.example".try_into().unwrap())];
    let own = own(&west.sign(Leaf::new(1, names)));
    let context = |ca: &Ca| {
        let validation = json!({"trusted_ca": inline(&ca.pem)});
        json!({"common_tls_context": {"tls_certificates": own, "validation_context": validation}})
    };
    let listeners = [
        tls_config::listener("west", Some(&context(&west)), &[]),
        tls_config::listener("east", Some(&context(&east)), &[]),
    ];
    let text = tls_config::bootstrap(&listeners, &[]);
    let folder = tempfile::tempdir().unwrap();
    let (envoy, ours) = (envoy::Running::start(&text).await, Program::start(folder.path(), &text).await);
    let listed = |page: String| -> Vec<String> {
        let all = json(&page);
        let all = all["certificates"].as_array().unwrap().iter().flat_map(|entry| {
            ["ca_cert", "cert_chain"].into_iter().flat_map(|kind| {
                let certificates = entry[kind].as_array().into_iter().flatten();
                certificates.map(move |one| format!("{kind} {} {}", one["path"], one["serial_number"]))
            })
        });
        let mut all: Vec<_> = all.collect();
        all.sort();
        all
    };
    let theirs = listed(envoy.page("/certs").await);
    assert_eq!(listed(ours.page("GET", "/certs").await), theirs);
    assert_eq!(
        theirs.iter().filter(|line| line.starts_with("ca_cert \"<inline>\" ")).count(),
        2,
        "{theirs:?}"
    );
}
