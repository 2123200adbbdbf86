//! TLS on a connection: encrypted bytes on the side of the socket, content on the other.
//!
//! rustls is driven without buffers of its own: it decrypts where the bytes were read to, and encrypts into the block
//! that is written from. So bytes are read and written in large pieces, what was read while the protocol was being
//! found out goes into the session without a rewinding stream, and an idle session holds no buffer.

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

/// What records and messages of the session's own add to a large block of content at most.
const OVERHEAD: usize = 256;
/// With more than this still unwritten, nothing more is encrypted.
const UNWRITTEN: usize = 4 * 1024;

/// A TLS session.
pub struct TlsSession {
    rustls: TlsConnection,
    /// Encrypted bytes read and not yet used.
    raw: Buffer,
    /// How many of them rustls has looked at, and waits for more to come after them.
    seen: usize,
    /// Encrypted bytes to be written.
    sealed: Buffer,
    /// The peer has announced its end.
    closed: bool,
    /// Nothing more can be read: the socket has ended, or the peer does not speak TLS as it should.
    ended: bool,
    /// Our own end has been announced.
    closing: bool,
}

/// Which side of the session is ours.
pub enum TlsConnection {
    /// Of a connection that this end began.
    Client(UnbufferedClientConnection),
    /// Of a connection that this end accepted.
    Server(UnbufferedServerConnection),
}

/// What is to be sent as soon as the session can.
enum Send<'a> {
    Nothing,
    Content(&'a mut Buffer),
    End,
}

/// How far rustls has got.
enum Step {
    /// It goes on from here.
    Further,
    /// Content has been moved.
    Content,
    /// The peer has announced its end.
    Closed,
    /// It needs more bytes. What was to be sent is encrypted.
    Idle,
}

impl TlsSession {
    /// A session that is to begin. `raw` has been read already.
    #[inline]
    pub fn new(rustls: TlsConnection, raw: Buffer) -> Self {
        let sealed = Buffer::default();
        Self { rustls, raw, seen: 0, sealed, closed: false, ended: false, closing: false }
    }

    /// What was agreed on, and with whom.
    #[inline]
    pub fn agreed(&self) -> &CommonState {
        match &self.rustls {
            TlsConnection::Client(client) => client,
            TlsConnection::Server(server) => server,
        }
    }

    /// Shakes hands. Content that came along is in `input` then.
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
                // The client's last message and the server's ticket can go with the first data.
                return Poll::Ready(Ok(()));
            } else {
                return self.sealed.poll_drain(tcp, cx);
            }
        }
    }

    /// Reads content into `input`; 0 is the peer's end.
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
                // An alert or an answer to one, or what a handshake left. If the peer does not take it, reading may tell why.
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
                // Somebody may have cut off what was to come.
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the peer has ended the connection without announcing it (TLS close_notify)",
                )));
            }
            ready!(self.poll_more(tcp, cx))?;
        }
    }

    /// Writes all of `output`; ready when the kernel has it.
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

    /// Announces our end.
    #[inline]
    pub fn poll_close(&mut self, tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.closing {
            self.closing = true;
            self.send(Send::End)?;
        }
        self.sealed.poll_drain(tcp, cx)
    }

    /// Whether there is something to be read, be it the end, although the socket has nothing.
    #[inline]
    pub fn holds_input(&self) -> bool {
        !self.raw.is_empty() || self.closed || self.ended
    }

    /// Gives back memory, for a while without traffic.
    #[inline]
    pub fn rest(&mut self) {
        self.raw.pack();
        self.sealed.pack();
    }

    fn poll_more(&mut self, tcp: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.raw.is_full() {
            // A record of the largest size is larger than a block, and messages of the handshake may be larger still.
            let size = match self.raw.len() {
                ..BLOCK => BLOCK,
                BLOCK..LARGE => LARGE,
                _ => {
                    return Poll::Ready(Err(io::Error::other(
                        "a message of the TLS handshake is larger than 64 KiB",
                    )));
                }
            };
            self.raw.grow(size);
        }
        self.ended |= ready!(self.raw.poll_fill(tcp, cx))? == 0;
        Poll::Ready(Ok(()))
    }

    /// Decrypts what is there, but no more than `input` has room for, or one record.
    fn open(&mut self, input: &mut Buffer) -> io::Result<()> {
        // A client has the first word, before anything has come.
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
                    // What comes after it does not count.
                    self.raw.clear();
                    self.closed = true;
                }
                Ok(Step::Idle) => {
                    self.seen = self.raw.len();
                    return Ok(());
                }
                Err(error) => {
                    self.ended = true;
                    // The alert that says what is wrong.
                    while self.agreed().wants_write()
                        && self.step(self.raw.len(), input, &mut Send::Nothing).is_ok()
                    {}
                    self.raw.clear();
                    return Err(error);
                }
            }
        }
    }

    /// Whether the next record is there, and its content fits into `input`.
    fn fits(&self, input: &Buffer) -> bool {
        let raw = self.raw.bytes();
        let Some([_, _, _, high, low]) = raw.first_chunk() else { return false };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        raw.len() >= 5 + length && length <= input.room()
    }

    /// Encrypts. What has been read and not looked at stays as it is.
    fn send(&mut self, mut what: Send<'_>) -> io::Result<()> {
        let mut nothing = Buffer::default();
        while !matches!(self.step(self.seen, &mut nothing, &mut what)?, Step::Idle) {}
        Ok(())
    }

    /// Lets rustls go on with so many of the raw bytes.
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

/// Does what rustls asks for. Also returns how many of the raw bytes are used up.
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
        // Nobody asks for early data.
        Ok(_) => Err(io::Error::other("the TLS session is in a state that is not known here")),
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
            // As much as a large block takes, in records of the largest size.
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
