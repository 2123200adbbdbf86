//! Service account tokens: ES256 JWTs with Kubernetes' claims (RFC 7519, RFC 7515).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde::{Deserialize, Serialize};

use crate::Error;

/// The issuer's name in tokens.
pub const ISSUER: &str = "kubernetes/serviceaccount";

/// Whom a token speaks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceAccount {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The pod the token was given to, if the token says so.
    pub pod: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    aud: Vec<String>,
    iat: u64,
    exp: u64,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Serialize, Deserialize)]
struct Kubernetes {
    namespace: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pod: Option<Named>,
    serviceaccount: Named,
}

#[derive(Serialize, Deserialize)]
struct Named {
    name: String,
}

/// Issues tokens.
pub struct Issuer {
    signing: EncodingKey,
    public_pem: String,
    private_pem: String,
}

impl Issuer {
    /// An issuer with a new key.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn generate() -> Result<Self, Error> {
        let key =
            KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| Error::Key(error.to_string()))?;
        Self::from_pem(&key.serialize_pem())
    }

    /// An issuer with the key of a PEM text (PKCS #8, EC P-256).
    ///
    /// # Errors
    /// When it is no such key.
    pub fn from_pem(private_pem: &str) -> Result<Self, Error> {
        let key = KeyPair::from_pem_and_sign_algo(private_pem, &PKCS_ECDSA_P256_SHA256)
            .map_err(|error| Error::Key(error.to_string()))?;
        let signing = EncodingKey::from_ec_pem(private_pem.as_bytes())
            .map_err(|error| Error::Key(error.to_string()))?;
        Ok(Self { signing, public_pem: key.public_key_pem(), private_pem: key.serialize_pem() })
    }

    /// The public key for [`Verifier::from_pem`].
    pub fn public_pem(&self) -> &str {
        &self.public_pem
    }

    /// The private key for [`Self::from_pem`].
    pub fn private_pem(&self) -> &str {
        &self.private_pem
    }

    /// Issues a token for an audience, valid from now.
    ///
    /// # Errors
    /// When the key cannot sign.
    pub fn issue(
        &self,
        account: &ServiceAccount,
        audience: &str,
        lifetime: Duration,
    ) -> Result<String, Error> {
        self.sign(&claims(account, audience, lifetime))
    }

    fn sign(&self, claims: &impl Serialize) -> Result<String, Error> {
        jsonwebtoken::encode(&Header::new(Algorithm::ES256), claims, &self.signing)
            .map_err(|error| Error::Token(error.to_string()))
    }
}

/// Valid from now.
fn claims(account: &ServiceAccount, audience: &str, lifetime: Duration) -> Claims {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Claims {
        iss: ISSUER.into(),
        sub: format!("system:serviceaccount:{}:{}", account.namespace, account.name),
        aud: vec![audience.into()],
        iat: now,
        exp: now + lifetime.as_secs(),
        kubernetes: Kubernetes {
            namespace: account.namespace.clone(),
            pod: account.pod.clone().map(|name| Named { name }),
            serviceaccount: Named { name: account.name.clone() },
        },
    }
}

/// Verifies tokens of one issuer for one audience.
pub struct Verifier {
    key: DecodingKey,
    validation: Validation,
}

impl Verifier {
    /// A verifier with an issuer's public key (PEM, EC P-256).
    ///
    /// # Errors
    /// When it is no such key.
    pub fn from_pem(public_pem: &[u8], audience: &str) -> Result<Self, Error> {
        let key = DecodingKey::from_ec_pem(public_pem).map_err(|error| Error::Key(error.to_string()))?;
        let mut validation = Validation::new(Algorithm::ES256);
        validation.set_audience(&[audience]);
        validation.set_issuer(&[ISSUER]);
        validation.validate_nbf = true;
        validation.set_required_spec_claims(&["exp", "aud", "iss", "sub"]);
        Ok(Self { key, validation })
    }

    /// Checks signature, issuer, audience, time and form.
    ///
    /// # Errors
    /// When any of them is not right.
    pub fn verify(&self, token: &str) -> Result<ServiceAccount, Error> {
        let claims = jsonwebtoken::decode::<Claims>(token, &self.key, &self.validation)
            .map_err(|error| Error::Token(error.to_string()))?
            .claims;
        let Kubernetes { namespace, pod, serviceaccount: Named { name } } = claims.kubernetes;
        if claims.sub != format!("system:serviceaccount:{namespace}:{name}") {
            return Err(Error::Token(format!("subject {:?} is not {namespace}/{name}", claims.sub)));
        }
        Ok(ServiceAccount { namespace, name, pod: pod.map(|pod| pod.name) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_accepted_by_their_audience_only() {
        let issuer = Issuer::generate().unwrap();
        let again = Issuer::from_pem(issuer.private_pem()).unwrap();
        assert_eq!(again.public_pem(), issuer.public_pem());
        let account = ServiceAccount {
            namespace: "default".into(),
            name: "reviews".into(),
            pod: Some("reviews-1".into()),
        };
        let token = again.issue(&account, "istio-ca", Duration::from_secs(60)).unwrap();

        let verifier = Verifier::from_pem(issuer.public_pem().as_bytes(), "istio-ca").unwrap();
        assert_eq!(verifier.verify(&token).unwrap(), account);

        let other = Verifier::from_pem(issuer.public_pem().as_bytes(), "other").unwrap();
        assert!(other.verify(&token).is_err());
        let stranger =
            Issuer::generate().unwrap().issue(&account, "istio-ca", Duration::from_secs(60)).unwrap();
        assert!(verifier.verify(&stranger).is_err());
        assert!(verifier.verify("not.a.token").is_err());
        let minute = claims(&account, "istio-ca", Duration::from_secs(60));
        let mut early = serde_json::to_value(minute).unwrap();
        assert!(verifier.verify(&issuer.sign(&early).unwrap()).is_ok());
        early["nbf"] = (early["exp"].as_u64().unwrap() + 3600).into();
        assert!(verifier.verify(&issuer.sign(&early).unwrap()).is_err(), "it is not valid yet");
        let mut forged = token.into_bytes();
        let middle = forged.len() / 2;
        forged[middle] ^= 1;
        assert!(verifier.verify(&String::from_utf8_lossy(&forged)).is_err());
    }
}
