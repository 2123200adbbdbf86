//! HTTP/2 with prior knowledge. Heads are shown as lines, as curl shows them.

use std::io;

use bytes::Bytes;
use http::{
    HeaderMap, Request, StatusCode,
    header::HOST,
    uri::{Scheme, Uri},
};
use tokio::net::TcpStream;

use super::{Event, add_lines, invalid};

pub(super) async fn exchange(
    stream: TcpStream,
    mut request: Request<()>,
    body: Bytes,
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<u16> {
    set_authority(&mut request)?;
    on(Event::Request(&request_lines(&request)))?;
    let (requests, connection) = h2::client::handshake(stream).await.map_err(io::Error::other)?;
    // The task ends with this exchange, which returns the errors of the connection.
    let driver = tokio::spawn(connection);
    let result = stream_of(requests, request, body, on).await;
    driver.abort();
    result
}

async fn stream_of(
    requests: h2::client::SendRequest<Bytes>,
    request: Request<()>,
    body: Bytes,
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> io::Result<u16> {
    let mut requests = requests.ready().await.map_err(io::Error::other)?;
    let (response, mut sending) =
        requests.send_request(request, body.is_empty()).map_err(io::Error::other)?;
    if !body.is_empty() {
        sending.send_data(body, true).map_err(io::Error::other)?;
    }
    let (head, mut incoming) = response.await.map_err(io::Error::other)?.into_parts();
    on(Event::Head(&response_lines(head.status, &head.headers)))?;
    while let Some(piece) = incoming.data().await {
        let piece = piece.map_err(io::Error::other)?;
        incoming.flow_control().release_capacity(piece.len()).map_err(io::Error::other)?;
        on(Event::Body(&piece))?;
    }
    if let Some(trailers) = incoming.trailers().await.map_err(io::Error::other)? {
        on(Event::Trailers(&trailer_lines(&trailers)))?;
    }
    Ok(head.status.as_u16())
}

/// Moves a given `host` to the authority (RFC 9113, section 8.3.1).
pub(super) fn set_authority(request: &mut Request<()>) -> io::Result<()> {
    let Some(host) = request.headers_mut().remove(HOST) else { return Ok(()) };
    let authority = http::uri::Authority::try_from(host.as_bytes())
        .map_err(|error| invalid(format!("invalid host {host:?}: {error}")))?;
    let mut parts = request.uri().clone().into_parts();
    (parts.scheme, parts.authority) = (Some(Scheme::HTTP), Some(authority));
    *request.uri_mut() = Uri::from_parts(parts).map_err(|error| invalid(error.to_string()))?;
    Ok(())
}

pub(super) fn request_lines(request: &Request<()>) -> Vec<u8> {
    let uri = request.uri();
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    lines(format!("{} {path} HTTP/2\r\n:authority: {authority}\r\n", request.method()), request.headers())
}

pub(super) fn response_lines(status: StatusCode, headers: &HeaderMap) -> Vec<u8> {
    lines(format!("HTTP/2 {}\r\n", status.as_u16()), headers)
}

pub(super) fn trailer_lines(trailers: &HeaderMap) -> Vec<u8> {
    lines(String::new(), trailers)
}

fn lines(first: String, fields: &HeaderMap) -> Vec<u8> {
    let mut head = first.into_bytes();
    add_lines(&mut head, fields);
    head
}
