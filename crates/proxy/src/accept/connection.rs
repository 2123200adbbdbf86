//! The way of a downstream connection, up to the point where it is HTTP or bytes:
//! accept → original destination → listener → inspect → chain → TLS → authorize.
//!
//! Where the first bytes decide and the client has none, its server is dialled meanwhile, which may have some: [`Early`].

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
    call::export,
    overload::{
        drain::{Registered, Side},
        limit_log::{self, Limit},
    },
    request::{authorization, serve},
    tcp::{
        self,
        early::{self, Early},
    },
    telemetry::stats::Counter,
    worker::{
        Worker,
        downstream::{self, Accepted, Origin},
        filter_chain_match::{self, Facts},
        inspect::{self, Findings},
        revalidation::Revalidation,
    },
};
use skysail_http::{
    proxy_protocol::{self, Ends, Look},
    socket::Stream,
    timer::{Timer, earlier},
};
use skysail_policy::{
    config::{
        FilterChain, Listener, Snapshot,
        listener::{Inspect, Proxied, Terminal, Transport},
        tls::ServerTls,
    },
    error::{Error, Kind},
    matching,
    peer::Peer,
    record::{self, Record},
};

/// Most bytes and reads before it must be known what a connection begins with. The largest client hello and the largest
/// header of the PROXY protocol come in a quarter of these reads, if each has a segment of the smallest usual size.
const MAX_INSPECTED: usize = 64 * 1024;
const MAX_READS: u32 = 512;

/// Serves a connection from its beginning to its end.
pub(crate) async fn serve(
    worker: Rc<Worker>,
    side: Rc<Side>,
    entry: Arc<str>,
    tcp: TcpStream,
    source: SocketAddr,
) {
    let registered = side.register(poll_fn(|cx| Poll::Ready(cx.waker().clone())).await);
    let (begins, _) = worker.overload.begin(Instant::now());
    // Boxed: the story of a request is far larger than what waits for a first byte.
    let Some((connection, early)) = Box::pin(begin(&worker, (side, registered), entry, tcp, source)).await
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

/// Finds out what a connection is. `None`: it has been refused or has failed, which is told on the debug log.
async fn begin(
    worker: &Rc<Worker>,
    (side, registered): (Rc<Side>, Registered),
    entry: Arc<str>,
    tcp: TcpStream,
    source: SocketAddr,
) -> Option<(Box<Accepted>, Option<Box<Early>>)> {
    let (snapshot, epoch) = (worker.snapshot(), worker.epoch());
    let local = tcp.local_addr().ok()?;
    let (mut listener, dialled) = find_listener(&snapshot, &entry, &tcp, local)?;
    let (direct, mut source, mut destination) = (source, source, dialled);
    let mut stream = Box::new(Stream::new(tcp));
    let mut timer = Timer::default();
    if let Some(proxied) = &listener.proxy_protocol
        && !proxied.except.iter().any(|ports| ports.contains(&destination.port()))
    {
        match proxy_header(&mut stream, &mut timer, &side, proxied, listener.inspect_timeout).await {
            Ok(None) => {}
            // The client dialled another address, for which there may be another listener.
            Ok(Some(ends)) => {
                (source, destination) = (ends.source, ends.destination);
                listener = filter_chain_match::listener(&snapshot, &listener, destination);
            }
            Err(error) => {
                let counters = worker.shard.listener(&listener.name);
                if error.kind() == io::ErrorKind::TimedOut {
                    late(&counters.pre_cx_timeout, Limit::Inspection, &listener, source);
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
            side: side.clone(),
        };
    let dial = || {
        let findings = Findings { transport: Some(Transport::RawBuffer), ..Findings::default() };
        let chain =
            filter_chain_match::select(&listener, &Facts { destination, source, findings: &findings })?;
        Early::new(worker, origin(&listener, chain, findings, Peer::plain()))
    };
    let mut early = None;
    let inspected = inspect(&mut stream, &mut timer, &side, &listener, destination, dial, &mut early);
    let findings = match inspected.await {
        Ok(findings) => findings,
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                let counters = worker.shard.listener(&listener.name);
                late(&counters.pre_cx_timeout, Limit::Inspection, &listener, source);
            }
            debug!("a connection from {source} to {destination} ended before it was known: {error}");
            return None;
        }
    };
    let counters = worker.shard.listener(&listener.name);
    let facts = Facts { destination, source, findings: &findings };
    let Some(chain) = filter_chain_match::select(&listener, &facts).cloned() else {
        note_unmatched(worker, &listener, &facts, direct);
        return None;
    };
    // Who waited until there was time may have gone; on plain TCP it may only have said all that it had to say.
    let half_closes = chain.tls.is_none() && matches!(chain.terminal, Terminal::Tcp(_));
    if worker.overload.is_busy() && !half_closes && stream.has_ended() {
        debug!("a connection from {source} to {destination} ended before it was served");
        return None;
    }
    if let Some(tls) = &chain.tls {
        match accept_tls(&mut stream, &mut timer, tls, &findings, chain.handshake_timeout).await {
            Ok(resumed) => {
                counters.tls_handshakes.inc();
                counters.tls_resumed.add(resumed.into());
            }
            Err(error) => {
                if error.kind() == io::ErrorKind::TimedOut {
                    late(&counters.tls_timeout, Limit::Handshake, &listener, source);
                } else {
                    counters.tls_errors.inc();
                }
                debug!("TLS with {source} on {} for {destination} failed: {error}", listener.name);
                return None;
            }
        }
    }
    let peer = Peer::of(stream.agreed(), worker.shared.dialer.principal());
    let mut origin = Rc::new(origin(&listener, &chain, findings, peer));
    if !is_admitted(&mut origin, worker).await {
        stream.close(&mut timer).await;
        return None;
    }
    let early = early.filter(|early: &Early| early.is_of(&origin.chain)).map(Box::new);
    // Boxed, because futures keep room for everything that is ever handed to them.
    Some((Box::new(Accepted { stream, timer, origin, registered }), early))
}

/// Counts and logs a connection for which its listener has no filter chain.
fn note_unmatched(worker: &Rc<Worker>, listener: &Listener, facts: &Facts<'_>, direct: SocketAddr) {
    worker.shard.listener(&listener.name).no_filter_chain.inc();
    debug!("no filter chain of {} takes {facts:?}", listener.name);
    let answer = Error::new(Kind::NoFilterChain).answer();
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

/// Whether the connection is admitted by the configuration of now: its client may have been silent for long.
async fn is_admitted(origin: &mut Rc<Origin>, worker: &Rc<Worker>) -> bool {
    if downstream::refresh(origin, worker).is_err() {
        origin.note_revoked(worker);
        return false;
    }
    is_allowed(origin, worker).await
}

/// Whether the chain's policies, and who is asked besides, let the connection pass.
async fn is_allowed(origin: &Origin, worker: &Rc<Worker>) -> bool {
    let Some(found) = origin.pass_policies(worker) else { return false };
    let Some(config) = origin.chain.ask.as_deref() else { return true };
    let metadata = downstream::metadata(found);
    if config.enabled_metadata.as_ref().is_some_and(|test| !matching::metadata(test, Some(&metadata))) {
        return true;
    }
    let asked = authorization::check_connection(worker, &origin.snapshot, config, origin);
    Box::pin(asked).await.unwrap_or_else(|error| {
        warn!("{} cannot be asked for authorization: {error}", config.cluster);
        config.failure_allowed
    })
}

/// Counts and tells of a client that was too slow.
fn late(counter: &Counter, limit: Limit, listener: &Listener, source: SocketAddr) {
    counter.inc();
    limit_log::log(limit, format_args!("listener {}, client {source}", listener.name));
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
    Some((filter_chain_match::listener(snapshot, entry, destination), destination))
}

/// The address that the client dialled before interception changed it (`SO_ORIGINAL_DST`).
fn original_destination(tcp: &TcpStream) -> Option<SocketAddr> {
    let socket = SockRef::from(tcp);
    let v6 = tcp.local_addr().is_ok_and(|local| local.is_ipv6());
    let address = if v6 { socket.original_dst_v6() } else { socket.original_dst_v4() };
    address.ok()?.as_socket()
}

/// Waits for what a proxy in front says of the connection, and takes it off; `None` if it names nobody.
async fn proxy_header(
    stream: &mut Stream,
    timer: &mut Timer,
    side: &Side,
    proxied: &Proxied,
    timeout: Option<Duration>,
) -> io::Result<Option<Ends>> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    for _ in 0..MAX_READS {
        match proxy_protocol::look(stream.input.bytes()) {
            Look::Header(version, _, _) if proxied.refused.contains(&version) => {
                return Err(io::Error::other(format!(
                    "version {version:?} of the PROXY protocol is refused"
                )));
            }
            Look::Header(_, length, ends) => {
                stream.input.consume(length);
                return Ok(ends);
            }
            Look::Absent if proxied.optional => return Ok(None),
            Look::Absent => return Err(io::Error::other("it begins without a header of the PROXY protocol")),
            Look::Broken => return Err(io::Error::other("its header of the PROXY protocol cannot be read")),
            Look::More => {}
        }
        if stream.input.is_full() {
            stream.input.grow(proxy_protocol::MAX);
        }
        match fill_until(stream, timer, side, deadline).await? {
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(_) => {}
            None => return Err(io::ErrorKind::TimedOut.into()),
        }
    }
    Err(io::Error::other(format!("its header of the PROXY protocol is not there after {MAX_READS} reads")))
}

/// Waits for the first bytes and looks at them: for TLS wherever that is asked for, as policies, logs and services that are
/// asked want to know the server name, for HTTP if it could make a difference. While there are none, `dial` looks for a
/// server, `early`, that speaks first.
async fn inspect(
    stream: &mut Stream,
    timer: &mut Timer,
    side: &Side,
    listener: &Listener,
    destination: SocketAddr,
    dial: impl FnOnce() -> Option<Early>,
    early: &mut Option<Early>,
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
                        "the TLS client hello cannot be read ({} bytes in {reads} reads)",
                        bytes.len()
                    )));
                }
                inspect::Look::More if stream.input.is_empty() => {}
                // It has begun as something else than bytes.
                inspect::Look::More => *early = None,
            }
            if stream.input.is_full() {
                stream.input.grow(MAX_INSPECTED);
            }
            let mut farewell = None;
            let speaks = poll_fn(|cx| {
                loop {
                    if let Poll::Ready(filled) = stream.poll_fill(cx) {
                        return Poll::Ready(filled.map(FirstSpeaker::Client));
                    }
                    let is_silent = stream.input.is_empty();
                    if is_silent && early.as_mut().is_some_and(|early| early.poll(cx).is_ready()) {
                        return Poll::Ready(Ok(FirstSpeaker::Server));
                    }
                    let due = match &early {
                        _ if !is_silent => None,
                        Some(early) => early.due(),
                        None if dial.is_none() => None,
                        None => Some(*quiet.get_or_insert_with(|| Instant::now() + early::QUIET)),
                    };
                    // Who says nothing and reaches nobody is not waited for when the side drains.
                    if is_silent && dial.is_none() && early.is_none() && farewell.is_none() {
                        farewell = side.farewell().map(|farewell| Instant::now() + farewell);
                    }
                    let last = earlier(deadline, farewell);
                    ready!(timer.poll(cx, earlier(last, due)));
                    if last.is_some_and(|last| Instant::now() >= last) {
                        return Poll::Ready(Ok(FirstSpeaker::Nobody));
                    }
                    if let Some(dial) = dial.take() {
                        *early = dial();
                    }
                }
            });
            match speaks.await? {
                FirstSpeaker::Client(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                FirstSpeaker::Client(_) => reads += 1,
                FirstSpeaker::Server => {
                    findings.transport = Some(Transport::RawBuffer);
                    return Ok(findings);
                }
                FirstSpeaker::Nobody if listener.continue_on_timeout => return Ok(findings),
                FirstSpeaker::Nobody => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }
    Ok(findings)
}

/// Who speaks first.
enum FirstSpeaker {
    /// So many bytes; 0 for an end.
    Client(usize),
    Server,
    Nobody,
}

/// Reads more; `None` when the deadline passes first, which comes soon for who has said nothing when the side drains.
async fn fill_until(
    stream: &mut Stream,
    timer: &mut Timer,
    side: &Side,
    deadline: Option<Instant>,
) -> io::Result<Option<usize>> {
    let mut farewell = None;
    poll_fn(|cx| {
        if let Poll::Ready(filled) = stream.poll_fill(cx) {
            return Poll::Ready(filled.map(Some));
        }
        if farewell.is_none() && stream.input.is_empty() {
            farewell = side.farewell().map(|farewell| Instant::now() + farewell);
        }
        timer.poll(cx, earlier(deadline, farewell)).map(|()| Ok(None))
    })
    .await
}

async fn accept_tls(
    stream: &mut Stream,
    timer: &mut Timer,
    tls: &ServerTls,
    findings: &Findings,
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let Some(acceptor) = tls.config.load_full() else {
        return Err(io::Error::other("our certificate has not arrived yet"));
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

    /// The size of the future that a function returns.
    fn size<F: Future>(_: impl FnOnce() -> F) -> usize {
        size_of::<F>()
    }

    /// These are what an idle connection costs, beside its socket and its TLS session. What is needed now and then,
    /// such as opening a connection, belongs in a box.
    #[test]
    #[allow(unreachable_code, reason = "only the types count")]
    fn a_connection_that_waits_is_small() {
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
