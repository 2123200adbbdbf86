//! Contents of a certificate for users and admin pages.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;

use crate::{Error, Peer};

/// Contents of a certificate.
#[derive(Clone, Debug)]
pub struct Description {
    /// Serial number, hexadecimal in lower case.
    pub serial: String,
    /// Names of the certificate.
    pub peer: Peer,
    /// Start of validity.
    pub not_before: SystemTime,
    /// End of validity.
    pub not_after: SystemTime,
}

impl Description {
    /// Describes a certificate.
    ///
    /// # Errors
    /// It cannot be parsed.
    pub fn from_der(certificate: &CertificateDer<'_>) -> Result<Self, Error> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
            .map_err(|error| Error::Certificate(format!("it cannot be parsed: {error}")))?;
        let time = |seconds: i64| {
            SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
        };
        let validity = parsed.validity();
        Ok(Self {
            serial: parsed.raw_serial().iter().map(|byte| format!("{byte:02x}")).collect(),
            peer: Peer::of(&parsed),
            not_before: time(validity.not_before.timestamp()),
            not_after: time(validity.not_after.timestamp()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, KeyAndCsr};

    #[test]
    fn a_certificate_is_described() {
        let authority = Authority::ephemeral().unwrap();
        let request = KeyAndCsr::generate(None).unwrap();
        let id = skysail_core::SpiffeId::new("cluster.local", "default", "a");
        let signed = authority.sign(&request.csr_pem, &id, Duration::from_secs(3600)).unwrap();
        let identity = request.finish(signed.pem().as_bytes()).unwrap();
        let described = Description::from_der(&identity.chain()[0]).unwrap();
        assert_eq!(described.peer.uris, [id.to_string()]);
        assert_eq!((described.not_before, described.not_after), (identity.not_before, identity.not_after));
        assert!(
            described.serial.len() == 32 && described.serial.bytes().all(|byte| byte.is_ascii_hexdigit())
        );
        assert!(Description::from_der(&CertificateDer::from(vec![0])).is_err());
    }
}
