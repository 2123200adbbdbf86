//! The server's side of gRPC, as lean as a server of thousands of quiet streams needs it: a connection and all its calls are one
//! task, and what many streams are sent goes to each connection as it is, without a copy.

mod answers;
mod manners;
mod message;
mod paced;

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use h2::{
    Ping, PingPong, Reason,
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
    transport::server::{TcpConnectInfo, TlsConnectInfo},
};
use tracing::debug;

use self::{
    manners::{IdleAction, Manners},
    paced::Paced,
};
use crate::limits::{self, Account, Limits};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::message::PartialMessage;
pub(crate) use self::{
    answers::Answers,
    message::{Requests, framed},
};

/// Time until a call's first request begins.
pub(crate) const FIRST_REQUEST: Duration = Duration::from_secs(15);
/// After so long a client is asked whether it still lives.
const BETWEEN_PINGS: Duration = Duration::from_secs(30);
/// How long it may take to say so, unless something is read from it or [`PROGRESS`](limits::PROGRESS) written to it. The question
/// waits behind what has been written before: a slow client needs its time to come to it.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a client may take to begin HTTP/2.
const PREFACE: Duration = Duration::from_secs(10);
/// Calls of a connection that have not ended. HTTP/2 does not count those that the client has reset, and one that waits for its pace
/// does not see that.
const UNENDED: usize = 2 * limits::CALLS as usize;
/// gRPC: HTTP/2 transport mapping.
const CONTENT: HeaderValue = HeaderValue::from_static("application/grpc");

/// What a call does, to its end. Whatever it has to say, it has said then.
pub type Answering = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Answers the calls of its methods.
pub trait Service: Send + Sync {
    /// Whether a method, `/package.Service/Method`, is one of them.
    fn has(&self, method: &str) -> bool;

    /// Decides from a call's headers and from what is known of its connection whether the call is answered, and may add to what
    /// is known. Nothing of the call's body has been read by then; after a refusal nothing ever is. By default every call is
    /// answered.
    ///
    /// # Errors
    /// The status of a call that is refused.
    fn admit(&self, method: &str, headers: &HeaderMap, known: &mut Extensions) -> Result<(), Status> {
        let _ = (method, headers, known);
        Ok(())
    }

    /// Begins to answer a call of one of them.
    fn answer(&self, call: Call) -> Answering;

    /// Called when the last call of a connection has ended, with what is known of the connection.
    fn idle(&self, known: &Extensions) {
        let _ = known;
    }
}

impl<A: Service, B: Service> Service for (A, B) {
    fn has(&self, method: &str) -> bool {
        self.0.has(method) || self.1.has(method)
    }

    fn admit(&self, method: &str, headers: &HeaderMap, known: &mut Extensions) -> Result<(), Status> {
        self.0.admit(method, headers, known)?;
        self.1.admit(method, headers, known)
    }

    fn answer(&self, call: Call) -> Answering {
        if self.0.has(&call.method) { self.0.answer(call) } else { self.1.answer(call) }
    }

    fn idle(&self, known: &Extensions) {
        self.0.idle(known);
        self.1.idle(known);
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
    /// What the connection's calls share.
    pub(crate) account: Arc<Account>,
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
    limits: &Arc<Limits>,
    draining: impl Future<Output = ()>,
) -> Result<(), h2::Error>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let account = Arc::new(Account::new(Arc::clone(limits), address(&extensions)));
    let io = Paced::new(io, Arc::clone(&account));
    let mut builder = Builder::new();
    builder.max_concurrent_streams(limits::CALLS).max_header_list_size(limits::HEAD);
    builder.max_send_buffer_size(limits::UNSENT);
    // What the beginning needs is held no longer than that.
    let Ok(connection) = Box::pin(tokio::time::timeout(PREFACE, builder.handshake(io))).await else {
        debug!("a client does not begin");
        return Ok(());
    };
    let mut connection = connection?;
    let mut alive = connection.ping_pong().map(Alive::new);
    let mut draining = pin!(draining);
    let mut drained = false;
    let mut calls: Vec<Answering> = Vec::new();
    // Whether calls have begun since the connection was idle.
    let mut busy = false;
    let rest = |calls: &[Answering], busy: &mut bool| {
        if calls.is_empty() && std::mem::take(busy) {
            service.idle(&extensions);
        }
    };
    let mut manners = Manners::default();
    poll_fn(|cx| {
        if !drained && draining.as_mut().poll(cx).is_ready() {
            drained = true;
            connection.graceful_shutdown();
        }
        if alive.as_mut().is_some_and(|alive| alive.poll(&account, cx).is_ready()) {
            debug!("a client does not answer");
            return Poll::Ready(Ok(()));
        }
        // What they say is written, and what comes for them read, in the same run: thousands of others are waiting for theirs.
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        // Before the last answer is written.
        rest(&calls, &mut busy);
        while let Poll::Ready(accepted) = connection.poll_accept(cx) {
            let Some(mut accepted) = accepted.transpose()? else { return Poll::Ready(Ok(())) };
            account.pace.spend(limits::CALL);
            if manners.takes_calls() {
                let call = match calls.len() {
                    ..UNENDED => begin(accepted, &extensions, service, &account),
                    _ => {
                        accepted.1.send_reset(Reason::REFUSED_STREAM);
                        None
                    }
                };
                manners.called(call.is_some());
                busy |= call.is_some();
                calls.extend(call);
            }
        }
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        rest(&calls, &mut busy);
        while let Poll::Ready(due) = manners.poll(calls.is_empty(), cx) {
            if due == IdleAction::Close {
                return Poll::Ready(Ok(()));
            }
            connection.graceful_shutdown();
            cx.waker().wake_by_ref();
        }
        if account.is_closing() { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
}

/// A client's address as text; empty where none is known.
pub fn address(extensions: &Extensions) -> String {
    let tls = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref);
    let plain = extensions.get::<TcpConnectInfo>();
    tls.or(plain).and_then(TcpConnectInfo::remote_addr).map(|address| address.to_string()).unwrap_or_default()
}

type Accepted = (tonic::codegen::http::Request<h2::RecvStream>, SendResponse<Bytes>);

/// Begins a call, if it is one.
fn begin(
    (request, mut respond): Accepted,
    extensions: &Extensions,
    service: &impl Service,
    account: &Arc<Account>,
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
    let mut call = Call {
        method: head.uri.path().to_owned(),
        headers: head.headers,
        extensions: extensions.clone(),
        requests,
        answers: Answers::new(respond, Arc::clone(account)),
        account: Arc::clone(account),
    };
    if !service.has(&call.method) {
        call.answers.end(&Status::unimplemented(format!("there is no method {}", call.method)));
        return None;
    }
    if let Err(refused) = service.admit(&call.method, &call.headers, &mut call.extensions) {
        call.answers.end(&refused);
        return None;
    }
    Some(service.answer(call))
}

/// Finds out whether a silent client still lives.
struct Alive {
    ping: PingPong,
    asked: bool,
    /// Bytes that were read and written before the timer was set.
    before: (u64, u64),
    /// The task is woken when the timer ends.
    awaited: bool,
    timer: Pin<Box<Sleep>>,
}

impl Alive {
    fn new(ping: PingPong) -> Self {
        Self { ping, asked: false, before: (0, 0), awaited: false, timer: Box::pin(sleep(BETWEEN_PINGS)) }
    }

    /// Ready if it does not. Whoever polls does so as one and the same task.
    fn poll(&mut self, account: &Account, cx: &mut Context<'_>) -> Poll<()> {
        if self.awaited && !self.asked && Instant::now() < self.timer.deadline() {
            return Poll::Pending;
        }
        if self.asked && matches!(self.ping.poll_pong(cx), Poll::Ready(Ok(_))) {
            self.wait(false, BETWEEN_PINGS);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let is_moving = self.is_moving(account);
            // While it owes too much, its answer is not read.
            if self.asked && (is_moving || account.pace.wait().is_some()) {
                self.wait(true, ANSWER);
                continue;
            }
            if self.asked || self.ping.send_ping(Ping::opaque()).is_err() {
                return Poll::Ready(());
            }
            self.wait(true, ANSWER);
            // Told of the answer, or of how the connection ended, which the connection tells by itself.
            if let Poll::Ready(Ok(_)) = self.ping.poll_pong(cx) {
                self.wait(false, BETWEEN_PINGS);
            }
        }
        self.awaited = true;
        Poll::Pending
    }

    /// Whether the client has sent something, or taken enough, since this was last called.
    fn is_moving(&mut self, account: &Account) -> bool {
        let now = (account.read.load(Relaxed), account.written.load(Relaxed));
        let before = std::mem::replace(&mut self.before, now);
        now.0 > before.0 || now.1 - before.1 >= limits::PROGRESS as u64
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
        let request = requests.next().await?;
        let (request, _) = request.ok_or_else(|| Status::invalid_argument("no request came"))?;
        answer(request).await
    };
    let status = match answered.await {
        Err(status) => {
            requests.pay_refusal(&status).await;
            status
        }
        Ok(answer) => match answers.send(std::iter::once(framed(&answer))) {
            Ok(()) => answers.flushed().await.err().unwrap_or_else(|| Status::ok("")),
            Err(status) => status,
        },
    };
    answers.end(&status);
}

#[cfg(test)]
mod tests;
