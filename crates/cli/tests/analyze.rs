//! `skysail analyze` as a program: its exit codes, and its output for scripts.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{fs, path::Path, process::Command};

use serde_json::Value;

const CORRECT: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: b}\n";
/// A deprecated field.
const WARNED: &str = "---\napiVersion: v1\nkind: Service\nmetadata: {name: a}\n\
                      spec: {clusterIP: 10.0.0.1, ports: [{name: http, port: 80}]}\n---\n\
                      apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: a}\n\
                      spec: {hosts: [a], http: [{fault: {delay: {fixedDelay: 1s, percent: 10}}, \
                      route: [{destination: {host: a}}]}]}\n";
const WRONG: &str = "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: b}\n\
                     spec: {hosts: [b], http: [{timeout: soon, route: [{destination: {host: b}}]}]}\n";

/// Returns the exit code and the output of an analysis.
fn analyze(folder: &Path, options: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skysail"));
    let output = command.arg("analyze").arg(folder).args(options).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_exit_code_depends_on_the_severity_of_the_findings() {
    let folder = tempfile::tempdir().unwrap();
    let put = |text: &str| fs::write(folder.path().join("a.yaml"), text).unwrap();
    let codes = |text: &str| {
        put(text);
        let of = |severity| analyze(folder.path(), &["--fail-on", severity]).0;
        [of("error"), of("warning")].map(Option::unwrap)
    };
    assert_eq!(codes(CORRECT), [0, 0]);
    assert_eq!(codes(&[CORRECT, WARNED].concat()), [0, 1]);
    assert_eq!(codes(&[CORRECT, WRONG].concat()), [1, 1]);
    assert_eq!(analyze(&folder.path().join("absent"), &[]).0, Some(2));
    assert_eq!(analyze(folder.path(), &["--fail-on", "never"]).0, Some(2));
}

#[test]
fn scripts_read_json_and_sarif() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.yaml"), [CORRECT, WRONG].concat()).unwrap();
    let read = |form: &str| -> Value {
        let (code, text) = analyze(folder.path(), &["--output", form]);
        assert_eq!(code, Some(1));
        serde_json::from_str(&text).unwrap()
    };
    let json = read("json");
    assert_eq!((&json["failed"], &json["errors"]), (&true.into(), &1.into()), "{json:#}");
    let finding = &json["findings"][0];
    let expected = [
        ("severity", "error"),
        ("code", "SKY0010"),
        ("object", "VirtualService default/b"),
        ("field", "spec.http[0].timeout"),
    ];
    for (name, value) in expected {
        assert_eq!(finding[name], value, "{finding:#}");
    }
    assert_eq!(finding["line"], 9, "{finding:#}");
    let sarif = read("sarif");
    let result = &sarif["runs"][0]["results"][0];
    assert_eq!((&sarif["version"], &result["ruleId"]), (&"2.1.0".into(), &"SKY0010".into()), "{sarif:#}");
    let region = &result["locations"][0]["physicalLocation"]["region"];
    assert_eq!(region["startLine"], 9, "{sarif:#}");
}
