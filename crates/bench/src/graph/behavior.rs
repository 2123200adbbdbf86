//! Behaviour of a mock service that changes while it runs.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::value;

/// Behaviour of a mock service beside its graph. Default: that of the graph alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct WorkerBehavior {
    /// Processing time of each request before its script, such as `300ms`.
    #[serde(deserialize_with = "read_delay", serialize_with = "write_delay")]
    #[serde(skip_serializing_if = "Duration::is_zero")]
    pub(super) delay: Duration,
    /// Responses that are errors, in percent, such as `10%`; `None` for the share of the graph.
    #[serde(deserialize_with = "read_errors", serialize_with = "write_errors")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) errors: Option<f64>,
    /// The port is closed, and so are all connections, as if the process had ended.
    pub(super) down: bool,
}

fn read_delay<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
    value::sleep(&String::deserialize(input)?).map_err(D::Error::custom)
}

fn write_delay<S: Serializer>(delay: &Duration, output: S) -> Result<S::Ok, S::Error> {
    output.serialize_str(&value::write_duration(*delay))
}

fn read_errors<'de, D: Deserializer<'de>>(input: D) -> Result<Option<f64>, D::Error> {
    value::percentage(&String::deserialize(input)?).map(Some).map_err(D::Error::custom)
}

#[expect(clippy::ref_option, reason = "serde passes a reference")]
fn write_errors<S: Serializer>(errors: &Option<f64>, output: S) -> Result<S::Ok, S::Error> {
    output.collect_str(&format_args!("{}%", errors.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_behavior_is_read_as_it_is_written() {
        for (text, written) in [
            ("{}", r#"{"down":false}"#),
            (r#"{"delay": "1500us"}"#, r#"{"delay":"1500us","down":false}"#),
            (r#"{"errors": "0.1 %", "down": true}"#, r#"{"errors":"0.1%","down":true}"#),
            (r#"{"errors": "0%"}"#, r#"{"errors":"0%","down":false}"#),
        ] {
            let behavior: WorkerBehavior = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&behavior).unwrap(), written);
            assert_eq!(serde_json::from_str::<WorkerBehavior>(written).unwrap(), behavior);
        }
        for (text, reason) in [
            (r#"{"delay": "10"}"#, "10"),
            (r#"{"delay": "2h"}"#, "longer than the maximum of 1h"),
            (r#"{"errors": "101%"}"#, "is not a percentage"),
            (r#"{"error": "1%"}"#, "unknown field `error`"),
        ] {
            let error = serde_json::from_str::<WorkerBehavior>(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
