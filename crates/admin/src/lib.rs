//! The server of admin, readiness and metrics pages: HTTP/1 with limits on what a client may cost before its request is whole.
//!
//! | limit | value |
//! |---|---|
//! | time for a request's head, and between requests | 20 s |
//! | length of a head | 64 KiB |
//! | length of a body that a handler reads | 64 KiB |
//! | life of a connection | 10 min |
//! | connections in all, from one address | 256, 64 |
//! | connections without a request in progress | 128; a new one closes the oldest |
//!
//! So idle and slow clients do not keep readiness probes and scrapers out.

use std::{convert::Infallible, net::IpAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, DefaultBodyLimit},
    http::{
        HeaderName, HeaderValue, Request,
        header::{HOST, ORIGIN},
    },
    response::Response,
};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use skysail_core::{
    connections::{Admitted, Connections, Limits},
    descriptors,
    local::{Caller, Refusal},
};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use tower::ServiceExt as _;
use tracing::{debug, warn};

/// Bytes of a head, and of a body that a handler reads.
const LONGEST: usize = 64 << 10;
/// The pause after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(100);

/// What clients may take.
#[derive(Clone, Copy)]
struct Settings {
    limits: Limits,
    /// Time for a request's head, and between requests.
    head: Duration,
    /// Time from the first to the last byte.
    life: Duration,
}

const SETTINGS: Settings = Settings {
    limits: Limits { most: 256, by_address: Some(64), unproven: 128 },
    head: Duration::from_secs(20),
    life: Duration::from_secs(600),
};

/// The two addresses of a connection; handlers extract `ConnectInfo<Ends>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The server's, where it is known.
    pub local: Option<IpAddr>,
    /// The client's.
    pub remote: IpAddr,
}

impl Ends {
    /// Checks that a request comes from this network namespace, and not from a page of another site in a browser.
    ///
    /// # Errors
    /// Why the caller may not see what is for callers from here alone.
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

/// Serves the pages of a router for ever.
pub async fn serve(listener: TcpListener, router: Router) -> Infallible {
    serve_with(listener, router, SETTINGS).await
}

async fn serve_with(listener: TcpListener, router: Router, settings: Settings) -> Infallible {
    let connections = Connections::new(settings.limits);
    let router = router.layer(DefaultBodyLimit::max(LONGEST));
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
        let ends = Ends { local, remote: remote.ip().to_canonical() };
        tokio::spawn(connection(stream, ends, router.clone(), Arc::new(admitted), settings));
    }
}

async fn connection(
    stream: TcpStream,
    ends: Ends,
    router: Router,
    admitted: Arc<Admitted>,
    settings: Settings,
) {
    let answer = |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(ends));
        let (router, admitted) = (router.clone(), Arc::clone(&admitted));
        async move {
            admitted.prove();
            let response: Result<Response, Infallible> = router.oneshot(request.map(Body::new)).await;
            admitted.doubt();
            response
        }
    };
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(settings.head)
        .max_buf_size(LONGEST)
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    tokio::select! {
        served = timeout(settings.life, served) => match served {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "a connection to the admin pages ended"),
            Err(_) => debug!("a connection to the admin pages has reached its longest life"),
        },
        () = admitted.shed() => debug!("a connection to the admin pages made room for another"),
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
        let who = async |ConnectInfo(ends): ConnectInfo<Ends>| format!("{} to {:?}", ends.remote, ends.local);
        let router = Router::new().route("/who", get(who)).route("/body", get(async |body: String| body));
        tokio::spawn(serve_with(listener, router, settings));
        address
    }

    async fn send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    /// All that comes until the server closes.
    async fn rest(mut stream: TcpStream) -> String {
        let mut answer = Vec::new();
        // A reset ends it, too.
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn a_head_must_come_in_time_and_so_must_the_next() {
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
    async fn clients_that_ask_nothing_keep_nobody_out() {
        let limits = Limits { most: 8, by_address: Some(6), unproven: 4 };
        let address = start(Settings { limits, head: LONG, life: LONG }).await;
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
    async fn heads_and_bodies_have_a_length() {
        let address = start(SETTINGS).await;
        let long = format!("GET /who HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "x".repeat(2 * LONGEST));
        let answer = rest(send(address, long.as_bytes()).await).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
        let length = LONGEST + 1;
        let head =
            format!("GET /body HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
        let long = [head.into_bytes(), vec![b'x'; length]].concat();
        let answer = rest(send(address, &long).await).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    }

    #[tokio::test]
    async fn a_connection_ends_some_day() {
        let address = start(Settings { life: Duration::from_millis(50), head: LONG, ..SETTINGS }).await;
        assert_eq!(rest(send(address, b"").await).await, "");
    }
}
