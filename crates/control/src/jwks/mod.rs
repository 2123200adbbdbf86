//! Key sets of token issuers (JWKS): the control plane fetches each one once for the whole mesh.
//!
//! One task ([`KeyFetcher`]) receives the sources, fetches each ([`fetch`]), repeats it after [`REFRESH`], and
//! publishes changes. While an issuer does not answer, its last key set stays in effect without a time limit. The state
//! file keeps the key sets over restarts. Without any key set, no token of the issuer is valid.

mod fetch;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use skysail_model::KeySource;
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::Instant,
};
use tracing::{error, info, warn};

use self::fetch::{FetchError, Fetcher};
use crate::{
    metrics::Metrics,
    publish::{KeyFetches, Publisher},
    resolve::Servers,
    state_file::StateFile,
};

/// Time from a successful fetch to the next one. Source: Istio's default.
const REFRESH: Duration = Duration::from_mins(20);
/// Maximum delay after the first failure; each further failure doubles it. Half of a delay is random.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay after failures.
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);
/// Maximum random share by which [`REFRESH`] is extended, so that fetches spread out.
const JITTER: f64 = 0.1;
/// Maximum number of different errors of a key set that are logged until a fetch succeeds.
const MAX_LOGGED: usize = 4;
/// Maximum number of concurrent fetches.
const MAX_CONCURRENT: usize = 8;
/// Maximum number of key sets. Further ones are not fetched, so their tokens stay invalid.
const MAX_SOURCES: usize = 1_000;
/// Maximum time that the start waits for key sets, so that proxies do not refuse valid tokens for a moment.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Name of the file in the state directory.
const FILE: &str = "key-sets.json";

/// The last key set of each source.
#[derive(Debug, Default)]
pub(crate) struct KeySets {
    /// By the text of the source.
    known: Mutex<HashMap<String, Arc<str>>>,
    file: StateFile,
}

impl KeySets {
    /// Reads the key sets of the state directory.
    pub(crate) fn open(directory: Option<&Path>) -> Self {
        let file = StateFile::new(directory, FILE);
        let mut known: HashMap<String, Arc<str>> = file
            .read::<HashMap<String, Box<str>>>()
            .into_iter()
            .map(|(source, keys)| (source, keys.into()))
            .collect();
        known.retain(|_, keys| skysail_model::key_set(keys).is_ok());
        Self { known: Mutex::new(known), file }
    }

    fn get(&self, source: &KeySource) -> Option<Arc<str>> {
        self.lock().get(&source.to_string()).cloned()
    }

    fn set(&self, source: &KeySource, keys: &Arc<str>) {
        self.lock().insert(source.to_string(), Arc::clone(keys));
        self.file.mark_changed();
    }

    fn remove(&self, source: &KeySource) {
        if self.lock().remove(&source.to_string()).is_some() {
            self.file.mark_changed();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Arc<str>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes changed key sets to the state file. Never returns.
    pub(crate) async fn write_changes(self: Arc<Self>) {
        let sets = Arc::clone(&self);
        self.file.write_changes(move || sets.write()).await;
    }

    /// Writes the key sets to the state file if they have changed. Blocks.
    ///
    /// # Errors
    /// When the state directory cannot be written to.
    pub(crate) fn write(&self) -> io::Result<()> {
        self.file.write(|| {
            let known = self.lock();
            known.iter().map(|(source, keys)| (source.clone(), keys.to_string())).collect::<BTreeMap<_, _>>()
        })
    }
}

/// State of a source.
#[derive(Debug)]
struct KeyEntry {
    next: Instant,
    failures: u32,
    /// Errors that were logged since the last success.
    logged: Vec<FetchError>,
    is_in_progress: bool,
    keys: Option<Arc<str>>,
}

/// Fetches the key sets that the configuration uses.
pub(crate) struct KeyFetcher {
    fetcher: Arc<Fetcher>,
    sets: Arc<KeySets>,
    wanted: watch::Receiver<Arc<KeyFetches>>,
}

impl KeyFetcher {
    /// Prepares fetches. Hosts are looked up at the given DNS servers; without any, at those of the system.
    pub(crate) fn new(
        dns_servers: &[SocketAddr],
        metrics: &Arc<Metrics>,
        sets: &Arc<KeySets>,
        wanted: watch::Receiver<Arc<KeyFetches>>,
    ) -> Self {
        let fetcher = Fetcher { servers: Servers::new(dns_servers), metrics: Arc::clone(metrics) };
        Self { fetcher: Arc::new(fetcher), sets: Arc::clone(sets), wanted }
    }

    /// Starts the fetches. Returns after the first fetch of each current key set that is not known from an earlier run,
    /// or after [`START_TIMEOUT`].
    pub(crate) async fn start(self, publisher: &Arc<Publisher>) {
        let (first_round, done) = oneshot::channel();
        let run = Run { entries: HashMap::new(), publisher: Arc::clone(publisher), context: self };
        tokio::spawn(run.run(first_round));
        if tokio::time::timeout(START_TIMEOUT, done).await.is_err() {
            warn!(
                "fetches of key sets did not end within {START_TIMEOUT:?}; until they do, tokens of their issuers are refused"
            );
        }
    }
}

/// Result of a fetch.
type Fetched = (KeySource, Result<Arc<str>, FetchError>);

/// The running task.
struct Run {
    entries: HashMap<KeySource, KeyEntry>,
    publisher: Arc<Publisher>,
    context: KeyFetcher,
}

impl Run {
    async fn run(mut self, first_round: oneshot::Sender<()>) {
        let mut first_round = Some(first_round);
        let mut fetches: JoinSet<Fetched> = JoinSet::new();
        self.update_sources().await;
        loop {
            self.start_due(&mut fetches);
            let is_complete = self.entries.values().all(|entry| entry.keys.is_some() || entry.failures > 0);
            if is_complete && let Some(sender) = first_round.take() {
                let _ = sender.send(());
            }
            let idle = self.entries.values().filter(|entry| !entry.is_in_progress);
            let next = idle.map(|entry| entry.next).min().filter(|_| fetches.len() < MAX_CONCURRENT);
            let sleep = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.context.wanted.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.update_sources().await;
                }
                Some(fetched) = fetches.join_next() => {
                    let Ok((source, result)) = fetched else { continue };
                    self.apply(source, result).await;
                }
                () = sleep => {}
            }
        }
    }

    /// Starts fetches that are due.
    fn start_due(&mut self, fetches: &mut JoinSet<Fetched>) {
        let now = Instant::now();
        let wanted = Arc::clone(&self.context.wanted.borrow());
        for (source, entry) in &mut self.entries {
            if fetches.len() >= MAX_CONCURRENT {
                return;
            }
            let Some(fetch) = wanted.get(source).filter(|_| !entry.is_in_progress && entry.next <= now)
            else {
                continue;
            };
            entry.is_in_progress = true;
            let (fetcher, source, timeout) =
                (Arc::clone(&self.context.fetcher), source.clone(), fetch.timeout);
            fetches.spawn(async move {
                let result = fetcher.fetch(&source, timeout).await;
                (source, result)
            });
        }
    }

    /// Takes the current sources. Key sets of an earlier run are published at once.
    async fn update_sources(&mut self) {
        let wanted = Arc::clone(&self.context.wanted.borrow_and_update());
        let kept: HashSet<&KeySource> = wanted.keys().take(MAX_SOURCES).collect();
        if wanted.len() > MAX_SOURCES {
            warn!(
                sources = wanted.len(),
                "only {MAX_SOURCES} key sets are fetched; tokens of other issuers are refused"
            );
        }
        let mut changes = Vec::new();
        self.entries.retain(|source, _| {
            let keeps = kept.contains(source);
            if !keeps {
                self.context.sets.remove(source);
                changes.push((source.clone(), None));
            }
            keeps
        });
        for source in kept {
            if !self.entries.contains_key(source) {
                let keys = self.context.sets.get(source);
                changes.extend(keys.clone().map(|keys| (source.clone(), Some(keys))));
                let entry = KeyEntry {
                    next: Instant::now(),
                    failures: 0,
                    logged: Vec::new(),
                    is_in_progress: false,
                    keys,
                };
                self.entries.insert(source.clone(), entry);
            }
        }
        self.publish(changes).await;
    }

    /// Applies the result of a fetch.
    async fn apply(&mut self, source: KeySource, result: Result<Arc<str>, FetchError>) {
        let wanted = Arc::clone(&self.context.wanted.borrow());
        let used_by =
            || wanted.get(&source).map_or("", |fetch| fetch.used_by.first().map_or("", |name| name));
        let Some(entry) = self.entries.get_mut(&source) else { return };
        entry.is_in_progress = false;
        let now = Instant::now();
        match result {
            Ok(keys) => {
                if entry.failures > 0 {
                    info!(%source, policy = used_by(), "key set fetched again");
                }
                entry.failures = 0;
                entry.logged.clear();
                entry.next = now + REFRESH.mul_f64(1.0 + JITTER * fastrand::f64());
                if entry.keys.as_ref() != Some(&keys) {
                    entry.keys = Some(Arc::clone(&keys));
                    self.context.sets.set(&source, &keys);
                    self.publish(vec![(source, Some(keys))]).await;
                }
            }
            Err(error) => {
                // The text of an error may contain a time or one of several addresses, so that it never repeats.
                if entry.logged.len() < MAX_LOGGED && !entry.logged.contains(&error) {
                    let effect = match entry.keys {
                        Some(_) => "its last key set stays in effect",
                        None => "its tokens are refused until a fetch succeeds",
                    };
                    warn!(%source, policy = used_by(), %error, "key set cannot be fetched; {effect}");
                    entry.logged.push(error);
                }
                let delay = RETRY_DELAY.saturating_mul(1 << entry.failures.min(16)).min(MAX_RETRY_DELAY);
                entry.failures = entry.failures.saturating_add(1);
                entry.next = now + delay.mul_f64(0.5 + 0.5 * fastrand::f64());
            }
        }
    }

    async fn publish(&self, changes: Vec<(KeySource, Option<Arc<str>>)>) {
        if changes.is_empty() {
            return;
        }
        let publisher = Arc::clone(&self.publisher);
        // Fetches continue after a change that cannot be compiled.
        if tokio::task::spawn_blocking(move || publisher.set_key_sets(changes)).await.is_err() {
            error!("publication of key sets panicked; proxies keep their last key sets");
        }
    }
}
