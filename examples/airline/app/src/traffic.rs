//! `traffic`: simulates travellers without an end. Sessions start on a fixed schedule, whether or not the services keep up
//! (open loop). Failed calls do not stop the traffic.

use std::time::Duration;

use axum::{Json, Router, extract::State, routing::get};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::{
    session::{Mix, Travel},
    stats::Snapshot,
};

/// Rate and mix of the traffic.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Calls per second to all services together.
    #[arg(long, env = "TRAFFIC_RPS", default_value_t = 50.0)]
    rps: f64,
    /// Seconds between two summary lines.
    #[arg(long, env = "TRAFFIC_SUMMARY_SECONDS", default_value_t = 10)]
    summary_seconds: u64,
    #[command(flatten)]
    mix: Mix,
}

/// Starts the traffic and returns the routes of its statistics.
pub(crate) fn start(args: Args) -> Router {
    let travel = Travel::new(args.mix);
    tokio::spawn(sessions(travel.clone(), args.rps));
    tokio::spawn(summaries(travel.clone(), args.summary_seconds.max(1)));
    Router::new().route("/stats", get(stats)).with_state(travel)
}

async fn stats(State(travel): State<Travel>) -> Json<Snapshot> {
    Json(travel.stats.snapshot())
}

/// Starts sessions on schedule. Returns only if the rate is not above zero.
async fn sessions(travel: Travel, rps: f64) {
    let Some(every) = Mix::session_interval(rps) else {
        tracing::warn!("no traffic: the rate is not above zero");
        return;
    };
    // The limit is ten times the sessions that are active at normal speed, to bound memory if services are slow.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let most = (10.0 * travel.mix.session_seconds() / every.as_secs_f64()).clamp(10.0, 10_000.0) as u64;
    let mut due = interval(every);
    due.set_missed_tick_behavior(MissedTickBehavior::Burst);
    // Two generators have different sessions.
    for number in fastrand::u64(..) >> 1.. {
        due.tick().await;
        if travel.stats.admit(most) {
            tokio::spawn(travel.clone().session(number));
        }
    }
}

async fn summaries(travel: Travel, seconds: u64) {
    let mut before = (0, 0);
    loop {
        sleep(Duration::from_secs(seconds)).await;
        let all = travel.stats.snapshot();
        let now = all.totals();
        tracing::info!(
            calls_per_second = (now.0 - before.0) / seconds,
            calls = now.0,
            not_as_expected = now.0 - now.1,
            sessions = all.sessions.started,
            skipped = all.sessions.skipped,
            flight_versions = ?all.flight_versions,
            "traffic"
        );
        before = now;
    }
}
