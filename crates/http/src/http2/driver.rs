//! Driver of a connection: moves bytes between the socket and the session, in few system calls.

use std::{
    cell::RefCell,
    rc::Rc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use super::{
    duplex::Connection,
    frame::{FrameKind, Reason},
    session::{Request, Role, Session, SessionLimits, StreamError},
};
use crate::{head::RequestHead, http2::Keepalive, socket::Stream, timer::Timer};

/// Limit of unwritten output in bytes. Beyond it nothing is read: a peer that does not read gets no more responses.
const BACKLOG: usize = 256 * 1024;

/// Maximum number of bytes to read in one turn; other tasks run before the next. The session bounds the cost per byte.
const TURN: u64 = 128 * 1024;

/// The socket and the session of a connection. The connection makes progress only while the driver is polled.
pub struct Driver {
    stream: Stream,
    session: Rc<RefCell<Session>>,
    role: Role,
    /// Keep-alive, if configured.
    pings: Option<Box<PingState>>,
}

/// State of keep-alive pings.
struct PingState {
    keepalive: Keepalive,
    timer: Timer,
    /// Time of the next ping, or end of the timeout of the last one.
    due: Instant,
    ping_sent: bool,
}

impl PingState {
    fn new(keepalive: Keepalive) -> Self {
        let due = Instant::now() + next(&keepalive);
        Self { keepalive, timer: Timer::default(), due, ping_sent: false }
    }

    /// Returns whether a ping was queued.
    fn poll(&mut self, session: &mut Session, cx: &mut Context<'_>) -> bool {
        if self.ping_sent && session.is_answered() {
            (self.ping_sent, self.due) = (false, Instant::now() + next(&self.keepalive));
        }
        let mut queued = false;
        while self.timer.poll(cx, Some(self.due)).is_ready() {
            if self.ping_sent {
                session.close_with(StreamError::Silent);
                return false;
            }
            session.ask();
            (self.ping_sent, self.due) = (true, Instant::now() + self.keepalive.timeout);
            queued = true;
        }
        queued
    }
}

/// Returns the time to the next ping. Jitter spreads the pings of connections that were opened together.
fn next(keepalive: &Keepalive) -> Duration {
    let jitter = keepalive.interval.as_secs_f64() * f64::from(keepalive.jitter) / 1e6;
    keepalive.interval + Duration::from_secs_f64(jitter * fastrand::f64())
}

impl Driver {
    /// Starts HTTP/2 on a connection.
    pub fn new(stream: Stream, role: Role, limits: SessionLimits) -> Self {
        let pings = limits.options.keepalive.map(|keepalive| Box::new(PingState::new(keepalive)));
        Self { stream, session: Rc::new(RefCell::new(Session::new(role, limits))), role, pings }
    }

    /// Returns a handle to open or use streams.
    pub fn connection(&self) -> Connection {
        Connection(self.session.clone())
    }

    /// Continues from an HTTP/1.1 upgrade with the request that asked for it.
    pub fn begin(&self, settings: &[u8], head: RequestHead) {
        let mut session = self.session.borrow_mut();
        if let Err(reason) = session.begin(settings, head) {
            session.fail(reason);
        }
    }

    /// Returns whether the peer's settings have arrived.
    pub fn is_settled(&self) -> bool {
        self.session.borrow().is_settled()
    }

    /// Returns whether any stream is in use.
    pub fn is_busy(&self) -> bool {
        self.session.borrow().is_busy()
    }

    /// Returns the number of the incomplete frame, counted from the first, unless it is content. A header block counts
    /// as one frame. While too much output is unwritten, input may be unprocessed, and a new frame does not count as
    /// incomplete.
    pub fn partial(&self) -> Option<u64> {
        let session = self.session.borrow();
        let in_frame =
            || !self.stream.input.is_empty() && !session.is_in_content() && session.out.len() < BACKLOG;
        (session.is_partial() || in_frame()).then_some(session.frames)
    }

    /// Ends the connection because of the peer's behaviour (ENHANCE_YOUR_CALM).
    pub fn fail(&self) {
        self.session.borrow_mut().fail(Reason::ENHANCE_YOUR_CALM);
    }

    /// Asks the peer to open no more streams. Streams in transit are accepted.
    pub fn begin_shutdown(&self) {
        self.session.borrow_mut().begin_shutdown();
    }

    /// Returns whether the peer has been asked and has not acknowledged yet.
    pub fn is_shutting_down(&self) -> bool {
        self.session.borrow().is_shutting_down()
    }

    /// Accepts no more streams.
    pub fn refuse(&self) {
        self.session.borrow_mut().refuse();
    }

    /// Returns the wakers of the tasks of all streams.
    pub fn wakers(&self) -> Vec<Waker> {
        self.session.borrow().wakers()
    }

    /// Returns the reason for the end of the connection.
    pub fn error(&self) -> Option<StreamError> {
        self.session.borrow().error().cloned()
    }

    /// Returns the number of streams refused by the limit since the last call.
    pub fn refused(&self) -> u32 {
        std::mem::take(&mut self.session.borrow_mut().refused)
    }

    /// Returns the kind of frame that exceeded a budget.
    pub fn exceeding_frame(&self) -> Option<FrameKind> {
        self.session.borrow().exceeding_frame
    }

    /// Moves bytes in both directions; returns ready at the end of the connection.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut over = self.turn(cx);
        while let Some(pings) = &mut self.pings
            && !over
            && pings.poll(&mut self.session.borrow_mut(), cx)
        {
            over = self.turn(cx);
        }
        over |= self.session.borrow().is_over();
        // The session is not borrowed here, because woken tasks may use it.
        let mut wakes = std::mem::take(&mut self.session.borrow_mut().wakes);
        wakes.drain(..).for_each(|waker| waker.wake());
        self.session.borrow_mut().wakes = wakes;
        if over { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Returns the next request of a client; `None` at the end of the connection.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Option<Request>> {
        if let Some(request) = self.session.borrow_mut().accept() {
            return Poll::Ready(Some(request));
        }
        if self.poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        match self.session.borrow_mut().accept() {
            Some(request) => Poll::Ready(Some(request)),
            None => Poll::Pending,
        }
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> bool {
        // A client connection without handles is not needed any more.
        let wanted = self.role == Role::Server || Rc::strong_count(&self.session) > 1;
        let Self { stream, session, .. } = self;
        let session = &mut *session.borrow_mut();
        session.driver = Some(cx.waker().clone());
        if !wanted {
            session.fail(Reason::NONE);
        }
        let until = stream.received + TURN;
        loop {
            let read = session.is_over() || read(stream, session, until, cx).is_pending();
            if let Poll::Ready(Err(error)) = flush(stream, session, cx) {
                session.close_with(StreamError::Closed(error.to_string().into()));
            }
            // Input that was left unread because of unwritten output may be read after it has been written.
            if read || session.is_over() || session.out.len() >= BACKLOG {
                break;
            }
        }
        if stream.input.is_empty() {
            // Nothing is in transit.
            stream.rest();
        }
        session.is_over()
    }

    /// Closes the connection gracefully.
    pub async fn close(mut self) {
        let rest = std::mem::take(&mut self.session.borrow_mut().out);
        self.stream.output.extend(rest.bytes());
        self.stream.close(&mut Timer::default()).await;
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let wakes = {
            let mut session = self.session.borrow_mut();
            session.close_with(StreamError::Closed("closed".into()));
            std::mem::take(&mut session.wakes)
        };
        wakes.into_iter().for_each(|waker| waker.wake());
    }
}

/// Processes input until `until` bytes have been received in total; returns ready if more can be read in this turn.
fn read(stream: &mut Stream, session: &mut Session, until: u64, cx: &mut Context<'_>) -> Poll<()> {
    while session.out.len() < BACKLOG {
        if !stream.input.is_empty()
            && let Err(reason) = session.feed(&mut stream.input)
        {
            session.fail(reason);
            break;
        }
        // Checked after processing, so that unprocessed input is always an incomplete frame.
        if stream.received >= until {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        match ready!(stream.poll_fill(cx)) {
            Ok(1..) => {}
            Ok(_) => session.close_with(StreamError::Closed("closed by the peer".into())),
            Err(error) => session.close_with(StreamError::Closed(error.to_string().into())),
        }
        if session.is_over() {
            break;
        }
    }
    Poll::Ready(())
}

fn flush(stream: &mut Stream, session: &mut Session, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
    loop {
        // The buffers are swapped, not copied.
        if stream.output.is_empty() {
            if session.out.is_empty() {
                break;
            }
            std::mem::swap(&mut stream.output, &mut session.out);
        }
        ready!(stream.poll_flush(cx))?;
    }
    // TLS may hold ciphertext although the buffer is empty.
    if !stream.is_plain() {
        ready!(stream.poll_flush(cx))?;
    }
    if session.written() {
        cx.waker().wake_by_ref();
    }
    Poll::Ready(Ok(()))
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::AsyncWriteExt as _,
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::{
        buffer::{Buffer, LARGE},
        http2::{Http2Options, frame, heads::Bounds},
    };

    #[tokio::test]
    async fn a_turn_reads_a_limited_amount() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let stream = Stream::new(listener.accept().await.unwrap().0);
        let limits =
            SessionLimits { head: Bounds { size: 4096, fields: 20 }, options: Http2Options::new(10) };
        let mut driver = Driver::new(stream, Role::Server, limits);
        // A request whose content exceeds one turn.
        let mut sent = Buffer::default();
        sent.extend(frame::PREFACE);
        frame::settings(&mut sent, &[]);
        frame::headers(&mut sent, 1, false, b"\x83\x86\x84\x01\x01a", 100);
        for _ in 0..1000 {
            frame::head(&mut sent, FrameKind::Data, 0, 1, 200);
            sent.extend(&[0; 200]);
        }
        let total = sent.len() as u64;
        let peer = tokio::spawn(async move {
            peer.write_all(sent.bytes()).await.unwrap();
            peer
        });
        // The socket holds as much as fits before the first turn.
        tokio::task::yield_now().await;
        std::future::poll_fn(|cx| {
            let before = driver.stream.received;
            assert!(driver.poll(cx).is_pending(), "{:?}", driver.error());
            assert!(driver.stream.received - before < TURN + LARGE as u64);
            // Only an incomplete frame header may be left.
            assert!(driver.stream.input.len() < frame::HEAD, "{}", driver.stream.input.len());
            if driver.stream.received < total { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        drop(peer.await);
    }
}
