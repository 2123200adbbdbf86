//! Certificate signing requests (PKCS #10, RFC 2986): parsing, and the reasons for refusing one.
//!
//! A request proves only that its sender holds the key. The authenticated caller determines the name in the
//! certificate. A request may therefore contain no subject alternative name or the caller's. Any other is
//! refused rather than replaced, because it is an error or an attack. The subject is ignored.

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

/// Maximum length of a request, in bytes of PEM. A request for an RSA key of 8192 bits has about 4,000.
pub const MAX_LENGTH: usize = 16 * 1024;
const LABELS: [&str; 2] = ["CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST"];
/// RSA key sizes in bits; larger keys are too expensive to verify.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// Reason for refusing a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The request is longer than [`MAX_LENGTH`].
    #[error("it has {0} bytes; the maximum is {MAX_LENGTH}")]
    TooLong(usize),
    /// The text is not a PEM request.
    #[error("it is not a certificate request in PEM: {0}")]
    NotPem(&'static str),
    /// The text contains several PEM blocks.
    #[error("it contains several requests or other blocks; send one at a time")]
    Several,
    /// Data precedes or follows the request.
    #[error("there is data before or after the request")]
    Trailing,
    /// The DER encoding is invalid.
    #[error("it cannot be parsed as PKCS #10")]
    Malformed,
    /// The key is too small or too large.
    #[error("{0}")]
    KeySize(String),
    /// The key type is not supported.
    #[error("its key ({0}) is not ECDSA P-256, P-384 or P-521, RSA of {min} to {max} bits, or Ed25519", min = RSA_BITS.start(), max = RSA_BITS.end())]
    KeyKind(String),
    /// The signature uses MD2, MD5 or SHA-1.
    #[error("its signature is made with {0}, which can be forged; use SHA-256 or better")]
    WeakSignature(&'static str),
    /// The signature algorithm is unknown or does not match the key.
    #[error("its signature algorithm ({0}) is unknown or does not match its key")]
    SignatureKind(String),
    /// The signature was not made with the key of the request.
    #[error("it is not signed with its own key")]
    ForeignSignature,
    /// The request contains a name that is not the caller's.
    #[error("it names {named}, and the caller is {caller}")]
    ForeignName {
        /// The name in the request.
        named: String,
        /// The authenticated caller.
        caller: String,
    },
    /// The request is for a CA certificate.
    #[error("it requests a CA certificate")]
    WantsAuthority,
}

impl Refusal {
    /// All reasons, in the order of the variants.
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

    /// Returns the index of the reason in [`Self::REASONS`].
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

/// A well-formed request with a valid signature.
#[derive(Debug)]
pub struct Csr {
    pub(crate) key: CertifiedPublicKey,
    /// SPIFFE IDs in the request.
    ids: Vec<SpiffeId>,
    /// Other names in the request.
    others: Vec<String>,
}

/// Public key of a certificate.
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
    /// Parses a request and checks its key and its signature.
    ///
    /// # Errors
    /// The first reason for refusing it.
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

    /// Returns whether the request contains any name.
    pub fn names_anything(&self) -> bool {
        !self.ids.is_empty() || !self.others.is_empty()
    }

    /// Checks that the request contains no name other than `caller`, with its own trust domain or one of
    /// `aliases`.
    ///
    /// # Errors
    /// It contains another identity, or a host name, IP or mail address, for which no certificates are issued.
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

/// Decodes a text that consists of exactly one PEM block.
fn one_block(text: &str) -> Result<Vec<u8>, Refusal> {
    if text.len() > MAX_LENGTH {
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
    // Finds data between the END line and further dashes.
    if text.matches("-----").count() != 4 {
        return Err(Refusal::Trailing);
    }
    Ok(block.into_contents())
}

/// Checks that a key has a supported type and size, and returns its signature algorithm.
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
            let problem = format!("its RSA key has {bits} bits; {min} to {max} are accepted");
            return Err(Refusal::KeySize(problem));
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

/// Reason why a signature cannot be verified.
pub(crate) enum Unknown {
    Malformed,
    /// The algorithm is unknown or does not match the key.
    Algorithm,
}

/// Returns whether this key signed `info`, the first part of a request or a certificate.
pub(crate) fn signed(
    der: &[u8],
    info: &[u8],
    signature: &[u8],
    key: &SubjectPublicKeyInfo<'_>,
) -> Result<bool, Unknown> {
    let key_id = content(key.raw).and_then(content).ok_or(Unknown::Malformed)?;
    // The signature algorithm follows the signed part.
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

/// Returns the content of a DER element.
fn content(der: &[u8]) -> Option<&[u8]> {
    Any::from_der(der).ok().map(|(_, any)| any.data)
}

#[cfg(test)]
mod tests;
