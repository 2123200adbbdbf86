//! HTTP client for key sets (RFC 7517) and OpenID Connect Discovery documents.
//!
//! Owners of namespaces may write the URL, so the client restricts the requests: GET without credentials, `http` or
//! `https`, no link-local or cloud metadata address at any redirect, bounded time, size and number of redirects. An
//! answer that is not a key set is not published, so that nothing else can be read back from a proxy.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use hyper::{
    Request, StatusCode, Uri,
    body::{Body as _, Incoming},
    client::conn::http1,
    header::{ACCEPT, HOST, LOCATION, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
};
use serde::Deserialize;
use skysail_model::{KeySource, MAX_KEY_SET};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::{
    metrics::Metrics,
    resolve::{Answer, Family, Servers, lookup},
};

/// Reason why a fetch failed.
pub(super) type FetchError = Arc<str>;

/// Maximum number of redirects.
const MAX_REDIRECTS: usize = 3;
/// Maximum size of a response's head in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Maximum timeout, whatever the policy says.
const MAX_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum number of addresses that are tried.
const MAX_ADDRESSES: usize = 4;
/// Path of the discovery document. Source: OpenID Connect Discovery 1.0, section 4.
const DISCOVERY: &str = "/.well-known/openid-configuration";
/// Variable with the path of the trusted roots, as in OpenSSL.
const ROOTS_VARIABLE: &str = "SSL_CERT_FILE";
/// Files with the system's trusted roots.
const ROOTS: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Metadata services of clouds outside of the link-local ranges.
const METADATA: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
];

/// Part of a discovery document.
#[derive(Deserialize)]
struct DiscoveryDocument {
    jwks_uri: String,
}

/// Fetches key sets.
pub(super) struct Fetcher {
    pub(super) servers: Servers,
    pub(super) metrics: Arc<Metrics>,
}

impl Fetcher {
    /// Fetches a key set.
    pub(super) async fn fetch(&self, source: &KeySource, limit: Duration) -> Result<Arc<str>, FetchError> {
        let limit = limit.min(MAX_TIMEOUT);
        let fetched = timeout(limit, self.key_set(source)).await;
        let result = fetched.unwrap_or_else(|_| Err(format!("no answer within {limit:?}").into()));
        self.metrics.record_key_fetch(result.is_ok());
        result
    }

    async fn key_set(&self, source: &KeySource) -> Result<Arc<str>, FetchError> {
        let text = match source {
            KeySource::Uri(uri) => self.get(uri).await?,
            KeySource::Issuer(issuer) => {
                let text = self.get(&format!("{}{DISCOVERY}", issuer.trim_end_matches('/'))).await?;
                let found: DiscoveryDocument = serde_json::from_str(&text)
                    .map_err(|_| "the discovery document is not JSON with a jwks_uri")?;
                self.get(&found.jwks_uri).await?
            }
        };
        // The text of the answer may be secret, so the error does not quote it.
        skysail_model::key_set(&text).map_err(|_| "the answer is not a key set")?;
        Ok(text.into())
    }

    /// Returns the body of a URL, following redirects.
    async fn get(&self, url: &str) -> Result<String, FetchError> {
        let mut target = FetchTarget::parse(url)?;
        for _ in 0..=MAX_REDIRECTS {
            match self.request(&target).await? {
                Outcome::Body(body) => return Ok(body),
                Outcome::Redirect(to) => target = target.redirected(&to)?,
            }
        }
        Err(format!("more than {MAX_REDIRECTS} redirects").into())
    }

    async fn request(&self, target: &FetchTarget) -> Result<Outcome, FetchError> {
        let socket = self.connect(target).await?;
        if !target.is_tls {
            return exchange(socket, target).await;
        }
        let roots = tokio::task::spawn_blocking(trusted_roots).await.map_err(text)??;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(text)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(target.host.clone()).map_err(text)?;
        let connector = TlsConnector::from(Arc::new(config));
        exchange(connector.connect(name, socket).await.map_err(text)?, target).await
    }

    async fn connect(&self, target: &FetchTarget) -> Result<TcpStream, FetchError> {
        let mut failure: FetchError = format!("{} has no address", target.host).into();
        for address in self.addresses(&target.host).await?.into_iter().take(MAX_ADDRESSES) {
            if is_forbidden(address) {
                failure = format!("{} has the address {address}, which is not allowed", target.host).into();
                continue;
            }
            match TcpStream::connect(SocketAddr::new(address, target.port)).await {
                Ok(socket) => return Ok(socket),
                Err(error) => failure = format!("{address}: {error}").into(),
            }
        }
        Err(failure)
    }

    async fn addresses(&self, host: &str) -> Result<Vec<IpAddr>, FetchError> {
        if let Ok(address) = host.trim_start_matches('[').trim_end_matches(']').parse() {
            return Ok(vec![address]);
        }
        if host == "localhost" {
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        }
        let (mut addresses, mut failure) = (Vec::new(), None);
        for family in Family::BOTH {
            match lookup(&self.servers, &self.metrics, host, family).await {
                Ok(Answer::Addresses(found, _)) => addresses.extend(found),
                Ok(Answer::NoAddresses { .. }) => {}
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if addresses.is_empty() => Err(format!("DNS lookup of {host}: {error}").into()),
            _ => Ok(addresses),
        }
    }
}

/// Result of a request.
enum Outcome {
    Body(String),
    Redirect(String),
}

/// A URL, parsed.
struct FetchTarget {
    is_tls: bool,
    host: String,
    port: u16,
    uri: Uri,
}

impl FetchTarget {
    fn parse(url: &str) -> Result<Self, FetchError> {
        let uri: Uri = url.parse().map_err(|_| "not a URL")?;
        let is_tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("the URL has neither http nor https".into()),
        };
        let authority = uri.authority().ok_or("the URL has no host")?;
        if authority.as_str().contains('@') {
            return Err("the URL has a user name".into());
        }
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        Ok(Self { is_tls, host, port, uri })
    }

    /// Returns the target of a redirect. It must not lead from TLS to plain text.
    fn redirected(&self, to: &str) -> Result<Self, FetchError> {
        let authority = self.uri.authority().map_or("", |authority| authority.as_str());
        let scheme = if self.is_tls { "https" } else { "http" };
        let target = match to.starts_with('/') && !to.starts_with("//") {
            true => Self::parse(&format!("{scheme}://{authority}{to}"))?,
            false => Self::parse(to)?,
        };
        if self.is_tls && !target.is_tls {
            return Err("redirect from https to http".into());
        }
        Ok(target)
    }
}

/// Sends the request and reads the response.
async fn exchange<S>(stream: S, target: &FetchTarget) -> Result<Outcome, FetchError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = http1::Builder::new();
    builder.max_buf_size(MAX_HEAD);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(text)?;
    let connection = AbortOnDrop(tokio::spawn(connection));
    let path = target.uri.path_and_query().map_or("/", |path| path.as_str());
    let authority = target.uri.authority().map_or("", |authority| authority.as_str());
    let request = Request::get(path)
        .header(HOST, authority)
        .header(ACCEPT, "application/jwk-set+json, application/json")
        .header(USER_AGENT, "skysaild")
        .body(String::new())
        .map_err(text)?;
    let response = sender.send_request(request).await.map_err(text)?;
    let status = response.status();
    if status.is_redirection() {
        let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
        let location = location.ok_or_else(|| format!("status {status} without a location"))?;
        return Ok(Outcome::Redirect(location.to_owned()));
    }
    if status != StatusCode::OK {
        return Err(format!("status {status}").into());
    }
    let body = read(response.into_body()).await?;
    drop(connection);
    Ok(Outcome::Body(body))
}

/// A task that ends with this value.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn read(mut body: Incoming) -> Result<String, FetchError> {
    let mut bytes = Vec::new();
    while let Some(frame) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let Ok(data) = frame.map_err(text)?.into_data() else { continue };
        if bytes.len() + data.len() > MAX_KEY_SET {
            return Err(format!("the answer has more than {MAX_KEY_SET} bytes").into());
        }
        bytes.extend_from_slice(&data);
    }
    String::from_utf8(bytes).map_err(|_| "the answer is not UTF-8".into())
}

/// Returns the trusted roots of `SSL_CERT_FILE`, else of the system.
fn trusted_roots() -> Result<RootCertStore, FetchError> {
    let given = std::env::var_os(ROOTS_VARIABLE);
    let files = given.iter().map(std::path::PathBuf::from);
    let files = files.chain(ROOTS.iter().filter(|_| given.is_none()).map(std::path::PathBuf::from));
    for file in files {
        let Ok(pem) = fs::read(&file) else { continue };
        let mut store = RootCertStore::empty();
        let certificates = CertificateDer::pem_slice_iter(&pem).flatten();
        store.add_parsable_certificates(certificates);
        if !store.is_empty() {
            return Ok(store);
        }
    }
    Err(format!("no trusted roots; set {ROOTS_VARIABLE} to a file with certificates").into())
}

/// Returns whether an address is forbidden: link-local addresses, metadata services of clouds, and addresses that name
/// no single host.
fn is_forbidden(address: IpAddr) -> bool {
    let address = address.to_canonical();
    let is_local = match address {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    is_local || address.is_unspecified() || address.is_multicast() || METADATA.contains(&address)
}

fn text(error: impl std::fmt::Display) -> FetchError {
    error.to_string().into()
}

#[cfg(test)]
mod tests;
