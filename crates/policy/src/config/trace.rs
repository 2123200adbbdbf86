//! Which requests are traced, what is told of them and to whom.
//!
//! Source: `HttpConnectionManager.Tracing`, `envoy.config.route.v3.Tracing` and `envoy.config.trace.v3`.

use std::sync::Arc;

use super::{collector::Collector, http::Format};

/// How a manager traces. Source: `HttpConnectionManager.Tracing`.
#[derive(Debug)]
pub struct Tracing {
    /// Whose requests are traced where the route does not say.
    pub sampling: Sampling,
    /// Tags besides the usual ones.
    pub tags: Vec<CustomTag>,
    /// So much of a path is told, in bytes (`max_path_tag_length`).
    pub max_path: usize,
    /// Each try at an upstream is a span of its own (`spawn_upstream_span`).
    pub tries: bool,
    /// Who is told.
    pub provider: TraceProvider,
}

/// How `x-request-id` takes part in it. Source: `envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig`.
#[derive(Clone, Copy, Debug)]
pub struct RequestIdUse {
    /// The decision is written into it (`pack_trace_reason`).
    pub pack: bool,
    /// It decides; otherwise everything is traced, as in Envoy (`use_request_id_for_trace_sampling`).
    pub decides: bool,
}

impl Default for RequestIdUse {
    fn default() -> Self {
        Self { pack: true, decides: true }
    }
}

/// Whose requests are traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Of those that say so (`x-client-trace-id`).
    pub client: Share,
    /// Of the others.
    pub random: Share,
    /// Of all these.
    pub overall: Share,
}

/// So many out of so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// So many.
    pub part: u32,
    /// Out of so many.
    pub of: u32,
}

impl Share {
    /// Everything.
    pub const ALL: Self = Self { part: 100, of: 100 };

    /// Whether the one of this number is among them.
    pub fn has(self, number: u32) -> bool {
        number % self.of.max(1) < self.part
    }
}

/// What a route says instead of its manager. Source: `envoy.config.route.v3.Tracing`.
#[derive(Debug)]
pub struct RouteTracing {
    /// Whose requests are traced.
    pub sampling: Sampling,
    /// Tags besides those of the manager, and instead of those of the same names.
    pub tags: Vec<CustomTag>,
}

/// What a route calls its spans. Source: `envoy.config.route.v3.Decorator`.
#[derive(Debug)]
pub struct Decorator {
    /// The name.
    pub operation: Box<str>,
    /// The other end is told.
    pub propagate: bool,
}

/// A tag. Source: `envoy.type.tracing.v3.CustomTag`.
#[derive(Debug)]
pub struct CustomTag {
    /// Its name.
    pub name: Box<str>,
    /// Where its value comes from; without one there is no tag.
    pub value: TagValue,
}

/// Where the value of a tag comes from.
#[derive(Debug)]
pub enum TagValue {
    /// From here (or from the environment, which does not change).
    Literal(Box<str>),
    /// From a header of the request, by its name in lower case; otherwise this.
    Header(Box<str>, Box<str>),
    /// From what filters found out, by the filter's name and the keys that lead there; otherwise this.
    Metadata(Vec<Box<str>>, Box<str>),
    /// From operators.
    Format(Format),
}

/// Who is told of spans.
#[derive(Debug)]
pub struct TraceProvider {
    /// In which way.
    pub tracer: Tracer,
    /// Where.
    pub collector: Arc<Collector>,
}

/// In which way spans are told, and how their context travels with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracer {
    /// OTLP; W3C trace context.
    OpenTelemetry,
    /// Zipkin's JSON; B3.
    Zipkin(Zipkin),
}

/// Source: `envoy.config.trace.v3.ZipkinConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zipkin {
    /// New traces have ids of 128 bits (`trace_id_128bit`).
    pub long_ids: bool,
    /// Those begin with the time (`timestamp_trace_ids`).
    pub timed_ids: bool,
    /// The server's end of a call is told under the id of the client's (`shared_span_context`).
    pub shared: bool,
    /// W3C trace context is written besides B3, and read without it (`USE_B3_WITH_W3C_PROPAGATION`).
    pub w3c: bool,
}
