//! Objects that caused routes and clusters, from the metadata that the control plane adds as Istio does
//! (`filter_metadata.istio.config`).

use std::collections::HashMap;

use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::config::{cluster::v3::Cluster, core::v3::Metadata, route::v3::RouteConfiguration},
    google::protobuf::value::Kind,
};

/// Paths of objects, such as `/apis/networking.istio.io/v1/namespaces/default/virtual-service/reviews`.
#[derive(Debug, Default)]
pub(super) struct Origins {
    /// By route table, virtual host and index of the route.
    routes: HashMap<(String, String, usize), String>,
    clusters: HashMap<String, String>,
}

impl Origins {
    pub(super) fn add_cluster(&mut self, name: &str, body: &[u8]) {
        let Ok(cluster) = Cluster::from_slice(body) else { return };
        if let Some(path) = config(cluster.metadata.as_ref()) {
            self.clusters.insert(name.to_owned(), path);
        }
    }

    pub(super) fn add_routes(&mut self, table: &str, body: &[u8]) {
        let Ok(configuration) = RouteConfiguration::from_slice(body) else { return };
        for host in &configuration.virtual_hosts {
            for (index, route) in host.routes.iter().enumerate() {
                if let Some(path) = config(route.metadata.as_ref()) {
                    self.routes.insert((table.to_owned(), host.name.clone(), index), path);
                }
            }
        }
    }

    pub(super) fn route(&self, table: &str, host: &str, index: usize) -> Option<&str> {
        self.routes.get(&(table.to_owned(), host.to_owned(), index)).map(String::as_str)
    }

    pub(super) fn cluster(&self, name: &str) -> Option<&str> {
        self.clusters.get(name).map(String::as_str)
    }
}

fn config(metadata: Option<&Metadata>) -> Option<String> {
    let value = metadata?.filter_metadata.get("istio")?.fields.get("config")?;
    match &value.kind {
        Some(Kind::StringValue(path)) => Some(path.clone()),
        _ => None,
    }
}
