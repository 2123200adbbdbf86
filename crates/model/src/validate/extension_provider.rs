//! Validation of extension providers.

use std::collections::BTreeSet;

use super::{Code, Findings, formats, header_name, is_known_status, positive};
use crate::{
    api::{
        MeshConfig,
        extension_provider::{ExtensionProvider, LogFormat, ProviderHeader, RateLimitService},
    },
    fields::{self, FieldRow},
};

/// Maximum length of a provider's name. Source: Istio.
const MAX_NAME: usize = 63;

/// Checks `extensionProviders` and `defaultProviders`.
pub(super) fn check(mesh: &MeshConfig, findings: &mut Findings) {
    let mut names = BTreeSet::new();
    for (index, provider) in mesh.extension_providers.iter().enumerate() {
        let field = format!("extensionProviders[{index}]");
        if provider.name.is_empty() || provider.name.len() > MAX_NAME {
            let message = format!("must have 1 to {MAX_NAME} characters");
            findings.add(Code::InvalidName, format!("{field}.name"), message, "set a name");
        }
        if !names.insert(&provider.name) {
            findings.add(
                Code::DuplicateName,
                format!("{field}.name"),
                "is the name of two providers",
                "rename one of them",
            );
        }
        check_provider(provider, &field, findings);
    }
    let defaults = &mesh.default_providers;
    let lists =
        [("tracing", defaults.tracing.as_slice()), ("accessLogging", defaults.access_logging.as_slice())];
    for (name, list) in lists {
        for (index, provider) in list.iter().enumerate() {
            let is_known = names.iter().any(|known| known.eq_ignore_ascii_case(provider));
            if !is_known && !matches!(&**provider, "envoy" | "prometheus") {
                let message = format!("there is no extension provider {provider:?}");
                let field = format!("defaultProviders.{name}[{index}]");
                findings.add(Code::UnknownProvider, field, message, "check extensionProviders");
            }
        }
    }
}

fn check_provider(provider: &ExtensionProvider, field: &str, findings: &mut Findings) {
    if provider.kinds() != 1 {
        let message = "must have exactly one kind of provider";
        findings.add(
            Code::ExclusiveFields,
            field,
            message,
            "set one field beside name, such as opentelemetry",
        );
    }
    if let Some(kind) = provider.unsupported_kind() {
        let message = "this kind of provider is not supported and has no effect";
        findings.add(Code::UnsupportedSetting, format!("{field}.{kind}"), message, "use opentelemetry");
    }
    let services = [
        ("envoyExtAuthzHttp", provider.envoy_ext_authz_http.as_ref().map(|of| (&of.service, of.port))),
        ("envoyExtAuthzGrpc", provider.envoy_ext_authz_grpc.as_ref().map(|of| (&of.service, of.port))),
        ("envoyRateLimit", provider.envoy_rate_limit.as_ref().map(|of| (&of.service, of.port))),
        ("zipkin", provider.zipkin.as_ref().map(|of| (&of.service, of.port))),
        ("opentelemetry", provider.opentelemetry.as_ref().map(|of| (&of.service, of.port))),
        ("datadog", provider.datadog.as_ref().map(|of| (&of.service, of.port))),
        ("skywalking", provider.skywalking.as_ref().map(|of| (&of.service, of.port))),
        ("envoyHttpAls", provider.envoy_http_als.as_ref().map(|of| (&of.service, of.port))),
        ("envoyTcpAls", provider.envoy_tcp_als.as_ref().map(|of| (&of.service, of.port))),
        ("envoyOtelAls", provider.envoy_otel_als.as_ref().map(|of| (&of.service, of.port))),
    ];
    for (kind, service) in services {
        let Some((service, port)) = service else { continue };
        if service.is_empty() {
            findings.add(
                Code::MissingField,
                format!("{field}.{kind}.service"),
                "is missing",
                "set the host of the service",
            );
        }
        super::port(port, &format!("{field}.{kind}.port"), findings);
    }
    authorizer(provider, field, findings);
    let file = provider.envoy_file_access_log.as_ref().and_then(|of| of.log_format.as_ref());
    let otel = provider.envoy_otel_als.as_ref().and_then(|of| of.log_format.as_ref());
    for (format, kind) in [(file, "envoyFileAccessLog"), (otel, "envoyOtelAls")] {
        let Some(LogFormat { text, labels }) = format else { continue };
        let field = format!("{field}.{kind}.logFormat");
        formats::log_format(text, &format!("{field}.text"), findings);
        formats::log_fields(labels, &format!("{field}.labels"), findings);
    }
    if let Some(of) = &provider.envoy_rate_limit {
        rate_limit_service(of, &format!("{field}.envoyRateLimit"), findings);
    }
    if let Some(of) = &provider.opentelemetry {
        let detectors = of.resource_detectors.as_ref();
        let unsupported = [
            (of.dynatrace_sampler.is_some(), "dynatraceSampler"),
            (of.service_attribute_enrichment.is_some(), "serviceAttributeEnrichment"),
            (detectors.is_some_and(|of| of.dynatrace.is_some()), "resourceDetectors.dynatrace"),
        ];
        for (_, name) in unsupported.iter().filter(|(is_set, _)| *is_set) {
            let row = fields::reported_mesh_setting(&format!("extensionProviders.opentelemetry.{name}"));
            let (effect, remedy) = row.map_or(("it has no effect", ""), FieldRow::effect);
            let message = format!("is not supported: {effect}");
            findings.add(Code::UnsupportedSetting, format!("{field}.opentelemetry.{name}"), message, remedy);
        }
        let http = of.http.iter().flat_map(|http| &http.headers);
        let grpc = of.grpc.iter().flat_map(|grpc| &grpc.initial_metadata);
        headers(http.chain(grpc), &format!("{field}.opentelemetry"), findings);
    }
    if let Some(of) = &provider.zipkin {
        headers(of.headers.iter(), &format!("{field}.zipkin.headers"), findings);
    }
}

/// Checks headers that are sent to a collector.
fn headers<'a>(all: impl Iterator<Item = &'a ProviderHeader>, field: &str, findings: &mut Findings) {
    for header in all {
        header_name(&header.name, field, findings);
        if !header.env_name.is_empty() {
            let message = format!("the variable {:?} is not read; the header is empty", header.env_name);
            findings.add(Code::UnsupportedSetting, field.to_owned(), message, "set value");
        }
    }
}

fn rate_limit_service(of: &RateLimitService, field: &str, findings: &mut Findings) {
    positive(of.timeout, &format!("{field}.timeout"), findings);
    if let Some(status) = of.status_on_error
        && !is_known_status(status)
    {
        let message = format!("{status} is not a status of HTTP");
        findings.add(
            Code::InvalidStatus,
            format!("{field}.statusOnError"),
            message,
            "write a number such as 503",
        );
    }
}

fn authorizer(provider: &ExtensionProvider, field: &str, findings: &mut Findings) {
    let http = provider.envoy_ext_authz_http.as_ref();
    let grpc = provider.envoy_ext_authz_grpc.as_ref();
    let kind = if http.is_some() { "envoyExtAuthzHttp" } else { "envoyExtAuthzGrpc" };
    let field = format!("{field}.{kind}");
    let status = http.map(|of| &of.status_on_error).or(grpc.map(|of| &of.status_on_error));
    if let Some(status) = status.filter(|status| !status.is_empty()) {
        let is_known = status.parse().is_ok_and(is_known_status);
        if !is_known {
            let message = format!("{status:?} is not a status of HTTP");
            findings.add(
                Code::InvalidStatus,
                format!("{field}.statusOnError"),
                message,
                "write a number such as \"503\"",
            );
        }
    }
    let body =
        http.map(|of| &of.include_request_body_in_check).or(grpc.map(|of| &of.include_request_body_in_check));
    if body.and_then(Option::as_ref).is_some_and(|body| body.max_request_bytes == 0) {
        let at = format!("{field}.includeRequestBodyInCheck.maxRequestBytes");
        findings.add(Code::MissingField, at, "is missing", "set the maximum size of the body in bytes");
    }
    if http.is_some_and(|of| of.clear_route_cache) || grpc.is_some_and(|of| of.clear_route_cache) {
        findings.add(Code::NoEffect, format!("{field}.clearRouteCache"), "has no effect, as in Istio", "");
    }
    let Some(http) = http else { return };
    if !http.path_prefix.is_empty() && !http.path_prefix.starts_with('/') {
        findings.add(Code::InvalidPath, format!("{field}.pathPrefix"), "must begin with /", "write /PATH");
    }
    let lists = [
        (&http.include_headers_in_check, "includeHeadersInCheck"),
        (&http.include_request_headers_in_check, "includeRequestHeadersInCheck"),
        (&http.headers_to_upstream_on_allow, "headersToUpstreamOnAllow"),
        (&http.headers_to_downstream_on_deny, "headersToDownstreamOnDeny"),
        (&http.headers_to_downstream_on_allow, "headersToDownstreamOnAllow"),
    ];
    for (list, name) in lists {
        for (index, _) in list.iter().enumerate().filter(|(_, header)| *header == "*") {
            let message = "\"*\" alone is not supported";
            findings.add(
                Code::InvalidHeader,
                format!("{field}.{name}[{index}]"),
                message,
                "write PREFIX* or *SUFFIX",
            );
        }
    }
}
