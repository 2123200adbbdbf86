//! An HTTP/2 connection of a client: moves bytes between the socket and the session, and lends streams to calls.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use skysail_http::{
    buffer::Buffer,
    head::{Headers, ResponseHead},
    http2::{Bounds, Http2Options, Reason, Request, Role, Session, SessionLimits, StreamError},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    time::timeout,
};

use crate::limits;

/// Limit of unwritten output in bytes. Beyond it nothing is read: a client that does not read gets no more responses.
const BACKLOG: usize = 256 << 10;
/// Maximum number of bytes to read in one poll, of which a task makes a few before other connections are polled.
const TURN: usize = 128 << 10;
/// Receive windows of a stream and of the connection in bytes. Requests of an idle client are short.
const WINDOW: u32 = 65_535;
/// Timeout for the close of a socket.
const CLOSE: Duration = Duration::from_secs(1);
/// Maximum number of header fields of a call.
const MAX_FIELDS: usize = 128;

/// The socket and the session of a connection. It makes progress only while it is polled.
pub(super) struct ClientConnection<IO> {
    io: IO,
    input: Buffer,
    output: Buffer,
    /// The socket may hold written bytes, such as a record of TLS.
    unflushed: bool,
    /// Never locked for long, and only by the task of the connection.
    session: Arc<Mutex<Session>>,
}

impl<IO: AsyncRead + AsyncWrite + Unpin> ClientConnection<IO> {
    /// Begins HTTP/2.
    pub(super) fn new(io: IO) -> Self {
        let options = Http2Options {
            stream_window: WINDOW,
            connection_window: WINDOW,
            ..Http2Options::new(limits::MAX_CALLS)
        };
        let head = Bounds { size: limits::MAX_HEAD as usize, fields: MAX_FIELDS };
        let session = Session::new(Role::Server, SessionLimits { head, options });
        let (input, output) = Default::default();
        Self { io, input, output, unflushed: false, session: Arc::new(Mutex::new(session)) }
    }

    pub(super) fn session(&self) -> MutexGuard<'_, Session> {
        lock(&self.session)
    }

    /// Waits until the client has begun HTTP/2, or has left.
    pub(super) async fn begun(&mut self) {
        poll_fn(|cx| {
            if self.poll(cx).is_pending() && !self.session().is_settled() {
                Poll::Pending
            } else {
                Poll::Ready(())
            }
        })
        .await;
    }

    /// Reads and writes what is possible now; returns ready at the end of the connection.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Self { io, input, output, unflushed, session } = self;
        let session = &mut *lock(session);
        let mut left = TURN;
        loop {
            let all_read = session.is_over() || read(io, input, session, &mut left, cx).is_pending();
            let flushed = flush(io, output, unflushed, session, cx);
            if let Poll::Ready(Err(error)) = &flushed {
                session.close_with(StreamError::Closed(error.to_string().into()));
            }
            // A graceful end waits until all output is written.
            if session.error().is_some() || (session.is_over() && flushed.is_ready()) {
                return Poll::Ready(());
            }
            // Input that was left unread because of unwritten output may be read after it has been written.
            if all_read || session.out.len() >= BACKLOG {
                return Poll::Pending;
            }
        }
    }

    /// Returns whether a call can continue since the last poll.
    pub(super) fn take_woken(&self) -> bool {
        // Each waker is that of the task which polls the connection.
        let mut session = self.session();
        let woken = !session.wakes.is_empty();
        session.wakes.clear();
        woken
    }

    /// Returns the next request with its stream.
    pub(super) fn accept(&mut self) -> Option<(Request, Arc<CallStream>)> {
        let request = self.session().accept()?;
        let stream = CallStream { session: Arc::clone(&self.session), id: request.stream };
        Some((request, Arc::new(stream)))
    }

    /// Closes the socket after a graceful end. TLS tells the client that nothing was cut off.
    pub(super) async fn close(&mut self) {
        if self.session().error().is_none() {
            // The socket is closed in any case.
            let _ = timeout(CLOSE, self.io.shutdown()).await;
        }
    }

    /// Returns the reason of the end, unless the client or this side has ended the connection without an error.
    pub(super) fn result(&self) -> Result<(), StreamError> {
        self.session().error().cloned().map_or(Ok(()), Err)
    }
}

/// Processes input. Returns ready if more can be read after output has been written, or at the end of the input.
fn read(
    io: &mut (impl AsyncRead + Unpin),
    input: &mut Buffer,
    session: &mut Session,
    left: &mut usize,
    cx: &mut Context<'_>,
) -> Poll<()> {
    while session.out.len() < BACKLOG && !session.is_over() {
        if !input.is_empty()
            && let Err(reason) = session.feed(input)
        {
            session.fail(reason);
            break;
        }
        if *left == 0 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let space = input.spare();
        let length = space.len().min(*left);
        let mut space = ReadBuf::new(&mut space[..length]);
        let read = Pin::new(&mut *io).poll_read(cx, &mut space);
        let count = space.filled().len();
        input.filled(count);
        *left -= count;
        if input.is_empty() {
            // An idle connection holds no memory for input.
            input.clear();
        }
        match ready!(read) {
            Ok(()) if count > 0 => {}
            Ok(()) => session.close_with(StreamError::Closed("closed by the client".into())),
            Err(error) => session.close_with(StreamError::Closed(error.to_string().into())),
        }
    }
    Poll::Ready(())
}

/// Writes output. Streams that wait for space are woken after all of it is written.
fn flush(
    io: &mut (impl AsyncWrite + Unpin),
    output: &mut Buffer,
    unflushed: &mut bool,
    session: &mut Session,
    cx: &mut Context<'_>,
) -> Poll<std::io::Result<()>> {
    loop {
        // The buffers are swapped, not copied.
        if output.is_empty() {
            if session.out.is_empty() {
                break;
            }
            std::mem::swap(output, &mut session.out);
        }
        match ready!(Pin::new(&mut *io).poll_write(cx, output.bytes()))? {
            0 => return Poll::Ready(Err(std::io::ErrorKind::WriteZero.into())),
            count => output.consume(count),
        }
        *unflushed = true;
    }
    if *unflushed {
        ready!(Pin::new(io).poll_flush(cx))?;
        *unflushed = false;
    }
    if session.written() {
        cx.waker().wake_by_ref();
    }
    Poll::Ready(Ok(()))
}

fn lock(session: &Mutex<Session>) -> MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The stream of a call, which the call's requests and responses share. Released when both are dropped.
pub(crate) struct CallStream {
    session: Arc<Mutex<Session>>,
    id: u32,
}

impl CallStream {
    /// Returns the next data of the client; `None` at the end.
    pub(super) fn poll_data(&self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, StreamError>> {
        lock(&self.session).poll_piece(cx, self.id)
    }

    /// Reports data as used, so that the client may send more.
    pub(super) fn release(&self, bytes: usize) {
        lock(&self.session).release(self.id, bytes);
    }

    /// Sends the head of the response; returns false if the stream is lost.
    pub(super) fn respond(&self, head: &ResponseHead, end: bool) -> bool {
        lock(&self.session).respond(self.id, head, false, end)
    }

    /// Returns how much of `want` can be sent now; `None` if the stream is lost.
    pub(super) fn room(&self, want: usize) -> Option<usize> {
        lock(&self.session).room(self.id, want)
    }

    /// Waits until data can be sent; returns the number of bytes, at most `want`, and `None` if the stream is lost.
    pub(super) fn poll_room(&self, cx: &mut Context<'_>, want: usize) -> Poll<Option<usize>> {
        lock(&self.session).poll_room(cx, self.id, want)
    }

    /// Sends a frame of data that `fill` appends; see [`Session::send_frame`].
    pub(super) fn send_frame(&self, room: usize, fill: impl FnOnce(&mut Buffer, usize)) -> Option<usize> {
        lock(&self.session).send_frame(self.id, room, fill)
    }

    /// Resets the stream: the call was not processed.
    pub(super) fn refuse(&self) {
        lock(&self.session).reset(self.id, Reason::REFUSED);
    }

    /// Sends the trailers, which end the response; returns false if the stream is lost.
    pub(super) fn send_trailers(&self, trailers: &Headers) -> bool {
        lock(&self.session).send_trailers(self.id, trailers)
    }
}

impl Drop for CallStream {
    fn drop(&mut self) {
        lock(&self.session).forget(self.id);
    }
}

impl std::fmt::Debug for CallStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallStream").field("id", &self.id).finish_non_exhaustive()
    }
}
