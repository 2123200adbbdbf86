//! The node that a proxy declares (an Envoy `Node` in Istio's form), and the part on which its configuration depends.

use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

use serde::Deserialize;

use crate::{
    Grouping,
    api::{
        Duration, Labels,
        kube::{self, Locality},
        locality::HOSTNAME,
        proxy_config::{HttpSettings, SharedHeaders},
        sidecar::Egress,
    },
    world::{Addressed, FilterSelection},
};

/// A proxy, parsed from the `Node` of its first request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyNode {
    /// Node id as sent.
    pub id: String,
    /// Name of the pod.
    pub pod: String,
    /// Addresses of the pod.
    pub ips: Vec<IpAddr>,
    /// Name of the Kubernetes node; empty if unknown.
    pub node_name: String,
    /// WorkloadGroup in which the machine is to be registered; empty: none.
    pub group: String,
    /// Network; empty: the only one.
    pub network: String,
    /// Whether the proxy's agent checks the health of the workload and reports it (`readinessProbe` of its settings).
    pub reports_health: bool,
    /// Properties on which the proxy's configuration depends.
    pub view: ProxyView,
}

/// Properties on which the configuration of a proxy depends. It is compiled once for proxies with equal views.
///
/// [`ProxyNode::parse`] reads what the proxy declares. [`World::identify`](crate::World::identify) then replaces these
/// properties by what the platform knows about the proxy's pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ProxyView {
    /// Role.
    pub role: Role,
    /// Namespace.
    pub namespace: String,
    /// Labels of the pod.
    pub labels: Arc<Labels>,
    /// Service account.
    pub service_account: String,
    /// Service name shown in dashboards, from the labels or the workload.
    pub canonical_service: String,
    /// Cluster in which the proxy runs.
    pub cluster_id: String,
    /// Locality.
    pub locality: Locality,
    /// Network; empty: unknown.
    pub network: String,
    /// Container ports by name, for a service's `targetPort`.
    pub named_ports: BTreeMap<String, u16>,
    /// Ports of services that lead to the workload by its address.
    pub addressed: Vec<Addressed>,
    /// Whether the proxy has IPv4 addresses.
    pub ipv4: bool,
    /// Whether the proxy has IPv6 addresses.
    pub ipv6: bool,
    /// First address of the pod, if it is known and a Sidecar defines its inbound ports: names of filter chains and
    /// endpoints then have it.
    pub address: Option<IpAddr>,
    /// Whether connections are redirected to the proxy (metadata `INTERCEPTION_MODE`, unless it is `NONE`).
    pub intercepts: bool,
    /// Whether the proxy is an Envoy without Istio's own filters (metadata `SKYSAIL_PLAIN_ENVOY`). It would refuse
    /// their configuration.
    pub plain_envoy: bool,
    /// Whether the proxy subscribes to virtual hosts one by one (VHDS; metadata `SKYSAIL_VHDS`) instead of receiving
    /// them within their route configuration.
    pub uses_vhds: bool,
    /// Whether the proxy takes the addresses that the control plane resolved (metadata `SKYSAIL_RESOLVED`) instead of
    /// the names.
    pub takes_resolved_addresses: bool,
    /// Whether the proxy answers DNS queries of its workload with the addresses of services (metadata `DNS_CAPTURE`).
    pub answers_dns: bool,
    /// Metadata of the node that are texts. [`World::identify`](crate::World::identify) reduces them to those that
    /// EnvoyFilters compare.
    pub metadata: Arc<BTreeMap<String, String>>,
    /// Settings of the proxy, which override those of the mesh configuration. Source: the annotation
    /// `proxy.istio.io/config` of the pod; for a proxy without a known pod, the metadata `PROXY_CONFIG`.
    pub settings: Arc<HttpSettings>,
    /// Idle timeout of connections that the proxy accepts (metadata `IDLE_TIMEOUT`); zero: none.
    pub idle_timeout: Option<Duration>,
    /// Whether the proxy has proven its identity. Only then it may have secrets.
    pub is_authenticated: bool,
}

/// The part of a view on which shared resources depend. Many workloads have it in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClientScope {
    /// Role.
    pub role: Role,
    /// Namespace.
    pub namespace: String,
    /// Cluster.
    pub cluster_id: String,
    /// Locality.
    pub locality: Locality,
    /// Network.
    pub network: String,
    /// Whether the proxy is a gateway between networks, which forwards connections by their server name.
    pub joins_networks: bool,
    /// Labels of the pod on which shared resources depend ([`Grouping`]).
    pub labels: Labels,
    /// Services that the pod's Sidecar allows; `None`: everything.
    pub egress: Option<Arc<Egress>>,
    /// Whether the proxy has IPv4 addresses.
    pub ipv4: bool,
    /// Whether the proxy has IPv6 addresses.
    pub ipv6: bool,
    /// Whether the proxy is an Envoy without Istio's own filters.
    pub plain_envoy: bool,
    /// Whether the proxy subscribes to virtual hosts one by one.
    pub uses_vhds: bool,
    /// Whether the proxy takes resolved addresses instead of names.
    pub takes_resolved_addresses: bool,
    /// Whether the proxy answers DNS queries of its workload.
    pub answers_dns: bool,
    /// Headers on which shared resources depend.
    pub headers: SharedHeaders,
    /// Credential that a gateway presents to servers with a BackendTLSPolicy.
    pub client_credential: Option<String>,
    /// EnvoyFilters that patch shared resources of the proxy, in the order of application; mostly none.
    pub filters: Vec<FilterSelection>,
}

impl ClientScope {
    /// Returns the client scope of a proxy.
    pub fn of(view: &ProxyView, grouping: &Grouping) -> Self {
        let label = |key: &String| Some((key.clone(), view.labels.get(key)?.clone()));
        Self {
            role: view.role,
            namespace: view.namespace.clone(),
            cluster_id: view.cluster_id.clone(),
            locality: view.locality.clone(),
            network: view.network.clone(),
            joins_networks: grouping.joins_networks(view),
            labels: grouping.label_keys.iter().filter_map(label).collect(),
            egress: grouping.egress(view),
            ipv4: view.ipv4,
            ipv6: view.ipv6,
            plain_envoy: view.plain_envoy,
            uses_vhds: view.uses_vhds,
            takes_resolved_addresses: view.takes_resolved_addresses,
            answers_dns: view.answers_dns,
            headers: grouping.settings.overlaid(&view.settings).shared(),
            client_credential: grouping.client_credential(view),
            filters: grouping.filters.of(view),
        }
    }
}

impl ClientScope {
    /// Returns the scope without the properties that only affect routes and the choice of services. Scopes with the
    /// same result have mostly equal services.
    pub fn sibling_key(&self) -> Self {
        Self { namespace: String::new(), egress: None, uses_vhds: false, ..self.clone() }
    }

    /// Returns the scope of clients of no namespace, from which this one differs only by what is special in its
    /// namespace ([`NamespaceFacts`](crate::NamespaceFacts)). Returns `None` for scopes that differ by more.
    pub fn base(&self) -> Option<Self> {
        self.has_base().then(|| Self { namespace: String::new(), ..self.clone() })
    }

    /// Returns whether [`Self::base`] returns a scope.
    pub fn has_base(&self) -> bool {
        let is_plain = self.labels.is_empty() && self.egress.is_none() && self.filters.is_empty();
        is_plain && self.role != Role::Grpc && !self.is_base()
    }

    /// Returns whether this is the scope of clients of no namespace.
    pub fn is_base(&self) -> bool {
        self.namespace.is_empty()
    }

    /// Returns whether both scopes have mostly equal services.
    pub fn is_sibling(&self, other: &Self) -> bool {
        let Self {
            role,
            cluster_id,
            locality,
            labels,
            ipv4,
            ipv6,
            plain_envoy,
            takes_resolved_addresses,
            ..
        } = self;
        let Self { network, joins_networks, answers_dns, .. } = self;
        (role, cluster_id, locality, labels)
            == (&other.role, &other.cluster_id, &other.locality, &other.labels)
            && (ipv4, ipv6) == (&other.ipv4, &other.ipv6)
            && (network, joins_networks) == (&other.network, &other.joins_networks)
            && *answers_dns == other.answers_dns
            && (plain_envoy, takes_resolved_addresses)
                == (&other.plain_envoy, &other.takes_resolved_addresses)
            && (&self.filters, self.headers) == (&other.filters, other.headers)
            && self.client_credential == other.client_credential
    }

    /// Returns whether the routes of each host are a separate resource that can be compiled alone.
    pub fn routes_by_host(&self) -> bool {
        // The routes of a Unix domain socket are one resource.
        let has_socket = self.egress.as_ref().is_some_and(|egress| egress.has_socket());
        (self.uses_vhds && self.filters.is_empty() && !has_socket) || self.role == Role::Grpc
    }
}

impl fmt::Display for ClientScope {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { role, namespace, cluster_id, locality: Locality { region, zone, subzone }, .. } = self;
        write!(to, "proxies ({role:?}) in namespace {namespace}, cluster {cluster_id}")?;
        if !region.is_empty() {
            write!(to, ", locality {region}/{zone}/{subzone}")?;
        }
        if !self.network.is_empty() {
            write!(to, ", network {}", self.network)?;
        }
        for (key, value) in &self.labels {
            write!(to, ", {key}={value}")?;
        }
        for filter in &self.filters {
            write!(to, ", EnvoyFilter {}/{}", filter.namespace, filter.name)?;
        }
        if let Some(credential) = &self.client_credential {
            write!(to, ", certificate for backends {credential}")?;
        }
        if self.egress.is_some() {
            write!(to, ", restricted by a Sidecar")?;
        }
        Ok(())
    }
}

/// Role of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Proxy beside a workload.
    Sidecar,
    /// Gateway.
    Router,
    /// gRPC library of a workload that takes configuration itself (metadata `GENERATOR: grpc`).
    Grpc,
}

/// Maximum length of a node id in bytes: an address, the name of a pod, two namespaces and a domain.
pub const MAX_ID: usize = 1_024;
/// Maximum size in bytes of a node's labels, addresses, locality, port names and other names: their text, plus 64 bytes
/// for each label, address and port name.
pub const MAX_METADATA: usize = 32 << 10;
/// Maximum number of metadata that EnvoyFilters can compare.
const MAX_TEXTS: usize = 256;
/// Memory in bytes that an entry of a list or map takes in addition to its text.
const ENTRY: usize = 64;

/// Value of the metadata `GENERATOR` of gRPC clients.
const GRPC: &str = "grpc";

/// Reason why a node is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NodeError {
    /// The id is not in Istio's form.
    #[error("node id {0:?} is not of the form sidecar~IP~POD.NAMESPACE~NAMESPACE.svc.DOMAIN")]
    Id(String),
    /// The id has more than [`MAX_ID`] bytes, or bytes that are not printable ASCII.
    #[error("the node id has more than {MAX_ID} bytes, or some that are not printable ASCII")]
    IdBytes,
    /// The metadata are not in the form of Istio's agent.
    #[error("node {id:?}: metadata: {reason}")]
    Metadata {
        /// Node id.
        id: String,
        /// Description of the error.
        reason: String,
    },
}

/// The metadata that the mesh reads; proxies send many more.
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
    auto_register_group: String,
    network: String,
    generator: String,
    interception_mode: String,
    dns_capture: serde_json::Value,
    idle_timeout: serde_json::Value,
    proxy_config: serde_json::Value,
    skysail_plain_envoy: String,
    skysail_vhds: String,
    skysail_resolved: String,
}

/// Ports of the containers: JSON in a string, as the injector writes it, or plain JSON.
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
    /// Returns the name of the Kubernetes node, by which rules prefer endpoints, else the value of its label; empty if
    /// both are unknown.
    pub fn hostname(&self) -> &str {
        let of_label = || self.view.labels.get(HOSTNAME).map_or("", String::as_str);
        if self.node_name.is_empty() { of_label() } else { &self.node_name }
    }

    /// Parses a node's id, its metadata as JSON, and its locality.
    ///
    /// # Errors
    /// Fails if the id or the metadata are not in Istio's form.
    pub fn parse(id: &str, metadata: serde_json::Value, locality: Locality) -> Result<Self, NodeError> {
        if id.len() > MAX_ID || !id.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(NodeError::IdBytes);
        }
        let invalid = || NodeError::Id(id.to_owned());
        let IdParts { role, ip, pod, namespace } = IdParts::parse(id).ok_or_else(invalid)?;
        let unreadable =
            |error: serde_json::Error| NodeError::Metadata { id: id.to_owned(), reason: error.to_string() };
        let texts = metadata_texts(&metadata);
        let metadata: Metadata = match metadata {
            serde_json::Value::Null => Metadata::default(),
            value => serde_json::from_value(value).map_err(unreadable)?,
        };
        // The id decides access, while people see the metadata, so both must agree.
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
            &metadata.auto_register_group,
            &metadata.network,
            &locality.region,
            &locality.zone,
            &locality.subzone,
        ];
        let text: usize = labels.chain(ports).chain(others.map(String::len)).sum();
        check_size(id, text + ENTRY * entries)?;
        let ips = addresses(ip, &metadata.instance_ips);
        if ips.is_empty() {
            return Err(invalid());
        }
        let role = if metadata.generator == GRPC { Role::Grpc } else { role };
        let grpc = role == Role::Grpc;
        let reports_health = !metadata.proxy_config["readinessProbe"].is_null();
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
            network: metadata.network.clone(),
            named_ports,
            addressed: Vec::new(),
            ipv4: ips.iter().any(IpAddr::is_ipv4),
            ipv6: ips.iter().any(IpAddr::is_ipv6),
            address: None,
            intercepts: metadata.interception_mode != "NONE",
            plain_envoy: metadata.skysail_plain_envoy == "true" && !grpc,
            uses_vhds: metadata.skysail_vhds == "true" && !grpc,
            takes_resolved_addresses: metadata.skysail_resolved == "true" || grpc,
            answers_dns: is_true(&metadata.dns_capture),
            metadata: Arc::new(texts),
            settings: Arc::new(settings_of(metadata.proxy_config)),
            idle_timeout: metadata.idle_timeout.as_str().and_then(Duration::parse),
            is_authenticated: false,
        };
        Ok(Self {
            id: id.to_owned(),
            pod: pod.to_owned(),
            ips,
            node_name: metadata.node_name,
            group: metadata.auto_register_group,
            network: metadata.network,
            reports_health,
            view,
        })
    }
}

/// The parts of a node id `ROLE~IP~POD.NAMESPACE~DOMAIN`.
struct IdParts<'a> {
    role: Role,
    ip: &'a str,
    pod: &'a str,
    namespace: &'a str,
}

impl<'a> IdParts<'a> {
    /// Returns `None` if the id is not in Istio's form.
    fn parse(id: &'a str) -> Option<Self> {
        let parts: Vec<&str> = id.split('~').collect();
        let [role, ip, pod, _domain] = parts[..] else { return None };
        let role = match role {
            "sidecar" => Role::Sidecar,
            "router" => Role::Router,
            _ => return None,
        };
        let (pod, namespace) = pod.rsplit_once('.')?;
        let is_named = !pod.is_empty() && !namespace.is_empty();
        is_named.then_some(Self { role, ip, pod, namespace })
    }
}

/// Refuses a node whose properties take too much memory.
fn check_size(id: &str, size: usize) -> Result<(), NodeError> {
    if size <= MAX_METADATA {
        return Ok(());
    }
    let reason = format!(
        "labels, addresses and names take {size} bytes, {ENTRY} of them for each label, address and port; \
         {MAX_METADATA} are the most"
    );
    Err(NodeError::Metadata { id: id.to_owned(), reason })
}

/// Returns the address in a node id and those of the metadata, without repetitions and without other texts.
fn addresses(ip: &str, instance_ips: &str) -> Vec<IpAddr> {
    let mut ips: Vec<IpAddr> = ip.parse().into_iter().collect();
    for ip in instance_ips.split(',').filter_map(|ip| ip.trim().parse().ok()) {
        if !ips.contains(&ip) {
            ips.push(ip);
        }
    }
    ips
}

/// Returns the settings among the metadata of a node. Settings of an unknown form are those of a later version of
/// Istio.
fn settings_of(config: serde_json::Value) -> HttpSettings {
    let mut settings: HttpSettings = serde_json::from_value(config).unwrap_or_default();
    settings.remove_bad_values();
    settings
}

/// Returns whether a value is true, also as text, as Istio's agents write it.
fn is_true(value: &serde_json::Value) -> bool {
    value.as_bool().unwrap_or_else(|| value.as_str() == Some("true"))
}

/// Returns the metadata that are short texts, within a limit.
fn metadata_texts(metadata: &serde_json::Value) -> BTreeMap<String, String> {
    let fields = metadata.as_object().into_iter().flatten();
    let texts = fields.filter_map(|(key, value)| Some((key, value.as_str()?)));
    let short = texts.filter(|(key, value)| key.len() + value.len() <= MAX_ID);
    short.take(MAX_TEXTS).map(|(key, value)| (key.clone(), value.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "sidecar~10.244.0.11~productpage-v1-x.default~default.svc.cluster.local";

    #[test]
    fn a_node_in_istios_form_is_parsed() {
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
    fn a_grpc_client_is_recognized_by_its_metadata() {
        let parse = |metadata| ProxyNode::parse(ID, metadata, Locality::default()).unwrap().view;
        let view = parse(json!({"GENERATOR": "grpc", "SKYSAIL_VHDS": "true", "SKYSAIL_PLAIN_ENVOY": "true"}));
        assert_eq!(view.role, Role::Grpc);
        assert_eq!((view.uses_vhds, view.plain_envoy, view.takes_resolved_addresses), (false, false, true));
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
    fn the_size_of_a_node_is_limited() {
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
    fn a_malformed_node_is_refused_with_the_reason() {
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
