//! Annotations of Istio on objects of Kubernetes: unknown ones, and those of other kinds of objects.

use skysail_yaml::join;

use super::{
    Code, Findings,
    injection::{self, DEPRECATED},
};
use crate::{
    api::{Kind, Labels},
    spelling::nearest,
};

/// Annotations that any object may have. Source of all tables: Istio's `annotations.yaml`.
const OF_ANY: &[&str] =
    &["galley.istio.io/analyze-suppress", "gateway.istio.io/controller-version", "istio.io/rev"];

/// Annotations of Pods, besides those of injection.
const OF_PODS: &[&str] = &[
    "ambient.istio.io/bypass-inbound-capture",
    "ambient.istio.io/dns-capture",
    "ambient.istio.io/redirection",
    "inject.istio.io/templates",
    "istio.io/reroute-virtual-interfaces",
    "prometheus.istio.io/merge-metrics",
    "readiness.status.sidecar.istio.io/applicationPorts",
    "readiness.status.sidecar.istio.io/failureThreshold",
    "readiness.status.sidecar.istio.io/initialDelaySeconds",
    "readiness.status.sidecar.istio.io/periodSeconds",
    "status.sidecar.istio.io/port",
];

/// Annotations of other kinds.
const OF_OTHERS: &[(&str, &[Kind])] = &[
    ("alpha.istio.io/canonical-serviceaccounts", &[Kind::Service]),
    ("alpha.istio.io/kubernetes-serviceaccounts", &[Kind::Service]),
    ("ambient.istio.io/waypoint-inbound-binding", &[Kind::GatewayClass, Kind::KubernetesGateway]),
    ("gateway.istio.io/name-override", &[Kind::KubernetesGateway]),
    ("gateway.istio.io/service-account", &[Kind::KubernetesGateway]),
    ("istio.io/autoRegistrationGroup", &[Kind::WorkloadEntry]),
    ("istio.io/connectedAt", &[Kind::WorkloadEntry]),
    ("istio.io/disconnectedAt", &[Kind::WorkloadEntry]),
    ("istio.io/dry-run", &[Kind::AuthorizationPolicy]),
    ("istio.io/use-waypoint-canary-weight", &[Kind::Service, Kind::ServiceEntry, Kind::Namespace]),
    ("istio.io/workloadController", &[Kind::WorkloadEntry]),
    ("kubernetes.io/ingress.class", &[Kind::Ingress]),
    ("networking.istio.io/exportTo", &[Kind::Service]),
    ("networking.istio.io/service-type", &[Kind::KubernetesGateway]),
    ("networking.istio.io/traffic-distribution", &[Kind::Namespace, Kind::Service, Kind::ServiceEntry]),
    ("topology.istio.io/controlPlaneClusters", &[Kind::Namespace]),
    ("traffic.istio.io/nodeSelector", &[Kind::Service]),
];

/// Checks the annotations of a Namespace, a Service, a Pod or an object that makes Pods.
pub(super) fn check(kind: Kind, annotations: &Labels, findings: &mut Findings) {
    let makes_pods = kind.makes_pods();
    if !makes_pods && !matches!(kind, Kind::Namespace | Kind::Service | Kind::Pod) {
        return;
    }
    for key in annotations.keys().map(String::as_str).filter(|key| is_of_istio(key)) {
        let field = join("metadata.annotations", key);
        if makes_pods && let Some((_, replacement)) = DEPRECATED.iter().find(|(known, _)| *known == key) {
            findings.add(Code::DeprecatedAnnotation, &field, "is deprecated", *replacement);
        }
        let owners = owners(key);
        if OF_ANY.contains(&key) || owners.contains(&kind) || is_checked_with_injection(kind, key) {
            continue;
        }
        if owners.is_empty() {
            findings.add(Code::UnknownAnnotation, field, "is unknown and has no effect", meant(key));
            continue;
        }
        let names = owners.iter().map(|kind| kind.as_str()).collect::<Vec<_>>().join(" or ");
        let remedy = if owners == [Kind::Pod] {
            "move it to the annotations of the pod template".to_owned()
        } else {
            format!("move it to an object of kind {names}")
        };
        let message = format!("has no effect on a {kind}: it is an annotation of kind {names}");
        findings.add(Code::MisplacedAnnotation, field, message, remedy);
    }
}

/// Returns whether an annotation is documented by Istio, or has its domain.
fn is_of_istio(key: &str) -> bool {
    key == "kubernetes.io/ingress.class"
        || key.split('/').next().is_some_and(|domain| domain == "istio.io" || domain.ends_with(".istio.io"))
}

/// Returns the kinds of objects that an annotation is for; none for unknown annotations.
fn owners(key: &str) -> &'static [Kind] {
    if OF_PODS.contains(&key) || injection::KNOWN.contains(&key) {
        return &[Kind::Pod];
    }
    OF_OTHERS.iter().find(|(known, _)| *known == key).map_or(&[], |(_, kinds)| kinds)
}

/// Returns whether the check of injection reports an annotation: the unknown ones of its domains on Pods, and its switch
/// on objects that make Pods.
fn is_checked_with_injection(kind: Kind, key: &str) -> bool {
    kind == Kind::Pod && injection::is_of_domain(key) || kind.makes_pods() && key == injection::INJECT
}

/// Returns the annotation that was probably meant.
fn meant(key: &str) -> String {
    let of_others = OF_OTHERS.iter().map(|(known, _)| known);
    let known: Vec<&str> =
        OF_ANY.iter().chain(OF_PODS).chain(injection::KNOWN).chain(of_others).copied().collect();
    nearest(key, &known).map_or_else(String::new, |near| format!("did you mean {near}?"))
}
