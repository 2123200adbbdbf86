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
mod watched;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use self::watched::{PendingChanges, Watched};
use super::{Event, Form, nonces::Nonce};
use crate::{interest::Interest, kind::Kind, layer::Snapshot, limits, wire::Push};

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
    /// Bytes of it that cost nothing, as an acknowledgement needs them.
    pub(super) free: usize,
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
    held: Option<u64>,
    /// Told what is asked for.
    interest: Arc<Interest>,
    /// Virtual hosts that a client like this has used before, until it has asked for some.
    remembered: Arc<[Arc<str>]>,
    /// Cost of lookups after changes that is not charged yet; see [`limits`].
    owed: u64,
    /// Virtual hosts that a change gave to authorities that the client had asked for before.
    found: Vec<Arc<str>>,
}

impl Session {
    pub(super) fn new(form: Form, interest: Arc<Interest>, remembered: Arc<[Arc<str>]>) -> Self {
        let (kinds, holding) = Default::default();
        Self {
            form,
            nonce: 0,
            kinds,
            compared: None,
            holding,
            held: None,
            interest,
            remembered,
            owed: 0,
            found: Vec::new(),
        }
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
        let was_due_all = watched.all && watched.wildcard;
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
        let listed = if repeats { named.saturating_sub(watched.names.0.len() + 1) } else { named };
        watched.tell(kind, &self.interest);
        watched.sum_up(&strange);
        let whole = self.form == Form::Sotw && watched.wildcard && watched.answer && !answered;
        // While nothing can be sent it stays due, and is sent once.
        let all = whole || watched.all && watched.wildcard && !was_due_all;
        let lookups = std::mem::take(&mut watched.lookups);
        let taken = Taken { acknowledges, guesses, ..Taken::default() };
        if acknowledges && listed == 0 {
            let names = if repeats { watched.names_length() } else { 0 };
            return Taken { free: limits::ACKNOWLEDGEMENT + names, ..taken };
        }
        let cost = watched.cost(kind, snapshot, listed, waiting, all)
            + limits::LOOKUP * lookups as u64
            + limits::HELD * self.holding.len() as u64;
        Taken { cost, ..taken }
    }

    /// What the names take that are held for this stream alone. In bytes.
    pub(super) fn kept(&self) -> usize {
        self.kinds.iter().map(|watched| watched.kept + watched.kept_lost.0).sum()
    }

    /// What the lists of names take, each as its part of what it shares with other streams. In bytes.
    pub(super) fn lists(&self) -> usize {
        self.kinds.iter().map(Watched::lists).sum()
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

    /// What the lookups have cost since the last call that changes of virtual hosts caused.
    pub(super) fn take_owed(&mut self) -> u64 {
        std::mem::take(&mut self.owed)
    }

    /// Takes the virtual hosts that a change gave to authorities that the client had asked for before.
    pub(super) fn take_found(&mut self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.found)
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
            let found = watched.resolve(kind, snapshot);
            if !watched.takes_many(kind) {
                self.found.extend(found);
            }
            watched.tell(kind, &self.interest);
            let (lookups, scanned) =
                (std::mem::take(&mut watched.lookups), std::mem::take(&mut watched.scanned));
            self.owed += limits::LOOKUP * lookups as u64 + limits::HELD * scanned as u64;
        }
        if watched.is_settled(kind, snapshot, removals) {
            watched.told(snapshot, removals);
            return Ok(true);
        }
        let PendingChanges { send, removed, shrunk } = watched.due(self.form, kind, snapshot, removals)?;
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
            self.held = None;
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
        if self.held.replace(snapshot.generation()) != Some(snapshot.generation()) {
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

#[cfg(test)]
mod tests;
