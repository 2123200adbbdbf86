//! Checks of VirtualServices and DestinationRules: missing hosts, subsets and ports, and rules that shadow others.

use std::collections::BTreeSet;

use super::{ObjectReport, Report, label_text};
use crate::{
    analysis::Code,
    api::{
        DestinationRule, Kind, MtlsMode, Protocol, Service, ServicePort, Template, Typed, VirtualService,
        destination_rule::ClientTlsMode,
        kube::TargetPort,
        locality::is_added,
        selects,
        virtual_service::{Destination, IstioHttpRoute},
    },
    spelling::nearest,
    world::{
        DOMAIN,
        delegates::{self, DelegateError},
        hosts::{fqdn, host_matches},
        store::Entry,
    },
};

impl<'a> Report<'a> {
    pub(super) fn virtual_service(&mut self, about: &ObjectReport<'_, VirtualService>) {
        let spec = &about.entry.object.spec;
        if spec.derived.is_some() {
            return;
        }
        self.bound(about, spec);
        self.matched_gateways(about, spec);
        self.destinations(about, spec);
        self.delegates(about);
        if !spec.is_for_mesh() {
            return;
        }
        self.hosts(about, spec);
        for (index, route) in spec.http.iter().enumerate() {
            self.matches(about, spec, &format!("spec.http[{index}]"), route);
        }
        self.connections(about, spec);
    }

    /// Checks the destinations of all rules.
    fn destinations(&mut self, about: &ObjectReport<'_, VirtualService>, spec: &VirtualService) {
        for (index, route) in spec.http.iter().enumerate() {
            for (field, destination) in destinations(route) {
                self.destination(about, &format!("spec.http[{index}].{field}"), destination);
            }
        }
        let tls = spec.tls.iter().map(|route| &route.route).enumerate();
        let tcp = spec.tcp.iter().map(|route| &route.route).enumerate();
        let tls = tls.map(|(index, route)| (format!("spec.tls[{index}]"), route));
        let tcp = tcp.map(|(index, route)| (format!("spec.tcp[{index}]"), route));
        for (field, route) in tls.chain(tcp) {
            for (index, to) in route.iter().enumerate() {
                self.destination(about, &format!("{field}.route[{index}].destination"), &to.destination);
            }
        }
    }

    /// Reports rules for TCP and TLS whose hosts have no such port.
    fn connections(&mut self, about: &ObjectReport<'_, VirtualService>, spec: &VirtualService) {
        let services =
            spec.hosts.iter().filter_map(|host| self.world.service(&fqdn(host, about.namespace())));
        let services: Vec<_> = services.collect();
        let none = |may: fn(Protocol) -> bool| {
            !services.is_empty()
                && services.iter().all(|service| service.spec.ports.iter().all(|port| !may(port.protocol)))
        };
        if !spec.tcp.is_empty() && none(|protocol| !protocol.is_http() && !protocol.is_tls()) {
            let message = "has no effect: no port of the hosts is TCP";
            let remedy = "name the port tcp or tcp-..., or use http or tls rules";
            self.report(about, Code::NoTcpPort, "spec.tcp", message, remedy);
        }
        if !spec.tls.is_empty() && none(Protocol::is_tls) {
            let message = "has no effect: no port of the hosts is TLS or HTTPS";
            let remedy = "name the port tls, https, tls-... or https-...";
            self.report(about, Code::NoTcpPort, "spec.tls", message, remedy);
        }
    }

    /// Reports delegates that do not exist or that conflict with their root, and delegates without a root.
    fn delegates(&mut self, about: &ObjectReport<'_, VirtualService>) {
        let root = &about.entry.object;
        if root.spec.hosts.is_empty() {
            if !self.world.is_delegate(&root.meta.namespace, &root.meta.name) {
                let message = "has no hosts, and no VirtualService delegates to it: it has no effect";
                let remedy = "add hosts, or name it in the delegate of another VirtualService";
                self.report(about, Code::UnusedDelegate, "spec.hosts", message, remedy);
            }
            return;
        }
        for (index, rule) in root.spec.http.iter().enumerate() {
            let Some(delegate) = &rule.delegate else { continue };
            let (namespace, name) = delegate.key(&root.meta.namespace);
            let field = format!("spec.http[{index}].delegate");
            let of = format!("VirtualService {namespace}/{name}");
            let (message, remedy) = match self.world.delegate(root, delegate) {
                Err(DelegateError::Missing) => ("does not exist", "check the name and the namespace"),
                Err(DelegateError::HasHosts) => ("has hosts, so it is no delegate", "remove its hosts"),
                Err(DelegateError::Hidden) => {
                    ("is not exported to the namespace of the root", "add the namespace to its exportTo")
                }
                Ok(entry) => {
                    let merged = delegates::merged(rule, &root.meta.namespace, &entry.object);
                    for (part, made) in merged.iter().enumerate() {
                        if made.is_none() {
                            let message = format!(
                                "the match of http[{part}] of {of} does not refine a match of this rule, so \
                                 it has no effect"
                            );
                            let remedy = "match a part of what the root matches";
                            self.report(about, Code::DelegateMatch, &field, message, remedy);
                        }
                    }
                    continue;
                }
            };
            let message = format!("{of} {message}: the rule has no effect");
            self.report(about, Code::UnknownDelegate, &field, message, remedy);
        }
    }

    /// Returns the VirtualService of a user with HTTP rules for this host that takes precedence in a namespace.
    fn first_of(&mut self, host: &str, namespace: &str) -> Option<&'a Entry<VirtualService>> {
        self.world.record_rules_of(host);
        *self.routes_of.entry((host.to_owned(), namespace.to_owned())).or_insert_with(|| {
            let rivals = self.world.virtual_service_entries(host, namespace);
            rivals.into_iter().find(|other| other.object.spec.derived.is_none())
        })
    }

    fn hosts(&mut self, about: &ObjectReport<'_, VirtualService>, spec: &VirtualService) {
        for (index, host) in spec.hosts.iter().enumerate() {
            let field = format!("spec.hosts[{index}]");
            let full = fqdn(host, about.namespace());
            let rival = self
                .first_of(&full, about.namespace())
                .filter(|first| !is_same(first, about.entry) && !spec.http.is_empty())
                // Its own namespace may be none of those to which it is exported.
                .filter(|_| self.world.unrecorded().virtual_service_visible(about.entry, about.namespace()));
            let rival = rival.filter(|first| super::super::mesh_hosts(&first.object).contains(&full));
            if let Some(first) = rival {
                let first = ObjectReport { entry: first, kind: Kind::VirtualService }.name();
                let message = format!(
                    "{host} is routed by {first}, which takes precedence; this VirtualService has no effect on it"
                );
                self.report(
                    about,
                    Code::HostConflict,
                    &field,
                    message,
                    "merge the rules into one VirtualService",
                );
            }
            match self.world.service(&full) {
                Some(service) if !spec.http.is_empty() => self.has_http(about, &field, service),
                Some(_) => {}
                None => self.no_service(about, &field, host, &full),
            }
        }
    }

    /// Reports HTTP rules for a service without an HTTP port.
    fn has_http(&mut self, about: &ObjectReport<'_, VirtualService>, field: &str, service: &Typed<Service>) {
        let may = |port: &ServicePort| port.protocol.is_http() || port.protocol == Protocol::Unknown;
        if !service.spec.ports.iter().any(may) {
            let message = format!("has http rules, but Service {} has no HTTP port", service.meta.name);
            let remedy = "name the port http or http-..., or set its appProtocol";
            self.report(about, Code::NoHttpPort, field, message, remedy);
        }
    }

    /// Reports the name of a service that does not exist. Other names may be hosts that only the rule defines.
    fn no_service(&mut self, about: &ObjectReport<'_, VirtualService>, field: &str, host: &str, full: &str) {
        let completed = format!("{host}.svc.{DOMAIN}");
        if self.world.service(&completed).is_some() {
            // Istio completes names without dots only, so `reviews.default` names no service.
            let message =
                format!("{host:?} is not the name of a service: only names without dots are completed");
            self.report(about, Code::ShortHost, field, message, format!("write {completed}"));
        } else if full.ends_with(&format!(".svc.{DOMAIN}"))
            && !full.starts_with('*')
            && self.world.any_service()
        {
            let message = format!("there is no service {full}, so the rules apply to no service");
            let remedy = self.service_remedy(host, about.namespace());
            self.report(about, Code::HostWithoutService, field, message, remedy);
        }
    }

    /// Reports matches on a port that no host has, and on labels that no client has.
    fn matches(
        &mut self,
        about: &ObjectReport<'_, VirtualService>,
        spec: &VirtualService,
        at: &str,
        route: &IstioHttpRoute,
    ) {
        // Most matches have neither, and there may be thousands of rules.
        if route.matches.iter().all(|matched| matched.port.is_none() && matched.source_labels.is_empty()) {
            return;
        }
        let hosts = spec.hosts.iter().map(|host| self.world.service(&fqdn(host, about.namespace())));
        let Some(services) = hosts.collect::<Option<Vec<_>>>() else { return };
        let ports: BTreeSet<u16> =
            services.iter().flat_map(|service| service.spec.ports.iter().map(|port| port.port)).collect();
        let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
        for (index, matched) in route.matches.iter().enumerate() {
            let at = format!("{at}.match[{index}]");
            if let Some(number) = matched.port.filter(|number| !ports.contains(&number.to_string())) {
                let message = format!("the hosts have no port {number}, so this never matches");
                let remedy = format!("use a port of the service: {}", ports.join(", "));
                self.report(about, Code::UnknownPortOfService, format!("{at}.port"), message, remedy);
            }
            let labels = &matched.source_labels;
            if !labels.is_empty()
                && self.world.any_workload()
                && self.world.workloads(None, labels).next().is_none()
            {
                let message = format!("no workload has {}, so this never matches", label_text(labels));
                self.report(
                    about,
                    Code::NoClientWithLabels,
                    format!("{at}.sourceLabels"),
                    message,
                    "check the clients' labels",
                );
            }
        }
    }

    pub(super) fn destination(
        &mut self,
        about: &ObjectReport<'_, VirtualService>,
        field: &str,
        destination: &Destination,
    ) {
        let full = fqdn(&destination.host, about.namespace());
        let Some(service) = self.world.service(&full) else {
            let message = format!("there is no service {full}; requests get 503");
            let remedy = self.service_remedy(&destination.host, about.namespace());
            // Routing rules are also checked without the services.
            let any = self.world.any_service();
            let code = if any { Code::UnknownHost } else { Code::HostNotChecked };
            return self.report(about, code, format!("{field}.host"), message, remedy);
        };
        if let Some(port) = &destination.port
            && !service.spec.ports.iter().any(|known| u32::from(known.port) == port.number)
        {
            let ports: Vec<String> = service.spec.ports.iter().map(|port| port.port.to_string()).collect();
            let message =
                format!("Service {} has no port {}; requests get 503", service.meta.name, port.number);
            let remedy = format!("use a port of the service: {}", ports.join(", "));
            self.report(about, Code::UnknownDestinationPort, format!("{field}.port.number"), message, remedy);
        }
        if destination.subset.is_empty() {
            return;
        }
        let field = format!("{field}.subset");
        let message =
            format!("no DestinationRule defines subset {:?} of {full}; requests get 503", destination.subset);
        match self.world.destination_rule(&full, about.namespace()) {
            None => {
                let remedy = format!("add a DestinationRule for host {full} with this subset");
                self.report(about, Code::UnknownSubset, field, message, remedy);
            }
            Some(rule) if rule.spec.subsets.iter().all(|subset| subset.name != destination.subset) => {
                let names: Vec<&str> = rule.spec.subsets.iter().map(|subset| subset.name.as_str()).collect();
                let of = format!("DestinationRule {}/{}", rule.meta.namespace, rule.meta.name);
                let remedy = match nearest(&destination.subset, &names) {
                    _ if names.is_empty() => format!("add the subset to {of}"),
                    Some(near) if names.len() > 3 => format!("did you mean {near} of {of}?"),
                    _ => format!("use a subset of {of}: {}", names.join(", ")),
                };
                self.report(about, Code::UnknownSubset, field, message, remedy);
            }
            Some(_) => {}
        }
    }

    /// Returns a remedy with the service that was probably meant.
    fn service_remedy(&self, host: &str, namespace: &str) -> String {
        let bare = host.split('.').next().unwrap_or(host);
        let elsewhere = self.world.services().find(|service| service.meta.name == bare);
        if let Some(service) = elsewhere {
            return format!("did you mean {}?", service.fqdn());
        }
        let services = self.world.services_in(namespace);
        let names: Vec<&str> = services.map(|entry| entry.object.meta.name.as_str()).collect();
        match nearest(bare, &names) {
            Some(near) => format!("did you mean {near}?"),
            None => "check the name, or add the Service".to_owned(),
        }
    }

    pub(super) fn destination_rule(&mut self, about: &ObjectReport<'_, DestinationRule>) {
        let spec = &about.entry.object.spec;
        let full = fqdn(&spec.host, about.namespace());
        let Some(service) = self.world.service(&full) else {
            let any = self.world.services().any(|service| host_matches(&full, &service.fqdn()));
            if !any {
                let message = format!("there is no service {full}, so the rule has no effect");
                let remedy = self.service_remedy(&spec.host, about.namespace());
                self.report(about, Code::HostWithoutService, "spec.host", message, remedy);
            }
            return;
        };
        self.subsets(about, spec, service);
        self.tls_mismatch(about, spec, service);
        self.port_settings(about, spec, service);
    }

    /// Reports subsets without pods. Reports nothing while no workload is known, since rules may be checked alone.
    fn subsets(
        &mut self,
        about: &ObjectReport<'_, DestinationRule>,
        spec: &DestinationRule,
        service: &Typed<Service>,
    ) {
        let namespace = Some(service.meta.namespace.as_str());
        if service.spec.selector.is_empty() || !self.world.any_workload() {
            return;
        }
        let behind: Vec<_> = self.world.workloads(namespace, &service.spec.selector).collect();
        for (index, subset) in spec.subsets.iter().enumerate() {
            // Localities, networks and clusters of the pods are unknown.
            let mut own = subset.labels.clone();
            own.retain(|name, value| !is_added(name) || value.is_empty());
            if behind.iter().any(|labels| selects(&own, labels)) {
                continue;
            }
            let labels = label_text(&subset.labels);
            let message = format!("no pod of {} has {labels}; requests to it get 503", service.meta.name);
            let field = format!("spec.subsets[{index}].labels");
            self.report(about, Code::SubsetSelectsNothing, field, message, "check the labels of the pods");
        }
    }

    /// Reports plain text to workloads that require mutual TLS, and mutual TLS to those that accept plain text only.
    fn tls_mismatch(
        &mut self,
        about: &ObjectReport<'_, DestinationRule>,
        spec: &DestinationRule,
        service: &Typed<Service>,
    ) {
        let tls = spec.traffic_policy.as_ref().and_then(|policy| policy.tls.as_ref());
        let (refused_by, message, remedy) = match tls.map(|tls| tls.mode) {
            Some(ClientTlsMode::Disable | ClientTlsMode::Simple) => (
                MtlsMode::Strict,
                "disables mutual TLS, but a PeerAuthentication requires it (STRICT): every request fails",
                "use ISTIO_MUTUAL, or remove tls",
            ),
            Some(ClientTlsMode::IstioMutual) => (
                MtlsMode::Disable,
                "enables mutual TLS, but a PeerAuthentication disables it (DISABLE): every request fails",
                "remove tls, or change the PeerAuthentication",
            ),
            _ => return,
        };
        let fails = self.is_mode_of_templates(service, refused_by)
            || service.spec.ports.iter().any(|port| {
                self.world.endpoints(service, port).iter().any(|endpoint| {
                    let pod = endpoint.pod.as_ref().filter(|pod| pod.has_sidecar());
                    pod.is_some_and(|pod| {
                        self.world.peer_mode(&pod.meta.namespace, &pod.meta.labels, endpoint.port)
                            == refused_by
                    })
                })
            });
        if fails {
            self.report(about, Code::TlsMismatch, "spec.trafficPolicy.tls.mode", message, remedy);
        }
    }

    /// Returns whether a workload behind a service has this mode at one of the ports. Only for workloads without pods:
    /// pods tell themselves.
    fn is_mode_of_templates(&self, service: &Typed<Service>, mode: MtlsMode) -> bool {
        let (world, namespace) = (&self.world, service.meta.namespace.as_str());
        if service.spec.selector.is_empty() || world.pods_in(namespace).next().is_some() {
            return false;
        }
        let injected = world
            .namespace(namespace)
            .is_none_or(|labels| labels.get("istio-injection").is_none_or(|value| value != "disabled"));
        let of_service = |template: &&Typed<Template>| {
            injected
                && template.spec.allows_injection
                && selects(&service.spec.selector, &template.spec.labels)
        };
        world.templates_in(namespace).filter(of_service).any(|template| {
            let number = |port: &ServicePort| match &port.target {
                TargetPort::Number(number) => Some(*number),
                TargetPort::Name(name) => {
                    template.spec.ports.iter().find(|of| of.name == *name).map(|of| of.port)
                }
            };
            let mut ports = service.spec.ports.iter().filter_map(number);
            ports.any(|port| world.peer_mode(namespace, &template.spec.labels, port) == mode)
        })
    }

    /// Reports settings for ports that the service does not have.
    fn port_settings(
        &mut self,
        about: &ObjectReport<'_, DestinationRule>,
        spec: &DestinationRule,
        service: &Typed<Service>,
    ) {
        let of_subsets = spec.subsets.iter().enumerate().map(|(index, subset)| {
            (format!("spec.subsets[{index}].trafficPolicy"), subset.traffic_policy.as_ref())
        });
        let policies = std::iter::once(("spec.trafficPolicy".to_owned(), spec.traffic_policy.as_ref()));
        for (at, policy) in policies.chain(of_subsets) {
            for (index, of) in policy.iter().flat_map(|policy| &policy.port_level_settings).enumerate() {
                if service.spec.ports.iter().any(|port| u32::from(port.port) == of.port.number) {
                    continue;
                }
                let ports: Vec<String> =
                    service.spec.ports.iter().map(|port| port.port.to_string()).collect();
                let message = format!(
                    "Service {} has no port {}, so these settings have no effect",
                    service.meta.name, of.port.number
                );
                let field = format!("{at}.portLevelSettings[{index}].port.number");
                let remedy = format!("use a port of the service: {}", ports.join(", "));
                self.report(about, Code::UnknownPortOfService, field, message, remedy);
            }
        }
    }
}

/// Returns all destinations of a rule, with their fields.
pub(super) fn destinations(route: &IstioHttpRoute) -> impl Iterator<Item = (String, &Destination)> {
    let routes = route.route.iter().enumerate();
    let routes = routes.map(|(index, target)| (format!("route[{index}].destination"), &target.destination));
    let mirrors = route.mirrors.iter().enumerate();
    let mirrors =
        mirrors.map(|(index, mirror)| (format!("mirrors[{index}].destination"), &mirror.destination));
    routes.chain(route.mirror.iter().map(|mirror| ("mirror".to_owned(), mirror))).chain(mirrors)
}

fn is_same<T>(one: &Entry<T>, other: &Entry<T>) -> bool {
    std::ptr::eq(one, other)
}
