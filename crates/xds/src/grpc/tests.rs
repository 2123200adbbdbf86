//! What a caller is answered before it is known, over real connections.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures_util::FutureExt as _;
use tokio::{
    net::{TcpListener, TcpStream},
    task::yield_now,
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
