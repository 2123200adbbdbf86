//! A gRPC server for thousands of mostly idle streams. A connection and all its calls are one task. Data for many
//! streams is written to each connection without a copy.

mod connection;
mod keep_alive;
mod lifetime;
mod message;
mod metered_io;
mod responses;

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use prost::Message;
use skysail_http::{
    head::ResponseHead,
    http2::{Request, StreamError},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tonic::{
    Extensions, Status,
    codegen::http::{HeaderMap, HeaderName, HeaderValue},
    transport::server::{TcpConnectInfo, TlsConnectInfo},
};
use tracing::debug;

use self::{
    connection::{CallStream, ClientConnection},
    keep_alive::KeepAlive,
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
/// Timeout for the client's HTTP/2 preface.
const PREFACE: Duration = Duration::from_secs(10);
/// Maximum number of unfinished calls per connection. HTTP/2 does not count calls that the client has reset, and a
/// call that waits until its account allows more work does not notice the reset.
const MAX_UNFINISHED: usize = 2 * limits::MAX_CALLS as usize;
/// Maximum number of times that the calls of a connection are polled before other connections are.
const ROUNDS: usize = 4;
/// Content type of gRPC. Source: "gRPC over HTTP2".
const CONTENT: &str = "application/grpc";

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
    pub(crate) requests: Arc<CallStream>,
    /// Stream of the responses.
    pub(crate) responses: ResponseWriter,
    /// Account that all calls of the connection share.
    pub(crate) account: Arc<Account>,
}

/// Returns the head of a response with this HTTP status.
fn response_head(status: u16) -> ResponseHead {
    ResponseHead::build(status, &[("content-type", CONTENT)])
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
) -> Result<(), StreamError>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let account = Arc::new(Account::new(Arc::clone(limits), address(&extensions)));
    let mut connection = ClientConnection::new(MeteredIo::new(io, Arc::clone(&account)));
    // Boxed, so that the memory of the timer is freed when the client has begun.
    if Box::pin(timeout(PREFACE, connection.begun())).await.is_err() {
        debug!("a client did not begin HTTP/2 in time");
        return Ok(());
    }
    let mut calls = Calls {
        service,
        extensions,
        account,
        running: Vec::new(),
        busy: false,
        lifetime: Lifetime::default(),
    };
    let mut alive = KeepAlive::new();
    let mut draining = pin!(draining);
    let mut drained = false;
    poll_fn(|cx| {
        if !drained && draining.as_mut().poll(cx).is_ready() {
            drained = true;
            connection.session().begin_shutdown();
        }
        for _ in 0..ROUNDS {
            // The connection is polled before the calls, to read what has arrived, and after them, to write their data.
            // Thousands of other connections may be polled before the next poll.
            if connection.poll(cx).is_ready() {
                return Poll::Ready(());
            }
            calls.accept(&mut connection);
            // All calls are polled now, those that can continue and the others.
            connection.take_woken();
            calls.poll(cx);
            if let Poll::Ready(Err(keep_alive::Silent)) =
                alive.poll(&mut connection.session(), &calls.account, cx)
            {
                debug!("a client did not answer a PING in time");
                return Poll::Ready(());
            }
            while let Poll::Ready(due) = calls.lifetime.poll(calls.running.is_empty(), cx) {
                if due == IdleAction::Close {
                    return Poll::Ready(());
                }
                connection.session().begin_shutdown();
            }
            if calls.account.is_closing() || connection.poll(cx).is_ready() {
                return Poll::Ready(());
            }
            if !(connection.take_woken() | calls.accept(&mut connection)) {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    Box::pin(connection.close()).await;
    connection.result()
}

/// The calls of a connection.
struct Calls<'a, S> {
    service: &'a S,
    /// Properties of the connection.
    extensions: Extensions,
    account: Arc<Account>,
    running: Vec<CallFuture>,
    /// True if calls have begun since the connection was idle.
    busy: bool,
    lifetime: Lifetime,
}

impl<S: Service> Calls<'_, S> {
    /// Polls all calls. Reports that no call is left before the last response is written.
    fn poll(&mut self, cx: &mut Context<'_>) {
        self.running.retain_mut(|call| call.as_mut().poll(cx).is_pending());
        if self.running.is_empty() && std::mem::take(&mut self.busy) {
            self.service.idle(&self.extensions);
        }
    }

    /// Begins the calls that have arrived; returns true if there was one.
    fn accept<IO: AsyncRead + AsyncWrite + Unpin>(&mut self, connection: &mut ClientConnection<IO>) -> bool {
        let mut any = false;
        while let Some((request, stream)) = connection.accept() {
            any = true;
            self.account.pace.charge(limits::CALL_COST);
            if !self.lifetime.takes_calls() {
                continue;
            }
            let call = if self.running.len() < MAX_UNFINISHED {
                self.begin(request, stream)
            } else {
                stream.refuse();
                None
            };
            self.lifetime.called(call.is_some());
            self.busy |= call.is_some();
            self.running.extend(call);
        }
        any
    }

    /// Begins a call, if the request is one.
    fn begin(&self, request: Request, stream: Arc<CallStream>) -> Option<CallFuture> {
        let Request { head, oversized, .. } = request;
        let content = head.header("content-type").unwrap_or_default();
        let refused = match () {
            () if oversized.is_some() => Some(431),
            () if head.method() != "POST" => Some(405),
            () if !content.starts_with(CONTENT.as_bytes()) => Some(415),
            () => None,
        };
        if let Some(status) = refused {
            stream.respond(&ResponseHead::build(status, &[]), true);
            return None;
        }
        let mut headers = HeaderMap::with_capacity(head.len());
        for (name, value) in head.iter() {
            // HTTP/2 has checked the fields.
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
                headers.append(name, value);
            }
        }
        let mut call = Call {
            method: head.path().to_owned(),
            headers,
            extensions: self.extensions.clone(),
            responses: ResponseWriter::new(Arc::clone(&stream), Arc::clone(&self.account)),
            requests: stream,
            account: Arc::clone(&self.account),
        };
        head.recycle();
        if !self.service.has(&call.method) {
            call.responses.end(&Status::unimplemented(format!("unknown method {}", call.method)));
            return None;
        }
        if let Err(refused) = self.service.admit(&call.method, &call.headers, &mut call.extensions) {
            call.responses.end(&refused);
            return None;
        }
        Some(self.service.handle(call))
    }
}

/// Returns the address of a client as text; empty if it is not known.
pub fn address(extensions: &Extensions) -> String {
    let tls = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref);
    let plain = extensions.get::<TcpConnectInfo>();
    tls.or(plain).and_then(TcpConnectInfo::remote_addr).map(|address| address.to_string()).unwrap_or_default()
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
