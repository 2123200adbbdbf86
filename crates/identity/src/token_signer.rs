//! Service account tokens like those of Kubernetes, for meshes without a cluster.
//!
//! ES256 JSON web tokens with the claims that the certificate authority reads (RFC 7519; Kubernetes' bound service
//! account tokens). The control plane reads the public key from a file.

use std::{
    io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::json;

/// Lifetime of a token.
const LIFETIME: Duration = Duration::from_hours(24);
/// Interval at which a pod's token is to be renewed.
pub const TOKEN_RENEWAL: Duration = Duration::from_hours(8);

/// Signs service account tokens with a key of its own.
#[derive(Clone)]
pub struct TokenSigner {
    key: EncodingKey,
    public: String,
}

impl TokenSigner {
    /// Creates a signer with a new key.
    ///
    /// # Errors
    /// If the random source fails.
    pub fn new() -> io::Result<Self> {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(io::Error::other)?;
        let key = EncodingKey::from_ec_pem(pair.serialize_pem().as_bytes()).map_err(io::Error::other)?;
        Ok(Self { key, public: pair.public_key_pem() })
    }

    /// Returns the public key as PEM.
    pub fn public_key(&self) -> &str {
        &self.public
    }

    /// Returns a token for a pod, for this audience.
    ///
    /// # Errors
    /// If the token cannot be signed.
    pub fn token(&self, namespace: &str, account: &str, pod: &str, audience: &str) -> io::Result<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let claims = json!({
            "iss": "kubernetes/serviceaccount",
            "sub": format!("system:serviceaccount:{namespace}:{account}"),
            "aud": [audience],
            "iat": now.as_secs(),
            "exp": (now + LIFETIME).as_secs(),
            "kubernetes.io": {
                "namespace": namespace,
                "pod": { "name": pod },
                "serviceaccount": { "name": account },
            },
        });
        jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims, &self.key).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jsonwebtoken::{DecodingKey, Validation};
    use skysail_core::names::TOKEN_AUDIENCE;

    #[test]
    fn tokens_verify_with_the_public_key() {
        let signer = TokenSigner::new().unwrap();
        let token = signer.token("default", "reviews", "reviews-v1-a", TOKEN_AUDIENCE).unwrap();
        let key = DecodingKey::from_ec_pem(signer.public_key().as_bytes()).unwrap();
        let mut validation = Validation::new(Algorithm::ES256);
        validation.set_audience(&[TOKEN_AUDIENCE]);
        let claims = jsonwebtoken::decode::<serde_json::Value>(&token, &key, &validation).unwrap().claims;
        assert_eq!(claims["sub"], "system:serviceaccount:default:reviews");
        assert_eq!(claims["kubernetes.io"]["serviceaccount"]["name"], "reviews");
    }
}
