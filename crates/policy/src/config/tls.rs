//! TLS on either side, as the request path uses it.
//!
//! Certificates are live: each handshake takes the newest certificate and what is trusted by then.

use std::sync::Arc;

use skysail_identity::{Acceptor, Connector};

use crate::state::PublishedOption;

/// Terminating TLS. Source: `envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext`.
#[derive(Debug)]
pub struct ServerTls {
    /// `None` until the secrets it names have arrived: connections are closed until then.
    pub config: Arc<PublishedOption<Acceptor>>,
}

/// Originating TLS. Source: `envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext`.
#[derive(Debug)]
pub struct ClientTls {
    /// `None` until the secrets it names have arrived: connections fail until then. The handle holds one
    /// configuration for each list of ALPN protocols that is in use.
    pub config: Arc<PublishedOption<ClientConfigs>>,
    /// Server name to send; `None` sends the host's, or none.
    pub sni: Option<rustls::pki_types::ServerName<'static>>,
    /// The protocols to offer where the request path does not choose by itself.
    pub alpn: Arc<[Box<[u8]>]>,
}

/// Client configurations that differ in the protocols they offer.
#[derive(Debug)]
pub struct ClientConfigs {
    /// With the context's own list.
    pub own: Arc<Connector>,
    /// The same for HTTP/2: `h2`, where the context has no list.
    pub http2: Arc<Connector>,
    /// Offering `istio-http/1.1`, `istio-http/1.0`, `http/1.1`, and so on: what filter `istio.alpn` asks for HTTP/1.
    pub istio_http1: Arc<Connector>,
    /// Offering `istio-h2`, `h2`: the same for HTTP/2.
    pub istio_h2: Arc<Connector>,
}
