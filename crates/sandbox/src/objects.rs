//! What the user wrote, as far as pods need it: workloads, services, hosts of ServiceEntries, texts of ConfigMaps and Secrets, labels of namespaces.

mod values;
mod volume;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use skysail_model::{
    Kind, ObjectKey,
    api::{ServiceEntry, mesh_config},
};

pub(crate) use values::{Data, Values};
pub(crate) use volume::{Claim, Downward, KeyToPath, Projection, Source, TokenFile, Volume, VolumeMount};

/// Labels or annotations.
pub(crate) type Labels = BTreeMap<String, String>;

/// Namespace and name.
pub(crate) type Key = (String, String);

/// The ServiceEntries by namespace and name.
pub(crate) type Entries = BTreeMap<Key, ServiceEntry>;

/// The objects of all files.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Objects {
    /// By kind, namespace and name.
    pub(crate) workloads: BTreeMap<(String, String, String), Workload>,
    pub(crate) services: BTreeMap<Key, Service>,
    pub(crate) entries: Entries,
    /// Labels by namespace.
    pub(crate) namespaces: BTreeMap<String, Labels>,
    /// What ConfigMaps and Secrets hold, by kind, namespace and name.
    pub(crate) values: BTreeMap<(String, String, String), Values>,
}

/// Something that makes pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Workload {
    pub(crate) kind: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) replicas: u32,
    /// Pods of a Job that run at the same time (`spec.parallelism`).
    pub(crate) parallelism: u32,
    /// Failures of a Job's pod before the Job has failed (`spec.backoffLimit`).
    pub(crate) backoff_limit: u32,
    /// Names of a StatefulSet's `volumeClaimTemplates`: each pod has a claim of its own.
    pub(crate) claims: Vec<String>,
    pub(crate) template: Template,
    /// Changes when the template does.
    pub(crate) hash: String,
}

/// What each pod of a workload is like.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Template {
    pub(crate) metadata: Metadata,
    pub(crate) spec: PodSpec,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Metadata {
    pub(crate) name: String,
    pub(crate) namespace: Option<String>,
    pub(crate) labels: Option<Labels>,
    pub(crate) annotations: Option<Labels>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodSpec {
    pub(crate) service_account_name: Option<String>,
    pub(crate) containers: Vec<Container>,
    pub(crate) init_containers: Vec<Container>,
    pub(crate) hostname: Option<String>,
    pub(crate) subdomain: Option<String>,
    pub(crate) host_network: bool,
    pub(crate) termination_grace_period_seconds: Option<u64>,
    pub(crate) restart_policy: Option<String>,
    pub(crate) volumes: Vec<Volume>,
    /// What is not used here; see [`crate::unsupported`].
    #[serde(flatten)]
    pub(crate) other: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Container {
    pub(crate) name: String,
    pub(crate) image: String,
    pub(crate) command: Vec<String>,
    pub(crate) args: Vec<String>,
    pub(crate) env: Vec<Variable>,
    pub(crate) env_from: Vec<Value>,
    pub(crate) ports: Vec<ContainerPort>,
    pub(crate) readiness_probe: Option<Probe>,
    pub(crate) liveness_probe: Option<Probe>,
    pub(crate) startup_probe: Option<Probe>,
    pub(crate) restart_policy: Option<String>,
    pub(crate) volume_mounts: Vec<VolumeMount>,
    pub(crate) working_dir: Option<String>,
    /// What is not used here; see [`crate::unsupported`].
    #[serde(flatten)]
    pub(crate) other: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) value: Option<String>,
    pub(crate) value_from: Option<Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ContainerPort {
    pub(crate) name: Option<String>,
    pub(crate) container_port: u16,
    pub(crate) protocol: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Probe {
    pub(crate) http_get: Option<ProbeTarget>,
    pub(crate) tcp_socket: Option<ProbeTarget>,
    pub(crate) grpc: Option<GrpcTarget>,
    pub(crate) exec: Option<Exec>,
    pub(crate) period_seconds: Option<u64>,
    pub(crate) timeout_seconds: Option<u64>,
    pub(crate) failure_threshold: Option<u32>,
    pub(crate) initial_delay_seconds: Option<u64>,
    pub(crate) termination_grace_period_seconds: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct ProbeTarget {
    #[serde(default)]
    pub(crate) path: Option<String>,
    pub(crate) port: Port,
    #[serde(default)]
    pub(crate) scheme: Option<String>,
}

/// A gRPC server's health service.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct GrpcTarget {
    pub(crate) port: u16,
    #[serde(default)]
    pub(crate) service: Option<String>,
}

/// A command that succeeds or not.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Exec {
    pub(crate) command: Vec<String>,
}

impl ProbeTarget {
    pub(crate) fn is_https(&self) -> bool {
        self.scheme.as_deref() == Some("HTTPS")
    }
}

/// A port by number or by the name a container gives it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Port {
    Number(u16),
    Name(String),
}

/// A service, and the object as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Service {
    pub(crate) spec: ServiceSpec,
    pub(crate) object: Value,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ServiceSpec {
    #[serde(rename = "clusterIP")]
    pub(crate) cluster_ip: Option<String>,
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) external_name: Option<String>,
    pub(crate) selector: Option<Labels>,
    pub(crate) ports: Vec<ServicePort>,
    pub(crate) publish_not_ready_addresses: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ServicePort {
    pub(crate) name: Option<String>,
    pub(crate) app_protocol: Option<String>,
    pub(crate) port: u16,
    pub(crate) target_port: Option<Port>,
    pub(crate) node_port: Option<u16>,
    pub(crate) protocol: Option<String>,
}

impl ServicePort {
    pub(crate) fn is_tcp(&self) -> bool {
        self.protocol.as_deref().is_none_or(|protocol| protocol == "TCP")
    }

    /// The scheme of its URLs, by the rules of Istio's protocol selection; none if it is declared not to speak HTTP.
    pub(crate) fn scheme(&self) -> Option<String> {
        let named = self.name.as_deref().and_then(|name| name.split('-').next());
        match self.app_protocol.as_deref().or(named) {
            Some("https") => Some("https".to_owned()),
            Some("tcp" | "tls" | "grpc" | "mongo" | "mysql" | "redis") => None,
            _ => Some("http".to_owned()),
        }
    }
}

impl Port {
    /// The number, by these containers' names.
    pub(crate) fn resolve(&self, containers: &[Container]) -> Option<u16> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Name(name) => {
                let mut ports = containers.iter().flat_map(|container| &container.ports);
                ports.find(|port| port.name.as_ref() == Some(name)).map(|port| port.container_port)
            }
        }
    }
}

/// An object that pods need, as far as they need it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    Workload(Box<Workload>),
    Service(Service),
    Entry(Box<ServiceEntry>),
    /// The labels of a namespace.
    Namespace(Labels),
    /// What a ConfigMap or a Secret holds.
    Values(Values),
}

impl Item {
    /// Reads an object that the model has accepted; `None` if pods do not need it.
    pub(crate) fn read(key: &ObjectKey, object: &Value) -> Result<Option<Self>, String> {
        Ok(Some(match key.kind {
            Kind::Namespace => Self::Namespace(field(&object["metadata"], "labels")?),
            Kind::ConfigMap | Kind::Secret => Self::Values(Values::read(object)?),
            Kind::Service => Self::Service(Service { spec: field(object, "spec")?, object: object.clone() }),
            Kind::ServiceEntry => Self::Entry(Box::new(field(object, "spec")?)),
            Kind::Pod
            | Kind::Deployment
            | Kind::StatefulSet
            | Kind::DaemonSet
            | Kind::ReplicaSet
            | Kind::Job => Self::Workload(Box::new(workload(object, key)?)),
            _ => return Ok(None),
        }))
    }
}

impl Objects {
    /// Adds an object, in the place of one of the same key.
    pub(crate) fn add(&mut self, key: &ObjectKey, item: &Item) {
        let (kind, namespace, name) = (key.kind.to_string(), key.namespace.clone(), key.name.clone());
        match item.clone() {
            Item::Workload(workload) => _ = self.workloads.insert((namespace, kind, name), *workload),
            Item::Service(service) => _ = self.services.insert((namespace, name), service),
            Item::Entry(entry) => _ = self.entries.insert((namespace, name), *entry),
            Item::Namespace(labels) => _ = self.namespaces.insert(name, labels),
            Item::Values(values) => _ = self.values.insert((kind, namespace, name), values),
        }
    }

    /// Gives ServiceEntries without `exportTo` the visibility that the mesh configuration says (`defaultServiceExportTo`).
    pub(crate) fn complete_visibility(&mut self) {
        let (kind, namespace, name) =
            (Kind::ConfigMap.to_string(), mesh_config::NAMESPACE.to_owned(), mesh_config::NAME.to_owned());
        let values = self.values.get(&(kind, namespace, name));
        let text = values.and_then(|values| str::from_utf8(values.data.get(mesh_config::KEY)?).ok());
        let Some(mesh) = text.and_then(skysail_model::mesh_config) else { return };
        for entry in self.entries.values_mut().filter(|entry| entry.export_to.is_empty()) {
            entry.export_to.clone_from(&mesh.default_service_export_to);
        }
    }
}

/// A claim that a StatefulSet makes for each of its pods.
#[derive(Deserialize)]
struct Claimed {
    metadata: Metadata,
}

fn workload(object: &Value, key: &ObjectKey) -> Result<Workload, String> {
    let source = if key.kind == Kind::Pod { object } else { &object["spec"]["template"] };
    let [metadata, spec] = ["metadata", "spec"].map(|name| json!({ name: without_nulls(&source[name]) }));
    let template = Template { metadata: field(&metadata, "metadata")?, spec: field(&spec, "spec")? };
    let number = |name: &str, default: u32| match &object["spec"][name] {
        Value::Null => Ok(default),
        number => number
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| format!("spec.{name}: {number} is not a number of pods")),
    };
    let replicas = match key.kind {
        Kind::Pod | Kind::DaemonSet => 1,
        Kind::Job => number("completions", number("parallelism", 1)?)?,
        _ => number("replicas", 1)?,
    };
    Ok(Workload {
        kind: key.kind.to_string(),
        namespace: key.namespace.clone(),
        name: key.name.clone(),
        replicas,
        parallelism: number("parallelism", 1)?,
        backoff_limit: number("backoffLimit", 6)?,
        claims: field::<Vec<Claimed>>(&object["spec"], "volumeClaimTemplates")?
            .into_iter()
            .map(|claim| claim.metadata.name)
            .collect(),
        template,
        hash: letters(fnv(source.to_string().as_bytes()), 10),
    })
}

/// A value without fields that are null: to the API server they are absent.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let set = fields.iter().filter(|(_, value)| !value.is_null());
            set.map(|(name, value)| (name.clone(), without_nulls(value))).collect()
        }
        Value::Array(items) => items.iter().map(without_nulls).collect(),
        value => value.clone(),
    }
}

fn field<T: for<'a> Deserialize<'a> + Default>(object: &Value, name: &str) -> Result<T, String> {
    match &object[name] {
        Value::Null => Ok(T::default()),
        value => T::deserialize(value).map_err(|error| format!("{name}: {error}")),
    }
}

/// The 64-bit FNV-1a hash: the same in every run and on every machine, unlike the standard library's.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A number as Kubernetes writes hashes in names: with no letters that could make words.
pub(crate) fn letters(mut number: u64, length: usize) -> String {
    const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut text = String::new();
    for _ in 0..length {
        text.push(char::from(ALPHABET[(number % 27) as usize]));
        number /= 27;
    }
    text
}
