//! One connection of HTTP/2 as state: streams, windows, settings, and what is to be written. Nothing here reads,
//! writes or waits, so that all of it can be tested, and fuzzed, by handing it bytes.
//!
//! Bytes come in by [`Session::feed`] (in `receive`), what is to be written lies in `out`. Streams are used through
//! the functions below `Streams`; each names the stream by its id. Content goes into `out` only as far as windows
//! and `out` have room, so nothing is queued for a peer that does not read.

mod budget;
mod receive;

use std::{
    collections::VecDeque,
    rc::Rc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;

use super::{
    CONNECTION_WINDOW, STREAM_WINDOW,
    frame::{self, FIRST_WINDOW, MAX_FRAME, Reason},
    heads::{self, Bounds},
    hpack::{Decoder, Encoder},
};
use crate::{
    buffer::Buffer,
    config::Map,
    head::{Headers, RequestHead, ResponseHead},
};
use budget::Budget;
use receive::{Block, Data};

/// Content waits to be written up to this much; heads and the like come on top.
const OUT: usize = 64 * 1024;
/// Heads kept for their memory.
const SPARE: usize = 32;
/// Frames that may wait to be written because of frames that came in (acknowledgements, resets).
const REPLIES: u32 = 2048;
/// Interim answers (1xx) of one stream that may wait to be taken.
const INTERIM: usize = 8;
/// A stream identifier that no stream has.
const LAST_STREAM: u32 = 0x7fff_ffff;
/// What marks the ping that tells when a peer knows that we are going.
const LEAVING: [u8; 8] = *b"leaving!";

/// Which end of a connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Client,
    Server,
}

/// What one connection may ask of us.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Streams at once, of a client.
    pub(crate) streams: u32,
    /// Each head.
    pub(crate) head: Bounds,
}

/// Why a stream is no more.
#[derive(Clone, Debug)]
pub(crate) enum Lost {
    /// The peer gave it up.
    Reset(Reason),
    /// The peer has not looked at it.
    Unprocessed,
    /// What the peer sent on it, or on the connection, is not allowed.
    Broken(Reason),
    /// We gave it up.
    Dropped,
    /// The connection has failed.
    Closed(Rc<str>),
}

/// A request that has come in.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) stream: u32,
    pub(crate) head: RequestHead,
    /// How long its content is, if it says so.
    pub(crate) length: Option<u64>,
    /// There is no content.
    pub(crate) end: bool,
}

/// The state of one connection.
pub(crate) struct Session {
    role: Role,
    limits: Limits,
    decoder: Decoder,
    encoder: Encoder,
    streams: Map<u32, Stream>,
    /// Requests that nobody has taken yet.
    accepted: VecDeque<Request>,
    /// What is to be written.
    pub(crate) out: Buffer,
    /// A header block that is being written.
    block: Vec<u8>,
    spare_requests: Vec<RequestHead>,
    spare_answers: Vec<ResponseHead>,

    /// The preface is yet to come.
    preface: bool,
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

    peer: Peer,
    send_window: i64,
    receive_window: i64,
    /// Content handed on that the peer does not know of.
    owed: u32,
    /// Streams that wait for room that all streams share.
    stalled: Vec<u32>,

    leaving: Leaving,
    /// The peer takes, or opens, no more streams.
    peer_leaves: bool,
    /// The connection is no more.
    lost: Option<Lost>,

    resets: Budget,
    chatter: Budget,
    replies: u32,

    /// Tasks to be woken by whoever lets go of the session next.
    pub(crate) wakes: Vec<Waker>,
    /// The task that moves the bytes; taken once it has been woken.
    pub(crate) driver: Option<Waker>,
}

/// What the peer has said of itself.
struct Peer {
    settled: bool,
    streams: u32,
    window: i64,
    frame: usize,
}

/// How far our own going is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    No,
    /// The peer has been told, and may not know yet.
    Told,
    /// It knows which stream was the last.
    Known,
}

/// What somebody waits for.
const READ: u8 = 1;
const ROOM: u8 = 2;
const GONE: u8 = 4;

#[derive(Default)]
struct Stream {
    waker: Option<Waker>,
    waits: u8,
    /// It waits for room that all streams share.
    stalled: bool,

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

impl Stream {
    fn wait(&mut self, cx: &Context<'_>, what: u8) {
        self.waits |= what;
        match &mut self.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            None => self.waker = Some(cx.waker().clone()),
        }
    }

    fn wake(&mut self, what: u8, wakes: &mut Vec<Waker>) {
        if self.waits & what != 0 {
            self.waits = 0;
            wakes.extend(self.waker.take());
        }
    }
}

/// The connection as a whole.
impl Session {
    /// At the beginning, with what is to be said first.
    pub(crate) fn new(role: Role, limits: Limits) -> Self {
        let mut out = Buffer::default();
        let window = (4, STREAM_WINDOW);
        let list = (6, u32::try_from(limits.head.size).unwrap_or(u32::MAX));
        match role {
            Role::Client => {
                out.extend(frame::PREFACE);
                frame::settings(&mut out, &[(2, 0), window, list]);
            }
            Role::Server => frame::settings(&mut out, &[(3, limits.streams), window, list]),
        }
        frame::window_update(&mut out, 0, CONNECTION_WINDOW - FIRST_WINDOW as u32);
        Self {
            role,
            limits,
            decoder: Decoder::new(),
            encoder: Encoder::new(),
            streams: Map::default(),
            accepted: VecDeque::new(),
            out,
            block: Vec::new(),
            spare_requests: Vec::new(),
            spare_answers: Vec::new(),
            preface: role == Role::Server,
            data: None,
            partial: None,
            last: if role == Role::Server { 0 } else { 1 },
            open: 0,
            emptied: false,
            peer: Peer { settled: false, streams: u32::MAX, window: FIRST_WINDOW, frame: MAX_FRAME },
            send_window: FIRST_WINDOW,
            receive_window: i64::from(CONNECTION_WINDOW),
            owed: 0,
            stalled: Vec::new(),
            leaving: Leaving::No,
            peer_leaves: false,
            lost: None,
            resets: Budget::new(200),
            chatter: Budget::new(2000),
            replies: 0,
            wakes: Vec::new(),
            driver: None,
        }
    }

    /// Whether the peer's settings have come.
    pub(crate) fn is_settled(&self) -> bool {
        self.peer.settled
    }

    /// Whether another stream may be opened now or later.
    pub(crate) fn is_usable(&self) -> bool {
        self.lost.is_none() && !self.peer_leaves && self.last < LAST_STREAM
    }

    /// How many streams the peer takes at once.
    pub(crate) fn capacity(&self) -> usize {
        self.peer.streams as usize
    }

    /// Whether any stream is in use.
    pub(crate) fn is_busy(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Whether nothing more can come of it.
    pub(crate) fn is_over(&self) -> bool {
        let leaving = self.leaving == Leaving::Known || (self.role == Role::Client && self.peer_leaves);
        self.lost.is_some() || (leaving && self.streams.is_empty())
    }

    /// Why it ended, if it did not end in good order.
    pub(crate) fn lost(&self) -> Option<&Lost> {
        self.lost.as_ref()
    }

    /// The next request; those that have been given up meanwhile are left out.
    pub(crate) fn accept(&mut self) -> Option<Request> {
        loop {
            let request = self.accepted.pop_front()?;
            if self.streams.get(&request.stream).is_some_and(|stream| stream.lost.is_none()) {
                return Some(request);
            }
            self.forget(request.stream);
            self.recycle(request.head);
        }
    }

    /// Whether the driver has something to do.
    pub(crate) fn has_news(&mut self) -> bool {
        !self.out.is_empty() || std::mem::take(&mut self.emptied)
    }

    /// Keeps a request's head for its memory.
    pub(crate) fn recycle(&mut self, head: RequestHead) {
        if self.spare_requests.len() < SPARE {
            self.spare_requests.push(head);
        }
    }

    /// Takes no more streams, and lets those that are there come to their ends. A peer's requests that are on their
    /// way are taken, too, until it knows (section 6.8 of RFC 9113).
    pub(crate) fn leave(&mut self) {
        if self.leaving == Leaving::No && self.lost.is_none() {
            self.leaving = Leaving::Told;
            frame::go_away(&mut self.out, LAST_STREAM, Reason::NONE);
            frame::ping(&mut self.out, 0, LEAVING);
        }
    }

    /// Ends at once, with all streams, for what the peer did or because nobody wants more.
    pub(crate) fn fail(&mut self, reason: Reason) {
        if self.lost.is_none() {
            let last = if self.role == Role::Server { self.last } else { 0 };
            frame::go_away(&mut self.out, last, reason);
            self.lose(Lost::Broken(reason));
        }
    }

    /// The connection has failed.
    pub(crate) fn lose(&mut self, why: Lost) {
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

    /// All that was in `out` has been written.
    pub(crate) fn written(&mut self) {
        self.replies = 0;
        self.unstall();
    }

    fn unstall(&mut self) {
        if self.send_window <= 0 {
            return;
        }
        for id in self.stalled.drain(..) {
            if let Some(stream) = self.streams.get_mut(&id) {
                stream.stalled = false;
                stream.wake(ROOM, &mut self.wakes);
            }
        }
    }

    /// Content has been handed on, or will not be.
    fn credit(&mut self, count: u32) {
        self.owed += count;
        if self.owed >= CONNECTION_WINDOW / 2 && self.lost.is_none() {
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

/// Streams, as those see them who use them. An id of no stream is one that is lost.
impl Session {
    /// Opens a stream with a request. `None` if HTTP/2 cannot carry the head.
    pub(crate) fn request(&mut self, head: &RequestHead, end: bool) -> Option<Result<u32, Lost>> {
        if !self.is_usable() || self.open >= self.peer.streams {
            return Some(Err(self.lost.clone().unwrap_or(Lost::Unprocessed)));
        }
        self.block.clear();
        if !heads::request(&mut self.encoder, &mut self.block, head) {
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

    fn stream(&self) -> Stream {
        Stream {
            receive_window: i64::from(STREAM_WINDOW),
            send_window: self.peer.window,
            ..Stream::default()
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
        let mut used = std::mem::replace(head, next);
        if self.spare_answers.len() < SPARE {
            used.clear();
            self.spare_answers.push(used);
        }
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
        if stream.owed >= STREAM_WINDOW / 2 && !stream.received && stream.lost.is_none() {
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
        if shared <= 0 && !stream.stalled {
            stream.stalled = true;
            self.stalled.push(id);
        }
        Poll::Pending
    }

    /// Sends content for which there is room; false if the stream is lost.
    pub(crate) fn send(&mut self, id: u32, mut data: &[u8], end: bool) -> bool {
        let Some(stream) = self.streams.get_mut(&id) else { return false };
        if stream.lost.is_some() || stream.sent {
            return false;
        }
        stream.send_window -= data.len() as i64;
        self.send_window -= data.len() as i64;
        stream.sent = end;
        loop {
            let (piece, rest) = data.split_at(data.len().min(self.peer.frame));
            let flags = if end && rest.is_empty() { frame::END_STREAM } else { 0 };
            frame::head(&mut self.out, frame::Kind::Data, flags, id, piece.len());
            self.out.extend(piece);
            if rest.is_empty() {
                break;
            }
            data = rest;
        }
        self.chatter.give();
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
            self.resets.give();
        }
        self.reset(id, if answered { Reason::NONE } else { Reason::CANCEL });
        if let Some(stream) = self.streams.remove(&id) {
            self.credit(stream.held);
            self.emptied = self.streams.is_empty();
        }
    }
}

#[cfg(test)]
mod tests;
