//! Open connections and requests after a change of the configuration: those that are denied now end, all others
//! continue.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/admission.rs"]
mod admission;
#[path = "support/http2.rs"]
mod http2;
mod support;

use std::{
    io::{self, Write as _},
    sync::Arc,
    time::{Duration, Instant},
};

use admission::{LONG, SHORT, echo, limits, publish, web};
use bytes::Bytes;
use http2::request;
use skysail_policy::config::{
    FilterChain, Listener, Snapshot,
    http::FilterKind,
    listener::{ChainMatch, ProxyProtocolFilter, TcpProxy, Terminal},
    policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
    route::Targets,
    text::TextMatch,
};
use support::{Client, Proxy, cluster, http, listener, server, snapshot, tcp, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::oneshot::{self, error::TryRecvError},
};

fn deny(permission: Permission) -> Arc<Policy> {
    let rule = Rule { name: "rule".into(), permissions: vec![permission], principals: vec![Principal::Any] };
    let rules = Some(Rules::new(RuleAction::Deny, vec![rule]));
    Arc::new(Policy { rules, shadow: None, shadow_prefix: "".into() })
}

async fn echoes(client: &mut Client) {
    client.send("ping").await;
    assert_eq!(client.exactly(4).await, "ping");
}

/// Returns a TCP listener that takes its destination from the PROXY protocol.
fn bytes(policies: Vec<Arc<Policy>>) -> Listener {
    let proxied = Some(ProxyProtocolFilter { except: vec![], optional: false, refused: vec![] });
    let mut listener = Listener { proxy_protocol: proxied, ..listener(tcp(), None) };
    Arc::get_mut(&mut listener.chains[0]).unwrap().policies = policies;
    listener
}

/// Returns a TCP proxy with a connection to each of these ports.
async fn with_connections(drain: Duration, ports: &[u16]) -> (Proxy, Snapshot, Vec<Client>) {
    let clusters = snapshot(bytes(vec![]), vec![cluster(&[echo().await], None)]);
    let proxy = Proxy::limited(bytes(vec![]), vec![], limits(drain)).await;
    publish(&proxy, &clusters, bytes(vec![])).await;
    let mut clients = Vec::new();
    for port in ports {
        let mut client = proxy.connect().await;
        client.send(&format!("PROXY TCP4 127.0.0.1 127.0.0.1 1000 {port}\r\n")).await;
        echoes(&mut client).await;
        clients.push(client);
    }
    (proxy, clusters, clients)
}

async fn count(proxy: &Proxy, metric: &str) -> u64 {
    let metrics = proxy.metrics().await;
    let line = metrics.lines().find(|line| line.starts_with(&format!("{metric}{{")));
    line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
}

#[tokio::test]
async fn a_policy_that_denies_a_connection_ends_only_that_connection() {
    let (proxy, clusters, mut clients) = with_connections(SHORT, &[80, 81, 82]).await;
    publish(&proxy, &clusters, bytes(vec![deny(Permission::Port(81))])).await;
    assert_eq!(clients[1].rest().await, "");
    for index in [0, 2] {
        echoes(&mut clients[index]).await;
    }
    assert_eq!(count(&proxy, "skysail_listener_downstream_cx_revoked").await, 1);
    // Each change evaluates all connections again.
    publish(&proxy, &clusters, bytes(vec![deny(Permission::Port(80))])).await;
    assert_eq!(clients[0].rest().await, "");
    echoes(&mut clients[2]).await;
}

/// Set `SKYSAIL_CONNECTIONS=5000` for measurements; each connection takes four file descriptors.
#[tokio::test]
async fn many_connections_are_evaluated_and_none_is_delayed() {
    let count = std::env::var("SKYSAIL_CONNECTIONS").map_or(100, |count| count.parse::<u16>().unwrap());
    let ports: Vec<u16> = (0..=count).map(|number| 80 + number % 2).collect();
    let (proxy, clusters, mut clients) = with_connections(SHORT, &ports).await;
    let mut busy = clients.pop().unwrap();
    let (done, mut received) = oneshot::channel::<()>();
    let pings = tokio::spawn(async move {
        let mut slowest = Duration::ZERO;
        while received.try_recv() == Err(TryRecvError::Empty) {
            let begun = Instant::now();
            echoes(&mut busy).await;
            slowest = slowest.max(begun.elapsed());
        }
        slowest
    });
    let begun = Instant::now();
    publish(&proxy, &clusters, bytes(vec![deny(Permission::Port(81))])).await;
    let ended = u64::from(count / 2);
    for (client, _) in clients.iter_mut().zip(&ports).filter(|(_, port)| **port == 81) {
        assert_eq!(client.rest().await, "");
    }
    let took = begun.elapsed();
    drop(done);
    let slowest = within(pings).await.unwrap();
    for (client, _) in clients.iter_mut().zip(&ports).filter(|(_, port)| **port == 80) {
        echoes(client).await;
    }
    assert_eq!(self::count(&proxy, "skysail_listener_downstream_cx_revoked").await, ended);
    // Written past the capture of test output: measurements, not assertions.
    writeln!(
        io::stderr(),
        "{ended} of {count} ended after {took:?}; meanwhile the slowest echo took {slowest:?}"
    )
    .unwrap();
}

#[tokio::test]
async fn a_spliced_connection_ends_with_its_data_in_flight() {
    let (proxy, clusters, mut clients) = with_connections(SHORT, &[81]).await;
    let (mut read, mut write) = clients.remove(0).stream.into_split();
    let (enough, passed) = oneshot::channel();
    let reader = tokio::spawn(async move {
        let (mut block, mut total, mut enough) = (vec![0; 1 << 16], 0, Some(enough));
        while let Ok(count @ 1..) = read.read(&mut block).await {
            total += count;
            if total > 8 << 20 {
                enough.take().map(|enough| enough.send(()));
            }
        }
    });
    let writer = tokio::spawn(async move { while write.write_all(&[7; 1 << 16]).await.is_ok() {} });
    within(passed).await.unwrap();
    publish(&proxy, &clusters, bytes(vec![deny(Permission::Any)])).await;
    within(writer).await.unwrap();
    within(reader).await.unwrap();
}

#[tokio::test]
async fn a_denial_that_is_withdrawn_within_the_drain_time_ends_nothing() {
    let (proxy, clusters, mut clients) = with_connections(LONG, &[80]).await;
    publish(&proxy, &clusters, bytes(vec![deny(Permission::Any)])).await;
    echoes(&mut clients[0]).await;
    publish(&proxy, &clusters, bytes(vec![])).await;
    echoes(&mut clients[0]).await;
    assert_eq!(count(&proxy, "skysail_listener_downstream_cx_revoked").await, 0);
}

#[tokio::test]
async fn removed_or_redirected_chains_end_their_connections() {
    let elsewhere = || {
        let Terminal::Tcp(mut proxy) = tcp() else { unreachable!("it is TCP") };
        Arc::get_mut(&mut proxy).unwrap().targets = Targets::Single("other".into());
        Terminal::Tcp(proxy)
    };
    let change = |change: fn(&mut FilterChain)| {
        let mut listener = bytes(vec![]);
        change(Arc::get_mut(&mut listener.chains[0]).unwrap());
        listener
    };
    let removed = || {
        let matches = ChainMatch { destination_port: Some(1), ..ChainMatch::default() };
        let mut listener = bytes(vec![]);
        Arc::get_mut(&mut listener.chains[0]).unwrap().matches = matches;
        listener
    };
    let http_now = || {
        let mut listener = bytes(vec![]);
        Arc::get_mut(&mut listener.chains[0]).unwrap().terminal = http(|_, _| ());
        listener
    };
    let led_elsewhere = || {
        let mut listener = bytes(vec![]);
        Arc::get_mut(&mut listener.chains[0]).unwrap().terminal = elsewhere();
        listener
    };
    for changed in [removed(), http_now(), led_elsewhere()] {
        let (proxy, clusters, mut clients) = with_connections(SHORT, &[80]).await;
        // A changed idle timeout ends no connection.
        let other = change(|chain| {
            let Terminal::Tcp(proxy) = tcp() else { unreachable!("it is TCP") };
            let proxy = Arc::into_inner(proxy).unwrap();
            let idle_timeout = Some(Duration::from_hours(2));
            chain.terminal = Terminal::Tcp(Arc::new(TcpProxy { idle_timeout, ..proxy }));
        });
        publish(&proxy, &clusters, other).await;
        echoes(&mut clients[0]).await;
        publish(&proxy, &clusters, changed).await;
        assert_eq!(clients[0].rest().await, "");
    }
    let (proxy, clusters, mut clients) = with_connections(SHORT, &[80]).await;
    let without = Snapshot { listeners: Arc::default(), ..clusters.clone() };
    proxy.workers().publish(without).await.unwrap();
    assert_eq!(clients[0].rest().await, "", "its listener is gone");
}

fn deny_path(prefix: &str) -> FilterKind {
    FilterKind::Rbac(deny(Permission::Path(TextMatch::Prefix(prefix.as_bytes().into()))))
}

async fn websocket(proxy: &Proxy, path: &str) -> Client {
    let mut client = proxy.connect().await;
    client
        .send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"))
        .await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    echoes(&mut client).await;
    client
}

#[tokio::test]
async fn websockets_are_evaluated_by_their_upgrade_request() {
    // The first policy arrives later.
    let before = || web(vec![]);
    let clusters = snapshot(before(), vec![cluster(&[echo().await], None)]);
    let proxy = Proxy::limited(before(), vec![], limits(SHORT)).await;
    publish(&proxy, &clusters, before()).await;
    let (mut denied, mut allowed) = (websocket(&proxy, "/denied").await, websocket(&proxy, "/allowed").await);
    publish(&proxy, &clusters, web(vec![deny_path("/rewritten"), deny_path("/denied")])).await;
    assert_eq!(denied.rest().await, "");
    echoes(&mut allowed).await;
    assert_eq!(count(&proxy, "skysail_http_downstream_rq_revoked").await, 1);
}

#[tokio::test]
async fn a_silent_connection_is_evaluated_after_its_first_bytes() {
    let (proxy, clusters, mut others) = with_connections(LONG, &[80]).await;
    let mut silent = proxy.connect().await;
    // It is accepted after the previous connection.
    let mut after = proxy.connect().await;
    after.send("PROXY TCP4 127.0.0.1 127.0.0.1 1000 82\r\n").await;
    echoes(&mut after).await;
    publish(&proxy, &clusters, bytes(vec![deny(Permission::Port(81))])).await;
    silent.send("PROXY TCP4 127.0.0.1 127.0.0.1 1000 81\r\nping").await;
    assert_eq!(silent.rest().await, "", "nothing was admitted that could go on");
    echoes(&mut others[0]).await;
}

/// Returns an HTTP proxy and an HTTP/1.1 connection with one completed request.
async fn kept_alive() -> (Proxy, Snapshot, Client) {
    let clusters = snapshot(web(vec![]), vec![cluster(&support::numbered(1).await, None)]);
    let proxy = Proxy::limited(web(vec![]), vec![], limits(SHORT)).await;
    publish(&proxy, &clusters, web(vec![])).await;
    let mut client = proxy.connect().await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(client.message().await.1, "0");
    (proxy, clusters, client)
}

#[tokio::test]
async fn an_endless_head_does_not_keep_its_connection_open() {
    let (proxy, clusters, mut client) = kept_alive().await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n").await;
    let mut removed = web(vec![]);
    let matches = ChainMatch { destination_port: Some(1), ..ChainMatch::default() };
    Arc::get_mut(&mut removed.chains[0]).unwrap().matches = matches;
    publish(&proxy, &clusters, removed).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn http2_streams_are_evaluated_by_their_own_requests() {
    // A server that sends a response head and never ends the body.
    let open = http2::http2_server(|_, mut request, mut respond| async move {
        let mut body = respond.send_response(http::Response::new(()), false).unwrap();
        while let Some(Ok(piece)) = request.body_mut().data().await {
            request.body_mut().flow_control().release_capacity(piece.len()).unwrap();
            http2::send(&mut body, piece).await;
        }
    })
    .await;
    let upstream = || {
        let mut cluster = cluster(&[open], None);
        cluster.protocol = skysail_policy::config::cluster::UpstreamProtocol::Http2;
        cluster
    };
    let clusters = snapshot(web(vec![]), vec![upstream()]);
    let proxy = Proxy::limited(web(vec![deny_path("/never")]), vec![], limits(SHORT)).await;
    publish(&proxy, &clusters, web(vec![deny_path("/never")])).await;
    let mut requests = http2::client(TcpStream::connect(proxy.address).await.unwrap()).await;
    let mut streams = Vec::new();
    for path in ["/denied", "/allowed"] {
        let (answer, mut body) = requests.send_request(request("POST", path), false).unwrap();
        let answer = within(answer).await.unwrap();
        assert_eq!(answer.status(), 200);
        http2::send(&mut body, Bytes::from_static(b"ping")).await;
        let mut answered = answer.into_body();
        assert_eq!(within(answered.data()).await.unwrap().unwrap(), "ping");
        streams.push((body, answered));
    }
    publish(&proxy, &clusters, web(vec![deny_path("/denied")])).await;
    let (mut body, mut answered) = streams.pop().unwrap();
    let (_, mut denied) = streams.pop().unwrap();
    assert!(within(denied.data()).await.is_none_or(|ended| ended.is_err()), "it is reset");
    http2::send(&mut body, Bytes::from_static(b"pong")).await;
    assert_eq!(within(answered.data()).await.unwrap().unwrap(), "pong");
    // The new policy applies to a new request on the same connection.
    let (answer, _) = requests.send_request(request("GET", "/denied"), true).unwrap();
    assert_eq!(within(answer).await.unwrap().status(), 403);
}

#[tokio::test]
async fn an_idle_connection_of_a_removed_chain_is_closed() {
    let clusters = snapshot(web(vec![]), vec![cluster(&support::numbered(1).await, None)]);
    let proxy = Proxy::limited(web(vec![]), vec![], limits(SHORT)).await;
    publish(&proxy, &clusters, web(vec![])).await;
    let ask = async |client: &mut Client| {
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        client.message().await.1
    };
    let (mut http1, mut other) = (proxy.connect().await, proxy.connect().await);
    assert_eq!(ask(&mut http1).await, "0");
    assert_eq!(ask(&mut other).await, "0");
    let mut requests = http2::client(TcpStream::connect(proxy.address).await.unwrap()).await;
    let (answer, _) = requests.send_request(request("GET", "/"), true).unwrap();
    assert_eq!(within(answer).await.unwrap().status(), 200);
    // A change that allows all connections closes none.
    publish(&proxy, &clusters, web(vec![deny_path("/never")])).await;
    assert_eq!(ask(&mut other).await, "0");
    let mut removed = web(vec![]);
    let matches = ChainMatch { destination_port: Some(1), ..ChainMatch::default() };
    Arc::get_mut(&mut removed.chains[0]).unwrap().matches = matches;
    publish(&proxy, &clusters, removed).await;
    assert_eq!(http1.rest().await, "");
    assert_eq!(other.rest().await, "");
    let ended = async {
        while requests.clone().ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    within(ended).await;
    assert_eq!(count(&proxy, "skysail_listener_downstream_cx_revoked").await, 3);
}

#[tokio::test]
async fn a_later_policy_ends_a_response_even_if_the_route_changed_the_request() {
    let endless = server(|_, mut client: Client| async move {
        client.head().await;
        client.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
        let chunk = [b"4000\r\n", &[b'x'; 0x4000][..], b"\r\n"].concat();
        while client.stream.write_all(&chunk).await.is_ok() {}
    })
    .await;
    let clusters = snapshot(web(vec![]), vec![cluster(&[endless], None)]);
    let proxy = Proxy::limited(web(vec![]), vec![], limits(SHORT)).await;
    publish(&proxy, &clusters, web(vec![])).await;
    let mut streams = Vec::new();
    for path in ["/denied", "/allowed"] {
        let mut client = proxy.connect().await;
        client.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        assert!(client.head().await.starts_with("HTTP/1.1 200 "));
        streams.push(client);
    }
    publish(&proxy, &clusters, web(vec![deny_path("/rewritten"), deny_path("/denied")])).await;
    streams[0].rest_of_bytes().await;
    // More than was in flight.
    let mut more = vec![0; 16 << 20];
    within(streams[1].stream.read_exact(&mut more)).await.unwrap();
}

#[tokio::test]
async fn keep_alive_ends_when_the_chain_becomes_tcp() {
    let (proxy, clusters, mut client) = kept_alive().await;
    publish(&proxy, &clusters, listener(tcp(), None)).await;
    assert_eq!(client.rest().await, "");
}

/// An HTTP/2 client that opens streams after GOAWAY, which no library does.
struct Stubborn(TcpStream, u32);

impl Stubborn {
    async fn connect(proxy: &Proxy) -> Self {
        let mut stream = TcpStream::connect(proxy.address).await.unwrap();
        let beginning = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
        within(stream.write_all(beginning)).await.unwrap();
        Self(stream, 1)
    }

    /// Returns whether a request gets a response head.
    async fn is_answered(&mut self) -> bool {
        let Self(stream, id) = self;
        let head = [&[0, 0, 6, 1, 5][..], &id.to_be_bytes(), &[0x82, 0x86, 0x84, 0x41, 1, b'a']].concat();
        if within(stream.write_all(&head)).await.is_err() {
            return false;
        }
        let mut frame = [0; 9];
        while within(stream.read_exact(&mut frame)).await.is_ok() {
            let length = usize::from(frame[1]) << 8 | usize::from(frame[2]);
            if within(stream.read_exact(&mut vec![0; length])).await.is_err() {
                return false;
            }
            // HEADERS or RST_STREAM.
            if frame[5..] == id.to_be_bytes() && matches!(frame[3], 1 | 3) {
                *id += 2;
                return frame[3] == 1;
            }
        }
        false
    }
}

#[tokio::test]
async fn further_changes_do_not_extend_the_drain_time() {
    let denied = || {
        let mut listener = web(vec![]);
        Arc::get_mut(&mut listener.chains[0]).unwrap().policies = vec![deny(Permission::Any)];
        listener
    };
    let clusters = snapshot(web(vec![]), vec![cluster(&support::numbered(1).await, None)]);
    let proxy = Proxy::limited(web(vec![]), vec![], limits(Duration::from_millis(300))).await;
    publish(&proxy, &clusters, web(vec![])).await;
    let mut client = Stubborn::connect(&proxy).await;
    assert!(client.is_answered().await);
    publish(&proxy, &clusters, denied()).await;
    while client.is_answered().await {}
    publish(&proxy, &clusters, denied()).await;
    assert!(!client.is_answered().await);
    assert_eq!(count(&proxy, "skysail_listener_downstream_cx_revoked").await, 1);
}
