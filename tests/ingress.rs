//! Ingresses from outside of the mesh: hosts, paths and their precedence, and headers that the mesh configuration sets.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use skysail_testkit::{Setup, eventually};

/// Timeout of reads. A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

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
spec: {selector: {app: edge}, ports: [{name: http, port: 80, targetPort: plain}]}
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

/// Sends a request and returns the whole response.
fn get(address: SocketAddr, host: &str, path: &str) -> Result<String, String> {
    let mut stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut response = Vec::new();
    stream.read_to_end(&mut response).map_err(|error| error.to_string())?;
    Ok(String::from_utf8_lossy(&response).into_owned())
}

#[test]
fn an_ingress_routes_clients_outside_of_the_mesh() {
    let text = [include_str!("shop.yaml"), EDGE].join("---\n");
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text);
    let mesh = setup.with(&["-p", "0:edge:80"]).ready();
    let said = mesh.said();
    let line = said.lines().find(|line| line.ends_with("-> shop/edge:80")).unwrap();
    let address = line.split_whitespace().nth(1).unwrap().split("//").last().unwrap().parse().unwrap();

    let version = |path: &str, wanted: &str| {
        eventually(&format!("{path} reaches {wanted}"), || {
            let answer = get(address, "a.example.com", path)?;
            let wanted = format!(r#""version":"{wanted}""#);
            let is_it = answer.starts_with("HTTP/1.1 200") && answer.replace(' ', "").contains(&wanted);
            if is_it { Ok(answer) } else { Err(answer) }
        })
    };
    let answer = version("/", "v1");
    assert!(answer.contains("server: shop-edge\r\n"), "{answer}");
    version("/new", "v2");
    version("/new/more", "v2");
    version("/new/old", "v1");
    // Prefixes end with a path element.
    version("/newer", "v1");
    let status = |host: &str| get(address, host, "/").unwrap().split(' ').nth(1).unwrap().to_owned();
    assert_eq!(status("b.example.com"), "404");

    // Another class is not served.
    mesh.edit("mesh.yaml", "ingressClassName: istio", "ingressClassName: other");
    eventually("the Ingress is not served", || match get(address, "a.example.com", "/") {
        Ok(answer) if answer.starts_with("HTTP/1.1 200") => Err(answer),
        _ => Ok(()),
    });
}
