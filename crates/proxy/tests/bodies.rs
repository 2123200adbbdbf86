//! Bodies are forwarded byte for byte between all versions of HTTP, with or without a content-length, with
//! their trailers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/http2.rs"]
mod http2;
#[path = "support/mesh.rs"]
mod mesh;
#[path = "support/message.rs"]
mod message;
mod support;
#[path = "support/tls.rs"]
mod tls;

use std::sync::Arc;

use bytes::Bytes;
use http2::{http2_server, request};
use mesh::{Mesh, accepting, connecting};
use message::{Client, Message, map, server};
use skysail_identity::TlsSpec;
use skysail_policy::config::{Cluster, cluster::UpstreamProtocol};
use support::{Proxy, cluster, http, listener, proxy_to, within};
use tokio::{net::TcpStream, sync::Notify};

/// Echoes the request in the same form.
async fn echo(request: Message) -> Message {
    let answer = Message { trailers: request.trailers.clone(), ..Message::new(&[], request.content.clone()) };
    if request.has_length() { answer.with_length() } else { answer }
}

/// Sends 5 MB of random data through a proxy to one server, from clients of all kinds.
async fn content_comes_back(http2_server: bool, tls_server: bool) {
    let mesh = Mesh::new();
    let secured = mesh.spec("server", "client", &[b"h2", b"http/1.1"]);
    let upstream = server(http2_server, tls_server.then(|| secured.server().unwrap()), echo).await;
    let tls = tls_server.then(|| connecting(&mesh.spec("client", "server", &[])));
    let protocol = if http2_server { UpstreamProtocol::Http2 } else { UpstreamProtocol::Http1 };
    let cluster = || Cluster { protocol, ..cluster(&[upstream], tls.as_ref()) };
    let plain = Proxy::start(listener(http(|_, _| ()), None), vec![cluster()]).await;
    let behind = accepting(&TlsSpec { peer: None, ..secured });
    let secured = Proxy::start(listener(http(|_, _| ()), Some(behind)), vec![cluster()]).await;

    let mut random = fastrand::Rng::with_seed(5);
    let mut content = vec![0; 5_000_000];
    random.fill(&mut content);
    let content = Bytes::from(content);
    let whole = Message::new(&[("te", "trailers")], content.clone()).with_length();
    let trailers = map(&[("x-end", "it was noise")]);
    let in_pieces = Message { trailers, ..Message::new(&[("te", "trailers")], content) };
    for (http2, protocol) in [(false, "http/1.1"), (true, "h2")] {
        let stream = TcpStream::connect(plain.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let clients = [
            Client::new(stream, http2).await,
            Client::new(tls::secured(secured.address, protocol).await, http2).await,
        ];
        for mut client in clients {
            for sent in [&whole, &in_pieces] {
                let got = client.ask(sent).await;
                assert!(got.status == 200 && got.content == sent.content, "{protocol}");
                assert_eq!(
                    (got.has_length(), &got.trailers),
                    (sent.has_length(), &sent.trailers),
                    "{protocol}"
                );
            }
        }
    }
}

#[tokio::test]
async fn bodies_are_echoed_by_an_http1_server() {
    content_comes_back(false, false).await;
}

#[tokio::test]
async fn bodies_are_echoed_by_an_http1_server_over_tls() {
    content_comes_back(false, true).await;
}

#[tokio::test]
async fn bodies_are_echoed_by_an_http2_server() {
    content_comes_back(true, false).await;
}

#[tokio::test]
async fn bodies_are_echoed_by_an_http2_server_over_tls() {
    content_comes_back(true, true).await;
}

#[tokio::test]
async fn a_response_head_of_an_http2_server_does_not_wait_for_content() {
    let has_arrived = Arc::new(Notify::new());
    let arrival = has_arrived.clone();
    let upstream = http2_server(move |_, _, mut respond| {
        let arrival = arrival.clone();
        async move {
            let mut body = respond.send_response(::http::Response::new(()), false).unwrap();
            arrival.notified().await;
            body.send_data("event".into(), true).unwrap();
        }
    })
    .await;
    let cluster = Cluster { protocol: UpstreamProtocol::Http2, ..cluster(&[upstream], None) };
    let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![cluster]).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    has_arrived.notify_one();
    assert_eq!(client.until("0\r\n\r\n").await, "5\r\nevent\r\n0\r\n\r\n");
}

#[tokio::test]
async fn a_request_head_of_an_http2_client_does_not_wait_for_content() {
    let has_arrived = Arc::new(Notify::new());
    let arrival = has_arrived.clone();
    let upstream = support::server(move |_, mut client| {
        let arrival = arrival.clone();
        async move {
            client.head().await;
            arrival.notify_one();
            let body = client.until("0\r\n\r\n").await;
            client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
        }
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (response, mut body) = http2::client(stream).await.send_request(request("POST", "/"), false).unwrap();
    within(has_arrived.notified()).await;
    body.send_data("question".into(), true).unwrap();
    let mut response = within(response).await.unwrap();
    let (content, _) = http2::content(response.body_mut()).await;
    assert_eq!(content, b"8\r\nquestion\r\n0\r\n\r\n");
}
