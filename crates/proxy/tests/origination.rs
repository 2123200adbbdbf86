//! TLS origination: SNI, and the names that server certificates must have. The sidecar behaves as Envoy with
//! the same configuration.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/either.rs"]
mod either;
#[path = "support/envoy.rs"]
mod envoy;
#[path = "support/program.rs"]
mod program;
mod support;

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use either::Either;
use rcgen::{CertifiedKey, KeyPair};
use serde_json::{Value, json};
use skysail_identity::{Identity, Live, TlsSpec};
use support::Client;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// Starts a server that answers with the SNI and the number of the connection.
async fn server(certificate: &CertifiedKey<KeyPair>) -> (SocketAddr, Arc<AtomicUsize>) {
    let (chain, key) = (certificate.cert.pem(), certificate.signing_key.serialize_pem());
    let identity = Identity::from_pem(chain.as_bytes(), key.as_bytes()).unwrap();
    let alpn = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let spec = TlsSpec { identities: vec![Live::new(identity)], alpn, ..TlsSpec::default() };
    let acceptor = TlsAcceptor::from(spec.server().unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let taken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&taken);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, count) = (acceptor.clone(), Arc::clone(&count));
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let session = stream.get_ref().1;
                let name = session.server_name().unwrap_or("nobody").to_owned();
                let answer = format!("{name} {}", count.fetch_add(1, Relaxed));
                if session.alpn_protocol() == Some(b"h2") {
                    answer_http2(stream, answer).await;
                } else {
                    answer_http1(stream, &answer).await;
                }
            });
        }
    });
    (address, taken)
}

async fn answer_http1(mut stream: TlsStream<TcpStream>, answer: &str) {
    let mut head = Vec::new();
    while let Ok(byte) = stream.read_u8().await {
        head.push(byte);
        if head.ends_with(b"\r\n\r\n") {
            head.clear();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{answer}", answer.len());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    }
}

async fn answer_http2(stream: TlsStream<TcpStream>, answer: String) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((_, mut respond))) = connection.accept().await {
        let head = http::Response::builder().header("content-length", answer.len()).body(()).unwrap();
        let mut content = respond.send_response(head, false).unwrap();
        content.send_data(answer.clone().into(), true).unwrap();
    }
}

/// Returns a listener and a cluster of the same name.
fn way(name: &str, server: SocketAddr, http: &Value, tls: &Value) -> [Value; 2] {
    let typed = |kind: &str, config: &Value| {
        let mut config = config.clone();
        config["@type"] = format!("type.googleapis.com/envoy.extensions.{kind}").into();
        json!({"name": "any", "typed_config": config})
    };
    let socket = |port: u16| json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    let routes = json!([
        {"match": {"prefix": "/renamed"}, "route": {"cluster": name, "host_rewrite_literal": "renamed.example"}},
        {"match": {"prefix": "/"}, "route": {"cluster": name}},
    ]);
    let manager = json!({
        "stat_prefix": name,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [typed("filters.http.router.v3.Router", &json!({}))],
    });
    let manager = typed("filters.network.http_connection_manager.v3.HttpConnectionManager", &manager);
    let listener = json!({"name": name, "address": socket(0), "filter_chains": [{"filters": [manager]}]});
    let options = "upstreams.http.v3.HttpProtocolOptions";
    let endpoint = json!({"endpoint": {"address": socket(server.port())}});
    let cluster = json!({
        "name": name,
        "type": "STATIC",
        "circuit_breakers": {"thresholds": [{"max_connections": if name == "narrow" { 1 } else { 100 }}]},
        "typed_extension_protocol_options":
            {format!("envoy.extensions.{options}"): typed(options, http)["typed_config"]},
        "transport_socket": typed("transport_sockets.tls.v3.UpstreamTlsContext", tls),
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    });
    [listener, cluster]
}

/// Path, host and `x-name` of the requests.
const REQUESTS: &[[&str; 3]] = &[
    ["/", "a.example", ""],
    ["/", "b.example", ""],
    ["/", "a.example:8443", ""],
    ["/", "b.example", "a.example"],
    ["/", "other.example", ""],
    ["/", "127.0.0.1", ""],
    ["/", "[::1]:80", ""],
    ["/renamed", "a.example", ""],
    ["/", "a.example", "b.example:1"],
    ["/", "b.example", ""],
];

/// Returns the server's answer to each request, or the status without one.
async fn answers(proxy: &Either, name: &str) -> Vec<String> {
    let mut client = Client::new(TcpStream::connect(proxy.listener(name).await).await.unwrap());
    let mut answers = Vec::new();
    for [path, host, name] in REQUESTS {
        let name = if name.is_empty() { String::new() } else { format!("x-name: {name}\r\n") };
        client.send(&format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{name}\r\n")).await;
        let (head, body) = client.message().await;
        let status = head.split(' ').nth(1).unwrap();
        answers.push(if status == "200" { body } else { status.to_owned() });
    }
    answers
}

#[tokio::test]
async fn sni_and_verified_names_equal_envoys() {
    let names = ["a.example", "b.example", "renamed.example"].map(str::to_owned);
    let certificate = rcgen::generate_simple_self_signed(names).unwrap();
    let (server, taken) = server(&certificate).await;
    let http1 = json!({"http_protocol_options": {}});
    let options =
        |upstream| json!({"explicit_http_config": http1, "upstream_http_protocol_options": upstream});
    let auto = options(json!({"auto_sni": true}));
    let trusted = json!({"trusted_ca": {"inline_string": certificate.cert.pem()}});
    let ways = [
        ("fixed", options(json!({})), json!({"sni": "fixed.example"})),
        ("auto", auto.clone(), json!({"sni": "fixed.example"})),
        (
            "checked",
            options(json!({"auto_sni": true, "auto_san_validation": true})),
            json!({"common_tls_context": {"validation_context": trusted}}),
        ),
        ("header", options(json!({"auto_sni": true, "override_auto_sni_header": "X-Name"})), json!({})),
        (
            "http2",
            json!({
                "explicit_http_config": {"http2_protocol_options": {}},
                "upstream_http_protocol_options": {"auto_sni": true},
            }),
            json!({"common_tls_context": {"alpn_protocols": ["h2"]}}),
        ),
        ("narrow", auto, json!({})),
    ];
    let made: Vec<_> = ways.iter().map(|(name, http, tls)| way(name, server, http, tls)).collect();
    let part = |index: usize| made.iter().map(|way| way[index].clone()).collect::<Value>();
    let bootstrap = json!({
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"listeners": part(0), "clusters": part(1)},
    });
    let [envoy, skysail] = Either::both(&bootstrap.to_string()).await;
    for (name, ..) in &ways {
        let mut received = Vec::new();
        for proxy in [&envoy, &skysail] {
            taken.store(0, Relaxed);
            received.push(answers(proxy, name).await);
        }
        if *name == "narrow" {
            // With at most one connection, the next name closes the last one's; Envoy keeps one connection per
            // name.
            for answers in &mut received {
                for answer in answers {
                    answer.truncate(answer.find(' ').unwrap_or(answer.len()));
                }
            }
        }
        assert_eq!(received[0], received[1], "{name}: Envoy, ours");
        let different = received[0].iter().collect::<std::collections::BTreeSet<_>>().len();
        assert!(different > 3 || *name == "fixed", "{received:?}");
    }
}
