//! Writes the status of objects of Gateway API and of Ingresses to the cluster. One replica does so, the leader.
//!
//! A status is written if it differs from what the cluster has. Conditions keep the time of their last change, and what
//! other controllers wrote stays.

use std::{collections::HashMap, convert::Infallible, net::IpAddr, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use serde_json::{Map, Value, json};
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
/// Interval at which a failed write is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Number of concurrent writes.
const WRITES: usize = 8;

/// Writes statuses while this replica leads.
pub(crate) struct StatusWriter {
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) statuses: Arc<Statuses>,
    /// Whether this replica is the leader.
    pub(crate) leads: watch::Receiver<bool>,
    /// Told after each publication of a change of the cluster's objects.
    pub(crate) published: watch::Receiver<()>,
}

/// A status that was written: as it was meant, without times, and as the cluster then had it.
struct WrittenStatus {
    meant: Value,
    taken: Value,
}

impl StatusWriter {
    /// Writes statuses without end.
    pub(crate) async fn run(mut self) -> Infallible {
        let mut observed = self.statuses.subscribe();
        let mut written: HashMap<ClusterObject, WrittenStatus> = HashMap::new();
        loop {
            while !*self.leads.borrow_and_update() {
                written.clear();
                let _ = self.leads.changed().await;
            }
            observed.mark_unchanged();
            self.published.mark_unchanged();
            let publisher = Arc::clone(&self.publisher);
            let meant = tokio::task::spawn_blocking(move || statuses_of(&publisher.world())).await;
            let failed = self.write(meant.unwrap_or_default(), &mut written).await;
            tokio::select! {
                _ = observed.changed() => {}
                _ = self.published.changed() => {}
                _ = self.leads.changed() => {}
                () = sleep(RETRY), if failed => {}
            }
            sleep(SETTLE).await;
        }
    }

    /// Writes the statuses that differ. Returns whether a write failed.
    async fn write(
        &self,
        meant: Vec<(ClusterObject, Status)>,
        written: &mut HashMap<ClusterObject, WrittenStatus>,
    ) -> bool {
        let now = timestamp();
        let due = meant.into_iter().filter_map(|(object, status)| {
            let observed = self.statuses.get(&object)?;
            let whole = status.over(&observed, &now);
            let meant = without_times(&whole);
            let is_known =
                written.get(&object).is_some_and(|last| last.meant == meant && last.taken == observed.status);
            (!is_known && whole != observed.status).then_some((object, observed, whole, meant))
        });
        let write =
            async |(object, observed, whole, meant): (ClusterObject, ObservedStatus, Value, Value)| {
                let result = self.statuses.write(&object, &observed, &whole).await;
                (object, meant, result)
            };
        let due: Vec<_> = due.collect();
        let mut results = stream::iter(due).map(write).buffer_unordered(WRITES);
        let mut failed = false;
        while let Some((object, meant, result)) = results.next().await {
            match result {
                Ok(StatusWrite::Done) => {
                    let taken = self.statuses.get(&object).map(|observed| observed.status);
                    written.insert(object, WrittenStatus { meant, taken: taken.unwrap_or_default() });
                }
                // A later version of the object is on its way.
                Ok(StatusWrite::Outdated) => {}
                Err(error) => {
                    failed = true;
                    let ClusterObject { kind, namespace, name, .. } = object;
                    warn!(
                        error,
                        "the status of {kind} {namespace}/{name} cannot be written; it is tried again"
                    );
                }
            }
        }
        failed
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
}

/// Returns the statuses of all objects.
fn statuses_of(world: &World) -> Vec<(ClusterObject, Status)> {
    let of_ingress = world.served_ingresses().into_iter().map(|key| {
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
        };
        (object_of(&key), status)
    });
    let of_gateway_api = world.gateway_api_status().into_iter().map(|status| {
        let object = object_of(&status.object);
        let addresses = world.external_addresses(&status.object);
        (object, gateway_api(status, addresses, |parent, namespace| world.controller_at(parent, namespace)))
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
    }
}

impl Status {
    /// Returns the whole status of an object that has this one now.
    fn over(&self, observed: &ObservedStatus, now: &str) -> Value {
        let before = &observed.status;
        let merged = |conditions: &[StatusCondition], before: &Value| -> Value {
            conditions_over(conditions, before, observed.generation, now)
        };
        let mut status = before.as_object().cloned().unwrap_or_default();
        status.extend(self.fields.clone());
        if !self.conditions.is_empty() {
            status.insert("conditions".to_owned(), merged(&self.conditions, &before["conditions"]));
        }
        for (name, conditions) in &self.listeners {
            let listeners = status.get_mut("listeners").and_then(Value::as_array_mut);
            let own = listeners.and_then(|all| all.iter_mut().find(|one| one["name"] == **name));
            let known = before["listeners"].as_array().into_iter().flatten();
            let known = known.into_iter().find(|one| one["name"] == **name);
            if let Some(own) = own {
                own["conditions"] = merged(conditions, known.map_or(&Value::Null, |one| &one["conditions"]));
            }
        }
        if let Some((field, reference)) = field_of_parents(self.kind) {
            let known = || before[field].as_array().into_iter().flatten();
            let is_own =
                |of: &Value| CONTROLLERS.iter().any(|controller| of["controllerName"] == **controller);
            let others = known().filter(|of| !is_own(of)).cloned();
            let own = self.parents.iter().map(|(of, controller)| {
                let parent = parent_reference(&of.parent);
                let same =
                    known().find(|one| one[reference] == parent && one["controllerName"] == **controller);
                let conditions = merged(&of.conditions, same.map_or(&Value::Null, |one| &one["conditions"]));
                json!({ reference: parent, "controllerName": controller, "conditions": conditions })
            });
            status.insert(field.to_owned(), others.chain(own).collect());
        }
        status.into()
    }
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

/// Returns conditions as a cluster has them. A condition whose status is that of `before` keeps its time, and conditions of
/// other types stay.
fn conditions_over(conditions: &[StatusCondition], before: &Value, generation: i64, now: &str) -> Value {
    let known = || before.as_array().into_iter().flatten();
    let others = known().filter(|of| conditions.iter().all(|own| of["type"] != own.kind)).cloned();
    let own = conditions.iter().map(|of| {
        let status = if of.status { "True" } else { "False" };
        let since = known().find(|one| one["type"] == of.kind && one["status"] == status);
        let since = since.and_then(|one| one["lastTransitionTime"].as_str()).unwrap_or(now);
        json!({ "type": of.kind, "status": status, "reason": of.reason, "message": of.message,
                "observedGeneration": generation, "lastTransitionTime": since })
    });
    own.chain(others).collect()
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
