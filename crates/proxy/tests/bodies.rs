//! Content on its way: byte for byte, whatever both ends speak, with a length or without one, and what follows it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/http2.rs"]
mod http2;
#[path = "support/mesh.rs"]
mod mesh;
mod support;

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, Response};
use mesh::{Mesh, accepting, connecting};
use rustls::ServerConfig;
use skysail_identity::TlsSpec;
use skysail_proxy::config::{Cluster, cluster::UpstreamProtocol};
use support::{Proxy, Stream, cluster, http, listener, within};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A body: with its length in the head, or else in pieces and with this trailer.
#[derive(Clone, Debug, PartialEq)]
struct Body {
    content: Bytes,
    trailer: Option<String>,
}

const TRAILER: &str = "x-end";

impl Body {
    async fn write_http1(&self, stream: &mut impl Stream, first: &str) {
        let Some(trailer) = &self.trailer else {
            let head = format!("{first}\r\ncontent-length: {}\r\n\r\n", self.content.len());
            stream.write_all(head.as_bytes()).await.unwrap();
            return stream.write_all(&self.content).await.unwrap();
        };
        let head = format!("{first}\r\ntransfer-encoding: chunked\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        for chunk in self.content.chunks(99_999) {
            stream.write_all(format!("{:x}\r\n", chunk.len()).as_bytes()).await.unwrap();
            stream.write_all(chunk).await.unwrap();
            stream.write_all(b"\r\n").await.unwrap();
        }
        stream.write_all(format!("0\r\n{TRAILER}: {trailer}\r\n\r\n").as_bytes()).await.unwrap();
    }

    /// What comes after the first line; `None` at the end of the connection.
    async fn read_http1(stream: &mut BufReader<impl Stream>) -> Option<(String, Self)> {
        let first = line(stream).await;
        if first.is_empty() {
            return None;
        }
        let mut length = None;
        while let field = line(stream).await
            && !field.is_empty()
        {
            length = length.or(field.strip_prefix("content-length: ").map(|length| length.parse().unwrap()));
        }
        let mut content = Vec::new();
        if let Some(length) = length {
            content.resize(length, 0);
            stream.read_exact(&mut content).await.unwrap();
            return Some((first, Self { content: content.into(), trailer: None }));
        }
        while let size = usize::from_str_radix(&line(stream).await, 16).unwrap()
            && size > 0
        {
            let before = content.len();
            content.resize(before + size, 0);
            stream.read_exact(&mut content[before..]).await.unwrap();
            assert_eq!(line(stream).await, "");
        }
        let trailer = line(stream).await;
        assert_eq!(line(stream).await, "");
        let trailer = trailer.strip_prefix(TRAILER).unwrap().strip_prefix(": ").unwrap().to_owned();
        Some((first, Self { content: content.into(), trailer: Some(trailer) }))
    }

    /// The field with its length, if it has one.
    fn fields(&self) -> HeaderMap {
        let length =
            self.trailer.is_none().then(|| ("content-length".parse().unwrap(), self.content.len().into()));
        length.into_iter().collect()
    }

    async fn write_http2(&self, stream: &mut SendStream<Bytes>) {
        http2::send(stream, self.content.clone()).await;
        match &self.trailer {
            None => stream.send_data(Bytes::new(), true).unwrap(),
            Some(trailer) => {
                let trailers = [(TRAILER.parse().unwrap(), trailer.parse().unwrap())].into_iter().collect();
                stream.send_trailers(trailers).unwrap();
            }
        }
    }

    async fn read_http2(fields: &HeaderMap, mut stream: RecvStream) -> Self {
        let (content, trailers) = http2::content(&mut stream).await;
        let length = fields.get("content-length").map(|length| length.to_str().unwrap().parse());
        let trailer = trailers.map(|trailers| trailers[TRAILER].to_str().unwrap().to_owned());
        assert_eq!(length, trailer.is_none().then_some(Ok(content.len())), "{fields:?}");
        Self { content: content.into(), trailer }
    }
}

/// A line without its end; nothing at the end of the connection.
async fn line(stream: &mut BufReader<impl Stream>) -> String {
    let mut line = String::new();
    within(stream.read_line(&mut line)).await.unwrap();
    line.trim_end().to_owned()
}

/// Sends back each request's body as it has come.
async fn serve(stream: impl Stream, http2: bool) {
    if !http2 {
        let mut stream = BufReader::new(stream);
        while let Some((_, body)) = Body::read_http1(&mut stream).await {
            body.write_http1(stream.get_mut(), "HTTP/1.1 200 OK").await;
        }
        return;
    }
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, mut respond))) = connection.accept().await {
        tokio::spawn(async move {
            let (parts, body) = request.into_parts();
            let body = Body::read_http2(&parts.headers, body).await;
            let mut answer = Response::new(());
            *answer.headers_mut() = body.fields();
            body.write_http2(&mut respond.send_response(answer, false).unwrap()).await;
        });
    }
}

async fn server(http2: bool, tls: Option<Arc<ServerConfig>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let tls = tls.clone().map(TlsAcceptor::from);
            tokio::spawn(async move {
                match tls {
                    None => serve(stream, http2).await,
                    Some(tls) => serve(tls.accept(stream).await.unwrap(), http2).await,
                }
            });
        }
    });
    address
}

/// What comes back of bodies that are sent one after the other.
async fn ask(stream: impl Stream, http2: bool, bodies: &[Body]) -> Vec<Body> {
    let mut answers = Vec::new();
    if http2 {
        let requests = http2::client(stream).await;
        for body in bodies {
            let mut request = Request::post("http://a/").body(()).unwrap();
            *request.headers_mut() = body.fields();
            request.headers_mut().insert("te", "trailers".parse().unwrap());
            let (answer, mut sending) = requests.clone().send_request(request, false).unwrap();
            body.write_http2(&mut sending).await;
            let (parts, answer) = within(answer).await.unwrap().into_parts();
            assert_eq!(parts.status, 200);
            answers.push(Body::read_http2(&parts.headers, answer).await);
        }
        return answers;
    }
    let mut stream = BufReader::new(stream);
    for body in bodies {
        body.write_http1(stream.get_mut(), "POST / HTTP/1.1\r\nhost: a\r\nte: trailers").await;
        let (first, answer) = Body::read_http1(&mut stream).await.unwrap();
        assert_eq!(first, "HTTP/1.1 200 OK");
        answers.push(answer);
    }
    answers
}

/// 5 MB of noise through one proxy to one server, from clients of all kinds.
async fn content_comes_back(http2_server: bool, tls_server: bool) {
    let mesh = Mesh::new();
    let secured = mesh.spec("server", "client", &[b"h2", b"http/1.1"]);
    let upstream = server(http2_server, tls_server.then(|| secured.server().unwrap())).await;
    let tls = tls_server.then(|| connecting(&mesh.spec("client", "server", &[])));
    let cluster = || Cluster {
        protocol: if http2_server { UpstreamProtocol::Http2 } else { UpstreamProtocol::Http1 },
        ..cluster(&[upstream], tls.as_ref())
    };
    let plain = Proxy::start(listener(http(|_, _| ()), None), vec![cluster()]).await;
    let behind = accepting(&TlsSpec { peer: None, ..secured });
    let secured = Proxy::start(listener(http(|_, _| ()), Some(behind)), vec![cluster()]).await;

    let mut random = fastrand::Rng::with_seed(5);
    let content: Bytes =
        std::iter::repeat_with(|| random.u64(..).to_le_bytes()).take(625_000).flatten().collect();
    let bodies =
        [None, Some("it was noise".to_owned())].map(|trailer| Body { content: content.clone(), trailer });
    for (http2, protocol) in [(false, "http/1.1"), (true, "h2")] {
        let stream = TcpStream::connect(plain.address).await.unwrap();
        let answers = ask(stream, http2, &bodies).await;
        assert!(answers == bodies, "{protocol}");
        let client = TlsSpec { alpn: vec![protocol.into()], ..TlsSpec::default() }.client().unwrap();
        let stream = TcpStream::connect(secured.address).await.unwrap();
        let stream = TlsConnector::from(client).connect("a".try_into().unwrap(), stream).await.unwrap();
        let answers = ask(stream, http2, &bodies).await;
        assert!(answers == bodies, "{protocol} over TLS");
    }
}

#[tokio::test]
async fn content_comes_back_from_a_server_of_http1() {
    content_comes_back(false, false).await;
}

#[tokio::test]
async fn content_comes_back_from_a_server_of_http1_over_tls() {
    content_comes_back(false, true).await;
}

#[tokio::test]
async fn content_comes_back_from_a_server_of_http2() {
    content_comes_back(true, false).await;
}

#[tokio::test]
async fn content_comes_back_from_a_server_of_http2_over_tls() {
    content_comes_back(true, true).await;
}
