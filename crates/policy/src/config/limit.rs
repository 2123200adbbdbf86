//! Rate limits: local ones, and the descriptors of a request that local and global ones use.
//!
//! Sources: `envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit`, `envoy.config.route.v3.RateLimit`.

use std::{sync::Arc, time::Duration};

use super::{
    http::Format,
    route::{HeaderOp, QueryMatch},
    text::HeaderMatch,
};
use crate::state::rate_limit::{Buckets, BucketsSettings};

/// A local rate limit.
#[derive(Debug)]
pub struct RateLimit {
    /// Prefix of its metrics.
    pub stat_prefix: Arc<str>,
    /// Token buckets, shared by all workers; `None` if each connection has its own.
    pub buckets: Option<Buckets>,
    /// Settings of the buckets.
    pub settings: BucketsSettings,
    /// Rules that make the descriptors of a request; `None`: those of the route and its virtual host.
    pub rules: Option<Vec<LimitRule>>,
    /// Stage of the route's rules that apply.
    pub stage: u32,
    /// Use of the virtual host's rules.
    pub host_rules: HostRules,
    /// The default bucket gives a token for every request, also if a descriptor matches.
    pub always_take_default: bool,
    /// Status of the response to a refused request.
    pub status: u16,
    /// Share of requests, in millionths, that take a token.
    pub enabled: u32,
    /// Share of requests without a token, in millionths, that are refused.
    pub enforced: u32,
    /// The response to a refused gRPC request has the status `RESOURCE_EXHAUSTED` instead of `UNAVAILABLE`.
    pub resource_exhausted: bool,
    /// Responses have the headers `x-ratelimit-limit`, `x-ratelimit-remaining` and `x-ratelimit-reset`.
    pub report: bool,
    /// A refusal with status 429 has the header `retry-after`.
    pub retry_after: bool,
    /// Header operations for the response to a refused request.
    pub answer: Vec<HeaderOp>,
    /// Header operations for a request without a token that is not refused, because `enforced` excludes it.
    pub unenforced: Vec<HeaderOp>,
}

/// Use of a virtual host's rules. Source: `envoy.extensions.common.ratelimit.v3.VhRateLimitsOptions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostRules {
    /// Used if the route has no rules.
    #[default]
    Override,
    /// Used in addition to those of the route.
    Include,
    /// Not used.
    Ignore,
}

/// A rule that makes one descriptor of a request. Source: `envoy.config.route.v3.RateLimit`.
#[derive(Debug)]
pub struct LimitRule {
    /// The rule applies to filters of this stage.
    pub stage: u32,
    /// Actions in order. Each adds at most one entry, and may drop the descriptor.
    pub actions: Vec<LimitAction>,
    /// Number of tokens that a request takes; `None` for one.
    pub hits: Option<Hits>,
    /// Path of the dynamic metadata with a limit that replaces the rate limit service's.
    pub limit: Option<Vec<Box<str>>>,
    /// Whether responses have `x-ratelimit` headers; `None`: the filter decides.
    pub report: Option<bool>,
}

/// Number of tokens that a request takes.
#[derive(Debug)]
pub enum Hits {
    /// A constant.
    Number(u64),
    /// A format string. A descriptor whose number cannot be read is dropped.
    Format(Format),
}

/// An action of a [`LimitRule`]. Source: `envoy.config.route.v3.RateLimit.Action`.
#[derive(Debug)]
pub enum LimitAction {
    /// `source_cluster`: the cluster of this sidecar's node.
    SourceCluster,
    /// `destination_cluster`: the cluster of the route.
    DestinationCluster,
    /// `remote_address`: the client's address.
    RemoteAddress,
    /// `masked_remote_address`: the client's address with these prefix lengths.
    MaskedRemoteAddress {
        /// Prefix length for IPv4.
        v4: u8,
        /// Prefix length for IPv6.
        v6: u8,
    },
    /// A constant entry.
    Constant {
        /// Key of the entry.
        key: Box<str>,
        /// Value of the entry.
        value: Box<str>,
    },
    /// A value of the request.
    Value {
        /// Key of the entry.
        key: Box<str>,
        /// Source of the value.
        from: ValueSource,
        /// A request without the value keeps the descriptor without this entry. Otherwise the descriptor is dropped.
        skip_if_absent: bool,
    },
    /// A constant entry for requests that match.
    Match {
        /// Key of the entry.
        key: Box<str>,
        /// Value of the entry.
        value: Box<str>,
        /// The entry is added to requests that match (`true`), or to the others.
        expected: bool,
        /// Header matches, all of which must hold.
        headers: Vec<HeaderMatch>,
        /// Query parameter matches, all of which must hold.
        query: Vec<QueryMatch>,
    },
}

/// Source of an entry's value.
#[derive(Debug)]
pub enum ValueSource {
    /// A header, by its name in lower case.
    Header(Box<str>),
    /// The first query parameter of this name.
    Query(Box<str>),
    /// Dynamic metadata: the path of a string and the value that replaces an absent or empty one.
    Metadata(Vec<Box<str>>, Box<str>),
}

/// The rules of a route and of its virtual host.
#[derive(Debug, Default)]
pub struct RouteRules {
    /// Rules.
    pub rules: Vec<LimitRule>,
    /// The rules of the virtual host apply too (`include_vh_rate_limits`).
    pub include_host: bool,
}

impl RateLimit {
    /// Returns whether the limit has no bucket at all.
    pub fn is_unlimited(&self) -> bool {
        self.settings.default.is_none() && self.settings.descriptors.is_empty()
    }

    /// Returns buckets for one connection.
    pub fn connection_buckets(&self) -> Arc<Buckets> {
        Arc::new(Buckets::new(&self.settings))
    }
}

/// A rate limit service and the requests that it decides about. Source:
/// `envoy.extensions.filters.http.ratelimit.v3.RateLimit`.
#[derive(Debug)]
pub struct GlobalRateLimit {
    /// Domain of the descriptors.
    pub domain: Box<str>,
    /// Stage of the route's rules that apply.
    pub stage: u32,
    /// Rules that make the descriptors of a request; `None`: those of the route and its virtual host.
    pub rules: Option<Vec<LimitRule>>,
    /// Only requests of internal (`true`) or external (`false`) clients are limited; `None`: all.
    pub internal: Option<bool>,
    /// Cluster of the service.
    pub cluster: Box<str>,
    /// `:authority` of the call.
    pub authority: Box<str>,
    /// Headers of the call.
    pub metadata: Vec<(Box<str>, Box<str>)>,
    /// Timeout of the call.
    pub timeout: Duration,
    /// Share of requests, in millionths, that are limited.
    pub enabled: u32,
    /// Share of requests above a limit, in millionths, that are refused.
    pub enforced: u32,
    /// Share of requests, in millionths, that are refused if the service cannot be reached.
    pub denied_on_failure: u32,
    /// Status of the response to a request above a limit.
    pub status: u16,
    /// Status of the response if the service cannot be reached.
    pub status_on_error: u16,
    /// The response to a refused gRPC request has the status `RESOURCE_EXHAUSTED` instead of `UNAVAILABLE`.
    pub resource_exhausted: bool,
    /// Responses have the headers `x-ratelimit-limit`, `x-ratelimit-remaining` and `x-ratelimit-reset`.
    pub report: bool,
    /// A refusal with status 429 has the header `retry-after`.
    pub retry_after: bool,
    /// Responses to requests above a limit have the header `x-envoy-ratelimited`.
    pub marked: bool,
    /// Header operations for the response to a refused request.
    pub answer: Vec<HeaderOp>,
    /// Name under which the service's dynamic metadata are kept.
    pub namespace: Box<str>,
}

/// A route's settings for the filter. Source: `envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute`.
#[derive(Debug)]
pub struct RouteRateLimit {
    /// Rules that replace all others; `None` for no change.
    pub rules: Option<Vec<LimitRule>>,
    /// Use of the virtual host's rules.
    pub host_rules: HostRules,
    /// Domain of the descriptors; `None`: that of the filter.
    pub domain: Option<Box<str>>,
}
