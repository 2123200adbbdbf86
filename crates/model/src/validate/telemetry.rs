//! Validation of Telemetry.

use super::Finding;
use crate::api::Telemetry;

/// Checks a Telemetry.
pub(crate) fn telemetry(_: &Telemetry) -> Vec<Finding> {
    Vec::new()
}
