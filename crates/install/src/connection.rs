//! Requests to the API server.

use std::{error::Error as _, path::Path, time::Duration};

use anyhow::{Context as _, anyhow};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, DynamicObject, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::Value;

use crate::object::Object;

/// Name of this program as the owner of fields.
const FIELD_MANAGER: &str = "skysail";
/// Timeout of a response.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Connection to an API server.
#[derive(Clone)]
pub struct Connection {
    client: Client,
    /// Its address, for messages.
    address: String,
}

/// What an application of an object does besides.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ApplyMode {
    /// The API server checks everything and changes nothing.
    pub(crate) dry_run: bool,
    /// Fields of other owners are taken over.
    pub(crate) force: bool,
}

impl Connection {
    /// Prepares a connection with a kubeconfig and one of its contexts. Without a kubeconfig, the first of these applies:
    /// that of the variable `KUBECONFIG`, the user's, the service account of the pod.
    ///
    /// # Errors
    /// The kubeconfig or the context is unusable.
    pub async fn new(kubeconfig: Option<&Path>, context: Option<&str>) -> anyhow::Result<Self> {
        let options = KubeConfigOptions { context: context.map(str::to_owned), ..Default::default() };
        let remedy = "no cluster is known; set --kubeconfig, --context or KUBECONFIG";
        let mut config = match kubeconfig {
            Some(file) => {
                let read = Kubeconfig::read_from(file).context(remedy)?;
                Config::from_custom_kubeconfig(read, &options).await.context(remedy)?
            }
            // An unusable kubeconfig is an error, and does not lead to another cluster.
            None if context.is_some() || std::env::var_os("KUBECONFIG").is_some() => {
                Config::from_kubeconfig(&options).await.context(remedy)?
            }
            None => Config::infer().await.context(remedy)?,
        };
        config.read_timeout = Some(TIMEOUT);
        let address = config.cluster_url.to_string();
        let client = Client::try_from(config).with_context(|| format!("the API server at {address}"))?;
        Ok(Self { client, address })
    }

    /// Returns the client for requests.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Returns the address of the API server.
    pub fn address(&self) -> &str {
        &self.address
    }

    fn api(&self, object: &Object) -> Api<DynamicObject> {
        let resource = object.kind.resource();
        match &object.namespace {
            Some(namespace) => Api::namespaced_with(self.client(), namespace, &resource),
            None => Api::all_with(self.client(), &resource),
        }
    }

    /// Returns an object as it is in the cluster, if it exists.
    pub(crate) async fn get(&self, object: &Object) -> Result<Option<Value>, kube::Error> {
        let found = self.api(object).get_opt(&object.name).await?;
        found.map(|found| serde_json::to_value(found).map_err(kube::Error::SerdeError)).transpose()
    }

    /// Applies an object (server-side apply) and returns it. A field that Kubernetes does not know is an error.
    pub(crate) async fn apply(&self, object: &Object, mode: ApplyMode) -> Result<Value, kube::Error> {
        let parameters =
            PatchParams { dry_run: mode.dry_run, force: mode.force, ..PatchParams::apply(FIELD_MANAGER) };
        let patch = Patch::Apply(object.value());
        let applied = self.api(object).patch(&object.name, &parameters.validation_strict(), &patch).await?;
        serde_json::to_value(applied).map_err(kube::Error::SerdeError)
    }

    /// Deletes an object. Returns false if it does not exist.
    pub(crate) async fn delete(&self, object: &Object) -> Result<bool, kube::Error> {
        // The pods of a Deployment end before it does.
        match self.api(object).delete(&object.name, &DeleteParams::foreground()).await {
            Ok(_) => Ok(true),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Returns whether an object, or its namespace, does not exist.
pub(crate) fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// The API server does not permit a request.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Denied(String);

/// Returns an error with a message for users: that of the API server, or the causes one after the other.
pub(crate) fn readable(error: kube::Error) -> anyhow::Error {
    if let kube::Error::Api(status) = error {
        if matches!(status.code, 401 | 403) {
            return Denied(status.message.clone()).into();
        }
        return anyhow!("{}", status.message);
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let message = next.to_string();
        if !text.contains(&message) {
            text = format!("{text}: {message}");
        }
        cause = next.source();
    }
    anyhow!(text)
}
