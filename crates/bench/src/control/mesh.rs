//! Configuration of the mesh as files: services, their pods and endpoints, and changes to them.
//!
//! Service `i` is `svc-i` in namespace `i` modulo their number, with HTTP on port 80. Files are replaced as a whole,
//! so that no reader sees half of one.

use std::{
    fmt::Write as _,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::{Value, json};

/// Default number of namespaces over which services are spread.
pub(crate) const NAMESPACES: usize = 10;
/// Number of services per file.
const PER_FILE: usize = 100;
/// Index of the service that changes concern; it is in namespace 0.
pub(crate) const CHANGED: usize = 0;

/// Kind of change while sidecars are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Change {
    /// An endpoint of a service is added or removed.
    Endpoint,
    /// The timeout of a route changes.
    Route,
    /// The policy of a workload denies another path.
    Policy,
    /// A service is added or removed.
    Service,
}

/// The folder and its content.
pub(crate) struct Mesh {
    folder: PathBuf,
    services: usize,
    namespaces: usize,
    endpoints: usize,
    /// Number of changes so far.
    version: usize,
    /// True if the additional endpoint, and the additional service, exist.
    more: [bool; 2],
}

impl Mesh {
    /// Writes this number of services, in this number of namespaces, with this number of endpoints each.
    pub(crate) fn write(
        folder: &Path,
        services: usize,
        namespaces: usize,
        endpoints: usize,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mesh =
            Self { folder: folder.to_owned(), services, namespaces, endpoints, version: 0, more: [false; 2] };
        let objects = (0..namespaces.min(services)).map(|number| {
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": format!("ns-{number}")}})
        });
        mesh.put("namespaces", objects)?;
        for first in (0..services).step_by(PER_FILE) {
            let numbers = first..(first + PER_FILE).min(services);
            mesh.put(
                &format!("services-{first:06}"),
                numbers.clone().map(|number| service(number, namespaces)),
            )?;
            let pods = numbers
                .clone()
                .flat_map(|number| (0..endpoints).map(move |index| pod(number, index, namespaces)));
            mesh.put(&format!("pods-{first:06}"), pods)?;
            let slices = numbers.filter(|number| *number != CHANGED);
            mesh.put(
                &format!("slices-{first:06}"),
                slices.map(|number| slice(number, namespaces, endpoints)),
            )?;
        }
        mesh.put("endpoint", [slice(CHANGED, namespaces, endpoints)])?;
        mesh.put("route", [route(0)])?;
        mesh.put("policy", [policy(0)])?;
        Ok(mesh)
    }

    /// Makes a change.
    pub(crate) fn change(&mut self, change: Change) -> anyhow::Result<()> {
        self.version += 1;
        let [endpoint, service_too] = &mut self.more;
        match change {
            Change::Endpoint => {
                *endpoint = !*endpoint;
                let endpoints = self.endpoints + usize::from(*endpoint);
                self.put("endpoint", [slice(CHANGED, self.namespaces, endpoints)])
            }
            Change::Route => self.put("route", [route(self.version)]),
            Change::Policy => self.put("policy", [policy(self.version)]),
            Change::Service => {
                *service_too = !*service_too;
                let more = service_too.then(|| service(self.services, self.namespaces));
                self.put("service", more)
            }
        }
    }

    fn put(&self, name: &str, objects: impl IntoIterator<Item = Value>) -> anyhow::Result<()> {
        let mut text = String::new();
        for object in objects {
            writeln!(text, "---\n{object}")?;
        }
        let (part, whole) =
            (self.folder.join(format!(".{name}.part")), self.folder.join(format!("{name}.yaml")));
        fs::write(&part, text)
            .and_then(|()| fs::rename(&part, &whole))
            .with_context(|| format!("cannot write {}", whole.display()))
    }
}

/// Returns the namespace of a service in a mesh with this number of namespaces.
pub(crate) fn namespace(service: usize, namespaces: usize) -> String {
    format!("ns-{}", service % namespaces)
}

/// Returns the host of a service.
pub(crate) fn host(service: usize, namespaces: usize) -> String {
    format!("svc-{service}.{}.svc.cluster.local", namespace(service, namespaces))
}

/// Returns the address of a pod of a service.
pub(crate) fn address(service: usize, pod: usize) -> Ipv4Addr {
    let [high, low] = u16::try_from(service).unwrap_or(u16::MAX).to_be_bytes();
    Ipv4Addr::new(10, u8::try_from(pod).unwrap_or(u8::MAX), high, low)
}

fn service(number: usize, namespaces: usize) -> Value {
    let [high, low] = u16::try_from(number).unwrap_or(u16::MAX).to_be_bytes();
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": format!("svc-{number}"), "namespace": namespace(number, namespaces)},
        "spec": {
            "clusterIP": format!("172.16.{high}.{low}"),
            "selector": {"app": format!("svc-{number}")},
            "ports": [{"name": "http", "port": 80, "targetPort": 8080}],
        },
    })
}

fn pod(service: usize, index: usize, namespaces: usize) -> Value {
    let app = format!("svc-{service}");
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": format!("{app}-{index}"), "namespace": namespace(service, namespaces),
            "labels": {"app": app, "version": "v1", "security.istio.io/tlsMode": "istio"},
        },
        "spec": {
            "serviceAccountName": "default", "nodeName": "node-0",
            "containers": [{"name": "app", "image": "app", "ports": [{"containerPort": 8080}]}],
        },
        "status": {
            "phase": "Running", "podIP": address(service, index).to_string(),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    })
}

/// Returns the endpoints of a service.
fn slice(service: usize, namespaces: usize, endpoints: usize) -> Value {
    let name = format!("svc-{service}");
    let endpoint = |pod: usize| {
        let address = address(service, pod).to_string();
        let target = json!({"kind": "Pod", "name": format!("{name}-{pod}"), "namespace": namespace(service, namespaces)});
        json!({"addresses": [address], "conditions": {"ready": true}, "targetRef": target})
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{name}-1"), "namespace": namespace(service, namespaces),
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    })
}

fn route(version: usize) -> Value {
    json!({
        "apiVersion": "networking.istio.io/v1", "kind": "VirtualService",
        "metadata": {"name": "changed", "namespace": namespace(CHANGED, 1)},
        "spec": {
            "hosts": [host(CHANGED, 1)],
            "http": [{"timeout": format!("{}s", 10 + version), "route": [{"destination": {"host": host(CHANGED, 1)}}]}],
        },
    })
}

fn policy(version: usize) -> Value {
    json!({
        "apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
        "metadata": {"name": "changed", "namespace": namespace(CHANGED, 1)},
        "spec": {
            "selector": {"matchLabels": {"app": format!("svc-{CHANGED}")}},
            "action": "DENY",
            "rules": [{"to": [{"operation": {"paths": [format!("/private/{version}")]}}]}],
        },
    })
}
