//! What the user wrote, as far as pods need it: workloads, services and namespace labels from a folder of YAML.
//!
//! Everything else in the files is the control plane's. So is telling people what is wrong with them: what cannot
//! be read here keeps its last good form, and a note says so.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::Deserialize;
use serde_json::Value;

/// Labels or annotations.
pub(crate) type Labels = BTreeMap<String, String>;

/// Namespace and name.
pub(crate) type Key = (String, String);

/// The objects of all files.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Objects {
    /// By kind, namespace and name.
    pub(crate) workloads: BTreeMap<(String, String, String), Workload>,
    pub(crate) services: BTreeMap<Key, Service>,
    /// Labels by namespace.
    pub(crate) namespaces: BTreeMap<String, Labels>,
    /// The texts in ConfigMaps and Secrets, by kind, namespace and name.
    pub(crate) values: BTreeMap<(String, String, String), Labels>,
    /// What was left out, and why.
    pub(crate) notes: Vec<String>,
}

/// Something that makes pods.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Workload {
    pub(crate) kind: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) replicas: u32,
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
    pub(crate) init_containers: Vec<Value>,
    pub(crate) hostname: Option<String>,
    pub(crate) subdomain: Option<String>,
    pub(crate) host_network: bool,
    pub(crate) termination_grace_period_seconds: Option<u64>,
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
    pub(crate) period_seconds: Option<u64>,
    pub(crate) timeout_seconds: Option<u64>,
    pub(crate) failure_threshold: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct ProbeTarget {
    #[serde(default)]
    pub(crate) path: Option<String>,
    pub(crate) port: Port,
    #[serde(default)]
    pub(crate) scheme: Option<String>,
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
    pub(crate) port: u16,
    pub(crate) target_port: Option<Port>,
    pub(crate) protocol: Option<String>,
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

/// Reads folders of YAML, again and again.
#[derive(Debug)]
pub(crate) struct Reader {
    roots: Vec<PathBuf>,
    files: BTreeMap<PathBuf, ReadFile>,
    /// What the files held when they were last looked at.
    last: Objects,
    /// The first look takes everything as it is.
    begun: bool,
}

/// When a file was changed last, and how long it is; none if it is not there.
type Stamp = Option<(SystemTime, u64)>;

/// A file must be left alone for so long before a change of it counts: writers cut it off first, and fill it then.
const SETTLE: Duration = Duration::from_millis(150);
/// The same for a file that is empty or gone, since that would end its pods.
const SETTLE_EMPTY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct ReadFile {
    stamp: Stamp,
    /// What it looks like now, and since when, while that differs from what was read.
    unsettled: Option<(Stamp, Instant)>,
    documents: Vec<Value>,
    problem: Option<String>,
}

impl Reader {
    pub(crate) fn new(roots: Vec<PathBuf>) -> Self {
        Self { roots, files: BTreeMap::new(), last: Objects::default(), begun: false }
    }

    /// Looks at the files again. True if any of them changed.
    pub(crate) fn read(&mut self) -> io::Result<bool> {
        let mut found = Vec::new();
        for root in &self.roots {
            find(root, &mut found)?;
        }
        for path in found {
            self.files.entry(path).or_default();
        }
        let mut changed = false;
        let begun = std::mem::replace(&mut self.begun, true);
        self.files.retain(|path, file| {
            let stamp = fs::metadata(path).and_then(|data| Ok((data.modified()?, data.len()))).ok();
            if file.stamp == stamp && (stamp.is_some() || !begun) {
                file.unsettled = None;
                return true;
            }
            if begun && !file.settled(stamp) {
                return true;
            }
            changed = true;
            file.stamp = stamp;
            file.unsettled = None;
            if stamp.is_some() {
                file.read(path);
            }
            stamp.is_some()
        });
        Ok(changed)
    }

    /// How many files were read, and how many objects of each kind they hold, of use here or not.
    pub(crate) fn kinds(&self) -> (usize, BTreeMap<String, usize>) {
        let mut kinds = BTreeMap::new();
        self.files.values().flat_map(|file| &file.documents).for_each(|document| count(document, &mut kinds));
        (self.files.len(), kinds)
    }

    /// The objects of all files. One that cannot be read any more is what it was.
    pub(crate) fn objects(&mut self) -> Objects {
        let mut objects = Objects::default();
        for (path, file) in &self.files {
            if let Some(problem) = &file.problem {
                objects.notes.push(format!("{}: {problem}", path.display()));
            }
            for document in &file.documents {
                if let Err(problem) = objects.add(document, &self.last) {
                    objects.notes.push(format!("{}: {problem}", path.display()));
                }
            }
        }
        self.last = objects.clone();
        objects
    }
}

impl ReadFile {
    /// Whether it has looked like this for long enough.
    fn settled(&mut self, stamp: Stamp) -> bool {
        let wait = if stamp.is_some_and(|(_, length)| length > 0) { SETTLE } else { SETTLE_EMPTY };
        match self.unsettled {
            Some((before, since)) if before == stamp => since.elapsed() >= wait,
            _ => {
                self.unsettled = Some((stamp, Instant::now()));
                false
            }
        }
    }

    fn read(&mut self, path: &Path) {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => return self.problem = Some(error.to_string()),
        };
        let (mut good, mut bad) = (Vec::new(), 0);
        for document in split(&text) {
            // Otherwise a namespace named `n` would be the boolean false.
            let options = serde_saphyr::options! { strict_booleans: true };
            match serde_saphyr::from_str_with_options::<Value>(document, options) {
                Ok(Value::Null) => {}
                Ok(value) => good.push(value),
                Err(_) => bad += 1,
            }
        }
        self.problem = None;
        if bad == 0 || self.documents.is_empty() {
            self.documents = good;
        }
        if bad > 0 {
            let kept = "its pods stay as they were until it can be read";
            self.problem = Some(format!("{bad} of its documents cannot be read as YAML; {kept}"));
        }
    }
}

/// The documents of a file: a line that starts with `---` begins one wherever it stands (YAML 1.2, 9.1.2).
fn split(text: &str) -> Vec<&str> {
    let mut starts = vec![0];
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        if line
            .strip_prefix("---")
            .is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
        {
            starts.push(at);
        }
        at += line.len();
    }
    starts.push(text.len());
    let documents = starts.windows(2).map(|pair| &text[pair[0]..pair[1]]);
    documents.filter(|document| !document.trim().is_empty()).collect()
}

fn find(path: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_file() {
        found.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        if path.is_dir() {
            find(&path, found)?;
        } else if path
            .extension()
            .is_some_and(|end| ["yaml", "yml", "json"].iter().any(|known| end == *known))
        {
            found.push(path);
        }
    }
    Ok(())
}

fn count(document: &Value, kinds: &mut BTreeMap<String, usize>) {
    let kind = document["kind"].as_str().unwrap_or("object without kind");
    match document["items"].as_array() {
        Some(items) if kind.ends_with("List") => items.iter().for_each(|item| count(item, kinds)),
        _ => *kinds.entry(kind.to_owned()).or_default() += 1,
    }
}

impl Objects {
    fn add(&mut self, document: &Value, last: &Self) -> Result<(), String> {
        let kind = document["kind"].as_str().unwrap_or_default();
        if kind.ends_with("List") && document["items"].is_array() {
            return document["items"]
                .as_array()
                .into_iter()
                .flatten()
                .try_for_each(|item| self.add(item, last));
        }
        let version = document["apiVersion"].as_str().unwrap_or_default();
        match (version, kind) {
            ("v1", "Namespace" | "Service" | "Pod" | "ConfigMap" | "Secret")
            | ("apps/v1", "Deployment" | "StatefulSet" | "ReplicaSet" | "DaemonSet") => {}
            ("batch/v1", "Job" | "CronJob") => {
                let name = document["metadata"]["name"].as_str().unwrap_or_default();
                return Err(format!("{kind} {name}: jobs are not run here: do it with `skysail exec`"));
            }
            ("v1", "ReplicationController") => {
                let name = document["metadata"]["name"].as_str().unwrap_or_default();
                return Err(format!("{kind} {name}: it has no effect here: write a Deployment"));
            }
            _ => return Ok(()),
        }
        let metadata: Metadata =
            field(document, "metadata").map_err(|problem| format!("{kind}: metadata: {problem}"))?;
        let name = metadata.name.clone();
        if name.is_empty() {
            return Err(format!("{kind}: metadata.name is missing"));
        }
        let namespace = metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        for text in [&name, &namespace] {
            check_name(text).map_err(|problem| format!("{kind} {namespace}/{name}: {problem}"))?;
        }
        let wrong = |problem| format!("{kind} {namespace}/{name}: {problem}");
        match kind {
            "Namespace" => {
                self.namespaces.insert(name, metadata.labels.unwrap_or_default());
            }
            "ConfigMap" | "Secret" => {
                let key = (kind.to_owned(), namespace.clone(), name.clone());
                self.values.insert(key, texts(document).map_err(wrong)?);
            }
            "Service" => {
                let key = (namespace.clone(), name.clone());
                let read = field(document, "spec").map(|spec| Service { spec, object: document.clone() });
                keep(&mut self.services, &last.services, key, read).map_err(wrong)?;
            }
            _ => {
                let key = (namespace.clone(), kind.to_owned(), name.clone());
                let read = workload(document, kind, &namespace, &name, metadata);
                keep(&mut self.workloads, &last.workloads, key, read).map_err(wrong)?;
            }
        }
        Ok(())
    }
}

/// What Kubernetes takes for a name (a DNS subdomain, RFC 1123). Files are called so here, which must stay in their
/// folders.
fn check_name(name: &str) -> Result<(), String> {
    let known = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let good = (1..=253).contains(&name.len())
        && name.bytes().all(|b| known(b) || matches!(b, b'-' | b'.'))
        && name.bytes().next().is_some_and(known)
        && name.bytes().last().is_some_and(known);
    if good { Ok(()) } else { Err(format!("{name:?} is no name: use lower-case letters, digits, - and .")) }
}

/// Inserts what was read, or if that failed, what was there before.
fn keep<K: Ord, V: Clone>(
    into: &mut BTreeMap<K, V>,
    last: &BTreeMap<K, V>,
    key: K,
    read: Result<V, String>,
) -> Result<(), String> {
    match read {
        Ok(value) => {
            into.insert(key, value);
            Ok(())
        }
        Err(problem) => match last.get(&key).cloned() {
            Some(value) => {
                into.insert(key, value);
                Err(format!("{problem}; it stays as it was"))
            }
            None => Err(problem),
        },
    }
}

/// The texts of a ConfigMap or a Secret.
fn texts(document: &Value) -> Result<Labels, String> {
    let mut texts: Labels = field(document, "data")?;
    if document["kind"] == "Secret" {
        for (name, value) in &mut texts {
            let bytes = BASE64.decode(value.trim()).map_err(|error| format!("data.{name}: {error}"))?;
            *value = String::from_utf8_lossy(&bytes).into_owned();
        }
        texts.extend(field::<Labels>(document, "stringData")?);
    }
    Ok(texts)
}

fn workload(
    document: &Value,
    kind: &str,
    namespace: &str,
    name: &str,
    metadata: Metadata,
) -> Result<Workload, String> {
    let pod = kind == "Pod";
    let template = if pod {
        Template { metadata, spec: field(document, "spec")? }
    } else {
        field(&document["spec"], "template")?
    };
    template.spec.containers.iter().try_for_each(|container| check_name(&container.name))?;
    let replicas = match &document["spec"]["replicas"] {
        _ if pod || kind == "DaemonSet" => 1,
        Value::Null => 1,
        number => number
            .as_u64()
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| format!("spec.replicas: {number} is not a number of pods"))?,
    };
    let source = if pod { document } else { &document["spec"]["template"] };
    Ok(Workload {
        kind: kind.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        replicas,
        template,
        hash: letters(fnv(source.to_string().as_bytes()), 10),
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a, namespace: n}\nspec:\n  replicas: 2\n  template:\n    metadata: {labels: {app: a}}\n    spec: {containers: [{name: a, image: x, ports: [{name: http, containerPort: 80}]}]}\n---\napiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: n}\nspec: {selector: {app: a}, ports: [{port: 80, targetPort: http}]}\n";

    #[test]
    fn a_broken_file_keeps_its_last_good_objects() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        fs::write(&path, GOOD).unwrap();
        let mut reader = Reader::new(vec![folder.path().to_owned()]);
        assert!(reader.read().unwrap());
        assert!(!reader.read().unwrap());
        let objects = reader.objects();
        let workload = &objects.workloads.values().next().unwrap();
        assert_eq!((workload.replicas, workload.template.metadata.labels.as_ref().unwrap().len()), (2, 1));
        let service = objects.services.values().next().unwrap();
        let target = service.spec.ports[0].target_port.as_ref().unwrap();
        assert_eq!(target.resolve(&workload.template.spec.containers), Some(80));

        fs::write(&path, &GOOD[..GOOD.len() - 5]).unwrap();
        changed(&mut reader);
        let kept = reader.objects();
        assert_eq!(kept.workloads, objects.workloads);
        assert_eq!(kept.services, objects.services);
        assert_eq!(kept.notes.len(), 1);
    }

    /// Looks until a change counts.
    fn changed(reader: &mut Reader) {
        while !reader.read().unwrap() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_file_that_is_being_written_counts_when_it_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        fs::write(&path, GOOD).unwrap();
        let mut reader = Reader::new(vec![folder.path().to_owned()]);
        assert!(reader.read().unwrap());
        let objects = reader.objects();

        // Cut off, then gone, then there again: nothing of that is a change.
        fs::write(&path, "").unwrap();
        assert!(!reader.read().unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!reader.read().unwrap());
        assert_eq!(reader.objects(), objects);
        fs::write(&path, GOOD.replace("replicas: 2", "replicas: 3")).unwrap();
        assert!(!reader.read().unwrap());
        changed(&mut reader);
        assert_eq!(reader.objects().workloads.values().next().unwrap().replicas, 3);

        fs::remove_file(&path).unwrap();
        changed(&mut reader);
        assert!(reader.objects().workloads.is_empty());
    }

    #[test]
    fn wrong_types_are_noted_and_the_rest_is_read_or_stays() {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "{GOOD}---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: b}}\nspec: {{replicas: many}}\n"
        );
        fs::write(folder.path().join("a.yaml"), text).unwrap();
        let mut reader = Reader::new(vec![folder.path().to_owned()]);
        reader.read().unwrap();
        let objects = reader.objects();
        assert_eq!(objects.workloads.len(), 1);
        assert!(objects.notes[0].contains("spec.replicas"), "{:?}", objects.notes);

        fs::write(folder.path().join("a.yaml"), GOOD.replace("replicas: 2", "replicas: two")).unwrap();
        changed(&mut reader);
        let kept = reader.objects();
        assert_eq!(kept.workloads, objects.workloads);
        assert!(kept.notes[0].contains("stays as it was"), "{:?}", kept.notes);
    }

    #[test]
    fn names_that_lead_out_of_folders_are_refused() {
        for (good, bad) in [
            ("name: a, namespace", "name: ../../a, namespace"),
            ("namespace: n", "namespace: .."),
            ("namespace: n", "namespace: /tmp"),
            ("containers: [{name: a", "containers: [{name: a/../b"),
            ("containers: [{name: a", "containers: [{name: ''"),
        ] {
            let mut objects = Objects::default();
            let document = split(GOOD)[0].replacen(good, bad, 1);
            let options = serde_saphyr::options! { strict_booleans: true };
            let document = serde_saphyr::from_str_with_options(&document, options).unwrap();
            let problem = objects.add(&document, &Objects::default()).unwrap_err();
            assert!(problem.contains("is no name"), "{problem}");
            assert!(objects.workloads.is_empty());
        }
    }
}
