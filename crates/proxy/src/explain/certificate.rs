//! Certificate of a client.

use skysail_identity::{Error, Peer, identity};

/// Names of a client's certificate.
#[derive(Clone, Debug)]
pub struct CallerCertificate(Peer);

impl CallerCertificate {
    /// Reads the first certificate of a PEM file.
    ///
    /// # Errors
    /// The file has no certificate, or one that cannot be parsed.
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let chain = identity::certificates(pem, "client certificate")?;
        chain.first().map_or_else(|| Ok(Peer::default()), Peer::from_der).map(Self)
    }

    /// Returns the certificate of a workload with this SPIFFE ID.
    pub fn of_workload(principal: &str) -> Self {
        Self(Peer { uris: vec![principal.to_owned()], ..Peer::default() })
    }

    /// Returns a certificate whose names are not known.
    pub fn unnamed() -> Self {
        Self(Peer::default())
    }

    /// Returns the first URI name, which is the principal of policies; `None` without one.
    pub fn principal(&self) -> Option<&str> {
        self.0.uris.first().map(String::as_str)
    }

    /// Returns the name for people: the principal, or else the first DNS name or the subject.
    pub fn name(&self) -> &str {
        let Peer { subject, dns, .. } = &self.0;
        self.principal().or(dns.first().map(String::as_str)).unwrap_or(subject)
    }

    pub(super) fn names(&self) -> &Peer {
        &self.0
    }
}
