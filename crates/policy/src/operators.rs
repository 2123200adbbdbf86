//! The command operators `%NAME(ARGUMENT):LENGTH%` in formats of access logs and in header values
//! (<https://www.envoyproxy.io/docs/envoy/latest/configuration/advanced/substitution_formatter>).

use std::fmt;

/// Operators that skysail-proxy supports without an argument.
pub const PLAIN: [&str; 44] = [
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
/// Operators that skysail-proxy supports with an argument: a header name or a path of dynamic metadata.
const WITH_ARGUMENT: [&str; 4] = ["DYNAMIC_METADATA", "REQ", "REQ_WITHOUT_QUERY", "RESP"];
/// Further operators that Envoy 1.40 supports.
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

/// Support of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperatorSupport {
    /// skysail-proxy and Envoy support it.
    All,
    /// Only Envoy supports it.
    EnvoyOnly,
    /// Neither supports it.
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
    /// Returns whether the operator is supported with its argument, or without one.
    pub fn support(&self) -> OperatorSupport {
        let known = |names: &[&str]| names.contains(&self.name);
        match self.argument {
            None | Some("") if known(&WITH_ARGUMENT) => OperatorSupport::Unknown,
            Some(_) if known(&WITH_ARGUMENT) => OperatorSupport::All,
            None if known(&PLAIN) => OperatorSupport::All,
            Some(format) if self.name == "START_TIME" && is_time_format(format) => OperatorSupport::All,
            // Some of these take an argument in Envoy.
            _ if known(&PLAIN) || known(&FURTHER) => OperatorSupport::EnvoyOnly,
            _ => OperatorSupport::Unknown,
        }
    }
}

/// Returns whether a format of times can be written: with conversions of `strftime`, and with `%f`, `%3f`, `%6f` and `%9f`
/// for the digits of a second.
fn is_time_format(format: &str) -> bool {
    const CONVERSIONS: &str = "aAbBCdDeFfhHIjmMnpRsStTuUyYzZ%";
    let mut conversions = format.split('%').skip(1);
    let mut is_known = !format.is_empty();
    while let Some(conversion) = conversions.next() {
        let end = conversion.trim_start_matches(['3', '6', '9']);
        is_known &= match (conversion.chars().next(), end.chars().next()) {
            // `%%`: what follows is plain text.
            (None, _) => conversions.next().is_some(),
            (Some(first), _) if CONVERSIONS.contains(first) => true,
            (Some(_), Some('f')) => end.len() + 1 == conversion.len(),
            _ => false,
        };
    }
    is_known
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

/// Returns whether a format is valid, and Envoy knows all of its operators.
pub fn are_known(format: &str) -> bool {
    let is_known = |piece: &Piece<'_>| match piece {
        Piece::Text(_) => true,
        Piece::Operator(operator) => operator.support() != OperatorSupport::Unknown,
    };
    parse(format).is_ok_and(|pieces| pieces.iter().all(is_known))
}

/// Splits at the percent sign that closes an operator. As in Envoy, an argument ends at the first bracket that can close
/// it: it may contain percent signs (`%START_TIME(%Y-%m-%d)%`) and brackets (`%CEL(size(request.headers))%`).
fn operator(text: &str) -> Option<(Operator<'_>, &str)> {
    let name_end = text.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))?;
    let (name, rest) = text.split_at(name_end);
    let (argument, max_len, rest) = match rest.strip_prefix('(') {
        None => closed(rest).map(|(max_len, rest)| (None, max_len, rest))?,
        Some(inside) => inside.match_indices(')').find_map(|(end, _)| {
            closed(&inside[end + 1..]).map(|(max_len, rest)| (Some(&inside[..end]), max_len, rest))
        })?,
    };
    (!name.is_empty()).then_some((Operator { name, argument, max_len }, rest))
}

/// Reads a maximum length and the percent sign that closes an operator. Returns the text behind it.
fn closed(text: &str) -> Option<(Option<usize>, &str)> {
    if let Some(rest) = text.strip_prefix('%') {
        return Some((None, rest));
    }
    let (length, rest) = text.strip_prefix(':')?.split_once('%')?;
    let is_number = length.bytes().all(|byte| byte.is_ascii_digit());
    Some((Some(length.parse().ok().filter(|_| is_number)?), rest))
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
        let nested = parse("%CEL(size(request.headers) > 0 ? '%' : ')')%%CEL(a(b)):5%").unwrap();
        let argument = "size(request.headers) > 0 ? '%' : ')'";
        assert_eq!(nested, [operator("CEL", Some(argument), None), operator("CEL", Some("a(b)"), Some(5))]);
        for bad in ["%", "%REQ(A):+5%", "100%", "%REQ(A", "%REQ(A)", "%REQ(A):x%", "%req(A)%", "% %", "%(A)%"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn operators_are_known_by_name_and_argument() {
        let support = |name, argument| Operator { name, argument, max_len: None }.support();
        assert_eq!(support("REQ", Some("A")), OperatorSupport::All);
        assert_eq!(support("REQ", None), OperatorSupport::Unknown);
        assert_eq!(support("REQ", Some("")), OperatorSupport::Unknown);
        assert_eq!(support("RESPONSE_CODE_DETAILS", Some("ALLOW_WHITESPACES")), OperatorSupport::EnvoyOnly);
        assert_eq!(support("START_TIME", Some("%Y-%m-%dT%H:%M:%S.%3f%z %s")), OperatorSupport::All);
        for format in ["%1f", "%.3f", "%:z", "%", "%Q", "%39f", ""] {
            assert_eq!(support("START_TIME", Some(format)), OperatorSupport::EnvoyOnly, "{format}");
        }
        assert_eq!(support("START_TIME", Some("%%%H%%x")), OperatorSupport::All);
        assert_eq!(support("REQUEST_DURATION", None), OperatorSupport::EnvoyOnly);
        assert_eq!(support("NOSUCH", None), OperatorSupport::Unknown);
        let mut all: Vec<&str> = [&PLAIN[..], &WITH_ARGUMENT, &FURTHER].concat();
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[0] != two[1]), "each name once");
    }
}
