//! Certificates: authority, signing requests, tokens, SPIFFE verification, TLS configurations.
//!
//! Modules from the bottom up:
//! * [`provider`] – cryptography provider
//! * [`renewal`] – time of renewal
//! * [`peer`] – names of a certificate
//! * [`description`] – contents of a certificate, for users
//! * [`identity`] – a key with its certificates, replaceable while in use
//! * [`roots`] – trusted roots by trust domain, and revocation lists
//! * [`matcher`] – accepted names
//! * [`check`] – verification of peers
//! * [`tls`] – rustls configurations
//! * [`resumption`] – TLS connections with session resumption
//! * [`request`] – creation of signing requests
//! * [`csr`] – validation of signing requests
//! * [`origin`] – record of the token with which the holder of a certificate last authenticated
//! * [`authority`] – signing
//! * [`cacerts`] – plugged-in authority
//! * [`rotation`] – self-signed authority with rotation of its root
//! * [`jwks`] and [`token`] – service account tokens and the keys that verify them
//! * [`token_signer`] – service account tokens for meshes without a cluster

pub mod authority;
pub mod cacerts;
pub mod check;
pub mod csr;
pub mod description;
pub mod identity;
pub mod jwks;
pub mod matcher;
pub mod origin;
pub mod peer;
pub mod provider;
pub mod renewal;
pub mod request;
pub mod resumption;
pub mod roots;
pub mod rotation;
pub mod tls;
pub mod token;
pub mod token_signer;

pub use authority::{Authority, Signed, sha256};
pub use check::{PeerCheck, Pin};
pub use csr::{Csr, Refusal};
pub use description::Description;
pub use identity::{Identity, Live, not_after};
pub use matcher::{NameMatch, Pattern, SanKind};
pub use origin::Origin;
pub use peer::Peer;
pub use request::KeyAndCsr;
pub use resumption::{Acceptor, Connector};
pub use roots::{Crls, Roots};
pub use tls::TlsSpec;
pub use token::{BoundPod, Issuer, ServiceAccount, Verifier};
pub use token_signer::{TOKEN_RENEWAL, TokenSigner};

/// Reason why a key, certificate, token or configuration is unusable.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid PEM, or PEM without the expected content.
    #[error("{what}: {reason}")]
    Pem {
        /// Name of the parsed text: "certificate chain", "private key".
        what: &'static str,
        /// Cause.
        reason: String,
    },
    /// Invalid certificate.
    #[error("certificate: {0}")]
    Certificate(String),
    /// Private key of an unsupported type, or one that does not match the certificate.
    #[error("private key: {0}")]
    Key(String),
    /// A signing request cannot be created.
    #[error("certificate signing request: {0}")]
    Request(String),
    /// A signing request was refused.
    #[error("certificate signing request: {0}")]
    Refused(#[from] Refusal),
    /// Invalid file of an authority.
    #[error("{file}: {problem}")]
    Authority {
        /// Name of the file.
        file: &'static str,
        /// Cause and remedy.
        problem: String,
    },
    /// Token that is forged, for another audience, or expired.
    #[error("token: {0}")]
    Token(String),
    /// Unusable TLS configuration.
    #[error("TLS configuration: {0}")]
    Tls(String),
    /// File that cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// Path of the file.
        path: String,
        /// Error of the system.
        error: std::io::Error,
    },
}
