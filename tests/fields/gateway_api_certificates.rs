//! Authorities, and objects with their certificates, for tests of TLS.

use std::net::SocketAddr;

use rcgen::{
    CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    SanType,
};
use rustls::pki_types::PrivateKeyDer;
use skysail_testkit::Client;

pub(crate) type Issuer = CertifiedIssuer<'static, KeyPair>;

/// Returns an authority.
pub(crate) fn issuer(name: &str) -> Issuer {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.distinguished_name = named(name);
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Returns a subject. One that is the same as the issuer's would make a certificate self-signed for an Envoy.
fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

/// Returns a certificate for these names and its key. A name with `://` is a URI.
fn certificate(issuer: &Issuer, names: &[&str]) -> (rcgen::Certificate, KeyPair) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names = names
        .iter()
        .map(|name| match name.contains("://") {
            true => SanType::URI((*name).try_into().unwrap()),
            false => SanType::DnsName((*name).try_into().unwrap()),
        })
        .collect();
    params.distinguished_name = named("member");
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    (params.signed_by(&key, issuer).unwrap(), key)
}

fn block(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}

/// Returns a Secret with a certificate for these names, and with the authority of clients. `name` is `NAMESPACE/NAME`.
pub(crate) fn secret(name: &str, issuer: &Issuer, names: &[&str], clients: &Issuer) -> String {
    let (chain, key) = certificate(issuer, names);
    let (namespace, name) = name.split_once('/').unwrap();
    format!(
        "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: {namespace}}}\nstringData:\n  \
         tls.crt: |\n{}  tls.key: |\n{}  ca.crt: |\n{}",
        block(&chain.pem()),
        block(&key.serialize_pem()),
        block(&clients.pem())
    )
}

/// Returns a ConfigMap in the namespace `shop` with the certificate of an authority.
pub(crate) fn config_map(name: &str, issuer: &Issuer) -> String {
    format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: shop}}\ndata:\n  ca.crt: |\n{}",
        block(&issuer.pem())
    )
}

/// Returns a client that trusts one authority and may present a certificate of another.
pub(crate) fn client(address: SocketAddr, servers: &Issuer, own: Option<&Issuer>) -> Client {
    let own = own.map(|issuer| {
        let (chain, key) = certificate(issuer, &["client"]);
        (vec![chain.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into()))
    });
    Client::tls(address, servers.der().clone(), own)
}
