//! VirtualService: how requests for a host are routed. Fields are Istio's (`networking.istio.io`).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{
    Labels,
    value::{Duration, Percent, PortSelector, StringMatch},
};

/// `spec` of a VirtualService.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VirtualService {
    /// The hosts it is about; short names are meant in its own namespace.
    pub hosts: Vec<String>,
    /// Gateways it holds for; none means `mesh`, the sidecars.
    pub gateways: Vec<String>,
    /// Routes for HTTP, the first match wins.
    pub http: Vec<HttpRoute>,
    /// Routes for TLS that is passed through.
    pub tls: Vec<TlsRoute>,
    /// Routes for TCP.
    pub tcp: Vec<TcpRoute>,
    /// The namespaces that see it; none means all.
    pub export_to: Vec<String>,
}

/// One HTTP rule.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRoute {
    /// For people and metrics.
    pub name: String,
    /// Any of these must hold; none means every request.
    #[serde(rename = "match")]
    pub matches: Vec<HttpMatch>,
    /// Where the request goes, by weight.
    pub route: Vec<HttpDestination>,
    /// Answers with a redirect instead.
    pub redirect: Option<HttpRedirect>,
    /// Answers at once instead.
    pub direct_response: Option<DirectResponse>,
    /// Goes on in another VirtualService.
    pub delegate: Option<Delegate>,
    /// Changes path or authority.
    pub rewrite: Option<HttpRewrite>,
    /// How long the whole answer may take; zero or unset: for ever.
    pub timeout: Option<Duration>,
    /// When to try again; unset means the mesh's default.
    pub retries: Option<HttpRetry>,
    /// Delays and aborts for tests.
    pub fault: Option<HttpFault>,
    /// A copy of each request goes here.
    pub mirror: Option<Destination>,
    /// Old form of `mirrorPercentage`.
    pub mirror_percent: Option<u32>,
    /// How much of the traffic is mirrored.
    pub mirror_percentage: Option<Percent>,
    /// Copies to several places.
    pub mirrors: Vec<HttpMirror>,
    /// Cross-origin rules.
    pub cors_policy: Option<CorsPolicy>,
    /// Header changes.
    pub headers: Option<Headers>,
}

/// What a request must be like; all that is given must hold.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpMatch {
    /// For people.
    pub name: String,
    /// The path, without the query.
    pub uri: Option<StringMatch>,
    /// `http` or `https`.
    pub scheme: Option<StringMatch>,
    /// The method.
    pub method: Option<StringMatch>,
    /// The host asked for.
    pub authority: Option<StringMatch>,
    /// Headers by lower-case name.
    pub headers: BTreeMap<String, StringMatch>,
    /// Headers that must not match.
    pub without_headers: BTreeMap<String, StringMatch>,
    /// Query parameters.
    pub query_params: BTreeMap<String, StringMatch>,
    /// The port asked for.
    pub port: Option<u32>,
    /// Labels of the workload that asks.
    pub source_labels: Labels,
    /// Its namespace.
    pub source_namespace: Option<String>,
    /// Gateways this match holds for; overrides the VirtualService's.
    pub gateways: Vec<String>,
    /// `uri` is compared without regard to case.
    pub ignore_uri_case: bool,
    /// A prefix for statistics.
    pub stat_prefix: String,
}

/// Where a request may go.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct HttpDestination {
    /// Service, subset, port.
    pub destination: Destination,
    /// Its share, 0 if unset; shares need not add up to 100. A single destination takes all.
    pub weight: Option<i32>,
    /// Header changes for this destination.
    pub headers: Option<Headers>,
}

/// A service, one of its subsets, one of its ports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Destination {
    /// The service; short names are meant in the VirtualService's namespace.
    pub host: String,
    /// A subset that a DestinationRule defines; empty for the whole service.
    pub subset: String,
    /// The port; unset if the service has just one.
    pub port: Option<PortSelector>,
}

/// Answers with `Location`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRedirect {
    /// Replaces the path.
    pub uri: String,
    /// Replaces the matched prefix.
    pub prefix_rewrite: String,
    /// Replaces the host.
    pub authority: String,
    /// Replaces the port.
    pub port: Option<u32>,
    /// `FROM_PROTOCOL_DEFAULT` or `FROM_REQUEST_PORT`.
    pub derive_port: Option<RedirectPort>,
    /// Replaces the scheme.
    pub scheme: String,
    /// 301 if unset.
    pub redirect_code: u32,
}

/// Which port a redirect names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum RedirectPort {
    /// 80 or 443.
    FromProtocolDefault,
    /// The one asked for.
    FromRequestPort,
}

/// An answer given by the sidecar itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DirectResponse {
    /// The status code.
    pub status: u32,
    /// The body.
    pub body: Option<DirectBody>,
}

/// The body of a direct response, one of the two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DirectBody {
    /// Text.
    pub string: Option<String>,
    /// Base64.
    pub bytes: Option<String>,
}

/// Another VirtualService that goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Delegate {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
}

/// Changes the request's path and authority.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRewrite {
    /// Replaces the path, or what a prefix match matched of it.
    pub uri: String,
    /// Replaces the authority.
    pub authority: String,
    /// Replaces by expression.
    pub uri_regex_rewrite: Option<RegexRewrite>,
}

/// Replaces by an RE2 expression with groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RegexRewrite {
    /// What is looked for.
    #[serde(rename = "match")]
    pub pattern: String,
    /// What it becomes; `\1` is the first group.
    pub rewrite: String,
}

/// When and how often to try again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpRetry {
    /// Tries after the first; 0 turns retries off.
    pub attempts: i32,
    /// How long one try may take; unset means the route's timeout.
    pub per_try_timeout: Option<Duration>,
    /// Envoy's conditions and HTTP status codes, by commas; empty means the default.
    pub retry_on: String,
    /// Other localities may be tried.
    pub retry_remote_localities: Option<bool>,
    /// A host that failed may be tried again.
    pub retry_ignore_previous_hosts: Option<bool>,
    /// The shortest wait between tries; 25 ms if unset.
    pub backoff: Option<Duration>,
}

/// Faults made on purpose.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct HttpFault {
    /// Waits before the request goes on.
    pub delay: Option<FaultDelay>,
    /// Answers with an error.
    pub abort: Option<FaultAbort>,
}

/// A wait.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FaultDelay {
    /// How long.
    pub fixed_delay: Option<Duration>,
    /// Never done by Istio either.
    pub exponential_delay: Option<Duration>,
    /// How many; unset means none unless `percent` is given.
    pub percentage: Option<Percent>,
    /// Old form of `percentage`.
    pub percent: i32,
}

/// An error answer.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FaultAbort {
    /// An HTTP status code.
    pub http_status: Option<u32>,
    /// A gRPC status name, `UNAVAILABLE`.
    pub grpc_status: Option<String>,
    /// An HTTP/2 error; never done by Istio either.
    pub http2_error: Option<String>,
    /// How many; unset means all.
    pub percentage: Option<Percent>,
}

/// A copy of the requests.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct HttpMirror {
    /// Where to.
    pub destination: Destination,
    /// How many; unset means all.
    pub percentage: Option<Percent>,
}

/// Cross-origin rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CorsPolicy {
    /// Old form of `allowOrigins`.
    pub allow_origin: Vec<String>,
    /// Origins that may ask.
    pub allow_origins: Vec<StringMatch>,
    /// Methods allowed.
    pub allow_methods: Vec<String>,
    /// Request headers allowed.
    pub allow_headers: Vec<String>,
    /// Response headers shown.
    pub expose_headers: Vec<String>,
    /// How long a preflight holds.
    pub max_age: Option<Duration>,
    /// Cookies may be sent.
    pub allow_credentials: Option<bool>,
    /// `FORWARD` or `IGNORE`.
    pub unmatched_preflights: Option<String>,
}

/// Header changes on both ways.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Headers {
    /// Before the request goes on.
    pub request: HeaderOps,
    /// Before the answer goes back.
    pub response: HeaderOps,
}

/// Header changes on one way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct HeaderOps {
    /// Replaces.
    pub set: BTreeMap<String, String>,
    /// Adds.
    pub add: BTreeMap<String, String>,
    /// Removes.
    pub remove: Vec<String>,
}

/// One rule for TLS passed through.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TlsRoute {
    /// Any of these must hold.
    #[serde(rename = "match")]
    pub matches: Vec<L4Match>,
    /// Where the connection goes.
    pub route: Vec<L4Destination>,
}

/// One rule for TCP.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TcpRoute {
    /// Any of these must hold; none means every connection.
    #[serde(rename = "match")]
    pub matches: Vec<L4Match>,
    /// Where the connection goes.
    pub route: Vec<L4Destination>,
}

/// What a connection must be like.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct L4Match {
    /// Server names (TLS only).
    pub sni_hosts: Vec<String>,
    /// Addresses it goes to.
    pub destination_subnets: Vec<String>,
    /// The port it goes to.
    pub port: Option<u32>,
    /// The address it comes from (never done by Istio either).
    pub source_subnet: String,
    /// Labels of the workload it comes from.
    pub source_labels: Labels,
    /// Its namespace.
    pub source_namespace: Option<String>,
    /// Gateways this match holds for.
    pub gateways: Vec<String>,
}

/// Where a connection may go.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct L4Destination {
    /// Service, subset, port.
    pub destination: Destination,
    /// Its share.
    pub weight: i32,
}

impl VirtualService {
    /// True if sidecars follow it, not gateways alone.
    pub fn is_for_mesh(&self) -> bool {
        self.gateways.is_empty() || self.gateways.iter().any(|gateway| gateway == "mesh")
    }
}

impl HttpMatch {
    /// True if sidecars follow this match; `rule` is the VirtualService it is in.
    pub fn is_for_mesh(&self, rule: &VirtualService) -> bool {
        if self.gateways.is_empty() {
            rule.is_for_mesh()
        } else {
            self.gateways.iter().any(|gateway| gateway == "mesh")
        }
    }
}
