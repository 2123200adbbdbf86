//! A panic in the sidecar ends only the connection that caused it.
//!
//! The panic comes from a configuration that no file can contain. A fault with a delay beyond the maximum time
//! panics in the middle of a request.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{process::Command, sync::Arc, time::Duration};

use bytes::Bytes;
use http::Request;
use skysail_core::logging;
use skysail_policy::config::{
    http::{Filter, FilterKind},
    route::Fault,
    text::{HeaderMatch, HeaderTest},
};
use skysail_proxy::telemetry;
use support::{Proxy, cluster, echo, http, listener, within};
use tokio::net::TcpStream;

/// Starts one worker on which requests with the header `x-panic` panic.
async fn proxy() -> Proxy {
    let upstream = cluster(&[echo().await], None);
    let header = HeaderMatch {
        name: "x-panic".into(),
        test: HeaderTest::Present(true),
        invert: false,
        missing_as_empty: false,
    };
    let fault = Fault { delay: Some((1_000_000, Duration::MAX)), abort: None, headers: vec![header] };
    let filter = Filter { name: "fault".into(), disabled: false, kind: FilterKind::Fault(Arc::new(fault)) };
    let terminal = http(|manager, _| manager.filters.push(filter));
    Proxy::start(listener(terminal, None), vec![upstream]).await
}

#[tokio::test]
async fn a_panic_in_an_http1_request_ends_only_its_connection() {
    let proxy = proxy().await;
    let mut other = proxy.connect().await;
    let good = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    other.send(good).await;
    assert!(other.message().await.0.starts_with("HTTP/1.1 200"));
    for _ in 0..3 {
        let mut unlucky = proxy.connect().await;
        unlucky.send("GET / HTTP/1.1\r\nhost: a\r\nx-panic: 1\r\n\r\n").await;
        assert_eq!(unlucky.rest().await, "");
        other.send(good).await;
        assert!(other.message().await.0.starts_with("HTTP/1.1 200"));
    }
    let mut new = proxy.connect().await;
    new.send(good).await;
    assert!(new.message().await.0.starts_with("HTTP/1.1 200"));
    drop((other, new));
    // The panicked connection no longer counts, so the drain does not wait for it.
    assert_eq!(within(proxy.workers().drain(Duration::from_hours(1))).await, 0);
}

#[tokio::test]
async fn a_panic_in_an_http2_request_ends_only_its_stream() {
    let proxy = proxy().await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (mut requests, connection) = within(h2::client::handshake(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = || Request::builder().uri("http://a/");
    // A neighbour whose body has not arrived yet.
    let (before, mut body) = requests
        .send_request(request().method("POST").header("content-length", "4").body(()).unwrap(), false)
        .unwrap();
    let unlucky = request().header("x-panic", "1").body(()).unwrap();
    let (unlucky, _) = requests.send_request(unlucky, true).unwrap();
    assert!(within(unlucky).await.unwrap_err().is_reset());
    let (after, _) = requests.send_request(request().body(()).unwrap(), true).unwrap();
    assert_eq!(within(after).await.unwrap().status(), 200);
    body.send_data(Bytes::from_static(b"body"), true).unwrap();
    assert_eq!(within(before).await.unwrap().status(), 200);
    connection.abort();
    let _ = connection.await;
    assert_eq!(within(proxy.workers().drain(Duration::from_hours(1))).await, 0);
}

/// Marks the child process that panics, because the log is per process.
const INNER: &str = "SKYSAIL_TEST_PANICS";

#[tokio::test]
async fn each_panic_is_counted_and_logged() {
    if std::env::var_os(INNER).is_none() {
        let mut inner = Command::new(std::env::current_exe().unwrap());
        inner.args(["--exact", "each_panic_is_counted_and_logged", "--nocapture"]).env(INNER, "1");
        let output = inner.env("NO_COLOR", "1").env_remove("SKYSAIL_LOG").output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{log}");
        let mut received = log
            .lines()
            .filter(|line| line.contains("a panic, which is a bug in this program; please report it"));
        let first = received.next().expect("nothing is logged");
        assert!(first.contains("ERROR") && first.contains("place="), "{first}");
        assert_eq!(received.count(), 1, "{log}");
        return;
    }
    let _flush = logging::init(logging::Format::Text);
    let proxy = proxy().await;
    for count in 1..=2 {
        let mut unlucky = proxy.connect().await;
        unlucky.send("GET / HTTP/1.1\r\nhost: a\r\nx-panic: 1\r\n\r\n").await;
        assert_eq!(unlucky.rest().await, "");
        let page = telemetry::collect(proxy.workers().scrape().await, &proxy.local, None);
        assert!(page.contains(&format!("skysail_panics_total{{}} {count}\n")), "{page}");
    }
}
