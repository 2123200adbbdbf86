//! Sends bytes in one direction as fast as they are accepted: 64 KiB per write, on one thread, with epoll.

use std::{
    io::{ErrorKind, Write as _},
    os::fd::AsFd as _,
};

use anyhow::Context as _;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::{Load, LoadOutcome, MAX_EXTENSION, WindowBoundary};
use crate::{clock, schedule::nanoseconds, stream::Stream};

const WRITE: usize = 64 << 10;
const UNIT: u64 = 1_000_000;

/// Sends until the window has ended.
pub(super) fn drive(load: &Load, mut on_boundary: impl FnMut(WindowBoundary)) -> anyhow::Result<LoadOutcome> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut streams = Vec::with_capacity(load.connections);
    for at in 0..load.connections {
        let stream = Stream::open(load.target, load.tls.as_ref())?;
        stream.socket().set_nonblocking(true)?;
        epoll.add(stream.as_fd(), EpollEvent::new(EpollFlags::EPOLLOUT, at as u64))?;
        streams.push(stream);
    }
    let begin = clock::now() + nanoseconds(load.warmup);
    let end = begin + nanoseconds(load.window);
    let data = vec![b'x'; WRITE];
    let mut events = [EpollEvent::empty(); 64];
    let (mut sent, mut begun) = (0_u64, false);
    loop {
        let now = clock::now();
        if !begun && now >= begin {
            (sent, begun) = (0, true);
            on_boundary(WindowBoundary::Begin);
        }
        if now >= end && (sent >= UNIT || now >= end + nanoseconds(MAX_EXTENSION)) {
            on_boundary(WindowBoundary::End);
            let units = sent / UNIT;
            return Ok(LoadOutcome { requests: units, answered_in_window: units, ..LoadOutcome::new()? });
        }
        let count = match epoll.wait(&mut events, EpollTimeout::from(20_u16)) {
            Err(nix::Error::EINTR) => 0,
            count => count?,
        };
        for event in &events[..count] {
            let Some(stream) = usize::try_from(event.data()).ok().and_then(|at| streams.get_mut(at)) else {
                continue;
            };
            match stream.write(&data) {
                Ok(length) => sent += length as u64,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error).context("the server did not accept the bytes"),
            }
        }
    }
}
