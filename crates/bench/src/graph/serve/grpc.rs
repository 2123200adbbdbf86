//! gRPC over HTTP/2 with prior knowledge. The message is that of Fortio's ping, so Fortio can send requests too: its
//! payload has the size that the graph sets. Every method runs the script. `/metrics` returns the counters, because a
//! sidecar sends all requests for a port with the name `grpc` over HTTP/2.

use std::{cell::RefCell, rc::Rc, time::Instant};

use bytes::Bytes;
use h2::{
    RecvStream,
    client::SendRequest,
    server::{self, SendResponse},
};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, uri::Authority};
use skysail_load::{
    grpc::{self, PingMessage},
    server::WINDOW,
};
use tokio::net::TcpStream;

use super::{
    MockService,
    incoming::{FORWARDED, METRICS},
    outgoing,
};
use crate::graph::model::ServiceCall;

/// Maximum number of concurrent streams of a connection.
const MAX_STREAMS: u32 = 1_000;
/// Maximum size of the headers of a request in bytes.
const MAX_HEADERS: u32 = 64 << 10;
/// Status of a response that is an error (INTERNAL).
const INTERNAL: &str = "13";

/// Serves the requests of a connection.
///
/// # Errors
/// The connection fails.
pub(super) async fn serve(stream: TcpStream, service: Rc<MockService>) -> Result<(), h2::Error> {
    let mut builder = server::Builder::new();
    builder
        .initial_connection_window_size(WINDOW)
        .initial_window_size(WINDOW)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADERS);
    let mut connection = builder.handshake(stream).await?;
    while let Some(request) = connection.accept().await {
        let (request, response) = request?;
        let service = Rc::clone(&service);
        tokio::task::spawn_local(async move { drop(answer(request, response, &service).await) });
    }
    Ok(())
}

async fn answer(
    request: Request<RecvStream>,
    mut response: SendResponse<Bytes>,
    service: &Rc<MockService>,
) -> Result<(), h2::Error> {
    let started = Instant::now();
    let (head, mut body) = request.into_parts();
    discard(&mut body).await?;
    if head.uri.path().as_bytes() == METRICS {
        let mut stream = response.send_response(Response::new(()), false)?;
        return stream.send_data(service.counters.text().into(), true);
    }
    service.counters.received();
    let result = service.answer(forwarded(&head.headers)).await;
    let (status, text) = match &result {
        Ok(()) => ("0", ""),
        Err(error) => (INTERNAL, error.trim_end()),
    };
    let mut trailers = HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static(status))]);
    // The text of an error is ASCII, as hosts and statuses are; another one is left out.
    if let Ok(text) = HeaderValue::from_str(&text.replace('\n', "; "))
        && !text.is_empty()
    {
        trailers.insert(HeaderName::from_static("grpc-message"), text);
    }
    let mut head = Response::new(());
    head.headers_mut().insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    let mut stream = response.send_response(head, false)?;
    if result.is_ok() {
        let mut message = service.response_message.borrow_mut();
        let message = message.get_or_insert_with(|| ping(service.response_size));
        stream.send_data(message.clone(), false)?;
    }
    stream.send_trailers(trailers)?;
    let size = result.as_ref().map_or(0, |()| service.response_size);
    service.counters.answered(result.is_ok(), started.elapsed(), size);
    Ok(())
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// Returns the message with a payload of this size.
fn ping(size: u64) -> Bytes {
    let payload = "x".repeat(usize::try_from(size).unwrap_or(0));
    grpc::frame(&PingMessage { seq: 1, ts: 0, payload, delay_nanos: 0 })
}

/// Reads a body and discards it.
async fn discard(body: &mut RecvStream) -> Result<(), h2::Error> {
    while let Some(data) = body.data().await {
        let length = data?.len();
        body.flow_control().release_capacity(length)?;
    }
    Ok(())
}

/// Returns the headers that calls repeat, as lines of HTTP/1.1.
fn forwarded(headers: &HeaderMap) -> Rc<[u8]> {
    let mut lines = Vec::new();
    for (name, value) in headers.iter().filter(|(name, _)| FORWARDED.contains(&name.as_str())) {
        lines.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    lines.into()
}

/// A call of a script with its connection.
pub(super) struct GrpcCall {
    authority: Authority,
    uri: Uri,
    headers: HeaderMap,
    message: Bytes,
    connection: RefCell<Option<SendRequest<Bytes>>>,
}

impl GrpcCall {
    pub(super) fn new(authority: &Authority, call: &ServiceCall) -> anyhow::Result<Self> {
        let mut headers = HeaderMap::new();
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(http::header::TE, HeaderValue::from_static("trailers"));
        for (name, value) in &call.headers {
            headers.append(HeaderName::from_bytes(name.as_bytes())?, HeaderValue::from_str(value)?);
        }
        Ok(Self {
            authority: authority.clone(),
            uri: Uri::builder()
                .scheme("http")
                .authority(authority.clone())
                .path_and_query(grpc::PING)
                .build()?,
            headers,
            message: ping(call.size),
            connection: RefCell::new(None),
        })
    }

    /// Calls the service. Fails unless the status of gRPC is 0.
    pub(super) async fn call(&self, forwarded: &[u8]) -> Result<(), String> {
        let failed = |error: anyhow::Error| format!("cannot call {}: {error}\n", self.authority);
        let status = self.exchange(forwarded).await.map_err(failed)?;
        if status == "0" {
            return Ok(());
        }
        Err(format!("{} responded with gRPC status {status}\n", self.authority))
    }

    async fn exchange(&self, forwarded: &[u8]) -> anyhow::Result<String> {
        let mut request = Request::post(self.uri.clone()).body(())?;
        *request.headers_mut() = self.headers.clone();
        for line in forwarded.split(|byte| *byte == b'\n') {
            let Some((name, value)) = split(line) else { continue };
            request.headers_mut().append(HeaderName::from_bytes(name)?, HeaderValue::from_bytes(value)?);
        }
        let mut sender = self.sender().await?;
        let (response, mut body) = sender.send_request(request, false)?;
        body.send_data(self.message.clone(), true)?;
        let (head, mut body) = response.await?.into_parts();
        discard(&mut body).await?;
        let trailers = body.trailers().await?;
        let status = trailers.as_ref().and_then(|trailers| trailers.get(GRPC_STATUS));
        let status = status.or_else(|| head.headers.get(GRPC_STATUS)).and_then(|status| status.to_str().ok());
        Ok(match status {
            Some(status) => status.to_owned(),
            None if head.status == StatusCode::OK => "none".to_owned(),
            None => format!("none and HTTP status {}", head.status.as_u16()),
        })
    }

    /// Returns the connection; opens one unless it is usable.
    async fn sender(&self) -> anyhow::Result<SendRequest<Bytes>> {
        let kept = self.connection.borrow().clone();
        if let Some(sender) = kept
            && let Ok(sender) = sender.ready().await
        {
            return Ok(sender);
        }
        let stream = TcpStream::connect(outgoing::address(&self.authority)).await?;
        stream.set_nodelay(true)?;
        let mut builder = h2::client::Builder::new();
        builder.initial_connection_window_size(WINDOW).initial_window_size(WINDOW);
        let (sender, connection) = builder.handshake(stream).await?;
        // An error of the connection is one of its requests.
        tokio::task::spawn_local(async move { drop(connection.await) });
        self.connection.replace(Some(sender.clone()));
        Ok(sender.ready().await?)
    }
}

fn split(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = memchr::memchr(b':', line)?;
    Some((&line[..colon], line[colon + 1..].trim_ascii()))
}
