//! Checks of Services: conflicting addresses, and named ports that no container has.

use std::collections::BTreeSet;

use super::{ObjectReport, Report, label_text};

/// Name of the port that injectors give a sidecar.
const SIDECAR_PORT: &str = "http-envoy-prom";
use crate::{
    analysis::Code,
    api::{
        ConfigMap, Kind, Protocol, Service,
        kube::{ContainerPort, TargetPort},
        selects,
    },
};

impl Report<'_> {
    /// Reports an address of Zipkin that no service has.
    pub(super) fn mesh_config(&mut self, about: &ObjectReport<'_, ConfigMap>) {
        let mesh = self.world.mesh();
        if !mesh.enable_tracing {
            return;
        }
        if let Some(reason) = self.world.zipkin_error() {
            let message = format!("{reason}: proxies without a Telemetry report no spans");
            let field = "data.mesh.defaultConfig.tracing.zipkin.address";
            let remedy = "write the host and a port of a Service or ServiceEntry";
            self.report(about, Code::UnknownProvider, field, message, remedy);
        }
    }

    pub(super) fn service(&mut self, about: &ObjectReport<'_, Service>) {
        let spec = &about.entry.object.spec;
        if spec.entry_host.is_some() {
            return;
        }
        for address in &spec.cluster_ips {
            let same = self.world.services_with_address(*address);
            let before = same.iter().take_while(|other| !std::ptr::eq(**other, about.entry)).last();
            if let Some(entry) = before.copied() {
                let other = ObjectReport { entry, kind: Kind::Service }.name();
                let message = format!("{address} is also the address of {other}");
                let remedy = "use a different address for each Service";
                self.report(about, Code::AddressConflict, "spec.clusterIP", message, remedy);
            }
        }
        self.named_ports(about);
        self.addressless(about);
    }

    /// Reports a `targetPort` by a name that no container port has.
    fn named_ports(&mut self, about: &ObjectReport<'_, Service>) {
        let service = &about.entry.object;
        if service.spec.selector.is_empty() {
            return;
        }
        let namespace = about.namespace();
        let taken = self.world.workloads(Some(namespace), &service.spec.selector).next().is_some()
            || self.world.entries_selected(namespace, &service.spec.selector).next().is_some();
        // Only if any workload is known, since rules may be checked alone.
        let any = self.world.any_workload();
        if any && !taken {
            let wanted = label_text(&service.spec.selector);
            let message = format!("no pod of namespace {namespace} has {wanted}, so it has no endpoints");
            self.report(about, Code::SelectsNothing, "spec.selector", message, "check labels and namespace");
        }
        let pods = self.world.pods_selected(namespace, &service.spec.selector).map(|pod| &pod.spec.ports);
        let templates = self.world.templates_in(namespace);
        let templates = templates.filter(|template| selects(&service.spec.selector, &template.spec.labels));
        let ports = pods.chain(templates.map(|template| &template.spec.ports));
        // The port of an injected sidecar is none of the workload's.
        let is_own = |of: &&ContainerPort| of.name != SIDECAR_PORT;
        let declared: Vec<Vec<&ContainerPort>> =
            ports.map(|ports| ports.iter().filter(is_own).collect()).collect();
        for (index, port) in service.spec.ports.iter().enumerate() {
            let field = || format!("spec.ports[{index}].targetPort");
            match &port.target {
                _ if declared.iter().any(|ports| ports.iter().any(|of| is_target(of, &port.target))) => {}
                TargetPort::Name(name) if !declared.is_empty() => {
                    let message =
                        format!("no container of its pods has a port named {name:?}, so it has no endpoints");
                    let remedy = "name the container's port, or use its number";
                    self.report(about, Code::UnknownTargetPort, field(), message, remedy);
                }
                // A port need not be declared, so this is reported only where all pods declare some port.
                TargetPort::Number(number)
                    if !declared.is_empty() && declared.iter().all(|ports| !ports.is_empty()) =>
                {
                    let message = format!(
                        "no container of its pods declares port {number}; where none listens on it, connections fail"
                    );
                    let ports: BTreeSet<u16> =
                        declared.iter().flat_map(|ports| ports.iter().map(|of| of.port)).collect();
                    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
                    let remedy = format!("use a declared port: {}", ports.join(", "));
                    self.report(about, Code::UndeclaredTargetPort, field(), message, remedy);
                }
                _ => {}
            }
        }
    }

    /// Reports TCP ports without an address of their own. Only the port distinguishes them, and HTTP may use it
    /// already.
    fn addressless(&mut self, about: &ObjectReport<'_, Service>) {
        let spec = &about.entry.object.spec;
        if !spec.cluster_ips.is_empty() || spec.headless || spec.external_name.is_some() {
            return;
        }
        for (index, port) in spec
            .ports
            .iter()
            .enumerate()
            .filter(|(_, port)| matches!(port.protocol, Protocol::Tcp | Protocol::Mongo))
        {
            if let Some(entry) = self.world.service_with_http_port(port.port) {
                let other = ObjectReport { entry, kind: Kind::Service };
                let message = format!(
                    "has no address, and port {} is an HTTP port of {}: connections to it are treated as HTTP",
                    port.port,
                    other.name()
                );
                let field = format!("spec.ports[{index}].port");
                self.report(
                    about,
                    Code::AddresslessConflict,
                    field,
                    message,
                    "set clusterIP, or use another port",
                );
            }
        }
    }
}

/// Returns whether a container port is the target of a Service port.
fn is_target(port: &ContainerPort, target: &TargetPort) -> bool {
    match target {
        TargetPort::Number(number) => port.port == *number,
        TargetPort::Name(name) => port.name == *name,
    }
}
