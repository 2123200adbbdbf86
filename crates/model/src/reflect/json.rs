//! Conversion of JSON to messages, with the field and the reason of each error.

use prost_reflect::{
    DeserializeOptions, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};
use serde_json::Value as Json;
use skysail_yaml::join;

use super::{ANY, descriptor_of_url, pack};
use crate::{go_duration, spelling::nearest};

/// Key of the type of a packed message.
const TYPE: &str = "@type";

/// Full name of durations.
const DURATION: &str = "google.protobuf.Duration";

/// Maximum number of unknown fields of a value that are named.
const MAX_UNKNOWN: usize = 20;

/// A message that was converted from a value.
#[derive(Debug)]
pub(crate) struct FromJson {
    /// The message, without the unknown fields.
    pub(crate) message: DynamicMessage,
    /// The first fields of the value that the message does not have, at most [`MAX_UNKNOWN`].
    pub(crate) unknown: Vec<TypeMismatch>,
}

/// A value that is not of its field's type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TypeMismatch {
    /// Field, from the root of the value; empty for the value itself.
    pub(crate) field: String,
    /// Description of the error.
    pub(crate) message: String,
    /// Remedy; may be empty.
    pub(crate) remedy: String,
}

impl TypeMismatch {
    fn new(field: &str, message: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { field: field.to_owned(), message: message.into(), remedy: remedy.into() }
    }
}

/// Converts a value to a message of a type. Field names are those of the `.proto` files or of their JSON form.
///
/// # Errors
/// Fails if a value is not of its field's type, or the type of a packed message is unknown.
pub(crate) fn from_json(descriptor: &MessageDescriptor, value: &Json) -> Result<FromJson, TypeMismatch> {
    let mut unknown = Vec::new();
    let message = message(descriptor, value, "", &mut unknown)?;
    Ok(FromJson { message, unknown })
}

fn message(
    descriptor: &MessageDescriptor,
    value: &Json,
    path: &str,
    unknown: &mut Vec<TypeMismatch>,
) -> Result<DynamicMessage, TypeMismatch> {
    match descriptor.full_name() {
        ANY => return packed(value, path, unknown),
        DURATION => return plain(descriptor, &seconds(value), path),
        name if name.starts_with("google.protobuf.") => return plain(descriptor, value, path),
        _ => {}
    }
    let Json::Object(fields) = value else {
        let message = format!("expected the fields of {}, found {}", descriptor.full_name(), kind_of(value));
        return Err(TypeMismatch::new(path, message, "write `name: value`"));
    };
    let mut made = DynamicMessage::new(descriptor.clone());
    for (name, value) in fields.iter().filter(|(name, _)| *name != TYPE) {
        let path = join(path, name);
        let field = descriptor.get_field_by_name(name).or_else(|| descriptor.get_field_by_json_name(name));
        let Some(field) = field else {
            if unknown.len() < MAX_UNKNOWN {
                unknown.push(unknown_field(descriptor, name, &path));
            }
            continue;
        };
        if value.is_null() && !takes_null(&field) {
            continue;
        }
        exclusive(&made, &field, &path)?;
        let value = field_value(&field, value, &path, unknown)?;
        made.try_set_field(&field, value)
            .map_err(|error| TypeMismatch::new(&path, format!("the value does not fit: {error}"), ""))?;
    }
    Ok(made)
}

/// Returns whether `null` is a value of a field.
fn takes_null(field: &FieldDescriptor) -> bool {
    matches!(field.kind(), Kind::Message(message) if message.full_name() == "google.protobuf.Value")
}

fn unknown_field(descriptor: &MessageDescriptor, name: &str, path: &str) -> TypeMismatch {
    let names: Vec<String> = descriptor.fields().map(|field| field.name().to_owned()).collect();
    let known: Vec<&str> = names.iter().map(String::as_str).collect();
    let remedy = match nearest(name, &known) {
        Some(near) => format!("did you mean {near}?"),
        None if name.starts_with("typed_config") || name == "config" => {
            "write typed_config with \"@type\"".to_owned()
        }
        None => format!("see the reference of {}", descriptor.full_name()),
    };
    TypeMismatch::new(path, format!("{} has no field {name:?}", descriptor.full_name()), remedy)
}

/// Refuses a second member of a `oneof`.
fn exclusive(made: &DynamicMessage, field: &FieldDescriptor, path: &str) -> Result<(), TypeMismatch> {
    let Some(oneof) = field.containing_oneof().filter(|oneof| !oneof.is_synthetic()) else { return Ok(()) };
    let other = oneof.fields().find(|other| other != field && made.has_field(other));
    match other {
        Some(other) => {
            let message = format!("is not allowed together with {}", other.name());
            Err(TypeMismatch::new(path, message, "keep one of them"))
        }
        None => Ok(()),
    }
}

fn field_value(
    field: &FieldDescriptor,
    value: &Json,
    path: &str,
    unknown: &mut Vec<TypeMismatch>,
) -> Result<Value, TypeMismatch> {
    let Kind::Message(of) = field.kind() else {
        return scalar(field, value, path);
    };
    if field.is_map() {
        let Kind::Message(of) = of.map_entry_value_field().kind() else { return scalar(field, value, path) };
        let Json::Object(entries) = value else {
            return Err(TypeMismatch::new(path, format!("expected a mapping, found {}", kind_of(value)), ""));
        };
        let entries = entries.iter().map(|(key, value)| {
            let path = join(path, key);
            Ok((MapKey::String(key.clone()), Value::Message(message(&of, value, &path, unknown)?)))
        });
        return Ok(Value::Map(entries.collect::<Result<_, TypeMismatch>>()?));
    }
    if !field.is_list() {
        return Ok(Value::Message(message(&of, value, path, unknown)?));
    }
    let Json::Array(items) = value else {
        let message = format!("expected a list, found {}", kind_of(value));
        return Err(TypeMismatch::new(path, message, "begin each item with `- `"));
    };
    let items = items.iter().enumerate();
    let items = items
        .map(|(index, item)| Ok(Value::Message(message(&of, item, &format!("{path}[{index}]"), unknown)?)));
    Ok(Value::List(items.collect::<Result<_, TypeMismatch>>()?))
}

/// Converts a value of a field without messages.
fn scalar(field: &FieldDescriptor, value: &Json, path: &str) -> Result<Value, TypeMismatch> {
    let alone = serde_json::json!({ field.name(): value });
    let mut made = plain(field.parent_message(), &alone, path)?;
    Ok(made.take_field(field).unwrap_or_else(|| Value::default_value_for_field(field)))
}

/// Returns a duration as seconds. Istio reads durations as Go does, such as `500ms` or `1m`.
fn seconds(value: &Json) -> Json {
    match value.as_str().and_then(go_duration::parse) {
        Some(length) => format!("{}.{:09}s", length.as_secs(), length.subsec_nanos()).into(),
        None => value.clone(),
    }
}

/// Converts a value in the JSON form of Protocol Buffers.
fn plain(descriptor: &MessageDescriptor, value: &Json, path: &str) -> Result<DynamicMessage, TypeMismatch> {
    let options = DeserializeOptions::new();
    DynamicMessage::deserialize_with_options(descriptor.clone(), value, &options)
        .map_err(|error| TypeMismatch::new(path, error.to_string(), ""))
}

/// Converts a packed message.
fn packed(value: &Json, path: &str, unknown: &mut Vec<TypeMismatch>) -> Result<DynamicMessage, TypeMismatch> {
    let Json::Object(fields) = value else {
        let message = format!("expected a mapping with \"@type\", found {}", kind_of(value));
        return Err(TypeMismatch::new(path, message, "write the type and its fields"));
    };
    let Some(url) = fields.get(TYPE).and_then(Json::as_str) else {
        let remedy = "add \"@type\": type.googleapis.com/ and the full name of the message";
        return Err(TypeMismatch::new(path, "\"@type\" is missing", remedy));
    };
    let at = join(path, TYPE);
    let Some(descriptor) = descriptor_of_url(url) else {
        let remedy = if url.contains(".v2.") || url.contains("config.filter.") && !url.contains("istio") {
            "Envoy removed its API version 2; write the type of version 3"
        } else {
            "write the full name of a message of Envoy's API"
        };
        return Err(TypeMismatch::new(&at, format!("there is no type {url:?}"), remedy));
    };
    let content = if descriptor.full_name().starts_with("google.protobuf.") {
        let empty = Json::Object(serde_json::Map::new());
        match fields.get("value") {
            Some(value) => plain(&descriptor, value, &join(path, "value"))?,
            None => plain(&descriptor, &empty, path)?,
        }
    } else {
        message(&descriptor, value, path, unknown)?
    };
    pack(url, &content).ok_or_else(|| TypeMismatch::new(path, "the value cannot be packed", ""))
}

fn kind_of(value: &Json) -> &'static str {
    match value {
        Json::Null => "nothing",
        Json::Bool(_) => "true or false",
        Json::Number(_) => "a number",
        Json::String(_) => "text",
        Json::Array(_) => "a list",
        Json::Object(_) => "a mapping",
    }
}
