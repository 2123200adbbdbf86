//! HTTP/2 settings of downstream connections, and what happens to clients that violate them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/program.rs"]
mod program;
mod support;

use std::time::{Duration, Instant};

use program::Program;
use support::within;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

const BOOTSTRAP: &str = r#"
node: {id: a}
static_resources:
  listeners:
  - name: l
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: l
          request_headers_timeout: 1s
          http2_protocol_options:
            initial_stream_window_size: 100000
            initial_connection_window_size: 200000
            max_concurrent_streams: 7
            connection_keepalive: {interval: 0.02s, timeout: 2s}
          route_config: {virtual_hosts: [{name: all, domains: ["*"], routes: [{match: {prefix: /}, direct_response: {status: 200}}]}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
"#;

const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;

/// A client that sends exactly what a test specifies.
struct Client(TcpStream);

impl Client {
    async fn connect(program: &Program) -> Self {
        let mut client = Self(TcpStream::connect(program.listener("l").await).await.unwrap());
        client.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        client.send(SETTINGS, 0, &[]).await;
        client
    }

    async fn send(&mut self, kind: u8, flags: u8, payload: &[u8]) {
        let frame = [&[0, 0, payload.len() as u8, kind, flags, 0, 0, 0, 0], payload].concat();
        self.0.write_all(&frame).await.unwrap();
    }

    /// Reads a frame: type, flags and payload; `None` at the end.
    async fn frame(&mut self) -> Option<(u8, u8, Vec<u8>)> {
        let mut head = [0; 9];
        within(self.0.read_exact(&mut head)).await.ok()?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        within(self.0.read_exact(&mut payload)).await.ok()?;
        Some((head[3], head[4], payload))
    }
}

#[tokio::test]
async fn settings_are_those_configured() {
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), BOOTSTRAP).await;
    let mut client = Client::connect(&program).await;
    let (kind, _, settings) = client.frame().await.unwrap();
    assert_eq!(kind, SETTINGS);
    let pairs: Vec<_> =
        settings.chunks(6).map(|pair| (pair[1], u32::from_be_bytes(pair[2..].try_into().unwrap()))).collect();
    assert!(pairs.contains(&(3, 7)) && pairs.contains(&(4, 100_000)), "{pairs:?}");
    let update = client.frame().await.unwrap();
    assert_eq!(update, (WINDOW_UPDATE, 0, (200_000_u32 - 65_535).to_be_bytes().to_vec()));
}

#[tokio::test]
async fn a_client_that_answers_no_ping_is_disconnected() {
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), BOOTSTRAP).await;
    let mut client = Client::connect(&program).await;
    let mut answered = 0;
    while let Some((kind, flags, payload)) = client.frame().await {
        if kind == PING && flags == 0 && answered < 3 {
            client.send(PING, 1, &payload).await;
            answered += 1;
        }
    }
    assert_eq!(answered, 3);
    let stats = program.page("GET", "/stats/prometheus").await;
    assert!(stats.contains("envoy_http2_keepalive_timeout{http_conn_manager_prefix=\"l\"} 1\n"), "{stats}");
}

#[tokio::test]
async fn floods_are_counted_and_logged() {
    for (kind, payload, metric, name) in [
        (WINDOW_UPDATE, &[0, 0, 0, 1][..], "envoy_http2_inbound_window_update_frames_flood", "WindowUpdate"),
        (PING, &[0; 8], "envoy_http2_outbound_control_flood", "Ping"),
        (SETTINGS, &[], "envoy_http2_outbound_control_flood", "Settings"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut program = Program::start(folder.path(), BOOTSTRAP).await;
        let mut client = Client::connect(&program).await;
        let frame = [&[0, 0, payload.len() as u8, kind, 0, 0, 0, 0, 0], payload].concat();
        // The connection may close before all is written.
        let _ = client.0.write_all(&frame.repeat(4000)).await;
        let mut reason = None;
        while let Some((kind, _, payload)) = client.frame().await {
            if kind == GO_AWAY {
                reason = Some(payload[7]);
            }
        }
        assert!(matches!(reason, None | Some(11)), "{name}: {reason:?}");
        program.until(&format!("too many {name} frames")).await;
        let stats = program.page("GET", "/stats/prometheus").await;
        assert!(
            stats.contains(&format!("{metric}{{http_conn_manager_prefix=\"l\"}} 1\n")),
            "{name}: {stats}"
        );
    }
}

/// Frames that count as a flood with limits this low.
#[tokio::test]
async fn flood_limits_are_those_configured() {
    let folder = tempfile::tempdir().unwrap();
    let bootstrap = BOOTSTRAP.replace("max_concurrent_streams: 7", "max_outbound_control_frames: 5")
        + "layered_runtime: {layers: [{name: a, static_layer: {overload.premature_reset_total_stream_count: 3}}]}\n";
    let program = Program::start(folder.path(), &bootstrap).await;
    let closed = async |bytes: &[u8]| {
        let mut client = Client::connect(&program).await;
        let _ = client.0.write_all(bytes).await;
        let mut calm = false;
        // The sidecar sends a ping of its own now and then.
        for _ in 0..20 {
            match client.frame().await {
                Some((GO_AWAY, _, payload)) => calm = payload[7] == 11,
                Some(_) => {}
                None => return calm,
            }
        }
        false
    };
    let ping = [0, 0, 8, PING, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert!(closed(&ping.repeat(7)).await);
    // Streams that are reset before they are complete, so that none ends regularly.
    let mut resets = Vec::new();
    for stream in [1, 3, 5, 7] {
        resets.extend([0, 0, 6, 1, 4, 0, 0, 0, stream, 0x83, 0x86, 0x84, 0x41, 1, b'a']);
        resets.extend([0, 0, 4, 3, 0, 0, 0, 0, stream, 0, 0, 0, 8]);
    }
    assert!(closed(&resets).await);
    let stats = program.page("GET", "/stats/prometheus").await;
    let metric = "envoy_http_downstream_rq_too_many_premature_resets{http_conn_manager_prefix=\"l\"} 1\n";
    assert!(stats.contains(metric), "{stats}");
}

/// A client is in time if each of its frames is complete in time, even if a part of some frame is always
/// missing. That is usual in a fast upload, whose reads end within frames.
#[tokio::test]
async fn a_slow_frame_sequence_does_not_time_out() {
    let timeout = Duration::from_secs(2);
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), &BOOTSTRAP.replace("_timeout: 1s", "_timeout: 2s")).await;
    let mut client = Client::connect(&program).await;
    let frame = [0, 0, 4, WINDOW_UPDATE, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    let (begin, rest) = frame.split_at(5);
    client.0.write_all(begin).await.unwrap();
    let begun = Instant::now();
    // The sidecar's pings determine the pace.
    while begun.elapsed() < timeout * 5 / 4 {
        let (kind, flags, payload) = client.frame().await.expect("the connection stays open");
        assert_ne!(kind, GO_AWAY, "{payload:?}");
        if kind == PING && flags == 0 {
            let pong = [&[0, 0, 8, PING, 1, 0, 0, 0, 0], &payload[..]].concat();
            client.0.write_all(&[rest, &pong, begin].concat()).await.unwrap();
        }
    }
    // A frame that stays incomplete still times out.
    while client.frame().await.is_some_and(|(kind, ..)| kind != GO_AWAY) {}
}

#[tokio::test]
async fn an_incomplete_head_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), BOOTSTRAP).await;
    // A header block that never ends, while pings are answered.
    let mut client = Client::connect(&program).await;
    client.0.write_all(&[0, 0, 1, 1, 1, 0, 0, 0, 1, 0x82]).await.unwrap();
    while client.frame().await.is_some() {}
    let mut client = TcpStream::connect(program.listener("l").await).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n").await.unwrap();
    let mut answer = String::new();
    within(client.read_to_string(&mut answer)).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 408 ") && answer.ends_with("\r\n\r\nrequest header timeout"),
        "{answer}"
    );
}
