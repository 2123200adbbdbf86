//! The TCP proxy: selects the cluster and the endpoint, connects, and forwards bytes in both directions until both have
//! ended.
//!
//! Either side may end first (half-close); the other direction stays open.
//! Source: `envoy.extensions.filters.network.tcp_proxy.v3`.

mod connect;
pub(crate) mod early;

use std::{
    future::poll_fn,
    io,
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant, SystemTime},
};

pub(crate) use self::connect::connect;
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
        revalidation::Refusal,
    },
};
use skysail_http::{
    socket::Stream,
    splice::Pipe,
    timer::{Timer, earlier},
};
use skysail_policy::{
    config::{
        cluster::Workload,
        listener::{TcpProxy, Terminal},
        route::Targets,
    },
    error::{self, Error, Flags, Kind, Side},
    peer::greeting::{self, Greeting},
    record::{self, Record},
};

/// Minimum bytes of one read for which a pipe is used; fewer are copied.
const MIN_SPLICED: usize = 4 * 1024;
/// Interval at which the bytes of an open connection are counted.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// A connection to a server.
pub(crate) type Server = (Stream, Rc<Link>);
/// The pool and the endpoint that the proxy tried to connect to.
type Tried = Option<(Rc<Pool>, Rc<Host>)>;

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
    let (mut server, link) = match connected {
        Ok(connected) => connected,
        Err(error) => {
            return record_failure(worker, &downstream.origin, &proxy, &error, tried, (start, began));
        }
    };
    // A long connection must not keep its first snapshot in memory.
    Rc::make_mut(&mut downstream.origin).snapshot = Rc::default();
    let origin = &downstream.origin;
    let mut counted = (0, 0);
    let mut tunnel = Tunnel::default();
    let greeting = &worker.shared.local.greeting;
    if origin.chain.metadata_exchange {
        tunnel.up.greeting = send_greeting(&mut downstream.stream, greeting);
    }
    if link.pool().cluster.metadata_exchange {
        tunnel.down.greeting = send_greeting(&mut server, greeting);
    }
    let mut opened = false;
    let mut admission = origin.admission.clone();
    let last = proxy.max_duration.map(|duration| began + duration);
    let mut flags = Flags::NONE;
    loop {
        // A connection is counted once the workloads of both peers are known.
        let is_pending = tunnel.up.greeting.is_some() || tunnel.down.greeting.is_some();
        if let Some(stats) = &proxy.stats
            && !opened
            && !is_pending
        {
            let counts = TcpCounts { opened: 1, ..TcpCounts::default() };
            worker.shard.connection(stats, &record(origin, Some(&link), start), counts);
            opened = true;
        }
        let report = earlier(proxy.stats.as_ref().map(|_| Instant::now() + REPORT_INTERVAL), last);
        let client = &mut downstream.stream;
        let check = || revalidate(worker, origin, &link);
        let revoked = || admission.deadline(worker, check);
        let ended = tunnel.run(client, &mut server, &mut timer, proxy.idle_timeout, report, revoked).await;
        let [of_client, of_server] = tunnel.take_workloads();
        for (peer, workload) in [(&*origin.peer, of_client), (&link.peer, of_server)] {
            if let Some(workload) = workload {
                peer.set_workload(Some(Arc::new(workload)));
            }
        }
        if let Some(stats) = &proxy.stats
            && ended != Ended::Greeted
        {
            let now = (downstream.stream.received, downstream.stream.sent);
            let counts = TcpCounts {
                opened: u64::from(!opened),
                received: now.0 - counted.0,
                sent: now.1 - counted.1,
                ..TcpCounts::default()
            };
            worker.shard.connection(stats, &record(origin, Some(&link), start), counts);
            (opened, counted) = (true, now);
        }
        let counters = || worker.shard.listener(&origin.listener.name);
        if last.is_some_and(|last| Instant::now() >= last) {
            counters().tcp_max_duration.inc();
            flags = Flags::DT;
            break;
        }
        match ended {
            Ended::Closed => break,
            Ended::Revoked => {
                flags = Flags::RV;
                break;
            }
            Ended::Idle => {
                counters().tcp_idle_timeout.inc();
                break;
            }
            Ended::Reported | Ended::Greeted => {}
        }
    }
    let refusal = admission.expired().filter(|_| flags == Flags::RV);
    let details = refusal.map(error::revoked).unwrap_or_default();
    if let Some(refusal) = refusal {
        origin.note_refusal(worker, refusal);
    }
    let mut record = record(origin, Some(&link), start);
    record.flags = flags;
    record.details = &details;
    record.duration = began.elapsed();
    record.bytes_received = downstream.stream.received;
    record.bytes_sent = downstream.stream.sent;
    record.wire_received = record.bytes_received;
    record.wire_sent = record.bytes_sent;
    if let Some(stats) = &proxy.stats {
        worker.shard.connection(stats, &record, TcpCounts { closed: 1, ..TcpCounts::default() });
    }
    log(worker, &proxy, &record);
}

/// Checks an open connection against the configuration in force.
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
    tried: &mut Tried,
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
    tried: Tried,
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
            if self.is_gone(cx) {
                return Poll::Ready(Err(Error::new(Kind::DownstreamClosed)));
            }
            let Some((deadline, kind)) = &over else { return Poll::Pending };
            self.timer.poll(cx, Some(*deadline)).map(|()| Err(Error::new(kind.clone())))
        })
        .await
    }

    /// Returns whether the client has closed its connection. A half-close after some bytes does not count,
    /// because the client may wait for the response.
    fn is_gone(&mut self, cx: &mut Context<'_>) -> bool {
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

/// Sends this workload's metadata if ALPN negotiated their exchange, and expects those of the peer.
fn send_greeting(stream: &mut Stream, greeting: &[u8]) -> Option<PeerGreeting> {
    if stream.alpn() != Some(greeting::ALPN) {
        return None;
    }
    stream.output.extend(greeting);
    Some(PeerGreeting::Expected)
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

/// Returns whether the error means that the system does not support `splice` on these sockets. With an empty
/// pipe, `splice` then fails before it moves any byte.
fn is_splice_unsupported(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
    )
}

/// Reason why [`Tunnel::run`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Both directions have ended, or one has failed.
    Closed,
    /// The idle timeout has passed.
    Idle,
    /// The configuration in force does not admit the connection.
    Revoked,
    /// The tunnel is open; its bytes are due to be counted.
    Reported,
    /// The tunnel is open; the metadata of a peer have arrived.
    Greeted,
}

/// Two connections whose bytes are forwarded to each other.
#[derive(Default)]
pub(crate) struct Tunnel {
    up: TcpDirection,
    down: TcpDirection,
    moved: Option<Instant>,
}

/// One direction of a tunnel.
#[derive(Default)]
struct TcpDirection {
    state: DirectionState,
    /// Method that forwards the next bytes.
    passage: Passage,
    /// Holds spliced bytes that have not been written yet.
    pipe: Option<Pipe>,
    /// Metadata of the sender, if ALPN negotiated their exchange.
    greeting: Option<PeerGreeting>,
}

/// Method of forwarding bytes. A pipe (`splice`) avoids copies, but costs more than copies if the bytes are
/// few.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Passage {
    #[default]
    Buffers,
    /// Used after a read that has filled the input buffer.
    Pipe,
    /// Pipes are not available: some sandboxes refuse them.
    NoPipe,
}

/// State of the metadata that a peer sends first.
enum PeerGreeting {
    Expected,
    /// The metadata have arrived; `None` if the peer sent none.
    Received(Option<Workload>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DirectionState {
    #[default]
    Open,
    /// The sender has ended; the receiver's side is not shut down yet.
    Ending,
    Done,
}

impl Tunnel {
    /// Forwards bytes until the tunnel ends, the idle timeout passes, or a peer's metadata arrive. Also
    /// returns at the time `report` and at the deadline that `revoked` returns.
    pub(crate) async fn run(
        &mut self,
        client: &mut Stream,
        server: &mut Stream,
        timer: &mut Timer,
        idle_timeout: Option<Duration>,
        report: Option<Instant>,
        mut revoked: impl FnMut() -> Option<Instant>,
    ) -> Ended {
        poll_fn(|cx| {
            let revoked = revoked();
            if revoked.is_some_and(|end| Instant::now() >= end) {
                return Poll::Ready(Ended::Revoked);
            }
            let before = (client.received, server.received, client.sent, server.sent);
            let directions = [self.up.poll(cx, client, server), self.down.poll(cx, server, client)];
            if directions.iter().any(|direction| matches!(direction, Poll::Ready(Err(_)))) {
                return Poll::Ready(Ended::Closed);
            }
            if (self.up.state, self.down.state) == (DirectionState::Done, DirectionState::Done) {
                return Poll::Ready(Ended::Closed);
            }
            if [&self.up, &self.down]
                .iter()
                .any(|direction| matches!(direction.greeting, Some(PeerGreeting::Received(_))))
            {
                return Poll::Ready(Ended::Greeted);
            }
            if idle_timeout.is_some()
                && before != (client.received, server.received, client.sent, server.sent)
            {
                self.moved = Some(Instant::now());
            }
            let idle = idle_timeout.map(|timeout| *self.moved.get_or_insert_with(Instant::now) + timeout);
            ready!(timer.poll(cx, earlier(earlier(idle, report), revoked)));
            if revoked.is_some_and(|end| Instant::now() >= end) {
                return Poll::Ready(Ended::Revoked);
            }
            let is_idle = idle.is_some_and(|idle| Instant::now() >= idle);
            Poll::Ready(if is_idle { Ended::Idle } else { Ended::Reported })
        })
        .await
    }

    /// Takes the metadata of the two peers that have arrived since the last call.
    fn take_workloads(&mut self) -> [Option<Workload>; 2] {
        [&mut self.up, &mut self.down].map(|direction| match direction.greeting.take() {
            Some(PeerGreeting::Received(workload)) => workload,
            other => {
                direction.greeting = other;
                None
            }
        })
    }
}

impl TcpDirection {
    fn poll(&mut self, cx: &mut Context<'_>, from: &mut Stream, to: &mut Stream) -> Poll<io::Result<()>> {
        loop {
            if ready!(self.poll_flush(cx, to)).is_err() {
                // The receiver has closed, but bytes of the other direction may still be in flight.
                to.output.clear();
                self.pipe = None;
                self.state = DirectionState::Done;
            }
            if self.state == DirectionState::Done {
                return Poll::Ready(Ok(()));
            }
            if !self.read_greeting(from)? && !from.input.is_empty() {
                // The buffers are swapped; no bytes are copied.
                std::mem::swap(&mut to.output, &mut from.input);
                continue;
            }
            match self.state {
                DirectionState::Done => {}
                DirectionState::Ending => {
                    ready!(to.poll_shutdown(cx))?;
                    self.state = DirectionState::Done;
                }
                DirectionState::Open => {
                    if ready!(self.poll_fill(cx, from, to.is_plain()))? == 0 {
                        self.state = DirectionState::Ending;
                    }
                }
            }
        }
    }

    fn poll_flush(&mut self, cx: &mut Context<'_>, to: &mut Stream) -> Poll<io::Result<()>> {
        ready!(to.poll_flush(cx))?;
        match &mut self.pipe {
            Some(pipe) => to.poll_drain_pipe(cx, pipe),
            None => Poll::Ready(Ok(())),
        }
    }

    /// Reads more from the sender; returns 0 at its end. All bytes of earlier reads must have been forwarded.
    fn poll_fill(&mut self, cx: &mut Context<'_>, from: &mut Stream, plain: bool) -> Poll<io::Result<usize>> {
        from.rest();
        if self.passage == Passage::Pipe && self.pipe.is_none() {
            self.pipe = Pipe::lend();
        }
        if let Some(pipe) = &mut self.pipe {
            let filled = from.poll_fill_pipe(cx, pipe);
            match &filled {
                Poll::Ready(Ok(count)) if *count >= MIN_SPLICED => return filled,
                Poll::Ready(Ok(_)) => self.passage = Passage::Buffers,
                Poll::Ready(Err(error)) if is_splice_unsupported(error) => self.passage = Passage::NoPipe,
                Poll::Ready(Err(_)) | Poll::Pending => {}
            }
            if pipe.is_empty() {
                self.pipe = None;
            }
            if self.passage != Passage::NoPipe {
                return filled;
            }
        }
        let count = ready!(from.poll_fill(cx))?;
        if from.input.is_full() && self.passage == Passage::Buffers && plain && from.is_plain() {
            self.passage = Passage::Pipe;
        }
        Poll::Ready(Ok(count))
    }

    /// Reads the metadata that the sender sends first. Returns true while they are incomplete.
    fn read_greeting(&mut self, from: &mut Stream) -> io::Result<bool> {
        if !matches!(self.greeting, Some(PeerGreeting::Expected)) {
            return Ok(false);
        }
        match greeting::read(from.input.bytes()) {
            Greeting::Incomplete if self.state == DirectionState::Open && !from.input.is_full() => {
                return Ok(true);
            }
            Greeting::TooLarge => return Err(io::Error::other("the metadata of the peer are too large")),
            Greeting::Complete(length, workload) => {
                from.input.consume(length);
                self.greeting = Some(PeerGreeting::Received(workload));
            }
            Greeting::Incomplete | Greeting::Absent => self.greeting = Some(PeerGreeting::Received(None)),
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests;
