//! Public keys of those who issue tokens, as JSON web key sets (RFC 7517).

use jsonwebtoken::{Algorithm, DecodingKey, crypto, jwk};
use serde_json::Value;

use crate::Error;

/// A JSON web key set, of which keys of kinds that are not known are left out.
#[derive(Clone, Debug, Default)]
pub struct KeySet(pub Vec<VerificationKey>);

/// A public key.
#[derive(Clone)]
pub struct VerificationKey {
    /// Its name, if it has one.
    pub id: Option<Box<str>>,
    /// What it may be used for.
    pub algorithms: Vec<Algorithm>,
    /// The key itself.
    pub key: DecodingKey,
}

/// Why no key of a set speaks for a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// No key has this name and is for this algorithm.
    NoSuchKey,
    /// Those that do have not made it.
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
    /// Reads a key set; keys of kinds that are not known are left out.
    ///
    /// # Errors
    /// What is wrong if it is none.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let set: Value = serde_json::from_slice(text).map_err(|error| format!("is no JSON: {error}"))?;
        let keys = set["keys"].as_array().ok_or("has no list of keys")?;
        Ok(Self(keys.iter().filter_map(key).collect()))
    }

    /// The set of one public key in PEM: EC P-256, or RSA.
    ///
    /// # Errors
    /// When it is no such key.
    pub fn of_pem(pem: &[u8]) -> Result<Self, Error> {
        let ec = DecodingKey::from_ec_pem(pem).map(|key| (key, vec![Algorithm::ES256]));
        let rsa = || DecodingKey::from_rsa_pem(pem).map(|key| (key, vec![Algorithm::RS256]));
        let (key, algorithms) = ec.or_else(|_| rsa()).map_err(|error| Error::Key(error.to_string()))?;
        Ok(Self(vec![VerificationKey { id: None, algorithms, key }]))
    }

    /// The same without keys that whoever verifies with them could also sign with.
    pub fn without_secrets(mut self) -> Self {
        let secret = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
        self.0.retain(|key| !key.algorithms.iter().any(|algorithm| secret.contains(algorithm)));
        self
    }

    /// The keys for an algorithm that have this name; all if there is no name, and those without one always.
    pub fn fitting<'a>(
        &'a self,
        id: Option<&'a str>,
        algorithm: Algorithm,
    ) -> impl Iterator<Item = &'a VerificationKey> {
        let id = id.filter(|id| !id.is_empty());
        let named = move |key: &&VerificationKey| id.is_none() || key.id.is_none() || key.id.as_deref() == id;
        self.0.iter().filter(named).filter(move |key| key.algorithms.contains(&algorithm))
    }

    /// Checks a signature (base64url) by the keys that fit.
    ///
    /// # Errors
    /// When no key speaks for it.
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
    // RFC 7517, sections 4.2 and 4.3: one that is for something else speaks for no token.
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
