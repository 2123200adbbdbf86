//! Listeners and routes of gateways.
//!
//! The servers of all Gateways that select a proxy are merged by port ([`servers`]). Each port has one listener
//! ([`listeners`]). Plain-text HTTP servers of a port share a route table; each HTTPS server has its own ([`routes`]).
//! Certificates come from Secrets ([`secrets`]).

mod filter_chains;
mod listeners;
mod routes;
pub(super) mod secrets;
mod servers;
mod sources;
mod tls;

pub use sources::{ServerSource, gateway_l4_source, gateway_servers};

use skysail_xds::Resources;

use super::{CompileFindings, Scope, rbac};
use crate::ProxyView;

/// Adds the listeners and routes of a gateway.
pub(super) fn add(
    made: &mut Resources,
    scope: &Scope<'_>,
    view: &ProxyView,
    findings: &mut CompileFindings<'_>,
) {
    let merged = servers::merge(scope.world, view);
    let authorization = rbac::Authorization::new(scope.world, view, &[], findings);
    for listener in listeners::compile(scope, view, &merged, &authorization) {
        super::add(made, skysail_xds::Kind::Listener, &listener.name, &listener);
    }
    for (name, servers) in &merged.routes {
        let configuration = routes::compile(scope, &merged, name, servers);
        super::add(made, skysail_xds::Kind::Route, name, &configuration);
    }
    secrets::compile(scope.world, view, &merged).into_iter().for_each(|secret| made.insert(secret));
}
