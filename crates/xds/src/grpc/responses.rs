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
use skysail_http::{buffer::Buffer, head::Headers};
use tokio::time::{Sleep, sleep};
use tonic::{Status, codegen::http::HeaderMap};
use tracing::debug;

use super::{connection::CallStream, response_head};
use crate::limits::{Account, Bound, MIN_PROGRESS};

/// Maximum length of a frame of data in bytes, which every client accepts.
const FRAME: usize = 16 << 10;

/// Writer of the responses of a call.
pub(crate) struct ResponseWriter {
    stream: Arc<CallStream>,
    /// The head was sent.
    begun: bool,
    /// Encoded data that is not handed to HTTP/2 yet.
    piece: Bytes,
    /// Further data, which is encoded as the client reads; `None` if no data waits.
    pieces: Option<Box<dyn Iterator<Item = Bytes> + Send>>,
    /// Set while the client does not read.
    stall: Option<UnreadWait>,
    account: Arc<Account>,
}

/// Wait for a client that does not read.
struct UnreadWait {
    timer: Pin<Box<Sleep>>,
    /// Bytes that the client has read since the timer started.
    taken: usize,
}

impl ResponseWriter {
    pub(super) fn new(stream: Arc<CallStream>, account: Arc<Account>) -> Self {
        Self { stream, begun: false, piece: Bytes::new(), pieces: None, stall: None, account }
    }

    /// Begins to send messages after the former ones are [flushed](Self::flushed). Data is not encoded before the
    /// client reads.
    pub(crate) fn send(
        &mut self,
        pieces: impl Iterator<Item = Bytes> + Send + 'static,
    ) -> Result<(), Status> {
        debug_assert!(self.is_clear(), "earlier data still waits");
        if !std::mem::replace(&mut self.begun, true) && !self.stream.respond(&response_head(200), false) {
            return Err(lost());
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
            if self.pieces.is_none() {
                return Poll::Ready(Ok(()));
            }
            match self.stream.poll_room(cx, FRAME) {
                Poll::Ready(Some(_)) => {}
                Poll::Ready(None) => return Poll::Ready(Err(lost())),
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
        while self.has_data() {
            let room = self.stream.room(FRAME).ok_or_else(lost)?;
            if room == 0 {
                break;
            }
            let stream = Arc::clone(&self.stream);
            let taken = stream.send_frame(room, |out, room| self.fill(out, room)).ok_or_else(lost)?;
            if let Some(stall) = &mut self.stall {
                stall.taken += taken;
                if stall.taken >= MIN_PROGRESS {
                    self.stall = None;
                }
            }
        }
        Ok(())
    }

    /// Returns true if data waits. Takes the next piece if the last one is used up.
    fn has_data(&mut self) -> bool {
        while self.piece.is_empty() {
            match self.pieces.as_mut().and_then(Iterator::next) {
                Some(piece) => self.piece = piece,
                None => {
                    (self.pieces, self.stall) = (None, None);
                    return false;
                }
            }
        }
        true
    }

    /// Appends at most `room` bytes of the data to `out`.
    fn fill(&mut self, out: &mut Buffer, mut room: usize) {
        while room > 0 && self.has_data() {
            let taken = self.piece.split_to(self.piece.len().min(room));
            out.extend(&taken);
            room -= taken.len();
        }
    }

    /// Ends the call. Data that still waits is dropped.
    pub(crate) fn end(self, status: &Status) {
        let mut fields = HeaderMap::new();
        if status.add_header(&mut fields).is_err() {
            fields = HeaderMap::new();
            _ = Status::internal("the status cannot be encoded").add_header(&mut fields);
        }
        let fields = fields.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
        let is_sent = if self.begun {
            let mut trailers = Headers::default();
            fields.for_each(|(name, value)| trailers.append(name, value));
            self.stream.send_trailers(&trailers)
        } else {
            let mut head = response_head(200);
            fields.for_each(|(name, value)| head.append(name, value));
            self.stream.respond(&head, true)
        };
        if !is_sent {
            debug!(client = self.account.client, "a call ended without its status");
        }
    }
}

impl fmt::Debug for ResponseWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseWriter").field("is_clear", &self.is_clear()).finish_non_exhaustive()
    }
}

fn lost() -> Status {
    Status::cancelled("the client has ended the call or the connection")
}
