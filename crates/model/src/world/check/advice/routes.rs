//! VirtualServices: hosts that are not exported, destinations without a port, covered matches, claims of tokens.

use std::collections::BTreeSet;

use super::super::{ObjectReport, Report, rules::destinations, runs_in};
use crate::{
    World,
    analysis::Code,
    api::{Kind, Labels, Service, Typed, VirtualService, selects, virtual_service::HttpMatchRequest},
    coverage::{covers_connection, covers_request},
    world::{gateway_name, hosts::fqdn, store::Entry},
};

/// Prefix of the headers that stand for claims of tokens. Source: Istio's "JWT claim based routing".
const CLAIMS: &str = "@request.auth.claims";
/// Maximum number of rules compared, to bound the time.
const MAX_RULES: usize = 200;

impl Report<'_> {
    /// Reports destinations that the namespace of the rule does not see, and those without a port where the Service has
    /// several.
    pub(super) fn hidden_and_ambiguous_hosts(&mut self) {
        let world = self.world.unrecorded();
        for entry in written(world) {
            let about = ObjectReport { entry, kind: Kind::VirtualService };
            let ports = arriving(world, entry);
            for (rule, route) in entry.object.spec.http.iter().enumerate() {
                for (at, destination) in destinations(route) {
                    let full = fqdn(&destination.host, about.namespace());
                    let Some(service) = world.service(world.aliased(&full)) else { continue };
                    let at = format!("spec.http[{rule}].{at}");
                    if let Some(hidden) = hidden_from(world, entry, service) {
                        let message =
                            format!("{full} is not exported to namespace {hidden}; requests get 503");
                        let remedy = "add the namespace to exportTo of the Service or ServiceEntry";
                        self.report(&about, Code::HiddenHost, format!("{at}.host"), message, remedy);
                    }
                    if destination.port.is_none() {
                        self.port_of_request(&about, service, &ports, format!("{at}.port"));
                    }
                }
            }
        }
    }

    /// Checks a destination without a port. The port of the request is used, except at a gateway for a Service that has
    /// one port only.
    fn port_of_request(
        &mut self,
        about: &ObjectReport<'_, VirtualService>,
        service: &Typed<Service>,
        arriving: &BTreeSet<(bool, u16)>,
        field: String,
    ) {
        let (name, ports) = (service.fqdn(), &service.spec.ports);
        let serves = |(at_gateway, number): &(bool, u16)| {
            *at_gateway && ports.len() == 1 || ports.iter().any(|port| port.port == *number)
        };
        if !arriving.is_empty() && !arriving.iter().any(serves) {
            let numbers: BTreeSet<u16> = arriving.iter().map(|(_, number)| *number).collect();
            let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
            let message = format!(
                "is missing, so the port of the request ({}) is used, which {name} does not have; requests get 503",
                numbers.join(", ")
            );
            let own: Vec<String> = ports.iter().map(|port| port.port.to_string()).collect();
            let remedy = format!("set port.number to a port of the service: {}", own.join(", "));
            self.report(about, Code::UnknownDestinationPort, field, message, remedy);
        } else if ports.len() > 1 && service.spec.entry_host.is_none() {
            let message =
                format!("{name} has {} ports and none is named, so the request's port is used", ports.len());
            self.report(about, Code::DestinationPortRequired, field, message, "set port.number");
        }
    }

    /// Reports matches that an earlier match of the same rule, or of an earlier one, covers.
    pub(super) fn covered_matches(&mut self) {
        for entry in written(self.world.unrecorded()) {
            let about = ObjectReport { entry, kind: Kind::VirtualService };
            let spec = &entry.object.spec;
            // The delegate of a rule may match less than the rule.
            let http = spec.http.iter().map(|rule| (&*rule.matches, rule.delegate.is_none()));
            let tcp = spec.tcp.iter().map(|rule| (&*rule.matches, true));
            let tls = spec.tls.iter().map(|rule| (&*rule.matches, true));
            self.covered(&about, "http", http, covers_request);
            self.covered(&about, "tcp", tcp, covers_connection);
            self.covered(&about, "tls", tls, covers_connection);
        }
    }

    /// Reports covered matches of a list of rules. Each rule has its matches, and whether it takes all requests that
    /// they match.
    fn covered<'r, T: Default + 'r>(
        &mut self,
        about: &ObjectReport<'_, VirtualService>,
        list: &str,
        rules: impl Iterator<Item = (&'r [T], bool)>,
        covers: fn(&T, &T) -> bool,
    ) {
        let any = [T::default()];
        let mut seen: Vec<(usize, usize, &T)> = Vec::new();
        for (rule, (matches, takes_all)) in rules.enumerate().take(MAX_RULES) {
            let matches = if matches.is_empty() { &any[..] } else { matches };
            let matches = || matches.iter().enumerate().take(MAX_RULES);
            let is_whole = |earlier: &[(usize, usize, &T)]| {
                matches().all(|(_, matched)| earlier.iter().any(|(.., wide)| covers(wide, matched)))
            };
            // A rule that an earlier one covers as a whole is reported as unreachable.
            if seen.chunk_by(|one, other| one.0 == other.0).any(is_whole) {
                continue;
            }
            for (index, matched) in matches() {
                if let Some((of, at, wide)) = seen.iter().find(|(.., wide)| covers(wide, matched)) {
                    let message = if covers(matched, wide) {
                        format!("repeats {list}[{of}].match[{at}]")
                    } else {
                        format!("has no effect: {list}[{of}].match[{at}] covers it")
                    };
                    let field = format!("spec.{list}[{rule}].match[{index}]");
                    self.report(about, Code::DuplicateMatch, field, message, "remove it");
                }
                if takes_all && seen.len() < MAX_RULES {
                    seen.push((rule, index, matched));
                }
            }
        }
    }

    /// Reports matches on claims of tokens at gateways that verify no tokens.
    pub(super) fn claims_at_gateways(&mut self) {
        let world = self.world.unrecorded();
        for entry in written(self.world.unrecorded()) {
            let about = ObjectReport { entry, kind: Kind::VirtualService };
            let spec = &entry.object.spec;
            let claims = spec.http.iter().enumerate().find_map(|(rule, route)| {
                let mut matches = route.matches.iter().enumerate();
                let uses = |found: &HttpMatchRequest| {
                    found
                        .headers
                        .keys()
                        .chain(found.without_headers.keys())
                        .any(|name| name.starts_with(CLAIMS))
                };
                let (index, _) = matches.find(|(_, found)| uses(found))?;
                Some(format!("spec.http[{rule}].match[{index}].headers"))
            });
            let Some(field) = claims else { continue };
            for written in spec.gateways.iter().filter(|written| *written != "mesh") {
                let name = gateway_name(written, about.namespace());
                let Some((namespace, bare)) = name.split_once('/') else { continue };
                let Some(gateway) = world.gateways.get(namespace, bare) else { continue };
                if !self.verifies_tokens(namespace, &gateway.object.spec.selector) {
                    let message = format!(
                        "no RequestAuthentication applies to the pods of Gateway {name}, so no request has claims"
                    );
                    let remedy = "add a RequestAuthentication with the selector of the Gateway";
                    self.report(&about, Code::ClaimsWithoutTokens, field.clone(), message, remedy);
                }
            }
        }
    }

    /// Returns whether a policy for tokens applies to pods with these labels, or to such a pod if none is known.
    fn verifies_tokens(&self, namespace: &str, selector: &Labels) -> bool {
        let world = self.world.unrecorded();
        let pods = world.pods().map(|pod| (&pod.meta.namespace, &*pod.meta.labels));
        let templates = world.templates().map(|template| (&template.meta.namespace, &template.spec.labels));
        let mut known = pods.chain(templates).filter(|(_, labels)| selects(selector, labels)).peekable();
        if known.peek().is_none() {
            return !world.request_authentications(namespace, selector).is_empty();
        }
        known.any(|(namespace, labels)| !world.request_authentications(namespace, labels).is_empty())
    }

    /// Reports namespaces of `exportTo` in which nothing runs. Reports nothing while no workload is known.
    pub(super) fn export_to(&mut self) {
        if self.world.unrecorded().pods().next().is_none()
            && self.world.unrecorded().templates().next().is_none()
        {
            return;
        }
        let world = self.world.unrecorded();
        for entry in written(self.world.unrecorded()) {
            self.exported(&ObjectReport { entry, kind: Kind::VirtualService }, &entry.object.spec.export_to);
        }
        for entry in world.destination_rules.iter() {
            self.exported(&ObjectReport { entry, kind: Kind::DestinationRule }, &entry.object.spec.export_to);
        }
        for entry in world.service_entries.iter() {
            self.exported(&ObjectReport { entry, kind: Kind::ServiceEntry }, &entry.object.spec.export_to);
        }
    }

    fn exported<T>(&mut self, about: &ObjectReport<'_, T>, list: &[String]) {
        for (index, name) in list.iter().enumerate() {
            let is_word = matches!(name.as_str(), "." | "*" | "~");
            let known = is_word
                || self.world.unrecorded().namespace(name).is_some()
                || runs_in(self.world.unrecorded(), name)
                || self.world.unrecorded().services.in_namespace(name).next().is_some();
            if !known {
                let message = format!("no workload runs in namespace {name}");
                let field = format!("spec.exportTo[{index}]");
                self.report(about, Code::NoSuchExportNamespace, field, message, "check the name");
            }
        }
    }
}

/// Returns the first namespace with sidecars that apply a VirtualService and do not see a service: its own, or one that
/// its `exportTo` names. The namespaces of gateways are unknown.
fn hidden_from<'a>(
    world: &'a World,
    entry: &'a Entry<VirtualService>,
    service: &Typed<Service>,
) -> Option<&'a str> {
    let named = world.virtual_service_export_to(entry).iter().map(String::as_str);
    let named = named.filter(|name| !matches!(*name, "*" | "." | "~"));
    let own = Some(entry.object.meta.namespace.as_str());
    let own = own.filter(|namespace| world.virtual_service_visible(entry, namespace));
    let mut all = own.into_iter().chain(named).filter(|_| entry.object.spec.is_for_mesh());
    all.find(|namespace| !world.service_visible(service, namespace))
}

/// Returns the ports at which the requests of a VirtualService arrive, and whether at a gateway; none if some are
/// unknown.
fn arriving(world: &World, entry: &Entry<VirtualService>) -> BTreeSet<(bool, u16)> {
    let (namespace, spec) = (entry.object.meta.namespace.as_str(), &entry.object.spec);
    let mut ports = BTreeSet::new();
    if spec.is_for_mesh() {
        for host in &spec.hosts {
            let Some(service) = world.service(&fqdn(host, namespace)) else { return BTreeSet::new() };
            ports.extend(service.spec.ports.iter().map(|port| (false, port.port)));
        }
    }
    for written in spec.gateways.iter().filter(|written| *written != "mesh") {
        let name = gateway_name(written, namespace);
        let gateway = name.split_once('/').and_then(|(of, bare)| world.gateways.get(of, bare));
        let Some(gateway) = gateway else { return BTreeSet::new() };
        let servers = gateway.object.spec.servers.iter().filter_map(|server| server.port.as_ref());
        ports.extend(servers.filter_map(|port| Some((true, u16::try_from(port.number).ok()?))));
    }
    ports
}

/// Returns the VirtualServices that users wrote.
fn written(world: &World) -> Vec<&Entry<VirtualService>> {
    world.virtual_services.iter().filter(|entry| entry.object.spec.derived.is_none()).collect()
}
