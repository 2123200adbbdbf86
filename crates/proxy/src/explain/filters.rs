//! Filters that a connection and a request pass: policies with their verdicts, and other filters with their
//! effect.

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use serde_json::{Map, Value};
use skysail_http::head::RequestHead;
use skysail_policy::{
    config::{
        FilterChain, HttpManager,
        http::{Filter, FilterKind, metadata},
        listener::Direction,
        mutation::HeaderMutation,
        policy::{Policy, Rule, RuleAction, Rules},
        route::{Abort, Action, Cors, Fault, Route, Setting, Targets, VirtualHost},
    },
    cors::{self, CorsDecision},
    matching, mutation,
    rbac::{self, Subject, Tally, Verdict},
    record::Record,
    route::NoRoute,
};

use super::{
    ALL, FoundTable, ProxyConfiguration, authorizers, limits,
    report::{Explanation, FilterReport, Outcome, PolicyReport},
    tokens,
};
use crate::{request::mutation::lists as mutation_lists, worker::downstream};

/// Evaluates the network filters before the last one. Returns whether they admit the connection.
pub(super) fn network(
    configuration: &ProxyConfiguration,
    chain: &FilterChain,
    subject: &Subject<'_>,
    explained: &mut Explanation,
) -> bool {
    for limit in &chain.connection_limits {
        let text = format!("closes connections above {} open ones", limit.max_connections);
        explained.filters.push(effect("connection_limit", &text));
    }
    let mut tally = Tally::default();
    let admitted = chain.policies.iter().all(|policy| check("rbac", policy, subject, &mut tally, explained));
    if !admitted {
        explained.outcome = Outcome::Refused("a policy closes the connection".to_owned());
        return false;
    }
    let Some(config) = chain.external_authorization.as_deref() else { return true };
    let metadata = downstream::metadata(tally.found);
    authorizers::connection(configuration, config, subject.destination, &metadata, explained)
}

/// A request on its way through the HTTP filters.
pub(super) struct Passage<'a> {
    pub(super) configuration: &'a ProxyConfiguration,
    pub(super) manager: &'a HttpManager,
    pub(super) table: &'a FoundTable,
    /// Properties of the connection; the head and the metadata are those below.
    pub(super) subject: Subject<'a>,
    /// Head, as the filters so far have changed it.
    pub(super) head: RequestHead,
    /// Dynamic metadata, by filter name.
    pub(super) metadata: Map<String, Value>,
    /// Virtual host and route, or why there is none.
    pub(super) found: Result<(&'a VirtualHost, &'a Route), NoRoute>,
}

impl<'a> Passage<'a> {
    /// Evaluates the HTTP filters. Returns whether the request reaches the router.
    pub(super) fn filter(&mut self, explained: &mut Explanation) -> bool {
        let manager = self.manager;
        manager.filters.iter().all(|filter| {
            let setting = self.found.ok().and_then(|(_, route)| route.setting(&filter.name));
            let is_off = matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none());
            is_off || self.step(filter, setting, explained)
        })
    }

    /// Evaluates a filter. Returns whether the request passes it.
    fn step(&mut self, filter: &Filter, setting: Option<&'a Setting>, explained: &mut Explanation) -> bool {
        let name = &*filter.name;
        let text = match (&filter.kind, setting) {
            (_, Some(Setting::Rbac(policy))) | (FilterKind::Rbac(policy), _) => {
                let mut tally = Tally::default();
                let admitted = check(name, policy, &self.subject(), &mut tally, explained);
                matching::merge_metadata(&mut self.metadata, metadata::COMMON, tally.log_metadata());
                matching::merge_metadata(&mut self.metadata, metadata::RBAC, tally.found);
                if !admitted {
                    explained.outcome = Outcome::Responded(403, "a policy denies the request".to_owned());
                }
                return admitted;
            }
            (FilterKind::Fault(_), Some(Setting::Fault(fault))) | (FilterKind::Fault(fault), None) => {
                if let Some(status) = certain_abort(fault, &self.head) {
                    explained.filters.push(effect(name, "aborts every request"));
                    explained.outcome = Outcome::Responded(status, "fault injection".to_owned());
                    return false;
                }
                fault_words(fault, &self.head)
            }
            (FilterKind::Cors, Some(Setting::Cors(cors))) => return self.cors(name, cors, explained),
            (FilterKind::RateLimit(_), Some(Setting::RateLimit(limit)))
            | (FilterKind::RateLimit(limit), _) => {
                explained.filters.extend(limits::local(self, name, limit));
                return true;
            }
            (FilterKind::GlobalRateLimit(limit), setting) => {
                explained.filters.extend(limits::global(self, name, limit, setting));
                return true;
            }
            (FilterKind::ExternalAuthorization(config), _) => {
                return authorizers::request(self, name, config, explained);
            }
            (FilterKind::Jwt(jwt), setting) => return tokens::verify(self, name, jwt, setting, explained),
            (FilterKind::HeaderMutation(config), setting) => {
                self.mutate(config, setting);
                // Filters whose names begin with `skysail.` only set internal headers for rate limits.
                (!name.starts_with("skysail.")).then(|| "changes headers".to_owned())
            }
            (FilterKind::ExternalProcessing(_), _) => {
                Some("calls an external processor, which may change the request or respond".to_owned())
            }
            (FilterKind::Lua(_), _) => {
                Some("runs a script, which may change the request or respond".to_owned())
            }
            _ => None,
        };
        explained.filters.extend(text.map(|text| effect(name, &text)));
        true
    }

    /// Selects the route again, by the metadata of verified tokens.
    pub(super) fn route_again(&mut self, explained: &mut Explanation) {
        self.found = self.configuration.route(self.table, &self.head, Some(&self.metadata), explained);
    }

    /// Evaluates a CORS policy, which applies to routes to clusters only. Returns whether the request passes
    /// it.
    fn cors(&self, name: &str, config: &Cors, explained: &mut Explanation) -> bool {
        if !self.found.is_ok_and(|(_, route)| matches!(route.action, Action::Forward(_))) {
            return true;
        }
        let decision = cors::decide(config, &self.head);
        let text = match &decision {
            CorsDecision::Respond(_) => "answers the preflight",
            CorsDecision::AddFields(_) => "sets the CORS headers of the response",
            CorsDecision::Pass => "answers preflights and sets the CORS headers of responses",
        };
        explained.filters.push(effect(name, text));
        let CorsDecision::Respond(response) = decision else { return true };
        explained.outcome = Outcome::Responded(response.status(), "CORS preflight".to_owned());
        false
    }

    /// Returns the subject of policies.
    fn subject(&self) -> Subject<'_> {
        Subject { head: Some(&self.head), metadata: Some(&self.metadata), ..self.subject }
    }

    /// Returns whether the route leads to a cluster that exists.
    pub(super) fn has_cluster(&self) -> bool {
        let Ok((_, Route { action: Action::Forward(forward), .. })) = self.found else { return false };
        let is_known = |name: &str| self.configuration.snapshot.clusters.contains_key(name);
        match &forward.targets {
            Targets::Weighted { targets, .. } => targets.iter().any(|target| is_known(&target.cluster)),
            Targets::Single(_) | Targets::Header(_) => {
                forward.cluster(None, &self.head).is_some_and(is_known)
            }
        }
    }

    /// Returns the record of the request so far, from which formats take values.
    pub(super) fn record(&self) -> Record<'_> {
        let subject = &self.subject;
        Record {
            attempts: 1,
            downstream: Some(subject.peer),
            downstream_local: Some(subject.destination),
            downstream_remote: Some(SocketAddr::new(subject.remote, subject.source.port())),
            downstream_direct: Some(subject.source),
            server_name: subject.server_name,
            metadata: Some(&self.metadata),
            route_name: self.found.map_or("", |(_, route)| &route.name),
            ..Record::new(Direction::Unspecified, SystemTime::now())
        }
    }

    fn mutate(&mut self, config: &HeaderMutation, setting: Option<&Setting>) {
        let mut head = std::mem::take(&mut self.head);
        for list in mutation_lists(config, setting) {
            mutation::apply_request(list, &mut head, &self.record());
        }
        self.head = head;
    }
}

/// Returns the report of a filter with an effect in words.
pub(super) fn effect(name: &str, text: &str) -> FilterReport {
    FilterReport { name: name.to_owned(), effect: text.to_owned(), ..FilterReport::default() }
}

/// Returns the status with which a fault aborts every such request.
fn certain_abort(fault: &Fault, head: &RequestHead) -> Option<u16> {
    match &fault.abort {
        Some((ALL.., Abort::Http(status))) if matching::headers(&fault.headers, head) => Some(*status),
        Some((ALL.., Abort::Grpc(_))) if matching::headers(&fault.headers, head) => Some(200),
        _ => None,
    }
}

fn fault_words(fault: &Fault, head: &RequestHead) -> Option<String> {
    if !matching::headers(&fault.headers, head) {
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

/// Returns the rules before the one that matches, with the reasons why they do not.
fn unmatched(rules: &Rules, subject: &Subject<'_>) -> Vec<(String, String)> {
    let reason = |rule: &Rule| Some((rule.name.to_string(), rbac::mismatch(rule, rules.action, subject)?));
    rules.rules.iter().map_while(reason).collect()
}

/// Evaluates the policy of an RBAC filter and records its verdicts. Its results for later filters are added
/// to `tally`. Returns whether it admits the request.
fn check(
    name: &str,
    policy: &Arc<Policy>,
    subject: &Subject<'_>,
    tally: &mut Tally,
    explained: &mut Explanation,
) -> bool {
    let verdict = rbac::check(std::slice::from_ref(policy), subject, tally);
    let admitted = verdict == Verdict::Allow;
    let report = |rules: &Rules, is_enforced: bool, allowed: bool| FilterReport {
        name: name.to_owned(),
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
        ..FilterReport::default()
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
