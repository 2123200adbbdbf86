//! Waits until the control plane serves.

use std::{fmt, time::Duration};

use anyhow::Context as _;
use k8s_openapi::api::{
    admissionregistration::v1::{
        MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
    },
    apps::v1::Deployment,
    core::v1::Pod,
};
use kube::{Api, ResourceExt as _, api::ListParams};
use tokio::time::{Instant, sleep};

use crate::{
    connection::{Connection, readable},
    object::Object,
    objects::{MANAGED_BY, MANAGER, REVISION},
    settings::Target,
};

/// The time limit of a wait has passed.
#[derive(Debug)]
pub struct NotInTime(String);

impl fmt::Display for NotInTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotInTime {}

/// Interval between two looks at the cluster.
const INTERVAL: Duration = Duration::from_millis(500);

/// Waits until a condition is met, and reports what it still waits for, once for each reason.
///
/// # Errors
/// The timeout has passed, or the API server fails.
async fn until_none(
    timeout: Duration,
    report: &dyn Fn(&str),
    look: impl AsyncFn() -> anyhow::Result<Option<String>>,
) -> anyhow::Result<()> {
    let end = Instant::now() + timeout;
    let mut reported = String::new();
    while let Some(reason) = look().await? {
        if Instant::now() >= end {
            let timeout = timeout.as_secs();
            return Err(NotInTime(format!("not within {timeout}s: {reason}")).into());
        }
        if reason != reported {
            report(&format!("waiting: {reason}"));
            reported = reason;
        }
        sleep(INTERVAL).await;
    }
    Ok(())
}

/// Waits until all replicas of the Deployment are available in their newest version.
pub(crate) async fn deployment(
    connection: &Connection,
    target: &Target,
    timeout: Duration,
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let name = target.name();
    let api: Api<Deployment> = Api::namespaced(connection.client(), &target.namespace);
    let look = async || {
        let deployment = api.get(&name).await.map_err(readable)?;
        let Some(state) = unavailable(&deployment) else { return Ok(None) };
        // Why pods do not start is for people, and its absence no failure.
        let reason = pod_problem(connection, target).await.unwrap_or_default();
        Ok(Some(format!("Deployment {}/{name}: {state}{reason}", target.namespace)))
    };
    until_none(timeout, report, look).await.context("the control plane is not available")
}

/// Returns what is not available of a Deployment.
pub(crate) fn unavailable(deployment: &Deployment) -> Option<String> {
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let status = deployment.status.clone().unwrap_or_default();
    let is_observed = status.observed_generation >= deployment.metadata.generation;
    let (updated, available) = (status.updated_replicas.unwrap_or(0), status.available_replicas.unwrap_or(0));
    if wanted > 0 && !(is_observed && updated >= wanted && available >= wanted) {
        return Some(format!("{} of {wanted} new pods are available", available.min(updated)));
    }
    (status.replicas.unwrap_or(0) > updated).then(|| "old pods end".to_owned())
}

/// Returns why a pod of the control plane does not run.
pub(crate) async fn pod_problem(connection: &Connection, target: &Target) -> Option<String> {
    let api: Api<Pod> = Api::namespaced(connection.client(), &target.namespace);
    let labels = format!("{MANAGED_BY}={MANAGER},{REVISION}={}", target.revision);
    let pods = api.list(&ListParams::default().labels(&labels)).await.ok()?;
    pods.into_iter().find_map(|pod| {
        let name = pod.name_any();
        let status = pod.status?;
        let conditions = status.conditions.into_iter().flatten();
        let unscheduled = conditions
            .filter(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
            .find_map(|condition| condition.message);
        let waiting = status.container_statuses.into_iter().flatten().find_map(|container| {
            let waiting = container.state?.waiting?;
            let reason = waiting.reason.filter(|reason| reason != "ContainerCreating")?;
            Some(waiting.message.map_or_else(|| reason.clone(), |message| format!("{reason}: {message}")))
        });
        Some(format!("; pod {name}: {}", unscheduled.or(waiting)?))
    })
}

/// Waits until the control plane has set `caBundle` in the webhooks. Before that, the API server cannot verify it, and
/// refuses the pods that the webhooks select.
pub(crate) async fn webhook(
    connection: &Connection,
    target: &Target,
    timeout: Duration,
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let injection: Api<MutatingWebhookConfiguration> = Api::all(connection.client());
    let validation: Api<ValidatingWebhookConfiguration> = Api::all(connection.client());
    let is_empty =
        |client: &WebhookClientConfig| client.ca_bundle.as_ref().is_none_or(|bundle| bundle.0.is_empty());
    let look = async || {
        let name = target.webhook();
        let of_injection = injection.get(&name).await.map_err(readable)?;
        if of_injection.webhooks.iter().flatten().any(|webhook| is_empty(&webhook.client_config)) {
            return Ok(Some(format!(
                "the control plane sets caBundle of MutatingWebhookConfiguration {name}"
            )));
        }
        let name = target.validator();
        let of_validation = validation.get_opt(&name).await.map_err(readable)?;
        let mut webhooks = of_validation.iter().flat_map(|one| one.webhooks.iter().flatten());
        let lacks = webhooks.any(|webhook| is_empty(&webhook.client_config));
        Ok(lacks.then(|| format!("the control plane sets caBundle of ValidatingWebhookConfiguration {name}")))
    };
    until_none(timeout, report, look)
        .await
        .context("the webhooks do not work; see the log of the control plane")
}

/// Waits until an object is gone.
pub(crate) async fn end(
    connection: &Connection,
    object: &Object,
    timeout: Duration,
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let look = async || {
        let found = connection.get(object).await.map_err(readable)?;
        Ok(found.map(|_| format!("{object} ends")))
    };
    until_none(timeout, report, look).await
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state(status: Value) -> Option<String> {
        let deployment = json!({ "metadata": { "generation": 2 }, "spec": { "replicas": 2, "selector": {}, "template": {} },
                    "status": status });
        unavailable(&serde_json::from_value(deployment).unwrap())
    }

    #[test]
    fn a_deployment_is_available_when_old_pods_are_gone() {
        let status = |observed: u32, replicas: u32, updated: u32, available: u32| {
            state(json!({ "observedGeneration": observed, "replicas": replicas, "updatedReplicas": updated,
                          "availableReplicas": available }))
        };
        assert_eq!(status(2, 2, 2, 2), None);
        assert!(status(1, 2, 2, 2).is_some(), "the controller has not seen the newest version");
        assert_eq!(status(2, 3, 2, 3).as_deref(), Some("old pods end"));
        assert_eq!(status(2, 2, 2, 1).as_deref(), Some("1 of 2 new pods are available"));
        assert_eq!(state(json!({})).as_deref(), Some("0 of 2 new pods are available"));
    }
}
