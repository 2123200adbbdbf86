//! Validation of EnvoyFilter.

use super::Finding;
use crate::api::EnvoyFilter;

/// Checks an EnvoyFilter.
pub(crate) fn envoy_filter(_: &EnvoyFilter) -> Vec<Finding> {
    Vec::new()
}
