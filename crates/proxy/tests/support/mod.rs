//! A proxy over real sockets with programmatic configuration, and scripted servers.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use skysail_http::http2::Http2Options;
use skysail_policy::{
    config::{
        Cluster, Endpoint, Endpoints, FilterChain, HttpManager, Listener, RouteTable, Snapshot,
        http::{ClientCertDetails, Codec, EscapedSlashes, Routes, ServerHeader, Underscores},
        listener::{ChainMatch, Direction, TcpProxy, Terminal},
        route::{
            Action, Forward, HeaderOps, PathMatch, RetryPolicy, Route, RouteMatch, Targets, VirtualHost,
        },
        tls::{ClientTls, ServerTls},
        trace::RequestIdUse,
    },
    peer::LocalWorkload,
    state::Published,
};
use skysail_proxy::{
    accept::workers::Workers,
    overload::Limits as Taken,
    telemetry::{self, AccessLogger},
    upstream::Dialer,
    worker::Shared,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// A proxy that runs until it is dropped.
pub(crate) struct Proxy {
    pub(crate) workers: Option<Workers>,
    pub(crate) address: SocketAddr,
    pub(crate) local: Arc<LocalWorkload>,
    pub(crate) listener: Arc<Listener>,
}

impl Proxy {
    /// Starts one worker with one listener on a free port.
    pub(crate) async fn start(listener: Listener, clusters: Vec<Cluster>) -> Self {
        Self::limited(listener, clusters, Taken::default()).await
    }

    /// Starts a proxy of a workload with this name.
    pub(crate) async fn called(workload: &str, listener: Listener, clusters: Vec<Cluster>) -> Self {
        Self::make(workload, 1, listener, clusters, Taken::default()).await
    }

    /// Starts a proxy with other worker limits.
    pub(crate) async fn limited(listener: Listener, clusters: Vec<Cluster>, limits: Taken) -> Self {
        Self::with(1, listener, clusters, limits).await
    }

    /// Starts a proxy with `count` workers.
    pub(crate) async fn with(
        count: usize,
        listener: Listener,
        clusters: Vec<Cluster>,
        limits: Taken,
    ) -> Self {
        Self::make("a", count, listener, clusters, limits).await
    }

    async fn make(
        workload: &str,
        count: usize,
        listener: Listener,
        clusters: Vec<Cluster>,
        limits: Taken,
    ) -> Self {
        let name = prost_types::Value { kind: Some(prost_types::value::Kind::StringValue(workload.into())) };
        let metadata = prost_types::Struct { fields: [("WORKLOAD_NAME".to_owned(), name)].into() };
        let local = LocalWorkload::new("sidecar~127.0.0.1~a.b~b.svc.cluster.local", "a.b", &metadata);
        let local = Arc::new(local);
        let shared = Shared {
            snapshot: Arc::new(ArcSwap::default()),
            local: Arc::clone(&local),
            dialer: Dialer::default(),
            limits,
            access_log: Arc::new(AccessLogger::start().unwrap()),
            pressure: Arc::default(),
        };
        let workers = Workers::start(count, shared).unwrap();
        let snapshot = snapshot(listener, clusters);
        let listener = snapshot.listeners.by_name.values().next().cloned().unwrap();
        workers.publish(snapshot).await.unwrap();
        let address = workers.addresses().await[0].2;
        Self { workers: Some(workers), address, local, listener }
    }

    pub(crate) fn workers(&self) -> &Workers {
        self.workers.as_ref().unwrap()
    }

    /// Returns the metrics page.
    pub(crate) async fn metrics(&self) -> String {
        telemetry::collect(self.workers().scrape().await, &self.local, None)
    }

    pub(crate) async fn connect(&self) -> Client {
        Client { stream: TcpStream::connect(self.address).await.unwrap(), unread: Vec::new() }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(workers) = self.workers.take() {
            workers.join();
        }
    }
}

/// A connection of any kind.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// One end of a connection, controlled by a test.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    unread: Vec<u8>,
}

impl Client {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, unread: Vec::new() }
    }

    pub(crate) async fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    /// Reads up to and including `end`.
    pub(crate) async fn until(&mut self, end: &str) -> String {
        let end = end.as_bytes();
        loop {
            if let Some(at) = self.unread.windows(end.len()).position(|window| window == end) {
                let taken = self.unread.drain(..at + end.len()).collect();
                return String::from_utf8(taken).unwrap();
            }
            let mut block = [0; 4096];
            let count = within(self.stream.read(&mut block)).await.unwrap();
            assert_ne!(count, 0, "ended after {:?}", String::from_utf8_lossy(&self.unread));
            self.unread.extend_from_slice(&block[..count]);
        }
    }

    /// Reads a head.
    pub(crate) async fn head(&mut self) -> String {
        self.until("\r\n\r\n").await
    }

    /// Reads a head and a body of its content-length.
    pub(crate) async fn message(&mut self) -> (String, String) {
        let head = self.head().await;
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length = length.map_or(0, |length| length.parse::<usize>().unwrap());
        let body = self.exactly(length).await;
        (head, body)
    }

    /// Reads a message; returns `None` if the connection ends instead.
    pub(crate) async fn message_if_any(&mut self) -> Option<(String, String)> {
        let mut first = [0];
        let there = within(self.stream.peek(&mut first)).await;
        if matches!(there, Ok(1)) { Some(self.message().await) } else { None }
    }

    pub(crate) async fn exactly(&mut self, length: usize) -> String {
        while self.unread.len() < length {
            let mut block = [0; 4096];
            let count = within(self.stream.read(&mut block)).await.unwrap();
            assert_ne!(count, 0, "ended after {:?}", String::from_utf8_lossy(&self.unread));
            self.unread.extend_from_slice(&block[..count]);
        }
        String::from_utf8(self.unread.drain(..length).collect()).unwrap()
    }

    /// Reads to the end of the connection; a reset counts as the end.
    pub(crate) async fn rest(&mut self) -> String {
        String::from_utf8(self.rest_of_bytes().await).unwrap()
    }

    /// Reads the bytes to the end of the connection.
    pub(crate) async fn rest_of_bytes(&mut self) -> Vec<u8> {
        let _ = within(self.stream.read_to_end(&mut self.unread)).await;
        std::mem::take(&mut self.unread)
    }
}

/// Fails after a timeout, so that an error fails the test instead of hanging it.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("nothing happened for 30 s")
}

/// Starts a server that handles every connection with `serve`, which gets its number.
pub(crate) async fn server<F, R>(serve: F) -> SocketAddr
where
    F: Fn(usize, Client) -> R + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for number in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(serve(number, Client::new(stream)));
        }
    });
    address
}

/// Starts a server that answers each request with the connection's number and the request's head.
pub(crate) async fn echo() -> SocketAddr {
    server(|number, mut client| async move {
        loop {
            let mut first = [0];
            if !matches!(client.stream.peek(&mut first).await, Ok(1)) {
                return;
            }
            let (head, body) = client.message().await;
            let answer = format!("{number}\n{head}{body}");
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", answer.len());
            client.send(&(head + &answer)).await;
        }
    })
    .await
}

/// Starts servers that answer each request, or each connection's first line, with their number.
pub(crate) async fn numbered(count: usize) -> Vec<SocketAddr> {
    let mut addresses = Vec::new();
    for number in 0..count {
        let serve = move |_, mut client: Client| async move {
            loop {
                let mut first = [0];
                if !matches!(client.stream.peek(&mut first).await, Ok(1)) {
                    return;
                }
                client.head().await;
                client.send(&format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{number}")).await;
            }
        };
        addresses.push(server(serve).await);
    }
    addresses
}

/// Starts a proxy that sends everything to one server.
pub(crate) async fn proxy_to(upstream: SocketAddr) -> Proxy {
    Proxy::start(listener(http(|_, _| ()), None), vec![cluster(&[upstream], None)]).await
}

pub(crate) fn snapshot(listener: Listener, clusters: Vec<Cluster>) -> Snapshot {
    let mut snapshot = Snapshot::default();
    let listeners = Arc::make_mut(&mut snapshot.listeners);
    listeners.by_name.insert(listener.name.clone(), Arc::new(listener));
    snapshot.clusters = Arc::new(clusters.into_iter().map(|c| (c.name.clone(), Arc::new(c))).collect());
    snapshot
}

pub(crate) fn listener(terminal: Terminal, tls: Option<Arc<ServerTls>>) -> Listener {
    let chain = FilterChain {
        name: "chain".into(),
        matches: ChainMatch::default(),
        tls,
        policies: vec![],
        sni_port: None,
        host_cache: None,
        connection_limits: Vec::new(),
        external_authorization: None,
        metadata_exchange: false,
        terminal,
        handshake_timeout: None,
        fingerprint: None,
    };
    Listener {
        name: "listener".into(),
        addresses: vec!["127.0.0.1:0".parse().unwrap()],
        pipe: None,
        bind: true,
        use_original_dst: false,
        read_original_dst: false,
        proxy_protocol: None,
        inspect_tls: None,
        inspect_http: None,
        inspect_timeout: None,
        continue_on_timeout: false,
        bypass_overload: false,
        ignore_connection_limit: false,
        direction: Direction::Unspecified,
        chains: vec![Arc::new(chain)],
        default_chain: None,
        access_logs: vec![],
    }
}

/// Returns HTTP to the cluster `upstream`.
pub(crate) fn http(change: impl FnOnce(&mut HttpManager, &mut Forward)) -> Terminal {
    let mut forward = Forward {
        targets: Targets::Single("upstream".into()),
        cluster_not_found: 503,
        timeout: None,
        grpc_timeout: None,
        max_duration: None,
        grpc_duration: None,
        idle_timeout: None,
        retry: None,
        rewrite: None,
        host: None,
        append_forwarded_host: false,
        mirrors: vec![],
        upgrades: vec![],
        hash: vec![],
        terminates_connect: false,
        limits: None,
    };
    let mut manager = HttpManager {
        stat_prefix: "test".into(),
        codec: Codec::Auto,
        routes: Routes::Inline(Arc::default()),
        filters: vec![],
        local_replies: Vec::new(),
        processes_responses: false,
        mutates_responses: false,
        stats: Some(Arc::default()),
        metadata_exchange: None,
        istio_alpn: false,
        host_cache: None,
        upgrades: vec!["websocket".into()],
        server: ServerHeader::Overwrite("skysail".into()),
        preserve_request_id: false,
        request_id_in_response: false,
        skip_xff_append: false,
        append_forwarded_port: false,
        generate_request_id: true,
        request_id: RequestIdUse::default(),
        tracing: None,
        client_cert: ClientCertDetails::default(),
        use_remote_address: false,
        xff_trusted_hops: 0,
        internal: vec![],
        normalize_path: true,
        merge_slashes: false,
        escaped_slashes: EscapedSlashes::Keep,
        underscores: Underscores::Allow,
        max_stream_duration: None,
        accept_http10: true,
        default_host: None,
        max_head: 60 * 1024,
        max_headers: 100,
        keep_case: false,
        http2: Http2Options::new(100),
        idle_timeout: None,
        stream_idle_timeout: None,
        max_requests_per_connection: None,
        max_connection_duration: None,
        request_headers_timeout: None,
        request_timeout: None,
        drain_timeout: Duration::from_secs(5),
        access_logs: vec![],
    };
    change(&mut manager, &mut forward);
    manager.routes = Routes::Inline(Arc::new(table(forward)));
    Terminal::Http(Arc::new(manager))
}

fn table(forward: Forward) -> RouteTable {
    let route = Route {
        name: "route".into(),
        matches: RouteMatch {
            path: PathMatch::Prefix((*b"/").into()),
            case_sensitive: true,
            headers: vec![],
            query: vec![],
            metadata: Box::default(),
            grpc: false,
            fraction: None,
        },
        action: Action::Forward(forward),
        headers: HeaderOps::default(),
        filters: vec![],
        metadata: None,
        decorator: None,
        tracing: None,
        stat_prefix: None,
    };
    let host = VirtualHost {
        name: "all".into(),
        routes: vec![route],
        headers: HeaderOps::default(),
        include_attempt_count: true,
        require_tls: false,
        limits: vec![],
        used: Arc::default(),
    };
    RouteTable { name: "table".into(), hosts: vec![Arc::new(host)], any: Some(0), ..RouteTable::default() }
}

/// Returns TCP to the cluster `upstream`.
pub(crate) fn tcp() -> Terminal {
    Terminal::Tcp(Arc::new(TcpProxy {
        stat_prefix: "test".into(),
        targets: Targets::Single("upstream".into()),
        idle_timeout: None,
        max_duration: None,
        hash_source_ip: false,
        tunnel: None,
        stats: Some(Arc::default()),
        access_logs: vec![],
    }))
}

/// Returns the cluster `upstream`.
pub(crate) fn cluster(endpoints: &[SocketAddr], tls: Option<&Arc<ClientTls>>) -> Cluster {
    let endpoint = |address: &SocketAddr| Arc::new(Endpoint::new(*address, tls.cloned()));
    Cluster {
        endpoints: Arc::new(Published::from_pointee(Endpoints::of(endpoints.iter().map(endpoint).collect()))),
        connect_timeout: Duration::from_secs(10),
        tls: tls.cloned(),
        ..Cluster::new("upstream")
    }
}

/// Returns a policy that retries on every condition.
pub(crate) fn retries(retries: u32) -> Arc<RetryPolicy> {
    Arc::new(RetryPolicy {
        on: skysail_policy::config::route::RetryOn {
            gateway_error: true,
            connect_failure: true,
            ..Default::default()
        },
        retries,
        per_try_timeout: None,
        avoid_previous: true,
        host_selection_attempts: 5,
        priority_frequency: 0,
        statuses: vec![],
        answers: vec![],
        requests: vec![],
        backoff_base: Duration::from_millis(1),
        backoff_max: Duration::from_millis(2),
    })
}
