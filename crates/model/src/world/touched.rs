//! Conservative estimate of what a change may affect: never too little.

use std::collections::BTreeSet;

use super::{World, hosts};
use crate::{
    ObjectKey,
    api::{Kind, Pod, Protocol, Service, Typed, VirtualService, kube::SliceEndpoint},
    world::WELL_KNOWN_PORT,
};

/// Namespace without clients: an object visible there is visible everywhere.
const NOWHERE: &str = "";

/// Resources that may differ since the last [`World::take_touched`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangeSet {
    /// Everything.
    pub everything: bool,
    /// Services (namespace, name) whose clusters and endpoints may differ.
    pub services: BTreeSet<(String, String)>,
    /// Routes.
    pub routes: bool,
    /// Hosts of services whose routes may differ.
    pub hosts: BTreeSet<String>,
    /// The name table.
    pub names: bool,
    /// Own resources of all workloads.
    pub workloads: bool,
    /// Namespaces whose workloads' own resources may differ.
    pub workloads_in: BTreeSet<String>,
    /// Pods (namespace, name) that may differ, and with them the views of their proxies; all pods with `everything`.
    pub pods: BTreeSet<(String, String)>,
}

impl ChangeSet {
    /// True if nothing may differ.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// True if the own resources of a workload of this namespace may differ.
    pub fn touches_workloads_in(&self, namespace: &str) -> bool {
        self.everything || self.workloads || self.workloads_in.contains(namespace)
    }

    /// Adds the estimate of a further change.
    pub fn add(&mut self, other: Self) {
        self.everything |= other.everything;
        self.services.extend(other.services);
        self.routes |= other.routes;
        self.hosts.extend(other.hosts);
        self.names |= other.names;
        self.workloads |= other.workloads;
        self.workloads_in.extend(other.workloads_in);
        self.pods.extend(other.pods);
    }

    /// Everything.
    pub fn everything() -> Self {
        Self { everything: true, ..Self::default() }
    }

    fn nothing() -> Self {
        Self::default()
    }
}

impl World {
    /// Returns and resets the estimate; everything at the first call.
    pub fn take_touched(&mut self) -> ChangeSet {
        self.touched.replace(ChangeSet::nothing()).unwrap_or_else(ChangeSet::everything)
    }

    /// Resources that depend on the current object of a key.
    pub(super) fn touched_by(&self, key: &ObjectKey) -> ChangeSet {
        if self.touched.as_ref().is_none_or(|touched| touched.everything) {
            return ChangeSet::nothing();
        }
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        match key.kind {
            // Only warnings depend on them.
            Kind::ServiceAccount
            | Kind::Secret
            | Kind::Deployment
            | Kind::StatefulSet
            | Kind::DaemonSet
            | Kind::ReplicaSet
            | Kind::Job
            | Kind::CronJob => ChangeSet::nothing(),
            Kind::Namespace | Kind::Node | Kind::ConfigMap | Kind::PeerAuthentication => {
                ChangeSet::everything()
            }
            Kind::AuthorizationPolicy if namespace == self.mesh().root_namespace => {
                ChangeSet { workloads: true, ..ChangeSet::default() }
            }
            Kind::AuthorizationPolicy => {
                ChangeSet { workloads_in: BTreeSet::from([namespace.to_owned()]), ..ChangeSet::default() }
            }
            Kind::VirtualService => {
                let rule = self.virtual_services.get(namespace, name).map(|entry| &entry.object);
                let Some(rule) = rule else { return ChangeSet::nothing() };
                match self.only_service_of(rule) {
                    Some(host) => ChangeSet { hosts: BTreeSet::from([host]), ..ChangeSet::default() },
                    None => ChangeSet { routes: true, ..ChangeSet::default() },
                }
            }
            Kind::Service => {
                let Some(service) = self.service_named(namespace, name) else { return ChangeSet::nothing() };
                ChangeSet {
                    services: BTreeSet::from([(namespace.to_owned(), name.to_owned())]),
                    routes: true,
                    names: true,
                    workloads: self.shapes_listeners(service),
                    // Those that it selects.
                    workloads_in: BTreeSet::from([namespace.to_owned()]),
                    ..ChangeSet::default()
                }
            }
            Kind::ServiceEntry => self.touched_by_entry(namespace, name),
            Kind::EndpointSlice => {
                let slice = self.slices.get(namespace, name).map(|entry| &entry.object.spec.service);
                slice.map(|service| self.touched_endpoints(namespace, service)).unwrap_or_default()
            }
            Kind::DestinationRule => {
                let rule = self.destination_rules.get(namespace, name).map(|entry| &entry.object);
                let Some(rule) = rule else { return ChangeSet::nothing() };
                match self.service(&hosts::fqdn(&rule.spec.host, namespace)) {
                    Some(service) if service.spec.outside.is_none() => ChangeSet {
                        services: BTreeSet::from([(
                            service.meta.namespace.clone(),
                            service.meta.name.clone(),
                        )]),
                        routes: true,
                        workloads: self.shapes_listeners(service),
                        // Its own say in their metadata which rule holds for them.
                        workloads_in: BTreeSet::from([service.meta.namespace.clone()]),
                        ..ChangeSet::default()
                    },
                    _ => ChangeSet::everything(),
                }
            }
            Kind::Pod => self.pod(namespace, name).map(|pod| self.touched_by_pod(pod)).unwrap_or_default(),
        }
    }

    /// The host of a VirtualService if it is a single service that all namespaces see.
    fn only_service_of(&self, rule: &Typed<VirtualService>) -> Option<String> {
        let [host] = &rule.spec.hosts[..] else { return None };
        let host = hosts::fqdn(host, &rule.meta.namespace);
        let service = self.service(&host).filter(|service| service.spec.outside.is_none())?;
        let well_known = service.spec.port(WELL_KNOWN_PORT)?;
        let is_routed = well_known.protocol.is_http() || well_known.protocol == Protocol::Unknown;
        (is_routed && service.spec.external_name.is_none() && self.service_visible(service, NOWHERE))
            .then_some(host)
    }

    /// True if outbound listeners of other workloads may depend on a service. Listeners of HTTP ports are the same for all
    /// services with the port, so they depend on a service only if it is the only one with the port.
    pub(super) fn shapes_listeners(&self, service: &Typed<Service>) -> bool {
        let has_http = |service: &Typed<Service>, port: u16| {
            service.spec.port(port).is_some_and(|port| port.protocol.is_http())
        };
        let is_common = |port: u16| {
            let others = self.services().filter(|other| other.meta != service.meta);
            // Whom a host of a ServiceEntry means depends on the client.
            let others = others.filter(|other| other.spec.outside.is_none());
            let mut like_it =
                others.filter(|other| has_http(other, port) && other.spec.external_name.is_none());
            like_it.any(|other| self.service_visible(other, NOWHERE))
        };
        let ports = service.spec.ports.iter().filter(|port| port.protocol != Protocol::Udp);
        ports.into_iter().any(|port| !port.protocol.is_http() || !is_common(port.port))
    }

    /// The services that lead to a pod.
    fn touched_by_pod(&self, pod: &Typed<Pod>) -> ChangeSet {
        let namespace = pod.meta.namespace.as_str();
        let pods = BTreeSet::from([(pod.meta.namespace.clone(), pod.meta.name.clone())]);
        let mut touched = ChangeSet { pods, ..ChangeSet::default() };
        for service in self.services_selecting(namespace, &pod.meta.labels) {
            touched.add(self.touched_endpoints(namespace, &service.meta.name));
        }
        // A slice may be of a service that selects nothing, and of another namespace if it goes by address.
        for slice in self.slices.iter().map(|entry| &entry.object) {
            let near = slice.meta.namespace == namespace;
            let leads = |endpoint: &SliceEndpoint| {
                near && endpoint.pod == pod.meta.name || pod.spec.ips.contains(&endpoint.ip)
            };
            let service = (slice.meta.namespace.clone(), slice.spec.service.clone());
            if !touched.services.contains(&service) && slice.spec.endpoints.iter().any(leads) {
                touched.add(self.touched_endpoints(&service.0, &service.1));
            }
        }
        touched
    }

    /// Resources that depend on a service's endpoints. Those of a headless service are also in listeners and names.
    fn touched_endpoints(&self, namespace: &str, service: &str) -> ChangeSet {
        let headless = self.service_named(namespace, service).is_some_and(|service| service.spec.headless);
        ChangeSet {
            services: BTreeSet::from([(namespace.to_owned(), service.to_owned())]),
            names: headless,
            workloads: headless,
            ..ChangeSet::default()
        }
    }
}
