//! The HTTP connection manager and its filters.
//!
//! Source: `envoy.extensions.filters.network.http_connection_manager.v3`.

use std::{sync::Arc, time::Duration};

use super::{
    authorization::ExternalAuthorization,
    collector::Collector,
    jwt::Jwt,
    limit::RateLimit,
    listener::Cidr,
    log_filter::LogFilter,
    policy::Policy,
    route::{Fault, RouteTable},
    stats::Stats,
    trace::{RequestIdUse, Tracing},
};
use skysail_http::{compress::Compressor, http2::Http2Options};

/// How HTTP on a filter chain is handled.
#[derive(Debug)]
pub struct HttpManager {
    /// Prefix of its statistics: `inbound_0.0.0.0_9080;`.
    pub stat_prefix: Arc<str>,
    /// Which protocols it takes.
    pub codec: Codec,
    /// Where its routes are.
    pub routes: Routes,
    /// What may answer, change or refuse a request before it is routed on, in the order of the configuration.
    pub filters: Vec<Filter>,
    /// Which of Istio's metrics are kept (filter `istio.stats`).
    pub stats: Option<Arc<Stats>>,
    /// Whether peers are asked who they are (filter `istio.metadata_exchange`).
    pub metadata_exchange: Option<MetadataExchange>,
    /// Whether the upstream ALPN follows the request's protocol (filter `istio.alpn`).
    pub istio_alpn: bool,
    /// Upgrades passed through as tunnels, in lower case (`websocket`); empty refuses all.
    pub upgrades: Vec<Box<str>>,
    /// What becomes of `server` in answers.
    pub server: ServerHeader,
    /// Whether `x-request-id` is made where it is missing.
    pub generate_request_id: bool,
    /// Whether that of clients outside is taken (`preserve_external_request_id`).
    pub preserve_request_id: bool,
    /// How it takes part in tracing.
    pub request_id: RequestIdUse,
    /// Which requests are traced; `None` for none, and where nobody is told.
    pub tracing: Option<Box<Tracing>>,
    /// What becomes of `x-forwarded-client-cert`.
    pub client_cert: ClientCertDetails,
    /// Whether the address of the peer counts as the client's, and is appended to `x-forwarded-for`.
    pub use_remote_address: bool,
    /// How many proxies in front are trusted in `x-forwarded-for`.
    pub xff_trusted_hops: u32,
    /// Whether the peer stays out of `x-forwarded-for`.
    pub skip_xff_append: bool,
    /// Where clients are that may say how their requests are to be tried (`internal_address_config`).
    pub internal: Vec<Cidr>,
    /// RFC 3986 normalisation of `.` and `..` before routing.
    pub normalize_path: bool,
    /// Runs of slashes become one before routing.
    pub merge_slashes: bool,
    /// What happens to `%2F` and `%5C` in a path.
    pub escaped_slashes: EscapedSlashes,
    /// Whether HTTP/1.0 is taken.
    pub accept_http10: bool,
    /// Whose requests are of HTTP/1.0 that name no host; `None` refuses them.
    pub default_host: Option<Box<str>>,
    /// Largest request head in bytes.
    pub max_head: usize,
    /// Most fields in a request's head, those of HTTP/2's own among them.
    pub max_headers: usize,
    /// What is agreed on with clients of HTTP/2.
    pub http2: Http2Options,
    /// A connection without a request is closed after; `None` never.
    pub idle_timeout: Option<Duration>,
    /// A stream on which nothing moves is ended after; `None` never.
    pub stream_idle_timeout: Option<Duration>,
    /// A connection takes at most so many requests; `None` for any number.
    pub max_requests_per_connection: Option<u32>,
    /// A request's head must have come in within, from its first byte; besides [`Self::stream_idle_timeout`] and
    /// [`Self::request_timeout`].
    pub request_headers_timeout: Option<Duration>,
    /// The whole request must have come in within; `None` for no limit.
    pub request_timeout: Option<Duration>,
    /// A client of HTTP/2 that has been told to go may open streams for at most so long (less if it says that it knows).
    pub drain_timeout: Duration,
    /// Where requests are logged.
    pub access_logs: Vec<Arc<AccessLog>>,
}

/// One filter. Source: `HttpFilter`.
#[derive(Debug)]
pub struct Filter {
    /// By which routes set it: `envoy.filters.http.fault`.
    pub name: Box<str>,
    /// Only routes that set it have it.
    pub disabled: bool,
    /// What it does.
    pub does: Does,
}

impl HttpManager {
    /// Whether filters see the requests of a connection as with these other settings.
    pub fn reads_like(&self, other: &Self) -> bool {
        let path = |manager: &Self| (manager.normalize_path, manager.merge_slashes, manager.escaped_slashes);
        let client =
            |manager: &Self| (manager.use_remote_address, manager.xff_trusted_hops, manager.skip_xff_append);
        path(self) == path(other)
            && client(self) == client(other)
            && self.client_cert == other.client_cert
            && self.internal == other.internal
            && self.default_host == other.default_host
    }
}

impl Filter {
    /// Whether it may refuse requests for what they are.
    pub fn judges(&self) -> bool {
        matches!(self.does, Does::Authorize(_) | Does::Ask(_) | Does::Jwt(_))
    }

    /// Whether it has nothing to do unless a route says so, as most of what a mesh configures everywhere.
    pub fn is_idle(&self) -> bool {
        match &self.does {
            _ if self.disabled => true,
            Does::Cors => true,
            Does::Fault(fault) => fault.delay.is_none() && fault.abort.is_none(),
            Does::Limit(limit) => limit.bucket.is_none(),
            Does::Authorize(_) | Does::Ask(_) | Does::Jwt(_) | Does::GrpcWeb | Does::Compress(_) => false,
        }
    }
}

/// The names of filters under which they leave dynamic metadata.
pub mod metadata {
    /// Of what shadow rules say.
    pub const RBAC: &str = "envoy.filters.http.rbac";
    /// Of what external authorization says.
    pub const EXT_AUTHZ: &str = "envoy.filters.http.ext_authz";
    /// Of tokens' claims.
    pub const JWT: &str = "envoy.filters.http.jwt_authn";
}

/// What a filter does where the route does not say otherwise.
#[derive(Debug)]
pub enum Does {
    /// Authorizes.
    Authorize(Arc<Policy>),
    /// Delays and aborts.
    Fault(Arc<Fault>),
    /// Refuses what is too much.
    Limit(Arc<RateLimit>),
    /// Asks another service.
    Ask(Box<ExternalAuthorization>),
    /// Requires tokens.
    Jwt(Box<Jwt>),
    /// Answers preflights and marks answers, by the route's policy alone.
    Cors,
    /// Makes calls of gRPC out of those of gRPC-Web, and the other way with their answers.
    GrpcWeb,
    /// Compresses answers for clients that accept it.
    Compress(Compressor),
}

/// Which protocols a manager takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// By ALPN, or the first bytes.
    Auto,
    /// HTTP/1 alone.
    Http1,
    /// HTTP/2 alone.
    Http2,
}

/// What becomes of `server` in answers. Source: `HttpConnectionManager.ServerHeaderTransformation`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerHeader {
    /// It is this.
    Overwrite(Box<str>),
    /// It is this where the upstream says nothing.
    AppendIfAbsent(Box<str>),
    /// It stays what it is.
    PassThrough,
}

/// Where a manager's routes are.
#[derive(Debug)]
pub enum Routes {
    /// In the listener itself.
    Inline(Arc<RouteTable>),
    /// In the snapshot's table of this name; requests get 404 until it is there.
    Named(Arc<str>),
}

/// Istio's metadata exchange over HTTP headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataExchange {
    /// Peers outside the mesh get none (`skip_external_clusters`).
    pub skip_external: bool,
}

/// What becomes of `x-forwarded-client-cert`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ClientCertDetails {
    /// What happens to the header a client sent.
    pub forward: ForwardClientCert,
    /// The subject is added.
    pub subject: bool,
    /// The DNS names are added.
    pub dns: bool,
    /// The URI names are added.
    pub uri: bool,
    /// The certificate itself is added, URL-encoded PEM.
    pub cert: bool,
}

/// Source: `HttpConnectionManager.ForwardClientCertDetails`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ForwardClientCert {
    /// Removed.
    #[default]
    Sanitize,
    /// Kept if the client is known by a certificate.
    ForwardOnly,
    /// Kept, and this hop's appended, if the client is known by a certificate.
    AppendForward,
    /// Replaced by this hop's, if the client is known by a certificate.
    SanitizeSet,
    /// Kept as it is.
    AlwaysForwardOnly,
}

/// Source: `HttpConnectionManager.PathWithEscapedSlashesAction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EscapedSlashes {
    /// Left.
    Keep,
    /// 400.
    Reject,
    /// Unescaped, and the client is redirected there.
    UnescapeAndRedirect,
    /// Unescaped, and the request goes on.
    UnescapeAndForward,
}

/// Where and how requests are logged.
#[derive(Debug)]
pub struct AccessLog {
    /// Who gets it.
    pub to: LogTarget,
    /// What is logged; `None` for all.
    pub filter: Option<LogFilter>,
}

/// Who gets an access log, in which form.
#[derive(Debug)]
pub enum LogTarget {
    /// Lines of a file.
    File {
        /// The file, or `/dev/stdout`.
        path: Box<str>,
        /// One line of it.
        format: LogFormat,
    },
    /// Entries of Envoy's own service. Source: `envoy.extensions.access_loggers.grpc.v3`.
    Entries {
        /// Who gets them.
        collector: Arc<Collector>,
        /// What they tell of requests; `None` where they tell of connections.
        http: Option<LogHeaders>,
    },
    /// Records of OpenTelemetry. Source: `envoy.extensions.access_loggers.open_telemetry.v3`.
    Records {
        /// Who gets them.
        collector: Arc<Collector>,
        /// What is told; `None` for nothing.
        body: Option<LogValue>,
        /// What is told besides.
        attributes: Vec<(Box<str>, LogValue)>,
    },
}

/// Headers that are told besides those that always are, in lower case.
#[derive(Debug, Default)]
pub struct LogHeaders {
    /// Of the request.
    pub request: Vec<Box<str>>,
    /// Of the answer.
    pub response: Vec<Box<str>>,
}

/// A value of OpenTelemetry, whose texts have operators.
#[derive(Debug)]
pub enum LogValue {
    /// A text.
    Text(Format),
    /// Some, one after the other.
    List(Vec<LogValue>),
    /// Some by their names.
    Map(Vec<(Box<str>, LogValue)>),
}

/// How a log line is made.
#[derive(Debug)]
pub enum LogFormat {
    /// Text with operators, `[%START_TIME%] …`.
    Text(Format),
    /// A JSON object of such texts.
    Json(Vec<(Box<str>, Format)>),
}

/// A text with `%COMMAND%` operators, split when configuration arrives. Also used for header values.
#[derive(Clone, Debug, Default)]
pub struct Format {
    /// The parts in order.
    pub parts: Vec<Part>,
}

/// A part of a [`Format`].
#[derive(Clone, Debug)]
pub enum Part {
    /// As it stands.
    Text(Box<str>),
    /// An operator: name, the argument in round brackets, the greatest length after `:`.
    /// The translation refuses operators that telemetry does not know.
    Operator {
        /// Such as `REQ`, `START_TIME`.
        name: Box<str>,
        /// Such as `X-ENVOY-ORIGINAL-PATH?:PATH`.
        argument: Option<Box<str>>,
        /// Longest output in bytes.
        max_len: Option<usize>,
    },
}
