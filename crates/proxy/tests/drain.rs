//! Drain at shutdown: clients are notified, and no request is interrupted.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/program.rs"]
mod program;
mod support;

use std::{
    io::Write as _,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use program::Program;
use skysail_policy::config::{
    Cluster, Listener,
    listener::{Direction, Inspect, Transport},
    route::Targets,
};
use skysail_proxy::{accept::workers::Drain, overload::Limits};
use support::{Client, Proxy, cluster, echo, http, listener, proxy_to, server, snapshot, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{Barrier, Notify},
};

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
const CLOSE: &str = "\r\nconnection: close\r\n";
const HOUR: Duration = Duration::from_hours(1);

async fn connect(address: SocketAddr) -> Client {
    Client::new(TcpStream::connect(address).await.unwrap())
}

async fn until_refused(address: SocketAddr) {
    within(async { while TcpStream::connect(address).await.is_ok() {} }).await;
}

/// Checks that the connection ends without further data or reset.
async fn ends(client: &mut Client) {
    assert_eq!(within(client.stream.read(&mut [0])).await.unwrap(), 0);
}

#[tokio::test]
async fn outbound_requests_are_served_until_no_inbound_request_is_left() {
    let places = Arc::new(OnceLock::<[SocketAddr; 2]>::new());
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (known, tell, wait) = (places.clone(), arrived.clone(), go.clone());
    // The application calls another service before it answers, after the drain has begun.
    let application = server(move |_, mut client: Client| {
        let (known, tell, wait) = (known.clone(), tell.clone(), wait.clone());
        async move {
            client.message().await;
            let [inbound, outbound] = *known.get().unwrap();
            let mut old = connect(outbound).await;
            old.send(GET).await;
            old.message().await;
            tell.notify_one();
            until_refused(inbound).await;
            wait.notified().await;
            let mut new = connect(outbound).await;
            let mut heads = String::new();
            for connection in [&mut old, &mut new] {
                connection.send(GET).await;
                heads += &connection.message().await.0;
            }
            client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{heads}", heads.len())).await;
            client.rest().await;
        }
    })
    .await;
    let elsewhere = Cluster { name: "elsewhere".into(), ..cluster(&[echo().await], None) };
    let clusters = || vec![cluster(&[application], None)];
    let inbound = || Listener {
        name: "inbound".into(),
        direction: Direction::Inbound,
        ..listener(http(|_, _| ()), None)
    };
    let outbound = Listener {
        name: "outbound".into(),
        direction: Direction::Outbound,
        ..listener(http(|_, forward| forward.targets = Targets::Single("elsewhere".into())), None)
    };
    // Workers wait for one another, because any of them may serve the application's connections.
    let proxy = Proxy::with(2, inbound(), clusters(), Limits::default()).await;
    let mut both = snapshot(inbound(), clusters());
    Arc::make_mut(&mut both.listeners).by_name.insert(outbound.name.clone(), Arc::new(outbound));
    Arc::make_mut(&mut both.clusters).insert(elsewhere.name.clone(), Arc::new(elsewhere));
    proxy.workers().publish(both.clone()).await.unwrap();
    let addresses = proxy.workers().addresses().await;
    let place = |name: &str| addresses.iter().find(|(known, ..)| **known == *name).unwrap().2;
    places.set([place("inbound"), place("outbound")]).unwrap();

    let mut client = connect(place("inbound")).await;
    client.send(GET).await;
    within(arrived.notified()).await;
    let story = async {
        until_refused(place("inbound")).await;
        // Meanwhile the workers accept changes. A removed inbound listener does not return under another name.
        let late = Listener { name: "late".into(), ..inbound() };
        Arc::make_mut(&mut both.listeners).by_name.insert(late.name.clone(), Arc::new(late));
        within(proxy.workers().publish(both)).await.unwrap();
        let addresses = proxy.workers().addresses().await;
        until_refused(addresses.iter().find(|(name, ..)| **name == *"late").unwrap().2).await;
        go.notify_one();
        let (head, body) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 200 ") && head.contains(CLOSE), "{head}");
        assert_eq!(body.matches("HTTP/1.1 200 ").count(), 2, "{body}");
        assert!(!body.contains(CLOSE), "{body}");
        ends(&mut client).await;
    };
    let (cut_off, ()) = within(Box::pin(async { tokio::join!(proxy.workers().drain(HOUR), story) })).await;
    assert_eq!(cut_off, 0);
    until_refused(place("outbound")).await;
}

#[tokio::test]
async fn a_request_that_arrives_during_the_drain_is_answered() {
    let proxy = proxy_to(echo().await).await;
    let started = Arc::new(Barrier::new(121));
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..120 {
        let (mut client, started) = (proxy.connect().await, started.clone());
        clients.spawn(async move {
            client.send(GET).await;
            let (head, _) = client.message().await;
            assert!(!head.contains(CLOSE), "{head}");
            started.wait().await;
            // Some clients send nothing further.
            if number % 6 == 0 {
                return ends(&mut client).await;
            }
            loop {
                client.send("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello").await;
                let (head, body) = client.message().await;
                assert!(head.starts_with("HTTP/1.1 200 ") && body.ends_with("hello"), "{head}{body}");
                if head.contains(CLOSE) {
                    return ends(&mut client).await;
                }
            }
        });
    }
    started.wait().await;
    assert_eq!(within(proxy.workers().drain(HOUR)).await, 0);
    within(clients.join_all()).await;
}

#[tokio::test]
async fn a_connection_that_waits_for_accept_is_served() {
    let upstream = echo().await;
    for _ in 0..40 {
        let proxy = proxy_to(upstream).await;
        // Nothing else happens between the connects and the drain.
        let connect = || {
            let mut stream = std::net::TcpStream::connect(proxy.address).unwrap();
            stream.write_all(GET.as_bytes()).unwrap();
            stream.set_nonblocking(true).unwrap();
            Client::new(TcpStream::from_std(stream).unwrap())
        };
        let mut clients = [connect(), connect(), connect()];
        let story = async move {
            for client in &mut clients {
                let (head, _) = client.message().await;
                assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
            }
        };
        let (cut_off, ()) =
            within(Box::pin(async { tokio::join!(proxy.workers().drain(HOUR), story) })).await;
        assert_eq!(cut_off, 0);
    }
}

#[tokio::test]
async fn a_silent_connection_is_not_waited_for() {
    let mut listener = listener(http(|_, _| ()), None);
    listener.inspect_tls = Some(Inspect::default());
    let chain = Arc::get_mut(&mut listener.chains[0]).unwrap();
    chain.matches.transport = Some(Transport::RawBuffer);
    let proxy = Proxy::start(listener, vec![]).await;
    let mut silent = proxy.connect().await;
    assert_eq!(within(proxy.workers().drain(HOUR)).await, 0);
    ends(&mut silent).await;
}

#[tokio::test]
async fn a_connection_during_the_drain_is_served_once() {
    let proxy = proxy_to(echo().await).await;
    let drain = Drain { directions: Direction::ALL, close: false, timeout: HOUR };
    proxy.workers().begin_drain(drain).await;
    let mut client = proxy.connect().await;
    client.send(GET).await;
    let (head, _) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 200 ") && head.contains(CLOSE), "{head}");
    ends(&mut client).await;
    let stream = TcpStream::connect(proxy.address).await.unwrap();
    let (requests, connection) = within(h2::client::handshake(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = http::Request::builder().uri("http://a/").body(()).unwrap();
    let (answer, _) = within(requests.ready()).await.unwrap().send_request(request, true).unwrap();
    assert_eq!(within(answer).await.unwrap().status(), 200);
    within(connection).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_http2_client_that_ignores_goaway_may_open_streams_for_the_drain_timeout() {
    const GO_AWAY: u8 = 7;
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell, wait) = (arrived.clone(), go.clone());
    let upstream = server(move |_, mut client: Client| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            client.message().await;
            tell.notify_one();
            wait.notified().await;
            client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            client.rest().await;
        }
    })
    .await;
    let terminal = http(|manager, _| manager.drain_timeout = Duration::from_millis(20));
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[upstream], None)]).await;
    let mut client = TcpStream::connect(proxy.address).await.unwrap();
    client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    // GET http://a/
    client.write_all(b"\0\0\x06\x01\x05\0\0\0\x01\x82\x86\x84\x41\x01a").await.unwrap();
    within(arrived.notified()).await;
    let story = async {
        let (mut last_streams, mut content) = (Vec::new(), Vec::new());
        loop {
            let mut head = [0; 9];
            if within(client.read_exact(&mut head)).await.is_err() {
                return (last_streams, content);
            }
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            within(client.read_exact(&mut payload)).await.unwrap();
            match head[3] {
                GO_AWAY => {
                    last_streams.push(u32::from_be_bytes(payload[..4].try_into().unwrap()));
                    if last_streams.len() == 2 {
                        go.notify_one();
                    }
                }
                0 => content.extend(payload),
                _ => {}
            }
        }
    };
    let (cut_off, (last_streams, content)) =
        within(Box::pin(async { tokio::join!(proxy.workers().drain(HOUR), story) })).await;
    assert_eq!((cut_off, &last_streams[..], &content[..]), (0, &[0x7fff_ffff, 1][..], &b"ok"[..]));
}

#[tokio::test]
async fn the_admin_page_drains_the_requested_listeners() {
    let listener = |name: &str, direction: &str| {
        format!(
            r#"
  - name: {name}
    address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    traffic_direction: {direction}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          route_config: {{virtual_hosts: [{{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, direct_response: {{status: 200}}}}]}}]}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
"#
        )
    };
    let listeners = [("in", "INBOUND"), ("out", "OUTBOUND")].map(|(name, way)| listener(name, way)).concat();
    let bootstrap = format!("node: {{id: a}}\nstatic_resources:\n  listeners:{listeners}");
    let folder = tempfile::tempdir().unwrap();
    let program = Program::start(folder.path(), &bootstrap).await;
    let (inbound, outbound) = (program.listener("in").await, program.listener("out").await);
    let answer = program.page("POST", "/drain_listeners?inbound").await;
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("no parameter \"inbound\""), "{answer}");
    let drain = async |options: &str| {
        let answer = program.page("POST", &format!("/drain_listeners?{options}")).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("OK\n"), "{answer}");
    };
    let says_close = async |address: SocketAddr| {
        let mut client = connect(address).await;
        client.send(GET).await;
        let (head, _) = client.message().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        head.contains(CLOSE)
    };
    let mut idle = connect(inbound).await;
    drain("inboundonly&graceful").await;
    assert!(says_close(inbound).await && !says_close(outbound).await);
    ends(&mut idle).await;
    drain("inboundonly").await;
    until_refused(inbound).await;
    assert!(!says_close(outbound).await);
    drain("skip_exit").await;
    assert!(says_close(outbound).await);
    // The admin page still responds.
    assert!(program.page("GET", "/stats?filter=rq_total").await.starts_with("HTTP/1.1 200 "));
    let log = program.quit().await;
    assert!(log.contains("drained"), "{log}");
}
