//! A key with its certificates, which can be replaced while it is in use.
//!
//! TLS configurations hold [`Live`] handles and read them in every handshake. A renewed certificate or a new
//! root therefore takes effect with the next connection, without a new configuration and without closing
//! connections.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use arc_swap::ArcSwapOption;
use rustls::{
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use x509_parser::{
    asn1_rs::{Any, FromDer as _, Tag},
    certificate::Validity,
    time::ASN1Time,
};

use crate::{Error, peer::Peer, renewal::Renewal};

/// A value that is replaced as a whole while others use it; empty until it is first set.
#[derive(Debug)]
pub struct Live<T>(ArcSwapOption<T>);

impl<T> Live<T> {
    /// Returns an empty handle; handshakes that need its value fail until it is set.
    pub fn empty() -> Arc<Self> {
        Arc::new(Self(ArcSwapOption::empty()))
    }

    /// Returns a handle with a value.
    pub fn new(value: T) -> Arc<Self> {
        Arc::new(Self(ArcSwapOption::from_pointee(value)))
    }

    /// Returns the current value.
    pub fn get(&self) -> Option<Arc<T>> {
        self.0.load_full()
    }

    /// Replaces the value.
    pub fn set(&self, value: Arc<T>) {
        self.0.store(Some(value));
    }
}

/// A private key and its certificate chain.
#[derive(Debug)]
pub struct Identity {
    pub(crate) certified: Arc<CertifiedKey>,
    /// Names of the certificate.
    pub peer: Peer,
    /// Start of validity.
    pub not_before: SystemTime,
    /// End of validity.
    pub not_after: SystemTime,
    /// Time when this process obtained the certificate.
    obtained: SystemTime,
}

impl Identity {
    /// Returns the time of renewal, with a random component in each call.
    pub fn renewal(&self) -> Renewal {
        Renewal::plan(self.not_before, self.not_after, self.obtained, fastrand::f64())
    }

    /// Parses a chain (leaf first) and its key, both PEM.
    ///
    /// # Errors
    /// One of them cannot be parsed, or the key does not match the leaf.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, Error> {
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|error| Error::Pem { what: "private key", reason: error.to_string() })?;
        Self::new(certificates(chain, "certificate chain")?, key)
    }

    /// Creates an identity from DER.
    ///
    /// # Errors
    /// One of them cannot be parsed, or the key does not match the leaf.
    pub fn new(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<Self, Error> {
        let leaf =
            chain.first().ok_or(Error::Pem { what: "certificate chain", reason: "it is empty".into() })?;
        let (peer, not_before, not_after) = describe(leaf)?;
        let certified = CertifiedKey::from_der(chain, key, &aws_lc_rs::default_provider())
            .map_err(|error| Error::Key(error.to_string()))?;
        let obtained = SystemTime::now();
        Ok(Self { certified: Arc::new(certified), peer, not_before, not_after, obtained })
    }

    /// Returns the certificates, leaf first.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.certified.cert
    }
}

/// Parses the certificates of a PEM text.
///
/// # Errors
/// There is none, or the text is invalid.
pub fn certificates(pem: &[u8], what: &'static str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| Error::Pem { what, reason: error.to_string() })?;
    if certificates.is_empty() {
        return Err(Error::Pem { what, reason: "it holds no certificate in PEM form".into() });
    }
    Ok(certificates)
}

/// Returns the names and the validity of a certificate.
pub(crate) fn describe(leaf: &CertificateDer<'_>) -> Result<(Peer, SystemTime, SystemTime), Error> {
    let (_, parsed) = x509_parser::parse_x509_certificate(leaf)
        .map_err(|error| Error::Certificate(format!("it cannot be parsed: {error}")))?;
    let validity = parsed.validity();
    Ok((Peer::of(&parsed), time(validity.not_before), time(validity.not_after)))
}

/// Returns the end of a certificate's validity. Parses only the fields up to it, because parsing the whole
/// certificate would noticeably slow down a resumed handshake.
///
/// # Errors
/// The certificate cannot be parsed.
pub fn not_after(certificate: &CertificateDer<'_>) -> Result<SystemTime, Error> {
    let validity = || {
        let (_, certificate) = Any::from_der(certificate).ok()?;
        let (_, signed) = Any::from_der(certificate.data).ok()?;
        // RFC 5280, section 4.1: optional version, serial number, signature algorithm, issuer.
        let (rest, first) = Any::from_der(signed.data).ok()?;
        let rest = if first.tag() == Tag::Integer { signed.data } else { rest };
        let (rest, _serial) = Any::from_der(rest).ok()?;
        let (rest, _algorithm) = Any::from_der(rest).ok()?;
        let (rest, _issuer) = Any::from_der(rest).ok()?;
        Some(Validity::from_der(rest).ok()?.1)
    };
    let validity = validity().ok_or_else(|| Error::Certificate("it cannot be parsed".into()))?;
    Ok(time(validity.not_after))
}

pub(crate) fn time(time: ASN1Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or(0))
}
