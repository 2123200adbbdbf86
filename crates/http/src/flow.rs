//! Transfer of a body from one side to the other, with backpressure.
//!
//! Bytes move only as fast as the receiver accepts them: nothing more is read while more than one block waits to be
//! written. Bytes that were read already are written together, with the head if it is still buffered. Between two
//! HTTP/1.1 connections, content is copied once, from buffer to buffer. In all other cases it moves in pieces.

use std::task::{Context, Poll, ready};

use bytes::Bytes;

use crate::{
    buffer::BLOCK,
    grpc_web::Conversion,
    head::Headers,
    http1::{BodyDecoder, Framing, HeadLimits, write},
    socket::Stream,
    stage::{BodyPart, Stage, Staged, Through, TransferError},
    wire::Wire,
};

/// Maximum size in bytes of a request body that is kept for a retry.
const KEPT: usize = 64 * 1024;

/// A body that is forwarded from one side to the other, with its framing and its trailers.
pub struct Flow {
    /// Decodes the framing of HTTP/1.1.
    decoder: BodyDecoder,
    /// Framing for an HTTP/1.1 receiver.
    framing: Framing,
    limits: HeadLimits,
    /// Number of content bytes of the sender so far.
    pub bytes: u64,
    /// Content so far, for a retry; `None` if it exceeds the limit.
    kept: Option<Vec<u8>>,
    /// Limit of `kept` in bytes. While the body is collected, there is none.
    keeps: usize,
    /// A part of the content cannot be sent again.
    is_discarded: bool,
    /// Number of content bytes that this receiver has got.
    given: usize,
    /// A piece that was read and waits for space.
    waiting: Bytes,
    /// Number of content bytes for which an HTTP/2 sender has no window update yet.
    owed: usize,
    /// All content has been read.
    read: bool,
    /// Trailer fields.
    trailers: Option<Headers>,
    /// The end has been passed to the receiver.
    ended: bool,
    /// Conversions of the content, and stages.
    through: Option<Box<Through>>,
}

impl Flow {
    /// Returns a body that arrives in framing `from` and leaves in framing `to`. `keep` stores it for a retry.
    pub fn new(from: Framing, to: Framing, limits: HeadLimits, keep: bool) -> Self {
        let none = from == Framing::None;
        Self {
            decoder: BodyDecoder::new(from),
            framing: to,
            limits,
            bytes: 0,
            kept: keep.then(Vec::new),
            keeps: KEPT,
            is_discarded: false,
            given: 0,
            waiting: Bytes::new(),
            owed: 0,
            read: none,
            trailers: None,
            ended: none,
            through: None,
        }
    }

    /// Returns a body whose content is complete, such as that of a local response.
    #[inline]
    pub fn whole(content: &[u8], framing: Framing, trailers: Option<Headers>) -> Self {
        let limits = HeadLimits { max_head: 0, max_headers: 0, keep_case: false };
        Self {
            framing,
            bytes: content.len() as u64,
            waiting: Bytes::copy_from_slice(content),
            ended: content.is_empty() && trailers.is_none() && framing != Framing::Chunked,
            trailers,
            ..Self::new(Framing::None, Framing::None, limits, false)
        }
    }

    /// Adds a conversion of the content. The length of the result is not known.
    #[inline]
    pub fn convert(&mut self, conversion: Conversion) {
        if matches!(self.framing, Framing::Length(_)) {
            self.framing = Framing::Chunked;
        }
        self.through = Some(Box::new(match self.through.take() {
            Some(first) => first.then(conversion),
            None => Through::Conversion(conversion),
        }));
    }

    /// Adds a stage that processes the content. Content that was kept is processed first; the receiver has not got any.
    /// The length of the result is not known, unless the stage `keeps_length`.
    pub fn stage(&mut self, stage: Box<dyn Stage>, keeps_length: bool) {
        if matches!(self.framing, Framing::Length(_)) && !keeps_length {
            self.framing = Framing::Chunked;
        }
        let kept = self.kept.as_mut().map(std::mem::take).unwrap_or_default();
        let trailers = self.trailers.take().filter(|_| self.read);
        let first = BodyPart { data: kept.into(), end: self.read, trailers };
        let first = (first.end || !first.data.is_empty()).then_some(first);
        let staged = Staged::new(stage, self.through.take(), first);
        self.through = Some(Box::new(Through::Stage(staged)));
        (self.read, self.given, self.waiting, self.ended) = (false, 0, Bytes::new(), false);
    }

    /// Returns whether the whole body has been read and passed to the receiver.
    #[inline]
    pub fn is_read(&self) -> bool {
        self.ended
    }

    /// Returns whether the whole body has been read.
    #[inline]
    pub fn is_collected(&self) -> bool {
        self.read
    }

    /// Returns whether the whole body has arrived, even if a part waits to be read. The end of chunks is known only
    /// after they have been read.
    #[inline]
    pub fn has_arrived(&self, from: &Wire) -> bool {
        self.read
            || match from {
                Wire::Http1(from) => self.decoder.left().is_some_and(|left| left <= from.input.len() as u64),
                Wire::Http2(from) => from.has_arrived(),
            }
    }

    /// Returns the content so far, if all of it was kept.
    #[inline]
    pub fn kept(&self) -> Option<&[u8]> {
        self.kept.as_deref()
    }

    /// Returns the trailer fields after the whole body has been read.
    #[inline]
    pub fn trailers(&self) -> Option<&Headers> {
        self.trailers.as_ref().or_else(|| self.through.as_ref()?.trailers())
    }

    /// Returns whether all content so far could be sent again.
    #[inline]
    pub fn is_replayable(&self) -> bool {
        !self.is_discarded
    }

    /// Returns the number of content bytes that the receiver has got, after conversions and stages.
    #[inline]
    pub fn given(&self) -> u64 {
        self.given as u64
    }

    /// Returns the framing for an HTTP/1.1 receiver.
    #[inline]
    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// Declares the length of a collected body, so that it is not sent in chunks. A body with trailers is still sent in
    /// chunks.
    pub fn set_known_length(&mut self) {
        if let Some(kept) = self.kept.as_ref().filter(|_| self.read && self.trailers.is_none())
            && self.framing == Framing::Chunked
        {
            self.framing = Framing::Length(kept.len() as u64);
        }
    }

    /// Stops keeping content.
    #[inline]
    pub fn forget(&mut self) {
        self.is_discarded |= self.kept.take().is_some();
    }

    /// Starts again with the kept content, for another receiver.
    #[inline]
    pub fn restart(&mut self) {
        self.given = 0;
        self.waiting = Bytes::new();
        self.ended = self.read && self.framing == Framing::None;
    }

    /// Replaces a body that has been read to its end. The transfer starts again with the new content.
    pub fn replace(&mut self, content: Vec<u8>, framing: Framing, trailers: Option<Headers>) {
        (self.kept, self.is_discarded, self.through) = (Some(content), false, None);
        (self.framing, self.trailers, self.read) = (framing, trailers, true);
        self.restart();
    }

    /// Replaces the collected part of a body that has not been read to its end. The rest of the body follows, so the
    /// length of the result is unknown.
    pub fn replace_start(&mut self, content: Vec<u8>) {
        (self.kept, self.is_discarded, self.framing) = (Some(content), false, Framing::Chunked);
        self.restart();
    }

    /// Sets the framing for an HTTP/1.1 receiver.
    pub fn set_framing(&mut self, framing: Framing) {
        self.framing = framing;
    }

    /// Transfers what is possible; returns ready when the receiver has the whole body and its output is written.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Wire,
        to: &mut Wire,
    ) -> Poll<Result<(), TransferError>> {
        if let (Wire::Http1(from), Wire::Http1(to), None) = (&mut *from, &mut *to, &self.through) {
            return self.poll_copy(cx, from, to);
        }
        while !self.ended {
            self.release(from);
            if self.waiting.is_empty() {
                // A receiver that does not read gets no more than a block.
                if let Wire::Http1(to) = &mut *to
                    && to.output.len() >= BLOCK
                    && to.poll_flush(cx).map_err(|_| TransferError::Receiver)?.is_pending()
                {
                    return self.poll_stages(cx);
                }
                match self.poll_piece(cx, from)? {
                    Poll::Ready(piece) => self.waiting = piece,
                    // The wait may be long. What is there, such as the head, does not wait for content.
                    Poll::Pending => {
                        return match to.poll_flush(cx) {
                            Poll::Ready(Err(_)) => Poll::Ready(Err(TransferError::Receiver)),
                            _ => Poll::Pending,
                        };
                    }
                }
            }
            if self.poll_give(cx, to)?.is_pending() {
                return self.poll_stages(cx);
            }
        }
        self.release(from);
        to.poll_flush(cx).map_err(|_| TransferError::Receiver)
    }

    /// Lets stages send and receive while the receiver takes nothing. Pending until one fails.
    fn poll_stages(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        match self.through.as_mut().map(|through| through.poll_progress(cx)) {
            Some(Err(failure)) => Poll::Ready(Err(failure)),
            Some(Ok(())) | None => Poll::Pending,
        }
    }

    /// Transfers a complete body; returns ready when the receiver has it.
    #[inline]
    pub fn poll_send(&mut self, cx: &mut Context<'_>, to: &mut Wire) -> Poll<Result<(), TransferError>> {
        if !self.ended {
            ready!(self.poll_give(cx, to))?;
        }
        to.poll_flush(cx).map_err(|_| TransferError::Receiver)
    }

    /// Reads the body to its end, or until it exceeds `max` bytes, for [`Self::kept`] and [`Self::trailers`].
    #[inline]
    pub fn poll_collect(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Wire,
        max: usize,
    ) -> Poll<Result<(), TransferError>> {
        self.keeps = usize::MAX;
        while !self.read && self.bytes <= max as u64 && self.given <= max {
            self.given += ready!(self.poll_piece(cx, from))?.len();
            self.release(from);
        }
        self.keeps = KEPT;
        Poll::Ready(Ok(()))
    }

    /// Gives content to the last stage before its result is needed. Pending until the transfer fails.
    pub fn poll_fill_stage(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Wire,
    ) -> Poll<Result<(), TransferError>> {
        let Some(mut through) = self.through.take() else { return Poll::Pending };
        let filled = match &mut *through {
            Through::Stage(staged) => staged.poll_fill(cx, &mut |cx| self.poll_source(cx, from)),
            Through::Conversion(_) => Poll::Pending,
        };
        self.through = Some(through);
        filled
    }

    /// Discards input that has arrived; returns true if that reaches the end of the body. Not needed for HTTP/2, where
    /// unread content of a stream does not affect later streams.
    #[inline]
    pub fn skip(&mut self, from: &mut Wire) -> bool {
        let Wire::Http1(from) = from else { return true };
        while !self.decoder.is_done() && !from.input.is_empty() {
            let Ok(piece) = self.decoder.next(from.input.bytes(), &self.limits) else { return false };
            from.input.consume(piece.skip + piece.data);
        }
        self.decoder.is_done()
    }

    /// Transfers between two HTTP/1.1 connections.
    fn poll_copy(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Stream,
        to: &mut Stream,
    ) -> Poll<Result<(), TransferError>> {
        loop {
            self.copy(from, to)?;
            if !to.output.is_empty() {
                ready!(to.poll_flush(cx)).map_err(|_| TransferError::Receiver)?;
            }
            if self.ended {
                return Poll::Ready(Ok(()));
            }
            if from.input.is_empty() {
                ready!(self.poll_fill(cx, from))?;
            }
        }
    }

    fn copy(&mut self, from: &mut Stream, to: &mut Stream) -> Result<(), TransferError> {
        if let Some(kept) = &self.kept {
            write::data(&mut to.output, self.framing, &kept[self.given..]);
            self.given = kept.len();
        }
        while !self.read && !from.input.is_empty() && to.output.len() < BLOCK {
            let bytes = from.input.bytes();
            let piece = self.decoder.next(bytes, &self.limits).map_err(|_| TransferError::Malformed)?;
            let data = &bytes[piece.skip..piece.skip + piece.data];
            write::data(&mut to.output, self.framing, data);
            self.bytes += data.len() as u64;
            keep(&mut self.kept, &mut self.is_discarded, data, KEPT);
            self.given += data.len();
            from.input.consume(piece.skip + piece.data);
            if self.decoder.is_done() {
                self.note_end()?;
            }
        }
        if self.read {
            self.finish(to);
        }
        Ok(())
    }

    fn finish(&mut self, to: &mut Stream) {
        if !self.ended {
            write::finish(&mut to.output, self.framing, self.trailers.as_ref());
            self.ended = true;
        }
    }

    /// Reads from a connection. The end of the connection may be the end of the body.
    fn poll_fill(&mut self, cx: &mut Context<'_>, from: &mut Stream) -> Poll<Result<(), TransferError>> {
        if ready!(from.poll_fill(cx)).map_err(|_| TransferError::Sender)? > 0 {
            return Poll::Ready(Ok(()));
        }
        Poll::Ready(if self.decoder.close() { self.note_end() } else { Err(TransferError::Sender) })
    }

    fn note_end(&mut self) -> Result<(), TransferError> {
        self.trailers = self.decoder.trailers(&self.limits).map_err(|_| TransferError::Malformed)?;
        self.read = true;
        Ok(())
    }

    /// Returns the next piece; empty at the end.
    fn poll_piece(&mut self, cx: &mut Context<'_>, from: &mut Wire) -> Poll<Result<Bytes, TransferError>> {
        if let Some(kept) = self.kept.as_ref().filter(|kept| self.given < kept.len()) {
            return Poll::Ready(Ok(Bytes::copy_from_slice(&kept[self.given..])));
        }
        while !self.read {
            let piece = match self.through {
                None => ready!(self.poll_received(cx, from))?,
                Some(_) => ready!(self.poll_converted(cx, from))?,
            };
            keep(&mut self.kept, &mut self.is_discarded, &piece, self.keeps);
            if !piece.is_empty() {
                return Poll::Ready(Ok(piece));
            }
        }
        Poll::Ready(Ok(Bytes::new()))
    }

    /// Returns the next piece of the sender; may be empty before the end.
    #[inline]
    fn poll_received(&mut self, cx: &mut Context<'_>, from: &mut Wire) -> Poll<Result<Bytes, TransferError>> {
        let piece = match from {
            Wire::Http1(from) => {
                let bytes = from.input.bytes();
                let piece = self.decoder.next(bytes, &self.limits).map_err(|_| TransferError::Malformed)?;
                let data = Bytes::copy_from_slice(&bytes[piece.skip..piece.skip + piece.data]);
                from.input.consume(piece.skip + piece.data);
                if self.decoder.is_done() {
                    self.note_end()?;
                } else if data.is_empty() {
                    ready!(self.poll_fill(cx, from))?;
                }
                data
            }
            Wire::Http2(from) => {
                let piece = ready!(from.poll_piece(cx)).map_err(|_| TransferError::Sender)?;
                if piece.is_none() {
                    self.trailers = from.trailers();
                }
                // A known end is sent with the content, which saves a frame.
                self.read = piece.is_none() || from.is_end();
                let data = piece.unwrap_or_default();
                self.owed += data.len();
                data
            }
        };
        self.bytes += piece.len() as u64;
        Poll::Ready(Ok(piece))
    }

    /// Returns the next piece after conversions and stages; may be empty before the end.
    #[cold]
    fn poll_converted(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Wire,
    ) -> Poll<Result<Bytes, TransferError>> {
        let Some(mut through) = self.through.take() else { return Poll::Ready(Ok(Bytes::new())) };
        let next = through.poll(cx, &mut |cx| self.poll_source(cx, from));
        self.through = Some(through);
        let piece = ready!(next)?;
        (self.read, self.trailers) = (piece.end, piece.trailers);
        Poll::Ready(Ok(piece.data))
    }

    /// Returns the next part of the sender's body, for conversions and stages.
    fn poll_source(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Wire,
    ) -> Poll<Result<BodyPart, TransferError>> {
        // A stage or a conversion holds the content that was read before. The sender may send more.
        self.release(from);
        let data = ready!(self.poll_received(cx, from))?;
        let end = std::mem::take(&mut self.read);
        Poll::Ready(Ok(BodyPart { data, end, trailers: self.trailers.take() }))
    }

    /// Passes the waiting piece to the receiver, with the end if nothing follows.
    fn poll_give(&mut self, cx: &mut Context<'_>, to: &mut Wire) -> Poll<Result<(), TransferError>> {
        let kept = self.kept.as_ref().map_or(0, Vec::len);
        let all = self.read && kept <= self.given + self.waiting.len();
        match to {
            Wire::Http1(to) => {
                write::data(&mut to.output, self.framing, &self.waiting);
                self.given += self.waiting.len();
                self.waiting = Bytes::new();
                if all {
                    self.finish(to);
                }
                ready!(to.poll_flush(cx)).map_err(|_| TransferError::Receiver)?;
            }
            Wire::Http2(to) => {
                let receiver_closed = |_| TransferError::Receiver;
                while !self.waiting.is_empty() {
                    let room = ready!(to.poll_room(cx, self.waiting.len())).map_err(receiver_closed)?;
                    let last = all && self.trailers.is_none() && room == self.waiting.len();
                    to.send(&self.waiting.split_to(room), last).map_err(receiver_closed)?;
                    self.given += room;
                    self.ended |= last;
                }
                if all && !self.ended {
                    match &self.trailers {
                        Some(trailers) => {
                            ready!(to.poll_space(cx));
                            to.send_trailers(trailers)
                        }
                        None => to.send(&[], true),
                    }
                    .map_err(receiver_closed)?;
                    self.ended = true;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Sends a window update to an HTTP/2 sender for content that was passed on.
    fn release(&mut self, from: &mut Wire) {
        let handed_on = self.owed.saturating_sub(self.waiting.len());
        if let Wire::Http2(from) = from
            && handed_on > 0
        {
            from.release(handed_on);
            self.owed -= handed_on;
        }
    }
}

/// Keeps content for a retry, up to the limit.
fn keep(kept: &mut Option<Vec<u8>>, is_discarded: &mut bool, data: &[u8], max: usize) {
    if let Some(known) = kept {
        if known.len() + data.len() > max {
            *kept = None;
            *is_discarded = true;
        } else {
            known.extend_from_slice(data);
        }
    }
}
