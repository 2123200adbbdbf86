//! HTTP/2 on a downstream connection: every request is a stream, and a task of its own.

use std::{
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use tracing::{debug, warn};

use super::{h2c::Begun, newest};
use crate::{
    config::{HttpManager, http::Http2Options},
    connection::Connection as Accepted,
    context::Worker,
    downstream::{self, Downstream, Origin},
    drain::FAREWELL,
    head::ResponseHead,
    http1::{Connection as Persistence, Framing},
    http2::{self, Bounds, Connection, Driver, Duplex, Kind, Limits, Lost, Request, Role},
    story::{Story, Terms},
    timer::{Timer, earlier},
    wire::Wire,
};

/// A client that says nothing at first is waited for so long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves a connection, on which a request of HTTP/1.1 may have `begun` HTTP/2.
pub(crate) async fn run(
    worker: &Rc<Worker>,
    connection: Accepted,
    manager: &Arc<HttpManager>,
    begun: Option<Begun>,
) {
    let Accepted { stream, mut timer, mut origin, registered, .. } = connection;
    let head = Bounds { size: manager.max_head, fields: manager.max_headers };
    let options = Http2Options { resets: worker.shared.limits.resets, ..manager.http2 };
    let limits = Limits { head, options };
    let mut driver = Driver::new(*stream, Role::Server, limits);
    if let Some(begun) = begun {
        driver.begin(&begun.settings, begun.head);
    }
    let mut manager = manager.clone();
    let mut forwarded_cert: Option<Rc<str>> = origin.peer.forwarded_cert(manager.client_cert).map(Rc::from);
    // Until when a client that has been told to go may open streams, unless it says sooner that it knows.
    let mut ending = None;
    let (mut idle, mut partial) = (None, None);
    // Who comes while others go may ask for one thing before it is told.
    let mut newcomer = origin.side.is_draining();
    let begun = Instant::now();
    loop {
        let leave = |driver: &Driver| {
            driver.leave();
            Some(Instant::now() + manager.drain_timeout)
        };
        let next = poll_fn(|cx| {
            loop {
                if ending.is_none() && !newcomer && origin.side.is_draining() {
                    (ending, idle) = (leave(&driver), None);
                }
                if let Poll::Ready(next) = driver.poll_accept(cx) {
                    return Poll::Ready(next);
                }
                if driver.is_busy() {
                    idle = None;
                } else if idle.is_none() {
                    let farewell = origin.side.farewell().or(ending.map(|_| FAREWELL));
                    let patience = farewell.or(manager.idle_timeout);
                    idle = patience.map(|patience| Instant::now() + patience);
                }
                partial = match manager.request_headers_timeout.or(manager.stream_idle_timeout) {
                    Some(timeout) if driver.is_partial() => {
                        Some(partial.unwrap_or_else(|| Instant::now() + timeout))
                    }
                    _ => None,
                };
                let waits = driver.is_settled() || origin.side.is_draining();
                let quiet = if waits { idle } else { Some(begun + PATIENCE) };
                let last = ending.filter(|_| driver.is_leaving());
                if timer.poll(cx, earlier(earlier(quiet, partial), last)).is_pending() {
                    return Poll::Pending;
                }
                let passed = |deadline: Option<Instant>| deadline.is_some_and(|it| Instant::now() >= it);
                if passed(last) {
                    driver.refuse();
                    continue;
                }
                if passed(partial) {
                    driver.fail();
                    return Poll::Ready(None);
                }
                if ending.is_some() || !driver.is_settled() {
                    return Poll::Ready(None);
                }
                (ending, idle) = (leave(&driver), None);
            }
        });
        let Some(request) = next.await else { break };
        newcomer = false;
        if !downstream::refresh(&mut origin, worker) && ending.is_none() {
            ending = leave(&driver);
        }
        if let Some(newest) = newest(&origin, &manager) {
            forwarded_cert = origin.peer.forwarded_cert(newest.client_cert).map(Rc::from);
            manager = newest;
        }
        let connection = driver.connection();
        let task = tell(
            worker.clone(),
            manager.clone(),
            origin.clone(),
            forwarded_cert.clone(),
            request,
            connection,
        );
        tokio::task::spawn_local(task);
    }
    if let Some(lost) = driver.lost() {
        report(worker, &origin, &manager, &lost, driver.culprit());
    }
    driver.close().await;
    drop(registered);
}

/// Tells why a connection ended before its time.
fn report(worker: &Worker, origin: &Origin, manager: &HttpManager, lost: &Lost, culprit: Option<Kind>) {
    let counters = worker.shard.manager(&manager.stat_prefix);
    if let Lost::Silent = lost {
        counters.http2_keepalive_timeout.inc();
    }
    let Some(culprit) = culprit else {
        return debug!("HTTP/2 with {} ended: {lost}", origin.source);
    };
    match culprit {
        Kind::WindowUpdate => counters.http2_window_updates.inc(),
        Kind::Priority => counters.http2_priorities.inc(),
        Kind::Data | Kind::Unknown => counters.http2_empty_frames.inc(),
        Kind::Headers | Kind::Continuation => counters.http2_headers.inc(),
        Kind::Reset => counters.premature_resets.inc(),
        Kind::Settings | Kind::Ping | Kind::GoAway | Kind::PushPromise => counters.http2_controls.inc(),
    }
    warn!("HTTP/2 with {} is closed: it sent more {culprit:?} frames than do any good", origin.source);
}

/// Tells one request from beginning to end.
async fn tell(
    worker: Rc<Worker>,
    manager: Arc<HttpManager>,
    origin: Rc<Origin>,
    forwarded_cert: Option<Rc<str>>,
    request: Request,
    connection: Connection,
) {
    let mut wire = Wire::Http2(Box::new(Duplex::accepted(connection.clone(), &request)));
    if worker.overload.turn().await && poll_fn(|cx| Poll::Ready(wire.has_ended(cx))).await {
        return;
    }
    let Request { mut head, length, end, upgrade, .. } = request;
    let mut response = ResponseHead::spare();
    let framing = if upgrade { Framing::None } else { http2::framing(end, length) };
    let counters = worker.shard.manager(&manager.stat_prefix);
    counters.rq_total.inc();
    counters.rq_active.inc();
    let snapshot = origin.snapshot.clone();
    let mut downstream = Downstream { wire, timer: Timer::default(), origin };
    let terms = Terms {
        worker: &worker,
        manager: &manager,
        snapshot: &snapshot,
        counters: &counters,
        forwarded_cert: forwarded_cert.as_deref(),
    };
    let mut story = Story::new(terms, &mut downstream, &mut head, &mut response);
    Box::pin(story.tell(framing, Persistence { close: false, upgrade }, false)).await;
    drop(story);
    counters.rq_active.dec();
    head.recycle();
    response.recycle();
}
