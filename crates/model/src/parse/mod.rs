//! Parsing of text to objects: YAML or JSON, several documents in a file, each on its own.
//!
//! An object with an error is refused as a whole; the other objects of the file are accepted. A refused policy has a
//! fallback ([`fallback`]). Diagnostics name unknown and unsupported fields.

mod config_map;
mod decode;
mod fallback;
mod field_error;
mod key;
mod kinds;
mod limits;
mod lines;
mod other_tools;
mod schema;

use crate::{
    analysis::Code,
    api::{
        Kind, Labels, Object, ObjectKey, Secret, ServiceEntry, Typed, kube,
        manifest::{self, Ignored, ObjectMeta},
    },
    diagnostic::{Diagnostic, Severity, cut},
    origin::Origin,
    validate::{self, Findings},
};
use decode::{Decoded, decode, decode_with};
pub use fallback::Fallback;
use field_error::{FieldError, InvalidField, path_text};
use key::{describe, key_of};
use kinds::DocumentKind;
use limits::{MAX_ERRORS, MAX_OBJECTS, MAX_WARNINGS, too_many_objects};
use lines::{find_line, origin};
use serde::{Deserialize, de::DeserializeOwned};
use skysail_yaml::{Document, Node, Value, line_after, objects};
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

/// Content of a text.
#[derive(Debug, Default)]
pub struct Parsed {
    /// Accepted objects.
    pub objects: Vec<(Object, Origin)>,
    /// Diagnostics.
    pub diagnostics: Vec<Diagnostic>,
    /// Refused objects, as far as they could be identified.
    pub refused: BTreeMap<ObjectKey, Refused>,
    /// Whether a part of the text could not be identified.
    pub unreadable: bool,
    /// Objects of kinds that do not affect the mesh, by kind: the line of the first, and their number.
    pub foreign: BTreeMap<String, (u32, usize)>,
}

/// A refused object.
#[derive(Debug)]
pub struct Refused {
    /// Line of its first error.
    pub line: u32,
    /// Policy that is enforced while no valid version is known; policies only.
    pub fallback: Option<Fallback>,
}

/// An object of a text, parsed and as written.
#[derive(Debug)]
pub struct Manifest {
    /// Object, reduced to the fields that the mesh uses.
    pub object: Object,
    /// Where the object was read.
    pub origin: Origin,
    /// All its fields as JSON.
    pub written: serde_json::Value,
}

/// Objects of a text, parsed and as written.
#[derive(Debug, Default)]
pub struct Manifests {
    /// Accepted objects.
    pub objects: Vec<Manifest>,
    /// Refused objects, as far as they could be identified.
    pub refused: BTreeSet<ObjectKey>,
    /// Whether a part of the text could not be identified.
    pub unreadable: bool,
    /// Number of objects of each kind, including kinds that do not affect the mesh.
    pub kinds: BTreeMap<String, usize>,
    /// Diagnostics.
    pub diagnostics: Vec<Diagnostic>,
}

/// Parses objects from YAML or JSON. Objects with an error are refused, the others accepted.
pub fn parse(text: &str, file: &str) -> Parsed {
    let mut parsed = read(text, file, false).parsed;
    parsed.diagnostics.sort_by_key(|diagnostic| diagnostic.line);
    parsed
}

/// Parses objects as [`parse`](fn@parse), and keeps the line of each field, for
/// [`World::analyze`](crate::World::analyze).
pub fn parse_with_lines(text: &str, file: &str) -> Parsed {
    let reading = Reading { file: file.into(), all_lines: true, ..Reading::default() };
    let mut parsed = read_with(reading, text).parsed;
    parsed.diagnostics.sort_by_key(|diagnostic| diagnostic.line);
    parsed
}

/// Parses objects from YAML or JSON and keeps each as written. Refuses the same objects as [`parse`](fn@parse).
pub fn manifests(text: &str, file: &str) -> Manifests {
    let Reading { parsed, written, kinds, .. } = read(text, file, true);
    let Parsed { objects, refused, unreadable, diagnostics, .. } = parsed;
    let objects = objects.into_iter().zip(written);
    let objects = objects.map(|((object, origin), written)| Manifest { object, origin, written }).collect();
    let refused = refused.into_keys().collect();
    Manifests { objects, refused, unreadable, kinds, diagnostics }
}

fn read(text: &str, file: &str, keeps_written: bool) -> Reading {
    read_with(Reading { file: file.into(), keeps_written, ..Reading::default() }, text)
}

fn read_with(mut reading: Reading, text: &str) -> Reading {
    // Nearly every object is a document of its own, and counting documents costs a hundredth of reading them.
    if let Some(line) = line_after(text, MAX_OBJECTS) {
        return reading.refuse(line);
    }
    for document in objects(text) {
        let line = document.line;
        if reading.error_count >= MAX_ERRORS {
            let message = format!("the text has more than {MAX_ERRORS} errors; the rest is not read");
            let diagnostic = Diagnostic::new(Code::TooManyErrors, &reading.file, line, message);
            reading.parsed.diagnostics.push(diagnostic.remedy("correct the first errors"));
            reading.parsed.unreadable = true;
            break;
        }
        reading.document(document, text);
        if let Some(line) = reading.too_many {
            return reading.refuse(line);
        }
    }
    reading
}

#[derive(Default)]
struct Reading {
    file: Arc<str>,
    parsed: Parsed,
    keeps_written: bool,
    /// Number of errors so far.
    error_count: usize,
    /// Number of other diagnostics so far.
    warning_count: usize,
    /// Number of objects so far.
    object_count: usize,
    /// Line of the first object beyond the limit.
    too_many: Option<u32>,
    /// Whether the lines of all fields are kept.
    all_lines: bool,
    written: Vec<serde_json::Value>,
    /// Number of objects of each kind.
    kinds: BTreeMap<String, usize>,
    /// Labels read so far, shared because all pods of a workload have the same.
    labels: HashSet<Arc<Labels>>,
    /// Fields with errors of the current object.
    errors: Vec<String>,
}

/// An Istio object as written in the file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", bound = "S: DeserializeOwned + Default")]
struct IstioObject<S> {
    #[serde(rename = "apiVersion")]
    _api_version: Ignored,
    #[serde(rename = "kind")]
    _kind: Ignored,
    metadata: ObjectMeta,
    spec: S,
    #[serde(rename = "status")]
    _status: Ignored,
}

/// An object without the fields that could not be decoded.
struct Taken<T> {
    value: T,
    /// These fields, and unknown fields if they refuse the object.
    invalid: Vec<InvalidField>,
}

impl<T> Taken<T> {
    fn is_whole(&self) -> bool {
        self.invalid.is_empty()
    }
}

impl Reading {
    /// Refuses the whole text, because of the object on this line.
    fn refuse(self, line: u32) -> Self {
        let parsed = Parsed {
            diagnostics: vec![too_many_objects(&self.file, line)],
            unreadable: true,
            ..Parsed::default()
        };
        Self { parsed, file: self.file, ..Self::default() }
    }

    fn document(&mut self, document: Document, text: &str) {
        self.errors.clear();
        let mut root = match document.root {
            Ok(root) => root,
            Err(error) => {
                // The search reads the whole text.
                let is_searched = self.error_count < 10 && !error.too_large;
                let found = is_searched.then(|| other_tools::of_text(text, error.line)).flatten();
                let remedy = found.unwrap_or(if error.too_large {
                    "divide it into several objects"
                } else if error.cut_off {
                    "the text ends too early: close open brackets and quotes, or restore the rest of the file"
                } else {
                    "check indentation, quotes and colons on this line and the one before"
                });
                let code = if error.too_large { Code::TooMany } else { Code::NotYaml };
                let diagnostic = Diagnostic::new(code, &self.file, error.line, error.message);
                self.error_count += 1;
                self.parsed.diagnostics.push(diagnostic.remedy(remedy));
                self.parsed.unreadable = true;
                return;
            }
        };
        root.line = root.line.max(document.line);
        if let Some((_, line, _)) =
            document.duplicates.iter().find(|(path, ..)| path == "apiVersion" || path == "kind")
        {
            let message = "a second object begins here, without a separator";
            let diagnostic = Diagnostic::new(Code::MissingSeparator, &self.file, *line, message);
            self.report(diagnostic.remedy("write a line --- before it"), &root);
            // The object that this spec belongs to is unknown.
            self.errors.push("spec".to_owned());
            return self.fall_back(&root);
        }
        for (path, line, first) in &document.duplicates {
            let message = format!("duplicate key; it is defined first on line {first}");
            let diagnostic = Diagnostic::new(Code::DuplicateKey, &self.file, *line, message).field(path);
            self.report(diagnostic.remedy("remove one of them"), &root);
        }
        if document.duplicates.is_empty() {
            self.root(&root);
        } else {
            self.fall_back(&root);
        }
    }

    /// Adds the fallback of the object just refused, if it is a policy.
    fn fall_back(&mut self, root: &Node) {
        let errors = std::mem::take(&mut self.errors);
        if errors.is_empty() {
            return;
        }
        let Some(refused) = key_of(root).and_then(|key| self.parsed.refused.get_mut(&key)) else { return };
        refused.fallback = Fallback::of(root, &errors, &self.file);
    }

    /// Reads one object, or a list of objects.
    fn root(&mut self, root: &Node) {
        if self.too_many.is_some() {
            return;
        }
        self.errors.clear();
        let text = |field: &str| root.get(field).and_then(Node::text).unwrap_or_default();
        let (version, kind) = (text("apiVersion"), text("kind"));
        if kind.ends_with("List") {
            let items = root.get("items");
            if let Some(Node { value: Value::List(items), .. }) = items {
                return items.iter().for_each(|item| self.root(item));
            }
            let (message, remedy) = items
                .map_or(("is missing", "add items"), |_| ("expected a list", "begin each item with `- `"));
            let line = items.map_or(root.line, |items| items.line);
            let diagnostic = Diagnostic::new(Code::NotAnObject, &self.file, line, message).field("items");
            return self.report(diagnostic.remedy(remedy), root);
        }
        self.object_count += 1;
        if self.object_count > MAX_OBJECTS {
            self.too_many = Some(root.line);
            return;
        }
        if !matches!(root.value, Value::Map(_)) {
            let diagnostic =
                Diagnostic::new(Code::NotAnObject, &self.file, root.line, "not a Kubernetes object");
            return self.report(
                diagnostic.remedy("an object is a mapping with apiVersion, kind and metadata"),
                root,
            );
        }
        let counted = if kind.is_empty() { "object without kind" } else { kind };
        *self.kinds.entry(counted.to_owned()).or_default() += 1;
        if version.is_empty() || kind.is_empty() {
            let (message, remedy) = other_tools::of_mapping(root);
            let diagnostic = Diagnostic::new(Code::NotAnObject, &self.file, root.line, message);
            return self.report(diagnostic.remedy(remedy), root);
        }
        match kinds::classify(version, kind) {
            DocumentKind::Kind(kind) => self.object(root, kind),
            DocumentKind::Other { code, message, remedy, .. } => {
                let diagnostic = Diagnostic::new(code, &self.file, root.line, message);
                self.report(diagnostic.remedy(remedy), root);
            }
            DocumentKind::Foreign(kind) => {
                let known = self.parsed.foreign.len();
                let kind = if known < MAX_WARNINGS { kind } else { "other kinds".to_owned() };
                self.parsed.foreign.entry(kind).or_insert((root.line, 0)).1 += 1;
            }
        }
        self.fall_back(root);
    }

    fn object(&mut self, node: &Node, kind: Kind) {
        if let Some(diagnostic) = limits::check(node, &self.file) {
            return self.report(diagnostic, node);
        }
        match kind {
            Kind::Namespace => self.kube(node, "Namespace", |object: manifest::MetadataOnly, _| {
                Object::Namespace(Arc::new(Typed { meta: kube::meta(object.metadata, false), spec: () }))
            }),
            Kind::ServiceAccount => self.kube(node, "ServiceAccount", |object: manifest::MetadataOnly, _| {
                Object::ServiceAccount(Arc::new(Typed { meta: kube::meta(object.metadata, true), spec: () }))
            }),
            Kind::Secret => self.kube(node, "Secret", |mut object: manifest::SecretManifest, findings| {
                let meta = kube::meta(std::mem::take(&mut object.metadata), true);
                let (spec, invalid) = Secret::read(object);
                validate::secret(&spec, &invalid, findings);
                Object::Secret(Arc::new(Typed { meta, spec }))
            }),
            Kind::Node => self.kube(node, "Node", |object, _| Object::Node(Arc::new(kube::node(object)))),
            Kind::Service => self.kube(node, "Service", |object, findings| {
                validate::service(&object, findings);
                Object::Service(Arc::new(kube::service(object)))
            }),
            Kind::Pod => self.kube(node, "Pod", |object: manifest::PodManifest, findings| {
                validate::pod(&object, findings);
                Object::Pod(Arc::new(kube::pod(object)))
            }),
            Kind::Deployment | Kind::StatefulSet | Kind::DaemonSet | Kind::ReplicaSet | Kind::Job => {
                self.kube(node, kind.as_str(), |object: manifest::WorkloadManifest, findings| {
                    validate::workload(kind, &object.spec, "spec", findings);
                    Object::Template(Arc::new(kube::template(kind, object.metadata, object.spec)))
                });
            }
            Kind::CronJob => self.kube(node, "CronJob", |object: manifest::CronJob, findings| {
                let spec = object.spec.job_template.spec;
                validate::workload(kind, &spec, "spec.jobTemplate.spec", findings);
                Object::Template(Arc::new(kube::template(kind, object.metadata, spec)))
            }),
            Kind::EndpointSlice => self.kube(node, "EndpointSlice", |object, _| {
                Object::EndpointSlice(Arc::new(kube::endpoint_slice(object)))
            }),
            Kind::ConfigMap => self.config_map(node),
            kind => self.custom(node, kind),
        }
    }

    /// Reads an object of a custom resource, or of a kind that is read like one.
    fn custom(&mut self, node: &Node, kind: Kind) {
        match kind {
            Kind::VirtualService => self.istio(node, validate::virtual_service),
            Kind::DestinationRule => self.istio(node, validate::destination_rule),
            Kind::ServiceEntry => self.labelled(node, |spec: &mut ServiceEntry, labels| {
                spec.complete(labels, node.get("status"));
                validate::service_entry(spec)
            }),
            Kind::Gateway => self.istio(node, validate::gateway),
            Kind::Sidecar => self.istio(node, validate::sidecar),
            Kind::WorkloadEntry => self.istio(node, validate::workload_entry),
            Kind::WorkloadGroup => self.istio(node, validate::workload_group),
            Kind::ProxyConfig => self.istio(node, validate::proxy_config),
            Kind::EnvoyFilter => self.istio(node, validate::envoy_filter),
            Kind::PeerAuthentication => self.istio(node, validate::peer_authentication),
            Kind::RequestAuthentication => self.istio(node, validate::request_authentication),
            Kind::AuthorizationPolicy => self.istio(node, validate::authorization_policy),
            Kind::Telemetry => self.istio(node, validate::telemetry),
            Kind::Ingress => self.istio(node, validate::ingress),
            Kind::IngressClass => self.istio(node, validate::ingress_class),
            Kind::GatewayClass => self.istio(node, validate::gateway_class),
            Kind::KubernetesGateway => {
                self.labelled(node, |spec, labels| validate::kubernetes_gateway(spec, labels));
            }
            Kind::ListenerSet => self.istio(node, validate::listener_set),
            Kind::HttpRoute => self.istio(node, validate::http_route),
            Kind::GrpcRoute => self.istio(node, validate::grpc_route),
            Kind::TlsRoute => self.istio(node, validate::tls_route),
            Kind::TcpRoute => self.istio(node, validate::tcp_route),
            Kind::ReferenceGrant => self.istio(node, validate::reference_grant),
            Kind::BackendTlsPolicy => self.istio(node, validate::backend_tls_policy),
            Kind::WasmPlugin => self.istio(node, validate::wasm_plugin),
            Kind::TrafficExtension => self.istio(node, validate::traffic_extension),
            Kind::RateLimitPolicy => self.istio(node, validate::rate_limit_policy),
            _ => {}
        }
    }

    /// Reads a Kubernetes object. Refuses what the API server refuses, and reports fields that it does not know.
    fn kube<T: DeserializeOwned>(
        &mut self,
        node: &Node,
        of: &'static str,
        convert: impl FnOnce(T, &mut Findings) -> Object,
    ) {
        if let Some(Taken { value, invalid }) = self.manifest(node, of) {
            let mut findings = Findings::default();
            let object = convert(value, &mut findings);
            self.finish(node, object, findings.done(), &invalid);
        }
    }

    /// Reads an object of one of Kubernetes' types.
    fn manifest<T: DeserializeOwned>(&mut self, node: &Node, of: &'static str) -> Option<Taken<T>> {
        let left = MAX_WARNINGS.saturating_sub(self.warning_count);
        let schema::Checked { mut errors, unknown, .. } = schema::check(node, of, left);
        // The check has found the unknown fields, and all errors if there are any.
        let Decoded { value, errors: others, .. } = decode_with(node, 0);
        if errors.is_empty() {
            errors = others;
        }
        let decoded = Decoded { value, errors, unknown, renamed: Vec::new() };
        self.take(node, decoded, Code::UnknownKubernetesField)
    }

    /// Reads an Istio object. An unknown field is an error, as it is for `kubectl apply`.
    fn istio<S: DeserializeOwned + Default>(
        &mut self,
        node: &Node,
        check: impl FnOnce(&S) -> Vec<validate::Finding>,
    ) where
        Object: From<Typed<S>>,
    {
        self.labelled(node, |spec, _| check(spec));
    }

    /// Reads an Istio object whose labels are settings too. `check` may complete its `spec`.
    fn labelled<S: DeserializeOwned + Default>(
        &mut self,
        node: &Node,
        check: impl FnOnce(&mut S, &Labels) -> Vec<validate::Finding>,
    ) where
        Object: From<Typed<S>>,
    {
        let decoded: Decoded<IstioObject<S>> = decode(node);
        if let Some(Taken { value: mut object, invalid }) = self.take(node, decoded, Code::UnknownField) {
            let meta = kube::meta(object.metadata, true);
            let findings = check(&mut object.spec, &meta.labels);
            let mut object = Object::from(Typed { meta, spec: object.spec });
            if !object.kind().is_namespaced()
                && let Some(meta) = object.meta_mut()
            {
                meta.namespace.clear();
            }
            self.finish(node, object, findings, &invalid);
        }
    }

    /// Reports the errors of decoding. Returns what could be decoded.
    fn take<T>(&mut self, node: &Node, decoded: Decoded<T>, unknown: Code) -> Option<Taken<T>> {
        let unknown_fields = decoded.unknown.iter().filter(|_| unknown == Code::UnknownField);
        let invalid = decoded.errors.iter().chain(unknown_fields).map(FieldError::invalid).collect();
        let unknown = decoded.unknown.into_iter().map(|finding| (unknown, finding));
        for (code, finding) in decoded.errors.into_iter().map(|error| (error.code, error)).chain(unknown) {
            let diagnostic = Diagnostic::new(code, &self.file, finding.line, finding.message);
            self.report(diagnostic.field(path_text(&finding.path)).remedy(finding.remedy), node);
        }
        decoded.value.map(|value| Taken { value, invalid })
    }

    /// Reports the findings of validation, and adds the object unless it is refused. `invalid` are fields that could
    /// not be decoded: the object is refused, and errors that follow from them are not reported.
    fn finish(
        &mut self,
        node: &Node,
        mut object: Object,
        mut findings: Vec<validate::Finding>,
        invalid: &[InvalidField],
    ) {
        findings.extend(validate::meta(object.kind(), object.meta()));
        findings.extend(validate::empty_fields(object.kind(), node));
        findings.extend(validate::unsupported(object.kind(), node, &findings));
        findings.extend(validate::other_meshes(node));
        let origin = origin(&self.file, node, &object, self.all_lines);
        if !invalid.is_empty() {
            findings
                .retain(|finding| finding.is_error() && !invalid.iter().any(|field| field.explains(finding)));
        }
        let refused = !invalid.is_empty() || findings.iter().any(validate::Finding::is_error);
        let generated = node.get("metadata").is_some_and(|meta| meta.get("generateName").is_some());
        for mut finding in findings {
            if generated && finding.field == "metadata.name" {
                "generateName works with `kubectl create` alone; write name".clone_into(&mut finding.remedy);
            }
            let line = find_line(node, &finding.field);
            let diagnostic = Diagnostic::new(finding.code, &self.file, line, finding.message);
            self.report(diagnostic.field(finding.field).remedy(finding.remedy), node);
        }
        if !refused {
            self.share_labels(&mut object);
            if self.keeps_written {
                self.written.push(node.to_json());
            }
            self.parsed.objects.push((object, origin));
        }
    }

    fn share_labels(&mut self, object: &mut Object) {
        let Some(meta) = object.meta_mut() else { return };
        match self.labels.get(&meta.labels) {
            Some(known) => meta.labels = Arc::clone(known),
            None => _ = self.labels.insert(Arc::clone(&meta.labels)),
        }
    }

    /// Adds a diagnostic. An error refuses its object.
    fn report(&mut self, mut diagnostic: Diagnostic, node: &Node) {
        if diagnostic.severity != Severity::Error {
            self.warning_count += 1;
            if self.warning_count > MAX_WARNINGS {
                return;
            }
        }
        diagnostic.object = cut(describe(node));
        let is_value = diagnostic.field.starts_with("data") || diagnostic.field.starts_with("stringData");
        if is_value && diagnostic.object.starts_with("Secret ") && diagnostic.message.contains("found") {
            // The message about a wrong type would show the secret value.
            "has a value of another type".clone_into(&mut diagnostic.message);
            "write NAME: TEXT for each key".clone_into(&mut diagnostic.remedy);
        }
        if diagnostic.severity == Severity::Error {
            self.error_count += 1;
            self.errors.push(diagnostic.field.clone());
            let refused = Refused { line: diagnostic.line, fallback: None };
            match key_of(node) {
                Some(key) => _ = self.parsed.refused.entry(key).or_insert(refused),
                None => self.parsed.unreadable = true,
            }
        }
        diagnostic.field = cut(diagnostic.field);
        if self.error_count <= MAX_ERRORS || diagnostic.severity != Severity::Error {
            self.parsed.diagnostics.push(diagnostic);
        }
    }
}
