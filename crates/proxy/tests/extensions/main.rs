//! Extensions and address types that Istio's less common settings need, from a bootstrap file to observed behaviour.
//! Where both support the setting, the sidecar and Envoy run the same file.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod claims;
mod connection_limit;
mod dynamic;
#[path = "../support/either.rs"]
mod either;
#[path = "../support/envoy.rs"]
mod envoy;
#[path = "../support/files.rs"]
mod files;
mod pipes;
#[path = "../support/program.rs"]
mod program;
#[path = "../support/mod.rs"]
mod support;
mod wrapped;

use std::net::SocketAddr;

use serde_json::{Value, json};
use support::Client;
use tokio::net::TcpStream;

/// Returns a bootstrap with an admin page, which Envoy needs.
fn bootstrap(listeners: &[Value], clusters: &[Value]) -> String {
    let admin = json!({"address": files::address(SocketAddr::from(([127, 0, 0, 1], 0)))});
    json!({
        "node": {"id": "a", "cluster": "b"},
        "admin": admin,
        "static_resources": {"listeners": listeners, "clusters": clusters}
    })
    .to_string()
}

/// Sends a request on a new connection; returns the head and the body of the response.
async fn ask(to: SocketAddr, request: &str) -> (String, String) {
    let mut client = Client::new(TcpStream::connect(to).await.unwrap());
    client.send(request).await;
    client.message().await
}
