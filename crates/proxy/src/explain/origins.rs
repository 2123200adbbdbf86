//! Objects that caused filter chains, routes and clusters, from the metadata that the control plane adds as Istio does
//! (`filter_metadata.istio`).

use std::collections::HashMap;

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::config::{
        cluster::v3::Cluster,
        core::v3::Metadata,
        listener::v3::Listener,
        route::v3::{RouteConfiguration, VirtualHost},
    },
    google::protobuf::{Value, value::Kind},
};

/// Paths of objects, such as `/apis/networking.istio.io/v1/namespaces/default/virtual-service/reviews`.
#[derive(Debug, Default)]
pub(super) struct Origins {
    /// By route table, virtual host and index of the route.
    routes: HashMap<(String, String, usize), String>,
    /// By listener and filter chain.
    chains: HashMap<(String, String), String>,
    clusters: HashMap<String, ClusterOrigin>,
}

/// Objects of a cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct ClusterOrigin {
    /// Path of the DestinationRule.
    pub(super) config: Option<String>,
    /// Services, as `NAMESPACE/NAME`.
    pub(super) services: Vec<String>,
    /// Subset; empty for none.
    pub(super) subset: String,
}

impl Origins {
    pub(super) fn add_cluster(&mut self, name: &str, body: &[u8]) {
        let Ok(cluster) = Cluster::from_slice(body) else { return };
        let metadata = cluster.metadata.as_ref();
        let services = field(metadata, "services").map(service_names).unwrap_or_default();
        let subset = text(metadata, "subset").unwrap_or_default();
        let origin = ClusterOrigin { config: text(metadata, "config"), services, subset };
        self.clusters.insert(name.to_owned(), origin);
    }

    pub(super) fn add_listener(&mut self, name: &str, body: &[u8]) {
        let Ok(listener) = Listener::from_slice(body) else { return };
        for chain in listener.filter_chains.iter().chain(&listener.default_filter_chain) {
            if let Some(path) = text(chain.metadata.as_ref(), "config") {
                self.chains.insert((name.to_owned(), chain.name.clone()), path);
            }
        }
    }

    pub(super) fn add_routes(&mut self, table: &str, body: &[u8]) {
        let Ok(configuration) = RouteConfiguration::from_slice(body) else { return };
        configuration.virtual_hosts.iter().for_each(|host| self.add_host(table, host));
    }

    fn add_host(&mut self, table: &str, host: &VirtualHost) {
        for (index, route) in host.routes.iter().enumerate() {
            if let Some(path) = text(route.metadata.as_ref(), "config") {
                self.routes.insert((table.to_owned(), host.name.clone(), index), path);
            }
        }
    }

    pub(super) fn route(&self, table: &str, host: &str, index: usize) -> Option<&str> {
        self.routes.get(&(table.to_owned(), host.to_owned(), index)).map(String::as_str)
    }

    pub(super) fn chain(&self, listener: &str, chain: &str) -> Option<&str> {
        self.chains.get(&(listener.to_owned(), chain.to_owned())).map(String::as_str)
    }

    pub(super) fn cluster(&self, name: &str) -> Option<&ClusterOrigin> {
        self.clusters.get(name)
    }
}

fn field<'a>(metadata: Option<&'a Metadata>, name: &str) -> Option<&'a Value> {
    metadata?.filter_metadata.get("istio")?.fields.get(name)
}

fn text(metadata: Option<&Metadata>, name: &str) -> Option<String> {
    match &field(metadata, name)?.kind {
        Some(Kind::StringValue(text)) => Some(text.clone()),
        _ => None,
    }
}

fn service_names(list: &Value) -> Vec<String> {
    let Some(Kind::ListValue(list)) = &list.kind else { return Vec::new() };
    let named = list.values.iter().filter_map(|service| {
        let Some(Kind::StructValue(service)) = &service.kind else { return None };
        let text = |key: &str| match &service.fields.get(key)?.kind {
            Some(Kind::StringValue(text)) => Some(text.as_str()),
            _ => None,
        };
        Some(format!("{}/{}", text("namespace")?, text("name")?))
    });
    named.collect()
}
