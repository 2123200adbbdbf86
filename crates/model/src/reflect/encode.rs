//! Bytes of messages, the same every time and in the order in which Go writes them.

use prost::{
    Message as _,
    encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint},
};
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage as _};

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
        let start = rest;
        let (number, wire) = decode_key(&mut rest).ok()?;
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
        match wire {
            WireType::LengthDelimited => {
                let length = usize::try_from(decode_varint(&mut rest).ok()?).ok()?;
                let (value, behind) = rest.split_at_checked(length)?;
                rest = behind;
                encode_key(number, wire, to);
                match field.map(|field| field.kind()) {
                    Some(Kind::Message(nested)) => {
                        let body = ordered(&nested, value)?;
                        encode_varint(u64::try_from(body.len()).ok()?, to);
                        to.extend_from_slice(&body);
                        if let Some(entry) = entries.last_mut().filter(|_| map.is_some()) {
                            entry.key = key_of(&nested, value);
                        }
                    }
                    _ => {
                        encode_varint(u64::try_from(length).ok()?, to);
                        to.extend_from_slice(value);
                    }
                }
                continue;
            }
            WireType::Varint => drop(decode_varint(&mut rest).ok()?),
            WireType::ThirtyTwoBit => rest = rest.split_at_checked(4)?.1,
            WireType::SixtyFourBit => rest = rest.split_at_checked(8)?.1,
            WireType::StartGroup | WireType::EndGroup => return None,
        }
        to.extend_from_slice(start.get(..start.len() - rest.len())?);
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
