//! The pod with its sidecar.

use serde_json::{Value, json};

use crate::{
    decision::{REVISION, STATUS},
    merge,
    plan::{InjectError, NETWORK, Owner, Plan},
    probes, scrape,
    settings::{Interceptor, NAME, Settings},
    sidecar, traffic,
};

/// Image of a container of the user that overrides fields of the sidecar.
const AUTO: &str = "auto";

/// An injected pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Injected {
    /// The pod, or pod template.
    pub pod: Value,
    /// Parts of the pod's configuration that have no effect, as sentences.
    pub warnings: Vec<String>,
}

/// Adds a sidecar to a pod or pod template. The caller has decided that it gets one.
///
/// # Errors
/// When the object is no pod, or an annotation is not valid.
pub fn inject(original: &Value, owner: &Owner, settings: &Settings) -> Result<Injected, InjectError> {
    let mut pod = original.clone();
    if !pod["spec"]["containers"].is_array() {
        return Err(InjectError::NoPod("spec.containers is not a list"));
    }
    let mut containers = merge::take_list(&mut pod["spec"], "containers");
    let mut init = merge::take_list(&mut pod["spec"], "initContainers");
    // A container of the user with the name of the sidecar overrides its fields.
    let overlay = take(&mut containers, NAME).or_else(|| take(&mut init, NAME));
    let plan = Plan::new(original, owner, overlay.as_ref(), settings)?;
    let mut warnings = plan.warnings(&pod, init.iter().chain(&containers));

    let mut proxy = sidecar::container(&plan, owner, &containers)?;
    if plan.rewrites_probes() {
        let (originals, more) = probes::rewrite(init.iter_mut().chain(&mut containers), plan.status_port);
        warnings.extend(more);
        if !originals.is_empty() {
            let value = Value::Object(originals).to_string();
            push(&mut proxy["env"], json!({ "name": probes::VARIABLE, "value": value }));
        }
    }
    if plan.merges_metrics()
        && let Some(variable) = scrape::merge(&mut pod, &plan.annotations, plan.status_port)?
    {
        push(&mut proxy["env"], variable);
    }
    if let Some(mut overlay) = overlay {
        if overlay["image"] == AUTO {
            overlay.as_object_mut().and_then(|fields| fields.remove("image"));
        }
        merge::container(&mut proxy, &overlay);
    }
    let rules = traffic::container(&plan);
    let names: Vec<String> = containers.iter().filter_map(name).collect();
    let volumes = sidecar::volumes(&plan)?;
    let status = plan.status(rules.as_ref(), &volumes);
    plan.place(&mut init, &mut containers, rules, proxy);
    let spec = merge::map_at(merge::as_map(&mut pod), "spec");
    spec.insert("containers".into(), containers.into());
    if init.is_empty() {
        spec.remove("initContainers");
    } else {
        spec.insert("initContainers".into(), init.into());
    }
    let mut all = merge::take_list(&mut pod["spec"], "volumes");
    merge::list(&mut all, &volumes, "name");
    pod["spec"]["volumes"] = all.into();
    plan.set_metadata(&mut pod, owner, &names, &status);
    Ok(Injected { pod, warnings })
}

impl Plan<'_> {
    /// Puts the containers into the lists of the pod.
    fn place(&self, init: &mut Vec<Value>, containers: &mut Vec<Value>, rules: Option<Value>, proxy: Value) {
        if self.native {
            // Connections of the other init containers are part of the mesh.
            init.splice(0..0, rules.into_iter().chain([proxy]));
            return;
        }
        if let Some(rules) = rules {
            // Without a native sidecar, init containers would have no connections once these are intercepted. The check of
            // the CNI plugin comes first, because it changes nothing.
            let at = if self.settings.interceptor == Interceptor::Cni { 0 } else { init.len() };
            init.insert(at, rules);
        }
        let at = if self.holds() { 0 } else { containers.len() };
        containers.insert(at, proxy);
    }

    /// Returns the annotation that lists what was injected.
    fn status(&self, rules: Option<&Value>, volumes: &[Value]) -> String {
        let mut init: Vec<String> = rules.and_then(name).into_iter().collect();
        let mut containers: Vec<String> = Vec::new();
        let list = if self.native { &mut init } else { &mut containers };
        list.push(NAME.to_owned());
        let volumes: Vec<String> = volumes.iter().filter_map(name).collect();
        json!({ "initContainers": init, "containers": containers, "volumes": volumes,
                "imagePullSecrets": null, "revision": self.settings.revision })
        .to_string()
    }

    /// Sets the labels and annotations of an injected pod.
    fn set_metadata(&self, pod: &mut Value, owner: &Owner, names: &[String], status: &str) {
        let metadata = merge::map_at(merge::as_map(pod), "metadata");
        let labels = merge::map_at(metadata, "labels");
        let first = |names: &[&str], default: &str| {
            let found = names.iter().find_map(|name| labels.get(*name).and_then(Value::as_str));
            label_value(found.filter(|text| !text.is_empty()).unwrap_or(default))
        };
        let canonical =
            first(&["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"], &owner.name);
        let revision =
            first(&["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"], "latest");
        for (name, value) in [
            ("service.istio.io/canonical-name", &canonical),
            ("service.istio.io/canonical-revision", &revision),
        ] {
            labels.entry(name).or_insert_with(|| value.as_str().into());
        }
        if self.is_sidecar() {
            labels.entry("security.istio.io/tlsMode").or_insert_with(|| "istio".into());
        }
        if !self.network.is_empty() {
            labels.insert(NETWORK.into(), self.network.as_str().into());
        }
        let annotations = merge::map_at(metadata, "annotations");
        if let Some(name) = names.first() {
            for key in
                ["kubectl.kubernetes.io/default-logs-container", "kubectl.kubernetes.io/default-container"]
            {
                annotations.entry(key).or_insert_with(|| name.as_str().into());
            }
        }
        annotations.insert(REVISION.into(), self.settings.revision.as_str().into());
        annotations.insert(STATUS.into(), status.into());
        if self.settings.interceptor == Interceptor::Cni && self.is_sidecar() {
            // The plugin reads its settings from annotations.
            annotations.insert("sidecar.istio.io/interceptionMode".into(), self.mode.as_str().into());
        }
    }
}

/// Shortens a text to the length of a label's value.
fn label_value(text: &str) -> String {
    let text: String = text.chars().take(63).collect();
    text.trim_matches(['-', '_', '.']).to_owned()
}

fn name(object: &Value) -> Option<String> {
    object["name"].as_str().map(str::to_owned)
}

fn take(containers: &mut Vec<Value>, name: &str) -> Option<Value> {
    let at = containers.iter().position(|container| container["name"] == name)?;
    Some(containers.remove(at))
}

fn push(list: &mut Value, item: Value) {
    if let Value::Array(items) = list {
        items.push(item);
    }
}
