//! Gateways of a mesh from outside: HTTP by host and path, TLS by server name, certificates of clients, forwarded TLS,
//! redirects, and the rotation of a certificate.

#![allow(clippy::panic, reason = "a test fails by panic")]
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use rcgen::{CertificateParams, CertifiedIssuer, KeyPair};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{PrivateKeyDer, ServerName},
};
use skysail_testkit::{Mesh, Setup, eventually};

/// Timeout of reads. A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

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
fn client(servers: &Issuer, own: Option<&Issuer>) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(servers.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    Arc::new(match own {
        None => config.with_no_client_auth(),
        Some(issuer) => {
            let (chain, key) = certificate(issuer, &["client"]);
            let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
            config.with_client_auth_cert(vec![chain.der().clone()], key).unwrap()
        }
    })
}

fn connect(address: SocketAddr) -> Result<TcpStream, String> {
    let stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Ok(stream)
}

/// Sends a request and returns the whole response.
fn exchange(
    mut stream: impl std::io::Read + std::io::Write,
    host: &str,
    path: &str,
) -> Result<String, String> {
    let request = format!(
        "GET {path} HTTP/1.1\r\nhost: {host}\r\nx-forwarded-client-cert: By=forged\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut response = Vec::new();
    match stream.read_to_end(&mut response) {
        Err(error) if response.is_empty() => Err(error.to_string()),
        _ => Ok(String::from_utf8_lossy(&response).into_owned()),
    }
}

fn over_tls(
    address: SocketAddr,
    config: &Arc<ClientConfig>,
    host: &'static str,
    path: &str,
) -> Result<String, String> {
    let session = ClientConnection::new(Arc::clone(config), ServerName::try_from(host).unwrap()).unwrap();
    exchange(StreamOwned::new(session, connect(address)?), host, path)
}

/// Returns the address of a published port.
fn published(mesh: &Mesh, end: &str) -> SocketAddr {
    let said = mesh.said();
    let line = said.lines().find(|line| line.ends_with(end)).unwrap_or_else(|| panic!("{end}: {said}"));
    let address = line.split_whitespace().nth(1).unwrap();
    address.split("//").last().unwrap().parse().unwrap()
}

/// Waits until a request is answered by this version of the service.
fn wait_version(what: &str, version: &str, mut ask: impl FnMut() -> Result<String, String>) {
    eventually(what, || {
        let answer = ask()?;
        let wanted = format!(r#""version":"{version}""#);
        let is_it = answer.starts_with("HTTP/1.1 200") && answer.replace(' ', "").contains(&wanted);
        if is_it { Ok(()) } else { Err(answer) }
    });
}

#[test]
fn a_gateway_serves_clients_outside_of_the_mesh() {
    let (servers, clients) = (issuer("servers"), issuer("clients"));
    let old = secret(&servers, &clients);
    let text = [include_str!("shop.yaml"), EDGE, &old].join("---\n");
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text);
    let mesh = setup.with(&["-p", "0:edge:80", "-p", "0:edge:443"]).ready();
    let (plain, tls) = (published(&mesh, "-> shop/edge:80"), published(&mesh, "-> shop/edge:443"));

    let get = |host: &str, path: &str| exchange(connect(plain)?, host, path);
    wait_version("plain HTTP reaches v1", "v1", || get("plain.example.com", "/v1"));
    wait_version("the path selects v2", "v2", || get("plain.example.com", "/v2"));
    let status = |host: &str, path: &str| get(host, path).unwrap().split(' ').nth(1).unwrap().to_owned();
    assert_eq!(status("plain.example.com", "/other"), "404");
    assert_eq!(status("stranger.example.com", "/v1"), "404");
    let moved = get("moved.example.com", "/a").unwrap();
    assert!(
        moved.starts_with("HTTP/1.1 301") && moved.contains("location: https://moved.example.com/a"),
        "{moved}"
    );

    let anybody = client(&servers, None);
    wait_version("HTTPS reaches v1", "v1", || over_tls(tls, &anybody, "web.example.com", "/v1"));
    let unknown = over_tls(tls, &anybody, "mutual.example.com", "/v1");
    assert!(unknown.is_err(), "a client without a certificate: {unknown:?}");
    let stranger = over_tls(tls, &client(&servers, Some(&servers)), "mutual.example.com", "/v1");
    assert!(stranger.is_err(), "a client of another authority: {stranger:?}");
    let known = client(&servers, Some(&clients));
    wait_version("mutual TLS reaches v2", "v2", || over_tls(tls, &known, "mutual.example.com", "/v2"));
    wait_version("the certificate is passed on", "v1", || {
        let answer = over_tls(tls, &known, "mutual.example.com", "/v1")?;
        let is_set = answer.contains("x-forwarded-client-cert") && !answer.contains("forged");
        if is_set { Ok(answer) } else { Err(answer) }
    });
    forwards_tls(tls, &anybody);
    rotates(&mesh, tls, &clients, &old);
}

/// Forwarded TLS reaches the service byte by byte. The stand-in returns what it receives.
fn forwards_tls(address: SocketAddr, config: &Arc<ClientConfig>) {
    let name = ServerName::try_from("vault.example.com").unwrap();
    let mut session = ClientConnection::new(Arc::clone(config), name).unwrap();
    let mut hello = Vec::new();
    session.write_tls(&mut hello).unwrap();
    eventually("the service returns the ClientHello", || {
        let mut stream = connect(address)?;
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
    let config = client(&servers, None);
    wait_version("the new certificate", "v1", || over_tls(address, &config, "web.example.com", "/v1"));
    let chain = |text: &str| text.split("  tls.key").next().unwrap().to_owned();
    mesh.edit("mesh.yaml", &chain(&new), &chain(&secret(&others, clients)));
    mesh.wait_for_output("the private key does not belong to the certificate");
    over_tls(address, &config, "web.example.com", "/v1").unwrap();
}
