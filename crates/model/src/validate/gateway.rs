//! Validation of Gateway.

use super::Finding;
use crate::api::Gateway;

/// Checks a Gateway.
pub(crate) fn gateway(_: &Gateway) -> Vec<Finding> {
    Vec::new()
}
