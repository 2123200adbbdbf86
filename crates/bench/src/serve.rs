//! The server of every topology: answers each request with its own body, on one thread with epoll. `http2` is the
//! server for HTTP/2, `sink` the one for TCP.
//!
//! It must cost little next to the sidecars in front of it, and the same for every peer.

pub(crate) mod http2;
mod sink;

use std::{
    convert::Infallible,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd as _, AsRawFd as _},
};

use anyhow::Context as _;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use crate::{http1, node::Protocol};

/// Arguments of the server.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// Address and port to listen on.
    #[arg(long, value_name = "IP:PORT")]
    listen: SocketAddr,

    /// Protocol. Over TCP, bytes are read and not answered.
    #[arg(long, value_enum, default_value_t = Protocol::Http1)]
    protocol: Protocol,
}

/// Maximum length of a request, in bytes.
const MAX_REQUEST: usize = 1 << 20;
const FIRST_BUFFER: usize = 16 << 10;
/// A value that no connection has.
const LISTENER: u64 = u64::MAX;

/// Serves until the process is ended.
pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let listener =
        TcpListener::bind(args.listen).with_context(|| format!("cannot listen on {}", args.listen))?;
    match run_on(args.protocol, listener)? {}
}

/// Serves a protocol on this listener.
pub(crate) fn run_on(protocol: Protocol, listener: TcpListener) -> anyhow::Result<Infallible> {
    match protocol {
        Protocol::Http1 => serve(&listener).context("the echo server failed"),
        Protocol::Http2 => http2::serve(listener),
        Protocol::Tcp => sink::serve(&listener).context("the sink failed"),
    }
}

/// Serves the connections of this listener.
pub(crate) fn serve(listener: &TcpListener) -> io::Result<Infallible> {
    listener.set_nonblocking(true)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
    // By file descriptor, because these are small numbers that are reused.
    let mut connections: Vec<Option<ServerConnection>> = Vec::new();
    let mut events = [EpollEvent::empty(); 256];
    loop {
        let count = match epoll.wait(&mut events, EpollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            count => count?,
        };
        for event in &events[..count] {
            if event.data() == LISTENER {
                accept(listener, &epoll, &mut connections)?;
                continue;
            }
            let Some(slot) = usize::try_from(event.data()).ok().and_then(|at| connections.get_mut(at)) else {
                continue;
            };
            if slot.as_mut().is_some_and(|connection| connection.ready(&epoll, event).is_err()) {
                *slot = None;
            }
        }
    }
}

fn accept(
    listener: &TcpListener,
    epoll: &Epoll,
    connections: &mut Vec<Option<ServerConnection>>,
) -> io::Result<()> {
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            // The client has closed the connection already.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
            Err(error) => return Err(error),
        };
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let at = usize::try_from(stream.as_raw_fd()).map_err(io::Error::other)?;
        epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
        if connections.len() <= at {
            connections.resize_with(at + 1, || None);
        }
        connections[at] = Some(ServerConnection {
            stream,
            input: vec![0; FIRST_BUFFER],
            filled: 0,
            output: Vec::new(),
            waiting: false,
        });
    }
}

struct ServerConnection {
    stream: TcpStream,
    input: Vec<u8>,
    filled: usize,
    output: Vec<u8>,
    /// Epoll reports when the rest of the output can be sent.
    waiting: bool,
}

impl ServerConnection {
    /// Reads and answers available requests. An error closes the connection.
    fn ready(&mut self, epoll: &Epoll, event: &EpollEvent) -> io::Result<()> {
        if event.events().contains(EpollFlags::EPOLLOUT) {
            self.send(epoll)?;
        }
        if self.waiting {
            return Ok(());
        }
        match self.stream.read(&mut self.input[self.filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => self.filled += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
        let close = self.answer()?;
        self.send(epoll)?;
        if close { Err(ErrorKind::ConnectionReset.into()) } else { Ok(()) }
    }

    /// Answers every complete request. Returns true if the client wants the connection closed.
    fn answer(&mut self) -> io::Result<bool> {
        let mut done = 0;
        let mut close = false;
        while let Some(head) = http1::head(&self.input[done..self.filled]) {
            if head.chunked {
                self.stream.write_all(b"HTTP/1.1 411 Length Required\r\nContent-Length: 0\r\n\r\n")?;
                return Ok(true);
            }
            let body = head.content_length.unwrap_or(0);
            let total = head.length.saturating_add(body);
            if total > MAX_REQUEST {
                self.stream.write_all(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")?;
                return Ok(true);
            }
            if self.filled - done < total {
                self.input.resize(self.input.len().max(done + total), 0);
                break;
            }
            write!(self.output, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {body}\r\n")?;
            self.output.extend_from_slice(b"Server: skysail-bench\r\n\r\n");
            self.output.extend_from_slice(&self.input[done + head.length..done + total]);
            done += total;
            close |= head.close;
        }
        self.input.copy_within(done..self.filled, 0);
        self.filled -= done;
        if self.filled == self.input.len() {
            if self.filled >= MAX_REQUEST {
                return Err(ErrorKind::InvalidData.into());
            }
            self.input.resize(self.filled * 2, 0);
        }
        Ok(close)
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
        let waiting = !self.output.is_empty();
        if waiting != self.waiting {
            self.waiting = waiting;
            let flags = if waiting { EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
            let at = u64::try_from(self.stream.as_raw_fd()).map_err(io::Error::other)?;
            epoll.modify(self.stream.as_fd(), &mut EpollEvent::new(flags, at))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || serve(&listener).unwrap());
        address
    }

    #[test]
    fn pipelined_and_large_requests_are_answered() {
        let mut stream = TcpStream::connect(server()).unwrap();
        let large = "y".repeat(200_000);
        let mut writer = stream.try_clone().unwrap();
        let sending = std::thread::spawn(move || {
            for body in ["a", large.as_str(), "bc"] {
                write!(writer, "POST / HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
            }
            writer.write_all(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n").unwrap();
        });
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        sending.join().unwrap();
        assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 4);
        // Four times in the headers of each response: "Type", "skysail".
        assert_eq!(text.matches('y').count(), 200_000 + 4 * 2);
        assert!(text.contains("\r\n\r\nbcHTTP/1.1 200 OK"), "the responses are in order");
    }

    #[test]
    fn chunked_bodies_are_refused() {
        let mut stream = TcpStream::connect(server()).unwrap();
        stream.write_all(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 411 "), "{text}");
    }
}
