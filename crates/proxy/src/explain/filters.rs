//! Filters that a connection and a request pass: policies with their verdicts, and other filters with their effect.

use std::sync::Arc;

use skysail_policy::{
    config::{
        FilterChain, HttpManager,
        http::FilterKind,
        policy::{Policy, Rule, RuleAction, Rules},
        route::{Abort, Fault, Route, Setting},
    },
    matching,
    rbac::{self, Subject, Tally, Verdict},
};

use super::report::{Explanation, FilterReport, Outcome, PolicyReport};

/// Whole of a share, in millionths.
const ALL: u32 = 1_000_000;

/// Evaluates the network filters before the last one. Returns whether they admit the connection.
pub(super) fn network(chain: &FilterChain, subject: &Subject<'_>, explained: &mut Explanation) -> bool {
    let admitted = chain.policies.iter().all(|policy| check("rbac", policy, subject, explained));
    if admitted && chain.ask.is_some() {
        explained.filters.push(effect("ext_authz", "asks an authorizer, which may refuse the connection"));
    }
    admitted
}

/// Evaluates the HTTP filters. Returns whether the request reaches the router.
pub(super) fn http(
    manager: &HttpManager,
    route: Option<&Route>,
    subject: &Subject<'_>,
    explained: &mut Explanation,
) -> bool {
    for filter in &manager.filters {
        let setting = route.and_then(|route| route.setting(&filter.name));
        if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
            continue;
        }
        let name = &*filter.name;
        let text = match (&filter.kind, setting) {
            (_, Some(Setting::Rbac(policy))) | (FilterKind::Rbac(policy), _) => {
                if !check(name, policy, subject, explained) {
                    explained.outcome = Outcome::Responded(403, "a policy denies the request".to_owned());
                    return false;
                }
                continue;
            }
            (FilterKind::Fault(_), Some(Setting::Fault(fault))) | (FilterKind::Fault(fault), None) => {
                if let Some(status) = certain_abort(fault, subject) {
                    explained.filters.push(effect(name, "aborts every request"));
                    explained.outcome = Outcome::Responded(status, "fault injection".to_owned());
                    return false;
                }
                fault_words(fault, subject)
            }
            (FilterKind::Cors, Some(Setting::Cors(_))) => {
                Some("answers preflights and sets the CORS headers of responses".to_owned())
            }
            (FilterKind::RateLimit(_), Some(Setting::RateLimit(_))) => {
                Some("limits the rate: requests above it get 429".to_owned())
            }
            (FilterKind::RateLimit(limit), None) if limit.enabled > 0 => {
                Some("limits the rate: requests above it get 429".to_owned())
            }
            (FilterKind::GlobalRateLimit(_), _) => Some("asks a rate limit service".to_owned()),
            (FilterKind::ExternalAuthorization(_), _) => {
                Some("asks an authorizer, which may refuse the request".to_owned())
            }
            (FilterKind::Jwt(_), _) => jwt_words(subject),
            (FilterKind::HeaderMutation(_), _) => Some("changes headers".to_owned()),
            (FilterKind::Lua(_), _) => {
                Some("runs a script, which may change the request or respond".to_owned())
            }
            _ => None,
        };
        explained.filters.extend(text.map(|text| effect(name, &text)));
    }
    true
}

fn effect(name: &str, text: &str) -> FilterReport {
    FilterReport { name: name.to_owned(), effect: text.to_owned(), policy: None }
}

/// Returns the status with which a fault aborts every such request.
fn certain_abort(fault: &Fault, subject: &Subject<'_>) -> Option<u16> {
    let head = subject.head?;
    match &fault.abort {
        Some((ALL.., Abort::Http(status))) if matching::headers(&fault.headers, head) => Some(*status),
        Some((ALL.., Abort::Grpc(_))) if matching::headers(&fault.headers, head) => Some(200),
        _ => None,
    }
}

fn fault_words(fault: &Fault, subject: &Subject<'_>) -> Option<String> {
    if !matching::headers(&fault.headers, subject.head?) {
        return None;
    }
    let percent = |share: u32| f64::from(share) / 10_000.0;
    let delay = fault.delay.map(|(share, delay)| {
        format!("delays {} % of the requests by {} s", percent(share), delay.as_secs_f64())
    });
    let abort = fault.abort.as_ref().map(|(share, abort)| {
        let status = match abort {
            Abort::Http(status) => status.to_string(),
            Abort::Grpc(status) => format!("gRPC status {status}"),
        };
        format!("aborts {} % with {status}", percent(*share))
    });
    let parts: Vec<String> = delay.into_iter().chain(abort).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

fn jwt_words(subject: &Subject<'_>) -> Option<String> {
    let has_token = subject.head.is_some_and(|head| head.has("authorization"));
    Some(match has_token {
        true => {
            "verifies the token; not verified here: policies below see a request without a token".to_owned()
        }
        false => "the request has no token in `authorization`".to_owned(),
    })
}

/// Returns the rules before the one that matches, with the reasons why they do not.
fn unmatched(rules: &Rules, subject: &Subject<'_>) -> Vec<(String, String)> {
    let reason = |rule: &Rule| Some((rule.name.to_string(), rbac::mismatch(rule, rules.action, subject)?));
    rules.rules.iter().map_while(reason).collect()
}

/// Evaluates the policy of an RBAC filter and records its verdicts. Returns whether it admits the request.
fn check(name: &str, policy: &Arc<Policy>, subject: &Subject<'_>, explained: &mut Explanation) -> bool {
    let verdict = rbac::check(std::slice::from_ref(policy), subject, &mut Tally::default());
    let admitted = verdict == Verdict::Allow;
    let report = |rules: &Rules, is_enforced: bool, allowed: bool| FilterReport {
        name: name.to_owned(),
        effect: String::new(),
        policy: Some(PolicyReport {
            action: match rules.action {
                RuleAction::Allow => "ALLOW",
                RuleAction::Deny => "DENY",
                RuleAction::Log => "LOG",
            },
            is_enforced,
            allowed,
            matched: rbac::matched(rules, subject).map(ToString::to_string),
            rules: rules.rules.iter().map(|rule| rule.name.to_string()).collect(),
            unmatched: unmatched(rules, subject),
        }),
    };
    if let Some(rules) = &policy.shadow {
        let is_match = rbac::matched(rules, subject).is_some();
        let allowed = match rules.action {
            RuleAction::Allow => is_match,
            RuleAction::Deny => !is_match,
            RuleAction::Log => true,
        };
        explained.filters.push(report(rules, false, allowed));
    }
    if let Some(rules) = &policy.rules {
        explained.filters.push(report(rules, true, admitted));
    }
    admitted
}
