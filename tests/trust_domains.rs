//! A mesh that moved to another trust domain: policies that still name the one before hold, and those of strangers do not.

use skysail_testkit::Setup;

const MOVED: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |-
    trustDomain: new.example
    trustDomainAliases: [old.example]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: by-domain, namespace: shop}
spec:
  selector: {matchLabels: {app: stock}}
  rules:
  - from: [{source: {principals: [old.example/ns/shop/sa/default]}}]
    to: [{operation: {paths: [/before]}}]
  - from: [{source: {principals: [other.example/ns/shop/sa/default]}}]
    to: [{operation: {paths: [/stranger]}}]
";

#[test]
fn policies_hold_for_the_aliases_of_a_trust_domain() {
    let text = format!("{}---{MOVED}", include_str!("shop.yaml"));
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text).ready();
    mesh.wait_status("front", "http://stock/before", &[], 200);
    let answer = mesh.call("front", "http://stock/before", &[]);
    assert!(answer.body.contains("spiffe://new.example/ns/shop/sa/default"), "{answer:?}");
    assert_eq!(mesh.call("front", "http://stock/stranger", &[]).status, Some(403));
}
