//! Compression of responses.

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

use std::io::Read;

use files::{bootstrap, cluster, filter, http, listener};
use program::Program;
use serde_json::{Value, json};
use support::{Client, server};
use tokio::net::TcpStream;

const CONTENT: &str = "some text, and some text, and again some text";

/// Returns a compressor filter for this coding, with further fields of the library and of the filter.
fn compressor(coding: &str, library: &Value, fields: &Value) -> Value {
    let url = format!("type.googleapis.com/envoy.extensions.compression.{coding}");
    let library = files::with(json!({"@type": url}), library);
    let config = json!({"compressor_library": {"name": coding, "typed_config": library}});
    let mut filter = filter("http.compressor.v3.Compressor", &files::with(config, fields));
    filter["name"] = coding.into();
    filter
}

/// Returns the content of a message in chunks.
fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let end = bytes.windows(2).position(|two| two == b"\r\n").unwrap();
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if size == 0 {
            return all;
        }
        all.extend_from_slice(&bytes[end + 2..end + 2 + size]);
        bytes = &bytes[end + 4 + size..];
    }
}

fn decompressed(coding: &str, bytes: &[u8]) -> String {
    let mut reader: Box<dyn Read> = match coding {
        "gzip" => Box::new(flate2::read::GzDecoder::new(bytes)),
        "br" => Box::new(brotli::Decompressor::new(bytes, 4096)),
        _ => Box::new(zstd::stream::read::Decoder::new(bytes).unwrap()),
    };
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    text
}

#[tokio::test]
async fn responses_are_compressed_in_the_coding_that_the_client_prefers() {
    let upstream = server(|_, mut client: Client| async move {
        let head = client.head().await;
        let accept = if head.contains("accept-encoding") { "yes" } else { "no" };
        let (length, etag) = (CONTENT.len(), "etag: \"strong\"\r\n");
        let fields =
            format!("content-type: text/plain\r\ncontent-length: {length}\r\nx-accept: {accept}\r\n{etag}");
        client.send(&format!("HTTP/1.1 200 OK\r\nconnection: close\r\n{fields}\r\n{CONTENT}")).await;
    })
    .await;
    let remove = json!({"response_direction_config": {"remove_accept_encoding_header": true}});
    let off = json!({"response_direction_config": {"common_config": {"enabled": {"default_value": false}}}});
    let filters = [
        compressor("brotli.compressor.v3.Brotli", &json!({"quality": 5, "window_bits": 16}), &json!({})),
        compressor("gzip.compressor.v3.Gzip", &json!({}), &json!({"choose_first": true})),
        compressor("zstd.compressor.v3.Zstd", &json!({"compression_level": 19}), &remove),
        compressor("gzip.compressor.v3.Gzip", &json!({}), &off),
    ];
    let disabled = "type.googleapis.com/envoy.extensions.filters.http.compressor.v3.CompressorPerRoute";
    let routes = json!([
        {"match": {"prefix": "/no-br"}, "route": {"cluster": "c"},
            "typed_per_filter_config": {"brotli.compressor.v3.Brotli": {"@type": disabled, "disabled": true}}},
        {"match": {"prefix": "/"}, "route": {"cluster": "c"}},
    ]);
    let listeners = [listener("l", &[http(&filters, &routes, &json!({}))])];
    let folder = tempfile::tempdir().unwrap();
    let program =
        Program::start(folder.path(), &bootstrap(&listeners, &[cluster("c", upstream, false)])).await;
    for (path, accept, coding) in [
        ("/", "gzip, br, zstd", "gzip"),
        ("/", "br;q=0.9, gzip;q=0.5, zstd;q=0.7", "br"),
        ("/", "zstd, gzip;q=0.5", "zstd"),
        ("/", "*", "gzip"),
        ("/no-br", "br, zstd;q=0.5", "zstd"),
        ("/", "deflate", ""),
        ("/no-br", "br", ""),
    ] {
        let mut client = Client::new(TcpStream::connect(program.listener("l").await).await.unwrap());
        let fields = format!("host: a\r\nconnection: close\r\naccept-encoding: {accept}\r\n");
        client.send(&format!("GET {path} HTTP/1.1\r\n{fields}\r\n")).await;
        let head = client.head().await;
        let content = client.rest_of_bytes().await;
        assert!(
            head.contains("\r\nvary: Accept-Encoding\r\n") && head.contains("\r\nx-accept: no\r\n"),
            "{head}"
        );
        if coding.is_empty() {
            assert!(!head.contains("content-encoding") && head.contains("\r\netag: "), "{head}");
            assert_eq!(content, CONTENT.as_bytes());
            continue;
        }
        assert!(head.contains(&format!("\r\ncontent-encoding: {coding}\r\n")), "{accept}: {head}");
        assert!(!head.contains("content-length") && !head.contains("etag"), "{head}");
        assert_eq!(decompressed(coding, &unchunked(&content)), CONTENT, "{coding}");
    }
}
