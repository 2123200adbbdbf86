//! A connection of HTTP/2 that several streams share. It is opened again when it is lost.

use std::{
    cell::{Cell, RefCell},
    io::{self, ErrorKind},
};

use bytes::{Bytes, BytesMut};
use h2::client::SendRequest;
use http::{Request, Version};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    sync::Mutex,
};
use tokio_rustls::TlsConnector;

use super::Thread;
use crate::{
    args::LoadArgs,
    clock, grpc,
    tally::{Failure, Outcome},
    target::{Protocol, Target},
};

/// Flow-control window of a stream and of a connection in bytes, so large that it does not limit the load.
const WINDOW: u32 = 16 << 20;
/// Bytes of a gRPC response from which no more are kept to read its message.
const MAX_MESSAGE: usize = 64 << 10;

pub(super) struct SharedConnection {
    /// The lock is held while the connection is opened.
    current: Mutex<Option<SendRequest<Bytes>>>,
    /// The connection is not to be used further.
    is_lost: Cell<bool>,
    /// Requests that it may still be used for.
    left: Cell<u32>,
    reuse: (u32, u32),
    rng: RefCell<fastrand::Rng>,
    sockets: Cell<u64>,
}

impl SharedConnection {
    pub(super) fn new(args: &LoadArgs) -> Self {
        let reuse =
            if args.keepalive { args.connection_reuse.unwrap_or((u32::MAX, u32::MAX)) } else { (1, 1) };
        Self {
            current: Mutex::new(None),
            is_lost: Cell::new(false),
            left: Cell::new(0),
            reuse,
            rng: RefCell::new(fastrand::Rng::new()),
            sockets: Cell::new(0),
        }
    }

    /// Returns the number of sockets so far.
    pub(super) fn sockets(&self) -> u64 {
        self.sockets.get()
    }

    /// Marks the connection with this number as lost, so that the next request opens another one. Requests in progress
    /// continue on it.
    pub(super) fn discard(&self, number: u64) {
        if number == self.sockets.get() {
            self.is_lost.set(true);
        }
    }

    /// Sends a request. Returns its outcome and the bytes of the response's body.
    pub(super) async fn exchange(&self, thread: &Thread) -> Result<(Outcome, u64), Failure> {
        let target = &thread.target;
        let mut sender = self.open(thread).await?;
        if sender.clone().ready().await.is_err() {
            // The server has closed the connection since the last request. This one has not been sent.
            self.discard(self.sockets());
            sender = self.open(thread).await?;
        }
        let number = self.sockets();
        let mut sender = sender.ready().await.map_err(|error| self.lose(thread, number, &error))?;
        let request = request(target, thread.args.ping)?;
        let has_body = !thread.body.is_empty();
        let (response, mut stream) =
            sender.send_request(request, !has_body).map_err(|error| self.lose(thread, number, &error))?;
        if has_body {
            stream.send_data(thread.body.clone(), true).map_err(|error| self.lose(thread, number, &error))?;
        }
        let response = response.await.map_err(|error| self.lose(thread, number, &error))?;
        let status = response.status();
        let early = response.headers().get("grpc-status").map(|status| status.as_bytes().to_vec());
        let mut body = response.into_body();
        let (mut size, mut message) = (0, BytesMut::new());
        while let Some(data) = body.data().await {
            let data = data.map_err(|error| self.lose(thread, number, &error))?;
            size += data.len() as u64;
            if target.protocol == Protocol::Grpc && message.len() < MAX_MESSAGE {
                message.extend_from_slice(&data);
            }
            body.flow_control()
                .release_capacity(data.len())
                .map_err(|error| self.lose(thread, number, &error))?;
        }
        if target.protocol != Protocol::Grpc {
            return Ok((Outcome::Status(status.as_u16()), size));
        }
        let trailers = body.trailers().await.map_err(|error| self.lose(thread, number, &error))?;
        let late = trailers.as_ref().and_then(|trailers| trailers.get("grpc-status"));
        let code = late.map(|status| status.as_bytes()).or(early.as_deref());
        Ok((grpc::outcome(thread.args.ping, code, &message), size))
    }

    /// Discards the connection with this number if an error concerns all its streams. Returns the failure.
    fn lose(&self, thread: &Thread, number: u64, error: &h2::Error) -> Failure {
        if !error.is_reset() {
            self.discard(number);
        }
        thread.failed(failure(error), error)
    }

    async fn open(&self, thread: &Thread) -> Result<SendRequest<Bytes>, Failure> {
        let mut current = self.current.lock().await;
        let is_lost = self.is_lost.replace(false);
        if self.left.get() == 0 || is_lost {
            *current = None;
        }
        let sender = match &*current {
            Some(sender) => sender.clone(),
            None => {
                let began = clock::now();
                self.sockets.set(self.sockets.get() + 1);
                let sender = open(thread).await?;
                let took = clock::now().saturating_sub(began);
                thread.tally.borrow_mut().connects.saturating_record(took);
                self.left.set(self.rng.borrow_mut().u32(self.reuse.0..=self.reuse.1));
                current.insert(sender).clone()
            }
        };
        self.left.set(self.left.get().saturating_sub(1));
        Ok(sender)
    }
}

fn request(target: &Target, is_ping: bool) -> Result<Request<()>, Failure> {
    let scheme = if target.tls.is_some() { "https" } else { "http" };
    let is_grpc = target.protocol == Protocol::Grpc;
    let path = match (is_grpc, is_ping) {
        (false, _) => target.path(),
        (true, false) => grpc::HEALTH,
        (true, true) => grpc::PING,
    };
    let method = if is_grpc { "POST" } else { &target.method };
    let uri = format!("{scheme}://{}{path}", target.authority());
    let mut request = Request::builder().version(Version::HTTP_2).method(method).uri(uri);
    if is_grpc {
        request = request.header("content-type", "application/grpc").header("te", "trailers");
    }
    let skips = |name: &str| name == "host" || is_grpc && name == "content-type";
    for (name, value) in target.headers.iter().filter(|(name, _)| !skips(name)) {
        request = request.header(name, value);
    }
    request.body(()).map_err(|_| Failure::Protocol)
}

async fn open(thread: &Thread) -> Result<SendRequest<Bytes>, Failure> {
    let not_connected = |error: io::Error| thread.failed(Failure::Connect, &error);
    let address = &thread.target.address;
    if let Some(address) = address.as_socket() {
        let stream = TcpStream::connect(address).await.map_err(not_connected)?;
        stream.set_nodelay(true).map_err(not_connected)?;
        return secure(thread, stream).await;
    }
    let path = address.as_pathname().ok_or(Failure::Connect)?;
    secure(thread, UnixStream::connect(path).await.map_err(not_connected)?).await
}

async fn secure(
    thread: &Thread,
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
) -> Result<SendRequest<Bytes>, Failure> {
    let Some(tls) = &thread.target.tls else { return handshake(thread, stream).await };
    let (config, server) = tls.parts();
    let stream = TlsConnector::from(config).connect(server, stream).await;
    handshake(thread, stream.map_err(|error| thread.failed(Failure::Tls, &error))?).await
}

async fn handshake(
    thread: &Thread,
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
) -> Result<SendRequest<Bytes>, Failure> {
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(WINDOW);
    let opened = builder.handshake(stream).await;
    let (sender, connection) = opened.map_err(|error| thread.failed(Failure::Protocol, &error))?;
    tokio::task::spawn_local(async move {
        // Requests on the connection get the same error.
        let _ = connection.await;
    });
    Ok(sender)
}

fn failure(error: &h2::Error) -> Failure {
    match error.get_io() {
        // With TLS 1.3, a server refuses the certificate of the client after the client's handshake.
        Some(error) if error.kind() == ErrorKind::InvalidData => Failure::Tls,
        Some(_) => Failure::Closed,
        None if error.is_reset() || error.is_go_away() => Failure::Reset,
        None => Failure::Protocol,
    }
}
