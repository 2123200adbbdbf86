//! Sidecar: which hosts a workload reaches, and how it is reached.

use skysail_testkit::eventually;

use crate::{BINARY, CLIENTS, OF_SOCKET, check, get, mesh_with, serve_socket, wait, with};

const RULES: &str = include_str!("sidecar.yaml");

#[test]
fn workloads_reach_and_serve_what_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    serve_socket(&folder.path().join("workload"));
    let rules = RULES.replace("FOLDER", &folder.path().to_string_lossy());
    let mesh = mesh_with(&rules, &["shop/by-envoy", "shop/inner-envoy"]).ready();
    let servers = ["inner-skysail", "inner-envoy"];
    for client in CLIENTS {
        wait(&mesh, client, &get("http://api/", 200, &["\"pod\""]));
        for server in servers {
            wait(&mesh, client, &get(&format!("http://{server}/"), 200, &[server]));
            wait(&mesh, client, &get(&format!("http://{server}:81/"), 200, &[server]));
            wait(&mesh, client, &get(&format!("http://{server}:82/"), 200, &[OF_SOCKET]));
        }
    }
    let local = with(&["-H", "host: api.shop:8081"], "http://127.0.0.1:8081/", 200, &["\"pod\""]);
    check(&mesh, &CLIENTS, &[get("http://hidden/", 502, &[]), local]);
    wait(&mesh, "outsider", &get("http://hidden.shop/", 200, &["\"pod\""]));
    wait(&mesh, "outsider", &get("http://192.0.2.55/", 200, &["\"version\":\"v2\""]));

    // The pool of all inbound ports has one request, that of a port has many.
    for server in servers {
        let load = |port: u16| {
            let url = format!("http://{server}:{port}/?delay=300ms");
            let report = mesh.load("by-skysail", &[&url, "-n", "16", "-c", "8"]).finish();
            (report.status.get(&503).copied().unwrap_or_default(), format!("{report:?}"))
        };
        eventually("requests are refused", || match load(80) {
            (1..16, _) => Ok(()),
            (_, report) => Err(report),
        });
        let (refused, report) = load(81);
        assert_eq!(refused, 0, "{report}");
    }
}

/// A Sidecar of a client whose requests for `api` arrive at a socket in FOLDER, and connections to `plain` at another.
const SOCKETS: &str = "---
apiVersion: networking.istio.io/v1
kind: Sidecar
metadata: {name: CLIENT, namespace: shop}
spec:
  workloadSelector: {labels: {app: CLIENT}}
  egress:
  - {port: {protocol: HTTP}, bind: 'unix://FOLDER/CLIENT.http', hosts: [./api.shop.svc.cluster.local]}
  - {port: {protocol: TCP}, bind: 'unix://FOLDER/CLIENT.tcp', hosts: [./plain.shop.svc.cluster.local]}
---
apiVersion: v1
kind: Service
metadata: {name: plain, namespace: shop}
spec: {selector: {app: api}, ports: [{name: http, port: 7000, targetPort: 8080}]}
";

#[test]
fn clients_may_connect_to_unix_sockets() {
    let folder = tempfile::tempdir().unwrap();
    let rules = CLIENTS.map(|client| SOCKETS.replace("CLIENT", client)).concat();
    let rules = rules.replace("FOLDER", &folder.path().to_string_lossy());
    let mesh = mesh_with(&rules, &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        for (kind, host, expected) in
            [("http", "api", 200), ("http", "hidden", 503), ("tcp", "anything", 200)]
        {
            let socket = folder.path().join(format!("{client}.{kind}"));
            let socket = socket.to_string_lossy();
            let url = format!("http://{host}/");
            let load = [
                "load",
                "-allow-initial-errors",
                "-qps",
                "0",
                "-n",
                "2",
                "-c",
                "1",
                "-unix-socket",
                &socket,
                &url,
            ];
            eventually(&format!("{client} {kind} {host}"), || {
                let output = mesh.run(&[&["exec", client, "--", BINARY], &load[..]].concat());
                let text = String::from_utf8_lossy(&output.stdout);
                if text.contains(&format!("{expected}: 2")) { Ok(()) } else { Err(format!("{output:?}")) }
            });
        }
    }
}
