//! Settings of injection: those of the control plane, not of a pod.

use serde_json::{Map, Value, json};
use skysail_core::names::{DISCOVERY_TLS_PORT, MERGED_METRICS_PORT};

/// Name of the sidecar's container.
pub(crate) const NAME: &str = "istio-proxy";

/// Part that redirects connections to the sidecar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interceptor {
    /// An init container in the pod, with the capability NET_ADMIN.
    #[default]
    InitContainer,
    /// A CNI plugin on the node. The pod passes the "restricted" pod security standard.
    Cni,
}

/// Settings of injection.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Image of skysail-proxy.
    pub image: String,
    /// `imagePullPolicy` of the injected containers; empty for the default of Kubernetes.
    pub pull_policy: String,
    /// Host and port of the control plane; `discoveryAddress` in the proxy configuration overrides it.
    pub control_plane: String,
    /// Revision of the control plane. Default `default`.
    pub revision: String,
    /// Whether this control plane also injects pods of namespaces with `istio-injection: enabled`, as Istio's default
    /// revision does.
    pub is_default_revision: bool,
    /// Cluster of the pods.
    pub cluster_id: String,
    /// Network of the pods; empty if there is only one.
    pub network: String,
    /// Trust domain of the mesh.
    pub trust_domain: String,
    /// DNS domain of the cluster.
    pub cluster_domain: String,
    /// `defaultConfig` of the mesh configuration.
    pub default_config: Map<String, Value>,
    /// Whether sidecars are native ones: init containers that keep running. The annotation
    /// `sidecar.istio.io/nativeSidecar` of a pod overrides it.
    pub native_sidecars: bool,
    /// Part that redirects connections.
    pub interceptor: Interceptor,
    /// Resources of sidecars without annotations about them.
    pub resources: Value,
    /// Whether probes are sent to the sidecar. The annotation `sidecar.istio.io/rewriteAppHTTPProbers` overrides it.
    pub rewrite_probes: bool,
    /// Whether the sidecar serves the metrics of the workload. The annotation `prometheus.istio.io/merge-metrics`
    /// overrides it.
    pub merge_metrics: bool,
}

/// Error of a mesh configuration.
#[derive(Debug, thiserror::Error)]
pub enum MeshSettingsError {
    /// The text is not YAML.
    #[error("the mesh configuration is not YAML: {0}")]
    Syntax(#[from] skysail_yaml::SyntaxError),
    /// A field has another type than it should have.
    #[error("the mesh configuration: {field} is not {expected}")]
    Type {
        /// Name of the field.
        field: &'static str,
        /// Type that the field should have.
        expected: &'static str,
    },
}

impl Settings {
    /// Returns the default settings with an image.
    pub fn new(image: impl Into<String>) -> Self {
        Self {
            image: image.into(),
            pull_policy: String::new(),
            control_plane: format!("istiod.istio-system.svc:{DISCOVERY_TLS_PORT}"),
            revision: "default".into(),
            is_default_revision: true,
            cluster_id: "Kubernetes".into(),
            network: String::new(),
            trust_domain: "cluster.local".into(),
            cluster_domain: "cluster.local".into(),
            default_config: Map::new(),
            native_sidecars: true,
            interceptor: Interceptor::default(),
            resources: json!({ "requests": { "cpu": "10m", "memory": "16Mi" } }),
            rewrite_probes: true,
            merge_metrics: true,
        }
    }

    /// Applies the fields of a mesh configuration (`MeshConfig`, YAML) that concern injection.
    ///
    /// # Errors
    /// When the text is not YAML, or a field has a wrong type.
    pub fn apply_mesh_config(&mut self, yaml: &str) -> Result<(), MeshSettingsError> {
        let Some(document) = skysail_yaml::embedded(yaml) else { return Ok(()) };
        let mesh = document.root?.to_json();
        match mesh.get("defaultConfig") {
            None | Some(Value::Null) => {}
            Some(Value::Object(config)) => self.default_config = config.clone(),
            Some(_) => return Err(MeshSettingsError::Type { field: "defaultConfig", expected: "a mapping" }),
        }
        match mesh.get("trustDomain") {
            None | Some(Value::Null) => {}
            Some(Value::String(domain)) => self.trust_domain.clone_from(domain),
            Some(_) => return Err(MeshSettingsError::Type { field: "trustDomain", expected: "a text" }),
        }
        match mesh.get("enablePrometheusMerge") {
            None | Some(Value::Null) => {}
            Some(Value::Bool(merge)) => self.merge_metrics = *merge,
            Some(_) => {
                return Err(MeshSettingsError::Type {
                    field: "enablePrometheusMerge",
                    expected: "true or false",
                });
            }
        }
        Ok(())
    }

    /// Returns the port of probes and merged metrics: `statusPort` of the mesh's default configuration.
    pub(crate) fn status_port(&self) -> u16 {
        let port = self.default_config.get("statusPort").and_then(Value::as_u64);
        port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0).unwrap_or(MERGED_METRICS_PORT)
    }
}
