//! Istio's own agent, unchanged, with our proxy as its Envoy. The agent writes the bootstrap, starts the program with
//! Envoy's arguments, checks its readiness, merges its metrics, and ends it. And our proxy without the agent, with the
//! environment of an injected pod.
//!
//! `test.sh` builds the agent from its Go module.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use serde_json::{Value, json};
use skysail_testkit::{Mesh, Setup, cached, eventually, script};
use tempfile::TempDir;

const AGENT: &str = "pilot-agent-eed52ebb66ad";

/// `front` has no sidecar, because the agent brings one.
const MESH: &str = "
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
    metadata: {labels: {app: front, sidecar.istio.io/inject: 'false'}}
    spec:
      serviceAccountName: front
      containers:
      - name: web
        image: registry.example/shop/web
        ports: [{name: http, containerPort: 8080}, {name: grpc, containerPort: 9090}, {name: tcp, containerPort: 7070}]
---
apiVersion: v1
kind: Service
metadata: {name: front, namespace: shop}
spec:
  selector: {app: front}
  ports:
  - {name: http, port: 80, targetPort: 8080}
  - {name: grpc, port: 9090}
  - {name: tcp, port: 7070}
";

/// Creates the agent's working directory as in a pod of Istio's. Returns the command to run there. `settings` are added to
/// the proxy's settings, and `variables` to the agent's environment.
fn container(mesh: &Mesh, home: &Path, workload: &str, settings: &Value, variables: &[&str]) -> Vec<String> {
    let pod = mesh.names(workload).remove(0);
    let put = |path: &str, content: &[u8]| {
        let path = home.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    };
    let run = mesh.run_folder().join("config");
    let read = |path: PathBuf| fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    put("var/run/secrets/tokens/istio-token", &read(run.join("pods/shop").join(&pod).join("token")));
    put("var/run/secrets/istio/root-cert.pem", &read(run.join("ca/root-cert.pem")));
    let template = fs::read(cached(&format!("{AGENT}/envoy_bootstrap.json"))).unwrap();
    put("var/lib/istio/envoy/envoy_bootstrap_tmpl.json", &template);
    let program = home.join("envoy");
    script(&program, &format!("#!/bin/sh\nexec '{}' proxy \"$@\"\n", env!("CARGO_BIN_EXE_skysail")));
    let mut config = json!({"discoveryAddress": "10.244.0.1:15012", "binaryPath": program, "concurrency": 1});
    config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    let status = mesh.status();
    let found = status["pods"].as_array().unwrap().iter().find(|of| of["name"] == pod.as_str());
    let environment = [
        ("POD_NAME", pod.as_str()),
        ("POD_NAMESPACE", "shop"),
        ("SERVICE_ACCOUNT", "front"),
        ("INSTANCE_IP", found.unwrap()["address"].as_str().unwrap()),
        ("ISTIO_META_CLUSTER_ID", "Kubernetes"),
        ("ISTIO_META_WORKLOAD_NAME", workload),
        ("TRUST_DOMAIN", "cluster.local"),
        ("CA_ADDR", "10.244.0.1:15012"),
        ("ISTIOD_SAN", "istiod.istio-system.svc"),
        ("PROXY_CONFIG", &config.to_string()),
    ]
    .map(|(name, value)| format!("{name}={value}"));
    let home = home.to_str().unwrap().to_owned();
    let agent = cached(&format!("{AGENT}/pilot-agent")).to_str().unwrap().to_owned();
    let mut command: Vec<String> =
        ["exec", workload, "--", "env", "--chdir", &home].map(str::to_owned).into();
    command.extend(environment);
    command.extend(variables.iter().map(|variable| (*variable).to_owned()));
    command.push(agent);
    command.extend(
        [
            "proxy",
            "sidecar",
            "--domain=shop.svc.cluster.local",
            "--proxyLogLevel=warning",
            "--proxyComponentLogLevel=misc:error",
        ]
        .map(str::to_owned),
    );
    command
}

#[test]
fn istios_agent_runs_our_proxy() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).ready();
    let home = tempfile::tempdir().unwrap();
    let command = container(&mesh, home.path(), "front", &json!({}), &[]);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let log = home.path().join("log");
    let output = || Stdio::from(fs::File::options().create(true).append(true).open(&log).unwrap());
    let mut agent = mesh.command(&command).stdout(output()).stderr(output()).spawn().unwrap();

    let logged = || fs::read_to_string(&log).unwrap();
    // Through the proxy's own listener to the agent, which requests the proxy's admin page.
    eventually("the agent says that the proxy is ready", || {
        let answer = mesh.call("front", "http://127.0.0.1:15021/healthz/ready", &[]);
        if answer.status == Some(200) { Ok(()) } else { Err(format!("{answer:?}\n{}", logged())) }
    });
    let page = |url: &str| {
        let answer = mesh.call("front", url, &[]);
        assert_eq!(answer.status, Some(200), "{url}: {answer:?}");
        answer.body
    };
    for (url, words) in [
        ("http://127.0.0.1:15090/stats/prometheus", "\nenvoy_cluster_manager_cds_update_success{} "),
        // The agent's own metrics, and the proxy's.
        ("http://127.0.0.1:15020/stats/prometheus", "\nenvoy_server_state{} 0\n"),
        ("http://127.0.0.1:15020/stats/prometheus", "\nistio_agent_"),
        ("http://127.0.0.1:15000/stats", "\nlistener_manager.lds.update_success: "),
        ("http://127.0.0.1:15000/stats?usedonly&filter=downstream_cx_active$", "listener.0.0.0.0_15021."),
    ] {
        let text = format!("\n{}\n", page(url));
        assert!(text.contains(words), "{url}: {text}");
    }
    // The agent's request for `istioctl`.
    let request = |path: &str| {
        let agent = cached(&format!("{AGENT}/pilot-agent"));
        let output = mesh.run(&["exec", "front", "--", agent.to_str().unwrap(), "request", "GET", path]);
        assert!(output.status.success(), "{path}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let dump: Value = serde_json::from_str(&request("config_dump")).unwrap();
    let text = dump.to_string();
    for part in ["virtualInbound", "outbound|80||front.shop.svc.cluster.local", "overload_manager", "ROOTCA"]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let clusters: Value = serde_json::from_str(&request("clusters?format=json")).unwrap();
    assert!(clusters["cluster_statuses"].as_array().unwrap().len() > 3, "{clusters}");
    let info: Value = serde_json::from_str(&request("server_info")).unwrap();
    assert_eq!((&info["state"], &info["node"]["metadata"]["NAMESPACE"]), (&json!("LIVE"), &json!("shop")));

    let quit = mesh.call("front", "http://127.0.0.1:15020/quitquitquit", &["-X", "POST"]);
    // The agent may end before its response is sent.
    assert!(matches!(quit.status, Some(200) | None), "{quit:?}");
    eventually("the agent ends", || match agent.try_wait().unwrap() {
        Some(status) if status.success() => Ok(()),
        status => Err(format!("{status:?}\n{}", logged())),
    });
    assert!(!logged().contains("Envoy exited with error"), "{}", logged());
    // In a pod the container ends with the agent, so the agent need not wait for the program's end.
    mesh.call("front", "http://127.0.0.1:15000/quitquitquit", &["-X", "POST"]);
}

/// Environment of an injected pod besides that of [`container`].
const INJECTED: [&str; 12] = [
    "ISTIO_META_APP_CONTAINERS=web",
    "ISTIO_META_INTERCEPTION_MODE=REDIRECT",
    "ISTIO_META_MESH_ID=cluster.local",
    "ISTIO_META_NETWORK=n",
    "ISTIO_META_NODE_NAME=node-1",
    "ISTIO_META_OWNER=kubernetes://apis/apps/v1/namespaces/shop/deployments/front",
    "ISTIO_META_IDLE_TIMEOUT=300s",
    "ISTIO_METAJSON_MORE={\"OWN\": {\"a\": [1, true]}}",
    "ISTIO_METAJSON_LABELS={\"fixed\": \"yes\"}",
    r#"ISTIO_META_POD_PORTS=[{"name":"http","containerPort":8080,"protocol":"TCP"},{"containerPort":9090,"protocol":"TCP"}]"#,
    "SECRET_TTL=1h",
    r#"ISTIO_KUBE_APP_PROBERS={
        "/app-health/web/readyz": {"httpGet": {"path": "/", "port": 8080}, "timeoutSeconds": 5},
        "/app-health/web/livez": {"tcpSocket": {"port": 7070}, "timeoutSeconds": 5},
        "/app-health/web/startupz": {"grpc": {"port": 9090}, "timeoutSeconds": 5},
        "/app-health/other/readyz": {"httpGet": {"path": "/status/418", "port": 8080}, "timeoutSeconds": 5},
        "/app-health/other/livez": {"tcpSocket": {"port": 7071}},
        "/app-lifecycle/web/prestopz": {"httpGet": {"path": "/status/202", "port": 8080}}}"#,
];
/// Metadata of Istio's agent that the proxy without the agent does not send: they describe the agent's Envoy.
const OF_AGENT: [&str; 6] = [
    "ENVOY_PROMETHEUS_PORT",
    "ENVOY_SKIP_DEPRECATED_LOGS",
    "ENVOY_STATUS_PORT",
    "METADATA_DISCOVERY",
    "PILOT_SAN",
    "WORKLOAD_IDENTITY_SOCKET_FILE",
];
/// Settings that Istio's agent adds to the metadata `PROXY_CONFIG`: defaults of Istio.
const DEFAULTS: [&str; 8] = [
    "configPath",
    "controlPlaneAuthPolicy",
    "drainDuration",
    "proxyAdminPort",
    "serviceCluster",
    "statNameLength",
    "statusPort",
    "terminationDrainDuration",
];

#[test]
fn without_the_agent_our_proxy_does_its_work_in_a_pod() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), MESH).ready();
    let home = tempfile::tempdir().unwrap();
    let info = home.path().join("etc/istio/pod");
    fs::create_dir_all(&info).unwrap();
    fs::write(info.join("labels"), "app=\"front\"\npod-template-hash=\"abc\"\nversion=\"v1\"\n").unwrap();
    fs::write(info.join("annotations"), "note=\"a \\\"b\\\"\\n\\u00e9\"\n").unwrap();
    let settings =
        json!({"tracingServiceName": "CANONICAL_NAME_ONLY", "proxyMetadata": {"ISTIO_META_A": "b"}});
    let command = container(&mesh, home.path(), "front", &settings, &INJECTED);
    let start = |command: &[String]| {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let log = || fs::File::options().create(true).append(true).open(home.path().join("log")).unwrap();
        mesh.command(&command).stdout(log()).stderr(log()).spawn().unwrap()
    };
    let logged = || fs::read_to_string(home.path().join("log")).unwrap();
    let call =
        |url: &str, arguments: &[&str]| mesh.call("front", &format!("http://127.0.0.1:{url}"), arguments);
    let ready = |port: u16| {
        eventually(&format!("port {port} says that the proxy is ready"), || {
            let answer = call(&format!("{port}/healthz/ready"), &[]);
            if answer.status == Some(200) { Ok(()) } else { Err(format!("{answer:?}\n{}", logged())) }
        });
    };
    let node = || -> Value {
        let info: Value = serde_json::from_str(&call("15000/server_info", &[]).body).unwrap();
        info["node"].clone()
    };
    let quit = |mut child: Child| {
        call("15000/quitquitquit", &["-X", "POST"]);
        eventually("it ends", || child.try_wait().unwrap().map(drop).ok_or_else(logged));
    };

    let agent = start(&command);
    ready(15021);
    let of_agent = node();
    quit(agent);

    let at = command.iter().position(|word| word.ends_with("/pilot-agent")).unwrap();
    let file = |path: &str| home.path().join(path).to_str().unwrap().to_owned();
    let mut own = command[..at].to_vec();
    own.extend([
        env!("CARGO_BIN_EXE_skysail").to_owned(),
        "proxy".to_owned(),
        "--discovery=10.244.0.1:15012".to_owned(),
        format!("--ca-root={}", file("var/run/secrets/istio/root-cert.pem")),
        format!("--token={}", file("var/run/secrets/tokens/istio-token")),
        format!("--pod-info={}", info.display()),
    ]);
    let proxy = start(&own);
    ready(15021);
    ready(15020);
    compare(node(), of_agent);

    for (path, status) in [
        ("/app-health/web/readyz", 200),
        ("/app-health/web/livez", 200),
        ("/app-health/web/startupz", 200),
        ("/app-health/other/readyz", 418),
        ("/app-health/other/livez", 500),
        ("/app-lifecycle/web/prestopz", 202),
        ("/app-health/third/readyz", 404),
        ("/app-lifecycle/web/poststartz", 404),
        ("/drain", 405),
    ] {
        let answer = call(&format!("15020{path}"), &[]);
        assert_eq!(answer.status, Some(status), "{path}: {answer:?}\n{}", logged());
    }
    assert!(call("15020/stats/prometheus", &[]).body.contains("istio_agent_scrapes_total 1"));
    assert_eq!(call("15020/drain", &["-X", "POST"]).status, Some(200));
    assert_eq!(call("15020/healthz/ready", &[]).status, Some(503), "it drains");
    assert_eq!(call("15020/quitquitquit", &["-X", "POST"]).status, Some(200));
    quit(proxy);
}

/// Compares the node of our proxy with that of Istio's agent.
fn compare(mut own: Value, mut of_agent: Value) {
    let metadata = of_agent["metadata"].as_object_mut().unwrap();
    for name in OF_AGENT {
        assert!(metadata.remove(name).is_some(), "{name}: {metadata:?}");
        assert!(own["metadata"][name].is_null(), "{name}");
    }
    // Go builds the agent without a version.
    let version = own["metadata"].as_object_mut().unwrap().remove("ISTIO_VERSION");
    assert_ne!(version, metadata.remove("ISTIO_VERSION"));
    let settings = metadata["PROXY_CONFIG"].as_object_mut().unwrap();
    for name in DEFAULTS {
        assert!(own["metadata"]["PROXY_CONFIG"][name].is_null(), "{name}");
        settings.remove(name);
    }
    for name in ["userAgentName", "user_agent_name", "extensions", "client_features"] {
        of_agent.as_object_mut().unwrap().remove(name);
        own.as_object_mut().unwrap().remove(name);
    }
    let text = |node: &Value| serde_json::to_string_pretty(node).unwrap();
    assert!(own == of_agent, "ours: {}\nof the agent: {}", text(&own), text(&of_agent));
}

/// Machines with agents, and a client with a sidecar. The groups have the probes that the agents run.
const MACHINES: &str = include_str!("agent/machines.yaml");

/// A running agent.
struct Agent {
    child: Child,
    home: TempDir,
}

impl Agent {
    /// Starts the agent of a machine with the probe of its group, as `istioctl x workload entry configure` writes it.
    fn start(mesh: &Mesh, machine: &str, probe: &Value) -> Self {
        let home = tempfile::tempdir().unwrap();
        let group = format!("ISTIO_META_AUTO_REGISTER_GROUP={machine}");
        let command = container(mesh, home.path(), machine, &json!({"readinessProbe": probe}), &[&group]);
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let log = || fs::File::options().create(true).append(true).open(home.path().join("log")).unwrap();
        let child = mesh.command(&command).stdout(log()).stderr(log()).spawn().unwrap();
        Self { child, home }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.home.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the probe of a WorkloadGroup in a file of objects. `MARK` is the file that the probe by command tests.
fn probe_of(objects: &str, group: &str) -> Value {
    let name = format!("metadata: {{name: {group}, namespace: shop}}");
    let mut documents = objects.split("---\n");
    let document =
        documents.find(|text| text.contains("kind: WorkloadGroup") && text.contains(&name)).unwrap();
    let root = skysail_yaml::documents(document).next().unwrap().root.unwrap().to_json();
    root["spec"]["probe"].clone()
}

#[test]
fn a_machine_has_endpoints_while_its_probe_succeeds() {
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("healthy");
    let objects = MACHINES.replace("MARK", mark.to_str().unwrap());
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), &[MESH, &objects].join("---\n")).ready();
    let machines = ["by-http", "by-tcp", "by-grpc", "by-command", "sick"];
    let agents = machines.map(|machine| Agent::start(&mesh, machine, &probe_of(&objects, machine)));
    let call = |machine: &str| mesh.call("client", &format!("http://{machine}/"), &[]);
    let wait = |machine: usize, status: u16| {
        let name = machines[machine];
        eventually(&format!("{name} answers with {status}"), || {
            let answer = call(name);
            if answer.status == Some(status) {
                Ok(())
            } else {
                Err(format!("{answer:?}\n{}", agents[machine].log()))
            }
        });
    };
    for machine in 0..3 {
        wait(machine, 200);
    }
    let logged = |machine: &str, texts: &[&str]| {
        let log = String::from_utf8_lossy(&mesh.run(&["logs", machine]).stdout).into_owned();
        log.lines().filter(|line| texts.iter().all(|text| line.contains(text))).count()
    };
    assert!(logged("by-http", &["path=/ready", "host=own.example", "own-probe"]) > 0);
    // Its probes fail, so it has no endpoint although its agent is connected.
    eventually("the probes of sick fail", || match logged("sick", &["path=/status/500"]) {
        0..3 => Err(agents[4].log()),
        _ => Ok(()),
    });
    for machine in ["sick", "by-command"] {
        let answer = call(machine);
        assert!(answer.body.contains("no healthy upstream"), "{machine}: {answer:?}");
    }
    fs::write(&mark, "").unwrap();
    wait(3, 200);
    fs::remove_file(&mark).unwrap();
    wait(3, 503);
    fs::write(&mark, "").unwrap();
    wait(3, 200);
}
