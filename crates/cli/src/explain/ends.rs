//! Ends of requests, and their summary.

use serde::Serialize;

use super::report::Destination;

/// Status of the response of a proxy whose connection to an endpoint is closed.
const UNAVAILABLE: u16 = 503;
/// Smallest share that is printed as a number.
const SMALLEST: f64 = 0.001;

/// State of a request at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// A program or a proxy serves it.
    Served,
    /// A proxy refuses it, or no place receives it.
    Refused,
    /// The connection is closed before a response.
    Closed,
    /// The limits of the explanation leave it out.
    Unknown,
}

/// Result of a request that is not forwarded further.
pub(super) struct JourneyEnd {
    pub(super) state: State,
    pub(super) status: Option<u16>,
    pub(super) result: String,
}

impl JourneyEnd {
    pub(super) fn served(result: String) -> Self {
        Self { state: State::Served, status: None, result }
    }

    pub(super) fn refused(result: String) -> Self {
        Self { state: State::Refused, status: None, result }
    }

    pub(super) fn closed(result: String) -> Self {
        Self { state: State::Closed, status: None, result }
    }

    pub(super) fn unknown(result: String) -> Self {
        Self { state: State::Unknown, status: None, result }
    }

    /// Returns the end of a request to which a proxy responds itself.
    pub(super) fn responded(status: u16, result: String) -> Self {
        let state = if status < 400 { State::Served } else { State::Refused };
        Self { state, status: Some(status), result }
    }

    /// Returns the end of all requests, if this is the end of a fraction of them and the others are not
    /// explained.
    pub(super) fn of_fraction(self, share: f64) -> Self {
        if share >= 1.0 {
            return self;
        }
        let state = if self.state == State::Served { State::Unknown } else { self.state };
        let result = format!("{}; {} of the requests are not explained", self.result, percent(1.0 - share));
        Self { state, status: None, result }
    }
}

/// Returns the end of a request that leaves the mesh.
pub(super) fn outside(address: &str) -> JourneyEnd {
    JourneyEnd::served(format!("the request leaves the mesh: {address} is outside"))
}

/// Returns the result for all places that have no places behind them.
pub(super) fn summary(destinations: &[Destination]) -> JourneyEnd {
    let mut leaves = Vec::new();
    add_leaves(destinations, &mut leaves);
    let of = |states: &[State]| -> Vec<&Destination> {
        leaves.iter().copied().filter(|to| states.contains(&to.state)).collect()
    };
    let (refused, unknown) = (of(&[State::Refused, State::Closed]), of(&[State::Unknown]));
    let Some(first) = refused.iter().chain(&unknown).chain(&leaves).next().copied() else {
        return JourneyEnd::refused("the request reaches no destination".to_owned());
    };
    let share = |places: &[&Destination]| percent(places.iter().map(|to| to.share).sum());
    let state = match (refused.is_empty(), unknown.is_empty()) {
        (true, true) => State::Served,
        (true, false) => State::Unknown,
        (false, _) if leaves.iter().all(|to| to.state == State::Closed) => State::Closed,
        (false, _) => State::Refused,
    };
    let result = match (state, leaves.len()) {
        (_, 1) => first.result.clone(),
        (State::Served, number) => format!("one of {number} destinations receives it"),
        (State::Unknown, _) => format!("{} of the requests are not explained", share(&unknown)),
        _ if unknown.is_empty() => {
            format!("refused for {} of the requests: {}", share(&refused), first.result)
        }
        _ => {
            let (part, left) = (share(&refused), share(&unknown));
            format!("refused for {part} of the requests, {left} are not explained: {}", first.result)
        }
    };
    let is_same = leaves.iter().all(|to| (to.status, to.served) == (first.status, first.served));
    JourneyEnd { state, status: first.status.filter(|_| is_same), result }
}

fn add_leaves<'d>(destinations: &'d [Destination], leaves: &mut Vec<&'d Destination>) {
    for to in destinations {
        match to.next.is_empty() {
            true => leaves.push(to),
            false => add_leaves(&to.next, leaves),
        }
    }
}

/// Returns a share, from 0 to 1, in percent.
pub(super) fn percent(share: f64) -> String {
    if share > 0.0 && share < SMALLEST {
        return "less than 0.1 %".to_owned();
    }
    format!("{} %", (share * 1000.0).round() / 10.0)
}

/// Returns `part` as a share of `all`.
pub(super) fn ratio(part: usize, all: usize) -> f64 {
    let number = |value: usize| f64::from(u32::try_from(value).unwrap_or(u32::MAX));
    number(part) / number(all.max(1))
}

/// Adds the response of an HTTP proxy whose connection to a place is closed, also by a place behind gateways
/// that forward connections.
pub(super) fn answered(mut to: Destination) -> Destination {
    if !to.next.is_empty() {
        to.next = to.next.into_iter().map(answered).collect();
        let end = summary(&to.next);
        to.end(end);
    } else if to.state == State::Closed {
        let result = format!("{}; the proxy before it responds with {UNAVAILABLE}", to.result);
        to.end(JourneyEnd::responded(UNAVAILABLE, result));
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_shares_are_not_zero() {
        assert_eq!(
            [0.0, 0.0009, 0.001, 0.125, 1.0].map(percent),
            ["0 %", "less than 0.1 %", "0.1 %", "12.5 %", "100 %"]
        );
    }

    #[test]
    fn a_proxy_responds_for_the_closed_connections_behind_another_proxy() {
        let place = |share, end| Destination::new("", share, (String::new(), 1), None, end);
        let mut gateway = place(0.5, JourneyEnd::served(String::new()));
        gateway.next = vec![
            place(0.125, JourneyEnd::closed("closed".to_owned())),
            place(0.375, JourneyEnd::responded(403, "denied".to_owned())),
        ];
        let end = summary(&gateway.next);
        assert_eq!((end.state, end.status), (State::Refused, None));
        assert_eq!(end.result, "refused for 50 % of the requests: closed");
        gateway.end(end);
        let gateway = answered(gateway);
        assert_eq!(
            [gateway.next[0].status, gateway.next[1].status, gateway.status],
            [Some(503), Some(403), None]
        );
        assert!(!gateway.result.ends_with("closed"), "{}", gateway.result);
    }

    #[test]
    fn results_name_the_part_that_is_not_explained() {
        let place = |share, end| Destination::new("", share, (String::new(), 1), None, end);
        let served = || place(0.5, JourneyEnd::served(String::new()));
        let unknown = || place(0.25, JourneyEnd::unknown(String::new()));
        let of = |places: &[Destination]| {
            let JourneyEnd { state, result, .. } = summary(places);
            (state, result)
        };
        assert_eq!(
            of(&[served(), served()]),
            (State::Served, "one of 2 destinations receives it".to_owned())
        );
        let left = "25 % of the requests are not explained".to_owned();
        assert_eq!(of(&[served(), unknown()]), (State::Unknown, left));
        let refused = place(0.25, JourneyEnd::refused("no".to_owned()));
        let both = "refused for 25 % of the requests, 25 % are not explained: no".to_owned();
        assert_eq!(of(&[served(), unknown(), refused]), (State::Refused, both));
    }
}
