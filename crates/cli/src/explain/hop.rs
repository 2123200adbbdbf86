//! The decisions of one proxy with the objects that cause them.

use std::net::SocketAddr;

use skysail_model::api::MtlsMode;
use skysail_proxy::explain::{Explanation, FilterReport, Outcome as Decided, Target, TlsReport};
use skysail_sandbox::OfflinePod;

use super::{
    proxies::Proxy,
    report::{FilterStep, Hop, Item, Outcome, RouteStep, Source, TargetStep, UnmatchedRule},
    sources::{RouteSources, Sources},
};

/// Listeners that intercepted connections reach.
pub(super) const OUTBOUND: &str = "virtualOutbound";
pub(super) const INBOUND: &str = "virtualInbound";

/// A proxy on the way.
pub(super) struct Place<'a> {
    pub(super) pod: &'a OfflinePod,
    pub(super) proxy: &'a Proxy,
    /// `outbound`, `inbound` or `gateway`.
    pub(super) direction: &'static str,
}

/// The connection that a proxy receives.
pub(super) struct Received<'a> {
    pub(super) destination: SocketAddr,
    /// TLS of the proxy before.
    pub(super) tls: Option<&'a TlsReport>,
    /// The client itself sends TLS.
    pub(super) client_tls: bool,
    /// Identity of the proxy before.
    pub(super) principal: Option<&'a str>,
}

/// Describes the decisions of a proxy.
pub(super) fn describe(
    sources: &Sources<'_>,
    place: &Place<'_>,
    explained: &Explanation,
    received: &Received<'_>,
) -> Hop {
    let Place { pod, proxy, direction } = *place;
    let (port, is_inbound) = (received.destination.port(), direction == "inbound");
    let routes = match explained.protocol {
        "http" if !is_inbound => sources.routes(proxy, &explained.virtual_host, &explained.routes),
        _ => RouteSources::default(),
    };
    let taken = explained.routes.iter().position(|route| route.mismatch.is_none());
    let setting = |name: &str| routes.setting(sources, taken?, name);
    let (mtls_mode, mtls_source) = match is_inbound {
        true => (mtls_mode(sources, proxy, port), sources.peer_mode(proxy, port)),
        false => ("", None),
    };
    let mesh_tls = received.tls.is_some_and(|tls| tls.is_mesh);
    let transport = match (mesh_tls, received.tls.is_some() || received.client_tls) {
        (true, _) => "mutual TLS",
        (false, true) => "TLS",
        (false, false) => "plain text",
    };
    Hop {
        proxy: format!("{}/{}", pod.namespace, pod.owner.name),
        direction,
        transport: transport.to_owned(),
        principal: received.principal.filter(|_| mesh_tls).map(ToOwned::to_owned),
        mtls_mode,
        mtls_source,
        listener: Item {
            name: explained.listener.clone(),
            source: match is_inbound {
                true => None,
                false => listener_source(sources, &explained.listener, received.destination),
            },
        },
        filter_chain: Item {
            name: explained.filter_chain.clone(),
            source: chain_source(sources, place, explained, port),
        },
        protocol: explained.protocol,
        route_table: explained.route_table.clone(),
        virtual_host: explained.virtual_host.clone(),
        routes: route_steps(explained, &routes),
        filters: explained.filters.iter().map(|filter| filter_step(sources, filter, &setting)).collect(),
        targets: explained.targets.iter().map(|target| target_step(sources, target)).collect(),
        timeout: explained.timeout,
        timeout_source: setting("timeout"),
        idle_timeout: explained.idle_timeout,
        retry: explained.retry.clone(),
        retry_source: setting("retries"),
        mirrors: explained.mirrors.clone(),
        outcome: outcome(explained),
        on_demand: on_demand(proxy, explained),
        refused_resources: proxy.refused.clone(),
    }
}

fn mtls_mode(sources: &Sources<'_>, proxy: &Proxy, port: u16) -> &'static str {
    match sources.world.peer_mode(&proxy.view.namespace, &proxy.view.labels, port) {
        MtlsMode::Strict => "STRICT",
        MtlsMode::Disable => "DISABLE",
        MtlsMode::Permissive | MtlsMode::Unset => "PERMISSIVE",
    }
}

fn listener_source(sources: &Sources<'_>, listener: &str, destination: SocketAddr) -> Option<Source> {
    if [OUTBOUND, INBOUND].contains(&listener) {
        return None;
    }
    sources.service_at(destination.ip(), destination.port())
}

fn chain_source(
    sources: &Sources<'_>,
    place: &Place<'_>,
    explained: &Explanation,
    port: u16,
) -> Option<Source> {
    if let Some(path) = &explained.filter_chain_origin {
        return sources.path(path, "");
    }
    let is_known = !explained.filter_chain.is_empty() && !explained.filter_chain.starts_with(INBOUND);
    let is_inbound = place.direction == "inbound" && is_known;
    is_inbound.then(|| sources.service_of_port(place.pod, place.proxy, port)).flatten()
}

fn filter_step(
    sources: &Sources<'_>,
    filter: &FilterReport,
    setting: &impl Fn(&str) -> Option<Source>,
) -> FilterStep {
    let mut step = FilterStep {
        name: filter.name.clone(),
        effect: filter.effect.clone(),
        action: "",
        enforced: true,
        allowed: true,
        matched: String::new(),
        sources: Vec::new(),
        unmatched: Vec::new(),
    };
    match &filter.policy {
        Some(policy) => {
            step.action = policy.action;
            (step.enforced, step.allowed) = (policy.is_enforced, policy.allowed);
            step.matched = policy.matched.clone().unwrap_or_default();
            step.unmatched = policy
                .unmatched
                .iter()
                .map(|(rule, mismatch)| UnmatchedRule {
                    rule: rule.clone(),
                    mismatch: mismatch.clone(),
                    source: sources.policy_rule(rule),
                })
                .collect();
            step.sources = match &policy.matched {
                Some(rule) => sources.policy_rule(rule).into_iter().collect(),
                None => sources.policies(&policy.rules),
            };
        }
        None => {
            let field = match filter.name.rsplit('.').next() {
                Some("fault") => "fault",
                Some("cors") => "corsPolicy",
                _ => "",
            };
            step.sources.extend(setting(field));
        }
    }
    step
}

fn target_step(sources: &Sources<'_>, target: &Target) -> TargetStep {
    let report = target.report.as_ref();
    TargetStep {
        cluster: target.cluster.clone(),
        share: target.share,
        subset: report.map(|report| report.subset.clone()).unwrap_or_default(),
        source: report.and_then(|report| sources.rule(report)),
        services: report.map(|report| sources.services(report)).unwrap_or_default(),
        balancer: report.map(|report| report.balancer.to_owned()).unwrap_or_default(),
        connect_timeout: report.map_or(0.0, |report| report.connect_timeout),
        endpoints: report.map(|report| report.endpoints.clone()).unwrap_or_default(),
        resolves: report.map(|report| report.resolves.clone()).unwrap_or_default(),
        failure: target.failure.as_ref().map(|(_, reason)| reason.clone()).unwrap_or_default(),
        rewritten_path: target.rewritten_path.clone(),
        rewritten_host: target.rewritten_host.clone(),
        header_changes: target.header_changes.clone(),
    }
}

/// Returns the resources of an explanation that the proxy does not hold yet.
fn on_demand(proxy: &Proxy, explained: &Explanation) -> Vec<String> {
    let clusters = explained.targets.iter().filter(|target| target.share > 0.0).map(|target| &target.cluster);
    let names = std::iter::once(&explained.virtual_host).chain(clusters);
    names.filter(|name| proxy.on_demand.contains(*name)).cloned().collect()
}

fn route_steps(explained: &Explanation, sources: &RouteSources) -> Vec<RouteStep> {
    let steps = explained.routes.iter().enumerate().map(|(at, route)| RouteStep {
        index: route.index,
        name: route.name.clone(),
        taken: route.mismatch.is_none(),
        mismatch: route.mismatch.clone().unwrap_or_default(),
        source: sources.routes.get(at).cloned().flatten(),
    });
    steps.collect()
}

fn outcome(explained: &Explanation) -> Outcome {
    match &explained.outcome {
        Decided::Forwarded => Outcome { kind: "forwarded", status: None, reason: String::new() },
        Decided::Responded(status, reason) => {
            Outcome { kind: "responded", status: Some(*status), reason: reason.clone() }
        }
        Decided::Refused(reason) => Outcome { kind: "closed", status: None, reason: reason.clone() },
    }
}
