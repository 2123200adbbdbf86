//! Certificates for tests.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, SanType,
};

pub(crate) type Issuer = CertifiedIssuer<'static, KeyPair>;

/// Returns an authority.
pub(crate) fn issuer(name: &str) -> Issuer {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name = named(name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Returns a certificate with these DNS names, for servers and clients, and its key. `last_year` is its last year.
pub(crate) fn certificate(issuer: &Issuer, names: &[&str], last_year: i32) -> (rcgen::Certificate, KeyPair) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names =
        names.iter().map(|name| SanType::DnsName((*name).try_into().unwrap())).collect();
    params.distinguished_name = named("leaf");
    params.not_after = rcgen::date_time_ymd(last_year, 12, 31);
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let chain = params.signed_by(&key, issuer).unwrap();
    (chain, key)
}

fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

/// Returns a PEM text as the lines of a value in `stringData`.
pub(crate) fn pem_block(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
