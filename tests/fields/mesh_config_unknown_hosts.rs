//! MeshConfig: TLS to unknown hosts of HTTP, whose addresses the proxies resolve.

use std::fs;

use crate::{
    CLIENTS, get, mesh_with,
    pools_tls::{issuer, member, revocations},
    secure::secret,
    wait,
};

const RULES: &str = include_str!("mesh_config_unknown_hosts.yaml");
/// Host of the gateway, whose Service clients do not see.
const HOST: &str = "hidden-edge.shop.svc.cluster.local";

#[test]
fn unknown_hosts_are_reached_over_tls() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    let (root, other) = (issuer("root"), issuer("other"));
    write("root.crt", &root.pem());
    write("other.crt", &other.pem());
    write("revoked.crl", &revocations(&root, 2));
    let (chain, key) = member(&root, "client", 1);
    write("client.crt", &chain.pem());
    write("client.key", &key);
    let (chain, key) = member(&root, HOST, 2);
    let edge = secret("edge", &[("tls.crt", chain.pem()), ("tls.key", key), ("ca.crt", root.pem())]);
    let mesh_config = |tls: &str| {
        let policy = format!("outboundTrafficPolicy: {{mode: ALLOW_ANY_DYNAMIC_DNS, tls: {{{tls}}}}}");
        let policy = policy.replace("FOLDER", &folder.path().to_string_lossy());
        let meta = "{name: istio, namespace: istio-system}";
        format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {meta}\ndata:\n  mesh: |\n    {policy}\n")
    };
    let mesh = mesh_with(&[RULES, &edge].concat(), &["shop/by-envoy"]).ready();
    let (simple, mutual) = (format!("http://{HOST}/"), format!("http://{HOST}:8444/"));
    let pair = "clientCertificate: FOLDER/client.crt, privateKey: FOLDER/client.key";
    for (tls, to, to_mutual) in [
        ("mode: SIMPLE, caCertificates: FOLDER/root.crt".to_owned(), 298, 503),
        ("mode: SIMPLE, caCertificates: FOLDER/other.crt".to_owned(), 503, 503),
        ("mode: SIMPLE, insecureSkipVerify: true".to_owned(), 298, 503),
        ("mode: SIMPLE, caCertificates: FOLDER/root.crt, sni: other.example".to_owned(), 503, 503),
        (format!("mode: MUTUAL, caCertificates: FOLDER/root.crt, {pair}"), 298, 298),
    ] {
        mesh.put("settings.yaml", &mesh_config(&tls));
        for client in CLIENTS {
            wait(&mesh, client, &get(&simple, to, &[]));
            wait(&mesh, client, &get(&mutual, to_mutual, &[]));
        }
    }
    mesh.put(
        "settings.yaml",
        &mesh_config("mode: SIMPLE, caCertificates: FOLDER/root.crt, caCrl: FOLDER/revoked.crl"),
    );
    wait(&mesh, "by-skysail", &get(&simple, 503, &[]));
}
