//! Routes: HTTPRoute, GRPCRoute, TLSRoute, TCPRoute.

use serde::Deserialize;

use super::{BackendRef, ObjectReference, ParentReference};
use crate::api::Duration;

/// `spec` of an HTTPRoute.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRoute {
    /// Gateways, Services or ServiceEntries to which the rules apply.
    pub parent_refs: Vec<ParentReference>,
    /// Hosts at Gateways; empty: those of the listener.
    pub hostnames: Vec<String>,
    /// Whether Gateways with a default scope are parents; not supported.
    pub use_default_gateways: Option<String>,
    /// Rules.
    pub rules: Vec<HttpRule>,
}

/// Rule of an HTTPRoute.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRule {
    /// Name of the routes.
    pub name: Option<String>,
    /// Matches, of which one suffices; empty: every request.
    pub matches: Vec<HttpMatch>,
    /// Filters.
    pub filters: Vec<Filter>,
    /// Weighted backends.
    pub backend_refs: Vec<BackendRef>,
    /// Timeouts.
    pub timeouts: Option<Timeouts>,
    /// Retries; unset: those of the mesh.
    pub retry: Option<HttpRouteRetry>,
    /// Persistence of sessions; not supported.
    pub session_persistence: Option<SessionPersistence>,
}

/// Retries of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HttpRouteRetry {
    /// Status codes that are retried, besides failures of connections.
    pub codes: Vec<u32>,
    /// Maximum number of retries; unset: 2.
    pub attempts: Option<i32>,
    /// Minimum time before a retry; unset: 25 ms.
    pub backoff: Option<Duration>,
}

/// Persistence of sessions. Only its presence counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SessionPersistence {
    /// Name of the session.
    pub session_name: Option<String>,
    /// Maximum age.
    pub absolute_timeout: Option<Duration>,
    /// Maximum age without a request.
    pub idle_timeout: Option<Duration>,
    /// Cookie or header.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Settings of the cookie.
    pub cookie_config: Option<SessionCookie>,
}

/// Settings of a session's cookie.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SessionCookie {
    /// Whether it outlives the client's session.
    pub lifetime_type: Option<String>,
}

/// Timeouts of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Timeouts {
    /// Timeout of the whole response; 0 disables it.
    pub request: Option<Duration>,
    /// Timeout of a request to a backend; 0 disables it.
    pub backend_request: Option<Duration>,
}

/// Match of a request; all conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpMatch {
    /// Path; unset: every path.
    pub path: Option<PathMatch>,
    /// Headers.
    pub headers: Vec<NamedMatch>,
    /// Query parameters.
    pub query_params: Vec<NamedMatch>,
    /// Method.
    pub method: Option<String>,
}

/// Match of a path without the query.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PathMatch {
    /// Type; unset: PathPrefix.
    #[serde(rename = "type")]
    pub kind: PathMatchType,
    /// Path or expression; unset: `/`.
    pub value: Option<String>,
}

/// Type of a path match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum PathMatchType {
    /// Equal path.
    Exact,
    /// Prefix of whole path elements.
    #[default]
    PathPrefix,
    /// RE2 expression for the whole path.
    RegularExpression,
}

/// Type of a match of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum MatchType {
    /// Equal text.
    #[default]
    Exact,
    /// RE2 expression for the whole text.
    RegularExpression,
}

/// Match of a header or a query parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NamedMatch {
    /// Type; unset: Exact.
    #[serde(rename = "type")]
    pub kind: MatchType,
    /// Name.
    pub name: String,
    /// Value or expression.
    pub value: String,
}

/// Filter of a rule or a backend. The field of its type is set.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Filter {
    /// Type.
    #[serde(rename = "type")]
    pub kind: Option<FilterType>,
    /// Changes of request headers.
    pub request_header_modifier: Option<HeaderFilter>,
    /// Changes of response headers.
    pub response_header_modifier: Option<HeaderFilter>,
    /// Mirror.
    pub request_mirror: Option<Mirror>,
    /// Redirect.
    pub request_redirect: Option<Redirect>,
    /// Rewrite of path or host.
    pub url_rewrite: Option<UrlRewrite>,
    /// CORS policy.
    pub cors: Option<Cors>,
    /// Filter of an implementation; not supported.
    pub extension_ref: Option<ObjectReference>,
}

/// Type of a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum FilterType {
    /// Changes of request headers.
    RequestHeaderModifier,
    /// Changes of response headers.
    ResponseHeaderModifier,
    /// Mirror.
    RequestMirror,
    /// Redirect.
    RequestRedirect,
    /// Rewrite of path or host.
    #[serde(rename = "URLRewrite")]
    UrlRewrite,
    /// CORS policy.
    #[serde(rename = "CORS")]
    Cors,
    /// External authorization; not supported.
    ExternalAuth,
    /// Filter of an implementation; not supported.
    ExtensionRef,
}

/// Changes of headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HeaderFilter {
    /// Headers to set.
    pub set: Vec<HeaderValue>,
    /// Headers to add.
    pub add: Vec<HeaderValue>,
    /// Headers to remove.
    pub remove: Vec<String>,
}

/// Header and value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HeaderValue {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
}

/// Mirror of requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Mirror {
    /// Destination of the copies.
    pub backend_ref: BackendRef,
    /// Percentage of mirrored requests; unset: all.
    pub percent: Option<i32>,
    /// Fraction of mirrored requests; unset: all.
    pub fraction: Option<Fraction>,
}

/// Fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Fraction {
    /// Numerator.
    pub numerator: i32,
    /// Denominator; unset: 100.
    pub denominator: Option<i32>,
}

/// Redirect.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Redirect {
    /// Scheme, `http` or `https`; unset: that of the request.
    pub scheme: Option<String>,
    /// Host; unset: that of the request.
    pub hostname: Option<String>,
    /// Path; unset: that of the request.
    pub path: Option<PathModifier>,
    /// Port; unset: that of the scheme or of the request.
    pub port: Option<u32>,
    /// Status code; unset: 302.
    pub status_code: Option<u32>,
}

/// Rewrite of path or host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct UrlRewrite {
    /// Host.
    pub hostname: Option<String>,
    /// Path.
    pub path: Option<PathModifier>,
}

/// Replacement of a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PathModifier {
    /// Type.
    #[serde(rename = "type")]
    pub kind: Option<PathModifierType>,
    /// Replacement of the whole path.
    pub replace_full_path: Option<String>,
    /// Replacement of the matched prefix.
    pub replace_prefix_match: Option<String>,
}

/// Type of a path replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum PathModifierType {
    /// The whole path.
    ReplaceFullPath,
    /// The matched prefix.
    ReplacePrefixMatch,
}

/// CORS policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Cors {
    /// Allowed origins; `*` stands for any text.
    pub allow_origins: Vec<String>,
    /// Whether credentials are allowed.
    pub allow_credentials: Option<bool>,
    /// Allowed methods.
    pub allow_methods: Vec<String>,
    /// Allowed request headers.
    pub allow_headers: Vec<String>,
    /// Exposed response headers.
    pub expose_headers: Vec<String>,
    /// Maximum age of a preflight's result in seconds; unset: 5.
    pub max_age: Option<u32>,
}

/// `spec` of a GRPCRoute.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GrpcRoute {
    /// Gateways, Services or ServiceEntries to which the rules apply.
    pub parent_refs: Vec<ParentReference>,
    /// Hosts at Gateways; empty: those of the listener.
    pub hostnames: Vec<String>,
    /// Whether Gateways with a default scope are parents; not supported.
    pub use_default_gateways: Option<String>,
    /// Rules.
    pub rules: Vec<GrpcRule>,
}

/// Rule of a GRPCRoute.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GrpcRule {
    /// Name of the routes.
    pub name: Option<String>,
    /// Matches, of which one suffices; empty: every request.
    pub matches: Vec<GrpcMatch>,
    /// Filters.
    pub filters: Vec<Filter>,
    /// Weighted backends.
    pub backend_refs: Vec<BackendRef>,
    /// Persistence of sessions; not supported.
    pub session_persistence: Option<SessionPersistence>,
}

/// Match of a gRPC request; all conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GrpcMatch {
    /// Service and method; unset: all.
    pub method: Option<GrpcMethod>,
    /// Headers.
    pub headers: Vec<NamedMatch>,
}

/// gRPC service and method.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GrpcMethod {
    /// Type; unset: Exact.
    #[serde(rename = "type")]
    pub kind: MatchType,
    /// Service; unset: all.
    pub service: Option<String>,
    /// Method; unset: all.
    pub method: Option<String>,
}

/// `spec` of a TLSRoute.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TlsRoute {
    /// Gateways or Services to which the rules apply.
    pub parent_refs: Vec<ParentReference>,
    /// Server names.
    pub hostnames: Vec<String>,
    /// Whether Gateways with a default scope are parents; not supported.
    pub use_default_gateways: Option<String>,
    /// Rules.
    pub rules: Vec<L4Rule>,
}

/// `spec` of a TCPRoute.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct TcpRoute {
    /// Gateways or Services to which the rules apply.
    pub parent_refs: Vec<ParentReference>,
    /// Whether Gateways with a default scope are parents; not supported.
    pub use_default_gateways: Option<String>,
    /// Rules.
    pub rules: Vec<L4Rule>,
}

/// Rule for connections.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct L4Rule {
    /// Name, for people.
    pub name: Option<String>,
    /// Weighted backends.
    pub backend_refs: Vec<BackendRef>,
}
