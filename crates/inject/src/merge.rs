//! Merges objects of Kubernetes as a strategic merge patch does: mappings key by key, some lists item by item.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// Lists of a container whose items have a key.
const KEYED: [(&str, &str); 5] = [
    ("env", "name"),
    ("ports", "containerPort"),
    ("volumeMounts", "mountPath"),
    ("volumeDevices", "devicePath"),
    ("resizePolicy", "resourceName"),
];

/// Overrides fields of a container. Items of keyed lists replace those with the same key, or are appended. Other lists are
/// replaced. `null` removes a field.
pub(crate) fn container(base: &mut Value, overlay: &Value) {
    let (Value::Object(base), Value::Object(overlay)) = (&mut *base, overlay) else { return };
    for (name, value) in overlay {
        let key = KEYED.iter().find(|(list, _)| list == name).map(|(_, key)| *key);
        match (key, base.get_mut(name), value) {
            (Some(key), Some(Value::Array(items)), Value::Array(more)) => list(items, more, key),
            (_, Some(field @ Value::Object(_)), Value::Object(_)) => mapping(field, value),
            (_, _, Value::Null) => drop(base.remove(name)),
            _ => drop(base.insert(name.clone(), value.clone())),
        }
    }
}

/// Overrides fields of a mapping. Lists are replaced.
pub(crate) fn mapping(base: &mut Value, overlay: &Value) {
    let (Value::Object(base), Value::Object(overlay)) = (&mut *base, overlay) else { return };
    for (name, value) in overlay {
        match (base.get_mut(name), value) {
            (Some(field @ Value::Object(_)), Value::Object(_)) => mapping(field, value),
            (_, Value::Null) => drop(base.remove(name)),
            _ => drop(base.insert(name.clone(), value.clone())),
        }
    }
}

/// Puts items into a list. An item replaces the one with the same key. The number of steps is proportional to that of the
/// items, which a client decides.
pub(crate) fn list(items: &mut Vec<Value>, more: &[Value], key: &str) {
    let key_of = |item: &Value| Some(&item[key]).filter(|key| !key.is_null()).map(Value::to_string);
    let mut places = HashMap::with_capacity(items.len() + more.len());
    for (place, item) in items.iter().enumerate() {
        key_of(item).map(|key| places.entry(key).or_insert(place));
    }
    for item in more {
        let known = key_of(item).map(|key| *places.entry(key).or_insert(items.len()));
        match known.and_then(|place| items.get_mut(place)) {
            Some(old) => old.clone_from(item),
            None => items.push(item.clone()),
        }
    }
}

/// Returns the mapping in a field; creates it where it is absent. Any other value is replaced.
pub(crate) fn map_at<'a>(object: &'a mut Map<String, Value>, name: &str) -> &'a mut Map<String, Value> {
    let field = object.entry(name).or_insert(Value::Null);
    as_map(field)
}

/// Makes a value a mapping. Any other value is replaced.
pub(crate) fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("it is a mapping"),
    }
}

/// Takes the list in a field out of an object.
pub(crate) fn take_list(object: &mut Value, name: &str) -> Vec<Value> {
    match object.get_mut(name).map(Value::take) {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_are_merged_field_by_field() {
        let mut base = json!({ "name": "istio-proxy", "image": "a", "args": ["1", "2"],
            "env": [{ "name": "A", "valueFrom": { "fieldRef": {} } }, { "name": "B", "value": "b" }],
            "resources": { "requests": { "cpu": "1", "memory": "2" } } });
        let overlay = json!({ "name": "istio-proxy", "args": ["3"], "image": null,
            "env": [{ "name": "A", "value": "a" }, { "name": "C", "value": "c" }],
            "resources": { "requests": { "cpu": "5" } } });
        container(&mut base, &overlay);
        let expected = json!({ "name": "istio-proxy", "args": ["3"],
            "env": [{ "name": "A", "value": "a" }, { "name": "B", "value": "b" }, { "name": "C", "value": "c" }],
            "resources": { "requests": { "cpu": "5", "memory": "2" } } });
        assert_eq!(base, expected);
    }

    #[test]
    fn many_items_are_merged_at_once() {
        let item = |number: u32| json!({ "name": number.to_string() });
        let mut items = vec![item(7)];
        let more: Vec<_> = (0..200_000).map(item).chain([json!({ "name": "9", "value": "last" })]).collect();
        list(&mut items, &more, "name");
        assert_eq!((items.len(), &items[0]), (200_000, &item(7)));
        assert_eq!(items.iter().find(|item| item["name"] == "9").unwrap()["value"], "last");
    }
}
