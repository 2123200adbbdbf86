//! HTTP/2 clients and servers.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{future::Future, net::SocketAddr};

use bytes::Bytes;
use h2::{RecvStream, SendStream, client::SendRequest, server::SendResponse};
use http::{HeaderMap, Request};
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
};

use crate::support::{Stream, within};

/// Starts a client on this connection.
pub(crate) async fn client(stream: impl Stream) -> SendRequest<Bytes> {
    let (requests, connection) = within(h2::client::handshake(stream)).await.unwrap();
    tokio::spawn(connection);
    within(requests.ready()).await.unwrap()
}

pub(crate) fn request(method: &str, path: &str) -> Request<()> {
    let uri = format!("http://a:1{path}");
    Request::builder().method(method).uri(uri).body(()).unwrap()
}

/// Reads the rest of a body and the trailers.
pub(crate) async fn content(body: &mut RecvStream) -> (Vec<u8>, Option<HeaderMap>) {
    let mut all = Vec::new();
    while let Some(piece) = within(body.data()).await {
        let piece = piece.unwrap();
        body.flow_control().release_capacity(piece.len()).unwrap();
        all.extend_from_slice(&piece);
    }
    (all, within(body.trailers()).await.unwrap())
}

/// Sends data as flow control allows.
pub(crate) async fn send(stream: &mut SendStream<Bytes>, mut data: Bytes) {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let room = within(std::future::poll_fn(|cx| stream.poll_capacity(cx))).await.unwrap().unwrap();
        stream.send_data(data.split_to(room.min(data.len())), false).unwrap();
    }
}

/// Starts an HTTP/2 server that handles every request with `serve`, which gets the connection's number.
pub(crate) async fn http2_server<F, R>(serve: F) -> SocketAddr
where
    F: Fn(usize, Request<RecvStream>, SendResponse<Bytes>) -> R + Clone + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    limited_server(100, serve).await
}

pub(crate) async fn limited_server<F, R>(streams: u32, serve: F) -> SocketAddr
where
    F: Fn(usize, Request<RecvStream>, SendResponse<Bytes>) -> R + Clone + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        for number in 0.. {
            let (stream, _) = listener.accept().await.unwrap();
            let serve = serve.clone();
            tokio::spawn(async move {
                let mut builder = h2::server::Builder::new();
                let mut connection = builder.max_concurrent_streams(streams).handshake(stream).await.unwrap();
                while let Some(Ok((request, respond))) = connection.accept().await {
                    tokio::spawn(serve(number, request, respond));
                }
            });
        }
    });
    address
}

/// Reads one frame: type, flags, stream ID and payload.
pub(crate) async fn frame(stream: &mut TcpStream) -> (u8, u8, u8, Vec<u8>) {
    let mut head = [0; 9];
    within(stream.read_exact(&mut head)).await.unwrap();
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    within(stream.read_exact(&mut payload)).await.unwrap();
    (head[3], head[4], head[8], payload)
}
