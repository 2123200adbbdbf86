//! A field that the table marks gives a finding when it is set.

use serde_json::{Map, Value, json};
use skysail_model::{
    Code, Severity,
    api::Kind,
    fields::{FieldRow, KindFields, Support, kinds},
    parse,
};

use crate::{
    kinds::traced,
    trace::{Holds, Traced},
};

#[test]
fn a_marked_field_gives_a_finding() {
    let mut silent = Vec::new();
    let mut count = 0;
    for kind in kinds() {
        let types = traced(kind.name);
        for field in kind.fields.iter().filter(|field| field.is_reported()) {
            count += 1;
            let text = object(kind, &spec(&types, field));
            let found = parse(&text, "sample").diagnostics;
            let is_it = |at: &str, code: Code, severity: Severity| {
                let at = without_positions(at);
                let starts = ["spec.", "data.mesh.", "data.meshNetworks."];
                let at = starts.iter().find_map(|start| at.strip_prefix(start)).unwrap_or(&at);
                let right = match field.support {
                    Support::Refused => severity == Severity::Error,
                    Support::Deprecated => code == Code::Deprecated,
                    _ => severity == Severity::Warning,
                };
                let path = field.path.replace('*', "key");
                let here =
                    at.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
                right && (here || code == Code::UnsupportedKind)
            };
            if !found.iter().any(|found| is_it(&found.field, found.code, found.severity)) {
                let found: Vec<String> = found.iter().map(ToString::to_string).collect();
                silent.push(format!("{} {}: {text}: {found:#?}", kind.name, field.path));
            }
        }
    }
    assert!(count > 50, "{count}");
    assert!(silent.is_empty(), "{}", silent.join("\n"));
}

/// Returns the path without `[0]`.
fn without_positions(path: &str) -> String {
    path.split('[').map(|part| part.split_once(']').map_or(part, |(_, rest)| rest)).collect()
}

/// Returns a specification in which only this field is set, or the first field below it.
fn spec(types: &[Traced], field: &FieldRow) -> Value {
    let below =
        |known: &&Traced| known.path.strip_prefix(field.path).is_some_and(|rest| rest.starts_with('.'));
    let has_value = |known: &&Traced| matches!(known.holds, Holds::Value(_) | Holds::Word(_));
    let own = types.iter().find(|known| known.path == field.path && has_value(known));
    let own = own.or_else(|| types.iter().find(|known| below(known) && has_value(known)));
    // A field whose type another path has already: without fields of its own it is set too.
    let own =
        own.or_else(|| types.iter().find(|known| below(known) && matches!(known.holds, Holds::Same(_))));
    let value = match (field.value, own.map(|known| &known.holds)) {
        (Some(value), _) => json!(value),
        (None, Some(Holds::Value(value))) => value.clone(),
        (None, Some(Holds::Word(words))) => json!(words.last()),
        (None, Some(Holds::Same(_))) => json!({}),
        _ => json!({"key": "a"}),
    };
    let path = own.map_or(field.path, |known| known.path.as_str());
    let segments: Vec<&str> = path.split('.').collect();
    let is_list = |depth: usize| {
        let path = segments[..depth].join(".");
        types.iter().find(|known| known.path == path).is_some_and(|known| known.lists.last() == Some(&true))
    };
    let listed = |depth: usize, value: Value| if is_list(depth) { json!([value]) } else { value };
    segments.iter().enumerate().rev().fold(value, |value, (index, key)| {
        let key = if *key == "*" { "key" } else { key };
        Value::Object(Map::from_iter([(key.to_owned(), listed(index + 1, value))]))
    })
}

/// Returns an object of a kind as JSON.
fn object(kind: &KindFields, spec: &Value) -> String {
    let of = kind.kind;
    if of == Kind::ConfigMap {
        let metadata = json!({"name": "istio", "namespace": "istio-system"});
        let key = if kind.name == "MeshNetworks" { "meshNetworks" } else { "mesh" };
        return json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {key: spec.to_string()}})
            .to_string();
    }
    let version = match of.group() {
        "" => "v1".to_owned(),
        group @ ("skysail.io" | "extensions.istio.io") => format!("{group}/v1alpha1"),
        group => format!("{group}/v1"),
    };
    json!({"apiVersion": version, "kind": of.as_str(), "metadata": {"name": "a", "namespace": "b"}, "spec": spec}).to_string()
}
