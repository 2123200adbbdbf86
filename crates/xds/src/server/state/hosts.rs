//! Virtual hosts on demand (VHDS), incremental only: a client subscribes to `ROUTE CONFIGURATION/AUTHORITY`, not to a
//! known name.
//!
//! The server answers the authority as an absent resource. It also sends the virtual host that matches
//! ([`Snapshot::find`]), as if the client had subscribed to it by name. The host is sent at once, or when one appears.
//! The client confirms it by a subscription to its name.
//!
//! A first request may list the catch-all of a route configuration (`80/*`). It is also sent the remembered hosts of
//! that route configuration, which clients of the same workload used before.

use std::{collections::HashSet, sync::Arc};

use super::{
    SubscriptionRequest, delta,
    names::sorted,
    subscription::{Charge, Subscription},
};
use crate::{
    aliases::{self, lookups},
    kind::Kind,
    layer::Snapshot,
    limits,
    server::Event,
    work,
};

/// Applies a request and reports which hosts the client subscribes to and no longer subscribes to.
pub(super) fn apply(
    subscription: &mut Subscription,
    request: SubscriptionRequest,
    remembered: &[Arc<str>],
    snapshot: &Snapshot,
    report: &mut dyn FnMut(Event<'_>),
) -> Charge {
    if !request.unsubscribe.is_empty() {
        for name in snapshot.intern(request.kind, request.unsubscribe.clone()).0 {
            report(Event::HostUnused { host: &name });
        }
    }
    let has_versions = !request.have.is_empty();
    let before = Arc::clone(&subscription.names.0);
    let charge = delta::apply(subscription, request, snapshot);
    if !Arc::ptr_eq(&before, &subscription.names.0) && !subscription.matches_unlisted() {
        let new = subscription.names.0.iter().filter(|name| before.binary_search(name).is_err());
        new.filter(|name| snapshot.get(Kind::VirtualHost, name).is_some())
            .for_each(|host| report(Event::HostUsed { host }));
        if !has_versions {
            subscription.add_remembered(remembered, &before, snapshot);
        }
    }
    charge
}

/// Makes the virtual hosts of changed route configurations due. Envoy requests all virtual hosts once and forgets
/// those of route configurations that it does not have. It waits for them when it receives a new one.
pub(super) fn resend_hosts(hosts: &mut Subscription, routes: &[Arc<str>], snapshot: &Snapshot) {
    if hosts.wildcard {
        let routes: HashSet<&str> = routes.iter().map(|name| &**name).collect();
        let all = snapshot.iter(Kind::VirtualHost).map(|resource| &resource.name);
        let theirs =
            all.filter(|name| Kind::VirtualHost.family(name).is_some_and(|family| routes.contains(family)));
        hosts.resend.extend(theirs.cloned());
    }
}

impl Subscription {
    /// Resolves those of these names that no resource has. Returns the virtual hosts that match.
    pub(super) fn resolve(&mut self, names: &[Arc<str>], snapshot: &Snapshot) -> Vec<Arc<str>> {
        let mut hosts = Vec::new();
        // The stream is ended if it subscribes to more.
        if self.unknown.0.len() > limits::MAX_AUTHORITIES {
            return hosts;
        }
        for name in names.iter().filter(|name| snapshot.get(self.kind, name).is_none()) {
            self.lookups += lookups(self.kind, name);
            if let Some(host) = snapshot.find(self.kind, name) {
                self.resolved.insert(Arc::clone(name), Arc::clone(&host.name));
                hosts.push(Arc::clone(&host.name));
            }
        }
        hosts
    }

    /// Resolves the names that changed aliases may concern. Adds the hosts that match, and returns them.
    pub(super) fn resolve_again(&mut self, snapshot: &Snapshot) -> Vec<Arc<str>> {
        let names = self.affected(snapshot).unwrap_or_else(|| {
            self.resolved.clear();
            Arc::clone(&self.names.0)
        });
        for name in &*names {
            self.resolved.remove(name);
        }
        let hosts = self.resolve(&names, snapshot);
        self.add_unconfirmed(hosts.clone(), snapshot);
        hosts
    }

    /// Returns the names that may resolve differently since aliases changed; `None` if that is not known. The names
    /// are looked through only if a wildcard alias, the alias of one of them, or the names themselves changed.
    fn affected(&mut self, snapshot: &Snapshot) -> Option<Arc<[Arc<str>]>> {
        let kind = self.kind;
        let changed = snapshot.changed_aliases(kind, self.seen)?;
        let removed = snapshot.changes(kind, self.seen).removed?;
        if removed.iter().any(|name| self.names.contains(name)) {
            self.alias_keys = None;
        }
        let (names, resolved) = (&self.names, &mut self.resolved);
        let mut scanned = 0;
        let mut scan = || {
            scanned += names.0.len();
            work::count(names.0.len());
            snapshot
                .each(kind, &names.0, 0)
                .filter(|(_, resource, _)| resource.is_none())
                .map(|(name, ..)| name)
        };
        let keys = self.alias_keys.get_or_insert_with(|| {
            resolved.retain(|name, _| names.contains(name));
            let mut keys: Vec<_> = scan().map(|name| aliases::key(name)).collect();
            keys.sort_unstable();
            keys.into()
        });
        let affected = if changed.may_affect(keys) {
            scan().filter(|name| changed.affects(kind, name)).cloned().collect()
        } else {
            Arc::default()
        };
        self.scanned += scanned;
        Some(affected)
    }

    /// Adds the remembered hosts of the route configurations whose catch-all is new in the subscription.
    fn add_remembered(&mut self, remembered: &[Arc<str>], before: &[Arc<str>], snapshot: &Snapshot) {
        let kind = self.kind;
        // Goes through the remembered hosts, which are few. The client may have listed many catch-alls.
        let is_new = |name: &str| self.names.contains(name) && !sorted::contains(before, name);
        let theirs =
            |name: &&Arc<str>| kind.family(name).is_some_and(|family| is_new(&format!("{family}/*")));
        let hosts = remembered.iter().filter(theirs).filter_map(|name| snapshot.get(kind, name));
        let hosts = hosts.map(|resource| Arc::clone(&resource.name)).collect();
        self.add_unconfirmed(hosts, snapshot);
    }

    /// Drops unconfirmed hosts after the client unsubscribed from a name, and adds the hosts that subscribed
    /// authorities still resolve to. The client may have forgotten an unconfirmed host, or may not accept it when it
    /// arrives.
    pub(super) fn add_resolved_again(&mut self, snapshot: &Snapshot) {
        self.drop_unconfirmed(snapshot);
        self.lookups += self.resolved.len();
        let exists = |name: &str| snapshot.get(self.kind, name).is_some();
        let resolved = self.resolved.iter().filter(|(name, host)| !exists(name) && exists(host));
        let hosts = resolved.map(|(_, host)| Arc::clone(host)).collect();
        self.add_unconfirmed(hosts, snapshot);
    }
}
