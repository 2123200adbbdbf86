//! Rate limits: the descriptors of a request, and the tokens that it takes.
//!
//! Source: Envoy's `local_ratelimit` and `ratelimit` filters.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
    time::Instant,
};

use serde_json::Value;

use crate::{
    config::limit::{Hits, HostRules, LimitAction, LimitRule, RouteRules, ValueSource},
    format, matching,
    record::{Context, Record},
    route,
    state::rate_limit::{Buckets, Entry, LimitBucket},
};
use skysail_http::head::RequestHead;

#[cfg(test)]
mod tests;

/// A descriptor of a request.
#[derive(Debug, PartialEq)]
pub struct Descriptor {
    /// Entries in the order of the rule's actions.
    pub entries: Vec<Entry>,
    /// Number of tokens that the request takes; `None` for one.
    pub hits: Option<u64>,
    /// Limit that replaces the rate limit service's: requests per unit, and the name of the unit.
    pub limit: Option<(u32, Box<str>)>,
    /// Whether the response has `x-ratelimit` headers; `None`: the filter decides.
    pub report: Option<bool>,
}

/// The properties of a request that its descriptors may contain.
#[derive(Debug)]
pub struct LimitRequest<'a> {
    /// Head.
    pub head: &'a RequestHead,
    /// Address of the client, from `x-forwarded-for` where trusted.
    pub client: IpAddr,
    /// Cluster of this sidecar's node.
    pub source_cluster: &'a str,
    /// Cluster of the route.
    pub destination_cluster: Option<&'a str>,
    /// Record of the request so far, with its dynamic metadata.
    pub record: &'a Record<'a>,
}

/// Returns the rules that apply to a request: those of its route and of its virtual host, for this stage.
pub fn rules<'a>(
    route: Option<&'a RouteRules>,
    host: &'a [LimitRule],
    by_filter: HostRules,
    stage: u32,
) -> impl Iterator<Item = &'a LimitRule> {
    let own = route.map_or(&[][..], |route| &route.rules);
    let uses_host = match by_filter {
        _ if route.is_some_and(|route| route.include_host) => true,
        HostRules::Include => true,
        HostRules::Ignore => false,
        HostRules::Override => own.is_empty(),
    };
    let host = if uses_host { host } else { &[] };
    own.iter().chain(host).filter(move |rule| rule.stage == stage)
}

/// Returns the descriptors that rules make of a request.
pub fn descriptors<'a>(
    rules: impl IntoIterator<Item = &'a LimitRule>,
    request: &LimitRequest<'_>,
) -> Vec<Descriptor> {
    rules.into_iter().filter_map(|rule| descriptor(rule, request)).collect()
}

fn descriptor(rule: &LimitRule, request: &LimitRequest<'_>) -> Option<Descriptor> {
    let mut entries = Vec::with_capacity(rule.actions.len());
    for action in &rule.actions {
        match entry(action, request) {
            Added::Entry(key, value) => entries.push(Entry { key: key.into(), value: value.into() }),
            Added::Nothing => {}
            Added::DropDescriptor => return None,
        }
    }
    let hits = match &rule.hits {
        None => None,
        Some(Hits::Number(number)) => Some(*number),
        Some(Hits::Format(format)) => {
            let mut text = Vec::new();
            let context = Context { record: request.record, request: Some(request.head), response: None };
            format::write(format, &context, b"", &mut text);
            Some(std::str::from_utf8(&text).ok()?.parse().ok()?)
        }
    };
    let limit = rule.limit.as_ref().and_then(|path| replacement(path, request));
    Some(Descriptor { entries, hits, limit, report: rule.report })
}

/// Returns the limit in dynamic metadata: `requests_per_unit`, and `unit` as the name of a `RateLimitUnit`.
fn replacement(path: &[Box<str>], request: &LimitRequest<'_>) -> Option<(u32, Box<str>)> {
    let found = matching::metadata_value(path, request.record.metadata)?;
    let requests = found.get("requests_per_unit")?.as_f64()?;
    let unit = found.get("unit")?.as_str()?;
    let is_whole = requests.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&requests);
    is_whole.then_some((requests as u32, unit.into()))
}

/// Result of an action.
enum Added {
    Entry(String, String),
    Nothing,
    DropDescriptor,
}

fn entry(action: &LimitAction, request: &LimitRequest<'_>) -> Added {
    match action {
        LimitAction::SourceCluster => {
            Added::Entry("source_cluster".to_owned(), request.source_cluster.to_owned())
        }
        LimitAction::DestinationCluster => match request.destination_cluster {
            Some(cluster) => Added::Entry("destination_cluster".to_owned(), cluster.to_owned()),
            None => Added::DropDescriptor,
        },
        LimitAction::RemoteAddress => Added::Entry("remote_address".to_owned(), request.client.to_string()),
        LimitAction::MaskedRemoteAddress { v4, v6 } => {
            Added::Entry("masked_remote_address".to_owned(), masked(request.client, *v4, *v6))
        }
        LimitAction::Constant { key, value } => Added::Entry(key.to_string(), value.to_string()),
        LimitAction::Value { key, from, skip_if_absent } => match value(from, request) {
            Some(value) => Added::Entry(key.to_string(), value),
            None if *skip_if_absent => Added::Nothing,
            None => Added::DropDescriptor,
        },
        LimitAction::Match { key, value, expected, headers, query } => {
            let matches =
                matching::headers(headers, request.head) && route::query_matches(query, request.head.query());
            if matches == *expected {
                Added::Entry(key.to_string(), value.to_string())
            } else {
                Added::DropDescriptor
            }
        }
    }
}

fn value(from: &ValueSource, request: &LimitRequest<'_>) -> Option<String> {
    let head = request.head;
    match from {
        ValueSource::Header(name) => match head.pseudo_header(name) {
            Some(value) => Some(value.to_owned()),
            None => head.header(name).map(|value| String::from_utf8_lossy(value).into_owned()),
        },
        ValueSource::Query(name) => {
            let mut pairs = head.query()?.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
            pairs.find(|(known, _)| *known == &**name).map(|(_, value)| value.to_owned())
        }
        ValueSource::Metadata(path, default) => {
            let found = matching::metadata_value(path, request.record.metadata).and_then(Value::as_str);
            let found = found.filter(|text| !text.is_empty()).unwrap_or(default);
            (!found.is_empty()).then(|| found.to_owned())
        }
    }
}

/// Returns why a rule makes no descriptor of a request, as a sentence for people. Not part of the request path.
pub fn mismatch(rule: &LimitRule, request: &LimitRequest<'_>) -> String {
    let dropping = rule.actions.iter().find(|action| matches!(entry(action, request), Added::DropDescriptor));
    match dropping {
        Some(LimitAction::Match { headers, expected: true, .. }) => {
            let unmet = headers.iter().find(|test| !matching::header(test, request.head));
            let words = unmet.map(|test| route::header_words(test, request.head));
            words.map_or("the query parameters do not match".to_owned(), |(found, expected)| {
                format!("{found}, expected: {expected}")
            })
        }
        Some(LimitAction::Match { .. }) => {
            "the request matches the excluded headers or parameters".to_owned()
        }
        Some(LimitAction::Value { key, from, .. }) => match from {
            ValueSource::Header(name) => format!("header {name} is absent"),
            ValueSource::Query(name) => format!("query parameter {name} is absent"),
            ValueSource::Metadata(..) => format!("there is no value for {key}"),
        },
        Some(LimitAction::DestinationCluster) => "the request has no cluster".to_owned(),
        _ => "the number of tokens cannot be read".to_owned(),
    }
}

/// Returns an address whose bits after the prefix are zero, as `address/length`.
fn masked(address: IpAddr, v4: u8, v6: u8) -> String {
    match address {
        IpAddr::V4(address) => {
            let kept = u32::MAX.checked_shl(32 - u32::from(v4.min(32))).unwrap_or(0);
            format!("{}/{v4}", Ipv4Addr::from_bits(address.to_bits() & kept))
        }
        IpAddr::V6(address) => {
            let kept = u128::MAX.checked_shl(128 - u32::from(v6.min(128))).unwrap_or(0);
            format!("{}/{v6}", Ipv6Addr::from_bits(address.to_bits() & kept))
        }
    }
}

/// Result of taking tokens.
#[derive(Debug)]
pub struct TokenDecision {
    /// All buckets had tokens.
    pub allowed: bool,
    /// The bucket that decided; `None` if no bucket applies to the request.
    pub bucket: Option<Arc<LimitBucket>>,
    /// Whether the response has `x-ratelimit` headers; `None`: the filter decides.
    pub report: Option<bool>,
}

/// Takes the tokens of a request: from the buckets of its descriptors, the slowest first. Then takes one from the
/// default bucket if no descriptor has a bucket, or with `always_default`.
pub fn take(
    buckets: &Buckets,
    descriptors: &[Descriptor],
    always_default: bool,
    now: Instant,
) -> TokenDecision {
    let found = descriptors.iter().filter_map(|one| Some((buckets.find(&one.entries)?, one)));
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(|(bucket, _)| std::cmp::Reverse(bucket.interval));
    for (bucket, descriptor) in &found {
        if !bucket.tokens.take_many(now, descriptor.hits.unwrap_or(1)) {
            return TokenDecision {
                allowed: false,
                bucket: Some(Arc::clone(bucket)),
                report: descriptor.report,
            };
        }
    }
    if (found.is_empty() || always_default)
        && let Some(default) = &buckets.default
        && !default.tokens.take(now)
    {
        return TokenDecision { allowed: false, bucket: Some(Arc::clone(default)), report: None };
    }
    match found.into_iter().next() {
        Some((bucket, descriptor)) => {
            TokenDecision { allowed: true, bucket: Some(bucket), report: descriptor.report }
        }
        None => TokenDecision { allowed: true, bucket: buckets.default.clone(), report: None },
    }
}
