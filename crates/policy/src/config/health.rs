//! Outlier detection and slow start. The state of both is in [`state::health`](crate::state::health).
//!
//! Source: `envoy.config.cluster.v3.OutlierDetection`, `envoy.config.cluster.v3.Cluster.SlowStartConfig`.

use std::{sync::Arc, time::Duration};

use crate::state::health::OutlierState;

/// Outlier detection of a cluster: when endpoints are ejected, and for how long. `outlier` decides.
#[derive(Debug)]
pub struct Outlier {
    /// Limit on 5xx responses in a row (`consecutive_5xx`).
    pub consecutive_5xx: ConsecutiveLimit,
    /// Limit on 502, 503 and 504 responses in a row (`consecutive_gateway_failure`).
    pub consecutive_gateway_failure: ConsecutiveLimit,
    /// Limit on failed connections in a row (`consecutive_local_origin_failure`), where they are counted apart.
    pub consecutive_local_origin_failure: ConsecutiveLimit,
    /// Failed connections are counted apart and not as 503 (`split_external_local_origin_errors`).
    pub split: bool,
    /// Time between two checks. A check restores endpoints whose ejection is over, and compares success rates.
    pub interval: Duration,
    /// Length of the first ejection; each further ejection adds it once more.
    pub base_ejection: Duration,
    /// Maximum length of an ejection, without jitter.
    pub max_ejection: Duration,
    /// Maximum jitter that is added to the length of an ejection.
    pub jitter: Duration,
    /// Maximum share of ejected endpoints in percent.
    pub max_percent: u32,
    /// One endpoint may be ejected whatever `max_percent` says (`always_eject_one_host`).
    pub always_one: bool,
    /// Ejection of endpoints whose success rate is low compared with the others.
    pub success_rate: HealthComparison,
    /// Ejection of endpoints whose share of failures is above a fixed percentage.
    pub failure_percentage: HealthComparison,
    /// Statuses of responses that count as errors, in ascending order; `None`: those from 500.
    pub errors: Option<Box<[u16]>>,
    /// State of the detection, shared by all workers.
    pub state: Arc<OutlierState>,
}

/// Limit on failures in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsecutiveLimit {
    /// Number of failures in a row that leads to an ejection.
    pub number: u32,
    /// Probability in percent that the endpoint is ejected when it reaches the limit (`enforcing_…`).
    pub enforcing: u32,
}

/// Comparison of endpoints at the end of an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthComparison {
    /// Minimum number of endpoints with enough requests; with fewer, nothing is compared.
    pub hosts: u32,
    /// Minimum number of requests in an interval for an endpoint to be compared.
    pub requests: u32,
    /// For success rates: distance below the mean, in thousandths of a standard deviation. For failures: percentage.
    pub threshold: u32,
    /// Probability in percent that the endpoint is ejected (`enforcing_…`).
    pub enforcing: u32,
    /// The same probability for failed connections, where they are counted apart.
    pub enforcing_local: u32,
}

/// Cause of an ejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the like-named statistic of Envoy")]
pub enum EjectionCause {
    Consecutive5xx,
    ConsecutiveGatewayFailure,
    ConsecutiveLocalOriginFailure,
    SuccessRate,
    LocalOriginSuccessRate,
    FailurePercentage,
    LocalOriginFailurePercentage,
}

impl std::fmt::Display for EjectionCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Consecutive5xx => "too many 5xx in a row",
            Self::ConsecutiveGatewayFailure => "too many 502, 503 and 504 in a row",
            Self::ConsecutiveLocalOriginFailure => "too many failed connections in a row",
            Self::SuccessRate => "its success rate is below that of the other endpoints",
            Self::LocalOriginSuccessRate => {
                "its rate of successful connections is below that of the other endpoints"
            }
            Self::FailurePercentage => "too many of its responses are 5xx",
            Self::LocalOriginFailurePercentage => "too many connections to it fail",
        })
    }
}

/// Slow start: the weight of a new endpoint grows during `window`. An endpoint that is restored after an ejection has
/// its full weight at once, as in Envoy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowStart {
    /// Length of the slow start.
    pub window: Duration,
    /// The weight is multiplied by the part of the window that has passed, to the power of one over this number.
    pub aggression: f64,
    /// Minimum of this factor.
    pub min: f64,
}

impl SlowStart {
    /// Returns the factor for the weight of an endpoint.
    pub fn factor(&self, age: Duration) -> f64 {
        if age >= self.window {
            return 1.0;
        }
        let passed = age.max(Duration::from_millis(1)).as_secs_f64() / self.window.as_secs_f64();
        passed.powf(1.0 / self.aggression).clamp(self.min, 1.0)
    }
}
