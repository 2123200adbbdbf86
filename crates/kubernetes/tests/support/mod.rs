//! A real cluster for tests.

use std::path::PathBuf;

use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

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
