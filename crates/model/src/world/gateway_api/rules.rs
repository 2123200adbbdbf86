//! Rules of routes as rules of a VirtualService. Each rule has at most one match, so that rules can be sorted.

use std::{cmp::Reverse, collections::BTreeMap};

use super::Referrer;
use crate::api::{
    Duration, Kind, Meta, StringMatch,
    gateway_api::{
        BackendRef, Cors, Filter, FilterType, GrpcMatch, GrpcMethod, GrpcRule, HeaderFilter, HeaderValue,
        HttpMatch, HttpRouteRetry, HttpRule, L4Rule, MatchType, Mirror, NamedMatch, PathMatch, PathMatchType,
        PathModifierType, Redirect, UrlRewrite,
    },
    value::{Percent, PortSelector},
    virtual_service as istio,
    virtual_service::{Destination, HeaderOps, RedirectPort},
};

/// Status of requests for a rule without backends.
const NO_BACKEND: u32 = 500;

/// Maximum age of a preflight's result without `maxAge`, in seconds.
const DEFAULT_MAX_AGE: u32 = 5;

/// Expression for the origins that `*` allows, as in Istio: all but `null`.
const ANY_ORIGIN: &str = r"^[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s?#]+$";

/// Port of destinations by host without a port.
const DEFAULT_PORT: u32 = 80;

/// Conditions of retries without status codes: those of Istio, and `reset`, which Istio lacks. It covers the other failures
/// that the specification says should be retried: disconnects, resets, and the timeout of a try.
const CONNECTION_FAILURES: &[&str] =
    &["connect-failure", "refused-stream", "reset", "unavailable", "cancelled"];

/// Number of retries without `attempts`.
const DEFAULT_RETRIES: i32 = 2;

/// Converts the rules of an HTTPRoute. Without rules every request matches, and there is no backend.
pub(super) fn of_http(
    meta: &Meta,
    rules: &[HttpRule],
    referrer: &Referrer<'_>,
) -> Vec<istio::IstioHttpRoute> {
    let none = [HttpRule::default()];
    let rules = if rules.is_empty() { &none } else { rules };
    let mut made = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let base = http_base(meta, index, rule, referrer);
        let every = [HttpMatch::default()];
        let matches = if rule.matches.is_empty() { &every[..] } else { &rule.matches };
        made.extend(matches.iter().map(|found| with_match(&base, http_match(found))));
    }
    made
}

/// Converts the rules of a GRPCRoute.
pub(super) fn of_grpc(
    meta: &Meta,
    rules: &[GrpcRule],
    referrer: &Referrer<'_>,
) -> Vec<istio::IstioHttpRoute> {
    let mut made = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let mut base = base(Kind::GrpcRoute, meta, index, rule.name.as_ref());
        filters(&mut base, &rule.filters, referrer);
        destinations(&mut base, &rule.backend_refs, referrer);
        if rule.matches.is_empty() {
            made.push(base);
            continue;
        }
        made.extend(rule.matches.iter().map(|found| with_match(&base, grpc_match(found))));
    }
    made
}

/// Converts the rules of a TLSRoute or a TCPRoute to weighted destinations.
pub(super) fn of_connections(rules: &[L4Rule], referrer: &Referrer<'_>) -> Vec<istio::L4Destination> {
    // As in Istio, only the first rule with backends counts: rules have no conditions.
    let backends = rules.iter().map(|rule| &rule.backend_refs).find(|refs| !refs.is_empty());
    let positive = backends.into_iter().flatten().filter(|backend| backend.share() > 0);
    let to = |backend| istio::L4Destination {
        destination: destination(backend, referrer),
        weight: backend.share(),
    };
    positive.map(to).collect()
}

/// Sorts rules of several routes by precedence as Gateway API defines it. Rules of equal precedence keep their order.
pub(super) fn sort(rules: &mut [istio::IstioHttpRoute]) {
    rules.sort_by_key(|rule| {
        let Some(found) = rule.matches.first() else { return (true, Reverse((0, 0, false, 0, 0))) };
        let (rank, length) = match &found.uri {
            Some(StringMatch::Exact(path)) => (3, path.len()),
            Some(StringMatch::Prefix(path)) => (2, path.len()),
            Some(StringMatch::Regex(path)) => (1, path.len()),
            Some(StringMatch::Present) | None => (0, 0),
        };
        let parts = (found.headers.len(), found.query_params.len());
        (false, Reverse((rank, length, found.method.is_some(), parts.0, parts.1)))
    });
}

fn base(kind: Kind, meta: &Meta, index: usize, name: Option<&String>) -> istio::IstioHttpRoute {
    let rule = name.map_or("", String::as_str).into();
    let source = istio::RouteSource { kind, route: meta.name.as_str().into(), rule };
    let name = name.cloned().unwrap_or_else(|| format!("{}.{}.{index}", meta.namespace, meta.name));
    istio::IstioHttpRoute { name, source: Some(source), ..Default::default() }
}

fn with_match(base: &istio::IstioHttpRoute, found: istio::HttpMatchRequest) -> istio::IstioHttpRoute {
    istio::IstioHttpRoute { matches: vec![found], ..base.clone() }
}

fn http_base(meta: &Meta, index: usize, rule: &HttpRule, referrer: &Referrer<'_>) -> istio::IstioHttpRoute {
    let mut base = base(Kind::HttpRoute, meta, index, rule.name.as_ref());
    filters(&mut base, &rule.filters, referrer);
    let timeouts = rule.timeouts.unwrap_or_default();
    let set = |timeout: Option<Duration>| timeout.filter(|timeout| *timeout != Duration::ZERO);
    let (request, each) = (set(timeouts.request), set(timeouts.backend_request));
    base.retries = rule.retry.as_ref().map(|retry| retries(retry, each));
    // Without retries of the rule's own, the shorter of the two limits the request.
    base.timeout = if rule.retry.is_some() { request } else { each.or(request) };
    destinations(&mut base, &rule.backend_refs, referrer);
    base
}

/// Converts retries. Failures of connections and timeouts of a try are retried too.
fn retries(from: &HttpRouteRetry, per_try_timeout: Option<Duration>) -> istio::HttpRetry {
    let codes = from.codes.iter().map(u32::to_string);
    let conditions = CONNECTION_FAILURES.iter().map(ToString::to_string).chain(codes);
    istio::HttpRetry {
        attempts: from.attempts.unwrap_or(DEFAULT_RETRIES),
        per_try_timeout,
        retry_on: conditions.collect::<Vec<_>>().join(","),
        backoff: from.backoff.filter(|backoff| *backoff != Duration::ZERO),
        ..Default::default()
    }
}

/// Sets the destinations, or a response if there is none.
fn destinations(to: &mut istio::IstioHttpRoute, backends: &[BackendRef], referrer: &Referrer<'_>) {
    if to.redirect.is_some() {
        return;
    }
    let positive: Vec<&BackendRef> = backends.iter().filter(|backend| backend.share() > 0).collect();
    if positive.is_empty() {
        // Rewrites and mirrors belong to forwarded requests.
        to.direct_response = Some(istio::DirectResponse { status: NO_BACKEND, body: None });
        return;
    }
    let weighted = |backend: &&BackendRef| istio::HttpDestination {
        destination: destination(backend, referrer),
        weight: Some(backend.share()),
        headers: headers(&backend.filters),
    };
    to.route = positive.iter().map(weighted).collect();
}

/// Returns the destination of a backend. A refused reference has no host.
fn destination(backend: &BackendRef, referrer: &Referrer<'_>) -> Destination {
    match referrer.backend_host(backend) {
        Ok(host) => {
            let port = PortSelector { number: backend.port.unwrap_or(DEFAULT_PORT) };
            Destination { host, subset: String::new(), port: Some(port) }
        }
        Err(_) => Destination::default(),
    }
}

fn filters(to: &mut istio::IstioHttpRoute, list: &[Filter], referrer: &Referrer<'_>) {
    to.headers = headers(list);
    for filter in list {
        match filter.kind {
            Some(FilterType::RequestMirror) => {
                to.mirrors.extend(filter.request_mirror.iter().map(|mirror| self::mirror(mirror, referrer)));
            }
            Some(FilterType::RequestRedirect) => {
                to.redirect = filter.request_redirect.as_ref().map(redirect);
            }
            Some(FilterType::UrlRewrite) => to.rewrite = filter.url_rewrite.as_ref().and_then(rewrite),
            Some(FilterType::Cors) => to.cors_policy = filter.cors.as_ref().map(cors),
            // Validation refuses the other ones.
            _ => {}
        }
    }
}

/// Returns the changes of headers of all filters.
fn headers(list: &[Filter]) -> Option<istio::Headers> {
    let mut headers = istio::Headers::default();
    for filter in list {
        match filter.kind {
            Some(FilterType::RequestHeaderModifier) => {
                headers.request = filter.request_header_modifier.as_ref().map(changes).unwrap_or_default();
            }
            Some(FilterType::ResponseHeaderModifier) => {
                headers.response = filter.response_header_modifier.as_ref().map(changes).unwrap_or_default();
            }
            _ => {}
        }
    }
    (headers != istio::Headers::default()).then_some(headers)
}

fn changes(filter: &HeaderFilter) -> HeaderOps {
    let map = |list: &[HeaderValue]| -> BTreeMap<String, String> {
        list.iter().map(|header| (header.name.clone(), header.value.clone())).collect()
    };
    HeaderOps { set: map(&filter.set), add: map(&filter.add), remove: filter.remove.clone() }
}

fn mirror(mirror: &Mirror, referrer: &Referrer<'_>) -> istio::HttpMirror {
    let of_fraction = mirror
        .fraction
        .map(|share| f64::from(share.numerator) * 100.0 / f64::from(share.denominator.unwrap_or(100).max(1)));
    let share = mirror.percent.map(f64::from).or(of_fraction);
    istio::HttpMirror {
        destination: destination(&mirror.backend_ref, referrer),
        percentage: share.map(|value| Percent { value }),
    }
}

fn redirect(from: &Redirect) -> istio::HttpRedirect {
    let derive = match (from.port, &from.scheme) {
        (Some(_), _) => None,
        (None, Some(_)) => Some(RedirectPort::FromProtocolDefault),
        (None, None) => Some(RedirectPort::FromRequestPort),
    };
    let (mut uri, mut prefix_rewrite) = (String::new(), String::new());
    if let Some(path) = &from.path {
        match path.kind {
            Some(PathModifierType::ReplacePrefixMatch) => {
                prefix_rewrite = prefix(path.replace_prefix_match.as_ref());
            }
            _ => uri = path.replace_full_path.clone().unwrap_or_default(),
        }
    }
    istio::HttpRedirect {
        uri,
        prefix_rewrite,
        authority: from.hostname.clone().unwrap_or_default(),
        port: from.port,
        derive_port: derive,
        scheme: from.scheme.clone().unwrap_or_default(),
        redirect_code: from.status_code.unwrap_or(302),
    }
}

/// Returns the replacement of a prefix without a slash at its end; `/` removes the matched prefix.
fn prefix(replacement: Option<&String>) -> String {
    match replacement.map_or("", |path| path.trim_end_matches('/')) {
        "" => "/".to_owned(),
        path => path.to_owned(),
    }
}

fn rewrite(from: &UrlRewrite) -> Option<istio::HttpRewrite> {
    let mut made =
        istio::HttpRewrite { authority: from.hostname.clone().unwrap_or_default(), ..Default::default() };
    if let Some(path) = &from.path {
        match path.kind {
            Some(PathModifierType::ReplacePrefixMatch) => {
                made.uri = prefix(path.replace_prefix_match.as_ref());
            }
            _ => {
                made.uri_regex_rewrite = Some(istio::RegexRewrite {
                    pattern: "/.*".to_owned(),
                    rewrite: path.replace_full_path.clone().unwrap_or_default(),
                });
            }
        }
    }
    (made != istio::HttpRewrite::default()).then_some(made)
}

fn cors(from: &Cors) -> istio::CorsPolicy {
    let origin = |origin: &String| match origin.contains('*') {
        _ if origin == "*" => StringMatch::Regex(ANY_ORIGIN.to_owned()),
        true => StringMatch::Regex(format!("^{}$", origin.replace('.', r"\.").replace('*', ".*"))),
        false => StringMatch::Exact(origin.clone()),
    };
    let max_age = u64::from(from.max_age.unwrap_or(DEFAULT_MAX_AGE));
    istio::CorsPolicy {
        allow_origins: from.allow_origins.iter().map(origin).collect(),
        allow_methods: from.allow_methods.clone(),
        allow_headers: from.allow_headers.clone(),
        expose_headers: from.expose_headers.clone(),
        max_age: Some(Duration(std::time::Duration::from_secs(max_age))),
        allow_credentials: from.allow_credentials.filter(|allow| *allow),
        unmatched_preflights: Some("IGNORE".to_owned()),
        ..Default::default()
    }
}

fn http_match(found: &HttpMatch) -> istio::HttpMatchRequest {
    istio::HttpMatchRequest {
        uri: Some(path(found.path.as_ref())),
        headers: named(&found.headers, true),
        query_params: named(&found.query_params, false),
        method: found.method.clone().map(StringMatch::Exact),
        ..Default::default()
    }
}

fn path(found: Option<&PathMatch>) -> StringMatch {
    let kind = found.map(|path| path.kind).unwrap_or_default();
    let value = found.and_then(|path| path.value.as_deref()).unwrap_or("/");
    match kind {
        PathMatchType::Exact => StringMatch::Exact(value.to_owned()),
        PathMatchType::RegularExpression => StringMatch::Regex(value.to_owned()),
        PathMatchType::PathPrefix if value == "/" => StringMatch::Prefix(value.to_owned()),
        PathMatchType::PathPrefix => StringMatch::Prefix(value.strip_suffix('/').unwrap_or(value).to_owned()),
    }
}

/// Returns the first match of each name, as the specification demands. Names of headers have no case.
fn named(list: &[NamedMatch], are_headers: bool) -> BTreeMap<String, StringMatch> {
    let mut made = BTreeMap::new();
    for found in list {
        let name = if are_headers { found.name.to_ascii_lowercase() } else { found.name.clone() };
        made.entry(name).or_insert_with(|| match found.kind {
            MatchType::Exact => StringMatch::Exact(found.value.clone()),
            MatchType::RegularExpression => StringMatch::Regex(found.value.clone()),
        });
    }
    made
}

fn grpc_match(found: &GrpcMatch) -> istio::HttpMatchRequest {
    istio::HttpMatchRequest {
        uri: found.method.as_ref().map(grpc_path),
        headers: named(&found.headers, true),
        ..Default::default()
    }
}

/// Returns the condition for the path of a gRPC method: `/SERVICE/METHOD`.
fn grpc_path(found: &GrpcMethod) -> StringMatch {
    let (service, method) = (found.service.as_deref(), found.method.as_deref());
    match (found.kind, service, method) {
        (_, None, None) => StringMatch::Prefix("/".into()),
        (MatchType::Exact, Some(service), None) => StringMatch::Prefix(format!("/{service}/")),
        (MatchType::Exact, Some(service), Some(method)) => StringMatch::Exact(format!("/{service}/{method}")),
        // An exact method of any service: its text is not an expression.
        (MatchType::Exact, None, Some(method)) => {
            StringMatch::Regex(format!("/[^/]+/{}", regex::escape(method)))
        }
        (MatchType::RegularExpression, Some(service), None) => StringMatch::Regex(format!("/{service}/.+")),
        (MatchType::RegularExpression, Some(service), Some(method)) => {
            StringMatch::Regex(format!("/{service}/{method}"))
        }
        (MatchType::RegularExpression, None, Some(method)) => StringMatch::Regex(format!("/[^/]+/{method}")),
    }
}
