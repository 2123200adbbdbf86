//! Results of the requests: histograms and counts, kept by each thread and merged at the end.

use std::{collections::BTreeMap, fmt::Display};

use hdrhistogram::Histogram;

/// Maximum of the histograms of time, in nanoseconds: one hour.
const MAX_TIME: u64 = 3_600_000_000_000;
/// Maximum of the histograms of sizes, in bytes.
const MAX_SIZE: u64 = 1 << 40;
/// Maximum length of the text of an error, in characters. Errors may quote names that the peer has sent.
const MAX_ERROR: usize = 300;

/// Reason why a request has no complete response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Failure {
    /// The connection could not be opened.
    Connect,
    /// The TLS handshake failed.
    Tls,
    /// The peer closed the connection before the response was complete.
    Closed,
    /// The peer reset the connection or the stream.
    Reset,
    /// No complete response within the timeout.
    Timeout,
    /// The response does not follow the protocol.
    Protocol,
}

impl Failure {
    /// Returns the name in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Tls => "TLS handshake",
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Timeout => "timeout",
            Self::Protocol => "protocol",
        }
    }
}

/// Result of a request: a status of its protocol, or a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// HTTP status.
    Status(u16),
    /// A named result: `SERVING` of a gRPC health check, `OK` of a TCP echo.
    Named(&'static str),
    Failed(Failure),
}

impl Outcome {
    /// Returns whether the request succeeded: status 2xx, or 418 as in Fortio.
    pub(crate) fn is_success(self) -> bool {
        match self {
            Self::Status(status) => (200..300).contains(&status) || status == 418,
            Self::Named(name) => name == OK || name == SERVING,
            Self::Failed(_) => false,
        }
    }
}

/// Outcome of a TCP echo that succeeded.
pub(crate) const OK: &str = "OK";
/// Outcome of a gRPC call that succeeded.
pub(crate) const SERVING: &str = "SERVING";

/// Times of a request, in nanoseconds of the monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Open loop: when it was due. Closed loop, or if latency counts from the sending: when it was sent.
    pub(crate) due: u64,
    pub(crate) sent: u64,
    pub(crate) ended: u64,
}

/// Results so far.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    /// Nanoseconds from the due time to the end of the response, of all requests.
    pub(crate) latency: Histogram<u64>,
    /// Nanoseconds from the sending to the end of the response, of all requests.
    pub(crate) since_sent: Histogram<u64>,
    /// The same as `latency`, of the requests that failed.
    pub(crate) failed: Histogram<u64>,
    /// Delay of the generator itself: nanoseconds from the due time to the sending, if the connection was free.
    pub(crate) lateness: Histogram<u64>,
    /// Nanoseconds to open a connection.
    pub(crate) connects: Histogram<u64>,
    /// Bytes of responses; for HTTP/1 with their heads.
    pub(crate) sizes: Histogram<u64>,
    /// Bytes of the heads of responses; 0 for other protocols than HTTP/1.
    pub(crate) heads: Histogram<u64>,
    pub(crate) outcomes: BTreeMap<Outcome, u64>,
    /// Text of the first error of each failure.
    pub(crate) errors: BTreeMap<Failure, String>,
    /// Last outcome, and the number of consecutive requests with it that `outcomes` does not contain yet. Most requests
    /// have the same outcome, so this saves look-ups.
    last: (Outcome, u64),
    /// Overdue requests that were skipped.
    pub(crate) skipped: u64,
    /// Requests that were due and had not been sent at the end, or had no response.
    pub(crate) unsent: u64,
    /// Number of sockets that each connection used.
    pub(crate) sockets: Vec<u64>,
    /// CPU time of the thread in nanoseconds.
    pub(crate) cpu: u64,
    /// End of the last request, in nanoseconds of the monotonic clock.
    pub(crate) ended: u64,
    /// Due time of the first request to record, in nanoseconds of the monotonic clock.
    pub(crate) first: u64,
    /// The window of measurement is open.
    pub(crate) in_window: bool,
    /// Successful responses in the window, and all of them.
    pub(crate) answered_in_window: u64,
    pub(crate) answered: u64,
}

impl Tally {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let time = Histogram::new_with_bounds(1, MAX_TIME, 3)?;
        let size = Histogram::new_with_bounds(1, MAX_SIZE, 3)?;
        Ok(Self {
            latency: time.clone(),
            since_sent: time.clone(),
            failed: time.clone(),
            lateness: time.clone(),
            connects: time,
            sizes: size.clone(),
            heads: size,
            outcomes: BTreeMap::new(),
            errors: BTreeMap::new(),
            last: (Outcome::Status(200), 0),
            skipped: 0,
            unsent: 0,
            sockets: Vec::new(),
            cpu: 0,
            ended: 0,
            first: 0,
            in_window: false,
            answered_in_window: 0,
            answered: 0,
        })
    }

    /// Records a request.
    pub(crate) fn record(&mut self, outcome: Outcome, times: Times) {
        if outcome.is_success() {
            self.answered += 1;
            self.answered_in_window += u64::from(self.in_window);
        }
        if times.due < self.first {
            return;
        }
        let latency = times.ended.saturating_sub(times.due);
        self.latency.saturating_record(latency);
        self.since_sent.saturating_record(times.ended.saturating_sub(times.sent));
        if !outcome.is_success() {
            self.failed.saturating_record(latency);
        }
        if self.last.0 != outcome {
            self.settle();
            self.last.0 = outcome;
        }
        self.last.1 += 1;
        self.ended = self.ended.max(times.ended);
    }

    /// Records when a request was sent that was due at this time.
    pub(crate) fn record_lateness(&mut self, due: u64, sent: u64) {
        if due >= self.first {
            self.lateness.saturating_record(sent.saturating_sub(due));
        }
    }

    /// Records the size of a response in bytes.
    pub(crate) fn record_size(&mut self, head: u64, body: u64) {
        self.sizes.saturating_record(head + body);
        self.heads.saturating_record(head);
    }

    /// Keeps the text of an error if it is the first one of this failure.
    pub(crate) fn note(&mut self, failure: Failure, error: &dyn Display) {
        let printable = |character: char| if character.is_control() { ' ' } else { character };
        let text = || error.to_string().chars().take(MAX_ERROR).map(printable).collect();
        self.errors.entry(failure).or_insert_with(text);
    }

    /// Returns why a request with this outcome did not succeed, as the end of a sentence about it.
    pub(crate) fn reason(&self, outcome: Outcome) -> String {
        match outcome {
            Outcome::Status(status) => format!("has status {status}"),
            Outcome::Named(name) => format!("is {name}"),
            Outcome::Failed(failure) => match self.errors.get(&failure) {
                Some(error) => format!("failed: {}: {error}", failure.name()),
                None => format!("failed: {}", failure.name()),
            },
        }
    }

    /// Returns the number of requests, and how many of them failed.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.latency.len(), self.failed.len())
    }

    /// Adds the results of another thread.
    pub(crate) fn add(&mut self, mut other: Self) -> anyhow::Result<()> {
        other.settle();
        self.settle();
        self.latency.add(other.latency)?;
        self.since_sent.add(other.since_sent)?;
        self.failed.add(other.failed)?;
        self.lateness.add(other.lateness)?;
        self.connects.add(other.connects)?;
        self.sizes.add(other.sizes)?;
        self.heads.add(other.heads)?;
        for (outcome, count) in other.outcomes {
            *self.outcomes.entry(outcome).or_default() += count;
        }
        for (failure, error) in other.errors {
            self.errors.entry(failure).or_insert(error);
        }
        self.skipped += other.skipped;
        self.unsent += other.unsent;
        self.sockets.extend(other.sockets);
        self.cpu += other.cpu;
        self.answered_in_window += other.answered_in_window;
        self.answered += other.answered;
        self.ended = self.ended.max(other.ended);
        Ok(())
    }

    fn settle(&mut self) {
        let (outcome, count) = self.last;
        if count > 0 {
            *self.outcomes.entry(outcome).or_default() += count;
            self.last.1 = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_results_count_every_request() {
        let times = |latency: u64| Times { due: 100, sent: 200, ended: 100 + latency };
        let (mut all, mut other) = (Tally::new().unwrap(), Tally::new().unwrap());
        all.record(Outcome::Status(200), times(1_000));
        other.record(Outcome::Status(200), times(2_000));
        other.record(Outcome::Status(503), times(3_000));
        other.record(Outcome::Failed(Failure::Reset), times(4_000));
        other.record(Outcome::Status(200), times(2_000));
        other.skipped = 3;
        other.note(Failure::Reset, &"first\nline");
        other.note(Failure::Reset, &"second");
        all.add(other).unwrap();
        assert_eq!(all.counts(), (5, 2));
        let expected =
            [(Outcome::Status(200), 3), (Outcome::Status(503), 1), (Outcome::Failed(Failure::Reset), 1)];
        assert_eq!(all.outcomes, BTreeMap::from(expected));
        assert_eq!(all.reason(Outcome::Failed(Failure::Reset)), "failed: reset: first line");
        assert_eq!(all.reason(Outcome::Failed(Failure::Closed)), "failed: closed");
        assert_eq!((all.skipped, all.latency.max() / 100, all.since_sent.max() / 100), (3, 40, 39));
    }
}
