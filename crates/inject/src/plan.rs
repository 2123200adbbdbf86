//! What the parts of a sidecar depend on: the settings, and the labels and annotations of the pod.

use serde_json::{Map, Value, json};

use crate::{
    annotations::{AnnotationError, Annotations, text_map},
    merge,
    settings::Settings,
};

/// Annotation that lets the sidecar bind ports below 1024, as user 0.
pub(crate) const BIND: &str = "sidecar.istio.io/capNetBindService";
/// User id and group id of the sidecar.
const USER: u64 = 1337;
/// Annotation with the templates of Istio's injector.
const TEMPLATES: &str = "inject.istio.io/templates";
/// Maximum length in bytes of the proxy configuration of a pod, as JSON. A short text may have long aliases.
const MAX_CONFIG: usize = 64 << 10;
/// Annotation with the proxy configuration, in YAML.
const CONFIG: &str = "proxy.istio.io/config";
/// Label with the network of a pod.
pub(crate) const NETWORK: &str = "topology.istio.io/network";

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

/// Proxy that a pod gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Template {
    /// A proxy beside the containers of a workload.
    #[default]
    Sidecar,
    /// A gateway: the proxy is the workload.
    Gateway,
}

impl Template {
    fn of(annotations: &Annotations) -> Result<Self, InjectError> {
        let names: Vec<&str> = annotations
            .get(TEMPLATES)
            .into_iter()
            .flat_map(|names| names.split(','))
            .map(str::trim)
            .collect();
        match names[..] {
            [] | ["sidecar"] => Ok(Self::Sidecar),
            ["gateway"] => Ok(Self::Gateway),
            _ => Err(InjectError::Template(names.join(","))),
        }
    }
}

/// How connections reach the sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Redirect,
    None,
}

impl Mode {
    pub(crate) fn parse(text: &str) -> Result<Self, InjectError> {
        let wrong = |problem: &str| Err(InjectError::Config(format!("interceptionMode {problem}")));
        match text {
            "REDIRECT" => Ok(Self::Redirect),
            "NONE" => Ok(Self::None),
            "TPROXY" => {
                wrong("TPROXY is not supported: the sidecar has no transparent listeners; write REDIRECT")
            }
            _ => wrong("is not REDIRECT, TPROXY or NONE"),
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Redirect => "REDIRECT",
            Self::None => "NONE",
        }
    }
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
    #[error(
        "annotation {TEMPLATES}: there is no template {0:?}; remove the annotation, or write sidecar or gateway"
    )]
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
    pub(crate) template: Template,
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

impl<'a> Plan<'a> {
    pub(crate) fn new(
        pod: &Value,
        owner: &Owner,
        overlay: Option<&Value>,
        settings: &'a Settings,
    ) -> Result<Self, InjectError> {
        let annotations = Annotations::of(pod)?;
        let template = Template::of(&annotations)?;
        let config = proxy_config(&annotations, settings)?;
        let text = |name: &str| config.get(name).and_then(Value::as_str);
        let mode = annotations.get("sidecar.istio.io/interceptionMode").or_else(|| text("interceptionMode"));
        let mode = Mode::parse(mode.unwrap_or("REDIRECT"))?;
        let native = annotations.boolean("sidecar.istio.io/nativeSidecar");
        let native = template == Template::Sidecar && native.unwrap_or(settings.native_sidecars);
        let image = annotations.get("sidecar.istio.io/proxyImage").filter(|image| image.contains('/'));
        let labels = text_map(&pod["metadata"]["labels"]);
        let label = |name: &str| labels.get(name).map(|text| (*text).to_owned());
        let id = |field: &str| overlay.and_then(|overlay| overlay["securityContext"][field].as_u64());
        if annotations.get(BIND) == Some("true") && id("runAsGroup") == Some(0) {
            // User 0 is not exempt from interception, so the group is.
            let problem = "has no effect with runAsGroup 0 of the container istio-proxy: the sidecar would intercept itself";
            return Err(annotations.error(BIND, problem).into());
        }
        let status = annotations.get("status.sidecar.istio.io/port").and_then(|port| port.parse().ok());
        Ok(Self {
            settings,
            image: image.unwrap_or(&settings.image).to_owned(),
            mode,
            template,
            native,
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

    pub(crate) fn is_sidecar(&self) -> bool {
        self.template == Template::Sidecar
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

    pub(crate) fn rewrites_probes(&self) -> bool {
        let own = self.annotations.boolean("sidecar.istio.io/rewriteAppHTTPProbers");
        self.is_sidecar() && self.status_port > 0 && own.unwrap_or(self.settings.rewrite_probes)
    }

    pub(crate) fn merges_metrics(&self) -> bool {
        let own = self.annotations.boolean("prometheus.istio.io/merge-metrics");
        self.status_port > 0 && own.unwrap_or(self.settings.merge_metrics)
    }

    /// Returns whether an ordinary sidecar is the first container, and the others wait for it.
    pub(crate) fn holds(&self) -> bool {
        self.is_sidecar()
            && self.config.get("holdApplicationUntilProxyStarts").and_then(Value::as_bool).unwrap_or(false)
    }

    /// Returns the warnings about a pod and its containers.
    pub(crate) fn warnings<'c>(
        &self,
        pod: &Value,
        containers: impl Iterator<Item = &'c Value>,
    ) -> Vec<String> {
        let mut warnings = self.annotations.warnings();
        let of_pod = pod["spec"]["securityContext"]["runAsUser"].as_u64();
        for container in containers {
            if container["securityContext"]["runAsUser"].as_u64().or(of_pod) == Some(self.user) {
                let name = container["name"].as_str().unwrap_or_default();
                warnings.push(format!(
                    "container {name} has the user id of the sidecar ({}), whose connections are not intercepted",
                    self.user
                ));
            }
        }
        warnings
    }
}

/// Returns the proxy configuration of a pod: that of the mesh, with the fields of the annotation.
fn proxy_config(annotations: &Annotations, settings: &Settings) -> Result<Map<String, Value>, InjectError> {
    let mut config = Value::Object(settings.default_config.clone());
    if let Some(text) = annotations.get(CONFIG)
        && let Some(document) = skysail_yaml::embedded(text)
    {
        let invalid = |problem: String| InjectError::Config(format!("annotation {CONFIG}: {problem}"));
        match document.root.map_err(|error| invalid(error.to_string()))?.to_json() {
            Value::Null => {}
            own if own.to_string().len() > MAX_CONFIG => {
                return Err(invalid(format!("it has more than {MAX_CONFIG} bytes as JSON")));
            }
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
