//! Kubernetes' kinds, reduced to the fields that a mesh uses.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use chrono::DateTime;

use super::{
    EntryHost, Kind, Labels, Meta, Typed,
    manifest::{self, IntOrText, ObjectMeta, PodSpec, WorkloadSpec},
};

pub use super::locality::{HOSTNAME, Locality, NETWORK};
pub use skysail_core::node::canonical_name;

/// Namespace of objects that name none.
pub const DEFAULT_NAMESPACE: &str = "default";
/// Label with the port of a gateway to which other networks connect.
pub(crate) const GATEWAY_PORT: &str = "networking.istio.io/gatewayPort";
/// Default of [`GATEWAY_PORT`].
const DEFAULT_GATEWAY_PORT: u16 = 15_443;
/// Annotation of Services and namespaces with the preferred endpoints.
pub(crate) const TRAFFIC_DISTRIBUTION: &str = "networking.istio.io/traffic-distribution";

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
    /// TLS of the application itself, with HTTP inside.
    Https,
    /// TLS of the application itself.
    Tls,
    /// Any protocol.
    Tcp,
    /// TCP with the protocol of MongoDB.
    Mongo,
    /// UDP; not carried by the mesh.
    Udp,
    /// Undeclared: detected from the first bytes.
    Unknown,
}

/// `spec` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Virtual addresses; empty for a headless service and before they are allocated.
    pub cluster_ips: Vec<IpAddr>,
    /// Addresses for clients that answer DNS, if there are no others.
    pub auto_ips: Vec<IpAddr>,
    /// Whether it is headless (`clusterIP: None`).
    pub headless: bool,
    /// Name of an external host (`type: ExternalName`).
    pub external_name: Option<String>,
    /// Selector of its pods; empty if its endpoints are managed elsewhere.
    pub selector: Labels,
    /// Ports.
    pub ports: Vec<ServicePort>,
    /// Whether pods are endpoints before they are ready.
    pub publish_not_ready: bool,
    /// Addresses outside the cluster: those of load balancers and of `externalIPs`. May be names.
    pub external_addresses: Vec<String>,
    /// Preferred endpoints; `None` for those of the namespace.
    pub traffic_distribution: Option<TrafficDistribution>,
    /// Properties of a host of a ServiceEntry; the service has the name of the host.
    pub entry_host: Option<Arc<EntryHost>>,
}

/// A port of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Name; may be empty if the service has a single port.
    pub name: String,
    /// Number.
    pub port: u16,
    /// Port of the pods.
    pub target: TargetPort,
    /// Protocol.
    pub protocol: Protocol,
}

/// Endpoints that clients prefer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficDistribution {
    /// No preference.
    Any,
    /// Those of the client's zone, then those of its region.
    PreferSameZone,
    /// Those of the client's node, then those of its sub-zone.
    PreferSameNode,
}

/// Port of the pods behind a service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetPort {
    /// Number.
    Number(u16),
    /// Name of a container port.
    Name(String),
}

/// A Pod, reduced to the fields that a mesh uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Addresses, the main one first; empty before they are assigned.
    pub ips: Vec<IpAddr>,
    /// Name of its Node.
    pub node: String,
    /// Service account, `default` if unset.
    pub service_account: String,
    /// Whether it shares the node's addresses; it then has no sidecar.
    pub host_network: bool,
    /// Whether it is ready and not terminating.
    pub ready: bool,
    /// Whether it is finished, failed or terminating; it is then no endpoint.
    pub has_ended: bool,
    /// Whether it is finished or failed; none of its containers runs then.
    pub ended: bool,
    /// UID, which distinguishes it from other Pods of the same name; empty if unknown.
    pub uid: String,
    /// Declared ports of its containers.
    pub ports: Vec<ContainerPort>,
    /// Workload to which it belongs: a Deployment, StatefulSet, ..., or the Pod itself.
    pub workload: Workload,
}

/// Workload that made a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// Kind: `Deployment`, `StatefulSet`, `Pod`, ...
    pub kind: String,
    /// Name, such as `reviews-v1`.
    pub name: String,
}

/// Declared port of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerPort {
    /// Name; may be empty.
    pub name: String,
    /// Number.
    pub port: u16,
    /// Whether its protocol is TCP, not UDP or SCTP.
    pub tcp: bool,
}

/// Object that makes Pods: Deployment, StatefulSet, Job, ...
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// Kind.
    pub kind: Kind,
    /// Labels of the Pods.
    pub labels: Labels,
    /// Service account of the Pods, `default` if unset.
    pub service_account: String,
    /// Declared ports of the containers.
    pub ports: Vec<ContainerPort>,
    /// Whether neither a label nor an annotation of the Pods disables injection.
    pub allows_injection: bool,
}

/// A Node, reduced to the fields that a mesh uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Locality.
    pub locality: Locality,
}

/// An EndpointSlice, as managed outside the mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Service, from the label `kubernetes.io/service-name`.
    pub service: String,
    /// Ports by the name of the service port.
    pub ports: BTreeMap<String, u16>,
    /// Endpoints.
    pub endpoints: Vec<SliceEndpoint>,
}

/// Endpoint of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceEndpoint {
    /// Address.
    pub ip: IpAddr,
    /// Whether it accepts traffic.
    pub ready: bool,
    /// Name of its Node.
    pub node: String,
    /// Zone; empty if not given.
    pub zone: String,
    /// Name of its Pod in the slice's namespace; empty if it has none.
    pub pod: String,
}

impl Protocol {
    /// Returns whether the protocol is routed as HTTP.
    pub const fn is_http(self) -> bool {
        matches!(self, Self::Http | Self::Http2 | Self::Grpc | Self::GrpcWeb)
    }

    /// Returns whether the protocol uses HTTP/2 from the start.
    pub const fn is_http2(self) -> bool {
        matches!(self, Self::Http2 | Self::Grpc | Self::GrpcWeb)
    }

    /// Returns whether connections begin with a TLS handshake that is passed through.
    pub const fn is_tls(self) -> bool {
        matches!(self, Self::Https | Self::Tls)
    }

    /// Parses `appProtocol`, or the part of a port's name before `-`.
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Some(match word.to_ascii_lowercase().as_str() {
            "http" | "http_proxy" | "kubernetes.io/ws" => Self::Http,
            "http2" | "kubernetes.io/h2c" => Self::Http2,
            "grpc" => Self::Grpc,
            "grpc-web" => Self::GrpcWeb,
            "https" | "kubernetes.io/wss" => Self::Https,
            "tls" => Self::Tls,
            "tcp" | "mysql" | "redis" => Self::Tcp,
            "mongo" => Self::Mongo,
            "udp" => Self::Udp,
            _ => return None,
        })
    }

    /// Returns the protocol of a service port.
    fn of(port: &manifest::ServicePortManifest) -> Self {
        let transport = port.protocol.as_deref();
        Self::select(transport, port.app_protocol.as_deref(), port.name.as_deref(), port.port)
    }

    /// Returns the protocol of a port. Source: Istio's "Protocol Selection": UDP as such, then `appProtocol`; if
    /// absent, the port's name; then well-known ports of protocols in which the server sends first and that cannot be detected.
    pub fn select(
        transport: Option<&str>,
        app_protocol: Option<&str>,
        name: Option<&str>,
        number: i32,
    ) -> Self {
        if transport.is_some_and(|transport| transport != "TCP") {
            return Self::Udp;
        }
        let name = app_protocol.filter(|declared| !declared.is_empty()).or(name).unwrap_or_default();
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
    /// Returns the port of this number.
    pub fn port(&self, number: u16) -> Option<&ServicePort> {
        self.ports.iter().find(|port| port.port == number)
    }
}

impl Typed<Pod> {
    /// Returns whether it has a sidecar, which accepts mutual TLS.
    pub fn has_sidecar(&self) -> bool {
        self.meta.labels.get("security.istio.io/tlsMode").is_some_and(|mode| mode == "istio")
    }

    /// Returns the name shown in dashboards. Source: Istio's "Canonical Service": label, `app.kubernetes.io/name`,
    /// `app`, workload.
    pub fn canonical_name(&self) -> &str {
        canonical_name(&self.meta.labels, &self.spec.workload.name)
    }

    /// Returns the revision shown in dashboards.
    pub fn canonical_revision(&self) -> &str {
        canonical_revision(&self.meta.labels)
    }
}

/// Returns the canonical revision of a workload with these labels.
pub fn canonical_revision(labels: &Labels) -> &str {
    ["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"]
        .iter()
        .find_map(|name| labels.get(*name))
        .map_or("latest", String::as_str)
}

/// Converts `metadata`.
pub(crate) fn meta(from: ObjectMeta, namespaced: bool) -> Meta {
    let namespace = match from.namespace {
        _ if !namespaced => String::new(),
        Some(namespace) if !namespace.is_empty() => namespace,
        _ => DEFAULT_NAMESPACE.to_owned(),
    };
    let mut annotations = from.annotations.unwrap_or_default();
    let ours = |key: &str| {
        key.contains("istio.io/") || key == super::service_entry::RESOLVE || key == super::ingress::CLASS
    };
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
    let balanced = spec.kind.as_deref() == Some("LoadBalancer");
    let ingress = from.status.load_balancer.ingress.into_iter().filter(|_| balanced);
    let at_balancer = ingress.filter_map(|at| at.ip.or(at.hostname)).filter(|address| !address.is_empty());
    let meta = meta(from.metadata, true);
    let distribution = spec.traffic_distribution.as_deref();
    Typed {
        spec: Service {
            headless: addresses.iter().any(|address| address == "None"),
            cluster_ips: addresses.iter().filter_map(|address| address.parse().ok()).collect(),
            auto_ips: Vec::new(),
            external_name: spec.external_name.filter(|_| external),
            selector: spec.selector,
            ports,
            publish_not_ready: spec.publish_not_ready_addresses,
            external_addresses: at_balancer.chain(spec.external_ips).collect(),
            traffic_distribution: distribution
                .and_then(TrafficDistribution::of_field)
                .or_else(|| TrafficDistribution::of_annotation(&meta.annotations)),
            entry_host: None,
        },
        meta,
    }
}

/// Returns the port of a gateway to which other networks connect.
pub(crate) fn gateway_port(labels: &Labels) -> u16 {
    labels
        .get(GATEWAY_PORT)
        .and_then(|port| port.parse().ok())
        .filter(|port| *port > 0)
        .unwrap_or(DEFAULT_GATEWAY_PORT)
}

impl TrafficDistribution {
    /// Parses the field of a Service; `None` for an unknown value.
    pub(crate) fn of_field(value: &str) -> Option<Self> {
        match value {
            "PreferSameZone" | "PreferClose" => Some(Self::PreferSameZone),
            "PreferSameNode" => Some(Self::PreferSameNode),
            _ => None,
        }
    }

    /// Parses the annotation. As in Istio, an unknown value is no preference.
    pub(crate) fn of_annotation(annotations: &Labels) -> Option<Self> {
        let value = annotations.get(TRAFFIC_DISTRIBUTION).filter(|value| !value.is_empty())?;
        let known = ["PreferClose", "PreferSameZone", "PreferSameNode"];
        let known = known.into_iter().find(|known| known.eq_ignore_ascii_case(value));
        Some(known.and_then(Self::of_field).unwrap_or(Self::Any))
    }
}

fn service_port(from: &manifest::ServicePortManifest) -> Option<ServicePort> {
    let port = u16::try_from(from.port).ok()?;
    let target = match &from.target_port {
        Some(IntOrText::Int(0)) | None => TargetPort::Number(port),
        Some(IntOrText::Int(number)) => TargetPort::Number(u16::try_from(*number).ok()?),
        // As for Kubernetes, a quoted number is a number.
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
        has_ended: going || ended,
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

/// Returns the workload of a Pod by its owner. The owner of a ReplicaSet or Job is known by name only.
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
    // A native sidecar is an init container that keeps running; its ports are open too.
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
    let of =
        |map: &Option<Labels>| map.as_ref()?.get("sidecar.istio.io/inject").map(|value| value == "false");
    let is_off = of(&pods.metadata.labels).or_else(|| of(&pods.metadata.annotations)).unwrap_or_default();
    Typed {
        meta: meta(metadata, true),
        spec: Template {
            kind,
            allows_injection: !is_off,
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
            // Kubernetes defines a missing condition as ready.
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
    fn the_protocol_comes_from_app_protocol_then_name_then_number() {
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
    fn a_pod_of_a_replica_set_belongs_to_the_deployment() {
        let labels = Labels::from([("pod-template-hash".into(), "6b5d".into())]);
        assert_eq!(workload_of("ReplicaSet", "reviews-v1-6b5d", Some(&labels)).name, "reviews-v1");
        assert_eq!(
            workload_of("StatefulSet", "db", None),
            Workload { kind: "StatefulSet".into(), name: "db".into() }
        );
    }
}
