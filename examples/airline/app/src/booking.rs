//! `booking`: keeps the bookings. It gets the miles from `flight` and credits them at `customer`.
//!
//! A booking is kept only if the miles were credited. A cancellation takes them back.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::{
    Form, Json, Router,
    extract::{Path, State},
    http::{HeaderMap, Method, StatusCode},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    peers::{Client, Peer, escape, propagated_headers},
    service::Failure,
    store::Store,
    token::Key,
};

#[derive(Clone)]
struct Bookings {
    key: Key,
    customer: Peer,
    flight: Peer,
    client: Client,
    /// Bookings by customer and number.
    kept: Store,
}

/// A booking of a single or return trip.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Booking {
    #[serde(rename = "_id")]
    id: String,
    customer_id: String,
    flight_ids: Vec<String>,
    miles: i64,
    date_of_booking: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Book {
    userid: String,
    to_flight_id: String,
    to_flight_seg_id: String,
    #[serde(default)]
    ret_flight_id: String,
    #[serde(default)]
    ret_flight_seg_id: String,
    #[serde(default)]
    one_way_flight: bool,
}

#[derive(Deserialize)]
struct Cancel {
    userid: String,
    number: String,
}

/// Returns the routes.
pub(crate) fn router(key: Key, customer: Peer, flight: Peer, kept: Store) -> Router {
    let bookings = Bookings { key, customer, flight, client: Client::new(), kept };
    Router::new()
        .route("/booking/bookflights", post(book))
        .route("/booking/byuser/{id}", get(by_user))
        .route("/booking/bynumber/{id}/{number}", get(by_number))
        .route("/booking/cancelbooking", post(cancel))
        .route("/booking/loader/load", get(clear))
        .route("/booking/config/countBookings", get(count))
        .with_state(bookings)
}

async fn book(
    State(bookings): State<Bookings>,
    headers: HeaderMap,
    Form(book): Form<Book>,
) -> Result<Json<Value>, Failure> {
    bookings.key.caller_is(&headers, &book.userid)?;
    let mut legs = vec![(book.to_flight_id, book.to_flight_seg_id)];
    if !book.one_way_flight {
        legs.push((book.ret_flight_id, book.ret_flight_seg_id));
    }
    let mut miles = 0_i64;
    for (_, segment) in &legs {
        miles = miles.saturating_add(bookings.miles_of(segment, &headers).await?);
    }
    bookings.credit(&book.userid, miles, &headers).await?;
    let booking = Booking {
        id: format!("B{:016x}", fastrand::u64(..)),
        customer_id: book.userid.clone(),
        flight_ids: legs.into_iter().map(|(flight, _)| flight).collect(),
        miles,
        date_of_booking: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    };
    let answer = json!({ "oneWay": book.one_way_flight, "bookingId": booking.id, "miles": miles });
    bookings.kept.put(&key_of(&book.userid, &booking.id), &booking).await?;
    Ok(Json(answer))
}

async fn by_user(
    State(bookings): State<Bookings>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Vec<Booking>>, Failure> {
    bookings.key.caller_is(&headers, &id)?;
    bookings.kept.starting_with(&key_of(&id, "")).await.map(Json)
}

async fn by_number(
    State(bookings): State<Bookings>,
    Path((id, number)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Json<Booking>, Failure> {
    bookings.key.caller_is(&headers, &id)?;
    let found = bookings.kept.get(&key_of(&id, &number)).await?;
    found.map(Json).ok_or_else(|| Failure::not_found(format!("{id} has no booking {number}")))
}

async fn cancel(
    State(bookings): State<Bookings>,
    headers: HeaderMap,
    Form(cancel): Form<Cancel>,
) -> Result<Json<Value>, Failure> {
    bookings.key.caller_is(&headers, &cancel.userid)?;
    // The booking is removed first, so that of two concurrent cancellations only one takes the miles back.
    let key = key_of(&cancel.userid, &cancel.number);
    let taken: Option<Booking> = bookings.kept.remove(&key).await?;
    let booking = taken
        .ok_or_else(|| Failure::not_found(format!("{} has no booking {}", cancel.userid, cancel.number)))?;
    if let Err(failure) = bookings.credit(&cancel.userid, -booking.miles, &headers).await {
        bookings.kept.put(&key, &booking).await?;
        return Err(failure);
    }
    Ok(Json(json!({ "status": "success", "cancelled": booking.id })))
}

/// Removes all bookings.
async fn clear(State(bookings): State<Bookings>) -> Result<&'static str, Failure> {
    bookings.kept.load::<Booking>(Vec::new()).await?;
    Ok("no bookings now\n")
}

async fn count(State(bookings): State<Bookings>) -> Result<String, Failure> {
    Ok(bookings.kept.count().await?.to_string())
}

/// Returns the ID of a booking in the database.
fn key_of(customer: &str, number: &str) -> String {
    format!("{customer}/{number}")
}

impl Bookings {
    async fn miles_of(&self, segment: &str, headers: &HeaderMap) -> Result<i64, Failure> {
        let answer =
            self.post(&self.flight, "/flight/getrewardmiles", headers, &[("flightSegment", segment)]).await?;
        answer["miles"].as_i64().ok_or_else(|| Failure::new(StatusCode::BAD_GATEWAY, "flight sent no miles"))
    }

    async fn credit(&self, customer: &str, miles: i64, headers: &HeaderMap) -> Result<(), Failure> {
        let path = format!("/customer/internal/updateCustomerTotalMiles/{}", escape(customer));
        self.post(&self.customer, &path, headers, &[("miles", &miles.to_string())]).await.map(|_| ())
    }

    /// Sends a call. Returns the status of a 4xx response unchanged; every other failure becomes 502 (Bad Gateway).
    async fn post(
        &self,
        peer: &Peer,
        path: &str,
        headers: &HeaderMap,
        fields: &[(&str, &str)],
    ) -> Result<Value, Failure> {
        let bad = |why: String| Failure::new(StatusCode::BAD_GATEWAY, why);
        let answer = self
            .client
            .call(Method::POST, peer, path, propagated_headers(headers), fields)
            .await
            .map_err(bad)?;
        if answer.status != StatusCode::OK {
            let status =
                if answer.status.is_client_error() { answer.status } else { StatusCode::BAD_GATEWAY };
            return Err(Failure::new(status, format!("{path}: answered {}", answer.status)));
        }
        serde_json::from_slice(&answer.body).map_err(|error| bad(format!("{path}: {error}")))
    }
}
