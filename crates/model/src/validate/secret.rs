//! Validation of Secrets for TLS. No message shows a value.

use x509_parser::{
    der_parser::{ber::BerObjectContent, der::parse_der},
    pem::Pem,
    prelude::{FromDer as _, X509Certificate},
    public_key::PublicKey,
};

use super::{Code, Findings};
use crate::api::secret::{KeyPair, Secret};

/// Labels of private keys in PEM: PKCS#8, PKCS#1 and SEC 1.
const KEYS: [&str; 3] = ["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"];

/// Checks the certificate and key of a Secret. `invalid` are the keys that are not base64.
pub(crate) fn secret(secret: &Secret, invalid: &[String], findings: &mut Findings) {
    for name in invalid {
        findings.add(
            Code::InvalidSecret,
            skysail_yaml::join("data", name),
            "is not base64",
            "encode it, or use stringData",
        );
    }
    let Some(pair) = secret.pair() else {
        if secret.is_tls && invalid.is_empty() {
            let remedy = "add tls.crt and tls.key, or remove the type";
            findings.add(
                Code::InvalidSecret,
                "data",
                "has no tls.crt or no tls.key, which type kubernetes.io/tls needs",
                remedy,
            );
        }
        return;
    };
    if !pair.is_pem() {
        // Opaque Secrets may use the same keys for other purposes.
        if secret.is_tls {
            let message = "certificate or key is not PEM, so gateways refuse it";
            findings.add(Code::CertificateNotPem, "data", message, "set both in PEM format");
        }
        return;
    }
    if let Err(problem) = check_pair(pair) {
        findings.add(
            Code::InvalidSecret,
            "data",
            problem,
            "set a certificate and its own private key in PEM format",
        );
    }
}

fn check_pair(pair: KeyPair<'_>) -> Result<(), &'static str> {
    let mut first = None;
    for block in Pem::iter_from_buffer(pair.chain) {
        let block = block.map_err(|_| "the certificate is not valid PEM")?;
        if block.label != "CERTIFICATE" {
            return Err("the certificate chain contains something else than certificates");
        }
        block.parse_x509().map_err(|_| "a certificate of the chain cannot be parsed")?;
        first.get_or_insert(block);
    }
    let first = first.ok_or("the certificate chain has no certificate")?;
    let blocks = Pem::iter_from_buffer(pair.key).filter_map(Result::ok);
    let key = blocks.into_iter().find(|block| KEYS.contains(&block.label.as_str()));
    let key = key.ok_or("the private key is not an unencrypted key in PEM format")?;
    let (_, certificate) =
        X509Certificate::from_der(&first.contents).map_err(|_| "the certificate cannot be parsed")?;
    match public_part(&key) {
        Ok(Some(part)) if !matches_certificate(&part, &certificate) => {
            Err("the private key does not belong to the certificate")
        }
        Ok(_) => Ok(()),
        Err(()) => Err("the private key cannot be parsed"),
    }
}

/// Public part of a private key.
enum Public {
    /// Modulus, without leading zeros.
    Rsa(Vec<u8>),
    /// Point.
    Point(Vec<u8>),
}

fn matches_certificate(part: &Public, certificate: &X509Certificate<'_>) -> bool {
    match (part, certificate.public_key().parsed()) {
        (Public::Rsa(modulus), Ok(PublicKey::RSA(key))) => without_zeros(key.modulus) == modulus.as_slice(),
        (Public::Point(point), Ok(PublicKey::EC(key))) => key.data() == point.as_slice(),
        // Such as Ed25519.
        (Public::Point(point), _) => {
            certificate.public_key().subject_public_key.data.as_ref() == point.as_slice()
        }
        _ => false,
    }
}

/// Returns the public part of a key; `None` if the key does not contain it; only RSA keys must.
fn public_part(key: &Pem) -> Result<Option<Public>, ()> {
    match key.label.as_str() {
        "RSA PRIVATE KEY" => rsa(&key.contents).map(Some),
        "EC PRIVATE KEY" => sec1(&key.contents),
        _ => pkcs8(&key.contents),
    }
}

/// Object identifier of RSA keys, RFC 8017 appendix A.1.
const RSA: &str = "1.2.840.113549.1.1.1";
/// Object identifier of EC keys, RFC 5480 section 2.1.1.
const EC: &str = "1.2.840.10045.2.1";

/// Reads `PrivateKeyInfo`, RFC 5208 section 5.
fn pkcs8(bytes: &[u8]) -> Result<Option<Public>, ()> {
    let (_, info) = parse_der(bytes).map_err(drop)?;
    let fields = info.as_sequence().map_err(drop)?;
    let algorithm = fields.get(1).and_then(|field| field.as_sequence().ok()).ok_or(())?;
    let algorithm = algorithm.first().and_then(|id| id.as_oid().ok()).ok_or(())?.to_id_string();
    let inner = fields.get(2).and_then(|field| field.as_slice().ok()).ok_or(())?;
    match algorithm.as_str() {
        RSA => rsa(inner).map(Some),
        EC => sec1(inner),
        _ => Ok(None),
    }
}

/// Reads `RSAPrivateKey`, RFC 8017 appendix A.1.2.
fn rsa(bytes: &[u8]) -> Result<Public, ()> {
    let (_, key) = parse_der(bytes).map_err(drop)?;
    let modulus = key.as_sequence().map_err(drop)?.get(1).ok_or(())?;
    Ok(Public::Rsa(without_zeros(modulus.as_slice().map_err(drop)?).to_vec()))
}

/// Reads `ECPrivateKey`, RFC 5915 section 3.
fn sec1(bytes: &[u8]) -> Result<Option<Public>, ()> {
    let (_, key) = parse_der(bytes).map_err(drop)?;
    for field in
        key.as_sequence().map_err(drop)?.iter().filter(|field| field.header.raw_tag() == Some(&[0xa1]))
    {
        let BerObjectContent::Unknown(inner) = &field.content else { return Ok(None) };
        let (_, point) = parse_der(inner.data).map_err(drop)?;
        if let BerObjectContent::BitString(_, bits) = &point.content {
            return Ok(Some(Public::Point(bits.data.to_vec())));
        }
    }
    Ok(None)
}

fn without_zeros(mut bytes: &[u8]) -> &[u8] {
    while let [0, rest @ ..] = bytes {
        bytes = rest;
    }
    bytes
}
