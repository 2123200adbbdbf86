//! Endpoints of a service: those of its EndpointSlices, or the pods that it selects.

use std::{collections::BTreeSet, sync::Arc};

use skysail_core::SpiffeId;

use super::{World, entry_hosts};
use crate::api::{
    Address, EndpointSlice, Labels, Pod, Service, ServicePort, Typed,
    kube::{Locality, SliceEndpoint, TargetPort},
    locality::{CLUSTER, HOSTNAME, NETWORK, is_added},
    selects,
};

/// Endpoint of a service port.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// Address.
    pub address: Address,
    /// DNS name of the address, if it was resolved.
    pub name: Option<Arc<str>>,
    /// Port.
    pub port: u16,
    /// Pod, or the endpoint of a ServiceEntry in the form of a pod.
    pub pod: Option<Arc<Typed<Pod>>>,
    /// Locality.
    pub locality: Locality,
    /// Weight.
    pub weight: u32,
    /// Whether it is ready.
    pub ready: bool,
}

impl Endpoint {
    /// Returns whether the endpoint belongs to a subset with these labels: those of its pod, its locality and its node,
    /// its network, and the client's cluster if the pod names none.
    pub fn has_labels<'n>(
        &'n self,
        subset: &Labels,
        cluster: &'n str,
        network: impl Fn() -> &'n str,
    ) -> bool {
        let Some(pod) = &self.pod else { return subset.is_empty() };
        if !subset.keys().any(|name| is_added(name)) {
            return selects(subset, &pod.meta.labels);
        }
        let known = |value: &'n str| Some(value).filter(|value| !value.is_empty());
        subset.iter().all(|(name, value)| {
            let own = pod.meta.labels.get(name).map(String::as_str);
            let found = match name.as_str() {
                CLUSTER => own.or(known(cluster)),
                NETWORK => known(network()).or(own),
                HOSTNAME => known(&pod.spec.node).or(own),
                name => self.locality.label(name).or(own),
            };
            found == Some(value)
        })
    }

    /// Returns whether the endpoint has a sidecar, which accepts mutual TLS.
    pub fn has_sidecar(&self) -> bool {
        self.pod.as_ref().is_some_and(|pod| pod.has_sidecar())
    }
}

impl ServicePort {
    /// Returns the pod's port behind this service port; `None` if no container has a port of that name.
    pub fn resolve(&self, pod: &Pod) -> Option<u16> {
        match &self.target {
            TargetPort::Number(number) => Some(*number),
            TargetPort::Name(name) => {
                pod.ports.iter().find(|port| port.tcp && port.name == *name).map(|p| p.port)
            }
        }
    }
}

impl World {
    /// Returns the endpoints of a service port by address, including those that are not ready.
    pub fn endpoints(&self, service: &Typed<Service>, port: &ServicePort) -> Vec<Endpoint> {
        let mut endpoints = match (&service.spec.entry_host, self.slice_endpoints(service, port)) {
            (Some(_), _) if !service.spec.selector.is_empty() => self.selected_endpoints(service, port),
            (Some(entry_host), _) => entry_hosts::endpoints(entry_host, port),
            (None, Some(endpoints)) => endpoints,
            (None, None) => self.selected_endpoints(service, port),
        };
        if service.spec.external_name.is_none() && !service.spec.selector.is_empty() {
            endpoints.extend(self.selected_entries(service, port));
        }
        if let Some(same) = self.entry_host_of(service) {
            endpoints.extend(self.endpoints_by_name(same, port));
        }
        endpoints.sort_by(|a, b| (&a.address, a.port).cmp(&(&b.address, b.port)));
        endpoints
            .dedup_by(|a, b| a.address != Address::Hidden && (&a.address, a.port) == (&b.address, b.port));
        endpoints
    }

    /// Returns the endpoints of the WorkloadEntries that a service selects. As in Istio, names are endpoints of
    /// ServiceEntries with DNS only, whose names are resolved.
    fn selected_entries(&self, service: &Typed<Service>, port: &ServicePort) -> Vec<Endpoint> {
        let entries = self.entries_selected(&service.meta.namespace, &service.spec.selector);
        let entries = entries.filter(|entry| match &entry.spec.address {
            Address::Ip(_) | Address::Hidden => true,
            Address::Unix(_) => service.spec.entry_host.is_some(),
            Address::Name(_) => false,
        });
        entries.filter_map(|entry| entry_hosts::endpoint(&entry.spec, port)).collect()
    }

    /// Returns the ServiceEntry's service of the same name and namespace as a Kubernetes Service. As in Istio, its
    /// endpoints are added to those of the Service.
    fn entry_host_of(&self, service: &Typed<Service>) -> Option<&Arc<Typed<Service>>> {
        if service.spec.entry_host.is_some() || !self.has_entry_hosts() {
            return None;
        }
        self.service_named(&service.meta.namespace, &service.fqdn())
    }

    /// Returns the endpoints of the service's port that has the name of another service's port.
    fn endpoints_by_name(&self, service: &Typed<Service>, port: &ServicePort) -> Vec<Endpoint> {
        let same = service.spec.ports.iter().find(|of| of.name == port.name);
        same.map(|port| self.endpoints(service, port)).unwrap_or_default()
    }

    /// Returns the slices of a service.
    pub(super) fn slices_of(
        &self,
        namespace: &str,
        service: &str,
    ) -> impl Iterator<Item = &Typed<EndpointSlice>> {
        let key = (namespace.to_owned(), service.to_owned());
        let slices: Vec<&(String, String)> = self.service_slices.get(&key).collect();
        let slices = slices.into_iter().filter_map(|(namespace, name)| self.slices.get(namespace, name));
        slices.map(|slice| &*slice.object)
    }

    /// Returns the SPIFFE IDs that a service's endpoints may present.
    pub fn service_identities(&self, service: &Typed<Service>) -> BTreeSet<SpiffeId> {
        let trust_domain = &self.mesh().trust_domain;
        let endpoints = service.spec.ports.iter().flat_map(|port| self.endpoints(service, port));
        let pods = endpoints.filter_map(|endpoint| endpoint.pod);
        let pods = pods.filter(|pod| !pod.spec.service_account.is_empty());
        pods.map(|pod| SpiffeId::new(trust_domain, &pod.meta.namespace, &pod.spec.service_account)).collect()
    }

    /// Returns the services whose selector matches a workload with these labels, by name.
    pub fn services_selecting(&self, namespace: &str, labels: &Labels) -> Vec<&Arc<Typed<Service>>> {
        self.services
            .in_namespace(namespace)
            .map(|entry| &entry.object)
            .filter(|service| !service.spec.selector.is_empty() && selects(&service.spec.selector, labels))
            .collect()
    }

    /// Returns the endpoints of the service's slices; `None` if it has no slice.
    fn slice_endpoints(&self, service: &Typed<Service>, port: &ServicePort) -> Option<Vec<Endpoint>> {
        let key = (service.meta.namespace.clone(), service.meta.name.clone());
        let mut slices =
            self.service_slices.get(&key).filter_map(|(namespace, name)| self.slices.get(namespace, name));
        let mut next = slices.next();
        next?;
        let mut endpoints = Vec::new();
        while let Some(slice) = next {
            if let Some(number) = slice.object.spec.ports.get(&port.name) {
                let of_slice = &slice.object.spec.endpoints;
                endpoints.extend(of_slice.iter().map(|endpoint| {
                    self.slice_endpoint(
                        &service.meta.namespace,
                        endpoint,
                        *number,
                        service.spec.publish_not_ready,
                    )
                }));
            }
            next = slices.next();
        }
        Some(endpoints)
    }

    fn slice_endpoint(&self, namespace: &str, from: &SliceEndpoint, port: u16, not_ready: bool) -> Endpoint {
        let pod = self.pod(namespace, &from.pod).or_else(|| self.pod_by_ip(from.ip)).cloned();
        let of_label = pod.as_ref().and_then(|pod| Locality::of_workload(&pod.meta.labels));
        let locality = of_label.unwrap_or_else(|| {
            let mut locality = self.locality(&from.node);
            if locality.zone.is_empty() {
                locality.zone.clone_from(&from.zone);
            }
            locality
        });
        let address = Address::Ip(from.ip);
        Endpoint { address, name: None, port, pod, locality, weight: 1, ready: from.ready || not_ready }
    }

    fn selected_endpoints(&self, service: &Typed<Service>, port: &ServicePort) -> Vec<Endpoint> {
        if service.spec.external_name.is_some() {
            return Vec::new();
        }
        let pods = self.pods_selected(&service.meta.namespace, &service.spec.selector);
        pods.filter(|pod| !pod.spec.has_ended)
            .filter_map(|pod| {
                Some(Endpoint {
                    address: Address::Ip(*pod.spec.ips.first()?),
                    name: None,
                    port: port.resolve(&pod.spec)?,
                    locality: self.pod_locality(pod),
                    weight: 1,
                    ready: pod.spec.ready || service.spec.publish_not_ready,
                    pod: Some(pod.clone()),
                })
            })
            .collect()
    }
}
