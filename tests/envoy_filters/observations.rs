//! Effects of patches on connections, logs, metrics and the loaded configuration.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    time::Duration,
};

use rustls::{ClientConfig, ClientConnection, RootCertStore};
use serde_json::Value;
use skysail_testkit::eventually;

use crate::scene::{Observed, Scene, Side};

/// A patch, and how its effect is observed.
struct Observation {
    /// File with the patch.
    file: &'static str,
    /// Texts of the file that are replaced, so that the effect is soon there.
    changes: &'static [(&'static str, &'static str)],
    observe: fn(&Scene) -> Observed,
    /// The proxies that have the effect; `None` for both.
    only: Option<Side>,
}

const fn observation(file: &'static str, observe: fn(&Scene) -> Observed) -> Observation {
    Observation { file, changes: &[], observe, only: None }
}

const OBSERVATIONS: &[Observation] = &[
    observation("server-header.yaml", server_header),
    observation("header-limits.yaml", large_header),
    Observation {
        changes: &[("headers_count: 200", "headers_count: 20")],
        ..observation("header-limits.yaml", many_headers)
    },
    observation("http-10.yaml", http_10),
    Observation { changes: &[("1048576", "2097152")], ..observation("http2-options.yaml", http2_settings) },
    observation("proxy-protocol.yaml", proxy_header),
    // The chain of mutual TLS. That of another TLS has no certificate.
    Observation {
        changes: &[("Protocol: tls", "Protocol: tls, applicationProtocols: istio")],
        ..observation("tls-parameters.yaml", tls_12)
    },
    // Envoy drains an idle connection of HTTP/1.1, and then waits for the client to close it.
    Observation {
        changes: &[(" 90s", " 0.3s"), (" stream_idle", IDLE_MORE)],
        ..observation("idle-timeouts.yaml", idle_connection)
    },
    Observation {
        changes: &[(" 3600s", " 0.3s"), (" stream_idle", IDLE_MORE)],
        ..observation("idle-timeouts.yaml", idle_connection)
    },
    Observation { changes: &[(" 10s", " 0.3s")], ..observation("idle-timeouts.yaml", slow_head) },
    Observation { changes: &[(" 60s", " 0.3s")], ..observation("idle-timeouts.yaml", slow_body) },
    Observation { changes: &[("600s", "0.3s")], ..observation("tcp-idle-timeout.yaml", idle_passed_through) },
    observation("tcp-keepalive.yaml", keepalive_timer),
    Observation {
        changes: &[("connection: 100", "connection: 1")],
        ..observation("connection-pool.yaml", connections_of_requests)
    },
    Observation {
        changes: &[(" 30s", " 0.3s")],
        ..observation("connection-pool.yaml", connections_after_a_pause)
    },
    Observation {
        changes: &[("%REQ(:METHOD)%", "own %REQ(:PATH)%")],
        ..observation("access-log.yaml", access_log)
    },
    // A public Envoy lacks Istio's filter for metrics, so there is nothing to patch.
    Observation { only: Some(Side::Sidecar), ..observation("stats-tags.yaml", metric_labels) },
    // Envoy accepts the field, and does not implement it (`not-implemented-hide` in the proto).
    Observation { only: Some(Side::Sidecar), ..observation("mapped-addresses.yaml", refusal) },
    Observation { only: Some(Side::Envoy), ..observation("mapped-addresses.yaml", mapped_in_configuration) },
    // The sidecar's buffers have sizes of their own. `requests` has the effect at Envoy.
    Observation { only: Some(Side::Sidecar), ..observation("buffer-limit.yaml", buffer_in_configuration) },
    // The filter acts only on routes with VHDS, which Envoy does not get, and the sidecar uses without it.
    observation("on-demand.yaml", filter_in_configuration),
];

const IDLE_MORE: &str = " drain_timeout: 0.1s\n          delayed_close_timeout: 0.1s\n          stream_idle";

/// Returns the files with these effects.
pub(crate) fn files() -> impl Iterator<Item = &'static str> {
    OBSERVATIONS.iter().map(|observation| observation.file)
}

/// Checks each effect.
pub(crate) fn check(scene: &Scene) {
    for observation in
        OBSERVATIONS.iter().filter(|observation| observation.only.is_none_or(|only| only == scene.side))
    {
        scene.compare(observation.file, observation.changes, observation.observe);
    }
    scene.assert_accepted();
}

/// Longest wait for bytes of a connection that may stay open. It is longer than the timeouts of the patches.
const WAIT: Duration = Duration::from_secs(1);

/// Bytes that arrive on a connection to `stock-v1` after these, and whether it ends.
fn raw(scene: &Scene, bytes: impl AsRef<[u8]>) -> (String, bool) {
    let mut stream = scene.connect();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let mut arrived = Vec::new();
    // A server that has sent its response may reset the connection.
    let is_open = match stream.write_all(bytes.as_ref()).and_then(|()| stream.read_to_end(&mut arrived)) {
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        Ok(_) => false,
    };
    (String::from_utf8_lossy(&arrived).into_owned(), !is_open)
}

/// Sends a request with these further headers, and compares the status with those of the effect and its
/// absence.
fn status(scene: &Scene, headers: &str, acts: u16, lacks: u16) -> Observed {
    let request = format!("GET / HTTP/1.1\r\nhost: stock.shop\r\n{headers}connection: close\r\n\r\n");
    let (response, _) = raw(scene, request);
    let has = |status: u16| response.starts_with(&format!("HTTP/1.1 {status} "));
    Observed::either(has(acts), has(lacks), &*response)
}

fn large_header(scene: &Scene) -> Observed {
    status(scene, &format!("x-large: {}\r\n", "x".repeat(70 << 10)), 200, 431)
}

fn many_headers(scene: &Scene) -> Observed {
    status(scene, &"x-many: 1\r\n".repeat(30), 431, 200)
}

/// The server itself sends no such header.
fn server_header(scene: &Scene) -> Observed {
    let (response, _) = raw(scene, "GET / HTTP/1.1\r\nhost: stock.shop\r\nconnection: close\r\n\r\n");
    let is_whole = response.starts_with("HTTP/1.1 200 ");
    let named = response.contains("\r\nserver: istio-envoy\r\n");
    Observed::either(is_whole && !response.contains("\r\nserver:"), is_whole && named, response)
}

fn http_10(scene: &Scene) -> Observed {
    let (response, _) = raw(scene, "GET / HTTP/1.0\r\n\r\n");
    let acts = response.contains(" 200 OK\r\n") && response.contains("\"host\":\"stock.shop\"");
    Observed::either(acts, response.starts_with("HTTP/1.1 426 "), response)
}

/// The header names the pod as the destination, because the port selects the filter chain.
fn proxy_header(scene: &Scene) -> Observed {
    let header = format!("PROXY TCP4 192.0.2.7 {} 1000 9090\r\n", scene.address("stock-v1"));
    let request = "GET / HTTP/1.1\r\nhost: stock.shop\r\nconnection: close\r\n\r\n";
    let (response, _) = raw(scene, [&header, request].concat());
    Observed::either(response.starts_with("HTTP/1.1 200 "), response.starts_with("HTTP/1.1 400 "), response)
}

fn idle_connection(scene: &Scene) -> Observed {
    let (response, ends) = raw(scene, "GET / HTTP/1.1\r\nhost: stock.shop\r\n\r\n");
    let is_answered = response.starts_with("HTTP/1.1 200 ");
    Observed::either(is_answered && ends, is_answered && !ends, response)
}

fn slow_head(scene: &Scene) -> Observed {
    let (response, ends) = raw(scene, "GET / HTTP/1.1\r\nhost: stock.shop\r\n");
    let acts = response.starts_with("HTTP/1.1 408 ") && response.contains("request header timeout");
    Observed::either(acts, response.is_empty() && !ends, response)
}

fn slow_body(scene: &Scene) -> Observed {
    let (response, ends) = raw(scene, "POST / HTTP/1.1\r\nhost: stock.shop\r\ncontent-length: 9\r\n\r\nhalf");
    let acts = response.starts_with("HTTP/1.1 408 ") && response.contains("request timeout");
    Observed::either(acts, response.is_empty() && !ends, response)
}

/// Kinds of frames of HTTP/2. Source: RFC 9113, section 6.
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
/// Settings. Source: RFC 9113, section 6.5.2.
const MAX_CONCURRENT_STREAMS: u16 = 3;
const INITIAL_WINDOW_SIZE: u16 = 4;
/// Window of a connection before any update, in bytes. Source: RFC 9113, section 6.9.2.
const FIRST_WINDOW: u32 = 65_535;

/// Window of a connection in the patch, in bytes. It is no default.
const PATCHED_WINDOW: u32 = 2 << 20;

/// Reads the server's settings and the window of the connection, until the server has answered a ping.
fn http2_settings(scene: &Scene) -> Observed {
    let mut stream = scene.connect();
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]);
    bytes.extend([0, 0, 8, PING, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    stream.write_all(&bytes).unwrap();
    let (mut settings, mut window, mut is_answered) = (BTreeMap::new(), FIRST_WINDOW, false);
    while !is_answered || window == FIRST_WINDOW {
        let (kind, payload) = match frame(&mut stream) {
            Ok(frame) => frame,
            Err(error) => return Observed::either(false, false, error.to_string()),
        };
        match kind {
            SETTINGS => settings.extend(payload.as_chunks::<6>().0.iter().map(|[id, id_low, value @ ..]| {
                (u16::from_be_bytes([*id, *id_low]), u32::from_be_bytes(*value))
            })),
            WINDOW_UPDATE => window += u32::from_be_bytes(payload.try_into().unwrap()),
            PING => is_answered = true,
            _ => {}
        }
    }
    let found = (settings.get(&MAX_CONCURRENT_STREAMS), settings.get(&INITIAL_WINDOW_SIZE), window);
    let acts = found == (Some(&100), Some(&65_536), PATCHED_WINDOW);
    let lacks = found.0 != Some(&100) && found.1 != Some(&65_536) && found.2 != PATCHED_WINDOW;
    Observed::either(acts, lacks, format!("{settings:?}, window {window}"))
}

/// Reads a frame of HTTP/2, and returns its kind and its payload.
fn frame(stream: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; length as usize];
    stream.read_exact(&mut payload)?;
    Ok((head[3], payload))
}

/// Types of a record of TLS. Source: RFC 8446, section 5.1.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
/// Description of an alert. Source: RFC 8446, section 6.
const PROTOCOL_VERSION: u8 = 70;

/// Offers TLS 1.2 only, and reads the start of the answer.
fn tls_12(scene: &Scene) -> Observed {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let config = config.with_protocol_versions(&[&rustls::version::TLS12]).unwrap();
    let mut config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    config.alpn_protocols = vec![b"istio".to_vec()];
    let name = "stock.shop".try_into().unwrap();
    let mut session = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = scene.connect();
    session.write_tls(&mut stream).unwrap();
    let mut record = [0; 7];
    if let Err(error) = stream.read_exact(&mut record) {
        return Observed::either(false, false, error.to_string());
    }
    let acts = record[0] == ALERT && record[6] == PROTOCOL_VERSION;
    Observed::either(acts, record[0] == HANDSHAKE, format!("{record:?}"))
}

/// Opens a connection to the address of a pod, which no service has, and waits for its end.
fn idle_passed_through(scene: &Scene) -> Observed {
    let helper = scene.address("helper");
    let script = format!("exec 3<>/dev/tcp/{helper}/8080 && timeout {} cat <&3; echo $?", WAIT.as_secs());
    let output = scene.mesh.run(&["exec", "front", "--", "bash", "-c", &script]);
    // The exit code of `timeout` is 124 after the time limit.
    Observed::either(output.stdout == b"0\n", output.stdout == b"124\n", format!("{output:?}"))
}

/// Keepalive time of the patch, in ticks of /proc/net/tcp.
const KEEPALIVE: u32 = 300 * 100;

/// Reads the timers of the connections from `front` to the server.
fn keepalive_timer(scene: &Scene) -> Observed {
    scene.mesh.call("front", "http://stock.shop/", &[]);
    let table = scene.mesh.run(&["exec", "front", "--", "cat", "/proc/net/tcp"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    // Remote port 9090, state ESTABLISHED.
    let rows = rows.filter(|cells| cells.len() > 5 && cells[2].ends_with(":2382") && cells[3] == "01");
    // Timer 2 is that of keepalive.
    let timers: Vec<Option<u32>> =
        rows.map(|cells| u32::from_str_radix(cells[5].strip_prefix("02:")?, 16).ok()).collect();
    let is_probed = timers.iter().flatten().any(|left| (KEEPALIVE / 2..=KEEPALIVE).contains(left));
    Observed::either(is_probed, timers.contains(&None) && !is_probed, table)
}

/// Counts the connections that `front` opens to the server for some requests. `None` if the count goes back:
/// it ends with its cluster.
fn opened(scene: &Scene, send: impl Fn()) -> Option<u64> {
    let count = || -> u64 {
        let page = scene.page("front", "/stats?filter=stock.shop.*upstream_cx_total$");
        page.lines().filter_map(|line| line.rsplit_once(": ")?.1.trim().parse::<u64>().ok()).sum()
    };
    let before = count();
    send();
    count().checked_sub(before)
}

fn connections_of_requests(scene: &Scene) -> Observed {
    let opened = opened(scene, || {
        scene.mesh.call("front", "http://stock.shop/", &["--count", "4"]);
    });
    Observed::either(opened == Some(4), opened == Some(0), format!("{opened:?} connections"))
}

/// A request to another server makes the pause before each request.
fn connections_after_a_pause(scene: &Scene) -> Observed {
    let opened = opened(scene, || {
        for _ in 0..2 {
            scene.mesh.call("front", "http://helper.shop/delay/1s", &[]);
            scene.mesh.call("front", "http://stock.shop/", &[]);
        }
    });
    Observed::either(opened == Some(2), opened == Some(0), format!("{opened:?} connections"))
}

/// Returns a number that no earlier observation had.
fn fresh() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Size of a query, in bytes. Envoy writes lines to the log once it has 64 KiB of them, or ten seconds later.
const PADDING: usize = 35_000;

/// Sends two requests. Once the log has a line of the second, it has all lines of the first.
fn access_log(scene: &Scene) -> Observed {
    let padding = "x".repeat(PADDING);
    let [first, second] = [fresh(), fresh()].map(|number| format!("/logged/{number}?"));
    for path in [&first, &second] {
        scene.mesh.call("front", &format!("http://stock.shop{path}{padding}"), &[]);
    }
    let log = eventually(&format!("{second} is logged"), || {
        let output = scene.mesh.run(&["logs", "stock-v1", "-c", "proxy"]);
        let log = String::from_utf8_lossy(&output.stdout).replace(&padding, "");
        if log.contains(&format!("\"GET {second} HTTP/1.1\"")) { Ok(log) } else { Err(log) }
    });
    let own = log.contains(&format!("Z own {first} 200\n"));
    let default = log.contains(&format!("\"GET {first} HTTP/1.1\""));
    Observed::either(own, default && !own, log)
}

/// Reads the metric of a request with a status of its own, as the counts of earlier requests stay.
fn metric_labels(scene: &Scene) -> Observed {
    let status = 420 + fresh() % 70;
    scene.mesh.call("front", &format!("http://stock.shop/?status={status}"), &[]);
    let page = scene.mesh.call("stock-v1", "http://127.0.0.1:15090/stats/prometheus", &[]).body;
    let status = format!("response_code=\"{status}\"");
    let lines =
        page.lines().filter(|line| line.starts_with("istio_requests_total{") && line.contains(&status));
    let lines: Vec<&str> = lines.collect();
    let has = |label: &str| lines.iter().any(|line| line.contains(label));
    let (added, removed) = (has(",request_host=\"stock.shop\""), !has("request_protocol="));
    Observed::either(added && removed, !lines.is_empty() && !added && !removed, lines.join("\n"))
}

/// The sidecar names the field that it refuses, and keeps its configuration.
fn refusal(scene: &Scene) -> Observed {
    let object = ["status", "envoyfilter/mapped-addresses", "-n", "shop", "--output", "json"];
    let output = scene.mesh.run(&object);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let status: Value = serde_json::from_str(&text).unwrap_or_default();
    let is_refused = status["state"] == "refused"
        && text.contains("does not support field represent_ipv4_remote_address_as_ipv4_mapped_ipv6");
    let is_served = scene.mesh.call("front", "http://stock.shop/", &[]).status == Some(200);
    // There is no such object.
    let is_absent = output.status.code() == Some(2);
    Observed::either(is_served && is_refused, is_served && is_absent, text)
}

/// Returns the listeners that a workload's proxy uses, as JSON.
fn listeners(scene: &Scene, workload: &str) -> String {
    let dump: Value = serde_json::from_str(&scene.page(workload, "/config_dump")).unwrap_or_default();
    let all = dump["configs"].as_array().into_iter().flatten();
    let all = all.filter_map(|config| config["dynamic_listeners"].as_array()).flatten();
    all.map(|listener| listener["active_state"].to_string()).collect()
}

/// Looks for a text in the listeners of a workload's proxy.
fn configured(scene: &Scene, workload: &str, text: &str) -> Observed {
    let all = listeners(scene, workload);
    let has = all.contains(text);
    Observed::either(has, !has && all.contains("\"virtualOutbound\""), all)
}

fn buffer_in_configuration(scene: &Scene) -> Observed {
    configured(scene, "stock-v1", "\"per_connection_buffer_limit_bytes\":32768")
}

fn mapped_in_configuration(scene: &Scene) -> Observed {
    configured(scene, "stock-v1", "\"represent_ipv4_remote_address_as_ipv4_mapped_ipv6\":true")
}

fn filter_in_configuration(scene: &Scene) -> Observed {
    configured(scene, "front", "\"envoy.filters.http.on_demand\"")
}
