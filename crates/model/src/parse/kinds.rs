//! Which kinds there are, which of them we act on, and what to say about the others.

use super::decode::nearest;
use crate::{api::Kind, diagnostic::Severity};

/// What a document is.
pub(super) enum Known {
    /// A kind we act on.
    Kind(Kind),
    /// Another: how bad that is, what to say, what to do.
    Other(Severity, String, String),
}

/// API groups of the mesh, and the versions Istio serves of them.
const MESH_GROUPS: &[(&str, &[&str])] = &[
    ("networking.istio.io", &["v1", "v1beta1", "v1alpha3"]),
    ("security.istio.io", &["v1", "v1beta1"]),
    ("telemetry.istio.io", &["v1", "v1alpha1"]),
    ("extensions.istio.io", &["v1alpha1"]),
    ("gateway.networking.k8s.io", &["v1", "v1beta1", "v1alpha2", "v1alpha3"]),
    ("install.istio.io", &["v1alpha1"]),
];

/// The kinds we act on, by API group.
const SUPPORTED: &[(&str, Kind)] = &[
    ("", Kind::Namespace),
    ("", Kind::Node),
    ("", Kind::Service),
    ("", Kind::ServiceAccount),
    ("", Kind::Pod),
    ("", Kind::ConfigMap),
    ("apps", Kind::Deployment),
    ("discovery.k8s.io", Kind::EndpointSlice),
    ("networking.istio.io", Kind::VirtualService),
    ("networking.istio.io", Kind::DestinationRule),
    ("networking.istio.io", Kind::ServiceEntry),
    ("security.istio.io", Kind::PeerAuthentication),
    ("security.istio.io", Kind::AuthorizationPolicy),
];

/// Kinds that change what a mesh does, and that we do not do yet.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    (
        "networking.istio.io",
        &["Gateway", "Sidecar", "EnvoyFilter", "WorkloadEntry", "WorkloadGroup", "ProxyConfig"],
    ),
    ("security.istio.io", &["RequestAuthentication"]),
    ("telemetry.istio.io", &["Telemetry"]),
    ("extensions.istio.io", &["WasmPlugin", "TrafficExtension"]),
    (
        "gateway.networking.k8s.io",
        &[
            "Gateway",
            "GatewayClass",
            "HTTPRoute",
            "GRPCRoute",
            "TCPRoute",
            "TLSRoute",
            "UDPRoute",
            "ReferenceGrant",
            "BackendTLSPolicy",
            "ListenerSet",
        ],
    ),
    // Kubernetes' own that make Pods: the mesh takes the Pods, wherever they come from.
    ("apps", &["StatefulSet", "DaemonSet", "ReplicaSet"]),
    ("networking.k8s.io", &["Ingress"]),
    ("", &["Endpoints"]),
];

/// Settings of the mesh configuration that concern how Istio is installed and run, or other things that do not change
/// what sidecars do here.
const HARMLESS_SETTINGS: &[&str] = &[
    "certificates",
    "configSources",
    "ingressClass",
    "ingressControllerMode",
    "ingressSelector",
    "ingressService",
    // Each is used by name, by a Telemetry or an AuthorizationPolicy, which says that it is not supported.
    "extensionProviders",
];

/// Tells what a document is by its `apiVersion` and `kind`.
pub(super) fn classify(version: &str, kind: &str) -> Known {
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    if let Some((_, known)) = SUPPORTED.iter().find(|(g, k)| *g == group && k.as_str() == kind) {
        return check_version(group, version, kind).unwrap_or(Known::Kind(*known));
    }
    let unsupported = UNSUPPORTED.iter().find(|(g, _)| *g == group).map_or(&[][..], |(_, kinds)| *kinds);
    if unsupported.contains(&kind) {
        return Known::Other(
            Severity::Warning,
            format!("{kind} is not supported yet and has no effect"),
            what_instead(kind).to_owned(),
        );
    }
    if let Some((right, _)) = SUPPORTED.iter().find(|(_, k)| k.as_str() == kind).filter(|(g, _)| *g != group)
    {
        return wrong_group(group, version, kind, right);
    }
    if MESH_GROUPS.iter().any(|(g, _)| *g == group) {
        let supported = SUPPORTED.iter().filter(|(g, _)| *g == group).map(|(_, kind)| kind.as_str());
        let all: Vec<&str> = supported.chain(unsupported.iter().copied()).collect();
        let remedy = match nearest(kind, &all) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("it may be one of {}", all.join(", ")),
        };
        return Known::Other(Severity::Error, format!("{group} has no kind {kind}"), remedy);
    }
    let core: Vec<&str> = SUPPORTED.iter().map(|(_, kind)| kind.as_str()).collect();
    match nearest(kind, &core) {
        // `Service` and `Servcie`, but not `Service` and `ServiceMonitor`.
        Some(near) if near.len().abs_diff(kind.len()) < 2 && kind_is_typo(kind, near) => {
            Known::Other(Severity::Error, format!("there is no kind {kind}"), format!("did you mean {near}?"))
        }
        _ => Known::Other(Severity::Info, format!("{kind} means nothing to the mesh"), String::new()),
    }
}

/// What to say about a setting of the mesh configuration that we do not know; `None`: nothing.
pub(super) fn mesh_setting(path: &str) -> Option<String> {
    let top = path.split(['.', '[']).next().unwrap_or(path);
    (!HARMLESS_SETTINGS.contains(&top)).then(|| "this setting is not supported and has no effect".to_owned())
}

fn kind_is_typo(kind: &str, near: &str) -> bool {
    strsim::damerau_levenshtein(kind, near) <= 2
}

fn check_version(group: &str, version: &str, kind: &str) -> Option<Known> {
    let versions = match MESH_GROUPS.iter().find(|(g, _)| *g == group) {
        Some((_, versions)) => versions,
        None => &["v1"][..],
    };
    (!versions.contains(&version)).then(|| {
        let right =
            if group.is_empty() { versions[0].to_owned() } else { format!("{group}/{}", versions[0]) };
        Known::Other(
            Severity::Error,
            format!("{kind} has no version {version:?}"),
            format!("write apiVersion: {right}"),
        )
    })
}

fn wrong_group(group: &str, version: &str, kind: &str, right: &str) -> Known {
    // Other people's kinds of the same name, such as Knative's Service, are none of our business.
    let ours =
        group.is_empty() || MESH_GROUPS.iter().any(|(g, _)| *g == group) || group.ends_with("istio.io");
    if !ours && !matches!(group, "extensions" | "apps" | "core") {
        return Known::Other(
            Severity::Info,
            format!("{kind} of {group} means nothing to the mesh"),
            String::new(),
        );
    }
    let full = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let right = if right.is_empty() { "v1".to_owned() } else { format!("{right}/v1") };
    Known::Other(
        Severity::Error,
        format!("{kind} does not belong to apiVersion {full}"),
        format!("write apiVersion: {right}"),
    )
}

fn what_instead(kind: &str) -> &'static str {
    match kind {
        "StatefulSet" | "DaemonSet" | "ReplicaSet" => {
            "on a cluster its Pods are taken as they are; without one, use a Deployment"
        }
        "Endpoints" => "use an EndpointSlice",
        "Sidecar" => "proxies get what they use anyway",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(version: &str, kind: &str) -> String {
        match classify(version, kind) {
            Known::Kind(kind) => kind.to_string(),
            Known::Other(severity, message, remedy) => format!("{severity}: {message}; {remedy}"),
        }
    }

    #[test]
    fn kinds_are_told_apart() {
        for (version, kind, expected) in [
            ("v1", "Service", "Service"),
            ("networking.istio.io/v1alpha3", "VirtualService", "VirtualService"),
            ("security.istio.io/v1beta1", "PeerAuthentication", "PeerAuthentication"),
            (
                "networking.istio.io/v2",
                "VirtualService",
                "error: VirtualService has no version \"v2\"; write apiVersion: networking.istio.io/v1",
            ),
            (
                "networking.istio.io/v1",
                "VirtualServce",
                "error: networking.istio.io has no kind VirtualServce; did you mean VirtualService?",
            ),
            (
                "networking.istio.io/v1",
                "PeerAuthentication",
                "error: PeerAuthentication does not belong to apiVersion networking.istio.io/v1; write apiVersion: security.istio.io/v1",
            ),
            ("v1", "Servcie", "error: there is no kind Servcie; did you mean Service?"),
            (
                "v1",
                "Deployment",
                "error: Deployment does not belong to apiVersion v1; write apiVersion: apps/v1",
            ),
            (
                "serving.knative.dev/v1",
                "Service",
                "info: Service of serving.knative.dev means nothing to the mesh; ",
            ),
            ("v1", "Secret", "info: Secret means nothing to the mesh; "),
            (
                "monitoring.coreos.com/v1",
                "ServiceMonitor",
                "info: ServiceMonitor means nothing to the mesh; ",
            ),
            (
                "networking.istio.io/v1",
                "Gateway",
                "warning: Gateway is not supported yet and has no effect; ",
            ),
            (
                "gateway.networking.k8s.io/v1",
                "HTTPRoute",
                "warning: HTTPRoute is not supported yet and has no effect; ",
            ),
        ] {
            assert_eq!(said(version, kind), expected);
        }
    }
}
