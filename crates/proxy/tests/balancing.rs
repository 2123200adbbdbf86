//! Which endpoint requests and connections go to: hashes, health, ejection.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{net::SocketAddr, time::Duration};

use skysail_proxy::config::{
    cluster::{Balancer, HashFunction},
    route::{HashCookie, HashKey, HashPolicy},
};
use support::{Proxy, cluster, http, listener, server, tcp};

const RING: Balancer = Balancer::RingHash { minimum: 1024, maximum: 8192, function: HashFunction::Xx };

/// Servers that answer each request, or each connection's first line, with their number.
async fn numbered(count: usize) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    for number in 0..count {
        let serve = move |_, mut client: support::Client| async move {
            loop {
                let mut first = [0];
                if !matches!(client.stream.peek(&mut first).await, Ok(1)) {
                    return;
                }
                client.head().await;
                client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{number}")).await;
            }
        };
        addresses.push(server(serve).await);
    }
    addresses
}

fn by(key: HashKey) -> Vec<HashPolicy> {
    vec![HashPolicy { key, terminal: false }]
}

#[tokio::test]
async fn requests_with_the_same_key_go_to_the_same_endpoint() {
    let endpoints = numbered(5).await;
    for balancer in [RING, Balancer::Maglev(1009)] {
        let mut answers = Vec::new();
        // Another proxy leads them to the same, too.
        for _ in 0..2 {
            let terminal = http(|_, forward| forward.hash = by(HashKey::Header("x-key".into())));
            let mut cluster = cluster(&endpoints, None);
            cluster.balancer = balancer;
            let proxy = Proxy::start(listener(terminal, None), vec![cluster]).await;
            for _ in 0..2 {
                let mut client = proxy.connect().await;
                let mut these = String::new();
                for key in 0..20 {
                    client.send(&format!("GET / HTTP/1.1\r\nHost: a\r\nX-Key: key-{key}\r\n\r\n")).await;
                    these += &client.message().await.1;
                }
                answers.push(these);
            }
        }
        assert!(answers.iter().all(|these| *these == answers[0]), "{answers:?}");
        assert!((0..5).all(|number| answers[0].contains(&number.to_string())), "{answers:?}");
    }
}

#[tokio::test]
async fn a_client_that_has_no_cookie_gets_one_and_is_led_by_it() {
    let endpoints = numbered(8).await;
    let cookie = HashCookie {
        name: "user".into(),
        ttl: Some(Duration::from_secs(60)),
        path: "/".into(),
        attributes: vec![],
    };
    let terminal = http(|_, forward| forward.hash = by(HashKey::Cookie(Box::new(cookie))));
    let mut cluster = cluster(&endpoints, None);
    cluster.balancer = RING;
    let proxy = Proxy::start(listener(terminal, None), vec![cluster]).await;
    for _ in 0..5 {
        let mut client = proxy.connect().await;
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        let (head, first) = client.message().await;
        let cookie = head.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap();
        let (pair, attributes) = cookie.split_once("; ").unwrap();
        assert_eq!(attributes, "Max-Age=60; Path=/; HttpOnly");
        let mut client = proxy.connect().await;
        client.send(&format!("GET / HTTP/1.1\r\nHost: a\r\nCookie: {pair}\r\n\r\n")).await;
        let (head, second) = client.message().await;
        assert!(!head.contains("set-cookie"), "{head}");
        assert_eq!(first, second);
    }
}

#[tokio::test]
async fn connections_of_one_client_go_to_the_same_endpoint() {
    let endpoints = numbered(5).await;
    let mut terminal = tcp();
    if let skysail_proxy::config::listener::Terminal::Tcp(proxy) = &mut terminal {
        std::sync::Arc::get_mut(proxy).unwrap().hash_source_ip = true;
    }
    let mut cluster = cluster(&endpoints, None);
    cluster.balancer = RING;
    let proxy = Proxy::start(listener(terminal, None), vec![cluster]).await;
    let mut answers = Vec::new();
    for _ in 0..5 {
        let mut client = proxy.connect().await;
        client.send("GET / HTTP/1.1\r\n\r\n").await;
        answers.push(client.message().await.1);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}
