//! Local rate limits.

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

use files::{bootstrap, cluster, filter, http, listener, to, with};
use program::Program;
use serde_json::{Value, json};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::HeaderValue,
        service::ratelimit::v3::{
            RateLimitRequest, RateLimitResponse,
            rate_limit_response::{Code, DescriptorStatus, RateLimit},
            rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
        },
    },
    google::protobuf::Duration,
};
use support::{Client, echo, within};
use tokio::net::TcpStream;

#[tokio::test]
async fn requests_above_the_rate_limit_are_refused_until_tokens_are_available() {
    let always = json!({"default_value": {"numerator": 100}});
    let limit = |interval: &str| {
        let config = json!({
            "stat_prefix": "l",
            "token_bucket": {"max_tokens": 3, "tokens_per_fill": 3, "fill_interval": interval},
            "filter_enabled": always,
            "filter_enforced": always
        });
        http(&[filter("http.local_ratelimit.v3.LocalRateLimit", &config)], &to("c"), &json!({}))
    };
    let listeners = [listener("never", &[limit("100000s")]), listener("soon", &[limit("1.5s")])];
    let folder = tempfile::tempdir().unwrap();
    let clusters = [cluster("c", echo().await, false)];
    let program = Program::start(folder.path(), &bootstrap(&listeners, &clusters)).await;
    let connect = async |name| Client::new(TcpStream::connect(program.listener(name).await).await.unwrap());
    let ask = async |client: &mut Client| {
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        client.message().await.0[9..12].to_owned()
    };
    let mut client = connect("never").await;
    for expected in ["200", "200", "200", "429", "429", "429"] {
        assert_eq!(ask(&mut client).await, expected);
    }
    let mut client = connect("soon").await;
    for wanted in ["429", "200", "429", "200"] {
        within(async { while ask(&mut client).await != wanted {} }).await;
    }
}

/// A share of 100 %.
fn always() -> Value {
    json!({"default_value": {"numerator": 100}})
}

/// Returns a local rate limit that counts and refuses all requests, with these fields.
fn limit(fields: &Value) -> Value {
    let config = json!({"stat_prefix": "l", "filter_enabled": always(), "filter_enforced": always()});
    filter("http.local_ratelimit.v3.LocalRateLimit", &with(config, fields))
}

/// Returns a bucket that is not refilled during a test.
fn tokens(count: u32) -> Value {
    json!({"max_tokens": count, "fill_interval": "86400s"})
}

fn rule(actions: &Value) -> Value {
    json!({"actions": actions})
}

/// Sends a request; returns the head of the response and its content.
async fn ask(client: &mut Client, path: &str, fields: &str) -> (String, String) {
    client.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\n{fields}\r\n")).await;
    client.message().await
}

/// Sends these requests (paths and fields); returns their statuses.
async fn statuses(client: &mut Client, requests: &[(&str, &str)]) -> Vec<u16> {
    let mut statuses = Vec::new();
    for (path, fields) in requests {
        statuses.push(ask(client, path, fields).await.0[9..12].parse().unwrap());
    }
    statuses
}

async fn connect(program: &Program, name: &str) -> Client {
    Client::new(TcpStream::connect(program.listener(name).await).await.unwrap())
}

#[tokio::test]
async fn descriptors_have_buckets_of_their_own() {
    let header = json!([{"request_headers": {"header_name": "x-user", "descriptor_key": "user"}}]);
    let pair = json!([{"generic_key": {"descriptor_value": "g"}},
        {"query_parameter_value_match": {"descriptor_value": "q", "query_parameters": [{"name": "q"}]}}]);
    let routes = json!([{"match": {"prefix": "/"}, "route": {"cluster": "c",
        "rate_limits": [rule(&header), rule(&pair)]}}]);
    let config = limit(&json!({
        "token_bucket": tokens(100),
        "descriptors": [
            {"entries": [{"key": "user", "value": "ann"}], "token_bucket": tokens(1)},
            {"entries": [{"key": "user"}], "token_bucket": tokens(2)},
            {"entries": [{"key": "generic_key", "value": "g"}, {"key": "query_match", "value": "q"}],
                "token_bucket": tokens(1)},
        ],
        "enable_x_ratelimit_headers": "DRAFT_VERSION_03",
    }));
    let folder = tempfile::tempdir().unwrap();
    let listeners = [listener("l", &[http(&[config], &routes, &json!({}))])];
    let clusters = [cluster("c", echo().await, false)];
    let program = Program::start(folder.path(), &bootstrap(&listeners, &clusters)).await;
    let mut client = connect(&program, "l").await;
    let (ann, bob, eve) = ("x-user: ann\r\n", "x-user: bob\r\n", "x-user: eve\r\n");
    let requests =
        [("/", ann), ("/", ann), ("/", bob), ("/", bob), ("/", bob), ("/", eve), ("/?q=1", ""), ("/?q", "")];
    let expected = [200, 429, 200, 200, 429, 200, 200, 429];
    assert_eq!(statuses(&mut client, &requests).await, expected);
    let (head, _) = ask(&mut client, "/", eve).await;
    assert!(
        head.contains("\r\nx-ratelimit-limit: 2\r\nx-ratelimit-remaining: 0\r\nx-ratelimit-reset: 86"),
        "{head}"
    );
    let (head, _) = ask(&mut client, "/", "").await;
    assert!(
        head.contains("x-ratelimit-limit: 100\r\nx-ratelimit-remaining: 93\r\nx-ratelimit-reset: 0\r\n"),
        "{head}"
    );
}

#[tokio::test]
async fn the_filters_own_rules_replace_those_of_the_route() {
    let routes = json!([{"match": {"prefix": "/"}, "route": {"cluster": "c",
        "rate_limits": [rule(&json!([{"generic_key": {"descriptor_value": "route"}}]))]}}]);
    let limits = |fields: Value| {
        let all = json!({
            "descriptors": [
                {"entries": [{"key": "generic_key", "value": "route"}], "token_bucket": tokens(1)},
                {"entries": [{"key": "remote_address", "value": "127.0.0.1"}], "token_bucket": tokens(3)},
                {"entries": [{"key": "destination_cluster", "value": "c"}, {"key": "source_cluster", "value": "me"},
                    {"key": "masked_remote_address", "value": "127.0.0.0/8"}], "token_bucket": tokens(6)},
            ],
        });
        http(&[limit(&with(all, &fields))], &routes, &json!({}))
    };
    let address = json!([rule(&json!([{"remote_address": {}}]))]);
    let clusters = json!([{"actions": [{"destination_cluster": {}}, {"source_cluster": {}},
        {"masked_remote_address": {"v4_prefix_mask_len": 8}}], "hits_addend": {"number": 3}}]);
    let shadow = json!([{"entries": [{"key": "remote_address", "value": "127.0.0.1"}], "token_bucket": tokens(1),
        "shadow_mode": true}]);
    let listeners = [
        listener("route", &[limits(json!({}))]),
        listener("address", &[limits(json!({"rate_limits": address}))]),
        listener("hits", &[limits(json!({"rate_limits": clusters}))]),
        listener("shadow", &[limits(json!({"rate_limits": address, "descriptors": shadow}))]),
        listener("stage", &[limits(json!({"stage": 1}))]),
    ];
    let folder = tempfile::tempdir().unwrap();
    let mut bootstrap: Value =
        serde_json::from_str(&bootstrap(&listeners, &[cluster("c", echo().await, false)])).unwrap();
    bootstrap["node"]["cluster"] = "me".into();
    let program = Program::start(folder.path(), &bootstrap.to_string()).await;
    for (name, allowed) in [("route", 1), ("address", 3), ("hits", 2), ("shadow", 5), ("stage", 5)] {
        let mut client = connect(&program, name).await;
        let statuses = statuses(&mut client, &[("/", ""); 5]).await;
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), allowed, "{name}");
    }
}

#[tokio::test]
async fn each_connection_may_have_its_own_tokens() {
    let config = limit(&json!({
        "token_bucket": tokens(2),
        "local_rate_limit_per_downstream_connection": true,
        "enable_retry_after_header": true,
        "response_headers_to_add": [{"header": {"key": "x-limited", "value": "%REQ(x-a)%"}}],
        "status": {"code": 429},
    }));
    let folder = tempfile::tempdir().unwrap();
    let listeners = [listener("l", &[http(&[config], &to("c"), &json!({}))])];
    let clusters = [cluster("c", echo().await, false)];
    let program = Program::start(folder.path(), &bootstrap(&listeners, &clusters)).await;
    for _ in 0..2 {
        let mut client = connect(&program, "l").await;
        assert_eq!(statuses(&mut client, &[("/", ""); 3]).await, [200, 200, 429]);
        let (head, content) = ask(&mut client, "/", "x-a: b\r\n").await;
        assert!(head.contains("\r\nx-limited: b\r\n"), "{head}");
        let after = head.lines().find_map(|line| line.strip_prefix("retry-after: ")).unwrap();
        assert!((86_000..=86_400).contains(&after.parse::<u32>().unwrap()), "{after}");
        assert_eq!(content, "local_rate_limited");
    }
}

/// A rate limit service that refuses requests with the descriptor value `no`, and fails for `fail`.
struct Limiter;

#[tonic::async_trait]
impl RateLimitService for Limiter {
    async fn should_rate_limit(
        &self,
        request: tonic::Request<RateLimitRequest>,
    ) -> Result<tonic::Response<RateLimitResponse>, tonic::Status> {
        let request = request.into_inner();
        let value = &request.descriptors[0].entries[0].value;
        let code = match value.as_str() {
            "fail" => return Err(tonic::Status::unavailable("broken")),
            "no" => Code::OverLimit,
            _ => Code::Ok,
        };
        let limit = request.descriptors[0].limit.map(|limit| limit.requests_per_unit).unwrap_or_default();
        let field = |key: &str, value: String| HeaderValue { key: key.into(), value, ..Default::default() };
        let status = DescriptorStatus {
            code: code.into(),
            current_limit: Some(RateLimit { requests_per_unit: 9, unit: 2, name: "per-user".into() }),
            limit_remaining: 4,
            duration_until_reset: Some(Duration { seconds: 33, nanos: 0 }),
            ..Default::default()
        };
        Ok(tonic::Response::new(RateLimitResponse {
            overall_code: code.into(),
            statuses: vec![status],
            request_headers_to_add: vec![field("x-checked", format!("{} {value} {limit}", request.domain))],
            response_headers_to_add: vec![field("x-by", "limiter".into()), field("x bad", "a".into())],
            raw_body: b"too many".to_vec(),
            ..Default::default()
        }))
    }
}

async fn limiter() -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = RateLimitServiceServer::new(Limiter);
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    address
}

#[tokio::test]
async fn a_service_limits_requests_by_their_descriptors() {
    let ask_service = |fields: &Value| {
        let config = json!({
            "domain": "d",
            "timeout": "20s",
            "rate_limit_service": {"grpc_service": {"envoy_grpc": {"cluster_name": "limiter"}},
                "transport_api_version": "V3"},
        });
        filter("http.ratelimit.v3.RateLimit", &with(config, fields))
    };
    let by_user = rule(&json!([{"request_headers": {"header_name": "x-user", "descriptor_key": "user"}}]));
    let of_route = json!({"http.ratelimit.v3.RateLimit": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute",
        "domain": "other", "rate_limits": [by_user]}});
    let routes = json!([
        {"match": {"prefix": "/route"}, "route": {"cluster": "c"}, "typed_per_filter_config": of_route},
        {"match": {"prefix": "/"}, "route": {"cluster": "c", "rate_limits": [by_user]}},
    ]);
    let full = json!({"enable_x_ratelimit_headers": "DRAFT_VERSION_03", "enable_retry_after_header": true,
        "failure_mode_deny": true, "status_on_error": {"code": 503},
        "response_headers_to_add": [{"header": {"key": "x-config", "value": "added"}}]});
    let shadow = json!({"filter_enforced": {"default_value": {"numerator": 0}}});
    let listeners = [("full", &full), ("shadow", &shadow)]
        .map(|(name, fields)| listener(name, &[http(&[ask_service(fields)], &routes, &json!({}))]));
    let folder = tempfile::tempdir().unwrap();
    let clusters = [cluster("c", echo().await, false), cluster("limiter", limiter().await, true)];
    let program = Program::start(folder.path(), &bootstrap(&listeners, &clusters)).await;
    let mut client = connect(&program, "full").await;
    let (head, content) = ask(&mut client, "/", "x-user: ann\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(content.contains("\r\nx-checked: d ann 0\r\n"), "{content}");
    assert!(head.contains("\r\nx-by: limiter\r\nx-ratelimit-limit: 9, 9;w=60;name=\"per-user\"\r\nx-ratelimit-remaining: 4\r\nx-ratelimit-reset: 33\r\n"), "{head}");
    assert!(!head.contains("x-config") && !head.contains("x bad"), "{head}");
    let (head, content) = ask(&mut client, "/", "x-user: no\r\n").await;
    assert!(head.starts_with("HTTP/1.1 429"), "{head}");
    for field in ["x-envoy-ratelimited: true", "x-config: added", "retry-after: 33", "x-by: limiter"] {
        assert!(head.contains(&format!("\r\n{field}\r\n")), "{field} in {head}");
    }
    assert_eq!(content, "too many");
    let (head, content) = ask(&mut client, "/route", "x-user: ann\r\n").await;
    assert!(content.contains("\r\nx-checked: other ann 0\r\n"), "{head}{content}");
    assert!(ask(&mut client, "/", "x-user: fail\r\n").await.0.starts_with("HTTP/1.1 503"));
    // A request without descriptors is not checked.
    assert!(!ask(&mut client, "/", "").await.1.contains("x-checked"));
    let mut client = connect(&program, "shadow").await;
    let (head, content) = ask(&mut client, "/", "x-user: no\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("x-envoy-ratelimited: true"), "{head}");
    assert!(content.contains("\r\nx-checked: d no 0\r\n"), "{content}");
    assert!(ask(&mut client, "/", "x-user: fail\r\n").await.0.starts_with("HTTP/1.1 200"));
    let metrics = program.page("GET", "/stats/prometheus").await;
    for (name, value) in [("ok", 2), ("over_limit", 2), ("error", 2), ("failure_mode_allowed", 1)] {
        let line = format!("envoy_cluster_ratelimit_{name}{{cluster_name=\"c\"}} {value}");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}
