//! The server for HTTP/1 and TCP: many connections on one thread with epoll. It must use little CPU time compared with
//! the proxy in front of it.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    convert::Infallible,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    os::fd::{AsFd as _, AsRawFd as _},
    time::Duration,
};

use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    socket::{MsgFlags, recv},
};

use super::{behavior::Behavior, http2::HandOver};
use crate::{
    clock,
    http1::{self, Chunks, Head},
    worker::nanoseconds,
};

/// Size of a request's body that is always accepted, in bytes. It is checked only when the input buffer is full, so a
/// body of nearly twice this size may be accepted.
const MAX_BODY: usize = 1 << 20;
/// Maximum size of the head of a request, in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Initial size of a connection's input buffer, in bytes.
const FIRST_BUFFER: usize = 16 << 10;
/// Size of unsent output from which further requests of a connection wait, in bytes.
const MAX_OUTPUT: usize = 1 << 20;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// Data of the listeners' events, which no connection has.
const HTTP: u64 = u64::MAX;
const TCP: u64 = u64::MAX - 1;
/// Response to a request whose body is invalid.
const BAD_REQUEST: &[u8] = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
/// First bytes of HTTP/2 (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI ";

/// Serves HTTP/1 on this listener.
///
/// # Errors
/// The listener or epoll fails.
pub fn serve(listener: &TcpListener) -> io::Result<Infallible> {
    Server::new(Some(listener), None, None)?.run()
}

/// Serves a TCP echo on this listener.
///
/// # Errors
/// The listener or epoll fails.
pub fn serve_echo(listener: &TcpListener) -> io::Result<Infallible> {
    Server::new(None, Some(listener), None)?.run()
}

/// Serves HTTP/1 and a TCP echo. Connections of HTTP/2 are handed over.
pub(super) fn serve_all(http: &TcpListener, tcp: &TcpListener, http2: &HandOver) -> io::Result<Infallible> {
    Server::new(Some(http), Some(tcp), Some(http2))?.run()
}

struct Server<'a> {
    http: Option<&'a TcpListener>,
    tcp: Option<&'a TcpListener>,
    http2: Option<&'a HandOver>,
    epoll: Epoll,
    /// By file descriptor, because these are small numbers that are reused.
    connections: Vec<Option<ServerConnection>>,
    /// Connections with a delayed response: end of the delay, number, file descriptor. The number distinguishes a
    /// connection from later ones with the same file descriptor.
    delayed: BinaryHeap<Reverse<(u64, u64, usize)>>,
    accepted: u64,
    rng: fastrand::Rng,
}

struct ServerConnection {
    stream: TcpStream,
    number: u64,
    protocol: ServedProtocol,
    input: Vec<u8>,
    filled: usize,
    output: Vec<u8>,
    /// The rest of the output waits until the socket is writable, or for the end of the delay. Nothing is read.
    is_waiting: bool,
    is_delayed: bool,
    /// The connection is closed once the output is sent.
    closes: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ServedProtocol {
    /// HTTP. The first bytes will show the version.
    Unknown,
    Http1,
    Echo,
}

impl<'a> Server<'a> {
    fn new(
        http: Option<&'a TcpListener>,
        tcp: Option<&'a TcpListener>,
        http2: Option<&'a HandOver>,
    ) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (listener, data) in [(http, HTTP), (tcp, TCP)] {
            let Some(listener) = listener else { continue };
            listener.set_nonblocking(true)?;
            epoll.add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, data))?;
        }
        Ok(Self {
            http,
            tcp,
            http2,
            epoll,
            connections: Vec::new(),
            delayed: BinaryHeap::new(),
            accepted: 0,
            rng: fastrand::Rng::new(),
        })
    }

    fn run(&mut self) -> io::Result<Infallible> {
        let mut events = [EpollEvent::empty(); 256];
        loop {
            let pause = match self.delayed.peek() {
                None => EpollTimeout::NONE,
                Some(Reverse((due, ..))) => {
                    let milliseconds = due.saturating_sub(clock::now()).div_ceil(1_000_000);
                    EpollTimeout::from(u16::try_from(milliseconds).unwrap_or(u16::MAX))
                }
            };
            let count = match self.epoll.wait(&mut events, pause) {
                Err(nix::Error::EINTR) => continue,
                count => count?,
            };
            for event in &events[..count] {
                match event.data() {
                    HTTP => self.accept(self.http, ServedProtocol::Unknown)?,
                    TCP => self.accept(self.tcp, ServedProtocol::Echo)?,
                    at => self.ready(usize::try_from(at).map_err(io::Error::other)?, event.events()),
                }
            }
            self.end_delays();
        }
    }

    fn accept(&mut self, listener: Option<&TcpListener>, protocol: ServedProtocol) -> io::Result<()> {
        let Some(listener) = listener else { return Ok(()) };
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // The client has closed the connection already.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                // Too many open files: later connections wait.
                Err(_) => {
                    #[expect(
                        clippy::disallowed_methods,
                        reason = "files are freed by other threads or processes"
                    )]
                    std::thread::sleep(ACCEPT_PAUSE);
                    return Ok(());
                }
            };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let at = usize::try_from(stream.as_raw_fd()).map_err(io::Error::other)?;
            self.epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
            if self.connections.len() <= at {
                self.connections.resize_with(at + 1, || None);
            }
            self.accepted += 1;
            self.connections[at] = Some(ServerConnection {
                stream,
                number: self.accepted,
                protocol,
                input: vec![0; FIRST_BUFFER],
                filled: 0,
                output: Vec::new(),
                is_waiting: false,
                is_delayed: false,
                closes: false,
            });
        }
    }

    /// Handles events of a connection. An error closes it.
    fn ready(&mut self, at: usize, events: EpollFlags) {
        let Some(Some(connection)) = self.connections.get_mut(at) else { return };
        if connection.protocol == ServedProtocol::Unknown && self.http2.is_some() {
            let mut first = [0; PREFACE.len()];
            let length = recv(connection.stream.as_raw_fd(), &mut first, MsgFlags::MSG_PEEK).unwrap_or(0);
            if length == first.len() && first == PREFACE {
                if let Some(connection) = self.connections[at].take() {
                    let _ = self.epoll.delete(&connection.stream);
                    // Without a receiver the server ends anyway.
                    let _ = self.http2.map(|http2| http2.send(connection.stream));
                }
                return;
            }
            connection.protocol = ServedProtocol::Http1;
        }
        match connection.ready(&self.epoll, events, &mut self.rng) {
            Ok(None) => {}
            Ok(Some(delay)) => self.delayed.push(Reverse((clock::now() + delay, connection.number, at))),
            Err(_) => self.connections[at] = None,
        }
    }

    /// Sends the responses whose delay has ended.
    fn end_delays(&mut self) {
        let now = clock::now();
        while let Some(Reverse((due, number, at))) = self.delayed.peek().copied()
            && due <= now
        {
            self.delayed.pop();
            let Some(Some(connection)) = self.connections.get_mut(at) else { continue };
            if connection.number == number {
                connection.is_delayed = false;
                let mut event = EpollEvent::new(EpollFlags::EPOLLOUT, at as u64);
                // An error closes the connection at its next event.
                let _ = self.epoll.modify(connection.stream.as_fd(), &mut event);
                self.ready(at, EpollFlags::EPOLLOUT);
            }
        }
    }
}

impl ServerConnection {
    /// Reads and answers available requests. Returns the delay of the next response in nanoseconds, if it has one.
    fn ready(
        &mut self,
        epoll: &Epoll,
        events: EpollFlags,
        rng: &mut fastrand::Rng,
    ) -> io::Result<Option<u64>> {
        if self.is_delayed {
            // The client has closed the connection.
            return if events.intersects(EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
                Err(ErrorKind::ConnectionReset.into())
            } else {
                Ok(None)
            };
        }
        if events.contains(EpollFlags::EPOLLOUT) {
            self.send(epoll)?;
            if self.is_waiting {
                return Ok(None);
            }
        } else {
            match self.stream.read(&mut self.input[self.filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(length) => self.filled += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        if self.protocol == ServedProtocol::Echo {
            self.output.extend_from_slice(&self.input[..self.filled]);
            self.filled = 0;
            return self.send(epoll).map(|()| None);
        }
        loop {
            let delay = self.answer(rng)?;
            if delay.is_some() {
                let at = u64::try_from(self.stream.as_raw_fd()).map_err(io::Error::other)?;
                epoll.modify(self.stream.as_fd(), &mut EpollEvent::new(EpollFlags::empty(), at))?;
                (self.is_delayed, self.is_waiting) = (true, true);
                return Ok(delay);
            }
            let was_full = self.output.len() >= MAX_OUTPUT;
            self.send(epoll)?;
            if self.is_waiting || !was_full {
                return Ok(None);
            }
        }
    }

    /// Answers complete requests, up to one whose response is delayed, or until the output is large.
    fn answer(&mut self, rng: &mut fastrand::Rng) -> io::Result<Option<u64>> {
        let (mut done, mut delay) = (0, None);
        while let Some(head) = http1::head(&self.input[done..self.filled])
            && !self.closes
            && delay.is_none()
            && self.output.len() < MAX_OUTPUT
        {
            let rest = &self.input[done + head.length..self.filled];
            let (body, taken) = match read_body(&head, rest) {
                Ok(Some(read)) => read,
                Ok(None) => break,
                Err(InvalidBody) => {
                    // The next request cannot be found.
                    self.output.extend_from_slice(BAD_REQUEST);
                    self.closes = true;
                    break;
                }
            };
            let bytes = &self.input[done..done + head.length];
            let asked =
                respond(bytes, &head, body.as_deref().unwrap_or(&rest[..taken]), &mut self.output, rng);
            self.closes = asked.closes;
            delay = Some(nanoseconds(asked.delay)).filter(|delay| *delay > 0);
            done += head.length + taken;
        }
        self.input.copy_within(done..self.filled, 0);
        self.filled -= done;
        if self.filled == self.input.len() {
            let has_head = http1::head(&self.input[..self.filled]).is_some();
            if self.filled >= if has_head { MAX_HEAD + MAX_BODY } else { MAX_HEAD } {
                return Err(ErrorKind::InvalidData.into());
            }
            self.input.resize(self.filled * 2, 0);
        }
        Ok(delay)
    }

    fn send(&mut self, epoll: &Epoll) -> io::Result<()> {
        let mut sent = 0;
        while sent < self.output.len() {
            match self.stream.write(&self.output[sent..]) {
                Ok(length) => sent += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        self.output.drain(..sent);
        let is_waiting = !self.output.is_empty();
        if !is_waiting && self.closes {
            return Err(ErrorKind::ConnectionReset.into());
        }
        if is_waiting != self.is_waiting {
            self.is_waiting = is_waiting;
            let flags = if is_waiting { EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
            let at = u64::try_from(self.stream.as_raw_fd()).map_err(io::Error::other)?;
            epoll.modify(self.stream.as_fd(), &mut EpollEvent::new(flags, at))?;
        }
        Ok(())
    }
}

/// The length of a body is invalid, or its chunks are.
struct InvalidBody;

/// Decoded body, if it was chunked, and the number of its bytes in the input.
type ReadBody = (Option<Vec<u8>>, usize);

/// Reads the body of a request; `None` while it is incomplete.
fn read_body(head: &Head, input: &[u8]) -> Result<Option<ReadBody>, InvalidBody> {
    if head.has_invalid_length {
        return Err(InvalidBody);
    }
    if !head.chunked {
        let length = head.content_length.unwrap_or(0);
        return Ok((input.len() >= length).then_some((None, length)));
    }
    let (mut body, mut chunks) = (Vec::new(), Chunks::START);
    let (taken, is_done) = chunks.read(input, |part| body.extend_from_slice(part));
    Ok(is_done.ok_or(InvalidBody)?.then_some((Some(body), taken)))
}

/// Writes the response to a request. Returns its properties, of which the caller applies delay and close.
fn respond(
    bytes: &[u8],
    head: &Head,
    body: &[u8],
    output: &mut Vec<u8>,
    rng: &mut fastrand::Rng,
) -> Behavior {
    let line = bytes.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let target = line.split(|byte| *byte == b' ').nth(1).and_then(|target| std::str::from_utf8(target).ok());
    let query = target.and_then(|target| target.split_once('?')).map_or("", |(_, query)| query);
    let is_http10 = line.ends_with(b"HTTP/1.0");
    let asked = if query.is_empty() { Ok(Behavior::default()) } else { Behavior::of(query, rng) };
    let (mut asked, error) = match asked {
        Ok(asked) => (asked, None),
        Err(error) => (Behavior { status: Some(400), ..Behavior::default() }, Some(format!("{error}\n"))),
    };
    asked.closes |= if is_http10 { !head.keep_alive } else { head.close };
    let status = asked.status.unwrap_or(200);
    let length = match (&error, asked.size) {
        (Some(error), _) => error.len(),
        (None, Some(size)) => size,
        (None, None) => body.len(),
    };
    let has_body = status != 204 && status != 304;
    // Writing to a Vec cannot fail.
    let _ = write!(output, "HTTP/1.1 {status} {}\r\nContent-Type: text/plain\r\n", reason(status));
    if has_body {
        let _ = write!(output, "Content-Length: {length}\r\n");
    }
    for (name, value) in &asked.headers {
        let _ = write!(output, "{name}: {value}\r\n");
    }
    let connection: &[u8] = match (asked.closes, is_http10) {
        (true, _) => b"Connection: close\r\n",
        (false, true) => b"Connection: keep-alive\r\n",
        (false, false) => b"",
    };
    output.extend_from_slice(connection);
    output.extend_from_slice(b"Server: skysail-bench\r\n\r\n");
    match (error, asked.size) {
        _ if !has_body || bytes.starts_with(b"HEAD ") => {}
        (Some(error), _) => output.extend_from_slice(error.as_bytes()),
        (None, Some(size)) => output.resize(output.len() + size, b'x'),
        (None, None) => output.extend_from_slice(body),
    }
    asked
}

fn reason(status: u16) -> &'static str {
    http::StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or("Unknown")
}
