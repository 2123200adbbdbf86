//! `skysail explain`: what it says about a folder, and that random meshes do what it says.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

#[path = "explain/certificates.rs"]
mod certificates;
#[path = "explain/edge.rs"]
mod edge;
#[path = "explain/random.rs"]
mod random;

use std::{
    collections::BTreeSet,
    env, fs,
    io::{Read as _, Write as _},
    net::SocketAddr,
    path::Path,
    process::Command,
};

use edge::Certificates;
use random::{CLIENTS, Random, Request, VERSIONS};
use serde_json::Value;
use skysail_testkit::{Client, Mesh, Setup, eventually};

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");
/// Number of random requests to a mesh.
const REQUESTS: usize = 100;
/// Runs `skysail explain` with JSON output, and returns the exit code and the report.
fn explain(config: &Path, from: &str, url: &str, arguments: &[String]) -> (i32, Value) {
    let mut command = Command::new(SKYSAIL);
    command
        .arg("explain")
        .arg("-f")
        .arg(config)
        .args(["--from", from, url, "--output", "json"])
        .args(arguments);
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {stderr}"));
    (output.status.code().unwrap(), report)
}

/// Result of a connection whose server returns the bytes.
const ECHO: &str = "echo";

/// A result that a client may see: the status (0 without a response), and what the program received.
type Seen = (u64, String);

fn received(pod: &str, path: &str, authority: &str) -> Seen {
    (200, format!("{pod} {path} {authority}"))
}

/// Returns the results that a report allows.
fn allowed(report: &Value) -> BTreeSet<Seen> {
    let destinations = report["destinations"].as_array().unwrap();
    if destinations.is_empty() {
        return [(report["status"].as_u64().unwrap_or_default(), String::new())].into();
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let is_connection = report["request"]["method"] == "CONNECTION";
    let seen = leaves(destinations).into_iter().map(|to| match to["served"].as_bool() {
        Some(true) if is_connection => (200, ECHO.to_owned()),
        Some(true) if to["status"].is_null() => {
            received(&text(&to["to"]["pod"]), &text(&to["path"]), &text(&to["authority"]))
        }
        _ => (to["status"].as_u64().unwrap_or_default(), String::new()),
    });
    seen.collect()
}

/// Returns the places where requests end, behind gateways too.
fn leaves(destinations: &[Value]) -> Vec<&Value> {
    let reached = destinations.iter().filter(|to| to["share"].as_f64() > Some(0.0));
    let places = reached.flat_map(|to| match to["next"].as_array() {
        Some(next) if !next.is_empty() => leaves(next),
        _ => vec![to],
    });
    places.collect()
}

/// Sends the request and returns what the client sees. The servers of connections return the bytes that they receive.
fn observe(mesh: &Mesh, edge: &Edge, request: &Request) -> Seen {
    if let Some(host) = request.url.strip_prefix("tls://") {
        return edge.forwarded(host.trim_end_matches(":443"));
    }
    let (status, body) = if request.from == "outside" {
        let (scheme, rest) = request.url.split_once("://").unwrap();
        let (host, path) = rest.split_once('/').unwrap();
        let headers: String = request.headers.iter().map(|header| format!("{header}\r\n")).collect();
        let client = if scheme == "https" { edge.secure(request.certificate) } else { edge.plain.clone() };
        let response = client.get(host, &format!("/{path}"), &headers).unwrap_or_default();
        let status = response.split(' ').nth(1).and_then(|status| status.parse().ok());
        let body =
            response.find('{').zip(response.rfind('}')).map(|(from, to)| response[from..=to].to_owned());
        (status, body.unwrap_or_default())
    } else {
        let arguments = request.arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let answer = mesh.call(request.from, &request.url.replace("tcp://", "http://"), &arguments);
        if request.url.starts_with("tcp:") && answer.body.contains("not valid HTTP") {
            return (200, ECHO.to_owned());
        }
        (answer.status, answer.body)
    };
    if status != Some(200) {
        return (status.unwrap_or_default().into(), String::new());
    }
    let report: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let pod = text(&report["pod"]["name"]);
    received(&pod, &text(&report["path"]), &text(&report["headers"]["host"]))
}

/// The gateway, as its clients outside see it.
struct Edge {
    plain: Client,
    published: SocketAddr,
    certificates: Certificates,
}

impl Edge {
    /// Returns a client of TLS, with a certificate or without one.
    fn secure(&self, certificate: Option<&str>) -> Client {
        let own = certificate.map(|name| self.certificates.client(name));
        Client::tls(self.published, self.certificates.root(), own)
    }

    /// Sends the first bytes of a TLS handshake, and returns whether a server behind the gateway sends them back.
    fn forwarded(&self, host: &str) -> Seen {
        let client = self.secure(None);
        let mut hello = Vec::new();
        client.session(host).write_tls(&mut hello).unwrap();
        let mut stream = client.connect().unwrap();
        let mut answer = vec![0; hello.len()];
        let is_echo = stream.write_all(&hello).and_then(|()| stream.read_exact(&mut answer)).is_ok();
        if is_echo && answer == hello { (200, ECHO.to_owned()) } else { (0, String::new()) }
    }

    /// Returns the arguments of `skysail explain` for a request.
    fn arguments(&self, request: &Request) -> Vec<String> {
        let mut arguments = request.arguments();
        if let Some(name) = request.certificate {
            arguments.extend(["--cert".to_owned(), self.certificates.file(name).display().to_string()]);
        }
        arguments
    }
}

/// Waits until the proxies of the clients know all pods: a proxy without an endpoint responds with 503.
fn wait_for_endpoints(mesh: &Mesh, edge: &Edge) {
    eventually("the gateway has its certificate", || edge.secure(Some("member")).status(edge::PROBE, "/"));
    for version in VERSIONS {
        for client in &CLIENTS[..2] {
            let url = format!("http://probe-{version}.shop/");
            eventually("the sidecar knows the endpoint", || match mesh.call(client, &url, &[]).status {
                Some(200 | 403) => Ok(()),
                other => Err(format!("{client} {url}: {other:?}")),
            });
        }
        eventually("the gateway knows the endpoint", || {
            match edge.plain.status("probe.other", &format!("/{version}")) {
                Ok(200 | 403) => Ok(()),
                other => Err(format!("{version}: {other:?}")),
            }
        });
    }
}

/// Compares random requests to a random mesh with their explanations. Returns the statuses that occurred; 0 is a closed
/// connection.
fn compare(seed: u64) -> BTreeSet<u64> {
    let mut random = Random(fastrand::Rng::with_seed(seed));
    let certificates = Certificates::new();
    let parts = [
        random.routing(),
        random.connections(),
        random.gateways(),
        random.secure_gateways(),
        random.api_routes(),
        random.policies(),
        random.tokens(),
        certificates.secrets.clone(),
    ];
    let text = random::pods() + &parts.concat();
    let ports = ["-p", "0:web/edge:80", "-p", "0:web/edge:443"];
    let mesh = Setup::of_text(SKYSAIL, &text).with(&ports).start();
    eventually("all pods are ready", || {
        let output = mesh.run(&["status", "--output", "json"]).stdout;
        let status: Value = serde_json::from_slice(&output).unwrap_or_default();
        let pods = status["pods"].as_array().filter(|pods| pods.len() == 7);
        let ready = pods.is_some_and(|pods| pods.iter().all(|pod| pod["ready"] == true));
        if ready { Ok(()) } else { Err(status.to_string()) }
    });
    let edge = Edge {
        plain: Client::plain(mesh.published("web/edge:80")),
        published: mesh.published("web/edge:443"),
        certificates,
    };
    wait_for_endpoints(&mesh, &edge);
    let mut statuses = BTreeSet::new();
    for number in 0..REQUESTS {
        let request = random.request();
        let (code, report) = explain(&mesh.config(), request.from, &request.url, &edge.arguments(&request));
        let allowed = allowed(&report);
        let seen = observe(&mesh, &edge, &request);
        assert!(
            allowed.contains(&seen),
            "seed {seed}, request {number}: {request:?}\nseen: {seen:?}\nexplained: {allowed:?}\n{report:#}\n{text}"
        );
        let is_served = allowed.iter().all(|(status, _)| (200..400).contains(status));
        assert_eq!(code, i32::from(!is_served), "{report:#}");
        statuses.insert(seen.0);
    }
    statuses
}

/// `SKYSAIL_EXPLAIN_SEEDS` is the number of meshes.
#[test]
fn random_meshes_do_what_is_explained() {
    let seeds = env::var("SKYSAIL_EXPLAIN_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(2);
    let mut statuses = BTreeSet::new();
    for seed in 0..seeds {
        statuses.extend(compare(seed));
    }
    assert!(statuses.is_superset(&[0, 200, 401, 403, 404].into()) && statuses.len() > 6, "{statuses:?}");
}

const SHOP: &str = "\
apiVersion: v1
kind: Pod
metadata: {name: front, namespace: shop, labels: {app: front}}
spec: {containers: [{name: c, image: i}]}
---
apiVersion: v1
kind: Pod
metadata: {name: back, namespace: shop, labels: {app: back}}
spec: {containers: [{name: c, image: i, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: back, namespace: shop}
spec: {selector: {app: back}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: back, namespace: shop}
spec:
  hosts: [back]
  http:
    - match: [{headers: {x-user: {exact: ann}}}]
      redirect: {uri: /for-ann}
    - route: [{destination: {host: back}}]
      timeout: 3s
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: back, namespace: shop}
spec:
  action: DENY
  rules:
    - to: [{operation: {methods: [DELETE]}}]
";

/// Runs `skysail explain` in a folder with the file `shop.yaml` and returns the exit code and both outputs.
fn explain_text(arguments: &[&str]) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("shop.yaml"), SHOP).unwrap();
    let mut command = Command::new(SKYSAIL);
    let output = command.arg("explain").args(arguments).current_dir(folder.path()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn each_decision_names_its_object_and_line() {
    let (code, text, _) =
        explain_text(&["-f", "shop.yaml", "--from", "front", "-X", "DELETE", "http://back/"]);
    assert_eq!(code, 1);
    for line in [
        "  not route 0    header x-user is absent, expected: \"ann\"",
        "                   <- VirtualService shop/back spec.http[0].match[0], shop.yaml:22",
        "  timeout        3 s; idle none",
        "                   <- VirtualService shop/back spec.http[1].timeout, shop.yaml:25",
        "  policy         DENY DENIES: rule ns[shop]-policy[back]-rule[0] matches",
        "                   <- AuthorizationPolicy shop/back spec.rules[0], shop.yaml:33",
        "  connection     mutual TLS, principal spiffe://cluster.local/ns/shop/sa/default",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(text.lines().last().unwrap_or_default().contains("shop/back"), "{text}");
}

#[test]
fn exit_codes_tell_the_result() {
    let code = |arguments: &[&str]| explain_text(arguments).0;
    let of = |arguments: &[&str]| code(&[&["-f", "shop.yaml", "--from", "front"], arguments].concat());
    assert_eq!(of(&["http://back/"]), 0);
    assert_eq!(of(&["http://back/", "-H", "x-user: ann"]), 0, "a redirect is served");
    assert_eq!(of(&["http://other/"]), 1, "the name does not exist");
    assert_eq!(of(&["ftp://back/"]), 2);
    assert_eq!(code(&["-f", "shop.yaml", "--from", "nobody", "http://back/"]), 2);
    assert_eq!(code(&["-f", "missing.yaml", "--from", "front", "http://back/"]), 2);
    let (_, _, stderr) = explain_text(&["-f", "shop.yaml", "--from", "nobody", "http://back/"]);
    assert!(stderr.contains("it has shop/back, shop/front"), "{stderr}");
}

#[test]
fn a_running_mesh_tells_what_its_proxies_hold() {
    let mesh = Setup::of_text(SKYSAIL, SHOP).ready();
    let url = "http://back/a";
    let explained = || -> Value {
        let output = mesh.run(&["explain", "--from", "shop/front", url, "--output", "json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    let report = explained();
    assert_eq!(report["served"], true, "{report:#}");
    assert_eq!(report["notes"].as_array().map(Vec::len), Some(0), "{report:#}");
    let host = "back.shop.svc.cluster.local:80";
    let on_demand = |report: &Value| report["client"]["on_demand"].to_string().contains(host);
    assert!(on_demand(&report), "{report:#}");
    let pod = report["destinations"][0]["to"]["address"].clone();
    mesh.wait_status("front", url, &[], 200);
    let report = explained();
    assert!(!on_demand(&report), "{report:#}");
    assert_eq!(report["destinations"][0]["to"]["address"], pod);
    assert_eq!(mesh.status()["pods"][0]["address"], pod, "the address is the running pod's");
    // A change is in the explanation once the sidecars have it.
    mesh.edit("mesh.yaml", "methods: [DELETE]", "paths: [/a]");
    mesh.wait_status("front", url, &[], 403);
    let report = explained();
    assert_eq!((&report["served"], &report["status"]), (&false.into(), &403.into()), "{report:#}");
    let source = &report["destinations"][0]["hop"]["filters"][0]["sources"][0];
    assert_eq!((&source["object"], &source["line"]), (&"AuthorizationPolicy shop/back".into(), &33.into()));
    // The page of the sidecar explains the same without the mesh, though the file has the former policy.
    let page = mesh.call("back", "http://127.0.0.1:15000/config_dump?include_eds", &[]).body;
    let dump = mesh.config().parent().unwrap().join("dump.json");
    fs::write(&dump, &page).unwrap();
    let of_file = ["-f", "shop.yaml", "--from", "front", url];
    let held = format!("back={}", dump.display());
    let (code, text, _) = explain_text(&of_file);
    assert_eq!(code, 0, "{text}");
    let (code, text, errors) = explain_text(&[&of_file[..], &["--config-dump", &held]].concat());
    assert!(code == 1 && text.contains("DENIES: rule ns[shop]-policy[back]-rule[0]"), "{text}{errors}");
    for wrong in ["back", "nobody=/dev/null", "back=/dev/null", "back=missing.json"] {
        let (code, _, errors) = explain_text(&[&of_file[..], &["--config-dump", wrong]].concat());
        assert!(code == 2 && errors.contains(&format!("--config-dump {wrong}")), "{errors}");
    }
    // An object that is refused keeps its last version, and the explanation says so.
    mesh.edit("mesh.yaml", "action: DENY", "action: REFUSE");
    let report = explained();
    assert!(report["errors"][0].as_str().unwrap_or_default().contains("spec.action"), "{report:#}");
    assert_eq!(report["status"], 403, "{report:#}");
}
