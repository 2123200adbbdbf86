//! Size of a mesh from the files of other load generators: a cluster of pilot-load, or a test configuration of
//! ClusterLoader2 (`kubernetes/perf-tests`).
//!
//! `bench control` loads a mesh of equal services, so the file gives the numbers of namespaces, services, pods and
//! sidecars. Fields that say more are returned by name.

mod template;

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use self::template::{Template, Variables};
use crate::document;

/// Maximum length of a file in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Maximum of each number of a file.
const MAX_NUMBER: u64 = 1_000_000;

/// Size of a mesh.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ClusterSize {
    pub(super) namespaces: u32,
    pub(super) services: u32,
    /// Pods of all services.
    pub(super) pods: u32,
    /// Pods with a sidecar, and gateways.
    pub(super) sidecars: u32,
    /// Most pods that go and come again in the course of the test, as a share of all pods in percent.
    pub(super) churn: u32,
    /// Fields without an effect here.
    pub(super) unused: Vec<String>,
}

impl ClusterSize {
    /// Reads a file. `overrides` are the values of ClusterLoader2's templates: `CL2_NAME` and `Nodes`.
    ///
    /// # Errors
    /// The file cannot be read, has neither form, or has no pod.
    pub(super) fn read(file: &Path, overrides: &BTreeMap<String, String>) -> anyhow::Result<Self> {
        let context = || file.display().to_string();
        let text = text_of(file).with_context(context)?;
        let variables = Variables::of(overrides);
        let rendered = Template::parse(&text).and_then(|template| template.render(&variables));
        let root = json(&rendered.with_context(context)?).with_context(context)?;
        let size = if root["steps"].is_array() {
            let folder = file.parent().unwrap_or(Path::new("."));
            of_cluster_loader(&root, &mut |path, values| object(&folder.join(path), values, &variables))
        } else if root["namespaces"].is_array() {
            of_pilot_load(&root)
        } else {
            bail!("{}: neither `namespaces`, as in pilot-load, nor `steps`, as in ClusterLoader2", context());
        };
        let size = size.with_context(context)?;
        ensure!(size.pods > 0, "{}: the file describes no pod", context());
        Ok(size)
    }

    /// Returns the number of endpoints of each service, rounded up.
    pub(super) fn endpoints(&self) -> u32 {
        self.pods.div_ceil(self.services.max(1)).max(1)
    }
}

fn text_of(file: &Path) -> anyhow::Result<String> {
    let length = fs::metadata(file)?.len();
    ensure!(length <= MAX_FILE, "{length} bytes, of at most {MAX_FILE}");
    Ok(fs::read_to_string(file)?)
}

/// Returns the Kubernetes object of a template of ClusterLoader2.
fn object(file: &Path, values: &Value, variables: &Variables) -> anyhow::Result<Value> {
    let context = || file.display().to_string();
    let text = text_of(file).with_context(context)?;
    // ClusterLoader2 sets these for each object.
    let own = [("Name", Value::from("object-0")), ("Namespace", "test-0".into()), ("Index", 0.into())];
    let own = own.into_iter().map(|(name, value)| (name.to_owned(), value));
    let given = values.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone()));
    let variables = variables.with(own.chain(given));
    let rendered = Template::parse(&text).and_then(|template| template.render(&variables));
    json(&rendered.with_context(context)?).with_context(context)
}

fn json(text: &str) -> anyhow::Result<Value> {
    Ok(document::parse(text, "test").map_err(anyhow::Error::msg)?.to_json())
}

/// Returns a number, or `default` if the field is absent.
fn number(object: &Value, field: &str, default: u64) -> anyhow::Result<u64> {
    match &object[field] {
        Value::Null => Ok(default),
        value => {
            let number = value.as_u64().filter(|number| *number <= MAX_NUMBER);
            number.with_context(|| format!("{field}: {value} is not a number from 0 to {MAX_NUMBER}"))
        }
    }
}

/// Adds the names of fields that are not among `known`.
fn note(unused: &mut Vec<String>, place: &str, object: &Value, known: &[&str]) {
    for (name, value) in object.as_object().into_iter().flatten() {
        let is_empty = value.is_null() || value.as_object().is_some_and(serde_json::Map::is_empty);
        let name = if place.is_empty() { name.clone() } else { format!("{place}.{name}") };
        let is_known = known.iter().any(|known| name.rsplit('.').next() == Some(known));
        if !is_known && !is_empty && !unused.contains(&name) {
            unused.push(name);
        }
    }
}

fn list<'a>(object: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    object[field].as_array().into_iter().flatten()
}

/// Sums of a file, which are bounded when they become a size.
#[derive(Default)]
struct Sums {
    namespaces: u64,
    services: u64,
    pods: u64,
    sidecars: u64,
}

impl Sums {
    fn size(self, churn: u32, unused: Vec<String>) -> anyhow::Result<ClusterSize> {
        let bounded = |number: u64| u32::try_from(number).context("the file describes too many objects");
        let [namespaces, services, pods, sidecars] =
            [self.namespaces, self.services, self.pods, self.sidecars].map(bounded);
        Ok(ClusterSize {
            namespaces: namespaces?,
            services: services?,
            pods: pods?,
            sidecars: sidecars?,
            churn,
            unused,
        })
    }
}

/// Reads a cluster of pilot-load. Its applications have a Service each; `instances` is the former name of `pods`.
fn of_pilot_load(root: &Value) -> anyhow::Result<ClusterSize> {
    let (mut sums, mut unused) = (Sums::default(), Vec::new());
    // Nodes and their metadata do not change what a control plane has to do.
    note(&mut unused, "", root, &["namespaces", "nodes", "nodeMetadata", "stableNames"]);
    for namespace in list(root, "namespaces") {
        let copies = number(namespace, "replicas", 1)?;
        note(&mut unused, "namespaces", namespace, &["name", "replicas", "applications"]);
        sums.namespaces = sums.namespaces.saturating_add(copies);
        for application in list(namespace, "applications") {
            let known = ["name", "replicas", "pods", "instances", "type", "appType", "labels"];
            note(&mut unused, "namespaces.applications", application, &known);
            let services = copies * number(application, "replicas", 1)?;
            let pods = number(application, "pods", number(application, "instances", 1)?)?;
            let kind = application["type"].as_str().or(application["appType"].as_str()).unwrap_or("sidecar");
            let pods = services.checked_mul(pods).context("the file describes too many objects")?;
            sums.services = sums.services.saturating_add(services);
            sums.pods = sums.pods.saturating_add(pods);
            match kind {
                "sidecar" | "gateway" | "router" => sums.sidecars = sums.sidecars.saturating_add(pods),
                "plain" => {}
                other => {
                    bail!("namespaces.applications.type: {other:?} is none of sidecar, gateway and plain")
                }
            }
        }
    }
    sums.size(0, unused)
}

/// Objects of one basename in the course of a test.
#[derive(Default)]
struct Course {
    /// Number in each namespace after each step.
    counts: Vec<u64>,
    /// Namespaces.
    namespaces: u64,
    /// Pods of each object; `None`: an object without pods.
    pods: Option<u64>,
    is_service: bool,
}

impl Course {
    fn most(&self) -> u64 {
        self.counts.iter().copied().max().unwrap_or_default()
    }

    /// Returns how many go and come again once all are there.
    fn left(&self) -> u64 {
        let most = self.most();
        let after = self.counts.iter().skip_while(|count| **count < most);
        let (mut fewest, mut left) = (most, 0);
        for count in after {
            fewest = fewest.min(*count);
            left = left.max(count - fewest);
        }
        left
    }
}

/// Reads a test configuration of ClusterLoader2. `read` returns the object of a template with these values.
fn of_cluster_loader(
    root: &Value,
    read: &mut dyn FnMut(&str, &Value) -> anyhow::Result<Value>,
) -> anyhow::Result<ClusterSize> {
    let mut unused = Vec::new();
    note(&mut unused, "", root, &["name", "namespace", "automanagedNamespaces", "steps"]);
    // The former name of the number of namespaces.
    let all = number(&root["namespace"], "number", number(root, "automanagedNamespaces", 1)?)?;
    let mut courses: BTreeMap<(String, String, u64, u64), Course> = BTreeMap::new();
    for step in list(root, "steps") {
        ensure!(
            step["module"].is_null(),
            "steps.module is not supported; write the steps of the module here"
        );
        note(&mut unused, "steps", step, &["name", "phases"]);
        for phase in list(step, "phases") {
            let known = ["namespaceRange", "replicasPerNamespace", "objectBundle", "tuningSet"];
            note(&mut unused, "steps.phases", phase, &known);
            let range = &phase["namespaceRange"];
            // Objects without a range are of the cluster, and there is one set of them.
            let first = number(range, "min", 1)?;
            let last = number(range, "max", if range.is_null() { first } else { all })?;
            ensure!(last <= all.max(first), "namespaceRange.max: there are {all} namespaces, not {last}");
            let replicas = number(phase, "replicasPerNamespace", 0)?;
            for bundle in list(phase, "objectBundle") {
                let text = |field: &str| bundle[field].as_str().unwrap_or_default().to_owned();
                let path = text("objectTemplatePath");
                let course = courses.entry((text("basename"), path.clone(), first, last)).or_default();
                if replicas > 0 {
                    let object = read(&path, &bundle["templateFillMap"])?;
                    let spec = &object["spec"];
                    match object["kind"].as_str() {
                        Some("Deployment" | "StatefulSet" | "ReplicaSet" | "ReplicationController") => {
                            course.pods = course.pods.max(Some(number(spec, "replicas", 1)?));
                        }
                        Some("Pod") => course.pods = Some(1),
                        Some("Service") => course.is_service = true,
                        Some(other) => {
                            let name = format!("objects of kind {other}");
                            if !unused.contains(&name) {
                                unused.push(name);
                            }
                        }
                        None => bail!("{path}: the object has no kind"),
                    }
                    course.namespaces = course.namespaces.max((last + 1).saturating_sub(first));
                }
                course.counts.push(replicas);
            }
        }
    }
    let mut sums = Sums { namespaces: all, ..Sums::default() };
    let (mut declared, mut workloads, mut left) = (0, 0, 0.0);
    for course in courses.values() {
        let objects = course.most() * course.namespaces;
        if course.is_service {
            declared += objects;
        }
        let Some(pods) = course.pods else { continue };
        workloads += objects;
        sums.pods = sums.pods.saturating_add(objects.saturating_mul(pods));
        left += (course.left() * course.namespaces).saturating_mul(pods) as f64;
    }
    // Without Services each workload counts as one, since a mesh reaches pods by their services.
    sums.services = if declared > 0 { declared } else { workloads };
    sums.sidecars = sums.pods;
    let churn = (100.0 * left / sums.pods.max(1) as f64).min(100.0);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 100")]
    let churn = churn as u32;
    sums.size(churn, unused)
}

#[cfg(test)]
mod tests;
