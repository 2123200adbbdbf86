//! Listeners, limits and a server for the tests of open connections after a change of the configuration.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::time::Duration;

use skysail_policy::config::{
    HttpManager, Listener, Snapshot,
    http::{Filter, FilterKind},
    route::{Forward, Rewrite},
};
use skysail_proxy::overload::Limits;

use crate::support::{Client, Proxy, http, listener, server, snapshot};

/// A drain time longer than any test.
pub(crate) const LONG: Duration = Duration::from_hours(1);
/// A drain time that no test has to wait for.
pub(crate) const SHORT: Duration = Duration::from_millis(1);

pub(crate) fn limits(revoked_drain: Duration) -> Limits {
    Limits { revoked_drain, ..Limits::default() }
}

/// Starts an echo server. It grants an upgrade if the first bytes request one.
pub(crate) async fn echo() -> std::net::SocketAddr {
    server(|_, mut client: Client| async move {
        let mut first = [0; 4];
        if client.stream.peek(&mut first).await.is_ok() && first == *b"GET " {
            client.head().await;
            client
                .send("HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
                .await;
        }
        let (mut read, mut write) = client.stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
    .await
}

/// Publishes this listener; the clusters stay.
pub(crate) async fn publish(proxy: &Proxy, clusters: &Snapshot, listener: Listener) {
    let listeners = snapshot(listener, vec![]).listeners;
    proxy.workers().publish(Snapshot { listeners, ..clusters.clone() }).await.unwrap();
}

/// Returns an HTTP listener with these filters and one path without policies.
pub(crate) fn web(does: Vec<FilterKind>) -> Listener {
    let change = |manager: &mut HttpManager, forward: &mut Forward| {
        let named = |does| Filter { name: "filter".into(), disabled: false, kind: does };
        manager.filters = does.into_iter().map(named).collect();
        forward.rewrite = Some(Rewrite::Full("/rewritten".into()));
    };
    listener(http(change), None)
}
