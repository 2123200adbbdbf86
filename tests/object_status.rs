//! The status of objects of the configuration, over a control plane and sidecars.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually};

/// A patch with a field that the sidecar refuses; see `tests/envoy_filters`.
const REFUSED: &str = include_str!("envoy_filters/mapped-addresses.yaml");

/// Waits until all proxies have answered an object. Returns the exit code and the status.
fn settled(mesh: &Mesh, object: &str) -> (i32, Value) {
    let arguments = ["status", object, "-n", "shop", "--wait", "--output", "json"];
    let output = mesh.run(&arguments);
    let text = String::from_utf8_lossy(&output.stdout);
    let parsed = serde_json::from_str(&text);
    let parsed = parsed.unwrap_or_else(|error| {
        panic!("{object}: {error}: {text}{}", String::from_utf8_lossy(&output.stderr))
    });
    (output.status.code().unwrap(), parsed)
}

#[test]
fn proxies_accept_and_refuse_objects() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml")).ready();
    mesh.wait_status("front", "http://stock.shop/", &[], 200);

    // Only the sidecar that has used the host holds its routes.
    let (code, status) = settled(&mesh, "virtualservice/stock");
    assert_eq!((code, &status["state"]), (0, &"in_effect".into()), "{status}");
    let proxies = status["deliveries"].as_array().unwrap();
    assert!(proxies.iter().any(|proxy| proxy["proxy"].as_str().unwrap().contains("~front-")), "{status}");
    assert!(proxies.len() < 3, "{status}");
    let held = status["resources"].as_array().unwrap();
    assert!(held.iter().any(|of| of["type"] == "vhds" && of["name"] == "80/stock.shop.svc.cluster.local:80"));
    // A policy of the namespace shapes the listeners of all three.
    let (code, status) = settled(&mesh, "PeerAuthentication/default");
    assert_eq!((code, &status["acknowledged"]), (0, &3.into()), "{status}");

    mesh.put("mapped-addresses.yaml", REFUSED);
    let (code, status) = settled(&mesh, "envoyfilter/mapped-addresses");
    assert_eq!((code, &status["state"]), (1, &"refused".into()), "{status}");
    let refused = status["deliveries"].as_array().unwrap().iter().filter(|proxy| proxy["state"] == "refused");
    let errors: Vec<&str> = refused.map(|proxy| proxy["error"].as_str().unwrap()).collect();
    assert!(!errors.is_empty() && errors.len() == status["refused"], "{status}");
    assert!(
        errors.iter().all(|error| error.contains("represent_ipv4_remote_address_as_ipv4_mapped_ipv6")),
        "{errors:?}"
    );
    let text = mesh.run(&["status", "envoyfilter/mapped-addresses", "-n", "shop"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(
        text.contains("refused by proxies")
            && text.contains("represent_ipv4_remote_address_as_ipv4_mapped_ipv6"),
        "{text}"
    );
    mesh.wait_for_output("refuses resources (lds): ");
    // Routes were in effect before.
    assert_eq!(settled(&mesh, "virtualservice/stock").0, 0);

    let taken = REFUSED.replace("          represent_ipv4_remote_address_as_ipv4_mapped_ipv6: true\n", "");
    assert_ne!(taken, REFUSED);
    mesh.put("mapped-addresses.yaml", &taken);
    let (code, status) = settled(&mesh, "envoyfilter/mapped-addresses");
    assert_eq!((code, &status["state"]), (0, &"in_effect".into()), "{status}");

    mesh.put(
        "mapped-addresses.yaml",
        &REFUSED.replace("represent_ipv4_remote_address_as_ipv4_mapped_ipv6", "server_name"),
    );
    let (code, status) = settled(&mesh, "envoyfilter/mapped-addresses");
    assert_eq!((code, &status["state"]), (1, &"invalid".into()), "{status}");
    let findings = status["findings"].as_array().unwrap();
    assert!(findings.iter().any(|of| of["field"].as_str().unwrap().ends_with("server_name")), "{status}");

    let unknown = mesh.run(&["status", "virtualservice/none", "-n", "shop"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("virtualservice shop/none"));
}

/// A patch with a header that the sidecar refuses.
const REFUSED_ROUTE: &str = r#"
apiVersion: networking.istio.io/v1alpha3
kind: EnvoyFilter
metadata: {name: header, namespace: shop}
spec:
  configPatches:
  - applyTo: VIRTUAL_HOST
    match:
      context: SIDECAR_OUTBOUND
      routeConfiguration: {vhost: {name: "stock.shop.svc.cluster.local:80"}}
    patch:
      operation: MERGE
      value: {response_headers_to_add: [{header: {key: x-a, value: "%NOSUCH%"}}]}
"#;

#[test]
fn routes_that_a_proxy_refuses_at_its_first_request_are_refused() {
    let text = format!("{}\n---{REFUSED_ROUTE}", include_str!("shop.yaml"));
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    // No sidecar holds the routes before.
    let (_, status) = settled(&mesh, "envoyfilter/header");
    assert_eq!(status["refused"], 0, "{status}");
    mesh.call("front", "http://stock.shop/", &[]);
    eventually("the object is refused", || {
        let (code, status) = settled(&mesh, "envoyfilter/header");
        (code == 1 && status["refused"] == 1).then_some(()).ok_or_else(|| status.to_string())
    });
    // The rules of the same host are refused with it.
    let (code, status) = settled(&mesh, "virtualservice/stock");
    assert_eq!((code, &status["state"]), (1, &"refused".into()), "{status}");
}
