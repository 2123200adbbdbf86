//! Certificates: authority, signing requests, tokens, SPIFFE verification, TLS configurations.
//!
//! Modules from the bottom up: [`renewal`] (when to renew), [`peer`] (who a certificate names), [`identity`] (a
//! key and its certificates, replaceable while in use), [`roots`] (whose signatures count, for which trust domain, and what they
//! revoked), [`matcher`] (which names are accepted), [`check`] (which peers are accepted), [`tls`] (rustls configurations), [`resumption`] (connections by them), [`request`] (asks for a signature), [`csr`] (judges such a
//! request), [`origin`] (which token a certificate goes back to), [`authority`] (signs it), [`cacerts`] (an authority that is plugged in), [`rotation`] (one that is made here and
//! replaces its root), [`jwks`] and [`token`] (service account tokens
//! and the keys that verify them).

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

pub use authority::{Authority, Signed};
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
    /// A signing request that cannot be made.
    #[error("certificate signing request: {0}")]
    Request(String),
    /// A signing request that is refused.
    #[error("certificate signing request: {0}")]
    Refused(#[from] Refusal),
    /// A file of an authority that is not what it should be.
    #[error("{file}: {problem}")]
    Authority {
        /// Its name.
        file: &'static str,
        /// What is wrong, and what to do.
        problem: String,
    },
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
