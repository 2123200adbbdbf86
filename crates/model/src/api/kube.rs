//! Kubernetes' kinds, reduced to the fields that a mesh uses.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use chrono::DateTime;

use super::{
    Kind, Labels, Meta, Outside, Typed,
    manifest::{self, IntOrText, ObjectMeta, PodSpec, WorkloadSpec},
};

/// The namespace of objects that name none.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Protocol of a port of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// HTTP/1.1 (and HTTP/2 by upgrade).
    Http,
    /// HTTP/2 from the start.
    Http2,
    /// gRPC.
    Grpc,
    /// gRPC-Web. The server speaks gRPC; its sidecar translates.
    GrpcWeb,
    /// TLS of the application's own, with HTTP in it.
    Https,
    /// TLS of the application's own.
    Tls,
    /// Ignored.
    Tcp,
    /// Not carried by the mesh.
    Udp,
    /// Nothing was said: found out from the first bytes.
    Unknown,
}

/// `spec` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// The virtual addresses; empty for a headless service or one not yet given any.
    pub cluster_ips: Vec<IpAddr>,
    /// `clusterIP: None`.
    pub headless: bool,
    /// `type: ExternalName`: a name elsewhere.
    pub external_name: Option<String>,
    /// Selector of its pods; empty if its endpoints are managed elsewhere.
    pub selector: Labels,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// Pods count before they are ready.
    pub publish_not_ready: bool,
    /// It is a host of a ServiceEntry, which is its name.
    pub outside: Option<Arc<Outside>>,
}

/// A port of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Its name; empty if it is the only one and has none.
    pub name: String,
    /// Its number.
    pub port: u16,
    /// The pod's port.
    pub target: TargetPort,
    /// Protocol.
    pub protocol: Protocol,
}

/// The pod's port behind a service's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetPort {
    /// Its number.
    Number(u16),
    /// Its name among the containers' ports.
    Name(String),
}

/// A Pod, reduced to the fields that a mesh uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Its addresses, the main one first; empty before it has one.
    pub ips: Vec<IpAddr>,
    /// The Node it runs on.
    pub node: String,
    /// Its service account, `default` if unset.
    pub service_account: String,
    /// It shares the node's addresses, so it has no sidecar.
    pub host_network: bool,
    /// It is ready and not about to go.
    pub ready: bool,
    /// Finished, failed or going: never an endpoint.
    pub gone: bool,
    /// Finished or failed: nothing of it runs any more.
    pub ended: bool,
    /// Its UID, which another Pod of the name does not have; empty if unknown.
    pub uid: String,
    /// The ports its containers name.
    pub ports: Vec<ContainerPort>,
    /// The workload it belongs to: its Deployment, StatefulSet, ..., or itself.
    pub workload: Workload,
}

/// Workload that made a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// `Deployment`, `StatefulSet`, `Pod`, ...
    pub kind: String,
    /// Its name, as `reviews-v1`.
    pub name: String,
}

/// A port a container names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerPort {
    /// Its name; may be empty.
    pub name: String,
    /// Its number.
    pub port: u16,
    /// TCP, not UDP or SCTP.
    pub tcp: bool,
}

/// A kind that makes Pods: Deployment, StatefulSet, Job, ...
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// The kind.
    pub kind: Kind,
    /// Labels of the Pods.
    pub labels: Labels,
    /// Their service account, `default` if unset.
    pub service_account: String,
    /// The ports their containers declare.
    pub ports: Vec<ContainerPort>,
}

/// A Node, reduced to the fields that a mesh uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Locality.
    pub locality: Locality,
}

/// Where something runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Locality {
    /// Region.
    pub region: String,
    /// Zone.
    pub zone: String,
    /// Part of the zone.
    pub subzone: String,
}

/// An EndpointSlice, which is managed elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointSlice {
    /// The service, by label `kubernetes.io/service-name`.
    pub service: String,
    /// Ports by the service port's name.
    pub ports: BTreeMap<String, u16>,
    /// The endpoints.
    pub endpoints: Vec<SliceEndpoint>,
}

/// One endpoint of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// Its address.
    pub ip: IpAddr,
    /// It takes traffic.
    pub ready: bool,
    /// The Node it is on.
    pub node: String,
    /// Its zone, if given.
    pub zone: String,
    /// The Pod it is, if it is one of the same namespace.
    pub pod: String,
}

impl Protocol {
    /// True for protocols that are routed as HTTP.
    pub const fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::Http2 | Self::Grpc | Self::GrpcWeb)
    }

    /// True for HTTP/2 from the start.
    pub const fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc | Self::GrpcWeb)
    }

    /// Reads `appProtocol`, or the part of a port's name before `-`.
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Some(match word.to_ascii_lowercase().as_str() {
            "http" | "kubernetes.io/ws" | "kubernetes.io/wss" => Self::Http,
            "http2" | "kubernetes.io/h2c" => Self::Http2,
            "grpc" => Self::Grpc,
            "grpc-web" => Self::GrpcWeb,
            "https" => Self::Https,
            "tls" => Self::Tls,
            "tcp" | "mongo" | "mysql" | "redis" => Self::Tcp,
            "udp" => Self::Udp,
            _ => return None,
        })
    }

    /// Protocol of a service port.
    fn of(port: &manifest::ServicePortManifest) -> Self {
        let transport = port.protocol.as_deref();
        Self::select(transport, port.app_protocol.as_deref(), port.name.as_deref(), port.port)
    }

    /// What a port speaks. Source: Istio's "Protocol Selection": UDP as such, then `appProtocol`, then the port's name,
    /// then the numbers of protocols where the server speaks first, which cannot be found out.
    pub fn select(
        transport: Option<&str>,
        app_protocol: Option<&str>,
        name: Option<&str>,
        number: i32,
    ) -> Self {
        if transport.is_some_and(|transport| transport != "TCP") {
            return Self::Udp;
        }
        if let Some(protocol) = app_protocol.and_then(Self::parse) {
            return protocol;
        }
        let name = name.unwrap_or_default();
        if name.to_ascii_lowercase().starts_with("grpc-web") {
            return Self::GrpcWeb;
        }
        let word = name.split('-').next().unwrap_or_default();
        match Self::parse(word) {
            Some(protocol) => protocol,
            None if matches!(number, 25 | 53 | 3306 | 27017) => Self::Tcp,
            None => Self::Unknown,
        }
    }
}

impl Service {
    /// The port of this number.
    pub fn port(&self, number: u16) -> Option<&ServicePort> {
        self.ports.iter().find(|port| port.port == number)
    }
}

impl Locality {
    /// Reads the labels of a Node or, with the old form `istio-locality`, of a Pod.
    fn from_labels(labels: &Labels) -> Self {
        let label =
            |names: &[&str]| names.iter().find_map(|name| labels.get(*name)).cloned().unwrap_or_default();
        Self {
            region: label(&["topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"]),
            zone: label(&["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"]),
            subzone: label(&["topology.istio.io/subzone"]),
        }
    }
}

impl Typed<Pod> {
    /// True if a sidecar takes mutual TLS for it.
    pub fn has_sidecar(&self) -> bool {
        self.meta.labels.get("security.istio.io/tlsMode").is_some_and(|mode| mode == "istio")
    }

    /// The name dashboards show. Source: Istio's "Canonical Service": label, `app.kubernetes.io/name`, `app`, workload.
    pub fn canonical_name(&self) -> &str {
        canonical_name(&self.meta.labels, &self.spec.workload.name)
    }

    /// The revision dashboards show.
    pub fn canonical_revision(&self) -> &str {
        canonical_revision(&self.meta.labels)
    }
}

/// The canonical service of a workload with these labels.
pub fn canonical_name<'a>(labels: &'a Labels, workload: &'a str) -> &'a str {
    ["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]
        .iter()
        .find_map(|name| labels.get(*name))
        .map_or(workload, String::as_str)
}

/// The canonical revision of a workload with these labels.
pub fn canonical_revision(labels: &Labels) -> &str {
    ["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"]
        .iter()
        .find_map(|name| labels.get(*name))
        .map_or("latest", String::as_str)
}

/// Takes over `metadata`.
pub(crate) fn meta(from: ObjectMeta, namespaced: bool) -> Meta {
    let namespace = match from.namespace {
        _ if !namespaced => String::new(),
        Some(namespace) if !namespace.is_empty() => namespace,
        _ => DEFAULT_NAMESPACE.to_owned(),
    };
    let mut annotations = from.annotations.unwrap_or_default();
    let ours = |key: &str| key.contains("istio.io/") || key == super::service_entry::RESOLVE;
    annotations.retain(|key, _| ours(key) && key != "sidecar.istio.io/status");
    Meta {
        namespace,
        name: from.name.unwrap_or_default(),
        labels: Arc::new(from.labels.unwrap_or_default()),
        annotations,
        created: from
            .creation_timestamp
            .and_then(|time| Some(DateTime::parse_from_rfc3339(&time).ok()?.timestamp())),
    }
}

pub(crate) fn node(from: manifest::MetadataOnly) -> Typed<Node> {
    let meta = meta(from.metadata, false);
    let locality = Locality::from_labels(&meta.labels);
    Typed { meta, spec: Node { locality } }
}

pub(crate) fn service(from: manifest::ServiceManifest) -> Typed<Service> {
    let spec = from.spec.unwrap_or_default();
    let mut addresses = spec.cluster_ips;
    if addresses.is_empty() {
        addresses.extend(spec.cluster_ip);
    }
    let ports = spec.ports.iter().filter_map(service_port).collect();
    let external = spec.kind.as_deref() == Some("ExternalName");
    Typed {
        meta: meta(from.metadata, true),
        spec: Service {
            headless: addresses.iter().any(|address| address == "None"),
            cluster_ips: addresses.iter().filter_map(|address| address.parse().ok()).collect(),
            external_name: spec.external_name.filter(|_| external),
            selector: spec.selector,
            ports,
            publish_not_ready: spec.publish_not_ready_addresses,
            outside: None,
        },
    }
}

fn service_port(from: &manifest::ServicePortManifest) -> Option<ServicePort> {
    let port = u16::try_from(from.port).ok()?;
    let target = match &from.target_port {
        Some(IntOrText::Int(0)) | None => TargetPort::Number(port),
        Some(IntOrText::Int(number)) => TargetPort::Number(u16::try_from(*number).ok()?),
        // A quoted number is one, as Kubernetes has it.
        Some(IntOrText::Text(name)) => {
            name.parse().map_or_else(|_| TargetPort::Name(name.clone()), TargetPort::Number)
        }
    };
    Some(ServicePort {
        name: from.name.clone().unwrap_or_default(),
        port,
        target,
        protocol: Protocol::of(from),
    })
}

pub(crate) fn pod(from: manifest::PodManifest) -> Typed<Pod> {
    let owner = from.metadata.owner_references.iter().find(|owner| owner.controller != Some(false));
    let workload = match owner {
        Some(owner) => workload_of(&owner.kind, &owner.name, from.metadata.labels.as_ref()),
        None => Workload { kind: "Pod".into(), name: from.metadata.name.clone().unwrap_or_default() },
    };
    let going = from.metadata.deletion_timestamp.is_some();
    let uid = from.metadata.uid.clone().unwrap_or_default();
    let meta = meta(from.metadata, true);
    let (spec, status) = (from.spec, from.status);
    let mut ips: Vec<IpAddr> = status.pod_ip.iter().filter_map(|ip| ip.parse().ok()).collect();
    for ip in status.pod_ips.iter().filter_map(|entry| entry.ip.parse().ok()) {
        if !ips.contains(&ip) {
            ips.push(ip);
        }
    }
    let ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
    let ready = status.conditions.iter().any(|c| c.kind == "Ready" && c.status == "True");
    let spec = Pod {
        ips,
        ready: ready && !going && !ended,
        gone: going || ended,
        ended,
        uid,
        host_network: spec.host_network,
        ports: container_ports(&spec),
        node: spec.node_name,
        service_account: account(spec.service_account_name, spec.service_account),
        workload,
    };
    Typed { meta, spec }
}

/// The workload behind a Pod's owner: a ReplicaSet's or Job's own owner is known by its name alone.
fn workload_of(kind: &str, name: &str, labels: Option<&Labels>) -> Workload {
    let hash = labels.and_then(|labels| labels.get("pod-template-hash"));
    let stem = hash.and_then(|hash| name.strip_suffix(hash.as_str())?.strip_suffix('-'));
    match (kind, stem) {
        ("ReplicaSet", Some(stem)) => Workload { kind: "Deployment".into(), name: stem.to_owned() },
        _ => Workload { kind: kind.to_owned(), name: name.to_owned() },
    }
}

fn account(name: Option<String>, old: Option<String>) -> String {
    name.or(old).filter(|name| !name.is_empty()).unwrap_or_else(|| "default".to_owned())
}

fn container_ports(spec: &PodSpec) -> Vec<ContainerPort> {
    // A native sidecar is an init container that goes on; its ports count too.
    let sidecars = spec.init_containers.iter().filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|container| &container.ports);
    ports
        .filter_map(|port| {
            Some(ContainerPort {
                name: port.name.clone().unwrap_or_default(),
                port: u16::try_from(port.container_port).ok()?,
                tcp: port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP"),
            })
        })
        .collect()
}

pub(crate) fn template(kind: Kind, metadata: ObjectMeta, spec: WorkloadSpec) -> Typed<Template> {
    let pods = spec.template;
    Typed {
        meta: meta(metadata, true),
        spec: Template {
            kind,
            ports: container_ports(&pods.spec),
            labels: pods.metadata.labels.unwrap_or_default(),
            service_account: account(pods.spec.service_account_name, pods.spec.service_account),
        },
    }
}

pub(crate) fn endpoint_slice(from: manifest::EndpointSliceManifest) -> Typed<EndpointSlice> {
    let meta = meta(from.metadata, true);
    let service = meta.labels.get("kubernetes.io/service-name").cloned().unwrap_or_default();
    let ports = from
        .ports
        .into_iter()
        .filter_map(|port| Some((port.name.unwrap_or_default(), u16::try_from(port.port?).ok()?)));
    let endpoints = from.endpoints.into_iter().filter_map(|endpoint| {
        let conditions = endpoint.conditions;
        Some(SliceEndpoint {
            ip: endpoint.addresses.first()?.parse().ok()?,
            // Kubernetes: a missing condition is to be read as ready.
            ready: conditions.ready.unwrap_or(true) && !conditions.terminating.unwrap_or_default(),
            node: endpoint.node_name.unwrap_or_default(),
            zone: endpoint.zone.unwrap_or_default(),
            pod: endpoint
                .target_ref
                .filter(|target| target.kind.as_deref() == Some("Pod"))
                .and_then(|target| target.name)
                .unwrap_or_default(),
        })
    });
    Typed { spec: EndpointSlice { service, ports: ports.collect(), endpoints: endpoints.collect() }, meta }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, number: i32, app_protocol: Option<&str>) -> manifest::ServicePortManifest {
        manifest::ServicePortManifest {
            name: Some(name.into()),
            port: number,
            app_protocol: app_protocol.map(Into::into),
            ..Default::default()
        }
    }

    #[test]
    fn protocols_follow_app_protocol_then_name_then_number() {
        for (given, expected) in [
            (port("http", 1, None), Protocol::Http),
            (port("http-web", 1, None), Protocol::Http),
            (port("httpx", 1, None), Protocol::Unknown),
            (port("grpc-web-x", 1, None), Protocol::GrpcWeb),
            (port("grpc", 1, None), Protocol::Grpc),
            (port("web", 1, Some("http2")), Protocol::Http2),
            (port("http", 1, Some("tcp")), Protocol::Tcp),
            (port("db", 3306, None), Protocol::Tcp),
            (port("", 8080, None), Protocol::Unknown),
        ] {
            assert_eq!(Protocol::of(&given), expected, "{given:?}");
        }
        let udp = manifest::ServicePortManifest { protocol: Some("UDP".into()), ..port("http", 1, None) };
        assert_eq!(Protocol::of(&udp), Protocol::Udp);
    }

    #[test]
    fn a_replica_sets_pod_belongs_to_the_deployment() {
        let labels = Labels::from([("pod-template-hash".into(), "6b5d".into())]);
        assert_eq!(workload_of("ReplicaSet", "reviews-v1-6b5d", Some(&labels)).name, "reviews-v1");
        assert_eq!(
            workload_of("StatefulSet", "db", None),
            Workload { kind: "StatefulSet".into(), name: "db".into() }
        );
    }
}
