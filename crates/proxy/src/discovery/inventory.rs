//! Which resources there are, and which of them are in force: pure bookkeeping, no IO.
//!
//! What arrives is translated at once but used only when it is *warm*: a cluster when its endpoints and
//! certificates are there, a listener when its routes and certificates are, a route table when no cluster that it
//! leads to is still warming. Until then the one before stays in force. A cluster that is taken away goes when no
//! route leads to it any more. So a request never meets a half-applied configuration. Nothing waits for ever: after
//! [`PATIENCE`] what there is will have to do.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use skysail_xds::{
    Kind,
    client::{Received, Rejection, Update},
    envoy::pb::envoy::{config::core::v3::Node, extensions::transport_sockets::tls::v3::Secret},
};

use super::{
    composed::{Composed, Whole, compose},
    uses,
};
use crate::{
    config::{ByName, Cluster, Endpoints, Listener, RouteTable, Snapshot, cluster::Discovery},
    secrets::Secrets,
    translate::{self, SecretName, SecretSource, Translator},
};

/// How long something new waits for what it needs.
const PATIENCE: Duration = Duration::from_secs(15);

/// All resources.
pub(crate) struct Inventory {
    pub(crate) secrets: Secrets,
    node: Arc<Node>,
    pub(crate) clusters: BTreeMap<Arc<str>, Slot<Cluster>>,
    pub(crate) listeners: BTreeMap<Arc<str>, Slot<Listener>>,
    pub(crate) routes: BTreeMap<Arc<str>, Slot<RouteTable>>,
    /// Those of them that come in parts.
    composed: Composed,
    /// Endpoints by the name that clusters ask for them with; without a body where there are none.
    pub(crate) assignments: HashMap<Arc<str>, Assignment>,
    /// Something in force changed since the last snapshot.
    changed: bool,
}

/// What there is of one name.
pub(crate) struct Slot<T> {
    pub(crate) active: Option<Kept<T>>,
    pub(crate) warming: Option<Kept<T>>,
    /// The last one that was refused.
    pub(crate) error: Option<Failure>,
    /// The server says there is none.
    absent: bool,
    /// Taken away at this time, but still in use.
    removed: Option<Instant>,
}

/// A resource that was taken.
pub(crate) struct Kept<T> {
    pub(crate) value: Arc<T>,
    pub(crate) body: Bytes,
    pub(crate) version: String,
    pub(crate) updated: SystemTime,
    /// From the bootstrap file.
    pub(crate) fixed: bool,
    since: Instant,
    /// For clusters whose host names are looked up: whether that has happened.
    pub(crate) resolved: Arc<AtomicBool>,
    /// The same: whether somebody looks them up.
    pub(crate) looked_up: bool,
}

/// A resource that was refused.
pub(crate) struct Failure {
    pub(crate) reason: String,
    pub(crate) body: Bytes,
    pub(crate) version: String,
    pub(crate) at: SystemTime,
}

/// The endpoints of one name.
pub(crate) struct Assignment {
    pub(crate) body: Option<Bytes>,
    pub(crate) version: String,
    pub(crate) updated: SystemTime,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { active: None, warming: None, error: None, absent: false, removed: None }
    }
}

impl<T> Slot<T> {
    /// The newest.
    pub(crate) fn newest(&self) -> Option<&Kept<T>> {
        self.warming.as_ref().or(self.active.as_ref())
    }

    /// Takes a new one unless it is the same as the newest.
    fn offer(
        &mut self,
        body: &Bytes,
        version: &str,
        fixed: bool,
        make: impl FnOnce() -> translate::Result<T>,
    ) -> Result<bool, String> {
        self.absent = false;
        let revived = self.removed.take().is_some();
        if let Some(kept) = self.warming.as_mut().or(self.active.as_mut())
            && kept.body == *body
        {
            version.clone_into(&mut kept.version);
            self.error = None;
            return Ok(revived);
        }
        match make() {
            Ok(value) => {
                self.error = None;
                self.warming = Some(Kept {
                    value: Arc::new(value),
                    body: body.clone(),
                    version: version.to_owned(),
                    updated: SystemTime::now(),
                    fixed,
                    since: Instant::now(),
                    resolved: Arc::default(),
                    looked_up: false,
                });
                Ok(true)
            }
            Err(reject) => {
                let reason = reject.to_string();
                let at = SystemTime::now();
                let failure =
                    Failure { reason: reason.clone(), body: body.clone(), version: version.to_owned(), at };
                self.error = Some(failure);
                Err(reason)
            }
        }
    }

    /// Puts what is warm into force; true if there was something.
    fn promote(&mut self, now: Instant, warm: impl FnOnce(&Kept<T>) -> bool) -> bool {
        let Some(kept) = &self.warming else { return false };
        let must = self.active.is_none() && now.duration_since(kept.since) >= PATIENCE;
        if !must && !warm(kept) {
            return false;
        }
        self.active = self.warming.take();
        true
    }
}

impl Inventory {
    pub(crate) fn new(secrets: Secrets, node: Node) -> Self {
        Self {
            secrets,
            node: Arc::new(node),
            clusters: BTreeMap::new(),
            listeners: BTreeMap::new(),
            routes: BTreeMap::new(),
            composed: Composed::default(),
            assignments: HashMap::new(),
            changed: false,
        }
    }

    /// Takes a resource of the bootstrap file.
    pub(crate) fn add_static(&mut self, kind: Kind, name: &str, body: &Bytes) -> Result<(), String> {
        let received = Received { name: name.to_owned(), version: String::new(), body: body.clone() };
        self.add(kind, &received, true)
    }

    /// Takes an update; what is refused is named, everything else is taken.
    pub(crate) fn apply(&mut self, update: &Update) -> Vec<Rejection> {
        if update.kind == Kind::VirtualHost {
            return self.take_hosts(update);
        }
        let mut rejections = Vec::new();
        for received in &update.added {
            if let Err(reason) = self.add(update.kind, received, false) {
                rejections.push(Rejection { name: received.name.clone(), reason });
            }
        }
        for name in &update.removed {
            self.remove(update.kind, name);
        }
        rejections
    }

    fn add(&mut self, kind: Kind, received: &Received, fixed: bool) -> Result<(), String> {
        let (tls, node) = (Arc::clone(&self.secrets.tls), Arc::clone(&self.node));
        // A file was written for us, so nothing in it may be without effect.
        let translator = Translator { tls: &tls, node: &node, strict: fixed };
        let (body, version) = (&received.body, received.version.as_str());
        let name: Arc<str> = received.name.as_str().into();
        match kind {
            Kind::Cluster => {
                let slot = self.clusters.entry(Arc::clone(&name)).or_default();
                if slot.newest().is_some_and(|kept| kept.fixed) {
                    return Err("a cluster of the bootstrap file has this name: choose another".to_owned());
                }
                if slot.offer(body, version, fixed, || translator.cluster(body))? {
                    self.fill(&name)?;
                }
            }
            Kind::Listener => {
                self.listeners
                    .entry(name)
                    .or_default()
                    .offer(body, version, fixed, || translator.listener(body))?;
            }
            Kind::Route if translate::has_hosts_apart(body).map_err(|reject| reject.to_string())? => {
                let before = self.composed.parts(&name).clone();
                self.composed.parts(&name).set_configuration(received);
                if let Err(reason) = self.offer_composed(&name) {
                    *self.composed.parts(&name) = before;
                    return Err(reason);
                }
            }
            Kind::Route => {
                self.composed.remove(&name);
                self.routes
                    .entry(name)
                    .or_default()
                    .offer(body, version, fixed, || translator.routes(body))?;
            }
            Kind::Endpoint => {
                let assignment = Assignment {
                    body: Some(body.clone()),
                    version: version.to_owned(),
                    updated: SystemTime::now(),
                };
                // Checked against every cluster that uses them before they are kept.
                for cluster in self.clusters_of(&name) {
                    let endpoints =
                        translator.endpoints(body, &cluster).map_err(|reject| reject.to_string())?;
                    cluster.endpoints.store(Arc::new(endpoints));
                }
                self.assignments.insert(name, assignment);
            }
            Kind::Secret => {
                let name = SecretName { source: SecretSource::Ads, name: received.name.as_str().into() };
                let secret: Secret = received.decode().map_err(|error| error.to_string())?;
                self.secrets.take(&name, &secret).map_err(|reject| reject.to_string())?;
            }
            // Never asked for, or taken all together.
            Kind::VirtualHost | Kind::ExtensionConfig | Kind::NameTable => {}
        }
        Ok(())
    }

    fn take_hosts(&mut self, update: &Update) -> Vec<Rejection> {
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
            rejections.extend(self.take_hosts_of(family, &added, &removed));
        }
        rejections
    }

    /// Takes virtual hosts of one route configuration. Those that are wrong by themselves are refused alone, and all of them
    /// where they are wrong together.
    fn take_hosts_of(&mut self, family: &str, added: &[&Received], removed: &[&str]) -> Vec<Rejection> {
        let before = self.composed.parts(family).clone();
        let mut after = before.clone();
        removed.iter().for_each(|name| after.remove_host(name));
        added.iter().for_each(|received| after.set_host(received));
        *self.composed.parts(family) = after.clone();
        let Err(reason) = self.offer_composed(family) else { return Vec::new() };

        let translator = Translator { tls: &self.secrets.tls, node: &self.node, strict: false };
        let mut rejections = Vec::new();
        for received in added {
            let alone = compose(&[], std::iter::once(&received.body));
            if let Err(reject) = translator.routes(&alone) {
                rejections.push(Rejection { name: received.name.clone(), reason: reject.to_string() });
                after.restore_host(&received.name, &before);
            }
        }
        *self.composed.parts(family) = after;
        if !rejections.is_empty() && self.offer_composed(family).is_ok() {
            return rejections;
        }
        *self.composed.parts(family) = before;
        let all = added.iter();
        all.map(|received| Rejection { name: received.name.clone(), reason: reason.clone() }).collect()
    }

    /// Takes a route configuration whose parts have changed, once they are complete.
    fn offer_composed(&mut self, name: &str) -> Result<(), String> {
        let Some(Whole { version, body }) = self.composed.parts(name).whole() else { return Ok(()) };
        let translator = Translator { tls: &self.secrets.tls, node: &self.node, strict: false };
        let slot = self.routes.entry(name.into()).or_default();
        slot.offer(&body, &version, false, || translator.routes(&body)).map(drop)
    }

    fn remove(&mut self, kind: Kind, name: &str) {
        match kind {
            Kind::Cluster => {
                if let Some(slot) = self.clusters.get_mut(name) {
                    slot.warming = None;
                    slot.error = None;
                    slot.removed = Some(Instant::now());
                }
            }
            Kind::Listener => {
                self.changed |= self.listeners.remove(name).is_some_and(|slot| slot.active.is_some());
            }
            // The table in force stays, as listeners still name it.
            Kind::Route => self.routes.entry(name.into()).or_default().absent = true,
            Kind::Endpoint => {
                for cluster in self.clusters_of(name) {
                    cluster.endpoints.store(Arc::new(Endpoints::default()));
                }
                let gone = Assignment { body: None, version: String::new(), updated: SystemTime::now() };
                self.assignments.insert(name.into(), gone);
            }
            Kind::VirtualHost | Kind::Secret | Kind::ExtensionConfig | Kind::NameTable => {}
        }
    }

    /// Clusters, warming or not, that get their endpoints by this name.
    fn clusters_of(&self, service: &str) -> Vec<Arc<Cluster>> {
        let all = self.clusters.values().flat_map(|slot| slot.active.iter().chain(&slot.warming));
        let used =
            all.filter(|kept| matches!(&kept.value.discovery, Discovery::Eds(name) if **name == *service));
        used.map(|kept| Arc::clone(&kept.value)).collect()
    }

    /// Gives a new cluster the endpoints that are there already.
    fn fill(&mut self, name: &str) -> Result<(), String> {
        let Some(cluster) = self.clusters.get(name).and_then(Slot::newest).map(|kept| &kept.value) else {
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

    /// Puts everything into force that is warm; true if a new snapshot is due.
    pub(crate) fn settle(&mut self, now: Instant) -> bool {
        let assignments = &self.assignments;
        for slot in self.clusters.values_mut() {
            self.changed |= slot.promote(now, |kept| cluster_is_warm(kept, assignments));
        }
        let warming: HashSet<Arc<str>> = self
            .clusters
            .iter()
            .filter(|(_, slot)| slot.active.is_none() && slot.warming.is_some())
            .map(|(name, _)| Arc::clone(name))
            .collect();
        for slot in self.routes.values_mut() {
            self.changed |=
                slot.promote(now, |kept| !uses::of_table(&kept.value).any(|name| warming.contains(name)));
        }
        let routes = &self.routes;
        for slot in self.listeners.values_mut() {
            self.changed |= slot.promote(now, |kept| listener_is_warm(&kept.value, routes));
        }
        self.drop_removed(now);
        std::mem::take(&mut self.changed)
    }

    /// Lets go of clusters that were taken away and that no route leads to any more.
    fn drop_removed(&mut self, now: Instant) {
        if self.clusters.values().all(|slot| slot.removed.is_none()) {
            return;
        }
        let tables = self
            .routes
            .values()
            .filter_map(|slot| slot.active.as_ref())
            .flat_map(|kept| uses::of_table(&kept.value));
        let listeners = self
            .listeners
            .values()
            .filter_map(|slot| slot.active.as_ref())
            .flat_map(|kept| uses::of_listener(&kept.value));
        let used: HashSet<Arc<str>> = tables.chain(listeners).cloned().collect();
        let before = self.clusters.len();
        self.clusters.retain(|name, slot| {
            slot.removed.is_none_or(|since| used.contains(name) && now.duration_since(since) < PATIENCE)
        });
        self.changed |= self.clusters.len() != before;
    }

    /// What is in force.
    pub(crate) fn snapshot(&self) -> Snapshot {
        fn active<T>(slots: &BTreeMap<Arc<str>, Slot<T>>) -> ByName<T> {
            let active = slots.iter().filter_map(|(name, slot)| Some((name, slot.active.as_ref()?)));
            active.map(|(name, kept)| (Arc::clone(name), Arc::clone(&kept.value))).collect()
        }
        let by_name = active(&self.listeners);
        let mut by_address = crate::config::Map::default();
        for listener in by_name.values() {
            for address in &listener.addresses {
                by_address.insert(*address, Arc::clone(listener));
            }
        }
        Snapshot {
            listeners: Arc::new(crate::config::Listeners { by_name, by_address }),
            routes: Arc::new(active(&self.routes)),
            clusters: Arc::new(active(&self.clusters)),
        }
    }

    /// The names to ask for: endpoints, routes, virtual hosts, secrets.
    pub(crate) fn wanted(&self) -> [(Kind, BTreeSet<String>); 4] {
        let clusters = self.clusters.values().filter_map(Slot::newest);
        let endpoints = clusters.filter_map(|kept| match &kept.value.discovery {
            Discovery::Eds(name) => Some(name.to_string()),
            _ => None,
        });
        let listeners = self.listeners.values().flat_map(|slot| slot.active.iter().chain(&slot.warming));
        let routes = listeners.flat_map(|kept| uses::tables(&kept.value)).map(|name| name.to_string());
        let secrets = self.secrets.tls.names().into_iter().filter(|name| name.source == SecretSource::Ads);
        let secrets = secrets.map(|name| name.name.into_string());
        [
            (Kind::Endpoint, endpoints.collect()),
            (Kind::Route, routes.collect()),
            (Kind::VirtualHost, self.composed.wanted().map(str::to_owned).collect()),
            (Kind::Secret, secrets.collect()),
        ]
    }

    /// Forgets endpoints and tables that nothing names any more.
    pub(crate) fn forget_unwanted(&mut self, wanted: &[(Kind, BTreeSet<String>); 4]) {
        let [(_, endpoints), (_, routes), ..] = wanted;
        self.assignments.retain(|name, _| endpoints.contains(&**name));
        self.composed.retain(routes);
        let before = self.routes.len();
        self.routes.retain(|name, _| routes.contains(&**name));
        self.changed |= self.routes.len() != before;
    }

    /// When patience with the first of those that wait is at its end.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        fn waiting<T>(slots: &BTreeMap<Arc<str>, Slot<T>>) -> impl Iterator<Item = Instant> {
            slots.values().filter_map(|slot| match (&slot.warming, &slot.active) {
                (Some(kept), None) => Some(kept.since),
                _ => slot.removed,
            })
        }
        let all = waiting(&self.clusters).chain(waiting(&self.routes)).chain(waiting(&self.listeners));
        all.min().map(|since| since + PATIENCE)
    }

    /// True when nothing new waits for what it needs.
    pub(crate) fn is_warm(&self) -> bool {
        self.listeners.values().all(|slot| slot.active.is_some() || slot.warming.is_none())
            && self.clusters.values().all(|slot| slot.active.is_some() || slot.warming.is_none())
    }
}

fn cluster_is_warm(kept: &Kept<Cluster>, assignments: &HashMap<Arc<str>, Assignment>) -> bool {
    let cluster = &kept.value;
    let endpoints = match &cluster.discovery {
        Discovery::Eds(name) => assignments.contains_key(name),
        Discovery::Dns { .. } => kept.resolved.load(Ordering::Acquire),
        Discovery::Static | Discovery::OriginalDst(_) => true,
    };
    let tls = cluster.transport_matches.iter().filter_map(|found| found.tls.as_ref()).chain(&cluster.tls);
    endpoints && tls.into_iter().all(|tls| translate::client_ready(tls))
}

fn listener_is_warm(listener: &Listener, routes: &BTreeMap<Arc<str>, Slot<RouteTable>>) -> bool {
    let chains = || listener.chains.iter().chain(&listener.default_chain);
    let known = |name: &Arc<str>| routes.get(name).is_some_and(|slot| slot.active.is_some() || slot.absent);
    chains().filter_map(|chain| chain.tls.as_ref()).all(|tls| translate::server_ready(tls))
        && uses::tables(listener).all(known)
}

#[cfg(test)]
mod tests;
