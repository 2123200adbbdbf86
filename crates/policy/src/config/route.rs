//! Route tables.
//!
//! Source: `envoy.config.route.v3`. The translation builds the index of a table; `route::find` uses it.

use std::{sync::Arc, time::Duration};

use super::{
    http::Format,
    limit::{LimitRule, RateLimit, RouteRateLimit, RouteRules},
    lua::LuaRoute,
    mutation::HeaderMutations,
    policy::Policy,
    processing::ProcessingOverride,
    text::{HeaderMatch, MetadataMatch, TextMatch},
    trace::{Decorator, RouteTracing},
};

use skysail_http::map::Map;

use crate::state::demand::{Demand, UseMark};

/// A route configuration: virtual hosts, indexed by domain.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    /// Name in RDS, such as `9080`.
    pub name: Arc<str>,
    /// Virtual hosts in the order of the configuration.
    pub hosts: Vec<Arc<VirtualHost>>,
    /// Exact domains, such as `reviews.default`, with the index into `hosts`. Lower case; a domain may have a port
    /// (`a.b:80`).
    pub exact: Map<Box<str>, usize>,
    /// Suffix domains such as `*.example.com`, without the star; longest first.
    pub suffixes: Vec<(Box<str>, usize)>,
    /// Prefix domains such as `example.*`, without the star; longest first.
    pub prefixes: Vec<(Box<str>, usize)>,
    /// Virtual host of the domain `*`.
    pub any: Option<usize>,
    /// The port in the authority is ignored.
    pub ignore_port: bool,
    /// Header operations for every route.
    pub headers: HeaderOps,
    /// The table is refused if it names a cluster that does not exist (`validate_clusters`).
    pub checks_clusters: bool,
    /// Further virtual hosts arrive in resources of their own (VHDS).
    pub has_vhds: bool,
    /// On-demand discovery of virtual hosts; `None` if they arrive without a request.
    pub demand: Option<Arc<Demand>>,
    /// Wildcards and the catch-all also apply to an authority for which the control plane has not answered in time.
    /// Source: metadata `skysail.takes_unanswered` of the virtual host for `*`.
    pub takes_unanswered: bool,
}

impl RouteTable {
    /// Returns whether any route has settings for filters.
    pub fn sets_filters(&self) -> bool {
        self.hosts.iter().flat_map(|host| &host.routes).any(|route| !route.filters.is_empty())
    }

    /// Maps a domain in lower case to a virtual host; returns false if the domain already had one.
    pub fn put(&mut self, domain: &str, index: usize) -> bool {
        let (list, rest) = match (domain.strip_prefix('*'), domain.strip_suffix('*')) {
            (Some(""), _) => return self.any.replace(index).is_none(),
            (Some(rest), _) => (&mut self.suffixes, rest),
            (None, Some(rest)) => (&mut self.prefixes, rest),
            (None, None) => return self.exact.insert(domain.into(), index).is_none(),
        };
        let known = list.iter_mut().find(|(other, _)| **other == *rest);
        let is_new = known.is_none();
        match known {
            Some((_, known)) => *known = index,
            None => {
                let longer = list.partition_point(|(other, _)| other.len() >= rest.len());
                list.insert(longer, (rest.into(), index));
            }
        }
        is_new
    }
}

/// A virtual host. Source: `envoy.config.route.v3.VirtualHost`.
#[derive(Debug)]
pub struct VirtualHost {
    /// Name, such as `reviews.default.svc.cluster.local:9080` or `allow_any`.
    pub name: Arc<str>,
    /// Routes; the first match wins.
    pub routes: Vec<Route>,
    /// Header operations for all routes of the host.
    pub headers: HeaderOps,
    /// `x-envoy-attempt-count` is added to upstream requests.
    pub include_attempt_count: bool,
    /// Plain HTTP is redirected to HTTPS (`require_tls: ALL`).
    pub require_tls: bool,
    /// Rules for rate limit descriptors.
    pub limits: Vec<LimitRule>,
    /// Use by requests, for on-demand discovery: an unused host is dropped.
    pub used: Arc<UseMark>,
}

/// A route. Source: `envoy.config.route.v3.Route`.
#[derive(Debug)]
pub struct Route {
    /// Name, for the access log's `%ROUTE_NAME%`.
    pub name: Arc<str>,
    /// Match of requests.
    pub matches: RouteMatch,
    /// Action for matching requests.
    pub action: Action,
    /// Header operations of this route.
    pub headers: HeaderOps,
    /// Settings for filters, by filter name (`typed_per_filter_config`).
    pub filters: Vec<(Box<str>, Setting)>,
    /// Metadata by filter name, for Lua scripts; `None` if there is none besides Istio's.
    pub metadata: Option<Box<serde_json::Map<String, serde_json::Value>>>,
    /// Span name for traced requests.
    pub decorator: Option<Decorator>,
    /// Tracing settings; `None`: those of the connection manager.
    pub tracing: Option<Box<RouteTracing>>,
    /// Name under which the route's responses are counted; `None`: they are not.
    pub stat_prefix: Option<Arc<str>>,
}

/// A route's setting for a filter. It replaces or extends the filter's own settings.
#[derive(Clone, Debug)]
pub enum Setting {
    /// The filter is disabled, or has nothing to do.
    Off,
    /// The filter is enabled with its own settings, even if it is disabled elsewhere (`FilterConfig` without
    /// `config`).
    On,
    /// RBAC policy.
    Rbac(Arc<Policy>),
    /// Fault to inject.
    Fault(Arc<Fault>),
    /// CORS policy.
    Cors(Arc<Cors>),
    /// Local rate limit.
    RateLimit(Arc<RateLimit>),
    /// Rate limit by a service.
    GlobalRateLimit(Arc<RouteRateLimit>),
    /// Mutations of the table, the virtual host and the route. They apply in this order or the reverse order; see
    /// [`HeaderMutation`](super::mutation::HeaderMutation).
    HeaderMutation(Vec<Arc<HeaderMutations>>),
    /// Maximum size of a buffered body in bytes.
    Buffer(usize),
    /// Name of a JWT requirement.
    Jwt(Box<str>),
    /// Additions to an external authorization check.
    ExternalAuthorization {
        /// Context extensions: keys and values.
        extensions: Vec<(Box<str>, Box<str>)>,
        /// The check leaves out the body.
        without_body: bool,
    },
    /// Settings for external processing.
    Processing(Arc<ProcessingOverride>),
    /// Script of a Lua filter.
    Lua(Arc<LuaRoute>),
}

impl Route {
    /// Returns the setting for a filter.
    pub fn setting(&self, filter: &str) -> Option<&Setting> {
        self.filters.iter().find(|(name, _)| **name == *filter).map(|(_, setting)| setting)
    }
}

/// Match of a request. Source: `envoy.config.route.v3.RouteMatch`.
#[derive(Debug)]
pub struct RouteMatch {
    /// Match of the path without the query.
    pub path: PathMatch,
    /// The match of the path is case-sensitive (ASCII).
    pub case_sensitive: bool,
    /// Header matches, all of which must hold.
    pub headers: Vec<HeaderMatch>,
    /// Query parameter matches, all of which must hold.
    pub query: Vec<QueryMatch>,
    /// Matches of dynamic metadata, all of which must hold. Filters that set metadata may let the route be selected
    /// again.
    pub metadata: Box<[MetadataMatch]>,
    /// Only gRPC requests match (`content-type: application/grpc`).
    pub grpc: bool,
    /// Share of requests that match, in millionths; `None` for all.
    pub fraction: Option<u32>,
}

/// Match of a path.
#[derive(Debug)]
pub enum PathMatch {
    /// A prefix.
    Prefix(Box<[u8]>),
    /// A prefix that ends at a `/` or at the end of the path.
    SeparatedPrefix(Box<[u8]>),
    /// The whole path.
    Exact(Box<[u8]>),
    /// A regular expression for the whole path, anchored when compiled.
    Regex(regex::bytes::Regex),
    /// A CONNECT request, which has no path (`connect_matcher`).
    Connect,
    /// A path template such as `/a/{*}/{**}`, compiled to a regular expression.
    Template(regex::bytes::Regex),
}

/// Match of a query parameter.
#[derive(Debug)]
pub struct QueryMatch {
    /// Name.
    pub name: Box<str>,
    /// Match of the value; `None`: the parameter must be present.
    pub value: Option<TextMatch>,
}

/// Action of a route.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all routes forward")]
pub enum Action {
    /// Forwards the request to a cluster.
    Forward(Forward),
    /// Responds with a redirect.
    Redirect(Redirect),
    /// Responds directly.
    Direct(DirectResponse),
}

/// Forwarding action. Source: `envoy.config.route.v3.RouteAction`.
#[derive(Debug)]
pub struct Forward {
    /// Clusters.
    pub targets: Targets,
    /// Status of the response if the cluster does not exist: 404, 500 or 503.
    pub cluster_not_found: u16,
    /// Timeout from the end of the request to the end of the response; `None` disables it.
    pub timeout: Option<Duration>,
    /// Replaces `timeout` for gRPC (`max_grpc_timeout`, which Istio sends).
    pub grpc_timeout: Option<GrpcTimeout>,
    /// Timeout from the first byte of the request to the last byte of the response; zero disables it. `None`: that of
    /// the connection manager.
    pub max_duration: Option<Duration>,
    /// Replaces `max_duration` for gRPC requests with `grpc-timeout` (`grpc_timeout_header_max`).
    pub grpc_duration: Option<GrpcTimeout>,
    /// Idle timeout of a stream; `None`: that of the connection manager.
    pub idle_timeout: Option<Duration>,
    /// Retry policy.
    pub retry: Option<Arc<RetryPolicy>>,
    /// Path rewrite.
    pub rewrite: Option<Rewrite>,
    /// Host rewrite.
    pub host: Option<HostRewrite>,
    /// A host rewrite appends the original host to `x-forwarded-host`.
    pub append_forwarded_host: bool,
    /// Clusters that receive a copy of the request. Their responses are discarded.
    pub mirrors: Vec<Mirror>,
    /// Upgrades (lower case) that this route allows (`true`) or forbids.
    pub upgrades: Vec<(Box<str>, bool)>,
    /// Hash policies, for clusters with a hashing balancer.
    pub hash: Vec<HashPolicy>,
    /// The proxy terminates CONNECT and forwards the payload as bytes (`connect_config`).
    pub terminates_connect: bool,
    /// Rules for rate limit descriptors; `None` without any.
    pub limits: Option<Box<RouteRules>>,
}

/// A hash policy. Source: `envoy.config.route.v3.RouteAction.HashPolicy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashPolicy {
    /// Part of the request.
    pub key: HashKey,
    /// Later policies are used only if there is no hash yet.
    pub terminal: bool,
}

/// A part of a request to hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HashKey {
    /// All values of a header.
    Header(Box<str>),
    /// The value of a cookie.
    Cookie(Box<HashCookie>),
    /// The first value of a query parameter.
    Query(Box<str>),
    /// The client's address.
    SourceIp,
}

/// A cookie to hash. Source: `envoy.config.route.v3.RouteAction.HashPolicy.Cookie`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashCookie {
    /// Name.
    pub name: Box<str>,
    /// Lifetime of a new cookie for clients without one. Zero is a session cookie; `None`: no cookie is set.
    pub ttl: Option<Duration>,
    /// `Path` attribute; empty for none.
    pub path: Box<str>,
    /// Further attributes with their values, which may be empty.
    pub attributes: Vec<(Box<str>, Box<str>)>,
}

/// Limits on the timeout that a gRPC client requests (`grpc-timeout`).
#[derive(Clone, Copy, Debug)]
pub struct GrpcTimeout {
    /// Maximum timeout, also without the header; `None`: the value of the header.
    pub max: Option<Duration>,
    /// Subtracted from the timeout, so that the client receives this proxy's response before it gives up.
    pub offset: Option<Duration>,
}

/// Clusters of a route.
#[derive(Debug)]
pub enum Targets {
    /// One cluster.
    Single(Arc<str>),
    /// Several clusters by weight.
    Weighted {
        /// Sum of the weights.
        total: u32,
        /// The clusters, in the order of the configuration.
        targets: Vec<Target>,
    },
    /// The cluster named by a request header.
    Header(Box<str>),
}

/// One of several weighted clusters.
#[derive(Debug)]
pub struct Target {
    /// Name of the cluster.
    pub cluster: Arc<str>,
    /// Weight, relative to the total.
    pub weight: u32,
    /// Header operations for requests to this cluster.
    pub headers: HeaderOps,
    /// Host rewrite for requests to this cluster.
    pub host: Option<HostRewrite>,
}

/// Request mirroring. Source: `envoy.config.route.v3.RouteAction.RequestMirrorPolicy`.
#[derive(Debug)]
pub struct Mirror {
    /// Name of the cluster.
    pub cluster: Arc<str>,
    /// Share of requests that are mirrored, in millionths.
    pub fraction: u32,
    /// The authority of the copy has no suffix `-shadow`.
    pub keep_host: bool,
}

/// Path rewrite.
#[derive(Debug)]
pub enum Rewrite {
    /// Replaces the matched prefix, or the whole path of an exact match.
    Prefix(Box<str>),
    /// Replaces the whole path and keeps the query.
    Full(Box<str>),
    /// Replaces each match of the expression; `\1` refers to a group.
    Regex(regex::bytes::Regex, Box<str>),
}

/// Host rewrite.
#[derive(Debug)]
pub enum HostRewrite {
    /// A constant.
    Literal(Box<str>),
    /// The host name of the selected endpoint.
    Auto,
    /// The value of a request header.
    Header(Box<str>),
}

/// A redirect. Source: `envoy.config.route.v3.RedirectAction`.
#[derive(Debug, Default)]
pub struct Redirect {
    /// New scheme (`https_redirect` is `https`).
    pub scheme: Option<Box<str>>,
    /// New host.
    pub host: Option<Box<str>>,
    /// New port. It is written even if it is the default of the scheme.
    pub port: Option<u16>,
    /// New path.
    pub path: Option<RedirectPath>,
    /// Status: 301, 302, 303, 307 or 308.
    pub status: u16,
    /// The query is removed.
    pub strip_query: bool,
}

/// Path of a redirect.
#[derive(Debug)]
pub enum RedirectPath {
    /// A constant, which may contain a query.
    Full(Box<str>),
    /// The path of the request, rewritten.
    Rewritten(Rewrite),
}

/// A direct response. Source: `envoy.config.route.v3.DirectResponseAction`.
#[derive(Debug)]
pub struct DirectResponse {
    /// Status code.
    pub status: u16,
    /// Body; empty for none.
    pub body: Box<[u8]>,
}

/// Retry policy. Source: `envoy.config.route.v3.RetryPolicy`.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    /// Conditions of a retry.
    pub on: RetryOn,
    /// Maximum number of retries.
    pub retries: u32,
    /// Timeout of each attempt; `None`: only the route's timeout applies.
    pub per_try_timeout: Option<Duration>,
    /// Retries avoid the endpoints of earlier attempts (`previous_hosts`).
    pub avoid_previous: bool,
    /// Number of further selections when an endpoint is to be avoided (`host_selection_retry_max_attempts`).
    pub host_selection_attempts: u32,
    /// Number of attempts after which retries avoid their priorities (`previous_priorities`); 0: they do not.
    pub priority_frequency: u32,
    /// Statuses that are retried with `retriable-status-codes`.
    pub statuses: Vec<u16>,
    /// Matches of response headers, one of which must hold, for `retriable-headers`.
    pub answers: Vec<HeaderMatch>,
    /// Matches of request headers, one of which must hold for a retry; empty for all requests.
    pub requests: Vec<HeaderMatch>,
    /// First backoff interval. Each further one doubles, with full jitter.
    pub backoff_base: Duration,
    /// Maximum backoff interval.
    pub backoff_max: Duration,
}

impl Default for RetryPolicy {
    /// Returns the defaults: one retry, but no condition for it.
    fn default() -> Self {
        Self {
            on: RetryOn::default(),
            retries: 1,
            per_try_timeout: None,
            avoid_previous: false,
            host_selection_attempts: 0,
            priority_frequency: 0,
            statuses: Vec::new(),
            answers: Vec::new(),
            requests: Vec::new(),
            backoff_base: Duration::from_millis(25),
            backoff_max: Duration::from_millis(250),
        }
    }
}

/// Conditions of `retry_on`. Sources: Envoy's router filter, `x-envoy-retry-on` and `x-envoy-retry-grpc-on`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the word of the configuration")]
#[expect(clippy::struct_excessive_bools, reason = "a set of independent words")]
pub struct RetryOn {
    pub server_error: bool,
    pub gateway_error: bool,
    pub reset: bool,
    pub reset_before_request: bool,
    pub connect_failure: bool,
    pub retriable_4xx: bool,
    pub refused_stream: bool,
    pub retriable_status_codes: bool,
    pub retriable_headers: bool,
    pub envoy_ratelimited: bool,
    pub grpc_cancelled: bool,
    pub grpc_deadline_exceeded: bool,
    pub grpc_internal: bool,
    pub grpc_resource_exhausted: bool,
    pub grpc_unavailable: bool,
}

impl RetryOn {
    /// Adds a condition; returns whether its name is known.
    pub fn set(&mut self, word: &str) -> bool {
        let flag = match word {
            "5xx" => &mut self.server_error,
            "gateway-error" => &mut self.gateway_error,
            "reset" => &mut self.reset,
            "reset-before-request" => &mut self.reset_before_request,
            "connect-failure" => &mut self.connect_failure,
            "retriable-4xx" => &mut self.retriable_4xx,
            "refused-stream" => &mut self.refused_stream,
            "retriable-status-codes" => &mut self.retriable_status_codes,
            "retriable-headers" => &mut self.retriable_headers,
            "envoy-ratelimited" => &mut self.envoy_ratelimited,
            _ => return false,
        };
        *flag = true;
        true
    }

    /// Adds a gRPC condition; returns whether its name is known.
    pub fn set_grpc(&mut self, word: &str) -> bool {
        let flag = match word {
            "cancelled" => &mut self.grpc_cancelled,
            "deadline-exceeded" => &mut self.grpc_deadline_exceeded,
            "internal" => &mut self.grpc_internal,
            "resource-exhausted" => &mut self.grpc_resource_exhausted,
            "unavailable" => &mut self.grpc_unavailable,
            _ => return false,
        };
        *flag = true;
        true
    }
}

/// Header operations on requests and responses.
#[derive(Clone, Debug, Default)]
pub struct HeaderOps {
    /// Operations on the request.
    pub request: Vec<HeaderOp>,
    /// Operations on the response.
    pub response: Vec<HeaderOp>,
}

/// A header operation.
#[derive(Clone, Debug)]
pub enum HeaderOp {
    /// Removes all headers of this name (lower case).
    Remove(Box<str>),
    /// Adds a header.
    Add {
        /// Name in lower case.
        name: Box<str>,
        /// Value. Its operators read the headers after all removals and before the first addition.
        value: Format,
        /// Treatment of existing headers of this name.
        action: AppendAction,
        /// The header is added even if its value is empty.
        keep_empty: bool,
    },
}

/// Treatment of existing headers. Source: `envoy.config.core.v3.HeaderValueOption.HeaderAppendAction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendAction {
    /// Adds the header to the existing ones.
    Append,
    /// Adds the header if there is none.
    AddIfAbsent,
    /// Replaces the existing headers, or adds the header.
    Overwrite,
    /// Replaces the existing headers; does nothing if there are none.
    OverwriteIfExists,
}

/// A fault. Source: `envoy.extensions.filters.http.fault.v3.HTTPFault`.
#[derive(Debug, Default)]
pub struct Fault {
    /// Delay, with the share of requests in millionths.
    pub delay: Option<(u32, Duration)>,
    /// Abort, with the share of requests in millionths.
    pub abort: Option<(u32, Abort)>,
    /// Header matches, all of which must hold.
    pub headers: Vec<HeaderMatch>,
}

/// Response of an aborted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// An HTTP status.
    Http(u16),
    /// A gRPC status.
    Grpc(u32),
}

/// A CORS policy. Source: `envoy.extensions.filters.http.cors.v3.CorsPolicy`.
#[derive(Debug, Default)]
pub struct Cors {
    /// Allowed origins.
    pub origins: Vec<TextMatch>,
    /// `access-control-allow-methods`.
    pub methods: Option<Box<str>>,
    /// `access-control-allow-headers`.
    pub headers: Option<Box<str>>,
    /// `access-control-expose-headers`.
    pub expose: Option<Box<str>>,
    /// `access-control-max-age`.
    pub max_age: Option<Box<str>>,
    /// `access-control-allow-credentials: true`.
    pub credentials: bool,
    /// Preflights whose origin is not allowed are forwarded to the upstream.
    pub forward_unmatched: bool,
}
