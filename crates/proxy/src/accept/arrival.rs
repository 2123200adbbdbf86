//! The first steps of a connection: its listener, the PROXY header, the inspection and the filter chain.

use std::{
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use socket2::SockRef;
use tokio::net::TcpStream;
use tracing::debug;

use crate::{
    accept::first_bytes::{self, Inspection},
    call::export,
    overload::{
        drain::ConnectionSet,
        limit_log::{self, Limit},
    },
    tcp::early::{self, EarlyUpstream},
    telemetry::stats::Counter,
    worker::{
        Worker,
        downstream::Origin,
        filter_chain_match::{self, Facts},
        inspect::Findings,
        revalidation::Revalidation,
    },
};
use skysail_http::{socket::Stream, timer::Timer};
use skysail_policy::{
    config::{
        FilterChain, Listener, Snapshot,
        listener::{Inspect, Transport},
    },
    error::{Error, Kind},
    peer::Peer,
    record::{self, Record},
};

/// A connection whose filter chain is not selected yet: its addresses, its listener, and the configuration in effect.
pub(super) struct Arrival {
    pub(super) connections: Rc<ConnectionSet>,
    /// Name of the listener that has the socket.
    entry: Arc<str>,
    snapshot: Rc<Snapshot>,
    /// Epoch of the snapshot.
    epoch: u32,
    pub(super) listener: Arc<Listener>,
    /// Address of the peer of the socket.
    direct: SocketAddr,
    /// Destination before interception.
    dialled: SocketAddr,
    /// Address of the client; the PROXY header may replace it.
    pub(super) source: SocketAddr,
    /// Destination; the PROXY header may replace it.
    pub(super) destination: SocketAddr,
}

/// ALPN protocol of the mutual TLS of sidecars. Source: Istio.
const ISTIO_PROTOCOL: &[u8] = b"istio";

impl Arrival {
    /// Finds the listener. Returns `None` if it no longer exists or the socket has failed.
    pub(super) fn new(
        worker: &Worker,
        connections: Rc<ConnectionSet>,
        entry: Arc<str>,
        tcp: &TcpStream,
        source: SocketAddr,
    ) -> Option<Self> {
        let (snapshot, epoch) = (worker.snapshot(), worker.epoch());
        let pipe = snapshot.listeners.by_name.get(&entry).filter(|listener| listener.pipe.is_some());
        let local = match pipe {
            Some(listener) => *listener.addresses.first()?,
            None => tcp.local_addr().ok()?,
        };
        let (listener, dialled) = find_listener(&snapshot, &entry, tcp, local)?;
        let (direct, destination) = (source, dialled);
        Some(Self { connections, entry, snapshot, epoch, listener, direct, dialled, source, destination })
    }

    /// Reads the PROXY header if the listener expects one. Returns `None` if that failed, which it counts and logs.
    pub(super) async fn read_proxy_header(
        &mut self,
        worker: &Worker,
        stream: &mut Stream,
        timer: &mut Timer,
    ) -> Option<()> {
        let listener = Arc::clone(&self.listener);
        let Some(proxied) = &listener.proxy_protocol else { return Some(()) };
        if proxied.except.iter().any(|ports| ports.contains(&self.destination.port())) {
            return Some(());
        }
        let timeout = listener.inspect_timeout;
        match first_bytes::proxy_header(stream, timer, &self.connections, proxied, timeout).await {
            Ok(None) => Some(()),
            // The PROXY header names another destination, which may have another listener.
            Ok(Some(ends)) => {
                (self.source, self.destination) = (ends.source, ends.destination);
                self.listener = filter_chain_match::listener(&self.snapshot, &listener, self.destination);
                Some(())
            }
            Err(error) => {
                let counters = worker.shard.listener(&listener.name);
                if error.kind() == io::ErrorKind::TimedOut {
                    note_timeout(&counters.pre_cx_timeout, Limit::ProxyHeader, &listener, self.source);
                } else {
                    counters.proxy_errors.inc();
                }
                debug!("a connection from {} on {} is closed: {error}", self.source, listener.name);
                None
            }
        }
    }

    /// Inspects the first bytes. Returns the early connection as well, if the server may send first. Returns `None`
    /// if the inspection failed: it logs every failure, and counts those by timeout.
    ///
    /// TLS is always inspected where the listener says so, because policies, logs and external authorization use the
    /// server name. HTTP is inspected only if a filter chain depends on it.
    pub(super) async fn inspect(
        &self,
        worker: &Rc<Worker>,
        stream: &mut Stream,
        timer: &mut Timer,
    ) -> Option<(Findings, Option<EarlyUpstream>)> {
        let Self { listener, source, destination, .. } = self;
        let applies = |inspect: &Option<Inspect>| {
            let port = destination.port();
            inspect.as_ref().is_some_and(|inspect| !inspect.except.iter().any(|ports| ports.contains(&port)))
        };
        let tls = applies(&listener.inspect_tls);
        let http =
            applies(&listener.inspect_http) && filter_chain_match::needs_findings(listener, *destination);
        let early = (|| self.connect_early(worker), || self.patience());
        let inspection = Inspection::new(stream, timer, &self.connections, listener, early);
        match inspection.run(tls, http).await {
            Ok(inspected) => Some(inspected),
            Err(error) => {
                if error.kind() == io::ErrorKind::TimedOut {
                    let counters = worker.shard.listener(&listener.name);
                    note_timeout(&counters.pre_cx_timeout, Limit::Inspection, listener, *source);
                }
                debug!("inspection of a connection from {source} to {destination} failed: {error}");
                None
            }
        }
    }

    /// Returns the time that the client has to send first.
    fn patience(&self) -> Duration {
        // The protocols of sidecars select the chain of mutual TLS.
        let findings = Findings {
            transport: Some(Transport::Tls),
            protocols: vec![ISTIO_PROTOCOL.into()],
            ..Findings::default()
        };
        let chain = filter_chain_match::select(&self.listener, &self.facts(&findings));
        if chain.is_some_and(|chain| chain.tls.is_some()) {
            early::TLS_CLIENT_FIRST_TIMEOUT
        } else {
            early::CLIENT_FIRST_TIMEOUT
        }
    }

    /// Connects to the server before the client has sent a byte, by the filter chain for plain TCP.
    fn connect_early(&self, worker: &Rc<Worker>) -> Option<EarlyUpstream> {
        let findings = Findings { transport: Some(Transport::RawBuffer), ..Findings::default() };
        let chain = filter_chain_match::select(&self.listener, &self.facts(&findings))?;
        EarlyUpstream::new(worker, self.origin(chain, findings, Peer::plain()))
    }

    /// Selects the filter chain. Without one, counts and logs the connection.
    pub(super) fn select_chain(&self, worker: &Rc<Worker>, findings: &Findings) -> Option<Arc<FilterChain>> {
        let facts = self.facts(findings);
        let chain = filter_chain_match::select(&self.listener, &facts).cloned();
        if chain.is_none() {
            note_unmatched(worker, &self.listener, &facts, self.direct);
        }
        chain
    }

    fn facts<'a>(&self, findings: &'a Findings) -> Facts<'a> {
        Facts { destination: self.destination, source: self.source, findings }
    }

    /// Returns the origin of the requests or bytes of this connection.
    pub(super) fn origin(&self, chain: &Arc<FilterChain>, findings: Findings, peer: Peer) -> Origin {
        Origin {
            source: self.source,
            direct: self.direct,
            begun: Instant::now(),
            dialled: self.dialled,
            destination: self.destination,
            listener: self.listener.clone(),
            chain: chain.clone(),
            peer: Rc::new(peer),
            snapshot: self.snapshot.clone(),
            admission: Revalidation::new(self.epoch),
            findings: Rc::new(findings),
            entry: self.entry.clone(),
            connections: self.connections.clone(),
            limits: Default::default(),
        }
    }
}

/// Returns the listener of a connection, and the destination address.
fn find_listener(
    snapshot: &Snapshot,
    entry: &Arc<str>,
    tcp: &TcpStream,
    local: SocketAddr,
) -> Option<(Arc<Listener>, SocketAddr)> {
    let entry = snapshot.listeners.by_name.get(entry)?;
    let original = if entry.read_original_dst { original_destination(tcp) } else { None };
    let destination = original.unwrap_or(local);
    Some((filter_chain_match::listener(snapshot, entry, destination), destination))
}

/// Returns the destination before interception (`SO_ORIGINAL_DST`).
fn original_destination(tcp: &TcpStream) -> Option<SocketAddr> {
    let socket = SockRef::from(tcp);
    let v6 = tcp.local_addr().is_ok_and(|local| local.is_ipv6());
    let address = if v6 { socket.original_dst_v6() } else { socket.original_dst_v4() };
    address.ok()?.as_socket()
}

/// Counts and logs a connection that no filter chain of its listener matches.
fn note_unmatched(worker: &Rc<Worker>, listener: &Listener, facts: &Facts<'_>, direct: SocketAddr) {
    worker.shard.listener(&listener.name).no_filter_chain.inc();
    debug!("no filter chain of listener {} matches {facts:?}", listener.name);
    let answer = Error::new(Kind::NoFilterChain).response();
    let peer = Peer::plain();
    let mut record = Record::new(listener.direction, SystemTime::now());
    record.flags = answer.flags;
    record.details = &answer.details;
    record.downstream = Some(&peer);
    record.downstream_local = Some(facts.destination);
    record.downstream_remote = Some(facts.source);
    record.downstream_direct = Some(direct);
    record.server_name = facts.findings.server_name.as_deref();
    let context = record::Context { record: &record, request: None, response: None };
    export::log(worker, &listener.access_logs, &context);
}

/// Counts and logs a client that exceeded a time limit.
pub(super) fn note_timeout(counter: &Counter, limit: Limit, listener: &Listener, source: SocketAddr) {
    counter.inc();
    limit_log::log(limit, format_args!("listener {}, client {source}", listener.name));
}
