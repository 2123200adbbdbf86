//! Delivery of the resources that an object affects to each proxy, and the proxy's answer.
//!
//! A list has thousands of objects and proxies, so for most pairs the resources must not be examined one by one.
//! Resources are indexed by host once for each layer. A proxy that has answered all changes and subscribes to all
//! resources of a type needs one lookup of the host; proxies that list few names are found by the hosts of these names.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Weak},
};

use skysail_model::{ProxyView, Reach, ReachedResources};
use skysail_xds::{Kind, Layer, Snapshot};

use super::super::status::{ClientStatus, TypeStatus};

/// Maximum number of different error messages that are searched for names of resources. Each search costs time in
/// proportion to the resources of a proxy.
const MAX_ERRORS: usize = 256;

/// State of resources at a proxy, from good to bad.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Delivery {
    /// The proxy has accepted them.
    Acknowledged,
    /// They were sent; the proxy has not answered.
    Sent,
    /// They were not sent yet.
    Pending,
    /// The proxy has rejected one, with this error message.
    Refused(Arc<str>),
}

impl Delivery {
    pub(super) const fn as_str(&self) -> &'static str {
        match self {
            Self::Acknowledged => "acknowledged",
            Self::Sent => "sent",
            Self::Pending => "pending",
            Self::Refused(_) => "refused",
        }
    }
}

/// A resource that a proxy holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HeldResource {
    pub(super) kind: Kind,
    pub(super) name: Arc<str>,
}

/// Proxies with the same resources: their view, and the name of their node.
pub(super) type FeedKey = (Arc<ProxyView>, Arc<str>);

/// The connected proxies and their resources.
pub(super) struct Fleet<'a> {
    views: Vec<FleetView<'a>>,
    clients: Vec<FleetClient<'a>>,
    layers: Vec<LayerIndex<'a>>,
    /// Clients that subscribe to all resources of a type in [`OF_HOSTS`], or to a family of virtual hosts.
    complete: Vec<usize>,
    /// Other clients by the hosts of the names to which they subscribe.
    by_host: HashMap<Box<str>, Vec<usize>>,
    errors: ErrorMessages,
}

struct FleetView<'a> {
    view: &'a ProxyView,
    snapshot: &'a Snapshot,
    /// Indexes of the namespace's layer and of the shared layer.
    layers: [usize; 2],
}

struct FleetClient<'a> {
    /// `None` if the view has ended.
    view: Option<usize>,
    types: [Option<FleetSubscription<'a>>; Kind::ALL.len()],
}

/// Subscription of a client to a type.
struct FleetSubscription<'a> {
    status: &'a TypeStatus,
    /// It covers all resources of the type.
    all: bool,
    names: Arc<[Arc<str>]>,
}

/// Resource of a host: type, name, and the generation in which it last changed.
type HostResource<'a> = (Kind, &'a Arc<str>, u64);

/// Resources of hosts in a layer.
type LayerIndex<'a> = HashMap<&'a str, Vec<HostResource<'a>>>;

/// Resources of a type that an object affects.
struct Reached<'a> {
    kind: Kind,
    resources: &'a ReachedResources,
    /// Those of hosts, in the namespace's layer and in the shared layer.
    of_hosts: [&'a [HostResource<'a>]; 2],
    /// Generation in which the object was published.
    published: u64,
}

/// Error messages of proxies, and whether each names a resource.
#[derive(Default)]
struct ErrorMessages(HashMap<Arc<str>, bool>);

/// Types whose resources belong to hosts.
const OF_HOSTS: [Kind; 4] = [Kind::Cluster, Kind::Endpoint, Kind::Route, Kind::VirtualHost];

impl<'a> Fleet<'a> {
    /// Indexes the resources of views by node, and the subscriptions of clients.
    pub(super) fn new(views: &'a [(FeedKey, Snapshot)], clients: &'a [(FeedKey, ClientStatus)]) -> Self {
        let mut layers: Vec<LayerIndex<'a>> = Vec::new();
        let mut known: HashMap<*const Layer, usize> = HashMap::new();
        let mut index = |layer: &'a Arc<Layer>| {
            *known.entry(Arc::as_ptr(layer)).or_insert_with(|| {
                layers.push(index_of(layer));
                layers.len() - 1
            })
        };
        let key = |(view, node): &'a FeedKey| (Arc::as_ptr(view), &**node);
        let places: HashMap<(*const ProxyView, &str), usize> =
            views.iter().enumerate().map(|(place, (feed, _))| (key(feed), place)).collect();
        let views = views.iter().map(|((view, _), snapshot)| {
            let layers = [index(&snapshot.local), index(&snapshot.shared)];
            FleetView { view, snapshot, layers }
        });
        let views: Vec<FleetView<'a>> = views.collect();
        let mut fleet = Self {
            views,
            clients: Vec::new(),
            layers,
            complete: Vec::new(),
            by_host: HashMap::new(),
            errors: ErrorMessages::default(),
        };
        let mut lists = HashMap::new();
        for (feed, status) in clients {
            let view = places.get(&key(feed)).copied();
            fleet.add(view, status, &mut lists);
        }
        fleet
    }

    /// Adds a client. `lists` caches whether a list of names has all resources of a type in its layers.
    fn add(
        &mut self,
        view: Option<usize>,
        status: &'a ClientStatus,
        lists: &mut HashMap<(*const Arc<str>, [usize; 2], Kind), bool>,
    ) {
        let number = self.clients.len();
        let mut types: [Option<FleetSubscription<'a>>; Kind::ALL.len()] = std::array::from_fn(|_| None);
        let of_view = view.and_then(|view| self.views.get(view));
        for (kind, status) in status.types() {
            let Some(FleetView { snapshot, layers, .. }) = of_view else { continue };
            let names = status.names.as_ref().and_then(Weak::upgrade).unwrap_or_default();
            let mut is_list_of_all = || {
                let place = (Arc::as_ptr(&names).cast(), *layers, kind);
                *lists.entry(place).or_insert_with(|| {
                    names.len() >= snapshot.count(kind)
                        && names.iter().all(|name| snapshot.generation_of(kind, name).is_some())
                })
            };
            let all = status.subscribes_to_all || !names.is_empty() && is_list_of_all();
            if OF_HOSTS.contains(&kind) {
                let has_families = kind == Kind::VirtualHost && names.iter().any(|name| !name.contains('/'));
                if all || has_families {
                    if self.complete.last() != Some(&number) {
                        self.complete.push(number);
                    }
                } else {
                    for host in names.iter().filter_map(|name| host_of(name)) {
                        let of_host = match self.by_host.get_mut(host) {
                            Some(of_host) => of_host,
                            None => self.by_host.entry(host.into()).or_default(),
                        };
                        if of_host.last() != Some(&number) {
                            of_host.push(number);
                        }
                    }
                }
            }
            for rejection in &status.rejections {
                let names = snapshot.iter(kind).map(|resource| &*resource.name);
                self.errors.search(&rejection.error, names);
            }
            types[kind as usize] = Some(FleetSubscription { status, all, names });
        }
        self.clients.push(FleetClient { view, types });
    }

    /// Returns for each client the worst state of the resources that an object affects and that it holds; `None` if it
    /// holds none. `published` is the generation in which the object was published. Adds the resources to `held`.
    pub(super) fn deliveries(
        &self,
        reaches: &[Reach<'_>],
        published: u64,
        mut held: Option<&mut BTreeSet<HeldResource>>,
    ) -> Vec<Option<Delivery>> {
        let mut worst: Vec<Option<Delivery>> = vec![None; self.clients.len()];
        for reach in reaches {
            let mut applies: Vec<Option<bool>> = vec![None; self.views.len()];
            let mut of_layers: Vec<Option<Vec<HostResource<'_>>>> = vec![None; self.layers.len()];
            for number in self.candidates(&reach.resources) {
                let Some(client) = self.clients.get(number) else { continue };
                let Some((place, view)) = client.view.and_then(|place| Some((place, self.views.get(place)?)))
                else {
                    continue;
                };
                if !*applies[place].get_or_insert_with(|| reach.applies(view.view)) {
                    continue;
                }
                if let ReachedResources::Hosts { hosts, .. } = &reach.resources {
                    for layer in view.layers {
                        of_layers[layer].get_or_insert_with(|| self.resources_of(layer, hosts));
                    }
                }
                let of_hosts = view.layers.map(|layer| of_layers[layer].as_deref().unwrap_or_default());
                for kind in &reach.types {
                    let Some(subscription) = &client.types[*kind as usize] else { continue };
                    let reached = Reached { kind: *kind, resources: &reach.resources, of_hosts, published };
                    let delivery = self.delivery(view, subscription, &reached, held.as_deref_mut());
                    if worst[number] < delivery {
                        worst[number] = delivery;
                    }
                }
            }
        }
        worst
    }

    /// Returns the clients that may hold some of these resources.
    fn candidates(&self, resources: &ReachedResources) -> Vec<usize> {
        let ReachedResources::Hosts { hosts, .. } = resources else {
            return (0..self.clients.len()).collect();
        };
        let mut candidates = self.complete.clone();
        candidates.extend(hosts.iter().filter_map(|host| self.by_host.get(host.as_str())).flatten());
        if hosts.len() > 1 {
            candidates.sort_unstable();
            candidates.dedup();
        }
        candidates
    }

    /// Returns the resources of some hosts in a layer.
    fn resources_of(&self, layer: usize, hosts: &BTreeSet<String>) -> Vec<HostResource<'a>> {
        let layer = &self.layers[layer];
        hosts.iter().filter_map(|host| layer.get(host.as_str())).flatten().copied().collect()
    }

    /// Returns the worst state of the reached resources that a client holds; `None` if it holds none.
    fn delivery(
        &self,
        view: &FleetView<'_>,
        subscription: &FleetSubscription<'_>,
        reached: &Reached<'_>,
        mut held: Option<&mut BTreeSet<HeldResource>>,
    ) -> Option<Delivery> {
        let (status, kind, published) = (subscription.status, reached.kind, reached.published);
        let last = view.snapshot.last_change(kind).min(published);
        // Without rejections, the resources of a proxy that subscribes to all have the state of the last change.
        let is_simple = status.rejections.is_empty() && subscription.all && held.is_none();
        let is_settled = is_simple && status.answered_generation >= Some(last);
        let has_whole_type = match reached.resources {
            ReachedResources::Hosts { .. } => false,
            ReachedResources::Own(names) => names.is_empty() && view.snapshot.own.generations(kind).len() > 0,
            ReachedResources::All => view.snapshot.count(kind) > 0,
        };
        if is_simple && has_whole_type {
            return Some(self.state(status, "", last, last));
        }
        let mut worst = None;
        // Returns true if no further resource makes a difference.
        let mut add = |name: &Arc<str>, changed: u64| {
            if !subscription.covers(kind, name) {
                return false;
            }
            if let Some(held) = &mut held {
                held.insert(HeldResource { kind, name: Arc::clone(name) });
            }
            worst = worst.take().max(Some(self.state(status, name, changed, changed.min(published))));
            is_settled
        };
        match reached.resources {
            ReachedResources::Hosts { ports, .. } => {
                let [local, shared] = reached.of_hosts.map(|list| list.iter().filter(|(of, ..)| *of == kind));
                let visible = shared.filter(|(_, name, _)| !view.snapshot.local.hides(kind, name));
                if local.chain(visible).any(|(_, name, changed)| add(name, *changed)) {
                    return worst;
                }
                // The routes of a host are part of those of its port, unless hosts are sent one by one.
                let ports = ports.iter().filter(|_| kind == Kind::Route && !view.view.uses_vhds);
                for port in ports {
                    let name: Arc<str> = port.to_string().into();
                    if let Some(changed) = view.snapshot.generation_of(kind, &name) {
                        add(&name, changed);
                    }
                }
            }
            ReachedResources::Own(names) if names.is_empty() => {
                view.snapshot.own.generations(kind).for_each(|(name, changed)| _ = add(name, changed));
            }
            ReachedResources::Own(names) => {
                let found = names.iter().filter_map(|name| view.snapshot.own.generation_of(kind, name));
                found.for_each(|(name, changed)| _ = add(name, changed));
            }
            ReachedResources::All => {
                let Snapshot { own, local, shared } = view.snapshot;
                let visible = shared.generations(kind).filter(|(name, _)| !local.hides(kind, name));
                let all = own.generations(kind).chain(local.generations(kind)).chain(visible);
                all.for_each(|(name, changed)| _ = add(name, changed));
            }
        }
        worst
    }

    /// Returns the state of a resource that changed in this generation. `since` is the earlier generation in which it got
    /// the effect of the object.
    fn state(&self, status: &TypeStatus, name: &str, changed: u64, since: u64) -> Delivery {
        let rejection = status.rejections.iter().rev().find(|of| {
            // In a rejected response, a proxy may have accepted the resources that its error message does not name.
            let is_change = of.after < Some(since) && since <= of.up_to;
            // A resource that had not changed was sent because the proxy had just subscribed to it. A name such as `80`
            // may stand for something else in a message.
            let is_new = Some(changed) <= of.after && name.contains(['|', '/']);
            let is_named = mentions(&of.error, name);
            is_change && (is_named || !self.errors.name_resources(&of.error)) || is_new && is_named
        });
        if let Some(rejection) = rejection {
            Delivery::Refused(Arc::clone(&rejection.error))
        } else if status.answered_generation >= Some(since) {
            Delivery::Acknowledged
        } else if status.sent_generation >= Some(since) {
            Delivery::Sent
        } else {
            Delivery::Pending
        }
    }
}

impl FleetSubscription<'_> {
    fn covers(&self, kind: Kind, name: &str) -> bool {
        let has = |name: &str| self.names.binary_search_by(|known| (**known).cmp(name)).is_ok();
        self.all || has(name) || kind.family(name).is_some_and(has)
    }
}

impl ErrorMessages {
    /// Searches a message for these names, unless it or [`MAX_ERRORS`] others were searched before.
    fn search<'n>(&mut self, message: &Arc<str>, mut names: impl Iterator<Item = &'n str>) {
        if self.0.len() < MAX_ERRORS && !self.0.contains_key(message) {
            self.0.insert(Arc::clone(message), names.any(|name| mentions(message, name)));
        }
    }

    /// Returns whether a message names a resource. A message that was not searched counts as one that names none, so
    /// it refuses all resources of its response.
    fn name_resources(&self, message: &str) -> bool {
        self.0.get(message).copied().unwrap_or_default()
    }
}

fn index_of(layer: &Layer) -> LayerIndex<'_> {
    let mut index = LayerIndex::new();
    for kind in OF_HOSTS {
        for (name, changed) in layer.generations(kind) {
            let Some(host) = host_of(name) else { continue };
            index.entry(host).or_default().push((kind, name, changed));
        }
    }
    index
}

/// Returns the host in the name of a resource: `DIRECTION|PORT|SUBSET|HOST`, `HOST:PORT` or `PORT/HOST:PORT`.
fn host_of(name: &str) -> Option<&str> {
    if let Some((_, host)) = name.rsplit_once('|') {
        return Some(host);
    }
    let name = name.rsplit_once('/').map_or(name, |(_, name)| name);
    name.rsplit_once(':').map(|(host, _)| host)
}

/// Returns whether a message contains a name as a whole.
fn mentions(message: &str, name: &str) -> bool {
    let is_part = |char: char| char.is_alphanumeric() || matches!(char, '_' | '-' | '|' | '/' | '.');
    !name.is_empty()
        && message.match_indices(name).any(|(at, _)| {
            let before = message[..at].chars().next_back();
            let after = message[at + name.len()..].chars().next();
            !before.is_some_and(is_part) && !after.is_some_and(is_part)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_contain_their_host() {
        for (name, host) in [
            ("outbound|80|v1|a.x.svc.cluster.local", Some("a.x.svc.cluster.local")),
            ("a.x.svc.cluster.local:80", Some("a.x.svc.cluster.local")),
            ("80/a.x.svc.cluster.local:80", Some("a.x.svc.cluster.local")),
            ("80/*.example.com:80", Some("*.example.com")),
            ("80", None),
            ("BlackHoleCluster", None),
        ] {
            assert_eq!(host_of(name), host, "{name}");
        }
    }

    #[test]
    fn the_number_of_searched_error_messages_is_limited() {
        let mut errors = ErrorMessages::default();
        let mut searches = 0;
        for number in 0..2 * MAX_ERRORS {
            for _ in 0..2 {
                let message = format!("wrong number {number} of a.x").into();
                errors.search(&message, std::iter::once("b.x").inspect(|_| searches += 1));
            }
        }
        assert_eq!(searches, MAX_ERRORS, "messages that name no resource count too");
        let mut errors = ErrorMessages::default();
        errors.search(&"wrong a.x".into(), ["b.x", "a.x"].into_iter());
        errors.search(&"wrong".into(), ["b.x", "a.x"].into_iter());
        assert_eq!(["wrong a.x", "wrong", "other"].map(|of| errors.name_resources(of)), [true, false, false]);
    }

    #[test]
    fn error_messages_name_resources_as_a_whole() {
        let message = "Error adding/updating listener(s) 10.0.0.1_80: no filter; cluster outbound|80||a.x";
        assert!(mentions(message, "10.0.0.1_80") && mentions(message, "outbound|80||a.x"));
        assert!(!mentions(message, "80") && !mentions(message, "0.0.0.1_80") && !mentions(message, "a.x"));
    }
}
