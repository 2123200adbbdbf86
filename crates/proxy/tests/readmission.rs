//! Requests that are evaluated again after a change of the configuration. Each filter of the new configuration
//! sees the request as it would have seen it. A change that does not affect a request does not end it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

mod support;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData as _};
use serde_json::json;
use skysail_policy::config::{
    HttpManager, Listener, RouteTable, Snapshot,
    authorization::{AuthorizationService, Body, ExternalAuthorization, Http},
    http::{Filter, FilterKind, Format, Part, Routes},
    jwt::{Jwt, JwtProvider, KeySet, Keys, Requirement, Source},
    listener::{ProxyProtocolFilter, Terminal},
    lua::{Lua, LuaScript},
    mutation::{HeaderMutation, HeaderMutations, Mutation},
    policy::{Permission, Policy, Principal, Rule, RuleAction, Rules},
    route::{
        Action, AppendAction, Forward, HeaderOp, PathMatch, Rewrite, Route, RouteMatch, Setting, VirtualHost,
    },
    text::{HeaderMatch, HeaderTest, MetadataMatch, TextMatch, ValueMatch},
};
use skysail_proxy::overload::Limits;
use support::{Client, Proxy, cluster, http, listener, server, snapshot};

const ASK: &str = "ask";

/// Starts a server that grants every upgrade and echoes what follows.
async fn echo() -> SocketAddr {
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
async fn authorizer() -> SocketAddr {
    server(|_, mut client: Client| async move {
        while client.message_if_any().await.is_some() {
            client.send("HTTP/1.1 200 OK\r\nx-user: me\r\ncontent-length: 0\r\n\r\n").await;
        }
    })
    .await
}

/// Returns an ext_authz filter for that service with this fingerprint.
fn ask(fingerprint: u64, enabled_metadata: Option<MetadataMatch>) -> FilterKind {
    ask_by(fingerprint, enabled_metadata, None)
}

/// Returns an ext_authz filter whose responses change nothing.
fn ask_nothing(fingerprint: u64) -> FilterKind {
    let FilterKind::ExternalAuthorization(mut config) = ask(fingerprint, None) else {
        unreachable!("it asks")
    };
    let AuthorizationService::Http(service) = &mut config.service else { unreachable!("it asks over HTTP") };
    service.upstream.clear();
    FilterKind::ExternalAuthorization(config)
}

/// Returns an ext_authz filter that sends the body.
fn ask_with_body(fingerprint: u64) -> FilterKind {
    ask_by(fingerprint, None, Some(Body { most: 100, partial: true, raw: false }))
}

fn ask_by(fingerprint: u64, enabled_metadata: Option<MetadataMatch>, body: Option<Body>) -> FilterKind {
    let service = Http {
        path_prefix: "".into(),
        add: vec![],
        upstream: vec![TextMatch::Exact((*b"x-user").into())],
        upstream_appended: vec![],
        client: vec![],
        client_on_success: vec![],
    };
    FilterKind::ExternalAuthorization(Box::new(ExternalAuthorization {
        fingerprint,
        service: AuthorizationService::Http(Box::new(service)),
        cluster: "authorizer".into(),
        authority: "auth.example".into(),
        timeout: Duration::from_secs(30),
        failure_allowed: false,
        failure_marked: false,
        status_on_error: 403,
        body,
        clear_route: false,
        enabled: 1_000_000,
        enabled_metadata,
        allowed_headers: None,
        disallowed_headers: vec![],
        include_certificate: false,
        include_tls_session: false,
    }))
}

fn rules(permission: Permission) -> Option<Rules> {
    let rule = Rule { name: "rule".into(), permissions: vec![permission], principals: vec![Principal::Any] };
    Some(Rules { action: RuleAction::Deny, rules: vec![rule] })
}

fn deny_if(permission: Permission) -> FilterKind {
    let rules = rules(permission);
    FilterKind::Rbac(Arc::new(Policy { rules, shadow: None, shadow_prefix: "".into() }))
}

fn has(header: &str) -> Permission {
    let test = HeaderTest::Present(true);
    Permission::Header(HeaderMatch { name: header.into(), test, invert: false, missing_as_empty: false })
}

/// Denies requests with this header.
fn deny(header: &str) -> FilterKind {
    deny_if(has(header))
}

/// Denies requests without this header.
fn deny_without(header: &str) -> FilterKind {
    deny_if(Permission::Not(Box::new(has(header))))
}

/// Shadow-denies every request, counted with this prefix.
fn would_deny(prefix: &str) -> FilterKind {
    let shadow = rules(Permission::Any);
    FilterKind::Rbac(Arc::new(Policy { rules: None, shadow, shadow_prefix: prefix.into() }))
}

/// Returns a filter whose script adds `x-script` with this value.
fn script(value: &str) -> FilterKind {
    let source =
        format!("function envoy_on_request(handle) handle:headers():add('x-script', '{value}') end").into();
    let script = LuaScript { source, handles_request: true, handles_response: false };
    FilterKind::Lua(Box::new(Lua { default: Some(Arc::new(script)), ..Lua::default() }))
}

/// Returns an HTTP listener with these filters and changed routes.
fn web_with(does: Vec<FilterKind>, change: impl FnOnce(&mut Vec<Route>, fn() -> Route)) -> Listener {
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
fn route() -> Route {
    let Terminal::Http(manager) = http(|_, _| ()) else { unreachable!("it is HTTP") };
    let Routes::Inline(table) = Arc::into_inner(manager).unwrap().routes else {
        unreachable!("it is inline")
    };
    let host = Arc::into_inner(table).unwrap().hosts.remove(0);
    Arc::into_inner(host).unwrap().routes.remove(0)
}

fn web(does: Vec<FilterKind>) -> Listener {
    web_with(does, |_, _| ())
}

/// Returns the listener with changed manager settings.
fn managed(mut listener: Listener, change: impl FnOnce(&mut HttpManager)) -> Listener {
    let Terminal::Http(manager) = &mut Arc::get_mut(&mut listener.chains[0]).unwrap().terminal else {
        unreachable!("it is HTTP")
    };
    change(Arc::get_mut(manager).unwrap());
    listener
}

struct Running {
    proxy: Proxy,
    clusters: Snapshot,
}

impl Running {
    /// Starts a proxy with this listener and a drain time of zero.
    async fn start(listener: Listener) -> Self {
        let upstream = cluster(&[echo().await], None);
        let authorizer = skysail_policy::config::Cluster {
            name: "authorizer".into(),
            ..cluster(&[authorizer().await], None)
        };
        let clusters = snapshot(web(vec![]), vec![upstream, authorizer]);
        let limits = Limits { revoked_drain: Duration::ZERO, ..Limits::default() };
        let running = Self { proxy: Proxy::limited(web(vec![]), vec![], limits).await, clusters };
        running.publish(listener).await;
        running
    }

    async fn publish(&self, listener: Listener) {
        self.publish_all(&[Arc::new(listener)]).await;
    }

    async fn publish_all(&self, listeners: &[Arc<Listener>]) {
        let mut snapshot = self.clusters.clone();
        let named = listeners.iter().map(|listener| (listener.name.clone(), listener.clone()));
        Arc::make_mut(&mut snapshot.listeners).by_name = named.collect();
        self.proxy.workers().publish(snapshot).await.unwrap();
    }

    async fn websocket(&self, fields: &str) -> Client {
        let mut client = self.proxy.connect().await;
        let head = "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n";
        client.send(&format!("{head}{fields}\r\n")).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        echoes(&mut client).await;
        client
    }
}

/// Checks that the tunnel is open. With a drain time of zero, a denied request ends at its next poll.
async fn echoes(client: &mut Client) {
    client.send("ping").await;
    assert_eq!(client.exactly(4).await, "ping");
}

#[tokio::test]
async fn a_policy_sees_the_head_at_its_position() {
    let running = Running::start(web(vec![deny("x-user"), ask(1, None)])).await;
    let mut client = running.websocket("").await;
    running.publish(web(vec![deny("x-user"), ask(1, None), deny("x-other")])).await;
    echoes(&mut client).await;
    running.publish(web(vec![ask(1, None), deny("x-user")])).await;
    assert_eq!(client.rest().await, "");
}

/// Sets a request header. The fingerprint is that of the filter's configuration.
fn set_header(fingerprint: u64, name: &str) -> FilterKind {
    let set = Mutation::Op(HeaderOp::Add {
        name: name.into(),
        value: Format { parts: vec![Part::Text("set".into())] },
        action: AppendAction::Overwrite,
        keep_empty: false,
    });
    let mutations = HeaderMutations { fingerprint, request: vec![set], query: vec![], response: vec![] };
    FilterKind::HeaderMutation(Box::new(HeaderMutation { mutations, most_specific_wins: false }))
}

#[tokio::test]
async fn a_policy_sees_the_headers_that_a_filter_before_it_has_set() {
    let running = Running::start(web(vec![deny("x-other"), set_header(1, "x-role")])).await;
    let mut client = running.websocket("").await;
    for kept in [
        vec![deny("x-role"), set_header(1, "x-role"), deny_without("x-role")],
        vec![deny("x-role"), FilterKind::Buffer(10), set_header(1, "x-role"), deny_without("x-role")],
        vec![deny("x-role")],
    ] {
        running.publish(web(kept)).await;
        echoes(&mut client).await;
    }
    for changed in [
        vec![set_header(1, "x-role"), deny("x-role")],
        // The upstream did not get the header.
        vec![set_header(2, "x-new"), deny("x-other")],
    ] {
        running.publish(web(vec![deny("x-other"), set_header(1, "x-role")])).await;
        let mut client = running.websocket("").await;
        running.publish(web(changed)).await;
        assert_eq!(client.rest().await, "");
    }
}

#[tokio::test]
async fn the_effect_of_a_script_is_kept_and_another_script_ends_the_request() {
    let running = Running::start(web(vec![script("1"), deny("x-other")])).await;
    let mut client = running.websocket("").await;
    running.publish(web(vec![script("1"), deny_without("x-script")])).await;
    echoes(&mut client).await;
    running.publish(web(vec![deny("x-script"), script("1")])).await;
    echoes(&mut client).await;
    running.publish(web(vec![script("2"), deny("x-other")])).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn a_request_ends_if_the_check_request_would_differ() {
    let asked = || vec![ask(1, None), ask(2, None)];
    let running = Running::start(web(asked())).await;
    for changed in [
        // The first response had changed the head of the second check.
        vec![ask(2, None)],
        vec![ask(2, None), ask(1, None)],
        vec![ask(1, None), ask(2, None), ask(2, None)],
        vec![ask(1, None), ask(3, None)],
    ] {
        running.publish(web(asked())).await;
        let mut client = running.websocket("").await;
        running.publish(web(vec![ask(1, None), ask(2, None), deny("x-other")])).await;
        echoes(&mut client).await;
        running.publish(web(changed)).await;
        assert_eq!(client.rest().await, "");
    }
}

/// The proxy adds its own fields after the filters.
#[tokio::test]
async fn fields_that_the_proxy_adds_do_not_change_the_check() {
    let (key, token) = key_and_token();
    let (other, _) = key_and_token();
    let timed = |keys: &[&serde_json::Value], more: Vec<FilterKind>| {
        let mut does = vec![FilterKind::GrpcWeb, tokens(keys), ask_nothing(1)];
        does.extend(more);
        web_with(does, |routes, _| {
            let Action::Forward(forward) = &mut routes[0].action else { unreachable!("it leads on") };
            forward.timeout = Some(Duration::from_secs(15));
        })
    };
    let running = Running::start(timed(&[&key], vec![])).await;
    let mut client = running.websocket(&format!("authorization: Bearer {token}\r\n")).await;
    running.publish(timed(&[&key], vec![deny("x-other")])).await;
    echoes(&mut client).await;
    running.publish(timed(&[&key, &other], vec![deny("x-envoy-expected-rq-timeout-ms")])).await;
    echoes(&mut client).await;
}

#[tokio::test]
async fn a_long_head_does_not_end_with_an_unrelated_change() {
    let listener = Arc::new(web_with(vec![ask(1, None)], |routes, _| {
        let Action::Forward(forward) = &mut routes[0].action else { unreachable!("it leads on") };
        forward.rewrite = Some(Rewrite::Full("/rewritten".into()));
    }));
    let running = Running::start(web(vec![])).await;
    running.publish_all(std::slice::from_ref(&listener)).await;
    let mut client = running.websocket(&format!("x-long: {}\r\n", "a".repeat(40_000))).await;
    let other = |header| Listener { name: "other".into(), bind: false, ..web(vec![deny(header)]) };
    for header in ["x-a", "x-b"] {
        running.publish_all(&[listener.clone(), Arc::new(other(header))]).await;
        echoes(&mut client).await;
    }
}

#[tokio::test]
async fn the_body_is_part_of_the_check() {
    let asked = |without_body| {
        web_with(vec![ask_with_body(1)], |routes, _| {
            let question = Setting::ExternalAuthorization { extensions: vec![], without_body };
            routes[0].filters = vec![(ASK.into(), question)];
        })
    };
    let running = Running::start(asked(true)).await;
    let mut client = running.websocket("").await;
    running.publish(asked(true)).await;
    echoes(&mut client).await;
    running.publish(asked(false)).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn a_filter_that_is_enabled_again_checks_the_request() {
    let disabled = || managed(web(vec![ask(1, None)]), |manager| manager.filters[0].disabled = true);
    let running = Running::start(disabled()).await;
    let mut client = running.websocket("").await;
    running.publish(disabled()).await;
    echoes(&mut client).await;
    running.publish(web(vec![ask(1, None)])).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn a_request_ends_if_filters_would_read_it_differently() {
    let merging = |does| managed(web(does), |manager| manager.merge_slashes = true);
    let running = Running::start(web(vec![])).await;
    let mut client = running.websocket("").await;
    // No filter evaluates it.
    running.publish(merging(vec![])).await;
    echoes(&mut client).await;
    running.publish(web(vec![deny("x-other")])).await;
    echoes(&mut client).await;
    running.publish(merging(vec![deny("x-other")])).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn a_request_with_too_much_recorded_state_ends_with_a_change() {
    let added = |does| {
        web_with(does, |routes, _| {
            let Action::Forward(forward) = &mut routes[0].action else { unreachable!("it leads on") };
            forward.rewrite = Some(Rewrite::Full("/rewritten".into()));
        })
    };
    let running = Running::start(added(vec![])).await;
    let long = format!("x-long: {}\r\n", "a".repeat(40_000));
    let mut once = running.websocket(&long).await;
    running.publish(added(vec![ask(1, None), deny("x-other")])).await;
    assert_eq!(once.rest().await, "", "it has not been asked about");
    let (mut short, mut twice) = (running.websocket("").await, running.websocket(&long).await);
    running.publish(added(vec![ask(1, None), deny("x-another")])).await;
    echoes(&mut short).await;
    assert_eq!(twice.rest().await, "");
    running.publish(added(vec![deny("x-other")])).await;
    let mut once = running.websocket(&long).await;
    running.publish(added(vec![deny("x-another")])).await;
    echoes(&mut once).await;
}

#[tokio::test]
async fn a_route_for_a_fraction_of_requests_is_not_selected_by_chance_again() {
    let changed = |more: Vec<FilterKind>| {
        let mut does = vec![ask(1, None)];
        does.extend(more);
        web_with(does, |routes, route| {
            let unasked = RouteMatch { fraction: Some(500_000), ..route().matches };
            let filters = vec![(ASK.into(), Setting::Off)];
            routes.insert(0, Route { matches: unasked, filters, ..route() });
        })
    };
    let running = Running::start(changed(vec![])).await;
    let mut clients = Vec::new();
    for _ in 0..16 {
        clients.push(running.websocket("").await);
    }
    for header in ["x-a", "x-b", "x-c"] {
        running.publish(changed(vec![deny(header)])).await;
        for client in &mut clients {
            echoes(client).await;
        }
    }
}

#[tokio::test]
async fn a_removed_route_adds_no_requirements() {
    let running = Running::start(web_with(vec![ask(1, None)], |routes, _| {
        routes[0].filters = vec![(ASK.into(), Setting::Off)];
    }))
    .await;
    let mut client = running.websocket("").await;
    running
        .publish(web_with(vec![ask(1, None)], |routes, route| {
            let matches = RouteMatch { path: PathMatch::Exact((*b"/other").into()), ..route().matches };
            routes[0] = Route { matches, ..route() };
        }))
        .await;
    echoes(&mut client).await;
    // An existing route that requires the check does.
    running.publish(web(vec![ask(1, None)])).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn a_check_because_of_metadata_counts_as_done() {
    let wanted = |prefix: &str| {
        let path = ["envoy.filters.http.rbac".into(), format!("{prefix}shadow_engine_result").into()];
        let test = ValueMatch::Text(TextMatch::Exact((*b"denied").into()));
        Some(MetadataMatch { path: path.into(), test, invert: false })
    };
    let filters = |more: Vec<FilterKind>| {
        let mut does = vec![would_deny("a_"), ask(1, wanted("a_")), would_deny("b_"), ask(2, wanted("c_"))];
        does.extend(more);
        web(does)
    };
    let running = Running::start(filters(vec![])).await;
    let mut client = running.websocket("").await;
    running.publish(filters(vec![deny("x-other")])).await;
    echoes(&mut client).await;
    // The response of a service that would no longer be asked is not used.
    running.publish(web(vec![ask(1, wanted("a_")), deny_without("x-user")])).await;
    assert_eq!(client.rest().await, "");
    running.publish(filters(vec![])).await;
    let mut client = running.websocket("").await;
    // The request was not checked, and would be now.
    running
        .publish(web(vec![would_deny("a_"), ask(1, wanted("a_")), would_deny("c_"), ask(2, wanted("c_"))]))
        .await;
    assert_eq!(client.rest().await, "");
}

/// Returns a key and a token that it verifies.
fn key_and_token() -> (serde_json::Value, String) {
    use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
    let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let (x, y) = pair.der_bytes()[1..].split_at(32);
    let key = json!({"kty": "EC", "crv": "P-256", "x": BASE64.encode(x), "y": BASE64.encode(y)});
    let signing = EncodingKey::from_ec_der(pair.serialized_der());
    let token = encode(&Header::new(Algorithm::ES256), &json!({"iss": "me", "sub": "you"}), &signing);
    (key, token.unwrap())
}

/// Returns a JWT filter with these keys that removes the token and forwards its subject.
fn tokens(keys: &[&serde_json::Value]) -> FilterKind {
    tokens_for(keys, "/", None)
}

/// Returns the same for a path prefix, with the claims in this metadata key.
fn tokens_for(keys: &[&serde_json::Value], path: &str, known: Option<&str>) -> FilterKind {
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

#[tokio::test]
async fn tokens_are_verified_again_with_other_keys() {
    let ((first, token), (second, _)) = (key_and_token(), key_and_token());
    let running = Running::start(web(vec![tokens(&[&first]), deny("x-other")])).await;
    let bearer = format!("authorization: Bearer {token}\r\n");
    let mut client = running.websocket(&bearer).await;
    // A policy behind the filter sees no token, and only the subject of the token.
    running.publish(web(vec![tokens(&[&first]), deny("authorization")])).await;
    echoes(&mut client).await;
    running.publish(web(vec![tokens(&[&first, &second]), deny("authorization")])).await;
    echoes(&mut client).await;
    running.publish(web(vec![tokens(&[&first, &second]), deny("x-subject")])).await;
    assert_eq!(client.rest().await, "");
    running.publish(web(vec![tokens(&[&first, &second])])).await;
    let mut client = running.websocket(&bearer).await;
    running.publish(web(vec![tokens(&[&second])])).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn client_fields_for_claims_are_not_trusted() {
    let (key, _) = key_and_token();
    let running = Running::start(web(vec![])).await;
    let mut client = running.websocket("x-subject: me\r\n").await;
    running.publish(web(vec![deny_without("x-subject")])).await;
    echoes(&mut client).await;
    // The filter requires no token of it, but removes the field.
    running.publish(web(vec![tokens_for(&[&key], "/other", None), deny_without("x-subject")])).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn claims_are_known_by_the_filter_that_found_them() {
    let (key, token) = key_and_token();
    let named = |name: &str| tokens_for(&[&key], "/", Some(name));
    let deny_unknown = || {
        let path = ["envoy.filters.http.jwt_authn".into(), "three".into(), "sub".into()];
        let known = MetadataMatch { path: path.into(), test: ValueMatch::Present(true), invert: false };
        deny_if(Permission::Not(Box::new(Permission::Metadata(known))))
    };
    let running = Running::start(web(vec![named("1"), named("three"), deny_unknown()])).await;
    let bearer = format!("authorization: Bearer {token}\r\n");
    for changed in [vec![named("1"), deny_unknown()], vec![named("1"), deny_unknown(), named("three")]] {
        running.publish(web(vec![named("1"), named("three"), deny_unknown()])).await;
        let mut client = running.websocket(&bearer).await;
        running.publish(web(vec![named("1"), named("three"), deny("x-other"), deny_unknown()])).await;
        echoes(&mut client).await;
        running.publish(web(changed)).await;
        assert_eq!(client.rest().await, "");
    }
}

/// Routes and listeners are updated separately.
#[tokio::test]
async fn a_route_with_an_unknown_requirement_admits_no_request() {
    let (key, token) = key_and_token();
    let named = |name: &'static str| {
        let key = key.clone();
        web_with(vec![tokens(&[&key])], move |routes, _| {
            routes[0].filters = vec![(ASK.into(), Setting::Jwt(name.into()))];
        })
    };
    let running = Running::start(named("there")).await;
    let bearer = format!("authorization: Bearer {token}\r\n");
    let mut client = running.websocket(&bearer).await;
    running.publish(named("gone")).await;
    assert_eq!(client.rest().await, "");
    let mut client = running.proxy.connect().await;
    client.send(&format!("GET / HTTP/1.1\r\nhost: a\r\n{bearer}\r\n")).await;
    let (head, body) = client.message().await;
    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    // Envoy's message.
    let problem = "Wrong requirement_name: gone. It should be one of [there]";
    assert_eq!(body, format!("Failed JWT authentication: {problem}"));
}

/// The PROXY protocol contains another destination than the address of the connection's listener.
#[tokio::test]
async fn a_proxied_connection_keeps_its_listener() {
    let proxy = Proxy::start(web(vec![]), vec![]).await;
    let clusters = snapshot(web(vec![]), vec![cluster(&support::numbered(1).await, None)]);
    let publish = async |other_port: u16| {
        let by_address = |name: &str, address: SocketAddr, does| Listener {
            name: name.into(),
            addresses: vec![address],
            bind: false,
            ..web(does)
        };
        let proxied = Some(ProxyProtocolFilter { except: vec![], optional: false, refused: vec![] });
        let found = by_address("found", proxy.address, vec![deny("x-denied")]);
        let listeners = [
            Listener { use_original_dst: true, ..web(vec![]) },
            Listener { proxy_protocol: proxied, ..found },
            by_address("named", SocketAddr::from(([10, 9, 9, 9], 99)), vec![]),
            by_address("other", SocketAddr::from(([10, 9, 9, 9], other_port)), vec![]),
        ];
        let mut snapshot = clusters.clone();
        let all = Arc::make_mut(&mut snapshot.listeners);
        for listener in listeners.map(Arc::new) {
            for address in listener.addresses.iter().filter(|_| !listener.bind) {
                all.by_address.insert(*address, listener.clone());
            }
            all.by_name.insert(listener.name.clone(), listener);
        }
        proxy.workers().publish(snapshot).await.unwrap();
    };
    publish(1).await;
    let mut client = proxy.connect().await;
    client.send("PROXY TCP4 127.0.0.1 10.9.9.9 1000 99\r\n").await;
    let mut ask = async |fields: &str| {
        client.send(&format!("GET / HTTP/1.1\r\nhost: a\r\n{fields}\r\n")).await;
        client.message().await.0[9..12].to_owned()
    };
    for other_port in [1, 2, 3] {
        publish(other_port).await;
        assert_eq!(ask("").await, "200");
        assert_eq!(ask("x-denied: 1\r\n").await, "403");
    }
}
