//! The server: the aggregated discovery service, delta and state of the world, over whatever [`Views`] gives.
//!
//! Each stream is one task that owns its [`session`](state); nothing is shared between streams but the
//! resources. The session decides what to send, here is only the carrying.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod questions;
mod state;

use std::{future::pending, sync::Arc, time::Duration};

use envoy_types::pb::{
    envoy::{
        config::core::v3::Node,
        service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest, DiscoveryResponse},
    },
    google::rpc::Status as RpcStatus,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};
use tonic::{Request, Status, metadata::MetadataMap};
use tracing::debug;

pub use self::questions::Question;
use self::state::{Ask, Behind, Session};
pub use crate::wire::Form;
use crate::{
    grpc::{Answering, Answers, Call, Requests, Service},
    interest::Interest,
    layer::Snapshot,
    resource::Kind,
    wire::{self, Push},
};

/// A client must say who it is within this time.
const FIRST_REQUEST: Duration = Duration::from_secs(15);
/// How long listeners and routes wait for the client to ask for new clusters' endpoints.
const HOLD: Duration = Duration::from_secs(1);

/// The longest request: the names of some hundred thousand resources. In bytes.
const MAX_REQUEST: usize = 4 << 20;

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
    /// What it is sent.
    pub resources: Resources,
    /// Told what happens; dropped at the end of the stream.
    pub report: Box<dyn FnMut(Event<'_>) + Send>,
    /// Virtual hosts that are sent to a client that has none and asks for them one by one, before it asks for them.
    pub remembered: Arc<[Arc<str>]>,
}

/// Resources that change.
#[derive(Clone, Debug)]
pub struct Resources {
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
        let Call { headers, extensions, requests, mut answers, .. } = call;
        let views = Arc::clone(&self.0);
        Box::pin(async move {
            let mut requests = Requests::<R>::new(requests, MAX_REQUEST);
            let served = async {
                // What the beginning needs is held no longer than that.
                let begun = Box::pin(async {
                    let mut first = tokio::time::timeout(FIRST_REQUEST, requests.next())
                        .await
                        .map_err(|_| Status::deadline_exceeded("no request came"))??
                        .ok_or_else(|| Status::cancelled("the client left"))?;
                    let call = Request::from_parts(MetadataMap::from_headers(headers), extensions, ());
                    if let Some(question) = first.question() {
                        return Ok(Begun::Questions(question, call));
                    }
                    let node = first
                        .take_node()
                        .ok_or_else(|| Status::invalid_argument("the first request must have the node"))?;
                    let view = views.connect(node, R::FORM, call).await?;
                    Ok::<_, Status>(Begun::Proxy(view, first.into_ask()))
                });
                match begun.await? {
                    Begun::Proxy(view, first) => serve(view, first, &mut requests, &mut answers).await,
                    Begun::Questions(first, call) => {
                        Box::pin(questions::answer(first, &*views, &call, &mut requests, &mut answers)).await
                    }
                }
            };
            let status = served.await.err().unwrap_or_else(|| Status::ok(""));
            debug!(%status, "discovery stream ended");
            answers.end(&status);
        })
    }
}

/// What a stream is for.
enum Begun {
    Proxy(View, Result<Ask, String>),
    Questions(Question, Request<()>),
}

/// Serves one stream until the client leaves or the view ends.
async fn serve<R: IntoAsk>(
    view: View,
    first: Result<Ask, String>,
    requests: &mut Requests<R>,
    answers: &mut Answers,
) -> Result<(), Status> {
    let View { resources: Resources { mut snapshot, interest }, mut report, remembered } = view;
    let mut session = Session::new(R::FORM, interest, remembered);
    let mut next = Some(first);
    let mut held_until = None;
    loop {
        let pushes = {
            // Looked at in its place: all streams would count their references to it at the same time.
            let current = snapshot.borrow_and_update();
            match next.take() {
                Some(Ok(ask)) => session.ask(ask, &current, &mut *report),
                Some(Err(url)) => debug!(url, "asked for a kind that is not served"),
                None => {}
            }
            session.pushes(&current)
        };
        let pushes = pushes.map_err(|Behind| {
            Status::aborted("changes came faster than they were taken; connect again with what you have")
        })?;
        for push in pushes {
            let (pieces, bytes) = push.pieces();
            answers.send(pieces).map_err(|error| Status::cancelled(error.to_string()))?;
            let Push { kind, nonce, .. } = push;
            report(Event::Sent { kind, nonce, resources: push.count(), removed: push.removed.len(), bytes });
        }
        if !session.is_holding() {
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
        tokio::select! {
            biased;
            () = held => session.release(),
            request = requests.next() => match request? {
                Some(request) => next = Some(request.into_ask()),
                None => return Ok(()),
            },
            changed = snapshot.changed() => {
                changed.map_err(|_| Status::unavailable("this server stops serving the proxy; connect again"))?;
            }
        }
    }
}

/// A request of either form.
trait IntoAsk: prost::Message + Default + Send + 'static {
    const FORM: Form;

    fn take_node(&mut self) -> Option<Node>;

    /// The question in it, if it is one. Only the state of the world has them.
    fn question(&self) -> Option<Question> {
        None
    }

    /// The neutral form, or the type URL if it is not served.
    fn into_ask(self) -> Result<Ask, String>;
}

/// What both forms have.
fn ask(url: String, nonce: String, error: Option<RpcStatus>, asked: Vec<String>) -> Result<Ask, String> {
    Ok(Ask {
        kind: Kind::from_url(&url).ok_or(url)?,
        nonce,
        error: error.map(|status| status.message),
        names: asked,
        ..Ask::default()
    })
}

impl IntoAsk for DeltaDiscoveryRequest {
    const FORM: Form = Form::Delta;

    fn take_node(&mut self) -> Option<Node> {
        self.node.take()
    }

    fn into_ask(self) -> Result<Ask, String> {
        let ask = ask(self.type_url, self.response_nonce, self.error_detail, self.resource_names_subscribe)?;
        let unsubscribe = self.resource_names_unsubscribe;
        Ok(Ask { unsubscribe, have: self.initial_resource_versions, ..ask })
    }
}

impl IntoAsk for DiscoveryRequest {
    const FORM: Form = Form::Sotw;

    fn take_node(&mut self) -> Option<Node> {
        self.node.take()
    }

    fn question(&self) -> Option<Question> {
        Question::of(&self.type_url, &self.resource_names)
    }

    fn into_ask(self) -> Result<Ask, String> {
        ask(self.type_url, self.response_nonce, self.error_detail, self.resource_names)
    }
}

impl<V: Views> Service for DiscoveryService<V> {
    fn has(&self, method: &str) -> bool {
        matches!(method, wire::DELTA | wire::SOTW)
    }

    fn answer(&self, call: Call) -> Answering {
        if call.method == wire::DELTA {
            self.start::<DeltaDiscoveryRequest>(call)
        } else {
            self.start::<DiscoveryRequest>(call)
        }
    }
}

#[cfg(test)]
mod tests;
