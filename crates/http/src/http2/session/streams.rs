//! Operations on streams for their users.

use std::task::{Context, Poll};

use bytes::Bytes;

use super::{GONE, OUT, READ, ROOM, Role, Session, StreamError, StreamState};
use crate::{
    buffer::Buffer,
    head::{Headers, RequestHead, ResponseHead},
    http2::{
        frame::{self, Reason},
        heads,
    },
};

/// Operations on an unknown stream id fail like those on a lost stream.
impl Session {
    /// Opens a stream with a request. Returns `None` if HTTP/2 cannot represent the head.
    pub(crate) fn request(
        &mut self,
        head: &RequestHead,
        end: bool,
        upgrade: bool,
    ) -> Option<Result<u32, StreamError>> {
        if !self.is_usable() || self.open as usize >= self.capacity() {
            return Some(Err(self.error.clone().unwrap_or(StreamError::Unprocessed)));
        }
        self.block.clear();
        if !heads::request(&mut self.encoder, &mut self.block, head, upgrade) {
            return None;
        }
        let id = self.last;
        self.last += 2;
        frame::headers(&mut self.out, id, end, &self.block, self.peer.frame);
        let mut stream = self.stream();
        (stream.sent, stream.head_only) = (end, head.method() == "HEAD");
        self.streams.insert(id, stream);
        self.open += 1;
        Some(Ok(id))
    }

    pub(super) fn stream(&self) -> StreamState {
        StreamState {
            receive_window: i64::from(self.limits.options.stream_window),
            send_window: self.peer.window,
            ..StreamState::default()
        }
    }

    /// Waits for the next head of the response and replaces `head`. Returns the content length (if known) with the
    /// final head, and `None` with an interim one.
    pub(crate) fn poll_answer(
        &mut self,
        cx: &Context<'_>,
        id: u32,
        head: &mut ResponseHead,
    ) -> Poll<Result<Option<Option<u64>>, StreamError>> {
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(Err(StreamError::Dropped)) };
        let (next, last) = match stream.interim.pop_front() {
            Some(next) => (next, None),
            None => match (stream.answer.take(), &stream.error) {
                (Some((next, length)), _) => (next, Some(length)),
                (None, Some(error)) => return Poll::Ready(Err(error.clone())),
                (None, None) => {
                    stream.wait(cx, READ);
                    return Poll::Pending;
                }
            },
        };
        std::mem::replace(head, next).recycle();
        Poll::Ready(Ok(last))
    }

    /// Sends the head of a response; returns false if the stream is lost.
    pub fn respond(&mut self, id: u32, head: &ResponseHead, interim: bool, end: bool) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.error.is_some() || stream.sent {
            return false;
        }
        stream.sent = end;
        self.block.clear();
        heads::answer(&mut self.encoder, &mut self.block, head);
        frame::headers(&mut self.out, id, end, &self.block, self.peer.frame);
        if end && !interim {
            self.close_if_ended(id);
        }
        true
    }

    /// Returns whether everything that the peer sends has been taken.
    pub(crate) fn is_end(&self, id: u32) -> bool {
        self.streams.get(&id).is_none_or(|stream| {
            stream.received
                && stream.error.is_none()
                && stream.content.is_empty()
                && stream.trailers.is_none()
        })
    }

    /// Returns whether the peer has sent everything, even if a part has not been taken.
    pub(crate) fn has_arrived(&self, id: u32) -> bool {
        self.streams.get(&id).is_none_or(|stream| stream.received && stream.error.is_none())
    }

    /// Returns the next piece of content; `None` at the end.
    pub fn poll_piece(&mut self, cx: &Context<'_>, id: u32) -> Poll<Result<Option<Bytes>, StreamError>> {
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(Err(StreamError::Dropped)) };
        if !stream.content.is_empty() {
            return Poll::Ready(Ok(Some(std::mem::take(&mut stream.content).into())));
        }
        match &stream.error {
            _ if stream.received && stream.headed => Poll::Ready(Ok(None)),
            Some(error) => Poll::Ready(Err(error.clone())),
            None => {
                stream.wait(cx, READ);
                Poll::Pending
            }
        }
    }

    /// Returns the trailers, after all content has been taken.
    pub(crate) fn trailers(&mut self, id: u32) -> Option<Headers> {
        self.streams.get_mut(&id)?.trailers.take()
    }

    /// Records content as passed on; sends a window update when enough is due.
    pub fn release(&mut self, id: u32, count: usize) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let count = u32::try_from(count).unwrap_or(u32::MAX).min(stream.held);
        stream.held -= count;
        stream.owed += count;
        if stream.owed >= self.limits.options.stream_window / 2 && !stream.received && stream.error.is_none()
        {
            frame::window_update(&mut self.out, id, stream.owed);
            stream.receive_window += i64::from(std::mem::take(&mut stream.owed));
        }
        self.credit(count);
    }

    /// Returns how much of `want` can be sent now; `None` if the stream accepts no more.
    pub fn room(&self, id: u32, want: usize) -> Option<usize> {
        let stream = self.streams.get(&id).filter(|stream| stream.error.is_none() && !stream.sent)?;
        let room = usize::try_from(self.shared_room().min(stream.send_window)).unwrap_or(0);
        Some(room.min(want).min(OUT))
    }

    /// Returns how much all streams together can send now.
    fn shared_room(&self) -> i64 {
        if self.out.len() < OUT { self.send_window } else { 0 }
    }

    /// Waits until content can be sent; returns the number of bytes, at most `want`, and `None` if the stream accepts no
    /// more.
    pub fn poll_room(&mut self, cx: &Context<'_>, id: u32, want: usize) -> Poll<Option<usize>> {
        let room = self.room(id, want);
        if room != Some(0) {
            return Poll::Ready(room);
        }
        let shared = self.shared_room();
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(None) };
        stream.wait(cx, ROOM);
        stream.want = want;
        if shared <= 0 && !stream.stalled {
            stream.stalled = true;
            self.stalled.push_back(id);
        }
        Poll::Pending
    }

    /// Waits for space for a head that can wait; the head of a final response cannot. Does not wait on a stream that
    /// can send nothing.
    pub(crate) fn poll_space(&mut self, cx: &Context<'_>, id: u32) -> Poll<()> {
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(()) };
        if self.out.len() < OUT || stream.error.is_some() || stream.sent {
            return Poll::Ready(());
        }
        stream.wait(cx, ROOM);
        if !stream.crowded {
            stream.crowded = true;
            self.crowded.push_back(id);
        }
        Poll::Pending
    }

    /// Sends content for which there is space; returns false if the stream is lost.
    pub(crate) fn send(&mut self, id: u32, mut data: &[u8], end: bool) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.error.is_some() || stream.sent {
            return false;
        }
        // Allowance for the peer's window updates: ten per frame, as in Envoy.
        self.useless_frames.give(10);
        stream.send_window -= data.len() as i64;
        self.send_window -= data.len() as i64;
        stream.sent = end;
        loop {
            let (piece, rest) = data.split_at(data.len().min(self.peer.frame));
            let flags = if end && rest.is_empty() { frame::END_STREAM } else { 0 };
            frame::head(&mut self.out, frame::FrameKind::Data, flags, id, piece.len());
            self.out.extend(piece);
            if rest.is_empty() {
                break;
            }
            data = rest;
        }
        self.useless_frames.give(1);
        if end {
            self.close_if_ended(id);
        }
        true
    }

    /// Sends a frame of content, which `fill` appends to the output: at most the number of bytes that it is called with.
    /// There must be space for `room` bytes ([`Self::poll_room`]). Returns the length of the content; `None` if the
    /// stream is lost.
    pub fn send_frame(
        &mut self,
        id: u32,
        room: usize,
        fill: impl FnOnce(&mut Buffer, usize),
    ) -> Option<usize> {
        let stream = self.streams.get_mut(&id).filter(|stream| stream.error.is_none() && !stream.sent)?;
        let (begin, room) = (self.out.len(), room.min(self.peer.frame));
        frame::head(&mut self.out, frame::FrameKind::Data, 0, id, 0);
        fill(&mut self.out, room);
        let length = self.out.len() - begin - frame::HEAD;
        debug_assert!(length <= room, "content of {length} bytes for {room}");
        frame::set_length(&mut self.out.bytes_mut()[begin..], length);
        stream.send_window -= length as i64;
        self.send_window -= length as i64;
        // Allowance for the peer's window updates: ten per frame, as in Envoy.
        self.useless_frames.give(11);
        Some(length)
    }

    /// Sends trailers and the end of the stream; returns false if the stream is lost.
    pub fn send_trailers(&mut self, id: u32, trailers: &Headers) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.error.is_some() || stream.sent {
            return false;
        }
        stream.sent = true;
        self.block.clear();
        heads::trailers(&mut self.encoder, &mut self.block, trailers);
        frame::headers(&mut self.out, id, true, &self.block, self.peer.frame);
        self.close_if_ended(id);
        true
    }

    /// Returns whether the stream is lost; if not, wakes the task when it is.
    pub(crate) fn is_closed(&mut self, cx: &Context<'_>, id: u32) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return true };
        if stream.error.is_none() {
            stream.wait(cx, GONE);
        }
        stream.error.is_some()
    }

    /// Resets the stream.
    pub fn reset(&mut self, id: u32, reason: Reason) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.error.is_none()
        {
            stream.error = Some(StreamError::Dropped);
            // After a complete stream, both sides know the end.
            if !stream.closed {
                frame::reset(&mut self.out, id, reason);
            }
            self.close_if_ended(id);
        }
    }

    /// Releases a stream that is no longer used. An incomplete stream is reset.
    pub fn forget(&mut self, id: u32) {
        let Some(stream) = self.streams.get(&id) else { return };
        let answered = self.role == Role::Server && stream.sent;
        if stream.closed && stream.error.is_none() {
            self.resets.give(1);
        }
        self.reset(id, if answered { Reason::NONE } else { Reason::CANCEL });
        if let Some(stream) = self.streams.remove(&id) {
            self.credit(stream.held);
            if !stream.received {
                self.removed.add(id, matches!(stream.error, Some(StreamError::Reset(_))));
            }
        }
        if self.streams.is_empty() {
            self.emptied = true;
        }
    }
}
