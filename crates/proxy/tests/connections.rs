//! TCP connections: their destination, and half-closes in either direction.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/mesh.rs"]
mod mesh;
mod support;

use std::{io, net::SocketAddr, sync::Arc};

use mesh::{Mesh, account};
use skysail_identity::TlsSpec;
use skysail_policy::config::{
    Cluster, FilterChain, Listener,
    cluster::{Balancer, Discovery},
    listener::{ChainMatch, Inspect, ProxyProtocolFilter, TcpProxy, Terminal, Transport, Tunneling},
    route::Targets,
};
use support::{Client, Proxy, cluster, http, listener, server, tcp, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

fn bytes_to(cluster: &str) -> Terminal {
    let Terminal::Tcp(proxy) = tcp() else { unreachable!() };
    let mut proxy = Arc::into_inner(proxy).unwrap();
    proxy.targets = Targets::Single(cluster.into());
    Terminal::Tcp(Arc::<TcpProxy>::new(proxy))
}

/// Returns a listener that selects clusters by SNI; the servers terminate TLS.
fn by_name(names: &[(&str, &str)]) -> Listener {
    let chain = |(name, cluster): &(&str, &str)| {
        let chain = FilterChain {
            name: (*name).into(),
            matches: ChainMatch {
                transport: Some(Transport::Tls),
                server_names: vec![(*name).into()],
                ..ChainMatch::default()
            },
            tls: None,
            policies: vec![],
            sni_port: None,
            host_cache: None,
            connection_limits: Vec::new(),
            external_authorization: None,
            metadata_exchange: false,
            terminal: bytes_to(cluster),
            handshake_timeout: None,
            fingerprint: None,
        };
        Arc::new(chain)
    };
    let chains = names.iter().map(chain).collect();
    Listener { inspect_tls: Some(Inspect::default()), chains, ..listener(tcp(), None) }
}

/// Starts a TLS server and returns the cluster that leads to it.
async fn secured(mesh: &Mesh, name: &str) -> Cluster {
    let spec = TlsSpec { peer: None, ..mesh.spec(name, "", &[]) };
    let acceptor = TlsAcceptor::from(spec.server().unwrap());
    let serve = move |_, client: Client| {
        let acceptor = acceptor.clone();
        async move {
            let _ = acceptor.accept(client.stream).await.unwrap().read_u8().await;
        }
    };
    Cluster { name: name.into(), ..cluster(&[server(serve).await], None) }
}

/// Returns the account of the certificate that a client with this SNI receives.
async fn asked_for(name: &str, stream: impl support::Stream) -> io::Result<String> {
    let connector = TlsConnector::from(TlsSpec::default().client().unwrap());
    let connected = within(connector.connect(name.to_owned().try_into().unwrap(), stream)).await;
    Ok(account(&connected?))
}

#[tokio::test]
async fn tls_is_passed_through_by_sni() {
    let mesh = Mesh::new();
    let clusters = vec![secured(&mesh, "first").await, secured(&mesh, "second").await];
    let listener = by_name(&[("a.example", "first"), ("*.b.example", "second")]);
    let proxy = Proxy::start(listener, clusters).await;
    let ask = async |name| asked_for(name, proxy.connect().await.stream).await;
    for _ in 0..2 {
        assert_eq!(ask("a.example").await.unwrap(), "first");
        assert_eq!(ask("c.b.example").await.unwrap(), "second");
        ask("b.example").await.unwrap_err();
        ask("other.example").await.unwrap_err();
    }
    // Without TLS there is no SNI.
    let mut plain = proxy.connect().await;
    plain.send("GET / HTTP/1.1\r\nhost: a.example\r\n\r\n").await;
    assert_eq!(plain.rest().await, "");

    // The ClientHello arrives in two pieces. A whole handshake of another client in between ensures that the
    // proxy has read the first piece.
    let mut stream = proxy.connect().await.stream;
    let (client, mut relayed) = tokio::io::duplex(64 * 1024);
    let relay = async {
        let mut hello = vec![0; 64 * 1024];
        let length = relayed.read(&mut hello).await.unwrap();
        let (one, other) = hello[..length].split_at(100);
        stream.write_all(one).await.unwrap();
        assert_eq!(ask("a.example").await.unwrap(), "first");
        stream.write_all(other).await.unwrap();
        copy_bidirectional(&mut relayed, &mut stream).await
    };
    let (answered, _) = tokio::join!(asked_for("c.b.example", client), relay);
    assert_eq!(answered.unwrap(), "second");
}

#[tokio::test]
async fn connections_reach_their_original_destination() {
    let original = || Cluster {
        discovery: Discovery::OriginalDst(None),
        balancer: Balancer::OriginalDst,
        ..cluster(&[], None)
    };
    let refusing_address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let named = async |name: &'static str| {
        server(move |_, mut client| async move {
            while client.message_if_any().await.is_some() {
                client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{name}")).await;
            }
        })
        .await
    };
    let servers = [named("a").await, named("b").await];
    for terminal in [http(|_, _| ()), tcp()] {
        let is_http = matches!(terminal, Terminal::Http(_));
        let proxied = Some(ProxyProtocolFilter { except: vec![], optional: false, refused: vec![] });
        let listener = Listener { proxy_protocol: proxied, ..listener(terminal, None) };
        let proxy = Proxy::start(listener, vec![original()]).await;
        let going_to = async |to: SocketAddr| {
            let mut client = proxy.connect().await;
            client.send(&format!("PROXY TCP4 127.0.0.1 127.0.0.1 1000 {}\r\n", to.port())).await;
            client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
            client.message_if_any().await
        };
        for _ in 0..2 {
            assert_eq!(going_to(servers[0]).await.unwrap().1, "a");
            assert_eq!(going_to(servers[1]).await.unwrap().1, "b");
            let answer = going_to(refusing_address).await;
            assert_eq!(answer.is_some_and(|(head, _)| head.starts_with("HTTP/1.1 503 ")), is_http);
        }
    }
}

/// Returns a listener whose connections are tunnelled.
fn tunnelled(is_post: bool) -> Listener {
    let Terminal::Tcp(proxy) = tcp() else { unreachable!() };
    let mut proxy = Arc::into_inner(proxy).unwrap();
    proxy.tunnel = Some(Tunneling { target: "a.example:443".into(), is_post });
    listener(Terminal::Tcp(Arc::<TcpProxy>::new(proxy)), None)
}

#[tokio::test]
async fn connections_are_tunnelled_through_an_http_proxy() {
    let connect = "CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n";
    // The first bytes of the tunnel arrive together with the response, which arrives in two pieces.
    let open = server(move |_, mut client: Client| async move {
        let mut head = vec![0; connect.len()];
        client.stream.read_exact(&mut head).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&head), connect);
        client.send("HTTP/1.1 200 OK\r\nx-a: b\r\n").await;
        tokio::task::yield_now().await;
        client.send("\r\nhello ").await;
        let (mut from, mut to) = client.stream.split();
        tokio::io::copy(&mut from, &mut to).await.unwrap();
    })
    .await;
    let proxy = Proxy::start(tunnelled(false), vec![cluster(&[open], None)]).await;
    let mut client = proxy.connect().await;
    client.send("world").await;
    client.stream.shutdown().await.unwrap();
    assert_eq!(client.rest().await, "hello world");

    for refusal in ["HTTP/1.1 403 Forbidden\r\n\r\nsecret", "SSH-2.0-x\r\n\r\n", "HTTP/1.1 200 "] {
        let closed = server(move |_, mut client: Client| async move {
            let mut head = vec![0; connect.len()];
            client.stream.read_exact(&mut head).await.unwrap();
            client.send(refusal).await;
        })
        .await;
        let proxy = Proxy::start(tunnelled(false), vec![cluster(&[closed], None)]).await;
        assert_eq!(proxy.connect().await.rest().await, "", "{refusal:?}");
    }
}

#[tokio::test]
async fn connections_are_tunnelled_in_bodies_of_a_post() {
    let post = "POST / HTTP/1.1\r\nHost: a.example:443\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunked =
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nhello \r\n";
    for (start, end) in [
        (chunked, "3\r\nall\r\n0\r\n\r\nmore"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello ", "allmore"),
        ("HTTP/1.0 200 OK\r\n\r\nhello ", "all"),
    ] {
        let server = server(move |_, mut client: Client| async move {
            let mut sent = vec![0; post.len()];
            client.stream.read_exact(&mut sent).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&sent), post);
            client.send(start).await;
            let body = "5\r\nworld\r\n0\r\n\r\n";
            let mut sent = vec![0; body.len()];
            client.stream.read_exact(&mut sent).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&sent), body);
            client.send(end).await;
        })
        .await;
        let proxy = Proxy::start(tunnelled(true), vec![cluster(&[server], None)]).await;
        let mut client = proxy.connect().await;
        let mut first = [0; 6];
        client.stream.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"hello ");
        client.send("world").await;
        client.stream.shutdown().await.unwrap();
        assert_eq!(client.rest().await, "all");
    }
    let cut = server(move |_, mut client: Client| async move {
        client.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\nhe").await;
        client.stream.read_exact(&mut vec![0; post.len()]).await.unwrap();
    })
    .await;
    let proxy = Proxy::start(tunnelled(true), vec![cluster(&[cut], None)]).await;
    assert_eq!(proxy.connect().await.rest().await, "he", "a response that is cut ends the connection");
}

/// The inspection of the client's bytes opens the tunnel, because the client sends nothing.
#[tokio::test]
async fn a_server_may_send_first_through_a_tunnel() {
    let connect = "CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n";
    let open = server(move |_, mut client: Client| async move {
        client.stream.read_exact(&mut vec![0; connect.len()]).await.unwrap();
        client.send("HTTP/1.1 200 OK\r\n\r\n220 ready\r\n").await;
        client.rest().await;
    })
    .await;
    let (mut inspected, mut web) = (tunnelled(false), listener(http(|_, _| ()), None));
    Arc::get_mut(&mut web.chains[0]).unwrap().matches.application_protocols = vec!["http/1.1".into()];
    inspected.chains.append(&mut web.chains);
    inspected.inspect_http = Some(Inspect::default());
    let proxy = Proxy::start(inspected, vec![cluster(&[open], None)]).await;
    assert_eq!(within(proxy.connect().await.until("\n")).await, "220 ready\r\n");
}

/// The bytes of a tunnel begin with HTTP, so no metadata of sidecars precede them.
#[tokio::test]
async fn a_tunnel_does_not_exchange_the_metadata_of_sidecars() {
    let (mesh, post) =
        (Mesh::new(), "POST / HTTP/1.1\r\nHost: a.example:443\r\nTransfer-Encoding: chunked\r\n\r\n");
    let server = server(move |_, mut client: Client| async move {
        client.stream.read_exact(&mut vec![0; post.len()]).await.unwrap();
        client.send("HTTP/1.1 200 OK\r\n\r\nhello ").await;
        assert_eq!(client.exactly(10).await, "5\r\nworld\r\n");
        client.send("all").await;
    })
    .await;
    let mut behind = listener(tcp(), Some(mesh.server("server", "client")));
    Arc::get_mut(&mut behind.chains[0]).unwrap().metadata_exchange = true;
    let behind = Proxy::called("behind", behind, vec![cluster(&[server], None)]).await;
    let mut secured = cluster(&[behind.address], Some(&mesh.client("client", "server")));
    secured.metadata_exchange = true;
    let proxy = Proxy::start(tunnelled(true), vec![secured]).await;
    let mut client = proxy.connect().await;
    client.send("world").await;
    assert_eq!(within(client.rest()).await, "hello all");
}

/// Starts a server that sends everything at once, half-closes, and reports how many bytes it receives.
async fn brief() -> (SocketAddr, UnboundedReceiver<usize>) {
    let (tell, received) = unbounded_channel();
    let serve = move |_, mut client: Client| {
        let tell = tell.clone();
        async move {
            client.send("bye").await;
            client.stream.shutdown().await.unwrap();
            tell.send(client.rest().await.len()).unwrap();
        }
    };
    (server(serve).await, received)
}

/// Sends much data after the server has half-closed.
async fn outlast(mut client: Client, received: &mut UnboundedReceiver<usize>) {
    assert_eq!(client.rest().await, "bye");
    client.send(&"x".repeat(300_000)).await;
    client.stream.shutdown().await.unwrap();
    assert_eq!(within(received.recv()).await.unwrap(), 300_000);
}

#[tokio::test]
async fn a_server_may_half_close_first_and_receives_the_rest() {
    let (server, mut received) = brief().await;
    let plain = Proxy::start(listener(tcp(), None), vec![cluster(&[server], None)]).await;
    let mesh = Mesh::new();
    let inbound = listener(tcp(), Some(mesh.server("server", "client")));
    let inbound = Proxy::start(inbound, vec![cluster(&[server], None)]).await;
    let tls = mesh.client("client", "server");
    let outbound = Proxy::start(listener(tcp(), None), vec![cluster(&[inbound.address], Some(&tls))]).await;
    for proxy in [&plain, &outbound] {
        outlast(proxy.connect().await, &mut received).await;
    }
}
