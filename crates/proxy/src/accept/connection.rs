//! The steps of a downstream connection up to HTTP or the TCP proxy:
//! accept → original destination → listener → inspect → filter chain → TLS → authorize.
//!
//! While a client sends nothing and its first bytes select the filter chain, the proxy connects to its server, which
//! may send first ([`EarlyUpstream`]).

use std::{
    future::{Future as _, poll_fn},
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    task::{Poll, ready},
    time::{Duration, Instant, SystemTime},
};

use socket2::SockRef;
use tokio::net::TcpStream;
use tracing::{debug, warn};

use crate::{
    accept::connection_limit,
    call::export,
    overload::{
        drain::{ConnectionSet, Registered},
        limit_log::{self, Limit},
    },
    request::{authorization, serve},
    tcp::{
        self,
        early::{self, EarlyUpstream},
    },
    telemetry::stats::{Counter, ListenerStats},
    worker::{
        Worker,
        downstream::{self, Accepted, Origin},
        filter_chain_match::{self, Facts},
        inspect::{self, Findings},
        revalidation::Revalidation,
    },
};
use skysail_http::{
    proxy_protocol::{self, Addresses, ParsedHeader},
    socket::Stream,
    timer::{Timer, earlier},
};
use skysail_policy::{
    config::{
        FilterChain, Listener, Snapshot,
        listener::{Inspect, ProxyProtocolFilter, Terminal, Transport},
        tls::ServerTls,
    },
    error::{Error, Kind},
    matching,
    peer::Peer,
    record::{self, Record},
};

/// Maximum number of bytes that are inspected.
const MAX_INSPECTED: usize = 64 * 1024;
/// Maximum number of reads for the inspection. The largest client hello and the largest header of the PROXY protocol
/// take a quarter of them, if each read returns a segment of the smallest usual size.
const MAX_READS: u32 = 512;

/// Serves a connection from its beginning to its end.
pub(crate) async fn serve(
    worker: Rc<Worker>,
    connections: Rc<ConnectionSet>,
    entry: Arc<str>,
    tcp: TcpStream,
    source: SocketAddr,
) {
    let registered = connections.register(poll_fn(|cx| Poll::Ready(cx.waker().clone())).await);
    let (begins, _) = worker.overload.begin(Instant::now());
    // Boxed: this future is much larger than the task of a connection that is idle.
    let Some((connection, early, _counted)) =
        Box::pin(begin(&worker, (connections, registered), entry, tcp, source)).await
    else {
        return;
    };
    drop(begins);
    let listener = worker.shard.listener(&connection.origin.listener.name);
    listener.cx_total.inc();
    listener.cx_active.inc();
    match connection.origin.chain.terminal.clone() {
        Terminal::Http(manager) => serve::run(&worker, connection, manager).await,
        Terminal::Tcp(proxy) => Box::pin(tcp::run(&worker, *connection, early, proxy)).await,
    }
    listener.cx_active.dec();
}

/// A connection with its filter chain, the early connection to its server, and its place in the connection limits.
type Begun = (Box<Accepted>, Option<Box<EarlyUpstream>>, Option<Box<connection_limit::Counted>>);

/// Runs the steps up to the filter chain. Returns `None` for a connection that was refused or has failed; the debug log
/// has the reason.
async fn begin(
    worker: &Rc<Worker>,
    (connections, registered): (Rc<ConnectionSet>, Registered),
    entry: Arc<str>,
    tcp: TcpStream,
    source: SocketAddr,
) -> Option<Begun> {
    let (snapshot, epoch) = (worker.snapshot(), worker.epoch());
    let local = tcp.local_addr().ok()?;
    let (mut listener, dialled) = find_listener(&snapshot, &entry, &tcp, local)?;
    let (direct, mut source, mut destination) = (source, source, dialled);
    let mut stream = Box::new(Stream::new(tcp));
    let mut timer = Timer::default();
    if let Some(proxied) = &listener.proxy_protocol
        && !proxied.except.iter().any(|ports| ports.contains(&destination.port()))
    {
        match proxy_header(&mut stream, &mut timer, &connections, proxied, listener.inspect_timeout).await {
            Ok(None) => {}
            // The PROXY header names another destination, which may have another listener.
            Ok(Some(ends)) => {
                (source, destination) = (ends.source, ends.destination);
                listener = filter_chain_match::listener(&snapshot, &listener, destination);
            }
            Err(error) => {
                let counters = worker.shard.listener(&listener.name);
                if error.kind() == io::ErrorKind::TimedOut {
                    note_timeout(&counters.pre_cx_timeout, Limit::Inspection, &listener, source);
                } else {
                    counters.proxy_errors.inc();
                }
                debug!("a connection from {source} on {} is closed: {error}", listener.name);
                return None;
            }
        }
    }
    let origin =
        |listener: &Arc<Listener>, chain: &Arc<FilterChain>, findings: Findings, peer: Peer| Origin {
            source,
            direct,
            dialled,
            destination,
            listener: listener.clone(),
            chain: chain.clone(),
            peer: Rc::new(peer),
            snapshot: snapshot.clone(),
            admission: Revalidation::new(epoch),
            findings: Rc::new(findings),
            entry: entry.clone(),
            connections: connections.clone(),
            limits: Default::default(),
        };
    let dial = || {
        let findings = Findings { transport: Some(Transport::RawBuffer), ..Findings::default() };
        let chain =
            filter_chain_match::select(&listener, &Facts { destination, source, findings: &findings })?;
        EarlyUpstream::new(worker, origin(&listener, chain, findings, Peer::plain()))
    };
    let mut early = None;
    let inspected = inspect(&mut stream, &mut timer, &connections, &listener, destination, dial, &mut early);
    let findings = match inspected.await {
        Ok(findings) => findings,
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                let counters = worker.shard.listener(&listener.name);
                note_timeout(&counters.pre_cx_timeout, Limit::Inspection, &listener, source);
            }
            debug!("inspection of a connection from {source} to {destination} failed: {error}");
            return None;
        }
    };
    let counters = worker.shard.listener(&listener.name);
    let facts = Facts { destination, source, findings: &findings };
    let Some(chain) = filter_chain_match::select(&listener, &facts).cloned() else {
        note_unmatched(worker, &listener, &facts, direct);
        return None;
    };
    // A client may have closed its connection while the worker was busy. On plain TCP the end may be a half-close.
    let half_closes = chain.tls.is_none() && matches!(chain.terminal, Terminal::Tcp(_));
    if worker.overload.is_busy() && !half_closes && stream.has_ended() {
        debug!("a connection from {source} to {destination} ended before it was served");
        return None;
    }
    let counted = match &chain.connection_limits[..] {
        [] => None,
        limits => {
            let admitted = connection_limit::admit(worker, limits, &mut timer, &connections);
            Some(Box::new(Box::pin(admitted).await?))
        }
    };
    if let Some(tls) = &chain.tls {
        terminate_tls((&mut stream, &mut timer), tls, &chain, (&listener, &counters), &facts).await?;
    }
    let peer = Peer::of(stream.agreed(), worker.shared.dialer.principal());
    let mut origin = Rc::new(origin(&listener, &chain, findings, peer));
    if !is_admitted(&mut origin, worker).await {
        stream.close(&mut timer).await;
        return None;
    }
    let early = early.filter(|early: &EarlyUpstream| early.is_for(&origin.chain)).map(Box::new);
    // Boxed: futures reserve memory for all their parameters.
    Some((Box::new(Accepted { stream, timer, origin, registered }), early, counted))
}

/// Terminates TLS. Returns `None` if the handshake has failed, which it counts and logs.
async fn terminate_tls(
    (stream, timer): (&mut Stream, &mut Timer),
    tls: &ServerTls,
    chain: &FilterChain,
    (listener, counters): (&Listener, &ListenerStats),
    facts: &Facts<'_>,
) -> Option<()> {
    let Facts { source, destination, findings } = *facts;
    match accept_tls(stream, timer, tls, findings, chain.handshake_timeout).await {
        Ok(resumed) => {
            counters.tls_handshakes.inc();
            counters.tls_resumed.add(resumed.into());
            Some(())
        }
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                note_timeout(&counters.tls_timeout, Limit::Handshake, listener, source);
            } else {
                counters.tls_errors.inc();
            }
            debug!("TLS with {source} on {} for {destination} failed: {error}", listener.name);
            None
        }
    }
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

/// Returns whether the configuration in force admits the connection. The configuration may have changed while
/// the client was silent.
async fn is_admitted(origin: &mut Rc<Origin>, worker: &Rc<Worker>) -> bool {
    if downstream::refresh(origin, worker).is_err() {
        origin.note_revoked(worker);
        return false;
    }
    is_allowed(origin, worker).await
}

/// Returns whether the policies of the filter chain and its external authorization allow the connection.
async fn is_allowed(origin: &Origin, worker: &Rc<Worker>) -> bool {
    let Some(found) = origin.apply_policies(worker) else { return false };
    let Some(config) = origin.chain.ask.as_deref() else { return true };
    let metadata = downstream::metadata(found);
    if config.enabled_metadata.as_ref().is_some_and(|test| !matching::metadata(test, Some(&metadata))) {
        return true;
    }
    let asked = authorization::check_connection(worker, &origin.snapshot, config, origin);
    Box::pin(asked).await.unwrap_or_else(|error| {
        warn!("external authorization by cluster {} failed: {error}", config.cluster);
        config.failure_allowed
    })
}

/// Counts and logs a client that exceeded a time limit.
fn note_timeout(counter: &Counter, limit: Limit, listener: &Listener, source: SocketAddr) {
    counter.inc();
    limit_log::log(limit, format_args!("listener {}, client {source}", listener.name));
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

/// Reads the PROXY header and removes it from the input. Returns `None` without a header, or for one without addresses.
async fn proxy_header(
    stream: &mut Stream,
    timer: &mut Timer,
    connections: &ConnectionSet,
    proxied: &ProxyProtocolFilter,
    timeout: Option<Duration>,
) -> io::Result<Option<Addresses>> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    for _ in 0..MAX_READS {
        match proxy_protocol::parse(stream.input.bytes()) {
            ParsedHeader::Complete(version, _, _) if proxied.refused.contains(&version) => {
                return Err(io::Error::other(format!(
                    "version {version:?} of the PROXY protocol is refused"
                )));
            }
            ParsedHeader::Complete(_, length, ends) => {
                stream.input.consume(length);
                return Ok(ends);
            }
            ParsedHeader::Absent if proxied.optional => return Ok(None),
            ParsedHeader::Absent => return Err(io::Error::other("the PROXY header is missing")),
            ParsedHeader::Invalid => return Err(io::Error::other("the PROXY header is malformed")),
            ParsedHeader::Incomplete => {}
        }
        if stream.input.is_full() {
            stream.input.grow(proxy_protocol::MAX);
        }
        match fill_until(stream, timer, connections, deadline).await? {
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(_) => {}
            None => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
    Err(io::Error::other(format!("the PROXY header is incomplete after {MAX_READS} reads")))
}

/// Waits for the first bytes and inspects them. TLS is always inspected where the listener says so, because policies,
/// logs and external authorization use the server name; HTTP only if a filter chain depends on it. While the client
/// sends nothing, `dial` connects to a server that may send first, and `early` holds that connection.
async fn inspect(
    stream: &mut Stream,
    timer: &mut Timer,
    connections: &ConnectionSet,
    listener: &Listener,
    destination: SocketAddr,
    dial: impl FnOnce() -> Option<EarlyUpstream>,
    early: &mut Option<EarlyUpstream>,
) -> io::Result<Findings> {
    let (mut dial, mut quiet) = (Some(dial), None);
    let mut findings = Findings::default();
    let wanted = |inspect: &Option<Inspect>| {
        let port = destination.port();
        inspect.as_ref().is_some_and(|inspect| !inspect.except.iter().any(|ports| ports.contains(&port)))
    };
    let deadline = listener.inspect_timeout.map(|timeout| Instant::now() + timeout);
    let http = wanted(&listener.inspect_http) && filter_chain_match::needs_findings(listener, destination);
    let (mut look_for_tls, mut look_for_http) =
        (inspect::TlsInspector::default(), inspect::HttpInspector::default());
    let mut reads = 0;
    for (step, wanted) in [wanted(&listener.inspect_tls), http].into_iter().enumerate() {
        if !wanted || findings.transport == Some(Transport::Tls) {
            continue;
        }
        loop {
            let (bytes, last) =
                (stream.input.bytes(), stream.input.len() >= MAX_INSPECTED || reads >= MAX_READS);
            let looked = match step {
                0 => look_for_tls.look(bytes, last, &mut findings),
                _ => look_for_http.look(bytes, last, &mut findings),
            };
            match looked {
                inspect::Look::Known => break,
                inspect::Look::Broken => {
                    return Err(io::Error::other(format!(
                        "the TLS client hello is malformed ({} bytes in {reads} reads)",
                        bytes.len()
                    )));
                }
                inspect::Look::More if stream.input.is_empty() => {}
                // The client has sent first.
                inspect::Look::More => *early = None,
            }
            if stream.input.is_full() {
                stream.input.grow(MAX_INSPECTED);
            }
            let mut idle_drain_end = None;
            let first = poll_fn(|cx| {
                loop {
                    if let Poll::Ready(filled) = stream.poll_fill(cx) {
                        return Poll::Ready(filled.map(FirstSender::Client));
                    }
                    let is_silent = stream.input.is_empty();
                    if is_silent && early.as_mut().is_some_and(|early| early.poll(cx).is_ready()) {
                        return Poll::Ready(Ok(FirstSender::Server));
                    }
                    let due = match &early {
                        _ if !is_silent => None,
                        Some(early) => early.due(),
                        None if dial.is_none() => None,
                        None => {
                            Some(*quiet.get_or_insert_with(|| Instant::now() + early::CLIENT_FIRST_TIMEOUT))
                        }
                    };
                    // A drain does not wait for a silent client that has no server.
                    if is_silent && dial.is_none() && early.is_none() && idle_drain_end.is_none() {
                        idle_drain_end = connections.idle_drain().map(|time| Instant::now() + time);
                    }
                    let last = earlier(deadline, idle_drain_end);
                    ready!(timer.poll(cx, earlier(last, due)));
                    if last.is_some_and(|last| Instant::now() >= last) {
                        return Poll::Ready(Ok(FirstSender::Neither));
                    }
                    if let Some(dial) = dial.take() {
                        *early = dial();
                    }
                }
            });
            match first.await? {
                FirstSender::Client(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                FirstSender::Client(_) => reads += 1,
                FirstSender::Server => {
                    findings.transport = Some(Transport::RawBuffer);
                    return Ok(findings);
                }
                FirstSender::Neither if listener.continue_on_timeout => return Ok(findings),
                FirstSender::Neither => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }
    Ok(findings)
}

/// The peer that sends first.
enum FirstSender {
    /// The client: the number of bytes, or 0 at the end of the connection.
    Client(usize),
    Server,
    /// The time limit has passed.
    Neither,
}

/// Reads more bytes. Returns `None` if the deadline passes first; a drain shortens it for a client that has sent
/// nothing.
async fn fill_until(
    stream: &mut Stream,
    timer: &mut Timer,
    connections: &ConnectionSet,
    deadline: Option<Instant>,
) -> io::Result<Option<usize>> {
    let mut idle_drain_end = None;
    poll_fn(|cx| {
        if let Poll::Ready(filled) = stream.poll_fill(cx) {
            return Poll::Ready(filled.map(Some));
        }
        if idle_drain_end.is_none() && stream.input.is_empty() {
            idle_drain_end = connections.idle_drain().map(|time| Instant::now() + time);
        }
        timer.poll(cx, earlier(deadline, idle_drain_end)).map(|()| Ok(None))
    })
    .await
}

/// Runs the TLS handshake. Returns whether it resumed a session.
async fn accept_tls(
    stream: &mut Stream,
    timer: &mut Timer,
    tls: &ServerTls,
    findings: &Findings,
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let Some(acceptor) = tls.config.load_full() else {
        return Err(io::Error::other("the certificate of this proxy has not arrived yet"));
    };
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut handshake = std::pin::pin!(stream.accept_tls(&acceptor, &findings.protocols));
    poll_fn(|cx| {
        if let Poll::Ready(result) = handshake.as_mut().poll(cx) {
            return Poll::Ready(result);
        }
        timer.poll(cx, deadline).map(|()| Err(io::ErrorKind::TimedOut.into()))
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::Future;

    use super::*;

    /// Returns the size of the future that a function returns.
    fn size<F: Future>(_: impl FnOnce() -> F) -> usize {
        size_of::<F>()
    }

    /// The memory of an idle connection, besides its socket and its TLS session. Futures that are rarely needed, such
    /// as that of connecting to an upstream, must be boxed.
    #[test]
    #[allow(unreachable_code, reason = "only the types matter")]
    fn an_idle_connection_is_small() {
        let task =
            size(|| serve(unreachable!(), unreachable!(), unreachable!(), unreachable!(), unreachable!()));
        let http1 =
            size(|| serve::http1::run(unreachable!(), unreachable!(), unreachable!(), unreachable!()));
        let http2 =
            size(|| serve::http2::run(unreachable!(), unreachable!(), unreachable!(), unreachable!()));
        let tcp = size(|| tcp::run(unreachable!(), unreachable!(), unreachable!(), unreachable!()));
        assert!(task <= 500, "{task}");
        assert!(http1 <= 400, "{http1}");
        assert!(http2 <= 1_800, "{http2}");
        assert!(tcp <= 1_400, "{tcp}");
    }
}
