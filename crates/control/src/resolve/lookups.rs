//! Connects the resolver to the publisher: the publisher yields names, the resolver returns their addresses.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, warn};

use super::{Answer, DnsCache, LookupEvent, Resolver, query::lookup, servers::Servers};
use crate::{
    metrics::Metrics,
    publish::{LookupNames, Publisher},
};

/// Maximum time that the start waits for DNS, so that proxies do not receive names without addresses for a moment.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// DNS lookups before their start.
pub(crate) struct Lookups {
    servers: Arc<Servers>,
    metrics: Arc<Metrics>,
    cache: Arc<DnsCache>,
    names: watch::Receiver<(Arc<LookupNames>, Duration)>,
}

impl Lookups {
    /// Prepares lookups at the given servers; without any, at those of the system.
    pub(crate) fn new(
        servers: &[SocketAddr],
        metrics: Arc<Metrics>,
        cache: Arc<DnsCache>,
        names: watch::Receiver<(Arc<LookupNames>, Duration)>,
    ) -> Self {
        Self { servers: Arc::new(Servers::new(servers)), metrics, cache, names }
    }

    /// Starts the lookups. Returns after the first lookup of each current name, or after [`START_TIMEOUT`].
    pub(crate) async fn start(self, publisher: &Arc<Publisher>) {
        let Self { servers, metrics, cache, names } = self;
        let lookup = move |name: Arc<str>, family| {
            let (servers, metrics) = (Arc::clone(&servers), Arc::clone(&metrics));
            async move {
                let answer = lookup(&servers, &metrics, &name, family).await;
                let answered = answer.as_ref().ok();
                metrics.record_lookup(answered.map(|answer| matches!(answer, Answer::Addresses(..))));
                answer
            }
        };
        let (sender, events) = mpsc::unbounded_channel();
        let (first_round, first_round_done) = oneshot::channel();
        tokio::spawn(Resolver { lookup, cache, names, events: sender }.run());
        tokio::spawn(publish(events, Arc::clone(publisher), first_round));
        if tokio::time::timeout(START_TIMEOUT, first_round_done).await.is_err() {
            warn!(
                "DNS lookups of ServiceEntry names did not end within {START_TIMEOUT:?}; starting without the missing addresses"
            );
        }
    }
}

/// Publishes results of lookups. Results that arrive during a publication are published together.
async fn publish(
    mut events: mpsc::UnboundedReceiver<LookupEvent>,
    publisher: Arc<Publisher>,
    first_round: oneshot::Sender<()>,
) {
    let mut first_round = Some(first_round);
    while let Some(first) = events.recv().await {
        let (mut changes, mut is_first_round_done) = (Vec::new(), false);
        let mut next = Some(first);
        while let Some(event) = next {
            match event {
                LookupEvent::Changed(name, resolved) => changes.push((name, resolved)),
                LookupEvent::FirstRoundDone => is_first_round_done = true,
            }
            next = events.try_recv().ok();
        }
        let publisher = Arc::clone(&publisher);
        // Lookups continue after a change that cannot be compiled.
        if tokio::task::spawn_blocking(move || publisher.resolve(changes)).await.is_err() {
            error!("publication of new addresses panicked; proxies keep their last addresses");
        }
        if is_first_round_done && let Some(sender) = first_round.take() {
            let _ = sender.send(());
        }
    }
}
