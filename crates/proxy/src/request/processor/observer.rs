//! A processor that only observes: a task of its own sends it the messages, and the request does not wait for it.
//!
//! A processor that does not read slows down bodies, as in Envoy: the call holds a bounded number of bytes. Its failure
//! has no effect on the request.

use std::{
    future::poll_fn,
    task::{Context, Poll, Waker},
    time::Duration,
};

use super::session::{CallState, ProcessorSession, SharedSession};
use skysail_http::timer;

/// State of the task.
#[derive(Default)]
pub(super) struct Observer {
    /// Waker of the task.
    pub(super) task: Option<Waker>,
    /// Waker of the request's task, which waits for space.
    pub(super) waiting: Option<Waker>,
    /// The request has ended.
    pub(super) is_finished: bool,
}

/// Sends the messages of a call. After the end of the request, the processor has `close_timeout` to read the rest and
/// to end the call; then the call is reset.
pub(super) async fn run(session: SharedSession, close_timeout: Duration) {
    poll_fn(|cx| session.borrow_mut().poll_observer(cx, ProcessorSession::is_finished)).await;
    let close = async {
        poll_fn(|cx| session.borrow_mut().poll_observer(cx, ProcessorSession::has_sent_all)).await;
        let call = std::mem::replace(&mut session.borrow_mut().call, CallState::Closed);
        if let CallState::Open(call) = call {
            call.finish().await;
            session.borrow().stats.ext_proc_closed.inc();
        }
    };
    timer::timeout(close_timeout, Box::pin(close)).await;
}

impl ProcessorSession {
    /// Sends messages. Returns ready once `is_done`, or after the end of the call.
    fn poll_observer(&mut self, cx: &mut Context<'_>, is_done: fn(&Self) -> bool) -> Poll<()> {
        self.poll_task(cx);
        let is_done = self.is_ended() || is_done(self);
        if let Some(observer) = &mut self.observer {
            observer.task = Some(cx.waker().clone());
            if let Some(waiting) = observer.waiting.take() {
                waiting.wake();
            }
        }
        if is_done { Poll::Ready(()) } else { Poll::Pending }
    }

    fn is_finished(&self) -> bool {
        self.observer.as_ref().is_none_or(|observer| observer.is_finished)
    }

    /// Notes that the request has ended.
    pub(super) fn finish_observing(&mut self) {
        if let Some(observer) = &mut self.observer {
            observer.is_finished = true;
            if let Some(task) = observer.task.take() {
                task.wake();
            }
        }
    }
}
