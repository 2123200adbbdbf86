//! Secrets of gateways: a change compiles and sends the secrets that come from it, and nothing else.

use std::sync::atomic::AtomicUsize;

use skysail_model::{compile_own, compile_part};

use super::{
    scopes::{connect, put, snapshot},
    *,
};

const GATEWAY: &str = r#"
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge, namespace: x}
spec:
  selector: {app: edge}
  servers:
  - {port: {number: 443, name: a, protocol: HTTPS}, hosts: [a.example], tls: {mode: MUTUAL, credentialName: a}}
  - {port: {number: 443, name: b, protocol: HTTPS}, hosts: [b.example], tls: {mode: SIMPLE, credentialName: b}}
  - {port: {number: 443, name: again, protocol: HTTPS}, hosts: [b.example], tls: {mode: SIMPLE, credentialName: c}}
---
apiVersion: networking.istio.io/v1
kind: DestinationRule
metadata: {name: outside, namespace: x}
spec: {host: outside.example, trafficPolicy: {tls: {mode: MUTUAL, credentialName: d}}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {name: istio}
spec: {controllerName: istio.io/gateway-controller}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: other, namespace: x}
spec:
  gatewayClassName: istio
  listeners:
  - {name: e, port: 8443, protocol: HTTPS, hostname: e.example, tls: {certificateRefs: [{name: e, namespace: y}]}}
---
apiVersion: gateway.networking.k8s.io/v1beta1
kind: ReferenceGrant
metadata: {name: of-x, namespace: y}
spec: {from: [{group: gateway.networking.k8s.io, kind: Gateway, namespace: x}], to: [{group: "", kind: Secret}]}
"#;

/// Returns a Secret; empty content for none.
fn secret(namespace: &str, name: &str, content: &str) -> String {
    if content.is_empty() {
        return String::new();
    }
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
         stringData: {{tls.crt: {content}, tls.key: {content}, ca.crt: {content}}}\n"
    )
}

fn gateway() -> NewClient {
    let labels = serde_json::json!({"app": "edge", "gateway.networking.k8s.io/gateway-name": "other"});
    let id = "router~10.2.0.1~edge.x~x.svc.cluster.local";
    let mut node = ProxyNode::parse(id, serde_json::json!({"LABELS": labels}), Locality::default()).unwrap();
    node.view.is_authenticated = true;
    NewClient {
        node,
        version: String::new(),
        address: String::new(),
        identity: String::new(),
        accounted_to: "x/edge".into(),
        form: Form::Delta,
    }
}

#[test]
fn a_changed_secret_is_compiled_and_sent_alone() {
    let compiled = Arc::<AtomicUsize>::default();
    let (own, part) = (Arc::clone(&compiled), Arc::clone(&compiled));
    let compiler = Compiler {
        own: Box::new(move |world, view, outline| {
            own.fetch_add(1, Relaxed);
            compile_own(world, view, outline)
        }),
        part: Box::new(move |world, scope, of| {
            part.fetch_add(1, Relaxed);
            compile_part(world, scope, of)
        }),
    };
    let publisher = Arc::new(publisher(compiler, LIMITS));
    put(&publisher, "gateway", GATEWAY);
    let mut connected = connect(&publisher, gateway()).unwrap();
    Kind::ALL.into_iter().for_each(|kind| connected.0.interest.add_all(kind));

    let mut files: BTreeMap<String, String> = BTreeMap::new();
    let steps: [(&str, &str, &str, &[&str]); 13] = [
        ("x", "a", "one", &["sds kubernetes://a", "sds kubernetes://a-cacert"]),
        ("x", "b", "one", &["sds kubernetes://b"]),
        ("x", "b", "two", &["sds kubernetes://b"]),
        // The roots have a Secret of their own, which precedes those beside the certificate.
        ("x", "a-cacert", "two", &["sds kubernetes://a-cacert"]),
        ("x", "a", "two", &["sds kubernetes://a"]),
        ("x", "a-cacert", "", &[]),
        // A server that is left out because another has its port and host.
        ("x", "c", "one", &[]),
        ("x", "nobody", "one", &[]),
        // The namespace of the gateway counts.
        ("y", "b", "three", &[]),
        ("x", "d", "one", &["sds kubernetes://d", "sds kubernetes://d-cacert"]),
        // By permission of a ReferenceGrant.
        ("y", "e", "one", &["sds kubernetes-gateway://y/e"]),
        ("y", "e", "two", &["sds kubernetes-gateway://y/e"]),
        ("x", "b", "", &["sds kubernetes://b"]),
    ];
    for (namespace, name, content, expected) in steps {
        let at = format!("{namespace}/{name} becomes {content:?}");
        let (before, made) = (snapshot(&connected).generation(), compiled.load(Relaxed));
        connected.0.snapshot.mark_unchanged();
        let (file, text) = (format!("{namespace}-{name}"), secret(namespace, name, content));
        put(&publisher, &file, &text);
        files.insert(file, text);
        assert_eq!(compiled.load(Relaxed), made, "{at}: other resources were compiled");
        let sent = sent(&snapshot(&connected), before);
        assert_eq!(sent.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{at}");
        assert_eq!(connected.0.snapshot.has_changed().unwrap(), !expected.is_empty(), "{at}");

        let fresh = Arc::new(super::publisher(Compiler::default(), LIMITS));
        put(&fresh, "gateway", GATEWAY);
        files.iter().filter(|(_, text)| !text.is_empty()).for_each(|(file, text)| put(&fresh, file, text));
        let fresh = bodies(&snapshot(&connect(&fresh, gateway()).unwrap()));
        assert_eq!(differences(&bodies(&snapshot(&connected)), &fresh), [""; 0], "{at}");
    }

    // Together with a change of the Gateway, all is compiled once.
    let (before, made) = (snapshot(&connected).generation(), compiled.load(Relaxed));
    let text = format!("{}---\n{}", GATEWAY.replace("a.example", "f.example"), secret("x", "b", "four"));
    put(&publisher, "gateway", &text);
    assert_eq!(compiled.load(Relaxed), made + 1);
    let sent = sent(&snapshot(&connected), before);
    assert!(
        sent.contains("sds kubernetes://b") && sent.iter().any(|name| name.starts_with("lds ")),
        "{sent:?}"
    );
}
