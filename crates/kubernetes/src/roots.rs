//! Keeps the mesh's trust bundle where the cluster needs it: in a ConfigMap of each namespace, for sidecars, and in
//! webhook configurations, for the API server.
//!
//! Each replica of the control plane does so. All write the same, and a write that changes nothing has no effect.

use std::{collections::HashMap, fmt::Debug, time::Duration};

use futures_util::{FutureExt as _, Stream, StreamExt as _, stream};
use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::{
            MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
        },
        core::v1::{ConfigMap, Namespace},
    },
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt as _, reflector,
        reflector::{Lookup, Store},
        watcher,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tracing::{info, warn};

use crate::{ApiServer, FIELD_MANAGER, watch::Failures};

/// Name of the ConfigMap, and its key. The pods of Istio's injector mount the same.
const CONFIG_MAP: &str = "istio-ca-root-cert";
const KEY: &str = "root-cert.pem";
/// Label of the ConfigMap with the namespace of the control plane that writes it.
const OWNER: &str = "skysail.io/control-plane";
/// Label of the webhook configurations that belong to the control plane.
const APP: &str = "skysail-injector";
/// Time in which further events are awaited before objects are written.
const SETTLE: Duration = Duration::from_millis(20);
/// Interval at which an object is written again: after a failure, or if another program changes it back.
const REPEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout of a write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of concurrent writes.
const WRITES: usize = 8;

/// Objects by name that are due, with the times of their last writes.
#[derive(Default)]
struct Pace {
    written: HashMap<String, Instant>,
    failures: Failures,
}

impl Pace {
    /// Writes those of the objects that have not been written lately. Returns the time of the next write, if one waits.
    async fn write<F: Future<Output = Result<(), kube::Error>>>(
        &mut self,
        objects: Vec<String>,
        write: impl Fn(String) -> F,
    ) -> Option<Instant> {
        let now = Instant::now();
        self.written.retain(|_, written| *written + REPEAT_INTERVAL > now);
        let is_late = |name: &String| self.written.contains_key(name);
        let (late, due): (Vec<String>, Vec<String>) = objects.into_iter().partition(is_late);
        let write = |name: String| async {
            let result = timeout(WRITE_TIMEOUT, write(name.clone())).await;
            (name, result.map_err(|_| format!("no answer within {WRITE_TIMEOUT:?}")))
        };
        let mut results = stream::iter(due).map(write).buffer_unordered(WRITES);
        let mut next = late.iter().filter_map(|name| self.written.get(name)).min().copied();
        while let Some((name, result)) = results.next().await {
            let failure = match result {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(silence) => Some(silence),
            };
            if let Some(error) = failure {
                self.failures.report(|| {
                    warn!(error, "the trust bundle cannot be written to {name}; it is tried again");
                });
                next = Some(next.map_or(now, |next| next.min(now)));
            }
            self.written.insert(name, Instant::now());
        }
        next.map(|written| written + REPEAT_INTERVAL)
    }
}

/// Configuration of webhooks.
trait WebhookConfiguration:
    Resource<DynamicType = ()> + Clone + Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// Returns how the API server reaches the webhooks.
    fn clients(&mut self) -> impl Iterator<Item = &mut WebhookClientConfig>;
}

impl WebhookConfiguration for MutatingWebhookConfiguration {
    fn clients(&mut self) -> impl Iterator<Item = &mut WebhookClientConfig> {
        self.webhooks.iter_mut().flatten().map(|webhook| &mut webhook.client_config)
    }
}

impl WebhookConfiguration for ValidatingWebhookConfiguration {
    fn clients(&mut self) -> impl Iterator<Item = &mut WebhookClientConfig> {
        self.webhooks.iter_mut().flatten().map(|webhook| &mut webhook.client_config)
    }
}

impl ApiServer {
    /// Keeps the trust bundle (PEM) in the ConfigMap [`CONFIG_MAP`] of each namespace but these, without end. A ConfigMap
    /// that another control plane has written stays: otherwise the two would replace each other's roots. `own` is the
    /// namespace of this control plane.
    pub async fn distribute_roots(self, mut roots: watch::Receiver<String>, own: &str, ignored: &[&str]) {
        let client = self.client();
        let (namespaces, namespace_events) =
            follow(Api::<PartialObjectMeta<Namespace>>::all(client.clone()), watcher::Config::default());
        let of_name = watcher::Config::default().fields(&format!("metadata.name={CONFIG_MAP}"));
        let (maps, map_events) = follow(Api::<ConfigMap>::all(client.clone()), of_name);
        let mut events = Box::pin(stream::select(namespace_events, map_events));
        let (mut pace, mut next) = (Pace::default(), None);
        let mut foreign_lines = Failures::default();
        while wait(&mut events, &mut roots, next, &mut pace.failures).await {
            if !(is_ready(&namespaces) && is_ready(&maps)) {
                continue;
            }
            let bundle = roots.borrow_and_update().clone();
            let maps: HashMap<String, _> = maps
                .state()
                .into_iter()
                .filter_map(|map| Some((map.metadata.namespace.clone()?, map)))
                .collect();
            let has = |namespace: &String| {
                let data = maps.get(namespace).and_then(|map| map.data.as_ref());
                data.and_then(|data| data.get(KEY)) == Some(&bundle)
            };
            let all = namespaces.state().into_iter();
            let names = all.filter(|one| one.meta().deletion_timestamp.is_none()).map(|one| one.name_any());
            let differ = names.filter(|name| !ignored.contains(&name.as_str()) && !has(name));
            let is_foreign = |namespace: &String| maps.get(namespace).is_some_and(|map| is_foreign(map, own));
            let (foreign, differ): (Vec<String>, Vec<String>) = differ.partition(is_foreign);
            if let Some(namespace) = foreign.first() {
                let namespaces = foreign.len();
                foreign_lines.report(|| {
                    warn!(
                        namespace,
                        namespaces,
                        "another control plane has written {CONFIG_MAP} with other roots, and it stays: sidecars there do not \
                         trust this control plane; give both the same cacerts, or delete the ConfigMap"
                    );
                });
            }
            next = pace.write(differ, |namespace| write_map(client.clone(), namespace, own, &bundle)).await;
        }
    }

    /// Keeps the trust bundle (PEM) in webhooks, without end: those of the configurations with the label `app` [`APP`] and
    /// the label `istio.io/rev` of this revision, but for webhooks of Services in other namespaces.
    pub async fn keep_ca_bundles(self, roots: watch::Receiver<String>, namespace: &str, revision: &str) {
        tokio::join!(
            self.keep_bundles_of::<MutatingWebhookConfiguration>(roots.clone(), namespace, revision),
            self.keep_bundles_of::<ValidatingWebhookConfiguration>(roots, namespace, revision),
        );
    }

    async fn keep_bundles_of<K: WebhookConfiguration>(
        &self,
        mut roots: watch::Receiver<String>,
        namespace: &str,
        revision: &str,
    ) {
        let api = Api::<K>::all(self.client());
        let labels = watcher::Config::default().labels(&format!("app={APP},istio.io/rev={revision}"));
        let (configurations, events) = follow(api.clone(), labels);
        let mut events = Box::pin(events);
        let (mut pace, mut next) = (Pace::default(), None);
        while wait(&mut events, &mut roots, next, &mut pace.failures).await {
            if !is_ready(&configurations) {
                continue;
            }
            let bundle = ByteString(roots.borrow_and_update().clone().into_bytes());
            let changed =
                configurations.state().into_iter().filter_map(|one| with_bundle(&*one, namespace, &bundle));
            let changed: HashMap<String, _> = changed.map(|one| (one.name_any(), one)).collect();
            let names = changed.keys().cloned().collect();
            // The version in the object refuses a write over a change of another program.
            let write = async |name: String| {
                let Some(one) = changed.get(&name) else { return Ok(()) };
                api.replace(&name, &PostParams::default(), one).await?;
                info!(configuration = name, "the webhook configuration has the trust bundle");
                Ok(())
            };
            next = pace.write(names, write).await;
        }
    }
}

/// Returns the configuration with the trust bundle in the webhooks of a namespace; `None` if it has it already.
fn with_bundle<K: WebhookConfiguration>(
    configuration: &K,
    namespace: &str,
    bundle: &ByteString,
) -> Option<K> {
    let mut changed = configuration.clone();
    let is_own = |config: &WebhookClientConfig| {
        config.service.as_ref().is_none_or(|service| service.namespace == namespace)
    };
    for client in changed.clients().filter(|client| is_own(client)) {
        client.ca_bundle = Some(bundle.clone());
    }
    (changed != *configuration).then_some(changed)
}

/// Returns whether another control plane has written a trust bundle.
fn is_foreign(map: &ConfigMap, own: &str) -> bool {
    let owner = map.metadata.labels.as_ref().and_then(|labels| labels.get(OWNER));
    owner.is_none_or(|owner| owner != own) && map.data.as_ref().is_some_and(|data| data.contains_key(KEY))
}

async fn write_map(client: Client, namespace: String, own: &str, bundle: &str) -> Result<(), kube::Error> {
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": CONFIG_MAP, "labels": { "istio.io/config": "true", OWNER: own } },
        "data": { KEY: bundle },
    });
    let api: Api<ConfigMap> = Api::namespaced(client, &namespace);
    api.patch(CONFIG_MAP, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(map)).await?;
    Ok(())
}

/// Watches objects. Returns them, and a stream of the changes.
fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
) -> (Store<K>, impl Stream<Item = Result<(), watcher::Error>> + Send + use<K>)
where
    K: Resource + Lookup + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    <K as Lookup>::DynamicType: Default + Clone + Eq + std::hash::Hash + Send + Sync,
{
    let (store, writer) = reflector::store();
    let events = reflector(writer, watcher(api, config)).default_backoff();
    (store, events.map(|event| event.map(drop)))
}

fn is_ready<K>(store: &Store<K>) -> bool
where
    K: Lookup + Clone + 'static,
    K::DynamicType: Eq + std::hash::Hash + Clone,
{
    store.wait_until_ready().now_or_never().is_some_and(|ready| ready.is_ok())
}

/// Waits for a change of objects or of the trust bundle, or for the time of the next write. Returns false at the end of
/// the control plane.
async fn wait(
    events: &mut (impl Stream<Item = Result<(), watcher::Error>> + Unpin),
    roots: &mut watch::Receiver<String>,
    next: Option<Instant>,
    failures: &mut Failures,
) -> bool {
    let mut report = |event: Option<Result<(), watcher::Error>>| {
        if let Some(Err(error)) = event {
            failures.report(|| warn!(%error, "a watch for the trust bundle failed and is tried again"));
        }
    };
    tokio::select! {
        event = events.next() => report(event),
        changed = roots.changed() => if changed.is_err() { return false },
        () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
    }
    let settled = sleep(SETTLE);
    tokio::pin!(settled);
    loop {
        tokio::select! {
            () = &mut settled => return true,
            event = events.next() => report(event),
        }
    }
}
