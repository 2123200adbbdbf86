use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn endpoint(index: usize, weight: u32) -> Arc<Endpoint> {
    let address = SocketAddr::from(([10, 0, 0, u8::try_from(index).unwrap()], 80));
    Arc::new(Endpoint { address, weight, tls: None, workload: None, hostname: None })
}

fn endpoints(priorities: &[&[u32]]) -> Arc<Endpoints> {
    let mut index = 0;
    let mut list = |weights: &&[u32]| {
        weights
            .iter()
            .map(|weight| {
                index += 1;
                endpoint(index, *weight)
            })
            .collect()
    };
    Arc::new(Endpoints { priorities: priorities.iter().map(&mut list).collect() })
}

/// How often each endpoint is picked, by the last part of its address.
fn spread(endpoints: &Arc<Endpoints>, balancer: Balancer, picks: usize) -> HashMap<u8, usize> {
    let mut dice = fastrand::Rng::with_seed(3);
    let mut state = PickState::default();
    let mut counts = HashMap::new();
    for _ in 0..picks {
        let picked = pick(endpoints, balancer, &mut state, |_| 0, Avoid::default(), &mut dice).unwrap();
        *counts.entry(last(picked)).or_default() += 1;
    }
    counts
}

fn last(endpoint: &Endpoint) -> u8 {
    match endpoint.address {
        SocketAddr::V4(address) => address.ip().octets()[3],
        SocketAddr::V6(_) => 0,
    }
}

#[test]
fn round_robin_takes_turns() {
    let counts = spread(&endpoints(&[&[1, 1, 1]]), Balancer::RoundRobin, 30);
    assert_eq!(counts, HashMap::from([(1, 10), (2, 10), (3, 10)]));
}

#[test]
fn weights_are_met() {
    for balancer in [Balancer::RoundRobin, Balancer::LeastRequest(2)] {
        let counts = spread(&endpoints(&[&[3, 1]]), balancer, 400);
        assert!((298..=302).contains(&counts[&1]), "{balancer:?} {counts:?}");
    }
    let counts = spread(&endpoints(&[&[3, 1]]), Balancer::Random, 10_000);
    assert!((7_200..7_800).contains(&counts[&1]), "{counts:?}");
}

#[test]
fn the_less_busy_is_taken() {
    let endpoints = endpoints(&[&[1, 1]]);
    let (mut state, mut dice) = (PickState::default(), fastrand::Rng::with_seed(5));
    let busy = |one: &Endpoint| if last(one) == 1 { 9 } else { 0 };
    let mut busy_picks = 0;
    for _ in 0..1_000 {
        let balancer = Balancer::LeastRequest(2);
        let picked = pick(&endpoints, balancer, &mut state, busy, Avoid::default(), &mut dice).unwrap();
        busy_picks += u32::from(last(picked) == 1);
    }
    // Only when both choices fall on it.
    assert!((180..320).contains(&busy_picks), "{busy_picks}");
}

#[test]
fn the_first_priority_with_endpoints_is_used() {
    assert_eq!(spread(&endpoints(&[&[], &[1], &[1]]), Balancer::Random, 10), HashMap::from([(1, 10)]));
    let none = endpoints(&[]);
    let (mut state, mut dice) = (PickState::default(), fastrand::Rng::with_seed(5));
    assert!(pick(&none, Balancer::RoundRobin, &mut state, |_| 0, Avoid::default(), &mut dice).is_none());
    let some = endpoints(&[&[1]]);
    assert!(pick(&some, Balancer::OriginalDst, &mut state, |_| 0, Avoid::default(), &mut dice).is_none());
    assert!(pick(&some, Balancer::RoundRobin, &mut state, |_| 0, Avoid::default(), &mut dice).is_some());
}

#[test]
fn hosts_tried_before_are_avoided_as_far_as_possible() {
    let endpoints = endpoints(&[&[1, 1]]);
    let (mut state, mut dice) = (PickState::default(), fastrand::Rng::with_seed(5));
    let tried = [SocketAddr::from(([10, 0, 0, 1], 80))];
    let avoid = Avoid { hosts: &tried, attempts: 5 };
    for _ in 0..20 {
        let picked = pick(&endpoints, Balancer::RoundRobin, &mut state, |_| 0, avoid, &mut dice).unwrap();
        assert_eq!(last(picked), 2);
    }
    let all = [tried[0], SocketAddr::from(([10, 0, 0, 2], 80))];
    let avoid = Avoid { hosts: &all, attempts: 5 };
    assert!(pick(&endpoints, Balancer::RoundRobin, &mut state, |_| 0, avoid, &mut dice).is_some());
}

proptest! {
    #[test]
    fn any_set_is_picked_from(
        weights in proptest::collection::vec(0_u32..5, 0..6),
        more in proptest::collection::vec(0_u32..5, 0..6),
        balancer in proptest::sample::select(vec![
            Balancer::RoundRobin, Balancer::LeastRequest(0), Balancer::LeastRequest(3), Balancer::Random,
        ]),
    ) {
        let (mut state, mut dice) = (PickState::default(), fastrand::Rng::with_seed(5));
        for set in [endpoints(&[&weights]), endpoints(&[&more, &weights])] {
            for _ in 0..20 {
                let picked = pick(&set, balancer, &mut state, |_| 1, Avoid::default(), &mut dice);
                prop_assert_eq!(picked.is_none(), set.priorities.iter().all(Vec::is_empty));
            }
        }
    }
}
