//! ServiceEntry: hosts outside the mesh, or beside Kubernetes. Fields are Istio's (`networking.istio.io`).
//!
//! Each host of an entry becomes a [`Service`] whose name is the host, so that rules, routes and clusters need not know
//! where a service was declared.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use serde::Deserialize;

use super::{
    Labels, Meta, Pod, Protocol, Service, ServicePort, Typed,
    kube::{Locality, TargetPort, Workload},
};

/// What makes proxies look the names of an entry up themselves: `proxy`.
pub const RESOLVE: &str = "skysail.io/resolve";
/// What kind of workload the endpoints of entries are.
pub(crate) const WORKLOAD_ENTRY: &str = "WorkloadEntry";
/// Says which namespaces see a service.
const EXPORT_TO: &str = "networking.istio.io/exportTo";
/// Says whether mutual TLS is taken: `istio`.
const TLS_MODE: &str = "security.istio.io/tlsMode";

/// `spec` of a ServiceEntry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceEntry {
    /// The names clients use.
    pub hosts: Vec<String>,
    /// Virtual addresses, or blocks of them.
    pub addresses: Vec<String>,
    /// The ports.
    pub ports: Vec<EntryPort>,
    /// Whether it belongs to the mesh.
    pub location: Location,
    /// Where its traffic goes.
    pub resolution: Resolution,
    /// Its endpoints; without any, `DNS` looks up the host itself.
    pub endpoints: Vec<WorkloadEntry>,
    /// Pods of its namespace as endpoints.
    pub workload_selector: Option<EntrySelector>,
    /// The namespaces that see it; empty: as the mesh says.
    pub export_to: Vec<String>,
    /// Who its servers may be.
    pub subject_alt_names: Vec<String>,
}

/// Which pods are endpoints of an entry. Source: `istio.networking.v1.WorkloadSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EntrySelector {
    /// All must match.
    pub labels: Labels,
}

/// A port of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EntryPort {
    /// Its number.
    pub number: u32,
    /// What it speaks.
    pub protocol: String,
    /// Its name.
    pub name: String,
    /// The endpoints' port; 0: the same.
    pub target_port: u32,
}

/// An endpoint of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadEntry {
    /// An address, or a name.
    pub address: String,
    /// Ports by the entry's name for them.
    pub ports: BTreeMap<String, u32>,
    /// Its labels.
    pub labels: Labels,
    /// The network it is in.
    pub network: String,
    /// `region/zone/subzone`.
    pub locality: String,
    /// Its share, against others; 0: 1.
    pub weight: u32,
    /// Its service account.
    pub service_account: String,
}

/// Whether a service belongs to the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Location {
    /// No: its servers have no sidecars.
    #[default]
    MeshExternal,
    /// Yes.
    MeshInternal,
}

/// Where the traffic of a service goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Resolution {
    /// To the address that was asked for.
    #[default]
    None,
    /// To its endpoints.
    Static,
    /// To all addresses that its endpoints' names have.
    Dns,
    /// To one address that the name has.
    DnsRoundRobin,
    /// To the name that was asked for.
    DynamicDns,
}

impl Resolution {
    /// Whether names are looked up.
    pub const fn is_dns(self) -> bool {
        matches!(self, Self::Dns | Self::DnsRoundRobin)
    }
}

/// What a service is that a ServiceEntry declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outside {
    /// The entry's name.
    pub entry: String,
    /// It does not belong to the mesh.
    pub external: bool,
    /// Where its traffic goes.
    pub resolution: Resolution,
    /// Proxies look its names up themselves.
    pub by_proxy: bool,
    /// Its endpoints.
    pub endpoints: Vec<OutsideEndpoint>,
}

/// An endpoint of such a service.
#[derive(Clone, Debug, PartialEq)]
pub struct OutsideEndpoint {
    /// Where it is.
    pub address: Address,
    /// Ports by the service port's name, where they differ.
    pub ports: BTreeMap<String, u16>,
    /// Its labels and identity.
    pub workload: Arc<Typed<Pod>>,
    /// Where it runs.
    pub locality: Locality,
    /// Its share, against others.
    pub weight: u32,
}

impl Eq for OutsideEndpoint {}

/// Where an endpoint is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// There.
    Ip(IpAddr),
    /// Where DNS says; in small letters, without a dot at the end.
    Name(Arc<str>),
}

impl Address {
    /// Reads an address or a name.
    pub fn of(text: &str) -> Self {
        match text.parse() {
            Ok(ip) => Self::Ip(ip),
            Err(_) => Self::Name(text.trim_end_matches('.').to_ascii_lowercase().into()),
        }
    }

    /// The address, if it is one.
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Ip(ip) => Some(*ip),
            Self::Name(_) => None,
        }
    }
}

impl Outside {
    /// The names of its endpoints that the control plane is to look up.
    pub fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        let wanted = self.resolution.is_dns() && !self.by_proxy;
        let names = self.endpoints.iter().filter_map(|endpoint| match &endpoint.address {
            Address::Name(name) => Some(name),
            Address::Ip(_) => None,
        });
        names.filter(move |_| wanted)
    }
}

/// A host of an entry as rules and services name it.
pub fn host_of(written: &str) -> String {
    written.trim_end_matches('.').to_ascii_lowercase()
}

impl ServiceEntry {
    /// Whether an address may be allocated to a host of it. Source: Istio's automatic allocation of addresses.
    pub fn is_allocatable(&self, host: &str) -> bool {
        // With NONE the proxy connects to the address that the client asked for, which must be the real one.
        self.addresses.is_empty() && self.resolution != Resolution::None && !host.starts_with('*')
    }

    /// The labels of the pods that are its endpoints; `None` if no pods are.
    pub fn selector(&self) -> Option<&Labels> {
        let selector = self.workload_selector.as_ref().filter(|_| self.resolution == Resolution::Static)?;
        Some(&selector.labels).filter(|labels| !labels.is_empty())
    }
}

impl Typed<ServiceEntry> {
    /// The service that one of its hosts is; `allocated` is the address allocated to the host.
    pub fn service(&self, host: &str, allocated: Option<IpAddr>) -> Typed<Service> {
        let spec = &self.spec;
        let mut annotations = self.meta.annotations.clone();
        if !spec.export_to.is_empty() {
            annotations.insert(EXPORT_TO.into(), spec.export_to.join(","));
        }
        let outside = Outside {
            entry: self.meta.name.clone(),
            external: spec.location == Location::MeshExternal,
            resolution: spec.resolution,
            by_proxy: annotations.get(RESOLVE).is_some_and(|by| by == "proxy"),
            endpoints: self.endpoints(host),
        };
        let meta = Meta { name: host.to_owned(), annotations, ..self.meta.clone() };
        let own = spec.addresses.iter().filter_map(|address| address.parse().ok());
        let service = Service {
            cluster_ips: own.chain(allocated.filter(|_| spec.is_allocatable(host))).collect(),
            selector: spec.selector().cloned().unwrap_or_default(),
            ports: spec.ports.iter().filter_map(EntryPort::service_port).collect(),
            outside: Some(Arc::new(outside)),
            ..Service::default()
        };
        Typed { meta, spec: service }
    }

    fn endpoints(&self, host: &str) -> Vec<OutsideEndpoint> {
        if self.spec.resolution.is_dns() && self.spec.endpoints.is_empty() {
            let itself = WorkloadEntry { address: host.to_owned(), ..WorkloadEntry::default() };
            return vec![self.endpoint(&itself, self.meta.name.clone())];
        }
        let numbered = self.spec.endpoints.iter().enumerate();
        numbered.map(|(index, from)| self.endpoint(from, format!("{}-{index}", self.meta.name))).collect()
    }

    fn endpoint(&self, from: &WorkloadEntry, name: String) -> OutsideEndpoint {
        let mut labels = from.labels.clone();
        if !from.service_account.is_empty() {
            labels.entry(TLS_MODE.into()).or_insert_with(|| "istio".into());
        }
        let mut parts = from.locality.splitn(3, '/').map(str::to_owned);
        let mut part = || parts.next().unwrap_or_default();
        let port = |(name, number): (&String, &u32)| Some((name.clone(), u16::try_from(*number).ok()?));
        OutsideEndpoint {
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
    /// What it speaks; `None` for a protocol nobody knows.
    pub fn speaks(&self) -> Option<Protocol> {
        if self.protocol.is_empty() { Some(Protocol::Unknown) } else { Protocol::parse(&self.protocol) }
    }

    fn service_port(&self) -> Option<ServicePort> {
        let port = u16::try_from(self.number).ok()?;
        let target = u16::try_from(self.target_port).ok().filter(|target| *target != 0).unwrap_or(port);
        let protocol = self.speaks()?;
        Some(ServicePort { name: self.name.clone(), port, target: TargetPort::Number(target), protocol })
    }
}
