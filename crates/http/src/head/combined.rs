//! Names of fields that are combined if a message has several: those that Envoy combines when it reads a head, as
//! measured with Envoy 1.40, and `cookie`.
//!
//! Otherwise a decision about the first value would not hold for a server that uses the last one. Fields that frame or
//! address a message (`host`, `content-length`, `transfer-encoding`) are not listed: duplicates of them are refused.

use super::{Headers, Names, RequestHead, ResponseHead};

const REQUEST: [&str; 56] = [
    "accept",
    "accept-encoding",
    "access-control-request-headers",
    "access-control-request-method",
    "access-control-request-private-network",
    "authorization",
    "cache-control",
    "cdn-loop",
    "content-encoding",
    "content-type",
    "cookie",
    "expect",
    "grpc-accept-encoding",
    "grpc-timeout",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "origin",
    "pragma",
    "proxy-status",
    "upgrade",
    "user-agent",
    "via",
    "x-client-trace-id",
    "x-envoy-attempt-count",
    "x-envoy-decorator-operation",
    "x-envoy-downstream-service-cluster",
    "x-envoy-downstream-service-node",
    "x-envoy-expected-rq-timeout-ms",
    "x-envoy-external-address",
    "x-envoy-force-trace",
    "x-envoy-hedge-on-per-try-timeout",
    "x-envoy-internal",
    "x-envoy-ip-tags",
    "x-envoy-is-timeout-retry",
    "x-envoy-max-retries",
    "x-envoy-original-host",
    "x-envoy-original-path",
    "x-envoy-original-url",
    "x-envoy-retriable-header-names",
    "x-envoy-retriable-status-codes",
    "x-envoy-retry-grpc-on",
    "x-envoy-retry-on",
    "x-envoy-upstream-alt-stat-name",
    "x-envoy-upstream-rq-per-try-timeout-ms",
    "x-envoy-upstream-rq-timeout-alt-response",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-upstream-stream-duration-ms",
    "x-forwarded-client-cert",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-request-id",
];

const RESPONSE: [&str; 32] = [
    "access-control-allow-credentials",
    "access-control-allow-headers",
    "access-control-allow-methods",
    "access-control-allow-origin",
    "access-control-allow-private-network",
    "access-control-expose-headers",
    "access-control-max-age",
    "age",
    "cache-control",
    "content-encoding",
    "content-type",
    "date",
    "etag",
    "expires",
    "grpc-message",
    "grpc-status",
    "last-modified",
    "location",
    "proxy-status",
    "server",
    "upgrade",
    "vary",
    "via",
    "x-envoy-attempt-count",
    "x-envoy-decorator-operation",
    "x-envoy-degraded",
    "x-envoy-immediate-health-check-fail",
    "x-envoy-ratelimited",
    "x-envoy-upstream-canary",
    "x-envoy-upstream-healthchecked-cluster",
    "x-envoy-upstream-service-time",
    "x-request-id",
];

impl RequestHead {
    /// Combines repeated fields after a head has been read.
    pub fn combine_repeated(&mut self) {
        const SET: Names = Names::of(&REQUEST);
        self.headers.combine(&REQUEST, SET);
    }
}

impl ResponseHead {
    /// Combines repeated fields after a head has been read.
    pub fn combine_repeated(&mut self) {
        combine_answered(&mut self.headers);
    }
}

/// Combines repeated fields of a response's head or trailers.
pub fn combine_answered(headers: &mut Headers) {
    const SET: Names = Names::of(&RESPONSE);
    headers.combine(&RESPONSE, SET);
}
