//! Extension providers of the mesh configuration: external services for authorization, rate limits, traces and access
//! logs, and Prometheus. Fields are Istio's (`istio.mesh.v1alpha1.MeshConfig.ExtensionProvider`), except
//! `envoyRateLimit`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{mesh_config::IgnoredValue, value::Duration};

/// A provider that policies and Telemetries name.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExtensionProvider {
    /// Name.
    pub name: String,
    /// External authorizer that speaks HTTP.
    pub envoy_ext_authz_http: Option<ExtAuthzHttp>,
    /// External authorizer that speaks gRPC.
    pub envoy_ext_authz_grpc: Option<ExtAuthzGrpc>,
    /// Rate limit service, for RateLimitPolicies; Istio does not have this kind.
    pub envoy_rate_limit: Option<RateLimitService>,
    /// Zipkin collector.
    pub zipkin: Option<Zipkin>,
    /// OpenTelemetry collector of traces.
    pub opentelemetry: Option<OpenTelemetry>,
    /// Access log file.
    pub envoy_file_access_log: Option<FileAccessLog>,
    /// Access log service for HTTP.
    pub envoy_http_als: Option<HttpAccessLogService>,
    /// Access log service for TCP.
    pub envoy_tcp_als: Option<TcpAccessLogService>,
    /// OpenTelemetry collector of access logs.
    pub envoy_otel_als: Option<OtelAccessLogService>,
    /// Prometheus, which reads the proxies' own metrics.
    pub prometheus: Option<IgnoredValue>,
    /// Agent of Datadog.
    pub datadog: Option<Datadog>,
    /// Collector of SkyWalking.
    pub skywalking: Option<SkyWalking>,
    /// LightStep; not supported.
    pub lightstep: Option<IgnoredValue>,
    /// Agent of OpenCensus; not supported.
    pub opencensus: Option<IgnoredValue>,
    /// Stackdriver; not supported.
    pub stackdriver: Option<IgnoredValue>,
    /// Secret discovery service; not supported.
    pub sds: Option<IgnoredValue>,
}

impl ExtensionProvider {
    /// Returns the field of the provider's kind, if the kind is not supported.
    pub fn unsupported_kind(&self) -> Option<&'static str> {
        let kinds = [
            (&self.lightstep, "lightstep"),
            (&self.opencensus, "opencensus"),
            (&self.stackdriver, "stackdriver"),
            (&self.sds, "sds"),
        ];
        kinds.into_iter().find(|(kind, _)| kind.is_some()).map(|(_, name)| name)
    }

    /// Returns the service of the provider, `HOST` or `NAMESPACE/HOST`.
    pub fn service(&self) -> Option<&str> {
        let services = [
            self.envoy_ext_authz_http.as_ref().map(|of| &of.service),
            self.envoy_ext_authz_grpc.as_ref().map(|of| &of.service),
            self.envoy_rate_limit.as_ref().map(|of| &of.service),
            self.zipkin.as_ref().map(|of| &of.service),
            self.opentelemetry.as_ref().map(|of| &of.service),
            self.datadog.as_ref().map(|of| &of.service),
            self.skywalking.as_ref().map(|of| &of.service),
            self.envoy_http_als.as_ref().map(|of| &of.service),
            self.envoy_tcp_als.as_ref().map(|of| &of.service),
            self.envoy_otel_als.as_ref().map(|of| &of.service),
        ];
        services.into_iter().flatten().next().map(String::as_str)
    }

    /// Returns the number of kinds that are set; exactly one is valid.
    pub fn kinds(&self) -> usize {
        let set = [
            self.envoy_ext_authz_http.is_some(),
            self.envoy_ext_authz_grpc.is_some(),
            self.envoy_rate_limit.is_some(),
            self.zipkin.is_some(),
            self.opentelemetry.is_some(),
            self.datadog.is_some(),
            self.skywalking.is_some(),
            self.envoy_file_access_log.is_some(),
            self.envoy_http_als.is_some(),
            self.envoy_tcp_als.is_some(),
            self.envoy_otel_als.is_some(),
            self.prometheus.is_some(),
            self.unsupported_kind().is_some(),
        ];
        set.into_iter().filter(|set| *set).count()
    }
}

/// Agent of Datadog. Only an Envoy has its tracer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Datadog {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Maximum length of the path tag in bytes; 0: the default of the proxy.
    pub max_tag_length: u32,
}

/// Collector of SkyWalking. Only an Envoy has its tracer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SkyWalking {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
}

/// Body sent to an external authorizer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RequestBody {
    /// Maximum size in bytes.
    pub max_request_bytes: u32,
    /// Whether the first bytes of a larger body are sent; otherwise such a request is refused with 413.
    pub allow_partial_message: bool,
    /// Whether the body is sent as bytes instead of UTF-8 text; gRPC only.
    pub pack_as_bytes: bool,
}

/// Rate limit service that speaks `envoy.service.ratelimit.v3`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimitService {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Timeout of a decision; unset: 20 ms, as in Envoy.
    pub timeout: Option<Duration>,
    /// Domain of the descriptors.
    pub domain: String,
    /// Whether requests are refused if the service fails.
    pub fail_closed: bool,
    /// Status of requests that are refused because the service fails; unset: 500.
    pub status_on_error: Option<u32>,
}

/// External authorizer that speaks HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExtAuthzHttp {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Timeout; unset: 600 seconds.
    pub timeout: Option<Duration>,
    /// Prefix that is added to the path of requests to the authorizer.
    pub path_prefix: String,
    /// Whether requests pass if the authorizer fails.
    pub fail_open: bool,
    /// Status of the answer if the authorizer fails; empty: 403.
    pub status_on_error: String,
    /// Former name of `includeRequestHeadersInCheck`.
    pub include_headers_in_check: Vec<String>,
    /// Request headers that are sent to the authorizer.
    pub include_request_headers_in_check: Vec<String>,
    /// Headers that are added to the authorizer's request.
    pub include_additional_headers_in_check: BTreeMap<String, String>,
    /// Body that is sent to the authorizer.
    pub include_request_body_in_check: Option<RequestBody>,
    /// Headers of the authorizer's answer that are set in an allowed request.
    pub headers_to_upstream_on_allow: Vec<String>,
    /// Headers of the authorizer's answer that are set in the answer to a denied request.
    pub headers_to_downstream_on_deny: Vec<String>,
    /// Headers of the authorizer's answer that are set in the answer to an allowed request.
    pub headers_to_downstream_on_allow: Vec<String>,
    /// Whether the route is selected again after the check; no effect, as in Istio.
    pub clear_route_cache: bool,
}

/// External authorizer that speaks gRPC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ExtAuthzGrpc {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Timeout; unset: 600 seconds.
    pub timeout: Option<Duration>,
    /// Whether requests pass if the authorizer fails.
    pub fail_open: bool,
    /// Status of the answer if the authorizer fails; empty: 403.
    pub status_on_error: String,
    /// Body that is sent to the authorizer.
    pub include_request_body_in_check: Option<RequestBody>,
    /// Whether the route is selected again after the check; no effect, as in Istio.
    pub clear_route_cache: bool,
}

/// Header of requests to a collector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProviderHeader {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
    /// Environment variable of istiod that has the value; not supported.
    pub env_name: String,
}

/// Zipkin collector.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Zipkin {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Maximum length of the path tag in bytes; 0: the proxy's default.
    pub max_tag_length: u32,
    /// Whether trace ids have 64 bits instead of 128.
    #[serde(rename = "enable64bitTraceId")]
    pub enable_64bit_trace_id: bool,
    /// Path of the collector; empty: `/api/v2/spans`.
    pub path: String,
    /// Timeout of a report; unset: 5 seconds.
    pub timeout: Option<Duration>,
    /// Headers of reports.
    pub headers: Vec<ProviderHeader>,
    /// Formats of the trace context.
    pub trace_context_option: TraceContextOption,
}

/// Formats of the trace context of Zipkin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum TraceContextOption {
    /// B3.
    #[default]
    UseB3,
    /// B3, and W3C as well.
    UseB3WithW3cPropagation,
}

/// OpenTelemetry collector of traces.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OpenTelemetry {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Maximum length of the path tag in bytes; 0: the proxy's default.
    pub max_tag_length: u32,
    /// Reports over HTTP instead of gRPC.
    pub http: Option<OtlpHttp>,
    /// Settings of reports over gRPC.
    pub grpc: Option<OtlpGrpc>,
    /// Detectors of resource attributes.
    pub resource_detectors: Option<ResourceDetectors>,
    /// Sampler of Dynatrace; not supported.
    pub dynatrace_sampler: Option<IgnoredValue>,
    /// Derivation of the service name from labels; not supported.
    pub service_attribute_enrichment: Option<String>,
}

/// Reports over HTTP.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OtlpHttp {
    /// Path of the collector.
    pub path: String,
    /// Timeout of a report; unset: 10 seconds.
    pub timeout: Option<Duration>,
    /// Headers of reports.
    pub headers: Vec<ProviderHeader>,
}

/// Settings of reports over gRPC.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OtlpGrpc {
    /// Timeout of a report; unset: the proxy's default.
    pub timeout: Option<Duration>,
    /// Headers of reports.
    pub initial_metadata: Vec<ProviderHeader>,
}

/// Detectors of resource attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ResourceDetectors {
    /// Attributes of `OTEL_RESOURCE_ATTRIBUTES`.
    pub environment: Option<IgnoredValue>,
    /// Attributes of Dynatrace's files; not supported.
    pub dynatrace: Option<IgnoredValue>,
}

/// Access log file.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FileAccessLog {
    /// Path.
    pub path: String,
    /// Format.
    pub log_format: Option<LogFormat>,
    /// Whether values that are not present are omitted.
    pub omit_empty_values: bool,
}

/// Format of an access log.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct LogFormat {
    /// Text with command operators.
    pub text: String,
    /// JSON object with command operators.
    pub labels: serde_json::Map<String, serde_json::Value>,
}

/// Access log service for HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpAccessLogService {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Name of the log; empty: `http_envoy_accesslog`.
    pub log_name: String,
    /// Filter state that is logged.
    pub filter_state_objects_to_log: Vec<String>,
    /// Request headers that are logged.
    pub additional_request_headers_to_log: Vec<String>,
    /// Response headers that are logged.
    pub additional_response_headers_to_log: Vec<String>,
    /// Response trailers that are logged.
    pub additional_response_trailers_to_log: Vec<String>,
}

/// Access log service for TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TcpAccessLogService {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Name of the log; empty: `tcp_envoy_accesslog`.
    pub log_name: String,
    /// Filter state that is logged.
    pub filter_state_objects_to_log: Vec<String>,
}

/// OpenTelemetry collector of access logs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OtelAccessLogService {
    /// Host, or `NAMESPACE/HOST`.
    pub service: String,
    /// Port of the service.
    pub port: u32,
    /// Name of the log; empty: `otel_envoy_accesslog`.
    pub log_name: String,
    /// Format.
    pub log_format: Option<LogFormat>,
    /// Filter state that is logged.
    pub filter_state_objects_to_log: Vec<String>,
}
