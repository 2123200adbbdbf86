//! HTTP/1.1 through a proxy, over real sockets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{sync::Arc, time::Duration};

use skysail_proxy::config::route::Mirror;
use support::{Client, Proxy, cluster, echo, http, listener, retries, server, within};
use tokio::{net::TcpListener, sync::Notify};

async fn proxy_to(upstream: std::net::SocketAddr) -> Proxy {
    Proxy::start(listener(http(|_, _| ()), None), vec![cluster(&[upstream], None)]).await
}

#[tokio::test]
async fn requests_share_connections_on_both_sides() {
    let proxy = proxy_to(echo().await).await;
    let mut client = proxy.connect().await;
    for path in ["/one", "/two?x=y"] {
        client
            .send(&format!(
                "GET {path} HTTP/1.1\r\nHost: a:1\r\nX-Custom: Value\r\nConnection: keep-alive\r\n\r\n"
            ))
            .await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("\r\nserver: skysail\r\n") && head.contains("\r\ndate: "), "{head}");
        assert!(head.contains("\r\nx-envoy-upstream-service-time: "), "{head}");
        // Connection 0 both times.
        assert!(
            body.starts_with(&format!("0\nGET {path} HTTP/1.1\r\nhost: a:1\r\nx-custom: Value\r\n")),
            "{body}"
        );
        assert!(
            body.contains("\r\nx-request-id: ") && body.contains("\r\nx-envoy-attempt-count: 1\r\n"),
            "{body}"
        );
        assert!(!body.contains("keep-alive"), "{body}");
    }
    let stats = proxy.workers().clusters().await;
    assert_eq!((stats[0].connections_total, stats[0].requests_total, stats[0].requests), (1, 2, 0));
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let proxy = proxy_to(echo().await).await;
    let mut client = proxy.connect().await;
    let requests: String = (0..20)
        .map(|i| format!("POST /{i} HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nbody{}", i % 10))
        .collect();
    client.send(&requests).await;
    for i in 0..20 {
        let (_, body) = client.message().await;
        assert!(
            body.starts_with(&format!("0\nPOST /{i} ")) && body.ends_with(&format!("body{}", i % 10)),
            "{body}"
        );
    }
}

#[tokio::test]
async fn chunks_and_trailers_pass_both_ways() {
    let upstream = server(|_, mut client| async move {
        let head = client.head().await;
        assert!(
            head.contains("transfer-encoding: chunked\r\n") && !head.contains("content-length"),
            "{head}"
        );
        let body = client.until("\r\n\r\n").await;
        assert!(body.ends_with("0\r\nx-sum: 5\r\n\r\n") && !body.contains("ext"), "{body}");
        client.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n").await;
        client.send("2;e\r\nde\r\n0\r\nX-Total: 5\r\n\r\n").await;
        client.rest().await;
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;ext=1\r\nab\r\n").await;
    client.send("3\r\ncde\r\n0\r\nX-Sum: 5\r\n\r\n").await;
    assert!(client.head().await.contains("\r\ntransfer-encoding: chunked\r\n"));
    let body = client.until("0\r\nx-total: 5\r\n\r\n").await;
    let content: String =
        body.split("\r\n").filter(|line| line.chars().all(|c| c.is_ascii_lowercase())).collect();
    assert_eq!(content, "abcde");
}

#[tokio::test]
async fn large_bodies_pass_both_ways_at_once() {
    let upstream = server(|_, mut client| async move {
        let (_, body) = client.message().await;
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        client.send(&(head + &body)).await;
        client.rest().await;
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    let body: String = (0..500_000).map(|i| format!("{i:06}")).collect();
    client.send(&format!("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len())).await;
    let (_, answer) = client.message().await;
    assert!(answer == body, "the body changed on the way");
}

#[tokio::test]
async fn expectations_go_to_the_upstream() {
    let upstream = server(|_, mut client| async move {
        let head = client.head().await;
        assert!(head.contains("expect: 100-continue\r\n"), "{head}");
        client.send("HTTP/1.1 100 Continue\r\n\r\n").await;
        assert_eq!(client.exactly(5).await, "hello");
        client.send("HTTP/1.1 204 No Content\r\n\r\n").await;
        client.rest().await;
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n").await;
    assert!(client.head().await.starts_with("HTTP/1.1 100 Continue\r\n"));
    client.send("hello").await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 204 No Content\r\n") && !head.contains("content-length"), "{head}");
}

#[tokio::test]
async fn upgrades_become_tunnels() {
    let upstream = server(|_, mut client| async move {
        let head = client.head().await;
        assert!(
            head.contains("upgrade: WebSocket\r\n") && head.contains("connection: upgrade\r\n"),
            "{head}"
        );
        client
            .send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nhi")
            .await;
        assert_eq!(client.exactly(4).await, "ping");
        client.send("pong").await;
        assert_eq!(client.rest().await, "");
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    let upgrade =
        |name: &str| format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: {name}\r\n\r\n");
    client.send(&upgrade("WebSocket")).await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 101 ") && head.contains("\r\nupgrade: websocket\r\n"), "{head}");
    assert_eq!(client.exactly(2).await, "hi");
    client.send("ping").await;
    assert_eq!(client.exactly(4).await, "pong");
    drop(client);
    let mut client = proxy.connect().await;
    client.send(&upgrade("other")).await;
    assert!(client.head().await.starts_with("HTTP/1.1 403 "));
}

#[tokio::test]
async fn an_answer_may_come_before_the_request_is_complete() {
    let upstream = server(|_, mut client| async move {
        client.head().await;
        client.send("HTTP/1.1 413 Payload Too Large\r\ncontent-length: 2\r\n\r\nno").await;
        client.rest().await;
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nbegin").await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 413 "), "{head}");
    assert_eq!(body, "no");
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn a_connection_that_went_stale_costs_nothing() {
    let closed = Arc::new(Notify::new());
    let told = closed.clone();
    let upstream = server(move |number, mut client| {
        let told = told.clone();
        async move {
            client.message().await;
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            if number == 0 {
                // Ends while the proxy keeps it for the next request.
                let mut byte = [0];
                let read = client.stream.peek(&mut byte).await;
                drop(client);
                told.notify_one();
                assert!(matches!(read, Ok(1)));
            } else {
                client.rest().await;
            }
        }
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("GET /1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    client.message().await;
    // The server sees this request arrive on its first connection and resets it.
    client.send("PUT /2 HTTP/1.1\r\nHost: a\r\ncontent-length: 3\r\n\r\nabc").await;
    within(closed.notified()).await;
    assert!(client.head().await.starts_with("HTTP/1.1 200 "));
    assert_eq!(proxy.workers().clusters().await[0].connections_total, 2);
    // What must not be done twice is not sent twice.
    let upstream = server(|number, mut client| async move {
        client.message().await;
        client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        client.message().await;
        assert_eq!(number, 0);
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("GET /1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    client.message().await;
    client.send("POST /2 HTTP/1.1\r\nHost: a\r\ncontent-length: 3\r\n\r\nabc").await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
    assert!(body.contains("reset reason: connection termination"), "{body}");
}

#[tokio::test]
async fn timeouts_are_answered() {
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
async fn failures_are_tried_elsewhere() {
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
    assert!(body.contains("remote connection failure") && body.contains("Connection refused"), "{body}");
}

#[tokio::test]
async fn what_could_be_smuggled_is_refused() {
    let proxy = proxy_to(echo().await).await;
    let cases = [
        (
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/3.0\r\nHost: a\r\n\r\n", 505),
        ("\x16\x03\x01\x02 garbage\r\n\r\n", 400),
    ];
    for (request, status) in cases {
        let mut client = proxy.connect().await;
        client.send(request).await;
        let answer = client.rest().await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:?}: {answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
    let mut client = proxy.connect().await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n").await;
    assert!(client.rest().await.starts_with("HTTP/1.1 400 "));
}

#[tokio::test]
async fn bodies_end_as_the_method_and_version_say() {
    let upstream = server(|_, mut client| async move {
        let head = client.head().await;
        if head.starts_with("HEAD ") {
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\nconnection: close\r\n\r\n").await;
        } else {
            // Ends with the connection.
            client.send("HTTP/1.1 200 OK\r\n\r\nall there is").await;
        }
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("HEAD / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(client.head().await.contains("content-length: 1000\r\n"));
    assert!(client.head().await.contains("transfer-encoding: chunked\r\n"));
    assert!(client.until("0\r\n\r\n").await.contains("all there is"));
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.0\r\n\r\n").await;
    let answer = client.rest().await;
    assert!(
        answer.contains("\r\nconnection: close\r\n") && answer.ends_with("\r\n\r\nall there is"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_cut_answer_is_not_taken_for_a_whole_one() {
    let upstream = server(|_, mut client| async move {
        client.head().await;
        client.send("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf").await;
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let answer = client.rest().await;
    assert!(answer.contains("content-length: 10\r\n") && answer.ends_with("half"), "{answer}");
}

#[tokio::test]
async fn a_drain_ends_connections_after_their_requests() {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell, wait) = (arrived.clone(), go.clone());
    let upstream = server(move |_, mut client: Client| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            client.message().await;
            tell.notify_one();
            wait.notified().await;
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            client.rest().await;
        }
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut idle = proxy.connect().await;
    let mut busy = proxy.connect().await;
    busy.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    within(arrived.notified()).await;
    let drain = proxy.workers().drain(Duration::from_secs(20));
    let story = async {
        assert_eq!(idle.rest().await, "");
        assert!(tokio::net::TcpStream::connect(proxy.address).await.is_err());
        go.notify_one();
        let (head, body) = busy.message().await;
        assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("\r\nconnection: close\r\n"), "{head}");
        assert_eq!(body, "ok");
        assert_eq!(busy.rest().await, "");
    };
    let (cut_off, ()) = within(Box::pin(async { tokio::join!(drain, story) })).await;
    assert_eq!(cut_off, 0);
}

#[tokio::test]
async fn copies_of_requests_go_elsewhere() {
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
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
    let (head, body) = within(told.recv()).await.unwrap();
    assert!(head.starts_with("POST /x HTTP/1.1\r\nhost: a-shadow:80\r\n"), "{head}");
    assert_eq!(body, "body");
    assert!(told.try_recv().is_err());
}

#[tokio::test]
async fn limits_of_a_cluster_hold() {
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
    // Of the next two one waits, and the other is turned away.
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
async fn limits_hold_in_a_burst() {
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
    // While the first still waits for its connection, the others are many already.
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
async fn who_waits_is_told_of_the_endpoint_it_waits_for() {
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
    // Two requests under way, one at each endpoint; behind each, by turns, two that wait.
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
    // Endpoint b never answers, which must not hold up those who wait for a.
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
async fn a_head_that_never_ends_is_not_waited_for() {
    let terminal = http(|manager, _| manager.stream_idle_timeout = Some(Duration::from_millis(50)));
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None)]).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ").await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn interim_answers_come_only_as_fast_as_they_are_read() {
    let upstream = server(|_, mut client| async move {
        client.message().await;
        let interim = "HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n".repeat(1_000);
        for _ in 0..50 {
            client.send(&interim).await;
        }
        client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
        client.rest().await;
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let mut interim = 0;
    loop {
        let head = client.head().await;
        if head.starts_with("HTTP/1.1 200 ") {
            break;
        }
        assert!(head.starts_with("HTTP/1.1 103 "), "{head}");
        interim += 1;
    }
    assert_eq!(interim, 50_000);
    assert_eq!(client.exactly(2).await, "ok");
}

#[tokio::test]
async fn a_retry_counts_until_it_is_answered() {
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
    // Now there is place for another.
    second.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    within(arrived.notified()).await;
    go.notify_one();
    assert!(second.head().await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn who_is_answered_early_is_told_that_the_connection_ends() {
    let upstream = server(|_, mut client| async move {
        client.head().await;
        client.send("HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 0\r\n\r\n").await;
        client.rest().await;
    })
    .await;
    let proxy = proxy_to(upstream).await;
    let mut client = proxy.connect().await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n").await;
    let (head, _) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 405 ") && head.contains("\r\nconnection: close\r\n"), "{head}");
    assert_eq!(client.rest().await, "");
    // With all of the request here, there is no need.
    let mut client = proxy.connect().await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx").await;
    let (head, _) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 405 ") && !head.contains("connection: close"), "{head}");
}
