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
const BACKEND_TLS: &str = "BackendTLSPolicy has no effect";

/// All permitted differences.
pub(crate) const ALLOWED: &[Allowed] = &[
    differs("l-tcp", "mysqldb-v1 lds 10.244.1.31_3307: istiod has no such resource", OWN_ADDRESS),
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
