//! Names of a certificate: its subject and its alternative names (RFC 5280, section 4.2.1.6).

use std::net::IpAddr;

use rustls::pki_types::CertificateDer;
use skysail_core::SpiffeId;
use x509_parser::{certificate::X509Certificate, extensions::GeneralName};

use crate::Error;

/// Names of a certificate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// Subject in the form `CN=name,O=organisation`; empty in mesh certificates.
    pub subject: String,
    /// URIs, including the SPIFFE ID.
    pub uris: Vec<String>,
    /// DNS names.
    pub dns: Vec<String>,
    /// IP addresses.
    pub ips: Vec<IpAddr>,
    /// Mail addresses.
    pub emails: Vec<String>,
    /// First URI that is a SPIFFE ID of a service account.
    pub spiffe: Option<SpiffeId>,
}

impl Peer {
    /// Returns the names of a certificate, such as the first of a connection's `peer_certificates()`.
    ///
    /// # Errors
    /// Fails if the certificate cannot be parsed.
    pub fn from_der(certificate: &CertificateDer<'_>) -> Result<Self, Error> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
            .map_err(|error| Error::Certificate(format!("it cannot be parsed: {error}")))?;
        Ok(Self::of(&parsed))
    }

    pub(crate) fn of(certificate: &X509Certificate<'_>) -> Self {
        let mut peer = Self { subject: certificate.subject().to_string(), ..Self::default() };
        let names = certificate.subject_alternative_name().ok().flatten();
        for name in names.iter().flat_map(|extension| &extension.value.general_names) {
            match name {
                GeneralName::URI(uri) => peer.uris.push((*uri).to_owned()),
                GeneralName::DNSName(name) => peer.dns.push((*name).to_owned()),
                GeneralName::RFC822Name(mail) => peer.emails.push((*mail).to_owned()),
                GeneralName::IPAddress(bytes) => peer.ips.extend(address(bytes)),
                _ => {}
            }
        }
        peer.spiffe = peer.uris.iter().find_map(|uri| uri.parse().ok());
        peer
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes)
        .map(IpAddr::from)
        .or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()
}
