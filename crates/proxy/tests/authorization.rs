//! Who else decides, by the program itself: keys that are fetched, and services that are asked about connections.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

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
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use program::Program;
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
use serde_json::json;
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

fn cluster(name: &str, address: SocketAddr, http2: bool) -> String {
    let options = if http2 { "http2_protocol_options: {}" } else { "http_protocol_options: {}" };
    format!(
        r#"
  - name: {name}
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{{options}}}
    load_assignment:
      cluster_name: {name}
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}
"#,
        address.port()
    )
}

async fn status(proxy: SocketAddr, fields: &str) -> (String, String) {
    let mut client = Client::new(TcpStream::connect(proxy).await.unwrap());
    client.send(&format!("GET / HTTP/1.1\r\nhost: a\r\n{fields}connection: close\r\n\r\n")).await;
    let answer = client.rest().await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head[9..12].to_owned(), body.to_owned())
}

#[tokio::test]
async fn keys_are_fetched_when_first_needed_and_kept() {
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let (x, y) = pair.public_key_raw()[1..].split_at(32);
    let key = json!({"kty": "EC", "crv": "P-256", "x": BASE64.encode(x), "y": BASE64.encode(y)});
    let keys = json!({ "keys": [key] }).to_string();
    let token = encode(
        &Header::new(Algorithm::ES256),
        &json!({"iss": "me", "sub": "you"}),
        &EncodingKey::from_ec_der(pair.serialized_der()),
    )
    .unwrap();

    let fetched = Arc::new(AtomicUsize::new(0));
    let count = fetched.clone();
    let keeper = server(move |_, mut client| {
        let (keys, count) = (keys.clone(), count.clone());
        async move {
            loop {
                let (head, _) = client.message().await;
                assert!(head.starts_with("GET /keys HTTP/1.1\r\nhost: keys.example\r\n"), "{head}");
                // The first time it is not ready.
                let status = if count.fetch_add(1, Ordering::SeqCst) == 0 { 503 } else { 200 };
                let length = keys.len();
                client.send(&format!("HTTP/1.1 {status} A\r\ncontent-length: {length}\r\n\r\n{keys}")).await;
            }
        }
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let clusters = cluster("keys", keeper, false) + &cluster("upstream", echo().await, false);
    let bootstrap = format!(
        r#"
node: {{id: a}}
static_resources:
  listeners:
  - name: l
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: h
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: h
          route_config:
            virtual_hosts:
            - {{name: v, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: upstream}}}}]}}
          http_filters:
          - name: jwt
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication
              providers:
                p:
                  issuer: me
                  remote_jwks: {{http_uri: {{uri: "https://keys.example/keys", cluster: keys, timeout: 30s}}}}
              rules: [{{match: {{prefix: /}}, requires: {{provider_name: p}}}}]
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:{clusters}"#
    );
    let program = Program::start(folder.path(), &bootstrap).await;
    let proxy = program.listener("l").await;
    // Nothing is fetched for who brings no token.
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

/// Lets every second connection pass.
struct Every(AtomicUsize);

#[tonic::async_trait]
impl Authorization for Every {
    async fn check(&self, request: Request<CheckRequest>) -> Result<Response<CheckResponse>, tonic::Status> {
        let attributes = request.into_inner().attributes.unwrap();
        assert!(attributes.source.unwrap().address.is_some() && attributes.request.is_none());
        let code = if self.0.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) { 7 } else { 0 };
        let status = Some(Status { code, ..Status::default() });
        Ok(Response::new(CheckResponse { status, ..CheckResponse::default() }))
    }
}

#[tokio::test]
async fn a_service_is_asked_about_connections() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authorizer = listener.local_addr().unwrap();
    let service = AuthorizationServer::new(Every(AtomicUsize::new(0)));
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );
    let folder = tempfile::tempdir().unwrap();
    let clusters = cluster("authorizer", authorizer, true) + &cluster("upstream", echo().await, false);
    let bootstrap = format!(
        r#"
node: {{id: a}}
static_resources:
  listeners:
  - name: l
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: shadow
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC
          stat_prefix: t
          shadow_rules:
            action: DENY
            policies: {{"ask-me": {{permissions: [{{any: true}}], principals: [{{any: true}}]}}}}
          shadow_rules_stat_prefix: istio_ext_authz_
      - name: ask
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.ext_authz.v3.ExtAuthz
          stat_prefix: t
          grpc_service: {{envoy_grpc: {{cluster_name: authorizer}}, timeout: 30s}}
          filter_enabled_metadata:
            filter: envoy.filters.network.rbac
            path: [{{key: istio_ext_authz_shadow_effective_policy_id}}]
            value: {{string_match: {{prefix: ask}}}}
      - name: tcp
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: t
          cluster: upstream
  clusters:{clusters}"#
    );
    let program = Program::start(folder.path(), &bootstrap).await;
    let proxy = program.listener("l").await;
    for passes in [false, true, false, true] {
        let mut client = Client::new(TcpStream::connect(proxy).await.unwrap());
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert_eq!(client.message_if_any().await.is_some(), passes);
    }
}
