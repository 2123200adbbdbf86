//! Validation of single objects, as by Istio's admission webhook and the API server.
//!
//! These are pure checks of typed objects; each finding has field, message and remedy. The World checks relations
//! between objects.

mod annotations;
mod ca_certificates;
mod destination_rule;
mod envoy_filter;
mod extension;
mod extension_provider;
mod formats;
mod gateway;
mod gateway_api;
mod ingress;
mod injection;
mod kube;
mod locality;
mod mesh_networks;
mod other_meshes;
mod pods;
mod proxy_config;
mod rate_limit;
mod request_authentication;
mod route_actions;
mod secret;
mod security;
mod service_entry;
mod shadowed;
mod sidecar;
mod telemetry;
mod unsupported;
mod virtual_service;
mod volumes;
mod workload;

pub(crate) use ca_certificates::root_map;
pub(crate) use destination_rule::destination_rule;
pub(crate) use envoy_filter::envoy_filter;
pub(crate) use extension::{traffic_extension, wasm_plugin};
pub(crate) use gateway::{gateway, known_ciphers};
pub(crate) use gateway_api::{
    backend_tls_policy, gateway_class, grpc_route, http_route, kubernetes_gateway, listener_set,
    reference_grant, tcp_route, tls_route,
};
pub(crate) use ingress::{ingress, ingress_class};
pub(crate) use kube::{meta, service};
pub(crate) use mesh_networks::mesh_networks;
pub(crate) use other_meshes::other_meshes;
pub(crate) use pods::{pod, workload};
pub(crate) use proxy_config::proxy_config;
pub(crate) use rate_limit::rate_limit_policy;
pub(crate) use request_authentication::request_authentication;
pub use request_authentication::{MAX_KEY_SET, key_set};
pub(crate) use secret::secret;
pub(crate) use security::{authorization_policy, empty_fields, peer_authentication};
pub(crate) use service_entry::{addresses, service_entry};
pub(crate) use sidecar::sidecar;
pub(crate) use telemetry::telemetry;
pub(crate) use unsupported::{unsupported, unsupported_settings};
pub(crate) use virtual_service::virtual_service;
pub(crate) use workload::{workload_entry, workload_group};

use skysail_core::re2;

pub(crate) use crate::analysis::Code;
use crate::{
    api::{
        Duration, MeshConfig, StringMatch,
        mesh_config::{DefaultTrafficPolicy, LogEncoding, OutboundMode},
        value::is_header_name,
    },
    diagnostic::Severity,
};

/// One error or warning about an object.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finding {
    pub(crate) code: Code,
    pub(crate) field: String,
    pub(crate) message: String,
    pub(crate) remedy: String,
}

impl Finding {
    /// Returns whether the object is refused.
    pub(crate) fn is_error(&self) -> bool {
        self.code.severity() == Severity::Error
    }
}

/// List of findings under construction.
#[derive(Debug, Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    /// Adds a finding. Its code decides its severity.
    pub(crate) fn add(
        &mut self,
        code: Code,
        field: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let (field, message, remedy) = (field.into(), message.into(), remedy.into());
        self.0.push(Finding { code, field, message, remedy });
    }

    pub(crate) fn done(self) -> Vec<Finding> {
        self.0
    }
}

/// Checks `accessLogFormat`.
fn mesh_log_format(mesh: &MeshConfig, findings: &mut Findings) {
    let (text, field) = (&mesh.access_log_format, "accessLogFormat");
    match mesh.access_log_encoding {
        _ if text.is_empty() => {}
        LogEncoding::Text => formats::log_format(text, field, findings),
        LogEncoding::Json => match serde_json::from_str::<serde_json::Map<_, _>>(text) {
            Ok(fields) => formats::log_fields(&fields, field, findings),
            Err(error) => {
                let message = format!("is not a JSON object, so the default format is used: {error}");
                findings.add(
                    Code::InvalidLogFormat,
                    field,
                    message,
                    "write an object, or set accessLogEncoding: TEXT",
                );
            }
        },
    }
}

/// Checks the mesh configuration.
pub(crate) fn mesh_config(mesh: &MeshConfig) -> Vec<Finding> {
    let mut findings = Findings::default();
    for (field, value) in [("rootNamespace", &mesh.root_namespace), ("trustDomain", &mesh.trust_domain)] {
        if value.is_empty() {
            findings.add(
                Code::EmptyField,
                field,
                "is empty",
                "set a value, or remove the field to use the default",
            );
        }
    }
    let domains = std::iter::once(("trustDomain".to_owned(), &mesh.trust_domain));
    let aliases = mesh.trust_domain_aliases.iter().enumerate();
    let aliases = aliases.map(|(index, domain)| (format!("trustDomainAliases[{index}]"), domain));
    for (field, domain) in domains.chain(aliases) {
        if domain.contains(['/', ':']) {
            let remedy = "write the name alone, such as cluster.local";
            findings.add(
                Code::InvalidTrustDomain,
                field,
                format!("{domain:?} is not a trust domain"),
                remedy,
            );
        }
    }
    ca_certificates::check(mesh, &mut findings);
    if let Some(retries) = &mesh.default_http_retry_policy {
        route_actions::retries(retries, "defaultHttpRetryPolicy", &mut findings);
    }
    locality::of_mesh(mesh, &mut findings);
    let DefaultTrafficPolicy { connection_pool, outlier_detection } = &mesh.default_traffic_policy;
    if let Some(pool) = connection_pool {
        destination_rule::connection_pool(pool, "defaultTrafficPolicy.connectionPool", &mut findings);
    }
    if let Some(outliers) = outlier_detection {
        let field = "defaultTrafficPolicy.outlierDetection";
        destination_rule::outlier_detection(outliers, field, &mut findings);
    }
    if let Some(tls) = &mesh.outbound_traffic_policy.tls {
        let field = "outboundTrafficPolicy.tls";
        destination_rule::unknown_hosts_tls(tls, field, &mut findings);
        if mesh.outbound_traffic_policy.mode != OutboundMode::AllowAnyDynamicDns {
            let remedy = "use mode ALLOW_ANY_DYNAMIC_DNS, or remove it";
            findings.add(Code::NoEffect, field, "has no effect with this mode", remedy);
        }
    }
    extension_provider::check(mesh, &mut findings);
    mesh_log_format(mesh, &mut findings);
    proxy_config::default_config(&mesh.default_config, &mut findings);
    gateway::ciphers(&mesh.tls_defaults.cipher_suites, "tlsDefaults.cipherSuites", &mut findings);
    gateway::ciphers(&mesh.mesh_mtls.cipher_suites, "meshMTLS.cipherSuites", &mut findings);
    if !mesh.mesh_mtls.ecdh_curves.is_empty() {
        // As in Istio, the whole configuration is refused.
        findings.add(
            Code::Unsupported,
            "meshMTLS.ecdhCurves",
            "is not supported, nor in Istio",
            "use tlsDefaults.ecdhCurves",
        );
    }
    findings.done()
}

/// Checks a port number.
fn port(number: u32, field: &str, findings: &mut Findings) {
    if !(1..=65535).contains(&number) {
        findings.add(Code::InvalidPort, field, format!("{number} is not a port"), "ports go from 1 to 65535");
    }
}

/// Returns whether Envoy's enumeration of statuses has a status. Envoy refuses local responses with other statuses.
fn is_known_status(status: u32) -> bool {
    matches!(status,
        200..=208 | 226 | 300..=305 | 307..=308 | 400..=417 | 421..=424 | 426 | 428..=429 | 431
        | 500..=508 | 510..=511)
}

/// Checks a percentage.
fn percent(value: f64, field: &str, findings: &mut Findings) {
    if !(0.0..=100.0).contains(&value) {
        findings.add(
            Code::InvalidPercentage,
            field,
            format!("{value} is not a percentage"),
            "percentages go from 0 to 100",
        );
    }
}

/// Checks a duration that must not be zero; Istio's minimum is one millisecond.
fn positive(duration: Option<Duration>, field: &str, findings: &mut Findings) {
    if duration.is_some_and(|duration| duration.0.as_millis() == 0) {
        let remedy = "set a longer duration, or remove the field to use the default";
        findings.add(Code::InvalidDuration, field, "must be at least 1ms", remedy);
    }
}

/// Checks a duration that Istio restricts to whole milliseconds.
fn milliseconds(duration: Option<Duration>, field: &str, findings: &mut Findings) {
    positive(duration, field, findings);
    let has_part = |duration: Duration| !duration.0.subsec_nanos().is_multiple_of(1_000_000);
    if duration.is_some_and(|duration| duration.0.as_millis() > 0 && has_part(duration)) {
        let remedy = "set whole milliseconds, as Istio requires";
        findings.add(Code::InvalidDuration, field, "has a part of a millisecond", remedy);
    }
}

/// Checks a comparison. Only headers and parameters may omit the value (`may_be_present`).
fn string_match(matched: &StringMatch, field: &str, may_be_present: bool, findings: &mut Findings) {
    match matched {
        StringMatch::Regex(expression) => regex(expression, &format!("{field}.regex"), findings),
        StringMatch::Present if !may_be_present => {
            findings.add(
                Code::EmptyField,
                field,
                "has no value to compare with",
                "set exact, prefix or regex",
            );
        }
        StringMatch::Prefix(text) if text.is_empty() && !may_be_present => {
            findings.add(
                Code::EmptyField,
                format!("{field}.prefix"),
                "is empty, which matches everything",
                "remove the match",
            );
        }
        _ => {}
    }
}

/// Checks an RE2 expression.
fn regex(expression: &str, field: &str, findings: &mut Findings) {
    if expression.is_empty() {
        findings.add(Code::InvalidRegex, field, "is empty", "set an RE2 expression");
    } else if let Err(reason) = re2::compile(expression) {
        findings.add(
            Code::InvalidRegex,
            field,
            format!("{expression:?} is not an RE2 expression: {reason}"),
            "see the syntax of RE2",
        );
    }
}

/// Checks a host: a DNS name, `*.` and a DNS name, `*`, or an address.
fn host(name: &str, field: &str, findings: &mut Findings) {
    if name.is_empty() {
        findings.add(Code::EmptyField, field, "is empty", "set a host name");
    } else if name.contains("://") || name.contains('/') {
        findings.add(
            Code::InvalidHost,
            field,
            format!("{name:?} is a URL, not a host"),
            "write the host name alone",
        );
    } else if name.parse::<std::net::IpAddr>().is_ok() || name == "*" {
    } else if let Some((bare, number)) = name.rsplit_once(':').filter(|(_, n)| n.parse::<u16>().is_ok()) {
        let remedy = format!("write {bare}, and put port {number} into its own field");
        findings.add(Code::InvalidHost, field, format!("{name:?} contains a port"), remedy);
    } else if !is_dns_name(name.strip_prefix("*.").unwrap_or(name)) {
        let remedy = "use letters, digits, '-' and '.'; '*' is allowed as the whole first label only";
        findings.add(Code::InvalidHost, field, format!("{name:?} is not a valid host name"), remedy);
    }
}

fn is_dns_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.len() <= 253 && name.split('.').all(|part| is_label_text(part, true))
}

/// Returns whether a text is a label of RFC 1123. As in Istio, host names (`loose`) may also have `_` and capitals.
/// Checks the name of a Secret in the proxy's own namespace, with an optional `kubernetes://`. Names of other schemes would
/// be those of other namespaces.
fn secret_name(name: &str, field: &str, findings: &mut Findings) {
    let bare = name.strip_prefix("kubernetes://").unwrap_or(name);
    if !name.is_empty() && !bare.split('.').all(|part| is_label_text(part, false)) {
        let message = format!("{name:?} is not the name of a Secret");
        findings.add(Code::InvalidName, field, message, "write the name alone");
    }
}

fn is_label_text(part: &str, loose: bool) -> bool {
    let good = |c: char| {
        c.is_ascii_lowercase() || c.is_ascii_digit() || loose && (c.is_ascii_uppercase() || c == '_')
    };
    !part.is_empty()
        && part.len() <= 63
        && part.chars().all(|c| good(c) || c == '-')
        && part.starts_with(good)
        && part.ends_with(good)
}

/// Checks the name of a header, RFC 9110 section 5.1.
fn header_name(name: &str, field: &str, findings: &mut Findings) {
    if !is_header_name(name) {
        let remedy = "use letters, digits and '-'";
        findings.add(Code::InvalidHeader, field, format!("{name:?} is not a valid header name"), remedy);
    }
}

/// Checks `exportTo`.
fn export_to(list: &[String], field: &str, findings: &mut Findings) {
    for (index, entry) in list.iter().enumerate() {
        let at = format!("{field}[{index}]");
        match entry.as_str() {
            "." | "*" | "~" => {}
            name if is_label_text(name, false) => {}
            name => findings.add(
                Code::InvalidExportTo,
                at.clone(),
                format!("{name:?} is not a valid namespace"),
                "use \".\", \"*\" or a namespace",
            ),
        }
        if list.len() > 1 && entry == "~" {
            findings.add(Code::InvalidExportTo, at, "\"~\" excludes all other values", "remove the others");
        }
    }
}
