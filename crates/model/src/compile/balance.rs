//! How an endpoint is picked: `loadBalancer` of a DestinationRule.
//!
//! `consistentHash` is not followed: our sidecar has no such balancer and would refuse the cluster, so it is warned
//! about and endpoints are picked by LEAST_REQUEST.

use super::pb::{cluster, core, duration, types};
use crate::api::{
    Duration,
    destination_rule::{LoadBalancer, SimpleLb, Warmup},
};

use cluster::cluster::{LbConfig, LbPolicy, LeastRequestLbConfig, RoundRobinLbConfig, SlowStartConfig};

/// Sets how a cluster picks.
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
