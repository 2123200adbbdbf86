//! What follows a CONNECT or an upgrade: bytes both ways between two ends of which at least one is a stream of HTTP/2.
//! (Between two connections of HTTP/1.1 they are passed on as by the TCP proxy.)

use std::{
    future::poll_fn,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use skysail_http::{
    flow::{Broken, Flow},
    http1::{Framing, HeadLimits},
    timer::{Timer, earlier},
    wire::Wire,
};

/// One way: bytes without any framing, to their end.
struct TunnelDirection {
    flow: Flow,
    done: bool,
}

impl TunnelDirection {
    fn new() -> Self {
        // There are no trailers.
        let limits = HeadLimits { max_head: 0, max_headers: 0 };
        Self { flow: Flow::new(Framing::UntilClose, Framing::UntilClose, limits, false), done: false }
    }

    /// Ready at the end, of which the other side has been told.
    fn poll(&mut self, cx: &mut Context<'_>, from: &mut Wire, to: &mut Wire) -> Poll<Result<(), Broken>> {
        if self.done {
            return Poll::Ready(Ok(()));
        }
        ready!(self.flow.poll(cx, from, to))?;
        if let Wire::Http1(to) = to {
            ready!(to.poll_shutdown(cx)).map_err(|_| Broken::Receiver)?;
        }
        self.done = true;
        Poll::Ready(Ok(()))
    }
}

/// Passes bytes on until both ways have ended, one is broken, nothing has moved for too long, or until `revoked`.
pub(crate) async fn run(
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
        // What waits to be written, such as the head that began this, goes out whether anything follows or not.
        let flushed = [client.poll_flush(cx), server.poll_flush(cx)];
        let ways = [up.poll(cx, client, server), down.poll(cx, server, client)];
        if flushed.iter().any(|flushed| matches!(flushed, Poll::Ready(Err(_))))
            || ways.iter().any(|way| matches!(way, Poll::Ready(Err(_))))
            || client.is_lost(cx)
            || server.is_lost(cx)
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
        client.break_off();
        server.break_off();
    }
}
