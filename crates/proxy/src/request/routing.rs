//! Routing: prepares the head of a request as every hop does, finds its route, and checks that an upgrade is allowed.

use serde_json::{Map, Value};

use crate::request::{
    context::{Exchange, RequestDecision, RequestScope},
    hop,
};
use skysail_http::head::{RequestHead, Version};
use skysail_policy::{
    config::{
        HttpManager, RouteTable,
        http::Routes,
        listener::Direction,
        route::{Action, Rewrite, RouteMatch},
    },
    error::{Error, Kind},
    headers::{self, Hop},
    peer::{METADATA, METADATA_ID},
    route::{self, Found, NoRoute},
};

/// Returns the route table of the connection manager.
pub(crate) fn table<'a>(scope: &RequestScope<'a>) -> Option<&'a RouteTable> {
    match &scope.manager.routes {
        Routes::Inline(table) => Some(table),
        Routes::Named(name) => scope.snapshot.routes.get(name).map(|table| &**table),
    }
}

/// Finds the route for a head and the dynamic metadata of the request.
pub(crate) fn find_route<'a>(
    scope: &RequestScope<'a>,
    head: &RequestHead,
    metadata: Option<&Map<String, Value>>,
    decision: &mut RequestDecision<'a>,
) {
    let table = table(scope);
    let mut rng = scope.worker.rng.borrow_mut();
    decision.filter_results.set_route_seed(rng.get_seed());
    decision.found =
        table.map_or(Err(NoRoute::NoMatch), |table| route::find(table, head, metadata, &mut rng));
}

/// Sets the authority of an HTTP/1.0 request that has none.
///
/// # Errors
/// The connection manager has no default host.
pub(crate) fn set_default_host(manager: &HttpManager, head: &mut RequestHead) -> Result<(), Error> {
    if head.version == Version::Http10 && head.authority().is_empty() {
        let host = manager.default_host.as_ref().ok_or_else(|| Error::new(Kind::MissingHost))?;
        head.set_authority(host);
    }
    Ok(())
}

/// Processes the fields that concern this hop: workload metadata, `x-forwarded-*`, the request id.
pub(crate) fn process_hop_fields(
    scope: &RequestScope<'_>,
    exchange: &mut Exchange<'_>,
    decision: &mut RequestDecision<'_>,
) {
    let origin = &exchange.downstream.origin;
    let peer = &origin.peer;
    if scope.manager.metadata_exchange.is_some() && origin.listener.direction == Direction::Inbound {
        if let Some(metadata) = exchange.request.header(METADATA) {
            decision.sends_metadata = true;
            peer.set_workload(scope.worker.peers.workload(metadata));
            exchange.request.remove(METADATA);
        }
        exchange.request.remove(METADATA_ID);
    }
    let hop = Hop {
        source: origin.source.ip(),
        own: hop::own_address,
        local_port: origin.destination.port(),
        tls: peer.tls,
        certified: peer.certificate.is_some(),
        forwarded_cert: scope.forwarded_cert,
    };
    let rng = &mut scope.worker.rng.borrow_mut();
    exchange.client = headers::receive(scope.manager, hop, exchange.request, rng);
}

/// Returns the protocol that the request asks for, in lower case; `connect` for CONNECT.
///
/// As in Envoy, the whole `upgrade` field is one name. A list of protocols is therefore a name that no
/// configuration allows. `is_listed` says whether `connection` lists `upgrade`.
pub(crate) fn requested_upgrade(head: &RequestHead, is_listed: bool) -> Option<Box<str>> {
    if head.method() == "CONNECT" {
        return Some("connect".into());
    }
    let name = head.header("upgrade").filter(|_| is_listed)?;
    let name = String::from_utf8_lossy(name).to_ascii_lowercase();
    // As in Envoy, an upgrade from HTTP/1.1 to HTTP/2 is ignored, which RFC 9110, section 7.8, allows.
    (name != "h2c" || head.version == Version::Http2).then(|| name.into())
}

/// Checks that an upgrade is allowed: by the route if it names the protocol, else by the connection manager. A request
/// without a route passes. As in Envoy this precedes the filters.
///
/// # Errors
/// The upgrade is not allowed.
pub(crate) fn check_upgrade(
    manager: &HttpManager,
    found: &Result<Found<'_>, NoRoute>,
    requested: &str,
) -> Result<(), Error> {
    let by_route = match found {
        Ok(Found { route, .. }) if let Action::Forward(forward) = &route.action => {
            forward.upgrades.iter().find(|(name, _)| **name == *requested)
        }
        Err(NoRoute::NoMatch) => return Ok(()),
        _ => None,
    };
    let by_manager = || manager.upgrades.iter().any(|name| **name == *requested);
    let allowed = by_route.map_or_else(by_manager, |(_, allowed)| *allowed);
    if allowed { Ok(()) } else { Err(Error::new(Kind::UpgradeRefused)) }
}

/// Sets the path that a route's rewrite gives, and keeps the original in `x-envoy-original-path`.
pub(crate) fn rewrite_path(head: &mut RequestHead, rewrite: &Rewrite, matched: &RouteMatch) {
    if let Some(path) = route::rewrite(rewrite, matched, head.path()) {
        head.copy_path_to("x-envoy-original-path");
        head.set_path(&path);
    }
}
