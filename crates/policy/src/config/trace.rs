//! Tracing: sampling, tags and the collector of spans.
//!
//! Source: `HttpConnectionManager.Tracing`, `envoy.config.route.v3.Tracing` and `envoy.config.trace.v3`.

use std::sync::Arc;

use super::{collector::Collector, http::Format};

/// Tracing of a connection manager. Source: `HttpConnectionManager.Tracing`.
#[derive(Debug)]
pub struct Tracing {
    /// Sampling of requests whose route has none.
    pub sampling: Sampling,
    /// Custom tags.
    pub tags: Vec<CustomTag>,
    /// Maximum length of a path in a tag, in bytes (`max_path_tag_length`).
    pub max_path: usize,
    /// Each upstream attempt has a span of its own (`spawn_upstream_span`).
    pub attempt_spans: bool,
    /// Forwarded requests get the trace context (the opposite of `no_context_propagation`).
    pub propagates: bool,
    /// Provider that receives the spans.
    pub provider: TraceProvider,
}

/// Role of `x-request-id` in tracing. Source: `envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig`.
#[derive(Clone, Copy, Debug)]
pub struct RequestIdUse {
    /// The trace decision is written into the id (`pack_trace_reason`).
    pub pack: bool,
    /// The id decides; otherwise every request is traced, as in Envoy (`use_request_id_for_trace_sampling`).
    pub decides: bool,
}

impl Default for RequestIdUse {
    fn default() -> Self {
        Self { pack: true, decides: true }
    }
}

/// Sampling of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Fraction of requests with `x-client-trace-id` (`client_sampling`).
    pub client: Fraction,
    /// Fraction of the other requests (`random_sampling`).
    pub random: Fraction,
    /// Fraction of all requests selected so (`overall_sampling`).
    pub overall: Fraction,
}

/// A fraction (proto `FractionalPercent`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fraction {
    /// Numerator.
    pub numerator: u32,
    /// Denominator.
    pub denominator: u32,
}

impl Fraction {
    /// All requests.
    pub const ALL: Self = Self { numerator: 100, denominator: 100 };

    /// Returns whether the request with this random number is in the fraction.
    pub fn contains(self, number: u32) -> bool {
        number % self.denominator.max(1) < self.numerator
    }
}

/// Tracing of a route; replaces the settings of the connection manager. Source: `envoy.config.route.v3.Tracing`.
#[derive(Debug)]
pub struct RouteTracing {
    /// Sampling of requests.
    pub sampling: Sampling,
    /// Custom tags in addition to those of the connection manager; a tag of the same name replaces that one.
    pub tags: Vec<CustomTag>,
}

/// Span name of a route. Source: `envoy.config.route.v3.Decorator`.
#[derive(Debug)]
pub struct Decorator {
    /// Name of the operation.
    pub operation: Box<str>,
    /// The name is sent to the peer in a header.
    pub propagate: bool,
}

/// A custom tag. Source: `envoy.type.tracing.v3.CustomTag`.
#[derive(Debug)]
pub struct CustomTag {
    /// Name.
    pub name: Box<str>,
    /// Source of the value. Without a value, the tag is left out.
    pub value: TagValue,
}

/// Source of a tag's value.
#[derive(Debug)]
pub enum TagValue {
    /// A constant, or an environment variable, which is read once.
    Literal(Box<str>),
    /// A request header (lower case), and the value if it is missing.
    Header(Box<str>, Box<str>),
    /// Dynamic metadata: the name of the filter and the keys of the value, and the value if it is missing.
    Metadata(Vec<Box<str>>, Box<str>),
    /// A format string.
    Format(Format),
}

/// Provider of tracing.
#[derive(Debug)]
pub struct TraceProvider {
    /// Format of spans and of the trace context.
    pub tracer: Tracer,
    /// Collector of spans.
    pub collector: Arc<Collector>,
}

/// Format of spans, and of the trace context in request headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracer {
    /// OTLP; W3C trace context.
    OpenTelemetry,
    /// Zipkin's JSON; B3.
    Zipkin(Zipkin),
}

/// Settings of Zipkin. Source: `envoy.config.trace.v3.ZipkinConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zipkin {
    /// Ids of new traces have 128 bits (`trace_id_128bit`).
    pub long_ids: bool,
    /// 128-bit ids begin with the time (`timestamp_trace_ids`).
    pub timed_ids: bool,
    /// The server's span of a call has the id of the client's span (`shared_span_context`).
    pub shared: bool,
    /// W3C trace context is written in addition to B3, and read if B3 is missing (`USE_B3_WITH_W3C_PROPAGATION`).
    pub w3c: bool,
}
