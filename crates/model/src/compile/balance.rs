//! How an endpoint is picked: `loadBalancer` of a DestinationRule.

use super::pb::{UInt64Value, cluster, core, duration, route, types};
use crate::api::{
    Duration,
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

/// Points on the ring unless said otherwise, as Istio has it.
const RING_SIZE: u64 = 1024;

/// Sets how a cluster picks.
pub(super) fn apply(made: &mut cluster::Cluster, balancer: Option<&LoadBalancer>) {
    made.lb_policy = LbPolicy::LeastRequest as i32;
    let Some(balancer) = balancer else { return };
    if let Some(hash) = &balancer.consistent_hash {
        apply_hash(made, hash);
        return;
    }
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
}

/// What of a request is hashed; empty unless the rule balances by hash.
pub(super) fn hash_policy(balancer: Option<&LoadBalancer>) -> Vec<HashPolicy> {
    let Some(hash) = balancer.and_then(|balancer| balancer.consistent_hash.as_ref()) else {
        return Vec::new();
    };
    let specifier = if let Some(name) = &hash.http_header_name {
        PolicySpecifier::Header(Header { header_name: name.clone(), ..Default::default() })
    } else if let Some(cookie) = &hash.http_cookie {
        let attributes = cookie.attributes.iter();
        PolicySpecifier::Cookie(Cookie {
            name: cookie.name.clone(),
            ttl: cookie.ttl.map(|ttl| duration(ttl.0)),
            path: cookie.path.clone(),
            attributes: attributes
                .map(|from| CookieAttribute { name: from.name.clone(), value: from.value.clone() })
                .collect(),
        })
    } else if let Some(name) = &hash.http_query_parameter_name {
        PolicySpecifier::QueryParameter(QueryParameter { name: name.clone() })
    } else if hash.use_source_ip == Some(true) {
        PolicySpecifier::ConnectionProperties(ConnectionProperties { source_ip: true })
    } else {
        return Vec::new();
    };
    vec![HashPolicy { policy_specifier: Some(specifier), ..Default::default() }]
}

fn apply_hash(made: &mut cluster::Cluster, hash: &ConsistentHash) {
    let size = |value: u64| Some(UInt64Value { value });
    if let Some(maglev) = &hash.maglev {
        made.lb_policy = LbPolicy::Maglev as i32;
        let table = Some(maglev.table_size).filter(|entries| *entries > 0).and_then(size);
        made.lb_config = table.map(|_| LbConfig::MaglevLbConfig(MaglevLbConfig { table_size: table }));
        return;
    }
    let asked = hash.ring_hash.as_ref().map_or(hash.minimum_ring_size, |ring| ring.minimum_ring_size);
    made.lb_policy = LbPolicy::RingHash as i32;
    made.lb_config = Some(LbConfig::RingHashLbConfig(RingHashLbConfig {
        minimum_ring_size: size(if asked > 0 { asked } else { RING_SIZE }),
        ..Default::default()
    }));
}

/// New endpoints get traffic slowly.
fn slow_start(balancer: &LoadBalancer) -> Option<SlowStartConfig> {
    let old =
        balancer.warmup_duration_secs.map(|length| Warmup { duration: Some(length), ..Default::default() });
    let warmup = balancer.warmup.clone().or(old)?;
    let Duration(window) = warmup.duration?;
    Some(SlowStartConfig {
        slow_start_window: Some(duration(window)),
        aggression: warmup.aggression.map(|value| core::RuntimeDouble {
            default_value: value,
            // Must not be empty; never set. What istiod sends.
            runtime_key: "(".into(),
        }),
        min_weight_percent: warmup.minimum_percent.map(|value| types::Percent { value }),
    })
}
