//! Translates route tables.

use std::{sync::Arc, time::Duration};

use prost::Message;
use skysail_core::names;
use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            core::v3::{
                HeaderValueOption, config_source::ConfigSourceSpecifier,
                header_value_option::HeaderAppendAction,
            },
            route::v3::{
                DirectResponseAction, RedirectAction, RetryPolicy as RetryProto, Route as RouteProto,
                RouteAction, RouteConfiguration, RouteMatch as MatchProto, Vhds, VirtualHost as HostProto,
                WeightedCluster,
                redirect_action::{PathRewriteSpecifier, RedirectResponseCode, SchemeRewriteSpecifier},
                retry_policy, route,
                route_action::{
                    ClusterNotFoundResponseCode, ClusterSpecifier, HashPolicy as HashProto,
                    HostRewriteSpecifier, RequestMirrorPolicy, hash_policy::PolicySpecifier,
                },
                route_match::PathSpecifier,
                virtual_host::TlsRequirementType,
                weighted_cluster::{ClusterWeight, cluster_weight},
            },
        },
        extensions::{
            path::r#match::uri_template::v3::UriTemplateMatchConfig,
            retry::priority::previous_priorities::v3::PreviousPrioritiesConfig,
        },
    },
    google::protobuf::{Duration as DurationProto, value::Kind as ValueKind},
};

use super::{
    At as _, Reject, Result, duration, flag, limit_rules, lua, number, policy,
    route_filters::{PerFilter, status_code},
    text, timeout, tls_context, trace, type_name, unpack,
};
use skysail_http::head;
use skysail_policy::config::limit::RouteRules;
use skysail_policy::config::route::{
    Action, AppendAction, DirectResponse, Forward, GrpcTimeout, HashCookie, HashKey, HashPolicy, HeaderOp,
    HeaderOps, HostRewrite, Mirror, PathMatch, Redirect, RedirectPath, RetryOn, RetryPolicy, Rewrite, Route,
    RouteMatch, RouteTable, Target, Targets, VirtualHost,
};

/// Envoy's defaults.
const TIMEOUT: Duration = Duration::from_secs(15);
const BACKOFF_BASE: Duration = Duration::from_millis(25);

/// Returns the domains of a virtual host, in lower case.
pub(crate) fn domains(host: &[u8]) -> Result<Vec<String>> {
    #[derive(Clone, PartialEq, Message)]
    struct Domains {
        #[prost(string, repeated, tag = "2")]
        domains: Vec<String>,
    }
    let host = Domains::decode(host).map_err(|error| Reject::new(error.to_string()))?;
    Ok(host.domains.into_iter().map(|domain| domain.to_ascii_lowercase()).collect())
}

/// Returns whether the route configuration receives virtual hosts by VHDS.
pub(crate) fn uses_vhds(body: &[u8]) -> Result<bool> {
    #[derive(Clone, PartialEq, Message)]
    struct VhdsField {
        #[prost(message, optional, tag = "9")]
        vhds: Option<Vhds>,
    }
    let apart = VhdsField::decode(body).map_err(|error| Reject::new(error.to_string()))?;
    let Some(vhds) = apart.vhds else { return Ok(false) };
    match vhds.config_source.and_then(|source| source.config_source_specifier) {
        Some(ConfigSourceSpecifier::Ads(_)) => Ok(true),
        _ => {
            Err(Reject::new("virtual hosts must come over ADS: set `ads: {}`").at_field("vhds.config_source"))
        }
    }
}

/// Translates a route table and builds its index of domains.
///
/// `checks_clusters` is the default of `validate_clusters`.
pub(super) fn translate(proto: &RouteConfiguration, checks_clusters: bool) -> Result<RouteTable> {
    let mut table = RouteTable {
        checks_clusters: flag(proto.validate_clusters).unwrap_or(checks_clusters),
        name: proto.name.as_str().into(),
        ignore_port: proto.ignore_port_in_host_matching,
        headers: ops(
            (&proto.request_headers_to_add, &proto.request_headers_to_remove),
            (&proto.response_headers_to_add, &proto.response_headers_to_remove),
        )?,
        ..RouteTable::default()
    };
    let filters = PerFilter::default().with(&proto.typed_per_filter_config)?;
    for (index, host) in proto.virtual_hosts.iter().enumerate() {
        let path = format_args!("virtual_hosts[{index}]").to_string();
        let translated = virtual_host(host, &filters).at(&path)?;
        table.takes_unanswered |= takes_unanswered(host);
        for domain in &host.domains {
            if !table.put(&domain.to_ascii_lowercase(), index) {
                let twice = format!("{domain:?} is in two virtual hosts or twice in one");
                return Err(Reject::new(twice)).at("domains").at(&path);
            }
        }
        table.hosts.push(Arc::new(translated));
    }
    Ok(table)
}

/// Returns whether the catch-all is marked to accept hosts for which the control plane has not answered.
fn takes_unanswered(host: &HostProto) -> bool {
    let metadata = host.metadata.as_ref().filter(|_| host.domains.iter().any(|domain| domain == "*"));
    let value = metadata.and_then(|metadata| {
        metadata.filter_metadata.get(names::METADATA)?.fields.get(names::TAKES_UNANSWERED)
    });
    matches!(value.and_then(|value| value.kind.as_ref()), Some(ValueKind::StringValue(text)) if text == "true")
}

fn virtual_host(proto: &HostProto, filters: &PerFilter) -> Result<VirtualHost> {
    let filters = filters.with(&proto.typed_per_filter_config)?;
    let retry = proto.retry_policy.as_ref().map(retry_policy).transpose().at("retry_policy")?.map(Arc::new);
    let require_tls = match proto.require_tls() {
        TlsRequirementType::None => false,
        TlsRequirementType::All => true,
        TlsRequirementType::ExternalOnly => {
            return Err(
                Reject::new("EXTERNAL_ONLY is not supported: use ALL or NONE").at_field("require_tls")
            );
        }
    };
    let mut routes = Vec::with_capacity(proto.routes.len());
    for (index, route) in proto.routes.iter().enumerate() {
        routes.push(self::route(route, &filters, retry.as_ref()).at(format_args!("routes[{index}]"))?);
    }
    Ok(VirtualHost {
        name: proto.name.as_str().into(),
        routes,
        headers: ops(
            (&proto.request_headers_to_add, &proto.request_headers_to_remove),
            (&proto.response_headers_to_add, &proto.response_headers_to_remove),
        )?,
        include_attempt_count: proto.include_request_attempt_count,
        require_tls,
        limits: limit_rules::translate(&proto.rate_limits)?,
        used: Arc::default(),
    })
}

fn route(proto: &RouteProto, filters: &PerFilter, retry: Option<&Arc<RetryPolicy>>) -> Result<Route> {
    let filters = filters.with(&proto.typed_per_filter_config)?;
    let matches = proto.r#match.as_ref().ok_or_else(|| Reject::new("must be given").at_field("match"))?;
    let action = match &proto.action {
        Some(route::Action::Route(action)) => Action::Forward(forward(action, retry).at("route")?),
        Some(route::Action::Redirect(action)) => Action::Redirect(redirect(action).at("redirect")?),
        Some(route::Action::DirectResponse(action)) => Action::Direct(direct(action).at("direct_response")?),
        _ => return Err(Reject::new("needs a route, a redirect or a direct_response")),
    };
    Ok(Route {
        name: proto.name.as_str().into(),
        matches: route_match(matches).at("match")?,
        action,
        headers: ops(
            (&proto.request_headers_to_add, &proto.request_headers_to_remove),
            (&proto.response_headers_to_add, &proto.response_headers_to_remove),
        )?,
        filters: filters.0,
        metadata: lua::metadata(proto.metadata.as_ref())?,
        decorator: proto.decorator.as_ref().and_then(trace::decorator),
        tracing: proto.tracing.as_ref().map(trace::route).transpose().at("tracing")?.map(Box::new),
        stat_prefix: (!proto.stat_prefix.is_empty()).then(|| proto.stat_prefix.as_str().into()),
    })
}

/// Translates a route match.
pub(super) fn route_match(proto: &MatchProto) -> Result<RouteMatch> {
    let case_sensitive = flag(proto.case_sensitive).unwrap_or(true);
    let bytes = |text: &str| -> Box<[u8]> {
        let text = if case_sensitive { text.to_owned() } else { text.to_ascii_lowercase() };
        text.into_bytes().into()
    };
    let path = match &proto.path_specifier {
        Some(PathSpecifier::Prefix(prefix)) => PathMatch::Prefix(bytes(prefix)),
        Some(PathSpecifier::Path(path)) => PathMatch::Exact(bytes(path)),
        Some(PathSpecifier::PathSeparatedPrefix(prefix)) => PathMatch::SeparatedPrefix(bytes(prefix)),
        Some(PathSpecifier::SafeRegex(pattern)) => {
            PathMatch::Regex(text::anchored(&pattern.regex).at("safe_regex")?)
        }
        Some(PathSpecifier::PathMatchPolicy(extension)) => match &extension.typed_config {
            Some(any) if type_name(any).ends_with(".UriTemplateMatchConfig") => {
                let template: UriTemplateMatchConfig = unpack(any).at("path_match_policy")?;
                let regex = policy::template_regex(&template.path_template).at("path_match_policy")?;
                PathMatch::Template(regex)
            }
            _ => return Err(Reject::new("must be a UriTemplateMatchConfig").at_field("path_match_policy")),
        },
        Some(PathSpecifier::ConnectMatcher(_)) => PathMatch::Connect,
        None => return Err(Reject::new("must say which paths it matches")),
    };
    let fraction = proto.runtime_fraction.as_ref().and_then(|fraction| fraction.default_value.as_ref());
    let query =
        proto.query_parameters.iter().map(text::query).collect::<Result<_>>().at("query_parameters")?;
    let metadata =
        proto.dynamic_metadata.iter().map(text::metadata).collect::<Result<_>>().at("dynamic_metadata")?;
    Ok(RouteMatch {
        path,
        case_sensitive,
        headers: text::headers(&proto.headers)?,
        query,
        metadata,
        grpc: proto.grpc.is_some(),
        fraction: fraction.map(text::millionths),
    })
}

#[expect(deprecated, reason = "Istio sends max_grpc_timeout")]
fn forward(proto: &RouteAction, host_retry: Option<&Arc<RetryPolicy>>) -> Result<Forward> {
    let stream = proto.max_stream_duration.unwrap_or_default();
    let max_duration = stream.max_stream_duration.as_ref().map(duration).transpose();
    let max_duration = max_duration.at("max_stream_duration.max_stream_duration")?;
    let grpc_duration =
        grpc_timeout(stream.grpc_timeout_header_max.as_ref(), stream.grpc_timeout_header_offset.as_ref());
    let mut mirrors = Vec::new();
    for (index, mirror) in proto.request_mirror_policies.iter().enumerate() {
        mirrors.push(self::mirror(mirror).at(format_args!("request_mirror_policies[{index}]"))?);
    }
    Ok(Forward {
        targets: targets(proto.cluster_specifier.as_ref())?,
        cluster_not_found: match proto.cluster_not_found_response_code() {
            ClusterNotFoundResponseCode::ServiceUnavailable => 503,
            ClusterNotFoundResponseCode::NotFound => 404,
            ClusterNotFoundResponseCode::InternalServerError => 500,
        },
        timeout: timeout(proto.timeout.as_ref(), Some(TIMEOUT)).at("timeout")?,
        grpc_timeout: grpc_timeout(proto.max_grpc_timeout.as_ref(), proto.grpc_timeout_offset.as_ref())
            .at("max_grpc_timeout")?,
        max_duration,
        grpc_duration: grpc_duration.at("max_stream_duration")?,
        idle_timeout: timeout(proto.idle_timeout.as_ref(), None).at("idle_timeout")?,
        retry: match &proto.retry_policy {
            Some(policy) => Some(Arc::new(retry_policy(policy).at("retry_policy")?)),
            None => host_retry.cloned(),
        },
        rewrite: match (&proto.regex_rewrite, proto.prefix_rewrite.as_str()) {
            (Some(rewrite), "") => {
                let (pattern, replacement) = text::substitution(rewrite).at("regex_rewrite")?;
                Some(Rewrite::Regex(pattern, replacement))
            }
            (None, "") => None,
            (None, prefix) => Some(Rewrite::Prefix(prefix.into())),
            (Some(_), _) => return Err(Reject::new("prefix_rewrite and regex_rewrite exclude each other")),
        },
        host: host_rewrite(proto.host_rewrite_specifier.as_ref())?,
        append_forwarded_host: proto.append_x_forwarded_host,
        mirrors,
        upgrades: proto
            .upgrade_configs
            .iter()
            .map(|config| {
                (config.upgrade_type.to_ascii_lowercase().into(), flag(config.enabled).unwrap_or(true))
            })
            .collect(),
        hash: hash_policies(&proto.hash_policy)?,
        limits: limits(proto)?,
        terminates_connect: proto.upgrade_configs.iter().any(|config| config.connect_config.is_some()),
    })
}

/// Returns the rules for rate limit descriptors; `None` without any.
#[expect(deprecated, reason = "control planes send include_vh_rate_limits")]
fn limits(proto: &RouteAction) -> Result<Option<Box<RouteRules>>> {
    let rules = RouteRules {
        rules: limit_rules::translate(&proto.rate_limits)?,
        include_host: flag(proto.include_vh_rate_limits).unwrap_or(false),
    };
    Ok((!rules.rules.is_empty() || rules.include_host).then(|| Box::new(rules)))
}

fn hash_policies(protos: &[HashProto]) -> Result<Vec<HashPolicy>> {
    let one = |proto: &HashProto| {
        let key = match &proto.policy_specifier {
            Some(PolicySpecifier::Header(header)) => {
                HashKey::Header(header.header_name.to_ascii_lowercase().into())
            }
            Some(PolicySpecifier::Cookie(cookie)) => HashKey::Cookie(Box::new(HashCookie {
                name: cookie.name.as_str().into(),
                ttl: cookie.ttl.as_ref().map(duration).transpose().at("cookie.ttl")?,
                path: cookie.path.as_str().into(),
                attributes: cookie
                    .attributes
                    .iter()
                    .map(|attribute| (attribute.name.as_str().into(), attribute.value.as_str().into()))
                    .collect(),
            })),
            Some(PolicySpecifier::ConnectionProperties(properties)) if properties.source_ip => {
                HashKey::SourceIp
            }
            Some(PolicySpecifier::QueryParameter(query)) => HashKey::Query(query.name.as_str().into()),
            _ => {
                return Err(Reject::new(
                    "must be a header, a cookie, connection_properties.source_ip or a query_parameter",
                ));
            }
        };
        Ok(HashPolicy { key, terminal: proto.terminal })
    };
    let indexed = protos.iter().enumerate();
    indexed.map(|(index, proto)| one(proto).at(format_args!("hash_policy[{index}]"))).collect()
}

/// Honours the `grpc-timeout` header only with a maximum; a maximum of zero is unlimited.
fn grpc_timeout(max: Option<&DurationProto>, offset: Option<&DurationProto>) -> Result<Option<GrpcTimeout>> {
    if max.is_none() {
        return Ok(None);
    }
    Ok(Some(GrpcTimeout { max: timeout(max, None)?, offset: timeout(offset, None)? }))
}

fn host_rewrite(proto: Option<&HostRewriteSpecifier>) -> Result<Option<HostRewrite>> {
    Ok(match proto {
        None => None,
        Some(HostRewriteSpecifier::HostRewriteLiteral(host)) => literal_host(host)?,
        Some(HostRewriteSpecifier::AutoHostRewrite(auto)) => auto.value.then_some(HostRewrite::Auto),
        Some(HostRewriteSpecifier::HostRewriteHeader(name)) => {
            Some(HostRewrite::Header(name.to_ascii_lowercase().into()))
        }
        Some(_) => return Err(Reject::new("this rewrite of the host is not supported")),
    })
}

/// An empty rewrite has no effect, as in Envoy.
fn literal_host(host: &str) -> Result<Option<HostRewrite>> {
    if !host.is_empty() && head::as_authority(host.as_bytes()).is_none() {
        return Err(Reject::new(format!("{host:?} is not a host")).at_field("host_rewrite_literal"));
    }
    Ok(Some(HostRewrite::Literal(host.into())).filter(|_| !host.is_empty()))
}

fn targets(proto: Option<&ClusterSpecifier>) -> Result<Targets> {
    match proto {
        Some(ClusterSpecifier::Cluster(name)) => Ok(Targets::Single(name.as_str().into())),
        Some(ClusterSpecifier::ClusterHeader(name)) => Ok(Targets::Header(name.to_ascii_lowercase().into())),
        Some(ClusterSpecifier::WeightedClusters(weighted)) => {
            self::weighted(weighted).at("weighted_clusters")
        }
        _ => Err(Reject::new("must name a cluster, weighted_clusters or a cluster_header")),
    }
}

fn weighted(proto: &WeightedCluster) -> Result<Targets> {
    let mut targets = Vec::with_capacity(proto.clusters.len());
    for (index, cluster) in proto.clusters.iter().enumerate() {
        targets.push(target(cluster).at(format_args!("clusters[{index}]"))?);
    }
    match targets.iter().try_fold(0u32, |sum, target| sum.checked_add(target.weight)) {
        Some(0) | None => Err(Reject::new("the weights must add up to more than 0 and less than 2^32")),
        Some(total) => Ok(Targets::Weighted { total, targets }),
    }
}

fn target(proto: &ClusterWeight) -> Result<Target> {
    let host = match &proto.host_rewrite_specifier {
        Some(cluster_weight::HostRewriteSpecifier::HostRewriteLiteral(host)) => literal_host(host)?,
        None => None,
    };
    Ok(Target {
        cluster: proto.name.as_str().into(),
        weight: number(proto.weight).unwrap_or(0),
        headers: ops(
            (&proto.request_headers_to_add, &proto.request_headers_to_remove),
            (&proto.response_headers_to_add, &proto.response_headers_to_remove),
        )?,
        host,
    })
}

fn mirror(proto: &RequestMirrorPolicy) -> Result<Mirror> {
    if proto.cluster.is_empty() {
        return Err(Reject::new("must be given").at_field("cluster"));
    }
    let fraction = proto.runtime_fraction.as_ref().and_then(|fraction| fraction.default_value.as_ref());
    Ok(Mirror {
        cluster: proto.cluster.as_str().into(),
        fraction: fraction.map_or(1_000_000, text::millionths),
        keep_host: proto.disable_shadow_host_suffix_append,
    })
}

fn redirect(proto: &RedirectAction) -> Result<Redirect> {
    let filled = |text: &str| (!text.is_empty()).then(|| text.into());
    Ok(Redirect {
        scheme: match &proto.scheme_rewrite_specifier {
            Some(SchemeRewriteSpecifier::HttpsRedirect(true)) => Some("https".into()),
            Some(SchemeRewriteSpecifier::SchemeRedirect(scheme)) => filled(scheme),
            _ => None,
        },
        host: filled(&proto.host_redirect),
        port: match proto.port_redirect {
            0 => None,
            port => Some(
                u16::try_from(port)
                    .map_err(|_| Reject::new(format!("{port} is not a port")).at_field("port_redirect"))?,
            ),
        },
        path: match &proto.path_rewrite_specifier {
            None => None,
            Some(PathRewriteSpecifier::PathRedirect(path)) => Some(RedirectPath::Full(path.as_str().into())),
            Some(PathRewriteSpecifier::PrefixRewrite(prefix)) => {
                Some(RedirectPath::Rewritten(Rewrite::Prefix(prefix.as_str().into())))
            }
            Some(PathRewriteSpecifier::RegexRewrite(rewrite)) => {
                let (pattern, replacement) = text::substitution(rewrite).at("regex_rewrite")?;
                Some(RedirectPath::Rewritten(Rewrite::Regex(pattern, replacement)))
            }
            Some(PathRewriteSpecifier::PathRewrite(_)) => {
                return Err(Reject::new(
                    "is not supported: use path_redirect, prefix_rewrite or regex_rewrite",
                )
                .at_field("path_rewrite"));
            }
        },
        status: match proto.response_code() {
            RedirectResponseCode::MovedPermanently => 301,
            RedirectResponseCode::Found => 302,
            RedirectResponseCode::SeeOther => 303,
            RedirectResponseCode::TemporaryRedirect => 307,
            RedirectResponseCode::PermanentRedirect => 308,
        },
        strip_query: proto.strip_query,
    })
}

fn direct(proto: &DirectResponseAction) -> Result<DirectResponse> {
    let body = proto.body.as_ref().map(tls_context::read).transpose().at("body")?.unwrap_or_default();
    Ok(DirectResponse { status: status_code(proto.status).at("status")?, body: body.into() })
}

/// Returns the number of attempts after which their priorities are avoided.
fn priority_frequency(proto: &retry_policy::RetryPriority) -> Result<u32> {
    let Some(retry_policy::retry_priority::ConfigType::TypedConfig(any)) = &proto.config_type else {
        return Err(Reject::new("has no typed_config"));
    };
    if !type_name(any).ends_with(".PreviousPrioritiesConfig") {
        return Err(super::unknown_type("retry priority", &proto.name, any));
    }
    let config: PreviousPrioritiesConfig = unpack(any)?;
    let frequency = u32::try_from(config.update_frequency).ok().filter(|frequency| *frequency > 0);
    frequency.ok_or_else(|| Reject::new("must be positive").at_field("update_frequency"))
}

fn retry_policy(proto: &RetryProto) -> Result<RetryPolicy> {
    let statuses = proto.retriable_status_codes.iter().map(|&status| status_code(status));
    let mut avoid_previous = false;
    for (index, predicate) in proto.retry_host_predicate.iter().enumerate() {
        let retry_policy::retry_host_predicate::ConfigType::TypedConfig(any) =
            predicate.config_type.as_ref().ok_or_else(|| Reject::new("has no typed_config"))?;
        if !type_name(any).ends_with(".PreviousHostsPredicate") {
            return Err(super::unknown_type("retry host predicate", &predicate.name, any)
                .at_field(format_args!("retry_host_predicate[{index}]")));
        }
        avoid_previous = true;
    }
    let priorities = proto.retry_priority.as_ref();
    let priority_frequency = priorities.map_or(Ok(0), priority_frequency).at("retry_priority")?;
    let backoff = proto.retry_back_off.as_ref();
    let base = match backoff.and_then(|backoff| backoff.base_interval.as_ref()) {
        Some(time) => duration(time).at("retry_back_off.base_interval")?,
        None => BACKOFF_BASE,
    };
    let max = match backoff.and_then(|backoff| backoff.max_interval.as_ref()) {
        Some(time) => duration(time).at("retry_back_off.max_interval")?,
        None => base * 10,
    };
    if max < base {
        let reason = "must be at least base_interval";
        return Err(Reject::new(reason).at_field("retry_back_off.max_interval"));
    }
    Ok(RetryPolicy {
        on: retry_on(&proto.retry_on).at("retry_on")?,
        retries: number(proto.num_retries).unwrap_or(1),
        per_try_timeout: timeout(proto.per_try_timeout.as_ref(), None).at("per_try_timeout")?,
        avoid_previous,
        host_selection_attempts: u32::try_from(proto.host_selection_retry_max_attempts).unwrap_or(0),
        priority_frequency,
        statuses: statuses.collect::<Result<_>>().at("retriable_status_codes")?,
        answers: text::headers(&proto.retriable_headers).at("retriable_headers")?,
        requests: text::headers(&proto.retriable_request_headers).at("retriable_request_headers")?,
        backoff_base: base,
        backoff_max: max,
    })
}

fn retry_on(words: &str) -> Result<RetryOn> {
    let mut on = RetryOn::default();
    for word in words.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        if !on.set(word) && !on.set_grpc(word) {
            return Err(Reject::new(format!("{word:?} is not supported")));
        }
    }
    Ok(on)
}

type HeaderMutations<'a> = (&'a [HeaderValueOption], &'a [String]);

/// Translates header operations: removals first, then additions, as in Envoy.
fn ops(request: HeaderMutations<'_>, response: HeaderMutations<'_>) -> Result<HeaderOps> {
    Ok(HeaderOps {
        request: changes(request, "request_headers_to_add")?,
        response: changes(response, "response_headers_to_add")?,
    })
}

fn changes((add, remove): HeaderMutations<'_>, field: &str) -> Result<Vec<HeaderOp>> {
    let mut ops: Vec<_> =
        remove.iter().map(|name| Ok(HeaderOp::Remove(field_name(name)?))).collect::<Result<_>>()?;
    ops.extend(additions(add).at(field)?);
    Ok(ops)
}

/// Returns the name of a mutable header, in lower case.
pub(super) fn field_name(name: &str) -> Result<Box<str>> {
    if name.starts_with(':') || name.eq_ignore_ascii_case("host") {
        return Err(Reject::new(format!(
            "{name:?} cannot be changed by a header operation: use host_rewrite or a path rewrite"
        )));
    }
    Ok(name.to_ascii_lowercase().into())
}

/// Translates headers to add.
pub(super) fn additions(protos: &[HeaderValueOption]) -> Result<Vec<HeaderOp>> {
    let indexed = protos.iter().enumerate();
    indexed.map(|(index, option)| addition(option).at(format_args!("[{index}]"))).collect()
}

/// Translates a header to add.
#[expect(deprecated, reason = "Istio and older files say `append`")]
pub(super) fn addition(proto: &HeaderValueOption) -> Result<HeaderOp> {
    let header = proto.header.as_ref().ok_or_else(|| Reject::new("must be given").at_field("header"))?;
    let value = match header.raw_value.as_slice() {
        [] => header.value.as_str(),
        raw => {
            std::str::from_utf8(raw).map_err(|_| Reject::new("must be UTF-8").at_field("header.raw_value"))?
        }
    };
    let action = match (flag(proto.append), proto.append_action()) {
        (Some(false), _) | (None, HeaderAppendAction::OverwriteIfExistsOrAdd) => AppendAction::Overwrite,
        (None, HeaderAppendAction::AddIfAbsent) => AppendAction::AddIfAbsent,
        (None, HeaderAppendAction::OverwriteIfExists) => AppendAction::OverwriteIfExists,
        (Some(true), _) | (None, HeaderAppendAction::AppendIfExistsOrAdd) => AppendAction::Append,
    };
    Ok(HeaderOp::Add {
        name: field_name(&header.key)?,
        value: text::format(value).at("header.value")?,
        action,
        keep_empty: proto.keep_empty_value,
    })
}
