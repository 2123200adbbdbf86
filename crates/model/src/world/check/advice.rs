//! Analyses for `skysail analyze` alone. They need all objects at once, and cost more than a change of one object may
//! cost the control plane.

mod certificates;
mod conflicts;
mod gateway_api;
mod gateways;
mod policies;
mod proxies;
mod routes;
mod services;

use std::{collections::BTreeMap, hash::RandomState};

use super::{ObjectReport, Report};
use crate::{
    Code, Diagnostic, World,
    api::{Kind, Meta, ObjectKey},
    origin::Origin,
};

/// Annotation of an object that suppresses findings about it: codes separated by commas, or `*`. Source: Istio's
/// resource annotations.
const SUPPRESS: &str = "galley.istio.io/analyze-suppress";
/// Maximum number of pairs of objects that one analysis compares, so that its time is bounded.
const MAX_PAIRS: usize = 2_000_000;

impl World {
    /// Returns the diagnostics of [`World::validate`], of further analyses and `of_files`, without those that an
    /// annotation of their object suppresses. `now` is the time for certificates, in seconds since 1970.
    pub fn analyze(&mut self, of_files: impl IntoIterator<Item = Diagnostic>, now: i64) -> Vec<Diagnostic> {
        self.settle();
        let mut report = Report::new(self, RandomState::new());
        report.diagnostics.extend(self.validate().into_iter().chain(of_files));
        report.hidden_and_ambiguous_hosts();
        report.shared_hosts();
        report.covered_matches();
        report.claims_at_gateways();
        report.export_to();
        report.gateway_api();
        report.gateway_ports();
        report.gateway_conflicts();
        report.shared_certificates();
        report.certificates(now);
        report.server_verification();
        report.client_verification();
        report.sidecars();
        report.several_telemetries();
        report.envoy_filters();
        report.destination_rule_conflicts();
        report.entry_addresses();
        report.entry_protocols();
        report.subsets_at_gateways();
        report.pods_of_several_services();
        report.service_ports_by_name();
        report.policies_on_tcp();
        let mut diagnostics = report.diagnostics;
        let suppressed = self.suppressed();
        diagnostics.retain(|diagnostic| !is_suppressed(diagnostic, &suppressed));
        diagnostics.sort();
        diagnostics.dedup();
        diagnostics
    }

    /// Returns the annotations that suppress findings, by object.
    fn suppressed(&self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let mut add = |kind: Kind, meta: &Meta| {
            if let Some(codes) = meta.annotations.get(SUPPRESS) {
                let key = ObjectKey { kind, namespace: meta.namespace.clone(), name: meta.name.clone() };
                found.insert(key.to_string(), codes.clone());
            }
        };
        macro_rules! scan {
            ($($store:ident $kind:ident),*) => {
                $(self.$store.iter().for_each(|entry| add(Kind::$kind, &entry.object.meta));)*
            };
        }
        scan!(
            namespaces Namespace, services Service, secrets Secret, virtual_services VirtualService,
            destination_rules DestinationRule, service_entries ServiceEntry, gateways Gateway, sidecars Sidecar,
            peer_authentications PeerAuthentication, authorization_policies AuthorizationPolicy,
            request_authentications RequestAuthentication, telemetries Telemetry, envoy_filters EnvoyFilter,
            kubernetes_gateways KubernetesGateway, listener_sets ListenerSet, http_routes HttpRoute,
            grpc_routes GrpcRoute, tls_routes TlsRoute, tcp_routes TcpRoute
        );
        for (kind, templates) in &self.templates {
            templates.iter().for_each(|entry| add(*kind, &entry.object.meta));
        }
        found
    }
}

impl Report<'_> {
    /// Reports the first object that one analysis has not compared with all others, because of [`MAX_PAIRS`]. `codes`
    /// are those of the findings that may be missing.
    fn incomplete<T>(&mut self, about: &ObjectReport<'_, T>, codes: &[Code]) {
        let codes: Vec<&str> = codes.iter().map(|code| code.id()).collect();
        let message = format!(
            "{} is not reported for it and further objects: an analysis compares at most {MAX_PAIRS} pairs of objects",
            codes.join(" or ")
        );
        let remedy = "analyze fewer namespaces at once";
        self.report(about, Code::ComparisonLimit, "", message, remedy);
    }

    /// Adds a diagnostic about an object of any kind.
    fn report_key(
        &mut self,
        (key, origin): (&ObjectKey, &Origin),
        code: Code,
        field: &str,
        message: impl Into<String>,
        remedy: &str,
    ) {
        let diagnostic = Diagnostic::new(code, &origin.file, origin.line_of(field), message);
        self.diagnostics.push(diagnostic.object(key).field(field).remedy(remedy));
    }
}

fn is_suppressed(diagnostic: &Diagnostic, suppressed: &BTreeMap<String, String>) -> bool {
    let codes = suppressed.get(&diagnostic.object);
    codes.is_some_and(|codes| codes.split(',').any(|text| is_code(text.trim(), diagnostic.code)))
}

/// Returns whether a text stands for a code: `*`, its number, its name, or a code of `istioctl`.
fn is_code(text: &str, code: Code) -> bool {
    text == "*" || text.parse() == Ok(code) || code.istio().contains(&text)
}
