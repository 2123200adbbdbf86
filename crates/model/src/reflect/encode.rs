//! Bytes of messages, the same every time and in the order in which Go writes them.

use prost::{
    Message as _,
    encoding::{WireType, encode_key, encode_varint},
};
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage as _};

use crate::wire::EncodedField;

/// Encodes a message: members of a `oneof` last, entries of maps sorted. Tools compare packed messages as bytes.
pub(crate) fn encode(message: &DynamicMessage) -> Vec<u8> {
    let body = message.encode_to_vec();
    ordered(&message.descriptor(), &body).unwrap_or(body)
}

/// Returns the bytes in order; `None` if they are not a message, which cannot happen as they were just encoded.
fn ordered(descriptor: &MessageDescriptor, mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut first = Vec::with_capacity(rest.len());
    let mut last = Vec::new();
    let mut entries: Vec<MapEntry> = Vec::new();
    let mut map = None;
    while !rest.is_empty() {
        let EncodedField { number, bytes, content } = EncodedField::take(&mut rest)?;
        let field = descriptor.get_field(number);
        if map.is_some_and(|map| map != number) {
            flush(&mut entries, &mut first);
        }
        map = field.as_ref().is_some_and(FieldDescriptor::is_map).then_some(number);
        let to = match map {
            Some(_) => {
                entries.push(MapEntry::default());
                &mut entries.last_mut()?.bytes
            }
            None if field.as_ref().is_some_and(in_oneof) => &mut last,
            None => &mut first,
        };
        match (content, field.map(|field| field.kind())) {
            (Some(value), Some(Kind::Message(nested))) => {
                let body = ordered(&nested, value)?;
                encode_key(number, WireType::LengthDelimited, to);
                encode_varint(u64::try_from(body.len()).ok()?, to);
                to.extend_from_slice(&body);
                if let Some(entry) = entries.last_mut().filter(|_| map.is_some()) {
                    entry.key = key_of(&nested, value);
                }
            }
            _ => to.extend_from_slice(bytes),
        }
    }
    flush(&mut entries, &mut first);
    first.append(&mut last);
    Some(first)
}

fn in_oneof(field: &FieldDescriptor) -> bool {
    field.containing_oneof().is_some_and(|oneof| !oneof.is_synthetic())
}

/// An entry of a map with its key, by which Go sorts.
#[derive(Default)]
struct MapEntry {
    key: Option<MapKey>,
    bytes: Vec<u8>,
}

/// Returns the key of an encoded entry.
fn key_of(entry: &MessageDescriptor, body: &[u8]) -> Option<MapKey> {
    let entry = DynamicMessage::decode(entry.clone(), body).ok()?;
    let key = entry.get_field_by_number(1)?.into_owned();
    key.into_map_key()
}

fn flush(entries: &mut Vec<MapEntry>, to: &mut Vec<u8>) {
    entries.sort_by(|a, b| a.key.cmp(&b.key));
    entries.drain(..).for_each(|entry| to.extend(entry.bytes));
}
