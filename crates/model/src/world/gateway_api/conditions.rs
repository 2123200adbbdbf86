//! Conditions and addresses of one object of Gateway API or one Ingress, as its status in a cluster would have them.

use std::collections::BTreeSet;

use super::status::{ListenerStatus, StatusCondition, fails, holds};
use crate::{
    api::{Ingress, Kind, Labels, ObjectKey, ingress, selects},
    world::{World, store::Entry},
};

/// A condition of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectCondition {
    /// Listener or parent that the condition concerns; empty: the object as a whole.
    pub about: String,
    /// The condition.
    pub condition: StatusCondition,
}

/// Status of an object, as a cluster would show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterStatus {
    /// Conditions.
    pub conditions: Vec<ObjectCondition>,
    /// Listeners of a Gateway or a ListenerSet. Their conditions are in `conditions`.
    pub listeners: Vec<ListenerStatus>,
    /// Number of accepted ListenerSets of a Gateway; `None` for other objects.
    pub attached_listener_sets: Option<usize>,
    /// External addresses or names of an Ingress or a Gateway: those of the Services of its proxies. If they have none,
    /// the names of the Services that the Gateway names as its addresses. `None` for other objects.
    pub addresses: Option<Vec<String>>,
}

impl World {
    /// Returns the status of an object of Gateway API or of an Ingress. It is empty for other objects, and for routes and
    /// Gateways that another controller serves.
    pub fn cluster_status(&self, key: &ObjectKey) -> ClusterStatus {
        let named = |about: String, conditions: Vec<StatusCondition>| {
            conditions.into_iter().map(move |condition| ObjectCondition { about: about.clone(), condition })
        };
        if key.kind == Kind::Ingress {
            let entry = self.ingresses.get(&key.namespace, &key.name);
            let conditions = entry.map(|entry| self.ingress_conditions(entry)).unwrap_or_default();
            return ClusterStatus {
                conditions: named(String::new(), conditions).collect(),
                addresses: self.external_addresses(key),
                ..ClusterStatus::default()
            };
        }
        if key.kind.group() != super::GROUP {
            return ClusterStatus::default();
        }
        let Some(mut status) = self.gateway_api_status().into_iter().find(|status| status.object == *key)
        else {
            return ClusterStatus::default();
        };
        let listeners = status.listeners.iter_mut().map(|of| {
            let conditions = std::mem::take(&mut of.conditions);
            named(format!("listener {}", of.name), conditions)
        });
        let listeners: Vec<ObjectCondition> = listeners.flatten().collect();
        let parents = status.parents.into_iter().flat_map(|of| {
            let namespace = of.parent.namespace.as_deref().unwrap_or(&key.namespace);
            named(format!("parent {namespace}/{}", of.parent.name), of.conditions)
        });
        ClusterStatus {
            conditions: named(String::new(), status.conditions).chain(listeners).chain(parents).collect(),
            listeners: status.listeners,
            attached_listener_sets: status.attached_listener_sets,
            addresses: self.external_addresses(key),
        }
    }

    /// Returns the Ingresses that are served here.
    pub fn served_ingresses(&self) -> Vec<ObjectKey> {
        let served = self.ingresses.iter().filter(|entry| self.is_served(entry));
        let key = |entry: &Entry<Ingress>| {
            let (namespace, name) = (entry.object.meta.namespace.clone(), entry.object.meta.name.clone());
            ObjectKey { kind: Kind::Ingress, namespace, name }
        };
        served.map(key).collect()
    }

    /// Returns the addresses of [`ClusterStatus::addresses`].
    pub fn external_addresses(&self, key: &ObjectKey) -> Option<Vec<String>> {
        if key.kind == Kind::Ingress {
            return self.ingresses.get(&key.namespace, &key.name).map(|entry| self.ingress_addresses(entry));
        }
        self.gateway_entry(key).map(|entry| self.gateway_addresses(&entry.object))
    }

    /// Returns the external addresses or names of the Services of an Ingress's gateways. They are empty if another
    /// controller serves the Ingress.
    fn ingress_addresses(&self, entry: &Entry<Ingress>) -> Vec<String> {
        if !self.is_served(entry) {
            return Vec::new();
        }
        // As in Istio, a Service that the mesh configuration names takes precedence.
        let mesh = self.mesh();
        let named = Some(mesh.ingress_service.as_str()).filter(|name| !name.is_empty());
        let named = named.and_then(|name| self.service_named(&mesh.root_namespace, name));
        let addresses: BTreeSet<&String> = match named {
            Some(service) => service.spec.external_addresses.iter().collect(),
            None => self.addresses_of_gateways(&self.gateway_of(entry).selector, None),
        };
        addresses.into_iter().cloned().collect()
    }

    /// Returns the external addresses of the Services of gateways with these labels; `namespace`: `None` for all.
    pub(super) fn addresses_of_gateways(
        &self,
        selector: &Labels,
        namespace: Option<&str>,
    ) -> BTreeSet<&String> {
        let pods = self.pods().map(|pod| (&pod.meta.namespace, &*pod.meta.labels));
        let templates = self.templates().map(|template| (&template.meta.namespace, &template.spec.labels));
        let gateways = pods.chain(templates).filter(|(of, labels)| {
            namespace.is_none_or(|namespace| **of == *namespace) && selects(selector, labels)
        });
        let services = gateways.flat_map(|(namespace, labels)| self.services_selecting(namespace, labels));
        services.flat_map(|service| &service.spec.external_addresses).collect()
    }

    fn ingress_conditions(&self, entry: &Entry<Ingress>) -> Vec<StatusCondition> {
        if !self.is_served(entry) {
            let (meta, spec) = (&entry.object.meta, &entry.object.spec);
            let message = match (meta.annotations.get(ingress::CLASS), spec.ingress_class_name.as_deref()) {
                (Some(class), _) => {
                    format!("the control plane does not serve class {class} of its annotation")
                }
                (None, Some(name)) if self.ingress_classes.get("", name).is_none() => {
                    format!("there is no IngressClass {name}")
                }
                (None, Some(name)) => format!("IngressClass {name} has another controller"),
                (None, None) => "it names no class that the control plane serves".to_owned(),
            };
            return vec![fails("Accepted", "OtherClass", message)];
        }
        let namespace = &entry.object.meta.namespace;
        let paths = entry.object.spec.rules.iter().filter_map(|rule| rule.http.as_ref());
        let backends = paths.flat_map(|http| &http.paths).filter_map(|path| path.backend.service.as_ref());
        let missing = backends.map(|service| (&service.name, &service.port)).find(|(name, port)| {
            let known = self.service_named(namespace, name).filter(|known| known.spec.entry_host.is_none());
            let has_port = |number: u16, named: &str| {
                known.is_some_and(|known| {
                    let mut ports = known.spec.ports.iter();
                    ports.any(|of| if number == 0 { of.name == named } else { of.port == number })
                })
            };
            !has_port(port.number, &port.name)
        });
        let resolved = match missing {
            None => holds("ResolvedRefs", "ResolvedRefs", "All references resolved"),
            Some((name, port)) => {
                let port = if port.number == 0 { port.name.clone() } else { port.number.to_string() };
                let message = format!("there is no Service {namespace}/{name} with port {port}");
                fails("ResolvedRefs", "BackendNotFound", message)
            }
        };
        vec![holds("Accepted", "Accepted", "Ingress is served"), resolved]
    }
}
