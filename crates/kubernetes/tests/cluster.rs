//! The watches of a real cluster: the one that KUBECONFIG names. Without one the tests say that they are skipped.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

mod support;

use std::time::Duration;

use k8s_openapi::api::{authentication::v1::TokenRequest, core::v1::ServiceAccount};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::json;
use skysail_kubernetes::{Cluster, WatchedKind};
use skysail_source::{FileChange, FileState};
use support::{TestCluster, kind, object};
use tokio::time::timeout;

const LAYER: usize = 3;
const SERVICE: WatchedKind = WatchedKind { group: "", kind: "Service" };
/// A kind that the cluster does not have at first.
const THING: WatchedKind = WatchedKind { group: "test.skysail.io", kind: "Thing" };

fn path(test: &TestCluster, name: &str) -> String {
    format!("kubernetes/services/{}/{name}", test.namespace)
}

/// Returns the text of a file among changes; `None` if it was deleted.
fn state_of<'a>(changes: &'a [FileChange], path: &str) -> Option<&'a FileState> {
    changes.iter().rev().find(|change| change.path == path).map(|change| &change.state)
}

/// Receives changes until one of this path is as expected.
async fn until(cluster: &mut Cluster, path: &str, is_it: impl Fn(&FileState) -> bool) {
    let found = async {
        loop {
            let changes = cluster.next().await.unwrap();
            assert!(changes.iter().all(|change| change.layer == LAYER));
            if state_of(&changes, path).is_some_and(&is_it) {
                return;
            }
        }
    };
    timeout(Duration::from_secs(120), found).await.unwrap_or_else(|_| panic!("{path} did not change"));
}

fn has(state: &FileState, text: &str) -> bool {
    matches!(state, FileState::Text(content) if content.contains(text))
}

#[tokio::test]
async fn objects_and_their_changes_are_files() {
    let Some(test) = TestCluster::start().await else { return };
    test.create("first").await;
    let mut cluster = Cluster::connect(Some(&test.file), &[SERVICE], LAYER).await.unwrap();
    let initial = cluster.initial().await.unwrap();
    let first = state_of(&initial, &path(&test, "first")).unwrap();
    for text in [r#""apiVersion":"v1""#, r#""kind":"Service""#, r#""port":80"#] {
        assert!(has(first, text), "no {text} in {first:?}");
    }
    assert!(!has(first, "managedFields"), "{first:?}");

    test.create("second").await;
    until(&mut cluster, &path(&test, "second"), |state| has(state, r#""port":80"#)).await;
    let patch = Patch::Merge(json!({"metadata": {"labels": {"tier": "web"}}}));
    test.services().patch("first", &PatchParams::default(), &patch).await.unwrap();
    until(&mut cluster, &path(&test, "first"), |state| has(state, r#""tier":"web""#)).await;
    test.services().delete("second", &DeleteParams::default()).await.unwrap();
    until(&mut cluster, &path(&test, "second"), |state| *state == FileState::Deleted).await;
}

#[tokio::test]
async fn kinds_that_are_defined_later_are_watched() {
    let Some(test) = TestCluster::start().await else { return };
    let mut cluster = Cluster::connect(Some(&test.file), &[SERVICE, THING], LAYER).await.unwrap();
    cluster.initial().await.unwrap();
    let definition = json!({
        "metadata": {"name": "things.test.skysail.io"},
        "spec": {
            "group": THING.group,
            "names": {"kind": THING.kind, "plural": "things"},
            "scope": "Namespaced",
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true}}}],
        },
    });
    let of_definitions = kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    let definitions = Api::<DynamicObject>::all_with(test.client.clone(), &of_definitions);
    let definition = object("apiextensions.k8s.io/v1", "CustomResourceDefinition", definition);
    definitions.create(&PostParams::default(), &definition).await.unwrap();
    let thing = object("test.skysail.io/v1", "Thing", json!({"metadata": {"name": "one"}, "spec": {"a": 1}}));
    let of_things = ApiResource { plural: "things".to_owned(), ..kind(THING.group, "v1", THING.kind) };
    let things = Api::<DynamicObject>::namespaced_with(test.client.clone(), &test.namespace, &of_things);
    // The API server serves a new kind after a moment.
    let made = async {
        while things.create(&PostParams::default(), &thing).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(120), made).await.unwrap();
    let path = format!("kubernetes/things.test.skysail.io/{}/one", test.namespace);
    until(&mut cluster, &path, |state| has(state, r#""a":1"#)).await;
    definitions.delete("things.test.skysail.io", &DeleteParams::default()).await.unwrap();
    until(&mut cluster, &path, |state| *state == FileState::Deleted).await;
}

#[tokio::test]
async fn a_kind_that_may_not_be_listed_ends_the_start() {
    let Some(test) = TestCluster::start().await else { return };
    let accounts = Api::<ServiceAccount>::namespaced(test.client.clone(), &test.namespace);
    // The cluster makes the service account a moment after its namespace.
    let requested = async {
        loop {
            let request = TokenRequest::default();
            match accounts.create_token_request("default", &PostParams::default(), &request).await {
                Ok(issued) => return issued.status.unwrap().token,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    let token = timeout(Duration::from_secs(120), requested).await.unwrap();
    let text = std::fs::read_to_string(&test.file).unwrap();
    let mut config = skysail_yaml::documents(&text).next().unwrap().root.unwrap().to_json();
    config["users"][0]["user"] = json!({"token": token});
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kubeconfig");
    std::fs::write(&file, config.to_string()).unwrap();
    let mut cluster = Cluster::connect(Some(&file), &[SERVICE], LAYER).await.unwrap();
    let error = cluster.initial().await.unwrap_err().to_string();
    assert!(error.starts_with("Service cannot be listed: "), "{error}");
    assert!(error.ends_with("permit the service account to list and watch it"), "{error}");
}
