//! Requests that wait for their virtual host. The test takes the role of the control thread.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/http2.rs"]
mod http2;
mod support;

use std::sync::Arc;

use http2::{content, request};
use skysail_http::map::Map;
use skysail_policy::config::{
    Listener, RouteTable, Snapshot,
    http::Routes,
    listener::Terminal,
    route::{Action, DirectResponse, HeaderOps, PathMatch, Route, RouteMatch, VirtualHost},
};
use skysail_policy::state::{
    Published,
    demand::{Demand, HostRequest, RequestedAuthority},
};
use support::{Client, Proxy, http, listener, within};
use tokio::{net::TcpStream, sync::mpsc};

/// Returns a virtual host that answers with its name.
fn host(name: &str) -> Arc<VirtualHost> {
    let matches = RouteMatch {
        path: PathMatch::Prefix((*b"/").into()),
        case_sensitive: true,
        headers: vec![],
        query: vec![],
        metadata: Box::default(),
        grpc: false,
        fraction: None,
    };
    let route = Route {
        name: name.into(),
        matches,
        action: Action::Direct(DirectResponse { status: 200, body: name.as_bytes().into() }),
        headers: HeaderOps::default(),
        filters: vec![],
        metadata: None,
        decorator: None,
        tracing: None,
        stat_prefix: None,
    };
    Arc::new(VirtualHost {
        name: name.into(),
        routes: vec![route],
        headers: HeaderOps::default(),
        include_attempt_count: false,
        require_tls: false,
        limits: vec![],
        used: Arc::default(),
    })
}

struct Mesh {
    proxy: Proxy,
    demand: Arc<Demand>,
    host_requests: mpsc::UnboundedReceiver<HostRequest>,
    listener: Arc<Listener>,
    /// Set by `outboundTrafficPolicy.unansweredHosts: CATCH_ALL`.
    takes_unanswered: bool,
}

impl Mesh {
    async fn start() -> Self {
        let Terminal::Http(mut manager) = http(|_, _| ()) else { unreachable!("it is HTTP") };
        Arc::get_mut(&mut manager).unwrap().routes = Routes::Named("80".into());
        let proxy = Proxy::start(listener(Terminal::Http(manager), None), vec![]).await;
        let (sender, host_requests) = mpsc::unbounded_channel();
        let demand = Demand { table: "80".into(), known: Published::default(), host_requests: sender };
        let listener = proxy.listener.clone();
        let mesh = Self { proxy, demand: Arc::new(demand), host_requests, listener, takes_unanswered: false };
        mesh.publish(&["here", "*.wild"]).await;
        mesh
    }

    /// Publishes a table with these hosts and a catch-all.
    async fn publish(&self, domains: &[&str]) {
        let mut table = RouteTable {
            name: "80".into(),
            ignore_port: true,
            demand: Some(Arc::clone(&self.demand)),
            takes_unanswered: self.takes_unanswered,
            ..RouteTable::default()
        };
        for (index, domain) in domains.iter().chain(&["*"]).enumerate() {
            table.hosts.push(host(domain));
            assert!(table.put(domain, index));
        }
        let by_name = [("listener".into(), Arc::clone(&self.listener))].into_iter().collect();
        let listeners = skysail_policy::config::Listeners { by_name, by_address: Map::default() };
        let routes = [("80".into(), Arc::new(table))].into_iter().collect();
        let snapshot =
            Snapshot { listeners: Arc::new(listeners), routes: Arc::new(routes), ..Snapshot::default() };
        self.proxy.workers().publish(snapshot).await.unwrap();
    }

    async fn client(&self) -> Client {
        self.proxy.connect().await
    }

    /// Receives the next request for a virtual host.
    async fn host_request(&mut self) -> HostRequest {
        within(self.host_requests.recv()).await.unwrap()
    }

    /// Records an answer of the control plane that no host has the authority, or a timeout.
    fn record_answer(&self, authority: &str, answered: bool) {
        let known = RequestedAuthority { answered, ..RequestedAuthority::default() };
        self.demand.known.store(Arc::new([(authority.into(), known)].into_iter().collect()));
    }
}

/// Returns the number of requests that had to wait.
async fn waited(mesh: &Mesh) -> u64 {
    let metrics = mesh.proxy.metrics().await;
    let line = metrics.lines().find(|line| line.starts_with("skysail_on_demand_requests{")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

async fn send(client: &mut Client, authority: &str) {
    client.send(&format!("GET / HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await;
}

async fn ask(client: &mut Client, authority: &str) -> String {
    send(client, authority).await;
    client.message().await.1
}

#[tokio::test]
async fn a_request_to_a_known_host_makes_no_host_request_and_marks_the_host_as_used() {
    let mut mesh = Mesh::start().await;
    let mut client = mesh.client().await;
    assert_eq!(ask(&mut client, "HERE:80").await, "here");
    assert!(mesh.host_requests.try_recv().is_err());
    assert_eq!(waited(&mesh).await, 0);
}

#[tokio::test]
async fn a_request_waits_for_its_host() {
    let mut mesh = Mesh::start().await;
    let mut clients = [mesh.client().await, mesh.client().await];
    for client in &mut clients {
        send(client, "New:80").await;
    }
    let host_requests = [mesh.host_request().await, mesh.host_request().await];
    assert_eq!(host_requests.each_ref().map(|host_request| &*host_request.authority), ["new"; 2]);
    assert_eq!(ask(&mut mesh.client().await, "here").await, "here", "others do not wait");
    mesh.publish(&["here", "new"]).await;
    for host_request in host_requests {
        host_request.done.send(()).unwrap();
    }
    for client in &mut clients {
        assert_eq!(client.message().await.1, "new");
        assert_eq!(ask(client, "new").await, "new");
    }
    assert!(mesh.host_requests.try_recv().is_err());
    assert_eq!(waited(&mesh).await, 2);
}

#[tokio::test]
async fn an_unknown_authority_uses_the_catch_all_and_is_asked_for_once() {
    let mut mesh = Mesh::start().await;
    let mut client = mesh.client().await;
    send(&mut client, "none").await;
    let host_request = mesh.host_request().await;
    mesh.record_answer("none", true);
    host_request.done.send(()).unwrap();
    assert_eq!(client.message().await.1, "*");
    assert_eq!(ask(&mut client, "none").await, "*");
    assert!(mesh.host_requests.try_recv().is_err());
    // A known wildcard may hide a host that is not known yet.
    send(&mut client, "a.wild").await;
    let host_request = mesh.host_request().await;
    mesh.record_answer("a.wild", true);
    host_request.done.send(()).unwrap();
    assert_eq!(client.message().await.1, "*.wild");
    assert_eq!(ask(&mut client, "a.wild").await, "*.wild");
    assert!(mesh.host_requests.try_recv().is_err());
}

#[tokio::test]
async fn without_an_answer_a_request_is_refused_and_known_hosts_are_served() {
    let mut mesh = Mesh::start().await;
    let mut client = mesh.client().await;
    for (authority, wildcard) in [("new", "*"), ("a.wild", "*.wild")] {
        let refused = async |client: &mut Client| {
            let (head, body) = client.message().await;
            assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
            assert_eq!(body, "no answer from the control plane about this host");
        };
        send(&mut client, authority).await;
        let host_request = mesh.host_request().await;
        mesh.record_answer(authority, false);
        host_request.done.send(()).unwrap();
        refused(&mut client).await;
        // The next request does not wait, and the connection serves others.
        send(&mut client, authority).await;
        refused(&mut client).await;
        assert!(mesh.host_requests.try_recv().is_err());
        assert_eq!(ask(&mut client, "here").await, "here");
        // After the answer, the table decides.
        mesh.record_answer(authority, true);
        assert_eq!(ask(&mut client, authority).await, wildcard);
    }
    // A request that is dropped is no answer: there are too many, or the proxy is shutting down.
    send(&mut client, "lost").await;
    drop(mesh.host_request().await);
    assert!(client.message().await.0.starts_with("HTTP/1.1 503 "));
    let metrics = mesh.proxy.metrics().await;
    assert!(
        metrics.lines().any(|line| line.starts_with("skysail_on_demand_refused{") && line.ends_with(" 5"))
    );
}

#[tokio::test]
async fn without_an_answer_the_catch_all_applies_if_configured() {
    let mut mesh = Mesh::start().await;
    mesh.takes_unanswered = true;
    mesh.publish(&["here"]).await;
    let mut client = mesh.client().await;
    send(&mut client, "new").await;
    let host_request = mesh.host_request().await;
    mesh.record_answer("new", false);
    host_request.done.send(()).unwrap();
    assert_eq!(client.message().await.1, "*");
    assert_eq!(ask(&mut client, "new").await, "*");
    send(&mut client, "lost").await;
    drop(mesh.host_request().await);
    assert_eq!(client.message().await.1, "*");
}

#[tokio::test]
async fn a_disconnected_client_does_not_wait() {
    let mut mesh = Mesh::start().await;
    let mut client = mesh.client().await;
    send(&mut client, "new").await;
    let mut host_request = mesh.host_request().await;
    drop(client);
    within(host_request.done.closed()).await;
}

#[tokio::test]
async fn http2_streams_wait_for_their_own_hosts() {
    let mut mesh = Mesh::start().await;
    let mut requests = http2::client(TcpStream::connect(mesh.proxy.address).await.unwrap()).await;
    let mut of = |authority: &str| {
        let mut request = request("GET", "/");
        *request.uri_mut() = format!("http://{authority}/").parse().unwrap();
        requests.send_request(request, true).unwrap().0
    };
    let (new, here) = (of("new"), of("here"));
    let host_request = mesh.host_request().await;
    let mut body = within(here).await.unwrap().into_body();
    assert_eq!(content(&mut body).await.0, b"here");
    mesh.publish(&["here", "new"]).await;
    host_request.done.send(()).unwrap();
    let mut body = within(new).await.unwrap().into_body();
    assert_eq!(content(&mut body).await.0, b"new");
    let dropped = of("lost");
    drop(mesh.host_request().await);
    assert_eq!(within(dropped).await.unwrap().status(), 503);
}
