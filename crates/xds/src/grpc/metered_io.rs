//! Charges the bytes of a connection to its account, and stops reading while the account's debt is too large.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

use crate::limits::{Account, Bound, FRAME_BYTE_COST};

/// A connection that is read at its account's pace.
pub(super) struct MeteredIo<IO> {
    io: IO,
    account: Arc<Account>,
    /// Timer until which the connection is not read.
    wait: Option<Pin<Box<Sleep>>>,
}

impl<IO> MeteredIo<IO> {
    pub(super) fn new(io: IO, account: Arc<Account>) -> Self {
        Self { io, account, wait: None }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for MeteredIo<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, account, wait } = &mut *self;
        loop {
            if let Some(timer) = wait {
                ready!(timer.as_mut().poll(cx));
                *wait = None;
            }
            let Some(time) = account.pace.wait() else { break };
            account.limits.record(Bound::Pace, &account.client);
            *wait = Some(Box::pin(sleep(time)));
        }
        let before = buffer.filled().len();
        let read = Pin::new(io).poll_read(cx, buffer);
        let bytes = buffer.filled().len() - before;
        if bytes > 0 {
            account.pace.charge(FRAME_BYTE_COST * bytes as u64);
            account.read.fetch_add(bytes as u64, Relaxed);
        }
        read
    }
}

impl<IO> MeteredIo<IO> {
    fn count(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            self.account.written.fetch_add(*bytes as u64, Relaxed);
        }
        written
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for MeteredIo<IO> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.count(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, pieces);
        self.count(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::limits::{BURST, CALL_COST, Limits};

    #[tokio::test]
    async fn received_bytes_are_charged_and_a_debt_stops_reading() {
        let limits = Arc::new(Limits::default());
        let account = Arc::new(Account::new(Arc::clone(&limits), String::new()));
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let mut server = MeteredIo::new(server, Arc::clone(&account));
        client.write_all(&[7; 1_000]).await.unwrap();
        let mut read = [0; 1_000];
        server.read_exact(&mut read).await.unwrap();
        account.pace.charge(BURST - FRAME_BYTE_COST * 1_000);
        assert_eq!(account.pace.wait(), None);

        // One hour's worth of debt.
        account.pace.charge(3_600 * CALL_COST);
        client.write_all(&[7; 1_000]).await.unwrap();
        let mut waiting = Box::pin(server.read_exact(&mut read));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(waiting);
        assert_eq!(limits.reached(Bound::Pace), 1);
        server.write_all(b"answers are still written").await.unwrap();
    }
}
