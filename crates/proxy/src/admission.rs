//! What is open when the configuration changes: would it be admitted again?
//!
//! A policy, a filter chain or a trusted root that changes concerns connections, tunnels and requests that were admitted
//! before. Each configuration that may judge otherwise begins an *epoch* on each worker ([`Worker::epoch`]). The tasks of all
//! connections are then woken, a few at a time ([`wake`]), and whoever is woken in a new epoch judges itself by the
//! configuration of now ([`Admission`]). What would not be admitted may go on for a drain time
//! (`skysail.admission.drain_ms`), and is then closed, counted and logged with the reason ([`Refusal`]).
//!
//! Between changes this costs a comparison whenever something open is polled.

use std::{fmt, net::IpAddr, rc::Rc, task::Waker, time::Instant};

use serde_json::{Map, Value};
use tokio::task::yield_now;

use crate::{
    config::{
        HttpManager,
        http::{Does, Routes},
        listener::Terminal,
        route::Setting,
    },
    context::Worker,
    downstream::Origin,
    head::RequestHead,
    matching,
    policy::{self, Subject, Tally, Verdict},
    pool::Link,
    route::{self, Found},
    upstream,
};

/// Connections woken in one turn: those of one turn may have to verify as many certificates, 0.1 ms each.
const AT_ONCE: usize = 16;

/// Under which name the HTTP filter leaves what its shadow rules say.
const RBAC: &str = "envoy.filters.http.rbac";

/// Why something that was admitted would not be admitted now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Its listener is gone.
    Listener,
    /// No filter chain takes it any more, or one of another kind.
    FilterChain,
    /// Its filter chain has another TLS context.
    TlsContext,
    /// It goes to a cluster to which its filter chain does not lead any more.
    Destination,
    /// No trusted root vouches for the client's certificate.
    Client,
    /// The client's certificate has run out.
    Expired,
    /// No trusted root vouches for the server's certificate.
    Server,
    /// External authorization, or what is asked of tokens, has another configuration: it would have to be asked again.
    Authentication,
    /// A policy denies it; the details name the rule.
    Denied(Box<str>),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Listener => "listener_removed",
            Self::FilterChain => "filter_chain_removed",
            Self::TlsContext => "tls_context_changed",
            Self::Destination => "destination_changed",
            Self::Client => "client_not_trusted",
            Self::Expired => "client_certificate_expired",
            Self::Server => "server_not_trusted",
            Self::Authentication => "authentication_changed",
            Self::Denied(details) => details,
        })
    }
}

/// Whether something open is admitted.
#[derive(Clone, Debug)]
pub(crate) struct Admission {
    /// When it was last judged.
    epoch: u32,
    /// Boxed, as it is seldom there.
    revoked: Option<Box<(Instant, Refusal)>>,
}

impl Admission {
    /// Of something that was admitted in this epoch.
    pub(crate) fn new(epoch: u32) -> Self {
        Self { epoch, revoked: None }
    }

    /// Until when it may go on; `None` if it is admitted. `judge` is called once in each epoch.
    #[inline]
    pub(crate) fn end(
        &mut self,
        worker: &Worker,
        judge: impl FnOnce() -> Result<(), Refusal>,
    ) -> Option<Instant> {
        if self.epoch != worker.epoch() {
            self.judge_again(worker, judge);
        }
        self.until()
    }

    /// Until when it may go on, as it was judged last; `None` if it is admitted.
    #[inline]
    pub(crate) fn until(&self) -> Option<Instant> {
        self.revoked.as_ref().map(|revoked| revoked.0)
    }

    #[cold]
    fn judge_again(&mut self, worker: &Worker, judge: impl FnOnce() -> Result<(), Refusal>) {
        match judge() {
            Ok(()) => *self = Self::new(worker.epoch()),
            Err(refusal) => self.refuse(worker, refusal),
        }
    }

    /// Records that the configuration in force refuses it. A refusal that lasts does not begin another drain time.
    pub(crate) fn refuse(&mut self, worker: &Worker, refusal: Refusal) {
        self.epoch = worker.epoch();
        let end = self.revoked.as_ref().map_or_else(|| worker.drain_end(), |revoked| revoked.0);
        self.revoked = Some(Box::new((end, refusal)));
    }

    /// Whether it is to be judged again.
    #[inline]
    pub(crate) fn is_due(&self, worker: &Worker) -> bool {
        self.epoch != worker.epoch()
    }

    /// Why it is to end, if it is.
    #[inline]
    pub(crate) fn refusal(&self) -> Option<&Refusal> {
        self.revoked.as_ref().map(|revoked| &revoked.1)
    }

    /// Why it has ended, if it has.
    pub(crate) fn ended(&self) -> Option<&Refusal> {
        let (end, refusal) = &**self.revoked.as_ref()?;
        (Instant::now() >= *end).then_some(refusal)
    }
}

/// Wakes all connections whenever an epoch begins.
pub(crate) async fn wake(worker: Rc<Worker>) {
    loop {
        worker.reconsider.notified().await;
        let wakers: Vec<Waker> = worker.sides().iter().flat_map(|side| side.wakers()).collect();
        for some in wakers.chunks(AT_ONCE) {
            some.iter().for_each(Waker::wake_by_ref);
            // They, and whatever else there is to do, come first.
            yield_now().await;
        }
    }
}

/// A request that was admitted, as its filters saw it.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) origin: &'a Origin,
    /// The settings by which it was admitted.
    pub(crate) manager: &'a HttpManager,
    /// The request as filters left it.
    pub(crate) head: &'a RequestHead,
    /// The route by which it was admitted.
    pub(crate) found: Option<&'a Found<'a>>,
    /// The connection that it goes to.
    pub(crate) link: Option<&'a Link>,
    /// The client, proxies in front taken into account.
    pub(crate) client: IpAddr,
    /// What filters found out, such as the claims of its token.
    pub(crate) metadata: Option<&'a Map<String, Value>>,
}

impl Case<'_> {
    /// Judges the request by the configuration of now: its connections, then its policies. What external authorization said,
    /// and its tokens, count as long as the filters for these, and what the route says to them, are the same, and nothing new is
    /// to be asked.
    pub(crate) fn judge(&self) -> Result<(), Refusal> {
        let Self { worker, origin, manager, head, found: before, link, client, metadata } = *self;
        let now = origin.judge(worker)?;
        let Terminal::Http(newest) = &now.terminal else { return Err(Refusal::FilterChain) };
        let snapshot = worker.snapshot();
        if link.is_some_and(|link| !upstream::is_trusted(link, snapshot.distrusted)) {
            return Err(Refusal::Server);
        }
        let table = match &newest.routes {
            Routes::Inline(table) => Some(table),
            Routes::Named(name) => snapshot.routes.get(name),
        };
        let found = table.and_then(|table| route::find(table, head, &mut worker.dice.borrow_mut()).ok());
        if !demands(newest, found.as_ref()).all(|now| demands(manager, before).any(|before| before == now)) {
            return Err(Refusal::Authentication);
        }
        let mut learned = metadata.cloned().unwrap_or_default();
        learned.remove(RBAC);
        for filter in &newest.filters {
            let setting = found.and_then(|found| found.route.setting(&filter.name));
            let policy = match (&filter.does, setting) {
                (_, Some(Setting::Off)) => continue,
                (_, None) if filter.disabled => continue,
                (Does::Authorize(_), Some(Setting::Authorize(policy))) | (Does::Authorize(policy), _) => {
                    policy
                }
                (Does::Ask(config), _) => {
                    let asks = |metadata| {
                        config
                            .enabled_metadata
                            .as_ref()
                            .is_some_and(|test| matching::metadata(test, metadata))
                    };
                    if asks(Some(&learned)) && !asks(metadata) {
                        return Err(Refusal::Authentication);
                    }
                    continue;
                }
                _ => continue,
            };
            let subject = Subject {
                head: Some(head),
                peer: &origin.peer,
                source: origin.direct,
                remote: client,
                destination: origin.destination,
                server_name: origin.server_name(),
                metadata: Some(&learned),
            };
            let mut tally = Tally::default();
            let verdict = policy::check(std::slice::from_ref(policy), &subject, &mut tally);
            if let Verdict::Deny { details, .. } = verdict {
                return Err(Refusal::Denied(details));
            }
            if !tally.found.is_empty() {
                learned.insert(RBAC.to_owned(), Map::from_iter(tally.found).into());
            }
        }
        Ok(())
    }
}

/// What a filter demands of a request that cannot be judged again: to be asked about, or to carry tokens.
#[derive(PartialEq)]
struct Demand<'a> {
    /// The fingerprint of the filter's configuration.
    config: u64,
    /// The requirement that the route names.
    requirement: Option<&'a str>,
    /// What the route adds to the question.
    extensions: &'a [(Box<str>, Box<str>)],
}

fn demands<'a>(manager: &'a HttpManager, found: Option<&'a Found<'a>>) -> impl Iterator<Item = Demand<'a>> {
    manager.filters.iter().filter_map(move |filter| {
        let config = match &filter.does {
            Does::Ask(config) => config.fingerprint,
            Does::Jwt(jwt) => jwt.fingerprint,
            _ => return None,
        };
        let mut demand = Demand { config, requirement: None, extensions: &[] };
        match found.and_then(|found| found.route.setting(&filter.name)) {
            Some(Setting::Off) => return None,
            None if filter.disabled => return None,
            Some(Setting::Jwt(name)) => demand.requirement = Some(name),
            Some(Setting::Question { extensions, .. }) => demand.extensions = extensions,
            _ => {}
        }
        Some(demand)
    })
}
