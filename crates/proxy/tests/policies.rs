//! Authorization policies for connections and requests.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/http2.rs"]
mod http2;
#[path = "support/mesh.rs"]
mod mesh;
#[path = "support/program.rs"]
mod program;
mod support;

use std::sync::Arc;

use files::{bootstrap, filter};
use mesh::{Mesh, accepting};
use program::Program;
use regex::bytes::Regex;
use serde_json::json;
use skysail_policy::config::{
    Listener,
    listener::{Inspect, ProxyProtocolFilter},
    policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
    text::TextMatch,
};
use support::{Client, Proxy, cluster, echo, listener, tcp, within};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

/// Denies a permission to a principal.
fn deny(permission: Permission, principal: Principal) -> Arc<Policy> {
    let rule = Rule { name: "rule".into(), permissions: vec![permission], principals: vec![principal] };
    let rules = Some(Rules::new(RuleAction::Deny, vec![rule]));
    Arc::new(Policy { rules, shadow: None, shadow_prefix: "".into() })
}

fn under(policy: Arc<Policy>, mut listener: Listener) -> Listener {
    Arc::get_mut(&mut listener.chains[0]).unwrap().policies = vec![policy];
    listener
}

#[tokio::test]
async fn connections_are_denied_by_port() {
    let listener = under(deny(Permission::Port(81), Principal::Any), listener(tcp(), None));
    let proxied = Some(ProxyProtocolFilter { except: vec![], optional: false, refused: vec![] });
    let listener = Listener { proxy_protocol: proxied, ..listener };
    let proxy = Proxy::start(listener, vec![cluster(&[echo().await], None)]).await;
    for (port, passes) in [(80, true), (81, false), (82, true)] {
        let mut client = proxy.connect().await;
        client.send(&format!("PROXY TCP4 127.0.0.1 127.0.0.1 1000 {port}\r\n")).await;
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert_eq!(client.message_if_any().await.is_some(), passes, "{port}");
    }
    assert!(proxy.metrics().await.contains("envoy_tcp_rbac_denied{listener_address=\"listener\"} 1\n"));
}

#[tokio::test]
async fn connections_are_denied_by_principal_and_sni() {
    let mesh = Mesh::new();
    let from = |namespace: &str| {
        let name = Regex::new(&format!("^.*/ns/{namespace}/.*$")).unwrap();
        Principal::Authenticated(Some(TextMatch::Regex(name)))
    };
    let name = |name: &str| Permission::ServerName(TextMatch::Exact(name.as_bytes().into()));
    for (policy, passes) in [
        (deny(Permission::Any, from("default")), false),
        (deny(Permission::Any, from("other")), true),
        (deny(name("a.example"), Principal::Any), false),
        (deny(name("b.example"), Principal::Any), true),
    ] {
        let tls = accepting(&mesh.spec("server", "client", &[]));
        let listener = Listener { inspect_tls: Some(Inspect::default()), ..listener(tcp(), Some(tls)) };
        let proxy = Proxy::start(under(policy.clone(), listener), vec![cluster(&[echo().await], None)]).await;
        let connector = TlsConnector::from(mesh.spec("client", "server", &[]).client().unwrap());
        let stream = TcpStream::connect(proxy.address).await.unwrap();
        let mut stream = within(connector.connect("a.example".try_into().unwrap(), stream)).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let first = within(stream.read_u8()).await;
        assert_eq!(first.is_ok(), passes, "{policy:?}");
    }
}

#[tokio::test]
async fn shadow_denials_are_counted_and_pass() {
    let everybody = json!({"permissions": [{"any": true}], "principals": [{"any": true}]});
    let config = json!({"shadow_rules": {"action": "DENY", "policies": {"all": everybody}}});
    let manager = files::http(&[filter("http.rbac.v3.RBAC", &config)], &files::to("upstream"), &json!({}));
    let folder = tempfile::tempdir().unwrap();
    let file =
        bootstrap(&[files::listener("l", &[manager])], &[files::cluster("upstream", echo().await, false)]);
    let program = Program::start(folder.path(), &file).await;
    let mut client = Client::new(TcpStream::connect(program.listener("l").await).await.unwrap());
    for _ in 0..3 {
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert!(client.message().await.0.starts_with("HTTP/1.1 200 "));
    }
    let metrics = program.page("GET", "/stats/prometheus").await;
    for (name, count) in [("shadow_denied", 3), ("shadow_allowed", 0), ("denied", 0)] {
        let line = format!("envoy_http_rbac_{name}{{http_conn_manager_prefix=\"h\"}} {count}\n");
        assert!(metrics.contains(&line), "{name}: {metrics}");
    }
}

#[tokio::test]
async fn no_form_of_a_path_evades_a_policy() {
    let secret = json!({
        "permissions": [{"url_path": {"path": {"prefix": "/secret"}}}],
        "principals": [{"any": true}]
    });
    let config = json!({"rules": {"action": "DENY", "policies": {"secret": secret}}});
    let through = |name: &str, options| {
        let filters = [filter("http.rbac.v3.RBAC", &config)];
        files::listener(name, &[files::http(&filters, &files::to("upstream"), &options)])
    };
    let listeners = [
        through("normal", json!({"normalize_path": true, "merge_slashes": true})),
        through("literal", json!({"normalize_path": false})),
    ];
    let folder = tempfile::tempdir().unwrap();
    let clusters = [files::cluster("upstream", echo().await, false)];
    let program = Program::start(folder.path(), &bootstrap(&listeners, &clusters)).await;
    for (listener, literal) in [("normal", 403), ("literal", 200)] {
        let stream = TcpStream::connect(program.listener(listener).await).await.unwrap();
        let requests = http2::client(stream).await;
        for (path, expected) in [
            ("/secret", 403),
            ("/secret?a=b", 403),
            ("/a/../secret", literal),
            ("/a/%2e%2E/secret", literal),
            ("/./secret", literal),
            ("//secret", literal),
            ("/%73ecret", literal),
            ("/a/secret", 200),
        ] {
            let mut client = Client::new(TcpStream::connect(program.listener(listener).await).await.unwrap());
            client.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
            let head = client.head().await;
            assert!(head.starts_with(&format!("HTTP/1.1 {expected} ")), "{listener} {path}: {head}");
            let (answer, _) = requests.clone().send_request(http2::request("GET", path), true).unwrap();
            assert_eq!(within(answer).await.unwrap().status(), expected, "{listener} {path}");
        }
    }
}
