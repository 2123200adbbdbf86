//! A body on its way from one end to another, with backpressure.
//!
//! Bytes move only as fast as the receiver takes them: no more is read while more than one block waits to be
//! written. What has been read already goes out together, with the head if that has not gone yet. Between two
//! connections of HTTP/1.1 content is copied once, from buffer to buffer; in all other cases it moves in pieces.

use std::task::{Context, Poll, ready};

use bytes::Bytes;

use crate::{
    buffer::BLOCK,
    grpc_web::Through,
    head::Headers,
    http1::{BodyDecoder, Framing, HeadLimits, write},
    socket::Stream,
    wire::Wire,
};

/// Most of a request's body that is kept so that it can be sent once more.
const KEPT: usize = 64 * 1024;

/// A body on its way.
pub struct Flow {
    /// Takes HTTP/1.1's framing off.
    decoder: BodyDecoder,
    /// How it goes out on HTTP/1.1.
    framing: Framing,
    limits: HeadLimits,
    /// Bytes of content so far.
    pub bytes: u64,
    /// All content so far, to be sent again; `None` once it is too much.
    kept: Option<Vec<u8>>,
    /// As much as is kept: all, while it is collected.
    keeps: usize,
    /// Some of it cannot be sent again.
    lost: bool,
    /// How much of the content this receiver has got.
    given: usize,
    /// A piece that has been read and waits for room.
    waiting: Bytes,
    /// Content that an HTTP/2 sender does not know to be handed on.
    owed: usize,
    /// All content has been read.
    read: bool,
    /// The fields after the content.
    trailers: Option<Headers>,
    /// The end has been handed to the receiver.
    ended: bool,
    /// What is done to content on its way.
    through: Option<Box<Through>>,
}

/// Which end broke off, and what was wrong.
#[derive(Debug)]
pub enum Broken {
    /// The sender closed too early or the connection failed.
    Sender,
    /// The sender's bytes are not what they should be.
    Malformed,
    /// Writing failed.
    Receiver,
}

impl Flow {
    /// A body that comes in as `from` and goes out as `to`. `keep` remembers it for another try.
    pub fn new(from: Framing, to: Framing, limits: HeadLimits, keep: bool) -> Self {
        let none = from == Framing::None;
        Self {
            decoder: BodyDecoder::new(from),
            framing: to,
            limits,
            bytes: 0,
            kept: keep.then(Vec::new),
            keeps: KEPT,
            lost: false,
            given: 0,
            waiting: Bytes::new(),
            owed: 0,
            read: none,
            trailers: None,
            ended: none,
            through: None,
        }
    }

    /// A body of our own, all of which is there.
    #[inline]
    pub fn whole(content: &[u8], framing: Framing, trailers: Option<Headers>) -> Self {
        let limits = HeadLimits { max_head: 0, max_headers: 0 };
        Self {
            framing,
            bytes: content.len() as u64,
            waiting: Bytes::copy_from_slice(content),
            ended: content.is_empty() && trailers.is_none() && framing != Framing::Chunked,
            trailers,
            ..Self::new(Framing::None, Framing::None, limits, false)
        }
    }

    /// Changes content on its way, whose length is not known then.
    #[inline]
    pub fn lead(&mut self, through: Through) {
        if matches!(self.framing, Framing::Length(_)) {
            self.framing = Framing::Chunked;
        }
        self.through = Some(Box::new(through));
    }

    /// Whether all of the body has been read and handed to the receiver.
    #[inline]
    pub fn is_read(&self) -> bool {
        self.ended
    }

    /// Whether all of it has been read.
    #[inline]
    pub fn is_collected(&self) -> bool {
        self.read
    }

    /// Whether all of the body is here, be it handed on or waiting to be.
    #[inline]
    pub fn has_arrived(&self, from: &Wire) -> bool {
        self.read
            || match from {
                Wire::Http1(from) => self.decoder.left().is_some_and(|left| left <= from.input.len() as u64),
                Wire::Http2(from) => from.is_end(),
            }
    }

    /// The content so far, if it is all still there.
    #[inline]
    pub fn kept(&self) -> Option<&[u8]> {
        self.kept.as_deref()
    }

    /// The fields after the content, once all of it has been read.
    #[inline]
    pub fn trailers(&self) -> Option<&Headers> {
        self.trailers.as_ref().or_else(|| self.through.as_ref()?.trailers())
    }

    /// Whether all that was taken of the body so far could be sent again.
    #[inline]
    pub fn is_whole(&self) -> bool {
        !self.lost
    }

    /// How it goes out on HTTP/1.1.
    #[inline]
    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// Stops keeping what is sent.
    #[inline]
    pub fn forget(&mut self) {
        self.lost |= self.kept.take().is_some();
    }

    /// Begins again with what is kept: another receiver gets it all.
    #[inline]
    pub fn begin_again(&mut self) {
        self.given = 0;
        self.waiting = Bytes::new();
        self.ended = self.read && self.framing == Framing::None;
    }

    /// Moves what can be moved; ready when the receiver has the whole body (and whatever else it had to write).
    pub fn poll(&mut self, cx: &mut Context<'_>, from: &mut Wire, to: &mut Wire) -> Poll<Result<(), Broken>> {
        if let (Wire::Http1(from), Wire::Http1(to), None) = (&mut *from, &mut *to, &self.through) {
            return self.poll_copy(cx, from, to);
        }
        loop {
            self.release(from);
            if !self.ended {
                if self.waiting.is_empty() {
                    self.waiting = ready!(self.poll_piece(cx, from))?;
                }
                ready!(self.poll_give(cx, to))?;
                continue;
            }
            ready!(to.poll_flush(cx)).map_err(|_| Broken::Receiver)?;
            return Poll::Ready(Ok(()));
        }
    }

    /// Moves a body that is there as a whole; ready when the receiver has it.
    #[inline]
    pub fn poll_send(&mut self, cx: &mut Context<'_>, to: &mut Wire) -> Poll<Result<(), Broken>> {
        if !self.ended {
            ready!(self.poll_give(cx, to))?;
        }
        to.poll_flush(cx).map_err(|_| Broken::Receiver)
    }

    /// Reads it to its end, or until there is more than `most`, for [`Self::kept`] and [`Self::trailers`].
    #[inline]
    pub fn poll_collect(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Wire,
        most: usize,
    ) -> Poll<Result<(), Broken>> {
        self.keeps = usize::MAX;
        while !self.read && self.bytes <= most as u64 {
            self.given += ready!(self.poll_piece(cx, from))?.len();
            self.release(from);
        }
        self.keeps = KEPT;
        Poll::Ready(Ok(()))
    }

    /// Reads and throws away what has arrived; true if that is the end of the body. The end of an HTTP/2 stream
    /// is no concern of those that follow it.
    #[inline]
    pub fn skip(&mut self, from: &mut Wire) -> bool {
        let Wire::Http1(from) = from else { return true };
        while !self.decoder.is_done() && !from.input.is_empty() {
            let Ok(piece) = self.decoder.next(from.input.bytes(), &self.limits) else { return false };
            from.input.consume(piece.skip + piece.data);
        }
        self.decoder.is_done()
    }

    /// Both ends are HTTP/1.1.
    fn poll_copy(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut Stream,
        to: &mut Stream,
    ) -> Poll<Result<(), Broken>> {
        loop {
            self.copy(from, to)?;
            if !to.output.is_empty() {
                ready!(to.poll_flush(cx)).map_err(|_| Broken::Receiver)?;
            }
            if self.ended {
                return Poll::Ready(Ok(()));
            }
            if from.input.is_empty() {
                ready!(self.poll_fill(cx, from))?;
            }
        }
    }

    fn copy(&mut self, from: &mut Stream, to: &mut Stream) -> Result<(), Broken> {
        if let Some(kept) = &self.kept {
            write::data(&mut to.output, self.framing, &kept[self.given..]);
            self.given = kept.len();
        }
        while !self.read && !from.input.is_empty() && to.output.len() < BLOCK {
            let bytes = from.input.bytes();
            let piece = self.decoder.next(bytes, &self.limits).map_err(|_| Broken::Malformed)?;
            let data = &bytes[piece.skip..piece.skip + piece.data];
            write::data(&mut to.output, self.framing, data);
            self.bytes += data.len() as u64;
            keep(&mut self.kept, &mut self.lost, data, KEPT);
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

    /// Reads from a connection. The body may end with it.
    fn poll_fill(&mut self, cx: &mut Context<'_>, from: &mut Stream) -> Poll<Result<(), Broken>> {
        if ready!(from.poll_fill(cx)).map_err(|_| Broken::Sender)? > 0 {
            return Poll::Ready(Ok(()));
        }
        Poll::Ready(if self.decoder.close() { self.note_end() } else { Err(Broken::Sender) })
    }

    fn note_end(&mut self) -> Result<(), Broken> {
        self.trailers = self.decoder.trailers(&self.limits).map_err(|_| Broken::Malformed)?;
        self.read = true;
        Ok(())
    }

    /// The next piece; empty at the end.
    fn poll_piece(&mut self, cx: &mut Context<'_>, from: &mut Wire) -> Poll<Result<Bytes, Broken>> {
        if let Some(kept) = self.kept.as_ref().filter(|kept| self.given < kept.len()) {
            return Poll::Ready(Ok(Bytes::copy_from_slice(&kept[self.given..])));
        }
        while !self.read {
            let piece = match from {
                Wire::Http1(from) => {
                    let bytes = from.input.bytes();
                    let piece = self.decoder.next(bytes, &self.limits).map_err(|_| Broken::Malformed)?;
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
                    let piece = ready!(from.poll_piece(cx)).map_err(|_| Broken::Sender)?;
                    if piece.is_none() {
                        self.trailers = from.trailers();
                    }
                    // An end that is known goes with the content, which saves a frame.
                    self.read = piece.is_none() || from.is_end();
                    let data = piece.unwrap_or_default();
                    self.owed += data.len();
                    data
                }
            };
            self.bytes += piece.len() as u64;
            let piece = match &mut self.through {
                Some(through) => {
                    through.piece(piece, self.read, &mut self.trailers).map_err(|_| Broken::Malformed)?
                }
                None => piece,
            };
            keep(&mut self.kept, &mut self.lost, &piece, self.keeps);
            if !piece.is_empty() {
                return Poll::Ready(Ok(piece));
            }
        }
        Poll::Ready(Ok(Bytes::new()))
    }

    /// Hands the waiting piece on, and the end if nothing follows.
    fn poll_give(&mut self, cx: &mut Context<'_>, to: &mut Wire) -> Poll<Result<(), Broken>> {
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
                ready!(to.poll_flush(cx)).map_err(|_| Broken::Receiver)?;
            }
            Wire::Http2(to) => {
                let gone = |_| Broken::Receiver;
                while !self.waiting.is_empty() {
                    let room = ready!(to.poll_room(cx, self.waiting.len())).map_err(gone)?;
                    let last = all && self.trailers.is_none() && room == self.waiting.len();
                    to.send(&self.waiting.split_to(room), last).map_err(gone)?;
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
                    .map_err(gone)?;
                    self.ended = true;
                }
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Tells an HTTP/2 sender that there is room again for what has been handed on.
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

/// Keeps what was read for another try, unless it is too much.
fn keep(kept: &mut Option<Vec<u8>>, lost: &mut bool, data: &[u8], most: usize) {
    if let Some(known) = kept {
        if known.len() + data.len() > most {
            *kept = None;
            *lost = true;
        } else {
            known.extend_from_slice(data);
        }
    }
}
