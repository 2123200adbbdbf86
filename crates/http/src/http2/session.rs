//! State of an HTTP/2 connection: streams, windows, settings and output. It does no IO and never waits, so that tests
//! and fuzz targets can feed it bytes.
//!
//! Input arrives through [`Session::feed`] (in `receive` and `control`); output is collected in `out`. The
//! functions in `streams` operate on a stream by its id. Content is added to `out` only as far as the windows
//! and `out` have space. Nothing is therefore queued for a peer that does not read.

mod budget;
mod control;
mod receive;
mod streams;

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Waker},
};

use super::{
    frame::{self, FIRST_WINDOW, MAX_FRAME, MAX_WINDOW, Reason},
    heads::{Bounds, HeadError},
    hpack::{Decoder, Encoder},
};
use crate::{
    buffer::Buffer,
    head::{Headers, RequestHead, ResponseHead},
    http2::Http2Options,
    map::Map,
};
use budget::Budget;
use receive::{Block, Data};

/// Limit of `out` in bytes for adding content. Heads and control frames may exceed it.
const OUT: usize = 64 * 1024;
/// Limit of `out` in bytes for opening streams. Above it, a server that does not read gets no more requests.
const STUCK: usize = 1024 * 1024;
/// Maximum number of unwritten frames that respond to frames (acknowledgements, resets).
const REPLIES: u32 = 2048;
/// Maximum number of interim responses (1xx) that wait for a stream's task; further ones are dropped.
const INTERIM: usize = 8;
/// Maximum stream id, which no stream uses.
const LAST_STREAM: u32 = 0x7fff_ffff;
/// Payload of keep-alive pings.
const ALIVE: [u8; 8] = *b"there? .";
/// Payload of the ping after GOAWAY. Its acknowledgement shows that the peer has received the GOAWAY.
const LEAVING: [u8; 8] = *b"leaving!";

/// Role of this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// This side opened the connection.
    Client,
    /// This side accepted the connection.
    Server,
}

/// Limits and settings of a connection.
#[derive(Clone, Copy, Debug)]
pub struct SessionLimits {
    /// Limits on each head.
    pub head: Bounds,
    /// Settings.
    pub options: Http2Options,
}

/// Reason for the loss of a stream or connection.
#[derive(Clone, Debug)]
pub enum StreamError {
    /// The peer reset the stream.
    Reset(Reason),
    /// The peer has not processed the stream.
    Unprocessed,
    /// The peer violated the protocol on the stream or the connection.
    Broken(Reason),
    /// The head of the peer's response exceeds the limit.
    Oversized,
    /// This side reset the stream.
    Dropped,
    /// The peer does not answer keep-alive pings.
    Silent,
    /// The connection failed.
    Closed(Arc<str>),
}

/// A received request.
#[derive(Debug)]
pub struct Request {
    /// Stream id.
    pub stream: u32,
    /// Head.
    pub head: RequestHead,
    /// Content length, if known.
    pub length: Option<u64>,
    /// There is no content.
    pub end: bool,
    /// The request is a CONNECT: if it is accepted, another protocol follows.
    pub upgrade: bool,
    /// The head exceeds the limit and is incomplete.
    pub oversized: Option<HeadError>,
}

/// State of a connection.
pub struct Session {
    role: Role,
    limits: SessionLimits,
    decoder: Decoder,
    encoder: Encoder,
    streams: Map<u32, StreamState>,
    /// Requests that [`Session::accept`] has not returned yet.
    accepted: VecDeque<Request>,
    /// Output.
    pub out: Buffer,
    /// Buffer for a header block to send.
    block: Vec<u8>,

    /// The client's preface has not arrived.
    preface: bool,
    /// Number of complete frames, including content that has begun; a header block counts as one.
    pub frames: u64,
    /// Content frame in progress.
    data: Option<Data>,
    /// Header block in progress.
    partial: Option<Block>,
    /// On a server, the id of the client's last stream; on a client, the id of the next stream.
    last: u32,
    /// Number of streams that are open on either side.
    open: u32,
    /// The last stream was removed.
    emptied: bool,
    /// Recently removed streams.
    removed: RemovedStreams,

    peer: Peer,
    send_window: i64,
    receive_window: i64,
    /// Content that was passed on and is not in a window update yet.
    owed: u32,
    /// Streams that wait for the connection's window or for space in `out`, in order of waiting.
    stalled: VecDeque<u32>,
    /// Streams that wait for space in `out` to send a head, in order of waiting. A head needs no window.
    crowded: VecDeque<u32>,

    leaving: ShutdownState,
    /// The peer accepts or opens no more streams.
    peer_leaves: bool,
    /// Reason for the end of the connection.
    error: Option<StreamError>,
    /// Number of streams refused by the limit and not counted in the metrics yet.
    pub refused: u32,
    /// Kind of the frame that exceeded a budget.
    pub exceeding_frame: Option<frame::FrameKind>,
    /// The last keep-alive ping was acknowledged.
    answered: bool,

    resets: Budget,
    useless_frames: Budget,
    replies: u32,

    /// Tasks to wake after the session has been released.
    pub wakes: Vec<Waker>,
    /// Waker of the driver; taken when it is woken.
    pub driver: Option<Waker>,
}

/// State of the peer.
struct Peer {
    settled: bool,
    streams: u32,
    window: i64,
    frame: usize,
    /// The peer accepts extended CONNECT.
    connect: bool,
}

/// Progress of this side's shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShutdownState {
    No,
    /// GOAWAY was sent; the peer has not acknowledged.
    Announced,
    /// The final GOAWAY with the last stream was sent.
    Final,
}

/// Streams that were removed before the peer had ended them.
#[derive(Default)]
struct RemovedStreams {
    /// The most recent ones: the id, and whether the peer has reset the stream.
    recent: VecDeque<(u32, bool)>,
    /// Highest id that `recent` has dropped. Late frames up to this id are ignored.
    unknown: u32,
}

/// Treatment of frames on a removed stream (RFC 9113, section 5.1, "closed").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LateFrame {
    /// Ignored: this side reset the stream, and the peer may not know it yet.
    Ignored,
    /// A stream error: the peer had reset the stream.
    Refused,
    /// A connection error: the peer had ended the stream, or skipped its id.
    Fatal,
}

impl RemovedStreams {
    /// Number of streams that are remembered individually.
    const RECENT: usize = 128;

    fn add(&mut self, id: u32, reset: bool) {
        if self.recent.len() == Self::RECENT {
            self.unknown = self.unknown.max(self.recent.pop_front().map_or(0, |(id, _)| id));
        }
        self.recent.push_back((id, reset));
    }

    fn late(&self, id: u32) -> LateFrame {
        match self.recent.iter().find(|(known, _)| *known == id) {
            Some((_, true)) => LateFrame::Refused,
            Some((_, false)) => LateFrame::Ignored,
            None if id <= self.unknown => LateFrame::Ignored,
            None => LateFrame::Fatal,
        }
    }
}

/// Bit set of events that a stream's task waits for.
const READ: u8 = 1;
const ROOM: u8 = 2;
const GONE: u8 = 4;

#[derive(Default)]
struct StreamState {
    waker: Option<Waker>,
    waits: u8,
    /// The stream is in [`Session::stalled`].
    stalled: bool,
    /// The stream is in [`Session::crowded`].
    crowded: bool,
    /// Number of bytes that the stream's task waits to send.
    want: usize,

    interim: VecDeque<ResponseHead>,
    answer: Option<(ResponseHead, Option<u64>)>,
    /// The final head has arrived: content and trailers follow.
    headed: bool,
    /// Received content that the stream's task has not taken.
    content: Vec<u8>,
    trailers: Option<Headers>,
    /// Remaining content length, if known.
    left: Option<u64>,
    /// The request was HEAD.
    head_only: bool,

    receive_window: i64,
    /// Bytes of content that were received and not passed on.
    held: u32,
    /// Content that was passed on and is not in a window update yet.
    owed: u32,
    send_window: i64,
    /// The peer has ended its side.
    received: bool,
    /// This side has ended.
    sent: bool,
    /// The stream no longer counts as open.
    closed: bool,
    error: Option<StreamError>,
}

impl StreamState {
    fn wait(&mut self, cx: &Context<'_>, what: u8) {
        self.waits |= what;
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => self.waker = Some(cx.waker().clone()),
        }
    }

    /// Changes the send window; returns false if it exceeds the maximum.
    fn widen(&mut self, change: i64, wakes: &mut Vec<Waker>) -> bool {
        let closed = self.send_window <= 0;
        self.send_window += change;
        if closed && self.send_window > 0 {
            self.wake(ROOM, wakes);
        }
        self.send_window <= MAX_WINDOW
    }

    fn wake(&mut self, what: u8, wakes: &mut Vec<Waker>) {
        if self.waits & what != 0 {
            self.waits = 0;
            wakes.extend(self.waker.clone());
        }
    }
}

/// The connection as a whole.
impl Session {
    /// Returns the state of a new connection, with the preface and settings in `out`.
    pub fn new(role: Role, limits: SessionLimits) -> Self {
        let mut out = Buffer::default();
        let window = (4, limits.options.stream_window);
        let list = (6, u32::try_from(limits.head.size).unwrap_or(u32::MAX));
        match role {
            Role::Client => {
                out.extend(frame::PREFACE);
                frame::settings(&mut out, &[(2, 0), window, list]);
            }
            Role::Server if limits.options.allow_connect => {
                frame::settings(&mut out, &[(3, limits.options.max_streams), window, list, (8, 1)]);
            }
            Role::Server => frame::settings(&mut out, &[(3, limits.options.max_streams), window, list]),
        }
        let more = limits.options.connection_window.saturating_sub(FIRST_WINDOW as u32);
        if more > 0 {
            frame::window_update(&mut out, 0, more);
        }
        Self {
            role,
            limits,
            decoder: Decoder::new(),
            encoder: Encoder::new(),
            streams: Map::default(),
            accepted: VecDeque::new(),
            out,
            block: Vec::new(),
            preface: role == Role::Server,
            frames: 0,
            data: None,
            partial: None,
            last: if role == Role::Server { 0 } else { 1 },
            open: 0,
            emptied: false,
            removed: RemovedStreams::default(),
            peer: Peer {
                settled: false,
                streams: u32::MAX,
                window: FIRST_WINDOW,
                frame: MAX_FRAME,
                connect: false,
            },
            send_window: FIRST_WINDOW,
            receive_window: i64::from(limits.options.connection_window),
            owed: 0,
            stalled: VecDeque::new(),
            crowded: VecDeque::new(),
            leaving: ShutdownState::No,
            peer_leaves: false,
            error: None,
            refused: 0,
            exceeding_frame: None,
            answered: true,
            resets: Budget::new(limits.options.resets),
            useless_frames: Budget::new(limits.options.useless_frames),
            replies: 0,
            wakes: Vec::new(),
            driver: None,
        }
    }

    /// Returns whether the peer's settings have arrived.
    pub fn is_settled(&self) -> bool {
        self.peer.settled
    }

    /// Returns whether this side can open further streams, now or later.
    pub(super) fn is_usable(&self) -> bool {
        let may_open = self.last < LAST_STREAM && self.out.len() < STUCK;
        self.error.is_none() && !self.peer_leaves && may_open
    }

    /// Returns whether the peer accepts extended CONNECT.
    pub(super) fn may_connect(&self) -> bool {
        self.peer.connect
    }

    /// Sends a keep-alive ping.
    pub fn ask(&mut self) {
        self.answered = false;
        frame::ping(&mut self.out, 0, ALIVE);
    }

    /// Returns whether the last keep-alive ping was acknowledged.
    pub fn is_answered(&self) -> bool {
        self.answered
    }

    /// Returns the number of concurrent streams that the peer and this side allow.
    pub(super) fn capacity(&self) -> usize {
        self.peer.streams.min(self.limits.options.max_streams) as usize
    }

    /// Returns whether a content frame is incomplete.
    pub(super) fn is_in_content(&self) -> bool {
        self.data.is_some()
    }

    /// Returns whether a header block is incomplete.
    pub(super) fn is_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Returns whether any stream is in use.
    pub(super) fn is_busy(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Returns whether the connection has ended.
    pub fn is_over(&self) -> bool {
        let leaving = self.leaving == ShutdownState::Final || (self.role == Role::Client && self.peer_leaves);
        self.error.is_some() || (leaving && self.streams.is_empty())
    }

    /// Returns the reason, if the connection did not end gracefully.
    pub fn error(&self) -> Option<&StreamError> {
        self.error.as_ref()
    }

    /// Returns the next request; skips requests whose stream has failed.
    pub fn accept(&mut self) -> Option<Request> {
        loop {
            let request = self.accepted.pop_front()?;
            if self.streams.get(&request.stream).is_some_and(|stream| stream.error.is_none()) {
                return Some(request);
            }
            self.forget(request.stream);
            request.head.recycle();
        }
    }

    /// Returns whether the driver has something to do.
    pub(super) fn needs_driver(&mut self) -> bool {
        !self.out.is_empty() || std::mem::take(&mut self.emptied)
    }

    /// Starts a graceful shutdown: existing streams continue. Streams of the peer that are in transit are accepted
    /// until the peer acknowledges (RFC 9113, section 6.8).
    pub fn begin_shutdown(&mut self) {
        if self.leaving == ShutdownState::No && self.error.is_none() {
            self.leaving = ShutdownState::Announced;
            frame::go_away(&mut self.out, LAST_STREAM, Reason::NONE);
            frame::ping(&mut self.out, 0, LEAVING);
        }
    }

    /// Returns whether the shutdown has started and the peer has not acknowledged.
    pub(super) fn is_shutting_down(&self) -> bool {
        self.leaving == ShutdownState::Announced
    }

    /// Completes the shutdown: accepts no more streams, and tells the peer which stream was the last.
    pub(super) fn refuse(&mut self) {
        if self.is_shutting_down() {
            self.leaving = ShutdownState::Final;
            let last = if self.role == Role::Server { self.last } else { 0 };
            frame::go_away(&mut self.out, last, Reason::NONE);
        }
    }

    /// Ends the connection and all streams with an error code.
    pub fn fail(&mut self, reason: Reason) {
        if self.error.is_none() {
            let last = if self.role == Role::Server { self.last } else { 0 };
            frame::go_away(&mut self.out, last, reason);
            self.close_with(StreamError::Broken(reason));
        }
    }

    /// Ends the connection, because it has failed.
    pub fn close_with(&mut self, why: StreamError) {
        if self.error.is_some() {
            return;
        }
        for stream in self.streams.values_mut() {
            stream.error.get_or_insert_with(|| why.clone());
            stream.wake(READ | ROOM | GONE, &mut self.wakes);
        }
        self.accepted.clear();
        self.error = Some(why);
    }

    /// Returns the wakers of the tasks of all streams.
    pub(super) fn wakers(&self) -> Vec<Waker> {
        self.streams.values().filter_map(|stream| stream.waker.clone()).collect()
    }

    /// Wakes streams after all of `out` has been written: first all that wait to send a head, then as many
    /// stalled streams as the space allows. Returns whether stalled streams remain while the connection's
    /// window is open. The caller must then call this again after the woken streams have run, because a woken
    /// stream may leave its share unused.
    pub fn written(&mut self) -> bool {
        self.replies = 0;
        if self.stalled.is_empty() && self.crowded.is_empty() {
            return false;
        }
        while let Some(id) = self.crowded.pop_front() {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.crowded = false;
            stream.wake(ROOM, &mut self.wakes);
        }
        let mut room = self.send_window.min(OUT as i64);
        while room > 0
            && let Some(id) = self.stalled.pop_front()
        {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            stream.stalled = false;
            // A stream whose own window is closed is woken when that window opens.
            if stream.waits & ROOM != 0 && stream.send_window > 0 {
                room -= stream.send_window.min(stream.want as i64);
                stream.wake(ROOM, &mut self.wakes);
            }
        }
        self.send_window > 0 && !self.stalled.is_empty()
    }

    /// Records content that was passed on or discarded; sends a window update when enough is due.
    fn credit(&mut self, count: u32) {
        self.owed += count;
        if self.owed >= self.limits.options.connection_window / 2 && self.error.is_none() {
            frame::window_update(&mut self.out, 0, self.owed);
            self.receive_window += i64::from(std::mem::take(&mut self.owed));
        }
    }

    /// Marks a stream as closed if both sides have ended it, or if it has failed.
    fn close_if_ended(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id)
            && !stream.closed
            && (stream.error.is_some() || (stream.sent && stream.received))
        {
            stream.closed = true;
            self.open = self.open.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests;
