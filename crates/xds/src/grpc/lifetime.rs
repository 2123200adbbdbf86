//! Limits of a connection before a call is admitted, and of its idle time.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

/// Timeout for the first admitted call.
const FIRST_CALL: Duration = Duration::from_secs(15);
/// Idle timeout of a connection after that.
const IDLE: Duration = Duration::from_secs(300);
/// Time between GOAWAY and the close of the connection.
const GOAWAY_GRACE: Duration = Duration::from_secs(1);
/// Number of refused calls in a row after which the connection is closed. Each may cost a signature check.
const MAX_REFUSED: u32 = 8;

/// History of a connection.
#[derive(Debug, Default)]
pub(super) struct Lifetime {
    admitted: bool,
    /// Number of calls refused since the last admitted one.
    refused: u32,
    /// GOAWAY has been sent.
    closing: bool,
    /// Runs while there is no call.
    timer: Option<Pin<Box<Sleep>>>,
}

/// Action for a connection without calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleAction {
    /// Send GOAWAY.
    GoAway,
    /// Close the connection.
    Close,
}

impl Lifetime {
    /// Records whether a call was admitted.
    pub(super) fn called(&mut self, admitted: bool) {
        if admitted {
            self.admitted = true;
            self.refused = 0;
        } else {
            self.refused += 1;
        }
    }

    /// Returns true if calls are accepted. A call may still arrive after GOAWAY.
    pub(super) fn takes_calls(&self) -> bool {
        self.refused < MAX_REFUSED
    }

    /// Becomes ready when an action is due; `idle` is true if there is no call. Must be polled again after `GoAway`.
    pub(super) fn poll(&mut self, idle: bool, cx: &mut Context<'_>) -> Poll<IdleAction> {
        if !self.closing && !self.takes_calls() {
            self.close();
            return Poll::Ready(IdleAction::GoAway);
        }
        if !idle && self.takes_calls() {
            self.timer = None;
            return Poll::Pending;
        }
        let time = match () {
            () if self.closing => GOAWAY_GRACE,
            () if self.admitted => IDLE,
            () => FIRST_CALL,
        };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(time)));
        if timer.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        if self.closing {
            return Poll::Ready(IdleAction::Close);
        }
        self.close();
        Poll::Ready(IdleAction::GoAway)
    }

    fn close(&mut self) {
        self.closing = true;
        self.timer = None;
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::{Instant, advance};

    use super::*;

    async fn due(lifetime: &mut Lifetime) -> IdleAction {
        poll_fn(|cx| lifetime.poll(true, cx)).await
    }

    /// Returns the action that is due now.
    async fn now(lifetime: &mut Lifetime, idle: bool) -> Option<IdleAction> {
        poll_fn(|cx| match lifetime.poll(idle, cx) {
            Poll::Ready(due) => Poll::Ready(Some(due)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connections_are_closed() {
        let mut lifetime = Lifetime::default();
        let start = Instant::now();
        assert_eq!(
            [due(&mut lifetime).await, due(&mut lifetime).await],
            [IdleAction::GoAway, IdleAction::Close]
        );
        assert_eq!(start.elapsed().as_secs(), (FIRST_CALL + GOAWAY_GRACE).as_secs());

        let mut lifetime = Lifetime::default();
        assert_eq!(now(&mut lifetime, true).await, None);
        advance(FIRST_CALL / 2).await;
        lifetime.called(true);
        assert_eq!(now(&mut lifetime, false).await, None);
        advance(2 * IDLE).await;
        assert_eq!(now(&mut lifetime, false).await, None, "a call has no idle timeout");
        let start = Instant::now();
        assert_eq!(due(&mut lifetime).await, IdleAction::GoAway);
        assert_eq!(start.elapsed().as_secs(), IDLE.as_secs());
        lifetime.called(true);
        assert_eq!(now(&mut lifetime, false).await, None, "the call was sent before GOAWAY arrived");
        assert_eq!(due(&mut lifetime).await, IdleAction::Close);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_is_disconnected_after_repeated_refusals() {
        let mut lifetime = Lifetime::default();
        for _ in 1..MAX_REFUSED {
            lifetime.called(false);
        }
        lifetime.called(true);
        for _ in 0..MAX_REFUSED {
            assert!(lifetime.takes_calls());
            assert_eq!(now(&mut lifetime, true).await, None);
            lifetime.called(false);
        }
        assert!(!lifetime.takes_calls());
        assert_eq!(
            now(&mut lifetime, false).await,
            Some(IdleAction::GoAway),
            "also while a call is in progress"
        );
        assert_eq!(due(&mut lifetime).await, IdleAction::Close);
    }
}
