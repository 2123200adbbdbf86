//! Revalidation of an open request by the filters of the configuration in effect.
//!
//! A filter changes the head that later filters get: external authorization adds fields, the JWT filter removes tokens.
//! A policy is therefore checked against the head at its position among the filters. [`FilterResults`] records the
//! heads and results that this needs. It records nothing for a request whose filters neither change the head nor call a
//! service. The recorded result of a filter is used if the filter would get the same head now and has the same
//! configuration.

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
        http::{Filter, FilterKind, Routes, metadata},
        jwt::Jwt,
        listener::Terminal,
        mutation::HeaderMutation,
        policy::Policy,
        route::Setting,
    },
    cors,
    jwt::{self, JwtOutcome, Signatures},
    matching,
    rbac::{self, Subject, Tally, Verdict},
    route::{self, Found},
};

/// Maximum bytes of heads that are kept for a request. A request that needs more ends when its listener or routes
/// change.
const MAX_KEPT: usize = 64 * 1024;

/// The recorded results of a request's filters.
///
/// A later configuration does not use the fields that a local rate limit added: they depend on other requests.
#[derive(Default)]
pub(crate) struct FilterResults<'a> {
    /// The filters that changed the head or cannot run again, in their order.
    filters: Vec<FilterResult<'a>>,
    /// The head before the route changed it; `None` if the route does not change it.
    routed: Option<Box<RequestHead>>,
    /// The state of the random number generator when the route was selected (`runtime_fraction`).
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
    /// The head that the filter got; `None` if the filter did not change it.
    head: Option<Box<RequestHead>>,
    /// Dynamic metadata of the filter, by namespace.
    found: Map<String, Value>,
    /// The last selection of the route by the filter; `None` if it selected none.
    selection: Option<Selection>,
    /// Whether the filter was active: external authorization may be enabled for some requests only.
    active: bool,
}

/// The selection of a route by a filter.
struct Selection {
    /// The state of the random number generator.
    seed: u64,
    /// Head at the selection; `None` if the filter has not changed it since.
    head: Option<Box<RequestHead>>,
    /// Dynamic metadata of the filter at the selection; `None` if it has added none since.
    found: Option<Map<String, Value>>,
}

impl<'a> FilterResults<'a> {
    /// Records that a filter begins to act on the request.
    pub(crate) fn begin(&mut self, filter: &'a Filter, setting: Option<&'a Setting>) {
        let found = Map::new();
        self.filters.push(FilterResult { filter, setting, head: None, found, selection: None, active: true });
    }

    /// Records the head that the filter is about to change.
    pub(crate) fn keep_head(&mut self, head: &RequestHead) {
        let Some(result) = self.filters.last() else { return };
        let of_selection = result.selection.as_ref().is_some_and(|selection| selection.head.is_none());
        let missing = [result.head.is_none(), of_selection];
        let [before, selected] = missing.map(|missing| if missing { self.copy(head) } else { None });
        let Some(result) = self.filters.last_mut() else { return };
        result.head = result.head.take().or(before);
        if let Some(selection) = &mut result.selection {
            selection.head = selection.head.take().or(selected);
        }
    }

    /// Records dynamic metadata of the current filter. A value replaces an earlier one of the same key.
    pub(crate) fn add_metadata(&mut self, namespace: &str, found: &Map<String, Value>) {
        let Some(result) = self.filters.last_mut().filter(|_| !found.is_empty()) else { return };
        if let Some(selection) = &mut result.selection {
            selection.found.get_or_insert_with(|| result.found.clone());
        }
        matching::merge_metadata(&mut result.found, namespace, found.clone());
    }

    /// Records that the filter does not act on this request.
    pub(crate) fn set_inactive(&mut self) {
        if let Some(result) = self.filters.last_mut() {
            result.active = false;
        }
    }

    /// Records the state of the random number generator with which a route is about to be selected.
    pub(crate) fn set_route_seed(&mut self, seed: u64) {
        match self.filters.last_mut() {
            Some(result) => result.selection = Some(Selection { seed, head: None, found: None }),
            None => self.seed = seed,
        }
    }

    /// Returns whether any filter is recorded.
    pub(crate) fn any(&self) -> bool {
        !self.filters.is_empty()
    }

    /// Records the head that the route is about to change.
    pub(crate) fn keep_routed_head(&mut self, head: &RequestHead) {
        self.routed = self.copy(head);
    }

    /// Returns a copy of a head, unless the limit is exceeded.
    fn copy(&mut self, head: &RequestHead) -> Option<Box<RequestHead>> {
        self.kept = self.kept.saturating_add(head.size());
        (!self.exceeds_limit()).then(|| Box::new(head.copy()))
    }

    /// Returns whether heads are missing, because they exceeded the limit.
    fn exceeds_limit(&self) -> bool {
        self.kept > MAX_KEPT
    }

    /// Returns the head before the filter at this index. `last` is the current head.
    fn head<'h>(&'h self, index: usize, last: &'h RequestHead) -> &'h RequestHead {
        let mut kept = self.filters.get(index..).unwrap_or_default().iter();
        kept.find_map(|result| result.head.as_deref()).or(self.routed.as_deref()).unwrap_or(last)
    }
}

impl Drop for FilterResults<'_> {
    fn drop(&mut self) {
        let of_filter = |result: FilterResult<'_>| {
            let FilterResult { head, selection, .. } = result;
            [head, selection.and_then(|selection| selection.head)]
        };
        let kept = self.filters.drain(..).flat_map(of_filter).chain([self.routed.take()]);
        kept.flatten().for_each(|head| head.recycle());
    }
}

impl FilterResult<'_> {
    /// Returns whether a filter with this setting of the route has the same effect on a request as the recorded one.
    fn is_same(&self, filter: &Filter, setting: Option<&Setting>) -> bool {
        let same = match (&self.filter.kind, &filter.kind) {
            (FilterKind::ExternalAuthorization(before), FilterKind::ExternalAuthorization(now)) => {
                before.fingerprint == now.fingerprint
            }
            (FilterKind::Jwt(before), FilterKind::Jwt(now)) => before.fingerprint == now.fingerprint,
            (FilterKind::Lua(before), FilterKind::Lua(now)) => {
                before.clear_route == now.clear_route && before.select(self.setting) == now.select(setting)
            }
            (FilterKind::ExternalProcessing(before), FilterKind::ExternalProcessing(now)) => {
                before.fingerprint == now.fingerprint
            }
            (FilterKind::HeaderMutation(before), FilterKind::HeaderMutation(now)) => {
                before.mutations.fingerprint == now.mutations.fingerprint
                    && before.most_specific_wins == now.most_specific_wins
            }
            (FilterKind::Buffer(_), FilterKind::Buffer(_)) => true,
            (FilterKind::Decompress(before), FilterKind::Decompress(now)) => {
                before.coding == now.coding && before.advertise == now.advertise
            }
            _ => false,
        };
        same && RouteEffect::new(self.filter, self.setting) == RouteEffect::new(filter, setting)
    }
}

/// The effect of the route's setting on a filter, which the fingerprint of the filter does not cover.
#[derive(PartialEq)]
enum RouteEffect<'a> {
    None,
    /// Name of the requirement that tokens must meet.
    Requirement(&'a str),
    /// Fingerprints of the mutations of headers.
    Mutations(Vec<u64>),
    /// Fingerprint of the settings for external processing.
    Processing(u64),
    /// Entries added to the authorization request, and whether the body is omitted.
    Authorization(&'a [(Box<str>, Box<str>)], bool),
}

impl<'a> RouteEffect<'a> {
    fn new(filter: &'a Filter, setting: Option<&'a Setting>) -> Self {
        match (&filter.kind, setting) {
            (FilterKind::Jwt(_), Some(Setting::Jwt(name))) => Self::Requirement(name),
            (
                FilterKind::ExternalAuthorization(config),
                Some(Setting::ExternalAuthorization { extensions, without_body }),
            ) => Self::Authorization(extensions, *without_body && config.body.is_some()),
            (FilterKind::ExternalAuthorization(_), _) => Self::Authorization(&[], false),
            (FilterKind::ExternalProcessing(_), Some(Setting::Processing(by_route))) => {
                Self::Processing(by_route.fingerprint)
            }
            (FilterKind::HeaderMutation(_), Some(Setting::HeaderMutation(lists))) => {
                Self::Mutations(lists.iter().map(|list| list.fingerprint).collect())
            }
            _ => Self::None,
        }
    }
}

/// An open request, with the configuration that admitted it.
#[derive(Clone, Copy)]
pub(crate) struct AdmittedRequest<'a> {
    pub(crate) worker: &'a Rc<Worker>,
    pub(crate) origin: &'a Origin,
    /// The connection manager that admitted it.
    pub(crate) manager: &'a HttpManager,
    /// The current head of the request.
    pub(crate) head: &'a RequestHead,
    /// The recorded results of its filters.
    pub(crate) results: &'a FilterResults<'a>,
    /// The route that it was admitted with.
    pub(crate) found: Option<&'a Found<'a>>,
    /// The upstream connection.
    pub(crate) link: &'a Link,
    /// Address of the client, from `x-forwarded-for` where the configuration trusts it.
    pub(crate) client: IpAddr,
    /// Time of its arrival.
    pub(crate) start: SystemTime,
}

impl AdmittedRequest<'_> {
    /// Checks the request against the configuration in effect: first its connections, then the filters in their order.
    ///
    /// A decision of external authorization is valid while the service would get the same request. Tokens are valid
    /// while the requirement is the same, and are checked again otherwise.
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
        // If neither the connection manager nor the routes have changed, the request needs no check.
        let is_admitting = ptr::eq(&**newest, self.manager)
            && self.found.zip(table).is_some_and(|(found, table)| ptr::eq(found.table, table));
        if is_admitting || !newest.filters.iter().any(Filter::authorizes) {
            return Ok(());
        }
        if self.results.exceeds_limit() || !newest.presents_requests_like(self.manager) {
            return Err(Refusal::Handling);
        }
        let (seed, head) = (self.results.seed, Cow::Borrowed(self.results.head(0, self.head)));
        let found = find(table, &head, &Map::new(), seed);
        let mut walk = FilterWalk { case: self, table, next: 0, seed, head, found, metadata: Map::new() };
        newest.filters.iter().try_for_each(|filter| walk.check_filter(filter))
    }
}

fn find<'t>(
    table: Option<&'t RouteTable>,
    head: &RequestHead,
    metadata: &Map<String, Value>,
    seed: u64,
) -> Option<Found<'t>> {
    route::find(table?, head, Some(metadata), &mut fastrand::Rng::with_seed(seed)).ok()
}

/// A walk of a request through the filters in effect.
struct FilterWalk<'a> {
    case: &'a AdmittedRequest<'a>,
    /// The route table in effect.
    table: Option<&'a RouteTable>,
    /// Index of the next recorded result.
    next: usize,
    /// The state of the random number generator with which the route was selected.
    seed: u64,
    /// The head that the next filter gets.
    head: Cow<'a, RequestHead>,
    /// The route of the request in the table in effect.
    found: Option<Found<'a>>,
    /// Dynamic metadata of the filters so far.
    metadata: Map<String, Value>,
}

impl FilterWalk<'_> {
    /// Checks the request against the next filter.
    fn check_filter(&mut self, filter: &Filter) -> Result<(), Refusal> {
        let route = self.found.map(|found| found.route);
        let setting = route.and_then(|route| route.setting(&filter.name));
        if let FilterKind::Rbac(policy) = &filter.kind {
            return match setting {
                Some(Setting::Off) => Ok(()),
                None if filter.disabled => Ok(()),
                Some(Setting::Rbac(policy)) => self.authorize(policy),
                _ => self.authorize(policy),
            };
        }
        // If no route matches any more, the settings of the route by which the request was admitted apply.
        let route = route.or(self.case.found.map(|found| found.route));
        let setting = route.and_then(|route| route.setting(&filter.name));
        if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
            return Ok(());
        }
        match &filter.kind {
            FilterKind::ExternalAuthorization(config) if self.calls_authorization(config) => {
                let (index, result) = self.result(filter, setting).ok_or(Refusal::Authentication)?;
                if !result.active {
                    return Err(Refusal::Authentication);
                }
                self.skip(index);
            }
            FilterKind::Jwt(jwt) => match self.result(filter, setting) {
                Some((index, _)) => self.skip(index),
                None => return self.check_tokens(jwt, setting),
            },
            FilterKind::Lua(lua) if lua.select(setting).is_some_and(|(script, _)| script.handles_request) => {
                // A script may depend on anything, and cannot run again.
                let (index, _) = self.result(filter, setting).ok_or(Refusal::Handling)?;
                self.skip(index);
            }
            // A processor that only observes changes nothing.
            FilterKind::ExternalProcessing(config) if config.observes.is_none() => {
                // A processor may depend on anything, and cannot be asked again.
                let (index, _) = self.result(filter, setting).ok_or(Refusal::Handling)?;
                self.skip(index);
            }
            FilterKind::HeaderMutation(config) if changes_request(config, setting) => {
                let (index, _) = self.result(filter, setting).ok_or(Refusal::Handling)?;
                self.skip(index);
            }
            // The filter may have added or removed the length.
            FilterKind::Buffer(_) | FilterKind::Decompress(_) => {
                if let Some((index, _)) = self.result(filter, setting) {
                    self.skip(index);
                }
            }
            FilterKind::GrpcWeb if grpc_web::is_call(&self.head) => {
                grpc_web::request(self.head.to_mut());
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns whether external authorization decides about the request.
    fn calls_authorization(&self, config: &ExternalAuthorization) -> bool {
        let test = config.enabled_metadata.as_ref();
        config.enabled > 0 && test.is_none_or(|test| matching::metadata(test, Some(&self.metadata)))
    }

    /// Returns the recorded result of a filter and its index, if the filter would get the same head now.
    fn result(&self, filter: &Filter, setting: Option<&Setting>) -> Option<(usize, &FilterResult<'_>)> {
        let AdmittedRequest { results, head, .. } = *self.case;
        let left = results.filters.iter().enumerate().skip(self.next);
        left.filter(|(_, result)| result.is_same(filter, setting)).find(|(index, _)| {
            let before = results.head(*index, head);
            ptr::eq(before, &*self.head) || *before == *self.head
        })
    }

    /// Continues after a recorded result, with its head, route and metadata.
    fn skip(&mut self, index: usize) {
        let AdmittedRequest { results, head, .. } = *self.case;
        self.next = index + 1;
        self.head = Cow::Borrowed(results.head(self.next, head));
        let Some(result) = results.filters.get(index) else { return };
        if let Some(Selection { seed, head, found }) = &result.selection {
            self.add_metadata(found.as_ref().unwrap_or(&result.found));
            self.seed = *seed;
            self.found = find(self.table, head.as_deref().unwrap_or(&self.head), &self.metadata, *seed);
        }
        self.add_metadata(&result.found);
    }

    /// Adds dynamic metadata by namespace.
    fn add_metadata(&mut self, found: &Map<String, Value>) {
        for (namespace, found) in found {
            if let Value::Object(found) = found {
                matching::merge_metadata(&mut self.metadata, namespace, found.clone());
            }
        }
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
            metadata: Some(&self.metadata),
        };
        let mut tally = Tally::default();
        let verdict = rbac::check(slice::from_ref(policy), &subject, &mut tally);
        if let Verdict::Deny { details, .. } = verdict {
            return Err(Refusal::Denied(details));
        }
        matching::merge_metadata(&mut self.metadata, metadata::COMMON, tally.log_metadata());
        matching::merge_metadata(&mut self.metadata, metadata::RBAC, tally.found);
        Ok(())
    }

    /// Checks the request's tokens against the requirement in effect, at the time of the request. Fetches no key sets.
    fn check_tokens(&mut self, jwt: &Jwt, setting: Option<&Setting>) -> Result<(), Refusal> {
        if jwt::is_unclean(jwt, &self.head) {
            jwt::sanitize(jwt, self.head.to_mut());
        }
        if jwt.bypass_preflight && cors::is_preflight(&self.head) {
            return Ok(());
        }
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let requirement = jwt::requirement(jwt, setting, &self.head, &mut rng);
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
        let clear_route = jwt::apply(good, self.head.to_mut(), &mut found);
        matching::merge_metadata(&mut self.metadata, metadata::JWT, found);
        if clear_route {
            self.found = find(self.table, &self.head, &self.metadata, self.seed);
        }
        Ok(())
    }
}

/// Returns whether mutations of a filter and of the route change requests.
fn changes_request(config: &HeaderMutation, setting: Option<&Setting>) -> bool {
    let by_route = match setting {
        Some(Setting::HeaderMutation(lists)) => lists.iter().any(|list| list.changes_request()),
        _ => false,
    };
    by_route || config.mutations.changes_request()
}
