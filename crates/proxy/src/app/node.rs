//! The node that the sidecar declares to the control plane: from a file, or in a pod of Kubernetes from the environment.
//!
//! In a pod, the variables and files are those that Istio's injector sets, and the metadata those that Istio's agent
//! derives from them (istio/pkg/bootstrap/config.go). Metadata about the agent's own Envoy are absent, such as
//! `ENVOY_STATUS_PORT`. The files with labels and annotations are read once: a change takes effect when the sidecar
//! starts again, except for what the control plane takes from the Pod itself.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Read as _},
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags, sys::socket::SockaddrStorage};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use skysail_core::node::{self, TracingServiceName, canonical_name};
use skysail_xds::envoy::pb::{
    envoy::config::core::v3::{Locality, Node},
    google::protobuf::value::Kind,
};

use crate::telemetry::structure;

/// Variable with the settings of the proxy, in JSON or YAML.
const CONFIG: &str = "PROXY_CONFIG";
/// Annotation whose settings override those of [`CONFIG`], in YAML.
const CONFIG_ANNOTATION: &str = "proxy.istio.io/config";
/// Annotation with the names of network interfaces whose addresses are not those of the workload.
const EXCLUDED_INTERFACES: &str = "traffic.sidecar.istio.io/excludeInterfaces";
/// Label that the ReplicaSet adds. It is not one of the workload.
const TEMPLATE_HASH: &str = "pod-template-hash";
/// Labels with the locality, `region/zone/subzone`, where dots may stand for slashes.
const LOCALITY: [&str; 2] = ["topology.istio.io/locality", "istio-locality"];
/// Maximum length in bytes of the file of a node, and of those with labels and annotations. An object of Kubernetes has
/// at most 1.5 MiB.
const MAX_FILE: u64 = 2 << 20;
/// Maximum number of addresses besides the first.
const MAX_ADDRESSES: usize = 63;
/// Name of a proxy without a workload.
const UNNAMED: &str = "istio-proxy";

/// Settings that the sidecar, its injection or the control plane reads.
const SETTINGS: [&str; 18] = [
    "concurrency",
    "connectionSettings",
    "discoveryAddress",
    "drainDuration",
    "gatewayTopology",
    "holdApplicationUntilProxyStarts",
    "interceptionMode",
    "meshId",
    "proxyHeaders",
    "proxyMetadata",
    "proxyStatsMatcher",
    "readinessProbe",
    "runtimeValues",
    "serviceCluster",
    "statusPort",
    "terminationDrainDuration",
    "tracing",
    "tracingServiceName",
];
/// Variables of Istio's agent without an effect, each with the reason.
const WITHOUT_EFFECT: [(&str, &str); 4] = [
    ("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "a drain always ends with the last connection"),
    ("MINIMUM_DRAIN_DURATION", "a drain always ends with the last connection"),
    ("ISTIO_META_DNS_CAPTURE", NO_DNS),
    ("ISTIO_META_DNS_AUTO_ALLOCATE", NO_DNS),
];
const NO_DNS: &str = "the sidecar answers no DNS queries in a pod of Kubernetes";

/// Source of the node.
#[derive(Clone, Debug)]
pub(crate) enum NodeSource {
    /// A JSON file.
    File(PathBuf),
    /// The environment of a pod.
    Pod {
        /// Folder with the files of labels and annotations.
        info: PathBuf,
        /// `sidecar` or `router`.
        role: String,
    },
}

/// Reads the node, as the JSON of `envoy.config.core.v3.Node`.
///
/// # Errors
/// The file cannot be read or is not JSON; a variable is missing or not valid.
pub(super) fn load(source: &NodeSource) -> anyhow::Result<Value> {
    match source {
        NodeSource::File(path) => {
            let text = read(path).with_context(|| format!("cannot read --node {}", path.display()))?;
            serde_json::from_str(&text).with_context(|| format!("--node {} is not JSON", path.display()))
        }
        NodeSource::Pod { info, role } => {
            let utf8 = |(name, text): (std::ffi::OsString, std::ffi::OsString)| {
                Some((name.into_string().ok()?, text.into_string().ok()?))
            };
            let pod = PodEnvironment::new(std::env::vars_os().filter_map(utf8).collect(), info)?;
            pod.node(role, own_addresses(pod.annotations.get(EXCLUDED_INTERFACES)))
        }
    }
}

/// `envoy.config.core.v3.Node` in JSON. Fields that describe an Envoy are ignored.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct NodeJson {
    id: String,
    #[serde(default)]
    cluster: String,
    #[serde(default)]
    metadata: Map<String, Value>,
    #[serde(default)]
    locality: LocalityJson,
    #[serde(rename = "userAgentName")]
    _name: Option<Value>,
    #[serde(rename = "userAgentBuildVersion")]
    _version: Option<Value>,
    #[serde(rename = "clientFeatures")]
    _features: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LocalityJson {
    region: String,
    zone: String,
    #[serde(alias = "subZone")]
    sub_zone: String,
}

/// Converts a node.
///
/// # Errors
/// It is not a node.
pub(super) fn proto(json: &Value) -> anyhow::Result<Node> {
    let NodeJson { id, cluster, metadata, locality, .. } =
        NodeJson::deserialize(json).context("the node cannot be used")?;
    let LocalityJson { region, zone, sub_zone } = locality;
    Ok(Node {
        id,
        cluster,
        metadata: Some(structure(&metadata)),
        locality: Some(Locality { region, zone, sub_zone }),
        ..Node::default()
    })
}

/// Returns whether a node declares an IPv6 address.
pub(super) fn has_ipv6(node: &Node) -> bool {
    let addresses = node.metadata.as_ref().and_then(|metadata| metadata.fields.get("INSTANCE_IPS"));
    matches!(addresses.and_then(|value| value.kind.as_ref()), Some(Kind::StringValue(list)) if list.contains(':'))
}

/// Reads a text file of bounded length.
fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(std::io::Error::other(format!("it has more than {MAX_FILE} bytes")));
    }
    Ok(text)
}

/// What the injector and Kubernetes say about a pod.
struct PodEnvironment {
    variables: BTreeMap<String, String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    config: Map<String, Value>,
}

impl PodEnvironment {
    fn new(variables: BTreeMap<String, String>, info: &Path) -> anyhow::Result<Self> {
        let labels = downward(&info.join("labels"))?;
        let annotations = downward(&info.join("annotations"))?;
        let mut config = settings(variables.get(CONFIG)).with_context(|| format!("variable {CONFIG}"))?;
        let own = settings(annotations.get(CONFIG_ANNOTATION));
        for (name, value) in own.with_context(|| format!("annotation {CONFIG_ANNOTATION}"))? {
            match (config.get_mut(&name), value) {
                (Some(Value::Object(old)), Value::Object(new)) if name == "proxyMetadata" => old.extend(new),
                (_, value) => drop(config.insert(name, value)),
            }
        }
        for name in config.keys().filter(|name| !SETTINGS.contains(&name.as_str())) {
            tracing::warn!("{CONFIG}: {name} has no effect in skysail-proxy");
        }
        for (name, reason) in WITHOUT_EFFECT.iter().filter(|(name, _)| variables.contains_key(*name)) {
            tracing::warn!("variable {name} has no effect: {reason}");
        }
        Ok(Self { variables, labels, annotations, config })
    }

    /// Returns a variable that the injector always sets.
    fn required(&self, name: &str) -> anyhow::Result<&str> {
        match self.variables.get(name) {
            Some(text) if !text.is_empty() => Ok(text),
            _ => bail!(
                "variable {name} is not set: the injector sets it in a pod of Kubernetes; elsewhere, give \
                 --node FILE"
            ),
        }
    }

    /// Returns the node. `own` are the addresses of this network namespace.
    fn node(&self, role: &str, own: Vec<IpAddr>) -> anyhow::Result<Value> {
        let (name, namespace) = (self.required("POD_NAME")?, self.required("POD_NAMESPACE")?);
        let account = self.required("SERVICE_ACCOUNT")?;
        let address = self.required("INSTANCE_IP")?;
        let first: IpAddr = address
            .parse()
            .with_context(|| format!("variable INSTANCE_IP: {address:?} is not an IP address"))?;
        let mut addresses = vec![first.to_string()];
        addresses
            .extend(own.iter().filter(|other| **other != first).take(MAX_ADDRESSES).map(IpAddr::to_string));

        let mut metadata = self.metadata();
        let (labels, static_labels) = self.labels()?;
        let workload = match metadata.get("WORKLOAD_NAME") {
            Some(Value::String(workload)) if !workload.is_empty() => workload.as_str(),
            _ => UNNAMED,
        };
        let cluster = self.cluster(&labels, workload, namespace)?;
        let locality = locality(&labels);
        metadata.entry("ISTIO_VERSION").or_insert(node::ISTIO_VERSION.into());
        for (key, value) in [
            ("NAME", json!(name)),
            ("NAMESPACE", json!(namespace)),
            ("SERVICE_ACCOUNT", json!(account)),
            ("INSTANCE_IPS", json!(addresses.join(","))),
            ("LABELS", json!(labels)),
            ("ANNOTATIONS", json!(self.annotations)),
            (CONFIG, json!(self.config)),
            ("STATIC_LABELS", json!(static_labels)),
        ] {
            metadata.insert(key.to_owned(), value);
        }
        metadata.retain(|_, value| *value != json!({}));
        Ok(json!({
            "id": node::id(role, first, name, namespace),
            "cluster": cluster,
            "locality": locality,
            "metadata": metadata,
        }))
    }

    /// Returns the metadata of variables and of `proxyMetadata`. Variables take precedence.
    fn metadata(&self) -> Map<String, Value> {
        let own = self.config.get("proxyMetadata").and_then(Value::as_object).into_iter().flatten();
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut all: BTreeMap<String, String> =
            own.map(|(name, value)| (name.clone(), text(value))).collect();
        for name in all.keys().filter(|name| !node::is_metadata(name)) {
            if !WITHOUT_EFFECT.iter().any(|(known, _)| known == name) {
                tracing::warn!("{CONFIG}: {name} in proxyMetadata has no effect in skysail-proxy");
            }
        }
        all.extend(self.variables.clone());
        all.retain(|name, _| !WITHOUT_EFFECT.iter().any(|(known, _)| known == name));
        let (metadata, problems) = node::metadata(&all);
        problems.iter().for_each(|problem| tracing::warn!("{problem}"));
        metadata
    }

    /// Returns the labels of the workload, and those of them that a variable sets.
    fn labels(&self) -> anyhow::Result<(BTreeMap<String, String>, BTreeMap<String, String>)> {
        const LABELS: &str = "ISTIO_METAJSON_LABELS";
        let fixed: BTreeMap<String, String> = match self.variables.get(LABELS) {
            None => BTreeMap::new(),
            Some(text) => serde_json::from_str(text).with_context(|| format!("variable {LABELS}"))?,
        };
        let mut labels = fixed.clone();
        labels.extend(self.labels.clone());
        labels.remove(TEMPLATE_HASH);
        Ok((labels, fixed))
    }

    fn cluster(
        &self,
        labels: &BTreeMap<String, String>,
        workload: &str,
        namespace: &str,
    ) -> anyhow::Result<String> {
        if let Some(Value::String(name)) = self.config.get("serviceCluster")
            && !["", UNNAMED].contains(&name.as_str())
        {
            return Ok(name.clone());
        }
        let setting = match self.config.get("tracingServiceName") {
            None | Some(Value::Null) => TracingServiceName::default(),
            Some(value) => TracingServiceName::deserialize(value)
                .with_context(|| format!("{CONFIG}: tracingServiceName"))?,
        };
        Ok(setting.of(labels, canonical_name(labels, workload), namespace))
    }
}

/// Parses settings of the proxy in JSON or YAML.
fn settings(text: Option<&String>) -> anyhow::Result<Map<String, Value>> {
    let Some(text) = text else { return Ok(Map::new()) };
    let value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(_) => match skysail_yaml::embedded(text) {
            None => Value::Null,
            Some(document) => document.root?.to_json(),
        },
    };
    match value {
        Value::Null => Ok(Map::new()),
        Value::Object(settings) => Ok(settings),
        _ => bail!("it is not a mapping"),
    }
}

/// Reads a file of the downward API: lines `KEY="VALUE"`. A file that does not exist is empty.
fn downward(path: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let text = match read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let mut map = BTreeMap::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let entry = line.split_once('=').and_then(|(key, value)| Some((key, unquote(value)?)));
        let problem = || format!("{}, line {}: it is not KEY=\"VALUE\"", path.display(), number + 1);
        let (key, value) = entry.with_context(problem)?;
        map.insert(key.to_owned(), value);
    }
    Ok(map)
}

/// Parses a text in quotes, with the escapes of Go (strconv.Quote).
fn unquote(text: &str) -> Option<String> {
    let mut chars = text.strip_prefix('"')?.strip_suffix('"')?.chars();
    let mut bytes = Vec::with_capacity(text.len());
    while let Some(char) = chars.next() {
        let escaped = match char {
            '"' => return None,
            '\\' => chars.next()?,
            plain => {
                bytes.extend(plain.encode_utf8(&mut [0; 4]).bytes());
                continue;
            }
        };
        let mut number = |digits: usize| {
            let text: String = chars.by_ref().take(digits).collect();
            let is_hex = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            is_hex.then(|| u32::from_str_radix(&text, 16).ok()).flatten()
        };
        let char = match escaped {
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            '\\' | '"' => escaped,
            'x' => {
                bytes.push(u8::try_from(number(2)?).ok()?);
                continue;
            }
            'u' => char::from_u32(number(4)?)?,
            'U' => char::from_u32(number(8)?)?,
            _ => return None,
        };
        bytes.extend(char.encode_utf8(&mut [0; 4]).bytes());
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the locality that a label states.
fn locality(labels: &BTreeMap<String, String>) -> Value {
    let label = LOCALITY.iter().find_map(|name| labels.get(*name)).map_or("", String::as_str);
    let separator = if label.contains('/') { '/' } else { '.' };
    let mut parts = label.split(separator).map(str::to_owned);
    let mut next = || parts.next().unwrap_or_default();
    let (region, zone, sub_zone) = (next(), next(), next());
    json!({ "region": region, "zone": zone, "sub_zone": sub_zone })
}

/// Returns the addresses of the interfaces of this network namespace, without those of the loopback interface and of
/// interfaces that an annotation excludes.
fn own_addresses(excluded: Option<&String>) -> Vec<IpAddr> {
    let excluded: Vec<&str> = excluded.iter().flat_map(|names| names.split(',')).collect();
    let interfaces = match getifaddrs() {
        Ok(interfaces) => interfaces,
        Err(error) => {
            tracing::warn!("cannot list the addresses of this pod; INSTANCE_IP alone is declared: {error}");
            return Vec::new();
        }
    };
    let is_used = |name: &str, flags: InterfaceFlags| {
        flags.contains(InterfaceFlags::IFF_UP)
            && !flags.contains(InterfaceFlags::IFF_LOOPBACK)
            && !excluded.contains(&name)
    };
    let addresses = interfaces
        .filter(|one| is_used(&one.interface_name, one.flags))
        .filter_map(|one| ip_address(&one.address?))
        .map(|address| address.to_canonical());
    addresses.filter(|address| !is_local(*address)).collect()
}

fn ip_address(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

/// Returns whether other pods cannot reach an address.
fn is_local(address: IpAddr) -> bool {
    address.is_loopback()
        || address.is_unspecified()
        || match address {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns the pod's variables as skysail-inject writes them.
    fn variables() -> BTreeMap<String, String> {
        [
            ("POD_NAME", "web-1"),
            ("POD_NAMESPACE", "shop"),
            ("INSTANCE_IP", "10.1.2.3"),
            ("SERVICE_ACCOUNT", "web"),
            ("HOST_IP", "10.0.0.1"),
            ("ISTIO_META_NODE_NAME", "n1"),
            ("ISTIO_META_WORKLOAD_NAME", "web"),
            ("ISTIO_META_CLUSTER_ID", "Kubernetes"),
            ("ISTIO_META_DNS_CAPTURE", "true"),
            (
                "PROXY_CONFIG",
                r#"{"concurrency": 2, "proxyMetadata": {"ISTIO_META_A": "b", "ISTIO_META_CLUSTER_ID": "x"}}"#,
            ),
            ("PATH", "/bin"),
        ]
        .map(|(name, text)| (name.to_owned(), text.to_owned()))
        .into()
    }

    fn put(folder: &Path, labels: &str, annotations: &str) {
        fs::write(folder.join("labels"), labels).unwrap();
        fs::write(folder.join("annotations"), annotations).unwrap();
    }

    #[test]
    fn the_node_of_a_pod_is_that_of_istios_agent() {
        let folder = tempfile::tempdir().unwrap();
        put(
            folder.path(),
            "app=\"web\"\npod-template-hash=\"abc\"\ntopology.istio.io/locality=\"r.z.s\"\n",
            "note=\"a\\\"b\\n\\u00e9\"\nproxy.istio.io/config=\"concurrency: 3\\n\"\n",
        );
        let pod = PodEnvironment::new(variables(), folder.path()).unwrap();
        let own = ["10.1.2.3", "fd00::3"].map(|address| address.parse().unwrap());
        let node = pod.node("sidecar", own.into()).unwrap();
        let expected = json!({
            "id": "sidecar~10.1.2.3~web-1.shop~shop.svc.cluster.local",
            "cluster": "web.shop",
            "locality": {"region": "r", "zone": "z", "sub_zone": "s"},
            "metadata": {
                "NAME": "web-1", "NAMESPACE": "shop", "SERVICE_ACCOUNT": "web",
                "INSTANCE_IPS": "10.1.2.3,fd00::3", "NODE_NAME": "n1", "WORKLOAD_NAME": "web",
                "CLUSTER_ID": "Kubernetes", "A": "b", "ISTIO_VERSION": "1.32.0",
                "LABELS": {"app": "web", "topology.istio.io/locality": "r.z.s"},
                "ANNOTATIONS": {"note": "a\"b\né", "proxy.istio.io/config": "concurrency: 3\n"},
                "PROXY_CONFIG": {
                    "concurrency": 3,
                    "proxyMetadata": {"ISTIO_META_A": "b", "ISTIO_META_CLUSTER_ID": "x"},
                },
            },
        });
        assert_eq!(node, expected);
        let proto = proto(&node).unwrap();
        assert_eq!((&*proto.id, &*proto.cluster), (node["id"].as_str().unwrap(), "web.shop"));
        assert_eq!(proto.locality.unwrap().sub_zone, "s");
        assert_eq!(proto.metadata.unwrap().fields.len(), 12);
    }

    #[test]
    fn a_missing_or_invalid_variable_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |name: &str, value: Option<&str>| {
            let mut variables = variables();
            match value {
                Some(value) => drop(variables.insert(name.to_owned(), value.to_owned())),
                None => drop(variables.remove(name)),
            }
            let pod = PodEnvironment::new(variables, folder.path());
            format!("{:#}", pod.and_then(|pod| pod.node("sidecar", Vec::new())).unwrap_err())
        };
        for name in ["POD_NAME", "POD_NAMESPACE", "SERVICE_ACCOUNT", "INSTANCE_IP"] {
            for value in [None, Some("")] {
                let error = refused(name, value);
                assert!(error.starts_with(&format!("variable {name} is not set: ")), "{error}");
            }
        }
        for (name, value) in [("INSTANCE_IP", "web"), ("PROXY_CONFIG", "[]"), ("PROXY_CONFIG", "{")] {
            let error = refused(name, Some(value));
            assert!(error.starts_with(&format!("variable {name}: ")), "{error}");
        }
        let error = refused("PROXY_CONFIG", Some("tracingServiceName: MY_NAME"));
        assert!(error.starts_with("PROXY_CONFIG: tracingServiceName: "), "{error}");
    }

    #[test]
    fn files_of_the_downward_api_are_parsed_and_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("labels");
        assert_eq!(downward(&file).unwrap(), BTreeMap::new());
        fs::write(&file, "a=\"\\x41\\\\\\U0001f600=\"\n\nb=\"\"\n").unwrap();
        let expected = [("a", "A\\\u{1f600}="), ("b", "")];
        assert_eq!(downward(&file).unwrap(), expected.map(|(a, b)| (a.to_owned(), b.to_owned())).into());
        for bad in ["a", "a=b", "a=\"", "a=\"b\"c\"", "a=\"\\q\"", "a=\"\\u12\"", "a=\"\\u+123\"", "a=\"\\\""]
        {
            fs::write(&file, format!("x=\"y\"\n{bad}\n")).unwrap();
            let error = downward(&file).unwrap_err().to_string();
            assert!(error.ends_with("labels, line 2: it is not KEY=\"VALUE\""), "{bad}: {error}");
        }
        let long = usize::try_from(MAX_FILE).unwrap();
        fs::write(&file, format!("a=\"{}\"\n", "x".repeat(long))).unwrap();
        assert!(format!("{:#}", downward(&file).unwrap_err()).contains("it has more than"));
    }

    #[test]
    fn a_node_with_unknown_fields_is_refused() {
        let node = json!({"id": "a", "clientFeatures": ["x"], "metadata": {"A": [1, null]}});
        assert_eq!(proto(&node).unwrap().metadata.unwrap().fields.len(), 1);
        for bad in [json!([]), json!({"cluster": "a"}), json!({"id": "a", "idd": "b"})] {
            assert!(proto(&bad).is_err(), "{bad}");
        }
    }
}
