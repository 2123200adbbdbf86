//! Revalidation of open connections, tunnels and requests after a configuration change.
//!
//! A change of a policy, a filter chain or a trust bundle applies to open connections and requests as well:
//!
//! 1. A configuration that may not admit all of them begins an *epoch* on each worker ([`Worker::epoch`]).
//! 2. The tasks of all connections are woken, a few at a time ([`wake`]).
//! 3. Each task that runs in a new epoch checks its connection or request against the configuration in effect
//!    ([`Revalidation`]).
//! 4. A connection or request that is not admitted may continue for a drain time (`skysail.admission.drain_ms`). It is
//!    then closed, counted, and logged with the reason ([`Refusal`]).
//!
//! Without a change this costs one comparison per poll.

mod request;

use std::{fmt, rc::Rc, task::Waker, time::Instant};

use tokio::task::yield_now;

pub(crate) use self::request::{AdmittedRequest, FilterResults};
use crate::worker::Worker;

/// Number of connections that are woken together. Each may verify a certificate, which takes 0.1 ms.
const WOKEN_TOGETHER: usize = 16;

/// Reason why the configuration in effect does not admit an open connection or request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The listener was removed.
    Listener,
    /// No filter chain matches, or one for another protocol.
    FilterChain,
    /// The filter chain has another TLS context.
    TlsContext,
    /// The filter chain no longer leads to the cluster of the connection.
    Destination,
    /// The client's certificate is no longer trusted.
    Client,
    /// The client's certificate has expired.
    Expired,
    /// The server's certificate is no longer trusted.
    Server,
    /// External authorization would have to decide again, or the tokens do not meet the requirement in effect.
    Authentication,
    /// The filters would see a different request: settings for its path, client address or fields have changed. Or its
    /// head was too large to be kept.
    Handling,
    /// A policy denies the connection or request; the details name the rule.
    Denied(Box<str>),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Listener => "listener_removed",
            Self::FilterChain => "filter_chain_removed",
            Self::TlsContext => "tls_context_changed",
            Self::Destination => "destination_changed",
            Self::Client => "client_not_trusted",
            Self::Expired => "client_certificate_expired",
            Self::Server => "server_not_trusted",
            Self::Authentication => "authentication_changed",
            Self::Handling => "request_handling_changed",
            Self::Denied(details) => details,
        })
    }
}

/// Admission state of an open connection or request.
#[derive(Clone, Debug)]
pub(crate) struct Revalidation {
    /// Epoch of the last check.
    epoch: u32,
    /// End of the drain time, and the reason, if it is not admitted. Boxed because it is rare.
    revoked: Option<Box<(Instant, Refusal)>>,
}

impl Revalidation {
    /// Returns the state of a connection or request that was admitted in this epoch.
    pub(crate) fn new(epoch: u32) -> Self {
        Self { epoch, revoked: None }
    }

    /// Returns the end of its drain time; `None` if it is admitted. Calls `check` once in each epoch.
    #[inline]
    pub(crate) fn deadline(
        &mut self,
        worker: &Worker,
        check: impl FnOnce() -> Result<(), Refusal>,
    ) -> Option<Instant> {
        if self.epoch != worker.epoch() {
            self.revalidate(worker, check);
        }
        self.last_deadline()
    }

    /// Returns the end of its drain time by the last check; `None` if it was admitted.
    #[inline]
    pub(crate) fn last_deadline(&self) -> Option<Instant> {
        self.revoked.as_ref().map(|revoked| revoked.0)
    }

    #[cold]
    fn revalidate(&mut self, worker: &Worker, check: impl FnOnce() -> Result<(), Refusal>) {
        match check() {
            Ok(()) => *self = Self::new(worker.epoch()),
            Err(refusal) => self.refuse(worker, refusal),
        }
    }

    /// Records that the configuration in effect does not admit it. A second refusal does not extend the drain time.
    pub(crate) fn refuse(&mut self, worker: &Worker, refusal: Refusal) {
        self.epoch = worker.epoch();
        let end = self.revoked.as_ref().map_or_else(|| worker.drain_end(), |revoked| revoked.0);
        self.revoked = Some(Box::new((end, refusal)));
    }

    /// Returns whether the connection or request has not been checked in the current epoch.
    #[inline]
    pub(crate) fn is_due(&self, worker: &Worker) -> bool {
        self.epoch != worker.epoch()
    }

    /// Returns the reason why it is not admitted.
    #[inline]
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        self.revoked.as_ref().map(|revoked| &revoked.1)
    }

    /// Returns the reason if the drain time is over.
    pub(crate) fn expired(&self) -> Option<&Refusal> {
        let (end, refusal) = &**self.revoked.as_ref()?;
        (Instant::now() >= *end).then_some(refusal)
    }
}

/// Wakes the tasks of all connections when an epoch begins, forever.
pub(crate) async fn wake(worker: Rc<Worker>) {
    loop {
        worker.epoch_changed.notified().await;
        let wakers = worker.connection_sets().iter().flat_map(|connections| connections.wakers()).collect();
        wake_in_turns(wakers).await;
    }
}

/// Wakes the tasks of connections or streams, a few at a time, because each may verify a certificate.
pub(crate) async fn wake_in_turns(wakers: Vec<Waker>) {
    for some in wakers.chunks(WOKEN_TOGETHER) {
        some.iter().for_each(Waker::wake_by_ref);
        // The woken tasks and all other ready tasks run first.
        yield_now().await;
    }
}
