//! Listeners of Gateways and ListenerSets of Gateway API, and TLSRoutes and GRPCRoutes of gateways, served by
//! `skysail-proxy` and by a real Envoy.

use skysail_testkit::{Client, Mesh, eventually};

use crate::{
    gateway_api_certificates::{Issuer, client, config_map, issuer, secret},
    mesh_with, wait, with,
};

const RULES: [&str; 2] =
    [include_str!("gateway_api_tls.yaml"), include_str!("gateway_api_listener_set.yaml")];
const GATEWAYS: [&str; 2] = ["edge-skysail", "edge-envoy"];
/// Ports that are published.
const PORTS: [u16; 3] = [443, 444, 445];

/// Authorities of the gateways' certificates, of the server behind them, and of clients.
struct Authorities {
    edge: Issuer,
    vault: Issuer,
    clients: Issuer,
}

/// One of the gateways.
struct Edge<'a> {
    mesh: &'a Mesh,
    gateway: &'a str,
}

impl Edge<'_> {
    fn tls(&self, port: u16, servers: &Issuer, own: Option<&Issuer>) -> Client {
        client(self.mesh.published(&format!("shop/{}:{port}", self.gateway)), servers, own)
    }

    /// Waits until requests with TLS for a host have a status.
    fn has(&self, client: &Client, host: &str, status: u16) {
        eventually(&format!("{} answers {host} with {status}", self.gateway), || {
            match client.status(host, "/shop.Any/Any")? {
                found if found == status => Ok(()),
                other => Err(other.to_string()),
            }
        });
    }

    /// Waits until requests without TLS for a host have a status.
    fn plain(&self, port: u16, host: &str, status: u16) {
        let (url, host) = (format!("http://{}:{port}/shop.Any/Any", self.gateway), format!("host: {host}"));
        wait(self.mesh, "plain", &with(&["-H", &host], &url, status, &[]));
    }

    /// Checks that a host has no TLS that the client accepts. The caller has checked that the port is served.
    fn refuses(&self, client: &Client, host: &str) {
        let answer = client.get(host, "/", "");
        assert!(answer.is_err(), "{} {host}: {answer:?}", self.gateway);
    }
}

fn start(of: &Authorities) -> Mesh {
    let Authorities { edge, vault, clients } = of;
    let names = [
        "web",
        "mutual",
        "ended",
        "other-kind",
        "other-group",
        "refused.set",
        "valid",
        "insecure",
        "ungranted",
    ];
    let of_set = ["own.set", "mutual.set", "other-kind.set", "other-group.set", "refused"];
    let passed = ["section.pass", "port.pass", "stranger.pass", "a.pass.set"];
    let secret = |name, issuer, names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| format!("{name}.example")).collect();
        secret(name, issuer, &names.iter().map(String::as_str).collect::<Vec<_>>(), clients)
    };
    let objects = [
        RULES.join("---\n"),
        secret("shop/web", edge, &names),
        secret("other/far", edge, &["far"]),
        secret("other/set", edge, &of_set),
        secret("shop/granted", edge, &["far.set"]),
        secret("shop/vault", vault, &passed),
        config_map("clients", clients),
    ];
    let mut setup = mesh_with(&objects.concat(), &["shop/edge-envoy"]);
    for port in PORTS {
        let ports = GATEWAYS.map(|gateway| format!("0:{gateway}:{port}"));
        setup = setup.with(&["-p", &ports[0], "-p", &ports[1]]);
    }
    setup.ready()
}

#[test]
fn listeners_have_certificates_and_routes() {
    let of = Authorities { edge: issuer("edge"), vault: issuer("vault"), clients: issuer("clients") };
    let mesh = start(&of);
    for gateway in GATEWAYS {
        let edge = Edge { mesh: &mesh, gateway };
        gateway_listeners(&edge, &of);
        tls_routes(&edge, &of);
        set_listeners(&edge, &of);
        clients_present_certificates(&edge, &of);
        namespaces(&edge);
    }
}

fn gateway_listeners(edge: &Edge<'_>, of: &Authorities) {
    let client = edge.tls(443, &of.edge, None);
    edge.has(&client, "web.example", 200);
    edge.has(&client, "far.example", 200);
    // A request for the host of another listener is on the wrong connection.
    assert_eq!(client.status_from("web.example", "far.example", "/"), Ok(421), "{}", edge.gateway);
    assert_eq!(client.status_from("web.example", "nowhere.example", "/"), Ok(404), "{}", edge.gateway);
    for name in ["refused", "other-kind", "other-group"] {
        edge.refuses(&client, &format!("{name}.example"));
    }
    edge.has(&edge.tls(443, &of.edge, Some(&of.clients)), "mutual.example", 200);
    edge.refuses(&client, "mutual.example");
    edge.refuses(&edge.tls(443, &of.edge, Some(&of.edge)), "mutual.example");
    edge.plain(80, "values.example", 200);
    edge.plain(80, "other-values.example", 404);
    // The GRPCRoute has one of the two listeners, and one host.
    edge.plain(81, "a.calls.example", 200);
    edge.plain(81, "b.calls.example", 404);
    edge.plain(80, "a.calls.example", 404);
}

/// Settings of a Gateway for the clients of all its listeners.
fn clients_present_certificates(edge: &Edge<'_>, of: &Authorities) {
    let with = |port, own| edge.tls(port, &of.edge, own);
    edge.has(&with(443, Some(&of.clients)), "valid.example", 200);
    edge.refuses(&with(443, None), "valid.example");
    edge.refuses(&with(443, Some(&of.edge)), "valid.example");
    edge.has(&with(444, Some(&of.clients)), "insecure.example", 200);
    edge.has(&with(444, None), "insecure.example", 200);
    edge.has(&with(444, Some(&of.edge)), "insecure.example", 200);
    edge.refuses(&with(445, Some(&of.clients)), "ungranted.example");
}

fn tls_routes(edge: &Edge<'_>, of: &Authorities) {
    let (one, two) = (edge.tls(443, &of.vault, None), edge.tls(444, &of.vault, None));
    edge.has(&one, "section.pass.example", 298);
    // Each connection selects a backend anew.
    for _ in 0..8 {
        assert_eq!(one.status("section.pass.example", "/"), Ok(298), "{}", edge.gateway);
    }
    edge.refuses(&two, "section.pass.example");
    edge.has(&two, "port.pass.example", 298);
    edge.refuses(&one, "port.pass.example");
    edge.refuses(&one, "stranger.pass.example");
    edge.has(&edge.tls(443, &of.edge, None), "ended.example", 200);
}

fn set_listeners(edge: &Edge<'_>, of: &Authorities) {
    let client = edge.tls(445, &of.edge, None);
    edge.has(&client, "own.set.example", 200);
    edge.has(&client, "far.set.example", 200);
    for name in ["refused", "other-kind", "other-group"] {
        edge.refuses(&client, &format!("{name}.set.example"));
    }
    edge.has(&edge.tls(445, &of.edge, Some(&of.clients)), "mutual.set.example", 200);
    edge.refuses(&client, "mutual.set.example");
    edge.has(&edge.tls(445, &of.vault, None), "a.pass.set.example", 298);
}

/// Routes of two namespaces at listeners that take those of the first, of the second, of both, or of one kind.
fn namespaces(edge: &Edge<'_>) {
    for (kind, of_other, of_shop) in [
        ("same", 200, 404),
        ("all", 200, 200),
        ("labels", 200, 404),
        ("in", 200, 404),
        ("not-in", 404, 200),
        // These routes are an HTTPRoute and a GRPCRoute.
        ("kinds", 404, 200),
        ("groups", 404, 404),
    ] {
        edge.plain(82, &format!("a.{kind}.example"), of_other);
        edge.plain(82, &format!("b.{kind}.example"), of_shop);
    }
}
