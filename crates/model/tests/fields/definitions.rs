//! Every field of the definitions of Istio and of Gateway API has a line.

use std::collections::BTreeSet;

use serde_json::Value;
use skysail_model::fields::{KindFields, Support, kinds};

use crate::protos::Messages;

/// Fields without a line of their own: filters that the line of their type refuses, and older spellings of fields.
const WITHOUT_LINE: [(&str, &str); 4] = [
    ("HTTPRoute", "rules.filters.externalAuth."),
    ("HTTPRoute", "rules.backendRefs.filters.externalAuth."),
    ("RequestAuthentication", "jwtRules.jwks_uri"),
    ("VirtualService", "http.mirror_percent"),
];

/// Finds the paths of the fields that hold no other fields.
fn leaves(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    let fields = |schema: &Value| schema["properties"].as_object().cloned().unwrap_or_default();
    if let Some(item) = schema.get("items") {
        leaves(item, path, found);
    } else if !fields(schema).is_empty() {
        for (name, field) in &fields(schema) {
            leaves(field, &below(name), found);
        }
    } else if !fields(&schema["additionalProperties"]).is_empty() {
        leaves(&schema["additionalProperties"], &below("*"), found);
    } else {
        found.insert(path.to_owned());
    }
}

/// Whether a line concerns the field, a field above it as a whole, or fields below it.
fn has_line(kind: &KindFields, path: &str) -> bool {
    let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
    let above = ends.rev().find_map(|end| {
        let line = kind.fields.iter().find(|line| line.value.is_none() && line.path == &path[..end])?;
        Some((line, path[end..].trim_start_matches('.')))
    });
    match above {
        Some((line, rest)) => match line.support {
            _ if rest.is_empty() => true,
            Support::As(other) => has_line(kind, &format!("{other}.{rest}")),
            support => matches!(support, Support::Warned | Support::Refused | Support::Unread),
        },
        None => kind
            .fields
            .iter()
            .any(|line| line.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.'))),
    }
}

/// Name of the table of a kind. None for kinds that the mesh warns about as a whole.
fn table(group: &str, kind: &str) -> Option<&'static KindFields> {
    let name = if group.ends_with("k8s.io") && kind == "Gateway" { "Gateway of Gateway API" } else { kind };
    kinds().iter().find(|table| table.name == name)
}

#[test]
fn every_field_of_the_definitions_has_a_line() {
    let (mut missing, mut compared, mut without) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for file in ["crd-all.gen.yaml", "gateway-api-crd.yaml"] {
        let file = skysail_testkit::cached(&format!("pilot-agent-eed52ebb66ad/{file}"));
        let text = std::fs::read_to_string(file).unwrap();
        for document in skysail_yaml::documents(&text) {
            let definition = document.root.unwrap().to_json();
            let (group, kind) = (&definition["spec"]["group"], &definition["spec"]["names"]["kind"]);
            let (Some(group), Some(kind)) = (group.as_str(), kind.as_str()) else { continue };
            let Some(table) = table(group, kind) else { continue };
            compared.insert(table.name);
            for version in definition["spec"]["versions"].as_array().unwrap() {
                let mut fields = BTreeSet::new();
                leaves(&version["schema"]["openAPIV3Schema"]["properties"]["spec"], "", &mut fields);
                for path in fields.iter().filter(|path| !has_line(table, path)) {
                    let is_it =
                        |(kind, start): &&(&str, &str)| *kind == table.name && path.starts_with(start);
                    match WITHOUT_LINE.iter().find(is_it) {
                        Some(known) => _ = without.insert(*known),
                        None => _ = missing.insert(format!("{}.txt: {path}", table.name)),
                    }
                }
            }
        }
    }
    assert_eq!(compared.len(), 24, "{compared:?}");
    assert_eq!(without, WITHOUT_LINE.into());
    assert!(
        missing.is_empty(),
        "add lines to crates/model/fields, with support, note and tests: {missing:#?}"
    );
}

/// Returns the messages of proto files of Istio's API.
fn messages<const N: usize>(files: [&str; N]) -> Messages {
    let texts = files.map(|file| {
        let file = skysail_testkit::cached(&format!("pilot-agent-eed52ebb66ad/{file}"));
        std::fs::read_to_string(file).unwrap()
    });
    Messages::parse(&texts)
}

/// The mesh configuration has no definition of a kind; its fields, and those of `defaultConfig`, are those of protos.
#[test]
fn every_setting_of_the_mesh_has_a_line() {
    let messages = messages([
        "config.proto",
        "proxy.proto",
        "destination_rule.proto",
        "virtual_service.proto",
        "workload_group.proto",
        "proxy_config.proto",
    ]);
    let fields = messages.leaves("istio.mesh.v1alpha1.MeshConfig");
    for known in
        ["trustDomain", "meshMTLS.minProtocolVersion", "defaultConfig.tracing.customTags.*.header.name"]
    {
        assert!(fields.contains(known), "{known}: {fields:#?}");
    }
    let table = kinds().iter().find(|table| table.name == "MeshConfig").unwrap();
    let missing: Vec<&String> = fields.iter().filter(|path| !has_line(table, path)).collect();
    assert!(
        missing.is_empty(),
        "add lines to crates/model/fields/MeshConfig.txt, with support, note and tests: {missing:#?}"
    );
}

/// The networks of the mesh have no definition of a kind either.
#[test]
fn every_setting_of_the_networks_has_a_line() {
    let fields = messages(["network.proto"]).leaves("istio.mesh.v1alpha1.MeshNetworks");
    assert!(fields.contains("networks.*.gateways.registryServiceName"), "{fields:#?}");
    let table = kinds().iter().find(|table| table.name == "MeshNetworks").unwrap();
    let missing: Vec<&String> = fields.iter().filter(|path| !has_line(table, path)).collect();
    assert!(
        missing.is_empty(),
        "add lines to crates/model/fields/MeshNetworks.txt, with support, note and tests: {missing:#?}"
    );
}
