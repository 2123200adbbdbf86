//! Settings with which a proxy starts: `PROXY_CONFIG` in the metadata of its node, as Istio's agent writes it.

use std::time::Duration;

use skysail_xds::envoy::pb::envoy::config::core::v3::Node;

use crate::{overload::Limits, translate::bootstrap::runtime};

/// Maximum drain time, as that of `skysail.admission.drain_ms`: adding it to the current time does not overflow.
const MAX_DRAIN: Duration = Duration::from_millis(u32::MAX as u64);

/// Applies the settings of a node to the limits of the sidecar. Warns about those without an effect.
pub(super) fn apply(limits: &mut Limits, node: &Node) {
    for (key, value) in node.metadata.iter().flat_map(runtime::entries) {
        let Some(name) = key.strip_prefix("PROXY_CONFIG.") else { continue };
        if name == "drainDuration" {
            match duration(&value).filter(|length| *length <= MAX_DRAIN) {
                Some(length) => limits.revoked_drain = length,
                None => tracing::warn!(
                    "drainDuration {value:?} is not a duration from 0 to {}s and has no effect",
                    MAX_DRAIN.as_secs()
                ),
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use skysail_xds::envoy::pb::google::protobuf::{Struct, Value, value::Kind};

    use super::*;

    /// Returns the drain time with which a proxy with this `drainDuration` starts.
    fn drain(text: &str) -> Duration {
        let value = Value { kind: Some(Kind::StringValue(text.into())) };
        let fields = [("PROXY_CONFIG.drainDuration".into(), value)].into_iter().collect();
        let node = Node { metadata: Some(Struct { fields }), ..Node::default() };
        let mut limits = Limits::default();
        apply(&mut limits, &node);
        limits.revoked_drain
    }

    #[test]
    fn drain_times_are_bounded_so_that_clocks_can_add_them() {
        assert_eq!(drain("1.5s"), Duration::from_millis(1500));
        for text in ["10000000000000000000s", "4294968s", "-1s", "soon"] {
            assert_eq!(drain(text), Limits::default().revoked_drain, "{text}");
        }
        assert!(Instant::now().checked_add(MAX_DRAIN).is_some());
    }
}
