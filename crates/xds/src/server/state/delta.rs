//! The incremental form: a request adds and removes names, a response carries what changed and what was removed.

use std::{collections::HashMap, sync::Arc};

use super::{
    SubscriptionRequest, TooFarBehind,
    names::SubscribedNames,
    subscription::{Charge, Response, Subscription},
};
use crate::{
    kind::Kind,
    layer::{Changes, Snapshot},
};

/// Applies a request. A stale nonce makes no difference: it only decides what is acknowledged.
pub(super) fn apply(
    subscription: &mut Subscription,
    request: SubscriptionRequest,
    snapshot: &Snapshot,
) -> Charge {
    let listed = request.listed();
    let was_all_due = subscription.is_all_due();
    let SubscriptionRequest { names, unsubscribe, have, .. } = request;
    if !subscription.open {
        open(subscription, names, unsubscribe.is_empty(), &have, snapshot);
    } else if !names.is_empty() {
        subscription.subscribe(names, snapshot, |_| true);
    }
    if !unsubscribe.is_empty() {
        self::unsubscribe(subscription, unsubscribe, snapshot);
    }
    Charge { listed, repeated: 0, all: subscription.is_all_due() && !was_all_due }
}

/// Applies the first request of a type, in which the client may list the versions that it has.
fn open(
    subscription: &mut Subscription,
    names: Vec<String>,
    keeps_all: bool,
    have: &HashMap<String, String>,
    snapshot: &Snapshot,
) {
    let kind = subscription.kind;
    // The legacy wildcard: a first request without names.
    let wildcard = names.is_empty() && keeps_all && kind.is_wildcard();
    subscription.respond = wildcard && have.is_empty();
    subscription.open(snapshot);
    // A version that this server never sent differs from all of its own.
    let versions: HashMap<&str, u64> = have
        .iter()
        .filter_map(|(name, version)| Some((name.as_str(), u64::from_str_radix(version, 16).ok()?)))
        .collect();
    let stale = |name: &str| {
        let version = snapshot.get(kind, name).map(|resource| resource.version);
        version.is_none() || version != versions.get(name).copied()
    };
    subscription.subscribe(names, snapshot, stale);
    subscription.wildcard |= wildcard;
    subscription.names_changed |= wildcard;
    subscription.all &= have.is_empty();
    if subscription.wildcard && !have.is_empty() {
        let all = snapshot.iter(kind).map(|resource| &resource.name);
        subscription.resend.extend(all.filter(|name| stale(name)).cloned());
    }
    let removed = have.keys().filter(|name| {
        snapshot.get(kind, name).is_none() && subscription.matches(name) && !subscription.names.contains(name)
    });
    subscription.missing_names = removed.map(|name| name.as_str().into()).collect();
}

fn unsubscribe(subscription: &mut Subscription, names: Vec<String>, snapshot: &Snapshot) {
    let kind = subscription.kind;
    let (before, wildcard) = (Arc::clone(&subscription.names.0), subscription.wildcard);
    subscription.unsubscribe(&SubscribedNames(snapshot.intern(kind, names).0.into()), snapshot);
    let same = before == subscription.names.0 && wildcard == subscription.wildcard;
    if kind == Kind::VirtualHost && !(same && subscription.unconfirmed.0.is_empty()) {
        subscription.add_resolved_again(snapshot);
    }
}

/// Returns the response that is due, if any, and whether all removals are sent with it. Removals are left out while the
/// types that refer to these resources are in flight.
pub(super) fn response(
    subscription: &Subscription,
    snapshot: &Snapshot,
    removals: bool,
) -> Result<(Option<Response>, bool), TooFarBehind> {
    subscription.count_work(removals);
    let kind = subscription.kind;
    let Changes { resources, removed: mut gone } = snapshot.changes(kind, subscription.seen);
    if subscription.cleared < subscription.seen {
        gone = snapshot.changes(kind, subscription.cleared).removed;
    }
    let changed = subscription.due(snapshot, resources);
    let resent = snapshot.each(kind, &subscription.resend.0, subscription.seen);
    let absent = resent.filter(|(_, resource, _)| resource.is_none());
    let mut removed: Vec<_> = absent.map(|(name, ..)| Arc::clone(name)).collect();
    let mut sends_all = subscription.missing_names.is_empty();
    if let Some(gone) = &mut gone {
        gone.retain(|name| subscription.matches(name));
        sends_all &= gone.is_empty();
    }
    if removals {
        let missing = |name: &&Arc<str>| snapshot.get(kind, name).is_none();
        match gone {
            Some(names) => removed.extend(names),
            // Removals that are no longer known by name cannot be sent to a client that subscribes to unlisted names.
            None if subscription.matches_unlisted() => return Err(TooFarBehind),
            None => removed.extend(subscription.names.0.iter().filter(missing).cloned()),
        }
        removed.extend(subscription.missing_names.iter().filter(missing).cloned());
        removed.sort_unstable();
        removed.dedup();
        sends_all = true;
    } else {
        sends_all &= gone.is_some();
    }
    let is_due = !changed.is_empty() || !removed.is_empty() || subscription.respond;
    Ok((is_due.then_some(Response { changed, removed, whole: false }), sends_all))
}

/// Makes the endpoints of changed clusters due. They have the names of the clusters.
pub(super) fn resend_endpoints(endpoints: &mut Subscription, clusters: &[Arc<str>]) {
    let known = clusters.iter().filter(|name| endpoints.names.contains(name)).cloned();
    endpoints.resend.extend(known);
}

/// Adds the endpoints of added clusters to the subscription, and returns their number. The client confirms them by a
/// subscription to the name.
pub(super) fn add_endpoints(
    endpoints: &mut Subscription,
    clusters: &[Arc<str>],
    snapshot: &Snapshot,
) -> usize {
    let known = clusters.iter().filter_map(|name| snapshot.get(Kind::Endpoint, name));
    let names: Vec<_> = known.map(|resource| Arc::clone(&resource.name)).collect();
    let count = names.len();
    endpoints.add_unconfirmed(names, snapshot);
    count
}
