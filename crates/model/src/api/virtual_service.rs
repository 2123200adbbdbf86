//! VirtualService: routing of requests for a host. Fields are Istio's (`networking.istio.io`).

use std::{collections::BTreeMap, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use serde::Deserialize;

use super::{
    Kind, Labels,
    value::{Duration, Percent, PortSelector, StringMatch},
};

/// `spec` of a VirtualService.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VirtualService {
    /// Hosts; short names are completed with the object's namespace.
    pub hosts: Vec<String>,
    /// Gateways to which the rules apply; empty: `mesh`, the sidecars.
    pub gateways: Vec<String>,
    /// Routes of HTTP; the first match applies.
    pub http: Vec<IstioHttpRoute>,
    /// Routes of TLS that is passed through.
    pub tls: Vec<IstioTlsRoute>,
    /// Routes of TCP.
    pub tcp: Vec<IstioTcpRoute>,
    /// Namespaces in which the object is visible; empty: all.
    pub export_to: Vec<String>,
    /// Set if the object is made from routes of Gateway API or from Ingresses.
    #[serde(skip)]
    pub derived: Option<Derived>,
}

/// Properties of a VirtualService that is made from routes of Gateway API or from Ingresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Derived {
    /// Port of the service to which the rules apply; `None`: all.
    pub port: Option<u16>,
    /// Whether it is made from Ingresses.
    pub is_ingress: bool,
}

/// Rule of a route of Gateway API from which a rule is made. The route is in the namespace of the VirtualService.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteSource {
    /// Kind of the route.
    pub kind: Kind,
    /// Name of the route.
    pub route: Arc<str>,
    /// Name of the rule; empty if it has none.
    pub rule: Arc<str>,
}

/// Route of HTTP requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct IstioHttpRoute {
    /// Name, for people and metrics.
    pub name: String,
    /// Rule of Gateway API from which it is made.
    #[serde(skip)]
    pub source: Option<RouteSource>,
    /// Matches, of which one suffices; empty: every request.
    #[serde(rename = "match")]
    pub matches: Vec<HttpMatchRequest>,
    /// Weighted destinations.
    pub route: Vec<HttpDestination>,
    /// Redirect.
    pub redirect: Option<HttpRedirect>,
    /// Direct response.
    pub direct_response: Option<DirectResponse>,
    /// VirtualService with further routes.
    pub delegate: Option<Delegate>,
    /// Rewrite of path or authority.
    pub rewrite: Option<HttpRewrite>,
    /// Timeout of the whole response; 0 or unset disables it.
    pub timeout: Option<Duration>,
    /// Retry policy; unset: the mesh's default.
    pub retries: Option<HttpRetry>,
    /// Injected delays and aborts.
    pub fault: Option<HttpFault>,
    /// Destination of a copy of each request.
    pub mirror: Option<Destination>,
    /// Old form of `mirrorPercentage`.
    #[serde(alias = "mirror_percent")]
    pub mirror_percent: Option<u32>,
    /// Percentage of mirrored requests.
    pub mirror_percentage: Option<Percent>,
    /// Several mirrors.
    pub mirrors: Vec<HttpMirror>,
    /// CORS policy.
    pub cors_policy: Option<CorsPolicy>,
    /// Changes of headers.
    pub headers: Option<Headers>,
}

/// Match of a request; all conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpMatchRequest {
    /// Name, for people.
    pub name: String,
    /// Path without the query.
    pub uri: Option<StringMatch>,
    /// Scheme, `http` or `https`.
    pub scheme: Option<StringMatch>,
    /// Method.
    pub method: Option<StringMatch>,
    /// Authority.
    pub authority: Option<StringMatch>,
    /// Headers by lower-case name.
    pub headers: BTreeMap<String, StringMatch>,
    /// Headers that must not match.
    pub without_headers: BTreeMap<String, StringMatch>,
    /// Query parameters.
    pub query_params: BTreeMap<String, StringMatch>,
    /// Port of the request.
    pub port: Option<u32>,
    /// Labels of the client workload.
    pub source_labels: Labels,
    /// Namespace of the client workload.
    pub source_namespace: Option<String>,
    /// Gateways to which the match applies; overrides those of the VirtualService.
    pub gateways: Vec<String>,
    /// Whether `uri` is compared without regard to case.
    pub ignore_uri_case: bool,
    /// Prefix of statistics.
    pub stat_prefix: String,
}

/// Weighted destination of HTTP requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct HttpDestination {
    /// Destination.
    pub destination: Destination,
    /// Weight, 0 if unset; weights need not add up to 100. A single destination gets all requests.
    pub weight: Option<i32>,
    /// Changes of headers for this destination.
    pub headers: Option<Headers>,
}

/// Destination: a service, with an optional subset and port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Destination {
    /// Host of the service; short names are completed with the VirtualService's namespace.
    pub host: String,
    /// Subset of a DestinationRule; empty: the whole service.
    pub subset: String,
    /// Port; may be unset if the service has exactly one.
    pub port: Option<PortSelector>,
}

/// Redirect with a `Location` header.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRedirect {
    /// New path.
    pub uri: String,
    /// Replacement of the matched prefix.
    pub prefix_rewrite: String,
    /// New authority.
    pub authority: String,
    /// New port.
    pub port: Option<u32>,
    /// Source of the port, `FROM_PROTOCOL_DEFAULT` or `FROM_REQUEST_PORT`.
    pub derive_port: Option<RedirectPort>,
    /// New scheme.
    pub scheme: String,
    /// Status code; 301 if unset.
    pub redirect_code: u32,
}

/// Source of a redirect's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RedirectPort {
    /// 80 or 443.
    FromProtocolDefault,
    /// Port of the request.
    FromRequestPort,
}

/// Response by the sidecar itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DirectResponse {
    /// Status code.
    pub status: u32,
    /// Body.
    pub body: Option<DirectBody>,
}

/// Body of a direct response; exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DirectBody {
    /// Text.
    pub string: Option<String>,
    /// Base64.
    pub bytes: Option<String>,
}

/// Reference to another VirtualService with further routes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Delegate {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
}

/// Rewrite of path and authority.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRewrite {
    /// New path, or replacement of the matched prefix.
    pub uri: String,
    /// New authority.
    pub authority: String,
    /// Rewrite by regular expression.
    pub uri_regex_rewrite: Option<RegexRewrite>,
}

/// Rewrite by an RE2 expression with groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RegexRewrite {
    /// Expression.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Replacement; `\1` is the first group.
    pub rewrite: String,
}

/// Retry policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRetry {
    /// Maximum number of retries; 0 disables retries.
    pub attempts: i32,
    /// Timeout per try; unset: the route's timeout.
    pub per_try_timeout: Option<Duration>,
    /// Envoy's conditions and HTTP status codes, separated by commas; empty: the default.
    pub retry_on: String,
    /// Whether other localities may be tried.
    pub retry_remote_localities: Option<bool>,
    /// Whether a host that failed may be tried again.
    pub retry_ignore_previous_hosts: Option<bool>,
    /// Minimum backoff between tries; 25 ms if unset.
    pub backoff: Option<Duration>,
}

/// Injected faults.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct HttpFault {
    /// Delay before the request is forwarded.
    pub delay: Option<FaultDelay>,
    /// Error response.
    pub abort: Option<FaultAbort>,
}

/// Injected delay.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FaultDelay {
    /// Duration.
    pub fixed_delay: Option<Duration>,
    /// Exponential delay; Istio does not implement it either.
    pub exponential_delay: Option<Duration>,
    /// Percentage of delayed requests; unset: none unless `percent` is set.
    pub percentage: Option<Percent>,
    /// Old form of `percentage`.
    pub percent: i32,
}

/// Injected error response.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FaultAbort {
    /// HTTP status code.
    pub http_status: Option<u32>,
    /// Name of a gRPC status, `UNAVAILABLE`.
    pub grpc_status: Option<String>,
    /// HTTP/2 error; Istio does not implement it either.
    pub http2_error: Option<String>,
    /// Percentage of aborted requests; unset: all.
    pub percentage: Option<Percent>,
}

/// Mirror of requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct HttpMirror {
    /// Destination.
    pub destination: Destination,
    /// Percentage of mirrored requests; unset: all.
    pub percentage: Option<Percent>,
}

/// CORS policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CorsPolicy {
    /// Old form of `allowOrigins`.
    pub allow_origin: Vec<String>,
    /// Allowed origins.
    pub allow_origins: Vec<StringMatch>,
    /// Allowed methods.
    pub allow_methods: Vec<String>,
    /// Allowed request headers.
    pub allow_headers: Vec<String>,
    /// Exposed response headers.
    pub expose_headers: Vec<String>,
    /// Maximum age of a preflight's result.
    pub max_age: Option<Duration>,
    /// Whether credentials such as cookies are allowed.
    pub allow_credentials: Option<bool>,
    /// `FORWARD` or `IGNORE`.
    pub unmatched_preflights: Option<String>,
}

/// Changes of request and response headers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Headers {
    /// Changes before the request is forwarded.
    pub request: HeaderOps,
    /// Changes before the response is returned.
    pub response: HeaderOps,
}

/// Changes of headers in one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HeaderOps {
    /// Headers to set.
    pub set: BTreeMap<String, String>,
    /// Headers to add.
    pub add: BTreeMap<String, String>,
    /// Headers to remove.
    pub remove: Vec<String>,
}

/// Route of TLS that is passed through.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct IstioTlsRoute {
    /// Matches, of which one suffices.
    #[serde(rename = "match")]
    pub matches: Vec<L4Match>,
    /// Weighted destinations.
    pub route: Vec<L4Destination>,
}

/// Route of TCP.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct IstioTcpRoute {
    /// Matches, of which one suffices; empty: every connection.
    #[serde(rename = "match")]
    pub matches: Vec<L4Match>,
    /// Weighted destinations.
    pub route: Vec<L4Destination>,
}

/// Match of a connection; all conditions must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct L4Match {
    /// Server names (TLS only).
    pub sni_hosts: Vec<String>,
    /// Destination addresses.
    pub destination_subnets: Vec<String>,
    /// Destination port.
    pub port: Option<u32>,
    /// Source address; Istio does not implement it either.
    pub source_subnet: String,
    /// Labels of the client workload.
    pub source_labels: Labels,
    /// Namespace of the client workload.
    pub source_namespace: Option<String>,
    /// Gateways to which the match applies.
    pub gateways: Vec<String>,
}

/// Weighted destination of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct L4Destination {
    /// Destination.
    pub destination: Destination,
    /// Weight.
    pub weight: i32,
}

impl DirectBody {
    /// Returns the content of `bytes`; `None` if it is absent or not Base64. As in protobuf's JSON form, both alphabets
    /// are read, with or without padding.
    pub fn decoded(&self) -> Option<Vec<u8>> {
        let text = self.bytes.as_deref()?.trim_end_matches('=').replace('-', "+").replace('_', "/");
        STANDARD_NO_PAD.decode(text).ok()
    }
}

impl VirtualService {
    /// Returns whether the rules apply to sidecars, not only to gateways.
    pub fn is_for_mesh(&self) -> bool {
        self.gateways.is_empty() || self.gateways.iter().any(|gateway| gateway == "mesh")
    }
}

impl Delegate {
    /// Returns the namespace and name of the delegate for a root in this namespace.
    pub fn key<'a>(&'a self, root: &'a str) -> (&'a str, &'a str) {
        let namespace = if self.namespace.is_empty() { root } else { &self.namespace };
        (namespace, &self.name)
    }
}

impl HttpMatchRequest {
    /// Returns whether the match applies to sidecars. `rule` is its VirtualService.
    pub fn is_for_mesh(&self, rule: &VirtualService) -> bool {
        if self.gateways.is_empty() {
            rule.is_for_mesh()
        } else {
            self.gateways.iter().any(|gateway| gateway == "mesh")
        }
    }
}
