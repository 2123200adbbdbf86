//! Checks of Gateways and of the VirtualServices that are bound to them: missing Gateways, hosts that no server has,
//! missing Secrets, selectors that match no pod, destinations.

use std::{cell::OnceCell, collections::BTreeSet};

use super::{ObjectReport, Report, label_text};
use crate::{
    analysis::Code,
    api::{Gateway, Labels, VirtualService, gateway::Server, selects},
    world::{GatewayHosts, gateway_name},
};

/// Name of the sidecars of the mesh in `gateways`.
const MESH: &str = "mesh";

impl<'a> Report<'a> {
    pub(super) fn gateway(&mut self, about: &ObjectReport<'a, Gateway>) {
        let spec = &about.entry.object.spec;
        if spec.only_in.is_some() {
            return;
        }
        // Files may contain rules without workloads. Then the selectors of the rules cannot be checked.
        if self.world.any_workload() && self.world.workloads(None, &spec.selector).next().is_none() {
            let message =
                format!("no pod has {}, so nothing listens on its ports", label_text(&spec.selector));
            self.report(about, Code::SelectsNothing, "spec.selector", message, "check the labels");
        }
        let namespaces = OnceCell::new();
        for (index, server) in spec.servers.iter().enumerate() {
            self.secrets(about, &format!("spec.servers[{index}].tls"), server, &namespaces);
        }
    }

    /// Checks the Gateways that a VirtualService names.
    pub(super) fn bound(&mut self, about: &ObjectReport<'_, VirtualService>, spec: &VirtualService) {
        let namespace = about.namespace();
        for (index, written) in spec.gateways.iter().enumerate() {
            let name = gateway_name(written, namespace);
            let Some((of, bare)) = name.split_once('/') else { continue };
            let field = format!("spec.gateways[{index}]");
            let Some(gateway) = self.world.gateway(of, bare) else {
                let message = format!("there is no Gateway {name}, so this entry has no effect");
                let remedy = "add the Gateway, or write NAMESPACE/NAME";
                self.report(about, Code::UnknownGateway, field, message, remedy);
                continue;
            };
            let hosts = self.gateway_hosts.entry(name.clone());
            let hosts = hosts.or_insert_with(|| GatewayHosts::new(&gateway.object));
            if !spec.hosts.is_empty() && !hosts.admit(&about.entry.object) {
                let message =
                    format!("no server of Gateway {name} has these hosts for namespace {namespace}");
                self.report(
                    about,
                    Code::HostNotInGateway,
                    "spec.hosts",
                    message,
                    "add them to hosts of a server",
                );
            }
        }
    }

    /// Reports gateways of matches to which the VirtualService is not bound. Those of a delegate are those of its roots.
    pub(super) fn matched_gateways(
        &mut self,
        about: &ObjectReport<'_, VirtualService>,
        spec: &VirtualService,
    ) {
        let mut named = gateways_of("http", spec.http.iter().map(|rule| &rule.matches), |of| &of.gateways);
        named.extend(gateways_of("tls", spec.tls.iter().map(|rule| &rule.matches), |of| &of.gateways));
        named.extend(gateways_of("tcp", spec.tcp.iter().map(|rule| &rule.matches), |of| &of.gateways));
        if named.is_empty() || spec.hosts.is_empty() {
            return;
        }
        let full = |written: &String| gateway_name(written, about.namespace());
        let mut bound: BTreeSet<String> = spec.gateways.iter().map(full).collect();
        if bound.is_empty() {
            bound.insert(MESH.to_owned());
        }
        for (field, written) in named.into_iter().filter(|(_, written)| !bound.contains(&full(written))) {
            let message = format!("{written:?} is not among spec.gateways, so it matches nothing");
            let remedy = "add it to spec.gateways, or remove it";
            self.report(about, Code::NeverMatches, field, message, remedy);
        }
    }

    /// Checks that the Secrets of a server exist in the namespaces of the pods that serve it.
    fn secrets(
        &mut self,
        about: &ObjectReport<'_, Gateway>,
        field: &str,
        server: &Server,
        namespaces: &OnceCell<BTreeSet<String>>,
    ) {
        let Some(tls) = server.terminating_or_forwarded_tls() else { return };
        if tls.mode.is_passthrough() {
            return;
        }
        let namespaces = namespaces.get_or_init(|| self.namespaces(&about.entry.object.spec.selector));
        let names =
            tls.credentials().into_iter().map(|name| name.strip_prefix("kubernetes://").unwrap_or(name));
        for (name, namespace) in names.flat_map(|name| namespaces.iter().map(move |of| (name, of))) {
            let secret = self.world.secret(namespace, name);
            let (code, message) = match secret.map(|secret| secret.pair().map(|pair| pair.is_pem())) {
                Some(Some(true)) => continue,
                Some(Some(false)) => (
                    Code::CertificateNotPem,
                    format!("certificate or key of Secret {namespace}/{name} is not PEM"),
                ),
                Some(None) => {
                    (Code::UnknownSecret, format!("Secret {namespace}/{name} has no certificate and key"))
                }
                None => (
                    Code::UnknownSecret,
                    format!("there is no Secret {namespace}/{name}, so clients get no certificate"),
                ),
            };
            let remedy =
                "the Secret must be in the namespace of the gateway's pods, with tls.crt and tls.key";
            self.report(about, code, format!("{field}.credentialName"), message, remedy);
        }
    }

    /// Returns the namespaces of the workloads with these labels; none if the selector is empty.
    pub(super) fn namespaces(&self, selector: &Labels) -> BTreeSet<String> {
        let pods = self.world.pods().filter(|pod| !pod.spec.has_ended && selects(selector, &pod.meta.labels));
        let templates = self.world.templates().filter(|template| selects(selector, &template.spec.labels));
        let templates = templates.map(|template| &template.meta.namespace);
        pods.map(|pod| &pod.meta.namespace)
            .chain(templates)
            .filter(|_| !selector.is_empty())
            .cloned()
            .collect()
    }
}

/// Returns the gateways that the matches of a list of rules name, with their fields.
fn gateways_of<'s, M: 's>(
    list: &str,
    rules: impl Iterator<Item = &'s Vec<M>>,
    gateways: fn(&M) -> &Vec<String>,
) -> Vec<(String, &'s String)> {
    let mut found = Vec::new();
    for (rule, matches) in rules.enumerate() {
        for (at, matched) in matches.iter().enumerate() {
            for (index, name) in gateways(matched).iter().enumerate() {
                found.push((format!("spec.{list}[{rule}].match[{at}].gateways[{index}]"), name));
            }
        }
    }
    found
}
