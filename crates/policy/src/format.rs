//! Evaluation of the `%OPERATORS%` in access logs and header values.
//!
//! The operators are those of Istio's default log formats, and the usual ones of header values. A configuration with
//! another operator is refused when it arrives: see [`crate::operators`].

use std::{
    io::Write as _,
    net::SocketAddr,
    sync::LazyLock,
    time::{Duration, SystemTime},
};

use chrono::{DateTime, Utc};
use serde_json::Value;

use crate::{
    config::{
        cluster::Place,
        http::{Format, Part},
    },
    error,
    peer::Peer,
    record::{Context, Record},
    trace::SpanContext,
};
use skysail_http::head::{Headers, RequestHead};

#[cfg(test)]
mod tests;

/// Names of gRPC's status codes, as Envoy writes them.
const GRPC_NAMES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];

/// Host name of this machine.
static HOSTNAME: LazyLock<Option<String>> =
    LazyLock::new(|| nix::unistd::gethostname().ok()?.into_string().ok());

/// Kind of an operator's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueKind {
    Missing,
    Text,
    Number,
}

/// Writes a format string. `missing` replaces missing values (`-` in logs, empty in headers).
pub fn write(format: &Format, context: &Context<'_>, missing: &[u8], out: &mut Vec<u8>) {
    for part in &format.parts {
        if write_part(part, context, out) == ValueKind::Missing {
            out.extend_from_slice(missing);
        }
    }
}

/// Writes a JSON value. A format with a single operator may yield a number or `null`; any other yields a string.
pub fn write_json(format: &Format, context: &Context<'_>, out: &mut Vec<u8>) {
    let mut text = Vec::new();
    if let [part @ Part::Operator { .. }] = format.parts.as_slice() {
        match write_part(part, context, &mut text) {
            ValueKind::Missing => return out.extend_from_slice(b"null"),
            ValueKind::Number => return out.extend_from_slice(&text),
            ValueKind::Text => {}
        }
    } else {
        write(format, context, b"-", &mut text);
    }
    write_json_string(&text, out);
}

/// Writes a JSON string. Bytes that are not UTF-8 are replaced.
pub fn write_json_string(text: &[u8], out: &mut Vec<u8>) {
    // Writing a string into memory cannot fail.
    let _ = serde_json::to_writer(out, &String::from_utf8_lossy(text));
}

fn write_part(part: &Part, context: &Context<'_>, out: &mut Vec<u8>) -> ValueKind {
    match part {
        Part::Text(text) => {
            out.extend_from_slice(text.as_bytes());
            ValueKind::Text
        }
        Part::Operator { name, argument, max_len } => {
            let start = out.len();
            let given = operator(name, argument.as_deref().unwrap_or_default(), context, out);
            if let Some(max) = max_len {
                out.truncate(start + max);
            }
            given
        }
    }
}

fn operator(name: &str, argument: &str, context: &Context<'_>, out: &mut Vec<u8>) -> ValueKind {
    let record = context.record;
    match name {
        "REQ" => one_of(argument, out, |name, out| request_value(context.request, name, out)),
        "REQ_WITHOUT_QUERY" => {
            let start = out.len();
            let given = one_of(argument, out, |name, out| request_value(context.request, name, out));
            if let Some(mark) = memchr::memchr(b'?', &out[start..]) {
                out.truncate(start + mark);
            }
            given
        }
        "RESP" => one_of(argument, out, |name, out| {
            let Some(head) = context.response else { return ValueKind::Missing };
            if name == ":status" {
                number(head.status().into(), out)
            } else {
                field(head.headers(), name, out)
            }
        }),
        "DYNAMIC_METADATA" => {
            let mut keys = argument.split(':');
            let first = keys.next().zip(record.metadata).and_then(|(filter, all)| all.get(filter));
            match keys.try_fold(first, |value, key| Some(value?.get(key))).flatten() {
                None => ValueKind::Missing,
                Some(Value::String(value)) => bytes(value.as_bytes(), out),
                Some(value) => bytes(value.to_string().as_bytes(), out),
            }
        }
        "START_TIME" => {
            if argument.is_empty() {
                write_time(record.start, out);
            } else {
                let _ = write!(out, "{}", DateTime::<Utc>::from(record.start).format(argument));
            }
            ValueKind::Text
        }
        "PROTOCOL" => text(context.request.map(|head| head.version.as_str()), out),
        "RESPONSE_CODE" => number(record.status.into(), out),
        "RESPONSE_FLAGS" => {
            let _ = write!(out, "{}", record.flags);
            ValueKind::Text
        }
        "RESPONSE_CODE_DETAILS" => text(Some(record.details), out),
        "CONNECTION_TERMINATION_DETAILS" => text(Some(record.termination), out),
        "UPSTREAM_TRANSPORT_FAILURE_REASON" => text(Some(&error::one_word(record.upstream_failure)), out),
        "BYTES_RECEIVED" => number(record.bytes_received, out),
        "BYTES_SENT" => number(record.bytes_sent, out),
        "DURATION" => number(millis(record.duration), out),
        "UPSTREAM_REQUEST_ATTEMPT_COUNT" => number(record.attempts.into(), out),
        "GRPC_STATUS_NUMBER" => {
            record.grpc_status.map_or(ValueKind::Missing, |status| number(status.into(), out))
        }
        "GRPC_STATUS" => match record.grpc_status {
            None => ValueKind::Missing,
            Some(status) => match GRPC_NAMES.get(status as usize) {
                Some(name) => text(Some(name), out),
                None => number(status.into(), out),
            },
        },
        "ROUTE_NAME" => text(Some(record.route_name), out),
        "REQUESTED_SERVER_NAME" => text(record.server_name, out),
        "HOSTNAME" => text(HOSTNAME.as_deref(), out),
        "TRACE_ID" => text(record.span.map(SpanContext::trace_id).as_deref(), out),
        "SPAN_ID" => text(record.span.map(SpanContext::span_id).as_deref(), out),
        "UPSTREAM_CLUSTER" | "UPSTREAM_CLUSTER_RAW" => {
            text(record.cluster.map(|cluster| &*cluster.name), out)
        }
        _ => peer_operator(name, record, out).unwrap_or_else(|| address_operator(name, record, out)),
    }
}

fn peer_operator(name: &str, record: &Record<'_>, out: &mut Vec<u8>) -> Option<ValueKind> {
    let names = |peer: Option<&Peer>, of: fn(&skysail_identity::Peer) -> &[String], out: &mut Vec<u8>| {
        let names = peer.and_then(Peer::names).map(of).unwrap_or_default();
        text(Some(&names.join(",")), out)
    };
    let downstream = record.downstream;
    Some(match name {
        "DOWNSTREAM_PEER_URI_SAN" => names(downstream, |names| &names.uris, out),
        "DOWNSTREAM_PEER_DNS_SAN" => names(downstream, |names| &names.dns, out),
        "UPSTREAM_PEER_URI_SAN" => names(record.upstream, |names| &names.uris, out),
        "UPSTREAM_PEER_DNS_SAN" => names(record.upstream, |names| &names.dns, out),
        "UPSTREAM_PEER_SUBJECT" => {
            text(record.upstream.and_then(Peer::names).map(|names| names.subject.as_str()), out)
        }
        "DOWNSTREAM_PEER_SUBJECT" => {
            text(downstream.and_then(Peer::names).map(|names| names.subject.as_str()), out)
        }
        "DOWNSTREAM_PEER_FINGERPRINT_256" => {
            let certificate = downstream.and_then(|peer| peer.certificate.as_ref());
            text(certificate.map(|certificate| &*certificate.fingerprint), out)
        }
        "DOWNSTREAM_LOCAL_URI_SAN" => text(downstream.and_then(|peer| peer.local_principal.as_deref()), out),
        _ => return None,
    })
}

fn address_operator(name: &str, record: &Record<'_>, out: &mut Vec<u8>) -> ValueKind {
    let of = [
        ("DOWNSTREAM_LOCAL_", record.downstream_local),
        ("DOWNSTREAM_REMOTE_", record.downstream_remote),
        ("DOWNSTREAM_DIRECT_REMOTE_", record.downstream_direct),
        ("UPSTREAM_LOCAL_", record.upstream_local),
    ];
    if name == "UPSTREAM_HOST" {
        return place(record.upstream_place(), "ADDRESS", out);
    }
    if let Some(what) = name.strip_prefix("UPSTREAM_REMOTE_") {
        // Only for an established connection. A Unix domain socket has no local address.
        let established = |place: &Place<'_>| match place {
            Place::Ip(_) => record.upstream_local.is_some(),
            Place::Pipe(_) => record.upstream.is_some(),
        };
        return place(record.upstream_place().filter(established), what, out);
    }
    let found = of.iter().find_map(|(prefix, address)| Some((name.strip_prefix(prefix)?, *address)));
    found.map_or(ValueKind::Missing, |(what, socket)| address(socket, what, out))
}

fn address(address: Option<SocketAddr>, what: &str, out: &mut Vec<u8>) -> ValueKind {
    let Some(address) = address else { return ValueKind::Missing };
    match what {
        "ADDRESS" => _ = write!(out, "{address}"),
        "ADDRESS_WITHOUT_PORT" => _ = write!(out, "{}", address.ip()),
        "PORT" => return number(address.port().into(), out),
        _ => return ValueKind::Missing,
    }
    ValueKind::Text
}

/// Writes a part of an upstream address. A path has no port.
fn place(of: Option<Place<'_>>, what: &str, out: &mut Vec<u8>) -> ValueKind {
    match (of, what) {
        (Some(Place::Ip(socket)), _) => address(Some(socket), what, out),
        (Some(Place::Pipe(path)), "ADDRESS" | "ADDRESS_WITHOUT_PORT") => text(Some(path), out),
        _ => ValueKind::Missing,
    }
}

/// `A?B`: writes the first of two headers that is present.
fn one_of(argument: &str, out: &mut Vec<u8>, value: impl Fn(&str, &mut Vec<u8>) -> ValueKind) -> ValueKind {
    let (first, second) = argument.split_once('?').map_or((argument, None), |(a, b)| (a, Some(b)));
    let mut buffer = [0; 128];
    match value(lower_case(first, &mut buffer), out) {
        ValueKind::Missing => {
            second.map_or(ValueKind::Missing, |name| value(lower_case(name, &mut buffer), out))
        }
        given => given,
    }
}

/// Header names may be configured in any case; heads hold them in lower case.
fn lower_case<'a>(name: &'a str, buffer: &'a mut [u8; 128]) -> &'a str {
    let Some(room) = buffer.get_mut(..name.len()) else { return name };
    room.copy_from_slice(name.as_bytes());
    room.make_ascii_lowercase();
    std::str::from_utf8(room).unwrap_or(name)
}

fn request_value(head: Option<&RequestHead>, name: &str, out: &mut Vec<u8>) -> ValueKind {
    let Some(head) = head else { return ValueKind::Missing };
    match head.pseudo_header(name) {
        Some(value) => bytes(value.as_bytes(), out),
        None => field(head.headers(), name, out),
    }
}

/// A header that is present has a value, which may be empty.
fn field(headers: &Headers, name: &str, out: &mut Vec<u8>) -> ValueKind {
    let Some(value) = headers.header(name) else { return ValueKind::Missing };
    out.extend_from_slice(value);
    ValueKind::Text
}

fn text(value: Option<&str>, out: &mut Vec<u8>) -> ValueKind {
    value.map_or(ValueKind::Missing, |value| bytes(value.as_bytes(), out))
}

fn bytes(value: &[u8], out: &mut Vec<u8>) -> ValueKind {
    if value.is_empty() {
        return ValueKind::Missing;
    }
    out.extend_from_slice(value);
    ValueKind::Text
}

fn number(value: u64, out: &mut Vec<u8>) -> ValueKind {
    let _ = write!(out, "{value}");
    ValueKind::Number
}

/// Returns whole milliseconds.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Writes a time such as `2026-01-31T23:59:59.999Z`.
pub fn write_time(time: SystemTime, out: &mut Vec<u8>) {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let _ = write!(
        out,
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z",
        since.subsec_millis()
    );
}

/// Returns year, month and day of a number of days since 1970-01-01. It counts in eras of 400 years that begin on 1
/// March, so that the leap day is the last of a year.
fn civil(days: u64) -> (u64, u64, u64) {
    const ERA: u64 = 146_097;
    let days = days + 719_468;
    let (era, day) = (days / ERA, days % ERA);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}
