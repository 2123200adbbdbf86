//! Checks of the pods with sidecars, and of those that should have one.

use std::collections::BTreeMap;

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ContainerStatus, Namespace, Pod},
};
use kube::{Api, ResourceExt as _, api::ListParams};
use skysail_inject::{Decision, NamespaceLabels, Settings, decide};

use super::{Category, Checks, Found, injection_settings, list, named};
use crate::{
    connection::{Connection, readable},
    objects::{REVISION, SIDECAR},
    settings::Target,
};

const CATEGORY: Category = Category::DataPlane;
/// Option of skysaild with the image of sidecars.
const IMAGE: &str = "--injection-image=";

/// Annotation of a pod that chooses another image.
const IMAGE_ANNOTATION: &str = "sidecar.istio.io/proxyImage";

/// The pods of the mesh.
#[derive(Default)]
struct Pods {
    /// Number of pods with a sidecar of the revision.
    injected: usize,
    /// Pods whose sidecar is not ready.
    unready: Vec<String>,
    /// Pods whose sidecar has another image than new ones.
    outdated: Vec<String>,
    /// Pods without a sidecar that would get one now.
    bare: Vec<String>,
}

/// Makes the checks of the data plane.
pub(super) async fn check(connection: &Connection, target: &Target, checks: &mut Checks<'_>) {
    const SUBJECTS: [&str; 3] =
        ["sidecars are ready", "sidecars have the current image", "pods that ask for a sidecar have one"];
    let pods = match pods(connection, target).await {
        Ok(pods) => pods,
        Err(error) => {
            for subject in SUBJECTS {
                checks.add(CATEGORY, subject, Found::of_error(&error));
            }
            return;
        }
    };
    let found = [
        match &pods.unready[..] {
            [] => Found::passed(format!("{}", pods.injected)),
            unready => Found::failed(
                format!("{} of {} are not: {}", unready.len(), pods.injected, named(unready)),
                format!("see `kubectl logs POD --container {SIDECAR}`"),
            ),
        },
        match &pods.outdated[..] {
            [] => Found::passed(""),
            outdated => Found::warned(
                format!("{} of {} have another: {}", outdated.len(), pods.injected, named(outdated)),
                "restart the workloads (`kubectl rollout restart`) to replace the sidecars",
            ),
        },
        match &pods.bare[..] {
            [] => Found::passed(""),
            bare => Found::warned(
                format!("{} without: {}", bare.len(), named(bare)),
                "restart the workloads (`kubectl rollout restart`): these pods were created before the control plane or \
                 the label",
            ),
        },
    ];
    for (subject, found) in SUBJECTS.into_iter().zip(found) {
        checks.add(CATEGORY, subject, found);
    }
}

async fn pods(connection: &Connection, target: &Target) -> anyhow::Result<Pods> {
    let deployments: Api<Deployment> = Api::namespaced(connection.client(), &target.namespace);
    let deployment = deployments.get(&target.name()).await.map_err(readable)?;
    let image = injected_image(&deployment).unwrap_or_default();
    let namespaces: Api<Namespace> = Api::all(connection.client());
    let labels: BTreeMap<String, NamespaceLabels> = list(&namespaces, ListParams::default())
        .await?
        .into_iter()
        .map(|namespace| (namespace.name_any(), namespace.labels().clone()))
        .collect();
    let settings = injection_settings(target, image);
    let api: Api<Pod> = Api::all(connection.client());
    let mut pods = Pods::default();
    for pod in list(&api, ListParams::default()).await? {
        pods.add(&pod, labels.get(&pod.namespace().unwrap_or_default()), &settings)?;
    }
    Ok(pods)
}

/// Returns the image of the sidecars that the control plane injects.
fn injected_image(deployment: &Deployment) -> Option<&str> {
    let containers = &deployment.spec.as_ref()?.template.spec.as_ref()?.containers;
    let mut options = containers.iter().flat_map(|container| container.args.iter().flatten());
    options.find_map(|option| option.strip_prefix(IMAGE))
}

impl Pods {
    fn add(
        &mut self,
        pod: &Pod,
        namespace: Option<&NamespaceLabels>,
        settings: &Settings,
    ) -> anyhow::Result<()> {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        if pod.metadata.deletion_timestamp.is_some() || ["Succeeded", "Failed"].contains(&phase) {
            return Ok(());
        }
        let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
        let Some(image) = sidecar_image(pod) else {
            let place = pod.namespace().unwrap_or_default();
            let none = NamespaceLabels::new();
            let labels = Some(namespace.unwrap_or(&none));
            let (decision, _) = decide(&serde_json::to_value(pod)?, &place, labels, settings);
            if decision == Decision::Inject {
                self.bare.push(name);
            }
            return Ok(());
        };
        if pod.annotations().get(REVISION).is_none_or(|revision| *revision != settings.revision) {
            return Ok(());
        }
        self.injected += 1;
        // A pod that is not scheduled has no statuses.
        if statuses(pod).any(|status| status.name == SIDECAR && !status.ready) {
            self.unready.push(name.clone());
        }
        let is_chosen = settings.image.is_empty() || pod.annotations().contains_key(IMAGE_ANNOTATION);
        if !is_chosen && image != settings.image {
            self.outdated.push(name);
        }
        Ok(())
    }
}

fn sidecar_image(pod: &Pod) -> Option<&str> {
    let spec = pod.spec.as_ref()?;
    let mut containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    containers.find(|container| container.name == SIDECAR)?.image.as_deref()
}

fn statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    let status = pod.status.iter();
    status.flat_map(|status| {
        status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Returns the pods of a namespace with `istio-injection: enabled`.
    fn pods(all: &[Value]) -> Pods {
        let labels = NamespaceLabels::from([("istio-injection".to_owned(), "enabled".to_owned())]);
        let mut pods = Pods::default();
        for pod in all {
            let pod = serde_json::from_value(pod.clone()).unwrap();
            pods.add(&pod, Some(&labels), &Settings::new("proxy:2")).unwrap();
        }
        pods
    }

    fn pod(name: &str, image: &str, revision: &str, ready: bool) -> Value {
        json!({
            "metadata": { "name": name, "namespace": "shop", "annotations": { "istio.io/rev": revision } },
            "spec": { "containers": [{ "name": "app" }], "initContainers": [{ "name": "istio-proxy", "image": image }] },
            "status": { "initContainerStatuses": [{ "name": "istio-proxy", "ready": ready, "image": image,
                                                    "imageID": "", "restartCount": 0 }] },
        })
    }

    #[test]
    fn sidecars_are_counted_by_state_and_image() {
        let bare = json!({ "metadata": { "name": "bare", "namespace": "shop" }, "spec": { "containers": [{ "name": "app" }] } });
        let mut done = bare.clone();
        done["status"] = json!({ "phase": "Succeeded" });
        let mut unwanted = bare.clone();
        unwanted["metadata"]["labels"] = json!({ "sidecar.istio.io/inject": "false" });
        let found = pods(&[
            pod("good", "proxy:2", "default", true),
            pod("old", "proxy:1", "default", true),
            pod("starts", "proxy:2", "default", false),
            pod("other", "proxy:1", "canary", false),
            bare,
            done,
            unwanted,
        ]);
        assert_eq!(found.injected, 3);
        assert_eq!(found.unready, ["shop/starts"]);
        assert_eq!(found.outdated, ["shop/old"]);
        assert_eq!(found.bare, ["shop/bare"]);
    }

    #[test]
    fn the_image_of_sidecars_is_an_option_of_the_control_plane() {
        let deployment = json!({ "spec": { "selector": {}, "template": { "spec": { "containers": [
            { "name": "discovery", "args": ["--kubernetes", "--injection-image=proxy:2"] }] } } } });
        assert_eq!(injected_image(&serde_json::from_value(deployment).unwrap()), Some("proxy:2"));
    }
}
