//! The server: the aggregated discovery service, delta and state of the world, over whatever [`Views`] gives.
//!
//! Each stream is one task that owns its [`session`](state); nothing is shared between streams but the
//! resources. The session decides what to send, here is only the carrying.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod nonces;
mod questions;
mod state;

use std::{future::pending, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use skysail_proto::envoy::pb::envoy::{config::core::v3::Node, service::discovery::v3::DiscoveryResponse};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tonic::{Request, Status, metadata::MetadataMap};
use tracing::debug;

pub use self::questions::Question;
use self::{
    nonces::Nonces,
    state::{Session, SubscriptionRequest, TooFarBehind},
};
pub use crate::wire::Form;
use crate::{
    grpc::{Answering, Answers, Call, FIRST_REQUEST, Requests, Service},
    interest::Interest,
    kind::Kind,
    layer::Snapshot,
    limits::{self, Account, Bound, Member, Payer},
    wire::{self, DeltaRequest, ErrorDetail, Push, SotwRequest},
};

/// How long listeners and routes wait for the client to ask for new clusters' endpoints.
const HOLD: Duration = Duration::from_secs(1);

/// After a request of this cost other tasks have their turn.
const LONG: u64 = 64 << 10;

/// Where a server gets its resources from.
pub trait Views: Send + Sync + 'static {
    /// Decides whether a client may connect, and what it sees. Called once a stream, with the first request's
    /// node and the call's metadata and extensions (address, certificates).
    fn connect(
        &self,
        node: Node,
        form: Form,
        call: Request<()>,
    ) -> impl Future<Output = Result<View, Status>> + Send;

    /// Answers a question about the server itself, if the caller may ask it: the resources, and who answers.
    ///
    /// # Errors
    /// The status that the stream ends with.
    fn answer(&self, question: &Question, _: &Request<()>) -> Result<DiscoveryResponse, Status> {
        Err(Status::unimplemented(format!("{} is not served here", question.type_url)))
    }
}

/// What one client sees, and who wants to know how it gets on.
pub struct View {
    /// The identity that its stream is counted for.
    pub identity: Arc<str>,
    /// What it is sent.
    pub resources: ResourceFeed,
    /// Told what happens; dropped at the end of the stream.
    pub report: Box<dyn FnMut(Event<'_>) + Send>,
    /// Virtual hosts that are sent to a client that has none and asks for them one by one, before it asks for them.
    pub remembered: Arc<[Arc<str>]>,
    /// Ready when the client is to see nothing more, with the reason: the stream is ended with it.
    pub ended: Ended,
}

/// The end of a client's access, with the reason.
pub type Ended = Pin<Box<dyn Future<Output = Status> + Send>>;

/// ResourceFeed that change.
#[derive(Clone, Debug)]
pub struct ResourceFeed {
    /// Those of now. When its sender is dropped, the stream is ended. Changes that concern nobody may come without notice.
    pub snapshot: watch::Receiver<Snapshot>,
    /// Told what the stream asks for, while it looks at the snapshot.
    pub interest: Arc<Interest>,
}

/// Something that happened on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The client asks for a kind for the first time on this stream. Nothing need follow, if it has all there is.
    Asked {
        /// Which kind.
        kind: Kind,
    },
    /// A response went out.
    Sent {
        /// Of which kind.
        kind: Kind,
        /// Its number on this stream.
        nonce: u64,
        /// How many resources it brings.
        resources: usize,
        /// How many it takes away.
        removed: usize,
        /// How long it is.
        bytes: usize,
    },
    /// The client took a response.
    Acked {
        /// Of which kind.
        kind: Kind,
        /// Which response.
        nonce: u64,
    },
    /// The client asked for a virtual host, by its name or by an authority, and is sent it.
    Used {
        /// Which, by its name.
        host: &'a Arc<str>,
    },
    /// The client no longer asks for a virtual host, or for what it said of it.
    Unused {
        /// Which.
        host: &'a Arc<str>,
    },
    /// The client refused a response, or a part of it.
    Rejected {
        /// Of which kind.
        kind: Kind,
        /// Which response.
        nonce: u64,
        /// The client's reason.
        reason: &'a str,
    },
}

/// The gRPC service.
#[derive(Debug)]
pub struct DiscoveryService<V>(Arc<V>);

impl<V> Clone for DiscoveryService<V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<V: Views> DiscoveryService<V> {
    /// A service over views.
    pub fn new(views: Arc<V>) -> Self {
        Self(views)
    }

    /// Reads the first request, asks whether the client may connect, and serves it.
    fn start<R: IntoAsk>(&self, call: Call) -> Answering {
        let Call { headers, extensions, requests, mut answers, account, .. } = call;
        let views = Arc::clone(&self.0);
        Box::pin(async move {
            let most = limits::REQUEST;
            let mut requests = Requests::<R>::new(requests, most, FIRST_REQUEST, &account, &extensions);
            let served = async {
                // What the beginning needs is held no longer than that.
                let begun = Box::pin(async {
                    let (mut first, length) =
                        requests.next().await?.ok_or_else(|| Status::cancelled("the client left"))?;
                    let call = Request::from_parts(MetadataMap::from_headers(headers), extensions, ());
                    if let Some(question) = first.question() {
                        return Ok(OpenStream::Questions(question, call));
                    }
                    let node = node(first.take_node(), &account)?;
                    let view = views.connect(node, R::FORM, call).await?;
                    let payer = Payer::new(&account.limits, &view.identity, requests.instance());
                    let member = Member::enter(Arc::clone(&account), payer)?;
                    requests.charge(member.payer());
                    let stream = Box::new(Stream::new(R::FORM, view, member, account));
                    Ok::<_, Status>(OpenStream::Proxy(stream, (first, length)))
                });
                Ok(match begun.await? {
                    OpenStream::Proxy(mut stream, first) => {
                        stream.serve(first, &mut requests, &mut answers).await
                    }
                    OpenStream::Questions(first, call) => {
                        Box::pin(questions::answer(first, &*views, &call, &mut requests, &mut answers))
                            .await?;
                        Ok(())
                    }
                })
            };
            let ended = match served.await {
                Ok(ended) => ended,
                Err(refused) => {
                    requests.pay_refusal(&refused).await;
                    Err(refused)
                }
            };
            let status = ended.err().unwrap_or_else(|| Status::ok(""));
            debug!(%status, "discovery stream ended");
            answers.end(&status);
        })
    }
}

/// What a stream is for.
enum OpenStream<R> {
    /// ResourceFeed; with the first request and its length.
    Proxy(Box<Stream>, (R, usize)),
    Questions(Question, Request<()>),
}

/// Reads the node of a first request.
fn node(bytes: Option<Bytes>, account: &Account) -> Result<Node, Status> {
    let bytes = bytes.ok_or_else(|| Status::invalid_argument("the first request must have the node"))?;
    if bytes.len() > limits::NODE {
        let what = format!("a node of {} bytes; the limit is {}", bytes.len(), limits::NODE);
        return Err(account.limits.exhausted(Bound::Request, &account.client, what));
    }
    Node::decode(bytes).map_err(|error| Status::invalid_argument(format!("the node: {error}")))
}

/// One stream.
struct Stream {
    session: Session,
    nonces: Nonces,
    snapshot: watch::Receiver<Snapshot>,
    report: Box<dyn FnMut(Event<'_>) + Send>,
    ended: Ended,
    /// Its place in the accounts.
    member: Member,
    account: Arc<Account>,
}

impl Stream {
    fn new(form: Form, view: View, member: Member, account: Arc<Account>) -> Self {
        let View { resources: ResourceFeed { snapshot, interest }, report, remembered, ended, .. } = view;
        let session = Session::new(form, interest, remembered);
        Self { session, nonces: Nonces::new(), snapshot, report, ended, member, account }
    }

    /// Serves it until the client leaves or the view ends.
    async fn serve<R: IntoAsk>(
        &mut self,
        first: (R, usize),
        requests: &mut Requests<R>,
        answers: &mut Answers,
    ) -> Result<(), Status> {
        let mut next = Some(first);
        let mut held_until = None;
        loop {
            if let Some((request, length)) = next.take()
                && self.ask(request, length)? > LONG
            {
                tokio::task::yield_now().await;
            }
            // Nothing more is made while the client has not taken what there was.
            if answers.is_clear() {
                self.push(answers)?;
            }
            // Without what has just been sent.
            self.member.lists(self.session.lists())?;
            if !self.session.is_holding() {
                held_until = None;
            } else if held_until.is_none() {
                held_until = Some(Instant::now() + HOLD);
            }
            let held = async {
                match held_until {
                    Some(until) => sleep_until(until).await,
                    None => pending().await,
                }
            };
            let waits = !answers.is_clear();
            tokio::select! {
                biased;
                status = &mut self.ended => return Err(status),
                flushed = answers.flushed(), if waits => flushed?,
                () = held => self.session.release(),
                request = requests.next() => match request? {
                    Some(request) => next = Some(request),
                    None => return Ok(()),
                },
                changed = self.snapshot.changed() => {
                    changed.map_err(|_| Status::unavailable("this server stops serving the proxy; connect again"))?;
                }
            }
        }
    }

    /// Takes a request of this length in, and says what it cost.
    fn ask<R: IntoAsk>(&mut self, request: R, length: usize) -> Result<u64, Status> {
        let Self { session, account, .. } = self;
        let ask = match request.into_ask(&self.nonces) {
            Ok(ask) => ask,
            Err(url) => {
                debug!(url = shortened(url), "asked for a kind that is not served");
                self.member.spend(limits::ASK, length, 0);
                return Ok(0);
            }
        };
        // Nothing that a client causes is done while the snapshot is locked: whoever replaces it waits for that.
        let snapshot = self.snapshot.borrow().clone();
        let outcome = session.request(ask, &snapshot, &mut *self.report);
        if outcome.unknown_nonce {
            account.limits.note(Bound::Nonce, &account.client);
        }
        self.member.spend(outcome.cost, length, outcome.free);
        self.member.holds(session.kept())?;
        self.member.asks(session.authorities())?;
        Ok(outcome.cost)
    }

    /// Begins to send what there is to send.
    fn push(&mut self, answers: &mut Answers) -> Result<(), Status> {
        let snapshot = self.snapshot.borrow_and_update().clone();
        let pushes = self.session.pushes(&snapshot).map_err(|TooFarBehind| {
            Status::aborted("changes came faster than they were taken; connect again with what you have")
        })?;
        for host in self.session.take_found() {
            (self.report)(Event::Used { host: &host });
        }
        match self.session.take_owed() {
            0 => {}
            owed => self.member.spend(owed, 0, 0),
        }
        // What was replaced meanwhile may have seemed to concern nobody.
        if self.snapshot.borrow().generation() != snapshot.generation() {
            self.snapshot.mark_changed();
        }
        if pushes.is_empty() {
            return Ok(());
        }
        let mut all = Vec::with_capacity(pushes.len());
        for push in pushes {
            let Push { kind, number: nonce, .. } = push;
            let (resources, removed) = (push.count(), push.removed.len());
            let pieces = push.encode(self.nonces.text(nonce));
            (self.report)(Event::Sent { kind, nonce, resources, removed, bytes: pieces.message_len() });
            all.push(pieces);
        }
        answers.send(all.into_iter().flatten())
    }
}

/// A request of either form.
trait IntoAsk: prost::Message + Default + Send + 'static {
    const FORM: Form;

    fn take_node(&mut self) -> Option<Bytes>;

    /// The question in it, if it is one. Only the state of the world has them.
    fn question(&self) -> Option<Question> {
        None
    }

    /// The neutral form, or the type URL if it is not served.
    fn into_ask(self, nonces: &Nonces) -> Result<SubscriptionRequest, String>;
}

/// What both forms have.
fn ask(
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

/// As much of a client's words as is kept.
fn shortened(mut text: String) -> String {
    if text.len() > limits::REASON {
        text.truncate(text.floor_char_boundary(limits::REASON));
        text.push('…');
        text.shrink_to_fit();
    }
    text
}

impl IntoAsk for DeltaRequest {
    const FORM: Form = Form::Delta;

    fn take_node(&mut self) -> Option<Bytes> {
        self.node.take()
    }

    fn into_ask(self, nonces: &Nonces) -> Result<SubscriptionRequest, String> {
        let ask = ask(
            self.type_url,
            &self.response_nonce,
            self.error_detail,
            self.resource_names_subscribe,
            nonces,
        )?;
        let unsubscribe = self.resource_names_unsubscribe;
        Ok(SubscriptionRequest { unsubscribe, have: self.initial_resource_versions, ..ask })
    }
}

impl IntoAsk for SotwRequest {
    const FORM: Form = Form::Sotw;

    fn take_node(&mut self) -> Option<Bytes> {
        self.node.take()
    }

    fn question(&self) -> Option<Question> {
        Question::of(&self.type_url, &self.resource_names)
    }

    fn into_ask(self, nonces: &Nonces) -> Result<SubscriptionRequest, String> {
        ask(self.type_url, &self.response_nonce, self.error_detail, self.resource_names, nonces)
    }
}

impl<V: Views> Service for DiscoveryService<V> {
    fn has(&self, method: &str) -> bool {
        matches!(method, wire::DELTA | wire::SOTW)
    }

    fn answer(&self, call: Call) -> Answering {
        if call.method == wire::DELTA {
            self.start::<DeltaRequest>(call)
        } else {
            self.start::<SotwRequest>(call)
        }
    }
}

#[cfg(test)]
mod tests;
