//! The aggregated discovery service (ADS), incremental and state of the world, over the views that [`Views`] returns.
//!
//! Each stream owns its [`Session`]; streams share nothing but the resources and the limits. The session
//! decides what to send. This module reads the requests and sends the responses.

mod debug_requests;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod nonces;
mod state;

use std::{
    future::pending,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use prost::Message as _;
use skysail_proto::envoy::pb::envoy::{config::core::v3::Node, service::discovery::v3::DiscoveryResponse};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tonic::{Request, Status, metadata::MetadataMap};
use tracing::debug;

pub use self::debug_requests::DebugRequest;
use self::{
    nonces::Nonces,
    state::{Session, SubscriptionRequest, TooFarBehind},
};
pub use crate::wire::Form;
use crate::{
    grpc::{Call, CallFuture, FIRST_REQUEST, Requests, ResponseWriter, Service},
    interest::Interest,
    kind::Kind,
    layer::Snapshot,
    limits::{self, Account, Bound, CallerAccount, StreamAccount},
    wire::{self, DeltaRequest, ErrorDetail, Push, SotwRequest},
};

/// Maximum time for which listeners and routes are held back until the client requests the endpoints of new clusters.
const ENDPOINT_WAIT: Duration = Duration::from_secs(1);

/// User agent that an Envoy declares (`envoy.config.core.v3.Node.user_agent_name`).
const ENVOY: &str = "envoy";

/// Cost of a request after which the task yields to other tasks.
const YIELD_COST: u64 = 64 << 10;

/// Source of a server's resources.
pub trait Views: Send + Sync + 'static {
    /// Decides whether a client may connect, and which resources it receives. Called once per stream, with the node
    /// of the first request and the metadata and extensions of the call (address, certificates).
    fn connect(
        &self,
        node: Node,
        form: Form,
        call: Request<()>,
    ) -> impl Future<Output = Result<View, Status>> + Send;

    /// Returns the response to a request for a debug type, if the caller may send it. The response carries the
    /// resources and the identifier of the server.
    ///
    /// # Errors
    /// The status with which the stream ends.
    fn debug_response(
        &self,
        debug_request: &DebugRequest,
        _: &Request<()>,
    ) -> impl Future<Output = Result<DiscoveryResponse, Status>> + Send {
        let refused = Status::unimplemented(format!("{} is not served here", debug_request.type_url));
        std::future::ready(Err(refused))
    }
}

/// Resources of one client, and the receiver of its events.
pub struct View {
    /// Identity against whose limits the stream counts.
    pub identity: Arc<str>,
    /// Resources to send.
    pub resources: ResourceFeed,
    /// Receives the events of the stream; dropped at the end of the stream.
    pub report: Box<dyn FnMut(Event<'_>) + Send>,
    /// Virtual hosts to prefetch: they are sent before the client subscribes to them. Only a client that subscribes on
    /// demand and has no virtual hosts yet receives them.
    pub remembered: Arc<[Arc<str>]>,
    /// Becomes ready when the client loses its access; the stream ends with the returned status.
    pub ended: Ended,
}

/// Future that is ready when a client loses its access, with the reason.
pub type Ended = Pin<Box<dyn Future<Output = Status> + Send>>;

/// A changing snapshot.
#[derive(Clone, Debug)]
pub struct ResourceFeed {
    /// Current resources. The stream ends when the sender is dropped. A change that concerns no stream may be made
    /// without notification.
    pub snapshot: watch::Receiver<Snapshot>,
    /// Receives the names that the stream subscribes to, while the stream reads the snapshot.
    pub interest: Arc<Interest>,
}

/// Event on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// First request of the client for a resource type on this stream. No response follows if the client is up to
    /// date.
    Requested {
        /// Resource type.
        kind: Kind,
        /// Last generation whose changes the client has if no response follows; `None` for a client without resources
        /// of an earlier stream.
        generation: Option<u64>,
    },
    /// The names that the client subscribes to have changed.
    Subscribed {
        /// Resource type.
        kind: Kind,
        /// The client subscribes to all resources.
        all: bool,
        /// Names, sorted.
        names: &'a Arc<[Arc<str>]>,
    },
    /// A response was sent.
    Sent {
        /// Resource type.
        kind: Kind,
        /// Number of the response on this stream.
        nonce: u64,
        /// Number of resources in the response.
        resources: usize,
        /// Number of removed resources.
        removed: usize,
        /// Length of the response in bytes.
        bytes: usize,
        /// Last generation whose changes the response contains.
        generation: u64,
    },
    /// The client acknowledged a response.
    Acked {
        /// Resource type.
        kind: Kind,
        /// Number of the response.
        nonce: u64,
    },
    /// The client subscribed to a virtual host, by name or by an authority that resolves to it.
    HostUsed {
        /// Name of the virtual host.
        host: &'a Arc<str>,
    },
    /// The client unsubscribed from a virtual host or from an authority.
    HostUnused {
        /// Name in the request.
        host: &'a Arc<str>,
    },
    /// The client reported the health of its workload.
    Health {
        /// Reason why the workload is not healthy; `None` if it is.
        error: Option<&'a str>,
    },
    /// The client rejected a response, or a part of it.
    Rejected {
        /// Resource type.
        kind: Kind,
        /// Number of the response.
        nonce: u64,
        /// Error message of the client.
        reason: &'a str,
    },
}

/// The gRPC service for [`Views`].
#[derive(Debug)]
pub struct DiscoveryService<V>(Arc<V>);

impl<V> Clone for DiscoveryService<V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<V: Views> DiscoveryService<V> {
    /// Creates a service over views.
    pub fn new(views: Arc<V>) -> Self {
        Self(views)
    }

    /// Reads the first request, asks the views whether the client may connect, and serves the stream.
    fn start<R: WireRequest>(&self, call: Call) -> CallFuture {
        let Call { headers, extensions, requests, mut responses, account, .. } = call;
        let views = Arc::clone(&self.0);
        Box::pin(async move {
            let max = limits::MAX_REQUEST;
            let mut requests = Requests::<R>::new(requests, max, FIRST_REQUEST, &account, &extensions);
            let served = async {
                // Boxed, so that the memory of the setup is freed when the stream begins.
                let begun = Box::pin(async {
                    let (mut first, length) = requests.next().await?.ok_or_else(|| {
                        Status::cancelled("the client ended the stream before the first request")
                    })?;
                    let call = Request::from_parts(MetadataMap::from_headers(headers), extensions, ());
                    if let Some(debug_request) = first.debug_request() {
                        return Ok(OpenStream::Debug(debug_request, call));
                    }
                    let node = node(first.take_node(), &account)?;
                    let is_envoy = node.user_agent_name == ENVOY;
                    let view = views.connect(node, R::FORM, call).await?;
                    let caller = CallerAccount::new(&account.limits, &view.identity, requests.instance());
                    let stream_account = StreamAccount::enter(Arc::clone(&account), caller)?;
                    requests.charge_to(stream_account.caller());
                    let stream = Box::new(Stream::new(R::FORM, view, is_envoy, stream_account, account));
                    Ok::<_, Status>(OpenStream::Proxy(stream, (first, length)))
                });
                Ok(match begun.await? {
                    OpenStream::Proxy(mut stream, first) => {
                        stream.serve(first, &mut requests, &mut responses).await
                    }
                    OpenStream::Debug(first, call) => {
                        Box::pin(debug_requests::serve(first, &*views, &call, &mut requests, &mut responses))
                            .await?;
                        Ok(())
                    }
                })
            };
            let ended = match served.await {
                Ok(ended) => ended,
                Err(refused) => {
                    requests.charge_refusal(&refused).await;
                    Err(refused)
                }
            };
            let status = ended.err().unwrap_or_else(|| Status::ok(""));
            debug!(%status, "discovery stream ended");
            responses.end(&status);
        })
    }
}

/// Purpose of a stream, which its first request decides.
enum OpenStream<R> {
    /// Subscriptions; with the first request and its length.
    Proxy(Box<Stream>, (R, usize)),
    Debug(DebugRequest, Request<()>),
}

/// Decodes the node of a first request.
fn node(bytes: Option<Bytes>, account: &Account) -> Result<Node, Status> {
    let bytes =
        bytes.ok_or_else(|| Status::invalid_argument("the first request of a stream must carry the node"))?;
    if bytes.len() > limits::MAX_NODE {
        let what = format!("the node has {} bytes; the limit is {}", bytes.len(), limits::MAX_NODE);
        return Err(account.limits.exhausted(Bound::Request, &account.client, what));
    }
    Node::decode(bytes)
        .map_err(|error| Status::invalid_argument(format!("the node cannot be decoded: {error}")))
}

/// State of one stream.
struct Stream {
    session: Session,
    nonces: Nonces,
    snapshot: watch::Receiver<Snapshot>,
    report: Box<dyn FnMut(Event<'_>) + Send>,
    ended: Ended,
    /// The stream's share of the limits.
    stream_account: StreamAccount,
    account: Arc<Account>,
}

impl Stream {
    fn new(
        form: Form,
        view: View,
        is_envoy: bool,
        stream_account: StreamAccount,
        account: Arc<Account>,
    ) -> Self {
        let View { resources: ResourceFeed { snapshot, interest }, report, remembered, ended, .. } = view;
        let session = Session::new(form, interest, remembered).with_envoy(is_envoy);
        Self { session, nonces: Nonces::new(), snapshot, report, ended, stream_account, account }
    }

    /// Serves the stream until the client leaves or its access ends.
    async fn serve<R: WireRequest>(
        &mut self,
        first: (R, usize),
        requests: &mut Requests<R>,
        responses: &mut ResponseWriter,
    ) -> Result<(), Status> {
        let mut next = Some(first);
        let mut held_until = None;
        // Kept while requests arrive: each new wait would register with the sender again.
        let mut change = pin!(changed(self.snapshot.clone()));
        loop {
            let (mut end, mut cost) = (None, 0);
            while let Some((request, length)) = next.take() {
                cost += self.request(request, length)?;
                if cost > YIELD_COST {
                    tokio::task::yield_now().await;
                    break;
                }
                if requests.debt().is_some() {
                    break;
                }
                // Requests that have arrived together, such as the acknowledgements of several types, are applied
                // before the next response is made.
                match requests.next().now_or_never() {
                    Some(Ok(Some(arrived))) => next = Some(arrived),
                    Some(ended) => end = Some(ended.map(|_| ())),
                    None => {}
                }
            }
            // No response is made while the client has not read the last one.
            while responses.is_clear() && self.push(responses)? {}
            // Counted after the push, without the names that it has just sent.
            self.stream_account.set_list_bytes(self.session.list_bytes())?;
            if let Some(end) = end {
                end?;
                return responses.flushed().await;
            }
            if !self.session.is_holding() {
                held_until = None;
            } else if held_until.is_none() {
                held_until = Some(Instant::now() + ENDPOINT_WAIT);
            }
            let held = async {
                match held_until {
                    Some(until) => sleep_until(until).await,
                    None => pending().await,
                }
            };
            let waits = !responses.is_clear();
            tokio::select! {
                biased;
                status = &mut self.ended => return Err(status),
                flushed = responses.flushed(), if waits => flushed?,
                () = held => self.session.release(),
                request = requests.next() => match request? {
                    Some(request) => next = Some(request),
                    None => return responses.flushed().await,
                },
                snapshot = &mut change => change.set(changed(snapshot?)),
            }
        }
    }

    /// Applies a request of this length and returns its cost.
    fn request<R: WireRequest>(&mut self, request: R, length: usize) -> Result<u64, Status> {
        let Self { session, account, .. } = self;
        if let Some(error) = request.health_report() {
            self.stream_account.charge(limits::REQUEST_COST, length, 0);
            (self.report)(Event::Health { error: error.map(shortened).as_deref() });
            return Ok(limits::REQUEST_COST);
        }
        let request = match request.into_request(&self.nonces) {
            Ok(request) => request,
            Err(url) => {
                debug!(url = shortened(url), "a client requested a resource type that is not served");
                self.stream_account.charge(limits::REQUEST_COST, length, 0);
                return Ok(0);
            }
        };
        // The snapshot is cloned, not borrowed: a borrow would make the task that replaces it wait for the client's
        // work.
        let snapshot = self.snapshot.borrow().clone();
        let outcome = session.request(request, &snapshot, &mut *self.report);
        if outcome.unknown_nonce {
            account.limits.record(Bound::Nonce, &account.client);
        }
        self.stream_account.charge(outcome.cost, length, outcome.free);
        self.stream_account.set_name_bytes(session.name_bytes())?;
        self.stream_account.check_authorities(session.authorities())?;
        Ok(outcome.cost)
    }

    /// Begins to send the responses that are due. Returns true if there is a newer snapshot.
    fn push(&mut self, responses: &mut ResponseWriter) -> Result<bool, Status> {
        let snapshot = self.snapshot.borrow().clone();
        let pushes = self.session.pushes(&snapshot).map_err(|TooFarBehind| {
            Status::aborted(
                "the client fell too far behind; connect again with the initial resource versions",
            )
        })?;
        // The server adds names of these types.
        for kind in [Kind::Endpoint, Kind::VirtualHost] {
            self.session.report_names(kind, &mut *self.report);
        }
        for host in self.session.take_found() {
            (self.report)(Event::HostUsed { host: &host });
        }
        match self.session.take_debt() {
            0 => {}
            debt => self.stream_account.charge(debt, 0, 0),
        }
        // It may have been published without notification, because it concerned no stream before this request.
        let is_newer = self.snapshot.borrow().generation() != snapshot.generation();
        if pushes.is_empty() {
            return Ok(is_newer);
        }
        let mut all = Vec::with_capacity(pushes.len());
        for push in pushes {
            let Push { kind, number: nonce, .. } = push;
            let (resources, removed) = (push.count(), push.removed.len());
            let pieces = push.encode(self.nonces.text(nonce));
            let (bytes, generation) = (pieces.message_len(), snapshot.generation());
            (self.report)(Event::Sent { kind, nonce, resources, removed, bytes, generation });
            all.push(pieces);
        }
        responses.send(all.into_iter().flatten())?;
        Ok(is_newer)
    }
}

/// Waits for another snapshot. Fails when the server no longer serves the view.
async fn changed(mut snapshot: watch::Receiver<Snapshot>) -> Result<watch::Receiver<Snapshot>, Status> {
    let changed = snapshot.changed().await;
    changed.map_err(|_| Status::unavailable("this server no longer serves the proxy; connect again"))?;
    Ok(snapshot)
}

/// A request of either form, as received.
trait WireRequest: prost::Message + Default + Send + 'static {
    const FORM: Form;

    fn take_node(&mut self) -> Option<Bytes>;

    /// Returns the request for a debug type, if it is one. Only state-of-the-world requests name debug types.
    fn debug_request(&self) -> Option<DebugRequest> {
        None
    }

    /// Returns the error of a health report, if the request is one.
    fn health_report(&self) -> Option<Option<String>>;

    /// Converts the request to the common form. Fails with the type URL if the type is not served.
    fn into_request(self, nonces: &Nonces) -> Result<SubscriptionRequest, String>;
}

/// Converts the fields that both forms have.
fn subscription_request(
    url: String,
    nonce: &str,
    error: Option<ErrorDetail>,
    names: Vec<String>,
    nonces: &Nonces,
) -> Result<SubscriptionRequest, String> {
    Ok(SubscriptionRequest {
        kind: Kind::from_url(&url).ok_or(url)?,
        nonce: nonces.read(nonce),
        error: error.map(|error| shortened(error.message)),
        names,
        ..SubscriptionRequest::default()
    })
}

/// Cuts a text of the client to the length that is kept.
fn shortened(mut text: String) -> String {
    if text.len() > limits::MAX_REASON {
        text.truncate(text.floor_char_boundary(limits::MAX_REASON));
        text.push('…');
        text.shrink_to_fit();
    }
    text
}

impl WireRequest for DeltaRequest {
    const FORM: Form = Form::Delta;

    fn take_node(&mut self) -> Option<Bytes> {
        self.node.take()
    }

    fn health_report(&self) -> Option<Option<String>> {
        (self.type_url == wire::HEALTH).then(|| self.error_detail.as_ref().map(|error| error.message.clone()))
    }

    fn into_request(self, nonces: &Nonces) -> Result<SubscriptionRequest, String> {
        let request = subscription_request(
            self.type_url,
            &self.response_nonce,
            self.error_detail,
            self.resource_names_subscribe,
            nonces,
        )?;
        let unsubscribe = self.resource_names_unsubscribe;
        Ok(SubscriptionRequest { unsubscribe, have: self.initial_resource_versions, ..request })
    }
}

impl WireRequest for SotwRequest {
    const FORM: Form = Form::Sotw;

    fn take_node(&mut self) -> Option<Bytes> {
        self.node.take()
    }

    fn debug_request(&self) -> Option<DebugRequest> {
        DebugRequest::of(&self.type_url, &self.resource_names)
    }

    fn health_report(&self) -> Option<Option<String>> {
        (self.type_url == wire::HEALTH).then(|| self.error_detail.as_ref().map(|error| error.message.clone()))
    }

    fn into_request(self, nonces: &Nonces) -> Result<SubscriptionRequest, String> {
        subscription_request(
            self.type_url,
            &self.response_nonce,
            self.error_detail,
            self.resource_names,
            nonces,
        )
    }
}

impl<V: Views> Service for DiscoveryService<V> {
    fn has(&self, method: &str) -> bool {
        matches!(method, wire::DELTA | wire::SOTW)
    }

    fn handle(&self, call: Call) -> CallFuture {
        if call.method == wire::DELTA {
            self.start::<DeltaRequest>(call)
        } else {
            self.start::<SotwRequest>(call)
        }
    }
}

#[cfg(test)]
mod tests;
