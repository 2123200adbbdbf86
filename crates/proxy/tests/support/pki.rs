//! Authorities, certificates and revocation lists.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType,
    SerialNumber,
};
use skysail_identity::Identity;

const HOUR: Duration = Duration::from_hours(1);

/// An authority.
pub(crate) struct Ca {
    pub(crate) pem: String,
    /// Certificates from this one up to the root, without the root.
    chain: String,
    issuer: Issuer<'static, KeyPair>,
}

/// Parameters of a certificate to sign.
pub(crate) struct Leaf(pub(crate) CertificateParams);

/// A chain without the root, and its key, both PEM.
#[derive(Clone)]
pub(crate) struct Certificate {
    pub(crate) chain: String,
    pub(crate) key: String,
}

impl Certificate {
    pub(crate) fn identity(&self) -> Identity {
        Identity::from_pem(self.chain.as_bytes(), self.key.as_bytes()).unwrap()
    }
}

impl Ca {
    pub(crate) fn root(name: &str) -> Self {
        let (params, key) = authority(name);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, chain: String::new(), issuer: Issuer::new(params, key) }
    }

    pub(crate) fn intermediate(&self, name: &str) -> Self {
        let (mut params, key) = authority(name);
        params.serial_number = Some(SerialNumber::from(1));
        let pem = params.signed_by(&key, &self.issuer).unwrap().pem();
        let chain = format!("{pem}{}", self.chain);
        Self { pem, chain, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn sign(&self, leaf: Leaf) -> Certificate {
        let key = KeyPair::generate().unwrap();
        let pem = leaf.0.signed_by(&key, &self.issuer).unwrap().pem();
        Certificate { chain: format!("{pem}{}", self.chain), key: key.serialize_pem() }
    }

    /// Returns a revocation list issued one hour ago that is valid for `next`.
    pub(crate) fn crl_until(&self, revoked: &[u64], next: Duration) -> String {
        let this_update = SystemTime::now() - HOUR;
        let revoked = revoked.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: this_update.into(),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: this_update.into(),
            next_update: (this_update + next).into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }

    pub(crate) fn crl(&self, revoked: &[u64]) -> String {
        self.crl_until(revoked, 24 * HOUR)
    }
}

fn authority(name: &str) -> (CertificateParams, KeyPair) {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    (params, KeyPair::generate().unwrap())
}

impl Leaf {
    /// Returns parameters of a certificate for clients and servers that is valid for one hour.
    pub(crate) fn new(serial: u64, names: Vec<SanType>) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.serial_number = Some(SerialNumber::from(serial));
        params.not_before = (SystemTime::now() - HOUR).into();
        params.not_after = (SystemTime::now() + HOUR).into();
        params.subject_alt_names = names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Self(params)
    }

    pub(crate) fn uris(serial: u64, uris: &[&str]) -> Self {
        Self::new(serial, uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect())
    }

    pub(crate) fn change(mut self, change: impl FnOnce(&mut CertificateParams)) -> Self {
        change(&mut self.0);
        self
    }
}
