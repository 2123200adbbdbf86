//! Circuit breakers: limits of connections, requests, pending requests and retries. A guard counts each until
//! it is dropped.
//!
//! A limit holds for all workers together and is counted only where it is set. As in Envoy, a worker without a
//! connection to an endpoint may always open one.

use std::{
    rc::Rc,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Instant,
};

use super::{Host, Pool, increment};
use crate::overload::limit_log::{self, Limit};
use skysail_policy::{
    config::cluster::Limits,
    error::{Error, Kind},
};

/// Slot of a connection in the limits of its endpoint and cluster, from before it is opened until it is closed.
pub(crate) struct ConnectionSlot {
    pub(super) host: Rc<Host>,
    pub(super) pool: Rc<Pool>,
    limited: bool,
    /// Counted in the endpoint's limit across all workers.
    counted: bool,
}

/// The connection limit is reached: wait for a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LimitReached;

/// Guard of a request in flight.
pub(crate) struct ActiveRequest {
    host: Rc<Host>,
    pool: Rc<Pool>,
    limited: bool,
}

/// Guard of a retry or of a pending request.
pub(crate) struct LimitGuard {
    pool: Rc<Pool>,
    of: Option<fn(&Pool) -> &AtomicU32>,
}

impl Pool {
    /// Returns a slot for another connection to this endpoint, if the limits allow it.
    pub(crate) fn admit(self: &Rc<Self>, host: &Rc<Host>) -> Result<ConnectionSlot, LimitReached> {
        let (limit, used) = (self.cluster.limits.connections, &self.cluster.usage.connections);
        let (of_host, limited) = (self.cluster.limits.connections_per_host, limit != u32::MAX);
        let first = host.connections.get() == 0;
        let track = host.endpoint.state.as_ref().filter(|_| of_host != u32::MAX);
        if let Some(track) = track
            && !claim(&track.connections, of_host)
        {
            if !first {
                return Err(LimitReached);
            }
            track.connections.fetch_add(1, Relaxed);
        }
        if limited && !claim(used, limit) {
            if !first {
                if let Some(track) = track {
                    track.connections.fetch_sub(1, Relaxed);
                }
                return Err(LimitReached);
            }
            used.fetch_add(1, Relaxed);
        }
        host.connections.set(host.connections.get() + 1);
        Ok(ConnectionSlot { host: host.clone(), pool: self.clone(), limited, counted: track.is_some() })
    }

    /// Counts a request; `None` if the limit is reached.
    pub(crate) fn begin(self: &Rc<Self>, host: &Rc<Host>) -> Option<ActiveRequest> {
        let limited = self.cluster.limits.requests != u32::MAX || self.cluster.limits.budget.is_some();
        if limited && !claim(&self.cluster.usage.requests, self.cluster.limits.requests) {
            self.stats.rq_active_overflow.inc();
            self.log_limit(Limit::Requests);
            return None;
        }
        if let Some(interval) = self.cluster.limits.budget.and_then(|budget| budget.interval) {
            self.cluster.usage.recent.add(interval, Instant::now());
        }
        host.requests.set(host.requests.get() + 1);
        increment(&host.totals.requests);
        self.stats.rq_total.inc();
        self.stats.rq_active.inc();
        Some(ActiveRequest { host: host.clone(), pool: self.clone(), limited })
    }

    /// Counts a retry; `None` if the limit is reached.
    pub(crate) fn retry(self: &Rc<Self>) -> Option<LimitGuard> {
        let Limits { retries, budget, .. } = self.cluster.limits;
        let limit = budget.map_or(retries, |budget| {
            let usage = &self.cluster.usage;
            let requests = match budget.interval {
                Some(interval) => usage.recent.count(interval, Instant::now()),
                None => u64::from(usage.requests.load(Relaxed)) + u64::from(usage.pending.load(Relaxed)),
            };
            let share = requests * u64::from(budget.share) / 1_000_000;
            u32::try_from(share).unwrap_or(u32::MAX).max(budget.min)
        });
        let retry = self.counted(limit, |pool| &pool.cluster.usage.retries);
        if retry.is_none() {
            self.stats.rq_retry_overflow.inc();
            self.log_limit(Limit::Retries);
        }
        retry
    }

    /// Counts a request that waits because the connection limit is reached.
    ///
    /// # Errors
    /// The limit of pending requests is reached.
    pub(crate) fn pending(self: &Rc<Self>) -> Result<LimitGuard, Error> {
        self.stats.cx_overflow.inc();
        self.log_limit(Limit::Connections);
        let pending = self.counted(self.cluster.limits.pending, |pool| &pool.cluster.usage.pending);
        if pending.is_none() {
            self.stats.rq_pending_overflow.inc();
            self.log_limit(Limit::Pending);
        }
        pending.ok_or_else(|| Error::new(Kind::Overflow))
    }

    /// Logs that a limit is reached.
    pub(super) fn log_limit(&self, limit: Limit) {
        limit_log::log(limit, format_args!("cluster {}", self.cluster.name));
    }

    fn counted(self: &Rc<Self>, limit: u32, of: fn(&Self) -> &AtomicU32) -> Option<LimitGuard> {
        if limit == u32::MAX && self.cluster.limits.budget.is_none() {
            return Some(LimitGuard { pool: self.clone(), of: None });
        }
        claim(of(self), limit).then(|| LimitGuard { pool: self.clone(), of: Some(of) })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.host.connections.set(self.host.connections.get().saturating_sub(1));
        if let Some(track) = self.host.endpoint.state.as_ref().filter(|_| self.counted) {
            track.connections.fetch_sub(1, Relaxed);
        }
        if self.limited {
            self.pool.cluster.usage.connections.fetch_sub(1, Relaxed);
        }
        if self.limited || self.counted {
            self.pool.room.notify_waiters();
        }
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.host.requests.set(self.host.requests.get().saturating_sub(1));
        self.pool.stats.rq_active.dec();
        if self.limited {
            self.pool.cluster.usage.requests.fetch_sub(1, Relaxed);
        }
    }
}

impl Drop for LimitGuard {
    fn drop(&mut self) {
        if let Some(of) = self.of {
            of(&self.pool).fetch_sub(1, Relaxed);
        }
    }
}

/// Increments the counter if it is below the limit.
fn claim(counter: &AtomicU32, limit: u32) -> bool {
    counter.fetch_update(Relaxed, Relaxed, |used| (used < limit).then_some(used + 1)).is_ok()
}
