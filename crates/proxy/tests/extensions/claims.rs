//! Route matches on dynamic metadata: Istio's `@request.auth.claims`.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::{Value, json};

use crate::{ask, bootstrap, either::Either, files};

/// Matches a claim.
fn claim(path: &[&str], value: &Value, invert: bool) -> Value {
    let keys = ["payload"].iter().chain(path).map(|key| json!({"key": key}));
    json!([{
        "filter": "envoy.filters.http.jwt_authn", "path": keys.collect::<Vec<_>>(), "value": value, "invert": invert
    }])
}

fn answer(name: &str, metadata: &Value) -> Value {
    json!({
        "match": {"prefix": "/", "dynamic_metadata": metadata},
        "direct_response": {"status": 200, "body": {"inline_string": name}}
    })
}

#[tokio::test]
async fn claims_select_the_route() {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let (x, y) = key.public_key_raw()[1..].split_at(32);
    let keys = json!({"keys": [{
        "kty": "EC", "crv": "P-256", "alg": "ES256", "kid": "1", "x": BASE64.encode(x), "y": BASE64.encode(y)}]});
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let token = |more: Value| {
        let claims = files::with(json!({"iss": "one", "sub": "me", "exp": now + 900}), &more);
        let header = Header { kid: Some("1".to_owned()), ..Header::new(Algorithm::ES256) };
        encode(&header, &claims, &EncodingKey::from_ec_der(key.serialized_der())).unwrap()
    };
    let jwt = |clear: bool| {
        let provider = json!({
            "issuer": "one", "local_jwks": {"inline_string": keys.to_string()}, "forward": true,
            "payload_in_metadata": "payload", "clear_route_cache": clear
        });
        let requires =
            json!({"requires_any": {"requirements": [{"provider_name": "p"}, {"allow_missing": {}}]}});
        let rules = json!([{"match": {"prefix": "/"}, "requires": requires}]);
        let config = json!({"providers": {"p": provider}, "rules": rules});
        files::filter("http.jwt_authn.v3.JwtAuthentication", &config)
    };
    let exact = |text: &str| json!({"string_match": {"exact": text}});
    let routes = json!([
        answer("group", &claim(&["groups"], &json!({"list_match": {"one_of": exact("admin")}}), false)),
        answer("nested", &claim(&["a", "b"], &exact("c"), false)),
        answer("not me", &claim(&["sub"], &exact("me"), true)),
        answer("other", &json!([])),
    ]);
    let listeners = [
        files::listener("clear", &[files::http(&[jwt(true)], &routes, &json!({}))]),
        files::listener("keep", &[files::http(&[jwt(false)], &routes, &json!({}))]),
    ];
    for proxy in Either::both(&bootstrap(&listeners, &[])).await {
        for (more, expected) in [
            (Some(json!({"groups": ["user", "admin"]})), "group"),
            (Some(json!({"groups": ["user"], "a": {"b": "c"}})), "nested"),
            (Some(json!({"a": {"b": "d"}})), "other"),
            (Some(json!({"sub": "you"})), "not me"),
            // Without a token there are no metadata, which an inverted match accepts.
            (None, "not me"),
        ] {
            let field =
                more.as_ref().map(|more| format!("authorization: Bearer {}\r\n", token(more.clone())));
            let request = format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", field.unwrap_or_default());
            let (head, body) = ask(proxy.listener("clear").await, &request).await;
            assert_eq!(body, expected, "{more:?} {head}");
            // Without `clear_route_cache`, the route is selected before the token is verified.
            assert_eq!(ask(proxy.listener("keep").await, &request).await.1, "not me");
        }
    }
}
