//! The way of a downstream connection, up to the point where it is HTTP or bytes:
//! accept → original destination → listener → inspect → chain → TLS → authorize.

use std::{
    future::{Future as _, poll_fn},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use socket2::SockRef;
use tokio::net::TcpStream;
use tracing::debug;

use crate::{
    chains::{self, Facts},
    config::{
        FilterChain, Listener, Snapshot,
        listener::{Inspect, Terminal, Transport},
        tls::ServerTls,
    },
    context::{Registered, Worker},
    inspect::{self, Findings, Look},
    peer::Peer,
    policy::{self, Subject, Tally, Verdict},
    serve,
    socket::Stream,
    tcp,
    timer::Timer,
};

/// Most bytes looked at before a connection counts as something unknown.
const MAX_INSPECTED: usize = 64 * 1024;
/// How long the end of a peer is waited for after our own.
const LINGER: Duration = Duration::from_secs(1);

/// A connection from a client, as far as it is known.
pub(crate) struct Downstream {
    pub(crate) stream: Stream,
    pub(crate) timer: Timer,
    /// Where it comes from.
    pub(crate) source: SocketAddr,
    /// Where the client dialled.
    pub(crate) destination: SocketAddr,
    pub(crate) listener: Arc<Listener>,
    pub(crate) chain: Arc<FilterChain>,
    pub(crate) peer: Peer,
    /// The configuration the chain is from.
    pub(crate) snapshot: Rc<Snapshot>,
    findings: Findings,
    /// The listener whose socket it came in by.
    entry: Arc<str>,
    _registered: Registered,
}

/// Serves a connection from its beginning to its end.
pub(crate) async fn serve(worker: Rc<Worker>, entry: Arc<str>, tcp: TcpStream, source: SocketAddr) {
    let registered = worker.register(poll_fn(|cx| Poll::Ready(cx.waker().clone())).await);
    // Boxed: the story of a request is far larger than what waits for a first byte.
    let Some(mut downstream) = Box::pin(begin(&worker, entry, tcp, source, registered)).await else { return };
    let listener = worker.shard.listener(&downstream.listener.name);
    listener.cx_total.inc();
    listener.cx_active.inc();
    match downstream.chain.terminal.clone() {
        Terminal::Http(manager) => Box::pin(serve::run(&worker, &mut downstream, manager)).await,
        Terminal::Tcp(proxy) => Box::pin(tcp::run(&worker, &mut downstream, proxy)).await,
    }
    listener.cx_active.dec();
}

/// Finds out what a connection is. `None`: it has been refused or has failed, which is told on the debug log.
async fn begin(
    worker: &Rc<Worker>,
    entry: Arc<str>,
    tcp: TcpStream,
    source: SocketAddr,
    registered: Registered,
) -> Option<Downstream> {
    let snapshot = worker.snapshot();
    let local = tcp.local_addr().ok()?;
    let (listener, destination) = find_listener(&snapshot, &entry, &tcp, local)?;
    let mut stream = Stream::new(tcp);
    let mut timer = Timer::default();
    let findings = match inspect(&mut stream, &mut timer, &listener, destination).await {
        Ok(findings) => findings,
        Err(error) => {
            debug!("a connection from {source} to {destination} ended before it was known: {error}");
            return None;
        }
    };
    let counters = worker.shard.listener(&listener.name);
    let facts = Facts { destination, source, findings: &findings };
    let Some(chain) = chains::select(&listener, &facts).cloned() else {
        counters.no_filter_chain.inc();
        debug!("no filter chain of {} takes {facts:?}", listener.name);
        return None;
    };
    let mut peer = Peer::plain();
    if let Some(tls) = &chain.tls {
        if let Err(error) = accept_tls(&mut stream, &mut timer, tls, &findings, chain.handshake_timeout).await
        {
            counters.tls_errors.inc();
            debug!("TLS with {source} on {} for {destination} failed: {error}", listener.name);
            return None;
        }
        counters.tls_handshakes.inc();
        peer = stream.peer(worker.shared.principal());
    }
    let mut downstream = Downstream {
        stream,
        timer,
        source,
        destination,
        listener,
        chain,
        peer,
        snapshot,
        findings,
        entry,
        _registered: registered,
    };
    if downstream.is_allowed(worker) { Some(downstream) } else { downstream.close().await }
}

impl Downstream {
    /// The server name that the client asked for.
    pub(crate) fn server_name(&self) -> Option<&str> {
        self.findings.server_name.as_deref()
    }

    /// Whether the chain's policies let the connection pass.
    fn is_allowed(&self, worker: &Worker) -> bool {
        if self.chain.policies.is_empty() {
            return true;
        }
        let subject = Subject {
            head: None,
            peer: &self.peer,
            source: self.source,
            remote: self.source.ip(),
            destination: self.destination,
            server_name: self.server_name(),
        };
        let mut tally = Tally::default();
        let verdict = policy::check(&self.chain.policies, &subject, &mut tally);
        let counters = worker.shard.listener(&self.listener.name);
        counters.rbac_allowed.add(tally.allowed.into());
        counters.rbac_denied.add(tally.denied.into());
        counters.rbac_shadow_allowed.add(tally.shadow_allowed.into());
        counters.rbac_shadow_denied.add(tally.shadow_denied.into());
        match verdict {
            Verdict::Allow => true,
            Verdict::Deny { details, .. } => {
                debug!("{} is refused to connect to {}: {details}", self.source, self.destination);
                false
            }
        }
    }

    /// Follows a newer configuration: the chain that a connection like this gets now. False: there is none, or
    /// one that begins otherwise, so the connection should end.
    pub(crate) fn refresh(&mut self, worker: &Worker) -> bool {
        if worker.is_current(&self.snapshot) {
            return true;
        }
        let snapshot = worker.snapshot();
        let Some(entry) = snapshot.listeners.by_name.get(&self.entry) else { return false };
        let listener = hand_on(&snapshot, entry, self.destination);
        if !Arc::ptr_eq(&listener, &self.listener) {
            let facts =
                Facts { destination: self.destination, source: self.source, findings: &self.findings };
            let Some(chain) = chains::select(&listener, &facts) else { return false };
            if !same_tls(chain.tls.as_ref(), self.chain.tls.as_ref()) {
                return false;
            }
            self.chain = chain.clone();
            self.listener = listener;
        }
        self.snapshot = snapshot;
        self.is_allowed(worker)
    }

    /// Ends the connection in good order: everything is written, then the client's end is waited for, for a
    /// moment, because a close with bytes unread would destroy what the client has not read yet.
    pub(crate) async fn close<T>(&mut self) -> Option<T> {
        let deadline = Some(Instant::now() + LINGER);
        let Self { stream, timer, .. } = self;
        poll_fn(|cx| {
            if timer.poll(cx, deadline).is_ready() {
                return Poll::Ready(());
            }
            match stream.poll_flush(cx) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
            if !matches!(stream.poll_shutdown(cx), Poll::Ready(Ok(()))) {
                return Poll::Ready(());
            }
            loop {
                stream.input.clear();
                match stream.poll_fill(cx) {
                    Poll::Ready(Ok(1..)) => {}
                    Poll::Ready(_) => return Poll::Ready(()),
                    Poll::Pending => return Poll::Pending,
                }
            }
        })
        .await;
        None
    }
}

/// The listener that a connection belongs to, and where its client dialled.
fn find_listener(
    snapshot: &Snapshot,
    entry: &Arc<str>,
    tcp: &TcpStream,
    local: SocketAddr,
) -> Option<(Arc<Listener>, SocketAddr)> {
    let entry = snapshot.listeners.by_name.get(entry)?;
    let original = if entry.read_original_dst { original_destination(tcp) } else { None };
    let destination = original.unwrap_or(local);
    Some((hand_on(snapshot, entry, destination), destination))
}

fn hand_on(snapshot: &Snapshot, entry: &Arc<Listener>, destination: SocketAddr) -> Arc<Listener> {
    let by_address = &snapshot.listeners.by_address;
    let any = match destination {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let found = || {
        let exact = by_address.get(&destination);
        exact.or_else(|| by_address.get(&SocketAddr::new(any, destination.port()))).cloned()
    };
    let target = if entry.use_original_dst { found() } else { None };
    target.unwrap_or_else(|| entry.clone())
}

/// The address that the client dialled before interception changed it (`SO_ORIGINAL_DST`).
fn original_destination(tcp: &TcpStream) -> Option<SocketAddr> {
    let socket = SockRef::from(tcp);
    let v6 = tcp.local_addr().is_ok_and(|local| local.is_ipv6());
    let address = if v6 { socket.original_dst_v6() } else { socket.original_dst_v4() };
    address.ok()?.as_socket()
}

/// Waits for the first bytes, if they could make a difference, and looks at them.
async fn inspect(
    stream: &mut Stream,
    timer: &mut Timer,
    listener: &Listener,
    destination: SocketAddr,
) -> io::Result<Findings> {
    let mut findings = Findings::default();
    let wanted = |inspect: &Option<Inspect>| {
        let port = destination.port();
        inspect.as_ref().is_some_and(|inspect| !inspect.except.iter().any(|ports| ports.contains(&port)))
    };
    if !chains::needs_findings(listener, destination) {
        return Ok(findings);
    }
    let deadline = listener.inspect_timeout.map(|timeout| Instant::now() + timeout);
    type LookAt = fn(&[u8], &mut Findings) -> Look;
    let steps: [(bool, LookAt); 2] =
        [(wanted(&listener.inspect_tls), inspect::tls), (wanted(&listener.inspect_http), inspect::http)];
    for (wanted, look) in steps {
        if !wanted || findings.transport == Some(Transport::Tls) {
            continue;
        }
        loop {
            match look(stream.input.bytes(), &mut findings) {
                Look::Known => break,
                Look::Broken => return Err(io::Error::other("the TLS client hello cannot be read")),
                Look::More if stream.input.len() >= MAX_INSPECTED => break,
                Look::More => {}
            }
            if stream.input.is_full() {
                stream.input.grow(MAX_INSPECTED);
            }
            match fill_until(stream, timer, deadline).await? {
                Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(_) => {}
                None if listener.continue_on_timeout => return Ok(findings),
                None => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }
    Ok(findings)
}

/// Reads more; `None` when the deadline passes first.
async fn fill_until(
    stream: &mut Stream,
    timer: &mut Timer,
    deadline: Option<Instant>,
) -> io::Result<Option<usize>> {
    poll_fn(|cx| {
        if let Poll::Ready(filled) = stream.poll_fill(cx) {
            return Poll::Ready(filled.map(Some));
        }
        timer.poll(cx, deadline).map(|()| Ok(None))
    })
    .await
}

async fn accept_tls(
    stream: &mut Stream,
    timer: &mut Timer,
    tls: &ServerTls,
    findings: &Findings,
    timeout: Option<Duration>,
) -> io::Result<()> {
    let Some(config) = tls.config.load_full() else {
        return Err(io::Error::other("our certificate has not arrived yet"));
    };
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut handshake = std::pin::pin!(stream.accept_tls(without_futile_alpn(config, findings)));
    poll_fn(|cx| {
        if let Poll::Ready(result) = handshake.as_mut().poll(cx) {
            return Poll::Ready(result);
        }
        timer.poll(cx, deadline).map(|()| Err(io::ErrorKind::TimedOut.into()))
    })
    .await
}

/// Where client and chain have no protocol in common, Envoy goes on without one, while rustls would end the handshake.
/// Istio relies on it: its clients offer `istio` for bytes, which chains match on and none of their contexts lists.
fn without_futile_alpn(config: Arc<rustls::ServerConfig>, findings: &Findings) -> Arc<rustls::ServerConfig> {
    let (ours, offered) = (&config.alpn_protocols, &findings.protocols);
    if ours.is_empty()
        || offered.is_empty()
        || offered.iter().any(|one| ours.iter().any(|own| **own == **one))
    {
        return config;
    }
    let mut silent = (*config).clone();
    silent.alpn_protocols.clear();
    Arc::new(silent)
}

fn same_tls(a: Option<&Arc<ServerTls>>, b: Option<&Arc<ServerTls>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b) || Arc::ptr_eq(&a.config, &b.config),
        _ => false,
    }
}
