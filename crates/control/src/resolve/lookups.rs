//! Lookups at real DNS servers, for the publisher.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, warn};

use super::{Event, Names, Resolver, Wanted, ask::ask, system::Servers};
use crate::{metrics::Metrics, publish::Publisher};

/// So long a start waits for DNS, so that proxies are not told for a moment that names have no addresses.
const FIRST_ANSWERS: Duration = Duration::from_secs(10);

/// Lookups that are about to start.
pub(crate) struct Lookups {
    servers: Arc<Servers>,
    metrics: Arc<Metrics>,
    names: Arc<Names>,
    wanted: watch::Receiver<(Arc<Wanted>, Duration)>,
}

impl Lookups {
    /// At these servers, or the system's.
    pub(crate) fn new(
        servers: &[SocketAddr],
        metrics: Arc<Metrics>,
        names: Arc<Names>,
        wanted: watch::Receiver<(Arc<Wanted>, Duration)>,
    ) -> Self {
        Self { servers: Arc::new(Servers::new(servers)), metrics, names, wanted }
    }

    /// Looks names up from now on; returns when each that is wanted now was looked up once, or DNS takes too long.
    pub(crate) async fn start(self, publisher: &Arc<Publisher>) {
        let Self { servers, metrics, names, wanted } = self;
        let ask = move |name: Arc<str>, family| {
            let (servers, metrics) = (Arc::clone(&servers), Arc::clone(&metrics));
            async move {
                let answer = ask(&servers, &metrics, &name, family).await;
                metrics.looked_up(&answer);
                answer
            }
        };
        let (told, events) = mpsc::unbounded_channel();
        let (settled, first_answers) = oneshot::channel();
        tokio::spawn(Resolver { ask, names, wanted, told }.run());
        tokio::spawn(publish(events, Arc::clone(publisher), settled));
        if tokio::time::timeout(FIRST_ANSWERS, first_answers).await.is_err() {
            warn!(
                "not all names in ServiceEntries could be looked up within {FIRST_ANSWERS:?}; starting without them"
            );
        }
    }
}

/// Publishes what becomes of names: all that came about meanwhile at once.
async fn publish(
    mut events: mpsc::UnboundedReceiver<Event>,
    publisher: Arc<Publisher>,
    settled: oneshot::Sender<()>,
) {
    let mut settled = Some(settled);
    while let Some(first) = events.recv().await {
        let (mut changes, mut all_known) = (Vec::new(), false);
        let mut next = Some(first);
        while let Some(event) = next {
            match event {
                Event::Changed(name, now) => changes.push((name, now)),
                Event::Settled => all_known = true,
            }
            next = events.try_recv().ok();
        }
        let publisher = Arc::clone(&publisher);
        // One change that cannot be compiled must not end the lookups.
        if tokio::task::spawn_blocking(move || publisher.resolve(changes)).await.is_err() {
            error!("new addresses could not be compiled; proxies keep those they have");
        }
        if all_known && let Some(settled) = settled.take() {
            let _ = settled.send(());
        }
    }
}
