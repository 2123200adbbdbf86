//! The proxies that the control plane deploys for Gateways.

use serde_json::{Value, json};
use skysail_testkit::{cached, eventually};

use crate::{cluster::Cluster, replica::Replica};

const GATEWAYS: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: { name: edge }
spec:
  gatewayClassName: skysail
  infrastructure: { labels: { team: one }, annotations: { example.com/note: two } }
  listeners: [{ name: http, port: 80, protocol: HTTP }]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: { name: taken }
spec:
  gatewayClassName: skysail
  listeners: [{ name: http, port: 80, protocol: HTTP }]
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: { name: zone }
spec:
  gatewayClassName: skysail
  listeners: [{ name: http, port: 80, protocol: HTTP }]
";
/// Service of a user with the name that the one of Gateway `taken` would have.
const FOREIGN: &str = "
apiVersion: v1
kind: Service
metadata: { name: taken-skysail }
spec: { selector: { app: mine }, ports: [{ port: 1 }] }
";

/// Waits until an object exists and this holds for it.
fn until(cluster: &Cluster, object: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    eventually(&format!("{object}: {what}"), || {
        let output = cluster.kubectl(&["get", object, "-o", "json"], "");
        let read = serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default();
        if output.status.success() && holds(&read) { Ok(read) } else { Err(read.to_string()) }
    })
}

fn ports(service: &Value) -> Vec<&Value> {
    service["spec"]["ports"].as_array().into_iter().flatten().map(|port| &port["port"]).collect()
}

#[test]
fn a_gateway_gets_its_proxies() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let definitions = cached("pilot-agent-eed52ebb66ad/gateway-api-crd.yaml");
    cluster.done(&["apply", "--server-side", "--force-conflicts", "-f", definitions.to_str().unwrap()], "");
    cluster.done(&["apply", "-f", "-"], FOREIGN);
    let options = ["--deploy-gateways", "--injection-image", "registry.example/skysail-proxy:1"];
    let _replica = Replica::start(&cluster, &options);
    cluster.done(&["apply", "-f", "-"], GATEWAYS);

    let class = until(&cluster, "gatewayclass/skysail", "exists", |_| true);
    assert_eq!(class["spec"]["controllerName"], "skysail.io/gateway-controller");
    let service = until(&cluster, "service/edge-skysail", "exists", |_| true);
    assert_eq!(ports(&service), [&json!(15021), &json!(80)]);
    assert_eq!(service["spec"]["type"], "LoadBalancer");
    let gateway = until(&cluster, "gateway/edge", "exists", |_| true);
    for object in [&service, &until(&cluster, "deployment/edge-skysail", "exists", |_| true)] {
        let metadata = &object["metadata"];
        assert_eq!(metadata["ownerReferences"][0]["uid"], gateway["metadata"]["uid"], "{object:#}");
        assert_eq!(metadata["labels"]["team"], "one");
        assert_eq!(metadata["annotations"]["example.com/note"], "two");
    }
    let account = until(&cluster, "serviceaccount/edge-skysail", "exists", |_| true);
    assert_eq!(account["metadata"]["ownerReferences"][0]["name"], "edge");

    // A new listener is a port of the Service. The number of replicas stays what a user or an autoscaler has set.
    cluster.done(&["scale", "deployment/edge-skysail", "--replicas", "3"], "");
    let more = r#"[{"op": "add", "path": "/spec/listeners/-", "value": {"name": "more", "port": 8080, "protocol": "HTTP"}}]"#;
    cluster.done(&["patch", "gateway/edge", "--type=json", "-p", more], "");
    until(&cluster, "service/edge-skysail", "has the new port", |read| ports(read).contains(&&json!(8080)));
    let deployment = until(&cluster, "deployment/edge-skysail", "exists", |_| true);
    assert_eq!(deployment["spec"]["replicas"], 3);

    // What belongs to others is not changed. Gateways are deployed in the order of their names.
    until(&cluster, "service/zone-skysail", "exists", |_| true);
    let foreign = until(&cluster, "service/taken-skysail", "exists", |_| true);
    assert_eq!((&foreign["spec"]["selector"]["app"], ports(&foreign)), (&json!("mine"), vec![&json!(1)]));

    // A deleted object comes back.
    cluster.done(&["delete", "service/edge-skysail"], "");
    until(&cluster, "service/edge-skysail", "exists again", |_| true);
}
