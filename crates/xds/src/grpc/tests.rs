//! What a caller is answered before it is known, over real connections.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use futures_util::FutureExt as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::{JoinHandle, yield_now},
};
use tonic::codegen::http::Request;

use super::*;

/// Admits calls with a token, and counts what it is asked.
#[derive(Default)]
struct Door {
    asked: AtomicUsize,
    answered: AtomicUsize,
}

impl Service for Door {
    fn has(&self, method: &str) -> bool {
        method == "/a.B/C"
    }

    fn admit(&self, _: &str, headers: &HeaderMap, known: &mut Extensions) -> Result<(), Status> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        known.insert(7_u8);
        let known = headers.get("authorization").is_some_and(|token| token == "good");
        if known { Ok(()) } else { Err(Status::unauthenticated("not you")) }
    }

    fn answer(&self, call: Call) -> Answering {
        assert_eq!(call.extensions.get::<u8>(), Some(&7), "what was found out goes with the call");
        self.answered.fetch_add(1, Ordering::Relaxed);
        Box::pin(pending())
    }
}

type Client = h2::client::SendRequest<Bytes>;

async fn connect(door: &Arc<Door>) -> (Client, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (door, limits) = (Arc::clone(door), Arc::<Limits>::default());
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let _ = serve(stream, Extensions::new(), &*door, &limits, pending()).await;
    });
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let ended = tokio::spawn(async move {
        let _ = connection.await;
    });
    (client, ended)
}

/// Begins a call without a body so far, and gives the status if it is refused.
async fn call(client: &Client, token: &str) -> Result<(h2::client::ResponseFuture, SendStream), h2::Error> {
    let request = Request::post("http://a/a.B/C")
        .header("content-type", "application/grpc")
        .header("authorization", token)
        .body(())
        .unwrap();
    client.clone().ready().await?.send_request(request, false)
}

type SendStream = h2::SendStream<Bytes>;

#[tokio::test]
async fn a_call_is_refused_before_anything_of_its_body_has_come() {
    let door = Arc::<Door>::default();
    let (client, _connection) = connect(&door).await;
    let (response, _open) = call(&client, "bad").await.unwrap();
    let head = response.await.unwrap();
    assert_eq!(head.headers()["grpc-status"], "16");
    assert_eq!(head.headers()["grpc-message"], "not%20you");
    assert_eq!(door.answered.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_client_that_is_refused_again_and_again_is_disconnected() {
    let door = Arc::<Door>::default();
    let (client, connection) = connect(&door).await;
    let (mut refused, mut open) = (0, Vec::new());
    // Whether it waits for its answers or not.
    while let Ok((response, body)) = call(&client, "bad").await {
        open.push(body);
        refused += u32::from(response.await.is_ok());
        assert!(refused < 100);
    }
    connection.await.unwrap();
    assert!(door.asked.load(Ordering::Relaxed) <= 8);

    let (client, _connection) = connect(&door).await;
    for _ in 0..20 {
        let (response, _body) = call(&client, "bad").await.unwrap();
        response.await.unwrap();
        // One that is admitted shows that the others were mistakes.
        open.push(call(&client, "good").await.unwrap().1);
    }
}

#[tokio::test]
async fn calls_that_the_client_resets_are_bounded_until_they_end() {
    let door = Arc::<Door>::default();
    let (client, connection) = connect(&door).await;
    let answered = || door.answered.load(Ordering::Relaxed);
    while let Ok((mut response, mut body)) = call(&client, "good").await {
        let before = answered();
        while answered() == before && (&mut response).now_or_never().is_none() {
            yield_now().await;
        }
        body.send_reset(Reason::CANCEL);
        assert!(answered() <= UNENDED);
    }
    connection.await.unwrap();
    assert_eq!(answered(), UNENDED);
}

/// Sends answers of so many bytes to each call.
struct Large(usize);

impl Service for Large {
    fn has(&self, _: &str) -> bool {
        true
    }

    fn answer(&self, mut call: Call) -> Answering {
        let pieces = (0..self.0 / PIECE).map(|_| Bytes::from(vec![0; PIECE]));
        Box::pin(async move {
            call.answers.send(pieces).unwrap();
            let status = call.answers.flushed().await.err().unwrap_or_else(|| Status::ok(""));
            call.answers.end(&status);
        })
    }
}

const PIECE: usize = 64 << 10;

/// Calls a service over a pipe that holds a MiB, of which the client gets a piece every two seconds as long as it reads.
/// Returns what it gets, and when the server is done with it.
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
async fn a_client_that_reads_slowly_is_not_taken_for_dead() {
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
    assert!(start.elapsed() > 2 * (BETWEEN_PINGS + ANSWER), "{:?}", start.elapsed());
    assert!(!server.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_nothing_is_taken_for_dead() {
    let reads = Arc::new(true.into());
    let (_body, server) = call_slowly(Large(8 << 20), &reads).await;
    reads.store(false, Ordering::Relaxed);
    let start = Instant::now();
    server.await.unwrap();
    assert!(start.elapsed() < 2 * (BETWEEN_PINGS + ANSWER), "{:?}", start.elapsed());
}
