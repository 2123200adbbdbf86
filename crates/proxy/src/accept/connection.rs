//! The steps of a downstream connection up to HTTP or the TCP proxy:
//! accept → original destination → listener → inspect → filter chain → TLS → authorize.

use std::{
    future::{Future as _, poll_fn},
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use tokio::net::TcpStream;
use tracing::{debug, warn};

use crate::{
    accept::{
        arrival::{self, Arrival},
        connection_limit,
    },
    overload::{
        drain::{ConnectionSet, Registered},
        limit_log::Limit,
    },
    request::{authorization, serve},
    tcp::{self, early::EarlyUpstream},
    telemetry::stats::ListenerStats,
    worker::{
        Worker,
        downstream::{self, Accepted, Origin},
        inspect::Findings,
    },
};
use skysail_http::{socket::Stream, timer::Timer};
use skysail_identity::Acceptor;
use skysail_policy::{
    config::{FilterChain, listener::Terminal, tls::ServerTls},
    matching,
    peer::Peer,
};

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
    let begun = Box::pin(begin_counted(&worker, (connections, registered), entry, tcp, source)).await;
    let Some(((connection, early, _counted), listener)) = begun else { return };
    drop(begins);
    match connection.origin.chain.terminal.clone() {
        Terminal::Http(manager) => serve::run(&worker, connection, manager).await,
        Terminal::Tcp(proxy) => Box::pin(tcp::run(&worker, *connection, early, proxy)).await,
    }
    listener.cx_active.dec();
}

/// A connection with its filter chain, the early connection to its server, and its place in the connection limits.
type SelectedConnection = (Box<Accepted>, Option<Box<EarlyUpstream>>, Option<Box<connection_limit::Counted>>);

/// Runs the steps up to the filter chain, and counts the connection. The accepting listener counts it until the filter
/// chain is selected, then the listener that serves it, whose counters are returned. Every scrape includes it.
async fn begin_counted(
    worker: &Rc<Worker>,
    registered: (Rc<ConnectionSet>, Registered),
    entry: Arc<str>,
    tcp: TcpStream,
    source: SocketAddr,
) -> Option<(SelectedConnection, Rc<ListenerStats>)> {
    let accepting = worker.shard.listener(&entry);
    accepting.pre_cx_active.inc();
    let begun = begin(worker, registered, entry, tcp, source).await.map(|selected| {
        let listener = worker.shard.listener(&selected.0.origin.listener.name);
        listener.cx_total.inc();
        listener.cx_active.inc();
        (selected, listener)
    });
    accepting.pre_cx_active.dec();
    begun
}

/// Runs the steps up to the filter chain. Returns `None` for a connection that was refused or has failed; the debug log
/// has the reason.
async fn begin(
    worker: &Rc<Worker>,
    (connections, registered): (Rc<ConnectionSet>, Registered),
    entry: Arc<str>,
    tcp: TcpStream,
    source: SocketAddr,
) -> Option<SelectedConnection> {
    let mut arrival = Arrival::new(worker, connections, entry, &tcp, source)?;
    let mut stream = Box::new(Stream::new(tcp));
    let mut timer = Timer::default();
    arrival.read_proxy_header(worker, &mut stream, &mut timer).await?;
    let (findings, early) = arrival.inspect(worker, &mut stream, &mut timer).await?;
    let chain = arrival.select_chain(worker, &findings)?;
    // A client may have closed its connection while the worker was busy. On plain TCP the end may be a half-close.
    let half_closes = chain.tls.is_none() && matches!(chain.terminal, Terminal::Tcp(_));
    if worker.overload.is_busy() && !half_closes && stream.has_ended() {
        debug!("a connection from {source} to {} ended before it was served", arrival.destination);
        return None;
    }
    let counted = match &chain.connection_limits[..] {
        [] => None,
        limits => {
            let admitted = connection_limit::admit(worker, limits, &mut timer, &arrival.connections);
            Some(Box::new(Box::pin(admitted).await?))
        }
    };
    let acceptor = match &chain.tls {
        Some(tls) => {
            let connection = (&mut *stream, &mut timer);
            Some(terminate_tls(connection, tls, &chain, worker, &arrival, &findings).await?)
        }
        None => None,
    };
    let peer = peer(&stream, acceptor, worker);
    let mut origin = Rc::new(arrival.origin(&chain, findings, peer));
    if !is_admitted(&mut origin, worker).await {
        stream.close(&mut timer).await;
        return None;
    }
    let early = early.filter(|early: &EarlyUpstream| early.is_for(&origin.chain)).map(Box::new);
    // Boxed: futures reserve memory for all their parameters.
    Some((Box::new(Accepted { stream, timer, origin, registered }), early, counted))
}

/// Returns the peer after the handshake, which `acceptor` made. A certificate that is accepted without being valid
/// identifies nobody.
fn peer(stream: &Stream, acceptor: Option<Arc<Acceptor>>, worker: &Worker) -> Peer {
    let agreed = stream.agreed();
    let presented = agreed.and_then(|agreed| agreed.peer_certificates()).unwrap_or_default();
    let principal = worker.shared.dialer.principal();
    match acceptor {
        Some(acceptor) if !acceptor.identifies(presented) => Peer::secured(None, principal),
        _ => Peer::of(agreed, principal),
    }
}

/// Terminates TLS. Returns the acceptor of the handshake; `None` if the handshake has failed, which it counts and logs.
async fn terminate_tls(
    (stream, timer): (&mut Stream, &mut Timer),
    tls: &ServerTls,
    chain: &FilterChain,
    worker: &Worker,
    arrival: &Arrival,
    findings: &Findings,
) -> Option<Arc<Acceptor>> {
    let Arrival { source, destination, listener, .. } = arrival;
    let counters = worker.shard.listener(&listener.name);
    match accept_tls(stream, timer, tls, findings, chain.handshake_timeout).await {
        Ok((acceptor, resumed)) => {
            counters.tls_handshakes.inc();
            counters.tls_resumed.add(resumed.into());
            Some(acceptor)
        }
        Err(error) => {
            if error.kind() == io::ErrorKind::TimedOut {
                arrival::note_timeout(&counters.tls_timeout, Limit::Handshake, listener, *source);
            } else {
                counters.tls_errors.inc();
            }
            debug!("TLS with {source} on {} for {destination} failed: {error}", listener.name);
            None
        }
    }
}

/// Returns whether the configuration in effect admits the connection. The configuration may have changed while
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
    let Some(config) = origin.chain.external_authorization.as_deref() else { return true };
    let metadata = downstream::metadata(found);
    if config.enabled_metadata.as_ref().is_some_and(|test| !matching::metadata(test, Some(&metadata))) {
        return true;
    }
    let check = authorization::check_connection(worker, &origin.snapshot, config, origin);
    Box::pin(check).await.unwrap_or_else(|error| {
        warn!("external authorization by cluster {} failed: {error}", config.cluster);
        config.failure_allowed
    })
}

/// Runs the TLS handshake. Returns its acceptor, and whether it resumed a session.
async fn accept_tls(
    stream: &mut Stream,
    timer: &mut Timer,
    tls: &ServerTls,
    findings: &Findings,
    timeout: Option<Duration>,
) -> io::Result<(Arc<Acceptor>, bool)> {
    let Some(acceptor) = tls.config.load_full() else {
        return Err(io::Error::other("the certificate of this proxy has not arrived yet"));
    };
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let resumed = {
        let mut handshake = std::pin::pin!(stream.accept_tls(&acceptor, &findings.protocols));
        let shaken = poll_fn(|cx| {
            if let Poll::Ready(result) = handshake.as_mut().poll(cx) {
                return Poll::Ready(result);
            }
            timer.poll(cx, deadline).map(|()| Err(io::ErrorKind::TimedOut.into()))
        });
        shaken.await?
    };
    Ok((acceptor, resumed))
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
        assert!(task <= 504, "{task}");
        assert!(http1 <= 400, "{http1}");
        assert!(http2 <= 1_800, "{http2}");
        assert!(tcp <= 1_424, "{tcp}");
    }
}
