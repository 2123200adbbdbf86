//! TLS clients that accept any certificate.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::net::SocketAddr;

use skysail_identity::TlsSpec;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::support::within;

/// Connects with TLS and offers this ALPN protocol.
pub(crate) async fn secured(to: SocketAddr, protocol: &str) -> TlsStream<TcpStream> {
    let spec = TlsSpec { alpn: vec![protocol.into()], ..TlsSpec::default() };
    let connector = TlsConnector::from(spec.client().unwrap());
    let stream = TcpStream::connect(to).await.unwrap();
    stream.set_nodelay(true).unwrap();
    within(connector.connect("a".try_into().unwrap(), stream)).await.unwrap()
}

/// Connects with TLS and returns the plain text end.
pub(crate) async fn over_tls(to: SocketAddr, protocol: &str) -> TcpStream {
    let mut outer = secured(to, protocol).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut inner, _) = listener.accept().await.unwrap();
    inner.set_nodelay(true).unwrap();
    tokio::spawn(async move { copy_bidirectional(&mut inner, &mut outer).await });
    plain
}
