//! Routes of Gateway API for the mesh: traffic split, matches, redirects, rewrites, and consumer routes.

use skysail_testkit::{Mesh, Setup, eventually};

const MESH: &str = "
apiVersion: v1
kind: Pod
metadata: {name: front, namespace: shop, labels: {app: front}}
spec: {containers: [{name: c, image: registry.example/front, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far, namespace: web, labels: {app: far}}
spec: {containers: [{name: c, image: registry.example/far, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: stock-v1, namespace: shop, labels: {app: stock, version: v1}}
spec: {containers: [{name: c, image: registry.example/stock, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: stock-v2, namespace: shop, labels: {app: stock, version: v2}}
spec: {containers: [{name: c, image: registry.example/stock, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: stock, namespace: shop}
spec: {selector: {app: stock}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: stock-v1, namespace: shop}
spec: {selector: {app: stock, version: v1}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: stock-v2, namespace: shop}
spec: {selector: {app: stock, version: v2}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: stock, namespace: shop}
spec:
  parentRefs: [{group: '', kind: Service, name: stock, port: 80}]
  rules:
  - matches: [{headers: [{name: x-want, value: v2}]}]
    backendRefs: [{name: stock-v2, port: 80}]
  - matches: [{path: {value: /moved}}]
    filters: [{type: RequestRedirect, requestRedirect: {hostname: new.example.com, path: {type: ReplacePrefixMatch, replacePrefixMatch: /new}}}]
  - matches: [{path: {value: /up}}]
    filters: [{type: RequestRedirect, requestRedirect: {statusCode: 308, path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]
  - matches: [{path: {value: /none}}]
    backendRefs: [{name: absent, port: 80}]
  - matches: [{path: {value: /cut}}]
    filters: [{type: URLRewrite, urlRewrite: {path: {type: ReplacePrefixMatch, replacePrefixMatch: /}}}]
    backendRefs: [{name: stock-v2, port: 80}]
  - backendRefs: [{name: stock-v1, port: 80, weight: 1}, {name: stock-v2, port: 80, weight: 0}]
";

const CONSUMER: &str = "
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: consumer, namespace: web}
spec:
  parentRefs: [{group: '', kind: Service, name: stock, namespace: shop}]
  rules: [{backendRefs: [{name: stock-v2, namespace: shop, port: 80}]}]
";

const STOCK: &str = "http://stock.shop/";

/// Requests by which a share of one half is seen on both sides; the chance to miss one is below 1e-9.
const REQUESTS: usize = 32;

/// Returns the name of the pod that answers.
fn answering(mesh: &Mesh, from: &str, url: &str, more: &[&str]) -> Result<String, String> {
    let answer = mesh.call(from, url, more);
    match answer.status {
        Some(200) => Ok(answer.json()["pod"]["name"].as_str().unwrap_or_default().to_owned()),
        _ => Err(format!("{answer:?}")),
    }
}

/// Waits until the pod of this name answers, then asserts that no other one does.
fn assert_only(mesh: &Mesh, from: &str, url: &str, more: &[&str], pod: &str) {
    eventually(&format!("{pod} answers {from} on {url}"), || match answering(mesh, from, url, more)? {
        name if name == pod => Ok(()),
        other => Err(other),
    });
    for _ in 0..4 {
        assert_eq!(answering(mesh, from, url, more).as_deref(), Ok(pod), "{from} {url}");
    }
}

/// The workloads `envoys` have a real Envoy.
fn applies_routes(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).with_envoys(envoys).ready();
    assert_only(&mesh, "front", STOCK, &[], "stock-v1");
    assert_only(&mesh, "front", STOCK, &["-H", "x-want: v2"], "stock-v2");
    assert_only(&mesh, "far", STOCK, &[], "stock-v1");
    // Prefixes are whole path elements.
    assert_only(&mesh, "front", "http://stock.shop/movedaway", &[], "stock-v1");
    mesh.wait_status("front", "http://stock.shop/none", &[], 500);
    let answer = mesh.call("front", "http://stock.shop/cut/a?b=1", &[]);
    assert_eq!(answer.json()["path"], "/a?b=1", "{answer:?}");

    let moved = mesh.run(&["call", "front", "http://stock.shop/moved/a", "-i"]);
    let head = String::from_utf8_lossy(&moved.stdout).into_owned();
    assert!(head.starts_with("HTTP/1.1 302"), "{head}");
    assert!(head.contains("location: http://new.example.com:80/new/a"), "{head}");

    let up = mesh.run(&["call", "front", "http://stock.shop/up/a", "-i"]);
    let head = String::from_utf8_lossy(&up.stdout).into_owned();
    assert!(
        head.starts_with("HTTP/1.1 308") && head.contains("location: http://stock.shop:80/a\r\n"),
        "{head}"
    );

    // The weights change.
    mesh.edit("mesh.yaml", "{name: stock-v2, port: 80, weight: 0}", "{name: stock-v2, port: 80, weight: 1}");
    eventually("both versions get requests", || {
        let names = (0..REQUESTS).map(|_| answering(&mesh, "front", STOCK, &[]));
        let mut names: Vec<String> = names.collect::<Result<_, _>>()?;
        names.sort();
        names.dedup();
        if names == ["stock-v1", "stock-v2"] { Ok(()) } else { Err(format!("{names:?}")) }
    });

    // A route of the clients' namespace replaces that of the service, for these clients alone. It needs no grant.
    mesh.edit("mesh.yaml", "weight: 1}, {name: stock-v2, port: 80, weight: 1}", "weight: 1}");
    mesh.put("consumer.yaml", CONSUMER);
    assert_only(&mesh, "far", STOCK, &[], "stock-v2");
    assert_only(&mesh, "front", STOCK, &[], "stock-v1");
}

#[test]
fn routes_of_gateway_api_apply_to_sidecars() {
    applies_routes(&[]);
}

#[test]
fn routes_of_gateway_api_apply_to_envoys() {
    applies_routes(&["shop/front", "web/far"]);
}
