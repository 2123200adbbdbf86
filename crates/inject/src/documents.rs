//! Injection of files: all workloads in all documents, also in lists. Other documents keep their text.

use std::collections::BTreeMap;

use serde_json::Value;
use skysail_yaml::Node;

use crate::{
    decision::{Decision, NamespaceLabels, decide},
    plan::Owner,
    pod::inject,
    settings::Settings,
    text::yaml,
};

/// Kinds with pods, and where these are. `Pod` is one itself.
const TEMPLATES: [(&str, &[&str]); 9] = [
    ("Pod", &[]),
    ("Deployment", &["spec", "template"]),
    ("StatefulSet", &["spec", "template"]),
    ("DaemonSet", &["spec", "template"]),
    ("ReplicaSet", &["spec", "template"]),
    ("ReplicationController", &["spec", "template"]),
    ("Job", &["spec", "template"]),
    ("CronJob", &["spec", "jobTemplate", "spec", "template"]),
    ("PodTemplate", &["template"]),
];
/// Namespace of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

/// A text with injected workloads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InjectedText {
    /// The documents, in their order.
    pub text: String,
    /// Lines that begin with the number of a line: parts without an effect, and workloads without a sidecar.
    pub messages: Vec<String>,
    /// Number of injected pods and pod templates.
    pub injected: usize,
}

/// Error of a document.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}: {message}")]
pub struct DocumentError {
    /// Line, from 1.
    pub line: u32,
    /// Description of the error.
    pub message: String,
}

/// Position and name of an object, for messages.
struct Place<'a> {
    line: u32,
    kind: &'a str,
    name: &'a str,
}

/// Labels of namespaces, by name.
pub type Namespaces = BTreeMap<String, NamespaceLabels>;

/// Returns the namespaces in a text.
///
/// # Errors
/// When a document is not YAML.
pub fn namespaces_in(text: &str) -> Result<Namespaces, DocumentError> {
    let mut all = Namespaces::new();
    for part in &parts(text) {
        all.extend(namespaces(read(part)?.iter().map(|(_, object)| object)));
    }
    Ok(all)
}

/// Injects the workloads of a text. `namespace` is that of objects that name none.
///
/// The labels of `namespaces` decide. Pods of other namespaces get a sidecar, unless they refuse it.
///
/// # Errors
/// When a document is not YAML, or a workload cannot be injected.
pub fn inject_text(
    text: &str,
    namespace: &str,
    namespaces: &Namespaces,
    settings: &Settings,
) -> Result<InjectedText, DocumentError> {
    let mut result = InjectedText::default();
    let parts = parts(text);
    let mut parsed = Vec::with_capacity(parts.len());
    for part in &parts {
        parsed.push(read(part)?);
    }
    let mut injector = Injector {
        namespace: if namespace.is_empty() { DEFAULT_NAMESPACE } else { namespace },
        namespaces,
        settings,
        result: &mut result,
    };
    for (part, documents) in parts.iter().zip(parsed) {
        let mut changed = false;
        let mut objects = Vec::with_capacity(documents.len());
        for (node, mut object) in documents {
            changed |= injector.object(&node, part.before, &mut object)?;
            objects.push(object);
        }
        let out = &mut injector.result.text;
        out.push_str(part.separator);
        if changed {
            let documents: Vec<String> = objects.iter().map(yaml).collect();
            out.push_str(&documents.join("---\n"));
        } else {
            out.push_str(part.content);
        }
    }
    Ok(result)
}

/// Text between two separators.
struct Part<'a> {
    /// The separator before the text, with its line feed.
    separator: &'a str,
    content: &'a str,
    /// Number of lines before the text.
    before: u32,
}

/// Splits a text at the lines `---`.
fn parts(text: &str) -> Vec<Part<'_>> {
    let (mut parts, mut lines, mut at) = (Vec::new(), 0, 0);
    let mut part = Part { separator: "", content: "", before: 0 };
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        if line.starts_with("---") && line[3..].trim_start().is_empty() {
            part.content = &text[start..at];
            parts.push(part);
            start = at + line.len();
            part = Part { separator: line, content: "", before: lines + 1 };
        }
        at += line.len();
        lines += 1;
    }
    part.content = &text[start..];
    parts.push(part);
    parts
}

/// Parses the documents of a part.
fn read(part: &Part<'_>) -> Result<Vec<(Node, Value)>, DocumentError> {
    let mut documents = Vec::new();
    for document in skysail_yaml::objects(part.content) {
        if let Some((path, line, first)) = document.duplicates.first() {
            let message = format!("{path} is repeated; first on line {}", first + part.before);
            return Err(DocumentError { line: line + part.before, message });
        }
        let root = document
            .root
            .map_err(|error| DocumentError { line: error.line + part.before, message: error.message })?;
        let object = root.to_json();
        documents.push((root, object));
    }
    Ok(documents)
}

/// Returns the labels of the namespaces among objects.
fn namespaces<'a>(objects: impl Iterator<Item = &'a Value>) -> Namespaces {
    let mut all = Namespaces::new();
    for object in objects {
        if object["kind"] == "Namespace" {
            let labels = object["metadata"]["labels"].as_object().into_iter().flatten();
            let labels = labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned())));
            all.insert(object["metadata"]["name"].as_str().unwrap_or_default().to_owned(), labels.collect());
        }
        if let Some(items) = list(object) {
            all.extend(namespaces(items.iter()));
        }
    }
    all
}

/// Returns the items of a list.
fn list(object: &Value) -> Option<&Vec<Value>> {
    object["kind"].as_str().filter(|kind| kind.ends_with("List"))?;
    object["items"].as_array()
}

/// What the objects of a text share.
struct Injector<'a> {
    namespace: &'a str,
    namespaces: &'a Namespaces,
    settings: &'a Settings,
    result: &'a mut InjectedText,
}

impl Injector<'_> {
    /// Injects an object or the items of a list. Returns whether it has changed.
    fn object(&mut self, node: &Node, before: u32, object: &mut Value) -> Result<bool, DocumentError> {
        if list(object).is_some() {
            let nodes = match node.get("items").map(|items| &items.value) {
                Some(skysail_yaml::Value::List(nodes)) => nodes.as_slice(),
                _ => &[],
            };
            let Some(Value::Array(items)) = object.get_mut("items") else { return Ok(false) };
            let mut changed = false;
            for (node, item) in nodes.iter().zip(items) {
                changed |= self.object(node, before, item)?;
            }
            return Ok(changed);
        }
        let (kind, line) = (text(&object["kind"]), node.line + before);
        let api_version = text(&object["apiVersion"]);
        let builtin = matches!(api_version.split('/').next(), Some("v1" | "apps" | "batch"));
        let Some((_, path)) = TEMPLATES.iter().find(|(known, _)| builtin && *known == kind) else {
            return Ok(false);
        };
        let metadata = &object["metadata"];
        let namespace = match text(&metadata["namespace"]) {
            namespace if namespace.is_empty() => self.namespace.to_owned(),
            namespace => namespace,
        };
        let name = [&metadata["name"], &metadata["generateName"]].map(text);
        let name = name.into_iter().find(|name| !name.is_empty()).unwrap_or_default();
        let place = Place { line, kind: &kind, name: &name };
        let Some(pod) = path.iter().try_fold(&mut *object, |object, key| object.get_mut(*key)) else {
            return Err(place.error(format!("{} is missing", path.join("."))));
        };
        let owner = Owner { api_version, kind: kind.clone(), name: name.clone(), namespace };
        self.pod(&place, &owner, pod)
    }

    /// Injects a pod or pod template. Returns whether it has changed.
    fn pod(&mut self, place: &Place<'_>, owner: &Owner, pod: &mut Value) -> Result<bool, DocumentError> {
        let labels = self.namespaces.get(&owner.namespace);
        let (decision, mut warnings) = decide(pod, &owner.namespace, labels, self.settings);
        let changed = match decision {
            Decision::Leave(reason) => {
                warnings.push(format!("gets no sidecar: {reason}"));
                false
            }
            Decision::Inject => {
                let injected =
                    inject(pod, owner, self.settings).map_err(|error| place.error(error.to_string()))?;
                warnings.extend(injected.warnings);
                *pod = injected.pod;
                self.result.injected += 1;
                true
            }
        };
        self.result.messages.extend(warnings.into_iter().map(|text| place.error(text).to_string()));
        Ok(changed)
    }
}

impl Place<'_> {
    fn error(&self, message: String) -> DocumentError {
        let Self { line, kind, name } = self;
        DocumentError { line: *line, message: format!("{kind} {name}: {message}") }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
