//! HTTP/2 on a downstream connection: every request is a stream, and a task of its own.

use std::{
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use tracing::debug;

use super::newest;
use crate::{
    config::HttpManager,
    connection::Connection as Accepted,
    context::Worker,
    downstream::{self, Downstream, Origin},
    head::ResponseHead,
    http1::{Connection as Persistence, Framing},
    http2::{self, Bounds, Connection, Driver, Duplex, Limits, Request, Role},
    story::{Story, Terms},
    timer::Timer,
    wire::Wire,
};

/// A client that says nothing at first is waited for so long.
const PATIENCE: Duration = Duration::from_secs(10);
/// A client without requests that has been told that no more are taken may say so long that it knows.
const FAREWELL: Duration = Duration::from_secs(1);

/// Serves a connection.
pub(crate) async fn run(worker: &Rc<Worker>, connection: Accepted, manager: &Arc<HttpManager>) {
    let Accepted { stream, mut timer, mut origin, registered } = connection;
    let head = Bounds { size: manager.max_head, fields: manager.max_headers };
    let limits = Limits { streams: manager.max_streams, head, connect: manager.allow_connect };
    let mut driver = Driver::new(stream, Role::Server, limits);
    let mut manager = manager.clone();
    let mut forwarded_cert: Option<Rc<str>> = origin.peer.forwarded_cert(manager.client_cert).map(Rc::from);
    let (mut ending, mut idle) = (false, None);
    let begun = Instant::now();
    loop {
        let next = poll_fn(|cx| {
            loop {
                if worker.is_draining() && !ending {
                    (ending, idle) = (true, None);
                    driver.leave();
                }
                if let Poll::Ready(next) = driver.poll_accept(cx) {
                    return Poll::Ready(next);
                }
                if driver.is_busy() {
                    idle = None;
                } else if idle.is_none() {
                    let patience = if ending { Some(FAREWELL) } else { manager.idle_timeout };
                    idle = patience.map(|patience| Instant::now() + patience);
                }
                let deadline = if driver.is_settled() { idle } else { Some(begun + PATIENCE) };
                if timer.poll(cx, deadline).is_pending() {
                    return Poll::Pending;
                }
                if ending || !driver.is_settled() {
                    return Poll::Ready(None);
                }
                (ending, idle) = (true, None);
                driver.leave();
            }
        });
        let Some(request) = next.await else { break };
        if !downstream::refresh(&mut origin, worker) && !ending {
            ending = true;
            driver.leave();
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
        debug!("HTTP/2 with {} ended: {lost}", origin.source);
    }
    driver.close().await;
    drop(registered);
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
    let story = Story::new(terms, &mut downstream, &mut head, &mut response);
    Box::pin(story.tell(framing, Persistence { close: false, upgrade }, false)).await;
    counters.rq_active.dec();
    head.recycle();
    response.recycle();
}
