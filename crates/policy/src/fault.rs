//! Fault injection: the decision of Envoy's fault filter.

use std::time::Duration;

use crate::{
    config::route::{Abort, Fault},
    error::Kind,
    matching,
    route::sample,
};
use skysail_http::head::RequestHead;

/// Decision on a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultDecision {
    /// Delay before the request continues.
    pub delay: Option<Duration>,
    /// Response after the delay.
    pub abort: Option<Abort>,
}

impl FaultDecision {
    /// Returns the error of an abort.
    pub fn failure(&self) -> Option<Kind> {
        self.abort.map(|abort| match abort {
            Abort::Http(status) => Kind::FaultAbort(status),
            Abort::Grpc(status) => Kind::FaultAbortGrpc(status),
        })
    }
}

/// Decides on a request. Delay and abort have independent random numbers.
pub fn decide(fault: &Fault, head: &RequestHead, rng: &mut fastrand::Rng) -> FaultDecision {
    if !matching::headers(&fault.headers, head) {
        return FaultDecision::default();
    }
    let delay = fault.delay.filter(|(share, _)| sample(rng, *share)).map(|(_, delay)| delay);
    let abort = fault.abort.filter(|(share, _)| sample(rng, *share)).map(|(_, abort)| abort);
    FaultDecision { delay, abort }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::text::{HeaderMatch, HeaderTest};

    #[test]
    fn faults_depend_on_share_and_headers() {
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
        let mut rng = fastrand::Rng::with_seed(7);
        assert_eq!(decide(&fault, &head, &mut rng), FaultDecision { delay: Some(second), abort: None });
        assert_eq!(decide(&fault, &other, &mut rng), FaultDecision::default());

        let fault = Fault { delay: None, abort: Some((250_000, Abort::Http(500))), headers: Vec::new() };
        let aborted = (0..10_000).filter(|_| decide(&fault, &head, &mut rng).abort.is_some()).count();
        assert!((2_200..2_800).contains(&aborted), "{aborted}");
    }
}
