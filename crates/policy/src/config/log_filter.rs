//! Which requests and connections are logged.
//!
//! Source: `envoy.config.accesslog.v3.AccessLogFilter`.

use super::text::{HeaderMatch, MetadataMatch};
use crate::{error::Flags, expression::Expression};

/// What must hold for a line to be written.
#[derive(Debug)]
pub enum LogFilter {
    /// The answer's status; 0 where there was none.
    Status(Comparison),
    /// How long it took, in milliseconds.
    Duration(Comparison),
    /// This share, in millionths.
    Share(u32),
    /// All of these.
    All(Vec<LogFilter>),
    /// One of these.
    OneOf(Vec<LogFilter>),
    /// The request's headers.
    Header(HeaderMatch),
    /// One of these response flags, or any.
    Flags(Option<Flags>),
    /// The gRPC status, or the one that stands for the status in HTTP.
    GrpcStatus {
        /// One of these, or none of them.
        statuses: Vec<u32>,
        /// None of them.
        exclude: bool,
    },
    /// What filters found out.
    Metadata {
        /// What must hold.
        test: MetadataMatch,
        /// What holds where nothing was found out.
        otherwise: bool,
    },
    /// An expression in CEL.
    Expression(Expression),
}

/// A test of a number. Source: `ComparisonFilter`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the comparison of that name")]
pub enum Comparison {
    Equal(u32),
    NotEqual(u32),
    AtLeast(u32),
    AtMost(u32),
}
