//! ServiceEntry: hosts outside the mesh, or outside Kubernetes. Fields are Istio's (`networking.istio.io`).
//!
//! Each host of an entry becomes a [`Service`] named after the host, so rules, routes and clusters are independent of
//! where a service was declared.

use std::{net::IpAddr, sync::Arc};

use serde::Deserialize;
use skysail_yaml::{Node, Value};

use super::{
    Labels, Meta, Protocol, Service, ServicePort, Typed, WorkloadEntry,
    kube::{TargetPort, TrafficDistribution},
    value::WorkloadLabels,
    workload::{Address, EntryEndpoint},
};

/// Annotation by which proxies resolve the names of an entry themselves: `proxy`.
pub const RESOLVE: &str = "skysail.io/resolve";
/// Label that allows or denies the allocation of addresses.
const AUTO_ALLOCATE: &str = "networking.istio.io/enable-autoallocate-ip";
/// Annotation with the namespaces in which a service is visible.
const EXPORT_TO: &str = "networking.istio.io/exportTo";

/// `spec` of a ServiceEntry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceEntry {
    /// Host names.
    pub hosts: Vec<String>,
    /// Virtual addresses, or blocks of them.
    pub addresses: Vec<String>,
    /// Ports.
    pub ports: Vec<EntryPort>,
    /// Whether the hosts belong to the mesh.
    pub location: Location,
    /// Resolution of endpoint addresses.
    pub resolution: Resolution,
    /// Endpoints; without any, `DNS` resolves the host itself.
    pub endpoints: Vec<WorkloadEntry>,
    /// Selector of pods and WorkloadEntries in the entry's namespace that are endpoints.
    pub workload_selector: Option<WorkloadLabels>,
    /// Namespaces in which the entry is visible; empty: the mesh's default.
    pub export_to: Vec<String>,
    /// Names of which the server's certificate must have one.
    pub subject_alt_names: Vec<String>,
    /// Addresses that a controller allocated, by host (`status.addresses`).
    #[serde(skip)]
    pub assigned: Vec<(String, IpAddr)>,
    /// Whether no address may be allocated (label `networking.istio.io/enable-autoallocate-ip: "false"`).
    #[serde(skip)]
    pub declines_addresses: bool,
}

/// Port of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EntryPort {
    /// Number.
    pub number: u32,
    /// Protocol.
    pub protocol: String,
    /// Name.
    pub name: String,
    /// Port of the endpoints; 0: the same.
    pub target_port: u32,
}

/// Whether a service belongs to the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Location {
    /// Outside the mesh: its servers have no sidecars.
    #[default]
    MeshExternal,
    /// Part of the mesh.
    MeshInternal,
}

/// Resolution of endpoint addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Resolution {
    /// The original destination.
    #[default]
    None,
    /// The addresses of the endpoints.
    Static,
    /// All addresses of the endpoints' names.
    Dns,
    /// One address of the name.
    DnsRoundRobin,
    /// The host of the request.
    DynamicDns,
}

impl Resolution {
    /// Returns whether names are resolved by DNS.
    pub const fn is_dns(self) -> bool {
        matches!(self, Self::Dns | Self::DnsRoundRobin)
    }
}

/// Properties of a service that a ServiceEntry declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryHost {
    /// Name of the entry.
    pub entry: String,
    /// Whether it is outside the mesh.
    pub external: bool,
    /// Resolution of endpoint addresses.
    pub resolution: Resolution,
    /// Whether proxies resolve its names themselves.
    pub by_proxy: bool,
    /// Endpoints.
    pub endpoints: Vec<EntryEndpoint>,
    /// Blocks of addresses (CIDR).
    pub blocks: Vec<String>,
    /// Names of which the server's certificate must have one.
    pub subject_alt_names: Vec<String>,
}

impl EntryHost {
    /// Returns the names of its endpoints that the control plane resolves.
    pub fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        let wanted = self.resolution.is_dns() && !self.by_proxy;
        let names = self.endpoints.iter().filter_map(|endpoint| match &endpoint.address {
            Address::Name(name) => Some(name),
            Address::Ip(_) | Address::Unix(_) | Address::Hidden => None,
        });
        names.filter(move |_| wanted)
    }
}

/// Parses a single address, also one in the form of a block (`10.0.0.1/32`).
fn single_address(text: &str) -> Option<IpAddr> {
    let (ip, length) = text.split_once('/').unwrap_or((text, ""));
    let ip: IpAddr = ip.parse().ok()?;
    let longest = if ip.is_ipv4() { "32" } else { "128" };
    (length.is_empty() || length == longest).then_some(ip)
}

/// Returns whether a text is a block of several addresses.
fn is_block(text: &str) -> bool {
    text.contains('/') && single_address(text).is_none()
}

/// Normalizes a host of an entry to the form that rules and services use.
pub fn host_of(written: &str) -> String {
    written.trim_end_matches('.').to_ascii_lowercase()
}

impl ServiceEntry {
    /// Adds what the labels and the status say.
    pub(crate) fn complete(&mut self, labels: &Labels, status: Option<&Node>) {
        let text = |node: &Node, key: &str| Some(node.get(key)?.text()?.to_owned());
        let addresses = match status.and_then(|status| status.get("addresses")).map(|list| &list.value) {
            Some(Value::List(nodes)) => nodes.as_slice(),
            _ => &[],
        };
        let assigned = addresses
            .iter()
            .filter_map(|node| Some((host_of(&text(node, "host")?), text(node, "value")?.parse().ok()?)));
        self.assigned = assigned.collect();
        self.declines_addresses =
            labels.get(AUTO_ALLOCATE).is_some_and(|value| value.eq_ignore_ascii_case("false"));
    }

    /// Returns whether an address may be allocated to one of its hosts. Source: Istio's automatic allocation of
    /// addresses.
    pub fn is_allocatable(&self, host: &str) -> bool {
        // With NONE the proxy connects to the address that the client uses, which must be the real one.
        let is_resolved = !host.starts_with('*') || self.resolution == Resolution::DynamicDns;
        let may_have = !self.declines_addresses && self.addresses.is_empty();
        may_have && self.resolution != Resolution::None && is_resolved
    }

    /// Returns the labels of the pods and WorkloadEntries that are its endpoints; `None` if it selects none.
    pub fn selector(&self) -> Option<&Labels> {
        self.labels().filter(|_| self.resolution == Resolution::Static)
    }

    /// Returns the labels of the WorkloadEntries whose names are resolved. As in Istio, no pods are selected then.
    pub(crate) fn selector_of_names(&self) -> Option<&Labels> {
        self.labels().filter(|_| self.resolution.is_dns())
    }

    fn labels(&self) -> Option<&Labels> {
        // An empty selector selects nothing, as in Istio.
        self.workload_selector.as_ref().map(|selector| &selector.labels).filter(|labels| !labels.is_empty())
    }
}

impl Typed<ServiceEntry> {
    /// Returns the service of one of its hosts. `allocated` is the address allocated to the host by the allocator of
    /// all clients, `automatic` those allocated for clients that answer DNS, `selected` are the WorkloadEntries whose
    /// names are resolved.
    pub(crate) fn service(
        &self,
        host: &str,
        allocated: Option<IpAddr>,
        automatic: &[IpAddr],
        selected: Vec<EntryEndpoint>,
    ) -> Typed<Service> {
        let spec = &self.spec;
        let mut annotations = self.meta.annotations.clone();
        if !spec.export_to.is_empty() {
            annotations.insert(EXPORT_TO.into(), spec.export_to.join(","));
        }
        let entry_host = EntryHost {
            entry: self.meta.name.clone(),
            external: spec.location == Location::MeshExternal,
            resolution: spec.resolution,
            by_proxy: annotations.get(RESOLVE).is_some_and(|by| by == "proxy"),
            endpoints: self.endpoints(host).into_iter().chain(selected).collect(),
            blocks: spec.addresses.iter().filter(|address| is_block(address)).cloned().collect(),
            subject_alt_names: spec.subject_alt_names.clone(),
        };
        let meta = Meta { name: host.to_owned(), annotations, ..self.meta.clone() };
        let own = spec.addresses.iter().filter_map(|address| single_address(address));
        let service = Service {
            cluster_ips: own.chain(allocated.filter(|_| spec.is_allocatable(host))).collect(),
            auto_ips: self.auto_ips(host, automatic),
            selector: spec.selector().cloned().unwrap_or_default(),
            ports: spec.ports.iter().filter_map(EntryPort::service_port).collect(),
            traffic_distribution: TrafficDistribution::of_annotation(&self.meta.annotations),
            entry_host: Some(Arc::new(entry_host)),
            ..Service::default()
        };
        Typed { meta, spec: service }
    }

    /// Returns the addresses of a host for clients that answer DNS: those of its status, otherwise the automatic ones.
    fn auto_ips(&self, host: &str, automatic: &[IpAddr]) -> Vec<IpAddr> {
        if !self.spec.is_allocatable(host) {
            return Vec::new();
        }
        let assigned = self.spec.assigned.iter().filter(|(of, _)| of == host).map(|(_, ip)| *ip);
        let assigned: Vec<IpAddr> = assigned.collect();
        if assigned.is_empty() { automatic.to_vec() } else { assigned }
    }

    fn endpoints(&self, host: &str) -> Vec<EntryEndpoint> {
        let namespace = &self.meta.namespace;
        let none = Labels::new();
        if self.spec.resolution.is_dns()
            && self.spec.endpoints.is_empty()
            && self.spec.workload_selector.is_none()
        {
            let itself = WorkloadEntry { address: host.to_owned(), ..WorkloadEntry::default() };
            return vec![itself.endpoint(namespace, &self.meta.name, &none)];
        }
        let numbered = self.spec.endpoints.iter().enumerate();
        let name = |index: usize| format!("{}-{index}", self.meta.name);
        numbered.map(|(index, from)| from.endpoint(namespace, &name(index), &none)).collect()
    }
}

impl EntryPort {
    /// Returns the protocol; `None` for an unknown one.
    pub fn parsed_protocol(&self) -> Option<Protocol> {
        if self.protocol.is_empty() { Some(Protocol::Unknown) } else { Protocol::parse(&self.protocol) }
    }

    fn service_port(&self) -> Option<ServicePort> {
        let port = u16::try_from(self.number).ok()?;
        let target = u16::try_from(self.target_port).ok().filter(|target| *target != 0).unwrap_or(port);
        let protocol = self.parsed_protocol()?;
        Some(ServicePort { name: self.name.clone(), port, target: TargetPort::Number(target), protocol })
    }
}
