//! SARIF 2.1.0, the format of code scanning (OASIS standard). Names of properties are those of the standard.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use skysail_model::{Code, Diagnostic, Severity};

/// Schema of the format.
const SCHEMA: &str = "https://json.schemastore.org/sarif-2.1.0.json";
/// Page with the meanings of the codes.
const PAGE: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/docs/analysis.md");

/// Returns a log with one run. It lists the rules that have a result.
pub(super) fn log(findings: &[Diagnostic]) -> Value {
    let codes: BTreeSet<Code> = findings.iter().map(|finding| finding.code).collect();
    let codes: Vec<Code> = codes.into_iter().collect();
    let results: Vec<Value> = findings.iter().map(|finding| result(finding, &codes)).collect();
    json!({
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "skysail analyze",
                "version": env!("CARGO_PKG_VERSION"),
                "informationUri": PAGE,
                "rules": codes.iter().map(|code| rule(*code)).collect::<Vec<_>>(),
            } },
            "columnKind": "unicodeCodePoints",
            "results": results,
        }],
    })
}

fn rule(code: Code) -> Value {
    let help = super::section(code);
    json!({
        "id": code.id(),
        "name": code.name(),
        "shortDescription": { "text": code.meaning() },
        "fullDescription": { "text": format!("{} {}", code.meaning(), code.fix()) },
        "help": { "text": format!("{} {}", code.meaning(), code.fix()), "markdown": help },
        "helpUri": format!("{PAGE}#{}-{}", code.id().to_lowercase(), code.name().to_lowercase()),
        "defaultConfiguration": { "level": level(code.severity()) },
        "properties": { "tags": code.istio(), "problem.severity": severity(code.severity()) },
    })
}

fn result(finding: &Diagnostic, codes: &[Code]) -> Value {
    let Diagnostic { file, line, object, field, message, remedy, code, .. } = finding;
    let about: Vec<&str> =
        [object, field].into_iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    let mut text = about.iter().map(|part| format!("{part}: ")).collect::<String>();
    text.push_str(message);
    if !remedy.is_empty() {
        text = format!("{text}; {remedy}");
    }
    let mut location = json!({
        "physicalLocation": {
            "artifactLocation": { "uri": uri(file) },
            "region": { "startLine": (*line).max(1) },
        },
    });
    if !object.is_empty() {
        location["logicalLocations"] = json!([{ "fullyQualifiedName": about.join(" "), "kind": "object" }]);
    }
    json!({
        "ruleId": code.id(),
        "ruleIndex": codes.binary_search(code).unwrap_or_default(),
        "level": level(finding.severity),
        "message": { "text": text },
        "locations": [location],
        // It has no line number, so a finding keeps it when lines are added above.
        "partialFingerprints": { "finding/v1": format!("{code} {object} {field}") },
    })
}

fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Info => "note",
    }
}

/// Returns the severity in the words of code scanning.
fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Info => "recommendation",
    }
}

/// Returns a file as a URI reference: relative, or `file://` for an absolute path. Standard input is `stdin`.
fn uri(file: &str) -> String {
    if file == "-" {
        return "stdin".to_owned();
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte);
    let mut uri = if file.starts_with('/') { "file://".to_owned() } else { String::new() };
    for byte in file.bytes() {
        if plain(byte) { uri.push(byte.into()) } else { uri.push_str(&format!("%{byte:02X}")) }
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_refer_to_their_rules_and_lines() {
        let mut one =
            Diagnostic::new(Code::UnknownHost, "a b/c.yaml", 7, "there is no service x").remedy("add it");
        one.object = "VirtualService n/v".to_owned();
        let other = Diagnostic::new(Code::NotYaml, "-", 0, "broken");
        let log = log(&[one, other]);
        let run = &log["runs"][0];
        let rules = &run["tool"]["driver"]["rules"];
        for (index, level, uri, line) in [(0, "error", "a%20b/c.yaml", 7), (1, "error", "stdin", 1)] {
            let result = &run["results"][index];
            let at = usize::try_from(result["ruleIndex"].as_u64().unwrap()).unwrap();
            assert_eq!(rules[at]["id"], result["ruleId"]);
            assert_eq!(result["level"], level);
            let place = &result["locations"][0]["physicalLocation"];
            assert_eq!(place["artifactLocation"]["uri"], uri);
            assert_eq!(place["region"]["startLine"], line);
        }
        assert!(rules[0]["help"]["markdown"].as_str().is_some_and(|text| !text.is_empty()));
        assert_eq!(run["results"][0]["message"]["text"], "VirtualService n/v: there is no service x; add it");
        assert_eq!(super::uri("/a/ä"), "file:///a/%C3%A4");
    }
}
