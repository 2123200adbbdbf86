//! `traffic`: simulates travellers with the mix of calls of Acme Air.
//!
//! Sessions start on a fixed schedule, whether or not the services keep up (open loop). A session logs in and then
//! repeats five times:
//!
//! 1. with a probability of 25 %, show and change the profile
//! 2. five searches
//! 3. book one of the flights found
//! 4. list the bookings
//! 5. with a probability of 25 %, cancel them all
//!
//! Some sessions request the canary. Some call an internal path that the mesh must refuse, and count the refusal.
//! Failed calls do not stop the traffic.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, HeaderValue, Method, header::AUTHORIZATION},
    routing::get,
};
use serde_json::Value;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use crate::{
    flight::any_trip,
    peers::{Client, Peer, escape},
    stats::{Snapshot, Stats},
};

const ROUNDS: u32 = 5;
const SEARCHES: u32 = 5;
/// Calls of a session on average: 1 log-in, 5 × (0.25 × 2 profile, 5 searches, 1 booking, 1 list, 1 cancel).
const CALLS: f64 = 43.5;

/// Rate, mix and targets of the traffic.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Calls per second to all services together.
    #[arg(long, env = "TRAFFIC_RPS", default_value_t = 50.0)]
    rps: f64,
    /// Mean pause of a traveller between two calls, in milliseconds.
    #[arg(long, env = "TRAFFIC_PAUSE_MS", default_value_t = 100)]
    pause_ms: u64,
    /// Number of customers that travel: uid0@email.com and so on.
    #[arg(long, env = "TRAFFIC_CUSTOMERS", default_value_t = 200)]
    customers: u32,
    /// Share of sessions that request the canary with `x-canary: always`.
    #[arg(long, env = "TRAFFIC_CANARY_SHARE", default_value_t = 0.1)]
    canary_share: f64,
    /// Share of sessions that call a path which only services may call; the expected status is 403.
    #[arg(long, env = "TRAFFIC_FORBIDDEN_SHARE", default_value_t = 0.25)]
    forbidden_share: f64,
    /// Seconds between two summary lines.
    #[arg(long, env = "TRAFFIC_SUMMARY_SECONDS", default_value_t = 10)]
    summary_seconds: u64,
    /// Address of the auth service.
    #[arg(long, env = "AUTH_URL", default_value = "http://auth:9080")]
    auth_url: Peer,
    /// Address of the customer service.
    #[arg(long, env = "CUSTOMER_URL", default_value = "http://customer:9080")]
    customer_url: Peer,
    /// Address of the flight service.
    #[arg(long, env = "FLIGHT_URL", default_value = "http://flight:9080")]
    flight_url: Peer,
    /// Address of the booking service.
    #[arg(long, env = "BOOKING_URL", default_value = "http://booking:9080")]
    booking_url: Peer,
}

#[derive(Clone)]
struct Traffic {
    args: Arc<Args>,
    client: Client,
    stats: Arc<Stats>,
}

/// One traveller.
struct Session {
    traffic: Traffic,
    user: String,
    headers: HeaderMap,
    canary: bool,
}

/// Starts the traffic and returns the routes of its statistics.
pub(crate) fn start(args: Args) -> Router {
    let traffic = Traffic { args: Arc::new(args), client: Client::new(), stats: Arc::default() };
    tokio::spawn(traffic.clone().sessions());
    tokio::spawn(traffic.clone().summaries());
    Router::new().route("/stats", get(stats)).with_state(traffic)
}

async fn stats(State(traffic): State<Traffic>) -> Json<Snapshot> {
    Json(traffic.stats.snapshot())
}

impl Traffic {
    /// Starts sessions on schedule. Returns only if the rate is not above zero.
    async fn sessions(self) {
        let every = session_interval(self.args.rps);
        let Some(every) = every else {
            tracing::warn!("no traffic: the rate is not above zero");
            return;
        };
        // The limit is ten times the sessions that are active at normal speed, to bound memory if services are slow.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let most = (10.0 * CALLS * (self.args.pause_ms as f64 + 20.0) / 1000.0 / every.as_secs_f64())
            .clamp(10.0, 10_000.0) as u64;
        let mut due = interval(every);
        due.set_missed_tick_behavior(MissedTickBehavior::Burst);
        loop {
            due.tick().await;
            let room = self.stats.with(|all| {
                let room = all.sessions.started - all.sessions.finished < most;
                *(if room { &mut all.sessions.started } else { &mut all.sessions.skipped }) += 1;
                room
            });
            if room {
                let traffic = self.clone();
                tokio::spawn(async move {
                    let stats = Arc::clone(&traffic.stats);
                    Session::new(traffic).travel().await;
                    stats.with(|all| all.sessions.finished += 1);
                });
            }
        }
    }

    async fn summaries(self) {
        let seconds = self.args.summary_seconds.max(1);
        let mut before = (0, 0);
        loop {
            sleep(Duration::from_secs(seconds)).await;
            let all = self.stats.snapshot();
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
}

impl Session {
    fn new(traffic: Traffic) -> Self {
        let user = format!("uid{}@email.com", fastrand::u32(..traffic.args.customers.max(1)));
        let canary = fastrand::f64() < traffic.args.canary_share;
        let mut headers = HeaderMap::new();
        if canary {
            headers.insert("x-canary", HeaderValue::from_static("always"));
        }
        Self { traffic, user, headers, canary }
    }

    /// Runs the whole session. Ends early only if the traveller cannot log in.
    async fn travel(mut self) {
        let args = Arc::clone(&self.traffic.args);
        let login = [("login", self.user.clone()), ("password", "password".to_owned())];
        let Some(answer) = self.post("login", &args.auth_url, "/auth/login", &login).await else { return };
        let bearer = answer["token"].as_str().and_then(|token| format!("Bearer {token}").parse().ok());
        let Some(bearer) = bearer else { return };
        self.headers.insert(AUTHORIZATION, bearer);
        if fastrand::f64() < args.forbidden_share {
            let path = format!("/customer/internal/updateCustomerTotalMiles/{}", escape(&self.user));
            self.call(
                "forbidden",
                403,
                Method::POST,
                &args.customer_url,
                &path,
                &[("miles", "0".to_owned())],
            )
            .await;
        }
        for _ in 0..ROUNDS {
            if fastrand::f64() < 0.25 {
                self.profile(&args).await;
            }
            let mut found = None;
            for _ in 0..SEARCHES {
                found = self.search(&args).await.or(found);
            }
            if let Some(form) = found {
                self.post("bookflights", &args.booking_url, "/booking/bookflights", &form).await;
            }
            let path = format!("/booking/byuser/{}", escape(&self.user));
            let bookings = self.get("byuser", &args.booking_url, &path).await;
            if fastrand::f64() < 0.25 {
                let all = bookings.as_ref().and_then(Value::as_array).cloned().unwrap_or_default();
                for number in all.iter().filter_map(|booking| booking["_id"].as_str()) {
                    let form = [("userid", self.user.clone()), ("number", number.to_owned())];
                    self.post("cancelbooking", &args.booking_url, "/booking/cancelbooking", &form).await;
                }
            }
        }
    }

    async fn profile(&self, args: &Args) {
        let path = format!("/customer/byid/{}", escape(&self.user));
        let Some(mut profile) = self.get("viewprofile", &args.customer_url, &path).await else { return };
        profile["password"] = "password".into();
        profile["phoneNumber"] = format!("919-555-{:04}", fastrand::u32(..10_000)).into();
        self.post_json("updateprofile", &args.customer_url, &path, &profile).await;
    }

    /// Runs one search. Returns the form that books a flight, if one was found.
    async fn search(&self, args: &Args) -> Option<[(&'static str, String); 6]> {
        let (from, to) = any_trip();
        let form = [
            ("fromAirport", from.to_owned()),
            ("toAirport", to.to_owned()),
            ("fromDate", format!("2026-12-{:02}", fastrand::u32(1..15))),
            ("returnDate", format!("2026-12-{:02}", fastrand::u32(15..29))),
            ("oneWay", "false".to_owned()),
        ];
        let answer = self.post("queryflights", &args.flight_url, "/flight/queryflights", &form).await?;
        let leg = |n: usize| {
            let flight = &answer["tripFlights"][n]["flightsOptions"][0];
            Some((flight["_id"].as_str()?.to_owned(), flight["flightSegmentId"].as_str()?.to_owned()))
        };
        let ((to_id, to_segment), (back_id, back_segment)) = (leg(0)?, leg(1)?);
        Some([
            ("userid", self.user.clone()),
            ("toFlightId", to_id),
            ("toFlightSegId", to_segment),
            ("retFlightId", back_id),
            ("retFlightSegId", back_segment),
            ("oneWayFlight", "false".to_owned()),
        ])
    }

    async fn get(&self, name: &'static str, peer: &Peer, path: &str) -> Option<Value> {
        self.call(name, 200, Method::GET, peer, path, &[]).await
    }

    async fn post(
        &self,
        name: &'static str,
        peer: &Peer,
        path: &str,
        form: &[(&str, String)],
    ) -> Option<Value> {
        self.call(name, 200, Method::POST, peer, path, form).await
    }

    async fn call(
        &self,
        name: &'static str,
        expected: u16,
        method: Method,
        peer: &Peer,
        path: &str,
        form: &[(&str, String)],
    ) -> Option<Value> {
        let fields: Vec<(&str, &str)> = form.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.pause().await;
        let begun = Instant::now();
        let answer = self.traffic.client.call(method, peer, path, self.headers.clone(), &fields).await;
        self.note(name, expected, begun, answer)
    }

    async fn post_json(&self, name: &'static str, peer: &Peer, path: &str, body: &Value) -> Option<Value> {
        self.pause().await;
        let begun = Instant::now();
        let body = Bytes::from(body.to_string());
        let answer = self.traffic.client.post_json(peer, path, self.headers.clone(), body).await;
        self.note(name, 200, begun, answer)
    }

    /// Counts the outcome and returns the JSON of a success.
    fn note(
        &self,
        name: &'static str,
        expected: u16,
        begun: Instant,
        answer: Result<crate::peers::Answer, String>,
    ) -> Option<Value> {
        let stats = &self.traffic.stats;
        let status = answer.as_ref().map(|answer| answer.status.as_u16()).map_err(Clone::clone);
        stats.count(name, expected, status, begun.elapsed());
        let answer = answer.ok().filter(|answer| answer.status.is_success())?;
        if let Some(version) = answer.headers.get("x-flight-version").and_then(|v| v.to_str().ok()) {
            stats.with(|all| {
                let versions =
                    if self.canary { &mut all.canary_flight_versions } else { &mut all.flight_versions };
                *versions.entry(version.to_owned()).or_default() += 1;
            });
        }
        serde_json::from_slice(&answer.body).ok()
    }

    /// Waits between 0 and twice the mean pause.
    async fn pause(&self) {
        sleep(Duration::from_millis(fastrand::u64(0..=2 * self.traffic.args.pause_ms.min(60_000)))).await;
    }
}

/// Returns the interval between session starts for this number of calls per second.
fn session_interval(rps: f64) -> Option<Duration> {
    (rps > 0.0).then(|| Duration::try_from_secs_f64(CALLS / rps).ok()).flatten().filter(|d| !d.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_sets_the_interval_of_sessions() {
        assert_eq!(session_interval(43.5), Some(Duration::from_secs(1)));
        assert_eq!(session_interval(0.0), None);
        assert_eq!(session_interval(f64::NAN), None);
    }
}
