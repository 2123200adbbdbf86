//! Validation of ProxyConfig.

use super::{Code, Finding, Findings};
use crate::api::ProxyConfig;

/// Checks a ProxyConfig.
pub(crate) fn proxy_config(spec: &ProxyConfig) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.labels().is_some_and(|labels| labels.is_empty()) {
        let message = "is empty, so the object applies to no pod";
        let remedy = "remove the selector to apply it to the whole namespace";
        findings.add(Code::EmptySelector, "spec.selector", message, remedy);
    }
    if spec.image.as_ref().is_some_and(|image| !image.image_type.is_empty()) {
        let message = "has no effect: the sidecar of `skysail up` is no image";
        findings.add(Code::NoEffect, "spec.image.imageType", message, "remove it");
    }
    findings.done()
}
