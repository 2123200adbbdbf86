//! HTTP rules of a VirtualService as routes of one port.

use std::collections::BTreeMap;

use super::{
    RouteRule,
    action::{self, RoutePort},
};
use crate::{
    api::{
        StringMatch,
        virtual_service::{HttpMatchRequest, IstioHttpRoute},
    },
    compile::{
        Scope,
        client_match::{ClientConditions, ClientFacts, exclusion},
        pb::{boolean, config_path, fields, matcher, matching, metadata, regex, route},
        rate_limit,
    },
};

use matcher::{string_matcher::MatchPattern, value_matcher::MatchPattern as MatchValue};
use route::{
    header_matcher::HeaderMatchSpecifier, query_parameter_matcher::QueryParameterMatchSpecifier,
    route_match::PathSpecifier,
};

/// Prefix of headers that mean claims of a verified token.
const CLAIMS: &str = "@request.auth.claims";

/// Returns the routes of a VirtualService on a port for one client; empty if none applies.
pub(super) fn routes(scope: &Scope<'_>, rule: &RouteRule, port: u16) -> Vec<route::Route> {
    of_port(&RoutePort { scope, rule, number: port, gateway: None })
}

/// Returns the routes of a VirtualService at a Gateway (`NAMESPACE/NAME`); empty if none applies. `port` is the number
/// of the server's port.
pub(in crate::compile) fn at_gateway(
    scope: &Scope<'_>,
    rule: &RouteRule,
    port: u16,
    gateway: &str,
) -> Vec<route::Route> {
    of_port(&RoutePort { scope, rule, number: port, gateway: Some(gateway) })
}

fn of_port(port: &RoutePort<'_>) -> Vec<route::Route> {
    let mut routes = Vec::new();
    for_each(port, |_, made| routes.push(made));
    routes
}

/// Returns the fields of a VirtualService that cause its routes on a port, one for each route: for sidecars, or at a
/// Gateway (`NAMESPACE/NAME`).
pub(in crate::compile) fn field_paths(
    scope: &Scope<'_>,
    rule: &RouteRule,
    port: u16,
    gateway: Option<&str>,
) -> Vec<String> {
    let mut found = Vec::new();
    for_each(&RoutePort { scope, rule, number: port, gateway }, |(http, matched), _| {
        found.push(match matched {
            Some(matched) => format!("spec.http[{http}].match[{matched}]"),
            None => format!("spec.http[{http}]"),
        });
    });
    found
}

/// Calls `take` with each route, and the indices of its rule and its match.
fn for_each(port: &RoutePort<'_>, mut take: impl FnMut((usize, Option<usize>), route::Route)) {
    for (index, http) in port.scope.world.http_rules(port.rule).iter().enumerate() {
        if http.matches.is_empty() {
            if let Some(made) = route(port, http, None) {
                take((index, None), made);
            }
            // Later routes could never be reached.
            return;
        }
        let matches = http.matches.iter().enumerate().filter(|(_, found)| applies(port, found));
        for (matched, found) in matches {
            let Some(made) = route(port, http, Some(found)) else { continue };
            let last = matches_everything(&made);
            take((index, Some(matched)), made);
            if last {
                return;
            }
        }
    }
}

/// Returns whether a match applies to the client and the port. Both are known here, so requests need not be checked.
fn applies(port: &RoutePort<'_>, found: &HttpMatchRequest) -> bool {
    let RoutePort { scope, rule, number, gateway } = *port;
    let client = ClientFacts { port: number, gateway, labels: scope.labels, namespace: scope.namespace };
    let is_for_role = gateway.is_some() || found.is_for_mesh(&rule.spec);
    is_for_role && exclusion(&conditions(found), &client, &rule.meta.namespace).is_none()
}

/// Returns the conditions of a match on the client.
pub(in crate::compile) fn conditions(found: &HttpMatchRequest) -> ClientConditions<'_> {
    ClientConditions {
        port: found.port,
        gateways: &found.gateways,
        labels: &found.source_labels,
        namespace: found.source_namespace.as_deref().unwrap_or_default(),
    }
}

/// Returns whether a route matches every request.
pub(in crate::compile) fn matches_everything(route: &route::Route) -> bool {
    route.r#match.as_ref().is_some_and(|found| {
        let every_path =
            matches!(&found.path_specifier, Some(PathSpecifier::Prefix(prefix)) if prefix == "/");
        let unconditional = found.headers.is_empty() && found.dynamic_metadata.is_empty();
        every_path && unconditional && found.query_parameters.is_empty()
    })
}

fn route(
    port: &RoutePort<'_>,
    http: &IstioHttpRoute,
    found: Option<&HttpMatchRequest>,
) -> Option<route::Route> {
    let meta = &port.rule.meta;
    let action = action::of_route(port, http)?;
    let path = config_path("virtual-service", &meta.namespace, &meta.name);
    let matched = found.map_or_else(super::every_path, |found| route_match(port.rule, found));
    let operation = operation(port, &action, &matched);
    let mut settings = action::per_filter(port.scope, http);
    if port.gateway.is_some() {
        settings.extend(rate_limit::of_route(port.scope.world, port.rule, http));
    }
    let mut made = route::Route {
        name: match found.map(|found| found.name.as_str()) {
            Some(name) if !name.is_empty() => format!("{}.{name}", http.name),
            _ => http.name.clone(),
        },
        r#match: Some(matched),
        metadata: Some(metadata("istio", fields([("config", path)]))),
        decorator: Some(route::Decorator { operation, ..Default::default() }),
        typed_per_filter_config: settings,
        stat_prefix: found.map(|found| found.stat_prefix.clone()).unwrap_or_default(),
        action: Some(action),
        ..Default::default()
    };
    action::change_headers(&mut made, http);
    Some(made)
}

/// Returns the operation name of a route in traces.
fn operation(port: &RoutePort<'_>, action: &route::route::Action, matched: &route::RouteMatch) -> String {
    let path = match &matched.path_specifier {
        Some(PathSpecifier::Prefix(prefix)) => format!("{prefix}*"),
        Some(PathSpecifier::Path(path)) => path.clone(),
        Some(PathSpecifier::SafeRegex(regex)) => regex.regex.clone(),
        _ => "/*".into(),
    };
    match action::single_cluster(action) {
        Some(cluster) => format!("{}:{}{path}", cluster.host, cluster.port),
        None => format!("{}:{}{path}", port.rule.meta.name, port.number),
    }
}

fn route_match(rule: &RouteRule, found: &HttpMatchRequest) -> route::RouteMatch {
    let path = match &found.uri {
        Some(StringMatch::Exact(path)) => PathSpecifier::Path(path.clone()),
        // Gateway API compares whole path elements.
        Some(StringMatch::Prefix(prefix)) if rule.spec.derived.is_some() && prefix != "/" => {
            PathSpecifier::PathSeparatedPrefix(prefix.trim_end_matches('/').to_owned())
        }
        Some(StringMatch::Prefix(prefix)) => PathSpecifier::Prefix(prefix.clone()),
        Some(StringMatch::Regex(expression)) => PathSpecifier::SafeRegex(regex(expression)),
        Some(StringMatch::Present) | None => PathSpecifier::Prefix("/".into()),
    };
    let parameters = found.query_params.iter().map(|(name, wanted)| route::QueryParameterMatcher {
        name: name.clone(),
        query_parameter_match_specifier: Some(match string_matcher(wanted) {
            Some(wanted) => QueryParameterMatchSpecifier::StringMatch(wanted),
            None => QueryParameterMatchSpecifier::PresentMatch(true),
        }),
    });
    route::RouteMatch {
        path_specifier: Some(path),
        case_sensitive: boolean(!found.ignore_uri_case),
        headers: headers(found),
        dynamic_metadata: claims(found),
        query_parameters: parameters.collect(),
        ..Default::default()
    }
}

/// Returns the header matchers: headers by name, then the pseudo-headers of HTTP/2.
fn headers(found: &HttpMatchRequest) -> Vec<route::HeaderMatcher> {
    let mut named: BTreeMap<(&str, bool), route::HeaderMatcher> = BTreeMap::new();
    for (name, wanted) in found.headers.iter().filter(|(name, _)| !is_claim(name)) {
        named.insert((name, false), header(name, wanted));
    }
    for (name, unwanted) in found.without_headers.iter().filter(|(name, _)| !is_claim(name)) {
        let mut matcher = header(name, unwanted);
        matcher.invert_match = true;
        // A request without the header does not have the value.
        matcher.treat_missing_header_as_empty =
            matches!(matcher.header_match_specifier, Some(HeaderMatchSpecifier::StringMatch(_)));
        named.insert((name, true), matcher);
    }
    let mut list: Vec<_> = named.into_values().collect();
    let parts = [(":method", &found.method), (":authority", &found.authority), (":scheme", &found.scheme)];
    list.extend(parts.into_iter().filter_map(|(name, wanted)| Some(header(name, wanted.as_ref()?))));
    list
}

/// Returns whether a header means a claim of a verified token: `@request.auth.claims.NAME`.
fn is_claim(name: &str) -> bool {
    name.starts_with(CLAIMS)
}

/// Returns the matchers for claims of verified tokens. A claim is a text or a list of texts.
fn claims(found: &HttpMatchRequest) -> Vec<matcher::MetadataMatcher> {
    let of = |(name, wanted): (&String, &StringMatch), invert| {
        let value =
            string_matcher(wanted).map(MatchValue::StringMatch).unwrap_or(MatchValue::PresentMatch(true));
        let value = matcher::ValueMatcher { match_pattern: Some(value) };
        let one_of = Some(matcher::list_matcher::MatchPattern::OneOf(Box::new(value.clone())));
        let list = MatchValue::ListMatch(Box::new(matcher::ListMatcher { match_pattern: one_of }));
        let list = matcher::ValueMatcher { match_pattern: Some(list) };
        let either = matcher::OrMatcher { value_matchers: vec![list, value] };
        let path = std::iter::once("payload").chain(claim_path(name)).map(|key| {
            let segment = matcher::metadata_matcher::path_segment::Segment::Key(key.to_owned());
            matcher::metadata_matcher::PathSegment { segment: Some(segment) }
        });
        matcher::MetadataMatcher {
            filter: "envoy.filters.http.jwt_authn".into(),
            path: path.collect(),
            value: Some(matcher::ValueMatcher { match_pattern: Some(MatchValue::OrMatch(either)) }),
            invert,
        }
    };
    let claim = |(name, _): &(&String, &StringMatch)| is_claim(name);
    let wanted = found.headers.iter().filter(claim).map(|entry| of(entry, false));
    wanted.chain(found.without_headers.iter().filter(claim).map(|entry| of(entry, true))).collect()
}

/// Returns the names of nested claims: `@request.auth.claims.a.b` or `@request.auth.claims[a][b]`.
fn claim_path(name: &str) -> impl Iterator<Item = &str> {
    let rest = &name[CLAIMS.len()..];
    let separators: &[char] = if rest.starts_with('[') { &['[', ']'] } else { &['.'] };
    rest.split(separators).filter(|key| !key.is_empty())
}

fn header(name: &str, wanted: &StringMatch) -> route::HeaderMatcher {
    route::HeaderMatcher {
        name: name.to_owned(),
        header_match_specifier: Some(match string_matcher(wanted) {
            Some(wanted) => HeaderMatchSpecifier::StringMatch(wanted),
            None => HeaderMatchSpecifier::PresentMatch(true),
        }),
        ..Default::default()
    }
}

/// Returns a matcher for a text; `None` if only presence is required.
pub(super) fn string_matcher(wanted: &StringMatch) -> Option<matcher::StringMatcher> {
    let text = wanted.text().to_owned();
    if text.is_empty() {
        return None;
    }
    Some(matching(match wanted {
        StringMatch::Present => return None,
        StringMatch::Exact(_) => MatchPattern::Exact(text),
        StringMatch::Prefix(_) => MatchPattern::Prefix(text),
        StringMatch::Regex(_) => MatchPattern::SafeRegex(regex(text)),
    }))
}
