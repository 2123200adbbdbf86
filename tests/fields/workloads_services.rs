//! Service, and the TLS connections that a VirtualService routes by their address and client.

use std::{fmt::Write as _, sync::Arc};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, crypto::aws_lc_rs::default_provider, pki_types::ServerName,
};
use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, ask, get, log, mesh_with, pools_connections::services, wait};

const RULES: &str = include_str!("workloads_services.yaml");

fn start() -> Mesh {
    let vaults = services("vault", &["first", "second", "third"], "{name: tls, port: 443}");
    // One pod is never ready.
    mesh_with(&[RULES, &vaults].concat(), &["shop/by-envoy"]).with(&["--run-commands"]).start()
}

#[test]
fn services_have_addresses_and_endpoints() {
    let mesh = start();
    let caller = &["ns/shop/sa/buyer", "\"version\""];
    for client in CLIENTS {
        for url in ["http://10.96.250.7/", "http://10.96.250.8/", "http://transports/"] {
            wait(&mesh, client, &get(url, 200, caller));
        }
        // Routes of HTTP do not concern the other port.
        wait(&mesh, client, &get("http://declared/", 299, &[]));
        wait(&mesh, client, &get("http://declared:81/", 200, &["\"version\""]));
        // A port of UDP is none of HTTP.
        ask(&mesh, client, &get("http://transports:81/", 200, &[])).unwrap_err();
        wait(&mesh, client, &get("http://eager/", 200, &["\"name\":\"unready\""]));
        wait(&mesh, client, &get("http://patient/", 503, &["no healthy upstream"]));
    }
}

/// Returns the first message of a TLS client in the escapes of `printf`.
fn hello(name: &'static str) -> String {
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
    let mut session = ClientConnection::new(Arc::new(config), ServerName::try_from(name).unwrap()).unwrap();
    let mut bytes = Vec::new();
    session.write_tls(&mut bytes).unwrap();
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "\\x{byte:02x}").unwrap();
        text
    })
}

#[test]
fn tls_is_routed_by_address_and_namespace() {
    let mesh = start();
    let hello = hello("secure.example.com");
    let by_address = [("240.5.1.1", "first"), ("240.5.2.1", "second")];
    let cases = CLIENTS.iter().flat_map(|client| by_address.map(|(address, to)| (*client, address, to)));
    for (client, address, to) in cases.chain([("outsider", "240.5.2.1", "third")]) {
        // The server returns what it gets.
        let script = format!("exec 3<>/dev/tcp/{address}/443; printf '{hello}' >&3; head -c 2 <&3");
        let texts =
            [format!("outbound|443||{to}.shop."), format!("{address}:443"), "secure.example.com".into()];
        eventually(&format!("{client} reaches {to} by {address}"), || {
            let output = mesh.run(&["exec", client, "--", "bash", "-c", &script]);
            let log = log(&mesh, &[client, "-c", "proxy"]);
            let is_logged = log.lines().any(|line| texts.iter().all(|text| line.contains(text)));
            if output.stdout == b"\x16\x03" && is_logged { Ok(()) } else { Err(format!("{output:?} {log}")) }
        });
        let log = log(&mesh, &[client, "-c", "proxy"]);
        let others = log.lines().filter(|line| line.contains(&texts[1]) && line.contains("outbound|443||"));
        assert!(others.clone().all(|line| line.contains(&texts[0])), "{client} {address}: {log}");
    }
}
