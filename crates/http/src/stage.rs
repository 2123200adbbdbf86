//! Stages of a body: an external processor takes its content and returns other content later.
//!
//! A stage takes content only while it is open, so it stores a bounded number of bytes. Conversions before a stage
//! apply to the content that it takes, those after it to the content that it returns.

use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};

use crate::{
    grpc_web::{Conversion, InvalidContent},
    head::Headers,
};

/// Maximum size in bytes of content that is joined from pieces that have arrived together.
const JOINED: usize = 64 << 10;

/// Reason for the failure of a transfer.
#[derive(Debug)]
pub enum TransferError {
    /// The sender closed early, or its connection failed.
    Sender,
    /// The sender violated the protocol.
    Malformed,
    /// The receiver's connection failed.
    Receiver,
    /// A stage has ended the exchange.
    Stage,
}

/// A part of a body.
#[derive(Debug, Default)]
pub struct BodyPart {
    /// Content; may be empty.
    pub data: Bytes,
    /// This is the last part.
    pub end: bool,
    /// Trailer fields, at the end.
    pub trailers: Option<Headers>,
}

/// Error: the stage has ended the exchange. The stage knows the reason.
#[derive(Debug)]
pub struct StageFailed;

/// A processor of the content of a body.
pub trait Stage {
    /// Returns the next part of the result.
    ///
    /// # Errors
    /// The exchange must end.
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<BodyPart, StageFailed>>;

    /// Sends and receives as much as possible while the caller does not take the result.
    ///
    /// # Errors
    /// The exchange must end.
    fn poll_progress(&mut self, cx: &mut Context<'_>) -> Result<(), StageFailed>;

    /// Returns whether the stage takes content. A closed stage wakes the task of the last poll when it opens again.
    fn is_open(&self) -> bool;

    /// Takes the next part of the body. The stage must be open.
    fn push(&mut self, piece: BodyPart);
}

/// Processing of the content of a body: a conversion, or a stage with further processing around it.
pub(crate) enum Through {
    Conversion(Conversion),
    Stage(Staged),
}

/// A stage, with the conversions around it.
pub(crate) struct Staged {
    stage: Box<dyn Stage>,
    before: Option<Box<Through>>,
    after: Option<Conversion>,
    /// Content that was read before the stage began.
    first: Option<BodyPart>,
    /// The stage has taken the whole body.
    is_taken: bool,
}

/// Source of a body's parts.
pub(crate) type Source<'s> = &'s mut dyn FnMut(&mut Context<'_>) -> Poll<Result<BodyPart, TransferError>>;

impl Staged {
    pub(crate) fn new(stage: Box<dyn Stage>, before: Option<Box<Through>>, first: Option<BodyPart>) -> Self {
        Self { stage, before, after: None, first, is_taken: false }
    }

    /// Returns the next part of the result.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: Source<'_>,
    ) -> Poll<Result<BodyPart, TransferError>> {
        loop {
            if let Poll::Ready(next) = self.stage.poll_next(cx) {
                let mut piece = next?;
                if let Some(after) = &mut self.after {
                    piece = convert(after, piece)?;
                }
                return Poll::Ready(Ok(piece));
            }
            ready!(self.poll_take(cx, source))?;
        }
    }

    /// Gives content to the stage without waiting for its result. Pending when the stage takes no more or the source
    /// has no data yet.
    pub(crate) fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        source: Source<'_>,
    ) -> Poll<Result<(), TransferError>> {
        loop {
            self.stage.poll_progress(cx)?;
            ready!(self.poll_take(cx, source))?;
        }
    }

    /// Lets the stage and those before it send and receive while the caller does not take the result.
    fn poll_progress(&mut self, cx: &mut Context<'_>) -> Result<(), TransferError> {
        self.stage.poll_progress(cx)?;
        self.before.as_mut().map_or(Ok(()), |before| before.poll_progress(cx))
    }

    /// Gives one part of the body to the stage.
    fn poll_take(&mut self, cx: &mut Context<'_>, source: Source<'_>) -> Poll<Result<(), TransferError>> {
        if self.is_taken || !self.stage.is_open() {
            if let Some(before) = &mut self.before {
                before.poll_progress(cx)?;
            }
            return Poll::Pending;
        }
        let piece = match self.first.take() {
            Some(first) => first,
            None => ready!(self.poll_source(cx, source))?,
        };
        self.is_taken = piece.end;
        self.stage.push(piece);
        Poll::Ready(Ok(()))
    }

    /// Reads the next part of the body, joined with those that have arrived together with it, up to about [`JOINED`].
    fn poll_source(
        &mut self,
        cx: &mut Context<'_>,
        source: Source<'_>,
    ) -> Poll<Result<BodyPart, TransferError>> {
        let before = &mut self.before;
        let mut read = |cx: &mut Context<'_>| match before {
            Some(before) => before.poll(cx, source),
            None => source(cx),
        };
        let mut piece = ready!(read(cx))?;
        if piece.end || piece.data.len() >= JOINED {
            return Poll::Ready(Ok(piece));
        }
        let mut joined = BytesMut::from(&*piece.data);
        while !piece.end && joined.len() < JOINED {
            match read(cx)? {
                Poll::Pending if joined.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(next) => {
                    joined.extend_from_slice(&next.data);
                    (piece.end, piece.trailers) = (next.end, next.trailers);
                }
            }
        }
        piece.data = joined.freeze();
        Poll::Ready(Ok(piece))
    }
}

impl Through {
    /// Returns this processing followed by a conversion.
    pub(crate) fn then(self, next: Conversion) -> Self {
        let both = |first, next| Conversion::Then(Box::new([first, next]));
        match self {
            Self::Conversion(first) => Self::Conversion(both(first, next)),
            Self::Stage(mut staged) => {
                let first = staged.after.take();
                staged.after = Some(match first {
                    Some(first) => both(first, next),
                    None => next,
                });
                Self::Stage(staged)
            }
        }
    }

    /// Returns the trailers that a conversion has appended to the content.
    pub(crate) fn trailers(&self) -> Option<&Headers> {
        match self {
            Self::Conversion(conversion) => conversion.trailers(),
            Self::Stage(staged) => staged.after.as_ref()?.trailers(),
        }
    }

    /// Returns the next part of the result. It may be empty before the end.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: Source<'_>,
    ) -> Poll<Result<BodyPart, TransferError>> {
        match self {
            Self::Conversion(conversion) => {
                let piece = ready!(source(cx))?;
                Poll::Ready(Ok(convert(conversion, piece)?))
            }
            Self::Stage(staged) => staged.poll(cx, source),
        }
    }

    /// Lets stages send and receive while the caller does not take the result.
    pub(crate) fn poll_progress(&mut self, cx: &mut Context<'_>) -> Result<(), TransferError> {
        match self {
            Self::Conversion(_) => Ok(()),
            Self::Stage(staged) => staged.poll_progress(cx),
        }
    }
}

fn convert(conversion: &mut Conversion, mut piece: BodyPart) -> Result<BodyPart, InvalidContent> {
    piece.data = conversion.piece(piece.data, piece.end, &mut piece.trailers)?;
    Ok(piece)
}

impl From<StageFailed> for TransferError {
    fn from(StageFailed: StageFailed) -> Self {
        Self::Stage
    }
}

impl From<InvalidContent> for TransferError {
    fn from(InvalidContent: InvalidContent) -> Self {
        Self::Malformed
    }
}
