//! One timer for all deadlines of a connection.
//!
//! Most deadlines are moved long before they pass: each request has a new one. So the runtime's timer is set
//! only when there is none or it would come too late; when it fires early it is set again. Connections with
//! no deadline never touch the runtime's timers.

use std::{
    future::Future as _,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Instant,
};

use tokio::time::{Sleep, sleep_until};

/// Waits for a deadline that moves.
#[derive(Default)]
pub(crate) struct Timer {
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Timer {
    /// Ready when `deadline` has passed; `None` never passes.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, deadline: Option<Instant>) -> Poll<()> {
        let Some(deadline) = deadline else { return Poll::Pending };
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(deadline.into())));
        loop {
            if sleep.deadline().into_std() > deadline {
                sleep.as_mut().reset(deadline.into());
            }
            ready!(sleep.as_mut().poll(cx));
            if Instant::now() >= deadline {
                // Polled again, a timer that has fired would be ready at once whatever its deadline.
                self.sleep = None;
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline.into());
        }
    }
}

/// The lesser of two deadlines, or of two times, that may not be there.
pub(crate) fn earlier<T: Ord>(a: Option<T>, b: Option<T>) -> Option<T> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, time::Duration};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_deadline_may_move_both_ways() {
        let start = tokio::time::Instant::now();
        let now = start.into_std();
        let mut timer = Timer::default();
        let far = now + Duration::from_secs(60);
        poll_fn(|cx| {
            assert!(timer.poll(cx, Some(far)).is_pending());
            assert!(timer.poll(cx, None).is_pending());
            Poll::Ready(())
        })
        .await;
        assert_eq!(timer.sleep.as_ref().unwrap().deadline().into_std(), far);
        poll_fn(|cx| {
            assert!(timer.poll(cx, Some(now + Duration::from_secs(1))).is_pending());
            Poll::Ready(())
        })
        .await;
        assert_eq!(timer.sleep.as_ref().unwrap().deadline().into_std(), now + Duration::from_secs(1));
    }
}
