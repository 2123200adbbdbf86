//! The network filter `connection_limit`: a maximum of open connections of a filter chain.
//!
//! As in Envoy, the limit applies when a connection has its filter chain, before the TLS handshake and before the
//! policies. Source: `envoy.extensions.filters.network.connection_limit.v3`.

use std::{
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{overload::drain::ConnectionSet, telemetry::stats::ConnectionLimitStats, worker::Worker};
use skysail_http::timer::Timer;
use skysail_policy::config::listener::ConnectionLimit;

/// A connection in the counts of its limits, until it is dropped.
pub(super) struct Counted(Vec<One>);

/// A connection in the count of one limit.
struct One {
    limit: Arc<ConnectionLimit>,
    stats: Rc<ConnectionLimitStats>,
    /// The connection is within the limit. Otherwise it only waits for its delayed close.
    is_admitted: bool,
}

impl Drop for One {
    fn drop(&mut self) {
        self.stats.active.dec();
        if self.is_admitted {
            self.limit.open.end();
        }
    }
}

/// Counts a connection. Returns `None` if it exceeds a limit, after the limit's delay.
pub(super) async fn admit(
    worker: &Worker,
    limits: &[Arc<ConnectionLimit>],
    timer: &mut Timer,
    connections: &ConnectionSet,
) -> Option<Counted> {
    let mut counted = Counted(Vec::with_capacity(limits.len()));
    for limit in limits {
        let stats = worker.shard.connection_limit(&limit.stat_prefix);
        stats.active.inc();
        let is_admitted = limit.open.begin(limit.max_connections);
        counted.0.push(One { limit: Arc::clone(limit), stats: Rc::clone(&stats), is_admitted });
        if !is_admitted {
            stats.limited.inc();
            if let Some(delay) = limit.delay {
                wait(delay, timer, connections).await;
            }
            return None;
        }
    }
    Some(counted)
}

/// Waits for the delay, which a drain shortens.
async fn wait(delay: Duration, timer: &mut Timer, connections: &ConnectionSet) {
    let begin = Instant::now();
    poll_fn(|cx| {
        let time = connections.idle_drain().map_or(delay, |drain| drain.min(delay));
        timer.poll(cx, Some(begin + time))
    })
    .await;
}
