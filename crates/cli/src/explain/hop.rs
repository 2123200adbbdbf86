//! The decisions of one proxy with the objects that cause them.

use std::net::SocketAddr;

use skysail_model::{TokenRule, api::MtlsMode, gateway_l4_source, token_rules};
use skysail_proxy::explain::{
    CertificateVerdict, ClusterReport, Explanation, FilterReport, Outcome as Decided, Target, TlsReport,
    TokenReport,
};
use skysail_sandbox::OfflinePod;

use super::{
    excluded, gateway,
    proxies::Proxy,
    report::{
        CertificateStep, FilterStep, Hop, Item, Outcome, RouteStep, Source, TargetStep, TokenStep,
        UnmatchedRule,
    },
    sources::{RouteSources, Sources},
};

/// Listeners that intercepted connections reach.
pub(super) const OUTBOUND: &str = "virtualOutbound";
pub(super) const INBOUND: &str = "virtualInbound";

/// A proxy on the path of a request.
pub(super) struct Place<'a> {
    pub(super) pod: &'a OfflinePod,
    pub(super) proxy: &'a Proxy,
    /// `outbound`, `inbound` or `gateway`.
    pub(super) direction: &'static str,
}

/// The connection that a proxy receives.
pub(super) struct Received<'a> {
    pub(super) destination: SocketAddr,
    /// TLS that the previous proxy originates.
    pub(super) tls: Option<&'a TlsReport>,
    /// The client itself sends TLS.
    pub(super) client_tls: bool,
    /// SNI; empty for none.
    pub(super) server_name: &'a str,
    /// Host of the request without a port; empty for connections.
    pub(super) host: &'a str,
    /// Identity of the previous proxy, or of a client that sends TLS itself.
    pub(super) principal: Option<&'a str>,
}

impl Received<'_> {
    /// Returns whether the proxy receives TLS.
    pub(super) fn is_tls(&self) -> bool {
        self.tls.is_some() || self.client_tls
    }
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
    let taken = explained.routes.iter().position(|route| route.mismatch.is_none() && route.share.is_none());
    let setting = |name: &str| routes.setting(sources, taken?, name);
    let (mtls_mode, mtls_source) = match is_inbound {
        true => (mtls_mode(sources, proxy, port), sources.peer_mode(proxy, port)),
        false => ("", None),
    };
    let is_presented = match &explained.certificate {
        // Without a filter chain, no certificate is requested. That of a sidecar counts as presented.
        CertificateVerdict::Absent => {
            !explained.has_filter_chain && received.tls.is_some_and(|tls| tls.is_mesh)
        }
        verdict => verdict.is_presented(),
    };
    let principal = received.principal.filter(|_| is_presented);
    let transport = match (principal, received.is_tls()) {
        (Some(_), true) => "mutual TLS",
        (None, true) => "TLS",
        (_, false) => "plain text",
    };
    let is_gateway = direction == "gateway";
    let servers = if is_gateway { gateway::servers(sources, place, explained, received) } else { Vec::new() };
    Hop {
        proxy: format!("{}/{}", pod.namespace, pod.owner.name),
        direction,
        transport: transport.to_owned(),
        principal: principal.map(ToOwned::to_owned),
        server_name: if received.tls.is_none() { received.server_name.to_owned() } else { String::new() },
        certificate: certificate(explained, received),
        mtls_mode,
        mtls_source,
        listener: Item {
            name: explained.listener.clone(),
            source: match direction {
                "inbound" => None,
                "gateway" if explained.listener.is_empty() => None,
                "gateway" => sources.service_of_port(pod, proxy, port),
                _ => listener_source(sources, &explained.listener, received.destination),
            },
        },
        servers,
        filter_chain: Item {
            name: explained.filter_chain.clone(),
            source: chain_source(sources, place, explained, port),
        },
        server_names: explained.server_names.clone(),
        unmatched_chains: explained.unmatched_chains.clone(),
        protocol: explained.protocol,
        route_table: explained.route_table.clone(),
        virtual_host: explained.virtual_host.clone(),
        excluded_matches: excluded::matches(sources, place, explained, received, &routes),
        routes: route_steps(explained, &routes),
        filters: filters(sources, proxy, explained, &setting),
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

/// Returns the verdict about the client's certificate; `None` without one, and for a valid one of the mesh.
fn certificate(explained: &Explanation, received: &Received<'_>) -> Option<CertificateStep> {
    let is_mesh = received.tls.is_some_and(|tls| tls.is_mesh);
    let (verdict, reason) = match &explained.certificate {
        CertificateVerdict::Absent => return None,
        CertificateVerdict::Valid if is_mesh => return None,
        CertificateVerdict::Valid => ("valid", ""),
        CertificateVerdict::NotRequested => ("not requested", ""),
        CertificateVerdict::Assumed(secret) => ("assumed", secret.as_str()),
        CertificateVerdict::Refused(reason) => ("refused", reason.as_str()),
        CertificateVerdict::Ignored(reason) => ("ignored", reason.as_str()),
    };
    let name = received.principal.unwrap_or_default().to_owned();
    Some(CertificateStep { name, verdict, reason: reason.to_owned() })
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
    let Place { proxy, direction, .. } = *place;
    if direction == "gateway" && explained.protocol != "http" {
        let found = gateway_l4_source(sources.world, &proxy.view, port, &explained.server_names);
        return found.filter(|_| explained.has_filter_chain).map(|(key, field)| sources.of(&key, &field));
    }
    if let Some(path) = &explained.filter_chain_origin {
        let field = sources.l4_field(proxy, path, port, &explained.server_names);
        return sources.path(path, &field.unwrap_or_default());
    }
    let is_known = !explained.filter_chain.is_empty() && !explained.filter_chain.starts_with(INBOUND);
    let is_inbound = place.direction == "inbound" && is_known;
    is_inbound.then(|| sources.service_of_port(place.pod, place.proxy, port)).flatten()
}

/// Describes the filters, with the rules behind policies, tokens and limits.
fn filters(
    sources: &Sources<'_>,
    proxy: &Proxy,
    explained: &Explanation,
    setting: &impl Fn(&str) -> Option<Source>,
) -> Vec<FilterStep> {
    let has_tokens = explained.filters.iter().any(|filter| !filter.tokens.is_empty());
    let rules = if has_tokens { token_rules(sources.world, &proxy.view) } else { Vec::new() };
    let step = |filter: &FilterReport| {
        let tokens = filter.tokens.iter().map(|token| token_step(sources, rules.get(token.rule), token));
        FilterStep { tokens: tokens.collect(), ..filter_step(sources, filter, setting) }
    };
    explained.filters.iter().map(step).collect()
}

fn token_step(sources: &Sources<'_>, rule: Option<&TokenRule>, token: &TokenReport) -> TokenStep {
    let keys_from = rule.map(|rule| rule.keys_from.clone()).unwrap_or_default();
    TokenStep {
        place: token.place.clone(),
        principal: token.principal.clone(),
        refused: token.refused.clone().unwrap_or_default(),
        unknown_keys: if token.is_assumed { keys_from.clone() } else { String::new() },
        keys_from,
        claims: token.claims.clone(),
        source: rule.map(|rule| sources.of(&rule.policy, &rule.field)),
    }
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
        tokens: Vec::new(),
        limit: filter.limit.clone(),
        asks: filter.asks.clone(),
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
        None if filter.limit.is_some() => step.sources.extend(sources.limit(&filter.name)),
        None => {
            let field = match filter.name.rsplit('.').next() {
                Some("fault") => "fault",
                Some("cors") => "corsPolicy",
                _ => "",
            };
            step.sources.extend(setting(field));
        }
    }
    if let Some(extension) = sources.extension(&filter.name) {
        step.sources = vec![extension];
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
        ejections: report.map(ejections).unwrap_or_default(),
        resolves: report.map(|report| report.resolves.clone()).unwrap_or_default(),
        failure: target.failure.as_ref().map(|(_, reason)| reason.clone()).unwrap_or_default(),
        rewritten_path: target.rewritten_path.clone(),
        rewritten_host: target.rewritten_host.clone(),
        header_changes: target.header_changes.clone(),
    }
}

fn ejections(report: &ClusterReport) -> &'static str {
    match (report.has_outlier_detection, report.knows_ejections) {
        (false, _) => "",
        (true, true) => "known",
        (true, false) => "unknown",
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
        share: route.share,
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
