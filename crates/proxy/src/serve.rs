//! HTTP/1.1 on a downstream connection: requests one after the other, each told by [`Story`].

use std::{
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant, SystemTime},
};

use crate::{
    config::{HttpManager, listener::Terminal},
    connection::Downstream,
    context::Worker,
    error::Flags,
    head::{RequestHead, ResponseHead},
    hop,
    http1::{
        Connection, Framing, Malformed, Scan, parse,
        write::{self, Persistence},
    },
    story::Story,
    telemetry::{self, Record},
    timer::earlier,
};

/// Serves a connection.
pub(crate) async fn run(worker: &Rc<Worker>, downstream: &mut Downstream, manager: Arc<HttpManager>) {
    let counters = worker.shard.manager(&manager.stat_prefix);
    counters.cx_total.inc();
    counters.cx_active.inc();
    let (mut head, mut response) = (RequestHead::default(), ResponseHead::default());
    let forwarded_cert = downstream.peer.forwarded_cert(manager.client_cert);
    let mut manager = manager;
    loop {
        let (framing, connection) = match next(worker, downstream, &manager, &mut head).await {
            Next::Request(framing, connection) => (framing, connection),
            Next::Refused(malformed) => {
                refuse_malformed(worker, downstream, &manager, malformed);
                downstream.close::<()>().await;
                break;
            }
            Next::End => break,
        };
        // A connection that the newest configuration would not have may finish this request by the old.
        let current = downstream.refresh(worker);
        let last = !current || worker.is_draining();
        if let Terminal::Http(newest) = &downstream.chain.terminal
            && !Arc::ptr_eq(newest, &manager)
        {
            manager = newest.clone();
        }
        counters.rq_total.inc();
        counters.rq_active.inc();
        let snapshot = downstream.snapshot.clone();
        let cert = forwarded_cert.as_deref();
        let story = Story::new(worker, &manager, &snapshot, cert, downstream, &mut head, &mut response);
        let keep = story.tell(framing, connection, last).await;
        counters.rq_active.dec();
        if !keep {
            downstream.close::<()>().await;
            break;
        }
    }
    counters.cx_active.dec();
}

/// What comes next on a connection.
enum Next {
    Request(Framing, Connection),
    /// Something that is no request.
    Refused(Malformed),
    /// Nothing.
    End,
}

/// Waits for the next request's head.
async fn next(
    worker: &Worker,
    downstream: &mut Downstream,
    manager: &HttpManager,
    head: &mut RequestHead,
) -> Next {
    let limits = hop::limits(manager);
    let mut scan = Scan::default();
    // Between requests a connection may idle for long, but a head that has begun must come to its end.
    let (mut idle, mut begun) = (None, None);
    let Downstream { stream, timer, .. } = downstream;
    poll_fn(|cx| {
        loop {
            match scan.end(stream.input.bytes(), &limits) {
                Err(malformed) => return Poll::Ready(Next::Refused(malformed)),
                Ok(Some(end)) => {
                    let parsed = parse::request(&stream.input.bytes()[..end], &limits, head);
                    stream.input.consume(end);
                    return Poll::Ready(match parsed {
                        Ok((framing, connection)) => Next::Request(framing, connection),
                        Err(malformed) => Next::Refused(malformed),
                    });
                }
                Ok(None) => {}
            }
            if stream.input.is_full() {
                stream.input.grow(limits.max_head);
            }
            match stream.poll_fill(cx) {
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(_) => return Poll::Ready(Next::End),
                Poll::Pending => break,
            }
        }
        if stream.input.is_empty() {
            stream.rest();
            if worker.is_draining() {
                return Poll::Ready(Next::End);
            }
        }
        let after = |timeout: Option<Duration>| timeout.map(|timeout| Instant::now() + timeout);
        if idle.is_none() {
            idle = after(manager.idle_timeout);
        }
        if begun.is_none() && !stream.input.is_empty() {
            begun = after(earlier(manager.stream_idle_timeout, manager.request_timeout));
        }
        timer.poll(cx, earlier(idle, begun)).map(|()| Next::End)
    })
    .await
}

fn refuse_malformed(
    worker: &Worker,
    downstream: &mut Downstream,
    manager: &HttpManager,
    malformed: Malformed,
) {
    let mut response = ResponseHead::build(malformed.status, &[]);
    hop::finish_response(worker, manager, &mut response, Instant::now());
    write::response(&mut downstream.stream.output, &response, Framing::None, "GET", Persistence::Close);
    let mut record = Record::new(downstream.listener.direction, SystemTime::now());
    record.status = malformed.status;
    record.flags = Flags::DPE;
    record.details = malformed.reason;
    record.downstream = Some(&downstream.peer);
    record.downstream_local = Some(downstream.destination);
    record.downstream_remote = Some(downstream.source);
    record.downstream_direct = Some(downstream.source);
    let context = telemetry::Context { record: &record, request: None, response: Some(&response) };
    for log in &manager.access_logs {
        if let Some(writer) = &worker.log {
            writer.log(log, &context);
        }
    }
}
