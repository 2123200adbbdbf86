//! A gRPC client: calls over HTTP/2 with prior knowledge. The caller encodes the messages. Source: gRPC's "gRPC over
//! HTTP2".
//!
//! It sends all messages of a request at once, and passes on those of the response as they arrive. Sizes are limited
//! here; the caller limits the time.

use std::{fmt, io, net::Ipv4Addr};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri,
    header::{CONTENT_TYPE, TE, USER_AGENT},
    uri::{PathAndQuery, Scheme},
};
use skysail_core::names::GRPC_STATUS;

use super::{Event, address, connect, fields, http2, invalid, url};

/// Default maximum size of a response message, in bytes.
const MAX_MESSAGE: usize = 16 << 20;
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Code.
    pub code: u32,
    /// Message of the server.
    pub message: String,
}

impl Status {
    /// Code `CANCELLED`.
    pub const CANCELLED: u32 = 1;
    /// Code `UNKNOWN`.
    pub const UNKNOWN: u32 = 2;
    /// Code `DEADLINE_EXCEEDED`.
    pub const DEADLINE_EXCEEDED: u32 = 4;
    /// Code `NOT_FOUND`.
    pub const NOT_FOUND: u32 = 5;
    /// Code `PERMISSION_DENIED`.
    pub const PERMISSION_DENIED: u32 = 7;
    /// Code `RESOURCE_EXHAUSTED`.
    pub const RESOURCE_EXHAUSTED: u32 = 8;
    /// Code `UNIMPLEMENTED`.
    pub const UNIMPLEMENTED: u32 = 12;
    /// Code `INTERNAL`.
    pub const INTERNAL: u32 = 13;
    /// Code `UNAVAILABLE`.
    pub const UNAVAILABLE: u32 = 14;
    /// Code `UNAUTHENTICATED`.
    pub const UNAUTHENTICATED: u32 = 16;

    /// Returns whether the call succeeded.
    pub fn is_ok(&self) -> bool {
        self.code == 0
    }

    /// Returns the name of the code, such as `NOT_FOUND`.
    pub fn name(&self) -> String {
        let name = usize::try_from(self.code).ok().and_then(|code| GRPC_STATUS.get(code));
        name.map_or_else(|| format!("code {}", self.code), |name| (*name).to_owned())
    }

    /// Reads the status from trailers, or from a head without a body (trailers-only).
    fn read(fields: &HeaderMap) -> Option<Self> {
        let code = fields.get(STATUS)?.to_str().ok().and_then(|code| code.parse().ok());
        let message = fields.get(MESSAGE).map(|value| percent_decoded(value.as_bytes())).unwrap_or_default();
        Some(match code {
            Some(code) => Self { code, message },
            None => {
                Self { code: Self::UNKNOWN, message: "the server's grpc-status is not a number".to_owned() }
            }
        })
    }

    /// Returns the status of a response without one. Source: gRPC's "HTTP to gRPC Status Code Mapping".
    fn of_http(status: StatusCode) -> Self {
        let code = match status.as_u16() {
            400 => Self::INTERNAL,
            401 => Self::UNAUTHENTICATED,
            403 => Self::PERMISSION_DENIED,
            404 => Self::UNIMPLEMENTED,
            429 | 502..=504 => Self::UNAVAILABLE,
            _ => Self::UNKNOWN,
        };
        Self { code, message: format!("HTTP status {}", status.as_u16()) }
    }

    /// Returns the status of a stream that was reset. Source: gRPC's "gRPC over HTTP2", section Errors.
    fn of_reset(reason: h2::Reason) -> Self {
        let code = match reason {
            h2::Reason::REFUSED_STREAM => Self::UNAVAILABLE,
            h2::Reason::CANCEL => Self::CANCELLED,
            h2::Reason::ENHANCE_YOUR_CALM => Self::RESOURCE_EXHAUSTED,
            h2::Reason::INADEQUATE_SECURITY => Self::PERMISSION_DENIED,
            _ => Self::INTERNAL,
        };
        Self { code, message: format!("the stream was reset: {}", reason.description()) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())?;
        if self.message.is_empty() { Ok(()) } else { write!(f, ": {}", self.message) }
    }
}

/// A connection to a server.
pub struct Client {
    server: Uri,
    requests: h2::client::SendRequest<Bytes>,
    /// Maximum size of a response message, in bytes.
    pub(super) max_message: usize,
    driver: tokio::task::JoinHandle<Result<(), h2::Error>>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Client {
    /// Connects to the server at `[http://]HOST:PORT`, from this address if one is given.
    ///
    /// # Errors
    /// `InvalidInput` if the URL is invalid. Otherwise when the host is unknown or refuses the connection.
    pub async fn connect(
        server: &str,
        from: Option<Ipv4Addr>,
        on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
    ) -> io::Result<Self> {
        let server = url(server)?;
        if server.path_and_query().is_some_and(|path| path != "/") {
            return Err(invalid(format!("{server}: a gRPC server has no path: write http://HOST:PORT")));
        }
        let to = address(&server).await?;
        let stream = connect(to, from).await?;
        on(Event::Connected(to))?;
        let (requests, connection) = h2::client::handshake(stream).await.map_err(io::Error::other)?;
        Ok(Self { server, requests, max_message: MAX_MESSAGE, driver: tokio::spawn(connection) })
    }

    /// Calls a method, `SERVICE/METHOD`, with these messages. Passes each step to `on`, where each body is a message.
    /// Returns the status of the call, also if the server or a proxy refuses it.
    ///
    /// # Errors
    /// `InvalidInput` if a header is invalid. Otherwise when the response is not valid gRPC or not complete, a message
    /// is too long, or `on` fails.
    pub async fn call(
        &mut self,
        method: &str,
        headers: &[String],
        messages: &[Bytes],
        on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
    ) -> io::Result<Status> {
        let request = self.request(method, headers)?;
        on(Event::Request(&http2::request_lines(&request)))?;
        let body = frames(messages)?;
        let mut requests = self.requests.clone().ready().await.map_err(io::Error::other)?;
        let (response, mut sending) =
            requests.send_request(request, body.is_empty()).map_err(io::Error::other)?;
        if !body.is_empty() {
            sending.send_data(body, true).map_err(io::Error::other)?;
        }
        match receive(response, self.max_message, on).await {
            // A server may answer before it has read the request, and then reset the stream.
            Err(CallError::Http2(error)) if error.is_reset() && !error.is_go_away() => {
                Ok(Status::of_reset(error.reason().unwrap_or(h2::Reason::INTERNAL_ERROR)))
            }
            Err(CallError::Http2(error)) => Err(io::Error::other(error)),
            Err(CallError::Other(error)) => Err(error),
            Ok(status) => Ok(status),
        }
    }

    fn request(&self, method: &str, headers: &[String]) -> io::Result<Request<()>> {
        let path = PathAndQuery::try_from(format!("/{method}"))
            .map_err(|error| invalid(format!("{method:?} is not a method: {error}")))?;
        let mut parts = self.server.clone().into_parts();
        (parts.scheme, parts.path_and_query) = (Some(Scheme::HTTP), Some(path));
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_parts(parts).map_err(|error| invalid(error.to_string()))?;
        let (given, left_out) = fields(headers)?;
        for (name, value) in [(CONTENT_TYPE, "application/grpc"), (TE, "trailers"), (USER_AGENT, "skysail")] {
            if !given.contains_key(&name) && !left_out.contains(&name) {
                request.headers_mut().insert(name, HeaderValue::from_static(value));
            }
        }
        request.headers_mut().extend(given);
        http2::set_authority(&mut request)?;
        Ok(request)
    }
}

/// Reason why there is no status.
enum CallError {
    Http2(h2::Error),
    Other(io::Error),
}

impl From<h2::Error> for CallError {
    fn from(error: h2::Error) -> Self {
        Self::Http2(error)
    }
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        Self::Other(error)
    }
}

async fn receive(
    response: h2::client::ResponseFuture,
    max_message: usize,
    on: &mut impl FnMut(Event<'_>) -> io::Result<()>,
) -> Result<Status, CallError> {
    let (head, mut incoming) = response.await?.into_parts();
    on(Event::Head(&http2::response_lines(head.status, &head.headers)))?;
    if let Some(status) = Status::read(&head.headers) {
        return Ok(status);
    }
    if head.status != StatusCode::OK {
        return Ok(Status::of_http(head.status));
    }
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    if !kind.starts_with(b"application/grpc") {
        let kind = String::from_utf8_lossy(kind);
        return Err(not_grpc(format!("its content-type is {kind:?}")).into());
    }
    let mut received = BytesMut::new();
    while let Some(piece) = incoming.data().await {
        let piece = piece?;
        incoming.flow_control().release_capacity(piece.len())?;
        received.extend_from_slice(&piece);
        while let Some(message) = next_message(&mut received, max_message)? {
            on(Event::Body(&message))?;
        }
    }
    if !received.is_empty() {
        return Err(not_grpc("it ends within a message").into());
    }
    let trailers = incoming.trailers().await?.unwrap_or_default();
    on(Event::Trailers(&http2::trailer_lines(&trailers)))?;
    let missing = || Status { code: Status::UNKNOWN, message: "the response has no grpc-status".to_owned() };
    Ok(Status::read(&trailers).unwrap_or_else(missing))
}

/// Encodes messages, each with its length before it and without compression.
fn frames(messages: &[Bytes]) -> io::Result<Bytes> {
    let mut body = BytesMut::new();
    for message in messages {
        let length = u32::try_from(message.len()).map_err(|_| invalid("a message is larger than 4 GiB"))?;
        body.extend_from_slice(&[0]);
        body.extend_from_slice(&length.to_be_bytes());
        body.extend_from_slice(message);
    }
    Ok(body.freeze())
}

/// Takes the first message if it has arrived completely.
fn next_message(received: &mut BytesMut, max_message: usize) -> io::Result<Option<Bytes>> {
    let Some((prefix, rest)) = received.split_first_chunk::<5>() else { return Ok(None) };
    let [flag, length @ ..] = *prefix;
    match flag {
        0 => {}
        1 => return Err(not_grpc("a message is compressed, though no compression was offered")),
        _ => return Err(not_grpc("a message has an unknown flag")),
    }
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > max_message {
        let what = format!("a message of {length} bytes is larger than the limit of {max_message} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    if rest.len() < length {
        return Ok(None);
    }
    received.advance(prefix.len());
    Ok(Some(received.split_to(length).freeze()))
}

fn not_grpc(what: impl fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the response is not valid gRPC: {what}"))
}

/// Decodes a header value whose bytes outside printable ASCII are sent as `%XX`.
fn percent_decoded(text: &[u8]) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..2).filter(|_| *first == b'%').and_then(|digits| str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                rest = &after[2..];
            }
            None => {
                decoded.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests;
