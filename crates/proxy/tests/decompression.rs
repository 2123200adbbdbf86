//! Decompression of requests and responses, beside a real Envoy.

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
#[path = "support/program.rs"]
mod program;
mod support;

use std::{io::Write as _, net::SocketAddr};

use either::Either;
use files::{bootstrap, cluster, filter, http, listener, to, with};
use serde_json::{Value, json};
use support::within;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

fn compressed(coding: &str, content: &[u8]) -> Vec<u8> {
    match coding {
        "gzip" => {
            let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
            writer.write_all(content).unwrap();
            writer.finish().unwrap()
        }
        "br" => {
            let mut writer = brotli::CompressorWriter::new(Vec::new(), 4096, 9, 20);
            writer.write_all(content).unwrap();
            writer.into_inner()
        }
        _ => zstd::encode_all(content, 3).unwrap(),
    }
}

fn decompressor(kind: &str, config: &Value) -> Value {
    let library = format!(
        "type.googleapis.com/envoy.extensions.compression.{kind}.decompressor.v3.{}",
        match kind {
            "gzip" => "Gzip",
            "brotli" => "Brotli",
            _ => "Zstd",
        }
    );
    let library = json!({"decompressor_library": {"name": kind, "typed_config": {"@type": library}}});
    filter("http.decompressor.v3.Decompressor", &with(library, config))
}

/// Starts a server that answers each request with its head and content as text. The answer to a path that names a
/// coding has that coding.
async fn server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut input = Vec::new();
                let mut block = [0; 65536];
                loop {
                    let text = String::from_utf8_lossy(&input).into_owned();
                    if let Some((head, body)) = text.split_once("\r\n\r\n")
                        && (!head.contains("transfer-encoding") || body.ends_with("0\r\n\r\n"))
                    {
                        let path = head.split(' ').nth(1).unwrap().trim_start_matches('/').to_owned();
                        let (content, fields) = match path.as_str() {
                            "gzip" | "br" | "zstd" => {
                                (compressed(&path, &[b'x'; 2000]), format!("content-encoding: {path}\r\n"))
                            }
                            "bomb" => {
                                (compressed("gzip", &vec![0; 30 << 20]), "content-encoding: gzip\r\n".into())
                            }
                            "fixed" => (
                                compressed("gzip", b"fixed"),
                                "content-encoding: gzip\r\ncache-control: no-transform\r\n".into(),
                            ),
                            _ => (text.clone().into_bytes(), String::new()),
                        };
                        let head = format!(
                            "HTTP/1.1 200 OK\r\n{fields}content-length: {}\r\nconnection: close\r\n\r\n",
                            content.len()
                        );
                        _ = stream.write_all(&[head.as_bytes(), &content].concat()).await;
                        return;
                    }
                    match stream.read(&mut block).await {
                        Ok(count @ 1..) => input.extend_from_slice(&block[..count]),
                        _ => return,
                    }
                }
            });
        }
    });
    address
}

async fn both(filters: &[Value]) -> [Either; 2] {
    let listeners = [listener("l", &[http(filters, &to("c"), &json!({}))])];
    let mut file: Value =
        serde_json::from_str(&bootstrap(&listeners, &[cluster("c", server().await, false)])).unwrap();
    file["admin"] = json!({"address": files::address(SocketAddr::from(([127, 0, 0, 1], 0)))});
    file["node"]["cluster"] = "a".into();
    Either::both(&file.to_string()).await
}

/// Sends a request on a new connection; returns the head of the response and its content without chunks.
async fn ask(proxy: &Either, head: &str, body: &[u8]) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(proxy.listener("l").await).await.unwrap();
    let head = format!("{head}host: a\r\nconnection: close\r\n\r\n");
    stream.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
    let mut answer = Vec::new();
    _ = within(stream.read_to_end(&mut answer)).await;
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").map_or(answer.len(), |end| end + 4);
    let (head, mut rest) = (String::from_utf8_lossy(&answer[..end]).into_owned(), &answer[end..]);
    let mut content = Vec::new();
    if !head.contains("transfer-encoding: chunked") {
        return (head, rest.to_vec());
    }
    while let Some(line) = rest.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        let piece = rest.get(line + 2..line + 2 + size).unwrap_or_default();
        content.extend_from_slice(piece);
        rest = rest.get(line + 4 + size..).unwrap_or_default();
        if size == 0 {
            break;
        }
    }
    (head, content)
}

fn post(coding: &str, length: usize) -> String {
    format!("POST / HTTP/1.1\r\ncontent-encoding: {coding}\r\ncontent-length: {length}\r\n")
}

#[tokio::test]
async fn requests_and_responses_are_decompressed() {
    for (kind, coding) in [("gzip", "gzip"), ("brotli", "br"), ("zstd", "zstd")] {
        for proxy in both(&[decompressor(kind, &json!({}))]).await {
            let body = compressed(coding, b"hello hello hello hello");
            let (head, got) = ask(&proxy, &post(coding, body.len()), &body).await;
            let got = String::from_utf8(got).unwrap();
            assert!(
                head.starts_with("HTTP/1.1 200") && got.contains("hello hello hello hello"),
                "{head} {got}"
            );
            assert!(!got.contains("content-encoding") && !got.contains("content-length"), "{got}");
            assert!(got.contains(&format!("accept-encoding: {coding}")), "{got}");
            let (head, got) = ask(&proxy, &format!("GET /{coding} HTTP/1.1\r\n"), b"").await;
            assert!(!head.contains("content-encoding"), "{head}");
            assert_eq!(got, [b'x'; 2000]);
            // Another coding is not touched.
            let (head, got) = ask(&proxy, &post("deflate", 4), b"abcd").await;
            assert!(head.contains("200") && got.ends_with(b"abcd"), "{head}");
        }
    }
}

#[tokio::test]
async fn directions_have_settings() {
    let off = json!({"common_config": {"enabled": {"default_value": false, "runtime_key": "k"}}});
    for proxy in both(&[decompressor("gzip", &json!({"request_direction_config": off}))]).await {
        let body = compressed("gzip", b"hello");
        let (_, got) = ask(&proxy, &post("gzip", body.len()), &body).await;
        assert!(String::from_utf8_lossy(&got).contains("content-encoding: gzip"));
        assert_eq!(ask(&proxy, "GET /gzip HTTP/1.1\r\n", b"").await.1, [b'x'; 2000]);
        let (head, _) = ask(&proxy, "GET /fixed HTTP/1.1\r\n", b"").await;
        assert!(head.contains("content-encoding: gzip"), "{head}");
    }
    let ignoring = json!({"common_config": {"ignore_no_transform_header": true}});
    let quiet = json!({"advertise_accept_encoding": false});
    let config = json!({"response_direction_config": ignoring, "request_direction_config": quiet});
    for proxy in both(&[decompressor("gzip", &config)]).await {
        let (_, got) = ask(&proxy, "GET / HTTP/1.1\r\n", b"").await;
        assert!(!String::from_utf8_lossy(&got).contains("accept-encoding"));
        assert_eq!(ask(&proxy, "GET /fixed HTTP/1.1\r\n", b"").await.1, b"fixed");
    }
    for proxy in both(&[decompressor("gzip", &json!({"response_direction_config": off}))]).await {
        let (head, _) = ask(&proxy, "GET /gzip HTTP/1.1\r\n", b"").await;
        assert!(head.contains("content-encoding: gzip"), "{head}");
    }
}

#[tokio::test]
async fn filters_after_it_get_the_content() {
    let script =
        "function envoy_on_request(h) local n = h:body():length() h:headers():replace('x-length', n) end
        function envoy_on_response(h) local n = h:body():length() h:headers():replace('x-length', n) end";
    let lua = filter("http.lua.v3.Lua", &json!({"default_source_code": {"inline_string": script}}));
    let [_, ours] = both(&[lua.clone(), decompressor("gzip", &json!({})), lua]).await;
    let body = compressed("gzip", &[b'y'; 3000]);
    let (_, got) = ask(&ours, &post("gzip", body.len()), &body).await;
    let got = String::from_utf8_lossy(&got).into_owned();
    assert!(got.contains("x-length: 3000") && got.contains("yyyyy"), "{got}");
    let (head, got) = ask(&ours, "GET /gzip HTTP/1.1\r\n", b"").await;
    assert!(head.contains("x-length: 2000"), "{head}");
    assert_eq!(got, [b'x'; 2000]);
}

/// Envoy passes on what it has decompressed so far; the sidecar ends the message.
#[tokio::test]
async fn bombs_and_broken_content_end_the_message() {
    let [_, ours] = both(&[decompressor("gzip", &json!({}))]).await;
    let (_, got) = ask(&ours, "GET /bomb HTTP/1.1\r\n", b"").await;
    assert!(got.len() < 4 << 20, "{}", got.len());
    let bomb = compressed("gzip", &vec![0; 30 << 20]);
    let (head, _) = ask(&ours, &post("gzip", bomb.len()), &bomb).await;
    assert!(!head.contains(" 200 "), "{head}");
    let (head, _) = ask(&ours, &post("gzip", 8), b"no gzip!").await;
    assert!(head.is_empty() || head.starts_with("HTTP/1.1 400"), "{head}");
    // A higher ratio lets it pass.
    let mut open = decompressor("gzip", &json!({}));
    open["typed_config"]["decompressor_library"]["typed_config"]["max_inflate_ratio"] = 1032.into();
    let [_, ours] = both(&[open]).await;
    assert_eq!(ask(&ours, "GET /bomb HTTP/1.1\r\n", b"").await.1.len(), 30 << 20);
}
