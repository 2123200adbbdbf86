//! Checks across several objects. No object is refused for them: as in Istio, a route to a missing host or subset
//! answers 503 until the host or subset exists.

mod advice;
mod entries;
mod extensions;
mod gateways;
mod policies;
mod rate_limits;
mod recorded;
mod rules;
mod services;
mod validator;
mod workloads;

use std::{
    collections::{BTreeMap, HashMap},
    hash::RandomState,
};

use self::recorded::RecordedWorld;
pub use self::validator::Validator;
use super::{World, gateways::GatewayHosts, store::Entry};
use crate::{
    analysis::Code,
    api::{Kind, Labels, ObjectKey, Template, Typed, VirtualService, selects},
    diagnostic::Diagnostic,
};

impl World {
    /// Returns diagnostics about inconsistent objects, by file and line. A [`Validator`] does the same for less after a
    /// change.
    pub fn validate(&self) -> Vec<Diagnostic> {
        Validator::default().validate(self)
    }
}

struct Report<'a> {
    world: RecordedWorld<'a>,
    /// VirtualService that takes effect for a host in a namespace: many of one host are compared with it alone.
    routes_of: HashMap<(String, String), Option<&'a Entry<VirtualService>>>,
    /// Hosts of Gateways, by `NAMESPACE/NAME`.
    gateway_hosts: HashMap<String, GatewayHosts<'a>>,
    diagnostics: Vec<Diagnostic>,
    /// Number of diagnostics of each code about the current object; `None` if objects are not checked one by one.
    alike: Option<BTreeMap<Code, usize>>,
}

/// Maximum number of diagnostics of one code that are kept for an object.
const MAX_ALIKE: usize = 20;

/// The object that a diagnostic is about.
struct ObjectReport<'a, T> {
    entry: &'a Entry<T>,
    kind: Kind,
}

impl<'a, T> ObjectReport<'a, T> {
    fn namespace(&self) -> &'a str {
        &self.entry.object.meta.namespace
    }

    fn name(&self) -> String {
        let meta = &self.entry.object.meta;
        format!("{} {}/{}", self.kind, meta.namespace, meta.name)
    }
}

impl<'a> Report<'a> {
    /// Creates a report without diagnostics. `hasher` hashes the inputs of checks.
    fn new(world: &'a World, hasher: RandomState) -> Self {
        Self {
            world: RecordedWorld::new(world, hasher),
            routes_of: HashMap::new(),
            gateway_hosts: HashMap::new(),
            diagnostics: Vec::new(),
            alike: None,
        }
    }

    /// Returns the diagnostics about an object. The last one of a code says how many others there are.
    fn take_diagnostics(&mut self) -> Vec<Diagnostic> {
        let mut diagnostics = std::mem::take(&mut self.diagnostics);
        for (code, count) in self.alike.take().into_iter().flatten() {
            let last = diagnostics.iter_mut().rfind(|diagnostic| diagnostic.code == code);
            if let (Some(last), 1..) = (last, count.saturating_sub(MAX_ALIKE)) {
                last.message.push_str(&format!("; {} others in the object are like it", count - MAX_ALIKE));
            }
        }
        diagnostics
    }

    fn report<T>(
        &mut self,
        about: &ObjectReport<'_, T>,
        code: Code,
        field: impl Into<String>,
        message: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        if let Some(alike) = &mut self.alike {
            let count = alike.entry(code).or_default();
            *count += 1;
            if *count > MAX_ALIKE {
                return;
            }
        }
        let (meta, origin) = (&about.entry.object.meta, &about.entry.origin);
        let key = ObjectKey { kind: about.kind, namespace: meta.namespace.clone(), name: meta.name.clone() };
        let field = field.into();
        let diagnostic = Diagnostic::new(code, &origin.file, origin.line_of(&field), message);
        self.diagnostics.push(diagnostic.object(&key).field(field).remedy(remedy));
    }
}

/// Returns the labels of all workloads that a selector matches, in a namespace or in all. Workloads are Pods and the
/// templates of objects that make Pods, so that configuration can be checked where nothing runs.
fn workloads<'a>(
    world: &'a World,
    namespace: Option<&'a str>,
    selector: &'a Labels,
) -> impl Iterator<Item = &'a Labels> {
    let within = move |of: &str| namespace.is_none_or(|namespace| namespace == of);
    let indexed = namespace.filter(|_| !selector.is_empty());
    let few = indexed.into_iter().flat_map(move |namespace| world.pods_selected(namespace, selector));
    let all = indexed.is_none().then(|| world.pods().filter(move |pod| within(&pod.meta.namespace)));
    let pods =
        few.chain(all.into_iter().flatten()).filter(|pod| !pod.spec.has_ended).map(|pod| &*pod.meta.labels);
    let templates = world.templates().filter(move |template| within(&template.meta.namespace));
    let labels = pods.chain(templates.map(|template| &template.spec.labels));
    labels.filter(move |labels| selects(selector, labels))
}

/// Returns the objects of a namespace that make Pods.
fn templates_in<'a>(world: &'a World, namespace: &'a str) -> impl Iterator<Item = &'a Typed<Template>> {
    let entries = world.templates.values().flat_map(move |store| store.in_namespace(namespace));
    entries.map(|entry| &*entry.object)
}

/// Returns whether a workload runs in a namespace.
fn runs_in(world: &World, namespace: &str) -> bool {
    world.pods.in_namespace(namespace).next().is_some() || templates_in(world, namespace).next().is_some()
}

/// Formats labels as `app: a, version: v1`.
pub(crate) fn label_text(labels: &Labels) -> String {
    labels.iter().map(|(key, value)| format!("{key}: {value}")).collect::<Vec<_>>().join(", ")
}
