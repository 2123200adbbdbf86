//! Filters that change headers and buffer bodies.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;

use files::{bootstrap, cluster, filter, http, listener, with};
use program::Program;
use serde_json::{Value, json};
use support::{Client, echo};
use tokio::net::TcpStream;

async fn connect(program: &Program) -> Client {
    Client::new(TcpStream::connect(program.listener("l").await).await.unwrap())
}

async fn start(folder: &std::path::Path, filters: &[Value], routes: &Value, options: &Value) -> Program {
    let listeners = [listener("l", &[http(filters, routes, options)])];
    Program::start(folder, &bootstrap(&listeners, &[cluster("c", echo().await, false)])).await
}

fn of_route(kind: &str, config: &Value) -> Value {
    let url = format!("type.googleapis.com/envoy.extensions.filters.{kind}");
    with(json!({"@type": url}), config)
}

#[tokio::test]
async fn headers_and_queries_are_changed_in_the_order_of_the_configuration() {
    let set = |key: &str, value: &str| json!({"append": {"header": {"key": key, "value": value}}});
    let over = |key: &str, value: &str| json!({"append": {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}});
    let query = |key: &str, value: &str, action: &str| json!({"append": {"record": {"key": key, "value": value}, "action": action}});
    let config = json!({"mutations": {
        "request_mutations": [
            set("x-one", "1"), over("x-two", "%REQ(x-one)%-%REQ(x-two)%"), {"remove": "x-gone"},
            {"remove_on_match": {"key_matcher": {"prefix": "x-secret"}}},
        ],
        "query_parameter_mutations": [
            query("b", "%REQ(x-one)%/ ", "APPEND_IF_EXISTS_OR_ADD"), query("a", "no", "ADD_IF_ABSENT"),
            query("z", "no", "OVERWRITE_IF_EXISTS"), query("c", "new", "OVERWRITE_IF_EXISTS_OR_ADD"), {"remove": "d"},
        ],
        "response_mutations": [set("x-answer", "%RESPONSE_CODE%"), {"remove": "x-upstream"}],
    }});
    let level = |value: &str| {
        let mutations = json!({"request_mutations": [over("x-level", value)], "response_mutations": [over("x-level", value)]});
        json!({"m": of_route("http.header_mutation.v3.HeaderMutationPerRoute", &json!({"mutations": mutations}))})
    };
    let table = |most_specific_wins: bool| {
        let mut mutation = filter(
            "http.header_mutation.v3.HeaderMutation",
            &with(config.clone(), &json!({"most_specific_header_mutations_wins": most_specific_wins})),
        );
        mutation["name"] = "m".into();
        let hosts = json!([{"name": "h", "domains": ["*"], "typed_per_filter_config": level("host"), "routes": [
            {"match": {"prefix": "/direct"}, "direct_response": {"status": 418}},
            {"match": {"prefix": "/"}, "route": {"cluster": "c"}, "typed_per_filter_config": level("route")}]}]);
        let options = json!({"route_config": {"virtual_hosts": hosts}});
        (mutation, options)
    };
    for (most_specific_wins, expected) in [(false, "host"), (true, "route")] {
        let (mutation, options) = table(most_specific_wins);
        let folder = tempfile::tempdir().unwrap();
        let program = start(folder.path(), &[mutation], &json!([]), &options).await;
        let mut client = connect(&program).await;
        let fields = "host: a\r\nx-two: 2\r\nx-gone: 1\r\nx-secret-a: 1\r\nX-Secret-B: 1\r\n";
        client.send(&format!("GET /p?b=1&a=2&d=3&c=4&c=5 HTTP/1.1\r\n{fields}\r\n")).await;
        let (head, received) = client.message().await;
        assert!(received.contains("GET /p?a=2&b=1&b=1%2F%20&c=new HTTP/1.1\r\n"), "{received}");
        assert!(
            received.contains("\r\nx-one: 1\r\n") && received.contains("\r\nx-two: 1-2\r\n"),
            "{received}"
        );
        assert!(!received.contains("x-gone") && !received.to_lowercase().contains("x-secret"), "{received}");
        assert!(received.contains(&format!("\r\nx-level: {expected}\r\n")), "{received}");
        assert!(head.contains(&format!("\r\nx-level: {expected}\r\n")), "{head}");
        assert!(head.contains("\r\nx-answer: 200\r\n"), "{head}");
        client.send("GET /direct HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let (head, _) = client.message().await;
        assert!(head.contains("\r\nx-answer: 418\r\n") && head.contains("\r\nx-level: host\r\n"), "{head}");
    }
}

#[tokio::test]
async fn whole_bodies_are_buffered_up_to_the_limit() {
    let buffer = filter("http.buffer.v3.Buffer", &json!({"max_request_bytes": 10}));
    let setting =
        |config: &Value| json!({"http.buffer.v3.Buffer": of_route("http.buffer.v3.BufferPerRoute", config)});
    let routes = json!([
        {"match": {"prefix": "/off"}, "route": {"cluster": "c"}, "typed_per_filter_config": setting(&json!({"disabled": true}))},
        {"match": {"prefix": "/more"}, "route": {"cluster": "c"},
            "typed_per_filter_config": setting(&json!({"buffer": {"max_request_bytes": 100_000}}))},
        {"match": {"prefix": "/"}, "route": {"cluster": "c"}},
    ]);
    let folder = tempfile::tempdir().unwrap();
    let program = start(folder.path(), &[buffer], &routes, &json!({})).await;
    let mut client = connect(&program).await;
    let chunked = "host: a\r\ntransfer-encoding: chunked\r\n\r\n";
    client.send(&format!("POST / HTTP/1.1\r\n{chunked}3\r\nabc\r\n")).await;
    client.send("7\r\ndefghij\r\n0\r\n\r\n").await;
    let (_, received) = client.message().await;
    assert!(
        received.contains("\r\ncontent-length: 10\r\n") && received.ends_with("\r\n\r\nabcdefghij"),
        "{received}"
    );
    assert!(!received.contains("transfer-encoding"), "{received}");
    let large = "x".repeat(90_000);
    client.send(&format!("POST /more HTTP/1.1\r\nhost: a\r\ncontent-length: 90000\r\n\r\n{large}")).await;
    let (_, received) = client.message().await;
    assert!(received.ends_with(&large));
    client.send("POST /off HTTP/1.1\r\nhost: a\r\ncontent-length: 11\r\n\r\nabcdefghijk").await;
    assert!(client.message().await.0.starts_with("HTTP/1.1 200"));
    client.send("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 11\r\n\r\nabcdefghijk").await;
    let (head, _) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 413"), "{head}");
}

#[tokio::test]
async fn the_on_demand_filter_is_accepted_without_clusters_of_its_own() {
    let on_demand = filter("http.on_demand.v3.OnDemand", &json!({}));
    let folder = tempfile::tempdir().unwrap();
    let program = start(folder.path(), &[on_demand], &files::to("c"), &json!({})).await;
    let mut client = connect(&program).await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(client.message().await.0.starts_with("HTTP/1.1 200"));
}
