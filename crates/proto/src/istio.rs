//! Messages that Envoy's API does not contain: those of Istio, a contrib extension of Envoy, and the typed structs that
//! configure Istio's filters.
//!
//! Field numbers are those of Istio's public protos (istio/api, istio/proxy, istio/istio `nds.proto`), Envoy's contrib
//! protos and xDS's `udpa.type.v1.TypedStruct`.

use std::collections::HashMap;

use envoy_types::pb::google::protobuf::{Any, Duration, Struct, Value, value};
use prost::{Message, Name};

use crate::Codec;

/// Type URL of the metadata exchange filter of TCP chains and clusters, in a [`TypedStruct`].
pub const TCP_METADATA_EXCHANGE: &str =
    "type.googleapis.com/envoy.tcp.metadataexchange.config.MetadataExchange";
/// Type URL of the metadata exchange filter of HTTP chains, in a [`TypedStruct`].
pub const HTTP_PEER_METADATA: &str = "type.googleapis.com/io.istio.http.peer_metadata.Config";

/// `istio.v1.auth.IstioCertificateRequest`: a request for a certificate.
#[derive(Clone, PartialEq, Message)]
pub struct IstioCertificateRequest {
    /// PKCS #10 request in PEM.
    #[prost(string, tag = "1")]
    pub csr: String,
    /// Requested lifetime in seconds; 0 selects the authority's default.
    #[prost(int64, tag = "3")]
    pub validity_duration: i64,
    /// Metadata of the caller, such as `ClusterID` and `CertSigner`.
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

/// `istio.networking.nds.v1.NameTable`: DNS table of a proxy.
#[derive(Clone, PartialEq, Message)]
pub struct NameTable {
    /// Entries by host name.
    #[prost(map = "string, message", tag = "1")]
    pub table: HashMap<String, NameInfo>,
}

/// `istio.networking.nds.v1.NameTable.NameInfo`: the addresses of one host name.
#[derive(Clone, PartialEq, Message)]
pub struct NameInfo {
    /// IP addresses.
    #[prost(string, repeated, tag = "1")]
    pub ips: Vec<String>,
    /// Source of the name: `Kubernetes` or `External`.
    #[prost(string, tag = "2")]
    pub registry: String,
    /// Name of the Kubernetes service.
    #[prost(string, tag = "3")]
    pub shortname: String,
    /// Namespace of the Kubernetes service.
    #[prost(string, tag = "4")]
    pub namespace: String,
}

/// `stats.PluginConfig`: Istio's metrics filter.
#[derive(Clone, PartialEq, Message)]
pub struct StatsConfig {
    /// Disables the host header as the destination service of a cluster that names none.
    #[prost(bool, tag = "6")]
    pub disable_host_header_fallback: bool,
    /// Reporting interval of TCP metrics.
    #[prost(message, optional, tag = "7")]
    pub tcp_reporting_duration: Option<Duration>,
    /// Changes to metrics.
    #[prost(message, repeated, tag = "8")]
    pub metrics: Vec<MetricConfig>,
    /// Additional metrics.
    #[prost(message, repeated, tag = "9")]
    pub definitions: Vec<MetricDefinition>,
    /// Reporting side; see [`Reporter`].
    #[prost(enumeration = "Reporter", tag = "10")]
    pub reporter: i32,
    /// Rotation interval of metric scopes.
    #[prost(message, optional, tag = "11")]
    pub rotation_interval: Option<Duration>,
    /// Time that a rotated scope is kept.
    #[prost(message, optional, tag = "12")]
    pub graceful_deletion_interval: Option<Duration>,
}

/// `stats.MetricConfig`: changes to one metric or to all.
#[derive(Clone, PartialEq, Message)]
pub struct MetricConfig {
    /// Labels to add or replace: name and expression.
    #[prost(map = "string, string", tag = "1")]
    pub dimensions: HashMap<String, String>,
    /// Name of the metric; empty for all.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Labels to remove.
    #[prost(string, repeated, tag = "3")]
    pub tags_to_remove: Vec<String>,
    /// Condition.
    #[prost(string, tag = "4")]
    pub r#match: String,
    /// Disables the metric.
    #[prost(bool, tag = "5")]
    pub drop: bool,
}

/// `stats.MetricDefinition`: an additional metric.
#[derive(Clone, PartialEq, Message)]
pub struct MetricDefinition {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Expression of the value.
    #[prost(string, tag = "2")]
    pub value: String,
    /// Type; see [`MetricType`].
    #[prost(enumeration = "MetricType", tag = "3")]
    pub r#type: i32,
}

/// `stats.MetricType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum MetricType {
    /// Monotonic.
    Counter = 0,
    /// Rises and falls.
    Gauge = 1,
    /// Distribution.
    Histogram = 2,
}

/// `stats.Reporter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum Reporter {
    /// Determined by the listener's direction.
    Unspecified = 0,
    /// Gateway shared by servers.
    ServerGateway = 1,
}

/// `istio.envoy.config.filter.http.alpn.v2alpha1.FilterConfig`: ALPN of upstream connections by request
/// protocol.
#[derive(Clone, PartialEq, Message)]
pub struct AlpnConfig {
    /// One entry per protocol.
    #[prost(message, repeated, tag = "1")]
    pub alpn_override: Vec<AlpnOverride>,
}

/// One entry of [`AlpnConfig`].
#[derive(Clone, PartialEq, Message)]
pub struct AlpnOverride {
    /// Upstream protocol of the request; see [`AlpnProtocol`].
    #[prost(enumeration = "AlpnProtocol", tag = "1")]
    pub upstream_protocol: i32,
    /// ALPN protocols that TLS offers.
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

/// `envoy.extensions.load_balancing_policies.peak_ewma.v3alpha.PeakEwma`, a contrib extension of Envoy.
#[derive(Clone, PartialEq, Message)]
pub struct PeakEwma {
    /// Decay time of measurements; default 10 s.
    #[prost(message, optional, tag = "1")]
    pub decay_time: Option<Duration>,
    /// Assumed latency of endpoints without measurements; default 10 ms.
    #[prost(message, optional, tag = "4")]
    pub default_rtt: Option<Duration>,
}

/// `udpa.type.v1.TypedStruct`: a message in JSON form, for senders without its schema.
#[derive(Clone, PartialEq, Message)]
pub struct TypedStruct {
    /// Type URL of the message.
    #[prost(string, tag = "1")]
    pub type_url: String,
    /// JSON form of the message.
    #[prost(message, optional, tag = "2")]
    pub value: Option<Struct>,
}

/// Returns a string value.
pub fn string(text: impl Into<String>) -> Value {
    Value { kind: Some(value::Kind::StringValue(text.into())) }
}

/// Returns a boolean value.
pub fn boolean(value: bool) -> Value {
    Value { kind: Some(value::Kind::BoolValue(value)) }
}

/// Returns a number value.
pub fn number(value: f64) -> Value {
    Value { kind: Some(value::Kind::NumberValue(value)) }
}

/// Returns a struct value.
pub fn structure<'a>(fields: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Value { kind: Some(value::Kind::StructValue(Struct { fields })) }
}

/// Returns a list value.
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
    fn messages_are_decoded_as_istio_encodes_them() {
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
