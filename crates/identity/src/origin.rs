//! Certificate extension that records the token behind a workload certificate.
//!
//! A workload may renew a certificate by presenting it, without a token. The authority stores the time of the
//! last token and its pod in an extension, and each renewal by certificate copies it. So any replica of the
//! control plane, even after a restart, can bound a chain of renewals and end it with the pod. The authority's
//! signature protects the extension. Other verifiers ignore it, because it is not critical (RFC 5280, section
//! 4.2).
//!
//! ```text
//! Origin ::= SEQUENCE { tokenAt INTEGER (seconds since 1970), podName UTF8String, podUid UTF8String }
//! ```

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::CustomExtension;
use rustls::pki_types::CertificateDer;
use x509_parser::asn1_rs::{FromDer as _, Oid, Sequence, ToDer as _, Utf8String};

use crate::{Error, token::BoundPod};

/// Object identifier of the extension: a random number under the arc for UUIDs (ITU-T X.667).
const OID: [u64; 3] = [2, 25, 6_934_155_180_264_497_213];

/// The token behind a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Time when the workload last authenticated with a token, to the second.
    pub token_at: SystemTime,
    /// Pod to which the token is bound, if any.
    pub pod: Option<BoundPod>,
}

impl Origin {
    pub(crate) fn extension(&self) -> Result<CustomExtension, Error> {
        let seconds = self.token_at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (name, uid) = self.pod.as_ref().map_or(("", ""), |pod| (&*pod.name, &*pod.uid));
        let encoded = || {
            let parts = [
                seconds.to_der_vec()?,
                Utf8String::new(name).to_der_vec()?,
                Utf8String::new(uid).to_der_vec()?,
            ];
            Sequence::new(parts.concat().into()).to_der_vec()
        };
        let encoded = encoded().map_err(|error| Error::Certificate(format!("its origin: {error}")))?;
        Ok(CustomExtension::from_oid_content(&OID, encoded))
    }

    /// Returns the origin in a certificate; `None` without the extension, as in certificates of other
    /// authorities.
    ///
    /// # Errors
    /// The certificate or the extension cannot be parsed.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Option<Self>, Error> {
        let malformed = |what: &str| Error::Certificate(format!("{what} cannot be parsed"));
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|_| malformed("it"))?;
        let oid = Oid::from(&OID).map_err(|_| malformed("its origin"))?;
        let extension = parsed.get_extension_unique(&oid).map_err(|_| malformed("its origin"))?;
        extension
            .map(|extension| Self::read(extension.value).ok_or_else(|| malformed("its origin")))
            .transpose()
    }

    fn read(der: &[u8]) -> Option<Self> {
        let (rest, sequence) = Sequence::from_der(der).ok()?;
        let (after_time, seconds) = u64::from_der(&sequence.content).ok()?;
        let (after_name, name) = Utf8String::from_der(after_time).ok()?;
        let (end, uid) = Utf8String::from_der(after_name).ok()?;
        let pod = BoundPod { name: name.string(), uid: uid.string() };
        let whole = rest.is_empty() && end.is_empty();
        let token_at = UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?;
        whole.then_some(Self { token_at, pod: (!pod.name.is_empty()).then_some(pod) })
    }
}

#[cfg(test)]
mod tests {
    use skysail_core::SpiffeId;

    use super::*;
    use crate::{Authority, Csr, KeyAndCsr, Live, PeerCheck, check::Role};

    #[test]
    fn certificates_contain_their_origin() {
        let authority = Authority::ephemeral().unwrap();
        let id = SpiffeId::new("cluster.local", "default", "reviews");
        let request = KeyAndCsr::generate(None).unwrap();
        let csr = Csr::from_pem(&request.csr_pem).unwrap();
        let issued = |origin: Option<&Origin>| {
            let signed = authority.issue(&csr, &id, Duration::from_secs(60), origin).unwrap();
            let identity = request.finish(signed.pem().as_bytes()).unwrap();
            // Verifiers of the mesh accept the certificate.
            let check = PeerCheck::new(Live::new(authority.roots().unwrap()));
            check.verify(identity.chain(), Role::Client, SystemTime::now()).unwrap();
            Origin::of(&identity.chain()[0]).unwrap()
        };
        let token_at = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let pod = BoundPod { name: "reviews-1".into(), uid: "5c1b0ad9-77a1-4b0e-9d2e-0a1b2c3d4e5f".into() };
        for origin in [Origin { token_at, pod: None }, Origin { token_at, pod: Some(pod) }] {
            assert_eq!(issued(Some(&origin)), Some(origin));
        }
        assert_eq!(issued(None), None);
    }

    #[test]
    fn an_invalid_extension_is_an_error_and_a_missing_one_none() {
        let origin =
            Origin { token_at: UNIX_EPOCH, pod: Some(BoundPod { name: "a".into(), uid: String::new() }) };
        let der = origin.extension().unwrap().content().to_vec();
        assert_eq!(Origin::read(&der), Some(origin));
        for end in 0..der.len() {
            assert_eq!(Origin::read(&der[..end]), None, "{end} bytes");
        }
        assert_eq!(Origin::read(&[&der[..], &[0]].concat()), None);
    }
}
