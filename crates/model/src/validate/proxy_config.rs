//! Validation of ProxyConfig, and of the settings of proxies in the mesh configuration.

use super::{Code, Finding, Findings, percent};
use crate::api::{
    ProxyConfig,
    proxy_config::{ProxySettings, is_header_value},
};

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

/// Checks `defaultConfig` of the mesh configuration.
pub(super) fn default_config(settings: &ProxySettings, findings: &mut Findings) {
    let server = &settings.proxy_headers.server.value;
    if !is_header_value(server) {
        let message = format!("{server:?} is not a header value");
        findings.add(
            Code::InvalidHeader,
            "defaultConfig.proxyHeaders.server.value",
            message,
            "use printable ASCII characters",
        );
    }
    for (name, least) in bad_numbers(settings) {
        let field = format!("defaultConfig.connectionSettings.{name}");
        findings.add(Code::OutOfRange, field, format!("is below {least}"), format!("use {least} or more"));
    }
    let Some(tracing) = &settings.tracing else { return };
    if tracing.zipkin.as_ref().is_some_and(|zipkin| zipkin.providers().is_empty()) {
        let message = "is not HOST:PORT, so no spans are reported";
        findings.add(
            Code::NoEffect,
            "defaultConfig.tracing.zipkin.address",
            message,
            "write the host and the port of a service, such as zipkin.istio-system:9411",
        );
    }
    percent(tracing.sampling.0, "defaultConfig.tracing.sampling", findings);
    for (name, reason, remedy) in bad_tags(settings) {
        findings.add(Code::NoEffect, format!("defaultConfig.tracing.{name}"), reason, remedy);
    }
}

/// Returns the custom tags that no proxy gets, as fields of `tracing`, with reason and remedy.
pub(super) fn bad_tags(
    settings: &ProxySettings,
) -> impl Iterator<Item = (String, &'static str, &'static str)> {
    let names = settings.tracing.clone().map(|mut tracing| tracing.remove_bad_tags()).unwrap_or_default();
    names.into_iter().map(|name| {
        let reason = "is not valid, or above 64 tags or 8 KiB, and has no effect";
        (skysail_yaml::join("customTags", &name), reason, "set one kind of value with a valid name")
    })
}

/// Returns the fields of `connectionSettings` whose numbers a proxy would refuse, and the least value of each.
pub(super) fn bad_numbers(settings: &ProxySettings) -> Vec<(&'static str, i32)> {
    settings.connection_settings.clone().map(|mut settings| settings.remove_bad()).unwrap_or_default()
}
