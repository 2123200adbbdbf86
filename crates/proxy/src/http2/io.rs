//! A connection as `h2` reads and writes it.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::socket::Stream;

/// A connection, with what was read from it while its protocol was being found out.
pub(crate) struct Io(Stream);

impl Io {
    pub(crate) fn new(stream: Stream) -> Self {
        Self(stream)
    }
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = &mut self.0;
        if stream.input.is_empty() {
            // A connection on which nothing happens holds no buffer.
            if stream.poll_fill(cx)?.is_pending() {
                stream.rest();
                return Poll::Pending;
            }
        }
        let count = into.remaining().min(stream.input.len());
        into.put_slice(&stream.input.bytes()[..count]);
        stream.input.consume(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, &[io::IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_write(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_flush(cx))?;
        self.0.poll_shutdown(cx)
    }
}
