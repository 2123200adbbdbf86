//! The status of objects of Gateway API, as the leader of the control planes writes it.

use serde_json::Value;
use skysail_testkit::{cached, eventually};

use crate::{cluster::Cluster, replica::Replica};

const OBJECTS: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: { name: edge }
spec:
  gatewayClassName: skysail
  listeners: [{ name: http, port: 80, protocol: HTTP }]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: { name: shop }
spec:
  parentRefs: [{ name: edge }]
  rules: [{ backendRefs: [{ name: shop, port: 80 }] }]
";
/// Service that the route lacks at first.
const SERVICE: &str = "
apiVersion: v1
kind: Service
metadata: { name: shop }
spec: { ports: [{ port: 80 }] }
";

/// Returns the object as the cluster has it.
fn read(cluster: &Cluster, object: &str) -> Value {
    serde_json::from_str(&cluster.done(&["get", object, "-o", "json"], "")).unwrap()
}

/// Returns a condition of a list, with its status and reason.
fn condition<'a>(conditions: &'a Value, kind: &str) -> (&'a str, &'a str) {
    let all = conditions.as_array().into_iter().flatten();
    let one = all.into_iter().find(|one| one["type"] == kind);
    one.map_or(("", ""), |one| (one["status"].as_str().unwrap(), one["reason"].as_str().unwrap()))
}

#[test]
fn the_leader_writes_the_status_of_routes_and_gateways() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let definitions = cached("pilot-agent-eed52ebb66ad/gateway-api-crd.yaml");
    cluster.done(&["apply", "--server-side", "--force-conflicts", "-f", definitions.to_str().unwrap()], "");
    let mut replicas = [(); 2].map(|()| Replica::start(&cluster, &["--write-status"]));
    cluster.done(&["apply", "-f", "-"], OBJECTS);
    until_refs(&cluster, ("False", "BackendNotFound"));
    let route = read(&cluster, "httproute/shop");
    let parent = &route["status"]["parents"][0];
    assert_eq!(parent["parentRef"], route["spec"]["parentRefs"][0]);
    assert_eq!(condition(&parent["conditions"], "Accepted"), ("True", "Accepted"));
    assert_eq!(parent["conditions"][0]["observedGeneration"], route["metadata"]["generation"]);

    // The status of another controller stays.
    let foreign = r#"[{"op": "add", "path": "/status/parents/-", "value": {"parentRef": {"name": "other"},
        "controllerName": "example.com/other", "conditions": [{"type": "Accepted", "status": "True",
        "reason": "Accepted", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}]"#;
    cluster.done(&["patch", "httproute/shop", "--subresource=status", "--type=json", "-p", foreign], "");
    cluster.done(&["apply", "-f", "-"], SERVICE);
    until_refs(&cluster, ("True", "ResolvedRefs"));
    let route = read(&cluster, "httproute/shop");
    let names = route["status"]["parents"].as_array().unwrap().iter().map(|one| &one["controllerName"]);
    let mut names: Vec<&str> = names.map(|name| name.as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["example.com/other", "skysail.io/gateway-controller"]);
    let gateway = read(&cluster, "gateway/edge");
    assert_eq!(gateway["status"]["listeners"][0]["attachedRoutes"], 1);
    assert_eq!(condition(&gateway["status"]["conditions"], "Accepted"), ("True", "Accepted"));
    let version = gateway["metadata"]["resourceVersion"].clone();

    // Another replica takes over, and writes nothing that is there already.
    let holder = |cluster: &Cluster| {
        let lease = read(cluster, "lease/skysail-leader");
        lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned()
    };
    let first = holder(&cluster);
    replicas.iter_mut().for_each(Replica::kill);
    let _next = Replica::start(&cluster, &["--write-status"]);
    eventually("another leader", || match holder(&cluster) {
        now if now != first => Ok(()),
        now => Err(now),
    });
    cluster.done(&["delete", "service/shop"], "");
    until_refs(&cluster, ("False", "BackendNotFound"));
    assert_eq!(read(&cluster, "gateway/edge")["metadata"]["resourceVersion"], version);
}

/// Waits until the condition `ResolvedRefs` of the route has this status and reason at one of its parents.
fn until_refs(cluster: &Cluster, expected: (&str, &str)) {
    eventually("the status of the route", || {
        let route = read(cluster, "httproute/shop");
        let parents = route["status"]["parents"].as_array().into_iter().flatten();
        let mut refs = parents.map(|parent| condition(&parent["conditions"], "ResolvedRefs"));
        if refs.any(|of| of == expected) { Ok(()) } else { Err(route["status"].to_string()) }
    });
}
