//! What configurations compile to: as golden texts, and as a real Envoy and `skysail-proxy` see it.
//!
//! `tests/golden/*.yaml` has the resources of the proxies of each example. `SKYSAIL_WRITE_GOLDEN=1` writes them again.
//! The resources of these and other configurations of the repository are loaded by `--mode validate` of both proxies,
//! which accept the same.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

mod bootstrap;
#[path = "../../crates/model/tests/istiod/json.rs"]
#[allow(dead_code, reason = "the comparison is for recordings")]
mod json;
mod text;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
    thread,
};

use serde_json::Value;
use skysail_model::{ProxyView, World, compile};
use skysail_sandbox::Offline;
use skysail_testkit::envoy;
use skysail_xds::Kind;

/// Types of resources that are compared. Secrets have keys, and name tables are compared with recordings of istiod.
const KINDS: [Kind; 4] = [Kind::Cluster, Kind::Endpoint, Kind::Listener, Kind::Route];
/// Maximum number of proxies of a configuration that are validated.
const MAX_VALIDATED: usize = 2;

/// Configurations that a proxy refuses, with a part of Envoy's error and of that of `skysail-proxy`; empty for a proxy
/// that accepts them. The resources are those that a plain Envoy is sent: for `skysail-proxy`, the control plane leaves
/// out some of these fields. The recorded scenarios have texts in the place of keys.
const REFUSED: [(&str, &str, &str); 12] = [
    ("tasks-access-logs", "", "only connections without a filter chain are logged"),
    ("filter-mapped-addresses", "", "represent_ipv4_remote_address_as_ipv4_mapped_ipv6"),
    ("istiod-j2-ingress-gateway-tls", "NO_START_LINE", "private key"),
    ("istiod-l-tcp", "", "mongo_proxy"),
    ("istiod-m-telemetry", "", "filter_state_objects_to_log"),
    ("istiod-p-gateway-tls", "NO_START_LINE", "TLSv1_1 is not supported"),
    ("istiod-s-envoyfilter", "must be the last filter", "suppress_envoy_headers"),
    ("istiod-t-telemetry-kinds", "", "filter_state_objects_to_log"),
    ("istiod-x-dr-kinds", "NO_START_LINE", "crl.filename"),
    ("istiod-y1-mesh-paths-json", "", "suppress_envoy_headers"),
    ("istiod-z-gatewayapi-kinds", "NO_START_LINE", "private key"),
    ("istiod-z2-ingress", "NO_START_LINE", "private key"),
];

/// A configuration of the corpus.
struct Configuration {
    name: String,
    paths: Vec<PathBuf>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn configuration(name: impl Into<String>, paths: &[&str]) -> Configuration {
    Configuration { name: name.into(), paths: paths.iter().map(|path| root().join(path)).collect() }
}

/// Returns the names of the entries of a folder, sorted.
fn entries(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(root().join(folder)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Returns the examples. The second one is the base of those that follow.
fn examples() -> Vec<Configuration> {
    let (app, gateway) = ("examples/tasks/app", "examples/tasks/gateway");
    let mut all =
        vec![configuration("airline", &["examples/airline"]), configuration("tasks", &[app, gateway])];
    let is_task = |name: &String| !["app", "gateway", "README.md"].contains(&name.as_str());
    for task in entries("examples/tasks").into_iter().filter(is_task) {
        let folder = format!("examples/tasks/{task}");
        all.push(configuration(format!("tasks-{task}"), &[app, gateway, &folder]));
    }
    all
}

/// Returns the whole corpus.
fn corpus() -> Vec<Configuration> {
    let mut all = examples();
    for file in entries("tests/envoy_filters") {
        let patched = format!("tests/envoy_filters/{file}");
        all.push(configuration(format!("filter-{file}"), &["tests/shop.yaml", &patched]));
    }
    let is_scenario = |name: &String| !["00-base", "README.md"].contains(&name.as_str());
    for scenario in entries("tests/istiod").into_iter().filter(is_scenario) {
        let folder = format!("tests/istiod/{scenario}");
        all.push(configuration(format!("istiod-{scenario}"), &["tests/istiod/00-base", &folder]));
    }
    all
}

/// Resources of a proxy by type and name.
type Resources = BTreeMap<(Kind, String), Value>;

fn resources(world: &World, view: &ProxyView, kinds: &[Kind]) -> Resources {
    let (made, _) = compile(world, view);
    let mut resources = Resources::new();
    for kind in kinds {
        for resource in made.iter(*kind) {
            let (name, (value, _)) = json::named(*kind, &resource.body);
            resources.insert((*kind, name), value);
        }
    }
    resources
}

/// Returns the views of the proxies of a configuration, with the names of their workloads. Virtual hosts are within
/// their route configurations, as Envoy needs them in files.
fn views(mesh: &Offline) -> Vec<(String, ProxyView)> {
    let mut views = Vec::new();
    for pod in mesh.pods.iter().filter(|pod| pod.sidecar || pod.gateway) {
        let Some(node) = pod.proxy(&mesh.world) else { continue };
        let view = ProxyView { uses_vhds: false, ..node.view };
        views.push((format!("{}/{}", pod.namespace, pod.owner.name), view));
    }
    views
}

/// Returns each resource of a configuration, with the workloads that have it.
fn described(configuration: &Configuration) -> BTreeMap<(Kind, String, String), BTreeSet<String>> {
    let mesh = Offline::read(&configuration.paths, None).unwrap();
    let mut names: Vec<(String, String)> =
        mesh.pods.iter().map(|pod| (pod.address.to_string(), format!("pod:{}", pod.owner.name))).collect();
    for service in mesh.world.services() {
        let of = |ip: &std::net::IpAddr| (ip.to_string(), format!("service:{}", service.meta.name));
        names.extend(service.spec.cluster_ips.iter().map(of));
    }
    let mut described: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
    for (workload, view) in views(&mesh) {
        for ((kind, name), value) in resources(&mesh.world, &view, &KINDS) {
            let shown = |text: &str| text::with_names(text, &names);
            let key = (kind, shown(&name), shown(&value.to_string()));
            described.entry(key).or_default().insert(workload.clone());
        }
    }
    described
}

#[test]
fn examples_compile_to_the_golden_texts() {
    let folder = root().join("tests/golden");
    let writes = std::env::var_os("SKYSAIL_WRITE_GOLDEN").is_some();
    let (mut base, mut wrong) = (None, Vec::new());
    for configuration in examples() {
        let all = described(&configuration);
        let text = match &base {
            Some(base) => text::changes(base, &all),
            None => text::whole(&all),
        };
        if configuration.name == "tasks" {
            base = Some(all);
        }
        let file = folder.join(format!("{}.yaml", configuration.name));
        if writes {
            fs::write(&file, &text).unwrap();
        }
        let golden = fs::read_to_string(&file).unwrap_or_default();
        if golden != text {
            wrong.push(format!("{}:\n{}", file.display(), text::difference(&golden, &text)));
        }
    }
    assert!(wrong.is_empty(), "SKYSAIL_WRITE_GOLDEN=1 writes these files again\n{}", wrong.join("\n"));
}

/// Verdict of a proxy on a bootstrap file: its output if it refuses the file.
fn verdict(program: &Path, arguments: &[&str], file: &Path) -> Result<(), String> {
    let output = Command::new(program).args(arguments).arg(file).env("RUST_BACKTRACE", "0").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    if output.status.success() { Ok(()) } else { Err(lines[lines.len().saturating_sub(6)..].join("\n")) }
}

/// A bootstrap file to validate, with the name of its configuration.
struct Case {
    configuration: String,
    workload: String,
    bootstrap: String,
}

impl Case {
    /// Returns whether the verdicts of Envoy and of `skysail-proxy` are the expected ones.
    fn is_expected(&self, theirs: &Result<(), String>, ours: &Result<(), String>) -> bool {
        let refused = REFUSED.iter().find(|(name, ..)| self.configuration.trim_end_matches(".yaml") == *name);
        let (_, their_error, our_error) = refused.unwrap_or(&("", "", ""));
        let is_known = |verdict: &Result<(), String>, known: &str| match verdict {
            Ok(()) => true,
            Err(error) => !known.is_empty() && error.contains(known),
        };
        is_known(theirs, their_error) && is_known(ours, our_error)
    }
}

fn cases() -> Vec<Case> {
    let (mut cases, mut known) = (Vec::new(), HashSet::new());
    for configuration in corpus() {
        let mesh = Offline::read(&configuration.paths, None).unwrap();
        let mut count = 0;
        for (workload, view) in views(&mesh) {
            let plain = ProxyView { plain_envoy: true, ..view };
            let kinds: Vec<Kind> = KINDS.into_iter().chain([Kind::Secret]).collect();
            let bootstrap = bootstrap::of(&resources(&mesh.world, &plain, &kinds)).to_string();
            if count < MAX_VALIDATED && known.insert(bootstrap.clone()) {
                count += 1;
                let configuration = configuration.name.clone();
                cases.push(Case { configuration, workload, bootstrap });
            }
        }
    }
    cases
}

#[test]
fn a_real_envoy_and_the_sidecar_accept_the_whole_corpus() {
    let folder = tempfile::tempdir().unwrap();
    let (envoy, skysail) = (envoy(), PathBuf::from(env!("CARGO_BIN_EXE_skysail")));
    let cases = cases();
    assert!(cases.len() > 100, "{}", cases.len());
    let (remaining, wrong) = (Mutex::new(cases.iter().enumerate()), Mutex::new(Vec::new()));
    let refused = Mutex::new(BTreeSet::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((number, case)) = { remaining.lock().unwrap().next() } {
                    let file = folder.path().join(format!("{number}.json"));
                    fs::write(&file, &case.bootstrap).unwrap();
                    let theirs =
                        verdict(&envoy, &["--mode", "validate", "--log-level", "error", "-c"], &file);
                    let ours = verdict(&skysail, &["proxy", "--mode", "validate", "-c"], &file);
                    if !case.is_expected(&theirs, &ours) {
                        let name = format!("{} {}", case.configuration, case.workload);
                        let text = format!("{name}:\n  Envoy: {theirs:?}\n  Skysail: {ours:?}");
                        wrong.lock().unwrap().push(text);
                    }
                    if theirs.is_err() || ours.is_err() {
                        refused
                            .lock()
                            .unwrap()
                            .insert(case.configuration.trim_end_matches(".yaml").to_owned());
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {} are unexpected\n{}", wrong.len(), cases.len(), wrong.join("\n"));
    let refused = refused.into_inner().unwrap();
    let accepted: Vec<_> = REFUSED.iter().filter(|(name, ..)| !refused.contains(*name)).collect();
    assert!(accepted.is_empty(), "both proxies accept {accepted:?}: remove these entries");
}
