//! The server's side of gRPC, as lean as a server of thousands of quiet streams needs it: a connection and all its calls are one
//! task, and what many streams are sent goes to each connection as it is, without a copy.

mod message;

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use h2::{
    Ping, PingPong, Reason, SendStream,
    server::{Builder, SendResponse},
};
use prost::Message;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, Sleep, sleep},
};
use tonic::{
    Extensions, Status,
    codegen::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header::CONTENT_TYPE},
};
use tracing::debug;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::message::Begun;
pub(crate) use self::message::{Requests, framed};

/// Calls at the same time on a connection.
const CALLS: u32 = 64;
/// The longest head of a call, which has a token in it. In bytes.
const MAX_HEAD: u32 = 64 << 10;
/// After so long a client is asked whether it still lives.
const BETWEEN_PINGS: Duration = Duration::from_secs(30);
/// How long it may take to say so.
const PATIENCE: Duration = Duration::from_secs(10);
/// gRPC: HTTP/2 transport mapping.
const CONTENT: HeaderValue = HeaderValue::from_static("application/grpc");

/// What a call does, to its end. Whatever it has to say, it has said then.
pub type Answering = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Answers the calls of its methods.
pub trait Service: Send + Sync {
    /// Whether a method, `/package.Service/Method`, is one of them.
    fn has(&self, method: &str) -> bool;

    /// Begins to answer a call of one of them.
    fn answer(&self, call: Call) -> Answering;
}

impl<A: Service, B: Service> Service for (A, B) {
    fn has(&self, method: &str) -> bool {
        self.0.has(method) || self.1.has(method)
    }

    fn answer(&self, call: Call) -> Answering {
        if self.0.has(&call.method) { self.0.answer(call) } else { self.1.answer(call) }
    }
}

/// A call that has begun.
#[derive(Debug)]
pub struct Call {
    /// `/package.Service/Method`.
    pub(crate) method: String,
    /// What came with it.
    pub(crate) headers: HeaderMap,
    /// What is known of the connection.
    pub(crate) extensions: Extensions,
    /// Where its requests come from.
    pub(crate) requests: h2::RecvStream,
    /// Where its answers go.
    pub(crate) answers: Answers,
}

/// The answers to a call.
#[derive(Debug)]
pub(crate) struct Answers(State);

#[derive(Debug)]
enum State {
    /// Nothing was said yet.
    Begun(SendResponse<Bytes>),
    Open(SendStream<Bytes>),
    Ended,
}

impl Answers {
    /// Sends a message, which stands in these pieces. What the client does not take yet waits, without a copy.
    pub(crate) fn send(&mut self, pieces: Vec<Bytes>) -> Result<(), h2::Error> {
        if let State::Begun(respond) = &mut self.0 {
            self.0 = State::Open(respond.send_response(head(), false)?);
        }
        let State::Open(stream) = &mut self.0 else { return Ok(()) };
        for piece in pieces {
            stream.send_data(piece, false)?;
        }
        Ok(())
    }

    /// Ends the call.
    pub(crate) fn end(mut self, status: &Status) {
        let mut trailers = HeaderMap::new();
        if status.add_header(&mut trailers).is_err() {
            trailers = HeaderMap::new();
            _ = Status::internal("the status has no form").add_header(&mut trailers);
        }
        let ended = match std::mem::replace(&mut self.0, State::Ended) {
            State::Begun(mut respond) => {
                let mut only = head();
                only.headers_mut().extend(trailers);
                respond.send_response(only, true).map(|_| ())
            }
            State::Open(mut stream) => stream.send_trailers(trailers),
            State::Ended => Ok(()),
        };
        if let Err(error) = ended {
            debug!(%error, "a call ended without its status");
        }
    }
}

fn head() -> Response<()> {
    let mut head = Response::new(());
    head.headers_mut().insert(CONTENT_TYPE, CONTENT);
    head
}

/// Serves a connection to its end, or, once `draining` is ready, to that of the calls under way.
///
/// # Errors
/// What the client did wrong, or how the connection broke.
pub async fn serve<IO>(
    io: IO,
    extensions: Extensions,
    service: &impl Service,
    draining: impl Future<Output = ()>,
) -> Result<(), h2::Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let mut builder = Builder::new();
    builder.max_concurrent_streams(CALLS).max_header_list_size(MAX_HEAD);
    // What the beginning needs is held no longer than that.
    let Ok(connection) = Box::pin(tokio::time::timeout(PATIENCE, builder.handshake(io))).await else {
        debug!("a client does not begin");
        return Ok(());
    };
    let mut connection = connection?;
    let mut alive = connection.ping_pong().map(Alive::new);
    let mut draining = pin!(draining);
    let mut drained = false;
    let mut calls: Vec<Answering> = Vec::new();
    poll_fn(|cx| {
        if !drained && draining.as_mut().poll(cx).is_ready() {
            drained = true;
            connection.graceful_shutdown();
        }
        if alive.as_mut().is_some_and(|alive| alive.poll(cx).is_ready()) {
            debug!("a client does not answer");
            return Poll::Ready(Ok(()));
        }
        // What they say is written, and what comes for them read, in the same run: thousands of others are waiting for theirs.
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        while let Poll::Ready(accepted) = connection.poll_accept(cx) {
            let Some(accepted) = accepted.transpose()? else { return Poll::Ready(Ok(())) };
            calls.extend(begin(accepted, &extensions, service));
        }
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        Poll::Pending
    })
    .await
}

type Accepted = (tonic::codegen::http::Request<h2::RecvStream>, SendResponse<Bytes>);

/// Begins a call, if it is one.
fn begin(
    (request, mut respond): Accepted,
    extensions: &Extensions,
    service: &impl Service,
) -> Option<Answering> {
    let (head, requests) = request.into_parts();
    let content = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let refused = match () {
        () if head.method != Method::POST => Some(StatusCode::METHOD_NOT_ALLOWED),
        () if !content.starts_with(CONTENT.as_bytes()) => Some(StatusCode::UNSUPPORTED_MEDIA_TYPE),
        () => None,
    };
    if let Some(status) = refused {
        let mut response = Response::new(());
        *response.status_mut() = status;
        if respond.send_response(response, true).is_err() {
            respond.send_reset(Reason::CANCEL);
        }
        return None;
    }
    let call = Call {
        method: head.uri.path().to_owned(),
        headers: head.headers,
        extensions: extensions.clone(),
        requests,
        answers: Answers(State::Begun(respond)),
    };
    if !service.has(&call.method) {
        call.answers.end(&Status::unimplemented(format!("there is no method {}", call.method)));
        return None;
    }
    Some(service.answer(call))
}

/// Finds out whether a silent client still lives.
struct Alive {
    ping: PingPong,
    asked: bool,
    /// The task is woken when the timer ends.
    awaited: bool,
    timer: Pin<Box<Sleep>>,
}

impl Alive {
    fn new(ping: PingPong) -> Self {
        Self { ping, asked: false, awaited: false, timer: Box::pin(sleep(BETWEEN_PINGS)) }
    }

    /// Ready if it does not. Whoever polls does so as one and the same task.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.awaited && !self.asked && Instant::now() < self.timer.deadline() {
            return Poll::Pending;
        }
        if self.asked && matches!(self.ping.poll_pong(cx), Poll::Ready(Ok(_))) {
            self.wait(false, BETWEEN_PINGS);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            if self.asked || self.ping.send_ping(Ping::opaque()).is_err() {
                return Poll::Ready(());
            }
            self.wait(true, PATIENCE);
            // Told of the answer, or of how the connection ended, which the connection tells by itself.
            if let Poll::Ready(Ok(_)) = self.ping.poll_pong(cx) {
                self.wait(false, BETWEEN_PINGS);
            }
        }
        self.awaited = true;
        Poll::Pending
    }

    fn wait(&mut self, asked: bool, time: Duration) {
        self.asked = asked;
        self.timer.as_mut().reset(Instant::now() + time);
    }
}

/// A call of one request and one answer.
pub(crate) async fn unary<R, A>(
    mut requests: Requests<R>,
    mut answers: Answers,
    answer: impl AsyncFnOnce(R) -> Result<A, Status>,
) where
    R: Message + Default,
    A: Message,
{
    let answered = async {
        let request = requests.next().await?.ok_or_else(|| Status::invalid_argument("no request came"))?;
        answer(request).await
    };
    let status = match answered.await {
        Err(status) => status,
        Ok(answer) => match answers.send(vec![framed(&answer)]) {
            Ok(()) => Status::ok(""),
            Err(error) => Status::unavailable(error.to_string()),
        },
    };
    answers.end(&status);
}
