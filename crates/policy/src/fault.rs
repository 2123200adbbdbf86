//! Faults on purpose: whether a request is delayed or refused. Envoy's fault filter, decided.

use std::time::Duration;

use crate::{
    config::route::{Abort, Fault},
    error::Kind,
    matching,
    route::roll,
};
use skysail_http::head::RequestHead;

/// What befalls a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultDecision {
    /// It waits so long first.
    pub delay: Option<Duration>,
    /// Then it is answered so.
    pub abort: Option<Abort>,
}

impl FaultDecision {
    /// The failure that an abort is.
    pub fn failure(&self) -> Option<Kind> {
        self.abort.map(|abort| match abort {
            Abort::Http(status) => Kind::FaultAbort(status),
            Abort::Grpc(status) => Kind::FaultAbortGrpc(status),
        })
    }
}

/// Throws the dice for a request; delay and abort each have their own.
pub fn decide(fault: &Fault, head: &RequestHead, dice: &mut fastrand::Rng) -> FaultDecision {
    if !matching::headers(&fault.headers, head) {
        return FaultDecision::default();
    }
    let delay = fault.delay.filter(|(share, _)| roll(dice, *share)).map(|(_, delay)| delay);
    let abort = fault.abort.filter(|(share, _)| roll(dice, *share)).map(|(_, abort)| abort);
    FaultDecision { delay, abort }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::text::{HeaderMatch, HeaderTest};

    #[test]
    fn shares_and_headers_decide() {
        let head = RequestHead::build("GET", "/", "h", &[("end-user", "jason")]);
        let other = RequestHead::build("GET", "/", "h", &[]);
        let header = HeaderMatch {
            name: "end-user".into(),
            test: HeaderTest::Present(true),
            invert: false,
            missing_as_empty: false,
        };
        let second = Duration::from_secs(1);
        let fault = Fault {
            delay: Some((1_000_000, second)),
            abort: Some((0, Abort::Http(500))),
            headers: vec![header],
        };
        let mut dice = fastrand::Rng::with_seed(7);
        assert_eq!(decide(&fault, &head, &mut dice), FaultDecision { delay: Some(second), abort: None });
        assert_eq!(decide(&fault, &other, &mut dice), FaultDecision::default());

        let fault = Fault { delay: None, abort: Some((250_000, Abort::Http(500))), headers: Vec::new() };
        let aborted = (0..10_000).filter(|_| decide(&fault, &head, &mut dice).abort.is_some()).count();
        assert!((2_200..2_800).contains(&aborted), "{aborted}");
    }
}
