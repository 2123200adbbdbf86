//! Endpoints of other networks. Clients reach them through the gateways of their network, which select the endpoint by
//! the server name of mutual TLS.

use std::{borrow::Cow, collections::BTreeMap, net::IpAddr, sync::Arc};

use skysail_core::ClusterName;
use skysail_xds::istio;

use super::{
    Scope,
    locality::LocalityGroup,
    pb::{address, core, endpoint, fields, uint32},
};
use crate::{
    api::{
        Address, Meta, Pod, Typed,
        locality::{CLUSTER, Locality, NETWORK},
    },
    world::{Endpoint, NetworkGateway},
};

/// Key of the metadata by which clusters choose mutual TLS for an endpoint.
pub(super) const TLS_MATCH: &str = "envoy.transport_socket_match";

/// Form of the clusters of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClusterForm {
    /// Destination of routes, `outbound|PORT|SUBSET|HOST`.
    Routed,
    /// Destination of TLS that a gateway between networks forwards, named as its server name:
    /// `outbound_.PORT_.SUBSET_.HOST`.
    Forwarded,
}

impl ClusterForm {
    /// Returns the name of a cluster.
    pub(super) fn name(self, of: &ClusterName<'_>) -> String {
        match self {
            Self::Routed => of.to_string(),
            Self::Forwarded => of.sni(),
        }
    }
}

/// Replaces endpoints of other networks by the gateways of these networks. As in Istio, an endpoint that takes no
/// mutual TLS is left out, and one of a network without a gateway is reached directly.
pub(super) fn through_gateways<'a>(
    scope: &Scope<'_>,
    groups: Vec<LocalityGroup<'a>>,
) -> Vec<LocalityGroup<'a>> {
    let is_hidden = |member: &Cow<'_, Endpoint>| member.address == Address::Hidden;
    let has_hidden = || groups.iter().any(|group| group.members.iter().any(is_hidden));
    if scope.world.topology().is_flat() && !has_hidden() {
        return groups;
    }
    let gateways = scope.world.topology().gateways(scope.cluster_id);
    let scale = scale(&gateways, scope.cluster_id);
    groups.into_iter().map(|group| of_group(scope, &gateways, scale, group)).collect()
}

/// Removes the endpoints that take no mutual TLS: a gateway cannot see whether the TLS that it forwards is mutual.
pub(super) fn mutual_only<'a>(mut groups: Vec<LocalityGroup<'a>>) -> Vec<LocalityGroup<'a>> {
    for group in &mut groups {
        let members = std::mem::take(&mut group.members).into_iter();
        let endpoints = std::mem::take(&mut group.made.lb_endpoints);
        let kept = members.zip(endpoints).filter(|(_, made)| takes_mutual_tls(made));
        (group.members, group.made.lb_endpoints) = kept.unzip();
        refresh_weight(&mut group.made);
    }
    groups
}

/// Returns the factor by which the weights of endpoints are multiplied: the least common multiple of the numbers of
/// gateways of the networks. So each weight can be divided among the gateways of any network.
fn scale(gateways: &BTreeMap<&str, Vec<NetworkGateway>>, cluster: &str) -> u32 {
    let numbers = gateways.values().flat_map(|all| {
        let here = all.iter().filter(|gateway| gateway.cluster == cluster).count();
        [here, all.len() - here, all.len()]
    });
    let numbers = numbers.filter_map(|number| u32::try_from(number).ok()).filter(|number| *number > 0);
    numbers.fold(1, |multiple, number| {
        let (mut divisor, mut rest) = (multiple, number);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        multiple.saturating_mul(number / divisor)
    })
}

fn of_group<'a>(
    scope: &Scope<'_>,
    gateways: &BTreeMap<&str, Vec<NetworkGateway>>,
    scale: u32,
    group: LocalityGroup<'a>,
) -> LocalityGroup<'a> {
    let mut made = LocalityGroup { members: Vec::new(), ..group };
    let endpoints = std::mem::take(&mut made.made.lb_endpoints);
    let mut shares: BTreeMap<&NetworkGateway, u32> = BTreeMap::new();
    let count = endpoints.len();
    for (member, mut endpoint) in group.members.into_iter().zip(endpoints) {
        let weight =
            endpoint.load_balancing_weight.map_or(1, |weight| weight.value.max(1)).saturating_mul(scale);
        endpoint.load_balancing_weight = uint32(weight);
        let network = scope.network_of(&member);
        let selected = selected(gateways.get(network).map_or(&[][..], Vec::as_slice), scope.cluster_id);
        // A client whose network is unknown uses the gateways too.
        let is_direct = network.is_empty() || scope.network == network;
        if is_direct || selected.is_empty() {
            if member.address != Address::Hidden {
                made.members.push(member);
                made.made.lb_endpoints.push(endpoint);
            }
            continue;
        }
        let reachable: Vec<_> = selected.into_iter().filter(|gateway| is_reachable(scope, gateway)).collect();
        if takes_mutual_tls(&endpoint) {
            let share = weight / u32::try_from(reachable.len().max(1)).unwrap_or(u32::MAX);
            for gateway in reachable {
                let sum = shares.entry(gateway).or_default();
                *sum = sum.saturating_add(share);
            }
        }
    }
    if made.members.len() == count {
        // The weight of the locality may be less than the sum: all addresses of one name count once.
        let sum = made.made.load_balancing_weight.map_or(0, |weight| weight.value);
        made.made.load_balancing_weight = uint32(sum.saturating_mul(scale));
        return made;
    }
    let mut shares: Vec<_> = shares.into_iter().collect();
    shares.sort_by_cached_key(|(gateway, _)| (gateway.address.to_string(), gateway.port));
    for (gateway, weight) in shares {
        made.members.push(Cow::Owned(gateway_member(gateway)));
        made.made.lb_endpoints.push(gateway_endpoint(gateway, weight.max(1)));
    }
    refresh_weight(&mut made.made);
    made
}

/// Returns the gateways to use: those of the client's cluster, or all if it has none. Endpoints are of this cluster.
fn selected<'a>(all: &'a [NetworkGateway], cluster: &str) -> Vec<&'a NetworkGateway> {
    let here: Vec<_> = all.iter().filter(|gateway| gateway.cluster == cluster).collect();
    if here.is_empty() { all.iter().collect() } else { here }
}

/// Returns whether the client has an address of the gateway's family. The families of some clients are unknown.
fn is_reachable(scope: &Scope<'_>, gateway: &NetworkGateway) -> bool {
    let is_v4 = match gateway.address {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => ip.to_ipv4_mapped().is_some(),
    };
    scope.ipv4 == scope.ipv6 || is_v4 == scope.ipv4
}

fn takes_mutual_tls(made: &endpoint::LbEndpoint) -> bool {
    made.metadata.as_ref().is_some_and(|metadata| metadata.filter_metadata.contains_key(TLS_MATCH))
}

/// Sets the weight of a locality to the sum of its endpoints'.
fn refresh_weight(made: &mut endpoint::LocalityLbEndpoints) {
    let weights =
        made.lb_endpoints.iter().map(|made| made.load_balancing_weight.map_or(0, |weight| weight.value));
    let sum = weights.fold(0, u32::saturating_add);
    made.load_balancing_weight = uint32(sum).filter(|_| !made.lb_endpoints.is_empty());
}

/// Returns a gateway as an endpoint of the model. Its labels decide its priority.
fn gateway_member(gateway: &NetworkGateway) -> Endpoint {
    let labels = [(NETWORK, &gateway.network), (CLUSTER, &gateway.cluster)];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.clone())).into();
    let meta = Meta { labels: Arc::new(labels), ..Meta::default() };
    Endpoint {
        address: Address::Ip(gateway.address),
        name: None,
        port: gateway.port,
        pod: Some(Arc::new(Typed { meta, spec: Pod::default() })),
        locality: Locality::default(),
        weight: 1,
        ready: true,
    }
}

fn gateway_endpoint(gateway: &NetworkGateway, weight: u32) -> endpoint::LbEndpoint {
    let filter_metadata = [
        ("istio".to_owned(), fields([("workload", istio::string(format!(";;;;{}", gateway.cluster)))])),
        (TLS_MATCH.to_owned(), fields([("tlsMode", istio::string("istio"))])),
    ];
    endpoint::LbEndpoint {
        metadata: Some(core::Metadata { filter_metadata: filter_metadata.into(), ..Default::default() }),
        load_balancing_weight: uint32(weight),
        host_identifier: Some(endpoint::lb_endpoint::HostIdentifier::Endpoint(endpoint::Endpoint {
            address: Some(address(gateway.address.to_string(), gateway.port)),
            ..Default::default()
        })),
        ..Default::default()
    }
}
