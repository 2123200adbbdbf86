//! A client's end of an exchange, with what is known of its connection.

use std::{net::SocketAddr, rc::Rc, sync::Arc};

use serde_json::{Map, Value};
use tracing::{debug, warn};

use crate::{
    authorization,
    chains::{self, Facts},
    config::{FilterChain, Listener, Snapshot, tls::ServerTls},
    context::Worker,
    drain::Side,
    inspect::Findings,
    matching,
    peer::Peer,
    policy::{self, Subject, Tally, Verdict},
    timer::Timer,
    wire::Wire,
};

/// A client's end of an exchange.
pub(crate) struct Downstream {
    pub(crate) wire: Wire,
    pub(crate) timer: Timer,
    pub(crate) origin: Rc<Origin>,
}

/// What is known of a client's connection.
#[derive(Clone)]
pub(crate) struct Origin {
    /// Where it comes from, by what a proxy in front says if one is heeded.
    pub(crate) source: SocketAddr,
    /// Where it comes from by itself.
    pub(crate) direct: SocketAddr,
    /// Where the client dialled.
    pub(crate) destination: SocketAddr,
    pub(crate) listener: Arc<Listener>,
    pub(crate) chain: Arc<FilterChain>,
    pub(crate) peer: Rc<Peer>,
    /// The configuration the chain is from.
    pub(crate) snapshot: Rc<Snapshot>,
    pub(crate) findings: Rc<Findings>,
    /// The listener whose socket it came in by.
    pub(crate) entry: Arc<str>,
    /// That listener's connections.
    pub(crate) side: Rc<Side>,
}

impl Origin {
    /// The server name that the client asked for.
    pub(crate) fn server_name(&self) -> Option<&str> {
        self.findings.server_name.as_deref()
    }

    /// Whether the chain's policies, and who is asked besides, let the connection pass.
    pub(crate) async fn is_allowed(&self, worker: &Rc<Worker>) -> bool {
        let Some(found) = self.pass_policies(worker) else { return false };
        let Some(config) = self.chain.ask.as_deref() else { return true };
        let metadata =
            Map::from_iter([("envoy.filters.network.rbac".to_owned(), Map::from_iter(found).into())]);
        if config.enabled_metadata.as_ref().is_some_and(|test| !matching::metadata(test, Some(&metadata))) {
            return true;
        }
        let asked = authorization::ask_about_connection(worker, &self.snapshot, config, self);
        Box::pin(asked).await.unwrap_or_else(|error| {
            warn!("{} cannot be asked for authorization: {error}", config.cluster);
            config.failure_allowed
        })
    }

    /// What the chain's policies found out, if they let the connection pass.
    fn pass_policies(&self, worker: &Worker) -> Option<Vec<(String, Value)>> {
        if self.chain.policies.is_empty() {
            return Some(Vec::new());
        }
        let mut tally = Tally::default();
        let verdict = self.check_policies(&mut tally);
        let counters = worker.shard.listener(&self.listener.name);
        counters.rbac_allowed.add(tally.allowed.into());
        counters.rbac_denied.add(tally.denied.into());
        counters.rbac_shadow_allowed.add(tally.shadow_allowed.into());
        counters.rbac_shadow_denied.add(tally.shadow_denied.into());
        if let Verdict::Deny { details, .. } = verdict {
            debug!("{} is refused to connect to {}: {details}", self.source, self.destination);
            return None;
        }
        Some(tally.found)
    }

    /// Whether the chain's policies would let it pass. Nobody is told.
    pub(crate) fn would_pass(&self) -> bool {
        self.check_policies(&mut Tally::default()) == Verdict::Allow
    }

    fn check_policies(&self, tally: &mut Tally) -> Verdict {
        let subject = Subject {
            head: None,
            peer: &self.peer,
            source: self.direct,
            remote: self.source.ip(),
            destination: self.destination,
            server_name: self.server_name(),
            metadata: None,
        };
        policy::check(&self.chain.policies, &subject, tally)
    }

    /// The same by the newest configuration: with the chain that a connection like this gets now. `None`: there is
    /// none, or one that begins otherwise, so the connection should end.
    pub(crate) fn renewed(&self, worker: &Worker) -> Option<Self> {
        let snapshot = worker.snapshot();
        let entry = snapshot.listeners.by_name.get(&self.entry)?;
        let listener = chains::listener(&snapshot, entry, self.destination);
        let mut renewed = self.clone();
        if !Arc::ptr_eq(&listener, &self.listener) {
            let facts =
                Facts { destination: self.destination, source: self.source, findings: &self.findings };
            let chain = chains::select(&listener, &facts)?;
            if !same_tls(chain.tls.as_ref(), self.chain.tls.as_ref()) {
                return None;
            }
            renewed.chain = chain.clone();
            renewed.listener = listener;
        }
        renewed.snapshot = snapshot;
        renewed.pass_policies(worker).map(|_| renewed)
    }
}

/// Brings what is known of a connection up to the newest configuration. False: the connection should end, and what
/// is under way on it may finish by the old.
pub(crate) fn refresh(origin: &mut Rc<Origin>, worker: &Worker) -> bool {
    if worker.is_current(&origin.snapshot) {
        return true;
    }
    match origin.renewed(worker) {
        Some(renewed) => {
            *origin = Rc::new(renewed);
            true
        }
        None => false,
    }
}

fn same_tls(a: Option<&Arc<ServerTls>>, b: Option<&Arc<ServerTls>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b) || Arc::ptr_eq(&a.config, &b.config),
        _ => false,
    }
}
