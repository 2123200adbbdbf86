//! External authorizers: whether a request is one about which an authorizer decides, and what follows if it
//! cannot.

use std::net::SocketAddr;

use serde_json::{Map, Value};
use skysail_policy::{config::authorization::ExternalAuthorization, matching, route::NoRoute};

use super::{
    ALL, ProxyConfiguration,
    filters::{Passage, effect},
    report::{Explanation, FilterReport, Outcome},
    target::EndpointProtocol,
};

/// Evaluates the authorizer of a filter chain for a connection to this address, after policies that set these
/// metadata. Returns false if the authorizer cannot answer and its failure closes the connection.
pub(super) fn connection(
    configuration: &ProxyConfiguration,
    config: &ExternalAuthorization,
    destination: SocketAddr,
    metadata: &Map<String, Value>,
    explained: &mut Explanation,
) -> bool {
    if !selects(config, metadata) {
        return true;
    }
    match failure(configuration, config, destination) {
        None => {
            explained.filters.push(call("ext_authz", config, "connection"));
            true
        }
        Some(reason) => {
            explained.filters.push(failed("ext_authz", config, &reason, "connections"));
            if !config.failure_allowed {
                explained.outcome = Outcome::Refused(format!("the authorizer cannot answer: {reason}"));
            }
            config.failure_allowed
        }
    }
}

/// Evaluates an authorizer. Returns false if the authorizer cannot answer and its failure refuses the
/// request.
pub(super) fn request(
    passage: &Passage<'_>,
    name: &str,
    config: &ExternalAuthorization,
    explained: &mut Explanation,
) -> bool {
    // As on the request path, a request that no route matches is refused without a call.
    let has_route = !matches!(passage.found, Err(NoRoute::NoMatch));
    if !selects(config, &passage.metadata) || !has_route || config.enabled == 0 {
        return true;
    }
    let failure = failure(passage.configuration, config, passage.subject.destination);
    let Some(reason) = failure.filter(|_| config.enabled >= ALL) else {
        explained.filters.push(call(name, config, "request"));
        return true;
    };
    explained.filters.push(failed(name, config, &reason, "requests"));
    if config.failure_allowed {
        return true;
    }
    let status = config.status_on_error;
    explained.outcome = Outcome::Responded(status, format!("the authorizer cannot answer: {reason}"));
    false
}

/// Returns whether the policies before an authorizer select the request for it.
fn selects(config: &ExternalAuthorization, metadata: &Map<String, Value>) -> bool {
    config.enabled_metadata.as_ref().is_none_or(|test| matching::metadata(test, Some(metadata)))
}

/// Returns why no authorizer can answer; `None` if one may.
fn failure(
    configuration: &ProxyConfiguration,
    config: &ExternalAuthorization,
    destination: SocketAddr,
) -> Option<String> {
    let sends = EndpointProtocol::Bytes { is_tunnel: false };
    let target = configuration.target(&config.cluster, 1.0, destination, sends, 0);
    target.failure.map(|(_, reason)| reason)
}

/// Returns the report of an authorizer that cannot answer.
fn failed(name: &str, config: &ExternalAuthorization, reason: &str, of: &str) -> FilterReport {
    let cluster = &config.cluster;
    effect(
        name,
        &match config.failure_allowed {
            true => format!("the authorizer {cluster} cannot answer ({reason}), and its failure admits {of}"),
            false => format!("the authorizer {cluster} cannot answer: {reason}"),
        },
    )
}

/// Returns the report of an authorizer that the proxy calls.
fn call(name: &str, config: &ExternalAuthorization, of: &str) -> FilterReport {
    let share = match f64::from(config.enabled) / f64::from(ALL) {
        1.0.. => String::new(),
        share => format!(" for {} % of the {of}s", share * 100.0),
    };
    let text = format!("asks the authorizer {}{share}, which may refuse the {of}", config.cluster);
    FilterReport { asks: config.cluster.to_string(), ..effect(name, &text) }
}
