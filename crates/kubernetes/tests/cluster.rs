//! The watches of a real cluster: the one that KUBECONFIG names. Without one the tests say that they are skipped.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

mod support;

use std::{path::Path, time::Duration};

use k8s_openapi::{
    ByteString,
    api::{
        admissionregistration::v1::MutatingWebhookConfiguration,
        coordination::v1::Lease,
        core::v1::{ConfigMap, Namespace, ServiceAccount},
    },
};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::json;
use skysail_kubernetes::{ApiServer, Cluster, ClusterObject, Review, StatusWrite, WatchedKind};
use skysail_source::{FileChange, FileState};
use support::{TestCluster, kind, object};
use tokio::{sync::watch, time::timeout};

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

async fn server(kubeconfig: &Path) -> ApiServer {
    ApiServer::new(Some(kubeconfig)).await.unwrap()
}

#[tokio::test]
async fn objects_and_their_changes_are_files() {
    let Some(test) = TestCluster::start().await else { return };
    test.create("first").await;
    let mut cluster = Cluster::watch(&server(&test.file).await, &[SERVICE], LAYER).await.unwrap();
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
    let mut cluster = Cluster::watch(&server(&test.file).await, &[SERVICE, THING], LAYER).await.unwrap();
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
    let token = test.token(&[]).await;
    let text = std::fs::read_to_string(&test.file).unwrap();
    let mut config = skysail_yaml::documents(&text).next().unwrap().root.unwrap().to_json();
    config["users"][0]["user"] = json!({"token": token});
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kubeconfig");
    std::fs::write(&file, config.to_string()).unwrap();
    let mut cluster = Cluster::watch(&server(&file).await, &[SERVICE], LAYER).await.unwrap();
    let error = cluster.initial().await.unwrap_err().to_string();
    assert!(error.starts_with("Service cannot be listed: "), "{error}");
    assert!(error.ends_with("permit the service account to list and watch it"), "{error}");
}

#[tokio::test]
async fn the_api_server_names_the_keys_of_tokens_and_reviews_them() {
    let Some(test) = TestCluster::start().await else { return };
    let server = server(&test.file).await;
    let issuer = server.token_issuer().await.unwrap();
    assert!(!issuer.name.is_empty() && issuer.keys.contains("\"kty\""), "{issuer:?}");

    let token = test.token(&["istio-ca"]).await;
    let valid = Review::Valid(format!("system:serviceaccount:{}:default", test.namespace));
    assert_eq!(server.review(&token, "istio-ca").await.unwrap(), valid);
    for (token, audience) in
        [(&*token, "other"), (&*test.token(&["other"]).await, "istio-ca"), ("a.b.c", "istio-ca")]
    {
        let verdict = server.review(token, audience).await.unwrap();
        assert!(matches!(verdict, Review::Refused(_)), "{audience}: {verdict:?}");
    }
    let accounts = Api::<ServiceAccount>::namespaced(test.client.clone(), &test.namespace);
    accounts.delete("default", &DeleteParams::default()).await.unwrap();
    let revoked = async {
        // The API server keeps a verdict for a moment.
        while server.review(&token, "istio-ca").await.unwrap() == valid {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(120), revoked).await.unwrap();
}

/// Waits until an object has been read in the expected state.
async fn eventually<T>(read: impl AsyncFn() -> Option<T>, is_it: impl Fn(&T) -> bool) {
    let found = async {
        while !read().await.is_some_and(|object| is_it(&object)) {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(120), found).await.unwrap();
}

#[tokio::test]
async fn the_trust_bundle_is_kept_in_the_config_map_of_a_namespace() {
    let Some(test) = TestCluster::start().await else { return };
    // Other namespaces of the cluster are left alone.
    let namespaces = Api::<Namespace>::all(test.client.clone()).list(&Default::default()).await.unwrap();
    let others: Vec<String> = namespaces.iter().map(|one| one.name_any()).collect();
    let (roots, receiver) = watch::channel("first".to_owned());
    let keeper = tokio::spawn({
        let (server, own) = (server(&test.file).await, test.namespace.clone());
        async move {
            let others: Vec<&str> = others.iter().map(|name| &**name).filter(|name| *name != own).collect();
            server.distribute_roots(receiver, "here", &others).await;
        }
    });
    let maps = Api::<ConfigMap>::namespaced(test.client.clone(), &test.namespace);
    let read = async || maps.get_opt("istio-ca-root-cert").await.unwrap();
    let bundle = |map: &ConfigMap| map.data.as_ref().and_then(|data| data.get("root-cert.pem")).cloned();
    eventually(read, |map| bundle(map).as_deref() == Some("first")).await;
    roots.send_replace("second".to_owned());
    eventually(read, |map| bundle(map).as_deref() == Some("second")).await;
    maps.delete("istio-ca-root-cert", &DeleteParams::default()).await.unwrap();
    eventually(read, |map| bundle(map).as_deref() == Some("second")).await;

    // That of another control plane stays. The bundle in a second namespace tells that all were compared.
    let foreign = json!({"metadata": {"labels": {"skysail.io/control-plane": "there"}},
                         "data": {"root-cert.pem": "foreign"}});
    maps.patch("istio-ca-root-cert", &PatchParams::default(), &Patch::Merge(foreign)).await.unwrap();
    let second = TestCluster::start().await.unwrap();
    let maps_of_second = Api::<ConfigMap>::namespaced(test.client.clone(), &second.namespace);
    let read_second = async || maps_of_second.get_opt("istio-ca-root-cert").await.unwrap();
    for roots_now in ["other", "third"] {
        roots.send_replace(roots_now.to_owned());
        eventually(read_second, |map| bundle(map).as_deref() == Some(roots_now)).await;
    }
    assert_eq!(read().await.as_ref().and_then(bundle).as_deref(), Some("foreign"));
    maps.delete("istio-ca-root-cert", &DeleteParams::default()).await.unwrap();
    eventually(read, |map| bundle(map).as_deref() == Some("third")).await;
    keeper.abort();
}

#[tokio::test]
async fn the_trust_bundle_is_kept_in_the_webhooks_of_the_revision() {
    let Some(test) = TestCluster::start().await else { return };
    let api = Api::<MutatingWebhookConfiguration>::all(test.client.clone());
    let configuration = |app: &str| {
        let name = format!("{}-{app}", test.namespace);
        serde_json::from_value::<MutatingWebhookConfiguration>(json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": { "name": name, "labels": { "app": app, "istio.io/rev": test.namespace } },
            "webhooks": [{ "name": "a.skysail.example", "sideEffects": "None", "admissionReviewVersions": ["v1"],
                           "clientConfig": { "url": "https://127.0.0.1:1/inject" }, "rules": [],
                           "failurePolicy": "Ignore" }],
        }))
        .unwrap()
    };
    let (own, foreign) = (configuration("skysail-injector"), configuration("sidecar-injector"));
    for one in [&own, &foreign] {
        api.create(&PostParams::default(), one).await.unwrap();
    }
    // The API server checks that a bundle is PEM.
    let [first, second] =
        [(); 2].map(|()| rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap().cert.pem());
    let (roots, receiver) = watch::channel(first.clone());
    let keeper = tokio::spawn({
        let (server, revision) = (server(&test.file).await, test.namespace.clone());
        async move { server.keep_ca_bundles(receiver, "istio-system", &revision).await }
    });
    let has = |bundle: &str| {
        let bundle = Some(ByteString(bundle.as_bytes().to_vec()));
        move |one: &MutatingWebhookConfiguration| {
            one.webhooks.iter().flatten().all(|hook| hook.client_config.ca_bundle == bundle)
        }
    };
    let (own, foreign) = (own.name_any(), foreign.name_any());
    let read = async || api.get_opt(&own).await.unwrap();
    eventually(read, has(&first)).await;
    roots.send_replace(second.clone());
    eventually(read, has(&second)).await;
    let other = api.get(&foreign).await.unwrap();
    assert!(other.webhooks.iter().flatten().all(|hook| hook.client_config.ca_bundle.is_none()), "{other:?}");
    keeper.abort();
    for name in [own, foreign] {
        api.delete(&name, &DeleteParams::default()).await.unwrap();
    }
}

/// Waits until a candidate leads.
async fn until_leads(receiver: &mut watch::Receiver<bool>) {
    timeout(Duration::from_secs(120), receiver.wait_for(|leads| *leads)).await.unwrap().unwrap();
}

#[tokio::test]
async fn one_candidate_leads_and_another_takes_over() {
    let Some(test) = TestCluster::start().await else { return };
    let server = server(&test.file).await;
    let candidate = |identity: &str| server.candidate(&test.namespace, "leader", identity);
    let start = |identity: &str| {
        let (leads, receiver) = watch::channel(false);
        (tokio::spawn(candidate(identity).run(leads)), receiver)
    };
    let (running, mut first) = start("first");
    until_leads(&mut first).await;
    let (other, mut second) = start("second");

    // It ends without giving the Lease up, so the other one waits until the Lease is old.
    running.abort();
    let _ = running.await;
    until_leads(&mut second).await;
    let leases = Api::<Lease>::namespaced(test.client.clone(), &test.namespace);
    let lease = leases.get("leader").await.unwrap().spec.unwrap();
    assert_eq!((lease.holder_identity.as_deref(), lease.lease_transitions), (Some("second"), Some(1)));

    // A Lease that is given up is free at once, and only its holder can give it up.
    other.abort();
    let _ = other.await;
    candidate("first").release().await.unwrap();
    assert_eq!(leases.get("leader").await.unwrap().spec.unwrap().holder_identity.as_deref(), Some("second"));
    candidate("second").release().await.unwrap();
    let (last, mut third) = start("third");
    until_leads(&mut third).await;
    last.abort();
}

#[tokio::test]
async fn a_status_is_written_over_the_version_that_was_observed() {
    let Some(test) = TestCluster::start().await else { return };
    let server = server(&test.file).await;
    let ingresses = kind("networking.k8s.io", "v1", "Ingress");
    let ingresses = Api::<DynamicObject>::namespaced_with(test.client.clone(), &test.namespace, &ingresses);
    let backend = json!({"service": {"name": "a", "port": {"number": 80}}});
    let ingress = json!({"metadata": {"name": "one"}, "spec": {"defaultBackend": backend}});
    let ingress = object("networking.k8s.io/v1", "Ingress", ingress);
    ingresses.create(&PostParams::default(), &ingress).await.unwrap();
    const INGRESS: WatchedKind = WatchedKind { group: "networking.k8s.io", kind: "Ingress" };
    let mut cluster = Cluster::watch(&server, &[INGRESS], LAYER).await.unwrap();
    let path = format!("kubernetes/ingresses.networking.k8s.io/{}/one", test.namespace);
    assert!(state_of(&cluster.initial().await.unwrap(), &path).is_some());

    let statuses = cluster.statuses();
    let key = ClusterObject {
        group: "networking.k8s.io".into(),
        kind: "Ingress".into(),
        namespace: test.namespace.clone(),
        name: "one".into(),
    };
    let observed = statuses.get(&key).unwrap();
    assert!(observed.status["loadBalancer"].as_object().is_some_and(serde_json::Map::is_empty));
    let status = |ip: &str| json!({"loadBalancer": {"ingress": [{"ip": ip}]}});
    assert_eq!(statuses.write(&key, &observed, &status("192.0.2.1")).await, Ok(StatusWrite::Done));
    assert_eq!(statuses.write(&key, &observed, &status("192.0.2.2")).await, Ok(StatusWrite::Outdated));
    let now = statuses.get(&key).unwrap();
    assert_eq!(now.status, status("192.0.2.1"));
    let read = ingresses.get("one").await.unwrap();
    assert_eq!(read.data["status"], now.status);

    // The own write is no change of the object, but a label is.
    let label = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    ingresses.patch("one", &PatchParams::default(), &label).await.unwrap();
    let changes = cluster.next().await.unwrap();
    let own: Vec<_> = changes.iter().filter(|change| change.path == path).collect();
    assert_eq!(own.len(), 1, "{own:?}");
    assert!(has(&own[0].state, r#""labels":{"a":"b"}"#) && !has(&own[0].state, "192.0.2.1"));
    ingresses.delete("one", &DeleteParams::default()).await.unwrap();
    until(&mut cluster, &path, |state| *state == FileState::Deleted).await;
    assert!(statuses.get(&key).is_none());
    assert_eq!(statuses.write(&key, &now, &status("192.0.2.3")).await, Ok(StatusWrite::Outdated));
}
