//! A body that passes through a processor.

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use super::{
    ProcessorFailure, Side,
    session::{SharedSession, Stopped},
};
use skysail_http::{
    head::Headers,
    stage::{BodyPart, Stage, StageFailed},
};

/// The stage of a body in the call of a processor.
pub(crate) struct SessionStage {
    session: SharedSession,
    side: Side,
}

impl SessionStage {
    pub(super) fn new(session: SharedSession, side: Side) -> Self {
        Self { session, side }
    }

    /// Passes a body that is in memory through the processor. The result has at most `max` bytes.
    ///
    /// # Errors
    /// The call has ended the exchange.
    pub(crate) async fn pass(
        self,
        content: Vec<u8>,
        trailers: Option<Headers>,
        max: usize,
    ) -> Result<(Vec<u8>, Option<Headers>), Stopped> {
        // A stage for both directions takes the body only once the call is open.
        let mut source = Some(BodyPart { data: content.into(), end: true, trailers });
        let mut result = Vec::new();
        loop {
            let piece = poll_fn(|cx| {
                let session = &mut *self.session.borrow_mut();
                let mut next = session.poll_next(cx, self.side);
                if next.is_pending()
                    && session.is_open(self.side)
                    && let Some(piece) = source.take()
                {
                    session.push(self.side, piece);
                    next = session.poll_next(cx, self.side);
                }
                next
            })
            .await?;
            result.extend_from_slice(&piece.data);
            if result.len() > max {
                self.session.borrow_mut().fail(ProcessorFailure::Invalid("body_too_large"));
                return Err(Stopped);
            }
            if piece.end {
                return Ok((result, piece.trailers));
            }
        }
    }
}

impl Stage for SessionStage {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<BodyPart, StageFailed>> {
        self.session.borrow_mut().poll_next(cx, self.side).map_err(|Stopped| StageFailed)
    }

    fn poll_progress(&mut self, cx: &mut Context<'_>) -> Result<(), StageFailed> {
        self.session.borrow_mut().poll_progress(cx, self.side).map_err(|Stopped| StageFailed)
    }

    fn is_open(&self) -> bool {
        self.session.borrow().is_open(self.side)
    }

    fn push(&mut self, piece: BodyPart) {
        self.session.borrow_mut().push(self.side, piece);
    }
}
