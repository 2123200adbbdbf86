//! Open TLS connections after a change of a root, at the end of a certificate, and after a change of the forwarded
//! certificate fields.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/admission.rs"]
mod admission;
#[path = "support/mesh.rs"]
mod mesh;
mod support;

use std::{
    io::{Read as _, Write as _},
    sync::Arc,
    time::{Duration, SystemTime},
};

use admission::{LONG, SHORT, echo, limits, publish, web};
use mesh::{Mesh, accepting, connecting};
use skysail_core::SpiffeId;
use skysail_identity::{Acceptor, KeyAndCsr, Live, Roots, TlsSpec};
use skysail_policy::config::{HttpManager, Snapshot, route::Forward};
use skysail_proxy::overload::Limits;
use support::{Client, Proxy, cluster, http, listener, server, snapshot, tcp, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{self, ClientConnection},
};

#[tokio::test]
async fn connections_of_peers_without_a_trusted_root_end_on_either_side() {
    let (mesh, other) = (Mesh::new(), Mesh::new());
    for (outbound, upgraded) in [(false, false), (true, false), (true, true)] {
        let mut spec = mesh.spec("server", "client", &[]);
        let roots: Arc<Live<Roots>> = spec.peer.as_ref().unwrap().roots.clone();
        let secured = |terminal| {
            let (mesh, roots) = (&mesh, roots.clone());
            let spec = &mut mesh.spec("server", "client", &[]);
            spec.peer.as_mut().unwrap().roots = roots;
            listener(terminal, Some(accepting(spec)))
        };
        let behind = secured(tcp());
        let tls = behind.chains[0].tls.clone();
        // Inbound, the proxy verifies the client's certificate; outbound, the server's.
        let (first, clusters) = if outbound {
            spec = mesh.spec("client", "server", &[]);
            spec.peer.as_mut().unwrap().roots = roots.clone();
            let inner = secured(tcp());
            let inner = Proxy::called("behind", inner, vec![cluster(&[echo().await], None)]).await;
            let clusters = vec![cluster(&[inner.address], Some(&connecting(&spec)))];
            // It lives as long as the test.
            std::mem::forget(inner);
            (if upgraded { web(vec![]) } else { listener(tcp(), None) }, clusters)
        } else {
            (behind, vec![cluster(&[echo().await], None)])
        };
        let clusters = snapshot(listener(tcp(), None), clusters);
        let proxy = Proxy::limited(first, vec![], limits(SHORT)).await;
        let publish = async |distrusted: u64| {
            let first =
                if upgraded { web(vec![]) } else { listener(tcp(), tls.clone().filter(|_| !outbound)) };
            let listeners = snapshot(first, vec![]).listeners;
            let snapshot = Snapshot { listeners, distrusted, ..clusters.clone() };
            proxy.workers().publish(snapshot).await.unwrap();
        };
        publish(0).await;
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let mut stream: Box<dyn support::Stream> = if outbound {
            Box::new(stream)
        } else {
            let connector = TlsConnector::from(mesh.spec("client", "server", &[]).client().unwrap());
            Box::new(within(connector.connect("a".try_into().unwrap(), stream)).await.unwrap())
        };
        if upgraded {
            let head = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
            within(stream.write_all(head)).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                answer.push(within(stream.read_u8()).await.unwrap());
            }
            assert!(answer.starts_with(b"HTTP/1.1 101 "));
        }
        let mut echoes = async || {
            within(stream.write_all(b"ping")).await?;
            within(stream.read_exact(&mut [0; 4])).await
        };
        echoes().await.unwrap();
        // Another root is removed.
        publish(1).await;
        echoes().await.unwrap();
        roots.set(Arc::new(other.0.roots().unwrap()));
        publish(2).await;
        within(async { while echoes().await.is_ok() {} }).await;
        roots.set(Arc::new(mesh.0.roots().unwrap()));
    }
}

#[tokio::test]
async fn connections_end_with_their_certificate_if_configured() {
    let mesh = Mesh::new();
    let secured = || listener(tcp(), Some(accepting(&mesh.spec("server", "client", &[]))));
    let server = echo().await;
    let id = SpiffeId::new("cluster.local", "default", "client");
    let request = KeyAndCsr::generate(Some(&id)).unwrap();
    let signed = mesh.0.sign(&request.csr_pem, &id, Duration::from_secs(5)).unwrap();
    let identity = request.finish(signed.pem().as_bytes()).unwrap();
    let spec = TlsSpec { identities: vec![Live::new(identity)], ..mesh.spec("client", "server", &[]) };
    let connector = TlsConnector::from(spec.client().unwrap());
    let open = async |end_with_certificate: bool| {
        let limits = Limits { end_with_certificate, ..limits(SHORT) };
        let proxy = Proxy::limited(secured(), vec![cluster(&[server], None)], limits).await;
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let stream = within(connector.connect("a".try_into().unwrap(), stream)).await.unwrap();
        (proxy, stream)
    };
    let echoes = async |stream: &mut tokio_rustls::client::TlsStream<TcpStream>| {
        within(stream.write_all(b"ping")).await?;
        within(stream.read_exact(&mut [0; 4])).await
    };
    let ((_ending, mut ends), (_staying, mut stays)) = (open(true).await, open(false).await);
    echoes(&mut stays).await.unwrap();
    while echoes(&mut ends).await.is_ok() {
        tokio::task::yield_now().await;
    }
    // A certificate's end of validity is a whole second.
    assert!(signed.not_after <= SystemTime::now() + Duration::from_secs(1), "not before the certificate");
    echoes(&mut stays).await.unwrap();
}

#[tokio::test]
async fn an_active_connection_forwards_its_certificate_as_currently_configured() {
    use skysail_policy::config::http::{ClientCertDetails, ForwardClientCert};
    let mesh = Mesh::new();
    let received = server(|_, mut client: Client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            let lines = head.lines().find_map(|line| line.strip_prefix("x-forwarded-client-cert: "));
            let received = lines.unwrap_or_default();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{received}", received.len());
            client.send(&answer).await;
        }
    })
    .await;
    let tls = accepting(&mesh.spec("server", "client", &[]));
    let telling = |uri| {
        let change = |manager: &mut HttpManager, _: &mut Forward| {
            let forward = ForwardClientCert::SanitizeSet;
            manager.client_cert = ClientCertDetails { forward, uri, ..ClientCertDetails::default() };
        };
        listener(http(change), Some(tls.clone()))
    };
    let clusters = snapshot(telling(true), vec![cluster(&[received], None)]);
    let proxy = Proxy::limited(telling(true), vec![], limits(LONG)).await;
    publish(&proxy, &clusters, telling(true)).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let connector = TlsConnector::from(mesh.spec("client", "server", &[]).client().unwrap());
    let mut stream = within(connector.connect("a".try_into().unwrap(), stream)).await.unwrap();
    let mut ask = async || {
        within(stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")).await.unwrap();
        let mut answer = String::new();
        while !answer.contains("Hash=") || !answer.contains("\r\n\r\n") {
            answer.push(char::from(within(stream.read_u8()).await.unwrap()));
        }
        // The remaining content, by its content-length.
        let (head, begun) = answer.split_once("\r\n\r\n").unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut rest = vec![0; length.parse::<usize>().unwrap() - begun.len()];
        within(stream.read_exact(&mut rest)).await.unwrap();
        format!("{begun}{}", String::from_utf8(rest).unwrap())
    };
    assert!(ask().await.contains("URI="));
    publish(&proxy, &clusters, telling(false)).await;
    assert!(!ask().await.contains("URI="));
}

#[tokio::test]
async fn a_certificate_that_is_accepted_without_being_valid_identifies_nobody() {
    use skysail_policy::config::http::{ClientCertDetails, ForwardClientCert};
    let (mesh, other) = (Mesh::new(), Mesh::new());
    let received = server(|_, mut client: Client| async move {
        while let Some((head, _)) = client.message_if_any().await {
            let forwarded = head.contains("x-forwarded-client-cert");
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx-forwarded: {forwarded}\r\n\r\n");
            client.send(&answer).await;
        }
    })
    .await;
    let strict = mesh.spec("server", "client", &[]);
    let mut spec = strict.clone();
    let check = spec.peer.as_mut().unwrap();
    (check.accepts_untrusted, check.required) = (true, false);
    let tls = accepting(&spec);
    let change = |manager: &mut HttpManager, _: &mut Forward| {
        let forward = ForwardClientCert::SanitizeSet;
        manager.client_cert = ClientCertDetails { forward, ..ClientCertDetails::default() };
    };
    let listener = listener(http(change), Some(tls.clone()));
    let proxy = Proxy::start(listener, vec![cluster(&[received], None)]).await;
    let trusts = mesh.spec("client", "server", &[]);
    let stranger = other.spec("client", "server", &[]).identities;
    let of = |identities| TlsSpec { identities, ..trusts.clone() };
    let stranger = of(stranger);
    let request = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    for (client, forwarded) in [(trusts.clone(), true), (stranger.clone(), false), (of(Vec::new()), false)] {
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let connector = TlsConnector::from(client.client().unwrap());
        let mut stream = within(connector.connect("a".try_into().unwrap(), stream)).await.unwrap();
        within(stream.write_all(request)).await.unwrap();
        let mut answer = String::new();
        within(stream.read_to_string(&mut answer)).await.unwrap();
        assert!(answer.contains(&format!("x-forwarded: {forwarded}\r\n")), "{answer}");
    }
    // Nor does it if a new configuration, which refuses it, arrives during the handshake.
    let (mut client, mut tcp) = (
        ClientConnection::new(stranger.client().unwrap(), "a".try_into().unwrap()).unwrap(),
        std::net::TcpStream::connect(proxy.address).unwrap(),
    );
    let answer = tokio::task::spawn_blocking(move || {
        client.write_tls(&mut tcp).unwrap();
        client.read_tls(&mut tcp).unwrap();
        client.process_new_packets().unwrap();
        tls.config.store(Some(Arc::new(Acceptor::new(&strict).unwrap())));
        let (mut stream, mut answer) = (rustls::Stream::new(&mut client, &mut tcp), String::new());
        stream.write_all(request).unwrap();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    let answer = within(answer).await.unwrap();
    assert!(answer.contains("x-forwarded: false\r\n"), "{answer}");
}
