//! An overload of requests: a calm phase, a surge at a higher rate, and a calm phase again.
//!
//! Requests are due at even intervals, independent of earlier ones. A due request uses a free connection, else a new
//! one up to the limit. Without either, it waits, as in a client with a connection pool. A request that waits longer
//! than [`WAIT`] is given up; so is a connection without a response for [`TIMEOUT`].

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

/// Timeout of a request that waits for a connection.
const WAIT: Duration = Duration::from_millis(100);
/// Timeout of the response, from when a request is assigned to a connection.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Ticks of the timer per second. Requests that are due between two ticks may be sent together.
const WAKE_UPS: u32 = 10_000;

/// Parameters of the phases.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Surge {
    pub(crate) target: SocketAddr,
    /// Bytes of the body of a request.
    pub(crate) payload: usize,
    /// Maximum number of connections.
    pub(crate) connections: usize,
    /// Rate in requests per second and duration of each phase.
    pub(crate) phases: [(u32, Duration); 3],
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// A response with status 200.
    Answered,
    /// A response with another status.
    Refused,
    /// No response, or given up before it was sent.
    Failed,
}

/// Times of a request, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestRecord {
    /// Time since the start at which it was due.
    pub(crate) due: u64,
    /// Time from then to its end.
    pub(crate) took: u64,
    /// Time from its assignment to a connection, which may have to be opened, to its end; 0 without a connection.
    pub(crate) served: u64,
    pub(crate) end: End,
}

/// All requests, and the maximum number of concurrent connections.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) requests: Vec<RequestRecord>,
    pub(crate) connections: usize,
}

#[derive(Default)]
struct PooledConnection {
    /// `None` if it is to be opened for the next request.
    stream: Option<Stream>,
    /// Times at which the request in progress was due and was assigned.
    request: Option<(u64, u64)>,
    written: usize,
    input: Vec<u8>,
    filled: usize,
}

struct Client<'a> {
    surge: &'a Surge,
    epoll: Epoll,
    request: Vec<u8>,
    connections: Vec<PooledConnection>,
    /// Indexes of connections without a request. They are taken from the back: closed ones are at the front.
    free: VecDeque<usize>,
    /// Due times of requests that wait for a connection.
    waiting: VecDeque<u64>,
    /// Times at which requests were assigned, with their connections; oldest first. May contain finished requests.
    under_way: VecDeque<(u64, usize)>,
    start: u64,
    account: Account,
}

/// Runs the phases.
pub(crate) fn drive(surge: &Surge) -> anyhow::Result<Account> {
    let mut client = Client {
        surge,
        epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        request: sequence::request(surge.payload)?,
        connections: Vec::new(),
        free: VecDeque::new(),
        waiting: VecDeque::new(),
        under_way: VecDeque::new(),
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
    let patience = begin + nanoseconds(TIMEOUT);
    while client.busy() && clock::now() < patience {
        client.turn(clock::now(), &timer)?;
    }
    client.finish()
}

impl Client<'_> {
    /// Gives up requests after their timeouts, sends waiting ones and reads responses.
    fn turn(&mut self, now: u64, timer: &nix::sys::timerfd::TimerFd) -> anyhow::Result<()> {
        while let Some((begun, at)) = self.under_way.front().copied() {
            if now.saturating_sub(begun) <= nanoseconds(TIMEOUT) {
                break;
            }
            self.under_way.pop_front();
            if self.connections[at].request.is_some_and(|request| request.1 == begun) {
                self.over(at, End::Failed, true);
            }
        }
        while let Some(due) = self.waiting.front().copied() {
            if now.saturating_sub(due) > nanoseconds(WAIT) {
                self.waiting.pop_front();
                self.record(due, now, now, End::Failed);
                continue;
            }
            let at = match self.free.pop_back() {
                Some(at) => at,
                None if self.connections.len() < self.surge.connections => {
                    self.connections.push(PooledConnection::default());
                    self.connections.len() - 1
                }
                None => break,
            };
            self.waiting.pop_front();
            self.under_way.push_back((now, at));
            let connection = &mut self.connections[at];
            (connection.request, connection.written, connection.filled) = (Some((due, now)), 0, 0);
            if connection.stream.is_none() {
                let stream = Stream::begin(&self.surge.target.into(), None)?;
                self.epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
                connection.stream = Some(stream);
            }
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
                self.receive(at);
            }
        }
        Ok(())
    }

    fn busy(&self) -> bool {
        self.free.len() < self.connections.len() || !self.waiting.is_empty()
    }

    fn watch(&self, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        let Some(stream) = &self.connections[at].stream else { return Ok(()) };
        Ok(self.epoll.modify(stream.as_fd(), &mut EpollEvent::new(events, at as u64))?)
    }

    fn send(&mut self, at: usize) -> anyhow::Result<()> {
        let connection = &mut self.connections[at];
        let Some(stream) = &mut connection.stream else { return Ok(()) };
        while connection.request.is_some() && connection.written < self.request.len() {
            match stream.write(&self.request[connection.written..]) {
                Ok(length) => connection.written += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return self.watch(at, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => {
                    self.over(at, End::Failed, true);
                    break;
                }
            }
        }
        Ok(())
    }

    fn receive(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        let Some(stream) = &mut connection.stream else { return };
        if connection.filled == connection.input.len() {
            connection.input.resize((2 * connection.filled).max(4_096), 0);
        }
        match stream.read(&mut connection.input[connection.filled..]) {
            Ok(length @ 1..) => connection.filled += length,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return,
            Ok(0) | Err(_) => return self.over(at, End::Failed, true),
        }
        let input = &connection.input[..connection.filled];
        let Some(head) = http1::head(input) else { return };
        // Without a length, a response ends with the connection.
        if head.content_length.is_some_and(|length| input.len() < head.length + length) {
            return;
        }
        let end = if http1::status(input) == 200 { End::Answered } else { End::Refused };
        self.over(at, end, head.close || head.content_length.is_none());
    }

    /// Ends the request of a connection, and with `close` the connection.
    fn over(&mut self, at: usize, end: End, close: bool) {
        if close {
            self.connections[at].stream = None;
        }
        // If a connection closes between requests, no request fails.
        if let Some((due, begun)) = self.connections[at].request.take() {
            self.record(due, begun, clock::now(), end);
            if self.connections[at].stream.is_some() {
                self.free.push_back(at);
            } else {
                self.free.push_front(at);
            }
        }
    }

    fn record(&mut self, due: u64, begun: u64, now: u64, end: End) {
        let since = |then: u64| now.saturating_sub(then) / 1_000;
        let request = RequestRecord {
            due: due.saturating_sub(self.start) / 1_000,
            took: since(due),
            served: since(begun),
            end,
        };
        self.account.requests.push(request);
    }

    fn finish(mut self) -> anyhow::Result<Account> {
        let now = clock::now();
        let waiting = self.waiting.drain(..).map(|due| (due, now));
        let under_way = self.connections.iter().filter_map(|one| one.request);
        let left: Vec<(u64, u64)> = waiting.chain(under_way).collect();
        left.into_iter().for_each(|(due, begun)| self.record(due, begun, now, End::Failed));
        self.account.connections = self.connections.len();
        Ok(self.account)
    }
}
