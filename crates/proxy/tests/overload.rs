//! Responses of an overloaded proxy, over real sockets. The settings treat any lag as overload, so the first
//! probes detect it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::time::Duration;

use skysail_proxy::overload::Limits;
use support::{Proxy, cluster, echo, http, listener, server, within};

/// Accepts all connections.
const STRICT: Limits = Limits {
    under_way: 1,
    late: Duration::MAX,
    overloaded: Duration::ZERO,
    lag_duration: Duration::ZERO,
    probe_validity: Duration::from_secs(3_600),
    resets: 200,
    series: 10_000,
    revoked_drain: Duration::ZERO,
    end_with_certificate: false,
};

async fn proxy() -> Proxy {
    let clusters = vec![cluster(&[echo().await], None)];
    Proxy::limited(listener(http(|_, _| ()), None), clusters, STRICT).await
}

#[tokio::test]
async fn requests_are_refused_and_the_connection_continues() {
    let proxy = proxy().await;
    let mut client = proxy.connect().await;
    let refused = within(async {
        loop {
            client.send("POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody").await;
            let (head, body) = client.message().await;
            if head.starts_with("HTTP/1.1 503 ") {
                return (head, body);
            }
            assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        }
    });
    let (head, body) = refused.await;
    assert!(head.contains("content-type: text/plain") && !head.contains("connection: close"), "{head}");
    assert_eq!(body, "envoy overloaded");
    // gRPC clients receive a gRPC status.
    client
        .send("POST /x HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n\r\n")
        .await;
    let (head, _) = client.message().await;
    assert!(head.contains("grpc-status: 14") && head.contains("grpc-message: envoy overloaded"), "{head}");
    let metrics = proxy.metrics().await;
    let count = metrics.lines().find(|line| line.starts_with("envoy_http_downstream_rq_overload_close"));
    assert!(count.is_some_and(|line| line.ends_with(" 2")), "{metrics}");
    assert!(metrics.contains("response_flags=\"OM\""), "{metrics}");
}

#[tokio::test]
async fn streams_are_refused_and_the_connection_continues() {
    let proxy = proxy().await;
    let stream = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    let (mut requests, connection) = within(h2::client::handshake(stream)).await.unwrap();
    tokio::spawn(connection);
    within(async {
        // After the first refusal the next streams are refused too; the connection stays usable.
        let mut refused = 0;
        while refused < 2 {
            let request = http::Request::get("http://a/x").body(()).unwrap();
            requests = requests.ready().await.unwrap();
            let (answer, _) = requests.send_request(request, true).unwrap();
            let answer = answer.await.unwrap();
            match answer.status().as_u16() {
                200 => {}
                503 => refused += 1,
                other => panic!("{other}"),
            }
        }
    })
    .await;
}

#[tokio::test]
async fn under_overload_few_connections_are_accepted_and_abandoned_ones_are_skipped() {
    let (release, held) = tokio::sync::watch::channel(());
    let (tell, mut received) = tokio::sync::mpsc::unbounded_channel();
    let upstream = server(move |_, mut client| {
        let (mut held, tell) = (held.clone(), tell.clone());
        async move {
            let head = client.head().await;
            tell.send(head.lines().next().unwrap().to_owned()).unwrap();
            if head.starts_with("GET /held ") {
                held.changed().await.unwrap();
            }
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
        }
    });
    let limits = Limits { late: Duration::ZERO, overloaded: Duration::MAX, ..STRICT };
    let clusters = vec![cluster(&[upstream.await], None)];
    let proxy = Proxy::limited(listener(http(|_, _| ()), None), clusters, limits).await;
    let request = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n");
    let mut held = proxy.connect().await;
    held.send(&request("/held")).await;
    assert_eq!(within(received.recv()).await.unwrap(), "GET /held HTTP/1.1");
    // Few are accepted at a time and in order, so a client behind a hundred others can give up before.
    let mut before = Vec::new();
    let path = loop {
        for _ in 0..100 {
            before.push(proxy.connect().await);
        }
        let path = format!("/gone/{}", before.len());
        let mut closed = proxy.connect().await;
        closed.send(&request(&path)).await;
        drop(closed);
        if (connections(&proxy).await as usize) < before.len() {
            break path;
        }
    };
    let mut patient = proxy.connect().await;
    patient.send(&request("/patient")).await;
    within(async {
        loop {
            match received.recv().await.unwrap().split(' ').nth(1).unwrap() {
                "/patient" => break,
                served => assert_ne!(served, path),
            }
        }
    })
    .await;
    release.send(()).unwrap();
    for client in [&mut held, &mut patient] {
        assert!(client.head().await.starts_with("HTTP/1.1 200 "));
    }
}

#[tokio::test]
async fn a_waiting_request_is_admitted_even_if_no_other_ends() {
    let (release, held) = tokio::sync::watch::channel(());
    let (tell, mut received) = tokio::sync::mpsc::unbounded_channel();
    let upstream = server(move |_, mut client| {
        let (mut held, tell) = (held.clone(), tell.clone());
        async move {
            client.head().await;
            tell.send(()).unwrap();
            held.changed().await.unwrap();
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
        }
    });
    let limits = Limits { overloaded: Duration::MAX, ..STRICT };
    let clusters = vec![cluster(&[upstream.await], None)];
    let proxy = Proxy::limited(listener(http(|_, _| ()), None), clusters, limits).await;
    let mut clients = Vec::new();
    for _ in 0..100 {
        let mut client = proxy.connect().await;
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        clients.push(client);
    }
    // Some clients disconnect while they wait.
    drop(clients.split_off(90));
    for _ in 0..90 {
        within(received.recv()).await.unwrap();
    }
    release.send(()).unwrap();
    for client in &mut clients {
        assert!(client.head().await.starts_with("HTTP/1.1 200 "));
    }
}

/// Returns the number of connections that the listener has accepted.
async fn connections(proxy: &Proxy) -> u32 {
    let metrics = proxy.metrics().await;
    let line = metrics.lines().find(|line| line.starts_with("envoy_listener_downstream_cx_total"));
    line.unwrap().rsplit_once(' ').unwrap().1.parse().unwrap()
}
