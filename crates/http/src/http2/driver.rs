//! What moves a connection's bytes: one read for all that has come, one write for all that waits.

use std::{
    cell::RefCell,
    rc::Rc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use super::{
    duplex::Connection,
    frame::{FrameKind, Reason},
    session::{Lost, Request, Role, Session, SessionLimits},
};
use crate::{head::RequestHead, http2::Keepalive, socket::Stream, timer::Timer};

/// While this much waits to be written nothing is read: a peer that does not read gets no more answers.
const BACKLOG: usize = 256 * 1024;

/// Bytes read in one turn, after which other tasks come first. What a byte can cost is bounded by the session.
const TURN: u64 = 128 * 1024;

/// A connection's socket with its session. Must be polled for the connection to live.
pub struct Driver {
    stream: Stream,
    session: Rc<RefCell<Session>>,
    role: Role,
    /// Only where pings are configured.
    pulse: Option<Box<Pulse>>,
}

/// Asks the peer now and then whether it is there.
struct Pulse {
    keepalive: Keepalive,
    timer: Timer,
    /// The next ping, or the end of the patience with the last.
    due: Instant,
    asked: bool,
}

impl Pulse {
    fn new(keepalive: Keepalive) -> Self {
        let due = Instant::now() + next(&keepalive);
        Self { keepalive, timer: Timer::default(), due, asked: false }
    }

    /// Whether something is to be written.
    fn beat(&mut self, session: &mut Session, cx: &mut Context<'_>) -> bool {
        if self.asked && session.is_answered() {
            (self.asked, self.due) = (false, Instant::now() + next(&self.keepalive));
        }
        let mut news = false;
        while self.timer.poll(cx, Some(self.due)).is_ready() {
            if self.asked {
                session.lose(Lost::Silent);
                return false;
            }
            session.ask();
            (self.asked, self.due) = (true, Instant::now() + self.keepalive.timeout);
            news = true;
        }
        news
    }
}

/// The time to the next ping, which differs so that connections opened together are not asked together.
fn next(keepalive: &Keepalive) -> Duration {
    let jitter = keepalive.interval.as_secs_f64() * f64::from(keepalive.jitter) / 1e6;
    keepalive.interval + Duration::from_secs_f64(jitter * fastrand::f64())
}

impl Driver {
    /// Starts HTTP/2 on a connection.
    pub fn new(stream: Stream, role: Role, limits: SessionLimits) -> Self {
        let pulse = limits.options.keepalive.map(|keepalive| Box::new(Pulse::new(keepalive)));
        Self { stream, session: Rc::new(RefCell::new(Session::new(role, limits))), role, pulse }
    }

    /// The connection, for those who want streams of it.
    pub fn connection(&self) -> Connection {
        Connection(self.session.clone())
    }

    /// Goes on from HTTP/1.1 with the request that asked for it.
    pub fn begin(&self, settings: &[u8], head: RequestHead) {
        let mut session = self.session.borrow_mut();
        if let Err(reason) = session.begin(settings, head) {
            session.fail(reason);
        }
    }

    /// Whether the peer's settings have come.
    pub fn is_settled(&self) -> bool {
        self.session.borrow().is_settled()
    }

    /// Whether any stream is in use.
    pub fn is_busy(&self) -> bool {
        self.session.borrow().is_busy()
    }

    /// Which frame has come in part, counted from the first, if it is not content; a header block counts as one frame.
    /// While too much waits to be written, what has come may be unread, and no new frame counts as partial.
    pub fn partial(&self) -> Option<u64> {
        let session = self.session.borrow();
        let in_frame =
            || !self.stream.input.is_empty() && !session.is_in_content() && session.out.len() < BACKLOG;
        (session.is_partial() || in_frame()).then_some(session.frames)
    }

    /// Ends the connection for what the peer did.
    pub fn fail(&self) {
        self.session.borrow_mut().fail(Reason::CALM);
    }

    /// Asks the peer to open no more streams; those on their way are taken.
    pub fn leave(&self) {
        self.session.borrow_mut().leave();
    }

    /// Whether the peer has been told so, and has not said that it knows.
    pub fn is_leaving(&self) -> bool {
        self.session.borrow().is_leaving()
    }

    /// Takes no more streams.
    pub fn refuse(&self) {
        self.session.borrow_mut().refuse();
    }

    /// What wakes the tasks of all streams.
    pub fn wakers(&self) -> Vec<Waker> {
        self.session.borrow().wakers()
    }

    /// Why the connection ended.
    pub fn lost(&self) -> Option<Lost> {
        self.session.borrow().lost().cloned()
    }

    /// How many streams were refused since this was last asked, because there were too many at once.
    pub fn refused(&self) -> u32 {
        std::mem::take(&mut self.session.borrow_mut().refused)
    }

    /// What the peer sent too often, if it was that.
    pub fn culprit(&self) -> Option<FrameKind> {
        self.session.borrow().culprit
    }

    /// Moves bytes both ways; ready when nothing more can come of the connection.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut over = self.turn(cx);
        while let Some(pulse) = &mut self.pulse
            && !over
            && pulse.beat(&mut self.session.borrow_mut(), cx)
        {
            over = self.turn(cx);
        }
        over |= self.session.borrow().is_over();
        // Nothing is borrowed here: those who are woken may look at the session.
        let mut wakes = std::mem::take(&mut self.session.borrow_mut().wakes);
        wakes.drain(..).for_each(|waker| waker.wake());
        self.session.borrow_mut().wakes = wakes;
        if over { Poll::Ready(()) } else { Poll::Pending }
    }

    /// The next request of a client; `None` at the end of the connection.
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
        // A client's connection that nobody holds is wanted no more.
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
                session.lose(Lost::Closed(error.to_string().into()));
            }
            // What was not read for too much that waited may be read if that has gone.
            if read || session.is_over() || session.out.len() >= BACKLOG {
                break;
            }
        }
        if stream.input.is_empty() {
            // Nothing is under way.
            stream.rest();
        }
        session.is_over()
    }

    /// Ends the connection in good order.
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
            session.lose(Lost::Closed("closed".into()));
            std::mem::take(&mut session.wakes)
        };
        wakes.into_iter().for_each(|waker| waker.wake());
    }
}

/// Takes in what has come, until `until` bytes have been received in all; ready if more can be read in this turn.
fn read(stream: &mut Stream, session: &mut Session, until: u64, cx: &mut Context<'_>) -> Poll<()> {
    while session.out.len() < BACKLOG {
        if !stream.input.is_empty()
            && let Err(reason) = session.feed(&mut stream.input)
        {
            session.fail(reason);
            break;
        }
        // Only now: what is left unread then is part of a frame, and not what there was no time for.
        if stream.received >= until {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        match ready!(stream.poll_fill(cx)) {
            Ok(1..) => {}
            Ok(_) => session.lose(Lost::Closed("closed by the peer".into())),
            Err(error) => session.lose(Lost::Closed(error.to_string().into())),
        }
        if session.is_over() {
            break;
        }
    }
    Poll::Ready(())
}

fn flush(stream: &mut Stream, session: &mut Session, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
    loop {
        // Not copied: the two buffers change places.
        if stream.output.is_empty() {
            if session.out.is_empty() {
                break;
            }
            std::mem::swap(&mut stream.output, &mut session.out);
        }
        ready!(stream.poll_flush(cx))?;
    }
    // Even if nothing is left, TLS may hold some.
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
    async fn one_turn_reads_a_bounded_amount() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let stream = Stream::new(listener.accept().await.unwrap().0);
        let limits =
            SessionLimits { head: Bounds { size: 4096, fields: 20 }, options: Http2Options::new(10) };
        let mut driver = Driver::new(stream, Role::Server, limits);
        // A request whose content is more than one turn reads.
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
        // As much as fits lies in the socket before the first turn.
        tokio::task::yield_now().await;
        std::future::poll_fn(|cx| {
            let before = driver.stream.received;
            assert!(driver.poll(cx).is_pending(), "{:?}", driver.lost());
            assert!(driver.stream.received - before < TURN + LARGE as u64);
            // All of it is taken, but for a frame's head that has come in part.
            assert!(driver.stream.input.len() < frame::HEAD, "{}", driver.stream.input.len());
            if driver.stream.received < total { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        drop(peer.await);
    }
}
