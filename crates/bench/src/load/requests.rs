//! Requests over HTTP/1.1, plain text or TLS, on one thread with epoll and a periodic timer.
//!
//! With a schedule, request number n is due at a fixed time ([`Schedule`]) and uses connection n modulo their number.
//! If that connection still waits for a response, the request waits as well, and the wait counts. All requests due in
//! the measured window are recorded. After the window, the generator waits for late responses, so that the slowest
//! requests are included. Without a schedule, each connection sends its next request when the former is answered, and
//! responses within the window count.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    os::fd::AsFd as _,
    time::Duration,
};

use anyhow::bail;
use nix::{
    libc,
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        socket::{setsockopt, sockopt},
        timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
};

use super::{Load, LoadOutcome, MAX_EXTENSION, Traffic, WindowBoundary, sequence};
use crate::{
    clock, http1,
    schedule::{Schedule, nanoseconds},
    stream::Stream,
};

/// Time without a response after which requests are given up at the end; at the latest after `MAX_GRACE`.
const GRACE: Duration = Duration::from_secs(3);
const MAX_GRACE: Duration = Duration::from_secs(60);
pub(super) const TIMER: u64 = u64::MAX;
const MAX_RECONNECTS: u64 = 10_000;

/// Applies the load. Calls `on_boundary` on this thread when the measured window begins and ends.
pub(super) fn drive(load: &Load, mut on_boundary: impl FnMut(WindowBoundary)) -> anyhow::Result<LoadOutcome> {
    let mut generator = Generator::connect(load)?;
    let start = clock::now() + 50_000_000;
    let timer = load.schedule.map(|schedule| ticks(&generator.epoll, start, schedule)).transpose()?;
    generator.start = start;

    let begin = start + nanoseconds(load.warmup);
    let mut end = begin + nanoseconds(load.window);
    let extended = end + nanoseconds(MAX_EXTENSION);
    let (mut give_up, mut done) = (u64::MAX, 0);
    let mut next = Some(WindowBoundary::Begin);
    generator.start_closed_loop()?;
    let mut events = [EpollEvent::empty(); 256];
    loop {
        let now = clock::now();
        if next == Some(WindowBoundary::Begin) && now >= begin {
            next = Some(WindowBoundary::End);
            generator.in_window = true;
            on_boundary(WindowBoundary::Begin);
        }
        let is_over = now >= end && (generator.outcome.answered_in_window > 0 || now >= extended);
        if next == Some(WindowBoundary::End) && is_over {
            next = None;
            end = now;
            give_up = end + nanoseconds(GRACE);
            generator.in_window = false;
            generator.stopped = true;
            on_boundary(WindowBoundary::End);
        }
        generator.release(now)?;
        if next.is_none() && generator.done != done {
            done = generator.done;
            give_up = give_up.max(now + nanoseconds(GRACE)).min(end + nanoseconds(MAX_GRACE));
        }
        if next.is_none() && (generator.settled() || now >= give_up) {
            return Ok(generator.finish());
        }
        let wake = match next {
            Some(WindowBoundary::Begin) => begin,
            Some(WindowBoundary::End) if now < end => end,
            Some(WindowBoundary::End) => extended,
            None => give_up,
        };
        let pause = u16::try_from((wake.saturating_sub(now)).div_ceil(1_000_000)).unwrap_or(u16::MAX);
        let count = match generator.epoll.wait(&mut events, EpollTimeout::from(pause)) {
            Err(nix::Error::EINTR) => 0,
            count => count?,
        };
        for event in &events[..count] {
            if event.data() == TIMER {
                timer.as_ref().map(TimerFd::wait).transpose()?;
            } else {
                generator.ready(usize::try_from(event.data())?, event.events())?;
            }
        }
    }
}

/// Returns a timer that wakes epoll when a request is due. It continues only after each tick is read.
pub(super) fn ticks(epoll: &Epoll, start: u64, schedule: Schedule) -> anyhow::Result<TimerFd> {
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?;
    epoll.add(timer.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, TIMER))?;
    let period = clock::timespec(schedule.interval());
    let first = Expiration::IntervalDelayed(clock::timespec(start), period);
    timer.set(first, TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
    Ok(timer)
}

struct Generator<'a> {
    load: &'a Load,
    epoll: Epoll,
    connections: Vec<ClientConnection>,
    request: Vec<u8>,
    start: u64,
    /// Number of the next request in the schedule.
    next: u64,
    /// Numbers of the first request that counts, and of the first that is not sent.
    first: u64,
    total: u64,
    /// Requests that were answered or given up.
    done: u64,
    reconnects: u64,
    in_window: bool,
    /// No more requests are sent.
    stopped: bool,
    outcome: LoadOutcome,
}

struct ClientConnection {
    stream: Stream,
    /// Requests due on this connection that have not begun.
    waiting: u64,
    /// Number of its next request.
    next: u64,
    flight: Option<RequestInProgress>,
    input: Vec<u8>,
    filled: usize,
}

/// A request in progress.
struct RequestInProgress {
    number: u64,
    sent: u64,
    /// Bytes of the request that the kernel has accepted.
    written: usize,
}

impl<'a> Generator<'a> {
    fn connect(load: &'a Load) -> anyhow::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let mut connections = Vec::with_capacity(load.connections);
        for at in 0..load.connections {
            connections.push(ClientConnection {
                stream: open(load, &epoll, at)?,
                waiting: 0,
                next: at as u64,
                flight: None,
                input: vec![0; load.payload + (16 << 10)],
                filled: 0,
            });
        }
        let due_before = |boundary| load.schedule.map_or(0, |schedule| schedule.due_before(boundary));
        let (first, total) = (due_before(load.warmup), due_before(load.warmup + load.window));
        Ok(Self {
            load,
            epoll,
            connections,
            request: sequence::request(load.payload)?,
            start: 0,
            next: 0,
            first,
            total,
            done: 0,
            reconnects: 0,
            in_window: false,
            stopped: false,
            outcome: LoadOutcome { requests: total - first, ..LoadOutcome::new()? },
        })
    }

    /// Begins a request on each connection, if there is no schedule.
    fn start_closed_loop(&mut self) -> anyhow::Result<()> {
        if self.load.schedule.is_none() {
            (0..self.connections.len()).try_for_each(|at| self.begin(at))?;
        }
        Ok(())
    }

    /// Assigns every due request to its connection.
    fn release(&mut self, now: u64) -> anyhow::Result<()> {
        let Some(schedule) = self.load.schedule else { return Ok(()) };
        while self.next < self.total && self.start + schedule.due(self.next) <= now {
            let at = usize::try_from(self.next % self.connections.len() as u64)?;
            if self.next >= self.first {
                let due = self.start + schedule.due(self.next);
                self.outcome.late.saturating_record(clock::now().saturating_sub(due));
            }
            self.next += 1;
            self.connections[at].waiting += 1;
            self.begin(at)?;
        }
        Ok(())
    }

    /// Returns true if no request that counts is in progress.
    fn settled(&self) -> bool {
        if self.load.schedule.is_none() { self.stopped } else { self.done == self.total }
    }

    fn finish(mut self) -> LoadOutcome {
        if self.load.schedule.is_none() {
            self.outcome.requests = self.outcome.due.len() + self.outcome.refused + self.outcome.unanswered;
            return self.outcome;
        }
        self.outcome.unanswered = self.outcome.requests - self.outcome.due.len() - self.outcome.refused;
        self.outcome
    }

    /// Sends the next request of a connection, if one is due and none is in progress.
    fn begin(&mut self, at: usize) -> anyhow::Result<()> {
        let stride = self.connections.len() as u64;
        let closed_loop = self.load.schedule.is_none();
        let connection = &mut self.connections[at];
        let due = if closed_loop { !self.stopped } else { connection.waiting > 0 };
        if connection.flight.is_some() || !due {
            return Ok(());
        }
        connection.waiting = connection.waiting.saturating_sub(1);
        let sent = clock::now();
        connection.flight = Some(RequestInProgress { number: connection.next, sent, written: 0 });
        connection.next += stride;
        connection.filled = 0;
        if matches!(self.load.traffic, Traffic::NewConnections { .. }) {
            self.connections[at].stream = open(self.load, &self.epoll, at)?;
        }
        self.send(at)
    }

    fn ready(&mut self, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        let written = self.connections[at].flight.as_ref().map(|flight| flight.written);
        if events.contains(EpollFlags::EPOLLOUT) {
            self.watch(at, EpollFlags::EPOLLIN)?;
            self.send(at)?;
        } else if written.is_some_and(|written| written < self.request.len()) {
            // Received bytes may continue a handshake.
            self.send(at)?;
        }
        if events.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            self.receive(at)?;
        }
        Ok(())
    }

    fn send(&mut self, at: usize) -> anyhow::Result<()> {
        let connection = &mut self.connections[at];
        let Some(flight) = &mut connection.flight else { return Ok(()) };
        while flight.written < self.request.len() {
            match connection.stream.write(&self.request[flight.written..]) {
                Ok(length) => flight.written += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if connection.stream.wants_write() {
                        return self.watch(at, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT);
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.broken(at, &error),
            }
        }
        if connection.stream.holds_output() {
            match connection.stream.flush() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return self.watch(at, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT);
                }
                Err(error) => return self.broken(at, &error),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    fn receive(&mut self, at: usize) -> anyhow::Result<()> {
        loop {
            let connection = &mut self.connections[at];
            match connection.stream.read(&mut connection.input[connection.filled..]) {
                Ok(0) => return self.broken(at, &ErrorKind::UnexpectedEof.into()),
                Ok(length) => connection.filled += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return self.broken(at, &error),
            }
            let input = &connection.input[..connection.filled];
            let Some(head) = http1::head(input) else {
                if connection.filled == connection.input.len() {
                    bail!("the headers of a response take more than {} bytes", connection.filled);
                }
                continue;
            };
            let Some(length) = head.content_length else {
                bail!(
                    "a response without content-length: {}",
                    String::from_utf8_lossy(&input[..head.length])
                );
            };
            let total = head.length.saturating_add(length);
            if total > connection.input.len() {
                bail!("a response of {length} bytes to a request of {}", self.load.payload);
            }
            if connection.filled >= total {
                let status = http1::status(input);
                return self.answered(at, status, head.close);
            }
        }
    }

    /// Handles the response to the request of a connection.
    fn answered(&mut self, at: usize, status: u16, close: bool) -> anyhow::Result<()> {
        let now = clock::now();
        // Bytes without a request; the server may send status 408 before it closes.
        let Some(flight) = self.connections[at].flight.take() else { return Ok(()) };
        self.done += 1;
        self.outcome.answered += 1;
        self.outcome.answered_in_window += u64::from(self.in_window);
        let due = self.load.schedule.map(|schedule| self.start + schedule.due(flight.number));
        let counts = if due.is_some() { flight.number >= self.first } else { self.in_window };
        if counts && status == 200 {
            self.outcome.due.saturating_record(now.saturating_sub(due.unwrap_or(flight.sent)));
            self.outcome.sent.saturating_record(now.saturating_sub(flight.sent));
            self.outcome.resumed += u64::from(self.connections[at].stream.resumed());
        } else {
            self.outcome.refused += u64::from(counts);
        }
        let fresh = matches!(self.load.traffic, Traffic::NewConnections { .. });
        if close && !fresh { self.reopen(at) } else { self.begin(at) }
    }

    /// Handles a broken connection and its request in progress.
    fn broken(&mut self, at: usize, error: &io::Error) -> anyhow::Result<()> {
        let had_request = self.connections[at].flight.take().is_some();
        self.done += u64::from(had_request);
        if self.load.schedule.is_none() && self.in_window {
            self.outcome.unanswered += u64::from(had_request);
        }
        self.reconnects += 1;
        if self.reconnects > MAX_RECONNECTS {
            bail!("{MAX_RECONNECTS} connections to {} broke, the last with: {error}", self.load.target);
        }
        self.reopen(at)
    }

    fn reopen(&mut self, at: usize) -> anyhow::Result<()> {
        self.connections[at].stream = open(self.load, &self.epoll, at)?;
        self.begin(at)
    }

    fn watch(&self, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        let mut event = EpollEvent::new(events, at as u64);
        Ok(self.epoll.modify(self.connections[at].stream.as_fd(), &mut event)?)
    }
}

/// Opens a connection and registers it with epoll by its index.
fn open(load: &Load, epoll: &Epoll, at: usize) -> anyhow::Result<Stream> {
    let stream = Stream::open(load.target, load.tls.as_ref())?;
    stream.socket().set_nonblocking(true)?;
    if matches!(load.traffic, Traffic::NewConnections { .. }) {
        // Closed by a reset: with thousands of connections per second, the ports in TIME_WAIT would run out.
        setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    }
    epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
    Ok(stream)
}
