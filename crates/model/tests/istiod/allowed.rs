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

const STRUCT_ORDER: &str =
    "EnvoyFilter: istiod writes the entries of a `TypedStruct` in random order, here they are sorted";

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
    differs("s-envoyfilter", "productpage-v1 lds virtualInbound: packed otherwise", STRUCT_ORDER),
];

const fn differs(scenario: &'static str, part: &'static str, reason: &'static str) -> Allowed {
    Allowed { scenario, part, reason }
}
