//! TLS on both sides, as the request path uses it.
//!
//! Certificates are live: each handshake takes the newest certificate and the newest trust bundle.

use std::sync::Arc;

use skysail_identity::{Acceptor, Connector};

use crate::state::PublishedOption;

/// Terminating TLS. Source: `envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext`.
#[derive(Debug)]
pub struct ServerTls {
    /// TLS settings; `None` until the secrets that they name have arrived. Until then, connections are closed.
    pub config: Arc<PublishedOption<Acceptor>>,
}

/// Originating TLS. Source: `envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext`.
#[derive(Debug)]
pub struct ClientTls {
    /// TLS settings; `None` until the secrets that they name have arrived. Until then, connections fail. There is one
    /// configuration for each list of ALPN protocols in use.
    pub config: Arc<PublishedOption<ClientConfigs>>,
    /// SNI to send; `None` sends the host of the request, or no SNI.
    pub sni: Option<rustls::pki_types::ServerName<'static>>,
    /// ALPN protocols to offer where the request path does not choose them.
    pub alpn: Arc<[Box<[u8]>]>,
    /// Names of the secrets that the settings need.
    pub secrets: Box<[Box<str>]>,
}

/// Client configurations that differ in the ALPN protocols they offer.
#[derive(Debug)]
pub struct ClientConfigs {
    /// Offers the ALPN protocols of the TLS context.
    pub own: Arc<Connector>,
    /// For HTTP/2: offers the same protocols, or `h2` if the context has none.
    pub http2: Arc<Connector>,
    /// Offers `istio-http/1.1`, `istio-http/1.0`, `http/1.1` and further ones: the choice of filter `istio.alpn` for
    /// HTTP/1.
    pub istio_http1: Arc<Connector>,
    /// Offers `istio-h2`, `h2`: the choice of filter `istio.alpn` for HTTP/2.
    pub istio_h2: Arc<Connector>,
}
