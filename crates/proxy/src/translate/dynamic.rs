//! Translates the dynamic forward proxy: its cluster, its filters and their cache of hosts.

use std::time::Duration;

use skysail_xds::envoy::pb::envoy::{
    config::cluster::v3::{
        Cluster as Proto,
        cluster::{ClusterDiscoveryType, CustomClusterType},
    },
    extensions::{
        clusters::dynamic_forward_proxy::v3::{
            ClusterConfig, cluster_config::ClusterImplementationSpecifier,
        },
        common::dynamic_forward_proxy::v3::DnsCacheConfig,
        filters::http::dynamic_forward_proxy::v3::{FilterConfig, filter_config::ImplementationSpecifier},
    },
};

use super::{At as _, Reject, Result, cluster, duration, number, unknown_type, unpack};
use skysail_policy::config::cluster::HostCacheConfig;

/// Envoy's defaults.
const REFRESH: Duration = Duration::from_secs(60);
const HOST_TTL: Duration = Duration::from_secs(300);
const MAX_HOSTS: u32 = 1024;
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_PENDING: u32 = 1024;

/// Translates the type of a cluster, of which only the dynamic forward proxy is supported.
pub(super) fn cluster(proto: &CustomClusterType) -> Result<HostCacheConfig> {
    match &config(proto).at("typed_config")?.cluster_implementation_specifier {
        Some(ClusterImplementationSpecifier::DnsCacheConfig(cache)) => {
            host_cache(Some(cache)).at("dns_cache_config").at("typed_config")
        }
        _ => Err(Reject::new("must be given").at_field("dns_cache_config").at_field("typed_config")),
    }
}

/// Returns whether a certificate may be for another host than the requested one.
pub(super) fn allows_insecure(proto: &Proto) -> Result<bool> {
    match &proto.cluster_discovery_type {
        Some(ClusterDiscoveryType::ClusterType(kind)) => Ok(config(kind)?.allow_insecure_cluster_options),
        _ => Ok(false),
    }
}

fn config(proto: &CustomClusterType) -> Result<ClusterConfig> {
    let any = proto.typed_config.as_ref();
    let any = any.ok_or_else(|| Reject::new(format!("cluster type {:?} is not supported", proto.name)))?;
    if !any.type_url.ends_with(".clusters.dynamic_forward_proxy.v3.ClusterConfig") {
        return Err(unknown_type("cluster type", &proto.name, any));
    }
    unpack(any)
}

/// Translates the HTTP filter.
pub(super) fn http(proto: &FilterConfig) -> Result<HostCacheConfig> {
    match &proto.implementation_specifier {
        Some(ImplementationSpecifier::DnsCacheConfig(cache)) => {
            host_cache(Some(cache)).at("dns_cache_config")
        }
        _ => Err(Reject::new("must be given").at_field("dns_cache_config")),
    }
}

/// Translates a cache of hosts.
pub(super) fn host_cache(proto: Option<&DnsCacheConfig>) -> Result<HostCacheConfig> {
    let proto = proto.ok_or_else(|| Reject::new("must be given"))?;
    if proto.name.is_empty() {
        return Err(Reject::new("must be given").at_field("name"));
    }
    let time = |given: Option<_>, field: &str, default: Duration| match given {
        Some(given) => match duration(&given).at(field)? {
            time if time.is_zero() => Err(Reject::new("must be greater than 0").at_field(field)),
            time => Ok(time),
        },
        None => Ok(default),
    };
    let max_hosts = number(proto.max_hosts).unwrap_or(MAX_HOSTS);
    if max_hosts == 0 {
        return Err(Reject::new("must be at least 1").at_field("max_hosts"));
    }
    let breaker = proto.dns_cache_circuit_breaker.as_ref();
    Ok(HostCacheConfig {
        name: proto.name.as_str().into(),
        family: cluster::family(proto.dns_lookup_family()),
        refresh: time(proto.dns_refresh_rate, "dns_refresh_rate", REFRESH)?.max(Duration::from_secs(1)),
        host_ttl: time(proto.host_ttl, "host_ttl", HOST_TTL)?,
        max_hosts,
        query_timeout: time(proto.dns_query_timeout, "dns_query_timeout", QUERY_TIMEOUT)?,
        max_pending: breaker.and_then(|breaker| number(breaker.max_pending_requests)).unwrap_or(MAX_PENDING),
    })
}
