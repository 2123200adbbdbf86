//! Compares the findings with those of istioctl's analyzers, over the inputs of Istio's own tests.
//!
//! `test.sh` copies these inputs, the table of expected messages and the table of codes into the user's cache.

mod tables;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use skysail_model::{Diagnostic, Severity};

use self::tables::{JUDGED, NOT_FOUND, NotFound};
use super::{
    WITHOUT_COUNTERPART, analyze_at, complete,
    go_tests::{self, GoCase},
};

/// Time of the analysis: 2026-08-27, the date of the inputs. Their certificates are valid then, or have expired.
const NOW: i64 = 1_787_788_800;

/// Returns the text of a file of Istio.
fn text_of(file: &str) -> String {
    let path = skysail_testkit::cached(&format!("pilot-agent-eed52ebb66ad/{file}"));
    fs::read_to_string(path).unwrap()
}

/// Returns the code of each type of message.
fn codes() -> BTreeMap<String, String> {
    let table = skysail_yaml::documents(&text_of("messages.yaml")).next().unwrap().root.unwrap().to_json();
    let messages = table["messages"].as_array().unwrap().iter();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    messages.map(|message| (text(&message["name"]), text(&message["code"]))).collect()
}

/// Objects that istioctl adds to every input: the Pod and the Service of the gateway of an installation.
const DEFAULT_OBJECTS: &str = "
apiVersion: v1
kind: Pod
metadata: {name: istio-ingressgateway-dummypod, namespace: istio-system, labels: {istio: ingressgateway}}
spec: {containers: [{name: istio-proxy, image: auto}]}
---
apiVersion: v1
kind: Service
metadata: {name: istio-ingressgateway, namespace: istio-system}
spec:
  selector: {istio: ingressgateway}
  ports:
  - {name: http2, port: 80}
  - {name: https, port: 443}
  - {name: tcp, port: 31400}
  - {name: tls, port: 15443}
";

/// Returns our findings about the input of a case. Mesh configuration and networks are in a ConfigMap, as in a cluster.
fn findings(case: &GoCase) -> Vec<Diagnostic> {
    let mut texts: Vec<(String, String)> =
        case.files.iter().map(|file| (file.clone(), complete::text(&text_of(file)))).collect();
    texts.push(("defaults.yaml".to_owned(), DEFAULT_OBJECTS.to_owned()));
    let mut settings = String::new();
    for (key, file) in [("mesh", &case.mesh_config), ("meshNetworks", &case.mesh_networks)] {
        if !file.is_empty() {
            settings.push_str(&format!("  {key}: {}\n", serde_json::to_string(&text_of(file)).unwrap()));
        }
    }
    if !settings.is_empty() {
        let map =
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata:\n";
        texts.push(("mesh.yaml".to_owned(), format!("{map}{settings}")));
    }
    analyze_at(NOW, &texts)
}

/// Returns the name of an object in one form: Istio's tests leave out the namespace `default`, and capitals.
fn normal(object: &str) -> String {
    object.to_lowercase().replacen(" default/", " ", 1)
}

/// Codes and objects of the messages of a case.
type Messages = BTreeSet<(String, String)>;

/// Returns what istioctl finds in a case, without the codes that have no counterpart.
fn expected(case: &GoCase, codes: &BTreeMap<String, String>) -> Messages {
    let has_counterpart = |code: &str| WITHOUT_COUNTERPART.iter().all(|(of, _)| *of != code);
    let messages =
        case.expected.iter().map(|message| (codes[&message.name].clone(), normal(&message.object)));
    messages.filter(|(code, _)| has_counterpart(code)).collect()
}

/// Returns the table of cases with their findings.
fn cases() -> Vec<(GoCase, Vec<Diagnostic>)> {
    let cases = go_tests::cases(&text_of("analyzers_test.go")).into_iter();
    cases.map(|case| (findings(&case), case)).map(|(findings, case)| (case, findings)).collect()
}

/// Where an analyzer of istioctl finds a mistake, ours finds the same object.
#[test]
fn findings_of_istioctl_are_found() {
    let codes = codes();
    let (mut missing, mut excepted, mut count) = (BTreeSet::new(), BTreeSet::new(), 0);
    let cases = cases();
    for (case, findings) in &cases {
        let found: Messages = findings
            .iter()
            .flat_map(|one| one.code.istio().iter().map(|code| ((*code).to_owned(), normal(&one.object))))
            .collect();
        let expected = expected(case, &codes);
        count += expected.len();
        for (code, object) in expected.difference(&found) {
            let is_it = |of: &&NotFound| (of.file, of.code, of.object) == (case.file(), code, object);
            match NOT_FOUND.iter().find(is_it) {
                Some(known) => _ = excepted.insert((known.file, known.code, known.object)),
                None => _ = missing.insert(format!("{}: {code} {object} ({})", case.file(), case.name)),
            }
        }
    }
    assert!(missing.is_empty(), "not found, and without a reason: {missing:#?}");
    let listed: BTreeSet<_> = NOT_FOUND.iter().map(|of| (of.file, of.code, of.object)).collect();
    assert_eq!(excepted, listed, "each exception is needed");
    assert!(NOT_FOUND.iter().all(|of| !of.reason.is_empty()));
    assert!(cases.len() >= 100 && count >= 150, "{} cases with {count} expected findings", cases.len());
}

/// Errors about objects without a finding of istioctl, and findings with a code of the analyzer that it does not have,
/// are judged one by one.
#[test]
fn other_findings_are_judged() {
    let (codes, cases) = (codes(), cases());
    let mut of_analyzer: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (case, _) in &cases {
        let own = of_analyzer.entry(&case.analyzer).or_default();
        own.extend(expected(case, &codes).into_iter().map(|(code, _)| code));
    }
    let mut others: BTreeMap<(&str, &str), String> = BTreeMap::new();
    for (case, findings) in &cases {
        let expected = expected(case, &codes);
        for one in findings {
            let object = normal(&one.object);
            let has = |code: &str| expected.contains(&(code.to_owned(), object.clone()));
            let mut own = one
                .code
                .istio()
                .iter()
                .filter(|code| of_analyzer[&*case.analyzer].contains(**code))
                .peekable();
            let is_of_analyzer = own.peek().is_some() && !own.any(|code| has(code));
            let is_new = expected.iter().all(|(_, of)| *of != object) && one.severity == Severity::Error;
            if is_of_analyzer || is_new {
                others.insert((case.file(), one.code.id()), one.to_string());
            }
        }
    }
    let judged: BTreeSet<(&str, &str)> = JUDGED.iter().map(|(file, code, _)| (*file, *code)).collect();
    let found: BTreeSet<(&str, &str)> = others.keys().copied().collect();
    let new: Vec<_> = found.difference(&judged).map(|key| (key, &others[key])).collect();
    assert!(new.is_empty(), "findings that istioctl does not have: {new:#?}");
    assert_eq!(judged.difference(&found).collect::<Vec<_>>(), [&("", ""); 0], "no such findings");
    assert!(JUDGED.iter().all(|(.., reason)| !reason.is_empty()));
}
