//! HTTP/1 server of the admin, readiness and metrics pages, with limits for clients.
//!
//! | limit | value |
//! |---|---|
//! | timeout of a request's head, and between requests | 20 s |
//! | length of a head | 64 KiB |
//! | length of a body that a handler reads | 64 KiB |
//! | timeout for the client to read a response | 60 s |
//! | maximum duration of a connection | 10 min |
//! | connections in total; from one address | 256; 64 |
//! | connections without a request in progress | 128; a further one closes the oldest |
//!
//! With these limits, idle and slow clients do not block readiness probes and scrapers.

mod index;

use std::{
    convert::Infallible,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, DefaultBodyLimit},
    http::{
        HeaderName, HeaderValue, Request, StatusCode,
        header::{HOST, ORIGIN},
    },
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use hyper::{
    body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use skysail_core::{
    connections::{Admitted, Connections, Limits},
    descriptors,
    local::{Caller, Refusal},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tower::ServiceExt as _;
use tracing::{debug, warn};

pub use index::index;

/// Maximum length of a head, of a body that a handler reads, and of a piece of a response, in bytes.
const MAX_LENGTH: usize = 64 << 10;
/// Pause after `accept` has failed.
const RETRY: Duration = Duration::from_millis(100);

/// Limits for clients.
#[derive(Clone, Copy)]
struct Settings {
    limits: Limits,
    /// Timeout of a request's head, and between requests.
    head: Duration,
    /// Timeout from the start of a response until the client has read all of it.
    response: Duration,
    /// Maximum duration of a connection.
    life: Duration,
}

const SETTINGS: Settings = Settings {
    limits: Limits { total: 256, by_address: Some(64), by_identity: None, evictable: 128 },
    head: Duration::from_secs(20),
    response: Duration::from_secs(60),
    life: Duration::from_secs(600),
};

/// The addresses of a connection; handlers extract `ConnectInfo<ConnectionAddresses>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionAddresses {
    /// Address of the server, if known.
    pub local: Option<IpAddr>,
    /// Address of the client.
    pub remote: IpAddr,
}

impl ConnectionAddresses {
    /// Checks that a request comes from this network namespace. Refuses requests that a browser sends for a
    /// page of another site.
    ///
    /// # Errors
    /// Fails with the reason if the caller may not use the pages for local callers.
    pub fn check<B>(self, request: &Request<B>) -> Result<(), Refusal> {
        let values = |name| request.headers().get_all(name).iter().map(HeaderValue::as_bytes);
        let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
        Caller {
            local: self.local,
            remote: self.remote,
            hosts: values(HOST).chain(authority).collect(),
            origins: values(ORIGIN).collect(),
            sites: values(HeaderName::from_static("sec-fetch-site")).collect(),
        }
        .check()
    }
}

/// Middleware that refuses callers which [`ConnectionAddresses::check`] does not accept, with status 403.
pub async fn local_only(
    ConnectInfo(ends): ConnectInfo<ConnectionAddresses>,
    request: Request<Body>,
    next: Next,
) -> Response {
    match ends.check(&request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => (StatusCode::FORBIDDEN, format!("{refusal}\n")).into_response(),
    }
}

/// Serves the pages of a router; never returns.
pub async fn serve(listener: TcpListener, router: Router) -> Infallible {
    serve_with(listener, router, SETTINGS).await
}

async fn serve_with(listener: TcpListener, router: Router, settings: Settings) -> Infallible {
    let connections = Connections::new(settings.limits);
    let router = router.layer(DefaultBodyLimit::max(MAX_LENGTH));
    loop {
        let (stream, remote) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a connection to the admin pages");
                sleep(RETRY).await;
                continue;
            }
        };
        let Some(admitted) = connections.admit(remote.ip(), descriptors::is_reserved(&stream)) else {
            continue;
        };
        let local = stream.local_addr().ok().map(|address| address.ip().to_canonical());
        let ends = ConnectionAddresses { local, remote: remote.ip().to_canonical() };
        tokio::spawn(connection(stream, ends, router.clone(), Arc::new(admitted), settings));
    }
}

async fn connection(
    stream: TcpStream,
    ends: ConnectionAddresses,
    router: Router,
    admitted: Arc<Admitted>,
    settings: Settings,
) {
    let (begun, begins) = watch::channel(None);
    let answer = |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(ends));
        let (router, admitted, begun) = (router.clone(), Arc::clone(&admitted), begun.clone());
        async move {
            admitted.mark_used();
            let response: Result<Response, Infallible> = router.oneshot(request.map(Body::new)).await;
            begun.send_replace(Some(Instant::now()));
            response
                .map(|response| response.map(|body| Sending { body, rest: Bytes::new(), admitted, begun }))
        }
    };
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(settings.head)
        .max_buf_size(MAX_LENGTH)
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    tokio::select! {
        served = timeout(settings.life, served) => match served {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "a connection to the admin pages ended"),
            Err(_) => debug!("a connection to the admin pages reached its maximum duration"),
        },
        () = admitted.shed() => debug!("a connection to the admin pages was closed in favour of another"),
        () = overdue(begins, settings.response) => {
            debug!("a connection to the admin pages was closed: the client reads too slowly");
        }
    }
}

/// Returns when the client has not read a response within the limit.
async fn overdue(mut begun: watch::Receiver<Option<Instant>>, limit: Duration) {
    while let Ok(Some(since)) = begun.wait_for(Option::is_some).await.map(|since| *since) {
        if timeout_at(since + limit, begun.wait_for(|now| *now != Some(since))).await.is_err() {
            return;
        }
    }
}

/// Body of a response, written in pieces. The server drops it when it has buffered the last piece, or when the response
/// is cancelled. The connection is then idle.
struct Sending {
    body: Body,
    /// Rest of a frame that has not been written yet.
    rest: Bytes,
    admitted: Arc<Admitted>,
    begun: watch::Sender<Option<Instant>>,
}

impl HttpBody for Sending {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        let piece = self.rest.len().min(MAX_LENGTH);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.begun.send_replace(None);
        self.admitted.mark_evictable();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    async fn start(settings: Settings) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let who = async |ConnectInfo(ends): ConnectInfo<ConnectionAddresses>| {
            format!("{} to {:?}", ends.remote, ends.local)
        };
        let large = async || Bytes::from_static(&[b'x'; 32 << 20]);
        let router = Router::new().route("/who", get(who)).route("/body", get(async |body: String| body));
        let router = router.route("/large", get(large));
        tokio::spawn(serve_with(listener, router, settings));
        address
    }

    async fn send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    /// Reads until the server closes the connection.
    async fn rest(mut stream: TcpStream) -> String {
        let mut answer = Vec::new();
        // A reset also ends the read.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn each_request_head_has_a_timeout() {
        let address = start(Settings { head: Duration::from_millis(50), ..SETTINGS }).await;
        assert_eq!(rest(send(address, b"").await).await, "");
        assert_eq!(rest(send(address, b"GET /who HTTP/1.1\r\nhost: a\r\n").await).await, "");
        let kept = rest(send(address, b"GET /who HTTP/1.1\r\nhost: a\r\n\r\n").await).await;
        assert!(
            kept.starts_with("HTTP/1.1 200 OK") && kept.ends_with("127.0.0.1 to Some(127.0.0.1)"),
            "{kept}"
        );
    }

    #[tokio::test]
    async fn idle_clients_do_not_block_others() {
        let limits = Limits { total: 8, by_address: Some(6), by_identity: None, evictable: 4 };
        let address = start(Settings { limits, head: LONG, life: LONG, ..SETTINGS }).await;
        let mut slow = Vec::new();
        for _ in 0..20 {
            slow.push(send(address, b"GET /who HTTP/1.1\r\n").await);
        }
        let answer =
            rest(send(address, b"GET /who HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await).await;
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        for first in slow.drain(..17) {
            assert_eq!(rest(first).await, "");
        }
    }

    #[tokio::test]
    async fn a_response_must_be_read_in_time() {
        let address =
            start(Settings { response: Duration::from_millis(50), head: LONG, life: LONG, ..SETTINGS }).await;
        let mut slow = send(address, b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n").await;
        // The client reads only one byte, so it notices the close by a failed write.
        slow.read_u8().await.unwrap();
        while slow.write_all(b"\r\n").await.is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
        assert!(rest(slow).await.len() < 32 << 20);
        // A connection whose responses are all read in time stays open for longer than this limit.
        let mut kept = TcpStream::connect(address).await.unwrap();
        let mut answer = [0; 1];
        for _ in 0..100 {
            kept.write_all(b"GET /who HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
            while !answer.ends_with(b")") {
                assert_eq!(kept.read(&mut answer).await.unwrap(), 1);
            }
            answer = [0];
            sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn a_connection_is_idle_after_its_response_is_read() {
        let limits = Limits { total: 8, by_address: None, by_identity: None, evictable: 1 };
        let address = start(Settings { limits, head: LONG, life: LONG, ..SETTINGS }).await;
        let mut reader = send(address, b"GET /large HTTP/1.1\r\nhost: a\r\n\r\n").await;
        reader.read_u8().await.unwrap();
        let first = send(address, b"").await;
        let second = send(address, b"").await;
        assert_eq!(rest(first).await, "", "the second connection replaced the first");
        let mut body = vec![0; 32 << 20];
        reader.read_exact(&mut body).await.unwrap();
        // The reader is now idle and older than the new connections, so one of them replaces it.
        drop(second);
        let mut others = Vec::new();
        for _ in 0..4 {
            others.push(send(address, b"").await);
        }
        rest(reader).await;
    }

    #[tokio::test]
    async fn the_length_of_heads_and_bodies_is_limited() {
        let address = start(SETTINGS).await;
        let long = format!("GET /who HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "x".repeat(2 * MAX_LENGTH));
        let answer = rest(send(address, long.as_bytes()).await).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
        let length = MAX_LENGTH + 1;
        let head =
            format!("GET /body HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
        let long = [head.into_bytes(), vec![b'x'; length]].concat();
        let answer = rest(send(address, &long).await).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    }

    #[tokio::test]
    async fn a_connection_has_a_maximum_duration() {
        let address = start(Settings { life: Duration::from_millis(50), head: LONG, ..SETTINGS }).await;
        assert_eq!(rest(send(address, b"").await).await, "");
    }
}
