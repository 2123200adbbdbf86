//! Service account tokens: JWTs with Kubernetes' claims (RFC 7519, RFC 7515), verified offline.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, EncodingKey, Header, Validation, errors::ErrorKind};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde::{Deserialize, Serialize};

use crate::{Error, jwks::KeySet};

/// Issuer name in tokens.
pub const ISSUER: &str = "kubernetes/serviceaccount";
/// Maximum length of a token, in bytes.
const MAX_LENGTH: usize = 16 * 1024;

/// Service account of a token.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServiceAccount {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Pod to which the token is bound, if any.
    pub pod: Option<BoundPod>,
}

/// Pod to which a token is bound, in the namespace of its service account.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BoundPod {
    /// Name.
    pub name: String,
    /// UID, which distinguishes pods of the same name; empty if the token does not contain it.
    pub uid: String,
}

#[derive(Serialize, Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    /// One audience or several, checked separately (RFC 7519, section 4.1.3).
    aud: serde_json::Value,
    iat: u64,
    exp: u64,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Serialize, Deserialize)]
struct Kubernetes {
    namespace: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pod: Option<NamedPod>,
    serviceaccount: Named,
}

#[derive(Serialize, Deserialize)]
struct Named {
    name: String,
}

#[derive(Serialize, Deserialize)]
struct NamedPod {
    name: String,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    uid: String,
}

/// Issues tokens.
pub struct Issuer {
    signing: EncodingKey,
    public_pem: String,
    private_pem: String,
}

impl Issuer {
    /// Returns an issuer with a new key.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub fn generate() -> Result<Self, Error> {
        let key =
            KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|error| Error::Key(error.to_string()))?;
        Self::from_pem(&key.serialize_pem())
    }

    /// Returns an issuer with the key of a PEM text (PKCS #8, EC P-256).
    ///
    /// # Errors
    /// The text is not such a key.
    pub fn from_pem(private_pem: &str) -> Result<Self, Error> {
        let key = KeyPair::from_pem_and_sign_algo(private_pem, &PKCS_ECDSA_P256_SHA256)
            .map_err(|error| Error::Key(error.to_string()))?;
        let signing = EncodingKey::from_ec_pem(private_pem.as_bytes())
            .map_err(|error| Error::Key(error.to_string()))?;
        Ok(Self { signing, public_pem: key.public_key_pem(), private_pem: key.serialize_pem() })
    }

    /// Returns the public key for [`Verifier::from_pem`].
    pub fn public_pem(&self) -> &str {
        &self.public_pem
    }

    /// Returns the private key for [`Self::from_pem`].
    pub fn private_pem(&self) -> &str {
        &self.private_pem
    }

    /// Issues a token for an audience, valid from now.
    ///
    /// # Errors
    /// The key cannot sign.
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

/// Returns claims that are valid from now.
fn claims(account: &ServiceAccount, audience: &str, lifetime: Duration) -> Claims {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    Claims {
        iss: ISSUER.into(),
        sub: format!("system:serviceaccount:{}:{}", account.namespace, account.name),
        aud: vec![audience].into(),
        iat: now,
        exp: now + lifetime.as_secs(),
        kubernetes: Kubernetes {
            namespace: account.namespace.clone(),
            pod: account.pod.clone().map(|BoundPod { name, uid }| NamedPod { name, uid }),
            serviceaccount: Named { name: account.name.clone() },
        },
    }
}

/// Verifies tokens for one audience.
pub struct Verifier {
    keys: KeySet,
    validation: Validation,
}

impl Verifier {
    /// Returns a verifier with the keys of issuers whose name in tokens is one of `issuers`. Symmetric keys are
    /// not used.
    pub fn new(keys: KeySet, audience: &str, issuers: &[impl ToString]) -> Self {
        let mut validation = Validation::default();
        validation.set_audience(&[audience]);
        validation.set_issuer(issuers);
        validation.validate_nbf = true;
        validation.set_required_spec_claims(&["exp", "aud", "iss", "sub"]);
        Self { keys: keys.without_secrets(), validation }
    }

    /// Returns a verifier with one issuer's public key (PEM), for tokens of [`ISSUER`].
    ///
    /// # Errors
    /// The text is not such a key.
    pub fn from_pem(public_pem: &[u8], audience: &str) -> Result<Self, Error> {
        Ok(Self::new(KeySet::of_pem(public_pem)?, audience, &[ISSUER]))
    }

    /// Verifies signature, issuer, audience, validity and form.
    ///
    /// # Errors
    /// One of the checks fails.
    pub fn verify(&self, token: &str) -> Result<ServiceAccount, Error> {
        let refused = |why: String| Error::Token(why);
        if token.len() > MAX_LENGTH {
            return Err(refused(format!("it has {} bytes; the maximum is {MAX_LENGTH}", token.len())));
        }
        let header = jsonwebtoken::decode_header(token).map_err(|error| refused(error.to_string()))?;
        let mut validation = self.validation.clone();
        validation.algorithms = vec![header.alg];
        if let Some(names) = &header.crit {
            // RFC 7515, section 4.1.11: a verifier must refuse critical extensions that it does not support.
            return Err(refused(format!("it has critical extensions, {names:?}, and none is supported")));
        }
        let kid = header.kid.as_deref();
        let mut why = format!(
            "no known key has the ID {:?} and the algorithm {:?}",
            kid.unwrap_or_default(),
            header.alg
        );
        for key in self.keys.fitting(kid, header.alg) {
            match jsonwebtoken::decode::<Claims>(token, &key.key, &validation) {
                Ok(good) => return account(good.claims),
                Err(error) if *error.kind() == ErrorKind::InvalidSignature => why = error.to_string(),
                Err(error) => return Err(refused(error.to_string())),
            }
        }
        Err(refused(why))
    }
}

fn account(claims: Claims) -> Result<ServiceAccount, Error> {
    let Kubernetes { namespace, pod, serviceaccount: Named { name } } = claims.kubernetes;
    if claims.sub != format!("system:serviceaccount:{namespace}:{name}") {
        return Err(Error::Token(format!("subject {:?} is not {namespace}/{name}", claims.sub)));
    }
    Ok(ServiceAccount { namespace, name, pod: pod.map(|NamedPod { name, uid }| BoundPod { name, uid }) })
}

#[cfg(test)]
mod tests {
    use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_are_accepted_by_their_audience_only() {
        let issuer = Issuer::generate().unwrap();
        let again = Issuer::from_pem(issuer.private_pem()).unwrap();
        assert_eq!(again.public_pem(), issuer.public_pem());
        let account = ServiceAccount {
            namespace: "default".into(),
            name: "reviews".into(),
            pod: Some(BoundPod { name: "reviews-1".into(), uid: "5c1b0ad9".into() }),
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
    #[test]
    fn keys_of_a_set_are_selected_by_id() {
        // In the form of an API server's /openid/v1/jwks.
        let issuers = [Issuer::generate().unwrap(), Issuer::generate().unwrap(), Issuer::generate().unwrap()];
        let jwk = |issuer: &Issuer, kid: &str| {
            let key = KeyPair::from_pem(issuer.private_pem()).unwrap();
            let point = rcgen::PublicKeyData::der_bytes(&key);
            let text = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
            json!({ "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": kid,
                    "x": text(&point[1..33]), "y": text(&point[33..]) })
        };
        let mut other = jwk(&issuers[2], "encrypts");
        other["use"] = "enc".into();
        let mut signs = jwk(&issuers[2], "signs");
        signs["key_ops"] = json!(["sign"]);
        let secret = json!({ "kty": "oct", "kid": "shared", "k": BASE64_URL_SAFE_NO_PAD.encode([7; 32]) });
        let set = json!({ "keys": [jwk(&issuers[0], "old"), jwk(&issuers[1], "new"), other, signs, secret, { "kty": "?" }] });
        let keys = KeySet::parse(set.to_string().as_bytes()).unwrap();
        let url = "https://kubernetes.default.svc.cluster.local";
        let verifier = Verifier::new(keys, "istio-ca", &[url]);

        let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod: None };
        let minute = Duration::from_secs(60);
        let mut claims = serde_json::to_value(claims(&account, "istio-ca", minute)).unwrap();
        let sign = |claims: &serde_json::Value, issuer: &Issuer, kid: Option<&str>| {
            let header = Header { kid: kid.map(str::to_owned), ..Header::new(Algorithm::ES256) };
            jsonwebtoken::encode(&header, claims, &issuer.signing).unwrap()
        };
        let verify = |token: &str| verifier.verify(token).map_err(|error| error.to_string());
        assert!(verify(&sign(&claims, &issuers[1], Some("new"))).unwrap_err().contains("InvalidIssuer"));
        claims["iss"] = url.into();
        for (issuer, kid) in [(0, Some("old")), (1, Some("new")), (1, None)] {
            assert_eq!(verify(&sign(&claims, &issuers[issuer], kid)).unwrap(), account, "{kid:?}");
        }
        for (issuer, kid, words) in [
            (0, Some("new"), "InvalidSignature"),
            (1, Some("gone"), "no known key has the ID \"gone\""),
            (2, None, "InvalidSignature"),
            (2, Some("encrypts"), "no known key has the ID"),
            (2, Some("signs"), "no known key has the ID"),
        ] {
            let why = verify(&sign(&claims, &issuers[issuer], kid)).unwrap_err();
            assert!(why.contains(words), "{kid:?}: {why}");
        }
        let mut one = claims.clone();
        one["aud"] = "istio-ca".into();
        assert_eq!(
            verify(&sign(&one, &issuers[0], Some("old"))).unwrap(),
            account,
            "an audience need be no list"
        );
        let header = Header { crit: Some(vec!["x".into()]), ..Header::new(Algorithm::ES256) };
        let critical = jsonwebtoken::encode(&header, &claims, &issuers[0].signing).unwrap();
        assert!(verify(&critical).unwrap_err().contains("critical"));
        let header = Header { kid: Some("shared".into()), ..Header::new(Algorithm::HS256) };
        let shared = jsonwebtoken::encode(&header, &claims, &EncodingKey::from_secret(&[7; 32])).unwrap();
        assert!(verify(&shared).unwrap_err().contains("no known key"), "a verifier could have signed it");
        for (claim, value, words) in [
            ("aud", json!(["other"]), "InvalidAudience"),
            ("exp", json!(1), "ExpiredSignature"),
            ("exp", json!(null), ""),
            ("sub", json!("system:serviceaccount:prod:reviews"), "is not default/reviews"),
        ] {
            let mut claims = claims.clone();
            claims[claim] = value;
            let why = verify(&sign(&claims, &issuers[0], Some("old"))).unwrap_err();
            assert!(why.contains(words), "{claim}: {why}");
        }
        assert!(verify(&"x".repeat(MAX_LENGTH + 1)).unwrap_err().contains("the maximum is"));
    }
}
