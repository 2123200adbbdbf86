//! Filters of access logs.
//!
//! Source: `envoy.config.accesslog.v3.AccessLogFilter`.

use super::text::{HeaderMatch, MetadataMatch};
use crate::{error::Flags, expression::Expression};

/// Condition for a log entry.
#[derive(Debug)]
pub enum LogFilter {
    /// Status of the response; 0 without a response.
    Status(Comparison),
    /// Duration in milliseconds.
    Duration(Comparison),
    /// Fraction of requests, in millionths.
    Fraction(u32),
    /// All of these conditions.
    All(Vec<LogFilter>),
    /// One of these conditions.
    OneOf(Vec<LogFilter>),
    /// Match of a request header.
    Header(HeaderMatch),
    /// One of these response flags, or any flag.
    Flags(Option<Flags>),
    /// gRPC status, or the one that corresponds to the HTTP status.
    GrpcStatus {
        /// Accepted statuses; excluded ones with `exclude`.
        statuses: Vec<u32>,
        /// Excludes the statuses.
        exclude: bool,
    },
    /// Match of dynamic metadata.
    Metadata {
        /// The match.
        test: MetadataMatch,
        /// Result if the metadata are missing.
        otherwise: bool,
    },
    /// CEL expression.
    Expression(Expression),
}

/// Comparison of a number. Source: `ComparisonFilter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the comparison of that name")]
pub enum Comparison {
    Equal(u32),
    NotEqual(u32),
    AtLeast(u32),
    AtMost(u32),
}
