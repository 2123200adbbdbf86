//! VirtualServices: hosts that are not exported, destinations without a port, covered matches, claims of tokens.

use super::super::{ObjectReport, Report, rules::destinations, runs_in};
use crate::{
    World,
    analysis::Code,
    api::{Kind, Labels, VirtualService, selects, virtual_service::HttpMatchRequest},
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
            for (rule, route) in entry.object.spec.http.iter().enumerate() {
                for (at, destination) in destinations(route) {
                    let full = fqdn(&destination.host, about.namespace());
                    let Some(service) = world.service(&full) else { continue };
                    let at = format!("spec.http[{rule}].{at}");
                    if !world.service_visible(service, about.namespace()) {
                        let message = format!(
                            "{full} is not exported to namespace {}; requests get 503",
                            about.namespace()
                        );
                        let remedy = "add the namespace to exportTo of the Service or ServiceEntry";
                        self.report(&about, Code::HiddenHost, format!("{at}.host"), message, remedy);
                    }
                    let ports = service.spec.ports.len();
                    if destination.port.is_none() && ports > 1 && service.spec.entry_host.is_none() {
                        let message = format!(
                            "{full} has {ports} ports and none is named, so the request's port is used"
                        );
                        let field = format!("{at}.port");
                        self.report(&about, Code::DestinationPortRequired, field, message, "set port.number");
                    }
                }
            }
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

/// Returns the VirtualServices that users wrote.
fn written(world: &World) -> Vec<&Entry<VirtualService>> {
    world.virtual_services.iter().filter(|entry| entry.object.spec.derived.is_none()).collect()
}
