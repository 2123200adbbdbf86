//! Settings with which a proxy starts: `PROXY_CONFIG` in the metadata of its node, as Istio's agent writes it.

use std::{num::NonZeroUsize, time::Duration};

use serde_json::Value;

use crate::{app::args::Common, overload::Limits, translate::bootstrap::runtime};

/// Maximum drain time, as that of `skysail.admission.drain_ms`: adding it to the current time does not overflow.
const MAX_DRAIN: Duration = Duration::from_millis(u32::MAX as u64);

/// Applies the settings of a proxy to the arguments that the command line does not set. Warns about invalid ones.
pub(super) fn start(common: &mut Common, config: &Value) {
    if common.concurrency.is_none() {
        // 0 stands for the number of CPUs, which is the default.
        let number = config["concurrency"].as_u64().and_then(|number| usize::try_from(number).ok());
        common.concurrency = number.and_then(NonZeroUsize::new);
    }
    if common.drain.is_none() {
        common.drain = drain(config, "terminationDrainDuration");
    }
}

/// Applies the settings of a proxy to the limits of the sidecar. Warns about those without an effect.
pub(super) fn apply(limits: &mut Limits, config: &Value) {
    if let Some(length) = drain(config, "drainDuration") {
        limits.revoked_drain = length;
    }
    for (key, value) in config["runtimeValues"].as_object().into_iter().flatten() {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        if let Err(error) = runtime::set(limits, key, &text) {
            tracing::warn!("runtimeValues has no effect: {error:#}");
        }
    }
}

/// Returns a drain time.
fn drain(config: &Value, name: &str) -> Option<Duration> {
    let value = config.get(name)?;
    let length = value.as_str().and_then(duration).filter(|length| *length <= MAX_DRAIN);
    if length.is_none() {
        let most = MAX_DRAIN.as_secs();
        tracing::warn!("{name} {value} is not a duration from 0 to {most}s and has no effect");
    }
    length
}

/// Parses a duration in the JSON form of protos, such as `1.5s`.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let seconds: f64 = text.strip_suffix('s')?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use serde_json::json;

    use super::*;

    /// Returns the drain time with which a proxy with this `drainDuration` starts.
    fn drain(text: &str) -> Duration {
        let mut limits = Limits::default();
        apply(&mut limits, &json!({"drainDuration": text}));
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
