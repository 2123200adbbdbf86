//! Validation of Sidecar.

use super::Finding;
use crate::api::Sidecar;

/// Checks a Sidecar.
pub(crate) fn sidecar(_: &Sidecar) -> Vec<Finding> {
    Vec::new()
}
