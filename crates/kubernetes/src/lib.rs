//! Watches the objects of a Kubernetes cluster.
//!
//! Each object is a file of its own, `kubernetes/KIND/NAMESPACE/NAME`, whose text is the object in JSON. So what holds
//! for files holds for objects too: an object that is refused keeps its last valid version, and messages name it.
//!
//! Each kind has a watch of its own. A watch that ends is resumed, or begins again with a list; objects that are not in
//! the list were deleted meanwhile. While the API server is away, the objects known so far stay in effect. Kinds whose
//! definitions the cluster does not have yet are looked for at intervals.

use std::{collections::HashSet, path::Path, pin::pin, time::Duration};

use futures_util::StreamExt as _;
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject},
    config::{KubeConfigOptions, Kubeconfig},
    discovery::Discovery,
    runtime::{WatchStreamExt as _, watcher},
};
use skysail_source::{FileChange, FileState};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tracing::{info, warn};

/// Time without events that ends a burst of changes, and the longest burst.
const SETTLE: Duration = Duration::from_millis(5);
const MAX_BURST: Duration = Duration::from_millis(100);
/// Number of events that wait for the control plane. Beyond it the watches wait.
const WAITING: usize = 4096;
/// Interval at which kinds that the cluster does not have are looked for.
const MISSING_INTERVAL: Duration = Duration::from_secs(10);
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

/// Error of a connection to a cluster.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig cannot be read.
    #[error("the kubeconfig cannot be used: {0}")]
    Kubeconfig(#[from] kube::config::KubeconfigError),
    /// Neither a kubeconfig nor a service account of a pod was found.
    #[error("no kubeconfig and no service account of a pod: {0}; set --kubeconfig or KUBECONFIG")]
    Infer(#[from] kube::config::InferConfigError),
    /// The API server cannot be reached, or refuses the credential.
    #[error("the API server at {server}: {cause}")]
    Server {
        /// Address of the API server.
        server: String,
        /// Reason.
        #[source]
        cause: kube::Error,
    },
    /// The credential does not permit to list a kind.
    #[error("{kind} cannot be listed: {cause}; permit the service account to list and watch it")]
    Forbidden {
        /// Kind.
        kind: String,
        /// Reason.
        cause: String,
    },
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
    unlisted: HashSet<String>,
}

impl Cluster {
    /// Connects to a cluster and starts the watches. Changes have this layer. Without a kubeconfig, the variable
    /// `KUBECONFIG`, the user's kubeconfig or the service account of the pod applies.
    ///
    /// # Errors
    /// The kubeconfig is unusable, or the API server does not answer.
    pub async fn connect(
        kubeconfig: Option<&Path>,
        kinds: &[WatchedKind],
        layer: usize,
    ) -> Result<Self, ConnectError> {
        let config = match kubeconfig {
            Some(file) => {
                let options = KubeConfigOptions::default();
                Config::from_custom_kubeconfig(Kubeconfig::read_from(file)?, &options).await?
            }
            None => Config::infer().await?,
        };
        let server = config.cluster_url.to_string();
        let failed = |cause| ConnectError::Server { server: server.clone(), cause };
        let client = Client::try_from(config).map_err(failed)?;
        let served = served(&client, kinds).await.map_err(failed)?;
        info!(server, kinds = served.len(), "watching a cluster");
        let (sender, events) = mpsc::channel(WAITING);
        let missing: Vec<WatchedKind> =
            kinds.iter().filter(|kind| !served.iter().any(|one| is(one, kind))).copied().collect();
        let unlisted = served.iter().map(name_of).collect();
        for resource in served {
            tokio::spawn(follow(client.clone(), resource, layer, sender.clone()));
        }
        tokio::spawn(follow_missing(client, missing, layer, sender));
        Ok(Self { events, unlisted })
    }

    /// Returns the objects of all kinds that the cluster had at the start. Waits while the API server is away.
    ///
    /// # Errors
    /// A kind may not be listed.
    pub async fn initial(&mut self) -> Result<Vec<FileChange>, ConnectError> {
        let mut changes = Vec::new();
        while !self.unlisted.is_empty()
            && let Some(event) = self.events.recv().await
        {
            match event {
                Event::Change(change) => changes.push(change),
                Event::Listed(kind) => _ = self.unlisted.remove(&kind),
                Event::Forbidden(kind, cause) => return Err(ConnectError::Forbidden { kind, cause }),
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

/// Returns the kinds that the cluster serves, each in its preferred version.
async fn served(client: &Client, kinds: &[WatchedKind]) -> Result<Vec<ApiResource>, kube::Error> {
    let mut groups: Vec<&str> = kinds.iter().map(|kind| kind.group).collect();
    groups.sort_unstable();
    groups.dedup();
    let discovery = Discovery::new(client.clone()).filter(&groups).run().await?;
    let resources = discovery.groups().flat_map(kube::discovery::ApiGroup::resources_by_stability);
    let wanted = resources.filter(|(resource, _)| kinds.iter().any(|kind| is(resource, kind)));
    Ok(wanted.map(|(resource, _)| resource).collect())
}

/// Looks for kinds until the cluster has all of them.
async fn follow_missing(
    client: Client,
    mut missing: Vec<WatchedKind>,
    layer: usize,
    events: mpsc::Sender<Event>,
) {
    while !missing.is_empty() && !events.is_closed() {
        tokio::time::sleep(MISSING_INTERVAL).await;
        // The watches report that the API server is away.
        let Ok(found) = served(&client, &missing).await else { continue };
        missing.retain(|kind| !found.iter().any(|one| is(one, kind)));
        for resource in found {
            info!(kind = resource.kind, group = resource.group, "the cluster has a further kind");
            tokio::spawn(follow(client.clone(), resource, layer, events.clone()));
        }
    }
}

/// Follows the objects of a kind until nobody receives the events.
async fn follow(client: Client, resource: ApiResource, layer: usize, events: mpsc::Sender<Event>) {
    let api: Api<DynamicObject> = Api::all_with(client, &resource);
    let config = watcher::Config::default().page_size(PAGE);
    let mut stream = pin!(watcher(api, config).default_backoff());
    let (mut known, mut listed) = (HashSet::new(), HashSet::new());
    let mut last_failure: Option<Instant> = None;
    while let Some(event) = stream.next().await {
        let sent = match event {
            Ok(watcher::Event::Init) => {
                listed.clear();
                continue;
            }
            Ok(watcher::Event::InitApply(object)) => {
                let path = path_of(&resource, &object);
                listed.insert(path.clone());
                known.insert(path.clone());
                events.send(changed(layer, path, &resource, object)).await
            }
            Ok(watcher::Event::InitDone) => {
                last_failure = None;
                let gone: Vec<String> = known.difference(&listed).cloned().collect();
                let mut sent = Ok(());
                for path in gone {
                    known.remove(&path);
                    sent = events.send(deleted(layer, path)).await;
                }
                listed = HashSet::new();
                if sent.is_ok() { events.send(Event::Listed(name_of(&resource))).await } else { sent }
            }
            Ok(watcher::Event::Apply(object)) => {
                let path = path_of(&resource, &object);
                known.insert(path.clone());
                events.send(changed(layer, path, &resource, object)).await
            }
            Ok(watcher::Event::Delete(object)) => {
                let path = path_of(&resource, &object);
                known.remove(&path);
                events.send(deleted(layer, path)).await
            }
            Err(watcher::Error::InitialListFailed(kube::Error::Api(status))) if status.code == 403 => {
                events.send(Event::Forbidden(name_of(&resource), status.message.clone())).await
            }
            Err(error) => {
                if last_failure.is_none_or(|last| last.elapsed() >= FAILURE_INTERVAL) {
                    last_failure = Some(Instant::now());
                    let kind = name_of(&resource);
                    warn!(%error, "the watch of {kind} failed and is tried again; its objects stay in effect");
                }
                continue;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Returns the path of an object. The namespace is empty for kinds of the cluster.
fn path_of(resource: &ApiResource, object: &DynamicObject) -> String {
    let of = |text: &Option<String>| text.clone().unwrap_or_default();
    let (namespace, name) = (of(&object.metadata.namespace), of(&object.metadata.name));
    format!("kubernetes/{}/{namespace}/{name}", resource.kind)
}

fn deleted(layer: usize, path: String) -> Event {
    Event::Change(FileChange { layer, path, state: FileState::Deleted })
}

fn changed(layer: usize, path: String, resource: &ApiResource, mut object: DynamicObject) -> Event {
    // Items of a list have no type.
    object.types.get_or_insert_with(|| kube::api::TypeMeta {
        api_version: resource.api_version.clone(),
        kind: resource.kind.clone(),
    });
    object.metadata.managed_fields = None;
    let state = match serde_json::to_string(&object) {
        Ok(text) => FileState::Text(text),
        Err(error) => FileState::Unreadable(error.to_string()),
    };
    Event::Change(FileChange { layer, path, state })
}
