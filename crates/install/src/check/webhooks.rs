//! Checks of the webhooks: whether the API server can call them, and whether they inject.

use k8s_openapi::api::{
    admissionregistration::v1::{
        MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
    },
    core::v1::{Namespace, Pod},
};
use kube::{Api, ResourceExt as _, api::PostParams};
use serde_json::json;
use skysail_inject::{Decision, decide};

use super::{Category, Checks, Found, certificates, injection_settings};
use crate::{
    connection::{Connection, readable},
    objects::{REVISION, SIDECAR},
    preflight,
    settings::Target,
};

const CATEGORY: Category = Category::Webhooks;
/// Namespace of the pod that is not created. Every cluster has it.
const NAMESPACE: &str = "default";

/// Part of the message about a webhook that does not answer.
const FAILED: &str = "failed calling webhook";

/// Makes the checks of the webhooks.
pub(super) async fn check(connection: &Connection, target: &Target, checks: &mut Checks<'_>) {
    checks.make(CATEGORY, "the API server can verify them", bundles(connection, target)).await;
    checks.make(CATEGORY, "no other control plane injects the same pods", others(connection, target)).await;
    checks.make(CATEGORY, "a new pod gets a sidecar", injection(connection, target)).await;
}

/// Checks that `caBundle` has the roots of the mesh.
async fn bundles(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let injection: Api<MutatingWebhookConfiguration> = Api::all(connection.client());
    let validation: Api<ValidatingWebhookConfiguration> = Api::all(connection.client());
    let injection = injection.get(&target.webhook()).await.map_err(readable)?;
    let validation = validation.get_opt(&target.validator()).await.map_err(readable)?;
    let clients = injection.webhooks.iter().flatten().map(|of| &of.client_config);
    let validating =
        validation.iter().flat_map(|of| of.webhooks.iter().flatten()).map(|of| &of.client_config);
    let clients: Vec<&WebhookClientConfig> = clients.chain(validating).collect();
    let bundle = |client: &WebhookClientConfig| {
        client.ca_bundle.as_ref().map(|bundle| bundle.0.clone()).unwrap_or_default()
    };
    let remedy = "the control plane sets caBundle; see its log for what prevents it";
    if clients.iter().any(|client| bundle(client).is_empty()) {
        let detail = "caBundle is empty, so the API server calls none of them";
        return Ok(Found::failed(detail, remedy));
    }
    let roots = certificates::roots(connection, &target.namespace).await?;
    let Some(roots) = roots else { return Ok(Found::passed("")) };
    if clients.iter().any(|client| String::from_utf8_lossy(&bundle(client)).trim() != roots.trim()) {
        return Ok(Found::failed("caBundle has other roots than those of the mesh", remedy));
    }
    let count = clients.len();
    Ok(Found::passed(match validation {
        Some(_) => format!("{count} webhooks, for injection and for validation"),
        None => format!("{count} webhooks for injection; objects are not validated (--validation off)"),
    }))
}

async fn others(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let others = preflight::other_injectors(connection, target).await?;
    Ok(match others.is_empty() {
        true => Found::passed(""),
        false => {
            Found::failed(others.join("; "), "remove one of them, or install it under another --revision")
        }
    })
}

/// Returns the beginning of the URL by which the API server calls the control plane.
fn service_url(target: &Target) -> String {
    format!("https://{}.{}.svc:", target.service(), target.namespace)
}

/// Lets the API server create a pod without keeping it.
async fn injection(connection: &Connection, target: &Target) -> anyhow::Result<Found> {
    let label = if target.is_default() {
        ("sidecar.istio.io/inject", "true")
    } else {
        (REVISION, target.revision.as_str())
    };
    let pod = json!({
        "metadata": { "generateName": "skysail-check-", "labels": { label.0: label.1 } },
        "spec": { "containers": [{ "name": "app", "image": "registry.example/app" }] },
    });
    let settings = injection_settings(target, "");
    let namespaces: Api<Namespace> = Api::all(connection.client());
    let labels = namespaces.get(NAMESPACE).await.map_err(readable)?.labels().clone();
    if let (Decision::Leave(reason), _) = decide(&pod, NAMESPACE, Some(&labels), &settings) {
        return Ok(Found::skipped(format!("a pod in namespace {NAMESPACE} gets none: {reason}")));
    }
    let api: Api<Pod> = Api::namespaced(connection.client(), NAMESPACE);
    let parameters = PostParams { dry_run: true, ..PostParams::default() };
    let created = match api.create(&parameters, &serde_json::from_value(pod)?).await {
        Ok(pod) => pod,
        Err(kube::Error::Api(status))
            if status.message.contains(FAILED) && status.message.contains(&service_url(target)) =>
        {
            let remedy = "the API server must reach port 15017 of the control plane's pods: look for network policies \
                          and firewalls between them";
            return Ok(Found::failed(status.message.clone(), remedy));
        }
        // Such as one of a quota, of a policy or of missing permissions.
        Err(error) => {
            return Ok(Found::skipped(format!("no pod in namespace {NAMESPACE}: {}", readable(error))));
        }
    };
    let spec = created.spec.unwrap_or_default();
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let sidecar = containers.filter(|container| container.name == SIDECAR).find_map(|of| of.image.clone());
    let revision = created.metadata.annotations.and_then(|mut all| all.remove(REVISION)).unwrap_or_default();
    let sidecar = sidecar.filter(|_| revision == target.revision);
    Ok(match sidecar {
        Some(image) => Found::passed(format!("{image}, by a dry run in namespace {NAMESPACE}")),
        None => Found::failed(
            format!(
                "a dry run in namespace {NAMESPACE} added no container {SIDECAR} of revision {}",
                target.revision
            ),
            format!(
                "see the labels of this namespace, and the log of the control plane; `kubectl get mutatingwebhookconfiguration {}`",
                target.webhook()
            ),
        ),
    })
}
