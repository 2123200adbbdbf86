//! The network filter `connection_limit`.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::{
    bootstrap,
    either::Either,
    files,
    support::{Client, echo, within},
};

fn limit(prefix: &str, fields: &Value) -> Value {
    let config = json!({"stat_prefix": prefix, "max_connections": "2"});
    files::filter("network.connection_limit.v3.ConnectionLimit", &files::with(config, fields))
}

/// Waits until a statistic has a value.
async fn until(proxy: &Either, line: &str) {
    within(async {
        while !proxy.page("/stats").await.lines().any(|own| own == line) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn connections_above_the_limit_are_closed() {
    let delay = Duration::from_millis(295);
    let server = echo().await;
    let tcp = files::filter("network.tcp_proxy.v3.TcpProxy", &json!({"stat_prefix": "t", "cluster": "c"}));
    let http = files::http(&[], &files::to("c"), &json!({}));
    let mut listeners = vec![
        files::listener("tcp", &[limit("plain", &json!({})), tcp.clone()]),
        files::listener("http", &[limit("web", &json!({})), http]),
        files::listener("delayed", &[limit("late", &json!({"delay": "0.3s"})), tcp.clone()]),
    ];
    let off = json!({"runtime_enabled": {"default_value": false, "runtime_key": "a.b"}});
    listeners.push(files::listener("off", &[limit("none", &off), tcp]));
    for proxy in Either::both(&bootstrap(&listeners, &[files::cluster("c", server, false)])).await {
        for (listener, prefix) in [("tcp", "plain"), ("http", "web"), ("delayed", "late")] {
            let address = proxy.listener(listener).await;
            let mut open = Vec::new();
            for _ in 0..2 {
                let mut client = Client::new(TcpStream::connect(address).await.unwrap());
                client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
                assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
                open.push(client);
            }
            let begin = Instant::now();
            let mut refused = Client::new(TcpStream::connect(address).await.unwrap());
            assert_eq!(refused.rest_of_bytes().await, b"");
            // Envoy's timers are up to a millisecond early.
            assert!(listener != "delayed" || begin.elapsed() >= delay, "{:?}", begin.elapsed());
            until(&proxy, &format!("connection_limit.{prefix}.limited_connections: 1")).await;
            until(&proxy, &format!("connection_limit.{prefix}.active_connections: 2")).await;
            // The end of a connection frees its place.
            drop(open.pop());
            until(&proxy, &format!("connection_limit.{prefix}.active_connections: 1")).await;
            let mut client = Client::new(TcpStream::connect(address).await.unwrap());
            client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
            assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
        }
        let address = proxy.listener("off").await;
        let mut open = Vec::new();
        for _ in 0..4 {
            let mut client = Client::new(TcpStream::connect(address).await.unwrap());
            client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
            assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
            open.push(client);
        }
    }
}
