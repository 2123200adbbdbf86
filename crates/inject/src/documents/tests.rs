use serde_json::json;

use super::*;

fn settings() -> Settings {
    Settings::new("registry.example/skysail-proxy:1")
}

fn inject(text: &str) -> Result<InjectedText, DocumentError> {
    inject_text(text, "", &namespaces_in(text)?, &settings())
}

fn injected(text: &str) -> InjectedText {
    inject(text).unwrap_or_default()
}

fn objects(text: &str) -> Vec<Value> {
    skysail_yaml::documents(text).filter_map(|document| Some(document.root.ok()?.to_json())).collect()
}

const POD: &str = "metadata: {labels: {app: a}}\nspec: {containers: [{name: web, image: x}]}";

/// Returns an object of a kind with a pod at a path.
fn workload(kind: &str, path: &[&str]) -> Value {
    let pod = objects(POD).remove(0);
    let mut object = path.iter().rev().fold(pod, |inner, key| json!({ *key: inner }));
    object["apiVersion"] = "v1".into();
    object["kind"] = kind.into();
    object["metadata"]["name"] = "web".into();
    object
}

#[test]
fn every_kind_of_workload_gets_a_sidecar() {
    for (kind, path) in TEMPLATES {
        let result = injected(&workload(kind, path).to_string());
        assert_eq!((result.injected, result.messages), (1, Vec::new()), "{kind}");
        let object = objects(&result.text).remove(0);
        let pod = path.iter().fold(&object, |object, key| &object[*key]);
        assert_eq!(pod["spec"]["initContainers"][1]["name"], "istio-proxy", "{kind}");
        assert_eq!(object["kind"], *kind);
    }
}

#[test]
fn lists_are_injected_item_by_item() {
    let items = [workload("Deployment", &["spec", "template"]), json!({ "kind": "ConfigMap" })];
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items });
    let result = objects(&injected(&list.to_string()).text).remove(0);
    assert_eq!(result["items"][0]["spec"]["template"]["spec"]["initContainers"][1]["name"], "istio-proxy");
    assert_eq!(result["items"][1], json!({ "kind": "ConfigMap" }));
}

#[test]
fn other_documents_keep_their_text_and_their_place() {
    let (first, last) = ("# a comment\nkind: ConfigMap\ndata: {a: 'yes'} # b\n", "kind:  Service\n");
    let text = format!("---\n{first}--- \n{}\n---\n{last}", workload("Pod", &[]));
    let result = injected(&text).text;
    assert!(result.starts_with(&format!("---\n{first}--- \napiVersion: v1\n")), "{result}");
    assert!(result.ends_with(&format!("---\n{last}")), "{result}");
    assert_eq!(objects(&result).len(), 3);
    assert_eq!(injected(first).text, first);
}

#[test]
fn injecting_twice_equals_injecting_once() {
    let files = ["demo.yaml", "ordinary.yaml"];
    for file in files {
        let once = injected(&golden(file));
        let twice = injected(&once.text);
        assert_eq!(twice.text, once.text, "{file}");
        assert!(once.injected > 0 && twice.injected == 0, "{file}");
    }
}

#[test]
fn errors_name_the_line() {
    let error = |text: &str| inject(text).err().map(|error| error.to_string());
    let bad = "kind: A\n---\nkind: Pod\napiVersion: v1\nmetadata:\n  name: web\n  annotations: \
               {status.sidecar.istio.io/port: x}\nspec: {containers: []}\n";
    let expected = "3: Pod web: annotation status.sidecar.istio.io/port: \"x\" is not a port";
    assert_eq!(error(bad).as_deref(), Some(expected));
    assert!(
        error("a: 1\n---\na: [\n").is_some_and(|text| text.starts_with("4: ") || text.starts_with("3: "))
    );
    assert!(error("kind: A\n---\na: 1\na: 2\n").is_some_and(|text| text.starts_with("4: a is repeated")));
    let missing = "kind: Job\napiVersion: batch/v1\nmetadata: {name: j}\n";
    assert_eq!(error(missing).as_deref(), Some("1: Job j: spec.template is missing"));
}

#[test]
fn labels_of_a_namespace_in_the_text_decide() {
    let pod = workload("Pod", &[]);
    let namespace = |labels: &str| {
        format!(
            "kind: Namespace\napiVersion: v1\nmetadata: {{name: default, labels: {labels}}}\n---\n{pod}\n"
        )
    };
    assert_eq!(injected(&namespace("{istio-injection: enabled}")).injected, 1);
    let result = injected(&namespace("{istio-injection: disabled}"));
    assert_eq!(result.injected, 0);
    assert_eq!(
        result.messages,
        ["5: Pod web: gets no sidecar: istio-injection of its namespace is disabled"]
    );
}

/// Reads an input of the golden files.
fn golden(file: &str) -> String {
    let path = format!("{}/tests/golden/{file}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| format!("{path}: {error}"))
}

#[test]
fn namespaces_of_other_texts_decide() {
    let pod = format!("kind: Pod\napiVersion: v1\n{POD}").replace("{labels", "{name: p, labels");
    let namespace = "kind: Namespace\nmetadata: {name: default, labels: {istio-injection: disabled}}\n";
    let other = namespaces_in(namespace).unwrap_or_default();
    let of = |namespaces| inject_text(&pod, "", namespaces, &settings()).unwrap_or_default().text;
    assert_eq!(of(&other), pod);
    assert_ne!(of(&Namespaces::new()), pod);
}
