//! Policies about HTTP for workloads that serve something else.

use super::super::{ObjectReport, Report, workloads};
use super::services::has_http;
use crate::{
    World,
    analysis::Code,
    api::{
        AuthorizationPolicy, Kind, Labels, Protocol, Service, Typed,
        destination_rule::WorkloadSelector,
        security::{Action, Rule},
    },
    clause::Clause,
};

impl Report<'_> {
    /// Reports policies with attributes of HTTP for workloads without an HTTP port, and policies for tokens whose
    /// workloads have ports of another protocol.
    pub(super) fn policies_on_tcp(&mut self) {
        let world = self.world.unrecorded();
        for entry in world.authorization_policies.iter() {
            let about = ObjectReport { entry, kind: Kind::AuthorizationPolicy };
            let spec = &entry.object.spec;
            let Some(index) = http_rule(spec).filter(|_| spec.action != Action::Audit) else { continue };
            let services = services_of(world, about.namespace(), spec.selector.as_ref());
            if services.is_empty() || services.iter().any(|service| has_http(&service.spec)) {
                continue;
            }
            let message = format!(
                "the rule uses HTTP attributes, and Service {} has no HTTP port",
                services[0].meta.name
            );
            let remedy = "use principals, namespaces, ipBlocks and ports, or name the port http";
            self.report(&about, Code::HttpRuleOnTcp, format!("spec.rules[{index}]"), message, remedy);
        }
        for entry in world.request_authentications.iter() {
            let about = ObjectReport { entry, kind: Kind::RequestAuthentication };
            let selector = entry.object.spec.selector.as_ref();
            if selector.is_none_or(|selector| selector.match_labels.is_empty()) {
                continue;
            }
            for service in services_of(world, about.namespace(), selector) {
                let other = |protocol: Protocol| {
                    !protocol.is_http() && !matches!(protocol, Protocol::Unknown | Protocol::Udp)
                };
                let Some(port) = service.spec.ports.iter().find(|port| other(port.protocol)) else {
                    continue;
                };
                let message = format!(
                    "port {} ({}) of Service {} is not HTTP, so its connections have no tokens",
                    port.port, port.name, service.meta.name
                );
                self.report(
                    &about,
                    Code::JwtOnTcpPort,
                    "spec.selector",
                    message,
                    "name the port http or http-...",
                );
            }
        }
    }
}

/// Returns the Services of the workloads that a selector matches, without a selector none. The proxies of Gateways do not
/// count: what they serve is in their Gateways.
fn services_of<'a>(
    world: &'a World,
    namespace: &str,
    selector: Option<&WorkloadSelector>,
) -> Vec<&'a Typed<Service>> {
    let Some(selector) = selector.map(|selector| &selector.match_labels).filter(|of| !of.is_empty()) else {
        return Vec::new();
    };
    let gateways: Vec<&Labels> = world.gateways.iter().map(|entry| &entry.object.spec.selector).collect();
    let is_gateway = |labels: &Labels| {
        gateways.iter().any(|selector| !selector.is_empty() && crate::api::selects(selector, labels))
    };
    let selected: Vec<&Labels> =
        workloads(world, Some(namespace), selector).filter(|labels| !is_gateway(labels)).collect();
    let services = world.services.in_namespace(namespace).map(|entry| &*entry.object);
    let selects_one = |service: &&Typed<Service>| {
        let of = &service.spec.selector;
        !of.is_empty() && selected.iter().any(|labels| crate::api::selects(of, labels))
    };
    services.filter(selects_one).collect()
}

/// Returns the first rule with an attribute that only HTTP requests have.
fn http_rule(spec: &AuthorizationPolicy) -> Option<usize> {
    let needs_http = |rule: &Rule| {
        let sources = rule.from.iter().flat_map(|from| Clause::of_source(&from.source));
        let operations = rule.to.iter().flat_map(|to| Clause::of_operation(&to.operation));
        let conditions = rule.when.iter().filter_map(Clause::of_condition);
        sources.chain(operations).chain(conditions).any(|clause| clause.needs_http())
    };
    spec.rules.iter().position(needs_http)
}
