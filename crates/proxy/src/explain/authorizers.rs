//! External authorizers: whether a request is one about which an authorizer decides, and what follows if it
//! cannot.

use serde_json::{Map, Value};
use skysail_policy::{config::authorization::ExternalAuthorization, matching, route::NoRoute};

use super::{
    ProxyConfiguration,
    filters::{Passage, effect},
    report::{Explanation, FilterReport, Outcome},
    target::EndpointProtocol,
};

/// 100 % in millionths.
const ALL: u32 = 1_000_000;

/// Evaluates the authorizer of a filter chain for a connection, after policies that set these metadata.
pub(super) fn connection(
    config: &ExternalAuthorization,
    metadata: &Map<String, Value>,
    explained: &mut Explanation,
) {
    if selects(config, metadata) {
        explained.filters.push(question("ext_authz", config, "connection"));
    }
}

/// Evaluates an authorizer. Returns whether the request passes it, or passes if the authorizer admits it.
pub(super) fn request(
    passage: &Passage<'_>,
    name: &str,
    config: &ExternalAuthorization,
    explained: &mut Explanation,
) -> bool {
    // As on the request path, a request that no route matches is refused without a question.
    let has_route = !matches!(passage.found, Err(NoRoute::NoMatch));
    if !selects(config, &passage.metadata) || !has_route || config.enabled == 0 {
        return true;
    }
    let Some(reason) = failure(passage, config).filter(|_| config.enabled >= ALL) else {
        explained.filters.push(question(name, config, "request"));
        return true;
    };
    let cluster = &config.cluster;
    if config.failure_allowed {
        let text =
            format!("the authorizer {cluster} cannot answer ({reason}), and its failure admits requests");
        explained.filters.push(effect(name, &text));
        return true;
    }
    explained.filters.push(effect(name, &format!("the authorizer {cluster} cannot answer: {reason}")));
    let status = config.status_on_error;
    explained.outcome = Outcome::Responded(status, format!("the authorizer cannot answer: {reason}"));
    false
}

/// Returns whether the policies before an authorizer select the request for it.
fn selects(config: &ExternalAuthorization, metadata: &Map<String, Value>) -> bool {
    config.enabled_metadata.as_ref().is_none_or(|test| matching::metadata(test, Some(metadata)))
}

/// Returns why no authorizer can answer; `None` if one may.
fn failure(passage: &Passage<'_>, config: &ExternalAuthorization) -> Option<String> {
    let configuration: &ProxyConfiguration = passage.configuration;
    let sends = EndpointProtocol::Bytes { is_tunnel: false };
    let target = configuration.target(&config.cluster, 1.0, passage.subject.destination, sends, 0);
    target.failure.map(|(_, reason)| reason)
}

fn question(name: &str, config: &ExternalAuthorization, of: &str) -> FilterReport {
    let share = match f64::from(config.enabled) / f64::from(ALL) {
        1.0.. => String::new(),
        share => format!(" for {} % of the {of}s", share * 100.0),
    };
    let text = format!("asks the authorizer {}{share}, which may refuse the {of}", config.cluster);
    FilterReport { asks: config.cluster.to_string(), ..effect(name, &text) }
}
