//! Routing of connections by VirtualServices: TCP by weights and by the client's labels, delegates, and aliases.
//!
//! The servers speak HTTP behind ports that are declared as TCP, so the answers name the pod that a connection reached.

use skysail_testkit::{Mesh, Setup, eventually};

const MESH: &str = "
apiVersion: v1
kind: Pod
metadata: {name: front, labels: {app: front}}
spec: {containers: [{name: c, image: registry.example/front, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: batch, labels: {app: batch}}
spec: {containers: [{name: c, image: registry.example/batch, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: store-v1, labels: {app: store, version: v1}}
spec: {containers: [{name: c, image: registry.example/store, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: store-v2, labels: {app: store, version: v2}}
spec: {containers: [{name: c, image: registry.example/store, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: api}
spec:
  selector: {app: store}
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: Service
metadata: {name: store}
spec:
  selector: {app: store}
  ports: [{name: tcp, port: 9000, targetPort: 8080}]
---
apiVersion: v1
kind: Service
metadata: {name: alias}
spec: {type: ExternalName, externalName: api.default.svc.cluster.local, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: store}
spec:
  host: store
  subsets: [{name: v1, labels: {version: v1}}, {name: v2, labels: {version: v2}}]
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: api}
spec:
  host: api
  subsets: [{name: v1, labels: {version: v1}}, {name: v2, labels: {version: v2}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: store}
spec:
  hosts: [store]
  tcp:
  - match: [{sourceLabels: {app: batch}}]
    route: [{destination: {host: store, subset: v2}}]
  - match: [{port: 9000}]
    route:
    - {destination: {host: store, subset: v1}, weight: 100}
    - {destination: {host: store, subset: v2}, weight: 0}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: api}
spec:
  hosts: [api]
  http:
  - match: [{uri: {prefix: /part}}]
    delegate: {name: part}
  - route: [{destination: {host: api, subset: v1}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: part}
spec:
  http:
  - match: [{uri: {prefix: /part/two}}]
    route: [{destination: {host: api, subset: v2}}]
  - match: [{uri: {prefix: /other}}]
    directResponse: {status: 418}
  - directResponse: {status: 299}
";

/// Connections by which a share of one half is seen on both sides; the chance to miss one is below 1e-9.
const CONNECTIONS: usize = 32;

/// Returns the name of the pod that answers.
fn answering(mesh: &Mesh, from: &str, url: &str) -> Result<String, String> {
    let answer = mesh.call(from, url, &[]);
    match answer.status {
        Some(200) => Ok(answer.json()["pod"]["name"].as_str().unwrap_or_default().to_owned()),
        _ => Err(format!("{answer:?}")),
    }
}

/// Calls `url` until the pod of this name answers, then asserts that no other one does.
fn assert_only(mesh: &Mesh, from: &str, url: &str, pod: &str) {
    eventually(&format!("{pod} answers {from} on {url}"), || match answering(mesh, from, url)? {
        name if name == pod => Ok(()),
        other => Err(other),
    });
    for _ in 0..8 {
        assert_eq!(answering(mesh, from, url).as_deref(), Ok(pod), "{from} {url}");
    }
}

/// The workloads `envoys` have a real Envoy.
fn routes_connections(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).with_envoys(envoys).ready();
    let store = "http://store:9000/";
    assert_only(&mesh, "front", store, "store-v1");
    assert_only(&mesh, "batch", store, "store-v2");

    // The weights change, and connections that are opened from then on follow them.
    let weighted = "{destination: {host: store, subset: v1}, weight: 100}";
    mesh.edit("mesh.yaml", weighted, &weighted.replace("100", "0"));
    mesh.edit("mesh.yaml", "subset: v2}, weight: 0}", "subset: v2}, weight: 50}");
    assert_only(&mesh, "front", store, "store-v2");
    mesh.edit("mesh.yaml", &weighted.replace("100", "0"), &weighted.replace("100", "50"));
    eventually("both subsets get connections", || {
        let mut names: Vec<String> =
            (0..CONNECTIONS).map(|_| answering(&mesh, "front", store)).collect::<Result<_, _>>()?;
        names.sort();
        names.dedup();
        if names == ["store-v1", "store-v2"] { Ok(()) } else { Err(format!("{names:?}")) }
    });

    // Without the rules, the service itself gets the connections.
    mesh.edit("mesh.yaml", "  hosts: [store]\n", "  hosts: [unknown]\n");
    eventually("both pods of the service get connections from batch", || {
        let first = answering(&mesh, "batch", store)?;
        if first == "store-v1" { Ok(()) } else { Err(first) }
    });
}

#[test]
fn connections_are_routed_by_rules() {
    routes_connections(&[]);
}

#[test]
fn connections_are_routed_by_an_envoy() {
    routes_connections(&["default/front", "default/batch"]);
}

/// The workloads `envoys` have a real Envoy.
fn follows_delegates(envoys: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).with_envoys(envoys).ready();
    for host in ["api", "alias"] {
        assert_only(&mesh, "front", &format!("http://{host}/"), "store-v1");
        assert_only(&mesh, "front", &format!("http://{host}/part/two"), "store-v2");
        mesh.wait_status("front", &format!("http://{host}/part/three"), &[], 299);
        // This rule of the delegate does not refine a match of the root.
        assert_only(&mesh, "front", &format!("http://{host}/other"), "store-v1");
    }
    // A change of the delegate alone takes effect.
    mesh.edit("mesh.yaml", "directResponse: {status: 299}", "directResponse: {status: 298}");
    mesh.wait_status("front", "http://api/part/three", &[], 298);
}

#[test]
fn delegates_and_aliases_are_followed() {
    follows_delegates(&[]);
}

#[test]
fn delegates_and_aliases_are_followed_by_an_envoy() {
    follows_delegates(&["default/front"]);
}
