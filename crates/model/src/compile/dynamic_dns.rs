//! Hosts of ServiceEntries with resolution DYNAMIC_DNS: the proxy resolves the host of each request or connection
//! (Envoy's dynamic forward proxy).
//!
//! The filter that resolves a host and the cluster that connects to it share a DNS cache by its name.

use skysail_xds::envoy::pb::envoy::extensions::{
    clusters::dynamic_forward_proxy::v3::{ClusterConfig, cluster_config},
    common::dynamic_forward_proxy::v3::DnsCacheConfig,
    filters::{
        http::dynamic_forward_proxy::v3::{FilterConfig, filter_config},
        network::{
            http_connection_manager::v3::HttpConnectionManager,
            sni_dynamic_forward_proxy::v3::{FilterConfig as SniFilterConfig, filter_config::PortSpecifier},
        },
    },
};

use super::{
    filters,
    pb::{Any, cluster, listener, pack},
};
use cluster::cluster::{ClusterDiscoveryType, CustomClusterType, DnsLookupFamily, LbPolicy};

/// IP families of a proxy.
#[derive(Clone, Copy)]
pub(super) struct Families {
    pub(super) ipv4: bool,
    pub(super) ipv6: bool,
}

impl Families {
    /// Returns the family of lookups.
    pub(super) fn lookup(self) -> DnsLookupFamily {
        match (self.ipv4, self.ipv6) {
            (true, true) => DnsLookupFamily::All,
            (false, true) => DnsLookupFamily::V6Only,
            _ => DnsLookupFamily::V4Only,
        }
    }
}

fn cache(host: &str, families: Families) -> DnsCacheConfig {
    DnsCacheConfig {
        name: format!("{host}_dfp_dns_cache"),
        dns_lookup_family: families.lookup() as i32,
        ..Default::default()
    }
}

/// Makes a cluster connect to the host of each request or connection. `has_options` is whether the cluster has protocol
/// options: Envoy then requires that names of certificates are verified, unless the configuration disables that.
pub(super) fn resolve_hosts(made: &mut cluster::Cluster, host: &str, families: Families, has_options: bool) {
    let config = ClusterConfig {
        allow_insecure_cluster_options: has_options,
        cluster_implementation_specifier: Some(
            cluster_config::ClusterImplementationSpecifier::DnsCacheConfig(cache(host, families)),
        ),
        ..Default::default()
    };
    made.lb_policy = LbPolicy::ClusterProvided as i32;
    made.cluster_discovery_type = Some(ClusterDiscoveryType::ClusterType(CustomClusterType {
        name: "envoy.clusters.dynamic_forward_proxy".into(),
        typed_config: Some(pack(&config)),
    }));
}

/// Returns the network filter that resolves the server name of TLS.
pub(super) fn of_server_name(host: &str, port: u16, families: Families) -> listener::Filter {
    let config = SniFilterConfig {
        dns_cache_config: Some(cache(host, families)),
        port_specifier: Some(PortSpecifier::PortValue(port.into())),
        ..Default::default()
    };
    filters::network("envoy.extensions.filters.network.sni_dynamic_forward_proxy", pack(&config))
}

/// Adds an HTTP filter for each host, before the router, that resolves the hosts of requests.
pub(super) fn add_filters(chain: &mut listener::FilterChain, hosts: &[String], families: Families) {
    let manager = chain.filters.iter_mut().filter_map(|filter| match &mut filter.config_type {
        Some(listener::filter::ConfigType::TypedConfig(config)) => Some(config),
        _ => None,
    });
    for config in manager {
        let Some(mut manager) = connection_manager(config) else { continue };
        let router = manager.http_filters.len().saturating_sub(1);
        let added = hosts.iter().map(|host| {
            let dns_cache = filter_config::ImplementationSpecifier::DnsCacheConfig(cache(host, families));
            let config = FilterConfig { implementation_specifier: Some(dns_cache), ..Default::default() };
            filters::http("envoy.filters.http.dynamic_forward_proxy", pack(&config))
        });
        manager.http_filters.splice(router..router, added);
        *config = pack(&manager);
    }
}

fn connection_manager(config: &Any) -> Option<HttpConnectionManager> {
    use skysail_proto::Codec as _;
    let is_manager = config.type_url.ends_with(".http_connection_manager.v3.HttpConnectionManager");
    is_manager.then(|| HttpConnectionManager::from_slice(&config.value).ok()).flatten()
}
