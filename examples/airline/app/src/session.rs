//! A traveller's session with the mix of calls of Acme Air. A session logs in and then repeats five times:
//!
//! 1. with a probability of 25 %, show and change the profile
//! 2. five searches
//! 3. book one of the flights found
//! 4. list the bookings
//! 5. with a probability of 25 %, cancel them all
//!
//! Some sessions request the canary. Some call an internal path that the mesh must refuse, and count the refusal. The
//! number of a session determines its random choices, so each run has the same sessions.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    body::Bytes,
    http::{HeaderMap, HeaderValue, Method, header::AUTHORIZATION},
};
use fastrand::Rng;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::{
    flight::any_trip,
    peers::{Answer, Client, Peer, escape},
    stats::Stats,
};

const ROUNDS: u32 = 5;
const SEARCHES: u32 = 5;
/// Calls of a session on average: 1 log-in, 5 × (0.25 × 2 profile, 5 searches, 1 booking, 1 list, 1 cancel).
const CALLS: f64 = 43.5;

/// Mix and targets of the sessions.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Mix {
    /// Mean pause of a traveller between two calls, in milliseconds.
    #[arg(long, env = "TRAFFIC_PAUSE_MS", default_value_t = 100)]
    pub(crate) pause_ms: u64,
    /// Number of customers that travel: uid0@email.com and so on.
    #[arg(long, env = "TRAFFIC_CUSTOMERS", default_value_t = 200)]
    pub(crate) customers: u32,
    /// Share of sessions that request the canary with `x-canary: always`.
    #[arg(long, env = "TRAFFIC_CANARY_SHARE", default_value_t = 0.1)]
    canary_share: f64,
    /// Share of sessions that call a path which only services may call; the expected status is 403.
    #[arg(long, env = "TRAFFIC_FORBIDDEN_SHARE", default_value_t = 0.25)]
    forbidden_share: f64,
    /// Address of the auth service.
    #[arg(long, env = "AUTH_URL", default_value = "http://auth:9080")]
    auth_url: Peer,
    /// Address of the customer service.
    #[arg(long, env = "CUSTOMER_URL", default_value = "http://customer:9080")]
    pub(crate) customer_url: Peer,
    /// Address of the flight service.
    #[arg(long, env = "FLIGHT_URL", default_value = "http://flight:9080")]
    pub(crate) flight_url: Peer,
    /// Address of the booking service.
    #[arg(long, env = "BOOKING_URL", default_value = "http://booking:9080")]
    pub(crate) booking_url: Peer,
}

/// State that all sessions share.
#[derive(Clone)]
pub(crate) struct Travel {
    pub(crate) mix: Arc<Mix>,
    pub(crate) client: Client,
    pub(crate) stats: Arc<Stats>,
    /// Sessions end before their next call.
    ends: Arc<AtomicBool>,
}

/// One traveller.
struct Session {
    travel: Travel,
    user: String,
    headers: HeaderMap,
    canary: bool,
    random: Rng,
}

impl Mix {
    /// Returns the interval between session starts for this number of calls per second. `None` if it is not above zero.
    pub(crate) fn session_interval(rps: f64) -> Option<Duration> {
        (rps > 0.0).then(|| Duration::try_from_secs_f64(CALLS / rps).ok()).flatten().filter(|d| !d.is_zero())
    }

    /// Returns the mean duration of a session in seconds if a call takes 20 ms.
    pub(crate) fn session_seconds(&self) -> f64 {
        CALLS * (self.pause_ms as f64 + 20.0) / 1000.0
    }
}

impl Travel {
    pub(crate) fn new(mix: Mix) -> Self {
        Self { mix: Arc::new(mix), client: Client::new(), stats: Arc::default(), ends: Arc::default() }
    }

    /// Runs the session with this number, and counts its end.
    pub(crate) async fn session(self, number: u64) {
        let stats = Arc::clone(&self.stats);
        Session::new(self, number).travel().await;
        stats.with(|all| all.sessions.finished += 1);
    }

    /// Lets all sessions end before their next call.
    pub(crate) fn end(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }
}

impl Session {
    fn new(travel: Travel, number: u64) -> Self {
        let mut random = Rng::with_seed(number);
        let user = format!("uid{}@email.com", number % u64::from(travel.mix.customers.max(1)));
        let canary = random.f64() < travel.mix.canary_share;
        let mut headers = HeaderMap::new();
        if canary {
            headers.insert("x-canary", HeaderValue::from_static("always"));
        }
        Self { travel, user, headers, canary, random }
    }

    /// Runs the whole session. Ends early only if the traveller cannot log in.
    async fn travel(mut self) {
        let mix = Arc::clone(&self.travel.mix);
        let login = [("login", self.user.clone()), ("password", "password".to_owned())];
        let Some(answer) = self.post("login", &mix.auth_url, "/auth/login", &login).await else { return };
        let bearer = answer["token"].as_str().and_then(|token| format!("Bearer {token}").parse().ok());
        let Some(bearer) = bearer else { return };
        self.headers.insert(AUTHORIZATION, bearer);
        if self.random.f64() < mix.forbidden_share {
            let path = format!("/customer/internal/updateCustomerTotalMiles/{}", escape(&self.user));
            self.call("forbidden", 403, Method::POST, &mix.customer_url, &path, &[("miles", "0".to_owned())])
                .await;
        }
        for _ in 0..ROUNDS {
            if self.random.f64() < 0.25 {
                self.profile(&mix).await;
            }
            let mut found = None;
            for _ in 0..SEARCHES {
                found = self.search(&mix).await.or(found);
            }
            if let Some(form) = found {
                self.post("bookflights", &mix.booking_url, "/booking/bookflights", &form).await;
            }
            let path = format!("/booking/byuser/{}", escape(&self.user));
            let bookings = self.get("byuser", &mix.booking_url, &path).await;
            if self.random.f64() < 0.25 {
                let all = bookings.as_ref().and_then(Value::as_array).cloned().unwrap_or_default();
                for number in all.iter().filter_map(|booking| booking["_id"].as_str()) {
                    let form = [("userid", self.user.clone()), ("number", number.to_owned())];
                    self.post("cancelbooking", &mix.booking_url, "/booking/cancelbooking", &form).await;
                }
            }
        }
    }

    async fn profile(&mut self, mix: &Mix) {
        let path = format!("/customer/byid/{}", escape(&self.user));
        let Some(mut profile) = self.get("viewprofile", &mix.customer_url, &path).await else { return };
        profile["password"] = "password".into();
        profile["phoneNumber"] = format!("919-555-{:04}", self.random.u32(..10_000)).into();
        self.post_json("updateprofile", &mix.customer_url, &path, &profile).await;
    }

    /// Runs one search. Returns the form that books a flight, if one was found.
    async fn search(&mut self, mix: &Mix) -> Option<[(&'static str, String); 6]> {
        let (from, to) = any_trip(&mut self.random);
        let form = [
            ("fromAirport", from.to_owned()),
            ("toAirport", to.to_owned()),
            ("fromDate", format!("2026-12-{:02}", self.random.u32(1..15))),
            ("returnDate", format!("2026-12-{:02}", self.random.u32(15..29))),
            ("oneWay", "false".to_owned()),
        ];
        let answer = self.post("queryflights", &mix.flight_url, "/flight/queryflights", &form).await?;
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

    async fn get(&mut self, name: &'static str, peer: &Peer, path: &str) -> Option<Value> {
        self.call(name, 200, Method::GET, peer, path, &[]).await
    }

    async fn post(
        &mut self,
        name: &'static str,
        peer: &Peer,
        path: &str,
        form: &[(&str, String)],
    ) -> Option<Value> {
        self.call(name, 200, Method::POST, peer, path, form).await
    }

    async fn call(
        &mut self,
        name: &'static str,
        expected: u16,
        method: Method,
        peer: &Peer,
        path: &str,
        form: &[(&str, String)],
    ) -> Option<Value> {
        let fields: Vec<(&str, &str)> = form.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.pause().await;
        self.travel.stats.begin();
        let begun = Instant::now();
        let answer = self.travel.client.call(method, peer, path, self.headers.clone(), &fields).await;
        self.note(name, expected, begun, answer)
    }

    async fn post_json(
        &mut self,
        name: &'static str,
        peer: &Peer,
        path: &str,
        body: &Value,
    ) -> Option<Value> {
        self.pause().await;
        self.travel.stats.begin();
        let begun = Instant::now();
        let body = Bytes::from(body.to_string());
        let answer = self.travel.client.post_json(peer, path, self.headers.clone(), body).await;
        self.note(name, 200, begun, answer)
    }

    /// Counts the outcome and returns the JSON of a success.
    fn note(
        &self,
        name: &'static str,
        expected: u16,
        begun: Instant,
        answer: Result<Answer, String>,
    ) -> Option<Value> {
        let stats = &self.travel.stats;
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

    /// Waits between 0 and twice the mean pause. A session that is to end waits until it is dropped.
    async fn pause(&mut self) {
        let pause = 2 * self.travel.mix.pause_ms.min(60_000);
        if pause > 0 {
            sleep(Duration::from_millis(self.random.u64(0..=pause))).await;
        }
        if self.travel.has_ended() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_sets_the_interval_of_sessions() {
        assert_eq!(Mix::session_interval(43.5), Some(Duration::from_secs(1)));
        assert_eq!(Mix::session_interval(0.0), None);
        assert_eq!(Mix::session_interval(f64::NAN), None);
    }
}
