//! The client: takes resources from any xDS server over one aggregated stream, and keeps at it.
//!
//! Losing the connection loses nothing: the handler is told nothing, the client reconnects with jittered
//! exponential backoff, says what it has, and is sent what changed meanwhile.
//!
//! ```no_run
//! use skysail_xds::{Kind, client::{Client, Connection, Form, Options, Rejection}};
//! # async fn example(node: skysail_xds::envoy::pb::envoy::config::core::v3::Node) {
//! let (client, subscriptions) = Client::new(Options {
//!     node,
//!     form: Form::Delta,
//!     wildcard: vec![Kind::Cluster, Kind::Listener],
//! });
//! let connect = async || {
//!     let endpoint = tonic::transport::Endpoint::from_static("http://127.0.0.1:15010")
//!         .http2_keep_alive_interval(std::time::Duration::from_secs(10))
//!         .keep_alive_while_idle(true);
//!     let mut connection = Connection::new(endpoint.connect().await?);
//!     connection.metadata.insert("authorization", "Bearer …".parse()?);
//!     Ok(connection)
//! };
//! client
//!     .run(connect, async |update| {
//!         // Apply; ask for what it refers to; say what is wrong with it.
//!         for cluster in update.added.iter().filter(|_| update.kind == Kind::Cluster) {
//!             subscriptions.subscribe(Kind::Endpoint, [cluster.name.as_str()]);
//!         }
//!         Vec::<Rejection>::new()
//!     })
//!     .await; // Never returns; drop the future to stop.
//! # }
//! ```

mod state;

use std::{
    collections::BTreeSet,
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use skysail_proto::Codec;
use skysail_proto::envoy::pb::envoy::{
    config::core::v3::Node,
    service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest},
};
use tokio::sync::{Notify, mpsc, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{
    Request, Status, client::Grpc, codegen::http::uri::PathAndQuery, metadata::MetadataMap,
    transport::Channel,
};
use tonic_prost::ProstCodec;
use tracing::{info, warn};

use self::state::{ClientState, Incoming, Outgoing};
pub use crate::wire::Form;
use crate::{
    kind::Kind,
    wire::{self, DeltaResponse, SotwResponse},
};

/// The pause before the second attempt to connect; it doubles from there.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// The longest pause.
const LAST_RETRY: Duration = Duration::from_secs(10);

/// What a client is and wants.
#[derive(Clone, Debug)]
pub struct Options {
    /// Who asks.
    pub node: Node,
    /// Which form of the protocol to speak.
    pub form: Form,
    /// Kinds of which to take all there are. Of the others only what is subscribed to.
    pub wildcard: Vec<Kind>,
}

/// A resource as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its name.
    pub name: String,
    /// The server's version of it; of the whole response in the state-of-the-world form.
    pub version: String,
    /// The encoded message.
    pub body: Bytes,
}

impl Received {
    /// Decodes the body.
    ///
    /// # Errors
    /// When it is no such message.
    pub fn decode<M: Codec>(&self) -> Result<M, skysail_proto::DecodeError> {
        M::from_slice(&self.body)
    }
}

/// A change of one kind of resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Of which kind.
    pub kind: Kind,
    /// New or changed.
    pub added: Vec<Received>,
    /// No longer there, or asked for and not existing.
    pub removed: Vec<String>,
}

/// Why a resource of an update is not used. The one before it stays in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The resource.
    pub name: String,
    /// What is wrong: field and what to do.
    pub reason: String,
}

/// A connection to a server and what to send with each stream's headers, such as a token.
#[derive(Debug)]
pub struct Connection {
    /// The connection.
    pub channel: Channel,
    /// Headers.
    pub metadata: MetadataMap,
}

impl Connection {
    /// A connection without further headers.
    pub fn new(channel: Channel) -> Self {
        Self { channel, metadata: MetadataMap::new() }
    }
}

/// Why a connection could not be made or a stream ended.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Takes resources from a server.
#[derive(Debug)]
pub struct Client {
    state: ClientState,
    wanted: Arc<Wanted>,
    connected: watch::Sender<bool>,
}

/// Says which resources the client is to ask for; can be cloned and used from anywhere, also from the handler.
#[derive(Clone, Debug)]
pub struct Subscriptions {
    wanted: Arc<Wanted>,
    connected: watch::Receiver<bool>,
}

/// NamesByKind by kind.
type NamesByKind = [BTreeSet<String>; Kind::ALL.len()];

#[derive(Debug, Default)]
struct Wanted {
    names: Mutex<NamesByKind>,
    changed: Notify,
    /// The pause between two attempts to connect is to end.
    retry: Notify,
    /// The server is one of ours.
    ours: AtomicBool,
}

impl Wanted {
    fn lock(&self) -> MutexGuard<'_, NamesByKind> {
        // Every change is one call on a set, so even after a panic the sets are whole.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriptions {
    /// Asks for resources by name. NamesByKind asked for already change nothing.
    pub fn subscribe<'a>(&self, kind: Kind, names: impl IntoIterator<Item = &'a str>) {
        self.change(|wanted| {
            let new = names.into_iter().filter(|name| wanted[kind as usize].insert((*name).to_owned()));
            new.count() > 0
        });
    }

    /// No longer asks for resources. The handler is told nothing about them any more, not even their removal.
    pub fn unsubscribe<'a>(&self, kind: Kind, names: impl IntoIterator<Item = &'a str>) {
        self.change(|wanted| {
            let gone = names.into_iter().filter(|name| wanted[kind as usize].remove(*name));
            gone.count() > 0
        });
    }

    /// Asks for exactly these resources of a kind.
    pub fn set(&self, kind: Kind, names: BTreeSet<String>) {
        self.change(|wanted| {
            let changed = wanted[kind as usize] != names;
            wanted[kind as usize] = names;
            changed
        });
    }

    /// Ends a pause between two attempts to connect; during an attempt, the pause after it. To be called when what
    /// connections are made with has changed, such as a root or a token.
    pub fn retry(&self) {
        self.wanted.retry.notify_one();
    }

    /// Whether the server is one of ours, which finds virtual hosts by authority; known when an update comes.
    pub fn is_ours(&self) -> bool {
        self.wanted.ours.load(Ordering::Acquire)
    }

    /// Whether a stream is open; for readiness and metrics.
    pub fn connected(&self) -> watch::Receiver<bool> {
        self.connected.clone()
    }

    fn change(&self, change: impl FnOnce(&mut NamesByKind) -> bool) {
        if change(&mut self.wanted.lock()) {
            self.wanted.changed.notify_one();
        }
    }
}

impl Client {
    /// A client that has not connected yet.
    pub fn new(options: Options) -> (Self, Subscriptions) {
        let wanted = Arc::new(Wanted::default());
        let (connected, watching) = watch::channel(false);
        let subscriptions = Subscriptions { wanted: Arc::clone(&wanted), connected: watching };
        (Self { state: ClientState::new(options), wanted, connected }, subscriptions)
    }

    /// Connects, hands updates to `handler`, reconnects, until the future is dropped.
    ///
    /// `connect` is called for each attempt and should give up after some seconds; let it turn on HTTP/2
    /// keep-alive, or a server that vanished is not noticed. The next update is taken when `handler` is done;
    /// what it rejects the server is told, what it does not reject counts as in use.
    pub async fn run(
        mut self,
        mut connect: impl AsyncFnMut() -> Result<Connection, BoxError>,
        mut handler: impl AsyncFnMut(Update) -> Vec<Rejection>,
    ) -> Infallible {
        let mut failures = 0;
        loop {
            let start = Instant::now();
            let ended = match connect().await {
                Ok(connection) => self.stream(connection, &mut handler, &mut failures).await,
                Err(error) => error,
            };
            self.connected.send_replace(false);
            // A stream without a response is good too, if it lasts: there was nothing new to be sent.
            if start.elapsed() > LAST_RETRY {
                failures = 0;
            }
            failures += 1;
            let pause = backoff(failures);
            // A single end is normal: the server restarted, or spreads its load.
            if failures > 1 {
                warn!(error = %chain(&*ended), failures, ?pause, "no discovery; the last configuration stays in use");
            } else {
                info!(reason = %chain(&*ended), "discovery stream ended, reconnecting");
            }
            let least = pause.min(FIRST_RETRY);
            tokio::time::sleep(least).await;
            let _ = tokio::time::timeout(pause - least, self.wanted.retry.notified()).await;
        }
    }

    /// Serves one stream until it ends; says why it did.
    async fn stream(
        &mut self,
        connection: Connection,
        handler: &mut impl AsyncFnMut(Update) -> Vec<Rejection>,
        failures: &mut u32,
    ) -> BoxError {
        let (sender, requests) = mpsc::unbounded_channel();
        let send = |requests: Vec<Outgoing>| requests.into_iter().all(|request| sender.send(request).is_ok());
        // Before the stream is opened, as servers may answer with nothing, not even headers, until they are asked.
        if !send(self.state.open(&self.wanted.lock())) {
            return "the stream ended before it began".into();
        }
        let mut responses = match open(connection, self.state.form(), requests).await {
            Ok(responses) => responses,
            Err(status) => return status.into(),
        };
        self.connected.send_replace(true);
        let wanted = Arc::clone(&self.wanted);
        let mut first = true;
        loop {
            let response = tokio::select! {
                response = responses.next() => response,
                () = wanted.changed.notified() => {
                    if !send(self.state.wanted(&wanted.lock())) {
                        return "the server closed the stream".into();
                    }
                    continue;
                }
            };
            let response = match response {
                None => return "the server closed the stream".into(),
                Some(Err(status)) => return status.into(),
                Some(Ok(response)) => response,
            };
            *failures = 0;
            if std::mem::take(&mut first) {
                wanted.ours.store(response.ours, Ordering::Release);
            }
            let Some((update, pending)) = self.state.received(response) else { continue };
            let kind = update.kind;
            let mut rejections = pending.undecodable();
            rejections.extend(handler(update).await);
            for Rejection { name, reason } in &rejections {
                warn!(%kind, name, reason, "resource rejected; the one before it stays in use");
            }
            let mut answers = vec![self.state.applied(pending, &rejections)];
            answers.extend(self.state.wanted(&wanted.lock()));
            if !send(answers) {
                return "the server closed the stream".into();
            }
        }
    }
}

type Responses = Pin<Box<dyn Stream<Item = Result<Incoming, Status>> + Send>>;

/// Opens the stream.
async fn open(
    connection: Connection,
    form: Form,
    requests: mpsc::UnboundedReceiver<Outgoing>,
) -> Result<Responses, Status> {
    let mut grpc = Grpc::new(connection.channel).max_decoding_message_size(wire::MAX_MESSAGE);
    grpc.ready().await.map_err(|error| Status::unavailable(chain(&error)))?;
    let requests = UnboundedReceiverStream::new(requests);
    let metadata = connection.metadata;
    Ok(match form {
        Form::Delta => {
            let codec = ProstCodec::<DeltaDiscoveryRequest, DeltaResponse>::default();
            let request =
                Request::from_parts(metadata, Default::default(), requests.map(Outgoing::into_delta));
            let path = PathAndQuery::from_static(wire::DELTA);
            Box::pin(grpc.streaming(request, path, codec).await?.into_inner().map_ok(Incoming::from))
        }
        Form::Sotw => {
            let codec = ProstCodec::<DiscoveryRequest, SotwResponse>::default();
            let request =
                Request::from_parts(metadata, Default::default(), requests.map(Outgoing::into_sotw));
            let path = PathAndQuery::from_static(wire::SOTW);
            Box::pin(grpc.streaming(request, path, codec).await?.into_inner().map_ok(Incoming::from))
        }
    })
}

/// The pause before the next attempt: doubles, and is cut by up to half at random, so that a control plane that
/// comes back is not met by all proxies at once.
fn backoff(failures: u32) -> Duration {
    let full = FIRST_RETRY.saturating_mul(1 << failures.clamp(1, 10).saturating_sub(1)).min(LAST_RETRY);
    full.mul_f64(1.0 - 0.5 * fastrand::f64())
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
