//! Outlier detection: ejects endpoints that fail, for a limited time. Does no IO; the caller reports results and time.
//!
//! Source: `envoy.config.cluster.v3.OutlierDetection`. An ejection by one worker applies to all workers.

use std::{
    sync::{PoisonError, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::{
    config::{
        Endpoint, Endpoints,
        health::{ConsecutiveLimit, EjectionCause, HealthComparison, Outlier},
    },
    state::health::{EndpointState, SuccessRate, millis},
};

#[cfg(test)]
pub(crate) mod tests;

/// Result of a request or connection to an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpstreamResult {
    /// A response with this status.
    Answered(u16),
    /// A connection was established; the result of its payload is unknown.
    Connected,
    /// The connection failed or was reset.
    Failed {
        /// The connection had been established.
        connected: bool,
    },
    /// The response timed out.
    Late,
}

/// Result of an attempt to eject an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EjectionVerdict {
    /// The endpoint is ejected.
    Ejected {
        /// Minimum length of the ejection.
        term: Duration,
        /// Change of the number of ejected endpoints since the last report.
        change: EjectionChange,
    },
    /// Not ejected: too many endpoints are ejected.
    Overflow,
    /// Not ejected: the cause is not enforced this time (`enforcing_…`).
    NotEnforced,
    /// The endpoint is ejected already, or its cluster was removed.
    AlreadyEjected,
}

/// Difference to add to the reported number of ejected endpoints. Both wrap.
pub type EjectionChange = u64;

/// Records a result of an endpoint. Calls `detected` for each limit that is reached.
pub fn record(
    outlier: &Outlier,
    track: &EndpointState,
    outcome: UpstreamResult,
    mut detected: impl FnMut(EjectionCause),
) {
    if outlier.split {
        match outcome {
            UpstreamResult::Answered(_) | UpstreamResult::Connected => connected(track, true),
            UpstreamResult::Failed { connected: before } => {
                if before {
                    connected(track, true);
                }
                local_failure(outlier, track, &mut detected);
            }
            UpstreamResult::Late => {
                connected(track, true);
                local_failure(outlier, track, &mut detected);
            }
        }
        if let UpstreamResult::Answered(status) = outcome {
            answered(outlier, track, status, detected);
        }
        return;
    }
    let status = match outcome {
        UpstreamResult::Answered(status) => status,
        UpstreamResult::Connected => 200,
        UpstreamResult::Failed { .. } => 503,
        UpstreamResult::Late => 504,
    };
    answered(outlier, track, status, detected);
}

fn answered(outlier: &Outlier, track: &EndpointState, status: u16, mut detected: impl FnMut(EjectionCause)) {
    let good = status < 500;
    count(&track.answers, good);
    if good {
        reset(&track.consecutive_5xx);
        reset(&track.consecutive_gateway_failure);
        return;
    }
    if !matches!(status, 502..=504) {
        reset(&track.consecutive_gateway_failure);
    } else if reaches_limit(&track.consecutive_gateway_failure, outlier.consecutive_gateway_failure) {
        detected(EjectionCause::ConsecutiveGatewayFailure);
    }
    if reaches_limit(&track.consecutive_5xx, outlier.consecutive_5xx) {
        detected(EjectionCause::Consecutive5xx);
    }
}

fn connected(track: &EndpointState, good: bool) {
    count(&track.connects, good);
    reset(&track.consecutive_local_origin_failure);
}

fn local_failure(outlier: &Outlier, track: &EndpointState, detected: &mut impl FnMut(EjectionCause)) {
    count(&track.connects, false);
    if reaches_limit(&track.consecutive_local_origin_failure, outlier.consecutive_local_origin_failure) {
        detected(EjectionCause::ConsecutiveLocalOriginFailure);
    }
}

fn count(rate: &SuccessRate, good: bool) {
    rate.all.fetch_add(1, Relaxed);
    if good {
        rate.good.fetch_add(1, Relaxed);
    }
}

/// Resets a counter. Writes only if the value changes, because all workers read it.
fn reset(counter: &std::sync::atomic::AtomicU32) {
    if counter.load(Relaxed) != 0 {
        counter.store(0, Relaxed);
    }
}

/// Increments a counter; returns true and resets it when it reaches the limit.
fn reaches_limit(counter: &std::sync::atomic::AtomicU32, limit: ConsecutiveLimit) -> bool {
    let reached = counter.fetch_add(1, Relaxed) + 1 == limit.number;
    if reached {
        counter.store(0, Relaxed);
    }
    reached
}

/// Ejects an endpoint if the limits allow it. `endpoints` are all endpoints of its cluster.
pub fn eject(
    outlier: &Outlier,
    endpoints: &Endpoints,
    track: &EndpointState,
    cause: EjectionCause,
    now: Instant,
    rng: &mut fastrand::Rng,
) -> EjectionVerdict {
    let mut active = outlier.state.active.lock().unwrap_or_else(PoisonError::into_inner);
    if track.is_ejected() || active.is_none() {
        return EjectionVerdict::AlreadyEjected;
    }
    let (all, ejected) = census(endpoints);
    let first = outlier.always_one && ejected == 0;
    if !first && 100 * (ejected + 1) > outlier.max_percent as usize * all {
        return EjectionVerdict::Overflow;
    }
    if rng.u32(..100) >= outlier.enforcing(cause) {
        return EjectionVerdict::NotEnforced;
    }
    let multiple = track.multiple.load(Relaxed);
    // The multiple stops growing when the ejection has its maximum length.
    let multiple = if outlier.base_ejection * multiple < outlier.max_ejection + outlier.base_ejection {
        multiple + 1
    } else {
        multiple
    };
    let jitter = rng.u64(..=u64::try_from(outlier.jitter.as_millis()).unwrap_or(u64::MAX));
    track.multiple.store(multiple, Relaxed);
    track.jitter.store(jitter, Relaxed);
    track.ejected.store(millis(now), Relaxed);
    outlier.state.version.fetch_add(1, Relaxed);
    EjectionVerdict::Ejected { term: outlier.term(track), change: report(&mut active, ejected + 1) }
}

/// Runs the check at the end of an interval. Restores endpoints whose ejection is over, and detects endpoints that are
/// worse than the others. Calls `restored` and `detected` for each of them.
pub fn check<'a>(
    outlier: &Outlier,
    endpoints: &'a Endpoints,
    now: Instant,
    mut restored: impl FnMut(&'a Endpoint),
    mut detected: impl FnMut(&'a Endpoint, &'a EndpointState, EjectionCause),
) -> EjectionChange {
    let tracked: Vec<_> =
        endpoints.iter().filter_map(|endpoint| Some((&**endpoint, endpoint.state.as_deref()?))).collect();
    let change = {
        let mut active = outlier.state.active.lock().unwrap_or_else(PoisonError::into_inner);
        for (endpoint, track) in &tracked {
            if !track.is_ejected() {
                let _ = track.multiple.fetch_update(Relaxed, Relaxed, |multiple| multiple.checked_sub(1));
            } else if millis(now).saturating_sub(track.ejected.load(Relaxed))
                >= u64::try_from(outlier.term(track).as_millis()).unwrap_or(u64::MAX)
            {
                track.consecutive_5xx.store(0, Relaxed);
                track.consecutive_gateway_failure.store(0, Relaxed);
                track.consecutive_local_origin_failure.store(0, Relaxed);
                track.ejected.store(0, Relaxed);
                outlier.state.version.fetch_add(1, Relaxed);
                restored(endpoint);
            }
        }
        // Ejected endpoints may also have been removed from the cluster.
        report(&mut active, census(endpoints).1)
    };
    type Of = fn(&EndpointState) -> &SuccessRate;
    let kinds: [(Of, EjectionCause, EjectionCause); 2] = [
        (|track| &track.answers, EjectionCause::SuccessRate, EjectionCause::FailurePercentage),
        (
            |track| &track.connects,
            EjectionCause::LocalOriginSuccessRate,
            EjectionCause::LocalOriginFailurePercentage,
        ),
    ];
    for (of, low, failing) in kinds {
        let rates: Vec<_> = tracked
            .iter()
            .filter_map(|(endpoint, track)| {
                let rate = of(track);
                let (all, good) = (rate.all.swap(0, Relaxed), rate.good.swap(0, Relaxed));
                let percent = 100.0 * f64::from(good) / f64::from(all.max(1));
                (!track.is_ejected()).then_some((*endpoint, *track, all, percent))
            })
            .collect();
        let enough = |comparison: &HealthComparison| {
            let with: Vec<_> = rates.iter().filter(|rate| rate.2 >= comparison.requests).collect();
            if with.len() >= comparison.hosts as usize { with } else { Vec::new() }
        };
        let compared = enough(&outlier.success_rate);
        let count = compared.len().max(1) as f64;
        let mean = compared.iter().map(|rate| rate.3).sum::<f64>() / count;
        let variance = compared.iter().map(|rate| (rate.3 - mean).powi(2)).sum::<f64>() / count;
        let min = mean - f64::from(outlier.success_rate.threshold) / 1000.0 * variance.sqrt();
        for (endpoint, track, ..) in compared.iter().filter(|rate| rate.3 < min) {
            detected(endpoint, track, low);
        }
        let max = f64::from(outlier.failure_percentage.threshold);
        let failed = enough(&outlier.failure_percentage);
        for (endpoint, track, ..) in failed.iter().filter(|rate| 100.0 - rate.3 >= max) {
            detected(endpoint, track, failing);
        }
    }
    change
}

/// Ends all ejections of a removed cluster.
pub fn end_all(outlier: &Outlier) -> EjectionChange {
    let last = outlier.state.active.lock().unwrap_or_else(PoisonError::into_inner).take();
    0_u64.wrapping_sub(last.unwrap_or(0))
}

fn report(active: &mut Option<u64>, now: usize) -> EjectionChange {
    match active {
        Some(last) => (now as u64).wrapping_sub(std::mem::replace(last, now as u64)),
        None => 0,
    }
}

/// Returns whether an interval check is due. Returns true to one worker in each interval.
pub fn is_due(outlier: &Outlier, now: Instant) -> bool {
    let (now, interval) = (millis(now), u64::try_from(outlier.interval.as_millis()).unwrap_or(u64::MAX));
    let checked = &outlier.state.checked;
    // Rounding by a millisecond must not delay the check by a whole interval.
    checked.fetch_update(Relaxed, Relaxed, |last| (now + 1 >= last + interval).then_some(now)).is_ok()
}

/// Returns the number of endpoints and the number of ejected ones.
fn census(endpoints: &Endpoints) -> (usize, usize) {
    let ejected = |endpoint: &&std::sync::Arc<Endpoint>| {
        endpoint.state.as_ref().is_some_and(|track| track.is_ejected())
    };
    (endpoints.iter().count(), endpoints.iter().filter(ejected).count())
}

impl Outlier {
    /// Returns the result of a response with this status. `effective` is the status of its gRPC trailers, if it has
    /// one.
    pub fn result_of(&self, status: u16, effective: u16) -> UpstreamResult {
        UpstreamResult::Answered(match &self.errors {
            None => effective,
            Some(errors) if errors.binary_search(&status).is_ok() => status.max(500),
            Some(_) => 200,
        })
    }

    /// Returns the length of an endpoint's ejection.
    fn term(&self, track: &EndpointState) -> Duration {
        let jitter = Duration::from_millis(track.jitter.load(Relaxed));
        (self.base_ejection * track.multiple.load(Relaxed)).min(self.max_ejection) + jitter
    }

    fn enforcing(&self, cause: EjectionCause) -> u32 {
        match cause {
            EjectionCause::Consecutive5xx => self.consecutive_5xx.enforcing,
            EjectionCause::ConsecutiveGatewayFailure => self.consecutive_gateway_failure.enforcing,
            EjectionCause::ConsecutiveLocalOriginFailure => self.consecutive_local_origin_failure.enforcing,
            EjectionCause::SuccessRate => self.success_rate.enforcing,
            EjectionCause::LocalOriginSuccessRate => self.success_rate.enforcing_local,
            EjectionCause::FailurePercentage => self.failure_percentage.enforcing,
            EjectionCause::LocalOriginFailurePercentage => self.failure_percentage.enforcing_local,
        }
    }
}
