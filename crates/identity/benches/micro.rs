//! Times of the cryptography of certificates and tokens: what the authority does for a request, and what a peer does in
//! a full handshake. `skysail bench micro` compares them with a baseline.

#![expect(clippy::unwrap_used, reason = "a benchmark fails by panic")]

#[path = "../../../benchmarks/micro.rs"]
mod settings;

use std::{
    hint::black_box,
    time::{Duration, SystemTime},
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use criterion::{BenchmarkId, Criterion};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::json;
use skysail_core::{SpiffeId, names::TOKEN_AUDIENCE};
use skysail_identity::{
    Authority, Csr, Issuer, KeyAndCsr, Live, NameMatch, Peer, PeerCheck, ServiceAccount, Verifier,
    check::Role, jwks::KeySet,
};

const LIFETIME: Duration = Duration::from_hours(24);

fn main() {
    let mut criterion = settings::criterion();
    certificates(&mut criterion);
    tokens(&mut criterion);
    criterion.final_summary();
}

/// The work of the authority for a certificate, and that of a peer that verifies it.
fn certificates(criterion: &mut Criterion) {
    let id = SpiffeId::new("cluster.local", "default", "reviews");
    let authority = Authority::ephemeral().unwrap();
    let request = KeyAndCsr::generate(Some(&id)).unwrap();
    criterion.bench_function("identity/check_request", |bencher| {
        bencher.iter(|| {
            let csr = Csr::from_pem(black_box(&request.csr_pem)).unwrap();
            csr.names_only(&id, &[]).unwrap();
            csr
        });
    });
    let csr = Csr::from_pem(&request.csr_pem).unwrap();
    criterion.bench_function("identity/sign_certificate", |bencher| {
        bencher.iter(|| authority.issue(black_box(&csr), &id, LIFETIME, None).unwrap());
    });

    let signed = authority.issue(&csr, &id, LIFETIME, None).unwrap();
    let identity = request.finish(signed.pem().as_bytes()).unwrap();
    let names = vec![NameMatch::uri(id.to_string())];
    let check = PeerCheck::spiffe(Live::new(authority.roots().unwrap()), names);
    let now = SystemTime::now();
    criterion.bench_function("identity/verify_chain", |bencher| {
        bencher.iter(|| check.verify(black_box(identity.chain()), Role::Client, now).unwrap());
    });
    criterion.bench_function("identity/read_names", |bencher| {
        bencher.iter(|| Peer::from_der(black_box(&identity.chain()[0])).unwrap());
    });
}

/// Tokens of service accounts, and the key sets of issuers.
fn tokens(criterion: &mut Criterion) {
    let issuer = Issuer::generate().unwrap();
    let account = ServiceAccount { namespace: "default".into(), name: "reviews".into(), pod: None };
    let token = issuer.issue(&account, TOKEN_AUDIENCE, LIFETIME).unwrap();
    let verifier = Verifier::from_pem(issuer.public_pem().as_bytes(), TOKEN_AUDIENCE).unwrap();
    criterion.bench_function("identity/verify_token", |bencher| {
        bencher.iter(|| verifier.verify(black_box(&token)).unwrap());
    });

    let mut group = criterion.benchmark_group("identity/parse_key_set");
    for keys in [2, 20] {
        let text = key_set(keys);
        group.bench_with_input(BenchmarkId::from_parameter(keys), &text, |bencher, text| {
            bencher.iter(|| KeySet::parse(black_box(text.as_bytes())).unwrap());
        });
    }
}

/// Returns a JSON Web Key Set with this number of EC keys.
fn key_set(keys: usize) -> String {
    let key = |number: usize| {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        // The first byte says that the point is not compressed.
        let (x, y) = pair.public_key_raw()[1..].split_at(32);
        let [x, y] = [x, y].map(|half| BASE64_URL_SAFE_NO_PAD.encode(half));
        json!({"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": format!("key-{number}"), "x": x, "y": y})
    };
    json!({"keys": (0..keys).map(key).collect::<Vec<_>>()}).to_string()
}
