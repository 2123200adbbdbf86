//! Collects what a connection of HTTP/2 writes while it is polled once, so that it leaves in one system call.
//!
//! h2 writes trailers after it has flushed the data before them. A response in two segments is received by one read of a
//! proxy or by two, depending on the time between them, and the cost of a call would be random.

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use h2::{RecvStream, server::SendResponse};
use http::Request;
use tokio::{
    io::{AsyncWrite, Join},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// Maximum of the collected bytes.
const MAX_COLLECTED: usize = 256 << 10;

/// Writer that collects bytes. A flush does nothing.
#[derive(Clone, Default)]
pub(super) struct Collected(Rc<RefCell<BytesMut>>);

/// Server side of a connection whose output is collected.
pub(super) struct BurstConnection {
    session: h2::server::Connection<Join<OwnedReadHalf, Collected>, Bytes>,
    collected: Collected,
    socket: OwnedWriteHalf,
}

impl BurstConnection {
    /// Receives the preface of a client.
    ///
    /// # Errors
    /// The client sent something else, or the connection broke.
    pub(super) async fn handshake(
        stream: TcpStream,
        builder: &h2::server::Builder,
    ) -> Result<Self, h2::Error> {
        let (reader, socket) = stream.into_split();
        let collected = Collected::default();
        let session = builder.handshake(tokio::io::join(reader, collected.clone())).await?;
        Ok(Self { session, collected, socket })
    }

    /// Waits for the next request, and meanwhile sends the responses to the former ones. `None` after the last one.
    pub(super) async fn accept(
        &mut self,
    ) -> Option<Result<(Request<RecvStream>, SendResponse<Bytes>), h2::Error>> {
        poll_fn(|context| {
            loop {
                let accepted = self.session.poll_accept(context);
                let was_full = self.collected.0.borrow().len() >= MAX_COLLECTED;
                match self.collected.poll_send(&mut self.socket, context) {
                    Poll::Ready(Err(_)) => return Poll::Ready(None),
                    // The session waits for space, which there is now.
                    Poll::Ready(Ok(())) if was_full && accepted.is_pending() => {}
                    _ => return accepted,
                }
            }
        })
        .await
    }
}

impl Collected {
    /// Sends what was collected.
    fn poll_send(&self, socket: &mut OwnedWriteHalf, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut bytes = self.0.borrow_mut();
        while !bytes.is_empty() {
            let length = ready!(Pin::new(&mut *socket).poll_write(context, &bytes))?;
            bytes.advance(length);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Collected {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, new: &[u8]) -> Poll<io::Result<usize>> {
        let mut bytes = self.0.borrow_mut();
        let space = MAX_COLLECTED.saturating_sub(bytes.len()).min(new.len());
        // The task of the session sends what was collected, and then polls the session again.
        if space == 0 && !new.is_empty() {
            return Poll::Pending;
        }
        bytes.extend_from_slice(&new[..space]);
        Poll::Ready(Ok(space))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
