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
    /// Oneofs of which a field must be set: name and field numbers.
    oneofs: &'static [(&'static str, &'static [u32])],
}

struct ProtoField {
    number: u32,
    name: &'static str,
    repeated: bool,
    rule: Rule,
    json: Json,
    /// Kind of the value, for the rules below.
    kind: FieldKind,
    /// Rules for the value.
    checks: &'static [Check],
}

/// Kind of a field's value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FieldKind {
    /// Number that is zero if absent.
    Number,
    /// Text that is empty if absent.
    Text,
    /// Message, or a field whose absence differs from any value.
    Optional,
    /// Numbers, perhaps packed.
    Numbers,
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

mod rules;
mod typed_struct;

use rules::{Check, FieldValues, Wire};

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

/// Maximum number of violations that are kept.
const MAX_VIOLATIONS: usize = 16;

/// Maximum nesting depth that is checked; prost refuses deeper messages.
const MAX_DEPTH: usize = 100;

/// A field whose value violates a validation rule of Envoy's API.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation {
    pub(super) path: String,
    pub(super) reason: String,
}

/// Result of a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Checked {
    /// All unsupported fields.
    pub(super) findings: Vec<Finding>,
    /// The first invalid values.
    pub(super) violations: Vec<Violation>,
    /// The message contains a supported message in a `TypedStruct`; see [`unwrapped`].
    pub(super) has_typed_structs: bool,
}

/// Checks all fields of a message.
pub(super) fn check(message: &str, body: &[u8]) -> Checked {
    let mut walk = FieldWalk::default();
    if let Some(&index) = BY_NAME.get(message) {
        walk.message(index, body);
    }
    let FieldWalk { findings, violations, has_typed_structs, .. } = walk;
    Checked { findings, violations, has_typed_structs }
}

static BY_NAME: LazyLock<HashMap<&'static str, usize>> =
    LazyLock::new(|| MESSAGES.iter().enumerate().map(|(index, message)| (message.name, index)).collect());

#[derive(Default)]
struct FieldWalk {
    findings: Vec<Finding>,
    violations: Vec<Violation>,
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
        let mut values = Vec::new();
        while let Some((number, value)) = next(&mut body) {
            values.push((number, value));
            let value = value.bytes();
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
        self.verify(message, &values);
        self.depth -= 1;
    }

    /// Checks the validation rules of a message's fields.
    fn verify(&mut self, message: &'static Message, values: &[(u32, Wire<'_>)]) {
        for (name, fields) in message.oneofs {
            if !values.iter().any(|(number, _)| fields.contains(number)) {
                self.violation(name, None, "one of its fields must be set".to_owned());
            }
        }
        for field in message.fields.iter().filter(|field| !field.checks.is_empty()) {
            let all = values.iter().filter(|(number, _)| *number == field.number);
            let default = match field.kind {
                FieldKind::Number => Some(Wire::Varint(0)),
                FieldKind::Text => Some(Wire::Bytes(&[])),
                FieldKind::Optional | FieldKind::Numbers => None,
            };
            let mut values = FieldValues { all: all.map(|(_, value)| *value).collect(), default };
            if field.kind == FieldKind::Numbers {
                values.unpack();
            }
            values.verify(field.checks, |index, reason| self.violation(field.name, index, reason));
        }
    }

    fn violation(&mut self, field: &str, index: Option<usize>, reason: String) {
        if self.violations.len() < MAX_VIOLATIONS {
            let dot = if self.path.is_empty() { "" } else { "." };
            let index = index.map(|index| format!("[{index}]")).unwrap_or_default();
            let path = format!("{}{dot}{field}{index}", self.path);
            self.violations.push(Violation { path, reason });
        }
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
            1 => url = value.bytes(),
            2 => inner = value.bytes(),
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
            found = value.bytes();
        }
    }
    found
}

/// Splits off the next field: its number and value. Ends at the first byte that is no field; decoding then reports
/// the error.
fn next<'a>(rest: &mut &'a [u8]) -> Option<(u32, Wire<'a>)> {
    if rest.is_empty() {
        return None;
    }
    let tag = varint(rest)?;
    let value = match tag & 7 {
        0 => Wire::Varint(varint(rest)?),
        1 => {
            let (value, after) = rest.split_first_chunk()?;
            *rest = after;
            Wire::Fixed64(u64::from_le_bytes(*value))
        }
        2 => {
            let length = usize::try_from(varint(rest)?).ok()?;
            let (value, after) = rest.split_at_checked(length)?;
            *rest = after;
            Wire::Bytes(value)
        }
        5 => {
            let (value, after) = rest.split_first_chunk()?;
            *rest = after;
            Wire::Fixed32(u32::from_le_bytes(*value))
        }
        _ => return None,
    };
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
