//! Load balancing: `loadBalancer` of a DestinationRule. Clusters name the balancer; routes and TCP proxies define the
//! hash key.

use skysail_core::ClusterName;

use super::{
    Scope,
    pb::{UInt64Value, cluster, core, duration, route, types},
    policy::Effective,
};
use crate::api::{
    DestinationRule, Duration, TrafficPolicy, Typed,
    destination_rule::{ConsistentHash, LoadBalancer, SimpleLb, Warmup},
};

use cluster::cluster::{
    LbConfig, LbPolicy, LeastRequestLbConfig, MaglevLbConfig, RingHashLbConfig, RoundRobinLbConfig,
    SlowStartConfig,
};
use route::route_action::{
    HashPolicy,
    hash_policy::{ConnectionProperties, Cookie, CookieAttribute, Header, PolicySpecifier, QueryParameter},
};

/// Envoy's default of the minimum ring size. As in Istio, it is sent if a rule has neither a size nor `ringHash`.
const DEFAULT_RING_SIZE: u64 = 1024;

/// Sets the load balancer of a cluster.
pub(super) fn apply(made: &mut cluster::Cluster, balancer: Option<&LoadBalancer>) {
    made.lb_policy = LbPolicy::LeastRequest as i32;
    let Some(balancer) = balancer else { return };
    let slow_start = slow_start(balancer);
    match balancer.simple {
        Some(SimpleLb::RoundRobin) => {
            made.lb_policy = LbPolicy::RoundRobin as i32;
            made.lb_config = slow_start.map(|slow_start| {
                LbConfig::RoundRobinLbConfig(RoundRobinLbConfig { slow_start_config: Some(slow_start) })
            });
        }
        Some(SimpleLb::Random) => made.lb_policy = LbPolicy::Random as i32,
        _ => {
            made.lb_config = slow_start.map(|slow_start| {
                LbConfig::LeastRequestLbConfig(LeastRequestLbConfig {
                    slow_start_config: Some(slow_start),
                    ..Default::default()
                })
            });
        }
    }
    if let Some(consistent) = &balancer.consistent_hash {
        hash(made, consistent);
    }
}

fn hash(made: &mut cluster::Cluster, hash: &ConsistentHash) {
    if let Some(maglev) = &hash.maglev {
        made.lb_policy = LbPolicy::Maglev as i32;
        let config =
            size(maglev.table_size).map(|table_size| MaglevLbConfig { table_size: Some(table_size) });
        made.lb_config = config.map(LbConfig::MaglevLbConfig).or(made.lb_config.take());
        return;
    }
    ring(made, hash);
}

/// Configures a hash ring, which maps each key to its endpoint.
pub(super) fn ring(made: &mut cluster::Cluster, hash: &ConsistentHash) {
    made.lb_policy = LbPolicy::RingHash as i32;
    let minimum = match &hash.ring_hash {
        Some(ring) => size(ring.minimum_ring_size),
        None => size(hash.minimum_ring_size).or(size(DEFAULT_RING_SIZE)),
    };
    if minimum.is_some() {
        let config = RingHashLbConfig { minimum_ring_size: minimum, ..Default::default() };
        made.lb_config = Some(LbConfig::RingHashLbConfig(config));
    }
}

/// Returns a size; 0 means unset.
fn size(value: u64) -> Option<UInt64Value> {
    (value != 0).then_some(UInt64Value { value })
}

/// Returns the hash policy of a cluster: the part of a request that selects its endpoint.
pub(super) fn hash_policy(scope: &Scope<'_>, cluster: &str) -> Option<HashPolicy> {
    let name = ClusterName::parse(cluster)?;
    let rule = scope.world.destination_rule_for(name.host, scope.namespace, Some(scope.labels))?;
    let hash = consistent_hash(&rule, &name)?;
    let specifier = if let Some(header_name) = hash.http_header_name.clone() {
        PolicySpecifier::Header(Header { header_name, ..Default::default() })
    } else if let Some(cookie) = &hash.http_cookie {
        let attribute = |from: &crate::api::destination_rule::CookieAttribute| CookieAttribute {
            name: from.name.clone(),
            value: from.value.clone(),
        };
        PolicySpecifier::Cookie(Cookie {
            name: cookie.name.clone(),
            ttl: cookie.ttl.map(|length| duration(length.0)),
            path: cookie.path.clone(),
            attributes: cookie.attributes.iter().map(attribute).collect(),
        })
    } else if let Some(source_ip) = hash.use_source_ip {
        PolicySpecifier::ConnectionProperties(ConnectionProperties { source_ip })
    } else {
        let name = hash.http_query_parameter_name.clone()?;
        PolicySpecifier::QueryParameter(QueryParameter { name })
    };
    Some(HashPolicy { policy_specifier: Some(specifier), ..Default::default() })
}

/// Returns whether connections to a subset are balanced by source address. As in Istio, settings for single ports are
/// ignored, and a subset's load balancer replaces that of the rule.
pub(super) fn hashes_source_ip(rule: Option<&Typed<DestinationRule>>, subset: &str) -> bool {
    fn balancer(policy: Option<&TrafficPolicy>) -> Option<&LoadBalancer> {
        policy.and_then(|policy| policy.load_balancer.as_ref())
    }
    let whole = rule.and_then(|rule| balancer(rule.spec.traffic_policy.as_ref()));
    let mut subsets = rule.into_iter().flat_map(|rule| &rule.spec.subsets);
    let own = subsets.find(|known| !subset.is_empty() && known.name == subset);
    let own = own.and_then(|subset| balancer(subset.traffic_policy.as_ref()));
    let hash = own.or(whole).and_then(|balancer| balancer.consistent_hash.as_ref());
    hash.is_some_and(|hash| hash.use_source_ip == Some(true))
}

fn consistent_hash<'a>(
    rule: &'a Typed<DestinationRule>,
    name: &ClusterName<'_>,
) -> Option<&'a ConsistentHash> {
    let spec = &rule.spec;
    let subset = spec.subsets.iter().find(|subset| subset.name == name.subset);
    let effective = match subset {
        Some(subset) => Effective::of_rule(spec, name.port).of_subset(subset, name.port),
        None => Effective::of_rule(spec, name.port),
    };
    effective.load_balancer?.consistent_hash.as_ref()
}

/// Returns the slow start of new endpoints.
fn slow_start(balancer: &LoadBalancer) -> Option<SlowStartConfig> {
    let old =
        balancer.warmup_duration_secs.map(|length| Warmup { duration: Some(length), ..Default::default() });
    let warmup = balancer.warmup.clone().or(old)?;
    let Duration(window) = warmup.duration?;
    Some(SlowStartConfig {
        slow_start_window: Some(duration(window)),
        aggression: warmup.aggression.map(|value| core::RuntimeDouble {
            default_value: value,
            // The key must not be empty. It is never set at run time; istiod sends the same text.
            runtime_key: "(".into(),
        }),
        min_weight_percent: warmup.minimum_percent.map(|value| types::Percent { value }),
    })
}
