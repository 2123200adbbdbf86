//! The client's side of a connection, plain text or mutual TLS.
//!
//! TLS is as in a mesh, and the same for every peer: 1.3, AES-128-GCM, X25519, ECDSA P-256, and a client certificate.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use anyhow::Context as _;
use nix::errno::Errno;
use rustls::{
    ClientConfig, ClientConnection, HandshakeKind, RootCertStore, StreamOwned,
    client::Resumption,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::certificates::Certificates;

/// TLS settings of a client.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl Tls {
    /// Creates the settings of a client with these certificates and this protocol. With `resume`, later connections
    /// offer the tickets of the server.
    pub(crate) fn new(certificates: &Certificates, protocol: &[u8], resume: bool) -> anyhow::Result<Self> {
        /// Number of stored tickets: more than the concurrent connections of any load.
        const TICKETS: usize = 4_096;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&certificates.root)?)?;
        let own = &certificates.client;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(&own.certificate)?.collect();
        let provider = CryptoProvider {
            cipher_suites: vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256],
            kx_groups: vec![aws_lc_rs::kx_group::X25519],
            ..aws_lc_rs::default_provider()
        };
        let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain?, PrivateKeyDer::from_pem_file(&own.key)?)?;
        config.alpn_protocols = vec![protocol.to_vec()];
        config.resumption =
            if resume { Resumption::in_memory_sessions(TICKETS) } else { Resumption::disabled() };
        let server = ServerName::try_from(certificates.server.dns.clone())?;
        Ok(Self { config: Arc::new(config), server })
    }

    /// Returns the first record of a connection.
    pub(crate) fn hello(&self) -> anyhow::Result<Vec<u8>> {
        let mut connection = ClientConnection::new(self.config.clone(), self.server.clone())?;
        let mut record = Vec::new();
        connection.write_tls(&mut record)?;
        Ok(record)
    }
}

/// A connection to the system under measurement.
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<StreamOwned<ClientConnection, TcpStream>>),
}

impl Stream {
    /// Opens a connection. Blocks, which on loopback takes no longer than the call itself. The TLS handshake comes
    /// with the first reads and writes.
    pub(crate) fn open(target: SocketAddr, tls: Option<&Tls>) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(target).with_context(|| format!("cannot connect to {target}"))?;
        stream.set_nodelay(true)?;
        let Some(tls) = tls else { return Ok(Self::Plain(stream)) };
        let connection = ClientConnection::new(tls.config.clone(), tls.server.clone())?;
        Ok(Self::Tls(Box::new(StreamOwned::new(connection, stream))))
    }

    /// Begins to open a plain connection without waiting for it. Bytes can be written when it is open.
    pub(crate) fn begin(target: SocketAddr) -> anyhow::Result<Self> {
        let socket =
            Socket::new(Domain::for_address(target), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        socket.set_tcp_nodelay(true)?;
        match socket.connect(&target.into()) {
            // A refused connection shows when it is written to.
            Err(error)
                if error.kind() != io::ErrorKind::ConnectionRefused
                    && error.raw_os_error() != Some(Errno::EINPROGRESS as i32) =>
            {
                Err(error).with_context(|| format!("cannot connect to {target}"))
            }
            _ => Ok(Self::Plain(socket.into())),
        }
    }

    /// Returns the socket.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => &stream.sock,
        }
    }

    /// Returns true if bytes wait for the socket. Otherwise a call that would block waits for the other side.
    pub(crate) fn wants_write(&self) -> bool {
        match self {
            Self::Plain(_) => true,
            Self::Tls(stream) => stream.conn.wants_write(),
        }
    }

    /// Returns true if written bytes have not been passed to the kernel.
    pub(crate) fn holds_output(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(stream) => stream.conn.wants_write(),
        }
    }

    /// Returns true if the session is resumed.
    pub(crate) fn resumed(&self) -> bool {
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
