//! Calls of unknown callers, and of slow or silent clients, over real connections.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::Reason;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::{JoinHandle, yield_now},
    time::Instant,
};
use tonic::codegen::http::Request;

use super::{
    keep_alive::{BETWEEN_PINGS, PING_TIMEOUT},
    *,
};

/// Admits calls with a token, and counts the checks.
#[derive(Default)]
struct TokenService {
    calls: AtomicUsize,
    answered: AtomicUsize,
}

impl Service for TokenService {
    fn has(&self, method: &str) -> bool {
        method == "/a.B/C"
    }

    fn admit(&self, _: &str, headers: &HeaderMap, known: &mut Extensions) -> Result<(), Status> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        known.insert(7_u8);
        let known = headers.get("authorization").is_some_and(|token| token == "good");
        if known { Ok(()) } else { Err(Status::unauthenticated("not you")) }
    }

    fn handle(&self, call: Call) -> CallFuture {
        assert_eq!(call.extensions.get::<u8>(), Some(&7), "added properties are passed on with the call");
        self.answered.fetch_add(1, Ordering::Relaxed);
        Box::pin(pending())
    }
}

type TestSender = h2::client::SendRequest<Bytes>;

async fn connect(service: &Arc<TokenService>) -> (TestSender, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (service, limits) = (Arc::clone(service), Arc::<Limits>::default());
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let _ = serve(stream, Extensions::new(), &*service, &limits, pending()).await;
    });
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let ended = tokio::spawn(async move {
        let _ = connection.await;
    });
    (client, ended)
}

/// Begins a call without a body.
async fn call(
    client: &TestSender,
    token: &str,
) -> Result<(h2::client::ResponseFuture, SendStream), h2::Error> {
    let request = Request::post("http://a/a.B/C")
        .header("content-type", "application/grpc")
        .header("authorization", token)
        .body(())
        .unwrap();
    client.clone().ready().await?.send_request(request, false)
}

type SendStream = h2::SendStream<Bytes>;

#[tokio::test]
async fn a_call_is_refused_before_its_body_is_read() {
    let service = Arc::<TokenService>::default();
    let (client, _connection) = connect(&service).await;
    let (response, _open) = call(&client, "bad").await.unwrap();
    let head = response.await.unwrap();
    assert_eq!(head.headers()["grpc-status"], "16");
    assert_eq!(head.headers()["grpc-message"], "not%20you");
    assert_eq!(service.answered.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn repeated_refusals_disconnect_a_client() {
    let service = Arc::<TokenService>::default();
    let (client, connection) = connect(&service).await;
    let (mut refused, mut open) = (0, Vec::new());
    // Each call is awaited before the next one begins.
    while let Ok((response, body)) = call(&client, "bad").await {
        open.push(body);
        refused += u32::from(response.await.is_ok());
        assert!(refused < 100);
    }
    connection.await.unwrap();
    assert!(service.calls.load(Ordering::Relaxed) <= 8);

    let (client, _connection) = connect(&service).await;
    for _ in 0..20 {
        let (response, _body) = call(&client, "bad").await.unwrap();
        response.await.unwrap();
        // An admitted call resets the count of refusals.
        open.push(call(&client, "good").await.unwrap().1);
    }
}

#[tokio::test]
async fn calls_that_the_client_resets_are_bounded_until_they_end() {
    let service = Arc::<TokenService>::default();
    let (client, connection) = connect(&service).await;
    let answered = || service.answered.load(Ordering::Relaxed);
    while let Ok((mut response, mut body)) = call(&client, "good").await {
        let before = answered();
        while answered() == before && (&mut response).now_or_never().is_none() {
            yield_now().await;
        }
        body.send_reset(Reason::CANCEL);
        assert!(answered() <= MAX_UNFINISHED);
    }
    connection.await.unwrap();
    assert_eq!(answered(), MAX_UNFINISHED);
}

/// Sends answers of this length to each call.
struct Large(usize);

impl Service for Large {
    fn has(&self, _: &str) -> bool {
        true
    }

    fn handle(&self, mut call: Call) -> CallFuture {
        let pieces = (0..self.0 / PIECE).map(|_| Bytes::from(vec![0; PIECE]));
        Box::pin(async move {
            call.responses.send(pieces).unwrap();
            let status = call.responses.flushed().await.err().unwrap_or_else(|| Status::ok(""));
            call.responses.end(&status);
        })
    }
}

const PIECE: usize = 64 << 10;

/// Calls a service over a pipe of 1 MiB. The client receives one piece, then one every two seconds while
/// `reads` is true. Returns the response and the server's task.
async fn call_slowly(service: Large, reads: &Arc<AtomicBool>) -> (h2::RecvStream, JoinHandle<()>) {
    let (near, pipe) = tokio::io::duplex(1 << 20);
    let (end, far) = tokio::io::duplex(PIECE);
    let server = tokio::spawn(async move {
        let _ = serve(near, Extensions::new(), &service, &Arc::default(), pending()).await;
    });
    let (mut from_server, mut to_server) = tokio::io::split(pipe);
    let (mut from_client, mut to_client) = tokio::io::split(end);
    tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
    let reads = Arc::clone(reads);
    tokio::spawn(async move {
        let mut piece = vec![0; PIECE];
        while let Ok(length @ 1..) = from_server.read(&mut piece).await {
            to_client.write_all(&piece[..length]).await.unwrap();
            tokio::time::sleep(Duration::from_secs(2)).await;
            if !reads.load(Ordering::Relaxed) {
                pending::<()>().await;
            }
        }
    });
    let mut builder = h2::client::Builder::new();
    let (client, connection) = builder
        .initial_window_size(1 << 20)
        .initial_connection_window_size(1 << 20)
        .handshake::<_, Bytes>(far)
        .await
        .unwrap();
    tokio::spawn(async move {
        let _ = connection.await;
    });
    let (response, _) = call(&client, "good").await.unwrap();
    (response.await.unwrap().into_body(), server)
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_is_not_disconnected() {
    const LENGTH: usize = 8 << 20;
    let (mut body, server) = call_slowly(Large(LENGTH), &Arc::new(true.into())).await;
    let start = Instant::now();
    let mut got = 0;
    while let Some(data) = body.data().await {
        let length = data.unwrap().len();
        got += length;
        body.flow_control().release_capacity(length).unwrap();
    }
    assert_eq!(got, LENGTH);
    assert!(start.elapsed() > 2 * (BETWEEN_PINGS + PING_TIMEOUT), "{:?}", start.elapsed());
    assert!(!server.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_silent_client_is_disconnected() {
    let reads = Arc::new(true.into());
    let (_body, server) = call_slowly(Large(8 << 20), &reads).await;
    reads.store(false, Ordering::Relaxed);
    let start = Instant::now();
    server.await.unwrap();
    assert!(start.elapsed() < 2 * (BETWEEN_PINGS + PING_TIMEOUT), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_shutdown_cuts_off_no_response() {
    const LENGTH: usize = 1 << 20;
    // The pipe holds far less than the output that waits when the call ends.
    let (near, far) = tokio::io::duplex(1 << 10);
    let (drain, draining) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let draining = async { draining.await.unwrap() };
        serve(near, Extensions::new(), &Large(LENGTH), &Arc::default(), draining).await
    });
    let (client, connection) = h2::client::handshake(far).await.unwrap();
    let connection = tokio::spawn(connection);
    let (response, _open) = call(&client, "good").await.unwrap();
    let mut body = response.await.unwrap().into_body();
    drain.send(()).unwrap();
    let mut got = 0;
    while let Some(data) = body.data().await {
        let length = data.unwrap().len();
        got += length;
        body.flow_control().release_capacity(length).unwrap();
    }
    assert_eq!(got, LENGTH);
    assert_eq!(body.trailers().await.unwrap().unwrap()["grpc-status"], "0");
    connection.await.unwrap().unwrap();
    server.await.unwrap().unwrap();
}
