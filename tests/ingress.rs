//! Ingresses from outside of the mesh: hosts, paths and their precedence, and headers that the mesh configuration sets.

use skysail_testkit::{Client, Setup, eventually, wait_response};

const EDGE: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    defaultConfig: {proxyHeaders: {server: {value: shop-edge}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: edge, namespace: shop}
spec:
  selector: {matchLabels: {app: edge}}
  template:
    metadata: {labels: {app: edge, istio: ingressgateway}, annotations: {inject.istio.io/templates: gateway}}
    spec:
      containers: [{name: istio-proxy, image: auto, ports: [{name: plain, containerPort: 8080}]}]
---
apiVersion: v1
kind: Service
metadata: {name: edge, namespace: shop}
spec:
  type: LoadBalancer
  externalIPs: [192.0.2.80]
  selector: {app: edge}
  ports: [{name: http, port: 80, targetPort: plain}]
status: {loadBalancer: {ingress: [{hostname: edge.example.net}]}}
---
apiVersion: v1
kind: Service
metadata: {name: stock-v1, namespace: shop}
spec: {selector: {app: stock, version: v1}, ports: [{name: http, port: 80, targetPort: 9090}]}
---
apiVersion: v1
kind: Service
metadata: {name: stock-v2, namespace: shop}
spec: {selector: {app: stock, version: v2}, ports: [{name: http, port: 80, targetPort: 9090}]}
---
apiVersion: networking.k8s.io/v1
kind: IngressClass
metadata: {name: istio}
spec: {controller: istio.io/ingress-controller}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: stock, namespace: shop}
spec:
  ingressClassName: istio
  rules:
  - host: a.example.com
    http:
      paths:
      - {path: /, pathType: Prefix, backend: {service: {name: stock-v1, port: {number: 80}}}}
      - {path: /new, pathType: Prefix, backend: {service: {name: stock-v2, port: {name: http}}}}
      - {path: /new/old, pathType: Exact, backend: {service: {name: stock-v1, port: {number: 80}}}}
"#;

#[test]
fn an_ingress_routes_clients_outside_of_the_mesh() {
    let text = [include_str!("shop.yaml"), EDGE].join("---\n");
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text);
    let mesh = setup.with(&["-p", "0:edge:80"]).ready();
    let client = Client::plain(mesh.published("shop/edge:80"));

    let version = |path: &str, version: &str| {
        let text = format!(r#""version":"{version}""#);
        let request = || client.get("a.example.com", path, "");
        wait_response(&format!("{path} reaches {version}"), 200, &text, request)
    };
    let response = version("/", "v1");
    assert!(response.contains("server: shop-edge\r\n"), "{response}");
    version("/new", "v2");
    version("/new/more", "v2");
    version("/new/old", "v1");
    // Prefixes end with a path element.
    version("/newer", "v1");
    assert_eq!(client.status("b.example.com", "/"), Ok(404));

    let status = |has: &[&str]| {
        eventually(&format!("the status has {has:?}"), || {
            let output = mesh.run(&["status", "ingress/stock", "-n", "shop", "--wait"]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            if has.iter().all(|has| text.contains(has)) { Ok(()) } else { Err(format!("{output:?}")) }
        });
    };
    // The gateway alone holds its resources.
    let held = ["in effect", "1 acknowledged, 0 sent", "router~", "Accepted true", "ResolvedRefs true"];
    status(&[&held[..], &["addresses: 192.0.2.80, edge.example.net"]].concat());
    mesh.edit("mesh.yaml", "name: stock-v2, port: {name: http}", "name: stock-v2, port: {name: other}");
    status(&["ResolvedRefs false: BackendNotFound: there is no Service shop/stock-v2 with port other"]);

    // Another class is not served.
    mesh.edit("mesh.yaml", "ingressClassName: istio", "ingressClassName: other");
    eventually("the Ingress is not served", || match client.status("a.example.com", "/") {
        Ok(200) => Err("200".to_owned()),
        _ => Ok(()),
    });
    status(&["no connected proxy holds", "Accepted false: OtherClass", "addresses: none known"]);
}
