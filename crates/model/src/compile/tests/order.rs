//! The age of objects decides between them. Objects that are applied together have the same `creationTimestamp`.

use super::*;

const SAME_PORT: &str = r#"
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: beta, namespace: shop, creationTimestamp: "2026-01-01T00:00:00Z"}
spec: {servers: [{port: {number: 9000, name: tcp, protocol: TCP}, hosts: ["*"]}]}
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: alpha, namespace: shop, creationTimestamp: "2026-01-01T00:00:00Z"}
spec: {servers: [{port: {number: 9000, name: http, protocol: HTTP}, hosts: ["*"]}]}
"#;

#[test]
fn the_name_decides_between_objects_of_the_same_time_and_the_file_between_those_without() {
    let gateway = ProxyView { role: Role::Router, ..view() };
    // The first Gateway has the port. One for TCP has no listener, because no VirtualService is bound to it.
    let listens = |text: &str| {
        let (made, _) = compile(&world(text), &gateway);
        made.get(Kind::Listener, "0.0.0.0_9000").is_some()
    };
    assert!(listens(SAME_PORT));
    assert!(listens(&SAME_PORT.replacen("2026", "2027", 1)));
    assert!(!listens(&SAME_PORT.replacen("2026", "2025", 1)));
    assert!(!listens(&SAME_PORT.replace(", creationTimestamp: \"2026-01-01T00:00:00Z\"", "")));
}

#[test]
fn the_oldest_service_of_a_port_gives_it_the_protocol() {
    let services = r#"
apiVersion: v1
kind: Service
metadata: {name: a, namespace: shop, creationTimestamp: "2026-01-02T00:00:00Z"}
spec: {selector: {app: db}, clusterIP: 10.96.1.1, ports: [{name: tcp, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: b, namespace: shop, creationTimestamp: "2026-01-01T00:00:00Z"}
spec: {selector: {app: db}, clusterIP: 10.96.1.2, ports: [{name: http, port: 80, targetPort: 8080}]}
"#;
    let serves_http = |text: &str| {
        let (made, _) = compile(&world(text), &view());
        let all = chains(&made, 8080);
        all.iter().flat_map(configs).any(|config| unpack::<HttpConnectionManager>(config).is_some())
    };
    assert!(serves_http(services));
    assert!(!serves_http(&services.replace("01-01T", "01-03T")));
}
