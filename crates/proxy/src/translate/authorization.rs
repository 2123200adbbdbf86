//! Translates external authorization.

use std::time::Duration;

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::envoy::{
    config::core::v3::{GrpcService, HeaderValue, RuntimeFractionalPercent, grpc_service::TargetSpecifier},
    extensions::filters::{
        http::ext_authz::v3::{
            BufferSettings, ExtAuthz, ExtAuthzPerRoute, HttpService, ext_authz::Services,
            ext_authz_per_route::Override,
        },
        network::ext_authz::v3::ExtAuthz as NetworkExtAuthz,
    },
    r#type::matcher::v3::ListStringMatcher,
};

use super::{At as _, Reject, Result, duration, fingerprint, jwt, route_filters::status_code, text};
use skysail_policy::config::{
    authorization::{AuthorizationService, Body, ExternalAuthorization, Http},
    route::Setting,
    text::TextMatch,
};

/// Envoy's default timeout.
const TIMEOUT: Duration = Duration::from_millis(200);

/// Maximum number of body bytes that are buffered for the check.
const MAX_BODY: u32 = 64 * 1024;

/// Translates the HTTP filter.
pub(super) fn translate(proto: &ExtAuthz) -> Result<ExternalAuthorization> {
    let ServiceTarget { service, cluster, authority, timeout } = match &proto.services {
        Some(Services::GrpcService(service)) => {
            let GrpcTarget { cluster, authority, metadata, timeout } = grpc(service).at("grpc_service")?;
            let timeout = timeout.unwrap_or(TIMEOUT);
            ServiceTarget { service: AuthorizationService::Grpc(metadata), cluster, authority, timeout }
        }
        Some(Services::HttpService(service)) => http(service).at("http_service")?,
        None => return Err(Reject::new("needs a grpc_service or an http_service")),
    };
    if proto.deny_at_disable.as_ref().is_some_and(|flag| flag.default_value.is_some_and(|is| is.value)) {
        return Err(Reject::new("only false is supported").at_field("deny_at_disable"));
    }
    let status = proto.status_on_error.as_ref().map(|status| status.code.cast_unsigned());
    let metadata = proto.filter_enabled_metadata.as_ref();
    Ok(ExternalAuthorization {
        fingerprint: fingerprint(decision_inputs(proto).to_vec()),
        service,
        cluster,
        authority,
        timeout,
        failure_allowed: proto.failure_mode_allow,
        failure_marked: proto.failure_mode_allow_header_add,
        status_on_error: status.map_or(Ok(403), status_code).at("status_on_error")?,
        body: proto.with_request_body.as_ref().map(body).transpose().at("with_request_body")?,
        clear_route: proto.clear_route_cache,
        enabled: share(proto.filter_enabled.as_ref()).unwrap_or(1_000_000),
        enabled_metadata: metadata.map(text::metadata).transpose().at("filter_enabled_metadata")?,
        allowed_headers: list(proto.allowed_headers.as_ref()).at("allowed_headers")?,
        disallowed_headers: list(proto.disallowed_headers.as_ref())
            .at("disallowed_headers")?
            .unwrap_or_default(),
        include_certificate: proto.include_peer_certificate,
        include_tls_session: proto.include_tls_session,
    })
}

/// Returns the part of the configuration that affects the decision: the server and the content of the check
/// request.
fn decision_inputs(proto: &ExtAuthz) -> ExtAuthz {
    let mut inputs = proto.clone();
    (inputs.stat_prefix, inputs.status_on_error) = (String::new(), None);
    match &mut inputs.services {
        Some(Services::GrpcService(service)) => service.timeout = None,
        Some(Services::HttpService(service)) => {
            service.server_uri.iter_mut().for_each(|uri| uri.timeout = None);
        }
        None => {}
    }
    inputs
}

/// Translates the network filter.
pub(super) fn network(proto: &NetworkExtAuthz) -> Result<ExternalAuthorization> {
    let service = proto.grpc_service.clone().map(Services::GrpcService);
    translate(&ExtAuthz {
        services: service,
        failure_mode_allow: proto.failure_mode_allow,
        include_peer_certificate: proto.include_peer_certificate,
        filter_enabled_metadata: proto.filter_enabled_metadata.clone(),
        include_tls_session: proto.include_tls_session,
        ..ExtAuthz::default()
    })
}

/// Translates a route's override of the filter.
pub(super) fn setting(proto: &ExtAuthzPerRoute) -> Result<Setting> {
    match &proto.r#override {
        Some(Override::Disabled(true)) => Ok(Setting::Off),
        Some(Override::CheckSettings(settings)) => {
            let extensions = settings.context_extensions.iter();
            let mut extensions: Vec<(Box<str>, Box<str>)> =
                extensions.map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect();
            extensions.sort();
            Ok(Setting::ExternalAuthorization {
                extensions,
                without_body: settings.disable_request_body_buffering,
            })
        }
        _ => Err(Reject::new("must be `disabled: true` or check_settings")),
    }
}

/// Returns a fraction in millionths, if one is set.
pub(super) fn share(proto: Option<&RuntimeFractionalPercent>) -> Option<u32> {
    proto?.default_value.as_ref().map(text::millionths)
}

fn body(proto: &BufferSettings) -> Result<Body> {
    if proto.max_request_bytes > MAX_BODY {
        return Err(Reject::new(format!("must be at most {MAX_BODY} bytes")).at_field("max_request_bytes"));
    }
    Ok(Body {
        max_bytes: proto.max_request_bytes as usize,
        partial: proto.allow_partial_message,
        raw: proto.pack_as_bytes,
    })
}

/// Translates a list of matchers; `None` without a list.
pub(super) fn list(proto: Option<&ListStringMatcher>) -> Result<Option<Vec<TextMatch>>> {
    proto.map(|list| list.patterns.iter().map(text::text).collect::<Result<_>>().at("patterns")).transpose()
}

/// Returns headers with their names in lower case.
pub(super) fn pairs(protos: &[HeaderValue]) -> Vec<(Box<str>, Box<str>)> {
    protos
        .iter()
        .map(|header| (header.key.to_ascii_lowercase().into(), header.value.as_str().into()))
        .collect()
}

struct ServiceTarget {
    service: AuthorizationService,
    cluster: Box<str>,
    authority: Box<str>,
    timeout: Duration,
}

/// Target of a gRPC request.
pub(super) struct GrpcTarget {
    pub(super) cluster: Box<str>,
    pub(super) authority: Box<str>,
    pub(super) metadata: Vec<(Box<str>, Box<str>)>,
    /// Request timeout, if set.
    pub(super) timeout: Option<Duration>,
}

/// Translates the target of a gRPC service.
pub(super) fn grpc(proto: &GrpcService) -> Result<GrpcTarget> {
    let Some(TargetSpecifier::EnvoyGrpc(target)) = &proto.target_specifier else {
        return Err(Reject::new("must be an envoy_grpc with the name of a cluster"));
    };
    let authority = if target.authority.is_empty() { &target.cluster_name } else { &target.authority };
    let timeout = proto.timeout.as_ref().map(duration).transpose().at("timeout")?;
    Ok(GrpcTarget {
        metadata: pairs(&proto.initial_metadata),
        cluster: target.cluster_name.as_str().into(),
        authority: authority.as_str().into(),
        timeout: timeout.map(jwt::timeout_or_day),
    })
}

#[expect(deprecated, reason = "control planes still send allowed_headers here")]
fn http(proto: &HttpService) -> Result<ServiceTarget> {
    let uri = proto.server_uri.as_ref().ok_or_else(|| Reject::new("must be given").at_field("server_uri"))?;
    let uri = jwt::http_uri(uri).at("server_uri")?;
    let request = proto.authorization_request.as_ref();
    if request.is_some_and(|request| request.allowed_headers.is_some()) {
        return Err(Reject::new("use the allowed_headers of the filter")
            .at_field("authorization_request.allowed_headers"));
    }
    let answer = proto.authorization_response.clone().unwrap_or_default();
    let named = |proto: Option<&ListStringMatcher>, name: &str| {
        Ok(list(proto).at(format_args!("authorization_response.{name}"))?.unwrap_or_default())
    };
    Ok(ServiceTarget {
        service: AuthorizationService::Http(Box::new(Http {
            path_prefix: proto.path_prefix.as_str().into(),
            add: request.map(|request| pairs(&request.headers_to_add)).unwrap_or_default(),
            upstream: named(answer.allowed_upstream_headers.as_ref(), "allowed_upstream_headers")?,
            upstream_appended: named(
                answer.allowed_upstream_headers_to_append.as_ref(),
                "allowed_upstream_headers_to_append",
            )?,
            client: named(answer.allowed_client_headers.as_ref(), "allowed_client_headers")?,
            client_on_success: named(
                answer.allowed_client_headers_on_success.as_ref(),
                "allowed_client_headers_on_success",
            )?,
        })),
        cluster: uri.cluster,
        authority: uri.authority,
        timeout: uri.timeout,
    })
}
