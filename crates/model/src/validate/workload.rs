//! Validation of WorkloadEntry, WorkloadGroup.

use super::Finding;
use crate::api::{WorkloadEntry, WorkloadGroup};

/// Checks a WorkloadEntry.
pub(crate) fn workload_entry(_: &WorkloadEntry) -> Vec<Finding> {
    Vec::new()
}

/// Checks a WorkloadGroup.
pub(crate) fn workload_group(_: &WorkloadGroup) -> Vec<Finding> {
    Vec::new()
}
