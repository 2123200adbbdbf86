//! Resources of a proxy as messages of Envoy's config dump, without secrets: for Istio's debug types and for the admin page
//! `/debug/config_dump`.

use std::collections::BTreeMap;

use skysail_xds::{
    Codec as _, DecodeError, Kind, Snapshot,
    envoy::pb::{
        envoy::{
            admin::v3::{
                ClustersConfigDump, ConfigDump, EndpointsConfigDump, ListenersConfigDump, RoutesConfigDump,
                clusters_config_dump::DynamicCluster,
                endpoints_config_dump::DynamicEndpointConfig,
                listeners_config_dump::{DynamicListener, DynamicListenerState},
                routes_config_dump::DynamicRouteConfig,
            },
            config::route::v3::{RouteConfiguration, VirtualHost},
        },
        google::protobuf::Any,
    },
    istio::pack,
};

use crate::publish::Publisher;

/// Returns the clusters, endpoints, listeners and routes that the control plane serves to a proxy, without secrets. Route
/// tables have their virtual hosts, whether the proxy requests these on demand or not. `None` if no such proxy is
/// connected.
///
/// # Errors
/// A route or virtual host is not valid, which is a bug.
pub(crate) fn whole_config_dump(
    publisher: &Publisher,
    proxy: &str,
) -> Result<Option<ConfigDump>, DecodeError> {
    let Some(snapshot) = publisher.resources_of(proxy) else { return Ok(None) };
    let endpoints = EndpointsConfigDump {
        dynamic_endpoint_configs: of_kind(&snapshot, Kind::Endpoint)
            .map(|(_, endpoints)| DynamicEndpointConfig {
                endpoint_config: Some(endpoints),
                ..DynamicEndpointConfig::default()
            })
            .collect(),
        ..EndpointsConfigDump::default()
    };
    let mut hosts: BTreeMap<String, Vec<VirtualHost>> = BTreeMap::new();
    for (name, host) in of_kind(&snapshot, Kind::VirtualHost) {
        let table = Kind::VirtualHost.family(&name).unwrap_or_default().to_owned();
        hosts.entry(table).or_default().push(VirtualHost::from_slice(&host.value)?);
    }
    let mut routes = Vec::new();
    for (name, mut route) in of_kind(&snapshot, Kind::Route) {
        if let Some(hosts) = hosts.remove(&name) {
            let mut table = RouteConfiguration::from_slice(&route.value)?;
            table.virtual_hosts.extend(hosts);
            route.value = table.to_vec();
        }
        routes.push(route);
    }
    let routes = tables(routes.into_iter());
    let sections = [pack(&clusters(&snapshot)), pack(&endpoints), pack(&listeners(&snapshot)), pack(&routes)];
    Ok(Some(ConfigDump { configs: sections.into() }))
}

pub(crate) fn clusters(snapshot: &Snapshot) -> ClustersConfigDump {
    ClustersConfigDump {
        dynamic_active_clusters: of_kind(snapshot, Kind::Cluster)
            .map(|(_, cluster)| DynamicCluster { cluster: Some(cluster), ..DynamicCluster::default() })
            .collect(),
        ..ClustersConfigDump::default()
    }
}

pub(crate) fn listeners(snapshot: &Snapshot) -> ListenersConfigDump {
    ListenersConfigDump {
        dynamic_listeners: of_kind(snapshot, Kind::Listener)
            .map(|(name, listener)| DynamicListener {
                name,
                active_state: Some(DynamicListenerState {
                    listener: Some(listener),
                    ..DynamicListenerState::default()
                }),
                ..DynamicListener::default()
            })
            .collect(),
        ..ListenersConfigDump::default()
    }
}

pub(crate) fn tables(routes: impl Iterator<Item = Any>) -> RoutesConfigDump {
    RoutesConfigDump {
        dynamic_route_configs: routes
            .map(|route| DynamicRouteConfig { route_config: Some(route), ..DynamicRouteConfig::default() })
            .collect(),
        ..RoutesConfigDump::default()
    }
}

pub(crate) fn of_kind(snapshot: &Snapshot, kind: Kind) -> impl Iterator<Item = (String, Any)> {
    let any = move |body: &[u8]| Any { type_url: kind.url().to_owned(), value: body.to_vec() };
    snapshot.iter(kind).map(move |resource| (resource.name.to_string(), any(&resource.body)))
}
