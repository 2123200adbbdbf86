//! Envoy's messages by reflection: values as people write them, their merge, and their bytes.
//!
//! The descriptors are loaded with the first EnvoyFilter. A mesh without one pays nothing for them.

mod encode;
mod json;
mod merge;

use std::sync::LazyLock;

use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, ReflectMessage as _, Value};

pub(crate) use encode::encode;
pub(crate) use json::{FromJson, TypeMismatch, from_json};
pub(crate) use merge::{Lists, merge, merge_any};

/// Full name of the message that packs another.
const ANY: &str = "google.protobuf.Any";

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let bytes: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
    // The build script wrote the bytes, and a test decodes them.
    DescriptorPool::decode(bytes).unwrap_or_default()
});

/// Returns the message of this full name.
pub(crate) fn descriptor(name: &str) -> Option<MessageDescriptor> {
    POOL.get_message_by_name(name)
}

/// Returns the message of a type URL.
fn descriptor_of_url(url: &str) -> Option<MessageDescriptor> {
    descriptor(url.rsplit('/').next()?)
}

/// Decodes a message; `None` if the bytes are not one of this type.
pub(crate) fn decode(name: &str, bytes: &[u8]) -> Option<DynamicMessage> {
    DynamicMessage::decode(descriptor(name)?, bytes).ok()
}

/// Returns the content of an `Any`; `None` if its type is unknown or its bytes are not of that type.
pub(crate) fn unpack(any: &DynamicMessage) -> Option<DynamicMessage> {
    let url = text(any, "type_url");
    let body = any.get_field_by_name("value")?;
    DynamicMessage::decode(descriptor_of_url(&url)?, &**body.as_bytes()?).ok()
}

/// Packs a message into an `Any` with the given type URL.
pub(crate) fn pack(url: &str, message: &DynamicMessage) -> Option<DynamicMessage> {
    let mut any = DynamicMessage::new(descriptor(ANY)?);
    any.try_set_field_by_name("type_url", Value::String(url.to_owned())).ok()?;
    any.try_set_field_by_name("value", Value::Bytes(encode(message).into())).ok()?;
    Some(any)
}

/// Returns a text field; empty if it is unset.
pub(crate) fn text(message: &DynamicMessage, field: &str) -> String {
    message.get_field_by_name(field).and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Returns a list of texts; empty if it is unset.
pub(crate) fn texts(message: &DynamicMessage, field: &str) -> Vec<String> {
    let value = message.get_field_by_name(field);
    let list = value.as_ref().and_then(|value| value.as_list()).unwrap_or_default();
    list.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect()
}

/// Returns a message field that is set.
pub(crate) fn child<'a>(message: &'a DynamicMessage, field: &str) -> Option<&'a DynamicMessage> {
    let field = message.descriptor().get_field_by_name(field)?;
    message.fields().find(|(set, _)| *set == field).and_then(|(_, value)| value.as_message())
}

/// Returns a message field that is set, to change it.
pub(crate) fn child_mut<'a>(message: &'a mut DynamicMessage, field: &str) -> Option<&'a mut DynamicMessage> {
    if !message.has_field_by_name(field) {
        return None;
    }
    message.get_field_by_name_mut(field)?.as_message_mut()
}

/// Returns a number, plain or wrapped.
pub(crate) fn number(message: &DynamicMessage, field: &str) -> Option<u32> {
    let value = message.get_field_by_name(field)?;
    match &*value {
        Value::U32(number) => Some(*number),
        Value::Message(wrapped) if message.has_field_by_name(field) => number(wrapped, "value"),
        _ => None,
    }
}

/// Removes and returns the messages of a list.
pub(crate) fn take_list(message: &mut DynamicMessage, field: &str) -> Vec<DynamicMessage> {
    let Some(Value::List(list)) = message.take_field_by_name(field) else { return Vec::new() };
    let messages = list.into_iter().map(|value| match value {
        Value::Message(message) => Some(message),
        _ => None,
    });
    messages.flatten().collect()
}

/// Sets a list of messages.
pub(crate) fn set_list(message: &mut DynamicMessage, field: &str, list: Vec<DynamicMessage>) {
    if !list.is_empty() {
        let list = Value::List(list.into_iter().map(Value::Message).collect());
        // The list was taken from this field, or holds messages of its type.
        _ = message.try_set_field_by_name(field, list);
    }
}

#[cfg(test)]
mod tests;
