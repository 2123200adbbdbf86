//! One connection of HTTP/2 as state: streams, windows, settings, and what is to be written. Nothing here reads,
//! writes or waits, so that all of it can be tested, and fuzzed, by handing it bytes.
//!
//! Bytes come in by [`Session::feed`] (in `receive` and `control`), what is to be written lies in `out`. Streams are used through
//! the functions in `streams`; each names the stream by its id. Content goes into `out` only as far as windows
//! and `out` have room, so nothing is queued for a peer that does not read.

mod budget;
mod control;
mod receive;
mod streams;

use std::{
    collections::VecDeque,
    rc::Rc,
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

/// Content waits to be written up to this much; heads and the like come on top.
const OUT: usize = 64 * 1024;
/// While this much waits to be written no stream is opened: a server that does not read gets no more requests.
const STUCK: usize = 1024 * 1024;
/// Frames that may wait to be written because of frames that came in (acknowledgements, resets).
const REPLIES: u32 = 2048;
/// Interim answers (1xx) of one stream that may wait to be taken; those beyond are dropped.
const INTERIM: usize = 8;
/// A stream identifier that no stream has.
const LAST_STREAM: u32 = 0x7fff_ffff;
/// What marks the ping that asks whether a peer is there.
const ALIVE: [u8; 8] = *b"there? .";
/// What marks the ping that tells when a peer knows that we are going.
const LEAVING: [u8; 8] = *b"leaving!";

/// Which end of a connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The end that began the connection.
    Client,
    /// The end that accepted it.
    Server,
}

/// What one connection may ask of us.
#[derive(Clone, Copy, Debug)]
pub struct SessionLimits {
    /// Each head.
    pub head: Bounds,
    /// All else.
    pub options: Http2Options,
}

/// Why a stream is no more.
#[derive(Clone, Debug)]
pub enum Lost {
    /// The peer gave it up.
    Reset(Reason),
    /// The peer has not looked at it.
    Unprocessed,
    /// What the peer sent on it, or on the connection, is not allowed.
    Broken(Reason),
    /// The peer's answer has a larger head than allowed.
    Oversized,
    /// We gave it up.
    Dropped,
    /// The peer does not answer pings.
    Silent,
    /// The connection has failed.
    Closed(Rc<str>),
}

/// A request that has come in.
#[derive(Debug)]
pub struct Request {
    /// Number of the stream.
    pub stream: u32,
    /// Its head.
    pub head: RequestHead,
    /// How long its content is, if it says so.
    pub length: Option<u64>,
    /// There is no content.
    pub end: bool,
    /// What follows is another protocol's, if it is granted: CONNECT.
    pub upgrade: bool,
    /// The head is larger than allowed, and not all of it is here.
    pub oversized: Option<HeadError>,
}

/// The state of one connection.
pub(super) struct Session {
    role: Role,
    limits: SessionLimits,
    decoder: Decoder,
    encoder: Encoder,
    streams: Map<u32, StreamState>,
    /// Requests that nobody has taken yet.
    accepted: VecDeque<Request>,
    /// What is to be written.
    pub out: Buffer,
    /// A header block that is being written.
    block: Vec<u8>,

    /// The preface is yet to come.
    preface: bool,
    /// Frames that have come whole, or content that has begun; a header block counts as one.
    pub frames: u64,
    /// Content that is coming in.
    data: Option<Data>,
    /// A header block that is coming in.
    partial: Option<Block>,
    /// The client's last stream, or the next of ours.
    last: u32,
    /// Streams that neither end has ended.
    open: u32,
    /// The last stream has gone.
    emptied: bool,
    /// Streams that are no more.
    past: Past,

    peer: Peer,
    send_window: i64,
    receive_window: i64,
    /// Content handed on that the peer does not know of.
    owed: u32,
    /// Streams that wait for room that all streams share; those that have waited longest come first.
    stalled: VecDeque<u32>,
    /// Streams that wait until there is room in `out` for a head, whatever their windows; the first come first.
    crowded: VecDeque<u32>,

    leaving: Leaving,
    /// The peer takes, or opens, no more streams.
    peer_leaves: bool,
    /// The connection is no more.
    lost: Option<Lost>,
    /// Streams that were refused because there were too many at once, and that nobody has counted yet.
    pub refused: u32,
    /// What frame was one too many.
    pub culprit: Option<frame::FrameKind>,
    /// The last ping has been answered.
    answered: bool,

    resets: Budget,
    chatter: Budget,
    replies: u32,

    /// Tasks to be woken by whoever lets go of the session next.
    pub wakes: Vec<Waker>,
    /// The task that moves the bytes; taken once it has been woken.
    pub driver: Option<Waker>,
}

/// What the peer has said of itself.
struct Peer {
    settled: bool,
    streams: u32,
    window: i64,
    frame: usize,
    /// CONNECT may ask it for another protocol.
    connect: bool,
}

/// How far our own going is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    No,
    /// The peer has been told, and may not know yet.
    Told,
    /// It has been told which stream was the last.
    Known,
}

/// Streams that are no more, though the peer has not sent all of them.
#[derive(Default)]
struct Past {
    /// The last of them, and whether the peer has reset them.
    recent: VecDeque<(u32, bool)>,
    /// Those before are not told apart from others up to here.
    unknown: u32,
}

/// What may come on a stream that is no more (RFC 9113, section 5.1, "closed").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    /// Anything: we gave it up, which the peer may not know yet.
    Ignored,
    /// Nothing, since the peer has reset it.
    Refused,
    /// Nothing, since the peer has sent all of it, or passed it over.
    Fatal,
}

impl Past {
    /// So many are remembered one by one.
    const RECENT: usize = 128;

    fn add(&mut self, id: u32, reset: bool) {
        if self.recent.len() == Self::RECENT {
            self.unknown = self.unknown.max(self.recent.pop_front().map_or(0, |(id, _)| id));
        }
        self.recent.push_back((id, reset));
    }

    fn late(&self, id: u32) -> Late {
        match self.recent.iter().find(|(known, _)| *known == id) {
            Some((_, true)) => Late::Refused,
            Some((_, false)) => Late::Ignored,
            None if id <= self.unknown => Late::Ignored,
            None => Late::Fatal,
        }
    }
}

/// What somebody waits for.
const READ: u8 = 1;
const ROOM: u8 = 2;
const GONE: u8 = 4;

#[derive(Default)]
struct StreamState {
    waker: Option<Waker>,
    waits: u8,
    /// It waits for room that all streams share.
    stalled: bool,
    /// It waits for room for a head.
    crowded: bool,
    /// How much it has to send, when it waits for room.
    want: usize,

    interim: VecDeque<ResponseHead>,
    answer: Option<(ResponseHead, Option<u64>)>,
    /// The last head has come, so that what follows is content and trailers.
    headed: bool,
    /// Content not taken yet.
    content: Vec<u8>,
    trailers: Option<Headers>,
    /// How much content is still to come, if that is known.
    left: Option<u64>,
    /// Whether the request was HEAD.
    head_only: bool,

    receive_window: i64,
    /// Content received and not yet handed on.
    held: u32,
    /// Content handed on that the peer does not know of.
    owed: u32,
    send_window: i64,
    /// The peer has sent all.
    received: bool,
    /// We have sent all.
    sent: bool,
    /// It does not count as open any more.
    closed: bool,
    lost: Option<Lost>,
}

impl StreamState {
    fn wait(&mut self, cx: &Context<'_>, what: u8) {
        self.waits |= what;
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => self.waker = Some(cx.waker().clone()),
        }
    }

    /// Changes its window; false if that is then larger than allowed.
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
    /// At the beginning, with what is to be said first.
    pub(super) fn new(role: Role, limits: SessionLimits) -> Self {
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
            past: Past::default(),
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
            leaving: Leaving::No,
            peer_leaves: false,
            lost: None,
            refused: 0,
            culprit: None,
            answered: true,
            resets: Budget::new(limits.options.resets),
            chatter: Budget::new(limits.options.chatter),
            replies: 0,
            wakes: Vec::new(),
            driver: None,
        }
    }

    /// Whether the peer's settings have come.
    pub(super) fn is_settled(&self) -> bool {
        self.peer.settled
    }

    /// Whether another stream may be opened now or later.
    pub(super) fn is_usable(&self) -> bool {
        let may_open = self.last < LAST_STREAM && self.out.len() < STUCK;
        self.lost.is_none() && !self.peer_leaves && may_open
    }

    /// Whether CONNECT may ask the peer for another protocol.
    pub(super) fn may_connect(&self) -> bool {
        self.peer.connect
    }

    /// Asks the peer whether it is there.
    pub(super) fn ask(&mut self) {
        self.answered = false;
        frame::ping(&mut self.out, 0, ALIVE);
    }

    /// Whether it has said so since.
    pub(super) fn is_answered(&self) -> bool {
        self.answered
    }

    /// How many streams the peer takes at once, and we want.
    pub(super) fn capacity(&self) -> usize {
        self.peer.streams.min(self.limits.options.max_streams) as usize
    }

    /// Whether a frame of content has begun and not ended.
    pub(super) fn is_in_content(&self) -> bool {
        self.data.is_some()
    }

    /// Whether a header block has begun and not ended.
    pub(super) fn is_partial(&self) -> bool {
        self.partial.is_some()
    }

    /// Whether any stream is in use.
    pub(super) fn is_busy(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Whether nothing more can come of it.
    pub(super) fn is_over(&self) -> bool {
        let leaving = self.leaving == Leaving::Known || (self.role == Role::Client && self.peer_leaves);
        self.lost.is_some() || (leaving && self.streams.is_empty())
    }

    /// Why it ended, if it did not end in good order.
    pub(super) fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }

    /// The next request; those that have been given up meanwhile are left out.
    pub(super) fn accept(&mut self) -> Option<Request> {
        loop {
            let request = self.accepted.pop_front()?;
            if self.streams.get(&request.stream).is_some_and(|stream| stream.lost.is_none()) {
                return Some(request);
            }
            self.forget(request.stream);
            request.head.recycle();
        }
    }

    /// Whether the driver has something to do.
    pub(super) fn has_news(&mut self) -> bool {
        !self.out.is_empty() || std::mem::take(&mut self.emptied)
    }

    /// Takes no more streams, and lets those that are there come to their ends. A peer's requests that are on their
    /// way are taken, too, until it knows (section 6.8 of RFC 9113).
    pub(super) fn leave(&mut self) {
        if self.leaving == Leaving::No && self.lost.is_none() {
            self.leaving = Leaving::Told;
            frame::go_away(&mut self.out, LAST_STREAM, Reason::NONE);
            frame::ping(&mut self.out, 0, LEAVING);
        }
    }

    /// Whether the peer has been told, and may not know yet.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving == Leaving::Told
    }

    /// Takes none of a peer's streams after those that have come, which it is told.
    pub(super) fn refuse(&mut self) {
        if self.is_leaving() {
            self.leaving = Leaving::Known;
            let last = if self.role == Role::Server { self.last } else { 0 };
            frame::go_away(&mut self.out, last, Reason::NONE);
        }
    }

    /// Ends at once, with all streams, for what the peer did or because nobody wants more.
    pub(super) fn fail(&mut self, reason: Reason) {
        if self.lost.is_none() {
            let last = if self.role == Role::Server { self.last } else { 0 };
            frame::go_away(&mut self.out, last, reason);
            self.lose(Lost::Broken(reason));
        }
    }

    /// The connection has failed.
    pub(super) fn lose(&mut self, why: Lost) {
        if self.lost.is_some() {
            return;
        }
        for stream in self.streams.values_mut() {
            stream.lost.get_or_insert_with(|| why.clone());
            stream.wake(READ | ROOM | GONE, &mut self.wakes);
        }
        self.accepted.clear();
        self.lost = Some(why);
    }

    /// The tasks that wait for something on a stream.
    pub(super) fn wakers(&self) -> Vec<Waker> {
        self.streams.values().filter_map(|stream| stream.waker.clone()).collect()
    }

    /// Takes note that all that was in `out` has been written, and wakes the streams that wait to send a head, and as many
    /// of those that wait for shared room as it has enough for. Returns whether others wait on though there is a window:
    /// those woken may not use what they were woken for, so this is to be called again after they have run.
    pub(super) fn written(&mut self) -> bool {
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
            // One whose own window is closed is woken when that opens.
            if stream.waits & ROOM != 0 && stream.send_window > 0 {
                room -= stream.send_window.min(stream.want as i64);
                stream.wake(ROOM, &mut self.wakes);
            }
        }
        self.send_window > 0 && !self.stalled.is_empty()
    }

    /// Content has been handed on, or will not be.
    fn credit(&mut self, count: u32) {
        self.owed += count;
        if self.owed >= self.limits.options.connection_window / 2 && self.lost.is_none() {
            frame::window_update(&mut self.out, 0, self.owed);
            self.receive_window += i64::from(std::mem::take(&mut self.owed));
        }
    }

    /// Counts a stream that has come to its end.
    fn settle(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id)
            && !stream.closed
            && (stream.lost.is_some() || (stream.sent && stream.received))
        {
            stream.closed = true;
            self.open = self.open.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests;
