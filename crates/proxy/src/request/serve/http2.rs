//! HTTP/2 on a downstream connection: each request is a stream, served by its own task.

use std::{
    cell::OnceCell,
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tracing::{debug, warn};

use super::{h2c::UpgradedRequest, newest, refuse};
use crate::{
    overload::{
        drain::IDLE_DRAIN,
        limit_log::{self, Limit},
    },
    request::{
        context::{RequestContext, RequestScope},
        hop,
    },
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
        self, Bounds, Connection, Driver, Duplex, FrameKind, HeadError, Http2Options, Request, Role,
        SessionLimits, StreamError,
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
    let Accepted { stream, timer, origin, registered } = connection;
    let driver = start(worker, *stream, manager, upgraded);
    let mut session = Session::new(worker, driver, timer, origin, manager);
    while let Some(request) = poll_fn(|cx| session.poll_accept(cx)).await {
        session.serve(request);
    }
    session.report();
    session.driver.close().await;
    drop(registered);
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

/// A client's connection, which accepts streams.
struct Session<'a> {
    worker: &'a Rc<Worker>,
    driver: Driver,
    timer: Timer,
    origin: Rc<Origin>,
    manager: Arc<HttpManager>,
    /// Value of `x-forwarded-client-cert` for the client.
    forwarded_cert: Option<Rc<str>>,
    begun: Instant,
    /// Number of requests so far.
    served: u32,
    /// Whether the client connected during a drain and has sent no request. It may send one before the GOAWAY.
    may_send_first: bool,
    /// After a GOAWAY: time until which the client may open streams. An acknowledgement of the GOAWAY ends this
    /// earlier.
    ending: Option<Instant>,
    /// Time at which an idle connection ends; `None` while it has streams.
    idle_end: Option<Instant>,
    partial: Option<PartialFrame>,
}

/// A frame that has arrived in part.
#[derive(Clone, Copy)]
struct PartialFrame {
    /// Number of the frame on its connection.
    number: u64,
    /// Deadline for the rest of the frame.
    deadline: Instant,
    /// Refusal after the deadline.
    refusal: Malformed,
}

impl<'a> Session<'a> {
    fn new(
        worker: &'a Rc<Worker>,
        driver: Driver,
        timer: Timer,
        origin: Rc<Origin>,
        manager: &Arc<HttpManager>,
    ) -> Self {
        Self {
            worker,
            driver,
            timer,
            manager: manager.clone(),
            forwarded_cert: origin.peer.forwarded_cert(manager.client_cert).map(Rc::from),
            begun: Instant::now(),
            served: 0,
            may_send_first: origin.connections.is_draining(),
            ending: None,
            idle_end: None,
            partial: None,
            origin,
        }
    }

    /// Waits for the next request. Returns `None` at the end of the connection.
    #[inline]
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Option<Request>> {
        loop {
            let is_revoked = self.is_revoked();
            let is_draining = !self.may_send_first && self.origin.connections.is_draining();
            let is_too_old = self.age_limit().is_some_and(|end| Instant::now() >= end);
            if is_too_old {
                self.worker.shard.manager(&self.manager.stat_prefix).cx_max_duration.inc();
            }
            if self.ending.is_none() && (is_revoked || is_draining || is_too_old) {
                self.begin_shutdown();
                self.idle_end = None;
            }
            if let Poll::Ready(next) = self.driver.poll_accept(cx) {
                return Poll::Ready(next);
            }
            self.note_refused();
            self.set_deadlines();
            // When the client may open no more streams, although it has not acknowledged the GOAWAY.
            let last = self.ending.filter(|_| self.driver.is_shutting_down());
            let head = self.partial.map(|frame| frame.deadline);
            let ends = earlier(earlier(self.quiet_end(), head), earlier(last, self.age_limit()));
            if self.timer.poll(cx, ends).is_pending() {
                return Poll::Pending;
            }
            if self.age_limit().is_some_and(|end| Instant::now() >= end) {
                continue;
            }
            if last.is_some_and(|last| Instant::now() >= last) {
                self.driver.refuse();
                continue;
            }
            if let Some(frame) = self.partial.filter(|frame| Instant::now() >= frame.deadline) {
                refuse::note(self.worker, &self.origin, &self.manager, frame.refusal, Version::Http2, None);
                self.driver.fail();
                return Poll::Ready(None);
            }
            if self.ending.is_some() || !self.driver.is_settled() {
                return Poll::Ready(None);
            }
            self.worker.shard.manager(&self.manager.stat_prefix).cx_idle_timeout.inc();
            self.begin_shutdown();
            self.idle_end = None;
        }
    }

    /// Returns whether the configuration in effect no longer admits the connection. When a check is due, wakes the
    /// streams, so that each checks itself.
    #[inline]
    fn is_revoked(&mut self) -> bool {
        if self.origin.admission.is_due(self.worker) {
            let was_refused = self.origin.admission.refusal().is_some();
            tokio::task::spawn_local(wake_in_turns(self.driver.wakers()));
            if downstream::refresh(&mut self.origin, self.worker).is_err() && !was_refused {
                self.origin.note_revoked(self.worker);
            }
        }
        self.origin.admission.refusal().is_some()
    }

    /// Begins and ends the idle timeout, and the deadline of a frame that has arrived in part.
    #[inline]
    fn set_deadlines(&mut self) {
        if self.driver.is_busy() {
            self.idle_end = None;
        } else if self.idle_end.is_none() {
            let idle_drain = self.origin.connections.idle_drain().or(self.ending.map(|_| IDLE_DRAIN));
            let timeout = idle_drain.or(self.manager.idle_timeout);
            self.idle_end = timeout.map(|timeout| Instant::now() + timeout);
        }
        // Each frame has its own deadline, because a busy connection may always have an incomplete frame.
        self.partial = self.driver.partial().and_then(|number| {
            self.partial.filter(|frame| frame.number == number).or_else(|| {
                let (timeout, refusal) = refuse::head_timeout(&self.manager)?;
                Some(PartialFrame { number, deadline: Instant::now() + timeout, refusal })
            })
        });
    }

    /// Returns the time until which the client may be silent.
    #[inline]
    fn quiet_end(&self) -> Option<Instant> {
        let may_be_idle = self.driver.is_settled() || self.origin.connections.is_draining();
        if may_be_idle { self.idle_end } else { Some(self.begun + PREFACE_TIMEOUT) }
    }

    /// Returns the time at which the connection is too old to accept further streams; `None` after a GOAWAY.
    #[inline]
    fn age_limit(&self) -> Option<Instant> {
        self.origin.end(&self.manager).filter(|_| self.ending.is_none())
    }

    /// Sends a GOAWAY.
    fn begin_shutdown(&mut self) {
        self.driver.begin_shutdown();
        self.ending = Some(Instant::now() + self.manager.drain_timeout);
    }

    /// Begins the task of a request, under the newest configuration.
    #[inline]
    fn serve(&mut self, mut request: Request) {
        self.may_send_first = false;
        if let Err(end) = downstream::refresh(&mut self.origin, self.worker) {
            if self.ending.is_none() {
                self.begin_shutdown();
            }
            if Instant::now() >= end {
                drop(Duplex::accepted(self.driver.connection(), &request));
                return;
            }
        }
        if let Some(newest) = newest(&self.origin, &self.manager) {
            self.forwarded_cert = self.origin.peer.forwarded_cert(newest.client_cert).map(Rc::from);
            self.manager = newest;
        }
        let connection = self.driver.connection();
        if let Some(fault) = request.oversized {
            refuse_head(self.worker, &self.origin, &self.manager, (connection, request), fault);
            return;
        }
        if hop::refuses_underscores(&self.manager, &mut request.head) {
            let refusal = Malformed::new(400, "http2.unexpected_underscore");
            refuse::note(self.worker, &self.origin, &self.manager, refusal, Version::Http2, None);
            drop(Duplex::accepted(connection, &request));
            request.head.recycle();
            return;
        }
        self.served = self.served.saturating_add(1);
        let max_requests = self.manager.max_requests_per_connection;
        if max_requests.is_some_and(|max| self.served >= max) && self.ending.is_none() {
            self.worker.shard.manager(&self.manager.stat_prefix).cx_max_requests.inc();
            self.begin_shutdown();
        }
        let task = serve(
            self.worker.clone(),
            self.manager.clone(),
            self.origin.clone(),
            self.forwarded_cert.clone(),
            request,
            connection,
        );
        tokio::task::spawn_local(task);
    }

    /// Counts and logs streams that were refused because of `max_concurrent_streams`.
    #[inline]
    fn note_refused(&self) {
        let count = self.driver.refused();
        if count > 0 {
            let prefix = &self.manager.stat_prefix;
            self.worker.shard.manager(prefix).http2_refused.add(count.into());
            limit_log::log(Limit::Streams, format_args!("{prefix}, client {}", self.origin.source));
        }
    }

    /// Counts and logs the reason why the connection ended early.
    fn report(&self) {
        self.note_refused();
        if let Some(cause) = self.driver.error() {
            report(self.worker, &self.origin, &self.manager, &cause, self.driver.exceeding_frame());
        }
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
fn report(
    worker: &Worker,
    origin: &Origin,
    manager: &HttpManager,
    error: &StreamError,
    culprit: Option<FrameKind>,
) {
    let counters = worker.shard.manager(&manager.stat_prefix);
    if let StreamError::Silent = error {
        counters.http2_keepalive_timeout.inc();
    }
    let Some(culprit) = culprit else {
        return debug!("HTTP/2 with {} ended: {error}", origin.source);
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
