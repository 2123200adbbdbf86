//! Access log filters and operators: the sidecar and Envoy have the same results for the same configuration.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/collector.rs"]
mod collector;
#[path = "support/either.rs"]
mod either;
#[path = "support/envoy.rs"]
mod envoy;
#[path = "support/logged.rs"]
mod logged;
#[path = "support/program.rs"]
mod program;
mod support;

use std::collections::BTreeMap;

use collector::Collector;
use either::Either;
use logged::{HTTP, REQUESTS, TCP_ALS, bootstrap};
use prost::Message as _;
use skysail_policy::operators::PLAIN;
use skysail_xds::envoy::pb::envoy::service::accesslog::v3::{
    StreamAccessLogsMessage, stream_access_logs_message::LogEntries,
};
use support::Client;
use tokio::net::TcpStream;

/// Expressions with all kinds of attributes; some fail for some requests, one for all.
const EXPRESSIONS: &[&str] = &[
    "response.code >= 400 || connection.mtls == false",
    "response.code >= 400 && response.code < 500",
    "request.headers['x-a'] == 'one,two'",
    "request.headers['x-a'] != 'one,two'",
    "'x-a' in request.headers",
    "request.url_path.startsWith('/plain') && request.query == 'a=b'",
    "request.method == 'POST' && request.size == 3",
    "request.host == 'a.b:81' && request.scheme == 'http' && request.protocol == 'HTTP/1.1'",
    "request.useragent == 'u' || request.referer == 'none'",
    "response.flags == 0",
    "response.flags == 256 || response.flags == 32",
    "response.code_details == 'via_upstream' && response.size == 5",
    "response.code_details.matches('^(route|cluster)_not_found$')",
    "xds.route_name == 'direct' || xds.cluster_name == 'refused'",
    "upstream.address.startsWith('127.0.0.1:') && upstream.port > 1",
    "source.address.startsWith('1.2.3.4') || destination.port == 1",
    "request.duration < duration('100s') && request.time > timestamp('2020-01-01T00:00:00Z')",
    "response.headers['x-b'].contains('two') && size(request.headers) > 5",
    "request.total_size > 190",
    "request.path > 5",
    "response.grpc_status == 14",
    "response.grpc_status == 2",
    "connection.requested_server_name == ''",
    "connection.termination_details == ''",
    "upstream.transport_failure_reason == ''",
    "upstream.request_attempt_count == 0",
    "request.referer == ''",
    "request.query == ''",
    "xds.cluster_name == '' || xds.route_name == ''",
    "xds.cluster_name == 'missing'",
    "connection.subject_peer_certificate == ''",
    "upstream.local_address == ''",
    "metadata.filter_metadata['none']['a'] == 'b'",
    "connection.uri_san_peer_certificate == 'x' ? true : request.method == 'GET'",
];

/// Returns the paths that each proxy logs with each of these filters. Every filter matches a last request.
async fn passed(bootstrap: &str, collector: &mut Collector, filters: usize) -> [Vec<Vec<String>>; 2] {
    let mut results = [vec![Vec::new(); filters], vec![Vec::new(); filters]];
    for (proxy, passed) in Either::both(bootstrap).await.iter().zip(&mut results) {
        let address = proxy.listener("http").await;
        for request in REQUESTS.iter().chain([&"GET /direct/end HTTP/1.1\r\nhost: a\r\n\r\n"]) {
            let mut client = Client::new(TcpStream::connect(address).await.unwrap());
            client.send(request).await;
            client.message().await;
        }
        let (mut numbers, mut ended) = (BTreeMap::new(), 0);
        while ended < filters {
            let received = collector.next().await;
            let message = StreamAccessLogsMessage::decode(received.message).unwrap();
            if let Some(identifier) = message.identifier {
                numbers.insert(received.call, identifier.log_name[1..].parse::<usize>().unwrap());
            }
            let Some(LogEntries::HttpLogs(logs)) = message.log_entries else { panic!("no requests") };
            for entry in logs.log_entry {
                let request = entry.request.unwrap();
                let path =
                    if request.original_path.is_empty() { request.path } else { request.original_path };
                ended += usize::from(path == "/direct/end");
                passed[numbers[&received.call]].push(path);
            }
        }
    }
    results
}

/// Checks that Envoy and the sidecar log the same requests, and that most filters distinguish requests.
async fn assert_same(filters: &[&str], make: impl Fn(&str) -> String, change: impl Fn(String) -> String) {
    let mut collector = Collector::start().await;
    let logs: String = filters
        .iter()
        .enumerate()
        .map(|(number, filter)| {
            let log = HTTP.replace("SIZE", "buffer_flush_interval: 0.05s");
            let log = log.replace("log_name: l", &format!("log_name: l{number}"));
            format!("{{{log}, filter: {}}},", make(filter))
        })
        .collect();
    let text = change(bootstrap(&collector, &logs, TCP_ALS).await);
    let [envoy, skysail] = passed(&text, &mut collector, filters.len()).await;
    let all = REQUESTS.len() + 1;
    let telling = envoy.iter().filter(|passed| (2..all).contains(&passed.len())).count();
    assert!(telling * 3 > filters.len(), "{envoy:?}");
    let pairs = filters.iter().zip(envoy.iter().zip(&skysail));
    let different = pairs.filter(|(_, (envoy, skysail))| envoy != skysail);
    let different: String = different
        .map(|(filter, (envoy, skysail))| format!("{filter}: Envoy {envoy:?}, ours {skysail:?}\n"))
        .collect();
    assert!(different.is_empty(), "{different}");
}

#[tokio::test]
async fn expressions_match_as_in_envoy() {
    let filter = "envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter";
    let make = |expression: &str| {
        format!(
            "{{extension_filter: {{name: cel, typed_config: {{\"@type\": type.googleapis.com/{filter}, \
             expression: \"request.url_path == '/direct/end' || ({expression})\"}}}}}}"
        )
    };
    assert_same(EXPRESSIONS, make, |text| text).await;
}

/// Filters of all other kinds.
const FILTERS: &[&str] = &[
    "{status_code_filter: {comparison: {op: GE, value: {default_value: 404, runtime_key: a}}}}",
    "{status_code_filter: {comparison: {op: LE, value: {default_value: 404, runtime_key: a}}}}",
    "{status_code_filter: {comparison: {op: EQ, value: {default_value: 410, runtime_key: a}}}}",
    "{status_code_filter: {comparison: {op: NE, value: {default_value: 200, runtime_key: a}}}}",
    "{duration_filter: {comparison: {op: GE, value: {default_value: 0, runtime_key: a}}}}",
    "{duration_filter: {comparison: {op: LE, value: {default_value: 1000000, runtime_key: a}}}}",
    "{duration_filter: {comparison: {op: GE, value: {default_value: 1000000, runtime_key: a}}}}",
    "{not_health_check_filter: {}}",
    "{runtime_filter: {runtime_key: a, percent_sampled: {numerator: 100}}}",
    "{runtime_filter: {runtime_key: a, percent_sampled: {numerator: 0}}}",
    "{response_flag_filter: {}}",
    "{response_flag_filter: {flags: [UF]}}",
    "{response_flag_filter: {flags: [NR, NC, DC]}}",
    "{header_filter: {header: {name: x-a, present_match: true}}}",
    "{header_filter: {header: {name: x-a, present_match: true, invert_match: true}}}",
    "{header_filter: {header: {name: x-a, string_match: {exact: \"one,two\"}}}}",
    "{header_filter: {header: {name: \":path\", string_match: {prefix: /plain}}}}",
    "{header_filter: {header: {name: \":method\", string_match: {safe_regex: {regex: \"P.*\"}}}}}",
    "{header_filter: {header: {name: content-length, range_match: {start: 1, end: 4}}}}",
    "{grpc_status_filter: {statuses: [NOT_FOUND]}}",
    "{grpc_status_filter: {statuses: [UNAVAILABLE, UNIMPLEMENTED]}}",
    "{grpc_status_filter: {statuses: [OK]}}",
    "{grpc_status_filter: {statuses: [OK, NOT_FOUND], exclude: true}}",
    "{and_filter: {filters: [{response_flag_filter: {}}, {status_code_filter: {comparison: {op: EQ, value: {default_value: 503, runtime_key: a}}}}]}}",
    "{and_filter: {filters: [{response_flag_filter: {}}, {header_filter: {header: {name: x-a, present_match: true}}}]}}",
    "{or_filter: {filters: [{response_flag_filter: {flags: [UF]}}, {header_filter: {header: {name: x-a, present_match: true}}}]}}",
    "{metadata_filter: {matcher: {filter: envoy.filters.http.rbac, path: [{key: shadow_engine_result}], value: {string_match: {exact: denied}}}}}",
    "{metadata_filter: {matcher: {filter: envoy.common, path: [{key: access_log_hint}], value: {bool_match: true}}}}",
    "{metadata_filter: {matcher: {filter: envoy.common, path: [{key: access_log_hint}], value: {bool_match: false}}}}",
    "{metadata_filter: {matcher: {filter: none, path: [{key: a}], value: {string_match: {exact: b}}}}}",
    "{metadata_filter: {matcher: {filter: none, path: [{key: a}], value: {string_match: {exact: b}}}, match_if_key_not_found: false}}",
];

/// A rule that logs requests with a header, and a shadow rule that would deny POST requests.
const SHADOW: &str = "http_filters:
          - name: envoy.filters.http.rbac
            typed_config:
              \"@type\": type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC
              rules:
                action: LOG
                policies: {named: {permissions: [{header: {name: x-a, present_match: true}}], principals: [{any: true}]}}
              shadow_rules:
                action: DENY
                policies: {post: {permissions: [{header: {name: \":method\", string_match: {exact: POST}}}], principals: [{any: true}]}}";

#[tokio::test]
async fn filters_match_as_in_envoy() {
    let end = "{header_filter: {header: {name: \":path\", string_match: {exact: /direct/end}}}}";
    let make = |filter: &str| format!("{{or_filter: {{filters: [{filter}, {end}]}}}}");
    assert_same(FILTERS, make, |text| text.replace("http_filters:", SHADOW)).await;
}

/// Operators with an argument or a length, except `REQ_WITHOUT_QUERY`, which Envoy supports only in access logs.
const WITH_ARGUMENT: &[&str] = &[
    "DYNAMIC_METADATA(envoy.filters.http.rbac:shadow_engine_result)",
    "DYNAMIC_METADATA(none:a)",
    "REQ(x-a)",
    "REQ(x-none)",
    "REQ(x-none?:path)",
    "REQ(:method):2",
    "RESP(x-b)",
    "RESP(:status)",
    "START_TIME(%Y/%m/%dT%H:%M:%S%z)",
    "START_TIME(%s.%3f)",
    "START_TIME(%F %T %6f %9f %f)",
];

#[tokio::test]
async fn operators_in_headers_have_envoys_values() {
    let collector = Collector::start().await;
    let header = |(number, operator): (usize, &&str)| {
        let value = match operator.strip_suffix(":2") {
            Some(operator) => format!("[%{operator}%:2]"),
            None => format!("[%{operator}%]"),
        };
        let value = value.replace("%:2]", ":2%]");
        format!("{{header: {{key: x-operator-{number}, value: \"{value}\"}}}}")
    };
    let operators = [&PLAIN[..], WITH_ARGUMENT].concat();
    let headers: Vec<_> = operators.iter().enumerate().map(header).collect();
    let add =
        format!("validate_clusters: false\n            response_headers_to_add: [{}]", headers.join(", "));
    let text = bootstrap(&collector, "", "").await;
    let text = text.replace("http_filters:", SHADOW).replace("validate_clusters: false", &add);
    let mut results = Vec::new();
    for proxy in Either::both(&text).await {
        let address = proxy.listener("http").await;
        let mut given = Vec::new();
        for request in REQUESTS {
            let mut client = Client::new(TcpStream::connect(address).await.unwrap());
            client.send(request).await;
            let head = client.message().await.0.to_lowercase();
            for (number, operator) in operators.iter().enumerate() {
                let name = format!("x-operator-{number}: ");
                let value = head.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or("nothing");
                given.push(format!("{} %{operator}% {}", &request[..20], masked(operator, value)));
            }
        }
        results.push(given);
    }
    let different: Vec<_> =
        results[0].iter().zip(&results[1]).filter(|(envoy, ours)| envoy != ours).collect();
    assert!(different.is_empty(), "{different:#?}");
}

/// Masks the parts that vary.
fn masked(operator: &str, value: &str) -> String {
    let numbers = ["_ADDRESS", "_PORT", "HOST", "DURATION", "START_TIME"];
    if operator.starts_with("START_TIME") || numbers.iter().any(|end| operator.ends_with(end)) {
        value.replace(|c: char| c.is_ascii_digit(), "")
    } else {
        value.to_owned()
    }
}
