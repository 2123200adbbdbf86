//! Tokens of requests that are evaluated again after a change of the configuration.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/running.rs"]
mod running;
mod support;

use running::{
    ASK, Running, deny, deny_if, deny_without, echoes, key_and_token, tokens, tokens_for, web, web_with,
};
use skysail_policy::config::{
    policy::Permission,
    route::Setting,
    text::{MetadataMatch, ValueMatch},
};

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
