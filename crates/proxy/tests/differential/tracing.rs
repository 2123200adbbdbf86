//! Tracing: headers that servers receive, and spans that a collector receives.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

use prost::Message as _;
use serde_json::{Value, json};
use skysail_proto::otlp::{ExportTraceServiceRequest, any_value};

use crate::{
    listener::address,
    request::{Request, Version},
    servers::{cluster, http1, read_head},
    twins::Twins,
};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SHORT: &str = "8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";
const PARENT: &str = "00f067aa0ba902b7";

/// Received spans; the flag is true for Envoy's.
#[derive(Default)]
struct Collected {
    received: Mutex<Vec<(bool, String)>>,
    more: Condvar,
}

/// Returns listeners: direction, tracing, and further manager settings.
fn listeners() -> Vec<(&'static str, Value, Value)> {
    let zipkin = |more: Value| {
        let mut config = json!({
            "@type": "type.googleapis.com/envoy.config.trace.v3.ZipkinConfig",
            "collector_cluster": "collector",
            "collector_endpoint": "/zipkin",
            "collector_endpoint_version": "HTTP_JSON",
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"name": "zipkin", "typed_config": config})
    };
    let otlp = || {
        let uri = json!({"uri": "http://c.example/otlp", "cluster": "collector", "timeout": "30s"});
        json!({"name": "otlp", "typed_config": {
            "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
            "http_service": {"http_uri": uri},
        }})
    };
    let request_id = |config: Value| {
        let mut config = config;
        config["@type"] =
            "type.googleapis.com/envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig".into();
        json!({"request_id_extension": {"typed_config": config}})
    };
    let internal = json!({
        "internal_address_config": {"cidr_ranges": [{"address_prefix": "10.0.0.0", "prefix_len": 8}]},
    });
    let none = json!({"value": 0});
    vec![
        ("INBOUND", json!({"provider": otlp()}), json!({})),
        ("OUTBOUND", json!({"provider": otlp(), "max_path_tag_length": 4}), json!({})),
        ("OUTBOUND", json!({"provider": otlp(), "spawn_upstream_span": true}), json!({})),
        ("INBOUND", json!({"provider": otlp(), "random_sampling": none}), internal),
        ("INBOUND", json!({"provider": otlp(), "overall_sampling": none}), json!({})),
        ("INBOUND", json!({"provider": otlp()}), request_id(json!({"pack_trace_reason": false}))),
        (
            "INBOUND",
            json!({"random_sampling": none, "provider": otlp()}),
            request_id(json!({"use_request_id_for_trace_sampling": false})),
        ),
        ("INBOUND", json!({"provider": zipkin(json!({}))}), json!({})),
        ("OUTBOUND", json!({"provider": zipkin(json!({}))}), json!({})),
        ("INBOUND", json!({"provider": zipkin(json!({})), "random_sampling": none}), json!({})),
        ("OUTBOUND", json!({"provider": zipkin(json!({})), "spawn_upstream_span": true}), json!({})),
        (
            "INBOUND",
            json!({"provider": zipkin(json!({"trace_context_option": "USE_B3_WITH_W3C_PROPAGATION"}))}),
            json!({}),
        ),
        (
            "INBOUND",
            json!({"provider": zipkin(json!({"trace_id_128bit": true, "shared_span_context": false}))}),
            json!({}),
        ),
        ("INBOUND", json!({"provider": otlp()}), json!({"use_remote_address": true})),
    ]
}

fn listener(number: usize, (direction, tracing, more): (&str, Value, Value)) -> Value {
    let mut tracing = tracing;
    let literal = |name: &str, value: &str| json!({"tag": name, "literal": {"value": value}});
    let header = |name: &str, header: &str| json!({"tag": name, "request_header": {"name": header}});
    let metadata = |name: &str, default: &str| {
        let key = json!({"key": "a", "path": [{"key": "b"}]});
        json!({"tag": name, "metadata": {"kind": {"request": {}}, "metadata_key": key, "default_value": default}})
    };
    tracing["custom_tags"] = json!([
        header("n", "x-n"),
        header("none", "x-none"),
        literal("literal", "a"),
        metadata("metadata", "m"),
        metadata("no-metadata", ""),
        {"tag": "format", "value": "%REQ(:method)% %RESPONSE_CODE%"},
        {"tag": "no-format", "value": "%REQ(x-none)%"},
        {"tag": "environment", "environment": {"name": "SKYSAIL_NONE", "default_value": "e"}},
    ]);
    let own = json!({"custom_tags": [literal("literal", "b"), literal("own", "c")]});
    let retry = json!({"retry_on": "5xx", "num_retries": 2, "retry_back_off": {"base_interval": "0.001s", "max_interval": "0.002s"}});
    let mut manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "a",
        "server_name": "twin",
        "tracing": tracing,
        "route_config": {"validate_clusters": false, "virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [
            {"match": {"prefix": "/named"}, "route": {"cluster": "one"}, "decorator": {"operation": "op/*"}},
            {"match": {"prefix": "/quiet"}, "route": {"cluster": "one"},
                "decorator": {"operation": "op/*", "propagate": false}},
            {"match": {"prefix": "/own"}, "route": {"cluster": "one"}, "tracing": own},
            {"match": {"prefix": "/never"}, "route": {"cluster": "one"}, "tracing": {"random_sampling": {}}},
            {"match": {"prefix": "/direct"}, "direct_response": {"status": 418}, "decorator": {"operation": "op/*"}},
            {"match": {"prefix": "/none"}, "route": {"cluster": "none"}},
            {"match": {"prefix": "/written"}, "route": {"cluster": "one", "prefix_rewrite": "/other"}},
            {"match": {"prefix": "/gone"}, "route": {"cluster": "gone", "retry_policy": retry}},
            {"match": {"prefix": "/r"}, "route": {"cluster": "one"}},
        ]}]},
        "http_filters": [{"name": "router", "typed_config":
            {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}],
    });
    manager.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({
        "name": format!("listener-{number}"),
        "traffic_direction": direction,
        "address": address(),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    })
}

/// Returns requests: listener, path, headers, and the number of their spans.
fn requests() -> Vec<(usize, &'static str, Vec<String>, usize)> {
    let mut requests = Vec::new();
    let mut add = |listener, path, headers: &[&str], spans| {
        requests.push((listener, path, headers.iter().map(|&header| header.to_owned()).collect(), spans));
    };
    let parent = |flags| format!("traceparent: 00-{TRACE}-{SPAN}-{flags}");
    let grpc = "content-type: application/grpc";
    for path in ["/r?a=b", "/named", "/quiet", "/own", "/direct", "/none", "/written/a", "/gone", "/missing"]
    {
        add(0, path, &[], 1);
        add(1, path, &[], 1);
        // Including spans of tries.
        add(
            2,
            path,
            &[],
            match path {
                "/direct" | "/none" | "/missing" => 1,
                "/gone" => 4,
                _ => 2,
            },
        );
    }
    add(0, "/never", &[], 0);
    add(0, "/r", &["x-client-trace-id: c", "user-agent: u", "x-envoy-downstream-service-cluster: d"], 1);
    add(0, "/r", &[grpc, "grpc-timeout: 5S", "te: trailers"], 1);
    add(0, "/none", &[grpc, "te: trailers"], 1);
    add(1, "/none", &[grpc, "te: trailers"], 1);
    for listener in [0, 1] {
        add(listener, "/named", &["x-envoy-decorator-operation: other"], 1);
        add(listener, "/r", &["x-envoy-decorator-operation:"], 1);
        add(listener, "/r", &[&parent("01"), "tracestate: a=b", "tracestate: c=d"], 1);
        add(listener, "/r", &[&parent("00")], 0);
        add(listener, "/r", &["tracestate: a=b"], 1);
        add(listener, "/r", &["traceparent: bad", "tracestate: a=b"], 0);
        add(listener, "/named", &["traceparent: bad"], 0);
        add(listener, "/r", &[&parent("01").to_uppercase().replace("TRACEPARENT", "traceparent")], 1);
    }
    add(2, "/r", &[&parent("01"), "tracestate: a=b"], 2);
    add(2, "/r", &[&parent("00")], 0);
    let id = |mark| format!("x-request-id: 01234567-89ab-{mark}cde-8012-0123456789ab");
    for listener in [0, 3, 4, 5] {
        let all = usize::from(matches!(listener, 0 | 5));
        let marked = usize::from(listener != 4);
        add(listener, "/r", &[&id('4')], all);
        for mark in ['9', 'a', 'b'] {
            add(listener, "/r", &[&id(mark)], marked);
        }
        add(listener, "/r", &[&id('1')], all);
        add(listener, "/r", &["x-request-id: 01234567"], all);
        add(listener, "/r", &["x-request-id: 0123456"], 0);
        add(listener, "/r", &["x-request-id: -1234567-89ab-4cde-8012-0123456789ab"], 0);
        add(listener, "/r", &["x-client-trace-id: c"], marked);
        add(listener, "/r", &["x-envoy-force-trace: 1"], all);
        add(listener, "/r", &["x-envoy-force-trace: 1", "x-forwarded-for: 10.0.0.1,10.0.0.2"], all);
    }
    add(3, "/r", &[&parent("01")], 0);
    add(3, "/r", &["x-client-trace-id: c", &parent("00")], 0);
    add(6, "/r", &[], 1);
    add(6, "/r", &[&id('4')], 1);
    add(13, "/r", &["x-envoy-force-trace: 1", "x-envoy-decorator-operation: other"], 1);

    let b3 = |parts: &[&str]| format!("b3: {}", parts.join("-"));
    for listener in 7..=12 {
        let tries = if listener == 10 { 2 } else { 1 };
        let random = if listener == 9 { 0 } else { tries };
        for path in ["/r", "/named"] {
            add(listener, path, &[], random);
        }
        let ids = [&*format!("x-b3-traceid: {SHORT}"), &*format!("x-b3-spanid: {SPAN}")];
        add(listener, "/r", &ids, random);
        for (value, sampled) in [("1", true), ("true", true), ("0", false), ("d", false)] {
            let received = if sampled { tries } else { 0 };
            add(listener, "/r", &[ids[0], ids[1], &format!("x-b3-sampled: {value}")], received);
            add(listener, "/r", &[&format!("x-b3-sampled: {value}")], received);
        }
        let above = format!("x-b3-parentspanid: {PARENT}");
        add(listener, "/r", &[&format!("x-b3-traceid: {TRACE}"), ids[1], &above, "x-b3-sampled: 1"], tries);
        add(listener, "/r", &["x-b3-traceid: 1a", "x-b3-spanid: 2b", "x-b3-sampled: 1"], tries);
        add(listener, "/r", &["x-b3-traceid: zz", ids[1]], 0);
        add(listener, "/r", &[ids[0]], random);
        for (flag, received) in [("1", tries), ("d", tries), ("0", 0)] {
            add(listener, "/r", &[&b3(&[flag])], received);
            add(listener, "/r", &[&b3(&[TRACE, SPAN, flag])], received);
            add(listener, "/r", &[&b3(&[SHORT, SPAN, flag, PARENT])], received);
        }
        add(listener, "/r", &[&b3(&[SHORT, SPAN])], random);
        for wrong in
            [&["x"][..], &["a", "b"], &[SHORT, SPAN, "x"], &[SHORT, SPAN, ""], &[SHORT, SPAN, "1", "2"]]
        {
            add(listener, "/r", &[&b3(wrong)], 0);
        }
        let w3c = if listener == 11 { 0 } else { random };
        add(listener, "/r", &[&parent("00"), "tracestate: a=b"], w3c);
        add(listener, "/r", &[&parent("01"), ids[0], ids[1], "x-b3-sampled: 1"], tries);
        add(listener, "/r", &["traceparent: bad"], random);
    }
    requests
}

#[test]
fn spans_equal_envoys() {
    let collected = Arc::new(Collected::default());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let collector = cluster("collector", listener.local_addr().unwrap().port());
    let hears = collected.clone();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let collected = hears.clone();
            thread::spawn(move || collect(connection.unwrap(), &collected));
        }
    });
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listeners: Vec<Value> =
        listeners().into_iter().enumerate().map(|(number, one)| self::listener(number, one)).collect();
    let bootstrap = json!({
        "node": {"id": "sidecar~127.0.0.1~a.b~b.svc.cluster.local", "cluster": "a.b", "locality": {"zone": "z"}},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "layered_runtime": {"layers": [{"name": "static", "static_layer": {
            "tracing.zipkin.min_flush_spans": 1, "tracing.opentelemetry.min_flush_spans": 1,
        }}]},
        "static_resources": {"listeners": listeners, "clusters": [http1("one"), collector, cluster("gone", closed)]},
    });
    let twins = Twins::start(&bootstrap);
    let (mut differences, mut wanted) = (Vec::new(), 0);
    for (number, (listener, path, headers, spans)) in requests().into_iter().enumerate() {
        let mut request = Request::new(Version::Http11, "GET", path.to_owned(), "a.example:80".to_owned());
        request.field("x-n", number.to_string());
        for (name, value) in headers.iter().filter_map(|header| header.split_once(':')) {
            request.field(name, value.trim());
        }
        let [(theirs, ()), (ours, ())] = twins.ask(listener, &request, || ());
        let (theirs, ours) = (without_ids(&theirs), without_ids(&ours));
        if theirs != ours {
            differences.push(format!(
                "{number}, listener {listener}, to\n{request}\nEnvoy answers\n{theirs}and Skysail\n{ours}"
            ));
        }
        wanted += spans;
    }
    for (number, (theirs, ours)) in sort(&collected, wanted) {
        if theirs != ours {
            differences.push(format!(
                "of request {number} Envoy tells\n{}\nand Skysail\n{}",
                theirs.join("\n"),
                ours.join("\n")
            ));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}

/// Returns the spans of both by request, once there are `wanted`.
fn sort(collected: &Collected, wanted: usize) -> BTreeMap<String, (Vec<String>, Vec<String>)> {
    let received = collected.received.lock().unwrap();
    let is_less = |received: &mut Vec<(bool, String)>| {
        let theirs = received.iter().filter(|(envoy, _)| *envoy).count();
        theirs.min(received.len() - theirs) < wanted
    };
    let (received, _) =
        collected.more.wait_timeout_while(received, Duration::from_secs(30), is_less).unwrap();
    let theirs = received.iter().filter(|(envoy, _)| *envoy).count();
    assert_eq!((theirs, received.len() - theirs), (wanted, wanted), "spans of Envoy and of Skysail");
    let mut sorted: BTreeMap<String, (Vec<String>, Vec<String>)> = BTreeMap::new();
    for (envoy, span) in received.iter() {
        let number =
            span.split("\"n\":\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default();
        let of = sorted.entry(number.to_owned()).or_default();
        let list = if *envoy { &mut of.0 } else { &mut of.1 };
        list.push(span.clone());
    }
    for (theirs, ours) in sorted.values_mut() {
        theirs.sort();
        ours.sort();
    }
    sorted
}

/// Receives the spans of both. Envoy is identified by the headers of its own requests.
fn collect(mut connection: TcpStream, collected: &Collected) {
    let mut input = Vec::new();
    while let Some(head) = read_head(&mut connection, &mut input) {
        let envoy = head.contains("x-envoy-internal: ");
        let Some(body) = body(&mut connection, &mut input, &head) else { return };
        let spans = if head.starts_with("POST /zipkin ") { zipkin(&body) } else { otlp(&body) };
        let spans = spans.iter().map(|span| (envoy, without_ids(&span.to_string())));
        collected.received.lock().unwrap().extend(spans);
        collected.more.notify_all();
        let _ = connection.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    }
}

fn body(connection: &mut TcpStream, input: &mut Vec<u8>, head: &str) -> Option<Vec<u8>> {
    let mut take = |length: usize| {
        while input.len() < length {
            let mut block = [0; 4096];
            let count = connection.read(&mut block).ok().filter(|count| *count > 0)?;
            input.extend_from_slice(&block[..count]);
        }
        Some(input.drain(..length).collect::<Vec<_>>())
    };
    if let Some(length) = head.lines().find_map(|line| line.strip_prefix("content-length: ")) {
        return take(length.parse().unwrap());
    }
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        while !line.ends_with("\r\n") {
            line.push(char::from(take(1)?[0]));
        }
        let length = usize::from_str_radix(line.trim(), 16).unwrap();
        body.extend(take(length)?);
        take(2)?;
        if length == 0 {
            return Some(body);
        }
    }
}

/// Parses Zipkin spans without varying fields.
fn zipkin(body: &[u8]) -> Vec<Value> {
    let mut spans: Vec<Value> = serde_json::from_slice(body).unwrap();
    for span in &mut spans {
        for time in ["/timestamp", "/duration", "/annotations/0/timestamp"] {
            let time = span.pointer_mut(time).unwrap();
            assert!(time.as_u64().is_some());
            *time = Value::Null;
        }
        // Envoy reports the address of an interface, the sidecar that of the node.
        span["localEndpoint"]["ipv4"] = Value::Null;
    }
    spans
}

/// Parses OpenTelemetry spans.
fn otlp(body: &[u8]) -> Vec<Value> {
    let request = ExportTraceServiceRequest::decode(body).unwrap();
    let scopes = request.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let spans = scopes.flat_map(|scope| scope.spans).map(|span| {
        let mut tags = json!({});
        for one in span.attributes {
            let Some(any_value::Value::StringValue(text)) = one.value.unwrap().value else {
                unreachable!("no text")
            };
            tags[one.key] = text.into();
        }
        json!({
            "trace": hex(&span.trace_id),
            "id": hex(&span.span_id),
            "parent": hex(&span.parent_span_id),
            "state": span.trace_state,
            "name": span.name,
            "kind": span.kind,
            "flags": span.flags,
            "code": span.status.map_or(0, |status| status.code),
            "tags": tags,
        })
    });
    spans.collect()
}

/// Replaces all IDs that proxies generate, except the mark in those of requests.
fn without_ids(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_hexdigit() && c != '-').unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let is_uuid = |word: &str| word.len() == 36 && word.bytes().filter(|b| *b == b'-').count() == 4;
        if is_uuid(word) && !word.starts_with("01234567-") && !word.starts_with('-') {
            let _ = write!(out, "uuid-{}", &word[14..15]);
        } else {
            let known = [TRACE, SHORT, SPAN, PARENT, "000000000000001a", "000000000000002b"];
            let is_known = |part: &str| known.iter().any(|id| part.to_lowercase().ends_with(id));
            let parts = word.split('-').map(|part| match part.len() {
                16 | 32 if !is_known(part) => "id",
                _ => part,
            });
            out.push_str(&parts.collect::<Vec<_>>().join("-"));
        }
        let next = after.chars().next().map_or(0, char::len_utf8);
        out.push_str(&after[..next]);
        rest = &after[next..];
    }
    out
}
