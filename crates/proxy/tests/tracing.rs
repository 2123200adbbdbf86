//! Tracing: the spans that collectors receive, and that collectors do not affect requests.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/collector.rs"]
mod collector;
#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;

use std::{collections::HashMap, fs, net::SocketAddr, path::Path};

use collector::{Collector, Received};
use files::cluster;
use program::Program;
use prost::Message as _;
use serde_json::{Value, json};
use skysail_proto::otlp::{ExportTraceServiceRequest, Span, any_value};
use support::{Client, echo, server};
use tokio::net::{TcpListener, TcpStream};

const TYPE: &str = "type.googleapis.com";

fn provider(kind: &str, mut config: Value) -> Value {
    config["@type"] = format!("{TYPE}/envoy.config.trace.v3.{kind}").into();
    json!({"name": kind, "typed_config": config})
}

fn otlp_grpc() -> Value {
    let service = json!({
        "envoy_grpc": {"cluster_name": "collector", "authority": "c.example"},
        "initial_metadata": [{"key": "X-Token", "value": "t"}],
        "timeout": "30s",
    });
    provider("OpenTelemetryConfig", json!({"grpc_service": service, "service_name": "reviews.default"}))
}

fn otlp_http(timeout: &str) -> Value {
    let uri = json!({"uri": "http://c.example/v1/traces", "cluster": "collector", "timeout": timeout});
    let add = json!([{"header": {"key": "x-token", "value": "t"}}]);
    provider("OpenTelemetryConfig", json!({"http_service": {"http_uri": uri, "request_headers_to_add": add}}))
}

fn zipkin() -> Value {
    let config = json!({
        "collector_cluster": "collector",
        "collector_endpoint": "/api/v2/spans",
        "collector_endpoint_version": "HTTP_JSON",
        "collector_hostname": "c.example",
    });
    provider("ZipkinConfig", config)
}

/// Starts a proxy with tracing; the operation of routes to `upstream` is `to-DIRECTION`.
async fn start(
    folder: &Path,
    direction: &str,
    tracing: Value,
    upstream: SocketAddr,
    collector: SocketAddr,
) -> (Program, SocketAddr) {
    start_to(folder, direction, tracing, cluster("upstream", upstream, false), collector).await
}

async fn start_to(
    folder: &Path,
    direction: &str,
    tracing: Value,
    upstream: Value,
    collector: SocketAddr,
) -> (Program, SocketAddr) {
    let manager = json!({
        "@type": format!("{TYPE}/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "h",
        "tracing": tracing,
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "10.0.0.0", "prefix_len": 8}]},
        "access_log": [{"name": "file", "typed_config": {
            "@type": format!("{TYPE}/envoy.extensions.access_loggers.file.v3.FileAccessLog"),
            "path": folder.join("access"),
            "log_format": {"text_format_source": {"inline_string": "%TRACE_ID% %SPAN_ID%\n"}},
        }}],
        "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [{
            "match": {"prefix": "/"},
            "route": {"cluster": "upstream", "retry_policy": {"retry_on": "5xx", "num_retries": 1}},
            "decorator": {"operation": format!("to-{direction}")},
        }]}]},
        "http_filters": [{"name": "router", "typed_config":
            {"@type": format!("{TYPE}/envoy.extensions.filters.http.router.v3.Router")}}],
    });
    let bootstrap = json!({
        "node": {"id": format!("sidecar~10.0.0.1~{direction}.n~n.svc.cluster.local"), "cluster": direction, "locality": {"zone": "z"}},
        "static_resources": {
            "listeners": [{
                "name": "l",
                "traffic_direction": direction,
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
                "filter_chains": [{"filters": [{"name": "h", "typed_config": manager}]}],
            }],
            "clusters": [upstream, cluster("collector", collector, true)],
        },
    });
    let program = Program::start(folder, &bootstrap.to_string()).await;
    let address = program.listener("l").await;
    (program, address)
}

/// Sends a request; returns the status and the headers that the server received.
async fn ask(proxy: SocketAddr, path: &str, fields: &str) -> (String, HashMap<String, String>) {
    let mut client = Client::new(TcpStream::connect(proxy).await.unwrap());
    client
        .send(&format!("GET {path} HTTP/1.1\r\nhost: a.example\r\n{fields}connection: close\r\n\r\n"))
        .await;
    let answer = client.rest().await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let headers = body.lines().filter_map(|line| line.split_once(": "));
    (head[9..12].to_owned(), headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

/// A span, independent of the protocol.
#[derive(Debug)]
struct ReportedSpan {
    trace: String,
    id: String,
    parent: String,
    name: String,
    server: bool,
    tags: HashMap<String, String>,
    /// Nanoseconds.
    start: u64,
    end: u64,
}

fn spans_of(received: &Received) -> Vec<ReportedSpan> {
    if received.headers["content-type"] == "application/json" {
        let spans: Vec<Value> = serde_json::from_slice(&received.message).unwrap();
        return spans.iter().map(of_zipkin).collect();
    }
    let request = ExportTraceServiceRequest::decode(received.message.clone()).unwrap();
    let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    scopes.flat_map(|scope| scope.spans).map(of_otlp).collect()
}

fn of_zipkin(span: &Value) -> ReportedSpan {
    let text = |name: &str| span[name].as_str().unwrap_or_default().to_owned();
    let tags = span["tags"].as_object().unwrap().iter();
    let start = span["timestamp"].as_u64().unwrap() * 1000;
    ReportedSpan {
        trace: text("traceId"),
        id: text("id"),
        parent: text("parentId"),
        name: text("name"),
        server: span["kind"] == "SERVER",
        tags: tags.map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned())).collect(),
        start,
        end: start + span["duration"].as_u64().unwrap() * 1000,
    }
}

fn of_otlp(span: Span) -> ReportedSpan {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let tags = span.attributes.into_iter().map(|one| {
        let Some(any_value::Value::StringValue(text)) = one.value.unwrap().value else {
            unreachable!("no text")
        };
        (one.key, text)
    });
    ReportedSpan {
        trace: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        name: span.name,
        server: span.kind == 2,
        tags: tags.collect(),
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
    }
}

/// Receives this number of spans.
async fn spans(collector: &mut Collector, count: usize) -> Vec<ReportedSpan> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(spans_of(&collector.next().await));
    }
    assert_eq!(all.len(), count, "{all:?}");
    all
}

/// Checks that the spans of a client's and a server's sidecar form one trace.
async fn make_one_trace(provider: Value) -> (ReportedSpan, ReportedSpan, HashMap<String, String>) {
    let (mut collector, folders) = (Collector::start().await, [(); 2].map(|()| tempfile::tempdir().unwrap()));
    let tags = json!([{"tag": "who", "request_header": {"name": "X-Who", "default_value": "nobody"}}]);
    let tracing = json!({"provider": provider, "custom_tags": tags});
    let upstream = echo().await;
    let (inbound, address) =
        start(folders[0].path(), "INBOUND", tracing.clone(), upstream, collector.address).await;
    let (outbound, address) = start(folders[1].path(), "OUTBOUND", tracing, address, collector.address).await;
    let (status, headers) = ask(address, "/a?b=c", "user-agent: test\r\n").await;
    assert_eq!(status, "200");
    // Buffered spans are sent at shutdown.
    let program_log = outbound.quit().await + &inbound.quit().await;
    assert!(!program_log.contains("WARN"), "{program_log}");
    let mut received = spans(&mut collector, 2).await;
    received.sort_by_key(|span| span.server);
    let (server, client) = (received.pop().unwrap(), received.pop().unwrap());
    assert!(server.server && !client.server);
    assert_eq!((&server.trace, &*client.parent), (&client.trace, ""));
    // The client's sidecar propagates the operation of the server's span.
    assert_eq!((&*client.name, &*server.name), ("to-OUTBOUND", "to-OUTBOUND"));
    for (span, node, folder) in [(&server, "INBOUND", &folders[0]), (&client, "OUTBOUND", &folders[1])] {
        let tag = |name: &str| &*span.tags[name];
        assert_eq!((tag("http.url"), tag("http.method")), ("http://a.example/a?b=c", "GET"));
        assert_eq!((tag("http.status_code"), tag("response_flags"), tag("user_agent")), ("200", "-", "test"));
        assert_eq!((tag("component"), tag("upstream_cluster"), tag("zone")), ("proxy", "upstream", "z"));
        assert_eq!(
            (tag("peer.address"), tag("downstream_cluster"), tag("who")),
            ("127.0.0.1", "-", "nobody")
        );
        assert_eq!(tag("node_id"), format!("sidecar~10.0.0.1~{node}.n~n.svc.cluster.local"));
        assert_eq!(tag("guid:x-request-id"), headers["x-request-id"]);
        assert!(!span.tags.contains_key("error") && span.start > 0 && span.start < span.end);
        let logged = fs::read_to_string(folder.path().join("access")).unwrap();
        assert_eq!(logged, format!("{} {}\n", span.trace, span.id));
    }
    assert!(client.start <= server.start);
    assert_eq!(headers["x-request-id"].as_bytes()[14], b'9');
    assert!(!headers.contains_key("x-envoy-decorator-operation"));
    (client, server, headers)
}

#[tokio::test]
async fn two_proxies_make_one_trace_by_otlp_over_grpc() {
    let (client, server, headers) = make_one_trace(otlp_grpc()).await;
    assert_eq!(server.parent, client.id);
    assert_eq!(headers["traceparent"], format!("00-{}-{}-01", server.trace, server.id));
}

#[tokio::test]
async fn two_proxies_make_one_trace_by_otlp_over_http() {
    let (client, server, headers) = make_one_trace(otlp_http("30s")).await;
    assert_eq!(server.parent, client.id);
    assert_eq!(headers["traceparent"], format!("00-{}-{}-01", server.trace, server.id));
}

#[tokio::test]
async fn two_proxies_make_one_trace_by_zipkin() {
    let (client, server, headers) = make_one_trace(zipkin()).await;
    // Both report the same span.
    assert_eq!((&server.id, &*server.parent), (&client.id, ""));
    let b3 = ["x-b3-traceid", "x-b3-spanid", "x-b3-sampled"].map(|name| &*headers[name]);
    assert_eq!(b3, [&*server.trace, &server.id, "1"]);
    assert!(!headers.contains_key("traceparent"));
}

#[tokio::test]
async fn collectors_receive_the_resource() {
    let mut collector = Collector::start().await;
    let folder = tempfile::tempdir().unwrap();
    let upstream = echo().await;
    let tracing = |provider| json!({"provider": provider});
    let (_program, address) =
        start(folder.path(), "INBOUND", tracing(otlp_grpc()), upstream, collector.address).await;
    ask(address, "/", "").await;
    let received = collector.next().await;
    assert_eq!(received.path, "/opentelemetry.proto.collector.trace.v1.TraceService/Export");
    assert!(received.headers["te"] == "trailers" && received.headers["x-token"] == "t");
    let mut request = ExportTraceServiceRequest::decode(received.message).unwrap();
    let resource = request.resource_spans.pop().unwrap();
    let who =
        resource.resource.unwrap().attributes.into_iter().map(|one| (one.key, one.value.unwrap().value));
    let name = Some(any_value::Value::StringValue("reviews.default".to_owned()));
    assert!(who.collect::<Vec<_>>().contains(&("service.name".to_owned(), name)));
    assert_eq!(resource.scope_spans[0].scope.as_ref().unwrap().name, "skysail");

    for (provider, path, kind) in [
        (otlp_http("30s"), "/v1/traces", "application/x-protobuf"),
        (zipkin(), "/api/v2/spans", "application/json"),
    ] {
        let (_program, address) =
            start(folder.path(), "INBOUND", tracing(provider), upstream, collector.address).await;
        ask(address, "/", "").await;
        let received = collector.next().await;
        assert_eq!((&*received.path, &received.headers["content-type"]), (path, &kind.parse().unwrap()));
    }
}

#[tokio::test]
async fn only_sampled_requests_are_reported_and_all_are_propagated() {
    let mut collector = Collector::start().await;
    let folder = tempfile::tempdir().unwrap();
    let tracing = json!({"provider": otlp_grpc(), "random_sampling": {"value": 0}});
    let (_program, address) = start(folder.path(), "INBOUND", tracing, echo().await, collector.address).await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (fields, sampled) in [
        ("", false),
        (&*format!("traceparent: {parent}\r\n"), false),
        ("x-envoy-force-trace: 1\r\n", false),
        ("x-envoy-force-trace: 1\r\nx-forwarded-for: 9.0.0.1\r\n", false),
        ("x-envoy-force-trace: 1\r\nx-forwarded-for: 10.0.0.1\r\n", true),
        ("x-client-trace-id: c\r\n", true),
        ("x-request-id: 01234567-89ab-9cde-8012-0123456789ab\r\n", true),
        (&*format!("x-client-trace-id: c\r\ntraceparent: {parent}\r\ntracestate: a=1\r\n"), true),
    ] {
        let (_, headers) = ask(address, "/", fields).await;
        let passed = &headers["traceparent"];
        assert!(passed.ends_with(if sampled { "-01" } else { "-00" }), "{fields}: {passed}");
        if fields.contains("traceparent") {
            assert!(passed.starts_with(&parent[..36]) && *passed != parent);
        }
        if fields.contains("tracestate") {
            assert_eq!(headers["tracestate"], "a=1");
        }
        if sampled {
            // It has no parent.
            let span = spans(&mut collector, 1).await.pop().unwrap();
            assert_eq!(passed[3..52], format!("{}-{}", span.trace, span.id));
            assert_eq!(span.parent, if fields.contains("traceparent") { &parent[36..52] } else { "" });
        }
    }
    // An invalid header is forwarded unchanged.
    let (_, headers) = ask(address, "/", "x-client-trace-id: c\r\ntraceparent: a\r\n").await;
    assert_eq!(headers["traceparent"], "a");
}

#[tokio::test]
async fn each_try_can_have_a_span() {
    let mut collector = Collector::start().await;
    let folder = tempfile::tempdir().unwrap();
    let failing = server(|_, mut client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            let length = head.len();
            client.send(&format!("HTTP/1.1 503 A\r\ncontent-length: {length}\r\n\r\n{head}")).await;
        }
    })
    .await;
    let tracing = json!({"provider": otlp_grpc(), "spawn_upstream_span": true});
    let (_program, address) = start(folder.path(), "OUTBOUND", tracing, failing, collector.address).await;
    let (status, headers) = ask(address, "/", "").await;
    let received = spans(&mut collector, 3).await;
    let [first, second, request] = received.as_slice() else { unreachable!("{received:?}") };
    assert!(request.server && request.name == "to-OUTBOUND" && request.tags["error"] == "true");
    for span in [first, second] {
        assert_eq!((&span.trace, &span.parent), (&request.trace, &request.id));
        assert!(!span.server && span.name == "router upstream egress");
        assert_eq!(span.tags["http.status_code"], status);
        assert_eq!(span.tags["upstream_address"], failing.to_string());
    }
    assert_eq!(first.tags["canceled"], "true");
    assert_eq!((&*second.tags["retry.count"], second.tags.get("canceled")), ("1", None));
    assert_eq!(headers["traceparent"], format!("00-{}-{}-01", second.trace, second.id));
}

#[tokio::test]
async fn grpc_spans_contain_the_status() {
    let mut collector = Collector::start().await;
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let failing = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = h2::server::handshake(stream).await.unwrap();
        while let Some(Ok((_, mut respond))) = connection.accept().await {
            let head = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
            let mut stream = respond.send_response(head, false).unwrap();
            stream.send_data(bytes::Bytes::from_static(b"content"), false).unwrap();
            let status = [("grpc-status", "14"), ("grpc-message", "later")];
            let trailers = status.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            stream.send_trailers(http::HeaderMap::from_iter(trailers)).unwrap();
        }
    });
    let tracing = json!({"provider": otlp_grpc()});
    let upstream = cluster("upstream", failing, true);
    let (_program, address) = start_to(folder.path(), "INBOUND", tracing, upstream, collector.address).await;
    ask(address, "/s/M", "content-type: application/grpc\r\ngrpc-timeout: 9S\r\nte: trailers\r\n").await;
    let span = spans(&mut collector, 1).await.pop().unwrap();
    let tag = |name: &str| &*span.tags[name];
    assert_eq!((tag("grpc.path"), tag("grpc.authority")), ("/s/M", "a.example"));
    assert_eq!((tag("grpc.content_type"), tag("grpc.timeout")), ("application/grpc", "9S"));
    assert_eq!((tag("grpc.status_code"), tag("grpc.message"), tag("error")), ("14", "later", "true"));
    assert_eq!((tag("http.status_code"), tag("request_size"), tag("response_size")), ("200", "0", "7"));
}

#[tokio::test]
async fn failing_collectors_delay_no_request() {
    // One that is unavailable, and one that never answers.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    for collector in [closed, silent.local_addr().unwrap()] {
        let folder = tempfile::tempdir().unwrap();
        let tracing = json!({"provider": otlp_http("0.1s")});
        let (mut program, address) = start(folder.path(), "INBOUND", tracing, echo().await, collector).await;
        for _ in 0..3 {
            assert_eq!(ask(address, "/", "").await.0, "200");
        }
        program.until("spans could not be sent to cluster collector").await;
        assert_eq!(ask(address, "/", "").await.0, "200");
        let metrics = program.page("GET", "/stats/prometheus").await;
        // Spans that left are lost, others are sent again.
        let name =
            if collector == closed { "skysail_export_retried_total" } else { "skysail_export_failed_total" };
        let counted = metrics.lines().find(|line| line.starts_with(name)).unwrap();
        assert!(counted.contains("spans") && !counted.ends_with(" 0"), "{counted}");
        // The failure is logged once.
        let rest = program.quit().await;
        assert!(!rest.contains("could not be sent to"), "{rest}");
    }
}
