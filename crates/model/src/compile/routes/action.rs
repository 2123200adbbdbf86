//! Actions of the rules of a VirtualService: forward, redirect or direct response, with retries, faults and headers.

use std::collections::{BTreeMap, HashMap};

use skysail_core::{ClusterName, names::GRPC_STATUS};
use skysail_xds::envoy::pb::envoy::extensions::filters::{
    common::fault::v3::{FaultDelay, fault_delay::FaultDelaySecifier},
    http::{
        cors::v3::CorsPolicy,
        fault::v3::{FaultAbort, HttpFault, fault_abort::ErrorType},
    },
};

use super::{RouteRule, retry, virtual_service::string_matcher};
use crate::{
    Role,
    api::{
        value::Percent,
        virtual_service as api,
        virtual_service::{Destination, HttpDestination, IstioHttpRoute, RedirectPort},
    },
    compile::{
        Scope, balance,
        pb::{
            Any, Duration, boolean, core, duration, matcher, matching, pack, percent, regex, route, seconds,
            timed_action, uint32, whole_percent,
        },
    },
    world::fqdn,
};

use route::{
    redirect_action::{PathRewriteSpecifier, RedirectResponseCode, SchemeRewriteSpecifier},
    route::Action,
    route_action::{ClusterSpecifier, HostRewriteSpecifier, RequestMirrorPolicy},
    weighted_cluster::{ClusterWeight, cluster_weight},
};

/// Name of a cluster that never exists, for references that are refused.
const UNKNOWN: &str = "UnknownService";

/// Port and rule for which routes are compiled.
pub(super) struct RoutePort<'a> {
    pub(super) scope: &'a Scope<'a>,
    pub(super) rule: &'a RouteRule,
    pub(super) number: u16,
    /// Gateway (`NAMESPACE/NAME`) for which routes are compiled; `None` for sidecars.
    pub(super) gateway: Option<&'a str>,
}

/// Returns the action of a route; `None` if it has no supported action.
pub(super) fn of_route(port: &RoutePort<'_>, http: &IstioHttpRoute) -> Option<Action> {
    if let Some(redirect) = &http.redirect {
        let mut made = redirection(redirect, port.number);
        if port.rule.spec.derived.is_some() && redirect.prefix_rewrite == "/" {
            made.path_rewrite_specifier = Some(PathRewriteSpecifier::RegexRewrite(without_prefix(http)));
        }
        return Some(Action::Redirect(made));
    }
    if let Some(response) = &http.direct_response {
        return Some(Action::DirectResponse(direct_response(response)));
    }
    let clusters = clusters(port, &http.route)?;
    let timeout = http.timeout.map_or(seconds(0), |length| duration(length.0));
    let mut to = route::RouteAction {
        cluster_specifier: Some(clusters),
        retry_policy: retry::policy(port.scope.world.mesh(), http.retries.as_ref()),
        request_mirror_policies: mirrors(port, http),
        ..timed_action(timeout)
    };
    if port.scope.role == Role::Grpc {
        to.max_stream_duration = http.timeout.map(|length| max_stream_duration(duration(length.0)));
    }
    rewrite(&mut to, http);
    to.append_x_forwarded_host = http.rewrite.is_some() && port.scope.headers.forwards_host;
    if port.rule.spec.derived.as_ref().is_some_and(|derived| !derived.is_ingress) {
        of_gateway_api(&mut to, http);
    }
    to.hash_policy = hash_policies(port.scope, &to);
    Some(Action::Route(to))
}

/// Applies what Gateway API demands beyond VirtualServices.
fn of_gateway_api(to: &mut route::RouteAction, http: &IstioHttpRoute) {
    let status = route::route_action::ClusterNotFoundResponseCode::InternalServerError;
    to.cluster_not_found_response_code = status as i32;
    if to.prefix_rewrite == "/" {
        to.prefix_rewrite = String::new();
        to.regex_rewrite = Some(without_prefix(http));
    }
}

/// Returns the rewrite that removes the matched prefix, and with it the slash that follows.
fn without_prefix(http: &IstioHttpRoute) -> matcher::RegexMatchAndSubstitute {
    let matched = http.matches.first().and_then(|found| found.uri.as_ref());
    let prefix = matched.map_or("", |uri| uri.text().trim_end_matches('/'));
    matcher::RegexMatchAndSubstitute {
        pattern: Some(regex(format!("^{}(/?)(.*)", quoted(prefix)))),
        substitution: r"/\2".to_owned(),
    }
}

/// Returns an RE2 expression for a text.
fn quoted(text: &str) -> String {
    let special = |c: &char| r"\.+*?()|[]{}^$".contains(*c);
    text.chars().flat_map(|c| special(&c).then_some('\\').into_iter().chain([c])).collect()
}

/// Returns the timeout in the form that gRPC reads.
fn max_stream_duration(length: Duration) -> route::route_action::MaxStreamDuration {
    route::route_action::MaxStreamDuration { max_stream_duration: Some(length), ..Default::default() }
}

/// Returns the hash policies of all clusters that the route may choose.
fn hash_policies(scope: &Scope<'_>, to: &route::RouteAction) -> Vec<route::route_action::HashPolicy> {
    match &to.cluster_specifier {
        Some(ClusterSpecifier::Cluster(name)) => balance::hash_policy(scope, name).into_iter().collect(),
        Some(ClusterSpecifier::WeightedClusters(all)) => {
            all.clusters.iter().filter_map(|one| balance::hash_policy(scope, &one.name)).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the cluster of a route with exactly one.
pub(super) fn single_cluster(action: &Action) -> Option<ClusterName<'_>> {
    let Action::Route(to) = action else { return None };
    let Some(ClusterSpecifier::Cluster(name)) = &to.cluster_specifier else { return None };
    ClusterName::parse(name)
}

/// Returns the settings of the fault and CORS filters. gRPC refuses filters that it does not have.
pub(super) fn per_filter(scope: &Scope<'_>, http: &IstioHttpRoute) -> HashMap<String, Any> {
    let fault = http.fault.as_ref().map(|from| ("envoy.filters.http.fault", pack(&fault(from))));
    let rules = http.cors_policy.as_ref().filter(|_| scope.role != Role::Grpc);
    let cors = rules.map(|from| ("envoy.filters.http.cors", pack(&cors(from))));
    [fault, cors].into_iter().flatten().map(|(name, config)| (name.to_owned(), config)).collect()
}

/// Sets the header changes of the rule, and those of its destination if it has exactly one.
pub(super) fn change_headers(made: &mut route::Route, http: &IstioHttpRoute) {
    let of_destination = match &http.route[..] {
        [only] if http.redirect.is_none() && http.direct_response.is_none() => only.headers.as_ref(),
        _ => None,
    };
    for headers in [http.headers.as_ref(), of_destination].into_iter().flatten() {
        made.request_headers_to_add.extend(header_values(&headers.request));
        made.request_headers_to_remove.extend(headers.request.remove.iter().cloned());
        made.response_headers_to_add.extend(header_values(&headers.response));
        made.response_headers_to_remove.extend(headers.response.remove.iter().cloned());
    }
}

fn clusters(port: &RoutePort<'_>, to: &[HttpDestination]) -> Option<ClusterSpecifier> {
    if let [only] = to {
        return Some(ClusterSpecifier::Cluster(cluster(port, &only.destination)));
    }
    let weighted = to.iter().filter_map(|to| {
        let weight = u32::try_from(to.weight?).ok().filter(|weight| *weight > 0)?;
        Some(weighted_cluster(port, to, weight))
    });
    let clusters: Vec<_> = weighted.collect();
    let all = route::WeightedCluster { clusters, ..Default::default() };
    (!all.clusters.is_empty()).then_some(ClusterSpecifier::WeightedClusters(all))
}

fn weighted_cluster(port: &RoutePort<'_>, to: &HttpDestination, weight: u32) -> ClusterWeight {
    let headers = to.headers.clone().unwrap_or_default();
    let host = authority(&headers)
        .map(|host| cluster_weight::HostRewriteSpecifier::HostRewriteLiteral(host.clone()));
    ClusterWeight {
        name: cluster(port, &to.destination),
        weight: uint32(weight),
        request_headers_to_add: header_values(&headers.request),
        request_headers_to_remove: headers.request.remove.clone(),
        response_headers_to_add: header_values(&headers.response),
        response_headers_to_remove: headers.response.remove.clone(),
        host_rewrite_specifier: host,
        ..Default::default()
    }
}

/// Returns the name of a destination's cluster.
fn cluster(port: &RoutePort<'_>, to: &Destination) -> String {
    if to.host.is_empty() {
        return UNKNOWN.to_owned();
    }
    let host = fqdn(&to.host, &port.rule.meta.namespace);
    let host = port.scope.world.aliased(&host);
    let number = port.scope.destination_port(to, host, port.number);
    ClusterName::outbound(number, &to.subset, host).to_string()
}

fn rewrite(to: &mut route::RouteAction, http: &IstioHttpRoute) {
    let mut host = http.headers.as_ref().and_then(authority).cloned();
    if let Some(rewrite) = &http.rewrite {
        match &rewrite.uri_regex_rewrite {
            Some(by) => {
                to.regex_rewrite = Some(matcher::RegexMatchAndSubstitute {
                    pattern: Some(regex(&by.pattern)),
                    substitution: by.rewrite.clone(),
                });
            }
            None => to.prefix_rewrite.clone_from(&rewrite.uri),
        }
        if !rewrite.authority.is_empty() {
            host = Some(rewrite.authority.clone());
        }
    }
    if let [HttpDestination { headers: Some(headers), .. }] = &http.route[..] {
        host = host.or_else(|| authority(headers).cloned());
    }
    to.host_rewrite_specifier = host.map(HostRewriteSpecifier::HostRewriteLiteral);
}

/// Returns whether a name means the authority, which is not changed like other headers.
fn is_authority(name: &str) -> bool {
    name.eq_ignore_ascii_case("host") || name == ":authority"
}

fn authority(headers: &api::Headers) -> Option<&String> {
    headers.request.set.iter().find(|(name, _)| is_authority(name)).map(|(_, value)| value)
}

fn header_values(changes: &api::HeaderOps) -> Vec<core::HeaderValueOption> {
    use core::header_value_option::HeaderAppendAction::{AppendIfExistsOrAdd, OverwriteIfExistsOrAdd};
    let option = |(name, value): (&String, &String), action| core::HeaderValueOption {
        header: Some(core::HeaderValue { key: name.clone(), value: value.clone(), ..Default::default() }),
        append_action: action as i32,
        ..Default::default()
    };
    let plain = |map: &'_ BTreeMap<String, String>, action| -> Vec<_> {
        map.iter().filter(|(name, _)| !is_authority(name)).map(|entry| option(entry, action)).collect()
    };
    let mut values = plain(&changes.set, OverwriteIfExistsOrAdd);
    values.extend(plain(&changes.add, AppendIfExistsOrAdd));
    values
}

fn mirrors(port: &RoutePort<'_>, http: &IstioHttpRoute) -> Vec<RequestMirrorPolicy> {
    let policy = |to: &Destination, share| RequestMirrorPolicy {
        cluster: cluster(port, to),
        runtime_fraction: Some(core::RuntimeFractionalPercent {
            default_value: Some(share),
            ..Default::default()
        }),
        trace_sampled: boolean(false),
        disable_shadow_host_suffix_append: true,
        ..Default::default()
    };
    let share =
        |given: Option<Percent>| given.map_or_else(|| whole_percent(100), |given| percent(given.value));
    if !http.mirrors.is_empty() {
        return http
            .mirrors
            .iter()
            .map(|mirror| policy(&mirror.destination, share(mirror.percentage)))
            .collect();
    }
    let old = http.mirror_percent.map(|value| Percent { value: f64::from(value) });
    let mirror = http.mirror.iter();
    mirror.map(|to| policy(to, share(http.mirror_percentage.or(old)))).collect()
}

fn redirection(from: &api::HttpRedirect, port: u16) -> route::RedirectAction {
    let path = if from.uri.is_empty() {
        Some(&from.prefix_rewrite)
            .filter(|text| !text.is_empty())
            .cloned()
            .map(PathRewriteSpecifier::PrefixRewrite)
    } else {
        Some(PathRewriteSpecifier::PathRedirect(from.uri.clone()))
    };
    // Envoy cannot take the port from the request, but the routes are compiled for a known port.
    let from_request = from.derive_port == Some(RedirectPort::FromRequestPort);
    let code = match from.redirect_code {
        302 => RedirectResponseCode::Found,
        303 => RedirectResponseCode::SeeOther,
        307 => RedirectResponseCode::TemporaryRedirect,
        308 => RedirectResponseCode::PermanentRedirect,
        _ => RedirectResponseCode::MovedPermanently,
    };
    let scheme = Some(&from.scheme).filter(|text| !text.is_empty());
    route::RedirectAction {
        host_redirect: from.authority.clone(),
        port_redirect: from.port.unwrap_or(if from_request { port.into() } else { 0 }),
        response_code: code as i32,
        scheme_rewrite_specifier: scheme.cloned().map(SchemeRewriteSpecifier::SchemeRedirect),
        path_rewrite_specifier: path,
        ..Default::default()
    }
}

fn direct_response(from: &api::DirectResponse) -> route::DirectResponseAction {
    use core::data_source::Specifier::{InlineBytes, InlineString};
    let specifier = from.body.as_ref().and_then(|body| match &body.string {
        Some(text) => Some(InlineString(text.clone())),
        None => body.decoded().map(InlineBytes),
    });
    route::DirectResponseAction {
        status: from.status,
        body: specifier
            .map(|specifier| core::DataSource { specifier: Some(specifier), ..Default::default() }),
        ..Default::default()
    }
}

fn fault(from: &api::HttpFault) -> HttpFault {
    let delay = from.delay.as_ref().and_then(|delay| {
        let share = delay.percentage.map_or_else(
            || whole_percent(u32::try_from(delay.percent).unwrap_or_default()),
            |share| percent(share.value),
        );
        Some(FaultDelay {
            percentage: Some(share),
            fault_delay_secifier: Some(FaultDelaySecifier::FixedDelay(duration(delay.fixed_delay?.0))),
        })
    });
    let abort = from.abort.as_ref().and_then(|abort| {
        let grpc = || abort.grpc_status.as_deref().and_then(grpc_status).map(ErrorType::GrpcStatus);
        Some(FaultAbort {
            percentage: Some(
                abort.percentage.map_or_else(|| whole_percent(100), |share| percent(share.value)),
            ),
            error_type: Some(abort.http_status.map(ErrorType::HttpStatus).or_else(grpc)?),
            ..Default::default()
        })
    });
    HttpFault { delay, abort, ..Default::default() }
}

/// Returns the number of a gRPC status.
fn grpc_status(name: &str) -> Option<u32> {
    GRPC_STATUS.iter().position(|known| *known == name).and_then(|at| u32::try_from(at).ok())
}

fn cors(from: &api::CorsPolicy) -> CorsPolicy {
    let exact = |origin: &String| matching(matcher::string_matcher::MatchPattern::Exact(origin.clone()));
    let origins = from.allow_origins.iter().filter_map(string_matcher);
    CorsPolicy {
        allow_origin_string_match: origins.chain(from.allow_origin.iter().map(exact)).collect(),
        allow_methods: from.allow_methods.join(","),
        allow_headers: from.allow_headers.join(","),
        expose_headers: from.expose_headers.join(","),
        max_age: from.max_age.map(|length| length.0.as_secs().to_string()).unwrap_or_default(),
        allow_credentials: from.allow_credentials.and_then(boolean),
        filter_enabled: Some(core::RuntimeFractionalPercent {
            default_value: Some(whole_percent(100)),
            ..Default::default()
        }),
        forward_not_matching_preflights: boolean(from.unmatched_preflights.as_deref() != Some("IGNORE")),
        ..Default::default()
    }
}
