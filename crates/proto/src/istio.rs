//! Istio's messages that Envoy's API lacks, and the typed structs its filters are configured with.
//!
//! Field numbers are those of Istio's public protos (istio/api, istio/proxy, istio/istio `nds.proto`) and xDS's
//! `udpa.type.v1.TypedStruct`.

use std::collections::HashMap;

use envoy_types::pb::google::protobuf::{Any, Duration, Struct, Value, value};
use prost::{Message, Name};

use crate::Codec;

/// The metadata exchange filter of TCP chains and clusters, in a [`TypedStruct`].
pub const TCP_METADATA_EXCHANGE: &str =
    "type.googleapis.com/envoy.tcp.metadataexchange.config.MetadataExchange";
/// The metadata exchange filter of HTTP chains, in a [`TypedStruct`].
pub const HTTP_PEER_METADATA: &str = "type.googleapis.com/io.istio.http.peer_metadata.Config";

/// `istio.v1.auth.IstioCertificateRequest`: asks for a certificate.
#[derive(Clone, PartialEq, Message)]
pub struct IstioCertificateRequest {
    /// A PKCS #10 request in PEM.
    #[prost(string, tag = "1")]
    pub csr: String,
    /// The wanted lifetime in seconds; 0 leaves it to the authority.
    #[prost(int64, tag = "3")]
    pub validity_duration: i64,
    /// More about the caller, such as `ClusterID` and `CertSigner`.
    #[prost(message, optional, tag = "4")]
    pub metadata: Option<Struct>,
}

/// `istio.v1.auth.IstioCertificateResponse`: the certificate and its chain.
#[derive(Clone, PartialEq, Message)]
pub struct IstioCertificateResponse {
    /// PEM certificates: the leaf, intermediates, the root last.
    #[prost(string, repeated, tag = "1")]
    pub cert_chain: Vec<String>,
}

/// `istio.networking.nds.v1.NameTable`: what a proxy's DNS answers.
#[derive(Clone, PartialEq, Message)]
pub struct NameTable {
    /// By host name.
    #[prost(map = "string, message", tag = "1")]
    pub table: HashMap<String, NameInfo>,
}

/// `istio.networking.nds.v1.NameTable.NameInfo`: the addresses of one host name.
#[derive(Clone, PartialEq, Message)]
pub struct NameInfo {
    /// Its addresses.
    #[prost(string, repeated, tag = "1")]
    pub ips: Vec<String>,
    /// Where the name is from: `Kubernetes` or `External`.
    #[prost(string, tag = "2")]
    pub registry: String,
    /// The Kubernetes service's name.
    #[prost(string, tag = "3")]
    pub shortname: String,
    /// The Kubernetes service's namespace.
    #[prost(string, tag = "4")]
    pub namespace: String,
}

/// `stats.PluginConfig`: Istio's metrics filter.
#[derive(Clone, PartialEq, Message)]
pub struct StatsConfig {
    /// Do not take the host header for the destination service where the cluster does not name it.
    #[prost(bool, tag = "6")]
    pub disable_host_header_fallback: bool,
    /// How often TCP metrics are reported.
    #[prost(message, optional, tag = "7")]
    pub tcp_reporting_duration: Option<Duration>,
    /// Changes to metrics.
    #[prost(message, repeated, tag = "8")]
    pub metrics: Vec<MetricConfig>,
    /// Further metrics.
    #[prost(message, repeated, tag = "9")]
    pub definitions: Vec<MetricDefinition>,
    /// Which side reports; see [`Reporter`].
    #[prost(enumeration = "Reporter", tag = "10")]
    pub reporter: i32,
    /// How often metric scopes are exchanged.
    #[prost(message, optional, tag = "11")]
    pub rotation_interval: Option<Duration>,
    /// How long an exchanged scope is kept.
    #[prost(message, optional, tag = "12")]
    pub graceful_deletion_interval: Option<Duration>,
}

/// `stats.MetricConfig`: what to change about one metric, or all.
#[derive(Clone, PartialEq, Message)]
pub struct MetricConfig {
    /// Labels to add or replace: name and expression.
    #[prost(map = "string, string", tag = "1")]
    pub dimensions: HashMap<String, String>,
    /// The metric; all if empty.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Labels to leave out.
    #[prost(string, repeated, tag = "3")]
    pub tags_to_remove: Vec<String>,
    /// A condition.
    #[prost(string, tag = "4")]
    pub r#match: String,
    /// Do not report the metric at all.
    #[prost(bool, tag = "5")]
    pub drop: bool,
}

/// `stats.MetricDefinition`: a further metric.
#[derive(Clone, PartialEq, Message)]
pub struct MetricDefinition {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// An expression for its value.
    #[prost(string, tag = "2")]
    pub value: String,
    /// See [`MetricType`].
    #[prost(enumeration = "MetricType", tag = "3")]
    pub r#type: i32,
}

/// `stats.MetricType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum MetricType {
    /// Only grows.
    Counter = 0,
    /// Goes up and down.
    Gauge = 1,
    /// A distribution.
    Histogram = 2,
}

/// `stats.Reporter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Reporter {
    /// By the listener's direction.
    Unspecified = 0,
    /// A gateway shared by servers.
    ServerGateway = 1,
}

/// `istio.envoy.config.filter.http.alpn.v2alpha1.FilterConfig`: the ALPN towards the peer by request protocol.
#[derive(Clone, PartialEq, Message)]
pub struct AlpnConfig {
    /// One for each protocol.
    #[prost(message, repeated, tag = "1")]
    pub alpn_override: Vec<AlpnOverride>,
}

/// One entry of [`AlpnConfig`].
#[derive(Clone, PartialEq, Message)]
pub struct AlpnOverride {
    /// The protocol the request goes upstream with; see [`AlpnProtocol`].
    #[prost(enumeration = "AlpnProtocol", tag = "1")]
    pub upstream_protocol: i32,
    /// What TLS then offers.
    #[prost(string, repeated, tag = "2")]
    pub alpn_override: Vec<String>,
}

/// The protocols of [`AlpnOverride`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum AlpnProtocol {
    /// HTTP/1.0
    Http10 = 0,
    /// HTTP/1.1
    Http11 = 1,
    /// HTTP/2
    Http2 = 2,
}

/// `envoy.extensions.load_balancing_policies.peak_ewma.v3alpha.PeakEwma`, one of those that Envoy has to be built with.
#[derive(Clone, PartialEq, Message)]
pub struct PeakEwma {
    /// For how long what was seen counts; 10 s.
    #[prost(message, optional, tag = "1")]
    pub decay_time: Option<Duration>,
    /// The latency of those of which nothing has been seen; 10 ms.
    #[prost(message, optional, tag = "4")]
    pub default_rtt: Option<Duration>,
}

/// `udpa.type.v1.TypedStruct`: a message of a type the sender has no schema for.
#[derive(Clone, PartialEq, Message)]
pub struct TypedStruct {
    /// The type URL of what `value` is the JSON form of.
    #[prost(string, tag = "1")]
    pub type_url: String,
    /// The JSON form.
    #[prost(message, optional, tag = "2")]
    pub value: Option<Struct>,
}

/// A text as a struct's value.
pub fn string(text: impl Into<String>) -> Value {
    Value { kind: Some(value::Kind::StringValue(text.into())) }
}

/// A boolean as a struct's value.
pub fn boolean(value: bool) -> Value {
    Value { kind: Some(value::Kind::BoolValue(value)) }
}

/// A number as a struct's value.
pub fn number(value: f64) -> Value {
    Value { kind: Some(value::Kind::NumberValue(value)) }
}

/// A struct as a struct's value.
pub fn structure<'a>(fields: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Value { kind: Some(value::Kind::StructValue(Struct { fields })) }
}

/// A list as a struct's value.
pub fn list(values: impl IntoIterator<Item = Value>) -> Value {
    let values = values.into_iter().collect();
    Value { kind: Some(value::Kind::ListValue(envoy_types::pb::google::protobuf::ListValue { values })) }
}

/// Packs a message into an `Any`.
pub fn pack<M: Codec + Name>(message: &M) -> Any {
    Any { type_url: M::type_url(), value: message.to_vec() }
}

macro_rules! names {
    ($($message:ident = $package:literal $name:literal;)*) => {$(
        impl Name for $message {
            const NAME: &'static str = $name;
            const PACKAGE: &'static str = $package;
            fn type_url() -> String {
                concat!("type.googleapis.com/", $package, ".", $name).into()
            }
        }
    )*};
}

names! {
    IstioCertificateRequest = "istio.v1.auth" "IstioCertificateRequest";
    IstioCertificateResponse = "istio.v1.auth" "IstioCertificateResponse";
    NameTable = "istio.networking.nds.v1" "NameTable";
    StatsConfig = "stats" "PluginConfig";
    AlpnConfig = "istio.envoy.config.filter.http.alpn.v2alpha1" "FilterConfig";
    PeakEwma = "envoy.extensions.load_balancing_policies.peak_ewma.v3alpha" "PeakEwma";
    TypedStruct = "udpa.type.v1" "TypedStruct";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_istio_writes_them() {
        // From protobuf's text: upstream_protocol HTTP2, alpn_override ["istio-h2", "istio", "h2"].
        let bytes = b"\x0a\x17\x08\x02\x12\x08istio-h2\x12\x05istio\x12\x02h2";
        let read = AlpnConfig::decode(&bytes[..]).unwrap();
        assert_eq!(read.alpn_override[0].upstream_protocol(), AlpnProtocol::Http2);
        assert_eq!(read.alpn_override[0].alpn_override, ["istio-h2", "istio", "h2"]);
        assert_eq!(read.encode_to_vec(), bytes);
        assert_eq!(
            pack(&read).type_url,
            "type.googleapis.com/istio.envoy.config.filter.http.alpn.v2alpha1.FilterConfig"
        );
    }
}
