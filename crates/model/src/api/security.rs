//! PeerAuthentication, RequestAuthentication and AuthorizationPolicy. Fields are Istio's (`security.istio.io`).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{destination_rule::WorkloadSelector, mesh_config::IgnoredValue, value::Duration};

/// Annotation of a policy that is only evaluated, not enforced.
pub const DRY_RUN: &str = "istio.io/dry-run";

/// Returns whether an annotation's value is true, as Go's `strconv.ParseBool` reads it.
pub fn is_true(value: &str) -> bool {
    matches!(value, "1" | "t" | "T" | "true" | "True" | "TRUE")
}

/// `spec` of a PeerAuthentication.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PeerAuthentication {
    /// Workloads that the policy selects; unset: the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Mode of mutual TLS.
    pub mtls: Option<MutualTls>,
    /// Mode of single ports of the workload, by port number.
    pub port_level_mtls: BTreeMap<String, MutualTls>,
}

/// `{mode: STRICT}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct MutualTls {
    /// Mode of mutual TLS.
    pub mode: MtlsMode,
}

/// Mode of mutual TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum MtlsMode {
    /// Inherits the mode of the next wider policy.
    #[default]
    Unset,
    /// Plain text only.
    Disable,
    /// Mutual TLS and plain text.
    Permissive,
    /// Mutual TLS only.
    Strict,
}

/// `spec` of a RequestAuthentication.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RequestAuthentication {
    /// Workloads that the policy selects; unset: the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Gateway or Service that the policy is attached to.
    pub target_ref: Option<TargetRef>,
    /// Gateways and Services that the policy is attached to.
    pub target_refs: Vec<TargetRef>,
    /// Issuers whose tokens are accepted. A request with a token must have a valid token of one of these issuers.
    pub jwt_rules: Vec<JwtRule>,
}

/// An issuer whose tokens are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct JwtRule {
    /// Issuer, claim `iss`.
    pub issuer: String,
    /// Audiences of which the token must name one; empty: any.
    pub audiences: Vec<String>,
    /// URL of the key set; empty: found by OpenID Connect Discovery of the issuer.
    #[serde(alias = "jwks_uri")]
    pub jwks_uri: String,
    /// Key set, JSON; it takes precedence over `jwksUri`.
    pub jwks: String,
    /// Headers that hold the token; without any location: `authorization: Bearer` and parameter `access_token`.
    pub from_headers: Vec<JwtHeader>,
    /// Query parameters that hold the token.
    pub from_params: Vec<String>,
    /// Cookies that hold the token.
    pub from_cookies: Vec<String>,
    /// Header of the forwarded request with the token's payload, base64url.
    pub output_payload_to_header: String,
    /// Whether the token stays in the forwarded request.
    pub forward_original_token: bool,
    /// Headers of the forwarded request with single claims.
    pub output_claim_to_headers: Vec<ClaimToHeader>,
    /// Timeout of a fetch of the key set; unset: 5 seconds.
    pub timeout: Option<Duration>,
    /// Claims whose text is a list separated by spaces, in addition to `scope` and `permission`.
    pub space_delimited_claims: Vec<String>,
    /// Whether a token is required. Istio ignores the field.
    pub presence: IgnoredValue,
}

/// Header that holds a token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct JwtHeader {
    /// Name.
    pub name: String,
    /// Text before the token, such as `"Bearer "`.
    pub prefix: String,
}

/// Claim that is copied to a header.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ClaimToHeader {
    /// Header.
    pub header: String,
    /// Claim; `a.b` is claim `b` within claim `a`.
    pub claim: String,
}

/// `spec` of an AuthorizationPolicy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AuthorizationPolicy {
    /// Workloads that the policy selects; unset: the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Gateway or Service that the policy is attached to.
    pub target_ref: Option<TargetRef>,
    /// Gateways and Services that the policy is attached to.
    pub target_refs: Vec<TargetRef>,
    /// Rules, of which one must match; a policy without rules never matches.
    pub rules: Vec<Rule>,
    /// Effect of a match.
    pub action: Action,
    /// External authorizer, for `CUSTOM`.
    pub provider: Option<Provider>,
}

/// Object that a policy is attached to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TargetRef {
    /// API group.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
}

/// Effect of a match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Action {
    /// Allows the request. A workload with an ALLOW policy denies requests that match none.
    #[default]
    Allow,
    /// Denies the request; evaluated before ALLOW policies.
    Deny,
    /// Logs the request.
    Audit,
    /// Asks an external authorizer.
    Custom,
}

/// External authorizer, for `CUSTOM`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Provider {
    /// Name of a provider in the mesh configuration.
    pub name: String,
}

/// A rule: one of `from`, one of `to` and all of `when` must match. A rule without conditions matches every request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Rule {
    /// Source of the request.
    pub from: Vec<From>,
    /// Operation of the request.
    pub to: Vec<To>,
    /// Conditions; all must hold.
    pub when: Vec<Condition>,
}

/// `source:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct From {
    /// Source of the request.
    pub source: Source,
}

/// `operation:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct To {
    /// Operation of the request.
    pub operation: Operation,
}

/// Source of a request; all fields that are set must match. Values may be `text`, `text*`, `*text` or `*`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Source {
    /// Principals, `cluster.local/ns/default/sa/productpage`; one must match.
    pub principals: Vec<String>,
    /// Principals of which none may match.
    pub not_principals: Vec<String>,
    /// Principals of a token, `ISSUER/SUBJECT`.
    pub request_principals: Vec<String>,
    /// Principals of a token of which none may match.
    pub not_request_principals: Vec<String>,
    /// Namespaces.
    pub namespaces: Vec<String>,
    /// Namespaces of which none may match.
    pub not_namespaces: Vec<String>,
    /// Service accounts, `NAMESPACE/NAME`, or a name in the policy's namespace.
    pub service_accounts: Vec<String>,
    /// Service accounts of which none may match.
    pub not_service_accounts: Vec<String>,
    /// Addresses of the peer.
    pub ip_blocks: Vec<String>,
    /// Addresses of the peer of which none may match.
    pub not_ip_blocks: Vec<String>,
    /// Addresses of the original client, before proxies.
    pub remote_ip_blocks: Vec<String>,
    /// Addresses of the original client of which none may match.
    pub not_remote_ip_blocks: Vec<String>,
    /// Trust domains.
    pub trust_domains: Vec<String>,
    /// Trust domains of which none may match.
    pub not_trust_domains: Vec<String>,
}

/// Operation of a request; all fields that are set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Operation {
    /// Hosts, compared without regard to case.
    pub hosts: Vec<String>,
    /// Hosts of which none may match.
    pub not_hosts: Vec<String>,
    /// Ports of the workload.
    pub ports: Vec<String>,
    /// Ports of which none may match.
    pub not_ports: Vec<String>,
    /// Methods.
    pub methods: Vec<String>,
    /// Methods of which none may match.
    pub not_methods: Vec<String>,
    /// Paths, or templates with `{*}` and `{**}`.
    pub paths: Vec<String>,
    /// Paths of which none may match.
    pub not_paths: Vec<String>,
}

/// Condition on an attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Condition {
    /// Attribute, such as `request.headers[x-a]`.
    pub key: String,
    /// Values of which one must match.
    pub values: Vec<String>,
    /// Values of which none may match.
    pub not_values: Vec<String>,
}
