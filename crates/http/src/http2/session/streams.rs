//! Streams, as those see them who use them.

use std::task::{Context, Poll};

use bytes::Bytes;

use super::{GONE, Lost, OUT, READ, ROOM, Role, Session, StreamState};
use crate::{
    head::{Headers, RequestHead, ResponseHead},
    http2::{
        frame::{self, Reason},
        heads,
    },
};

/// An id of no stream is one that is lost.
impl Session {
    /// Opens a stream with a request. `None` if HTTP/2 cannot carry the head.
    pub(crate) fn request(
        &mut self,
        head: &RequestHead,
        end: bool,
        upgrade: bool,
    ) -> Option<Result<u32, Lost>> {
        if !self.is_usable() || self.open as usize >= self.capacity() {
            return Some(Err(self.lost.clone().unwrap_or(Lost::Unprocessed)));
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

    /// The next head of the answer, in place of `head`; whether it is the last, and how long its content is.
    pub(crate) fn poll_answer(
        &mut self,
        cx: &Context<'_>,
        id: u32,
        head: &mut ResponseHead,
    ) -> Poll<Result<Option<Option<u64>>, Lost>> {
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(Err(Lost::Dropped)) };
        let (next, last) = match stream.interim.pop_front() {
            Some(next) => (next, None),
            None => match (stream.answer.take(), &stream.lost) {
                (Some((next, length)), _) => (next, Some(length)),
                (None, Some(lost)) => return Poll::Ready(Err(lost.clone())),
                (None, None) => {
                    stream.wait(cx, READ);
                    return Poll::Pending;
                }
            },
        };
        std::mem::replace(head, next).recycle();
        Poll::Ready(Ok(last))
    }

    /// Sends an answer's head; false if the stream is lost.
    pub(crate) fn respond(&mut self, id: u32, head: &ResponseHead, interim: bool, end: bool) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.lost.is_some() || stream.sent {
            return false;
        }
        stream.sent = end;
        self.block.clear();
        heads::answer(&mut self.encoder, &mut self.block, head);
        frame::headers(&mut self.out, id, end, &self.block, self.peer.frame);
        if end && !interim {
            self.settle(id);
        }
        true
    }

    /// Whether all that the peer sends has been taken.
    pub(crate) fn is_end(&self, id: u32) -> bool {
        self.streams.get(&id).is_none_or(|stream| {
            stream.received && stream.lost.is_none() && stream.content.is_empty() && stream.trailers.is_none()
        })
    }

    /// The next piece of content; `None` at its end.
    pub(crate) fn poll_piece(&mut self, cx: &Context<'_>, id: u32) -> Poll<Result<Option<Bytes>, Lost>> {
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(Err(Lost::Dropped)) };
        if !stream.content.is_empty() {
            return Poll::Ready(Ok(Some(std::mem::take(&mut stream.content).into())));
        }
        match &stream.lost {
            _ if stream.received && stream.headed => Poll::Ready(Ok(None)),
            Some(lost) => Poll::Ready(Err(lost.clone())),
            None => {
                stream.wait(cx, READ);
                Poll::Pending
            }
        }
    }

    /// What follows the content, all of which has been taken.
    pub(crate) fn trailers(&mut self, id: u32) -> Option<Headers> {
        self.streams.get_mut(&id)?.trailers.take()
    }

    /// So much content has been handed on.
    pub(crate) fn release(&mut self, id: u32, count: usize) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let count = u32::try_from(count).unwrap_or(u32::MAX).min(stream.held);
        stream.held -= count;
        stream.owed += count;
        if stream.owed >= self.limits.options.stream_window / 2 && !stream.received && stream.lost.is_none() {
            frame::window_update(&mut self.out, id, stream.owed);
            stream.receive_window += i64::from(std::mem::take(&mut stream.owed));
        }
        self.credit(count);
    }

    /// How much of `want` may be sent now; `None` if no more can be.
    pub(crate) fn poll_room(&mut self, cx: &Context<'_>, id: u32, want: usize) -> Poll<Option<usize>> {
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(None) };
        if stream.lost.is_some() || stream.sent {
            return Poll::Ready(None);
        }
        let shared = if self.out.len() < OUT { self.send_window } else { 0 };
        let room = usize::try_from(shared.min(stream.send_window)).unwrap_or(0).min(want).min(OUT);
        if room > 0 {
            return Poll::Ready(Some(room));
        }
        stream.wait(cx, ROOM);
        stream.want = want;
        if shared <= 0 && !stream.stalled {
            stream.stalled = true;
            self.stalled.push_back(id);
        }
        Poll::Pending
    }

    /// Whether there is room for a head that can wait, which an answer's own cannot. Nothing is waited for on a stream on
    /// which nothing can be sent.
    pub(crate) fn poll_space(&mut self, cx: &Context<'_>, id: u32) -> Poll<()> {
        let Some(stream) = self.streams.get_mut(&id) else { return Poll::Ready(()) };
        if self.out.len() < OUT || stream.lost.is_some() || stream.sent {
            return Poll::Ready(());
        }
        stream.wait(cx, ROOM);
        if !stream.crowded {
            stream.crowded = true;
            self.crowded.push_back(id);
        }
        Poll::Pending
    }

    /// Sends content for which there is room; false if the stream is lost.
    pub(crate) fn send(&mut self, id: u32, mut data: &[u8], end: bool) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.lost.is_some() || stream.sent {
            return false;
        }
        // What a peer may say about how much it has taken; Envoy lets it do so ten times a frame.
        self.chatter.give(10);
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
        self.chatter.give(1);
        if end {
            self.settle(id);
        }
        true
    }

    /// Sends what follows the content, and the end; false if the stream is lost.
    pub(crate) fn send_trailers(&mut self, id: u32, trailers: &Headers) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.lost.is_some() || stream.sent {
            return false;
        }
        stream.sent = true;
        self.block.clear();
        heads::trailers(&mut self.encoder, &mut self.block, trailers);
        frame::headers(&mut self.out, id, true, &self.block, self.peer.frame);
        self.settle(id);
        true
    }

    /// Whether the stream is lost; if not, the task is told when it is.
    pub(crate) fn is_gone(&mut self, cx: &Context<'_>, id: u32) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return true };
        if stream.lost.is_none() {
            stream.wait(cx, GONE);
        }
        stream.lost.is_some()
    }

    /// Gives the stream up.
    pub(crate) fn reset(&mut self, id: u32, reason: Reason) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.lost.is_none()
        {
            stream.lost = Some(Lost::Dropped);
            // Both ends know already that it is over.
            if !stream.closed {
                frame::reset(&mut self.out, id, reason);
            }
            self.settle(id);
        }
    }

    /// Nobody uses the stream any more. What has not come to its end is given up.
    pub(crate) fn forget(&mut self, id: u32) {
        let Some(stream) = self.streams.get(&id) else { return };
        let answered = self.role == Role::Server && stream.sent;
        if stream.closed && stream.lost.is_none() {
            self.resets.give(1);
        }
        self.reset(id, if answered { Reason::NONE } else { Reason::CANCEL });
        if let Some(stream) = self.streams.remove(&id) {
            self.credit(stream.held);
            if !stream.received {
                self.past.add(id, matches!(stream.lost, Some(Lost::Reset(_))));
            }
        }
        if self.streams.is_empty() {
            self.emptied = true;
        }
    }
}
