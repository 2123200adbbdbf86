//! All services over real sockets in this process, without a mesh.

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header::AUTHORIZATION};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::store::tests::Postgres;
use crate::{
    auth, booking, customer, flight,
    peers::{Answer, Client, Peer},
    store::{DatabaseSetting, Store},
    token::Key,
};

struct World {
    client: Client,
    auth: Peer,
    customer: Peer,
    flight: Peer,
    booking: Peer,
}

async fn listen(router: axum::Router) -> Peer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    format!("http://{address}").parse().unwrap()
}

/// Starts all services, each with a database of this kind.
async fn world(database: &DatabaseSetting) -> World {
    let key: Key = "0123456789abcdef0123456789abcdef".parse().unwrap();
    let store = async |table: &str| Store::open(database, table).await.unwrap();
    let customer = listen(customer::router(key.clone(), store("customer").await).await.unwrap()).await;
    let version = flight::Version::V2;
    let timetable = store(version.table()).await;
    let flight = listen(flight::router(key.clone(), version, timetable).await.unwrap()).await;
    let auth = listen(auth::router(key.clone(), customer.clone())).await;
    let bookings = store("booking").await;
    let booking = listen(booking::router(key, customer.clone(), flight.clone(), bookings)).await;
    World { client: Client::new(), auth, customer, flight, booking }
}

impl World {
    async fn post(&self, peer: &Peer, path: &str, headers: &HeaderMap, form: &[(&str, &str)]) -> Answer {
        self.client.call(Method::POST, peer, path, headers.clone(), form).await.unwrap()
    }

    async fn get(&self, peer: &Peer, path: &str, headers: &HeaderMap) -> Answer {
        self.client.call(Method::GET, peer, path, headers.clone(), &[]).await.unwrap()
    }

    async fn login(&self, user: &str) -> HeaderMap {
        let form = [("login", user), ("password", "password")];
        let answer = self.post(&self.auth, "/auth/login", &HeaderMap::new(), &form).await;
        let bearer = format!("Bearer {}", json(&answer)["token"].as_str().unwrap());
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_str(&bearer).unwrap())])
    }

    async fn miles(&self, headers: &HeaderMap) -> i64 {
        let answer = self.get(&self.customer, "/customer/byid/uid7@email.com", headers).await;
        json(&answer)["totalMiles"].as_i64().unwrap()
    }
}

fn json(answer: &Answer) -> Value {
    serde_json::from_slice(&answer.body).unwrap()
}

#[tokio::test]
async fn a_traveller_searches_books_and_cancels() {
    book_and_cancel(&world(&DatabaseSetting::Temporary).await).await;
}

#[tokio::test]
async fn a_traveller_books_with_postgresql() {
    let Some(server) = Postgres::start() else { return };
    book_and_cancel(&world(&server.setting().await).await).await;
}

/// Books a flight and cancels it. Checks the miles and the booking between.
async fn book_and_cancel(world: &World) {
    let headers = world.login("uid7@email.com").await;
    let before = world.miles(&headers).await;

    let form = [
        ("fromAirport", "CDG"),
        ("toAirport", "JFK"),
        ("fromDate", "2026-12-01"),
        ("returnDate", "2026-12-20"),
        ("oneWay", "false"),
    ];
    let found = world.post(&world.flight, "/flight/queryflights", &headers, &form).await;
    assert_eq!(found.status, StatusCode::OK);
    assert_eq!(found.headers["x-flight-version"], "v2");
    let found = json(&found);
    assert_eq!(found["tripLegs"], 2);
    assert_eq!(found["tripFlights"][1]["originPort"], "JFK");

    let there = &found["tripFlights"][0]["flightsOptions"][0];
    let form = [
        ("userid", "uid7@email.com"),
        ("toFlightId", there["_id"].as_str().unwrap()),
        ("toFlightSegId", there["flightSegmentId"].as_str().unwrap()),
        ("oneWayFlight", "true"),
    ];
    let booked = json(&world.post(&world.booking, "/booking/bookflights", &headers, &form).await);
    let miles = booked["miles"].as_i64().unwrap();
    assert!(miles > 3000);
    assert_eq!(world.miles(&headers).await, before + miles);

    let kept = json(&world.get(&world.booking, "/booking/byuser/uid7@email.com", &headers).await);
    assert_eq!(kept.as_array().unwrap().len(), 1);
    assert_eq!(kept[0]["_id"], booked["bookingId"]);

    let form = [("userid", "uid7@email.com"), ("number", booked["bookingId"].as_str().unwrap())];
    let cancelled = world.post(&world.booking, "/booking/cancelbooking", &headers, &form).await;
    assert_eq!(cancelled.status, StatusCode::OK);
    assert_eq!(world.miles(&headers).await, before);
    let again = world.post(&world.booking, "/booking/cancelbooking", &headers, &form).await;
    assert_eq!(again.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn requests_without_a_valid_token_are_refused() {
    let world = world(&DatabaseSetting::Temporary).await;
    let form = [("login", "uid7@email.com"), ("password", "wrong")];
    let answer = world.post(&world.auth, "/auth/login", &HeaderMap::new(), &form).await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    let answer = world.get(&world.booking, "/booking/byuser/uid7@email.com", &HeaderMap::new()).await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    let other = world.login("uid8@email.com").await;
    let answer = world.get(&world.customer, "/customer/byid/uid7@email.com", &other).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn nothing_is_booked_if_a_service_is_unavailable() {
    let world = world(&DatabaseSetting::Temporary).await;
    let headers = world.login("uid7@email.com").await;
    let form = [
        ("userid", "uid7@email.com"),
        ("toFlightId", "x"),
        ("toFlightSegId", "AMS-XXX"),
        ("oneWayFlight", "true"),
    ];
    let answer = world.post(&world.booking, "/booking/bookflights", &headers, &form).await;
    assert_eq!(answer.status, StatusCode::NOT_FOUND);
    let count = world.get(&world.booking, "/booking/config/countBookings", &headers).await;
    assert_eq!(count.body, "0");
}
