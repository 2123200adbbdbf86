//! Stand-ins for images without a program. Their reports show the effects of the mesh: the caller's identity, access
//! control, and the environment of a command inside. The same for an ordinary user, who needs the right to create
//! namespaces only.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use nix::unistd::Uid;
use skysail_testkit::{Mesh, Setup, eventually};

/// A shop whose images have no programs, and one caller outside the mesh.
const SHOP: &str = r#"
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: front, namespace: shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: front, namespace: shop}
spec:
  selector: {matchLabels: {app: front}}
  template:
    metadata: {labels: {app: front}}
    spec:
      serviceAccountName: front
      containers: [{name: web, image: registry.example/shop/front:7, ports: [{containerPort: 8080}]}]
---
apiVersion: v1
kind: Service
metadata: {name: stock, namespace: shop}
spec:
  selector: {app: stock}
  ports:
  - {name: http, port: 80, targetPort: web}
  - {name: grpc, port: 81, targetPort: rpc}
  - {name: db, appProtocol: redis, port: 82, targetPort: store}
  - {name: grpc-web, port: 83, targetPort: browser}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: stock, namespace: shop}
spec:
  selector: {matchLabels: {app: stock}}
  template:
    metadata: {labels: {app: stock, version: v3}}
    spec:
      containers:
      - name: stock
        image: registry.example/shop/stock:3
        ports:
        - {name: web, containerPort: 9090}
        - {name: rpc, containerPort: 9091}
        - {name: store, containerPort: 9092}
        - {name: browser, containerPort: 9093}
        - {name: dns, containerPort: 53, protocol: UDP}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: stock, namespace: shop}
spec:
  hosts: [stock]
  http:
  - match: [{uri: {prefix: /mirrored}}]
    route: [{destination: {host: stock}}]
    mirror: {host: copy}
  - route: [{destination: {host: stock}}]
---
apiVersion: v1
kind: Service
metadata: {name: copy, namespace: shop}
spec:
  selector: {app: copy}
  ports: [{name: http, port: 80}]
---
apiVersion: v1
kind: Pod
metadata: {name: copy, namespace: shop, labels: {app: copy}}
spec:
  containers: [{name: copy, image: registry.example/shop/copy}]
---
apiVersion: v1
kind: Pod
metadata:
  name: stranger
  namespace: shop
  labels: {sidecar.istio.io/inject: "false"}
spec:
  containers: [{name: shell, image: registry.example/shell}]
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: default, namespace: shop}
spec: {mtls: {mode: STRICT}}
"#;

const STOCK: &str = "http://stock.shop";

#[test]
fn a_stand_in_reports_requests_and_their_callers() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), SHOP).ready();
    calls_are_reported(&mesh);
    versions_of_http_are_translated(&mesh);
    ports_have_their_declared_protocols(&mesh);
    requests_are_logged_and_so_are_mirrored_ones(&mesh);
    a_client_without_a_certificate_is_refused(&mesh);
    names_outside_the_mesh_do_not_exist(&mesh);
    commands_run_inside(&mesh);
    logs_and_status_are_printed(&mesh);
    let ended = mesh.interrupt();
    assert!(ended.status.success(), "{ended:?}");
}

#[test]
fn an_ordinary_user_can_run_a_mesh() {
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), SHOP);
    let mesh = if Uid::effective().is_root() { setup.as_user(65534) } else { setup }.ready();
    calls_are_reported(&mesh);
    a_client_without_a_certificate_is_refused(&mesh);
    commands_run_inside(&mesh);
    let ended = mesh.interrupt();
    assert!(ended.status.success(), "{ended:?}");
}

#[test]
fn access_logs_are_turned_off_by_an_argument_or_the_mesh_configuration() {
    let off = "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata: {mesh: 'accessLogFile: \"\"'}\n";
    for (more, argument, is_on) in
        [("", None, true), (off, None, false), ("", Some("--control-arg=--default-access-log="), false)]
    {
        let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &format!("{SHOP}{more}"));
        let mesh = setup.with(argument.as_slice()).ready();
        mesh.wait_status("front", STOCK, &[], 200);
        let config = mesh.call("front", "http://127.0.0.1:15000/config_dump", &[]);
        assert_eq!(config.status, Some(200));
        assert_eq!(config.body.contains("/dev/stdout"), is_on, "{more} {argument:?}");
    }
}

fn calls_are_reported(mesh: &Mesh) {
    mesh.wait_status("front", STOCK, &[], 200);
    let answer =
        mesh.call("front", &format!("{STOCK}/a/b?c=d"), &["-X", "PUT", "-H", "x-one: 1", "-d", "hello"]);
    assert_eq!(answer.status, Some(200), "{answer:?}");
    let report = answer.json();
    assert_eq!(report["method"], "PUT");
    assert_eq!(report["path"], "/a/b?c=d");
    assert_eq!(report["headers"]["x-one"], "1");
    assert_eq!(report["body"], "hello");
    assert_eq!(report["caller"], "spiffe://cluster.local/ns/shop/sa/front", "{report:#}");
    assert_eq!(report["pod"]["namespace"], "shop");
    assert_eq!(report["pod"]["version"], "v3");
    assert!(report["pod"]["name"].as_str().unwrap().starts_with("stock-"), "{report:#}");
    // Applications do not see the sidecars' certificates.
    let headers = report["headers"].as_object().unwrap();
    assert!(!headers.keys().any(|name| name.contains("peer-metadata")), "{report:#}");
    assert_eq!(mesh.call("front", &format!("{STOCK}/status/418"), &[]).status, Some(418));
}

/// Each side uses its version of HTTP: the client any, the server the one that its port declares.
fn versions_of_http_are_translated(mesh: &Mesh) {
    for (port, flags, protocol) in
        [(80, &["--http2"][..], "HTTP/1.1"), (81, &["--http2"], "HTTP/2.0"), (81, &[], "HTTP/2.0")]
    {
        let mut flags = flags.to_vec();
        flags.extend(["-d", "hello"]);
        let answer = mesh.call("front", &format!("{STOCK}:{port}/a"), &flags);
        assert_eq!(answer.status, Some(200), "{port} {flags:?}: {answer:?}");
        let report = answer.json();
        assert_eq!((&report["protocol"], &report["body"]), (&protocol.into(), &"hello".into()), "{report:#}");
        assert_eq!(report["caller"], "spiffe://cluster.local/ns/shop/sa/front", "{report:#}");
    }
}

/// The Service's port determines the protocol: gRPC, and TCP by `appProtocol`. Without any port there is a default.
fn ports_have_their_declared_protocols(mesh: &Mesh) {
    mesh.wait_for_output(
        "no program for image registry.example/shop/stock:3: an echo server on ports 9090 (HTTP), 9091 (gRPC), 9092 (TCP), \
         9093 (gRPC) runs in its place; nothing answers on UDP (53)",
    );
    mesh.wait_for_output(
        "no program for image registry.example/shell: an echo server on port 8080 runs in its place",
    );
    let grpc = ["--http2", "-H", "content-type: application/grpc", "-H", "te: trailers", "-d", "hello"];
    let echoed = mesh.call("front", &format!("{STOCK}:81/shop.Stock/Count"), &grpc);
    assert_eq!((echoed.status, echoed.body.as_str()), (Some(200), "hello"));
    // The server's sidecar translates gRPC-Web to gRPC, and trailers to a message of the response.
    let web = ["-H", "content-type: application/grpc-web-text", "-d", "AAAAAAVoZWxsbw=="];
    let echoed = mesh.call("front", &format!("{STOCK}:83/shop.Stock/Browse"), &web);
    assert_eq!(echoed.status, Some(200), "{echoed:?}");
    assert!(echoed.body.contains("hello") && echoed.body.ends_with("grpc-status:0"), "{echoed:?}");
    wait_log(mesh, "stock", &["path=/shop.Stock/Browse status=200 grpc_status=0 "]);
    let script = "exec 3<>/dev/tcp/stock.shop/82; printf 'one two' >&3; head -c 7 <&3";
    let output = mesh.run(&["exec", "shop/front", "--", "bash", "-c", script]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "one two", "{output:?}");
    for flags in [&[][..], &["--http2"]] {
        let answer = mesh.call("stranger", "http://127.0.0.1:8080/a", flags);
        assert_eq!(answer.status, Some(200), "{flags:?}: {answer:?}");
    }
}

fn requests_are_logged_and_so_are_mirrored_ones(mesh: &Mesh) {
    let id = "x-request-id: 8a33ff2e-5d0e-4dcb-9cb9-3a3f3b4f3c1d";
    let url = format!("{STOCK}/mirrored/status/404?a=b");
    assert_eq!(mesh.call("front", &url, &["-H", id]).status, Some(404));
    let line = "method=GET path=/mirrored/status/404?a=b status=404 \
                caller=\"spiffe://cluster.local/ns/shop/sa/front\" request_id=\"8a33ff2e-5d0e-4dcb-9cb9-3a3f3b4f3c1d\"";
    wait_log(mesh, "stock", &[line, "host=stock.shop "]);
    wait_log(mesh, "copy", &[line]);
    wait_log(mesh, "stock", &["path=/shop.Stock/Count status=200 grpc_status=0 "]);
    wait_log(mesh, "stock", &["connection ended", "bytes=7"]);
    // Bidirectional control characters are escaped.
    mesh.call("stranger", "http://127.0.0.1:8080/b", &["-H", "x-request-id: 1\u{202e}2"]);
    wait_log(mesh, "stranger", &["path=/b", r"1\u{202e}2"]);
}

/// Waits for a line with all these parts in a workload's log.
fn wait_log(mesh: &Mesh, workload: &str, parts: &[&str]) {
    wait_log_of(mesh, &[workload], parts);
}

/// Waits for a line with all these parts in a log that these arguments of `skysail logs` select.
fn wait_log_of(mesh: &Mesh, log: &[&str], parts: &[&str]) {
    eventually(&format!("{log:?} has {parts:?}"), || {
        let output = mesh.run(&[&["logs"], log].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found = text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
        if found { Ok(()) } else { Err(text) }
    });
}

/// With STRICT, a client without a certificate gets no response, by name or by address.
fn a_client_without_a_certificate_is_refused(mesh: &Mesh) {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let stock = pods.iter().find(|pod| pod["workload"] == "stock").unwrap();
    let address = format!("http://{}:9090", stock["address"].as_str().unwrap());
    for url in [STOCK, &address] {
        let refused = mesh.call("stranger", url, &[]);
        assert_eq!(refused.status, None, "{refused:?}");
        assert!(!refused.body.contains("pod"), "{refused:?}");
    }
}

/// The resolver gets an answer at once, and the user one message.
fn names_outside_the_mesh_do_not_exist(mesh: &Mesh) {
    for _ in 0..2 {
        let answer = mesh.call("front", "http://api.example.com/", &[]);
        assert!(answer.status.is_none() && answer.body.contains("not known"), "{answer:?}");
    }
    mesh.wait_for_output("Deployment shop/front: the name api.example.com does not exist");
    assert_eq!(mesh.output().matches("the name ").count(), 1, "{}", mesh.output());
}

fn commands_run_inside(mesh: &Mesh) {
    let output =
        mesh.run(&["exec", "shop/front", "--", "sh", "-c", "hostname; cat /etc/resolv.conf; exit 7"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(text.starts_with("front-") && text.contains("search shop.svc.cluster.local"), "{text}");
    let unknown = mesh.run(&["exec", "nobody", "--", "true"]);
    let stderr = String::from_utf8_lossy(&unknown.stderr);
    assert!(!unknown.status.success() && stderr.contains("shop/front"), "{stderr}");
}

fn logs_and_status_are_printed(mesh: &Mesh) {
    wait_log_of(mesh, &["front", "-c", "proxy"], &["\"GET /status/418 HTTP/1.1\" 418 "]);
    wait_log_of(mesh, &["stock", "-c", "proxy"], &["\"GET /status/418 HTTP/1.1\" 418 "]);
    let log = mesh.run(&["logs", "stock", "--container", "proxy"]);
    assert!(String::from_utf8_lossy(&log.stdout).contains("certificate obtained"), "{log:?}");
    let log = mesh.run(&["logs", "control"]);
    assert!(String::from_utf8_lossy(&log.stdout).contains("certificate issued"), "{log:?}");
    let status = mesh.run(&["status"]);
    let table = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.status.success() && table.contains("stranger") && table.contains("stock-"), "{table}");
}
