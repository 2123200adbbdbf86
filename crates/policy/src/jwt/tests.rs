use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use jsonwebtoken::{EncodingKey, Header, encode, jwk};
use proptest::prelude::*;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, RsaKeySize};
use serde_json::json;

use super::*;

fn sign(algorithm: Algorithm, key: &EncodingKey, claims: &Value) -> String {
    encode(&Header::new(algorithm), claims, key).unwrap()
}

fn keys(jwk: &Value) -> KeySet {
    KeySet::parse(json!({ "keys": [jwk] }).to_string().as_bytes()).unwrap()
}

#[test]
fn signatures_of_all_algorithms_are_checked() {
    let claims = json!({"iss": "a"});
    let p256 = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let p384 = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
    let ed = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    let rsa = KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap();
    let point = |pair: &KeyPair, curve: &str| {
        let (x, y) = pair.public_key_raw()[1..].split_at((pair.public_key_raw().len() - 1) / 2);
        json!({"kty": "EC", "crv": curve, "x": BASE64.encode(x), "y": BASE64.encode(y)})
    };
    let ec = |pair: &KeyPair| EncodingKey::from_ec_der(pair.serialized_der());
    let of_rsa = EncodingKey::from_rsa_pem(rsa.serialize_pem().as_bytes()).unwrap();
    let okp = json!({"kty": "OKP", "crv": "Ed25519", "x": BASE64.encode(ed.public_key_raw())});
    let with_rsa =
        serde_json::to_value(jwk::Jwk::from_encoding_key(&of_rsa, Algorithm::RS256).unwrap()).unwrap();
    let any_rsa = json!({"kty": "RSA", "n": with_rsa["n"], "e": with_rsa["e"]});
    let cases = [
        (Algorithm::ES256, ec(&p256), point(&p256, "P-256")),
        (Algorithm::ES384, ec(&p384), point(&p384, "P-384")),
        (Algorithm::EdDSA, EncodingKey::from_ed_der(ed.serialized_der()), okp),
        (Algorithm::RS256, of_rsa.clone(), any_rsa.clone()),
        (Algorithm::RS512, of_rsa.clone(), any_rsa.clone()),
        (Algorithm::PS384, of_rsa.clone(), any_rsa),
    ];
    for (algorithm, signing, jwk) in &cases {
        let text = sign(*algorithm, signing, &claims);
        let keys = keys(jwk);
        assert_eq!(Token::parse(&text).unwrap().verify(&text, &keys), Ok(()), "{algorithm:?}");
        let other = text.replace('.', ".e");
        if let Ok(token) = Token::parse(&other) {
            assert_eq!(token.verify(&other, &keys), Err(Status::Forged), "{algorithm:?}");
        }
        for (of_other, _, jwk) in &cases {
            if of_other != algorithm && jwk["crv"].is_string() {
                let verdict = Token::parse(&text).unwrap().verify(&text, &self::keys(jwk));
                assert_eq!(verdict, Err(Status::NoSuchKey), "{algorithm:?} with a key for {of_other:?}");
            }
        }
    }
    // A key with a declared use verifies nothing else.
    let text = sign(Algorithm::RS512, &of_rsa, &claims);
    assert_eq!(Token::parse(&text).unwrap().verify(&text, &keys(&with_rsa)), Err(Status::NoSuchKey));
}

#[test]
fn a_public_key_is_no_hmac_secret() {
    let pair = KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap();
    let signing = EncodingKey::from_rsa_pem(pair.serialize_pem().as_bytes()).unwrap();
    let jwk = serde_json::to_value(jwk::Jwk::from_encoding_key(&signing, Algorithm::RS256).unwrap()).unwrap();
    let text = sign(Algorithm::HS256, &EncodingKey::from_secret(pair.public_key_raw()), &json!({"iss": "a"}));
    assert_eq!(Token::parse(&text).unwrap().verify(&text, &keys(&jwk)), Err(Status::NoSuchKey));
}

#[test]
fn invalid_time_claims_are_refused() {
    let text = |claims: Value| {
        format!("{}.{}.AA", BASE64.encode(r#"{"alg":"RS256"}"#), BASE64.encode(claims.to_string()))
    };
    let cases = [
        (json!({"exp": 5}), Ok(Some(5))),
        (json!({"exp": 5.9}), Ok(Some(5))),
        (json!({"exp": 1.0e9}), Ok(Some(1_000_000_000))),
        (json!({"exp": 0}), Ok(None)),
        (json!({}), Ok(None)),
        (json!({"exp": -5}), Err(Status::BadEnd)),
        (json!({"exp": 1e30}), Err(Status::BadEnd)),
        (json!({"exp": "5"}), Err(Status::BadEnd)),
        (json!({"nbf": "5"}), Err(Status::BadStart)),
        (json!({"sub": 5}), Err(Status::BadSubject)),
        (json!({"iss": 5}), Err(Status::BadIssuer)),
        (json!({"aud": [5]}), Err(Status::BadAudience)),
    ];
    for (claims, expected) in cases {
        let text = text(claims.clone());
        assert_eq!(Token::parse(&text).map(|token| token.until), expected, "{claims}");
    }
}

#[test]
fn tokens_are_found_and_removed() {
    let mut head = RequestHead::build("GET", "/?access%5Ftoken=a%2Eb&x=1&access_token=c", "h", &[]);
    assert_eq!(param(head.query().unwrap(), "access_token").as_deref(), Some("a.b,c"));
    assert_eq!(param(head.query().unwrap(), "x").as_deref(), Some("1"));
    remove_param(&mut head, "access_token");
    assert_eq!(head.path(), "/?x=1");
    remove_param(&mut head, "x");
    assert_eq!(head.path(), "/");
    assert_eq!(plain("%4%zz%41%"), "%4%zzA%");
}

#[test]
fn two_tokens_in_one_place_are_invalid() {
    let text = format!("{}.{}.AA", BASE64.encode(r#"{"alg":"RS256"}"#), BASE64.encode("{}"));
    assert!(Token::parse(&text).is_ok());
    let head = RequestHead::build("GET", "/", "h", &[("cookie", &format!("t={text}; a=b; t={text}"))]);
    let twice = joined(head.cookies("t")).unwrap();
    let query = format!("t={text}&t={text}");
    for twice in [twice.into_owned(), param(&query, "t").unwrap()] {
        assert_eq!(twice, format!("{text},{text}"));
        assert_eq!(Token::parse(&twice).map(|_| ()), Err(Status::BadFormat));
    }
}

#[test]
fn verdicts_name_the_values_that_decide() {
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let (x, y) = pair.public_key_raw()[1..].split_at((pair.public_key_raw().len() - 1) / 2);
    let key = json!({"kty": "EC", "crv": "P-256", "kid": "k", "x": BASE64.encode(x), "y": BASE64.encode(y)});
    let provider = JwtProvider {
        name: "p".into(),
        issuer: Some("a".into()),
        audiences: vec!["shop".into()],
        keys: Keys::Local(Arc::new(keys(&key))),
        forward: true,
        from: vec![Source::Header("authorization".into(), "Bearer ".into())],
        payload_in_metadata: None,
        header_in_metadata: None,
        spaced_claims: vec![],
        payload_header: None,
        pad_payload_header: false,
        claim_headers: vec![],
        clock_skew: std::time::Duration::from_secs(60),
        clear_route: false,
    };
    let jwt = Jwt {
        fingerprint: 0,
        providers: vec![provider],
        rules: vec![],
        named: vec![],
        bypass_preflight: false,
    };
    let verdict = |claims: &Value, assumed: &[usize]| {
        let text = sign(Algorithm::ES256, &EncodingKey::from_ec_der(pair.serialized_der()), claims);
        let head = RequestHead::build("GET", "/", "h", &[("authorization", &format!("Bearer {text}x"))]);
        let signed = RequestHead::build("GET", "/", "h", &[("authorization", &format!("Bearer {text}"))]);
        let of = |head| verdicts(&jwt, head, 1_000_000, assumed).remove(0);
        (of(&signed), of(&head))
    };
    let good = json!({"iss": "a", "aud": "shop", "exp": 2_000_000});
    let (valid, forged) = verdict(&good, &[]);
    assert_eq!((valid.refused, valid.place.as_str(), &valid.claims), (None, "header authorization", &good));
    assert!(forged.refused.unwrap_or_default().starts_with("Jwt"), "a changed signature");
    let (assumed, _) = verdict(&good, &[0]);
    assert!(assumed.is_assumed && assumed.refused.is_none());
    for (claims, reason) in [
        (json!({"iss": "b", "aud": "shop"}), "issuer b, expected: a"),
        (json!({"iss": "a", "aud": "x"}), "Audiences in Jwt are not allowed: aud is \"x\", expected: shop"),
        (json!({"iss": "a", "aud": "shop", "exp": 86_400}), "Jwt is expired: exp is 1970-01-02T00:00:00Z"),
        (
            json!({"iss": "a", "aud": "shop", "nbf": 1_728_000}),
            "Jwt not yet valid: nbf is 1970-01-21T00:00:00Z",
        ),
    ] {
        assert_eq!(verdict(&claims, &[]).0.refused.as_deref(), Some(reason));
    }
}

#[test]
fn claims_become_headers_and_lists() {
    let cases = [
        (json!("a"), Some("a")),
        (json!(5), Some("5")),
        (json!(true), Some("true")),
        (json!(null), None),
        (json!(["a"]), Some("WyJhIl0=")),
    ];
    for (claim, text) in cases {
        assert_eq!(claim_text(&claim).as_deref(), text, "{claim}");
    }
    let claims = listed(json!({"scope": "a  b", "sub": "a b"}), &["scope".into()]);
    assert_eq!(claims, json!({"scope": ["a", "b"], "sub": "a b"}));
}

proptest! {
    #[test]
    fn any_token_is_handled(text in "[A-Za-z0-9_.=-]{0,80}", head in ".{0,40}", query in ".{0,40}") {
        let _ = Token::parse(&text);
        let _ = Token::parse(&format!("{}.{}.AA", BASE64.encode(&head), BASE64.encode(&query)));
        let _ = plain(&query);
        let _ = param(&query, "a");
        let _ = KeySet::parse(head.as_bytes());
        let head = RequestHead::build("GET", "/", "h", &[("cookie", &head.replace(char::is_control, ""))]);
        let _ = head.cookie("a");
    }
}
