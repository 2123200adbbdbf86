//! The node that a proxy declares (an Envoy `Node` in Istio's form), and the part on which its configuration depends.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use serde::Deserialize;

use crate::api::{
    Labels,
    kube::{self, Locality},
};

/// A proxy, taken from the `Node` of its first request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyNode {
    /// The node id as sent.
    pub id: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's addresses.
    pub ips: Vec<IpAddr>,
    /// The Kubernetes node it runs on; empty if it does not say.
    pub node_name: String,
    /// The view.
    pub view: ProxyView,
}

/// Properties on which the configuration of a proxy depends. It is compiled once for proxies with equal views.
///
/// As parsed it is what the proxy declares; [`World::identify`](crate::World::identify) puts what the platform knows of the
/// proxy's pod in its place.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ProxyView {
    /// Role.
    pub role: Role,
    /// Its namespace.
    pub namespace: String,
    /// The pod's labels.
    pub labels: Arc<Labels>,
    /// Its service account.
    pub service_account: String,
    /// The service name that dashboards show, by its labels or its workload.
    pub canonical_service: String,
    /// The cluster it runs in.
    pub cluster_id: String,
    /// Its locality.
    pub locality: Locality,
    /// Ports its containers name, by name: what a service's `targetPort` may say.
    pub named_ports: BTreeMap<String, u16>,
    /// It has IPv4 addresses.
    pub ipv4: bool,
    /// It has IPv6 addresses.
    pub ipv6: bool,
    /// An Envoy without Istio's own filters (metadata `SKYSAIL_PLAIN_ENVOY`): it would refuse what configures them.
    pub plain_envoy: bool,
    /// It takes virtual hosts one by one (VHDS; metadata `SKYSAIL_VHDS`), and not within their route configuration.
    pub hosts_apart: bool,
    /// It takes the addresses of names that the control plane looked up (metadata `SKYSAIL_RESOLVED`), and not the names.
    pub names_resolved: bool,
}

/// The part of a view on which shared resources depend; many workloads have it in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClientScope {
    /// Role.
    pub role: Role,
    /// The namespace.
    pub namespace: String,
    /// The cluster.
    pub cluster_id: String,
    /// The locality.
    pub locality: Locality,
    /// Those of the pod's labels on which shared resources depend ([`World::label_keys`](crate::World::label_keys)).
    pub labels: Labels,
    /// It has IPv4 addresses.
    pub ipv4: bool,
    /// It has IPv6 addresses.
    pub ipv6: bool,
    /// An Envoy without Istio's own filters.
    pub plain_envoy: bool,
    /// It takes virtual hosts one by one.
    pub hosts_apart: bool,
    /// It takes addresses for names.
    pub names_resolved: bool,
}

impl ClientScope {
    /// Those of a proxy, with the labels of these keys.
    pub fn of(view: &ProxyView, label_keys: &BTreeSet<String>) -> Self {
        let label = |key: &String| Some((key.clone(), view.labels.get(key)?.clone()));
        Self {
            role: view.role,
            namespace: view.namespace.clone(),
            cluster_id: view.cluster_id.clone(),
            locality: view.locality.clone(),
            labels: label_keys.iter().filter_map(label).collect(),
            ipv4: view.ipv4,
            ipv6: view.ipv6,
            plain_envoy: view.plain_envoy,
            hosts_apart: view.hosts_apart,
            names_resolved: view.names_resolved,
        }
    }
}

impl ClientScope {
    /// What surroundings have in common that differ only in what routes depend on: services are alike in them.
    pub fn kin(&self) -> Self {
        Self { namespace: String::new(), hosts_apart: false, ..self.clone() }
    }

    /// Whether services are alike in both.
    pub fn is_kin(&self, other: &Self) -> bool {
        let Self { role, cluster_id, locality, labels, ipv4, ipv6, plain_envoy, names_resolved, .. } = self;
        (role, cluster_id, locality, labels)
            == (&other.role, &other.cluster_id, &other.locality, &other.labels)
            && (ipv4, ipv6) == (&other.ipv4, &other.ipv6)
            && (plain_envoy, names_resolved) == (&other.plain_envoy, &other.names_resolved)
    }

    /// Whether the routes of a host are resources of their own.
    pub fn routes_by_host(&self) -> bool {
        self.hosts_apart || self.role == Role::Grpc
    }
}

impl fmt::Display for ClientScope {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { role, namespace, cluster_id, locality: Locality { region, zone, subzone }, .. } = self;
        write!(to, "proxies ({role:?}) in namespace {namespace}, cluster {cluster_id}")?;
        if !region.is_empty() {
            write!(to, ", locality {region}/{zone}/{subzone}")?;
        }
        for (key, value) in &self.labels {
            write!(to, ", {key}={value}")?;
        }
        Ok(())
    }
}

/// Role of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Beside a workload.
    Sidecar,
    /// A gateway.
    Router,
    /// In a workload: its gRPC library takes configuration itself (metadata `GENERATOR: grpc`).
    Grpc,
}

/// The longest node id: an address, a pod's name, two namespaces and a domain. In bytes.
pub const MAX_ID: usize = 1_024;
/// The most that a node's labels, addresses, locality, names of ports and other names may take: their text, and 64 bytes for each label,
/// address and name of a port. In bytes.
pub const MAX_METADATA: usize = 32 << 10;
/// Memory that an entry of a list or a map takes beside its text. In bytes.
const ENTRY: usize = 64;

/// What clients of gRPC say their configuration is to be made by.
const GRPC: &str = "grpc";

/// Reason why a node is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// The id is not Istio's.
    #[error("node id {0:?} is not of the form sidecar~IP~POD.NAMESPACE~NAMESPACE.svc.DOMAIN")]
    Id(String),
    /// The id has more than [`MAX_ID`] bytes, or some that are not printable ASCII.
    #[error("the node id has more than {MAX_ID} bytes, or some that are not printable ASCII")]
    IdBytes,
    /// The metadata are not what Istio's agent sends.
    #[error("node {id:?}: metadata: {reason}")]
    Metadata {
        /// The node id.
        id: String,
        /// What is wrong.
        reason: String,
    },
}

/// The metadata we read; there are many more.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "SCREAMING_SNAKE_CASE")]
struct Metadata {
    labels: Labels,
    namespace: String,
    service_account: String,
    workload_name: String,
    cluster_id: String,
    instance_ips: String,
    pod_ports: PodPorts,
    node_name: String,
    generator: String,
    skysail_plain_envoy: String,
    skysail_vhds: String,
    skysail_resolved: String,
}

/// The containers' ports: JSON in a string, as the injector writes it, or as such.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum PodPorts {
    Text(String),
    List(Vec<PodPort>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodPort {
    name: String,
    container_port: u16,
}

impl Default for PodPorts {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

impl PodPorts {
    fn named(self) -> Result<BTreeMap<String, u16>, serde_json::Error> {
        let list = match self {
            Self::Text(text) if text.trim().is_empty() => Vec::new(),
            Self::Text(text) => serde_json::from_str(&text)?,
            Self::List(list) => list,
        };
        let named = list.into_iter().filter(|port: &PodPort| !port.name.is_empty());
        Ok(named.map(|port| (port.name, port.container_port)).collect())
    }
}

impl ProxyNode {
    /// Reads a node's id, its metadata as JSON, and its locality.
    ///
    /// # Errors
    /// When the id or the metadata are not in Istio's form.
    pub fn parse(id: &str, metadata: serde_json::Value, locality: Locality) -> Result<Self, NodeError> {
        if id.len() > MAX_ID || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(NodeError::IdBytes);
        }
        let invalid = || NodeError::Id(id.to_owned());
        let parts: Vec<&str> = id.split('~').collect();
        let [role, ip, pod, _domain] = parts[..] else { return Err(invalid()) };
        let role = match role {
            "sidecar" => Role::Sidecar,
            "router" => Role::Router,
            _ => return Err(invalid()),
        };
        let (pod, namespace) = pod.rsplit_once('.').ok_or_else(invalid)?;
        if pod.is_empty() || namespace.is_empty() {
            return Err(invalid());
        }
        let unreadable =
            |error: serde_json::Error| NodeError::Metadata { id: id.to_owned(), reason: error.to_string() };
        let metadata: Metadata = match metadata {
            serde_json::Value::Null => Metadata::default(),
            value => serde_json::from_value(value).map_err(unreadable)?,
        };
        // Who may ask is decided by the one, and the other is what people see.
        if !metadata.namespace.is_empty() && metadata.namespace != namespace {
            let reason = format!("NAMESPACE is {:?}, the id says {namespace:?}", metadata.namespace);
            return Err(NodeError::Metadata { id: id.to_owned(), reason });
        }
        let named_ports = metadata.pod_ports.named().map_err(unreadable)?;
        let labels = metadata.labels.iter().map(|(key, value)| key.len() + value.len());
        let ports = named_ports.keys().map(String::len);
        let entries =
            metadata.labels.len() + named_ports.len() + metadata.instance_ips.split_terminator(',').count();
        let others = [
            &metadata.service_account,
            &metadata.workload_name,
            &metadata.cluster_id,
            &metadata.instance_ips,
            &metadata.node_name,
            &locality.region,
            &locality.zone,
            &locality.subzone,
        ];
        let text: usize = labels.chain(ports).chain(others.map(String::len)).sum();
        let kept = text + ENTRY * entries;
        if kept > MAX_METADATA {
            let reason = format!(
                "labels, addresses and names take {kept} bytes, {ENTRY} of them for each label, address and port; \
                 {MAX_METADATA} are the most"
            );
            return Err(NodeError::Metadata { id: id.to_owned(), reason });
        }
        let mut ips: Vec<IpAddr> = ip.parse().into_iter().collect();
        for ip in metadata.instance_ips.split(',').filter_map(|ip| ip.trim().parse().ok()) {
            if !ips.contains(&ip) {
                ips.push(ip);
            }
        }
        if ips.is_empty() {
            return Err(invalid());
        }
        let role = if metadata.generator == GRPC { Role::Grpc } else { role };
        let grpc = role == Role::Grpc;
        let or = |text: String, other: &str| if text.is_empty() { other.to_owned() } else { text };
        let view = ProxyView {
            role,
            namespace: namespace.to_owned(),
            canonical_service: kube::canonical_name(&metadata.labels, &or(metadata.workload_name, pod))
                .to_owned(),
            labels: Arc::new(metadata.labels),
            service_account: or(metadata.service_account, "default"),
            cluster_id: or(metadata.cluster_id, "Kubernetes"),
            locality,
            named_ports,
            ipv4: ips.iter().any(IpAddr::is_ipv4),
            ipv6: ips.iter().any(IpAddr::is_ipv6),
            plain_envoy: metadata.skysail_plain_envoy == "true" && !grpc,
            hosts_apart: metadata.skysail_vhds == "true" && !grpc,
            names_resolved: metadata.skysail_resolved == "true" || grpc,
        };
        Ok(Self { id: id.to_owned(), pod: pod.to_owned(), ips, node_name: metadata.node_name, view })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "sidecar~10.244.0.11~productpage-v1-x.default~default.svc.cluster.local";

    #[test]
    fn an_istio_node_is_read() {
        let metadata = json!({
            "LABELS": {"app": "productpage"}, "NAMESPACE": "default", "SERVICE_ACCOUNT": "bookinfo-productpage",
            "WORKLOAD_NAME": "productpage-v1", "CLUSTER_ID": "Kubernetes", "INSTANCE_IPS": "10.244.0.11,fd00::11",
            "POD_PORTS": "[{\"containerPort\":9080,\"protocol\":\"\"},{\"name\":\"web\",\"containerPort\":80}]",
            "PROXY_CONFIG": {"concurrency": 2}
        });
        let node = ProxyNode::parse(ID, metadata, Locality::default()).unwrap();
        assert_eq!(node.pod, "productpage-v1-x");
        assert_eq!(node.ips.len(), 2);
        assert_eq!(node.view.role, Role::Sidecar);
        assert_eq!(node.view.service_account, "bookinfo-productpage");
        assert_eq!(node.view.canonical_service, "productpage");
        assert_eq!(node.view.named_ports, BTreeMap::from([("web".into(), 80)]));
        assert!(node.view.ipv4 && node.view.ipv6);
    }

    #[test]
    fn a_client_of_grpc_says_so() {
        let parse = |metadata| ProxyNode::parse(ID, metadata, Locality::default()).unwrap().view;
        let view = parse(json!({"GENERATOR": "grpc", "SKYSAIL_VHDS": "true", "SKYSAIL_PLAIN_ENVOY": "true"}));
        assert_eq!(view.role, Role::Grpc);
        assert_eq!((view.hosts_apart, view.plain_envoy, view.names_resolved), (false, false, true));
        assert_eq!(parse(json!({"GENERATOR": ""})).role, Role::Sidecar);
    }

    #[test]
    fn pods_of_one_deployment_share_a_view() {
        let parse =
            |id: &str| ProxyNode::parse(id, json!({"WORKLOAD_NAME": "a"}), Locality::default()).unwrap();
        let other = "sidecar~10.244.0.12~productpage-v1-y.default~default.svc.cluster.local";
        assert_eq!(parse(ID).view, parse(other).view);
    }

    #[test]
    fn what_is_kept_of_a_node_is_bounded() {
        let labels = |count: usize, value: &str| -> BTreeMap<String, String> {
            (0..count).map(|number| (format!("l{number}"), value.to_owned())).collect()
        };
        let parse = |id: &str, metadata| ProxyNode::parse(id, metadata, Locality::default());
        let long = format!("sidecar~10.0.0.1~{}.b~b.svc.cluster.local", "a".repeat(MAX_ID));
        assert_eq!(parse(&long, json!(null)), Err(NodeError::IdBytes));
        let control = "sidecar~10.0.0.1~a\n.b~b.svc.cluster.local";
        assert_eq!(parse(control, json!(null)), Err(NodeError::IdBytes));
        for metadata in [
            json!({"LABELS": {"a": "x".repeat(MAX_METADATA)}}),
            json!({"CLUSTER_ID": "x".repeat(MAX_METADATA + 1)}),
            json!({"INSTANCE_IPS": "10.0.0.1,".repeat(MAX_METADATA)}),
            json!({"POD_PORTS": [{"name": "x".repeat(MAX_METADATA + 1), "containerPort": 1}]}),
            // Short entries take more memory than their text.
            json!({"LABELS": labels(500, "")}),
            json!({"POD_PORTS": (0..500).map(|number| json!({"name": number.to_string(), "containerPort": 1})).collect::<Vec<_>>()}),
            json!({"INSTANCE_IPS": "::1,".repeat(500)}),
        ] {
            let error = parse(ID, metadata).unwrap_err();
            assert!(error.to_string().contains("are the most"), "{error}");
        }
        let far = Locality { zone: "z".repeat(MAX_METADATA + 1), ..Locality::default() };
        assert!(ProxyNode::parse(ID, json!(null), far).is_err());
        assert!(parse(ID, json!({"LABELS": {"a": "x".repeat(MAX_METADATA - ENTRY - 1)}})).is_ok());
        assert!(parse(ID, json!({"LABELS": labels(100, "a value of usual length")})).is_ok());
    }

    #[test]
    fn other_nodes_are_refused_with_the_reason() {
        for id in [
            "",
            "envoy-1",
            "sidecar~x~a.b~c",
            "ingress~10.0.0.1~a.b~b.svc.cluster.local",
            "sidecar~10.0.0.1~a.~b.svc.cluster.local",
        ] {
            let error = ProxyNode::parse(id, json!(null), Locality::default()).unwrap_err();
            assert_eq!(error, NodeError::Id(id.into()));
        }
        let error = ProxyNode::parse(ID, json!({"LABELS": 3}), Locality::default()).unwrap_err();
        assert!(error.to_string().contains("metadata"), "{error}");
        let error = ProxyNode::parse(ID, json!({"NAMESPACE": "other"}), Locality::default()).unwrap_err();
        assert!(error.to_string().contains("the id says \"default\""), "{error}");
    }
}
