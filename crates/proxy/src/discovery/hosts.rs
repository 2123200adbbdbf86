//! Virtual hosts of route configurations that use VHDS: bookkeeping of the hosts received, the hosts in effect
//! and the authorities that requests ask for.
//!
//! Each virtual host waits only for the clusters that it leads to. An authority that a request asks for is
//! *pending* until the server has answered and the virtual host that it sent is in effect. Then the authority is
//! found in the table, or it *falls back* to the table's wildcards and catch-all. A pending authority *times
//! out* after [`ANSWER_TIMEOUT`]: requests for it no longer wait and are refused. It stays subscribed, and a
//! late answer resolves it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::encoding::{WireType, encode_key, encode_varint};
use skysail_xds::client::{Received, Rejection};
use tokio::sync::{mpsc, oneshot};

use super::{
    slot::{AcceptedResource, Slot, WARMING_TIMEOUT},
    uses,
    warming::WarmingNeed,
};
use crate::translate::{self, Translator};
use skysail_http::map::Map;
use skysail_policy::config::{RouteTable, route::VirtualHost};
use skysail_policy::state::{
    Published,
    demand::{Demand, HostRequest, RequestedAuthority, UseMark},
};

/// Field number of `envoy.config.route.v3.RouteConfiguration.virtual_hosts`.
const VIRTUAL_HOSTS: u32 = 2;
/// Maximum time that a request waits for the virtual host it asks for.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of authorities per table that are subscribed to without a virtual host of that name.
const MAX_NAMES: usize = 1_000;
/// Time without requests after which a subscription to a name ends.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);

/// A virtual host with the domains that select it.
pub(crate) struct RequestedHost {
    value: Arc<VirtualHost>,
    domains: Vec<String>,
}

/// Virtual hosts of one route configuration.
#[derive(Default)]
pub(crate) struct Hosts {
    /// The server has sent virtual hosts, or has answered that there are none.
    pub(super) answered: bool,
    pub(crate) slots: BTreeMap<Arc<str>, Slot<RequestedHost>>,
    /// Time when each virtual host was last seen in use.
    used: HashMap<Arc<str>, Instant>,
    /// Requested authorities that are no exact domain of any virtual host.
    names: BTreeMap<Box<str>, Name>,
    /// Authorities with a final answer, as the workers see them.
    demand: Option<Arc<Demand>>,
    /// The base table and the table in effect that was merged from it.
    merged: Option<(Arc<RouteTable>, Arc<RouteTable>)>,
}

/// State of a requested authority.
struct Name {
    /// Time when the authority became pending; afterwards, when it was last seen in use.
    since: Instant,
    /// The server has answered.
    answered: bool,
    state: HostState,
    used: Arc<UseMark>,
    waiting: Vec<oneshot::Sender<()>>,
}

/// Progress of finding the virtual host of an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostState {
    /// Requests wait.
    Pending,
    /// No answer arrived in time.
    TimedOut,
    /// No virtual host has the authority as an exact domain.
    Fallback,
}

impl RequestedHost {
    fn has(&self, authority: &str) -> bool {
        self.domains.iter().any(|domain| match domain.strip_prefix('*') {
            Some(suffix) => !suffix.is_empty() && authority.ends_with(suffix),
            None => domain == authority,
        })
    }
}

impl Hosts {
    /// Returns the names to subscribe to.
    pub(super) fn wanted<'a>(&'a self, table: &'a str) -> impl Iterator<Item = String> + 'a {
        let names = self.names.keys().map(move |name| format!("{table}/{name}"));
        let hosts = self.slots.keys().map(|name| name.to_string());
        hosts.chain(names).chain(std::iter::once(format!("{table}/*")))
    }

    /// Returns the clusters that virtual hosts lead to, in effect or warming.
    pub(super) fn clusters(&self) -> impl Iterator<Item = &str> {
        self.slots.values().flat_map(Slot::both).flat_map(|accepted| uses::of_host(&accepted.value.value))
    }

    /// Returns the clusters that virtual hosts in effect lead to.
    pub(super) fn clusters_in_force(&self) -> impl Iterator<Item = &str> {
        let active = self.slots.values().filter_map(|slot| slot.active.as_ref());
        active.flat_map(|accepted| uses::of_host(&accepted.value.value))
    }

    /// Applies an update of virtual hosts of the route configuration `configuration`. A host that is invalid by
    /// itself is rejected alone; if a domain occurs duplicate, all hosts of the update are rejected.
    pub(super) fn apply(
        &mut self,
        translator: Translator<'_>,
        configuration: &[u8],
        added: &[&Received],
        removed: &[&str],
    ) -> Vec<Rejection> {
        for name in removed {
            self.remove(name);
        }
        self.answered |= self.demand.is_none();
        let (mut made, mut rejections) = (Vec::new(), Vec::new());
        for received in added {
            let slot = self.slots.entry(received.name.as_str().into()).or_default();
            if slot.newest().is_some_and(|accepted| accepted.body == received.body) {
                // The body is unchanged, so `accept` does not call this.
                let _ = slot.accept(&received.body, &received.version, false, || {
                    Err(translate::Reject::new("has changed meanwhile"))
                });
                continue;
            }
            match translated(translator, configuration, &received.body) {
                Ok(host) => made.push((*received, host)),
                Err(reject) => {
                    let reason = reject.to_string();
                    slot.reject(&received.body, &received.version, &reason);
                    rejections.push(Rejection { name: received.name.clone(), reason });
                }
            }
        }
        let duplicate = self.duplicate(&made);
        for (received, host) in made {
            let Some(slot) = self.slots.get_mut(received.name.as_str()) else { continue };
            match &duplicate {
                Some(reason) => {
                    slot.reject(&received.body, &received.version, reason);
                    rejections.push(Rejection { name: received.name.clone(), reason: reason.clone() });
                }
                None => {
                    let _ = slot.accept(&received.body, &received.version, false, || Ok(host));
                    self.used.insert(received.name.as_str().into(), Instant::now());
                }
            }
        }
        rejections
    }

    /// Translates all hosts again after `configuration` has changed, because some of its settings apply to
    /// them.
    pub(super) fn retranslate(&mut self, translator: Translator<'_>, configuration: &[u8]) {
        for slot in self.slots.values_mut() {
            for accepted in slot.active.iter_mut().chain(&mut slot.warming) {
                if let Ok(host) = translated(translator, configuration, &accepted.body) {
                    accepted.value = Arc::new(host);
                }
            }
        }
        self.merged = None;
    }

    /// Returns an error if two virtual hosts would have the same domain.
    fn duplicate(&self, made: &[(&Received, RequestedHost)]) -> Option<String> {
        let updated: BTreeSet<&str> = made.iter().map(|(received, _)| received.name.as_str()).collect();
        let accepted = self.slots.iter().filter(|(name, _)| !updated.contains(&***name));
        let accepted = accepted.filter_map(|(_, slot)| slot.newest()).map(|accepted| &*accepted.value);
        let mut seen = BTreeSet::new();
        let mut domains = accepted.chain(made.iter().map(|(_, host)| host)).flat_map(|host| &host.domains);
        let duplicate = domains.find(|domain| !seen.insert(domain.as_str()))?;
        Some(format!("{duplicate:?} is in two virtual hosts or twice in one"))
    }

    fn remove(&mut self, name: &str) {
        match name.rsplit_once('/') {
            Some((_, "*")) => self.answered = true,
            Some((_, authority)) => {
                if let Some(name) = self.names.get_mut(authority) {
                    name.answered = true;
                }
            }
            None => {}
        }
        if self.slots.remove(name).is_some() {
            self.used.remove(name);
            self.merged = None;
        }
    }

    /// Promotes virtual hosts whose clusters are in effect.
    pub(super) fn settle(&mut self, now: Instant, is_awaited: impl Fn(&str) -> bool) {
        for (name, slot) in &mut self.slots {
            let awaits = |host: &VirtualHost| WarmingNeed::new(!uses::of_host(host).any(&is_awaited), true);
            if slot.promote(name, now, |accepted| awaits(&accepted.value.value)) {
                self.merged = None;
            }
        }
    }

    /// Returns whether no virtual host still waits for its first version to come into effect.
    pub(super) fn is_warm(&self, now: Instant) -> bool {
        self.answered && !self.slots.values().any(|slot| slot.is_awaited(now))
    }

    /// Merges the hosts in effect into `base`; returns whether the table in effect has changed.
    pub(super) fn assemble(&mut self, base: &Arc<RouteTable>) -> bool {
        if self.merged.as_ref().is_some_and(|(before, _)| Arc::ptr_eq(before, base)) {
            return false;
        }
        let mut table = RouteTable { demand: self.demand.clone(), ..RouteTable::clone(base) };
        // While a domain moves between hosts, both contain it. The host that is not about to be replaced is
        // inserted last and wins.
        for settled in [false, true] {
            let slots = self.slots.values().filter(|slot| slot.warming.is_none() == settled);
            for accepted in slots.filter_map(|slot| slot.active.as_ref()) {
                for domain in &accepted.value.domains {
                    table.put(domain, table.hosts.len());
                }
                table.hosts.push(Arc::clone(&accepted.value.value));
            }
        }
        self.merged = Some((Arc::clone(base), Arc::new(table)));
        true
    }

    /// Returns the merged table in effect.
    pub(super) fn merged(&self) -> Option<&Arc<RouteTable>> {
        self.merged.as_ref().map(|(_, merged)| merged)
    }

    /// Returns the bodies of the hosts in effect.
    pub(crate) fn bodies(&self) -> impl Iterator<Item = &Bytes> {
        self.slots.values().filter_map(|slot| slot.active.as_ref()).map(|accepted| &accepted.body)
    }

    /// Enables or disables on-demand requests for virtual hosts.
    pub(super) fn set_demand(
        &mut self,
        table: &Arc<str>,
        host_requests: Option<&mpsc::UnboundedSender<HostRequest>>,
    ) {
        if self.demand.is_some() != host_requests.is_some() {
            self.demand = host_requests.cloned().map(|host_requests| {
                Arc::new(Demand { table: Arc::clone(table), known: Published::default(), host_requests })
            });
            self.names.clear();
            self.merged = None;
        }
    }

    /// Records a request; returns false if the table has too many names. Answered names make room
    /// only while `connected`: otherwise the new name would get no answer, and the old one could not be
    /// requested again.
    pub(super) fn request(&mut self, host_request: HostRequest, now: Instant, connected: bool) -> bool {
        let HostRequest { authority, done, .. } = host_request;
        let found = self.merged().is_some_and(|table| table.exact.contains_key(&authority));
        if self.demand.is_none() || found {
            let _ = done.send(());
            return true;
        }
        if self.names.len() >= MAX_NAMES && !self.names.contains_key(&authority) {
            self.names.retain(|_, name| name.state != HostState::TimedOut);
            if self.names.len() >= MAX_NAMES && connected {
                let stays = |name: &Name| name.state == HostState::Pending || name.used.take();
                self.names.retain(|_, name| stays(name));
            }
            if self.names.len() >= MAX_NAMES {
                let _ = done.send(());
                return false;
            }
        }
        let new = || Name {
            since: now,
            answered: false,
            state: HostState::Pending,
            used: Arc::default(),
            waiting: Vec::new(),
        };
        let name = self.names.entry(authority).or_insert_with(new);
        if name.state != HostState::Pending {
            let _ = done.send(());
            return true;
        }
        // Removes clients that have disconnected.
        if name.waiting.len() == name.waiting.capacity() {
            name.waiting.retain(|waiting| !waiting.is_closed());
        }
        name.waiting.push(done);
        true
    }

    /// Returns the waiting requests that the table in effect answers. Call it after the workers have that table.
    /// `missing` returns the secrets for which a virtual host waits.
    pub(super) fn answer(
        &mut self,
        now: Instant,
        missing: &dyn Fn(&VirtualHost) -> Option<Box<str>>,
    ) -> Vec<oneshot::Sender<()>> {
        let Some(demand) = &self.demand else { return Vec::new() };
        let mut answered = Vec::new();
        let coming = self.slots.values().filter(|slot| slot.active.is_none());
        let coming: Vec<&AcceptedResource<RequestedHost>> =
            coming.filter_map(|slot| slot.warming.as_ref()).collect();
        let merged = self.merged.as_ref().map(|(_, merged)| merged);
        self.names.retain(|authority, name| {
            if merged.is_some_and(|table| table.exact.contains_key(authority)) {
                answered.append(&mut name.waiting);
                return false;
            }
            let comes = coming.iter().any(|accepted| accepted.value.has(authority));
            name.state = match name.state {
                _ if name.answered && !comes => HostState::Fallback,
                // The authority exists now.
                HostState::Fallback => {
                    name.since = now;
                    HostState::Pending
                }
                HostState::Pending if now.duration_since(name.since) >= ANSWER_TIMEOUT => HostState::TimedOut,
                state => state,
            };
            if name.state != HostState::Pending {
                answered.append(&mut name.waiting);
            }
            true
        });
        let known = self.names.iter().filter(|(_, name)| name.state != HostState::Pending);
        let known: Map<_, _> = known
            .map(|(authority, name)| {
                let answered = name.state == HostState::Fallback;
                let host = coming.iter().find(|accepted| accepted.value.has(authority));
                let missing_secrets = host.and_then(|accepted| missing(&accepted.value.value));
                let used = Arc::clone(&name.used);
                (authority.clone(), RequestedAuthority { used, answered, missing_secrets })
            })
            .collect();
        let before = demand.known.load();
        let is_new = known.len() != before.len()
            || known.iter().any(|(name, known)| {
                before.get(name).is_none_or(|before| {
                    before.answered != known.answered || before.missing_secrets != known.missing_secrets
                })
            });
        if is_new {
            demand.known.store(Arc::new(known));
        }
        answered
    }

    /// Returns the earliest time at which a wait times out.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        let hosts = super::slot::waiting(&self.slots, now).map(|since| since + WARMING_TIMEOUT);
        let open = self
            .names
            .values()
            .filter(|name| name.state == HostState::Pending)
            .map(|name| name.since + ANSWER_TIMEOUT);
        hosts.chain(open).min()
    }

    /// Drops names and virtual hosts that no request has used for [`IDLE_TIMEOUT`].
    pub(super) fn drop_idle(&mut self, now: Instant) {
        if self.demand.is_none() {
            return;
        }
        let mut idle = Vec::new();
        for (name, slot) in &self.slots {
            let in_use = slot.both().any(|accepted| accepted.value.value.used.take());
            let since = self.used.entry(Arc::clone(name)).or_insert(now);
            if in_use {
                *since = now;
            } else if now.duration_since(*since) >= IDLE_TIMEOUT {
                idle.push(Arc::clone(name));
            }
        }
        for name in idle {
            self.slots.remove(&name);
            self.used.remove(&name);
            self.merged = None;
        }
        self.names.retain(|_, name| {
            if name.used.take() {
                name.since = now;
            }
            name.state == HostState::Pending || now.duration_since(name.since) < IDLE_TIMEOUT
        });
    }

    /// Returns the subscribed names for the admin page: virtual hosts, and authorities by state.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let hosts: Vec<&str> = self.slots.keys().map(|name| &**name).collect();
        let of = |state| -> Vec<&str> {
            self.names.iter().filter(|(_, name)| name.state == state).map(|(name, _)| &**name).collect()
        };
        serde_json::json!({
            "hosts": hosts,
            "requested": of(HostState::Pending),
            "unanswered": of(HostState::TimedOut),
            "absent": of(HostState::Fallback),
        })
    }
}

/// Translates a virtual host as part of its route configuration.
fn translated(
    translator: Translator<'_>,
    configuration: &[u8],
    host: &Bytes,
) -> translate::Result<RequestedHost> {
    let mut table = translator.routes(&compose(configuration, std::iter::once(host)))?;
    let value = table.hosts.pop().ok_or_else(|| translate::Reject::new("is not a virtual host"))?;
    Ok(RequestedHost { value, domains: translate::domains(host)? })
}

/// Returns a route configuration with these virtual hosts appended. Concatenating encoded protos merges them.
pub(crate) fn compose<'a>(configuration: &[u8], hosts: impl Iterator<Item = &'a Bytes>) -> Bytes {
    let mut body = BytesMut::from(configuration);
    for host in hosts {
        encode_key(VIRTUAL_HOSTS, WireType::LengthDelimited, &mut body);
        encode_varint(host.len() as u64, &mut body);
        body.put_slice(host);
    }
    body.freeze()
}
