//! `skysail install` and `skysail uninstall` on a real API server.

use std::{
    fs,
    process::{Command, Output},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use crate::cluster::Cluster;

const SKYSAIL: &str = env!("CARGO_BIN_EXE_skysail");
/// Kinds of the objects of an installation, but for its namespace.
const KINDS: &str = "serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,services,deployments,\
    poddisruptionbudgets,horizontalpodautoscalers,mutatingwebhookconfigurations,validatingwebhookconfigurations";

/// A revision of its own in a namespace of its own: tests run at the same time.
pub(crate) struct Mesh {
    pub(crate) cluster: Cluster,
    pub(crate) revision: String,
}

impl Mesh {
    pub(crate) fn start(labels: &[&str]) -> Option<Self> {
        let cluster = Cluster::start(labels)?;
        let revision = cluster.namespace.replace("skysail-test-", "r");
        Some(Self { cluster, revision })
    }

    /// Runs a command for the revision.
    fn run(&self, command: &str, options: &[&str]) -> Output {
        let place = ["--namespace", &self.cluster.namespace, "--revision", &self.revision];
        Command::new(SKYSAIL).arg(command).args(place).args(options).output().unwrap()
    }

    /// Runs a command, which must succeed. Returns its output.
    pub(crate) fn done(&self, command: &str, options: &[&str]) -> String {
        let output = self.run(command, options);
        let error = String::from_utf8_lossy(&output.stderr);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{command} {options:?}: {error}\n{text}");
        text
    }

    /// Runs a command, which must fail. Returns its error.
    fn refused(&self, command: &str, options: &[&str]) -> String {
        let output = self.run(command, options);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        error
    }

    /// Returns the names of the objects of the revision in the cluster.
    fn objects(&self) -> Vec<String> {
        let labels = format!("app.kubernetes.io/managed-by=skysail,istio.io/rev={}", self.revision);
        let names = self.cluster.done(&["get", KINDS, "--all-namespaces", "-l", &labels, "-o", "name"], "");
        names.lines().map(str::to_owned).collect()
    }

    fn webhook(&self) -> String {
        format!("skysail-injector-{}-{}", self.revision, self.cluster.namespace)
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.run("uninstall", &["--yes"]);
    }
}

/// Returns the changes that a command has reported, without the objects.
fn changes(output: &str) -> Vec<&str> {
    let lines = output.lines().filter(|line| line.starts_with("  ") && !line.contains("kubectl"));
    lines.filter_map(|line| line.split_whitespace().next()).collect()
}

#[test]
fn an_installation_is_complete_repeatable_and_removable() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    let tried = mesh.done("install", &["--dry-run"]);
    let found = changes(&tried);
    assert_eq!((found[0], found.len()), ("unchanged", 13), "the namespace exists: {tried}");
    // Another test may have made the definition of Skysail's kind, which stays.
    assert!(found[2..].iter().all(|change| *change == "created"), "{tried}");
    assert!(mesh.objects().is_empty(), "a dry run changes nothing");

    let installed = mesh.done("install", &["--no-wait"]);
    assert_eq!(changes(&installed)[2..], found[2..], "what the dry run said: {installed}");
    assert_eq!(mesh.objects().len(), 11, "{:?}", mesh.objects());
    let again = mesh.done("install", &["--no-wait"]);
    assert!(changes(&again).iter().all(|change| *change == "unchanged"), "{again}");

    let fixed = mesh.done("install", &["--no-wait", "--replicas", "2"]);
    let line = |text: &str| {
        fixed.lines().any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").contains(text))
    };
    assert!(line("changed Deployment") && line("removed HorizontalPodAutoscaler"), "{fixed}");

    let image = json!({ "spec": { "template": { "spec": { "containers": [{ "name": "discovery", "image": "a:1" }] } } } });
    let deployment = format!("skysaild-{}", mesh.revision);
    mesh.cluster.done(&["patch", "deployment", &deployment, "-p", &image.to_string()], "");
    let conflict = mesh.refused("install", &["--no-wait", "--replicas", "2"]);
    assert!(conflict.contains("nothing was changed") && conflict.contains("--force"), "{conflict}");
    let forced = mesh.done("install", &["--no-wait", "--replicas", "2", "--force"]);
    assert_eq!(changes(&forced).iter().filter(|change| **change == "changed").count(), 1, "{forced}");

    let listed = mesh.done("uninstall", &["--dry-run"]);
    assert!(listed.contains("MutatingWebhookConfiguration") && mesh.objects().len() == 10, "{listed}");
    let asked = mesh.refused("uninstall", &[]);
    assert!(asked.contains("set --yes") && mesh.objects().len() == 10, "{asked}");
    let removed = mesh.done("uninstall", &["--yes"]);
    assert!(mesh.objects().is_empty(), "{removed}");
    mesh.cluster.done(&["get", "namespace", &mesh.cluster.namespace], "");
    let again = mesh.done("uninstall", &["--yes"]);
    assert!(again.contains("no revision"), "{again}");
}

#[test]
fn checks_say_what_an_installation_lacks() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    let verdicts = |options: &[&str]| {
        let output = mesh.run("check", &[options, &["--output", "json"]].concat());
        let read: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(i32::from(read["healthy"] != true)), "{read:#}");
        let checks = read["checks"].as_array().unwrap().clone();
        move |subject: &str| {
            let found = checks.iter().find(|check| check["subject"] == subject);
            found.map(|check| (check["verdict"].clone(), check["detail"].to_string()))
        }
    };
    let is = |found: Option<(Value, String)>, verdict: &str, detail: &str| {
        let is_so = found.as_ref().is_some_and(|(is, what)| *is == verdict && what.contains(detail));
        assert!(is_so, "{verdict} {detail}: {found:?}");
    };
    let before = verdicts(&["--before"]);
    is(before("the API server answers, and is recent enough"), "passed", "Kubernetes v1.");
    is(before("the clocks of machines agree"), "passed", "this machine");
    is(before("the objects can be created"), "passed", "13 objects");
    is(verdicts(&[])("it is installed"), "failed", "there is no control plane");

    mesh.done("install", &["--no-wait", "--replicas", "1", "--control-image", "registry.invalid/skysaild:1"]);
    let after = verdicts(&[]);
    is(after("it is installed"), "passed", &mesh.revision);
    is(after("its objects exist"), "passed", "");
    is(after("its pods are available"), "failed", "0 of 1 new pods");
    is(after("its Service has endpoints"), "failed", "no pod");
    is(after("one of its replicas leads"), "failed", "has no holder");
    is(after("the API server can verify them"), "failed", "caBundle is empty");
    is(after("a new pod gets a sidecar"), "failed", "failed calling webhook");
    is(after("sidecars are ready"), "passed", "0");
    let budget = format!("poddisruptionbudget/skysaild-{}", mesh.revision);
    mesh.cluster.done(&["delete", &budget], "");
    is(verdicts(&[])("its objects exist"), "failed", "missing: PodDisruptionBudget");

    let text = mesh.run("check", &[]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("repeat `skysail install`") && text.contains("passed: "), "{text}");
}

#[test]
fn the_trust_bundle_of_the_control_plane_stays() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    mesh.done("install", &["--no-wait"]);
    let (webhook, kind) = (mesh.webhook(), "mutatingwebhookconfiguration");
    let roots = mesh.cluster.done(&["get", "configmap", "kube-root-ca.crt", "-o", "json"], "");
    let roots: Value = serde_json::from_str(&roots).unwrap();
    let mut configuration: Value =
        serde_json::from_str(&mesh.cluster.done(&["get", kind, &webhook, "-o", "json"], "")).unwrap();
    let bundle = STANDARD.encode(roots["data"]["ca.crt"].as_str().unwrap());
    for webhook in configuration["webhooks"].as_array_mut().unwrap() {
        webhook["clientConfig"]["caBundle"] = bundle.as_str().into();
    }
    mesh.cluster.done(&["replace", "-f", "-"], &configuration.to_string());
    let again = mesh.done("install", &["--no-wait"]);
    assert!(changes(&again).iter().all(|change| *change == "unchanged"), "{again}");
    let text = mesh.cluster.done(&["get", kind, &webhook, "-o", "json"], "");
    assert!(text.contains(&bundle), "{text}");
}

#[test]
fn missing_permissions_are_said_before_any_change() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    let Mesh { cluster, revision } = &mesh;
    cluster.done(&["create", "serviceaccount", "weak"], "");
    let token = cluster.done(&["create", "token", "weak"], "");
    let config = cluster.done(&["config", "view", "--raw", "--minify", "--flatten", "-o", "json"], "");
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["users"][0]["user"] = json!({ "token": token.trim() });
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kubeconfig");
    fs::write(&file, config.to_string()).unwrap();
    let kubeconfig = ["--kubeconfig", file.to_str().unwrap()];
    let error = mesh.refused("install", &kubeconfig);
    for missing in [
        "nothing was changed",
        "create clusterroles.rbac.authorization.k8s.io",
        "patch mutatingwebhookconfigurations.admissionregistration.k8s.io",
        &format!("create deployments.apps in {}", cluster.namespace),
        "cluster-admin",
    ] {
        assert!(error.contains(missing), "{missing}: {error}");
    }
    // It may make roles, but none with permissions that it does not have.
    let rules = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": { "name": revision },
        "rules": [{
            "apiGroups": ["", "apps", "policy", "autoscaling", "rbac.authorization.k8s.io",
                          "admissionregistration.k8s.io", "apiextensions.k8s.io"],
            "resources": KINDS.split(',').chain(["namespaces", "customresourcedefinitions"]).collect::<Vec<_>>(),
            "verbs": ["get", "list", "create", "patch"],
        }],
    });
    cluster.done(&["create", "-f", "-"], &rules.to_string());
    let account = format!("--serviceaccount={}:weak", cluster.namespace);
    let role = format!("--clusterrole={revision}");
    cluster.done(&["create", "clusterrolebinding", revision, &role, &account], "");
    let error = mesh.refused("install", &kubeconfig);
    cluster.done(&["delete", "clusterrolebinding,clusterrole", revision], "");
    assert!(error.contains("nothing was changed") && error.contains("is refused"), "{error}");
    assert!(mesh.objects().is_empty());
}

#[test]
fn another_control_plane_is_not_replaced() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    let Mesh { cluster, revision } = &mesh;
    let service = format!("istiod-{revision}");
    cluster.done(&["create", "service", "clusterip", &service, "--tcp=15012"], "");
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": { "name": revision, "labels": { "app": "sidecar-injector", "istio.io/rev": revision } },
    });
    cluster.done(&["create", "-f", "-"], &webhook.to_string());
    let error = mesh.refused("install", &["--no-wait"]);
    let forced = mesh.run("install", &["--no-wait", "--force", "--dry-run"]);
    cluster.done(&["delete", "mutatingwebhookconfiguration", revision], "");
    let expected = format!("Service {}/{service} exists and is not of Skysail", cluster.namespace);
    assert!(error.contains(&expected) && error.contains("injected by another control plane"), "{error}");
    assert!(mesh.objects().is_empty());
    assert!(forced.status.success(), "{}", String::from_utf8_lossy(&forced.stderr));
    let kept = mesh.done("uninstall", &["--yes"]);
    assert!(kept.contains("no revision"), "{kept}");
    cluster.done(&["get", "service", &service], "");
}

#[test]
fn the_control_plane_passes_the_restricted_standard() {
    let Some(mesh) = Mesh::start(&["pod-security.kubernetes.io/enforce=restricted"]) else { return };
    mesh.done(
        "install",
        &["--no-wait", "--control-image", "registry.example/skysaild:1", "--", "--plain-port=15010"],
    );
    let deployment = format!("skysaild-{}", mesh.revision);
    let deployment = mesh.cluster.done(&["get", "deployment", &deployment, "-o", "json"], "");
    let deployment: Value = serde_json::from_str(&deployment).unwrap();
    let mut pod = deployment["spec"]["template"].clone();
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod["metadata"]["name"] = "copy".into();
    mesh.cluster.done(&["create", "--dry-run=server", "-f", "-"], &pod.to_string());
}

#[test]
fn the_definition_of_a_kind_checks_its_objects() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    mesh.done("install", &["--no-wait", "--validation", "off"]);
    let Cluster { namespace, .. } = &mesh.cluster;
    mesh.cluster.done(&["wait", "--for=condition=Established", "crd/ratelimitpolicies.skysail.io"], "");
    let create = |spec: &str| {
        let text = format!(
            "apiVersion: skysail.io/v1alpha1\nkind: RateLimitPolicy\nmetadata: {{name: web, namespace: {namespace}}}\nspec: {spec}"
        );
        let strict = ["create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-"];
        let output = mesh.cluster.kubectl(&strict, &text);
        let read = serde_json::from_slice::<Value>(&output.stdout);
        read.map_err(|_| String::from_utf8(output.stderr).unwrap())
    };
    let spec = "{selector: {matchLabels: {app: web}}, rules: [{match: {paths: [/a/*], headers: {x: {exact: one}}}, \
        by: [{sourcePrincipal: true}, {header: x-user, key: user}], \
        limit: {requests: 100, unit: MINUTE, burst: 3}, response: {status: 503, headers: {x-limited: \"true\"}}}]}";
    let created = create(spec).unwrap();
    // No field is lost, and none is added.
    let expected: Value = serde_json::from_value(json!({
        "selector": { "matchLabels": { "app": "web" } },
        "rules": [{ "match": { "paths": ["/a/*"], "headers": { "x": { "exact": "one" } } },
                    "by": [{ "sourcePrincipal": true }, { "header": "x-user", "key": "user" }],
                    "limit": { "requests": 100, "unit": "MINUTE", "burst": 3 },
                    "response": { "status": 503, "headers": { "x-limited": "true" } } }],
    }))
    .unwrap();
    assert_eq!(created["spec"], expected);
    for (spec, reason) in [
        ("{rules: [{limit: {requests: 1, unit: WEEK}}]}", "Unsupported value: \"WEEK\""),
        ("{rules: [{limit: {requests: 1}}]}", "either unit or interval"),
        ("{rules: [{name: a}]}", "either limit or global"),
        ("{rules: [{limit: {requests: 1, unit: HOUR}, shadoww: true}]}", "unknown field"),
    ] {
        let error = create(spec).unwrap_err();
        assert!(error.contains(reason), "{spec}: {error}");
    }
}

#[test]
fn kubectl_accepts_the_printed_objects() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    for format in ["yaml", "json"] {
        let text = mesh.done("install", &["--output", format]);
        let apply = ["apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-"];
        mesh.cluster.done(&apply, &text);
    }
}

#[test]
fn a_missing_namespace_is_created() {
    let Some(mesh) = Mesh::start(&[]) else { return };
    let namespace = format!("{}-new", mesh.cluster.namespace);
    let place = ["--namespace", &namespace, "--revision", &mesh.revision];
    let run = |command: &str, options: &[&str]| {
        let output = Command::new(SKYSAIL).arg(command).args(place).args(options).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let tried = run("install", &["--dry-run"]);
    let found = changes(&tried);
    assert_eq!((found[0], &found[2..]), ("created", &["created"; 11][..]), "{tried}");
    assert!(!mesh.cluster.kubectl(&["get", "namespace", &namespace], "").status.success());
    run("install", &["--no-wait"]);
    run("uninstall", &["--yes"]);
    mesh.cluster.done(&["delete", "namespace", &namespace, "--wait=false"], "");
}
