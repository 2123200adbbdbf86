//! A mesh of two networks: a client reaches the workloads of the other network through its gateway, which forwards
//! mutual TLS by the server name. The gateway is once Skysail's and once a real Envoy.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use skysail_testkit::{Mesh, Setup};

/// The addresses of the gateway and of a pod of `api` are not known before these run.
const MESH: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: crossing, namespace: shop}
spec:
  selector: {matchLabels: {app: crossing}}
  template:
    metadata:
      labels: {app: crossing, topology.istio.io/network: far}
      annotations: {inject.istio.io/templates: gateway}
    spec: {containers: [{name: istio-proxy, image: auto}]}
---
apiVersion: v1
kind: Service
metadata: {name: crossing, namespace: shop, labels: {topology.istio.io/network: far}}
spec: {externalIPs: [192.0.2.1], selector: {app: crossing}, ports: [{name: tls, port: 15443}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: api, namespace: shop}
spec:
  selector: {matchLabels: {app: api}}
  template:
    metadata: {labels: {app: api, topology.istio.io/network: far}}
    spec: {containers: [{name: api, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: api, namespace: shop}
spec: {selector: {app: api}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Pod
metadata: {name: unlabelled, namespace: shop, labels: {app: unlabelled}}
spec: {containers: [{name: c, image: registry.example/api, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: unlabelled, namespace: shop}
spec: {selector: {app: unlabelled}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: machine, namespace: shop}
spec: {address: 192.0.2.2, network: far, labels: {app: machine}, serviceAccount: default}
---
apiVersion: v1
kind: Service
metadata: {name: machine, namespace: shop}
spec: {selector: {app: machine}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: vm, namespace: shop}
spec:
  hosts: [vm.example.com]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}]
  endpoints: [{address: 192.0.2.3, network: far, serviceAccount: default}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: front, namespace: shop}
spec:
  selector: {matchLabels: {app: front}}
  template:
    metadata: {labels: {app: front, topology.istio.io/network: near}}
    spec: {serviceAccountName: front, containers: [{name: front, image: registry.example/front}]}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: front, namespace: shop}
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: strict, namespace: shop}
spec: {mtls: {mode: STRICT}}
"#;

/// Networks of the mesh: without any, by address, and by the cluster of the control plane.
const NETWORKS: [&str; 3] = [
    "{}",
    "{far: {endpoints: [{fromCidr: POD/32}], gateways: [{address: GATEWAY, port: 15443}]}}",
    "{far: {endpoints: [{fromRegistry: Kubernetes}], \
     gateways: [{registryServiceName: crossing.shop.svc.cluster.local, port: 15443}]}}",
];

fn networks(value: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\n\
         data:\n  mesh: ''\n  meshNetworks: '{{networks: {value}}}'\n"
    )
}

const GATEWAY: &str = r#"
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: crossing, namespace: shop}
spec:
  selector: {app: crossing}
  servers: [{port: {number: 15443, name: tls, protocol: TLS}, hosts: ["*.local", vm.example.com], tls: {mode: AUTO_PASSTHROUGH}}]
"#;

fn address(mesh: &Mesh, workload: &str) -> String {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let pod = pods.iter().find(|pod| pod["name"].as_str().unwrap().starts_with(workload)).unwrap();
    pod["address"].as_str().unwrap().to_owned()
}

fn is_reached_through_the_gateway(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).with_envoys(envoys).ready();
    let url = "http://api.shop/";
    // Nobody listens at the address of the gateway, although the client could reach the pods directly.
    mesh.edit("mesh.yaml", "192.0.2.1", &address(&mesh, "crossing"));
    for placeholder in ["192.0.2.2", "192.0.2.3"] {
        mesh.edit("mesh.yaml", placeholder, &address(&mesh, "api"));
    }
    let others = ["http://machine.shop/", "http://vm.example.com/"];
    [url].iter().chain(&others).for_each(|url| mesh.wait_status("front", url, &[], 503));

    mesh.put("gateway.yaml", GATEWAY);
    others.iter().for_each(|url| mesh.wait_status("front", url, &[], 200));
    mesh.wait_status("front", url, &[], 200);
    let report = mesh.call("front", url, &[]).json();
    assert_eq!(
        report["caller"], "spiffe://cluster.local/ns/shop/sa/front",
        "mutual TLS ends at the pod: {report:#}"
    );

    mesh.put("gateway.yaml", &GATEWAY.replace("*.local", "other.shop.svc.cluster.local"));
    mesh.wait_status("front", url, &[], 503);
    assert_eq!(
        mesh.call("front", "http://vm.example.com/", &[]).status,
        Some(200),
        "its host is still served"
    );
    mesh_networks_are_reached_through_their_gateways(&mesh);
}

/// The gateway is closed at first, so a request fails exactly if it goes there. The networks of the mesh alone name the
/// gateway, and the network of the pod without a label.
fn mesh_networks_are_reached_through_their_gateways(mesh: &Mesh) {
    let closed = GATEWAY.replace("*.local", "other.shop.svc.cluster.local");
    let urls = ["http://api.shop/", "http://unlabelled.shop/"];
    let all = |status: u16| urls.iter().for_each(|url| mesh.wait_status("front", url, &[], status));
    mesh.edit("mesh.yaml", "shop, labels: {topology.istio.io/network: far}}", "shop}");
    let [none, by_address, by_cluster] = NETWORKS.map(|value| {
        let value = value.replace("POD", &address(mesh, "unlabelled"));
        networks(&value.replace("GATEWAY", &address(mesh, "crossing")))
    });
    all(200);
    for configured in [by_address, by_cluster] {
        mesh.put("networks.yaml", &configured);
        all(503);
        mesh.put("gateway.yaml", GATEWAY);
        all(200);
        mesh.put("gateway.yaml", &closed);
        all(503);
        mesh.put("networks.yaml", &none);
        all(200);
    }
}

#[test]
fn another_network_is_reached_through_its_gateway() {
    is_reached_through_the_gateway(&[]);
}

#[test]
fn an_envoy_is_a_gateway_between_networks() {
    is_reached_through_the_gateway(&["shop/crossing", "shop/front"]);
}
