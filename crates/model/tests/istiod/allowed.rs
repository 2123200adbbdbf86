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

const PORTS: &str = "ServiceEntry: without an address only HTTP is told apart, the rest passes through";
const PROXY_PROTOCOL: &str = "trafficPolicy.proxyProtocol: not sent";

const BACKEND_TLS: &str = "BackendTLSPolicy has no effect";
const MESH_TCP: &str = "sidecars route connections without TCPRoutes";

/// All permitted differences.
pub(crate) const ALLOWED: &[Allowed] = &[
    differs("g-serviceentry", "productpage-v1 lds 0.0.0.0_443: missing", PORTS),
    differs("g-serviceentry", "productpage-v1 lds 0.0.0.0_5432: missing", PORTS),
    differs("g-serviceentry", "productpage-v1-dns lds 0.0.0.0_443: missing", PORTS),
    differs("g-serviceentry", "productpage-v1-dns lds 0.0.0.0_5432: missing", PORTS),
    differs(
        "n-destinationrule-policies",
        "cds outbound|9080||productpage.default.svc.cluster.local.transportSocketMatches",
        PROXY_PROTOCOL,
    ),
    differs("z-gatewayapi-kinds", "lds 10.96.13.3_5432.", MESH_TCP),
    differs("z-gatewayapi-kinds", "cds outbound|443||catalog.default.svc.cluster.local.", BACKEND_TLS),
    differs("z-gatewayapi-kinds", "cds outbound|5432||catalog.default.svc.cluster.local.", BACKEND_TLS),
    differs("z-gatewayapi-kinds", "cds outbound|9000||catalog.default.svc.cluster.local.", BACKEND_TLS),
    differs("z-gatewayapi-kinds", "cds outbound|9080||details.default.svc.cluster.local.", BACKEND_TLS),
    differs("z-gatewayapi-kinds", "eds outbound|9080||details.default.svc.cluster.local.", BACKEND_TLS),
    differs("z-gatewayapi-kinds", "sds configmap://default/backend-ca-cacert: missing", BACKEND_TLS),
];

const fn differs(scenario: &'static str, part: &'static str, reason: &'static str) -> Allowed {
    Allowed { scenario, part, reason }
}
