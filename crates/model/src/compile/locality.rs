//! Locality load balancing (`localityLbSetting`, `zoneAwareLbSetting`, `trafficDistribution`): weights and priorities
//! of endpoints by their locality and the client's.
//!
//! As in Istio, shares are used if the rule has them. Otherwise endpoints get priorities: by labels if the rule names
//! some, and by region, zone and sub-zone. Rules need outlier detection for it, a Service's `trafficDistribution` does
//! not.

use std::{borrow::Cow, collections::BTreeMap};

use super::{
    Scope,
    pb::{UInt64Value, cluster, endpoint, types, uint32},
    policy::Effective,
};
use crate::{
    api::{
        DestinationRule, Labels, Service, Typed,
        destination_rule::{Distribute, Failover, LocalityLb, ZoneAwareLb},
        kube::TrafficDistribution,
        locality::{CLUSTER, HOSTNAME, Locality, NETWORK, REGION, SUBZONE, ZONE},
    },
    world::Endpoint,
};

use cluster::cluster::common_lb_config::{
    LocalityConfigSpecifier, LocalityWeightedLbConfig, ZoneAwareLbConfig,
};

/// Labels of endpoints that clients prefer by the distribution of a Service, the most important first.
static SAME_NODE: [&str; 5] = [NETWORK, REGION, ZONE, SUBZONE, HOSTNAME];
/// Number of leading labels of [`SAME_NODE`] that endpoints of the same zone have in common.
const SAME_ZONE: usize = 3;

/// Default setting: the nearest endpoints first.
static NEAREST: LocalityLb =
    LocalityLb { distribute: Vec::new(), failover: Vec::new(), failover_priority: Vec::new(), enabled: None };

/// Endpoints sent as one group.
pub(super) struct LocalityGroup<'a> {
    pub(super) made: endpoint::LocalityLbEndpoints,
    pub(super) locality: &'a Locality,
    /// Endpoints of the model from which the group was made.
    pub(super) members: Vec<Cow<'a, Endpoint>>,
}

/// Setting in effect.
#[derive(Clone, Copy)]
enum LocalitySetting<'a> {
    Locality(&'a LocalityLb),
    /// Zones of a region share the traffic by capacity.
    Zones(&'a ZoneAwareLb),
    /// Endpoints with the same labels first.
    Labels(&'static [&'static str]),
}

/// Returns the effective setting; `None` if it is disabled. As in Istio, the first of these applies: that of the rule,
/// of the service, of the mesh. `zoneAwareLbSetting` has precedence over `localityLbSetting`.
fn setting<'a>(
    scope: &Scope<'a>,
    service: &Typed<Service>,
    effective: &Effective<'a>,
) -> Option<LocalitySetting<'a>> {
    let (world, mesh) = (scope.world, scope.world.mesh());
    let balancer = effective.load_balancer;
    let zones = |of: &'a ZoneAwareLb| LocalitySetting::Zones(of);
    let of_rule = balancer.and_then(|balancer| {
        let zones = balancer.zone_aware_lb_setting.as_ref().map(zones);
        zones.or(balancer.locality_lb_setting.as_ref().map(LocalitySetting::Locality))
    });
    let of_mesh = || {
        let zones = mesh.zone_aware_lb_setting.as_ref().map(zones);
        zones.or(mesh.locality_lb_setting.as_ref().map(LocalitySetting::Locality))
    };
    let of_service = || match world.traffic_distribution(service) {
        TrafficDistribution::Any => None,
        TrafficDistribution::PreferSameZone => Some(LocalitySetting::Labels(&SAME_NODE[..SAME_ZONE])),
        TrafficDistribution::PreferSameNode => Some(LocalitySetting::Labels(&SAME_NODE)),
    };
    match of_rule.or_else(of_service).or_else(of_mesh).unwrap_or(LocalitySetting::Locality(&NEAREST)) {
        LocalitySetting::Locality(setting) if setting.enabled == Some(false) => None,
        setting => Some(setting),
    }
}

/// Returns whether the priorities of a service's endpoints may depend on the client's node.
pub(super) fn depends_on_node(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    rule: Option<&DestinationRule>,
) -> bool {
    scope.world.mesh().prefers_node()
        || scope.world.traffic_distribution(service) == TrafficDistribution::PreferSameNode
        || rule.is_some_and(DestinationRule::prefers_node)
}

/// Returns the node of an endpoint, or the value of its label; empty if both are unknown.
pub(super) fn node_of(member: &Endpoint) -> &str {
    let Some(pod) = &member.pod else { return "" };
    let of_label = || pod.meta.labels.get(HOSTNAME).map_or("", String::as_str);
    if pod.spec.node.is_empty() { of_label() } else { &pod.spec.node }
}

/// Returns how a cluster is balanced between localities; `None` if it is not.
pub(super) fn specifier(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    effective: &Effective<'_>,
) -> Option<LocalityConfigSpecifier> {
    let weighted = || LocalityConfigSpecifier::LocalityWeightedLbConfig(LocalityWeightedLbConfig::default());
    let setting = match setting(scope, service, effective)? {
        LocalitySetting::Labels(_) => return Some(weighted()),
        LocalitySetting::Zones(zones) => {
            let is_off = zones.enabled == Some(false);
            return Some(LocalityConfigSpecifier::ZoneAwareLbConfig(ZoneAwareLbConfig {
                routing_enabled: is_off.then(types::Percent::default),
                min_cluster_size: zones.min_cluster_size.map(|value| UInt64Value { value: value.into() }),
                ..Default::default()
            }));
        }
        LocalitySetting::Locality(setting) => setting,
    };
    let failover = !setting.failover.is_empty() || !setting.failover_priority.is_empty();
    let is_weighted = !setting.distribute.is_empty() || effective.outlier_detection.is_some() && failover;
    is_weighted.then(weighted)
}

/// Sets weights or priorities of groups; may split groups.
pub(super) fn apply<'a>(
    scope: &Scope<'_>,
    service: &Typed<Service>,
    effective: &Effective<'_>,
    mut groups: Vec<LocalityGroup<'a>>,
) -> Vec<LocalityGroup<'a>> {
    let setting = match setting(scope, service, effective) {
        None => return groups,
        Some(LocalitySetting::Labels(names)) => {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            return by_labels(scope, &names, groups);
        }
        Some(LocalitySetting::Zones(zones)) => return by_zones(scope, zones, groups),
        Some(LocalitySetting::Locality(setting)) => setting,
    };
    if !setting.distribute.is_empty() {
        if let Some(shares) = setting.distribute.iter().find(|shares| matches(scope.locality, &shares.from)) {
            distribute(shares, &mut groups);
        }
    } else if effective.outlier_detection.is_some() {
        if !setting.failover_priority.is_empty() {
            groups = by_labels(scope, &setting.failover_priority, groups);
        }
        if setting.failover_priority.is_empty() || !setting.failover.is_empty() {
            by_distance(scope.locality, &setting.failover, &mut groups);
        }
    }
    groups
}

/// Sets priorities by labels, if the setting names some, and by region: the zones of one region have the same.
fn by_zones<'a>(
    scope: &Scope<'_>,
    zones: &ZoneAwareLb,
    mut groups: Vec<LocalityGroup<'a>>,
) -> Vec<LocalityGroup<'a>> {
    if zones.enabled == Some(false) {
        return groups;
    }
    if !zones.failover_priority.is_empty() {
        groups = by_labels(scope, &zones.failover_priority, groups);
    }
    by_region(&scope.locality.region, &zones.failover, &mut groups);
    groups
}

/// Sets priorities by region, that of the client first, within the existing priorities.
fn by_region(client: &str, failover: &[Failover], groups: &mut [LocalityGroup<'_>]) {
    let takes_over = failover.iter().find(|failover| failover.from == client);
    for group in groups.iter_mut() {
        let place = &group.locality.region;
        let distance = match takes_over {
            _ if place == client => 0,
            Some(failover) if failover.to == *place => 1,
            _ => 2,
        };
        group.made.priority = group.made.priority * 3 + distance;
    }
    close_gaps(groups);
}

/// Returns whether a locality matches `region/zone/subzone`. Each part may be `*`, and the later ones may be missing.
fn matches(place: &Locality, text: &str) -> bool {
    let mut parts = text.splitn(3, '/');
    let region = parts.next().unwrap_or_default();
    let mut meant = |own: &str| {
        let part = parts.next().unwrap_or_default();
        part.is_empty() || part == "*" || part == own
    };
    (region == "*" || region == place.region) && meant(&place.zone) && meant(&place.subzone)
}

/// Distributes the shares over the localities; those without a share lose their endpoints.
fn distribute(shares: &Distribute, groups: &mut [LocalityGroup<'_>]) {
    let mut left: Vec<&mut LocalityGroup<'_>> = groups.iter_mut().collect();
    for (place, share) in &shares.to {
        let (mut here, others): (Vec<_>, Vec<_>) =
            left.into_iter().partition(|group| matches(group.locality, place));
        left = others;
        let weight =
            |group: &LocalityGroup<'_>| group.made.load_balancing_weight.map_or(1, |weight| weight.value);
        let total: u64 = here.iter().map(|group| u64::from(weight(group))).sum();
        for group in &mut here {
            // The part of each locality is rounded up, so that none gets zero.
            let part = (u64::from(weight(group)) * u64::from(*share)).div_ceil(total.max(1));
            if part > 0 {
                group.made.load_balancing_weight = uint32(u32::try_from(part).unwrap_or(u32::MAX));
            }
        }
    }
    left.into_iter().for_each(|group| group.made.lb_endpoints.clear());
}

/// Sets priorities by distance, the nearest first, within the existing priorities.
fn by_distance(client: &Locality, failover: &[Failover], groups: &mut [LocalityGroup<'_>]) {
    for group in groups.iter_mut() {
        let place = group.locality;
        let distance = if place.region != client.region {
            let takes_over = failover.iter().find(|failover| failover.from == client.region);
            if takes_over.is_some_and(|failover| failover.to != place.region) { 4 } else { 3 }
        } else if place.zone != client.zone {
            2
        } else {
            u32::from(place.subzone != client.subzone)
        };
        group.made.priority = group.made.priority * 5 + distance;
    }
    close_gaps(groups);
}

/// Sets priorities by the number of leading labels that equal the client's or the value in the setting. As in Istio, the
/// other labels also order the endpoints of other networks, if the network is the first label.
fn by_labels<'a>(
    scope: &Scope<'_>,
    wanted: &[String],
    groups: Vec<LocalityGroup<'a>>,
) -> Vec<LocalityGroup<'a>> {
    let own = labels(scope, scope.labels, scope.locality, scope.network);
    let has_network = wanted.first().is_some_and(|label| label == NETWORK);
    let wanted: Vec<(&str, Option<&str>)> = wanted
        .iter()
        .map(|label| match label.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            // Elsewhere it equals no endpoint's.
            None if *label == HOSTNAME => (HOSTNAME, scope.node),
            None => (&**label, Some(own.get(&**label).map_or("", String::as_str))),
        })
        .collect();
    let (network, others) = wanted.split_at(usize::from(has_network));
    let none = Labels::default();
    let mut made = Vec::new();
    for group in groups {
        let mut parts: BTreeMap<usize, LocalityGroup<'a>> = BTreeMap::new();
        for (member, lb) in group.members.into_iter().zip(group.made.lb_endpoints) {
            let of_pod = member.pod.as_ref().map_or(&none, |pod| &pod.meta.labels);
            let mut known = labels(scope, of_pod, &member.locality, scope.network_of(&member));
            known.insert(HOSTNAME.to_owned(), node_of(&member).to_owned());
            let is_other = |(name, value): &(&str, Option<&str>)| {
                Some(known.get(*name).map_or("", String::as_str)) != *value
            };
            let in_network = others.iter().position(is_other).map_or(0, |at| others.len() - at);
            let priority = if network.iter().any(is_other) { wanted.len() + in_network } else { in_network };
            let part = parts.entry(priority).or_insert_with(|| LocalityGroup {
                made: endpoint::LocalityLbEndpoints {
                    locality: group.made.locality.clone(),
                    priority: u32::try_from(priority).unwrap_or(u32::MAX),
                    load_balancing_weight: uint32(0),
                    ..Default::default()
                },
                locality: group.locality,
                members: Vec::new(),
            });
            let weight = |weight: Option<super::pb::UInt32Value>| weight.map_or(0, |weight| weight.value);
            let sum = weight(part.made.load_balancing_weight) + weight(lb.load_balancing_weight);
            part.made.load_balancing_weight = uint32(sum);
            part.made.lb_endpoints.push(lb);
            part.members.push(member);
        }
        made.extend(parts.into_values());
    }
    close_gaps(&mut made);
    made
}

/// Returns the labels of a workload with those of its locality, network and cluster.
fn labels(scope: &Scope<'_>, own: &Labels, place: &Locality, network: &str) -> Labels {
    let mut labels = own.clone();
    // Gateways of other networks name their cluster.
    labels.entry(CLUSTER.to_owned()).or_insert_with(|| scope.cluster_id.to_owned());
    for (name, value) in
        [(REGION, &*place.region), (ZONE, &place.zone), (SUBZONE, &place.subzone), (NETWORK, network)]
    {
        if !value.is_empty() {
            labels.insert(name.to_owned(), value.to_owned());
        }
    }
    labels
}

/// Renumbers priorities from 0 up without gaps.
fn close_gaps(groups: &mut [LocalityGroup<'_>]) {
    let mut used: Vec<u32> = groups.iter().map(|group| group.made.priority).collect();
    used.sort_unstable();
    used.dedup();
    for group in groups {
        let at = used.partition_point(|priority| *priority < group.made.priority);
        group.made.priority = u32::try_from(at).unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(text: &str) -> Locality {
        let mut parts = text.split('/').map(str::to_owned);
        let mut next = || parts.next().unwrap_or_default();
        Locality { region: next(), zone: next(), subzone: next() }
    }

    fn group(locality: &Locality, endpoints: u32) -> LocalityGroup<'_> {
        let made = endpoint::LocalityLbEndpoints {
            load_balancing_weight: uint32(endpoints),
            lb_endpoints: vec![Default::default(); endpoints as usize],
            ..Default::default()
        };
        LocalityGroup { made, locality, members: Vec::new() }
    }

    #[test]
    fn localities_match_by_part() {
        let here = place("r/z/s");
        for (text, expected) in [
            ("r", true),
            ("r/z", true),
            ("r/*", true),
            ("r/z/*", true),
            ("r/z/s", true),
            ("*", true),
            ("r/x", false),
            ("x", false),
            ("r/*/x", false),
        ] {
            assert_eq!(matches(&here, text), expected, "{text}");
        }
    }

    #[test]
    fn shares_are_divided_by_the_number_of_endpoints() {
        let places = ["r/a", "r/b", "x/a", "y/a"].map(place);
        let mut groups: Vec<_> =
            places.iter().zip([1, 2, 3, 4]).map(|(place, count)| group(place, count)).collect();
        let to = [("r/*".to_owned(), 70), ("x/*".to_owned(), 30)].into();
        distribute(&Distribute { from: "r/a".into(), to }, &mut groups);
        let weights: Vec<_> =
            groups.iter().map(|group| group.made.load_balancing_weight.unwrap().value).collect();
        assert_eq!(weights, [24, 47, 30, 4]);
        assert_eq!(groups[3].made.lb_endpoints, [], "who has no share gets nothing");
        assert_eq!(groups[2].made.lb_endpoints.len(), 3);
    }

    #[test]
    fn the_nearest_endpoints_have_the_highest_priority() {
        let places = ["r/a/s", "r/a/t", "r/b/s", "x/a/s", "y/a/s"].map(place);
        let priorities = |client: &str, failover: &[Failover]| -> Vec<u32> {
            let mut groups: Vec<_> = places.iter().map(|place| group(place, 1)).collect();
            by_distance(&place(client), failover, &mut groups);
            groups.iter().map(|group| group.made.priority).collect()
        };
        assert_eq!(priorities("r/a/s", &[]), [0, 1, 2, 3, 3]);
        let failover = [Failover { from: "r".into(), to: "y".into() }];
        assert_eq!(priorities("r/a/s", &failover), [0, 1, 2, 4, 3]);
        assert_eq!(priorities("x/b/s", &failover), [1, 1, 1, 0, 1]);
        assert_eq!(priorities("z/z/z", &failover), [0, 0, 0, 0, 0]);
    }

    #[test]
    fn zones_of_a_region_have_the_same_priority() {
        let places = ["r/a", "r/b", "x/a", "y/a"].map(place);
        let priorities = |client: &str, failover: &[Failover]| -> Vec<u32> {
            let mut groups: Vec<_> = places.iter().map(|place| group(place, 1)).collect();
            by_region(client, failover, &mut groups);
            groups.iter().map(|group| group.made.priority).collect()
        };
        assert_eq!(priorities("r", &[]), [0, 0, 1, 1]);
        assert_eq!(priorities("r", &[Failover { from: "r".into(), to: "y".into() }]), [0, 0, 2, 1]);
        assert_eq!(priorities("z", &[]), [0, 0, 0, 0]);
    }
}
