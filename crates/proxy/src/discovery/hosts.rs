//! Route configurations whose virtual hosts come one by one (VHDS): which there are, which are in force, and which requests
//! ask for.
//!
//! Each host waits for the clusters it leads to by itself. A name that a request asks for is *open* until the server has
//! answered and the host that came is in force; then it is found in the table, or is *settled*: the table's wildcards and its
//! catch-all apply. Open names are given up after [`ANSWER`]: requests wait for them no more and are refused, while the
//! server is still asked, whose answer settles them.

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
    slot::{Kept, PATIENCE, Slot},
    uses,
};
use crate::translate::{self, Translator};
use skysail_http::map::Map;
use skysail_policy::config::{RouteTable, route::VirtualHost};
use skysail_policy::state::{
    Published,
    demand::{Demand, Question, RequestedAuthority, UseMark},
};

/// `envoy.config.route.v3.RouteConfiguration.virtual_hosts`
const VIRTUAL_HOSTS: u32 = 2;
/// How long requests wait for the virtual host they ask for.
pub(crate) const ANSWER: Duration = Duration::from_secs(5);
/// So many names that no virtual host in hand has are asked for of each table.
const MOST_NAMES: usize = 1_000;
/// A name without requests is let go of after so long.
pub(crate) const IDLE: Duration = Duration::from_secs(3600);

/// A virtual host and what it is looked up by.
pub(crate) struct RequestedHost {
    value: Arc<VirtualHost>,
    domains: Vec<String>,
}

/// The hosts of one route configuration.
#[derive(Default)]
pub(crate) struct Hosts {
    /// Some have come, or the news that there are none.
    pub(super) answered: bool,
    pub(crate) slots: BTreeMap<Arc<str>, Slot<RequestedHost>>,
    /// When each was last seen in use.
    used: HashMap<Arc<str>, Instant>,
    /// Authorities that no host has by its full name.
    names: BTreeMap<Box<str>, Name>,
    /// Those that are not asked for again, as workers see them.
    demand: Option<Arc<Demand>>,
    /// What is in force, and the configuration it was made from.
    whole: Option<(Arc<RouteTable>, Arc<RouteTable>)>,
}

/// An authority that was asked for.
struct Name {
    /// Since when it is open; then, when it was last seen in use.
    since: Instant,
    /// The server has answered.
    answered: bool,
    state: HostState,
    used: Arc<UseMark>,
    waiting: Vec<oneshot::Sender<()>>,
}

/// How far it is known which virtual host an authority belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostState {
    /// Requests wait.
    Open,
    /// There was no answer in time.
    GivenUp,
    /// No virtual host has it by its full name.
    Settled,
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
    /// What is to be asked for by name.
    pub(super) fn wanted<'a>(&'a self, table: &'a str) -> impl Iterator<Item = String> + 'a {
        let names = self.names.keys().map(move |name| format!("{table}/{name}"));
        let hosts = self.slots.keys().map(|name| name.to_string());
        hosts.chain(names).chain(std::iter::once(format!("{table}/*")))
    }

    /// The clusters that hosts lead to.
    pub(super) fn clusters(&self) -> impl Iterator<Item = &str> {
        self.slots.values().flat_map(Slot::both).flat_map(|kept| uses::of_host(&kept.value.value))
    }

    /// The same of those in force.
    pub(super) fn clusters_in_force(&self) -> impl Iterator<Item = &str> {
        let active = self.slots.values().filter_map(|slot| slot.active.as_ref());
        active.flat_map(|kept| uses::of_host(&kept.value.value))
    }

    /// Takes hosts. Those that are wrong by themselves are refused alone, and all of them where they are wrong together.
    /// `configuration` is what they are part of.
    pub(super) fn take(
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
            if slot.newest().is_some_and(|kept| kept.body == received.body) {
                // Nothing is made of it.
                let _ = slot.offer(&received.body, &received.version, false, || {
                    Err(translate::Reject::new("has changed meanwhile"))
                });
                continue;
            }
            match translated(translator, configuration, &received.body) {
                Ok(host) => made.push((*received, host)),
                Err(reject) => {
                    let reason = reject.to_string();
                    slot.refuse(&received.body, &received.version, &reason);
                    rejections.push(Rejection { name: received.name.clone(), reason });
                }
            }
        }
        let twice = self.twice(&made);
        for (received, host) in made {
            let Some(slot) = self.slots.get_mut(received.name.as_str()) else { continue };
            match &twice {
                Some(reason) => {
                    slot.refuse(&received.body, &received.version, reason);
                    rejections.push(Rejection { name: received.name.clone(), reason: reason.clone() });
                }
                None => {
                    let _ = slot.offer(&received.body, &received.version, false, || Ok(host));
                    self.used.insert(received.name.as_str().into(), Instant::now());
                }
            }
        }
        rejections
    }

    /// Makes hosts anew whose configuration has changed, as some of what that says holds for them.
    pub(super) fn retake(&mut self, translator: Translator<'_>, configuration: &[u8]) {
        for slot in self.slots.values_mut() {
            for kept in slot.active.iter_mut().chain(&mut slot.warming) {
                if let Ok(host) = translated(translator, configuration, &kept.body) {
                    kept.value = Arc::new(host);
                }
            }
        }
        self.whole = None;
    }

    /// Which domain two hosts would have.
    fn twice(&self, made: &[(&Received, RequestedHost)]) -> Option<String> {
        let anew: BTreeSet<&str> = made.iter().map(|(received, _)| received.name.as_str()).collect();
        let kept = self.slots.iter().filter(|(name, _)| !anew.contains(&***name));
        let kept = kept.filter_map(|(_, slot)| slot.newest()).map(|kept| &*kept.value);
        let mut seen = BTreeSet::new();
        let mut domains = kept.chain(made.iter().map(|(_, host)| host)).flat_map(|host| &host.domains);
        let twice = domains.find(|domain| !seen.insert(domain.as_str()))?;
        Some(format!("{twice:?} is in two virtual hosts or twice in one"))
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
            self.whole = None;
        }
    }

    /// Puts hosts into force whose clusters are.
    pub(super) fn settle(&mut self, now: Instant, is_awaited: impl Fn(&str) -> bool) {
        for slot in self.slots.values_mut() {
            if slot.promote(now, |kept| !uses::of_host(&kept.value.value).any(&is_awaited)) {
                self.whole = None;
            }
        }
    }

    /// Whether none is still to come into force for the first time.
    pub(super) fn is_warm(&self, now: Instant) -> bool {
        self.answered && !self.slots.values().any(|slot| slot.is_awaited(now))
    }

    /// The table in force, if it is another than before.
    pub(super) fn assemble(&mut self, base: &Arc<RouteTable>) -> bool {
        if self.whole.as_ref().is_some_and(|(before, _)| Arc::ptr_eq(before, base)) {
            return false;
        }
        let mut table = RouteTable { demand: self.demand.clone(), ..RouteTable::clone(base) };
        // Where a domain goes from one host to another it is that of the one that is as it is to be.
        for settled in [false, true] {
            let slots = self.slots.values().filter(|slot| slot.warming.is_none() == settled);
            for kept in slots.filter_map(|slot| slot.active.as_ref()) {
                for domain in &kept.value.domains {
                    table.put(domain, table.hosts.len());
                }
                table.hosts.push(Arc::clone(&kept.value.value));
            }
        }
        self.whole = Some((Arc::clone(base), Arc::new(table)));
        true
    }

    /// The table in force.
    pub(super) fn whole(&self) -> Option<&Arc<RouteTable>> {
        self.whole.as_ref().map(|(_, whole)| whole)
    }

    /// The bodies of the hosts in force.
    pub(crate) fn bodies(&self) -> impl Iterator<Item = &Bytes> {
        self.slots.values().filter_map(|slot| slot.active.as_ref()).map(|kept| &kept.body)
    }

    /// Lets requests ask for hosts, or not.
    pub(super) fn set_demand(
        &mut self,
        table: &Arc<str>,
        questions: Option<&mpsc::UnboundedSender<Question>>,
    ) {
        if self.demand.is_some() != questions.is_some() {
            self.demand = questions.cloned().map(|questions| {
                Arc::new(Demand { table: Arc::clone(table), known: Published::default(), questions })
            });
            self.names.clear();
            self.whole = None;
        }
    }

    /// Takes a request's question; false if there are too many already. Names that the server has answered about make room
    /// for others only while it is `connected`: else the new one would get no answer, and the old one could not be asked again.
    pub(super) fn ask(&mut self, question: Question, now: Instant, connected: bool) -> bool {
        let Question { authority, answered, .. } = question;
        let found = self.whole().is_some_and(|table| table.exact.contains_key(&authority));
        if self.demand.is_none() || found {
            let _ = answered.send(());
            return true;
        }
        if self.names.len() >= MOST_NAMES && !self.names.contains_key(&authority) {
            self.names.retain(|_, name| name.state != HostState::GivenUp);
            if self.names.len() >= MOST_NAMES && connected {
                let stays = |name: &Name| name.state == HostState::Open || name.used.take();
                self.names.retain(|_, name| stays(name));
            }
            if self.names.len() >= MOST_NAMES {
                let _ = answered.send(());
                return false;
            }
        }
        let new = || Name {
            since: now,
            answered: false,
            state: HostState::Open,
            used: Arc::default(),
            waiting: Vec::new(),
        };
        let name = self.names.entry(authority).or_insert_with(new);
        if name.state != HostState::Open {
            let _ = answered.send(());
            return true;
        }
        // Clients that are gone wait no more.
        if name.waiting.len() == name.waiting.capacity() {
            name.waiting.retain(|waiting| !waiting.is_closed());
        }
        name.waiting.push(answered);
        true
    }

    /// Those whose question is answered by the table in force, which workers have.
    pub(super) fn answer(&mut self, now: Instant) -> Vec<oneshot::Sender<()>> {
        let Some(demand) = &self.demand else { return Vec::new() };
        let mut answered = Vec::new();
        let coming = self.slots.values().filter(|slot| slot.active.is_none());
        let coming: Vec<&Kept<RequestedHost>> = coming.filter_map(|slot| slot.warming.as_ref()).collect();
        let whole = self.whole.as_ref().map(|(_, whole)| whole);
        self.names.retain(|authority, name| {
            if whole.is_some_and(|table| table.exact.contains_key(authority)) {
                answered.append(&mut name.waiting);
                return false;
            }
            let comes = coming.iter().any(|kept| kept.value.has(authority));
            name.state = match name.state {
                _ if name.answered && !comes => HostState::Settled,
                // The mesh has it from now on.
                HostState::Settled => {
                    name.since = now;
                    HostState::Open
                }
                HostState::Open if now.duration_since(name.since) >= ANSWER => HostState::GivenUp,
                state => state,
            };
            if name.state != HostState::Open {
                answered.append(&mut name.waiting);
            }
            true
        });
        let known = self.names.iter().filter(|(_, name)| name.state != HostState::Open);
        let known: Map<_, _> = known
            .map(|(authority, name)| {
                let answered = name.state == HostState::Settled;
                (authority.clone(), RequestedAuthority { used: Arc::clone(&name.used), answered })
            })
            .collect();
        let before = demand.known.load();
        let is_new = known.len() != before.len()
            || known
                .iter()
                .any(|(name, known)| before.get(name).is_none_or(|before| before.answered != known.answered));
        if is_new {
            demand.known.store(Arc::new(known));
        }
        answered
    }

    /// When patience with the first of those that wait is at its end.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        let hosts = super::slot::waiting(&self.slots, now).map(|since| since + PATIENCE);
        let open =
            self.names.values().filter(|name| name.state == HostState::Open).map(|name| name.since + ANSWER);
        hosts.chain(open).min()
    }

    /// Lets go of what no request has used for long.
    pub(super) fn drop_idle(&mut self, now: Instant) {
        if self.demand.is_none() {
            return;
        }
        let mut idle = Vec::new();
        for (name, slot) in &self.slots {
            let in_use = slot.both().any(|kept| kept.value.value.used.take());
            let since = self.used.entry(Arc::clone(name)).or_insert(now);
            if in_use {
                *since = now;
            } else if now.duration_since(*since) >= IDLE {
                idle.push(Arc::clone(name));
            }
        }
        for name in idle {
            self.slots.remove(&name);
            self.used.remove(&name);
            self.whole = None;
        }
        self.names.retain(|_, name| {
            if name.used.take() {
                name.since = now;
            }
            name.state == HostState::Open || now.duration_since(name.since) < IDLE
        });
    }

    /// What is asked for, for people: names of hosts, and authorities by their state.
    pub(crate) fn shown(&self) -> serde_json::Value {
        let hosts: Vec<&str> = self.slots.keys().map(|name| &**name).collect();
        let of = |state| -> Vec<&str> {
            self.names.iter().filter(|(_, name)| name.state == state).map(|(name, _)| &**name).collect()
        };
        serde_json::json!({
            "hosts": hosts,
            "asked": of(HostState::Open),
            "unanswered": of(HostState::GivenUp),
            "absent": of(HostState::Settled),
        })
    }
}

/// A host as part of its configuration.
fn translated(
    translator: Translator<'_>,
    configuration: &[u8],
    host: &Bytes,
) -> translate::Result<RequestedHost> {
    let mut table = translator.routes(&compose(configuration, std::iter::once(host)))?;
    let value = table.hosts.pop().ok_or_else(|| translate::Reject::new("is no virtual host"))?;
    Ok(RequestedHost { value, domains: translate::domains(host)? })
}

/// A route configuration with these virtual hosts as well: messages are put together by putting their bytes together.
pub(crate) fn compose<'a>(configuration: &[u8], hosts: impl Iterator<Item = &'a Bytes>) -> Bytes {
    let mut body = BytesMut::from(configuration);
    for host in hosts {
        encode_key(VIRTUAL_HOSTS, WireType::LengthDelimited, &mut body);
        encode_varint(host.len() as u64, &mut body);
        body.put_slice(host);
    }
    body.freeze()
}
