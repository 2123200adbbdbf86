//! Certificate of a client, and the verdict of a server about it.

use std::time::SystemTime;

use rustls::{CertificateError, Error as TlsError, pki_types::CertificateDer};
use skysail_identity::{Error, Peer, PeerCheck, check::Role, identity};

use super::report::CertificateVerdict;

/// Certificate of a client: its names, and its chain if that is known.
#[derive(Clone, Debug)]
pub struct CallerCertificate {
    names: Peer,
    origin: CertificateOrigin,
}

/// Source of a client's certificate.
#[derive(Clone, Debug)]
enum CertificateOrigin {
    /// A file: the chain, the client's own certificate first.
    File(Vec<CertificateDer<'static>>),
    /// The mesh's authority, which issues it while the mesh runs.
    Mesh,
    /// Files or a Secret of a proxy that is a client. Its names are not known here.
    Proxy,
}

impl CallerCertificate {
    /// Reads the chain of a PEM file, the client's own certificate first.
    ///
    /// # Errors
    /// The file has no certificate, or one that cannot be parsed.
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let chain = identity::certificates(pem, "client certificate")?;
        let names = chain.first().map_or_else(|| Ok(Peer::default()), Peer::from_der)?;
        Ok(Self { names, origin: CertificateOrigin::File(chain) })
    }

    /// Returns the certificate of a workload with this SPIFFE ID.
    pub fn of_workload(principal: &str) -> Self {
        let names = Peer { uris: vec![principal.to_owned()], ..Peer::default() };
        Self { names, origin: CertificateOrigin::Mesh }
    }

    /// Returns a certificate whose names are not known.
    pub fn unnamed() -> Self {
        Self { names: Peer::default(), origin: CertificateOrigin::Proxy }
    }

    /// Returns the first URI name, which is the principal of policies; `None` without one.
    pub fn principal(&self) -> Option<&str> {
        self.names.uris.first().map(String::as_str)
    }

    /// Returns the name for people: the principal, or else the first DNS name or the subject.
    pub fn name(&self) -> &str {
        let Peer { subject, dns, .. } = &self.names;
        self.principal().or(dns.first().map(String::as_str)).unwrap_or(subject)
    }

    pub(super) fn names(&self) -> &Peer {
        &self.names
    }

    /// Verifies the certificate as the handshake of a server does. `secret` names the server's trusted roots.
    pub(super) fn verify(&self, check: &PeerCheck, secret: &str) -> CertificateVerdict {
        let assumed = || CertificateVerdict::Assumed(secret.to_owned());
        let verdict = match &self.origin {
            CertificateOrigin::File(chain) if check.is_ready() => {
                check.verify(chain, Role::Client, SystemTime::now()).map(|()| CertificateVerdict::Valid)
            }
            CertificateOrigin::File(_) => check.verify_names(&self.names).map(|()| assumed()),
            // Every proxy of the mesh trusts the authority that issues it.
            CertificateOrigin::Mesh if secret == MESH_ROOTS || secret == BUNDLES => {
                check.verify_names(&self.names).map(|()| CertificateVerdict::Valid)
            }
            CertificateOrigin::Mesh => check.verify_names(&self.names).map(|()| assumed()),
            CertificateOrigin::Proxy => Ok(assumed()),
        };
        verdict.unwrap_or_else(|error| CertificateVerdict::Refused(words(&error)))
    }
}

/// Secrets with the trusted roots of the mesh: those of its authority, and those of all trust domains.
const MESH_ROOTS: &str = "ROOTCA";
const BUNDLES: &str = "trust-bundles";

/// Returns the reason for a refusal.
fn words(error: &TlsError) -> String {
    let TlsError::InvalidCertificate(problem) = error else { return error.to_string() };
    let text = match problem {
        CertificateError::UnknownIssuer => {
            "no CA certificate that the server trusts has issued it, nor the certificates after it in the file"
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it has expired",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => "it is not valid yet",
        CertificateError::Revoked => "it is revoked",
        CertificateError::UnknownRevocationStatus => "no revocation list covers its issuer",
        CertificateError::ExpiredRevocationList | CertificateError::ExpiredRevocationListContext { .. } => {
            "the revocation list of its issuer has expired"
        }
        CertificateError::InvalidPurpose => "its extended key usage does not include clients",
        CertificateError::BadSignature => "its signature is wrong",
        CertificateError::Other(reason) => return reason.to_string(),
        other => return other.to_string(),
    };
    text.to_owned()
}
