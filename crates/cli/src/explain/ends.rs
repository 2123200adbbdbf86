//! Ends of requests, and their summary.

use super::report::Destination;

/// Status of the response of a proxy whose connection to an endpoint is closed.
const UNAVAILABLE: u16 = 503;

/// Result of a request that is not forwarded further.
pub(super) struct JourneyEnd {
    pub(super) served: bool,
    pub(super) status: Option<u16>,
    pub(super) result: String,
}

/// Returns the end of a request that leaves the mesh.
pub(super) fn outside(address: &str) -> JourneyEnd {
    JourneyEnd {
        served: true,
        status: None,
        result: format!("the request leaves the mesh: {address} is outside"),
    }
}

/// Returns the result for all destinations.
pub(super) fn summary(destinations: &[Destination]) -> JourneyEnd {
    let refused: Vec<&Destination> = destinations.iter().filter(|to| !to.served).collect();
    let first = refused.first().or(destinations.first().as_ref().map(|to| to as _)).copied();
    let Some(first) = first else {
        return JourneyEnd {
            served: false,
            status: None,
            result: "the request reaches no destination".to_owned(),
        };
    };
    let share: f64 = refused.iter().map(|to| to.share).sum();
    let all: f64 = destinations.iter().map(|to| to.share).sum();
    let is_same = destinations.iter().all(|to| to.status == first.status && to.served == first.served);
    let result = match (refused.is_empty(), destinations.len()) {
        (_, 1) => first.result.clone(),
        (true, number) => format!("one of {number} destinations receives it"),
        (false, _) => {
            let percent = 100.0 * share / all.max(f64::MIN_POSITIVE);
            format!("refused for {} % of the requests: {}", round(percent), first.result)
        }
    };
    JourneyEnd { served: refused.is_empty(), status: first.status.filter(|_| is_same), result }
}

/// Rounds to one decimal.
fn round(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

/// Returns `part` as a share of `all`.
pub(super) fn ratio(part: usize, all: usize) -> f64 {
    let number = |value: usize| f64::from(u32::try_from(value).unwrap_or(u32::MAX));
    number(part) / number(all.max(1))
}

/// Adds the response of an HTTP proxy whose connection to a place is closed.
pub(super) fn answered(to: Destination) -> Destination {
    if to.served || to.status.is_some() {
        return to;
    }
    let result = format!("{}; the proxy before it responds with {UNAVAILABLE}", to.result);
    Destination { status: Some(UNAVAILABLE), result, ..to }
}
