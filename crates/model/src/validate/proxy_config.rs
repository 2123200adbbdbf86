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
    findings.done()
}
