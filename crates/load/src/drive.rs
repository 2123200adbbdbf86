//! A load with a measured window, for benchmarks in other programs.

use std::time::Duration;

use anyhow::Context as _;
use clap::{Args as _, FromArgMatches as _};
use hdrhistogram::Histogram;

use crate::{
    args::LoadArgs,
    engine::{self, Requests},
    streams,
    tally::{Outcome, Tally},
    target::{Protocol, Target},
    window::{Window, WindowBoundary},
    worker::{FOR_PERCENTILES, Shared, nanoseconds},
};

/// Results of a load with a window. Histograms are in nanoseconds.
#[derive(Clone, Debug)]
pub struct WindowOutcome {
    /// Time from when a request was due to its complete response.
    pub due: Histogram<u64>,
    /// Time from when a request was sent to its complete response, or to its failure.
    pub sent: Histogram<u64>,
    /// Delay of the generator: time from when a request was due until it was sent, if its connection was free.
    pub late: Histogram<u64>,
    /// Requests due in the window.
    pub requests: u64,
    /// Of these, requests without a response.
    pub unanswered: u64,
    /// Of these, requests with a response of another status than success.
    pub refused: u64,
    /// Successful responses within the window, whenever their requests were due.
    pub answered_in_window: u64,
    /// Successful responses from the start of the warm-up on.
    pub answered: u64,
}

/// Sends the load of these arguments of `skysail load`, on this thread. `-t` is the duration of warm-up and window
/// together. Calls `on_boundary` on this thread when the window begins and ends.
///
/// # Errors
/// An argument is invalid, the target cannot be reached, or the first request of a connection fails.
pub fn drive(
    arguments: &[String],
    warmup: Duration,
    on_boundary: &mut dyn FnMut(WindowBoundary),
) -> anyhow::Result<WindowOutcome> {
    let command = LoadArgs::augment_args(clap::Command::new("load").no_binary_name(true));
    let args = LoadArgs::from_arg_matches(&command.try_get_matches_from(arguments)?)?;
    args.check()?;
    let target = Target::of(&args, args.url.as_deref().context("no URL is given")?)?;
    let duration = args.duration().context("a load with a window needs a duration")?;
    let mut window = Window::new(nanoseconds(warmup), nanoseconds(duration), on_boundary);
    // No other thread takes part.
    let shared = Shared::new(0, None, FOR_PERCENTILES)?;
    let indices = 0..u64::from(args.connections);
    let tally = match target.protocol {
        Protocol::Http1 | Protocol::Tcp => {
            let requests = Requests::to(&target, &args)?;
            engine::run(&args, &target, &requests, &shared, indices, Some(&mut window))?
        }
        Protocol::Http2 | Protocol::Grpc => {
            streams::run(&args, &target, &shared, indices, Some(&mut window))?
        }
    };
    outcome(tally)
}

fn outcome(tally: Tally) -> anyhow::Result<WindowOutcome> {
    let mut all = Tally::new()?;
    all.add(tally)?;
    let (requests, failed) = all.counts();
    let lost = all.outcomes.iter().filter(|(outcome, _)| matches!(outcome, Outcome::Failed(_)));
    let lost: u64 = lost.map(|(_, count)| count).sum();
    let mut due = all.latency;
    due.subtract(&all.failed)?;
    Ok(WindowOutcome {
        due,
        sent: all.since_sent,
        late: all.lateness,
        requests: requests + all.unsent,
        unanswered: lost + all.unsent,
        refused: failed - lost,
        answered_in_window: all.answered_in_window,
        answered: all.answered,
    })
}
