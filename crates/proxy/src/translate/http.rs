//! Translates the HTTP connection manager and its filters.

use std::{collections::HashSet, sync::Arc, time::Duration};

use skysail_xds::{
    envoy::pb::{
        envoy::{
            config::core::v3::{
                Http1ProtocolOptions, Http2ProtocolOptions, HttpProtocolOptions, KeepaliveSettings,
                config_source::ConfigSourceSpecifier, http_protocol_options::HeadersWithUnderscoresAction,
                http1_protocol_options::header_key_format::HeaderFormat,
            },
            extensions::filters::{
                http::{cors::v3::Cors, grpc_web::v3::GrpcWeb, on_demand::v3::OnDemand, rbac::v3::Rbac},
                network::http_connection_manager::v3::{
                    HttpConnectionManager as Proto, HttpFilter,
                    http_connection_manager::{
                        CodecType, ForwardClientCertDetails, PathWithEscapedSlashesAction, RouteSpecifier,
                        ServerHeaderTransformation,
                    },
                    http_filter,
                },
            },
        },
        google::protobuf::{Any, Struct, UInt32Value, value::Kind},
    },
    istio::HTTP_PEER_METADATA,
};

use super::{
    At as _, Reject, Result, Translator, access_log, authorization, cluster, compressor, decompressor,
    duration, dynamic, flag, global_limit, jwt, limit, local_reply, lua, mutation, number, policy,
    processing, route, route_filters, stats, timeout, trace, type_name, unknown_type, unpack,
};
use skysail_http::http2::{Http2Options, Keepalive};
use skysail_policy::config::cluster::{MAX_HEAD, MAX_HEADERS};
use skysail_policy::config::http::{
    ClientCertDetails, Codec, EscapedSlashes, Filter, FilterKind, ForwardClientCert, HttpManager,
    MetadataExchange, Routes, ServerHeader, Underscores,
};
use skysail_policy::config::listener::Cidr;
use skysail_policy::config::trace::RequestIdUse;

/// Envoy's defaults.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
const STREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_STREAMS: u32 = 1024;
const PRESERVE_CASE: &str =
    "envoy.extensions.http.header_formatters.preserve_case.v3.PreserveCaseFormatterConfig";

/// Translates a connection manager.
pub(super) fn translate(translator: Translator<'_>, proto: &Proto) -> Result<HttpManager> {
    let common = proto.common_http_protocol_options.as_ref();
    let idle = common.and_then(|common| common.idle_timeout.as_ref());
    let longest = common.and_then(|common| common.max_connection_duration.as_ref());
    let stream = common.and_then(|common| common.max_stream_duration);
    let http1 = proto.http_protocol_options.as_ref();
    let mut manager = HttpManager {
        stat_prefix: proto.stat_prefix.as_str().into(),
        codec: match proto.codec_type() {
            CodecType::Auto => Codec::Auto,
            CodecType::Http1 => Codec::Http1,
            CodecType::Http2 => Codec::Http2,
            CodecType::Http3 => return Err(Reject::new("HTTP3 is not supported").at_field("codec_type")),
        },
        routes: routes(proto)?,
        local_replies: local_reply::translate(proto.local_reply_config.as_ref(), translator.strict)
            .at("local_reply_config")?,
        filters: Vec::new(),
        processes_responses: false,
        mutates_responses: false,
        stats: None,
        metadata_exchange: None,
        istio_alpn: false,
        host_cache: None,
        upgrades: upgrades(proto)?,
        server: server(proto),
        preserve_request_id: proto.preserve_external_request_id,
        request_id_in_response: proto.always_set_request_id_in_response,
        generate_request_id: flag(proto.generate_request_id).unwrap_or(true),
        request_id: request_id(proto)?,
        tracing: match &proto.tracing {
            Some(proto) => trace::translate(proto, translator.strict).at("tracing")?.map(Box::new),
            None => None,
        },
        client_cert: client_cert(proto),
        use_remote_address: flag(proto.use_remote_address).unwrap_or(false),
        xff_trusted_hops: proto.xff_num_trusted_hops,
        skip_xff_append: proto.skip_xff_append,
        append_forwarded_port: proto.append_x_forwarded_port,
        internal: internal(proto).at("internal_address_config.cidr_ranges")?,
        normalize_path: flag(proto.normalize_path).unwrap_or(false),
        merge_slashes: proto.merge_slashes,
        escaped_slashes: match proto.path_with_escaped_slashes_action() {
            PathWithEscapedSlashesAction::ImplementationSpecificDefault
            | PathWithEscapedSlashesAction::KeepUnchanged => EscapedSlashes::Keep,
            PathWithEscapedSlashesAction::RejectRequest => EscapedSlashes::Reject,
            PathWithEscapedSlashesAction::UnescapeAndRedirect => EscapedSlashes::UnescapeAndRedirect,
            PathWithEscapedSlashesAction::UnescapeAndForward => EscapedSlashes::UnescapeAndForward,
        },
        underscores: underscores(common),
        accept_http10: http1.is_some_and(|options| options.accept_http_10),
        default_host: http1
            .map(|options| options.default_host_for_http_10.as_str())
            .filter(|host| !host.is_empty())
            .map(Into::into),
        max_head: max_head(proto.max_request_headers_kb).at("max_request_headers_kb")?,
        max_headers: max_headers(common).at("common_http_protocol_options")?,
        keep_case: keeps_case(http1, translator.strict).at("http_protocol_options")?,
        max_requests_per_connection: common
            .and_then(|common| number(common.max_requests_per_connection))
            .filter(|max| *max > 0),
        max_connection_duration: timeout(longest, None)
            .at("common_http_protocol_options.max_connection_duration")?,
        http2: http2_options(proto.http2_protocol_options.as_ref(), MAX_STREAMS)
            .at("http2_protocol_options")?,
        idle_timeout: timeout(idle, Some(IDLE_TIMEOUT)).at("common_http_protocol_options.idle_timeout")?,
        stream_idle_timeout: timeout(proto.stream_idle_timeout.as_ref(), Some(STREAM_IDLE_TIMEOUT))
            .at("stream_idle_timeout")?,
        request_headers_timeout: timeout(proto.request_headers_timeout.as_ref(), None)
            .at("request_headers_timeout")?,
        request_timeout: timeout(proto.request_timeout.as_ref(), None).at("request_timeout")?,
        max_stream_duration: timeout(stream.as_ref(), None)
            .at("common_http_protocol_options.max_stream_duration")?,
        drain_timeout: match &proto.drain_timeout {
            Some(time) => duration(time).at("drain_timeout")?,
            None => DRAIN_TIMEOUT,
        },
        access_logs: access_log::access_logs(&proto.access_log, translator)?,
    };
    filters(&mut manager, &proto.http_filters, translator.strict)?;
    Ok(manager)
}

fn underscores(common: Option<&HttpProtocolOptions>) -> Underscores {
    match common.map(HttpProtocolOptions::headers_with_underscores_action) {
        None | Some(HeadersWithUnderscoresAction::Allow) => Underscores::Allow,
        Some(HeadersWithUnderscoresAction::RejectRequest) => Underscores::Reject,
        Some(HeadersWithUnderscoresAction::DropHeader) => Underscores::Drop,
    }
}

fn request_id(proto: &Proto) -> Result<RequestIdUse> {
    let any = proto.request_id_extension.as_ref().and_then(|extension| extension.typed_config.as_ref());
    any.map(|any| trace::request_id(any).at("request_id_extension"))
        .transpose()
        .map(Option::unwrap_or_default)
}

/// Returns the maximum size of a head in bytes, downstream or upstream.
pub(super) fn max_head(kib: Option<UInt32Value>) -> Result<usize> {
    match number(kib) {
        None => Ok(MAX_HEAD),
        Some(kib @ 1..=8192) => Ok((kib as usize) << 10),
        Some(kib) => Err(Reject::new(format!("{kib} is not between 1 and 8192"))),
    }
}

/// Returns whether the names of headers keep their spelling, downstream or upstream.
pub(super) fn keeps_case(options: Option<&Http1ProtocolOptions>, strict: bool) -> Result<bool> {
    let format = options.and_then(|options| options.header_key_format.as_ref());
    let Some(HeaderFormat::StatefulFormatter(formatter)) = format.and_then(|of| of.header_format.as_ref())
    else {
        return Ok(false);
    };
    let path = "header_key_format.stateful_formatter";
    let any = formatter.typed_config.as_ref().ok_or_else(|| Reject::new("must be given").at_field(path))?;
    match type_name(any) {
        // Reason phrases and the spelling of added headers are not forwarded.
        PRESERVE_CASE if any.value.is_empty() || !strict => Ok(true),
        PRESERVE_CASE => Err(Reject::new("must have no settings: remove them").at_field(path)),
        _ => Err(unknown_type("header formatter", &formatter.name, any).at_field(path)),
    }
}

/// Returns the maximum number of header fields, downstream or upstream.
pub(super) fn max_headers(common: Option<&HttpProtocolOptions>) -> Result<usize> {
    match common.and_then(|common| number(common.max_headers_count)) {
        None => Ok(MAX_HEADERS),
        Some(0) => Err(Reject::new("must be at least 1").at_field("max_headers_count")),
        Some(max) => Ok(max as usize),
    }
}

/// Translates the HTTP/2 settings, downstream or upstream.
pub(super) fn http2_options(proto: Option<&Http2ProtocolOptions>, max_streams: u32) -> Result<Http2Options> {
    let mut options = Http2Options::new(max_streams);
    let Some(proto) = proto else { return Ok(options) };
    let window = |size, default| match number(size) {
        None => Ok(default),
        Some(size @ 65_535..=0x7fff_ffff) => Ok(size),
        Some(size) => Err(Reject::new(format!("{size} is not between 65535 and 2147483647"))),
    };
    options.max_streams = number(proto.max_concurrent_streams).unwrap_or(max_streams);
    options.stream_window =
        window(proto.initial_stream_window_size, options.stream_window).at("initial_stream_window_size")?;
    options.connection_window = window(proto.initial_connection_window_size, options.connection_window)
        .at("initial_connection_window_size")?;
    options.allow_connect = proto.allow_connect;
    options.useless_frames = number(proto.max_outbound_control_frames).unwrap_or(options.useless_frames);
    if let Some(proto) = &proto.connection_keepalive {
        options.keepalive = keepalive(proto).at("connection_keepalive")?;
    }
    Ok(options)
}

fn keepalive(proto: &KeepaliveSettings) -> Result<Option<Keepalive>> {
    let Some(answer) = timeout(proto.timeout.as_ref(), None).at("timeout")? else {
        return Err(Reject::new("must be greater than 0").at_field("timeout"));
    };
    let interval = timeout(proto.interval.as_ref(), None).at("interval")?;
    let percent = proto.interval_jitter.map_or(15.0, |percent| percent.value);
    let jitter = (percent.clamp(0.0, 100.0) * 10_000.0) as u32;
    Ok(interval.map(|interval| Keepalive { interval, timeout: answer, jitter }))
}

fn routes(proto: &Proto) -> Result<Routes> {
    match &proto.route_specifier {
        Some(RouteSpecifier::RouteConfig(config)) => {
            if config.vhds.is_some() {
                return Err(Reject::new("vhds is supported only with rds: list the virtual hosts here")
                    .at_field("route_config.vhds"));
            }
            let table = route::translate(config, true).at("route_config")?;
            Ok(Routes::Inline(Arc::new(table)))
        }
        Some(RouteSpecifier::Rds(rds)) => {
            let source =
                rds.config_source.as_ref().and_then(|source| source.config_source_specifier.as_ref());
            if !matches!(source, Some(ConfigSourceSpecifier::Ads(_))) {
                return Err(
                    Reject::new("routes must come over ADS: set `ads: {}`").at_field("rds.config_source")
                );
            }
            Ok(Routes::Named(rds.route_config_name.as_str().into()))
        }
        Some(RouteSpecifier::ScopedRoutes(_)) => {
            Err(Reject::new("scoped routes are not supported: use rds or route_config")
                .at_field("scoped_routes"))
        }
        None => Err(Reject::new("needs rds or route_config")),
    }
}

fn upgrades(proto: &Proto) -> Result<Vec<Box<str>>> {
    let mut all = HashSet::new();
    for (index, config) in proto.upgrade_configs.iter().enumerate() {
        if !all.insert(config.upgrade_type.to_ascii_lowercase()) {
            let reason = format!("{:?} is configured twice", config.upgrade_type);
            return Err(Reject::new(reason).at_field(format_args!("upgrade_configs[{index}].upgrade_type")));
        }
    }
    let enabled = proto.upgrade_configs.iter().filter(|config| flag(config.enabled).unwrap_or(true));
    Ok(enabled.map(|config| config.upgrade_type.to_ascii_lowercase().into()).collect())
}

fn server(proto: &Proto) -> ServerHeader {
    let name = match proto.server_name.as_str() {
        "" => "envoy".into(),
        name => name.into(),
    };
    match proto.server_header_transformation() {
        ServerHeaderTransformation::Overwrite => ServerHeader::Overwrite(name),
        ServerHeaderTransformation::AppendIfAbsent => ServerHeader::AppendIfAbsent(name),
        ServerHeaderTransformation::PassThrough => ServerHeader::PassThrough,
    }
}

/// Returns the ranges of internal addresses; none if unset.
fn internal(proto: &Proto) -> Result<Vec<Cidr>> {
    let ranges = proto.internal_address_config.iter().flat_map(|config| &config.cidr_ranges);
    ranges.enumerate().map(|(index, range)| policy::cidr(range).at(format_args!("[{index}]"))).collect()
}

fn client_cert(proto: &Proto) -> ClientCertDetails {
    let set = proto.set_current_client_cert_details.as_ref();
    ClientCertDetails {
        forward: match proto.forward_client_cert_details() {
            ForwardClientCertDetails::Sanitize => ForwardClientCert::Sanitize,
            ForwardClientCertDetails::ForwardOnly => ForwardClientCert::ForwardOnly,
            ForwardClientCertDetails::AppendForward => ForwardClientCert::AppendForward,
            ForwardClientCertDetails::SanitizeSet => ForwardClientCert::SanitizeSet,
            ForwardClientCertDetails::AlwaysForwardOnly => ForwardClientCert::AlwaysForwardOnly,
        },
        subject: set.and_then(|set| flag(set.subject)).unwrap_or(false),
        dns: set.is_some_and(|set| set.dns),
        uri: set.is_some_and(|set| set.uri),
        cert: set.is_some_and(|set| set.cert),
        chain: set.is_some_and(|set| set.chain),
    }
}

/// Translates the filters; the last must be the router.
fn filters(manager: &mut HttpManager, protos: &[HttpFilter], strict: bool) -> Result<()> {
    let mut router = false;
    for (index, proto) in protos.iter().enumerate() {
        let path = format_args!("http_filters[{index}]").to_string();
        if router {
            return Err(Reject::new("comes after the router").at_field(path));
        }
        let Some(http_filter::ConfigType::TypedConfig(any)) = &proto.config_type else {
            return Err(
                Reject::new(format!("HTTP filter {:?} has no typed_config", proto.name)).at_field(path)
            );
        };
        router = filter(manager, proto, any, strict).at("typed_config").at(&path)?;
    }
    if router {
        Ok(())
    } else {
        Err(Reject::new("the last filter must be the router").at_field("http_filters"))
    }
}

/// Translates one filter; returns whether it is the router.
fn filter(manager: &mut HttpManager, proto: &HttpFilter, any: &Any, strict: bool) -> Result<bool> {
    let does = match type_name(any) {
        "envoy.extensions.filters.http.rbac.v3.RBAC" => {
            FilterKind::Rbac(policy::http(&unpack::<Rbac>(any)?)?)
        }
        "envoy.extensions.filters.http.fault.v3.HTTPFault" => {
            FilterKind::Fault(Arc::new(route_filters::fault(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.cors.v3.Cors" => {
            let Cors {} = unpack(any)?;
            FilterKind::Cors
        }
        "envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit" => {
            FilterKind::RateLimit(Arc::new(limit::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation" => {
            manager.mutates_responses = true;
            FilterKind::HeaderMutation(Box::new(mutation::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.buffer.v3.Buffer" => {
            FilterKind::Buffer(mutation::buffer(&unpack(any)?)?)
        }
        "envoy.extensions.filters.http.ratelimit.v3.RateLimit" => {
            FilterKind::GlobalRateLimit(Box::new(global_limit::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.ext_authz.v3.ExtAuthz" => {
            FilterKind::ExternalAuthorization(Box::new(authorization::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.grpc_web.v3.GrpcWeb" => {
            let GrpcWeb {} = unpack(any)?;
            FilterKind::GrpcWeb
        }
        "envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication" => {
            FilterKind::Jwt(Box::new(jwt::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.compressor.v3.Compressor" => {
            match compressor::translate(&unpack(any)?)? {
                Some(compressor) => FilterKind::Compress(compressor),
                None => return Ok(false),
            }
        }
        "envoy.extensions.filters.http.decompressor.v3.Decompressor" => {
            FilterKind::Decompress(Box::new(decompressor::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.lua.v3.Lua" => {
            manager.processes_responses = true;
            FilterKind::Lua(Box::new(lua::translate(&unpack(any)?)?))
        }
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor" => {
            manager.processes_responses = true;
            FilterKind::ExternalProcessing(Arc::new(processing::translate(&unpack(any)?)?))
        }
        _ if proto.disabled => return Err(Reject::new("this filter cannot be disabled: remove it")),
        _ => return unordered_filter(manager, proto, any, strict),
    };
    let buffers_body = |filter: &Filter| matches!(&filter.kind, FilterKind::ExternalAuthorization(config) if config.body.is_some());
    if matches!(does, FilterKind::GrpcWeb) && manager.filters.iter().any(buffers_body) {
        return Err(Reject::new(
            "must come before an ext_authz filter that buffers bodies (with_request_body)",
        ));
    }
    manager.filters.push(Filter { name: proto.name.as_str().into(), disabled: proto.disabled, kind: does });
    Ok(false)
}

/// Translates filters whose position does not matter. Returns whether the filter is the router.
fn unordered_filter(manager: &mut HttpManager, proto: &HttpFilter, any: &Any, strict: bool) -> Result<bool> {
    match type_name(any) {
        "envoy.extensions.filters.http.router.v3.Router" => return Ok(true),
        // This filter only counts messages, for metrics that Istio disables by default.
        "envoy.extensions.filters.http.grpc_stats.v3.FilterConfig" => {}
        // The sidecar requests virtual hosts by itself where the route configuration has vhds.
        "envoy.extensions.filters.http.on_demand.v3.OnDemand" => {
            let OnDemand { .. } = unpack(any)?;
        }
        "istio.envoy.config.filter.http.alpn.v2alpha1.FilterConfig" => manager.istio_alpn = true,
        "envoy.extensions.filters.http.dynamic_forward_proxy.v3.FilterConfig" => {
            manager.host_cache = Some(Box::new(dynamic::http(&unpack(any)?)?));
        }
        "stats.PluginConfig" => manager.stats = Some(stats::translate(&unpack(any)?, strict)?),
        "udpa.type.v1.TypedStruct" | "xds.type.v3.TypedStruct" => {
            let typed = cluster::typed_struct(any)?;
            if typed.type_url != HTTP_PEER_METADATA {
                return Err(Reject::new(format!(
                    "skysail-proxy has no HTTP filter {:?} of type {}: remove it",
                    proto.name, typed.type_url
                )));
            }
            manager.metadata_exchange =
                Some(MetadataExchange { skip_external: typed.value.as_ref().is_some_and(skips_external) });
        }
        _ => return Err(unknown_type("HTTP filter", &proto.name, any)),
    }
    Ok(false)
}

/// Returns whether `upstream_propagation: [{istio_headers: {skip_external_clusters: true}}]` is set.
fn skips_external(config: &Struct) -> bool {
    let Some(Kind::ListValue(methods)) =
        config.fields.get("upstream_propagation").and_then(|v| v.kind.as_ref())
    else {
        return false;
    };
    methods.values.iter().any(|method| {
        let Some(Kind::StructValue(method)) = &method.kind else { return false };
        let Some(Kind::StructValue(headers)) =
            method.fields.get("istio_headers").and_then(|v| v.kind.as_ref())
        else {
            return false;
        };
        let skip = headers.fields.get("skip_external_clusters").and_then(|value| value.kind.as_ref());
        matches!(skip, Some(Kind::BoolValue(true)))
    })
}
