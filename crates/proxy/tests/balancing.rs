//! Selection of endpoints: hash policies, health, outlier detection, circuit breakers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use skysail_policy::config::{
    Cluster, Endpoint, Endpoints,
    cluster::{Balancer, HashFunction, RetryBudget},
    health::{ConsecutiveLimit, HealthComparison, Outlier},
    route::{HashCookie, HashKey, HashPolicy},
};
use skysail_policy::state::{Published, health::EndpointState};
use skysail_proxy::overload::Limits as Taken;
use support::{Proxy, cluster, http, listener, numbered, server, tcp, within};
use tokio::sync::Notify;

const RING: Balancer = Balancer::RingHash { minimum: 1024, maximum: 8192, function: HashFunction::Xx };

fn by(key: HashKey) -> Vec<HashPolicy> {
    vec![HashPolicy { key, terminal: false }]
}

#[tokio::test]
async fn requests_with_the_same_key_reach_the_same_endpoint() {
    let endpoints = numbered(5).await;
    for balancer in [RING, Balancer::Maglev(1009)] {
        let mut answers = Vec::new();
        // Another proxy selects the same endpoints.
        for _ in 0..2 {
            let terminal = http(|_, forward| forward.hash = by(HashKey::Header("x-key".into())));
            let mut cluster = cluster(&endpoints, None);
            cluster.balancer = balancer;
            let proxy = Proxy::start(listener(terminal, None), vec![cluster]).await;
            for _ in 0..2 {
                let mut client = proxy.connect().await;
                let mut these = String::new();
                for key in 0..100 {
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
async fn peak_ewma_prefers_the_faster_endpoint() {
    let (decay, unknown) = (Duration::from_hours(1), Duration::from_hours(1));
    let mut cluster = cluster(&numbered(2).await, None);
    cluster.balancer = Balancer::PeakEwma { decay, unknown };
    let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![cluster]).await;
    let mut client = proxy.connect().await;
    let mut answers = Vec::new();
    for _ in 0..20 {
        client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        answers.push(client.message().await.1);
    }
    // The other endpoint has no measurement, and its assumed latency is one hour.
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

#[tokio::test]
async fn a_client_without_a_cookie_gets_one_that_selects_its_endpoint() {
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
async fn connections_of_one_client_reach_the_same_endpoint() {
    let endpoints = numbered(5).await;
    let mut terminal = tcp();
    if let skysail_policy::config::listener::Terminal::Tcp(proxy) = &mut terminal {
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

/// Returns a cluster that ejects an endpoint after three consecutive failures, for `base_ejection`.
fn ejecting(endpoints: &[SocketAddr], base_ejection: Duration) -> Cluster {
    let limit = ConsecutiveLimit { number: 3, enforcing: 100 };
    let never = HealthComparison { hosts: 9, requests: 9, threshold: 99, enforcing: 0, enforcing_local: 0 };
    let outlier = Outlier {
        consecutive_5xx: limit,
        consecutive_gateway_failure: ConsecutiveLimit { number: 9, enforcing: 0 },
        consecutive_local_origin_failure: limit,
        split: false,
        interval: Duration::from_millis(10),
        base_ejection,
        max_ejection: Duration::from_secs(300),
        jitter: Duration::ZERO,
        max_percent: 50,
        always_one: false,
        success_rate: never,
        failure_percentage: never,
        errors: None,
        state: Arc::default(),
    };
    let tracked = |address: &SocketAddr| {
        let track = Some(Arc::new(EndpointState::new(Instant::now())));
        Arc::new(Endpoint { state: track, ..Endpoint::new(*address, None) })
    };
    let endpoints = Endpoints::of(endpoints.iter().map(tracked).collect());
    Cluster {
        outlier: Some(outlier),
        endpoints: Arc::new(Published::from_pointee(endpoints)),
        ..cluster(&[], None)
    }
}

/// Starts a server that answers 500 until the flag changes.
async fn failing() -> (SocketAddr, Arc<std::sync::atomic::AtomicBool>) {
    let bad = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let state = Arc::clone(&bad);
    let address = server(move |_, mut client: support::Client| {
        let bad = Arc::clone(&state);
        async move {
            loop {
                let mut first = [0];
                if !matches!(client.stream.peek(&mut first).await, Ok(1)) {
                    return;
                }
                client.head().await;
                let status = if bad.load(std::sync::atomic::Ordering::Relaxed) { 500 } else { 200 };
                client.send(&format!("HTTP/1.1 {status} X\r\ncontent-length: 1\r\n\r\nx")).await;
            }
        }
    })
    .await;
    (address, bad)
}

/// Returns the value of a metric.
async fn metric(proxy: &Proxy, name: &str) -> u64 {
    let text = proxy.metrics().await;
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

const ACTIVE: &str = "envoy_cluster_outlier_detection_ejections_active";

#[tokio::test]
async fn an_ejection_applies_to_all_workers_and_ends() {
    let (bad, fails) = failing().await;
    let good = numbered(1).await[0];
    let cluster = ejecting(&[good, bad], Duration::from_millis(50));
    let proxy = Proxy::with(2, listener(http(|_, _| ()), None), vec![cluster], Taken::default()).await;
    // Connections to both workers, either of which may detect the failures.
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(proxy.connect().await);
    }
    let mut failures = 0;
    for _ in 0..10 {
        for client in &mut clients {
            client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            failures += u32::from(client.message().await.0.starts_with("HTTP/1.1 500 "));
        }
        if metric(&proxy, ACTIVE).await > 0 {
            break;
        }
    }
    assert!(metric(&proxy, "envoy_cluster_outlier_detection_ejections_enforced_total").await > 0);
    assert!(failures >= 3);
    fails.store(false, std::sync::atomic::Ordering::Relaxed);
    // The endpoint is used again after the ejection time.
    within(async {
        loop {
            clients[0].send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            let (head, body) = clients[0].message().await;
            if body == "x" && head.starts_with("HTTP/1.1 200 ") {
                return;
            }
        }
    })
    .await;
    within(async { while metric(&proxy, ACTIVE).await != 0 {} }).await;
}

#[tokio::test]
async fn an_ejected_endpoint_gets_no_requests_from_any_worker() {
    let (bad, _) = failing().await;
    let good = numbered(1).await[0];
    let cluster = ejecting(&[good, bad], Duration::from_secs(300));
    let proxy = Proxy::with(2, listener(http(|_, _| ()), None), vec![cluster], Taken::default()).await;
    let mut first = proxy.connect().await;
    let mut failures = 0;
    while failures < 3 {
        first.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        failures += u32::from(first.message().await.0.starts_with("HTTP/1.1 500 "));
    }
    for _ in 0..16 {
        let mut client = proxy.connect().await;
        for _ in 0..4 {
            client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            assert_eq!(client.message().await.1, "0");
        }
    }
    assert_eq!(metric(&proxy, ACTIVE).await, 1);
    // The ejection ends with the cluster.
    proxy.workers().publish(support::snapshot(listener(http(|_, _| ()), None), vec![])).await.unwrap();
    assert_eq!(metric(&proxy, ACTIVE).await, 0);
}

#[tokio::test]
async fn failed_connections_count_for_tcp() {
    let good = numbered(1).await[0];
    let refusing_address = SocketAddr::from(([127, 0, 0, 1], 1));
    let cluster = ejecting(&[good, refusing_address], Duration::from_secs(300));
    let proxy = Proxy::start(listener(tcp(), None), vec![cluster]).await;
    let mut unanswered = 0;
    for _ in 0..20 {
        let mut client = proxy.connect().await;
        client.send("GET / HTTP/1.1\r\n\r\n").await;
        unanswered += u32::from(client.message_if_any().await.is_none());
    }
    assert_eq!(unanswered, 3);
    assert_eq!(metric(&proxy, ACTIVE).await, 1);
}

#[tokio::test]
async fn each_endpoint_has_a_connection_limit() {
    let (arrived, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell, wait) = (arrived.clone(), go.clone());
    let upstream = server(move |_, mut client: support::Client| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            loop {
                client.message().await;
                tell.notify_one();
                wait.notified().await;
                client.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            }
        }
    })
    .await;
    let mut limited = ejecting(&[upstream], Duration::from_secs(30));
    limited.limits.connections_per_host = 1;
    limited.limits.pending = 1;
    let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![limited]).await;
    let mut first = proxy.connect().await;
    first.send("GET /1 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    within(arrived.notified()).await;
    // Of the next two requests one waits, and the other is refused.
    let (mut second, mut third) = (proxy.connect().await, proxy.connect().await);
    second.send("GET /2 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    third.send("GET /3 HTTP/1.1\r\nHost: a\r\n\r\n").await;
    let mut waiting = tokio::select! {
        head = second.head() => { assert!(head.starts_with("HTTP/1.1 503 "), "{head}"); third }
        head = third.head() => { assert!(head.starts_with("HTTP/1.1 503 "), "{head}"); second }
    };
    go.notify_one();
    assert_eq!(first.message().await.1, "ok");
    within(arrived.notified()).await;
    go.notify_one();
    assert_eq!(waiting.message().await.1, "ok");
    assert_eq!(proxy.workers().clusters().await[0].connections_total, 1);
}

#[tokio::test]
async fn retries_have_a_budget() {
    let upstream = server(|_, mut client| async move {
        loop {
            let (head, _) = client.message().await;
            let again = !head.contains("x-envoy-attempt-count: 1\r\n");
            let status = if again { "200 OK" } else { "503 Service Unavailable" };
            client.send(&format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n")).await;
        }
    })
    .await;
    // With one request in flight, a share of 100 % allows a retry. A share of 50 % is rounded down and allows
    // none, except with a minimum of 1. Two requests within an interval allow one.
    let (hour, instant) = (Some(Duration::from_secs(3600)), Some(Duration::from_nanos(1)));
    for (share, min, interval, statuses) in [
        (1_000_000, 0, None, [200, 200]),
        (500_000, 0, None, [503, 503]),
        (500_000, 1, None, [200, 200]),
        (500_000, 0, hour, [503, 200]),
        (1_000_000, 0, instant, [503, 503]),
    ] {
        let mut limited = cluster(&[upstream], None);
        limited.limits.retries = 0;
        limited.limits.budget = Some(RetryBudget { share, min, interval });
        let terminal = http(|_, forward| forward.retry = Some(support::retries(1)));
        let proxy = Proxy::start(listener(terminal, None), vec![limited]).await;
        let mut client = proxy.connect().await;
        for status in statuses {
            client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            let head = client.head().await;
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{share} {min} {interval:?}: {head}");
        }
    }
}

#[tokio::test]
async fn connections_close_after_their_maximum_duration() {
    let upstream = numbered(1).await[0];
    for (max, connections) in [(None, 1), (Some(Duration::from_nanos(1)), 3)] {
        let mut cluster = cluster(&[upstream], None);
        cluster.max_connection_duration = max;
        let proxy = Proxy::start(listener(http(|_, _| ()), None), vec![cluster]).await;
        let mut client = proxy.connect().await;
        for _ in 0..3 {
            client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            assert_eq!(client.message().await.1, "0");
        }
        assert_eq!(proxy.workers().clusters().await[0].connections_total, connections);
    }
    // With TCP even while data is in flight.
    let silent = server(|_, mut client| async move {
        client.rest().await;
    })
    .await;
    let mut terminal = tcp();
    if let skysail_policy::config::listener::Terminal::Tcp(proxy) = &mut terminal {
        Arc::get_mut(proxy).unwrap().max_duration = Some(Duration::from_millis(20));
    }
    let proxy = Proxy::start(listener(terminal, None), vec![cluster(&[silent], None)]).await;
    let mut client = proxy.connect().await;
    client.send("hello").await;
    assert_eq!(client.rest().await, "");
}
