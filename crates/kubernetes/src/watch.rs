//! Watches the objects of a Kubernetes cluster.
//!
//! Each object is a file of its own, `kubernetes/KINDS.GROUP/NAMESPACE/NAME`, whose text is the object in JSON. So what holds
//! for files holds for objects too: an object that is refused keeps its last valid version, and messages name it.
//!
//! Each kind has a watch of its own. A watch that ends is resumed, or begins again with a list; objects that are not in
//! the list were deleted meanwhile. The status of objects that the control plane writes itself is no part of their text, and a
//! version with the same text is no change. While the API server is away, the objects known so far stay in effect. Kinds that the
//! cluster does not serve, or no longer in the version that was watched, are looked for at intervals.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    hash::{BuildHasher as _, RandomState},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures_util::StreamExt as _;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    discovery::Discovery,
    runtime::{WatchStreamExt as _, watcher},
};
use skysail_source::{FileChange, FileState};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout, timeout_at},
};
use tracing::{info, warn};

use crate::{
    ApiServer, ConnectError, DISCOVERY_TIMEOUT,
    status::{self, ClusterObject, Statuses},
};

/// Time without events that ends a burst of changes, and the longest burst.
const SETTLE: Duration = Duration::from_millis(5);
const MAX_BURST: Duration = Duration::from_millis(100);
/// Number of events that wait for the control plane. Beyond it the watches wait.
const WAITING: usize = 4096;
/// Interval at which kinds that the cluster does not have are looked for.
const MISSING_INTERVAL: Duration = Duration::from_secs(10);
/// Interval of messages about kinds whose lists are awaited at the start.
const WAITING_INTERVAL: Duration = Duration::from_secs(10);
/// Annotation in which kubectl keeps a copy of the object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Interval between two messages about a watch that fails.
const FAILURE_INTERVAL: Duration = Duration::from_secs(60);
/// Number of objects in each part of a list.
const PAGE: u32 = 500;

/// A kind of objects: its API group, which is empty for the core group, and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchedKind {
    /// API group.
    pub group: &'static str,
    /// Name.
    pub kind: &'static str,
}

/// An event of a watch.
enum Event {
    Change(FileChange),
    /// A list of a kind is complete.
    Listed(String),
    /// A kind may not be listed: the kind and the reason.
    Forbidden(String, String),
}

/// Objects of a cluster, and their changes.
pub struct Cluster {
    events: mpsc::Receiver<Event>,
    /// Kinds whose first list is not complete.
    unlisted: BTreeSet<String>,
    statuses: Arc<Statuses>,
}

/// Objects of a kind that are in effect, by path.
type KnownObjects = HashMap<String, KnownObject>;

/// Version of an object that is in effect, and the hash of its text.
struct KnownObject {
    version: String,
    text: u64,
}

/// A kind that the cluster does not serve, with its objects that are in effect.
type Missing = (WatchedKind, KnownObjects);

/// Where watches send what they read.
#[derive(Clone)]
struct Receivers {
    /// Layer of changes.
    layer: usize,
    events: mpsc::Sender<Event>,
    statuses: Arc<Statuses>,
    /// Kinds that the cluster no longer serves.
    lost: mpsc::UnboundedSender<Missing>,
}

impl Cluster {
    /// Starts the watches of kinds. Changes have this layer.
    ///
    /// # Errors
    /// The API server does not answer.
    pub async fn watch(
        server: &ApiServer,
        kinds: &[WatchedKind],
        layer: usize,
    ) -> Result<Self, ConnectError> {
        let statuses = Statuses::new(server.clone());
        let ApiServer { client, address: server } = server.clone();
        let failed = |cause| ConnectError::Server { server: server.clone(), cause };
        let found = timeout(DISCOVERY_TIMEOUT, served(&client, kinds)).await;
        let found = found.map_err(|_| ConnectError::Silent { server: server.clone() })?.map_err(failed)?;
        info!(server, kinds = found.len(), "watching a cluster");
        let (sender, events) = mpsc::channel(WAITING);
        let (lost, missing) = mpsc::unbounded_channel();
        let receivers = Receivers { layer, events: sender, statuses: Arc::clone(&statuses), lost };
        let mut absent: Vec<Missing> = Vec::new();
        let mut unlisted = BTreeSet::new();
        for kind in kinds {
            let Some(resource) = found.iter().find(|one| is(one, kind)) else {
                absent.push((*kind, HashMap::new()));
                continue;
            };
            unlisted.insert(name_of(resource));
            let watch = Watch::new(resource.clone(), *kind, receivers.clone());
            tokio::spawn(watch.run(client.clone(), HashMap::new(), true));
        }
        tokio::spawn(follow_missing(client, absent, receivers, missing));
        Ok(Self { events, unlisted, statuses })
    }

    /// Returns the statuses of the objects that the control plane writes.
    pub fn statuses(&self) -> Arc<Statuses> {
        Arc::clone(&self.statuses)
    }

    /// Returns the objects of all kinds that the cluster had at the start. Waits while the API server is away.
    ///
    /// # Errors
    /// A kind may not be listed.
    pub async fn initial(&mut self) -> Result<Vec<FileChange>, ConnectError> {
        let mut changes = Vec::new();
        while !self.unlisted.is_empty() {
            match timeout(WAITING_INTERVAL, self.events.recv()).await {
                Ok(Some(Event::Change(change))) => changes.push(change),
                Ok(Some(Event::Listed(kind))) => _ = self.unlisted.remove(&kind),
                Ok(Some(Event::Forbidden(kind, cause))) => {
                    return Err(ConnectError::Forbidden { kind, cause });
                }
                Ok(None) => break,
                Err(_) => info!(kinds = ?self.unlisted, "the start waits for the objects of these kinds"),
            }
        }
        Ok(changes)
    }

    /// Returns the next changes: those of a burst together. `None`: all watches have ended.
    pub async fn next(&mut self) -> Option<Vec<FileChange>> {
        let mut changes = Vec::new();
        while changes.is_empty() {
            changes.extend(change_of(self.events.recv().await?));
        }
        let end = Instant::now() + MAX_BURST;
        loop {
            let settled = (Instant::now() + SETTLE).min(end);
            match timeout_at(settled, self.events.recv()).await {
                Ok(Some(event)) => changes.extend(change_of(event)),
                Ok(None) | Err(_) => return Some(changes),
            }
        }
    }
}

fn change_of(event: Event) -> Option<FileChange> {
    match event {
        Event::Change(change) => Some(change),
        Event::Listed(_) | Event::Forbidden(..) => None,
    }
}

/// Returns the name of a kind in messages, which is unique.
fn name_of(resource: &ApiResource) -> String {
    match resource.group.as_str() {
        "" => resource.kind.clone(),
        group => format!("{} of {group}", resource.kind),
    }
}

fn is(resource: &ApiResource, kind: &WatchedKind) -> bool {
    resource.group == kind.group && resource.kind == kind.kind
}

/// Returns the kinds that the cluster serves, each in its most stable version.
async fn served(client: &Client, kinds: &[WatchedKind]) -> Result<Vec<ApiResource>, kube::Error> {
    let mut groups: Vec<&str> = kinds.iter().map(|kind| kind.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let discovery = Discovery::new(client.clone()).filter(&groups).run().await?;
    let resources = discovery.groups().flat_map(kube::discovery::ApiGroup::resources_by_stability);
    let wanted = resources.filter(|(resource, _)| kinds.iter().any(|kind| is(resource, kind)));
    Ok(wanted.map(|(resource, _)| resource).collect())
}

/// Looks for kinds that the cluster does not serve, group by group, and watches those that it serves.
async fn follow_missing(
    client: Client,
    mut absent: Vec<Missing>,
    receivers: Receivers,
    mut missing: mpsc::UnboundedReceiver<Missing>,
) {
    let mut failures = Failures::default();
    while !receivers.events.is_closed() {
        tokio::time::sleep(MISSING_INTERVAL).await;
        while let Ok(kind) = missing.try_recv() {
            absent.push(kind);
        }
        let mut by_group: BTreeMap<&str, Vec<Missing>> = BTreeMap::new();
        for kind in absent.drain(..) {
            by_group.entry(kind.0.group).or_default().push(kind);
        }
        for (group, kinds) in by_group {
            let names: Vec<WatchedKind> = kinds.iter().map(|(kind, _)| *kind).collect();
            let found = match timeout(DISCOVERY_TIMEOUT, served(&client, &names)).await {
                Ok(Ok(found)) => found,
                Ok(Err(error)) => {
                    failures.report(|| {
                        warn!(%error, "kinds of {group:?} cannot be looked for; it is tried again");
                    });
                    absent.extend(kinds);
                    continue;
                }
                Err(_) => {
                    failures.report(|| {
                        warn!("kinds of {group:?} were not found within {DISCOVERY_TIMEOUT:?}; it is tried again");
                    });
                    absent.extend(kinds);
                    continue;
                }
            };
            for (kind, known) in kinds {
                let Some(resource) = found.iter().find(|one| is(one, &kind)).cloned() else {
                    // Without its definition a kind has no objects.
                    for path in known.into_keys() {
                        let _ = receivers.events.send(deleted(receivers.layer, path)).await;
                    }
                    absent.push((kind, HashMap::new()));
                    continue;
                };
                info!(kind = name_of(&resource), "the cluster serves a further kind");
                let watch = Watch::new(resource, kind, receivers.clone());
                tokio::spawn(watch.run(client.clone(), known, false));
            }
        }
    }
}

/// Limits messages about failures.
#[derive(Default)]
pub(crate) struct Failures(Option<Instant>);

impl Failures {
    pub(crate) fn report(&mut self, say: impl FnOnce()) {
        if self.0.is_none_or(|last| last.elapsed() >= FAILURE_INTERVAL) {
            self.0 = Some(Instant::now());
            say();
        }
    }
}

/// The watch of a kind.
struct Watch {
    resource: Arc<ApiResource>,
    kind: WatchedKind,
    receivers: Receivers,
    hashes: RandomState,
}

impl Watch {
    fn new(resource: ApiResource, kind: WatchedKind, receivers: Receivers) -> Self {
        Self { resource: Arc::new(resource), kind, receivers, hashes: RandomState::new() }
    }

    /// Follows the objects of the kind until nobody receives the events, or until the cluster no longer serves the
    /// version. `is_start`: the start of the control plane waits for the first list.
    async fn run(self, client: Client, mut known: KnownObjects, is_start: bool) {
        let api: Api<DynamicObject> = Api::all_with(client, &*self.resource);
        let mut config = watcher::Config::default().page_size(PAGE);
        if self.resource.kind == "Secret" {
            // Helm's releases are large, and no certificates.
            config = config.fields("type!=helm.sh/release.v1");
        }
        let mut stream = pin!(watcher(api, config).default_backoff());
        let (mut listed, mut failures) = (HashSet::new(), Failures::default());
        let (kind, mut is_listed) = (name_of(&self.resource), false);
        while let Some(event) = stream.next().await {
            let sent = match event {
                Ok(watcher::Event::Init) => {
                    listed.clear();
                    continue;
                }
                Ok(watcher::Event::InitApply(object)) => {
                    listed.insert(path_of(&self.resource, &object));
                    self.apply(object, &mut known).await
                }
                Ok(watcher::Event::InitDone) => {
                    is_listed = true;
                    let gone: Vec<String> =
                        known.keys().filter(|path| !listed.contains(*path)).cloned().collect();
                    listed = HashSet::new();
                    for path in gone {
                        let _ = self.delete(path, &mut known).await;
                    }
                    self.send(Event::Listed(kind.clone())).await
                }
                Ok(watcher::Event::Apply(object)) => self.apply(object, &mut known).await,
                Ok(watcher::Event::Delete(object)) => {
                    self.delete(path_of(&self.resource, &object), &mut known).await
                }
                Err(error) => match code_of(&error) {
                    Some(403) if is_start && !is_listed => {
                        self.send(Event::Forbidden(kind.clone(), error.to_string())).await
                    }
                    Some(404) => {
                        warn!(%error, "the cluster no longer serves {kind}, or this version of it; it is looked for");
                        let _ = self.receivers.lost.send((self.kind, known));
                        let _ = self.send(Event::Listed(kind)).await;
                        return;
                    }
                    _ => {
                        let effect = if is_listed {
                            "its objects stay in effect"
                        } else {
                            "its objects are not known"
                        };
                        failures.report(
                            || warn!(%error, "the watch of {kind} failed and is tried again; {effect}"),
                        );
                        continue;
                    }
                },
            };
            if sent.is_err() {
                return;
            }
        }
    }

    async fn send(&self, event: Event) -> Result<(), Ended> {
        self.receivers.events.send(event).await.map_err(|_| Ended)
    }

    /// Sends the state of an object, unless it is known.
    async fn apply(&self, mut object: DynamicObject, known: &mut KnownObjects) -> Result<(), Ended> {
        let path = path_of(&self.resource, &object);
        // The server increases it with each change, also with those of fields that have no effect.
        let version = object.metadata.resource_version.clone().unwrap_or_default();
        let before = known.get(&path);
        if before.is_some_and(|known| known.version == version) {
            return Ok(());
        }
        if status::is_written(&self.resource) {
            let Receivers { statuses, .. } = &self.receivers;
            statuses.observe(self.object_of(&path), &object, &self.resource, true);
            object.data.as_object_mut().map(|fields| fields.remove("status"));
        }
        object.metadata.resource_version = None;
        // Items of a list have no type.
        object.types.get_or_insert_with(|| kube::api::TypeMeta {
            api_version: self.resource.api_version.clone(),
            kind: self.resource.kind.clone(),
        });
        object.metadata.managed_fields = None;
        object.metadata.annotations.as_mut().map(|annotations| annotations.remove(LAST_APPLIED));
        let (state, text) = match serde_json::to_string(&object) {
            Ok(text) => {
                let hash = self.hashes.hash_one(&text);
                (FileState::Text(printable(text)), hash)
            }
            Err(error) => (FileState::Unreadable(error.to_string()), 0),
        };
        let is_equal = before.is_some_and(|known| known.text == text);
        known.insert(path.clone(), KnownObject { version, text });
        if is_equal {
            return Ok(());
        }
        self.send(Event::Change(FileChange { layer: self.receivers.layer, path, state })).await
    }

    /// Sends the end of an object.
    async fn delete(&self, path: String, known: &mut KnownObjects) -> Result<(), Ended> {
        known.remove(&path);
        if status::is_written(&self.resource) {
            self.receivers.statuses.forget(&self.object_of(&path));
        }
        self.send(deleted(self.receivers.layer, path)).await
    }

    /// Returns the object of a path.
    fn object_of(&self, path: &str) -> ClusterObject {
        let mut parts = path.rsplit('/');
        let (name, namespace) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        ClusterObject {
            group: self.resource.group.clone(),
            kind: self.resource.kind.clone(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }
}

/// Returns the path of an object. The namespace is empty for kinds of the cluster.
fn path_of(resource: &ApiResource, object: &DynamicObject) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let (namespace, name) = (of(&object.metadata.namespace), of(&object.metadata.name));
    let ApiResource { plural, group, .. } = resource;
    let dot = if group.is_empty() { "" } else { "." };
    format!("kubernetes/{plural}{dot}{group}/{namespace}/{name}")
}

/// Nobody receives the events any longer.
struct Ended;

/// Returns the status of a response that failed a watch.
fn code_of(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status.code),
        watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}

fn deleted(layer: usize, path: String) -> Event {
    Event::Change(FileChange { layer, path, state: FileState::Deleted })
}

/// Escapes the characters of a text in JSON that YAML does not permit in texts. JSON has them within strings only.
fn printable(text: String) -> String {
    let is_refused = |c: char| {
        matches!(c, '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
    };
    if !text.contains(is_refused) {
        return text;
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_refused(c) {
            escaped.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use kube::core::GroupVersionKind;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn kinds_of_one_name_have_different_files() {
        let path = |group: &'static str| {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", "Gateway"));
            let object = json!({"metadata": {"namespace": "shop", "name": "edge"}});
            path_of(&resource, &serde_json::from_value(object).unwrap())
        };
        assert_eq!(path("networking.istio.io"), "kubernetes/gateways.networking.istio.io/shop/edge");
        assert_eq!(path(""), "kubernetes/gateways/shop/edge");
    }

    #[test]
    fn texts_of_objects_are_yaml_whatever_characters_they_have() {
        let every = (0..=0x2_00ff).filter_map(char::from_u32);
        let object = json!({"a": every.collect::<String>()});
        let text = printable(object.to_string());
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), object, "the same JSON");
        let document = skysail_yaml::documents(&text).next().unwrap();
        assert_eq!(document.root.unwrap().to_json(), object);
    }
}
