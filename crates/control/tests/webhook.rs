//! The webhook for sidecar injection, over TLS with the control plane's certificate.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panic")]

mod support;

use std::sync::Arc;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use serde_json::{Value, json};
use support::{Control, Folder};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// A control plane with the webhook.
struct Server {
    _folder: Folder,
    _control: Control,
    address: String,
    connector: TlsConnector,
}

impl Server {
    async fn start() -> Self {
        let folder = Folder::new();
        let mesh = folder.at("injection.yaml");
        std::fs::write(&mesh, "defaultConfig: {concurrency: 3}\n").unwrap();
        let arguments = ["--injection-port", "0", "--injection-image", "registry.example/proxy:1"];
        let more = ["--injection-mesh-config", mesh.to_str().unwrap()];
        let mut control = folder.start_with("0", &[arguments.as_slice(), &more].concat()).await;
        let address = control.logged("sidecar injection").await["address"].as_str().unwrap().to_owned();
        let mut roots = RootCertStore::empty();
        let pem = std::fs::read(folder.at("ca/root-cert.pem")).unwrap();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            roots.add(certificate.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.unwrap().with_root_certificates(roots).with_no_client_auth();
        Self { _folder: folder, _control: control, address, connector: TlsConnector::from(Arc::new(config)) }
    }

    async fn connect(&self) -> TlsStream<TcpStream> {
        let stream = TcpStream::connect(&self.address).await.unwrap();
        // The name by which a cluster calls the webhook's Service.
        let name = ServerName::try_from("istiod.istio-system.svc").unwrap();
        self.connector.connect(name, stream).await.unwrap()
    }

    /// Sends a request. Returns status and body.
    async fn send(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let mut stream = self.connect().await;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // The server may answer before it has read all.
        let _ = stream.write_all(body).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }
}

fn review(pod: &Value) -> Vec<u8> {
    json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": { "uid": "7",
        "namespace": "shop", "resource": { "version": "v1", "resource": "pods" }, "object": pod } })
    .to_string()
    .into_bytes()
}

#[tokio::test]
async fn an_admission_review_is_answered_with_a_patch() {
    let server = Server::start().await;
    let pod = json!({ "metadata": { "name": "web" }, "spec": { "containers": [{ "name": "web" }] } });
    let (status, body) = server.send("POST", "/inject/cluster/east?timeout=10s", &review(&pod)).await;
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["response"]["uid"], "7");
    assert_eq!(answer["response"]["patchType"], "JSONPatch");
    let patch = STANDARD.decode(answer["response"]["patch"].as_str().unwrap()).unwrap();
    let patch = String::from_utf8(patch).unwrap();
    for part in ["registry.example/proxy:1", r#""--concurrency","3""#, r#""value":"east""#] {
        assert!(patch.contains(part), "{part}: {patch}");
    }
}

#[tokio::test]
async fn other_requests_to_the_webhook_are_refused() {
    let server = Server::start().await;
    assert_eq!(server.send("POST", "/inject", b"{").await.0, 400);
    assert_eq!(server.send("POST", "/inject", b"{}").await.0, 400);
    assert_eq!(server.send("GET", "/inject", b"").await.0, 405);
    assert_eq!(server.send("POST", "/", b"").await.0, 404);
}

#[tokio::test]
async fn a_large_body_is_refused_unread() {
    let server = Server::start().await;
    let (status, body) = server.send("POST", "/inject", &vec![b' '; 9 << 20]).await;
    assert_eq!((status, body.as_str()), (413, "the body is too large\n"));
}

#[tokio::test]
async fn slow_bodies_do_not_delay_a_review() {
    let server = Server::start().await;
    let mut stalled = Vec::new();
    for length in [1 << 20, 100].into_iter().cycle().take(48) {
        let mut stream = server.connect().await;
        let head = format!("POST /inject HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{{");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        stalled.push(stream);
    }
    let pod = json!({ "spec": { "containers": [{ "name": "app" }] } });
    let (status, answer) = server.send("POST", "/inject", &review(&pod)).await;
    assert_eq!(status, 200, "{answer}");
}
