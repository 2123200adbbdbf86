//! A sidecar under measurement: its role, ports, protocol and load.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use crate::{
    access_log::Destination,
    certificates::{Certificates, Identity},
    token::Token,
};

/// Name of the server of external authorization in configurations and measurements.
pub(crate) const AUTHORIZER: &str = "authorizer";

/// Protocol on both sides of a sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Protocol {
    Http1,
    /// With prior knowledge.
    Http2,
    /// gRPC over HTTP/2 with prior knowledge.
    Grpc,
    /// Bytes that the sidecar does not parse, and the server does not answer.
    Tcp,
    /// Bytes that the sidecar does not parse, and the server echoes.
    Echo,
}

impl Protocol {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http1 => "http1",
            Self::Http2 => "http2",
            Self::Grpc => "grpc",
            Self::Tcp => "tcp",
            Self::Echo => "echo",
        }
    }

    /// Returns true for HTTP/2.
    pub(crate) fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc)
    }

    /// Returns true if sidecars do not parse the bytes.
    pub(crate) fn is_tcp(self) -> bool {
        matches!(self, Self::Tcp | Self::Echo)
    }
}

/// Side of the connection on which a sidecar is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// In front of the client: plain text in; out to the other sidecar.
    Client,
    /// At the edge of the mesh: plain text in from clients; out to the server's sidecar.
    Gateway,
    /// In front of the server: in from the client or its sidecar; plain text out.
    Server,
}

impl Role {
    /// Returns the name of the side, with which the names of files and processes begin.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Gateway => "gateway",
            Self::Server => "server",
        }
    }
}

/// Configuration of a sidecar beyond the usual one.
#[derive(Clone, Debug, Default)]
pub(crate) enum Extra {
    #[default]
    None,
    /// The route changes the path and the headers of each request.
    Rewrite,
    /// This number of access policies. The request meets the last one only.
    Policies(u16),
    /// This number of virtual hosts. The request meets one of them.
    Hosts(u16),
    /// Requests must carry this token.
    Token(Token),
    /// Without the filters that make metrics alone.
    NoTelemetry,
    /// Istio's standard metrics.
    Metrics,
    /// This number of access policies by the caller's address. The request meets the last one only.
    Addresses(u16),
    /// The client's sidecar adds this token, which the server's sidecar requires. This number of access policies by its
    /// subject, of which the request meets the last one only.
    TokenPolicies(Token, u16),
    /// A server decides on each request: [`Node::authorizer`].
    Authorizer,
}

/// Settings of a sidecar. Ports without an address are on 127.0.0.1.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    pub(crate) role: Role,
    pub(crate) listen: SocketAddr,
    pub(crate) upstream: SocketAddr,
    pub(crate) admin: u16,
    /// Mutual TLS to or from the other sidecar.
    pub(crate) mtls: bool,
    pub(crate) protocol: Protocol,
    pub(crate) workers: u32,
    /// Clients may resume their TLS sessions, where the peer has such a setting.
    pub(crate) resumption: bool,
    /// Clusters in the configuration; only the first one is used.
    pub(crate) clusters: u16,
    /// Configuration beyond the usual one.
    pub(crate) extra: &'a Extra,
    /// Connections that the sidecar must be able to hold.
    pub(crate) connections: usize,
    /// Port of the server of external authorization, if there is one.
    pub(crate) authorizer: Option<u16>,
    /// Destination of the access log, if there is one.
    pub(crate) access_log: Option<Destination>,
    pub(crate) certificates: &'a Certificates,
    pub(crate) folder: &'a Path,
}

impl Node<'_> {
    /// Returns the sidecar's own identity. A gateway has that of the client.
    pub(crate) fn own(&self) -> &Identity {
        match self.role {
            Role::Client | Role::Gateway => &self.certificates.client,
            Role::Server => &self.certificates.server,
        }
    }

    /// Returns the identity that the other sidecar must have.
    pub(crate) fn other(&self) -> &Identity {
        match self.role {
            Role::Client | Role::Gateway => &self.certificates.server,
            Role::Server => &self.certificates.client,
        }
    }

    /// Returns true if the sidecar accepts mutual TLS.
    pub(crate) fn tls_in(&self) -> bool {
        self.mtls && self.role == Role::Server
    }

    /// Returns true if the sidecar initiates mutual TLS.
    pub(crate) fn tls_out(&self) -> bool {
        self.mtls && self.role != Role::Server
    }

    /// Writes a file for the sidecar, and returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.folder.join(format!("{}-{name}", self.role.name()));
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }
}
