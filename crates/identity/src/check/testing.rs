//! Certificates and revocation lists for tests.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod,
    KeyPair, KeyUsagePurpose, RevocationReason, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::CertificateDer;

use crate::Authority;

/// A root with its key.
pub(crate) struct TestRoot {
    pub(crate) pem: String,
    key: String,
    issuer: Issuer<'static, KeyPair>,
}

impl TestRoot {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("root {:016x}", fastrand::u64(..)));
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let (pem, secret) = (params.self_signed(&key).unwrap().pem(), key.serialize_pem());
        Self { pem, key: secret, issuer: Issuer::new(params, key) }
    }

    pub(crate) fn authority(&self) -> Authority {
        Authority::from_pem(&self.pem, &self.pem, &self.key, "").unwrap()
    }

    /// Returns a chain without intermediates; the leaf's serial number is 1.
    pub(crate) fn leaf(&self, mut params: CertificateParams) -> Vec<CertificateDer<'static>> {
        params.serial_number = Some(SerialNumber::from(1));
        let key = KeyPair::generate().unwrap();
        vec![params.signed_by(&key, &self.issuer).unwrap().der().clone()]
    }

    /// Returns a revocation list that is issued now and valid for `life`.
    pub(crate) fn crl(&self, revoked: &[u64], life: Duration) -> String {
        self.crl_of(revoked, Duration::ZERO, life)
    }

    /// Returns a revocation list that was issued `age` ago and is valid for `life` from then.
    pub(crate) fn crl_of(&self, revoked: &[u64], age: Duration, life: Duration) -> String {
        let this_update = SystemTime::now() - age;
        let revoked = revoked.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: this_update.into(),
            reason_code: Some(RevocationReason::KeyCompromise),
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: this_update.into(),
            next_update: (this_update + life).into(),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }
}
