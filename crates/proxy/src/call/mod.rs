//! Calls of the sidecar itself to clusters: for key sets, for external authorization, to export records. They use the
//! connection pools, load balancing and circuit breakers of ordinary requests. Responses are read completely.

pub(crate) mod export;
pub(crate) mod processing;

use std::{
    future::poll_fn,
    rc::Rc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use crate::{
    upstream::{
        self, AlpnOffer, pick,
        pool::{ActiveRequest, Host, Link, Pool, Upstream},
        response,
    },
    worker::Worker,
};
use skysail_http::{
    flow::Flow,
    grpc_status,
    head::{Headers, RequestHead, ResponseHead, Version},
    http1::{Framing, write::Persistence},
    http2::{Answered, Duplex},
    timer,
    wire::Wire,
};
use skysail_policy::{
    balance::PickOptions,
    config::Snapshot,
    error::{Error, Kind},
    outlier::UpstreamResult,
};

/// Maximum size of a response in bytes.
const MAX_RESPONSE: usize = 1 << 20;

/// A complete response.
pub(crate) struct CallResponse {
    pub(crate) head: ResponseHead,
    pub(crate) content: Vec<u8>,
    pub(crate) trailers: Option<Headers>,
}

/// Sends a request to a cluster and returns the response, which must arrive within `limit`. Its maximum size is 1 MiB.
///
/// # Errors
///
/// Any failure of an upstream, and [`Kind::BodyTooLarge`].
pub(crate) async fn send_request(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    cluster: &str,
    head: &RequestHead,
    content: &[u8],
    limit: Duration,
) -> Result<CallResponse, Error> {
    let pool = worker.pool(cluster, snapshot).ok_or_else(|| Error::new(Kind::ClusterNotFound(503)))?;
    let (host, _busy) = select_host(worker, &pool)?;
    let exchange = exchange(worker, &pool, &host, head, content);
    let result = timer::timeout(limit, exchange).await;
    let result = result.unwrap_or_else(|| Err(Error::new(Kind::ResponseTimeout)));
    match &result {
        Ok(answer) => pool.note(&host.endpoint, UpstreamResult::Answered(answer.head.status()), &worker.rng),
        Err(error) => pool.note_failure(&host.endpoint, &error.kind, &worker.rng),
    }
    result
}

/// Selects an endpoint, and counts the call as a request for the cluster's circuit breaker.
///
/// # Errors
///
/// There is no healthy endpoint, or the cluster has as many requests as it allows.
pub(crate) fn select_host(worker: &Worker, pool: &Rc<Pool>) -> Result<(Rc<Host>, ActiveRequest), Error> {
    // A call has no original destination.
    let unspecified = std::net::SocketAddr::from(([0, 0, 0, 0], 0));
    let host = pick::endpoint(&worker.rng, pool, unspecified, PickOptions::default())?;
    let busy = pool.begin(&host).ok_or_else(|| Error::new(Kind::Overflow))?;
    Ok((host, busy))
}

async fn exchange(
    worker: &Worker,
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    head: &RequestHead,
    content: &[u8],
) -> Result<CallResponse, Error> {
    let mut upstream = connection(worker, pool, host, head).await?;
    let framing = Framing::Length(content.len() as u64);
    upstream.wire.request(head, framing, Persistence::Keep)?;
    let mut body = Flow::whole(content, framing, None);
    poll_fn(|cx| body.poll_send(cx, &mut upstream.wire))
        .await
        .map_err(|_| Error::new(Kind::UpstreamClosed))?;
    let is_connect = head.method() == "CONNECT";
    let limits = pool.cluster.head_limits();
    let (head, answer, connection) = response::answer(&mut upstream.wire, head.method(), &limits).await?;
    let mut answer = Flow::new(answer, answer, limits, true);
    poll_fn(|cx| answer.poll_collect(cx, &mut upstream.wire, MAX_RESPONSE))
        .await
        .map_err(|_| Error::new(Kind::UpstreamClosed))?;
    let whole = answer.kept().filter(|_| answer.is_collected());
    let content = whole.ok_or_else(|| Error::new(Kind::BodyTooLarge))?.to_vec();
    let trailers = answer.trailers().cloned();
    // The bytes after a response to CONNECT belong to no response.
    if !connection.close && !is_connect {
        upstream.give_back(Instant::now());
    }
    Ok(CallResponse { head, content, trailers })
}

async fn connection(
    worker: &Worker,
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    head: &RequestHead,
) -> Result<Upstream, Error> {
    let offer = AlpnOffer::http(&pool.cluster, head, false);
    // A pooled connection that the server has closed in the meantime is not used.
    let pooled = upstream::take(pool, host, &offer)?.and_then(|mut one| one.is_quiet_now().then_some(one));
    match pooled {
        Some(pooled) => Ok(pooled),
        None => upstream::get(pool, host, &offer, &worker.shared.dialer, true).await,
    }
}

/// A streaming gRPC call. Unless [`CallStream::poll_receive`] is used, responses only show the end of the call.
pub(crate) struct CallStream {
    duplex: Box<Duplex>,
    link: Rc<Link>,
    _busy: ActiveRequest,
    new: bool,
    answered: bool,
    /// Bytes of the response that are not a whole message yet.
    unread: Vec<u8>,
}

/// Failure of a gRPC call.
#[derive(Debug)]
pub(crate) struct CallFailure {
    /// gRPC status.
    pub(crate) status: u32,
    /// The server's message, still percent-encoded.
    pub(crate) message: Box<str>,
}

/// gRPC statuses.
const RESOURCE_EXHAUSTED: u32 = 8;
pub(crate) const INTERNAL: u32 = 13;
pub(crate) const UNAVAILABLE: u32 = 14;

/// Returns the result of a call with these trailers.
fn ended(trailers: &Headers) -> Result<Option<Vec<u8>>, CallFailure> {
    let message = trailers.header("grpc-message").unwrap_or_default();
    match grpc_status::in_fields(trailers) {
        Some(0) => Ok(None),
        status => Err(CallFailure {
            status: status.unwrap_or(UNAVAILABLE),
            message: String::from_utf8_lossy(message).into(),
        }),
    }
}

impl CallStream {
    /// Begins a call.
    ///
    /// # Errors
    ///
    /// Any failure of an upstream, and an upstream that does not use HTTP/2.
    pub(crate) async fn open(
        worker: &Rc<Worker>,
        snapshot: &Snapshot,
        cluster: &str,
        head: &RequestHead,
    ) -> Result<Self, Error> {
        let pool = worker.pool(cluster, snapshot).ok_or_else(|| Error::new(Kind::ClusterNotFound(503)))?;
        let (host, busy) = select_host(worker, &pool)?;
        let opened = connection(worker, &pool, &host, head).await;
        if let Err(error) = &opened {
            pool.note_failure(&host.endpoint, &error.kind, &worker.rng);
        }
        let Upstream { wire, link } = opened?;
        let Wire::Http2(mut duplex) = wire else {
            return Err(Error::caused(Kind::UpstreamProtocol, "the cluster does not speak HTTP/2"));
        };
        duplex.request(head, false, false)?;
        Ok(Self { duplex, link, _busy: busy, new: true, answered: false, unread: Vec::new() })
    }

    /// Returns whether no message has been sent.
    pub(crate) fn is_new(&self) -> bool {
        self.new
    }

    /// Returns whether the call is still open: the server has not ended it, and the connection has not
    /// failed.
    pub(crate) fn is_open(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        let mut head = ResponseHead::default();
        while !self.answered {
            match self.duplex.poll_answer(&mut cx, "POST", &mut head) {
                Poll::Pending => return !self.duplex.is_closed(&mut cx),
                Poll::Ready(Ok(Answered::Interim)) => {}
                Poll::Ready(Ok(Answered::Final(_))) => self.answered = true,
                Poll::Ready(Err(_)) => return false,
            }
        }
        while let Poll::Ready(piece) = self.duplex.poll_piece(&mut cx) {
            match piece {
                Ok(Some(piece)) => self.duplex.release(piece.len()),
                _ => return false,
            }
        }
        !self.duplex.is_closed(&mut cx)
    }

    /// Returns whether the connection is still valid for new calls, or the worker ends. If not, a new call uses another
    /// connection.
    pub(crate) fn is_current(&self, worker: &Worker) -> bool {
        worker.is_ending() || self.link.is_good()
    }

    /// Sends a framed message.
    ///
    /// # Errors
    ///
    /// The server has ended the call.
    pub(crate) async fn send(&mut self, mut frame: &[u8]) -> Result<(), Error> {
        self.new = false;
        let reset = |_| Error::new(Kind::UpstreamReset);
        while !frame.is_empty() {
            let room = poll_fn(|cx| self.duplex.poll_room(cx, frame.len())).await.map_err(reset)?;
            self.duplex.send(&frame[..room], false).map_err(reset)?;
            frame = &frame[room..];
        }
        Ok(())
    }

    /// Sends the first part of a framed message, as far as the window allows. Returns its length.
    ///
    /// # Errors
    /// The server has ended the call.
    pub(crate) fn poll_send(&mut self, cx: &mut Context<'_>, frame: &[u8]) -> Poll<Result<usize, Error>> {
        let reset = |_| Error::new(Kind::UpstreamReset);
        let room = ready!(self.duplex.poll_room(cx, frame.len())).map_err(reset)?;
        self.new = false;
        Poll::Ready(self.duplex.send(&frame[..room], false).map(|()| room).map_err(reset))
    }

    /// Returns the next message of the server, of at most `max_bytes` bytes; `None` at the end of a successful call.
    ///
    /// # Errors
    /// The call fails, or the message is too large or compressed.
    pub(crate) fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        max_bytes: usize,
    ) -> Poll<Result<Option<Vec<u8>>, CallFailure>> {
        let unavailable = |_| CallFailure { status: UNAVAILABLE, message: Box::default() };
        let mut head = ResponseHead::default();
        while !self.answered {
            let answer = ready!(self.duplex.poll_answer(cx, "POST", &mut head)).map_err(unavailable)?;
            if let Answered::Final(_) = answer {
                self.answered = true;
                if head.status() != 200 {
                    let status = grpc_status::from_http(head.status());
                    return Poll::Ready(Err(CallFailure { status, message: Box::default() }));
                }
                if head.has("grpc-status") {
                    return Poll::Ready(ended(head.headers()));
                }
            }
        }
        loop {
            if let Some((flag, length)) = self.unread.split_first_chunk::<5>().map(|(prefix, _)| {
                let [flag, length @ ..] = *prefix;
                (flag, u32::from_be_bytes(length) as usize)
            }) {
                if flag != 0 || length > max_bytes {
                    let message = format!("a message of {length} bytes, flags {flag}").into();
                    return Poll::Ready(Err(CallFailure { status: RESOURCE_EXHAUSTED, message }));
                }
                if self.unread.len() >= 5 + length {
                    let rest = self.unread.split_off(5 + length);
                    let message = std::mem::replace(&mut self.unread, rest).split_off(5);
                    return Poll::Ready(Ok(Some(message)));
                }
            }
            match ready!(self.duplex.poll_piece(cx)).map_err(unavailable)? {
                Some(piece) => {
                    self.unread.extend_from_slice(&piece);
                    self.duplex.release(piece.len());
                }
                None => return Poll::Ready(ended(&self.duplex.trailers().unwrap_or_default())),
            }
        }
    }

    /// Ends the call without waiting for the server.
    pub(crate) fn abandon(mut self) {
        // If the server has ended the call, there is nothing to end.
        let _ = self.duplex.send(b"", true);
    }

    /// Ends the call and waits for the server to end it.
    pub(crate) async fn finish(mut self) {
        if self.duplex.send(b"", true).is_ok() {
            if !self.answered {
                poll_fn(|cx| self.duplex.poll_ignored(cx)).await;
            }
            while let Ok(Some(piece)) = poll_fn(|cx| self.duplex.poll_piece(cx)).await {
                self.duplex.release(piece.len());
            }
        }
    }
}

/// Returns the head of a gRPC call.
pub(crate) fn grpc_head(path: &str, authority: &str) -> RequestHead {
    let fields = [("content-type", "application/grpc"), ("te", "trailers")];
    let mut head = RequestHead::build("POST", path, authority, &fields);
    head.version = Version::Http2;
    head
}

/// Frames a gRPC message: flag 0 (not compressed), length, message.
pub(crate) fn grpc_frame(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut frame = vec![0];
    frame.extend_from_slice(&length.to_be_bytes());
    frame.extend_from_slice(message);
    frame
}

/// Returns the message of a unary gRPC response.
///
/// # Errors
///
/// The call failed, with its gRPC status, or the response is not gRPC.
pub(crate) fn grpc_message(answer: &CallResponse) -> Result<&[u8], Error> {
    let failed = |what: String| Err(Error::caused(Kind::UpstreamProtocol, what));
    let fields = answer.trailers.as_ref().unwrap_or_else(|| answer.head.headers());
    let text = |name| fields.header(name).map(String::from_utf8_lossy).unwrap_or_default();
    match (answer.head.status(), &*text("grpc-status")) {
        (200, "0") => {}
        (200, status) => return failed(format!("gRPC status {status}: {}", text("grpc-message"))),
        (status, _) => return failed(format!("HTTP status {status}")),
    }
    match answer.content.split_first_chunk::<5>() {
        Some(([0, length @ ..], message)) if u32::from_be_bytes(*length) as usize == message.len() => {
            Ok(message)
        }
        _ => failed("the response has no gRPC message".to_owned()),
    }
}
