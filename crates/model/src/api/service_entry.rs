//! ServiceEntry: hosts outside the mesh, or outside Kubernetes. Fields are Istio's (`networking.istio.io`).
//!
//! Each host of an entry becomes a [`Service`] named after the host, so rules, routes and clusters are independent of
//! where a service was declared.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use serde::Deserialize;

use super::{
    Labels, Meta, Pod, Protocol, Service, ServicePort, Typed,
    kube::{Locality, TargetPort, Workload},
};

/// Annotation by which proxies resolve the names of an entry themselves: `proxy`.
pub const RESOLVE: &str = "skysail.io/resolve";
/// Kind of the workload of an entry's endpoints.
pub(crate) const WORKLOAD_ENTRY: &str = "WorkloadEntry";
/// Annotation with the namespaces in which a service is visible.
const EXPORT_TO: &str = "networking.istio.io/exportTo";
/// Label of endpoints that accept mutual TLS: `istio`.
const TLS_MODE: &str = "security.istio.io/tlsMode";

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
    /// Selector of pods in the entry's namespace that are endpoints.
    pub workload_selector: Option<EntrySelector>,
    /// Namespaces in which the entry is visible; empty: the mesh's default.
    pub export_to: Vec<String>,
    /// Names of which the server's certificate must have one.
    pub subject_alt_names: Vec<String>,
}

/// Selector of an entry's pods. Source: `istio.networking.v1.WorkloadSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EntrySelector {
    /// Labels; all must match.
    pub labels: Labels,
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

/// Endpoint of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadEntry {
    /// IP address or DNS name.
    pub address: String,
    /// Ports by the name of the entry's port.
    pub ports: BTreeMap<String, u32>,
    /// Labels.
    pub labels: Labels,
    /// Network.
    pub network: String,
    /// Locality, `region/zone/subzone`.
    pub locality: String,
    /// Weight; 0 counts as 1.
    pub weight: u32,
    /// Service account.
    pub service_account: String,
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
    pub endpoints: Vec<EntryHostEndpoint>,
    /// Blocks of addresses (CIDR).
    pub blocks: Vec<String>,
}

/// Endpoint of a service that a ServiceEntry declared.
#[derive(Clone, Debug, PartialEq)]
pub struct EntryHostEndpoint {
    /// Address.
    pub address: Address,
    /// Ports by the name of the service port, where they differ from it.
    pub ports: BTreeMap<String, u16>,
    /// Labels and identity.
    pub workload: Arc<Typed<Pod>>,
    /// Locality.
    pub locality: Locality,
    /// Weight.
    pub weight: u32,
}

impl Eq for EntryHostEndpoint {}

/// Address of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// IP address.
    Ip(IpAddr),
    /// DNS name, in lower case and without a final dot.
    Name(Arc<str>),
}

impl Address {
    /// Parses an IP address or a name.
    pub fn of(text: &str) -> Self {
        match text.parse() {
            Ok(ip) => Self::Ip(ip),
            Err(_) => Self::Name(text.trim_end_matches('.').to_ascii_lowercase().into()),
        }
    }

    /// Returns the IP address; `None` for a name.
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Ip(ip) => Some(*ip),
            Self::Name(_) => None,
        }
    }
}

impl EntryHost {
    /// Returns the names of its endpoints that the control plane resolves.
    pub fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        let wanted = self.resolution.is_dns() && !self.by_proxy;
        let names = self.endpoints.iter().filter_map(|endpoint| match &endpoint.address {
            Address::Name(name) => Some(name),
            Address::Ip(_) => None,
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
    /// Returns whether an address may be allocated to one of its hosts. Source: Istio's automatic allocation of
    /// addresses.
    pub fn is_allocatable(&self, host: &str) -> bool {
        // With NONE the proxy connects to the address that the client uses, which must be the real one.
        self.addresses.is_empty() && self.resolution != Resolution::None && !host.starts_with('*')
    }

    /// Returns the labels of the pods that are its endpoints; `None` if no pods are.
    pub fn selector(&self) -> Option<&Labels> {
        let selector = self.workload_selector.as_ref().filter(|_| self.resolution == Resolution::Static)?;
        Some(&selector.labels).filter(|labels| !labels.is_empty())
    }
}

impl Typed<ServiceEntry> {
    /// Returns the service of one of its hosts. `allocated` is the address allocated to the host.
    pub fn service(&self, host: &str, allocated: Option<IpAddr>) -> Typed<Service> {
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
            endpoints: self.endpoints(host),
            blocks: spec.addresses.iter().filter(|address| is_block(address)).cloned().collect(),
        };
        let meta = Meta { name: host.to_owned(), annotations, ..self.meta.clone() };
        let own = spec.addresses.iter().filter_map(|address| single_address(address));
        let service = Service {
            cluster_ips: own.chain(allocated.filter(|_| spec.is_allocatable(host))).collect(),
            selector: spec.selector().cloned().unwrap_or_default(),
            ports: spec.ports.iter().filter_map(EntryPort::service_port).collect(),
            entry_host: Some(Arc::new(entry_host)),
            ..Service::default()
        };
        Typed { meta, spec: service }
    }

    fn endpoints(&self, host: &str) -> Vec<EntryHostEndpoint> {
        if self.spec.resolution.is_dns() && self.spec.endpoints.is_empty() {
            let itself = WorkloadEntry { address: host.to_owned(), ..WorkloadEntry::default() };
            return vec![self.endpoint(&itself, self.meta.name.clone())];
        }
        let numbered = self.spec.endpoints.iter().enumerate();
        numbered.map(|(index, from)| self.endpoint(from, format!("{}-{index}", self.meta.name))).collect()
    }

    fn endpoint(&self, from: &WorkloadEntry, name: String) -> EntryHostEndpoint {
        let mut labels = from.labels.clone();
        if !from.service_account.is_empty() {
            labels.entry(TLS_MODE.into()).or_insert_with(|| "istio".into());
        }
        let mut parts = from.locality.splitn(3, '/').map(str::to_owned);
        let mut part = || parts.next().unwrap_or_default();
        let port = |(name, number): (&String, &u32)| Some((name.clone(), u16::try_from(*number).ok()?));
        EntryHostEndpoint {
            address: Address::of(&from.address),
            ports: from.ports.iter().filter_map(port).collect(),
            locality: Locality { region: part(), zone: part(), subzone: part() },
            weight: from.weight.max(1),
            workload: Arc::new(Typed {
                meta: Meta {
                    namespace: self.meta.namespace.clone(),
                    name: name.clone(),
                    labels: Arc::new(labels),
                    ..Meta::default()
                },
                spec: Pod {
                    service_account: from.service_account.clone(),
                    workload: Workload { kind: WORKLOAD_ENTRY.into(), name },
                    ..Pod::default()
                },
            }),
        }
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
