//! Requests that go on while something is changed, and their count.

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
    /// It sends until this closes.
    open: Option<ChildStdin>,
    latest: Arc<Mutex<Report>>,
    reader: Option<JoinHandle<()>>,
}

/// What came of it so far.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Report {
    /// Requests with a whole answer, whatever its status.
    pub answered: u64,
    /// Requests without.
    pub failed: u64,
    /// The longest time to an answer.
    pub slowest_ms: f64,
    /// Why requests failed.
    pub errors: BTreeMap<String, u64>,
    /// Answers by status.
    pub status: BTreeMap<u16, u64>,
    /// Answers by value of the counted header.
    pub values: BTreeMap<String, Seen>,
}

/// The answers with one value.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Seen {
    /// How many.
    pub count: u64,
    /// When the first was asked for, in µs since 1970.
    pub first: u128,
    /// When the last was.
    pub last: u128,
}

impl Load {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let latest = Arc::new(Mutex::new(Report::default()));
        let output = BufReader::new(child.stdout.take().unwrap());
        let told = Arc::clone(&latest);
        let reader = thread::spawn(move || {
            for line in output.lines() {
                *told.lock().unwrap() = serde_json::from_str(&line.unwrap()).unwrap();
            }
        });
        Self { open: child.stdin.take(), child, latest, reader: Some(reader) }
    }

    /// What came of it so far.
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

    /// Waits for this many answers from now on.
    pub fn wait_more(&self, answers: u64) -> Report {
        let now = self.report().answered;
        self.wait("load goes on", |report| report.answered >= now + answers)
    }

    /// Ends it, or waits for its end if it has a set number of requests.
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
    /// Fails unless every request was answered with 200.
    pub fn assert_all_good(&self) {
        let good = self.status.get(&200).copied().unwrap_or_default();
        assert!(self.failed == 0 && good == self.answered && good > 0, "requests were lost: {self:?}");
    }

    /// Fails unless every request was answered with 200, or with 504 by a route that gives so many milliseconds: a machine
    /// with other things to do may stand still for longer. Says how many were good.
    pub fn assert_all_good_or_late(&self, limit_ms: f64) -> u64 {
        let count = |status| self.status.get(&status).copied().unwrap_or_default();
        let (good, late) = (count(200), count(504));
        let explained = late == 0 || (self.slowest_ms >= limit_ms && late < good / 10);
        let all = self.failed == 0 && good + late == self.answered && good > 0;
        assert!(all && explained, "requests were lost: {self:?}");
        good
    }

    /// How many answers had this value.
    pub fn count(&self, value: &str) -> u64 {
        self.values.get(value).map_or(0, |seen| seen.count)
    }
}
