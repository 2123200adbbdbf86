//! Access logs sent to collectors: Envoy and the sidecar send the same entries for the same requests.

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

use collector::{Collector, Received};
use either::Either;
use logged::{BOOTSTRAP, HTTP, HTTP_ALS, REQUESTS, TCP_ALS, bootstrap};
use program::Program;
use prost::Message as _;
use skysail_proto::{
    envoy::pb::envoy::{
        config::core::v3::{Address, Node, address, socket_address::PortSpecifier},
        data::accesslog::v3::{AccessLogCommon, HttpAccessLogEntry, TcpAccessLogEntry},
        service::accesslog::v3::{
            StreamAccessLogsMessage,
            stream_access_logs_message::{Identifier, LogEntries},
        },
    },
    otlp::{ExportLogsServiceRequest, ResourceLogs},
};
use support::Client;
use tokio::net::{TcpListener, TcpStream};

/// An equivalent OpenTelemetry configuration.
const OTLP: &str = r#"{
name: otlp, typed_config: {
  "@type": type.googleapis.com/envoy.extensions.access_loggers.open_telemetry.v3.OpenTelemetryAccessLogConfig,
  TO, log_name: otlp-log, buffer_flush_interval: 0.05s, stat_prefix: p, DISABLED
  body: {string_value: "%REQ(:path)% %RESPONSE_CODE% %REQ(x-none)%"},
  resource_attributes: {values: [{key: a, value: {string_value: "%PROTOCOL%"}}, {key: b, value: {int_value: 5}}]},
  attributes: {values: [
    {key: text, value: {string_value: "%RESPONSE_FLAGS%"}},
    {key: map, value: {kvlist_value: {values: [{key: code, value: {string_value: "%RESPONSE_CODE%"}}]}}},
    {key: list, value: {array_value: {values: [{string_value: a}, {string_value: "%ROUTE_NAME%"}]}}},
    {key: nothing, value: {string_value: ""}}]}}}"#;

/// An access log entry of a request or a connection.
#[derive(Debug, PartialEq)]
enum Entry {
    Begin(Box<Identifier>),
    /// With sorted headers.
    Http(Box<HttpAccessLogEntry>, [BTreeMap<String, String>; 2]),
    Tcp(Box<TcpAccessLogEntry>),
    Records(ResourceLogs),
}

/// Returns the entries of a message without the parts that vary.
fn entries(received: &Received) -> Vec<Entry> {
    if !received.path.ends_with("/StreamAccessLogs") {
        let mut request = ExportLogsServiceRequest::decode(received.message.clone()).unwrap();
        let mut logs = request.resource_logs.remove(0);
        for record in logs.scope_logs.iter_mut().flat_map(|scope| &mut scope.log_records) {
            assert!(record.time_unix_nano > 1_700_000_000_000_000_000);
            record.time_unix_nano = 0;
        }
        return vec![Entry::Records(logs)];
    }
    let message = StreamAccessLogsMessage::decode(received.message.clone()).unwrap();
    let mut entries = Vec::new();
    if let Some(Identifier { node, log_name }) = message.identifier {
        let Node { id, cluster, locality, .. } = node.unwrap();
        let node = Some(Node { id, cluster, locality, ..Node::default() });
        entries.push(Entry::Begin(Box::new(Identifier { node, log_name })));
    }
    match message.log_entries {
        Some(LogEntries::HttpLogs(logs)) => {
            for mut entry in logs.log_entry {
                let common = settle(entry.common_properties.take().unwrap());
                // The sidecar does not record the wire size of heads.
                let common = AccessLogCommon {
                    downstream_wire_bytes_received: 0,
                    downstream_wire_bytes_sent: 0,
                    upstream_wire_bytes_received: 0,
                    upstream_wire_bytes_sent: 0,
                    ..common
                };
                let (request, response) = (entry.request.as_mut().unwrap(), entry.response.as_mut().unwrap());
                assert_eq!(request.request_id.len(), 36);
                request.request_id.clear();
                request.upstream_header_bytes_sent = 0;
                request.downstream_header_bytes_received = 0;
                response.upstream_header_bytes_received = 0;
                response.downstream_header_bytes_sent = 0;
                let headers = [&mut request.request_headers, &mut response.response_headers]
                    .map(|headers| std::mem::take(headers).into_iter().collect());
                let entry = HttpAccessLogEntry { common_properties: Some(common), ..entry };
                entries.push(Entry::Http(Box::new(entry), headers));
            }
        }
        Some(LogEntries::TcpLogs(logs)) => {
            for mut entry in logs.log_entry {
                entry.common_properties = entry.common_properties.map(settle);
                entries.push(Entry::Tcp(Box::new(entry)));
            }
        }
        None => {}
    }
    entries
}

/// Removes times, ports and IDs.
fn settle(common: AccessLogCommon) -> AccessLogCommon {
    assert!(common.start_time.unwrap().seconds > 1_700_000_000 && common.duration.is_some());
    let without_port = |address: Option<Address>| {
        let Some(address::Address::SocketAddress(mut address)) = address?.address else {
            panic!("no socket")
        };
        let zero = address.port_specifier == Some(PortSpecifier::PortValue(0));
        address.port_specifier = Some(PortSpecifier::PortValue(if zero { 0 } else { 7 }));
        Some(Address { address: Some(address::Address::SocketAddress(address)) })
    };
    AccessLogCommon {
        start_time: None,
        duration: None,
        time_to_last_rx_byte: None,
        time_to_first_upstream_tx_byte: None,
        time_to_last_upstream_tx_byte: None,
        time_to_first_upstream_rx_byte: None,
        time_to_last_upstream_rx_byte: None,
        time_to_first_downstream_tx_byte: None,
        time_to_last_downstream_tx_byte: None,
        downstream_remote_address: without_port(common.downstream_remote_address),
        downstream_local_address: without_port(common.downstream_local_address),
        downstream_direct_remote_address: without_port(common.downstream_direct_remote_address),
        upstream_remote_address: without_port(common.upstream_remote_address),
        upstream_local_address: without_port(common.upstream_local_address),
        stream_id: String::new(),
        ..common
    }
}

/// Fails with the differences if Envoy and the sidecar sent different entries.
fn assert_same<T: std::fmt::Debug>(results: &[T]) {
    let [envoy, skysail] = results else { panic!("there are two") };
    let (envoy, skysail) = (format!("{envoy:#?}"), format!("{skysail:#?}"));
    let different = envoy.lines().zip(skysail.lines()).position(|(envoy, skysail)| envoy != skysail);
    if let Some(at) = different.or((envoy.len() != skysail.len()).then_some(0)) {
        let around =
            |text: &str| text.lines().skip(at.saturating_sub(15)).take(30).collect::<Vec<_>>().join("\n");
        panic!("Envoy:\n{}\nSkysail:\n{}", around(&envoy), around(&skysail));
    }
}

/// Sends all requests to a proxy and returns `messages` messages per collector stream.
async fn received(proxy: &Either, collector: &mut Collector, messages: usize) -> Vec<Received> {
    let address = proxy.listener("http").await;
    let mut all = Vec::new();
    for request in REQUESTS {
        let mut client = Client::new(TcpStream::connect(address).await.unwrap());
        client.send(request).await;
        client.message().await;
        for _ in 0..messages {
            all.push(collector.next().await);
        }
    }
    all
}

#[tokio::test]
async fn request_entries_equal_envoys() {
    let mut collector = Collector::start().await;
    let text = bootstrap(&collector, HTTP_ALS, TCP_ALS).await;
    let mut results = Vec::new();
    for proxy in Either::both(&text).await {
        let all = received(&proxy, &mut collector, 1).await;
        // All messages are on one stream, with the configured metadata.
        assert!(all.iter().all(|received| received.call == all[0].call));
        assert_eq!(all[0].headers["x-who"], "me");
        results.push(all.iter().flat_map(entries).collect::<Vec<_>>());
    }
    assert_same(&results);
}

#[tokio::test]
async fn connection_entries_equal_envoys() {
    let mut collector = Collector::start().await;
    let text = bootstrap(&collector, HTTP_ALS, TCP_ALS).await;
    let mut results = Vec::new();
    for proxy in Either::both(&text).await {
        let mut all = Vec::new();
        for name in ["tcp", "tcp-refused"] {
            let mut client = Client::new(TcpStream::connect(proxy.listener(name).await).await.unwrap());
            if name == "tcp" {
                client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
                client.message().await;
            }
            drop(client);
            all.extend(entries(&collector.next().await));
        }
        results.push(all);
    }
    assert_same(&results);
}

/// Istio limits a listener's own log to these connections.
#[tokio::test]
async fn entries_of_connections_without_a_filter_chain_equal_envoys() {
    let mut collector = Collector::start().await;
    let text = bootstrap(&collector, HTTP_ALS, TCP_ALS).await;
    let filtered =
        TCP_ALS.replacen("name: als,", "name: als, filter: {response_flag_filter: {flags: [NR]}},", 1);
    let (before, after) = text.split_once("  - name: tcp\n").unwrap();
    let unmatched = after.replacen(
        "filter_chains:\n    - filters:",
        &format!("access_log: [{filtered}]\n    filter_chains:\n    - filter_chain_match: {{destination_port: 1}}\n      filters:"),
        1,
    );
    let text = format!("{before}  - name: tcp\n{unmatched}");
    let mut results = Vec::new();
    for proxy in Either::both(&text).await {
        drop(TcpStream::connect(proxy.listener("tcp").await).await.unwrap());
        results.push(entries(&collector.next().await));
    }
    assert_same(&results);
}

#[tokio::test]
async fn opentelemetry_records_equal_envoys() {
    let mut collector = Collector::start().await;
    let port = collector.address.port();
    let ways = [
        "grpc_service: {envoy_grpc: {cluster_name: collector}}".to_owned(),
        "common_config: {log_name: other, grpc_service: {envoy_grpc: {cluster_name: collector}}}".to_owned(),
        format!(
            "http_service: {{http_uri: {{uri: 'http://a.b:{port}/v1/logs', cluster: collector, timeout: 5s}}, \
                 request_headers_to_add: [{{header: {{key: X-Who, value: me}}}}]}}"
        ),
    ];
    for (way, disabled) in ways.iter().zip(["", "disable_builtin_labels: true,", ""]) {
        let otlp = OTLP.replace("TO", way).replace("DISABLED", disabled);
        let text = bootstrap(&collector, &otlp, TCP_ALS).await;
        let mut results = Vec::new();
        for proxy in Either::both(&text).await {
            let all = received(&proxy, &mut collector, 1).await;
            let headers = all[0].headers.iter();
            let own = ["x-envoy-internal", "x-forwarded-for", "x-envoy-expected-rq-timeout-ms", "user-agent"];
            let headers = headers.filter(|(name, _)| !own.contains(&name.as_str()));
            let headers: BTreeMap<_, _> =
                headers.map(|(name, value)| (name.as_str().to_owned(), value.clone())).collect();
            results.push((
                all[0].path.clone(),
                format!("{headers:#?}"),
                all.iter().flat_map(entries).collect::<Vec<_>>(),
            ));
        }
        assert_same(&results);
    }
}

/// Waits until the sidecar's metrics contain this line.
async fn until_metric(program: &Program, line: &str) {
    support::within(async {
        while !program.page("GET", "/stats/prometheus").await.lines().any(|found| found == line) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn an_unavailable_collector_delays_no_request_and_receives_all_entries_later() {
    let refusing_address = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = refusing_address.local_addr().unwrap();
    drop(refusing_address);
    let log = format!("{{{}}}", HTTP.replace("SIZE", "buffer_flush_interval: 0.05s"));
    let text = BOOTSTRAP.replace("COLLECTOR", &address.port().to_string());
    let text = text.replace("UPSTREAM", "1").replace("ACCESS_LOG", &log).replace("TCP_LOG", TCP_ALS);
    let folder = tempfile::tempdir().unwrap();
    let mut program = Program::start(folder.path(), &text).await;
    let mut client = Client::new(TcpStream::connect(program.listener("http").await).await.unwrap());
    let mut ask = async || {
        client.send("GET /direct HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert_eq!(client.message().await.1, "gone");
    };
    ask().await;
    let line = program.until("could not be sent to cluster collector").await;
    assert!(
        line.contains("1 access logs could not be sent to cluster collector: ") && line.contains("refused"),
        "{line}"
    );
    let mut collector = Collector::at(TcpListener::bind(address).await.unwrap());
    ask().await;
    let first = entries(&collector.next().await);
    assert!(matches!(first[..], [Entry::Begin(_), Entry::Http(..), ..]), "{first:?}");
    until_metric(&program, "skysail_export_sent_total{cluster_name=\"collector\",what=\"access logs\"} 2")
        .await;
    let metrics = program.page("GET", "/stats/prometheus").await;
    let failed = "skysail_export_failed_total{cluster_name=\"collector\",what=\"access logs\"} 0";
    assert!(metrics.lines().any(|line| line == failed), "{metrics}");
}

#[tokio::test]
async fn a_collector_that_does_not_read_delays_no_request() {
    // It accepts connections and sends nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let log = format!("{{{}}}", HTTP.replace("SIZE", "buffer_size_bytes: 1"));
    let text = BOOTSTRAP.replace("COLLECTOR", &silent.local_addr().unwrap().port().to_string());
    let text = text.replace("UPSTREAM", "1").replace("ACCESS_LOG", &log).replace("TCP_LOG", TCP_ALS);
    let folder = tempfile::tempdir().unwrap();
    let mut program = Program::start(folder.path(), &text).await;
    let mut client = Client::new(TcpStream::connect(program.listener("http").await).await.unwrap());
    // More than the buffer of 1 MiB, from entries of requests with 40 KiB.
    let large = "x".repeat(40_000);
    for _ in 0..60 {
        client.send(&format!("GET /direct/{large} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        assert_eq!(client.message().await.1, "gone");
    }
    program.until("could not be sent to cluster collector").await;
    let quit = program.quit().await;
    assert!(quit.contains("drained"), "{quit}");
}

#[tokio::test]
async fn buffered_entries_are_sent_at_shutdown() {
    let mut collector = Collector::start().await;
    for (log, wanted) in [
        (format!("{{{}}}", HTTP.replace("SIZE", "buffer_flush_interval: 1000s")), 3),
        (
            OTLP.replace("TO", "grpc_service: {envoy_grpc: {cluster_name: collector}}")
                .replace("DISABLED", "")
                .replace("0.05s", "1000s"),
            1,
        ),
    ] {
        let text = bootstrap(&collector, &log, TCP_ALS).await;
        let folder = tempfile::tempdir().unwrap();
        let program = Program::start(folder.path(), &text).await;
        let mut client = Client::new(TcpStream::connect(program.listener("http").await).await.unwrap());
        for _ in 0..2 {
            client.send("GET /direct HTTP/1.1\r\nhost: a\r\n\r\n").await;
            client.message().await;
        }
        drop(client);
        program.quit().await;
        let received = entries(&collector.next().await);
        assert_eq!(received.len(), wanted, "{received:?}");
    }
}
