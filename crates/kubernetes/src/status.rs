//! The status of watched objects: as the cluster has it, and written anew.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};

use crate::{ApiServer, FIELD_MANAGER};

/// Timeout of a write.
const TIMEOUT: Duration = Duration::from_secs(10);
/// API groups and kinds whose status the control plane writes, and does not read. `*` stands for all kinds of a group.
const WRITTEN: [(&str, &str); 2] = [("gateway.networking.k8s.io", "*"), ("networking.k8s.io", "Ingress")];

/// An object of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClusterObject {
    /// API group, which is empty for the core group.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Namespace; empty for kinds of the cluster.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// Status of an object as the cluster has it.
#[derive(Clone, Debug)]
pub struct ObservedStatus {
    /// The status; null if there is none.
    pub status: Value,
    /// `metadata.uid` of the object.
    pub uid: String,
    version: String,
    resource: Arc<ApiResource>,
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusWrite {
    /// The cluster has the status.
    Done,
    /// The object has changed since, or is gone. What the status says may be wrong.
    Outdated,
}

/// Statuses of the watched objects that the control plane writes.
pub struct Statuses {
    server: ApiServer,
    observed: Mutex<HashMap<ClusterObject, ObservedStatus>>,
    changes: watch::Sender<()>,
}

impl Statuses {
    pub(crate) fn new(server: ApiServer) -> Arc<Self> {
        Arc::new(Self { server, observed: Mutex::default(), changes: watch::Sender::new(()) })
    }

    /// Returns a receiver of changes.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Returns the status of an object; `None` if the cluster has no such object.
    pub fn get(&self, object: &ClusterObject) -> Option<ObservedStatus> {
        self.observed().get(object).cloned()
    }

    /// Replaces the status of an object, unless the object has changed since it was observed.
    ///
    /// # Errors
    /// The API server refuses the write or does not answer.
    pub async fn write(
        &self,
        object: &ClusterObject,
        observed: &ObservedStatus,
        status: &Value,
    ) -> Result<StatusWrite, String> {
        let (client, resource) = (self.server.client(), &*observed.resource);
        let api: Api<DynamicObject> = match object.namespace.as_str() {
            "" => Api::all_with(client, resource),
            namespace => Api::namespaced_with(client, namespace, resource),
        };
        let patch = json!({ "metadata": { "resourceVersion": observed.version }, "status": status });
        let parameters =
            PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(patch);
        let write = api.patch_status(&object.name, &parameters, &patch);
        match timeout(TIMEOUT, write).await {
            Ok(Ok(written)) => {
                // The object may have been deleted meanwhile.
                if self.get(object).is_some() {
                    self.observe(object.clone(), &written, &observed.resource, false);
                }
                Ok(StatusWrite::Done)
            }
            Ok(Err(kube::Error::Api(refused))) if matches!(refused.code, 404 | 409) => {
                Ok(StatusWrite::Outdated)
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {TIMEOUT:?}")),
        }
    }

    /// Records the status of an object that was read. `is_news`: tells the receivers.
    pub(crate) fn observe(
        &self,
        object: ClusterObject,
        read: &DynamicObject,
        resource: &Arc<ApiResource>,
        is_news: bool,
    ) {
        let observed = ObservedStatus {
            status: read.data.get("status").cloned().unwrap_or_default(),
            uid: read.metadata.uid.clone().unwrap_or_default(),
            version: read.metadata.resource_version.clone().unwrap_or_default(),
            resource: Arc::clone(resource),
        };
        self.observed().insert(object, observed);
        if is_news {
            self.changes.send_replace(());
        }
    }

    pub(crate) fn forget(&self, object: &ClusterObject) {
        self.observed().remove(object);
    }

    fn observed(&self) -> MutexGuard<'_, HashMap<ClusterObject, ObservedStatus>> {
        self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the current time as it is in objects (RFC 3339), in seconds.
pub fn timestamp() -> String {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

/// Returns whether the control plane writes the status of a kind.
pub(crate) fn is_written(resource: &ApiResource) -> bool {
    WRITTEN.iter().any(|(group, kind)| *group == resource.group && (*kind == "*" || *kind == resource.kind))
}
