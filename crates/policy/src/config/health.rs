//! What is known of endpoints beyond what the configuration says: who fails is taken out for a while, and who is new
//! gets little at first. All workers share it.
//!
//! Source: `envoy.config.cluster.v3.OutlierDetection`, `envoy.config.cluster.v3.Cluster.SlowStartConfig`.

use std::{
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// When endpoints are ejected, and for how long. `outlier` decides.
#[derive(Debug)]
pub struct Outlier {
    /// After so many 5xx in a row (`consecutive_5xx`).
    pub consecutive_5xx: Limit,
    /// After so many 502, 503 and 504 in a row (`consecutive_gateway_failure`).
    pub consecutive_gateway_failure: Limit,
    /// After so many failed connections in a row (`consecutive_local_origin_failure`), where these are counted apart.
    pub consecutive_local_origin_failure: Limit,
    /// Failed connections do not count as 503 (`split_external_local_origin_errors`).
    pub split: bool,
    /// How often endpoints are looked after: taken back, and compared with each other.
    pub interval: Duration,
    /// How long the first ejection lasts; the next lasts twice as long, and so on.
    pub base_ejection: Duration,
    /// No ejection lasts longer.
    pub max_ejection: Duration,
    /// Up to so much is added to it.
    pub jitter: Duration,
    /// No more than this part of the endpoints is ejected at once, in percent.
    pub max_percent: u32,
    /// But one may always be (`always_eject_one_host`).
    pub always_one: bool,
    /// Who answers worse than the others.
    pub success_rate: HealthComparison,
    /// Who fails too much.
    pub failure_percentage: HealthComparison,
    /// The state of it.
    pub state: OutlierState,
}

/// How much is too much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// In a row.
    pub number: u32,
    /// How many of a hundred times it leads to an ejection (`enforcing_…`).
    pub enforcing: u32,
}

/// When endpoints are compared at the end of an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthComparison {
    /// If there are so many with enough requests.
    pub hosts: u32,
    /// What enough is.
    pub requests: u32,
    /// For success rates: how many thousandths of a standard deviation below the mean are too low. For failures: how many
    /// percent are too many.
    pub threshold: u32,
    /// How many of a hundred times it leads to an ejection (`enforcing_…`).
    pub enforcing: u32,
    /// The same for failed connections, where these are counted apart.
    pub enforcing_local: u32,
}

/// What workers share about a cluster's ejections.
#[derive(Debug)]
pub struct OutlierState {
    /// Another with every ejection, and every end of one.
    pub version: AtomicU32,
    /// When endpoints were looked after; [`millis`].
    pub checked: AtomicU64,
    /// How many were ejected when it was told last; `None` once the cluster is gone. Whoever ejects or takes back holds
    /// it, so that there are never too many.
    pub active: Mutex<Option<u64>>,
}

impl Default for OutlierState {
    fn default() -> Self {
        Self { version: AtomicU32::default(), checked: AtomicU64::default(), active: Mutex::new(Some(0)) }
    }
}

/// Why an endpoint is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the like-named statistic of Envoy")]
pub enum Cause {
    Consecutive5xx,
    ConsecutiveGatewayFailure,
    ConsecutiveLocalOriginFailure,
    SuccessRate,
    LocalOriginSuccessRate,
    FailurePercentage,
    LocalOriginFailurePercentage,
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Consecutive5xx => "too many 5xx in a row",
            Self::ConsecutiveGatewayFailure => "too many 502, 503 and 504 in a row",
            Self::ConsecutiveLocalOriginFailure => "too many failed connections in a row",
            Self::SuccessRate => "it answers worse than the others",
            Self::LocalOriginSuccessRate => "it takes connections worse than the others",
            Self::FailurePercentage => "too many of its answers are 5xx",
            Self::LocalOriginFailurePercentage => "too many connections to it fail",
        })
    }
}

/// An endpoint that was new less than `window` ago counts less than its weight. One that was ejected and is taken back
/// counts in full at once, as in Envoy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowStart {
    /// How long it is new.
    pub window: Duration,
    /// It counts the part of the window that has passed, to the power of one over this.
    pub aggression: f64,
    /// But at least so much.
    pub least: f64,
}

impl SlowStart {
    /// What an endpoint's weight is multiplied with.
    pub fn factor(&self, age: Duration) -> f64 {
        if age >= self.window {
            return 1.0;
        }
        let passed = age.max(Duration::from_millis(1)).as_secs_f64() / self.window.as_secs_f64();
        passed.powf(1.0 / self.aggression).clamp(self.least, 1.0)
    }
}

/// What is known of one endpoint. It stays when the endpoints are sent anew.
#[derive(Debug)]
pub struct Track {
    /// Since when it is there; [`millis`].
    pub since: u64,
    /// When it was ejected; 0 if it is not.
    pub ejected: AtomicU64,
    /// How much is added to the time of this ejection, in milliseconds.
    pub jitter: AtomicU64,
    /// How many times the base time an ejection lasts.
    pub multiple: AtomicU32,
    /// In a row.
    pub consecutive_5xx: AtomicU32,
    /// In a row.
    pub consecutive_gateway_failure: AtomicU32,
    /// In a row.
    pub consecutive_local_origin_failure: AtomicU32,
    /// Answers since endpoints were compared.
    pub answers: Rate,
    /// Connections since then, where these are counted apart.
    pub connects: Rate,
    /// Connections open now, where there is a limit.
    pub connections: AtomicU32,
}

/// How much went well.
#[derive(Debug, Default)]
pub struct Rate {
    /// Of so many.
    pub all: AtomicU32,
    /// So many.
    pub good: AtomicU32,
}

impl Track {
    /// Of an endpoint that comes now.
    pub fn new(now: Instant) -> Self {
        Self {
            since: millis(now),
            ejected: AtomicU64::default(),
            jitter: AtomicU64::default(),
            multiple: AtomicU32::default(),
            consecutive_5xx: AtomicU32::default(),
            consecutive_gateway_failure: AtomicU32::default(),
            consecutive_local_origin_failure: AtomicU32::default(),
            answers: Rate::default(),
            connects: Rate::default(),
            connections: AtomicU32::default(),
        }
    }

    /// Whether it is ejected.
    pub fn is_ejected(&self) -> bool {
        self.ejected.load(Relaxed) != 0
    }

    /// For how long it has been there.
    pub fn age(&self, now: Instant) -> Duration {
        Duration::from_millis(millis(now).saturating_sub(self.since))
    }
}

/// A moment as a number that is never 0.
pub fn millis(now: Instant) -> u64 {
    /// The process was not there before, but a test may say that it was.
    const START: u64 = 1 << 40;
    static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);
    START + u64::try_from(now.saturating_duration_since(*EPOCH).as_millis()).unwrap_or(0)
}
