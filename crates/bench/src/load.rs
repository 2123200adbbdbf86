//! The open-loop load generator: one thread, epoll, a periodic timer.
//!
//! Request number n is due at a moment fixed beforehand ([`Schedule`]) and goes over connection n modulo their
//! number. If that connection still waits for an answer the request waits, too, and the wait counts. Requests due
//! in the measured window are recorded whenever their answer comes; after the window the generator waits a while
//! for the rest, so that the slowest ones are not left out.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::fd::AsFd as _,
    time::Duration,
};

use anyhow::{Context as _, bail};
use hdrhistogram::Histogram;
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};

use crate::{
    clock, http1,
    schedule::{Schedule, nanoseconds},
};

/// What to send.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) target: SocketAddr,
    pub(crate) connections: usize,
    pub(crate) schedule: Schedule,
    /// Bytes of a request's body, and of an answer's.
    pub(crate) payload: usize,
    pub(crate) warmup: Duration,
    pub(crate) window: Duration,
}

/// A moment at which somebody else looks at the clock, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// The measured window begins.
    Begin,
    /// The measured window ends.
    End,
}

/// What came back.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Nanoseconds from when a request was due to its complete answer.
    pub(crate) due: Histogram<u64>,
    /// Nanoseconds from when it was sent.
    pub(crate) sent: Histogram<u64>,
    /// Requests due in the window.
    pub(crate) requests: u64,
    /// Of these, those without an answer: their connection broke or time was up.
    pub(crate) unanswered: u64,
    /// Of these, those answered by something other than 200.
    pub(crate) refused: u64,
    /// Answers that came within the window, whenever their requests were due.
    pub(crate) answered_in_window: u64,
}

/// How long answers may take after the window.
const GRACE: Duration = Duration::from_secs(3);
/// Longest latency a histogram can tell.
const LONGEST: u64 = 60_000_000_000;
const TIMER: u64 = u64::MAX;
const MOST_RECONNECTS: u64 = 10_000;

/// A histogram of nanoseconds to three digits.
pub(crate) fn histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, LONGEST, 3)?)
}

/// Applies the load; `tell` is called on this thread when the measured window begins and ends.
pub(crate) fn drive(load: &Load, mut tell: impl FnMut(Moment)) -> anyhow::Result<Outcome> {
    let mut generator = Generator::connect(load)?;
    let start = clock::now() + 50_000_000;
    let timer = ticks(&generator.epoll, start, load.schedule)?;
    generator.start = start;

    let begin = start + nanoseconds(load.warmup);
    let end = begin + nanoseconds(load.window);
    let give_up = end + nanoseconds(GRACE);
    let mut next = Some(Moment::Begin);
    let mut events = [EpollEvent::empty(); 256];
    loop {
        let now = clock::now();
        if next == Some(Moment::Begin) && now >= begin {
            next = Some(Moment::End);
            generator.in_window = true;
            tell(Moment::Begin);
        }
        if next == Some(Moment::End) && now >= end {
            next = None;
            generator.in_window = false;
            tell(Moment::End);
        }
        generator.release(now)?;
        if next.is_none() && (generator.settled() || now >= give_up) {
            return Ok(generator.finish());
        }
        let wake = if now < begin {
            begin
        } else if now < end {
            end
        } else {
            give_up
        };
        let pause = u16::try_from((wake.saturating_sub(now)).div_ceil(1_000_000)).unwrap_or(u16::MAX);
        let count = match generator.epoll.wait(&mut events, EpollTimeout::from(pause)) {
            Err(nix::Error::EINTR) => 0,
            count => count?,
        };
        for event in &events[..count] {
            if event.data() == TIMER {
                timer.wait()?;
            } else {
                generator.ready(usize::try_from(event.data())?, event.events())?;
            }
        }
    }
}

/// A timer that wakes epoll whenever a request is due. It goes on only once each tick is read.
fn ticks(epoll: &Epoll, start: u64, schedule: Schedule) -> anyhow::Result<TimerFd> {
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
    connections: Vec<Connection>,
    request: Vec<u8>,
    start: u64,
    /// The next request of the schedule.
    next: u64,
    /// Number of the first request that counts, and of the first that is no longer sent.
    first: u64,
    total: u64,
    /// Requests answered or given up.
    done: u64,
    reconnects: u64,
    in_window: bool,
    outcome: Outcome,
}

struct Connection {
    stream: TcpStream,
    /// Requests due on this connection but not begun.
    waiting: u64,
    /// Number of its next request.
    next: u64,
    flight: Option<Flight>,
    input: Vec<u8>,
    filled: usize,
}

/// A request under way.
struct Flight {
    number: u64,
    sent: u64,
    /// Bytes of the request that the kernel took.
    written: usize,
}

impl<'a> Generator<'a> {
    fn connect(load: &'a Load) -> anyhow::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let mut connections = Vec::with_capacity(load.connections);
        for at in 0..load.connections {
            let stream = open(load.target, &epoll, at)?;
            let input = vec![0; load.payload + (16 << 10)];
            connections.push(Connection {
                stream,
                waiting: 0,
                next: at as u64,
                flight: None,
                input,
                filled: 0,
            });
        }
        let first = load.schedule.due_before(load.warmup);
        let total = load.schedule.due_before(load.warmup + load.window);
        let mut request = Vec::with_capacity(load.payload + 256);
        write!(
            request,
            "POST /echo HTTP/1.1\r\nHost: server.mesh.local\r\nUser-Agent: skysail-bench\r\n\
             Content-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n",
            load.payload
        )?;
        request.resize(request.len() + load.payload, b'x');
        Ok(Self {
            load,
            epoll,
            connections,
            request,
            start: 0,
            next: 0,
            first,
            total,
            done: 0,
            reconnects: 0,
            in_window: false,
            outcome: Outcome {
                due: histogram()?,
                sent: histogram()?,
                requests: total - first,
                unanswered: 0,
                refused: 0,
                answered_in_window: 0,
            },
        })
    }

    /// Hands every request that is due by now to its connection.
    fn release(&mut self, now: u64) -> anyhow::Result<()> {
        while self.next < self.total && self.start + self.load.schedule.due(self.next) <= now {
            let at = usize::try_from(self.next % self.connections.len() as u64)?;
            self.next += 1;
            self.connections[at].waiting += 1;
            self.begin(at)?;
        }
        Ok(())
    }

    fn settled(&self) -> bool {
        self.done == self.total
    }

    fn finish(mut self) -> Outcome {
        self.outcome.unanswered = self.outcome.requests - self.outcome.due.len() - self.outcome.refused;
        self.outcome
    }

    /// Sends the connection's next request if one is due and none is under way.
    fn begin(&mut self, at: usize) -> anyhow::Result<()> {
        let stride = self.connections.len() as u64;
        let connection = &mut self.connections[at];
        if connection.flight.is_some() || connection.waiting == 0 {
            return Ok(());
        }
        connection.waiting -= 1;
        connection.flight = Some(Flight { number: connection.next, sent: clock::now(), written: 0 });
        connection.next += stride;
        connection.filled = 0;
        self.send(at)
    }

    fn ready(&mut self, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        if events.contains(EpollFlags::EPOLLOUT) {
            self.watch(at, EpollFlags::EPOLLIN)?;
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
                    return self.watch(at, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return self.broken(at, &error),
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
                    bail!("an answer's headers take more than {} bytes", connection.filled);
                }
                continue;
            };
            let Some(length) = head.content_length else {
                bail!("an answer without content-length: {}", String::from_utf8_lossy(&input[..head.length]));
            };
            let total = head.length.saturating_add(length);
            if total > connection.input.len() {
                bail!("an answer of {length} bytes to a request of {}", self.load.payload);
            }
            if connection.filled >= total {
                let status = http1::status(input);
                return self.answered(at, status, head.close);
            }
        }
    }

    /// The connection's request has its answer.
    fn answered(&mut self, at: usize, status: u16, close: bool) -> anyhow::Result<()> {
        let now = clock::now();
        // Bytes that nobody asked for; the status may be 408 before the other side closes.
        let Some(flight) = self.connections[at].flight.take() else { return Ok(()) };
        self.done += 1;
        self.outcome.answered_in_window += u64::from(self.in_window);
        if flight.number >= self.first {
            if status == 200 {
                let due = self.start + self.load.schedule.due(flight.number);
                self.outcome.due.saturating_record(now.saturating_sub(due));
                self.outcome.sent.saturating_record(now.saturating_sub(flight.sent));
            } else {
                self.outcome.refused += 1;
            }
        }
        if close { self.reopen(at) } else { self.begin(at) }
    }

    /// The connection is lost, and with it the request under way.
    fn broken(&mut self, at: usize, error: &io::Error) -> anyhow::Result<()> {
        self.done += u64::from(self.connections[at].flight.take().is_some());
        self.reconnects += 1;
        if self.reconnects > MOST_RECONNECTS {
            bail!("{MOST_RECONNECTS} connections to {} broke, the last with: {error}", self.load.target);
        }
        self.reopen(at)
    }

    fn reopen(&mut self, at: usize) -> anyhow::Result<()> {
        self.connections[at].stream = open(self.load.target, &self.epoll, at)?;
        self.begin(at)
    }

    fn watch(&self, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        let mut event = EpollEvent::new(events, at as u64);
        Ok(self.epoll.modify(self.connections[at].stream.as_fd(), &mut event)?)
    }
}

/// Opens a connection. It blocks, which on loopback takes no longer than the call itself.
fn open(target: SocketAddr, epoll: &Epoll, at: usize) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(target).with_context(|| format!("cannot connect to {target}"))?;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::serve;

    fn load(target: SocketAddr) -> Load {
        Load {
            target,
            connections: 3,
            schedule: Schedule::per_second(500),
            payload: 1024,
            warmup: Duration::from_millis(100),
            window: Duration::from_millis(400),
        }
    }

    #[test]
    fn the_timer_ticks_again_and_again() {
        let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
        let timer = ticks(&epoll, clock::now(), Schedule::per_second(1_000)).unwrap();
        for _ in 0..3 {
            let mut events = [EpollEvent::empty(); 2];
            assert_eq!(epoll.wait(&mut events, EpollTimeout::from(10_000_u16)), Ok(1));
            assert_eq!(events[0].data(), TIMER);
            timer.wait().unwrap();
        }
    }

    #[test]
    fn every_request_of_the_window_is_accounted_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        std::thread::spawn(move || serve::serve(&listener).unwrap());
        let mut moments = Vec::new();
        let outcome = drive(&load(target), |moment| moments.push(moment)).unwrap();
        assert_eq!(moments, [Moment::Begin, Moment::End]);
        assert_eq!((outcome.requests, outcome.unanswered, outcome.refused), (200, 0, 0));
        assert_eq!(outcome.due.len(), 200);
        // A request is never sent before it is due.
        assert!(outcome.due.max() >= outcome.sent.min());
        assert!(outcome.due.mean() >= outcome.sent.mean());
    }

    #[test]
    fn requests_that_wait_for_a_stalled_server_count_from_when_they_were_due() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        let (outcome, begun) = std::thread::scope(|scope| {
            let (told, begun) = std::sync::mpsc::sync_channel(2);
            let driving = scope.spawn(move || {
                let stalled = Load { connections: 1, warmup: Duration::ZERO, ..load(target) };
                drive(&stalled, |moment| told.send(moment).unwrap())
            });
            // Nothing is answered until the window is over.
            let moments = [begun.recv().unwrap(), begun.recv().unwrap()];
            std::thread::spawn(move || serve::serve(&listener).unwrap());
            (driving.join().unwrap().unwrap(), moments)
        });
        assert_eq!(begun, [Moment::Begin, Moment::End]);
        assert_eq!((outcome.requests, outcome.unanswered, outcome.answered_in_window), (200, 0, 0));
        // The first was due 400 ms before the end; all but it were sent after the end.
        assert!(outcome.due.max() >= 390_000_000, "{}", outcome.due.max());
        assert!(outcome.due.value_at_quantile(0.5) >= 190_000_000);
        assert!(outcome.sent.value_at_quantile(0.5) < outcome.due.value_at_quantile(0.5));
    }

    #[test]
    fn answers_other_than_200_are_no_latencies() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 4096]);
                let _ =
                    stream.write_all(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                let _ = stream.shutdown(std::net::Shutdown::Write);
            }
        });
        let one = Load { connections: 1, ..load(target) };
        let outcome = drive(&one, |_| ()).unwrap();
        assert_eq!(outcome.due.len(), 0);
        assert_eq!(outcome.refused + outcome.unanswered, 200);
        assert!(outcome.refused > 0);
    }
}
