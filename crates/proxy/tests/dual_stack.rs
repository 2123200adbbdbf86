//! IPv6, alone and together with IPv4, downstream and upstream.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/program.rs"]
mod program;
mod support;

use std::net::SocketAddr;

use files::{address, cluster, filter, http, listener, to, with};
use program::Program;
use serde_json::{Value, json};
use support::{Client, echo, within};
use tokio::net::{TcpListener, TcpStream};

/// Returns a port of this host that refuses connections.
fn refusing_address(host: &str) -> SocketAddr {
    std::net::TcpListener::bind((host, 0)).unwrap().local_addr().unwrap()
}

/// Returns a listener of both families that leads to this cluster. A policy allows only clients at ::1 and
/// 127.0.0.1.
fn bootstrap(cluster: Value) -> String {
    let ranges = [
        json!({"address_prefix": "::1", "prefix_len": 128}),
        json!({"address_prefix": "127.0.0.0", "prefix_len": 8}),
    ];
    let principals = ranges.map(|range| json!({"direct_remote_ip": range}));
    let near = json!({"permissions": [{"any": true}], "principals": principals});
    let rbac = filter("http.rbac.v3.RBAC", &json!({"rules": {"policies": {"near": near}}}));
    let manager = http(&[rbac], &to("c"), &json!({"use_remote_address": true}));
    let also = json!({"additional_addresses": [{"address": address("[::1]:0".parse().unwrap())}]});
    files::bootstrap(&[with(listener("both", &[manager]), &also)], &[cluster])
}

/// Sends a request to each of the listener's two addresses and returns what the server sees.
async fn ask(program: &Program) -> Vec<String> {
    let page = program.page("GET", "/listeners").await;
    let addresses: Vec<SocketAddr> =
        page.lines().filter_map(|line| line.strip_prefix("both::")?.parse().ok()).collect();
    let mut seen = Vec::new();
    for host in ["127.0.0.1", "::1"] {
        let address = addresses.iter().find(|address| address.ip().to_string() == host).unwrap();
        let mut client = Client::new(TcpStream::connect(address).await.unwrap());
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}{body}");
        seen.push(body);
    }
    seen
}

/// Starts a server at this address that answers with the client's address.
async fn echo_client_address(host: &str) -> SocketAddr {
    let listener = TcpListener::bind((host, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, from) = listener.accept().await.unwrap();
            let mut client = Client::new(stream);
            tokio::spawn(async move {
                while let Some((head, _)) = client.message_if_any().await {
                    let answer = format!("{}\n{head}", from.ip());
                    let length = answer.len();
                    client
                        .send(&format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{answer}"))
                        .await;
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn either_family_leads_to_either() {
    for host in ["127.0.0.1", "::1"] {
        let server = echo_client_address(host).await;
        let folder = tempfile::tempdir().unwrap();
        let program = Program::start(folder.path(), &bootstrap(cluster("c", server, false))).await;
        let seen = ask(&program).await;
        assert!(seen.iter().all(|seen| seen.starts_with(host)), "{seen:?}");
        assert!(seen[0].contains("x-envoy-external-address: 127.0.0.1\r\n"), "{seen:?}");
        assert!(seen[1].contains("x-envoy-external-address: ::1\r\n"), "{seen:?}");
    }
}

#[tokio::test]
async fn connections_use_the_source_address_of_their_family() {
    let bind = json!({
        "source_address": {"address": "127.0.0.6", "port_value": 0},
        "extra_source_addresses": [{"address": {"address": "::1", "port_value": 0}}]
    });
    for (host, source) in [("127.0.0.1", "127.0.0.6"), ("::1", "::1")] {
        let server = echo_client_address(host).await;
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = cluster("c", server, false);
        cluster["upstream_bind_config"] = bind.clone();
        let program = Program::start(folder.path(), &bootstrap(cluster)).await;
        for seen in ask(&program).await {
            assert!(seen.starts_with(&format!("{source}\n")), "{seen}");
        }
    }
}

#[tokio::test]
async fn the_first_reachable_address_of_an_endpoint_is_used() {
    let server = echo().await;
    let folder = tempfile::tempdir().unwrap();
    // The first address refuses connections, and the second does not accept them.
    let full = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::STREAM, None).unwrap();
    full.bind(&"[::1]:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    full.listen(0).unwrap();
    let at = full.local_addr().unwrap().as_socket().unwrap();
    let _taken = [TcpStream::connect(at).await.unwrap()];
    let mut cluster = cluster("c", refusing_address("::1"), false);
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["additional_addresses"] =
        json!([{"address": address(at)}, {"address": address(server)}]);
    let program = Program::start(folder.path(), &bootstrap(cluster)).await;
    within(ask(&program)).await;
}

#[tokio::test]
async fn names_are_resolved_in_the_configured_family() {
    let host = "127.0.0.1";
    let server = echo_client_address(host).await;
    for (family, kind) in [("V4_ONLY", "STRICT_DNS"), ("V4_PREFERRED", "LOGICAL_DNS"), ("ALL", "LOGICAL_DNS")]
    {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = cluster("c", server, false);
        let endpoint = &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"];
        endpoint["address"]["socket_address"]["address"] = "localhost".into();
        cluster["type"] = kind.into();
        cluster["dns_lookup_family"] = family.into();
        let program = Program::start(folder.path(), &bootstrap(cluster)).await;
        for seen in ask(&program).await {
            assert!(seen.starts_with(host), "{family}: {seen}");
        }
    }
}
