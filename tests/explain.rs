//! `skysail explain`: what it says about a folder, and that random meshes do what it says.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

use std::{collections::BTreeSet, env, fmt::Write as _, fs, path::Path, process::Command};

use serde_json::Value;
use skysail_testkit::{Mesh, Setup, eventually};

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");
/// Number of services with random rules.
const SERVICES: usize = 12;
/// Number of random requests to a mesh.
const REQUESTS: usize = 60;
/// Clients: with a sidecar in the namespace of the services and in another one, and without a sidecar.
const CLIENTS: [&str; 3] = ["shop/front", "web/far", "shop/bare"];
const PATHS: [&str; 7] = ["/", "/a", "/a/b", "/A", "/ab", "/a/b/c", "/c"];
const VALUES: [&str; 3] = ["x", "xy", "z"];
const METHODS: [&str; 3] = ["GET", "POST", "DELETE"];
const VERSIONS: [&str; 3] = ["v1", "v2", "v3"];

/// Pods, and services without rules by which a test sees that sidecars know the pods.
fn pods() -> String {
    let pod = |namespace: &str, name: &str, labels: &str| {
        format!(
            "---\napiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
             ---\napiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}\n\
             spec: {{serviceAccountName: {name}, containers: [{{name: c, image: i, ports: [{{containerPort: 8080}}]}}]}}\n"
        )
    };
    let service = |name: &str, selector: &str| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec: {{selector: {{{selector}}}, ports: [{{name: http, port: 80, targetPort: 8080}}]}}\n"
        )
    };
    let mut text = pod("shop", "front", "app: front");
    text += &pod("web", "far", "app: far");
    text += &pod("shop", "bare", "app: bare, sidecar.istio.io/inject: 'false'");
    for version in VERSIONS {
        text += &pod("shop", &format!("back-{version}"), &format!("app: back, version: {version}"));
        text += &service(&format!("probe-{version}"), &format!("app: back, version: {version}"));
    }
    for number in 0..SERVICES {
        text += &service(&format!("s{number}"), "app: back");
    }
    text
}

/// Random configuration and requests.
struct Random(fastrand::Rng);

impl Random {
    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.0.usize(..of.len())]
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.0.u32(..100) < percent
    }

    fn some(&mut self, of: &[&str]) -> String {
        let count = self.0.usize(1..=2);
        let chosen: BTreeSet<&str> = (0..count).map(|_| self.one(of)).collect();
        chosen.into_iter().map(|item| format!("{item:?}")).collect::<Vec<_>>().join(", ")
    }

    fn string(&mut self, of: &[&str]) -> String {
        let value = self.one(of);
        match self.0.u32(..4) {
            0 | 1 => format!("{{exact: {value:?}}}"),
            2 => format!("{{prefix: {value:?}}}"),
            _ => format!("{{regex: '{value}.*'}}"),
        }
    }

    fn matched(&mut self) -> String {
        let mut fields = Vec::new();
        if self.chance(60) {
            fields.push(format!("uri: {}", self.string(&PATHS)));
            if self.chance(20) {
                fields.push("ignoreUriCase: true".to_owned());
            }
        }
        for (field, chance) in [("headers", 40), ("withoutHeaders", 15)] {
            if self.chance(chance) {
                let test = if self.chance(25) { "{}".to_owned() } else { self.string(&VALUES) };
                fields.push(format!("{field}: {{x-user: {test}}}"));
            }
        }
        if self.chance(25) {
            fields.push(format!("method: {}", self.string(&METHODS)));
        }
        if self.chance(20) {
            fields.push(format!("queryParams: {{q: {}}}", self.string(&VALUES)));
        }
        if self.chance(15) {
            fields.push("sourceLabels: {app: front}".to_owned());
        }
        if self.chance(10) {
            fields.push("sourceNamespace: web".to_owned());
        }
        if fields.is_empty() {
            fields.push("uri: {prefix: /}".to_owned());
        }
        format!("{{{}}}", fields.join(", "))
    }

    fn rule(&mut self, host: &str) -> String {
        let mut fields = Vec::new();
        if self.chance(80) {
            let matches: Vec<String> = (0..self.0.usize(1..=2)).map(|_| self.matched()).collect();
            fields.push(format!("match: [{}]", matches.join(", ")));
        }
        match self.0.u32(..10) {
            0 => fields.push("redirect: {uri: /moved, redirectCode: 302}".to_owned()),
            1 => fields.push("directResponse: {status: 418}".to_owned()),
            _ => {
                let first = self.0.u32(0..=100);
                let route = |weight: u32, subset: &str| {
                    format!("{{destination: {{host: {host}, subset: {subset}}}, weight: {weight}}}")
                };
                // v3 is not in every DestinationRule: then the cluster does not exist.
                let routes = [route(first, self.one(&VERSIONS)), route(100 - first, self.one(&VERSIONS))];
                let routes = match self.0.u32(..3) {
                    0 => format!("{{destination: {{host: {host}}}}}"),
                    1 => format!("{{destination: {{host: {host}, subset: {}}}}}", self.one(&VERSIONS)),
                    _ => routes.join(", "),
                };
                fields.push(format!("route: [{routes}]"));
                if self.chance(20) {
                    fields.push(format!("rewrite: {{uri: {}}}", self.one(&PATHS)));
                }
                if self.chance(10) {
                    fields.push("rewrite: {authority: other.example}".to_owned());
                    fields.dedup_by(|a, b| a.starts_with("rewrite") && b.starts_with("rewrite"));
                }
                if self.chance(20) {
                    let value = self.one(&VALUES);
                    fields.push(format!("headers: {{request: {{set: {{x-user: {value}}}}}}}"));
                }
                if self.chance(8) {
                    fields.push("fault: {abort: {httpStatus: 507, percentage: {value: 100}}}".to_owned());
                }
            }
        }
        format!("  - {{{}}}\n", fields.join(", "))
    }

    fn routing(&mut self) -> String {
        let mut text = String::new();
        for number in 0..SERVICES {
            let host = format!("s{number}.shop.svc.cluster.local");
            let subsets = VERSIONS.iter().take(self.0.usize(2..=3));
            let subsets: Vec<String> = subsets
                .map(|version| format!("{{name: {version}, labels: {{version: {version}}}}}"))
                .collect();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec: {{host: {host}, subsets: [{}]}}\n",
                subsets.join(", ")
            );
            let rules: String = (0..self.0.usize(1..=5)).map(|_| self.rule(&host)).collect();
            let _ = write!(
                text,
                "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: s{number}, namespace: shop}}\n\
                 spec:\n  hosts: [{host}]\n  http:\n{rules}"
            );
        }
        text
    }

    fn policy_rule(&mut self) -> String {
        let mut fields = Vec::new();
        if self.chance(50) {
            let from = match self.0.u32(..4) {
                0 => "principals: [cluster.local/ns/shop/sa/front]".to_owned(),
                1 => "notPrincipals: [cluster.local/ns/web/sa/far]".to_owned(),
                2 => "namespaces: [web]".to_owned(),
                _ => "notNamespaces: [shop]".to_owned(),
            };
            fields.push(format!("from: [{{source: {{{from}}}}}]"));
        }
        if self.chance(60) {
            let to = match self.0.u32(..4) {
                0 => format!("methods: [{}]", self.some(&METHODS)),
                1 => format!("paths: [{}]", self.some(&["/a*", "/c", "/a/b", "*/c"])),
                2 => format!("notPaths: [{}]", self.some(&["/a*", "/c"])),
                _ => format!("hosts: [{}]", self.some(&["s1*", "s2.shop", "other.example"])),
            };
            fields.push(format!("to: [{{operation: {{{to}}}}}]"));
        }
        if fields.is_empty() || self.chance(30) {
            let values = self.some(&VALUES);
            let test = if self.chance(30) { "notValues" } else { "values" };
            fields.push(format!("when: [{{key: 'request.headers[x-user]', {test}: [{values}]}}]"));
        }
        format!("  - {{{}}}\n", fields.join(", "))
    }

    fn policies(&mut self) -> String {
        let mut text = String::new();
        for (number, version) in VERSIONS.iter().enumerate() {
            if self.chance(40) {
                let mode = self.one(&["STRICT", "PERMISSIVE"]);
                let _ = write!(
                    text,
                    "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: p{number}, namespace: shop}}\n\
                     spec: {{selector: {{matchLabels: {{version: {version}}}}}, mtls: {{mode: {mode}}}}}\n"
                );
            }
        }
        for number in 0..self.0.usize(2..=4) {
            let action = self.one(&["DENY", "DENY", "ALLOW"]);
            let version = self.one(&VERSIONS);
            let rules: String = (0..self.0.usize(1..=3)).map(|_| self.policy_rule()).collect();
            let _ = write!(
                text,
                "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: a{number}, namespace: shop}}\n\
                 spec:\n  selector: {{matchLabels: {{version: {version}}}}}\n  action: {action}\n  rules:\n{rules}"
            );
        }
        text
    }

    /// Returns a client, a URL, and arguments that `call` and `explain` share.
    fn request(&mut self) -> (&'static str, String, Vec<String>) {
        let client = self.one(&CLIENTS);
        let host = format!("s{}.shop", self.0.usize(..SERVICES));
        let query = if self.chance(30) { format!("?q={}", self.one(&VALUES)) } else { String::new() };
        let mut arguments = vec!["-X".to_owned(), self.one(&METHODS).to_owned()];
        if self.chance(60) {
            arguments.extend(["-H".to_owned(), format!("x-user: {}", self.one(&VALUES))]);
        }
        (client, format!("http://{host}{}{query}", self.one(&PATHS)), arguments)
    }
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
    let seen = destinations.iter().filter(|to| to["share"].as_f64() > Some(0.0)).map(|to| match to["served"]
        .as_bool()
    {
        Some(true) => received(&text(&to["to"]["pod"]), &text(&to["path"]), &text(&to["authority"])),
        _ => (to["status"].as_u64().unwrap_or_default(), String::new()),
    });
    seen.collect()
}

/// Sends the request and returns what the client sees.
fn observe(mesh: &Mesh, from: &str, url: &str, arguments: &[String]) -> Seen {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let answer = mesh.call(from, url, &arguments);
    match answer.status {
        Some(200) => {
            let report = answer.json();
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let pod = text(&report["pod"]["name"]);
            received(&pod, &text(&report["path"]), &text(&report["headers"]["host"]))
        }
        status => (status.unwrap_or_default().into(), String::new()),
    }
}

/// Waits until the clients' sidecars know all pods: a sidecar without an endpoint responds with 503.
fn wait_for_endpoints(mesh: &Mesh) {
    for client in &CLIENTS[..2] {
        for version in VERSIONS {
            let url = format!("http://probe-{version}.shop/");
            eventually("the sidecar knows the endpoint", || match mesh.call(client, &url, &[]).status {
                Some(200 | 403) => Ok(()),
                other => Err(format!("{client} {url}: {other:?}")),
            });
        }
    }
}

/// Compares random requests to a random mesh with their explanations. Returns the statuses that occurred.
fn compare(seed: u64) -> BTreeSet<u64> {
    let mut random = Random(fastrand::Rng::with_seed(seed));
    let text = pods() + &random.routing() + &random.policies();
    let mesh = Setup::of_text(SKYSAIL, &text).start();
    eventually("all pods are ready", || {
        let output = mesh.run(&["status", "--output", "json"]).stdout;
        let status: Value = serde_json::from_slice(&output).unwrap_or_default();
        let pods = status["pods"].as_array().filter(|pods| pods.len() == 6);
        let ready = pods.is_some_and(|pods| pods.iter().all(|pod| pod["ready"] == true));
        if ready { Ok(()) } else { Err(status.to_string()) }
    });
    wait_for_endpoints(&mesh);
    let mut statuses = BTreeSet::new();
    for number in 0..REQUESTS {
        let (from, url, arguments) = random.request();
        let (code, report) = explain(&mesh.config(), from, &url, &arguments);
        let allowed = allowed(&report);
        let seen = observe(&mesh, from, &url, &arguments);
        assert!(
            allowed.contains(&seen),
            "seed {seed}, request {number}: {from} {url} {arguments:?}\nseen: {seen:?}\nexplained: {allowed:?}\n{report:#}\n{text}"
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
    assert!(statuses.is_superset(&[200, 403, 404].into()) && statuses.len() > 4, "{statuses:?}");
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
    // An object that is refused keeps its last version, and the explanation says so.
    mesh.edit("mesh.yaml", "action: DENY", "action: REFUSE");
    let report = explained();
    assert!(report["errors"][0].as_str().unwrap_or_default().contains("spec.action"), "{report:#}");
    assert_eq!(report["status"], 403, "{report:#}");
}
