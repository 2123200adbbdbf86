//! Connections: TCP with or without TLS, and their buffers.
//!
//! Reads rely on tokio's readiness, which a short read clears. A message therefore costs one `read`, without
//! a second one that would find nothing.

use std::{
    future::poll_fn,
    io,
    mem::MaybeUninit,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::CommonState;
use skysail_identity::{Acceptor, Connector, resumption};
use socket2::SockRef;
use tokio::{
    io::{AsyncWrite as _, Interest},
    net::TcpStream,
};

use crate::{
    buffer::Buffer,
    session::{TlsConnection, TlsSession},
    splice::Pipe,
    timer::Timer,
};

/// Timeout of [`Stream::close`]: writing the output and waiting for the peer's end of stream.
const LINGER: Duration = Duration::from_secs(1);

/// A connection with its buffers.
pub struct Stream {
    tcp: TcpStream,
    tls: Option<Box<TlsSession>>,
    /// Bytes that were read and not yet consumed.
    pub input: Buffer,
    /// Bytes to write.
    pub output: Buffer,
    /// Number of content bytes read (after TLS).
    pub received: u64,
    /// Number of content bytes written (before TLS).
    pub sent: u64,
}

impl Stream {
    /// Returns a connection without TLS.
    #[inline]
    pub fn new(tcp: TcpStream) -> Self {
        Self { tcp, tls: None, input: Buffer::default(), output: Buffer::default(), received: 0, sent: 0 }
    }

    /// Returns the local address.
    #[inline]
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.tcp.local_addr().ok()
    }

    /// Returns the peer's address.
    #[inline]
    pub fn remote_address(&self) -> Option<SocketAddr> {
        self.tcp.peer_addr().ok()
    }

    /// Returns the protocol selected by ALPN.
    #[inline]
    pub fn alpn(&self) -> Option<&[u8]> {
        self.agreed()?.alpn_protocol()
    }

    /// Returns the parameters that the TLS handshake negotiated, if the connection has TLS.
    #[inline]
    pub fn agreed(&self) -> Option<&CommonState> {
        self.tls.as_ref().map(|session| session.agreed())
    }

    /// Terminates TLS. `offered` lists the ALPN protocols that the client offers, if they are known. Returns
    /// true if the session is resumed. Bytes that are already in `input` are part of the handshake.
    pub async fn accept_tls(&mut self, acceptor: &Acceptor, offered: &[Box<[u8]>]) -> io::Result<bool> {
        let session = acceptor.accept(offered).map_err(io::Error::other)?;
        self.handshake(TlsConnection::Server(session)).await
    }

    /// Originates TLS to a server at an address. Returns true if the session is resumed.
    pub async fn connect_tls(
        &mut self,
        connector: &Connector,
        name: rustls::pki_types::ServerName<'static>,
        address: SocketAddr,
    ) -> io::Result<bool> {
        let session = connector.connect(name, address).map_err(io::Error::other)?;
        self.handshake(TlsConnection::Client(session)).await
    }

    async fn handshake(&mut self, side: TlsConnection) -> io::Result<bool> {
        let raw = std::mem::take(&mut self.input);
        let session = self.tls.insert(Box::new(TlsSession::new(side, raw)));
        poll_fn(|cx| session.poll_handshake(&self.tcp, cx, &mut self.input)).await?;
        self.received = self.input.len() as u64;
        resumption::is_resumed(session.agreed()).map_err(io::Error::other)
    }

    /// Returns ready if there may be input.
    #[inline]
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.tls.as_ref().is_some_and(|session| session.holds_input()) {
            return Poll::Ready(());
        }
        self.tcp.poll_read_ready(cx).map(drop)
    }

    /// Reads available input; returns 0 at the end of the stream. `input` must not be full.
    #[inline]
    pub fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let count = match &mut self.tls {
            None => ready!(self.input.poll_fill(&self.tcp, cx))?,
            Some(session) => ready!(session.poll_read(&self.tcp, cx, &mut self.input))?,
        };
        self.received += count as u64;
        Poll::Ready(Ok(count))
    }

    /// Writes all output; returns ready when the kernel has accepted it.
    #[inline]
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let before = self.output.len();
        let flushed = match &mut self.tls {
            None => self.output.poll_drain(&self.tcp, cx),
            Some(session) => session.poll_flush(&self.tcp, cx, &mut self.output),
        };
        self.sent += (before - self.output.len()) as u64;
        flushed
    }

    /// Sends the end of the stream. The caller must have written all output before.
    #[inline]
    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(session) = &mut self.tls {
            ready!(session.poll_close(&self.tcp, cx))?;
        }
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }

    /// Closes the connection gracefully: writes all output, then waits briefly for the peer's end of stream. A close
    /// with unread input would discard output that the peer has not read yet.
    pub async fn close(&mut self, timer: &mut Timer) {
        let deadline = Some(Instant::now() + LINGER);
        poll_fn(|cx| {
            if timer.poll(cx, deadline).is_ready() || ready!(self.poll_flush(cx)).is_err() {
                return Poll::Ready(());
            }
            if !matches!(self.poll_shutdown(cx), Poll::Ready(Ok(()))) {
                return Poll::Ready(());
            }
            loop {
                self.input.clear();
                if !matches!(ready!(self.poll_fill(cx)), Ok(1..)) {
                    return Poll::Ready(());
                }
            }
        })
        .await;
    }

    /// Returns whether the connection has no TLS, so that its bytes can pass through a [`Pipe`].
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Moves available bytes into an empty pipe; returns 0 at the end of the stream. The caller must forward
    /// the bytes in `input` first.
    #[inline]
    pub fn poll_fill_pipe(&mut self, cx: &mut Context<'_>, pipe: &mut Pipe) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.tcp.poll_read_ready(cx))?;
            match self.tcp.try_io(Interest::READABLE, || pipe.fill(&self.tcp)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                filled => {
                    let count = filled?;
                    self.received += count as u64;
                    return Poll::Ready(Ok(count));
                }
            }
        }
    }

    /// Writes all bytes of a pipe; returns ready when the kernel has accepted them. The caller must have
    /// written all of `output` before.
    #[inline]
    pub fn poll_drain_pipe(&mut self, cx: &mut Context<'_>, pipe: &mut Pipe) -> Poll<io::Result<()>> {
        while !pipe.is_empty() {
            ready!(self.tcp.poll_write_ready(cx))?;
            match self.tcp.try_io(Interest::WRITABLE, || pipe.drain(&self.tcp)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                drained => self.sent += drained? as u64,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Returns whether the peer has neither closed nor sent anything. Makes a system call only if the readiness of the
    /// socket says that it may have.
    #[inline]
    pub fn is_quiet(&mut self) -> bool {
        if !self.input.is_empty() {
            return false;
        }
        // In nearly all calls the readiness shows that nothing has arrived. Otherwise it may be out of date,
        // so a read decides.
        let silent = self.tcp.try_io(Interest::READABLE, || Ok(()));
        let held = self.tls.as_ref().is_some_and(|session| session.holds_input());
        if !held && matches!(silent, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            return true;
        }
        let quiet = self.poll_fill(&mut Context::from_waker(Waker::noop())).is_pending();
        self.rest();
        quiet
    }

    /// As [`Self::is_quiet`], and asks the kernel whether bytes have arrived.
    #[inline]
    pub fn is_quiet_now(&mut self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        let peeked = SockRef::from(&self.tcp).peek(&mut byte);
        matches!(peeked, Err(error) if error.kind() == io::ErrorKind::WouldBlock) && self.is_quiet()
    }

    /// Returns whether the peer has ended its side, even if earlier input is unread. Asks the kernel.
    #[inline]
    pub fn has_ended(&self) -> bool {
        let mut sockets = [PollFd::new(&self.tcp, PollFlags::RDHUP)];
        poll(&mut sockets, Some(&Timespec::default())).is_ok_and(|ended| ended > 0)
    }

    /// Releases memory before a period without traffic.
    #[inline]
    pub fn rest(&mut self) {
        if let Some(session) = &mut self.tls {
            session.rest();
        }
    }
}
