//! Differences between the findings of Skysail and those of istioctl, each with its reason.

/// A finding of istioctl that Skysail deliberately does not report.
pub(super) struct NotFound {
    /// First file of the case.
    pub(super) file: &'static str,
    pub(super) code: &'static str,
    /// Object, in lower case and without namespace `default`.
    pub(super) object: &'static str,
    pub(super) reason: &'static str,
}

/// Findings of istioctl that Skysail deliberately does not report.
pub(super) const NOT_FOUND: &[NotFound] = &[
    NotFound {
        file: "deprecation.yaml",
        code: "IST0002",
        object: "sidecar no-selector",
        reason: "the host is not a full name (SKY0109), and `egressProxy` is supported, as in Istio",
    },
    NotFound {
        file: "service-no-port-name.yaml",
        code: "IST0118",
        object: "service my-namespace1/my-service1",
        reason: "the API server refuses several ports without names (SKY0101)",
    },
    NotFound {
        file: "virtualservice_conflictingmeshgatewayhosts_with_exportto.yaml",
        code: "IST0109",
        object: "virtualservice foo/productpage-d",
        reason: "its wildcard is longer, so it takes precedence on its hosts, and the other one has the rest",
    },
    NotFound {
        file: "virtualservice_conflictingmeshgatewayhosts_with_exportto.yaml",
        code: "IST0109",
        object: "virtualservice bar/productpage-d",
        reason: "the longer wildcard takes precedence on its hosts, and this one has the rest",
    },
    NotFound {
        file: "virtualservice_destinationhosts.yaml",
        code: "IST0101",
        object: "virtualservice reviews-bogushost",
        reason: "a destination without a host (SKY0102) has the object refused",
    },
    NotFound {
        file: "virtualservice_gateways.yaml",
        code: "IST0132",
        object: "virtualservice cross-test",
        reason: "a Gateway without servers is refused (SKY0101); the completed server has a host within `*`",
    },
    NotFound {
        file: "virtualservice_gateways.yaml",
        code: "IST0132",
        object: "virtualservice httpbin",
        reason: "a Gateway without servers is refused (SKY0101); the completed server has a host within `*`",
    },
    NotFound {
        file: "virtualservice_gateways.yaml",
        code: "IST0132",
        object: "virtualservice httpbin-bogus",
        reason: "the Gateway does not exist, which SKY0606 (IST0101) says about the same object",
    },
    NotFound {
        file: "image-auto.yaml",
        code: "IST0146",
        object: "deployment not-injected/non-injected-gateway-deployment",
        reason: "injection is enabled by default, so the image is replaced",
    },
    NotFound {
        file: "image-auto.yaml",
        code: "IST0147",
        object: "pod injected-pod",
        reason: "files have the state before injection, which replaces the image",
    },
    NotFound {
        file: "relative-envoy-filter-operation.yaml",
        code: "IST0151",
        object: "envoyfilter bookinfo/test-relative-3",
        reason: "a match of listeners for clusters (SKY0104) has the object refused, by Istio's validation too",
    },
    NotFound {
        file: "relative-envoy-filter-operation.yaml",
        code: "IST0155",
        object: "envoyfilter bookinfo/test-relative-3",
        reason: "a match of listeners for clusters (SKY0104) has the object refused, by Istio's validation too",
    },
    NotFound {
        file: "envoy-filter-add-operation.yaml",
        code: "IST0153",
        object: "envoyfilter bookinfo/test-auth-3",
        reason: "the mesh applies ADD to routes, and so does Istio",
    },
    NotFound {
        file: "envoy-filter-remove-operation.yaml",
        code: "IST0154",
        object: "envoyfilter bookinfo/test-remove-3",
        reason: "a match of listeners for routes (SKY0104) has the object refused, by Istio's validation too",
    },
];

const NO_SERVICE: &str = "true: no Service is in the input; another analyzer (IST0101) finds it";
const SAME_HOST: &str =
    "true: both serve the host for the namespace; istioctl compares texts, with their prefixes";

/// Findings of ours that istioctl does not have: first file of the case, code, and why the finding is right.
pub(super) const JUDGED: &[(&str, &str, &str)] = &[
    ("authorizationpolicies.yaml", "SKY0312", "true: Istio's validation refuses a wildcard with DNS too"),
    (
        "authorizationpolicies.yaml",
        "SKY0610",
        "true: no workload has the account; istioctl does not check accounts",
    ),
    ("condition-analyzer.yaml", "SKY0101", "true: Istio's validation demands hosts of a ServiceEntry too"),
    ("condition-analyzer.yaml", "SKY0630", "true: the parent of the route does not exist"),
    (
        "conflicting-gateways-invalid-port.yaml",
        "SKY0101",
        "true: Istio's validation demands the port of a server too",
    ),
    ("deprecation.yaml", "SKY0008", "true: current versions of the kind do not have the fields"),
    ("envoy-filter-add-operation.yaml", "SKY0008", "true: the kind has no field `app`"),
    ("envoy-filter-remove-operation.yaml", "SKY0101", "true: a patch without an operation does nothing"),
    (
        "envoy-filter-remove-operation.yaml",
        "SKY0316",
        "true: Istio removes a network filter by its name only",
    ),
    ("envoy-filter-replace-operation.yaml", "SKY0316", "true: Istio replaces a filter by its name only"),
    (
        "gateway-secrets-validation.yaml",
        "SKY0412",
        "true: keys are missing or do not belong to the certificate; istioctl reports the Gateways only",
    ),
    ("gateway-secrets.yaml", "SKY0101", "true: Istio's validation demands files or a Secret too"),
    (
        "gateway-secrets.yaml",
        "SKY0412",
        "true: the key does not belong to the certificate; istioctl does not compare them",
    ),
    (
        "gateway-secrets.yaml",
        "SKY0608",
        "true: the only Secret of this name is refused, because its key is of another certificate",
    ),
    ("gateway-secrets.yaml", "SKY0717", "true: both serve the host; another analyzer (IST0145) finds it"),
    ("k8sgateway-selector.yaml", "SKY0103", "true: Istio's validation refuses both fields together too"),
    ("misannotated.yaml", "SKY0008", "true: `networking.k8s.io/v1` has no such fields"),
    ("misannotated.yaml", "SKY0101", "true: `networking.k8s.io/v1` demands `pathType`"),
    (
        "service-no-port-name-system-namespace.yaml",
        "SKY0101",
        "true: the API server refuses several ports without names",
    ),
    (
        "service-port-name.yaml",
        "SKY0502",
        "a note: waypoints, whose port `mesh` istioctl leaves out, do not exist here",
    ),
    (
        "serviceentry-address-allocated.yaml",
        "SKY0709",
        "true: hosts with resolution NONE get no address; the status is made up",
    ),
    ("sidecar-default-selector.yaml", "SKY0102", "true: Istio's validation refuses an empty Sidecar too"),
    ("virtualservice_conflictingmeshgatewayhosts.yaml", "SKY0601", NO_SERVICE),
    ("virtualservice_conflictingmeshgatewayhosts_with_exportto.yaml", "SKY0601", NO_SERVICE),
    (
        "virtualservice_destinationhosts.yaml",
        "SKY0109",
        "true: Istio's validation refuses host `*` of a ServiceEntry too",
    ),
    (
        "virtualservice_destinationhosts.yaml",
        "SKY0601",
        "true: no cluster has the name of a host that only a wildcard covers, neither here nor in Istio",
    ),
    (
        "virtualservice_destinationhosts.yaml",
        "SKY0603",
        "true: no DestinationRule is in the input; another analyzer (IST0101) finds it",
    ),
    (
        "virtualservice_destinationhosts.yaml",
        "SKY0605",
        "true: `spec.hosts` names a Service that is in another namespace; istioctl does not check it",
    ),
    (
        "virtualservice_destinationhosts.yaml",
        "SKY0613",
        "true: no workload is in the input; istioctl does not check selectors of Services",
    ),
    ("virtualservice_destinationrules.yaml", "SKY0601", NO_SERVICE),
    ("virtualservice_destinationrules.yaml", "SKY0605", NO_SERVICE),
    ("virtualservice_dupmatches.yaml", "SKY0218", "true: prefix `/` covers path `/`"),
    ("virtualservice_dupmatches.yaml", "SKY0601", NO_SERVICE),
    (
        "virtualservice_dupmatches.yaml",
        "SKY0701",
        "true: several have the host; another analyzer (IST0109) finds it",
    ),
    ("virtualservice_gateways.yaml", "SKY0206", "true: Istio's validation refuses host `*` for the mesh too"),
    ("virtualservice_gateways.yaml", "SKY0717", "true for the completed servers"),
    ("virtualservice_host_not_found_gateway.yaml", "SKY0601", NO_SERVICE),
    ("virtualservice_host_not_found_gateway_beta.yaml", "SKY0601", NO_SERVICE),
    ("virtualservice_host_not_found_gateway_with_ns_prefix.yaml", "SKY0601", NO_SERVICE),
    ("virtualservice_host_not_found_gateway_with_ns_prefix.yaml", "SKY0717", SAME_HOST),
    ("virtualservice_host_not_found_gateway_with_ns_prefix_beta.yaml", "SKY0601", NO_SERVICE),
    ("virtualservice_host_not_found_gateway_with_ns_prefix_beta.yaml", "SKY0717", SAME_HOST),
    ("virtualservice_internal_gateway_ref.yaml", "SKY0601", NO_SERVICE),
    (
        "virtualservice_internal_gateway_ref.yaml",
        "SKY0606",
        "true: the name of such a Gateway is not fixed, and here none has it",
    ),
];
