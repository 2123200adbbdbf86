//! Conditions of VirtualServices on the client: the port, the gateway, the labels and the namespace. They are decided
//! when routes and filter chains are compiled, because all of them are known then.

use crate::{
    api::{Labels, selects},
    world::gateway_name,
};

/// Conditions of a match on the client.
pub(super) struct ClientConditions<'m> {
    /// Port; `None` for any.
    pub(super) port: Option<u32>,
    /// Gateways, as the VirtualService names them. Empty: those of the VirtualService.
    pub(super) gateways: &'m [String],
    /// Labels of the client.
    pub(super) labels: &'m Labels,
    /// Namespace of the client; empty for any.
    pub(super) namespace: &'m str,
}

/// Properties of a client.
pub(super) struct ClientFacts<'c> {
    /// Port of the service, or of the server of a Gateway.
    pub(super) port: u16,
    /// Gateway (`NAMESPACE/NAME`); `None` for a sidecar.
    pub(super) gateway: Option<&'c str>,
    /// Labels.
    pub(super) labels: &'c Labels,
    /// Namespace.
    pub(super) namespace: &'c str,
}

/// Condition that a client does not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exclusion {
    /// `port`
    Port,
    /// `gateways`
    Gateways,
    /// `sourceLabels`
    Labels,
    /// `sourceNamespace`
    Namespace,
}

/// Returns the first condition of a match that a client does not meet. `owner` is the namespace of the VirtualService.
pub(super) fn exclusion(
    wanted: &ClientConditions<'_>,
    client: &ClientFacts<'_>,
    owner: &str,
) -> Option<Exclusion> {
    let is_at = |name: &String| match client.gateway {
        Some(gateway) => gateway_name(name, owner) == gateway,
        None => name == "mesh",
    };
    if wanted.port.is_some_and(|port| port != u32::from(client.port)) {
        Some(Exclusion::Port)
    } else if !wanted.gateways.is_empty() && !wanted.gateways.iter().any(is_at) {
        Some(Exclusion::Gateways)
    } else if !selects(wanted.labels, client.labels) {
        Some(Exclusion::Labels)
    } else if !wanted.namespace.is_empty() && wanted.namespace != client.namespace {
        Some(Exclusion::Namespace)
    } else {
        None
    }
}
