//! Tasks of gateways: clients outside of the mesh, and hosts outside of it.

use std::{fs, net::SocketAddr};

use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use skysail_testkit::{Client, Mesh, eventually, wait_response};

use crate::{app_with, apply, assert_quiet, folder, logged, remove, wait_answer};

#[test]
fn clients_outside_reach_services_through_a_gateway() {
    let mesh = app_with(&["gateway", "ingress"]).ready();
    let plain = Client::plain(mesh.published("default/ingress:8080"));
    let tls = mesh.published("default/ingress:8443");

    let get = |host: &str, path: &str| plain.get(host, path, "");
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
    let (anonymous, member) = (client(tls, false), client(tls, true));
    let secure = |client: &Client, host: &str| client.get(host, "/", "");
    wait_response("HTTPS", 200, r#""name":"films-v"#, || secure(&anonymous, "cinema.example.com"));
    wait_response("a client with a certificate", 200, "films-v", || secure(&member, "vip.example.com"));
    let refused = secure(&anonymous, "vip.example.com");
    assert!(refused.is_err(), "a client without a certificate: {refused:?}");
    wait_response("a redirect", 301, "location: https://vip.example.com/", || get("vip.example.com", "/"));

    apply(&mesh, "sni-passthrough");
    let page = "tickets speaks TLS";
    wait_response("the server's own TLS", 200, page, || secure(&anonymous, "tickets.example.com"));
    wait_response("the other server", 200, "films-v", || secure(&anonymous, "cinema.example.com"));
    let unknown = secure(&anonymous, "unknown.example.com");
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
    passes_the_gateway(&mesh, known);
    assert_quiet(&mesh);
}

#[test]
fn an_envoy_is_an_egress_gateway() {
    let setup = app_with(&["egress-gateway"]);
    let mesh = setup.with_envoys(&["default/page", "default/egress"]).ready();
    passes_the_gateway(&mesh, "http://api.partner.example/");
}

/// Requests for a host outside pass the egress gateway, which verifies the host, and has a certificate if the host
/// demands one.
fn passes_the_gateway(mesh: &Mesh, url: &str) {
    wait_answer(mesh, url, &[], 200, "secure-partner speaks TLS");
    eventually("the request passed the gateway", || {
        logged(mesh, &["egress", "-c", "proxy"], &["api.partner.example", " 200 "])
    });
    // The gateway refuses a host with another certificate.
    mesh.edit("egress-gateway-egress.yaml", "subjectAltNames: [api", "subjectAltNames: [another");
    wait_answer(mesh, url, &[], 503, "");
    mesh.edit("egress-gateway-egress.yaml", "subjectAltNames: [another", "subjectAltNames: [api");
    wait_answer(mesh, url, &[], 200, "secure-partner speaks TLS");

    // The host accepts clients with a certificate of this authority only. The gateway gets its own from a Secret.
    let read = |file: &str| fs::read_to_string(folder("secure-ingress").join(file)).unwrap();
    let (root, chain, key) = (read("root.crt"), read("member.crt"), read("member.key"));
    let of_host = secret("secure-partner-certificate-cacert", &[("ca.crt", &root)]);
    let of_gateway = secret("pair", &[("tls.crt", &chain), ("tls.key", &key), ("ca.crt", &root)]);
    mesh.put("secrets.yaml", &[of_host, of_gateway].join("---\n"));
    mesh.edit("egress-gateway-outside.yaml", "tls: {mode: SIMPLE", "tls: {mode: MUTUAL");
    wait_answer(mesh, url, &[], 503, "");
    let client = "{mode: SIMPLE, credentialName: partner-root";
    mesh.edit("egress-gateway-egress.yaml", client, "{mode: MUTUAL, credentialName: pair");
    wait_answer(mesh, url, &[], 200, "secure-partner speaks TLS");
}

/// Returns a Secret with these keys and values.
fn secret(name: &str, entries: &[(&str, &str)]) -> String {
    let block = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    let entries: String = entries.iter().map(|(key, text)| format!("  {key}: |\n{}", block(text))).collect();
    format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}}}\nstringData:\n{entries}")
}

/// Returns a client that trusts the authority of the examples, with or without the certificate of a member.
fn client(address: SocketAddr, is_member: bool) -> Client {
    let file = |name: &str| fs::read(folder("secure-ingress").join(name)).unwrap();
    let certificate = |name: &str| CertificateDer::from_pem_slice(&file(name)).unwrap();
    let own =
        || (vec![certificate("member.crt")], PrivateKeyDer::from_pem_slice(&file("member.key")).unwrap());
    Client::tls(address, certificate("root.crt"), is_member.then(own))
}
