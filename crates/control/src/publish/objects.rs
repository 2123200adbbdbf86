//! Status of configuration objects: which proxies hold the resources that an object affects, and which have accepted
//! them.
//!
//! Nothing is recorded while changes are published, except the generation of each changed object. A status is computed
//! when it is requested, from three facts: the resources that the object affects ([`skysail_model::Reach`]), the
//! generation in which each resource last changed, and the generation up to which each proxy has answered. One request
//! is served at a time.

mod deliveries;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use serde::Serialize;
use skysail_model::{
    Diagnostic, Kind, ObjectKey, Origin, Severity, World,
    world::{ClusterStatus, ListenerStatus, ObjectCondition, StatusCondition},
};
use skysail_xds::Snapshot;

use self::deliveries::{Delivery, FeedKey, Fleet, HeldResource};
use super::{
    Publisher,
    change_log::AppliedChange,
    state::State,
    status::{ClientStatus, lock},
};
use crate::parallel;

/// Maximum number of resources in the status of an object.
const MAX_RESOURCES: usize = 200;
/// Generation of an object that is not published yet.
const UNPUBLISHED: u64 = u64::MAX;

/// State of an object; if several apply, the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ObjectState {
    /// The control plane refuses the object. Its last valid version stays in effect, or a fallback of a policy without
    /// one.
    Invalid,
    /// The object changed and is being published.
    Publishing,
    /// A proxy has rejected a resource that the object affects.
    Refused,
    /// Not all proxies have answered.
    Pending,
    /// All proxies that hold a resource that the object affects have accepted it.
    InEffect,
    /// No connected proxy holds a resource that the object affects.
    Unused,
}

/// Numbers of the proxies that hold a resource that an object affects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct DeliveryCounts {
    /// All.
    proxies: usize,
    /// Those that have accepted all of these resources.
    acknowledged: usize,
    /// Those that were sent the last change and have not answered.
    sent: usize,
    /// Those that were not sent the last change yet.
    pending: usize,
    /// Those that have rejected one of these resources.
    refused: usize,
}

/// An object in the list of all objects.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ObjectSummary {
    kind: &'static str,
    /// API group; empty for the core group.
    group: &'static str,
    namespace: String,
    name: String,
    state: ObjectState,
    /// Numbers of findings about the object.
    errors: usize,
    warnings: usize,
    #[serde(flatten)]
    counts: DeliveryCounts,
}

/// An object with the reasons of its status.
#[derive(Debug, Serialize)]
pub(crate) struct ObjectStatus {
    #[serde(flatten)]
    summary: ObjectSummary,
    file: String,
    line: u32,
    /// Fingerprint of the text of the file that is in use.
    fingerprint: Option<u64>,
    findings: Vec<Diagnostic>,
    /// Conditions of an object of Gateway API or of an Ingress.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    conditions: Vec<ConditionStatus>,
    /// Listeners of a Gateway or a ListenerSet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    listeners: Vec<ListenerState>,
    /// Number of accepted ListenerSets of a Gateway of Gateway API.
    #[serde(skip_serializing_if = "Option::is_none")]
    attached_listener_sets: Option<usize>,
    /// Addresses at which clients reach an Ingress or a Gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    addresses: Option<Vec<String>>,
    /// Resources that the object affects and that proxies hold, at most [`MAX_RESOURCES`].
    resources: Vec<ResourceName>,
    /// Number of further resources.
    resources_omitted: usize,
    /// The proxies that hold these resources.
    deliveries: Vec<ProxyDelivery>,
}

/// A condition, as in the status of an object in a cluster.
#[derive(Debug, Serialize)]
struct ConditionStatus {
    r#type: &'static str,
    status: bool,
    reason: &'static str,
    message: String,
    /// Listener or parent that it concerns.
    #[serde(skip_serializing_if = "String::is_empty")]
    about: String,
}

impl From<ObjectCondition> for ConditionStatus {
    fn from(ObjectCondition { about, condition }: ObjectCondition) -> Self {
        let StatusCondition { kind, status, reason, message } = condition;
        Self { r#type: kind, status, reason, message, about }
    }
}

/// A listener, as in the status of an object in a cluster.
#[derive(Debug, Serialize)]
struct ListenerState {
    name: String,
    attached_routes: usize,
    supported_kinds: Vec<&'static str>,
}

impl From<ListenerStatus> for ListenerState {
    fn from(of: ListenerStatus) -> Self {
        let supported_kinds = of.supported_kinds.into_iter().map(Kind::as_str).collect();
        Self { name: of.name, attached_routes: of.attached_routes, supported_kinds }
    }
}

#[derive(Debug, Serialize)]
struct ResourceName {
    r#type: &'static str,
    name: String,
}

/// State of an object's resources at a proxy.
#[derive(Debug, Serialize)]
struct ProxyDelivery {
    proxy: String,
    address: String,
    connection: u64,
    state: &'static str,
    /// Error message of a rejection.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Generation in which an object was published, for each object that has changed since the start.
#[derive(Debug, Default)]
pub(super) struct ObjectGenerations(HashMap<ObjectKey, u64>);

impl ObjectGenerations {
    /// Records changes that are not published yet.
    pub(super) fn change(&mut self, applied: &[AppliedChange]) {
        for AppliedChange { object, action, .. } in
            applied.iter().filter(|change| has_status(change.object.kind))
        {
            match *action {
                "deleted" => _ = self.0.remove(object),
                _ => _ = self.0.insert(object.clone(), UNPUBLISHED),
            }
        }
    }

    /// Records that these changes are published.
    pub(super) fn publish(&mut self, generation: u64, applied: &[AppliedChange]) {
        for AppliedChange { object, .. } in applied {
            if let Some(published) = self.0.get_mut(object) {
                *published = generation;
            }
        }
    }
}

/// Everything that a status depends on, at one version.
struct ObjectView {
    world: World,
    views: Vec<(FeedKey, Snapshot)>,
    clients: Vec<(FeedKey, ClientStatus)>,
    generations: HashMap<ObjectKey, u64>,
    /// Findings by object.
    findings: BTreeMap<String, Vec<Diagnostic>>,
    /// Objects that are refused as a whole.
    refused: BTreeSet<String>,
}

impl Publisher {
    /// Returns the status of all objects. Blocks.
    pub(crate) fn objects(&self) -> Vec<ObjectSummary> {
        let _one_at_a_time = lock(&self.object_status);
        let view = self.read().object_view();
        let mut keys: BTreeMap<ObjectKey, &Origin> = view.world.configured_objects().into_iter().collect();
        let unknown = Origin::default();
        for refused in &view.refused {
            keys.extend(parse_key(refused).map(|key| (key, &unknown)));
        }
        let keys: Vec<ObjectKey> = keys.into_keys().collect();
        let (index, fleet) = (view.world.reaches(), view.fleet());
        parallel::map(&keys, |key| {
            let deliveries = fleet.deliveries(&index.of(key), view.published(key), None);
            view.summary(key, counts(deliveries.iter().flatten()))
        })
    }

    /// Returns the status of an object, by its kind as written (or `KIND.GROUP`), namespace and name. Blocks.
    pub(crate) fn object(&self, kind: &str, namespace: &str, name: &str) -> Option<ObjectStatus> {
        let _one_at_a_time = lock(&self.object_status);
        let (view, fingerprints) = {
            let state = self.read();
            (state.object_view(), state.fingerprints.clone())
        };
        let is_it =
            |key: &ObjectKey| is_kind(key.kind, kind) && key.namespace == namespace && key.name == name;
        let known = view.world.configured_objects();
        let known = known.into_iter().find(|(key, _)| is_it(key));
        let (key, origin) = match known {
            Some((key, origin)) => (key, Some(origin)),
            None => (view.refused.iter().filter_map(|text| parse_key(text)).find(is_it)?, None),
        };
        let mut resources: BTreeSet<HeldResource> = BTreeSet::new();
        let reaches = view.world.reaches().of(&key);
        let deliveries = view.fleet().deliveries(&reaches, view.published(&key), Some(&mut resources));
        let summary = view.summary(&key, counts(deliveries.iter().flatten()));
        let findings = view.findings.get(&key.to_string()).cloned().unwrap_or_default();
        let place = origin.map(|origin| (origin.file.to_string(), origin.line));
        let place = place.or_else(|| findings.first().map(|finding| (finding.file.clone(), finding.line)));
        let (file, line) = place.unwrap_or_default();
        let of_clients = view.clients.iter().zip(deliveries);
        let proxies = of_clients.filter_map(|((_, client), delivery)| {
            let delivery = delivery?;
            let ClientStatus { proxy, address, connection, .. } = client.clone();
            let error = match &delivery {
                Delivery::Refused(error) => Some(error.to_string()),
                _ => None,
            };
            Some(ProxyDelivery { proxy, address, connection, state: delivery.as_str(), error })
        });
        let ClusterStatus { conditions, listeners, attached_listener_sets, addresses } =
            view.world.cluster_status(&key);
        Some(ObjectStatus {
            summary,
            fingerprint: fingerprints.get(&file).copied(),
            file,
            line,
            findings,
            conditions: conditions.into_iter().map(ConditionStatus::from).collect(),
            listeners: listeners.into_iter().map(ListenerState::from).collect(),
            attached_listener_sets,
            addresses,
            resources_omitted: resources.len().saturating_sub(MAX_RESOURCES),
            deliveries: proxies.collect(),
            resources: resources
                .into_iter()
                .take(MAX_RESOURCES)
                .map(|HeldResource { kind, name }| ResourceName {
                    r#type: kind.short(),
                    name: name.to_string(),
                })
                .collect(),
        })
    }
}

impl State {
    /// Returns the objects of which the last version is refused as a whole.
    pub(super) fn refused_objects(&self) -> BTreeSet<String> {
        let findings = self.files.diagnostics().into_iter();
        let refused = findings.filter(|of| of.severity == Severity::Error && !of.object.is_empty());
        refused.map(|finding| finding.object).collect()
    }

    fn object_view(&self) -> ObjectView {
        let mut findings: BTreeMap<String, Vec<Diagnostic>> = BTreeMap::new();
        for finding in self.all_findings() {
            findings.entry(finding.object.clone()).or_default().push(finding);
        }
        let clients = self.clients.values();
        let clients = clients.map(|client| {
            let feed = (Arc::clone(&client.view), Arc::clone(&client.node));
            (feed, lock(&client.status).clone())
        });
        let views = self.views.iter().flat_map(|(view, entry)| {
            let feeds = entry.feeds.iter();
            feeds.map(move |(node, feed)| {
                ((Arc::clone(view), Arc::clone(node)), feed.snapshots.borrow().clone())
            })
        });
        ObjectView {
            world: self.world.clone(),
            views: views.collect(),
            generations: self.object_generations.0.clone(),
            refused: self.refused_objects(),
            findings,
            clients: clients.collect(),
        }
    }
}

impl ObjectView {
    fn fleet(&self) -> Fleet<'_> {
        Fleet::new(&self.views, &self.clients)
    }

    fn published(&self, key: &ObjectKey) -> u64 {
        self.generations.get(key).copied().unwrap_or_default()
    }

    fn summary(&self, key: &ObjectKey, counts: DeliveryCounts) -> ObjectSummary {
        let text = key.to_string();
        let findings = self.findings.get(&text).map(Vec::as_slice).unwrap_or_default();
        let number = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
        let state = if self.refused.contains(&text) {
            ObjectState::Invalid
        } else if self.published(key) == UNPUBLISHED {
            ObjectState::Publishing
        } else if counts.refused > 0 {
            ObjectState::Refused
        } else if counts.pending + counts.sent > 0 {
            ObjectState::Pending
        } else if counts.proxies > 0 {
            ObjectState::InEffect
        } else {
            ObjectState::Unused
        };
        ObjectSummary {
            kind: key.kind.as_str(),
            group: key.kind.group(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            state,
            errors: number(Severity::Error),
            warnings: number(Severity::Warning),
            counts,
        }
    }
}

fn counts<'a>(deliveries: impl Iterator<Item = &'a Delivery>) -> DeliveryCounts {
    let mut counts = DeliveryCounts::default();
    for delivery in deliveries {
        counts.proxies += 1;
        match delivery {
            Delivery::Acknowledged => counts.acknowledged += 1,
            Delivery::Sent => counts.sent += 1,
            Delivery::Pending => counts.pending += 1,
            Delivery::Refused(_) => counts.refused += 1,
        }
    }
    counts
}

/// Returns whether the generation of changes of a kind is recorded. Objects that describe the platform are too many.
const fn has_status(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::Pod
            | Kind::EndpointSlice
            | Kind::Namespace
            | Kind::Node
            | Kind::ServiceAccount
            | Kind::Deployment
            | Kind::StatefulSet
            | Kind::DaemonSet
            | Kind::ReplicaSet
            | Kind::Job
            | Kind::CronJob
    )
}

/// Returns whether a text is the kind as written or `KIND.GROUP`, in upper or lower case.
fn is_kind(kind: Kind, text: &str) -> bool {
    let (written, group) = text.split_once('.').map_or((text, None), |(kind, group)| (kind, Some(group)));
    kind.as_str().eq_ignore_ascii_case(written)
        && group.is_none_or(|group| kind.group().eq_ignore_ascii_case(group))
}

/// Returns the key of an object as findings name it: `KIND NAMESPACE/NAME`.
fn parse_key(text: &str) -> Option<ObjectKey> {
    let (kind, place) = text.split_once(' ')?;
    let (namespace, name) = place.split_once('/')?;
    let kind = Kind::ALL.iter().copied().find(|of| of.as_str() == kind && has_status(*of))?;
    Some(ObjectKey { kind, namespace: namespace.to_owned(), name: name.to_owned() })
}
