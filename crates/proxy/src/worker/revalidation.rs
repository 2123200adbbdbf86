//! What is open when the configuration changes: would it be admitted again?
//!
//! A policy, a filter chain or a trusted root that changes concerns connections, tunnels and requests that were admitted
//! before. Each configuration that may judge otherwise begins an *epoch* on each worker ([`Worker::epoch`]). The tasks of all
//! connections are then woken, a few at a time ([`wake`]), and whoever is woken in a new epoch judges itself by the
//! configuration of now ([`Revalidation`]). What would not be admitted may go on for a drain time
//! (`skysail.admission.drain_ms`), and is then closed, counted and logged with the reason ([`Refusal`]).
//!
//! Between changes this costs a comparison whenever something open is polled.

mod request;

use std::{fmt, rc::Rc, task::Waker, time::Instant};

use tokio::task::yield_now;

pub(crate) use self::request::{AdmittedRequest, FilterResults};
use crate::worker::Worker;

/// Connections woken in one turn: those of one turn may have to verify as many certificates, 0.1 ms each.
const AT_ONCE: usize = 16;

/// Why something that was admitted would not be admitted now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Its listener is gone.
    Listener,
    /// No filter chain takes it any more, or one of another kind.
    FilterChain,
    /// Its filter chain has another TLS context.
    TlsContext,
    /// It goes to a cluster to which its filter chain does not lead any more.
    Destination,
    /// No trusted root vouches for the client's certificate.
    Client,
    /// The client's certificate has run out.
    Expired,
    /// No trusted root vouches for the server's certificate.
    Server,
    /// External authorization would have to be asked again, or the request's tokens do not meet what is required now.
    Authentication,
    /// Filters would see the request otherwise: its path, its client or its fields are read by other settings, or its head was too
    /// long to be kept.
    Handling,
    /// A policy denies it; the details name the rule.
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

/// Whether something open is admitted.
#[derive(Clone, Debug)]
pub(crate) struct Revalidation {
    /// When it was last judged.
    epoch: u32,
    /// Boxed, as it is seldom there.
    revoked: Option<Box<(Instant, Refusal)>>,
}

impl Revalidation {
    /// Of something that was admitted in this epoch.
    pub(crate) fn new(epoch: u32) -> Self {
        Self { epoch, revoked: None }
    }

    /// Until when it may go on; `None` if it is admitted. `judge` is called once in each epoch.
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

    /// Until when it may go on, as it was judged last; `None` if it is admitted.
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

    /// Records that the configuration in force refuses it. A refusal that lasts does not begin another drain time.
    pub(crate) fn refuse(&mut self, worker: &Worker, refusal: Refusal) {
        self.epoch = worker.epoch();
        let end = self.revoked.as_ref().map_or_else(|| worker.drain_end(), |revoked| revoked.0);
        self.revoked = Some(Box::new((end, refusal)));
    }

    /// Whether it is to be judged again.
    #[inline]
    pub(crate) fn is_due(&self, worker: &Worker) -> bool {
        self.epoch != worker.epoch()
    }

    /// Why it is to end, if it is.
    #[inline]
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        self.revoked.as_ref().map(|revoked| &revoked.1)
    }

    /// Why it has ended, if it has.
    pub(crate) fn expired(&self) -> Option<&Refusal> {
        let (end, refusal) = &**self.revoked.as_ref()?;
        (Instant::now() >= *end).then_some(refusal)
    }
}

/// Wakes all connections whenever an epoch begins.
pub(crate) async fn wake(worker: Rc<Worker>) {
    loop {
        worker.reconsider.notified().await;
        let wakers = worker.sides().iter().flat_map(|side| side.wakers()).collect();
        wake_in_turns(wakers).await;
    }
}

/// Wakes the tasks of connections or streams, a few at a time: each may have to verify a signature.
pub(crate) async fn wake_in_turns(wakers: Vec<Waker>) {
    for some in wakers.chunks(AT_ONCE) {
        some.iter().for_each(Waker::wake_by_ref);
        // They, and whatever else there is to do, come first.
        yield_now().await;
    }
}
