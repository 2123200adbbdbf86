//! A client of HTTP/1.0, HTTP/1.1 and HTTP/2, with or without TLS, that returns responses in a comparable form.

use std::{fmt::Write as _, future::poll_fn, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::request::{Body, Request, Version};

/// Timeout, longer than any exchange.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Returns version and status, sorted fields without varying ones, content, and sorted trailers.
pub(crate) async fn ask(
    address: SocketAddr,
    tls: Option<Arc<rustls::ClientConfig>>,
    request: &Request,
) -> String {
    let exchange = async {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let Some(config) = tls else { return exchange(stream, "http", request).await };
        let mut config = (*config).clone();
        let protocol: &[u8] = if request.version == Version::Http2 { b"h2" } else { b"http/1.1" };
        config.alpn_protocols = vec![protocol.to_vec()];
        let name = ServerName::try_from("a.example").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        exchange(stream, "https", request).await
    };
    timeout(TIMEOUT, exchange).await.unwrap_or_else(|_| "nothing in time\n".to_owned())
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    scheme: &str,
    request: &Request,
) -> String {
    match request.version {
        Version::Http2 => http2(stream, scheme, request).await,
        _ => http1(stream, request).await,
    }
}

/// A received response.
#[derive(Default)]
struct Answer {
    status: String,
    fields: Vec<String>,
    body: Vec<u8>,
    trailers: Vec<String>,
    /// Error that ended it, if any.
    end: String,
}

impl Answer {
    fn describe(mut self, request: &Request) -> String {
        let own = ["date: ", "x-envoy-upstream-service-time: ", "x-ratelimit-reset: "];
        self.fields.retain(|line| !own.iter().any(|name| line.starts_with(name)));
        if request.method == "HEAD" {
            // Envoy announces chunks for a response of unknown length.
            self.fields.retain(|line| line != "transfer-encoding: chunked");
        }
        self.fields.sort_unstable();
        self.trailers.sort_unstable();
        let mut received = self.status;
        received.push('\n');
        for line in self.fields {
            // Two slashes at the beginning, or a slash and a backslash, would be read as another host; the
            // sidecar writes `/.//`.
            _ = writeln!(received, "{}", line.replacen("location: /./", "location: /", 1));
        }
        _ = writeln!(received, "\n{}", String::from_utf8_lossy(&self.body));
        for line in self.trailers {
            _ = writeln!(received, "then {line}");
        }
        received + &self.end
    }
}

/// Sends one request on a connection. After a write error it still reads, because the response may have come
/// before.
async fn http1(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &Request) -> String {
    let mut input = Vec::new();
    _ = stream.write_all(request.bytes().as_bytes()).await;
    let mut block = vec![0; 16 * 1024];
    let mut ended = false;
    loop {
        if let Some(answer) = read(&input, request.method, ended) {
            return answer.describe(request);
        }
        match stream.read(&mut block).await {
            Ok(count @ 1..) => input.extend_from_slice(&block[..count]),
            _ => ended = true,
        }
    }
}

/// Parses a response if it is complete.
fn read(input: &[u8], method: &str, ended: bool) -> Option<Answer> {
    let text = String::from_utf8_lossy(input);
    let mut answer = Answer::default();
    let Some((head, rest)) = text.split_once("\r\n\r\n") else {
        answer.end = format!("ended after {text:?}\n");
        return ended.then_some(answer);
    };
    let mut lines = head.split("\r\n");
    // Compares the status but not the reason phrase. The sidecar answers HTTP/1.0 in HTTP/1.1, which Envoy does
    // only for its own responses.
    answer.status = lines.next()?.split_inclusive(' ').skip(1).take(1).collect();
    answer.fields = lines.map(str::to_owned).collect();
    let status = answer.status.trim_end();
    let of = |name: &str| answer.fields.iter().find_map(|line| line.strip_prefix(name));
    let whole = if method == "HEAD" || matches!(status, "204" | "304") {
        true
    } else if let Some(length) = of("content-length: ") {
        answer.body = rest.as_bytes().to_vec();
        rest.len() >= length.parse().ok()?
    } else if of("transfer-encoding: ").is_some() {
        let (body, trailers) = chunks(rest);
        answer.body = body.into_bytes();
        let is_there = trailers.is_some();
        answer.trailers = trailers.unwrap_or_default();
        is_there
    } else {
        answer.body = rest.as_bytes().to_vec();
        return ended.then_some(answer);
    };
    if !whole && ended {
        answer.end = "broken off\n".to_owned();
    }
    (whole || ended).then_some(answer)
}

/// Decodes chunks; returns the trailers once they are complete.
fn chunks(mut rest: &str) -> (String, Option<Vec<String>>) {
    let mut body = String::new();
    while let Some((length, after)) = rest.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        if length == 0 {
            let trailers = format!("\r\n{after}");
            let Some((trailers, _)) = trailers.split_once("\r\n\r\n") else { return (body, None) };
            return (body, Some(trailers.split("\r\n").skip(1).map(str::to_owned).collect()));
        }
        let Some(chunk) = after.get(..length) else { break };
        body.push_str(chunk);
        let Some(next) = after.get(length + 2..) else { break };
        rest = next;
    }
    (body, None)
}

/// Sends one request on its own connection.
async fn http2(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    scheme: &str,
    request: &Request,
) -> String {
    let mut answer = Answer::default();
    if let Err(error) = try_http2(stream, scheme, request, &mut answer).await {
        let why = error.reason().map_or_else(|| error.to_string(), |reason| format!("{reason:?}"));
        let by = if error.is_reset() { "stream" } else { "connection" };
        answer.end = format!("{by} ended: {why}\n");
    }
    answer.describe(request)
}

async fn try_http2(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    scheme: &str,
    request: &Request,
    answer: &mut Answer,
) -> Result<(), h2::Error> {
    // The windows never block: Envoy abandons the rest of a response if a busy client reads it too slowly.
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 20);
    let (requests, connection) = builder.handshake(stream).await?;
    tokio::spawn(connection);
    let uri = http::Uri::builder().scheme(scheme).authority(&*request.host).path_and_query(&*request.path);
    let mut head = http::Request::builder().method(request.method).uri(uri.build().unwrap());
    for (name, value) in &request.fields {
        head = head.header(name, value);
    }
    if let Body::Whole(content) = &request.body {
        head = head.header("content-length", content.len());
    }
    let end = matches!(request.body, Body::None);
    let (response, mut sender) = requests.ready().await?.send_request(head.body(()).unwrap(), end)?;
    // A response before the end of the request is read too.
    _ = send(&mut sender, &request.body).await;
    let response = response.await?;
    let line = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        format!("{name}: {}", String::from_utf8_lossy(value.as_bytes()))
    };
    answer.status = format!("{}", response.status().as_u16());
    answer.fields = response.headers().iter().map(line).collect();
    let mut body = response.into_body();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        answer.body.extend_from_slice(&piece);
    }
    answer.trailers = body.trailers().await?.iter().flatten().map(line).collect();
    Ok(())
}

async fn send(sender: &mut h2::SendStream<Bytes>, body: &Body) -> Result<(), h2::Error> {
    match body {
        Body::None => {}
        Body::Whole(content) => {
            let mut content = Bytes::from(content.clone());
            while !content.is_empty() {
                sender.reserve_capacity(content.len());
                let Some(room) = poll_fn(|cx| sender.poll_capacity(cx)).await else { return Ok(()) };
                sender.send_data(content.split_to(room?.min(content.len())), false)?;
            }
            sender.send_data(Bytes::new(), true)?;
        }
        Body::Pieces(pieces, trailers) => {
            for piece in pieces {
                sender.send_data(Bytes::from_static(piece.as_bytes()), false)?;
            }
            if trailers.is_empty() {
                return sender.send_data(Bytes::new(), true);
            }
            let trailers = trailers.iter().map(|(name, value)| {
                (http::HeaderName::from_static(name), http::HeaderValue::from_static(value))
            });
            sender.send_trailers(trailers.collect())?;
        }
    }
    Ok(())
}
