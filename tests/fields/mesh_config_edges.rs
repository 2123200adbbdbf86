//! MeshConfig: settings of gateways, of Ingresses, and of TLS with clients outside of the mesh.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::Arc,
    time::Duration,
};

use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::{
    CipherSuite, ClientConfig, ClientConnection, NamedGroup, RootCertStore, StreamOwned,
    crypto::aws_lc_rs::default_provider, pki_types::ServerName, version::TLS12,
};
use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, Case, check, mesh_with, wait, with};

const RULES: &str = include_str!("mesh_config_edges.yaml");
const GATEWAYS: [&str; 2] = ["edge-skysail", "edge-envoy"];
/// Timeout of reads. A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits for the response of each gateway to a request for a host.
fn at(mesh: &Mesh, host: &str, expected: &Case<'_>) {
    let host = format!("host: {host}");
    for gateway in GATEWAYS {
        let arguments = [&["-H", &host], expected.arguments].concat();
        wait(mesh, "plain", &Case { url: &format!("http://{gateway}/"), arguments: &arguments, ..*expected });
    }
}

fn is<'a>(status: u16, has: &'a [&'a str]) -> Case<'a> {
    Case { url: "", arguments: &[], status, has, lacks: &[] }
}

#[test]
fn gateways_follow_the_mesh() {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["own.example".to_owned()]).unwrap();
    let block = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    let secret = format!(
        "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: own, namespace: shop}}\nstringData:\n  tls.crt: |\n{}  tls.key: |\n{}",
        block(&cert.pem()),
        block(&signing_key.serialize_pem())
    );
    let setup = mesh_with(&[RULES, &secret].concat(), &["shop/edge-envoy", "shop/by-envoy"]);
    let published = [
        "-p",
        "0:edge-skysail:80",
        "-p",
        "0:edge-envoy:80",
        "-p",
        "0:edge-skysail:443",
        "-p",
        "0:edge-envoy:443",
    ];
    let mesh = setup.with(&published).ready();
    ingresses(&mesh);
    let mut trusted = RootCertStore::empty();
    trusted.add(cert.der().clone()).unwrap();
    tls(&mesh, &trusted);
    profile(&mesh);
    topology(&mesh);
}

/// Gateways have the defaults of the profile, sidecars have not.
fn profile(mesh: &Mesh) {
    let refused = ["-H", "x_name: 1"];
    at(mesh, "own.example", &Case { arguments: &refused, ..is(400, &[]) });
    for gateway in GATEWAYS {
        let arguments = ["-H", "host: own.example"];
        let url = format!("http://{gateway}/a%2Fb");
        check(mesh, &["plain"], &[with(&arguments, &url, 307, &["location: /a/b"])]);
        let dump = mesh.call(gateway, "http://127.0.0.1:15000/config_dump", &[]).body;
        let dump: String = dump.split_whitespace().collect();
        for text in [
            "\"per_connection_buffer_limit_bytes\":32768",
            "\"max_concurrent_streams\":100",
            "\"initial_connection_window_size\":131072",
        ] {
            assert!(dump.contains(text), "{gateway} has no {text}: {dump}");
        }
    }
    for client in CLIENTS {
        wait(mesh, client, &with(&refused, "http://api/", 200, &["\"x_name\":\"1\""]));
    }
    mesh.edit("rules.yaml", "profile: EDGE", "listenerPerConnectionBufferLimitBytes: 40000");
    for gateway in GATEWAYS {
        eventually(&format!("{gateway} has the buffer size"), || {
            let dump = mesh.call(gateway, "http://127.0.0.1:15000/config_dump", &[]).body;
            let dump: String = dump.split_whitespace().collect();
            let is_it = dump.contains("\"per_connection_buffer_limit_bytes\":40000");
            if is_it { Ok(()) } else { Err(dump) }
        });
    }
}

fn ingresses(mesh: &Mesh) {
    let pod = is(200, &["\"pod\""]);
    at(mesh, "own.example", &pod);
    at(mesh, "none.example", &is(404, &[]));
    at(mesh, "other.example", &is(404, &[]));
    mesh.edit("rules.yaml", "ingressControllerMode: STRICT", "ingressControllerMode: DEFAULT");
    at(mesh, "none.example", &pod);
    at(mesh, "own.example", &pod);
    mesh.edit("rules.yaml", "ingressClass: own-class", "ingressClass: istio");
    at(mesh, "other.example", &pod);
    at(mesh, "own.example", &is(404, &[]));
    mesh.edit("rules.yaml", "ingressClass: istio", "ingressClass: own-class");
    at(mesh, "own.example", &pod);
    // The label of the proxies is that of `ingressSelector`; without one, the name of the service.
    for (from, to, is_served) in [
        ("ingressService: own-edge", "ingressService: nobody", false),
        ("ingressSelector: \"\"", "ingressSelector: own-edge", true),
    ] {
        mesh.edit("rules.yaml", from, to);
        for gateway in GATEWAYS {
            let url = format!("http://{gateway}/");
            eventually(&format!("{gateway} serves: {is_served}"), || {
                let answer = mesh.call("plain", &url, &["-H", "host: own.example"]);
                if (answer.status == Some(200)) == is_served { Ok(()) } else { Err(format!("{answer:?}")) }
            });
        }
    }
    mesh.edit("rules.yaml", "ingressControllerMode: DEFAULT", "ingressControllerMode: \"OFF\"");
    for gateway in GATEWAYS {
        eventually("nothing is served", || {
            let answer = mesh.call("plain", &format!("http://{gateway}/"), &["-H", "host: own.example"]);
            if answer.status == Some(200) { Err(format!("{answer:?}")) } else { Ok(()) }
        });
    }
    mesh.edit("rules.yaml", "ingressControllerMode: \"OFF\"", "ingressControllerMode: STRICT");
    at(mesh, "own.example", &pod);
}

/// A client of TLS 1.2 gets the suite and the curve of the mesh.
fn tls(mesh: &Mesh, trusted: &RootCertStore) {
    for gateway in GATEWAYS {
        let address = mesh.published(&format!("shop/{gateway}:443"));
        let spoken = eventually(&format!("{gateway} speaks TLS"), || {
            let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
            let config = config.with_protocol_versions(&[&TLS12]).unwrap();
            let config = config.with_root_certificates(trusted.clone()).with_no_client_auth();
            let name = ServerName::try_from("own.example").unwrap();
            let session = ClientConnection::new(Arc::new(config), name).unwrap();
            let stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut stream = StreamOwned::new(session, stream);
            stream
                .write_all(b"GET / HTTP/1.1\r\nhost: own.example\r\n\r\n")
                .map_err(|error| error.to_string())?;
            let suite = stream.conn.negotiated_cipher_suite().map(|suite| suite.suite());
            Ok((suite, stream.conn.negotiated_key_exchange_group().map(|group| group.name())))
        });
        let expected = (CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, NamedGroup::secp384r1);
        assert_eq!(spoken, (Some(expected.0), Some(expected.1)), "{gateway}");
    }
}

fn topology(mesh: &Mesh) {
    let headers =
        ["-H", "x-forwarded-for: 192.0.2.1, 192.0.2.2, 192.0.2.3", "-H", "x-forwarded-client-cert: By=own"];
    let trusted = ["\"x-envoy-external-address\":\"192.0.2.2\"", "\"x-forwarded-client-cert\":\"By=own"];
    at(mesh, "own.example", &Case { arguments: &headers, ..is(200, &trusted) });
    mesh.edit("rules.yaml", "ALWAYS_FORWARD_ONLY", "SANITIZE, proxyProtocol: {}");
    mesh.edit("rules.yaml", "numTrustedProxies: 2", "numTrustedProxies: 0");
    for gateway in GATEWAYS {
        let address = mesh.published(&format!("shop/{gateway}:80"));
        let send = |start: &str| -> Result<String, String> {
            let mut stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let request = "GET / HTTP/1.1\r\nhost: own.example\r\nx-forwarded-client-cert: By=own\r\nconnection: close\r\n\r\n";
            stream.write_all(format!("{start}{request}").as_bytes()).map_err(|error| error.to_string())?;
            let mut response = String::new();
            stream.read_to_string(&mut response).map_err(|error| error.to_string())?;
            Ok(response)
        };
        eventually(&format!("{gateway} reads the PROXY protocol"), || {
            let response = send("PROXY TCP4 192.0.2.77 192.0.2.78 1000 80\r\n")?;
            let is_it = response.contains("\"x-forwarded-for\":\"192.0.2.77") && !response.contains("By=own");
            if is_it { Ok(()) } else { Err(response) }
        });
        let without = send("");
        assert!(!without.as_ref().is_ok_and(|response| response.contains("HTTP/1.1 200")), "{without:?}");
    }
}
