//! Access logs of the mesh configuration and of extension providers.

use std::collections::BTreeMap;

use skysail_policy::operators;
use skysail_xds::{
    envoy::pb::{
        envoy::{
            config::accesslog::v3::{
                AccessLog, AccessLogFilter, AndFilter, ExtensionFilter, ResponseFlagFilter, access_log,
                access_log_filter::FilterSpecifier, extension_filter,
            },
            extensions::access_loggers::{
                file::v3::{FileAccessLog, file_access_log::AccessLogFormat},
                filters::cel::v3::ExpressionFilter,
                grpc::v3::{CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig, TcpGrpcAccessLogConfig},
                open_telemetry::v3::OpenTelemetryAccessLogConfig,
            },
        },
        google::protobuf::{ListValue, value::Kind},
        opentelemetry::proto::common::v1::{AnyValue, KeyValue, KeyValueList, any_value},
    },
    istio,
};

use super::{
    authorizer::grpc_service,
    pb::{Any, Struct, Value, core, pack},
};
use crate::{
    World,
    api::{
        MeshConfig, extension_provider::ExtensionProvider, mesh_config::LogEncoding, telemetry::LogFilter,
    },
};

use core::substitution_format_string::Format;

/// Istio's default text format.
const TEXT: &str = concat!(
    "[%START_TIME%] \"%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" %RESPONSE_CODE% ",
    "%RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% ",
    "\"%UPSTREAM_TRANSPORT_FAILURE_REASON%\" %BYTES_RECEIVED% %BYTES_SENT% %DURATION% ",
    "%RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% \"%REQ(X-FORWARDED-FOR)%\" \"%REQ(USER-AGENT)%\" ",
    "\"%REQ(X-REQUEST-ID)%\" \"%REQ(:AUTHORITY)%\" \"%UPSTREAM_HOST%\" %UPSTREAM_CLUSTER_RAW% ",
    "%UPSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_REMOTE_ADDRESS% ",
    "%REQUESTED_SERVER_NAME% %ROUTE_NAME%\n",
);

/// Istio's default JSON format.
const JSON: [(&str, &str); 24] = [
    ("start_time", "%START_TIME%"),
    ("route_name", "%ROUTE_NAME%"),
    ("method", "%REQ(:METHOD)%"),
    ("path", "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%"),
    ("protocol", "%PROTOCOL%"),
    ("response_code", "%RESPONSE_CODE%"),
    ("response_flags", "%RESPONSE_FLAGS%"),
    ("response_code_details", "%RESPONSE_CODE_DETAILS%"),
    ("connection_termination_details", "%CONNECTION_TERMINATION_DETAILS%"),
    ("bytes_received", "%BYTES_RECEIVED%"),
    ("bytes_sent", "%BYTES_SENT%"),
    ("duration", "%DURATION%"),
    ("upstream_service_time", "%RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)%"),
    ("x_forwarded_for", "%REQ(X-FORWARDED-FOR)%"),
    ("user_agent", "%REQ(USER-AGENT)%"),
    ("request_id", "%REQ(X-REQUEST-ID)%"),
    ("authority", "%REQ(:AUTHORITY)%"),
    ("upstream_host", "%UPSTREAM_HOST%"),
    ("upstream_cluster", "%UPSTREAM_CLUSTER_RAW%"),
    ("upstream_local_address", "%UPSTREAM_LOCAL_ADDRESS%"),
    ("downstream_local_address", "%DOWNSTREAM_LOCAL_ADDRESS%"),
    ("downstream_remote_address", "%DOWNSTREAM_REMOTE_ADDRESS%"),
    ("requested_server_name", "%REQUESTED_SERVER_NAME%"),
    ("upstream_transport_failure_reason", "%UPSTREAM_TRANSPORT_FAILURE_REASON%"),
];

/// Filter state objects in gRPC access logs by default, as in Istio.
const FILTER_STATE: [&str; 2] = ["upstream_peer", "downstream_peer"];
/// Filter state objects in OpenTelemetry access logs by default, as in Istio.
const OTEL_FILTER_STATE: [&str; 6] = [
    "upstream_peer",
    "downstream_peer",
    "wasm.upstream_peer",
    "wasm.upstream_peer_id",
    "wasm.downstream_peer",
    "wasm.downstream_peer_id",
];
/// Provider whose default format is that of the mesh configuration.
pub(crate) const BUILT_IN: &str = "envoy";
/// Default path of access log files.
const STDOUT: &str = "/dev/stdout";

/// Returns the access logs of the mesh configuration; none unless it names a file.
pub(super) fn of_mesh(mesh: &MeshConfig) -> Vec<AccessLog> {
    let path = mesh.access_log_file.clone().filter(|path| !path.is_empty());
    path.map(|path| to_file(path, format(mesh))).into_iter().collect()
}

/// Returns the access log of a provider; `None` if the provider has none, or its service is not known.
pub(super) fn of_provider(world: &World, provider: &ExtensionProvider) -> Option<AccessLog> {
    if let Some(file) = &provider.envoy_file_access_log {
        let path = if file.path.is_empty() { STDOUT } else { &file.path }.to_owned();
        let is_plain = file.log_format.is_none() && !file.omit_empty_values;
        let mut format = match &file.log_format {
            None if is_plain && provider.name == BUILT_IN => format(world.mesh()),
            Some(format) if format.text.is_empty() => json_format(fields_of(&format.labels)),
            format => text_format(format.as_ref().map_or("", |format| &format.text)),
        };
        format.omit_empty_values = file.omit_empty_values;
        return Some(to_file(path, format));
    }
    if let Some(als) = &provider.envoy_http_als {
        let config = HttpGrpcAccessLogConfig {
            common_config: Some(common(
                world,
                (&als.service, als.port),
                &als.log_name,
                "http_envoy_accesslog",
                &als.filter_state_objects_to_log,
            )?),
            additional_request_headers_to_log: als.additional_request_headers_to_log.clone(),
            additional_response_headers_to_log: als.additional_response_headers_to_log.clone(),
            additional_response_trailers_to_log: als.additional_response_trailers_to_log.clone(),
        };
        return Some(log("envoy.access_loggers.http_grpc", pack(&config)));
    }
    if let Some(als) = &provider.envoy_tcp_als {
        let config = TcpGrpcAccessLogConfig {
            common_config: Some(common(
                world,
                (&als.service, als.port),
                &als.log_name,
                "tcp_envoy_accesslog",
                &als.filter_state_objects_to_log,
            )?),
        };
        return Some(log("envoy.tcp_grpc_access_log", pack(&config)));
    }
    let als = provider.envoy_otel_als.as_ref()?;
    let default = OTEL_FILTER_STATE.map(str::to_owned);
    let state = match als.filter_state_objects_to_log.as_slice() {
        [] => &default[..],
        own => own,
    };
    let common = common(world, (&als.service, als.port), &als.log_name, "otel_envoy_accesslog", state)?;
    let format = als.log_format.as_ref();
    let body = format.map(|format| format.text.as_str()).filter(|text| !text.is_empty());
    let body = body.filter(|text| operators::are_known(text)).unwrap_or(TEXT);
    let labels = format.map(|format| &format.labels).filter(|labels| !labels.is_empty());
    let text = |text: &str| AnyValue { value: Some(any_value::Value::StringValue(text.to_owned())) };
    let attribute = |(key, value): (&String, &serde_json::Value)| KeyValue {
        key: key.clone(),
        value: Some(text(usable(value.as_str().unwrap_or_default()))),
        ..Default::default()
    };
    let sorted = labels.map(|labels| labels.iter().collect::<BTreeMap<_, _>>());
    #[expect(deprecated, reason = "what istiod sends; the successor is newer than the proxies of Istio")]
    let config = OpenTelemetryAccessLogConfig {
        common_config: Some(common),
        disable_builtin_labels: true,
        body: Some(text(body)),
        attributes: sorted.map(|labels| KeyValueList { values: labels.into_iter().map(attribute).collect() }),
        ..Default::default()
    };
    Some(log("envoy.access_loggers.open_telemetry", pack(&config)))
}

/// Adds the filter of a Telemetry to an access log.
pub(super) fn with_expression(log: AccessLog, filter: Option<&LogFilter>) -> AccessLog {
    let Some(filter) = filter else { return log };
    let config = ExpressionFilter { expression: filter.expression.clone(), ..Default::default() };
    let filter = ExtensionFilter {
        name: "envoy.access_loggers.extension_filters.cel".into(),
        config_type: Some(extension_filter::ConfigType::TypedConfig(pack(&config))),
    };
    let filter = AccessLogFilter { filter_specifier: Some(FilterSpecifier::ExtensionFilter(filter)) };
    AccessLog { filter: Some(filter), ..log }
}

/// Returns the access logs of a listener itself, for connections without a matching filter chain.
pub(super) fn of_listener(logs: impl Iterator<Item = AccessLog>) -> Vec<AccessLog> {
    let no_route = AccessLogFilter {
        filter_specifier: Some(FilterSpecifier::ResponseFlagFilter(ResponseFlagFilter {
            flags: vec!["NR".into()],
        })),
    };
    let with = |log: AccessLog| {
        let filter = match log.filter {
            None => no_route.clone(),
            Some(own) => {
                let filters = vec![no_route.clone(), own];
                AccessLogFilter { filter_specifier: Some(FilterSpecifier::AndFilter(AndFilter { filters })) }
            }
        };
        AccessLog { filter: Some(filter), ..log }
    };
    logs.map(with).collect()
}

fn log(name: &str, config: Any) -> AccessLog {
    AccessLog {
        name: name.into(),
        filter: None,
        config_type: Some(access_log::ConfigType::TypedConfig(config)),
    }
}

fn to_file(path: String, format: core::SubstitutionFormatString) -> AccessLog {
    let file = FileAccessLog { path, access_log_format: Some(AccessLogFormat::LogFormat(format)) };
    log("envoy.access_loggers.file", pack(&file))
}

/// Returns the settings of a gRPC access log; `None` if its service is not known.
fn common(
    world: &World,
    (service, port): (&str, u32),
    name: &str,
    default_name: &str,
    state: &[String],
) -> Option<CommonGrpcAccessLogConfig> {
    let (host, cluster) = world.provider_cluster(service, port).ok()?;
    let default = FILTER_STATE.map(str::to_owned);
    Some(CommonGrpcAccessLogConfig {
        log_name: if name.is_empty() { default_name } else { name }.to_owned(),
        grpc_service: Some(grpc_service(&host, &cluster)),
        transport_api_version: core::ApiVersion::V3 as i32,
        filter_state_objects_to_log: if state.is_empty() { default.to_vec() } else { state.to_vec() },
        ..Default::default()
    })
}

fn format(mesh: &MeshConfig) -> core::SubstitutionFormatString {
    match mesh.access_log_encoding {
        LogEncoding::Text => text_format(&mesh.access_log_format),
        LogEncoding::Json => json_format(serde_json::from_str(&mesh.access_log_format).ok().map(to_struct)),
    }
}

/// Returns a text, or a missing value if it has an unknown operator: proxies would refuse their listeners.
fn usable(text: &str) -> &str {
    if operators::are_known(text) { text } else { "-" }
}

/// Returns a text format; the default one if it is empty, or has an unknown operator.
fn text_format(text: &str) -> core::SubstitutionFormatString {
    let text = if text.is_empty() || !operators::are_known(text) { TEXT } else { text };
    let text = if text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") };
    let source = core::DataSource {
        specifier: Some(core::data_source::Specifier::InlineString(text)),
        ..Default::default()
    };
    core::SubstitutionFormatString { format: Some(Format::TextFormatSource(source)), ..Default::default() }
}

/// Returns a JSON format; the default one if it is `None`.
fn json_format(fields: Option<Struct>) -> core::SubstitutionFormatString {
    let default = || Struct {
        fields: JSON.iter().map(|(name, value)| ((*name).to_owned(), istio::string(*value))).collect(),
    };
    core::SubstitutionFormatString {
        format: Some(Format::JsonFormat(fields.unwrap_or_else(default))),
        json_format_options: Some(core::JsonFormatOptions::default()),
        ..Default::default()
    }
}

fn fields_of(labels: &serde_json::Map<String, serde_json::Value>) -> Option<Struct> {
    (!labels.is_empty()).then(|| to_struct(labels.clone()))
}

fn to_struct(labels: serde_json::Map<String, serde_json::Value>) -> Struct {
    Struct { fields: labels.into_iter().map(|(name, value)| (name, to_value(value))).collect() }
}

fn to_value(value: serde_json::Value) -> Value {
    use serde_json::Value as Json;
    let kind = match value {
        Json::Null => Kind::NullValue(0),
        Json::Bool(value) => Kind::BoolValue(value),
        Json::Number(value) => Kind::NumberValue(value.as_f64().unwrap_or_default()),
        Json::String(value) => Kind::StringValue(usable(&value).to_owned()),
        Json::Array(values) => {
            Kind::ListValue(ListValue { values: values.into_iter().map(to_value).collect() })
        }
        Json::Object(fields) => Kind::StructValue(to_struct(fields)),
    };
    Value { kind: Some(kind) }
}
