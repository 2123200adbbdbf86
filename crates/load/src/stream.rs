//! The client's side of a connection: TCP or a Unix socket, in plain text or TLS.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use anyhow::Context as _;
use nix::errno::Errno;
use rustls::{ClientConfig, ClientConnection, HandshakeKind, StreamOwned, pki_types::ServerName};
use socket2::{SockAddr, Socket, Type};

/// TLS settings of a client.
#[derive(Clone, Debug)]
pub struct Tls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl Tls {
    /// Creates settings from a configuration and the name of the server, which is the SNI and is verified.
    pub fn new(config: Arc<ClientConfig>, server: ServerName<'static>) -> Self {
        Self { config, server }
    }

    /// Returns the configuration and the name of the server.
    pub(crate) fn parts(&self) -> (Arc<ClientConfig>, ServerName<'static>) {
        (Arc::clone(&self.config), self.server.clone())
    }

    /// Returns the first record that a client sends, with its ClientHello.
    ///
    /// # Errors
    /// The TLS configuration cannot be used.
    pub fn hello(&self) -> anyhow::Result<Vec<u8>> {
        let mut connection = ClientConnection::new(self.config.clone(), self.server.clone())?;
        let mut record = Vec::new();
        connection.write_tls(&mut record)?;
        Ok(record)
    }
}

/// A connection to the system under measurement.
#[derive(Debug)]
pub enum Stream {
    /// Plain text.
    Plain(TcpStream),
    /// TLS.
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    /// Opens a connection. Blocks until it is open, which on loopback is at once. The first reads and writes perform
    /// the TLS handshake.
    ///
    /// # Errors
    /// The connection cannot be opened.
    pub fn open(target: SocketAddr, tls: Option<&Tls>) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(target).with_context(|| format!("cannot connect to {target}"))?;
        stream.set_nodelay(true)?;
        Self::over(stream, tls)
    }

    /// Begins to open a connection without waiting for it. The socket is writable once it is open or has failed.
    ///
    /// # Errors
    /// The kernel refuses the socket. A refused connection is not an error here, but one of the first read or write.
    pub fn begin(address: &SockAddr, tls: Option<&Tls>) -> anyhow::Result<Self> {
        let socket = Socket::new(address.domain(), Type::STREAM.nonblocking(), None)?;
        if !address.is_unix() {
            socket.set_tcp_nodelay(true)?;
        }
        match socket.connect(address) {
            Err(error)
                if error.kind() != io::ErrorKind::ConnectionRefused
                    && error.raw_os_error() != Some(Errno::EINPROGRESS as i32) =>
            {
                Err(error).context("cannot open a connection")
            }
            _ => Self::over(socket.into(), tls),
        }
    }

    fn over(stream: TcpStream, tls: Option<&Tls>) -> anyhow::Result<Self> {
        let Some(tls) = tls else { return Ok(Self::Plain(stream)) };
        let connection = ClientConnection::new(Arc::clone(&tls.config), tls.server.clone())?;
        Ok(Self::Tls(Box::new(StreamOwned::new(connection, stream))))
    }

    /// Returns the socket.
    pub fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => &stream.sock,
        }
    }

    /// Returns true if a write that would block waits until the socket is writable. Otherwise it waits for data from
    /// the peer, in the TLS handshake.
    pub fn wants_write(&self) -> bool {
        match self {
            Self::Plain(_) => true,
            Self::Tls(stream) => stream.conn.wants_write(),
        }
    }

    /// Returns true if some of the written bytes have not been passed to the kernel yet.
    pub fn holds_output(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(stream) => stream.conn.wants_write(),
        }
    }

    /// Returns true if the session is resumed.
    pub fn resumed(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(stream) => stream.conn.handshake_kind() == Some(HandshakeKind::Resumed),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.read(buffer),
            Self::Tls(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.write(buffer),
            Self::Tls(stream) => stream.write(buffer),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}
