//! Finds every field of an encoded message that is set but not supported.
//!
//! The build script generates the table of supported fields from `supported.txt` and Envoy's descriptors.
//! Walking the encoded form needs no descriptors at run time, and finds fields that the generated types do not
//! contain.

use std::{collections::HashMap, fmt::Write as _, sync::LazyLock};

/// A message with all its fields.
struct Message {
    name: &'static str,
    fields: &'static [ProtoField],
}

struct ProtoField {
    number: u32,
    name: &'static str,
    repeated: bool,
    rule: Rule,
    json: Json,
}

/// JSON form of a field, for messages that a `TypedStruct` contains.
enum Json {
    Bool,
    Int,
    Uint,
    Float,
    Double,
    String,
    Bytes,
    /// Names and numbers of the values.
    Enum(&'static [(&'static str, i32)]),
    /// The message with this index.
    Message(usize),
    /// A message of `google.protobuf` with this name.
    WellKnown(&'static str),
    /// A map with these keys and values.
    Map(&'static Self, &'static Self),
    /// The field has no effect, so that its value is left out.
    Ignored,
    /// The field is not supported, or has a type that no supported field has.
    Other,
}

mod typed_struct;

pub(super) use typed_struct::unwrapped;

/// Support for a field.
enum Rule {
    /// Supported.
    Done,
    /// Supported as far as the fields of the message with this index.
    Within(usize),
    /// The same for each value of a map.
    MapOf(usize),
    /// Supported as far as the fields of the packed message.
    Any,
    /// The same for each value of a map.
    MapOfAny,
    /// Accepted without effect; logs a warning.
    Warned,
    /// Refused.
    Refused,
}

include!(concat!(env!("OUT_DIR"), "/fields.rs"));

/// A field that is set but not supported.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// Path of the message that contains the field.
    pub(super) path: String,
    /// Name of the field; its number if the descriptors do not contain it.
    pub(super) field: String,
    /// Full name of the message.
    pub(super) message: &'static str,
    /// Refused; otherwise without effect.
    pub(super) refused: bool,
}

/// Maximum nesting depth that is checked; prost refuses deeper messages.
const MAX_DEPTH: usize = 100;

/// Result of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Checked {
    /// All unsupported fields.
    pub(super) findings: Vec<Finding>,
    /// The message contains a supported message in a `TypedStruct`; see [`unwrapped`].
    pub(super) has_typed_structs: bool,
}

/// Checks all fields of a message.
pub(super) fn check(message: &str, body: &[u8]) -> Checked {
    let mut walk =
        FieldWalk { findings: Vec::new(), path: String::new(), depth: 0, has_typed_structs: false };
    if let Some(&index) = BY_NAME.get(message) {
        walk.message(index, body);
    }
    Checked { findings: walk.findings, has_typed_structs: walk.has_typed_structs }
}

static BY_NAME: LazyLock<HashMap<&'static str, usize>> =
    LazyLock::new(|| MESSAGES.iter().enumerate().map(|(index, message)| (message.name, index)).collect());

struct FieldWalk {
    findings: Vec<Finding>,
    path: String,
    depth: usize,
    has_typed_structs: bool,
}

impl FieldWalk {
    fn message(&mut self, index: usize, mut body: &[u8]) {
        if self.depth >= MAX_DEPTH {
            return;
        }
        self.depth += 1;
        let message = &MESSAGES[index];
        // Occurrences of each repeated field, for the index in the path.
        let mut counts: Vec<(u32, usize)> = Vec::new();
        while let Some((number, value)) = next(&mut body) {
            let found = message.fields.iter().find(|field| field.number == number);
            let (Some(field), before) = (found, self.path.len()) else {
                self.finding(number.to_string(), message.name, true);
                continue;
            };
            if !self.path.is_empty() {
                self.path.push('.');
            }
            self.path.push_str(field.name);
            if field.repeated {
                let count = match counts.iter_mut().find(|(other, _)| *other == number) {
                    Some((_, count)) => count,
                    None => {
                        counts.push((number, 0));
                        let last = counts.len() - 1;
                        &mut counts[last].1
                    }
                };
                let _ = write!(self.path, "[{count}]");
                *count += 1;
            }
            match field.rule {
                Rule::Done => {}
                Rule::Within(inner) => self.message(inner, value),
                Rule::MapOf(inner) => self.message(inner, entry(value)),
                Rule::Any => self.any(value),
                Rule::MapOfAny => self.any(entry(value)),
                Rule::Warned | Rule::Refused => {
                    let refused = matches!(field.rule, Rule::Refused);
                    self.finding(field.name.to_owned(), message.name, refused);
                }
            }
            self.path.truncate(before);
        }
        self.depth -= 1;
    }

    /// Checks the message of an `Any`. A type without a table is left to the translation, which refuses it by
    /// its type.
    fn any(&mut self, body: &[u8]) {
        let (name, inner) = packed(body);
        if typed_struct::is_typed_struct(name) && BY_NAME.contains_key(packed(inner).0) {
            self.has_typed_structs = true;
        } else if let Some(&index) = BY_NAME.get(name) {
            self.message(index, inner);
        }
    }

    fn finding(&mut self, field: String, message: &'static str, refused: bool) {
        self.findings.push(Finding { path: self.path.clone(), field, message, refused });
    }
}

/// Returns the type name and the content of an `Any`, or of a `TypedStruct`, which has the same field numbers.
fn packed(mut body: &[u8]) -> (&str, &[u8]) {
    let (mut url, mut inner) = (&[][..], &[][..]);
    while let Some((number, value)) = next(&mut body) {
        match number {
            1 => url = value,
            2 => inner = value,
            _ => {}
        }
    }
    let url = std::str::from_utf8(url).unwrap_or_default();
    (url.rsplit('/').next().unwrap_or_default(), inner)
}

/// Returns the value of a map entry.
fn entry(mut body: &[u8]) -> &[u8] {
    let mut found = &[][..];
    while let Some((number, value)) = next(&mut body) {
        if number == 2 {
            found = value;
        }
    }
    found
}

/// Splits off the next field: its number, and the bytes of a length-delimited value. Ends at the first byte
/// that is no field; decoding then reports the error.
fn next<'a>(rest: &mut &'a [u8]) -> Option<(u32, &'a [u8])> {
    if rest.is_empty() {
        return None;
    }
    let tag = varint(rest)?;
    let length = match tag & 7 {
        0 => {
            varint(rest)?;
            0
        }
        1 => 8,
        2 => usize::try_from(varint(rest)?).ok()?,
        5 => 4,
        _ => return None,
    };
    let (value, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some((u32::try_from(tag >> 3).ok()?, value))
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}
