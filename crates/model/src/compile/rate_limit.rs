//! Filters of RateLimitPolicies: `local_ratelimit` for limits in the proxy, `ratelimit` for those of a service.
//!
//! Each rule is one filter with rules of its own for descriptors, so the order of policies and routes does not matter.
//! A header mutation before these filters writes attributes of a request that descriptors cannot name into internal
//! headers. It replaces what a client sent there. Another one after the filters removes them.
//!
//! Texts of requests are cut, because a proxy keeps the last values of each rule.

use skysail_xds::envoy::pb::envoy::{
    config::{
        accesslog::v3::{
            AccessLogFilter, AndFilter, HeaderFilter, ResponseFlagFilter, access_log_filter::FilterSpecifier,
        },
        common::mutation_rules::v3::{HeaderMutation as Mutation, header_mutation},
        ratelimit::v3::RateLimitServiceConfig,
        route::v3::{
            FilterConfig, RateLimit,
            rate_limit::{
                Action,
                action::{
                    ActionSpecifier, GenericKey, HeaderValueMatch, MaskedRemoteAddress, MetaData,
                    RequestHeaders,
                },
            },
        },
    },
    extensions::{
        common::ratelimit::v3::{LocalRateLimitDescriptor, rate_limit_descriptor::Entry},
        filters::{
            http::{
                header_mutation::v3::{HeaderMutation, Mutations},
                local_ratelimit::v3::LocalRateLimit,
                ratelimit::v3::RateLimit as GlobalRateLimit,
            },
            network::http_connection_manager::v3::{HttpFilter, ResponseMapper},
        },
    },
    r#type::{
        metadata::v3::{
            MetadataKey,
            metadata_key::{PathSegment, path_segment::Segment},
        },
        v3::TokenBucket,
    },
};

use super::{
    authorizer,
    clause::with_aliases,
    filters::{self, HttpPolicy},
    pb::{
        Any, Duration, boolean, core, duration, matcher, matching, pack, regex, route, types, uint32,
        whole_percent,
    },
};
use crate::{
    ProxyView, World,
    api::{
        RateLimitPolicy, Service, StringMatch, Typed, VirtualService,
        rate_limit::{
            DEFAULT_MAX_KEYS, GlobalLimit, Limit, LimitResponse, RateLimitKey, RateLimitMatch, RateLimitRule,
        },
        virtual_service::IstioHttpRoute,
    },
    world::AppliedLimit,
};

use matcher::string_matcher::MatchPattern;
use route::header_matcher::HeaderMatchSpecifier;

/// Prefix of the internal headers with attributes of a request.
const VALUE: &str = "x-skysail-limit-";
/// Internal header with the rule whose filter runs.
const ANNOUNCEMENT: &str = "x-skysail-limit-rule";
/// Response flag of requests above a limit.
const LIMITED: &str = "RL";
/// Prefix of values in internal headers, so that no value is empty and requests without a value share a limit.
const MARK: &str = "=";
/// Value of a claim that the token lacks.
const NO_CLAIM: &str = "-";
/// Key of the first entry of descriptors.
const RULE: &str = "rule";
/// Dynamic metadata of verified tokens.
const TOKENS: (&str, &str) = ("envoy.filters.http.jwt_authn", "payload");
/// Prefix length of the addresses of one IPv6 host.
const HOST_V6: u32 = 64;
/// Timeout of a decision of a rate limit service. Source: Envoy's default.
const TIMEOUT: Duration = Duration { seconds: 0, nanos: 20_000_000 };

/// Rate limits of a proxy.
pub(super) struct RateLimits<'a> {
    world: &'a World,
    applied: Vec<AppliedLimit<'a>>,
}

/// A policy of a chain. Its filters may be disabled until a route enables them.
type Selected<'a> = (&'a Typed<RateLimitPolicy>, bool);

impl<'a> RateLimits<'a> {
    /// Selects the policies of a proxy.
    pub(super) fn new(world: &'a World, view: &ProxyView) -> Self {
        Self { world, applied: world.rate_limits(view) }
    }

    /// Returns the filters of an inbound chain. `services` are those whose ports lead to it.
    pub(super) fn of_services<'s>(
        &self,
        services: impl Iterator<Item = &'s Typed<Service>> + Clone,
    ) -> ChainLimits {
        let applies = |limit: &&AppliedLimit<'_>| match &limit.services {
            None => true,
            Some(names) => services.clone().any(|service| {
                service.meta.namespace == limit.policy.meta.namespace && names.contains(&*service.meta.name)
            }),
        };
        self.chain(self.applied.iter().filter(applies).map(|limit| (limit.policy, false)).collect())
    }

    /// Returns the filters of a gateway's chain. Those of policies that are attached to its routes are disabled.
    pub(super) fn of_rules<'r>(&self, rules: impl Iterator<Item = &'r Typed<VirtualService>>) -> ChainLimits
    where
        'a: 'r,
    {
        let mut selected: Vec<Selected<'a>> =
            self.applied.iter().map(|limit| (limit.policy, false)).collect();
        for rule in rules.filter(|rule| self.world.limits_routes(&rule.meta.namespace)) {
            for http in self.world.http_rules(rule).iter() {
                for policy in self.world.rate_limits_of_route(rule, http) {
                    if !selected.iter().any(|(known, _)| known.meta == policy.meta) {
                        selected.push((policy, true));
                    }
                }
            }
        }
        self.chain(selected)
    }

    fn chain(&self, selected: Vec<Selected<'_>>) -> ChainLimits {
        let mut values = Values::default();
        let (mut made, mut replies) = (Vec::new(), Vec::new());
        let mut rules = selected.iter().flat_map(|(policy, _)| &policy.spec.rules);
        let announces = rules.any(RateLimitRule::has_body);
        for (policy, disabled) in selected {
            for (index, rule) in policy.spec.rules.iter().enumerate() {
                let compiler = RuleCompiler {
                    world: self.world,
                    name: full_name(policy, rule, index),
                    is_local: rule.limit.is_some(),
                };
                let Some(config) = compiler.compile(rule, &mut values) else { continue };
                replies.extend(rule.response.as_ref().and_then(|response| compiler.reply(response)));
                // The name of a rule must not remain for the next one.
                made.extend(announces.then(|| compiler.announcement()).flatten());
                let name = filter_name(&compiler.name);
                made.push(HttpFilter { disabled, ..filters::http(&name, config) });
            }
        }
        let (first, last) = values.filters(announces);
        let limits = first.into_iter().chain(made).chain(last).collect();
        ChainLimits { limits, replies }
    }
}

/// Filters and replies of the limits of one chain.
pub(super) struct ChainLimits {
    limits: Vec<HttpFilter>,
    replies: Vec<ResponseMapper>,
}

impl ChainLimits {
    /// Returns the policies of a chain with these limits.
    pub(super) fn after(self, policy: HttpPolicy) -> HttpPolicy {
        HttpPolicy { limits: self.limits, replies: self.replies, ..policy }
    }
}

/// Returns the settings of a route that enable the filters of the policies that are attached to it.
pub(super) fn of_route(
    world: &World,
    rule: &Typed<VirtualService>,
    http: &IstioHttpRoute,
) -> Vec<(String, Any)> {
    let policies = world.rate_limits_of_route(rule, http);
    let rules = policies.iter().flat_map(|policy| {
        let indexed = policy.spec.rules.iter().enumerate();
        indexed.map(|(index, rule)| filter_name(&full_name(policy, rule, index)))
    });
    // The filter keeps its configuration, and so its counts, on all routes.
    let enabled = FilterConfig { config: Some(Any::default()), ..Default::default() };
    rules.map(|name| (name, pack(&enabled))).collect()
}

/// Returns the full name of a rule: `NAMESPACE/POLICY/RULE`.
fn full_name(policy: &Typed<RateLimitPolicy>, rule: &RateLimitRule, index: usize) -> String {
    format!("{}/{}/{}", policy.meta.namespace, policy.meta.name, rule.name_at(index))
}

fn filter_name(rule: &str) -> String {
    format!("skysail.rate_limit/{rule}")
}

/// Attributes in internal headers, by their formats.
#[derive(Default)]
struct Values {
    formats: Vec<String>,
}

impl Values {
    /// Returns the header that has the value of a format.
    fn header(&mut self, format: String) -> String {
        let known = self.formats.iter().position(|known| *known == format);
        let index = known.unwrap_or(self.formats.len());
        if known.is_none() {
            self.formats.push(format);
        }
        format!("{VALUE}{index}")
    }

    /// Returns the filter that sets the headers, and the one that removes them, if there are any. `announces` is
    /// whether rules announce themselves.
    fn filters(self, announces: bool) -> (Option<HttpFilter>, Option<HttpFilter>) {
        let name = |index: usize| format!("{VALUE}{index}");
        let remove = |index| header_mutation::Action::Remove(name(index));
        let set = |(index, value): (usize, &String)| {
            let option = header_option(&name(index), value.clone());
            // An empty value is not set, so the header of the client is removed first.
            [remove(index), header_mutation::Action::Append(option)]
        };
        let first: Vec<_> = self.formats.iter().enumerate().flat_map(set).collect();
        let mut last: Vec<_> = (0..self.formats.len()).map(remove).collect();
        last.extend(announces.then(|| header_mutation::Action::Remove(ANNOUNCEMENT.into())));
        (mutation("skysail.rate_limit.attributes", first), mutation("skysail.rate_limit.cleanup", last))
    }
}

/// Returns a filter that changes request headers; `None` without changes.
fn mutation(name: &str, actions: Vec<header_mutation::Action>) -> Option<HttpFilter> {
    if actions.is_empty() {
        return None;
    }
    let mutations = actions.into_iter().map(|action| Mutation { action: Some(action) });
    let mutations = Mutations { request_mutations: mutations.collect(), ..Default::default() };
    let config = HeaderMutation { mutations: Some(mutations), ..Default::default() };
    Some(filters::http(name, pack(&config)))
}

/// Compiler of one rule.
struct RuleCompiler<'a> {
    world: &'a World,
    /// `NAMESPACE/POLICY/RULE`.
    name: String,
    is_local: bool,
}

impl RuleCompiler<'_> {
    /// Returns the configuration of the rule's filter; `None` if its provider cannot be used, which the checks of the
    /// World report.
    fn compile(&self, rule: &RateLimitRule, values: &mut Values) -> Option<Any> {
        let mut actions = vec![self.applies(rule.matched.as_ref(), values)];
        actions.extend(rule.by.iter().map(|key| self.key(key, values)));
        let actions = actions.into_iter().map(|specifier| Action { action_specifier: Some(specifier) });
        let descriptors = RateLimit { actions: actions.collect(), ..Default::default() };
        match (&rule.limit, &rule.global) {
            (Some(limit), _) => Some(pack(&self.local(rule, limit, descriptors))),
            (None, Some(global)) => Some(pack(&self.global(rule, global, descriptors)?)),
            (None, None) => None,
        }
    }

    fn local(&self, rule: &RateLimitRule, limit: &Limit, descriptors: RateLimit) -> LocalRateLimit {
        let entry = |key: String, value: String| Entry { key, value };
        // An entry without a value has a bucket for each value.
        let keys = rule.by.iter().map(|key| entry(key.descriptor_key(), String::new()));
        let bucket = TokenBucket {
            max_tokens: limit.at_once(),
            tokens_per_fill: uint32(limit.requests),
            fill_interval: Some(duration(limit.time())),
        };
        let nothing = LimitResponse::default();
        let response = rule.response.as_ref().unwrap_or(&nothing);
        LocalRateLimit {
            // Envoy's metrics have the prefix as a label if it contains no dot.
            stat_prefix: self.name.replace('.', "_"),
            status: response.status.map(status),
            filter_enabled: share(true),
            filter_enforced: share(!rule.shadow),
            response_headers_to_add: response_headers(response),
            descriptors: vec![LocalRateLimitDescriptor {
                entries: [entry(RULE.into(), self.name.clone())].into_iter().chain(keys).collect(),
                token_bucket: Some(bucket),
                ..Default::default()
            }],
            rate_limits: vec![descriptors],
            always_consume_default_token_bucket: boolean(false),
            max_dynamic_descriptors: if rule.by.is_empty() {
                None
            } else {
                uint32(limit.max_keys.unwrap_or(DEFAULT_MAX_KEYS))
            },
            rate_limited_as_resource_exhausted: true,
            enable_x_ratelimit_headers: response.rate_limit_headers.into(),
            enable_retry_after_header: true,
            ..Default::default()
        }
    }

    fn global(
        &self,
        rule: &RateLimitRule,
        global: &GlobalLimit,
        descriptors: RateLimit,
    ) -> Option<GlobalRateLimit> {
        let (service, host, cluster) = self.world.rate_limit_service(&global.provider.name).ok()?;
        let timeout = service.timeout.map_or(TIMEOUT, |timeout| duration(timeout.0));
        let nothing = LimitResponse::default();
        let response = rule.response.as_ref().unwrap_or(&nothing);
        let domain = if global.domain.is_empty() { &service.domain } else { &global.domain };
        // Reported by the checks of the World; Envoy refuses the filter.
        let domain = Some(domain).filter(|domain| !domain.is_empty())?;
        Some(GlobalRateLimit {
            domain: domain.clone(),
            timeout: Some(timeout),
            failure_mode_deny: service.fail_closed,
            rate_limited_as_resource_exhausted: true,
            rate_limit_service: Some(RateLimitServiceConfig {
                grpc_service: Some(core::GrpcService {
                    timeout: Some(timeout),
                    ..authorizer::grpc_service(&host, &cluster)
                }),
                transport_api_version: core::ApiVersion::V3 as i32,
            }),
            enable_x_ratelimit_headers: response.rate_limit_headers.into(),
            rate_limited_status: response.status.map(status),
            response_headers_to_add: response_headers(response),
            status_on_error: service.status_on_error.map(status),
            filter_enforced: share(!rule.shadow),
            rate_limits: vec![descriptors],
            ..Default::default()
        })
    }

    /// Returns the filter before that of the rule. It names the rule to the change of local replies, which sees the
    /// headers of the request.
    fn announcement(&self) -> Option<HttpFilter> {
        let option = header_option(ANNOUNCEMENT, self.name.clone());
        mutation("skysail.rate_limit.rule", vec![header_mutation::Action::Append(option)])
    }

    /// Returns the change of the rule's local reply; `None` if its text is not set.
    fn reply(&self, response: &LimitResponse) -> Option<ResponseMapper> {
        if response.body.is_empty() {
            return None;
        }
        let is = |specifier| AccessLogFilter { filter_specifier: Some(specifier) };
        let limited = ResponseFlagFilter { flags: vec![LIMITED.into()] };
        let exact = HeaderMatchSpecifier::StringMatch(matching(MatchPattern::Exact(self.name.clone())));
        let by_rule = HeaderFilter { header: Some(header(ANNOUNCEMENT, exact)) };
        let by_rule = is(FilterSpecifier::HeaderFilter(by_rule));
        let filter = if self.is_local {
            // An Envoy sets the flag after the reply. Only the rule itself replies while the header names it.
            by_rule
        } else {
            // A failure of the service has another flag.
            let limited = is(FilterSpecifier::ResponseFlagFilter(limited));
            is(FilterSpecifier::AndFilter(AndFilter { filters: vec![limited, by_rule] }))
        };
        let text = |text: &str| core::DataSource {
            specifier: Some(core::data_source::Specifier::InlineString(text.to_owned())),
            ..Default::default()
        };
        let format = core::SubstitutionFormatString {
            format: Some(core::substitution_format_string::Format::TextFormatSource(text(
                "%LOCAL_REPLY_BODY%",
            ))),
            content_type: response.content_type.clone(),
            ..Default::default()
        };
        Some(ResponseMapper {
            filter: Some(filter),
            body: Some(text(&response.body)),
            body_format_override: (!response.content_type.is_empty()).then_some(format),
            ..Default::default()
        })
    }

    /// Returns the action of the first entry, which drops the descriptors of requests that do not match.
    fn applies(&self, matched: Option<&RateLimitMatch>, values: &mut Values) -> ActionSpecifier {
        let headers = matched.map(|matched| self.conditions(matched, values)).unwrap_or_default();
        if headers.is_empty() {
            return ActionSpecifier::GenericKey(GenericKey {
                descriptor_key: RULE.into(),
                descriptor_value: self.name.clone(),
                ..Default::default()
            });
        }
        ActionSpecifier::HeaderValueMatch(HeaderValueMatch {
            descriptor_key: RULE.into(),
            descriptor_value: self.name.clone(),
            headers,
            ..Default::default()
        })
    }

    fn conditions(&self, matched: &RateLimitMatch, values: &mut Values) -> Vec<route::HeaderMatcher> {
        let mut made = Vec::new();
        let lists = [
            (":path", "", &matched.paths, r"(?:\?.*)?"),
            (":method", "", &matched.methods, ""),
            (":authority", "(?i)", &matched.hosts, "(?::[0-9]+)?"),
        ];
        for (name, before, list, after) in lists {
            if !list.is_empty() {
                made.push(header(
                    name,
                    by_regex(&format!("{before}{}{after}", any_of(list.iter().cloned()))),
                ));
            }
        }
        for (name, wanted) in &matched.headers {
            made.push(header(&name.to_ascii_lowercase(), specifier(wanted)));
        }
        for (name, unwanted) in &matched.without_headers {
            let specifier = specifier(unwanted);
            made.push(route::HeaderMatcher {
                invert_match: true,
                // A request without the header does not have the value.
                treat_missing_header_as_empty: !matches!(specifier, HeaderMatchSpecifier::PresentMatch(_)),
                ..header(&name.to_ascii_lowercase(), specifier)
            });
        }
        for (list, invert_match) in [(&matched.principals, false), (&matched.not_principals, true)] {
            if list.is_empty() {
                continue;
            }
            let names = list.iter().flat_map(|name| with_aliases(name, self.world.mesh()));
            let expression = by_regex(&format!("{MARK}spiffe://{}", any_of(names)));
            let name = values.header(format!("{MARK}%DOWNSTREAM_PEER_URI_SAN%"));
            made.push(route::HeaderMatcher { invert_match, ..header(&name, expression) });
        }
        made
    }

    /// Returns the action of an attribute. A request without the attribute shares the limit of all such requests; a
    /// rate limit service gets a descriptor without the entry.
    fn key(&self, key: &RateLimitKey, values: &mut Values) -> ActionSpecifier {
        let descriptor_key = key.descriptor_key();
        if let Some(address) = key.client_address {
            return ActionSpecifier::MaskedRemoteAddress(MaskedRemoteAddress {
                v4_prefix_mask_len: address.ipv4_prefix_length.and_then(uint32),
                v6_prefix_mask_len: uint32(address.ipv6_prefix_length.unwrap_or(HOST_V6)),
            });
        }
        if !key.jwt_claim.is_empty() {
            let path = [TOKENS.1].into_iter().chain(key.jwt_claim.split('.'));
            let segment = |key: &str| PathSegment { segment: Some(Segment::Key(key.to_owned())) };
            return ActionSpecifier::Metadata(MetaData {
                descriptor_key,
                metadata_key: Some(MetadataKey { key: TOKENS.0.into(), path: path.map(segment).collect() }),
                default_value: if self.is_local { NO_CLAIM.into() } else { String::new() },
                skip_if_absent: !self.is_local,
                ..Default::default()
            });
        }
        let format = match key.attributes().first() {
            Some(&"sourcePrincipal") => "%DOWNSTREAM_PEER_URI_SAN%".to_owned(),
            Some(&"sourceAddress") => "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT%".to_owned(),
            Some(&"method") => "%REQ(:METHOD):32%".to_owned(),
            Some(&"host") => "%REQ(:AUTHORITY):256%".to_owned(),
            Some(&"route") => "%ROUTE_NAME%".to_owned(),
            _ => format!("%REQ({}):1024%", key.header.to_ascii_uppercase()),
        };
        let mark = if self.is_local { MARK } else { "" };
        ActionSpecifier::RequestHeaders(RequestHeaders {
            header_name: values.header(format!("{mark}{format}")),
            descriptor_key,
            skip_if_absent: !self.is_local,
        })
    }
}

fn status(code: u32) -> types::HttpStatus {
    types::HttpStatus { code: i32::try_from(code).unwrap_or_default() }
}

/// Returns the share of all or no requests.
fn share(all: bool) -> Option<core::RuntimeFractionalPercent> {
    let value = whole_percent(if all { 100 } else { 0 });
    Some(core::RuntimeFractionalPercent { default_value: Some(value), ..Default::default() })
}

fn response_headers(response: &LimitResponse) -> Vec<core::HeaderValueOption> {
    // `%` begins a command of Envoy's formats.
    let headers = response.headers.iter();
    headers.map(|(name, value)| header_option(&name.to_ascii_lowercase(), value.replace('%', "%%"))).collect()
}

/// Returns the operation that sets a header.
fn header_option(name: &str, value: String) -> core::HeaderValueOption {
    core::HeaderValueOption {
        header: Some(core::HeaderValue { key: name.to_owned(), value, ..Default::default() }),
        append_action: core::header_value_option::HeaderAppendAction::OverwriteIfExistsOrAdd as i32,
        ..Default::default()
    }
}

fn header(name: &str, specifier: HeaderMatchSpecifier) -> route::HeaderMatcher {
    route::HeaderMatcher {
        name: name.to_owned(),
        header_match_specifier: Some(specifier),
        ..Default::default()
    }
}

fn by_regex(expression: &str) -> HeaderMatchSpecifier {
    HeaderMatchSpecifier::StringMatch(matching(MatchPattern::SafeRegex(regex(expression))))
}

fn specifier(wanted: &StringMatch) -> HeaderMatchSpecifier {
    let pattern = match wanted {
        StringMatch::Present => return HeaderMatchSpecifier::PresentMatch(true),
        StringMatch::Exact(text) => MatchPattern::Exact(text.clone()),
        StringMatch::Prefix(text) if text.is_empty() => return HeaderMatchSpecifier::PresentMatch(true),
        StringMatch::Prefix(text) => MatchPattern::Prefix(text.clone()),
        StringMatch::Regex(text) => MatchPattern::SafeRegex(regex(text)),
    };
    HeaderMatchSpecifier::StringMatch(matching(pattern))
}

/// Returns an expression for one of these texts, which may be `text`, `text*`, `*text` or `*`.
fn any_of(texts: impl Iterator<Item = String>) -> String {
    let one = |text: String| match (text.strip_prefix('*'), text.strip_suffix('*')) {
        (Some(""), _) => ".+".to_owned(),
        (Some(end), _) => format!(".*{}", regex::escape(end)),
        (None, Some(start)) => format!("{}.*", regex::escape(start)),
        (None, None) => regex::escape(&text),
    };
    format!("(?:{})", texts.map(one).collect::<Vec<_>>().join("|"))
}
