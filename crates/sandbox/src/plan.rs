//! Objects that a cluster would derive from the user's: pods with addresses, virtual addresses of Services, and names.
//! Pure; [`crate::mesh`] applies them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU32,
};

use serde_json::{Value, json};
use skysail_core::node;
use skysail_model::api::{
    kube::{TargetPort, canonical_name, canonical_revision},
    proxy_config::{Interception, StartSettings, StartSources},
    selects,
};

use crate::{
    gateways,
    names::{Answer, DOMAIN, Names},
    networks::{BRIDGE, SERVICE_NETWORK, free_address},
    objects::{
        Claim, Container, ContainerPort, Key, Labels, PodSpec, Service, ServicePort, Volume, Workload,
        port_named,
    },
    proxy_metadata,
    rules::VirtualPort,
    rundir::Phase,
};

/// Label of pods with a sidecar, as Istio's injection sets it.
const TLS_MODE: (&str, &str) = ("security.istio.io/tlsMode", "istio");
const CANONICAL_NAME: &str = "service.istio.io/canonical-name";
const CANONICAL_REVISION: &str = "service.istio.io/canonical-revision";
const INJECT: &str = "sidecar.istio.io/inject";
/// Name of the Kubernetes node of pods that name none.
const NODE: &str = "skysail";

/// A pod: one replica of a workload, with the properties that do not change while it lives.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) namespace: String,
    pub(crate) kind: String,
    pub(crate) workload: String,
    pub(crate) hash: String,
    pub(crate) address: Ipv4Addr,
    pub(crate) labels: Labels,
    pub(crate) annotations: Labels,
    pub(crate) account: String,
    pub(crate) spec: PodSpec,
    pub(crate) sidecar: bool,
    /// Container that is the proxy of a gateway; `None` if the pod is no gateway.
    pub(crate) gateway: Option<String>,
    /// Maximum number of restarts of a Job's program after failures.
    pub(crate) backoff_limit: u32,
    /// Settings with which the sidecar starts: of its annotation alone, or with those of the mesh
    /// ([`Pod::started_by`]).
    pub(crate) settings: StartSettings,
    /// Probe that the sidecar of a machine runs, as written.
    pub(crate) probe: Option<Value>,
}

impl Pod {
    /// Adds the settings of the mesh with which the sidecar starts.
    #[must_use]
    pub(crate) fn started_by(mut self, sources: &StartSources) -> Self {
        self.settings = sources.settings(&self.namespace, &self.labels, self.settings);
        let (metadata, _) = proxy_metadata::of_variables(&self.settings.variables);
        let group = metadata.get(proxy_metadata::GROUP).and_then(Value::as_str).unwrap_or_default();
        self.probe = sources.probes.get(&(self.namespace.clone(), group.to_owned())).cloned();
        self
    }

    /// Returns the number of worker threads of the sidecar; `default` if nothing sets it. 0 means one for each core.
    pub(crate) fn concurrency(&self, default: NonZeroU32) -> NonZeroU32 {
        let cores = || std::thread::available_parallelism().ok().and_then(|count| count.try_into().ok());
        match self.settings.concurrency {
            None => default,
            Some(0) => cores().unwrap_or(default),
            Some(number) => NonZeroU32::new(number).unwrap_or(default),
        }
    }

    /// Returns whether its connections are redirected to a sidecar.
    pub(crate) fn intercepts(&self) -> bool {
        // Nothing runs beside the proxy of a gateway.
        self.sidecar && self.gateway.is_none() && !self.is_bypassed()
    }

    /// Returns whether programs address the ports of the sidecar themselves.
    fn is_bypassed(&self) -> bool {
        self.settings.interception == Some(Interception::None)
    }

    /// Returns the pod of a workload with this name.
    pub(crate) fn new(
        workload: &Workload,
        name: String,
        address: Ipv4Addr,
        namespaces: &BTreeMap<String, Labels>,
    ) -> Self {
        let metadata = &workload.template.metadata;
        let mut labels = metadata.labels.clone().unwrap_or_default();
        let annotations = metadata.annotations.clone().unwrap_or_default();
        let mut spec = workload.template.spec.clone();
        spec.volumes.retain(|volume| !workload.claims.contains(&volume.name));
        spec.volumes.extend(workload.claims.iter().map(|claim| Volume {
            name: claim.clone(),
            persistent_volume_claim: Some(Claim { claim_name: format!("{claim}-{name}") }),
            ..Volume::default()
        }));
        let gateway = gateways::proxy_container(&spec, &labels, &annotations).filter(|_| !spec.host_network);
        let sidecar = gateway.is_some()
            || !spec.host_network && injected(&labels, &annotations, namespaces.get(&workload.namespace));
        if sidecar {
            let canonical = canonical_name(&labels, &workload.name).to_owned();
            let revision = canonical_revision(&labels).to_owned();
            labels.insert(CANONICAL_NAME.to_owned(), canonical);
            labels.insert(CANONICAL_REVISION.to_owned(), revision);
            if gateway.is_none() {
                labels.entry(TLS_MODE.0.to_owned()).or_insert_with(|| TLS_MODE.1.to_owned());
            }
        }
        let (settings, _) = proxy_metadata::annotated(&annotations);
        if workload.kind == "Deployment" {
            labels.insert("pod-template-hash".to_owned(), workload.hash.clone());
        }
        Self {
            name,
            namespace: workload.namespace.clone(),
            kind: workload.kind.clone(),
            workload: workload.name.clone(),
            hash: workload.hash.clone(),
            address,
            labels,
            annotations,
            account: workload.account.clone(),
            spec,
            sidecar,
            gateway,
            backoff_limit: workload.backoff_limit,
            settings,
            probe: None,
        }
    }

    /// Returns its name in messages. That is the workload's, because a message holds for all pods of the workload.
    pub(crate) fn about(&self) -> String {
        format!("{} {}/{}", self.kind, self.namespace, self.workload)
    }

    /// Returns the name of its Kubernetes node. There is one machine, so it only affects which endpoints are near.
    fn node_name(&self) -> &str {
        self.spec.node_name.as_deref().filter(|node| !node.is_empty()).unwrap_or(NODE)
    }

    /// Returns the Pod object that a cluster would hold.
    pub(crate) fn object(&self, phase: Phase, ready: bool) -> Value {
        let owner = match self.kind.as_str() {
            "Pod" => None,
            "Deployment" => Some(("ReplicaSet", format!("{}-{}", self.workload, self.hash))),
            kind => Some((kind, self.workload.clone())),
        };
        let owners = owner.map(|(kind, name)| {
            json!([{ "apiVersion": api_version(kind), "kind": kind, "name": name, "controller": true,
                     "uid": format!("{kind}-{name}") }])
        });
        let containers: Vec<Value> = self.spec.containers.iter().map(container_object).collect();
        let status = if ready { "True" } else { "False" };
        let node = self.node_name();
        let mut spec =
            json!({ "serviceAccountName": self.account, "nodeName": node, "containers": containers });
        for (name, value) in [("hostname", &self.spec.hostname), ("subdomain", &self.spec.subdomain)] {
            if let Some(value) = value {
                spec[name] = json!(value);
            }
        }
        let mut metadata = json!({ "name": self.name, "namespace": self.namespace, "labels": self.labels,
                                   "annotations": self.annotations });
        if let Some(owners) = owners {
            metadata["ownerReferences"] = owners;
        }
        let address = self.address.to_string();
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec,
            "status": {
                "phase": phase, "podIP": address, "podIPs": [{ "ip": address }],
                "hostIP": BRIDGE.to_string(),
                "conditions": [{ "type": "Ready", "status": status }],
            },
        })
    }

    /// Returns the sidecar's node for the control plane: Envoy's `Node` with Istio's metadata.
    pub(crate) fn node(&self, concurrency: NonZeroU32) -> Value {
        let Self { name, namespace, address, workload, .. } = self;
        let ports =
            self.spec.containers.iter().flat_map(|container| &container.ports).map(port_object).collect();
        let containers: Vec<&str> =
            self.spec.containers.iter().map(|container| container.name.as_str()).collect();
        let role = if self.gateway.is_some() { "router" } else { "sidecar" };
        let mesh_id = match self.settings.mesh_id.as_str() {
            "" => DOMAIN,
            id => id,
        };
        let setting = self.settings.tracing_service_name.unwrap_or_default();
        let cluster = setting.of(&self.labels, canonical_name(&self.labels, workload), namespace);
        let (version, plural) = (api_version(&self.kind), format!("{}s", self.kind.to_lowercase()));
        let mut config = proxy_metadata::own_config(&self.settings.own);
        config.insert("concurrency".into(), concurrency.get().into());
        let mut node = json!({
            "id": node::id(role, (*address).into(), name, namespace),
            "cluster": cluster,
            "metadata": {
                "ANNOTATIONS": self.annotations,
                "APP_CONTAINERS": containers.join(","),
                "CLUSTER_ID": "Kubernetes",
                "INSTANCE_IPS": address.to_string(),
                "INTERCEPTION_MODE": if self.is_bypassed() { "NONE" } else { "REDIRECT" },
                "ISTIO_VERSION": node::ISTIO_VERSION,
                "LABELS": self.labels,
                "MESH_ID": mesh_id,
                "NAME": name,
                "NAMESPACE": namespace,
                "NODE_NAME": self.node_name(),
                "OWNER": format!("kubernetes://apis/{version}/namespaces/{namespace}/{plural}/{workload}"),
                "POD_PORTS": Value::Array(ports).to_string(),
                "PROXY_CONFIG": config,
                "SERVICE_ACCOUNT": self.account,
                "WORKLOAD_NAME": workload,
            },
            "locality": {},
        });
        if let Some(probe) = &self.probe {
            node["metadata"]["PROXY_CONFIG"]["readinessProbe"] = probe.clone();
        }
        // Variables do not replace what the pod itself determines.
        let (more, _) = proxy_metadata::of_variables(&self.settings.variables);
        for (key, value) in more {
            if node["metadata"][&key].is_null() {
                node["metadata"][&key] = value;
            }
        }
        node
    }

    /// Returns whether the pod represents a machine outside of the cluster, whose proxy registers it with a
    /// WorkloadGroup. Services do not select it, and the control plane gets no Pod object.
    pub(crate) fn is_machine(&self) -> bool {
        let of_variables = || proxy_metadata::of_variables(&self.settings.variables).0;
        self.sidecar && of_variables().contains_key(proxy_metadata::GROUP)
    }

    /// Returns the containers that run programs of their own: all but the proxy of a gateway.
    pub(crate) fn containers(&self) -> impl Iterator<Item = &Container> {
        self.spec.containers.iter().filter(|container| Some(&container.name) != self.gateway.as_ref())
    }

    /// Returns a field of the pod by its path in `fieldRef`.
    pub(crate) fn field(&self, path: &str) -> Option<String> {
        let keyed = |prefix: &str| path.strip_prefix(prefix)?.strip_prefix("['")?.strip_suffix("']");
        if let Some(label) = keyed("metadata.labels") {
            return Some(self.labels.get(label).cloned().unwrap_or_default());
        }
        if let Some(annotation) = keyed("metadata.annotations") {
            return Some(self.annotations.get(annotation).cloned().unwrap_or_default());
        }
        Some(match path {
            "metadata.name" => self.name.clone(),
            "metadata.namespace" => self.namespace.clone(),
            "metadata.uid" => format!("{}.{}", self.namespace, self.name),
            "status.podIP" | "status.podIPs" => self.address.to_string(),
            "status.hostIP" => BRIDGE.to_string(),
            "spec.nodeName" => self.node_name().to_owned(),
            "spec.serviceAccountName" => self.account.clone(),
            _ => return None,
        })
    }

    pub(crate) fn selected_by(&self, namespace: &str, service: &Service) -> bool {
        let selector = &service.spec.selector;
        self.namespace == namespace && !selector.is_empty() && selects(selector, &self.labels)
    }

    pub(crate) fn target(&self, port: &ServicePort) -> Option<u16> {
        match &port.spec.target {
            TargetPort::Number(number) => Some(*number),
            TargetPort::Name(name) => port_named(name, &self.spec.containers),
        }
    }
}

/// Returns the API version of a kind that creates pods.
fn api_version(kind: &str) -> &'static str {
    match kind {
        "Job" => "batch/v1",
        "Pod" => "v1",
        _ => "apps/v1",
    }
}

/// Returns whether a pod gets a sidecar. It does unless the pod or its namespace disables it; the pod's setting takes
/// precedence.
fn injected(labels: &Labels, annotations: &Labels, namespace: Option<&Labels>) -> bool {
    match labels.get(INJECT).or_else(|| annotations.get(INJECT)).map(String::as_str) {
        Some("false" | "disabled" | "no" | "n" | "off") => false,
        Some("true" | "enabled" | "yes" | "y" | "on") => true,
        _ => {
            namespace.and_then(|labels| labels.get("istio-injection")).is_none_or(|value| value != "disabled")
        }
    }
}

fn container_object(container: &Container) -> Value {
    let ports: Vec<Value> = container.ports.iter().map(port_object).collect();
    json!({ "name": container.name, "image": container.image, "ports": ports })
}

fn port_object(port: &ContainerPort) -> Value {
    let protocol = port.protocol.as_deref().unwrap_or("TCP");
    let mut object = json!({ "containerPort": port.container_port, "protocol": protocol });
    // Clients of this object expect a text or no field, never a null.
    if let Some(name) = &port.name {
        object["name"] = json!(name);
    }
    object
}

/// Virtual addresses of Services: each Service keeps its first one.
#[derive(Debug, Default)]
pub(crate) struct VirtualAddresses(BTreeMap<Key, Ipv4Addr>);

impl VirtualAddresses {
    /// Returns the addresses that Services of a running mesh have.
    pub(crate) fn of(services: &[Value]) -> Self {
        let address = |service: &Value| {
            let name = |field: &str| service["metadata"][field].as_str().map(str::to_owned);
            let namespace = name("namespace").unwrap_or_else(|| "default".to_owned());
            let address = service["spec"]["clusterIP"].as_str()?.parse().ok()?;
            Some(((namespace, name("name")?), address))
        };
        Self(services.iter().filter(|object| object["kind"] == "Service").filter_map(address).collect())
    }

    /// Allocates an address to each Service that needs one, and returns all of them.
    ///
    /// The search for an address starts at a position that follows from the name, so other Services rarely change it.
    pub(crate) fn assign(&mut self, services: &BTreeMap<Key, Service>) -> &BTreeMap<Key, Ipv4Addr> {
        self.0.retain(|key, _| services.get(key).is_some_and(Service::is_virtual));
        for (key, service) in services {
            if let Some(address) = service.own_address() {
                self.0.insert(key.clone(), address);
            }
        }
        let mut taken: BTreeSet<Ipv4Addr> = self.0.values().copied().collect();
        for (key, _) in services.iter().filter(|(_, service)| service.is_virtual()) {
            let name = format!("{}/{}", key.0, key.1);
            self.0.entry(key.clone()).or_insert_with(|| {
                free_address(SERVICE_NETWORK, &name, &mut taken).unwrap_or(Ipv4Addr::UNSPECIFIED)
            });
        }
        &self.0
    }
}

impl Service {
    /// Returns whether it selects pods.
    pub(crate) fn has_pods(&self) -> bool {
        !self.is_external() && !self.spec.selector.is_empty()
    }

    fn is_virtual(&self) -> bool {
        !self.is_external() && !self.spec.headless
    }

    fn is_external(&self) -> bool {
        self.kind.as_deref() == Some("ExternalName")
    }

    /// Returns the virtual address that the user set.
    pub(crate) fn own_address(&self) -> Option<Ipv4Addr> {
        let mut addresses = self.spec.cluster_ips.iter().filter(|_| self.is_virtual());
        addresses.find_map(|address| match address {
            IpAddr::V4(address) => Some(*address),
            IpAddr::V6(_) => None,
        })
    }

    /// Returns the Service object with its virtual address.
    pub(crate) fn completed(&self, address: Ipv4Addr) -> Value {
        let mut object = self.object.clone();
        let text = address.to_string();
        object["spec"]["clusterIP"] = json!(text);
        object["spec"]["clusterIPs"] = json!([text]);
        object
    }
}

/// Returns a workload and the URL of an HTTP service that it can call. A service of another workload is preferred.
pub(crate) fn example_call(
    services: &BTreeMap<Key, Service>,
    pods: &[(&Pod, bool)],
) -> Option<(String, String)> {
    let ready = || pods.iter().filter(|(_, ready)| *ready).map(|(pod, _)| *pod);
    let of_service = |((namespace, name), service): (&Key, &Service)| {
        let mut ports = service.ports.iter().filter(|port| port.is_tcp());
        let (port, scheme) = ports.find_map(|port| Some((port.spec.port, port.scheme()?)))?;
        ready().find(|pod| pod.selected_by(namespace, service))?;
        let client = ready().find(|pod| !pod.selected_by(namespace, service));
        let source = client.or_else(|| ready().next())?;
        let host = if source.namespace == *namespace { name.clone() } else { format!("{name}.{namespace}") };
        let port = if scheme == "http" && port == 80 { String::new() } else { format!(":{port}") };
        let workload = format!("{}/{}", source.namespace, source.workload);
        Some((client.is_none(), (workload, format!("{scheme}://{host}{port}"))))
    };
    services.iter().filter_map(of_service).min_by_key(|(own, _)| *own).map(|(_, call)| call)
}

/// Returns the names of the DNS table. The flag of a pod tells whether it is ready.
pub(crate) fn names(
    services: &BTreeMap<Key, Service>,
    addresses: &BTreeMap<Key, Ipv4Addr>,
    pods: &[(&Pod, bool)],
) -> Names {
    let mut names = Names::new();
    for control in ["istiod", "skysaild"] {
        names.insert(format!("{control}.istio-system.svc.{DOMAIN}"), Answer::Addresses(vec![BRIDGE]));
    }
    for (key @ (namespace, name), service) in services {
        let full = format!("{name}.{namespace}.svc.{DOMAIN}");
        if let Some(external) = &service.spec.external_name {
            names.insert(full, Answer::Alias(external.trim_end_matches('.').to_lowercase()));
        } else if let Some(address) = addresses.get(key) {
            names.insert(full, Answer::Addresses(vec![*address]));
        } else if service.spec.headless {
            let chosen = pods.iter().filter(|(pod, ready)| {
                (*ready || service.spec.publish_not_ready) && pod.selected_by(namespace, service)
            });
            let mut all = Vec::new();
            for (pod, _) in chosen {
                all.push(pod.address);
                let host =
                    if pod.kind == "StatefulSet" { Some(&pod.name) } else { pod.spec.hostname.as_ref() };
                if let Some(host) = host {
                    names.insert(format!("{host}.{full}"), Answer::Addresses(vec![pod.address]));
                }
            }
            names.insert(full, Answer::Addresses(all));
        }
    }
    for (pod, _) in pods {
        let dashed = pod.address.to_string().replace('.', "-");
        for name in [&dashed, &pod.name] {
            let full = format!("{name}.{}.pod.{DOMAIN}", pod.namespace);
            names.insert(full, Answer::Addresses(vec![pod.address]));
        }
    }
    names
}

/// Returns the ports of virtual addresses with their backends, for pods and connections without a sidecar.
pub(crate) fn virtual_ports(
    services: &BTreeMap<Key, Service>,
    addresses: &BTreeMap<Key, Ipv4Addr>,
    pods: &[(&Pod, bool)],
) -> Vec<VirtualPort> {
    let mut ports = Vec::new();
    for (key, address) in addresses {
        let Some(service) = services.get(key) else { continue };
        for port in &service.ports {
            let backends = (pods.iter())
                .filter(|(pod, ready)| *ready && pod.selected_by(&key.0, service))
                .filter_map(|(pod, _)| Some((pod.address, pod.target(port)?)))
                .collect();
            let udp = port.transport == "UDP";
            ports.push(VirtualPort { address: *address, port: port.spec.port, udp, backends });
        }
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{Metadata, Template};

    fn service(name: &str, mut spec: Value) -> (Key, Service) {
        if spec["ports"].is_null() {
            spec["ports"] = json!([{ "port": 80 }]);
        }
        let object =
            json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": name }, "spec": spec });
        (("default".to_owned(), name.to_owned()), Service::parse(&object))
    }

    fn workload(labels: &[(&str, &str)]) -> Workload {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let spec = json!({ "containers": [{ "name": "c", "image": "i",
            "ports": [{ "name": "http", "containerPort": 8080 }, { "containerPort": 9 }] }] });
        Workload {
            kind: "Deployment".to_owned(),
            namespace: "default".to_owned(),
            name: "a-v1".to_owned(),
            account: "default".to_owned(),
            replicas: 1,
            parallelism: 1,
            backoff_limit: 6,
            claims: Vec::new(),
            template: Template {
                metadata: Metadata { labels: Some(labels), ..Metadata::default() },
                spec: serde_json::from_value(spec).unwrap(),
            },
            hash: "hash".to_owned(),
        }
    }

    fn pod(labels: &[(&str, &str)], address: [u8; 4]) -> Pod {
        Pod::new(&workload(labels), "a-v1-hash-x".to_owned(), address.into(), &BTreeMap::new())
    }

    #[test]
    fn virtual_addresses_stay_when_services_are_added_and_removed() {
        let mut addresses = VirtualAddresses::default();
        let own = json!({ "clusterIP": "10.96.7.7" });
        let services: BTreeMap<_, _> = [service("a", json!({})), service("b", own)].into();
        let first = addresses.assign(&services).clone();
        assert_eq!(first[&services.keys().nth(1).unwrap().clone()], Ipv4Addr::new(10, 96, 7, 7));
        let more: BTreeMap<_, _> =
            (0..500).map(|n| service(&format!("s{n}"), json!({}))).chain(services).collect();
        let all = addresses.assign(&more).clone();
        assert!(first.iter().all(|(key, address)| all[key] == *address));
        assert_eq!(all.values().collect::<BTreeSet<_>>().len(), 502);
        let again = VirtualAddresses::default().assign(&more).clone();
        assert_eq!(again.len(), 502);
    }

    #[test]
    fn the_example_call_goes_to_a_ready_http_service_of_another_workload() {
        let port = |name: &str, port: u16| json!({ "selector": { "app": "a" }, "ports": [{ "name": name, "port": port }] });
        let services: BTreeMap<_, _> =
            [service("a", port("tcp-a", 1)), service("b", port("http", 80)), service("c", port("http", 81))]
                .into();
        let (a, mut other) = (pod(&[("app", "a")], [10, 244, 0, 2]), pod(&[("app", "o")], [10, 244, 0, 3]));
        "other".clone_into(&mut other.namespace);
        let call = |pods: &[(&Pod, bool)]| example_call(&services, pods).map(|(_, url)| url);
        assert_eq!(call(&[(&a, true), (&other, true)]).as_deref(), Some("http://b.default"));
        assert_eq!(
            call(&[(&a, true), (&other, false)]).as_deref(),
            Some("http://b"),
            "from its own workload"
        );
        assert_eq!(call(&[(&a, false), (&other, true)]), None, "the service has no ready pod");
    }

    #[test]
    fn names_and_backends_follow_readiness() {
        let spec = json!({ "selector": { "app": "a" }, "ports": [{ "port": 80, "targetPort": "http" }] });
        let headless = json!({ "selector": { "app": "a" }, "clusterIP": "None" });
        let services: BTreeMap<_, _> = [service("a", spec), service("h", headless)].into();
        let mut addresses = VirtualAddresses::default();
        let addresses = addresses.assign(&services);
        let (one, two) = (pod(&[("app", "a")], [10, 244, 0, 2]), pod(&[("app", "a")], [10, 244, 0, 3]));
        let pods = [(&one, true), (&two, false)];
        let ports = virtual_ports(&services, addresses, &pods);
        assert_eq!(ports.len(), 1);
        assert_eq!(ports[0].backends, [(one.address, 8080)]);
        let names = names(&services, addresses, &pods);
        assert_eq!(names["h.default.svc.cluster.local"], Answer::Addresses(vec![one.address]));
        assert_eq!(names["10-244-0-3.default.pod.cluster.local"], Answer::Addresses(vec![two.address]));
        assert!(
            matches!(&names["a.default.svc.cluster.local"], Answer::Addresses(found) if found.len() == 1)
        );
    }

    #[test]
    fn the_pods_injection_setting_overrides_its_namespaces() {
        let namespaces: BTreeMap<_, _> =
            [("default".to_owned(), Labels::from([("istio-injection".to_owned(), "disabled".to_owned())]))]
                .into();
        let make = |labels: &[(&str, &str)]| Pod::new(&workload(labels), "p".to_owned(), BRIDGE, &namespaces);
        assert!(!make(&[]).sidecar);
        assert!(make(&[(INJECT, "true")]).sidecar);
        assert!(pod(&[], [10, 244, 0, 2]).sidecar);
        assert!(!pod(&[(INJECT, "false")], [10, 244, 0, 2]).sidecar);
    }

    #[test]
    fn a_pod_object_has_the_fields_of_a_clusters() {
        let pod = pod(&[("app", "a"), ("version", "v1")], [10, 244, 0, 2]);
        let object = pod.object(Phase::Running, true);
        assert_eq!(object["status"]["podIP"], "10.244.0.2");
        assert_eq!(object["metadata"]["ownerReferences"][0]["name"], "a-v1-hash");
        assert_eq!(object["metadata"]["labels"][TLS_MODE.0], "istio");
        assert_eq!(
            pod.node(NonZeroU32::MIN)["id"],
            "sidecar~10.244.0.2~a-v1-hash-x.default~default.svc.cluster.local"
        );
        assert!(!pod.node(NonZeroU32::MIN)["metadata"]["POD_PORTS"].as_str().unwrap().contains("null"));
        assert_eq!(pod.field("metadata.labels['version']").as_deref(), Some("v1"));
        assert_eq!(pod.field("spec.nothing"), None);
    }
}
