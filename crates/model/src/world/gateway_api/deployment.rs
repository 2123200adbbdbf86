//! Gateways for which the control plane deploys proxies on a cluster.

use std::collections::BTreeMap;

use skysail_core::fingerprint;

use crate::{
    api::{
        Kind, Labels, Meta, ObjectKey, Service, Typed,
        gateway_api::{IP_ADDRESS, Infrastructure, KubernetesGateway, ListenerProtocol},
    },
    world::World,
};

/// Label of a Gateway or its namespace with the revision of the control plane that deploys its proxies.
const REVISION: &str = "istio.io/rev";
/// Annotation with the type of the Service. Source: Istio.
const SERVICE_TYPE: &str = "networking.istio.io/service-type";
/// Annotation with the name of the deployed objects. Source: Istio.
const NAME: &str = "gateway.istio.io/name-override";
/// Label of the proxies of a Gateway, with its name.
const GATEWAY_NAME: &str = "gateway.networking.k8s.io/gateway-name";
/// Maximum length of the name of a Service, and of a label.
const MAX_NAME: usize = 63;

/// Proxies that a Gateway needs, and their Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayDeployment {
    /// The Gateway.
    pub gateway: ObjectKey,
    /// Revision of the control plane that deploys them; empty for the default one.
    pub revision: String,
    /// Name of the Deployment and the Service: `GATEWAY-CLASS` or that of an annotation, as in Istio.
    pub name: String,
    /// Name of the ServiceAccount. No annotation chooses it, because it is the identity of the proxies.
    pub account: String,
    /// Labels that select the proxies.
    pub selector: Labels,
    /// Labels and annotations of the deployed objects.
    pub infrastructure: Infrastructure,
    /// Type of the Service; empty for the default, `LoadBalancer`.
    pub service_type: String,
    /// Requested address of the load balancer; empty for any.
    pub address: String,
    /// Ports of the listeners, each with the protocol of the first one.
    pub ports: BTreeMap<u16, ListenerProtocol>,
}

impl World {
    /// Returns the Gateways that are served here, except those whose addresses name a Service: their proxies were deployed
    /// by hand.
    pub fn gateway_deployments(&self) -> Vec<GatewayDeployment> {
        let mut made: BTreeMap<ObjectKey, GatewayDeployment> = BTreeMap::new();
        for listener in self.gateway_listeners() {
            let gateway = listener.gateway;
            let addresses = &gateway.spec.addresses;
            let is_own = addresses.iter().all(|of| of.kind() == IP_ADDRESS) && addresses.len() <= 1;
            let port = u16::try_from(listener.listener.port).ok().filter(|port| *port > 0);
            let is_served = is_own && listener.listener.is_supported();
            let (Some(port), Some(protocol), true) = (port, listener.protocol(), is_served) else { continue };
            let (namespace, name) = (gateway.meta.namespace.clone(), gateway.meta.name.clone());
            let key = ObjectKey { kind: Kind::KubernetesGateway, namespace, name };
            let new = || GatewayDeployment::new(key.clone(), gateway, self.namespace(&key.namespace));
            let entry = made.entry(key.clone()).or_insert_with(new);
            entry.ports.entry(port).or_insert(protocol);
        }
        made.into_values().collect()
    }

    /// Returns the deployed Service of a Gateway that is for clients in the cluster only.
    pub(super) fn internal_service(&self, gateway: &Typed<KubernetesGateway>) -> Option<&Typed<Service>> {
        let Meta { namespace, name, .. } = &gateway.meta;
        let key =
            ObjectKey { kind: Kind::KubernetesGateway, namespace: namespace.clone(), name: name.clone() };
        let deployment = GatewayDeployment::new(key, gateway, None);
        let service = self.service_named(namespace, &deployment.name)?;
        (deployment.service_type == "ClusterIP" && service.spec.selector == deployment.selector)
            .then_some(service)
    }
}

impl GatewayDeployment {
    fn new(key: ObjectKey, gateway: &Typed<KubernetesGateway>, namespace: Option<&Labels>) -> Self {
        let revision = gateway.meta.labels.get(REVISION).or_else(|| namespace?.get(REVISION));
        let annotation = |name: &str| gateway.meta.annotations.get(name).cloned();
        let default = || format!("{}-{}", key.name, gateway.spec.gateway_class_name);
        Self {
            revision: revision.cloned().unwrap_or_default(),
            name: service_name(&annotation(NAME).filter(|name| !name.is_empty()).unwrap_or_else(default)),
            account: service_name(&default()),
            selector: proxy_labels(&key.name),
            infrastructure: gateway.spec.infrastructure.clone(),
            service_type: annotation(SERVICE_TYPE).unwrap_or_default(),
            address: gateway.spec.addresses.iter().map(|of| of.value.as_str()).collect(),
            ports: BTreeMap::new(),
            gateway: key,
        }
    }
}

/// Returns the labels of the proxies of a Gateway.
pub(super) fn proxy_labels(gateway: &str) -> Labels {
    Labels::from([(GATEWAY_NAME.to_owned(), bounded(gateway))])
}

/// Shortens a label that is too long. A hash keeps it unique.
fn bounded(name: &str) -> String {
    if name.len() <= MAX_NAME {
        return name.to_owned();
    }
    hashed(name, name)
}

/// Returns the start of a text with a hash of a name.
fn hashed(start: &str, name: &str) -> String {
    let kept = &start[..start.floor_char_boundary(MAX_NAME - 9)];
    format!("{kept}-{:08x}", fingerprint(name) & u64::from(u32::MAX))
}

/// Returns the name itself if a Service may have it (RFC 1035, section 2.3.1), otherwise one like it with a hash.
fn service_name(name: &str) -> String {
    let starts = name.starts_with(|first: char| first.is_ascii_lowercase());
    if starts && !name.contains('.') {
        return bounded(name);
    }
    let start = if starts { "" } else { "g-" };
    hashed(&format!("{start}{}", name.replace('.', "-")), name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    fn deployments(text: &str) -> Vec<GatewayDeployment> {
        world(text).gateway_deployments()
    }

    fn world(text: &str) -> World {
        let mut world = World::default();
        for (object, origin) in parse(text, "a.yaml").objects {
            world.apply(object, origin);
        }
        world.take_changes();
        world
    }

    fn gateway(name: &str, metadata: &str, spec: &str) -> String {
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\n\
             metadata: {{name: {name}, namespace: edge{metadata}}}\n\
             spec: {{gatewayClassName: skysail, listeners: [{{name: a, port: 80, protocol: HTTP}}, \
             {{name: b, port: 443, protocol: TLS, tls: {{mode: Passthrough}}}}]{spec}}}\n"
        )
    }

    #[test]
    fn gateways_are_deployed_unless_their_addresses_name_a_service() {
        let all = [
            gateway("own", "", ""),
            gateway("by-hand", "", ", addresses: [{type: Hostname, value: proxies}]"),
            gateway("other", "", "").replace("gatewayClassName: skysail", "gatewayClassName: other"),
            gateway(
                "asks",
                ", annotations: {networking.istio.io/service-type: NodePort}",
                ", addresses: [{value: 192.0.2.1}]",
            ),
        ];
        let made = deployments(&all.concat());
        let [asks, own] = &made[..] else { panic!("{made:#?}") };
        assert_eq!((asks.address.as_str(), asks.service_type.as_str()), ("192.0.2.1", "NodePort"));
        assert_eq!(own.name, "own-skysail");
        assert_eq!(own.ports, BTreeMap::from([(80, ListenerProtocol::Http), (443, ListenerProtocol::Tls)]));
        assert_eq!(own.selector["gateway.networking.k8s.io/gateway-name"], "own");
    }

    #[test]
    fn the_revision_is_that_of_the_gateway_or_its_namespace() {
        let namespace =
            "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: edge, labels: {istio.io/rev: a}}\n";
        let labelled = gateway("two", ", labels: {istio.io/rev: b}", "");
        let made = deployments(&[namespace, &gateway("one", "", ""), &labelled].concat());
        assert_eq!(made.iter().map(|of| of.revision.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    }

    #[test]
    fn a_gateway_for_the_cluster_only_has_the_address_of_its_service() {
        let service = "---\napiVersion: v1\nkind: Service\nmetadata: {name: own-skysail, namespace: edge}\n\
            spec: {clusterIP: 10.0.0.1, ports: [{port: 80}], \
            selector: {gateway.networking.k8s.io/gateway-name: own}}\n";
        let addresses = |metadata: &str| {
            let world = world(&[service, &gateway("own", metadata, "")].concat());
            let entry = world.kubernetes_gateways.get("edge", "own").unwrap();
            world.gateway_addresses(&entry.object)
        };
        assert_eq!(addresses(""), [""; 0]);
        let inside = ", annotations: {networking.istio.io/service-type: ClusterIP}";
        assert_eq!(addresses(inside), ["own-skysail.edge.svc.cluster.local"]);
    }

    #[test]
    fn long_names_are_shortened_and_stay_unique() {
        let long = "a".repeat(64);
        let (one, other) = (bounded(&long), bounded(&format!("{long}b")));
        assert!(one.len() == MAX_NAME && other.len() == MAX_NAME && one != other);
        assert_eq!(bounded("short"), "short");
        assert_eq!(service_name("web-skysail"), "web-skysail");
        let names = ["a.b", "a-b", "1.b", &format!("{}.b", "a".repeat(80))].map(service_name);
        for name in &names {
            assert!(
                name.len() <= MAX_NAME && name.starts_with(char::is_alphabetic) && !name.contains('.'),
                "{name}"
            );
        }
        assert_ne!(names[0], names[1]);
    }
}
