//! Validation of RequestAuthentication.

use super::Finding;
use crate::api::RequestAuthentication;

/// Checks a RequestAuthentication.
pub(crate) fn request_authentication(_: &RequestAuthentication) -> Vec<Finding> {
    Vec::new()
}
