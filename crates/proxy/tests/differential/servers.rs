//! Servers that answer with the request they received, in the way that `x-serve` selects, and record the tries.
//!
//! `x-serve: reset,503,200` applies to three tries of the same `x-case`; the last also applies to all later
//! ones.

use std::{
    collections::HashMap,
    fmt::Write as _,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::Mutex,
    thread,
};

use bytes::Bytes;
use h2::{Reason, RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};
use tokio::net::TcpListener as AsyncListener;

/// Servers tried and their behaviour, by case.
static TRIES: Mutex<Option<HashMap<String, Vec<String>>>> = Mutex::new(None);

/// Removes and returns the tries of a case.
pub(crate) fn tries(case: &str) -> Vec<String> {
    TRIES.lock().unwrap().get_or_insert_default().remove(case).unwrap_or_default()
}

/// Returns a cluster with an HTTP/1.1 server.
pub(crate) fn http1(name: &'static str) -> Value {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming() {
            thread::spawn(move || serve(name, connection.unwrap()));
        }
    });
    let mut cluster = cluster(name, port);
    cluster["typed_extension_protocol_options"] =
        options(json!({"http_protocol_options": {"enable_trailers": true}}));
    cluster
}

/// Returns a cluster with an HTTP/2 server.
pub(crate) fn http2(name: &'static str) -> Value {
    let port = background(move |listener| async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let Ok(mut connection) = h2::server::handshake(stream).await else { return };
                while let Some(Ok((request, respond))) = connection.accept().await {
                    tokio::spawn(serve_stream(name, request, respond));
                }
            });
        }
    });
    let mut cluster = cluster(name, port);
    cluster["typed_extension_protocol_options"] = options(json!({"http2_protocol_options": {}}));
    cluster
}

/// Returns a cluster of one local server.
pub(crate) fn cluster(name: &str, port: u16) -> Value {
    let address = json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    let endpoints = json!([{"lb_endpoints": [{"endpoint": {"address": address}}]}]);
    json!({
        "name": name, "type": "STATIC", "connect_timeout": "5s",
        "load_assignment": {"cluster_name": name, "endpoints": endpoints},
    })
}

/// Returns the protocol options of a cluster.
pub(crate) fn options(explicit: Value) -> Value {
    json!({"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": explicit,
    }})
}

/// Runs a server on its own thread and returns its port.
pub(crate) fn background<F>(serve: impl FnOnce(AsyncListener) -> F + Send + 'static) -> u16
where
    F: Future<Output = ()>,
{
    let (send, receive) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = AsyncListener::bind("127.0.0.1:0").await.unwrap();
            send.send(listener.local_addr().unwrap().port()).unwrap();
            serve(listener).await;
        });
    });
    receive.recv().unwrap()
}

/// Masks the remaining timeout of a request, in whole seconds.
fn without_time(line: &str) -> String {
    const LEFT: &str = "x-envoy-expected-rq-timeout-ms: ";
    match line.strip_prefix(LEFT).and_then(|left| left.parse::<u32>().ok()) {
        Some(left) => format!("{LEFT}{}", left.div_ceil(1000)),
        None => line.to_owned(),
    }
}

/// Returns the behaviour of this try, and the field that describes it in the response.
fn way(name: &str, script: Option<&str>, case: Option<&str>) -> String {
    let (Some(script), Some(case)) = (script, case) else { return "200".to_owned() };
    let mut all = TRIES.lock().unwrap();
    let tries = all.get_or_insert_default().entry(case.to_owned()).or_default();
    let ways: Vec<&str> = script.split(',').collect();
    let way = ways[tries.len().min(ways.len() - 1)].to_owned();
    tries.push(format!("{name} {way}"));
    way
}

/// Returns status, fields and whether there is content.
fn head(way: &str) -> (u16, Vec<(&'static str, &'static str)>, bool) {
    let mut fields = vec![("server", "upstream"), ("x-a", "one"), ("x-b", "two")];
    let mut status = way.parse().unwrap_or(200);
    let mut content = !matches!(status, 204 | 304);
    match way {
        "empty" => content = false,
        "nameless" => _ = fields.remove(0),
        "overloaded" => {
            status = 503;
            fields.push(("x-envoy-overloaded", "true"));
        }
        "limited" => {
            status = 429;
            fields.push(("x-envoy-ratelimited", "true"));
        }
        "marked" => fields.push(("x-again", "yes")),
        "grpc0" | "grpc14" => {
            fields.extend([
                ("content-type", "application/grpc"),
                ("grpc-status", way.split_at(4).1.to_owned().leak()),
            ]);
            content = false;
        }
        "grpc-late" => fields.push(("content-type", "application/grpc")),
        _ => {}
    }
    (status, fields, content)
}

fn trailers(way: &str) -> &'static [(&'static str, &'static str)] {
    match way {
        "trailers" => &[("x-late", "yes"), ("x-a", "late")],
        "grpc-late" => &[("grpc-status", "5"), ("grpc-message", "no")],
        _ => &[],
    }
}

fn serve(name: &str, mut connection: TcpStream) {
    let mut input = Vec::new();
    loop {
        let Some(head) = read_head(&mut connection, &mut input) else { return };
        let Some((body, late)) = read_body(&mut connection, &mut input, &head) else { return };
        let of = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_end);
        let way = way(name, of("x-serve: "), of("x-case: "));
        let mut lines: Vec<String> = head.lines().map(|line| without_time(line.trim_end())).collect();
        lines[1..].sort_unstable();
        let body = format!("{name} got\n{}\n{body}{late}", lines.join("\n"));
        if lines.iter().any(|line| line.eq_ignore_ascii_case("upgrade: websocket")) {
            // The server grants every upgrade; `docs/compatibility.md` describes how other responses to
            // upgrades are forwarded.
            let switch =
                "HTTP/1.1 101 Words\r\nconnection: Upgrade\r\nupgrade: websocket\r\nx-a: one\r\n\r\n";
            _ = connection.write_all(format!("{switch}{body}").as_bytes());
            return;
        }
        let goes_on = answer(&mut connection, &way, head.starts_with("HEAD "), &body);
        if goes_on.is_none() {
            return;
        }
    }
}

/// Sends a response; returns `None` if the connection ends with it.
fn answer(connection: &mut TcpStream, way: &str, silent: bool, body: &str) -> Option<()> {
    let (status, fields, content) = head(way);
    let body = if content { body } else { "" };
    let version = if way == "old" { "1.0" } else { "1.1" };
    let mut text = format!("HTTP/{version} {status} Words\r\n");
    for (name, value) in fields {
        _ = write!(text, "{name}: {value}\r\n");
    }
    let shown = if silent { "" } else { body };
    match way {
        "reset" | "refused" => return None,
        "garbage" => {
            _ = connection.write_all(b"HTTP/9.9 what\r\n\r\n");
            return None;
        }
        "broken" => {
            _ = write!(text, "content-length: 10000\r\n\r\n{shown}");
            _ = connection.write_all(text.as_bytes());
            return None;
        }
        "bare" => {
            _ = write!(text, "\r\n{shown}");
            _ = connection.write_all(text.as_bytes());
            return None;
        }
        "chunked" | "trailers" | "grpc-late" => {
            text.push_str("transfer-encoding: chunked\r\n\r\n");
            if !silent {
                let (first, second) = body.split_at(body.len() / 2);
                for piece in [first, second] {
                    _ = write!(text, "{:X}\r\n{piece}\r\n", piece.len());
                }
                text.push_str("0\r\n");
                for (name, value) in trailers(way) {
                    _ = write!(text, "{name}: {value}\r\n");
                }
                text.push_str("\r\n");
            }
        }
        "204" | "304" => text.push_str("\r\n"),
        _ => _ = write!(text, "content-length: {}\r\n\r\n{shown}", body.len()),
    }
    connection.write_all(text.as_bytes()).ok()?;
    (way != "old").then_some(())
}

async fn serve_stream(name: &str, request: http::Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let (parts, mut content) = request.into_parts();
    let mut body = Vec::new();
    while let Some(Ok(piece)) = content.data().await {
        _ = content.flow_control().release_capacity(piece.len());
        body.extend_from_slice(&piece);
    }
    let body = String::from_utf8_lossy(&body);
    let late = content.trailers().await.ok().flatten();
    let lines = |fields: &HeaderMap| {
        let line = |(name, value): (&HeaderName, &HeaderValue)| {
            without_time(&format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())))
        };
        let mut lines: Vec<String> = fields.iter().map(line).collect();
        lines.sort_unstable();
        lines.join("\n")
    };
    let text = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    let way = way(name, text("x-serve"), text("x-case"));
    let late = late.map(|late| format!("\nthen {}", lines(&late))).unwrap_or_default();
    let body = format!("{name} got\n{} {}\n{}\n{body}{late}", parts.method, parts.uri, lines(&parts.headers));
    match &*way {
        "reset" | "garbage" => return respond.send_reset(Reason::INTERNAL_ERROR),
        "refused" => return respond.send_reset(Reason::REFUSED_STREAM),
        _ => {}
    }
    let (status, fields, content) = head(&way);
    let mut response = http::Response::builder().status(status);
    for (name, value) in fields {
        response = response.header(name, value);
    }
    let content = content && parts.method != "HEAD";
    let late = if parts.method == "HEAD" { &[] } else { trailers(&way) };
    let Ok(mut stream) = respond.send_response(response.body(()).unwrap(), !content && late.is_empty())
    else {
        return;
    };
    if !content {
        return;
    }
    let end = late.is_empty() && way != "broken";
    _ = stream.send_data(body.into(), end);
    if way == "broken" {
        return stream.send_reset(Reason::INTERNAL_ERROR);
    }
    if !late.is_empty() {
        let late =
            late.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        _ = stream.send_trailers(late.collect());
    }
}

/// Reads the content, and the trailers as lines.
pub(crate) fn read_body(
    connection: &mut TcpStream,
    input: &mut Vec<u8>,
    head: &str,
) -> Option<(String, String)> {
    if head.lines().any(|line| line.trim_end() == "transfer-encoding: chunked") {
        let mut body = String::new();
        loop {
            let length = read_until(connection, input, b"\r\n")?;
            let length = usize::from_str_radix(length.trim_end(), 16).unwrap();
            if length == 0 {
                break;
            }
            body.push_str(read_exactly(connection, input, length + 2)?.trim_end_matches("\r\n"));
        }
        let mut late = String::new();
        loop {
            let line = read_until(connection, input, b"\r\n")?;
            if line == "\r\n" {
                return Some((body, late));
            }
            late.push_str(&format!("\nthen {}", line.trim_end()));
        }
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.map_or(0, |length| length.trim_end().parse().unwrap());
    Some((read_exactly(connection, input, length)?, String::new()))
}

pub(crate) fn read_head(connection: &mut TcpStream, input: &mut Vec<u8>) -> Option<String> {
    Some(read_until(connection, input, b"\r\n\r\n")?.trim_end().to_owned())
}

fn read_exactly(connection: &mut TcpStream, input: &mut Vec<u8>, length: usize) -> Option<String> {
    while input.len() < length {
        read_more(connection, input)?;
    }
    Some(String::from_utf8_lossy(&input.drain(..length).collect::<Vec<_>>()).into_owned())
}

fn read_until(connection: &mut TcpStream, input: &mut Vec<u8>, end: &[u8]) -> Option<String> {
    loop {
        if let Some(at) = input.windows(end.len()).position(|window| window == end) {
            return read_exactly(connection, input, at + end.len());
        }
        read_more(connection, input)?;
    }
}

fn read_more(connection: &mut TcpStream, input: &mut Vec<u8>) -> Option<()> {
    let mut block = [0; 16 * 1024];
    let count = connection.read(&mut block).ok().filter(|count| *count > 0)?;
    input.extend_from_slice(&block[..count]);
    Some(())
}
