//! What depends on the client: its certificate, the keys of its tokens, and rules for other clients.

use std::fs;

use super::{
    bearer,
    certificates::{Issuer, certificate, issuer, pem_block},
    check, explain, tasks,
};

const EDGE: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: edge, labels: {istio: edge}, annotations: {inject.istio.io/templates: gateway}}
spec: {containers: [{name: istio-proxy, image: auto}]}
---
apiVersion: v1
kind: Service
metadata: {name: edge}
spec: {selector: {istio: edge}, ports: [{name: https, port: 443}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: edge}
spec:
  hosts: ['*.example']
  gateways: [edge]
  http: [{directResponse: {status: 200}}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: edge}
spec:
  selector: {matchLabels: {istio: edge}}
  action: DENY
  rules: [{from: [{source: {notPrincipals: ['*']}}], to: [{operation: {hosts: [open.example]}}]}]
---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: edge}
spec:
  selector: {istio: edge}
  servers:
  - {port: {number: 443, name: a, protocol: HTTPS}, hosts: [open.example], tls: {mode: SIMPLE, credentialName: edge}}
  - port: {number: 443, name: b, protocol: HTTPS}
    hosts: [closed.example]
    tls: {mode: MUTUAL, credentialName: edge, subjectAltNames: [member.example]}
  - port: {number: 443, name: c, protocol: HTTPS}
    hosts: [files.example]
    tls: {mode: MUTUAL, serverCertificate: /c.pem, privateKey: /k.pem, caCertificates: /ca.pem}
";

fn secret(root: &Issuer) -> String {
    let (chain, key) = certificate(root, &["*.example"], 2125);
    let (chain, key, ca) = (chain.pem(), key.serialize_pem(), root.pem());
    let [chain, key, ca] = [chain, key, ca].map(|text| pem_block(&text));
    format!(
        "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: edge}}\nstringData:\n  tls.crt: |\n{chain}  \
         tls.key: |\n{key}  ca.crt: |\n{ca}"
    )
}

#[test]
fn client_certificates_are_verified() {
    let folder = tempfile::tempdir().unwrap();
    let (root, other) = (issuer("root"), issuer("other"));
    fs::write(folder.path().join("mesh.yaml"), EDGE.to_owned() + &secret(&root)).unwrap();
    for (name, issuer, of, year) in [
        ("member", &root, "member.example", 2125),
        ("guest", &root, "guest.example", 2125),
        ("expired", &root, "member.example", 2001),
        ("stranger", &other, "member.example", 2125),
    ] {
        fs::write(folder.path().join(name), certificate(issuer, &[of], year).0.pem()).unwrap();
    }
    let of = |host: &str, certificate: &str| {
        let url = format!("https://{host}/");
        explain(folder.path(), &["mesh.yaml"], &["--from", "outside", &url, "--cert", certificate])
    };
    let (closed, refused) = ("closed.example", "closes the client certificate is refused:");
    let connection = "connection mutual TLS, SNI closed.example, certificate of member.example";
    check(of(closed, "member"), 0, &[connection, "certificate member.example: valid", "SERVED"]);
    check(of(closed, "stranger"), 1, &["certificate member.example: refused", refused, "no CA certificate"]);
    check(of(closed, "expired"), 1, &[refused, "it has expired"]);
    check(of(closed, "guest"), 1, &[refused, "guest.example", "member.example"]);
    let unknown = "certificate member.example: assumed valid, because the CA certificates of file-root:/ca.pem are not \
                   known here";
    check(of("files.example", "stranger"), 0, &[unknown]);
    // A server that requests no certificate does not learn the client's identity.
    check(
        of("open.example", "member"),
        1,
        &["connection TLS, SNI open.example", "certificate member.example: not sent", "policy DENY DENIES"],
    );
}

#[test]
fn keys_of_servers_may_be_given_in_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = fs::read_to_string(tasks().join("jwt/tokens.yaml")).unwrap();
    let keys = tokens.lines().find_map(|line| line.trim().strip_prefix("jwks: ")).unwrap();
    let with_server =
        tokens.replace(&format!("jwks: {keys}"), "jwksUri: https://accounts.cinema.example/keys");
    let app = fs::read_to_string(tasks().join("app/cinema.yaml")).unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("mesh.yaml", &format!("{app}---\n{with_server}"));
    write("keys.json", keys.trim_matches('\''));
    write("other.json", r#"{"keys":[{"kty":"RSA","kid":"other","alg":"RS256","n":"AQAB","e":"AQAB"}]}"#);
    write("broken.json", "{}");
    let of = |token: &str, path: &str, keys: &str| {
        let (token, url) = (bearer(token), format!("http://films{path}"));
        explain(folder.path(), &["mesh.yaml"], &["--from", "page", "-H", &token, &url, "--jwks", keys])
    };
    let (code, report) = of("guest.jwt", "/", "keys.json");
    assert!(code == 0 && !report.contains("assumed valid"), "{report}");
    check(
        of("staff.jwt", "/staff", "keys.json"),
        0,
        &["groups [\"staff\"]", "policy ALLOW admits", "SERVED"],
    );
    check(
        of("guest.jwt", "/staff", "keys.json"),
        1,
        &["policy ALLOW DENIES", "not rule claim groups is absent"],
    );
    check(
        of("guest.jwt", "/", "other.json"),
        1,
        &["bad token", "the keys are those of https://accounts.cinema.example/keys", "responds 401"],
    );
    check(of("guest.jwt", "/", "broken.json"), 2, &["--jwks broken.json", "not a key set"]);
}

const CLIENTS: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: far, namespace: other, labels: {app: web}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: reviews, labels: {app: reviews}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 9080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: reviews}
spec: {selector: {app: reviews}, ports: [{name: http, port: 9080}, {name: tcp, port: 9000}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: reviews}
spec:
  hosts: [reviews]
  http:
  - match:
    - {sourceLabels: {app: mobile}}
    - {sourceNamespace: far, uri: {prefix: /a}}
    - {gateways: [edge]}
    - {port: 80}
    directResponse: {status: 418}
  - route: [{destination: {host: reviews}}]
  tcp:
  - match: [{sourceLabels: {version: v1}}]
    route: [{destination: {host: reviews}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: edge}
spec:
  hosts: [reviews.default.svc.cluster.local]
  gateways: [edge]
  http: [{directResponse: {status: 418}}]
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: hidden, namespace: third}
spec:
  hosts: [reviews.default.svc.cluster.local]
  exportTo: [.]
  http:
  - match: [{sourceLabels: {app: nobody}}]
    directResponse: {status: 418}
";

#[test]
fn matches_for_other_clients_are_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("mesh.yaml"), CLIENTS).unwrap();
    let of = |from: &str, url: &str| explain(folder.path(), &["mesh.yaml"], &["--from", from, url]);
    check(
        of("web", "http://reviews:9080/"),
        0,
        &[
            "virtual host reviews.default.svc.cluster.local:9080",
            "not match gateway mesh (a sidecar), expected: edge <- VirtualService default/edge spec.gateways",
            "not match client label app is web, expected: mobile \
             <- VirtualService default/reviews spec.http[0].match[0], mesh.yaml:28",
            "not match client namespace default, expected: far",
            "not match gateway mesh (a sidecar), expected: edge",
            "not match port 9080, expected: 80",
            "not match namespace default, to which it is not exported <- VirtualService third/hidden",
            "route 0",
            "<- VirtualService default/reviews spec.http[1]",
            "SERVED",
        ],
    );
    check(
        of("other/far", "http://reviews.default:9080/"),
        0,
        &["expected: mobile", "not match client namespace other, expected: far", "SERVED"],
    );
    check(
        of("web", "tcp://reviews:9000"),
        0,
        &["not match client label version is absent, expected: v1", "SERVED"],
    );
}
