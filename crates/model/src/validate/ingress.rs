//! Validation of Ingress, IngressClass.

use super::Finding;
use crate::api::{Ingress, IngressClass};

/// Checks an Ingress.
pub(crate) fn ingress(_: &Ingress) -> Vec<Finding> {
    Vec::new()
}

/// Checks an IngressClass.
pub(crate) fn ingress_class(_: &IngressClass) -> Vec<Finding> {
    Vec::new()
}
