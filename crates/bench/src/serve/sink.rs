//! The server behind a TCP proxy: reads and discards bytes.

use std::{
    convert::Infallible,
    io::{self, ErrorKind, Read as _},
    net::{TcpListener, TcpStream},
    os::fd::{AsFd as _, AsRawFd as _},
};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

const LISTENER: u64 = u64::MAX;

/// Reads from the connections of this listener.
pub(super) fn serve(listener: &TcpListener) -> io::Result<Infallible> {
    listener.set_nonblocking(true)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(listener.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
    // By file descriptor.
    let mut streams: Vec<Option<TcpStream>> = Vec::new();
    let mut buffer = vec![0; 256 << 10];
    let mut events = [EpollEvent::empty(); 64];
    loop {
        let count = match epoll.wait(&mut events, EpollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            count => count?,
        };
        for event in &events[..count] {
            if event.data() == LISTENER {
                let (stream, _) = match listener.accept() {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                    accepted => accepted?,
                };
                stream.set_nonblocking(true)?;
                let at = usize::try_from(stream.as_raw_fd()).map_err(io::Error::other)?;
                epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, at as u64))?;
                if streams.len() <= at {
                    streams.resize_with(at + 1, || None);
                }
                streams[at] = Some(stream);
                continue;
            }
            let Some(slot) = usize::try_from(event.data()).ok().and_then(|at| streams.get_mut(at)) else {
                continue;
            };
            let Some(stream) = slot else { continue };
            match stream.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => *slot = None,
                Ok(_) => {}
            }
        }
    }
}
