//! One stream's session without sockets: what the client asked for, has, and is to be sent.
//!
//! Rules, from the xDS protocol's description and from what Envoy needs:
//! - One response of a kind is under way at a time; what changes meanwhile is merged into the next.
//! - What is referred to goes before what refers to it. In the delta form clusters and endpoints are also taken
//!   away last, when listeners and routes no longer refer to them, so that no request finds its cluster gone.
//! - Listeners and routes wait until the client has the endpoints of new clusters, or a request could be routed to
//!   a cluster that is not ready. Delta only; and not for ever, as some clients never ask for endpoints.
//! - A name newly asked for is answered even if the client should have it, and even if it does not exist.
//! - Envoy warms a changed cluster anew and waits for its endpoints, so they follow although unchanged.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use super::{Event, Form};
use crate::{
    resource::{Kind, Resource, Resources},
    wire::Push,
};

/// The name that stands for all resources of a kind.
const WILDCARD: &str = "*";

/// A request of either form.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) kind: Kind,
    pub(super) nonce: String,
    pub(super) error: Option<String>,
    /// Delta: names to add. State of the world: all names.
    pub(super) names: BTreeSet<Arc<str>>,
    /// Delta only.
    pub(super) unsubscribe: BTreeSet<Arc<str>>,
    /// Delta only: the versions the client has from an earlier stream.
    pub(super) have: HashMap<String, String>,
}

impl Default for Ask {
    fn default() -> Self {
        Self {
            kind: Kind::Cluster,
            nonce: String::new(),
            error: None,
            names: BTreeSet::new(),
            unsubscribe: BTreeSet::new(),
            have: HashMap::new(),
        }
    }
}

/// What a client was last told about a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Version(u64),
    Missing,
}

/// The state of one kind on one stream.
#[derive(Debug, Default)]
struct Watched {
    /// The client has asked for this kind.
    open: bool,
    wildcard: bool,
    names: BTreeSet<Arc<str>>,
    told: BTreeMap<Arc<str>, Told>,
    /// To be sent even if the client has them.
    again: BTreeSet<Arc<str>>,
    /// To be answered even with nothing.
    answer: bool,
    /// The response that is neither acknowledged nor refused yet.
    in_flight: Option<u64>,
    /// The last response's number.
    nonce: Option<u64>,
    /// State of the world: the next request is to be answered, whatever it looks like.
    answer_next: bool,
}

/// The state of one stream.
#[derive(Debug)]
pub(super) struct Session {
    form: Form,
    nonce: u64,
    kinds: [Watched; Kind::ALL.len()],
    /// What everything was last compared with, to skip kinds without change.
    compared: Option<Resources>,
    /// New clusters whose endpoints the client does not have yet.
    holding: BTreeSet<Arc<str>>,
}

impl Session {
    pub(super) fn new(form: Form) -> Self {
        Self { form, nonce: 0, kinds: Default::default(), compared: None, holding: BTreeSet::new() }
    }

    /// Takes a request in.
    pub(super) fn ask(&mut self, ask: Ask, report: &mut dyn FnMut(Event<'_>)) {
        let watched = &mut self.kinds[ask.kind as usize];
        if !watched.open {
            report(Event::Asked { kind: ask.kind });
        }
        let nonce: Option<u64> = ask.nonce.parse().ok();
        let answers_last = nonce.is_some() && nonce == watched.nonce;
        let mut acknowledges = false;
        if let Some(nonce) = watched.in_flight.filter(|in_flight| Some(*in_flight) == nonce) {
            watched.in_flight = None;
            acknowledges = true;
            match &ask.error {
                Some(reason) => {
                    // Who refuses a cluster does not ask for its endpoints.
                    if ask.kind == Kind::Cluster {
                        self.holding.clear();
                    }
                    report(Event::Rejected { kind: ask.kind, nonce, reason });
                }
                None => report(Event::Acked { kind: ask.kind, nonce }),
            }
        }
        // Something may be due that waited for this.
        self.compared = None;
        match self.form {
            Form::Delta => watched.ask_delta(ask),
            // A request that answers an older response than the last says
            // nothing; a client that saw the last one will repeat itself.
            Form::Sotw if watched.open && !ask.nonce.is_empty() && !answers_last => {}
            Form::Sotw => watched.ask_sotw(ask, acknowledges),
        }
    }

    /// True while listeners and routes wait for the client to ask for endpoints.
    pub(super) fn is_holding(&self) -> bool {
        !self.holding.is_empty()
    }

    /// Waits no longer.
    pub(super) fn release(&mut self) {
        self.holding.clear();
        self.compared = None;
    }

    /// What is to be sent now.
    pub(super) fn pushes(&mut self, resources: &Resources) -> Vec<Push> {
        let before = self.compared.replace(resources.clone());
        let unchanged = |kind| before.as_ref().is_some_and(|before| before.same(resources, kind));
        if Kind::ALL.into_iter().all(unchanged) {
            return Vec::new();
        }
        let mut pushes = Vec::new();
        for kind in Kind::ALL {
            if matches!(kind, Kind::Listener | Kind::Route) && self.holds(resources) {
                continue;
            }
            let late = self.form == Form::Delta && matches!(kind, Kind::Cluster | Kind::Endpoint);
            if !self.push(kind, resources, !late, &mut pushes) {
                // Later kinds may refer to what cannot be sent yet.
                return pushes;
            }
        }
        let settled = |kind: Kind| self.kinds[kind as usize].in_flight.is_none();
        if self.form == Form::Delta && !self.is_holding() && settled(Kind::Listener) && settled(Kind::Route) {
            for kind in [Kind::Cluster, Kind::Endpoint] {
                self.push(kind, resources, true, &mut pushes);
            }
        }
        pushes
    }

    /// Adds a kind's response if there is something to say; false if there is, but it must wait.
    fn push(&mut self, kind: Kind, resources: &Resources, removals: bool, pushes: &mut Vec<Push>) -> bool {
        let watched = &mut self.kinds[kind as usize];
        if !watched.open {
            return true;
        }
        let (send, removed) = watched.due(self.form, kind, resources, removals);
        if send.is_empty() && removed.is_empty() && !watched.answer {
            // In the state of the world a removal alone shows in a shorter response.
            let shorter = self.form == Form::Sotw && kind.is_wildcard() && watched.shrunk(resources, kind);
            if !shorter {
                return true;
            }
        }
        if watched.in_flight.is_some() {
            return false;
        }
        self.nonce += 1;
        if kind == Kind::Cluster && self.form == Form::Delta {
            let new = send.iter().filter(|resource| !watched.told.contains_key(&resource.name));
            self.holding.extend(new.map(|resource| Arc::clone(&resource.name)));
        }
        watched.sent(self.nonce, &send, &removed);
        let changed: Vec<_> = send.iter().map(|resource| Arc::clone(&resource.name)).collect();
        let send =
            if self.form == Form::Sotw && kind.is_wildcard() { watched.whole(resources, kind) } else { send };
        let removed = if self.form == Form::Delta { removed } else { Vec::new() };
        pushes.push(Push { form: self.form, kind, nonce: self.nonce, resources: send, removed });
        if kind == Kind::Cluster {
            self.warm(&changed);
        }
        true
    }

    /// Whether endpoints of new clusters are still on their way.
    fn holds(&mut self, resources: &Resources) -> bool {
        let endpoints = &self.kinds[Kind::Endpoint as usize];
        let arrived = |name: &Arc<str>| endpoints.in_flight.is_none() && endpoints.told.contains_key(name);
        // Clusters that find their endpoints otherwise have no resource of that name.
        let exists = |name: &Arc<str>| {
            [Kind::Cluster, Kind::Endpoint].iter().all(|kind| resources.get(*kind, name).is_some())
        };
        self.holding.retain(|name| exists(name) && !arrived(name));
        self.is_holding()
    }

    /// Changed clusters wait for their endpoints anew, which have the cluster's name.
    fn warm(&mut self, clusters: &[Arc<str>]) {
        let endpoints = &mut self.kinds[Kind::Endpoint as usize];
        match self.form {
            Form::Delta => {
                let known = clusters.iter().filter(|name| endpoints.names.contains(*name)).cloned();
                endpoints.again.extend(known);
            }
            // Envoy repeats its request, which cannot be told from an acknowledgement.
            Form::Sotw => endpoints.answer_next = endpoints.open && !clusters.is_empty(),
        }
    }
}

impl Watched {
    fn ask_delta(&mut self, ask: Ask) {
        let Ask { kind, names, unsubscribe, have, .. } = ask;
        if !self.open {
            self.open = true;
            // The older way to ask for everything: a first request without names.
            self.wildcard = names.is_empty() && kind.is_wildcard();
            self.answer = self.wildcard && have.is_empty();
            for (name, version) in have {
                // A version we never gave compares as different from all of ours.
                let version = u64::from_str_radix(&version, 16).unwrap_or_default();
                self.told.insert(name.into(), Told::Version(version));
            }
            self.subscribe(names, false);
        } else {
            self.subscribe(names, true);
        }
        for name in unsubscribe {
            if &*name == WILDCARD {
                self.wildcard = false;
            }
            self.names.remove(&name);
            self.again.remove(&name);
            if !self.wildcard {
                self.told.remove(&name);
            }
        }
        if !self.wildcard {
            let names = &self.names;
            self.told.retain(|name, _| names.contains(name));
        }
    }

    fn subscribe(&mut self, names: BTreeSet<Arc<str>>, again: bool) {
        for name in names {
            if &*name == WILDCARD {
                self.wildcard = true;
                continue;
            }
            if again {
                self.again.insert(Arc::clone(&name));
            }
            self.names.insert(name);
        }
    }

    fn ask_sotw(&mut self, ask: Ask, acknowledges: bool) {
        let Ask { kind, mut names, .. } = ask;
        let wildcard = names.remove(WILDCARD) || (names.is_empty() && kind.is_wildcard());
        let first = !self.open;
        let repeated = !first && !acknowledges && names == self.names;
        if first || repeated || self.answer_next {
            self.answer = wildcard || !names.is_empty();
            self.again.extend(names.iter().cloned());
            self.answer_next = false;
        } else {
            self.again.extend(names.difference(&self.names).cloned());
            self.answer |= wildcard && !self.wildcard;
        }
        self.open = true;
        self.wildcard = wildcard;
        self.told.retain(|name, _| wildcard || names.contains(name));
        self.again.retain(|name| names.contains(name));
        self.names = names;
    }

    /// Resources the client lacks, and names it must be told are not there.
    fn due(
        &self,
        form: Form,
        kind: Kind,
        resources: &Resources,
        removals: bool,
    ) -> (Vec<Arc<Resource>>, Vec<Arc<str>>) {
        let lacks = |resource: &&Arc<Resource>| {
            self.again.contains(&resource.name)
                || self.told.get(&resource.name) != Some(&Told::Version(resource.version))
        };
        let mut send: Vec<Arc<Resource>> = Vec::new();
        let mut removed = Vec::new();
        if self.wildcard {
            send.extend(resources.iter(kind).filter(lacks).cloned());
        }
        for name in &self.names {
            match resources.get(kind, name) {
                Some(resource) if !self.wildcard && lacks(&resource) => send.push(Arc::clone(resource)),
                Some(_) => {}
                None => match self.told.get(name) {
                    Some(Told::Missing) if !self.again.contains(name) => {}
                    Some(Told::Version(_)) if !removals && !self.again.contains(name) => {}
                    _ if form == Form::Sotw => {}
                    _ => removed.push(Arc::clone(name)),
                },
            }
        }
        if self.wildcard && removals && form == Form::Delta {
            let gone = |(name, told): &(&Arc<str>, &Told)| {
                **told != Told::Missing && !self.names.contains(*name) && resources.get(kind, name).is_none()
            };
            removed.extend(self.told.iter().filter(gone).map(|(name, _)| Arc::clone(name)));
        }
        (send, removed)
    }

    /// State of the world: true if the client has something that is gone.
    fn shrunk(&self, resources: &Resources, kind: Kind) -> bool {
        self.told.keys().any(|name| resources.get(kind, name).is_none())
    }

    /// State of the world: all the client is to have of a kind that is always sent whole. Forgets what is gone.
    fn whole(&mut self, resources: &Resources, kind: Kind) -> Vec<Arc<Resource>> {
        self.told.retain(|name, _| resources.get(kind, name).is_some());
        let asked = |resource: &&Arc<Resource>| self.wildcard || self.names.contains(&resource.name);
        resources.iter(kind).filter(asked).cloned().collect()
    }

    /// Records a response.
    fn sent(&mut self, nonce: u64, send: &[Arc<Resource>], removed: &[Arc<str>]) {
        for resource in send {
            self.told.insert(Arc::clone(&resource.name), Told::Version(resource.version));
            self.again.remove(&resource.name);
        }
        for name in removed {
            self.again.remove(name);
            if self.names.contains(name) {
                self.told.insert(Arc::clone(name), Told::Missing);
            } else {
                self.told.remove(name);
            }
        }
        self.answer = false;
        self.in_flight = Some(nonce);
        self.nonce = Some(nonce);
    }
}

#[cfg(test)]
mod tests;
