//! Objects of the mesh in a Kubernetes cluster. A thread makes the requests, so that the sidecars go on meanwhile.

use std::{
    collections::{BTreeSet, HashMap},
    future::Future,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use kube::{
    Api, Client, Config,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, Preconditions},
    config::{KubeConfigOptions, Kubeconfig},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use skysail_core::stdio;
use tokio::sync::{mpsc, oneshot};

/// Field manager of the objects, and label of their namespaces.
const OWNER: &str = "skysail-bench";
/// Number of requests at a time.
const AT_ONCE: usize = 32;
/// Timeout of a request that is tried again, and interval between two tries.
const TIMEOUT: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(200);
/// Timeout of the removal of the namespaces of an earlier run.
const REMOVAL: Duration = Duration::from_secs(300);

/// The objects in the cluster. Errors of [`Cluster::put`] are returned by [`Cluster::finish`].
pub(crate) struct Cluster {
    requests: mpsc::UnboundedSender<ClusterRequest>,
    failure: Arc<Mutex<Option<anyhow::Error>>>,
}

enum ClusterRequest {
    /// Objects of a file, which replace those that it had.
    Put {
        file: String,
        objects: Vec<Value>,
    },
    Finish(oneshot::Sender<()>),
    /// Deletes the namespaces, and with them all objects.
    End(oneshot::Sender<()>),
    Load(oneshot::Sender<anyhow::Result<ApiServerLoad>>),
}

/// Load of the API server.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub(crate) struct ApiServerLoad {
    /// CPU time since its start, or over a time.
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_mb: f64,
}

impl ApiServerLoad {
    /// Returns the load after an earlier moment.
    pub(crate) fn since(self, before: Self) -> Self {
        Self { cpu_seconds: self.cpu_seconds - before.cpu_seconds, ..self }
    }
}

/// Key of an object: API version, kind, namespace and name.
type Key = [String; 4];

impl Cluster {
    /// Connects, and removes the namespaces of an earlier run.
    ///
    /// # Errors
    /// A namespace of one of the names exists, and is not of an earlier run.
    pub(crate) fn connect(kubeconfig: &Path, namespaces: BTreeSet<String>) -> anyhow::Result<Self> {
        let kubeconfig = Kubeconfig::read_from(kubeconfig)
            .with_context(|| format!("{} is no kubeconfig", kubeconfig.display()))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (requests, received) = mpsc::unbounded_channel();
        let failure: Arc<Mutex<Option<anyhow::Error>>> = Arc::default();
        let (begun, connected) = oneshot::channel();
        let failed = Arc::clone(&failure);
        let run = move || {
            runtime.block_on(async {
                match ClusterWriter::open(kubeconfig, namespaces).await {
                    Ok(connection) => {
                        _ = begun.send(Ok(()));
                        connection.serve(received, &failed).await;
                    }
                    Err(error) => _ = begun.send(Err(error)),
                }
            });
        };
        std::thread::Builder::new().name("kubernetes".into()).spawn(run)?;
        waited(connected)??;
        Ok(Self { requests, failure })
    }

    /// Begins to replace the objects of a file.
    pub(super) fn put(&self, file: &str, objects: Vec<Value>) -> anyhow::Result<()> {
        self.send(ClusterRequest::Put { file: file.to_owned(), objects })
    }

    /// Waits until all objects are written.
    ///
    /// # Errors
    /// One of them could not be written.
    pub(crate) fn finish(&self) -> anyhow::Result<()> {
        self.ask(ClusterRequest::Finish)?;
        self.failure()
    }

    fn failure(&self) -> anyhow::Result<()> {
        match self.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Deletes all objects. The cluster removes them later.
    pub(crate) fn end(&self) -> anyhow::Result<()> {
        self.ask(ClusterRequest::End)?;
        self.failure()
    }

    /// Returns the load of the API server.
    pub(crate) fn load(&self) -> anyhow::Result<ApiServerLoad> {
        self.ask(ClusterRequest::Load)?
    }

    fn ask<T: Send>(&self, request: impl FnOnce(oneshot::Sender<T>) -> ClusterRequest) -> anyhow::Result<T> {
        let (answer, answered) = oneshot::channel();
        self.send(request(answer))?;
        waited(answered)
    }

    fn send(&self, request: ClusterRequest) -> anyhow::Result<()> {
        self.requests.send(request).ok().context("the thread of the cluster has ended")
    }
}

/// Waits for an answer. The caller runs within a runtime, where a thread may not block on a channel.
fn waited<T: Send>(answer: oneshot::Receiver<T>) -> anyhow::Result<T> {
    let waits = std::thread::scope(|scope| scope.spawn(|| answer.blocking_recv()).join());
    waits.ok().and_then(Result::ok).context("the thread of the cluster has ended")
}

/// The thread's part.
struct ClusterWriter {
    client: Client,
    namespaces: BTreeSet<String>,
    /// Keys of the objects of each file.
    files: HashMap<String, BTreeSet<Key>>,
}

impl ClusterWriter {
    async fn open(kubeconfig: Kubeconfig, namespaces: BTreeSet<String>) -> anyhow::Result<Self> {
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let server = config.cluster_url.to_string();
        let connection = Self { client: Client::try_from(config)?, namespaces, files: HashMap::new() };
        let api = connection.namespace_api();
        let existing = api.list(&ListParams::default()).await;
        let existing = existing.with_context(|| format!("the API server at {server}"))?;
        let mut former = 0;
        for namespace in existing {
            let name = namespace.metadata.name.unwrap_or_default();
            if connection.namespaces.contains(&name) {
                let is_own = namespace.metadata.labels.unwrap_or_default().contains_key(OWNER);
                ensure!(
                    is_own,
                    "the cluster has a namespace {name}, which this benchmark would delete: use a cluster without it"
                );
                former += 1;
            }
        }
        if former > 0 {
            stdio::print_error(format_args!("removing {former} namespaces of an earlier run"));
            connection.end().await?;
            let deadline = Instant::now() + REMOVAL;
            let own = ListParams::default().labels(OWNER);
            let is_own = |name: &Option<String>| {
                name.as_ref().is_some_and(|name| connection.namespaces.contains(name))
            };
            while api.list_metadata(&own).await?.items.iter().any(|of| is_own(&of.metadata.name)) {
                ensure!(
                    Instant::now() < deadline,
                    "the namespaces of an earlier run are not removed in time"
                );
                tokio::time::sleep(RETRY).await;
            }
        }
        Ok(connection)
    }

    fn namespace_api(&self) -> Api<DynamicObject> {
        Api::all_with(
            self.client.clone(),
            &ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Namespace")),
        )
    }

    async fn serve(
        mut self,
        mut requests: mpsc::UnboundedReceiver<ClusterRequest>,
        failure: &Mutex<Option<anyhow::Error>>,
    ) {
        let note = |result: anyhow::Result<()>| {
            if let Err(error) = result {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        };
        while let Some(request) = requests.recv().await {
            // The other side has left if it does not receive an answer.
            match request {
                ClusterRequest::Put { file, objects } => {
                    note(self.put(&file, objects).await.with_context(|| format!("objects of {file}")));
                }
                ClusterRequest::Finish(answer) => _ = answer.send(()),
                ClusterRequest::End(answer) => {
                    note(self.end().await);
                    _ = answer.send(());
                }
                ClusterRequest::Load(answer) => _ = answer.send(self.load().await),
            }
        }
    }

    async fn put(&mut self, file: &str, objects: Vec<Value>) -> anyhow::Result<()> {
        let keys: BTreeSet<Key> = objects.iter().map(key).collect::<Result<_, _>>()?;
        let former = self.files.insert(file.to_owned(), keys.clone()).unwrap_or_default();
        let this = &*self;
        let writes = objects.into_iter().map(|object| this.write(object));
        stream::iter(writes).buffer_unordered(AT_ONCE).try_collect::<()>().await?;
        for key in former.difference(&keys) {
            self.api(key)?.delete(&key[3], &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// Returns the objects of a kind in a namespace.
    fn api(&self, [version, kind, namespace, _]: &Key) -> anyhow::Result<Api<DynamicObject>> {
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        Ok(match namespace.as_str() {
            "" => Api::all_with(self.client.clone(), &resource),
            namespace => Api::namespaced_with(self.client.clone(), namespace, &resource),
        })
    }

    /// Writes an object, and its status in a further request.
    async fn write(&self, mut object: Value) -> anyhow::Result<()> {
        let key = key(&object)?;
        let api = self.api(&key)?;
        let status = object.as_object_mut().and_then(|fields| fields.remove("status"));
        let object = Patch::Apply(in_cluster(object));
        let apply = PatchParams::apply(OWNER).force();
        let name = &key[3];
        let written = again(|| api.patch(name, &apply, &object)).await;
        written.with_context(|| format!("{} {}/{name}", key[1], key[2]))?;
        if let Some(status) = status {
            let patch = Patch::Merge(json!({"status": status}));
            let merge = PatchParams::default();
            let written = again(|| api.patch_status(name, &merge, &patch)).await;
            written.with_context(|| format!("status of {} {}/{name}", key[1], key[2]))?;
        }
        Ok(())
    }

    async fn end(&self) -> anyhow::Result<()> {
        let api = self.namespace_api();
        let own = api.list_metadata(&ListParams::default().labels(OWNER)).await?;
        let is_own = |name: &Option<String>| name.as_ref().is_some_and(|name| self.namespaces.contains(name));
        let own = own.items.into_iter().filter(|namespace| is_own(&namespace.metadata.name));
        let removals = own.map(|namespace| {
            let (api, name, uid) =
                (&api, namespace.metadata.name.unwrap_or_default(), namespace.metadata.uid);
            async move {
                let same = Preconditions { uid, resource_version: None };
                let parameters = DeleteParams { preconditions: Some(same), ..DeleteParams::background() };
                match api.delete(&name, &parameters).await {
                    // It is being removed already.
                    Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
                    other => other.map(drop),
                }
            }
        });
        Ok(stream::iter(removals).buffer_unordered(AT_ONCE).try_collect::<()>().await?)
    }

    async fn load(&self) -> anyhow::Result<ApiServerLoad> {
        let request = http::Request::get("/metrics").body(Vec::new())?;
        let text = self.client.request_text(request).await?;
        let value = |name: &str| -> anyhow::Result<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            Ok(line.with_context(|| format!("the API server has no metric {name}"))?.parse()?)
        };
        Ok(ApiServerLoad {
            cpu_seconds: value("process_cpu_seconds_total")?,
            resident_mb: value("process_resident_memory_bytes")? / f64::from(1 << 20),
        })
    }
}

/// Makes a request again while the cluster does not accept it yet: a namespace has no service account at first.
async fn again<T, F: Future<Output = kube::Result<T>>>(request: impl Fn() -> F) -> kube::Result<T> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match request().await {
            Err(kube::Error::Api(status)) if is_transient(&status) && Instant::now() < deadline => {
                tokio::time::sleep(RETRY).await;
            }
            other => return other,
        }
    }
}

fn is_transient(status: &kube::core::Status) -> bool {
    match status.code {
        403 => status.message.contains("serviceaccount") || status.message.contains("service account"),
        code => matches!(code, 409 | 429 | 500..),
    }
}

fn key(object: &Value) -> anyhow::Result<Key> {
    let text = |at: &str| object.pointer(at).and_then(Value::as_str).unwrap_or_default().to_owned();
    let key = [text("/apiVersion"), text("/kind"), text("/metadata/namespace"), text("/metadata/name")];
    ensure!(
        !key[0].is_empty() && !key[1].is_empty() && !key[3].is_empty(),
        "an object without a type or name"
    );
    Ok(key)
}

/// Returns an object as a cluster accepts it without the workloads: the cluster chooses the addresses of Services, no
/// controller makes endpoints, and no node runs the pods.
fn in_cluster(mut object: Value) -> Value {
    match object["kind"].as_str() {
        Some("Service") => {
            if let Some(spec) = object["spec"].as_object_mut() {
                spec.remove("clusterIP");
                spec.remove("selector");
            }
        }
        Some("Pod") => {
            if let Some(spec) = object["spec"].as_object_mut() {
                spec.remove("nodeName");
                spec.insert("schedulerName".into(), OWNER.into());
                spec.insert("automountServiceAccountToken".into(), false.into());
            }
        }
        Some("Namespace") => object["metadata"]["labels"][OWNER] = "control".into(),
        _ => {}
    }
    object
}
