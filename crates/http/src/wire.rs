//! One side of an exchange, over HTTP/1 or HTTP/2.

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
    http2::{Duplex, StreamClosed, Unsent},
    socket::Stream,
};

/// One end of an exchange: an HTTP/1 connection or an HTTP/2 stream.
pub enum Wire {
    /// A connection with one message after another.
    Http1(Box<Stream>),
    /// A stream of a shared connection.
    Http2(Box<Duplex>),
}

impl Wire {
    /// Returns the number of bytes received.
    #[inline]
    pub fn received(&self) -> u64 {
        match self {
            Self::Http1(stream) => stream.received,
            Self::Http2(duplex) => duplex.received,
        }
    }

    /// Returns the number of bytes sent.
    #[inline]
    pub fn sent(&self) -> u64 {
        match self {
            Self::Http1(stream) => stream.sent,
            Self::Http2(duplex) => duplex.sent,
        }
    }

    /// Sends the head of a request.
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

    /// Sends the head of a response to a request of this method.
    #[inline]
    pub fn respond(
        &mut self,
        head: &ResponseHead,
        framing: Framing,
        method: &str,
        persistence: Persistence,
    ) -> Result<(), StreamClosed> {
        match self {
            Self::Http1(stream) => {
                write::response(&mut stream.output, head, framing, method, persistence);
                Ok(())
            }
            Self::Http2(duplex) => duplex.respond(head, framing == Framing::None || method == "HEAD"),
        }
    }

    /// Waits for space for another interim response (1xx).
    #[inline]
    pub fn poll_space(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Http1(stream) if stream.output.len() >= BLOCK => stream.poll_flush(cx),
            Self::Http1(_) => Poll::Ready(Ok(())),
            Self::Http2(duplex) => duplex.poll_space(cx).map(Ok),
        }
    }

    /// Sends an interim response (1xx).
    #[inline]
    pub fn interim(&mut self, head: &ResponseHead, method: &str) {
        match self {
            Self::Http1(stream) => {
                write::response(&mut stream.output, head, Framing::None, method, Persistence::Keep);
            }
            Self::Http2(duplex) => duplex.interim(head),
        }
    }

    /// Writes buffered output. HTTP/2 does that without a call.
    #[inline]
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Http1(stream) => stream.poll_flush(cx),
            Self::Http2(_) => Poll::Ready(Ok(())),
        }
    }

    /// Returns whether the peer has closed the connection or the stream. Input that arrives before, such as the next
    /// request, is buffered up to a block.
    #[inline]
    pub fn is_closed(&mut self, cx: &mut Context<'_>) -> bool {
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
            Self::Http2(duplex) => duplex.is_closed(cx),
        }
    }

    /// Returns whether an HTTP/2 stream has ended early. For HTTP/1, reading and writing show that.
    #[inline]
    pub fn is_stream_closed(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Http1(_) => false,
            Self::Http2(duplex) => duplex.is_closed(cx),
        }
    }

    /// Returns whether the peer has closed the connection or the stream, even if unread input is buffered.
    #[inline]
    pub fn has_ended(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Http1(stream) => stream.has_ended(),
            Self::Http2(duplex) => duplex.is_closed(cx),
        }
    }

    /// Reads the rest of a response and discards it; for HTTP/1, until the connection ends.
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

    /// Ends the message so that the peer detects that it is incomplete.
    #[inline]
    pub fn abort(&mut self) {
        match self {
            Self::Http1(stream) => stream.output.clear(),
            Self::Http2(duplex) => duplex.reset(),
        }
    }
}
