//! Access logs of the mesh configuration.

use skysail_xds::{
    envoy::pb::envoy::{
        config::accesslog::v3::{
            AccessLog, AccessLogFilter, ResponseFlagFilter, access_log, access_log_filter::FilterSpecifier,
        },
        extensions::access_loggers::file::v3::{FileAccessLog, file_access_log::AccessLogFormat},
    },
    istio,
};

use super::pb::{Struct, core, pack};
use crate::api::{MeshConfig, mesh_config::LogEncoding};

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

/// Returns the access logs of a filter; none unless the mesh configuration names a file.
pub(super) fn of_filter(mesh: &MeshConfig) -> Vec<AccessLog> {
    let Some(path) = mesh.access_log_file.clone().filter(|path| !path.is_empty()) else { return Vec::new() };
    let file = FileAccessLog { path, access_log_format: Some(AccessLogFormat::LogFormat(format(mesh))) };
    vec![AccessLog {
        name: "envoy.access_loggers.file".into(),
        filter: None,
        config_type: Some(access_log::ConfigType::TypedConfig(pack(&file))),
    }]
}

/// Returns the access logs of a listener itself, for connections without a matching filter chain.
pub(super) fn of_listener(mesh: &MeshConfig) -> Vec<AccessLog> {
    let no_route = AccessLogFilter {
        filter_specifier: Some(FilterSpecifier::ResponseFlagFilter(ResponseFlagFilter {
            flags: vec!["NR".into()],
        })),
    };
    let logs = of_filter(mesh).into_iter();
    logs.map(|log| AccessLog { filter: Some(no_route.clone()), ..log }).collect()
}

fn format(mesh: &MeshConfig) -> core::SubstitutionFormatString {
    use core::substitution_format_string::Format;
    let format = match mesh.access_log_encoding {
        LogEncoding::Text => Format::TextFormatSource(core::DataSource {
            specifier: Some(core::data_source::Specifier::InlineString(text(mesh))),
            ..Default::default()
        }),
        LogEncoding::Json => Format::JsonFormat(json(mesh)),
    };
    core::SubstitutionFormatString { format: Some(format), ..Default::default() }
}

fn text(mesh: &MeshConfig) -> String {
    let format = if mesh.access_log_format.is_empty() { TEXT } else { &mesh.access_log_format };
    if format.ends_with('\n') { format.to_owned() } else { format!("{format}\n") }
}

/// Returns the configured JSON fields, or the default ones if the format is empty or no JSON object of texts.
fn json(mesh: &MeshConfig) -> Struct {
    let own: Option<std::collections::BTreeMap<String, String>> =
        serde_json::from_str(&mesh.access_log_format).ok();
    let fields = match own {
        Some(own) => own.into_iter().map(|(name, value)| (name, istio::string(value))).collect(),
        None => JSON.iter().map(|(name, value)| ((*name).to_owned(), istio::string(*value))).collect(),
    };
    Struct { fields }
}
