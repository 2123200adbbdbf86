//! Writes `src/parse/kubernetes.txt` from the OpenAPI v3 documents of an API server:
//!
//! ```text
//! kubectl get --raw /openapi/v3/api/v1 > core.json      # and apis/apps/v1, apis/batch/v1, apis/discovery.k8s.io/v1
//! cargo run -p skysail-model --example kubernetes_schema -- 1.34 core.json apps.json batch.json discovery.json
//! ```

use std::{collections::BTreeMap, error::Error, fs};

use serde_json::{Map, Value};

/// Kinds that the mesh reads.
const ROOTS: [&str; 14] = [
    "io.k8s.api.core.v1.ConfigMap",
    "io.k8s.api.core.v1.Namespace",
    "io.k8s.api.core.v1.Node",
    "io.k8s.api.core.v1.Pod",
    "io.k8s.api.core.v1.Secret",
    "io.k8s.api.core.v1.Service",
    "io.k8s.api.core.v1.ServiceAccount",
    "io.k8s.api.apps.v1.DaemonSet",
    "io.k8s.api.apps.v1.Deployment",
    "io.k8s.api.apps.v1.ReplicaSet",
    "io.k8s.api.apps.v1.StatefulSet",
    "io.k8s.api.batch.v1.CronJob",
    "io.k8s.api.batch.v1.Job",
    "io.k8s.api.discovery.v1.EndpointSlice",
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let version = arguments.next().unwrap_or_default();
    let mut schemas = Map::new();
    for file in arguments {
        let document: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
        schemas.extend(document["components"]["schemas"].as_object().cloned().unwrap_or_default());
    }
    let mut types = BTreeMap::new();
    for root in ROOTS {
        describe(root, &schemas, &mut types);
    }
    println!("# The types of Kubernetes {version} that the mesh reads, by examples/kubernetes_schema.rs.");
    println!("# A type, and its fields indented; `!` marks one that the API server requires.");
    for (name, fields) in types {
        println!("{name}\n{fields}");
    }
    Ok(())
}

/// Required lists that the API server writes as `null` if they are empty.
const NULLABLE: [(&str, &str); 1] = [("EndpointSlice", "endpoints")];

/// Adds a type and all types to which its fields refer.
fn describe(full: &str, schemas: &Map<String, Value>, types: &mut BTreeMap<String, String>) {
    let name = short(full);
    if types.contains_key(&name) {
        return;
    }
    types.insert(name.clone(), String::new());
    let schema = &schemas[full];
    let required: Vec<_> = schema["required"].as_array().into_iter().flatten().collect();
    let mut lines = Vec::new();
    for (field, property) in schema["properties"].as_object().into_iter().flatten() {
        let is_written_as_null = NULLABLE.contains(&(name.as_str(), field.as_str()));
        let mark = if required.iter().any(|name| *name == field) && !is_written_as_null { "!" } else { "" };
        lines.push(format!("  {field}{mark} {}", type_of(property, schemas, types)));
    }
    types.insert(name, lines.join("\n"));
}

fn type_of(property: &Value, schemas: &Map<String, Value>, types: &mut BTreeMap<String, String>) -> String {
    let reference = property["allOf"][0]["$ref"].as_str().or(property["$ref"].as_str());
    if let Some(reference) = reference {
        let full = reference.trim_start_matches("#/components/schemas/");
        return match short(full).as_str() {
            "IntOrString" => "int-or-text".to_owned(),
            "Quantity" => "quantity".to_owned(),
            "Time" | "MicroTime" => "time".to_owned(),
            "FieldsV1" => "any".to_owned(),
            name => {
                describe(full, schemas, types);
                name.to_owned()
            }
        };
    }
    match property["type"].as_str() {
        Some("array") => format!("[{}]", type_of(&property["items"], schemas, types)),
        Some("object") if property.get("additionalProperties").is_some() => {
            format!("{{{}}}", type_of(&property["additionalProperties"], schemas, types))
        }
        Some("integer") => "int".to_owned(),
        Some("number") => "number".to_owned(),
        Some("boolean") => "bool".to_owned(),
        Some("string") => match property["enum"].as_array() {
            Some(words) => {
                format!("={}", words.iter().filter_map(Value::as_str).collect::<Vec<_>>().join("|"))
            }
            None => "text".to_owned(),
        },
        _ => "any".to_owned(),
    }
}

/// Returns the name without its package.
fn short(full: &str) -> String {
    full.rsplit('.').next().unwrap_or(full).to_owned()
}
