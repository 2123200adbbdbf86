//! Connections: TCP, with or without TLS, and their buffers.
//!
//! rustls is driven here directly rather than through a wrapper, for three reasons: bytes read while the
//! protocol was being found out go into the session without a rewinding stream, raw bytes are read in large
//! pieces (rustls by itself reads 4 KiB at a time), and an idle session holds no buffer.
//!
//! Reads follow tokio's readiness, which a short read clears: a message costs one `read`, and never one more
//! that finds nothing. The calls go to the kernel directly, as libc's are points where a thread may be cancelled.

use std::{
    future::poll_fn,
    io::{self, Read as _, Write as _},
    mem::MaybeUninit,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use skysail_identity::{Acceptor, Connector, resumption};
use socket2::SockRef;
use tokio::{
    io::{AsyncWrite, Interest},
    net::TcpStream,
    task::coop,
};

use crate::{buffer::Buffer, peer::Peer, splice::Pipe, timer::Timer};

/// How long a peer's end is waited for after our own.
const LINGER: Duration = Duration::from_secs(1);

/// A connection with what was read from it and what is to be written to it.
pub(crate) struct Stream {
    tcp: TcpStream,
    tls: Option<Box<Session>>,
    /// Read and not yet used.
    pub(crate) input: Buffer,
    /// To be written.
    pub(crate) output: Buffer,
    /// Bytes of content read so far (TLS taken off).
    pub(crate) received: u64,
    /// Bytes of content written so far (before TLS).
    pub(crate) sent: u64,
}

struct Session {
    rustls: rustls::Connection,
    /// Encrypted bytes that rustls has not taken yet.
    raw: Buffer,
    /// Decrypted bytes that wait in rustls.
    waiting: usize,
    /// The peer has closed, by an alert or without.
    ended: bool,
    /// Our own end has been announced.
    closing: bool,
}

impl Stream {
    /// A plain connection.
    pub(crate) fn new(tcp: TcpStream) -> Self {
        Self { tcp, tls: None, input: Buffer::default(), output: Buffer::default(), received: 0, sent: 0 }
    }

    /// The address here.
    pub(crate) fn local_address(&self) -> Option<SocketAddr> {
        self.tcp.local_addr().ok()
    }

    /// The protocol that TLS agreed on.
    pub(crate) fn alpn(&self) -> Option<&[u8]> {
        self.tls.as_ref().and_then(|session| session.rustls.alpn_protocol())
    }

    /// Who the other end is, by its certificate.
    /// `principal` is our own first URI name.
    pub(crate) fn peer(&self, principal: Option<Arc<str>>) -> Peer {
        let Some(session) = &self.tls else { return Peer::plain() };
        let certificate = session.rustls.peer_certificates().and_then(<[_]>::first);
        let names = certificate.and_then(|certificate| {
            let names = skysail_identity::Peer::from_der(certificate).ok()?;
            Some((certificate.as_ref(), names))
        });
        Peer::certified(names, principal)
    }

    /// Ends TLS of a client here, which offers these protocols as far as is known; true when a session is resumed.
    /// What was read already is part of the handshake.
    pub(crate) async fn accept_tls(
        &mut self,
        acceptor: &Acceptor,
        offered: &[Box<[u8]>],
    ) -> io::Result<bool> {
        let session = acceptor.accept(offered).map_err(io::Error::other)?;
        self.handshake(rustls::Connection::Server(session)).await
    }

    /// Begins TLS with a server at an address; true when a session is resumed.
    pub(crate) async fn connect_tls(
        &mut self,
        connector: &Connector,
        name: rustls::pki_types::ServerName<'static>,
        address: SocketAddr,
    ) -> io::Result<bool> {
        let session = connector.connect(name, address).map_err(io::Error::other)?;
        self.handshake(rustls::Connection::Client(session)).await
    }

    async fn handshake(&mut self, mut rustls: rustls::Connection) -> io::Result<bool> {
        rustls.set_buffer_limit(Some(64 * 1024));
        let raw = std::mem::take(&mut self.input);
        self.received = 0;
        self.tls = Some(Box::new(Session { rustls, raw, waiting: 0, ended: false, closing: false }));
        let Self { tcp, tls, .. } = self;
        let Some(session) = tls else { return Ok(false) };
        poll_fn(|cx| {
            loop {
                // What a server of TLS 1.3 has left to say is the session's ticket, which goes with the first data.
                let answers = matches!(session.rustls, rustls::Connection::Server(_))
                    && session.rustls.protocol_version() == Some(rustls::ProtocolVersion::TLSv1_3);
                if session.rustls.is_handshaking() || !answers {
                    ready!(session.poll_flush(tcp, cx))?;
                }
                if !session.rustls.is_handshaking() {
                    let resumed = resumption::is_resumed(&session.rustls);
                    return Poll::Ready(resumed.map_err(io::Error::other));
                }
                if session.ended {
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
                ready!(session.poll_more(tcp, cx))?;
            }
        })
        .await
    }

    /// Reads what is there into `input`; 0 is the peer's end. `input` must not be full.
    pub(crate) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let count = match &mut self.tls {
            None => ready!(poll_read(&self.tcp, cx, &mut self.input))?,
            Some(session) => ready!(session.poll_read(&mut self.tcp, cx, &mut self.input))?,
        };
        self.received += count as u64;
        Poll::Ready(Ok(count))
    }

    /// Writes all of `output`; ready when the kernel has it.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.tls {
            None => {
                while !self.output.is_empty() {
                    self.sent += ready!(poll_write(&self.tcp, cx, &mut self.output))? as u64;
                }
            }
            Some(session) => loop {
                ready!(session.poll_flush(&mut self.tcp, cx))?;
                if self.output.is_empty() {
                    break;
                }
                let count = session.rustls.writer().write(self.output.bytes())?;
                self.output.consume(count);
                self.sent += count as u64;
            },
        }
        Poll::Ready(Ok(()))
    }

    /// Tells the peer that nothing more comes. Everything must have been written before.
    pub(crate) fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(session) = &mut self.tls {
            if !session.closing {
                session.closing = true;
                session.rustls.send_close_notify();
            }
            ready!(session.poll_flush(&mut self.tcp, cx))?;
        }
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }

    /// Ends the connection in good order: everything is written, then the peer's end is waited for, for a moment,
    /// because a close with bytes unread would destroy what the peer has not read yet.
    pub(crate) async fn close(&mut self, timer: &mut Timer) {
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
    pub(crate) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Fills an empty pipe with what is there; 0 is the peer's end. What is in `input` came before.
    pub(crate) fn poll_fill_pipe(
        &mut self,
        cx: &mut Context<'_>,
        pipe: &mut Pipe,
    ) -> Poll<io::Result<usize>> {
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
    pub(crate) fn poll_drain_pipe(&mut self, cx: &mut Context<'_>, pipe: &mut Pipe) -> Poll<io::Result<()>> {
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
    pub(crate) fn is_quiet(&mut self) -> bool {
        if !self.input.is_empty() {
            return false;
        }
        // Nearly always there is no more to ask. If there is, readiness may be out of date.
        let silent = self.tcp.try_io(Interest::READABLE, || Ok(()));
        let held = self.tls.as_ref().is_some_and(|session| session.waiting > 0 || !session.raw.is_empty());
        if !held && matches!(silent, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
            return true;
        }
        let quiet = self.poll_fill(&mut Context::from_waker(Waker::noop())).is_pending();
        self.rest();
        quiet
    }

    /// The same, and asks the kernel for what has arrived this moment.
    pub(crate) fn is_quiet_now(&mut self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        let peeked = SockRef::from(&self.tcp).peek(&mut byte);
        matches!(peeked, Err(error) if error.kind() == io::ErrorKind::WouldBlock) && self.is_quiet()
    }

    /// Gives the memory of empty buffers back, for a while without traffic.
    pub(crate) fn rest(&mut self) {
        self.input.release();
        self.output.release();
        if let Some(session) = &mut self.tls {
            session.raw.release();
        }
    }
}

impl Session {
    fn poll_read(
        &mut self,
        tcp: &mut TcpStream,
        cx: &mut Context<'_>,
        input: &mut Buffer,
    ) -> Poll<io::Result<usize>> {
        while self.waiting == 0 {
            if self.ended {
                // Only a close_notify is an orderly end; without one `read` says so.
                return Poll::Ready(self.rustls.reader().read(&mut [0]));
            }
            ready!(self.poll_more(tcp, cx))?;
            if self.rustls.wants_write() {
                // An answer to a key update. If it cannot go now, it goes with the next data.
                let _ = self.poll_flush(tcp, cx);
            }
        }
        let count = self.rustls.reader().read(input.spare())?;
        input.filled(count);
        self.waiting -= count.min(self.waiting);
        Poll::Ready(Ok(count))
    }

    /// Gives rustls more encrypted bytes, from the socket if need be.
    fn poll_more(&mut self, tcp: &mut TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.raw.is_empty() {
            let count = ready!(poll_read(tcp, cx, &mut self.raw))?;
            if count == 0 {
                self.ended = true;
            }
        }
        let mut raw = self.raw.bytes();
        let count = self.rustls.read_tls(&mut raw)?;
        self.raw.consume(count);
        match self.rustls.process_new_packets() {
            Ok(state) => {
                self.waiting = state.plaintext_bytes_to_read();
                self.ended |= state.peer_has_closed();
                Poll::Ready(Ok(()))
            }
            Err(error) => {
                // The alert that says what is wrong; the error itself counts, not whether this goes out.
                let _ = self.poll_flush(tcp, cx);
                Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)))
            }
        }
    }

    fn poll_flush(&mut self, tcp: &mut TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.rustls.wants_write() {
            match self.rustls.write_tls(&mut Writer { tcp, cx }) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// A socket as rustls writes to it; not ready is `WouldBlock`.
struct Writer<'a, 'b> {
    tcp: &'a mut TcpStream,
    cx: &'a mut Context<'b>,
}

impl io::Write for Writer<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        settled(Pin::new(&mut *self.tcp).poll_write(self.cx, bytes))
    }

    fn write_vectored(&mut self, parts: &[io::IoSlice<'_>]) -> io::Result<usize> {
        settled(Pin::new(&mut *self.tcp).poll_write_vectored(self.cx, parts))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn settled<T>(poll: Poll<io::Result<T>>) -> io::Result<T> {
    match poll {
        Poll::Ready(result) => result,
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}

/// Writes what the kernel takes.
fn poll_write(tcp: &TcpStream, cx: &mut Context<'_>, buffer: &mut Buffer) -> Poll<io::Result<usize>> {
    loop {
        match tcp.try_io(Interest::WRITABLE, || Ok(send(tcp, buffer.bytes(), SendFlags::NOSIGNAL)?)) {
            Ok(count) => {
                buffer.consume(count);
                return Poll::Ready(Ok(count));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready!(tcp.poll_write_ready(cx))?,
            Err(error) => return Poll::Ready(Err(error)),
        }
    }
}

/// Reads what is there; 0 is the peer's end. As long as nothing is there the buffer needs no memory.
///
/// Who always has more to say than fits in a buffer must not keep others waiting: such reads use up the task's budget.
fn poll_read(tcp: &TcpStream, cx: &mut Context<'_>, buffer: &mut Buffer) -> Poll<io::Result<usize>> {
    if !coop::has_budget_remaining() {
        // Pending, and polled again after the others.
        let _ = ready!(coop::poll_proceed(cx));
    }
    loop {
        let mut count = None;
        let read = tcp.try_io(Interest::READABLE, || {
            let spare = buffer.spare();
            let (_, read) = recv(tcp, &mut *spare, RecvFlags::empty())?;
            count = Some(read);
            // Less than there was room for was all there is, which saves asking.
            if (1..spare.len()).contains(&read) { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
        });
        match (count, read) {
            (Some(count), read) => {
                buffer.filled(count);
                if read.is_ok()
                    && let Poll::Ready(spent) = coop::poll_proceed(cx)
                {
                    spent.made_progress();
                }
                return Poll::Ready(Ok(count));
            }
            (None, Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                return Poll::Ready(Err(error));
            }
            (None, _) => ready!(tcp.poll_read_ready(cx))?,
        }
    }
}
