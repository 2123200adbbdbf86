//! Upgrades of a connection from HTTP/1.1 to HTTP/2 (`h2c`, RFC 7540, section 3.2).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/http2.rs"]
mod http2;
mod support;

use http2::frame;
use skysail_policy::config::listener::Direction;
use support::{Proxy, cluster, echo, http, listener, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// Reads a stream up to its end; returns its content if the status is 200.
async fn answer(stream: &mut TcpStream, id: u8) -> String {
    let mut content = Vec::new();
    loop {
        match frame(stream).await {
            (1, _, of, block) if of == id => {
                assert_eq!(block.iter().find(|byte| !matches!(byte, 0x20..=0x3f)), Some(&0x88));
            }
            (0, flags, of, piece) if of == id => {
                content.extend(piece);
                if flags & 1 == 1 {
                    return String::from_utf8(content).unwrap();
                }
            }
            (kind, ..) => assert!(matches!(kind, 4 | 8), "{kind}"),
        }
    }
}

/// Starts an outbound proxy, for clients of the workload itself.
async fn outbound() -> Proxy {
    let mut listener = listener(http(|_, _| ()), None);
    listener.direction = Direction::Outbound;
    Proxy::start(listener, vec![cluster(&[echo().await], None)]).await
}

/// A proxy in front might have forwarded the upgrade without supporting it.
#[tokio::test]
async fn external_clients_stay_with_http1() {
    let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![cluster(&[echo().await], None)]).await;
    let mut client = proxy.connect().await;
    let upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__";
    client.send(&format!("GET / HTTP/1.1\r\nHost: a\r\n{upgrade}\r\n\r\n")).await;
    let (head, _) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
}

#[tokio::test]
async fn an_http1_connection_can_be_upgraded_to_http2() {
    let proxy = outbound().await;
    let mut stream = within(TcpStream::connect(proxy.address)).await.unwrap();
    let upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__";
    let request = format!("GET /first HTTP/1.1\r\nHost: a\r\n{upgrade}\r\n\r\n");
    within(stream.write_all(request.as_bytes())).await.unwrap();
    let switched = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n";
    let mut received = vec![0; switched.len()];
    within(stream.read_exact(&mut received)).await.unwrap();
    assert_eq!(String::from_utf8(received).unwrap(), switched);
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    within(stream.write_all(preface)).await.unwrap();
    let first = answer(&mut stream, 1).await;
    assert!(first.contains("/first") && !first.to_lowercase().contains("http2-settings"), "{first}");
    // `:method: GET`, `:scheme: http`, `:path: /second`, `:authority: a`.
    let block = b"\x82\x86\x04\x07/second\x01\x01a";
    let mut second = vec![0, 0, block.len() as u8, 1, 5, 0, 0, 0, 3];
    second.extend(block);
    within(stream.write_all(&second)).await.unwrap();
    assert!(answer(&mut stream, 3).await.contains("/second"));
}

/// Such a request is answered in HTTP/1.1.
#[tokio::test]
async fn an_invalid_upgrade_to_http2_is_ignored() {
    let proxy = outbound().await;
    for fields in [
        "Connection: Upgrade\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
        "Connection: Upgrade, HTTP2-Settings",
        "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMA",
        "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: !",
        "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: \r\nHTTP2-Settings: ",
    ] {
        let mut client = proxy.connect().await;
        client.send(&format!("GET / HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n{fields}\r\n\r\n")).await;
        let (head, _) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{fields}: {head}");
    }
}
