//! HTTP/2 on a downstream connection: each request is a stream, served by its own task.

use std::{
    cell::OnceCell,
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use tracing::{debug, warn};

use super::{h2c::UpgradedRequest, newest, refuse};
use crate::{
    overload::{
        drain::IDLE_DRAIN,
        limit_log::{self, Limit},
    },
    request::context::{RequestContext, RequestScope},
    worker::{
        Worker,
        downstream::{self, Accepted, Downstream, Origin},
        revalidation::wake_in_turns,
    },
};
use skysail_http::{
    head::{ResponseHead, Version},
    http1::{ConnectionOptions, Framing, Malformed},
    http2::{
        self, Bounds, Connection, Driver, Duplex, FrameKind, HeadError, Http2Options, Lost, Request, Role,
        SessionLimits,
    },
    socket::Stream,
    timer::{Timer, earlier},
    wire::Wire,
};
use skysail_policy::config::HttpManager;

/// Time that a client has for its preface and first settings.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves a connection until it ends. `upgraded` is the HTTP/1.1 request that upgraded it, if one did.
pub(crate) async fn run(
    worker: &Rc<Worker>,
    connection: Accepted,
    manager: &Arc<HttpManager>,
    upgraded: Option<UpgradedRequest>,
) {
    let Accepted { stream, mut timer, mut origin, registered } = connection;
    let mut driver = start(worker, *stream, manager, upgraded);
    let mut manager = manager.clone();
    let mut forwarded_cert: Option<Rc<str>> = origin.peer.forwarded_cert(manager.client_cert).map(Rc::from);
    // After a GOAWAY: time until which the client may open streams. An acknowledgement of the GOAWAY ends
    // this earlier.
    let mut ending = None;
    let (mut idle, mut served) = (None, 0_u32);
    // The frame that has arrived in part: its number, the deadline for its rest, and the refusal after it.
    let mut partial: Option<(u64, Instant, Malformed)> = None;
    // A client that connects during a drain may send one request before the GOAWAY.
    let mut newcomer = origin.connections.is_draining();
    let begun = Instant::now();
    loop {
        let next = poll_fn(|cx| {
            loop {
                let revoked = is_revoked(worker, &driver, &mut origin);
                if ending.is_none() && (revoked || (!newcomer && origin.connections.is_draining())) {
                    (ending, idle) = (leave(&driver, &manager), None);
                }
                if let Poll::Ready(next) = driver.poll_accept(cx) {
                    return Poll::Ready(next);
                }
                note_refused(worker, &origin, &manager, driver.refused());
                if driver.is_busy() {
                    idle = None;
                } else if idle.is_none() {
                    let idle_drain = origin.connections.idle_drain().or(ending.map(|_| IDLE_DRAIN));
                    let timeout = idle_drain.or(manager.idle_timeout);
                    idle = timeout.map(|timeout| Instant::now() + timeout);
                }
                // Each frame has its own deadline, because a busy connection may always have an incomplete
                // frame.
                partial = driver.partial().and_then(|frame| {
                    partial.filter(|(known, ..)| *known == frame).or_else(|| {
                        let (timeout, refusal) = refuse::head_timeout(&manager)?;
                        Some((frame, Instant::now() + timeout, refusal))
                    })
                });
                let waits = driver.is_settled() || origin.connections.is_draining();
                let quiet = if waits { idle } else { Some(begun + PREFACE_TIMEOUT) };
                let last = ending.filter(|_| driver.is_leaving());
                let head = partial.map(|(_, deadline, _)| deadline);
                if timer.poll(cx, earlier(earlier(quiet, head), last)).is_pending() {
                    return Poll::Pending;
                }
                if last.is_some_and(|last| Instant::now() >= last) {
                    driver.refuse();
                    continue;
                }
                if let Some((.., refusal)) = partial.filter(|(_, deadline, _)| Instant::now() >= *deadline) {
                    refuse::note(worker, &origin, &manager, refusal, Version::Http2, None);
                    driver.fail();
                    return Poll::Ready(None);
                }
                if ending.is_some() || !driver.is_settled() {
                    return Poll::Ready(None);
                }
                worker.shard.manager(&manager.stat_prefix).cx_idle_timeout.inc();
                (ending, idle) = (leave(&driver, &manager), None);
            }
        });
        let Some(request) = next.await else { break };
        newcomer = false;
        if let Err(end) = downstream::refresh(&mut origin, worker) {
            if ending.is_none() {
                ending = leave(&driver, &manager);
            }
            if Instant::now() >= end {
                drop(Duplex::accepted(driver.connection(), &request));
                continue;
            }
        }
        if let Some(newest) = newest(&origin, &manager) {
            forwarded_cert = origin.peer.forwarded_cert(newest.client_cert).map(Rc::from);
            manager = newest;
        }
        let connection = driver.connection();
        if let Some(fault) = request.oversized {
            refuse_head(worker, &origin, &manager, (connection, request), fault);
            continue;
        }
        served = served.saturating_add(1);
        if manager.max_requests_per_connection.is_some_and(|max| served >= max) && ending.is_none() {
            worker.shard.manager(&manager.stat_prefix).cx_max_requests.inc();
            ending = leave(&driver, &manager);
        }
        let task = serve(
            worker.clone(),
            manager.clone(),
            origin.clone(),
            forwarded_cert.clone(),
            request,
            connection,
        );
        tokio::task::spawn_local(task);
    }
    note_refused(worker, &origin, &manager, driver.refused());
    if let Some(lost) = driver.lost() {
        report(worker, &origin, &manager, &lost, driver.exceeding_frame());
    }
    driver.close().await;
    drop(registered);
}

/// Sends a GOAWAY. Returns the time until which the client may still open streams.
fn leave(driver: &Driver, manager: &HttpManager) -> Option<Instant> {
    driver.leave();
    Some(Instant::now() + manager.drain_timeout)
}

/// Returns whether the configuration in force no longer admits the connection. When a check is due, wakes the
/// streams, so that each checks itself.
#[inline]
fn is_revoked(worker: &Worker, driver: &Driver, origin: &mut Rc<Origin>) -> bool {
    if origin.admission.is_due(worker) {
        let known = origin.admission.refusal().is_some();
        tokio::task::spawn_local(wake_in_turns(driver.wakers()));
        if downstream::refresh(origin, worker).is_err() && !known {
            origin.note_revoked(worker);
        }
    }
    origin.admission.refusal().is_some()
}

fn start(
    worker: &Worker,
    stream: Stream,
    manager: &HttpManager,
    upgraded: Option<UpgradedRequest>,
) -> Driver {
    let head = Bounds { size: manager.max_head, fields: manager.max_headers };
    let options = Http2Options { resets: worker.shared.limits.resets, ..manager.http2 };
    let driver = Driver::new(stream, Role::Server, SessionLimits { head, options });
    if let Some(upgraded) = upgraded {
        driver.begin(&upgraded.settings, upgraded.head);
    }
    driver
}

/// Counts and logs streams that were refused because of `max_concurrent_streams`.
fn note_refused(worker: &Worker, origin: &Origin, manager: &HttpManager, count: u32) {
    if count > 0 {
        worker.shard.manager(&manager.stat_prefix).http2_refused.add(count.into());
        limit_log::log(Limit::Streams, format_args!("{}, client {}", manager.stat_prefix, origin.source));
    }
}

/// Answers a request whose head is above a limit, without reading its content.
fn refuse_head(
    worker: &Rc<Worker>,
    origin: &Origin,
    manager: &HttpManager,
    (connection, request): (Connection, Request),
    fault: HeadError,
) {
    let reason = match fault {
        HeadError::TooMany => "http2.too_many_headers",
        HeadError::TooLarge | HeadError::Malformed => "http2.header_list_size_too_large",
    };
    let refusal = Malformed::new(431, reason);
    let response = refuse::response(worker, manager, refusal);
    // The client may have closed the stream already.
    let _ = Duplex::accepted(connection, &request).respond(&response, true);
    request.head.recycle();
    refuse::note(worker, origin, manager, refusal, Version::Http2, Some((&response, 0)));
}

/// Counts and logs the reason why a connection ended early. `culprit` is the kind of frame that exceeded a
/// limit.
fn report(worker: &Worker, origin: &Origin, manager: &HttpManager, lost: &Lost, culprit: Option<FrameKind>) {
    let counters = worker.shard.manager(&manager.stat_prefix);
    if let Lost::Silent = lost {
        counters.http2_keepalive_timeout.inc();
    }
    let Some(culprit) = culprit else {
        return debug!("HTTP/2 with {} ended: {lost}", origin.source);
    };
    match culprit {
        FrameKind::WindowUpdate => counters.http2_window_updates.inc(),
        FrameKind::Priority => counters.http2_priorities.inc(),
        FrameKind::Data | FrameKind::Unknown => counters.http2_empty_frames.inc(),
        FrameKind::Headers | FrameKind::Continuation => counters.http2_headers.inc(),
        FrameKind::Reset => counters.premature_resets.inc(),
        FrameKind::Settings | FrameKind::Ping | FrameKind::GoAway | FrameKind::PushPromise => {
            counters.http2_controls.inc();
        }
    }
    warn!("HTTP/2 connection of {} is closed: too many {culprit:?} frames", origin.source);
}

/// Serves one request.
async fn serve(
    worker: Rc<Worker>,
    manager: Arc<HttpManager>,
    origin: Rc<Origin>,
    forwarded_cert: Option<Rc<str>>,
    request: Request,
    connection: Connection,
) {
    let mut wire = Wire::Http2(Box::new(Duplex::accepted(connection.clone(), &request)));
    if worker.overload.wait_for_turn().await && poll_fn(|cx| Poll::Ready(wire.has_ended(cx))).await {
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
    let renewed = OnceCell::new();
    let scope = RequestScope {
        worker: &worker,
        manager: &manager,
        snapshot: &snapshot,
        renewed: &renewed,
        counters: &counters,
        forwarded_cert: forwarded_cert.as_deref(),
    };
    // The future is boxed together with the context. Otherwise each move of the task would copy both.
    Box::pin(async {
        let mut context = RequestContext::new(scope, &mut downstream, &mut head, &mut response, framing);
        context.serve(ConnectionOptions { close: false, upgrade }, false).await
    })
    .await;
    counters.rq_active.dec();
    head.recycle();
    response.recycle();
}
