//! What a proxy says of itself (an Envoy `Node` in Istio's form), and the part of it that its configuration depends on.

use std::{collections::BTreeMap, net::IpAddr};

use serde::Deserialize;

use crate::api::{Labels, kube::Locality};

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
    /// What its configuration depends on.
    pub view: ProxyView,
}

/// What a proxy's configuration depends on. Proxies with equal views get the same, made once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ProxyView {
    /// Whose configuration it takes.
    pub role: Role,
    /// Its namespace.
    pub namespace: String,
    /// The pod's labels.
    pub labels: Labels,
    /// Its service account.
    pub service_account: String,
    /// Its workload, as `reviews-v1`.
    pub workload: String,
    /// The cluster it runs in.
    pub cluster_id: String,
    /// The domain of services, `cluster.local`.
    pub domain: String,
    /// Its locality: that of its Kubernetes node ([`World::place`](crate::World::place)), else what it says itself.
    pub locality: Locality,
    /// Ports its containers name, by name: what a service's `targetPort` may say.
    pub named_ports: BTreeMap<String, u16>,
    /// It has IPv4 addresses.
    pub ipv4: bool,
    /// It has IPv6 addresses.
    pub ipv6: bool,
    /// The mesh it says it belongs to; empty if it does not say.
    pub mesh_id: String,
    /// An Envoy without Istio's own filters (metadata `SKYSAIL_PLAIN_ENVOY`): it would refuse what configures them.
    pub plain_envoy: bool,
    /// It takes virtual hosts one by one (VHDS; metadata `SKYSAIL_VHDS`), and not within their route configuration.
    pub hosts_apart: bool,
    /// It takes the addresses of names that the control plane looked up (metadata `SKYSAIL_RESOLVED`), and not the names.
    pub names_resolved: bool,
}

/// What shared resources depend on: the part of a view that many workloads have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Surroundings {
    /// Whose configuration they take.
    pub role: Role,
    /// The namespace.
    pub namespace: String,
    /// The cluster.
    pub cluster_id: String,
    /// The locality.
    pub locality: Locality,
    /// The pod's labels, where anything regards them ([`World::regards_labels`](crate::World::regards_labels)).
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

impl Surroundings {
    /// Those of a proxy, with or without its labels.
    pub fn of(view: &ProxyView, with_labels: bool) -> Self {
        Self {
            role: view.role,
            namespace: view.namespace.clone(),
            cluster_id: view.cluster_id.clone(),
            locality: view.locality.clone(),
            labels: if with_labels { view.labels.clone() } else { Labels::new() },
            ipv4: view.ipv4,
            ipv6: view.ipv6,
            plain_envoy: view.plain_envoy,
            hosts_apart: view.hosts_apart,
            names_resolved: view.names_resolved,
        }
    }
}

impl Surroundings {
    /// What surroundings have in common that differ only in what routes depend on: services are alike in them.
    pub fn kin(&self) -> Self {
        Self { namespace: String::new(), hosts_apart: false, ..self.clone() }
    }

    /// Whether the routes of a host are resources of their own.
    pub fn routes_by_host(&self) -> bool {
        self.hosts_apart || self.role == Role::Grpc
    }
}

/// What a proxy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Beside a workload.
    Sidecar,
    /// A gateway.
    Router,
    /// In a workload: its gRPC library takes configuration itself (metadata `GENERATOR: grpc`).
    Grpc,
}

/// What clients of gRPC say their configuration is to be made by.
const GRPC: &str = "grpc";

/// Why a node cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// The id is not Istio's.
    #[error("node id {0:?} is not of the form sidecar~IP~POD.NAMESPACE~NAMESPACE.svc.DOMAIN")]
    Id(String),
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
    mesh_id: String,
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
        let invalid = || NodeError::Id(id.to_owned());
        let parts: Vec<&str> = id.split('~').collect();
        let [role, ip, pod, domain] = parts[..] else { return Err(invalid()) };
        let role = match role {
            "sidecar" => Role::Sidecar,
            "router" => Role::Router,
            _ => return Err(invalid()),
        };
        let (pod, namespace) = pod.rsplit_once('.').ok_or_else(invalid)?;
        if pod.is_empty() || namespace.is_empty() {
            return Err(invalid());
        }
        let domain = domain.split_once(".svc.").map_or("cluster.local", |(_, domain)| domain);
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
            labels: metadata.labels,
            service_account: or(metadata.service_account, "default"),
            workload: or(metadata.workload_name, pod),
            cluster_id: or(metadata.cluster_id, "Kubernetes"),
            domain: domain.to_owned(),
            locality,
            named_ports: metadata.pod_ports.named().map_err(unreadable)?,
            ipv4: ips.iter().any(IpAddr::is_ipv4),
            ipv6: ips.iter().any(IpAddr::is_ipv6),
            mesh_id: metadata.mesh_id,
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
        assert_eq!(node.view.domain, "cluster.local");
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
