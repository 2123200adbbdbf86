//! Tokens in requests: only a signed token for this audience that is valid now is accepted.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use jsonwebtoken::{Algorithm, EncodingKey, crypto};
use serde_json::{Map, Value};
use skysail_http::{
    head::RequestHead,
    http1::{HeadLimits, parse},
};
use skysail_policy::{
    config::jwt::{Jwt, JwtProvider, KeySet, Keys, Requirement, Source},
    jwt::{JwtOutcome, apply, check, sanitize},
};

/// Time of the requests, in seconds since 1970.
const NOW: u64 = 1_000_000_000;

/// `secret` as a key.
const KEYS: &[u8] = br#"{"keys": [{"kty": "oct", "kid": "k", "k": "c2VjcmV0"}]}"#;

static JWT: LazyLock<Jwt> = LazyLock::new(|| Jwt {
    fingerprint: 0,
    providers: vec![JwtProvider {
        name: "p".into(),
        issuer: Some("a".into()),
        audiences: vec!["b".into()],
        keys: Keys::Local(Arc::new(KeySet::parse(KEYS).unwrap_or_else(|error| panic!("the keys: {error}")))),
        forward: false,
        from: vec![
            Source::Header("authorization".into(), "Bearer ".into()),
            Source::Param("t".into()),
            Source::Cookie("t".into()),
        ],
        payload_in_metadata: Some("p".into()),
        header_in_metadata: Some("h".into()),
        spaced_claims: vec!["scope".into()],
        payload_header: Some("x-payload".into()),
        pad_payload_header: true,
        claim_headers: vec![("x-claim".into(), vec!["c".into(), "d".into()])],
        clock_skew: Duration::ZERO,
        clear_route: false,
    }],
    rules: Vec::new(),
    named: Vec::new(),
    bypass_preflight: false,
});

/// Sends a token; the first byte determines its place. The rest is the token, or a header and claims on one
/// line each, which are signed.
pub fn jwt(data: &[u8]) {
    let [place, rest @ ..] = data else { return };
    let signed = rest.iter().position(|byte| *byte == b'\n').map(|at| (&rest[..at], &rest[at + 1..]));
    let signed = signed.filter(|_| *place >= 3);
    let token = signed.map_or_else(|| rest.to_vec(), |(header, claims)| sign(header, claims));
    let Some(mut head) = request(*place, &token) else { return };
    sanitize(&JWT, &mut head);
    match check(&JWT, &Requirement::Provider(0, None), &head, NOW, (&[], &[])) {
        JwtOutcome::NeedsKeys(_) => panic!("they are here"),
        JwtOutcome::Refused(status) => assert!(matches!(status.http(), 401 | 403)),
        JwtOutcome::Pass(good) => {
            let (header, claims) = signed.unwrap_or_else(|| panic!("the token is not signed: {head:?}"));
            let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap_or_default();
            let (header, claims) = (read(header), read(claims));
            assert_eq!(header["alg"], "HS256");
            assert_eq!(claims["iss"], "a");
            assert!(claims["exp"].as_f64().is_none_or(|end| end < 1.0 || end >= NOW as f64), "{claims}");
            assert!(claims["nbf"].as_f64().is_none_or(|start| start < NOW as f64 + 1.0), "{claims}");
            let mut metadata = Map::new();
            apply(good, &mut head, &mut metadata);
            assert_eq!(metadata["h"], header);
            assert!(head.header("x-payload").is_some() && head.header("authorization").is_none());
            assert!(!head.path().contains("t="), "{head:?}");
            let line = |value: &[u8]| value.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0));
            assert!(!head.header_values("x-claim").any(line), "{head:?}");
        }
    }
}

fn sign(header: &[u8], claims: &[u8]) -> Vec<u8> {
    let text = format!("{}.{}", BASE64.encode(header), BASE64.encode(claims));
    let signature = crypto::sign(text.as_bytes(), &EncodingKey::from_secret(b"secret"), Algorithm::HS256);
    format!("{text}.{}", signature.unwrap_or_else(|error| panic!("to sign: {error}"))).into_bytes()
}

/// Returns a request with this token; `None` if the place does not allow it.
fn request(place: u8, token: &[u8]) -> Option<RequestHead> {
    let before = match place % 3 {
        0 => &b"GET / HTTP/1.1\r\nhost: a\r\nauthorization: Bearer "[..],
        1 => b"GET / HTTP/1.1\r\nhost: a\r\ncookie: u=v; t=",
        _ => b"GET /?u=v&t=",
    };
    let after = if place % 3 == 2 { &b" HTTP/1.1\r\nhost: a\r\n\r\n"[..] } else { b"\r\n\r\n" };
    let (mut head, limits) =
        (RequestHead::default(), HeadLimits { max_head: 16 << 10, max_headers: 20, keep_case: false });
    parse::request(&[before, token, after].concat(), &limits, &mut head).ok()?;
    Some(head)
}
