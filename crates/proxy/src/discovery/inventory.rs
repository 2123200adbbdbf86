//! Resources received and resources in effect: pure bookkeeping, no IO.
//!
//! A received resource is translated at once but comes into effect only when it is *warm*. A cluster is warm
//! when its endpoints and certificates are present. A listener is warm when its route tables and certificates
//! are present. A route table is warm when none of its clusters is still warming. Until then the previous
//! version stays in effect. A deleted cluster is removed when no route leads to it any more. So a request never
//! meets a half-applied configuration. The first version of a resource waits at most [`WARMING_TIMEOUT`], and so does
//! every version that waits only for certificates: after it, it comes into effect as it is.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Instant, SystemTime},
};

use bytes::Bytes;
use skysail_xds::{
    Kind,
    client::{Received, Rejection, Update},
    envoy::pb::envoy::config::core::v3::Node,
};
use tokio::sync::{mpsc, oneshot};

pub(crate) use super::slot::{AcceptedResource, Failure, Slot};
use super::{
    claims::Claims,
    hosts::{Hosts, compose},
    references,
    slot::{self, WARMING_TIMEOUT},
    uses,
    warming::{self, WarmingNeed},
};
use crate::{
    discovery::secrets::Secrets,
    overload::limit_log::{self, Limit},
    translate::{self, SecretName, SecretSource, Translator},
};
use skysail_policy::config::{
    ByName, Cluster, Endpoints, Listener, RouteTable, Snapshot, cluster::Discovery, route::VirtualHost,
};
use skysail_policy::state::demand::HostRequest;

/// All resources.
pub(crate) struct Inventory {
    pub(crate) secrets: Secrets,
    node: Arc<Node>,
    pub(crate) clusters: BTreeMap<Arc<str>, Slot<Cluster>>,
    pub(crate) listeners: BTreeMap<Arc<str>, Slot<Listener>>,
    pub(crate) routes: BTreeMap<Arc<str>, Slot<RouteTable>>,
    /// Virtual hosts of the route tables that use VHDS.
    pub(crate) hosts: BTreeMap<Arc<str>, Hosts>,
    /// Endpoints by EDS service name; an assignment without a body means that the server has none.
    pub(crate) assignments: HashMap<Arc<str>, Assignment>,
    claims: Claims,
    mode: ClusterMode,
    /// A header may name any cluster, so [`ClusterMode::OnDemand`] subscribes to all.
    uses_all: bool,
    /// The server has sent clusters, or has answered that there are none.
    seen_clusters: bool,
    /// Channel for requests for virtual hosts.
    host_requests: Option<mpsc::UnboundedSender<HostRequest>>,
    /// Counter of removals of trusted roots.
    distrusted: u64,
    /// Something in effect has changed since the last snapshot.
    changed: bool,
}

/// Which clusters are subscribed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClusterMode {
    /// As the bootstrap file configures.
    AsConfigured,
    /// Undecided: the kind of server is not known yet.
    Undecided,
    /// All clusters.
    All,
    /// Only the clusters in use, by name; virtual hosts on demand.
    OnDemand,
}

/// Names to subscribe to, by kind.
pub(crate) type Subscriptions = [(Kind, BTreeSet<String>); 5];

/// Endpoints of one EDS service name.
pub(crate) struct Assignment {
    pub(crate) body: Option<Bytes>,
    pub(crate) version: String,
    pub(crate) updated: SystemTime,
}

impl Inventory {
    pub(crate) fn new(secrets: Secrets, node: Node) -> Self {
        Self {
            secrets,
            node: Arc::new(node),
            clusters: BTreeMap::new(),
            listeners: BTreeMap::new(),
            routes: BTreeMap::new(),
            hosts: BTreeMap::new(),
            assignments: HashMap::new(),
            claims: Claims::default(),
            mode: ClusterMode::AsConfigured,
            uses_all: false,
            seen_clusters: false,
            host_requests: None,
            distrusted: 0,
            changed: false,
        }
    }

    /// Sets the mode. With [`ClusterMode::OnDemand`], requests for virtual hosts arrive through `host_requests`.
    pub(crate) fn set_mode(
        &mut self,
        mode: ClusterMode,
        host_requests: Option<mpsc::UnboundedSender<HostRequest>>,
    ) {
        self.mode = mode;
        self.host_requests = host_requests.filter(|_| mode == ClusterMode::OnDemand);
        for (name, hosts) in &mut self.hosts {
            hosts.set_demand(name, self.host_requests.as_ref());
        }
    }

    /// Returns whether clusters are subscribed to by name.
    fn subscribes_by_name(&self) -> bool {
        self.mode == ClusterMode::OnDemand && !self.uses_all
    }

    pub(crate) fn mode(&self) -> ClusterMode {
        self.mode
    }

    /// Adds a resource of the bootstrap file.
    pub(crate) fn add_static(&mut self, kind: Kind, name: &str, body: &Bytes) -> Result<(), String> {
        let received = Received { name: name.to_owned(), version: String::new(), body: body.clone() };
        self.add(kind, &received, true)
    }

    /// Applies an update and returns the rejected resources. The others are accepted.
    pub(crate) fn apply(&mut self, update: &Update) -> Vec<Rejection> {
        if update.kind == Kind::VirtualHost {
            return self.apply_hosts(update);
        }
        self.seen_clusters |= update.kind == Kind::Cluster;
        let mut rejections = Vec::new();
        // A new listener may take the address of one that is removed.
        let removed_first = update.kind == Kind::Listener;
        for name in update.removed.iter().filter(|_| removed_first) {
            self.remove(update.kind, name);
        }
        for received in &update.added {
            if let Err(reason) = self.add(update.kind, received, false) {
                rejections.push(Rejection { name: received.name.clone(), reason });
            }
        }
        for name in update.removed.iter().filter(|_| !removed_first) {
            self.remove(update.kind, name);
        }
        if update.kind == Kind::Secret
            && let Err(reject) = self.secrets.notify()
            && let Some(last) = update.added.last()
        {
            rejections.push(Rejection { name: last.name.clone(), reason: reject.to_string() });
        }
        rejections
    }

    fn add(&mut self, kind: Kind, received: &Received, is_static: bool) -> Result<(), String> {
        let (tls, node) = (Arc::clone(&self.secrets.tls), Arc::clone(&self.node));
        // The file is written for this sidecar, so an unsupported field is an error.
        let translator = Translator { tls: &tls, node: &node, strict: is_static };
        let (body, version) = (&received.body, received.version.as_str());
        let name: Arc<str> = received.name.as_str().into();
        let knows_clusters = is_static || (self.seen_clusters && self.mode != ClusterMode::OnDemand);
        match kind {
            Kind::Cluster => {
                let newest = self.clusters.get(&name).and_then(Slot::newest);
                if newest.is_some_and(|accepted| accepted.is_static) {
                    return Err("a cluster of the bootstrap file has this name: choose another".to_owned());
                }
                let is_new = newest.is_none_or(|known| known.body != *body);
                let made = is_new.then(|| {
                    let cluster = translator.cluster(body)?;
                    references::check_cluster(&name, &cluster, &self.clusters, &self.listeners)?;
                    Ok(cluster)
                });
                let make = || made.unwrap_or_else(|| translator.cluster(body));
                let slot = self.clusters.entry(Arc::clone(&name)).or_default();
                if slot.accept(body, version, is_static, make)? {
                    self.fill(&name)?;
                }
            }
            Kind::Listener => {
                let newest = self.listeners.get(&name).and_then(Slot::newest);
                let made = if newest.is_none_or(|known| known.body != *body) {
                    Some(translator.listener(body).and_then(|listener| {
                        self.claims.claim(&name, &listener, &self.listeners)?;
                        if knows_clusters {
                            references::check_tables(&listener, &self.clusters)?;
                        }
                        references::check_listener(&name, &listener, &self.clusters, &self.listeners)?;
                        Ok(listener)
                    }))
                } else {
                    None
                };
                let make = || made.unwrap_or_else(|| translator.listener(body));
                self.listeners.entry(name).or_default().accept(body, version, is_static, make)?;
            }
            Kind::Route => {
                let has_vhds = translate::uses_vhds(body).map_err(|reject| reject.to_string())?;
                let clusters = &self.clusters;
                let make = || {
                    let table = translator.routes(body)?;
                    if knows_clusters {
                        references::check_table(&table, clusters)?;
                    }
                    Ok(RouteTable { has_vhds, ..table })
                };
                let slot = self.routes.entry(Arc::clone(&name)).or_default();
                let before = slot.newest().map(|accepted| accepted.body.clone());
                let changed = slot.accept(body, version, is_static, make)? && before.as_ref() != Some(body);
                if has_vhds {
                    let hosts = self.hosts.entry(Arc::clone(&name)).or_default();
                    hosts.set_demand(&name, self.host_requests.as_ref());
                    if changed {
                        hosts.retranslate(translator, body);
                    }
                }
            }
            Kind::Endpoint => {
                let assignment = Assignment {
                    body: Some(body.clone()),
                    version: version.to_owned(),
                    updated: SystemTime::now(),
                };
                // Validated against every cluster that uses the endpoints before they are stored.
                for cluster in self.clusters_of(&name) {
                    let endpoints =
                        translator.endpoints(body, &cluster).map_err(|reject| reject.to_string())?;
                    cluster.endpoints.store(Arc::new(endpoints));
                }
                self.assignments.insert(name, assignment);
            }
            Kind::Secret => {
                let name = SecretName { source: SecretSource::Ads, name: received.name.as_str().into() };
                let secret = self.secrets.decode(body).map_err(|reject| reject.to_string())?;
                self.secrets.put(&name, &secret).map_err(|reject| reject.to_string())?;
            }
            // Never subscribed to, or applied by `apply_hosts`.
            Kind::VirtualHost | Kind::ExtensionConfig | Kind::NameTable => {}
        }
        Ok(())
    }

    fn apply_hosts(&mut self, update: &Update) -> Vec<Rejection> {
        let mut families: BTreeMap<&str, (Vec<&Received>, Vec<&str>)> = BTreeMap::new();
        let mut rejections = Vec::new();
        for received in &update.added {
            match Kind::VirtualHost.family(&received.name) {
                Some(family) => families.entry(family).or_default().0.push(received),
                None => rejections.push(Rejection {
                    name: received.name.clone(),
                    reason: "is not named ROUTE CONFIGURATION/NAME".to_owned(),
                }),
            }
        }
        for name in &update.removed {
            if let Some(family) = Kind::VirtualHost.family(name) {
                families.entry(family).or_default().1.push(name);
            }
        }
        for (family, (added, removed)) in families {
            rejections.extend(self.apply_hosts_of(family, &added, &removed));
        }
        rejections
    }

    fn apply_hosts_of(&mut self, family: &str, added: &[&Received], removed: &[&str]) -> Vec<Rejection> {
        let translator = Translator { tls: &self.secrets.tls, node: &self.node, strict: false };
        let slot = self.routes.get(family).and_then(Slot::newest);
        let configuration =
            slot.filter(|accepted| accepted.value.has_vhds).map(|accepted| accepted.body.clone());
        let hosts = self.hosts.entry(family.into()).or_default();
        hosts.apply(translator, &configuration.unwrap_or_default(), added, removed)
    }

    fn remove(&mut self, kind: Kind, name: &str) {
        match kind {
            Kind::Cluster => {
                let by_name = self.subscribes_by_name();
                if let Some(slot) = self.clusters.get_mut(name) {
                    slot.warming = None;
                    slot.error = None;
                    if by_name && slot.active.is_none() {
                        slot.absent = true;
                    } else {
                        slot.removed = Some(Instant::now());
                    }
                }
            }
            Kind::Listener => {
                self.changed |= self.listeners.remove(name).is_some_and(|slot| slot.active.is_some());
            }
            // The table in effect stays, because listeners still name it.
            Kind::Route => self.routes.entry(name.into()).or_default().absent = true,
            Kind::Endpoint => {
                for cluster in self.clusters_of(name) {
                    cluster.endpoints.store(Arc::new(Endpoints::default()));
                }
                let removed = Assignment { body: None, version: String::new(), updated: SystemTime::now() };
                self.assignments.insert(name.into(), removed);
            }
            Kind::VirtualHost | Kind::Secret | Kind::ExtensionConfig | Kind::NameTable => {}
        }
    }

    /// Returns the clusters, warming or active, with this EDS service name.
    fn clusters_of(&self, service: &str) -> Vec<Arc<Cluster>> {
        let all = self.clusters.values().flat_map(|slot| slot.active.iter().chain(&slot.warming));
        let used = all.filter(
            |accepted| matches!(&accepted.value.discovery, Discovery::Eds(name) if **name == *service),
        );
        used.map(|accepted| Arc::clone(&accepted.value)).collect()
    }

    /// Gives a new cluster the endpoints that are already present.
    fn fill(&mut self, name: &str) -> Result<(), String> {
        let Some(cluster) = self.clusters.get(name).and_then(Slot::newest).map(|accepted| &accepted.value)
        else {
            return Ok(());
        };
        let Discovery::Eds(service) = &cluster.discovery else { return Ok(()) };
        if let Some(body) = self.assignments.get(service).and_then(|assignment| assignment.body.as_ref()) {
            let translator = Translator { tls: &self.secrets.tls, node: &self.node, strict: false };
            let endpoints = translator.endpoints(body, cluster).map_err(|reject| reject.to_string())?;
            cluster.endpoints.store(Arc::new(endpoints));
        }
        Ok(())
    }

    /// Puts all warm resources into effect; returns whether a new snapshot is due.
    pub(crate) fn settle(&mut self, now: Instant) -> bool {
        let assignments = &self.assignments;
        for (name, slot) in &mut self.clusters {
            self.changed |= slot.promote(name, now, |accepted| warming::of_cluster(accepted, assignments));
        }
        let (clusters, seen) = (&self.clusters, self.seen_clusters);
        let (mode, by_name) = (self.mode, self.subscribes_by_name());
        let is_awaited = |name: &str| match clusters.get(name) {
            Some(slot) => slot.is_awaited(now),
            None if name == "*" => false,
            None => by_name || (mode != ClusterMode::AsConfigured && !seen),
        };
        for hosts in self.hosts.values_mut() {
            hosts.settle(now, is_awaited);
        }
        let hosts = &self.hosts;
        for (name, slot) in &mut self.routes {
            self.changed |= slot.promote(name, now, |accepted| {
                let complete = || hosts.get(name).is_some_and(|hosts| hosts.is_warm(now));
                let waits = uses::of_table(&accepted.value).any(is_awaited);
                WarmingNeed::new(!waits && (!accepted.value.has_vhds || complete()), true)
            });
        }
        let routes = &self.routes;
        let awaits = |accepted: &AcceptedResource<Listener>, may_start: bool| {
            let has_clusters =
                mode == ClusterMode::AsConfigured || !uses::of_listener(&accepted.value).any(is_awaited);
            warming::of_listener(&accepted.value, routes, may_start && has_clusters)
        };
        let redirects = |slot: &Slot<Listener>| {
            slot.newest().is_some_and(|accepted| accepted.value.bind && accepted.value.use_original_dst)
        };
        for (name, slot) in self.listeners.iter_mut().filter(|(_, slot)| !redirects(slot)) {
            self.changed |= slot.promote(name, now, |accepted| awaits(accepted, true));
        }
        // A listener with `use_original_dst` passes through connections that no other listener accepts, so none
        // may be missing when it starts.
        let complete = !self.listeners.values().any(|slot| !redirects(slot) && slot.is_awaited(now));
        for (name, slot) in self.listeners.iter_mut().filter(|(_, slot)| redirects(slot)) {
            let starts = slot.active.is_none();
            self.changed |= slot.promote(name, now, |accepted| awaits(accepted, complete || !starts));
        }
        for (name, hosts) in &mut self.hosts {
            let base = self.routes.get(name).and_then(|slot| slot.active.as_ref());
            if let Some(accepted) = base.filter(|accepted| accepted.value.has_vhds) {
                self.changed |= hosts.assemble(&accepted.value);
            }
        }
        self.drop_removed(now);
        let distrusted = self.secrets.tls.distrusted();
        self.changed |= std::mem::replace(&mut self.distrusted, distrusted) != distrusted;
        std::mem::take(&mut self.changed)
    }

    /// Removes deleted clusters that no route leads to, or whose removal has waited [`WARMING_TIMEOUT`].
    fn drop_removed(&mut self, now: Instant) {
        if self.clusters.values().all(|slot| slot.removed.is_none()) {
            return;
        }
        let tables = self.routes.values().filter_map(|slot| slot.active.as_ref());
        let tables = tables.flat_map(|accepted| uses::of_table(&accepted.value));
        let hosts = self.hosts.values().flat_map(Hosts::clusters_in_force);
        let listeners = self.listeners.values().filter_map(|slot| slot.active.as_ref());
        let listeners = listeners.flat_map(|accepted| uses::of_listener(&accepted.value));
        let used: BTreeSet<Box<str>> = tables.chain(hosts).chain(listeners).map(Box::from).collect();
        let by_name = self.subscribes_by_name();
        let mut removed = false;
        self.clusters.retain(|name, slot| {
            let stays = |since| used.contains(&**name) && now.duration_since(since) < WARMING_TIMEOUT;
            if slot.removed.is_none_or(stays) {
                return true;
            }
            removed = true;
            *slot = Slot { absent: true, ..Slot::default() };
            by_name
        });
        self.changed |= removed;
    }

    /// Returns the configuration in effect.
    pub(crate) fn snapshot(&self) -> Snapshot {
        fn active<T>(slots: &BTreeMap<Arc<str>, Slot<T>>) -> ByName<T> {
            let active = slots.iter().filter_map(|(name, slot)| Some((name, slot.active.as_ref()?)));
            active.map(|(name, accepted)| (Arc::clone(name), Arc::clone(&accepted.value))).collect()
        }
        let by_name = active(&self.listeners);
        let mut by_address = skysail_http::map::Map::default();
        for listener in by_name.values() {
            for address in &listener.addresses {
                by_address.insert(*address, Arc::clone(listener));
            }
        }
        let mut routes = active(&self.routes);
        for (name, table) in &mut routes {
            if let Some(merged) = self.hosts.get(name).and_then(Hosts::merged)
                && table.has_vhds
            {
                *table = Arc::clone(merged);
            }
        }
        Snapshot {
            listeners: Arc::new(skysail_policy::config::Listeners { by_name, by_address }),
            routes: Arc::new(routes),
            clusters: Arc::new(active(&self.clusters)),
            distrusted: self.distrusted,
        }
    }

    /// Returns the names to subscribe to: clusters, endpoints, route tables, virtual hosts, secrets.
    pub(crate) fn wanted(&self) -> Subscriptions {
        let clusters = self.clusters.values().filter_map(Slot::newest);
        let endpoints = clusters.filter_map(|accepted| match &accepted.value.discovery {
            Discovery::Eds(name) => Some(name.to_string()),
            _ => None,
        });
        let listeners = self.listeners.values().flat_map(Slot::both);
        let routes =
            listeners.flat_map(|accepted| uses::tables(&accepted.value)).map(|name| name.to_string());
        let secrets = self.secrets.tls.names().into_iter().filter(|name| name.source == SecretSource::Ads);
        let secrets = secrets.map(|name| name.name.into_string());
        let apart = self
            .routes
            .iter()
            .filter(|(_, slot)| slot.newest().is_some_and(|accepted| accepted.value.has_vhds));
        let hosts = apart.flat_map(|(name, _)| -> Box<dyn Iterator<Item = String> + '_> {
            match self.hosts.get(name).filter(|_| self.mode == ClusterMode::OnDemand) {
                Some(hosts) => Box::new(hosts.wanted(name)),
                None => Box::new(std::iter::once(name.to_string())),
            }
        });
        [
            (Kind::Cluster, self.wanted_clusters()),
            (Kind::Endpoint, endpoints.collect()),
            (Kind::Route, routes.collect()),
            (Kind::VirtualHost, hosts.collect()),
            (Kind::Secret, secrets.collect()),
        ]
    }

    fn wanted_clusters(&self) -> BTreeSet<String> {
        let all = || BTreeSet::from(["*".to_owned()]);
        match self.mode {
            ClusterMode::AsConfigured | ClusterMode::Undecided => BTreeSet::new(),
            ClusterMode::All => all(),
            ClusterMode::OnDemand => {
                let listeners = self.listeners.values().flat_map(Slot::both);
                let listeners = listeners.flat_map(|accepted| uses::of_listener(&accepted.value));
                let tables = self.routes.values().flat_map(Slot::both);
                let tables = tables.flat_map(|accepted| uses::of_table(&accepted.value));
                let hosts = self.hosts.values().flat_map(Hosts::clusters);
                let used: BTreeSet<String> =
                    listeners.chain(tables).chain(hosts).map(str::to_owned).collect();
                if used.contains("*") { all() } else { used }
            }
        }
    }

    /// Drops endpoints, tables and clusters that nothing names any more, and adds a slot for each cluster that
    /// is subscribed to by name.
    pub(crate) fn drop_unwanted(&mut self, wanted: &Subscriptions, now: Instant) {
        let [(_, clusters), (_, endpoints), (_, routes), ..] = wanted;
        self.assignments.retain(|name, _| endpoints.contains(&**name));
        let before = self.routes.len();
        self.routes.retain(|name, _| routes.contains(&**name));
        self.changed |= self.routes.len() != before;
        self.hosts.retain(|name, _| {
            let slot = self.routes.get(name);
            slot.is_some_and(|slot| slot.both().any(|accepted| accepted.value.has_vhds))
        });
        self.uses_all = clusters.contains("*");
        if self.subscribes_by_name() {
            let changed = &mut self.changed;
            self.clusters.retain(|name, slot| {
                let stays = clusters.contains(&**name)
                    || slot.active.as_ref().is_some_and(|accepted| accepted.is_static);
                *changed |= !stays && slot.active.is_some();
                stays
            });
            for name in clusters {
                if !self.clusters.contains_key(&**name) {
                    self.clusters
                        .insert(name.as_str().into(), Slot { requested_at: Some(now), ..Slot::default() });
                }
            }
        }
    }

    /// Records a request for a virtual host.
    pub(crate) fn request_host(&mut self, host_request: HostRequest, now: Instant, connected: bool) {
        let Some(hosts) = self.hosts.get_mut(&host_request.table) else {
            let _ = host_request.done.send(());
            return;
        };
        let name = format!("{}/{}", host_request.table, host_request.authority);
        if !hosts.request(host_request, now, connected) {
            limit_log::log(Limit::Names, format_args!("{name}"));
        }
    }

    /// Returns the waiting requests that the configuration in effect answers.
    pub(crate) fn answer(&mut self, now: Instant) -> Vec<oneshot::Sender<()>> {
        let (tls, clusters) = (&self.secrets.tls, &self.clusters);
        let missing = |host: &VirtualHost| references::missing_secrets(host, clusters, tls);
        self.hosts.values_mut().flat_map(|hosts| hosts.answer(now, &missing)).collect()
    }

    /// Drops names and virtual hosts that no request has used for a long time.
    pub(crate) fn drop_idle(&mut self, now: Instant) {
        self.hosts.values_mut().for_each(|hosts| hosts.drop_idle(now));
    }

    /// Returns a route configuration with its virtual hosts in effect.
    pub(crate) fn merged_body(&self, accepted: &AcceptedResource<RouteTable>) -> Bytes {
        match self.hosts.get(&accepted.value.name).filter(|_| accepted.value.has_vhds) {
            Some(hosts) => compose(&accepted.body, hosts.bodies()),
            None => accepted.body.clone(),
        }
    }

    /// Returns the earliest time at which a wait times out.
    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
        let all = slot::waiting(&self.clusters, now)
            .chain(slot::waiting(&self.routes, now))
            .chain(slot::waiting(&self.listeners, now));
        let hosts = self.hosts.values().filter_map(|hosts| hosts.deadline(now));
        all.map(|since| since + WARMING_TIMEOUT).chain(hosts).min()
    }

    /// Returns whether no resource still waits for its first version to come into effect.
    pub(crate) fn is_warm(&self, now: Instant) -> bool {
        let known =
            self.seen_clusters || matches!(self.mode, ClusterMode::AsConfigured | ClusterMode::OnDemand);
        known
            && !self.listeners.values().any(|slot| slot.is_awaited(now))
            && !self.clusters.values().any(|slot| slot.is_awaited(now))
    }
}

#[cfg(test)]
mod tests;
