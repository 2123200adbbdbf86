//! Bootstrap files with all resources of a proxy as static ones.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use skysail_xds::Kind;

use crate::Resources;

/// Cluster of the certificates of the mesh, which Istio's bootstrap defines.
const CERTIFICATES: &str = "sds-grpc";

/// Returns a bootstrap file, JSON. Endpoints are those of static clusters, and routes are part of their listeners, since
/// a validation waits for no discovery.
pub(crate) fn of(resources: &Resources) -> Value {
    let of_kind = |kind: Kind| {
        resources
            .iter()
            .filter(move |((of, _), _)| *of == kind)
            .map(|(_, value)| value.clone())
            .collect::<Vec<_>>()
    };
    let secrets = of_kind(Kind::Secret);
    let known: BTreeSet<&str> = secrets.iter().filter_map(|secret| secret["name"].as_str()).collect();
    let mut clusters = of_kind(Kind::Cluster);
    clusters.iter_mut().for_each(|cluster| with_endpoints(cluster, resources));
    clusters.push(json!({
        "name": CERTIFICATES,
        "type": "STATIC",
        "connectTimeout": "1s",
        "loadAssignment": {
            "clusterName": CERTIFICATES,
            "endpoints": [{"lbEndpoints": [{"endpoint": {"address": {"pipe": {"path": "/run/sds"}}}}]}],
        },
        "typedExtensionProtocolOptions": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicitHttpConfig": {"http2ProtocolOptions": {}},
            },
        },
    }));
    let mut listeners = of_kind(Kind::Listener);
    listeners.iter_mut().for_each(|listener| with_routes(listener, resources));
    let mut all = json!({"listeners": listeners, "clusters": clusters, "secrets": secrets});
    with_static_secrets(&mut all, &known);
    json!({"node": {"id": "sidecar~10.0.0.1~p.n~n.svc.cluster.local", "cluster": "p.n"}, "staticResources": all})
}

/// Moves the endpoints of a cluster into it.
fn with_endpoints(cluster: &mut Value, resources: &Resources) {
    if cluster["type"] != "EDS" {
        return;
    }
    let service = cluster["edsClusterConfig"]["serviceName"].as_str().or(cluster["name"].as_str()).unwrap();
    let key = (Kind::Endpoint, service.to_owned());
    let endpoints = resources.get(&key).cloned().unwrap_or_else(|| json!({"clusterName": service}));
    let cluster = cluster.as_object_mut().unwrap();
    cluster.remove("edsClusterConfig");
    cluster.insert("type".to_owned(), json!("STATIC"));
    cluster.insert("loadAssignment".to_owned(), endpoints);
}

/// Moves route configurations into the connection managers that name them.
fn with_routes(value: &mut Value, resources: &Resources) {
    each_object(value, &mut |fields| {
        let name = fields.get("rds").and_then(|rds| rds["routeConfigName"].as_str());
        let Some(name) = name.map(ToOwned::to_owned) else { return };
        if let Some(routes) = resources.get(&(Kind::Route, name)) {
            fields.remove("rds");
            fields.insert("routeConfig".to_owned(), routes.clone());
        }
    });
}

/// Names static secrets where the configuration names those of discovery.
fn with_static_secrets(value: &mut Value, known: &BTreeSet<&str>) {
    each_object(value, &mut |fields| {
        let name = fields.get("name").and_then(Value::as_str);
        if name.is_some_and(|name| known.contains(name))
            && fields.get("sdsConfig").is_some_and(Value::is_object)
        {
            fields.remove("sdsConfig");
        }
    });
}

fn each_object(value: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    match value {
        Value::Object(fields) => {
            change(fields);
            fields.values_mut().for_each(|value| each_object(value, change));
        }
        Value::Array(items) => items.iter_mut().for_each(|value| each_object(value, change)),
        _ => {}
    }
}
