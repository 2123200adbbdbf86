//! The TCP proxy: selects the cluster and the endpoint, connects, and forwards bytes in both directions until both have
//! ended.
//!
//! Either side may end first (half-close); the other direction stays open.
//! Source: `envoy.extensions.filters.network.tcp_proxy.v3`.

mod connect;
pub(crate) mod early;
mod tunnel;

use std::{
    future::poll_fn,
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::{Instant, SystemTime},
};

pub(crate) use self::{
    connect::connect,
    tunnel::{Ended, Tunnel},
};
use crate::{
    call::export,
    tcp::early::EarlyUpstream,
    telemetry::TcpCounts,
    upstream::{
        self,
        pool::{Host, Link, Pool},
    },
    worker::{
        Worker,
        downstream::{Accepted, Origin},
        revalidation::{Refusal, Revalidation},
    },
};
use skysail_http::{
    http1::Framing,
    socket::Stream,
    timer::{Timer, earlier},
};
use skysail_policy::{
    config::{
        listener::{TcpProxy, Terminal},
        route::Targets,
    },
    error::{self, Error, Flags, Kind, Side},
    record::{self, Record},
};

/// A connection to a server. The framing is that of the bytes from a proxy that received a POST for a tunnel.
pub(crate) type Server = (Stream, Rc<Link>, Option<Box<Framing>>);
/// The pool and the endpoint that the proxy tried to connect to.
type AttemptedEndpoint = Option<(Rc<Pool>, Rc<Host>)>;

/// Serves a connection until it ends. `early` is a connection to the server that the proxy opened before it
/// knew the client's protocol ([`early`]).
pub(crate) async fn run(
    worker: &Rc<Worker>,
    mut downstream: Accepted,
    early: Option<Box<EarlyUpstream>>,
    proxy: Arc<TcpProxy>,
) {
    let (start, began) = (SystemTime::now(), Instant::now());
    let mut timer = std::mem::take(&mut downstream.timer);
    let mut tried = None;
    let connected = reach(worker, (&mut downstream, early), &mut timer, began, &proxy, &mut tried).await;
    let (mut server, link, framing) = match connected {
        Ok(connected) => connected,
        Err(error) => {
            return record_failure(worker, &downstream.origin, &proxy, &error, tried, (start, began));
        }
    };
    // A long connection must not keep its first snapshot in memory.
    Rc::make_mut(&mut downstream.origin).snapshot = Rc::default();
    let Accepted { stream: client, origin, .. } = &mut downstream;
    let mut tunnel = framing.map_or_else(Tunnel::default, |framing| Tunnel::in_bodies(*framing));
    let greeting = &worker.shared.local.greeting;
    if origin.chain.metadata_exchange {
        tunnel.greet_client(client, greeting);
    }
    if link.pool().cluster.metadata_exchange {
        tunnel.greet_server(&mut server, greeting);
    }
    let mut session = TcpSession::new(worker, origin, &proxy, &link, (start, began));
    let flags = session.forward(&mut tunnel, client, &mut server, &mut timer).await;
    session.record_end(client, flags);
}

/// A connection with a server, and its records.
struct TcpSession<'a> {
    worker: &'a Rc<Worker>,
    origin: &'a Origin,
    proxy: &'a TcpProxy,
    link: &'a Link,
    admission: Revalidation,
    start: SystemTime,
    began: Instant,
    /// Whether the metrics count the connection as opened.
    is_counted: bool,
    /// Bytes from and to the client that the metrics count so far.
    counted: (u64, u64),
}

impl<'a> TcpSession<'a> {
    fn new(
        worker: &'a Rc<Worker>,
        origin: &'a Origin,
        proxy: &'a TcpProxy,
        link: &'a Link,
        (start, began): (SystemTime, Instant),
    ) -> Self {
        let admission = origin.admission.clone();
        Self { worker, origin, proxy, link, admission, start, began, is_counted: false, counted: (0, 0) }
    }

    /// Forwards bytes until the connection ends. Returns the flags of its record.
    async fn forward(
        &mut self,
        tunnel: &mut Tunnel,
        client: &mut Stream,
        server: &mut Stream,
        timer: &mut Timer,
    ) -> Flags {
        let Self { worker, origin, proxy, link, .. } = *self;
        let last = proxy.max_duration.map(|duration| self.began + duration);
        loop {
            // A connection is counted once the workloads of both peers are known.
            if !self.is_counted && !tunnel.expects_greeting() {
                self.count(self.counted);
            }
            let report = proxy.stats.as_ref().map(|stats| Instant::now() + stats.tcp_interval);
            let report = earlier(report, last);
            let check = || revalidate(worker, origin, link);
            let revoked = || self.admission.deadline(worker, check);
            let ended = tunnel.run(client, server, timer, proxy.idle_timeout, report, revoked).await;
            let [of_client, of_server] = tunnel.take_workloads();
            for (peer, workload) in [(&*origin.peer, of_client), (&link.peer, of_server)] {
                if let Some(workload) = workload {
                    peer.set_workload(Some(Arc::new(workload)));
                }
            }
            if ended != Ended::Greeted {
                self.count((client.received, client.sent));
            }
            let counters = || worker.shard.listener(&origin.listener.name);
            if last.is_some_and(|last| Instant::now() >= last) {
                counters().tcp_max_duration.inc();
                return Flags::DT;
            }
            match ended {
                Ended::Closed => return Flags::NONE,
                Ended::Revoked => return Flags::RV,
                Ended::Idle => {
                    counters().tcp_idle_timeout.inc();
                    return Flags::NONE;
                }
                Ended::Reported | Ended::Greeted => {}
            }
        }
    }

    /// Adds the connection and its bytes to the metrics. `now` is the number of bytes from and to the client.
    fn count(&mut self, now: (u64, u64)) {
        let Some(stats) = &self.proxy.stats else { return };
        let counts = TcpCounts {
            opened: u64::from(!self.is_counted),
            received: now.0 - self.counted.0,
            sent: now.1 - self.counted.1,
            ..TcpCounts::default()
        };
        self.worker.shard.connection(stats, &self.record(), counts);
        (self.is_counted, self.counted) = (true, now);
    }

    fn record(&self) -> Record<'a> {
        record(self.origin, Some(self.link), self.start)
    }

    /// Adds the end of the connection to metrics and access logs.
    fn record_end(&self, client: &Stream, flags: Flags) {
        let refusal = self.admission.expired().filter(|_| flags == Flags::RV);
        let details = refusal.map(error::revoked).unwrap_or_default();
        if let Some(refusal) = refusal {
            self.origin.note_refusal(self.worker, refusal);
        }
        let mut record = self.record();
        record.flags = flags;
        record.details = &details;
        record.duration = self.began.elapsed();
        record.bytes_received = client.received;
        record.bytes_sent = client.sent;
        record.wire_received = record.bytes_received;
        record.wire_sent = record.bytes_sent;
        if let Some(stats) = &self.proxy.stats {
            self.worker.shard.connection(stats, &record, TcpCounts { closed: 1, ..TcpCounts::default() });
        }
        log(self.worker, self.proxy, &record);
    }
}

/// Checks an open connection against the configuration in effect.
fn revalidate(worker: &Worker, origin: &Origin, link: &Link) -> Result<(), Refusal> {
    let chain = origin.revalidate(worker)?;
    let Terminal::Tcp(proxy) = &chain.terminal else { return Err(Refusal::FilterChain) };
    let cluster = &link.pool().cluster.name;
    let is_target = match &proxy.targets {
        Targets::Single(name) => **name == **cluster,
        Targets::Weighted { targets, .. } => targets.iter().any(|target| *target.cluster == **cluster),
        Targets::Header(_) => false,
    };
    if !is_target {
        return Err(Refusal::Destination);
    }
    if upstream::is_trusted(link, worker.snapshot().distrusted) { Ok(()) } else { Err(Refusal::Server) }
}

/// Returns the connection to the server: the early one if it is usable, else a new one.
async fn reach(
    worker: &Rc<Worker>,
    (downstream, early): (&mut Accepted, Option<Box<EarlyUpstream>>),
    timer: &mut Timer,
    began: Instant,
    proxy: &TcpProxy,
    tried: &mut AttemptedEndpoint,
) -> Result<Server, Error> {
    let Accepted { stream, origin, .. } = downstream;
    let mut client = WaitingClient { stream, timer, began };
    if let Some(early) = early
        && let Some(server) = client.wait(proxy, async { Ok(early.server().await) }).await?
    {
        return Ok(server);
    }
    Box::pin(connect(worker, origin, Some(client), proxy, tried)).await
}

/// Records a connection without a server in metrics and access logs.
fn record_failure(
    worker: &Rc<Worker>,
    origin: &Origin,
    proxy: &TcpProxy,
    error: &Error,
    tried: AttemptedEndpoint,
    (start, began): (SystemTime, Instant),
) {
    let answer = error.response();
    let mut record = record(origin, None, start);
    record.flags = answer.flags;
    if let Some((pool, host)) = &tried {
        record.cluster = Some(&pool.cluster);
        record.endpoint = Some(&host.endpoint);
        record.attempts = 1;
        // The TCP proxy does not retry.
        if error.side() != Side::Downstream {
            record.flags.insert(Flags::URX);
        }
    }
    let counters = worker.shard.listener(&origin.listener.name);
    match error.kind {
        Kind::StreamIdle(_) => counters.tcp_idle_timeout.inc(),
        Kind::StreamDuration(_) => {
            counters.tcp_max_duration.inc();
            record.flags = Flags::DT;
        }
        _ => {}
    }
    record.details = &answer.details;
    record.upstream_failure = error.cause.as_deref().unwrap_or_default();
    record.duration = began.elapsed();
    log(worker, proxy, &record);
    if let Some(stats) = &proxy.stats {
        worker.shard.connection(stats, &record, TcpCounts { opened: 1, closed: 1, ..TcpCounts::default() });
    }
}

/// A client that waits for a connection to an endpoint.
pub(crate) struct WaitingClient<'a> {
    stream: &'a mut Stream,
    timer: &'a mut Timer,
    began: Instant,
}

impl WaitingClient<'_> {
    /// Waits for `future`, unless the client closes its connection, or the idle timeout or the maximum duration passes.
    async fn wait<T>(
        &mut self,
        proxy: &TcpProxy,
        future: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut future = pin!(future);
        let idle = proxy.idle_timeout.map(|timeout| (self.began + timeout, Kind::StreamIdle(true)));
        let last = proxy.max_duration.map(|duration| (self.began + duration, Kind::StreamDuration(true)));
        let over = [idle, last].into_iter().flatten().min_by_key(|(deadline, _)| *deadline);
        poll_fn(|cx| {
            if let Poll::Ready(result) = future.as_mut().poll(cx) {
                return Poll::Ready(result);
            }
            if self.is_closed(cx) {
                return Poll::Ready(Err(Error::new(Kind::DownstreamClosed)));
            }
            let Some((deadline, kind)) = &over else { return Poll::Pending };
            self.timer.poll(cx, Some(*deadline)).map(|()| Err(Error::new(kind.clone())))
        })
        .await
    }

    /// Returns whether the client has closed its connection. A half-close after some bytes does not count,
    /// because the client may wait for the response.
    fn is_closed(&mut self, cx: &mut Context<'_>) -> bool {
        while !self.stream.input.is_full() {
            match self.stream.poll_fill(cx) {
                Poll::Pending => return false,
                Poll::Ready(Ok(1..)) => {}
                Poll::Ready(Ok(_)) => return self.stream.input.is_empty(),
                Poll::Ready(Err(_)) => return true,
            }
        }
        false
    }
}

fn record<'a>(origin: &'a Origin, link: Option<&'a Link>, start: SystemTime) -> Record<'a> {
    let mut record = Record::new(origin.listener.direction, start);
    record.downstream = Some(&origin.peer);
    record.downstream_local = Some(origin.destination);
    record.downstream_remote = Some(origin.source);
    record.downstream_direct = Some(origin.direct);
    record.server_name = origin.server_name();
    record.flags = Flags::NONE;
    if let Some(link) = link {
        record.upstream = Some(&link.peer);
        record.cluster = Some(&link.pool().cluster);
        record.endpoint = Some(&link.host.endpoint);
        record.upstream_remote = Some(link.remote);
        record.upstream_local = link.local;
        record.attempts = 1;
    }
    record
}

fn log(worker: &Rc<Worker>, proxy: &TcpProxy, record: &Record<'_>) {
    let context = record::Context { record, request: None, response: None };
    export::log(worker, &proxy.access_logs, &context);
}
