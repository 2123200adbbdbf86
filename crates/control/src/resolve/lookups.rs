//! DNS lookups for the publisher.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, warn};

use super::{Answer, Event, Names, Resolver, ask::ask, system::Servers};
use crate::{
    metrics::Metrics,
    publish::{Publisher, Wanted},
};

/// Longest wait for DNS at a start, so that proxies are not sent names without addresses for a moment.
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

    /// Starts the lookups. Returns when each current name was looked up once, or after a timeout.
    pub(crate) async fn start(self, publisher: &Arc<Publisher>) {
        let Self { servers, metrics, names, wanted } = self;
        let ask = move |name: Arc<str>, family| {
            let (servers, metrics) = (Arc::clone(&servers), Arc::clone(&metrics));
            async move {
                let answer = ask(&servers, &metrics, &name, family).await;
                let found = answer.as_ref().ok();
                metrics.looked_up(found.map(|answer| matches!(answer, Answer::Addresses(..))));
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

/// Publishes results of lookups; results that arrive in the meantime are published together.
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
