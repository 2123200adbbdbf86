//! Requests and responses independent of the HTTP version, so that one test covers both.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{future::Future, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use h2::{RecvStream, SendStream, client::SendRequest};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpListener,
};
use tokio_rustls::TlsAcceptor;

use crate::{
    http2,
    support::{Stream, within},
};

/// A request or a response. Without a `content-length` field the body is sent in chunks or frames of unknown
/// total length.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Message {
    /// Status of a response; requests are POSTs to `/a/b`.
    pub(crate) status: u16,
    pub(crate) fields: HeaderMap,
    pub(crate) content: Bytes,
    pub(crate) trailers: HeaderMap,
    /// Number of bytes sent at a time.
    pub(crate) piece: usize,
}

impl Message {
    pub(crate) fn new(fields: &[(&'static str, &str)], content: impl Into<Bytes>) -> Self {
        let trailers = HeaderMap::new();
        Self { status: 200, fields: map(fields), content: content.into(), trailers, piece: 99_999 }
    }

    /// Adds the content-length.
    pub(crate) fn with_length(mut self) -> Self {
        self.fields.insert("content-length", self.content.len().into());
        self
    }

    pub(crate) fn has_length(&self) -> bool {
        self.fields.contains_key("content-length")
    }

    async fn write_http1(&self, stream: &mut impl Stream, first: &str) -> std::io::Result<()> {
        let coding = if self.has_length() { "" } else { "transfer-encoding: chunked\r\n" };
        stream.write_all(format!("{first}\r\n{}{coding}\r\n", lines(&self.fields)).as_bytes()).await?;
        for piece in self.content.chunks(self.piece) {
            if self.has_length() {
                stream.write_all(piece).await?;
            } else {
                stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).await?;
                stream.write_all(piece).await?;
                stream.write_all(b"\r\n").await?;
            }
            stream.flush().await?;
        }
        if !self.has_length() {
            stream.write_all(format!("0\r\n{}\r\n", lines(&self.trailers)).as_bytes()).await?;
        }
        stream.flush().await
    }

    /// Returns `None` at the end of the connection.
    async fn read_http1(stream: &mut BufReader<impl Stream>) -> Option<Self> {
        let first = line(stream).await;
        if first.is_empty() {
            return None;
        }
        let mut message = Self::new(&[], "");
        if let Some(status) = first.strip_prefix("HTTP/1.1 ") {
            message.status = status[..3].parse().unwrap();
        }
        message.fields = block(stream).await;
        let mut content = Vec::new();
        if let Some(length) = message.fields.get("content-length") {
            content.resize(length.to_str().unwrap().parse().unwrap(), 0);
            within(stream.read_exact(&mut content)).await.unwrap();
        } else if message.fields.remove("transfer-encoding").is_some() {
            while let size = usize::from_str_radix(&line(stream).await, 16).unwrap()
                && size > 0
            {
                let before = content.len();
                content.resize(before + size, 0);
                within(stream.read_exact(&mut content[before..])).await.unwrap();
                assert_eq!(line(stream).await, "");
            }
            message.trailers = block(stream).await;
        }
        message.content = content.into();
        Some(message)
    }

    async fn write_http2(&self, stream: &mut SendStream<Bytes>) {
        for piece in self.content.chunks(self.piece) {
            http2::send(stream, Bytes::copy_from_slice(piece)).await;
        }
        if self.trailers.is_empty() {
            stream.send_data(Bytes::new(), true).unwrap();
        } else {
            stream.send_trailers(self.trailers.clone()).unwrap();
        }
    }

    async fn read_http2(fields: HeaderMap, mut stream: RecvStream) -> Self {
        let (content, trailers) = http2::content(&mut stream).await;
        let trailers = trailers.unwrap_or_default();
        Self { fields, trailers, ..Self::new(&[], content) }
    }
}

pub(crate) fn map(fields: &[(&'static str, &str)]) -> HeaderMap {
    let field = |(name, value): &(&'static str, &str)| {
        (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
    };
    fields.iter().map(field).collect()
}

fn lines(fields: &HeaderMap) -> String {
    fields.iter().map(|(name, value)| format!("{name}: {}\r\n", value.to_str().unwrap())).collect()
}

/// Reads a line without its end; returns an empty string at the end of the connection.
async fn line(stream: &mut BufReader<impl Stream>) -> String {
    let mut line = String::new();
    within(stream.read_line(&mut line)).await.unwrap();
    line.trim_end().to_owned()
}

/// Reads fields up to the empty line.
async fn block(stream: &mut BufReader<impl Stream>) -> HeaderMap {
    let mut fields = HeaderMap::new();
    while let line = line(stream).await
        && let Some((name, value)) = line.split_once(": ")
    {
        fields.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
    }
    fields
}

/// A client of either version.
pub(crate) enum Client {
    Http1(BufReader<Box<dyn Stream>>),
    Http2(SendRequest<Bytes>),
}

impl Client {
    pub(crate) async fn new(stream: impl Stream, http2: bool) -> Self {
        if http2 {
            Self::Http2(http2::client(stream).await)
        } else {
            Self::Http1(BufReader::new(Box::new(stream)))
        }
    }

    /// Sends a request and reads the response.
    pub(crate) async fn ask(&mut self, request: &Message) -> Message {
        match self {
            Self::Http1(stream) => {
                request.write_http1(stream.get_mut(), "POST /a/b HTTP/1.1\r\nhost: a").await.unwrap();
                Message::read_http1(stream).await.unwrap()
            }
            Self::Http2(requests) => {
                let mut head = Request::post("http://a/a/b").body(()).unwrap();
                head.headers_mut().clone_from(&request.fields);
                let (answer, mut sending) = requests.send_request(head, false).unwrap();
                request.write_http2(&mut sending).await;
                let (parts, body) = within(answer).await.unwrap().into_parts();
                Message { status: parts.status.as_u16(), ..Message::read_http2(parts.headers, body).await }
            }
        }
    }
}

/// Starts a server of either version, with or without TLS.
pub(crate) async fn server<F, R>(http2: bool, tls: Option<Arc<ServerConfig>>, answer: F) -> SocketAddr
where
    F: Fn(Message) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Message> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).unwrap();
            let (tls, answer) = (tls.clone().map(TlsAcceptor::from), answer.clone());
            tokio::spawn(async move {
                match tls {
                    None => serve(stream, http2, answer).await,
                    Some(tls) => serve(tls.accept(stream).await.unwrap(), http2, answer).await,
                }
            });
        }
    });
    address
}

async fn serve<F, R>(stream: impl Stream, http2: bool, answer: F)
where
    F: Fn(Message) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Message> + Send + 'static,
{
    if !http2 {
        let mut stream = BufReader::new(stream);
        while let Some(request) = Message::read_http1(&mut stream).await {
            let answer = answer(request).await;
            let first = format!("HTTP/1.1 {} X", answer.status);
            if answer.write_http1(stream.get_mut(), &first).await.is_err() {
                return;
            }
        }
        return;
    }
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        let answer = answer.clone();
        tokio::spawn(async move {
            let (parts, body) = request.into_parts();
            let answer = answer(Message::read_http2(parts.headers, body).await).await;
            let mut head = Response::builder().status(answer.status).body(()).unwrap();
            head.headers_mut().clone_from(&answer.fields);
            answer.write_http2(&mut respond.send_response(head, false).unwrap()).await;
        });
    }
}
