//! Translates access logs that are sent to gRPC and OpenTelemetry collectors.

use std::time::Duration;

use skysail_proto::Codec as _;
use skysail_proto::{
    envoy::pb::{
        envoy::{
            config::core::v3::{GrpcService, HeaderValueOption, HttpService, Node},
            extensions::access_loggers::{
                grpc::v3::{CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig},
                open_telemetry::v3::OpenTelemetryAccessLogConfig,
            },
            service::accesslog::v3::{StreamAccessLogsMessage, stream_access_logs_message::Identifier},
        },
        google::protobuf::{Duration as DurationProto, UInt32Value},
        opentelemetry::proto::common::v1::{AnyValue, KeyValue, any_value::Value},
    },
    otlp::{self, EXPORT_LOGS, Resource, ResourceLogs, attribute},
};

use super::{
    At as _, Reject, Result,
    authorization::{self, GrpcTarget},
    duration, jwt, number, text,
};
use skysail_policy::config::{
    collector::{Call, Collector, Envelope},
    http::{LogHeaders, LogTarget, LogValue},
};

const STREAM: &str = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs";
/// Field numbers of `StreamAccessLogsMessage`.
const HTTP_LOGS: u32 = 2;
const TCP_LOGS: u32 = 3;

/// Envoy's defaults for the buffer.
const SIZE: u32 = 16 * 1024;
const INTERVAL: Duration = Duration::from_secs(1);
/// Request timeout. Envoy's default is no timeout.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Translates the HTTP gRPC access log.
pub(super) fn http(proto: &HttpGrpcAccessLogConfig, node: &Node) -> Result<LogTarget> {
    let names = |names: &[String]| names.iter().map(|name| name.to_ascii_lowercase().into()).collect();
    let headers = LogHeaders {
        request: names(&proto.additional_request_headers_to_log),
        response: names(&proto.additional_response_headers_to_log),
    };
    entries(proto.common_config.as_ref(), HTTP_LOGS, Some(headers), node)
}

/// Translates the TCP gRPC access log.
pub(super) fn tcp(common: Option<&CommonGrpcAccessLogConfig>, node: &Node) -> Result<LogTarget> {
    entries(common, TCP_LOGS, None, node)
}

fn entries(
    common: Option<&CommonGrpcAccessLogConfig>,
    field: u32,
    http: Option<LogHeaders>,
    node: &Node,
) -> Result<LogTarget> {
    let missing = || Reject::new("must be given");
    let common = common.ok_or_else(|| missing().at_field("common_config"))?;
    let service = common.grpc_service.as_ref().ok_or_else(|| missing().at_field("grpc_service"));
    let identifier = Identifier { node: Some(node.clone()), log_name: common.log_name.clone() };
    let first = StreamAccessLogsMessage { identifier: Some(identifier), log_entries: None }.to_vec();
    let envelope = Envelope::Message { before: Vec::new(), around: vec![(Vec::new(), field)], first };
    let collector = service
        .and_then(|service| grpc(service, Call::Stream(STREAM), envelope))
        .and_then(|collector| {
            batches(collector, common.buffer_size_bytes, common.buffer_flush_interval.as_ref())
        })
        .at("common_config")?;
    Ok(LogTarget::Entries { collector: collector.into(), http })
}

/// Translates the OpenTelemetry access log.
#[expect(deprecated, reason = "control planes still send common_config")]
pub(super) fn records(proto: &OpenTelemetryAccessLogConfig, node: &Node) -> Result<LogTarget> {
    let common = proto.common_config.clone().unwrap_or_default();
    let log_name = if proto.log_name.is_empty() { &common.log_name } else { &proto.log_name };
    let mut attributes = Vec::new();
    if !proto.disable_builtin_labels {
        let zone = node.locality.as_ref().map_or("", |locality| &locality.zone);
        let labels = [
            ("log_name", &**log_name),
            ("zone_name", zone),
            ("cluster_name", &node.cluster),
            ("node_name", &node.id),
        ];
        attributes.extend(labels.map(|(key, value)| attribute(key, value)));
    }
    attributes.extend(proto.resource_attributes.iter().flat_map(|list| list.values.clone()));
    let resource = ResourceLogs {
        resource: Some(Resource { attributes, ..Resource::default() }),
        ..ResourceLogs::default()
    };
    let envelope = Envelope::Message {
        before: Vec::new(),
        around: vec![(resource.to_vec(), 2), (Vec::new(), 1)],
        first: Vec::new(),
    };
    let unary = Call::Unary(EXPORT_LOGS);
    let collector = match (&proto.grpc_service, &proto.http_service, &common.grpc_service) {
        (Some(service), None, None) => grpc(service, unary, envelope).at("grpc_service"),
        (None, Some(service), None) => post(service, envelope).at("http_service"),
        (None, None, Some(service)) => grpc(service, unary, envelope).at("common_config.grpc_service"),
        _ => Err(Reject::new("needs one of grpc_service, http_service and common_config.grpc_service")),
    }?;
    let size = proto.buffer_size_bytes.or(common.buffer_size_bytes);
    let interval = proto.buffer_flush_interval.as_ref().or(common.buffer_flush_interval.as_ref());
    let attributes = proto.attributes.as_ref().map_or(&[][..], |list| &list.values);
    Ok(LogTarget::Records {
        collector: batches(collector, size, interval)?.into(),
        body: proto.body.as_ref().map(value).transpose().at("body")?,
        attributes: named(attributes).at("attributes")?,
    })
}

fn grpc(proto: &GrpcService, call: Call, envelope: Envelope) -> Result<Collector> {
    let GrpcTarget { cluster, authority, metadata, timeout } = authorization::grpc(proto)?;
    Ok(collector(cluster, authority, call, envelope, metadata, timeout.unwrap_or(TIMEOUT)))
}

fn post(proto: &HttpService, envelope: Envelope) -> Result<Collector> {
    let uri = proto.http_uri.as_ref().ok_or_else(|| Reject::new("must be given").at_field("http_uri"))?;
    let uri = jwt::http_uri(uri).at("http_uri")?;
    let headers = headers(&proto.request_headers_to_add).at("request_headers_to_add")?;
    let call = Call::Post { path: uri.path, content_type: "application/x-protobuf" };
    Ok(collector(uri.cluster, uri.authority, call, envelope, headers, uri.timeout))
}

/// Translates headers with constant values.
pub(super) fn headers(protos: &[HeaderValueOption]) -> Result<Vec<(Box<str>, Box<str>)>> {
    let mut headers = Vec::with_capacity(protos.len());
    for header in protos.iter().filter_map(|proto| proto.header.as_ref()) {
        if header.value.contains('%') {
            return Err(Reject::new(format!("{}: operators are not supported here", header.key)));
        }
        headers.push((header.key.to_ascii_lowercase().into(), header.value.as_str().into()));
    }
    Ok(headers)
}

fn collector(
    cluster: Box<str>,
    authority: Box<str>,
    call: Call,
    envelope: Envelope,
    headers: Vec<(Box<str>, Box<str>)>,
    timeout: Duration,
) -> Collector {
    let (interval, size) = (INTERVAL, SIZE as usize);
    Collector { what: "access logs", cluster, authority, call, headers, timeout, interval, size, envelope }
}

/// Sets the maximum size and the flush interval of batches.
fn batches(
    collector: Collector,
    size: Option<UInt32Value>,
    interval: Option<&DurationProto>,
) -> Result<Collector> {
    let interval = match interval {
        Some(interval) => duration(interval).at("buffer_flush_interval")?,
        None => INTERVAL,
    };
    if interval.is_zero() {
        return Err(Reject::new("must be greater than 0").at_field("buffer_flush_interval"));
    }
    Ok(Collector { interval, size: number(size).unwrap_or(SIZE) as usize, ..collector })
}

fn named(protos: &[KeyValue]) -> Result<Vec<(Box<str>, LogValue)>> {
    let pair = |proto: &KeyValue| {
        let value = proto.value.as_ref().map_or_else(|| value(&otlp::string("")), value).at(&proto.key)?;
        Ok((proto.key.as_str().into(), value))
    };
    protos.iter().map(pair).collect()
}

fn value(proto: &AnyValue) -> Result<LogValue> {
    match &proto.value {
        Some(Value::StringValue(format)) => text::lenient_format(format).map(LogValue::Text),
        Some(Value::ArrayValue(list)) => {
            list.values.iter().map(value).collect::<Result<_>>().map(LogValue::List)
        }
        Some(Value::KvlistValue(map)) => named(&map.values).map(LogValue::Map),
        // As in Envoy.
        _ => Err(Reject::new("only strings, lists and maps are supported")),
    }
}
