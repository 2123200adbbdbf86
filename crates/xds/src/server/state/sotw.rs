//! The state of the world: each request lists all names; responses of clusters and listeners carry all subscribed
//! resources.

use std::{collections::HashSet, sync::Arc};

use super::{
    SubscriptionRequest, WILDCARD,
    names::SubscribedNames,
    subscription::{Charge, Response, Subscription},
};
use crate::{layer::Snapshot, server::nonces::Nonce};

/// Applies a request.
pub(super) fn apply(
    subscription: &mut Subscription,
    request: SubscriptionRequest,
    acknowledges: bool,
    snapshot: &Snapshot,
) -> Charge {
    let listed = request.listed();
    let (was_all_due, responded) = (subscription.is_all_due(), subscription.respond);
    let nonce = if let Nonce::Of(number) = request.nonce { Some(number) } else { None };
    let answers_last = nonce.is_some() && nonce == subscription.last_nonce;
    if subscription.open && request.nonce != Nonce::None && !answers_last {
        apply_stale(subscription, &request);
    } else {
        apply_current(subscription, request, acknowledges, snapshot);
    }
    let all = subscription.wildcard && subscription.respond && !responded
        || subscription.is_all_due() && !was_all_due;
    if !acknowledges || subscription.names_changed {
        return Charge { listed, repeated: 0, all };
    }
    // The protocol requires an ACK to list all names again. One more name is free: the wildcard.
    let listed = listed.saturating_sub(subscription.names.0.len() + 1);
    let repeated = if listed == 0 { subscription.encoded_names() } else { 0 };
    Charge { listed, repeated, all }
}

/// Applies a request that answers the last response, or that carries no nonce.
fn apply_current(
    subscription: &mut Subscription,
    request: SubscriptionRequest,
    acknowledges: bool,
    snapshot: &Snapshot,
) {
    let SubscriptionRequest { kind, mut names, .. } = request;
    subscription.named |= !names.is_empty();
    let wildcard = names.iter().any(|name| name == WILDCARD) || (!subscription.named && kind.is_wildcard());
    names.retain(|name| name != WILDCARD);
    let (names, unknown) = snapshot.intern(kind, names);
    let names = SubscribedNames(names.into());
    subscription.unknown = SubscribedNames(unknown.into());
    let first = !subscription.open;
    let same = names == subscription.names;
    let repeated = !first && !acknowledges && same && wildcard == subscription.wildcard;
    if first || repeated || subscription.respond_next {
        subscription.respond = wildcard || !names.0.is_empty();
        subscription.resend.extend(names.0.iter().cloned());
        subscription.respond_next = false;
    } else {
        let new: Vec<_> = names.0.iter().filter(|name| !subscription.names.contains(name)).cloned().collect();
        let missing = || new.iter().any(|name| snapshot.get(kind, name).is_none());
        subscription.respond |= (wildcard && !subscription.wildcard) || (kind.is_wildcard() && missing());
        subscription.resend.extend(new);
    }
    if first {
        subscription.open(snapshot);
    }
    subscription.all = wildcard && (subscription.all || !subscription.wildcard);
    subscription.names_changed |= first || !same || wildcard != subscription.wildcard;
    subscription.wildcard = wildcard;
    subscription.resend.retain(|name| names.contains(name));
    if first || !same {
        subscription.new_names =
            names.0.iter().filter(|name| first || !subscription.names.contains(name)).cloned().collect();
    }
    if !same {
        subscription.names = SubscribedNames(snapshot.share_names(kind, &names.0));
    }
}

/// Applies a request that answers an older response than the last one. The client repeats its names with the answer to
/// the last response, so nothing is added. A name that the request does not list is dropped: the client has forgotten
/// the resource. A new subscription sends it again.
fn apply_stale(subscription: &mut Subscription, request: &SubscriptionRequest) {
    subscription.wildcard &= (!subscription.named && request.kind.is_wildcard())
        || request.names.iter().any(|name| name == WILDCARD);
    subscription.all &= subscription.wildcard;
    if !subscription.names.0.is_empty() {
        let listed: HashSet<&str> = request.names.iter().map(String::as_str).collect();
        subscription.names.retain(|name| listed.contains(name));
        subscription.unknown.retain(|name| listed.contains(name));
    }
}

/// Returns the response that is due, if any. `removals` is false while the types that refer to these resources are in
/// flight.
pub(super) fn response(subscription: &Subscription, snapshot: &Snapshot, removals: bool) -> Option<Response> {
    subscription.count_work(removals);
    let kind = subscription.kind;
    let whole = kind.is_wildcard();
    let changed = subscription.due(snapshot, snapshot.changes(kind, subscription.seen).resources);
    // A removal shows in a response without the resource. If the removals are no longer known by name, there may be
    // one.
    let is_gone = |names: Vec<Arc<str>>| names.iter().any(|name| subscription.matches(name));
    let is_shorter = || removals && snapshot.changes(kind, subscription.cleared).removed.is_none_or(is_gone);
    let is_due = !changed.is_empty() || subscription.respond || whole && is_shorter();
    is_due.then_some(Response { changed, removed: Vec::new(), whole })
}

/// Ensures that the next request for endpoints is answered. Envoy repeats its request when it warms a changed cluster,
/// and that request cannot be distinguished from an acknowledgement.
pub(super) fn resend_endpoints(endpoints: &mut Subscription, clusters: &[Arc<str>]) {
    endpoints.respond_next = endpoints.open && !clusters.is_empty();
}
