//! TCP ports of a container, and the protocols of its stand-in.
//!
//! A stand-in serves the ports that its container declares, with the protocols that Istio selects for them. Images
//! often listen on undeclared ports: then the targets of Services are used, and otherwise a default.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use skysail_model::api::Protocol;

use crate::{
    external,
    objects::{Container, ContainerPort, Objects, Port, Probe},
    plan::Pod,
};

/// Port of a stand-in if neither its container nor a Service declares one.
const DEFAULT: u16 = 8080;

/// Ports of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ports {
    /// TCP ports by number.
    pub(crate) tcp: BTreeMap<u16, Protocol>,
    /// UDP ports that the container declares.
    pub(crate) udp: BTreeSet<u16>,
    /// True if the only port is the default, because none is declared.
    pub(crate) is_default: bool,
}

impl Ports {
    /// Returns the ports of a container whose own program runs: those that it declares. A pod's only container without
    /// declared ports has the targets of Services.
    pub(crate) fn of_program(container: &Container, pod: &Pod, objects: &Objects) -> Self {
        let mut ports = Self::named(container, pod, objects);
        if ports.tcp.is_empty() && pod.spec.containers.len() == 1 {
            ports.tcp = service_ports(pod, objects);
        }
        ports
    }

    /// Returns the ports of a stand-in. `is_alone` tells whether only stand-ins run in the pod. Other programs may
    /// listen on any port, so beside them a stand-in serves only its declared ports and that of its readiness probe.
    pub(crate) fn of_stand_in(container: &Container, pod: &Pod, objects: &Objects, is_alone: bool) -> Self {
        let mut ports = Self::named(container, pod, objects);
        let taken = of_others(container, pod);
        let free = |port: &u16| !taken.contains(port);
        let probed = container.readiness_probe.as_ref().and_then(|probe| probed(probe, pod));
        if let Some((port, protocol)) = probed.filter(|(port, _)| free(port)) {
            ports.tcp.entry(port).or_insert(protocol);
        }
        if is_alone && names_none(container) && is_first_that_names_none(container, pod) {
            let services = service_ports(pod, objects).into_iter().filter(|(port, _)| free(port));
            ports.tcp.extend(services);
            if ports.tcp.is_empty() && free(&DEFAULT) {
                ports.tcp.insert(DEFAULT, Protocol::Http);
                ports.is_default = true;
            }
        }
        ports
    }

    /// Returns the first TCP port.
    pub(crate) fn first(&self) -> Option<u16> {
        self.tcp.keys().next().copied()
    }

    fn named(container: &Container, pod: &Pod, objects: &Objects) -> Self {
        let services = service_ports(pod, objects);
        let mut ports = Self::default();
        for port in &container.ports {
            let own = select(port);
            match services.get(&port.container_port).filter(|protocol| **protocol != Protocol::Unknown) {
                _ if own == Protocol::Udp => _ = ports.udp.insert(port.container_port),
                Some(protocol) => _ = ports.tcp.insert(port.container_port, *protocol),
                None => _ = ports.tcp.insert(port.container_port, own),
            }
        }
        ports
    }
}

/// Returns the argument by which a stand-in listens on a port.
pub(crate) fn argument(port: u16, protocol: Protocol) -> String {
    match protocol {
        Protocol::Tcp | Protocol::Mongo | Protocol::Tls | Protocol::Https => format!("{port}/tcp"),
        _ => format!("{port}/http"),
    }
}

/// Formats the ports for messages: `on ports 8080 (HTTP), 9090 (gRPC)`.
impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_default {
            return write!(f, "on port {DEFAULT}");
        }
        f.write_str(if self.tcp.len() == 1 { "on port" } else { "on ports" })?;
        for (index, (port, protocol)) in self.tcp.iter().enumerate() {
            let word = match protocol {
                // A server of gRPC-Web speaks gRPC; its sidecar translates.
                Protocol::Grpc | Protocol::GrpcWeb => "gRPC",
                Protocol::Http2 => "HTTP/2",
                Protocol::Tcp | Protocol::Mongo => "TCP",
                Protocol::Tls | Protocol::Https => "TCP, without TLS",
                Protocol::Http | Protocol::Udp | Protocol::Unknown => "HTTP",
            };
            write!(f, "{} {port} ({word})", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

fn select(port: &ContainerPort) -> Protocol {
    Protocol::select(port.protocol.as_deref(), None, port.name.as_deref(), port.container_port.into())
}

fn names_none(container: &Container) -> bool {
    container.ports.iter().all(|port| select(port) == Protocol::Udp)
}

fn is_first_that_names_none(container: &Container, pod: &Pod) -> bool {
    let first = pod.spec.containers.iter().find(|container| names_none(container));
    first.is_some_and(|first| first.name == container.name)
}

/// Returns the TCP ports that other containers of the pod declare.
fn of_others(container: &Container, pod: &Pod) -> BTreeSet<u16> {
    let all = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let others = all.filter(|other| other.name != container.name);
    let ports = others.flat_map(|other| &other.ports).filter(|port| select(port) != Protocol::Udp);
    ports.map(|port| port.container_port).collect()
}

/// Returns the pod's ports that Services and ServiceEntries target. If several Services target a port, the first with a
/// declared protocol determines it. A ServiceEntry determines the protocol of a port that no Service targets.
fn service_ports(pod: &Pod, objects: &Objects) -> BTreeMap<u16, Protocol> {
    let mut ports = BTreeMap::new();
    let services = objects.services.iter();
    let services = services.filter(|((namespace, _), service)| pod.selected_by(namespace, service));
    for port in services.flat_map(|(_, service)| &service.ports) {
        let protocol = port.spec.protocol;
        if let Some(target) = pod.target(port).filter(|_| protocol != Protocol::Udp) {
            let known = ports.entry(target).or_insert(protocol);
            if *known == Protocol::Unknown {
                *known = protocol;
            }
        }
    }
    for (port, protocol) in external::ports(&objects.entries, &pod.namespace, &pod.labels) {
        ports.entry(port).or_insert(protocol);
    }
    ports
}

/// Returns the port of a readiness probe, on which a stand-in must listen to be ready.
fn probed(probe: &Probe, pod: &Pod) -> Option<(u16, Protocol)> {
    let resolve = |port: &Port| port.resolve(&pod.spec.containers);
    if let Some(target) = &probe.http_get {
        let protocol = if target.is_https() { Protocol::Https } else { Protocol::Http };
        return Some((resolve(&target.port)?, protocol));
    }
    if let Some(target) = &probe.tcp_socket {
        return Some((resolve(&target.port)?, Protocol::Tcp));
    }
    probe.grpc.as_ref().map(|target| (target.port, Protocol::Grpc))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{Metadata, Service, Template, Workload};
    use serde_json::{Value, json};

    /// Returns a pod with label `app: a` and these containers.
    fn pod(containers: Value) -> Pod {
        let metadata =
            Metadata { labels: Some([("app".to_owned(), "a".to_owned())].into()), ..Metadata::default() };
        let spec = serde_json::from_value(json!({ "containers": containers })).unwrap();
        let workload = Workload {
            kind: "Pod".to_owned(),
            namespace: "n".to_owned(),
            name: "p".to_owned(),
            account: "default".to_owned(),
            replicas: 1,
            parallelism: 1,
            backoff_limit: 6,
            claims: Vec::new(),
            template: Template { metadata, spec },
            hash: String::new(),
        };
        Pod::new(&workload, "p".to_owned(), [10, 244, 0, 2].into(), &BTreeMap::new())
    }

    /// Returns a Service with these ports that selects the pod.
    fn service(ports: Value) -> Objects {
        let service = Service::parse(&json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": "a", "namespace": "n" },
            "spec": { "selector": { "app": "a" }, "ports": ports },
        }));
        Objects { services: [(("n".to_owned(), "a".to_owned()), service)].into(), ..Objects::default() }
    }

    fn stand_in(pod: &Pod, index: usize, objects: &Objects) -> String {
        let ports = Ports::of_stand_in(&pod.spec.containers[index], pod, objects, true);
        if ports.tcp.is_empty() { "none".to_owned() } else { ports.to_string() }
    }

    #[test]
    fn the_service_or_else_the_name_declares_the_protocol() {
        let pod = pod(json!([{ "name": "c", "image": "i", "ports": [
            { "name": "tcp-a", "containerPort": 1 }, { "name": "tcp-b", "containerPort": 2 },
            { "name": "c", "containerPort": 3 }, { "name": "https", "containerPort": 4 },
            { "name": "dns", "containerPort": 53, "protocol": "UDP" }, { "containerPort": 27017 },
        ] }]));
        let objects = service(json!([
            { "name": "grpc", "port": 80, "targetPort": "tcp-a" }, { "name": "x", "port": 81, "targetPort": 2 },
            { "name": "y", "appProtocol": "http2", "port": 82, "targetPort": "c" },
        ]));
        assert_eq!(
            stand_in(&pod, 0, &objects),
            "on ports 1 (gRPC), 2 (TCP), 3 (HTTP/2), 4 (TCP, without TLS), 27017 (TCP)"
        );
        let ports = Ports::of_stand_in(&pod.spec.containers[0], &pod, &objects, true);
        assert_eq!(ports.udp, [53].into());
        let arguments: Vec<_> = ports.tcp.iter().map(|(port, protocol)| argument(*port, *protocol)).collect();
        assert_eq!(arguments, ["1/http", "2/tcp", "3/http", "4/tcp", "27017/tcp"]);
    }

    #[test]
    fn a_container_without_ports_serves_what_services_target_or_the_default() {
        let idle = json!({ "name": "c", "image": "i" });
        let only = pod(json!([idle]));
        assert_eq!(stand_in(&only, 0, &Objects::default()), "on port 8080");
        assert_eq!(stand_in(&only, 0, &service(json!([{ "port": 80 }]))), "on port 80 (HTTP)");
        let beside = |port: u16| json!({ "name": "d", "image": "i", "ports": [{ "containerPort": port }] });
        let two = pod(json!([beside(8080), idle]));
        assert_eq!(stand_in(&two, 1, &Objects::default()), "none");
        let two = pod(json!([beside(9090), idle, { "name": "e", "image": "i" }]));
        assert_eq!(stand_in(&two, 1, &service(json!([{ "port": 9090 }]))), "on port 8080");
        assert_eq!(stand_in(&two, 2, &Objects::default()), "none");
        // Another program may listen on any port.
        let ports = Ports::of_stand_in(&only.spec.containers[0], &only, &Objects::default(), false);
        assert_eq!(ports, Ports::default());
    }

    #[test]
    fn a_stand_in_serves_the_port_of_its_readiness_probe() {
        let probed = |probe: Value| {
            let pod = pod(json!([{ "name": "c", "image": "i", "ports": [{ "containerPort": 80 }],
                                   "readinessProbe": probe }]));
            stand_in(&pod, 0, &Objects::default())
        };
        assert_eq!(probed(json!({ "grpc": { "port": 9 } })), "on ports 9 (gRPC), 80 (HTTP)");
        assert_eq!(probed(json!({ "tcpSocket": { "port": 80 } })), "on port 80 (HTTP)");
        assert_eq!(probed(json!({ "exec": { "command": ["true"] } })), "on port 80 (HTTP)");
    }
}
