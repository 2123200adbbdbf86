//! HTTP/2 through a proxy, in every combination with HTTP/1.1, over real sockets.

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
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use h2::{Reason, RecvStream, client::SendRequest, server::SendResponse};
use http::{Request, Response};
use http2::{content, frame, http2_server, limited_server, request, send};
use skysail_http::http2::Http2Options;
use skysail_policy::config::{
    Cluster,
    cluster::UpstreamProtocol,
    route::{RetryOn, RetryPolicy},
};
use support::{Proxy, cluster, echo, http, listener, retries, server, within};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::Notify,
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

async fn text(mut body: RecvStream) -> String {
    String::from_utf8(content(&mut body).await.0).unwrap()
}

/// Answers with the connection's number, the request's head and its body, and echoes its trailers.
async fn repeat(number: usize, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) {
    let (parts, mut body) = request.into_parts();
    let (content, trailers) = content(&mut body).await;
    let mut body = format!("{number} {} {}\n", parts.method, parts.uri);
    for (name, value) in &parts.headers {
        body += &format!("{name}: {}\n", value.to_str().unwrap());
    }
    body += std::str::from_utf8(&content).unwrap();
    let answer = Response::builder().header("x-server", "h2").body(()).unwrap();
    let mut stream = respond.send_response(answer, false).unwrap();
    stream.send_data(body.into(), trailers.is_none()).unwrap();
    if let Some(trailers) = trailers {
        stream.send_trailers(trailers).unwrap();
    }
}

#[tokio::test]
async fn an_http2_client_reaches_an_http1_server() {
    let proxy = proxy(cluster(&[echo().await], None)).await;
    let requests = connect(&proxy).await;
    let mut get = request("GET", "/one?x=y");
    get.headers_mut().append("cookie", "a=1".parse().unwrap());
    get.headers_mut().append("cookie", "b=2".parse().unwrap());
    let (answer, _) = requests.clone().send_request(get, true).unwrap();
    let answer = within(answer).await.unwrap();
    assert_eq!((answer.status().as_u16(), &answer.headers()["server"]), (200, &"skysail".parse().unwrap()));
    assert!(answer.headers().contains_key("content-length"), "{answer:?}");
    let body = text(answer.into_body()).await;
    assert!(body.starts_with("0\nGET /one?x=y HTTP/1.1\r\nhost: a:1\r\n"), "{body}");
    assert!(body.contains("\r\ncookie: a=1; b=2\r\n") && body.contains("\r\nx-request-id: "), "{body}");

    let mut post = request("POST", "/two");
    post.headers_mut().append("content-length", "5".parse().unwrap());
    let (answer, mut body) = requests.clone().send_request(post, false).unwrap();
    body.send_data("hello".into(), true).unwrap();
    let body = text(within(answer).await.unwrap().into_body()).await;
    assert!(body.contains("\r\ncontent-length: 5\r\n\r\nhello"), "{body}");
}

#[tokio::test]
async fn content_of_unknown_length_and_trailers_become_chunks_and_back() {
    let upstream = server(|_, mut client| async move {
        let head = client.head().await;
        assert!(
            head.contains("\r\ntransfer-encoding: chunked\r\n") && head.contains("\r\nte: trailers\r\n"),
            "{head}"
        );
        let body = client.until("\r\n\r\n").await;
        assert!(body.contains("hello") && body.ends_with("0\r\nx-sum: 5\r\n\r\n"), "{body}");
        client.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n").await;
        client.send("2\r\nde\r\n0\r\nGrpc-Status: 0\r\n\r\n").await;
        client.rest().await;
    })
    .await;
    let proxy = proxy(cluster(&[upstream], None)).await;
    let mut post = request("POST", "/");
    post.headers_mut().append("te", "trailers".parse().unwrap());
    let (answer, mut body) = connect(&proxy).await.send_request(post, false).unwrap();
    body.send_data("hello".into(), false).unwrap();
    body.send_trailers([("x-sum".parse().unwrap(), "5".parse().unwrap())].into_iter().collect()).unwrap();
    let mut answer = within(answer).await.unwrap();
    assert!(!answer.headers().contains_key("transfer-encoding"), "{answer:?}");
    let (body, trailers) = content(answer.body_mut()).await;
    assert_eq!((&body[..], &trailers.unwrap()["grpc-status"]), (&b"abcde"[..], &"0".parse().unwrap()));
}

#[tokio::test]
async fn an_http1_client_reaches_an_http2_server() {
    let proxy = proxy(cluster_of(http2_server(repeat).await)).await;
    let mut client = proxy.connect().await;
    client.send("POST /one HTTP/1.1\r\nHost: a:1\r\nContent-Length: 5\r\nConnection: x-gone\r\nX-Gone: 1\r\n\r\nhello").await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("\r\nx-server: h2\r\n"), "{head}");
    assert!(head.contains("\r\ntransfer-encoding: chunked\r\n"), "{head}");
    let body = client.until("0\r\n\r\n").await;
    assert!(body.contains("0 POST http://a:1/one\ncontent-length: 5\n") && body.contains("hello"), "{body}");
    assert!(!body.contains("x-gone"), "{body}");
    client.send("POST /two HTTP/1.1\r\nHost: a:1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\nx-sum: 5\r\n\r\n").await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    let body = client.until("x-sum: 5\r\n\r\n").await;
    assert!(body.contains("0 POST http://a:1/two\n") && body.contains("hello"), "{body}");
}

#[tokio::test]
async fn requests_share_one_upstream_connection() {
    let upstream = http2_server(repeat).await;
    let proxy = proxy(cluster_of(upstream)).await;
    let requests = connect(&proxy).await;
    let all: Vec<_> = (0..50)
        .map(|i| requests.clone().send_request(request("GET", &format!("/{i}")), true).unwrap().0)
        .collect();
    for (i, answer) in all.into_iter().enumerate() {
        let body = text(within(answer).await.unwrap().into_body()).await;
        assert!(body.starts_with(&format!("0 GET http://a:1/{i}\n")), "{body}");
    }
    let stats = proxy.workers().clusters().await;
    assert_eq!((stats[0].connections_total, stats[0].requests_total, stats[0].requests), (1, 50, 0));
}

#[tokio::test]
async fn a_server_with_few_streams_gets_more_connections() {
    let arrived = Arc::new(tokio::sync::Barrier::new(4));
    let upstream = limited_server(1, move |number, request, respond| {
        let arrived = arrived.clone();
        async move {
            arrived.wait().await;
            repeat(number, request, respond).await;
        }
    })
    .await;
    let proxy = proxy(cluster_of(upstream)).await;
    let requests = connect(&proxy).await;
    // The first response tells the proxy the maximum of concurrent streams.
    let all: Vec<_> =
        (0..4).map(|_| requests.clone().send_request(request("GET", "/"), true).unwrap().0).collect();
    for answer in all {
        assert_eq!(within(answer).await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn no_more_streams_are_opened_than_configured() {
    let arrived = Arc::new(tokio::sync::Barrier::new(4));
    let upstream = http2_server(move |number, request, respond| {
        let arrived = arrived.clone();
        async move {
            arrived.wait().await;
            repeat(number, request, respond).await;
        }
    })
    .await;
    let limited = Cluster { http2: Http2Options::new(1), ..cluster_of(upstream) };
    let proxy = proxy(limited).await;
    let requests = connect(&proxy).await;
    let all: Vec<_> =
        (0..4).map(|_| requests.clone().send_request(request("GET", "/"), true).unwrap().0).collect();
    for answer in all {
        assert_eq!(within(answer).await.unwrap().status(), 200);
    }
    assert_eq!(proxy.workers().clusters().await[0].connections_total, 4);
}

#[tokio::test]
async fn large_bodies_flow_in_both_directions_only_as_fast_as_they_are_read() {
    let received = Arc::new(Notify::new());
    let read = received.clone();
    let upstream = http2_server(move |_, request, mut respond| {
        let read = read.clone();
        async move {
            let mut body = request.into_body();
            let mut stream = respond.send_response(Response::new(()), false).unwrap();
            // The server reads nothing until the client notifies it.
            read.notified().await;
            while let Some(piece) = body.data().await {
                let piece = piece.unwrap();
                body.flow_control().release_capacity(piece.len()).unwrap();
                send(&mut stream, piece).await;
            }
            stream.send_data(Bytes::new(), true).unwrap();
        }
    })
    .await;
    let proxy = proxy(cluster_of(upstream)).await;
    let (answer, mut body) = connect(&proxy).await.send_request(request("POST", "/"), false).unwrap();
    let mut answer = within(answer).await.unwrap();
    let block = Bytes::from(vec![7; 64 * 1024]);
    let mut sent = 0;
    // Without a reader, the client's sending stops: buffers on the way are bounded.
    loop {
        body.reserve_capacity(block.len());
        let room = std::future::poll_fn(|cx| body.poll_capacity(cx));
        let Ok(room) = tokio::time::timeout(Duration::from_millis(300), room).await else { break };
        let piece = block.slice(..room.unwrap().unwrap().min(block.len()));
        sent += piece.len();
        assert!(sent < 4 << 20, "the proxy takes in whatever comes");
        body.send_data(piece, false).unwrap();
    }
    received.notify_one();
    let total = 8 << 20;
    let sending = tokio::spawn(async move {
        while sent < total {
            let piece = block.slice(..block.len().min(total - sent));
            sent += piece.len();
            send(&mut body, piece).await;
        }
        body.send_data(Bytes::new(), true).unwrap();
    });
    let (got, _) = content(answer.body_mut()).await;
    within(sending).await.unwrap();
    assert_eq!(got.len(), total);
}

#[tokio::test]
async fn interim_responses_are_forwarded_only_as_fast_as_they_are_read() {
    const MAX: usize = 128 << 20;
    let (sent, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, stopped) = (sent.clone(), stop.clone());
    // All are different, so that HPACK compresses nothing.
    let interim =
        |number| format!("HTTP/1.1 103 Early Hints\r\nlink: <{number:09}{}>\r\n\r\n", "~".repeat(3_000));
    let length = interim(0).len();
    let upstream = server(move |_, mut client| {
        let (count, stopped) = (count.clone(), stopped.clone());
        async move {
            client.message().await;
            while count.load(Relaxed) < MAX && !stopped.load(Relaxed) {
                client.send(&interim(count.load(Relaxed))).await;
                count.fetch_add(length, Relaxed);
            }
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            client.rest().await;
        }
    })
    .await;
    let proxy = proxy(cluster(&[upstream], None)).await;
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let get = b"\0\0\x06\x01\x05\0\0\0\x01\x82\x86\x84\x41\x01a";
    client.write_all(&[&preface[..], get].concat()).await.unwrap();
    // Without a reader they stop: buffers on the way are bounded.
    let mut seen = 0;
    while seen == 0 || sent.load(Relaxed) > seen {
        seen = sent.load(Relaxed);
        assert!(seen < MAX, "the proxy takes in whatever comes");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    stop.store(true, Relaxed);
    let mut heads = 0;
    loop {
        match frame(&mut client).await {
            (1, _, 1, _) => heads += 1,
            (0, _, 1, content) => break assert_eq!(content, b"ok"),
            (kind, ..) => assert!(matches!(kind, 4 | 6 | 8), "{kind}"),
        }
    }
    assert_eq!(heads, sent.load(Relaxed) / length + 1, "all of them have come");
}

#[tokio::test]
async fn a_reset_by_the_client_is_forwarded_to_the_server() {
    let (began, ended) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, end) = (began.clone(), ended.clone());
    let upstream = http2_server(move |_, _request, mut respond| {
        let (begin, end) = (begin.clone(), end.clone());
        async move {
            begin.notify_one();
            let reason = std::future::poll_fn(|cx| respond.poll_reset(cx)).await.unwrap();
            assert_eq!(reason, Reason::CANCEL);
            end.notify_one();
        }
    })
    .await;
    let proxy = proxy(cluster_of(upstream)).await;
    let requests = connect(&proxy).await;
    let (answer, stream) = requests.clone().send_request(request("GET", "/"), true).unwrap();
    within(began.notified()).await;
    drop((answer, stream));
    within(ended.notified()).await;
}

#[tokio::test]
async fn a_reset_by_the_server_is_answered_and_reported() {
    let read = Arc::new(Notify::new());
    let begun = read.clone();
    let upstream = http2_server(move |_, request: Request<RecvStream>, mut respond| {
        let begun = begun.clone();
        async move {
            if request.uri().path() == "/late" {
                let mut stream = respond.send_response(Response::new(()), false).unwrap();
                stream.send_data("some".into(), false).unwrap();
                begun.notified().await;
                stream.send_reset(Reason::INTERNAL_ERROR);
            } else {
                respond.send_reset(Reason::INTERNAL_ERROR);
            }
        }
    })
    .await;
    let proxy = proxy(cluster_of(upstream)).await;
    let requests = connect(&proxy).await;
    let (answer, _) = requests.clone().send_request(request("GET", "/early"), true).unwrap();
    let answer = within(answer).await.unwrap();
    assert_eq!(answer.status(), 503);
    let body = text(answer.into_body()).await;
    assert!(body.contains("remote reset"), "{body}");
    let (answer, _) = requests.clone().send_request(request("GET", "/late"), true).unwrap();
    let mut body = within(answer).await.unwrap().into_body();
    assert_eq!(within(body.data()).await.unwrap().unwrap(), "some");
    read.notify_one();
    let error = within(body.data()).await.expect("the answer seems complete").unwrap_err();
    assert!(error.is_reset(), "{error}");
}

#[tokio::test]
async fn an_unprocessed_request_is_sent_again() {
    let refused = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let upstream = http2_server(move |number, request: Request<RecvStream>, mut respond| {
        let refused = refused.clone();
        async move {
            let second = request.uri().path() == "/2";
            if second && refused.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0 {
                return respond.send_reset(Reason::REFUSED_STREAM);
            }
            repeat(number, request, respond).await;
        }
    })
    .await;
    let terminal = http(|_, forward| forward.retry = Some(retries(1)));
    let proxy = Proxy::start(listener(terminal, None), vec![cluster_of(upstream)]).await;
    let requests = connect(&proxy).await;
    for path in ["/1", "/2"] {
        let (answer, mut body) = requests.clone().send_request(request("POST", path), false).unwrap();
        body.send_data("hello".into(), true).unwrap();
        let answer = within(answer).await.unwrap();
        assert_eq!(answer.status(), 200);
        let body = text(answer.into_body()).await;
        assert!(body.ends_with("hello"), "{body}");
    }
}

#[tokio::test]
async fn a_server_that_closes_between_requests_fails_none() {
    let listener_ = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener_.local_addr().unwrap();
    tokio::spawn(async move {
        for number in 0.. {
            let (stream, _) = listener_.accept().await.unwrap();
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                // The server accepts one request, then no more.
                if let Some(Ok((request, respond))) = connection.accept().await {
                    tokio::spawn(repeat(number, request, respond));
                    connection.graceful_shutdown();
                }
                while let Some(Ok((request, respond))) = connection.accept().await {
                    tokio::spawn(repeat(number, request, respond));
                }
            });
        }
    });
    let proxy = proxy(cluster_of(upstream)).await;
    let requests = connect(&proxy).await;
    for _ in 0..20 {
        let (answer, mut body) = requests.clone().send_request(request("POST", "/"), false).unwrap();
        body.send_data("hello".into(), true).unwrap();
        assert_eq!(within(answer).await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn a_draining_proxy_refuses_new_streams_and_finishes_open_ones() {
    let (began, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begin, wait) = (began.clone(), go.clone());
    let upstream = http2_server(move |number, request, respond| {
        let (begin, wait) = (begin.clone(), wait.clone());
        async move {
            begin.notify_one();
            wait.notified().await;
            repeat(number, request, respond).await;
        }
    })
    .await;
    let proxy = Arc::new(proxy(cluster_of(upstream)).await);
    let requests = connect(&proxy).await;
    let (answer, _) = requests.clone().send_request(request("GET", "/"), true).unwrap();
    within(began.notified()).await;
    let draining = tokio::spawn({
        let proxy = proxy.clone();
        async move { proxy.workers().drain(Duration::from_secs(30)).await }
    });
    // After GOAWAY only streams in flight continue.
    let refused = within(async {
        loop {
            match requests.clone().ready().await {
                Ok(_) => tokio::task::yield_now().await,
                Err(error) => return error,
            }
        }
    });
    assert!(refused.await.is_go_away());
    go.notify_one();
    assert_eq!(within(answer).await.unwrap().status(), 200);
    assert_eq!(within(draining).await.unwrap(), 0);
}

#[tokio::test]
async fn an_upgrade_is_not_forwarded_to_an_http2_server() {
    let proxy = proxy(cluster_of(http2_server(repeat).await)).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
}

#[tokio::test]
async fn a_request_without_a_host_is_refused() {
    let proxy = proxy(cluster(&[echo().await], None)).await;
    let requests = connect(&proxy).await;
    let mut without_host = Request::builder().uri("/").body(()).unwrap();
    *without_host.version_mut() = http::Version::HTTP_11;
    let mut user = request("GET", "/");
    *user.uri_mut() = "http://user@a/".parse().unwrap();
    for malformed in [without_host, user] {
        let (answer, _) = requests.clone().send_request(malformed, true).unwrap();
        assert_eq!(within(answer).await.unwrap_err().reason(), Some(Reason::PROTOCOL_ERROR));
    }
}

#[tokio::test]
async fn responses_without_content_end_with_their_heads() {
    let upstream = server(|_, mut client| async move {
        let head = client.head().await;
        assert!(head.starts_with("HEAD / "), "{head}");
        client.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n").await;
        client.head().await;
        client.send("HTTP/1.1 204 No Content\r\n\r\n").await;
        client.rest().await;
    })
    .await;
    let proxy = proxy(cluster(&[upstream], None)).await;
    let requests = connect(&proxy).await;
    let (answer, _) = requests.clone().send_request(request("HEAD", "/"), true).unwrap();
    let answer = within(answer).await.unwrap();
    assert_eq!(answer.headers()["content-length"], "9");
    assert!(answer.body().is_end_stream());
    let (answer, _) = requests.clone().send_request(request("GET", "/"), true).unwrap();
    let answer = within(answer).await.unwrap();
    assert_eq!(answer.status(), 204);
    assert!(answer.body().is_end_stream());
}

#[tokio::test]
async fn no_more_streams_than_configured_share_a_connection() {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(tokio::sync::Semaphore::new(0)));
    let (tell, wait) = (arrived.clone(), go.clone());
    let upstream = http2_server(move |number, request, respond| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            tell.notify_one();
            wait.acquire().await.unwrap().forget();
            repeat(number, request, respond).await;
        }
    })
    .await;
    let mut cluster = cluster_of(upstream);
    cluster.http2.max_streams = 2;
    let proxy = proxy(cluster).await;
    let requests = connect(&proxy).await;
    let mut answers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (answer, _) = requests.clone().send_request(request("GET", "/"), true).unwrap();
        answers.spawn(async move { text(within(answer).await.unwrap().into_body()).await });
        within(arrived.notified()).await;
    }
    go.add_permits(4);
    let mut numbers: Vec<_> = answers.join_all().await.iter().map(|text| text[..1].to_owned()).collect();
    numbers.sort();
    assert_eq!(numbers, ["0", "0", "1", "1"]);
}

#[tokio::test]
async fn a_connection_is_not_used_beyond_its_maximum_duration() {
    let mut cluster = cluster_of(http2_server(repeat).await);
    cluster.max_connection_duration = Some(Duration::from_nanos(1));
    let proxy = proxy(cluster).await;
    let requests = connect(&proxy).await;
    for number in ["0", "1", "2"] {
        let (answer, _) = requests.clone().send_request(request("GET", "/"), true).unwrap();
        assert!(text(within(answer).await.unwrap().into_body()).await.starts_with(number));
    }
}

#[tokio::test]
async fn a_request_that_reached_a_server_is_not_sent_again() {
    let upstream =
        http2_server(|_, _, mut respond| async move { respond.send_reset(Reason::INTERNAL_ERROR) });
    let upstream = upstream.await;
    for (reset_before_request, tries) in [(true, 1), (false, 2)] {
        let on = RetryOn { reset_before_request, reset: !reset_before_request, ..RetryOn::default() };
        let policy = Arc::new(RetryPolicy { on, ..RetryPolicy::default() });
        let terminal = http(|_, forward| forward.retry = Some(policy));
        let proxy = Proxy::start(listener(terminal, None), vec![cluster_of(upstream)]).await;
        let mut client = connect(&proxy).await;
        let (answer, _) = client.send_request(request("GET", "/"), true).unwrap();
        assert_eq!(within(answer).await.unwrap().status(), 503);
        assert_eq!(proxy.workers().clusters().await[0].requests_total, tries);
    }
}
