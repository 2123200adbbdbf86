//! Public keys of token issuers as JSON Web Key Sets (RFC 7517).

use jsonwebtoken::{Algorithm, DecodingKey, crypto, jwk};
use serde_json::Value;

use crate::Error;

/// A JSON Web Key Set.
#[derive(Clone, Debug, Default)]
pub struct KeySet(pub Vec<VerificationKey>);

/// A public key.
#[derive(Clone)]
pub struct VerificationKey {
    /// Key ID, if it has one.
    pub id: Option<Box<str>>,
    /// Algorithms for which the key may be used.
    pub algorithms: Vec<Algorithm>,
    /// The key.
    pub key: DecodingKey,
}

/// Reason why no key of a set verifies a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// No key has this ID and supports this algorithm.
    NoSuchKey,
    /// No matching key verifies the signature.
    Forged,
}

impl std::fmt::Debug for VerificationKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerificationKey")
            .field("id", &self.id)
            .field("algorithms", &self.algorithms)
            .finish_non_exhaustive()
    }
}

impl KeySet {
    /// Parses a key set; ignores keys of unknown types and keys for other uses than signatures.
    ///
    /// # Errors
    /// The text is not a key set; the string says why.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let set: Value = serde_json::from_slice(text).map_err(|error| format!("is not JSON: {error}"))?;
        let keys = set["keys"].as_array().ok_or("has no list of keys")?;
        Ok(Self(keys.iter().filter_map(key).collect()))
    }

    /// Returns a set with one public key from PEM: EC P-256 for ES256, or RSA for RS256.
    ///
    /// # Errors
    /// The text is not such a key.
    pub fn of_pem(pem: &[u8]) -> Result<Self, Error> {
        let ec = DecodingKey::from_ec_pem(pem).map(|key| (key, vec![Algorithm::ES256]));
        let rsa = || DecodingKey::from_rsa_pem(pem).map(|key| (key, vec![Algorithm::RS256]));
        let (key, algorithms) = ec.or_else(|_| rsa()).map_err(|error| Error::Key(error.to_string()))?;
        Ok(Self(vec![VerificationKey { id: None, algorithms, key }]))
    }

    /// Removes symmetric keys, with which a verifier could also sign.
    pub fn without_secrets(mut self) -> Self {
        let secret = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
        self.0.retain(|key| !key.algorithms.iter().any(|algorithm| secret.contains(algorithm)));
        self
    }

    /// Returns the keys for an algorithm that have this ID or no ID; all keys for the algorithm if `id` is absent.
    pub fn fitting<'a>(
        &'a self,
        id: Option<&'a str>,
        algorithm: Algorithm,
    ) -> impl Iterator<Item = &'a VerificationKey> {
        let id = id.filter(|id| !id.is_empty());
        let named = move |key: &&VerificationKey| id.is_none() || key.id.is_none() || key.id.as_deref() == id;
        self.0.iter().filter(named).filter(move |key| key.algorithms.contains(&algorithm))
    }

    /// Verifies a signature (base64url) with the matching keys.
    ///
    /// # Errors
    /// No key verifies it.
    pub fn verify(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
        signed: &[u8],
        signature: &str,
    ) -> Result<(), Mismatch> {
        let mut fits = self.fitting(id, algorithm).peekable();
        if fits.peek().is_none() {
            return Err(Mismatch::NoSuchKey);
        }
        let good =
            |key: &VerificationKey| crypto::verify(signature, signed, &key.key, algorithm).unwrap_or(false);
        if fits.any(good) { Ok(()) } else { Err(Mismatch::Forged) }
    }
}

fn key(json: &Value) -> Option<VerificationKey> {
    use jwk::{AlgorithmParameters as Of, EllipticCurve as Curve};
    // RFC 7517, sections 4.2 and 4.3: a key for another use does not verify tokens.
    let verifies = |operations: &Vec<Value>| operations.iter().any(|name| name == "verify");
    if json["use"].as_str().is_some_and(|what| what != "sig")
        || json["key_ops"].as_array().is_some_and(|operations| !verifies(operations))
    {
        return None;
    }
    let jwk: jwk::Jwk = serde_json::from_value(json.clone()).ok()?;
    let possible = match &jwk.algorithm {
        Of::RSA(_) => &[
            Algorithm::RS256,
            Algorithm::RS384,
            Algorithm::RS512,
            Algorithm::PS256,
            Algorithm::PS384,
            Algorithm::PS512,
        ][..],
        Of::EllipticCurve(of) if of.curve == Curve::P256 => &[Algorithm::ES256],
        Of::EllipticCurve(of) if of.curve == Curve::P384 => &[Algorithm::ES384],
        Of::OctetKeyPair(of) if of.curve == Curve::Ed25519 => &[Algorithm::EdDSA],
        Of::OctetKey(_) => &[Algorithm::HS256, Algorithm::HS384, Algorithm::HS512],
        _ => return None,
    };
    let only = json["alg"].as_str();
    let is_meant =
        |one: &&Algorithm| only.is_none_or(|name| name.parse().is_ok_and(|name: Algorithm| name == **one));
    Some(VerificationKey {
        id: json["kid"].as_str().filter(|id| !id.is_empty()).map(Box::from),
        algorithms: possible.iter().filter(is_meant).copied().collect(),
        key: DecodingKey::from_jwk(&jwk).ok()?,
    })
}
