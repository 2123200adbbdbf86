//! Forwarding of requests: timeouts, retries, mirroring, host rewrites, and circuit breakers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{sync::Arc, time::Duration};

use skysail_policy::config::route::{HostRewrite, Mirror};
use support::{Client, Proxy, cluster, echo, http, listener, proxy_to, retries, server, within};
use tokio::{net::TcpListener, sync::Notify};

#[tokio::test]
async fn a_timeout_is_answered_with_504() {
    let upstream = server(|_, mut client| async move {
        client.message().await;
        client.rest().await;
    })
    .await;
    let terminal = http(|_, forward| forward.timeout = Some(Duration::from_millis(50)));
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[upstream], None)]).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 504 Gateway Timeout\r\n"), "{head}");
    assert_eq!(body, "upstream request timeout");
}

#[tokio::test]
async fn failed_requests_are_retried_at_another_endpoint() {
    let bad = server(|_, mut client| async move {
        client.message().await;
        client.send("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 3\r\n\r\nbad").await;
        client.rest().await;
    })
    .await;
    let refusing = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let terminal = http(|_, forward| forward.retry = Some(retries(3)));
    let endpoints = [bad, refusing, echo().await];
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&endpoints, None)]).await;
    for _ in 0..6 {
        let mut client = proxy.connect().await;
        client.send("POST / HTTP/1.1\r\nHost: a\r\ncontent-length: 4\r\n\r\nbody").await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 200 ") && body.ends_with("\r\n\r\nbody"), "{head}{body}");
    }
    let proxy = proxy_to(refusing).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{head}");
    // The cause is only in the access log.
    assert!(body.ends_with("reset reason: remote connection failure"), "{body}");
}

#[tokio::test]
async fn requests_are_mirrored() {
    let (tell, mut received) = tokio::sync::mpsc::unbounded_channel();
    let other = server(move |_, mut client| {
        let tell = tell.clone();
        async move {
            let _ = tell.send(client.message().await);
            client.send("HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n").await;
        }
    })
    .await;
    let mirror = |fraction| Mirror { cluster: "mirror".into(), fraction, keep_host: false };
    let terminal = http(|_, forward| forward.mirrors = vec![mirror(1_000_000), mirror(0)]);
    let mut copies = cluster(&[other], None);
    copies.name = "mirror".into();
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None), copies]).await;
    let mut client = proxy.connect().await;
    client.send("POST /x HTTP/1.1\r\nHost: a:80\r\nContent-Length: 4\r\n\r\nbody").await;
    assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
    let (head, body) = within(received.recv()).await.unwrap();
    assert!(head.starts_with("POST /x HTTP/1.1\r\nhost: a-shadow:80\r\n"), "{head}");
    assert_eq!(body, "body");
    assert!(received.try_recv().is_err());
}

#[tokio::test]
async fn mirrored_requests_count_against_the_limits_of_their_cluster() {
    let (tell, mut received) = tokio::sync::mpsc::unbounded_channel();
    let go = Arc::new(Notify::new());
    let wait = go.clone();
    let other = server(move |_, mut client| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            let _ = tell.send(client.message().await.0);
            wait.notified().await;
        }
    })
    .await;
    let mirror = Mirror { cluster: "mirror".into(), fraction: 1_000_000, keep_host: false };
    let terminal = http(|_, forward| forward.mirrors = vec![mirror]);
    let mut copies = cluster(&[other], None);
    copies.name = "mirror".into();
    copies.limits.requests = 1;
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None), copies]).await;
    let mut client = proxy.connect().await;
    let mut copied = async |path: &str| {
        client.send(&format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
        assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
        let clusters = proxy.workers().clusters().await;
        let copies = clusters.iter().find(|stats| &*stats.cluster == "mirror").unwrap();
        (copies.requests, copies.requests_total)
    };
    assert_eq!(copied("/1").await, (1, 1));
    assert!(within(received.recv()).await.unwrap().starts_with("GET /1 "));
    // The first mirrored request is still in flight.
    assert_eq!(copied("/2").await, (1, 1));
    go.notify_one();
    // After its end there is room for another.
    let mut number = 3;
    while copied(&format!("/{number}")).await.1 == 1 {
        number += 1;
    }
    let expected = format!("GET /{number} ");
    assert!(within(received.recv()).await.unwrap().starts_with(&expected));
}

#[tokio::test]
async fn an_invalid_header_value_becomes_no_host() {
    let terminal = http(|_, forward| forward.host = Some(HostRewrite::Header("x-host".into())));
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None)]).await;
    let mut client = proxy.connect().await;
    for (value, host) in [
        ("b.example:80", "b.example:80"),
        ("", "a"),
        ("b c", "a"),
        ("b\tc", "a"),
        ("b/../c", "a"),
        ("user@b", "a"),
        ("b\u{e9}", "a"),
    ] {
        client.send(&format!("GET / HTTP/1.1\r\nHost: a\r\nX-Host: {value}\r\n\r\n")).await;
        let (_, received) = client.message().await;
        assert!(received.contains(&format!("\r\nhost: {host}\r\n")), "{value:?}: {received}");
        assert_eq!(received.contains("x-envoy-original-host: a\r\n"), host != "a", "{value:?}: {received}");
    }
}

#[tokio::test]
async fn circuit_breakers_are_enforced() {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell, wait) = (arrived.clone(), go.clone());
    let upstream = server(move |_, mut client: Client| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            loop {
                client.message().await;
                tell.notify_one();
                wait.notified().await;
                client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            }
        }
    })
    .await;
    let mut limited = cluster(&[upstream], None);
    limited.limits.connections = 1;
    limited.limits.pending = 1;
    let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![limited]).await;
    let mut first = proxy.connect().await;
    first.send("GET /1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    within(arrived.notified()).await;
    // Of the next two requests one waits, and the other is refused.
    let (mut second, mut third) = (proxy.connect().await, proxy.connect().await);
    second.send("GET /2 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    third.send("GET /3 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let mut waiting = tokio::select! {
        head = second.head() => { assert!(head.starts_with("HTTP/1.1 503 "), "{head}"); third }
        head = third.head() => { assert!(head.starts_with("HTTP/1.1 503 "), "{head}"); second }
    };
    go.notify_one();
    assert_eq!(first.message().await.1, "ok");
    within(arrived.notified()).await;
    go.notify_one();
    assert_eq!(waiting.message().await.1, "ok");
    assert_eq!(proxy.workers().clusters().await[0].connections_total, 1);
}

#[tokio::test]
async fn circuit_breakers_are_enforced_in_a_burst() {
    let go = Arc::new(Notify::new());
    let wait = go.clone();
    let upstream = server(move |_, mut client: Client| {
        let wait = wait.clone();
        async move {
            client.message().await;
            wait.notified().await;
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            client.rest().await;
        }
    })
    .await;
    let mut limited = cluster(&[upstream], None);
    limited.limits.connections = 1;
    limited.limits.pending = 0;
    let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![limited]).await;
    let mut clients = Vec::new();
    for _ in 0..10 {
        clients.push(proxy.connect().await);
    }
    for client in &mut clients {
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    }
    // While the first request waits for its connection, many others arrive.
    let mut answers: tokio::task::JoinSet<_> =
        clients.into_iter().map(|mut client| async move { client.message().await.0 }).collect();
    for _ in 0..9 {
        let head = within(answers.join_next()).await.unwrap().unwrap();
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    }
    go.notify_one();
    assert!(within(answers.join_next()).await.unwrap().unwrap().starts_with("HTTP/1.1 200 "));
    assert_eq!(proxy.workers().clusters().await[0].connections_total, 1);
}

#[tokio::test]
async fn a_waiting_request_is_notified_only_by_its_endpoint() {
    let (tell, mut arrived) = tokio::sync::mpsc::unbounded_channel();
    let serve = move |name: &'static str, answers: bool| {
        let tell = tell.clone();
        move |_, mut client: Client| {
            let tell = tell.clone();
            async move {
                loop {
                    let mut first = [0];
                    if !matches!(client.stream.peek(&mut first).await, Ok(1)) {
                        return;
                    }
                    client.message().await;
                    let (answer, go) = tokio::sync::oneshot::channel::<()>();
                    let _ = tell.send((name, answer));
                    if !answers || go.await.is_err() {
                        std::future::pending::<()>().await;
                    }
                    client.send("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na").await;
                }
            }
        }
    };
    let endpoints = [server(serve("a", true)).await, server(serve("b", false)).await];
    let mut limited = cluster(&endpoints, None);
    limited.limits.connections = 1;
    let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![limited]).await;
    let mut clients = Vec::new();
    let mut go = Vec::new();
    // Two requests are in flight, one at each endpoint; two more wait for each endpoint, in turn.
    for _ in 0..2 {
        let mut client = proxy.connect().await;
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        go.push(within(arrived.recv()).await.unwrap());
        clients.push(client);
    }
    for _ in 0..4 {
        let mut client = proxy.connect().await;
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        clients.push(client);
    }
    // Endpoint b never answers, which must not delay the requests that wait for a.
    let mut next = go.into_iter().find(|(name, _)| *name == "a").unwrap().1;
    for _ in 0..2 {
        next.send(()).unwrap();
        next = within(arrived.recv()).await.unwrap().1;
    }
    next.send(()).unwrap();
    let mut answers: tokio::task::JoinSet<_> =
        clients.into_iter().map(|mut client| async move { client.message().await.1 }).collect();
    for _ in 0..3 {
        assert_eq!(within(answers.join_next()).await.unwrap().unwrap(), "a");
    }
}

#[tokio::test]
async fn a_retry_counts_until_its_response() {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell, wait) = (arrived.clone(), go.clone());
    let upstream = server(move |_, mut client: Client| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            let (head, _) = client.message().await;
            if head.contains("x-envoy-attempt-count: 1\r\n") {
                client.send("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n").await;
            } else {
                tell.notify_one();
                wait.notified().await;
                client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
            }
        }
    })
    .await;
    let mut limited = cluster(&[upstream], None);
    limited.limits.retries = 1;
    let terminal = http(|_, forward| forward.retry = Some(retries(1)));
    let proxy = Proxy::start(listener(terminal, None), vec![limited]).await;
    let (mut first, mut second) = (proxy.connect().await, proxy.connect().await);
    first.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    within(arrived.notified()).await;
    second.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(second.head().await.starts_with("HTTP/1.1 503 "));
    go.notify_one();
    assert!(first.head().await.starts_with("HTTP/1.1 200 "));
    // Now there is room for another.
    second.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    within(arrived.notified()).await;
    go.notify_one();
    assert!(second.head().await.starts_with("HTTP/1.1 200 "));
}
