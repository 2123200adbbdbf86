//! Matches of VirtualServices that are not compiled for a proxy, because they are for other clients. Explanations show
//! them.

use super::{
    Scope,
    client_match::{ClientConditions, ClientFacts, Exclusion, exclusion},
    listeners::l4_conditions,
    routes::http_conditions,
};
use crate::{
    ClientScope, Kind, ObjectKey, ProxyView, Role, World,
    api::{Typed, VirtualService},
    world::{fqdn, gateway_name, is_within},
};

/// Rules of a VirtualService.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleKind {
    /// `spec.http`
    Http,
    /// `spec.tcp` and `spec.tls`
    Connection,
}

/// A match of a VirtualService, or a whole VirtualService, that does not apply to a proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExcludedMatch {
    /// VirtualService.
    pub rule: ObjectKey,
    /// Field of the match, or of the condition of the whole VirtualService.
    pub field: String,
    /// Property of the proxy and the expected one, such as `client label app is back, expected: front`.
    pub reason: String,
}

/// Returns the matches of VirtualServices for a host (full name) that do not apply to a proxy because of its port, its
/// gateways, its labels or its namespace. `port` is that of the service, or of the server of a Gateway.
pub fn excluded_matches(
    world: &World,
    view: &ProxyView,
    kind: RuleKind,
    host: &str,
    port: u16,
) -> Vec<ExcludedMatch> {
    let client_scope = ClientScope::of(view, &world.grouping());
    let search = Search { world, view, scope: &Scope::new(world, &client_scope), kind, port };
    let host = host.to_ascii_lowercase();
    let of_host = |rule: &&Typed<VirtualService>| {
        let mut hosts = rule.spec.hosts.iter().map(|host| fqdn(host, &rule.meta.namespace));
        hosts.any(|own| is_within(&host, &own) || is_within(&own, &host))
    };
    // Each internal VirtualService of Gateway API is for one gateway or service.
    let written = |rule: &&Typed<VirtualService>| rule.spec.derived.is_none();
    let rules = world.all_virtual_services().filter(written).filter(of_host);
    let mut found: Vec<ExcludedMatch> = rules.flat_map(|rule| search.of_rule(rule, &host)).collect();
    found.sort_by(|one, other| one.rule.cmp(&other.rule));
    found
}

struct Search<'a> {
    world: &'a World,
    view: &'a ProxyView,
    scope: &'a Scope<'a>,
    kind: RuleKind,
    port: u16,
}

impl Search<'_> {
    fn of_rule(&self, rule: &Typed<VirtualService>, host: &str) -> Vec<ExcludedMatch> {
        let has_rules = match self.kind {
            RuleKind::Http => !rule.spec.http.is_empty(),
            RuleKind::Connection => !rule.spec.tcp.is_empty() || !rule.spec.tls.is_empty(),
        };
        if !has_rules {
            return Vec::new();
        }
        let mut found =
            if self.view.role == Role::Router { self.at_gateway(rule) } else { self.at_sidecar(rule, host) };
        if rule.spec.hosts.iter().any(|host| host == "*") {
            // A VirtualService for all hosts is not meant for this one in particular: only its matches are shown.
            found.retain(|found| found.field.contains(".match["));
        }
        found
    }

    fn at_gateway(&self, rule: &Typed<VirtualService>) -> Vec<ExcludedMatch> {
        let served = self.world.gateways(&self.view.namespace, &self.view.labels);
        let served: Vec<String> =
            served.iter().map(|of| format!("{}/{}", of.meta.namespace, of.meta.name)).collect();
        let owner = &rule.meta.namespace;
        let bound = rule.spec.gateways.iter().map(|name| gateway_name(name, owner));
        match bound.into_iter().find(|name| served.contains(name)) {
            Some(gateway) => self.matches(rule, Some(&gateway)),
            None => {
                let has = if served.is_empty() {
                    "no gateway".to_owned()
                } else {
                    format!("gateway {}", served.join(", "))
                };
                vec![whole(rule, "spec.gateways", format!("{has}, expected: {}", gateways(rule)))]
            }
        }
    }

    fn at_sidecar(&self, rule: &Typed<VirtualService>, host: &str) -> Vec<ExcludedMatch> {
        if !rule.spec.is_for_mesh() {
            let reason = format!("gateway mesh (a sidecar), expected: {}", gateways(rule));
            return vec![whole(rule, "spec.gateways", reason)];
        }
        let is_it = |other: &Typed<VirtualService>| std::ptr::eq(other, rule);
        if !self.world.virtual_services(&self.view.namespace).into_iter().any(|other| is_it(other)) {
            let reason = format!("namespace {}, to which it is not exported", self.view.namespace);
            return vec![whole(rule, "spec.exportTo", reason)];
        }
        let is_routed = match self.kind {
            RuleKind::Http => {
                let used = self.scope.virtual_service_on(host, self.port);
                used.or_else(|| self.scope.virtual_service(host)).is_some_and(|used| is_it(used))
            }
            RuleKind::Connection => true,
        };
        if is_routed { self.matches(rule, None) } else { Vec::new() }
    }

    fn matches(&self, rule: &Typed<VirtualService>, gateway: Option<&str>) -> Vec<ExcludedMatch> {
        let view = self.view;
        let client =
            ClientFacts { port: self.port, gateway, labels: &view.labels, namespace: &view.namespace };
        let mut found = Vec::new();
        let mut add = |field: String, wanted: ClientConditions<'_>| {
            if let Some(why) = exclusion(&wanted, &client, &rule.meta.namespace) {
                found.push(whole(rule, &field, words(why, &wanted, &client)));
            }
        };
        let at = |list: &str, of: usize, matched: usize| format!("spec.{list}[{of}].match[{matched}]");
        if self.kind == RuleKind::Http {
            for (of, http) in rule.spec.http.iter().enumerate() {
                for (matched, wanted) in http.matches.iter().enumerate() {
                    add(at("http", of, matched), http_conditions(wanted));
                }
                if http.matches.is_empty() {
                    break;
                }
            }
            return found;
        }
        let lists = rule.spec.tls.iter().map(|tls| &tls.matches).enumerate().map(|of| ("tls", of));
        let lists =
            lists.chain(rule.spec.tcp.iter().map(|tcp| &tcp.matches).enumerate().map(|of| ("tcp", of)));
        for (list, (of, matches)) in lists {
            for (matched, wanted) in matches.iter().enumerate() {
                add(at(list, of, matched), l4_conditions(wanted, gateway.is_some()));
            }
        }
        found
    }
}

fn whole(rule: &Typed<VirtualService>, field: &str, reason: String) -> ExcludedMatch {
    let (namespace, name) = (rule.meta.namespace.clone(), rule.meta.name.clone());
    let rule = ObjectKey { kind: Kind::VirtualService, namespace, name };
    ExcludedMatch { rule, field: field.to_owned(), reason }
}

fn gateways(rule: &Typed<VirtualService>) -> String {
    let names =
        if rule.spec.gateways.is_empty() { vec!["mesh".to_owned()] } else { rule.spec.gateways.clone() };
    names.join(" or ")
}

fn words(why: Exclusion, wanted: &ClientConditions<'_>, client: &ClientFacts<'_>) -> String {
    match why {
        Exclusion::Port => {
            format!("port {}, expected: {}", client.port, wanted.port.unwrap_or_default())
        }
        Exclusion::Gateways => {
            let own = client.gateway.unwrap_or("mesh (a sidecar)");
            format!("gateway {own}, expected: {}", wanted.gateways.join(" or "))
        }
        Exclusion::Labels => {
            let differs = |(name, value): &(&String, &String)| client.labels.get(*name) != Some(*value);
            let Some((name, value)) = wanted.labels.iter().find(differs) else { return String::new() };
            match client.labels.get(name) {
                Some(own) => format!("client label {name} is {own}, expected: {value}"),
                None => format!("client label {name} is absent, expected: {value}"),
            }
        }
        Exclusion::Namespace => {
            format!("client namespace {}, expected: {}", client.namespace, wanted.namespace)
        }
    }
}
