//! What a connection may cost before a call of it has been admitted, and how long it may carry no call at all.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep};

/// Time until the first call is admitted.
const FIRST_CALL: Duration = Duration::from_secs(15);
/// Time without a call after that.
const IDLE: Duration = Duration::from_secs(300);
/// Time for the client to leave after it was told to.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Calls refused one after another after which the connection is closed: each may cost the check of a signature.
const MOST_REFUSED: u32 = 8;

/// What a connection has done so far.
#[derive(Debug, Default)]
pub(super) struct Manners {
    admitted: bool,
    /// Calls refused since one was admitted.
    refused: u32,
    /// The client has been told to leave.
    closing: bool,
    /// Runs while there is no call.
    timer: Option<Pin<Box<Sleep>>>,
}

/// What is to be done with a connection that carries no call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleAction {
    /// The client is to be told to leave.
    GoAway,
    /// The connection is to be closed.
    Close,
}

impl Manners {
    /// Records whether a call was admitted.
    pub(super) fn called(&mut self, admitted: bool) {
        if admitted {
            self.admitted = true;
            self.refused = 0;
        } else {
            self.refused += 1;
        }
    }

    /// Whether calls are still taken; while an idle client is told to leave, one more may be on its way.
    pub(super) fn takes_calls(&self) -> bool {
        self.refused < MOST_REFUSED
    }

    /// Ready when something is due; `idle`: there is no call now. To be polled again after `GoAway`.
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
            () if self.closing => LAST_WORDS,
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

    async fn due(manners: &mut Manners) -> IdleAction {
        poll_fn(|cx| manners.poll(true, cx)).await
    }

    /// What is due at once, if anything.
    async fn now(manners: &mut Manners, idle: bool) -> Option<IdleAction> {
        poll_fn(|cx| match manners.poll(idle, cx) {
            Poll::Ready(due) => Poll::Ready(Some(due)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    #[tokio::test(start_paused = true)]
    async fn connections_without_a_call_end() {
        let mut manners = Manners::default();
        let start = Instant::now();
        assert_eq!(
            [due(&mut manners).await, due(&mut manners).await],
            [IdleAction::GoAway, IdleAction::Close]
        );
        assert_eq!(start.elapsed().as_secs(), (FIRST_CALL + LAST_WORDS).as_secs());

        let mut manners = Manners::default();
        assert_eq!(now(&mut manners, true).await, None);
        advance(FIRST_CALL / 2).await;
        manners.called(true);
        assert_eq!(now(&mut manners, false).await, None);
        advance(2 * IDLE).await;
        assert_eq!(now(&mut manners, false).await, None, "a stream may be as quiet as it likes");
        let start = Instant::now();
        assert_eq!(due(&mut manners).await, IdleAction::GoAway);
        assert_eq!(start.elapsed().as_secs(), IDLE.as_secs());
        manners.called(true);
        assert_eq!(now(&mut manners, false).await, None, "it was on its way");
        assert_eq!(due(&mut manners).await, IdleAction::Close);
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_are_refused_again_and_again_must_leave() {
        let mut manners = Manners::default();
        for _ in 1..MOST_REFUSED {
            manners.called(false);
        }
        manners.called(true);
        for _ in 0..MOST_REFUSED {
            assert!(manners.takes_calls());
            assert_eq!(now(&mut manners, true).await, None);
            manners.called(false);
        }
        assert!(!manners.takes_calls());
        assert_eq!(now(&mut manners, false).await, Some(IdleAction::GoAway), "whatever else it does");
        assert_eq!(due(&mut manners).await, IdleAction::Close);
    }
}
