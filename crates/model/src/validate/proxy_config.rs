//! Validation of ProxyConfig.

use super::Finding;
use crate::api::ProxyConfig;

/// Checks a ProxyConfig.
pub(crate) fn proxy_config(_: &ProxyConfig) -> Vec<Finding> {
    Vec::new()
}
