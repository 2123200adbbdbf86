//! Moves the bytes of one attempt: the request to the upstream, then the response to the client.
//!
//! Both directions move at the same time, because HTTP allows a response before the request is complete. The methods of
//! [`Client`] that wait, such as [`Client::request`], also watch the client's connection and the deadlines.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use crate::{
    request::context::Exchange,
    upstream::response::{poll_answer, poll_head},
    worker::downstream::Downstream,
};
use skysail_http::{
    flow::Flow,
    head::ResponseHead,
    http1::{ConnectionOptions, Framing, HeadLimits, Scan},
    stage::TransferError,
    timer::{self, Timer, earlier},
    wire::Wire,
};
use skysail_policy::{
    config::HttpManager,
    error::{Error, Kind},
};

/// Number of interim responses (1xx) read in one poll before the task yields to others.
const INTERIM_PER_POLL: usize = 64;

/// The time limits of a request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Deadlines {
    /// Time limit of the whole response, counted from the end of the request.
    timeout: Option<Duration>,
    /// Time limit of the response's head in each attempt, counted from the end of the request.
    try_timeout: Option<Duration>,
    /// Deadline of the complete request.
    request: Option<Instant>,
    /// Deadline of the whole exchange.
    pub(crate) whole: Option<Instant>,
    /// Deadline of a request that the configuration in effect no longer admits.
    revoked: Option<Instant>,
    /// Time limit without any progress.
    pub(crate) idle_timeout: Option<Duration>,
    /// Deadline of the response; set once the request is complete.
    response: Option<Instant>,
    /// Deadline of the response's head in the current attempt.
    attempt: Option<Instant>,
    idle: Option<Instant>,
    /// Number of bytes moved in total at the last progress.
    moved: u64,
}

/// The client's side of an exchange.
pub(crate) struct Client<'a> {
    pub(crate) wire: &'a mut Wire,
    pub(crate) timer: &'a mut Timer,
    pub(crate) deadlines: &'a mut Deadlines,
    /// The request's body.
    pub(crate) body: &'a mut Flow,
    /// Whether the whole request has been sent to this upstream.
    pub(crate) complete: bool,
    /// Whether the upstream accepts no more of the request; its response may still arrive.
    pub(crate) stalled: bool,
    /// Whether interim responses (1xx) may be forwarded.
    pub(crate) interim: bool,
}

impl Deadlines {
    /// Returns deadlines with these limits and no others.
    pub(crate) fn new(
        timeout: Option<Duration>,
        try_timeout: Option<Duration>,
        request: Option<Instant>,
        idle_timeout: Option<Duration>,
    ) -> Self {
        Self { timeout, try_timeout, request, idle_timeout, ..Self::default() }
    }

    /// Starts the response timeout. The whole request has arrived, but it may still wait for an upstream
    /// connection.
    fn start_response(&mut self, now: Instant) {
        if self.response.is_none() {
            self.response = self.timeout.map(|timeout| now + timeout);
        }
    }

    /// Starts the timeouts that count from the end of the request, once it has been sent.
    fn start_attempt(&mut self, now: Instant) {
        self.start_response(now);
        self.attempt = self.try_timeout.map(|timeout| now + timeout);
    }

    /// Clears the deadline of the attempt.
    pub(crate) fn next_attempt(&mut self) {
        self.attempt = None;
    }

    /// Restarts the idle timeout if the total of bytes has changed.
    fn note_progress(&mut self, total: u64) {
        if let Some(timeout) = self.idle_timeout
            && (self.idle.is_none() || self.moved != total)
        {
            self.moved = total;
            self.idle = Some(Instant::now() + timeout);
        }
    }

    /// Returns the kind of the deadline that has passed; pending until then.
    fn poll(
        &self,
        cx: &mut Context<'_>,
        timer: &mut Timer,
        complete: bool,
        awaiting_head: bool,
    ) -> Poll<Kind> {
        let request = self.request.filter(|_| !complete);
        let attempt = self.attempt.filter(|_| awaiting_head);
        let next = earlier(earlier(self.response, attempt), earlier(request, self.idle));
        let next = earlier(earlier(next, self.whole), self.revoked);
        if next.is_none() {
            return Poll::Pending;
        }
        timer.poll(cx, next).map(|()| {
            let passed = |deadline: Option<Instant>| deadline.is_some() && deadline == next;
            if passed(self.response) {
                Kind::ResponseTimeout
            } else if passed(attempt) {
                Kind::TryTimeout
            } else if passed(self.revoked) {
                Kind::Revoked
            } else if passed(self.whole) {
                Kind::StreamDuration(complete)
            } else if passed(request) {
                Kind::RequestTimeout
            } else {
                Kind::StreamIdle(complete)
            }
        })
    }
}

impl<'a> Client<'a> {
    /// Returns the client's side of a request whose body has not been sent yet.
    pub(crate) fn new(
        downstream: &'a mut Downstream,
        deadlines: &'a mut Deadlines,
        body: &'a mut Flow,
        interim: bool,
    ) -> Self {
        let Downstream { wire, timer, .. } = downstream;
        Self { wire, timer, deadlines, body, complete: false, stalled: false, interim }
    }

    /// Waits for a future that moves no bytes of this exchange, such as a new connection or a delay.
    pub(crate) async fn wait<T>(
        &mut self,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut future = pin!(future);
        poll_fn(|cx| {
            if let Poll::Ready(result) = future.as_mut().poll(cx) {
                return Poll::Ready(result);
            }
            if self.wire.is_closed(cx) {
                return Poll::Ready(Err(Error::new(Kind::DownstreamClosed)));
            }
            if self.body.has_arrived(self.wire) {
                self.deadlines.start_response(Instant::now());
            }
            self.deadlines.poll(cx, self.timer, false, true).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Sends the request's body and waits for the response's head. `revoked` returns the deadline of a request that is
    /// no longer admitted.
    pub(crate) async fn request(
        &mut self,
        upstream: &mut Wire,
        method: &str,
        limits: &HeadLimits,
        head: &mut ResponseHead,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Result<(Framing, ConnectionOptions), Error> {
        // `forwarded`: an interim response has been forwarded. `held`: the one in `head` waits for space.
        let (mut scan, mut forwarded, mut held) = (Scan::default(), false, false);
        poll_fn(|cx| {
            let before = upstream.received();
            self.poll_request(cx, upstream)?;
            for turn in 0.. {
                if held {
                    match self.wire.poll_space(cx) {
                        Poll::Pending => break,
                        Poll::Ready(Ok(())) => self.wire.interim(head, method),
                        Poll::Ready(Err(_)) => return failed(Kind::DownstreamClosed),
                    }
                    held = false;
                }
                if turn == INTERIM_PER_POLL {
                    cx.waker().wake_by_ref();
                    break;
                }
                let answer = match upstream {
                    Wire::Http1(stream) => poll_head(cx, stream, (&mut scan, limits), method, head),
                    Wire::Http2(duplex) => poll_answer(cx, duplex, method, head),
                };
                match answer {
                    Poll::Pending => break,
                    Poll::Ready(Ok(None)) if !self.interim => {}
                    // Interim responses are read only as fast as the client reads them. The first one is
                    // forwarded without a wait, because a wait would delay the final response.
                    Poll::Ready(Ok(None)) if forwarded => held = true,
                    Poll::Ready(Ok(None)) => {
                        self.wire.interim(head, method);
                        forwarded = true;
                    }
                    Poll::Ready(Ok(Some(answer))) => return Poll::Ready(Ok(answer)),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                }
            }
            if matches!(self.wire.poll_flush(cx), Poll::Ready(Err(_))) || self.is_closed(cx) {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.note_progress(before + upstream.sent());
            self.deadlines.revoked = revoked();
            self.deadlines.poll(cx, self.timer, self.complete, true).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Forwards the response's body until all of it has been written to the client. `revoked` is as in
    /// [`Self::request`].
    pub(crate) async fn respond(
        &mut self,
        upstream: &mut Wire,
        body: &mut Flow,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Result<(), Error> {
        poll_fn(|cx| {
            match body.poll(cx, upstream, self.wire) {
                Poll::Ready(Ok(())) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(TransferError::Receiver)) => return failed(Kind::DownstreamClosed),
                // An HTTP/1.1 message can end early only by the end of its connection.
                Poll::Ready(Err(TransferError::Sender)) if matches!(upstream, Wire::Http1(_)) => {
                    return failed(Kind::UpstreamProtocol);
                }
                Poll::Ready(Err(TransferError::Sender)) => return failed(Kind::UpstreamClosed),
                Poll::Ready(Err(TransferError::Malformed)) => return failed(Kind::UpstreamProtocol),
                Poll::Ready(Err(TransferError::Stage)) => return failed(Kind::ProcessorEnded),
                Poll::Pending => {}
            }
            self.poll_request(cx, upstream)?;
            if self.is_closed(cx) {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.note_progress(upstream.received() + upstream.sent() + self.wire.sent());
            self.deadlines.revoked = revoked();
            self.deadlines.poll(cx, self.timer, self.complete, false).map(|kind| Err(Error::new(kind)))
        })
        .await
        .map_err(Error::after_response_started)
    }

    /// Reads the response's body to its end, or until it exceeds `limit` bytes, while the rest of the request is sent.
    /// `revoked` is as in [`Self::request`].
    pub(crate) async fn collect(
        &mut self,
        upstream: &mut Wire,
        body: &mut Flow,
        limit: usize,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Result<(), Error> {
        poll_fn(|cx| {
            match body.poll_collect(cx, upstream, limit) {
                Poll::Ready(Ok(())) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(TransferError::Malformed)) => return failed(Kind::UpstreamProtocol),
                Poll::Ready(Err(TransferError::Stage)) => return failed(Kind::ProcessorEnded),
                Poll::Ready(Err(_)) => return failed(Kind::UpstreamClosed),
                Poll::Pending => {}
            }
            self.poll_request(cx, upstream)?;
            if self.is_closed(cx) {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.note_progress(upstream.received() + upstream.sent());
            self.deadlines.revoked = revoked();
            self.deadlines.poll(cx, self.timer, self.complete, false).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Waits for `ready`, such as an answer of an external processor, while the rest of the request is sent and `body`,
    /// the response's body, is given to its stage. `revoked` is as in [`Self::request`].
    pub(crate) async fn process<T>(
        &mut self,
        upstream: &mut Wire,
        mut body: Option<&mut Flow>,
        mut ready: impl FnMut(&mut Context<'_>) -> Poll<T>,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Result<T, Error> {
        poll_fn(|cx| {
            if let Poll::Ready(found) = ready(cx) {
                return Poll::Ready(Ok(found));
            }
            match body.as_mut().map(|body| body.poll_fill_stage(cx, upstream)) {
                Some(Poll::Ready(Err(TransferError::Malformed))) => return failed(Kind::UpstreamProtocol),
                Some(Poll::Ready(Err(TransferError::Stage))) => return failed(Kind::ProcessorEnded),
                Some(Poll::Ready(Err(_))) => return failed(Kind::UpstreamClosed),
                // What the stage has taken is sent to the processor by the next poll.
                Some(_) => {
                    if let Poll::Ready(found) = ready(cx) {
                        return Poll::Ready(Ok(found));
                    }
                }
                None => {}
            }
            self.poll_request(cx, upstream)?;
            if self.is_closed(cx) {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.note_progress(upstream.received() + upstream.sent());
            self.deadlines.revoked = revoked();
            self.deadlines.poll(cx, self.timer, self.complete, false).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Returns whether the client has closed its end. Also registers an HTTP/2 stream to be woken when its
    /// connection is revalidated.
    fn is_closed(&mut self, cx: &mut Context<'_>) -> bool {
        // While HTTP/1.1 content is to come, its transfer reads the connection.
        let is_watched = matches!(self.wire, Wire::Http2(_)) || self.body.has_arrived(self.wire);
        is_watched && self.wire.is_closed(cx)
    }

    /// Sends more of the request. A failure of the upstream is no error here, because its response may still arrive.
    fn poll_request(&mut self, cx: &mut Context<'_>, upstream: &mut Wire) -> Result<(), Error> {
        if self.complete || self.stalled {
            return Ok(());
        }
        match self.body.poll(cx, self.wire, upstream) {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => {
                self.complete = true;
                if self.deadlines.timeout.is_some() || self.deadlines.try_timeout.is_some() {
                    self.deadlines.start_attempt(Instant::now());
                }
            }
            Poll::Ready(Err(TransferError::Receiver)) => self.stalled = true,
            Poll::Ready(Err(TransferError::Sender)) => return Err(Error::new(Kind::DownstreamClosed)),
            Poll::Ready(Err(TransferError::Malformed)) => return Err(Error::new(Kind::DownstreamProtocol)),
            Poll::Ready(Err(TransferError::Stage)) => return Err(Error::new(Kind::ProcessorEnded)),
        }
        Ok(())
    }
}

fn failed<T>(kind: Kind) -> Poll<Result<T, Error>> {
    Poll::Ready(Err(Error::new(kind)))
}

/// Waits for `delay`, unless the client closes its connection or a deadline passes first.
pub(crate) async fn pause(
    exchange: &mut Exchange<'_>,
    delay: Duration,
    deadlines: &mut Deadlines,
) -> Result<(), Error> {
    let sleep = async {
        timer::sleep(delay).await;
        Ok(())
    };
    Client::new(exchange.downstream, deadlines, &mut exchange.body, false).wait(Box::pin(sleep)).await
}

/// Waits for a call of this proxy, unless the client closes its connection.
pub(crate) async fn unless_closed<T>(
    exchange: &mut Exchange<'_>,
    call: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    Client::new(exchange.downstream, &mut Deadlines::default(), &mut exchange.body, false).wait(call).await
}

/// Sends the interim response that the client waits for before it sends the body.
pub(crate) fn send_continue(exchange: &mut Exchange<'_>) {
    if exchange.request.header("expect").is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue")) {
        exchange.request.remove("expect");
        exchange.downstream.wire.interim(&ResponseHead::build(100, &[]), exchange.request.method());
    }
}

/// Waits for `ready`, an answer of an external processor, while the request's body is given to its stage.
///
/// # Errors
/// The client or the stage fails, or a deadline passes.
pub(crate) async fn fill_stage<T>(
    mut deadlines: Deadlines,
    exchange: &mut Exchange<'_>,
    mut ready: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Result<T, Error> {
    let Downstream { wire, timer, .. } = &mut *exchange.downstream;
    let body = &mut exchange.body;
    poll_fn(|cx| {
        if let Poll::Ready(found) = ready(cx) {
            return Poll::Ready(Ok(found));
        }
        if matches!(wire.poll_flush(cx), Poll::Ready(Err(_))) || wire.is_closed(cx) {
            return failed(Kind::DownstreamClosed);
        }
        match body.poll_fill_stage(cx, wire) {
            Poll::Ready(Err(TransferError::Malformed)) => return failed(Kind::DownstreamProtocol),
            Poll::Ready(Err(TransferError::Stage)) => return failed(Kind::ProcessorEnded),
            Poll::Ready(Err(_)) => return failed(Kind::DownstreamClosed),
            Poll::Ready(Ok(())) | Poll::Pending => {}
        }
        // What the stage has taken is sent to the processor by the next poll.
        if let Poll::Ready(found) = ready(cx) {
            return Poll::Ready(Ok(found));
        }
        deadlines.note_progress(wire.received());
        deadlines.poll(cx, timer, body.has_arrived(wire), false).map(|kind| Err(Error::new(kind)))
    })
    .await
}

/// Reads the request's body until its end, or until more than `limit` bytes are kept.
pub(crate) async fn collect(
    manager: &HttpManager,
    exchange: &mut Exchange<'_>,
    limit: usize,
) -> Result<(), Error> {
    send_continue(exchange);
    let (wire, body) = (&mut exchange.downstream.wire, &mut exchange.body);
    let read = poll_fn(|cx| {
        if matches!(wire.poll_flush(cx), Poll::Ready(Err(_))) {
            return Poll::Ready(Err(TransferError::Receiver));
        }
        body.poll_collect(cx, wire, limit)
    });
    let late = match manager.request_timeout {
        Some(_) => Kind::RequestTimeout,
        None => Kind::StreamIdle(false),
    };
    let timeout = manager.request_timeout.or(manager.stream_idle_timeout);
    let read = match timeout {
        Some(timeout) => timer::timeout(timeout, read).await,
        None => Some(read.await),
    };
    match read {
        Some(Ok(())) => Ok(()),
        Some(Err(TransferError::Malformed)) => Err(Error::new(Kind::DownstreamProtocol)),
        Some(Err(TransferError::Stage)) => Err(Error::new(Kind::ProcessorEnded)),
        Some(Err(_)) => Err(Error::new(Kind::DownstreamClosed)),
        None => Err(Error::new(late)),
    }
}
