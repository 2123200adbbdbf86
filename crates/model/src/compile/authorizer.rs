//! External authorizers of AuthorizationPolicies with action CUSTOM.
//!
//! A filter evaluates the rules in shadow mode and writes the name of the matching rule to the dynamic metadata. The
//! authorizer's filter calls the authorizer for requests with this metadata.

use skysail_xds::envoy::pb::envoy::extensions::filters::{
    http::ext_authz::v3::{
        AuthorizationRequest, AuthorizationResponse, BufferSettings, ExtAuthz as HttpExtAuthz, HttpService,
        ext_authz::Services,
    },
    network::ext_authz::v3::ExtAuthz as NetworkExtAuthz,
};

use super::{
    clause::metadata_matcher,
    pb::{core, duration, matcher, seconds, types},
};
use crate::{
    World,
    api::{
        Duration,
        extension_provider::{ExtAuthzGrpc, ExtAuthzHttp, RequestBody},
    },
};

use matcher::string_matcher::MatchPattern;

/// Prefix of the names of rules that an authorizer decides, before the provider's name.
pub(super) const PREFIX: &str = "istio-ext-authz";
/// Prefix of the keys in dynamic metadata under which the filter in shadow mode writes its result.
pub(super) const SHADOW_PREFIX: &str = "istio_ext_authz_";
/// Timeout in seconds if none is configured. Source: Istio's default.
const TIMEOUT: i64 = 600;

/// Filters of an authorizer.
pub(super) struct Authorizer {
    pub(super) http: HttpExtAuthz,
    /// `None` if the authorizer cannot decide about connections: it speaks HTTP.
    pub(super) tcp: Option<NetworkExtAuthz>,
}

impl Authorizer {
    /// Returns the authorizer of this name. An error says why it cannot be used.
    pub(super) fn named(world: &World, name: &str) -> Result<Self, String> {
        let provider = world.authorizer(name)?;
        match (&provider.envoy_ext_authz_http, &provider.envoy_ext_authz_grpc) {
            (Some(http), _) => over_http(world, name, http),
            (None, Some(grpc)) => over_grpc(world, name, grpc),
            (None, None) => Err(format!("provider {name:?} is not an external authorizer")),
        }
    }
}

fn over_http(world: &World, name: &str, config: &ExtAuthzHttp) -> Result<Authorizer, String> {
    let (host, cluster) = world.provider_cluster(&config.service, config.port)?;
    let headers = match &config.include_request_headers_in_check {
        list if list.is_empty() => &config.include_headers_in_check,
        list => list,
    };
    let added = config.include_additional_headers_in_check.iter();
    let added: Vec<core::HeaderValue> = added
        .map(|(key, value)| core::HeaderValue {
            key: key.clone(),
            value: value.clone(),
            ..Default::default()
        })
        .collect();
    let response = AuthorizationResponse {
        allowed_upstream_headers: patterns(&config.headers_to_upstream_on_allow),
        allowed_client_headers: patterns(&config.headers_to_downstream_on_deny),
        allowed_client_headers_on_success: patterns(&config.headers_to_downstream_on_allow),
        ..Default::default()
    };
    let service = HttpService {
        server_uri: Some(core::HttpUri {
            uri: format!("http://{host}"),
            timeout: Some(timeout(config.timeout)),
            http_upstream_type: Some(core::http_uri::HttpUpstreamType::Cluster(cluster)),
        }),
        path_prefix: config.path_prefix.clone(),
        authorization_request: (!added.is_empty())
            .then(|| AuthorizationRequest { headers_to_add: added, ..Default::default() }),
        authorization_response: (response != AuthorizationResponse::default()).then_some(response),
        ..Default::default()
    };
    let http = HttpExtAuthz {
        failure_mode_allow: config.fail_open,
        allowed_headers: patterns(headers),
        services: Some(Services::HttpService(service)),
        ..common(name, &config.status_on_error, config.include_request_body_in_check.as_ref())
    };
    Ok(Authorizer { http, tcp: None })
}

fn over_grpc(world: &World, name: &str, config: &ExtAuthzGrpc) -> Result<Authorizer, String> {
    let (host, cluster) = world.provider_cluster(&config.service, config.port)?;
    let service =
        core::GrpcService { timeout: Some(timeout(config.timeout)), ..grpc_service(&host, &cluster) };
    let http = HttpExtAuthz {
        failure_mode_allow: config.fail_open,
        services: Some(Services::GrpcService(service.clone())),
        ..common(name, &config.status_on_error, config.include_request_body_in_check.as_ref())
    };
    let tcp = NetworkExtAuthz {
        stat_prefix: "tcp.".into(),
        grpc_service: Some(service),
        failure_mode_allow: config.fail_open,
        transport_api_version: core::ApiVersion::V3 as i32,
        filter_enabled_metadata: Some(note("envoy.filters.network.rbac", name)),
        ..Default::default()
    };
    Ok(Authorizer { http, tcp: Some(tcp) })
}

/// Returns the configuration of a gRPC service: its cluster and authority.
pub(super) fn grpc_service(host: &str, cluster: &str) -> core::GrpcService {
    core::GrpcService {
        target_specifier: Some(core::grpc_service::TargetSpecifier::EnvoyGrpc(
            core::grpc_service::EnvoyGrpc {
                cluster_name: cluster.to_owned(),
                authority: host.to_owned(),
                ..Default::default()
            },
        )),
        ..Default::default()
    }
}

fn common(name: &str, status: &str, body: Option<&RequestBody>) -> HttpExtAuthz {
    HttpExtAuthz {
        transport_api_version: core::ApiVersion::V3 as i32,
        with_request_body: body.map(|body| BufferSettings {
            max_request_bytes: body.max_request_bytes,
            allow_partial_message: body.allow_partial_message,
            pack_as_bytes: body.pack_as_bytes,
        }),
        status_on_error: status.parse().ok().map(|code| types::HttpStatus { code }),
        filter_enabled_metadata: Some(note("envoy.filters.http.rbac", name)),
        ..Default::default()
    }
}

/// Returns the matcher of dynamic metadata that holds if a rule of this provider matched.
fn note(filter: &str, provider: &str) -> matcher::MetadataMatcher {
    let text = matcher::StringMatcher {
        match_pattern: Some(MatchPattern::Prefix(format!("{PREFIX}-{provider}"))),
        ..Default::default()
    };
    let value = matcher::ValueMatcher {
        match_pattern: Some(matcher::value_matcher::MatchPattern::StringMatch(text)),
    };
    metadata_matcher(filter, &[&format!("{SHADOW_PREFIX}shadow_effective_policy_id")], value)
}

fn timeout(configured: Option<Duration>) -> super::pb::Duration {
    configured.map_or(seconds(TIMEOUT), |length| duration(length.0))
}

/// Returns matchers for names of headers: exact, `PREFIX*` or `*SUFFIX`.
fn patterns(headers: &[String]) -> Option<matcher::ListStringMatcher> {
    let pattern = |header: &String| {
        let pattern = match (header.strip_prefix('*'), header.strip_suffix('*')) {
            (Some(end), _) => MatchPattern::Suffix(end.to_owned()),
            (None, Some(start)) => MatchPattern::Prefix(start.to_owned()),
            (None, None) => MatchPattern::Exact(header.clone()),
        };
        matcher::StringMatcher { match_pattern: Some(pattern), ignore_case: true }
    };
    (!headers.is_empty())
        .then(|| matcher::ListStringMatcher { patterns: headers.iter().map(pattern).collect() })
}
