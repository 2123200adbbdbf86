//! Short names for Envoy's messages, and constructors of small ones.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time,
};

use skysail_xds::istio;

pub(super) use super::packed::pack;
pub(super) use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            cluster::v3 as cluster, core::v3 as core, endpoint::v3 as endpoint, listener::v3 as listener,
            rbac::v3 as rbac, route::v3 as route,
        },
        r#type::{matcher::v3 as matcher, v3 as types},
    },
    google::protobuf::{Any, BoolValue, Duration, Struct, UInt32Value, UInt64Value, Value},
};

/// Converts a duration to its message.
pub(super) fn duration(length: time::Duration) -> Duration {
    Duration {
        seconds: i64::try_from(length.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(length.subsec_nanos()).unwrap_or_default(),
    }
}

/// Returns a duration in whole seconds; 0 disables most timeouts.
pub(super) const fn seconds(seconds: i64) -> Duration {
    Duration { seconds, nanos: 0 }
}

/// Returns a number that may be unset.
pub(super) const fn uint32(value: u32) -> Option<UInt32Value> {
    Some(UInt32Value { value })
}

/// Returns a boolean that may be unset.
pub(super) const fn boolean(value: bool) -> Option<BoolValue> {
    Some(BoolValue { value })
}

/// Returns a socket address.
pub(super) fn socket(address: impl Into<String>, port: u16) -> core::SocketAddress {
    core::SocketAddress {
        address: address.into(),
        port_specifier: Some(core::socket_address::PortSpecifier::PortValue(port.into())),
        ..Default::default()
    }
}

/// Returns an address message with an IP address and port.
pub(super) fn address(address: impl Into<String>, port: u16) -> core::Address {
    core::Address { address: Some(core::address::Address::SocketAddress(socket(address, port))) }
}

/// Formats an address for host names: IPv6 in brackets.
pub(super) fn host_of(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}

/// Parses a block of addresses, `10.0.0.0/8` or a single address; `None` if it is neither.
pub(super) fn cidr(text: &str) -> Option<core::CidrRange> {
    let (prefix, length) = match text.split_once('/') {
        Some((prefix, length)) => (prefix, Some(length.parse().ok()?)),
        None => (text, None),
    };
    let ip: IpAddr = prefix.parse().ok()?;
    let longest = if ip.is_ipv4() { 32 } else { 128 };
    let length: u32 = length.unwrap_or(longest);
    (length <= longest)
        .then(|| core::CidrRange { address_prefix: ip.to_string(), prefix_len: uint32(length) })
}

/// Returns the network of a block of addresses. Bits of the address after the prefix have no meaning.
pub(super) fn network(range: &core::CidrRange) -> String {
    let length = range.prefix_len.map_or(0, |length| length.value);
    match range.address_prefix.parse() {
        Ok(IpAddr::V4(ip)) => {
            let mask = u32::MAX.checked_shl(32_u32.saturating_sub(length)).unwrap_or(0);
            format!("{}/{length}", Ipv4Addr::from_bits(ip.to_bits() & mask))
        }
        Ok(IpAddr::V6(ip)) => {
            let mask = u128::MAX.checked_shl(128_u32.saturating_sub(length)).unwrap_or(0);
            format!("{}/{length}", Ipv6Addr::from_bits(ip.to_bits() & mask))
        }
        Err(_) => range.address_prefix.clone(),
    }
}

/// Returns the configuration source for the stream that carries the resource itself (ADS).
pub(super) fn from_ads() -> core::ConfigSource {
    core::ConfigSource {
        initial_fetch_timeout: Some(seconds(0)),
        resource_api_version: core::ApiVersion::V3 as i32,
        config_source_specifier: Some(core::config_source::ConfigSourceSpecifier::Ads(Default::default())),
        ..Default::default()
    }
}

/// Returns the metadata of one filter.
pub(super) fn metadata(filter: &str, value: Struct) -> core::Metadata {
    core::Metadata { filter_metadata: HashMap::from([(filter.to_owned(), value)]), ..Default::default() }
}

/// Returns a struct with these fields.
pub(super) fn fields<'a>(fields: impl IntoIterator<Item = (&'a str, Value)>) -> Struct {
    Struct { fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
}

/// Converts a percentage, to the precision that Istio keeps.
pub(super) fn percent(value: f64) -> types::FractionalPercent {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped before")]
    let numerator = (value.clamp(0.0, 100.0) * 10_000.0) as u32;
    types::FractionalPercent {
        numerator,
        denominator: types::fractional_percent::DenominatorType::Million as i32,
    }
}

/// Converts a whole percentage.
pub(super) fn whole_percent(numerator: u32) -> types::FractionalPercent {
    types::FractionalPercent { numerator, ..Default::default() }
}

/// Returns a matcher for an RE2 expression.
pub(super) fn regex(expression: impl Into<String>) -> matcher::RegexMatcher {
    matcher::RegexMatcher { regex: expression.into(), ..Default::default() }
}

/// Returns a matcher for a string.
pub(super) fn matching(pattern: matcher::string_matcher::MatchPattern) -> matcher::StringMatcher {
    matcher::StringMatcher { match_pattern: Some(pattern), ..Default::default() }
}

/// Returns the path in Istio's API of the object that a resource was compiled from, shown in logs and `config_dump`.
pub(super) fn config_path(kind: &str, namespace: &str, name: &str) -> Value {
    let name = crate::world::shown_name(name);
    istio::string(format!("/apis/networking.istio.io/v1/namespaces/{namespace}/{kind}/{name}"))
}

/// Returns a route action with a timeout, which applies to gRPC too.
#[expect(deprecated, reason = "what istiod sends; the successor has other semantics for gRPC")]
pub(super) fn timed_action(timeout: Duration) -> route::RouteAction {
    route::RouteAction { timeout: Some(timeout), max_grpc_timeout: Some(timeout), ..Default::default() }
}
