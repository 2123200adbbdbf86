//! Tunnels: the bytes that follow a CONNECT or an upgrade.
//!
//! Between two HTTP/1.1 connections, the code of the TCP proxy forwards them. This module forwards them if at
//! least one side is an HTTP/2 stream.

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use crate::{
    request::context::{RequestContext, admitted_request},
    tcp::Tunnel,
    worker::downstream::Downstream,
};
use skysail_http::{
    flow::Flow,
    http1::{
        Framing, HeadLimits,
        write::{self, Persistence},
    },
    stage::TransferError,
    timer::{Timer, earlier},
    wire::Wire,
};
use skysail_policy::error::{self, Error, Flags};

impl RequestContext<'_> {
    /// Sends the head that grants the upgrade, and forwards bytes in both directions until the tunnel ends.
    pub(crate) async fn tunnel(&mut self, idle_timeout: Option<Duration>) -> Result<(), Error> {
        self.exchange.keep_alive = false;
        let Some(mut upstream) = self.outcome.upstream.take() else { return Ok(()) };
        let Downstream { wire, timer, origin } = &mut *self.exchange.downstream;
        let admitted = admitted_request!(self, origin, &upstream.link);
        let admission = &mut self.decision.admission;
        let revoked = || admission.deadline(admitted.worker, || admitted.revalidate());
        let (method, response) = (self.exchange.request.method(), &*self.exchange.response);
        let before = (wire.received(), wire.sent());
        match (&mut *wire, &mut upstream.wire) {
            (Wire::Http1(stream), server) => {
                let connect = method == "CONNECT";
                let persistence = if connect { Persistence::Keep } else { Persistence::Upgrade };
                write::response(&mut stream.output, response, Framing::None, method, persistence);
                if let Wire::Http1(server) = server {
                    Tunnel::default().run(stream, server, timer, idle_timeout, None, revoked).await;
                } else {
                    run(wire, server, timer, idle_timeout, revoked).await;
                }
            }
            (Wire::Http2(duplex), server) => {
                duplex.respond(response, false)?;
                run(wire, server, timer, idle_timeout, revoked).await;
            }
        }
        (self.outcome.received, self.outcome.sent) = (wire.received() - before.0, wire.sent() - before.1);
        self.outcome.upstream = Some(upstream);
        if let Some(refusal) = self.decision.admission.expired() {
            self.outcome.flags.insert(Flags::RV);
            self.outcome.details = error::revoked(refusal).into();
            self.note_revoked();
        }
        Ok(())
    }
}

/// One direction of a tunnel: bytes without framing.
struct TunnelDirection {
    flow: Flow,
    done: bool,
}

impl TunnelDirection {
    fn new() -> Self {
        // Bytes without framing have no trailers, so no limits are needed.
        let limits = HeadLimits { max_head: 0, max_headers: 0, keep_case: false };
        Self { flow: Flow::new(Framing::UntilClose, Framing::UntilClose, limits, false), done: false }
    }

    /// Returns ready when the sender has ended and the receiver's side is shut down.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Wire,
        to: &mut Wire,
    ) -> Poll<Result<(), TransferError>> {
        if self.done {
            return Poll::Ready(Ok(()));
        }
        ready!(self.flow.poll(cx, from, to))?;
        if let Wire::Http1(to) = to {
            ready!(to.poll_shutdown(cx)).map_err(|_| TransferError::Receiver)?;
        }
        self.done = true;
        Poll::Ready(Ok(()))
    }
}

/// Forwards bytes until both directions have ended, one fails, the idle timeout passes, or the deadline that `revoked`
/// returns.
async fn run(
    client: &mut Wire,
    server: &mut Wire,
    timer: &mut Timer,
    idle_timeout: Option<Duration>,
    mut revoked: impl FnMut() -> Option<Instant>,
) {
    let (mut up, mut down) = (TunnelDirection::new(), TunnelDirection::new());
    let mut moved: Option<(u64, Instant)> = None;
    let whole = poll_fn(|cx| {
        let revoked = revoked();
        if revoked.is_some_and(|end| Instant::now() >= end) {
            return Poll::Ready(false);
        }
        // Buffered bytes, such as the head that began the tunnel, are sent even if no others follow.
        let flushed = [client.poll_flush(cx), server.poll_flush(cx)];
        let directions = [up.poll(cx, client, server), down.poll(cx, server, client)];
        if flushed.iter().any(|flushed| matches!(flushed, Poll::Ready(Err(_))))
            || directions.iter().any(|direction| matches!(direction, Poll::Ready(Err(_))))
            || client.is_stream_closed(cx)
            || server.is_stream_closed(cx)
        {
            return Poll::Ready(false);
        }
        if up.done && down.done {
            return Poll::Ready(true);
        }
        let idle = idle_timeout.map(|timeout| {
            let total = client.received() + client.sent();
            let since = match moved {
                Some((before, since)) if before == total => since,
                _ => Instant::now(),
            };
            moved = Some((total, since));
            since + timeout
        });
        match earlier(idle, revoked) {
            None => Poll::Pending,
            end => timer.poll(cx, end).map(|()| false),
        }
    });
    if !whole.await {
        client.abort();
        server.abort();
    }
}
