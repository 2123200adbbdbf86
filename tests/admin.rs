//! Admin pages of the control plane and of sidecars, requested from elsewhere in the network: health and metrics are
//! open, the other pages are not.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fs;

use skysail_testkit::{Mesh, Setup};

/// The control plane in the sandbox.
const CONTROL: &str = "http://10.244.0.1:15014";

/// Template with placeholders for the service account and the sidecar.
const WORKLOAD: &str = "
apiVersion: v1
kind: ServiceAccount
metadata: {name: NAME, namespace: shop}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: NAME, namespace: shop}
spec:
  selector: {matchLabels: {app: NAME}}
  template:
    metadata: {labels: {app: NAME, sidecar.istio.io/inject: 'INJECT'}}
    spec:
      serviceAccountName: NAME
      containers: [{name: web, image: registry.example/shop/web, ports: [{containerPort: 8080}]}]
";

/// Returns a mesh: `reader` is on the allow list, `front` is not, and `bare` has no sidecar.
fn mesh() -> Mesh {
    let workload = |name: &str, inject: &str| WORKLOAD.replace("NAME", name).replace("INJECT", inject);
    let text = [
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}".to_owned(),
        workload("front", "true"),
        workload("reader", "true"),
        workload("bare", "false"),
    ];
    let setup = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &text.join("\n---\n"));
    setup.with(&["--control-arg=--admin-allow=shop/reader"]).ready()
}

/// Returns the header with a pod's service account token.
fn bearer(mesh: &Mesh, workload: &str) -> String {
    let pod = mesh.names(workload).remove(0);
    let meshes = fs::read_dir(mesh.run_folder()).unwrap().map(|entry| entry.unwrap().path());
    let token = meshes.map(|mesh| mesh.join("pods/shop").join(&pod).join("token")).find(|file| file.exists());
    format!("authorization: Bearer {}", fs::read_to_string(token.unwrap()).unwrap())
}

#[test]
fn pages_of_the_control_plane_need_a_credential_from_elsewhere() {
    let mesh = mesh();
    let ask = |workload: &str, path: &str, arguments: &[&str]| {
        let answer = mesh.call(workload, &format!("{CONTROL}{path}"), arguments);
        (answer.status.unwrap_or_default(), answer.body)
    };
    for workload in ["front", "bare"] {
        for path in ["/ready", "/metrics"] {
            assert_eq!(ask(workload, path, &[]).0, 200, "{path} from {workload}");
        }
        for path in ["/", "/debug/syncz", "/debug/ca", "/debug/config_files", "/debug/used", "/none"] {
            let (status, body) = ask(workload, path, &[]);
            assert!(
                status == 401 && body.contains("--admin-allow") && !body.contains("spiffe"),
                "{path}: {body}"
            );
        }
        let forged = ["-H", "host: localhost", "-H", "x-forwarded-for: 127.0.0.1"];
        assert_eq!(ask(workload, "/debug/syncz", &forged).0, 401, "{workload}");
    }

    let (front, reader) = (bearer(&mesh, "front"), bearer(&mesh, "reader"));
    // The token decides, not its sender.
    let (status, body) = ask("bare", "/debug/syncz", &["-H", &reader]);
    assert!(status == 200 && body.contains("spiffe://cluster.local/ns/shop/sa/front"), "{body}");
    let (status, body) = ask("front", "/debug/syncz", &["-H", &front]);
    assert!(status == 403 && body.contains("--admin-allow shop/front"), "{body}");
    let (status, body) = ask("front", "/debug/syncz", &["-H", "authorization: Bearer a.b.c"]);
    assert_eq!(status, 401, "{body}");
    let (status, body) = ask("reader", "/ca/rotate", &["-X", "POST", "-d", "", "-H", &reader]);
    assert!(status == 403 && body.contains("own machine or pod only"), "{body}");

    let (status, body) = ask("control", "/debug/syncz", &[]);
    assert!(status == 200 && body.contains("spiffe://cluster.local/ns/shop/sa/front"), "{body}");
}

/// The address in the bootstrap file makes no difference.
#[test]
fn the_admin_page_of_a_sidecar_is_for_its_own_pod() {
    let mesh = mesh();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bootstrap.yaml");
    fs::write(
        &file,
        "node: {id: a}\nadmin: {address: {socket_address: {address: 0.0.0.0, port_value: 18000}}}\n",
    )
    .unwrap();
    let (file, program) = (file.to_string_lossy().into_owned(), env!("CARGO_BIN_EXE_skysail"));
    let run =
        format!("NO_COLOR=1 '{program}' proxy --concurrency 1 --bootstrap '{file}' > '{file}.log' 2>&1 &");
    assert!(mesh.run(&["exec", "front", "--", "sh", "-c", &run]).status.success());
    mesh.wait_status("front", "http://127.0.0.1:18000/ready", &[], 200);
    assert_eq!(mesh.call("front", "http://127.0.0.1:18000/server_info", &[]).status, Some(200));

    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let front = pods.iter().find(|pod| pod["workload"] == "front").unwrap()["address"].as_str().unwrap();
    // From `bare` directly, and from `reader` through front's sidecar, which connects from 127.0.0.6.
    for workload in ["bare", "reader"] {
        let ask = |path: &str, arguments: &[&str]| {
            mesh.call(workload, &format!("http://{front}:18000{path}"), arguments)
        };
        for path in ["/ready", "/healthz/ready", "/stats/prometheus"] {
            assert_eq!(ask(path, &[]).status, Some(200), "{path} from {workload}");
        }
        for path in ["/", "/server_info", "/config_dump", "/clusters", "/stats", "/certs"] {
            let answer = ask(path, &[]);
            assert!(answer.status == Some(403) && answer.body.contains("in this pod"), "{path}: {answer:?}");
        }
        let quit = ask("/quitquitquit", &["-X", "POST", "-d", "", "-H", "host: localhost"]);
        assert_eq!(quit.status, Some(403), "{quit:?}");
        // The sidecar of the pod itself, with the pages of Istio's agent.
        let ask = |path: &str, arguments: &[&str]| {
            mesh.call(workload, &format!("http://{front}:15020{path}"), arguments)
        };
        assert_eq!(ask("/healthz/ready", &[]).status, Some(200), "from {workload}");
        for path in ["/drain", "/quitquitquit"] {
            let answer = ask(path, &["-X", "POST", "-d", "", "-H", "host: localhost"]);
            assert!(answer.status == Some(403) && answer.body.contains("in this pod"), "{path}: {answer:?}");
        }
        assert_eq!(ask("/app-health/web/readyz", &[]).status, Some(404), "from {workload}");
    }
    assert_eq!(mesh.call("front", "http://127.0.0.1:18000/server_info", &[]).status, Some(200));
}
