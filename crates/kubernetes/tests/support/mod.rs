//! A real cluster for tests.

use std::{path::PathBuf, time::Duration};

use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::ServiceAccount,
};
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tokio::time::timeout;

/// A namespace of the cluster that KUBECONFIG names.
pub(crate) struct TestCluster {
    pub(crate) file: PathBuf,
    pub(crate) client: Client,
    pub(crate) namespace: String,
}

impl TestCluster {
    /// Makes a namespace. `None`: there is no cluster.
    pub(crate) async fn start() -> Option<Self> {
        let Some(file) = std::env::var_os("KUBECONFIG").map(PathBuf::from).filter(|file| file.exists())
        else {
            eprintln!("SKIPPED: KUBECONFIG names no cluster");
            return None;
        };
        let config = Kubeconfig::read_from(&file).unwrap();
        let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
        let client = Client::try_from(config).unwrap();
        let namespace = json!({"metadata": {"generateName": "skysail-test-"}});
        let namespaces = Api::<DynamicObject>::all_with(client.clone(), &kind("", "v1", "Namespace"));
        let made = namespaces.create(&PostParams::default(), &object("v1", "Namespace", namespace)).await;
        let namespace = made.unwrap().metadata.name.unwrap();
        Some(Self { file, client, namespace })
    }

    pub(crate) fn services(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &kind("", "v1", "Service"))
    }

    /// Returns a token of the namespace's service account `default` for audiences; without one, for the API server.
    pub(crate) async fn token(&self, audiences: &[&str]) -> String {
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), &self.namespace);
        let audiences = audiences.iter().map(|one| (*one).to_owned()).collect();
        let spec = TokenRequestSpec { audiences, ..TokenRequestSpec::default() };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        // The cluster makes the service account a moment after its namespace.
        let requested = async {
            loop {
                match accounts.create_token_request("default", &PostParams::default(), &request).await {
                    Ok(issued) => return issued.status.unwrap().token,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        timeout(Duration::from_secs(120), requested).await.unwrap()
    }

    /// Creates a Service.
    pub(crate) async fn create(&self, name: &str) {
        let service = json!({"metadata": {"name": name}, "spec": {"ports": [{"port": 80}]}});
        let service = object("v1", "Service", service);
        self.services().create(&PostParams::default(), &service).await.unwrap();
    }
}

pub(crate) fn kind(group: &str, version: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}

pub(crate) fn object(version: &str, kind: &str, mut written: Value) -> DynamicObject {
    written["apiVersion"] = version.into();
    written["kind"] = kind.into();
    serde_json::from_value(written).unwrap()
}
