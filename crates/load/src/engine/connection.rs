//! One connection: opening, the request in progress, and its response.

use std::{
    io::{self, ErrorKind, Read as _, Write as _},
    os::fd::AsFd as _,
};

use nix::{
    libc,
    sys::{
        epoll::{Epoll, EpollEvent, EpollFlags},
        socket::{setsockopt, sockopt},
    },
};

use super::Requests;
use crate::{
    args::LoadArgs,
    clock,
    response::{Invalid, ResponseReader},
    stream::Stream,
    tally::{Failure, OK, Outcome},
    target::{Protocol, Target},
    worker::failure_of,
};

/// Maximum number of reads for an event of a socket in plain text.
const MAX_READS: u32 = 16;

/// Result of a step.
pub(super) enum Step {
    /// The request is in progress, or there is none.
    Pending,
    Done {
        outcome: Outcome,
        /// Bytes of the head and of the body.
        head: u64,
        body: u64,
    },
    /// The error is missing if the failure itself says all.
    Failed(Failure, Option<io::Error>),
}

/// A connection of the generator.
pub(super) struct Connection {
    stream: Option<Stream>,
    /// The socket is not open yet.
    is_connecting: bool,
    /// Time at which the opening began.
    opened: u64,
    /// Nanoseconds that the opening took, until it is recorded.
    pub(super) connected: Option<u64>,
    request: Option<InProgress>,
    reader: Reader,
    input: Vec<u8>,
    filled: usize,
    /// Requests that the socket may still be used for.
    left: u32,
    /// Least and most requests of a socket.
    reuse: (u32, u32),
    rng: fastrand::Rng,
    /// Number of sockets so far.
    pub(super) sockets: u64,
}

struct InProgress {
    due: u64,
    sent: u64,
    /// Bytes that the stream has accepted.
    written: usize,
    /// The request asks the server to close the connection.
    is_last: bool,
}

enum Reader {
    Http(ResponseReader),
    /// Bytes of the echo that are missing.
    Echo(usize),
}

impl Connection {
    pub(super) fn new(args: &LoadArgs, target: &Target, rng: &mut fastrand::Rng) -> Self {
        let is_tcp = target.protocol == Protocol::Tcp;
        let reuse =
            if args.keepalive { args.connection_reuse.unwrap_or((u32::MAX, u32::MAX)) } else { (1, 1) };
        Self {
            stream: None,
            is_connecting: false,
            opened: 0,
            connected: None,
            request: None,
            reader: if is_tcp { Reader::Echo(0) } else { Reader::Http(ResponseReader::new(&target.method)) },
            input: vec![0; args.httpbufferkb as usize * 1_024],
            filled: 0,
            left: 0,
            reuse,
            rng: rng.fork(),
            sockets: 0,
        }
    }

    /// Begins a request that was due at this time. Opens a socket if there is none.
    pub(super) fn begin(
        &mut self,
        target: &Target,
        epoll: &Epoll,
        at: usize,
        requests: &Requests,
        due: u64,
    ) -> anyhow::Result<Step> {
        let now = clock::now();
        if self.stream.is_none() {
            let stream = match Stream::begin(&target.address, target.tls.as_ref()) {
                Ok(stream) => stream,
                Err(error) => {
                    self.request = Some(InProgress { due, sent: now, written: 0, is_last: true });
                    let error = io::Error::other(format!("{error:#}"));
                    return Ok(Step::Failed(Failure::Connect, Some(error)));
                }
            };
            if self.reuse.1 == 1 {
                // The socket is closed by a reset: thousands of sockets per second in TIME_WAIT would use up the ports.
                setsockopt(&stream, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
            }
            epoll.add(
                stream.as_fd(),
                EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT, at as u64),
            )?;
            (self.stream, self.is_connecting, self.opened) = (Some(stream), true, now);
            (self.left, self.filled) = (self.rng.u32(self.reuse.0..=self.reuse.1), 0);
            self.sockets += 1;
        }
        let is_last = self.left == 1;
        self.request = Some(InProgress { due, sent: now, written: 0, is_last });
        match &mut self.reader {
            Reader::Http(reader) => reader.reset(),
            Reader::Echo(left) => *left = requests.usual.len(),
        }
        if self.is_connecting { Ok(Step::Pending) } else { self.send(epoll, at, requests) }
    }

    /// Handles events of the socket.
    pub(super) fn ready(
        &mut self,
        epoll: &Epoll,
        at: usize,
        requests: &Requests,
        events: EpollFlags,
    ) -> anyhow::Result<Step> {
        let Some(stream) = &self.stream else { return Ok(Step::Pending) };
        if self.is_connecting {
            if let Some(error) = stream.socket().take_error()? {
                return Ok(self.broken(error, Failure::Connect));
            }
            if !events.contains(EpollFlags::EPOLLOUT) {
                return Ok(Step::Pending);
            }
            self.is_connecting = false;
            self.connected = Some(clock::now().saturating_sub(self.opened));
        }
        let is_sent =
            self.request.as_ref().is_none_or(|request| request.written >= requests.of(request.is_last).len());
        // Received bytes may continue a handshake, without which nothing can be sent.
        if events.contains(EpollFlags::EPOLLOUT) || !is_sent {
            if events.contains(EpollFlags::EPOLLOUT) {
                self.watch(epoll, at, EpollFlags::EPOLLIN)?;
            }
            if let step @ Step::Failed(..) = self.send(epoll, at, requests)? {
                return Ok(step);
            }
        }
        if events.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            return Ok(self.receive(requests));
        }
        Ok(Step::Pending)
    }

    /// Returns whether a request is in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.request.is_some()
    }

    /// Returns whether a request in progress was sent before this time.
    pub(super) fn sent_before(&self, moment: u64) -> bool {
        self.request.as_ref().is_some_and(|request| request.sent < moment)
    }

    /// Ends the request in progress. Returns when it was due, and when it was sent.
    pub(super) fn take_times(&mut self) -> (u64, u64) {
        self.request.take().map_or((0, 0), |request| (request.due, request.sent))
    }

    /// Closes the socket.
    pub(super) fn close(&mut self) {
        (self.stream, self.is_connecting) = (None, false);
    }

    fn send(&mut self, epoll: &Epoll, at: usize, requests: &Requests) -> anyhow::Result<Step> {
        let (Some(stream), Some(request)) = (&mut self.stream, &mut self.request) else {
            return Ok(Step::Pending);
        };
        let bytes = requests.of(request.is_last);
        let result = loop {
            if request.written == bytes.len() {
                break if stream.holds_output() { stream.flush() } else { Ok(()) };
            }
            match stream.write(&bytes[request.written..]) {
                Ok(length) => request.written += length,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        match result {
            Ok(()) => Ok(Step::Pending),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if stream.wants_write() {
                    self.watch(epoll, at, EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT)?;
                }
                Ok(Step::Pending)
            }
            Err(error) => {
                let failure = failure_of(&error);
                Ok(self.broken(error, failure))
            }
        }
    }

    fn receive(&mut self, requests: &Requests) -> Step {
        let mut reads = 0;
        loop {
            reads += 1;
            let Some(stream) = &mut self.stream else { return Step::Pending };
            let room = self.input.len() - self.filled;
            let length = match stream.read(&mut self.input[self.filled..]) {
                Ok(0) => return self.ended(),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Pending,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    let failure = failure_of(&error);
                    return self.broken(error, failure);
                }
            };
            self.filled += length;
            if self.request.is_none() {
                // A server may send a status before it closes an idle connection.
                self.close();
                return Step::Pending;
            }
            let step = match &mut self.reader {
                Reader::Echo(left) => {
                    let taken = self.filled;
                    self.filled = 0;
                    if taken > *left {
                        self.close();
                        return Step::Failed(Failure::Protocol, None);
                    }
                    *left -= taken;
                    let is_done = *left == 0;
                    is_done.then_some(Step::Done { outcome: Outcome::Named(OK), head: 0, body: taken as u64 })
                }
                Reader::Http(reader) => match reader.read(&mut self.input, &mut self.filled) {
                    Ok(None) => None,
                    Ok(Some(response)) => {
                        if response.closes {
                            self.left = 1;
                        }
                        let outcome = Outcome::Status(response.status);
                        Some(Step::Done { outcome, head: response.head, body: response.body })
                    }
                    Err(Invalid::Response | Invalid::Chunk | Invalid::HeadTooLarge) => {
                        self.close();
                        return Step::Failed(Failure::Protocol, None);
                    }
                },
            };
            if let Some(step) = step {
                self.left -= 1;
                // After an early response, or one with surplus bytes, the next response could not be recognised.
                let request = self.request.as_ref();
                let is_early = request.is_some_and(|one| one.written < requests.of(one.is_last).len());
                if self.left == 0 || is_early || self.filled > 0 {
                    self.close();
                }
                return step;
            }
            // A short read has emptied the socket; TLS may hold more. Other connections take turns with a long body.
            if (length < room || reads == MAX_READS) && matches!(stream, Stream::Plain(_)) {
                return Step::Pending;
            }
        }
    }

    /// Handles the end of the connection by the peer.
    fn ended(&mut self) -> Step {
        let response = match &self.reader {
            Reader::Http(reader) if self.request.is_some() => reader.end(),
            _ => None,
        };
        self.close();
        match response {
            Some(response) => Step::Done {
                outcome: Outcome::Status(response.status),
                head: response.head,
                body: response.body,
            },
            None if self.request.is_some() => Step::Failed(Failure::Closed, None),
            None => Step::Pending,
        }
    }

    fn broken(&mut self, error: io::Error, failure: Failure) -> Step {
        self.close();
        if self.request.is_some() { Step::Failed(failure, Some(error)) } else { Step::Pending }
    }

    fn watch(&self, epoll: &Epoll, at: usize, events: EpollFlags) -> anyhow::Result<()> {
        let Some(stream) = &self.stream else { return Ok(()) };
        Ok(epoll.modify(stream.as_fd(), &mut EpollEvent::new(events, at as u64))?)
    }
}

impl Requests {
    fn of(&self, is_last: bool) -> &[u8] {
        if is_last { &self.last } else { &self.usual }
    }
}
