//! RateLimitPolicy (`skysail.io`).

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::json;

use super::{
    destination_rule::WorkloadSelector,
    telemetry::ProviderRef,
    value::{Duration, StringMatch},
};

/// `spec` of a RateLimitPolicy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimitPolicy {
    /// Workloads that the policy selects; unset and no `targetRefs`: the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Services, Gateways and routes to which the policy is attached.
    pub target_refs: Vec<RateLimitTarget>,
    /// Rules. A request is refused if it exceeds the limit of any rule that it matches.
    pub rules: Vec<RateLimitRule>,
}

/// Object to which a RateLimitPolicy of the same namespace is attached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimitTarget {
    /// API group; empty for a Service.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Name of a rule of the route; empty: all rules.
    pub section_name: String,
}

/// Limit of the requests that match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimitRule {
    /// Name, for metrics and the descriptors of a rate limit service.
    pub name: String,
    /// Requests that count; unset: all.
    #[serde(rename = "match")]
    pub matched: Option<RateLimitMatch>,
    /// Attributes of which each combination of values has a limit of its own; empty: one limit for all.
    pub by: Vec<RateLimitKey>,
    /// Limit in the proxy.
    pub limit: Option<Limit>,
    /// Rate limit service that decides instead of the proxy.
    pub global: Option<GlobalLimit>,
    /// Response to requests above the limit.
    pub response: Option<LimitResponse>,
    /// Whether requests above the limit are only counted.
    pub shadow: bool,
}

/// Conditions of a rule; all fields that are set must match. Texts may be `text`, `text*`, `*text` or `*`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimitMatch {
    /// Paths without query; one must match.
    pub paths: Vec<String>,
    /// Methods; one must match.
    pub methods: Vec<String>,
    /// Hosts, compared without regard to case and port; one must match.
    pub hosts: Vec<String>,
    /// Headers; all must match.
    #[schemars(schema_with = "string_matches")]
    pub headers: BTreeMap<String, StringMatch>,
    /// Headers; none may match.
    #[schemars(schema_with = "string_matches")]
    pub without_headers: BTreeMap<String, StringMatch>,
    /// Principals of the peer, `cluster.local/ns/default/sa/productpage`; one must match.
    pub principals: Vec<String>,
    /// Principals of the peer of which none may match.
    pub not_principals: Vec<String>,
}

/// Attribute of which each value has a limit of its own. Exactly one field beside `key` is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimitKey {
    /// Principal of the peer.
    pub source_principal: bool,
    /// Address of the peer of the connection.
    pub source_address: bool,
    /// Address of the client: from `x-forwarded-for` where the proxy trusts it, otherwise that of the peer.
    pub client_address: Option<ClientAddress>,
    /// Request header.
    pub header: String,
    /// Claim of a verified token; `a.b` is claim `b` within claim `a`.
    pub jwt_claim: String,
    /// Method.
    pub method: bool,
    /// Host.
    pub host: bool,
    /// Name of the route.
    pub route: bool,
    /// Key of the entry in descriptors; empty: the name of the attribute.
    pub key: String,
}

/// Block of client addresses that has one limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientAddress {
    /// Prefix length for IPv4; unset: 32.
    pub ipv4_prefix_length: Option<u32>,
    /// Prefix length for IPv6; unset: 64, the block of one host.
    pub ipv6_prefix_length: Option<u32>,
}

/// Number of requests in a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct Limit {
    /// Number of requests in each unit or interval.
    pub requests: u32,
    /// Unit of time.
    #[schemars(schema_with = "units")]
    pub unit: Option<LimitUnit>,
    /// Length of time, instead of a unit, such as `500ms`.
    #[schemars(with = "Option<String>")]
    pub interval: Option<Duration>,
    /// Number of requests that may arrive at once; unset: `requests`.
    pub burst: Option<u32>,
    /// Maximum number of combinations of values that are counted apart; unset: 10,000.
    pub max_keys: Option<u32>,
}

/// Unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum LimitUnit {
    /// One second.
    Second,
    /// 60 seconds.
    Minute,
    /// 3,600 seconds.
    Hour,
    /// 86,400 seconds.
    Day,
}

/// Schema of a unit: descriptions of values are not possible in a definition.
fn units(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["SECOND", "MINUTE", "HOUR", "DAY"] })
}

/// Schema of the conditions on headers.
fn string_matches(_: &mut SchemaGenerator) -> Schema {
    let text = json!({ "type": "string" });
    let texts = json!({ "exact": text, "prefix": text, "regex": text });
    let value = json!({ "type": "object", "maxProperties": 1, "properties": texts });
    json_schema!({ "type": "object", "additionalProperties": value })
}

/// Rate limit service that decides.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct GlobalLimit {
    /// Extension provider with `envoyRateLimit`.
    pub provider: ProviderRef,
    /// Domain of the descriptors; empty: that of the provider.
    pub domain: String,
}

/// Response to requests above a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default, rename_all = "camelCase")]
pub struct LimitResponse {
    /// Status; unset: 429.
    pub status: Option<u32>,
    /// Headers that are set.
    pub headers: BTreeMap<String, String>,
    /// Text.
    pub body: String,
    /// Type of the text; empty: `text/plain`.
    pub content_type: String,
    /// Whether all responses have headers `x-ratelimit-limit`, `x-ratelimit-remaining` and `x-ratelimit-reset`.
    pub rate_limit_headers: bool,
}

/// Default of `maxKeys`: number of combinations of values that are counted apart.
pub const DEFAULT_MAX_KEYS: u32 = 10_000;
/// Name of a rule without name.
const UNNAMED: &str = "rule";

impl RateLimitRule {
    /// Returns the rule's name; rules without one are numbered.
    pub fn name_at(&self, index: usize) -> String {
        if self.name.is_empty() { format!("{UNNAMED}-{index}") } else { self.name.clone() }
    }
}

impl RateLimitRule {
    /// Returns whether the response to requests above the limit has a text of its own.
    pub fn has_body(&self) -> bool {
        self.response.as_ref().is_some_and(|response| !response.body.is_empty())
    }
}

impl RateLimitTarget {
    /// Returns whether this is a route, which selects requests rather than workloads.
    pub fn is_route(&self) -> bool {
        matches!(
            (&*self.group, &*self.kind),
            ("gateway.networking.k8s.io", "HTTPRoute" | "GRPCRoute")
                | ("networking.istio.io", "VirtualService")
        )
    }

    /// Returns whether this is a Service.
    pub fn is_service(&self) -> bool {
        matches!((&*self.group, &*self.kind), ("" | "core", "Service"))
    }

    /// Returns whether this is a Gateway of Gateway API.
    pub fn is_gateway(&self) -> bool {
        self.group == "gateway.networking.k8s.io" && self.kind == "Gateway"
    }
}

impl Limit {
    /// Returns the length of the unit or interval.
    pub fn time(&self) -> std::time::Duration {
        let seconds = match self.unit {
            None => return self.interval.unwrap_or_default().0,
            Some(LimitUnit::Second) => 1,
            Some(LimitUnit::Minute) => 60,
            Some(LimitUnit::Hour) => 3_600,
            Some(LimitUnit::Day) => 86_400,
        };
        std::time::Duration::from_secs(seconds)
    }

    /// Returns the number of requests that may arrive at once.
    pub fn at_once(&self) -> u32 {
        self.burst.unwrap_or(self.requests)
    }
}

impl RateLimitKey {
    /// Returns the names of the attributes that are set; exactly one is valid.
    pub fn attributes(&self) -> Vec<&'static str> {
        let set = [
            (self.source_principal, "sourcePrincipal"),
            (self.source_address, "sourceAddress"),
            (self.client_address.is_some(), "clientAddress"),
            (!self.header.is_empty(), "header"),
            (!self.jwt_claim.is_empty(), "jwtClaim"),
            (self.method, "method"),
            (self.host, "host"),
            (self.route, "route"),
        ];
        set.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name).collect()
    }

    /// Returns the key of the entry in descriptors.
    pub fn descriptor_key(&self) -> String {
        match self.attributes().first() {
            _ if !self.key.is_empty() => self.key.clone(),
            // Envoy has a fixed key for blocks of addresses.
            Some(&"clientAddress") => "masked_remote_address".to_owned(),
            Some(&"header") => format!("header.{}", self.header.to_ascii_lowercase()),
            Some(&"jwtClaim") => format!("jwtClaim.{}", self.jwt_claim),
            Some(name) => (*name).to_owned(),
            None => String::new(),
        }
    }
}
