//! The responses of a call. They are encoded and handed to HTTP/2 as far as the client reads. A client that does not
//! read holds almost no memory, and is disconnected after a timeout.

use std::{
    fmt,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use h2::{SendStream, server::SendResponse};
use tokio::time::{Sleep, sleep};
use tonic::{Status, codegen::http::HeaderMap};
use tracing::debug;

use super::head;
use crate::limits::{Account, Bound, MIN_PROGRESS};

/// Writer of the responses of a call.
pub(crate) struct ResponseWriter {
    state: ResponseState,
    /// Encoded data that is not handed to HTTP/2 yet.
    piece: Bytes,
    /// Further data, which is encoded as the client reads; `None` if no data waits.
    pieces: Option<Box<dyn Iterator<Item = Bytes> + Send>>,
    /// Set while the client does not read.
    stall: Option<UnreadWait>,
    account: Arc<Account>,
}

enum ResponseState {
    /// No headers were sent yet.
    Begun(SendResponse<Bytes>),
    Open(SendStream<Bytes>),
    Ended,
}

/// Wait for a client that does not read.
struct UnreadWait {
    timer: Pin<Box<Sleep>>,
    /// Bytes that the client has read since the timer started.
    taken: usize,
}

impl ResponseWriter {
    pub(super) fn new(respond: SendResponse<Bytes>, account: Arc<Account>) -> Self {
        Self { state: ResponseState::Begun(respond), piece: Bytes::new(), pieces: None, stall: None, account }
    }

    /// Begins to send messages after the former ones are [flushed](Self::flushed). Data is not encoded before the
    /// client reads.
    pub(crate) fn send(
        &mut self,
        pieces: impl Iterator<Item = Bytes> + Send + 'static,
    ) -> Result<(), Status> {
        debug_assert!(self.is_clear(), "earlier data still waits");
        if let ResponseState::Begun(respond) = &mut self.state {
            self.state = ResponseState::Open(respond.send_response(head(), false).map_err(broken)?);
        }
        self.pieces = Some(Box::new(pieces));
        self.hand_over()
    }

    /// Returns true if no data waits.
    pub(crate) fn is_clear(&self) -> bool {
        self.pieces.is_none()
    }

    /// Waits until all data is handed over. Fails if the client reads too little for too long; then its connection is
    /// closed. Cancel safe.
    pub(crate) async fn flushed(&mut self) -> Result<(), Status> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        loop {
            self.hand_over()?;
            let ResponseState::Open(stream) = &mut self.state else { return Poll::Ready(Ok(())) };
            if self.pieces.is_none() {
                return Poll::Ready(Ok(()));
            }
            match stream.poll_capacity(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(broken(error))),
                Poll::Ready(None) => {
                    return Poll::Ready(Err(Status::cancelled("the client ended the stream")));
                }
                Poll::Pending => break,
            }
        }
        let unread = self.account.limits.unread;
        let stall = self.stall.get_or_insert_with(|| UnreadWait { timer: Box::pin(sleep(unread)), taken: 0 });
        ready!(stall.timer.as_mut().poll(cx));
        self.account.close();
        let what = format!("the client has read too little for {unread:?}; its connection is closed");
        Poll::Ready(Err(self.account.limits.exhausted(Bound::Unread, &self.account.client, what)))
    }

    /// Hands over as much as the client accepts now.
    fn hand_over(&mut self) -> Result<(), Status> {
        let ResponseState::Open(stream) = &mut self.state else { return Ok(()) };
        while let Some(pieces) = &mut self.pieces {
            if self.piece.is_empty() {
                let Some(piece) = pieces.next() else {
                    (self.pieces, self.stall) = (None, None);
                    stream.reserve_capacity(0);
                    return Ok(());
                };
                self.piece = piece;
            }
            stream.reserve_capacity(self.piece.len());
            let taken = stream.capacity().min(self.piece.len());
            if taken == 0 {
                return Ok(());
            }
            stream.send_data(self.piece.split_to(taken), false).map_err(broken)?;
            if let Some(stall) = &mut self.stall {
                stall.taken += taken;
                if stall.taken >= MIN_PROGRESS {
                    self.stall = None;
                }
            }
        }
        Ok(())
    }

    /// Ends the call. Data that still waits is dropped.
    pub(crate) fn end(mut self, status: &Status) {
        let mut trailers = HeaderMap::new();
        if status.add_header(&mut trailers).is_err() {
            trailers = HeaderMap::new();
            _ = Status::internal("the status cannot be encoded").add_header(&mut trailers);
        }
        let ended = match std::mem::replace(&mut self.state, ResponseState::Ended) {
            ResponseState::Begun(mut respond) => {
                let mut only = head();
                only.headers_mut().extend(trailers);
                respond.send_response(only, true).map(|_| ())
            }
            ResponseState::Open(mut stream) => stream.send_trailers(trailers),
            ResponseState::Ended => Ok(()),
        };
        if let Err(error) = ended {
            debug!(%error, "a call ended without its status");
        }
    }
}

impl fmt::Debug for ResponseWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseWriter").field("is_clear", &self.is_clear()).finish_non_exhaustive()
    }
}

fn broken(error: h2::Error) -> Status {
    Status::cancelled(error.to_string())
}
