//! `flight`: the schedule of flights and their miles.
//!
//! The database has the timetable of a day, which is valid for every day: each pair of airports has two flights. Version
//! v2 differs visibly: it returns `x-flight-version: v2` and has a third, late flight. Each version has its own database.

use std::{str::FromStr, time::Duration};

use axum::{
    Form, Json, Router,
    extract::{Query, Request, State},
    http::{HeaderMap, HeaderValue},
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{service::Failure, store::Store, token::Key};

/// Airports with latitude and longitude.
const AIRPORTS: [(&str, f64, f64); 14] = [
    ("AMS", 52.31, 4.76),
    ("BOM", 19.09, 72.87),
    ("CDG", 49.01, 2.55),
    ("DEL", 28.57, 77.10),
    ("DXB", 25.25, 55.36),
    ("FRA", 50.03, 8.57),
    ("HKG", 22.31, 113.91),
    ("IST", 41.26, 28.74),
    ("JFK", 40.64, -73.78),
    ("LHR", 51.47, -0.45),
    ("NRT", 35.77, 140.39),
    ("SIN", 1.36, 103.99),
    ("SVO", 55.97, 37.41),
    ("SYD", -33.95, 151.18),
];
const MAX_DELAY_MS: u64 = 30_000;

/// Version of this replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V2,
}

impl Version {
    fn name(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
        }
    }

    /// Returns the name of the timetable's table.
    pub(crate) fn table(self) -> &'static str {
        match self {
            Self::V1 => "flight_v1",
            Self::V2 => "flight_v2",
        }
    }

    /// Local departure times of a day.
    fn departures(self) -> &'static [&'static str] {
        match self {
            Self::V1 => &["08:10", "14:45"],
            Self::V2 => &["08:10", "14:45", "21:30"],
        }
    }
}

impl FromStr for Version {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "v1" => Ok(Self::V1),
            "v2" => Ok(Self::V2),
            _ => Err("expected v1 or v2"),
        }
    }
}

#[derive(Clone)]
struct Flights {
    key: Key,
    version: Version,
    timetable: Store,
}

/// A daily flight of the timetable.
#[derive(Serialize, Deserialize)]
struct DailyFlight {
    number: String,
    /// Local time.
    departure: String,
    miles: i64,
    economy: i64,
    first: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Trip {
    from_airport: String,
    to_airport: String,
    from_date: String,
    #[serde(default)]
    return_date: String,
    #[serde(default)]
    one_way: bool,
}

#[derive(Deserialize)]
struct Slow {
    /// Delay of the response in milliseconds, to demonstrate a timeout.
    #[serde(default)]
    delay: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Segment {
    flight_segment: String,
}

/// Returns the routes of this version. An empty database gets the timetable.
pub(crate) async fn router(key: Key, version: Version, timetable: Store) -> Result<Router, Failure> {
    let flights = Flights { key, version, timetable };
    if flights.timetable.count().await? == 0 {
        flights.load().await?;
    }
    let tell = move |request: Request, next: Next| async move {
        let mut response: Response = next.run(request).await;
        response.headers_mut().insert("x-flight-version", HeaderValue::from_static(version.name()));
        response
    };
    let routes = Router::new()
        .route("/flight/queryflights", post(query))
        .route("/flight/getrewardmiles", post(miles))
        .route("/flight/loader/load", get(load))
        .route("/flight/config/countFlights", get(count))
        .route("/flight/config/countFlightSegments", get(count_segments))
        .layer(middleware::from_fn(tell))
        .with_state(flights);
    Ok(routes)
}

async fn query(
    State(flights): State<Flights>,
    Query(slow): Query<Slow>,
    headers: HeaderMap,
    Form(trip): Form<Trip>,
) -> Result<Json<Value>, Failure> {
    flights.key.caller(&headers)?;
    if slow.delay > 0 {
        tokio::time::sleep(Duration::from_millis(slow.delay.min(MAX_DELAY_MS))).await;
    }
    let mut legs = vec![flights.on(&trip.from_airport, &trip.to_airport, &trip.from_date).await?];
    if !trip.one_way {
        legs.push(flights.on(&trip.to_airport, &trip.from_airport, &trip.return_date).await?);
    }
    Ok(Json(json!({ "tripLegs": legs.len(), "tripFlights": legs })))
}

async fn miles(
    State(flights): State<Flights>,
    headers: HeaderMap,
    Form(segment): Form<Segment>,
) -> Result<Json<Value>, Failure> {
    flights.key.caller(&headers)?;
    let (from, to) = segment
        .flight_segment
        .split_once('-')
        .ok_or_else(|| Failure::bad_request("flightSegment: expected FROM-TO, e.g. CDG-JFK"))?;
    let of_day = flights.of_day(from, to).await?;
    Ok(Json(json!({ "miles": of_day.first().map_or(0, |flight| flight.miles) })))
}

async fn load(State(flights): State<Flights>) -> Result<String, Failure> {
    Ok(format!("loaded {} daily flights\n", flights.load().await?))
}

async fn count(State(flights): State<Flights>) -> Result<String, Failure> {
    Ok(flights.timetable.count().await?.to_string())
}

async fn count_segments(State(flights): State<Flights>) -> Result<String, Failure> {
    let of_segment = flights.version.departures().len() as u64;
    Ok((flights.timetable.count().await? / of_segment).to_string())
}

impl Flights {
    /// Writes the timetable. Returns the number of flights.
    async fn load(&self) -> Result<usize, Failure> {
        let mut all = Vec::new();
        for (from, ..) in AIRPORTS {
            for (to, ..) in AIRPORTS.iter().filter(|(to, ..)| *to != from) {
                let miles = distance(from, to)?;
                for (n, departure) in self.version.departures().iter().enumerate() {
                    let flight = DailyFlight {
                        number: format!("{from}{to}{n}"),
                        departure: (*departure).to_owned(),
                        miles,
                        economy: 60 + miles / 10,
                        first: 250 + miles / 2,
                    };
                    all.push((format!("{from}-{to}/{n}"), flight));
                }
            }
        }
        let number = all.len();
        self.timetable.load(all).await?;
        Ok(number)
    }

    /// Returns the flights of each day; none if both airports are the same.
    async fn of_day(&self, from: &str, to: &str) -> Result<Vec<DailyFlight>, Failure> {
        let found: Vec<DailyFlight> = self.timetable.starting_with(&format!("{from}-{to}/")).await?;
        if found.is_empty() {
            // Fails if there is no such airport.
            distance(from, to)?;
        }
        Ok(found)
    }

    /// Returns the flights of one leg on a day.
    async fn on(&self, from: &str, to: &str, date: &str) -> Result<Value, Failure> {
        let day = date.get(..10).filter(|day| is_date(day));
        let day =
            day.ok_or_else(|| Failure::bad_request(format!("invalid date {date:?}; expected YYYY-MM-DD")))?;
        let of_day = self.of_day(from, to).await?;
        let option = |DailyFlight { number, departure, miles, economy, first }: &DailyFlight| {
            json!({
                "_id": format!("{number}.{day}"),
                "flightSegmentId": format!("{from}-{to}"),
                "scheduledDepartureTime": format!("{day}T{departure}"),
                "economyClassBaseCost": economy,
                "firstClassBaseCost": first,
                "flightSegment": { "originPort": from, "destPort": to, "miles": miles },
            })
        };
        let options: Vec<Value> = of_day.iter().map(option).collect();
        Ok(json!({ "originPort": from, "destPort": to, "flightsOptions": options }))
    }
}

fn is_date(text: &str) -> bool {
    let fits =
        |(at, byte): (usize, u8)| if at == 4 || at == 7 { byte == b'-' } else { byte.is_ascii_digit() };
    text.len() == 10 && text.bytes().enumerate().all(fits)
}

/// Returns the great-circle distance between two airports in miles.
fn distance(from: &str, to: &str) -> Result<i64, Failure> {
    let place = |name: &str| {
        let found = AIRPORTS.iter().find(|(code, ..)| *code == name);
        found.ok_or_else(|| Failure::not_found(format!("no airport {name}")))
    };
    let (_, from_lat, from_lon) = place(from)?;
    let (_, to_lat, to_lon) = place(to)?;
    let (lat, lon) = ((to_lat - from_lat).to_radians(), (to_lon - from_lon).to_radians());
    let half = (lat / 2.0).sin().powi(2)
        + from_lat.to_radians().cos() * to_lat.to_radians().cos() * (lon / 2.0).sin().powi(2);
    #[expect(clippy::cast_possible_truncation, reason = "at most half the way round the earth, 12,500 miles")]
    Ok((2.0 * 3958.8 * half.sqrt().asin()).round() as i64)
}

/// Returns the codes of all airports.
pub(crate) fn airports() -> impl Iterator<Item = &'static str> {
    AIRPORTS.iter().map(|(code, ..)| *code)
}

/// Returns two different airports at random.
pub(crate) fn any_trip(random: &mut fastrand::Rng) -> (&'static str, &'static str) {
    let from = random.usize(..AIRPORTS.len());
    let to = (from + random.usize(1..AIRPORTS.len())) % AIRPORTS.len();
    (AIRPORTS[from].0, AIRPORTS[to].0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::DatabaseSetting;

    #[test]
    fn distances_are_great_circle_miles() {
        let miles = distance("JFK", "LHR").unwrap();
        assert!((3430..3470).contains(&miles), "{miles}");
        assert_eq!(distance("AMS", "AMS").unwrap(), 0);
        assert!(distance("AMS", "XXX").is_err());
    }

    #[tokio::test]
    async fn version_two_has_a_late_flight() {
        let options = async |version: Version| {
            let timetable = Store::open(&DatabaseSetting::Temporary, version.table()).await.unwrap();
            let key = "0123456789abcdef0123456789abcdef".parse().unwrap();
            let flights = Flights { key, version, timetable };
            flights.load().await.unwrap();
            let leg = flights.on("CDG", "JFK", "2026-05-01T00:00").await.unwrap();
            leg["flightsOptions"].as_array().unwrap().len()
        };
        assert_eq!((options(Version::V1).await, options(Version::V2).await), (2, 3));
    }

    #[test]
    fn dates_are_checked() {
        assert!(is_date("2026-05-01"));
        for wrong in ["2026-5-1", "20260501xx", "", "2026/05/01"] {
            assert!(!is_date(wrong), "{wrong}");
        }
    }
}
