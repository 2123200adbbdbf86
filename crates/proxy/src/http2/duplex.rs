//! One stream of an HTTP/2 connection, from either end.

use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
    server::SendResponse,
};

use super::convert;
use crate::{
    error::{Error, Kind},
    head::{Headers, RequestHead, ResponseHead},
    http1::Framing,
};

/// A stream: what is received, what is sent, and how far the two heads have come.
pub(crate) struct Duplex {
    heads: Heads,
    recv: Option<RecvStream>,
    send: Option<SendStream<Bytes>>,
    /// Bytes of content received so far.
    pub(crate) received: u64,
    /// Bytes of content sent so far.
    pub(crate) sent: u64,
}

enum Heads {
    /// To a server: no stream yet.
    Idle(SendRequest<Bytes>),
    /// To a server: it has yet to answer.
    Asked(ResponseFuture),
    /// From a client: we have yet to answer.
    Heard(SendResponse<Bytes>),
    /// The answer's head is there.
    Answered,
}

/// What a server says.
pub(crate) enum Answered {
    /// Its answer will come later (1xx).
    Interim,
    /// Its answer, whose body is framed so where the next hop is HTTP/1.1.
    Final(Framing),
}

impl Duplex {
    /// A client's request.
    pub(crate) fn accepted(recv: RecvStream, respond: SendResponse<Bytes>) -> Self {
        Self { heads: Heads::Heard(respond), recv: Some(recv), send: None, received: 0, sent: 0 }
    }

    /// A place for a request to a server.
    pub(crate) fn idle(connection: SendRequest<Bytes>) -> Self {
        Self { heads: Heads::Idle(connection), recv: None, send: None, received: 0, sent: 0 }
    }

    /// Sends a request's head; `end` says that nothing follows.
    ///
    /// # Errors
    /// The head cannot be carried by HTTP/2, or the connection takes no more streams.
    pub(crate) fn request(&mut self, head: &RequestHead, end: bool) -> Result<(), Error> {
        let request = convert::to_request(head).ok_or_else(|| Error::new(Kind::BadPath))?;
        let Heads::Idle(connection) = &mut self.heads else { return Err(Error::new(Kind::UpstreamReset)) };
        let (answer, send) = connection
            .send_request(request, end)
            .map_err(|error| Error::caused(Kind::UpstreamRefused, error))?;
        (self.heads, self.send) = (Heads::Asked(answer), Some(send));
        Ok(())
    }

    /// Waits for what a server says.
    pub(crate) fn poll_answer(
        &mut self,
        cx: &mut Context<'_>,
        method: &str,
        head: &mut ResponseHead,
    ) -> Poll<Result<Answered, Error>> {
        let Heads::Asked(answer) = &mut self.heads else {
            return Poll::Ready(Err(Error::new(Kind::UpstreamReset)));
        };
        if let Poll::Ready(Some(interim)) = answer.poll_informational(cx) {
            let (parts, ()) = interim.map_err(upstream_error)?.into_parts();
            convert::response_head(&parts, method, true, head);
            return Poll::Ready(Ok(Answered::Interim));
        }
        let answer = ready!(std::pin::Pin::new(answer).poll(cx)).map_err(upstream_error)?;
        let (parts, recv) = answer.into_parts();
        let framing = convert::response_head(&parts, method, recv.is_end_stream(), head);
        (self.heads, self.recv) = (Heads::Answered, Some(recv));
        Poll::Ready(Ok(Answered::Final(framing)))
    }

    /// Sends an answer that is not the last (1xx).
    pub(crate) fn interim(&mut self, head: &ResponseHead) {
        if let (Heads::Heard(respond), Some(response)) = (&mut self.heads, convert::to_response(head)) {
            // A client that is gone is noticed elsewhere.
            let _ = respond.send_informational(response);
        }
    }

    /// Sends an answer's head; `end` says that nothing follows.
    ///
    /// # Errors
    /// The client is gone, or the head cannot be carried by HTTP/2.
    pub(crate) fn respond(&mut self, head: &ResponseHead, end: bool) -> Result<(), Error> {
        let response = convert::to_response(head).ok_or_else(|| Error::new(Kind::UpstreamProtocol))?;
        let Heads::Heard(respond) = &mut self.heads else { return Err(Error::new(Kind::DownstreamClosed)) };
        let send = respond.send_response(response, end).map_err(|_| Error::new(Kind::DownstreamClosed))?;
        (self.heads, self.send) = (Heads::Answered, Some(send));
        Ok(())
    }

    /// Whether all that the other end sends has been taken.
    pub(crate) fn is_end(&self) -> bool {
        self.recv.as_ref().is_none_or(RecvStream::is_end_stream)
    }

    /// The next piece of content; `None` at its end.
    pub(crate) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, h2::Error>> {
        let Some(recv) = &mut self.recv else { return Poll::Ready(Ok(None)) };
        let piece = ready!(recv.poll_data(cx)).transpose()?;
        self.received += piece.as_ref().map_or(0, Bytes::len) as u64;
        Poll::Ready(Ok(piece))
    }

    /// What follows the content.
    pub(crate) fn poll_trailers(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Headers>, h2::Error>> {
        let Some(recv) = &mut self.recv else { return Poll::Ready(Ok(None)) };
        let trailers = ready!(recv.poll_trailers(cx))?;
        Poll::Ready(Ok(trailers.map(|trailers| {
            let mut headers = Headers::default();
            convert::headers(&trailers, &mut headers);
            headers
        })))
    }

    /// Tells the other end that so much of its content has been handed on.
    pub(crate) fn release(&mut self, count: usize) {
        if let Some(recv) = &mut self.recv {
            // Only more than was received would be an error.
            let _ = recv.flow_control().release_capacity(count);
        }
    }

    /// How much of `want` may be sent now.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>, want: usize) -> Poll<Result<usize, Gone>> {
        let Some(send) = &mut self.send else { return Poll::Ready(Err(Gone)) };
        send.reserve_capacity(want);
        loop {
            let room = send.capacity().min(want);
            if room > 0 {
                return Poll::Ready(Ok(room));
            }
            match ready!(send.poll_capacity(cx)) {
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Poll::Ready(Err(Gone)),
            }
        }
    }

    /// Sends content for which there is room; `end` says that nothing follows.
    pub(crate) fn send(&mut self, data: Bytes, end: bool) -> Result<(), Gone> {
        self.sent += data.len() as u64;
        self.send.as_mut().ok_or(Gone)?.send_data(data, end).map_err(|_| Gone)
    }

    /// Sends what follows the content, and the end.
    pub(crate) fn send_trailers(&mut self, trailers: &Headers) -> Result<(), Gone> {
        let trailers = convert::to_headers(trailers).ok_or(Gone)?;
        self.send.as_mut().ok_or(Gone)?.send_trailers(trailers).map_err(|_| Gone)
    }

    /// Reads a server's answer that nobody wants, to its end.
    pub(crate) fn poll_ignored(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut head = ResponseHead::default();
        while matches!(self.heads, Heads::Asked(_)) {
            if ready!(self.poll_answer(cx, "GET", &mut head)).is_err() {
                return Poll::Ready(());
            }
        }
        while let Ok(Some(piece)) = ready!(self.poll_piece(cx)) {
            self.release(piece.len());
        }
        Poll::Ready(())
    }

    /// Whether the other end has given the stream up, or the connection is lost.
    pub(crate) fn is_gone(&mut self, cx: &mut Context<'_>) -> bool {
        match (&mut self.heads, &mut self.send) {
            (Heads::Heard(respond), _) => respond.poll_reset(cx).is_ready(),
            (Heads::Answered, Some(send)) => send.poll_reset(cx).is_ready(),
            _ => false,
        }
    }

    /// Gives the stream up.
    pub(crate) fn reset(&mut self) {
        match (&mut self.heads, &mut self.send) {
            (Heads::Heard(respond), _) => respond.send_reset(Reason::INTERNAL_ERROR),
            (_, Some(send)) => send.send_reset(Reason::INTERNAL_ERROR),
            _ => {}
        }
    }
}

/// The other end takes no more.
#[derive(Debug)]
pub(crate) struct Gone;

/// What the end of a stream to a server means.
pub(crate) fn upstream_error(error: h2::Error) -> Error {
    let kind = if error.is_go_away() && error.is_remote() || error.reason() == Some(Reason::REFUSED_STREAM) {
        // Streams above the last that the server names have not been looked at (RFC 9113, section 6.8).
        Kind::UpstreamRefused
    } else if error.is_io() {
        Kind::UpstreamClosed
    } else if error.is_reset() && error.is_remote() {
        Kind::UpstreamReset
    } else {
        Kind::UpstreamProtocol
    };
    Error::caused(kind, error)
}
