//! Kinds of objects: those that the mesh uses, and messages about the others.

use std::sync::LazyLock;

use crate::{
    analysis::Code,
    api::Kind,
    spelling::{distance, nearest},
};

/// Classification of a document.
#[derive(Debug)]
pub(super) enum DocumentKind {
    /// A kind that the mesh uses.
    Kind(Kind),
    /// Another kind of a known group, or similar to one.
    Other {
        /// Code of the message.
        code: Code,
        message: String,
        remedy: String,
        /// Kind that was probably meant.
        meant: Option<Kind>,
    },
    /// A kind of another project, which does not affect the mesh: the kind and its group.
    Foreign(String),
}

/// API groups and their served versions.
const GROUPS: &[(&str, &[&str])] = &[
    ("", &["v1"]),
    ("apps", &["v1"]),
    ("batch", &["v1"]),
    ("discovery.k8s.io", &["v1"]),
    ("networking.k8s.io", &["v1"]),
    ("networking.istio.io", &["v1", "v1beta1", "v1alpha3"]),
    ("security.istio.io", &["v1", "v1beta1"]),
    ("telemetry.istio.io", &["v1", "v1alpha1"]),
    ("extensions.istio.io", &["v1alpha1"]),
    ("gateway.networking.k8s.io", &["v1", "v1beta1", "v1alpha2", "v1alpha3"]),
    ("gateway.networking.x-k8s.io", &["v1alpha1"]),
    ("install.istio.io", &["v1alpha1"]),
    ("skysail.io", &["v1alpha1"]),
];

/// Kind of routes that no proxy serves.
const UDP_ROUTE: &str = "UDPRoute";

/// Kinds that change the behaviour of a mesh and are not supported yet.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("gateway.networking.k8s.io", &[UDP_ROUTE]),
    ("gateway.networking.x-k8s.io", &["XBackend", "XBackendTrafficPolicy", "XListenerSet", "XMesh"]),
    ("", &["Endpoints"]),
];

/// Kinds of Kubernetes' groups that do not affect a mesh.
const NEUTRAL: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "Binding",
            "ComponentStatus",
            "Event",
            "LimitRange",
            "PersistentVolume",
            "PersistentVolumeClaim",
            "PodTemplate",
            "ReplicationController",
            "ResourceQuota",
        ],
    ),
    ("apps", &["ControllerRevision"]),
    ("networking.k8s.io", &["IPAddress", "NetworkPolicy", "ServiceCIDR"]),
    ("install.istio.io", &["IstioOperator"]),
];

/// Domains of other groups with kinds of the same names: Knative's Service, Linkerd's AuthorizationPolicy.
const FOREIGN_DOMAINS: &[&str] = &[
    "knative.dev",
    "linkerd.io",
    "volcano.sh",
    "traefik.io",
    "cilium.io",
    "getambassador.io",
    "solo.io",
    "cnrm.cloud.google.com",
    "crossplane.io",
];

/// Remedy for a Kustomization.
pub(super) const KUSTOMIZE: &str = "use the output of `kustomize build`";

/// Maximum number of different letters for a word to count as a misspelling.
const MAX_TYPOS: usize = 2;

/// Classifies a document by its `apiVersion` and `kind`.
pub(super) fn classify(api_version: &str, kind: &str) -> DocumentKind {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    match GROUPS.iter().find(|(known, _)| *known == group) {
        Some((_, versions)) => of_group(group, versions, version, kind),
        None => of_unknown_group(group, version, kind),
    }
}

fn of_group(group: &str, versions: &[&str], version: &str, kind: &str) -> DocumentKind {
    let supported = supported(group, kind);
    if kinds(group).any(|known| known == kind) {
        if !versions.contains(&version) {
            let right = api_version(group);
            return error(
                format!("{kind} has no version {version:?}"),
                format!("write apiVersion: {right}"),
                supported,
            );
        }
        if let Some(kind) = supported {
            return DocumentKind::Kind(kind);
        }
        if of(UNSUPPORTED, group).contains(&kind) {
            let (effect, remedy) = consequence(kind);
            let message = format!("{kind} is not supported yet: {effect}");
            // A route is written for its traffic; without it, what the user asks for is missing as a whole.
            let code = if kind == UDP_ROUTE { Code::UnservedRoute } else { Code::UnsupportedKind };
            return DocumentKind::Other { code, message, remedy: remedy.to_owned(), meant: None };
        }
        if let Some((message, remedy)) = not_enforced(kind) {
            return warning(message.to_owned(), remedy);
        }
        return DocumentKind::Foreign(if group.is_empty() {
            kind.to_owned()
        } else {
            format!("{kind} of {group}")
        });
    }
    if let Some(right) = group_of(kind) {
        return misplaced(&full(group, version), kind, right);
    }
    let all: Vec<&str> = kinds(group).collect();
    let message =
        if group.is_empty() { format!("unknown kind {kind}") } else { format!("{group} has no kind {kind}") };
    match nearest(kind, &all) {
        Some(near) => error(message, format!("did you mean {near}?"), self::supported(group, near)),
        None => match nearest_anywhere(kind) {
            Some((right, near)) => {
                let remedy = format!("did you mean {near} of apiVersion {}?", api_version(right));
                error(message, remedy, self::supported(right, near))
            }
            None => error(message, format!("known kinds: {}", all.join(", ")), None),
        },
    }
}

/// Classifies a group that is neither Kubernetes' nor of the mesh: misspelt, or of another project.
fn of_unknown_group(group: &str, version: &str, kind: &str) -> DocumentKind {
    if group == "kustomize.config.k8s.io" {
        return warning(
            "a Kustomization is not built: its patches and settings have no effect".to_owned(),
            KUSTOMIZE,
        );
    }
    if let Some((effect, remedy)) = replaced(group) {
        return warning(format!("{kind} of {group} is not read: {effect}"), remedy);
    }
    if FOREIGN_DOMAINS.iter().any(|domain| group.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.')))
    {
        return DocumentKind::Foreign(format!("{kind} of {group}"));
    }
    let near = GROUPS.iter().map(|(known, _)| *known).filter(|known| !known.is_empty());
    let near = near.min_by_key(|known| distance(known, group)).filter(|known| {
        let letters = distance(known, group);
        // A short word is similar to many others.
        letters <= MAX_TYPOS && (group.len() > 8 || kinds(known).any(|of| distance(of, kind) <= MAX_TYPOS))
    });
    let owner = group_of(kind);
    // Two groups may have a kind of this name; the similar group is meant then.
    let right = near.filter(|near| kinds(near).any(|known| known == kind)).or(owner);
    if let Some(right) = right {
        return misplaced(&full(group, version), kind, right);
    }
    if let Some(near) = near {
        let remedy = format!("did you mean {near}?");
        let all: Vec<&str> = kinds(near).collect();
        let meant = nearest(kind, &all).and_then(|kind| supported(near, kind));
        return error(format!("unknown API group {group:?}"), remedy, meant);
    }
    match nearest_anywhere(kind).filter(|(_, near)| near.len() >= 8) {
        Some((right, near)) => {
            let remedy = format!("did you mean {near} of apiVersion {}?", api_version(right));
            error(format!("{group} is not an API group of the mesh"), remedy, supported(right, near))
        }
        None => DocumentKind::Foreign(format!("{kind} of {group}")),
    }
}

fn warning(message: String, remedy: &str) -> DocumentKind {
    DocumentKind::Other { code: Code::UnsupportedKind, message, remedy: remedy.to_owned(), meant: None }
}

fn error(message: String, remedy: String, meant: Option<Kind>) -> DocumentKind {
    DocumentKind::Other { code: Code::UnknownKind, message, remedy, meant }
}

fn misplaced(api: &str, kind: &str, right: &str) -> DocumentKind {
    let remedy = format!("write apiVersion: {}", api_version(right));
    error(format!("{kind} does not belong to apiVersion {api}"), remedy, supported(right, kind))
}

fn of<'a>(table: &[(&str, &'a [&'a str])], group: &str) -> &'a [&'a str] {
    table.iter().find(|(known, _)| *known == group).map_or(&[], |(_, kinds)| kinds)
}

/// Returns all kinds of a group.
fn kinds(group: &str) -> impl Iterator<Item = &'static str> {
    supported_of(group)
        .map(Kind::as_str)
        .chain(of(UNSUPPORTED, group).iter().copied())
        .chain(of(NEUTRAL, group).iter().copied())
}

/// Returns the kinds of a group that the mesh uses.
fn supported_of(group: &str) -> impl Iterator<Item = Kind> {
    let others = [of(UNSUPPORTED, group), of(NEUTRAL, group)];
    let kinds = Kind::ALL.iter().copied().filter(move |kind| kind.group() == group);
    kinds.filter(move |kind| !others.iter().any(|kinds| kinds.contains(&kind.as_str())))
}

fn supported(group: &str, kind: &str) -> Option<Kind> {
    supported_of(group).find(|known| known.as_str() == kind)
}

/// Groups with their kinds. A text may have tens of thousands of kinds to look up.
static ALL_KINDS: LazyLock<Vec<(&str, &str)>> = LazyLock::new(|| {
    GROUPS.iter().flat_map(|(group, _)| kinds(group).map(|known| (*group, known))).collect()
});

/// Returns the group of a kind. If several have it, returns the one whose kind the mesh uses.
fn group_of(kind: &str) -> Option<&'static str> {
    let groups = || ALL_KINDS.iter().filter(|(_, of)| *of == kind).map(|(group, _)| *group);
    groups().find(|group| supported(group, kind).is_some()).or_else(|| groups().next())
}

/// Returns the kind of any group that was probably meant.
fn nearest_anywhere(kind: &str) -> Option<(&'static str, &'static str)> {
    let all = ALL_KINDS.iter().map(|(group, known)| (distance(known, kind), (*group, *known)));
    let near = all.filter(|(letters, _)| *letters <= MAX_TYPOS).min_by_key(|(letters, _)| *letters);
    near.map(|(_, known)| known)
}

fn full(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// Returns the `apiVersion` of the newest version of a group.
fn api_version(group: &str) -> String {
    let version = GROUPS.iter().find(|(known, _)| *known == group).map_or("v1", |(_, versions)| versions[0]);
    full(group, version)
}

/// Returns the consequence of a kind that has no effect, and the remedy.
fn consequence(kind: &str) -> (&'static str, &'static str) {
    match kind {
        UDP_ROUTE => (
            "the mesh does not intercept UDP, and no gateway listens for it",
            "send the datagrams to the Service itself",
        ),
        "XBackendTrafficPolicy" => (
            "requests are retried without its budget, and sessions have no persistence",
            "set trafficPolicy.retryBudget, connectionPool and loadBalancer in a DestinationRule for the Service",
        ),
        "XBackend" => ("no route finds it as a backend", "use a ServiceEntry"),
        "XListenerSet" => ("nothing listens on its ports", "use ListenerSet of gateway.networking.k8s.io/v1"),
        "XMesh" => ("it has no effect", "write the settings to ConfigMap istio in namespace istio-system"),
        "Endpoints" => ("no service has it as an endpoint", "use an EndpointSlice"),
        _ => ("it has no effect", ""),
    }
}

/// Returns the consequence and the remedy for a group of Istio 1.5 and before.
fn replaced(group: &str) -> Option<(&'static str, &'static str)> {
    Some(match group {
        "authentication.istio.io" => (
            "it enforces neither mutual TLS nor tokens",
            "use PeerAuthentication and RequestAuthentication of security.istio.io/v1",
        ),
        "rbac.istio.io" => ("it denies no request", "use AuthorizationPolicy of security.istio.io/v1"),
        _ => return None,
    })
}

/// Returns the consequence and the remedy for kinds that people rely on and that the mesh does not read.
fn not_enforced(kind: &str) -> Option<(&'static str, &'static str)> {
    Some(match kind {
        "NetworkPolicy" => (
            "the mesh does not enforce a NetworkPolicy",
            "use an AuthorizationPolicy, or have the cluster's network enforce it",
        ),
        "IstioOperator" => (
            "IstioOperator installs Istio and is not read, so its meshConfig has no effect",
            "write meshConfig to key mesh of ConfigMap istio in namespace istio-system",
        ),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(version: &str, kind: &str) -> String {
        match classify(version, kind) {
            DocumentKind::Kind(kind) => kind.to_string(),
            DocumentKind::Other { code, message, remedy, meant } => {
                let meant = meant.map_or(String::new(), |kind| format!(" ({kind})"));
                format!("{}: {message}; {remedy}{meant}", code.severity())
            }
            DocumentKind::Foreign(kind) => format!("foreign: {kind}"),
        }
    }

    #[test]
    fn kinds_are_classified() {
        for (version, kind, expected) in [
            ("v1", "Service", "Service"),
            ("networking.istio.io/v1alpha3", "VirtualService", "VirtualService"),
            ("security.istio.io/v1beta1", "PeerAuthentication", "PeerAuthentication"),
            (
                "networking.istio.io/v2",
                "VirtualService",
                "error: VirtualService has no version \"v2\"; write apiVersion: networking.istio.io/v1 (VirtualService)",
            ),
            (
                "networking.istio.io/v1",
                "VirtualServce",
                "error: networking.istio.io has no kind VirtualServce; did you mean VirtualService? (VirtualService)",
            ),
            (
                "networking.istio.io/v1",
                "PeerAuthentication",
                "error: PeerAuthentication does not belong to apiVersion networking.istio.io/v1; write apiVersion: security.istio.io/v1 (PeerAuthentication)",
            ),
            ("v1", "Servcie", "error: unknown kind Servcie; did you mean Service? (Service)"),
            (
                "v1",
                "Deployment",
                "error: Deployment does not belong to apiVersion v1; write apiVersion: apps/v1 (Deployment)",
            ),
            (
                "security.istio.o/v1",
                "PeerAuthentication",
                "error: PeerAuthentication does not belong to apiVersion security.istio.o/v1; write apiVersion: security.istio.io/v1 (PeerAuthentication)",
            ),
            (
                "networking.istio.com/v1",
                "VirtualService",
                "error: VirtualService does not belong to apiVersion networking.istio.com/v1; write apiVersion: networking.istio.io/v1 (VirtualService)",
            ),
            (
                "security.isto.io/v1",
                "AuthorizationPolcy",
                "error: unknown API group \"security.isto.io\"; did you mean security.istio.io? (AuthorizationPolicy)",
            ),
            (
                "example.com/v1",
                "DestinationRules",
                "error: example.com is not an API group of the mesh; did you mean DestinationRule of apiVersion networking.istio.io/v1? (DestinationRule)",
            ),
            (
                "app/v1",
                "Deployment",
                "error: Deployment does not belong to apiVersion app/v1; write apiVersion: apps/v1 (Deployment)",
            ),
            (
                "extensions/v1beta1",
                "Ingress",
                "error: Ingress does not belong to apiVersion extensions/v1beta1; write apiVersion: networking.k8s.io/v1 (Ingress)",
            ),
            ("serving.knative.dev/v1", "Service", "foreign: Service of serving.knative.dev"),
            (
                "policy.linkerd.io/v1",
                "AuthorizationPolicy",
                "foreign: AuthorizationPolicy of policy.linkerd.io",
            ),
            ("v1", "PersistentVolumeClaim", "foreign: PersistentVolumeClaim"),
            ("rbac.authorization.k8s.io/v1", "Role", "foreign: Role of rbac.authorization.k8s.io"),
            (
                "monitoring.coreos.com/v1",
                "ServiceMonitor",
                "foreign: ServiceMonitor of monitoring.coreos.com",
            ),
            ("policy/v1", "PodDisruptionBudget", "foreign: PodDisruptionBudget of policy"),
            ("autoscaling/v2", "HorizontalPodAutoscaler", "foreign: HorizontalPodAutoscaler of autoscaling"),
            ("networking.istio.io/v1", "Gateway", "Gateway"),
            (
                "gateway.networking.k8s.io/v1",
                "UDPRoute",
                "error: UDPRoute is not supported yet: the mesh does not intercept UDP, and no gateway listens for it; send the datagrams to the Service itself",
            ),
        ] {
            assert_eq!(describe(version, kind), expected);
        }
    }
}
