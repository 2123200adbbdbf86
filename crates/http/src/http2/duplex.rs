//! A stream of an HTTP/2 connection, as a client or as a server.

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
    session::{Request, Session, StreamError},
};
use crate::{
    head::{Headers, RequestHead, ResponseHead},
    http1::Framing,
};

/// A handle to a connection. The connection ends after its last handle has been dropped.
#[derive(Clone)]
pub struct Connection(pub(super) Rc<RefCell<Session>>);

impl Connection {
    /// Returns whether further streams can be opened, now or later.
    pub fn is_usable(&self) -> bool {
        self.0.borrow().is_usable()
    }

    /// Returns the number of concurrent streams that the peer and this side allow.
    pub fn capacity(&self) -> usize {
        self.0.borrow().capacity()
    }

    /// Runs an action on the session; wakes the driver if it then has work.
    fn with<T>(&self, action: impl FnOnce(&mut Session) -> T) -> T {
        let mut session = self.0.borrow_mut();
        let result = action(&mut session);
        let driver = if session.needs_driver() { session.driver.take() } else { None };
        drop(session);
        if let Some(driver) = driver {
            driver.wake();
        }
        result
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Without other handles, the driver ends the connection.
        if Rc::strong_count(&self.0) == 2 {
            let driver = self.0.borrow_mut().driver.take();
            if let Some(driver) = driver {
                driver.wake();
            }
        }
    }
}

/// A stream.
pub struct Duplex {
    connection: Connection,
    /// Id of the stream, after it was opened.
    id: Option<u32>,
    /// Number of content bytes received.
    pub received: u64,
    /// Number of content bytes sent.
    pub sent: u64,
}

/// Head of a response.
pub enum Answered {
    /// An interim response (1xx).
    Interim,
    /// The final response, with the framing of its body for an HTTP/1.1 receiver.
    Final(Framing),
}

impl Duplex {
    /// Returns the stream of a client's request.
    pub fn accepted(connection: Connection, request: &Request) -> Self {
        Self { connection, id: Some(request.stream), received: 0, sent: 0 }
    }

    /// Returns a stream that is not open yet, for a request to a server.
    pub fn idle(connection: Connection) -> Self {
        Self { connection, id: None, received: 0, sent: 0 }
    }

    /// Returns whether the peer accepts extended CONNECT.
    pub fn may_connect(&self) -> bool {
        self.connection.0.borrow().may_connect()
    }

    /// Sends the head of a request. `end`: there is no content. `upgrade`: extended CONNECT.
    ///
    /// # Errors
    /// The stream already has a request, HTTP/2 cannot represent the head, or the connection accepts no stream now.
    pub fn request(&mut self, head: &RequestHead, end: bool, upgrade: bool) -> Result<(), Unsent> {
        if self.id.is_some() {
            return Err(Unsent::Used);
        }
        let id = self.connection.with(|session| session.request(head, end, upgrade));
        self.id = Some(id.ok_or(Unsent::Unrepresentable)?.map_err(Unsent::Lost)?);
        Ok(())
    }

    /// Waits for the next head of the response.
    pub fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        method: &str,
        head: &mut ResponseHead,
    ) -> Poll<Result<Answered, StreamError>> {
        let Some(id) = self.id else { return Poll::Ready(Err(StreamError::Dropped)) };
        let mut session = self.connection.0.borrow_mut();
        let Some(length) = ready!(session.poll_answer(cx, id, head))? else {
            return Poll::Ready(Ok(Answered::Interim));
        };
        let silent = method == "HEAD" || matches!(head.status(), 204 | 304);
        Poll::Ready(Ok(Answered::Final(heads::framing(silent || session.is_end(id), length))))
    }

    /// Sends an interim response (1xx).
    pub fn interim(&mut self, head: &ResponseHead) {
        // The loss of the client is detected elsewhere.
        let _ = self.with(|session, id| session.respond(id, head, true, false));
    }

    /// Sends the head of a response. `end`: there is no content.
    ///
    /// # Errors
    /// The client has gone.
    pub fn respond(&mut self, head: &ResponseHead, end: bool) -> Result<(), StreamClosed> {
        self.with(|session, id| session.respond(id, head, false, end))
    }

    /// Returns whether everything that the peer sends has been taken.
    pub fn is_end(&self) -> bool {
        self.id.is_none_or(|id| self.connection.0.borrow().is_end(id))
    }

    /// Returns whether the peer has sent everything, even if a part has not been taken.
    pub fn has_arrived(&self) -> bool {
        self.id.is_none_or(|id| self.connection.0.borrow().has_arrived(id))
    }

    /// Returns the next piece of content; `None` at the end.
    pub fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamError>> {
        let Some(id) = self.id else { return Poll::Ready(Ok(None)) };
        let piece = ready!(self.connection.0.borrow_mut().poll_piece(cx, id))?;
        self.received += piece.as_ref().map_or(0, Bytes::len) as u64;
        Poll::Ready(Ok(piece))
    }

    /// Returns the trailers, after all content has been taken.
    pub fn trailers(&mut self) -> Option<Headers> {
        self.connection.0.borrow_mut().trailers(self.id?)
    }

    /// Reports content as passed on, so that the peer may send more.
    pub fn release(&mut self, count: usize) {
        if let Some(id) = self.id {
            self.connection.with(|session| session.release(id, count));
        }
    }

    /// Waits until content can be sent; returns the number of bytes, at most `want`.
    pub fn poll_room(&mut self, cx: &mut Context<'_>, want: usize) -> Poll<Result<usize, StreamClosed>> {
        let Some(id) = self.id else { return Poll::Ready(Err(StreamClosed)) };
        self.connection.0.borrow_mut().poll_room(cx, id, want).map(|room| room.ok_or(StreamClosed))
    }

    /// Waits for space for a head that can wait: an interim response (1xx), or trailers.
    pub fn poll_space(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.id.map_or(Poll::Ready(()), |id| self.connection.0.borrow_mut().poll_space(cx, id))
    }

    /// Sends content for which there is space. `end`: nothing follows.
    pub fn send(&mut self, data: &[u8], end: bool) -> Result<(), StreamClosed> {
        self.sent += data.len() as u64;
        self.with(|session, id| session.send(id, data, end))
    }

    /// Sends trailers and the end of the stream.
    pub fn send_trailers(&mut self, trailers: &Headers) -> Result<(), StreamClosed> {
        self.with(|session, id| session.send_trailers(id, trailers))
    }

    /// Reads the rest of a response and discards it.
    pub fn poll_ignored(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut head = ResponseHead::default();
        while !matches!(ready!(self.poll_answer(cx, "GET", &mut head)), Ok(Answered::Final(_)) | Err(_)) {}
        while let Ok(Some(piece)) = ready!(self.poll_piece(cx)) {
            self.release(piece.len());
        }
        Poll::Ready(())
    }

    /// Returns whether the stream is lost; if not, wakes the task when it is.
    pub fn is_closed(&mut self, cx: &mut Context<'_>) -> bool {
        self.id.is_some_and(|id| self.connection.0.borrow_mut().is_closed(cx, id))
    }

    /// Resets the stream.
    pub fn reset(&mut self) {
        if let Some(id) = self.id {
            self.connection.with(|session| session.reset(id, Reason::INTERNAL));
        }
    }

    fn with(&mut self, send: impl FnOnce(&mut Session, u32) -> bool) -> Result<(), StreamClosed> {
        let id = self.id.ok_or(StreamClosed)?;
        if self.connection.with(|session| send(session, id)) { Ok(()) } else { Err(StreamClosed) }
    }
}

impl Drop for Duplex {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.connection.with(|session| session.forget(id));
        }
    }
}

/// Error: the peer accepts nothing more on the stream.
#[derive(Debug)]
pub struct StreamClosed;

/// Reason why a request was not sent.
#[derive(Debug)]
pub enum Unsent {
    /// The stream already has a request.
    Used,
    /// HTTP/2 cannot represent the head.
    Unrepresentable,
    /// The connection has ended, or accepts no further stream now.
    Lost(StreamError),
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reset(reason) => write!(f, "the peer reset the stream: {reason}"),
            Self::Unprocessed => f.write_str("the peer accepts no more streams on this connection"),
            Self::Broken(reason) => write!(f, "the peer violated the HTTP/2 protocol: {reason}"),
            Self::Oversized => f.write_str("the head of the response exceeds the limit"),
            Self::Silent => f.write_str("the peer does not answer keep-alive pings"),
            Self::Dropped => f.write_str("the stream was reset"),
            Self::Closed(why) => write!(f, "the connection failed: {why}"),
        }
    }
}
