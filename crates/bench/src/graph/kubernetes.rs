//! Converts a service graph to Kubernetes objects: namespaces with injection, a ConfigMap with the graph, and for each
//! service a ServiceAccount, a Service, a Deployment of the mock service, and authorization policies.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    path::PathBuf,
};

use anyhow::ensure;

use super::{
    model::{GraphService, ServiceGraph},
    write::{self, scalar},
};

/// Port of the mock service, which isotope's host names have.
pub(super) const PORT: u16 = 8_080;
/// Port of a pod's loopback at which its mock service can be changed.
pub(crate) const CONTROL_PORT: u16 = 8_081;
/// Maximum size of a ConfigMap in bytes.
const MAX_CONFIG_MAP: usize = 1 << 20;
/// Folder of the graph in the container.
const FOLDER: &str = "/etc/service-graph";
/// Key of the graph in the ConfigMap, and its file.
const FILE: &str = "service-graph.yaml";
/// Image for which `skysail up` runs the mock service.
const IMAGE: &str = "skysail/graph:1";
/// Labels that the objects of a service have already.
const OWN_LABELS: [&str; 2] = ["app", "version"];

/// Settings of the conversion.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct KubernetesArgs {
    /// Service graph (YAML).
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,

    /// Namespace of the services that name none.
    #[arg(long, value_name = "NAME", default_value = "service-graph")]
    namespace: String,

    /// Image of the mock service. `skysail up` runs its own program for the default.
    #[arg(long, value_name = "IMAGE", default_value = IMAGE)]
    image: String,

    /// Convert only the services of this cluster.
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
}

impl KubernetesArgs {
    /// Returns the settings of a conversion for `skysail up`.
    pub(super) fn of(namespace: &str) -> Self {
        let file = PathBuf::new();
        Self { file, namespace: namespace.to_owned(), image: IMAGE.to_owned(), cluster: None }
    }
}

/// Returns the objects as YAML, and warnings.
pub(super) fn convert(
    mut graph: ServiceGraph,
    args: &KubernetesArgs,
) -> anyhow::Result<(String, Vec<String>)> {
    let mut warnings = Vec::new();
    // The mock service of another namespace needs to know it for the names of hosts.
    for service in &mut graph.services {
        service.namespace.get_or_insert_with(|| args.namespace.clone());
    }
    let clusters: BTreeSet<&str> =
        graph.services.iter().filter_map(|service| service.cluster.as_deref()).collect();
    let names = clusters.iter().copied().collect::<Vec<_>>().join(", ");
    if args.cluster.is_none() && clusters.len() > 1 {
        warnings.push(format!(
            "the services name the clusters {names}, and all are converted for one; --cluster NAME selects one"
        ));
    }
    let is_selected = |service: &&GraphService| args.cluster.is_none() || service.cluster == args.cluster;
    let services: Vec<&GraphService> = graph.services.iter().filter(is_selected).collect();
    ensure!(
        !services.is_empty(),
        "no service has the cluster of --cluster {}; the clusters of the graph: {names}",
        args.cluster.as_deref().unwrap_or_default()
    );
    let config = write::yaml(&graph);
    ensure!(
        config.len() <= MAX_CONFIG_MAP,
        "the graph has {} bytes, and a ConfigMap at most {MAX_CONFIG_MAP}; convert a smaller graph",
        config.len()
    );
    let mut text = String::new();
    let namespaces: BTreeSet<&str> =
        services.iter().filter_map(|service| service.namespace.as_deref()).collect();
    for namespace in namespaces {
        let namespace = scalar(namespace);
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: {namespace}\n  labels:\n    istio-injection: enabled\n"
        );
        let _ = write!(
            text,
            "---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: service-graph\n  namespace: {namespace}\n\
             data:\n  {FILE}: |\n"
        );
        config.lines().for_each(|line| text.push_str(&format!("    {line}\n")));
    }
    for service in services {
        objects(&mut text, service, args);
        for label in OWN_LABELS.iter().filter(|label| service.labels.contains_key(**label)) {
            warnings.push(format!(
                "service {}: the label {label} of the graph has no effect: the conversion sets it; rename it",
                service.name
            ));
        }
    }
    Ok((text, warnings))
}

/// Writes the objects of a service.
fn objects(text: &mut String, service: &GraphService, args: &KubernetesArgs) {
    let name = scalar(&service.name);
    let namespace = scalar(service.namespace.as_deref().unwrap_or(&args.namespace));
    let labels = |indent: &str| {
        let own = BTreeMap::from([("app", service.name.as_str()), ("version", "v1")]);
        let more = service.labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let all: BTreeMap<&str, &str> = more.chain(own).collect();
        all.iter()
            .map(|(key, value)| format!("{indent}{}: {}\n", scalar(key), scalar(value)))
            .collect::<String>()
    };
    let metadata =
        format!("metadata:\n  name: {name}\n  namespace: {namespace}\n  labels:\n{}", labels("    "));
    let port = service.protocol.name();
    let _ = write!(text, "---\napiVersion: v1\nkind: ServiceAccount\n{metadata}");
    let _ = write!(
        text,
        "---\napiVersion: v1\nkind: Service\n{metadata}spec:\n  selector:\n    app: {name}\n  ports:\n\
         \x20 - name: {port}\n    port: {PORT}\n    targetPort: {PORT}\n"
    );
    let _ = write!(
        text,
        "---\napiVersion: apps/v1\nkind: Deployment\n{metadata}spec:\n  replicas: {replicas}\n\
         \x20 selector:\n    matchLabels:\n      app: {name}\n  template:\n    metadata:\n      labels:\n{pod_labels}\
         \x20   spec:\n      serviceAccountName: {name}\n      containers:\n      - name: mock-service\n\
         \x20       image: {image}\n        args: [--service, {name}, --graph, {FOLDER}/{FILE}, \
         --control, \"127.0.0.1:{CONTROL_PORT}\"]\n\
         \x20       ports:\n        - name: {port}\n          containerPort: {PORT}\n\
         \x20       readinessProbe:\n          httpGet:\n            path: /metrics\n            port: {PORT}\n\
         \x20         periodSeconds: 2\n\
         \x20       volumeMounts:\n        - name: service-graph\n          mountPath: {FOLDER}\n\
         \x20     volumes:\n      - name: service-graph\n        configMap:\n          name: service-graph\n",
        replicas = service.replicas,
        pod_labels = labels("        "),
        image = scalar(&args.image),
    );
    for number in 1..=service.policies {
        policy(text, service, &namespace, &format!("none-{number}"), Some(number));
    }
    if service.policies > 0 {
        policy(text, service, &namespace, "all", None);
    }
}

/// Writes a policy that allows requests: those of an identity that no service has, or all.
fn policy(text: &mut String, service: &GraphService, namespace: &str, suffix: &str, number: Option<u32>) {
    let rule = match number {
        Some(number) => {
            format!("- from:\n    - source:\n        principals: [cluster.local/ns/none/sa/none-{number}]\n")
        }
        None => "- {}\n".to_owned(),
    };
    let _ = write!(
        text,
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata:\n  name: {name}-{suffix}\n\
         \x20 namespace: {namespace}\nspec:\n  selector:\n    matchLabels:\n      app: {app}\n  action: ALLOW\n  rules:\n  {rule}",
        name = service.name,
        app = scalar(&service.name),
    );
}
