//! Objects of the control plane: those that belong to an object of a user, which the garbage collection of the cluster
//! deletes with their owner, and those of the whole cluster.

use std::time::Duration;

use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{ApiServer, ClusterObject, FIELD_MANAGER};

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Error of an application.
#[derive(Debug, thiserror::Error)]
pub enum OwnedError {
    /// An object of this name exists that belongs to others.
    #[error("{kind} {name} exists and does not belong to {owner}; delete it, or rename one of them")]
    Foreign {
        /// Kind.
        kind: String,
        /// Name.
        name: String,
        /// Owner that it should have.
        owner: String,
    },
    /// The API server refuses it or does not answer.
    #[error("{kind} {name}: {cause}")]
    Refused {
        /// Kind.
        kind: String,
        /// Name.
        name: String,
        /// Reason.
        cause: String,
    },
}

/// Object that owns others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectOwner {
    /// API version, such as `apps/v1`.
    pub version: String,
    /// The object.
    pub object: ClusterObject,
    /// `metadata.uid`.
    pub uid: String,
}

impl ApiServer {
    /// Creates an object of the whole cluster, unless it exists. `object` has `apiVersion`, `kind` and a name. Returns
    /// false if it exists, or if the cluster does not know the kind.
    ///
    /// # Errors
    /// The API server refuses the request or does not answer.
    pub async fn create_missing(&self, object: &Value) -> Result<bool, OwnedError> {
        let (kind, name, resource) = parts(object);
        let refused = |cause: String| OwnedError::Refused { kind: kind.clone(), name: name.clone(), cause };
        let object = serde_json::from_value(object.clone()).map_err(|error| refused(error.to_string()))?;
        let api: Api<DynamicObject> = Api::all_with(self.client(), &resource);
        let parameters =
            PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match timeout(TIMEOUT, api.create(&parameters, &object)).await {
            Ok(Ok(_)) => Ok(true),
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(false),
            Ok(Err(error)) => Err(refused(error.to_string())),
            Err(_) => Err(refused(format!("no answer within {TIMEOUT:?}"))),
        }
    }

    /// Creates or changes an object in the namespace of its owner (server-side apply). `object` has `apiVersion`, `kind` and
    /// a name, and none of the user's fields.
    ///
    /// # Errors
    /// An object of the name belongs to others, or the API server refuses the request.
    pub async fn apply_owned(&self, owner: &ObjectOwner, object: &Value) -> Result<(), OwnedError> {
        let (kind, name, resource) = parts(object);
        let refused = |cause: String| OwnedError::Refused { kind: kind.clone(), name: name.clone(), cause };
        let namespace = &owner.object.namespace;
        let api: Api<DynamicObject> = Api::namespaced_with(self.client(), namespace, &resource);
        let work = async {
            let existing = api.get_metadata_opt(&name).await.map_err(|error| refused(error.to_string()))?;
            if let Some(existing) = existing
                && existing.metadata.owner_references.iter().flatten().all(|of| of.uid != owner.uid)
            {
                let ClusterObject { kind: of, name: by, .. } = &owner.object;
                let owner = format!("{of} {namespace}/{by}");
                return Err(OwnedError::Foreign { kind: kind.clone(), name: name.clone(), owner });
            }
            let mut object = object.clone();
            object["metadata"]["namespace"] = namespace.as_str().into();
            object["metadata"]["ownerReferences"] = json!([{
                "apiVersion": owner.version, "kind": owner.object.kind, "name": owner.object.name, "uid": owner.uid,
                "controller": true,
            }]);
            // The owner's fields win over changes by hand.
            let parameters = PatchParams::apply(FIELD_MANAGER).force();
            api.patch(&name, &parameters, &Patch::Apply(&object))
                .await
                .map_err(|error| refused(error.to_string()))?;
            Ok(())
        };
        timeout(TIMEOUT, work).await.unwrap_or_else(|_| Err(refused(format!("no answer within {TIMEOUT:?}"))))
    }
}

/// Returns kind, name and resource of an object.
fn parts(object: &Value) -> (String, String, ApiResource) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
    let version = text(&object["apiVersion"]);
    let (group, version) = version.split_once('/').unwrap_or(("", &version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
    (kind, name, resource)
}
