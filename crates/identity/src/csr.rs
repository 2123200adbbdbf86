//! Certificate signing requests as others send them (PKCS #10, RFC 2986), and why one is refused.
//!
//! A request proves one thing: that its sender holds the key it is for. Whom the certificate names is decided by
//! who asks, so a request may name nobody or whom the caller proved to be; one that names somebody else is refused
//! rather than corrected, as whoever sent it is mistaken or lies.

use rcgen::{
    PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ECDSA_P521_SHA512, PKCS_ED25519, PKCS_RSA_SHA256,
    PublicKeyData, SignatureAlgorithm,
};
use rustls::{
    crypto::aws_lc_rs,
    pki_types::{AlgorithmIdentifier, alg_id},
};
use skysail_core::SpiffeId;
use x509_parser::{
    asn1_rs::{Any, FromDer as _},
    certification_request::X509CertificationRequest,
    cri_attributes::ParsedCriAttribute,
    extensions::{GeneralName, ParsedExtension},
    public_key::PublicKey,
    x509::SubjectPublicKeyInfo,
};

/// The longest request that is read, in bytes of PEM. One for an RSA key of 8192 bits has about 4,000.
pub const LONGEST: usize = 16 * 1024;
const LABELS: [&str; 2] = ["CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST"];
/// The sizes of RSA keys in bits; larger ones cost more to verify than anybody gains.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is longer than [`LONGEST`].
    #[error("it has {0} bytes; {LONGEST} are the most")]
    TooLong(usize),
    /// It is no PEM text of a request.
    #[error("it is no PEM text of a certificate request: {0}")]
    NotPem(&'static str),
    /// There are several in one text.
    #[error("it holds several requests or other blocks; send one at a time")]
    Several,
    /// Bytes follow it, or stand before it.
    #[error("something stands before or after the request")]
    Trailing,
    /// It is no request in DER.
    #[error("it cannot be parsed as PKCS #10")]
    Malformed,
    /// Its key is too small or too large.
    #[error("{0}")]
    KeySize(String),
    /// Its key is of a kind that is not signed.
    #[error("its key ({0}) is none of ECDSA P-256, P-384 or P-521, RSA of {min} to {max} bits, or Ed25519", min = RSA_BITS.start(), max = RSA_BITS.end())]
    KeyKind(String),
    /// Its signature is made with MD5 or SHA-1.
    #[error("its signature is made with {0}, which can be forged; use SHA-256 or better")]
    WeakSignature(&'static str),
    /// Its signature is of a kind that does not go with its key or that is not known.
    #[error("its signature algorithm ({0}) does not go with its key, or is not known")]
    SignatureKind(String),
    /// It is not signed by the key it is for.
    #[error("it is not signed by the key it is for")]
    ForeignSignature,
    /// It names somebody the caller is not.
    #[error("it names {named}, and the caller is {caller}")]
    ForeignName {
        /// The name.
        named: String,
        /// Whom the caller proved to be.
        caller: String,
    },
    /// It asks for a certificate that may sign others.
    #[error("it asks to become an authority")]
    WantsAuthority,
}

impl Refusal {
    /// All reasons, in the order in which they are looked for.
    pub const REASONS: [&'static str; 12] = [
        "too_long",
        "not_pem",
        "several",
        "trailing",
        "malformed",
        "key_size",
        "key_kind",
        "weak_signature",
        "signature_kind",
        "foreign_signature",
        "foreign_name",
        "wants_authority",
    ];

    /// The place of its reason in [`Self::REASONS`].
    pub fn index(&self) -> usize {
        match self {
            Self::TooLong(_) => 0,
            Self::NotPem(_) => 1,
            Self::Several => 2,
            Self::Trailing => 3,
            Self::Malformed => 4,
            Self::KeySize(_) => 5,
            Self::KeyKind(_) => 6,
            Self::WeakSignature(_) => 7,
            Self::SignatureKind(_) => 8,
            Self::ForeignSignature => 9,
            Self::ForeignName { .. } => 10,
            Self::WantsAuthority => 11,
        }
    }
}

/// A request that is well formed and signed by its own key.
#[derive(Debug)]
pub struct Csr {
    pub(crate) key: CertifiedPublicKey,
    /// The SPIFFE ids it names.
    ids: Vec<SpiffeId>,
    /// What it names besides.
    others: Vec<String>,
}

/// The key a certificate is for.
#[derive(Debug)]
pub(crate) struct CertifiedPublicKey {
    algorithm: &'static SignatureAlgorithm,
    bits: Vec<u8>,
}

impl PublicKeyData for CertifiedPublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.bits
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}

impl Csr {
    /// Reads a request, and checks its key and its signature.
    ///
    /// # Errors
    /// The first reason to refuse it.
    pub fn from_pem(text: &str) -> Result<Self, Refusal> {
        Self::from_der(&one_block(text)?)
    }

    fn from_der(der: &[u8]) -> Result<Self, Refusal> {
        let (rest, request) = X509CertificationRequest::from_der(der).map_err(|_| Refusal::Malformed)?;
        if !rest.is_empty() {
            return Err(Refusal::Trailing);
        }
        let info = &request.certification_request_info;
        let algorithm = check_key(&info.subject_pki)?;
        check_signature(der, &request)?;
        let key = CertifiedPublicKey { algorithm, bits: info.subject_pki.subject_public_key.data.to_vec() };
        let mut csr = Self { key, ids: Vec::new(), others: Vec::new() };
        for attribute in info.iter_attributes() {
            let ParsedCriAttribute::ExtensionRequest(requested) = attribute.parsed_attribute() else {
                continue;
            };
            for extension in &requested.extensions {
                csr.wish(extension.parsed_extension())?;
            }
        }
        Ok(csr)
    }

    fn wish(&mut self, extension: &ParsedExtension<'_>) -> Result<(), Refusal> {
        match extension {
            ParsedExtension::BasicConstraints(constraints) if constraints.ca => Err(Refusal::WantsAuthority),
            ParsedExtension::KeyUsage(usage) if usage.key_cert_sign() || usage.crl_sign() => {
                Err(Refusal::WantsAuthority)
            }
            ParsedExtension::SubjectAlternativeName(names) => {
                for name in &names.general_names {
                    match name {
                        GeneralName::URI(uri) if uri.parse::<SpiffeId>().is_ok() => {
                            self.ids.extend(uri.parse::<SpiffeId>());
                        }
                        other => self.others.push(other.to_string()),
                    }
                }
                Ok(())
            }
            ParsedExtension::ParseError { .. } => Err(Refusal::Malformed),
            _ => Ok(()),
        }
    }

    /// Whether it names anybody.
    pub fn names_somebody(&self) -> bool {
        !self.ids.is_empty() || !self.others.is_empty()
    }

    /// Checks that it names nobody but `caller`, under its own trust domain or one of `aliases`.
    ///
    /// # Errors
    /// When it names somebody else, or a host, an address or a mailbox, for which no certificates are made.
    pub fn names_only(&self, caller: &SpiffeId, aliases: &[String]) -> Result<(), Refusal> {
        let is_caller = |id: &&SpiffeId| {
            (&id.namespace, &id.service_account) == (&caller.namespace, &caller.service_account)
                && (id.trust_domain == caller.trust_domain || aliases.contains(&id.trust_domain))
        };
        let foreign = self.ids.iter().find(|id| !is_caller(id)).map(ToString::to_string);
        match foreign.as_ref().or(self.others.first()) {
            None => Ok(()),
            Some(named) => Err(Refusal::ForeignName { named: named.clone(), caller: caller.to_string() }),
        }
    }
}

/// The bytes of a text that is one PEM block and nothing else.
fn one_block(text: &str) -> Result<Vec<u8>, Refusal> {
    if text.len() > LONGEST {
        return Err(Refusal::TooLong(text.len()));
    }
    match text.matches("-----BEGIN ").count() {
        0 => return Err(Refusal::NotPem("it has no BEGIN line")),
        1 => {}
        _ => return Err(Refusal::Several),
    }
    let text = text.trim();
    if !text.starts_with("-----BEGIN ") || !text.ends_with("-----") {
        return Err(Refusal::Trailing);
    }
    let block = pem::parse(text).map_err(|_| Refusal::NotPem("its Base64 or its END line is broken"))?;
    if !LABELS.contains(&block.tag()) {
        return Err(Refusal::NotPem("its BEGIN line names something else"));
    }
    // What stands between an END line and dashes further down.
    if text.matches("-----").count() != 4 {
        return Err(Refusal::Trailing);
    }
    Ok(block.into_contents())
}

/// Checks that a key is of a kind and size that is signed, and signs.
pub(crate) fn check_key(key: &SubjectPublicKeyInfo<'_>) -> Result<&'static SignatureAlgorithm, Refusal> {
    let kinds: [(AlgorithmIdentifier, &'static SignatureAlgorithm); 5] = [
        (alg_id::ECDSA_P256, &PKCS_ECDSA_P256_SHA256),
        (alg_id::ECDSA_P384, &PKCS_ECDSA_P384_SHA384),
        (alg_id::ECDSA_P521, &PKCS_ECDSA_P521_SHA512),
        (alg_id::RSA_ENCRYPTION, &PKCS_RSA_SHA256),
        (alg_id::ED25519, &PKCS_ED25519),
    ];
    let id = content(key.raw).and_then(content).ok_or(Refusal::Malformed)?;
    let Some((_, algorithm)) = kinds.into_iter().find(|(known, _)| known.as_ref() == id) else {
        let curve = key.algorithm.parameters().and_then(|any| any.as_oid().ok());
        return Err(Refusal::KeyKind(curve.unwrap_or_else(|| key.algorithm.oid().clone()).to_string()));
    };
    if let Ok(PublicKey::RSA(rsa)) = key.parsed() {
        let leading = rsa.modulus.iter().take_while(|byte| **byte == 0).count();
        let modulus = &rsa.modulus[leading..];
        let zeros = modulus.first().map_or(0, |byte| byte.leading_zeros() as usize);
        let bits = modulus.len() * 8 - zeros;
        if !RSA_BITS.contains(&bits) {
            let (min, max) = (RSA_BITS.start(), RSA_BITS.end());
            return Err(Refusal::KeySize(format!("its RSA key has {bits} bits; {min} to {max} are taken")));
        }
    }
    Ok(algorithm)
}

fn check_signature(der: &[u8], request: &X509CertificationRequest<'_>) -> Result<(), Refusal> {
    let oid = request.signature_algorithm.algorithm.to_id_string();
    let weak = match oid.as_str() {
        "1.2.840.113549.1.1.2" => Some("MD2"),
        "1.2.840.113549.1.1.4" => Some("MD5"),
        "1.2.840.113549.1.1.5" | "1.2.840.10045.4.1" | "1.3.14.3.2.29" => Some("SHA-1"),
        _ => None,
    };
    if let Some(weak) = weak {
        return Err(Refusal::WeakSignature(weak));
    }
    let info = &request.certification_request_info;
    match signed(der, info.raw, &request.signature_value.data, &info.subject_pki) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Refusal::ForeignSignature),
        Err(Unknown::Malformed) => Err(Refusal::Malformed),
        Err(Unknown::Algorithm) => Err(Refusal::SignatureKind(oid)),
    }
}

/// Why a signature cannot be checked.
pub(crate) enum Unknown {
    Malformed,
    /// It does not go with the key, or is not known.
    Algorithm,
}

/// Whether the first part of a request or a certificate, `info`, is signed by this key.
pub(crate) fn signed(
    der: &[u8],
    info: &[u8],
    signature: &[u8],
    key: &SubjectPublicKeyInfo<'_>,
) -> Result<bool, Unknown> {
    let key_id = content(key.raw).and_then(content).ok_or(Unknown::Malformed)?;
    // The signature's algorithm follows the information that is signed.
    let after_info = content(der).and_then(|all| all.get(info.len()..)).ok_or(Unknown::Malformed)?;
    let signature_id = content(after_info).ok_or(Unknown::Malformed)?;
    let known = aws_lc_rs::default_provider().signature_verification_algorithms;
    let fits = known.all.iter().filter(|known| {
        known.signature_alg_id().as_ref() == signature_id && known.public_key_alg_id().as_ref() == key_id
    });
    let mut fits = fits.peekable();
    if fits.peek().is_none() {
        return Err(Unknown::Algorithm);
    }
    Ok(fits.any(|known| known.verify_signature(&key.subject_public_key.data, info, signature).is_ok()))
}

/// What is in an element of DER.
fn content(der: &[u8]) -> Option<&[u8]> {
    Any::from_der(der).ok().map(|(_, any)| any.data)
}

#[cfg(test)]
mod tests;
