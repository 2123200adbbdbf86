//! Encoding and decoding of whole messages, compiled once for all crates.

use prost::{DecodeError, Message};

/// A message with a decoder and an encoder that are compiled in this crate.
pub trait Codec: Message + Default {
    /// Decodes a message.
    ///
    /// # Errors
    /// The bytes are not an encoding of this message.
    fn from_slice(bytes: &[u8]) -> Result<Self, DecodeError>;

    /// Encodes the message.
    fn to_vec(&self) -> Vec<u8>;
}

macro_rules! codecs {
    ($($message:path),* $(,)?) => {$(
        impl Codec for $message {
            fn from_slice(bytes: &[u8]) -> Result<Self, DecodeError> {
                Self::decode(bytes)
            }

            fn to_vec(&self) -> Vec<u8> {
                self.encode_to_vec()
            }
        }
    )*};
}

codecs! {
    crate::istio::AlpnConfig,
    crate::istio::NameTable,
    crate::istio::PeakEwma,
    crate::istio::StatsConfig,
    crate::istio::TypedStruct,
    crate::otlp::ExportResponse,
    crate::otlp::ResourceLogs,
    crate::otlp::ResourceSpans,
    crate::otlp::ScopeSpans,
    envoy_types::pb::envoy::admin::v3::BootstrapConfigDump,
    envoy_types::pb::envoy::admin::v3::ClustersConfigDump,
    envoy_types::pb::envoy::admin::v3::ConfigDump,
    envoy_types::pb::envoy::admin::v3::EndpointsConfigDump,
    envoy_types::pb::envoy::admin::v3::ListenersConfigDump,
    envoy_types::pb::envoy::admin::v3::RoutesConfigDump,
    envoy_types::pb::envoy::admin::v3::SecretsConfigDump,
    envoy_types::pb::envoy::config::bootstrap::v3::Bootstrap,
    envoy_types::pb::envoy::config::cluster::v3::Cluster,
    envoy_types::pb::envoy::config::core::v3::Node,
    envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment,
    envoy_types::pb::envoy::config::listener::v3::FilterChain,
    envoy_types::pb::envoy::config::listener::v3::Listener,
    envoy_types::pb::envoy::config::rbac::v3::Rbac,
    envoy_types::pb::envoy::config::route::v3::FilterConfig,
    envoy_types::pb::envoy::config::route::v3::RouteConfiguration,
    envoy_types::pb::envoy::config::route::v3::VirtualHost,
    envoy_types::pb::envoy::config::trace::v3::DatadogConfig,
    envoy_types::pb::envoy::config::trace::v3::OpenTelemetryConfig,
    envoy_types::pb::envoy::config::trace::v3::SkyWalkingConfig,
    envoy_types::pb::envoy::config::trace::v3::ZipkinConfig,
    envoy_types::pb::envoy::extensions::access_loggers::file::v3::FileAccessLog,
    envoy_types::pb::envoy::extensions::access_loggers::filters::cel::v3::ExpressionFilter,
    envoy_types::pb::envoy::extensions::access_loggers::grpc::v3::HttpGrpcAccessLogConfig,
    envoy_types::pb::envoy::extensions::access_loggers::grpc::v3::TcpGrpcAccessLogConfig,
    envoy_types::pb::envoy::extensions::access_loggers::open_telemetry::v3::OpenTelemetryAccessLogConfig,
    envoy_types::pb::envoy::extensions::clusters::dynamic_forward_proxy::v3::ClusterConfig,
    envoy_types::pb::envoy::extensions::compression::brotli::compressor::v3::Brotli,
    envoy_types::pb::envoy::extensions::compression::gzip::compressor::v3::Gzip,
    envoy_types::pb::envoy::extensions::compression::zstd::compressor::v3::Zstd,
    envoy_types::pb::envoy::extensions::filters::http::buffer::v3::Buffer,
    envoy_types::pb::envoy::extensions::filters::http::buffer::v3::BufferPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::compressor::v3::Compressor,
    envoy_types::pb::envoy::extensions::filters::http::compressor::v3::CompressorPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::cors::v3::Cors,
    envoy_types::pb::envoy::extensions::filters::http::cors::v3::CorsPolicy,
    envoy_types::pb::envoy::extensions::filters::http::dynamic_forward_proxy::v3::FilterConfig,
    envoy_types::pb::envoy::extensions::filters::http::ext_authz::v3::ExtAuthz,
    envoy_types::pb::envoy::extensions::filters::http::ext_authz::v3::ExtAuthzPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::fault::v3::HttpFault,
    envoy_types::pb::envoy::extensions::filters::http::grpc_stats::v3::FilterConfig,
    envoy_types::pb::envoy::extensions::filters::http::grpc_web::v3::GrpcWeb,
    envoy_types::pb::envoy::extensions::filters::http::header_mutation::v3::HeaderMutation,
    envoy_types::pb::envoy::extensions::filters::http::header_mutation::v3::HeaderMutationPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::jwt_authn::v3::JwtAuthentication,
    envoy_types::pb::envoy::extensions::filters::http::jwt_authn::v3::JwtProvider,
    envoy_types::pb::envoy::extensions::filters::http::jwt_authn::v3::JwtRequirement,
    envoy_types::pb::envoy::extensions::filters::http::jwt_authn::v3::PerRouteConfig,
    envoy_types::pb::envoy::extensions::filters::http::local_ratelimit::v3::LocalRateLimit,
    envoy_types::pb::envoy::extensions::filters::http::lua::v3::Lua,
    envoy_types::pb::envoy::extensions::filters::http::lua::v3::LuaPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::on_demand::v3::OnDemand,
    envoy_types::pb::envoy::extensions::filters::http::on_demand::v3::PerRouteConfig,
    envoy_types::pb::envoy::extensions::filters::http::ratelimit::v3::RateLimit,
    envoy_types::pb::envoy::extensions::filters::http::ratelimit::v3::RateLimitPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::rbac::v3::Rbac,
    envoy_types::pb::envoy::extensions::filters::http::rbac::v3::RbacPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::router::v3::Router,
    envoy_types::pb::envoy::extensions::filters::listener::http_inspector::v3::HttpInspector,
    envoy_types::pb::envoy::extensions::filters::listener::original_dst::v3::OriginalDst,
    envoy_types::pb::envoy::extensions::filters::listener::proxy_protocol::v3::ProxyProtocol,
    envoy_types::pb::envoy::extensions::compression::brotli::decompressor::v3::Brotli,
    envoy_types::pb::envoy::extensions::compression::gzip::decompressor::v3::Gzip,
    envoy_types::pb::envoy::extensions::compression::zstd::decompressor::v3::Zstd,
    envoy_types::pb::envoy::extensions::filters::http::decompressor::v3::Decompressor,
    envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ExtProcPerRoute,
    envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ExternalProcessor,
    envoy_types::pb::envoy::extensions::filters::listener::tls_inspector::v3::TlsInspector,
    envoy_types::pb::envoy::extensions::filters::network::connection_limit::v3::ConnectionLimit,
    envoy_types::pb::envoy::extensions::filters::network::ext_authz::v3::ExtAuthz,
    envoy_types::pb::envoy::extensions::filters::network::http_connection_manager::v3::HttpConnectionManager,
    envoy_types::pb::envoy::extensions::filters::network::mongo_proxy::v3::MongoProxy,
    envoy_types::pb::envoy::extensions::filters::network::rbac::v3::Rbac,
    envoy_types::pb::envoy::extensions::filters::network::sni_dynamic_forward_proxy::v3::FilterConfig,
    envoy_types::pb::envoy::extensions::filters::network::tcp_proxy::v3::TcpProxy,
    envoy_types::pb::envoy::extensions::load_balancing_policies::cluster_provided::v3::ClusterProvided,
    envoy_types::pb::envoy::extensions::load_balancing_policies::least_request::v3::LeastRequest,
    envoy_types::pb::envoy::extensions::load_balancing_policies::maglev::v3::Maglev,
    envoy_types::pb::envoy::extensions::load_balancing_policies::random::v3::Random,
    envoy_types::pb::envoy::extensions::load_balancing_policies::ring_hash::v3::RingHash,
    envoy_types::pb::envoy::extensions::load_balancing_policies::round_robin::v3::RoundRobin,
    envoy_types::pb::envoy::extensions::load_balancing_policies::wrr_locality::v3::WrrLocality,
    envoy_types::pb::envoy::extensions::network::dns_resolver::cares::v3::CaresDnsResolverConfig,
    envoy_types::pb::envoy::extensions::path::r#match::uri_template::v3::UriTemplateMatchConfig,
    envoy_types::pb::envoy::extensions::request_id::uuid::v3::UuidRequestIdConfig,
    envoy_types::pb::envoy::extensions::resource_monitors::cgroup_memory::v3::CgroupMemoryConfig,
    envoy_types::pb::envoy::extensions::resource_monitors::downstream_connections::v3::DownstreamConnectionsConfig,
    envoy_types::pb::envoy::extensions::resource_monitors::fixed_heap::v3::FixedHeapConfig,
    envoy_types::pb::envoy::extensions::retry::host::previous_hosts::v3::PreviousHostsPredicate,
    envoy_types::pb::envoy::extensions::retry::priority::previous_priorities::v3::PreviousPrioritiesConfig,
    envoy_types::pb::envoy::extensions::tracers::opentelemetry::resource_detectors::v3::EnvironmentResourceDetectorConfig,
    envoy_types::pb::envoy::extensions::transport_sockets::proxy_protocol::v3::ProxyProtocolUpstreamTransport,
    envoy_types::pb::envoy::extensions::transport_sockets::raw_buffer::v3::RawBuffer,
    envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::DownstreamTlsContext,
    envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::Secret,
    envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::SpiffeCertValidatorConfig,
    envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::UpstreamTlsContext,
    envoy_types::pb::envoy::extensions::upstreams::http::v3::HttpProtocolOptions,
    envoy_types::pb::envoy::service::accesslog::v3::StreamAccessLogsMessage,
    envoy_types::pb::envoy::service::auth::v3::CheckRequest,
    envoy_types::pb::envoy::service::auth::v3::CheckResponse,
    envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse,
    envoy_types::pb::envoy::service::ext_proc::v3::ProcessingRequest,
    envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse,
    envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest,
    envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse,
    envoy_types::pb::envoy::service::status::v3::ClientConfig,
    envoy_types::pb::google::protobuf::Struct,
}
