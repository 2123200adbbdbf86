//! What a proxy says that has more to do than it can, over real sockets. Any lag is too much here, so the first probes
//! show it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::time::Duration;

use skysail_proxy::{overload::Limits, telemetry};
use support::{Proxy, cluster, echo, http, listener, within};

const STRICT: Limits = Limits { requests: 1, lag: Duration::ZERO, lasting: Duration::ZERO };

async fn proxy() -> Proxy {
    let clusters = vec![cluster(&[echo().await], None)];
    Proxy::limited(listener(http(|_, _| ()), None), clusters, STRICT).await
}

async fn metrics(proxy: &Proxy) -> String {
    telemetry::collect(proxy.workers().scrape().await, &proxy.local, None)
}

#[tokio::test]
async fn requests_are_refused_and_the_connection_goes_on() {
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
    // Still so, and told to callers of gRPC in their way.
    client
        .send("POST /x HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc\r\ncontent-length: 0\r\n\r\n")
        .await;
    let (head, _) = client.message().await;
    assert!(head.contains("grpc-status: 14") && head.contains("grpc-message: envoy overloaded"), "{head}");
    let metrics = metrics(&proxy).await;
    let count = metrics.lines().find(|line| line.starts_with("envoy_http_downstream_rq_overload_close"));
    assert!(count.is_some_and(|line| line.ends_with(" 2")), "{metrics}");
    assert!(metrics.contains("response_flags=\"OM\""), "{metrics}");
}

#[tokio::test]
async fn streams_are_refused_and_the_connection_goes_on() {
    let proxy = proxy().await;
    let stream = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    let (mut requests, connection) = within(h2::client::handshake(stream)).await.unwrap();
    tokio::spawn(connection);
    within(async {
        // Once refused, the next ones are as well: the connection is good for them.
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
