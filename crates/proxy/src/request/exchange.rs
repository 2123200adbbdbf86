//! One try at one upstream: the request goes out, the answer's head comes in, then its body goes to the client.
//!
//! Both directions move at the same time, as HTTP allows an answer before the request is complete. All waiting
//! is done in three places here, each of which also watches the client and the deadlines.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use crate::{
    upstream::response::{poll_answer, poll_head},
    worker::downstream::Downstream,
};
use skysail_http::{
    flow::{Broken, Flow},
    head::ResponseHead,
    http1::{ConnectionOptions, Framing, HeadLimits, Scan},
    timer::{Timer, earlier},
    wire::Wire,
};
use skysail_policy::error::{Error, Kind};

/// Interim answers (1xx) taken in one turn, after which other tasks come first.
const TURN: usize = 64;

/// When an exchange must be over, at each of its stages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Deadlines {
    /// The whole answer, counted from the end of the request.
    timeout: Option<Duration>,
    /// The head of the answer, counted from the end of the request.
    try_timeout: Option<Duration>,
    /// The request itself.
    request: Option<Instant>,
    /// All of it.
    pub(crate) whole: Option<Instant>,
    /// It would not be admitted any more.
    revoked: Option<Instant>,
    /// Any movement.
    pub(crate) idle_timeout: Option<Duration>,
    /// Set once the request is complete.
    answer: Option<Instant>,
    this_try: Option<Instant>,
    idle: Option<Instant>,
    moved: u64,
}

/// The client's side of an exchange.
pub(crate) struct Client<'a> {
    pub(crate) wire: &'a mut Wire,
    pub(crate) timer: &'a mut Timer,
    pub(crate) deadlines: &'a mut Deadlines,
    /// The request's body.
    pub(crate) body: &'a mut Flow,
    /// All of the request has been sent to this upstream.
    pub(crate) complete: bool,
    /// The upstream takes no more of the request; its answer may still come.
    pub(crate) stalled: bool,
    /// Interim answers (1xx) may be passed on.
    pub(crate) interim: bool,
}

impl Deadlines {
    /// No deadlines but these.
    pub(crate) fn new(
        timeout: Option<Duration>,
        try_timeout: Option<Duration>,
        request: Option<Instant>,
        idle_timeout: Option<Duration>,
    ) -> Self {
        Self { timeout, try_timeout, request, idle_timeout, ..Self::default() }
    }

    /// Starts the clock of the whole answer: the request is here, though it may still wait for a connection.
    fn received(&mut self, now: Instant) {
        if self.answer.is_none() {
            self.answer = self.timeout.map(|timeout| now + timeout);
        }
    }

    /// Starts the clocks that run from the end of the request, once it is sent.
    fn start(&mut self, now: Instant) {
        self.received(now);
        self.this_try = self.try_timeout.map(|timeout| now + timeout);
    }

    /// Forgets the clock of one try.
    pub(crate) fn next_try(&mut self) {
        self.this_try = None;
    }

    /// Takes notice of how much has moved so far.
    fn movement(&mut self, total: u64) {
        if let Some(timeout) = self.idle_timeout
            && (self.idle.is_none() || self.moved != total)
        {
            self.moved = total;
            self.idle = Some(Instant::now() + timeout);
        }
    }

    /// Ready with what has passed.
    fn poll(
        &self,
        cx: &mut Context<'_>,
        timer: &mut Timer,
        complete: bool,
        awaiting_head: bool,
    ) -> Poll<Kind> {
        let request = self.request.filter(|_| !complete);
        let this_try = self.this_try.filter(|_| awaiting_head);
        let next = earlier(earlier(self.answer, this_try), earlier(request, self.idle));
        let next = earlier(earlier(next, self.whole), self.revoked);
        if next.is_none() {
            return Poll::Pending;
        }
        timer.poll(cx, next).map(|()| {
            let passed = |deadline: Option<Instant>| deadline.is_some() && deadline == next;
            if passed(self.answer) {
                Kind::ResponseTimeout
            } else if passed(this_try) {
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
    /// The client's side; the request's body has not been sent yet.
    pub(crate) fn new(
        downstream: &'a mut Downstream,
        deadlines: &'a mut Deadlines,
        body: &'a mut Flow,
        interim: bool,
    ) -> Self {
        let Downstream { wire, timer, .. } = downstream;
        Self { wire, timer, deadlines, body, complete: false, stalled: false, interim }
    }

    /// Waits for something that has to do with neither side, such as a connection or a pause.
    pub(crate) async fn wait<T>(
        &mut self,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut future = pin!(future);
        poll_fn(|cx| {
            if let Poll::Ready(result) = future.as_mut().poll(cx) {
                return Poll::Ready(result);
            }
            if self.wire.is_gone(cx) {
                return Poll::Ready(Err(Error::new(Kind::DownstreamClosed)));
            }
            if self.body.has_arrived(self.wire) {
                self.deadlines.received(Instant::now());
            }
            self.deadlines.poll(cx, self.timer, false, true).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Sends the request (its head is sent already) and waits for the answer's head. `revoked` says until when it may go on.
    pub(crate) async fn request(
        &mut self,
        upstream: &mut Wire,
        method: &str,
        limits: &HeadLimits,
        head: &mut ResponseHead,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Result<(Framing, ConnectionOptions), Error> {
        // Whether an interim answer has been passed on, and whether the one in `head` waits to be.
        let (mut scan, mut passed, mut held) = (Scan::default(), false, false);
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
                if turn == TURN {
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
                    // Interim answers are taken only as fast as the client takes them, except the first: the answer, which
                    // comes after it, would be late.
                    Poll::Ready(Ok(None)) if passed => held = true,
                    Poll::Ready(Ok(None)) => {
                        self.wire.interim(head, method);
                        passed = true;
                    }
                    Poll::Ready(Ok(Some(answer))) => return Poll::Ready(Ok(answer)),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                }
            }
            if matches!(self.wire.poll_flush(cx), Poll::Ready(Err(_))) || self.is_gone(cx) {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.movement(before + upstream.sent());
            self.deadlines.revoked = revoked();
            self.deadlines.poll(cx, self.timer, self.complete, true).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Passes the answer's body on (its head is sent already). Ready when the client has it. `revoked` says until when it may
    /// go on.
    pub(crate) async fn respond(
        &mut self,
        upstream: &mut Wire,
        body: &mut Flow,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Result<(), Error> {
        poll_fn(|cx| {
            match body.poll(cx, upstream, self.wire) {
                Poll::Ready(Ok(())) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(Broken::Receiver)) => return failed(Kind::DownstreamClosed),
                // HTTP/1.1 has no other way to end before the end it has told.
                Poll::Ready(Err(Broken::Sender)) if matches!(upstream, Wire::Http1(_)) => {
                    return failed(Kind::UpstreamProtocol);
                }
                Poll::Ready(Err(Broken::Sender)) => return failed(Kind::UpstreamClosed),
                Poll::Ready(Err(Broken::Malformed)) => return failed(Kind::UpstreamProtocol),
                Poll::Pending => {}
            }
            self.poll_request(cx, upstream)?;
            if self.is_gone(cx) {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.movement(upstream.received() + self.wire.sent());
            self.deadlines.revoked = revoked();
            self.deadlines.poll(cx, self.timer, self.complete, false).map(|kind| Err(Error::new(kind)))
        })
        .await
        .map_err(Error::after_response_started)
    }

    /// Whether the client has gone. A stream of HTTP/2 also waits here for its connection to be judged again.
    fn is_gone(&mut self, cx: &mut Context<'_>) -> bool {
        if self.body.is_read() { self.wire.is_gone(cx) } else { self.wire.is_lost(cx) }
    }

    /// Moves the request on. Only what the client does wrong is an error here.
    fn poll_request(&mut self, cx: &mut Context<'_>, upstream: &mut Wire) -> Result<(), Error> {
        if self.complete || self.stalled {
            return Ok(());
        }
        match self.body.poll(cx, self.wire, upstream) {
            Poll::Pending => {}
            Poll::Ready(Ok(())) => {
                self.complete = true;
                if self.deadlines.timeout.is_some() || self.deadlines.try_timeout.is_some() {
                    self.deadlines.start(Instant::now());
                }
            }
            Poll::Ready(Err(Broken::Receiver)) => self.stalled = true,
            Poll::Ready(Err(Broken::Sender)) => return Err(Error::new(Kind::DownstreamClosed)),
            Poll::Ready(Err(Broken::Malformed)) => return Err(Error::new(Kind::DownstreamProtocol)),
        }
        Ok(())
    }
}

fn failed<T>(kind: Kind) -> Poll<Result<T, Error>> {
    Poll::Ready(Err(Error::new(kind)))
}
