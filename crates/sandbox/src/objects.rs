//! Objects as far as pods need them: workloads, Services, hosts of ServiceEntries, content of ConfigMaps and Secrets,
//! labels of Namespaces, settings of sidecars.

mod values;
mod volume;

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use skysail_model::{
    Kind, Manifest, Object, ObjectKey,
    api::{
        self as model, ConfigMap, MeshConfig, Protocol, ProxyConfig, ServiceEntry,
        proxy_config::{StartSettings, StartSources},
    },
};

pub(crate) use values::{Data, Values};
pub(crate) use volume::{Claim, Downward, KeyToPath, Projection, Source, TokenFile, Volume, VolumeMount};

/// Labels or annotations.
pub(crate) type Labels = BTreeMap<String, String>;

/// Namespace and name.
pub(crate) type Key = (String, String);

/// ServiceEntries by namespace and name.
pub(crate) type Entries = BTreeMap<Key, ServiceEntry>;

/// Objects of all files.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Objects {
    /// Workloads by namespace, kind and name.
    pub(crate) workloads: BTreeMap<(String, String, String), Workload>,
    pub(crate) services: BTreeMap<Key, Service>,
    pub(crate) entries: Entries,
    /// Labels of Namespaces, by name.
    pub(crate) namespaces: BTreeMap<String, Labels>,
    /// Content of ConfigMaps and Secrets, by kind, namespace and name.
    pub(crate) values: BTreeMap<(String, String, String), Values>,
    /// `defaultServiceExportTo` of the mesh configuration.
    pub(crate) default_export_to: Vec<String>,
    /// ProxyConfigs with their ages.
    pub(crate) proxy_configs: BTreeMap<Key, (Age, ProxyConfig)>,
    /// Settings with which sidecars start.
    pub(crate) starts: StartSources,
}

/// Sort key of an object by age, as in the control plane: whether it has no `creationTimestamp`, this time, and its
/// place in the files.
type Age = (bool, i64, String, u32);

/// An object that creates pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Workload {
    pub(crate) kind: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Service account of its pods; `default` if unset.
    pub(crate) account: String,
    /// Number of its pods; of a Job, `spec.completions`.
    pub(crate) replicas: u32,
    /// Number of a Job's pods that run at the same time (`spec.parallelism`).
    pub(crate) parallelism: u32,
    /// Maximum number of restarts of a Job's program after failures (`spec.backoffLimit`).
    pub(crate) backoff_limit: u32,
    /// Names of a StatefulSet's `volumeClaimTemplates`: each pod has a claim of its own.
    pub(crate) claims: Vec<String>,
    pub(crate) template: Template,
    /// Hash of the template.
    pub(crate) hash: String,
}

/// Pod template of a workload.
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
    pub(crate) containers: Vec<Container>,
    pub(crate) init_containers: Vec<Container>,
    /// Name of the Kubernetes node that the pod pretends to run on.
    pub(crate) node_name: Option<String>,
    pub(crate) hostname: Option<String>,
    pub(crate) subdomain: Option<String>,
    pub(crate) host_network: bool,
    pub(crate) termination_grace_period_seconds: Option<u64>,
    pub(crate) restart_policy: Option<String>,
    pub(crate) volumes: Vec<Volume>,
    /// Fields that are not used; see [`crate::unsupported`].
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
    /// Fields that are not used; see [`crate::unsupported`].
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

/// Health service of a gRPC server.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct GrpcTarget {
    pub(crate) port: u16,
    #[serde(default)]
    pub(crate) service: Option<String>,
}

/// Command of a probe.
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

/// A port by number, or by its name in a container.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Port {
    Number(u16),
    Name(String),
}

/// A Service. `spec` has the fields that the mesh reads; the other fields are those that a cluster's nodes read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Service {
    pub(crate) spec: model::Service,
    /// `spec.type`.
    pub(crate) kind: Option<String>,
    pub(crate) ports: Vec<ServicePort>,
    /// The object as written.
    pub(crate) object: Value,
}

/// A port of a Service. `spec` has the fields that the mesh reads.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ServicePort {
    pub(crate) spec: model::ServicePort,
    /// `nodePort`; `None` if unset or 0.
    pub(crate) node_port: Option<u16>,
    /// `protocol`; `TCP` if unset.
    pub(crate) transport: String,
}

impl Service {
    fn read(spec: model::Service, written: &Value) -> Self {
        let fields = written["spec"]["ports"].as_array().into_iter().flatten();
        let ports =
            spec.ports.iter().zip(fields).map(|(port, written)| ServicePort::read(port.clone(), written));
        let kind = written["spec"]["type"].as_str().map(str::to_owned);
        Self { kind, ports: ports.collect(), spec, object: written.clone() }
    }
}

impl ServicePort {
    fn read(spec: model::ServicePort, written: &Value) -> Self {
        let node_port = written["nodePort"].as_u64().and_then(|port| u16::try_from(port).ok());
        let transport = written["protocol"].as_str().unwrap_or("TCP").to_owned();
        Self { spec, node_port: node_port.filter(|port| *port != 0), transport }
    }

    pub(crate) fn is_tcp(&self) -> bool {
        self.transport == "TCP"
    }

    /// Returns the scheme of its URLs; `None` if its declared protocol is not HTTP.
    pub(crate) fn scheme(&self) -> Option<String> {
        match self.spec.protocol {
            Protocol::Https => Some("https".to_owned()),
            Protocol::Tcp | Protocol::Mongo | Protocol::Tls | Protocol::Grpc | Protocol::Udp => None,
            Protocol::Http | Protocol::Http2 | Protocol::GrpcWeb | Protocol::Unknown => {
                Some("http".to_owned())
            }
        }
    }
}

impl Port {
    /// Returns the number, given the containers that may declare the name.
    pub(crate) fn resolve(&self, containers: &[Container]) -> Option<u16> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Name(name) => port_named(name, containers),
        }
    }
}

/// Returns the number of the containers' port of this name.
pub(crate) fn port_named(name: &str, containers: &[Container]) -> Option<u16> {
    let mut ports = containers.iter().flat_map(|container| &container.ports);
    ports.find(|port| port.name.as_deref() == Some(name)).map(|port| port.container_port)
}

/// Returns an image's name without tag and digest.
pub(crate) fn repository(image: &str) -> &str {
    let image = image.split('@').next().unwrap_or(image);
    match image.rsplit_once(':') {
        // A colon before a slash belongs to the registry's port.
        Some((name, tag)) if !tag.contains('/') => name,
        _ => image,
    }
}

/// An object, reduced to the fields that pods need.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item {
    Workload(Box<Workload>),
    Service(Service),
    Entry(Box<ServiceEntry>),
    /// Labels of a Namespace.
    Namespace(Labels),
    /// Content of a ConfigMap or a Secret.
    Values(Values),
    /// Content of the mesh configuration's ConfigMap, and its settings for pods.
    MeshConfig(Values, Box<MeshSettings>),
    /// A ProxyConfig with its age.
    ProxyConfig(Box<(Age, ProxyConfig)>),
    /// Probe of a WorkloadGroup, as written.
    GroupProbe(Box<Value>),
}

/// Settings of the mesh configuration that pods need.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MeshSettings {
    /// `defaultServiceExportTo`.
    export_to: Vec<String>,
    root_namespace: String,
    /// Settings with which sidecars start.
    start: StartSettings,
}

impl Item {
    /// Reads an object that the model has accepted. Returns `None` if pods do not need it.
    pub(crate) fn read(manifest: &Manifest) -> Result<Option<Self>, String> {
        let Manifest { object, written, origin } = manifest;
        let account = match object {
            Object::Namespace(namespace) => {
                return Ok(Some(Self::Namespace(Labels::clone(&namespace.meta.labels))));
            }
            Object::ConfigMap(map) => {
                let values = Values::read(written)?;
                return Ok(Some(match &map.spec {
                    ConfigMap::Mesh(mesh) => Self::MeshConfig(values, Box::new(MeshSettings::of(mesh))),
                    _ => Self::Values(values),
                }));
            }
            Object::Secret(_) => return Ok(Some(Self::Values(Values::read(written)?))),
            Object::Service(service) => {
                return Ok(Some(Self::Service(Service::read(service.spec.clone(), written))));
            }
            Object::ServiceEntry(entry) => return Ok(Some(Self::Entry(Box::new(entry.spec.clone())))),
            Object::ProxyConfig(config) => {
                let created = config.meta.created;
                let age =
                    (created.is_none(), created.unwrap_or_default(), origin.file.to_string(), origin.line);
                return Ok(Some(Self::ProxyConfig(Box::new((age, config.spec.clone())))));
            }
            Object::WorkloadGroup(group) => {
                let probe = group.spec.probe.as_ref().map(|_| without_nulls(&written["spec"]["probe"]));
                return Ok(probe.map(Box::new).map(Self::GroupProbe));
            }
            Object::Pod(pod) => &pod.spec.service_account,
            Object::Template(template) if template.spec.kind != Kind::CronJob => {
                &template.spec.service_account
            }
            _ => return Ok(None),
        };
        let workload = workload(&object.key(), account.clone(), written)?;
        Ok(Some(Self::Workload(Box::new(workload))))
    }
}

impl MeshSettings {
    fn of(mesh: &MeshConfig) -> Self {
        Self {
            export_to: mesh.default_service_export_to.clone(),
            root_namespace: mesh.root_namespace.clone(),
            start: StartSettings {
                mesh_id: mesh.mesh_id().to_owned(),
                merges_metrics: Some(mesh.enable_prometheus_merge),
                ..mesh.default_config.start()
            },
        }
    }
}

impl Objects {
    /// Adds an object, and replaces one with the same key.
    pub(crate) fn add(&mut self, key: &ObjectKey, item: &Item) {
        let (kind, namespace, name) = (key.kind.to_string(), key.namespace.clone(), key.name.clone());
        match item.clone() {
            Item::Workload(workload) => _ = self.workloads.insert((namespace, kind, name), *workload),
            Item::Service(service) => _ = self.services.insert((namespace, name), service),
            Item::Entry(entry) => _ = self.entries.insert((namespace, name), *entry),
            Item::Namespace(labels) => _ = self.namespaces.insert(name, labels),
            Item::Values(values) => _ = self.values.insert((kind, namespace, name), values),
            Item::MeshConfig(values, settings) => {
                self.values.insert((kind, namespace, name), values);
                self.default_export_to = settings.export_to;
                self.starts.root_namespace = settings.root_namespace;
                self.starts.mesh = settings.start;
            }
            Item::ProxyConfig(config) => _ = self.proxy_configs.insert((namespace, name), *config),
            Item::GroupProbe(probe) => _ = self.starts.probes.insert((namespace, name), *probe),
        }
    }

    /// Completes the objects after all are added. Sets `exportTo` of ServiceEntries without it to the mesh
    /// configuration's `defaultServiceExportTo`, and sorts ProxyConfigs by age.
    pub(crate) fn complete(&mut self) {
        let mut configs: Vec<_> = self.proxy_configs.iter().collect();
        configs.sort_by_key(|(_, (age, _))| age);
        let configs =
            configs.into_iter().map(|((namespace, _), (_, config))| (namespace.clone(), config.clone()));
        self.starts.configs = configs.collect();
        for entry in self.entries.values_mut().filter(|entry| entry.export_to.is_empty()) {
            entry.export_to.clone_from(&self.default_export_to);
        }
    }
}

/// Claim template of a StatefulSet.
#[derive(Deserialize)]
struct ClaimTemplate {
    metadata: Metadata,
}

fn workload(key: &ObjectKey, account: String, object: &Value) -> Result<Workload, String> {
    let source = if key.kind == Kind::Pod { object } else { &object["spec"]["template"] };
    let [metadata, spec] = ["metadata", "spec"].map(|name| json!({ name: without_nulls(&source[name]) }));
    let template = Template { metadata: field(&metadata, "metadata")?, spec: field(&spec, "spec")? };
    let number = |name: &str, default: u32| match &object["spec"][name] {
        Value::Null => Ok(default),
        number => number
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| format!("spec.{name}: {number} is not a whole number of 0 or more")),
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
        account,
        replicas,
        parallelism: number("parallelism", 1)?,
        backoff_limit: number("backoffLimit", 6)?,
        claims: field::<Vec<ClaimTemplate>>(&object["spec"], "volumeClaimTemplates")?
            .into_iter()
            .map(|claim| claim.metadata.name)
            .collect(),
        template,
        hash: encode_hash(fnv(source.to_string().as_bytes()), 10),
    })
}

/// Returns a value without fields that are null, which the API server treats as absent.
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

/// Returns the 64-bit FNV-1a hash. Unlike the standard library's, it is the same in every run and on every machine.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Formats a number as Kubernetes writes hashes in names, without letters that could form words.
pub(crate) fn encode_hash(mut number: u64, length: usize) -> String {
    const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut text = String::new();
    for _ in 0..length {
        text.push(char::from(ALPHABET[(number % 27) as usize]));
        number /= 27;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Service {
        /// Reads a Service from JSON as from a file.
        pub(crate) fn parse(written: &Value) -> Self {
            let manifests = skysail_model::manifests(&written.to_string(), "service.json");
            match manifests.objects.first().map(|manifest| Item::read(manifest).unwrap()) {
                Some(Some(Item::Service(service))) => service,
                _ => panic!("{:?}", manifests.diagnostics),
            }
        }
    }

    #[test]
    fn services_are_read_with_the_fields_of_the_model_and_of_nodes() {
        let service = Service::parse(&json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": "a" },
            "spec": { "type": "NodePort", "selector": { "app": "a" }, "ports": [
                { "name": "https", "port": 443, "nodePort": 30443, "targetPort": "8443" },
                { "name": "db", "port": 3306 },
                { "name": "dns", "port": 53, "protocol": "UDP", "nodePort": null },
            ] },
        }));
        assert_eq!((service.kind.as_deref(), service.spec.selector.len()), (Some("NodePort"), 1));
        let ports = service.ports.iter().map(|port| (port.node_port, port.is_tcp(), port.scheme()));
        let expected =
            [(Some(30443), true, Some("https".to_owned())), (None, true, None), (None, false, None)];
        assert_eq!(ports.collect::<Vec<_>>(), expected);
        assert_eq!(service.ports[0].spec.target, model::kube::TargetPort::Number(8443));
    }

    #[test]
    fn the_oldest_proxy_config_is_first_in_any_order_of_files() {
        let config = |name: &str, number: u8, more: &str| {
            let text = format!(
                "apiVersion: networking.istio.io/v1beta1\nkind: ProxyConfig\nmetadata: {{name: {name}, namespace: shop{more}}}\nspec: {{concurrency: {number}}}\n"
            );
            let manifest = skysail_model::manifests(&text, &format!("{name}.yaml")).objects.remove(0);
            (manifest.object.key(), Item::read(&manifest).unwrap().unwrap())
        };
        let old = ", creationTimestamp: '2020-01-01T00:00:00Z'";
        let items = [config("b", 2, ""), config("a", 1, ""), config("c", 3, old)];
        let orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0]];
        for order in orders {
            let mut objects = Objects::default();
            order.iter().for_each(|index| objects.add(&items[*index].0, &items[*index].1));
            objects.add(&items[0].0, &items[0].1);
            objects.complete();
            let numbers: Vec<_> =
                objects.starts.configs.iter().map(|(_, config)| config.concurrency).collect();
            assert_eq!(numbers, [Some(3), Some(1), Some(2)]);
        }
    }
}
