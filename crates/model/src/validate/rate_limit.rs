//! Validation of RateLimitPolicy.

use super::Finding;
use crate::api::RateLimitPolicy;

/// Checks a RateLimitPolicy.
pub(crate) fn rate_limit_policy(_: &RateLimitPolicy) -> Vec<Finding> {
    Vec::new()
}
