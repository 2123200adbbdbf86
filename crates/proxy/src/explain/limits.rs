//! Rate limits that apply to a request, with its descriptors.

use std::sync::Arc;

use skysail_policy::{
    config::{
        limit::{GlobalRateLimit, HostRules, LimitRule, RateLimit},
        route::{Action, Setting},
    },
    limit::{self, LimitRequest},
    state::rate_limit::{BucketSettings, Entry},
};

use super::{
    filters::Passage,
    report::{BucketReport, FilterReport, LimitReport},
};

/// 100 % in millionths.
const ALL: f64 = 1_000_000.0;

/// Descriptors of a request, and the reasons of the rules that make none.
#[derive(Default)]
struct RuleResults {
    descriptors: Vec<Vec<Entry>>,
    unmet: Vec<String>,
}

/// Describes a limit in the proxy; `None` if it limits nothing.
pub(super) fn local(passage: &Passage<'_>, name: &str, limit: &Arc<RateLimit>) -> Option<FilterReport> {
    if limit.is_unlimited() || limit.enabled == 0 {
        return None;
    }
    let results = rule_results(passage, limit.rules.as_deref(), limit.host_rules, limit.stage);
    let settings = &limit.settings;
    let mut buckets = Vec::new();
    for descriptor in &results.descriptors {
        let known = settings.descriptors.iter().find(|known| known.matches(descriptor));
        buckets.extend(known.map(|known| bucket(known.bucket, descriptor, known.shadow)));
    }
    if let Some(default) = settings.default.filter(|_| buckets.is_empty() || limit.always_take_default) {
        buckets.push(bucket(default, &[], false));
    }
    let unmet = if buckets.is_empty() { results.unmet } else { Vec::new() };
    Some(report(
        name,
        LimitReport {
            service: String::new(),
            per_connection: limit.buckets.is_none(),
            buckets,
            descriptors: results.descriptors.iter().map(|entries| words(entries)).collect(),
            unmet,
            status: limit.status,
            enforced: f64::from(limit.enforced) / ALL,
        },
    ))
}

/// Describes a limit that a service decides; `None` if it limits nothing.
pub(super) fn global(
    passage: &Passage<'_>,
    name: &str,
    limit: &GlobalRateLimit,
    setting: Option<&Setting>,
) -> Option<FilterReport> {
    let by_route = match setting {
        Some(Setting::GlobalRateLimit(by_route)) => Some(&**by_route),
        _ => None,
    };
    // As on the request path, a request whose cluster does not exist is not limited.
    if !passage.has_cluster() {
        return None;
    }
    let is_internal = passage.head.header("x-envoy-internal") == Some(b"true");
    if limit.enabled == 0 || limit.internal.is_some_and(|internal| internal != is_internal) {
        return None;
    }
    let rules = by_route.and_then(|route| route.rules.as_deref()).or(limit.rules.as_deref());
    let host = by_route.map_or(HostRules::default(), |route| route.host_rules);
    let domain = by_route.and_then(|route| route.domain.as_deref()).unwrap_or(&limit.domain);
    let results = rule_results(passage, rules, host, limit.stage);
    Some(report(
        name,
        LimitReport {
            service: format!("{}, domain {domain}", limit.cluster),
            per_connection: false,
            buckets: Vec::new(),
            unmet: if results.descriptors.is_empty() { results.unmet } else { Vec::new() },
            descriptors: results.descriptors.iter().map(|entries| words(entries)).collect(),
            status: limit.status,
            enforced: f64::from(limit.enforced) / ALL,
        },
    ))
}

/// Returns the descriptors of a request: by the rules of a filter for every request, or by those of its route
/// and virtual host for a request with a route to a cluster.
fn rule_results(
    passage: &Passage<'_>,
    by_filter: Option<&[LimitRule]>,
    host: HostRules,
    stage: u32,
) -> RuleResults {
    let forwarded = passage.found.ok().and_then(|(of_host, route)| match &route.action {
        Action::Forward(forward) => Some((of_host, forward)),
        _ => None,
    });
    let record = passage.record();
    let request = LimitRequest {
        head: &passage.head,
        client: passage.subject.remote,
        source_cluster: "",
        destination_cluster: forwarded.and_then(|(_, forward)| forward.cluster(None, &passage.head)),
        record: &record,
    };
    let rules: Vec<&LimitRule> = match (by_filter, forwarded) {
        (Some(rules), _) => rules.iter().collect(),
        (None, Some((of_host, forward))) => {
            limit::rules(forward.limits.as_deref(), &of_host.limits, host, stage).collect()
        }
        (None, None) => Vec::new(),
    };
    let mut results = RuleResults::default();
    for rule in rules {
        match limit::descriptors([rule], &request).pop() {
            Some(descriptor) => results.descriptors.push(descriptor.entries),
            None => results.unmet.push(limit::mismatch(rule, &request)),
        }
    }
    results
}

fn bucket(settings: BucketSettings, descriptor: &[Entry], shadow: bool) -> BucketReport {
    BucketReport {
        descriptor: words(descriptor),
        at_once: settings.max_tokens,
        requests: settings.fill,
        seconds: settings.interval.as_secs_f64(),
        is_shadow: shadow,
    }
}

/// Formats the entries of a descriptor. Omits the entry that names the rule, and the `=` that the control
/// plane puts before each value so that no value is empty.
fn words(entries: &[Entry]) -> String {
    let entries = entries.iter().filter(|entry| *entry.key != *"rule");
    let words = entries.map(|entry| {
        let value = entry.value.strip_prefix('=').unwrap_or(&entry.value);
        format!("{}={value}", entry.key)
    });
    words.collect::<Vec<_>>().join(", ")
}

fn report(name: &str, limit: LimitReport) -> FilterReport {
    FilterReport { name: name.to_owned(), limit: Some(limit), ..FilterReport::default() }
}
