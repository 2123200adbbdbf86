//! Tasks of gateways: clients outside of the mesh, and hosts outside of it.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use skysail_testkit::eventually;

use crate::{app_with, apply, assert_quiet, folder, logged, published, remove, wait_answer};

/// Timeout of reads. A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn clients_outside_reach_services_through_a_gateway() {
    let mesh = app_with(&["gateway", "ingress"]).ready();
    let (plain, tls) = (published(&mesh, "default/ingress:8080"), published(&mesh, "default/ingress:8443"));

    let get = |host: &str, path: &str| exchange(connect(plain)?, host, path);
    wait_response("films", 200, r#""name":"films-v"#, || get("cinema.example.com", "/films"));
    wait_response("seats", 200, r#""name":"seats-"#, || get("cinema.example.com", "/seats"));
    wait_response("another path", 404, "", || get("cinema.example.com", "/other"));
    wait_response("another host", 404, "", || get("other.example.com", "/films"));

    remove(&mesh, "ingress");
    apply(&mesh, "ingress-gateway-api");
    let header = "x-served-by: gateway-api";
    wait_response("a route of Gateway API", 200, header, || get("cinema.example.com", "/films"));
    wait_response("the second rule", 200, r#""name":"seats-"#, || get("cinema.example.com", "/seats"));
    wait_response("a path of no rule", 404, "", || get("cinema.example.com", "/other"));

    apply(&mesh, "secure-ingress");
    let (anybody, member) = (client(false), client(true));
    let secure = |config: &Arc<ClientConfig>, host: &'static str| over_tls(tls, config, host);
    wait_response("HTTPS", 200, r#""name":"films-v"#, || secure(&anybody, "cinema.example.com"));
    wait_response("a client with a certificate", 200, "films-v", || secure(&member, "vip.example.com"));
    let refused = secure(&anybody, "vip.example.com");
    assert!(refused.is_err(), "a client without a certificate: {refused:?}");
    wait_response("a redirect", 301, "location: https://vip.example.com/", || get("vip.example.com", "/"));

    apply(&mesh, "sni-passthrough");
    let page = "tickets speaks TLS";
    wait_response("the server's own TLS", 200, page, || secure(&anybody, "tickets.example.com"));
    wait_response("the other server", 200, "films-v", || secure(&anybody, "cinema.example.com"));
    let unknown = secure(&anybody, "unknown.example.com");
    assert!(unknown.is_err(), "a server name of no server: {unknown:?}");
    assert_quiet(&mesh);
}

#[test]
fn traffic_to_hosts_outside_is_controlled() {
    let mesh = app_with(&[]).ready();
    let (known, unknown) = ("http://api.partner.example/", "http://partner.outside/");

    apply(&mesh, "egress-control");
    wait_answer(&mesh, known, &[], 200, r#""name":"partner""#);
    wait_answer(&mesh, unknown, &[], 502, "");
    wait_answer(&mesh, "http://api.partner.example/delay/20s", &[], 504, "upstream request timeout");
    mesh.edit("egress-control-registry-only.yaml", "REGISTRY_ONLY", "ALLOW_ANY");
    wait_answer(&mesh, unknown, &[], 200, r#""name":"partner""#);
    remove(&mesh, "egress-control");

    apply(&mesh, "egress-gateway");
    wait_answer(&mesh, known, &[], 200, "secure-partner speaks TLS");
    eventually("the request passed the gateway", || {
        logged(&mesh, &["egress", "-c", "proxy"], &["api.partner.example", " 200 "])
    });
    // The gateway refuses a host with another certificate.
    mesh.edit("egress-gateway-egress.yaml", "subjectAltNames: [api", "subjectAltNames: [another");
    wait_answer(&mesh, known, &[], 503, "");
    assert_quiet(&mesh);
}

/// Returns a client that trusts the authority of the examples, with or without the certificate of a member.
fn client(is_member: bool) -> Arc<ClientConfig> {
    let file = |name: &str| fs::read(folder("secure-ingress").join(name)).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&file("root.crt")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    Arc::new(match is_member {
        false => config.with_no_client_auth(),
        true => {
            let chain = vec![CertificateDer::from_pem_slice(&file("member.crt")).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(&file("member.key")).unwrap();
            config.with_client_auth_cert(chain, key).unwrap()
        }
    })
}

fn connect(address: SocketAddr) -> Result<TcpStream, String> {
    let stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Ok(stream)
}

/// Sends a request and returns the whole response.
fn exchange(mut stream: impl Read + Write, host: &str, path: &str) -> Result<String, String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut response = Vec::new();
    match stream.read_to_end(&mut response) {
        Err(error) if response.is_empty() => Err(error.to_string()),
        _ => Ok(String::from_utf8_lossy(&response).into_owned()),
    }
}

fn over_tls(address: SocketAddr, config: &Arc<ClientConfig>, host: &'static str) -> Result<String, String> {
    let session = ClientConnection::new(Arc::clone(config), ServerName::try_from(host).unwrap()).unwrap();
    exchange(StreamOwned::new(session, connect(address)?), host, "/")
}

/// Waits until a response has this status and contains this text.
fn wait_response(what: &str, status: u16, text: &str, mut ask: impl FnMut() -> Result<String, String>) {
    eventually(what, || {
        let response = ask()?;
        let is_it = response.starts_with(&format!("HTTP/1.1 {status}")) && response.contains(text);
        if is_it { Ok(()) } else { Err(response) }
    });
}
