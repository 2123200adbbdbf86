//! Comparison of the status of objects of Gateway API with what a real istiod wrote.

use std::{collections::BTreeMap, fs, path::PathBuf};

use serde_json::Value;
use skysail_model::{
    World,
    world::{GatewayApiStatus, StatusCondition},
};

/// Conditions of an object: each with its place, and the words of status, reason and message.
type Conditions = BTreeMap<String, String>;

#[test]
fn the_status_is_what_istiod_writes() {
    for (scenario, files) in [
        ("k-gateway-api", &["status-after.yaml"][..]),
        ("k2-gamma", &["status-after.yaml"]),
        ("k3-gamma-features", &["status-after.yaml"]),
        (
            "z-gatewayapi-kinds",
            &[
                "status/gateways.yaml",
                "status/listenersets.yaml",
                "status/httproutes.yaml",
                "status/grpcroutes.yaml",
                "status/tlsroutes.yaml",
                "status/tcproutes.yaml",
                "status/backendtlspolicies.yaml",
            ],
        ),
    ] {
        let world = super::world(scenario);
        let made: BTreeMap<String, Conditions> = world.gateway_api_status().iter().map(made).collect();
        for file in files {
            for item in items(&super::data().join(scenario).join(file)) {
                let (name, expected) = recorded(&item);
                assert_eq!(made.get(&name), Some(&expected), "{scenario} {name}");
            }
        }
    }
}

/// Classes of other controllers have no status here: istiod's `istio-remote` is for gateways that it does not configure.
#[test]
fn the_status_of_classes_is_what_istiod_writes() {
    let recorded_file = super::data().join("z-gatewayapi-kinds/status/gatewayclasses.yaml");
    let mut world = World::new();
    let classes = items(&recorded_file);
    for item in &classes {
        let object = serde_json::json!({
            "apiVersion": item["apiVersion"],
            "kind": item["kind"],
            "metadata": {"name": item["metadata"]["name"]},
            "spec": item["spec"],
        });
        let parsed = skysail_model::parse(&object.to_string(), "classes.yaml");
        assert_eq!(parsed.objects.len(), 1, "{:?}", parsed.diagnostics);
        for (object, origin) in parsed.objects {
            world.apply(object, origin);
        }
    }
    let made: BTreeMap<String, Conditions> = world.gateway_api_status().iter().map(made).collect();
    assert_eq!(made.len(), 1, "{made:?}");
    let (_, expected) = classes.iter().map(recorded).find(|(name, _)| name.ends_with("/istio")).unwrap();
    assert_eq!(made.into_values().next(), Some(expected));
}

fn items(file: &PathBuf) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    let documents = skysail_yaml::documents(&text).filter_map(|document| document.root.ok());
    documents.flat_map(|node| node.to_json()["items"].as_array().cloned().unwrap_or_default()).collect()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

fn parent_name(namespace: &str, kind: &str, name: &str, section: &str, port: u64) -> String {
    format!("{kind} {namespace}/{name} {section} {port}")
}

fn recorded(item: &Value) -> (String, Conditions) {
    let meta = &item["metadata"];
    let name = format!("{} {}/{}", text(item, "kind"), text(meta, "namespace"), text(meta, "name"));
    let mut found = Conditions::new();
    let status = &item["status"];
    let mut add = |place: &str, conditions: &Value| {
        for condition in conditions.as_array().into_iter().flatten() {
            let reason = text(condition, "reason");
            let mut words = format!("{} {reason}", text(condition, "status"));
            // Services and ports of a programmed Gateway are those of a cluster.
            if reason != "Programmed" {
                words += &format!(" {}", text(condition, "message"));
            }
            found.insert(format!("{place}{}", text(condition, "type")), words);
        }
    };
    add("", &status["conditions"]);
    for listener in status["listeners"].as_array().into_iter().flatten() {
        add(&format!("listener {} ", text(listener, "name")), &listener["conditions"]);
    }
    let ancestors = status["ancestors"].as_array().into_iter().flatten();
    for parent in status["parents"].as_array().into_iter().flatten().chain(ancestors) {
        let of = if parent["parentRef"].is_null() { &parent["ancestorRef"] } else { &parent["parentRef"] };
        let port = of["port"].as_u64().unwrap_or_default();
        let name = parent_name(
            text(of, "namespace"),
            text(of, "kind"),
            text(of, "name"),
            text(of, "sectionName"),
            port,
        );
        add(&format!("parent {name} "), &parent["conditions"]);
    }
    for listener in status["listeners"].as_array().into_iter().flatten() {
        let kinds = listener["supportedKinds"].as_array().into_iter().flatten();
        let kinds: Vec<&str> = kinds.map(|kind| text(kind, "kind")).collect();
        let words = format!("{} {}", listener["attachedRoutes"], kinds.join(" "));
        found.insert(format!("listener {}", text(listener, "name")), words);
    }
    if let Some(count) = status["attachedListenerSets"].as_u64() {
        found.insert("attachedListenerSets".into(), count.to_string());
    }
    (name, found)
}

fn made(of: &GatewayApiStatus) -> (String, Conditions) {
    let mut found = Conditions::new();
    let mut add = |place: &str, conditions: &[StatusCondition]| {
        for condition in conditions {
            let status = if condition.status { "True" } else { "False" };
            let mut words = format!("{status} {}", condition.reason);
            if condition.reason != "Programmed" {
                words += &format!(" {}", condition.message);
            }
            found.insert(format!("{place}{}", condition.kind), words);
        }
    };
    add("", &of.conditions);
    for listener in &of.listeners {
        add(&format!("listener {} ", listener.name), &listener.conditions);
    }
    for parent in &of.parents {
        let to = &parent.parent;
        let (_, kind) = to.group_kind();
        let section = to.section_name.as_deref().unwrap_or_default();
        let namespace = to.namespace.as_deref().unwrap_or_default();
        let name = parent_name(namespace, kind, &to.name, section, to.port.unwrap_or_default().into());
        add(&format!("parent {name} "), &parent.conditions);
    }
    for listener in &of.listeners {
        let kinds: Vec<&str> = listener.supported_kinds.iter().map(|kind| kind.as_str()).collect();
        let words = format!("{} {}", listener.attached_routes, kinds.join(" "));
        found.insert(format!("listener {}", listener.name), words);
    }
    // As in istiod, a Gateway without ListenerSets has no such field.
    if let Some(count) = of.attached_listener_sets.filter(|count| *count > 0) {
        found.insert("attachedListenerSets".into(), count.to_string());
    }
    (of.object.to_string(), found)
}
