//! Connecting to upstreams: TCP with the marks and source addresses that interception needs, then TLS.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    sync::Arc,
};

use rustls::pki_types::ServerName;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpSocket, TcpStream};

use crate::{
    config::{Endpoint, tls::ClientTls},
    context::Shared,
    error::{Error, Kind},
    peer::Peer,
    pool::{Full, Host, Place, Pool, Upstream, bump},
    socket::Stream,
};

/// What will be spoken on a connection, which decides what TLS offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Offer {
    /// The cluster's own list.
    Own,
    /// HTTP/1.1 between sidecars (filter `istio.alpn`).
    IstioHttp1,
}

/// An idle connection to an endpoint, if there is one.
pub(crate) fn take(pool: &Pool, host: &Host, offer: Offer) -> Result<Option<Upstream>, Error> {
    let config = client_config(host.endpoint.tls.as_deref(), offer)?;
    Ok(pool.take(host, config.as_ref()))
}

/// A connection to an endpoint: a new one, or one that becomes free while waiting for a place. `fresh` insists on a new one.
pub(crate) async fn get(
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    offer: Offer,
    shared: &Shared,
    fresh: bool,
) -> Result<Upstream, Error> {
    let config = client_config(host.endpoint.tls.as_deref(), offer)?;
    let mut waiting = None;
    loop {
        let (freed, room) = (host.freed.notified(), pool.room.notified());
        match pool.admit(host) {
            Ok(place) => return open(pool, host, config, shared, place).await,
            Err(Full) if waiting.is_none() => {
                waiting = Some(pool.pending().ok_or_else(|| Error::new(Kind::Overflow))?);
            }
            Err(Full) => {}
        }
        tokio::select! {
            () = freed => {}
            () = room => {}
        }
        if let Some(upstream) = pool.take(host, config.as_ref()).filter(|_| !fresh) {
            return Ok(upstream);
        }
    }
}

async fn open(
    pool: &Rc<Pool>,
    host: &Rc<Host>,
    config: Option<Arc<rustls::ClientConfig>>,
    shared: &Shared,
    place: Place,
) -> Result<Upstream, Error> {
    let connect = establish(&host.endpoint, config.clone(), pool.cluster.source, shared);
    let result = match tokio::time::timeout(pool.cluster.connect_timeout, connect).await {
        Ok(Ok((stream, peer))) => return Ok(Pool::opened(place, stream, peer, config)),
        Ok(Err(error)) => error,
        Err(_) => Error::new(Kind::ConnectTimeout),
    };
    bump(&host.totals.connect_failures);
    pool.stats.cx_connect_fail.inc();
    if result.kind == Kind::ConnectTimeout {
        pool.stats.cx_connect_timeout.inc();
    }
    Err(result)
}

async fn establish(
    endpoint: &Endpoint,
    config: Option<Arc<rustls::ClientConfig>>,
    source: Option<IpAddr>,
    shared: &Shared,
) -> Result<(Stream, Peer), Error> {
    let refused = |error: io::Error| {
        Error::caused(Kind::ConnectFailed, format_args!("delayed connect error: {}", reason(&error)))
    };
    let tcp = dial(endpoint.address, source, shared.mark).await.map_err(refused)?;
    let mut stream = Stream::new(tcp);
    let Some(config) = config else { return Ok((stream, Peer::plain())) };
    let name = server_name(endpoint);
    let failed =
        |error: io::Error| Error::caused(Kind::ConnectFailed, format_args!("TLS error: {}", reason(&error)));
    stream.connect_tls(config, name).await.map_err(failed)?;
    let peer = stream.peer(shared.principal());
    Ok((stream, peer))
}

/// Opens a TCP connection.
async fn dial(address: SocketAddr, source: Option<IpAddr>, mark: Option<u32>) -> io::Result<TcpStream> {
    let socket =
        Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    if let Some(mark) = mark {
        socket.set_mark(mark)?;
    }
    // An address of the other family cannot be meant for this endpoint.
    if let Some(source) = source.filter(|source| source.is_ipv4() == address.is_ipv4()) {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    TcpSocket::from_std_stream(socket.into()).connect(address).await
}

fn client_config(tls: Option<&ClientTls>, offer: Offer) -> Result<Option<Arc<rustls::ClientConfig>>, Error> {
    let Some(tls) = tls else { return Ok(None) };
    let configs = tls.config.load();
    let Some(configs) = configs.as_ref() else {
        let cause = "TLS error: the certificates for this cluster have not arrived yet";
        return Err(Error::caused(Kind::ConnectFailed, cause));
    };
    Ok(Some(match offer {
        Offer::Own => configs.own.clone(),
        Offer::IstioHttp1 => configs.istio_http1.clone(),
    }))
}

/// The name to ask for: the configured one, else the host's, else its address, which TLS does not send.
fn server_name(endpoint: &Endpoint) -> ServerName<'static> {
    let configured = endpoint.tls.as_ref().and_then(|tls| tls.sni.clone());
    let host = || ServerName::try_from(endpoint.hostname.as_deref()?.to_owned()).ok();
    configured.or_else(host).unwrap_or_else(|| ServerName::from(endpoint.address.ip()))
}

/// What the system or rustls says, without the number in brackets that `io::Error` adds.
fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error ") {
        Some((text, _)) => text.to_owned(),
        None => text,
    }
}
