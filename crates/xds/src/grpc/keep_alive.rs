//! Detects by PING whether a client that sends nothing is still connected.

use std::{
    pin::Pin,
    sync::atomic::Ordering::Relaxed,
    task::{Context, Poll},
    time::Duration,
};

use skysail_http::http2::Session;
use tokio::time::{Instant, Sleep, sleep};

use crate::limits::{self, Account};

/// Time without data after which a client is sent a PING.
pub(super) const BETWEEN_PINGS: Duration = Duration::from_secs(30);
/// Timeout of a PING, unless data is read from the client or [`PROGRESS`](limits::MIN_PROGRESS) written to it. The PING
/// is queued behind earlier data, so a slow client needs time to reach it.
pub(super) const PING_TIMEOUT: Duration = Duration::from_secs(30);

/// State of the PINGs of a connection.
pub(super) struct KeepAlive {
    ping_sent: bool,
    /// Bytes that were read and written before the timer was set.
    before: (u64, u64),
    /// The timer has been polled, so it wakes the task when it expires.
    awaited: bool,
    timer: Pin<Box<Sleep>>,
}

/// Error: the client has not answered a PING.
#[derive(Debug)]
pub(super) struct Silent;

impl KeepAlive {
    pub(super) fn new() -> Self {
        Self { ping_sent: false, before: (0, 0), awaited: false, timer: Box::pin(sleep(BETWEEN_PINGS)) }
    }

    /// Becomes ready when a PING was added to the output. Fails if the client does not answer. Must always be polled by
    /// the same task.
    pub(super) fn poll(
        &mut self,
        session: &mut Session,
        account: &Account,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Silent>> {
        if self.ping_sent && session.is_answered() {
            self.wait(false, BETWEEN_PINGS);
        }
        if self.awaited && !self.ping_sent && Instant::now() < self.timer.deadline() {
            return Poll::Pending;
        }
        let mut queued = false;
        while self.timer.as_mut().poll(cx).is_ready() {
            let is_moving = self.is_moving(account);
            if !self.ping_sent {
                session.ask();
                queued = true;
            } else if !is_moving && account.pace.wait().is_none() {
                return Poll::Ready(Err(Silent));
            }
            // While the client has exceeded its pace, nothing is read from it, not even its answer to the PING.
            self.wait(true, PING_TIMEOUT);
        }
        self.awaited = true;
        if queued { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Returns true if the client has sent data, or has read enough, since the last call.
    fn is_moving(&mut self, account: &Account) -> bool {
        let now = (account.read.load(Relaxed), account.written.load(Relaxed));
        let before = std::mem::replace(&mut self.before, now);
        now.0 > before.0 || now.1 - before.1 >= limits::MIN_PROGRESS as u64
    }

    fn wait(&mut self, ping_sent: bool, time: Duration) {
        self.ping_sent = ping_sent;
        self.timer.as_mut().reset(Instant::now() + time);
    }
}
