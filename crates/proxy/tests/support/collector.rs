//! A collector that accepts every gRPC call and HTTP/2 request and passes on their content.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;

use bytes::{Buf as _, Bytes, BytesMut};
use h2::server::SendResponse;
use http::{HeaderMap, Request, Response};
use tokio::{
    net::TcpListener,
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
};

use crate::support::within;

/// A received message.
#[derive(Debug)]
pub(crate) struct Received {
    /// Number of the call that contained the message.
    pub(crate) call: usize,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    /// A gRPC message without its frame, or the whole body of another request.
    pub(crate) message: Bytes,
}

pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    received: UnboundedReceiver<Received>,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    /// Starts a collector on this listener.
    pub(crate) fn at(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let (tell, received) = unbounded_channel();
        tokio::spawn(async move {
            let mut call = 0;
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut connection = h2::server::handshake(stream).await.unwrap();
                let (tell, base) = (tell.clone(), call);
                call += 1000;
                tokio::spawn(async move {
                    let mut number = base;
                    while let Some(Ok((request, respond))) = connection.accept().await {
                        number += 1;
                        tokio::spawn(take(number, request, respond, tell.clone()));
                    }
                });
            }
        });
        Self { address, received }
    }

    /// Receives the next message.
    pub(crate) async fn next(&mut self) -> Received {
        within(self.received.recv()).await.unwrap()
    }
}

async fn take(
    call: usize,
    request: Request<h2::RecvStream>,
    mut respond: SendResponse<Bytes>,
    tell: UnboundedSender<Received>,
) {
    let (parts, mut body) = request.into_parts();
    let (path, headers) = (parts.uri.path().to_owned(), parts.headers);
    let grpc = headers.get("content-type").is_some_and(|value| value == "application/grpc");
    let received = |message| Received { call, path: path.clone(), headers: headers.clone(), message };
    let mut content = BytesMut::new();
    while let Some(Ok(piece)) = body.data().await {
        let _ = body.flow_control().release_capacity(piece.len());
        content.extend_from_slice(&piece);
        while grpc && let Some(length) = content.get(1..5) {
            let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
            if content.len() < 5 + length {
                break;
            }
            content.advance(5);
            let _ = tell.send(received(content.split_to(length).freeze()));
        }
    }
    if !grpc {
        let _ = tell.send(received(content.freeze()));
    }
    let head = Response::builder().header("content-type", "application/grpc").body(()).unwrap();
    let Ok(mut stream) = respond.send_response(head, false) else { return };
    let _ = stream.send_data(Bytes::from_static(&[0; 5]), false);
    let status = HeaderMap::from_iter([("grpc-status".parse().unwrap(), "0".parse().unwrap())]);
    let _ = stream.send_trailers(status);
}
