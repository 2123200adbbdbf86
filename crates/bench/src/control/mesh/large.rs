//! Objects of a large mesh, in proportion to its services.
//!
//! - A service with an even number has two VirtualServices in the mesh, one for its own host and one for an alias, and
//!   an AuthorizationPolicy.
//! - A service with an odd number has two HTTPRoutes.
//! - Every service has a VirtualService for 25 hosts of a gateway; 20 services share a gateway.
//! - Every fifth service has a Sidecar. It selects the workload of the service, and allows ten services.

use serde_json::{Value, json};

use super::{CHANGED, Mesh, PER_FILE, host, namespace, objects::namespace_object};

/// Namespace of the gateways.
pub(crate) const EDGE: &str = "edge";
/// Number of services that share a gateway.
const PER_GATEWAY: usize = 20;
/// Hosts of each service at its gateway.
const HOSTS: usize = 25;
/// One service in this number has a Sidecar.
const SIDECAR_EVERY: usize = 5;
/// Number of services that a Sidecar allows: the workload's own and those that follow it by number.
const ALLOWED: usize = 10;

/// Returns the number of gateways of a mesh.
pub(crate) fn gateways(services: usize) -> usize {
    services.div_ceil(PER_GATEWAY)
}

/// Returns whether the workload of a service has a Sidecar. Service 0 has none.
pub(crate) fn has_sidecar(service: usize) -> bool {
    service % SIDECAR_EVERY == SIDECAR_EVERY - 1
}

/// Returns the services that the Sidecar of a service allows.
pub(crate) fn allowed(service: usize, services: usize) -> impl Iterator<Item = usize> {
    (0..ALLOWED.min(services)).map(move |next| (service + next) % services)
}

/// Returns the name of a gateway's pod.
pub(crate) fn gateway_pod(gateway: usize) -> String {
    format!("gateway-{gateway}-0")
}

/// Returns the value of the label `istio` of a gateway's pod.
pub(crate) fn gateway_label(gateway: usize) -> String {
    format!("gateway-{gateway}")
}

/// Returns the address of a gateway's pod.
pub(crate) fn gateway_address(gateway: usize) -> std::net::Ipv4Addr {
    let [high, low] = u16::try_from(gateway).unwrap_or(u16::MAX).to_be_bytes();
    std::net::Ipv4Addr::new(10, 251, high, low)
}

impl Mesh {
    /// Writes the objects of a large mesh.
    pub(crate) fn enlarge(&self) -> anyhow::Result<()> {
        let namespaces = self.namespaces;
        self.put(
            "edge",
            [namespace_object(EDGE, 0)]
                .into_iter()
                .chain((0..gateways(self.services)).flat_map(|number| self.gateway(number))),
        )?;
        for first in (0..self.services).step_by(PER_FILE) {
            let numbers = || first..(first + PER_FILE).min(self.services);
            let even = || numbers().filter(|number| number % 2 == 0);
            let odd = numbers().filter(|number| number % 2 == 1);
            // The route of this service is in a file of its own.
            let own = even().filter(|number| *number != CHANGED).map(|number| own_rule(number, namespaces));
            let aliases = even().map(|number| alias_rule(number, namespaces));
            self.put(&format!("virtual-services-{first:06}"), own.chain(aliases))?;
            let routes = odd.flat_map(|number| http_routes(number, namespaces));
            self.put(&format!("http-routes-{first:06}"), routes)?;
            let policies = even().map(|number| policy(number, namespaces));
            self.put(&format!("policies-{first:06}"), policies)?;
            let public = numbers().filter(|number| *number != CHANGED);
            let public = public.map(|number| public_rule(number, namespaces, 0));
            self.put(&format!("public-{first:06}"), public)?;
            let restricted = numbers().filter(|number| has_sidecar(*number));
            let sidecars = restricted.map(|number| {
                let allowed = allowed(number, self.services).collect::<Vec<_>>();
                sidecar(number, namespaces, &format!("svc-{number}"), &allowed)
            });
            self.put(&format!("sidecars-{first:06}"), sidecars)?;
        }
        self.put("public", [public_rule(CHANGED, namespaces, 0)])
    }

    /// Returns a gateway's pod and its Gateway.
    fn gateway(&self, number: usize) -> [Value; 2] {
        let first = number * PER_GATEWAY;
        let services = first..(first + PER_GATEWAY).min(self.services);
        let hosts: Vec<String> = services.flat_map(public_hosts).collect();
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": gateway_pod(number), "namespace": EDGE, "labels": {"istio": gateway_label(number)},
            },
            "spec": {"serviceAccountName": "default", "containers": [{"name": "istio-proxy", "image": "auto"}]},
            "status": {
                "phase": "Running", "podIP": gateway_address(number).to_string(),
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        let server = json!({"port": {"number": 80, "name": "http", "protocol": "HTTP"}, "hosts": hosts});
        [pod, gateway_object(number, &gateway_label(number), &server)]
    }
}

/// Returns a Gateway with one server, which selects the pod of this gateway.
pub(super) fn gateway_object(gateway: usize, name: &str, server: &Value) -> Value {
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "Gateway",
        "metadata": {"name": name, "namespace": EDGE},
        "spec": {"selector": {"istio": gateway_label(gateway)}, "servers": [server]},
    })
}

/// Returns a VirtualService.
pub(super) fn rule(name: &str, namespace: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": {"name": name, "namespace": namespace}, "spec": spec,
    })
}

fn own_rule(number: usize, namespaces: usize) -> Value {
    let host = host(number, namespaces);
    let to = json!([{"destination": {"host": host}}]);
    let spec = json!({
        "hosts": [host],
        "http": [
            {"match": [{"headers": {"x-canary": {"exact": "true"}}}], "timeout": "5s", "route": to},
            {"timeout": "10s", "retries": {"attempts": 3, "perTryTimeout": "3s"}, "route": to},
        ],
    });
    rule(&format!("svc-{number}"), &namespace(number, namespaces), &spec)
}

fn alias_rule(number: usize, namespaces: usize) -> Value {
    let spec = json!({
        "hosts": [format!("svc-{number}.internal.example")],
        "http": [{"timeout": "10s", "route": [{"destination": {"host": host(number, namespaces)}}]}],
    });
    rule(&format!("alias-{number}"), &namespace(number, namespaces), &spec)
}

fn public_hosts(service: usize) -> impl Iterator<Item = String> {
    (0..HOSTS).map(move |host| format!("h{host}.svc-{service}.example.com"))
}

/// Returns the VirtualService of a service at its gateway.
pub(super) fn public_rule(number: usize, namespaces: usize, version: usize) -> Value {
    let to = json!([{"destination": {"host": host(number, namespaces)}}]);
    let spec = json!({
        "hosts": public_hosts(number).collect::<Vec<_>>(),
        "gateways": [format!("{EDGE}/{}", gateway_label(number / PER_GATEWAY))],
        "http": [
            {"match": [{"uri": {"prefix": "/api/"}}], "timeout": "5s", "route": to},
            {"timeout": format!("{}s", 10 + version), "route": to},
        ],
    });
    rule(&format!("public-{number}"), &namespace(number, namespaces), &spec)
}

fn http_routes(number: usize, namespaces: usize) -> [Value; 2] {
    let paths = [("api", "/api/"), ("all", "/")];
    paths.map(|(name, path)| http_route(number, namespaces, &format!("svc-{number}-{name}"), path, 10))
}

/// Returns an HTTPRoute of the mesh for a path prefix of a service, with a timeout in seconds.
pub(super) fn http_route(
    number: usize,
    namespaces: usize,
    name: &str,
    prefix: &str,
    timeout: usize,
) -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": name, "namespace": namespace(number, namespaces)},
        "spec": {
            "parentRefs": [{"group": "", "kind": "Service", "name": format!("svc-{number}")}],
            "rules": [{
                "matches": [{"path": {"type": "PathPrefix", "value": prefix}}],
                "timeouts": {"request": format!("{timeout}s")},
                "backendRefs": [{"name": format!("svc-{number}"), "port": 80}],
            }],
        },
    })
}

fn policy(number: usize, namespaces: usize) -> Value {
    json!({
        "apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
        "metadata": {"name": format!("svc-{number}"), "namespace": namespace(number, namespaces)},
        "spec": {
            "selector": {"matchLabels": {"app": format!("svc-{number}")}},
            "rules": [{
                "from": [{"source": {"namespaces": [namespace(number, namespaces), EDGE]}}],
                "to": [{"operation": {"methods": ["GET", "POST"]}}],
            }],
        },
    })
}

/// Returns a Sidecar for the workload of a service that allows these services.
pub(super) fn sidecar(number: usize, namespaces: usize, name: &str, allowed: &[usize]) -> Value {
    let allowed = allowed.iter().map(|other| {
        let namespace = namespace(*other, namespaces);
        format!("{namespace}/{}", host(*other, namespaces))
    });
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "Sidecar",
        "metadata": {"name": name, "namespace": namespace(number, namespaces)},
        "spec": {
            "workloadSelector": {"labels": {"app": format!("svc-{number}")}},
            "egress": [{"hosts": allowed.collect::<Vec<_>>()}],
        },
    })
}
