//! A downstream connection and its properties, and its revalidation after a configuration change.

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
        drain::{ConnectionSet, Registered},
        limit_log::{self, Limit},
    },
    worker::{
        Worker,
        filter_chain_match::{self, Facts},
        inspect::Findings,
        limits::ConnectionLimits,
        revalidation::{Refusal, Revalidation},
    },
};
use skysail_http::{proxy_protocol::Addresses, socket::Stream, timer::Timer, wire::Wire};
use skysail_policy::{
    config::{FilterChain, HttpManager, Listener, Snapshot, tls::ServerTls},
    matching,
    peer::Peer,
    rbac::{self, Subject, Tally, Verdict},
};

/// The client's side of an exchange: a connection of HTTP/1.1, or a stream of HTTP/2.
pub(crate) struct Downstream {
    pub(crate) wire: Wire,
    pub(crate) timer: Timer,
    pub(crate) origin: Rc<Origin>,
}

/// An admitted connection, before its first request or byte.
pub(crate) struct Accepted {
    pub(crate) stream: Box<Stream>,
    pub(crate) timer: Timer,
    pub(crate) origin: Rc<Origin>,
    /// Keeps the connection in its [`ConnectionSet`].
    pub(crate) registered: Registered,
}

/// Properties of a downstream connection.
#[derive(Clone)]
pub(crate) struct Origin {
    /// Source address; from the PROXY header if the listener reads one.
    pub(crate) source: SocketAddr,
    /// Source address of the TCP connection.
    pub(crate) direct: SocketAddr,
    /// Start of the connection, after its TLS handshake.
    pub(crate) begun: Instant,
    /// Destination address of the TCP connection, before interception.
    pub(crate) dialled: SocketAddr,
    /// Destination address; from the PROXY header if the listener reads one.
    pub(crate) destination: SocketAddr,
    pub(crate) listener: Arc<Listener>,
    pub(crate) chain: Arc<FilterChain>,
    pub(crate) peer: Rc<Peer>,
    /// The configuration that the filter chain belongs to.
    pub(crate) snapshot: Rc<Snapshot>,
    /// Admission state of the connection; the initial state of its requests.
    pub(crate) admission: Revalidation,
    pub(crate) findings: Rc<Findings>,
    /// Name of the listener whose socket accepted the connection.
    pub(crate) entry: Arc<str>,
    /// The connections of that listener's direction.
    pub(crate) connections: Rc<ConnectionSet>,
    /// Buckets of rate limits that apply to each connection by itself.
    pub(crate) limits: ConnectionLimits,
}

impl Origin {
    /// Returns the addresses of the connection, for a PROXY header.
    pub(crate) fn ends(&self) -> Addresses {
        Addresses { source: self.source, destination: self.destination }
    }

    /// Returns the time after which the connection serves no further request.
    #[inline]
    pub(crate) fn end(&self, manager: &HttpManager) -> Option<Instant> {
        manager.max_connection_duration.map(|longest| self.begun + longest)
    }

    /// Returns whether the connection is too old to serve a further request.
    #[inline]
    pub(crate) fn is_too_old(&self, manager: &HttpManager) -> bool {
        self.end(manager).is_some_and(|end| Instant::now() >= end)
    }

    /// Returns whether the connection ends after the request in progress: in a drain, or because it is too old.
    #[inline]
    pub(crate) fn is_ending(&self, manager: &HttpManager) -> bool {
        self.connections.is_draining() || self.is_too_old(manager)
    }

    /// Returns the server name (SNI) of the client hello.
    pub(crate) fn server_name(&self) -> Option<&str> {
        self.findings.server_name.as_deref()
    }

    /// Checks the connection against the policies of its filter chain, and counts the results. Returns their dynamic
    /// metadata, or `None` if a policy denies the connection.
    pub(crate) fn apply_policies(&self, worker: &Worker) -> Option<Vec<(String, Value)>> {
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
            debug!("connection from {} to {} denied: {details}", self.source, self.destination);
            return None;
        }
        Some(tally.found)
    }

    /// Returns whether the policies of the filter chain allow the connection. Counts nothing.
    pub(crate) fn is_allowed(&self) -> bool {
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

    /// Checks the connection against the configuration in effect, and returns the filter chain that admits it.
    ///
    /// This is its own filter chain if the listener still has it, else the one that the listener selects now. As in
    /// Envoy, another listener that a new connection would use does not matter.
    pub(crate) fn revalidate(&self, worker: &Worker) -> Result<Arc<FilterChain>, Refusal> {
        let snapshot = worker.snapshot();
        let listener = snapshot.listeners.by_name.get(&self.listener.name).ok_or(Refusal::Listener)?;
        let mut chains = listener.chains.iter().chain(&listener.default_chain);
        let own = |chain: &&Arc<FilterChain>| {
            chain.fingerprint.is_some() && chain.fingerprint == self.chain.fingerprint
        };
        let chain = chains.find(own).map_or_else(|| self.select(listener), Ok)?;
        self.check_chain(chain, worker)?;
        Ok(chain.clone())
    }

    /// Selects the filter chain of a listener for the connection.
    fn select<'a>(&'a self, listener: &'a Arc<Listener>) -> Result<&'a Arc<FilterChain>, Refusal> {
        if Arc::ptr_eq(listener, &self.listener) {
            return Ok(&self.chain);
        }
        let facts = Facts { destination: self.destination, source: self.source, findings: &self.findings };
        filter_chain_match::select(listener, &facts).ok_or(Refusal::FilterChain)
    }

    /// Checks that a filter chain would admit the connection with the TLS session and the protocol that it has.
    fn check_chain(&self, chain: &Arc<FilterChain>, worker: &Worker) -> Result<(), Refusal> {
        // A connection cannot change between HTTP and plain TCP.
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
        if !Arc::ptr_eq(chain, &self.chain) && self.needs_authorization(chain, tally) {
            return Err(Refusal::Authentication);
        }
        Ok(())
    }

    /// Returns whether the filter chain calls an external authorization service that has not decided about
    /// the connection yet.
    fn needs_authorization(&self, chain: &FilterChain, found: Tally) -> bool {
        let Some(config) = chain.external_authorization.as_deref() else { return false };
        if self
            .chain
            .external_authorization
            .as_ref()
            .is_none_or(|before| before.fingerprint != config.fingerprint)
        {
            return true;
        }
        let is_enabled = |tally: Tally| {
            let test = config.enabled_metadata.as_ref();
            test.is_some_and(|test| matching::metadata(test, Some(&metadata(tally.found))))
        };
        let mut before = Tally::default();
        self.check_policies(&self.chain, &mut before);
        is_enabled(found) && !is_enabled(before)
    }

    /// Checks the client's certificate against the trust bundle in effect.
    fn check_trust(&self, worker: &Worker) -> Result<(), Refusal> {
        let (Some(tls), Some(certificate)) = (&self.chain.tls, &self.peer.certificate) else { return Ok(()) };
        let Some(acceptor) = tls.config.load_full() else { return Ok(()) };
        let (distrusted, context) = (worker.snapshot().distrusted, Arc::as_ptr(&acceptor).addr());
        let trusted = certificate.is_trusted(distrusted, context, |chain| {
            let checked = acceptor.recheck(chain);
            checked
                .inspect_err(|error| debug!("client {} is no longer trusted: {error}", self.source))
                .is_ok()
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

    /// Returns these properties with the configuration in effect, and the filter chain that a new connection would get.
    fn renewed(&self, worker: &Worker) -> Result<Self, Refusal> {
        let snapshot = worker.snapshot();
        let entry = snapshot.listeners.by_name.get(&self.entry).ok_or(Refusal::Listener)?;
        let listener = filter_chain_match::listener(&snapshot, entry, self.dialled);
        let listener = filter_chain_match::listener(&snapshot, &listener, self.destination);
        let mut renewed = self.clone();
        renewed.chain = self.select(&listener)?.clone();
        self.check_chain(&renewed.chain, worker)?;
        (renewed.listener, renewed.snapshot) = (listener, snapshot);
        renewed.admission = Revalidation::new(worker.epoch());
        Ok(renewed)
    }

    /// Counts and logs a connection that is closed, if the reason is that it is no longer admitted.
    pub(crate) fn note_revoked(&self, worker: &Worker) {
        if let Some(refusal) = self.admission.refusal() {
            self.note_refusal(worker, refusal);
        }
    }

    /// Counts and logs a connection that is closed for this reason.
    pub(crate) fn note_refusal(&self, worker: &Worker, refusal: &Refusal) {
        worker.shard.listener(&self.listener.name).revoked.inc();
        let (listener, source) = (&self.listener.name, self.source);
        limit_log::log(Limit::Admission, format_args!("listener {listener}, client {source}, {refusal}"));
    }
}

/// Updates the properties of a connection to the configuration in effect.
///
/// # Errors
/// The connection is no longer admitted, and must end at this time. Until then its requests are served with the
/// previous configuration.
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

/// Returns the results of network policies as dynamic metadata.
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
