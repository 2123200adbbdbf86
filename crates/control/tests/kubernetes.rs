//! The control plane reads objects of a real cluster: the one that KUBECONFIG names. Without one the test says that it
//! is skipped.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panic")]

#[path = "../../kubernetes/tests/support/mod.rs"]
mod cluster;
mod support;

use std::time::Duration;

use cluster::TestCluster;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::json;
use skysail_core::SpiffeId;
use skysail_identity::KeyAndCsr;
use skysail_xds::{certificates::create_certificate, istio::IstioCertificateRequest};
use support::{Control, Folder, bearer, certificate_by, connect};
use tokio::time::timeout;
use tonic::Status;

/// Waits until a page of an object is as expected.
async fn until(control: &Control, path: &str, is_it: impl Fn(u16, &str) -> bool) {
    let found = async {
        loop {
            let (status, body) = control.ask("GET", path).await;
            if is_it(status, &body) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(120), found).await.unwrap_or_else(|_| panic!("{path} is not as expected"));
}

#[tokio::test]
async fn objects_of_a_cluster_are_those_of_the_mesh() {
    let Some(test) = TestCluster::start().await else { return };
    test.create("before").await;
    let folder = Folder::new();
    folder.service("local", 9);
    let control = folder.start_with("0", &["--kubeconfig", test.file.to_str().unwrap()]).await;
    let page = |name: &str| format!("/debug/objects/Service/{}/{name}", test.namespace);
    // At the first connection, and without a wait.
    assert_eq!(control.ask("GET", &page("before")).await.0, 200);
    assert_eq!(control.ask("GET", "/debug/objects/Service/default/local").await.0, 200, "of the folder");

    test.create("after").await;
    until(&control, &page("after"), |status, _| status == 200).await;
    let file = format!("kubernetes/services/{}/after", test.namespace);
    assert!(control.page("/debug/config_files").await.contains(&file));
    // The mesh warns about this field.
    let patch = Patch::Merge(json!({"spec": {"internalTrafficPolicy": "Local"}}));
    test.services().patch("after", &PatchParams::default(), &patch).await.unwrap();
    until(&control, "/debug/config_errors", |_, body| body.contains(&file)).await;
    test.services().delete("after", &DeleteParams::default()).await.unwrap();
    until(&control, &page("after"), |status, _| status == 404).await;
}

/// Requests a certificate with a token.
async fn request_with(control: &Control, folder: &Folder, token: &str) -> Result<Vec<String>, Status> {
    let csr = KeyAndCsr::generate(None).unwrap().csr_pem;
    let request = IstioCertificateRequest { csr, ..IstioCertificateRequest::default() };
    create_certificate(connect(control, folder).await, bearer(token), request).await
}

#[tokio::test]
async fn tokens_of_a_cluster_are_accepted_while_the_api_server_confirms_them() {
    let Some(test) = TestCluster::start().await else { return };
    let folder = Folder::new();
    let control = folder.start_with("0", &["--kubeconfig", test.file.to_str().unwrap()]).await;
    let token = test.token(&["istio-ca"]).await;
    let (_, identity) = certificate_by(&control, &folder, &token).await;
    assert_eq!(identity.peer.spiffe, Some(SpiffeId::new("cluster.local", &test.namespace, "default")));

    let refused = request_with(&control, &folder, &test.token(&["other"]).await).await.unwrap_err();
    assert!(refused.message().contains("InvalidAudience"), "{refused}");
    let foreign = request_with(&control, &folder, &folder.token("default")).await.unwrap_err();
    assert!(foreign.message().contains("no known key"), "{foreign}");

    // A verdict holds for a minute, so this token is new.
    let token = test.token(&["istio-ca"]).await;
    let accounts = Api::<ServiceAccount>::namespaced(test.client.clone(), &test.namespace);
    accounts.delete("default", &DeleteParams::default()).await.unwrap();
    let refused = async {
        loop {
            match request_with(&control, &folder, &token).await {
                Err(refused) => return refused,
                Ok(_) => tokio::task::yield_now().await,
            }
        }
    };
    let refused = timeout(Duration::from_secs(120), refused).await.unwrap();
    assert!(refused.message().contains("the API server refuses the token: "), "{refused}");
}

#[tokio::test]
async fn a_cluster_that_cannot_be_reached_ends_the_start() {
    let folder = Folder::new();
    let kubeconfig = folder.at("kubeconfig");
    let arguments = ["--kubeconfig", kubeconfig.to_str().unwrap()];
    let output = folder.refused(&arguments).await;
    assert!(output.contains("the kubeconfig cannot be used: "), "{output}");
    // Port 9 has no server.
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
                contexts: [{name: a, context: {cluster: a, user: a}}]\n\
                clusters: [{name: a, cluster: {server: 'https://127.0.0.1:9'}}]\nusers: [{name: a, user: {}}]\n";
    std::fs::write(&kubeconfig, text).unwrap();
    let output = folder.refused(&arguments).await;
    assert!(output.contains("the API server at https://127.0.0.1:9/: "), "{output}");
}
