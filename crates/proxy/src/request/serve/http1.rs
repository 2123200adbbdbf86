//! HTTP/1.1 on a downstream connection: reads the requests one after the other and serves each by a [`RequestContext`].

use std::{
    cell::OnceCell,
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use super::{
    h2c::{self, UpgradedRequest},
    newest, refuse,
};
use crate::{
    overload::{admission::QueueSlot, drain::Registered},
    request::{
        context::{RequestContext, RequestScope},
        hop,
    },
    worker::{
        Worker,
        downstream::{self, Accepted, Downstream, Origin},
    },
};
use skysail_http::{
    head::{RequestHead, ResponseHead, Version},
    http1::{
        ConnectionOptions, Framing, HeadLimits, Malformed, Scan, parse,
        write::{self, Persistence},
    },
    socket::Stream,
    timer::earlier,
    wire::Wire,
};
use skysail_policy::config::HttpManager;

/// Serves a connection until it ends or turns out to be HTTP/2. In the second case, returns the connection:
/// it uses HTTP/2 from the start (only if `may_be_http2`), or after the upgrade request that is also
/// returned.
pub(crate) async fn run(
    worker: &Rc<Worker>,
    connection: Box<Accepted>,
    manager: &Arc<HttpManager>,
    may_be_http2: bool,
) -> Option<(Box<Accepted>, Option<UpgradedRequest>)> {
    let (mut downstream, registered) = split(*connection);
    let mut manager = manager.clone();
    let (mut may_be_http2, mut served) = (may_be_http2, 0);
    loop {
        // The future is boxed and freed during a pause, so that an idle connection takes little memory.
        match Box::pin(requests(worker, &mut downstream, &mut manager, &mut may_be_http2, &mut served)).await
        {
            Stop::Pause => {
                if !resumes(worker, &mut downstream, &manager).await {
                    return None;
                }
            }
            Stop::Http2(begun) => {
                let Downstream { wire, timer, origin } = downstream;
                let Wire::Http1(mut stream) = wire else { return None };
                if begun.is_some() {
                    stream.output.extend(h2c::SWITCHING_PROTOCOLS);
                }
                let connection = Accepted { stream, timer, origin, registered };
                return Some((Box::new(connection), begun.map(|begun| *begun)));
            }
            Stop::Close => break,
            Stop::End => return None,
        }
    }
    if let Wire::Http1(stream) = &mut downstream.wire {
        stream.close(&mut downstream.timer).await;
    }
    None
}

fn split(connection: Accepted) -> (Downstream, Registered) {
    let Accepted { stream, timer, origin, registered } = connection;
    (Downstream { wire: Wire::Http1(stream), timer, origin }, registered)
}

/// Reason why [`requests`] returned.
enum Stop {
    /// No request has arrived for [`PAUSE`].
    Pause,
    /// The connection uses HTTP/2, from the start or after an upgrade.
    Http2(Option<Box<UpgradedRequest>>),
    /// The connection must be closed after its output has been written.
    Close,
    /// The connection has ended.
    End,
}

/// Serves requests until none arrives for [`PAUSE`], or the connection ends.
async fn requests(
    worker: &Rc<Worker>,
    downstream: &mut Downstream,
    manager: &mut Arc<HttpManager>,
    may_be_http2: &mut bool,
    served: &mut u32,
) -> Stop {
    let mut counters = worker.shard.manager(&manager.stat_prefix);
    let (mut head, mut response) = (RequestHead::default(), ResponseHead::default());
    let mut forwarded_cert = downstream.origin.peer.forwarded_cert(manager.client_cert);
    loop {
        let (framing, connection) = match next(worker, downstream, manager, &mut head, *may_be_http2).await {
            Next::Request(framing, connection) => (framing, connection),
            Next::Preface => return Stop::Http2(None),
            Next::Refused(malformed) => {
                refuse_malformed(worker, downstream, manager, malformed);
                return Stop::Close;
            }
            Next::Pause => return Stop::Pause,
            Next::Close => return Stop::Close,
            Next::End => return Stop::End,
        };
        *may_be_http2 = false;
        if connection.upgrade
            && let Some(settings) = h2c::settings(manager, downstream, &head, framing)
        {
            return Stop::Http2(Some(Box::new(UpgradedRequest { head, settings })));
        }
        // If the newest configuration does not admit the connection, this request may still finish under the
        // previous one.
        let refreshed = downstream::refresh(&mut downstream.origin, worker);
        if let Err(end) = refreshed {
            downstream.origin.note_revoked(worker);
            if Instant::now() >= end {
                return Stop::Close;
            }
        }
        let mut is_last = refreshed.is_err() || downstream.origin.connections.is_draining();
        let was_too_old = downstream.origin.is_too_old(manager);
        if was_too_old {
            counters.cx_max_duration.inc();
            is_last = true;
        }
        if let Some(newest) = newest(&downstream.origin, manager) {
            *manager = newest;
            counters = worker.shard.manager(&manager.stat_prefix);
            forwarded_cert = downstream.origin.peer.forwarded_cert(manager.client_cert);
        }
        *served = served.saturating_add(1);
        if manager.max_requests_per_connection.is_some_and(|max| *served >= max) {
            counters.cx_max_requests.inc();
            is_last = true;
        }
        counters.rq_total.inc();
        counters.rq_active.inc();
        let snapshot = downstream.origin.snapshot.clone();
        let renewed = OnceCell::new();
        let scope = RequestScope {
            worker,
            manager,
            snapshot: &snapshot,
            renewed: &renewed,
            counters: &counters,
            forwarded_cert: forwarded_cert.as_deref(),
        };
        let mut context = RequestContext::new(scope, downstream, &mut head, &mut response, framing);
        let keep_alive = context.serve(connection, is_last).await;
        drop(context);
        counters.rq_active.dec();
        if !keep_alive {
            if !was_too_old && downstream.origin.is_too_old(manager) {
                counters.cx_max_duration.inc();
            }
            return Stop::Close;
        }
    }
}

/// Waits during a pause for a request, for a drain or for the maximum age. Returns false if the connection has ended or
/// its idle timeout has passed.
async fn resumes(worker: &Worker, downstream: &mut Downstream, manager: &HttpManager) -> bool {
    let Downstream { wire: Wire::Http1(stream), timer, origin } = downstream else { return false };
    let idle = manager.idle_timeout.map(|timeout| Instant::now() + timeout.saturating_sub(PAUSE));
    let too_old = idle_limit(manager, origin);
    poll_fn(|cx| {
        if worker.overload.is_busy() {
            // While the worker is busy, bytes are read only once the connection has its turn.
            if stream.poll_readable(cx).is_ready() {
                return Poll::Ready(true);
            }
        } else if let Poll::Ready(filled) = stream.poll_fill(cx) {
            return Poll::Ready(matches!(filled, Ok(1..)));
        }
        stream.rest();
        if origin.connections.is_draining() || downstream::refresh(origin, worker).is_err() {
            return Poll::Ready(true);
        }
        ready!(timer.poll(cx, earlier(idle, too_old)));
        if too_old.is_some_and(|end| Instant::now() >= end) {
            return Poll::Ready(true);
        }
        worker.shard.manager(&manager.stat_prefix).cx_idle_timeout.inc();
        Poll::Ready(false)
    })
    .await
}

/// Returns the time at which a connection that is too old ends without a last request.
fn idle_limit(manager: &HttpManager, origin: &Origin) -> Option<Instant> {
    origin.end(manager).map(|end| end + manager.drain_timeout)
}

/// Time without a request after which a connection frees the memory that it needs for requests only.
const PAUSE: Duration = Duration::from_secs(1);

/// First line of the HTTP/2 preface. No HTTP/1 request begins with it.
const HTTP2_LINE: &[u8] = b"PRI * HTTP/2.0\r\n";

/// Result of waiting for a request.
enum Next {
    Request(Framing, ConnectionOptions),
    /// The preface of HTTP/2.
    Preface,
    /// A malformed or late head.
    Refused(Malformed),
    /// Nothing has arrived for [`PAUSE`].
    Pause,
    /// The connection must be closed.
    Close,
    /// The connection has ended.
    End,
}

/// Waits for the next request's head.
async fn next(
    worker: &Worker,
    downstream: &mut Downstream,
    manager: &HttpManager,
    head: &mut RequestHead,
    may_be_http2: bool,
) -> Next {
    let Downstream { wire: Wire::Http1(stream), timer, origin } = downstream else { return Next::End };
    let mut reader = HeadReader::new(worker, manager, may_be_http2);
    let mut deadlines = HeadDeadlines::default();
    poll_fn(|cx| {
        if let Some(next) = ready!(reader.poll(cx, stream, head)) {
            return Poll::Ready(next);
        }
        let is_empty = stream.input.is_empty();
        if is_empty {
            stream.rest();
        }
        ready!(timer.poll(cx, deadlines.update(worker, manager, origin, is_empty)));
        Poll::Ready(deadlines.expire(worker, manager, origin))
    })
    .await
}

/// Reads and parses the head of a request.
struct HeadReader<'a> {
    worker: &'a Worker,
    manager: &'a HttpManager,
    limits: HeadLimits,
    scan: Scan,
    may_be_http2: bool,
    /// Place in the queue of a busy worker.
    slot: Option<Rc<QueueSlot>>,
}

impl<'a> HeadReader<'a> {
    #[inline]
    fn new(worker: &'a Worker, manager: &'a HttpManager, may_be_http2: bool) -> Self {
        let limits = hop::limits(manager);
        Self { worker, manager, limits, scan: Scan::default(), may_be_http2, slot: None }
    }

    /// Reads what has arrived. Returns `None` if the head is incomplete; is pending while the connection waits for its
    /// turn.
    #[inline]
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut Stream,
        head: &mut RequestHead,
    ) -> Poll<Option<Next>> {
        loop {
            if self.may_be_http2 && stream.input.bytes().starts_with(HTTP2_LINE) {
                return Poll::Ready(Some(Next::Preface));
            }
            match self.scan.end(stream.input.bytes(), &self.limits) {
                Err(malformed) => return Poll::Ready(Some(Next::Refused(malformed))),
                Ok(Some(end)) => return Poll::Ready(Some(self.parse(stream, end, head))),
                Ok(None) => {}
            }
            if stream.input.is_full() {
                stream.input.grow(self.limits.max_head);
            }
            // While the worker is busy, bytes are read only once the connection has its turn.
            if stream.input.is_empty() && (self.slot.is_some() || self.worker.overload.is_busy()) {
                if stream.poll_readable(cx).is_pending() {
                    return Poll::Ready(None);
                }
                ready!(self.worker.overload.turns.poll(&mut self.slot, cx));
            }
            match stream.poll_fill(cx) {
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(_) => return Poll::Ready(Some(Next::End)),
                Poll::Pending => return Poll::Ready(None),
            }
        }
    }

    /// Parses the head, which ends at `end`, and removes it from the input.
    #[inline]
    fn parse(&self, stream: &mut Stream, end: usize, head: &mut RequestHead) -> Next {
        let parsed = parse::request(&stream.input.bytes()[..end], &self.limits, head);
        stream.input.consume(end);
        match parsed {
            Ok(_) if head.version == Version::Http10 && !self.manager.accept_http10 => {
                Next::Refused(Malformed::new(426, "low_version"))
            }
            Ok(_) if hop::refuses_underscores(self.manager, head) => {
                Next::Refused(Malformed::new(400, "http1.unexpected_underscore"))
            }
            Ok((framing, connection)) => Next::Request(framing, connection),
            Err(malformed) => Next::Refused(malformed),
        }
    }
}

/// Deadlines of a connection that waits for a request's head. It may be idle between requests, but a head that has
/// begun has a time limit.
#[derive(Default)]
struct HeadDeadlines {
    /// End of the connection if no head begins.
    idle: Option<Instant>,
    /// Time at which the connection frees memory.
    pause: Option<Instant>,
    /// Deadline for the rest of a head that has begun, and the refusal after it.
    head: Option<(Instant, Malformed)>,
    /// End of the connection because of its age.
    too_old: Option<Instant>,
    /// End of the connection because of a drain.
    idle_drain: Option<Instant>,
    /// End of the connection because of a drain or a revocation, as far as they apply.
    closing: Option<Instant>,
}

impl HeadDeadlines {
    /// Begins the deadlines that apply. Returns the earliest.
    #[inline]
    fn update(
        &mut self,
        worker: &Worker,
        manager: &HttpManager,
        origin: &mut Rc<Origin>,
        is_empty: bool,
    ) -> Option<Instant> {
        let now = Instant::now();
        if self.pause.is_none() {
            self.idle = manager.idle_timeout.map(|timeout| now + timeout);
            self.pause = Some(now + PAUSE);
            self.too_old = idle_limit(manager, origin);
        }
        if self.head.is_none() && !is_empty {
            self.head = refuse::head_timeout(manager).map(|(timeout, reason)| (now + timeout, reason));
        }
        // A draining connection waits for a short time, because a request may be in flight.
        if self.idle_drain.is_none() {
            self.idle_drain = origin.connections.idle_drain().map(|time| now + time);
        }
        let revoked = if origin.admission.is_due(worker) {
            downstream::refresh(origin, worker).err()
        } else {
            origin.admission.last_deadline()
        };
        // The drain, the pause and the idle timeout do not apply to a connection with a partial head. A revocation
        // does.
        self.closing = earlier(self.idle_drain.filter(|_| is_empty), revoked);
        let pause = self.pause.filter(|_| is_empty && self.closing.is_none());
        let over = earlier(earlier(self.idle_end(), self.head.map(|(deadline, _)| deadline)), self.closing);
        earlier(earlier(over, pause), self.oldest_end())
    }

    /// Returns what follows from the deadline that has passed.
    #[inline]
    fn expire(&self, worker: &Worker, manager: &HttpManager, origin: &Origin) -> Next {
        let now = Instant::now();
        match self.head {
            Some((deadline, reason)) if now >= deadline => Next::Refused(reason),
            _ if self.closing.is_some_and(|closing| now >= closing) => {
                origin.note_revoked(worker);
                Next::Close
            }
            _ if self.oldest_end().is_some_and(|end| now >= end) => {
                worker.shard.manager(&manager.stat_prefix).cx_max_duration.inc();
                Next::Close
            }
            _ if self.idle_end().is_some_and(|end| now >= end) => {
                worker.shard.manager(&manager.stat_prefix).cx_idle_timeout.inc();
                Next::End
            }
            _ => Next::Pause,
        }
    }

    /// Returns the end of the connection because of its age if no head has begun.
    #[inline]
    fn oldest_end(&self) -> Option<Instant> {
        self.too_old.filter(|_| self.head.is_none())
    }

    /// Returns the end of the connection if no head has begun.
    #[inline]
    fn idle_end(&self) -> Option<Instant> {
        self.idle.filter(|_| self.head.is_none())
    }
}

fn refuse_malformed(
    worker: &Rc<Worker>,
    downstream: &mut Downstream,
    manager: &HttpManager,
    malformed: Malformed,
) {
    let mut response = refuse::response(worker, manager, malformed);
    let content = refuse::content(malformed);
    if !content.is_empty() {
        response.append("content-type", b"text/plain");
    }
    let length = content.len() as u64;
    // No response is being written at this time.
    if let Wire::Http1(stream) = &mut downstream.wire {
        write::response(&mut stream.output, &response, Framing::Length(length), "GET", Persistence::Close);
        stream.output.extend(content.as_bytes());
    }
    let answered = Some((&response, length));
    refuse::note(worker, &downstream.origin, manager, malformed, Version::Http11, answered);
}
