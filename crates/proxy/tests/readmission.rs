//! Requests that are evaluated again after a change of the configuration. Each filter of the new configuration
//! sees the request as it would have seen it. A change that does not affect a request does not end it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/running.rs"]
mod running;
mod support;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use running::{
    ASK, Running, deny, deny_without, echoes, key_and_token, managed, rules, tokens, web, web_with,
};
use skysail_policy::config::{
    Listener,
    authorization::{AuthorizationService, Body, ExternalAuthorization, Http},
    http::{FilterKind, Format, Part},
    listener::ProxyProtocolFilter,
    lua::{Lua, LuaScript},
    mutation::{HeaderMutation, HeaderMutations, Mutation},
    policy::{Permission, Policy},
    route::{Action, AppendAction, HeaderOp, PathMatch, Rewrite, Route, RouteMatch, Setting},
    text::{MetadataMatch, TextMatch, ValueMatch},
};
use support::{Proxy, cluster, snapshot};

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
    ask_by(fingerprint, None, Some(Body { max_bytes: 100, partial: true, raw: false }))
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
    let checks = || vec![ask(1, None), ask(2, None)];
    let running = Running::start(web(checks())).await;
    for changed in [
        // The first response had changed the head of the second check.
        vec![ask(2, None)],
        vec![ask(2, None), ask(1, None)],
        vec![ask(1, None), ask(2, None), ask(2, None)],
        vec![ask(1, None), ask(3, None)],
    ] {
        running.publish(web(checks())).await;
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
    let checks = |without_body| {
        web_with(vec![ask_with_body(1)], |routes, _| {
            let question = Setting::ExternalAuthorization { extensions: vec![], without_body };
            routes[0].filters = vec![(ASK.into(), question)];
        })
    };
    let running = Running::start(checks(true)).await;
    let mut client = running.websocket("").await;
    running.publish(checks(true)).await;
    echoes(&mut client).await;
    running.publish(checks(false)).await;
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
