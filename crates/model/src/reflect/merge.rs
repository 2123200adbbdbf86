//! Merge of messages, as Istio merges a patch into a resource.

use prost_reflect::{DynamicMessage, ReflectMessage as _, Value};

use super::{pack, text, unpack};

/// Treatment of a list that both messages have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lists {
    /// Appends the elements of the patch.
    Append,
    /// Replaces the list by that of the patch.
    Replace,
}

/// Merges a message into another of the same type: scalars override, messages merge, entries of maps replace. A
/// duration is replaced as a whole. So is the content of an `Any`.
pub(crate) fn merge(to: &mut DynamicMessage, from: &DynamicMessage, lists: Lists) {
    if to.descriptor() != from.descriptor() {
        return;
    }
    for (field, value) in from.fields() {
        match (value, to.get_field_mut(&field)) {
            (Value::List(from), Value::List(to)) => {
                if lists == Lists::Replace {
                    to.clear();
                }
                to.extend(from.iter().cloned());
            }
            (Value::Map(from), Value::Map(to)) => {
                to.extend(from.iter().map(|(key, value)| (key.clone(), value.clone())));
            }
            (Value::Message(from), Value::Message(to))
                if from.descriptor().full_name() != "google.protobuf.Duration" =>
            {
                merge(to, from, lists);
            }
            (value, to) => *to = value.clone(),
        }
    }
}

/// Merges the content of an `Any` into that of another, which must have the same type.
///
/// # Errors
/// Fails if the types differ or one is unknown.
pub(crate) fn merge_any(to: &mut DynamicMessage, from: &DynamicMessage) -> Result<(), String> {
    let (url, other) = (text(to, "type_url"), text(from, "type_url"));
    let unknown = |url: &str| format!("type {url} is unknown");
    let mut content = unpack(to).ok_or_else(|| unknown(&url))?;
    let patch = unpack(from).ok_or_else(|| unknown(&other))?;
    if content.descriptor() != patch.descriptor() {
        let (patch, content) = (patch.descriptor(), content.descriptor());
        return Err(format!("{} cannot be merged into {}", patch.full_name(), content.full_name()));
    }
    merge(&mut content, &patch, Lists::Append);
    *to = pack(&url, &content).ok_or_else(|| unknown(&url))?;
    Ok(())
}
