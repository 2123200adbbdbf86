//! Ingress and IngressClass. Fields are Kubernetes' (`networking.k8s.io`).

use serde::Deserialize;

use super::mesh_config::IgnoredValue;

/// Controller of the IngressClasses that the control plane serves.
pub const CONTROLLER: &str = "istio.io/ingress-controller";

/// Annotation with the class of an Ingress. It takes precedence over `ingressClassName`.
pub const CLASS: &str = "kubernetes.io/ingress.class";

/// `spec` of an Ingress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ingress {
    /// Name of the IngressClass.
    pub ingress_class_name: Option<String>,
    /// Backend of requests that no rule matches; without effect, as in Istio.
    pub default_backend: Option<IngressBackend>,
    /// Certificates.
    pub tls: Vec<IngressTls>,
    /// Rules by host.
    pub rules: Vec<IngressRule>,
}

/// Certificate of an Ingress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct IngressTls {
    /// Hosts; empty: all.
    pub hosts: Vec<String>,
    /// Secret with certificate and key, in the namespace of the gateway's pods.
    pub secret_name: String,
}

/// Rule of an Ingress.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct IngressRule {
    /// Host; empty: all.
    pub host: String,
    /// Paths; `None`: the rule has no effect.
    pub http: Option<IngressPaths>,
}

/// Paths of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct IngressPaths {
    /// Paths.
    pub paths: Vec<IngressPath>,
}

/// Path of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct IngressPath {
    /// Path; empty: all.
    pub path: String,
    /// Comparison.
    pub path_type: Option<PathType>,
    /// Backend.
    pub backend: IngressBackend,
}

/// Comparison of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum PathType {
    /// Equal.
    Exact,
    /// Prefix of whole elements.
    Prefix,
    /// As in Istio: a prefix if it ends in `.*` or `/*`, otherwise equal.
    ImplementationSpecific,
}

/// Backend of a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct IngressBackend {
    /// Service in the namespace of the Ingress.
    pub service: Option<BackendService>,
    /// Other object; not supported.
    pub resource: Option<IgnoredValue>,
}

/// Service of a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BackendService {
    /// Name.
    pub name: String,
    /// Port.
    pub port: BackendPort,
}

/// Port of a backend's service: number or name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BackendPort {
    /// Name.
    pub name: String,
    /// Number; 0: by name.
    pub number: u16,
}

/// `spec` of an IngressClass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct IngressClass {
    /// Controller that serves the Ingresses of the class.
    pub controller: String,
    /// Parameters of the controller; Istio's has none.
    pub parameters: IgnoredValue,
}
