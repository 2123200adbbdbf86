//! A mesh that does not run: the objects that [`crate::mesh`] would create from files, and the configuration that their
//! proxies would receive. It can also describe a running mesh, and that of another
//! control plane.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    num::NonZeroU32,
    path::PathBuf,
};

use serde_json::Value;
use skysail_intercept::interception::Exceptions;
use skysail_model::{
    Diagnostic, Kind, ObjectKey, Origin, ProxyNode, World, api::kube::Locality, parse_with_lines,
};
use skysail_source::{FileChange, FileState, Folders};

use crate::{
    check::{apply, mesh_world},
    error::{Context as _, Error},
    external::{self, Allocation},
    files::{FileUpdate, Files},
    names::{Answer, DOMAIN, Hosts, Names},
    networks::POD_NETWORK,
    objects::{Objects, Workload, encode_hash, fnv},
    plan::{self, Pod, VirtualAddresses},
    progress::SERVICES,
    rules::{self, VirtualPort},
    rundir::{Phase, PodState, State},
};

/// Maximum number of pods of a workload. Further pods with the same template would not change an explanation.
const MAX_REPLICAS: u32 = 20;
/// Maximum number of pods.
const MAX_PODS: usize = 5_000;
/// Maximum length of a chain of aliases.
const MAX_ALIASES: usize = 8;
/// Minimum number of dots in a name that is first looked up without search domains (`ndots` of pods).
const DOTS: usize = 5;
/// Length of the random end of a pod's name.
const SUFFIX: usize = 5;
/// Name of standard input in diagnostics.
const STDIN: &str = "-";
/// Network of the assumed pods beside those of connected proxies. It is reserved (RFC 1112), so hardly any cluster uses
/// it. External hosts have addresses of another part of 240.0.0.0/4.
const ASSUMED_NETWORK: Ipv4Addr = Ipv4Addr::new(240, 0, 0, 0);

/// A mesh that does not run.
#[derive(Debug)]
pub struct Offline {
    /// Objects of the files and of the mesh.
    pub world: World,
    /// Diagnostics of the control plane.
    pub findings: Vec<Diagnostic>,
    /// Pods in the order of their addresses.
    pub pods: Vec<OfflinePod>,
    objects: Objects,
    names: Names,
    hosts: Hosts,
    ports: Vec<VirtualPort>,
}

/// A pod of a mesh that does not run.
#[derive(Clone, Debug)]
pub struct OfflinePod {
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
    /// Workload to which it belongs.
    pub owner: ObjectKey,
    /// Service account.
    pub account: String,
    /// Address.
    pub address: Ipv4Addr,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The pod has a sidecar or is a gateway.
    pub sidecar: bool,
    /// The pod is a gateway.
    pub gateway: bool,
    /// Connections are redirected to the sidecar.
    is_intercepted: bool,
    exceptions: Exceptions,
    node: Value,
}

/// Result of a name lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Addresses, and the full name that has them.
    Found(String, Vec<Ipv4Addr>),
    /// The name has no address in the mesh. The reason, if it is the name of a ServiceEntry.
    Missing(Option<String>),
}

impl Offline {
    /// Reads folders and files, and a text from standard input as the last one.
    ///
    /// # Errors
    /// When a path cannot be read.
    pub fn read(config: &[PathBuf], stdin: Option<&str>) -> Result<Self, Error> {
        Ok(Self::of(Self::changes(config, stdin)?))
    }

    fn changes(config: &[PathBuf], stdin: Option<&str>) -> Result<Vec<FileChange>, Error> {
        let shown: Vec<_> = config.iter().map(|path| path.display().to_string()).collect();
        let mut changes = Folders::new(config).context(format!("reading {}", shown.join(", ")))?.scan();
        changes.extend(stdin.map(|text| {
            let state = FileState::Text(text.to_owned());
            FileChange { layer: config.len(), path: STDIN.to_owned(), state }
        }));
        Ok(changes)
    }

    /// Creates the mesh of these files.
    pub fn of(changes: Vec<FileChange>) -> Self {
        let addresses = pod_addresses(POD_NETWORK.0);
        Self::build(changes, &[], |objects| {
            pods(objects, addresses).into_iter().map(|pod| (pod, true)).collect()
        })
    }

    /// Describes a running mesh: its files as they are now, with its pods and addresses.
    ///
    /// # Errors
    /// When a path of its configuration cannot be read.
    pub fn running(state: &State) -> Result<Self, Error> {
        let what = format!("reading the configuration of mesh {}", state.name);
        let changes = Folders::new(&state.config).context(what)?.scan();
        let generated = state.generated(SERVICES);
        Ok(Self::build(changes, &generated, |objects| running_pods(objects, state)))
    }

    /// Describes a mesh of another control plane: files as in [`Offline::read`], with the pods of the proxies that are
    /// connected to it. `proxies` are their node ids. Workloads without such a proxy have assumed pods, with addresses
    /// that differ from those of the connected ones.
    ///
    /// # Errors
    /// When a path cannot be read.
    pub fn connected(config: &[PathBuf], stdin: Option<&str>, proxies: &[String]) -> Result<Self, Error> {
        let changes = Self::changes(config, stdin)?;
        Ok(Self::build(changes, &[], |objects| connected_pods(objects, proxies)))
    }

    /// Creates the mesh of files. `generated` are the Services with their addresses, and the address allocation, of a
    /// running mesh.
    fn build(
        changes: Vec<FileChange>,
        generated: &[Value],
        pods: impl FnOnce(&Objects) -> Vec<(Pod, bool)>,
    ) -> Self {
        let mut files = Files::default();
        for change in &changes {
            files.take(FileUpdate::of(change.clone()));
        }
        let objects = files.objects();
        let mut addresses = VirtualAddresses::of(generated);
        let addresses = addresses.assign(&objects.services);
        let (mut world, mut findings) = mesh_world(changes, addresses, parse_with_lines);
        let mut allocation = Allocation::of(generated);
        let allocated = allocation.assign(&objects.entries);
        apply(&mut world, &external::document(allocated), &Origin::default());
        let pods = pods(&objects);
        for (pod, ready) in &pods {
            let origin = world.origin(&owner(pod)).cloned().unwrap_or_default();
            apply(&mut world, &pod.object(Phase::Running, *ready), &origin);
        }
        world.settle();
        findings.extend(world.validate());
        let known: Vec<(&Pod, bool)> = pods.iter().map(|(pod, ready)| (pod, *ready)).collect();
        let names = plan::names(&objects.services, addresses, &known);
        let hosts = external::hosts(&objects.entries, allocated, &known);
        let ports = plan::virtual_ports(&objects.services, addresses, &known);
        let pods = pods.iter().map(|(pod, _)| OfflinePod::of(pod)).collect();
        Self { world, findings: findings.into_iter().collect(), pods, objects, names, hosts, ports }
    }

    /// Returns the pods of a workload or pod: `NAME`, `NAMESPACE/NAME`, or an address.
    pub fn matching(&self, name: &str) -> Vec<&OfflinePod> {
        if let Ok(address) = name.parse::<Ipv4Addr>() {
            return self.pods.iter().filter(|pod| pod.address == address).collect();
        }
        let (namespace, name) = match name.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, name),
        };
        let named = |pod: &&OfflinePod| {
            namespace.is_none_or(|namespace| pod.namespace == namespace)
                && (pod.owner.name == name || pod.name == name)
        };
        self.pods.iter().filter(named).collect()
    }

    /// Returns the pod with this address.
    pub fn pod_at(&self, address: IpAddr) -> Option<&OfflinePod> {
        self.pods.iter().find(|pod| IpAddr::V4(pod.address) == address)
    }

    /// Returns a pod of each gateway, with the port to which its Service forwards this port; `None` if its Service has
    /// no such port.
    pub fn gateways(&self, port: u16) -> Vec<(&OfflinePod, Option<u16>)> {
        let mut found: Vec<(&OfflinePod, Option<u16>)> = Vec::new();
        for pod in self.pods.iter().filter(|pod| pod.gateway) {
            let target = self.ports.iter().filter(|of| of.port == port && !of.udp).find_map(|of| {
                let backend = of.backends.iter().find(|(address, _)| *address == pod.address);
                backend.map(|(_, port)| *port)
            });
            if !found.iter().any(|(known, _)| known.owner == pod.owner) {
                found.push((pod, target));
            }
        }
        found
    }

    /// Looks up a host as a program in a pod does, with the search domains of the pod's namespace.
    pub fn look_up(&self, host: &str, pod: &OfflinePod) -> Lookup {
        let host = host.to_ascii_lowercase();
        let absolute = host.ends_with('.');
        let plain = host.trim_end_matches('.').to_owned();
        let searched =
            [format!("{}.svc.{DOMAIN}", pod.namespace), format!("svc.{DOMAIN}"), DOMAIN.to_owned()];
        let mut candidates: Vec<String> = searched.iter().map(|domain| format!("{plain}.{domain}")).collect();
        if absolute {
            candidates.clear();
        }
        let first = plain.matches('.').count() >= DOTS;
        candidates.insert(if first { 0 } else { candidates.len() }, plain.clone());
        let found = candidates.into_iter().find_map(|name| self.addresses(&name, pod));
        found.map_or_else(
            || {
                let entries = &self.objects.entries;
                Lookup::Missing(external::missing_answer(entries, &plain, &pod.namespace, pod.sidecar))
            },
            |(name, addresses)| Lookup::Found(name, addresses),
        )
    }

    fn addresses(&self, name: &str, pod: &OfflinePod) -> Option<(String, Vec<Ipv4Addr>)> {
        let hosts = self.hosts.get(&pod.address);
        let mut name = name.to_owned();
        for _ in 0..MAX_ALIASES {
            match self.names.get(&name).or_else(|| hosts?.get(&name))? {
                Answer::Addresses(found) => return Some((name, found.clone())),
                Answer::Alias(target) => name.clone_from(target),
            }
        }
        None
    }

    /// Returns the backends of an address and port of a Service: the targets of connections without a sidecar. `None`
    /// if no Service has this address and port.
    pub fn backends(&self, address: Ipv4Addr, port: u16) -> Option<&[(Ipv4Addr, u16)]> {
        let is_it = |of: &&VirtualPort| (of.address, of.port, of.udp) == (address, port, false);
        self.ports.iter().find(is_it).map(|of| of.backends.as_slice())
    }
}

impl OfflinePod {
    fn of(pod: &Pod) -> Self {
        Self {
            name: pod.name.clone(),
            namespace: pod.namespace.clone(),
            owner: owner(pod),
            account: pod.account.clone(),
            address: pod.address,
            labels: pod.labels.clone(),
            sidecar: pod.sidecar,
            gateway: pod.gateway.is_some(),
            is_intercepted: pod.intercepts(),
            exceptions: rules::exceptions(&pod.annotations).0,
            node: pod.node(NonZeroU32::MIN),
        }
    }

    /// Returns whether the sidecar intercepts connections from the pod to this address and port.
    pub fn intercepts_outbound(&self, address: Ipv4Addr, port: u16) -> bool {
        self.is_intercepted && self.exceptions.intercept_outbound(address.into(), port)
    }

    /// Returns whether the sidecar intercepts connections to this port of the pod.
    pub fn intercepts_inbound(&self, port: u16) -> bool {
        self.is_intercepted && self.exceptions.intercept_inbound(port)
    }

    /// Returns the proxy's node, as the control plane parses and identifies it; `None` if that fails.
    pub fn proxy(&self, world: &World) -> Option<ProxyNode> {
        let id = self.node["id"].as_str()?;
        let metadata = self.node["metadata"].clone();
        let mut node = ProxyNode::parse(id, metadata, Locality::default()).ok()?;
        node.view.is_authenticated = true;
        world.identify(&mut node, "Kubernetes").ok()?;
        Some(node)
    }
}

fn owner(pod: &Pod) -> ObjectKey {
    let kinds = [Kind::Deployment, Kind::StatefulSet, Kind::DaemonSet, Kind::ReplicaSet, Kind::Job];
    let kind = kinds.into_iter().find(|kind| kind.as_str() == pod.kind).unwrap_or(Kind::Pod);
    ObjectKey { kind, namespace: pod.namespace.clone(), name: pod.workload.clone() }
}

/// Returns the addresses for pods of a network with a prefix of 16 bits. The first two addresses are those of the network
/// and of the bridge.
fn pod_addresses(network: Ipv4Addr) -> impl Iterator<Item = Ipv4Addr> {
    let [a, b, ..] = network.octets();
    (2..u16::MAX).map(move |host| {
        let [c, d] = host.to_be_bytes();
        Ipv4Addr::new(a, b, c, d)
    })
}

/// Returns the pods of the workloads, with the names that they would have in a mesh, and these addresses in order.
fn pods(objects: &Objects, addresses: impl Iterator<Item = Ipv4Addr>) -> Vec<Pod> {
    let mut pods = Vec::new();
    let mut addresses = addresses.take(MAX_PODS);
    for workload in objects.workloads.values() {
        for number in 0..workload.replicas.min(MAX_REPLICAS) {
            let Some(address) = addresses.next() else { return pods };
            let name = pod_name(workload, number);
            let pod = Pod::new(workload, name, address, &objects.namespaces);
            pods.push(pod.started_by(&objects.starts));
        }
    }
    pods
}

/// Returns the pods of a running mesh, and whether they are ready.
fn running_pods(objects: &Objects, state: &State) -> Vec<(Pod, bool)> {
    let pod = |running: &PodState| {
        let key = (running.namespace.clone(), running.kind.clone(), running.workload.clone());
        let workload = objects.workloads.get(&key)?;
        let address = running.address.parse().ok()?;
        let pod = Pod::new(workload, running.name.clone(), address, &objects.namespaces);
        Some((pod, running.ready.is_ok()))
    };
    state.pods.iter().filter_map(pod).collect()
}

/// Returns the pods of connected proxies, and those of workloads that have none.
fn connected_pods(objects: &Objects, proxies: &[String]) -> Vec<(Pod, bool)> {
    let mut found: BTreeMap<(String, String), Pod> = BTreeMap::new();
    for id in proxies {
        // `ROLE~ADDRESS~POD.NAMESPACE~DOMAIN`
        let mut parts = id.split('~').skip(1);
        let (Some(address), Some(name)) = (parts.next(), parts.next()) else { continue };
        let (Ok(address), Some((name, namespace))) = (address.parse(), name.rsplit_once('.')) else {
            continue;
        };
        let workloads = objects.workloads.values().filter(|of| of.namespace == namespace && owns(of, name));
        let Some(workload) = workloads.max_by_key(|of| of.name.len()) else { continue };
        let pod = Pod::new(workload, name.to_owned(), address, &objects.namespaces);
        found.insert((namespace.to_owned(), name.to_owned()), pod.started_by(&objects.starts));
    }
    let known: BTreeSet<ObjectKey> = found.values().map(owner).collect();
    let taken: BTreeSet<Ipv4Addr> = found.values().map(|pod| pod.address).collect();
    let free = pod_addresses(ASSUMED_NETWORK).filter(|address| !taken.contains(address));
    let others = pods(objects, free).into_iter().filter(|pod| !known.contains(&owner(pod)));
    let mut all: Vec<Pod> = found.into_values().chain(others).collect();
    all.sort_by_key(|pod| pod.address);
    all.into_iter().map(|pod| (pod, true)).collect()
}

/// Returns whether a pod with this name may belong to a workload: the names that Kubernetes gives.
fn owns(workload: &Workload, pod: &str) -> bool {
    let Workload { kind, name, .. } = workload;
    if kind == "Pod" {
        return name == pod;
    }
    let Some(rest) = pod.strip_prefix(name.as_str()).and_then(|rest| rest.strip_prefix('-')) else {
        return false;
    };
    let is_suffix = |text: &str| text.len() == SUFFIX && !text.contains('-');
    match kind.as_str() {
        "StatefulSet" => !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()),
        "Deployment" => {
            rest.split_once('-').is_some_and(|(hash, suffix)| !hash.is_empty() && is_suffix(suffix))
        }
        _ => is_suffix(rest),
    }
}

fn pod_name(workload: &Workload, number: u32) -> String {
    let Workload { kind, namespace, name, hash, .. } = workload;
    match kind.as_str() {
        "Pod" => name.clone(),
        "StatefulSet" => format!("{name}-{number}"),
        _ => {
            let suffix = encode_hash(fnv(format!("{namespace}/{name}/{hash}/{number}").as_bytes()), SUFFIX);
            let middle = if kind == "Deployment" { format!("-{hash}") } else { String::new() };
            format!("{name}{middle}-{suffix}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESH: &str = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web, namespace: shop}\nspec:\n  \
                        replicas: 2\n  selector: {matchLabels: {app: web}}\n  template:\n    \
                        metadata: {labels: {app: web}, annotations: {traffic.sidecar.istio.io/excludeOutboundPorts: '5432'}}\n    \
                        spec: {containers: [{name: web, image: i}]}\n---\n\
                        apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\n\
                        spec: {selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080}]}\n---\n\
                        apiVersion: v1\nkind: Service\nmetadata: {name: alias, namespace: shop}\n\
                        spec: {type: ExternalName, externalName: web.shop.svc.cluster.local}\n";

    fn mesh() -> Offline {
        let state = FileState::Text(MESH.to_owned());
        Offline::of(vec![FileChange { layer: 0, path: "mesh.yaml".to_owned(), state }])
    }

    #[test]
    fn pods_have_addresses_names_and_the_origin_of_their_workload() {
        let mesh = mesh();
        assert!(mesh.findings.is_empty(), "{:?}", mesh.findings);
        let pods = mesh.matching("shop/web");
        assert_eq!(pods.iter().map(|pod| pod.address.octets()[3]).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(mesh.matching("10.244.0.3").len(), 1);
        assert_eq!(mesh.matching("other/web").len(), 0);
        let pod = ObjectKey { kind: Kind::Pod, namespace: "shop".to_owned(), name: pods[0].name.clone() };
        assert_eq!(mesh.world.origin(&pod).map(|origin| &*origin.file), Some("mesh.yaml"));
        let node = pods[0].proxy(&mesh.world).unwrap();
        assert_eq!((node.view.canonical_service.as_str(), node.view.is_authenticated), ("web", true));
    }

    /// Returns workload, name and address of each pod of three workloads, two of which have names with the same beginning.
    fn connected(proxies: &[&str]) -> Vec<(String, String, String)> {
        let workload = |kind: &str, name: &str| {
            format!(
                "---\napiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{selector: \
                 {{matchLabels: {{app: web}}}}, template: {{metadata: {{labels: {{app: web}}}}, spec: {{containers: [{{name: \
                 a, image: i}}]}}}}}}\n"
            )
        };
        let text =
            [workload("Deployment", "web"), workload("Deployment", "web-new"), workload("StatefulSet", "db")];
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("mesh.yaml");
        std::fs::write(&file, text.concat()).unwrap();
        let proxies: Vec<String> = proxies.iter().map(|id| (*id).to_owned()).collect();
        let mesh = Offline::connected(&[file], None, &proxies).unwrap();
        let found = mesh.pods.into_iter();
        found.map(|pod| (pod.owner.name, pod.name, pod.address.to_string())).collect()
    }

    #[test]
    fn connected_proxies_give_their_pods_names_and_addresses() {
        let found = connected(&[
            "sidecar~10.1.0.9~web-7d4f9c6b5-x2x4z.shop~shop.svc.cluster.local",
            "sidecar~10.1.0.8~web-new-5c8d-abcde.shop~shop.svc.cluster.local",
            "sidecar~10.1.0.7~web-7d4f9c6b5-abcde.other~other.svc.cluster.local",
            "sidecar~10.1.0.6~web-0.shop~shop.svc.cluster.local",
            "sidecar~fd00::1~web-7d4f9c6b5-abcde.shop~shop.svc.cluster.local",
            "none",
        ]);
        let expected = [
            ("web-new", "web-new-5c8d-abcde", "10.1.0.8"),
            ("web", "web-7d4f9c6b5-x2x4z", "10.1.0.9"),
            ("db", "db-0", "240.0.0.4"),
        ];
        assert_eq!(found, expected.map(|(owner, pod, at)| (owner.to_owned(), pod.to_owned(), at.to_owned())));
    }

    /// The addresses of the connected pods are those of the pods of files, and the first ones of the assumed pods.
    #[test]
    fn assumed_pods_have_no_address_of_a_connected_pod() {
        for (network, assumed) in
            [([10, 244], ["240.0.0.3", "240.0.0.4"]), ([240, 0], ["240.0.0.6", "240.0.0.7"])]
        {
            let [a, b] = network;
            let ids = [2, 3, 4].map(|last| {
                format!("sidecar~{a}.{b}.0.{last}~web-7d4f9c6b5-x2x4{last}.shop~shop.svc.cluster.local")
            });
            let found = connected(&ids.each_ref().map(String::as_str));
            let of = |workload: &str| -> Vec<&str> {
                let pods = found.iter().filter(|(owner, ..)| owner == workload);
                pods.map(|(.., address)| address.as_str()).collect()
            };
            let expected = [2, 3, 4].map(|last| format!("{a}.{b}.0.{last}"));
            assert_eq!(of("web"), expected, "{found:?}");
            assert_eq!([of("web-new"), of("db")].concat(), assumed, "{found:?}");
        }
    }

    #[test]
    fn names_are_looked_up_with_search_domains_and_aliases() {
        let mesh = mesh();
        let pod = &mesh.pods[0];
        let Lookup::Found(name, addresses) = mesh.look_up("WEB", pod) else { panic!() };
        assert_eq!(name, "web.shop.svc.cluster.local");
        assert_eq!(mesh.look_up("alias.shop", pod), Lookup::Found(name, addresses.clone()));
        assert_eq!(mesh.look_up("web.", pod), Lookup::Missing(None));
        assert_eq!(mesh.backends(addresses[0], 80).unwrap().len(), 2);
        assert_eq!(mesh.backends(addresses[0], 81), None);
    }

    #[test]
    fn annotations_decide_what_is_intercepted() {
        let mesh = mesh();
        let pod = &mesh.pods[0];
        assert!(pod.intercepts_outbound([10, 96, 0, 1].into(), 80));
        assert!(!pod.intercepts_outbound([10, 96, 0, 1].into(), 5432));
        assert!(pod.intercepts_inbound(8080) && !pod.intercepts_inbound(15020));
    }
}
