//! A proxy whose filters change while requests are open.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{net::SocketAddr, sync::Arc, time::Duration};

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use serde_json::json;
use skysail_policy::config::{
    Cluster, HttpManager, Listener, RouteTable, Snapshot,
    http::{Filter, FilterKind, Routes},
    jwt::{Jwt, JwtProvider, KeySet, Keys, Requirement, Source},
    listener::Terminal,
    policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
    route::{Forward, PathMatch, Route, RouteMatch, VirtualHost},
    text::{HeaderMatch, HeaderTest},
};
use skysail_proxy::overload::Limits;

use crate::support::{Client, Proxy, cluster, http, listener, server, snapshot};

/// Name of the filters.
pub(crate) const ASK: &str = "ask";

/// Starts a server that grants every upgrade and echoes what follows.
pub(crate) async fn echo() -> SocketAddr {
    server(|_, mut client: Client| async move {
        client.head().await;
        let head = "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n";
        client.send(head).await;
        let (mut read, mut write) = client.stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    })
    .await
}

/// Starts an authorization service that allows everything and adds the user's name.
pub(crate) async fn authorizer() -> SocketAddr {
    server(|_, mut client: Client| async move {
        while client.message_if_any().await.is_some() {
            client.send("HTTP/1.1 200 OK\r\nx-user: me\r\ncontent-length: 0\r\n\r\n").await;
        }
    })
    .await
}

pub(crate) fn rules(permission: Permission) -> Option<Rules> {
    let rule = Rule { name: "rule".into(), permissions: vec![permission], principals: vec![Principal::Any] };
    Some(Rules::new(RuleAction::Deny, vec![rule]))
}

pub(crate) fn deny_if(permission: Permission) -> FilterKind {
    let rules = rules(permission);
    FilterKind::Rbac(Arc::new(Policy { rules, shadow: None, shadow_prefix: "".into() }))
}

pub(crate) fn has(header: &str) -> Permission {
    let test = HeaderTest::Present(true);
    Permission::Header(HeaderMatch { name: header.into(), test, invert: false, missing_as_empty: false })
}

/// Denies requests with this header.
pub(crate) fn deny(header: &str) -> FilterKind {
    deny_if(has(header))
}

/// Denies requests without this header.
pub(crate) fn deny_without(header: &str) -> FilterKind {
    deny_if(Permission::Not(Box::new(has(header))))
}

/// Returns an HTTP listener with these filters and changed routes.
pub(crate) fn web_with(
    does: Vec<FilterKind>,
    change: impl FnOnce(&mut Vec<Route>, fn() -> Route),
) -> Listener {
    let named = |does| Filter { name: ASK.into(), disabled: false, kind: does };
    let filters: Vec<_> = does.into_iter().map(named).collect();
    let Terminal::Http(manager) =
        http(|manager: &mut HttpManager, _: &mut Forward| manager.filters = filters)
    else {
        unreachable!("it is HTTP")
    };
    let mut manager = Arc::into_inner(manager).unwrap();
    let mut routes = vec![route()];
    change(&mut routes, route);
    let Routes::Inline(table) = manager.routes else { unreachable!("it is inline") };
    let table = Arc::into_inner(table).unwrap();
    let hosts = table.hosts.into_iter().map(|host| {
        let host = Arc::into_inner(host).unwrap();
        Arc::new(VirtualHost { routes: std::mem::take(&mut routes), ..host })
    });
    let hosts = hosts.collect();
    manager.routes = Routes::Inline(Arc::new(RouteTable { hosts, ..table }));
    listener(Terminal::Http(Arc::new(manager)), None)
}

/// Returns a catch-all route to the upstream.
pub(crate) fn route() -> Route {
    let Terminal::Http(manager) = http(|_, _| ()) else { unreachable!("it is HTTP") };
    let Routes::Inline(table) = Arc::into_inner(manager).unwrap().routes else {
        unreachable!("it is inline")
    };
    let host = Arc::into_inner(table).unwrap().hosts.remove(0);
    Arc::into_inner(host).unwrap().routes.remove(0)
}

pub(crate) fn web(does: Vec<FilterKind>) -> Listener {
    web_with(does, |_, _| ())
}

/// Returns the listener with changed manager settings.
pub(crate) fn managed(mut listener: Listener, change: impl FnOnce(&mut HttpManager)) -> Listener {
    let Terminal::Http(manager) = &mut Arc::get_mut(&mut listener.chains[0]).unwrap().terminal else {
        unreachable!("it is HTTP")
    };
    change(Arc::get_mut(manager).unwrap());
    listener
}

/// Returns a key and a token that it verifies.
pub(crate) fn key_and_token() -> (serde_json::Value, String) {
    use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let (x, y) = pair.der_bytes()[1..].split_at(32);
    let key = json!({"kty": "EC", "crv": "P-256", "x": BASE64.encode(x), "y": BASE64.encode(y)});
    let signing = EncodingKey::from_ec_der(pair.serialized_der());
    let token = encode(&Header::new(Algorithm::ES256), &json!({"iss": "me", "sub": "you"}), &signing);
    (key, token.unwrap())
}

/// Returns a JWT filter with these keys that removes the token and forwards its subject.
pub(crate) fn tokens(keys: &[&serde_json::Value]) -> FilterKind {
    tokens_for(keys, "/", None)
}

/// Returns the same for a path prefix, with the claims in this metadata key.
pub(crate) fn tokens_for(keys: &[&serde_json::Value], path: &str, known: Option<&str>) -> FilterKind {
    let matches = RouteMatch { path: PathMatch::Prefix(path.as_bytes().into()), ..route().matches };
    let text = json!({"keys": keys}).to_string();
    let provider = JwtProvider {
        name: "me".into(),
        issuer: Some("me".into()),
        audiences: vec![],
        keys: Keys::Local(KeySet::parse(text.as_bytes()).unwrap().into()),
        forward: known.is_some(),
        from: vec![Source::Header("authorization".into(), "Bearer ".into())],
        payload_in_metadata: known.map(Into::into),
        header_in_metadata: None,
        spaced_claims: vec![],
        payload_header: None,
        pad_payload_header: false,
        claim_headers: vec![("x-subject".into(), vec!["sub".into()])],
        clock_skew: Duration::from_secs(60),
        clear_route: false,
    };
    FilterKind::Jwt(Box::new(Jwt {
        fingerprint: (text.len() + path.len() + known.map_or(0, |known| 1_000 * known.len())) as u64,
        providers: vec![provider],
        rules: vec![(matches, Requirement::Provider(0, None))],
        named: vec![("there".into(), Requirement::Provider(0, None))],
        bypass_preflight: false,
    }))
}

/// A proxy with one listener that can be replaced.
pub(crate) struct Running {
    pub(crate) proxy: Proxy,
    clusters: Snapshot,
}

impl Running {
    /// Starts a proxy with this listener and a drain time of zero.
    pub(crate) async fn start(listener: Listener) -> Self {
        Self::start_with(listener, echo().await, None).await
    }

    /// Starts a proxy with this listener, a drain time of zero, this server, and a further cluster.
    pub(crate) async fn start_with(listener: Listener, server: SocketAddr, more: Option<Cluster>) -> Self {
        let upstream = cluster(&[server], None);
        let authorizer = Cluster { name: "authorizer".into(), ..cluster(&[authorizer().await], None) };
        let clusters = [upstream, authorizer].into_iter().chain(more).collect();
        let clusters = snapshot(web(vec![]), clusters);
        let limits = Limits { revoked_drain: Duration::ZERO, ..Limits::default() };
        let running = Self { proxy: Proxy::limited(web(vec![]), vec![], limits).await, clusters };
        running.publish(listener).await;
        running
    }

    pub(crate) async fn publish(&self, listener: Listener) {
        self.publish_all(&[Arc::new(listener)]).await;
    }

    pub(crate) async fn publish_all(&self, listeners: &[Arc<Listener>]) {
        let mut snapshot = self.clusters.clone();
        let named = listeners.iter().map(|listener| (listener.name.clone(), listener.clone()));
        Arc::make_mut(&mut snapshot.listeners).by_name = named.collect();
        self.proxy.workers().publish(snapshot).await.unwrap();
    }

    pub(crate) async fn websocket(&self, fields: &str) -> Client {
        self.websocket_at("/", fields).await
    }

    pub(crate) async fn websocket_at(&self, path: &str, fields: &str) -> Client {
        let mut client = self.proxy.connect().await;
        let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n");
        client.send(&format!("{head}{fields}\r\n")).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        echoes(&mut client).await;
        client
    }
}

/// Checks that the tunnel is open. With a drain time of zero, a denied request ends at its next poll.
pub(crate) async fn echoes(client: &mut Client) {
    client.send("ping").await;
    assert_eq!(client.exactly(4).await, "ping");
}
