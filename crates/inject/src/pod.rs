//! The pod with its sidecar.

use serde_json::{Map, Value, json};

use crate::{
    annotations::{AnnotationError, Annotations, text_map},
    decision::{REVISION, STATUS},
    merge, probes, scrape,
    settings::{Interceptor, Settings},
    sidecar,
    traffic::{self, Mode},
};

/// Name of the sidecar's container.
pub(crate) const NAME: &str = "istio-proxy";
/// User id and group id of the sidecar.
const USER: u64 = 1337;
/// Image of a container of the user that overrides fields of the sidecar.
const AUTO: &str = "auto";
/// Annotation with the templates of Istio's injector.
const TEMPLATES: &str = "inject.istio.io/templates";
/// Annotation with the proxy configuration, in YAML.
const CONFIG: &str = "proxy.istio.io/config";
/// Label with the network of a pod.
const NETWORK: &str = "topology.istio.io/network";

/// Object that creates a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// API version, such as `apps/v1`.
    pub api_version: String,
    /// Kind, such as `Deployment`.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Namespace; may be empty.
    pub namespace: String,
}

/// An injected pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Injected {
    /// The pod, or pod template.
    pub pod: Value,
    /// Parts of the pod's configuration that have no effect, as sentences.
    pub warnings: Vec<String>,
}

/// Error of a pod that cannot be injected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InjectError {
    /// An annotation is not valid.
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
    /// The proxy configuration is not valid.
    #[error("proxy configuration: {0}")]
    Config(String),
    /// The pod asks for another template.
    #[error("annotation {TEMPLATES}: there is no template {0:?}; remove the annotation, or write sidecar")]
    Template(String),
    /// The object is no pod.
    #[error("{0}")]
    NoPod(&'static str),
}

/// What the parts of a sidecar depend on.
pub(crate) struct Plan<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) annotations: Annotations,
    /// Proxy configuration: that of the mesh, overridden by the pod.
    pub(crate) config: Map<String, Value>,
    pub(crate) image: String,
    pub(crate) mode: Mode,
    pub(crate) native: bool,
    pub(crate) network: String,
    pub(crate) workload_name: String,
    /// Port of probes and merged metrics; 0 disables both.
    pub(crate) status_port: u16,
    pub(crate) user: u64,
    pub(crate) group: u64,
    pub(crate) resources: Value,
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
    let mut warnings = plan.warnings(&containers);

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

impl<'a> Plan<'a> {
    fn new(
        pod: &Value,
        owner: &Owner,
        overlay: Option<&Value>,
        settings: &'a Settings,
    ) -> Result<Self, InjectError> {
        let annotations = Annotations::of(pod)?;
        if let Some(other) = annotations
            .get(TEMPLATES)
            .and_then(|names| names.split(',').map(str::trim).find(|name| *name != "sidecar"))
        {
            return Err(InjectError::Template(other.to_owned()));
        }
        let config = proxy_config(&annotations, settings)?;
        let text = |name: &str| config.get(name).and_then(Value::as_str);
        let mode = annotations.get("sidecar.istio.io/interceptionMode").or_else(|| text("interceptionMode"));
        let mode = Mode::parse(mode.unwrap_or("REDIRECT")).ok_or_else(|| {
            InjectError::Config("interceptionMode is not REDIRECT, TPROXY or NONE".to_owned())
        })?;
        let native = annotations.boolean("sidecar.istio.io/nativeSidecar");
        let image = annotations.get("sidecar.istio.io/proxyImage").filter(|image| image.contains('/'));
        let labels = text_map(&pod["metadata"]["labels"]);
        let label = |name: &str| labels.get(name).map(|text| (*text).to_owned());
        let id = |field: &str| overlay.and_then(|overlay| overlay["securityContext"][field].as_u64());
        let status = annotations.get("status.sidecar.istio.io/port").and_then(|port| port.parse().ok());
        Ok(Self {
            settings,
            image: image.unwrap_or(&settings.image).to_owned(),
            mode,
            native: native.unwrap_or(settings.native_sidecars),
            network: label(NETWORK).unwrap_or_else(|| settings.network.clone()),
            workload_name: label("service.istio.io/workload-name").unwrap_or_else(|| owner.name.clone()),
            status_port: status.unwrap_or_else(|| settings.status_port()),
            // Connections of user 0 are never exempt from interception.
            user: id("runAsUser").filter(|user| *user > 0).unwrap_or(USER),
            group: id("runAsGroup").unwrap_or(USER),
            resources: resources(&annotations, settings),
            config,
            annotations,
        })
    }

    /// Returns the variables of `proxyMetadata`.
    pub(crate) fn variables(&self) -> Vec<Value> {
        let all = self.config.get("proxyMetadata").and_then(Value::as_object);
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let variable = |(name, value): (&String, &Value)| json!({ "name": name, "value": text(value) });
        all.into_iter().flatten().map(variable).collect()
    }

    pub(crate) fn set_pull_policy(&self, container: &mut Value) {
        if !self.settings.pull_policy.is_empty() {
            container["imagePullPolicy"] = self.settings.pull_policy.as_str().into();
        }
    }

    fn rewrites_probes(&self) -> bool {
        let own = self.annotations.boolean("sidecar.istio.io/rewriteAppHTTPProbers");
        self.status_port > 0 && own.unwrap_or(self.settings.rewrite_probes)
    }

    fn merges_metrics(&self) -> bool {
        let own = self.annotations.boolean("prometheus.istio.io/merge-metrics");
        self.status_port > 0 && own.unwrap_or(self.settings.merge_metrics)
    }

    /// Returns whether the sidecar is the first of the ordinary containers.
    fn holds(&self) -> bool {
        self.config.get("holdApplicationUntilProxyStarts").and_then(Value::as_bool).unwrap_or(false)
    }

    fn warnings(&self, containers: &[Value]) -> Vec<String> {
        let mut warnings = self.annotations.warnings();
        if self.holds() && !self.native {
            warnings.push(
                "holdApplicationUntilProxyStarts only orders the containers: they wait for native sidecars alone"
                    .to_owned(),
            );
        }
        for container in containers {
            if container["securityContext"]["runAsUser"].as_u64() == Some(self.user) {
                let name = container["name"].as_str().unwrap_or_default();
                warnings.push(format!(
                    "container {name} has the user id of the sidecar ({}), whose connections are not intercepted",
                    self.user
                ));
            }
        }
        warnings
    }

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
            ("security.istio.io/tlsMode", "istio"),
            ("service.istio.io/canonical-name", &canonical),
            ("service.istio.io/canonical-revision", &revision),
        ] {
            labels.entry(name).or_insert_with(|| value.into());
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
        if self.settings.interceptor == Interceptor::Cni {
            // The plugin reads its settings from annotations.
            annotations.insert("sidecar.istio.io/interceptionMode".into(), self.mode.as_str().into());
        }
    }
}

/// Returns the proxy configuration of a pod: that of the mesh, with the fields of the annotation.
fn proxy_config(annotations: &Annotations, settings: &Settings) -> Result<Map<String, Value>, InjectError> {
    let mut config = Value::Object(settings.default_config.clone());
    if let Some(text) = annotations.get(CONFIG)
        && let Some(document) = skysail_yaml::documents(text).next()
    {
        let invalid = |problem: String| InjectError::Config(format!("annotation {CONFIG}: {problem}"));
        match document.root.map_err(|error| invalid(error.to_string()))?.to_json() {
            Value::Null => {}
            own @ Value::Object(_) => merge::mapping(&mut config, &own),
            _ => return Err(invalid("it is not a mapping".to_owned())),
        }
    }
    match config {
        Value::Object(config) => Ok(config),
        _ => Ok(Map::new()),
    }
}

/// Returns the resources of the sidecar: those of the annotations alone, if there is one.
fn resources(annotations: &Annotations, settings: &Settings) -> Value {
    let mut resources = json!({});
    for (name, group, resource) in [
        ("proxyCPU", "requests", "cpu"),
        ("proxyMemory", "requests", "memory"),
        ("proxyCPULimit", "limits", "cpu"),
        ("proxyMemoryLimit", "limits", "memory"),
    ] {
        if let Some(quantity) = annotations.get(&format!("sidecar.istio.io/{name}")) {
            resources[group][resource] = quantity.into();
        }
    }
    if resources == json!({}) { settings.resources.clone() } else { resources }
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
