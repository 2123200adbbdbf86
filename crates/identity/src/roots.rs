//! Trusted roots, optionally bound to trust domains, and certificate revocation lists.
//!
//! Roots without domains are trusted for every name. Roots of domains form one SPIFFE bundle per trust domain.
//! The domain of the peer's SPIFFE ID selects the roots before the chain is verified. So no root is trusted for
//! an identity of another domain. Sources: SPIFFE X.509-SVID, section 5; Envoy's `SPIFFECertValidatorConfig`.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use rustls::{
    CertificateError, Error as TlsError, OtherError, RootCertStore,
    pki_types::{
        CertificateDer, CertificateRevocationListDer, SignatureVerificationAlgorithm, UnixTime,
        pem::PemObject,
    },
};
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, KeyUsage, OwnedCertRevocationList,
    RevocationCheckDepth, RevocationOptionsBuilder, UnknownStatusPolicy, VerifiedPath,
};
use x509_parser::certificate::X509Certificate;

use crate::{
    Error,
    identity::{certificates, time},
    peer::Peer,
};

/// Trusted CA certificates.
#[derive(Debug)]
pub struct Roots {
    certificates: Vec<CertificateDer<'static>>,
    anchors: Anchors,
}

#[derive(Debug)]
enum Anchors {
    /// Trusted for every name.
    Any(Store),
    /// Trusted only for SPIFFE IDs of their trust domain.
    OfDomains(BTreeMap<Box<str>, Store>),
}

/// Trust anchors with their revocation lists.
#[derive(Debug)]
pub(crate) struct Store {
    anchors: RootCertStore,
    crls: Crls,
}

impl Roots {
    /// Parses one or more certificates, PEM. Revocation lists in the same text are used too.
    ///
    /// # Errors
    /// There is no certificate, or one cannot be parsed.
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let certificates = certificates(pem, "trusted certificates")?;
        let store = Store { crls: Crls::read(pem)?, ..Store::new(&certificates)? };
        Ok(Self { certificates, anchors: Anchors::Any(store) })
    }

    /// Creates roots from DER, without revocation lists.
    ///
    /// # Errors
    /// One cannot be parsed.
    pub fn new(certificates: impl IntoIterator<Item = CertificateDer<'static>>) -> Result<Self, Error> {
        let certificates: Vec<_> = certificates.into_iter().collect();
        let anchors = Anchors::Any(Store::new(&certificates)?);
        Ok(Self { certificates, anchors })
    }

    /// Parses the roots of each trust domain, PEM as in [`Self::from_pem`].
    ///
    /// # Errors
    /// A domain occurs twice, a text contains no certificate, or one cannot be parsed.
    pub fn of_domains<'a>(domains: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Result<Self, Error> {
        let (mut all, mut stores) = (Vec::new(), BTreeMap::new());
        for (domain, pem) in domains {
            let Self { certificates, anchors: Anchors::Any(store) } = Self::from_pem(pem)? else { continue };
            if stores.insert(domain.into(), store).is_some() {
                return Err(Error::Certificate(format!("the trust domain {domain:?} has two bundles")));
            }
            all.extend(certificates);
        }
        Ok(Self { certificates: all, anchors: Anchors::OfDomains(stores) })
    }

    /// Adds revocation lists.
    #[must_use]
    pub fn with_crls(mut self, crls: &Crls) -> Self {
        let add = |store: &mut Store| store.crls.0.extend(crls.0.iter().cloned());
        match &mut self.anchors {
            Anchors::Any(store) => add(store),
            Anchors::OfDomains(stores) => stores.values_mut().for_each(add),
        }
        self
    }

    /// Returns all certificates.
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.certificates
    }

    /// Returns whether everything that `before` accepted is still accepted: no root was removed, and no
    /// certificate was revoked.
    pub fn include(&self, before: &Self) -> bool {
        match (&self.anchors, &before.anchors) {
            (Anchors::Any(store), Anchors::Any(before)) => store.includes(before),
            (Anchors::OfDomains(stores), Anchors::OfDomains(before)) => {
                let includes =
                    |(domain, before)| stores.get(domain).is_some_and(|store| store.includes(before));
                before.iter().all(includes)
            }
            _ => false,
        }
    }

    /// Selects the trust anchors for a certificate.
    pub(crate) fn store_for(&self, leaf: &X509Certificate<'_>) -> Result<&Store, TlsError> {
        let stores = match &self.anchors {
            Anchors::Any(store) => return Ok(store),
            Anchors::OfDomains(stores) => stores,
        };
        let usage = leaf.key_usage().ok().flatten().map(|usage| usage.value);
        if usage.is_some_and(|usage| usage.key_cert_sign() || usage.crl_sign()) {
            return Err(other("the key of the peer's certificate may sign certificates or revocation lists"));
        }
        // With a second URI, the root of one domain would be trusted for a name of another (X.509-SVID, section
        // 2).
        let uris = Peer::of(leaf).uris;
        let [uri] = &uris[..] else {
            return Err(other(format_args!(
                "the peer's certificate has {} URIs, and must have one",
                uris.len()
            )));
        };
        let domain = uri.strip_prefix("spiffe://").and_then(|rest| rest.split_once('/'));
        let Some((domain, _)) = domain else {
            return Err(other(format_args!("the peer is {uri:?}, which is not a SPIFFE ID")));
        };
        let unknown = || {
            other(format_args!("the peer is {uri:?}, and no root vouches for the trust domain {domain:?}"))
        };
        stores.get(domain).ok_or_else(unknown)
    }

    /// Returns whether every root is bound to a trust domain.
    pub(crate) fn are_of_domains(&self) -> bool {
        matches!(self.anchors, Anchors::OfDomains(_))
    }

    /// Returns the earliest expiry of the revocation lists.
    pub(crate) fn next_update(&self) -> Option<SystemTime> {
        match &self.anchors {
            Anchors::Any(store) => store.crls.next_update(),
            Anchors::OfDomains(stores) => stores.values().filter_map(|store| store.crls.next_update()).min(),
        }
    }
}

impl Store {
    fn new(certificates: &[CertificateDer<'static>]) -> Result<Self, Error> {
        let mut anchors = RootCertStore::empty();
        for certificate in certificates {
            anchors.add(certificate.clone()).map_err(|error| Error::Certificate(error.to_string()))?;
        }
        Ok(Self { anchors, crls: Crls::default() })
    }

    fn includes(&self, before: &Self) -> bool {
        self.crls.0.is_empty() && before.anchors.roots.iter().all(|root| self.anchors.roots.contains(root))
    }
}

/// Certificate revocation lists (RFC 5280, section 5).
#[derive(Debug, Default)]
pub struct Crls(Vec<Arc<Crl>>);

#[derive(Debug)]
struct Crl {
    list: CertRevocationList<'static>,
    this_update: SystemTime,
    next_update: Option<SystemTime>,
}

impl Crls {
    /// Parses one or more lists, PEM.
    ///
    /// # Errors
    /// There is no list, or one cannot be parsed. Delta lists and version 1 are not supported.
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let crls = Self::read(pem)?;
        if crls.0.is_empty() {
            return Err(broken_crl("it holds none in PEM form"));
        }
        Ok(crls)
    }

    fn read(pem: &[u8]) -> Result<Self, Error> {
        let mut crls = Self::default();
        for der in CertificateRevocationListDer::pem_slice_iter(pem) {
            let der = der.map_err(broken_crl)?;
            let (_, parsed) = x509_parser::parse_x509_crl(&der).map_err(broken_crl)?;
            let list = OwnedCertRevocationList::from_der(&der).map_err(broken_crl)?;
            let (this_update, next_update) = (time(parsed.last_update()), parsed.next_update().map(time));
            crls.0.push(Arc::new(Crl { list: list.into(), this_update, next_update }));
        }
        Ok(crls)
    }

    /// Returns the earliest expiry of the lists.
    pub(crate) fn next_update(&self) -> Option<SystemTime> {
        self.0.iter().filter_map(|crl| crl.next_update).min()
    }
}

fn broken_crl(reason: impl std::fmt::Display) -> Error {
    Error::Pem { what: "certificate revocation list", reason: reason.to_string() }
}

/// Rules for verifying a certificate chain, apart from names.
pub(crate) struct ChainRules<'a> {
    pub(crate) algorithms: &'a [&'a dyn SignatureVerificationAlgorithm],
    /// Revocation lists in addition to those of the roots. As in Envoy, if there is any list, an unexpired list
    /// must cover each certificate.
    pub(crate) crls: Option<&'a Crls>,
    /// Requires a revocation list only for the leaf.
    pub(crate) only_leaf_crl: bool,
    /// Maximum number of certificates above the leaf, including the root.
    pub(crate) max_depth: Option<u32>,
    /// Extended key usage that the leaf must have, if it has any.
    pub(crate) usage: KeyUsage,
    pub(crate) now: UnixTime,
}

impl ChainRules<'_> {
    /// Verifies that a chain leads to a certificate of `store`.
    pub(crate) fn verify(
        &self,
        leaf: &EndEntityCert<'_>,
        intermediates: &[CertificateDer<'_>],
        store: &Store,
    ) -> Result<(), TlsError> {
        let mut crls: Vec<_> = store.crls.0.iter().chain(self.crls.iter().flat_map(|crls| &crls.0)).collect();
        // webpki uses the first list of an issuer, so the newest comes first.
        crls.sort_by_key(|crl| std::cmp::Reverse(crl.this_update));
        let crls: Vec<_> = crls.into_iter().map(|crl| &crl.list).collect();
        let depth =
            if self.only_leaf_crl { RevocationCheckDepth::EndEntity } else { RevocationCheckDepth::Chain };
        let revocation = RevocationOptionsBuilder::new(&crls).ok().map(|options| {
            options
                .with_depth(depth)
                .with_status_policy(UnknownStatusPolicy::Deny)
                .with_expiration_policy(ExpirationPolicy::Enforce)
                .build()
        });
        let is_short = |path: &VerifiedPath<'_>| match self.max_depth {
            Some(max) if path.intermediate_certificates().count() >= max as usize => {
                Err(webpki::Error::MaximumPathDepthExceeded)
            }
            _ => Ok(()),
        };
        leaf.verify_for_usage(
            self.algorithms,
            &store.anchors.roots,
            intermediates,
            self.now,
            self.usage,
            revocation,
            Some(&is_short),
        )
        .map(drop)
        .map_err(refused)
    }
}

/// Maps an error to the one with the right TLS alert.
pub(crate) fn refused(error: webpki::Error) -> TlsError {
    use webpki::Error as E;
    match error {
        E::BadDer | E::BadDerTime | E::TrailingData(_) => CertificateError::BadEncoding,
        E::CertExpired { time, not_after } => CertificateError::ExpiredContext { time, not_after },
        E::CertNotValidYet { time, not_before } => CertificateError::NotValidYetContext { time, not_before },
        E::CertNotValidForName(_) => CertificateError::NotValidForName,
        E::CertRevoked => CertificateError::Revoked,
        E::CrlExpired { time, next_update } => {
            CertificateError::ExpiredRevocationListContext { time, next_update }
        }
        E::UnknownRevocationStatus => CertificateError::UnknownRevocationStatus,
        E::UnknownIssuer => CertificateError::UnknownIssuer,
        E::InvalidSignatureForPublicKey => CertificateError::BadSignature,
        E::RequiredEkuNotFoundContext(_) => CertificateError::InvalidPurpose,
        error => return other(error),
    }
    .into()
}

/// Returns an error without an equivalent in rustls, which prints the `Debug` form of the reason.
pub(crate) fn other(reason: impl std::fmt::Display) -> TlsError {
    CertificateError::Other(OtherError(Arc::new(Reason(reason.to_string())))).into()
}

#[derive(thiserror::Error)]
#[error("{0}")]
struct Reason(String);

impl std::fmt::Debug for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the time in rustls' type.
pub(crate) fn unix(now: SystemTime) -> UnixTime {
    UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO))
}
