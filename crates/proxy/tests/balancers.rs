//! Load balancing: round robin, weights, least request, slow start, locality.

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
    cluster::{Balancer, Health, Locality},
    health::SlowStart,
};
use skysail_policy::state::{Published, health::EndpointState};
use support::{Proxy, cluster, http, listener, numbered, server};
use tokio::sync::{Notify, mpsc::unbounded_channel};

async fn start(cluster: Cluster) -> Proxy {
    Proxy::start(listener(http(|_, _| ()), None), vec![cluster]).await
}

/// Returns the servers that answer `count` requests, one after the other.
async fn answers(proxy: &Proxy, count: usize) -> Vec<usize> {
    let mut client = proxy.connect().await;
    let mut answers = Vec::new();
    for _ in 0..count {
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        answers.push(client.message().await.1.parse().unwrap());
    }
    answers
}

/// Counts the answers of each server.
fn shares<const N: usize>(answers: &[usize]) -> [usize; N] {
    std::array::from_fn(|number| answers.iter().filter(|answer| **answer == number).count())
}

fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint::new(address, None)
}

fn of(balancer: Balancer, priorities: Vec<Vec<Endpoint>>) -> Cluster {
    let priorities = priorities.into_iter().map(|all| all.into_iter().map(Arc::new).collect()).collect();
    let endpoints = Endpoints { priorities, ..Endpoints::default() };
    Cluster { balancer, endpoints: Arc::new(Published::from_pointee(endpoints)), ..cluster(&[], None) }
}

#[tokio::test]
async fn round_robin_selects_endpoints_in_order() {
    let proxy = start(cluster(&numbered(3).await, None)).await;
    let all = answers(&proxy, 12).await;
    let mut turn = all[..3].to_vec();
    for next in all.chunks(3) {
        assert_eq!(next, turn, "{all:?}");
    }
    turn.sort_unstable();
    assert_eq!(turn, [0, 1, 2]);
}

#[tokio::test]
async fn round_robin_honours_weights() {
    let servers = numbered(2).await;
    let endpoints =
        [(servers[0], 3), (servers[1], 1)].map(|(at, weight)| Endpoint { weight, ..endpoint(at) });
    let proxy = start(of(Balancer::RoundRobin, vec![endpoints.into()])).await;
    let all = answers(&proxy, 16).await;
    assert!(all.chunks(4).all(|turn| shares(turn) == [3, 1]), "{all:?}");
}

#[tokio::test]
async fn a_busy_endpoint_gets_no_further_requests() {
    let (tell, mut received) = unbounded_channel();
    let go = Arc::new(Notify::new());
    let mut servers = Vec::new();
    for number in 0..2 {
        let (tell, go) = (tell.clone(), go.clone());
        let serve = move |_, mut client: support::Client| {
            let (tell, go) = (tell.clone(), go.clone());
            async move {
                while let Some((head, _)) = client.message_if_any().await {
                    if head.starts_with("GET /long ") {
                        tell.send(number).unwrap();
                        go.notified().await;
                    }
                    client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{number}")).await;
                }
            }
        };
        servers.push(server(serve).await);
    }
    let mut cluster = cluster(&servers, None);
    // With this many choices the busy endpoint practically never is the only candidate.
    cluster.balancer = Balancer::LeastRequest { choices: 64, bias: 1.0 };
    let proxy = start(cluster).await;
    let mut long = proxy.connect().await;
    long.send("GET /long HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let busy: usize = support::within(received.recv()).await.unwrap();
    assert_eq!(answers(&proxy, 20).await, [1 - busy; 20]);
    go.notify_one();
    assert_eq!(long.message().await.1, busy.to_string());
}

#[tokio::test]
async fn random_reaches_all_endpoints() {
    let mut cluster = cluster(&numbered(5).await, None);
    cluster.balancer = Balancer::Random;
    let all = answers(&start(cluster).await, 300).await;
    assert!(shares::<5>(&all).iter().all(|share| *share > 0), "{all:?}");
    // In no fixed order.
    assert!(all.chunks(5).any(|turn| turn != &all[..5]), "{all:?}");
}

#[tokio::test]
async fn a_new_endpoint_gets_fewer_requests_at_first() {
    let servers = numbered(2).await;
    let window = Duration::from_hours(1);
    let slow = SlowStart { window, aggression: 1.0, min: 0.1 };
    for (slow_start, expected) in [(None, [55, 55]), (Some(slow), [100, 10])] {
        let tracked = |address, since| {
            let track = Some(Arc::new(EndpointState { since, ..EndpointState::new(Instant::now()) }));
            Endpoint { state: track, ..endpoint(address) }
        };
        let of_now = |addresses: &[SocketAddr]| {
            let new = |address: &SocketAddr| Endpoint {
                state: Some(Arc::new(EndpointState::new(Instant::now()))),
                ..endpoint(*address)
            };
            let all = std::iter::once(tracked(servers[0], 1)).chain(addresses.iter().map(new)).collect();
            Cluster { slow_start, ..of(Balancer::RoundRobin, vec![all]) }
        };
        let proxy = start(of_now(&[])).await;
        assert_eq!(answers(&proxy, 10).await, [0; 10]);
        let both = support::snapshot(listener(http(|_, _| ()), None), vec![of_now(&servers[1..])]);
        proxy.workers().publish(both).await.unwrap();
        let all = answers(&proxy, 110).await;
        let near = |share: usize, expected: usize| share.abs_diff(expected) <= 2;
        let shares = shares::<2>(&all);
        assert!(near(shares[0], expected[0]) && near(shares[1], expected[1]), "{slow_start:?}: {shares:?}");
    }
}

#[tokio::test]
async fn lower_priorities_replace_unhealthy_endpoints() {
    let servers = numbered(4).await;
    let with = |health: [Health; 4]| {
        let mut all = servers.iter().zip(health).map(|(at, health)| Endpoint { health, ..endpoint(*at) });
        let first = all.by_ref().take(2).collect();
        of(Balancer::RoundRobin, vec![first, all.collect()])
    };
    let (good, bad) = (Health::Healthy, Health::Unhealthy);
    for (health, expected) in [
        ([good, good, good, good], [10, 10, 0, 0]),
        ([bad, bad, good, good], [0, 0, 10, 10]),
        ([bad, bad, bad, good], [0, 0, 0, 20]),
    ] {
        let proxy = start(with(health)).await;
        assert_eq!(shares(&answers(&proxy, 20).await), expected, "{health:?}");
        assert!(proxy.metrics().await.contains(&format!("{PANIC}0\n")), "{health:?}");
    }
    // Without a healthy endpoint, all are used.
    let proxy = start(with([bad; 4])).await;
    let shares = shares::<4>(&answers(&proxy, 60).await);
    assert!(shares.iter().all(|share| *share > 0), "{shares:?}");
    assert!(proxy.metrics().await.contains(&format!("{PANIC}60\n")));
}

const PANIC: &str = "envoy_cluster_lb_healthy_panic{cluster_name=\"upstream\"} ";

#[tokio::test]
async fn localities_are_weighted() {
    let servers = numbered(3).await;
    for (locality_weighted, expected) in [(false, [20, 20, 20]), (true, [20, 20, 20 * 4])] {
        let endpoints = [(servers[0], 0), (servers[1], 0), (servers[2], 1)];
        let endpoints = endpoints.map(|(at, locality)| Arc::new(Endpoint { locality, ..endpoint(at) }));
        let localities = [1, 2].map(|weight| Locality { place: Default::default(), weight });
        let endpoints = Endpoints {
            priorities: vec![endpoints.into()],
            localities: localities.into(),
            ..Endpoints::default()
        };
        let endpoints = Arc::new(Published::from_pointee(endpoints));
        let proxy = start(Cluster { endpoints, locality_weighted, ..cluster(&[], None) }).await;
        let all = answers(&proxy, expected.iter().sum()).await;
        assert_eq!(shares(&all), expected, "{locality_weighted}");
    }
}
