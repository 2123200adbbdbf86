//! Valid and invalid tokens of two issuers, and the keys that verify them.

use std::{
    sync::LazyLock,
    time::{SystemTime, UNIX_EPOCH},
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::{Value, json};

pub(crate) struct Tokens {
    /// JWKS of both issuers.
    pub(crate) keys: String,
    /// All values for the place of a token.
    pub(crate) all: Vec<String>,
}

pub(crate) static TOKENS: LazyLock<Tokens> = LazyLock::new(|| {
    let (one, other) = (key(), key());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let claims = |issuer: &str| json!({"iss": issuer, "sub": "me", "aud": ["a", "b"], "exp": now + 9000});
    let with = |name: &str, value: Value| {
        let mut claims = claims("one");
        claims[name] = value;
        claims
    };
    let good = sign(&one, Some("1"), &claims("one"));
    let mut all = vec![
        good.clone(),
        sign(&one, Some("1"), &with("groups", json!(["a", "b"]))),
        sign(&one, Some("1"), &with("scope", "read write".into())),
        sign(&one, None, &with("nested", json!({"role": "a", "number": 5, "is": true}))),
        sign(&one, Some("1"), &with("aud", "https://a/".into())),
        sign(&one, Some("1"), &with("aud", "c".into())),
        sign(&one, Some("1"), &with("exp", (now - 1000).into())),
        sign(&one, Some("1"), &with("exp", (now - 30).into())),
        sign(&one, Some("1"), &with("nbf", (now + 1000).into())),
        sign(&one, Some("1"), &with("iss", "nobody".into())),
        sign(&one, Some("9"), &claims("one")),
        sign(&other, Some("2"), &claims("two")),
        sign(&other, Some("1"), &claims("one")),
        sign(&other, Some("2"), &json!({"sub": "me"})),
        good.replace('.', "_"),
        format!("{good}.x"),
        format!("x{good}"),
        good.trim_end_matches(|c| c != '.').to_owned(),
        "a.b.c".to_owned(),
        String::new(),
    ];
    let unsigned = [json!({"alg": "none"}), json!({}), json!({"alg": "XX99"}), json!([])];
    let part = |value: &Value| BASE64.encode(value.to_string());
    all.extend(unsigned.iter().map(|header| format!("{}.{}.AAAA", part(header), part(&claims("one")))));
    all.push(format!("{}.{}.AAAA", part(&json!({"alg": "ES256"})), BASE64.encode("no")));
    let keys = json!({"keys": [jwk(&one, "1"), jwk(&other, "2"), {"kty": "strange"}]});
    Tokens { keys: keys.to_string(), all }
});

fn key() -> KeyPair {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap()
}

fn sign(key: &KeyPair, id: Option<&str>, claims: &Value) -> String {
    let header = Header { kid: id.map(str::to_owned), ..Header::new(Algorithm::ES256) };
    encode(&header, claims, &EncodingKey::from_ec_der(key.serialized_der())).unwrap()
}

fn jwk(key: &KeyPair, id: &str) -> Value {
    let point = key.public_key_raw();
    let (x, y) = point[1..].split_at(32);
    json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "kid": id, "x": BASE64.encode(x), "y": BASE64.encode(y)})
}
