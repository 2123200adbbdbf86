//! A TLS session on a connection: ciphertext on the socket, plaintext for the caller.
//!
//! rustls runs without buffers of its own: it decrypts in the read buffer and encrypts into the write buffer. Reads
//! and writes are therefore large. Bytes that were read to detect the protocol go into the session without a rewinding
//! stream. An idle session holds no buffer.

use std::{
    io,
    task::{Context, Poll, ready},
};

use rustls::{
    CommonState, ProtocolVersion,
    client::UnbufferedClientConnection,
    server::UnbufferedServerConnection,
    unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus, WriteTraffic},
};
use tokio::net::TcpStream;

use crate::buffer::{BLOCK, Buffer, LARGE};

/// Maximum size in bytes that record framing and session messages add to a large block of content.
const OVERHEAD: usize = 256;
/// Threshold in bytes: with more ciphertext unwritten, nothing more is encrypted.
const UNWRITTEN: usize = 4 * 1024;

/// A TLS session.
pub struct TlsSession {
    rustls: TlsConnection,
    /// Ciphertext that was read and not yet consumed.
    raw: Buffer,
    /// Number of its bytes that rustls has processed and that need more bytes after them.
    seen: usize,
    /// Ciphertext to write.
    sealed: Buffer,
    /// The peer has sent `close_notify`.
    closed: bool,
    /// Nothing more can be read: the stream has ended, or the peer violated the protocol.
    ended: bool,
    /// `close_notify` has been sent.
    closing: bool,
}

/// Side of a session.
pub enum TlsConnection {
    /// The side that opened the connection.
    Client(UnbufferedClientConnection),
    /// The side that accepted the connection.
    Server(UnbufferedServerConnection),
}

/// Data to send when the session is ready.
enum Send<'a> {
    Nothing,
    Content(&'a mut Buffer),
    End,
}

/// Result of a step of rustls.
enum Step {
    /// Another step is possible.
    Further,
    /// Content was moved.
    Content,
    /// The peer has sent `close_notify`.
    Closed,
    /// More bytes are needed. The data to send are encrypted.
    Idle,
}

impl TlsSession {
    /// Returns a session before its handshake. `raw` was read already.
    #[inline]
    pub fn new(rustls: TlsConnection, raw: Buffer) -> Self {
        let sealed = Buffer::default();
        Self { rustls, raw, seen: 0, sealed, closed: false, ended: false, closing: false }
    }

    /// Returns the negotiated parameters and the peer's identity.
    #[inline]
    pub fn agreed(&self) -> &CommonState {
        match &self.rustls {
            TlsConnection::Client(client) => client,
            TlsConnection::Server(server) => server,
        }
    }

    /// Runs the handshake. Content that arrived with it is in `input` afterwards.
    pub fn poll_handshake(
        &mut self,
        tcp: &TcpStream,
        cx: &mut Context<'_>,
        input: &mut Buffer,
    ) -> Poll<io::Result<()>> {
        loop {
            if let Err(error) = self.open(input) {
                let _ = self.sealed.poll_drain(tcp, cx);
                return Poll::Ready(Err(error));
            }
            if self.agreed().is_handshaking() {
                ready!(self.sealed.poll_drain(tcp, cx))?;
                if self.ended {
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
                ready!(self.poll_more(tcp, cx))?;
            } else if self.agreed().protocol_version() == Some(ProtocolVersion::TLSv1_3) {
                // The client's last message and the server's ticket can be sent with the first data.
                return Poll::Ready(Ok(()));
            } else {
                return self.sealed.poll_drain(tcp, cx);
            }
        }
    }

    /// Reads content into `input`; returns 0 at the peer's `close_notify`.
    pub fn poll_read(
        &mut self,
        tcp: &TcpStream,
        cx: &mut Context<'_>,
        input: &mut Buffer,
    ) -> Poll<io::Result<usize>> {
        let before = input.len();
        loop {
            let unwritten = self.sealed.len();
            let opened = self.open(input);
            if self.sealed.len() > unwritten || matches!(self.rustls, TlsConnection::Client(_)) {
                // The ciphertext is an alert, a response to one, or the rest of a handshake. If it cannot be written,
                // reading may show the cause.
                let _ = self.sealed.poll_drain(tcp, cx);
            }
            opened?;
            if input.len() > before {
                return Poll::Ready(Ok(input.len() - before));
            }
            if self.closed {
                return Poll::Ready(Ok(0));
            }
            if self.ended {
                // An attacker may have truncated the stream.
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the peer closed the connection without a TLS close_notify",
                )));
            }
            ready!(self.poll_more(tcp, cx))?;
        }
    }

    /// Writes all of `output`; returns ready when the kernel has accepted it.
    pub fn poll_flush(
        &mut self,
        tcp: &TcpStream,
        cx: &mut Context<'_>,
        output: &mut Buffer,
    ) -> Poll<io::Result<()>> {
        loop {
            if !output.is_empty() && self.sealed.len() <= UNWRITTEN {
                self.send(Send::Content(output))?;
            }
            if self.sealed.is_empty() {
                return Poll::Ready(Ok(()));
            }
            ready!(self.sealed.poll_drain(tcp, cx))?;
        }
    }

    /// Sends `close_notify`.
    #[inline]
    pub fn poll_close(&mut self, tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.closing {
            self.closing = true;
            self.send(Send::End)?;
        }
        self.sealed.poll_drain(tcp, cx)
    }

    /// Returns whether input or its end can be read although the socket has nothing.
    #[inline]
    pub fn holds_input(&self) -> bool {
        !self.raw.is_empty() || self.closed || self.ended
    }

    /// Releases memory before a period without traffic.
    #[inline]
    pub fn rest(&mut self) {
        self.raw.pack();
        self.sealed.pack();
    }

    fn poll_more(&mut self, tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.raw.is_full() {
            // A record of maximum size exceeds a block, and handshake messages may be larger.
            let size = match self.raw.len() {
                ..BLOCK => BLOCK,
                BLOCK..LARGE => LARGE,
                _ => {
                    return Poll::Ready(Err(io::Error::other("a TLS handshake message exceeds 64 KiB")));
                }
            };
            self.raw.grow(size);
        }
        self.ended |= ready!(self.raw.poll_fill(tcp, cx))? == 0;
        Poll::Ready(Ok(()))
    }

    /// Decrypts available records, as long as `input` has space, but at least one.
    fn open(&mut self, input: &mut Buffer) -> io::Result<()> {
        // A client sends first, before it has received anything.
        let speaks = self.agreed().is_handshaking() && matches!(self.rustls, TlsConnection::Client(_));
        if self.closed || (self.seen == self.raw.len() && !speaks) {
            return Ok(());
        }
        loop {
            match self.step(self.raw.len(), input, &mut Send::Nothing) {
                Ok(Step::Further) => {}
                Ok(Step::Content) if self.fits(input) => {}
                Ok(Step::Content) => return Ok(()),
                Ok(Step::Closed) => {
                    // Bytes after `close_notify` are ignored.
                    self.raw.clear();
                    self.closed = true;
                }
                Ok(Step::Idle) => {
                    self.seen = self.raw.len();
                    return Ok(());
                }
                Err(error) => {
                    self.ended = true;
                    // Encodes the alert that reports the error.
                    while self.agreed().wants_write()
                        && self.step(self.raw.len(), input, &mut Send::Nothing).is_ok()
                    {}
                    self.raw.clear();
                    return Err(error);
                }
            }
        }
    }

    /// Returns whether the next record is complete and its content fits into `input`.
    fn fits(&self, input: &Buffer) -> bool {
        let raw = self.raw.bytes();
        let Some([_, _, _, high, low]) = raw.first_chunk() else { return false };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        raw.len() >= 5 + length && length <= input.room()
    }

    /// Encrypts data. Unprocessed input is not touched.
    fn send(&mut self, mut what: Send<'_>) -> io::Result<()> {
        let mut nothing = Buffer::default();
        while !matches!(self.step(self.seen, &mut nothing, &mut what)?, Step::Idle) {}
        Ok(())
    }

    /// Runs one step of rustls with this number of ciphertext bytes.
    fn step(&mut self, length: usize, input: &mut Buffer, what: &mut Send<'_>) -> io::Result<Step> {
        let raw = &mut self.raw.bytes_mut()[..length];
        let (used, step) = match &mut self.rustls {
            TlsConnection::Client(client) => {
                take(client.process_tls_records(raw), input, &mut self.sealed, what)
            }
            TlsConnection::Server(server) => {
                take(server.process_tls_records(raw), input, &mut self.sealed, what)
            }
        };
        self.raw.consume(used);
        self.seen = if matches!(step, Ok(Step::Content)) { 0 } else { self.seen.saturating_sub(used) };
        step
    }
}

/// Performs the action that rustls requests. Also returns the number of consumed ciphertext bytes.
fn take<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    input: &mut Buffer,
    sealed: &mut Buffer,
    what: &mut Send<'_>,
) -> (usize, io::Result<Step>) {
    let mut used = status.discard;
    let step = match status.state {
        Ok(ConnectionState::ReadTraffic(mut traffic)) => {
            let before = input.len();
            while let Some(record) = traffic.next_record() {
                match record {
                    Ok(record) => {
                        input.extend(record.payload);
                        used += record.discard;
                    }
                    Err(error) => return (used, Err(io::Error::new(io::ErrorKind::InvalidData, error))),
                }
            }
            Ok(if input.len() > before { Step::Content } else { Step::Further })
        }
        Ok(ConnectionState::EncodeTlsData(message)) => encode(message, sealed),
        Ok(ConnectionState::TransmitTlsData(transmit)) => {
            transmit.done();
            Ok(Step::Further)
        }
        Ok(ConnectionState::WriteTraffic(traffic)) => seal(traffic, sealed, what),
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Idle),
        Ok(ConnectionState::PeerClosed) => Ok(Step::Closed),
        Ok(ConnectionState::Closed) => match what {
            Send::Content(_) => Err(io::ErrorKind::BrokenPipe.into()),
            Send::Nothing | Send::End => Ok(Step::Idle),
        },
        // Early data is not enabled.
        Ok(_) => Err(io::Error::other("the TLS session is in an unexpected state")),
        Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
    };
    (used, step)
}

fn encode<Data>(mut message: EncodeTlsData<'_, Data>, sealed: &mut Buffer) -> io::Result<Step> {
    let size = match message.encode(&mut []) {
        Err(EncodeError::InsufficientSize(needed)) => needed.required_size,
        _ => 0,
    };
    let count = message.encode(sealed.space(size)).map_err(io::Error::other)?;
    sealed.filled(count);
    Ok(Step::Further)
}

fn seal<Data>(
    mut traffic: WriteTraffic<'_, Data>,
    sealed: &mut Buffer,
    what: &mut Send<'_>,
) -> io::Result<Step> {
    let count = match what {
        Send::Nothing => 0,
        Send::End => traffic.queue_close_notify(sealed.space(OVERHEAD)).map_err(io::Error::other)?,
        Send::Content(output) => {
            // Amount of content that fits into a large block, in records of maximum size.
            let plain = &output.bytes()[..output.len().min(LARGE - OVERHEAD - UNWRITTEN)];
            let count =
                traffic.encrypt(plain, sealed.space(plain.len() + OVERHEAD)).map_err(io::Error::other)?;
            output.consume(plain.len());
            count
        }
    };
    sealed.filled(count);
    Ok(Step::Idle)
}

#[cfg(test)]
mod tests;
