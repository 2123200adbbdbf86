//! The HTTP connection manager and its filters.
//!
//! Source: `envoy.extensions.filters.network.http_connection_manager.v3`.

use std::{sync::Arc, time::Duration};

use super::{
    authorization::ExternalAuthorization,
    cluster::HostCacheConfig,
    collector::Collector,
    jwt::Jwt,
    limit::{GlobalRateLimit, RateLimit},
    listener::Cidr,
    log_filter::LogFilter,
    lua::Lua,
    mutation::HeaderMutation,
    policy::Policy,
    processing::ExternalProcessing,
    route::{Fault, HeaderOp, RouteTable},
    stats::Stats,
    trace::{RequestIdUse, Tracing},
};
use skysail_http::{compress::Compressor, decompress::Decompressor, http2::Http2Options};

/// A change of local replies. Source: `envoy.extensions.filters.network.http_connection_manager.v3.ResponseMapper`.
#[derive(Debug)]
pub struct LocalReply {
    /// Replies that are changed.
    pub filter: LogFilter,
    /// Status; `None` keeps it.
    pub status: Option<u16>,
    /// Text; `None` keeps it.
    pub body: Option<Box<str>>,
    /// Type of the text; `None` for `text/plain`.
    pub content_type: Option<Box<str>>,
    /// Header operations.
    pub headers: Vec<HeaderOp>,
}

/// An HTTP connection manager.
#[derive(Debug)]
pub struct HttpManager {
    /// Prefix of statistics, such as `inbound_0.0.0.0_9080;`.
    pub stat_prefix: Arc<str>,
    /// Accepted protocols.
    pub codec: Codec,
    /// Source of the route table.
    pub routes: Routes,
    /// Changes of local replies. The first whose filter passes applies.
    pub local_replies: Vec<LocalReply>,
    /// HTTP filters, in the order of the configuration. They run before the request is forwarded.
    pub filters: Vec<Filter>,
    /// One of the filters may process responses: a Lua script, or external processing.
    pub processes_responses: bool,
    /// A filter may change the headers of responses.
    pub mutates_responses: bool,
    /// Settings of Istio's metrics (filter `istio.stats`).
    pub stats: Option<Arc<Stats>>,
    /// Exchange of workload metadata with peers (filter `istio.metadata_exchange`).
    pub metadata_exchange: Option<MetadataExchange>,
    /// The upstream ALPN follows the request's protocol (filter `istio.alpn`).
    pub istio_alpn: bool,
    /// Cache of the hosts of requests to dynamic clusters, which are resolved if it is set (filter
    /// `dynamic_forward_proxy`).
    pub host_cache: Option<Box<HostCacheConfig>>,
    /// Upgrades that are tunnelled, in lower case (`websocket`); empty refuses all.
    pub upgrades: Vec<Box<str>>,
    /// Treatment of the response header `server`.
    pub server: ServerHeader,
    /// `x-request-id` is generated if it is missing.
    pub generate_request_id: bool,
    /// `x-request-id` of external clients is kept (`preserve_external_request_id`).
    pub preserve_request_id: bool,
    /// Responses have the request's `x-request-id`. Source: `always_set_request_id_in_response`.
    pub request_id_in_response: bool,
    /// Role of `x-request-id` in tracing.
    pub request_id: RequestIdUse,
    /// Tracing; `None` if it is off or has no provider.
    pub tracing: Option<Box<Tracing>>,
    /// Treatment of `x-forwarded-client-cert`.
    pub client_cert: ClientCertDetails,
    /// The peer's address is the client's address, and is appended to `x-forwarded-for`.
    pub use_remote_address: bool,
    /// Number of trusted proxies in `x-forwarded-for`.
    pub xff_trusted_hops: u32,
    /// The peer's address is not appended to `x-forwarded-for`.
    pub skip_xff_append: bool,
    /// With `use_remote_address`, `x-forwarded-port` is set to the port of the connection's local address.
    pub append_forwarded_port: bool,
    /// Address ranges of internal clients, which may set retries and timeouts by header (`internal_address_config`).
    pub internal: Vec<Cidr>,
    /// Paths are normalised by RFC 3986 (`.` and `..`) before routing.
    pub normalize_path: bool,
    /// Adjacent slashes are merged before routing.
    pub merge_slashes: bool,
    /// Treatment of `%2F` and `%5C` in a path.
    pub escaped_slashes: EscapedSlashes,
    /// Treatment of header names with underscores.
    pub underscores: Underscores,
    /// HTTP/1.0 is accepted.
    pub accept_http10: bool,
    /// Authority of HTTP/1.0 requests without a host; `None` refuses them.
    pub default_host: Option<Box<str>>,
    /// Maximum size of a request head in bytes.
    pub max_head: usize,
    /// Maximum number of fields in a request head, including the pseudo-header fields of HTTP/2.
    pub max_headers: usize,
    /// Whether upstreams of HTTP/1 receive the names of request headers as the client spells them (`preserve_case`).
    pub keep_case: bool,
    /// HTTP/2 settings.
    pub http2: Http2Options,
    /// Idle timeout of a connection without requests; `None` disables it.
    pub idle_timeout: Option<Duration>,
    /// Idle timeout of a stream; `None` disables it.
    pub stream_idle_timeout: Option<Duration>,
    /// Maximum number of requests on a connection; `None` for no limit.
    pub max_requests_per_connection: Option<u32>,
    /// Time after which a connection serves no further request; `None` for no limit. Source:
    /// `HttpProtocolOptions.max_connection_duration`.
    pub max_connection_duration: Option<Duration>,
    /// Timeout of a request's head from its first byte. It applies in addition to [`Self::stream_idle_timeout`] and
    /// [`Self::request_timeout`].
    pub request_headers_timeout: Option<Duration>,
    /// Timeout of the whole request; `None` disables it.
    pub request_timeout: Option<Duration>,
    /// Timeout from the first byte of a request to the last byte of the response, for routes without their own; `None`
    /// disables it. Source: `HttpProtocolOptions.max_stream_duration`.
    pub max_stream_duration: Option<Duration>,
    /// Time for which an HTTP/2 client may open streams after the first GOAWAY. It ends early when the client
    /// acknowledges. After [`Self::max_connection_duration`], time for which an HTTP/1 client may send a last request.
    pub drain_timeout: Duration,
    /// Access logs.
    pub access_logs: Vec<Arc<AccessLog>>,
}

/// An HTTP filter. Source: `HttpFilter`.
#[derive(Debug)]
pub struct Filter {
    /// Name that per-route settings use, such as `envoy.filters.http.fault`.
    pub name: Box<str>,
    /// The filter runs only for routes that enable it.
    pub disabled: bool,
    /// Kind and settings.
    pub kind: FilterKind,
}

impl HttpManager {
    /// Returns whether filters see the requests of a connection in the same form under these other settings.
    pub fn presents_requests_like(&self, other: &Self) -> bool {
        let path = |manager: &Self| (manager.normalize_path, manager.merge_slashes, manager.escaped_slashes);
        let client =
            |manager: &Self| (manager.use_remote_address, manager.xff_trusted_hops, manager.skip_xff_append);
        path(self) == path(other)
            && client(self) == client(other)
            && self.client_cert == other.client_cert
            && self.internal == other.internal
            && self.default_host == other.default_host
            && self.underscores == other.underscores
    }
}

impl Filter {
    /// Returns whether the filter authorizes requests. A request without such a filter needs no revalidation.
    pub fn authorizes(&self) -> bool {
        matches!(self.kind, FilterKind::Rbac(_) | FilterKind::ExternalAuthorization(_) | FilterKind::Jwt(_))
    }

    /// Returns whether the filter does nothing unless a route has a setting for it. This holds for most filters of a
    /// mesh.
    pub fn is_idle(&self) -> bool {
        match &self.kind {
            _ if self.disabled => true,
            FilterKind::Cors => true,
            FilterKind::Fault(fault) => fault.delay.is_none() && fault.abort.is_none(),
            FilterKind::RateLimit(limit) => limit.is_unlimited(),
            FilterKind::HeaderMutation(config) => {
                !config.mutations.changes_request() && config.mutations.response.is_empty()
            }
            FilterKind::Rbac(_)
            | FilterKind::ExternalAuthorization(_)
            | FilterKind::Jwt(_)
            | FilterKind::GrpcWeb
            | FilterKind::Lua(_)
            | FilterKind::ExternalProcessing(_)
            | FilterKind::Compress(_)
            | FilterKind::Decompress(_)
            | FilterKind::Buffer(_)
            | FilterKind::GlobalRateLimit(_) => false,
        }
    }
}

/// Names of the filters that set dynamic metadata.
pub mod metadata {
    /// Namespace of metadata that filters have in common.
    pub const COMMON: &str = "envoy.common";
    /// Set with the result of shadow rules.
    pub const RBAC: &str = "envoy.filters.http.rbac";
    /// Set with the result of external authorization.
    pub const EXT_AUTHZ: &str = "envoy.filters.http.ext_authz";
    /// Set with the metadata of a rate limit service.
    pub const RATE_LIMIT: &str = "envoy.filters.http.ratelimit";
    /// Set with the claims of tokens.
    pub const JWT: &str = "envoy.filters.http.jwt_authn";
}

/// Kind of a filter, with the settings that apply if the route has none.
#[derive(Debug)]
pub enum FilterKind {
    /// RBAC.
    Rbac(Arc<Policy>),
    /// Fault injection.
    Fault(Arc<Fault>),
    /// Local rate limit.
    RateLimit(Arc<RateLimit>),
    /// Rate limit by a service.
    GlobalRateLimit(Box<GlobalRateLimit>),
    /// External authorization.
    ExternalAuthorization(Box<ExternalAuthorization>),
    /// JWT authentication.
    Jwt(Box<Jwt>),
    /// CORS: answers preflights and adds headers to responses, by the policy of the route.
    Cors,
    /// gRPC-Web: translates calls to gRPC, and their responses back.
    GrpcWeb,
    /// Mutations of headers and query parameters.
    HeaderMutation(Box<HeaderMutation>),
    /// Buffering of the request's whole body, up to this size in bytes.
    Buffer(usize),
    /// Compression of responses for clients that accept it.
    Compress(Compressor),
    /// Decompression of requests and responses.
    Decompress(Box<Decompressor>),
    /// Lua scripts.
    Lua(Box<Lua>),
    /// External processing.
    ExternalProcessing(Arc<ExternalProcessing>),
}

/// Protocols that a connection manager accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// Detected by ALPN, or by the first bytes.
    Auto,
    /// Only HTTP/1.
    Http1,
    /// Only HTTP/2.
    Http2,
}

/// Treatment of the response header `server`. Source: `HttpConnectionManager.ServerHeaderTransformation`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerHeader {
    /// Replaced by this value.
    Overwrite(Box<str>),
    /// Set to this value if the upstream sends none.
    AppendIfAbsent(Box<str>),
    /// Unchanged.
    PassThrough,
}

/// Source of a connection manager's route table.
#[derive(Debug)]
pub enum Routes {
    /// Inline in the listener.
    Inline(Arc<RouteTable>),
    /// The table of this name in the snapshot (RDS). Requests get 404 until it has arrived.
    Named(Arc<str>),
}

/// Istio's metadata exchange over HTTP headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataExchange {
    /// Peers outside the mesh get no metadata (`skip_external_clusters`).
    pub skip_external: bool,
}

/// Treatment of `x-forwarded-client-cert`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ClientCertDetails {
    /// Treatment of the header that the client sent.
    pub forward: ForwardClientCert,
    /// The subject is added.
    pub subject: bool,
    /// The DNS names are added.
    pub dns: bool,
    /// The URI names are added.
    pub uri: bool,
    /// The certificate is added as URL-encoded PEM.
    pub cert: bool,
    /// The certificate and the issuers that the client sent are added as URL-encoded PEM.
    pub chain: bool,
}

/// Treatment of a received header. Source: `HttpConnectionManager.ForwardClientCertDetails`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ForwardClientCert {
    /// Removed.
    #[default]
    Sanitize,
    /// Kept if the client has a certificate.
    ForwardOnly,
    /// Kept, and this hop's element appended, if the client has a certificate.
    AppendForward,
    /// Replaced by this hop's element if the client has a certificate.
    SanitizeSet,
    /// Kept always.
    AlwaysForwardOnly,
}

/// Treatment of `%2F` and `%5C`. Source: `HttpConnectionManager.PathWithEscapedSlashesAction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EscapedSlashes {
    /// Unchanged.
    Keep,
    /// Refused with 400.
    Reject,
    /// Unescaped; the client is redirected to the result.
    UnescapeAndRedirect,
    /// Unescaped; the request is processed with the result.
    UnescapeAndForward,
}

/// Treatment of header names with underscores. Source: `HttpProtocolOptions.HeadersWithUnderscoresAction`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Underscores {
    /// Kept.
    #[default]
    Allow,
    /// The request is refused with 400, and a stream of HTTP/2 is reset.
    Reject,
    /// The field is removed.
    Drop,
}

/// An access log.
#[derive(Debug)]
pub struct AccessLog {
    /// Destination.
    pub to: LogTarget,
    /// Condition for an entry; `None` logs all.
    pub filter: Option<LogFilter>,
}

/// Destination and format of an access log.
#[derive(Debug)]
pub enum LogTarget {
    /// Lines in a file.
    File {
        /// Path of the file, or `/dev/stdout`.
        path: Box<str>,
        /// Format of a line.
        format: LogFormat,
    },
    /// Entries of Envoy's access log service. Source: `envoy.extensions.access_loggers.grpc.v3`.
    Entries {
        /// Collector of the entries.
        collector: Arc<Collector>,
        /// Additional headers in HTTP entries; `None` for TCP entries.
        http: Option<LogHeaders>,
    },
    /// OpenTelemetry log records. Source: `envoy.extensions.access_loggers.open_telemetry.v3`.
    Records {
        /// Collector of the records.
        collector: Arc<Collector>,
        /// Body of a record; `None` for none.
        body: Option<LogValue>,
        /// Attributes of a record.
        attributes: Vec<(Box<str>, LogValue)>,
    },
}

/// Headers in a log entry in addition to the standard ones, in lower case.
#[derive(Debug, Default)]
pub struct LogHeaders {
    /// Request headers.
    pub request: Vec<Box<str>>,
    /// Response headers.
    pub response: Vec<Box<str>>,
}

/// An OpenTelemetry value whose strings are format strings.
#[derive(Debug)]
pub enum LogValue {
    /// A string.
    Text(Format),
    /// A list.
    List(Vec<LogValue>),
    /// A map.
    Map(Vec<(Box<str>, LogValue)>),
}

/// Format of a log line.
#[derive(Debug)]
pub enum LogFormat {
    /// A format string such as `[%START_TIME%] …`, and the text for an operator without a value.
    Text(Format, &'static [u8]),
    /// A JSON object of format strings.
    Json(Vec<(Box<str>, Format)>),
}

/// A format string with `%COMMAND%` operators, split when the configuration arrives. Also used for header values.
#[derive(Clone, Debug, Default)]
pub struct Format {
    /// Parts in order.
    pub parts: Vec<Part>,
}

/// A part of a [`Format`].
#[derive(Clone, Debug)]
pub enum Part {
    /// Literal text.
    Text(Box<str>),
    /// An operator. The translation refuses others than those of [`operators`](crate::operators).
    Operator {
        /// Name, such as `REQ` or `START_TIME`.
        name: Box<str>,
        /// Argument in round brackets, such as `X-ENVOY-ORIGINAL-PATH?:PATH`.
        argument: Option<Box<str>>,
        /// Maximum length of the output in bytes, given after `:`.
        max_len: Option<usize>,
    },
}

impl Part {
    /// Name of an operator whose value is always missing.
    pub const MISSING: &str = "";
}
