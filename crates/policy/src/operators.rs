//! The command operators `%NAME(ARGUMENT):LENGTH%` in formats of access logs and in header values
//! (<https://www.envoyproxy.io/docs/envoy/latest/configuration/advanced/substitution_formatter>).

use std::fmt;

use chrono::format::{Item, StrftimeItems};

/// Operators of skysail-proxy without an argument.
const PLAIN: [&str; 44] = [
    "BYTES_RECEIVED",
    "BYTES_SENT",
    "CONNECTION_TERMINATION_DETAILS",
    "DOWNSTREAM_DIRECT_REMOTE_ADDRESS",
    "DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT",
    "DOWNSTREAM_DIRECT_REMOTE_PORT",
    "DOWNSTREAM_LOCAL_ADDRESS",
    "DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT",
    "DOWNSTREAM_LOCAL_PORT",
    "DOWNSTREAM_LOCAL_URI_SAN",
    "DOWNSTREAM_PEER_DNS_SAN",
    "DOWNSTREAM_PEER_FINGERPRINT_256",
    "DOWNSTREAM_PEER_SUBJECT",
    "DOWNSTREAM_PEER_URI_SAN",
    "DOWNSTREAM_REMOTE_ADDRESS",
    "DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT",
    "DOWNSTREAM_REMOTE_PORT",
    "DURATION",
    "GRPC_STATUS",
    "GRPC_STATUS_NUMBER",
    "HOSTNAME",
    "PROTOCOL",
    "REQUESTED_SERVER_NAME",
    "RESPONSE_CODE",
    "RESPONSE_CODE_DETAILS",
    "RESPONSE_FLAGS",
    "ROUTE_NAME",
    "SPAN_ID",
    "START_TIME",
    "TRACE_ID",
    "UPSTREAM_CLUSTER",
    "UPSTREAM_CLUSTER_RAW",
    "UPSTREAM_HOST",
    "UPSTREAM_LOCAL_ADDRESS",
    "UPSTREAM_LOCAL_ADDRESS_WITHOUT_PORT",
    "UPSTREAM_LOCAL_PORT",
    "UPSTREAM_PEER_DNS_SAN",
    "UPSTREAM_PEER_SUBJECT",
    "UPSTREAM_PEER_URI_SAN",
    "UPSTREAM_REMOTE_ADDRESS",
    "UPSTREAM_REMOTE_ADDRESS_WITHOUT_PORT",
    "UPSTREAM_REMOTE_PORT",
    "UPSTREAM_REQUEST_ATTEMPT_COUNT",
    "UPSTREAM_TRANSPORT_FAILURE_REASON",
];
/// Operators of skysail-proxy with an argument: a header name or a path of dynamic metadata.
const WITH_ARGUMENT: [&str; 4] = ["DYNAMIC_METADATA", "REQ", "REQ_WITHOUT_QUERY", "RESP"];
/// Further operators that Envoy 1.40 has.
const FURTHER: [&str; 114] = [
    "ACCESS_LOG_TYPE",
    "BYTES_RETRANSMITTED",
    "CEL",
    "CLUSTER_METADATA",
    "COALESCE",
    "COMMON_DURATION",
    "CONNECTION_ID",
    "CUSTOM_FLAGS",
    "DOWNSTREAM_CX_RTT",
    "DOWNSTREAM_DECOMPRESSED_HEADER_BYTES_RECEIVED",
    "DOWNSTREAM_DECOMPRESSED_HEADER_BYTES_SENT",
    "DOWNSTREAM_DETECTED_CLOSE_TYPE",
    "DOWNSTREAM_DIRECT_LOCAL_ADDRESS",
    "DOWNSTREAM_DIRECT_LOCAL_ADDRESS_ENDPOINT_ID",
    "DOWNSTREAM_DIRECT_LOCAL_ADDRESS_WITHOUT_PORT",
    "DOWNSTREAM_DIRECT_LOCAL_PORT",
    "DOWNSTREAM_HANDSHAKE_DURATION",
    "DOWNSTREAM_HEADER_BYTES_RECEIVED",
    "DOWNSTREAM_HEADER_BYTES_SENT",
    "DOWNSTREAM_LOCAL_ADDRESS_ENDPOINT_ID",
    "DOWNSTREAM_LOCAL_CLOSE_REASON",
    "DOWNSTREAM_LOCAL_DNS_SAN",
    "DOWNSTREAM_LOCAL_EMAIL_SAN",
    "DOWNSTREAM_LOCAL_IP_SAN",
    "DOWNSTREAM_LOCAL_OTHERNAME_SAN",
    "DOWNSTREAM_LOCAL_SUBJECT",
    "DOWNSTREAM_PEER_CERT",
    "DOWNSTREAM_PEER_CERT_V_END",
    "DOWNSTREAM_PEER_CERT_V_START",
    "DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_1",
    "DOWNSTREAM_PEER_CHAIN_FINGERPRINTS_256",
    "DOWNSTREAM_PEER_CHAIN_SERIALS",
    "DOWNSTREAM_PEER_EMAIL_SAN",
    "DOWNSTREAM_PEER_FINGERPRINT_1",
    "DOWNSTREAM_PEER_IP_SAN",
    "DOWNSTREAM_PEER_ISSUER",
    "DOWNSTREAM_PEER_ISSUER_FINGERPRINT_256",
    "DOWNSTREAM_PEER_ISSUER_SERIAL",
    "DOWNSTREAM_PEER_OTHERNAME_SAN",
    "DOWNSTREAM_PEER_SERIAL",
    "DOWNSTREAM_TLS_CIPHER",
    "DOWNSTREAM_TLS_GROUP",
    "DOWNSTREAM_TLS_SESSION_ID",
    "DOWNSTREAM_TLS_VERSION",
    "DOWNSTREAM_TRANSPORT_FAILURE_REASON",
    "DOWNSTREAM_WIRE_BYTES_RECEIVED",
    "DOWNSTREAM_WIRE_BYTES_SENT",
    "DYNAMIC_MODULE",
    "EMIT_TIME",
    "EMIT_TIME_LOCAL",
    "ENVIRONMENT",
    "FILE_CONTENT",
    "FILTER_CHAIN_NAME",
    "FILTER_STATE",
    "LOCAL_REPLY_BODY",
    "METADATA",
    "PACKETS_RETRANSMITTED",
    "PATH",
    "QUERY_PARAM",
    "QUERY_PARAMS",
    "REQUEST_DURATION",
    "REQUEST_HEADER",
    "REQUEST_HEADERS_BYTES",
    "REQUEST_TX_DURATION",
    "RESPONSE_DURATION",
    "RESPONSE_FLAGS_LONG",
    "RESPONSE_HEADERS_BYTES",
    "RESPONSE_TRAILERS_BYTES",
    "RESPONSE_TX_DURATION",
    "ROUNDTRIP_DURATION",
    "SECRET",
    "START_TIME_LOCAL",
    "STREAM_ID",
    "TLS_JA3_FINGERPRINT",
    "TLS_JA4_FINGERPRINT",
    "TRAILER",
    "TYPED_CEL",
    "UNIQUE_ID",
    "UPSTREAM_CLUSTER_METADATA",
    "UPSTREAM_CONNECTION_ID",
    "UPSTREAM_CONNECTION_IDS_ATTEMPTED",
    "UPSTREAM_CONNECTION_POOL_READY_DURATION",
    "UPSTREAM_DECOMPRESSED_HEADER_BYTES_RECEIVED",
    "UPSTREAM_DECOMPRESSED_HEADER_BYTES_SENT",
    "UPSTREAM_DETECTED_CLOSE_TYPE",
    "UPSTREAM_FILTER_STATE",
    "UPSTREAM_HEADER_BYTES_RECEIVED",
    "UPSTREAM_HEADER_BYTES_SENT",
    "UPSTREAM_HOSTS_ATTEMPTED",
    "UPSTREAM_HOSTS_ATTEMPTED_WITHOUT_PORT",
    "UPSTREAM_HOST_NAME",
    "UPSTREAM_HOST_NAMES_ATTEMPTED",
    "UPSTREAM_HOST_NAMES_ATTEMPTED_WITHOUT_PORT",
    "UPSTREAM_HOST_NAME_WITHOUT_PORT",
    "UPSTREAM_LOCAL_CLOSE_REASON",
    "UPSTREAM_LOCAL_DNS_SAN",
    "UPSTREAM_LOCAL_IP_SAN",
    "UPSTREAM_LOCAL_URI_SAN",
    "UPSTREAM_METADATA",
    "UPSTREAM_PEER_CERT",
    "UPSTREAM_PEER_CERT_V_END",
    "UPSTREAM_PEER_CERT_V_START",
    "UPSTREAM_PEER_IP_SAN",
    "UPSTREAM_PEER_ISSUER",
    "UPSTREAM_PROTOCOL",
    "UPSTREAM_REMOTE_ADDRESS_ENDPOINT_ID",
    "UPSTREAM_SERVER_NAME",
    "UPSTREAM_TLS_CIPHER",
    "UPSTREAM_TLS_GROUP",
    "UPSTREAM_TLS_SESSION_ID",
    "UPSTREAM_TLS_VERSION",
    "UPSTREAM_WIRE_BYTES_RECEIVED",
    "UPSTREAM_WIRE_BYTES_SENT",
    "VIRTUAL_CLUSTER_NAME",
];

/// Part of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Plain text.
    Text(&'a str),
    /// An operator.
    Operator(Operator<'a>),
}

/// A command operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operator<'a> {
    /// Name.
    pub name: &'a str,
    /// Text in parentheses.
    pub argument: Option<&'a str>,
    /// Maximum number of bytes of the value.
    pub max_len: Option<usize>,
}

/// Who knows an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperatorSupport {
    /// skysail-proxy and Envoy.
    All,
    /// Envoy alone.
    EnvoyOnly,
    /// Neither.
    Unknown,
}

/// A percent sign begins no operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedOperator;

impl fmt::Display for MalformedOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an operator must be like %REQ(NAME?OTHER):80%, and a percent sign is written %%")
    }
}

impl Operator<'_> {
    /// Returns who knows the operator with an argument, or without.
    pub fn support(&self) -> OperatorSupport {
        let is_ours = match self.argument {
            None => PLAIN.contains(&self.name),
            Some(format) if self.name == "START_TIME" => is_time_format(format),
            Some(argument) => WITH_ARGUMENT.contains(&self.name) && !argument.is_empty(),
        };
        if is_ours {
            OperatorSupport::All
        } else if [&PLAIN[..], &WITH_ARGUMENT, &FURTHER].iter().any(|names| names.contains(&self.name)) {
            OperatorSupport::EnvoyOnly
        } else {
            OperatorSupport::Unknown
        }
    }
}

/// Returns whether a format of times can be written. Envoy has the conversions of `strftime` and digits of a second, as
/// chrono has.
fn is_time_format(format: &str) -> bool {
    !format.is_empty() && StrftimeItems::new(format).all(|item| !matches!(item, Item::Error))
}

/// Splits a format into plain text and operators; `%%` is a percent sign.
///
/// # Errors
/// A percent sign begins no operator.
pub fn parse(format: &str) -> Result<Vec<Piece<'_>>, MalformedOperator> {
    let mut pieces = Vec::new();
    let mut rest = format;
    while let Some((before, after)) = rest.split_once('%') {
        if let Some(following) = after.strip_prefix('%') {
            pieces.push(Piece::Text(&rest[..=before.len()]));
            rest = following;
            continue;
        }
        if !before.is_empty() {
            pieces.push(Piece::Text(before));
        }
        let (operator, after) = operator(after).ok_or(MalformedOperator)?;
        pieces.push(Piece::Operator(operator));
        rest = after;
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest));
    }
    Ok(pieces)
}

/// Splits at the percent sign that closes an operator. The argument may contain percent signs
/// (`%START_TIME(%Y-%m-%d)%`), so parentheses are parsed first.
fn operator(text: &str) -> Option<(Operator<'_>, &str)> {
    let name_end = text.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))?;
    let (name, mut rest) = text.split_at(name_end);
    let mut argument = None;
    if let Some(after) = rest.strip_prefix('(') {
        let (inside, after) = after.split_once(')')?;
        (argument, rest) = (Some(inside), after);
    }
    let (length, rest) = rest.split_once('%')?;
    let max_len = match length {
        "" => None,
        length => Some(length.strip_prefix(':')?.parse().ok()?),
    };
    (!name.is_empty()).then_some((Operator { name, argument, max_len }, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_text_and_operators() {
        let operator = |name, argument, max_len| Piece::Operator(Operator { name, argument, max_len });
        let parsed = parse("a%%b [%START_TIME(%Y)%] %REQ(X-A?:PATH):10%").unwrap();
        let expected = [
            Piece::Text("a%"),
            Piece::Text("b ["),
            operator("START_TIME", Some("%Y"), None),
            Piece::Text("] "),
            operator("REQ", Some("X-A?:PATH"), Some(10)),
        ];
        assert_eq!(parsed, expected);
        for bad in ["%", "100%", "%REQ(A", "%REQ(A)", "%REQ(A):x%", "%req(A)%", "% %", "%(A)%"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn operators_are_known_by_name_and_argument() {
        let support = |name, argument| Operator { name, argument, max_len: None }.support();
        assert_eq!(support("REQ", Some("A")), OperatorSupport::All);
        assert_eq!(support("REQ", None), OperatorSupport::EnvoyOnly);
        assert_eq!(support("START_TIME", Some("%Y-%m-%dT%H:%M:%S.%3f%z %s")), OperatorSupport::All);
        assert_eq!(support("START_TIME", Some("%1f")), OperatorSupport::EnvoyOnly);
        assert_eq!(support("REQUEST_DURATION", None), OperatorSupport::EnvoyOnly);
        assert_eq!(support("NOSUCH", None), OperatorSupport::Unknown);
        let mut all: Vec<&str> = [&PLAIN[..], &WITH_ARGUMENT, &FURTHER].concat();
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[0] != two[1]), "each name once");
    }
}
