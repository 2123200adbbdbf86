//! Outlier detection of a pool: reports results to `outlier`, and counts and logs its decisions.

use std::{
    cell::RefCell,
    rc::{Rc, Weak},
    time::Instant,
};

use super::Pool;
use crate::overload::limit_log::Limit;
use skysail_http::timer;
use skysail_policy::{
    config::{
        Endpoint,
        health::{EjectionCause, Outlier},
    },
    error::Kind,
    outlier::{self, EjectionVerdict, UpstreamResult},
    state::health::EndpointState,
};

impl Pool {
    /// Records the result of a request to an endpoint.
    #[inline]
    pub(crate) fn note(&self, endpoint: &Endpoint, outcome: UpstreamResult, rng: &RefCell<fastrand::Rng>) {
        if let (Some(outlier), Some(track)) = (&self.cluster.outlier, &endpoint.state) {
            outlier::record(outlier, track, outcome, |cause| {
                decide(self, outlier, (endpoint, track), cause, &mut rng.borrow_mut());
            });
        }
    }

    /// Records the failure of a connection or request, if the endpoint caused it.
    pub(crate) fn note_failure(&self, endpoint: &Endpoint, kind: &Kind, rng: &RefCell<fastrand::Rng>) {
        match kind {
            Kind::TryTimeout => self.stats.rq_per_try_timeout.inc(),
            Kind::UpstreamProtocol => self.stats.cx_protocol_error.inc(),
            Kind::AnswerTooLarge => {
                self.stats.cx_protocol_error.inc();
                self.stats.head_too_large.inc();
                self.log_limit(Limit::AnswerHead);
            }
            _ => {}
        }
        let outcome = match kind {
            Kind::ConnectFailed | Kind::ConnectTimeout => UpstreamResult::Failed { connected: false },
            Kind::UpstreamClosed
            | Kind::UpstreamSilent
            | Kind::UpstreamReset
            | Kind::UpstreamRefused
            | Kind::UpstreamProtocol
            | Kind::AnswerTooLarge => UpstreamResult::Failed { connected: true },
            Kind::ResponseTimeout | Kind::TryTimeout => UpstreamResult::Late,
            _ => return,
        };
        self.note(endpoint, outcome, rng);
    }
}

fn decide(
    pool: &Pool,
    outlier: &Outlier,
    (endpoint, track): (&Endpoint, &EndpointState),
    cause: EjectionCause,
    rng: &mut fastrand::Rng,
) {
    let Some(stats) = &pool.outliers else { return };
    let endpoints = pool.cluster.endpoints.load();
    let verdict = outlier::eject(outlier, &endpoints, track, cause, Instant::now(), rng);
    let (detected, enforced) = stats.of(cause);
    if verdict != EjectionVerdict::AlreadyEjected {
        detected.inc();
    }
    let (cluster, address) = (&pool.cluster.name, endpoint.place());
    match verdict {
        EjectionVerdict::Ejected { term, change } => {
            stats.ejections_enforced.inc();
            enforced.inc();
            stats.ejections_active.add(change);
            tracing::warn!("endpoint {address} of cluster {cluster} is ejected for {term:?}: {cause}");
        }
        EjectionVerdict::Overflow => {
            stats.ejections_overflow.inc();
            tracing::debug!(
                "endpoint {address} of cluster {cluster} fails but is not ejected because too many already are: {cause}"
            );
        }
        EjectionVerdict::NotEnforced | EjectionVerdict::AlreadyEjected => {}
    }
}

/// Runs the interval check of a cluster's endpoints until the cluster is removed. One worker per interval does
/// the check.
pub(super) async fn watch(pool: Weak<Pool>) {
    let mut rng = fastrand::Rng::new();
    while let Some(interval) = interval(&pool) {
        timer::sleep(interval).await;
        if let Some(pool) = pool.upgrade() {
            check_endpoints(&pool, &mut rng);
        }
    }
}

fn interval(pool: &Weak<Pool>) -> Option<std::time::Duration> {
    let pool = pool.upgrade().filter(|pool| !pool.is_removed.get())?;
    pool.cluster.outlier.as_ref().map(|outlier| outlier.interval)
}

fn check_endpoints(pool: &Rc<Pool>, rng: &mut fastrand::Rng) {
    let (Some(outlier), Some(stats)) = (&pool.cluster.outlier, &pool.outliers) else { return };
    let now = Instant::now();
    if !outlier::is_due(outlier, now) {
        return;
    }
    let endpoints = pool.cluster.endpoints.load();
    let mut found = Vec::new();
    let change = outlier::check(
        outlier,
        &endpoints,
        now,
        |endpoint| {
            let (cluster, address) = (&pool.cluster.name, endpoint.place());
            tracing::info!("endpoint {address} of cluster {cluster} is no longer ejected");
        },
        |endpoint, track, cause| found.push((endpoint, track, cause)),
    );
    // The gauge is the sum over all workers, so each adds its own changes.
    stats.ejections_active.add(change);
    for (endpoint, track, cause) in found {
        decide(pool, outlier, (endpoint, track), cause, rng);
    }
}
