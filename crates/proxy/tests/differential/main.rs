//! Differential tests against Envoy: it and the sidecar get the same random configuration file and the same
//! random requests. Both must send the same responses, upstream requests and access log lines.
//! `docs/compatibility.md` lists the intended differences; [`client`] and [`log`] remove them.
//!
//! `SKYSAIL_DIFFERENTIAL_SEED` repeats a run with the seed of a failure. `SKYSAIL_DIFFERENTIAL_SECONDS`
//! continues with further seeds for this time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod authorizer;
mod balancing;
mod client;
mod filters;
mod limiter;
mod listener;
mod log;
mod random;
mod request;
mod requests;
mod retries;
mod routes;
mod scripts;
mod secrets;
mod servers;
mod tokens;
mod tracing;
mod twins;

use std::{
    env,
    fmt::Write as _,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::{Duration, Instant},
};

use fastrand::Rng;
use request::Request;
use serde_json::{Value, json};
use twins::Twins;

/// Number of listeners, each with its own configuration.
const LISTENERS: usize = 40;
/// Number of requests to each listener.
const REQUESTS: usize = 30;
/// Default number of seeds.
const SEEDS: u64 = 4;
/// Maximum number of differences that are reported per seed.
const MAX_REPORTED: usize = 10;

#[test]
fn responses_equal_envoys() {
    let clusters = [
        servers::http1("one"),
        servers::http1("two"),
        servers::http2("three"),
        authorizer::http(),
        authorizer::grpc(),
        limiter::grpc(),
    ];
    for_seeds(|seed| {
        let mut rng = Rng::with_seed(seed);
        let listeners: Vec<Value> =
            (0..LISTENERS).map(|number| listener::listener(&mut rng, number)).collect();
        differences(&mut rng, &listeners, &clusters, requests::request)
    });
}

/// Hashing load balancers select the same endpoint for a key.
#[test]
fn endpoints_of_hash_keys_equal_envoys() {
    let endpoints = ["one", "two", "three", "four", "five", "six", "seven"].map(servers::http1);
    let endpoints =
        endpoints.map(|cluster| cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0].clone());
    for_seeds(|seed| {
        let mut rng = Rng::with_seed(seed);
        let names: Vec<String> = (0..LISTENERS).map(|number| format!("cluster-{number}")).collect();
        let clusters: Vec<Value> =
            names.iter().map(|name| balancing::cluster(&mut rng, name, &endpoints)).collect();
        let listeners: Vec<Value> = names
            .iter()
            .enumerate()
            .map(|(number, name)| balancing::listener(&mut rng, number, name))
            .collect();
        differences(&mut rng, &listeners, &clusters, balancing::request)
    });
}

/// The same failures cause the same retries at the same endpoints.
#[test]
fn retries_equal_envoys() {
    let clusters = retries::clusters();
    for_seeds(|seed| {
        let mut rng = Rng::with_seed(seed);
        let listeners: Vec<Value> =
            (0..LISTENERS).map(|number| retries::listener(&mut rng, number)).collect();
        differences(&mut rng, &listeners, &clusters, retries::request)
    });
}

/// Lua scripts have the same effect.
#[test]
fn scripts_equal_envoys() {
    let clusters = [servers::http1("one"), servers::http2("three")];
    for_seeds(|seed| {
        let mut rng = Rng::with_seed(seed);
        let listeners: Vec<Value> =
            (0..LISTENERS).map(|number| scripts::listener(&mut rng, number)).collect();
        differences(&mut rng, &listeners, &clusters, scripts::request)
    });
}

/// Requires no difference for the given seed, for seeds within the given time, or for the default seeds.
fn for_seeds(differences: impl Fn(u64) -> Vec<String>) {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let seed = number("SKYSAIL_DIFFERENTIAL_SEED");
    let length = Duration::from_secs(number("SKYSAIL_DIFFERENTIAL_SECONDS").unwrap_or(0));
    let start = Instant::now();
    let first = seed.unwrap_or(1);
    let min = if seed.is_some() || !length.is_zero() { 1 } else { SEEDS };
    for seed in first.. {
        let differences = differences(seed);
        assert!(differences.is_empty(), "seed {seed}:\n\n{}", differences.join("\n\n"));
        if seed + 1 >= first + min && start.elapsed() >= length {
            break;
        }
        println!("seed {seed}: {} requests alike", LISTENERS * REQUESTS);
    }
}

/// Returns the differences between the responses and log lines for requests of this kind.
fn differences(
    rng: &mut Rng,
    listeners: &[Value],
    clusters: &[Value],
    request: fn(&mut Rng) -> Request,
) -> Vec<String> {
    let bootstrap = json!({
        "node": {"id": "sidecar~127.0.0.1~a.b~b.svc.cluster.local", "cluster": "a.b"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    });
    // Other tests use the same servers concurrently.
    static RUN: AtomicU32 = AtomicU32::new(0);
    let run = RUN.fetch_add(1, Relaxed);
    let twins = Twins::start(&bootstrap);
    let mut differences = Vec::new();
    let mut report_difference = |listener: usize, request: &Request, what: &str| {
        let mut received =
            format!("listener {listener}, to\n{request}\n{what}\nwith\n{}", listeners[listener]);
        let own = format!("cluster-{listener}");
        for cluster in clusters.iter().filter(|cluster| cluster["name"] == own) {
            _ = write!(received, "\n{cluster}");
        }
        differences.push(received);
        differences.len() < MAX_REPORTED
    };
    let mut requests = Vec::new();
    for case in 0..LISTENERS * REQUESTS {
        let listener = case / REQUESTS;
        let mut request = request(rng);
        let name = format!("{run}-{case}");
        request.field("x-case", &*name);
        let [theirs, ours] = twins.ask(listener, &request, || servers::tries(&name).join("\n"));
        // After a granted upgrade only bytes follow; the surrounding heads differ (docs/compatibility.md).
        let is_granted = [&theirs, &ours].iter().all(|answered| answered.0.starts_with("101"));
        if theirs != ours && !is_granted {
            let what = compared(&(theirs.0 + &theirs.1), &(ours.0 + &ours.1));
            if !report_difference(listener, &request, &what) {
                return differences;
            }
        }
        requests.push(request);
    }
    let [theirs, ours] = twins.route_stats();
    if theirs != ours {
        differences.push(format!("statistics of routes\n{}", compared(&theirs, &ours)));
        return differences;
    }
    let [theirs, ours] = twins.logs();
    let mut unread = 0;
    for (case, request) in requests.iter().enumerate() {
        let mut key = format!("{run}-{case}");
        if !theirs.contains_key(&key) && !ours.contains_key(&key) {
            unread += 1;
            key = format!("unread {unread}");
        }
        if let Some(what) = log::difference(theirs.get(&key), ours.get(&key))
            && !report_difference(case / REQUESTS, request, &what)
        {
            return differences;
        }
    }
    differences
}

/// Returns the lines of both, with marks at those that only one has.
fn compared(theirs: &str, ours: &str) -> String {
    let mut received = "Envoy (-) and Skysail (+) answer\n".to_owned();
    for line in theirs.lines() {
        let mark = if ours.lines().any(|other| other == line) { ' ' } else { '-' };
        _ = writeln!(received, "{mark} {line}");
    }
    for line in ours.lines().filter(|line| !theirs.lines().any(|other| other == *line)) {
        _ = writeln!(received, "+ {line}");
    }
    received
}
