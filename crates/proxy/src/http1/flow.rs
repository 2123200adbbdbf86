//! A body on its way from one connection to another, with backpressure.
//!
//! Bytes move only as fast as the receiver takes them: no more is read while more than one block waits to be
//! written. What has been read already goes out together, with the head if that has not gone yet.

use std::task::{Context, Poll, ready};

use super::{Decoder, Framing, Limits, write};
use crate::{buffer::BLOCK, socket::Stream};

/// Most of a request's body that is kept so that it can be sent once more.
const KEPT: usize = 64 * 1024;

/// A body on its way.
pub(crate) struct Flow {
    decoder: Decoder,
    framing: Framing,
    limits: Limits,
    /// Bytes of content so far.
    pub(crate) bytes: u64,
    /// All that was written so far, to be written again; `None` once it is too much.
    kept: Option<Vec<u8>>,
    /// Some of it cannot be written again.
    lost: bool,
    ended: bool,
}

/// Which end broke off, and what was wrong.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The sender closed too early or the connection failed.
    Sender,
    /// The sender's bytes are not what they should be.
    Malformed,
    /// Writing failed.
    Receiver,
}

impl Flow {
    /// A body that comes in as `from` and goes out as `to`. `keep` remembers it for another try.
    pub(crate) fn new(from: Framing, to: Framing, limits: Limits, keep: bool) -> Self {
        let decoder = Decoder::new(from);
        let ended = decoder.is_done();
        Self { decoder, framing: to, limits, bytes: 0, kept: keep.then(Vec::new), lost: false, ended }
    }

    /// Whether all of the body has been read and handed to the receiver's output.
    pub(crate) fn is_read(&self) -> bool {
        self.ended
    }

    /// Whether all of the body is here, be it handed on or waiting in the sender's input.
    pub(crate) fn has_arrived(&self, from: &Stream) -> bool {
        self.ended || self.decoder.left().is_some_and(|left| left <= from.input.len() as u64)
    }

    /// What was written so far, if it is all still there.
    pub(crate) fn kept(&self) -> Option<&[u8]> {
        self.kept.as_deref()
    }

    /// Whether all that was taken of the body so far could be sent again.
    pub(crate) fn is_whole(&self) -> bool {
        !self.lost
    }

    /// How it goes out.
    pub(crate) fn framing(&self) -> Framing {
        self.framing
    }

    /// Stops keeping what is written.
    pub(crate) fn forget(&mut self) {
        self.lost |= self.kept.take().is_some();
    }

    /// Moves what can be moved; ready when the kernel has the whole body (and whatever else was in the output).
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Stream,
        to: &mut Stream,
    ) -> Poll<Result<(), Broken>> {
        loop {
            self.transfer(from, to)?;
            if !to.output.is_empty() {
                ready!(to.poll_flush(cx)).map_err(|_| Broken::Receiver)?;
            }
            if self.ended {
                return Poll::Ready(Ok(()));
            }
            if !from.input.is_empty() {
                continue;
            }
            let count = ready!(from.poll_fill(cx)).map_err(|_| Broken::Sender)?;
            if count == 0 {
                if !self.decoder.close() {
                    return Poll::Ready(Err(Broken::Sender));
                }
                self.end(to)?;
            }
        }
    }

    /// Reads and throws away what has arrived; true if that is the end of the body.
    pub(crate) fn skip(&mut self, from: &mut Stream) -> bool {
        while !self.decoder.is_done() && !from.input.is_empty() {
            let Ok(piece) = self.decoder.next(from.input.bytes(), &self.limits) else { return false };
            from.input.consume(piece.skip + piece.data);
            self.bytes += piece.data as u64;
        }
        self.decoder.is_done()
    }

    fn transfer(&mut self, from: &mut Stream, to: &mut Stream) -> Result<(), Broken> {
        while !self.ended && !from.input.is_empty() && to.output.len() < BLOCK {
            let bytes = from.input.bytes();
            let piece = self.decoder.next(bytes, &self.limits).map_err(|_| Broken::Malformed)?;
            let data = &bytes[piece.skip..piece.skip + piece.data];
            let before = to.output.len();
            write::data(&mut to.output, self.framing, data);
            self.bytes += piece.data as u64;
            self.keep(&to.output.bytes()[before..]);
            from.input.consume(piece.skip + piece.data);
            if self.decoder.is_done() {
                self.end(to)?;
            }
        }
        Ok(())
    }

    fn end(&mut self, to: &mut Stream) -> Result<(), Broken> {
        let trailers = self.decoder.trailers(&self.limits).map_err(|_| Broken::Malformed)?;
        let before = to.output.len();
        write::finish(&mut to.output, self.framing, trailers.as_ref());
        self.keep(&to.output.bytes()[before..]);
        self.ended = true;
        Ok(())
    }

    fn keep(&mut self, written: &[u8]) {
        if let Some(kept) = &mut self.kept {
            if kept.len() + written.len() > KEPT {
                self.kept = None;
                self.lost = true;
            } else {
                kept.extend_from_slice(written);
            }
        }
    }
}
