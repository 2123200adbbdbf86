//! Envoy's attributes of a request or connection, for CEL expressions.

use std::{collections::HashMap, net::SocketAddr, time::SystemTime};

use cel::Value;
use serde_json::Value as Json;

use skysail_http::{
    grpc_status,
    head::{Headers, RequestHead},
};
use skysail_policy::{
    config::{
        cluster::{Place, Workload},
        listener::Direction,
    },
    error::Flags,
    expression::{AttributeUse, Expression},
    peer::Peer,
    record::{Context, Record},
};

#[cfg(test)]
mod tests;

/// Bits of Envoy's `response.flags`.
const FLAG_BITS: [(Flags, u8); 24] = [
    (Flags::UH, 1),
    (Flags::UT, 2),
    (Flags::LR, 3),
    (Flags::UR, 4),
    (Flags::UF, 5),
    (Flags::UC, 6),
    (Flags::UO, 7),
    (Flags::NR, 8),
    (Flags::DI, 9),
    (Flags::FI, 10),
    (Flags::RL, 11),
    (Flags::UAEX, 12),
    (Flags::DC, 14),
    (Flags::URX, 15),
    (Flags::SI, 16),
    (Flags::RLSE, 17),
    (Flags::DPE, 18),
    (Flags::UMSDR, 19),
    (Flags::NFCF, 21),
    (Flags::DT, 22),
    (Flags::UPE, 23),
    (Flags::NC, 24),
    (Flags::OM, 25),
    (Flags::DF, 26),
];

/// Returns whether the expression is true of the request or connection.
pub(super) fn holds(expression: &Expression, context: &Context<'_>) -> bool {
    expression.holds(|root, field| attribute(root, field, context))
}

/// Returns the value of the expression as text, if it has one.
pub(super) fn text(expression: &Expression, context: &Context<'_>) -> Option<String> {
    expression.text(|root, field| attribute(root, field, context))
}

/// Returns the value of the expression as JSON, if it has one.
pub(crate) fn attribute_json(expression: &Expression, context: &Context<'_>) -> Option<Json> {
    expression.json(|root, field| attribute(root, field, context))
}

/// Returns the value of an attribute, if it has one.
fn attribute(root: &str, attribute: &AttributeUse, context: &Context<'_>) -> Option<Value> {
    let (record, field) = (context.record, attribute.field);
    match root {
        "request" => request(context.request?, attribute, record),
        "response" => response(attribute, context),
        "connection" => match field {
            "mtls" => Some(Value::Bool(record.downstream.is_some_and(|peer| peer.certificate.is_some()))),
            "requested_server_name" => Some(record.server_name.unwrap_or_default().into()),
            "termination_details" => some(record.termination),
            _ => certificate(record.downstream?, field),
        },
        "upstream" => match field {
            "address" => Some(record.upstream_place()?.to_string().into()),
            "port" => match record.upstream_place()? {
                Place::Ip(address) => Some(port(address)),
                Place::Pipe(_) => None,
            },
            "local_address" => Some(record.upstream_local?.to_string().into()),
            "transport_failure_reason" => record.upstream_address().map(|_| record.upstream_failure.into()),
            "request_attempt_count" => Some(Value::Int(record.attempts.into())),
            _ => certificate(record.upstream?, field),
        },
        "source" | "destination" => {
            let address = if root == "source" { record.downstream_remote } else { record.downstream_local };
            Some(if field == "port" { port(address?) } else { address?.to_string().into() })
        }
        "metadata" => {
            let found = record.metadata.into_iter().flatten();
            Some(found.map(|(filter, found)| (filter.clone(), json(found))).collect::<HashMap<_, _>>().into())
        }
        "filter_state" => match field {
            "downstream_peer" => Some(workload(&*record.downstream?.workload()?)),
            _ => {
                let peer = record.upstream.and_then(Peer::workload);
                Some(workload(&*peer.or_else(|| record.endpoint?.workload.clone())?))
            }
        },
        _ => match field {
            "cluster_name" => Some((*record.cluster?.name).into()),
            "route_name" => some(record.route_name),
            _ => Some(Value::Int(match record.direction {
                Direction::Unspecified => 0,
                Direction::Inbound => 1,
                Direction::Outbound => 2,
            })),
        },
    }
}

fn request(head: &RequestHead, attribute: &AttributeUse, record: &Record<'_>) -> Option<Value> {
    let header = |name| head.header(name).map(|value| String::from_utf8_lossy(value).as_ref().into());
    Some(match attribute.field {
        "path" => head.path().into(),
        "url_path" => head.path_without_query().into(),
        "host" => head.authority().into(),
        "scheme" => head.scheme().into(),
        "method" => head.method().into(),
        "headers" => {
            let mut found = headers(head.headers(), attribute);
            for name in PSEUDO_HEADERS {
                let keys =
                    attribute.keys.iter().filter(|key| key.eq_ignore_ascii_case(name)).map(String::as_str);
                for key in keys.chain(attribute.all.then_some(name)) {
                    found.extend(head.pseudo_header(name).map(|value| (key.to_owned(), value.to_owned())));
                }
            }
            found.into()
        }
        "referer" => header("referer")?,
        "useragent" => header("user-agent")?,
        "id" => header("x-request-id")?,
        "protocol" => head.version.as_str().into(),
        "query" => head.query().unwrap_or_default().into(),
        "time" => {
            let since = record.start.duration_since(SystemTime::UNIX_EPOCH).ok()?;
            let seconds = i64::try_from(since.as_secs()).ok()?;
            Value::Timestamp(chrono::DateTime::from_timestamp(seconds, since.subsec_nanos())?.fixed_offset())
        }
        "duration" => Value::Duration(chrono::Duration::from_std(record.duration).ok()?),
        "size" => number(record.bytes_received),
        _ => {
            let apart =
                PSEUDO_HEADERS.iter().filter_map(|name| Some(name.len() + head.pseudo_header(name)?.len()));
            number(record.bytes_received + (apart.sum::<usize>() + size(head.headers())) as u64)
        }
    })
}

/// HTTP/2 pseudo-headers, which are stored separately.
const PSEUDO_HEADERS: [&str; 4] = [":method", ":path", ":authority", ":scheme"];

fn response(attribute: &AttributeUse, context: &Context<'_>) -> Option<Value> {
    let record = context.record;
    let head = || Some(context.response?.headers());
    Some(match attribute.field {
        "code" if record.status == 0 => return None,
        "code" => Value::Int(record.status.into()),
        "code_details" => return some(record.details),
        "flags" => {
            let set = FLAG_BITS.iter().filter(|(flag, _)| record.flags.contains(*flag));
            Value::Int(set.map(|(_, bit)| 1 << bit).sum())
        }
        "grpc_status" => {
            let stands_for = || (record.status != 0).then(|| grpc_status::from_http(record.status));
            Value::Int(record.grpc_status.or_else(stands_for)?.into())
        }
        "headers" => headers(head()?, attribute).into(),
        "size" => number(record.bytes_sent),
        _ => number(record.bytes_sent + size(head()?) as u64),
    })
}

fn certificate(peer: &Peer, field: &str) -> Option<Value> {
    let names = peer.names();
    Some(match field {
        "uri_san_local_certificate" => (**peer.local_principal.as_ref()?).into(),
        "subject_peer_certificate" => names?.subject.as_str().into(),
        "dns_san_peer_certificate" => names?.dns.first()?.as_str().into(),
        "uri_san_peer_certificate" => names?.uris.first()?.as_str().into(),
        _ => (*peer.certificate.as_ref()?.fingerprint).into(),
    })
}

fn workload(of: &Workload) -> Value {
    let fields = [
        ("workload", &of.name),
        ("namespace", &of.namespace),
        ("cluster", &of.cluster),
        ("service", &of.canonical_name),
        ("revision", &of.canonical_revision),
        ("app", &of.app),
        ("version", &of.version),
    ];
    fields.map(|(name, value)| (name, Value::from(&**value))).into_iter().collect::<HashMap<_, _>>().into()
}

/// Returns the headers that the expression names, under the name and case it uses, or all headers under their
/// own names.
fn headers(of: &Headers, attribute: &AttributeUse) -> HashMap<String, String> {
    let own = of.iter().map(|(name, _)| String::from_utf8_lossy(name).into_owned()).filter(|_| attribute.all);
    let value = |name: &str| {
        let values: Vec<_> = of.header_values(name).collect();
        (!values.is_empty()).then(|| String::from_utf8_lossy(&values.join(&b","[..])).into_owned())
    };
    let names = own.chain(attribute.keys.iter().cloned());
    names.filter_map(|name| value(&name.to_ascii_lowercase()).map(|value| (name, value))).collect()
}

fn size(of: &Headers) -> usize {
    of.iter().map(|(name, value)| name.len() + value.len()).sum()
}

/// Returns a string value; an empty string is absent.
fn some(text: &str) -> Option<Value> {
    (!text.is_empty()).then(|| text.into())
}

fn port(of: SocketAddr) -> Value {
    Value::Int(of.port().into())
}

fn number(of: u64) -> Value {
    Value::Int(i64::try_from(of).unwrap_or(i64::MAX))
}

fn json(value: &Json) -> Value {
    match value {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(*value),
        // Numbers are floating point, as in `google.protobuf.Struct`.
        Json::Number(number) => Value::Float(number.as_f64().unwrap_or_default()),
        Json::String(text) => text.as_str().into(),
        Json::Array(list) => list.iter().map(json).collect::<Vec<_>>().into(),
        Json::Object(map) => {
            map.iter().map(|(key, value)| (key.clone(), json(value))).collect::<HashMap<_, _>>().into()
        }
    }
}
