//! Permitted differences from istiod, with reasons. `docs/compatibility.md` lists the same for users.

/// A permitted difference.
pub(crate) struct Allowed {
    /// Recording in which it occurs.
    pub(crate) scenario: &'static str,
    /// Part of the difference as the test prints it.
    pub(crate) part: &'static str,
    /// Reason.
    pub(crate) reason: &'static str,
}

const OWN_ADDRESS: &str = "The listener for a pod's own address stays: proxies with equal views share their listeners, and no \
                           connection is redirected to it";
const BACKEND_NAME: &str = "BackendTLSPolicy without subjectAltNames: certificates must have the host name, as Gateway API \
                            demands; istiod verifies no name";

const STRUCT_ORDER: &str =
    "EnvoyFilter: istiod writes the entries of a `TypedStruct` in random order, here they are sorted";

const TWICE: &str = "ServiceEntry with several addresses: istiod sends each endpoint once for each address";
const BLOCK: &str =
    "ServiceEntry with a block of addresses: istiod has the block as a domain, which no request names";
const SAME_NAME: &str = "ServiceEntry with the name of a Kubernetes Service: requests to the Service's address stay \
                         routed";

const MESH_ID: &str = "The mesh id of traces is that of the mesh configuration; istiod has that of the time when the pod \
                       was injected";

const REMOVED_LISTENER: &str =
    "EnvoyFilter that removes a listener: its routes stay, and no listener names them";

/// All permitted differences.
pub(crate) const ALLOWED: &[Allowed] = &[
    differs("q-serviceentry-kinds", "eds outbound|6000||two.share.example.net.endpoints[0]", TWICE),
    differs("q-serviceentry-kinds", "eds outbound|6443||two.share.example.net.endpoints[0]", TWICE),
    differs("q-serviceentry-kinds", "rds 7001.virtualHosts[1].domains[0]", BLOCK),
    differs("q-serviceentry-kinds", "rds 9080.virtualHosts[3].domains", SAME_NAME),
    differs("l-tcp", "mysqldb-v1 lds 10.244.1.31_3307: istiod has no such resource", OWN_ADDRESS),
    differs("s-envoyfilter", "productpage-v1 lds virtualInbound: packed otherwise", STRUCT_ORDER),
    differs("s-envoyfilter", "reviews-v1 rds 15014: istiod has no such resource", REMOVED_LISTENER),
    differs(
        "y2-mesh-tls-locality",
        "tracing.customTags[7].literal.value: expected \"cluster.local\"",
        MESH_ID,
    ),
    differs(
        "z-gatewayapi-kinds",
        "cds outbound|443||catalog.default.svc.cluster.local.transportSocket",
        BACKEND_NAME,
    ),
];

const fn differs(scenario: &'static str, part: &'static str, reason: &'static str) -> Allowed {
    Allowed { scenario, part, reason }
}
