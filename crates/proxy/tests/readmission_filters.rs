//! Scripts and external processing in requests that are evaluated again after a change of the configuration.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/files.rs"]
mod files;
#[path = "support/processor.rs"]
mod processor;
#[path = "support/running.rs"]
mod running;
mod support;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use running::{
    ASK, Running, deny, deny_if, echo, echoes, has, key_and_token, managed, tokens_for, web, web_with,
};
use skysail_policy::config::{
    Cluster, Listener,
    cluster::UpstreamProtocol,
    http::FilterKind,
    lua::{Lua, LuaScript},
    policy::Permission,
    processing::{
        BodyMode, ExternalProcessing, MutationRules, ProcessingMode, ProcessorData, ProcessorService,
        RouteReselection,
    },
    route::{Route, RouteMatch, Setting},
    text::{MetadataMatch, ValueMatch},
};
use support::{Client, cluster, server};
use tokio::sync::mpsc;

/// Returns a filter whose script adds `x-route`, after which the route is selected again.
fn script() -> FilterKind {
    let source = "function envoy_on_request(handle) handle:headers():add('x-route', 'other') end".into();
    let script = LuaScript { source, handles_request: true, handles_response: false };
    FilterKind::Lua(Box::new(Lua { default: Some(Arc::new(script)), clear_route: true, ..Lua::default() }))
}

/// Returns external processing of requests with this mode for bodies.
fn process(request_body: BodyMode) -> FilterKind {
    process_by(request_body, None)
}

fn process_by(request_body: BodyMode, observes: Option<Duration>) -> FilterKind {
    let service =
        ProcessorService { cluster: "processor".into(), authority: "processor".into(), metadata: vec![] };
    FilterKind::ExternalProcessing(Arc::new(ExternalProcessing {
        fingerprint: 1,
        service,
        failure_allowed: false,
        status_on_error: 500,
        timeout: Duration::from_secs(30),
        max_timeout: Duration::ZERO,
        mode: ProcessingMode { response_headers: false, request_body, ..ProcessingMode::default() },
        allow_override: false,
        allowed_modes: vec![],
        rules: MutationRules::default(),
        allowed_headers: None,
        disallowed_headers: vec![],
        data: ProcessorData {
            request_attributes: Arc::default(),
            response_attributes: Arc::default(),
            forwarded: vec![],
            received: vec!["own".into()],
        },
        route: RouteReselection::OnRequest,
        allow_immediate: true,
        observes,
    }))
}

/// Starts a processor, and returns its cluster.
async fn processing() -> Option<Cluster> {
    let protocol = UpstreamProtocol::Http2;
    let cluster = cluster(&[processor::start().await], None);
    Some(Cluster { name: "processor".into(), protocol, ..cluster })
}

/// Returns a listener whose routes have policies of their own for requests with a header. The first match wins.
fn by_header(does: Vec<FilterKind>, policies: Vec<(&str, FilterKind)>) -> Listener {
    web_with(does, |routes, route| {
        let own = policies.into_iter().map(|(header, policy)| {
            let FilterKind::Rbac(policy) = policy else { unreachable!("it is a policy") };
            let Permission::Header(wanted) = has(header) else { unreachable!("it tests a header") };
            let matches = RouteMatch { headers: vec![wanted], ..route().matches };
            Route { matches, filters: vec![(ASK.into(), Setting::Rbac(policy))], ..route() }
        });
        routes.splice(0..0, own);
    })
}

/// Denies requests with, or without, this metadata.
fn deny_metadata(namespace: &str, key: &str, is_present: bool) -> FilterKind {
    let path = [namespace.into(), key.into()].into();
    let known = MetadataMatch { path, test: ValueMatch::Present(true), invert: !is_present };
    deny_if(Permission::Metadata(known))
}

/// Checks policies of the route that a filter has selected, for requests with this path.
async fn policies_of_the_selected_route(filter: fn() -> FilterKind, path: &str) {
    let routed = |all: FilterKind, own: FilterKind| by_header(vec![filter(), all], vec![("x-route", own)]);
    let running = Running::start_with(web(vec![]), echo().await, processing().await).await;
    // Only the first route denies the request.
    running.publish(routed(deny_if(Permission::Any), deny("x-other"))).await;
    let mut client = running.websocket_at(path, "").await;
    running.publish(routed(deny_if(Permission::Any), deny("x-another"))).await;
    echoes(&mut client).await;
    // Only the selected route denies the request.
    running.publish(routed(deny("x-other"), deny("x-route"))).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn the_route_that_a_script_has_selected_decides() {
    policies_of_the_selected_route(script, "/").await;
}

#[tokio::test]
async fn the_route_that_a_processor_has_selected_decides() {
    policies_of_the_selected_route(|| process(BodyMode::None), "/reroute").await;
}

/// Nothing depends on the answers of a processor that only observes.
#[tokio::test]
async fn a_processor_that_only_observes_ends_no_request() {
    let observe = || process_by(BodyMode::None, Some(Duration::from_secs(1)));
    let running = Running::start_with(web(vec![]), echo().await, processing().await).await;
    running.publish(web(vec![observe(), deny("x-other")])).await;
    let mut client = running.websocket("").await;
    running.publish(web(vec![observe(), deny("x-another")])).await;
    echoes(&mut client).await;
    running.publish(web(vec![deny("x-another"), observe()])).await;
    echoes(&mut client).await;
    running.publish(web(vec![observe(), deny("upgrade")])).await;
    assert_eq!(client.rest().await, "");
}

/// A server that answers one request after its body has arrived, and sends `ping` on demand.
struct Held {
    address: SocketAddr,
    wanted: mpsc::UnboundedSender<()>,
}

impl Held {
    async fn start() -> Self {
        let (wanted, receiver) = mpsc::unbounded_channel();
        let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
        let address = server(move |_, mut client: Client| {
            let receiver = receiver.clone();
            async move {
                client.until("body").await;
                client.send("HTTP/1.1 200 OK\r\n\r\nbegun").await;
                while receiver.lock().await.recv().await.is_some() {
                    client.send("ping").await;
                }
            }
        });
        Self { address: address.await, wanted }
    }

    /// Begins a request, and waits for the start of its response.
    async fn begin(running: &Running, path: &str, fields: &str) -> Client {
        let mut client = running.proxy.connect().await;
        client
            .send(&format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n{fields}\r\nbody"))
            .await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        client.until("begun\r\n").await;
        client
    }

    /// Checks that the response continues.
    async fn continues(&self, client: &mut Client) {
        self.wanted.send(()).unwrap();
        client.until("ping\r\n").await;
    }
}

/// The processor selects the route with the headers, and changes them again with the body.
#[tokio::test]
async fn later_changes_of_the_head_select_no_route() {
    let held = Held::start().await;
    let routed = |own: FilterKind| {
        let policies = vec![("x-body", deny_if(Permission::Any)), ("x-route", own)];
        by_header(vec![process(BodyMode::Buffered), deny("x-other")], policies)
    };
    let running = Running::start_with(routed(deny("x-other")), held.address, processing().await).await;
    let mut client = Held::begin(&running, "/reroute", "").await;
    running.publish(routed(deny("x-another"))).await;
    held.continues(&mut client).await;
    running.publish(routed(deny("x-body"))).await;
    assert_eq!(client.rest().await, "");
}

#[tokio::test]
async fn all_metadata_of_a_processor_are_kept() {
    let held = Held::start().await;
    let filters = |more: FilterKind| {
        let wants = |key: &str| deny_metadata("own", key, false);
        web(vec![process(BodyMode::Buffered), wants("key"), wants("key-2"), more])
    };
    let running = Running::start_with(filters(deny("x-other")), held.address, processing().await).await;
    let mut client = Held::begin(&running, "/metadata-grows", "").await;
    running.publish(filters(deny("x-another"))).await;
    held.continues(&mut client).await;
    running.publish(filters(deny_metadata("own", "key", true))).await;
    assert_eq!(client.rest().await, "");
}

/// The metadata of a body that is forwarded arrive after all filters of the request have run.
#[tokio::test]
async fn late_metadata_of_a_processor_replace_no_claims() {
    let held = Held::start().await;
    let (key, token) = key_and_token();
    let filters = |more: FilterKind| {
        let named = tokens_for(&[&key], "/", Some("claims"));
        let own = deny_metadata("own", "key-2", true);
        let listener = web(vec![process(BodyMode::Streamed), named, own, more]);
        managed(listener, |manager| manager.processes_responses = true)
    };
    let claims = |is_present| deny_metadata("envoy.filters.http.jwt_authn", "claims", is_present);
    let running = Running::start_with(filters(claims(false)), held.address, processing().await).await;
    let bearer = format!("authorization: Bearer {token}\r\n");
    let mut client = Held::begin(&running, "/metadata-grows", &bearer).await;
    running.publish(filters(deny("x-other"))).await;
    held.continues(&mut client).await;
    running.publish(filters(claims(false))).await;
    held.continues(&mut client).await;
    running.publish(filters(claims(true))).await;
    assert_eq!(client.rest().await, "");
}
