//! Certificates: authority, signing requests, tokens, SPIFFE verification, TLS configurations.
//!
//! Modules from the bottom up: [`renewal`] (when to renew), [`peer`] (who a certificate names), [`identity`] (a
//! key and its certificates, trusted roots, both replaceable while in use), [`matcher`] (which names are accepted), [`tls`] (rustls
//! configurations), [`resumption`] (connections by them), [`authority`] (signs), [`request`] (asks for a signature), [`token`] (service account
//! tokens).

pub mod authority;
pub mod identity;
pub mod matcher;
pub mod peer;
pub mod renewal;
pub mod request;
pub mod resumption;
pub mod tls;
pub mod token;

pub use authority::Authority;
pub use identity::{Identity, Live, Roots};
pub use matcher::{NameMatch, Pattern, SanKind};
pub use peer::Peer;
pub use request::KeyAndCsr;
pub use resumption::{Acceptor, Connector};
pub use tls::{PeerCheck, TlsSpec};
pub use token::{Issuer, ServiceAccount, Verifier};

/// Why a key, certificate, token or configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A PEM text without what it must hold, or not PEM at all.
    #[error("{what}: {reason}")]
    Pem {
        /// What was read: "certificate chain", "private key".
        what: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// A certificate that cannot be parsed.
    #[error("certificate: {0}")]
    Certificate(String),
    /// A private key that is of no supported kind or does not belong to the certificate.
    #[error("private key: {0}")]
    Key(String),
    /// A signing request that is broken or signed by another key than its own.
    #[error("certificate signing request: {0}")]
    Request(String),
    /// A token that is not genuine, not for us, or no longer valid.
    #[error("token: {0}")]
    Token(String),
    /// A TLS configuration nobody could use.
    #[error("TLS configuration: {0}")]
    Tls(String),
    /// A file that cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: String,
        /// What the system says.
        error: std::io::Error,
    },
}
