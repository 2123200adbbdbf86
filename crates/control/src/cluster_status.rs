//! Writes the status of objects of Gateway API and of Ingresses to the cluster. One replica does so, the leader.
//!
//! A status is written if it differs from what the cluster has. Conditions keep the time of their last change, and what
//! other controllers wrote stays. A refused object keeps its status: `observedGeneration` tells which version it is about.
//! If another controller changes a status back, it is written again only after a pause.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::pending,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, future::OptionFuture, stream};
use serde_json::{Map, Value, json};
use skysail_core::logging::Throttle;
use skysail_kubernetes::{ClusterObject, ObservedStatus, StatusWrite, Statuses, timestamp};
use skysail_model::{
    Kind, ObjectKey, World,
    api::gateway_api::{GROUP, ParentReference},
    world::{CONTROLLERS, GatewayApiStatus, ParentStatus, StatusCondition},
};
use tokio::{sync::watch, time::sleep};
use tracing::warn;

use crate::publish::Publisher;

/// Time in which further changes are awaited before statuses are compared.
const SETTLE: Duration = Duration::from_millis(100);
/// The longest such time. It grows with the time that a comparison takes, so that comparisons leave most of a CPU free.
const MAX_SETTLE: Duration = Duration::from_secs(10);
/// Interval at which a status is written again: after a failure, or if another controller changes it back.
const RETRY: Duration = Duration::from_secs(30);
/// Interval of messages about failed writes.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(60);
/// Number of concurrent writes.
const WRITES: usize = 8;
/// Conditions of whole objects that no other controller sets.
const OWN_CONDITIONS: [&str; 4] =
    ["Accepted", "Programmed", "ResolvedRefs", "InsecureFrontendValidationMode"];

/// Writes statuses while this replica leads.
pub(crate) struct StatusWriter {
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) statuses: Arc<Statuses>,
    /// Whether this replica is the leader.
    pub(crate) leads: watch::Receiver<bool>,
    /// Told after each publication of a change of the cluster's objects.
    pub(crate) published: watch::Receiver<()>,
}

/// A status that was written: as it was meant, without times, as the cluster then had it, and when.
struct WrittenStatus {
    meant: Value,
    /// `None`: the write failed.
    taken: Option<Value>,
    at: Instant,
}

impl WrittenStatus {
    /// Returns whether a status that is meant now is not to be written yet: the cluster has it, as far as it takes it, or it
    /// was written lately and in vain.
    fn covers(&self, meant: &Value, observed: &Value) -> bool {
        self.meant == *meant && (self.taken.as_ref() == Some(observed) || self.at.elapsed() < RETRY)
    }
}

/// A status that is to be written.
struct DueStatus {
    object: ClusterObject,
    observed: ObservedStatus,
    whole: Value,
    /// The same without times.
    meant: Value,
}

impl StatusWriter {
    /// Writes statuses without end.
    pub(crate) async fn run(mut self) -> Infallible {
        let mut observed = self.statuses.subscribe();
        let mut written: HashMap<ClusterObject, WrittenStatus> = HashMap::new();
        let lines = Throttle::new(MESSAGE_INTERVAL);
        loop {
            while !*self.leads.borrow_and_update() {
                written.clear();
                if self.leads.changed().await.is_err() {
                    return pending().await;
                }
            }
            observed.mark_unchanged();
            self.published.mark_unchanged();
            let publisher = Arc::clone(&self.publisher);
            let begun = Instant::now();
            let meant = tokio::task::spawn_blocking(move || publisher.with_served(statuses_of)).await;
            let settle = (4 * begun.elapsed()).clamp(SETTLE, MAX_SETTLE);
            let waits = self.write(meant.unwrap_or_default(), &mut written, &lines).await;
            tokio::select! {
                _ = observed.changed() => {}
                _ = self.published.changed() => {}
                ended = self.leads.changed() => if ended.is_err() { return pending().await },
                () = sleep(RETRY), if waits => {}
            }
            sleep(settle).await;
        }
    }

    /// Writes the statuses that differ, while this replica leads. Returns whether one is to be written later.
    async fn write(
        &self,
        meant: Vec<(ClusterObject, Status)>,
        written: &mut HashMap<ClusterObject, WrittenStatus>,
        lines: &Throttle,
    ) -> bool {
        written.retain(|object, _| self.statuses.get(object).is_some());
        let (due, mut waits) = self.due(meant, written);
        let write = async |due: DueStatus| {
            let leads = *self.leads.borrow();
            let DueStatus { object, observed, whole, meant } = due;
            let result = leads.then(|| self.statuses.write(&object, &observed, &whole));
            let result = OptionFuture::from(result).await;
            (object, meant, result)
        };
        let mut results = stream::iter(due).map(write).buffer_unordered(WRITES);
        while let Some((object, meant, result)) = results.next().await {
            let taken = match result {
                // A later version of the object is on its way, or another replica leads.
                None | Some(Ok(StatusWrite::Outdated)) => continue,
                Some(Ok(StatusWrite::Done)) => self.statuses.get(&object).map(|observed| observed.status),
                Some(Err(error)) => {
                    if let Some(more) = lines.admit(Instant::now()) {
                        let ClusterObject { kind, namespace, name, .. } = &object;
                        warn!(
                            error,
                            more,
                            "the status of {kind} {namespace}/{name} cannot be written; it is tried again"
                        );
                    }
                    None
                }
            };
            waits |= taken.is_none();
            written.insert(object, WrittenStatus { meant, taken, at: Instant::now() });
        }
        waits
    }

    /// Returns the statuses to write now, and whether others are to be written later.
    fn due(
        &self,
        meant: Vec<(ClusterObject, Status)>,
        written: &HashMap<ClusterObject, WrittenStatus>,
    ) -> (Vec<DueStatus>, bool) {
        let (now, mut waits, mut due) = (timestamp(), false, Vec::new());
        for (object, status) in meant {
            let Some(observed) = self.statuses.get(&object) else { continue };
            let whole = status.over(&observed.status, &now);
            if whole == observed.status {
                continue;
            }
            let meant = without_times(&whole);
            match written.get(&object).filter(|last| last.covers(&meant, &observed.status)) {
                Some(last) => waits |= last.taken.as_ref() != Some(&observed.status),
                None => due.push(DueStatus { object, observed, whole, meant }),
            }
        }
        (due, waits)
    }
}

/// Status of an object, without what depends on the cluster's present one.
struct Status {
    conditions: Vec<StatusCondition>,
    /// Fields other than conditions and those of parents.
    fields: Map<String, Value>,
    /// Conditions of listeners by name.
    listeners: Vec<(String, Vec<StatusCondition>)>,
    /// Parents of a route or ancestors of a policy, with the name of the controller.
    parents: Vec<(ParentStatus, &'static str)>,
    kind: Kind,
    /// Version of the object that the status is about.
    generation: i64,
}

/// Returns the statuses of all objects but those of which the last version is refused.
fn statuses_of(world: &World, is_refused: &dyn Fn(&ObjectKey) -> bool) -> Vec<(ClusterObject, Status)> {
    let generation = |key: &ObjectKey| world.origin(key).map(|origin| origin.generation).unwrap_or_default();
    let served = world.served_ingresses().into_iter().filter(|key| !is_refused(key));
    let of_ingress = served.map(|key| {
        let addresses = world.external_addresses(&key).unwrap_or_default();
        let ingress = addresses.iter().map(|address| match address.parse::<IpAddr>() {
            Ok(_) => json!({ "ip": address }),
            Err(_) => json!({ "hostname": address }),
        });
        let balancer = json!({ "ingress": ingress.collect::<Vec<_>>() });
        let status = Status {
            conditions: Vec::new(),
            fields: Map::from_iter([("loadBalancer".to_owned(), balancer)]),
            listeners: Vec::new(),
            parents: Vec::new(),
            kind: Kind::Ingress,
            generation: generation(&key),
        };
        (object_of(&key), status)
    });
    let known = world.gateway_api_status().into_iter().filter(|status| !is_refused(&status.object));
    let of_gateway_api = known.map(|status| {
        let (object, generation) = (object_of(&status.object), generation(&status.object));
        let addresses = world.external_addresses(&status.object);
        let controller = |parent: &ParentReference, namespace: &str| world.controller_at(parent, namespace);
        (object, Status { generation, ..gateway_api(status, addresses, controller) })
    });
    of_ingress.chain(of_gateway_api).collect()
}

fn object_of(key: &ObjectKey) -> ClusterObject {
    ClusterObject {
        group: key.kind.group().to_owned(),
        kind: key.kind.as_str().to_owned(),
        namespace: key.namespace.clone(),
        name: key.name.clone(),
    }
}

fn gateway_api(
    status: GatewayApiStatus,
    addresses: Option<Vec<String>>,
    controller: impl Fn(&ParentReference, &str) -> &'static str,
) -> Status {
    let mut fields = Map::new();
    if let Some(addresses) = addresses {
        let typed = addresses.iter().map(|address| {
            let kind = if address.parse::<IpAddr>().is_ok() { "IPAddress" } else { "Hostname" };
            json!({ "type": kind, "value": address })
        });
        fields.insert("addresses".to_owned(), typed.collect());
    }
    if let Some(sets) = status.attached_listener_sets {
        fields.insert("attachedListenerSets".to_owned(), sets.into());
    }
    let kinds = |kinds: &[Kind]| -> Value {
        kinds.iter().map(|kind| json!({ "group": GROUP, "kind": kind.as_str() })).collect()
    };
    let listeners = status.listeners.iter().map(|of| {
        json!({ "name": of.name, "attachedRoutes": of.attached_routes, "supportedKinds": kinds(&of.supported_kinds) })
    });
    let listeners: Vec<Value> = listeners.collect();
    if !listeners.is_empty() {
        fields.insert("listeners".to_owned(), listeners.into());
    }
    let namespace = status.object.namespace;
    let parents = status.parents.into_iter().map(|of| {
        let controller = controller(&of.parent, &namespace);
        (of, controller)
    });
    Status {
        conditions: status.conditions,
        fields,
        parents: parents.collect(),
        listeners: status.listeners.into_iter().map(|of| (of.name, of.conditions)).collect(),
        kind: status.object.kind,
        generation: 0,
    }
}

impl Status {
    /// Returns the whole status of an object that has this one now.
    fn over(&self, before: &Value, now: &str) -> Value {
        let mut status = before.as_object().cloned().unwrap_or_default();
        status.extend(self.fields.clone());
        if !self.conditions.is_empty() {
            let others = items(&before["conditions"])
                .filter(|of| !OWN_CONDITIONS.iter().any(|own| of["type"] == **own));
            let own = self.conditions_over(&self.conditions, &before["conditions"], now).into_iter();
            status.insert("conditions".to_owned(), own.chain(others.cloned()).collect());
        }
        for (name, conditions) in &self.listeners {
            let known = items(&before["listeners"]).find(|one| one["name"] == **name);
            let known = known.map_or(&Value::Null, |one| &one["conditions"]);
            let listeners = status.get_mut("listeners").and_then(Value::as_array_mut);
            if let Some(own) = listeners.and_then(|all| all.iter_mut().find(|one| one["name"] == **name)) {
                own["conditions"] = self.conditions_over(conditions, known, now).into();
            }
        }
        if let Some((field, reference)) = field_of_parents(self.kind) {
            status.insert(field.to_owned(), self.parents_over(&before[field], reference, now).into());
        }
        status.into()
    }

    /// Returns the status at each parent. The order of `before` stays, so that controllers do not rewrite each other's.
    fn parents_over(&self, before: &Value, reference: &str, now: &str) -> Vec<Value> {
        let is_same =
            |a: &Value, b: &Value| a[reference] == b[reference] && a["controllerName"] == b["controllerName"];
        let made = self.parents.iter().map(|(of, controller)| {
            let mut one = json!({ reference: parent_reference(&of.parent), "controllerName": controller });
            let known = items(before).find(|known| is_same(known, &one));
            let known = known.map_or(&Value::Null, |known| &known["conditions"]);
            one["conditions"] = self.conditions_over(&of.conditions, known, now).into();
            one
        });
        let mut own: Vec<Value> = made.collect();
        let mut all = Vec::new();
        for one in items(before) {
            match own.iter().position(|own| is_same(own, one)) {
                Some(at) => all.push(own.remove(at)),
                // A parent that the route no longer has.
                None if CONTROLLERS.iter().any(|controller| one["controllerName"] == **controller) => {}
                None => all.push(one.clone()),
            }
        }
        all.extend(own);
        all
    }

    /// Returns conditions as a cluster has them. A condition whose status is that of `before` keeps its time.
    fn conditions_over(&self, conditions: &[StatusCondition], before: &Value, now: &str) -> Vec<Value> {
        let made = conditions.iter().map(|of| {
            let status = if of.status { "True" } else { "False" };
            let since = items(before).find(|one| one["type"] == of.kind && one["status"] == status);
            let since = since.and_then(|one| one["lastTransitionTime"].as_str()).unwrap_or(now);
            json!({ "type": of.kind, "status": status, "reason": of.reason, "message": of.message,
                    "observedGeneration": self.generation, "lastTransitionTime": since })
        });
        made.collect()
    }
}

/// Returns the items of a list; none for any other value.
fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// Returns the field with the status at each parent, and the field of a parent's reference in it.
fn field_of_parents(kind: Kind) -> Option<(&'static str, &'static str)> {
    match kind {
        Kind::HttpRoute | Kind::GrpcRoute | Kind::TlsRoute | Kind::TcpRoute => Some(("parents", "parentRef")),
        Kind::BackendTlsPolicy => Some(("ancestors", "ancestorRef")),
        _ => None,
    }
}

fn parent_reference(parent: &ParentReference) -> Value {
    let ParentReference { group, kind, namespace, name, section_name, port } = parent;
    let fields = [
        ("group", group.clone().map(Value::from)),
        ("kind", kind.clone().map(Value::from)),
        ("namespace", namespace.clone().map(Value::from)),
        ("name", Some(name.clone().into())),
        ("sectionName", section_name.clone().map(Value::from)),
        ("port", port.map(Value::from)),
    ];
    fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect::<Map<_, _>>().into()
}

/// Returns a status without times.
fn without_times(status: &Value) -> Value {
    match status {
        Value::Object(fields) => {
            let kept = fields.iter().filter(|(key, _)| *key != "lastTransitionTime");
            kept.map(|(key, value)| (key.clone(), without_times(value))).collect::<Map<_, _>>().into()
        }
        Value::Array(items) => items.iter().map(without_times).collect(),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: &str = "2026-01-02T00:00:00Z";
    const BEFORE: &str = "2026-01-01T00:00:00Z";

    fn condition(kind: &'static str, status: bool) -> StatusCondition {
        StatusCondition { kind, status, reason: "Reason", message: String::new() }
    }

    fn status(kind: Kind) -> Status {
        Status {
            conditions: Vec::new(),
            fields: Map::new(),
            listeners: Vec::new(),
            parents: Vec::new(),
            kind,
            generation: 7,
        }
    }

    fn parent(name: &str, status: bool) -> (ParentStatus, &'static str) {
        let parent = ParentReference { name: name.to_owned(), ..ParentReference::default() };
        (ParentStatus { parent, conditions: vec![condition("Accepted", status)] }, CONTROLLERS[0])
    }

    #[test]
    fn a_condition_keeps_its_time_until_its_status_changes() {
        let conditions = vec![condition("Accepted", true), condition("Programmed", false)];
        let known = |kind: &str| json!({ "type": kind, "status": "True", "lastTransitionTime": BEFORE });
        let before = json!({ "conditions": [
            known("Accepted"), known("Programmed"), known("InsecureFrontendValidationMode"), known("Foreign"),
        ]});
        let made = Status { conditions, ..status(Kind::KubernetesGateway) }.over(&before, NOW);
        let seen: Vec<_> = items(&made["conditions"])
            .map(|of| (of["type"].as_str().unwrap(), of["lastTransitionTime"].as_str().unwrap()))
            .collect();
        assert_eq!(seen, [("Accepted", BEFORE), ("Programmed", NOW), ("Foreign", BEFORE)]);
        assert_eq!(made["conditions"][0]["observedGeneration"], 7);
    }

    #[test]
    fn parents_of_other_controllers_stay_in_their_order() {
        let known = |name: &str, controller: &str| {
            json!({ "parentRef": { "name": name }, "controllerName": controller,
                    "conditions": [{ "type": "Accepted", "status": "True", "lastTransitionTime": BEFORE }] })
        };
        let (own, other) = (CONTROLLERS[0], "example.com/other");
        let before = json!({ "parents": [known("a", own), known("a", other), known("former", own)] });
        let parents = vec![parent("new", true), parent("a", true)];
        let made = Status { parents, ..status(Kind::HttpRoute) }.over(&before, NOW);
        let seen: Vec<_> = items(&made["parents"])
            .map(|of| (of["parentRef"]["name"].as_str().unwrap(), of["controllerName"].as_str().unwrap()))
            .collect();
        assert_eq!(seen, [("a", own), ("a", other), ("new", own)]);
        assert_eq!(made["parents"][0]["conditions"][0]["lastTransitionTime"], BEFORE);
        assert_eq!(made["parents"][1], before["parents"][1]);
        // Written once, it is complete.
        let parents = vec![parent("new", true), parent("a", true)];
        assert_eq!(Status { parents, ..status(Kind::HttpRoute) }.over(&made, "later"), made);
    }

    #[test]
    fn a_status_that_was_changed_back_is_not_written_at_once() {
        let (meant, taken) = (json!({ "a": 1 }), json!({ "a": 1, "added": true }));
        let mut last = WrittenStatus { meant: meant.clone(), taken: Some(taken.clone()), at: Instant::now() };
        assert!(last.covers(&meant, &taken), "the cluster has it");
        assert!(last.covers(&meant, &json!({})), "changed back a moment ago");
        assert!(!last.covers(&json!({ "a": 2 }), &taken), "it is meant otherwise now");
        last.at = Instant::now().checked_sub(RETRY).unwrap();
        assert!(last.covers(&meant, &taken) && !last.covers(&meant, &json!({})));
    }
}
