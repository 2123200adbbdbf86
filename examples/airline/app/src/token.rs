//! Tokens: JWT with HS256. Only `auth` issues them. `customer`, `flight` and `booking` verify signature, issuer and
//! expiry.

use std::{
    str::FromStr,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::{Deserialize, Serialize};

use crate::service::Failure;

const ISSUER: &str = "airline-auth";
const LIFETIME_SECONDS: u64 = 3600;

/// Shared secret. Cheap to clone; never printed.
#[derive(Clone)]
pub(crate) struct Key(Arc<(EncodingKey, DecodingKey)>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl FromStr for Key {
    type Err = &'static str;

    fn from_str(secret: &str) -> Result<Self, Self::Err> {
        // RFC 7518 section 3.2: a key at least as long as the hash.
        if secret.len() < 32 {
            return Err("the key of HS256 needs at least 32 bytes");
        }
        let secret = secret.as_bytes();
        Ok(Self(Arc::new((EncodingKey::from_secret(secret), DecodingKey::from_secret(secret)))))
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Claims {
    iss: String,
    sub: String,
    iat: u64,
    exp: u64,
}

impl Key {
    /// Returns a token for this customer, valid for one hour.
    pub(crate) fn sign(&self, customer: &str) -> Result<String, Failure> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let claims = Claims {
            iss: ISSUER.to_owned(),
            sub: customer.to_owned(),
            iat: now,
            exp: now + LIFETIME_SECONDS,
        };
        jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &self.0.0)
            .map_err(|error| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot sign: {error}")))
    }

    /// Returns the customer named in the request's token.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<String, Failure> {
        let refuse = |why: String| Failure::new(StatusCode::UNAUTHORIZED, why);
        let token = headers
            .get(AUTHORIZATION)
            .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "))
            .ok_or_else(|| refuse("no bearer token; log in at /auth/login first".to_owned()))?;
        let mut rules = Validation::new(Algorithm::HS256);
        rules.set_issuer(&[ISSUER]);
        rules.set_required_spec_claims(&["exp", "iss", "sub"]);
        let data = jsonwebtoken::decode::<Claims>(token, &self.0.1, &rules)
            .map_err(|error| refuse(format!("invalid token: {error}")))?;
        Ok(data.claims.sub)
    }

    /// Refuses a caller that requests the data of another customer.
    pub(crate) fn caller_is(&self, headers: &HeaderMap, customer: &str) -> Result<(), Failure> {
        let caller = self.caller(headers)?;
        if caller == customer {
            return Ok(());
        }
        Err(Failure::new(StatusCode::FORBIDDEN, format!("{caller} may not act for {customer}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bearer(token: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, format!("Bearer {token}").parse().unwrap())])
    }

    #[test]
    fn a_token_is_valid_for_its_key_and_customer_only() {
        let key: Key = "0123456789abcdef0123456789abcdef".parse().unwrap();
        let other: Key = "another secret of thirty-two byte".parse().unwrap();
        let headers = bearer(&key.sign("uid1@email.com").unwrap());
        assert_eq!(key.caller(&headers).unwrap(), "uid1@email.com");
        assert!(key.caller_is(&headers, "uid1@email.com").is_ok());
        assert_eq!(key.caller_is(&headers, "uid2@email.com").unwrap_err().status, StatusCode::FORBIDDEN);
        assert_eq!(other.caller(&headers).unwrap_err().status, StatusCode::UNAUTHORIZED);
        assert_eq!(key.caller(&HeaderMap::new()).unwrap_err().status, StatusCode::UNAUTHORIZED);
        assert!("short".parse::<Key>().is_err());
    }

    #[test]
    fn an_unsigned_or_expired_token_is_refused() {
        let key: Key = "0123456789abcdef0123456789abcdef".parse().unwrap();
        // {"alg":"none"} . {"iss":"airline-auth","sub":"uid1@email.com","exp":9999999999} . nothing
        let unsigned = "eyJhbGciOiJub25lIn0.eyJpc3MiOiJhaXJsaW5lLWF1dGgiLCJzdWIiOiJ1aWQxQGVtYWlsLmNvbSIsImV4cCI6OTk5OTk5OTk5OX0.";
        assert!(key.caller(&bearer(unsigned)).is_err());
        let old = Claims { iss: ISSUER.to_owned(), sub: "uid1@email.com".to_owned(), iat: 1, exp: 2 };
        let old = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &old, &key.0.0).unwrap();
        assert!(key.caller(&bearer(&old)).is_err());
    }
}
