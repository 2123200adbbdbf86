//! Where objects were read, for reports.

use super::{World, gateway_api::INGRESS};
use crate::{
    api::{Kind, ObjectKey, gateway_api::INTERNAL},
    origin::Origin,
};

impl World {
    /// Returns where an object was read; `None` if it does not exist. A ConfigMap of any name has the origin of the
    /// mesh configuration.
    pub fn origin(&self, key: &ObjectKey) -> Option<&Origin> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        macro_rules! at {
            ($store:ident) => {
                self.$store.get(namespace, name).map(|entry| &entry.origin)
            };
        }
        match key.kind {
            Kind::Namespace => at!(namespaces),
            Kind::Node => at!(nodes),
            Kind::Service => at!(services),
            Kind::ServiceAccount => at!(service_accounts),
            Kind::Pod => at!(pods),
            Kind::Secret => at!(secrets),
            Kind::EndpointSlice => at!(slices),
            Kind::VirtualService => at!(virtual_services),
            Kind::DestinationRule => at!(destination_rules),
            Kind::ServiceEntry => at!(service_entries),
            Kind::PeerAuthentication => at!(peer_authentications),
            Kind::AuthorizationPolicy => at!(authorization_policies),
            Kind::Gateway => at!(gateways),
            Kind::Sidecar => at!(sidecars),
            Kind::WorkloadEntry => at!(workload_entries),
            Kind::WorkloadGroup => at!(workload_groups),
            Kind::ProxyConfig => at!(proxy_configs),
            Kind::EnvoyFilter => at!(envoy_filters),
            Kind::RequestAuthentication => at!(request_authentications),
            Kind::Telemetry => at!(telemetries),
            Kind::Ingress => at!(ingresses),
            Kind::IngressClass => at!(ingress_classes),
            Kind::GatewayClass => at!(gateway_classes),
            Kind::KubernetesGateway => at!(kubernetes_gateways),
            Kind::ListenerSet => at!(listener_sets),
            Kind::HttpRoute => at!(http_routes),
            Kind::GrpcRoute => at!(grpc_routes),
            Kind::TlsRoute => at!(tls_routes),
            Kind::TcpRoute => at!(tcp_routes),
            Kind::ReferenceGrant => at!(reference_grants),
            Kind::BackendTlsPolicy => at!(backend_tls_policies),
            Kind::WasmPlugin => at!(wasm_plugins),
            Kind::TrafficExtension => at!(traffic_extensions),
            Kind::RateLimitPolicy => at!(rate_limit_policies),
            Kind::ConfigMap => self.mesh.as_ref().map(|entry| &entry.origin),
            kind @ (Kind::Deployment
            | Kind::StatefulSet
            | Kind::DaemonSet
            | Kind::ReplicaSet
            | Kind::Job
            | Kind::CronJob) => self.templates.get(&kind)?.get(namespace, name).map(|entry| &entry.origin),
        }
    }

    /// Returns the field of a RateLimitPolicy's rule by the name of the rule. For explanations.
    pub fn limit_rule(&self, policy: &ObjectKey, rule: &str) -> Option<String> {
        let entry = self.rate_limit_policies.get(&policy.namespace, &policy.name)?;
        let mut rules = entry.object.spec.rules.iter().enumerate();
        let index = rules.position(|(index, of)| of.name_at(index) == rule)?;
        Some(format!("spec.rules[{index}]"))
    }

    /// Returns the object of Gateway API or the Ingress from which an internal Gateway or VirtualService of connections
    /// is made, and its field; `None` for objects of users. For explanations.
    pub fn made_from(&self, key: &ObjectKey) -> Option<(ObjectKey, String)> {
        let (namespace, name) = (key.namespace.as_str(), key.name.as_str());
        let of = |kind: Kind, namespace: &str, name: &str| ObjectKey {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        if key.kind == Kind::VirtualService {
            let (route, rest) = name.split_once('~')?;
            let kind = match rest.split_once('~')? {
                ("tls", _) => Kind::TlsRoute,
                ("tcp", _) => Kind::TcpRoute,
                _ => return None,
            };
            return Some((of(kind, namespace, route), "spec.rules".to_owned()));
        }
        if let Some((ingress, rest)) = name.split_once(&format!("-{INGRESS}-")) {
            let (namespace, _) = rest.split_once("~~")?;
            return Some((of(Kind::Ingress, namespace, ingress), String::new()));
        }
        let (gateway, listener) = name.split_once(&format!("~{INTERNAL}~"))?;
        let by_gateway = self.kubernetes_gateways.get(namespace, gateway);
        let by_gateway = by_gateway.map(|entry| (Kind::KubernetesGateway, &entry.object.spec.listeners));
        let by_set = self.listener_sets.get(namespace, gateway);
        let by_set = by_set.map(|entry| (Kind::ListenerSet, &entry.object.spec.listeners));
        by_gateway.into_iter().chain(by_set).find_map(|(kind, listeners)| {
            let index = listeners.iter().position(|of| of.name == listener)?;
            Some((of(kind, namespace, gateway), format!("spec.listeners[{index}]")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_the_file_and_line_where_they_were_read() {
        let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: n}\nspec: {ports: [{port: 80}]}\n\
                    ---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a, namespace: n}\nspec:\n  \
                    selector: {matchLabels: {app: a}}\n  template:\n    metadata: {labels: {app: a}}\n    \
                    spec: {containers: [{name: a, image: i}]}\n";
        let mut world = World::new();
        for (object, origin) in crate::parse(text, "a.yaml").objects {
            world.apply(object, origin);
        }
        let line = |kind, name: &str| {
            let key = ObjectKey { kind, namespace: "n".to_owned(), name: name.to_owned() };
            world.origin(&key).map(|origin| (origin.file.to_string(), origin.line))
        };
        assert_eq!(line(Kind::Service, "a"), Some(("a.yaml".to_owned(), 1)));
        assert_eq!(line(Kind::Deployment, "a"), Some(("a.yaml".to_owned(), 6)));
        assert_eq!(line(Kind::Service, "b"), None);
        assert_eq!(line(Kind::VirtualService, "a"), None);
    }
}
