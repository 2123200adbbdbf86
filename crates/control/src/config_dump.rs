//! Resources of a proxy as messages of Envoy's config dump, without secrets: for Istio's debug types and for the admin page
//! `/debug/config_dump`.

use std::collections::BTreeMap;

use skysail_xds::{
    Codec as _, Kind, Snapshot,
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

/// Returns all that a proxy may subscribe to, without secrets: the same and its endpoints. Route tables have their virtual
/// hosts, whether the proxy requests these on demand or not. `None` if no such proxy is connected.
pub(crate) fn whole_config_dump(publisher: &Publisher, proxy: &str) -> Option<ConfigDump> {
    let snapshot = publisher.resources_of(proxy)?;
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
        if let (Some((table, _)), Ok(host)) = (name.rsplit_once('/'), VirtualHost::from_slice(&host.value)) {
            hosts.entry(table.to_owned()).or_default().push(host);
        }
    }
    let routes = of_kind(&snapshot, Kind::Route).map(|(name, mut route)| {
        if let (Some(hosts), Ok(mut table)) =
            (hosts.remove(&name), RouteConfiguration::from_slice(&route.value))
        {
            table.virtual_hosts.extend(hosts);
            route.value = table.to_vec();
        }
        route
    });
    let routes = tables(routes);
    let sections = [pack(&clusters(&snapshot)), pack(&endpoints), pack(&listeners(&snapshot)), pack(&routes)];
    Some(ConfigDump { configs: sections.into() })
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
