//! Connections to the control plane over TCP or a Unix socket, with a socket mark and TLS where configured.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use skysail_proto::Codec as _;
use skysail_xds::{
    client::BoxError,
    envoy::pb::envoy::config::{
        cluster::v3::Cluster as ClusterProto,
        core::v3::{Address, address, socket_address::PortSpecifier},
        endpoint::v3::lb_endpoint::HostIdentifier,
    },
};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tonic::transport::{Channel, Endpoint, Uri};

use crate::translate::{Reject, Translator};
use skysail_policy::config::tls::ClientTls;

/// Timeout of a connection attempt, TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of keep-alive pings.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Address and TLS settings of a control plane server.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    pub(crate) place: RemoteAddress,
    pub(crate) tls: Option<RemoteTls>,
    /// SO_MARK of the socket, which exempts it from traffic interception.
    pub(crate) mark: Option<u32>,
}

/// Address of a control plane server.
#[derive(Clone, Debug)]
pub(crate) enum RemoteAddress {
    /// Host and port; the host may be a DNS name.
    Tcp(String, u16),
    /// A Unix socket.
    Unix(PathBuf),
}

/// TLS settings of a control plane server.
#[derive(Clone, Debug)]
pub(crate) enum RemoteTls {
    /// Fixed configuration and server name.
    Fixed(Arc<rustls::ClientConfig>, ServerName<'static>),
    /// Settings of the cluster, available once its secrets have arrived.
    Cluster(Arc<ClientTls>),
}

impl Remote {
    /// Returns the server behind a static cluster: its first endpoint.
    pub(crate) fn from_cluster(
        body: &[u8],
        translator: Translator<'_>,
        mark: Option<u32>,
    ) -> Result<Self, Reject> {
        let proto = ClusterProto::from_slice(body).map_err(|error| Reject::new(error.to_string()))?;
        let assignment = proto.load_assignment.as_ref();
        let mut endpoints =
            assignment.iter().flat_map(|a| &a.endpoints).flat_map(|locality| &locality.lb_endpoints);
        let address = endpoints.find_map(|lb| match &lb.host_identifier {
            Some(HostIdentifier::Endpoint(endpoint)) => endpoint.address.as_ref(),
            _ => None,
        });
        let place = place(address).ok_or_else(|| {
            Reject::new(format!(
                "cluster {:?} has no endpoint with an address and port or a pipe",
                proto.name
            ))
        })?;
        let tls = translator.client_tls(&proto)?.map(RemoteTls::Cluster);
        Ok(Self { place, tls, mark })
    }

    /// Connects and returns the channel.
    pub(crate) async fn connect(&self) -> Result<Channel, BoxError> {
        let authority = match &self.place {
            RemoteAddress::Tcp(host, port) if host.contains(':') => format!("http://[{host}]:{port}"),
            RemoteAddress::Tcp(host, port) => format!("http://{host}:{port}"),
            RemoteAddress::Unix(_) => "http://localhost".to_owned(),
        };
        let endpoint = Endpoint::from_shared(authority)?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true);
        let remote = self.clone();
        let connector = tower::service_fn(move |_: Uri| {
            let remote = remote.clone();
            async move { tokio::time::timeout(CONNECT_TIMEOUT, remote.open()).await? }
        });
        Ok(endpoint.connect_with_connector(connector).await?)
    }

    async fn open(&self) -> Result<TokioIo<Box<dyn RemoteStream>>, BoxError> {
        let (tcp, host) = match &self.place {
            RemoteAddress::Unix(path) => {
                let stream = UnixStream::connect(path).await;
                let stream = stream.map_err(|error| format!("{}: {error}", path.display()))?;
                return Ok(TokioIo::new(Box::new(stream)));
            }
            RemoteAddress::Tcp(host, port) => (connect_tcp(host, *port, self.mark).await?, host),
        };
        let (config, name) = match &self.tls {
            None => return Ok(TokioIo::new(Box::new(tcp))),
            Some(RemoteTls::Fixed(config, name)) => (Arc::clone(config), name.clone()),
            Some(RemoteTls::Cluster(tls)) => {
                let configs = tls.config.load_full().ok_or("the TLS certificates have not arrived yet")?;
                let name = match &tls.sni {
                    Some(name) => name.clone(),
                    None => ServerName::try_from(host.clone())?,
                };
                (Arc::new(configs.own.config(&[b"h2"])), name)
            }
        };
        let stream = tokio_rustls::TlsConnector::from(config).connect(name, tcp).await?;
        Ok(TokioIo::new(Box::new(stream)))
    }
}

/// A bidirectional byte stream.
trait RemoteStream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}
impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> RemoteStream for T {}

fn place(address: Option<&Address>) -> Option<RemoteAddress> {
    match address?.address.as_ref()? {
        address::Address::Pipe(pipe) => Some(RemoteAddress::Unix(pipe.path.clone().into())),
        address::Address::SocketAddress(socket) => match socket.port_specifier {
            Some(PortSpecifier::PortValue(port)) => {
                Some(RemoteAddress::Tcp(socket.address.clone(), u16::try_from(port).ok()?))
            }
            _ => None,
        },
        address::Address::EnvoyInternalAddress(_) => None,
    }
}

/// Tries the host's addresses one after the other.
pub(crate) async fn connect_tcp(host: &str, port: u16, mark: Option<u32>) -> io::Result<TcpStream> {
    connect_from(host, port, mark, |_| None).await
}

/// Tries the host's addresses one after the other. `source` returns the source address for a destination. If the
/// source is not an address of this network namespace, the system chooses one.
pub(crate) async fn connect_from(
    host: &str,
    port: u16,
    mark: Option<u32>,
    source: impl Fn(SocketAddr) -> Option<IpAddr>,
) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
    for address in tokio::net::lookup_host((host, port)).await? {
        match connect_address(address, mark, source(address)).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(last)
}

async fn connect_address(
    address: SocketAddr,
    mark: Option<u32>,
    source: Option<IpAddr>,
) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if let Some(mark) = mark {
        socket2::SockRef::from(&socket).set_mark(mark)?;
    }
    if let Some(source) = source {
        match socket.bind((source, 0).into()) {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {}
            bound => bound?,
        }
    }
    let stream = socket.connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
