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
mod balancing;
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
    let mut clusters: Vec<Value> = ["one", "two"].map(upstream).into();
    clusters.extend([authorizer::http(), authorizer::grpc()]);
    for_seeds(|seed| compare(seed, &clusters));
}

/// Nothing may differ for any of the seeds: the one that is asked for, those of so long a time, or the usual ones.
fn for_seeds(differences: impl Fn(u64) -> Vec<String>) {
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    let seed = number("SKYSAIL_DIFFERENTIAL_SEED");
    let length = Duration::from_secs(number("SKYSAIL_DIFFERENTIAL_SECONDS").unwrap_or(0));
    let start = Instant::now();
    let first = seed.unwrap_or(1);
    let least = if seed.is_some() || !length.is_zero() { 1 } else { SEEDS };
    for seed in first.. {
        let differences = differences(seed);
        assert!(differences.is_empty(), "seed {seed}:\n\n{}", differences.join("\n\n"));
        if seed + 1 >= first + least && start.elapsed() >= length {
            break;
        }
        println!("seed {seed}: {} requests alike", LISTENERS * REQUESTS);
    }
}

/// Of clusters whose balancers hash, both choose the same endpoint for a key.
#[test]
fn where_envoy_leads_a_key_we_lead_it() {
    let endpoints = ["one", "two", "three", "four", "five", "six", "seven"].map(upstream);
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
        self::differences(&mut rng, &listeners, &clusters, balancing::request)
    });
}

/// What both answer to all that follows from this seed, where it is not the same.
fn compare(seed: u64, clusters: &[Value]) -> Vec<String> {
    let mut rng = Rng::with_seed(seed);
    let listeners: Vec<Value> =
        (0..LISTENERS).map(|number| configuration::listener(&mut rng, number)).collect();
    differences(&mut rng, &listeners, clusters, requests::request)
}

fn differences(
    rng: &mut Rng,
    listeners: &[Value],
    clusters: &[Value],
    request: fn(&mut Rng) -> String,
) -> Vec<String> {
    let bootstrap = json!({
        "node": {"id": "sidecar~127.0.0.1~a.b~b.svc.cluster.local", "cluster": "a.b"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    });
    let twins = Twins::start(&bootstrap);
    let mut differences = Vec::new();
    for (number, listener) in listeners.iter().enumerate() {
        for _ in 0..REQUESTS {
            let request = request(rng);
            let (theirs, ours) = twins.ask(number, &request);
            if theirs == ours {
                continue;
            }
            if differences.len() < TOLD {
                let mut told = format!("listener {number}, to\n{request}\n");
                let _ = write!(told, "Envoy answers\n{theirs}and Skysail\n{ours}with\n{listener}");
                let own = format!("cluster-{number}");
                for cluster in clusters.iter().filter(|cluster| cluster["name"] == own) {
                    let _ = write!(told, "\n{cluster}");
                }
                differences.push(told);
            } else {
                return differences;
            }
        }
    }
    differences
}
