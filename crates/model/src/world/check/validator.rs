//! Validation after a change: the diagnostics of each object are kept, with the inputs of its checks
//! ([`RecordedWorld`](super::recorded)). Only objects with a changed input are checked again, so that a change of one
//! object costs little in a large mesh.
//!
//! Changed inputs are found by comparing the objects with those of the last validation. Both share the maps that have
//! not changed, so most are compared by address.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use super::{
    super::{
        World,
        hosts::fqdn,
        mesh_hosts,
        store::{Entry, Store},
    },
    ObjectReport, Report,
    recorded::Input,
};
use crate::{
    api::{Kind, Pod, Typed},
    diagnostic::Diagnostic,
};

/// Validates successive states of a World. Repeats only the checks whose inputs have changed.
#[derive(Debug, Default)]
pub struct Validator {
    hasher: RandomState,
    /// Objects at the last validation, without indexes; `None` before the first one.
    before: Option<World>,
    /// Findings and inputs of each object, by the hash of its [`Input::Object`]. With the same hash, one of two objects
    /// would not be checked; the hash has 64 bits and a random key.
    kept: HashMap<u64, ObjectFindings>,
}

/// Result of the checks of an object.
#[derive(Debug)]
struct ObjectFindings {
    /// Hashes of the inputs, in order.
    inputs: Box<[u64]>,
    diagnostics: Vec<Diagnostic>,
}

impl Validator {
    /// Returns what [`World::validate`] returns.
    pub fn validate(&mut self, world: &World) -> Vec<Diagnostic> {
        let is_first = self.before.is_none();
        self.forget_changed(world);
        self.check_others(world);
        let kept = self.kept.values().flat_map(|checked| &checked.diagnostics);
        let mut diagnostics: Vec<Diagnostic> = kept.cloned().collect();
        diagnostics.sort();
        diagnostics.dedup();
        debug_assert!(is_first || diagnostics == world.validate(), "a check does not record what it reads");
        diagnostics
    }

    /// Removes the findings of each object with a changed input.
    fn forget_changed(&mut self, world: &World) {
        let mut before = self.before.take().unwrap_or_default();
        let has_same_mesh = std::ptr::eq(before.mesh(), world.mesh()) || before.mesh() == world.mesh();
        if !has_same_mesh || before.allocates() != world.allocates() {
            self.kept.clear();
        }
        let mut changes = Changes { hasher: &self.hasher, inputs: Vec::new() };
        changes.find(&mut before, world);
        let mut changed = changes.inputs;
        changed.sort_unstable();
        self.kept
            .retain(|_, checked| checked.inputs.iter().all(|input| changed.binary_search(input).is_err()));
        self.before = Some(before);
    }

    /// Checks all objects without kept findings.
    fn check_others(&mut self, world: &World) {
        let mut pass = Pass { report: Report::new(world, self.hasher.clone()), kept: &mut self.kept };
        pass.check(Kind::VirtualService, &world.virtual_services, Report::virtual_service);
        pass.check(Kind::DestinationRule, &world.destination_rules, Report::destination_rule);
        pass.check(Kind::Gateway, &world.gateways, Report::gateway);
        pass.check(Kind::Service, &world.services, Report::service);
        pass.check(Kind::ServiceEntry, &world.service_entries, Report::service_entry);
        pass.check(Kind::PeerAuthentication, &world.peer_authentications, Report::peer_authentication);
        pass.check(Kind::AuthorizationPolicy, &world.authorization_policies, Report::authorization_policy);
        pass.check(
            Kind::RequestAuthentication,
            &world.request_authentications,
            Report::request_authentication,
        );
        pass.check(Kind::Telemetry, &world.telemetries, Report::telemetry);
        pass.check(Kind::WasmPlugin, &world.wasm_plugins, Report::wasm_plugin);
        pass.check(Kind::TrafficExtension, &world.traffic_extensions, Report::traffic_extension);
        pass.check(Kind::RateLimitPolicy, &world.rate_limit_policies, Report::rate_limit_policy);
        for (kind, templates) in &world.templates {
            pass.check(*kind, templates, Report::template);
        }
        pass.check_each(Kind::ConfigMap, world.mesh.iter(), Report::mesh_config);
    }
}

struct Pass<'a, 'v> {
    report: Report<'a>,
    kept: &'v mut HashMap<u64, ObjectFindings>,
}

impl<'a> Pass<'a, '_> {
    fn check<T>(
        &mut self,
        kind: Kind,
        store: &'a Store<T>,
        check: impl Fn(&mut Report<'a>, &ObjectReport<'a, T>),
    ) {
        self.check_each(kind, store.iter(), check);
    }

    fn check_each<T: 'a>(
        &mut self,
        kind: Kind,
        entries: impl Iterator<Item = &'a Entry<T>>,
        check: impl Fn(&mut Report<'a>, &ObjectReport<'a, T>),
    ) {
        for entry in entries {
            let meta = &entry.object.meta;
            let key = self.report.world.hash(Input::Object(kind, &meta.namespace, &meta.name));
            if self.kept.contains_key(&key) {
                continue;
            }
            self.report.world.record(Input::Object(kind, &meta.namespace, &meta.name));
            self.report.alike = Some(BTreeMap::new());
            check(&mut self.report, &ObjectReport { entry, kind });
            let inputs = self.report.world.take_inputs();
            let diagnostics = self.report.take_diagnostics();
            self.kept.insert(key, ObjectFindings { inputs, diagnostics });
        }
    }
}

/// Hashes of changed inputs.
struct Changes<'a> {
    hasher: &'a RandomState,
    inputs: Vec<u64>,
}

impl Changes<'_> {
    /// Adds what differs between two Worlds. Then `before` has the objects of `after`.
    fn find(&mut self, before: &mut World, after: &World) {
        macro_rules! compare {
            ($($store:ident $kind:ident),* $(,)?) => {
                $(self.compare(Kind::$kind, &mut before.$store, &after.$store, Entry::is_same, |_, _| {});)*
            };
        }
        compare!(
            namespaces Namespace, service_accounts ServiceAccount, secrets Secret,
            slices EndpointSlice, service_entries ServiceEntry, entry_workloads WorkloadEntry,
            peer_authentications PeerAuthentication, authorization_policies AuthorizationPolicy,
            gateways Gateway, request_authentications RequestAuthentication, telemetries Telemetry,
            kubernetes_gateways KubernetesGateway, http_routes HttpRoute, grpc_routes GrpcRoute,
            rate_limit_policies RateLimitPolicy, wasm_plugins WasmPlugin,
            traffic_extensions TrafficExtension,
        );
        self.compare(Kind::Pod, &mut before.pods, &after.pods, is_equal_but_ready, |_, _| {});
        self.find_templates(before, after);
        self.compare(
            Kind::Service,
            &mut before.services,
            &after.services,
            Entry::is_same,
            |changes, service| {
                changes.add_host(&service.fqdn());
                for address in &service.spec.cluster_ips {
                    changes.add(Input::Address(*address));
                }
            },
        );
        self.compare(
            Kind::VirtualService,
            &mut before.virtual_services,
            &after.virtual_services,
            Entry::is_same,
            |changes, rule| mesh_hosts(rule).iter().for_each(|host| changes.add_host(host)),
        );
        self.compare(
            Kind::DestinationRule,
            &mut before.destination_rules,
            &after.destination_rules,
            Entry::is_same,
            |changes, rule| changes.add_host(&fqdn(&rule.spec.host, &rule.meta.namespace)),
        );
        let is_same = before.mesh.iter().zip(&after.mesh).all(|(one, other)| one.is_same(other));
        if !is_same || before.mesh.is_some() != after.mesh.is_some() {
            for meta in before.mesh.iter().chain(&after.mesh).map(|entry| &entry.object.meta) {
                self.add(Input::Object(Kind::ConfigMap, &meta.namespace, &meta.name));
            }
        }
        before.mesh.clone_from(&after.mesh);
        before.default_mesh.clone_from(&after.default_mesh);
        before.allocated.clone_from(&after.allocated);
    }

    fn find_templates(&mut self, before: &mut World, after: &World) {
        let none = Store::default();
        for kind in after.templates.keys() {
            before.templates.entry(*kind).or_default();
        }
        for (kind, known) in &mut before.templates {
            let templates = after.templates.get(kind).unwrap_or(&none);
            if known.is_empty() != templates.is_empty() {
                self.add(Input::Any(Kind::Pod));
            }
            self.compare(*kind, known, templates, Entry::is_same, |changes, template| {
                changes.add_kind(Kind::Pod, &template.meta.namespace);
            });
        }
    }

    /// Adds the inputs that the differences of a kind affect, and those of `more` for each state of each object.
    fn compare<T: Clone>(
        &mut self,
        kind: Kind,
        before: &mut Store<T>,
        after: &Store<T>,
        is_same: impl Fn(&Entry<T>, &Entry<T>) -> bool,
        more: impl Fn(&mut Self, &Typed<T>),
    ) {
        before.differences(after, is_same, |entry| {
            let meta = &entry.object.meta;
            self.add_kind(kind, &meta.namespace);
            self.add(Input::Object(kind, &meta.namespace, &meta.name));
            more(self, &entry.object);
        });
        if before.is_empty() != after.is_empty() {
            self.add(Input::Any(kind));
        }
        *before = after.clone();
    }

    fn add_kind(&mut self, kind: Kind, namespace: &str) {
        self.add(Input::All(kind));
        self.add(Input::In(kind, namespace));
    }

    fn add_host(&mut self, host: &str) {
        self.add(Input::Host(host));
        if host.starts_with('*') {
            self.add(Input::Wildcards);
        }
    }

    fn add(&mut self, input: Input<'_>) {
        self.inputs.push(self.hasher.hash_one(input));
    }
}

/// Compares two Pods by what checks read: neither their place in files nor their readiness, which changes at each
/// rollout.
fn is_equal_but_ready(one: &Entry<Pod>, other: &Entry<Pod>) -> bool {
    let (one, other) = (&one.object, &other.object);
    let is_equal = || Pod { ready: other.spec.ready, ..one.spec.clone() } == other.spec;
    Arc::ptr_eq(one, other) || one.meta == other.meta && is_equal()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: shop, labels: {app: a}}
spec: {serviceAccountName: a, containers: [{name: c, image: c}]}
status: {podIP: 10.0.0.1, conditions: [{type: Ready, status: \"True\"}]}
";
    const GATEWAY: &str = "
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: shop}
spec: {selector: {app: a}, servers: [{port: {number: 80, name: http, protocol: HTTP}, hosts: ['*']}]}
---
";

    fn world(pod: &str) -> World {
        let mut world = World::new();
        world.reset(crate::parse(&format!("{GATEWAY}{pod}"), "test.yaml").objects);
        world
    }

    #[test]
    fn readiness_repeats_no_check() {
        let mut validator = Validator::default();
        assert_eq!(validator.validate(&world(POD)), []);
        validator.forget_changed(&world(&POD.replace("True", "False")));
        assert_eq!(validator.kept.len(), 1, "the findings of the Gateway are kept");
        let other = world(&POD.replace("app: a", "app: b"));
        validator.forget_changed(&other);
        assert_eq!(validator.kept.len(), 0);
        assert_eq!(validator.validate(&other).len(), 1, "the Gateway selects no workload");
    }
}
