//! Envoy is asked what is right: it and our sidecar get the same file, made at random, and the same requests, made at random,
//! and must answer alike, send the same to servers, and write the same into their access logs. What differs and is meant
//! to is in `docs/compatibility.md`, and taken out in [`client`] and [`log`].
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
mod client;
mod filters;
mod listener;
mod log;
mod random;
mod request;
mod requests;
mod retries;
mod routes;
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

/// Every one has a configuration of its own.
const LISTENERS: usize = 40;
/// To each listener.
const REQUESTS: usize = 30;
/// As many seeds as are tried without being told.
const SEEDS: u64 = 4;
/// Differences that are told of one seed.
const TOLD: usize = 10;

#[test]
fn what_envoy_answers_we_answer() {
    let clusters = [
        servers::http1("one"),
        servers::http1("two"),
        servers::http2("three"),
        authorizer::http(),
        authorizer::grpc(),
    ];
    for_seeds(|seed| {
        let mut rng = Rng::with_seed(seed);
        let listeners: Vec<Value> =
            (0..LISTENERS).map(|number| listener::listener(&mut rng, number)).collect();
        differences(&mut rng, &listeners, &clusters, requests::request)
    });
}

/// Of clusters whose balancers hash, both choose the same endpoint for a key.
#[test]
fn where_envoy_leads_a_key_we_lead_it() {
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

/// Both try again when the same tries fail, at the same endpoints.
#[test]
fn where_envoy_tries_again_we_try_again() {
    let clusters = retries::clusters();
    for_seeds(|seed| {
        let mut rng = Rng::with_seed(seed);
        let listeners: Vec<Value> =
            (0..LISTENERS).map(|number| retries::listener(&mut rng, number)).collect();
        differences(&mut rng, &listeners, &clusters, retries::request)
    });
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

/// What is not the same in what both answer, or write down, of requests made so.
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
    // Other tests have the same servers at the same time.
    static RUN: AtomicU32 = AtomicU32::new(0);
    let run = RUN.fetch_add(1, Relaxed);
    let twins = Twins::start(&bootstrap);
    let mut differences = Vec::new();
    let mut tell = |listener: usize, request: &Request, what: &str| {
        let mut told = format!("listener {listener}, to\n{request}\n{what}\nwith\n{}", listeners[listener]);
        let own = format!("cluster-{listener}");
        for cluster in clusters.iter().filter(|cluster| cluster["name"] == own) {
            _ = write!(told, "\n{cluster}");
        }
        differences.push(told);
        differences.len() < TOLD
    };
    let mut requests = Vec::new();
    for case in 0..LISTENERS * REQUESTS {
        let listener = case / REQUESTS;
        let mut request = request(rng);
        let name = format!("{run}-{case}");
        request.field("x-case", &*name);
        let [theirs, ours] = twins.ask(listener, &request, || servers::tries(&name).join("\n"));
        // Of a granted upgrade all that follows is bytes; the heads around them differ (docs/compatibility.md).
        let is_granted = [&theirs, &ours].iter().all(|answered| answered.0.starts_with("101"));
        if theirs != ours && !is_granted {
            let what = compared(&(theirs.0 + &theirs.1), &(ours.0 + &ours.1));
            if !tell(listener, &request, &what) {
                return differences;
            }
        }
        requests.push(request);
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
            && !tell(case / REQUESTS, request, &what)
        {
            return differences;
        }
    }
    differences
}

/// The lines of both, marked where they are one's alone.
fn compared(theirs: &str, ours: &str) -> String {
    let mut told = "Envoy (-) and Skysail (+) answer\n".to_owned();
    for line in theirs.lines() {
        let mark = if ours.lines().any(|other| other == line) { ' ' } else { '-' };
        _ = writeln!(told, "{mark} {line}");
    }
    for line in ours.lines().filter(|line| !theirs.lines().any(|other| other == *line)) {
        _ = writeln!(told, "+ {line}");
    }
    told
}
