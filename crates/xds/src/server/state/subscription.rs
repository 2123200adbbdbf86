//! The core of a subscription, which both forms share: names subscribed to, what was sent, and what is due.

use std::{
    collections::BTreeMap,
    ptr,
    sync::{Arc, Weak},
};

use super::{WILDCARD, names::SubscribedNames};
use crate::{
    interest::Interest,
    kind::Kind,
    layer::{NameEdit, Snapshot},
    limits,
    resource::Resource,
    work,
};

/// Subscription of one stream to one resource type.
#[derive(Debug)]
pub(super) struct Subscription {
    pub(super) kind: Kind,
    /// The client has requested this type on this stream.
    pub(super) open: bool,

    // Names subscribed to.
    /// The client subscribes to all resources.
    pub(super) wildcard: bool,
    pub(super) names: SubscribedNames,
    /// Subset of `names` that the server added, for an authority or a cluster, and that the client has not requested yet.
    pub(super) unconfirmed: SubscribedNames,
    /// Subset of `names` that no resource had when they were requested. They are held for this stream alone.
    pub(super) unknown: SubscribedNames,
    /// State of the world: a request listed names, so an empty list no longer means all.
    pub(super) named: bool,
    /// The subscription has changed since `update_interest`.
    pub(super) names_changed: bool,
    /// Names that the interest does not have yet.
    pub(super) new_names: Vec<Arc<str>>,
    /// Names that were last reported, and whether they stood for all resources.
    reported: Option<(Weak<[Arc<str>]>, bool)>,

    // Sent and due resources.
    /// Nothing has been sent yet, or nothing since the wildcard was added. With the wildcard, every resource is due.
    pub(super) all: bool,
    /// Changes up to this generation have been sent, without removals that must wait.
    pub(super) seen: u64,
    /// Removals up to this generation have been sent.
    pub(super) cleared: u64,
    /// Names to send again even if unchanged or absent.
    pub(super) resend: SubscribedNames,
    /// Incremental: names in `initial_resource_versions` that no resource has; their removal is due.
    pub(super) missing_names: Vec<Arc<str>>,
    /// A response is due even if it is empty.
    pub(super) respond: bool,
    /// State of the world: the next request is answered even if it changes nothing.
    pub(super) respond_next: bool,

    // Last response.
    /// Number of the response that waits for an ACK or NACK.
    pub(super) in_flight: Option<u64>,
    /// Number of the last response.
    pub(super) last_nonce: Option<u64>,
    /// Generation from which the last response was made.
    pub(super) sent: u64,

    // Virtual hosts on demand; see `hosts`.
    /// Virtual hosts by the authority that resolved to them.
    pub(super) resolved: BTreeMap<Arc<str>, Arc<str>>,
    /// Sorted alias keys of the names that no resource has; `None` after names were added.
    pub(super) alias_keys: Option<Box<[u64]>>,

    // Accounting; see `limits`.
    /// Lookups that are not charged yet.
    pub(super) lookups: usize,
    /// Names searched after a change that are not charged yet.
    pub(super) scanned: usize,
    /// Bytes of `unknown`.
    unknown_bytes: usize,
    /// Bytes of `missing_names`, and its length when they were counted.
    missing_bytes: (usize, usize),
}

/// Part of a request that its cost depends on.
pub(super) struct Charge {
    /// Number of listed names that are charged.
    pub(super) listed: usize,
    /// Bytes of names that the protocol requires an ACK to repeat.
    pub(super) repeated: usize,
    /// The request makes every resource of the type due.
    pub(super) all: bool,
}

/// Content of a response.
pub(super) struct Response {
    /// Resources that are due.
    pub(super) changed: Vec<Arc<Resource>>,
    /// Names of removed resources, incremental only.
    pub(super) removed: Vec<Arc<str>>,
    /// The response carries every subscribed resource, changed or not.
    pub(super) whole: bool,
}

impl Subscription {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            open: false,
            wildcard: false,
            names: SubscribedNames::default(),
            unconfirmed: SubscribedNames::default(),
            unknown: SubscribedNames::default(),
            named: false,
            names_changed: false,
            new_names: Vec::new(),
            reported: None,
            all: false,
            seen: 0,
            cleared: 0,
            resend: SubscribedNames::default(),
            missing_names: Vec::new(),
            respond: false,
            respond_next: false,
            in_flight: None,
            last_nonce: None,
            sent: 0,
            resolved: BTreeMap::new(),
            alias_keys: None,
            lookups: 0,
            scanned: 0,
            unknown_bytes: 0,
            missing_bytes: (0, 0),
        }
    }

    /// Opens the subscription. No change before this snapshot is due; the caller marks the names that are due.
    pub(super) fn open(&mut self, snapshot: &Snapshot) {
        self.open = true;
        self.all = true;
        (self.seen, self.cleared) = (snapshot.generation(), snapshot.generation());
    }

    /// Adds names. Those for which `is_due` returns true are sent.
    pub(super) fn subscribe(
        &mut self,
        names: Vec<String>,
        snapshot: &Snapshot,
        is_due: impl Fn(&str) -> bool,
    ) {
        let kind = self.kind;
        let (mut named, mut resend, mut families) = (Vec::new(), Vec::new(), Vec::new());
        let (names, unknown) = snapshot.intern(kind, names);
        self.unknown.extend(unknown);
        for name in names {
            if &*name == WILDCARD {
                self.all |= !self.wildcard;
                self.wildcard = true;
                self.repeat_removals();
                continue;
            }
            if kind.is_family(&name) {
                families.push(Arc::clone(&name));
            } else if !self.unconfirmed.contains(&name) && is_due(&name) {
                resend.push(Arc::clone(&name));
            }
            named.push(name);
        }
        self.unconfirmed.remove(&named);
        if !families.is_empty() {
            self.repeat_removals();
            let families = SubscribedNames(families.into());
            let is_member =
                |name: &&Arc<str>| kind.family(name).is_some_and(|family| families.contains(family));
            let members = snapshot.iter(kind).map(|resource| &resource.name).filter(is_member);
            resend.extend(members.filter(|member| is_due(member)).cloned());
        }
        self.names_changed = true;
        self.add_names(&named, snapshot);
        self.resend.extend(resend);
        if kind == Kind::VirtualHost {
            let hosts = self.resolve(&named, snapshot);
            self.add_unconfirmed(hosts, snapshot);
        }
    }

    /// Sends these resources as if the client had subscribed to them.
    pub(super) fn add_unconfirmed(&mut self, mut names: Vec<Arc<str>>, snapshot: &Snapshot) {
        names.retain(|name| !self.matches(name));
        if names.is_empty() {
            return;
        }
        names.sort_unstable();
        names.dedup();
        self.names_changed = true;
        self.add_names(&names, snapshot);
        self.resend.extend(names.iter().cloned());
        self.unconfirmed.extend(names);
    }

    /// Unsubscribes from the names that the client has not requested. Returns the number of names looked through.
    pub(super) fn drop_unconfirmed(&mut self, snapshot: &Snapshot) -> usize {
        let unconfirmed = std::mem::take(&mut self.unconfirmed);
        if unconfirmed.0.is_empty() {
            return 0;
        }
        let scanned = self.names.0.len();
        self.unsubscribe(&unconfirmed, snapshot);
        scanned
    }

    /// Makes removals since the response in flight due again. That response may contain resources that were deleted
    /// after it was made, and that only the new subscription covers.
    fn repeat_removals(&mut self) {
        if self.in_flight.is_some() {
            self.cleared = self.cleared.min(self.sent);
        }
    }

    /// Adds sorted names to the list, some of which it may have already.
    fn add_names(&mut self, names: &[Arc<str>], snapshot: &Snapshot) {
        if !names.iter().all(|name| self.names.contains(name)) {
            self.new_names.extend(names.iter().cloned());
            self.edit_names(NameEdit::Add(names), snapshot);
        }
    }

    fn edit_names(&mut self, edit: NameEdit<'_>, snapshot: &Snapshot) {
        let before = &self.names.0;
        let apply = || {
            let mut after = SubscribedNames(Arc::clone(before));
            match edit {
                NameEdit::Add(names) => after.extend(names.iter().cloned()),
                NameEdit::Remove(names) => after.remove(names),
            }
            after.0
        };
        self.names.0 = snapshot.edit_names(self.kind, before, edit, apply);
    }

    /// Removes names, which are sorted.
    pub(super) fn unsubscribe(&mut self, names: &SubscribedNames, snapshot: &Snapshot) {
        if names.contains(WILDCARD) {
            self.wildcard = false;
            self.all = false;
            self.missing_names.clear();
        }
        self.edit_names(NameEdit::Remove(&names.0), snapshot);
        self.unconfirmed.remove(&names.0);
        self.unknown.remove(&names.0);
        self.resolved.retain(|name, _| !names.contains(name));
        let mut resend = std::mem::take(&mut self.resend);
        resend.retain(|name| !names.contains(name) && self.matches(name));
        // The client has forgotten these resources. Those that the rest of the subscription covers are sent again.
        resend.extend(names.0.iter().filter(|name| self.matches(name)).cloned());
        self.resend = resend;
    }

    /// Returns true if the subscription covers a name.
    pub(super) fn matches(&self, name: &str) -> bool {
        self.wildcard
            || self.names.contains(name)
            || self.kind.family(name).is_some_and(|family| self.names.contains(family))
    }

    /// Returns true if the subscription covers names that it does not list.
    pub(super) fn matches_unlisted(&self) -> bool {
        self.wildcard || self.names.0.iter().any(|name| self.kind.is_family(name))
    }

    /// Returns true if the presence or absence of a name was sent.
    pub(super) fn is_sent(&self, name: &str) -> bool {
        self.open && !self.all && self.matches(name) && !self.resend.contains(name)
    }

    /// Returns true if a resource that is due was never sent, was deleted since, or is sent again in any case.
    pub(super) fn is_new(&self, snapshot: &Snapshot, name: &str) -> bool {
        self.all || self.resend.contains(name) || snapshot.is_new(self.kind, name, self.seen)
    }

    /// Returns true if every resource is due.
    pub(super) fn is_all_due(&self) -> bool {
        self.all && self.wildcard
    }

    /// Returns true if nothing is due, without a look at the changes themselves.
    pub(super) fn is_settled(&self, snapshot: &Snapshot, removals: bool) -> bool {
        let since = if removals { self.seen.min(self.cleared) } else { self.seen };
        !self.all
            && !self.respond
            && self.resend.0.is_empty()
            && (self.missing_names.is_empty() || !removals)
            && !snapshot.is_changed(self.kind, since)
    }

    /// Returns the resources that are due. `changed` are the resources that changed since the last response.
    pub(super) fn due(&self, snapshot: &Snapshot, changed: Vec<Arc<Resource>>) -> Vec<Arc<Resource>> {
        if self.is_all_due() {
            return snapshot.iter(self.kind).cloned().collect();
        }
        let mut due = changed;
        due.retain(|resource| self.matches(&resource.name));
        for (name, resource, is_changed) in snapshot.each(self.kind, &self.resend.0, self.seen) {
            match resource {
                // It is among the changes.
                Some(_) if is_changed && self.matches(name) => {}
                Some(resource) => due.push(Arc::clone(resource)),
                None => {}
            }
        }
        due
    }

    /// Returns every resource that the subscription covers.
    pub(super) fn matching(&self, snapshot: &Snapshot) -> Vec<Arc<Resource>> {
        if self.matches_unlisted() {
            let all = snapshot.iter(self.kind);
            return all.filter(|resource| self.matches(&resource.name)).cloned().collect();
        }
        let listed = snapshot.each(self.kind, &self.names.0, 0);
        listed.filter_map(|(_, resource, _)| resource).cloned().collect()
    }

    /// Marks everything as sent, with or without removals.
    pub(super) fn mark_sent(&mut self, snapshot: &Snapshot, removals: bool) {
        self.seen = snapshot.generation();
        self.all = false;
        self.resend = SubscribedNames::default();
        if removals {
            self.cleared = self.seen;
            self.missing_names.clear();
        }
    }

    /// Marks a response as in flight.
    pub(super) fn begin_response(&mut self, number: u64, generation: u64) {
        self.respond = false;
        self.in_flight = Some(number);
        self.last_nonce = self.in_flight;
        self.sent = generation;
    }

    /// Adds the names of the subscription to the interest, if they have changed.
    pub(super) fn update_interest(&mut self, interest: &Interest) {
        if std::mem::take(&mut self.names_changed) {
            if self.wildcard {
                interest.add_all(self.kind);
            }
            interest.add(self.kind, std::mem::take(&mut self.new_names).iter().map(|name| &**name));
            self.alias_keys = None;
        }
    }

    /// Returns the names of the subscription if they have changed since the last call, and whether they stand for all
    /// resources.
    pub(super) fn names_to_report(&mut self) -> Option<(bool, &Arc<[Arc<str>]>)> {
        let (all, names) = (self.wildcard, &self.names.0);
        // The weak reference keeps the address of the last list in use, so another list has another address.
        let is_reported = |(last, was_all): &(Weak<[Arc<str>]>, bool)| {
            *was_all == all && ptr::addr_eq(last.as_ptr(), Arc::as_ptr(names))
        };
        if self.reported.as_ref().is_some_and(is_reported) {
            return None;
        }
        self.reported = Some((Arc::downgrade(names), all));
        Some((all, names))
    }

    /// Counts the bytes of names that are held for this stream alone. `before` is the list of unknown names at the
    /// last count.
    pub(super) fn count_bytes(&mut self, before: &Arc<[Arc<str>]>) {
        let sum = |names: &[Arc<str>]| {
            work::count(names.len());
            names.iter().map(|name| limits::name_cost(name)).sum()
        };
        if !Arc::ptr_eq(before, &self.unknown.0) {
            self.unknown_bytes = sum(&self.unknown.0);
        }
        if self.missing_bytes.1 != self.missing_names.len() {
            self.missing_bytes = (sum(&self.missing_names), self.missing_names.len());
        }
    }

    /// Returns the bytes of the names that are held for this stream alone.
    pub(super) fn unshared_bytes(&self) -> usize {
        self.unknown_bytes + self.missing_bytes.0
    }

    /// Returns the bytes of the lists of names that no other account counts.
    pub(super) fn list_bytes(&self) -> usize {
        let lists = [&self.names, &self.resend, &self.unconfirmed];
        let resolved = 2 * self.resolved.len();
        (lists.into_iter().map(SubscribedNames::places).sum::<usize>() + resolved) * size_of::<Arc<str>>()
    }

    /// Returns the bytes of all names in a request, with the key and length of each field.
    pub(super) fn encoded_names(&self) -> usize {
        self.names.0.iter().map(|name| 4 + name.len()).sum()
    }

    /// Returns the cost of a request. `waiting` is the number of names that were due to be sent again before it.
    pub(super) fn request_cost(&self, snapshot: &Snapshot, charge: &Charge, waiting: usize) -> u64 {
        let all = if charge.all { snapshot.count(self.kind) } else { 0 };
        let due = self.resend.0.len().saturating_sub(waiting) + all;
        let held = if charge.listed > 0 { self.names.0.len() + self.resend.0.len() } else { 0 };
        limits::REQUEST_COST
            + limits::RESOURCE_COST * due as u64
            + limits::NAME_COST * charge.listed as u64
            + limits::HELD_NAME_COST * held as u64
    }

    /// Counts the steps of work of one response, for tests.
    pub(super) fn count_work(&self, removals: bool) {
        work::count(1 + self.resend.0.len() + if removals { self.missing_names.len() } else { 0 });
    }
}
