use std::{collections::HashMap, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::{
    config::{
        cluster::{HashFunction, Locality},
        health::{EjectionCause, SlowStart},
        route::{HashCookie, HashKey, HashPolicy},
    },
    state::health::{EndpointState, millis},
};
use skysail_http::head::RequestHead;

const PEAK: Balancer = Balancer::PeakEwma { decay: Duration::ZERO, unknown: Duration::ZERO };
const LEAST: Balancer = Balancer::LeastRequest { choices: 2, bias: 1.0 };
const RING: Balancer = Balancer::RingHash { minimum: 1024, maximum: 1 << 23, function: HashFunction::Xx };

fn endpoint(index: usize, weight: u32) -> Arc<Endpoint> {
    let address = SocketAddr::from(([127, 0, 1, u8::try_from(index).unwrap()], 9));
    Arc::new(Endpoint { weight, ..Endpoint::new(address, None) })
}

/// Returns endpoints 1, 2, … with these weights, by priority.
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
    Arc::new(Endpoints { priorities: priorities.iter().map(&mut list).collect(), ..Endpoints::default() })
}

/// Returns endpoints 1, 2, …, whose health is given by a letter (`h`ealthy, `d`egraded, `u`nhealthy, `l`eaving), in
/// priorities, or in localities of these weights.
fn states(lists: &[&str], weights: &[u32]) -> Arc<Endpoints> {
    let mut endpoints = Endpoints {
        localities: weights
            .iter()
            .map(|weight| Locality { weight: *weight, ..Locality::default() })
            .collect(),
        ..Endpoints::default()
    };
    let mut index = 0;
    for (number, list) in (0..).zip(lists) {
        let one = |state| {
            index += 1;
            let health = match state {
                'h' => Health::Healthy,
                'd' => Health::Degraded,
                'u' => Health::Unhealthy,
                _ => Health::Draining,
            };
            let locality = if weights.is_empty() { 0 } else { number };
            let plain = Endpoint::new(SocketAddr::from(([127, 0, 1, index], 9)), None);
            Arc::new(Endpoint { health, locality, ..plain })
        };
        let list: Vec<_> = list.chars().map(one).collect();
        if weights.is_empty() || endpoints.priorities.is_empty() {
            endpoints.priorities.push(list);
        } else {
            endpoints.priorities[0].extend(list);
        }
    }
    Arc::new(endpoints)
}

fn cluster(balancer: Balancer) -> Cluster {
    Cluster { balancer, ..Cluster::new("c") }
}

/// Returns the number of selections of each endpoint, by the last part of its address.
fn spread(cluster: &Cluster, endpoints: &Arc<Endpoints>, picks: usize) -> HashMap<u8, usize> {
    let mut rng = fastrand::Rng::with_seed(3);
    let mut state = PickState::default();
    let mut counts = HashMap::new();
    for _ in 0..picks {
        let picked = pick(cluster, endpoints, &mut state, |_| 0, PickOptions::default(), &mut rng);
        *counts.entry(picked.map_or(0, |one| last(one))).or_default() += 1;
    }
    counts
}

fn last(endpoint: &Endpoint) -> u8 {
    match endpoint.address {
        SocketAddr::V4(address) => address.ip().octets()[3],
        SocketAddr::V6(_) => 0,
    }
}

/// Returns the endpoints of requests with these hashes.
fn chosen(cluster: &Cluster, endpoints: &Arc<Endpoints>, hashes: impl Iterator<Item = u64>) -> Vec<u8> {
    let (mut state, mut rng) = (PickState::default(), fastrand::Rng::new());
    let mut one = |hash| {
        let want = PickOptions { hash: Some(hash), ..PickOptions::default() };
        pick(cluster, endpoints, &mut state, |_| 0, want, &mut rng).map_or(0, |one| last(one))
    };
    hashes.map(&mut one).collect()
}

#[test]
fn round_robin_takes_turns() {
    let counts = spread(&cluster(Balancer::RoundRobin), &endpoints(&[&[1, 1, 1]]), 30);
    assert_eq!(counts, HashMap::from([(1, 10), (2, 10), (3, 10)]));
}

#[test]
fn weights_are_respected() {
    for balancer in [Balancer::RoundRobin, LEAST] {
        let counts = spread(&cluster(balancer), &endpoints(&[&[3, 1]]), 400);
        assert!((298..=302).contains(&counts[&1]), "{balancer:?} {counts:?}");
    }
    // Random selection ignores weights, as in Envoy.
    let counts = spread(&cluster(Balancer::Random), &endpoints(&[&[9, 1]]), 10_000);
    assert!((4_700..5_300).contains(&counts[&1]), "{counts:?}");
}

#[test]
fn the_endpoint_with_fewer_requests_is_selected() {
    let endpoints = endpoints(&[&[1, 1]]);
    let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(5));
    let busy = |one: &Endpoint| if last(one) == 1 { 9 } else { 0 };
    let mut busy_picks = 0;
    for _ in 0..1_000 {
        let picked =
            pick(&cluster(LEAST), &endpoints, &mut state, busy, PickOptions::default(), &mut rng).unwrap();
        busy_picks += u32::from(last(picked) == 1);
    }
    // Only if both choices are this endpoint.
    assert!((180..320).contains(&busy_picks), "{busy_picks}");
}

#[test]
fn of_two_endpoints_the_slower_one_is_never_selected() {
    let endpoints = endpoints(&[&[1, 9]]);
    let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(5));
    let peak = cluster(PEAK);
    let expected = |one: &Endpoint| if last(one) == 2 { 1_000_001 } else { 1_000_000 };
    for _ in 0..1_000 {
        let picked = pick(&peak, &endpoints, &mut state, expected, PickOptions::default(), &mut rng).unwrap();
        assert_eq!(last(picked), 1);
    }
}

#[test]
fn the_bias_weighs_requests_in_flight() {
    let endpoints = endpoints(&[&[1, 2]]);
    let busy = |one: &Endpoint| if last(one) == 2 { 3 } else { 0 };
    for (bias, picks) in [(0.0, 333), (0.5, 500), (1.0, 667)] {
        let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(5));
        let cluster = cluster(Balancer::LeastRequest { choices: 2, bias });
        let mut first = || {
            last(pick(&cluster, &endpoints, &mut state, busy, PickOptions::default(), &mut rng).unwrap()) == 1
        };
        let count = (0..1000).filter(|_| first()).count();
        assert!(count.abs_diff(picks) <= 2, "{bias} {count}");
    }
}

#[test]
fn the_first_priority_with_endpoints_is_used() {
    let random = cluster(Balancer::Random);
    assert_eq!(spread(&random, &endpoints(&[&[], &[1], &[1]]), 10), HashMap::from([(2 - 1, 10)]));
    assert_eq!(spread(&random, &endpoints(&[]), 10), HashMap::from([(0, 10)]));
    let some = endpoints(&[&[1]]);
    assert_eq!(spread(&cluster(Balancer::OriginalDst), &some, 10), HashMap::from([(0, 10)]));
}

/// Returns endpoints 1 and 2; the second has this age.
fn one_of_age(age: Duration) -> Arc<Endpoints> {
    let now = millis(Instant::now());
    let one = |index, age: Duration| {
        let mut track = EndpointState::new(Instant::now());
        track.since = now - age.as_millis() as u64;
        let plain = Endpoint::new(SocketAddr::from(([127, 0, 1, index], 9)), None);
        Arc::new(Endpoint { state: Some(Arc::new(track)), ..plain })
    };
    Arc::new(Endpoints::of(vec![one(1, Duration::from_secs(1_000_000)), one(2, age)]))
}

#[test]
fn a_new_endpoint_gets_less_load_at_first() {
    let hour = Duration::from_secs(3600);
    for (age, aggression, factor) in [
        (hour / 2, 1.0, 0.5),
        (hour / 4, 2.0, 0.5),
        (hour / 2, 0.5, 0.25),
        (hour / 100, 1.0, 0.1),
        (hour, 1.0, 1.0),
    ] {
        let slow_start = Some(SlowStart { window: hour, aggression, min: 0.1 });
        for balancer in [Balancer::RoundRobin, LEAST] {
            let cluster = Cluster { slow_start, ..cluster(balancer) };
            let counts = spread(&cluster, &one_of_age(age), 10_000);
            let part = counts[&2] as f64 / counts[&1] as f64;
            assert!((part - factor).abs() < 0.05, "{age:?} {aggression} {balancer:?}: {part}");
        }
    }
}

#[test]
fn an_ejected_endpoint_is_not_selected_until_restored() {
    let endpoints = one_of_age(Duration::ZERO);
    let outlier = crate::outlier::tests::outlier();
    let cluster = Cluster { outlier: Some(outlier), ..cluster(Balancer::RoundRobin) };
    let (mut state, mut rng) = (PickState::default(), fastrand::Rng::new());
    let mut picked = || {
        let mut one =
            || last(pick(&cluster, &endpoints, &mut state, |_| 0, PickOptions::default(), &mut rng).unwrap());
        [one(), one(), one(), one()].contains(&2)
    };
    let outlier = cluster.outlier.as_ref().unwrap();
    let track = endpoints.priorities[0][1].state.as_ref().unwrap();
    assert!(picked());
    let (now, mut chance) = (Instant::now(), fastrand::Rng::new());
    crate::outlier::eject(outlier, &endpoints, track, EjectionCause::Consecutive5xx, now, &mut chance);
    assert!(!picked());
    let later = now + Duration::from_secs(31);
    crate::outlier::check(outlier, &endpoints, later, |_| (), |_, _, _| ());
    assert!(picked());
}

#[test]
fn endpoints_of_earlier_attempts_are_avoided_if_possible() {
    let endpoints = endpoints(&[&[1, 1]]);
    let tried = [SocketAddr::from(([127, 0, 1, 1], 9))];
    for balancer in [Balancer::RoundRobin, RING, Balancer::Maglev(101)] {
        let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(5));
        let cluster = cluster(balancer);
        for hash in 0..20 {
            let want =
                PickOptions { hash: Some(hash << 58), avoid: &tried, attempts: 50, ..PickOptions::default() };
            let picked = pick(&cluster, &endpoints, &mut state, |_| 0, want, &mut rng).unwrap();
            assert_eq!(last(picked), 2);
        }
        let all = [tried[0], SocketAddr::from(([127, 0, 1, 2], 9))];
        let want = PickOptions { hash: None, avoid: &all, attempts: 5, ..PickOptions::default() };
        assert!(pick(&cluster, &endpoints, &mut state, |_| 0, want, &mut rng).is_some());
    }
}

#[test]
fn priorities_of_earlier_attempts_are_avoided() {
    let endpoints = endpoints(&[&[1], &[1], &[1]]);
    let expected: [(u32, &[u8], u8); 9] = [
        (0, &[1, 1, 1], 1),
        (1, &[], 1),
        (1, &[1], 2),
        (1, &[1, 2], 3),
        // All were used: the search begins anew.
        (1, &[1, 2, 3], 1),
        (2, &[1], 1),
        (2, &[1, 1], 2),
        (2, &[1, 1, 2], 2),
        (2, &[1, 1, 2, 2], 3),
    ];
    for balancer in [Balancer::RoundRobin, LEAST, Balancer::Random] {
        let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(5));
        for (priority_frequency, tried, next) in expected {
            let avoid: Vec<_> = tried.iter().map(|last| SocketAddr::from(([127, 0, 1, *last], 9))).collect();
            let want = PickOptions { avoid: &avoid, priority_frequency, ..PickOptions::default() };
            let picked = pick(&cluster(balancer), &endpoints, &mut state, |_| 0, want, &mut rng).unwrap();
            assert_eq!(last(picked), next, "{balancer:?} {priority_frequency} {tried:?}");
        }
    }
}

#[test]
fn retries_in_another_priority_use_its_healthy_endpoints() {
    let endpoints = states(&["hh", "huu"], &[]);
    let cluster = Cluster { panic_threshold: 50, ..cluster(Balancer::RoundRobin) };
    let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(5));
    let avoid = [SocketAddr::from(([127, 0, 1, 1], 9))];
    for _ in 0..20 {
        let want = PickOptions { avoid: &avoid, priority_frequency: 1, ..PickOptions::default() };
        assert_eq!(last(pick(&cluster, &endpoints, &mut state, |_| 0, want, &mut rng).unwrap()), 3);
    }
    assert!(!state.has_panicked());
}

/// Endpoints to which Envoy 1.40 sent requests with the headers `x-key: key-0` and so on; by endpoint, 127.0.1.1:9 to
/// 127.0.1.5:9. Measured with a file of ten clusters, an access log and 1,500 requests.
const FROM_ENVOY: &[(&str, &str)] = &[
    (
        "ring",
        "432252124524122514152125515513425521254543333434335353431334113531521344231454314553415121214244344533153113535522222523345113532224355222113351255233",
    ),
    (
        "ring-weighted",
        "525225524552543255255552555555454253525555314545535524554424545545553554255455442555535555245555255525553354555455555555555552452525555434555325255253",
    ),
    (
        "ring-small",
        "554555544524553224555554554243355454552545545255544554555423555545554234545355542454445442545542555525555455555545544545553552455553545451255455455554",
    ),
    (
        "ring-murmur",
        "135133331335114553111432141554243111532224551111214324414414345112123543335443155533334453431533131421553231422333432313412544233355442414434245343333",
    ),
    (
        "ring-localities",
        "432252124124122111132122511513425221253533313234331353531334113531521344231433324553415121212114234232131113435512223323325112132224352221113331243213",
    ),
    (
        "ring-unhealthy",
        "433351154545143514154155515513445511454443313444335353431335113531511544331534414553514411514144344533133113535515133513545113533534355333113331555133",
    ),
    (
        "maglev",
        "223442233332543155143321332432552211535352533255415232231415515143211311245411251231541151141511551433122145544535252225525145435345353455432424555322",
    ),
    (
        "maglev-weighted",
        "553153455545555355535541543545455435355554455555535555555155554552355553535554554145425554525553555454545555545555555553445545555555555553554555425555",
    ),
    (
        "maglev-localities",
        "213113355545331315332231113142131235325314214552331525353154311152315513332224554113323223322311234424511243344111332213225122121413313513111422425553",
    ),
    (
        "maglev-unhealthy",
        "543113455545341315333531143141145335355514414551535555553154314153315513331154554113345453433311535454511443344151334413445541151453315513114454455555",
    ),
];

#[test]
fn keys_lead_to_the_same_endpoints_as_in_envoy() {
    let ring = |minimum, maximum| Balancer::RingHash { minimum, maximum, function: HashFunction::Xx };
    let murmur = Balancer::RingHash { minimum: 1024, maximum: 1 << 23, function: HashFunction::Murmur2 };
    let equal = endpoints(&[&[1; 5]]);
    let weights = endpoints(&[&[1, 2, 3, 7, 20]]);
    let localities = states(&["hhh", "hh"], &[80, 20]);
    let unhealthy = states(&["huhhh"], &[]);
    for (name, expected) in FROM_ENVOY {
        let (balancer, endpoints) = match *name {
            "ring" => (RING, &equal),
            "ring-weighted" => (ring(100, 1 << 23), &weights),
            "ring-small" => (ring(10, 17), &weights),
            "ring-murmur" => (murmur, &equal),
            "ring-localities" => (RING, &localities),
            "ring-unhealthy" => (RING, &unhealthy),
            "maglev" => (Balancer::Maglev(65_537), &equal),
            "maglev-weighted" => (Balancer::Maglev(1009), &weights),
            "maglev-localities" => (Balancer::Maglev(1009), &localities),
            _ => (Balancer::Maglev(1009), &unhealthy),
        };
        let cluster = Cluster { locality_weighted: name.ends_with("localities"), ..cluster(balancer) };
        let hashes = (0..expected.len()).map(|number| hash::of(format!("key-{number}").as_bytes()));
        let got: String = chosen(&cluster, endpoints, hashes).iter().map(u8::to_string).collect();
        assert_eq!(got, *expected, "{name}");
    }
}

#[test]
fn hash_keys_are_those_of_envoy() {
    let (header, query) = (HashKey::Header("x-key".into()), HashKey::Query("q".into()));
    let cookie = HashCookie { name: "user".into(), ttl: None, path: "".into(), attributes: Vec::new() };
    let cookie = HashKey::Cookie(Box::new(cookie));
    let request = |path: &str, fields: &[(&str, String)]| {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, &**value)).collect();
        RequestHead::build("GET", path, "a", &fields)
    };
    let two = |n| request("/", &[("x-key", format!("b{n}")), ("x-key", format!("a{n}"))]);
    let combined = |n| request(&format!("/?q=v{n}"), &[("x-key", "k".to_owned())]);
    let escaped = |n| request(&format!("/?x=1&q=v%20{n}&q=2"), &[]);
    let quoted = |n| request("/", &[("cookie", format!("a=b; user=\"v{n}\"; c=d"))]);
    type Case<'a> = (&'a [&'a HashKey], &'a dyn Fn(usize) -> RequestHead, &'a str);
    let cases: &[Case<'_>] = &[
        (&[&header], &two, "3352551252322413515535252553155431411341"),
        (&[&header, &query], &combined, "2534222112255531351222422144145424535142"),
        (&[&query], &escaped, "1513221343214115514324524455312155414132"),
        (&[&cookie], &quoted, "3342454533112311311325152542332542544543"),
    ];
    let address = SocketAddr::from(([127, 0, 0, 1], 1));
    let origin = key::Origin { client: address.ip(), remote: address, local: address };
    for (keys, head, expected) in cases {
        let policies: Vec<_> =
            keys.iter().map(|key| HashPolicy { key: (*key).clone(), terminal: false }).collect();
        let hash = |n| key::of(&policies, &head(n), origin, &mut Vec::new()).unwrap();
        let hashes = (0..expected.len()).map(hash);
        let got = chosen(&cluster(RING), &endpoints(&[&[1; 5]]), hashes);
        let got: String = got.iter().map(u8::to_string).collect();
        assert_eq!(got, *expected, "{keys:?}");
    }
}

#[test]
fn a_priority_is_selected_by_hash() {
    // As in Envoy: one of two endpoints is healthy and can carry 70 %.
    let endpoints = states(&["uh", "hh"], &[]);
    let hashes = (0..100).map(|number| hash::of(format!("key-{number}").as_bytes()));
    let lower = |one: &u8| if *one > 2 { '1' } else { '0' };
    let got: String = chosen(&cluster(RING), &endpoints, hashes).iter().map(lower).collect();
    assert_eq!(
        got,
        "01000000010001001000110000010101000010100001000001\
         00000000110000000100001011100010000010001101101011"
    );
}

/// Shares per thousand as measured with Envoy 1.40, within statistical error.
#[test]
fn health_distributes_the_load_as_in_envoy() {
    let round = cluster(Balancer::RoundRobin);
    let never = Cluster { panic_threshold: 0, ..cluster(Balancer::RoundRobin) };
    let weighed = Cluster { locality_weighted: true, panic_threshold: 0, ..cluster(Balancer::RoundRobin) };
    type Case<'a> = (&'a Cluster, Arc<Endpoints>, &'a [(u8, usize)]);
    let cases: &[Case<'_>] = &[
        (&round, states(&["lh", "h"], &[]), &[(2, 1000)]),
        (&round, states(&["uh", "h"], &[]), &[(2, 700), (3, 300)]),
        (&round, states(&["uh", "hh"], &[]), &[(2, 700), (3, 150), (4, 150)]),
        (&round, states(&["uu", "hh"], &[]), &[(3, 500), (4, 500)]),
        (&round, states(&["dh"], &[]), &[(1, 300), (2, 700)]),
        // Too few are available in every priority: panic.
        (&round, states(&["uuu", "u"], &[]), &[(1, 250), (2, 250), (3, 250), (4, 250)]),
        (&never, states(&["uuu", "u"], &[]), &[(0, 1000)]),
        (&round, states(&["luuh"], &[]), &[(1, 250), (2, 250), (3, 250), (4, 250)]),
        // Half of a locality's endpoints can carry 70 % of its share.
        (&weighed, states(&["hu", "hhh"], &[2, 1]), &[(1, 583), (3, 139), (4, 139), (5, 139)]),
        (&weighed, states(&["hu", "uu"], &[2, 1]), &[(1, 1000)]),
        (
            &weighed,
            states(&["hddd", "hudu"], &[1, 1]),
            &[(1, 175), (2, 160), (3, 160), (4, 160), (5, 175), (7, 169)],
        ),
    ];
    for (cluster, endpoints, expected) in cases {
        let counts = spread(cluster, endpoints, 10_000);
        for (index, share) in *expected {
            let got = counts.get(index).copied().unwrap_or(0);
            assert!(got.abs_diff(share * 10) <= 200, "{endpoints:?}: {counts:?}");
        }
        assert_eq!(counts.len(), expected.len(), "{endpoints:?}: {counts:?}");
    }
}

/// Returns a census of endpoints with numbers of healthy and degraded ones.
fn level(all: usize, healthy: usize, degraded: usize) -> EndpointCounts {
    EndpointCounts { all, counted: all, healthy, degraded }
}

/// The tables of Envoy's documentation, "Priority levels" and "Degraded endpoints", and two measured cases.
#[test]
fn loads_match_the_documentation_of_envoy() {
    let healthy = |levels: &[usize], threshold| -> Vec<usize> {
        let census: Vec<_> = levels.iter().map(|percent| level(100, *percent, 0)).collect();
        let loads = priorities::loads(&census, 140, threshold);
        loads.iter().map(|load| load.healthy).collect()
    };
    for (p0, expected) in
        [(100, [100, 0]), (72, [100, 0]), (71, [99, 1]), (50, [70, 30]), (25, [35, 65]), (0, [0, 100])]
    {
        assert_eq!(healthy(&[p0, 100], 50), expected, "{p0}");
    }
    for (levels, expected) in [
        ([100, 100, 100], [100, 0, 0]),
        ([72, 72, 100], [100, 0, 0]),
        ([71, 71, 100], [99, 1, 0]),
        ([50, 50, 100], [70, 30, 0]),
        ([25, 100, 100], [35, 65, 0]),
        ([25, 25, 100], [35, 35, 30]),
    ] {
        assert_eq!(healthy(&levels, 0), expected, "{levels:?}");
    }
    // If the priorities together cannot carry the load, the shares are scaled up.
    assert_eq!(healthy(&[20, 20, 10], 0), [40, 40, 20]);
    assert_eq!(healthy(&[25, 25, 20], 0), [37, 35, 28]);
    let degraded = |levels: &[(usize, usize)]| -> Vec<(usize, usize)> {
        let census: Vec<_> =
            levels.iter().map(|(healthy, degraded)| level(100, *healthy, *degraded)).collect();
        priorities::loads(&census, 140, 0).iter().map(|load| (load.healthy, load.degraded)).collect()
    };
    assert_eq!(degraded(&[(100, 0), (100, 0)]), [(100, 0), (0, 0)]);
    assert_eq!(degraded(&[(0, 50), (100, 0)]), [(0, 0), (100, 0)]);
    assert_eq!(degraded(&[(0, 100), (0, 100)]), [(0, 100), (0, 0)]);
}

#[test]
fn panic_needs_too_few_endpoints_and_too_little_capacity() {
    let panics = |levels: &[EndpointCounts]| -> Vec<bool> {
        priorities::loads(levels, 140, 50).iter().map(|load| load.panic).collect()
    };
    assert_eq!(panics(&[level(10, 1, 0), level(10, 10, 0)]), [false, false]);
    assert_eq!(panics(&[level(10, 1, 5), level(10, 1, 0)]), [false, true]);
    assert_eq!(panics(&[level(10, 1, 0), level(10, 1, 0)]), [true, true]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_set_of_endpoints_is_handled(
        weights in proptest::collection::vec(1_u32..5, 0..6),
        more in proptest::collection::vec(1_u32..5, 0..6),
        balancer in proptest::sample::select(vec![
            Balancer::RoundRobin, Balancer::LeastRequest { choices: 0, bias: 0.0 }, LEAST, PEAK, Balancer::Random,
            RING, Balancer::Maglev(11),
        ]),
    ) {
        let (mut state, mut rng) = (PickState::default(), fastrand::Rng::with_seed(5));
        for set in [endpoints(&[&weights]), endpoints(&[&more, &weights])] {
            for _ in 0..20 {
                let picked = pick(&cluster(balancer), &set, &mut state, |_| 1, PickOptions::default(), &mut rng);
                prop_assert_eq!(picked.is_none(), set.priorities.iter().all(Vec::is_empty));
            }
        }
    }

    #[test]
    fn the_shares_add_up_to_the_whole_load(
        levels in proptest::collection::vec((0_usize..9, 0_usize..9, 0_usize..9, 0_usize..9), 1..5),
        overprovisioning in 1_usize..300,
        threshold in 0_usize..=100,
    ) {
        let levels: Vec<_> = levels
            .into_iter()
            .map(|(healthy, degraded, bad, leaving)| {
                let counted = healthy + degraded + bad;
                EndpointCounts { all: counted + leaving, counted, healthy, degraded }
            })
            .collect();
        let loads = priorities::loads(&levels, overprovisioning, threshold);
        let sum: usize = loads.iter().map(|load| load.healthy + load.degraded).sum();
        prop_assert!(sum == 100 || sum == 0, "{:?}", loads);
        for (load, level) in loads.iter().zip(&levels) {
            if !load.panic {
                prop_assert!(load.healthy == 0 || level.healthy > 0, "{:?}", loads);
                prop_assert!(load.degraded == 0 || level.degraded > 0, "{:?}", loads);
            }
        }
    }

    /// Each endpoint gets its share of many keys. When an endpoint is removed, few keys of the others move. They move
    /// because the ring and the table keep their sizes, so that the others get its entries.
    #[test]
    fn keys_are_distributed_by_weight_and_stable(
        weights in proptest::collection::vec(1_u32..4, 2..12),
        removed in any::<prop::sample::Index>(),
        maglev in any::<bool>(),
    ) {
        const KEYS: usize = 4_000;
        let ring = Balancer::RingHash { minimum: 8192, maximum: 1 << 23, function: HashFunction::Xx };
        let balancer = if maglev { Balancer::Maglev(4099) } else { ring };
        let hashes = || (0..KEYS).map(|number| hash::of(&number.to_le_bytes()));
        let before = endpoints(&[&weights]);
        let first = chosen(&cluster(balancer), &before, hashes());
        let total: u32 = weights.iter().sum();
        for (index, weight) in weights.iter().enumerate() {
            let part = first.iter().filter(|one| usize::from(**one) == index + 1).count();
            let wanted = KEYS * *weight as usize / total as usize;
            prop_assert!(part.abs_diff(wanted) < wanted / 3 + 30, "{}: {} of {}", index, part, wanted);
        }
        let removed = removed.index(weights.len());
        let mut left = before.priorities[0].clone();
        left.remove(removed);
        let second = chosen(&cluster(balancer), &Arc::new(Endpoints::of(left)), hashes());
        let moved = first.iter().zip(&second).filter(|(a, b)| a != b && usize::from(**a) != removed + 1).count();
        prop_assert!(moved <= KEYS / 5, "{} keys moved", moved);
    }
}
