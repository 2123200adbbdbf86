//! From objects of all kinds to the configuration of proxies.

use std::{collections::BTreeMap, str::from_utf8};

use skysail_model::{
    Object, ProxyNode, ProxyView, Role, World,
    api::{Labels, kube::Locality},
};
use skysail_proxy::explain::{EncodedResource, ProxyConfiguration};
use skysail_xds::Kind;

/// Maximum number of proxies for an input.
const MAX_PROXIES: usize = 6;
/// Label of the proxies of a Gateway of Gateway API.
const GATEWAY_NAME: &str = "gateway.networking.k8s.io/gateway-name";

/// Objects, compiled for sidecars, gateways and a gRPC client: a proxy takes what is made of accepted objects for it,
/// unless an EnvoyFilter changes it.
pub fn compile(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    let objects = skysail_model::parse(text, "fuzz.yaml").objects;
    let nodes = nodes(&objects.iter().map(|(object, _)| object).collect::<Vec<_>>());
    let is_patched = objects.iter().any(|(object, _)| matches!(object, Object::EnvoyFilter(_)));
    let mut world = World::new();
    for (object, origin) in objects {
        world.apply(object, origin);
    }
    world.settle();
    world.validate();
    for mut node in nodes {
        node.view.is_authenticated = true;
        if world.identify(&mut node, "Kubernetes").is_err() {
            continue;
        }
        let refused = refused(&world, &node.view);
        let is_foreign = is_patched || node.view.role == Role::Grpc;
        assert!(refused.is_empty() || is_foreign, "{}: {refused:?}", node.id);
    }
}

/// Returns the resources of a proxy that it refuses, with the reasons.
fn refused(world: &World, view: &ProxyView) -> Vec<(String, String)> {
    let (made, _) = skysail_model::compile(world, view);
    let mut resources = Vec::new();
    for kind in [Kind::Cluster, Kind::Endpoint, Kind::Route, Kind::Listener] {
        let of_kind = made.iter(kind);
        resources.extend(of_kind.map(|of| EncodedResource {
            kind,
            name: of.name.to_string(),
            body: of.body.clone(),
        }));
    }
    ProxyConfiguration::load(&resources).refused().to_vec()
}

/// Returns proxies that the objects may concern: those of Pods, of gateways, and one of each role without a Pod.
fn nodes(objects: &[&Object]) -> Vec<ProxyNode> {
    let mut nodes = vec![
        node("sidecar", "p", "default", &labels("app", "a"), ""),
        node("router", "g", "istio-system", &labels("istio", "ingressgateway"), ""),
        node("sidecar", "p", "default", &labels("app", "a"), "grpc"),
    ];
    for object in objects {
        let meta = object.meta();
        nodes.push(match object {
            Object::Pod(pod) => node("sidecar", &meta.name, &meta.namespace, &meta.labels, "")
                .map(|node| with_account(node, &pod.spec.service_account)),
            Object::Gateway(gateway) => node("router", "g", &meta.namespace, &gateway.spec.selector, ""),
            Object::KubernetesGateway(_) => {
                node("router", "g", &meta.namespace, &labels(GATEWAY_NAME, &meta.name), "")
            }
            _ => continue,
        });
    }
    nodes.into_iter().flatten().take(MAX_PROXIES).collect()
}

fn labels(key: &str, value: &str) -> Labels {
    BTreeMap::from([(key.to_owned(), value.to_owned())])
}

fn with_account(mut node: ProxyNode, account: &str) -> ProxyNode {
    account.clone_into(&mut node.view.service_account);
    node
}

/// Returns a proxy; `None` if its names are not those of a node.
fn node(role: &str, pod: &str, namespace: &str, labels: &Labels, generator: &str) -> Option<ProxyNode> {
    let id = format!("{role}~10.0.0.1~{pod}.{namespace}~{namespace}.svc.cluster.local");
    let metadata = serde_json::json!({"LABELS": labels, "GENERATOR": generator, "SKYSAIL_RESOLVED": "true"});
    ProxyNode::parse(&id, metadata, Locality::default()).ok()
}
