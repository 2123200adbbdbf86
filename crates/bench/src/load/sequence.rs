//! Sends requests in sequence, so that each run causes the same work.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};

use super::{LoadProtocol, Traffic, http2};
use crate::{
    http1,
    stream::{Stream, Tls},
};

/// Timeout of a response. Under valgrind, the proxy is many times slower than usual.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Sends `count` requests with bodies of `payload` bytes, each after the response to the previous one. All use one
/// connection; with [`Traffic::NewConnections`], each has its own.
pub(crate) fn send(
    target: SocketAddr,
    traffic: Traffic,
    tls: Option<&Tls>,
    (payload, token): (usize, Option<&str>),
    count: u32,
) -> anyhow::Result<()> {
    let request = request_with(payload, token)?;
    let mut input = vec![0; payload + (16 << 10)];
    match traffic {
        Traffic::Http1 => {
            let mut stream = open(target, tls)?;
            (0..count).try_for_each(|_| ask(&mut stream, &request, &mut input))
        }
        Traffic::NewConnections { .. } => {
            (0..count).try_for_each(|_| ask(&mut open(target, tls)?, &request, &mut input))
        }
        Traffic::Http2 { .. } | Traffic::Scheduled(LoadProtocol::Grpc) => {
            ensure!(tls.is_none() && token.is_none(), "HTTP/2 is supported without TLS and tokens only");
            http2::in_sequence(target, matches!(traffic, Traffic::Scheduled(_)), payload, count)
        }
        Traffic::Bytes | Traffic::Scheduled(_) => bail!("{traffic:?} cannot be sent in sequence"),
    }
}

/// Returns the HTTP/1.1 request of all measurements.
pub(super) fn request(payload: usize) -> anyhow::Result<Vec<u8>> {
    request_with(payload, None)
}

/// Returns the request with a JSON Web Token, if there is one.
fn request_with(payload: usize, token: Option<&str>) -> anyhow::Result<Vec<u8>> {
    let authorization = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let mut request = Vec::with_capacity(payload + 256);
    write!(
        request,
        "POST /echo HTTP/1.1\r\nHost: server.mesh.local\r\nUser-Agent: skysail-bench\r\n\
         Content-Type: application/octet-stream\r\nContent-Length: {payload}\r\n{authorization}\r\n"
    )?;
    request.resize(request.len() + payload, b'x');
    Ok(request)
}

/// Opens a connection in blocking mode.
pub(super) fn open(target: SocketAddr, tls: Option<&Tls>) -> anyhow::Result<Stream> {
    let stream = Stream::open(target, tls)?;
    stream.socket().set_read_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// Sends a request and waits for its response, which must be 200 and fit into `input`.
pub(super) fn ask(stream: &mut Stream, request: &[u8], input: &mut [u8]) -> anyhow::Result<()> {
    stream.write_all(request)?;
    let mut filled = 0;
    while filled < input.len() {
        let length = stream.read(&mut input[filled..]).context("waiting for a response")?;
        if length == 0 {
            bail!("the connection was closed");
        }
        filled += length;
        let Some(head) = http1::head(&input[..filled]) else { continue };
        let status = http1::status(input);
        if status != 200 {
            bail!("the response has status {status}");
        }
        if filled >= head.length + head.content_length.unwrap_or(0) {
            return Ok(());
        }
    }
    bail!("the response is longer than {filled} bytes")
}
