//! WorkloadEntry and WorkloadGroup: workloads outside Kubernetes. Fields are Istio's (`networking.istio.io`).

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use serde::Deserialize;

use super::{
    Labels, Meta, Pod, Typed,
    kube::{Locality, NETWORK, Workload},
};

/// Kind of the workload of an endpoint that is no pod.
pub(crate) const WORKLOAD_ENTRY: &str = "WorkloadEntry";
/// Label of endpoints; with the value `istio`, they accept mutual TLS.
const TLS_MODE: &str = "security.istio.io/tlsMode";
/// Prefix of the address of a Unix domain socket. Source: `istio.networking.v1.WorkloadEntry`.
pub(crate) const UNIX: &str = "unix://";

/// `spec` of a WorkloadEntry, and an endpoint of a ServiceEntry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadEntry {
    /// IP address, DNS name, or `unix://` and the path of a Unix domain socket. May be empty with a network.
    pub address: String,
    /// Ports by the name of the service's port.
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

/// `spec` of a WorkloadGroup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WorkloadGroup {
    /// Labels and annotations of the WorkloadEntries.
    pub metadata: GroupMetadata,
    /// Template of the WorkloadEntries.
    pub template: WorkloadEntry,
    /// Health check that the machine's agent runs.
    pub probe: Option<ReadinessProbe>,
}

/// Metadata of a group's WorkloadEntries. Source: `istio.networking.v1.WorkloadGroup.ObjectMeta`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GroupMetadata {
    /// Labels.
    pub labels: Labels,
    /// Annotations.
    pub annotations: Labels,
}

/// Health check. Source: `istio.networking.v1.ReadinessProbe`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ReadinessProbe {
    /// Time in seconds before the first check; default 0.
    pub initial_delay_seconds: i32,
    /// Timeout of a check in seconds; 0 counts as 1.
    pub timeout_seconds: i32,
    /// Interval of checks in seconds; 0 counts as 10.
    pub period_seconds: i32,
    /// Successful checks until the workload is healthy; 0 counts as 1.
    pub success_threshold: i32,
    /// Failed checks until the workload is unhealthy; 0 counts as 3.
    pub failure_threshold: i32,
    /// HTTP request.
    pub http_get: Option<HttpProbe>,
    /// TCP connection.
    pub tcp_socket: Option<SocketProbe>,
    /// Command.
    pub exec: Option<ExecProbe>,
    /// Request of gRPC's health service.
    pub grpc: Option<GrpcProbe>,
}

/// HTTP request of a health check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpProbe {
    /// Path.
    pub path: String,
    /// Port.
    pub port: u32,
    /// Host; empty: the machine.
    pub host: String,
    /// `HTTP` or `HTTPS`.
    pub scheme: String,
    /// Headers.
    pub http_headers: Vec<ProbeHeader>,
}

/// Header of a health check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ProbeHeader {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
}

/// TCP connection of a health check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SocketProbe {
    /// Host; empty: the machine.
    pub host: String,
    /// Port.
    pub port: u32,
}

/// Command of a health check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ExecProbe {
    /// Program and arguments.
    pub command: Vec<String>,
}

/// gRPC request of a health check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GrpcProbe {
    /// Port.
    pub port: u32,
    /// Name of the service.
    pub service: String,
}

/// Endpoint that is no pod: a WorkloadEntry, or an endpoint of a ServiceEntry.
#[derive(Clone, Debug, PartialEq)]
pub struct EntryEndpoint {
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
    /// Numbers of the service ports that it serves; `None`: all.
    pub serves: Option<Arc<[u16]>>,
}

impl Eq for EntryEndpoint {}

/// Address of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// IP address.
    Ip(IpAddr),
    /// DNS name, in lower case and without a final dot.
    Name(Arc<str>),
    /// Path of a Unix domain socket; an abstract one begins with `@`.
    Unix(Arc<str>),
    /// Unknown: only the gateways of its network reach it.
    Hidden,
}

impl Address {
    /// Parses an IP address, a socket (`unix://PATH`) or a name; the empty text is a hidden address.
    pub fn of(text: &str) -> Self {
        match (text.parse(), text.strip_prefix(UNIX)) {
            _ if text.is_empty() => Self::Hidden,
            (Ok(ip), _) => Self::Ip(ip),
            (_, Some(path)) => Self::Unix(path.into()),
            _ => Self::Name(text.trim_end_matches('.').to_ascii_lowercase().into()),
        }
    }

    /// Returns the IP address; `None` for another form.
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Ip(ip) => Some(*ip),
            Self::Name(_) | Self::Unix(_) | Self::Hidden => None,
        }
    }
}

impl WorkloadEntry {
    /// Returns the endpoint of this name. Labels of the object take precedence over those of the specification, as in
    /// Istio.
    pub(crate) fn endpoint(&self, namespace: &str, name: &str, of_object: &Labels) -> EntryEndpoint {
        let mut labels = self.labels.clone();
        labels.extend(of_object.iter().map(|(key, value)| (key.clone(), value.clone())));
        if !self.service_account.is_empty() {
            labels.entry(TLS_MODE.into()).or_insert_with(|| "istio".into());
        }
        // As in Istio, the field takes precedence over the label.
        if !self.network.is_empty() {
            labels.insert(NETWORK.into(), self.network.clone());
        }
        let of_label = Locality::of_workload(&labels).filter(|_| self.locality.is_empty());
        let port = |(name, number): (&String, &u32)| Some((name.clone(), u16::try_from(*number).ok()?));
        EntryEndpoint {
            address: Address::of(&self.address),
            ports: self.ports.iter().filter_map(port).collect(),
            locality: of_label.unwrap_or_else(|| Locality::parse(&self.locality)),
            weight: self.weight.max(1),
            serves: None,
            workload: Arc::new(Typed {
                meta: Meta {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                    labels: Arc::new(labels),
                    ..Meta::default()
                },
                spec: Pod {
                    service_account: self.service_account.clone(),
                    workload: Workload { kind: WORKLOAD_ENTRY.into(), name: name.to_owned() },
                    ..Pod::default()
                },
            }),
        }
    }
}

impl Typed<WorkloadEntry> {
    /// Returns the endpoint, under the name of the object and with all labels.
    pub(crate) fn endpoint(&self) -> Typed<EntryEndpoint> {
        let Meta { namespace, name, labels, .. } = &self.meta;
        let spec = self.spec.endpoint(namespace, name, labels);
        let labels = Arc::clone(&spec.workload.meta.labels);
        Typed { meta: Meta { labels, ..self.meta.clone() }, spec }
    }
}
