//! External processing, beside a real Envoy: the same processor has the same effect.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/either.rs"]
mod either;
#[path = "support/envoy.rs"]
mod envoy;
#[path = "support/files.rs"]
mod files;
#[path = "support/processed.rs"]
mod processed;
#[path = "support/processor.rs"]
mod processor;
#[path = "support/program.rs"]
mod program;
mod support;

use files::{bootstrap, filter, http, listener, with};
use processed::{ask, both, both_with, get, post, same};
use serde_json::json;

#[tokio::test]
async fn headers_are_changed() {
    let proxies = both(&json!({
        "request_attributes": ["request.path"],
        "response_attributes": ["response.code"],
        "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}, "initial_metadata": [{"key": "x-call", "value": "me"}]}
    }))
    .await;
    let (head, got) = same(&proxies, &get("/a")).await;
    assert!(head.contains("x-response: 200 end=false NumberValue(200.0)"), "{head}");
    assert!(!head.contains("x-server"), "{head}");
    for wanted in [
        "x-request: end=true",
        "x-seen: s",
        "x-list: one,more",
        "x-call: me",
        "x-attribute: StringValue(\"/a\")",
    ] {
        assert!(got.contains(wanted), "{wanted}: {got}");
    }
    assert!(!got.contains("x-gone") && got.contains("x-action: set"), "{got}");
    let (head, _) = same(&proxies, &get("/status")).await;
    assert!(head.starts_with("HTTP/1.1 299"), "{head}");
    let (_, got) = same(&proxies, &get("/system")).await;
    assert!(
        got.starts_with("GET /new?a=b HTTP/1.1") && got.contains("host: a\n") && !got.contains("x-envoy-a"),
        "{got}"
    );
    let (_, got) = same(&proxies, &post("/replace", "hello")).await;
    assert!(got.contains("replaced by the processor") && !got.contains("hello"), "{got}");
}

#[tokio::test]
async fn mutation_rules_are_honoured() {
    let proxies = both(&json!({"mutation_rules": {"allow_all_routing": true, "allow_envoy": true}})).await;
    let (_, got) = same(&proxies, &get("/system")).await;
    assert!(
        got.starts_with("PUT /new?a=b HTTP/1.1")
            && got.contains("host: other")
            && got.contains("x-envoy-a: b"),
        "{got}"
    );
    let rules = json!({"disallow_all": true, "allow_expression": {"regex": "x-l.*"}});
    let proxies = both(&json!({"mutation_rules": rules})).await;
    let (_, got) = same(&proxies, &get("/system")).await;
    assert!(
        got.starts_with("GET /system") && got.contains("x-list: one,more") && !got.contains("x-request: "),
        "{got}"
    );
    let proxies =
        both(&json!({"mutation_rules": {"disallow_system": true, "disallow_is_error": true}})).await;
    let (head, _) = same(&proxies, &get("/a")).await;
    assert!(head.starts_with("HTTP/1.1 500"), "{head}");
}

#[tokio::test]
async fn buffered_bodies_are_changed() {
    let mode = json!({"request_body_mode": "BUFFERED", "response_body_mode": "BUFFERED"});
    let proxies = both(&json!({"processing_mode": mode})).await;
    let (head, got) = same(&proxies, &post("/change", "hello")).await;
    assert!(head.contains("end=true"), "{head}");
    assert!(got.to_ascii_lowercase().contains("x-body: 5 end=true") && got.contains("HELLO"), "{got}");
    let (_, got) = same(&proxies, &post("/a", "hello")).await;
    assert!(got.ends_with("hello"), "{got}");
    // Envoy requires that the processor also changes `content-length`; the sidecar sets it.
    for proxy in &proxies {
        let (head, got) = ask(proxy, &post("/clear", "hello")).await;
        assert!(head.starts_with("HTTP/1.1 200") && got.is_empty(), "{head} {got}");
    }
    // A body in chunks without a known length, and one without content.
    let chunked =
        "POST /change HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";
    let (_, got) = same(&proxies, chunked).await;
    assert!(got.contains("HELLO"), "{got}");
    same(&proxies, &get("/change")).await;
    let (head, _) = same(&proxies, &post("/a", &"x".repeat(2 << 20))).await;
    assert!(head.starts_with("HTTP/1.1 413"), "{head}");
}

#[tokio::test]
async fn the_start_of_a_larger_body_is_changed() {
    let proxies = both(&json!({"processing_mode": {"request_body_mode": "BUFFERED_PARTIAL"}})).await;
    for proxy in &proxies {
        let (_, got) = ask(proxy, &post("/change", "hello")).await;
        assert!(got.contains("HELLO") && got.contains("x-body: 5 end=true"), "{got}");
    }
    // The size of the part differs.
    let body = "x".repeat(3 << 20);
    for proxy in &proxies {
        let (head, got) = ask(proxy, &post("/change", &body)).await;
        let note = got.lines().find(|line| line.starts_with("x-body: "));
        let note = note.unwrap_or_else(|| panic!("{head} {}", got.chars().take(600).collect::<String>()));
        assert!(note.ends_with(" end=false"), "{note}");
        let size: usize = note["x-body: ".len()..].split(' ').next().unwrap().parse().unwrap();
        assert!((1 << 19..2 << 20).contains(&size), "{size}");
        let changed = got.bytes().filter(|byte| *byte == b'X').count();
        assert!(changed >= size && changed < size + 100, "{changed} {size}");
        assert!(got.bytes().filter(|byte| *byte == b'x').count() >= (3 << 20) - size);
    }
}

#[tokio::test]
async fn trailers_are_changed() {
    let mode = json!({"request_body_mode": "BUFFERED", "request_trailer_mode": "SEND"});
    let config = json!({"processing_mode": mode});
    let proxies = both(&config).await;
    let request = "POST /change HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nx-t: 1\r\n\r\n";
    // Envoy drops trailers of HTTP/1.1 by default.
    let (_, got) = ask(&proxies[1], request).await;
    assert!(got.contains("x-body: 5 end=false"), "{got}");
    assert!(got.contains("x-trailers: 1") && got.contains("x-t: 1") && got.contains("HELLO"), "{got}");
}

#[tokio::test]
async fn a_processor_may_answer() {
    let proxies = both(&json!({})).await;
    let (head, body) = same(&proxies, &get("/immediate")).await;
    assert!(head.starts_with("HTTP/1.1 418") && head.contains("x-reason: teapot"), "{head}");
    assert_eq!(body, "short and stout");
    let (head, body) = same(&proxies, &get("/immediate-response")).await;
    assert!(head.starts_with("HTTP/1.1 418"), "{head}");
    assert_eq!(body, "short and stout");
    let grpc =
        "POST /immediate HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n\r\n";
    let (head, _) = same(&proxies, grpc).await;
    assert!(head.contains("grpc-status: 9"), "{head}");
    let proxies = both(&json!({"disable_immediate_response": true})).await;
    let (head, _) = same(&proxies, &get("/immediate")).await;
    assert!(!head.contains("418"), "{head}");
}

#[tokio::test]
async fn failures_end_the_request_or_are_allowed() {
    let proxies = both(&json!({"message_timeout": "0.3s"})).await;
    for (path, status) in [("/fail", "500"), ("/silent", "504"), ("/late-response", "504"), ("/end", "200")] {
        let (head, _) = same(&proxies, &get(path)).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{path} {head}");
    }
    // The end of the call, which arrives with the answer, does not replace it.
    for _ in 0..20 {
        let (_, got) = same(&proxies, &get("/last")).await;
        assert!(got.contains("x-request: end=true"), "{got}");
    }
    let proxies = both(&json!({"message_timeout": "0.3s", "failure_mode_allow": true})).await;
    for path in ["/fail", "/silent", "/late-response", "/end", "/spurious"] {
        let (head, _) = same(&proxies, &get(path)).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{path} {head}");
    }
    let proxies = both(&json!({"status_on_error": {"code": "ServiceUnavailable"}})).await;
    let (head, _) = same(&proxies, &get("/fail")).await;
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
}

#[tokio::test]
async fn a_processor_may_ask_for_more_time() {
    let proxies = both(&json!({"message_timeout": "10s", "max_message_timeout": "10s"})).await;
    let (head, got) = same(&proxies, &get("/slow")).await;
    assert!(head.starts_with("HTTP/1.1 200") && got.contains("x-request: end=true"), "{head} {got}");
}

#[tokio::test]
async fn the_mode_may_be_overridden() {
    for (config, is_allowed) in [
        (json!({"allow_mode_override": true}), true),
        (json!({}), false),
        (
            json!({"allow_mode_override": true, "allowed_override_modes": [{"request_body_mode": "BUFFERED"}]}),
            false,
        ),
        (
            json!({"allow_mode_override": true, "allowed_override_modes": [
                {"request_body_mode": "BUFFERED", "response_header_mode": "SKIP"}]}),
            true,
        ),
    ] {
        let proxies = both(&config).await;
        let (head, got) = same(&proxies, &post("/override", "hello")).await;
        assert_eq!(got.contains("x-body: 5 end=true"), is_allowed, "{config} {got}");
        assert_eq!(head.contains("x-response"), !is_allowed, "{config} {head}");
    }
}

#[tokio::test]
async fn headers_are_forwarded_by_the_rules() {
    for (rules, seen) in [
        (json!({"disallowed_headers": {"patterns": [{"exact": "x-secret"}]}}), "hidden"),
        (json!({"allowed_headers": {"patterns": [{"prefix": ":"}, {"exact": "x-secret"}]}}), "s"),
        (json!({"allowed_headers": {"patterns": [{"prefix": ":"}]}}), "hidden"),
    ] {
        let proxies = both(&json!({"forward_rules": rules})).await;
        let (_, got) = same(&proxies, &get("/a")).await;
        assert!(got.contains(&format!("x-seen: {seen}")), "{rules} {got}");
    }
}

#[tokio::test]
async fn routes_are_selected_again_and_have_their_own_settings() {
    let kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute";
    let own = |config: serde_json::Value| json!({"http.ext_proc.v3.ExternalProcessor": with(json!({"@type": kind}), &config)});
    let routes = json!([
        {"match": {"prefix": "/", "headers": [{"name": "x-route", "string_match": {"exact": "other"}}]},
            "direct_response": {"status": 203}},
        {"match": {"prefix": "/off"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"disabled": true}))},
        {"match": {"prefix": "/quiet"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"overrides": {
            "processing_mode": {"request_header_mode": "SKIP"}, "response_attributes": ["request.method"]}}))},
        {"match": {"prefix": "/fail"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"overrides": {
            "failure_mode_allow": true, "grpc_initial_metadata": [{"key": "x-call", "value": "route"}]}}))},
        {"match": {"prefix": "/"}, "route": {"cluster": "mirror"}, "typed_per_filter_config": own(json!({"overrides": {
            "grpc_initial_metadata": [{"key": "x-call", "value": "route"}]}}))},
    ]);
    let proxies = both_with(&json!({}), &routes, &[]).await;
    let (head, _) = same(&proxies, &get("/reroute")).await;
    assert!(head.starts_with("HTTP/1.1 203"), "{head}");
    let (head, got) = same(&proxies, &get("/off")).await;
    assert!(!head.contains("x-response") && !got.contains("x-request: "), "{head} {got}");
    let (head, got) = same(&proxies, &get("/quiet")).await;
    assert!(head.contains("x-response") && !got.contains("x-request: "), "{head} {got}");
    let (head, _) = same(&proxies, &get("/fail")).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let (_, got) = same(&proxies, &get("/a")).await;
    assert!(got.contains("x-call: route"), "{got}");
    let proxies = both_with(&json!({"route_cache_action": "RETAIN"}), &routes, &[]).await;
    let (head, _) = same(&proxies, &get("/reroute")).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}

#[tokio::test]
async fn metadata_is_exchanged_by_namespace() {
    let lua = filter(
        "http.lua.v3.Lua",
        &json!({"default_source_code": {"inline_string":
        "function envoy_on_request(h) h:streamInfo():dynamicMetadata():set('given', 'k', 'v') end"}}),
    );
    let namespaces = json!({
        "forwarding_namespaces": {"untyped": ["given", "none"]}, "receiving_namespaces": {"untyped": ["own"]}
    });
    let routes = json!([{"match": {"prefix": "/"}, "route": {"cluster": "mirror"}, "response_headers_to_add": [
        {"header": {"key": "x-own", "value": "%DYNAMIC_METADATA(own:key)%"}},
        {"header": {"key": "x-other", "value": "%DYNAMIC_METADATA(other:key)%"}}]}]);
    let proxies = both_with(&json!({"metadata_options": namespaces}), &routes, &[lua]).await;
    let (head, got) = same(&proxies, &get("/metadata")).await;
    assert!(got.contains("x-metadata: given"), "{got}");
    assert!(head.contains("x-own: found") && !head.contains("x-other: found"), "{head}");
}

#[tokio::test]
async fn unsupported_settings_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (config, field) in [
        (
            json!({"processing_mode": {"request_body_mode": "GRPC"}}),
            "processing_mode.request_body_mode: GRPC",
        ),
        (
            json!({"processing_mode": {"response_body_mode": "FULL_DUPLEX_STREAMED"}}),
            "response_trailer_mode: must be SEND",
        ),
        (
            json!({"send_body_without_waiting_for_header_response": true}),
            "send_body_without_waiting_for_header_response",
        ),
        (json!({"allow_content_length_header": true}), "allow_content_length_header"),
        (json!({"http_service": {}}), "http_service"),
        (json!({"request_attributes": ["request.nothing"]}), "request_attributes[0]"),
    ] {
        let service = json!({"grpc_service": {"envoy_grpc": {"cluster_name": "c"}}});
        let own = filter("http.ext_proc.v3.ExternalProcessor", &with(service, &config));
        let listeners = [listener("l", &[http(&[own], &json!([]), &json!({}))])];
        let file = folder.path().join("bootstrap.json");
        std::fs::write(&file, bootstrap(&listeners, &[])).unwrap();
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_skysail-proxy"))
            .args(["--mode", "validate", "-c"])
            .arg(&file)
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(field), "{config}: {stderr}");
    }
}
