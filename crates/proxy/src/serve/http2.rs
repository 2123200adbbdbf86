//! HTTP/2 on a downstream connection: every request is a stream, and a task of its own.

use std::{
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::Request;
use tracing::debug;

use super::newest;
use crate::{
    config::HttpManager,
    connection::Connection,
    context::Worker,
    downstream::{self, Downstream, Origin},
    head::{RequestHead, ResponseHead},
    hop,
    http1::Connection as Persistence,
    http2::{self, Duplex, Io},
    story::{Story, Terms},
    timer::{Timer, earlier},
    wire::Wire,
};

/// A client that says nothing at first is waited for so long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves a connection.
pub(crate) async fn run(worker: &Rc<Worker>, connection: Connection, manager: &Arc<HttpManager>) {
    let Connection { stream, mut timer, mut origin, registered } = connection;
    let handshake = h2::server::Builder::new()
        .initial_window_size(http2::STREAM_WINDOW)
        .initial_connection_window_size(http2::CONNECTION_WINDOW)
        .max_send_buffer_size(http2::SEND_BUFFER)
        .max_concurrent_streams(manager.max_streams)
        .max_header_list_size(u32::try_from(manager.max_head).unwrap_or(u32::MAX))
        .handshake::<_, Bytes>(Io::new(stream));
    let mut streams = match tokio::time::timeout(PATIENCE, handshake).await {
        Ok(Ok(streams)) => streams,
        Ok(Err(error)) => return debug!("HTTP/2 with {} did not begin: {error}", origin.source),
        Err(_) => return debug!("HTTP/2 with {} did not begin in time", origin.source),
    };
    let mut manager = manager.clone();
    let mut forwarded_cert: Option<Rc<str>> = origin.peer.forwarded_cert(manager.client_cert).map(Rc::from);
    let (mut ending, mut idle) = (false, None);
    loop {
        let next = poll_fn(|cx| {
            if worker.is_draining() && !ending {
                ending = true;
                streams.graceful_shutdown();
            }
            if let Poll::Ready(next) = streams.poll_accept(cx) {
                return Poll::Ready(next);
            }
            if streams.has_streams() {
                idle = None;
            } else if idle.is_none() {
                idle = manager.idle_timeout.map(|timeout| Instant::now() + timeout);
            }
            if timer.poll(cx, earlier(idle, None)).is_ready() && !ending {
                ending = true;
                streams.graceful_shutdown();
                return streams.poll_accept(cx);
            }
            Poll::Pending
        });
        let (request, respond) = match next.await {
            Some(Ok(next)) => next,
            Some(Err(error)) => break debug!("HTTP/2 with {} ended: {error}", origin.source),
            None => break,
        };
        if !downstream::refresh(&mut origin, worker) && !ending {
            ending = true;
            streams.graceful_shutdown();
        }
        if let Some(newest) = newest(&origin, &manager) {
            forwarded_cert = origin.peer.forwarded_cert(newest.client_cert).map(Rc::from);
            manager = newest;
        }
        let task =
            tell(worker.clone(), manager.clone(), origin.clone(), forwarded_cert.clone(), request, respond);
        tokio::task::spawn_local(task);
    }
    drop(registered);
}

/// Tells one request from beginning to end.
async fn tell(
    worker: Rc<Worker>,
    manager: Arc<HttpManager>,
    origin: Rc<Origin>,
    forwarded_cert: Option<Rc<str>>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
) {
    let (parts, recv) = request.into_parts();
    let (mut head, mut response) = (RequestHead::default(), ResponseHead::default());
    if let Err(malformed) = http2::request_head(&parts, &hop::limits(&manager), &mut head) {
        let mut answer = http::Response::new(());
        *answer.status_mut() =
            http::StatusCode::from_u16(malformed.status).unwrap_or(http::StatusCode::BAD_REQUEST);
        // A client that is gone needs no answer.
        let _ = respond.send_response(answer, true);
        return;
    }
    drop(parts);
    let framing = http2::request_framing(&head, recv.is_end_stream());
    let counters = worker.shard.manager(&manager.stat_prefix);
    counters.rq_total.inc();
    counters.rq_active.inc();
    let snapshot = origin.snapshot.clone();
    let wire = Wire::Http2(Box::new(Duplex::accepted(recv, respond)));
    let mut downstream = Downstream { wire, timer: Timer::default(), origin };
    let terms = Terms {
        worker: &worker,
        manager: &manager,
        snapshot: &snapshot,
        counters: &counters,
        forwarded_cert: forwarded_cert.as_deref(),
    };
    let story = Story::new(terms, &mut downstream, &mut head, &mut response);
    Box::pin(story.tell(framing, Persistence::default(), false)).await;
    counters.rq_active.dec();
}
