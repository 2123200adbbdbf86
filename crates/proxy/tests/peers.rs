//! Metadata exchange of two sidecars, and renewed certificates and roots under open connections.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/http2.rs"]
mod http2;
#[path = "support/mesh.rs"]
mod mesh;
mod support;

use std::{net::SocketAddr, sync::Arc};

use mesh::{Mesh, accepting, pair};
use rustls::pki_types::CertificateDer;
use skysail_identity::{NameMatch, PeerCheck, Roots, TlsSpec};
use skysail_policy::config::listener::Direction;
use support::{Proxy, cluster, echo, http, listener, tcp, within};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Waits until this metric names both workloads.
async fn until_known(proxy: &Proxy, metric: &str, reporter: &str) {
    let labels = [
        format!("reporter=\"{reporter}\""),
        "source_workload=\"before\"".to_owned(),
        "destination_workload=\"behind\"".to_owned(),
    ];
    within(async {
        loop {
            let metrics = proxy.metrics().await;
            let mut lines = metrics.lines().filter(|line| line.starts_with(metric));
            if lines.any(|line| labels.iter().all(|label| line.contains(label))) {
                return;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn metrics_name_both_workloads_of_a_request() {
    let mesh = Mesh::new();
    let (before, behind) =
        pair(echo().await, mesh.server("server", "client"), mesh.client("client", "server")).await;
    let mut client = before.connect().await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
    until_known(&before, "istio_requests_total{", "source").await;
    until_known(&behind, "istio_requests_total{", "destination").await;
}

#[tokio::test]
async fn metrics_name_both_workloads_of_a_connection() {
    let mesh = Mesh::new();
    let mut inbound = listener(tcp(), Some(mesh.server("server", "client")));
    inbound.direction = Direction::Inbound;
    Arc::get_mut(&mut inbound.chains[0]).unwrap().metadata_exchange = true;
    let behind = Proxy::called("behind", inbound, vec![cluster(&[echo().await], None)]).await;
    let tls = mesh.client("client", "server");
    let mut met = cluster(&[behind.address], Some(&tls));
    met.metadata_exchange = true;
    let before = Proxy::called("before", listener(tcp(), None), vec![met]).await;
    let mut client = before.connect().await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
    drop(client);
    for metric in ["istio_tcp_connections_opened_total{", "istio_tcp_connections_closed_total{"] {
        until_known(&before, metric, "source").await;
        until_known(&behind, metric, "destination").await;
    }
}

type LuaTlsConnection = TlsStream<TcpStream>;

async fn connect(to: SocketAddr, spec: &TlsSpec) -> std::io::Result<LuaTlsConnection> {
    let stream = TcpStream::connect(to).await.unwrap();
    let connector = TlsConnector::from(spec.client().unwrap());
    within(connector.connect("a".try_into().unwrap(), stream)).await
}

/// Sends an HTTP/1.1 request over a stream.
async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    // The server echoes the head, which ends like its own.
    while answer.windows(4).filter(|end| end == b"\r\n\r\n").count() < 2 {
        assert_ne!(within(stream.read_buf(&mut answer)).await.unwrap(), 0, "{}", answer.escape_ascii());
    }
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", answer.escape_ascii());
}

fn shown(stream: &LuaTlsConnection) -> CertificateDer<'static> {
    stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned()
}

#[tokio::test]
async fn connections_outlive_the_certificates_and_roots_they_began_with() {
    let (old, new) = (Mesh::new(), Mesh::new());
    let spec = old.spec("server", "client", &[b"h2", b"http/1.1"]);
    let server = echo().await;
    let start = async |terminal| {
        Proxy::start(listener(terminal, Some(accepting(&spec))), vec![cluster(&[server], None)]).await
    };
    let (over_http, over_tcp) = (start(http(|_, _| ())).await, start(tcp()).await);
    let of_old = old.spec("client", "server", &[b"http/1.1"]);
    let mut http1 = connect(over_http.address, &of_old).await.unwrap();
    let mut bytes = connect(over_tcp.address, &of_old).await.unwrap();
    let of_http2 = TlsSpec { alpn: vec![b"h2".to_vec()], ..of_old.clone() };
    let http2 = http2::client(connect(over_http.address, &of_http2).await.unwrap()).await;
    let mut ask_all = async || {
        ask(&mut http1).await;
        ask(&mut bytes).await;
        let (answer, _) = http2.clone().send_request(http2::request("GET", "/"), true).unwrap();
        assert_eq!(within(answer).await.unwrap().status(), 200);
    };
    ask_all().await;
    let before = shown(&connect(over_http.address, &of_old).await.unwrap());

    // A client that trusts only the new root is not served until the certificate is from it.
    let of_new = new.spec("client", "server", &[b"http/1.1"]);
    connect(over_http.address, &of_new).await.unwrap_err();
    let both = [&old, &new].map(|mesh| mesh.0.roots_pem()).concat();
    spec.peer.as_ref().unwrap().roots.set(Arc::new(Roots::from_pem(both.as_bytes()).unwrap()));
    spec.identities[0].set(Arc::new(new.identity("server")));
    ask_all().await;
    for proxy in [&over_http, &over_tcp] {
        let mut stream = connect(proxy.address, &of_new).await.unwrap();
        assert_ne!(shown(&stream), before);
        ask(&mut stream).await;
        // Clients with old certificates are served too, once they trust the new root.
        let names = vec![NameMatch::uri("spiffe://cluster.local/ns/default/sa/server")];
        let roots = of_new.peer.as_ref().unwrap().roots.clone();
        let between = TlsSpec { peer: Some(PeerCheck::spiffe(roots, names)), ..of_old.clone() };
        ask(&mut connect(proxy.address, &between).await.unwrap()).await;
    }
    ask_all().await;
}
