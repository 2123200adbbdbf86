//! A small HTTP client. It passes the response on in pieces as they arrive, so memory does not grow with its size.

pub mod grpc;
mod health;
mod http1;
mod http2;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Uri,
    header::{ACCEPT, CONTENT_LENGTH, HOST, TRANSFER_ENCODING, USER_AGENT},
};
use tokio::net::{TcpSocket, TcpStream};

pub use health::{Health, grpc_health};
pub use http1::Connection;

/// Maximum size of a body that is collected in memory, in bytes.
const MAX_BODY: usize = 64 << 20;

/// Maximum size of the body that a probe reads, in bytes. Source: Kubernetes' `pkg/probe/http`.
const MAX_PROBE_BODY: usize = 10 << 10;

/// Connects from this address, or from any if none is given.
pub(crate) async fn connect(to: SocketAddr, from: Option<Ipv4Addr>) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if let Some(from) = from {
        socket.bind(SocketAddr::new(IpAddr::V4(from), 0))?;
    }
    socket.connect(to).await
}

/// A request as given on a command line.
#[derive(Clone, Debug, Default)]
pub struct Call {
    /// Method: `GET`, `POST`, …
    pub method: String,
    /// URL: `[http://]HOST[:PORT][/PATH]`.
    pub url: String,
    /// `NAME: VALUE` lines. As with curl, `NAME:` removes a default header, and `NAME;` sends an empty one.
    pub headers: Vec<String>,
    /// Body.
    pub body: Option<Bytes>,
    /// Use HTTP/2 with prior knowledge (RFC 9113, section 3.3) instead of HTTP/1.1.
    pub http2: bool,
}

/// Step of an exchange. Heads are text with a line break after each line and an empty line at the end.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// The connection is open.
    Connected(SocketAddr),
    /// Head of the request, before it is sent.
    Request(&'a [u8]),
    /// Head of an interim response (1xx) or of the response.
    Head(&'a [u8]),
    /// Piece of the body.
    Body(&'a [u8]),
    /// Trailers.
    Trailers(&'a [u8]),
}

/// Sends a request, passes each step to `on` and returns the status.
///
/// # Errors
/// `InvalidInput` if the URL or a header is invalid. Otherwise when the host is unknown, when no complete response
/// arrives in time, or when `on` fails.
pub async fn exchange(
    call: &Call,
    limit: Duration,
    on: impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<u16> {
    exchange_from(call, None, limit, on).await
}

/// Like [`exchange`], from this source address.
async fn exchange_from(
    call: &Call,
    from: Option<Ipv4Addr>,
    limit: Duration,
    mut on: impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<u16> {
    let request = request(call)?;
    let body = call.body.clone().unwrap_or_default();
    let work = async {
        let to = address(request.uri()).await?;
        let stream = connect(to, from).await?;
        on(Event::Connected(to))?;
        if call.http2 {
            http2::exchange(stream, request, body, &mut on).await
        } else {
            http1::exchange(stream, &request, &body, &mut on).await
        }
    };
    within(limit, work).await
}

/// Limits the time of a request or a call.
///
/// # Errors
/// Those of the work; `TimedOut` if it takes longer.
pub async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no complete response within {limit:?}")))
    })
}

/// Sends a request and returns the status and the body as text.
///
/// # Errors
/// Those of [`exchange`], and when the body is larger than 64 MiB.
pub async fn call(call: &Call, limit: Duration) -> io::Result<(u16, String)> {
    collect(call, None, limit).await
}

/// Requests a page and returns the status and the body.
///
/// # Errors
/// Those of [`call`].
pub async fn get(to: SocketAddr, path: &str, limit: Duration) -> io::Result<(u16, String)> {
    let call = Call { method: "GET".to_owned(), url: format!("http://{to}{path}"), ..Call::default() };
    collect(&call, None, limit).await
}

/// Requests a page from this source address and returns the status. Like the kubelet, it reads at most 10 KiB of the
/// body, so an endless body does not fail a probe.
pub(crate) async fn status_from(
    to: SocketAddr,
    from: Ipv4Addr,
    path: &str,
    limit: Duration,
) -> io::Result<u16> {
    let call = Call { method: "GET".to_owned(), url: format!("http://{to}{path}"), ..Call::default() };
    let (mut status, mut length) = (None, 0);
    let done = exchange_from(&call, Some(from), limit, |event| {
        match event {
            Event::Head(head) => status = Some(http1::parse(head)?.status),
            Event::Body(piece) => length += piece.len(),
            _ => {}
        }
        if length > MAX_PROBE_BODY {
            Err(io::Error::other("the body is longer than a probe reads"))
        } else {
            Ok(())
        }
    });
    let done = done.await;
    status.filter(|_| length > MAX_PROBE_BODY).map_or(done, Ok)
}

async fn collect(call: &Call, from: Option<Ipv4Addr>, limit: Duration) -> io::Result<(u16, String)> {
    let mut body = Vec::new();
    let status = exchange_from(call, from, limit, |event| match event {
        Event::Body(piece) if body.len() + piece.len() > MAX_BODY => {
            Err(io::Error::other(format!("the body is larger than {} MiB", MAX_BODY >> 20)))
        }
        Event::Body(piece) => {
            body.extend_from_slice(piece);
            Ok(())
        }
        _ => Ok(()),
    });
    let status = status.await?;
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

async fn address(uri: &Uri) -> io::Result<SocketAddr> {
    let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(80));
    let found = tokio::net::lookup_host((host, port)).await?.find(SocketAddr::is_ipv4);
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{host} has no IPv4 address")))
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what.into())
}

fn not_http(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the response is not valid HTTP: {what}"))
}

/// Returns the head of a request, whose URL has a host and a path.
fn request(call: &Call) -> io::Result<Request<()>> {
    let mut request = Request::new(());
    *request.method_mut() = Method::from_bytes(call.method.as_bytes())
        .map_err(|_| invalid(format!("invalid method {:?}", call.method)))?;
    *request.uri_mut() = url(&call.url)?;
    let (given, left_out) = fields(&call.headers)?;
    let authority =
        request.uri().authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default();
    let length = call.body.as_ref().map(|body| body.len().to_string());
    let defaults = [
        (HOST, Some(authority)),
        (USER_AGENT, Some("skysail".to_owned())),
        (ACCEPT, Some("*/*".to_owned())),
        (CONTENT_LENGTH, length),
    ];
    let headers = request.headers_mut();
    for (name, value) in defaults {
        let Some(value) = value.filter(|_| !given.contains_key(&name) && !left_out.contains(&name)) else {
            continue;
        };
        headers.append(
            name,
            HeaderValue::from_str(&value).map_err(|_| invalid(format!("invalid header value {value:?}")))?,
        );
    }
    headers.extend(given);
    Ok(request)
}

fn url(text: &str) -> io::Result<Uri> {
    let text = text.split('#').next().unwrap_or_default();
    let full = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let uri: Uri = full.parse().map_err(|error| invalid(format!("{text:?} is not a URL: {error}")))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => {
            return Err(invalid(format!(
                "{text}: write http://; connections between sidecars use mutual TLS"
            )));
        }
        _ => return Err(invalid(format!("{text}: the scheme is not http"))),
    }
    if uri.host().is_none_or(str::is_empty)
        || uri.authority().is_some_and(|place| place.as_str().contains('@'))
    {
        return Err(invalid(format!("{text:?}: write http://HOST[:PORT][/PATH]")));
    }
    Ok(uri)
}

/// Returns the given headers, and the names of default headers to omit.
fn fields(lines: &[String]) -> io::Result<(HeaderMap, Vec<HeaderName>)> {
    let (mut given, mut left_out) = (HeaderMap::new(), Vec::new());
    for line in lines {
        let wrong = || invalid(format!("{line:?} is not a header: write NAME: VALUE"));
        let (name, value) = match line.split_once(':') {
            Some((name, value)) => (name, Some(value.trim()).filter(|value| !value.is_empty())),
            None => (line.strip_suffix(';').ok_or_else(wrong)?, Some("")),
        };
        let name: HeaderName = name.trim().parse().map_err(|_| wrong())?;
        if name == TRANSFER_ENCODING {
            return Err(invalid("the body is sent with content-length: remove transfer-encoding"));
        }
        match value {
            Some(value) => _ = given.append(name, HeaderValue::from_str(value).map_err(|_| wrong())?),
            None => left_out.push(name),
        }
    }
    Ok((given, left_out))
}

/// Appends fields as lines, and the empty line that ends a head.
fn add_lines(head: &mut Vec<u8>, fields: &HeaderMap) {
    for (name, value) in fields {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::*;

    fn head(url: &str, headers: &[&str], body: Option<&'static str>) -> Result<String, String> {
        let headers = headers.iter().map(|line| (*line).to_owned()).collect();
        let body = body.map(|body| Bytes::from_static(body.as_bytes()));
        let call = Call { method: "PUT".to_owned(), url: url.to_owned(), headers, body, http2: false };
        let request = request(&call).map_err(|error| error.to_string())?;
        let lines =
            request.headers().iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()));
        let mut lines: Vec<_> = lines.collect();
        lines.sort();
        Ok(format!("{} | {}", request.uri(), lines.join(" | ")))
    }

    #[tokio::test]
    async fn a_response_before_the_end_of_the_request_is_returned_unchanged() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 4]).await.unwrap();
            stream.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\n\x00\xff\n").await.unwrap();
            stream
        });
        // Larger than the buffers of both sockets.
        let body = Some(Bytes::from(vec![0; 64 << 20]));
        let call = Call { method: "POST".to_owned(), url, body, ..Call::default() };
        let mut got = Vec::new();
        let status = exchange(&call, Duration::from_secs(60), |event| {
            if let Event::Body(piece) = event {
                got.extend_from_slice(piece);
            }
            Ok(())
        });
        assert_eq!(status.await.unwrap(), 413);
        assert_eq!(got, b"\0\xff\n");
        drop(server.await.unwrap());
    }

    #[tokio::test]
    async fn an_endless_body_does_not_fail_a_probe_and_a_cut_one_does() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = async |pieces: usize| {
            let (mut stream, _) = listener.accept().await.unwrap();
            let head = b"HTTP/1.1 503 Busy\r\ncontent-length: 1000000000\r\n\r\n";
            stream.write_all(head).await.unwrap();
            // It fails when the probe has read enough.
            for _ in 0..pieces {
                if stream.write_all(&[b'x'; 1000]).await.is_err() {
                    break;
                }
            }
        };
        for (pieces, expected) in [(usize::MAX, Some(503)), (3, None)] {
            let probe = status_from(address, Ipv4Addr::LOCALHOST, "/", Duration::from_secs(60));
            let (status, ()) = tokio::join!(probe, server(pieces));
            assert_eq!(status.ok(), expected);
        }
    }

    #[test]
    fn a_request_has_the_default_headers_of_curl() {
        let default = "accept: */* | host: a:8 | user-agent: skysail";
        assert_eq!(head("a:8", &[], None).unwrap(), format!("http://a:8/ | {default}"));
        assert_eq!(head("http://a:8/b?c#d", &[], None).unwrap(), format!("http://a:8/b?c | {default}"));
        assert_eq!(
            head("http://a", &["accept:", "Host: b", "x;", "X-Two: 2", "x-two: 3"], Some("four")).unwrap(),
            "http://a/ | content-length: 4 | host: b | user-agent: skysail | x-two: 2 | x-two: 3 | x: "
        );
    }

    #[test]
    fn an_invalid_request_is_refused_with_the_reason() {
        for (url, headers, problem) in [
            ("https://a/", &[][..], "write http://"),
            ("ftp://a/", &[], "the scheme is not http"),
            ("http://", &[], "http://"),
            ("http://u:p@a/", &[], "write http://HOST"),
            ("http://a/b c", &[], "is not a URL"),
            ("http://a/", &["x"], "is not a header"),
            ("http://a/", &["x: 1\r\ny: 2"], "is not a header"),
            ("http://a/", &["a b: 1"], "is not a header"),
            ("http://a/", &["Transfer-Encoding: chunked"], "remove transfer-encoding"),
        ] {
            let error = head(url, headers, None).unwrap_err();
            assert!(error.contains(problem), "{url} {headers:?}: {error}");
        }
    }
}
