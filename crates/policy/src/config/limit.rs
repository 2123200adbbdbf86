//! Local rate limits.
//!
//! Source: `envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit`.

use std::sync::Arc;

use super::route::HeaderOp;
use crate::state::rate_limit::TokenBucket;

/// A local rate limit.
#[derive(Debug)]
pub struct RateLimit {
    /// Token bucket, shared by all workers; `None` for no limit.
    pub bucket: Option<Arc<TokenBucket>>,
    /// Status of the response to a refused request.
    pub status: u16,
    /// Share of requests, in millionths, that take a token.
    pub enabled: u32,
    /// Share of requests without a token, in millionths, that are refused.
    pub enforced: u32,
    /// The response to a refused gRPC request has the status `RESOURCE_EXHAUSTED` instead of `UNAVAILABLE`.
    pub resource_exhausted: bool,
    /// Header operations for the response to a refused request.
    pub answer: Vec<HeaderOp>,
    /// Header operations for a request without a token that is not refused, because `enforced` excludes it.
    pub unenforced: Vec<HeaderOp>,
}
