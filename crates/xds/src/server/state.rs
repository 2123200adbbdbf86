//! The subscriptions of one discovery stream, without sockets: the client's requests, the resources sent, and those
//! that are due.
//!
//! [`Session`] holds one [`Subscription`] per resource type and decides the order of the types. [`subscription`] is
//! the core that both forms of the protocol share. [`delta`] (incremental) and [`sotw`] (state of the world) hold the
//! rules by which each form reads a request and fills a response. [`hosts`] serves virtual hosts on demand.
//!
//! # States of a resource name in a subscription
//!
//! | State | Meaning |
//! |---|---|
//! | None | The client does not subscribe to the name. |
//! | Due | The client subscribes; the content or the absence of the resource is still to be sent. |
//! | In flight | The last response of the type covers the name; the client has not answered it. |
//! | Settled | The client has answered the response that covers the current content or absence. |
//!
//! States are not stored per name. A generation stands for all names: what changed in a later one is due. Only names
//! that are due for another reason are listed until they are sent ([`Subscription::resend`]).
//!
//! # Transitions
//!
//! "All" stands for clusters, listeners and the other types that have a wildcard ([`Kind::is_wildcard`]). In the
//! state of the world, each response of these types carries every resource that the client subscribes to; a missing
//! one is deleted. Numbers refer to the sources below.
//!
//! | Event | States | Incremental response | State of the world response |
//! |---|---|---|---|
//! | First request, no names (1) | None → Due | every resource | every resource |
//! | First request with versions (2) | None → Due, Settled | resources that differ; removals | has no versions |
//! | Subscribe to a name (3) | any → Due | resource or removal | the resource; All even if absent |
//! | Same request again, no ACK (4) | Settled → Due | the listed names again | every name again |
//! | Unsubscribe (5) | any → None | none | none |
//! | Unsubscribe beside `*` (5) | any → Due | resource or removal | none: still in `*` |
//! | Resource changes | Settled → Due | the resource | the resource, or All |
//! | Resource is deleted (6) | Settled → Due | removal | All without it; else none |
//! | Response is sent | Due → In flight | | |
//! | Change while in flight | In flight → Due | after ACK or NACK | after ACK or NACK |
//! | ACK (7) | In flight → Settled | none | none |
//! | NACK (7) | In flight → Settled | none until it changes | none until it changes |
//! | Older nonce (8) | as subscribed | names count; no ACK | dropped names → None; no more |
//! | A cluster is sent (9) | endpoint → Due | the endpoints again | endpoints at next request |
//! | A cluster is added, Envoy (10) | endpoint: None → Due | its endpoints | none |
//! | Route configuration is sent (9) | hosts → Due | its virtual hosts, if `*` | as incremental |
//!
//! Sources: sections of the [xDS protocol](https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol).
//! 1. "How the client specifies what resources to return": an empty first list is a wildcard for types that have one;
//!    an empty list after a name was listed is not.
//! 2. "Incremental xDS": `initial_resource_versions` of a reconnecting client.
//! 3. "Knowing When a Requested Resource Does Not Exist", "Grouping Resources into Responses".
//! 4. Our rule: a request that repeats the subscription and acknowledges nothing asks for the content.
//! 5. "Unsubscribing From Resources": a client that drops a name beside `*` has forgotten the resource.
//! 6. "Deleting Resources".
//! 7. "ACK/NACK": one response per type is in flight; later changes are merged into the next one.
//! 8. "Resource updates": a stale request in the state of the world is not answered. Incremental: the nonce only
//!    decides what is acknowledged.
//! 9. "Resource warming": Envoy warms a changed cluster and waits for its endpoints, although they are unchanged. It
//!    also waits for the virtual hosts of a new route configuration.
//! 10. Our rule, for Envoys only. An Envoy that has requested listeners subscribes to the endpoints of an added cluster
//!     while it applies that cluster, thus before it reads the next response. The endpoints are therefore sent at once,
//!     and the subscription that follows only confirms them. Other clients may apply responses at the same time.
//!
//! # Order between types
//!
//! "Eventual consistency considerations" of the protocol, make before break:
//! - Clusters and endpoints are sent before the listeners and routes that use them ([`Kind::ALL`]).
//! - Removals of clusters and endpoints are sent after the listeners and routes that no longer refer to them. A client
//!   applies responses in the order of the stream, so they may follow routes at once. They wait until listeners are
//!   acknowledged: a client may use a former listener until it has what the new one needs. In the state of the world
//!   this holds only while no cluster changes, because each response lists all clusters.
//! - Listeners and routes wait until the endpoints of new clusters are sent. No request is then routed to a cluster that
//!   is not ready. The wait ends after a timeout, because some clients never request endpoints.

mod delta;
mod hosts;
mod names;
mod sotw;
mod subscription;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use self::subscription::{Charge, Response, Subscription};
use super::{Event, Form, nonces::Nonce};
use crate::{interest::Interest, kind::Kind, layer::Snapshot, limits, wire::Push};

/// Resource name that stands for all resources of a type.
const WILDCARD: &str = "*";

/// A discovery request of either form.
#[derive(Debug)]
pub(super) struct SubscriptionRequest {
    pub(super) kind: Kind,
    pub(super) nonce: Nonce,
    /// Reason of a NACK.
    pub(super) error: Option<String>,
    /// Incremental: names to add. State of the world: all names.
    pub(super) names: Vec<String>,
    /// Incremental only: names to remove.
    pub(super) unsubscribe: Vec<String>,
    /// Incremental only: `initial_resource_versions`, which the client has from an earlier stream.
    pub(super) have: HashMap<String, String>,
}

impl SubscriptionRequest {
    /// Number of names that the request lists.
    fn listed(&self) -> usize {
        self.names.len() + self.unsubscribe.len() + self.have.len()
    }
}

impl Default for SubscriptionRequest {
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

/// The client fell so far behind that the removals since its last response are no longer known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooFarBehind;

/// Result of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RequestOutcome {
    /// The request acknowledges or refuses the response in flight.
    pub(super) acknowledges: bool,
    /// The nonce was never sent on this stream.
    pub(super) unknown_nonce: bool,
    /// Cost without the bytes of the request; see [`limits`].
    pub(super) cost: u64,
    /// Bytes of the request that cost nothing, because an acknowledgement needs them.
    pub(super) free: usize,
}

/// State of one stream.
#[derive(Debug)]
pub(super) struct Session {
    form: Form,
    /// Number of the last response.
    nonce: u64,
    subscriptions: [Subscription; Kind::ALL.len()],
    /// Generation of the last comparison; `None` after a request that may make something due.
    compared: Option<u64>,
    /// A response may be due that waits for an ACK.
    waits: bool,
    /// New clusters whose endpoints are not sent yet.
    holding: Vec<Arc<str>>,
    /// Generation in which `holding` was last checked against the snapshot.
    held: Option<u64>,
    /// Receives the names of all subscriptions.
    interest: Arc<Interest>,
    /// Virtual hosts that clients of the same workload used before; empty after the first request for virtual hosts.
    remembered: Arc<[Arc<str>]>,
    /// Cost of work without a request that is not charged yet; see [`limits`].
    debt: u64,
    /// Virtual hosts that a change assigned to authorities to which the client already subscribes.
    found: Vec<Arc<str>>,
    /// The client is an Envoy.
    is_envoy: bool,
}

impl Session {
    pub(super) fn new(form: Form, interest: Arc<Interest>, remembered: Arc<[Arc<str>]>) -> Self {
        Self {
            form,
            nonce: 0,
            subscriptions: Kind::ALL.map(Subscription::new),
            compared: None,
            waits: true,
            holding: Vec::new(),
            held: None,
            interest,
            remembered,
            debt: 0,
            found: Vec::new(),
            is_envoy: false,
        }
    }

    /// Sets whether the client is an Envoy.
    pub(super) fn with_envoy(self, is_envoy: bool) -> Self {
        Self { is_envoy, ..self }
    }

    /// Applies a request to its subscription.
    pub(super) fn request(
        &mut self,
        request: SubscriptionRequest,
        snapshot: &Snapshot,
        report: &mut dyn FnMut(Event<'_>),
    ) -> RequestOutcome {
        let kind = request.kind;
        let subscription = &self.subscriptions[kind as usize];
        let first = !subscription.open;
        if first {
            let generation = (!request.have.is_empty()).then(|| snapshot.generation());
            report(Event::Requested { kind, generation });
        }
        // A reconnecting client may send the nonce of its former stream in a first request.
        let unknown_nonce = !first && request.nonce == Nonce::Unknown;
        // A request for a family or for all has all of `resend` looked through; other names only add to it.
        let many = request.names.iter().any(|name| name == WILDCARD || kind.is_family(name));
        let waiting = if many { 0 } else { subscription.resend.0.len() };
        let unknown = Arc::clone(&subscription.unknown.0);
        let acknowledges = self.acknowledge(&request, snapshot, report);
        // In the state of the world each request lists the whole subscription, so an empty one changes it too.
        let is_changed = first || request.listed() > 0 || request.error.is_some() || self.form == Form::Sotw;
        if is_changed || acknowledges && self.waits {
            self.compared = None;
        }
        let charge = self.apply(request, acknowledges, snapshot, report);
        self.report_names(kind, report);
        let subscription = &mut self.subscriptions[kind as usize];
        subscription.update_interest(&self.interest);
        subscription.count_bytes(&unknown);
        let lookups = std::mem::take(&mut subscription.lookups);
        let outcome = RequestOutcome { acknowledges, unknown_nonce, ..RequestOutcome::default() };
        if acknowledges && charge.listed == 0 {
            return RequestOutcome { free: limits::FREE_ACKNOWLEDGEMENT + charge.repeated, ..outcome };
        }
        let cost = subscription.request_cost(snapshot, &charge, waiting)
            + limits::LOOKUP_COST * lookups as u64
            + limits::HELD_NAME_COST * self.holding.len() as u64;
        RequestOutcome { cost, ..outcome }
    }

    /// Reports the names of a subscription if they have changed since the last report. A client that has not requested
    /// the type has none.
    pub(super) fn report_names(&mut self, kind: Kind, report: &mut dyn FnMut(Event<'_>)) {
        let subscription = &mut self.subscriptions[kind as usize];
        if subscription.open
            && let Some((all, names)) = subscription.names_to_report()
        {
            report(Event::Subscribed { kind, all, names });
        }
    }

    /// Takes the ACK or NACK in a request. Returns false if the request answers no response in flight.
    fn acknowledge(
        &mut self,
        request: &SubscriptionRequest,
        snapshot: &Snapshot,
        report: &mut dyn FnMut(Event<'_>),
    ) -> bool {
        let subscription = &mut self.subscriptions[request.kind as usize];
        let Some(nonce) = subscription.in_flight.filter(|number| request.nonce == Nonce::Of(*number)) else {
            return false;
        };
        subscription.in_flight = None;
        match &request.error {
            Some(reason) => {
                // A client does not request the endpoints of a cluster that it rejects.
                if request.kind == Kind::Cluster {
                    self.holding = Vec::new();
                    let scanned = self.subscriptions[Kind::Endpoint as usize].drop_unconfirmed(snapshot);
                    self.debt += limits::HELD_NAME_COST * scanned as u64;
                }
                report(Event::Rejected { kind: request.kind, nonce, reason });
            }
            None => report(Event::Acked { kind: request.kind, nonce }),
        }
        true
    }

    /// Applies the names in a request by the rules of the stream's form.
    fn apply(
        &mut self,
        request: SubscriptionRequest,
        acknowledges: bool,
        snapshot: &Snapshot,
        report: &mut dyn FnMut(Event<'_>),
    ) -> Charge {
        let subscription = &mut self.subscriptions[request.kind as usize];
        match (self.form, request.kind) {
            (Form::Sotw, _) => sotw::apply(subscription, request, acknowledges, snapshot),
            (Form::Delta, Kind::VirtualHost) => {
                // The list is long, and of use only in the first request.
                let remembered = std::mem::take(&mut self.remembered);
                hosts::apply(subscription, request, &remembered, snapshot, report)
            }
            (Form::Delta, kind) => {
                if kind == Kind::Cluster && !self.holding.is_empty() && !request.unsubscribe.is_empty() {
                    let unsubscribed: HashSet<&str> =
                        request.unsubscribe.iter().map(String::as_str).collect();
                    self.holding.retain(|name| !unsubscribed.contains(&**name));
                }
                delta::apply(subscription, request, snapshot)
            }
        }
    }

    /// Returns the bytes of the names that are held for this stream alone.
    pub(super) fn name_bytes(&self) -> usize {
        self.subscriptions.iter().map(Subscription::unshared_bytes).sum()
    }

    /// Returns the bytes of the lists of names; a list that several streams share counts in parts.
    pub(super) fn list_bytes(&self) -> usize {
        self.subscriptions.iter().map(Subscription::list_bytes).sum()
    }

    /// Returns the number of virtual host names in the subscription that no resource has.
    pub(super) fn authorities(&self) -> usize {
        self.subscriptions[Kind::VirtualHost as usize].unknown.0.len()
    }

    /// Returns true while listeners and routes wait for the client to request endpoints.
    pub(super) fn is_holding(&self) -> bool {
        !self.holding.is_empty()
    }

    /// Ends the wait for endpoints.
    pub(super) fn release(&mut self) {
        self.holding = Vec::new();
        self.compared = None;
    }

    /// Returns the cost of work without a request since the last call: of lookups that changes of virtual hosts caused,
    /// and of names that were added or dropped.
    pub(super) fn take_debt(&mut self) -> u64 {
        std::mem::take(&mut self.debt)
    }

    /// Returns the virtual hosts that changes assigned to subscribed authorities since the last call.
    pub(super) fn take_found(&mut self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.found)
    }

    /// Returns the responses that can be sent now, in the order of the types.
    pub(super) fn pushes(&mut self, snapshot: &Snapshot) -> Result<Vec<Push>, TooFarBehind> {
        let mut pushes = Vec::new();
        if self.compared.replace(snapshot.generation()) == Some(snapshot.generation()) {
            return Ok(pushes);
        }
        self.waits = true;
        for kind in Kind::ALL {
            if matches!(kind, Kind::Listener | Kind::Route | Kind::VirtualHost) && self.holds(snapshot) {
                continue;
            }
            let late = matches!(kind, Kind::Cluster | Kind::Endpoint);
            if !self.push(kind, snapshot, !late, &mut pushes)? {
                // Later types may refer to a resource that cannot be sent yet.
                return Ok(pushes);
            }
        }
        let listeners_are_settled = self.subscriptions[Kind::Listener as usize].in_flight.is_none();
        if !self.is_holding() && listeners_are_settled {
            self.waits = false;
            for kind in [Kind::Cluster, Kind::Endpoint] {
                self.waits |= !self.push(kind, snapshot, true, &mut pushes)?;
            }
        }
        Ok(pushes)
    }

    /// Adds the response of a type if one is due. Returns false if it is due but must wait for an ACK.
    fn push(
        &mut self,
        kind: Kind,
        snapshot: &Snapshot,
        removals: bool,
        pushes: &mut Vec<Push>,
    ) -> Result<bool, TooFarBehind> {
        let subscription = &mut self.subscriptions[kind as usize];
        if !subscription.open {
            return Ok(true);
        }
        // Changes are looked through once, when they can be sent.
        if subscription.in_flight.is_some() && !subscription.is_settled(snapshot, removals) {
            return Ok(false);
        }
        if kind == Kind::VirtualHost && snapshot.has_changed_aliases(kind, subscription.seen) {
            let found = subscription.resolve_again(snapshot);
            if !subscription.matches_unlisted() {
                self.found.extend(found);
            }
            subscription.update_interest(&self.interest);
            let lookups = std::mem::take(&mut subscription.lookups);
            let scanned = std::mem::take(&mut subscription.scanned);
            self.debt += limits::LOOKUP_COST * lookups as u64 + limits::HELD_NAME_COST * scanned as u64;
        }
        if subscription.is_settled(snapshot, removals) {
            subscription.mark_sent(snapshot, removals);
            return Ok(true);
        }
        let (response, removals) = match self.form {
            Form::Delta => delta::response(subscription, snapshot, removals)?,
            Form::Sotw => (sotw::response(subscription, snapshot, removals), removals),
        };
        match response {
            Some(response) => pushes.push(self.respond(kind, response, snapshot, removals)),
            None => subscription.mark_sent(snapshot, removals),
        }
        Ok(true)
    }

    /// Numbers a response and marks its content as in flight.
    fn respond(&mut self, kind: Kind, response: Response, snapshot: &Snapshot, removals: bool) -> Push {
        let Response { changed, removed, whole } = response;
        let subscription = &mut self.subscriptions[kind as usize];
        self.nonce += 1;
        let mut new = Vec::new();
        if kind == Kind::Cluster {
            let names = changed.iter().map(|resource| &resource.name);
            new.extend(names.filter(|name| subscription.is_new(snapshot, name)).cloned());
            self.holding.extend(new.iter().cloned());
            self.held = None;
        }
        let has_all = subscription.wildcard;
        // A whole response shows by itself what is gone.
        subscription.mark_sent(snapshot, removals || whole);
        subscription.begin_response(self.nonce, snapshot.generation());
        let is_referred_to = matches!(kind, Kind::Cluster | Kind::Route);
        let names = changed.iter().filter(|_| is_referred_to).map(|resource| Arc::clone(&resource.name));
        let names: Vec<_> = names.collect();
        let mut resources = if whole { subscription.matching(snapshot) } else { changed };
        let shared = snapshot.take_shared(kind, self.form, &mut resources);
        match kind {
            Kind::Cluster => {
                let is_initialized = self.subscriptions[Kind::Listener as usize].open;
                let endpoints = &mut self.subscriptions[Kind::Endpoint as usize];
                if self.is_envoy && self.form == Form::Delta && has_all && is_initialized && endpoints.open {
                    let added = delta::add_endpoints(endpoints, &new, snapshot);
                    self.debt += limits::RESOURCE_COST * added as u64;
                    endpoints.update_interest(&self.interest);
                }
                match self.form {
                    Form::Delta => delta::resend_endpoints(endpoints, &names),
                    Form::Sotw => sotw::resend_endpoints(endpoints, &names),
                }
            }
            Kind::Route => {
                hosts::resend_hosts(&mut self.subscriptions[Kind::VirtualHost as usize], &names, snapshot);
            }
            _ => {}
        }
        Push { form: self.form, kind, number: self.nonce, resources, shared, removed }
    }

    /// Returns true while the endpoints of new clusters are not sent.
    fn holds(&mut self, snapshot: &Snapshot) -> bool {
        let endpoints = &self.subscriptions[Kind::Endpoint as usize];
        if self.held.replace(snapshot.generation()) != Some(snapshot.generation()) {
            // A cluster of another discovery type has no endpoint resource of its name.
            let exists = |name: &Arc<str>| {
                [Kind::Cluster, Kind::Endpoint].iter().all(|kind| snapshot.get(*kind, name).is_some())
            };
            self.holding.retain(exists);
        }
        self.holding.retain(|name| !endpoints.is_sent(name));
        if self.holding.is_empty() {
            // Frees the memory: the list may have held all clusters of a mesh.
            self.holding = Vec::new();
        }
        self.is_holding()
    }
}

#[cfg(test)]
mod tests;
