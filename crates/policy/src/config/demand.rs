//! Virtual hosts that are asked for when a request needs them.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot};

use skysail_http::map::Map;

/// The longest authority that is asked for: that of the longest domain name, with a port.
const LONGEST: usize = 253 + 6;

/// How the requests of one route table ask for virtual hosts. It outlives the table, which is made anew with each host.
#[derive(Debug)]
pub struct Demand {
    /// The table's name.
    pub table: Arc<str>,
    /// Authorities that were asked for and that no virtual host in force has by its full name.
    pub known: ArcSwap<Map<Box<str>, RequestedAuthority>>,
    /// Where questions go.
    pub questions: mpsc::UnboundedSender<Question>,
}

/// An authority that was asked for.
#[derive(Clone, Debug, Default)]
pub struct RequestedAuthority {
    /// Set by requests that use it.
    pub used: Arc<AtomicBool>,
    /// The control plane has answered that no virtual host has this full name. False if it did not answer in time.
    pub answered: bool,
}

/// What is known of an authority that no virtual host in force has by its full name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The control plane has answered, or could have no answer: the table's wildcards and catch-all apply.
    Settled,
    /// The control plane was asked and did not answer in time. Its answer is still awaited.
    Unanswered,
    /// The control plane has not been asked.
    Unknown,
}

/// A request waits for the virtual host of its authority.
#[derive(Debug)]
pub struct Question {
    /// The table's name.
    pub table: Arc<str>,
    /// In lower case, as it is looked up.
    pub authority: Box<str>,
    /// Completed when the newest table and [`Demand::known`] have the result.
    pub answered: oneshot::Sender<()>,
}

impl Demand {
    /// Returns what is known of an authority, and marks it as used.
    pub fn standing(&self, authority: &str) -> Standing {
        if let Some(known) = self.known.load().get(authority) {
            mark(&known.used);
            return if known.answered { Standing::Settled } else { Standing::Unanswered };
        }
        let sound = !authority.is_empty() && authority.len() <= LONGEST;
        if !sound || authority.bytes().any(|byte| byte <= b' ' || matches!(byte, b'/' | b'*' | 0x7f..)) {
            return Standing::Settled;
        }
        Standing::Unknown
    }

    /// Asks for the virtual host of an authority. The receiver completes when there is a result, or none can be had.
    pub fn ask(&self, authority: &str) -> oneshot::Receiver<()> {
        let (answered, answer) = oneshot::channel();
        let question = Question { table: Arc::clone(&self.table), authority: authority.into(), answered };
        // If nobody takes questions any more, dropping it completes the receiver.
        let _ = self.questions.send(question);
        answer
    }
}

/// Notes that something is in use. Others look at it far more often than it changes.
pub fn mark(used: &AtomicBool) {
    if !used.load(Ordering::Relaxed) {
        used.store(true, Ordering::Relaxed);
    }
}
