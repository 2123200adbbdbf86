//! More requests than can be answered: a calm at a rate, a surge at a higher one, and the calm again.
//!
//! Requests are due at even intervals, whatever becomes of those before. One that is due goes over a connection that is
//! free, over a new one if none is and there may be more, and otherwise waits until one is: so does a client with a pool.
//! Who has waited so for [`PATIENCE`] is given up. Every request counts from when it was due.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read as _, Write as _},
    net::SocketAddr,
    os::fd::AsFd as _,
    time::Duration,
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{
    requests::{TIMER, ticks},
    sequence,
};
use crate::{
    clock, http1,
    schedule::{Schedule, nanoseconds},
    stream::Stream,
};

/// How long a request waits for a connection, and at the end for its answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// No more wake-ups a second than this: what is due meanwhile goes together.
const WAKE_UPS: u32 = 10_000;

/// What to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Surge {
    pub(crate) target: SocketAddr,
    /// Bytes of a request's body.
    pub(crate) payload: usize,
    /// No more connections than this.
    pub(crate) connections: usize,
    /// Requests a second, and for how long.
    pub(crate) phases: [(u32, Duration); 3],
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Answered with 200.
    Answered,
    /// Answered with anything else.
    Refused,
    /// Not answered, or given up before it was sent.
    Failed,
}

/// One request, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    /// Since the start.
    pub(crate) due: u64,
    /// From when it was due to its end.
    pub(crate) took: u64,
    pub(crate) end: End,
}

/// All requests, and the connections that there were in the end.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) requests: Vec<Told>,
    pub(crate) connections: usize,
}

struct Connection {
    stream: Stream,
    /// When the request under way was due.
    due: Option<u64>,
    written: usize,
    input: Vec<u8>,
    filled: usize,
}

struct Client<'a> {
    surge: &'a Surge,
    epoll: Epoll,
    request: Vec<u8>,
    connections: Vec<Connection>,
    /// Places of connections without a request.
    free: Vec<usize>,
    /// When those were due that wait for a connection.
    waiting: VecDeque<u64>,
    start: u64,
    account: Account,
}

/// Goes through the phases.
pub(crate) fn drive(surge: &Surge) -> anyhow::Result<Account> {
    let mut client = Client {
        surge,
        epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        request: sequence::request(surge.payload)?,
        connections: Vec::new(),
        free: Vec::new(),
        waiting: VecDeque::new(),
        start: clock::now() + 50_000_000,
        account: Account::default(),
    };
    let timer = ticks(&client.epoll, client.start, Schedule::per_second(WAKE_UPS))?;
    let mut begin = client.start;
    for (rate, length) in surge.phases {
        let schedule = Schedule::per_second(rate);
        let total = schedule.due_before(length);
        let mut next = 0;
        while next < total {
            let now = clock::now();
            while next < total && begin + schedule.due(next) <= now {
                client.waiting.push_back(begin + schedule.due(next));
                next += 1;
            }
            client.turn(now, &timer)?;
        }
        begin += nanoseconds(length);
    }
    let patience = begin + nanoseconds(PATIENCE);
    while client.busy() && clock::now() < patience {
        client.turn(clock::now(), &timer)?;
    }
    client.finish()
}

impl Client<'_> {
    /// Sends what waits, and takes what came.
    fn turn(&mut self, now: u64, timer: &nix::sys::timerfd::TimerFd) -> anyhow::Result<()> {
        while let Some(due) = self.waiting.front().copied() {
            if now.saturating_sub(due) > nanoseconds(PATIENCE) {
                self.waiting.pop_front();
                self.told(due, now, End::Failed);
                continue;
            }
            let at = match self.free.pop() {
                Some(at) => at,
                None if self.connections.len() < self.surge.connections => self.open()?,
                None => break,
            };
            self.waiting.pop_front();
            let connection = &mut self.connections[at];
            (connection.due, connection.written, connection.filled) = (Some(due), 0, 0);
            self.send(at)?;
        }
        let mut events = [EpollEvent::empty(); 256];
        let count = match self.epoll.wait(&mut events, EpollTimeout::from(10_u8)) {
            Err(nix::Error::EINTR) => 0,
            count => count?,
        };
        for event in &events[..count] {
            if event.data() == TIMER {
                timer.wait()?;
                continue;
            }
            let at = usize::try_from(event.data())?;
            if event.events().contains(EpollFlags::EPOLLOUT) {
                self.watch(at, EpollFlags::EPOLLIN)?;
                self.send(at)?;
            }
            if event.events().intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
                self.receive(at)?;
            }
        }
        Ok(())
    }

    fn busy(&self) -> bool {
        self.free.len() < self.connections.len() || !self.waiting.is_empty()
    }

    fn open(&mut self) -> anyhow::Result<usize> {
        let stream = self.connect(self.connections.len())?;
        self.connections.push(Connection { stream, due: None, written: 0, input: vec![0; 4_096], filled: 0 });
        Ok(self.connections.len() - 1)
    }

    fn connect(&self, at: usize) -> anyhow::Result<Stream> {
        let stream = Stream::open(self.surge.target, None)?;
        stream.socket().set_nonblocking(true)?;
        self.epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
        Ok(stream)
    }

    fn watch(&self, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        let mut event = EpollEvent::new(events, at as u64);
        Ok(self.epoll.modify(self.connections[at].stream.as_fd(), &mut event)?)
    }

    fn send(&mut self, at: usize) -> anyhow::Result<()> {
        let connection = &mut self.connections[at];
        while connection.due.is_some() && connection.written < self.request.len() {
            match connection.stream.write(&self.request[connection.written..]) {
                Ok(length) => connection.written += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return self.watch(at, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return self.over(at, End::Failed, true),
            }
        }
        Ok(())
    }

    fn receive(&mut self, at: usize) -> anyhow::Result<()> {
        let connection = &mut self.connections[at];
        if connection.filled == connection.input.len() {
            connection.input.resize(2 * connection.filled, 0);
        }
        match connection.stream.read(&mut connection.input[connection.filled..]) {
            Ok(0) => return self.over(at, End::Failed, true),
            Ok(length) => connection.filled += length,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                return Ok(());
            }
            Err(_) => return self.over(at, End::Failed, true),
        }
        let input = &connection.input[..connection.filled];
        let Some(head) = http1::head(input) else { return Ok(()) };
        // Of an answer without a length the end is the connection's.
        if head.content_length.is_some_and(|length| input.len() < head.length + length) {
            return Ok(());
        }
        let end = if http1::status(input) == 200 { End::Answered } else { End::Refused };
        self.over(at, end, head.close || head.content_length.is_none())
    }

    /// The request on this connection has come to its end, and with `close` so has the connection.
    fn over(&mut self, at: usize, end: End, close: bool) -> anyhow::Result<()> {
        if close {
            self.connections[at].stream = self.connect(at)?;
        }
        // A connection that is closed between requests fails none.
        if let Some(due) = self.connections[at].due.take() {
            self.told(due, clock::now(), end);
            self.free.push(at);
        }
        Ok(())
    }

    fn told(&mut self, due: u64, now: u64, end: End) {
        let (start, took) = (self.start, now.saturating_sub(due) / 1_000);
        self.account.requests.push(Told { due: due.saturating_sub(start) / 1_000, took, end });
    }

    fn finish(mut self) -> anyhow::Result<Account> {
        let now = clock::now();
        let left: Vec<u64> =
            self.waiting.drain(..).chain(self.connections.iter().filter_map(|one| one.due)).collect();
        left.into_iter().for_each(|due| self.told(due, now, End::Failed));
        self.account.connections = self.connections.len();
        Ok(self.account)
    }
}
