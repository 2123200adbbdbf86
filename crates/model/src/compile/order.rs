//! Deterministic order of fields and map entries.
//!
//! Fields of packed messages have the order in which Go writes them: members of a `oneof` last. Either order encodes
//! the same message. But Go's `proto.Equal` compares what is packed in an `Any` as bytes, and so do the tools that
//! compare our configuration with istiod's. Only packed messages with fields after a `oneof` need a row here.
//!
//! Entries of maps are sorted. prost keeps them in hash maps and writes them in any order. Without sorting, the same
//! resource would get a new fingerprint each time it is compiled, and would be sent again.

use std::sync::Arc;

use prost::encoding::{WireType, decode_key, decode_varint};
use skysail_proto::Codec;
use skysail_xds::{Kind, Resource};

use super::pb::route::VirtualHost;
use crate::wire::EncodedField;

/// Fields that are written last, fields that are maps, and fields that are messages with a shape of their own.
struct Shape {
    last: &'static [u32],
    maps: &'static [u32],
    nested: &'static [(u32, &'static Shape)],
}

const fn shape(last: &'static [u32], nested: &'static [(u32, &'static Shape)]) -> Shape {
    Shape { last, maps: &[], nested }
}

const fn with_maps(maps: &'static [u32], nested: &'static [(u32, &'static Shape)]) -> Shape {
    Shape { last: &[], maps, nested }
}

static VALUE: Shape = shape(&[], &[(5, &STRUCT), (6, &LIST)]);
static LIST: Shape = shape(&[], &[(1, &VALUE)]);
static STRUCT: Shape = with_maps(&[1], &[(1, &STRUCT_ENTRY)]);
static STRUCT_ENTRY: Shape = shape(&[], &[(2, &VALUE)]);
static METADATA: Shape = with_maps(&[1], &[(1, &METADATA_ENTRY)]);
static METADATA_ENTRY: Shape = shape(&[], &[(2, &STRUCT)]);

static CLUSTER: Shape = with_maps(&[36], &[(25, &METADATA), (33, &ASSIGNMENT)]);
static ENDPOINT: Shape = shape(&[], &[(3, &METADATA)]);
static LOCALITY: Shape = shape(&[], &[(2, &ENDPOINT)]);
static ASSIGNMENT: Shape = shape(&[], &[(2, &LOCALITY)]);
static NAME_TABLE: Shape = with_maps(&[1], &[]);

static CONFIG_SOURCE: Shape = shape(&[1, 2, 3, 5, 8], &[]);
static SECRET: Shape = shape(&[], &[(2, &CONFIG_SOURCE)]);
static COMBINED_VALIDATION: Shape = shape(&[], &[(2, &SECRET)]);
static TLS: Shape = shape(&[3, 7, 8, 10, 12], &[(6, &SECRET), (7, &SECRET), (8, &COMBINED_VALIDATION)]);
static TLS_CONTEXT: Shape = shape(&[], &[(1, &TLS)]);

static RDS: Shape = shape(&[], &[(1, &CONFIG_SOURCE)]);
static ROUTE_ACTION: Shape = shape(&[1, 2, 3, 37, 39], &[]);
static ROUTE: Shape =
    Shape { last: &[2, 3, 7, 17, 18], maps: &[13], nested: &[(2, &ROUTE_ACTION), (4, &METADATA)] };
static VIRTUAL_HOST: Shape = shape(&[], &[(3, &ROUTE)]);
static ROUTES: Shape = shape(&[], &[(2, &VIRTUAL_HOST)]);
static HTTP_MANAGER: Shape = shape(&[3, 4, 31], &[(3, &RDS), (4, &ROUTES)]);
static DYNAMIC_CLUSTER: Shape = shape(&[1, 4], &[]);
static TCP_PROXY: Shape = shape(&[2, 10], &[]);

static FAULT_DELAY: Shape = shape(&[3, 5], &[]);
static FAULT_ABORT: Shape = shape(&[2, 4, 5], &[]);
static FAULT: Shape = shape(&[], &[(1, &FAULT_DELAY), (2, &FAULT_ABORT)]);

static STRING_MATCHER: Shape = shape(&[1, 2, 3, 5, 7, 8], &[]);
static HEADER_MATCHER: Shape = shape(&[4, 6, 7, 9, 10, 11, 12, 13], &[(13, &STRING_MATCHER)]);
static PERMISSIONS: Shape = shape(&[], &[(1, &PERMISSION)]);
static PERMISSION: Shape =
    shape(&[], &[(1, &PERMISSIONS), (2, &PERMISSIONS), (4, &HEADER_MATCHER), (8, &PERMISSION)]);
static PRINCIPALS: Shape = shape(&[], &[(1, &PRINCIPAL)]);
static PRINCIPAL: Shape =
    shape(&[], &[(1, &PRINCIPALS), (2, &PRINCIPALS), (6, &HEADER_MATCHER), (8, &PRINCIPAL)]);
static POLICY: Shape = shape(&[], &[(1, &PERMISSION), (2, &PRINCIPAL)]);
static POLICY_ENTRY: Shape = shape(&[], &[(2, &POLICY)]);
static RULES: Shape = shape(&[], &[(2, &POLICY_ENTRY)]);
static RBAC: Shape = shape(&[], &[(1, &RULES), (2, &RULES)]);

static JWT_PROVIDER: Shape = shape(&[3, 4], &[]);
static JWT_PROVIDER_ENTRY: Shape = shape(&[], &[(2, &JWT_PROVIDER)]);
static JWT: Shape = shape(&[], &[(1, &JWT_PROVIDER_ENTRY)]);

static HTTP_URI: Shape = shape(&[2], &[]);
static GRPC_SERVICE: Shape = shape(&[1, 2], &[]);
static MATCHER_LIST: Shape = shape(&[], &[(1, &STRING_MATCHER)]);
static AUTHORIZATION_RESPONSE: Shape =
    shape(&[], &[(1, &MATCHER_LIST), (2, &MATCHER_LIST), (4, &MATCHER_LIST)]);
static AUTHORIZATION_SERVICE: Shape = shape(&[], &[(1, &HTTP_URI), (8, &AUTHORIZATION_RESPONSE)]);
static EXT_AUTHZ: Shape =
    shape(&[1, 3], &[(1, &GRPC_SERVICE), (3, &AUTHORIZATION_SERVICE), (17, &MATCHER_LIST)]);
static FORMAT: Shape = shape(&[1, 2, 5], &[(2, &STRUCT)]);
static FILE_LOG: Shape = shape(&[2, 3, 4, 5], &[(5, &FORMAT)]);
static HTTP_SERVICE: Shape = shape(&[], &[(1, &HTTP_URI)]);
static OPENTELEMETRY: Shape = shape(&[], &[(1, &GRPC_SERVICE), (3, &HTTP_SERVICE)]);
static ZIPKIN: Shape = shape(&[], &[(9, &HTTP_SERVICE)]);
static METRIC: Shape = with_maps(&[1], &[]);
static STATS: Shape = shape(&[], &[(8, &METRIC)]);
static TCP_EXT_AUTHZ: Shape = shape(&[], &[(2, &GRPC_SERVICE)]);

/// Encodes a virtual host of a route configuration, with its domains as aliases.
pub(super) fn encode_host(routes: &str, host: &VirtualHost) -> Arc<Resource> {
    let aliases: Vec<String> =
        host.domains.iter().map(|domain| format!("{routes}/{}", domain.to_ascii_lowercase())).collect();
    let body = encoded(Kind::VirtualHost, host).into();
    Resource::with_aliases(Kind::VirtualHost, &host.name, body, aliases.iter().map(String::as_str))
}

/// Encodes a resource, with the same bytes every time.
pub(super) fn encode<M: Codec>(kind: Kind, name: &str, message: &M) -> Arc<Resource> {
    Resource::from_body(kind, name, encoded(kind, message).into())
}

fn encoded<M: Codec>(kind: Kind, message: &M) -> Vec<u8> {
    let body = message.to_vec();
    let shape = match kind {
        Kind::Cluster => &CLUSTER,
        Kind::Endpoint => &ASSIGNMENT,
        Kind::Route => &ROUTES,
        Kind::VirtualHost => &VIRTUAL_HOST,
        Kind::NameTable => &NAME_TABLE,
        _ => return body,
    };
    ordered(shape, &body).unwrap_or(body)
}

/// Rewrites the message of this full name with its fields in Go's order.
pub(super) fn in_go_order(message: &str, body: Vec<u8>) -> Vec<u8> {
    let shape = match message.strip_prefix("envoy.extensions.").unwrap_or(message) {
        "clusters.dynamic_forward_proxy.v3.ClusterConfig" => &DYNAMIC_CLUSTER,
        "transport_sockets.tls.v3.UpstreamTlsContext" | "transport_sockets.tls.v3.DownstreamTlsContext" => {
            &TLS_CONTEXT
        }
        "filters.network.http_connection_manager.v3.HttpConnectionManager" => &HTTP_MANAGER,
        "filters.network.tcp_proxy.v3.TcpProxy" => &TCP_PROXY,
        "filters.http.fault.v3.HTTPFault" => &FAULT,
        "access_loggers.file.v3.FileAccessLog" => &FILE_LOG,
        "envoy.config.trace.v3.OpenTelemetryConfig" => &OPENTELEMETRY,
        "envoy.config.trace.v3.ZipkinConfig" => &ZIPKIN,
        "stats.PluginConfig" => &STATS,
        "filters.http.jwt_authn.v3.JwtAuthentication" => &JWT,
        "filters.http.ext_authz.v3.ExtAuthz" => &EXT_AUTHZ,
        "filters.network.ext_authz.v3.ExtAuthz" => &TCP_EXT_AUTHZ,
        "filters.http.rbac.v3.RBAC" | "filters.network.rbac.v3.RBAC" => &RBAC,
        _ => return body,
    };
    ordered(shape, &body).unwrap_or(body)
}

/// Returns the bytes in order; `None` if they are not a message, which cannot happen as they were just encoded.
fn ordered(shape: &Shape, mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut first = Vec::with_capacity(rest.len());
    let mut last = Vec::new();
    // Entries of the current map.
    let mut entries: Vec<Vec<u8>> = Vec::new();
    let mut map = None;
    while !rest.is_empty() {
        let EncodedField { number, bytes, content } = EncodedField::take(&mut rest)?;
        if map.is_some_and(|map| map != number) {
            flush(&mut entries, &mut first);
        }
        map = shape.maps.contains(&number).then_some(number);
        let to = match map {
            Some(_) => {
                entries.push(Vec::new());
                entries.last_mut()?
            }
            None if shape.last.contains(&number) => &mut last,
            None => &mut first,
        };
        let nested = shape.nested.iter().find(|(nested, _)| *nested == number);
        match content.zip(nested) {
            Some((value, (_, shape))) => {
                to.extend_from_slice(bytes.get(..bytes.len() - value.len())?);
                to.extend(ordered(shape, value)?);
            }
            None => to.extend_from_slice(bytes),
        }
    }
    flush(&mut entries, &mut first);
    first.append(&mut last);
    Some(first)
}

fn flush(entries: &mut Vec<Vec<u8>>, to: &mut Vec<u8>) {
    entries.sort_unstable_by(|a, b| map_key(a).cmp(&map_key(b)));
    entries.drain(..).for_each(|entry| to.extend(entry));
}

/// Returns the key of a map's entry, if it is a text. An entry without a key has the empty one.
fn map_key(mut entry: &[u8]) -> Option<&[u8]> {
    decode_key(&mut entry).ok()?;
    decode_varint(&mut entry).ok()?;
    let (number, WireType::LengthDelimited) = decode_key(&mut entry).ok()? else { return None };
    if number != 1 {
        return Some(&[]);
    }
    let length = usize::try_from(decode_varint(&mut entry).ok()?).ok()?;
    entry.get(..length)
}

#[cfg(test)]
mod tests {
    use prost::{Message as _, Name as _};
    use skysail_xds::envoy::pb::{
        envoy::extensions::filters::{
            common::fault::v3::{FaultDelay, fault_delay::FaultDelaySecifier},
            http::fault::v3::HttpFault,
        },
        google::protobuf::value::Kind as Value,
    };

    use super::*;
    use crate::compile::pb::{metadata, seconds, whole_percent};

    #[test]
    fn maps_are_encoded_in_one_order() {
        use skysail_xds::{envoy::pb::envoy::config::cluster::v3::Cluster, istio};
        let make = || {
            let names: Vec<String> = (0..20).map(|number| format!("name {number}")).collect();
            let fields = || names.iter().map(|name| (name.as_str(), istio::string(name.as_str())));
            let nested = istio::list([istio::structure(fields())]);
            let value = istio::structure(fields().chain([("nested", nested)]));
            let Some(Value::StructValue(value)) = value.kind else { panic!("a structure is one") };
            Cluster { name: "c".into(), metadata: Some(metadata("istio", value)), ..Cluster::default() }
        };
        let (one, other) = (make(), make());
        assert_ne!(one.encode_to_vec(), other.encode_to_vec(), "else this test shows nothing");
        let first = encode(Kind::Cluster, "c", &one);
        assert_eq!(first.body, encode(Kind::Cluster, "c", &other).body);
        assert_eq!(Cluster::decode(first.body.clone()).unwrap(), one);
    }

    #[test]
    fn the_message_is_equal_and_oneofs_are_last() {
        let delay = FaultDelay {
            percentage: Some(whole_percent(50)),
            fault_delay_secifier: Some(FaultDelaySecifier::FixedDelay(seconds(7))),
        };
        let fault = HttpFault { delay: Some(delay), ..Default::default() };
        let body = in_go_order(&HttpFault::full_name(), fault.encode_to_vec());
        assert_eq!(HttpFault::decode(body.as_slice()).unwrap(), fault);
        // delay { percentage (4) { 50 }, fixed_delay (3) { 7 } }
        assert_eq!(body, [0x0a, 8, 0x22, 2, 0x08, 50, 0x1a, 2, 0x08, 7]);
    }
}
