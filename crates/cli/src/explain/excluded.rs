//! Matches of VirtualServices that are for other clients. The control plane leaves them out of a proxy's configuration,
//! so neither its routes nor its filter chains mention them.

use skysail_model::{RuleKind, excluded_matches, gateway_servers};
use skysail_proxy::explain::Explanation;

use super::{
    hop::{Place, Received},
    report::{ExcludedStep, Source},
    sources::{RouteSources, Sources},
};

/// Returns the matches for the host of a request or connection that are for other clients, up to the route that the
/// request takes.
pub(super) fn matches(
    sources: &Sources<'_>,
    place: &Place<'_>,
    explained: &Explanation,
    received: &Received<'_>,
    routes: &RouteSources,
) -> Vec<ExcludedStep> {
    let view = &place.proxy.view;
    let kind = if received.host.is_empty() || explained.protocol == "tcp" {
        RuleKind::Connection
    } else {
        RuleKind::Http
    };
    let target = match (place.direction, kind) {
        ("inbound", _) => None,
        ("gateway", _) => of_gateway(sources, place, explained, received),
        (_, RuleKind::Http) => host_and_port(&explained.virtual_host),
        (_, RuleKind::Connection) => {
            let (address, port) = (received.destination.ip(), received.destination.port());
            sources.service_host(address, port).map(|host| (host, port))
        }
    };
    let Some((host, port)) = target else { return Vec::new() };
    let taken = explained.routes.iter().position(|route| route.mismatch.is_none() && route.share.is_none());
    let taken = taken.and_then(|taken| routes.routes.get(taken)?.as_ref());
    let is_reached = |source: &Source| {
        taken.is_none_or(|taken| {
            taken.object != source.object || position(&source.field) < position(&taken.field)
        })
    };
    let found = excluded_matches(sources.world, view, kind, &host, port).into_iter();
    let steps = found
        .map(|found| ExcludedStep { mismatch: found.reason, source: sources.of(&found.rule, &found.field) });
    steps.filter(|step| is_reached(&step.source)).collect()
}

/// Returns the host and the number of the server's port at a gateway.
fn of_gateway(
    sources: &Sources<'_>,
    place: &Place<'_>,
    explained: &Explanation,
    received: &Received<'_>,
) -> Option<(String, u16)> {
    let of_host = host_and_port(&explained.virtual_host).filter(|(host, _)| host != "blackhole");
    of_host.or_else(|| {
        let port = received.destination.port();
        let server =
            gateway_servers(sources.world, &place.proxy.view).into_iter().find(|of| of.port == port)?;
        let host = if received.host.is_empty() { received.server_name } else { received.host };
        (!host.is_empty()).then(|| (host.to_owned(), server.number))
    })
}

/// Returns the host and the port in the name of a virtual host. With on-demand virtual hosts, the name begins with that
/// of the route table.
fn host_and_port(name: &str) -> Option<(String, u16)> {
    let (host, port) = name.rsplit('/').next()?.rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

/// Returns the indices of the rule and the match in a field such as `spec.http[1].match[0]`.
fn position(field: &str) -> (usize, usize) {
    let mut numbers = field.split(['[', ']']).filter_map(|part| part.parse().ok());
    (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default())
}
