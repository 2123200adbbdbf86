//! HTTP/1.1 through a proxy over real sockets: messages and connections.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{sync::Arc, time::Duration};

use skysail_policy::config::http::EscapedSlashes;
use skysail_policy::config::listener::Cidr;
use support::{Client, Proxy, cluster, echo, http, listener, proxy_to, server, within};
use tokio::{io::AsyncReadExt as _, sync::Notify};

#[tokio::test]
async fn requests_reuse_connections_on_both_sides() {
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
async fn chunks_and_trailers_pass_in_both_directions() {
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
async fn large_bodies_pass_in_both_directions_at_once() {
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
async fn expect_continue_is_forwarded() {
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
        if head.starts_with("GET /private ") {
            client.send("HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno").await;
            return;
        }
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
    // A refused upgrade gets a complete response, and nothing follows it.
    client.send(&upgrade("WebSocket").replace("GET /", "GET /private")).await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 401 ") && head.contains("connection: close\r\n"), "{head}");
    assert_eq!(body, "no");
    assert_eq!(client.rest().await, "");
    let mut client = proxy.connect().await;
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
async fn a_response_may_come_before_the_request_is_complete() {
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
async fn an_unrepeatable_request_is_not_sent_on_a_closed_connection() {
    let (closed, client_closed) = tokio::sync::oneshot::channel();
    let closed = std::sync::Mutex::new(Some(closed));
    let upstream = server(move |_, mut client| {
        let closed = closed.lock().unwrap().take();
        async move {
            client.message().await;
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            if let Some(closed) = closed {
                drop(client);
                closed.send(()).unwrap();
            }
        }
    });
    let proxy = proxy_to(upstream.await).await;
    let mut client = proxy.connect().await;
    client.send("GET /1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    client.message().await;
    within(client_closed).await.unwrap();
    // Its body has not arrived yet, so it cannot be buffered for a retry.
    client.send("POST /2 HTTP/1.1\r\nHost: a\r\ncontent-length: 3\r\n\r\na").await;
    within(async { while proxy.workers().clusters().await[0].connections_total < 2 {} }).await;
    client.send("bc").await;
    assert!(client.head().await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_stale_connection_fails_no_request() {
    let closed = Arc::new(Notify::new());
    let received = closed.clone();
    let upstream = server(move |number, mut client| {
        let received = received.clone();
        async move {
            client.message().await;
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            if number == 0 {
                // The server closes the connection while it is idle in the pool.
                let mut byte = [0];
                let read = client.stream.peek(&mut byte).await;
                drop(client);
                received.notify_one();
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
    // The server receives this request on its first connection and resets it.
    client.send("PUT /2 HTTP/1.1\r\nHost: a\r\ncontent-length: 3\r\n\r\nabc").await;
    within(closed.notified()).await;
    assert!(client.head().await.starts_with("HTTP/1.1 200 "));
    assert_eq!(proxy.workers().clusters().await[0].connections_total, 2);
    // A non-idempotent request is not sent twice.
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
async fn requests_that_allow_smuggling_are_refused() {
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
        // A parse error is also explained in the body.
        let (line, content) = (answer.lines().next().unwrap(), answer.rsplit("\r\n").next().unwrap());
        let words = if request == "GET / HTTP/1.1\r\n\r\n" { "" } else { &line["HTTP/1.1 400 ".len()..] };
        assert_eq!(content, words, "{request:?}");
    }
    let mut client = proxy.connect().await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n").await;
    assert!(client.rest().await.starts_with("HTTP/1.1 400 "));
}

#[tokio::test]
async fn http10_is_accepted_if_configured_and_with_a_host() {
    let (get, named) = ("GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.0\r\nHost: b\r\n\r\n");
    let grpc = "POST / HTTP/1.0\r\nHost: b\r\ncontent-type: application/grpc\r\n\r\n";
    for (taken, host, request, status, expected) in [
        (false, None, named, "426", "\r\n\r\nUpgrade Required"),
        (false, None, grpc, "426", "\r\n\r\nUpgrade Required"),
        (true, None, get, "400", "\r\n\r\n"),
        (true, Some("a"), get, "200", "\r\nhost: a\r\n"),
        (true, Some("a"), named, "200", "\r\nhost: b\r\n"),
    ] {
        let terminal = http(|manager, _| {
            manager.accept_http10 = taken;
            manager.default_host = host.map(Into::into);
        });
        let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None)]).await;
        let mut client = proxy.connect().await;
        client.send(request).await;
        let answer = client.rest().await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains(expected), "{answer}");
    }
}

#[tokio::test]
async fn an_internal_client_may_request_retries() {
    let upstream = server(|number, mut client| async move {
        client.head().await;
        let status = if number < 2 { "503 No" } else { "200 OK" };
        client.send(&format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")).await;
    });
    let upstream = upstream.await;
    let local = Cidr { address: "10.0.0.0".parse().unwrap(), prefix_len: 8 };
    let terminal = http(|manager, _| manager.internal = vec![local]);
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[upstream], None)]).await;
    for (from, status) in [("1.2.3.4", "503"), ("10.0.0.1", "200")] {
        let mut client = proxy.connect().await;
        let retry_headers = "x-envoy-retry-on: 5xx\r\nx-envoy-max-retries: 2";
        client
            .send(&format!("GET / HTTP/1.1\r\nHost: a\r\nx-forwarded-for: {from}\r\n{retry_headers}\r\n\r\n"))
            .await;
        assert!(client.head().await.starts_with(&format!("HTTP/1.1 {status} ")), "{from}");
    }
}

#[tokio::test]
async fn the_end_of_a_body_depends_on_method_and_version() {
    let upstream = server(|_, mut client| async move {
        let head = client.head().await;
        if head.starts_with("HEAD ") {
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\nconnection: close\r\n\r\n").await;
        } else {
            // The body ends with the connection.
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
    client.send("GET / HTTP/1.0\r\nHost: a\r\n\r\n").await;
    let answer = client.rest().await;
    assert!(
        answer.contains("\r\nconnection: close\r\n") && answer.ends_with("\r\n\r\nall there is"),
        "{answer}"
    );
}

#[tokio::test]
async fn a_truncated_response_is_not_taken_for_a_complete_one() {
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
async fn a_drain_closes_connections_after_their_requests() {
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
        // The connection closes after a delay and without a reset, because a request might have been in flight.
        assert_eq!(within(idle.stream.read(&mut [0])).await.unwrap(), 0);
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
async fn an_endless_head_times_out() {
    let terminal = http(|manager, _| manager.stream_idle_timeout = Some(Duration::from_millis(50)));
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None)]).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ").await;
    let answer = client.rest().await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.ends_with("\r\n\r\nstream timeout"), "{answer}");
}

#[tokio::test]
async fn interim_responses_are_forwarded_only_as_fast_as_they_are_read() {
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
async fn an_early_response_announces_the_end_of_the_connection() {
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
    // With the whole request received, that is unnecessary.
    let mut client = proxy.connect().await;
    client.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx").await;
    let (head, _) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 405 ") && !head.contains("connection: close"), "{head}");
}

#[tokio::test]
async fn escaped_slashes_are_redirected_to_the_unescaped_path() {
    let terminal = http(|manager, _| manager.escaped_slashes = EscapedSlashes::UnescapeAndRedirect);
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None)]).await;
    let mut client = proxy.connect().await;
    for (path, location) in [("/a%2Fb/%2e%2e/c?d=%2F", "/a/c?d=%2F"), ("/%2Fb", "/.//b")] {
        client.send(&format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n")).await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 307 Temporary Redirect\r\n"), "{head}");
        assert!(head.contains(&format!("\r\nlocation: {location}\r\n")), "{head}");
        assert_eq!(body, "");
    }
    // The connection continues, and paths without escaped slashes are served.
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(client.message().await.1.starts_with("0\nGET /a "));
    // gRPC clients follow no redirects.
    client.send("POST /a%2Fb HTTP/1.1\r\nHost: a\r\nContent-Type: application/grpc\r\n\r\n").await;
    assert!(client.head().await.contains("\r\ncontent-type: application/grpc\r\n"));
}

/// After one idle second a connection releases most of its memory.
#[tokio::test]
async fn a_connection_continues_after_a_pause_and_closes_at_the_idle_timeout() {
    let terminal = http(|manager, _| manager.idle_timeout = Some(Duration::from_millis(1_500)));
    let ending = Proxy::start(listener(terminal, None), vec![cluster(&[echo().await], None)]).await;
    let lasting = proxy_to(echo().await).await;
    let (mut ended, mut lasts) = (ending.connect().await, lasting.connect().await);
    for client in [&mut ended, &mut lasts] {
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
    }
    // Its end shows that the other connection has been idle long enough.
    assert_eq!(ended.rest().await, "");
    for _ in 0..2 {
        lasts.send("GET /b HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(lasts.message().await.0.starts_with("HTTP/1.1 200 "));
    }
}
