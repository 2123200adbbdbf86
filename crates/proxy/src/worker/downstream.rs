//! A client's end of an exchange, with what is known of its connection.

use std::{
    mem::discriminant,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::{Instant, SystemTime},
};

use serde_json::{Map, Value};
use tracing::debug;

use crate::{
    overload::{
        drain::{Registered, Side},
        limit_log::{self, Limit},
    },
    worker::{
        Worker,
        filter_chain_match::{self, Facts},
        inspect::Findings,
        revalidation::{Refusal, Revalidation},
    },
};
use skysail_http::{proxy_protocol::Ends, socket::Stream, timer::Timer, wire::Wire};
use skysail_policy::{
    config::{FilterChain, Listener, Snapshot, tls::ServerTls},
    matching,
    peer::Peer,
    rbac::{self, Subject, Tally, Verdict},
};

/// A client's end of an exchange.
pub(crate) struct Downstream {
    pub(crate) wire: Wire,
    pub(crate) timer: Timer,
    pub(crate) origin: Rc<Origin>,
}

/// A client's connection that is admitted, before its first request or byte.
pub(crate) struct Accepted {
    pub(crate) stream: Box<Stream>,
    pub(crate) timer: Timer,
    pub(crate) origin: Rc<Origin>,
    /// Registers the connection with its listener's side as long as this lives.
    pub(crate) registered: Registered,
}

/// What is known of a client's connection.
#[derive(Clone)]
pub(crate) struct Origin {
    /// The source address, from the PROXY header where the listener takes one.
    pub(crate) source: SocketAddr,
    /// The source address of the connection itself.
    pub(crate) direct: SocketAddr,
    /// The destination address of the connection itself, before interception.
    pub(crate) dialled: SocketAddr,
    /// The destination address, from the PROXY header where the listener takes one.
    pub(crate) destination: SocketAddr,
    pub(crate) listener: Arc<Listener>,
    pub(crate) chain: Arc<FilterChain>,
    pub(crate) peer: Rc<Peer>,
    /// The configuration the chain is from.
    pub(crate) snapshot: Rc<Snapshot>,
    /// Whether the connection is still admitted. What begins on it begins with this.
    pub(crate) admission: Revalidation,
    pub(crate) findings: Rc<Findings>,
    /// The listener whose socket it came in by.
    pub(crate) entry: Arc<str>,
    /// That listener's connections.
    pub(crate) side: Rc<Side>,
}

impl Origin {
    /// Returns the addresses of the connection, for a PROXY header.
    pub(crate) fn ends(&self) -> Ends {
        Ends { source: self.source, destination: self.destination }
    }

    /// The server name that the client asked for.
    pub(crate) fn server_name(&self) -> Option<&str> {
        self.findings.server_name.as_deref()
    }

    /// What the chain's policies found out, if they let the connection pass.
    pub(crate) fn pass_policies(&self, worker: &Worker) -> Option<Vec<(String, Value)>> {
        if self.chain.policies.is_empty() {
            return Some(Vec::new());
        }
        let mut tally = Tally::default();
        let verdict = self.check_policies(&self.chain, &mut tally);
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
        self.check_policies(&self.chain, &mut Tally::default()) == Verdict::Allow
    }

    fn check_policies(&self, chain: &FilterChain, tally: &mut Tally) -> Verdict {
        let subject = Subject {
            head: None,
            peer: &self.peer,
            source: self.direct,
            remote: self.source.ip(),
            destination: self.destination,
            server_name: self.server_name(),
            metadata: None,
        };
        rbac::check(&chain.policies, &subject, tally)
    }

    /// Judges the connection by the newest form of its listener, whose chain for it this gives. Its own chain, if that is
    /// still there, does for it. Listeners and chains that would take it today do not matter, as in Envoy.
    pub(crate) fn revalidate(&self, worker: &Worker) -> Result<Arc<FilterChain>, Refusal> {
        let snapshot = worker.snapshot();
        let listener = snapshot.listeners.by_name.get(&self.listener.name).ok_or(Refusal::Listener)?;
        let mut chains = listener.chains.iter().chain(&listener.default_chain);
        let own = |chain: &&Arc<FilterChain>| {
            chain.fingerprint.is_some() && chain.fingerprint == self.chain.fingerprint
        };
        let chain = chains.find(own).map_or_else(|| self.select(listener), Ok)?;
        self.admit(chain, worker)?;
        Ok(chain.clone())
    }

    /// The chain for the connection.
    fn select<'a>(&'a self, listener: &'a Arc<Listener>) -> Result<&'a Arc<FilterChain>, Refusal> {
        if Arc::ptr_eq(listener, &self.listener) {
            return Ok(&self.chain);
        }
        let facts = Facts { destination: self.destination, source: self.source, findings: &self.findings };
        filter_chain_match::select(listener, &facts).ok_or(Refusal::FilterChain)
    }

    /// Whether the connection could have begun with this chain as it has begun, and would be admitted.
    fn admit(&self, chain: &Arc<FilterChain>, worker: &Worker) -> Result<(), Refusal> {
        // HTTP does not become bytes, or the other way round, in the middle of a connection.
        if discriminant(&chain.terminal) != discriminant(&self.chain.terminal) {
            return Err(Refusal::FilterChain);
        }
        if !same_tls(chain.tls.as_ref(), self.chain.tls.as_ref()) {
            return Err(Refusal::TlsContext);
        }
        self.check_trust(worker)?;
        let mut tally = Tally::default();
        if let Verdict::Deny { details, .. } = self.check_policies(chain, &mut tally) {
            return Err(Refusal::Denied(details));
        }
        if !Arc::ptr_eq(chain, &self.chain) && self.would_ask(chain, tally) {
            return Err(Refusal::Authentication);
        }
        Ok(())
    }

    /// Whether another service would be asked that has not been asked about the connection.
    fn would_ask(&self, chain: &FilterChain, found: Tally) -> bool {
        let Some(config) = chain.ask.as_deref() else { return false };
        if self.chain.ask.as_ref().is_none_or(|before| before.fingerprint != config.fingerprint) {
            return true;
        }
        let asks = |tally: Tally| {
            let test = config.enabled_metadata.as_ref();
            test.is_some_and(|test| matching::metadata(test, Some(&metadata(tally.found))))
        };
        let mut before = Tally::default();
        self.check_policies(&self.chain, &mut before);
        asks(found) && !asks(before)
    }

    /// Whether the roots of now vouch for the client.
    fn check_trust(&self, worker: &Worker) -> Result<(), Refusal> {
        let (Some(tls), Some(certificate)) = (&self.chain.tls, &self.peer.certificate) else { return Ok(()) };
        let Some(acceptor) = tls.config.load_full() else { return Ok(()) };
        let (distrusted, context) = (worker.snapshot().distrusted, Arc::as_ptr(&acceptor).addr());
        let trusted = certificate.is_trusted(distrusted, context, |chain| {
            let checked = acceptor.recheck(chain);
            checked.inspect_err(|error| debug!("{} is not trusted any more: {error}", self.source)).is_ok()
        });
        if !trusted {
            return Err(Refusal::Client);
        }
        let ends = || certificate.not_after().is_some_and(|end| end <= SystemTime::now());
        if worker.shared.limits.end_with_certificate && ends() {
            return Err(Refusal::Expired);
        }
        Ok(())
    }

    /// The same by the newest configuration: with the chain that a connection like this gets now.
    fn renewed(&self, worker: &Worker) -> Result<Self, Refusal> {
        let snapshot = worker.snapshot();
        let entry = snapshot.listeners.by_name.get(&self.entry).ok_or(Refusal::Listener)?;
        let listener = filter_chain_match::listener(&snapshot, entry, self.dialled);
        let listener = filter_chain_match::listener(&snapshot, &listener, self.destination);
        let mut renewed = self.clone();
        renewed.chain = self.select(&listener)?.clone();
        self.admit(&renewed.chain, worker)?;
        (renewed.listener, renewed.snapshot) = (listener, snapshot);
        renewed.admission = Revalidation::new(worker.epoch());
        Ok(renewed)
    }

    /// Counts and logs a connection that is closed because it would not be admitted any more.
    pub(crate) fn note_revoked(&self, worker: &Worker) {
        if let Some(refusal) = self.admission.refusal() {
            self.note_refusal(worker, refusal);
        }
    }

    /// The same, for what was refused for a reason besides those of its chain.
    pub(crate) fn note_refusal(&self, worker: &Worker, refusal: &Refusal) {
        worker.shard.listener(&self.listener.name).revoked.inc();
        let (listener, source) = (&self.listener.name, self.source);
        limit_log::log(Limit::Admission, format_args!("listener {listener}, client {source}, {refusal}"));
    }
}

/// Brings what is known of a connection up to the newest configuration.
///
/// # Errors
/// The connection would not be admitted any more, and must end at this time; what is under way on it may finish by the old.
/// What begins on it until then ends at the same time.
pub(crate) fn refresh(origin: &mut Rc<Origin>, worker: &Worker) -> Result<(), Instant> {
    let admission = &origin.admission;
    if admission.is_due(worker)
        || (!worker.is_current(&origin.snapshot) && admission.last_deadline().is_none())
    {
        match origin.renewed(worker) {
            Ok(renewed) => *origin = Rc::new(renewed),
            Err(refusal) => Rc::make_mut(origin).admission.refuse(worker, refusal),
        }
    }
    origin.admission.last_deadline().map_or(Ok(()), Err)
}

/// What policies found out, as metadata.
pub(crate) fn metadata(found: Vec<(String, Value)>) -> Map<String, Value> {
    Map::from_iter([("envoy.filters.network.rbac".to_owned(), Map::from_iter(found).into())])
}

fn same_tls(a: Option<&Arc<ServerTls>>, b: Option<&Arc<ServerTls>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b) || Arc::ptr_eq(&a.config, &b.config),
        _ => false,
    }
}
