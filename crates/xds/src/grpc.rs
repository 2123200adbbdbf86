//! A gRPC server for thousands of mostly idle streams. A connection and all its calls are one task. Data for many
//! streams is written to each connection without a copy.

mod lifetime;
mod message;
mod metered_io;
mod responses;

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
    lifetime::{IdleAction, Lifetime},
    metered_io::MeteredIo,
};
use crate::limits::{self, Account, Limits};

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::message::PartialMessage;
pub(crate) use self::{
    message::{Requests, framed},
    responses::ResponseWriter,
};

/// Timeout for the first request of a call.
pub(crate) const FIRST_REQUEST: Duration = Duration::from_secs(15);
/// Time without data after which a client is sent a PING.
const BETWEEN_PINGS: Duration = Duration::from_secs(30);
/// Timeout of a PING, unless data is read from the client or [`PROGRESS`](limits::MIN_PROGRESS) written to it. The PING
/// is queued behind earlier data, so a slow client needs time to reach it.
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for the client's HTTP/2 preface.
const PREFACE: Duration = Duration::from_secs(10);
/// Maximum number of unfinished calls per connection. HTTP/2 does not count calls that the client has reset, and a
/// call that waits until its account allows more work does not notice the reset.
const MAX_UNFINISHED: usize = 2 * limits::MAX_CALLS as usize;
/// Content type of gRPC. Source: "gRPC over HTTP2".
const CONTENT: HeaderValue = HeaderValue::from_static("application/grpc");

/// A running call. When it is ready, its responses and its status have been handed to HTTP/2.
pub type CallFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A gRPC service, which handles the calls of its methods.
pub trait Service: Send + Sync {
    /// Returns true if the service has a method (`/package.Service/Method`).
    fn has(&self, method: &str) -> bool;

    /// Decides from the headers of a call and the properties of its connection whether the call is handled. May add
    /// properties. The body is read only after this decision, and only if the call is handled. By default, every call
    /// is handled.
    ///
    /// # Errors
    /// The status of a call that is refused.
    fn admit(&self, method: &str, headers: &HeaderMap, known: &mut Extensions) -> Result<(), Status> {
        let _ = (method, headers, known);
        Ok(())
    }

    /// Begins to handle a call.
    fn handle(&self, call: Call) -> CallFuture;

    /// Called when the last call of a connection has ended, with the properties of the connection.
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

    fn handle(&self, call: Call) -> CallFuture {
        if self.0.has(&call.method) { self.0.handle(call) } else { self.1.handle(call) }
    }

    fn idle(&self, known: &Extensions) {
        self.0.idle(known);
        self.1.idle(known);
    }
}

/// A call that has begun.
#[derive(Debug)]
pub struct Call {
    /// Path, `/package.Service/Method`.
    pub(crate) method: String,
    /// Headers of the call.
    pub(crate) headers: HeaderMap,
    /// Properties of the connection.
    pub(crate) extensions: Extensions,
    /// Stream of the requests.
    pub(crate) requests: h2::RecvStream,
    /// Stream of the responses.
    pub(crate) responses: ResponseWriter,
    /// Account that all calls of the connection share.
    pub(crate) account: Arc<Account>,
}

fn head() -> Response<()> {
    let mut head = Response::new(());
    head.headers_mut().insert(CONTENT_TYPE, CONTENT);
    head
}

/// Serves a connection to its end. Once `draining` is ready, serves the calls in progress to their end.
///
/// # Errors
/// A protocol error of the client, or the error that broke the connection.
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
    let io = MeteredIo::new(io, Arc::clone(&account));
    let mut builder = Builder::new();
    builder.max_concurrent_streams(limits::MAX_CALLS).max_header_list_size(limits::MAX_HEAD);
    builder.max_send_buffer_size(limits::MAX_UNSENT);
    // Boxed, so that the memory of the handshake is freed when the connection begins.
    let Ok(connection) = Box::pin(tokio::time::timeout(PREFACE, builder.handshake(io))).await else {
        debug!("a client did not begin HTTP/2 in time");
        return Ok(());
    };
    let mut connection = connection?;
    let mut alive = connection.ping_pong().map(KeepAlive::new);
    let mut draining = pin!(draining);
    let mut drained = false;
    let mut calls: Vec<CallFuture> = Vec::new();
    // True if calls have begun since the connection was idle.
    let mut busy = false;
    let rest = |calls: &[CallFuture], busy: &mut bool| {
        if calls.is_empty() && std::mem::take(busy) {
            service.idle(&extensions);
        }
    };
    let mut lifetime = Lifetime::default();
    poll_fn(|cx| {
        if !drained && draining.as_mut().poll(cx).is_ready() {
            drained = true;
            connection.graceful_shutdown();
        }
        if alive.as_mut().is_some_and(|alive| alive.poll(&account, cx).is_ready()) {
            debug!("a client did not answer a PING in time");
            return Poll::Ready(Ok(()));
        }
        // Calls are polled before HTTP/2, so that their data is written in the same poll, and again if data was read or
        // a call has begun. Thousands of other connections may be polled before the next poll.
        let read_before = account.read.load(Relaxed);
        let mut has_new_calls = false;
        calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        // Reports that no call is left before the last response is written.
        rest(&calls, &mut busy);
        while let Poll::Ready(accepted) = connection.poll_accept(cx) {
            let Some(mut accepted) = accepted.transpose()? else { return Poll::Ready(Ok(())) };
            account.pace.charge(limits::CALL_COST);
            if lifetime.takes_calls() {
                let call = match calls.len() {
                    ..MAX_UNFINISHED => begin(accepted, &extensions, service, &account),
                    _ => {
                        accepted.1.send_reset(Reason::REFUSED_STREAM);
                        None
                    }
                };
                lifetime.called(call.is_some());
                has_new_calls |= call.is_some();
                calls.extend(call);
            }
        }
        busy |= has_new_calls;
        if has_new_calls || account.read.load(Relaxed) != read_before {
            calls.retain_mut(|call| call.as_mut().poll(cx).is_pending());
            rest(&calls, &mut busy);
        }
        while let Poll::Ready(due) = lifetime.poll(calls.is_empty(), cx) {
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

/// Returns the address of a client as text; empty if it is not known.
pub fn address(extensions: &Extensions) -> String {
    let tls = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref);
    let plain = extensions.get::<TcpConnectInfo>();
    tls.or(plain).and_then(TcpConnectInfo::remote_addr).map(|address| address.to_string()).unwrap_or_default()
}

type Accepted = (tonic::codegen::http::Request<h2::RecvStream>, SendResponse<Bytes>);

/// Begins a call, if the request is one.
fn begin(
    (request, mut respond): Accepted,
    extensions: &Extensions,
    service: &impl Service,
    account: &Arc<Account>,
) -> Option<CallFuture> {
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
        responses: ResponseWriter::new(respond, Arc::clone(account)),
        account: Arc::clone(account),
    };
    if !service.has(&call.method) {
        call.responses.end(&Status::unimplemented(format!("unknown method {}", call.method)));
        return None;
    }
    if let Err(refused) = service.admit(&call.method, &call.headers, &mut call.extensions) {
        call.responses.end(&refused);
        return None;
    }
    Some(service.handle(call))
}

/// Detects by PING whether a client that sends nothing is still connected.
struct KeepAlive {
    ping: PingPong,
    ping_sent: bool,
    /// Bytes that were read and written before the timer was set.
    before: (u64, u64),
    /// The timer has been polled, so it wakes the task when it expires.
    awaited: bool,
    timer: Pin<Box<Sleep>>,
}

impl KeepAlive {
    fn new(ping: PingPong) -> Self {
        Self { ping, ping_sent: false, before: (0, 0), awaited: false, timer: Box::pin(sleep(BETWEEN_PINGS)) }
    }

    /// Becomes ready if the client does not answer. Must always be polled by the same task.
    fn poll(&mut self, account: &Account, cx: &mut Context<'_>) -> Poll<()> {
        if self.awaited && !self.ping_sent && Instant::now() < self.timer.deadline() {
            return Poll::Pending;
        }
        if self.ping_sent && matches!(self.ping.poll_pong(cx), Poll::Ready(Ok(_))) {
            self.wait(false, BETWEEN_PINGS);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            let is_moving = self.is_moving(account);
            // While the client has exceeded its pace, nothing is read from it, not even its answer to the PING.
            if self.ping_sent && (is_moving || account.pace.wait().is_some()) {
                self.wait(true, PING_TIMEOUT);
                continue;
            }
            if self.ping_sent || self.ping.send_ping(Ping::opaque()).is_err() {
                return Poll::Ready(());
            }
            self.wait(true, PING_TIMEOUT);
            // Registers the task for the answer. The end of the connection wakes the task by itself.
            if let Poll::Ready(Ok(_)) = self.ping.poll_pong(cx) {
                self.wait(false, BETWEEN_PINGS);
            }
        }
        self.awaited = true;
        Poll::Pending
    }

    /// Returns true if the client has sent data, or has read enough, since the last call.
    fn is_moving(&mut self, account: &Account) -> bool {
        let now = (account.read.load(Relaxed), account.written.load(Relaxed));
        let before = std::mem::replace(&mut self.before, now);
        now.0 > before.0 || now.1 - before.1 >= limits::MIN_PROGRESS as u64
    }

    fn wait(&mut self, ping_sent: bool, time: Duration) {
        self.ping_sent = ping_sent;
        self.timer.as_mut().reset(Instant::now() + time);
    }
}

/// Serves a call of one request and one response.
pub(crate) async fn unary<R, A>(
    mut requests: Requests<R>,
    mut responses: ResponseWriter,
    respond: impl AsyncFnOnce(R) -> Result<A, Status>,
) where
    R: Message + Default,
    A: Message,
{
    let responded = async {
        let request = requests.next().await?;
        let (request, _) =
            request.ok_or_else(|| Status::invalid_argument("the call ended without a complete request"))?;
        respond(request).await
    };
    let status = match responded.await {
        Err(status) => {
            requests.charge_refusal(&status).await;
            status
        }
        Ok(response) => match responses.send(std::iter::once(framed(&response))) {
            Ok(()) => responses.flushed().await.err().unwrap_or_else(|| Status::ok("")),
            Err(status) => status,
        },
    };
    responses.end(&status);
}

#[cfg(test)]
mod tests;
