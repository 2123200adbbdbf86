//! The server for HTTP/2 with prior knowledge: echoes requests, and answers gRPC's health check and Fortio's ping.

use std::{
    convert::Infallible,
    net::{TcpListener, TcpStream},
    time::Duration,
};

use bytes::Bytes;
use h2::{RecvStream, server::SendResponse};
use http::{HeaderMap, HeaderValue, Request, Response};
use prost::Message as _;
use tokio::{sync::mpsc, task::LocalSet};

use super::{behavior::Behavior, burst};
use crate::grpc::{self, HealthResponse, PingMessage};

/// Flow-control window of a connection in bytes, so large that no WINDOW_UPDATE is needed. The time of such frames, and
/// whether they are sent with other frames, would be random.
pub const WINDOW: u32 = 1 << 30;
/// Maximum of a request's body in bytes.
const MAX_BODY: usize = 1 << 20;
/// Maximum number of concurrent streams of a connection.
const MAX_STREAMS: u32 = 1_000;
/// Pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Channel by which the server for HTTP/1 hands over connections of HTTP/2.
pub(super) type HandOver = mpsc::UnboundedSender<TcpStream>;

/// Creates the channel of connections that are handed over.
pub(super) fn channel() -> (HandOver, mpsc::UnboundedReceiver<TcpStream>) {
    mpsc::unbounded_channel()
}

/// Serves the connections of this listener.
///
/// # Errors
/// The listener fails.
pub fn serve_one(listener: TcpListener) -> anyhow::Result<Infallible> {
    serve(listener, channel().1)
}

/// Serves the connections of this listener, and those that are handed over.
///
/// # Errors
/// The listener fails.
pub(super) fn serve(
    listener: TcpListener,
    mut handed_over: mpsc::UnboundedReceiver<TcpStream>,
) -> anyhow::Result<Infallible> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            let stream = tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => stream,
                    // Too many open files: later connections wait.
                    Err(_) => {
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                },
                Some(stream) = handed_over.recv() => tokio::net::TcpStream::from_std(stream)?,
            };
            stream.set_nodelay(true)?;
            // An error ends the connection, which the client notices.
            tokio::task::spawn_local(async { drop(connection(stream).await) });
        }
    })
}

async fn connection(stream: tokio::net::TcpStream) -> Result<(), h2::Error> {
    let mut builder = h2::server::Builder::new();
    builder.initial_connection_window_size(WINDOW).max_concurrent_streams(MAX_STREAMS);
    let mut connection = burst::BurstConnection::handshake(stream, &builder).await?;
    while let Some(request) = connection.accept().await {
        let (request, answer) = request?;
        tokio::task::spawn_local(async { drop(answer_request(request, answer).await) });
    }
    Ok(())
}

/// Answers once the request is complete.
async fn answer_request(
    request: Request<RecvStream>,
    mut answer: SendResponse<Bytes>,
) -> Result<(), h2::Error> {
    let (head, mut stream) = request.into_parts();
    let (mut parts, mut size) = (Vec::with_capacity(1), 0);
    while let Some(data) = stream.data().await {
        let data = data?;
        stream.flow_control().release_capacity(data.len())?;
        size += data.len();
        if size > MAX_BODY {
            answer.send_reset(h2::Reason::ENHANCE_YOUR_CALM);
            return Ok(());
        }
        parts.push(data);
    }
    if head.headers.get("content-type").is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
    {
        return answer_grpc(head.uri.path(), &parts.concat(), &mut answer);
    }
    let asked = match head.uri.query() {
        None => Ok(Behavior::default()),
        Some(query) => Behavior::of(query, &mut fastrand::Rng::new()),
    };
    let asked = match asked {
        Ok(asked) => asked,
        Err(error) => {
            parts = vec![Bytes::from(format!("{error}\n"))];
            Behavior { status: Some(400), ..Behavior::default() }
        }
    };
    if !asked.delay.is_zero() {
        tokio::time::sleep(asked.delay).await;
    }
    if let Some(size) = asked.size {
        parts = if size == 0 { Vec::new() } else { vec![Bytes::from(vec![b'x'; size])] };
    }
    let mut head = Response::builder()
        .status(asked.status.unwrap_or(200))
        .header("content-type", "text/plain")
        .header("server", "skysail-bench");
    for (name, value) in &asked.headers {
        head = head.header(name, value);
    }
    let Ok(head) = head.body(()) else { return Ok(()) };
    let mut stream = answer.send_response(head, parts.is_empty())?;
    let count = parts.len();
    for (index, part) in parts.into_iter().enumerate() {
        stream.send_data(part, index + 1 == count)?;
    }
    Ok(())
}

/// Answers a gRPC call.
fn answer_grpc(path: &str, body: &[u8], answer: &mut SendResponse<Bytes>) -> Result<(), h2::Error> {
    let message = body.get(5..).unwrap_or_default();
    let (reply, status) = match path {
        grpc::HEALTH => (Some(grpc::frame(&HealthResponse { status: 1 })), "0"),
        grpc::PING => match PingMessage::decode(message) {
            Ok(ping) => (Some(grpc::frame(&ping)), "0"),
            Err(_) => (None, "3"),
        },
        _ => (None, "12"),
    };
    let head = Response::builder().header("content-type", "application/grpc").body(());
    let Ok(head) = head else { return Ok(()) };
    let mut stream = answer.send_response(head, false)?;
    if let Some(reply) = reply {
        stream.send_data(reply, false)?;
    }
    stream.send_trailers(HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        HeaderValue::from_static(status),
    )]))
}
