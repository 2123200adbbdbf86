//! BackendTLSPolicy: TLS of sidecars with their backends, what a server's certificate must have, and the certificate that
//! gateways present.

use crate::{
    CLIENTS, check,
    gateway_api_certificates::{config_map, issuer, secret},
    get, mesh_with, wait, wait_logged,
};

const RULES: &str = include_str!("gateway_api_backend_tls.yaml");
/// A server that demands a certificate, and gateways.
const EDGES: &str = include_str!("gateway_api_client_certificate.yaml");
/// A policy without usable roots for a server that the clients reach in plain text.
const LATE: &str = "apiVersion: gateway.networking.k8s.io/v1\nkind: BackendTLSPolicy\n\
    metadata: {name: late, namespace: shop}\nspec:\n  \
    targetRefs: [{group: '', kind: Service, name: without}]\n  \
    validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: missing}], hostname: a.example}\n";
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
    // A policy without usable roots ends plain text that a client used before.
    mesh.put("late.yaml", LATE);
    for client in CLIENTS {
        wait(&mesh, client, &get("http://without:8081/", 503, &[]));
    }
}

/// Returns the Gateway of both edges with these settings of TLS.
fn gateway(tls: &str) -> String {
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: edges, namespace: shop}}\nspec:\n  \
         gatewayClassName: istio\n  addresses: [{{type: Hostname, value: edges.shop.svc.cluster.local}}]\n  \
         listeners: [{{name: http, port: 80, protocol: HTTP}}]\n{tls}"
    )
}

#[test]
fn gateways_present_their_certificate_to_backends() {
    let (servers, clients, others) = (issuer("servers"), issuer("clients"), issuer("others"));
    let server = secret("shop/server", &servers, &["vault.example"], &clients);
    let mesh =
        mesh_with(&[EDGES, &server, &config_map("roots", &servers)].concat(), &["shop/edge-envoy"]).ready();
    let all_answer = |status| {
        for edge in ["edge-skysail", "edge-envoy"] {
            wait(&mesh, "plain", &get(&format!("http://{edge}/"), status, &[]));
        }
    };
    mesh.put("gateway.yaml", &gateway(""));
    all_answer(503);
    let with_certificate = |reference: &str| {
        mesh.put(
            "gateway.yaml",
            &gateway(&format!("  tls: {{backend: {{clientCertificateRef: {{{reference}}}}}}}\n")),
        );
    };
    mesh.put("own.yaml", &secret("shop/own", &clients, &["edge"], &clients));
    with_certificate("name: own");
    all_answer(200);
    // The server does not trust this issuer, and the next certificate is used as soon as it comes.
    mesh.put("changed.yaml", &secret("shop/changed", &others, &["edge"], &clients));
    with_certificate("name: changed");
    all_answer(503);
    mesh.put("changed.yaml", &secret("shop/changed", &clients, &["edge"], &clients));
    all_answer(200);
    // Another namespace must permit the reference.
    mesh.put("other.yaml", &secret("other/own", &clients, &["edge"], &clients));
    with_certificate("name: own, namespace: other");
    all_answer(503);
    mesh.put(
        "grant.yaml",
        "apiVersion: gateway.networking.k8s.io/v1\nkind: ReferenceGrant\nmetadata: {name: own, namespace: other}\n\
         spec: {from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: shop}], to: [{group: '', kind: Secret}]}\n",
    );
    all_answer(200);
    mesh.put("grant.yaml", "");
    all_answer(503);
}
