//! Health of endpoints as the workers observe it: failures in a row, success rates, ejections.
//!
//! The settings are in [`config::health`](crate::config::health); `outlier` decides.

use std::{
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// State of a cluster's outlier detection.
#[derive(Debug)]
pub struct OutlierState {
    /// Changes with every ejection and every end of one.
    pub version: AtomicU32,
    /// Time of the last interval check; see [`millis`].
    pub checked: AtomicU64,
    /// Number of ejected endpoints that the metrics have; `None` after the cluster was removed. A worker holds the lock
    /// while it ejects or restores an endpoint, so that the limit on ejections holds.
    pub active: Mutex<Option<u64>>,
}

impl Default for OutlierState {
    fn default() -> Self {
        Self { version: AtomicU32::default(), checked: AtomicU64::default(), active: Mutex::new(Some(0)) }
    }
}

/// State of one endpoint. It survives an update that contains the endpoint again.
#[derive(Debug)]
pub struct EndpointState {
    /// Time at which the endpoint was added; see [`millis`].
    pub since: u64,
    /// Time of the ejection; 0 if the endpoint is not ejected.
    pub ejected: AtomicU64,
    /// Jitter of this ejection in milliseconds.
    pub jitter: AtomicU64,
    /// Length of an ejection as a multiple of the base time.
    pub multiple: AtomicU32,
    /// 5xx responses in a row.
    pub consecutive_5xx: AtomicU32,
    /// 502, 503 and 504 responses in a row.
    pub consecutive_gateway_failure: AtomicU32,
    /// Failed connections in a row.
    pub consecutive_local_origin_failure: AtomicU32,
    /// Responses since the last interval check.
    pub answers: SuccessRate,
    /// Connection attempts since the last interval check, where they are counted apart.
    pub connects: SuccessRate,
    /// Open connections, where the cluster limits them per host.
    pub connections: AtomicU32,
}

/// Success rate.
#[derive(Debug, Default)]
pub struct SuccessRate {
    /// All attempts.
    pub all: AtomicU32,
    /// Successful attempts.
    pub good: AtomicU32,
}

impl EndpointState {
    /// Returns the state of an endpoint that is added now.
    pub fn new(now: Instant) -> Self {
        Self {
            since: millis(now),
            ejected: AtomicU64::default(),
            jitter: AtomicU64::default(),
            multiple: AtomicU32::default(),
            consecutive_5xx: AtomicU32::default(),
            consecutive_gateway_failure: AtomicU32::default(),
            consecutive_local_origin_failure: AtomicU32::default(),
            answers: SuccessRate::default(),
            connects: SuccessRate::default(),
            connections: AtomicU32::default(),
        }
    }

    /// Returns whether the endpoint is ejected.
    pub fn is_ejected(&self) -> bool {
        self.ejected.load(Relaxed) != 0
    }

    /// Returns the time since the endpoint was added.
    pub fn age(&self, now: Instant) -> Duration {
        Duration::from_millis(millis(now).saturating_sub(self.since))
    }
}

/// Returns an instant as milliseconds that are never 0.
pub fn millis(now: Instant) -> u64 {
    /// Offset from which a test can subtract the age of an endpoint.
    const START: u64 = 1 << 40;
    static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);
    START + u64::try_from(now.saturating_duration_since(*EPOCH).as_millis()).unwrap_or(0)
}
