//! Virtual hosts that are asked for when a request needs them.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot};

use super::Map;

/// The longest authority that is asked for: that of the longest domain name, with a port.
const LONGEST: usize = 253 + 6;

/// How the requests of one route table ask for virtual hosts. It outlives the table, which is made anew with each host.
#[derive(Debug)]
pub struct Demand {
    /// The table's name.
    pub table: Arc<str>,
    /// Authorities that no virtual host in hand has by its full name and that are not asked for again: the table's wildcards
    /// and its catch-all are for them. Each has a mark that says that it is in use.
    pub known: ArcSwap<Map<Box<str>, Arc<AtomicBool>>>,
    /// Where questions go.
    pub questions: mpsc::UnboundedSender<Question>,
}

/// A request waits for the virtual host of its authority.
#[derive(Debug)]
pub struct Question {
    /// The table's name.
    pub table: Arc<str>,
    /// In lower case, as it is looked up.
    pub authority: Box<str>,
    /// Told when the table is as it is to be.
    pub answered: oneshot::Sender<()>,
}

impl Demand {
    /// Asks for a virtual host, unless nothing can come of it; what this gives is told when the newest table has the answer.
    pub fn ask(&self, authority: &str) -> Option<oneshot::Receiver<()>> {
        if let Some(used) = self.known.load().get(authority) {
            mark(used);
            return None;
        }
        let sound = !authority.is_empty() && authority.len() <= LONGEST;
        if !sound || authority.bytes().any(|byte| byte <= b' ' || matches!(byte, b'/' | b'*' | 0x7f..)) {
            return None;
        }
        let (answered, answer) = oneshot::channel();
        let question = Question { table: Arc::clone(&self.table), authority: authority.into(), answered };
        self.questions.send(question).ok().map(|()| answer)
    }
}

/// Notes that something is in use. Others look at it far more often than it changes.
pub fn mark(used: &AtomicBool) {
    if !used.load(Ordering::Relaxed) {
        used.store(true, Ordering::Relaxed);
    }
}
