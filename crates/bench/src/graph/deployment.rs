//! A service graph as a mesh to measure: the objects of the graph, a client pod, and policies.

use std::{collections::BTreeMap, fmt::Write as _, path::Path};

use anyhow::{Context as _, ensure};
use clap::Parser as _;
use serde::{Deserialize, Serialize};

use super::{
    format,
    generate::{self, GraphShape},
    kubernetes::{self, KubernetesArgs, PORT},
    model::{GraphProtocol, GraphService, ServiceGraph},
    write::scalar,
};

/// Namespace of the client, and of services that name none.
const NAMESPACE: &str = "service-graph";
/// Name of the client's Deployment and ServiceAccount.
pub(crate) const CLIENT: &str = "load-client";

/// Policies of a mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MeshPolicies {
    /// No policy: mutual TLS is used where both sides support it, and every request is allowed.
    #[default]
    Permissive,
    /// Mutual TLS is required. A service allows the services that call it in the graph, and denies all others.
    Restricted,
}

/// Objects of a mesh that runs a graph.
#[derive(Clone, Debug)]
pub(crate) struct GraphDeployment {
    /// Objects as YAML.
    pub(crate) objects: String,
    /// URL of the entry point.
    pub(crate) url: String,
    /// Name of the file, or arguments, from which it was made.
    pub(crate) source: String,
    /// Deployments, as NAMESPACE/NAME.
    pub(crate) workloads: Vec<String>,
    /// Number of pods, with the client.
    pub(crate) pods: u64,
    /// Mean number of requests between pods for one request of the client.
    pub(crate) requests: f64,
}

/// Arguments of `skysail bench graph generate`.
#[derive(Debug, clap::Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Generated {
    #[command(subcommand)]
    shape: GraphShape,
}

impl GraphDeployment {
    /// Returns the deployment of a graph: that in a file, whose name ends in `.yaml`, or a generated one. Other values are
    /// the arguments of `skysail bench graph generate`.
    ///
    /// # Errors
    /// The file is not a valid graph, or the arguments are not valid.
    pub(crate) fn new(graph: &str, policies: MeshPolicies) -> anyhow::Result<Self> {
        if graph.ends_with(".yaml") {
            return Self::of(format::read(Path::new(graph))?, policies, graph);
        }
        let parsed = Generated::try_parse_from(graph.split_whitespace()).map_err(|error| {
            let text = error.to_string();
            anyhow::anyhow!("{}", text.lines().next().unwrap_or_default().trim_start_matches("error: "))
        })?;
        Self::of(generate::graph(&parsed.shape)?, policies, graph)
    }

    /// Returns the names of the graph's services.
    pub(crate) fn services(&self) -> impl Iterator<Item = &str> {
        self.workloads
            .iter()
            .filter_map(|workload| workload.rsplit('/').next())
            .filter(|name| *name != CLIENT)
    }

    fn of(mut graph: ServiceGraph, policies: MeshPolicies, source: &str) -> anyhow::Result<Self> {
        for service in &mut graph.services {
            service.namespace.get_or_insert_with(|| NAMESPACE.to_owned());
        }
        let mut entries = graph.services.iter().filter(|service| service.is_entry_point);
        let entry = entries.next().context("the graph has no entry point")?;
        ensure!(entries.next().is_none(), "the graph has several entry points; the client sends to one");
        ensure!(
            entry.protocol == GraphProtocol::Http,
            "the client sends HTTP/1.1, and the entry point has the type grpc"
        );
        let url = format!("http://{}.{}:{PORT}/", entry.name, namespace(entry));
        let workload = |name: &str, of: &str| format!("{of}/{name}");
        let mut workloads = vec![workload(CLIENT, NAMESPACE)];
        workloads.extend(graph.services.iter().map(|service| workload(&service.name, namespace(service))));
        let pods = 1 + graph.services.iter().map(|service| u64::from(service.replicas)).sum::<u64>();
        let requests = graph.requests().iter().sum();
        let (mut objects, _) = kubernetes::convert(graph.clone(), &KubernetesArgs::of(NAMESPACE))?;
        client(&mut objects);
        if policies == MeshPolicies::Restricted {
            restrict(&mut objects, &graph);
        }
        Ok(Self { objects, url, source: source.to_owned(), workloads, pods, requests })
    }
}

fn namespace(service: &GraphService) -> &str {
    service.namespace.as_deref().unwrap_or(NAMESPACE)
}

/// Writes the client: a pod in whose network the load generator runs.
fn client(objects: &mut String) {
    let metadata = format!("metadata:\n  name: {CLIENT}\n  namespace: {NAMESPACE}\n");
    // Writing to a String cannot fail.
    let _ = write!(
        objects,
        "---\napiVersion: v1\nkind: ServiceAccount\n{metadata}\
         ---\napiVersion: apps/v1\nkind: Deployment\n{metadata}spec:\n  replicas: 1\n\
         \x20 selector:\n    matchLabels:\n      app: {CLIENT}\n\
         \x20 template:\n    metadata:\n      labels:\n        app: {CLIENT}\n    spec:\n      serviceAccountName: {CLIENT}\n\
         \x20     containers:\n      - name: client\n        image: {CLIENT}:1\n        ports:\n        - containerPort: {PORT}\n"
    );
}

/// Writes policies: mutual TLS is required, and each service allows its callers only.
fn restrict(objects: &mut String, graph: &ServiceGraph) {
    let identity = |of: &str, account: &str| format!("cluster.local/ns/{of}/sa/{account}");
    let mut callers: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for service in &graph.services {
        for call in service.calls() {
            let caller = identity(namespace(service), &service.name);
            let of_service = callers.entry(&call.service).or_default();
            if !of_service.contains(&caller) {
                of_service.push(caller);
            }
        }
        if service.is_entry_point {
            callers.entry(&service.name).or_default().push(identity(NAMESPACE, CLIENT));
        }
    }
    let _ = write!(
        objects,
        "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata:\n  name: default\n\
         \x20 namespace: istio-system\nspec:\n  mtls:\n    mode: STRICT\n\
         ---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata:\n  name: deny-all\n\
         \x20 namespace: istio-system\nspec: {{}}\n"
    );
    for service in &graph.services {
        let principals = callers.get(service.name.as_str()).map(|of| of.join(", ")).unwrap_or_default();
        if principals.is_empty() {
            continue;
        }
        let _ = write!(
            objects,
            "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata:\n  name: callers-of-{name}\n\
             \x20 namespace: {namespace}\nspec:\n  selector:\n    matchLabels:\n      app: {label}\n  action: ALLOW\n\
             \x20 rules:\n  - from:\n    - source:\n        principals: [{principals}]\n",
            name = service.name,
            label = scalar(&service.name),
            namespace = namespace(service),
        );
    }
}
