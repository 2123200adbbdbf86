//! `load`: sessions of travellers for a limited time, and their result as JSON. It is the load of `skysail bench run airline`.
//!
//! With `--rate`, sessions start on a fixed schedule (open loop). With `--users`, this number of travellers has one
//! session after another (closed loop), like the threads of Acme Air's JMeter script.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::ensure;
use axum::http::{HeaderMap, Method, StatusCode};
use serde::Serialize;
use skysail_core::stdio;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};

use crate::{
    session::{Mix, Travel},
    stats::{Call, Sessions},
};

/// Time for which calls may be unanswered after the end.
const GRACE: Duration = Duration::from_secs(2);
/// Maximum time of a measurement that waits for more calls.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Interval of checks whether a load has ended.
const TICK: Duration = Duration::from_millis(1);
/// Percentiles in the result.
const PERCENTILES: [(&str, f64); 4] = [("p50", 50.0), ("p90", 90.0), ("p99", 99.0), ("p99_9", 99.9)];

/// Rate, time and mix of the load.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    amount: Amount,
    /// Time of the measurement in seconds.
    #[arg(long, default_value_t = 10.0, value_parser = seconds)]
    seconds: f64,
    /// Time of the load before the measurement, in seconds.
    #[arg(long, default_value_t = 1.0, value_parser = seconds)]
    warmup: f64,
    /// Minimum number of calls: the measurement lasts until that many have a response, but no longer than a minute.
    #[arg(long, value_name = "CALLS", default_value_t = 1)]
    least_calls: u64,
    /// First call the loaders of the databases: this number of customers, the timetable, and no bookings.
    #[arg(long, value_name = "CUSTOMERS")]
    load_databases: Option<u32>,
    #[command(flatten)]
    mix: Mix,
}

#[derive(Debug, Clone, clap::Args)]
#[group(required = true, multiple = false)]
struct Amount {
    /// Calls per second; sessions start at even intervals.
    #[arg(long)]
    rate: Option<f64>,
    /// Number of travellers, each of whom has one session after another.
    #[arg(long)]
    users: Option<u32>,
}

/// Result of the load.
#[derive(Debug, Serialize)]
struct LoadResult<'a> {
    seconds: f64,
    /// Calls in the measured time, and those of them with the expected status.
    calls: u64,
    as_expected: u64,
    /// Calls without a response at the end.
    unanswered: u64,
    /// All calls, with those of the warm-up.
    all_calls: u64,
    latency_us: BTreeMap<&'static str, u64>,
    /// Sessions in the measured time.
    sessions: Sessions,
    by_name: &'a BTreeMap<&'static str, Call>,
}

/// Runs the load and prints the result.
///
/// # Errors
/// A loader fails, there is no call, or the result cannot be printed.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let travel = Travel::new(args.mix);
    if let Some(customers) = args.load_databases {
        load_databases(&travel, customers).await?;
    }
    let began = Instant::now();
    match (args.amount.rate, args.amount.users) {
        (Some(rate), _) => drop(tokio::spawn(at_rate(travel.clone(), rate))),
        (None, users) => {
            for user in 0..u64::from(users.unwrap_or(1)) {
                tokio::spawn(one_after_another(travel.clone(), user));
            }
        }
    }
    let warm = began + Duration::from_secs_f64(args.warmup);
    sleep_until(warm).await;
    let warmup = travel.stats.next_window();
    let measured = Instant::now();
    sleep_until(warm + Duration::from_secs_f64(args.seconds)).await;
    let calls = || travel.stats.with(|all| all.totals().0);
    while calls() < args.least_calls && measured.elapsed() < MAX_WAIT {
        sleep(TICK).await;
    }
    let counted = travel.stats.snapshot();
    let seconds = measured.elapsed().as_secs_f64();
    travel.end();
    let end = Instant::now() + GRACE;
    while travel.stats.active() > 0 && Instant::now() < end {
        sleep(TICK).await;
    }
    let (calls, as_expected) = counted.totals();
    ensure!(calls > 0, "no call had a response");
    let of = |(name, percentile)| (name, counted.latencies.0.value_at_percentile(percentile));
    let result = LoadResult {
        seconds,
        calls,
        as_expected,
        unanswered: travel.stats.active(),
        all_calls: warmup.totals().0 + travel.stats.with(|all| all.totals().0),
        latency_us: PERCENTILES.map(of).into(),
        sessions: counted.sessions.since(&warmup.sessions),
        by_name: &counted.calls,
    };
    Ok(stdio::print(serde_json::to_string(&result)?)?)
}

/// Starts sessions at even intervals. Those for which no customer is free are skipped, and counted.
async fn at_rate(travel: Travel, rate: f64) {
    let Some(every) = Mix::session_interval(rate) else { return };
    let mut due = interval(every);
    due.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for number in 0.. {
        due.tick().await;
        if travel.has_ended() {
            return;
        }
        if travel.stats.admit(u64::from(travel.mix.customers)) {
            tokio::spawn(travel.clone().session(number));
        }
    }
}

/// Runs the sessions of a traveller.
async fn one_after_another(travel: Travel, user: u64) {
    let mut number = user;
    while !travel.has_ended() {
        travel.stats.admit(u64::MAX);
        travel.clone().session(number).await;
        // The user of a session is that of its number.
        number += u64::from(travel.mix.customers.max(1));
    }
}

/// Calls the loaders of all databases.
async fn load_databases(travel: &Travel, customers: u32) -> anyhow::Result<()> {
    let mix = Arc::clone(&travel.mix);
    for (peer, path) in [
        (&mix.customer_url, format!("/customer/loader/load?numCustomers={customers}")),
        (&mix.flight_url, "/flight/loader/load".to_owned()),
        (&mix.booking_url, "/booking/loader/load".to_owned()),
    ] {
        let called = travel.client.call(Method::GET, peer, &path, HeaderMap::new(), &[]).await;
        let answer = called.map_err(anyhow::Error::msg)?;
        ensure!(answer.status == StatusCode::OK, "{path}: answered {}", answer.status);
    }
    Ok(())
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.0..=86_400.0).contains(seconds));
    seconds.ok_or_else(|| format!("{text}: expected a number of seconds, at most 86400"))
}
