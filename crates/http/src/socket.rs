//! Connections: TCP, with or without TLS, and their buffers.
//!
//! Reads follow tokio's readiness, which a short read clears: a message costs one `read`, and never one more
//! that finds nothing.

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

/// How long a peer's end is waited for after our own.
const LINGER: Duration = Duration::from_secs(1);

/// A connection with what was read from it and what is to be written to it.
pub struct Stream {
    tcp: TcpStream,
    tls: Option<Box<TlsSession>>,
    /// Read and not yet used.
    pub input: Buffer,
    /// To be written.
    pub output: Buffer,
    /// Bytes of content read so far (TLS taken off).
    pub received: u64,
    /// Bytes of content written so far (before TLS).
    pub sent: u64,
}

impl Stream {
    /// A plain connection.
    #[inline]
    pub fn new(tcp: TcpStream) -> Self {
        Self { tcp, tls: None, input: Buffer::default(), output: Buffer::default(), received: 0, sent: 0 }
    }

    /// The address here.
    #[inline]
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.tcp.local_addr().ok()
    }

    /// The address of the other end.
    #[inline]
    pub fn remote_address(&self) -> Option<SocketAddr> {
        self.tcp.peer_addr().ok()
    }

    /// The protocol that TLS agreed on.
    #[inline]
    pub fn alpn(&self) -> Option<&[u8]> {
        self.agreed()?.alpn_protocol()
    }

    /// Returns what the TLS handshake agreed on, if the connection has TLS.
    #[inline]
    pub fn agreed(&self) -> Option<&CommonState> {
        self.tls.as_ref().map(|session| session.agreed())
    }

    /// Ends TLS of a client here, which offers these protocols as far as is known; true when a session is resumed.
    /// What was read already is part of the handshake.
    pub async fn accept_tls(&mut self, acceptor: &Acceptor, offered: &[Box<[u8]>]) -> io::Result<bool> {
        let session = acceptor.accept(offered).map_err(io::Error::other)?;
        self.handshake(TlsConnection::Server(session)).await
    }

    /// Begins TLS with a server at an address; true when a session is resumed.
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

    /// Ready when there may be something to read.
    #[inline]
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.tls.as_ref().is_some_and(|session| session.holds_input()) {
            return Poll::Ready(());
        }
        self.tcp.poll_read_ready(cx).map(drop)
    }

    /// Reads what is there into `input`; 0 is the peer's end. `input` must not be full.
    #[inline]
    pub fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let count = match &mut self.tls {
            None => ready!(self.input.poll_fill(&self.tcp, cx))?,
            Some(session) => ready!(session.poll_read(&self.tcp, cx, &mut self.input))?,
        };
        self.received += count as u64;
        Poll::Ready(Ok(count))
    }

    /// Writes all of `output`; ready when the kernel has it.
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

    /// Tells the peer that nothing more comes. Everything must have been written before.
    #[inline]
    pub fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(session) = &mut self.tls {
            ready!(session.poll_close(&self.tcp, cx))?;
        }
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }

    /// Ends the connection in good order: everything is written, then the peer's end is waited for, for a moment,
    /// because a close with bytes unread would destroy what the peer has not read yet.
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

    /// Whether its bytes are the socket's, so that they may pass through a [`Pipe`].
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Fills an empty pipe with what is there; 0 is the peer's end. What is in `input` came before.
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

    /// Writes all that is in a pipe; ready when the kernel has it. What is in `output` must have gone before.
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

    /// Whether the peer neither closed nor sent anything, as far as is known without asking the kernel.
    #[inline]
    pub fn is_quiet(&mut self) -> bool {
        if !self.input.is_empty() {
            return false;
        }
        // Nearly always there is no more to ask. If there is, readiness may be out of date.
        let silent = self.tcp.try_io(Interest::READABLE, || Ok(()));
        let held = self.tls.as_ref().is_some_and(|session| session.holds_input());
        if !held && matches!(silent, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            return true;
        }
        let quiet = self.poll_fill(&mut Context::from_waker(Waker::noop())).is_pending();
        self.rest();
        quiet
    }

    /// The same, and asks the kernel for what has arrived this moment.
    #[inline]
    pub fn is_quiet_now(&mut self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        let peeked = SockRef::from(&self.tcp).peek(&mut byte);
        matches!(peeked, Err(error) if error.kind() == io::ErrorKind::WouldBlock) && self.is_quiet()
    }

    /// Whether the peer has ended its side, though what it sent before may be unread; asks the kernel.
    #[inline]
    pub fn has_ended(&self) -> bool {
        let mut sockets = [PollFd::new(&self.tcp, PollFlags::RDHUP)];
        poll(&mut sockets, Some(&Timespec::default())).is_ok_and(|ended| ended > 0)
    }

    /// Gives back the memory that little needs, for a while without traffic.
    #[inline]
    pub fn rest(&mut self) {
        if let Some(session) = &mut self.tls {
            session.rest();
        }
    }
}
