//! Translates `load_balancing_policy`, the load balancers that are extensions. Nearly all have equivalents in
//! the legacy fields of a cluster and are translated into those.

use std::time::Duration;

use skysail_xds::{
    envoy::pb::{
        envoy::{
            config::cluster::v3::{
                Cluster as Proto, LoadBalancingPolicy,
                cluster::{
                    CommonLbConfig, LbConfig, LbPolicy, LeastRequestLbConfig, MaglevLbConfig,
                    RingHashLbConfig, RoundRobinLbConfig, SlowStartConfig,
                    common_lb_config::{LocalityConfigSpecifier, LocalityWeightedLbConfig},
                    ring_hash_lb_config::HashFunction,
                },
            },
            extensions::load_balancing_policies::{
                cluster_provided::v3::ClusterProvided,
                common::v3::{
                    LocalityLbConfig, SlowStartConfig as SlowStartExtension,
                    locality_lb_config::LocalityConfigSpecifier as Specifier,
                },
                least_request::v3::LeastRequest,
                maglev::v3::Maglev,
                random::v3::Random,
                ring_hash::v3::{RingHash, ring_hash},
                round_robin::v3::RoundRobin,
                wrr_locality::v3::WrrLocality,
            },
        },
        google::protobuf::Duration as DurationProto,
    },
    istio::PeakEwma,
};

use super::{At as _, Reject, Result, duration, type_name, unknown_type, unpack};
use skysail_policy::config::cluster::Balancer;

/// Envoy's defaults for peak EWMA.
const DECAY: Duration = Duration::from_secs(10);
const UNKNOWN: Duration = Duration::from_millis(10);

const TYPES: &str = "envoy.extensions.load_balancing_policies.";

/// A load balancing policy.
enum Policy {
    /// Equivalent legacy fields.
    Older(LbPolicy, Option<LbConfig>),
    /// A policy without legacy fields.
    New(Balancer),
}

/// Moves the policy into the legacy fields. Returns the load balancer if they cannot express it.
pub(super) fn resolve(proto: &mut Proto) -> Result<Option<Balancer>> {
    let Some(policy) = proto.load_balancing_policy.take() else { return Ok(None) };
    let (policy, weighed) = read(&policy)?;
    let new = match policy {
        Policy::Older(kind, config) => {
            proto.set_lb_policy(kind);
            proto.lb_config = config;
            None
        }
        Policy::New(balancer) => Some(balancer),
    };
    let common = proto.common_lb_config.get_or_insert_with(CommonLbConfig::default);
    common.locality_config_specifier = weighed
        .then(|| LocalityConfigSpecifier::LocalityWeightedLbConfig(LocalityWeightedLbConfig::default()));
    Ok(new)
}

/// Returns the policy and whether localities are weighted.
fn read(policy: &LoadBalancingPolicy) -> Result<(Policy, bool)> {
    // Envoy uses the first policy that it supports. Here the first must be supported.
    let first = policy.policies.first().and_then(|policy| policy.typed_extension_config.as_ref());
    let Some((name, any)) = first.and_then(|first| Some((&first.name, first.typed_config.as_ref()?))) else {
        return Err(Reject::new("needs a policy with a typed_config").at_field("policies"));
    };
    let read = || {
        Ok(match type_name(any).strip_prefix(TYPES).unwrap_or_default() {
            "round_robin.v3.RoundRobin" => {
                let RoundRobin { slow_start_config, locality_lb_config } = unpack(any)?;
                let config = RoundRobinLbConfig { slow_start_config: slow_start(slow_start_config) };
                let config = LbConfig::RoundRobinLbConfig(config);
                (Policy::Older(LbPolicy::RoundRobin, Some(config)), weighs(locality_lb_config))
            }
            "least_request.v3.LeastRequest" => {
                let from: LeastRequest = unpack(any)?;
                let config = LeastRequestLbConfig {
                    choice_count: from.choice_count,
                    active_request_bias: from.active_request_bias,
                    slow_start_config: slow_start(from.slow_start_config),
                };
                let config = LbConfig::LeastRequestLbConfig(config);
                (Policy::Older(LbPolicy::LeastRequest, Some(config)), weighs(from.locality_lb_config))
            }
            "peak_ewma.v3alpha.PeakEwma" => {
                let PeakEwma { decay_time, default_rtt } = unpack(any)?;
                let time = |time: Option<DurationProto>, usual| time.as_ref().map_or(Ok(usual), duration);
                let decay = time(decay_time, DECAY).at("decay_time")?;
                let unknown = time(default_rtt, UNKNOWN).at("default_rtt")?;
                (Policy::New(Balancer::PeakEwma { decay, unknown }), false)
            }
            "random.v3.Random" => {
                let Random { locality_lb_config } = unpack(any)?;
                (Policy::Older(LbPolicy::Random, None), weighs(locality_lb_config))
            }
            "ring_hash.v3.RingHash" => {
                let from: RingHash = unpack(any)?;
                let hash_function = match from.hash_function() {
                    ring_hash::HashFunction::MurmurHash2 => HashFunction::MurmurHash2,
                    ring_hash::HashFunction::XxHash | ring_hash::HashFunction::DefaultHash => {
                        HashFunction::XxHash
                    }
                };
                let config = RingHashLbConfig {
                    minimum_ring_size: from.minimum_ring_size,
                    maximum_ring_size: from.maximum_ring_size,
                    hash_function: hash_function.into(),
                };
                let weighed = from.locality_weighted_lb_config.is_some();
                (Policy::Older(LbPolicy::RingHash, Some(LbConfig::RingHashLbConfig(config))), weighed)
            }
            "maglev.v3.Maglev" => {
                let Maglev { table_size, locality_weighted_lb_config, .. } = unpack(any)?;
                let config = LbConfig::MaglevLbConfig(MaglevLbConfig { table_size });
                (Policy::Older(LbPolicy::Maglev, Some(config)), locality_weighted_lb_config.is_some())
            }
            "wrr_locality.v3.WrrLocality" => {
                let WrrLocality { endpoint_picking_policy } = unpack(any)?;
                let within = endpoint_picking_policy.unwrap_or_default();
                (self::read(&within).at("endpoint_picking_policy")?.0, true)
            }
            "cluster_provided.v3.ClusterProvided" => {
                let ClusterProvided {} = unpack(any)?;
                (Policy::Older(LbPolicy::ClusterProvided, None), false)
            }
            _ => return Err(unknown_type("load balancing policy", name, any)),
        })
    };
    read().at("policies[0].typed_extension_config.typed_config")
}

fn weighs(config: Option<LocalityLbConfig>) -> bool {
    let specifier = config.and_then(|config| config.locality_config_specifier);
    matches!(specifier, Some(Specifier::LocalityWeightedLbConfig(_)))
}

fn slow_start(config: Option<SlowStartExtension>) -> Option<SlowStartConfig> {
    let SlowStartExtension { slow_start_window, aggression, min_weight_percent } = config?;
    Some(SlowStartConfig { slow_start_window, aggression, min_weight_percent })
}
