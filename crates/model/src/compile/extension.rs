//! Filters of WasmPlugins and TrafficExtensions, in their places among the policies of a chain.
//!
//! The name of a filter has the extension's kind, namespace and name. Settings of a route for the filter of Lua
//! therefore do not change it.

use std::collections::BTreeMap;

use skysail_core::names::Direction;
use skysail_xds::envoy::pb::envoy::extensions::filters::{
    http::{lua::v3::Lua, rbac::v3::Rbac as HttpRbac},
    network::{http_connection_manager::v3::HttpFilter, rbac::v3::Rbac as NetworkRbac},
};

use super::{
    filters,
    packed::{self, RbacRules},
    pb::{core, listener, pack, rbac},
};
use crate::{
    ProxyView, Role, World,
    api::{extension::Phase, telemetry::Mode},
    world::{AppliedExtension, ExtensionEffect},
};

use rbac::{Permission, Policy, Principal, permission, principal, rbac::Action as Effect};

/// Start of the names of filters.
const NAME: &str = "extensions.istio.io";

/// Extensions of a proxy.
pub(super) struct Extensions<'a> {
    applied: Vec<AppliedExtension<'a>>,
}

impl<'a> Extensions<'a> {
    /// Selects the extensions of a proxy.
    pub(super) fn new(world: &'a World, view: &ProxyView) -> Self {
        Self { applied: world.extensions(&view.namespace, &view.labels) }
    }

    /// Returns the HTTP filters of a phase, in the order of their priorities.
    pub(super) fn http(
        &self,
        phase: Phase,
        side: Mode,
        port: u16,
    ) -> impl Iterator<Item = HttpFilter> + use<'_, 'a> {
        let of_phase = self.of(side, port).filter(move |extension| extension.phase == phase);
        of_phase.filter_map(|extension| {
            let config = match extension.effect {
                ExtensionEffect::Lua(script) => pack(&Lua {
                    default_source_code: Some(core::DataSource {
                        specifier: Some(core::data_source::Specifier::InlineString(script.to_owned())),
                        ..Default::default()
                    }),
                    ..Default::default()
                }),
                ExtensionEffect::RefusesRequests => {
                    packed::with_rules(&HttpRbac::default(), Some(&refusal(extension)), None)
                }
                ExtensionEffect::RefusesConnections => return None,
            };
            Some(filters::http(&name(extension), config))
        })
    }

    /// Returns the network filters.
    pub(super) fn network(
        &self,
        side: Mode,
        port: u16,
    ) -> impl Iterator<Item = listener::Filter> + use<'_, 'a> {
        let of_connections =
            |extension: &&AppliedExtension<'_>| extension.effect == ExtensionEffect::RefusesConnections;
        self.of(side, port).filter(of_connections).map(|extension| {
            let config = NetworkRbac { stat_prefix: "tcp.".into(), ..Default::default() };
            filters::network(&name(extension), packed::with_rules(&config, Some(&refusal(extension)), None))
        })
    }

    fn of(&self, side: Mode, port: u16) -> impl Iterator<Item = &AppliedExtension<'a>> + use<'_, 'a> {
        self.applied.iter().filter(move |extension| extension.matches(side, port))
    }
}

/// Returns the side of a chain. As in Istio, gateways are clients.
pub(super) fn side(direction: Direction, role: Role) -> Mode {
    if direction == Direction::Inbound && role == Role::Sidecar { Mode::Server } else { Mode::Client }
}

fn name(extension: &AppliedExtension<'_>) -> String {
    let kind = extension.kind.as_str().to_lowercase();
    format!("{NAME}/{kind}/{}.{}", extension.meta.namespace, extension.meta.name)
}

/// Returns rules that refuse everything.
fn refusal(extension: &AppliedExtension<'_>) -> RbacRules {
    let any = Policy {
        permissions: vec![Permission { rule: Some(permission::Rule::Any(true)) }],
        principals: vec![Principal { identifier: Some(principal::Identifier::Any(true)) }],
        ..Default::default()
    };
    RbacRules { action: Effect::Deny, policies: BTreeMap::from([(name(extension), any)]) }
}
