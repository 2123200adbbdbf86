//! The fast engine: HTTP/1 and TCP, many connections on one thread with epoll.
//!
//! A connection has at most one request in progress. Connections that wait for a due time are in a heap. A connection
//! that is still busy at a due time sends the request when it is free, and the wait counts.

mod connection;

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range, os::fd::AsFd as _, sync::Arc};

use anyhow::{Context as _, bail};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
};

use self::connection::{Connection, Step};
use crate::{
    args::LoadArgs,
    clock,
    pace::Pace,
    tally::{Failure, Outcome, Tally, Times},
    target::{Protocol, Target},
    window::Window,
    worker::{Interval, Shared, nanoseconds},
};

/// Data of the timer's events.
const TIMER: u64 = u64::MAX;
/// Maximum time in epoll, after which timeouts and the end are checked; in nanoseconds.
const TURN: u64 = 50_000_000;
/// Time between two reports to the thread that prints, in nanoseconds.
const REPORT: u64 = 200_000_000;

/// Requests that all connections send.
#[derive(Debug)]
pub(crate) struct Requests {
    /// Bytes of a request.
    pub(crate) usual: Vec<u8>,
    /// Bytes of the last request of a connection.
    pub(crate) last: Vec<u8>,
}

impl Requests {
    /// Builds the requests to a target.
    pub(crate) fn to(target: &Target, args: &LoadArgs) -> anyhow::Result<Self> {
        if target.protocol == Protocol::Tcp {
            // Fortio's default payload of TCP has 24 bytes too.
            let bytes = if target.payload.is_empty() {
                b"skysail load, 24 bytes.\n".to_vec()
            } else {
                target.payload.clone()
            };
            return Ok(Self { last: bytes.clone(), usual: bytes });
        }
        Ok(Self {
            usual: target.http1_request(args.http10, false)?,
            last: target.http1_request(args.http10, true)?,
        })
    }
}

/// One thread of the generator.
struct Engine<'a> {
    args: &'a LoadArgs,
    target: &'a Target,
    requests: &'a Requests,
    shared: &'a Shared,
    epoll: Epoll,
    timer: TimerFd,
    /// Due time for which the timer is set.
    armed: u64,
    connections: Vec<Connection>,
    paces: Vec<Pace>,
    /// Connections that wait, by their due times since the start.
    waiting: BinaryHeap<Reverse<(u64, usize)>>,
    rng: fastrand::Rng,
    start: u64,
    tally: Tally,
    interval: Interval,
    /// Time of the next check of timeouts.
    next_check: u64,
    /// Number of connections that still send.
    active: usize,
    /// The load has not begun; each connection sends one request, which is not recorded.
    warming: bool,
    /// First failure of the requests before the start.
    failure: Option<Outcome>,
}

/// Sends the requests of the connections with these indices. Returns the results when all have ended. With a window, only
/// requests that are due in it count.
pub(crate) fn run(
    args: &LoadArgs,
    target: &Target,
    requests: &Requests,
    shared: &Arc<Shared>,
    indices: Range<u64>,
    window: Option<&mut Window<'_>>,
) -> anyhow::Result<Tally> {
    let prepared = Engine::new(args, target, requests, shared, indices).and_then(|mut engine| {
        engine.warm_up()?;
        Ok(engine)
    });
    if prepared.is_err() {
        shared.stop();
    }
    let start = shared.wait_ready();
    let mut engine = prepared?;
    engine.start = start;
    engine.run(window).inspect_err(|_| shared.stop())?;
    Ok(engine.finish())
}

impl<'a> Engine<'a> {
    fn new(
        args: &'a LoadArgs,
        target: &'a Target,
        requests: &'a Requests,
        shared: &'a Shared,
        indices: Range<u64>,
    ) -> anyhow::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer =
            TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?;
        // The event is edge-triggered, so expirations need not be read.
        epoll.add(timer.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, TIMER))?;
        let settings = args.pace(u64::from(args.connections));
        let mut rng = fastrand::Rng::new();
        let connections =
            indices.clone().map(|_| Connection::new(args, target, &mut rng)).collect::<Vec<_>>();
        Ok(Self {
            args,
            target,
            requests,
            shared,
            epoll,
            timer,
            armed: 0,
            next_check: 0,
            active: connections.len(),
            connections,
            paces: indices.map(|index| settings.of_connection(index)).collect(),
            waiting: BinaryHeap::new(),
            rng,
            start: 0,
            tally: Tally::new()?,
            interval: shared.empty_interval(),
            warming: true,
            failure: None,
        })
    }

    /// Opens all connections and sends one request over each.
    fn warm_up(&mut self) -> anyhow::Result<()> {
        let now = clock::now();
        for at in 0..self.connections.len() {
            self.begin(at, now)?;
        }
        while self.active > 0 && !self.shared.is_stopped() {
            self.turn(u64::MAX)?;
        }
        if let Some(outcome) = self.failure.filter(|_| !self.args.allow_initial_errors) {
            let reason = self.tally.reason(outcome);
            bail!("the first request to {} {reason}; -allow-initial-errors begins anyway", self.target.url);
        }
        self.active = self.connections.len();
        self.warming = false;
        Ok(())
    }

    /// Sends requests until all connections and the window have ended.
    fn run(&mut self, mut window: Option<&mut Window<'_>>) -> anyhow::Result<()> {
        if let Some(window) = &window {
            self.tally.first = self.start + window.begin();
        }
        let cpu = clock::thread_cpu();
        let now = clock::now().saturating_sub(self.start);
        for at in 0..self.connections.len() {
            self.wait(at, now);
        }
        let duration = self.args.duration().map_or(u64::MAX, nanoseconds);
        let give_up = self.start.saturating_add(duration).saturating_add(nanoseconds(self.args.timeout));
        let mut report = self.start + REPORT;
        loop {
            let boundary = window.as_ref().and_then(|window| window.next());
            if self.active == 0 && boundary.is_none() || self.shared.is_stopped() {
                break;
            }
            self.turn(boundary.map_or(u64::MAX, |boundary| self.start + boundary))?;
            let now = clock::now();
            if let Some(window) = &mut window {
                window.pass(now.saturating_sub(self.start), &mut self.tally);
            }
            if now >= report {
                self.shared.report(&mut self.interval);
                report = now + REPORT;
            }
            if now >= give_up {
                break;
            }
        }
        self.shared.report(&mut self.interval);
        self.tally.cpu = clock::thread_cpu() - cpu;
        Ok(())
    }

    fn finish(mut self) -> Tally {
        let ended = clock::now().saturating_sub(self.start);
        for (connection, pace) in self.connections.iter().zip(&self.paces) {
            self.tally.skipped += pace.skipped;
            self.tally.unsent += pace.left_before(ended);
            // If the load was ended early, requests in progress do not count.
            self.tally.unsent += u64::from(connection.is_busy() && !self.shared.is_stopped());
            self.tally.sockets.push(connection.sockets);
        }
        self.tally
    }

    /// Sends what is due, then handles the events of the sockets. Waits for them until this time at most.
    fn turn(&mut self, until: u64) -> anyhow::Result<()> {
        let now = clock::now();
        while let Some(Reverse((due, at))) = self.waiting.peek().copied()
            && !self.warming
            && self.start + due <= now
        {
            self.waiting.pop();
            let due = self.start + due;
            let sent = clock::now();
            self.tally.record_lateness(due, sent);
            self.begin(at, due)?;
        }
        let wake = now + TURN;
        let next = self.waiting.peek().map(|Reverse((due, _))| self.start + due).filter(|due| *due < wake);
        if let Some(due) = next.filter(|due| *due != self.armed && !self.warming) {
            let at = Expiration::OneShot(clock::timespec(due.max(1)));
            self.timer.set(at, TimerSetTimeFlags::TFD_TIMER_ABSTIME)?;
            self.armed = due;
        }
        let mut events = [EpollEvent::empty(); 256];
        let pause = until.saturating_sub(now).min(TURN).div_ceil(1_000_000);
        let pause = u16::try_from(pause).unwrap_or(u16::MAX);
        let count = match self.epoll.wait(&mut events, EpollTimeout::from(pause)) {
            Err(nix::Error::EINTR) => 0,
            count => count?,
        };
        for event in &events[..count] {
            if event.data() != TIMER {
                self.ready(usize::try_from(event.data())?, event.events())?;
            }
        }
        if now >= self.next_check {
            self.next_check = now + TURN;
            self.check_timeouts()?;
        }
        Ok(())
    }

    /// Takes the next due time of a free connection, and begins the request if it is due.
    fn schedule(&mut self, at: usize, now: u64) -> anyhow::Result<()> {
        let pace = &mut self.paces[at];
        match pace.next(now, &mut self.rng) {
            None => self.active -= 1,
            Some(due) if due <= now => return self.begin(at, self.start + due),
            Some(due) => self.waiting.push(Reverse((due, at))),
        }
        Ok(())
    }

    /// Takes the next due time of a free connection. Its request begins at the next turn at the earliest.
    fn wait(&mut self, at: usize, now: u64) {
        match self.paces[at].next(now, &mut self.rng) {
            None => self.active -= 1,
            Some(due) => self.waiting.push(Reverse((due, at))),
        }
    }

    /// Begins a request.
    fn begin(&mut self, at: usize, due: u64) -> anyhow::Result<()> {
        let step = self.connections[at].begin(self.target, &self.epoll, at, self.requests, due);
        self.after(at, step?)
    }

    fn ready(&mut self, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        let step = self.connections[at].ready(&self.epoll, at, self.requests, events)?;
        self.after(at, step)
    }

    /// Records the result of a step of a connection, and continues with its next request.
    fn after(&mut self, at: usize, step: Step) -> anyhow::Result<()> {
        let (outcome, size) = match step {
            Step::Pending => return Ok(()),
            Step::Done { outcome, head, body } => (outcome, Some((head, body))),
            Step::Failed(failure, error) => {
                if let Some(error) = error {
                    self.tally.note(failure, &error);
                }
                (Outcome::Failed(failure), None)
            }
        };
        let connection = &mut self.connections[at];
        let ended = clock::now();
        if let Some(took) = connection.connected.take() {
            self.tally.connects.saturating_record(took);
        }
        let (due, sent) = connection.take_times();
        if self.warming {
            if !outcome.is_success() && self.failure.is_none() {
                self.failure = Some(outcome);
            }
            self.active -= 1;
            return Ok(());
        }
        let due = if self.args.from_sent || !self.paces[at].is_open_loop() { sent } else { due };
        self.tally.record(outcome, Times { due, sent, ended });
        self.interval.record(ended.saturating_sub(due), outcome.is_success());
        if let Some((head, body)) = size {
            self.tally.record_size(head, body);
        }
        self.shared.check_abort(outcome);
        let now = ended.saturating_sub(self.start);
        if size.is_some() {
            return self.schedule(at, now);
        }
        // A failure may be immediate. So the next request waits for the next turn.
        self.wait(at, now);
        Ok(())
    }

    /// Gives up requests that have lasted longer than the timeout.
    fn check_timeouts(&mut self) -> anyhow::Result<()> {
        let timeout = nanoseconds(self.args.timeout);
        let now = clock::now();
        for at in 0..self.connections.len() {
            if self.connections[at].sent_before(now.saturating_sub(timeout)) {
                self.connections[at].close();
                self.after(at, Step::Failed(Failure::Timeout, None)).context("after a timeout")?;
            }
        }
        Ok(())
    }
}
