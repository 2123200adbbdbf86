//! Settings with which a proxy starts: `PROXY_CONFIG` in the metadata of its node, as Istio's agent writes it.

use std::time::Duration;

use skysail_xds::envoy::pb::envoy::config::core::v3::Node;

use crate::{overload::Limits, translate::bootstrap::runtime};

/// Applies the settings of a node to the limits of the sidecar. Warns about those without an effect.
pub(super) fn apply(limits: &mut Limits, node: &Node) {
    for (key, value) in node.metadata.iter().flat_map(runtime::entries) {
        let Some(name) = key.strip_prefix("PROXY_CONFIG.") else { continue };
        if name == "drainDuration" {
            match duration(&value) {
                Some(length) => limits.revoked_drain = length,
                None => tracing::warn!("drainDuration {value:?} is not a duration and has no effect"),
            }
        } else if let Some(key) = name.strip_prefix("runtimeValues.")
            && let Err(error) = runtime::set(limits, key, &value)
        {
            tracing::warn!("runtimeValues has no effect: {error:#}");
        }
    }
}

/// Parses a duration in the JSON form of protos, such as `1.5s`.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let seconds: f64 = text.strip_suffix('s')?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}
