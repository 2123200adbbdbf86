//! The least of HTTP that asking for a page takes: one request, one connection, the whole answer.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Uri};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

/// No status page is larger than this.
const LONGEST: u64 = 64 << 20;

/// Connects, from this address if one is given.
pub(crate) async fn connect(to: SocketAddr, from: Option<Ipv4Addr>) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if let Some(from) = from {
        socket.bind(SocketAddr::new(IpAddr::V4(from), 0))?;
    }
    socket.connect(to).await
}

/// A request as people write it on a command line.
#[derive(Clone, Debug)]
pub struct Call {
    /// `GET`, `POST`, …
    pub method: String,
    /// `http://HOST[:PORT][/PATH]`.
    pub url: String,
    /// `NAME: VALUE` lines.
    pub headers: Vec<String>,
    /// The body.
    pub body: Option<String>,
    /// HTTP/2, by prior knowledge (RFC 9113, section 3.3), rather than HTTP/1.1.
    pub http2: bool,
}

/// Makes a call and returns the status and the body.
///
/// # Errors
/// When the URL or a header is none, the host is unknown, or no answer comes in time.
pub async fn call(call: &Call, limit: Duration) -> io::Result<(u16, String)> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    let rest =
        call.url.strip_prefix("http://").ok_or_else(|| wrong(format!("{}: not http://…", call.url)))?;
    let (host, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    if let Some(line) = call.headers.iter().find(|line| line.contains(['\r', '\n']) || !line.contains(':')) {
        return Err(wrong(format!("{line:?} is not a header: write NAME: VALUE")));
    }
    let place = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let find = async {
        let to = tokio::net::lookup_host(&place).await?.find(SocketAddr::is_ipv4);
        to.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("{place} has no address")))
    };
    if call.http2 {
        let request = http2_request(call).map_err(|error| wrong(error.to_string()))?;
        let body = call.body.clone().unwrap_or_default();
        let exchange = async { http2(connect(find.await?, None).await?, request, body.into()).await };
        let answer = limited(limit, exchange).await?;
        return Ok((answer.status, String::from_utf8_lossy(&answer.body).into_owned()));
    }
    let mut request = format!("{} {path} HTTP/1.1\r\nconnection: close\r\n", call.method);
    if !call.headers.iter().any(|line| line.to_ascii_lowercase().starts_with("host:")) {
        request.push_str(&format!("host: {host}\r\n"));
    }
    for line in &call.headers {
        request.push_str(&format!("{line}\r\n"));
    }
    let body = call.body.as_deref().unwrap_or_default();
    if call.body.is_some() {
        request.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    request.push_str("\r\n");
    request.push_str(body);
    limited(limit, async { exchange(connect(find.await?, None).await?, &request).await }).await
}

/// The head of a call; its `host` becomes the authority.
fn http2_request(call: &Call) -> Result<Request<()>, http::Error> {
    let fields = call.headers.iter().filter_map(|line| line.split_once(':'));
    let (hosts, fields): (Vec<_>, Vec<_>) = fields.partition(|(name, _)| name.eq_ignore_ascii_case("host"));
    let mut uri = call.url.parse::<Uri>()?.into_parts();
    if let Some((_, host)) = hosts.first() {
        uri.authority = Some(host.trim().parse()?);
    }
    let request = Request::builder().method(call.method.as_str()).uri(Uri::from_parts(uri)?);
    fields.into_iter().fold(request, |request, (name, value)| request.header(name, value.trim())).body(())
}

/// An answer of HTTP/2.
struct Answer {
    status: u16,
    body: Vec<u8>,
}

/// Sends a request and reads the whole answer.
async fn http2(stream: TcpStream, request: Request<()>, body: Bytes) -> io::Result<Answer> {
    let (requests, connection) = h2::client::handshake(stream).await.map_err(io::Error::other)?;
    // It ends with what is sent and received here, and its errors show there.
    let driver = tokio::spawn(connection);
    let exchange = async {
        let mut requests = requests.ready().await?;
        let (answer, mut sending) = requests.send_request(request, body.is_empty())?;
        if !body.is_empty() {
            sending.send_data(body, true)?;
        }
        let answer = answer.await?;
        let (status, mut incoming) = (answer.status().as_u16(), answer.into_body());
        let mut body = Vec::new();
        while let Some(piece) = incoming.data().await {
            let piece = piece?;
            incoming.flow_control().release_capacity(piece.len())?;
            body.extend_from_slice(&piece);
        }
        Ok(Answer { status, body })
    };
    let result = exchange.await.map_err(|error: h2::Error| io::Error::other(error));
    driver.abort();
    result
}

/// Asks a gRPC server whether a service is healthy. Source: `grpc.health.v1.Health/Check`.
pub(crate) async fn grpc_health(
    to: SocketAddr,
    from: Ipv4Addr,
    service: &str,
    limit: Duration,
) -> io::Result<bool> {
    // HealthCheckRequest { string service = 1; }, with its length before it and no compression.
    let length = u8::try_from(service.len()).ok().filter(|length| *length < 0x80);
    let length = length.ok_or_else(|| io::Error::other("the service's name is longer than 127 bytes"))?;
    let message = [&[0x0a, length], service.as_bytes()].concat();
    let frame = [&[0, 0, 0, 0, length + 2], &*message].concat();
    let exchange = async {
        let stream = connect(to, Some(from)).await?;
        let request = Request::post(format!("http://{to}/grpc.health.v1.Health/Check"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .map_err(io::Error::other)?;
        let answer = http2(stream, request, frame.into()).await?;
        // HealthCheckResponse { ServingStatus status = 1; }, of which SERVING is 1.
        Ok(answer.status == 200 && answer.body == [0, 0, 0, 0, 2, 0x08, 1])
    };
    limited(limit, exchange).await
}

/// Asks for a page and returns the status and the body.
///
/// # Errors
/// When there is no answer in time, or none that is HTTP.
pub async fn get(to: SocketAddr, path: &str, limit: Duration) -> io::Result<(u16, String)> {
    get_from(to, None, path, limit).await
}

/// Like [`get`], from a given address.
pub(crate) async fn get_from(
    to: SocketAddr,
    from: Option<Ipv4Addr>,
    path: &str,
    limit: Duration,
) -> io::Result<(u16, String)> {
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: {to}\r\nuser-agent: skysail\r\nconnection: close\r\n\r\n");
    limited(limit, async { exchange(connect(to, from).await?, &request).await }).await
}

async fn exchange(mut stream: TcpStream, request: &str) -> io::Result<(u16, String)> {
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(LONGEST).read_to_end(&mut answer).await?;
    parse(&String::from_utf8_lossy(&answer))
}

async fn limited<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn parse(answer: &str) -> io::Result<(u16, String)> {
    let not_http = || io::Error::new(io::ErrorKind::InvalidData, "the answer is not HTTP");
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(not_http)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(not_http)?;
    let lower = head.to_ascii_lowercase();
    let chunked =
        lower.lines().any(|line| line.starts_with("transfer-encoding:") && line.contains("chunked"));
    let body = if chunked { unchunk(body).ok_or_else(not_http)? } else { body.to_owned() };
    Ok((status, body))
}

/// RFC 9112, section 7.1.
fn unchunk(mut rest: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n")?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(body);
        }
        body.push_str(after.get(..size)?);
        rest = after.get(size..)?.strip_prefix("\r\n")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_apart() {
        let (status, body) = parse("HTTP/1.0 503 Service Unavailable\r\na: b\r\n\r\nno\r\n\r\n").unwrap();
        assert_eq!((status, body.as_str()), (503, "no\r\n\r\n"));
        let chunked =
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n1\r\nd\r\n0\r\n\r\n";
        assert_eq!(parse(chunked).unwrap(), (200, "abcd".to_owned()));
        assert!(parse(&chunked[..chunked.len() - 12]).is_err());
        assert!(parse("SSH-2.0-OpenSSH\r\n").is_err());
    }
}
