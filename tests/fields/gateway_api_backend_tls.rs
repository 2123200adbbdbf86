//! BackendTLSPolicy: TLS of sidecars with their backends, and what a server's certificate must have.

use crate::{
    CLIENTS, check,
    gateway_api_certificates::{config_map, issuer, secret},
    get, mesh_with, wait, wait_logged,
};

const RULES: &str = include_str!("gateway_api_backend_tls.yaml");
/// Part of the response if there is no TLS connection.
const UNCONNECTED: &[&str] = &["reset reason: remote connection failure"];

#[test]
fn policies_of_backends_are_applied() {
    let (servers, others) = (issuer("servers"), issuer("others"));
    let names = ["a.example", "more.example", "spiffe://vault.example/a"];
    let objects = [
        RULES.to_owned(),
        secret("shop/a", &servers, &names, &servers),
        secret("shop/b", &servers, &["b.example"], &servers),
        config_map("roots", &servers),
        config_map("others", &others),
    ];
    let mesh = mesh_with(&objects.concat(), &["shop/by-envoy"]).ready();
    let one = |url| get(url, 200, &["\"version\":\"v1\""]);
    let two = |url| get(url, 200, &["\"version\":\"v2\""]);
    for client in CLIENTS {
        wait(&mesh, client, &one("http://vault:8443/"));
        wait(&mesh, client, &two("http://vault.example/"));
        wait(&mesh, client, &one("http://without:8081/"));
    }
    let accepted = [
        // A port has a policy of its own.
        two("http://vault:81/"),
        // The policy applies to one port alone.
        two("http://half:8443/"),
        one("http://half:8081/"),
        one("http://vault:82/"),
        one("http://vault:84/"),
    ];
    check(&mesh, &CLIENTS, &accepted);
    check(&mesh, &CLIENTS, &[get("http://without:8443/", 503, &["reset reason: connection termination"])]);
    let refused = ["http://vault:83/", "http://vault:85/", "http://vault:86/", "http://vault:87/"];
    check(&mesh, &CLIENTS, &refused.map(|url| get(url, 503, UNCONNECTED)));
    // The roots of the system are no roots of this server, and without roots there is no connection.
    check(
        &mesh,
        &CLIENTS[..1],
        &[get("http://unready/", 503, UNCONNECTED), get("http://unready:81/", 503, &[])],
    );
    wait_logged(&mesh, &[CLIENTS[0], "-c", "proxy"], &["\"unready\"", "UnknownIssuer"]);
}
