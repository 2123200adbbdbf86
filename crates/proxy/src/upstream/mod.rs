//! Upstream connections: TCP with the socket mark and source address that interception needs, then TLS, then
//! HTTP/2 if negotiated.

pub(crate) mod dynamic;
pub(crate) mod pick;
pub(crate) mod pool;

pub(crate) mod response;

use std::{
    future::poll_fn,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    ops::RangeInclusive,
    os::fd::OwnedFd,
    pin::Pin,
    rc::Rc,
    sync::{Arc, LazyLock},
    task::Poll,
    time::{Duration, Instant},
};

use arc_swap::ArcSwapOption;
use rustls::pki_types::ServerName;
use skysail_identity::Connector;
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpSocket, TcpStream},
};

use crate::upstream::pool::{
    ConnectionSlot, Host, LimitReached, Link, Pool, Upstream, UpstreamTls, increment,
};
use skysail_http::{
    head::{RequestHead, Version},
    http2,
    proxy_protocol::{self, Addresses},
    socket::Stream,
    timer::{self, Timer},
    wire::Wire,
};
use skysail_policy::{
    config::{
        Cluster, Endpoint,
        cluster::{AutoSni, Discovery, Keepalive, UpstreamProtocol},
        tls::{ClientConfigs, ClientTls},
    },
    error::{Error, Kind},
    peer::{Peer, greeting},
    route,
};

/// Delay before the endpoint's next address is tried in parallel (RFC 8305, section 8).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
/// Number of source ports outside the kernel's range that are tried; most are free.
const PORT_TRIES: u32 = 3;
/// Minimum number of ports outside the kernel's range; fewer would soon be exhausted.
const MIN_UNASSIGNED_PORTS: u16 = 1_024;

/// Protocol requirements of a connection, which determine the ALPN offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AlpnOffer {
    pub(crate) protocol: ApplicationProtocol,
    /// Offer the protocols of Istio's sidecars (filter `istio.alpn`) instead of the cluster's.
    pub(crate) istio: bool,
    /// Addresses of the downstream connection, if the cluster receives them (`upstream_proxy_protocol`).
    pub(crate) ends: Option<Addresses>,
    /// Host for SNI, if it depends on the request (`auto_sni`).
    host: Option<Box<str>>,
    /// The bytes begin with HTTP: the metadata of sidecars must not precede them.
    is_tunnel: bool,
}

/// Protocol of a connection unless ALPN negotiates another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ApplicationProtocol {
    /// Opaque bytes.
    Bytes,
    /// HTTP/1.1.
    Http1,
    /// HTTP/2.
    Http2,
}

impl AlpnOffer {
    /// Offer of connections that carry opaque bytes.
    pub(crate) const BYTES: Self =
        Self { protocol: ApplicationProtocol::Bytes, istio: false, ends: None, host: None, is_tunnel: false };
    /// Offer of connections to a proxy that is asked for a tunnel.
    pub(crate) const TUNNEL: Self = Self { is_tunnel: true, ..Self::BYTES };

    /// Returns the offer for a request that is sent to a cluster.
    pub(crate) fn http(cluster: &Cluster, head: &RequestHead, istio: bool) -> Self {
        let http2 = match cluster.protocol {
            UpstreamProtocol::Http2 => true,
            UpstreamProtocol::AsDownstream => head.version == Version::Http2,
            UpstreamProtocol::Http1 | UpstreamProtocol::Auto => false,
        };
        let protocol = if http2 { ApplicationProtocol::Http2 } else { ApplicationProtocol::Http1 };
        let host = cluster.auto_sni.as_ref().and_then(|auto| sni_host(auto, head)).map(Into::into);
        Self { protocol, istio: istio && !cluster.keeps_alpn, ends: None, host, is_tunnel: false }
    }

    /// Returns the offer for a connection on behalf of a downstream connection, whose addresses a PROXY header
    /// contains.
    pub(crate) fn for_client(self, ends: Addresses) -> Self {
        Self { ends: Some(ends), ..self }
    }

    /// Returns the TLS configuration with this offer.
    fn config<'a>(&self, configs: &'a ClientConfigs) -> &'a Arc<Connector> {
        match (self.protocol, self.istio) {
            (ApplicationProtocol::Http1, true) => &configs.istio_http1,
            (ApplicationProtocol::Http2, true) => &configs.istio_h2,
            (ApplicationProtocol::Http2, false) => &configs.http2,
            (ApplicationProtocol::Bytes | ApplicationProtocol::Http1, _) => &configs.own,
        }
    }
}

/// Settings of all upstream connections of the process.
#[derive(Clone, Debug, Default)]
pub struct Dialer {
    /// SO_MARK of every socket, which exempts it from traffic interception.
    pub mark: Option<u32>,
    /// First URI SAN of the sidecar's own certificate, once it has one.
    pub principal: Arc<ArcSwapOption<Arc<str>>>,
}

impl Dialer {
    pub(crate) fn principal(&self) -> Option<Arc<str>> {
        self.principal.load().as_deref().cloned()
    }
}

/// Returns an idle connection to an endpoint, or a stream of a shared one.
pub(crate) fn take(pool: &Pool, host: &Host, offer: &AlpnOffer) -> Result<Option<Upstream>, Error> {
    let tls = tls_settings(host.endpoint.tls.as_deref(), offer)?;
    Ok(reuse(pool, host, offer, tls.as_ref()))
}

/// Returns whether each connection serves a single request, because its PROXY header identifies the client.
fn is_exclusive(pool: &Pool) -> bool {
    pool.cluster.proxy_protocol.is_some()
}

fn reuse(pool: &Pool, host: &Host, offer: &AlpnOffer, tls: Option<&UpstreamTls>) -> Option<Upstream> {
    if is_exclusive(pool) {
        return None;
    }
    // TLS may have negotiated the other protocol, so both pools are searched; the unused one is empty.
    match offer.protocol {
        ApplicationProtocol::Bytes => None,
        ApplicationProtocol::Http1 => pool.take(host, tls).or_else(|| pool.share(host, tls)),
        ApplicationProtocol::Http2 => pool.share(host, tls).or_else(|| pool.take(host, tls)),
    }
}

/// Returns a connection to an endpoint: a new one, or one that becomes idle while this waits for a slot.
/// `fresh` requires a new one.
pub(crate) async fn get(
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    offer: &AlpnOffer,
    dialer: &Dialer,
    fresh: bool,
) -> Result<Upstream, Error> {
    let mut waiting = None;
    loop {
        // Trust may have changed during the wait.
        let tls = tls_settings(host.endpoint.tls.as_deref(), offer)?;
        let (freed, room) = (host.freed.notified(), pool.room.notified());
        let soon = offer.protocol == ApplicationProtocol::Http2
            && host.connecting.get()
            && !fresh
            && !is_exclusive(pool);
        if !soon {
            match pool.admit(host) {
                // Boxed, because few requests open a connection, and every waiting connection holds this
                // future.
                Ok(place) => return Box::pin(open(pool, host, offer, tls, dialer, place)).await,
                // The idle connections were opened for other hosts.
                Err(LimitReached) if pool.cluster.auto_sni.is_some() && pool.make_room(host) => continue,
                Err(LimitReached) if waiting.is_none() => waiting = Some(pool.pending()?),
                Err(LimitReached) => {}
            }
        }
        tokio::select! {
            () = freed => {}
            () = room => {}
        }
        let tls = tls_settings(host.endpoint.tls.as_deref(), offer)?;
        if !fresh && let Some(upstream) = reuse(pool, host, offer, tls.as_ref()) {
            return Ok(upstream);
        }
    }
}

/// Returns a slot for a connection to an endpoint; waits while the limit is reached.
pub(crate) async fn place(pool: &Rc<Pool>, host: &Rc<Host>) -> Result<ConnectionSlot, Error> {
    let mut waiting = None;
    loop {
        let room = pool.room.notified();
        match pool.admit(host) {
            Ok(place) => return Ok(place),
            Err(LimitReached) if waiting.is_none() => waiting = Some(pool.pending()?),
            Err(LimitReached) => {}
        }
        room.await;
    }
}

/// Returns a connection for opaque bytes, in the given slot.
pub(crate) async fn bytes(
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    offer: &AlpnOffer,
    dialer: &Dialer,
    place: ConnectionSlot,
) -> Result<Upstream, Error> {
    let tls = tls_settings(host.endpoint.tls.as_deref(), offer)?;
    open(pool, host, offer, tls, dialer, place).await
}

async fn open(
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    offer: &AlpnOffer,
    tls: Option<UpstreamTls>,
    dialer: &Dialer,
    place: ConnectionSlot,
) -> Result<Upstream, Error> {
    let _connecting = (offer.protocol == ApplicationProtocol::Http2).then(|| Connecting::begin(host));
    let connect = async {
        let (stream, peer) = establish(pool, &host.endpoint, tls.as_ref(), offer, dialer).await?;
        let http2 = match stream.alpn() {
            Some(agreed) => agreed.ends_with(b"h2"),
            None => offer.protocol == ApplicationProtocol::Http2,
        };
        let link = Pool::opened(place, &stream, peer, tls);
        if http2 && offer.protocol != ApplicationProtocol::Bytes {
            multiplex(host, stream, link).await
        } else {
            Ok(Upstream::own(Box::new(stream), link))
        }
    };
    let error = match timer::timeout(pool.cluster.connect_timeout, connect).await {
        Some(Ok(upstream)) => return Ok(upstream),
        Some(Err(error)) => error,
        None => Error::new(Kind::ConnectTimeout),
    };
    increment(&host.totals.connect_failures);
    pool.stats.cx_connect_fail.inc();
    if error.kind == Kind::ConnectTimeout {
        pool.stats.cx_connect_timeout.inc();
    }
    Err(error)
}

/// Marks a connection attempt as in progress until it ends.
struct Connecting<'a>(&'a Host);

impl<'a> Connecting<'a> {
    fn begin(host: &'a Host) -> Self {
        host.connecting.set(true);
        Self(host)
    }
}

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        self.0.connecting.set(false);
        self.0.freed.notify_waiters();
    }
}

/// Starts HTTP/2 on a connection. Requests share it unless it serves a single request.
async fn multiplex(host: &Rc<Host>, stream: Stream, link: Rc<Link>) -> Result<Upstream, Error> {
    let cluster = &link.pool().cluster;
    let head = http2::Bounds { size: cluster.max_head, fields: cluster.max_headers };
    let limits = http2::SessionLimits { head, options: cluster.http2 };
    let mut driver = http2::Driver::new(stream, http2::Role::Client, limits);
    let connection = driver.connection();
    // The server's first SETTINGS frame contains the maximum of concurrent streams (RFC 9113, section 3.4).
    let settled = poll_fn(|cx| {
        let over = driver.poll(cx).is_ready();
        if over || driver.is_settled() { Poll::Ready(!over) } else { Poll::Pending }
    });
    if !settled.await {
        let error = driver.error().map_or_else(String::new, |error| error.to_string());
        return Err(Error::caused(Kind::ConnectFailed, error));
    }
    let (owner, known) = (Rc::downgrade(host), Rc::downgrade(&link));
    tokio::task::spawn_local(async move {
        // The driver reports an error to every request that it affects.
        poll_fn(|cx| driver.poll(cx)).await;
        if let Some(host) = owner.upgrade() {
            host.remove_shared(&known);
        }
        driver.close().await;
    });
    if is_exclusive(link.pool()) {
        return Ok(Upstream { wire: Wire::Http2(Box::new(http2::Duplex::idle(connection))), link });
    }
    Ok(host.add_shared(link, connection))
}

async fn establish(
    pool: &Pool,
    endpoint: &Endpoint,
    tls: Option<&UpstreamTls>,
    offer: &AlpnOffer,
    dialer: &Dialer,
) -> Result<(Stream, Peer), Error> {
    let refused = |error: io::Error| {
        Error::caused(Kind::ConnectFailed, format_args!("delayed connect error: {}", reason(&error)))
    };
    let mut tcp = connect_endpoint(endpoint, &pool.cluster, dialer.mark).await.map_err(refused)?;
    if let Some(version) = pool.cluster.proxy_protocol {
        tcp.write_all(&proxy_protocol::write(version, offer.ends)).await.map_err(refused)?;
    }
    let mut stream = Stream::new(tcp);
    let Some(UpstreamTls { config, host }) = tls else { return Ok((stream, Peer::plain())) };
    let name = server_name(endpoint, host.as_deref())?;
    let failed =
        |error: io::Error| Error::caused(Kind::ConnectFailed, format_args!("TLS error: {}", reason(&error)));
    let config = match offer.is_tunnel {
        true => &without_greeting(config).map_err(|error| failed(io::Error::other(error)))?,
        false => config,
    };
    stream.connect_tls(config, name, endpoint.address).await.map_err(failed)?;
    let peer = Peer::of(stream.agreed(), dialer.principal());
    Ok((stream, peer))
}

/// Returns the TLS settings without the offer to exchange the metadata of sidecars.
fn without_greeting(config: &Arc<Connector>) -> Result<Arc<Connector>, skysail_identity::Error> {
    let others = config.alpn().iter().map(|protocol| &**protocol);
    let others: Vec<&[u8]> = others.filter(|protocol| *protocol != greeting::ALPN).collect();
    if others.len() == config.alpn().len() {
        return Ok(Arc::clone(config));
    }
    config.offering(&others).map(Arc::new)
}

/// Connects to an endpoint. With several addresses, the first to answer wins (RFC 8305): the next one is tried
/// after a failure or a delay.
async fn connect_endpoint(
    endpoint: &Endpoint,
    cluster: &Cluster,
    mark: Option<u32>,
) -> io::Result<TcpStream> {
    if let Some(path) = &endpoint.pipe {
        return dial_pipe(path);
    }
    if endpoint.others.is_empty() {
        return dial(endpoint.address, cluster, mark).await;
    }
    let mut addresses = std::iter::once(&endpoint.address).chain(&endpoint.others);
    let mut attempts: Vec<Pin<Box<dyn Future<Output = io::Result<TcpStream>> + '_>>> = Vec::new();
    let (mut timer, mut next) = (Timer::default(), Instant::now());
    let mut failure = io::ErrorKind::NotFound.into();
    poll_fn(|cx| {
        loop {
            let mut index = 0;
            while let Some(attempt) = attempts.get_mut(index) {
                match attempt.as_mut().poll(cx) {
                    Poll::Ready(Ok(stream)) => return Poll::Ready(Ok(stream)),
                    Poll::Ready(Err(error)) => {
                        drop(attempts.swap_remove(index));
                        (failure, next) = (error, Instant::now());
                    }
                    Poll::Pending => index += 1,
                }
            }
            if !attempts.is_empty() && timer.poll(cx, Some(next)).is_pending() {
                return Poll::Pending;
            }
            match addresses.next() {
                Some(address) => attempts.push(Box::pin(dial(*address, cluster, mark))),
                None if attempts.is_empty() => {
                    return Poll::Ready(Err(std::mem::replace(&mut failure, io::ErrorKind::Other.into())));
                }
                None => return Poll::Pending,
            }
            next = Instant::now() + ATTEMPT_DELAY;
        }
    })
    .await
}

/// Connects to a Unix domain socket. As in Envoy, a leading `@` stands for the abstract namespace.
///
/// All system calls of a stream are the same for both socket families, so the rest of the proxy uses the socket as if
/// it were TCP. Only its addresses are unknown.
fn dial_pipe(path: &str) -> io::Result<TcpStream> {
    let address = pipe_path(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None)?;
    // This succeeds or fails at once: a full accept queue is an error.
    socket.connect(&address)?;
    TcpStream::from_std(std::net::TcpStream::from(OwnedFd::from(socket)))
}

/// Returns the address of a Unix domain socket for system calls.
pub(crate) fn pipe_path(path: &str) -> io::Result<SockAddr> {
    match path.strip_prefix('@') {
        Some(name) => SockAddr::unix(format!("\0{name}")),
        None => SockAddr::unix(path),
    }
}

/// Opens a TCP connection.
async fn dial(address: SocketAddr, cluster: &Cluster, mark: Option<u32>) -> io::Result<TcpStream> {
    // A dedicated source address makes a dedicated port unnecessary.
    let as_client = cluster.sources.is_empty() && matches!(cluster.discovery, Discovery::OriginalDst(_));
    let tries = if as_client { PORT_TRIES } else { 0 };
    for port in (0..tries).filter_map(|_| unassigned_port()) {
        match dial_from(port, address, cluster, mark).await {
            Err(error) if matches!(error.kind(), ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable) => {}
            done => return done,
        }
    }
    dial_from(0, address, cluster, mark).await
}

/// Connects from this source port; 0 lets the kernel choose.
async fn dial_from(
    port: u16,
    address: SocketAddr,
    cluster: &Cluster,
    mark: Option<u32>,
) -> io::Result<TcpStream> {
    let socket =
        Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    if let Some(mark) = mark {
        socket.set_mark(mark)?;
    }
    if let Some(keepalive) = &cluster.keepalive {
        socket.set_tcp_keepalive(&tcp_keepalive(keepalive))?;
    }
    let source = cluster.sources.iter().find(|source| source.is_ipv4() == address.is_ipv4());
    let any = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    if port != 0 {
        // The port is shared by connections to different destinations.
        socket.set_reuse_address(true)?;
    }
    if source.is_some() || port != 0 {
        socket.bind(&SocketAddr::new(source.copied().unwrap_or(any), port).into())?;
    }
    TcpSocket::from_std_stream(socket.into()).connect(address).await
}

/// Returns a source port that the kernel does not assign to other sockets. Connection tracking keeps the
/// decision not to intercept an unanswered connection for two minutes. It would apply to the application's next
/// connection if that had the same source port. Returns `None` if the kernel assigns all ports.
fn unassigned_port() -> Option<u16> {
    static UNASSIGNED: LazyLock<Option<RangeInclusive<u16>>> = LazyLock::new(|| {
        let given = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
        let last: u16 = given.split_whitespace().nth(1)?.parse().ok()?;
        (u16::MAX - last >= MIN_UNASSIGNED_PORTS).then(|| last + 1..=u16::MAX)
    });
    UNASSIGNED.clone().map(fastrand::u16)
}

fn tcp_keepalive(config: &Keepalive) -> TcpKeepalive {
    let mut keepalive = TcpKeepalive::new();
    if let Some(probes) = config.probes {
        keepalive = keepalive.with_retries(probes);
    }
    if let Some(time) = config.time {
        keepalive = keepalive.with_time(time);
    }
    if let Some(interval) = config.interval {
        keepalive = keepalive.with_interval(interval);
    }
    keepalive
}

fn tls_settings(tls: Option<&ClientTls>, offer: &AlpnOffer) -> Result<Option<UpstreamTls>, Error> {
    let Some(tls) = tls else { return Ok(None) };
    let configs = tls.config.load();
    let Some(configs) = configs.as_ref() else {
        let names = tls.secrets.join(", ");
        let cause = format!("TLS error: one of these secrets has not arrived: {names}");
        return Err(Error::caused(Kind::ConnectFailed, cause));
    };
    Ok(Some(UpstreamTls { config: offer.config(configs).clone(), host: offer.host.clone() }))
}

/// Returns the host of a request for SNI; `None` for an IP address, which SNI excludes (RFC 6066, section 3).
fn sni_host<'a>(auto: &AutoSni, head: &'a RequestHead) -> Option<&'a str> {
    let header = auto.header.as_deref().and_then(|name| head.header(name));
    let named = header.and_then(|value| str::from_utf8(value).ok()).filter(|value| !value.is_empty());
    let host = route::without_port(named.unwrap_or_else(|| head.authority()));
    let is_address = host.starts_with('[') || host.parse::<IpAddr>().is_ok();
    (!is_address).then_some(host)
}

/// Returns whether the current trusted roots verify the server of a connection.
pub(crate) fn is_trusted(link: &Link, distrusted: u64) -> bool {
    let (Some(UpstreamTls { config, host }), Some(certificate)) = (&link.tls, &link.peer.certificate) else {
        return true;
    };
    let Ok(name) = server_name(&link.host.endpoint, host.as_deref()) else { return true };
    certificate
        .is_trusted(distrusted, Arc::as_ptr(config).addr(), |chain| config.recheck(chain, &name).is_ok())
}

/// Returns the server name for TLS: the request's host with `auto_sni`, else the configured name, else the
/// endpoint's host name, else its address.
fn server_name(endpoint: &Endpoint, host: Option<&str>) -> Result<ServerName<'static>, Error> {
    if let Some(host) = host {
        let refused = |_| {
            let cause = format_args!("TLS error: the requested host {host:?} is not a valid server name");
            Error::caused(Kind::ConnectFailed, cause)
        };
        return ServerName::try_from(host.to_owned()).map_err(refused);
    }
    let configured = endpoint.tls.as_ref().and_then(|tls| tls.sni.clone());
    let host = || ServerName::try_from(endpoint.hostname.as_deref()?.to_owned()).ok();
    Ok(configured.or_else(host).unwrap_or_else(|| ServerName::from(endpoint.address.ip())))
}

/// Returns the text of an error without the number in parentheses that `io::Error` appends.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error ") {
        Some((text, _)) => text.to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, time::Duration};

    use super::*;

    #[tokio::test]
    async fn connections_to_original_destinations_use_ports_outside_the_kernels_range() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let mut cluster = Cluster::new("c");
        let apart = |stream: &TcpStream| {
            let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
            let last: u16 = range.split_whitespace().nth(1).unwrap().parse().unwrap();
            stream.local_addr().unwrap().port() > last
        };
        assert!(!apart(&dial(address, &cluster, None).await.unwrap()));
        cluster.discovery = Discovery::OriginalDst(None);
        let all_given = unassigned_port().is_none();
        let mut held = Vec::new();
        for _ in 0..40 {
            let stream = dial(address, &cluster, None).await.unwrap();
            held.push((apart(&stream) || all_given, stream));
        }
        assert!(held.iter().all(|(apart, _)| *apart), "three taken ports in a row are very unlikely");
        let taken =
            dial_from(held[0].1.local_addr().unwrap().port(), address, &cluster, None).await.unwrap_err();
        assert!(matches!(taken.kind(), ErrorKind::AddrInUse | ErrorKind::AddrNotAvailable), "{taken}");
    }

    #[tokio::test]
    async fn tcp_keepalive_is_set_as_configured() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        let mut cluster = Cluster::new("c");
        let plain = dial(address, &cluster, None).await.unwrap();
        assert!(!socket2::SockRef::from(&plain).keepalive().unwrap());
        let (time, interval) = (Some(Duration::from_secs(70)), Some(Duration::from_secs(7)));
        cluster.keepalive = Some(Keepalive { probes: Some(3), time, interval });
        let kept = dial(address, &cluster, None).await.unwrap();
        let kept = socket2::SockRef::from(&kept);
        assert!(kept.keepalive().unwrap());
        assert_eq!(kept.tcp_keepalive_retries().unwrap(), 3);
        assert_eq!(Some(kept.tcp_keepalive_time().unwrap()), time);
        assert_eq!(Some(kept.tcp_keepalive_interval().unwrap()), interval);
    }
}
