//! Objects that caused filter chains, routes and clusters, from the metadata that the control plane adds as Istio does
//! (`filter_metadata.istio`).

use std::collections::HashMap;

use prost::Name;
use skysail_proto::Codec;
use skysail_xds::envoy::pb::{
    envoy::config::{
        cluster::v3::Cluster,
        core::v3::{Metadata, TransportSocket, transport_socket},
        listener::v3::Listener,
        route::v3::{RouteConfiguration, VirtualHost},
    },
    envoy::extensions::transport_sockets::tls::v3::UpstreamTlsContext,
    google::protobuf::{Value, value::Kind},
};

/// Name of the secret with the certificate of the workload.
const WORKLOAD_SECRET: &str = "default";

/// Paths of objects, such as `/apis/networking.istio.io/v1/namespaces/default/virtual-service/reviews`.
#[derive(Debug, Default)]
pub(super) struct Origins {
    /// By route table, virtual host and index of the route.
    routes: HashMap<(String, String, usize), String>,
    /// By listener and position of the filter chain; the default chain is the last.
    chains: HashMap<(String, usize), String>,
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
    /// Certificate that the proxy presents to endpoints without a TLS socket of their own.
    pub(super) presents: Presented,
}

/// Certificate that a proxy presents as a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Presented {
    /// None.
    #[default]
    Nothing,
    /// That of its workload (`ISTIO_MUTUAL`).
    Workload,
    /// Another one, whose names are not known here.
    Other,
}

impl Origins {
    pub(super) fn add_cluster(&mut self, name: &str, body: &[u8]) {
        let Ok(cluster) = Cluster::from_slice(body) else { return };
        let metadata = cluster.metadata.as_ref();
        let services = field(metadata, "services").map(service_names).unwrap_or_default();
        let subset = text(metadata, "subset").unwrap_or_default();
        let presents = presented(cluster.transport_socket.as_ref());
        let origin = ClusterOrigin { config: text(metadata, "config"), services, subset, presents };
        self.clusters.insert(name.to_owned(), origin);
    }

    pub(super) fn add_listener(&mut self, name: &str, body: &[u8]) {
        let Ok(listener) = Listener::from_slice(body) else { return };
        for (index, chain) in listener.filter_chains.iter().chain(&listener.default_filter_chain).enumerate()
        {
            if let Some(path) = text(chain.metadata.as_ref(), "config") {
                self.chains.insert((name.to_owned(), index), path);
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

    /// Returns the path of the VirtualService of a filter chain.
    pub(super) fn chain(&self, listener: &str, index: usize) -> Option<&str> {
        self.chains.get(&(listener.to_owned(), index)).map(String::as_str)
    }

    pub(super) fn cluster(&self, name: &str) -> Option<&ClusterOrigin> {
        self.clusters.get(name)
    }
}

/// Returns the message in a transport socket, if it has this type.
fn socket_config<M: Codec + Name>(socket: Option<&TransportSocket>) -> Option<M> {
    let config = socket.and_then(|socket| socket.config_type.as_ref());
    let Some(transport_socket::ConfigType::TypedConfig(any)) = config else { return None };
    let is_it = any.type_url.rsplit('/').next() == Some(M::full_name().as_str());
    is_it.then(|| M::from_slice(&any.value).ok()).flatten()
}

fn presented(socket: Option<&TransportSocket>) -> Presented {
    let context: Option<UpstreamTlsContext> = socket_config(socket);
    let Some(common) = context.and_then(|context| context.common_tls_context) else {
        return Presented::Nothing;
    };
    let secrets = &common.tls_certificate_sds_secret_configs;
    if secrets.iter().any(|secret| secret.name == WORKLOAD_SECRET) {
        return Presented::Workload;
    }
    let has_any = !secrets.is_empty() || !common.tls_certificates.is_empty();
    if has_any { Presented::Other } else { Presented::Nothing }
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
