//! Translates load balancing policies.

use skysail_xds::envoy::pb::envoy::config::cluster::v3::{
    Cluster as Proto,
    cluster::{LbConfig, LbPolicy, RingHashLbConfig, ring_hash_lb_config::HashFunction as HashProto},
};

use super::{At as _, Reject, Result, number};
use skysail_policy::config::cluster::{Balancer, Discovery, HashFunction};

/// Envoy's defaults and maxima: (default, maximum).
const RING: (u64, u64) = (1024, 8 * 1024 * 1024);
const TABLE: (u64, u64) = (65_537, 5_000_011);

/// Returns the load balancer with its settings. `new` is a policy that the cluster's legacy fields cannot
/// express.
pub(super) fn translate(proto: &Proto, discovery: &Discovery, new: Option<Balancer>) -> Result<Balancer> {
    let policy = proto.lb_policy();
    Ok(match (policy, discovery) {
        (LbPolicy::ClusterProvided, Discovery::OriginalDst(_)) => Balancer::OriginalDst,
        (_, Discovery::OriginalDst(_)) => {
            return Err(Reject::new(format!(
                "lb_policy {} is not allowed with type ORIGINAL_DST: use CLUSTER_PROVIDED",
                policy.as_str_name()
            )));
        }
        (LbPolicy::ClusterProvided, Discovery::Dynamic(_)) => Balancer::OriginalDst,
        (_, Discovery::Dynamic(_)) => {
            return Err(Reject::new(format!(
                "lb_policy {} is not allowed for a dynamic forward proxy: use CLUSTER_PROVIDED",
                policy.as_str_name()
            )));
        }
        _ if let Some(new) = new => new,
        (LbPolicy::RoundRobin, _) => Balancer::RoundRobin,
        (LbPolicy::LeastRequest, _) => {
            let config = match &proto.lb_config {
                Some(LbConfig::LeastRequestLbConfig(config)) => Some(config),
                _ => None,
            };
            let choices = config.and_then(|config| number(config.choice_count)).unwrap_or(2).max(2);
            let bias = config.and_then(|config| config.active_request_bias.as_ref());
            let bias = bias.map_or(1.0, |bias| bias.default_value);
            if !(0.0..=f64::MAX).contains(&bias) {
                return Err(
                    Reject::new("must be 0 or more").at_field("least_request_lb_config.active_request_bias")
                );
            }
            Balancer::LeastRequest { choices, bias }
        }
        (LbPolicy::Random, _) => Balancer::Random,
        (LbPolicy::RingHash, _) => {
            let none = RingHashLbConfig::default();
            let config = match &proto.lb_config {
                Some(LbConfig::RingHashLbConfig(config)) => config,
                _ => &none,
            };
            ring(config).at("ring_hash_lb_config")?
        }
        (LbPolicy::Maglev, _) => {
            let size = match &proto.lb_config {
                Some(LbConfig::MaglevLbConfig(config)) => config.table_size.map(|size| size.value),
                _ => None,
            };
            maglev(size.unwrap_or(TABLE.0)).at("maglev_lb_config.table_size")?
        }
        _ => {
            return Err(Reject::new(format!(
                "{} is not supported here: use ROUND_ROBIN, LEAST_REQUEST, RANDOM, RING_HASH or MAGLEV",
                policy.as_str_name()
            ))
            .at_field("lb_policy"));
        }
    })
}

fn ring(config: &RingHashLbConfig) -> Result<Balancer> {
    let minimum = config.minimum_ring_size.map_or(RING.0, |size| size.value);
    let maximum = config.maximum_ring_size.map_or(RING.1, |size| size.value);
    for (size, field) in [(minimum, "minimum_ring_size"), (maximum, "maximum_ring_size")] {
        if size > RING.1 {
            return Err(Reject::new(format!("must be at most {}", RING.1)).at_field(field));
        }
    }
    if minimum > maximum {
        return Err(Reject::new(format!("must be at most maximum_ring_size, {maximum}"))
            .at_field("minimum_ring_size"));
    }
    let function = match config.hash_function() {
        HashProto::XxHash => HashFunction::Xx,
        HashProto::MurmurHash2 => HashFunction::Murmur2,
    };
    Ok(Balancer::RingHash { minimum, maximum, function })
}

fn maglev(size: u64) -> Result<Balancer> {
    let prime = (2..=TABLE.1).contains(&size)
        && (2..).take_while(|divisor| divisor * divisor <= size).all(|divisor| !size.is_multiple_of(divisor));
    match u32::try_from(size) {
        Ok(table) if prime => Ok(Balancer::Maglev(table)),
        _ => Err(Reject::new(format!("must be a prime number of at most {}", TABLE.1))),
    }
}

/// Returns the panic threshold in percent of available endpoints, 50 by default: below it, traffic goes to all
/// endpoints.
pub(super) fn panic_threshold(proto: &Proto) -> Result<u32> {
    let config = proto.common_lb_config.as_ref();
    let threshold =
        config.and_then(|config| config.healthy_panic_threshold).map_or(50.0, |percent| percent.value);
    if !(0.0..=100.0).contains(&threshold) {
        return Err(Reject::new("must be from 0 to 100").at_field("common_lb_config.healthy_panic_threshold"));
    }
    // Envoy truncates to whole percent with the same rounding error, so that 58 becomes 57.
    Ok((100.0 * (threshold / 100.0)) as u32)
}
