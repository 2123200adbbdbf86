use std::{net::SocketAddr, sync::Arc};

use super::*;

pub(crate) fn outlier() -> Outlier {
    let never = HealthComparison { hosts: 3, requests: 10, threshold: 0, enforcing: 0, enforcing_local: 0 };
    Outlier {
        consecutive_5xx: ConsecutiveLimit { number: 3, enforcing: 100 },
        consecutive_gateway_failure: ConsecutiveLimit { number: 2, enforcing: 100 },
        consecutive_local_origin_failure: ConsecutiveLimit { number: 2, enforcing: 100 },
        split: false,
        interval: Duration::from_secs(10),
        base_ejection: Duration::from_secs(30),
        max_ejection: Duration::from_secs(100),
        jitter: Duration::ZERO,
        max_percent: 50,
        always_one: false,
        success_rate: HealthComparison { threshold: 1000, ..never },
        failure_percentage: HealthComparison { threshold: 85, ..never },
        errors: None,
        state: Arc::default(),
    }
}

#[test]
fn listed_statuses_replace_those_from_500() {
    let plain = outlier();
    assert_eq!(plain.result_of(200, 503), UpstreamResult::Answered(503));
    let listed = Outlier { errors: Some([418, 429, 503].into()), ..outlier() };
    let answered = |status| listed.result_of(status, status);
    assert_eq!(answered(429), UpstreamResult::Answered(500), "counts as 5xx");
    assert_eq!(answered(503), UpstreamResult::Answered(503));
    assert_eq!(answered(500), UpstreamResult::Answered(200), "is not listed");
    let causes = found(&listed, &[answered(418), answered(429), answered(418)]);
    assert_eq!(causes, [EjectionCause::Consecutive5xx]);
}

fn endpoints(count: u8, now: Instant) -> Endpoints {
    let one = |index| {
        let plain = Endpoint::new(SocketAddr::from(([10, 0, 0, index], 80)), None);
        Arc::new(Endpoint { state: Some(Arc::new(EndpointState::new(now))), ..plain })
    };
    Endpoints::of((0..count).map(one).collect())
}

fn track(endpoints: &Endpoints, index: usize) -> &EndpointState {
    endpoints.priorities[0][index].state.as_ref().unwrap()
}

/// Returns the causes that these results lead to.
fn found(outlier: &Outlier, outcomes: &[UpstreamResult]) -> Vec<EjectionCause> {
    let (track, mut causes) = (EndpointState::new(Instant::now()), Vec::new());
    for outcome in outcomes {
        record(outlier, &track, *outcome, |cause| causes.push(cause));
    }
    causes
}

#[test]
fn failures_in_a_row_are_detected() {
    use EjectionCause::{
        Consecutive5xx as Any, ConsecutiveGatewayFailure as Gateway, ConsecutiveLocalOriginFailure as Local,
    };
    let at = UpstreamResult::Answered;
    let refused = UpstreamResult::Failed { connected: false };
    let mut outlier = outlier();
    assert_eq!(found(&outlier, &[at(500), at(500), at(200), at(500), at(500)]), []);
    assert_eq!(found(&outlier, &[at(500), at(501), at(599)]), [Any]);
    assert_eq!(found(&outlier, &[at(503), at(504), at(502)]), [Gateway, Any]);
    assert_eq!(found(&outlier, &[at(503), at(500), at(502), at(404), at(503), at(503)]), [Any, Gateway]);
    // Without a response, a failure counts as 503 or 504.
    assert_eq!(found(&outlier, &[refused, UpstreamResult::Late]), [Gateway]);
    assert_eq!(found(&outlier, &[refused, UpstreamResult::Connected, refused]), []);
    // After detection, the count starts again.
    assert_eq!(found(&outlier, &[at(500); 7]), [Any, Any]);

    outlier.split = true;
    assert_eq!(found(&outlier, &[refused, refused, refused, refused]), [Local, Local]);
    assert_eq!(found(&outlier, &[refused, at(500), refused, at(500), at(500)]), [Any]);
    assert_eq!(found(&outlier, &[refused, UpstreamResult::Connected, refused]), []);
    assert_eq!(found(&outlier, &[UpstreamResult::Failed { connected: true }; 3]), []);
}

#[test]
fn ejections_grow_longer_and_shrink_again() {
    let outlier = outlier();
    millis(Instant::now());
    let start = Instant::now();
    let endpoints = endpoints(2, start);
    let mut rng = fastrand::Rng::new();
    let at = |seconds| start + Duration::from_secs(seconds);
    let eject = |now, rng: &mut fastrand::Rng| match eject(
        &outlier,
        &endpoints,
        track(&endpoints, 0),
        EjectionCause::Consecutive5xx,
        now,
        rng,
    ) {
        EjectionVerdict::Ejected { term, change: 1 } => term.as_secs(),
        other => panic!("{other:?}"),
    };
    let back = |now| {
        let mut back = 0;
        let change = check(&outlier, &endpoints, now, |_| back += 1, |_, _, cause| panic!("{cause:?}"));
        assert_eq!(change, 0_u64.wrapping_sub(back));
        back
    };
    assert_eq!(eject(at(0), &mut rng), 30);
    assert_eq!((back(at(29)), back(at(30))), (0, 1));
    assert_eq!(track(&endpoints, 0).age(at(31)), Duration::from_secs(31), "it does not start again");
    assert_eq!(eject(at(31), &mut rng), 60);
    assert_eq!((back(at(90)), back(at(91))), (0, 1));
    // The maximum length.
    for (now, term) in [(100, 90), (200, 100), (400, 100)] {
        assert_eq!(eject(at(now), &mut rng), term);
        assert_eq!(back(at(now + term)), 1);
    }
    // Each interval without an ejection reduces the length.
    assert_eq!((back(at(510)), back(at(520)), back(at(530))), (0, 0, 0));
    assert_eq!(eject(at(540), &mut rng), 90);
    assert_eq!(end_all(&outlier), 0_u64.wrapping_sub(1));
}

#[test]
fn ejections_respect_the_limit() {
    let now = Instant::now();
    let mut rng = fastrand::Rng::new();
    // As in Envoy: at 50 %, one of two may be ejected; at 49 %, none.
    for (count, percent, always_one, expected) in [
        (2, 50, false, 1),
        (2, 49, false, 0),
        (2, 49, true, 1),
        (5, 45, false, 2),
        (5, 100, false, 5),
        (2, 0, false, 0),
    ] {
        let outlier = Outlier { max_percent: percent, always_one, ..outlier() };
        let endpoints = endpoints(count, now);
        let mut ejected = 0;
        for index in 0..usize::from(count) {
            let track = track(&endpoints, index);
            let verdict = eject(&outlier, &endpoints, track, EjectionCause::Consecutive5xx, now, &mut rng);
            match verdict {
                EjectionVerdict::Ejected { .. } => ejected += 1,
                other => assert_eq!(other, EjectionVerdict::Overflow),
            }
        }
        assert_eq!(ejected, expected, "{count} {percent}");
    }
    let mut spares = outlier();
    spares.consecutive_5xx.enforcing = 0;
    let endpoints = endpoints(2, now);
    let one = track(&endpoints, 0);
    assert_eq!(
        eject(&spares, &endpoints, one, EjectionCause::Consecutive5xx, now, &mut rng),
        EjectionVerdict::NotEnforced
    );
    let ejected = eject(&spares, &endpoints, one, EjectionCause::ConsecutiveGatewayFailure, now, &mut rng);
    assert!(matches!(ejected, EjectionVerdict::Ejected { .. }));
    let again = eject(&spares, &endpoints, one, EjectionCause::ConsecutiveGatewayFailure, now, &mut rng);
    assert_eq!(again, EjectionVerdict::AlreadyEjected);
}

#[test]
fn success_rates_are_compared() {
    let outlier = outlier();
    let now = Instant::now();
    let endpoints = endpoints(5, now);
    let requests = |index: usize, good: u32, bad: u32| {
        for number in 0..good + bad {
            // The order never has too many failures in a row.
            let status = if number % (good + bad).div_ceil(bad.max(1)) == 0 && bad > 0 { 500 } else { 200 };
            record(&outlier, track(&endpoints, index), UpstreamResult::Answered(status), |_| ());
        }
    };
    let look = || {
        let mut found = Vec::new();
        check(&outlier, &endpoints, now, |_| (), |one, _, cause| found.push((one.address, cause)));
        found
    };
    let address = endpoints.priorities[0][3].address;
    (0..3).for_each(|index| requests(index, 20, 0));
    requests(3, 10, 10);
    // Too few requests for a comparison.
    requests(4, 0, 5);
    assert_eq!(look(), [(address, EjectionCause::SuccessRate)]);
    assert_eq!(look(), [], "counts start again with each interval");
    (0..3).for_each(|index| requests(index, 20, 0));
    requests(3, 0, 20);
    assert_eq!(look(), [(address, EjectionCause::SuccessRate), (address, EjectionCause::FailurePercentage)]);
    // Too few endpoints for a comparison.
    requests(3, 0, 20);
    assert_eq!(look(), []);
}

#[test]
fn one_worker_runs_the_check_of_each_interval() {
    let outlier = outlier();
    millis(Instant::now());
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    assert!(is_due(&outlier, start));
    assert!(!is_due(&outlier, at(9)));
    assert!(is_due(&outlier, at(10)));
    assert!(!is_due(&outlier, at(10)));
}
