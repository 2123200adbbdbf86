//! Networks of workloads, and the gateways between networks.
//!
//! As in Istio, the network of a workload is that of its label or WorkloadEntry, otherwise that of the label of the
//! system namespace, otherwise that of the mesh networks by cluster or address. Gateways are those of the mesh
//! networks, and the Services and Gateways with a label that names their network.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::{ChangeSet, World, store::Entry};
use crate::{
    ObjectKey,
    api::{
        Address, ConfigMap, Kind, Labels, MeshConfig, Meta, Service, Typed,
        gateway_api::{GatewayAddress, KubernetesGateway},
        kube::{NETWORK, TrafficDistribution, gateway_port},
        mesh_config,
        mesh_networks::{AddressBlock, MeshNetworks},
    },
};

/// Properties of the mesh on which the choice of endpoints depends for all services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Topology {
    /// Network of all workloads without a label; if it is empty, `clusters` and `blocks` decide.
    network: String,
    /// Networks by cluster.
    clusters: BTreeMap<String, String>,
    /// Networks by address, the largest block first.
    blocks: Vec<(AddressBlock, String)>,
    gateways: Vec<KnownGateway>,
    /// Names of gateways, whose addresses are looked up.
    names: BTreeSet<Arc<str>>,
}

/// Gateway of a network.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownGateway {
    network: String,
    address: IpAddr,
    port: u16,
    place: GatewayPlace,
}

/// Cluster of a gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
enum GatewayPlace {
    Unknown,
    /// The cluster of the control plane.
    Here,
    /// Each of these clusters: the gateway is a Service that the mesh networks name.
    Clusters(BTreeSet<String>),
}

/// Gateway of a network, as clients of a cluster see it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NetworkGateway {
    /// Address.
    pub(crate) address: IpAddr,
    /// Port.
    pub(crate) port: u16,
    /// Network.
    pub(crate) network: String,
    /// Cluster; empty if unknown.
    pub(crate) cluster: String,
}

impl Topology {
    /// Returns the network of a workload in a cluster; empty if unknown.
    pub(crate) fn network_of<'a>(&'a self, labels: &'a Labels, ip: Option<IpAddr>, cluster: &str) -> &'a str {
        if let Some(network) = labels.get(NETWORK).filter(|network| !network.is_empty()) {
            return network;
        }
        if !self.network.is_empty() {
            return &self.network;
        }
        let by_address = || {
            let ip = ip?;
            self.blocks.iter().find(|(block, _)| block.contains(ip)).map(|(_, network)| network)
        };
        self.clusters.get(cluster).or_else(by_address).map_or("", String::as_str)
    }

    /// Returns whether there are no gateways, so that all endpoints are reached directly.
    pub(crate) fn is_flat(&self) -> bool {
        self.gateways.is_empty()
    }

    /// Returns the gateways by network, ordered by address and port, as clients of a cluster see them.
    pub(crate) fn gateways(&self, cluster: &str) -> BTreeMap<&str, Vec<NetworkGateway>> {
        let mut made: BTreeMap<&str, Vec<NetworkGateway>> = BTreeMap::new();
        for known in &self.gateways {
            let at = match &known.place {
                GatewayPlace::Unknown => "",
                GatewayPlace::Here => cluster,
                GatewayPlace::Clusters(clusters) if clusters.contains(cluster) => cluster,
                GatewayPlace::Clusters(_) => continue,
            };
            let (network, cluster) = (known.network.clone(), at.to_owned());
            let gateway = NetworkGateway { address: known.address, port: known.port, network, cluster };
            made.entry(&known.network).or_default().push(gateway);
        }
        for gateways in made.values_mut() {
            // istiod compares addresses as texts.
            gateways.sort_by_cached_key(|gateway| (gateway.address.to_string(), gateway.clone()));
            gateways.dedup();
        }
        made
    }
}

impl World {
    /// Returns the networks and gateways.
    pub(crate) fn topology(&self) -> &Arc<Topology> {
        self.topology.get_or_init(|| Arc::new(self.make_topology()))
    }

    /// Returns the names of gateways of networks, whose addresses are looked up.
    pub(super) fn gateway_names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.topology().names.iter()
    }

    /// Returns whether the topology depends on the current object of a key.
    pub(super) fn affects_topology(&self, key: &ObjectKey) -> bool {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        match key.kind {
            Kind::ConfigMap => mesh_config::is_own(namespace, name),
            Kind::Namespace => name == mesh_config::NAMESPACE,
            Kind::Service => self.service_named(namespace, name).is_some_and(|service| {
                service.meta.labels.contains_key(NETWORK)
                    || self.mesh().networks.names_service(&service.fqdn())
            }),
            Kind::KubernetesGateway => {
                let gateway = self.kubernetes_gateways.get(namespace, name);
                gateway.is_some_and(|entry| entry.object.meta.labels.contains_key(NETWORK))
            }
            _ => false,
        }
    }

    /// Returns which endpoints of a service its clients prefer.
    pub(crate) fn traffic_distribution(&self, service: &Typed<Service>) -> TrafficDistribution {
        let of_namespace = || {
            let namespace = self.namespaces.get("", &service.meta.namespace)?;
            TrafficDistribution::of_annotation(&namespace.object.meta.annotations)
        };
        service.spec.traffic_distribution.or_else(of_namespace).unwrap_or(TrafficDistribution::Any)
    }

    /// Returns whether endpoints of any service may be preferred by the client's node.
    pub fn uses_nodes(&self) -> bool {
        let annotated = |meta: &Meta| {
            TrafficDistribution::of_annotation(&meta.annotations) == Some(TrafficDistribution::PreferSameNode)
        };
        let distribution = |entry: &Entry<Service>| entry.object.spec.traffic_distribution;
        self.mesh().prefers_node()
            || self.destination_rules.iter().any(|entry| entry.object.spec.prefers_node())
            || self.services.iter().any(|of| distribution(of) == Some(TrafficDistribution::PreferSameNode))
            || self.namespaces.iter().any(|entry| annotated(&entry.object.meta))
    }

    /// Returns the resources that may differ because the topology differs from that at the last call.
    pub(super) fn take_topology_change(&mut self) -> ChangeSet {
        let now = Arc::clone(self.topology());
        let before = std::mem::replace(&mut self.last_topology, Arc::clone(&now));
        if before == now {
            return ChangeSet::default();
        }
        let Topology { network, clusters, blocks, gateways: _, names: _ } = &*before;
        if (network, clusters, blocks) != (&now.network, &now.clusters, &now.blocks) {
            return ChangeSet::everything();
        }
        // Gateways are endpoints. Their number is part of the weights of all endpoints.
        let services = self.services.iter().map(|entry| &entry.object.meta);
        let services = services.map(|meta| (meta.namespace.clone(), meta.name.clone())).collect();
        ChangeSet { services, ..ChangeSet::default() }
    }

    /// Returns whether the mesh configuration differs from this one in the networks at most.
    pub(super) fn has_same_mesh(&self, before: &ConfigMap) -> bool {
        let without = |mesh: &MeshConfig| MeshConfig { networks: MeshNetworks::default(), ..mesh.clone() };
        matches!(before, ConfigMap::Mesh(before) if without(before) == without(self.mesh()))
    }

    fn make_topology(&self) -> Topology {
        let system = self.namespace(mesh_config::NAMESPACE).and_then(|labels| labels.get(NETWORK));
        let mut made = Topology { network: system.cloned().unwrap_or_default(), ..Topology::default() };
        for (network, of) in &self.mesh().networks.networks {
            for endpoints in &of.endpoints {
                if !endpoints.from_registry.is_empty() {
                    let cluster = endpoints.from_registry.clone();
                    made.clusters.entry(cluster).or_insert_with(|| network.clone());
                }
                made.blocks
                    .extend(AddressBlock::parse(&endpoints.from_cidr).map(|block| (block, network.clone())));
            }
            let registries = of.endpoints.iter().map(|endpoints| &endpoints.from_registry);
            let clusters: BTreeSet<String> = registries.filter(|of| !of.is_empty()).cloned().collect();
            for gateway in &of.gateways {
                let Ok(port) = u16::try_from(gateway.port) else { continue };
                if gateway.registry_service_name.is_empty() {
                    self.add_gateway(&mut made, network, &gateway.address, port, &GatewayPlace::Unknown);
                    continue;
                }
                let place = GatewayPlace::Clusters(clusters.clone());
                let service = self.kubernetes_service(&gateway.registry_service_name);
                let service = service.filter(|service| !service.meta.labels.contains_key(NETWORK));
                for address in service.iter().flat_map(|service| &service.spec.external_addresses) {
                    self.add_gateway(&mut made, network, address, port, &place);
                }
            }
        }
        made.blocks.sort();
        self.services.iter().for_each(|entry| self.add_gateway_service(&mut made, &entry.object));
        self.kubernetes_gateways.iter().for_each(|entry| self.add_kubernetes_gateway(&mut made, entry));
        made
    }

    /// Adds a gateway; one with a name has the addresses of the name.
    fn add_gateway(
        &self,
        made: &mut Topology,
        network: &str,
        address: &str,
        port: u16,
        place: &GatewayPlace,
    ) {
        let mut add = |address| {
            let (network, place) = (network.to_owned(), place.clone());
            made.gateways.push(KnownGateway { network, address, port, place });
        };
        match Address::of(address) {
            Address::Ip(ip) => add(ip),
            Address::Name(name) => {
                let resolved = self.resolved(&name);
                resolved.iter().flat_map(|resolved| &resolved.addresses).for_each(|ip| add(*ip));
                made.names.insert(name);
            }
            Address::Unix(_) | Address::Hidden => {}
        }
    }

    /// Adds the gateways that a Service with a label makes: each of its external addresses.
    fn add_gateway_service(&self, made: &mut Topology, service: &Typed<Service>) {
        let Some(network) = service.meta.labels.get(NETWORK).filter(|network| !network.is_empty()) else {
            return;
        };
        let port = gateway_port(&service.meta.labels);
        if service.spec.entry_host.is_none() && service.spec.port(port).is_some() {
            for address in &service.spec.external_addresses {
                self.add_gateway(made, network, address, port, &GatewayPlace::Here);
            }
        }
    }

    /// Adds the gateways that a Gateway of Gateway API with a label makes: each of its addresses and listeners for
    /// other networks.
    fn add_kubernetes_gateway(&self, made: &mut Topology, entry: &Entry<KubernetesGateway>) {
        let (meta, spec) = (&entry.object.meta, &entry.object.spec);
        let Some(network) = meta.labels.get(NETWORK).filter(|network| !network.is_empty()) else { return };
        for listener in spec.listeners.iter().filter(|listener| listener.joins_networks(&meta.labels)) {
            let Ok(port) = u16::try_from(listener.port) else { continue };
            let has_type = |address: &&GatewayAddress| {
                matches!(address.kind.as_deref(), None | Some("IPAddress" | "Hostname"))
            };
            for address in spec.addresses.iter().filter(has_type) {
                self.add_gateway(made, network, &address.value, port, &GatewayPlace::Here);
            }
        }
    }
}

#[cfg(test)]
mod tests;
