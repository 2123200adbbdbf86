//! Checks of a program in the sidecar's network namespace by HTTP, TCP and gRPC, with the meanings of the kubelet. They
//! serve the health of a machine ([`super::health`]) and the probes of a pod ([`super::probes`]).
//!
//! Certificates are not verified. A redirect to the same host is followed, any other one ends the check.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use anyhow::{Context as _, bail, ensure};
use axum::{
    body::{Body, Bytes},
    http::{HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header, uri::Scheme},
};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::Deserialize;
use skysail_identity::TlsSpec;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinSet,
};
use tokio_stream::StreamExt as _;
use tonic::{client::Grpc, codegen::http::uri::PathAndQuery, transport::Endpoint};
use tonic_prost::ProstCodec;

use crate::discovery::remote::connect_from;

/// Host of checks that name none.
pub(super) const LOCAL: &str = "localhost";
/// Maximum size of the head of a response in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Maximum size of the part of a body that is read, in bytes. Source: the kubelet's `maxRespBodyLength`.
const MAX_BODY: usize = 10 << 10;
/// Maximum number of redirects that are followed.
const MAX_REDIRECTS: usize = 10;
/// Prefix of the kubelet's agent, which programs exclude from logs.
const AGENT: HeaderValue = HeaderValue::from_static("kube-probe/skysail");
const GRPC_CHECK: &str = "/grpc.health.v1.Health/Check";
/// `SERVING` of `grpc.health.v1.HealthCheckResponse.ServingStatus`.
const SERVING: i32 = 1;

/// Check by HTTP.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct HttpCheck {
    pub(super) path: String,
    pub(super) port: u16,
    pub(super) host: String,
    pub(super) scheme: String,
    pub(super) http_headers: Vec<CheckHeader>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct CheckHeader {
    name: String,
    value: String,
}

/// Check by a TCP connection.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SocketCheck {
    pub(super) host: String,
    pub(super) port: u16,
}

/// Check by gRPC's health service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct GrpcCheck {
    port: u16,
    service: Option<String>,
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Response to a check.
#[derive(Clone, Debug)]
pub(super) struct CheckResponse {
    pub(super) status: StatusCode,
    /// The first bytes of the body.
    pub(super) body: Bytes,
}

/// Host to check, and how it is reached.
#[derive(Clone, Debug)]
pub(super) struct CheckTarget {
    pub(super) host: String,
    /// `SO_MARK` of sockets.
    pub(super) mark: Option<u32>,
    /// Whether connections come from 127.0.0.6 or ::6. Istio's rules redirect connections of the sidecar to an address
    /// of its own pod back to the sidecar, except those.
    pub(super) bypasses_interception: bool,
}

impl CheckTarget {
    /// Returns `localhost`, reached as the sidecar's own peers are.
    pub(super) fn local(mark: Option<u32>) -> Self {
        Self { host: LOCAL.to_owned(), mark, bypasses_interception: false }
    }

    async fn connect(&self, port: u16) -> io::Result<TcpStream> {
        let source = |to: SocketAddr| -> Option<IpAddr> {
            let v6 = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);
            let own = if to.is_ipv4() { Ipv4Addr::new(127, 0, 0, 6).into() } else { v6.into() };
            self.bypasses_interception.then_some(own)
        };
        connect_from(&self.host, port, self.mark, source).await
    }

    /// Returns host and port as in a URI.
    fn authority(&self, port: u16) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{port}", self.host),
            false => format!("{}:{port}", self.host),
        }
    }
}

/// Connects, and closes the connection.
pub(super) async fn socket(port: u16, target: &CheckTarget) -> anyhow::Result<()> {
    target.connect(port).await?;
    Ok(())
}

/// Sends a request, follows redirects to the same host, and returns the response.
pub(super) async fn http(
    check: &HttpCheck,
    method: &Method,
    target: &CheckTarget,
) -> anyhow::Result<CheckResponse> {
    let slash = if check.path.starts_with('/') { "" } else { "/" };
    let scheme = if check.scheme.eq_ignore_ascii_case("https") { "https" } else { "http" };
    let url = format!("{scheme}://{}{slash}{}", target.authority(check.port), check.path);
    let mut url: Uri = url.parse().context("the path is not valid")?;
    for _ in 0..=MAX_REDIRECTS {
        // The connection ends with its task at the end of this round.
        let mut tasks = JoinSet::new();
        let response = request(check, method, &url, target, &mut tasks).await?;
        match redirect(&response, &url) {
            Some(next) => url = next,
            None => {
                let status = response.status();
                return Ok(CheckResponse { status, body: first_bytes(response.into_body()).await? });
            }
        }
    }
    bail!("more than {MAX_REDIRECTS} redirects")
}

async fn request(
    check: &HttpCheck,
    method: &Method,
    url: &Uri,
    target: &CheckTarget,
    tasks: &mut JoinSet<hyper::Result<()>>,
) -> anyhow::Result<axum::http::Response<Incoming>> {
    let is_tls = url.scheme() == Some(&Scheme::HTTPS);
    let port = url.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let path = url.path_and_query().map_or("/", |path| path.as_str());
    let mut request = Request::builder().method(method).uri(path);
    let (mut has_host, mut has_agent) = (false, false);
    for CheckHeader { name, value } in &check.http_headers {
        let name: HeaderName = name.parse().with_context(|| format!("header {name:?}"))?;
        has_host |= name == header::HOST;
        has_agent |= name == header::USER_AGENT;
        request = request.header(name, value);
    }
    if !has_host {
        request = request.header(header::HOST, target.authority(port));
    }
    if !has_agent {
        request = request.header(header::USER_AGENT, AGENT);
    }
    let request = request
        .header(header::ACCEPT, "*/*")
        .header(header::CONNECTION, "close")
        .body(Body::empty())
        .context("the path or a header is not valid")?;
    let stream = target.connect(port).await?;
    if !is_tls {
        return send(request, stream, tasks).await;
    }
    let name = ServerName::try_from(target.host.clone())?;
    let connector = tokio_rustls::TlsConnector::from(TlsSpec::default().client()?);
    send(request, connector.connect(name, stream).await?, tasks).await
}

async fn send(
    request: Request<Body>,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    tasks: &mut JoinSet<hyper::Result<()>>,
) -> anyhow::Result<axum::http::Response<Incoming>> {
    let (mut sender, connection) =
        http1::Builder::new().max_buf_size(MAX_HEAD).handshake(TokioIo::new(stream)).await?;
    tasks.spawn(connection);
    Ok(sender.send_request(request).await?)
}

/// Returns the URL of a redirect to the same host.
fn redirect<B>(response: &axum::http::Response<B>, from: &Uri) -> Option<Uri> {
    if ![301, 302, 303, 307, 308].contains(&response.status().as_u16()) {
        return None;
    }
    let location: Uri = response.headers().get(header::LOCATION)?.to_str().ok()?.parse().ok()?;
    if location.host().is_some() {
        return (location.host() == from.host() && location.scheme().is_some()).then_some(location);
    }
    let mut parts = from.clone().into_parts();
    parts.path_and_query = Some(location.path_and_query()?.clone());
    Uri::from_parts(parts).ok()
}

async fn first_bytes(body: Incoming) -> anyhow::Result<Bytes> {
    let (mut bytes, mut pieces) = (Vec::new(), Body::new(body).into_data_stream());
    while bytes.len() < MAX_BODY
        && let Some(piece) = pieces.next().await
    {
        bytes.extend_from_slice(&piece.context("the body is not complete")?);
    }
    bytes.truncate(MAX_BODY);
    Ok(bytes.into())
}

/// Asks gRPC's health service.
///
/// # Errors
/// It does not answer, or not with `SERVING`.
pub(super) async fn grpc(check: &GrpcCheck, target: &CheckTarget) -> anyhow::Result<()> {
    let port = check.port;
    let endpoint = Endpoint::from_shared(format!("http://{}", target.authority(port)))?;
    let target = target.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let target = target.clone();
        async move { target.connect(port).await.map(TokioIo::new) }
    });
    let channel = endpoint.connect_with_connector(connector).await?;
    let mut client = Grpc::new(channel);
    client.ready().await?;
    let service = check.service.clone().unwrap_or_default();
    let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
    let request = tonic::Request::new(HealthCheckRequest { service });
    let response = client.unary(request, PathAndQuery::from_static(GRPC_CHECK), codec).await?;
    let status = response.into_inner().status;
    ensure!(status == SERVING, "the service has health status {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    /// Serves a response to each connection, one after the other. Returns the port and the requests.
    async fn serve(responses: Vec<String>) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let mut requests = Vec::new();
            for response in responses {
                let (mut stream, from) = listener.accept().await.unwrap();
                assert_eq!(from.ip(), Ipv4Addr::new(127, 0, 0, 6));
                let mut request = String::new();
                while !request.ends_with("\r\n\r\n") {
                    request.push(stream.read_u8().await.unwrap().into());
                }
                requests.push(request);
                let port = port.to_string();
                stream.write_all(response.replace("PORT", &port).as_bytes()).await.unwrap();
            }
            requests
        });
        (port, task)
    }

    fn target() -> CheckTarget {
        CheckTarget { host: "127.0.0.1".into(), mark: None, bypasses_interception: true }
    }

    fn check(port: u16, more: &str) -> HttpCheck {
        serde_json::from_str(&format!(r#"{{"path": "ready?a=b", "port": {port}{more}}}"#)).unwrap()
    }

    #[tokio::test]
    async fn redirects_to_the_same_host_are_followed() {
        let redirect = |status: u16, to: &str| {
            format!("HTTP/1.1 {status} x\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n")
        };
        let responses = vec![
            redirect(301, "/next?c=d"),
            redirect(307, "http://127.0.0.1:PORT/last"),
            redirect(302, "https://elsewhere.example/"),
        ];
        let (port, requests) = serve(responses).await;
        let more =
            r#", "httpHeaders": [{"name": "host", "value": "own.example"}, {"name": "a", "value": "b"}]"#;
        let response = http(&check(port, more), &Method::GET, &target()).await.unwrap();
        assert_eq!(response.status, 302);
        let requests = requests.await.unwrap();
        for (request, path) in requests.iter().zip(["/ready?a=b", "/next?c=d", "/last"]) {
            assert!(request.starts_with(&format!("GET {path} HTTP/1.1\r\n")), "{request}");
            for line in ["host: own.example", "a: b", "user-agent: kube-probe/skysail", "connection: close"] {
                assert!(request.contains(&format!("\r\n{line}\r\n")), "{request}");
            }
        }
        let (port, _requests) = serve(vec![redirect(301, "/again"); MAX_REDIRECTS + 1]).await;
        let error = http(&check(port, ""), &Method::GET, &target()).await.unwrap_err();
        assert_eq!(error.to_string(), "more than 10 redirects");
    }

    #[tokio::test]
    async fn the_first_bytes_of_a_body_are_read() {
        let long = format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(20 << 10));
        let (port, _requests) = serve(vec![long]).await;
        let response = http(&check(port, ""), &Method::GET, &target()).await.unwrap();
        assert_eq!((response.status.as_u16(), response.body.len()), (200, MAX_BODY));
    }

    #[tokio::test]
    async fn what_is_no_request_is_refused() {
        for more in [
            r#", "path": "a b""#,
            r#", "httpHeaders": [{"name": "a b", "value": ""}]"#,
            r#", "httpHeaders": [{"name": "a", "value": "b\r\nc: d"}]"#,
        ] {
            let text = format!(r#"{{"port": 1{more}}}"#);
            let check: HttpCheck = serde_json::from_str(&text).unwrap();
            let error = http(&check, &Method::GET, &target()).await.unwrap_err().to_string();
            assert!(error.contains("valid") || error.contains("header"), "{text}: {error}");
        }
    }
}
