//! External decisions: JWKS that are fetched, and authorization services for connections and requests.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use files::{bootstrap, cluster, filter, http, listener, to};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode, jwk::Jwk};
use program::Program;
use rcgen::{
    KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PKCS_RSA_SHA256, RsaKeySize,
};
use serde_json::{Value, json};
use skysail_xds::envoy::pb::{
    envoy::service::auth::v3::{
        CheckRequest, CheckResponse,
        authorization_server::{Authorization, AuthorizationServer},
    },
    google::rpc::Status,
};
use support::{Client, echo, server};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response};

async fn status(proxy: SocketAddr, fields: &str) -> (String, String) {
    let mut client = Client::new(TcpStream::connect(proxy).await.unwrap());
    client.send(&format!("GET / HTTP/1.1\r\nhost: a\r\n{fields}connection: close\r\n\r\n")).await;
    let answer = client.rest().await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head[9..12].to_owned(), body.to_owned())
}

/// Returns a new key for this algorithm and a token that it verifies.
fn key_and_token(algorithm: Algorithm) -> (Value, String) {
    let make = |kind| KeyPair::generate_for(kind).unwrap();
    let (pair, curve) = match algorithm {
        Algorithm::ES256 => (make(&PKCS_ECDSA_P256_SHA256), "P-256"),
        Algorithm::ES384 => (make(&PKCS_ECDSA_P384_SHA384), "P-384"),
        Algorithm::EdDSA => (make(&PKCS_ED25519), "Ed25519"),
        _ => (KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048).unwrap(), ""),
    };
    let (signing, key) = match algorithm {
        Algorithm::ES256 | Algorithm::ES384 => {
            let point = &pair.public_key_raw()[1..];
            let (x, y) = point.split_at(point.len() / 2);
            let key = json!({"kty": "EC", "crv": curve, "x": BASE64.encode(x), "y": BASE64.encode(y)});
            (EncodingKey::from_ec_der(pair.serialized_der()), key)
        }
        Algorithm::EdDSA => {
            let key = json!({"kty": "OKP", "crv": curve, "x": BASE64.encode(pair.public_key_raw())});
            (EncodingKey::from_ed_der(pair.serialized_der()), key)
        }
        _ => {
            let signing = EncodingKey::from_rsa_pem(pair.serialize_pem().as_bytes()).unwrap();
            let key = Jwk::from_encoding_key(&signing, algorithm).unwrap();
            (signing, serde_json::to_value(key).unwrap())
        }
    };
    let token = encode(&Header::new(algorithm), &json!({"iss": "me", "sub": "you"}), &signing).unwrap();
    (key, token)
}

/// Returns the keys of one issuer and a token that they verify.
fn keys_and_token() -> (String, String) {
    let (key, token) = key_and_token(Algorithm::ES256);
    (json!({ "keys": [key] }).to_string(), token)
}

/// Returns a JWT filter for tokens of issuer `me` with these keys.
fn jwt(keys: &Value) -> Value {
    let provider = files::with(json!({"issuer": "me"}), keys);
    let rule = json!({"match": {"prefix": "/"}, "requires": {"provider_name": "p"}});
    let config = json!({"providers": {"p": provider}, "rules": [rule]});
    filter("http.jwt_authn.v3.JwtAuthentication", &config)
}

#[tokio::test]
async fn tokens_are_verified_only_by_their_issuers_keys_of_every_kind() {
    let algorithms =
        [Algorithm::RS256, Algorithm::PS256, Algorithm::ES256, Algorithm::ES384, Algorithm::EdDSA];
    let pairs = algorithms.map(key_and_token);
    let keys = json!({"keys": pairs.each_ref().map(|(key, _)| key)}).to_string();
    let folder = tempfile::tempdir().unwrap();
    let filter = jwt(&json!({"local_jwks": {"inline_string": keys}}));
    let manager = http(&[filter], &to("upstream"), &json!({}));
    let clusters = [cluster("upstream", echo().await, false)];
    let program = Program::start(folder.path(), &bootstrap(&[listener("l", &[manager])], &clusters)).await;
    let proxy = program.listener("l").await;
    for (algorithm, (_, token)) in algorithms.iter().zip(&pairs) {
        let good = status(proxy, &format!("authorization: Bearer {token}\r\n")).await;
        assert_eq!(good.0, "200", "{algorithm:?}: {}", good.1);
        let (_, foreign) = key_and_token(*algorithm);
        let (status, why) = status(proxy, &format!("authorization: Bearer {foreign}\r\n")).await;
        assert_eq!((&*status, &*why), ("401", "Jwt verification fails"), "{algorithm:?}");
    }
}

#[tokio::test]
async fn keys_are_fetched_when_first_needed_and_cached() {
    let (keys, token) = keys_and_token();
    let fetched = Arc::new(AtomicUsize::new(0));
    let count = fetched.clone();
    let keeper = server(move |_, mut client| {
        let (keys, count) = (keys.clone(), count.clone());
        async move {
            loop {
                let (head, _) = client.message().await;
                assert!(head.starts_with("GET /keys HTTP/1.1\r\nhost: keys.example\r\n"), "{head}");
                // The first response is an error.
                let status = if count.fetch_add(1, Ordering::SeqCst) == 0 { 503 } else { 200 };
                let length = keys.len();
                client.send(&format!("HTTP/1.1 {status} A\r\ncontent-length: {length}\r\n\r\n{keys}")).await;
            }
        }
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let uri = json!({"uri": "https://keys.example/keys", "cluster": "keys", "timeout": "30s"});
    let keys = json!({"remote_jwks": {"http_uri": uri}});
    let manager = http(&[jwt(&keys)], &to("upstream"), &json!({}));
    let clusters = [cluster("keys", keeper, false), cluster("upstream", echo().await, false)];
    let bootstrap = bootstrap(&[listener("l", &[manager])], &clusters);
    let program = Program::start(folder.path(), &bootstrap).await;
    let proxy = program.listener("l").await;
    // A request without a token fetches no keys.
    assert_eq!(status(proxy, "").await, ("401".to_owned(), "Jwt is missing".to_owned()));
    assert_eq!(fetched.load(Ordering::SeqCst), 0);
    let bearer = format!("authorization: Bearer {token}\r\n");
    let refused = ("401".to_owned(), "Jwks remote fetch is failed".to_owned());
    assert_eq!(status(proxy, &bearer).await, refused);
    for _ in 0..3 {
        assert_eq!(status(proxy, &bearer).await.0, "200");
    }
    assert_eq!(fetched.load(Ordering::SeqCst), 2);
}

/// Allows every second connection.
struct EverySecond(AtomicUsize);

#[tonic::async_trait]
impl Authorization for EverySecond {
    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckResponse>, tonic::Status> {
        let attributes = request.into_inner().attributes.unwrap();
        assert!(attributes.source.unwrap().address.is_some() && attributes.request.is_none());
        let code = if self.0.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) { 7 } else { 0 };
        let status = Some(Status { code, ..Status::default() });
        Ok(Response::new(CheckResponse { status, ..CheckResponse::default() }))
    }
}

#[tokio::test]
async fn a_service_authorizes_connections() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authorizer = socket.local_addr().unwrap();
    let service = AuthorizationServer::new(EverySecond(AtomicUsize::new(0)));
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(socket)),
    );
    let folder = tempfile::tempdir().unwrap();
    let everybody = json!({"permissions": [{"any": true}], "principals": [{"any": true}]});
    let shadow = json!({
        "stat_prefix": "t",
        "shadow_rules": {"action": "DENY", "policies": {"ask-me": everybody}},
        "shadow_rules_stat_prefix": "istio_ext_authz_"
    });
    let ask = json!({
        "stat_prefix": "t",
        "grpc_service": {"envoy_grpc": {"cluster_name": "authorizer"}, "timeout": "30s"},
        "filter_enabled_metadata": {
            "filter": "envoy.filters.network.rbac",
            "path": [{"key": "istio_ext_authz_shadow_effective_policy_id"}],
            "value": {"string_match": {"prefix": "ask"}}
        }
    });
    let filters = [
        filter("network.rbac.v3.RBAC", &shadow),
        filter("network.ext_authz.v3.ExtAuthz", &ask),
        filter("network.tcp_proxy.v3.TcpProxy", &json!({"stat_prefix": "t", "cluster": "upstream"})),
    ];
    let clusters = [cluster("authorizer", authorizer, true), cluster("upstream", echo().await, false)];
    let bootstrap = bootstrap(&[listener("l", &filters)], &clusters);
    let program = Program::start(folder.path(), &bootstrap).await;
    let proxy = program.listener("l").await;
    for passes in [false, true, false, true] {
        let mut client = Client::new(TcpStream::connect(proxy).await.unwrap());
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert_eq!(client.message_if_any().await.is_some(), passes);
    }
}

/// Starts an HTTP authorizer that knows some paths, and counts its connections.
async fn http_authorizer(connections: &Arc<AtomicUsize>) -> SocketAddr {
    let connections = Arc::clone(connections);
    server(move |_, mut client| {
        connections.fetch_add(1, Ordering::SeqCst);
        async move {
            while let Some((head, _)) = client.message_if_any().await {
                let good = head.contains("\r\nx-good: 1\r\n");
                let status = if good { "200 OK" } else { "403 Forbidden" };
                client.send(&format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n")).await;
            }
        }
    })
    .await
}

/// Returns an ext_authz filter that uses HTTP, with further fields.
fn ask_over_http(server: &Value) -> Value {
    let uri = json!({"uri": "http://auth.example", "cluster": "authorizer", "timeout": "30s"});
    let config = json!({
        "http_service": {"server_uri": files::with(uri, server)},
        "allowed_headers": {"patterns": [{"exact": "x-good"}]}
    });
    filter("http.ext_authz.v3.ExtAuthz", &config)
}

/// An HTTP service would take the check of a CONNECT request for a tunnel. The sidecar therefore does not ask
/// it. No response stays on the service's connection that the next check could read.
#[tokio::test]
async fn a_request_that_cannot_be_checked_is_denied() {
    let connections = Arc::default();
    let authorizer = http_authorizer(&connections).await;
    let folder = tempfile::tempdir().unwrap();
    let routes = json!([
        {"match": {"connect_matcher": {}},
         "route": {"cluster": "upstream", "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}]}},
        {"match": {"prefix": "/"}, "route": {"cluster": "upstream"}}
    ]);
    let options = json!({"upgrade_configs": [{"upgrade_type": "CONNECT"}]});
    let manager = http(&[ask_over_http(&json!({}))], &routes, &options);
    let clusters = [cluster("authorizer", authorizer, false), cluster("upstream", echo().await, false)];
    let bootstrap = bootstrap(&[listener("l", &[manager])], &clusters);
    let program = Program::start(folder.path(), &bootstrap).await;
    let proxy = program.listener("l").await;
    let ask = async |request: &str| {
        let mut client = Client::new(TcpStream::connect(proxy).await.unwrap());
        client.send(request).await;
        client.head().await[9..12].to_owned()
    };
    for _ in 0..3 {
        assert_eq!(ask("CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\nx-good: 1\r\n\r\n").await, "403");
        assert_eq!(ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await, "403");
        assert_eq!(ask("GET / HTTP/1.1\r\nhost: a\r\nx-good: 1\r\n\r\n").await, "200");
    }
}

/// Answers with status 200 that are too large, have two lengths, or never end are no decisions.
#[tokio::test]
async fn an_authorizer_without_a_valid_answer_denies() {
    let large = format!("content-length: {0}\r\n\r\n{1}", 2 << 20, "x".repeat(2 << 20));
    let long_head = format!("x-good: {}\r\ncontent-length: 0\r\n\r\n", "x".repeat(100_000));
    let two_lengths = "content-length: 0\r\ncontent-length: 1\r\n\r\n".to_owned();
    for answer in [large, long_head, two_lengths, "content-length: 1\r\n\r\n".to_owned()] {
        let authorizer = server(move |_, mut client| {
            let answer = answer.clone();
            async move {
                while client.message_if_any().await.is_some() {
                    client.send(&format!("HTTP/1.1 200 OK\r\n{answer}")).await;
                }
            }
        })
        .await;
        let folder = tempfile::tempdir().unwrap();
        let manager = http(&[ask_over_http(&json!({"timeout": "1s"}))], &to("upstream"), &json!({}));
        let clusters = [cluster("authorizer", authorizer, false), cluster("upstream", echo().await, false)];
        let bootstrap = bootstrap(&[listener("l", &[manager])], &clusters);
        let program = Program::start(folder.path(), &bootstrap).await;
        assert_eq!(status(program.listener("l").await, "x-good: 1\r\n").await.0, "403");
    }
}

/// In Envoy a timeout of zero means no timeout; it never skips the check.
#[tokio::test]
async fn a_zero_timeout_does_not_allow_requests() {
    let connections = Arc::default();
    let authorizer = http_authorizer(&connections).await;
    let folder = tempfile::tempdir().unwrap();
    let manager = http(&[ask_over_http(&json!({"timeout": "0s"}))], &to("upstream"), &json!({}));
    let clusters = [cluster("authorizer", authorizer, false), cluster("upstream", echo().await, false)];
    let bootstrap = bootstrap(&[listener("l", &[manager])], &clusters);
    let program = Program::start(folder.path(), &bootstrap).await;
    let proxy = program.listener("l").await;
    assert_eq!(status(proxy, "").await.0, "403");
    assert_eq!(status(proxy, "x-good: 1\r\n").await.0, "200");
}

/// Keys with a very short cache duration are fetched once per request that finds them expired, not repeatedly.
#[tokio::test]
async fn expired_keys_are_fetched_again_once_per_request() {
    let (keys, token) = keys_and_token();
    let fetched = Arc::new(AtomicUsize::new(0));
    let count = fetched.clone();
    let keeper = server(move |_, mut client| {
        let (keys, count) = (keys.clone(), count.clone());
        async move {
            while client.message_if_any().await.is_some() {
                count.fetch_add(1, Ordering::SeqCst);
                let length = keys.len();
                client.send(&format!("HTTP/1.1 200 A\r\ncontent-length: {length}\r\n\r\n{keys}")).await;
            }
        }
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let uri = json!({"uri": "https://keys.example/keys", "cluster": "keys", "timeout": "30s"});
    let keys = json!({"remote_jwks": {"http_uri": uri, "cache_duration": "0.001s"}});
    let manager = http(&[jwt(&keys)], &to("upstream"), &json!({}));
    let clusters = [cluster("keys", keeper, false), cluster("upstream", echo().await, false)];
    let bootstrap = bootstrap(&[listener("l", &[manager])], &clusters);
    let program = Program::start(folder.path(), &bootstrap).await;
    let proxy = program.listener("l").await;
    for _ in 0..3 {
        assert_eq!(status(proxy, &format!("authorization: Bearer {token}\r\n")).await.0, "200");
    }
    assert!((1..=3).contains(&fetched.load(Ordering::SeqCst)));
}
