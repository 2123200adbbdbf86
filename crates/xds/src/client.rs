//! The client: subscribes to resources at any xDS server over one aggregated stream, and reconnects when it breaks.
//!
//! The end of a connection changes nothing for the handler. The client reconnects with jittered exponential backoff,
//! lists the versions that it has, and receives the changes since then.
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
//!         // Apply it, subscribe to the resources that it refers to, and reject the invalid ones.
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

/// Pause before the second attempt to connect; it doubles from there.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// Maximum pause.
const LAST_RETRY: Duration = Duration::from_secs(10);

/// Identity and initial subscriptions of a client.
#[derive(Clone, Debug)]
pub struct Options {
    /// Node of the client.
    pub node: Node,
    /// Form of the protocol.
    pub form: Form,
    /// Types of which to subscribe to all resources. Of the other types, the client subscribes to names.
    pub wildcard: Vec<Kind>,
}

/// A received resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Name.
    pub name: String,
    /// Version of the server; in the state of the world, that of the whole response.
    pub version: String,
    /// Encoded message.
    pub body: Bytes,
}

impl Received {
    /// Decodes the body.
    ///
    /// # Errors
    /// If the body is not such a message.
    pub fn decode<M: Codec>(&self) -> Result<M, skysail_proto::DecodeError> {
        M::from_slice(&self.body)
    }
}

/// A change of the resources of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Resource type.
    pub kind: Kind,
    /// Resources that are new or changed.
    pub added: Vec<Received>,
    /// Names that were removed, or that are subscribed to and do not exist.
    pub removed: Vec<String>,
}

/// Rejection of a resource in an update. The former version stays in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Name of the resource.
    pub name: String,
    /// The invalid field, and what to do.
    pub reason: String,
}

/// A connection to a server, and headers that are sent with each stream, such as a token.
#[derive(Debug)]
pub struct Connection {
    /// The connection.
    pub channel: Channel,
    /// Headers.
    pub metadata: MetadataMap,
}

impl Connection {
    /// Creates a connection without headers.
    pub fn new(channel: Channel) -> Self {
        Self { channel, metadata: MetadataMap::new() }
    }
}

/// Cause of a failed connection or an ended stream.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A client that has not started; see [`run`](Self::run).
#[derive(Debug)]
pub struct Client {
    state: ClientState,
    wanted: Arc<WantedNames>,
    connected: watch::Sender<bool>,
}

/// Handle that changes the subscriptions of a client. Can be cloned and used from anywhere, also from the handler.
#[derive(Clone, Debug)]
pub struct Subscriptions {
    wanted: Arc<WantedNames>,
    connected: watch::Receiver<bool>,
}

/// Names by type.
type NamesByKind = [BTreeSet<String>; Kind::ALL.len()];

#[derive(Debug, Default)]
struct WantedNames {
    names: Mutex<NamesByKind>,
    changed: Notify,
    /// Ends the pause between two attempts to connect.
    retry: Notify,
    /// The server is a Skysail control plane.
    ours: AtomicBool,
    /// Health of the workload, and the number of reports; `None` before the first report.
    health: Mutex<(Option<String>, u64)>,
}

impl WantedNames {
    /// Returns the health report, unless it is the one of this number, which was sent.
    fn unsent_health(&self, sent: &mut u64) -> Option<Outgoing> {
        let (error, number) = self.health.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_new = number != std::mem::replace(sent, number);
        is_new.then(|| Outgoing::health(error))
    }

    fn lock(&self) -> MutexGuard<'_, NamesByKind> {
        // Each change is one operation on a set, so the sets are consistent even after a panic.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriptions {
    /// Subscribes to resources by name. Names that are already subscribed to are ignored.
    pub fn subscribe<'a>(&self, kind: Kind, names: impl IntoIterator<Item = &'a str>) {
        self.change(|wanted| {
            let new = names.into_iter().filter(|name| wanted[kind as usize].insert((*name).to_owned()));
            new.count() > 0
        });
    }

    /// Unsubscribes from resources. The handler receives no more updates of them, not even their removal.
    pub fn unsubscribe<'a>(&self, kind: Kind, names: impl IntoIterator<Item = &'a str>) {
        self.change(|wanted| {
            let removed = names.into_iter().filter(|name| wanted[kind as usize].remove(*name));
            removed.count() > 0
        });
    }

    /// Replaces the names of a type.
    pub fn set(&self, kind: Kind, names: BTreeSet<String>) {
        self.change(|wanted| {
            let changed = wanted[kind as usize] != names;
            wanted[kind as usize] = names;
            changed
        });
    }

    /// Ends the pause between two attempts to connect; during an attempt, the pause after it. To be called when a new
    /// attempt may succeed, for example after a root or a token has changed.
    pub fn retry(&self) {
        self.wanted.retry.notify_one();
    }

    /// Returns true if the server is a Skysail control plane, which resolves virtual hosts by authority. Known from
    /// the first update on.
    pub fn is_ours(&self) -> bool {
        self.wanted.ours.load(Ordering::Acquire)
    }

    /// Reports the health of the workload, now and at the begin of each later stream. An error says why it is not
    /// healthy.
    pub fn report_health(&self, error: Option<String>) {
        {
            let mut health = self.wanted.health.lock().unwrap_or_else(PoisonError::into_inner);
            *health = (error, health.1 + 1);
        }
        self.wanted.changed.notify_one();
    }

    /// Returns whether a stream is open, for readiness and metrics.
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
    /// Creates a client that has not connected yet.
    pub fn new(options: Options) -> (Self, Subscriptions) {
        let wanted = Arc::new(WantedNames::default());
        let (connected, watching) = watch::channel(false);
        let subscriptions = Subscriptions { wanted: Arc::clone(&wanted), connected: watching };
        (Self { state: ClientState::new(options), wanted, connected }, subscriptions)
    }

    /// Connects, passes updates to `handler`, and reconnects, until the future is dropped.
    ///
    /// `connect` is called for each attempt and should time out after some seconds. It should enable HTTP/2
    /// keep-alive, because otherwise a vanished server is not noticed. The next update is read when `handler` has
    /// returned. The server is sent what it rejects; everything else counts as in use.
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
            // A stream without a response is a success too if it lasts: nothing had changed.
            if start.elapsed() > LAST_RETRY {
                failures = 0;
            }
            failures += 1;
            let pause = backoff(failures);
            // One ended stream is normal: the server has restarted or spreads its load.
            if failures > 1 {
                warn!(error = %chain(&*ended), failures, ?pause, "discovery stream failed; the last configuration stays in use");
            } else {
                info!(reason = %chain(&*ended), "discovery stream ended, reconnecting");
            }
            let min = pause.min(FIRST_RETRY);
            tokio::time::sleep(min).await;
            let _ = tokio::time::timeout(pause - min, self.wanted.retry.notified()).await;
        }
    }

    /// Serves one stream. Returns the reason of its end.
    async fn stream(
        &mut self,
        connection: Connection,
        handler: &mut impl AsyncFnMut(Update) -> Vec<Rejection>,
        failures: &mut u32,
    ) -> BoxError {
        let (sender, requests) = mpsc::unbounded_channel();
        let send = |requests: Vec<Outgoing>| requests.into_iter().all(|request| sender.send(request).is_ok());
        // Sent before the stream is opened, because a server may send nothing, not even headers, before the first
        // request.
        let mut health = 0;
        let mut first = self.state.open(&self.wanted.lock());
        first.extend(self.wanted.unsent_health(&mut health));
        if !send(first) {
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
                    let mut requests = self.state.wanted(&wanted.lock());
                    requests.extend(wanted.unsent_health(&mut health));
                    if !send(requests) {
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
                warn!(%kind, name, reason, "resource rejected; its former version stays in use");
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

/// Returns the pause before the next attempt. It doubles, and is reduced by up to half at random, so that not all
/// proxies connect at once to a control plane that is back.
fn backoff(failures: u32) -> Duration {
    let full = FIRST_RETRY.saturating_mul(1 << failures.clamp(1, 10).saturating_sub(1)).min(LAST_RETRY);
    full.mul_f64(1.0 - 0.5 * fastrand::f64())
}

/// Formats an error and its causes in one line.
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
