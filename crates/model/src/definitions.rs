//! Definitions (CRDs) of Skysail's own kinds, from their types: names, types and descriptions of the fields.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::{Value, json};

use crate::api::{Kind, RateLimitPolicy};

/// Keywords that a structural schema does not need. With `default`, the API server would write the fields that a user omits.
const DROPPED: [&str; 4] = ["default", "format", "nullable", "title"];

/// Returns the CustomResourceDefinitions of Skysail's own kinds.
pub fn definitions() -> Vec<Value> {
    vec![definition::<RateLimitPolicy>(Kind::RateLimitPolicy, "ratelimitpolicies", rate_limit_rules)]
}

/// Returns the definition of a kind. `complete` adds to the schema of its `spec` what the types do not say.
fn definition<T: JsonSchema>(kind: Kind, plural: &str, complete: fn(&mut Value)) -> Value {
    let (group, name) = (kind.group(), kind.as_str());
    let settings = SchemaSettings::openapi3().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    let mut spec = settings.into_generator().into_root_schema_for::<T>().to_value();
    clean(&mut spec);
    complete(&mut spec);
    // Conditions that programs write; no type describes them.
    let status = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let schema =
        json!({ "type": "object", "required": ["spec"], "properties": { "spec": spec, "status": status } });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group,
            "names": { "kind": name, "listKind": format!("{name}List"), "plural": plural,
                       "singular": name.to_lowercase(), "categories": ["skysail"] },
            "scope": "Namespaced",
            "versions": [{
                "name": "v1alpha1",
                "served": true,
                "storage": true,
                "schema": { "openAPIV3Schema": schema },
                "subresources": { "status": {} },
                "additionalPrinterColumns": [
                    { "name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp" },
                ],
            }],
        },
    })
}

/// Removes [`DROPPED`] from a schema and those below it.
fn clean(schema: &mut Value) {
    let Some(fields) = schema.as_object_mut() else { return };
    DROPPED.iter().for_each(|keyword| _ = fields.remove(*keyword));
    if let Some(Value::Object(properties)) = fields.get_mut("properties") {
        properties.values_mut().for_each(clean);
    }
    for keyword in ["items", "additionalProperties"] {
        fields.get_mut(keyword).into_iter().for_each(clean);
    }
}

/// Adds the rules of RateLimitPolicies about fields that exclude each other, in CEL. The webhook for validation has more, but
/// a cluster may not have it.
fn rate_limit_rules(spec: &mut Value) {
    let rule = |expression: &str, message: &str| json!([{ "rule": expression, "message": message }]);
    let rules = &mut spec["properties"]["rules"]["items"];
    rules["x-kubernetes-validations"] =
        rule("has(self.limit) != has(self.global)", "a rule has either limit or global");
    rules["properties"]["limit"]["x-kubernetes-validations"] =
        rule("has(self.unit) != has(self.interval)", "a limit has either unit or interval");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::fields;

    /// Adds the paths of the fields that have no fields below them, as the table of fields writes them.
    fn paths(schema: &Value, path: &str, all: &mut BTreeSet<String>) {
        let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        let properties = schema["properties"].as_object().filter(|properties| !properties.is_empty());
        if let Some(properties) = properties {
            properties.iter().for_each(|(name, schema)| paths(schema, &below(name), all));
        } else if schema["items"].is_object() {
            paths(&schema["items"], path, all);
        } else if schema["additionalProperties"]["properties"].is_object() {
            paths(&schema["additionalProperties"], &below("*"), all);
        } else {
            assert!(schema["type"].is_string(), "{path}: {schema:#}");
            all.insert(path.to_owned());
        }
    }

    #[test]
    fn a_definition_has_the_fields_of_the_table() {
        let definition = &definitions()[0];
        assert_eq!(definition["metadata"]["name"], "ratelimitpolicies.skysail.io");
        let spec = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        let mut found = BTreeSet::new();
        paths(spec, "", &mut found);
        let table = fields::kinds().iter().find(|of| of.kind == Kind::RateLimitPolicy).unwrap();
        let mut wanted = BTreeSet::new();
        for row in &table.fields {
            match row.support {
                fields::Support::As(_) => {
                    let texts = ["exact", "prefix", "regex"];
                    wanted.extend(texts.map(|text| format!("{}.{text}", row.path)));
                }
                _ => _ = wanted.insert(row.path.to_owned()),
            }
        }
        assert_eq!(found, wanted);
    }

    #[test]
    fn a_schema_is_structural() {
        fn check(schema: &Value, path: &str) {
            let fields = schema.as_object().unwrap();
            assert!(fields.contains_key("type"), "{path} has no type: {schema:#}");
            for keyword in ["$ref", "anyOf", "oneOf", "allOf", "not", "default", "nullable", "const"] {
                assert!(!fields.contains_key(keyword), "{path} has {keyword}: {schema:#}");
            }
            let properties = fields.get("properties").and_then(Value::as_object);
            properties
                .into_iter()
                .flatten()
                .for_each(|(name, schema)| check(schema, &format!("{path}.{name}")));
            for keyword in ["items", "additionalProperties"] {
                fields
                    .get(keyword)
                    .into_iter()
                    .for_each(|schema| check(schema, &format!("{path}.{keyword}")));
            }
        }
        for definition in definitions() {
            check(&definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"], "");
        }
    }
}
