//! EnvoyFilter: conditions of patches, selection of gateways, and order, for `skysail-proxy` and for a real Envoy.
//!
//! Most patches add a header to responses, so that the headers of a response are the patches on its way.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    io::{self, Read, Write},
};

use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::StreamOwned;
use skysail_testkit::{Client, Mesh, eventually};

use crate::{CLIENTS, Case, get, mesh_with, wait};

const RULES: &str = include_str!("patches.yaml");
const GATEWAYS: [&str; 2] = ["edge-skysail", "edge-envoy"];
/// Published ports.
const PORTS: [&str; 8] = [
    "-p",
    "0:edge-skysail:443",
    "-p",
    "0:edge-envoy:443",
    "-p",
    "0:edge-skysail:80",
    "-p",
    "0:edge-envoy:80",
];
/// What the servers say: the first has the sidecar, the second a real Envoy.
const SERVERS: [&str; 2] = ["\"version\":\"v1\"", "\"version\":\"v2\""];
/// Patches of all requests to servers.
const INBOUND: [&str; 3] = ["in-port", "chain", "to"];
/// Beginning of the names of added headers.
const PREFIX: &str = "x-patch-";

/// Patches that add a header: rest of its name, patched part, and condition.
const PATCHES: [(&str, &str, &str); 26] = [
    ("version", "HTTP_FILTER", r"context: SIDECAR_OUTBOUND, proxy: {proxyVersion: '^1\.\d+'}"),
    ("no-version", "HTTP_FILTER", r"context: SIDECAR_OUTBOUND, proxy: {proxyVersion: '^0\.'}"),
    (
        "by-skysail",
        "HTTP_FILTER",
        "context: SIDECAR_OUTBOUND, proxy: {metadata: {WORKLOAD_NAME: by-skysail}}",
    ),
    ("by-envoy", "HTTP_FILTER", "context: SIDECAR_OUTBOUND, proxy: {metadata: {WORKLOAD_NAME: by-envoy}}"),
    ("port-80", "HTTP_FILTER", "context: SIDECAR_OUTBOUND, listener: {portNumber: 80}"),
    ("name-8081", "HTTP_FILTER", "context: SIDECAR_OUTBOUND, listener: {name: 0.0.0.0_8081}"),
    ("in-port", "HTTP_FILTER", "context: SIDECAR_INBOUND, listener: {portNumber: 8080}"),
    ("no-in-port", "HTTP_FILTER", "context: SIDECAR_INBOUND, listener: {portNumber: 80}"),
    ("chain", "HTTP_FILTER", "context: SIDECAR_INBOUND, listener: {filterChain: {name: 0.0.0.0_8080}}"),
    ("no-chain", "HTTP_FILTER", "context: SIDECAR_INBOUND, listener: {filterChain: {name: 0.0.0.0_80}}"),
    ("tls", "HTTP_FILTER", "context: SIDECAR_INBOUND, listener: {filterChain: {transportProtocol: tls}}"),
    (
        "raw",
        "HTTP_FILTER",
        "context: SIDECAR_INBOUND, listener: {filterChain: {transportProtocol: raw_buffer}}",
    ),
    (
        "protocols",
        "HTTP_FILTER",
        "context: SIDECAR_INBOUND, listener: {filterChain: {applicationProtocols: 'istio,istio-http/1.1'}}",
    ),
    (
        "no-protocols",
        "HTTP_FILTER",
        "context: SIDECAR_INBOUND, listener: {filterChain: {applicationProtocols: 'istio,none'}}",
    ),
    ("to", "HTTP_FILTER", "context: SIDECAR_INBOUND, listener: {filterChain: {destinationPort: 8080}}"),
    ("no-to", "HTTP_FILTER", "context: SIDECAR_INBOUND, listener: {filterChain: {destinationPort: 80}}"),
    ("sni", "HTTP_FILTER", "context: GATEWAY, listener: {filterChain: {sni: one.example}}"),
    (
        "routes-8081",
        "ROUTE_CONFIGURATION",
        "context: SIDECAR_OUTBOUND, routeConfiguration: {portNumber: 8081}",
    ),
    ("routes-80", "ROUTE_CONFIGURATION", "context: SIDECAR_OUTBOUND, routeConfiguration: {name: '80'}"),
    (
        "domain",
        "VIRTUAL_HOST",
        "context: SIDECAR_OUTBOUND, routeConfiguration: {vhost: {domainName: copy.shop.svc}}",
    ),
    ("first", "HTTP_ROUTE", "context: SIDECAR_OUTBOUND, routeConfiguration: {vhost: {route: {name: first}}}"),
    (
        "redirect",
        "HTTP_ROUTE",
        "context: SIDECAR_OUTBOUND, routeConfiguration: {vhost: {route: {action: REDIRECT}}}",
    ),
    (
        "direct",
        "HTTP_ROUTE",
        "context: SIDECAR_OUTBOUND, routeConfiguration: {vhost: {route: {action: DIRECT_RESPONSE}}}",
    ),
    ("edge-80", "ROUTE_CONFIGURATION", "context: GATEWAY, routeConfiguration: {portNumber: 80}"),
    ("edge-name", "ROUTE_CONFIGURATION", "context: GATEWAY, routeConfiguration: {portName: https-two}"),
    ("edge-gateway", "ROUTE_CONFIGURATION", "context: GATEWAY, routeConfiguration: {gateway: shop/one}"),
];

/// EnvoyFilters for the routes of gateways that add a header: its name, their namespace, and the target.
const TARGETS: [(&str, &str, &str); 6] = [
    ("target", "shop", "group: gateway.networking.k8s.io, kind: Gateway, name: edges"),
    ("other-target", "shop", "group: gateway.networking.k8s.io, kind: Gateway, name: others"),
    ("no-group", "shop", "group: networking.istio.io, kind: Gateway, name: edges"),
    ("other-class", "shop", "group: gateway.networking.k8s.io, kind: GatewayClass, name: own"),
    ("class", "istio-system", "group: gateway.networking.k8s.io, kind: GatewayClass, name: own"),
    ("no-class", "istio-system", "group: gateway.networking.k8s.io, kind: GatewayClass, name: edges"),
];

/// Returns a patch that adds a header.
fn patch(name: &str, part: &str, condition: &str) -> String {
    let header = format!("{{header: {{key: {PREFIX}{name}, value: added}}}}");
    let patch = match part {
        "HTTP_FILTER" => format!(
            "{{operation: INSERT_FIRST, value: {{name: {name}, typed_config: {{'@type': \
             type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation, \
             mutations: {{response_mutations: [{{append: {header}}}]}}}}}}}}"
        ),
        _ => format!("{{operation: MERGE, value: {{response_headers_to_add: [{header}]}}}}"),
    };
    format!("  - {{applyTo: {part}, match: {{{condition}}}, patch: {patch}}}\n")
}

/// Returns the EnvoyFilters of the tables.
fn filters() -> String {
    const KIND: &str = "---\napiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\n";
    let mut text = format!("{KIND}metadata: {{name: headers, namespace: shop}}\nspec:\n  configPatches:\n");
    text.extend(PATCHES.map(|(name, part, condition)| patch(name, part, condition)));
    for client in CLIENTS {
        let patch = patch(&format!("of-{client}"), "HTTP_FILTER", "context: SIDECAR_OUTBOUND");
        write!(
            text,
            "{KIND}metadata: {{name: of-{client}, namespace: shop}}\n\
             spec:\n  workloadSelector: {{labels: {{app: {client}}}}}\n  configPatches:\n{patch}"
        )
        .unwrap();
    }
    for (name, namespace, target) in TARGETS {
        let patch = patch(name, "ROUTE_CONFIGURATION", "context: GATEWAY");
        write!(
            text,
            "{KIND}metadata: {{name: {name}, namespace: {namespace}}}\n\
             spec:\n  targetRefs: [{{{target}}}]\n  configPatches:\n{patch}"
        )
        .unwrap();
    }
    text
}

/// Returns an error unless a response has exactly these added headers.
fn has_headers(response: &str, expected: &[&str]) -> Result<(), String> {
    let found: BTreeSet<&str> =
        response.lines().filter_map(|line| Some(line.strip_prefix(PREFIX)?.split_once(':')?.0)).collect();
    let expected: BTreeSet<&str> = expected.iter().copied().collect();
    if found == expected {
        Ok(())
    } else {
        Err(format!("expected {expected:?}, found {found:?}: {response}"))
    }
}

/// Checks which patches apply to a request.
fn patched(mesh: &Mesh, client: &str, case: &Case<'_>, expected: &[&str]) {
    eventually(&format!("{client} {}", case.url), || {
        let answer = mesh.call(client, case.url, &["-i"]);
        let is_it =
            answer.status == Some(case.status) && case.has.iter().all(|has| answer.body.contains(has));
        if is_it { has_headers(&answer.body, expected) } else { Err(format!("{answer:?}")) }
    });
}

#[test]
fn patches_apply_where_their_conditions_hold() {
    let issuer = {
        let mut params = CertificateParams::new(vec!["issuer".to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    };
    let secret = {
        let key = KeyPair::generate().unwrap();
        let names = ["one.example", "two.example"].map(str::to_owned).to_vec();
        let chain = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
        let block = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
        format!(
            "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: web, namespace: shop}}\nstringData:\n  tls.crt: |\n{}  tls.key: |\n{}",
            block(&chain.pem()),
            block(&key.serialize_pem())
        )
    };
    let rules = [RULES, &filters(), &secret].concat();
    let setup = mesh_with(&rules, &["shop/by-envoy", "shop/api-v2", "shop/edge-envoy"]);
    let mesh = setup.with(&PORTS).ready();
    sidecars(&mesh);
    clusters(&mesh);
    gateways(&mesh, issuer.der());
}

fn sidecars(mesh: &Mesh) {
    for client in CLIENTS {
        let selected = format!("of-{client}");
        let own = ["version", client, &*selected, "port-80", "routes-80"];
        let of_api = |url, status, more: &[&str]| {
            patched(mesh, client, &get(url, status, &[]), &[&own[..], more].concat());
        };
        of_api("http://api/", 200, &[&INBOUND[..], &["tls", "protocols", "first"]].concat());
        of_api("http://api/moved", 301, &["redirect"]);
        of_api("http://api/answered", 290, &["direct"]);
        let of_copy =
            ["version", client, &*selected, "name-8081", "routes-8081", "domain", "tls", "protocols"];
        for server in SERVERS {
            let has = [server];
            let case = get("http://copy:8081/", 200, &has);
            patched(mesh, client, &case, &[&of_copy[..], &INBOUND].concat());
        }
        wait(mesh, client, &get("http://api/priority", 291, &[]));
    }
    for server in SERVERS {
        let has = [server];
        let case = get("http://copy:8081/", 200, &has);
        patched(mesh, "plain", &case, &[&INBOUND[..], &["raw"]].concat());
    }
}

fn clusters(mesh: &Mesh) {
    for client in CLIENTS {
        for url in ["http://api/second", "http://api:8081/", "http://copy/"] {
            wait(mesh, client, &get(url, 503, &[]));
        }
        wait(mesh, client, &get("http://api/", 200, &[]));
    }
}

fn gateways(mesh: &Mesh, root: &rustls::pki_types::CertificateDer<'static>) {
    let always = [&INBOUND[..], &["tls", "protocols", "target", "class"]].concat();
    for gateway in GATEWAYS {
        let url = format!("http://{gateway}/");
        patched(mesh, "plain", &get(&url, 200, &[]), &[&always[..], &["edge-80"]].concat());
        // The listener for plain text does not have the filter.
        let client = Client::plain(mesh.published(&format!("shop/{gateway}:80")));
        let response = after_proxy_header(&client, "one.example", false).unwrap();
        assert!(response.starts_with("HTTP/1.1 400"), "{gateway}: {response}");
        let client = Client::tls(mesh.published(&format!("shop/{gateway}:443")), root.clone(), None);
        for (host, own) in [("one.example", &["sni", "edge-gateway"][..]), ("two.example", &["edge-name"])] {
            eventually(&format!("{gateway} {host}"), || {
                has_headers(&after_proxy_header(&client, host, true)?, &[&always[..], own].concat())
            });
        }
    }
}

/// Header of the PROXY protocol.
const PROXY: &[u8] = b"PROXY TCP4 192.0.2.7 192.0.2.8 1000 443\r\n";

/// Sends a request after a header of the PROXY protocol, by TLS or as plain text.
fn after_proxy_header(client: &Client, host: &str, by_tls: bool) -> Result<String, String> {
    fn exchange(mut stream: impl Read + Write, host: &str, response: &mut Vec<u8>) -> io::Result<usize> {
        write!(stream, "GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")?;
        stream.read_to_end(response)
    }
    let mut stream = client.connect()?;
    stream.write_all(PROXY).map_err(|error| error.to_string())?;
    let mut response = Vec::new();
    let result = match by_tls {
        true => exchange(StreamOwned::new(client.session(host), stream), host, &mut response),
        false => exchange(stream, host, &mut response),
    };
    match result {
        Err(error) if response.is_empty() => Err(error.to_string()),
        _ => Ok(String::from_utf8_lossy(&response).into_owned()),
    }
}
