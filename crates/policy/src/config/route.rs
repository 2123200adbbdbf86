//! Route tables.
//!
//! Source: `envoy.config.route.v3`. Making the index of a table is part of the translation; finding in it is
//! `route::find`.

use std::{sync::Arc, time::Duration};

use super::{
    http::Format,
    limit::RateLimit,
    policy::Policy,
    text::{HeaderMatch, TextMatch},
    trace::{Decorator, RouteTracing},
};

use skysail_http::map::Map;

use crate::state::demand::{Demand, UseMark};

/// All virtual hosts of one route configuration, indexed by domain.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    /// The name it has in RDS: `9080`.
    pub name: Arc<str>,
    /// In the order of the configuration.
    pub hosts: Vec<Arc<VirtualHost>>,
    /// `reviews.default` → index into `hosts`. In lower case; compared with the port (`a.b:80`).
    pub exact: Map<Box<str>, usize>,
    /// `*.example.com`, without the star, longest first.
    pub suffixes: Vec<(Box<str>, usize)>,
    /// `example.*`, without the star, longest first.
    pub prefixes: Vec<(Box<str>, usize)>,
    /// `*`.
    pub any: Option<usize>,
    /// A port in the authority is not looked at.
    pub ignore_port: bool,
    /// Operations for every route.
    pub headers: HeaderOps,
    /// More virtual hosts come apart from it.
    pub hosts_apart: bool,
    /// How requests ask for those; `None` where all come unasked.
    pub demand: Option<Arc<Demand>>,
    /// Wildcards and the catch-all apply also to hosts that the control plane has not answered about. Source: metadata
    /// `skysail.takes_unanswered` of the virtual host for `*`.
    pub takes_unanswered: bool,
}

impl RouteTable {
    /// Whether any route has settings for filters.
    pub fn sets_filters(&self) -> bool {
        self.hosts.iter().flat_map(|host| &host.routes).any(|route| !route.filters.is_empty())
    }

    /// Makes a domain, in lower case, lead to the host of this index; false if it led to another before.
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

/// Source: `envoy.config.route.v3.VirtualHost`.
#[derive(Debug)]
pub struct VirtualHost {
    /// `reviews.default.svc.cluster.local:9080`, `allow_any`.
    pub name: Arc<str>,
    /// First match wins.
    pub routes: Vec<Route>,
    /// Operations for its routes.
    pub headers: HeaderOps,
    /// Whether `x-envoy-attempt-count` is sent upstream.
    pub include_attempt_count: bool,
    /// Plain HTTP is redirected to HTTPS (`require_tls: ALL`).
    pub require_tls: bool,
    /// A request came for it since somebody looked; noted where hosts are asked for on demand.
    pub used: Arc<UseMark>,
}

/// Source: `envoy.config.route.v3.Route`.
#[derive(Debug)]
pub struct Route {
    /// For the access log's `%ROUTE_NAME%`.
    pub name: Arc<str>,
    /// When it applies.
    pub matches: RouteMatch,
    /// What is done.
    pub action: Action,
    /// Header operations of this route.
    pub headers: HeaderOps,
    /// What it says to filters, by their names (`typed_per_filter_config`).
    pub filters: Vec<(Box<str>, Setting)>,
    /// What its spans are called, if requests are traced.
    pub decorator: Option<Decorator>,
    /// How requests are traced, where they are, instead of as the manager says.
    pub tracing: Option<Box<RouteTracing>>,
}

/// What a route says to a filter, instead of what that does otherwise.
#[derive(Clone, Debug)]
pub enum Setting {
    /// To do nothing (`disabled`, or nothing to do).
    Off,
    /// To do what it does otherwise, though it is disabled (`FilterConfig` without `config`).
    On,
    /// To authorize so.
    Authorize(Arc<Policy>),
    /// To delay and abort so.
    Fault(Arc<Fault>),
    /// To allow these origins.
    Cors(Arc<Cors>),
    /// To let so much pass.
    Limit(Arc<RateLimit>),
    /// To require what is known by this name.
    Jwt(Box<str>),
    /// To tell this besides when it asks.
    Question {
        /// Keys and values.
        extensions: Vec<(Box<str>, Box<str>)>,
        /// Nothing of the body is told.
        without_body: bool,
    },
}

impl Route {
    /// What it says to a filter.
    pub fn setting(&self, filter: &str) -> Option<&Setting> {
        self.filters.iter().find(|(name, _)| **name == *filter).map(|(_, setting)| setting)
    }
}

/// Source: `envoy.config.route.v3.RouteMatch`.
#[derive(Debug)]
pub struct RouteMatch {
    /// The path without the query.
    pub path: PathMatch,
    /// ASCII case of the path counts.
    pub case_sensitive: bool,
    /// All must hold.
    pub headers: Vec<HeaderMatch>,
    /// All must hold.
    pub query: Vec<QueryMatch>,
    /// Only gRPC (`content-type: application/grpc`).
    pub grpc: bool,
    /// Only this share of requests, in millionths; `None` for all.
    pub fraction: Option<u32>,
}

/// A test of the path.
#[derive(Debug)]
pub enum PathMatch {
    /// Its beginning.
    Prefix(Box<[u8]>),
    /// Its beginning, ending at a `/` or at its end.
    SeparatedPrefix(Box<[u8]>),
    /// All of it.
    Exact(Box<[u8]>),
    /// All of it, by a regular expression (anchored when compiled).
    Regex(regex::bytes::Regex),
    /// CONNECT, which has none (`connect_matcher`).
    Connect,
    /// Path template, `/a/{*}/{**}`, compiled to a regular expression.
    Template(regex::bytes::Regex),
}

/// A test of one query parameter.
#[derive(Debug)]
pub struct QueryMatch {
    /// Its name.
    pub name: Box<str>,
    /// `None`: it must be there.
    pub value: Option<TextMatch>,
}

/// What a route does.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all routes lead on")]
pub enum Action {
    /// Sends the request on.
    Forward(Forward),
    /// Answers with a redirect.
    Redirect(Redirect),
    /// Answers by itself.
    Direct(DirectResponse),
}

/// Source: `envoy.config.route.v3.RouteAction`.
#[derive(Debug)]
pub struct Forward {
    /// Where to.
    pub targets: Targets,
    /// Answered 503 or 404 or 500 when the cluster does not exist.
    pub cluster_not_found: u16,
    /// From the end of the request to the end of the answer; `None` for no limit.
    pub timeout: Option<Duration>,
    /// What takes its place for gRPC (`max_grpc_timeout`, which Istio sends).
    pub grpc_timeout: Option<GrpcTimeout>,
    /// From the request's first byte to the answer's last; `None` for no limit.
    pub max_duration: Option<Duration>,
    /// What takes its place for gRPC where the client says how long it waits (`grpc_timeout_header_max`).
    pub grpc_duration: Option<GrpcTimeout>,
    /// A stream on which nothing moves is ended after; `None`: the manager's.
    pub idle_timeout: Option<Duration>,
    /// When and how often to try again.
    pub retry: Option<Arc<RetryPolicy>>,
    /// Changes of the path.
    pub rewrite: Option<Rewrite>,
    /// The new authority.
    pub host: Option<HostRewrite>,
    /// Copies sent elsewhere; their answers are thrown away.
    pub mirrors: Vec<Mirror>,
    /// Upgrades in lower case that this route allows (`true`) or forbids.
    pub upgrades: Vec<(Box<str>, bool)>,
    /// What of a request is hashed, for clusters whose balancer hashes.
    pub hash: Vec<HashPolicy>,
    /// CONNECT ends here: what follows it goes to the cluster as bytes (`connect_config`).
    pub ends_connect: bool,
}

/// Source: `envoy.config.route.v3.RouteAction.HashPolicy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashPolicy {
    /// What is hashed.
    pub key: HashKey,
    /// Those that follow count only if there is no hash yet.
    pub terminal: bool,
}

/// A part of a request to be hashed.
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

/// Source: `envoy.config.route.v3.RouteAction.HashPolicy.Cookie`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashCookie {
    /// Its name.
    pub name: Box<str>,
    /// Clients without it get one that lasts so long, with zero as long as their session; `None`: they get none.
    pub ttl: Option<Duration>,
    /// The path it is for; empty for none.
    pub path: Box<str>,
    /// Name and value, which may be empty, of further attributes.
    pub attributes: Vec<(Box<str>, Box<str>)>,
}

/// How what a gRPC client says it waits (`grpc-timeout`) is heeded.
#[derive(Clone, Copy, Debug)]
pub struct GrpcTimeout {
    /// No longer than this, also where it does not say; `None`: as long as it says.
    pub max: Option<Duration>,
    /// Shorter by this, so that the answer of this proxy comes before the client has given up.
    pub offset: Option<Duration>,
}

/// Where to.
#[derive(Debug)]
pub enum Targets {
    /// One cluster.
    Single(Arc<str>),
    /// Several by weight.
    Weighted {
        /// What the weights add up to.
        total: u32,
        /// In order.
        targets: Vec<Target>,
    },
    /// The cluster that a request header names.
    Header(Box<str>),
}

/// One of several clusters.
#[derive(Debug)]
pub struct Target {
    /// The cluster's name.
    pub cluster: Arc<str>,
    /// Its share of the total.
    pub weight: u32,
    /// Header operations for requests that go there.
    pub headers: HeaderOps,
    /// The new authority for requests that go there.
    pub host: Option<HostRewrite>,
}

/// A copy of requests.
#[derive(Debug)]
pub struct Mirror {
    /// The cluster's name.
    pub cluster: Arc<str>,
    /// Share of requests, in millionths.
    pub fraction: u32,
    /// Whether `-shadow` stays off the authority.
    pub keep_host: bool,
}

/// A new path.
#[derive(Debug)]
pub enum Rewrite {
    /// Replaces what the path match found (prefix or exact).
    Prefix(Box<str>),
    /// Replaces the whole path, keeps the query.
    Full(Box<str>),
    /// Replaces what the expression finds; `\1` stands for groups.
    Regex(regex::bytes::Regex, Box<str>),
}

/// A new authority.
#[derive(Debug)]
pub enum HostRewrite {
    /// This one.
    Literal(Box<str>),
    /// The host name of the endpoint picked.
    Auto,
    /// The value of a request header.
    Header(Box<str>),
}

/// Source: `envoy.config.route.v3.RedirectAction`.
#[derive(Debug, Default)]
pub struct Redirect {
    /// New scheme; `https_redirect` is `https`.
    pub scheme: Option<Box<str>>,
    /// New host.
    pub host: Option<Box<str>>,
    /// New port; written even where the scheme implies it.
    pub port: Option<u16>,
    /// New path.
    pub path: Option<RedirectPath>,
    /// 301, 302, 303, 307 or 308.
    pub status: u16,
    /// The query is left out.
    pub strip_query: bool,
}

/// The path of a redirect.
#[derive(Debug)]
pub enum RedirectPath {
    /// This one (may carry a query).
    Full(Box<str>),
    /// The request's, rewritten.
    Rewritten(Rewrite),
}

/// Source: `envoy.config.route.v3.DirectResponseAction`.
#[derive(Debug)]
pub struct DirectResponse {
    /// Status code.
    pub status: u16,
    /// Body; empty for none.
    pub body: Box<[u8]>,
}

/// Source: `envoy.config.route.v3.RetryPolicy`.
#[derive(Clone, Debug)]
pub struct RetryPolicy {
    /// When to try again.
    pub on: RetryOn,
    /// How often at most.
    pub retries: u32,
    /// For each try; `None`: only the route's timeout counts.
    pub per_try_timeout: Option<Duration>,
    /// Endpoints tried before are avoided (`previous_hosts`).
    pub avoid_previous: bool,
    /// How often another endpoint is looked for.
    pub host_selection_attempts: u32,
    /// Statuses that count as failed under `retriable-status-codes`.
    pub statuses: Vec<u16>,
    /// Answers of which one of these holds count as failed under `retriable-headers`.
    pub answers: Vec<HeaderMatch>,
    /// Only requests of which one of these holds are tried again; empty for all.
    pub requests: Vec<HeaderMatch>,
    /// First pause; each further one doubles, with full jitter.
    pub backoff_base: Duration,
    /// Longest pause.
    pub backoff_max: Duration,
}

impl Default for RetryPolicy {
    /// What holds where nothing is said: one more try, on nothing.
    fn default() -> Self {
        Self {
            on: RetryOn::default(),
            retries: 1,
            per_try_timeout: None,
            avoid_previous: false,
            host_selection_attempts: 0,
            statuses: Vec::new(),
            answers: Vec::new(),
            requests: Vec::new(),
            backoff_base: Duration::from_millis(25),
            backoff_max: Duration::from_millis(250),
        }
    }
}

/// The words of `retry_on`. Sources: Envoy's router filter, `x-envoy-retry-on` and `x-envoy-retry-grpc-on`.
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
    /// Adds a word; whether it is known.
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

    /// Adds a word about gRPC; whether it is known.
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

/// Additions to and removals from a request's and a response's headers.
#[derive(Clone, Debug, Default)]
pub struct HeaderOps {
    /// To the request.
    pub request: Vec<HeaderOp>,
    /// To the response.
    pub response: Vec<HeaderOp>,
}

/// One change of headers.
#[derive(Clone, Debug)]
pub enum HeaderOp {
    /// Takes all of this name away (lower case).
    Remove(Box<str>),
    /// Puts one there.
    Add {
        /// Lower case.
        name: Box<str>,
        /// Made of what was there before any was added.
        value: Format,
        /// What becomes of those that are there already.
        action: AppendAction,
        /// Whether it is added though it is empty.
        keep_empty: bool,
    },
}

/// Source: `envoy.config.core.v3.HeaderValueOption.HeaderAppendAction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendAction {
    /// One more.
    Append,
    /// If none is there.
    AddIfAbsent,
    /// Instead of those there.
    Overwrite,
    /// Instead of those there, if there are any.
    OverwriteIfExists,
}

/// Source: `envoy.extensions.filters.http.fault.v3.HTTPFault`.
#[derive(Debug, Default)]
pub struct Fault {
    /// Share of requests in millionths, and the delay.
    pub delay: Option<(u32, Duration)>,
    /// Share of requests in millionths, and the answer.
    pub abort: Option<(u32, Abort)>,
    /// All must hold for the fault to act.
    pub headers: Vec<HeaderMatch>,
}

/// How a fault answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// An HTTP status.
    Http(u16),
    /// A gRPC status.
    Grpc(u32),
}

/// Source: `envoy.extensions.filters.http.cors.v3.CorsPolicy`.
#[derive(Debug, Default)]
pub struct Cors {
    /// Origins allowed.
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
    /// Preflights that match no origin go on to the upstream.
    pub forward_unmatched: bool,
}
