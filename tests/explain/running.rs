//! Explanations of a running mesh: endpoints that a proxy has ejected, and resources that it refuses.

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually, pod};

use super::SKYSAIL;

const EJECTING: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: one, labels: {app: back}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: two, labels: {app: back}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: back}
spec: {selector: {app: back}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: back}
spec:
  host: back
  trafficPolicy:
    outlierDetection: {consecutive5xxErrors: 1, baseEjectionTime: 600s, maxEjectionPercent: 100}
---
";

/// Explains a request of `front` by what the proxies of the mesh hold.
fn explained(mesh: &Mesh, url: &str) -> Value {
    let output = mesh.run(&["explain", "--from", "front", url, "--output", "json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn ejected_endpoints_are_named() {
    let mesh = Setup::of_text(SKYSAIL, &(EJECTING.to_owned() + &pod("front"))).ready();
    let url = "http://back/";
    mesh.wait_status("front", url, &[], 200);
    let pods = |report: &Value| -> Vec<String> {
        let places = report["destinations"].as_array().unwrap();
        places.iter().map(|to| to["to"]["pod"].as_str().unwrap_or_default().to_owned()).collect()
    };
    eventually("the sidecar knows both pods", || {
        let found = pods(&explained(&mesh, url));
        if found.len() == 2 { Ok(()) } else { Err(format!("{found:?}")) }
    });
    // A second response with this status would eject the other pod.
    assert_eq!(mesh.call("front", "http://back/?status=500", &[]).status, Some(500));
    let report = explained(&mesh, url);
    let target = &report["client"]["targets"][0];
    assert_eq!(target["ejections"], "known", "{report:#}");
    let endpoints = target["endpoints"].as_array().unwrap();
    let ejected = endpoints.iter().filter(|endpoint| endpoint["is_ejected"] == true).count();
    assert_eq!((endpoints.len(), ejected), (2, 1), "{report:#}");
    // The other pod gets all requests.
    let left = pods(&report);
    assert_eq!((left.len(), &report["destinations"][0]["share"]), (1, &1.0.into()), "{report:#}");
    for _ in 0..4 {
        assert_eq!(mesh.call("front", url, &[]).json()["pod"]["name"], left[0].as_str());
    }
    let text = mesh.run(&["explain", "--from", "front", url]).stdout;
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(text.contains("; ejected by outlier detection"), "{text}");
    let config = mesh.config().display().to_string();
    let text = mesh.run(&["explain", "-f", &config, "--from", "front", url]).stdout;
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(text.contains("ejections by outlier detection are not known"), "{text}");
}

const REFUSED: &str = "\
---
apiVersion: v1
kind: Pod
metadata: {name: back, labels: {app: back}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: back}
spec: {selector: {app: back}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: redirects}
spec:
  workloadSelector: {labels: {app: front}}
  configPatches:
  - applyTo: HTTP_ROUTE
    match: {context: SIDECAR_OUTBOUND, routeConfiguration: {name: '81'}}
    patch: {operation: MERGE, value: {route: {internal_redirect_policy: {max_internal_redirects: 1}}}}
";

/// A new listener whose route table is refused comes into effect late. Until then, connections pass through.
#[test]
fn a_refused_route_table_is_named_in_both_states_of_its_listener() {
    let mesh = Setup::of_text(SKYSAIL, &(pod("front") + REFUSED)).ready();
    mesh.wait_status("front", "http://back/", &[], 200);
    mesh.edit(
        "mesh.yaml",
        "targetPort: 8080}",
        "targetPort: 8080}, {name: http-new, port: 81, targetPort: 8080}",
    );
    let url = "http://back:81/";
    let listener =
        |report: &Value| report["client"]["listener"]["name"].as_str().unwrap_or_default().to_owned();
    let mut is_listener_named = false;
    eventually("the listener is in effect, without its route table", || {
        let report = explained(&mesh, url);
        let answer = mesh.call("front", url, &[]);
        let state = listener(&report);
        if state != listener(&explained(&mesh, url)) {
            return Err(format!("{report:#}"));
        }
        let refused = report["client"]["refused_resources"].to_string();
        match state.as_str() {
            "0.0.0.0_81" => {
                assert_eq!((answer.status, &report["status"]), (Some(404), &404.into()), "{report:#}");
                assert!(refused.contains("internal_redirect_policy"), "{report:#}");
                let reason = report["result"].as_str().unwrap_or_default();
                assert!(reason.contains("the proxy refuses the route table 81"), "{report:#}");
                Ok(())
            }
            _ if answer.status == Some(200) => {
                assert_eq!(
                    (&report["served"], &report["status"]),
                    (&true.into(), &Value::Null),
                    "{report:#}"
                );
                is_listener_named |= refused.contains("0.0.0.0_81");
                Err(refused)
            }
            _ => Err(format!("{answer:?} {report:#}")),
        }
    });
    // The proxy waits 15 s for the route table, which is the time of several explanations.
    assert!(is_listener_named, "no explanation named the listener before it was in effect");
}
