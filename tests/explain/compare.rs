//! The comparison of explanations with the behaviour of a running mesh.

use std::{
    collections::BTreeSet,
    env, fs,
    io::{Read as _, Write as _},
    net::SocketAddr,
    panic::resume_unwind,
    path::Path,
    process::Command,
    thread,
};

use serde_json::Value;
use skysail_testkit::{Client, Mesh, Setup, eventually};

use super::{
    edge::{self, Certificates},
    random::{self, CLIENTS, Random, Request, VERSIONS},
};

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");
/// Number of random requests to a mesh.
const REQUESTS: usize = 60;
/// Number of requests at a time.
const THREADS: usize = 3;
/// Number of pods of a mesh.
const PODS: usize = 8;
/// Result of a connection whose server returns the bytes.
const ECHO: &str = "echo";
/// Pod that decides about requests with CUSTOM policies.
const AUTHORIZER: &str = "authorizer";

/// A result that a client may see: the status (0 without a response), and what the program received.
type Seen = (u64, String);

/// The gateway, as its clients outside see it.
struct Edge {
    plain: Client,
    published: SocketAddr,
    certificates: Certificates,
}

/// Compares random requests to a random mesh with their explanations. Returns the statuses that occurred; 0
/// is a closed connection.
pub(crate) fn compare(seed: u64) -> BTreeSet<u64> {
    let mut random = Random(fastrand::Rng::with_seed(seed));
    let certificates = Certificates::new();
    let pods = random::pods();
    let addresses = addresses(&pods);
    let parts = [
        random.routing(),
        random.connections(),
        random.gateways(),
        random.secure_gateways(),
        random.api_routes(),
        random.policies(),
        random.tokens(),
        random.mesh_routes(),
        random.service_entries(&addresses),
        random.sidecars(),
        random.others(),
        random.rate_limits(),
        random.patches(),
        certificates.secrets.clone(),
    ];
    let text = pods + &parts.concat();
    let file = format!("{}/explain-{seed}.yaml", env!("CARGO_TARGET_TMPDIR"));
    fs::write(&file, &text).unwrap();
    let ports = ["-p", "0:web/edge:80", "-p", "0:web/edge:443"];
    let envoys = env::var("SKYSAIL_EXPLAIN_ENVOYS").unwrap_or_default();
    let envoys: Vec<&str> = envoys.split_whitespace().collect();
    let mesh = Setup::of_text(SKYSAIL, &text).with(&ports).with_envoys(&envoys).start();
    wait_for_pods(&mesh);
    let edge = Edge {
        plain: Client::plain(mesh.published("web/edge:80")),
        published: mesh.published("web/edge:443"),
        certificates,
    };
    wait_for_endpoints(&mesh, &edge);
    let objects = objects(&text);
    let requests: Vec<Request> = (0..REQUESTS).map(|_| random.request(&addresses)).collect();
    let check = |(number, request): (usize, &Request)| {
        let what = format!("seed {seed}, request {number}: {request:?}\nthe mesh is {file}");
        check(&mesh, &edge, &objects, request, &what)
    };
    let all: Vec<(usize, &Request)> = requests.iter().enumerate().collect();
    thread::scope(|scope| {
        let parts = all.chunks(REQUESTS.div_ceil(THREADS));
        let run = |part: &[(usize, &Request)]| part.iter().copied().map(check).collect::<BTreeSet<u64>>();
        let running: Vec<_> = parts.map(|part| scope.spawn(move || run(part))).collect();
        running
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// Compares a request with its explanation. Returns the status that the client sees.
fn check(mesh: &Mesh, edge: &Edge, objects: &[String], request: &Request, what: &str) -> u64 {
    let (code, report) = explain(&mesh.config(), request.from, &request.url, &edge.arguments(request));
    let seen = observe(mesh, edge, request);
    if report["dns"]["name"] == "" {
        // The explanation assumes an address outside. No server of names is behind the mesh.
        assert_eq!(seen.0, 0, "{what}");
        return 0;
    }
    let allowed = allowed(&report, request);
    assert!(allowed.contains(&seen), "{what}\nseen: {seen:?}\nexplained: {allowed:?}\n{report:#}");
    assert_eq!(code, i32::from(report["served"] != true), "{what}\n{report:#}");
    check_sources(&report, objects, what);
    if let Some(status) = exhausted(&report) {
        let again = observe(mesh, edge, request);
        assert_eq!(again.0, status, "{what}, again\n{report:#}");
    }
    seen.0
}

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

/// Returns the addresses that the pods of the servers will have, one for each version.
fn addresses(pods: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("pods.yaml"), pods).unwrap();
    let address = |version: &str| {
        let (_, report) = explain(folder.path(), CLIENTS[0], &format!("http://probe-{version}.shop/"), &[]);
        report["destinations"][0]["to"]["address"].as_str().unwrap().to_owned()
    };
    VERSIONS.into_iter().map(address).collect()
}

/// Returns the object of each line of a file, such as `Service shop/back`.
fn objects(text: &str) -> Vec<String> {
    let part = |document: &str, before: &str| {
        let rest = document.split_once(before).map_or("", |(_, rest)| rest);
        rest.split([',', '}', '\n']).next().unwrap_or_default().to_owned()
    };
    let lines: Vec<&str> = text.lines().collect();
    let documents = lines.split_inclusive(|line| *line == "---");
    let lines_of = |lines: &[&str]| {
        let document = lines.join("\n");
        let (kind, name) = (part(&document, "kind: "), part(&document, "metadata: {name: "));
        let object = format!("{kind} {}/{name}", part(&document, ", namespace: "));
        vec![object; lines.len()]
    };
    documents.flat_map(lines_of).collect()
}

/// Checks that each object in a report is at the line that the report names.
fn check_sources(report: &Value, objects: &[String], what: &str) {
    if let (Some(object), Some(line @ 1..)) = (report["object"].as_str(), report["line"].as_u64()) {
        let found = usize::try_from(line - 1).ok().and_then(|line| objects.get(line));
        assert_eq!(found.map(String::as_str), Some(object), "{what}: line {line}");
    }
    let values = report.as_object().into_iter().flat_map(|object| object.values());
    let items = report.as_array().into_iter().flatten();
    values.chain(items).for_each(|value| check_sources(value, objects, what));
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn received(status: u64, pod: &str, path: &str, authority: &str) -> Seen {
    (status, format!("{pod} {path} {authority}"))
}

/// Returns the results that a report allows.
fn allowed(report: &Value, request: &Request) -> BTreeSet<Seen> {
    let client = &report["client"];
    let mut seen = limited(client);
    let reached = reached(&report["destinations"]);
    if reached.is_empty() {
        seen.insert((report["status"].as_u64().unwrap_or_default(), String::new()));
    }
    seen.extend(reached.into_iter().flat_map(|to| results(to, request)));
    seen
}

fn reached(destinations: &Value) -> Vec<&Value> {
    let all = destinations.as_array().into_iter().flatten();
    all.filter(|to| to["share"].as_f64() > Some(0.0)).collect()
}

/// Returns the results at a place that the request reaches.
fn results(to: &Value, request: &Request) -> BTreeSet<Seen> {
    let hop = &to["hop"];
    let is_asked = filters(hop).any(|filter| !text(&filter["asks"]).is_empty());
    // The authorizer answers with the status that the request names. A status of 5xx is an error of the
    // authorizer.
    match request.status().filter(|_| is_asked) {
        Some(500..) => return [(403, String::new())].into(),
        Some(status @ 300..) => return [(status, AUTHORIZER.to_owned())].into(),
        _ => {}
    }
    let mut seen = limited(hop);
    let next = reached(&to["next"]);
    if !next.is_empty() {
        seen.extend(next.into_iter().flat_map(|to| results(to, request)));
        return seen;
    }
    if to["to"].is_null() && to["served"] == true {
        // No network is behind the mesh.
        seen.extend([(0, String::new()), (503, String::new())]);
        return seen;
    }
    seen.insert(match to["served"].as_bool() {
        Some(true) if request.is_connection() => (200, ECHO.to_owned()),
        Some(true) if to["status"].is_null() => {
            let status = request.status().unwrap_or(200);
            received(status, &text(&to["to"]["pod"]), &text(&to["path"]), &text(&to["authority"]))
        }
        _ => (to["status"].as_u64().unwrap_or_default(), String::new()),
    });
    seen
}

fn filters(hop: &Value) -> impl Iterator<Item = &Value> {
    hop["filters"].as_array().into_iter().flatten()
}

/// Returns the statuses of the rate limits of a proxy that may refuse the request.
fn limited(hop: &Value) -> BTreeSet<Seen> {
    let statuses = filters(hop).filter(|filter| is_enforced(&filter["limit"]));
    statuses.map(|filter| (filter["limit"]["status"].as_u64().unwrap(), String::new())).collect()
}

fn is_enforced(limit: &Value) -> bool {
    let buckets = limit["buckets"].as_array().into_iter().flatten();
    limit["enforced"].as_f64() > Some(0.0) && buckets.clone().any(|bucket| bucket["is_shadow"] == false)
}

/// Returns the status of a rate limit that the same request exceeds the second time, if the report has just
/// one place and one limit.
fn exhausted(report: &Value) -> Option<u64> {
    let [to] = reached(&report["destinations"])[..] else { return None };
    let mut limits = filters(&to["hop"]).filter(|filter| is_enforced(&filter["limit"]));
    let limit = &limits.next()?["limit"];
    let is_one = limit["buckets"].as_array()?.iter().all(|bucket| bucket["at_once"] == 1);
    let is_only = limits.next().is_none() && limited(&report["client"]).is_empty();
    let is_plain = to["next"].as_array().is_none_or(Vec::is_empty) && to["endpoints"] == 1;
    let is_served = report["served"] == true && filters(&to["hop"]).all(|of| text(&of["asks"]).is_empty());
    (is_one && is_only && is_plain && is_served).then(|| limit["status"].as_u64()).flatten()
}

/// Sends the request and returns what the client sees. The servers of connections return the bytes that they
/// receive.
fn observe(mesh: &Mesh, edge: &Edge, request: &Request) -> Seen {
    if let Some(host) = request.url.strip_prefix("tls://") {
        return edge.forwarded(host.trim_end_matches(":443"));
    }
    let (status, body) = if request.from == "outside" {
        edge.send(request)
    } else {
        let arguments = request.arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let answer = mesh.call(request.from, &request.url.replace("tcp://", "http://"), &arguments);
        if request.is_connection() && answer.body.contains("not valid HTTP") {
            return (200, ECHO.to_owned());
        }
        (answer.status, answer.body)
    };
    let status = status.unwrap_or_default().into();
    let report: Value = serde_json::from_str(&body).unwrap_or_default();
    match text(&report["pod"]["name"]).as_str() {
        "" => (status, String::new()),
        AUTHORIZER => (status, AUTHORIZER.to_owned()),
        pod => received(status, pod, &text(&report["path"]), &text(&report["headers"]["host"])),
    }
}

impl Edge {
    /// Returns a client of TLS, with a certificate or without one.
    fn secure(&self, certificate: Option<&str>) -> Client {
        let own = certificate.map(|name| self.certificates.client(name));
        Client::tls(self.published, self.certificates.root(), own)
    }

    /// Sends a request from outside. Returns the status and the JSON text of the response.
    fn send(&self, request: &Request) -> (Option<u16>, String) {
        let (scheme, rest) = request.url.split_once("://").unwrap();
        let (host, path) = rest.split_once('/').unwrap();
        let headers: String = request.headers.iter().map(|header| format!("{header}\r\n")).collect();
        let client = if scheme == "https" { self.secure(request.certificate) } else { self.plain.clone() };
        let response = client.get(host, &format!("/{path}"), &headers).unwrap_or_default();
        let status = response.split(' ').nth(1).and_then(|status| status.parse().ok());
        let ends = response.find('{').zip(response.rfind('}'));
        let body = ends.map(|(from, to)| response[from..=to].to_owned());
        (status, body.unwrap_or_default())
    }

    /// Sends the first bytes of a TLS handshake, and returns whether a server behind the gateway sends them
    /// back.
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

fn wait_for_pods(mesh: &Mesh) {
    eventually("all pods are ready", || {
        let output = mesh.run(&["status", "--output", "json"]).stdout;
        let status: Value = serde_json::from_slice(&output).unwrap_or_default();
        let pods = status["pods"].as_array().filter(|pods| pods.len() == PODS);
        let ready = pods.is_some_and(|pods| pods.iter().all(|pod| pod["ready"] == true));
        if ready { Ok(()) } else { Err(status.to_string()) }
    });
}

/// Waits until the proxies of the clients know all pods: a proxy without an endpoint responds with 503.
fn wait_for_endpoints(mesh: &Mesh, edge: &Edge) {
    eventually("the gateway has its certificate", || edge.secure(Some("member")).status(edge::PROBE, "/"));
    for version in VERSIONS {
        for client in &CLIENTS[..2] {
            let url = format!("http://probe-{version}.shop/");
            eventually("the sidecar knows the endpoint", || match mesh.call(client, &url, &[]).status {
                Some(status) if status != 503 => Ok(()),
                other => Err(format!("{client} {url}: {other:?}")),
            });
        }
        eventually("the gateway knows the endpoint", || {
            match edge.plain.status("probe.other", &format!("/{version}")) {
                Ok(status) if status != 503 => Ok(()),
                other => Err(format!("{version}: {other:?}")),
            }
        });
    }
}
