//! Messages in `TypedStruct`: a type URL and the JSON form of the message, as EnvoyFilters contain them.
//!
//! A message of a supported type is converted to its binary form before anything else reads it. All other typed structs
//! stay as they are: the translation knows those of Istio and refuses the rest by type. Source:
//! `xds.type.v3.TypedStruct`, and the JSON form of protobuf (<https://protobuf.dev/programming-guides/json/>).

use base64::{
    Engine as _, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use prost::{
    Message as _,
    encoding::{WireType, encode_key, encode_varint},
};
use skysail_proto::{Codec as _, istio::TypedStruct};
use skysail_xds::envoy::pb::google::protobuf::{Any, Duration, ListValue, Struct, Value, value::Kind};

use super::{BY_NAME, Json, MAX_DEPTH, MESSAGES, ProtoField, Rule, entry, next, packed, varint};
use crate::translate::{At as _, Reject, Result};

/// Base64 of JSON: either alphabet is decoded by [`bytes()`], with or without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

pub(super) fn is_typed_struct(name: &str) -> bool {
    matches!(name, "udpa.type.v1.TypedStruct" | "xds.type.v3.TypedStruct")
}

/// Returns a message in which every `Any` with a typed struct of a supported type has the binary form instead.
pub(in crate::translate) fn unwrapped(message: &str, body: &[u8]) -> Result<Vec<u8>> {
    match BY_NAME.get(message) {
        Some(&index) => rewrite(index, body, 0),
        None => Ok(body.to_vec()),
    }
}

/// Copies a message and converts the typed structs in it.
fn rewrite(index: usize, body: &[u8], depth: usize) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(body.len());
    if depth >= MAX_DEPTH {
        out.extend_from_slice(body);
        return Ok(out);
    }
    let mut rest = body;
    loop {
        let before = rest;
        let Some((number, wire)) = next(&mut rest) else {
            // Bytes that are not a field stay, so that decoding reports them.
            out.extend_from_slice(before);
            return Ok(out);
        };
        let copied = &before[..before.len() - rest.len()];
        let field = MESSAGES[index].fields.iter().find(|field| field.number == number);
        let is_message = varint(&mut &*before).is_some_and(|tag| tag & 7 == 2);
        let value = wire.bytes();
        let (Some(field), true) = (field, is_message) else {
            out.extend_from_slice(copied);
            continue;
        };
        let new = match field.rule {
            Rule::Within(inner) => rewrite(inner, value, depth + 1),
            Rule::Any => any(value, depth + 1),
            Rule::MapOf(inner) => with_value(value, rewrite(inner, entry(value), depth + 1)),
            Rule::MapOfAny => with_value(value, any(entry(value), depth + 1)),
            Rule::Done | Rule::Warned | Rule::Refused => {
                out.extend_from_slice(copied);
                continue;
            }
        };
        put(number, &new.at(field.name)?, &mut out);
    }
}

/// Returns a map entry with another value.
fn with_value(entry: &[u8], value: Result<Vec<u8>>) -> Result<Vec<u8>> {
    let (mut out, mut rest) = (Vec::with_capacity(entry.len()), entry);
    loop {
        let before = rest;
        match next(&mut rest) {
            None => break,
            Some((2, _)) => {}
            Some(_) => out.extend_from_slice(&before[..before.len() - rest.len()]),
        }
    }
    put(2, &value?, &mut out);
    Ok(out)
}

/// Converts an `Any`, or the messages in it.
fn any(body: &[u8], depth: usize) -> Result<Vec<u8>> {
    let (name, inner) = packed(body);
    if !is_typed_struct(name) {
        return match BY_NAME.get(name) {
            Some(&index) => with_value(body, rewrite(index, inner, depth)),
            None => Ok(body.to_vec()),
        };
    }
    let Some(&index) = BY_NAME.get(packed(inner).0) else { return Ok(body.to_vec()) };
    let wrong = |error| Reject::new(format!("not a valid TypedStruct: {error}"));
    let typed = TypedStruct::from_slice(inner).map_err(wrong)?;
    let mut value = Vec::new();
    structure(index, &typed.value.unwrap_or_default(), depth, &mut value).at("value")?;
    // A typed struct may contain another one.
    let value = rewrite(index, &value, depth + 1)?;
    Ok(Any { type_url: format!("type.googleapis.com/{}", MESSAGES[index].name), value }.encode_to_vec())
}

/// Encodes a message of the table.
fn structure(index: usize, json: &Struct, depth: usize, out: &mut Vec<u8>) -> Result<()> {
    if depth >= MAX_DEPTH {
        return Err(Reject::new(format!("is nested deeper than {MAX_DEPTH} levels")));
    }
    let message = &MESSAGES[index];
    let mut keys: Vec<&String> = json.fields.keys().collect();
    // A map has no order of its own; equal messages get equal bytes.
    keys.sort_unstable();
    for key in keys {
        let Some(field) = message.fields.iter().find(|field| is_name(field.name, key)) else {
            return Err(Reject::new(format!("{} has no such field: remove it", message.name)).at_field(key));
        };
        if let Some(kind) = json.fields[key].kind.as_ref().filter(|kind| !matches!(kind, Kind::NullValue(_)))
        {
            self::field(field, kind, depth, out).at(field.name)?;
        }
    }
    Ok(())
}

/// Returns whether a key is the name of a field, as in the proto or in lower camel case.
fn is_name(field: &str, key: &str) -> bool {
    if field == key {
        return true;
    }
    let mut upper = false;
    let mut expected = field.chars().filter_map(|letter| {
        if letter == '_' {
            upper = true;
            return None;
        }
        Some(if std::mem::take(&mut upper) { letter.to_ascii_uppercase() } else { letter })
    });
    let mut key = key.chars();
    loop {
        match (expected.next(), key.next()) {
            (None, None) => return true,
            (a, b) if a == b => {}
            _ => return false,
        }
    }
}

fn field(field: &ProtoField, kind: &Kind, depth: usize, out: &mut Vec<u8>) -> Result<()> {
    match (&field.json, kind) {
        (Json::Map(key, value), Kind::StructValue(entries)) => {
            let mut names: Vec<&String> = entries.fields.keys().collect();
            names.sort_unstable();
            for name in names {
                let Some(kind) = &entries.fields[name].kind else { continue };
                let mut entry = Vec::new();
                self::value(1, key, &Kind::StringValue(name.clone()), depth, &mut entry).at(name)?;
                self::value(2, value, kind, depth, &mut entry).at(name)?;
                put(field.number, &entry, out);
            }
            Ok(())
        }
        (_, Kind::ListValue(list)) if field.repeated => {
            for (index, item) in list.values.iter().enumerate() {
                let kind = item.kind.as_ref().ok_or_else(|| Reject::new("must not be null"));
                kind.and_then(|kind| value(field.number, &field.json, kind, depth, out))
                    .at(format_args!("[{index}]"))?;
            }
            Ok(())
        }
        _ if field.repeated => Err(Reject::new("must be a list")),
        (json, kind) => value(field.number, json, kind, depth, out),
    }
}

/// Encodes one value with its field number.
fn value(number: u32, json: &Json, kind: &Kind, depth: usize, out: &mut Vec<u8>) -> Result<()> {
    let is_wrong = || Err(Reject::new(format!("has the wrong type: {}", shown(kind))));
    match (json, kind) {
        (Json::Bool, _) => match boolean(kind) {
            Some(flag) => put_varint(number, flag.into(), out),
            None => return is_wrong(),
        },
        (Json::Int, _) => match integer(kind).and_then(|number| i64::try_from(number).ok()) {
            Some(value) => put_varint(number, value.cast_unsigned(), out),
            None => return is_wrong(),
        },
        (Json::Uint, _) => match integer(kind).and_then(|number| u64::try_from(number).ok()) {
            Some(value) => put_varint(number, value, out),
            None => return is_wrong(),
        },
        (Json::Float, _) => match real(kind) {
            Some(value) => {
                encode_key(number, WireType::ThirtyTwoBit, out);
                out.extend_from_slice(&(value as f32).to_le_bytes());
            }
            None => return is_wrong(),
        },
        (Json::Double, _) => match real(kind) {
            Some(value) => {
                encode_key(number, WireType::SixtyFourBit, out);
                out.extend_from_slice(&value.to_le_bytes());
            }
            None => return is_wrong(),
        },
        (Json::String, Kind::StringValue(text)) => put(number, text.as_bytes(), out),
        (Json::Bytes, Kind::StringValue(text)) => match bytes(text) {
            Some(bytes) => put(number, &bytes, out),
            None => return Err(Reject::new("is not valid base64")),
        },
        (Json::Enum(values), _) => {
            let found = match kind {
                Kind::StringValue(name) => {
                    values.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
                }
                _ => integer(kind).and_then(|value| i32::try_from(value).ok()),
            };
            match found {
                Some(value) => put_varint(number, i64::from(value).cast_unsigned(), out),
                None => return Err(Reject::new(format!("{} is not a value of the enum", shown(kind)))),
            }
        }
        (Json::Message(index), Kind::StructValue(inner)) => {
            let mut message = Vec::new();
            structure(*index, inner, depth + 1, &mut message)?;
            put(number, &message, out);
        }
        (Json::WellKnown(name), kind) => put(number, &well_known(name, kind, depth)?, out),
        (Json::Ignored, _) => {}
        // The check of the fields refuses the field, or warns about it, whatever its value.
        (Json::Other, _) => put(number, &[], out),
        _ => return is_wrong(),
    }
    Ok(())
}

/// Encodes a message of `google.protobuf`.
fn well_known(name: &str, kind: &Kind, depth: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let wrapped = match name {
        "BoolValue" => Json::Bool,
        "Int32Value" | "Int64Value" => Json::Int,
        "UInt32Value" | "UInt64Value" => Json::Uint,
        "FloatValue" => Json::Float,
        "DoubleValue" => Json::Double,
        "StringValue" => Json::String,
        "BytesValue" => Json::Bytes,
        _ => {
            return match (name, kind) {
                ("Duration", Kind::StringValue(text)) => match duration(text) {
                    Some(duration) => Ok(duration.encode_to_vec()),
                    None => Err(Reject::new(format!("{text:?} is not a duration such as \"1.5s\""))),
                },
                ("Struct", Kind::StructValue(inner)) => Ok(inner.encode_to_vec()),
                ("ListValue", Kind::ListValue(inner)) => Ok(ListValue::encode_to_vec(inner)),
                ("Value", kind) => Ok(Value { kind: Some(kind.clone()) }.encode_to_vec()),
                ("Empty", Kind::StructValue(_)) => Ok(out),
                ("Any", Kind::StructValue(inner)) => packed_json(inner, depth + 1),
                _ => Err(Reject::new(format!("has the wrong type: {}", shown(kind)))),
            };
        }
    };
    value(1, &wrapped, kind, depth, &mut out)?;
    Ok(out)
}

/// Encodes an `Any` in JSON form: `@type` and the fields of the message.
fn packed_json(json: &Struct, depth: usize) -> Result<Vec<u8>> {
    let url = json.fields.get("@type").and_then(|value| value.kind.as_ref());
    let Some(Kind::StringValue(url)) = url else {
        return Err(Reject::new("must be given").at_field("@type"));
    };
    let name = url.rsplit('/').next().unwrap_or_default();
    let mut fields = json.clone();
    fields.fields.remove("@type");
    let mut value = Vec::new();
    if let Some(&index) = BY_NAME.get(name) {
        structure(index, &fields, depth, &mut value)?;
    } else if is_typed_struct(name) {
        let text = |key: &str| match fields.fields.get(key).and_then(|value| value.kind.clone()) {
            Some(Kind::StringValue(text)) => Some(text),
            _ => None,
        };
        let inner = match fields.fields.get("value").and_then(|value| value.kind.clone()) {
            Some(Kind::StructValue(inner)) => Some(inner),
            _ => None,
        };
        let type_url = text("type_url").or_else(|| text("typeUrl")).unwrap_or_default();
        value = TypedStruct { type_url, value: inner }.encode_to_vec();
    } else if !fields.fields.is_empty() {
        return Err(Reject::new(format!("skysail-proxy does not support {name}: remove it")));
    }
    Ok(Any { type_url: url.clone(), value }.encode_to_vec())
}

fn boolean(kind: &Kind) -> Option<bool> {
    match kind {
        Kind::BoolValue(flag) => Some(*flag),
        // Keys of maps are strings.
        Kind::StringValue(text) => text.parse().ok(),
        _ => None,
    }
}

/// Returns an integer; JSON writes those of 64 bits as strings.
fn integer(kind: &Kind) -> Option<i128> {
    match kind {
        // Every integer up to 2^53 is exact; greater ones are multiples of a power of two.
        Kind::NumberValue(number) if number.fract() == 0.0 && number.abs() < 2f64.powi(64) => {
            Some(*number as i128)
        }
        Kind::StringValue(text) => text.parse().ok(),
        _ => None,
    }
}

fn real(kind: &Kind) -> Option<f64> {
    match kind {
        Kind::NumberValue(number) => Some(*number),
        Kind::StringValue(text) => text.parse().ok(),
        _ => None,
    }
}

/// Decodes base64 of either alphabet.
fn bytes(text: &str) -> Option<Vec<u8>> {
    BASE64.decode(text.replace('-', "+").replace('_', "/")).ok()
}

/// Parses a duration in seconds with up to nine decimals and the suffix `s`.
fn duration(text: &str) -> Option<Duration> {
    let number = text.strip_suffix('s')?;
    let (negative, number) = match number.strip_prefix('-') {
        Some(number) => (true, number),
        None => (false, number),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let seconds: i64 = whole.parse().ok()?;
    let nanos: i32 = format!("{fraction:0<9}").parse().ok()?;
    Some(if negative { Duration { seconds: -seconds, nanos: -nanos } } else { Duration { seconds, nanos } })
}

/// Describes a value in an error.
fn shown(kind: &Kind) -> String {
    match kind {
        Kind::NullValue(_) => "null".into(),
        Kind::NumberValue(number) => number.to_string(),
        Kind::StringValue(text) => format!("{:?}", text.chars().take(64).collect::<String>()),
        Kind::BoolValue(flag) => flag.to_string(),
        Kind::StructValue(_) => "an object".into(),
        Kind::ListValue(_) => "a list".into(),
    }
}

fn put(number: u32, bytes: &[u8], out: &mut Vec<u8>) {
    encode_key(number, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn put_varint(number: u32, value: u64, out: &mut Vec<u8>) {
    encode_key(number, WireType::Varint, out);
    encode_varint(value, out);
}

#[cfg(test)]
mod tests;
