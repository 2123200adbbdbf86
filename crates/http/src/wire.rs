//! One end of an exchange, whichever HTTP it speaks.

use std::{
    io,
    task::{Context, Poll, ready},
};

use crate::{
    buffer::BLOCK,
    head::{RequestHead, ResponseHead},
    http1::{
        Framing,
        write::{self, Persistence},
    },
    http2::{Duplex, Gone, Unsent},
    socket::Stream,
};

/// Where messages come from and go to.
pub enum Wire {
    /// A connection, on which one message follows the other.
    Http1(Box<Stream>),
    /// One stream of a connection that others share.
    Http2(Box<Duplex>),
}

impl Wire {
    /// Bytes received so far.
    #[inline]
    pub fn received(&self) -> u64 {
        match self {
            Self::Http1(stream) => stream.received,
            Self::Http2(duplex) => duplex.received,
        }
    }

    /// Bytes sent so far.
    #[inline]
    pub fn sent(&self) -> u64 {
        match self {
            Self::Http1(stream) => stream.sent,
            Self::Http2(duplex) => duplex.sent,
        }
    }

    /// Sends a request's head.
    pub fn request(
        &mut self,
        head: &RequestHead,
        framing: Framing,
        persistence: Persistence,
    ) -> Result<(), Unsent> {
        match self {
            Self::Http1(stream) => {
                write::request(&mut stream.output, head, framing, persistence);
                Ok(())
            }
            Self::Http2(duplex) => {
                let upgrade = persistence == Persistence::Upgrade;
                let open = upgrade || head.method() == "CONNECT";
                let empty = matches!(framing, Framing::None | Framing::Length(0));
                duplex.request(head, empty && !open, upgrade)
            }
        }
    }

    /// Sends an answer's head to a request of this method.
    #[inline]
    pub fn respond(
        &mut self,
        head: &ResponseHead,
        framing: Framing,
        method: &str,
        persistence: Persistence,
    ) -> Result<(), Gone> {
        match self {
            Self::Http1(stream) => {
                write::response(&mut stream.output, head, framing, method, persistence);
                Ok(())
            }
            Self::Http2(duplex) => duplex.respond(head, framing == Framing::None || method == "HEAD"),
        }
    }

    /// Waits for room for another answer that is not the last (1xx).
    #[inline]
    pub fn poll_space(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Http1(stream) if stream.output.len() >= BLOCK => stream.poll_flush(cx),
            Self::Http1(_) => Poll::Ready(Ok(())),
            Self::Http2(duplex) => duplex.poll_space(cx).map(Ok),
        }
    }

    /// Sends an answer that is not the last (1xx).
    #[inline]
    pub fn interim(&mut self, head: &ResponseHead, method: &str) {
        match self {
            Self::Http1(stream) => {
                write::response(&mut stream.output, head, Framing::None, method, Persistence::Keep);
            }
            Self::Http2(duplex) => duplex.interim(head),
        }
    }

    /// Writes what waits to be written. HTTP/2 does that by itself.
    #[inline]
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Http1(stream) => stream.poll_flush(cx),
            Self::Http2(_) => Poll::Ready(Ok(())),
        }
    }

    /// Whether the other end has gone. What it sends meanwhile (its next request) is kept, up to a block.
    #[inline]
    pub fn is_gone(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Http1(stream) => {
                while !stream.input.is_full() {
                    match stream.poll_fill(cx) {
                        Poll::Pending => return false,
                        Poll::Ready(Ok(1..)) => {}
                        Poll::Ready(_) => return true,
                    }
                }
                false
            }
            Self::Http2(duplex) => duplex.is_gone(cx),
        }
    }

    /// Whether a stream of HTTP/2 has been given up. On a connection that shows when it is read or written.
    #[inline]
    pub fn is_lost(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Http1(_) => false,
            Self::Http2(duplex) => duplex.is_gone(cx),
        }
    }

    /// The same, whatever it sent before that has not been read.
    #[inline]
    pub fn has_ended(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Http1(stream) => stream.has_ended(),
            Self::Http2(duplex) => duplex.is_gone(cx),
        }
    }

    /// Reads an answer that nobody wants, to its end.
    #[inline]
    pub fn poll_ignored(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Http1(stream) => {
                while matches!(ready!(stream.poll_fill(cx)), Ok(1..)) {
                    stream.input.clear();
                }
                Poll::Ready(())
            }
            Self::Http2(duplex) => duplex.poll_ignored(cx),
        }
    }

    /// Breaks the message off, so that the other end knows that what it has is not all.
    #[inline]
    pub fn break_off(&mut self) {
        match self {
            Self::Http1(stream) => stream.output.clear(),
            Self::Http2(duplex) => duplex.reset(),
        }
    }
}
