//! Load that runs while a test changes the mesh, and its counts.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
};

use serde::Deserialize;

use crate::wait::eventually;

/// Load that runs until it is finished or dropped.
#[derive(Debug)]
pub struct Load {
    child: Child,
    /// Standard input of the child. The child sends requests until this is closed.
    open: Option<ChildStdin>,
    latest: Arc<Mutex<Report>>,
    reader: Option<JoinHandle<()>>,
}

/// Counts so far.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Report {
    /// Requests with a complete response of any status.
    pub answered: u64,
    /// Requests without a complete response.
    pub failed: u64,
    /// Longest time to a response in milliseconds.
    pub slowest_ms: f64,
    /// Number of failed requests by reason.
    pub errors: BTreeMap<String, u64>,
    /// Number of responses by status.
    pub status: BTreeMap<u16, u64>,
    /// Responses by value of the counted header.
    pub values: BTreeMap<String, Seen>,
}

/// Responses with one value of the header.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Seen {
    /// Number of responses.
    pub count: u64,
    /// Time at which the first of these requests was sent, in µs since 1970.
    pub first: u128,
    /// Time at which the last of these requests was sent, in µs since 1970.
    pub last: u128,
}

impl Load {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let latest = Arc::new(Mutex::new(Report::default()));
        let output = BufReader::new(child.stdout.take().unwrap());
        let shared = Arc::clone(&latest);
        let reader = thread::spawn(move || {
            for line in output.lines() {
                *shared.lock().unwrap() = serde_json::from_str(&line.unwrap()).unwrap();
            }
        });
        Self { open: child.stdin.take(), child, latest, reader: Some(reader) }
    }

    /// Returns the counts so far.
    pub fn report(&self) -> Report {
        self.latest.lock().unwrap().clone()
    }

    /// Waits until the counts satisfy `condition`.
    pub fn wait(&self, what: &str, condition: impl Fn(&Report) -> bool) -> Report {
        eventually(what, || {
            let report = self.report();
            if condition(&report) { Ok(report) } else { Err(format!("{report:?}")) }
        })
    }

    /// Waits for this many further responses.
    pub fn wait_more(&self, answers: u64) -> Report {
        let now = self.report().answered;
        self.wait("the load makes progress", |report| report.answered >= now + answers)
    }

    /// Stops the load, or waits for its end if it has a set number of requests. Returns the final counts.
    pub fn finish(mut self) -> Report {
        self.open = None;
        self.reader.take().unwrap().join().unwrap();
        self.child.wait().unwrap();
        self.report()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.open = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Report {
    /// Fails unless every request got a response with status 200.
    pub fn assert_all_good(&self) {
        let good = self.status.get(&200).copied().unwrap_or_default();
        assert!(self.failed == 0 && good == self.answered && good > 0, "requests were lost: {self:?}");
    }

    /// Fails unless every request got 200, or 504 from a route whose timeout is `limit_ms`. A busy machine may stall
    /// for longer than that. Returns the number of responses with 200.
    pub fn assert_all_good_or_late(&self, limit_ms: f64) -> u64 {
        let count = |status| self.status.get(&status).copied().unwrap_or_default();
        let (good, late) = (count(200), count(504));
        let explained = late == 0 || (self.slowest_ms >= limit_ms && late < good / 10);
        let all = self.failed == 0 && good + late == self.answered && good > 0;
        assert!(all && explained, "requests were lost: {self:?}");
        good
    }

    /// Returns the number of responses with this value.
    pub fn count(&self, value: &str) -> u64 {
        self.values.get(value).map_or(0, |seen| seen.count)
    }
}
