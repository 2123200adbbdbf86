//! Configuration of the mesh, as files or as objects of a Kubernetes [`cluster`]: services, their pods and endpoints, and
//! changes to them.
//!
//! Service `i` is `svc-i` in namespace `i` modulo their number, with HTTP on port 80. A large mesh also has the objects
//! of [`large`]. Files are replaced as a whole, so that no reader sees half of one.

mod change;
pub(crate) mod cluster;
mod gateway_api;
pub(crate) mod large;
mod objects;

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::Value;

pub(crate) use self::change::{Change, SECRET};
use self::cluster::{ApiServerLoad, Cluster};
use self::objects::{namespace_object, pod, policy, route, service, slice};

/// Default number of namespaces over which services are spread.
pub(crate) const NAMESPACES: usize = 10;
/// Number of services per file.
const PER_FILE: usize = 100;
/// Index of the service that changes concern; it is in namespace 0.
pub(crate) const CHANGED: usize = 0;

/// Amount of configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Size {
    /// Services, a VirtualService and an AuthorizationPolicy.
    Small,
    /// Two VirtualServices, one HTTPRoute, 0.5 AuthorizationPolicies and 0.2 Sidecars per service, and a gateway of 500
    /// hosts per 20 services.
    Large,
}

/// Where the objects are.
pub(crate) enum Store {
    Folder(PathBuf),
    Cluster(Cluster),
}

/// The objects, by files.
pub(crate) struct Mesh {
    pub(crate) store: Store,
    services: usize,
    namespaces: usize,
    endpoints: usize,
    /// Number of times that each change was made.
    versions: HashMap<Change, usize>,
}

impl Mesh {
    /// Writes this number of services, in this number of namespaces, with this number of endpoints each.
    pub(crate) fn write(
        store: Store,
        services: usize,
        namespaces: usize,
        endpoints: usize,
    ) -> anyhow::Result<Self> {
        let mesh = Self { store, services, namespaces, endpoints, versions: HashMap::new() };
        let last = namespaces.min(services) - 1;
        mesh.put("namespaces", (0..last).map(|number| namespace_object(&namespace(number, namespaces), 0)))?;
        mesh.put("namespace", [namespace_object(&namespace(last, namespaces), 0)])?;
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

    /// Writes a further namespace.
    pub(crate) fn add_namespace(&self, name: &str) -> anyhow::Result<()> {
        self.put(name, [namespace_object(name, 0)])
    }

    /// Deletes the objects from a cluster; files are those of a temporary folder.
    pub(crate) fn end_all(&self) -> anyhow::Result<()> {
        match &self.store {
            Store::Folder(_) => Ok(()),
            Store::Cluster(cluster) => cluster.end(),
        }
    }

    /// Waits until all objects are written.
    pub(crate) fn finish(&self) -> anyhow::Result<()> {
        match &self.store {
            Store::Folder(_) => Ok(()),
            Store::Cluster(cluster) => cluster.finish(),
        }
    }

    /// Returns the load of the cluster's API server; `None` without a cluster.
    pub(crate) fn api_server(&self) -> anyhow::Result<Option<ApiServerLoad>> {
        match &self.store {
            Store::Folder(_) => Ok(None),
            Store::Cluster(cluster) => cluster.load().map(Some),
        }
    }

    fn put(&self, name: &str, objects: impl IntoIterator<Item = Value>) -> anyhow::Result<()> {
        let folder = match &self.store {
            Store::Folder(folder) => folder,
            Store::Cluster(cluster) => return cluster.put(name, objects.into_iter().collect()),
        };
        let mut text = String::new();
        for object in objects {
            writeln!(text, "---\n{object}")?;
        }
        let (part, whole) = (folder.join(format!(".{name}.part")), folder.join(format!("{name}.yaml")));
        fs::write(&part, text)
            .and_then(|()| fs::rename(&part, &whole))
            .with_context(|| format!("cannot write {}", whole.display()))
    }

    fn remove(&self, name: &str) -> anyhow::Result<()> {
        let folder = match &self.store {
            Store::Folder(folder) => folder,
            Store::Cluster(cluster) => return cluster.put(name, Vec::new()),
        };
        let path = folder.join(format!("{name}.yaml"));
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))
    }
}

impl Store {
    /// Makes a folder for files.
    pub(crate) fn folder(path: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self::Folder(path.to_owned()))
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
