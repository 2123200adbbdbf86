//! Entries of Envoy's gRPC access log service.
//!
//! Fields are set as in Envoy, except for data that is not recorded for every request: intermediate timestamps,
//! wire sizes of heads, and negotiated TLS parameters. Source: `envoy.data.accesslog.v3`.

use std::{
    collections::HashMap,
    net::SocketAddr,
    time::{Duration, SystemTime},
};

use prost::encoding::message;
use serde_json::{Map, Value};
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{
            Address, Metadata, Pipe, RequestMethod, SocketAddress, address, socket_address::PortSpecifier,
        },
        data::accesslog::v3::{
            AccessLogCommon, AccessLogType, ConnectionProperties, HttpAccessLogEntry, HttpRequestProperties,
            HttpResponseProperties, ResponseFlags, TcpAccessLogEntry, TlsProperties,
            http_access_log_entry::HttpVersion,
            response_flags::{Unauthorized, unauthorized::Reason},
            tls_properties::{
                CertificateProperties,
                certificate_properties::{SubjectAltName, subject_alt_name::San},
            },
        },
    },
    google::protobuf::{
        Duration as DurationProto, ListValue, Struct, Timestamp, UInt32Value, Value as ValueProto,
        value::Kind,
    },
};

use skysail_http::head::{Headers, RequestHead, ResponseHead, Version};
use skysail_policy::{
    config::{cluster::Place, http::LogHeaders},
    error::Flags,
    peer::Peer,
    record::{Context, Record},
};

#[cfg(test)]
mod tests;

/// Field number of entries in the lists of `StreamAccessLogsMessage`.
const LOG_ENTRY: u32 = 1;

/// Appends the entry of a request (`http`) or a connection.
pub(crate) fn entry(http: Option<&LogHeaders>, context: &Context<'_>, items: &mut Vec<u8>) {
    let mut common = common(context.record);
    let Some(headers) = http else {
        // Envoy sets no type in entries of a listener's own access log.
        if context.record.details != "filter_chain_not_found" {
            common.set_access_log_type(AccessLogType::TcpConnectionEnd);
        }
        let Record { bytes_received, bytes_sent, wire_received, wire_sent, .. } = *context.record;
        (common.downstream_wire_bytes_received, common.downstream_wire_bytes_sent) =
            (wire_received, wire_sent);
        if context.record.upstream.is_some() {
            (common.upstream_wire_bytes_received, common.upstream_wire_bytes_sent) =
                (wire_sent, wire_received);
        }
        let connection = ConnectionProperties { received_bytes: bytes_received, sent_bytes: bytes_sent };
        let entry =
            TcpAccessLogEntry { common_properties: Some(common), connection_properties: Some(connection) };
        return message::encode(LOG_ENTRY, &entry, items);
    };
    common.set_access_log_type(AccessLogType::DownstreamEnd);
    common.time_to_last_downstream_tx_byte = common.duration;
    let head = context.request;
    common.stream_id = head.map(|head| field(head.headers(), "x-request-id")).unwrap_or_default();
    let entry = HttpAccessLogEntry {
        common_properties: Some(common),
        protocol_version: head.map_or(HttpVersion::ProtocolUnspecified, version).into(),
        request: Some(head.map(|head| request(head, headers, context.record)).unwrap_or_default()),
        response: Some(response(context.response, headers, context.record)),
    };
    message::encode(LOG_ENTRY, &entry, items);
}

fn common(record: &Record<'_>) -> AccessLogCommon {
    let since = record.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let micros = since.subsec_micros().cast_signed();
    AccessLogCommon {
        downstream_remote_address: record.downstream_remote.map(address),
        downstream_local_address: record.downstream_local.map(address),
        downstream_direct_remote_address: record.downstream_direct.map(address),
        upstream_remote_address: record.upstream_place().map(place),
        upstream_local_address: record.upstream_local.map(address),
        upstream_cluster: record.cluster.map(|cluster| cluster.name.to_string()).unwrap_or_default(),
        tls_properties: record.downstream.filter(|peer| peer.tls).map(|peer| tls(peer, record.server_name)),
        start_time: Some(Timestamp { seconds: since.as_secs().cast_signed(), nanos: micros * 1000 }),
        duration: Some(duration(record.duration)),
        response_flags: (record.flags != Flags::NONE).then(|| flags(record)),
        metadata: record.metadata.filter(|found| !found.is_empty()).map(|found| Metadata {
            filter_metadata: found.iter().map(filter_metadata).collect(),
            ..Metadata::default()
        }),
        upstream_transport_failure_reason: record.upstream_failure.to_owned(),
        route_name: record.route_name.to_owned(),
        upstream_request_attempt_count: record.attempts,
        connection_termination_details: record.termination.to_owned(),
        ..AccessLogCommon::default()
    }
}

fn request(head: &RequestHead, logged: &LogHeaders, record: &Record<'_>) -> HttpRequestProperties {
    let text = |name| field(head.headers(), name);
    let apart = [":method", ":path", ":authority", ":scheme"];
    let apart = apart.iter().filter_map(|name| Some(name.len() + head.pseudo_header(name)?.len()));
    HttpRequestProperties {
        request_method: RequestMethod::from_str_name(head.method())
            .unwrap_or(RequestMethod::MethodUnspecified)
            .into(),
        scheme: head.scheme().to_owned(),
        authority: head.authority().to_owned(),
        path: head.path().to_owned(),
        user_agent: text("user-agent"),
        referer: text("referer"),
        forwarded_for: text("x-forwarded-for"),
        request_id: text("x-request-id"),
        original_path: text("x-envoy-original-path"),
        request_headers_bytes: (apart.sum::<usize>() + size(head.headers())) as u64,
        request_body_bytes: record.bytes_received,
        request_headers: fields(&logged.request, |name| match head.pseudo_header(name) {
            Some(value) => Some(value.to_owned()),
            None => joined(head.headers(), name),
        }),
        ..HttpRequestProperties::default()
    }
}

fn response(head: Option<&ResponseHead>, logged: &LogHeaders, record: &Record<'_>) -> HttpResponseProperties {
    let headers = head.map(ResponseHead::headers);
    HttpResponseProperties {
        response_code: (record.status != 0).then(|| UInt32Value { value: record.status.into() }),
        response_headers_bytes: headers.map_or(0, |headers| ":status200".len() + size(headers)) as u64,
        response_body_bytes: record.bytes_sent,
        response_headers: fields(&logged.response, |name| match (name, headers?) {
            (":status", _) => Some(record.status.to_string()),
            (name, headers) => joined(headers, name),
        }),
        response_code_details: record.details.to_owned(),
        ..HttpResponseProperties::default()
    }
}

/// Returns the size of names and values, without separators.
fn size(headers: &Headers) -> usize {
    headers.iter().map(|(name, value)| name.len() + value.len()).sum()
}

fn fields(names: &[Box<str>], value: impl Fn(&str) -> Option<String>) -> HashMap<String, String> {
    names.iter().filter_map(|name| Some((name.to_string(), value(name)?))).collect()
}

/// Returns all values of a header, joined.
fn joined(headers: &Headers, name: &str) -> Option<String> {
    let mut values = headers.header_values(name).map(String::from_utf8_lossy);
    let first = values.next()?.into_owned();
    Some(values.fold(first, |all, value| all + "," + &*value))
}

fn field(headers: &Headers, name: &str) -> String {
    headers.header(name).map(|value| String::from_utf8_lossy(value).into_owned()).unwrap_or_default()
}

fn version(head: &RequestHead) -> HttpVersion {
    match head.version {
        Version::Http10 => HttpVersion::Http10,
        Version::Http11 => HttpVersion::Http11,
        Version::Http2 => HttpVersion::Http2,
    }
}

fn tls(peer: &Peer, server_name: Option<&str>) -> TlsProperties {
    let name = |san| SubjectAltName { san: Some(san) };
    let names = peer.names();
    let certificate = names.map(|names| CertificateProperties {
        subject_alt_name: names
            .uris
            .iter()
            .map(|uri| name(San::Uri(uri.clone())))
            .chain(names.dns.iter().map(|dns| name(San::Dns(dns.clone()))))
            .collect(),
        subject: names.subject.clone(),
        ..CertificateProperties::default()
    });
    let local = peer.local_principal.iter().map(|uri| name(San::Uri(uri.to_string()))).collect();
    TlsProperties {
        tls_sni_hostname: server_name.unwrap_or_default().to_owned(),
        local_certificate_properties: Some(CertificateProperties {
            subject_alt_name: local,
            ..CertificateProperties::default()
        }),
        peer_certificate_properties: Some(certificate.unwrap_or_default()),
        ..TlsProperties::default()
    }
}

fn flags(record: &Record<'_>) -> ResponseFlags {
    let has = |flag| record.flags.contains(flag);
    ResponseFlags {
        no_healthy_upstream: has(Flags::UH),
        upstream_request_timeout: has(Flags::UT),
        local_reset: has(Flags::LR),
        upstream_remote_reset: has(Flags::UR),
        upstream_connection_failure: has(Flags::UF),
        upstream_connection_termination: has(Flags::UC),
        upstream_overflow: has(Flags::UO),
        no_route_found: has(Flags::NR),
        delay_injected: has(Flags::DI),
        fault_injected: has(Flags::FI),
        rate_limited: has(Flags::RL),
        rate_limit_service_error: has(Flags::RLSE),
        unauthorized_details: has(Flags::UAEX)
            .then(|| Unauthorized { reason: Reason::ExternalService.into() }),
        downstream_connection_termination: has(Flags::DC),
        upstream_retry_limit_exceeded: has(Flags::URX),
        stream_idle_timeout: has(Flags::SI),
        downstream_protocol_error: has(Flags::DPE),
        upstream_max_stream_duration_reached: has(Flags::UMSDR),
        no_filter_config_found: has(Flags::NFCF),
        duration_timeout: has(Flags::DT),
        upstream_protocol_error: has(Flags::UPE),
        no_cluster_found: has(Flags::NC),
        overload_manager: has(Flags::OM),
        dns_resolution_failure: has(Flags::DF),
        ..ResponseFlags::default()
    }
}

fn address(of: SocketAddr) -> Address {
    Address {
        address: Some(address::Address::SocketAddress(SocketAddress {
            address: of.ip().to_string(),
            port_specifier: Some(PortSpecifier::PortValue(of.port().into())),
            ..SocketAddress::default()
        })),
    }
}

fn place(of: Place<'_>) -> Address {
    match of {
        Place::Ip(socket) => address(socket),
        Place::Pipe(path) => {
            let pipe = Pipe { path: path.to_owned(), ..Pipe::default() };
            Address { address: Some(address::Address::Pipe(pipe)) }
        }
    }
}

fn duration(of: Duration) -> DurationProto {
    let seconds = i64::try_from(of.as_secs()).unwrap_or(i64::MAX);
    DurationProto { seconds, nanos: of.subsec_nanos().cast_signed() }
}

/// Returns the dynamic metadata of a filter.
fn filter_metadata((filter, found): (&String, &Value)) -> (String, Struct) {
    let fields = found.as_object().map(structure).unwrap_or_default();
    (filter.clone(), fields)
}

pub(crate) fn structure(map: &Map<String, Value>) -> Struct {
    Struct { fields: map.iter().map(|(key, value)| (key.clone(), value_proto(value))).collect() }
}

fn value_proto(value: &Value) -> ValueProto {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(list) => Kind::ListValue(ListValue { values: list.iter().map(value_proto).collect() }),
        Value::Object(map) => Kind::StructValue(structure(map)),
    };
    ValueProto { kind: Some(kind) }
}
