//! Processing of received frames.

use super::{
    GONE, INTERIM, LateFrame, READ, REPLIES, ROOM, Request, Role, Session, ShutdownState, StreamError,
    StreamState,
};
use crate::{
    buffer::Buffer,
    head::{Headers, RequestHead, ResponseHead, Version},
    http2::{
        frame::{
            self, ACK, END_HEADERS, END_STREAM, FrameKind, HEAD, Head, MAX_FRAME, PADDED, PREFACE, Reason,
        },
        heads::{HeadError, HeadReader, Target},
    },
};

/// Maximum number of frames of a header block. Valid heads need far fewer.
const CONTINUATIONS: u32 = 64;
/// Number of streams that can be visited in the time of one useless frame.
const STREAMS_PER_FRAME: u32 = 32;

/// A content frame in progress.
pub(super) struct Data {
    stream: u32,
    /// Remaining content.
    left: usize,
    /// Padding after it.
    padding: usize,
    end: bool,
}

/// A header block in progress.
pub(super) struct Block {
    stream: u32,
    end: bool,
    bytes: Vec<u8>,
    frames: u32,
}

/// A connection error.
pub(super) type Fatal = Reason;

impl Session {
    /// Processes as much of `input` as possible, and makes space in it for the rest of an incomplete frame.
    ///
    /// # Errors
    /// The connection cannot continue.
    pub fn feed(&mut self, input: &mut Buffer) -> Result<(), Fatal> {
        if self.preface {
            let seen = input.len().min(PREFACE.len());
            if input.bytes()[..seen] != PREFACE[..seen] {
                return Err(Reason::PROTOCOL);
            }
            if seen < PREFACE.len() {
                return Ok(());
            }
            input.consume(seen);
            self.preface = false;
        }
        loop {
            if self.data.is_some() && !self.data(input)? {
                return Ok(());
            }
            let Some(head) = Head::read(input.bytes()) else { return Ok(()) };
            if head.length > MAX_FRAME {
                return Err(Reason::FRAME_SIZE);
            }
            let expected = match (&self.partial, self.peer.settled) {
                (Some(block), _) => head.kind == FrameKind::Continuation && head.stream == block.stream,
                (None, false) => head.kind == FrameKind::Settings && !head.has(ACK),
                (None, true) => head.kind != FrameKind::Continuation,
            };
            if !expected {
                return Err(Reason::PROTOCOL);
            }
            if head.kind == FrameKind::Data {
                let begin = HEAD + usize::from(head.has(PADDED));
                let Some(padding) = input.bytes().get(HEAD..begin) else { return Ok(()) };
                let padding = padding.first().map(|padding| usize::from(*padding));
                input.consume(begin);
                let taken = self.begin_data(&head, padding);
                if taken == Err(Reason::ENHANCE_YOUR_CALM) {
                    self.exceeding_frame = Some(head.kind);
                }
                taken?;
                self.frames += 1;
                continue;
            }
            let total = HEAD + head.length;
            if input.len() < total {
                if input.is_full() {
                    input.grow(total);
                }
                return Ok(());
            }
            let taken = self.frame(&head, &input.bytes()[HEAD..total]);
            if taken == Err(Reason::ENHANCE_YOUR_CALM) {
                self.exceeding_frame = Some(head.kind);
            }
            taken?;
            input.consume(total);
            self.frames += u64::from(self.partial.is_none());
        }
    }

    fn frame(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        match head.kind {
            FrameKind::Headers => self.headers(head, payload),
            FrameKind::Continuation => self.continuation(head, payload),
            FrameKind::Settings => self.settings(head, payload),
            FrameKind::WindowUpdate => self.window_update(head, payload),
            FrameKind::Reset => self.reset_by_peer(head, payload),
            FrameKind::Ping => self.ping(head, payload),
            FrameKind::GoAway => self.go_away(head, payload),
            FrameKind::PushPromise => Err(Reason::PROTOCOL),
            FrameKind::Priority if head.stream == 0 => Err(Reason::PROTOCOL),
            FrameKind::Priority if payload.len() != 5 => Err(Reason::FRAME_SIZE),
            // Priorities are ignored, but a stream cannot depend on itself (RFC 7540, section 5.3.1).
            FrameKind::Priority if frame::number(payload)? & 0x7fff_ffff == head.stream => {
                Err(Reason::PROTOCOL)
            }
            FrameKind::Priority | FrameKind::Unknown | FrameKind::Data => self.count_useless_frame(),
        }
    }

    /// Counts a useless frame.
    pub(super) fn count_useless_frame(&mut self) -> Result<(), Fatal> {
        if self.useless_frames.take(1) { Ok(()) } else { Err(Reason::ENHANCE_YOUR_CALM) }
    }

    /// Counts a frame for which every stream is visited. The cost is the number of useless frames that take the same
    /// time. It is capped, so that a peer may always send a few.
    pub(super) fn count_stream_visits(&mut self) -> Result<(), Fatal> {
        let streams = u32::try_from(self.streams.len()).unwrap_or(u32::MAX);
        let cost = (streams / STREAMS_PER_FRAME).min(self.limits.options.useless_frames / 4);
        if self.useless_frames.take(cost) { Ok(()) } else { Err(Reason::ENHANCE_YOUR_CALM) }
    }

    /// Counts a frame that requires a response.
    pub(super) fn count_reply(&mut self) -> Result<(), Fatal> {
        self.replies += 1;
        if self.replies > REPLIES { Err(Reason::ENHANCE_YOUR_CALM) } else { self.count_useless_frame() }
    }

    /// Returns whether the peer cannot have opened this stream.
    pub(super) fn is_idle(&self, stream: u32) -> bool {
        stream.is_multiple_of(2)
            || match self.role {
                Role::Server => stream > self.last,
                Role::Client => stream >= self.last,
            }
    }

    /// Handles a frame on a removed stream.
    fn late(&mut self, id: u32) -> Result<(), Fatal> {
        let late = match self.streams.get(&id).map(|stream| &stream.error) {
            None => self.removed.late(id),
            Some(Some(StreamError::Reset(_))) => LateFrame::Refused,
            Some(_) => LateFrame::Ignored,
        };
        match late {
            LateFrame::Ignored => Ok(()),
            LateFrame::Refused => self.break_stream(id, Reason::STREAM_CLOSED),
            LateFrame::Fatal => Err(Reason::STREAM_CLOSED),
        }
    }

    /// Ends a stream with a stream error. A peer that causes too many is disconnected.
    pub(super) fn break_stream(&mut self, id: u32, reason: Reason) -> Result<(), Fatal> {
        frame::reset(&mut self.out, id, reason);
        // A stream that was never accepted. One that the peer has reset stays recorded as such.
        if !self.streams.contains_key(&id) && self.removed.late(id) == LateFrame::Fatal {
            self.removed.add(id, false);
        }
        self.close_stream(id, StreamError::Broken(reason));
        self.replies += 1;
        if self.replies > REPLIES || !self.resets.take(1) { Err(Reason::ENHANCE_YOUR_CALM) } else { Ok(()) }
    }

    pub(super) fn close_stream(&mut self, id: u32, why: StreamError) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.error.get_or_insert(why);
            stream.wake(READ | ROOM | GONE, &mut self.wakes);
            self.close_if_ended(id);
        }
    }

    fn begin_data(&mut self, head: &Head, padding: Option<usize>) -> Result<(), Fatal> {
        if self.is_idle(head.stream) {
            return Err(Reason::PROTOCOL);
        }
        // The padding length is a byte of its own, which also counts.
        let extra = padding.map_or(0, |padding| padding + 1);
        let left = head.length.checked_sub(extra).ok_or(Reason::PROTOCOL)?;
        self.receive_window -= head.length as i64;
        if self.receive_window < 0 {
            return Err(Reason::FLOW_CONTROL);
        }
        let end = head.has(END_STREAM);
        if left == 0 && !end {
            self.count_useless_frame()?;
        }
        self.data = Some(Data { stream: head.stream, left, padding: extra.saturating_sub(1), end });
        self.credit(extra as u32);
        let Some(stream) = self.streams.get_mut(&head.stream).filter(|stream| stream.error.is_none()) else {
            return self.late(head.stream);
        };
        stream.receive_window -= head.length as i64;
        stream.owed += extra as u32;
        let enough = stream.left.is_none_or(|known| known >= left as u64);
        let wrong = if stream.received {
            Some(Reason::STREAM_CLOSED)
        } else if !stream.headed || !enough {
            Some(Reason::PROTOCOL)
        } else {
            (stream.receive_window < 0).then_some(Reason::FLOW_CONTROL)
        };
        match wrong {
            Some(reason) => self.break_stream(head.stream, reason),
            None => Ok(()),
        }
    }

    /// Processes content; returns true when the frame is complete.
    fn data(&mut self, input: &mut Buffer) -> Result<bool, Fatal> {
        let Some(data) = &mut self.data else { return Ok(true) };
        let bytes = input.bytes();
        let count = data.left.min(bytes.len());
        data.left -= count;
        let (left, id) = (data.left, data.stream);
        if count > 0 {
            match self.streams.get_mut(&id).filter(|stream| stream.error.is_none()) {
                Some(stream) => {
                    if stream.content.is_empty() {
                        stream.content.reserve_exact(count);
                    }
                    stream.content.extend_from_slice(&bytes[..count]);
                    stream.held += count as u32;
                    stream.left = stream.left.map(|left| left.saturating_sub(count as u64));
                    stream.wake(READ, &mut self.wakes);
                    self.useless_frames.give(1);
                }
                None => self.credit(count as u32),
            }
            input.consume(count);
        }
        let Some(data) = &mut self.data else { return Ok(true) };
        if left == 0 {
            let skipped = data.padding.min(input.len());
            data.padding -= skipped;
            input.consume(skipped);
            if data.padding == 0 {
                let end = data.end;
                self.data = None;
                if end {
                    self.end(id)?;
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Handles the end of the peer's side of a stream.
    fn end(&mut self, id: u32) -> Result<(), Fatal> {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.error.is_none()) else {
            return Ok(());
        };
        if stream.left.is_some_and(|left| left > 0) {
            return self.break_stream(id, Reason::PROTOCOL);
        }
        stream.received = true;
        stream.wake(READ, &mut self.wakes);
        self.close_if_ended(id);
        Ok(())
    }

    fn headers(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        let new = self.role == Role::Server && head.stream > self.last && !head.stream.is_multiple_of(2);
        if self.is_idle(head.stream) && !new {
            return Err(Reason::PROTOCOL);
        }
        let content = frame::content(head, payload)?;
        let end = head.has(END_STREAM);
        if head.has(END_HEADERS) {
            return self.block(head.stream, end, content);
        }
        self.partial = Some(Block { stream: head.stream, end, bytes: content.to_vec(), frames: 0 });
        Ok(())
    }

    fn continuation(&mut self, head: &Head, payload: &[u8]) -> Result<(), Fatal> {
        let Some(mut block) = self.partial.take() else { return Err(Reason::PROTOCOL) };
        block.frames += 1;
        block.bytes.extend_from_slice(payload);
        // A head that exceeds the limit gets a response after it is complete, so that its size needs a bound of its
        // own.
        let max = self.limits.head.size.saturating_mul(2).saturating_add(MAX_FRAME);
        if block.frames > CONTINUATIONS || block.bytes.len() > max {
            return Err(Reason::ENHANCE_YOUR_CALM);
        }
        if head.has(END_HEADERS) {
            return self.block(block.stream, block.end, &block.bytes);
        }
        self.partial = Some(block);
        Ok(())
    }

    /// Processes a complete header block. It is decoded in every case, because later blocks depend on it.
    fn block(&mut self, id: u32, end: bool, block: &[u8]) -> Result<(), Fatal> {
        let state =
            self.streams.get(&id).map(|stream| (stream.error.is_some(), stream.received, stream.headed));
        match state {
            None if self.role == Role::Server && id > self.last => self.request_block(id, end, block),
            Some((false, false, false)) => self.answer_block(id, end, block),
            Some((false, false, true)) => self.trailer_block(id, end, block),
            Some((false, true, _)) => {
                self.read(Target::Nothing, block)?.ok();
                self.break_stream(id, Reason::STREAM_CLOSED)
            }
            _ => {
                self.read(Target::Nothing, block)?.ok();
                self.late(id)
            }
        }
    }

    fn read(&mut self, target: Target<'_>, block: &[u8]) -> Result<Result<Option<u64>, HeadError>, Fatal> {
        let mut reading =
            HeadReader::new(target, self.limits.head).connecting(self.limits.options.allow_connect);
        let decoded = self.decoder.decode(block, |name, value| reading.field(name, value));
        decoded.map_err(|_| Reason::COMPRESSION)?;
        Ok(reading.finish())
    }

    /// Starts with a request from an HTTP/1.1 upgrade, which is the first stream (RFC 7540, section 3.2). The preface
    /// follows.
    ///
    /// # Errors
    /// The settings are invalid.
    pub(crate) fn begin(&mut self, settings: &[u8], mut head: RequestHead) -> Result<(), Fatal> {
        self.adopt(settings)?;
        head.version = Version::Http2;
        head.remove("upgrade");
        self.last = 1;
        self.open += 1;
        let stream = StreamState { headed: true, received: true, ..self.stream() };
        self.streams.insert(1, stream);
        let (stream, length, end) = (1, None, true);
        self.accepted.push_back(Request { stream, head, length, end, upgrade: false, oversized: None });
        Ok(())
    }

    fn request_block(&mut self, id: u32, end: bool, block: &[u8]) -> Result<(), Fatal> {
        self.last = id;
        if self.leaving == ShutdownState::Final {
            // The peer knows that this stream is not processed.
            self.removed.add(id, false);
            return self.read(Target::Nothing, block).map(drop);
        }
        // Streams that the peer has reset count while they are still in use here.
        let held = self.streams.len() as u64;
        let max = self.limits.options.max_streams;
        if self.open >= max || held >= u64::from(max) * 2 + 64 {
            self.read(Target::Nothing, block)?.ok();
            self.refused += 1;
            return self.break_stream(id, Reason::REFUSED);
        }
        let mut head = RequestHead::spare();
        let read = self.read(Target::Request(&mut head), block)?;
        let (length, oversized) = match read {
            Ok(Some(1..)) if end => return self.break_stream(id, Reason::PROTOCOL),
            Ok(length) => (length, None),
            Err(HeadError::Malformed) => return self.break_stream(id, Reason::PROTOCOL),
            Err(fault) => {
                self.count_reply()?;
                (None, Some(fault))
            }
        };
        let stream = StreamState { headed: true, received: end, left: length, ..self.stream() };
        self.streams.insert(id, stream);
        self.open += 1;
        let upgrade = head.method() == "CONNECT" || head.has("upgrade");
        self.accepted.push_back(Request { stream: id, head, length, end, upgrade, oversized });
        if oversized.is_none() {
            self.useless_frames.give(1);
        }
        Ok(())
    }

    fn answer_block(&mut self, id: u32, end: bool, block: &[u8]) -> Result<(), Fatal> {
        let mut head = ResponseHead::spare();
        let read = self.read(Target::Answer(&mut head), block)?;
        let interim = matches!(head.status(), 100..=199);
        let Some(stream) = self.streams.get_mut(&id) else { return Ok(()) };
        let silent = stream.head_only || matches!(head.status(), 204 | 304);
        let length = match read {
            Ok(length) => length,
            Err(HeadError::Malformed) => return self.break_stream(id, Reason::PROTOCOL),
            Err(HeadError::TooLarge | HeadError::TooMany) => {
                self.close_stream(id, StreamError::Oversized);
                return self.break_stream(id, Reason::ENHANCE_YOUR_CALM);
            }
        };
        if interim {
            if end || head.status() == 101 {
                return self.break_stream(id, Reason::PROTOCOL);
            }
            // The client has not taken earlier interim responses; this one is dropped.
            if stream.interim.len() == INTERIM {
                head.recycle();
                return self.count_useless_frame();
            }
            stream.interim.push_back(head);
        } else {
            stream.left = if silent { None } else { length };
            stream.headed = true;
            stream.answer = Some((head, length));
        }
        stream.wake(READ, &mut self.wakes);
        self.useless_frames.give(1);
        if end { self.end(id) } else { Ok(()) }
    }

    fn trailer_block(&mut self, id: u32, end: bool, block: &[u8]) -> Result<(), Fatal> {
        let mut trailers = Headers::default();
        let read = self.read(Target::Trailers(&mut trailers), block)?;
        if !end || read.is_err() {
            return self.break_stream(id, Reason::PROTOCOL);
        }
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.trailers = Some(trailers);
        }
        self.end(id)
    }
}
