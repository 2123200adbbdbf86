//! The lower bound: relays bytes between each connection and a connection to the server, on one thread with epoll. It
//! parses neither HTTP nor TLS, so its cost is that of TCP in the kernel.

use std::{
    convert::Infallible,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd as _, AsRawFd as _},
};

use anyhow::Context as _;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// Arguments of the relay.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RelayArgs {
    /// Address and port to listen on.
    #[arg(long, value_name = "IP:PORT")]
    listen: SocketAddr,

    /// Address and port of the server.
    #[arg(long, value_name = "IP:PORT")]
    upstream: SocketAddr,
}

const BUFFER: usize = 64 << 10;
const LISTENER: u64 = u64::MAX;

/// Relays until the process is ended.
pub(crate) fn run(args: &RelayArgs) -> anyhow::Result<()> {
    let listener =
        TcpListener::bind(args.listen).with_context(|| format!("cannot listen on {}", args.listen))?;
    match relay(&listener, args.upstream).context("the relay failed")? {}
}

fn relay(listener: &TcpListener, upstream: SocketAddr) -> io::Result<Infallible> {
    listener.set_nonblocking(true)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
    let mut relay = Relay { epoll, sides: Vec::new(), buffer: vec![0; BUFFER] };
    let mut events = [EpollEvent::empty(); 256];
    loop {
        let count = match relay.epoll.wait(&mut events, EpollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            count => count?,
        };
        for event in &events[..count] {
            if event.data() == LISTENER {
                relay.accept(listener, upstream)?;
                continue;
            }
            let Ok(at) = usize::try_from(event.data()) else { continue };
            if relay.ready(at, event.events()).is_err() {
                relay.close(at);
            }
        }
    }
}

struct Relay {
    epoll: Epoll,
    /// By file descriptor.
    sides: Vec<Option<Side>>,
    buffer: Vec<u8>,
}

/// One of two connected sockets.
struct Side {
    stream: TcpStream,
    other: usize,
    /// Bytes read from the other side and not yet written. The other side is not read meanwhile.
    waiting: Vec<u8>,
    /// The peer sends no more bytes.
    ended: bool,
}

impl Relay {
    fn accept(&mut self, listener: &TcpListener, upstream: SocketAddr) -> io::Result<()> {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            // If the server does not listen, the connection of the client is closed.
            let Ok(server) = TcpStream::connect(upstream) else { continue };
            let [a, b] = [&stream, &server].map(|side| usize::try_from(side.as_raw_fd()).unwrap_or_default());
            for (stream, at, other) in [(stream, a, b), (server, b, a)] {
                stream.set_nonblocking(true)?;
                stream.set_nodelay(true)?;
                self.epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
                if self.sides.len() <= at {
                    self.sides.resize_with(at + 1, || None);
                }
                self.sides[at] = Some(Side { stream, other, waiting: Vec::new(), ended: false });
            }
        }
    }

    /// Handles events. An error closes both sides.
    fn ready(&mut self, at: usize, events: EpollFlags) -> io::Result<()> {
        if events.contains(EpollFlags::EPOLLOUT) {
            self.send_waiting(at)?;
        }
        if events.intersects(EpollFlags::EPOLLIN | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR) {
            self.read(at)?;
        }
        Ok(())
    }

    fn read(&mut self, at: usize) -> io::Result<()> {
        let Some(Some(side)) = self.sides.get(at) else { return Ok(()) };
        let other = side.other;
        if matches!(self.sides.get(other), Some(Some(to)) if !to.waiting.is_empty()) {
            return Ok(());
        }
        let Some(Some(side)) = self.sides.get_mut(at) else { return Ok(()) };
        let length = match side.stream.read(&mut self.buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        side.ended |= length == 0;
        let this_ended = side.ended;
        let Some(Some(to)) = self.sides.get_mut(other) else { return Err(ErrorKind::NotConnected.into()) };
        if this_ended {
            to.stream.shutdown(Shutdown::Write)?;
            let both = to.ended;
            self.watch(at)?;
            return if both { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(()) };
        }
        let written = match to.stream.write(&self.buffer[..length]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            written => written?,
        };
        if written < length {
            to.waiting.extend_from_slice(&self.buffer[written..length]);
            self.watch(at)?;
            self.watch(other)?;
        }
        Ok(())
    }

    fn send_waiting(&mut self, at: usize) -> io::Result<()> {
        let Some(Some(side)) = self.sides.get_mut(at) else { return Ok(()) };
        let written = match side.stream.write(&side.waiting) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            written => written?,
        };
        side.waiting.drain(..written);
        let other = side.other;
        self.watch(at)?;
        self.watch(other)
    }

    /// Registers the events that this side waits for.
    fn watch(&self, at: usize) -> io::Result<()> {
        let Some(Some(side)) = self.sides.get(at) else { return Ok(()) };
        let full = |at: usize| matches!(self.sides.get(at), Some(Some(side)) if !side.waiting.is_empty());
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, !side.ended && !full(side.other));
        flags.set(EpollFlags::EPOLLOUT, full(at));
        Ok(self.epoll.modify(side.stream.as_fd(), &mut EpollEvent::new(flags, at as u64))?)
    }

    fn close(&mut self, at: usize) {
        if let Some(side) = self.sides.get_mut(at).and_then(Option::take) {
            self.sides[side.other] = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Starts a relay in front of the returned listener.
    fn relayed() -> (SocketAddr, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, upstream) = (listener.local_addr().unwrap(), server.local_addr().unwrap());
        std::thread::spawn(move || relay(&listener, upstream).unwrap());
        (address, server)
    }

    #[test]
    fn the_relay_transfers_both_directions_independently() {
        const LENGTH: usize = 20 << 20;
        let (address, server) = relayed();
        let sent: Vec<u8> = (0..LENGTH).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let mut client = TcpStream::connect(address).unwrap();
        let (mut server, _) = server.accept().unwrap();
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        }
        std::thread::scope(|scope| {
            let mut writer = client.try_clone().unwrap();
            let data = &sent;
            scope.spawn(move || {
                writer.write_all(data).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            });
            let mut got = Vec::new();
            server.read_to_end(&mut got).unwrap();
            assert!(got == sent);
            server.write_all(b"and back").unwrap();
            drop(server);
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "and back");
        });
    }

    #[test]
    fn a_missing_server_closes_the_connection() {
        let (address, server) = relayed();
        drop(server);
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    }
}
