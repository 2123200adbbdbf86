//! Byte buffers that hold memory only while they hold bytes.
//!
//! A worker keeps a short list of free blocks, and lends the block that was returned last. A block is returned when it
//! is empty. A few blocks, which stay in the CPU's caches, thus serve all connections. An idle connection holds no
//! block.

use std::{
    cell::RefCell,
    io,
    task::{Context, Poll, ready},
};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::{io::Interest, net::TcpStream, task::coop};

/// Size of a block in bytes: a usual head and the beginning of its body in one read.
pub const BLOCK: usize = 16 * 1024;
/// Size of a large block in bytes, for the output of many streams.
pub const LARGE: usize = 64 * 1024;
/// Maximum number of free blocks that a worker keeps.
const KEPT: usize = 64;
/// Maximum number of free large blocks that a worker keeps.
const KEPT_LARGE: usize = 16;

thread_local! {
    static FREE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
    static FREE_LARGE: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// A queue of bytes: written at the end, read at the front.
#[derive(Default)]
pub struct Buffer {
    block: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether the last content exceeded a block; the next content then starts with a large block.
    large: bool,
}

impl Buffer {
    /// Returns the content.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.block[self.start..self.end]
    }

    /// Returns the content for changes in place.
    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.block[self.start..self.end]
    }

    /// Returns the length of the content.
    #[inline]
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns whether the buffer is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Returns whether the buffer holds memory.
    #[inline]
    pub fn has_memory(&self) -> bool {
        !self.block.is_empty()
    }

    /// Removes bytes from the front.
    #[inline]
    pub fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            self.large = self.end > BLOCK;
            self.clear();
        }
    }

    /// Returns the space at the end, which is empty only if [`Self::is_full`].
    #[inline]
    pub fn spare(&mut self) -> &mut [u8] {
        if self.block.is_empty() {
            self.block = if self.large { take_large(LARGE) } else { take_block() };
        } else if self.end == self.block.len() && self.start > 0 {
            self.block.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.block[self.end..]
    }

    /// Returns space at the end for at least `count` bytes; grows if needed.
    #[inline]
    pub fn space(&mut self, count: usize) -> &mut [u8] {
        if self.block.is_empty() {
            self.spare();
        }
        if self.block.len() - self.end < count {
            self.make_space(count);
        }
        &mut self.block[self.end..]
    }

    /// Adds bytes to the content that were written to [`Self::spare`] or [`Self::space`].
    #[inline]
    pub fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.block.len());
    }

    /// Returns whether nothing more fits without growing.
    #[inline]
    pub fn is_full(&self) -> bool {
        !self.block.is_empty() && self.len() == self.block.len()
    }

    /// Returns the number of bytes that fit without growing; 0 if the buffer holds no memory.
    #[inline]
    pub fn room(&self) -> usize {
        self.block.len() - self.len()
    }

    /// Grows to at least `size` bytes, for example for a large head.
    #[inline]
    pub fn grow(&mut self, size: usize) {
        if size > self.block.len() {
            let mut block = if size <= BLOCK { take_block() } else { take_large(size) };
            let len = self.len();
            block[..len].copy_from_slice(self.bytes());
            give_block(std::mem::replace(&mut self.block, block));
            self.start = 0;
            self.end = len;
        }
    }

    /// Appends bytes; grows if needed. Always inlined, because the length of most pieces is a constant.
    #[inline(always)]
    pub fn extend(&mut self, bytes: &[u8]) {
        self.space(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }

    #[cold]
    fn make_space(&mut self, count: usize) {
        if self.spare().len() < count && self.start > 0 {
            self.block.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.block.len() - self.end < count {
            self.grow(self.len() + count);
        }
    }

    /// Releases most of the memory if the content is small.
    #[inline]
    pub fn pack(&mut self) {
        if self.block.len() >= BLOCK && self.len() <= BLOCK / 4 {
            let packed = self.bytes().into();
            self.end -= self.start;
            self.start = 0;
            give_block(std::mem::replace(&mut self.block, packed));
        }
    }

    /// Reads available bytes from a socket; returns 0 at the end of the stream. The buffer must not be full. Without
    /// available bytes, no memory is held.
    ///
    /// The system calls bypass libc, whose functions are thread cancellation points. A peer that always sends more
    /// than a buffer must not delay other tasks: such reads use the task's budget.
    pub fn poll_fill(&mut self, tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if !coop::has_budget_remaining() {
            // Pending; the task is polled again after the others.
            let _ = ready!(coop::poll_proceed(cx));
        }
        loop {
            let mut count = None;
            let read = tcp.try_io(Interest::READABLE, || {
                let spare = self.spare();
                let (_, read) = recv(tcp, &mut *spare, RecvFlags::empty())?;
                count = Some(read);
                // A short read took all available bytes. `WouldBlock` clears the readiness, which saves another call.
                if (1..spare.len()).contains(&read) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
            });
            if self.is_empty() && !matches!(count, Some(1..)) {
                self.clear();
            }
            match (count, read) {
                (Some(count), read) => {
                    self.filled(count);
                    if read.is_ok()
                        && let Poll::Ready(spent) = coop::poll_proceed(cx)
                    {
                        spent.made_progress();
                    }
                    return Poll::Ready(Ok(count));
                }
                (None, Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Poll::Ready(Err(error));
                }
                (None, _) => ready!(tcp.poll_read_ready(cx))?,
            }
        }
    }

    /// Writes all content to a socket; returns ready when the kernel has accepted it.
    #[inline]
    pub fn poll_drain(&mut self, tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.is_empty() {
            match tcp.try_io(Interest::WRITABLE, || Ok(send(tcp, self.bytes(), SendFlags::NOSIGNAL)?)) {
                Ok(count) => self.consume(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready!(tcp.poll_write_ready(cx))?,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Removes all content.
    #[inline]
    pub fn clear(&mut self) {
        self.start = 0;
        self.end = 0;
        give_block(std::mem::take(&mut self.block));
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        give_block(std::mem::take(&mut self.block));
    }
}

fn take_block() -> Box<[u8]> {
    let free = FREE.try_with(|free| free.borrow_mut().pop()).ok().flatten();
    free.unwrap_or_else(|| vec![0; BLOCK].into_boxed_slice())
}

/// Returns a block of at least `size` bytes.
fn take_large(size: usize) -> Box<[u8]> {
    let free = || FREE_LARGE.try_with(|free| free.borrow_mut().pop()).ok().flatten();
    let free = if size <= LARGE { free() } else { None };
    free.unwrap_or_else(|| vec![0; size.next_power_of_two().max(LARGE)].into_boxed_slice())
}

fn give_block(block: Box<[u8]>) {
    let (list, kept) = match block.len() {
        BLOCK => (&FREE, KEPT),
        LARGE => (&FREE_LARGE, KEPT_LARGE),
        _ => return,
    };
    let _ = list.try_with(|free| {
        let mut free = free.borrow_mut();
        if free.len() < kept {
            free.push(block);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_in_order_for_all_sizes() {
        let mut buffer = Buffer::default();
        let (mut written, mut read) = (0_u32, 0_u32);
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2_000 {
            let count = random.usize(0..500);
            for _ in 0..count {
                buffer.extend(&written.to_le_bytes());
                written += 1;
            }
            let take = random.usize(0..=buffer.len() / 4);
            for _ in 0..take {
                assert_eq!(buffer.bytes()[..4], read.to_le_bytes());
                buffer.consume(4);
                read += 1;
            }
        }
        assert_eq!(buffer.len() / 4, (written - read) as usize);
        buffer.consume(buffer.len());
        assert!(!buffer.has_memory());
    }
}
