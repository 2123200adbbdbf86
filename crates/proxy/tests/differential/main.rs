//! Envoy is asked what is right: it and our sidecar get the same file, made at random, and the same bytes, made at random,
//! and must answer alike. What differs and is meant to is in `docs/compatibility.md`, and taken out in [`twins::comparable`].
//!
//! `SKYSAIL_DIFFERENTIAL_SEED` repeats a run from the seed that a failure names, and `SKYSAIL_DIFFERENTIAL_SECONDS` goes
//! on with the next seeds for so long.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod authorizer;
mod configuration;
mod requests;
mod tokens;
mod twins;

use std::{
    env,
    fmt::Write as _,
    time::{Duration, Instant},
};

use fastrand::Rng;
use serde_json::{Value, json};
use twins::{Twins, upstream};

/// Every one has a configuration of its own.
const LISTENERS: usize = 40;
/// To each listener.
const REQUESTS: usize = 50;
/// As many seeds as are tried without being told.
const SEEDS: u64 = 4;
/// Differences that are told of one seed.
const TOLD: usize = 10;

#[test]
fn what_envoy_answers_we_answer() {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let seed = number("SKYSAIL_DIFFERENTIAL_SEED");
    let length = Duration::from_secs(number("SKYSAIL_DIFFERENTIAL_SECONDS").unwrap_or(0));
    let start = Instant::now();
    let mut clusters: Vec<Value> = ["one", "two"].map(upstream).into();
    clusters.extend([authorizer::http(), authorizer::grpc()]);
    let first = seed.unwrap_or(1);
    // The seed that is asked for, the seeds of so long a time, or the usual ones.
    let least = if seed.is_some() || !length.is_zero() { 1 } else { SEEDS };
    for seed in first.. {
        let differences = compare(seed, &clusters);
        assert!(differences.is_empty(), "seed {seed}:\n\n{}", differences.join("\n\n"));
        if seed + 1 >= first + least && start.elapsed() >= length {
            break;
        }
        println!("seed {seed}: {} requests alike", LISTENERS * REQUESTS);
    }
}

/// What both answer to all that follows from this seed, where it is not the same.
fn compare(seed: u64, clusters: &[Value]) -> Vec<String> {
    let mut rng = Rng::with_seed(seed);
    let listeners: Vec<Value> =
        (0..LISTENERS).map(|number| configuration::listener(&mut rng, number)).collect();
    let bootstrap = json!({
        "node": {"id": "sidecar~127.0.0.1~a.b~b.svc.cluster.local", "cluster": "a.b"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    });
    let twins = Twins::start(&bootstrap);
    let mut differences = Vec::new();
    for (number, listener) in listeners.iter().enumerate() {
        for _ in 0..REQUESTS {
            let request = requests::request(&mut rng);
            let (theirs, ours) = twins.ask(number, &request);
            if theirs == ours {
                continue;
            }
            if differences.len() < TOLD {
                let mut told = format!("listener {number}, to\n{request}\n");
                let _ = write!(told, "Envoy answers\n{theirs}and Skysail\n{ours}with\n{listener}");
                differences.push(told);
            } else {
                return differences;
            }
        }
    }
    differences
}
