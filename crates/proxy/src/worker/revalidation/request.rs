//! Judges an open request by the filters of the newest configuration.
//!
//! A filter changes the head that later filters get: external authorization adds fields, the JWT filter removes tokens. A policy
//! therefore gets the head as it is at the policy's place among the newest filters. [`FilterResults`] records what this needs. It records
//! nothing for a request whose filters neither change the head nor ask another service. The recorded result of a filter is used
//! if the filter would get the same head now and has the same configuration.

use std::{
    borrow::Cow,
    net::IpAddr,
    ptr,
    rc::Rc,
    slice,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value};

use super::Refusal;
use crate::{
    upstream::{self, pool::Link},
    worker::{Worker, downstream::Origin},
};
use skysail_http::{grpc_web, head::RequestHead};
use skysail_policy::{
    config::{
        HttpManager, RouteTable,
        authorization::ExternalAuthorization,
        http::{Does, Filter, Routes, metadata},
        jwt::Jwt,
        listener::Terminal,
        policy::Policy,
        route::Setting,
    },
    cors,
    jwt::{self, JwtOutcome, Signatures},
    matching,
    rbac::{self, Subject, Tally, Verdict},
    route::{self, Found},
};

/// Most bytes of heads that are kept for a request. A request that needs more is ended by a change of its listener or routes.
const MOST_KEPT: usize = 64 * 1024;

/// The recorded results of a request's filters.
///
/// A later configuration does not use the fields that a local rate limit added: they depend on other requests.
#[derive(Default)]
pub(crate) struct FilterResults<'a> {
    /// The filters that changed the head or cannot be asked again, in the order in which they saw the request.
    filters: Vec<FilterResult<'a>>,
    /// The head before the route changed it; `None` where it is as the filters left it.
    routed: Option<Box<RequestHead>>,
    /// The state of the random number generator when the route was chosen (`runtime_fraction`).
    seed: u64,
    /// Bytes of the heads that are kept.
    kept: usize,
    /// The signatures that were verified for later configurations.
    signatures: Signatures,
}

/// The recorded result of one filter.
struct FilterResult<'a> {
    filter: &'a Filter,
    /// The route's setting for it.
    setting: Option<&'a Setting>,
    /// The head as the filter got it; `None` where the filter left it unchanged.
    head: Option<Box<RequestHead>>,
    /// The dynamic metadata that it set.
    found: Map<String, Value>,
    /// The state of the random number generator when this filter had the route chosen again.
    seed: Option<u64>,
    /// Whether it acted: external authorization may be enabled for some requests only.
    acted: bool,
}

impl<'a> FilterResults<'a> {
    /// Records that a filter begins to act on the request.
    pub(crate) fn begin(&mut self, filter: &'a Filter, setting: Option<&'a Setting>) {
        let found = Map::new();
        self.filters.push(FilterResult { filter, setting, head: None, found, seed: None, acted: true });
    }

    /// Records the head that the filter is about to change.
    pub(crate) fn keep_head(&mut self, head: &RequestHead) {
        let is_kept = self.filters.last().is_none_or(|result| result.head.is_some());
        let copy = if is_kept { None } else { self.copy(head) };
        if let (Some(result), Some(copy)) = (self.filters.last_mut(), copy) {
            result.head = Some(copy);
        }
    }

    /// Records the dynamic metadata that the filter sets.
    pub(crate) fn add_metadata(&mut self, found: &Map<String, Value>) {
        if let Some(result) = self.filters.last_mut().filter(|_| !found.is_empty()) {
            result.found.clone_from(found);
        }
    }

    /// Records that the filter does not act on this request.
    pub(crate) fn set_inactive(&mut self) {
        if let Some(result) = self.filters.last_mut() {
            result.acted = false;
        }
    }

    /// Records the state of the random number generator with which a route is about to be chosen.
    pub(crate) fn set_route_seed(&mut self, seed: u64) {
        match self.filters.last_mut() {
            Some(result) => result.seed = Some(seed),
            None => self.seed = seed,
        }
    }

    /// Whether any filter changed the head or cannot be asked again.
    pub(crate) fn any(&self) -> bool {
        !self.filters.is_empty()
    }

    /// Records the head that the route is about to change.
    pub(crate) fn keep_routed_head(&mut self, head: &RequestHead) {
        self.routed = self.copy(head);
    }

    /// A copy of a head, unless too much is kept.
    fn copy(&mut self, head: &RequestHead) -> Option<Box<RequestHead>> {
        self.kept = self.kept.saturating_add(head.size());
        (!self.is_lost()).then(|| Box::new(head.copy()))
    }

    /// Whether heads are missing, because they were too long.
    fn is_lost(&self) -> bool {
        self.kept > MOST_KEPT
    }

    /// Returns the head as it was before the filter at this place. `last` is the head as it is now.
    fn head<'h>(&'h self, place: usize, last: &'h RequestHead) -> &'h RequestHead {
        let mut kept = self.filters.get(place..).unwrap_or_default().iter();
        kept.find_map(|result| result.head.as_deref()).or(self.routed.as_deref()).unwrap_or(last)
    }
}

impl Drop for FilterResults<'_> {
    fn drop(&mut self) {
        let kept = self.filters.drain(..).filter_map(|result| result.head).chain(self.routed.take());
        kept.for_each(|head| head.recycle());
    }
}

impl FilterResult<'_> {
    /// Whether the filter, with this setting of the route, demands of a request and does to it what this one did.
    fn is_of(&self, filter: &Filter, setting: Option<&Setting>) -> bool {
        let same = match (&self.filter.does, &filter.does) {
            (Does::Ask(before), Does::Ask(now)) => before.fingerprint == now.fingerprint,
            (Does::Jwt(before), Does::Jwt(now)) => before.fingerprint == now.fingerprint,
            _ => false,
        };
        same && Demand::new(self.filter, self.setting) == Demand::new(filter, setting)
    }
}

/// What a filter, with a setting of the route, demands of a request or does to it besides what its fingerprint covers.
#[derive(PartialEq)]
enum Demand<'a> {
    Nothing,
    /// To meet the requirement of this name.
    Requirement(&'a str),
    /// To ask with this added, and without the request's body or with it.
    Question(&'a [(Box<str>, Box<str>)], bool),
}

impl<'a> Demand<'a> {
    fn new(filter: &'a Filter, setting: Option<&'a Setting>) -> Self {
        match (&filter.does, setting) {
            (Does::Jwt(_), Some(Setting::Jwt(name))) => Self::Requirement(name),
            (Does::Ask(config), Some(Setting::Question { extensions, without_body })) => {
                Self::Question(extensions, *without_body && config.body.is_some())
            }
            (Does::Ask(_), _) => Self::Question(&[], false),
            _ => Self::Nothing,
        }
    }
}

/// A request that was admitted, and what is known of it.
#[derive(Clone, Copy)]
pub(crate) struct AdmittedRequest<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) origin: &'a Origin,
    /// The settings by which it was admitted.
    pub(crate) manager: &'a HttpManager,
    /// The request's head as it is now.
    pub(crate) head: &'a RequestHead,
    /// What filters did with the request.
    pub(crate) results: &'a FilterResults<'a>,
    /// The route by which it was admitted.
    pub(crate) found: Option<&'a Found<'a>>,
    /// The connection that it goes to.
    pub(crate) link: &'a Link,
    /// The client, proxies in front taken into account.
    pub(crate) client: IpAddr,
    /// When it came.
    pub(crate) start: SystemTime,
}

impl AdmittedRequest<'_> {
    /// Judges the request by the configuration of now: its connections first, then the filters in their order.
    ///
    /// The answer of external authorization counts as long as the same would be asked. Tokens count as long as the same is
    /// required of them, and are checked again otherwise.
    pub(crate) fn revalidate(&self) -> Result<(), Refusal> {
        let now = self.origin.revalidate(self.worker)?;
        let Terminal::Http(newest) = &now.terminal else { return Err(Refusal::FilterChain) };
        let snapshot = self.worker.snapshot();
        if !upstream::is_trusted(self.link, snapshot.distrusted) {
            return Err(Refusal::Server);
        }
        let table = match &newest.routes {
            Routes::Inline(table) => Some(&**table),
            Routes::Named(name) => snapshot.routes.get(name).map(|table| &**table),
        };
        // The change is one of other listeners or routes.
        let is_admitting = ptr::eq(&**newest, self.manager)
            && self.found.zip(table).is_some_and(|(found, table)| ptr::eq(found.table, table));
        if is_admitting || !newest.filters.iter().any(Filter::judges) {
            return Ok(());
        }
        if self.results.is_lost() || !newest.reads_like(self.manager) {
            return Err(Refusal::Handling);
        }
        let (seed, head) = (self.results.seed, Cow::Borrowed(self.results.head(0, self.head)));
        let found = find(table, &head, seed);
        let mut walk = FilterWalk { case: self, table, place: 0, seed, head, found, learned: Map::new() };
        newest.filters.iter().try_for_each(|filter| walk.pass(filter))
    }
}

fn find<'t>(table: Option<&'t RouteTable>, head: &RequestHead, seed: u64) -> Option<Found<'t>> {
    route::find(table?, head, &mut fastrand::Rng::with_seed(seed)).ok()
}

/// A request on its way through the newest filters.
struct FilterWalk<'a> {
    case: &'a AdmittedRequest<'a>,
    /// The newest routes.
    table: Option<&'a RouteTable>,
    /// How many of the results are over.
    place: usize,
    /// The state of the random number generator with which the route was chosen.
    seed: u64,
    /// The head as the next filter sees it.
    head: Cow<'a, RequestHead>,
    /// The newest route for the request.
    found: Option<Found<'a>>,
    /// What the filters so far found out.
    learned: Map<String, Value>,
}

impl FilterWalk<'_> {
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
        // If no route matches any more, the settings of the route by which the request was admitted apply.
        let route = route.or(self.case.found.map(|found| found.route));
        let setting = route.and_then(|route| route.setting(&filter.name));
        if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
            return Ok(());
        }
        match &filter.does {
            Does::Ask(config) if self.is_asked_about(config) => {
                let (index, result) = self.result(filter, setting).ok_or(Refusal::Authentication)?;
                if !result.acted {
                    return Err(Refusal::Authentication);
                }
                self.skip(index);
            }
            Does::Jwt(jwt) => match self.result(filter, setting) {
                Some((index, _)) => self.skip(index),
                None => return self.require(jwt, setting),
            },
            Does::GrpcWeb if grpc_web::is_spoken(&self.head) => {
                grpc_web::request(self.head.to_mut());
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether external authorization is to be asked about the request.
    fn is_asked_about(&self, config: &ExternalAuthorization) -> bool {
        let test = config.enabled_metadata.as_ref();
        config.enabled > 0 && test.is_none_or(|test| matching::metadata(test, Some(&self.learned)))
    }

    /// Returns what a filter did with the request, if it would get the same head now, and the place of that.
    fn result(&self, filter: &Filter, setting: Option<&Setting>) -> Option<(usize, &FilterResult<'_>)> {
        let AdmittedRequest { results, head, .. } = *self.case;
        let left = results.filters.iter().enumerate().skip(self.place);
        left.filter(|(_, result)| result.is_of(filter, setting)).find(|(index, _)| {
            let before = results.head(*index, head);
            ptr::eq(before, &*self.head) || *before == *self.head
        })
    }

    /// Goes on behind a result.
    fn skip(&mut self, index: usize) {
        let AdmittedRequest { results, head, .. } = *self.case;
        self.place = index + 1;
        self.head = Cow::Borrowed(results.head(self.place, head));
        let Some(result) = results.filters.get(index) else { return };
        if let Some(seed) = result.seed {
            self.seed = seed;
            self.found = find(self.table, &self.head, seed);
        }
        let name = match &result.filter.does {
            Does::Ask(_) => metadata::EXT_AUTHZ,
            _ => metadata::JWT,
        };
        matching::learn(&mut self.learned, name, result.found.clone());
    }

    fn authorize(&mut self, policy: &Arc<Policy>) -> Result<(), Refusal> {
        let AdmittedRequest { origin, client, .. } = *self.case;
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
        let verdict = rbac::check(slice::from_ref(policy), &subject, &mut tally);
        if let Verdict::Deny { details, .. } = verdict {
            return Err(Refusal::Denied(details));
        }
        matching::learn(&mut self.learned, metadata::RBAC, tally.found);
        Ok(())
    }

    /// Checks the request's tokens, as of when it came, by what is required now. Keys are not fetched.
    fn require(&mut self, jwt: &Jwt, setting: Option<&Setting>) -> Result<(), Refusal> {
        if jwt::is_unclean(jwt, &self.head) {
            jwt::sanitize(jwt, self.head.to_mut());
        }
        if jwt.bypass_preflight && cors::is_preflight(&self.head) {
            return Ok(());
        }
        let mut dice = fastrand::Rng::with_seed(self.seed);
        let requirement = jwt::requirement(jwt, setting, &self.head, &mut dice);
        let Some(requirement) = requirement.map_err(|_| Refusal::Authentication)? else { return Ok(()) };
        let came = self.case.start.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let signatures = &self.case.results.signatures;
        let JwtOutcome::Pass(good) = jwt::check_again(jwt, requirement, &self.head, came, signatures) else {
            return Err(Refusal::Authentication);
        };
        if good.is_empty() {
            return Ok(());
        }
        let mut found = Map::new();
        if jwt::apply(good, self.head.to_mut(), &mut found) {
            self.found = find(self.table, &self.head, self.seed);
        }
        matching::learn(&mut self.learned, metadata::JWT, found);
        Ok(())
    }
}
