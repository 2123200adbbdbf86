//! Annotations and labels of Linkerd and Open Service Mesh, which have no effect here.

use skysail_yaml::{Node, Value, join};

use super::{Code, Finding, Findings};

/// Domains of keys, each with its mesh.
const DOMAINS: &[(&str, &str)] = &[("linkerd.io", "Linkerd"), ("openservicemesh.io", "Open Service Mesh")];

/// Keys of other meshes, each with the remedy that names Istio's counterpart.
const COUNTERPARTS: &[(&str, &str)] = &[
    ("linkerd.io/inject", "use the label sidecar.istio.io/inject"),
    ("config.linkerd.io/skip-inbound-ports", "use traffic.sidecar.istio.io/excludeInboundPorts"),
    ("config.linkerd.io/skip-outbound-ports", "use traffic.sidecar.istio.io/excludeOutboundPorts"),
    ("config.linkerd.io/skip-subnets", "use traffic.sidecar.istio.io/excludeOutboundIPRanges"),
    ("config.linkerd.io/opaque-ports", "name the port tcp-..., or set appProtocol: tcp"),
    ("config.linkerd.io/default-inbound-policy", "use an AuthorizationPolicy and a PeerAuthentication"),
    ("balancer.linkerd.io/failure-accrual", "use outlierDetection of a DestinationRule"),
    (
        "balancer.linkerd.io/failure-accrual-consecutive-max-failures",
        "use outlierDetection of a DestinationRule",
    ),
    ("retry.linkerd.io/http", "use retries of a VirtualService"),
    ("retry.linkerd.io/grpc", "use retries of a VirtualService"),
    ("retry.linkerd.io/limit", "use retries.attempts of a VirtualService"),
    ("retry.linkerd.io/timeout", "use retries.perTryTimeout of a VirtualService"),
    ("timeout.linkerd.io/request", "use timeout of a VirtualService"),
    ("timeout.linkerd.io/response", "use timeout of a VirtualService"),
    ("openservicemesh.io/sidecar-injection", "use the label istio-injection or sidecar.istio.io/inject"),
    ("openservicemesh.io/monitored-by", "use the label istio-injection"),
    ("openservicemesh.io/inbound-port-exclusion-list", "use traffic.sidecar.istio.io/excludeInboundPorts"),
    ("openservicemesh.io/outbound-port-exclusion-list", "use traffic.sidecar.istio.io/excludeOutboundPorts"),
    (
        "openservicemesh.io/outbound-ip-range-exclusion-list",
        "use traffic.sidecar.istio.io/excludeOutboundIPRanges",
    ),
    (
        "openservicemesh.io/outbound-ip-range-inclusion-list",
        "use traffic.sidecar.istio.io/includeOutboundIPRanges",
    ),
];

/// Warns about annotations and labels of other meshes, of an object and of the pods that it makes.
pub(crate) fn other_meshes(root: &Node) -> Vec<Finding> {
    let mut findings = Findings::default();
    let template = root.get("spec").and_then(|spec| spec.get("template"));
    let places = [(Some(root), "metadata"), (template, "spec.template.metadata")];
    for (object, at) in places {
        let Some(metadata) = object.and_then(|object| object.get("metadata")) else { continue };
        for name in ["annotations", "labels"] {
            let Some(Value::Map(entries)) = metadata.get(name).map(|map| &map.value) else { continue };
            for entry in entries {
                if let Some(mesh) = mesh_of(&entry.key) {
                    let known = COUNTERPARTS.iter().find(|(key, _)| *key == entry.key);
                    let remedy = known.map_or("remove it", |(_, counterpart)| counterpart);
                    let field = join(&format!("{at}.{name}"), &entry.key);
                    findings.add(Code::OtherMesh, field, format!("is read by {mesh} only"), remedy);
                }
            }
        }
    }
    findings.done()
}

/// Returns the mesh that reads a key; `None` for another program.
fn mesh_of(key: &str) -> Option<&'static str> {
    let domain = key.split_once('/')?.0;
    let of = |end: &str| domain.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    DOMAINS.iter().find(|(end, _)| of(end)).map(|(_, mesh)| *mesh)
}
