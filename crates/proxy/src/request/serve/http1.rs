//! HTTP/1.1 on a downstream connection: requests one after the other, each told by [`RequestContext`].

use std::{
    cell::OnceCell,
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::{Poll, ready},
    time::{Duration, Instant},
};

use super::{
    h2c::{self, Begun},
    newest, refuse,
};
use crate::{
    overload::drain::Registered,
    request::{
        context::{RequestContext, RequestScope},
        hop,
    },
    worker::{
        Worker,
        downstream::{self, Accepted, Downstream},
    },
};
use skysail_http::{
    head::{RequestHead, ResponseHead, Version},
    http1::{
        ConnectionOptions, Framing, Malformed, Scan, parse,
        write::{self, Persistence},
    },
    timer::earlier,
    wire::Wire,
};
use skysail_policy::config::HttpManager;

/// Serves a connection. If it turns out to be HTTP/2, or becomes it, it is given back; `unsure` says that it may begin so.
pub(crate) async fn run(
    worker: &Rc<Worker>,
    connection: Box<Accepted>,
    manager: &Arc<HttpManager>,
    unsure: bool,
) -> Option<(Box<Accepted>, Option<Begun>)> {
    let (mut downstream, registered) = split(*connection);
    let mut manager = manager.clone();
    let (mut unsure, mut served) = (unsure, 0);
    loop {
        // Boxed, and let go of in a pause, so that an idle connection holds little.
        match Box::pin(requests(worker, &mut downstream, &mut manager, &mut unsure, &mut served)).await {
            Stop::Pause => {
                if !resumes(worker, &mut downstream, &manager).await {
                    return None;
                }
            }
            Stop::Http2(begun) => {
                let Downstream { wire, timer, origin } = downstream;
                let Wire::Http1(mut stream) = wire else { return None };
                if begun.is_some() {
                    stream.output.extend(h2c::SWITCHED);
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

/// Why no more requests are served for now, or ever.
enum Stop {
    /// None came for a while.
    Pause,
    /// The connection speaks HTTP/2, maybe after a request that asked for it.
    Http2(Option<Box<Begun>>),
    /// The connection is to be closed in good order.
    Close,
    /// It is over.
    End,
}

/// Serves requests as long as they come one soon after the other.
async fn requests(
    worker: &Rc<Worker>,
    downstream: &mut Downstream,
    manager: &mut Arc<HttpManager>,
    unsure: &mut bool,
    served: &mut u32,
) -> Stop {
    let mut counters = worker.shard.manager(&manager.stat_prefix);
    let (mut head, mut response) = (RequestHead::default(), ResponseHead::default());
    let mut forwarded_cert = downstream.origin.peer.forwarded_cert(manager.client_cert);
    loop {
        let (framing, connection) = match next(worker, downstream, manager, &mut head, *unsure).await {
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
        *unsure = false;
        if connection.upgrade
            && let Some(settings) = h2c::settings(manager, downstream, &head, framing)
        {
            return Stop::Http2(Some(Box::new(Begun { head, settings })));
        }
        // A connection that the newest configuration would not have may finish this request by the old.
        let refreshed = downstream::refresh(&mut downstream.origin, worker);
        if let Err(end) = refreshed {
            downstream.origin.note_revoked(worker);
            if Instant::now() >= end {
                return Stop::Close;
            }
        }
        let mut last = refreshed.is_err() || downstream.origin.side.is_draining();
        if let Some(newest) = newest(&downstream.origin, manager) {
            *manager = newest;
            counters = worker.shard.manager(&manager.stat_prefix);
            forwarded_cert = downstream.origin.peer.forwarded_cert(manager.client_cert);
        }
        *served = served.saturating_add(1);
        if manager.max_requests_per_connection.is_some_and(|most| *served >= most) {
            counters.cx_max_requests.inc();
            last = true;
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
        let keep_alive = context.serve(connection, last).await;
        drop(context);
        counters.rq_active.dec();
        if !keep_alive {
            return Stop::Close;
        }
    }
}

/// Waits in a pause for what comes next, or for a drain; false when it is the end.
async fn resumes(worker: &Worker, downstream: &mut Downstream, manager: &HttpManager) -> bool {
    let Downstream { wire: Wire::Http1(stream), timer, origin } = downstream else { return false };
    let idle = manager.idle_timeout.map(|timeout| Instant::now() + timeout.saturating_sub(PAUSE));
    poll_fn(|cx| {
        if worker.overload.is_busy() {
            // Before it has its turn nothing is read.
            if stream.poll_readable(cx).is_ready() {
                return Poll::Ready(true);
            }
        } else if let Poll::Ready(filled) = stream.poll_fill(cx) {
            return Poll::Ready(matches!(filled, Ok(1..)));
        }
        stream.rest();
        if origin.side.is_draining() || downstream::refresh(origin, worker).is_err() {
            return Poll::Ready(true);
        }
        ready!(timer.poll(cx, idle));
        worker.shard.manager(&manager.stat_prefix).cx_idle_timeout.inc();
        Poll::Ready(false)
    })
    .await
}

/// After so long without a request a connection is idle, and gives back what it does not need to wait.
const PAUSE: Duration = Duration::from_secs(1);

/// The first line of HTTP/2's preface, which no request begins with.
const HTTP2_LINE: &[u8] = b"PRI * HTTP/2.0\r\n";

/// What comes next on a connection.
enum Next {
    Request(Framing, ConnectionOptions),
    /// Not a request but HTTP/2.
    Preface,
    /// Something that is no request.
    Refused(Malformed),
    /// Nothing so far.
    Pause,
    /// Nothing, and the connection is to end.
    Close,
    /// Nothing any more.
    End,
}

/// Waits for the next request's head.
async fn next(
    worker: &Worker,
    downstream: &mut Downstream,
    manager: &HttpManager,
    head: &mut RequestHead,
    unsure: bool,
) -> Next {
    let limits = hop::limits(manager);
    let mut scan = Scan::default();
    // Between requests a connection may idle for long, but a head that has begun must come to its end.
    let (mut idle, mut pause, mut begun, mut farewell) = (None, None, None, None);
    let mut place = None;
    let Downstream { wire: Wire::Http1(stream), timer, origin } = downstream else { return Next::End };
    poll_fn(|cx| {
        loop {
            if unsure && stream.input.bytes().starts_with(HTTP2_LINE) {
                return Poll::Ready(Next::Preface);
            }
            match scan.end(stream.input.bytes(), &limits) {
                Err(malformed) => return Poll::Ready(Next::Refused(malformed)),
                Ok(Some(end)) => {
                    let parsed = parse::request(&stream.input.bytes()[..end], &limits, head);
                    stream.input.consume(end);
                    return Poll::Ready(match parsed {
                        Ok(_) if head.version == Version::Http10 && !manager.accept_http10 => {
                            Next::Refused(Malformed::new(426, "low_version"))
                        }
                        Ok((framing, connection)) => Next::Request(framing, connection),
                        Err(malformed) => Next::Refused(malformed),
                    });
                }
                Ok(None) => {}
            }
            if stream.input.is_full() {
                stream.input.grow(limits.max_head);
            }
            // Before it has its turn nothing is read.
            if stream.input.is_empty() && (place.is_some() || worker.overload.is_busy()) {
                if stream.poll_readable(cx).is_pending() {
                    break;
                }
                ready!(worker.overload.turns.poll(&mut place, cx));
            }
            match stream.poll_fill(cx) {
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(_) => return Poll::Ready(Next::End),
                Poll::Pending => break,
            }
        }
        if stream.input.is_empty() {
            stream.rest();
        }
        let now = Instant::now();
        if idle.is_none() {
            idle = manager.idle_timeout.map(|timeout| now + timeout);
            pause = Some(now + PAUSE);
        }
        if begun.is_none() && !stream.input.is_empty() {
            begun = refuse::head_timeout(manager).map(|(timeout, why)| (now + timeout, why));
        }
        // A request may be on its way to a connection that is to end.
        if farewell.is_none() {
            farewell = origin.side.farewell().map(|time| now + time);
        }
        let revoked = if origin.admission.is_due(worker) {
            downstream::refresh(origin, worker).err()
        } else {
            origin.admission.last_deadline()
        };
        // A head that has begun is no pause, and comes to its end while its client is admitted; nor is a connection idle then.
        let farewell = earlier(farewell.filter(|_| stream.input.is_empty()), revoked);
        let pause = pause.filter(|_| stream.input.is_empty() && farewell.is_none());
        let idle = idle.filter(|_| begun.is_none());
        let over = earlier(earlier(idle, begun.map(|(deadline, _)| deadline)), farewell);
        ready!(timer.poll(cx, earlier(over, pause)));
        let now = Instant::now();
        Poll::Ready(match begun {
            Some((deadline, why)) if now >= deadline => Next::Refused(why),
            _ if farewell.is_some_and(|farewell| now >= farewell) => {
                origin.note_revoked(worker);
                Next::Close
            }
            _ if idle.is_some_and(|idle| now >= idle) => {
                worker.shard.manager(&manager.stat_prefix).cx_idle_timeout.inc();
                Next::End
            }
            _ => Next::Pause,
        })
    })
    .await
}

fn refuse_malformed(
    worker: &Rc<Worker>,
    downstream: &mut Downstream,
    manager: &HttpManager,
    malformed: Malformed,
) {
    let mut response = refuse::answer(worker, manager, malformed);
    let content = refuse::content(malformed);
    if !content.is_empty() {
        response.append("content-type", b"text/plain");
    }
    let length = content.len() as u64;
    // Nothing has been written yet that this could come between.
    if let Wire::Http1(stream) = &mut downstream.wire {
        write::response(&mut stream.output, &response, Framing::Length(length), "GET", Persistence::Close);
        stream.output.extend(content.as_bytes());
    }
    let answered = Some((&response, length));
    refuse::note(worker, &downstream.origin, manager, malformed, Version::Http11, answered);
}
