//! One stream of an HTTP/2 connection, from either end.

use std::{
    cell::RefCell,
    fmt,
    rc::Rc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;

use super::{
    frame::Reason,
    heads,
    session::{Lost, Request, Session},
};
use crate::{
    head::{Headers, RequestHead, ResponseHead},
    http1::Framing,
};

/// A connection that streams are on, or can be. It ends by itself once nobody holds it.
#[derive(Clone)]
pub struct Connection(pub(super) Rc<RefCell<Session>>);

impl Connection {
    /// Whether another stream may be opened on it, now or later.
    pub fn is_usable(&self) -> bool {
        self.0.borrow().is_usable()
    }

    /// How many streams the peer takes at once.
    pub fn capacity(&self) -> usize {
        self.0.borrow().capacity()
    }

    /// Does something with the session; if that is of concern to its driver, wakes it.
    fn with<T>(&self, action: impl FnOnce(&mut Session) -> T) -> T {
        let mut session = self.0.borrow_mut();
        let result = action(&mut session);
        let driver = if session.has_news() { session.driver.take() } else { None };
        drop(session);
        if let Some(driver) = driver {
            driver.wake();
        }
        result
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The driver, which is left alone then, ends the connection.
        if Rc::strong_count(&self.0) == 2 {
            let driver = self.0.borrow_mut().driver.take();
            if let Some(driver) = driver {
                driver.wake();
            }
        }
    }
}

/// A stream, and how far it has come.
pub struct Duplex {
    connection: Connection,
    /// The stream, once there is one.
    id: Option<u32>,
    /// Bytes of content received so far.
    pub received: u64,
    /// Bytes of content sent so far.
    pub sent: u64,
}

/// What a server says.
pub enum Answered {
    /// Its answer will come later (1xx).
    Interim,
    /// Its answer, whose body is framed so where the next hop is HTTP/1.1.
    Final(Framing),
}

impl Duplex {
    /// A client's request.
    pub fn accepted(connection: Connection, request: &Request) -> Self {
        Self { connection, id: Some(request.stream), received: 0, sent: 0 }
    }

    /// A place for a request to a server.
    pub fn idle(connection: Connection) -> Self {
        Self { connection, id: None, received: 0, sent: 0 }
    }

    /// Whether CONNECT may ask the other end for another protocol.
    pub fn may_connect(&self) -> bool {
        self.connection.0.borrow().may_connect()
    }

    /// Sends a request's head; `end` says that nothing follows, `upgrade` that another protocol is asked for.
    ///
    /// # Errors
    /// The head cannot be carried by HTTP/2, or the connection takes no more streams.
    pub fn request(&mut self, head: &RequestHead, end: bool, upgrade: bool) -> Result<(), Unsent> {
        if self.id.is_some() {
            return Err(Unsent::Used);
        }
        let id = self.connection.with(|session| session.request(head, end, upgrade));
        self.id = Some(id.ok_or(Unsent::Unrepresentable)?.map_err(Unsent::Lost)?);
        Ok(())
    }

    /// Waits for what a server says.
    pub fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        method: &str,
        head: &mut ResponseHead,
    ) -> Poll<Result<Answered, Lost>> {
        let Some(id) = self.id else { return Poll::Ready(Err(Lost::Dropped)) };
        let mut session = self.connection.0.borrow_mut();
        let Some(length) = ready!(session.poll_answer(cx, id, head))? else {
            return Poll::Ready(Ok(Answered::Interim));
        };
        let silent = method == "HEAD" || matches!(head.status(), 204 | 304);
        Poll::Ready(Ok(Answered::Final(heads::framing(silent || session.is_end(id), length))))
    }

    /// Sends an answer that is not the last (1xx).
    pub fn interim(&mut self, head: &ResponseHead) {
        // A client that is gone is noticed elsewhere.
        let _ = self.with(|session, id| session.respond(id, head, true, false));
    }

    /// Sends an answer's head; `end` says that nothing follows.
    ///
    /// # Errors
    /// The client is gone.
    pub fn respond(&mut self, head: &ResponseHead, end: bool) -> Result<(), Gone> {
        self.with(|session, id| session.respond(id, head, false, end))
    }

    /// Whether all that the other end sends has been taken.
    pub fn is_end(&self) -> bool {
        self.id.is_none_or(|id| self.connection.0.borrow().is_end(id))
    }

    /// The next piece of content; `None` at its end.
    pub fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Lost>> {
        let Some(id) = self.id else { return Poll::Ready(Ok(None)) };
        let piece = ready!(self.connection.0.borrow_mut().poll_piece(cx, id))?;
        self.received += piece.as_ref().map_or(0, Bytes::len) as u64;
        Poll::Ready(Ok(piece))
    }

    /// What follows the content, all of which has been taken.
    pub fn trailers(&mut self) -> Option<Headers> {
        self.connection.0.borrow_mut().trailers(self.id?)
    }

    /// Tells the other end that so much of its content has been handed on.
    pub fn release(&mut self, count: usize) {
        if let Some(id) = self.id {
            self.connection.with(|session| session.release(id, count));
        }
    }

    /// How much of `want` may be sent now.
    pub fn poll_room(&mut self, cx: &mut Context<'_>, want: usize) -> Poll<Result<usize, Gone>> {
        let Some(id) = self.id else { return Poll::Ready(Err(Gone)) };
        self.connection.0.borrow_mut().poll_room(cx, id, want).map(|room| room.ok_or(Gone))
    }

    /// Waits for room for a head that can wait: an interim answer (1xx), or trailers.
    pub fn poll_space(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.id.map_or(Poll::Ready(()), |id| self.connection.0.borrow_mut().poll_space(cx, id))
    }

    /// Sends content for which there is room; `end` says that nothing follows.
    pub fn send(&mut self, data: &[u8], end: bool) -> Result<(), Gone> {
        self.sent += data.len() as u64;
        self.with(|session, id| session.send(id, data, end))
    }

    /// Sends what follows the content, and the end.
    pub fn send_trailers(&mut self, trailers: &Headers) -> Result<(), Gone> {
        self.with(|session, id| session.send_trailers(id, trailers))
    }

    /// Reads a server's answer that nobody wants, to its end.
    pub fn poll_ignored(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut head = ResponseHead::default();
        while !matches!(ready!(self.poll_answer(cx, "GET", &mut head)), Ok(Answered::Final(_)) | Err(_)) {}
        while let Ok(Some(piece)) = ready!(self.poll_piece(cx)) {
            self.release(piece.len());
        }
        Poll::Ready(())
    }

    /// Whether the other end has given the stream up, or the connection is lost.
    pub fn is_gone(&mut self, cx: &mut Context<'_>) -> bool {
        self.id.is_some_and(|id| self.connection.0.borrow_mut().is_gone(cx, id))
    }

    /// Gives the stream up.
    pub fn reset(&mut self) {
        if let Some(id) = self.id {
            self.connection.with(|session| session.reset(id, Reason::INTERNAL));
        }
    }

    fn with(&mut self, send: impl FnOnce(&mut Session, u32) -> bool) -> Result<(), Gone> {
        let id = self.id.ok_or(Gone)?;
        if self.connection.with(|session| send(session, id)) { Ok(()) } else { Err(Gone) }
    }
}

impl Drop for Duplex {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.connection.with(|session| session.forget(id));
        }
    }
}

/// The other end takes no more.
#[derive(Debug)]
pub struct Gone;

/// Why a request's head was not sent.
#[derive(Debug)]
pub enum Unsent {
    /// The stream carries another request already.
    Used,
    /// HTTP/2 cannot carry the head.
    Unrepresentable,
    /// The connection takes no more streams.
    Lost(Lost),
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reset(reason) => write!(f, "the peer gave the stream up: {reason}"),
            Self::Unprocessed => f.write_str("the peer takes no more streams on this connection"),
            Self::Broken(reason) => write!(f, "the peer does not keep to HTTP/2: {reason}"),
            Self::Oversized => f.write_str("the head of the answer is larger than allowed"),
            Self::Silent => f.write_str("the peer does not answer pings"),
            Self::Dropped => f.write_str("the stream was given up"),
            Self::Closed(why) => write!(f, "the connection is lost: {why}"),
        }
    }
}
