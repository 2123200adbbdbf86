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
    buffer::BLOCK,
    connection::Downstream,
    error::{Error, Kind},
    head::ResponseHead,
    http1::{
        Connection, Framing, Limits, Scan,
        flow::{Broken, Flow},
        parse,
        write::{self, Persistence},
    },
    pool::Upstream,
    socket::Stream,
    timer::{Timer, earlier},
};

/// Heads of answers may be as large as Envoy takes them.
pub(crate) const RESPONSE_LIMITS: Limits = Limits { max_head: 60 * 1024, max_headers: 100 };

/// When an exchange must be over, at each of its stages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Deadlines {
    /// The whole answer, counted from the end of the request.
    timeout: Option<Duration>,
    /// The head of the answer, counted from the end of the request.
    try_timeout: Option<Duration>,
    /// The request itself.
    request: Option<Instant>,
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
    pub(crate) stream: &'a mut Stream,
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
        if next.is_none() {
            return Poll::Pending;
        }
        timer.poll(cx, next).map(|()| {
            let passed = |deadline: Option<Instant>| deadline.is_some() && deadline == next;
            if passed(self.answer) {
                Kind::ResponseTimeout
            } else if passed(this_try) {
                Kind::TryTimeout
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
        let Downstream { stream, timer, .. } = downstream;
        Self { stream, timer, deadlines, body, complete: false, stalled: false, interim }
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
            if is_gone(cx, self.stream) {
                return Poll::Ready(Err(Error::new(Kind::DownstreamClosed)));
            }
            if self.body.has_arrived(self.stream) {
                self.deadlines.received(Instant::now());
            }
            self.deadlines.poll(cx, self.timer, false, true).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Sends the request (its head is in the output already) and waits for the answer's head.
    pub(crate) async fn request(
        &mut self,
        upstream: &mut Upstream,
        method: &str,
        head: &mut ResponseHead,
    ) -> Result<(Framing, Connection), Error> {
        let mut scan = Scan::default();
        poll_fn(|cx| {
            let before = upstream.stream.received;
            self.poll_request(cx, &mut upstream.stream)?;
            loop {
                // Interim answers are taken only as fast as the client takes them.
                if self.stream.output.len() >= BLOCK {
                    match self.stream.poll_flush(cx) {
                        Poll::Pending => break,
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(_)) => return failed(Kind::DownstreamClosed),
                    }
                }
                match scan.end(upstream.stream.input.bytes(), &RESPONSE_LIMITS) {
                    Err(_) => return failed(Kind::UpstreamProtocol),
                    Ok(Some(end)) => {
                        let bytes = &upstream.stream.input.bytes()[..end];
                        let parsed = parse::response(bytes, &RESPONSE_LIMITS, method, head);
                        upstream.stream.input.consume(end);
                        let Ok(parsed) = parsed else { return failed(Kind::UpstreamProtocol) };
                        if !matches!(head.status(), 100 | 102..=199) {
                            return Poll::Ready(Ok(parsed));
                        }
                        if self.interim {
                            let out = &mut self.stream.output;
                            write::response(out, head, Framing::None, method, Persistence::Keep);
                        }
                        continue;
                    }
                    Ok(None) => {}
                }
                if upstream.stream.input.is_full() {
                    upstream.stream.input.grow(RESPONSE_LIMITS.max_head);
                }
                match upstream.stream.poll_fill(cx) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(1..)) => {}
                    Poll::Ready(Ok(0)) => return failed(Kind::UpstreamClosed),
                    Poll::Ready(Err(error)) => {
                        return Poll::Ready(Err(Error::caused(Kind::UpstreamClosed, error)));
                    }
                }
            }
            if matches!(self.stream.poll_flush(cx), Poll::Ready(Err(_)))
                || (self.body.is_read() && is_gone(cx, self.stream))
            {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.movement(before + upstream.stream.sent);
            self.deadlines.poll(cx, self.timer, self.complete, true).map(|kind| Err(Error::new(kind)))
        })
        .await
    }

    /// Passes the answer's body on (its head is in the output already). Ready when the client's socket has it.
    pub(crate) async fn respond(&mut self, upstream: &mut Upstream, body: &mut Flow) -> Result<(), Error> {
        poll_fn(|cx| {
            match body.poll(cx, &mut upstream.stream, self.stream) {
                Poll::Ready(Ok(())) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(Broken::Receiver)) => return failed(Kind::DownstreamClosed),
                Poll::Ready(Err(Broken::Sender)) => return failed(Kind::UpstreamClosed),
                Poll::Ready(Err(Broken::Malformed)) => return failed(Kind::UpstreamProtocol),
                Poll::Pending => {}
            }
            self.poll_request(cx, &mut upstream.stream)?;
            if self.body.is_read() && is_gone(cx, self.stream) {
                return failed(Kind::DownstreamClosed);
            }
            self.deadlines.movement(upstream.stream.received + self.stream.sent);
            self.deadlines.poll(cx, self.timer, self.complete, false).map(|kind| Err(Error::new(kind)))
        })
        .await
        .map_err(Error::after_response_started)
    }

    /// Moves the request on. Only what the client does wrong is an error here.
    fn poll_request(&mut self, cx: &mut Context<'_>, upstream: &mut Stream) -> Result<(), Error> {
        if self.complete || self.stalled {
            return Ok(());
        }
        match self.body.poll(cx, self.stream, upstream) {
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

/// Whether the client has ended the connection. What it sends meanwhile (its next request) is kept, up to a block.
fn is_gone(cx: &mut Context<'_>, stream: &mut Stream) -> bool {
    while !stream.input.is_full() {
        match stream.poll_fill(cx) {
            Poll::Pending => return false,
            Poll::Ready(Ok(1..)) => {}
            Poll::Ready(_) => return true,
        }
    }
    false
}
