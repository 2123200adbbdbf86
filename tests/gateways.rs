//! Gateways of a mesh from outside: HTTP by host and path, TLS by server name, certificates of clients, forwarded TLS,
//! redirects, and the rotation of a certificate.

#![allow(clippy::panic, reason = "a test fails by panic")]
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
};

use rcgen::{CertificateParams, CertifiedIssuer, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use skysail_testkit::{Client, Mesh, Setup, eventually, wait_response};

const EDGE: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: edge, namespace: shop}
spec:
  selector: {matchLabels: {app: edge}}
  template:
    metadata: {labels: {app: edge, istio: edge}, annotations: {inject.istio.io/templates: gateway}}
    spec:
      containers: [{name: istio-proxy, image: auto, ports: [{name: plain, containerPort: 8080}]}]
---
apiVersion: v1
kind: Service
metadata: {name: edge, namespace: shop}
spec:
  selector: {app: edge}
  ports: [{name: http, port: 80, targetPort: plain}, {name: tls, port: 443, targetPort: 8443}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: vault, namespace: shop}
spec:
  selector: {matchLabels: {app: vault}}
  template:
    metadata: {labels: {app: vault}}
    spec: {containers: [{name: vault, image: registry.example/vault, ports: [{containerPort: 9443}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: vault, namespace: shop}
spec: {selector: {app: vault}, ports: [{name: tcp, port: 9443}]}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: shop}
spec:
  selector: {istio: edge}
  servers:
  - {port: {number: 80, name: http, protocol: HTTP}, hosts: [plain.example.com]}
  - {port: {number: 80, name: moved, protocol: HTTP}, hosts: [moved.example.com], tls: {httpsRedirect: true}}
  - {port: {number: 443, name: https, protocol: HTTPS}, hosts: [web.example.com], tls: {mode: SIMPLE, credentialName: web}}
  - {port: {number: 443, name: mutual, protocol: HTTPS}, hosts: [mutual.example.com], tls: {mode: MUTUAL, credentialName: web}}
  - {port: {number: 443, name: vault, protocol: TLS}, hosts: [vault.example.com], tls: {mode: PASSTHROUGH}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: stock-outside, namespace: shop}
spec:
  hosts: [plain.example.com, web.example.com, mutual.example.com]
  gateways: [edge]
  http:
  - match: [{uri: {prefix: /v2}}]
    route: [{destination: {host: stock, subset: v2}}]
  - match: [{uri: {prefix: /v1}}]
    route: [{destination: {host: stock, subset: v1}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: vault, namespace: shop}
spec:
  hosts: [vault.example.com]
  gateways: [edge]
  tls: [{match: [{port: 443, sniHosts: [vault.example.com]}], route: [{destination: {host: vault}}]}]
"#;

type Issuer = CertifiedIssuer<'static, KeyPair>;

fn issuer(name: &str) -> Issuer {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    // An Envoy takes a certificate whose issuer has the same name for a self-signed one.
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Returns a certificate for these names and its key.
fn certificate(issuer: &Issuer, names: &[&str]) -> (rcgen::Certificate, KeyPair) {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
    (params.signed_by(&key, issuer).unwrap(), key)
}

fn secret(servers: &Issuer, clients: &Issuer) -> String {
    let (chain, key) = certificate(servers, &["web.example.com", "mutual.example.com"]);
    let block = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: web, namespace: shop}}\nstringData:\n  tls.crt: |\n{}  tls.key: |\n{}  ca.crt: |\n{}",
        block(&chain.pem()),
        block(&key.serialize_pem()),
        block(&clients.pem())
    )
}

/// Returns a client that trusts one authority and may present a certificate of another.
fn client(address: SocketAddr, servers: &Issuer, own: Option<&Issuer>) -> Client {
    let own = own.map(|issuer| {
        let (chain, key) = certificate(issuer, &["client"]);
        (vec![chain.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into()))
    });
    Client::tls(address, servers.der().clone(), own)
}

/// Sends a request with a forged header about the client's certificate.
fn get(client: &Client, host: &str, path: &str) -> Result<String, String> {
    client.get(host, path, "x-forwarded-client-cert: By=forged\r\n")
}

/// Waits until a request is answered by this version of the service.
fn wait_version(what: &str, version: &str, request: impl FnMut() -> Result<String, String>) {
    wait_response(what, 200, &format!(r#""version":"{version}""#), request);
}

/// The workloads `envoys` have a real Envoy.
fn serves_clients_outside(envoys: &[&str]) {
    let (servers, clients) = (issuer("servers"), issuer("clients"));
    let old = secret(&servers, &clients);
    let text = [include_str!("shop.yaml"), EDGE, &old].join("---\n");
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text);
    let mesh = setup.with(&["-p", "0:edge:80", "-p", "0:edge:443"]).with_envoys(envoys).ready();
    let (plain, tls) = (Client::plain(mesh.published("shop/edge:80")), mesh.published("shop/edge:443"));

    wait_version("plain HTTP reaches v1", "v1", || get(&plain, "plain.example.com", "/v1"));
    wait_version("the path selects v2", "v2", || get(&plain, "plain.example.com", "/v2"));
    assert_eq!(plain.status("plain.example.com", "/other"), Ok(404));
    assert_eq!(plain.status("stranger.example.com", "/v1"), Ok(404));
    let moved = get(&plain, "moved.example.com", "/a").unwrap();
    assert!(
        moved.starts_with("HTTP/1.1 301") && moved.contains("location: https://moved.example.com/a"),
        "{moved}"
    );

    let anonymous = client(tls, &servers, None);
    wait_version("HTTPS reaches v1", "v1", || get(&anonymous, "web.example.com", "/v1"));
    let unknown = get(&anonymous, "mutual.example.com", "/v1");
    assert!(unknown.is_err(), "a client without a certificate: {unknown:?}");
    let stranger = get(&client(tls, &servers, Some(&servers)), "mutual.example.com", "/v1");
    assert!(stranger.is_err(), "a client of another authority: {stranger:?}");
    let known = client(tls, &servers, Some(&clients));
    wait_version("mutual TLS reaches v2", "v2", || get(&known, "mutual.example.com", "/v2"));
    wait_version("the certificate is passed on", "v1", || {
        let response = get(&known, "mutual.example.com", "/v1")?;
        let is_set = response.contains("x-forwarded-client-cert") && !response.contains("forged");
        if is_set { Ok(response) } else { Err(response) }
    });
    forwards_tls(&anonymous);
    if envoys.is_empty() {
        is_explained(&mesh);
    }
    rotates(&mesh, tls, &clients, &old);
}

#[test]
fn a_gateway_serves_clients_outside_of_the_mesh() {
    serves_clients_outside(&[]);
}

#[test]
fn an_envoy_serves_clients_outside_of_the_mesh() {
    serves_clients_outside(&["shop/edge"]);
}

/// `skysail explain` says of what the gateway holds what the clients above have seen.
fn is_explained(mesh: &Mesh) {
    for (url, is_served) in [
        ("http://plain.example.com/v1", true),
        ("http://plain.example.com/other", false),
        ("http://stranger.example.com/v1", false),
        ("http://moved.example.com/a", true),
        ("https://web.example.com/v1", true),
        ("https://mutual.example.com/v1", false),
        ("tls://vault.example.com:443", true),
        ("tls://stranger.example.com:443", false),
    ] {
        let output = mesh.run(&["explain", "--from", "outside", url]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(i32::from(!is_served)), "{url}: {text}");
        assert!(text.contains("<- Gateway shop/edge spec.servers["), "{url}: {text}");
    }
}

/// Forwarded TLS reaches the service byte by byte. The stand-in returns what it receives.
fn forwards_tls(client: &Client) {
    let mut hello = Vec::new();
    client.session("vault.example.com").write_tls(&mut hello).unwrap();
    eventually("the service returns the ClientHello", || {
        let mut stream = client.connect()?;
        stream.write_all(&hello).map_err(|error| error.to_string())?;
        let mut echo = vec![0; hello.len()];
        stream.read_exact(&mut echo).map_err(|error| error.to_string())?;
        if echo == hello { Ok(()) } else { Err("other bytes".to_owned()) }
    });
}

/// A new Secret takes effect without a restart. One whose key belongs to another certificate is refused, and the last
/// stays.
fn rotates(mesh: &Mesh, address: SocketAddr, clients: &Issuer, old: &str) {
    let (servers, others) = (issuer("new servers"), issuer("others"));
    let new = secret(&servers, clients);
    mesh.edit("mesh.yaml", old, &new);
    let client = client(address, &servers, None);
    wait_version("the new certificate", "v1", || get(&client, "web.example.com", "/v1"));
    let chain = |text: &str| text.split("  tls.key").next().unwrap().to_owned();
    mesh.edit("mesh.yaml", &chain(&new), &chain(&secret(&others, clients)));
    mesh.wait_for_output("the private key does not belong to the certificate");
    get(&client, "web.example.com", "/v1").unwrap();
}
