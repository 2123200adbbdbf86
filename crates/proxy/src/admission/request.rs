//! A request that was admitted: would the filters of the newest configuration admit it?
//!
//! Filters change what the filters after them see: external authorization adds fields, the JWT filter removes tokens. A policy
//! is therefore shown the head as it was at the policy's place among the filters. [`Visits`] keeps what this needs, and only
//! where a filter changes the head or cannot be asked again: a request without such filters costs nothing.

use std::{
    borrow::Cow,
    net::IpAddr,
    rc::Rc,
    slice,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value};

use super::Refusal;
use crate::{
    config::{
        RouteTable,
        http::{Does, Filter, Routes, metadata},
        jwt::Jwt,
        listener::Terminal,
        policy::Policy,
        route::Setting,
    },
    context::Worker,
    cors,
    downstream::Origin,
    head::RequestHead,
    jwt::{self, Outcome},
    matching,
    policy::{self, Subject, Tally, Verdict},
    pool::Link,
    route::{self, Found},
    upstream,
};

/// What the filters did with a request, as far as a later configuration has to know it.
#[derive(Default)]
pub(crate) struct Visits<'a> {
    /// The filters that changed the head or cannot be asked again, in the order in which they saw the request.
    filters: Vec<Visit<'a>>,
    /// The head before the route changed it; `None` where it is as the filters left it.
    routed: Option<Box<RequestHead>>,
    /// The state of the dice when the route was chosen: routes may be for a share of the requests.
    seed: u64,
}

/// What one filter did.
struct Visit<'a> {
    filter: &'a Filter,
    /// The route's setting for it.
    setting: Option<&'a Setting>,
    /// The head as the filter got it; `None` where the filter left it unchanged.
    head: Option<Box<RequestHead>>,
    /// The state of the dice when the route was chosen again because of this filter.
    seed: Option<u64>,
    /// Whether it did what it is configured for: external authorization may be for some requests only.
    acted: bool,
}

impl<'a> Visits<'a> {
    /// Records that a filter acts on the request now.
    pub(crate) fn begin(&mut self, filter: &'a Filter, setting: Option<&'a Setting>) {
        self.filters.push(Visit { filter, setting, head: None, seed: None, acted: true });
    }

    /// Records the head as the filter that acts got it, which is to change it.
    pub(crate) fn keep(&mut self, head: &RequestHead) {
        if let Some(visit) = self.filters.last_mut() {
            visit.head.get_or_insert_with(|| Box::new(head.copy()));
        }
    }

    /// Records that the filter that acts had nothing to do with this request.
    pub(crate) fn pass_over(&mut self) {
        if let Some(visit) = self.filters.last_mut() {
            visit.acted = false;
        }
    }

    /// Records the state of the dice with which a route is about to be chosen.
    pub(crate) fn route(&mut self, seed: u64) {
        match self.filters.last_mut() {
            Some(visit) => visit.seed = Some(seed),
            None => self.seed = seed,
        }
    }

    /// Records the head that the route is about to change.
    pub(crate) fn keep_routed(&mut self, head: &RequestHead) {
        self.routed = Some(Box::new(head.copy()));
    }

    /// Returns the head as it was before the filter at this place. `last` is the head as it is now.
    fn head<'h>(&'h self, place: usize, last: &'h RequestHead) -> &'h RequestHead {
        let mut kept = self.filters.get(place..).unwrap_or_default().iter();
        kept.find_map(|visit| visit.head.as_deref()).or(self.routed.as_deref()).unwrap_or(last)
    }
}

impl Drop for Visits<'_> {
    fn drop(&mut self) {
        let kept = self.filters.drain(..).filter_map(|visit| visit.head).chain(self.routed.take());
        kept.for_each(|head| head.recycle());
    }
}

impl Visit<'_> {
    /// Whether the filter, with this setting of the route, demands of a request and does to it what this one did.
    fn is_of(&self, filter: &Filter, setting: Option<&Setting>) -> bool {
        match (&self.filter.does, &filter.does) {
            (Does::Ask(before), Does::Ask(now)) => {
                before.fingerprint == now.fingerprint && demand(self.setting) == demand(setting)
            }
            (Does::Jwt(before), Does::Jwt(now)) => {
                before.fingerprint == now.fingerprint && demand(self.setting) == demand(setting)
            }
            (Does::Limit(_), Does::Limit(_)) | (Does::GrpcWeb, Does::GrpcWeb) => {
                self.filter.name == filter.name
            }
            _ => false,
        }
    }
}

/// What a route demands of external authorization or of tokens.
#[derive(PartialEq)]
enum Demand<'a> {
    /// What the filter does otherwise.
    Default,
    /// To meet the requirement of this name.
    Requirement(&'a str),
    /// To add this to the question.
    Extensions(&'a [(Box<str>, Box<str>)]),
}

fn demand(setting: Option<&Setting>) -> Demand<'_> {
    match setting {
        Some(Setting::Jwt(name)) => Demand::Requirement(name),
        Some(Setting::Question { extensions, .. }) if !extensions.is_empty() => {
            Demand::Extensions(extensions)
        }
        _ => Demand::Default,
    }
}

/// A request that was admitted, and what is known of it.
#[derive(Clone, Copy)]
pub(crate) struct Case<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) origin: &'a Origin,
    /// The request's head as it is now.
    pub(crate) head: &'a RequestHead,
    /// What filters did with the request.
    pub(crate) visits: &'a Visits<'a>,
    /// The route by which it was admitted.
    pub(crate) found: Option<&'a Found<'a>>,
    /// The connection that it goes to.
    pub(crate) link: &'a Link,
    /// The client, proxies in front taken into account.
    pub(crate) client: IpAddr,
    /// What filters found out, such as the claims of its token.
    pub(crate) metadata: Option<&'a Map<String, Value>>,
    /// When it came.
    pub(crate) start: SystemTime,
}

impl Case<'_> {
    /// Judges the request by the configuration of now: its connections first, then the filters in their order.
    ///
    /// The answer of external authorization counts as long as the same would be asked. Tokens count as long as the same is
    /// required of them, and are checked again otherwise. A filter that was asked counts once, in the order of before.
    pub(crate) fn judge(&self) -> Result<(), Refusal> {
        let now = self.origin.judge(self.worker)?;
        let Terminal::Http(newest) = &now.terminal else { return Err(Refusal::FilterChain) };
        let snapshot = self.worker.snapshot();
        if !upstream::is_trusted(self.link, snapshot.distrusted) {
            return Err(Refusal::Server);
        }
        let table = match &newest.routes {
            Routes::Inline(table) => Some(&**table),
            Routes::Named(name) => snapshot.routes.get(name).map(|table| &**table),
        };
        let (seed, head) = (self.visits.seed, Cow::Borrowed(self.visits.head(0, self.head)));
        let found = find(table, &head, seed);
        let mut walk = Walk { case: self, table, place: 0, seed, head, found, learned: Map::new() };
        newest.filters.iter().try_for_each(|filter| walk.pass(filter))
    }
}

fn find<'t>(table: Option<&'t RouteTable>, head: &RequestHead, seed: u64) -> Option<Found<'t>> {
    route::find(table?, head, &mut fastrand::Rng::with_seed(seed)).ok()
}

/// A request on its way through the newest filters.
struct Walk<'a> {
    case: &'a Case<'a>,
    /// The newest routes.
    table: Option<&'a RouteTable>,
    /// How many of the visits are over.
    place: usize,
    /// The state of the dice with which the route was chosen.
    seed: u64,
    /// The head as the next filter sees it.
    head: Cow<'a, RequestHead>,
    /// The newest route for the request.
    found: Option<Found<'a>>,
    /// What the filters so far found out.
    learned: Map<String, Value>,
}

impl Walk<'_> {
    /// Judges the request by the next filter.
    fn pass(&mut self, filter: &Filter) -> Result<(), Refusal> {
        let route = self.found.map(|found| found.route);
        let setting = route.and_then(|route| route.setting(&filter.name));
        if let Does::Authorize(policy) = &filter.does {
            return match setting {
                Some(Setting::Off) => Ok(()),
                None if filter.disabled => Ok(()),
                Some(Setting::Authorize(policy)) => self.authorize(policy),
                _ => self.authorize(policy),
            };
        }
        // A request without a route now does not have to meet more than it met.
        let route = route.or(self.case.found.map(|found| found.route));
        let setting = route.and_then(|route| route.setting(&filter.name));
        if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
            return Ok(());
        }
        let visits = self.case.visits.filters.get(self.place..).unwrap_or_default();
        let visit = visits.iter().position(|visit| visit.is_of(filter, setting));
        let acted = visit.is_some_and(|index| visits[index].acted);
        match &filter.does {
            Does::Ask(config) => {
                let test = config.enabled_metadata.as_ref();
                let is_wanted = config.enabled > 0
                    && test.is_none_or(|test| matching::metadata(test, Some(&self.learned)));
                if is_wanted && !acted {
                    return Err(Refusal::Authentication);
                }
            }
            Does::Jwt(jwt) if visit.is_none() => return self.require(jwt, setting),
            _ => {}
        }
        if let Some(index) = visit {
            self.skip(index);
        }
        Ok(())
    }

    /// Goes on behind the visit at this index of those that are left.
    fn skip(&mut self, index: usize) {
        let Case { visits, head, metadata, .. } = *self.case;
        let place = self.place + index;
        self.place = place + 1;
        self.head = Cow::Borrowed(visits.head(self.place, head));
        let visit = &visits.filters[place];
        if let Some(seed) = visit.seed {
            self.seed = seed;
            self.found = find(self.table, &self.head, seed);
        }
        let name = match &visit.filter.does {
            Does::Ask(_) => metadata::EXT_AUTHZ,
            Does::Jwt(_) => metadata::JWT,
            _ => return,
        };
        if let Some(found) = metadata.and_then(|metadata| metadata.get(name)) {
            self.learned.insert(name.to_owned(), found.clone());
        }
    }

    fn authorize(&mut self, policy: &Arc<Policy>) -> Result<(), Refusal> {
        let Case { origin, client, .. } = *self.case;
        let subject = Subject {
            head: Some(&self.head),
            peer: &origin.peer,
            source: origin.direct,
            remote: client,
            destination: origin.destination,
            server_name: origin.server_name(),
            metadata: Some(&self.learned),
        };
        let mut tally = Tally::default();
        let verdict = policy::check(slice::from_ref(policy), &subject, &mut tally);
        if let Verdict::Deny { details, .. } = verdict {
            return Err(Refusal::Denied(details));
        }
        matching::learn(&mut self.learned, metadata::RBAC, tally.found);
        Ok(())
    }

    /// Checks the request's tokens, as of when it came, by what is required now. Keys are not fetched.
    fn require(&mut self, jwt: &Jwt, setting: Option<&Setting>) -> Result<(), Refusal> {
        let mut head = self.head.clone().into_owned();
        jwt::sanitize(jwt, &mut head);
        if jwt.bypass_preflight && cors::is_preflight(&head) {
            return Ok(());
        }
        let mut dice = fastrand::Rng::with_seed(self.seed);
        let Some(requirement) = jwt::requirement(jwt, setting, &head, &mut dice) else { return Ok(()) };
        let came = self.case.start.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let Outcome::Pass(good) = jwt::check(jwt, requirement, &head, came, &[]) else {
            return Err(Refusal::Authentication);
        };
        let mut found = Map::new();
        let clear_route = jwt::apply(good, &mut head, &mut found);
        self.head = Cow::Owned(head);
        if clear_route {
            self.found = find(self.table, &self.head, self.seed);
        }
        matching::learn(&mut self.learned, metadata::JWT, found);
        Ok(())
    }
}
