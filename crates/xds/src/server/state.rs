//! One stream's session without sockets: what the client asked for, has, and is to be sent.
//!
//! Rules, from the xDS protocol's description and from what Envoy needs:
//! - One response of a kind is under way at a time; what changes meanwhile is merged into the next.
//! - What is referred to goes before what refers to it. Clusters and endpoints are taken away last, when listeners and routes
//!   no longer refer to them, so that no request finds its cluster gone. In the state of the world that is so only while no
//!   cluster changes, as a response has all there are.
//! - Listeners and routes wait until the client has the endpoints of new clusters, or a request could be routed to
//!   a cluster that is not ready. Not for ever, as some clients never ask for endpoints.
//! - A name newly asked for is answered even if the client should have it, and even if it does not exist; in the state of the
//!   world the latter only for clusters and listeners, as the absence of others says nothing.
//! - To ask for nothing is to ask for everything, but not for who has named something before.
//! - Envoy warms a changed cluster anew and waits for its endpoints, so they follow although unchanged. So do the virtual
//!   hosts of a route configuration.
//!
//! A virtual host may be asked for by an authority ([`Snapshot::find`]). That name is answered as one that is not there, and the
//! host that answers to it comes as if its own name had been asked for, now or when there is one. The client confirms that by
//! asking for that name. Together with the catch-alls of route configurations (`80/*`) in a first request comes what is remembered of their hosts.
//!
//! What a client has is not remembered name by name, but as the generation up to which it was told everything; only names
//! that are to be answered out of turn are kept until they are.

mod names;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use self::names::{Names, sorted};
use super::{Event, Form, nonces::Nonce};
use crate::{
    interest::Interest,
    layer::{Snapshot, lookups},
    limits,
    resource::{Kind, Resource},
    wire::Push,
    work,
};

/// The name that stands for all resources of a kind.
const WILDCARD: &str = "*";

/// A request of either form.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) kind: Kind,
    pub(super) nonce: Nonce,
    pub(super) error: Option<String>,
    /// Delta: names to add. State of the world: all names.
    pub(super) names: Vec<String>,
    /// Delta only.
    pub(super) unsubscribe: Vec<String>,
    /// Delta only: the versions the client has from an earlier stream.
    pub(super) have: HashMap<String, String>,
}

impl Default for Ask {
    fn default() -> Self {
        Self {
            kind: Kind::Cluster,
            nonce: Nonce::None,
            error: None,
            names: Vec::new(),
            unsubscribe: Vec::new(),
            have: HashMap::new(),
        }
    }
}

/// Changes came faster than the client took them, and what is gone since is not known any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Behind;

/// What a request came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// It answers the response under way.
    pub(super) acknowledges: bool,
    /// Its nonce is none that the stream was sent.
    pub(super) guesses: bool,
    /// What it costs, aside from its bytes; see [`limits`].
    pub(super) cost: u64,
}

/// The state of one kind on one stream.
#[derive(Debug, Default)]
struct Watched {
    /// The client has asked for this kind.
    open: bool,
    wildcard: bool,
    names: Names,
    /// Those of them that the client has not said, and is to confirm.
    given: Names,
    /// Those of them that no resource had when they were asked for, which are held for this stream alone.
    strange: Names,
    /// What these take.
    kept: usize,
    /// What those in `lost` take, and how many they were when that was summed up.
    kept_lost: (usize, usize),
    /// Names by which virtual hosts were found, and those hosts.
    found: BTreeMap<Arc<str>, Arc<str>>,
    /// Lookups made for the request that is taken in.
    lookups: usize,
    /// What is asked for has changed since it was noted in the interest.
    renamed: bool,
    /// Names that are not noted in the interest yet.
    untold: Vec<Arc<str>>,
    /// Everything that there is is news.
    all: bool,
    /// Changes up to this generation have been told, but for removals that must wait.
    seen: u64,
    /// Removals up to this generation have been told.
    cleared: u64,
    /// To be answered even if the client has them, or if there are none.
    again: Names,
    /// What the client has from an earlier stream and is no more.
    lost: Vec<Arc<str>>,
    /// To be answered even with nothing.
    answer: bool,
    /// The response that is neither acknowledged nor refused yet.
    in_flight: Option<u64>,
    /// The generation that the last response was made of.
    sent: u64,
    /// The last response's number.
    nonce: Option<u64>,
    /// State of the world: the next request is to be answered, whatever it looks like.
    answer_next: bool,
    /// State of the world: names were given, so that none means nothing and no longer all.
    explicit: bool,
}

/// The state of one stream.
#[derive(Debug)]
pub(super) struct Session {
    form: Form,
    nonce: u64,
    kinds: [Watched; Kind::ALL.len()],
    /// The generation that everything was last compared with, unless something was asked since.
    compared: Option<u64>,
    /// New clusters whose endpoints the client does not have yet.
    holding: Vec<Arc<str>>,
    /// The generation in which it was last seen that there are such clusters.
    held: u64,
    /// Told what is asked for.
    interest: Arc<Interest>,
    /// Virtual hosts that a client like this has used before, until it has asked for some.
    remembered: Arc<[Arc<str>]>,
}

impl Session {
    pub(super) fn new(form: Form, interest: Arc<Interest>, remembered: Arc<[Arc<str>]>) -> Self {
        let kinds = Default::default();
        Self { form, nonce: 0, kinds, compared: None, holding: Vec::new(), held: 0, interest, remembered }
    }

    /// Takes a request in.
    pub(super) fn ask(&mut self, ask: Ask, snapshot: &Snapshot, report: &mut dyn FnMut(Event<'_>)) -> Taken {
        let kind = ask.kind;
        let watched = &mut self.kinds[kind as usize];
        if !watched.open {
            report(Event::Asked { kind });
        }
        // A client that connects again may bring the nonce of another stream along in a first request.
        let guesses = watched.open && ask.nonce == Nonce::Unknown;
        let nonce = if let Nonce::Of(number) = ask.nonce { Some(number) } else { None };
        let answers_last = nonce.is_some() && nonce == watched.nonce;
        let named = ask.names.len() + ask.unsubscribe.len() + ask.have.len();
        // Whoever asks for a family or for all has all of it looked through; other names add to what waits.
        let many = ask.names.iter().any(|name| name == WILDCARD || kind.is_family(name));
        let waiting = if many { 0 } else { watched.again.0.len() };
        let mut acknowledges = false;
        if let Some(nonce) = watched.in_flight.filter(|in_flight| Some(*in_flight) == nonce) {
            watched.in_flight = None;
            acknowledges = true;
            match &ask.error {
                Some(reason) => {
                    // Who refuses a cluster does not ask for its endpoints.
                    if ask.kind == Kind::Cluster {
                        self.holding = Vec::new();
                    }
                    report(Event::Rejected { kind: ask.kind, nonce, reason });
                }
                None => report(Event::Acked { kind: ask.kind, nonce }),
            }
        }
        // Something may be due that waited for this.
        if acknowledges || !watched.open || named > 0 || self.form == Form::Sotw {
            self.compared = None;
        }
        let (strange, answered) = (Arc::clone(&watched.strange.0), watched.answer);
        match self.form {
            Form::Delta => {
                let hosts = ask.kind == Kind::VirtualHost;
                // A long list, which is of use only to who begins.
                let remembered = if hosts { std::mem::take(&mut self.remembered) } else { Arc::default() };
                let begins = ask.have.is_empty();
                if kind == Kind::Cluster && !self.holding.is_empty() && !ask.unsubscribe.is_empty() {
                    let gone: HashSet<&str> = ask.unsubscribe.iter().map(String::as_str).collect();
                    self.holding.retain(|name| !gone.contains(&**name));
                }
                if hosts && !ask.unsubscribe.is_empty() {
                    for name in snapshot.intern(ask.kind, ask.unsubscribe.clone()).0 {
                        report(Event::Unused { host: &name });
                    }
                }
                let before = watched.names.0.clone();
                watched.ask_delta(ask, snapshot);
                if hosts && !Arc::ptr_eq(&before, &watched.names.0) && !watched.takes_many(Kind::VirtualHost)
                {
                    let new = watched.names.0.iter().filter(|name| before.binary_search(name).is_err());
                    new.filter(|name| snapshot.get(Kind::VirtualHost, name).is_some())
                        .for_each(|host| report(Event::Used { host }));
                    if begins {
                        watched.give_remembered(&remembered, &before, snapshot);
                    }
                }
            }
            Form::Sotw if watched.open && ask.nonce != Nonce::None && !answers_last => {
                watched.ask_late(&ask);
            }
            Form::Sotw => watched.ask_sotw(ask, acknowledges, snapshot),
        }
        // In the state of the world an acknowledgement lists all names again, as the protocol wants.
        let repeats = self.form == Form::Sotw && acknowledges && !watched.renamed;
        let listed = if repeats { 0 } else { named };
        watched.tell(kind, &self.interest);
        watched.sum_up(&strange);
        let whole = self.form == Form::Sotw && watched.wildcard && watched.answer && !answered;
        let lookups = std::mem::take(&mut watched.lookups);
        let free = acknowledges && listed == 0;
        let cost = if free {
            0
        } else {
            watched.cost(kind, snapshot, listed, waiting, whole)
                + limits::LOOKUP * lookups as u64
                + limits::HELD * self.holding.len() as u64
        };
        Taken { acknowledges, guesses, cost }
    }

    /// What the names take that are held for this stream alone. In bytes.
    pub(super) fn kept(&self) -> usize {
        self.kinds.iter().map(|watched| watched.kept + watched.kept_lost.0).sum()
    }

    /// Names of virtual hosts that are asked for and that no resource has.
    pub(super) fn authorities(&self) -> usize {
        self.kinds[Kind::VirtualHost as usize].strange.0.len()
    }

    /// True while listeners and routes wait for the client to ask for endpoints.
    pub(super) fn is_holding(&self) -> bool {
        !self.holding.is_empty()
    }

    /// Waits no longer.
    pub(super) fn release(&mut self) {
        self.holding = Vec::new();
        self.compared = None;
    }

    /// What is to be sent now.
    pub(super) fn pushes(&mut self, snapshot: &Snapshot) -> Result<Vec<Push>, Behind> {
        let mut pushes = Vec::new();
        if self.compared.replace(snapshot.generation()) == Some(snapshot.generation()) {
            return Ok(pushes);
        }
        for kind in Kind::ALL {
            if matches!(kind, Kind::Listener | Kind::Route | Kind::VirtualHost) && self.holds(snapshot) {
                continue;
            }
            let late = matches!(kind, Kind::Cluster | Kind::Endpoint);
            if !self.push(kind, snapshot, !late, &mut pushes)? {
                // Later kinds may refer to what cannot be sent yet.
                return Ok(pushes);
            }
        }
        let settled = |kind: Kind| self.kinds[kind as usize].in_flight.is_none();
        let referring = [Kind::Listener, Kind::Route, Kind::VirtualHost];
        if !self.is_holding() && referring.into_iter().all(settled) {
            for kind in [Kind::Cluster, Kind::Endpoint] {
                self.push(kind, snapshot, true, &mut pushes)?;
            }
        }
        Ok(pushes)
    }

    /// Adds a kind's response if there is something to say; false if there is, but it must wait.
    fn push(
        &mut self,
        kind: Kind,
        snapshot: &Snapshot,
        removals: bool,
        pushes: &mut Vec<Push>,
    ) -> Result<bool, Behind> {
        let watched = &mut self.kinds[kind as usize];
        if !watched.open {
            return Ok(true);
        }
        // What has changed is looked through once, when it can be sent.
        if watched.in_flight.is_some() && !watched.is_settled(kind, snapshot, removals) {
            return Ok(false);
        }
        if kind == Kind::VirtualHost && snapshot.is_realiased(kind, watched.seen) {
            watched.resolve(kind, snapshot);
            watched.tell(kind, &self.interest);
        }
        if watched.is_settled(kind, snapshot, removals) {
            watched.told(snapshot, removals);
            return Ok(true);
        }
        let Due { send, removed, shrunk } = watched.due(self.form, kind, snapshot, removals)?;
        // In the state of the world a removal alone shows in a shorter response.
        let shorter = self.form == Form::Sotw && kind.is_wildcard() && shrunk;
        let removed = if self.form == Form::Delta { removed } else { Vec::new() };
        if send.is_empty() && removed.is_empty() && !watched.answer && !shorter {
            watched.told(snapshot, removals);
            return Ok(true);
        }
        self.nonce += 1;
        if kind == Kind::Cluster {
            let new = send.iter().filter(|resource| watched.lacks(kind, snapshot, &resource.name));
            self.holding.extend(new.map(|resource| Arc::clone(&resource.name)));
            self.held = 0;
        }
        // What is sent whole says what is gone by itself.
        let whole = self.form == Form::Sotw && kind.is_wildcard();
        watched.told(snapshot, removals || whole);
        watched.answer = false;
        watched.in_flight = Some(self.nonce);
        watched.sent = snapshot.generation();
        watched.nonce = watched.in_flight;
        let changed: Vec<_> = send.iter().map(|resource| Arc::clone(&resource.name)).collect();
        let mut resources = if whole { watched.whole(snapshot, kind) } else { send };
        let together = snapshot.together(kind, self.form, &mut resources);
        pushes.push(Push { form: self.form, kind, number: self.nonce, resources, together, removed });
        match kind {
            Kind::Cluster => self.warm(&changed),
            Kind::Route => self.complete(&changed, snapshot),
            _ => {}
        }
        Ok(true)
    }

    /// Whether endpoints of new clusters are still on their way.
    fn holds(&mut self, snapshot: &Snapshot) -> bool {
        let endpoints = &self.kinds[Kind::Endpoint as usize];
        if std::mem::replace(&mut self.held, snapshot.generation()) != snapshot.generation() {
            // Clusters that find their endpoints otherwise have no resource of that name.
            let exists = |name: &Arc<str>| {
                [Kind::Cluster, Kind::Endpoint].iter().all(|kind| snapshot.get(*kind, name).is_some())
            };
            self.holding.retain(exists);
        }
        if endpoints.in_flight.is_none() {
            self.holding.retain(|name| !endpoints.has(Kind::Endpoint, name));
        }
        if self.holding.is_empty() {
            // It may have held a whole mesh.
            self.holding = Vec::new();
        }
        self.is_holding()
    }

    /// Envoy asks for all virtual hosts, once, and forgets those of route configurations that it does not have. With a new
    /// one it waits for them.
    fn complete(&mut self, routes: &[Arc<str>], snapshot: &Snapshot) {
        let hosts = &mut self.kinds[Kind::VirtualHost as usize];
        if hosts.wildcard {
            let routes: HashSet<&str> = routes.iter().map(|name| &**name).collect();
            let all = snapshot.iter(Kind::VirtualHost).map(|resource| &resource.name);
            let theirs = all
                .filter(|name| Kind::VirtualHost.family(name).is_some_and(|family| routes.contains(family)));
            hosts.again.extend(theirs.cloned());
        }
    }

    /// Changed clusters wait for their endpoints anew, which have the cluster's name.
    fn warm(&mut self, clusters: &[Arc<str>]) {
        let endpoints = &mut self.kinds[Kind::Endpoint as usize];
        match self.form {
            Form::Delta => {
                let known = clusters.iter().filter(|name| endpoints.names.contains(name)).cloned();
                endpoints.again.extend(known);
            }
            // Envoy repeats its request, which cannot be told from an acknowledgement.
            Form::Sotw => endpoints.answer_next = endpoints.open && !clusters.is_empty(),
        }
    }
}

/// What is to be said of a kind.
#[derive(Default)]
struct Due {
    send: Vec<Arc<Resource>>,
    removed: Vec<Arc<str>>,
    /// Something that the client has is gone, or may be.
    shrunk: bool,
}

impl Watched {
    /// Notes what is asked for, if that is not noted yet.
    fn tell(&mut self, kind: Kind, interest: &Interest) {
        if std::mem::take(&mut self.renamed) {
            if self.wildcard {
                interest.add_all(kind);
            }
            interest.add(kind, std::mem::take(&mut self.untold).iter().map(|name| &**name));
        }
    }

    /// Sums up what is held for this stream alone, unless that is as it was.
    fn sum_up(&mut self, before: &Arc<[Arc<str>]>) {
        let sum = |names: &[Arc<str>]| {
            work::did(names.len());
            names.iter().map(|name| limits::name_cost(name)).sum()
        };
        if !Arc::ptr_eq(before, &self.strange.0) {
            self.kept = sum(&self.strange.0);
        }
        if self.kept_lost.1 != self.lost.len() {
            self.kept_lost = (sum(&self.lost), self.lost.len());
        }
    }

    /// Finds the virtual hosts that answer to those of these names that no resource has.
    fn find(&mut self, kind: Kind, names: &[Arc<str>], snapshot: &Snapshot) -> Vec<Arc<str>> {
        let mut found = Vec::new();
        // A stream that asks for more is ended.
        if self.strange.0.len() > limits::AUTHORITIES {
            return found;
        }
        for name in names.iter().filter(|name| snapshot.get(kind, name).is_none()) {
            self.lookups += lookups(kind, name);
            if let Some(host) = snapshot.find(kind, name) {
                self.found.insert(Arc::clone(name), Arc::clone(&host.name));
                found.push(Arc::clone(&host.name));
            }
        }
        found
    }

    fn ask_delta(&mut self, ask: Ask, snapshot: &Snapshot) {
        let Ask { kind, names, unsubscribe, have, .. } = ask;
        if self.open {
            // Most requests only acknowledge.
            if !names.is_empty() {
                self.subscribe(kind, names, snapshot, |_| true);
            }
        } else {
            // The older way to ask for everything: a first request without names.
            let wildcard = names.is_empty() && unsubscribe.is_empty() && kind.is_wildcard();
            self.answer = wildcard && have.is_empty();
            self.open(snapshot);
            // A version we never gave is different from all of ours.
            let versions: HashMap<&str, u64> = have
                .iter()
                .filter_map(|(name, version)| Some((name.as_str(), u64::from_str_radix(version, 16).ok()?)))
                .collect();
            let stale = |name: &str| {
                let version = snapshot.get(kind, name).map(|resource| resource.version);
                version.is_none() || version != versions.get(name).copied()
            };
            self.subscribe(kind, names, snapshot, stale);
            self.wildcard |= wildcard;
            self.renamed |= wildcard;
            self.all &= have.is_empty();
            if self.wildcard && !have.is_empty() {
                let all = snapshot.iter(kind).map(|resource| &resource.name);
                self.again.extend(all.filter(|name| stale(name)).cloned());
            }
            let gone = have.keys().filter(|name| {
                snapshot.get(kind, name).is_none() && self.watches(kind, name) && !self.names.contains(name)
            });
            self.lost = gone.map(|name| name.as_str().into()).collect();
        }
        if !unsubscribe.is_empty() {
            let (before, wildcard) = (Arc::clone(&self.names.0), self.wildcard);
            self.unsubscribe(kind, &Names(snapshot.intern(kind, unsubscribe).0.into()));
            let same = Arc::ptr_eq(&before, &self.names.0) && wildcard == self.wildcard;
            if kind == Kind::VirtualHost && !(same && self.given.0.is_empty()) {
                // What it did not confirm it may have forgotten, or not take when it comes. Who still asks for what leads to one is
                // to have it.
                let given = std::mem::take(&mut self.given);
                self.unsubscribe(kind, &given);
                self.lookups += self.found.len();
                let there = |name: &str| snapshot.get(kind, name).is_some();
                let found = self.found.iter().filter(|(name, host)| !there(name) && there(host));
                let hosts = found.map(|(_, host)| Arc::clone(host)).collect();
                self.give(kind, hosts);
            }
        }
    }

    fn unsubscribe(&mut self, kind: Kind, names: &Names) {
        if names.contains(WILDCARD) {
            self.wildcard = false;
            self.all = false;
            self.lost.clear();
        }
        self.names.remove(&names.0);
        self.given.remove(&names.0);
        self.strange.remove(&names.0);
        self.found.retain(|name, _| !names.contains(name));
        let mut again = std::mem::take(&mut self.again);
        again.retain(|name| !names.contains(name) && self.watches(kind, name));
        // The client has forgotten what it is still to have, if there is any.
        again.extend(names.0.iter().filter(|name| self.watches(kind, name)).cloned());
        self.again = again;
    }

    /// Begins with the client as up to date, but for what is noted otherwise.
    fn open(&mut self, snapshot: &Snapshot) {
        self.open = true;
        self.all = true;
        (self.seen, self.cleared) = (snapshot.generation(), snapshot.generation());
    }

    fn subscribe(
        &mut self,
        kind: Kind,
        names: Vec<String>,
        snapshot: &Snapshot,
        news: impl Fn(&str) -> bool,
    ) {
        let (mut named, mut again, mut families) = (Vec::new(), Vec::new(), Vec::new());
        let (names, strange) = snapshot.intern(kind, names);
        self.strange.extend(strange);
        for name in names {
            if &*name == WILDCARD {
                self.all |= !self.wildcard;
                self.wildcard = true;
                self.look_back();
                continue;
            }
            if kind.is_family(&name) {
                families.push(Arc::clone(&name));
            } else if !self.given.contains(&name) && news(&name) {
                again.push(Arc::clone(&name));
            }
            named.push(name);
        }
        self.given.remove(&named);
        if !families.is_empty() {
            self.look_back();
            let families = Names(families.into());
            let asked = |member: &&Arc<str>| kind.family(member).is_some_and(|name| families.contains(name));
            let members = snapshot.iter(kind).map(|resource| &resource.name).filter(asked);
            again.extend(members.filter(|member| news(member)).cloned());
        }
        self.renamed = true;
        self.untold.extend(named.iter().cloned());
        self.names.extend(named.iter().cloned());
        self.names.0 = snapshot.share_names(kind, &self.names.0);
        self.again.extend(again);
        if kind == Kind::VirtualHost {
            let found = self.find(kind, &named, snapshot);
            self.give(kind, found);
        }
    }

    /// What is under way may bring what the client asked for before, and is gone by now, to one who asks for many.
    fn look_back(&mut self) {
        if self.in_flight.is_some() {
            self.cleared = self.cleared.min(self.sent);
        }
    }

    /// Gives the client what answers to names that it asks for, unless it has that.
    fn resolve(&mut self, kind: Kind, snapshot: &Snapshot) {
        self.found.clear();
        let names = Arc::clone(&self.names.0);
        let found = self.find(kind, &names, snapshot);
        // No request has caused these.
        self.lookups = 0;
        self.give(kind, found);
    }

    /// Gives the client what is remembered of the route configurations whose catch-all it asks for now.
    fn give_remembered(&mut self, remembered: &[Arc<str>], before: &[Arc<str>], snapshot: &Snapshot) {
        let kind = Kind::VirtualHost;
        // Few hosts are remembered, and the client may have named many catch-alls.
        let is_new = |name: &str| self.names.contains(name) && !sorted::contains(before, name);
        let theirs =
            |name: &&Arc<str>| kind.family(name).is_some_and(|family| is_new(&format!("{family}/*")));
        let found = remembered.iter().filter(theirs).filter_map(|name| snapshot.get(kind, name));
        let found = found.map(|resource| Arc::clone(&resource.name)).collect();
        self.give(kind, found);
    }

    /// Sends these as if the client had asked for them.
    fn give(&mut self, kind: Kind, mut names: Vec<Arc<str>>) {
        names.retain(|name| !self.watches(kind, name));
        self.renamed |= !names.is_empty();
        self.untold.extend(names.iter().cloned());
        self.names.extend(names.iter().cloned());
        self.again.extend(names.iter().cloned());
        self.given.extend(names);
    }

    fn ask_sotw(&mut self, ask: Ask, acknowledges: bool, snapshot: &Snapshot) {
        let Ask { kind, mut names, .. } = ask;
        self.explicit |= !names.is_empty();
        let wildcard = names.iter().any(|name| name == WILDCARD) || (!self.explicit && kind.is_wildcard());
        names.retain(|name| name != WILDCARD);
        let (names, strange) = snapshot.intern(kind, names);
        let names = Names(names.into());
        self.strange = Names(strange.into());
        let first = !self.open;
        let same = names == self.names;
        let repeated = !first && !acknowledges && same && wildcard == self.wildcard;
        if first || repeated || self.answer_next {
            self.answer = wildcard || !names.0.is_empty();
            self.again.extend(names.0.iter().cloned());
            self.answer_next = false;
        } else {
            let new: Vec<_> = names.0.iter().filter(|name| !self.names.contains(name)).cloned().collect();
            let missing = || new.iter().any(|name| snapshot.get(kind, name).is_none());
            self.answer |= (wildcard && !self.wildcard) || (kind.is_wildcard() && missing());
            self.again.extend(new);
        }
        if first {
            self.open(snapshot);
        }
        self.all = wildcard && (self.all || !self.wildcard);
        self.renamed |= first || !same || wildcard != self.wildcard;
        self.wildcard = wildcard;
        self.again.retain(|name| names.contains(name));
        if first || !same {
            self.untold =
                names.0.iter().filter(|name| first || !self.names.contains(name)).cloned().collect();
        }
        if !same {
            self.names = Names(snapshot.share_names(kind, &names.0));
        }
    }

    /// A request that answers an older response than the last. It is not answered, as a client that saw the last one repeats
    /// itself. But what it does not ask for the client forgets, and is to have anew if it then asks for it.
    fn ask_late(&mut self, ask: &Ask) {
        self.wildcard &=
            (!self.explicit && ask.kind.is_wildcard()) || ask.names.iter().any(|name| name == WILDCARD);
        self.all &= self.wildcard;
        if !self.names.0.is_empty() {
            let said: HashSet<&str> = ask.names.iter().map(String::as_str).collect();
            self.names.retain(|name| said.contains(name));
            self.strange.retain(|name| said.contains(name));
        }
    }

    /// What a request costs that lists so many names, where so many waited to be answered before. `whole` if it is to be
    /// answered with all there is.
    fn cost(&self, kind: Kind, snapshot: &Snapshot, listed: usize, waiting: usize, whole: bool) -> u64 {
        let all = if self.all && self.wildcard || whole { snapshot.count(kind) } else { 0 };
        let anew = self.again.0.len().saturating_sub(waiting) + all;
        let held = if listed > 0 { self.names.0.len() + self.again.0.len() } else { 0 };
        limits::ASK
            + limits::RESOURCE * anew as u64
            + limits::NAMED * listed as u64
            + limits::HELD * held as u64
    }

    /// Whether the client takes part in what happens to a name.
    fn watches(&self, kind: Kind, name: &str) -> bool {
        self.wildcard
            || self.names.contains(name)
            || kind.family(name).is_some_and(|family| self.names.contains(family))
    }

    /// Whether the client takes part in what happens to names that it did not say.
    fn takes_many(&self, kind: Kind) -> bool {
        self.wildcard || self.names.0.iter().any(|name| kind.is_family(name))
    }

    /// Whether the client was told of a name, whatever there is to it.
    fn has(&self, kind: Kind, name: &str) -> bool {
        self.open && !self.all && self.watches(kind, name) && !self.again.contains(name)
    }

    /// Whether the client never had a resource that is to be sent.
    fn lacks(&self, kind: Kind, snapshot: &Snapshot, name: &str) -> bool {
        self.all || self.again.contains(name) || snapshot.is_new(kind, name, self.seen)
    }

    /// Whether there is nothing to say, as far as a glance tells.
    fn is_settled(&self, kind: Kind, snapshot: &Snapshot, removals: bool) -> bool {
        let since = if removals { self.seen.min(self.cleared) } else { self.seen };
        !self.all
            && !self.answer
            && self.again.0.is_empty()
            && (self.lost.is_empty() || !removals)
            && !snapshot.is_changed(kind, since)
    }

    /// Resources the client lacks, and names it must be told are not there.
    fn due(&self, form: Form, kind: Kind, snapshot: &Snapshot, removals: bool) -> Result<Due, Behind> {
        work::did(1 + self.again.0.len() + if removals { self.lost.len() } else { 0 });
        let mut due = Due::default();
        if self.all && self.wildcard {
            due.send.extend(snapshot.iter(kind).cloned());
        } else {
            let news = snapshot.changes(kind, self.seen).resources;
            due.send.extend(news.into_iter().filter(|resource| self.watches(kind, &resource.name)));
            for (name, resource, is_changed) in snapshot.each(kind, &self.again.0, self.seen) {
                match resource {
                    // It is among the news.
                    Some(_) if is_changed && self.watches(kind, name) => {}
                    Some(resource) => due.send.push(Arc::clone(resource)),
                    None => {}
                }
            }
        }
        let missing = |name: &&Arc<str>| snapshot.get(kind, name).is_none();
        if form == Form::Delta {
            let again = snapshot.each(kind, &self.again.0, self.seen);
            due.removed.extend(
                again.filter(|(_, resource, _)| resource.is_none()).map(|(name, ..)| Arc::clone(name)),
            );
        }
        if removals {
            let gone = snapshot.changes(kind, self.cleared).gone;
            match gone {
                Some(gone) => due.removed.extend(gone.into_iter().filter(|name| self.watches(kind, name))),
                None if form == Form::Delta && self.takes_many(kind) => return Err(Behind),
                None => {
                    due.removed.extend(self.names.0.iter().filter(missing).cloned());
                    due.shrunk = true;
                }
            }
            due.removed.extend(self.lost.iter().filter(missing).cloned());
            due.removed.sort_unstable();
            due.removed.dedup();
            due.shrunk |= !due.removed.is_empty();
        }
        Ok(due)
    }

    /// State of the world: all the client is to have of a kind that is always sent whole.
    fn whole(&self, snapshot: &Snapshot, kind: Kind) -> Vec<Arc<Resource>> {
        if self.takes_many(kind) {
            return snapshot
                .iter(kind)
                .filter(|resource| self.watches(kind, &resource.name))
                .cloned()
                .collect();
        }
        snapshot.each(kind, &self.names.0, 0).filter_map(|(_, resource, _)| resource).cloned().collect()
    }

    /// The client knows all there is, with or without what is gone.
    fn told(&mut self, snapshot: &Snapshot, removals: bool) {
        self.seen = snapshot.generation();
        self.all = false;
        self.again = Names::default();
        if removals {
            self.cleared = self.seen;
            self.lost.clear();
        }
    }
}

#[cfg(test)]
mod tests;
