//! Keep-alive pings of HTTP/2 connections to servers, over real sockets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/http2.rs"]
mod http2;
mod support;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use h2::client::SendRequest;
use http2::request;
use skysail_http::http2::Keepalive;
use skysail_policy::config::{
    Cluster,
    cluster::UpstreamProtocol,
    route::{RetryOn, RetryPolicy},
};
use support::{Proxy, cluster, http, listener, server, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

fn cluster_of(upstream: SocketAddr) -> Cluster {
    Cluster { protocol: UpstreamProtocol::Http2, ..cluster(&[upstream], None) }
}

async fn proxy(cluster: Cluster) -> Proxy {
    Proxy::start(listener(http(|_, _| ()), None), vec![cluster]).await
}

async fn connect(proxy: &Proxy) -> SendRequest<Bytes> {
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    http2::client(stream).await
}

#[tokio::test]
async fn a_server_that_answers_no_ping_is_disconnected() {
    // It completes the handshake and then sends nothing.
    let silent = server(|_, mut client| async move {
        client.send("\0\0\0\x04\0\0\0\0\0").await;
        client.rest().await;
    })
    .await;
    let interval = Duration::from_millis(10);
    let mut cluster = cluster_of(silent);
    cluster.http2.keepalive = Some(Keepalive { interval, timeout: interval, jitter: 0 });
    let proxy = proxy(cluster).await;
    let mut requests = connect(&proxy).await;
    let (answer, _) = requests.send_request(request("GET", "/"), true).unwrap();
    assert_eq!(within(answer).await.unwrap().status(), 503);

    // A server that answers pings stays in use, here until it has answered three.
    let upstream = server(|_, mut client| async move {
        client.exactly(24).await;
        client.send("\0\0\0\x04\0\0\0\0\0").await;
        let mut pings = 0;
        loop {
            let mut head = [0; 9];
            if client.stream.read_exact(&mut head).await.is_err() {
                return;
            }
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
            let mut content = vec![0; length];
            client.stream.read_exact(&mut content).await.unwrap();
            // A PING without the ACK flag.
            if (head[3], head[4]) == (6, 0) {
                client.stream.write_all(&[0, 0, 8, 6, 1, 0, 0, 0, 0]).await.unwrap();
                client.stream.write_all(&content).await.unwrap();
                pings += 1;
                if pings == 3 {
                    // A response head: 200 without content.
                    client.stream.write_all(&[0, 0, 1, 1, 5, 0, 0, 0, 1, 0x88]).await.unwrap();
                }
            }
        }
    })
    .await;
    let mut cluster = cluster_of(upstream);
    cluster.http2.keepalive = Some(Keepalive { interval, timeout: Duration::from_secs(30), jitter: 0 });
    let proxy = self::proxy(cluster).await;
    let mut requests = connect(&proxy).await;
    let (answer, _) = requests.send_request(request("GET", "/"), true).unwrap();
    assert_eq!(within(answer).await.unwrap().status(), 200);
}

/// Serves HTTP/2 without a codec: answers the first request of a connection, and pings until the second. Counts
/// requests.
async fn silent_from_the_second_request(requests: Arc<AtomicUsize>) -> SocketAddr {
    server(move |_, mut client| {
        let requests = Arc::clone(&requests);
        async move {
            client.exactly(24).await;
            client.send("\0\0\0\x04\0\0\0\0\0").await;
            let mut own_requests = 0;
            loop {
                let mut head = [0; 9];
                if client.stream.read_exact(&mut head).await.is_err() {
                    return;
                }
                let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
                let mut content = vec![0; length];
                client.stream.read_exact(&mut content).await.unwrap();
                let frame = match (head[3], head[4]) {
                    // HEADERS. The answer is a response head: 200 without content.
                    (1, _) => {
                        requests.fetch_add(1, Relaxed);
                        own_requests += 1;
                        let stream = [head[5], head[6], head[7], head[8]];
                        [&[0, 0, 1, 1, 5], &stream[..], &[0x88]].concat()
                    }
                    // A PING without the ACK flag.
                    (6, 0) => [&[0, 0, 8, 6, 1, 0, 0, 0, 0], &content[..]].concat(),
                    _ => continue,
                };
                if own_requests < 2 {
                    client.stream.write_all(&frame).await.unwrap();
                }
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_request_on_a_silent_connection_is_repeated_only_by_policy() {
    for (policy, status, sent) in [(None, 503, 2), (Some("reset"), 200, 3)] {
        let requests = Arc::new(AtomicUsize::new(0));
        let upstream = silent_from_the_second_request(Arc::clone(&requests)).await;
        let mut cluster = cluster_of(upstream);
        let (interval, timeout) = (Duration::from_millis(10), Duration::from_millis(500));
        cluster.http2.keepalive = Some(Keepalive { interval, timeout, jitter: 0 });
        let policy = policy.map(|word| {
            let mut on = RetryOn::default();
            on.set(word);
            Arc::new(RetryPolicy { on, retries: 1, ..RetryPolicy::default() })
        });
        let terminal = http(|_, forward| forward.retry = policy);
        let proxy = Proxy::start(listener(terminal, None), vec![cluster]).await;
        let client = connect(&proxy).await;
        for expected in [200, status] {
            // Safe to repeat on a connection that the server closes.
            let (answer, _) = client.clone().send_request(request("GET", "/"), true).unwrap();
            assert_eq!(within(answer).await.unwrap().status(), expected);
        }
        assert_eq!(requests.load(Relaxed), sent);
    }
}
