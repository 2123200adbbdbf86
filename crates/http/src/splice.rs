//! Transfer of bytes between two sockets inside the kernel (`splice(2)`), through a pipe that holds their pages.
//!
//! A worker keeps a short list of empty pipes, and lends one while bytes are in transit. An idle connection holds
//! none.

use std::{
    cell::{Cell, RefCell},
    io,
    os::fd::{AsFd, OwnedFd},
};

use nix::{
    fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice},
    unistd::pipe2,
};

/// Requested capacity of a pipe in bytes. With the default of 64 KiB, splicing brings no gain. It is used if the system
/// refuses the request.
const CAPACITY: usize = 512 * 1024;
/// Maximum number of empty pipes that a worker keeps.
const KEPT: usize = 16;
/// Maximum number of pipes that a worker lends at the same time; each has two file descriptors.
const LENT: usize = 256;

thread_local! {
    static FREE: RefCell<Vec<(OwnedFd, OwnedFd)>> = const { RefCell::new(Vec::new()) };
    static IN_USE: Cell<usize> = const { Cell::new(0) };
}

/// A lent pipe.
pub struct Pipe {
    /// Read end and write end; `None` after the return.
    ends: Option<(OwnedFd, OwnedFd)>,
    held: usize,
}

impl Pipe {
    /// Lends a pipe; returns `None` at the limit, or if the system cannot create one.
    pub fn lend() -> Option<Self> {
        if IN_USE.get() >= LENT {
            return None;
        }
        let free = FREE.with_borrow_mut(Vec::pop);
        let ends = match free {
            Some(ends) => ends,
            None => {
                let ends = pipe2(OFlag::O_NONBLOCK | OFlag::O_CLOEXEC).ok()?;
                // On failure the pipe keeps its default capacity.
                let _ = fcntl(&ends.1, FcntlArg::F_SETPIPE_SZ(i32::try_from(CAPACITY).unwrap_or(i32::MAX)));
                ends
            }
        };
        IN_USE.set(IN_USE.get() + 1);
        Some(Self { ends: Some(ends), held: 0 })
    }

    /// Returns whether the pipe is empty.
    pub fn is_empty(&self) -> bool {
        self.held == 0
    }

    /// Moves available bytes from a socket into the pipe; returns 0 at the end of the stream. The pipe must be empty:
    /// a full pipe and an empty socket return the same error.
    pub fn fill(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let Some((_, write)) = &self.ends else { return Ok(0) };
        let count = splice(socket, None, write, None, CAPACITY, flags())?;
        self.held += count;
        Ok(count)
    }

    /// Moves bytes from the pipe to a socket, as many as it accepts.
    pub fn drain(&mut self, socket: impl AsFd) -> io::Result<usize> {
        let Some((read, _)) = &self.ends else { return Ok(0) };
        let count = splice(read, None, socket, None, self.held, flags())?;
        self.held -= count.min(self.held);
        Ok(count)
    }
}

fn flags() -> SpliceFFlags {
    SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE
}

impl Drop for Pipe {
    fn drop(&mut self) {
        IN_USE.set(IN_USE.get() - 1);
        let Some(ends) = self.ends.take() else { return };
        if self.held == 0 {
            let _ = FREE.try_with(|free| {
                let mut free = free.borrow_mut();
                if free.len() < KEPT {
                    free.push(ends);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::UnixStream,
    };

    use super::*;

    #[test]
    fn empty_pipes_are_kept_and_lending_is_limited() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let (mut out, into) = UnixStream::pair().unwrap();
        near.write_all(b"hello").unwrap();
        let mut pipe = Pipe::lend().unwrap();
        assert_eq!(pipe.fill(&far).unwrap(), 5);
        assert!(!pipe.is_empty());
        assert_eq!(pipe.drain(&into).unwrap(), 5);
        let mut word = [0; 5];
        out.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"hello");
        drop(pipe);
        assert_eq!(FREE.with_borrow(Vec::len), 1);

        near.write_all(b"lost").unwrap();
        let mut pipe = Pipe::lend().unwrap();
        pipe.fill(&far).unwrap();
        drop(pipe);
        assert_eq!(FREE.with_borrow(Vec::len), 0, "the next user would read bytes of another connection");

        let mut lent: Vec<_> = std::iter::from_fn(Pipe::lend).collect();
        assert_eq!(lent.len(), LENT);
        lent.pop();
        assert!(Pipe::lend().is_some());
        drop(lent);
        assert_eq!((FREE.with_borrow(Vec::len), IN_USE.get()), (KEPT, 0));
    }
}
