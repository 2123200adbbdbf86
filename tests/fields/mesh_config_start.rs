//! MeshConfig: settings of the proxies' own configuration, with which `skysail-proxy` and a real Envoy start.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Read as _},
    process::{Child, Stdio},
};

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, get, mesh_with, wait, wait_logged};

const RULES: &str = include_str!("mesh_config_start.yaml");
/// Servers whose annotation sets `drainDuration`, and those without the setting.
const KINDS: [&str; 2] = ["skysail", "envoy"];

/// Returns a server and its Service.
fn server(name: &str, annotations: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\n\
         metadata: {{name: {name}, namespace: shop, labels: {{app: {name}}}, annotations: {{{annotations}}}}}\n\
         spec: {{containers: [{{name: c, image: registry.example/server, ports: [{{containerPort: 8080}}]}}]}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
         spec: {{selector: {{app: {name}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n"
    )
}

#[test]
fn proxies_start_with_the_settings_of_the_mesh() {
    let long = "proxy.istio.io/config: \"drainDuration: 3000s\"";
    let servers =
        KINDS.map(|kind| server(&format!("brief-{kind}"), "") + &server(&format!("long-{kind}"), long));
    let rules = [RULES, &servers.concat()].concat();
    let mesh = mesh_with(&rules, &["shop/by-envoy", "shop/brief-envoy", "shop/long-envoy"]).ready();
    for client in CLIENTS {
        wait(&mesh, client, &get("http://brief-skysail/", 200, &["\"pod\""]));
    }
    statistics(&mesh);
    let runtime = mesh.call("by-envoy", "http://127.0.0.1:15000/runtime", &[]).body;
    for text in ["own.flag", "\"true\"", "own.number", "\"77\""] {
        assert!(runtime.contains(text), "no {text}: {runtime}");
    }
    wait_logged(&mesh, &["by-skysail", "-c", "proxy"], &["runtimeValues has no effect", "own.flag"]);
    drains(&mesh);
}

/// An Envoy has Istio's statistics and those of the setting.
fn statistics(mesh: &Mesh) {
    let page = mesh.call("by-envoy", "http://127.0.0.1:15000/stats", &[]).body;
    let texts = ["server.live", "cluster.outbound|80||brief-skysail", ".upstream_rq_200", "http.outbound_"];
    for text in texts.iter().chain(&[".downstream_cx_destroy:", ".downstream_cx_active:"]) {
        assert!(page.contains(text), "no {text}: {page}");
    }
    assert!(!page.contains("brief-skysail.shop.svc.cluster.local;.upstream_rq_completed"), "{page}");
    let page = mesh.call("by-skysail", "http://127.0.0.1:15000/stats", &[]).body;
    let is_beyond =
        |line: &str| line.starts_with("cluster.outbound|") && line.contains(".upstream_rq_total:");
    assert!(page.lines().any(is_beyond), "no statistics beyond those of the setting: {page}");
}

/// Sends a request without a sidecar and keeps the connection. Returns the program once it has the response; it then
/// runs `then`.
fn hold(mesh: &Mesh, server: &str, then: &str) -> (Child, BufReader<std::process::ChildStdout>) {
    let request = format!("GET / HTTP/1.1\\r\\nhost: {server}\\r\\n\\r\\n");
    let script = format!(
        "exec 3<>/dev/tcp/{server}/80; send() {{ printf '{request}' >&3; }}; send; head -c 12 <&3; echo; {then}"
    );
    let mut command = mesh.command(&["exec", "plain", "--", "bash", "-c", &script]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "HTTP/1.1 200\n", "{server}");
    (child, output)
}

/// Connections in plain text that a policy no longer admits end after the time of their server's proxy.
fn drains(mesh: &Mesh) {
    for name in KINDS.iter().flat_map(|kind| [format!("brief-{kind}"), format!("long-{kind}")]) {
        wait(mesh, "plain", &get(&format!("http://{name}/"), 200, &["\"pod\""]));
    }
    let signal = mesh.run_folder().join("go");
    let brief = KINDS.map(|kind| hold(mesh, &format!("brief-{kind}"), "cat <&3 >/dev/null"));
    let until = format!("until [ -e {} ]; do sleep 0.1; done; send; timeout 20 cat <&3", signal.display());
    let long = KINDS.map(|kind| hold(mesh, &format!("long-{kind}"), &until));
    mesh.edit("rules.yaml", "mode: PERMISSIVE", "mode: STRICT");
    for (mut child, _) in brief {
        eventually("a connection ends", || match child.try_wait().unwrap() {
            Some(_) => Ok(()),
            None => Err("it lasts".to_owned()),
        });
    }
    for kind in KINDS {
        let refused = mesh.call("plain", &format!("http://long-{kind}/"), &[]);
        assert_eq!(refused.status, None, "{kind}: {refused:?}");
    }
    File::create(signal).unwrap();
    for (kind, (mut child, mut output)) in KINDS.iter().zip(long) {
        let mut text = String::new();
        output.read_to_string(&mut text).unwrap();
        child.wait().unwrap();
        assert!(text.contains("HTTP/1.1 200"), "{kind}: {text}");
    }
}
