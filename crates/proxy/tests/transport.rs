//! Mutual TLS between proxies, and TCP, over real sockets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/mesh.rs"]
mod mesh;
mod support;

use std::{
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{self, SocketAddr},
    },
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwapOption;
use mesh::{Mesh, accepting, pair};
use skysail_core::SpiffeId;
use skysail_http::proxy_protocol::ProxyVersion;
use skysail_identity::{Authority, Connector};
use skysail_policy::config::{
    Cluster, FilterChain, Listener,
    cluster::{Limits, pipe_address},
    http::{ClientCertDetails, Filter, FilterKind, ForwardClientCert, ServerHeader},
    listener::{ChainMatch, Inspect, ProxyProtocolFilter, Terminal, Transport},
    policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
    text::TextMatch,
    tls::{ClientConfigs, ClientTls, ServerTls},
};
use skysail_proxy::overload::Limits as Taken;
use support::{Client, Proxy, cluster, echo, http, listener, server, snapshot, tcp, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
};

#[tokio::test]
async fn two_proxies_use_mutual_tls() {
    let mesh = Mesh::new();
    let (before, behind) =
        pair(echo().await, mesh.server("server", "client"), mesh.client("client", "server")).await;
    let mut client = before.connect().await;
    for _ in 0..3 {
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}{body}");
        assert!(body.contains("URI=spiffe://cluster.local/ns/default/sa/client"), "{body}");
        assert!(!body.contains("peer-metadata") && !head.contains("peer-metadata"), "{head}{body}");
    }
    assert_eq!(behind.workers().clusters().await[0].requests_total, 3);
    assert_eq!(before.workers().clusters().await[0].connections_total, 1);
}

#[tokio::test]
async fn tls_begins_after_the_proxy_header() {
    let mesh = Mesh::new();
    let terminal = http(|manager, _| manager.use_remote_address = true);
    let mut behind = listener(terminal, Some(mesh.server("server", "client")));
    behind.proxy_protocol =
        Some(ProxyProtocolFilter { except: vec![], optional: false, refused: vec![ProxyVersion::V1] });
    behind.inspect_tls = Some(Inspect::default());
    let behind = Proxy::start(behind, vec![cluster(&[echo().await], None)]).await;
    let client = mesh.client("client", "server");
    let next = cluster(&[behind.address], Some(&client));
    let next = Cluster { proxy_protocol: Some(ProxyVersion::V2), ..next };
    let before = Proxy::start(listener(http(|manager, _| manager.istio_alpn = true), None), vec![next]).await;
    let mut client = before.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (_, body) = client.message().await;
    assert!(body.contains("\r\nx-envoy-external-address: 127.0.0.1\r\n"), "{body}");
}

/// Allows only this service account.
fn only(account: &str) -> Arc<Policy> {
    let name = SpiffeId::new("cluster.local", "default", account).to_string();
    let rule = Rule {
        name: "rule".into(),
        permissions: vec![Permission::Any],
        principals: vec![Principal::Authenticated(Some(TextMatch::Exact(name.into_bytes().into())))],
    };
    let rules = Rules::new(RuleAction::Allow, vec![rule]);
    Arc::new(Policy { rules: Some(rules), shadow: None, shadow_prefix: "".into() })
}

/// The name of a client is known from its session as from its certificate, and new roots end the session.
#[tokio::test]
async fn a_resumed_connection_is_authorized_like_any_other() {
    let mesh = Mesh::new();
    let mut spec = mesh.spec("server", "", &[b"istio-http/1.1"]);
    let check = spec.peer.as_mut().unwrap();
    check.names = vec![];
    let roots = Arc::clone(&check.roots);
    let inbound = accepting(&spec);
    let terminal = http(|manager, _| {
        let does = FilterKind::Rbac(only("client"));
        manager.filters = vec![Filter { name: "rbac".into(), disabled: false, kind: does }];
        let forward = ForwardClientCert::AppendForward;
        manager.client_cert = ClientCertDetails { forward, uri: true, ..ClientCertDetails::default() };
    });
    let behind = Proxy::start(listener(terminal, Some(inbound)), vec![cluster(&[echo().await], None)]).await;
    let resumed = async || {
        let metrics = behind.metrics().await;
        let of = |name: &str| {
            let line = metrics.lines().find(|line| line.starts_with(name)).unwrap();
            line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
        };
        (of("envoy_listener_ssl_handshake{"), of("envoy_listener_ssl_session_reused{"))
    };
    for (account, status, counted) in [("client", 200, (3, 2)), ("stranger", 403, (6, 4))] {
        let tls = mesh.client(account, "server");
        let mut one_by_one = cluster(&[behind.address], Some(&tls));
        one_by_one.max_requests_per_connection = Some(1);
        let terminal = http(|manager, _| manager.istio_alpn = true);
        let before = Proxy::start(listener(terminal, None), vec![one_by_one]).await;
        let mut client = before.connect().await;
        for _ in 0..3 {
            client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").await;
            let (head, body) = client.message().await;
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}{body}");
            assert_eq!(
                body.contains("URI=spiffe://cluster.local/ns/default/sa/client"),
                status == 200,
                "{body}"
            );
        }
        assert_eq!(resumed().await, counted);
        roots.set(Arc::new(Authority::ephemeral().unwrap().roots().unwrap()));
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}{body}");
        roots.set(Arc::new(mesh.0.roots().unwrap()));
    }
}

#[tokio::test]
async fn a_peer_with_another_name_is_refused() {
    let mesh = Mesh::new();
    let cases = [
        (mesh.server("server", "client"), mesh.client("client", "somebody-else")),
        (mesh.server("server", "somebody-else"), mesh.client("client", "server")),
        (mesh.server("server", "client"), Mesh::new().client("client", "server")),
    ];
    for (inbound, outbound) in cases {
        let (before, _behind) = pair(echo().await, inbound, outbound).await;
        let mut client = before.connect().await;
        client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}{body}");
    }
}

/// Returns a listener with TLS and plain text on one port, HTTP or not, as in permissive mode.
fn permissive(tls: Arc<ServerTls>) -> Listener {
    let mut listener = listener(tcp(), None);
    listener.inspect_tls = Some(Inspect::default());
    listener.inspect_http = Some(Inspect::default());
    let chain = |transport, protocols: &[&str], tls: Option<&Arc<ServerTls>>, terminal: Terminal| {
        Arc::new(FilterChain {
            name: "chain".into(),
            matches: ChainMatch {
                transport: Some(transport),
                application_protocols: protocols.iter().map(|p| (*p).into()).collect(),
                ..ChainMatch::default()
            },
            tls: tls.cloned(),
            policies: vec![],
            sni_port: None,
            host_cache: None,
            connection_limits: Vec::new(),
            external_authorization: None,
            metadata_exchange: false,
            terminal,
            handshake_timeout: None,
            fingerprint: None,
        })
    };
    listener.chains = vec![
        chain(Transport::Tls, &["istio-http/1.1"], Some(&tls), http(|_, _| ())),
        chain(Transport::Tls, &["istio-peer-exchange"], Some(&tls), tcp()),
        chain(Transport::RawBuffer, &["http/1.1", "http/1.0"], None, http(|_, _| ())),
        chain(Transport::RawBuffer, &[], None, tcp()),
    ];
    listener
}

/// Answers HTTP, and any other line with itself in capitals.
async fn answer(mut client: Client) {
    let line = client.until("\n").await;
    if line.contains("HTTP") {
        client.head().await;
        client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok").await;
    } else {
        client.send(&line.to_uppercase()).await;
    }
}

#[tokio::test]
async fn first_bytes_determine_the_protocol_of_a_connection() {
    let mesh = Mesh::new();
    let server = server(|_, client| answer(client)).await;
    let inbound =
        Proxy::start(permissive(mesh.server("server", "client")), vec![cluster(&[server], None)]).await;
    let mut plain = inbound.connect().await;
    plain.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (head, _) = plain.message().await;
    assert!(head.contains("server: skysail"), "{head}");
    let mut bytes = inbound.connect().await;
    bytes.send("ehlo me\r\n").await;
    assert_eq!(bytes.until("\n").await, "EHLO ME\r\n");
    let terminal = http(|manager, _| manager.istio_alpn = true);
    let tls = mesh.client("client", "server");
    let outbound =
        Proxy::start(listener(terminal, None), vec![cluster(&[inbound.address], Some(&tls))]).await;
    let mut client = outbound.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert_eq!(client.message().await.1, "ok");
}

/// In plain text and over mutual TLS, if only the first bytes determine the protocol.
#[tokio::test]
async fn a_server_may_send_first() {
    let mesh = Mesh::new();
    let server = server(|_, mut client| async move {
        client.send("220 ready\r\n").await;
        let line = client.until("\n").await;
        client.send(&line.to_uppercase()).await;
    })
    .await;
    let inbound =
        Proxy::start(permissive(mesh.server("server", "client")), vec![cluster(&[server], None)]).await;
    let tls = mesh.client("client", "server");
    let outbound = Proxy::start(listener(tcp(), None), vec![cluster(&[inbound.address], Some(&tls))]).await;
    for proxy in [&inbound, &outbound] {
        let mut client = proxy.connect().await;
        assert_eq!(client.until("\n").await, "220 ready\r\n");
        client.send("quit\r\n").await;
        assert_eq!(client.until("\n").await, "QUIT\r\n");
        assert_eq!(client.rest().await, "");
    }
}

#[tokio::test]
async fn a_silent_client_may_still_choose_the_protocol() {
    let mesh = Mesh::new();
    let (dialled, mut received) = tokio::sync::mpsc::unbounded_channel();
    let server = server(move |_, client| {
        let dialled = dialled.clone();
        async move {
            dialled.send(()).unwrap();
            answer(client).await;
        }
    })
    .await;
    let inbound =
        Proxy::start(permissive(mesh.server("server", "client")), vec![cluster(&[server], None)]).await;
    let mut client = inbound.connect().await;
    within(received.recv()).await.unwrap();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (head, body) = client.message().await;
    assert!(head.contains("server: skysail") && body == "ok", "{head}{body}");
    // A connection that was opened early is used if it leads to the right cluster.
    within(received.recv()).await.unwrap();
    let mut client = inbound.connect().await;
    within(received.recv()).await.unwrap();
    client.send("hello\n").await;
    assert_eq!(client.until("\n").await, "HELLO\n");
    assert!(received.try_recv().is_err());
}

/// A speculative connection takes no slot that others wait for, and does not wait for one.
#[tokio::test]
async fn a_speculative_connection_is_opened_only_with_a_free_slot() {
    let mesh = Mesh::new();
    let server = server(|_, mut client| async move {
        client.send("220 ready\r\n").await;
        client.rest().await;
    })
    .await;
    let mut narrow = cluster(&[server], None);
    narrow.limits = Limits { connections: 1, pending: 0, ..Limits::NONE };
    let inbound = Proxy::start(permissive(mesh.server("server", "client")), vec![narrow]).await;
    let mut first = inbound.connect().await;
    assert_eq!(first.until("\n").await, "220 ready\r\n");
    let mut second = inbound.connect().await;
    // The server of the silent second client is not dialled. A third client that sends data learns that there
    // is no slot.
    let mut third = inbound.connect().await;
    third.send("hello\n").await;
    assert_eq!(third.rest().await, "");
    drop(first);
    assert_eq!(second.until("\n").await, "220 ready\r\n");
    let overflow = "envoy_cluster_upstream_rq_pending_overflow{cluster_name=\"upstream\"} 1\n";
    let metrics = inbound.metrics().await;
    assert!(metrics.contains(overflow), "{metrics}");
}

/// An HTTP/2 server sends its SETTINGS first. The HTTP configuration applies to slow clients too.
#[tokio::test]
async fn an_http2_server_does_not_determine_the_protocol() {
    let mesh = Mesh::new();
    let (dropped, mut received) = tokio::sync::mpsc::unbounded_channel();
    let server = server(move |number, mut client| {
        let dropped = dropped.clone();
        async move {
            if number == 0 {
                client.send("\0\0\0\x04\0\0\0\0\0").await;
                client.rest().await;
                return dropped.send(()).unwrap();
            }
            client.head().await;
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok").await;
        }
    })
    .await;
    let inbound =
        Proxy::start(permissive(mesh.server("server", "client")), vec![cluster(&[server], None)]).await;
    let mut client = inbound.connect().await;
    within(received.recv()).await.unwrap();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (head, body) = client.message().await;
    assert!(head.contains("server: skysail") && body == "ok", "{head}{body}");
}

/// The metadata of a sidecar there comes first and is not forwarded.
#[tokio::test]
async fn a_server_behind_another_sidecar_may_send_first() {
    let mesh = Mesh::new();
    let server = server(|_, mut client| async move {
        client.send("220 ready\r\n").await;
        let line = client.until("\n").await;
        client.send(&line.to_uppercase()).await;
    })
    .await;
    let mut inbound = listener(tcp(), Some(mesh.server("server", "client")));
    Arc::get_mut(&mut inbound.chains[0]).unwrap().metadata_exchange = true;
    let inbound = Proxy::start(inbound, vec![cluster(&[server], None)]).await;
    let mut upstream = cluster(&[inbound.address], Some(&mesh.client("client", "server")));
    upstream.metadata_exchange = true;
    let outbound = Proxy::start(permissive(mesh.server("none", "none")), vec![upstream]).await;
    let mut client = outbound.connect().await;
    assert_eq!(client.until("\n").await, "220 ready\r\n");
    client.send("quit\r\n").await;
    assert_eq!(client.until("\n").await, "QUIT\r\n");
}

/// A protocol that the configuration declares is not detected from bytes.
#[tokio::test]
async fn declared_ports_are_not_sniffed() {
    let mesh = Mesh::new();
    let server = server(|_, mut client| async move {
        let line = client.until("\n").await;
        client.send(&line.to_uppercase()).await;
    })
    .await;
    let mut inbound = permissive(mesh.server("server", "client"));
    inbound.inspect_http = Some(Inspect { except: vec![0..=u16::MAX] });
    let inbound = Proxy::start(inbound, vec![cluster(&[server], None)]).await;
    let mut client = inbound.connect().await;
    client.send("GET /path HTTP/1.1\r\n").await;
    assert_eq!(client.until("\n").await, "GET /PATH HTTP/1.1\r\n");
}

#[tokio::test]
async fn a_server_that_closes_ends_the_wait() {
    let mesh = Mesh::new();
    let server = server(|_, client| async move { drop(client) }).await;
    let inbound =
        Proxy::start(permissive(mesh.server("server", "client")), vec![cluster(&[server], None)]).await;
    assert_eq!(inbound.connect().await.rest().await, "");
}

/// A long path, or an empty line before it, does not change the protocol of HTTP, which has its own policies.
#[tokio::test]
async fn no_form_of_http_evades_its_configuration() {
    let mesh = Mesh::new();
    let inbound =
        Proxy::start(permissive(mesh.server("server", "client")), vec![cluster(&[echo().await], None)]).await;
    for beginning in [format!("GET /{}", "a".repeat(20_000)), "\r\nGET /".to_owned(), "GET\t/".to_owned()] {
        let mut client = inbound.connect().await;
        client.send(&format!("{beginning} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")).await;
        let (head, _) = client.message().await;
        let is_http = head.contains("server: skysail") || head.starts_with("HTTP/1.1 400 ");
        assert!(is_http, "{head}");
    }
}

/// As in Envoy, and unlike rustls alone.
#[tokio::test]
async fn a_client_without_a_common_alpn_protocol_is_accepted() {
    let mesh = Mesh::new();
    let mut inbound = listener(http(|_, _| ()), Some(mesh.server("server", "client")));
    inbound.inspect_tls = Some(Inspect::default());
    let matches = &mut Arc::get_mut(&mut inbound.chains[0]).unwrap().matches;
    matches.application_protocols = vec!["istio".into()];
    let inbound = Proxy::start(inbound, vec![cluster(&[echo().await], None)]).await;
    let offer = Arc::new(Connector::new(&mesh.spec("client", "server", &[b"istio"])).unwrap());
    let configs = ClientConfigs {
        own: Arc::clone(&offer),
        http2: Arc::clone(&offer),
        istio_http1: Arc::clone(&offer),
        istio_h2: offer,
    };
    let config = Arc::new(ArcSwapOption::from_pointee(configs));
    let tls = Arc::new(ClientTls { config, sni: None, alpn: Arc::new([]), secrets: Box::default() });
    let outbound =
        Proxy::start(listener(http(|_, _| ()), None), vec![cluster(&[inbound.address], Some(&tls))]).await;
    let mut client = outbound.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}{body}");
}

#[tokio::test]
async fn bytes_pass_and_either_side_may_half_close_first() {
    use tokio::io::AsyncWriteExt as _;
    let server = server(|_, mut client| async move {
        client.send("hello ").await;
        let all = client.rest().await;
        client.send(&format!("you sent {} bytes", all.len())).await;
    })
    .await;
    let mesh = Mesh::new();
    let plain = Proxy::start(listener(tcp(), None), vec![cluster(&[server], None)]).await;
    let inbound = listener(tcp(), Some(mesh.server("server", "client")));
    let inbound = Proxy::start(inbound, vec![cluster(&[server], None)]).await;
    let tls = mesh.client("client", "server");
    let outbound = Proxy::start(listener(tcp(), None), vec![cluster(&[inbound.address], Some(&tls))]).await;
    // The same with peers that send metadata first.
    let mut greeting = listener(tcp(), Some(mesh.server("server", "client")));
    Arc::get_mut(&mut greeting.chains[0]).unwrap().metadata_exchange = true;
    let greeting = Proxy::start(greeting, vec![cluster(&[server], None)]).await;
    let mut met = cluster(&[greeting.address], Some(&tls));
    met.metadata_exchange = true;
    let meeting = Proxy::start(listener(tcp(), None), vec![met]).await;
    for proxy in [&plain, &outbound, &meeting] {
        let mut client = proxy.connect().await;
        // The server sends first.
        assert_eq!(client.exactly(6).await, "hello ");
        client.send(&"x".repeat(300_000)).await;
        client.stream.shutdown().await.unwrap();
        assert_eq!(client.rest().await, "you sent 300000 bytes");
    }
}

/// Several requests in one record and one in several, while every request waits for its turn: no buffered data
/// is missed.
#[tokio::test]
async fn requests_in_records_of_any_size_are_served() {
    let mesh = Mesh::new();
    let always = Taken { under_way: 0, late: Duration::MAX, overloaded: Duration::MAX, ..Taken::default() };
    let inbound = listener(http(|_, _| ()), Some(mesh.server("server", "client")));
    let inbound = Proxy::limited(inbound, vec![cluster(&[echo().await], None)], always).await;
    let tls = mesh.client("client", "server");
    let bytes = cluster(&[inbound.address], Some(&tls));
    let outbound = Proxy::start(listener(tcp(), None), vec![bytes]).await;
    let mut client = outbound.connect().await;
    for padding in [0, 10, 3_000, 30_000] {
        let body = "x".repeat(padding);
        let request = format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {padding}\r\n\r\n{body}");
        client.send(&request.repeat(20)).await;
        for _ in 0..20 {
            let (head, answer) = within(client.message()).await;
            assert!(head.starts_with("HTTP/1.1 200 ") && answer.ends_with(&body), "{head}");
        }
    }
}

#[tokio::test]
async fn a_new_configuration_applies_to_the_next_request() {
    // Connections without a listener stay open for the duration of the test.
    let limits = Taken { revoked_drain: Duration::from_hours(1), ..Taken::default() };
    let before = listener(http(|_, _| ()), None);
    let proxy = Proxy::limited(before, vec![cluster(&[echo().await], None)], limits).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(client.message().await.0.contains("server: skysail\r\n"));
    let terminal = http(|manager, _| manager.server = ServerHeader::Overwrite("new".into()));
    let new = snapshot(listener(terminal, None), vec![cluster(&[echo().await], None)]);
    proxy.workers().publish(new).await.unwrap();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(client.message().await.0.contains("server: new\r\n"));
    // Without the listener the connection closes after the request.
    proxy.workers().publish(skysail_policy::config::Snapshot::default()).await.unwrap();
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(client.rest().await.contains("connection: close\r\n"));
    assert_eq!(proxy.workers().addresses().await.len(), 0);
}

#[tokio::test]
async fn listeners_that_cannot_be_bound_are_named() {
    let proxy = Proxy::start(listener(tcp(), None), vec![]).await;
    let mut taken = listener(tcp(), None);
    taken.name = "taken".into();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    taken.addresses = vec![other.local_addr().unwrap()];
    let errors = proxy.workers().publish(snapshot(taken, vec![])).await.unwrap_err();
    assert_eq!(errors.len(), 1);
    assert!(
        errors[0].to_string().starts_with("listener taken cannot be bound to 127.0.0.1:"),
        "{}",
        errors[0]
    );
}

#[tokio::test]
async fn a_routes_timeout_includes_connecting() {
    // Accepts connections but never answers a handshake.
    let silent = server(|_, mut client| async move { drop(client.rest().await) }).await;
    let mesh = Mesh::new();
    let terminal = http(|_, forward| forward.timeout = Some(Duration::from_millis(50)));
    let tls = mesh.client("client", "server");
    let mut slow = cluster(&[silent], Some(&tls));
    slow.connect_timeout = Duration::from_secs(600);
    let proxy = Proxy::start(listener(terminal, None), vec![slow]).await;
    for request in
        ["GET / HTTP/1.1\r\nHost: a\r\n\r\n", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"]
    {
        let mut client = proxy.connect().await;
        client.send(request).await;
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 504 "), "{head}");
        assert_eq!(body, "upstream request timeout");
    }
    assert_eq!(proxy.workers().clusters().await[0].connections, 0);
}

/// Returns a listener on a Unix domain socket.
fn piped(path: &str, terminal: Terminal) -> Listener {
    Listener { addresses: vec![pipe_address(path)], pipe: Some(path.into()), ..listener(terminal, None) }
}

fn connect(path: &str) -> UnixStream {
    let address = match path.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(path),
    };
    let stream = net::UnixStream::connect_addr(&address.unwrap()).unwrap();
    stream.set_nonblocking(true).unwrap();
    UnixStream::from_std(stream).unwrap()
}

#[tokio::test]
async fn a_listener_may_be_a_unix_domain_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let [stale, taken, file] = ["stale", "taken", "file"].map(path);
    drop(net::UnixListener::bind(&stale).unwrap());
    let _live = net::UnixListener::bind(&taken).unwrap();
    std::fs::write(&file, "kept").unwrap();
    for (path, is_http) in [(&stale, true), (&format!("@{stale}"), false)] {
        let terminal = if is_http { http(|_, _| ()) } else { tcp() };
        let clusters = vec![cluster(&[echo().await], None)];
        let proxy = Proxy::with(2, piped(path, terminal), clusters, Taken::default()).await;
        for _ in 0..4 {
            let mut stream = connect(path);
            let request = b"GET /a HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
            within(stream.write_all(request)).await.unwrap();
            if !is_http {
                stream.shutdown().await.unwrap();
            }
            let mut answer = String::new();
            within(stream.read_to_string(&mut answer)).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains("GET /a"), "{answer}");
        }
        proxy.workers().publish(skysail_policy::config::Snapshot::default()).await.unwrap();
        assert!(!std::fs::exists(&stale).unwrap(), "the socket is removed with its listener");
        for path in [&taken, &file] {
            assert!(proxy.workers().publish(snapshot(piped(path, tcp()), vec![])).await.is_err(), "{path}");
        }
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
}
