//! Decoding of the YAML tree to typed objects, by serde. Every error has its field and line. Unknown fields are
//! reported with the field that was probably meant, since serde passes the fields of a struct to the deserializer.

use std::{cell::RefCell, fmt};

use serde::{
    de::{self, DeserializeSeed, Deserializer, IntoDeserializer, Unexpected, Visitor},
    forward_to_deserialize_any,
};

use skysail_yaml::{Entry, Node, Value};

use super::field_error::{FieldError, Segment, camel_case};
use crate::{
    analysis::Code,
    spelling::{VARIABLE, nearest},
};

/// Result of decoding.
#[derive(Debug)]
pub(crate) struct Decoded<T> {
    /// Value without the fields that have errors, unless nothing could be decoded.
    pub(crate) value: Option<T>,
    /// Fields that could not be decoded.
    pub(crate) errors: Vec<FieldError>,
    /// Unknown fields.
    pub(crate) unknown: Vec<FieldError>,
    /// Fields of a protobuf message whose names are in snake case, with their names in camel case.
    pub(super) renamed: Vec<(Vec<Segment>, &'static str)>,
}

/// Maximum number of errors reported for one object.
const MAX_ERRORS: usize = 20;
/// Maximum number of unknown fields reported for one object, and of errors in its check against Kubernetes' types.
pub(super) const MAX_UNKNOWN: usize = 100;

/// Decodes a tree. A field with an error is removed and the rest decoded again, so that all errors are reported at
/// once.
pub(crate) fn decode<T: de::DeserializeOwned>(node: &Node) -> Decoded<T> {
    decode_with(node, MAX_UNKNOWN)
}

/// Decodes a tree as [`decode`], and reports at most this number of unknown fields.
pub(super) fn decode_with<T: de::DeserializeOwned>(node: &Node, max_unknown: usize) -> Decoded<T> {
    decode_form(node, max_unknown, false)
}

/// Decodes a tree as [`decode`], in the JSON form of a protobuf message: names of fields may also be in snake case, and
/// numbers in quotes (<https://protobuf.dev/programming-guides/json/>).
pub(super) fn decode_proto<T: de::DeserializeOwned>(node: &Node) -> Decoded<T> {
    decode_form(node, MAX_UNKNOWN, true)
}

fn decode_form<T: de::DeserializeOwned>(node: &Node, max_unknown: usize, is_proto: bool) -> Decoded<T> {
    let mut errors = Vec::new();
    let mut rest = None;
    loop {
        let unknown = RefCell::new(Unknown { fields: Vec::new(), max: max_unknown, renamed: Vec::new() });
        let tree = rest.as_ref().unwrap_or(node);
        let reader = NodeReader { node: tree, line: tree.line, path: None, unknown: &unknown, is_proto };
        match T::deserialize(reader) {
            Ok(value) => {
                let Unknown { fields: unknown, renamed, .. } = unknown.into_inner();
                return Decoded { value: Some(value), errors, unknown, renamed };
            }
            Err(DecodeError(finding)) => {
                let removed = remove(rest.get_or_insert_with(|| node.clone()), &finding.path);
                errors.push(*finding);
                if !removed || errors.len() >= MAX_ERRORS {
                    let Unknown { fields: unknown, renamed, .. } = unknown.into_inner();
                    return Decoded { value: None, errors, unknown, renamed };
                }
            }
        }
    }
}

/// Unknown fields and their maximum number.
struct Unknown {
    fields: Vec<FieldError>,
    max: usize,
    renamed: Vec<(Vec<Segment>, &'static str)>,
}

/// Renames fields to camel case.
pub(super) fn rename(node: &mut Node, mut renamed: Vec<(Vec<Segment>, &'static str)>) {
    // The paths have the names before.
    renamed.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
    for (path, name) in renamed {
        if let Some(entry) = entry_at(node, &path) {
            name.clone_into(&mut entry.key);
        }
    }
}

fn entry_at<'n>(node: &'n mut Node, path: &[Segment]) -> Option<&'n mut Entry> {
    let (last, above) = path.split_last()?;
    let mut at = node;
    for segment in above {
        at = match (segment, &mut at.value) {
            (Segment::Key(key), Value::Map(entries)) => {
                &mut entries.iter_mut().find(|entry| entry.key == *key)?.value
            }
            (Segment::Index(index), Value::List(nodes)) => nodes.get_mut(*index)?,
            _ => return None,
        };
    }
    match (last, &mut at.value) {
        (Segment::Key(key), Value::Map(entries)) => entries.iter_mut().find(|entry| entry.key == *key),
        _ => None,
    }
}

/// Removes the map entry at this path, or the nearest enclosing one. Returns false if there is none.
fn remove(node: &mut Node, path: &[Segment]) -> bool {
    let Some(last) = path.iter().rposition(|segment| matches!(segment, Segment::Key(_))) else {
        return false;
    };
    let mut at = node;
    for (depth, segment) in path.iter().enumerate() {
        at = match (segment, &mut at.value) {
            (Segment::Key(key), Value::Map(entries)) => {
                let Some(index) = entries.iter().position(|entry| entry.key == *key) else { return false };
                if depth == last {
                    entries.remove(index);
                    return true;
                }
                &mut entries[index].value
            }
            (Segment::Index(index), Value::List(nodes)) => match nodes.get_mut(*index) {
                Some(node) => node,
                None => return false,
            },
            _ => return false,
        };
    }
    false
}

/// Path from the root to a node, kept on the stack.
#[derive(Clone, Copy)]
struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    key: Option<&'a str>,
    index: usize,
}

impl Path<'_> {
    fn segments(&self) -> Vec<Segment> {
        let mut segments = self.parent.map(Path::segments).unwrap_or_default();
        segments.push(self.key.map_or(Segment::Index(self.index), |key| Segment::Key(key.to_owned())));
        segments
    }
}

/// Error that a deserializer returns; boxed, to keep the results of successful calls small.
#[derive(Debug)]
struct DecodeError(Box<FieldError>);

impl DecodeError {
    fn new(code: Code, message: String, remedy: String) -> Self {
        Self(Box::new(FieldError { code, path: Vec::new(), line: 0, message, remedy }))
    }

    /// Sets a remedy that shows how to write the expected mapping; none for a mapping with more than 8 fields.
    fn with_fields(mut self, node: &Node, fields: &[&str]) -> Self {
        if fields.len() > 8 {
            return self;
        }
        self.0.remedy = match (&node.value, fields) {
            (Value::List(_), _) => "remove the `- `".to_owned(),
            (Value::Text(text, _), ["exact", ..]) => format!("write {{exact: {text:?}}}, or prefix or regex"),
            (Value::Int(number), [field]) => format!("write {{{field}: {number}}}"),
            (_, [field]) => format!("write its field {field} below it"),
            _ => format!("write its fields below it: {}", fields.join(", ")),
        };
        self
    }

    /// Sets path and line unless an inner node has set them.
    fn at(mut self, path: Option<&Path<'_>>, line: u32) -> Self {
        if self.0.line == 0 {
            self.0.line = line;
            self.0.path = path.map(Path::segments).unwrap_or_default();
        }
        self
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for DecodeError {}

impl de::Error for DecodeError {
    fn custom<M: fmt::Display>(message: M) -> Self {
        Self::new(Code::WrongType, message.to_string(), String::new())
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let (message, remedy) = mismatch_words(&found, &plain_words(&expected.to_string()));
        Self::new(Code::WrongType, message, remedy)
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(
            Code::WrongType,
            format!("expected {}, found {}", plain_words(&expected.to_string()), found_words(&found)),
            String::new(),
        )
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        let (message, remedy) = not_one_of(variant, expected);
        Self::new(Code::UnknownValue, message, remedy)
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        let (message, remedy) = unknown_words(field, expected);
        Self::new(Code::UnknownField, message, remedy)
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(Code::MissingField, format!("{field} is missing"), format!("add {field}"))
    }
}

/// Returns message and remedy for a value of an unexpected type.
pub(super) fn mismatch(node: &Node, expected: &str) -> (String, String) {
    let found = match &node.value {
        Value::Null => Unexpected::Unit,
        Value::Bool(truth) => Unexpected::Bool(*truth),
        Value::Int(number) => match i64::try_from(*number) {
            Ok(number) => Unexpected::Signed(number),
            Err(_) => Unexpected::Float(*number as f64),
        },
        Value::Float(number) => Unexpected::Float(*number),
        Value::Text(text, _) => Unexpected::Str(text),
        Value::List(_) => Unexpected::Seq,
        Value::Map(_) => Unexpected::Map,
    };
    mismatch_words(&found, expected)
}

fn mismatch_words(found: &Unexpected<'_>, expected: &str) -> (String, String) {
    let remedy = match (found, expected) {
        (Unexpected::Str(text), _) if text.contains("${") => VARIABLE,
        (Unexpected::Map, "text") => "write the text itself; one of several lines begins with `|`",
        (Unexpected::Str(text), "a whole number" | "a number") if text.parse::<f64>().is_ok() => {
            "remove the quotes"
        }
        (
            Unexpected::Signed(_) | Unexpected::Unsigned(_) | Unexpected::Float(_) | Unexpected::Bool(_),
            "text",
        ) => "put it in quotes",
        (Unexpected::Str("true" | "false"), "true or false") => "remove the quotes",
        (Unexpected::Str(text), "a whole number" | "a number") if text.ends_with('%') => {
            "write the number without %"
        }
        (Unexpected::Signed(_), _) if expected.starts_with("a duration") => "add a unit, such as 5s",
        (_, "a list") => "begin each item with `- `",
        (Unexpected::Seq, "a mapping") => "write `name: value`, without `- `",
        (Unexpected::Signed(_), "a mapping") => "write `name: value`",
        (Unexpected::Str(_), "a mapping") => {
            "write `name: value`; check for a missing colon or a truncated file"
        }
        _ => "",
    };
    (format!("expected {expected}, found {}", found_words(found)), remedy.to_owned())
}

/// Returns message and remedy for an unknown word.
pub(super) fn not_one_of(word: &str, known: &[&str]) -> (String, String) {
    let remedy = nearest(word, known).map(|known| format!("did you mean {known}?"));
    (format!("{word:?} is not one of {}", known.join(", ")), remedy.unwrap_or_default())
}

fn plain_words(expected: &str) -> String {
    match expected {
        "i32" | "i64" | "u32" | "u64" | "u16" | "i8" | "u8" => "a whole number",
        "f32" | "f64" => "a number",
        "a string" | "str" | "a borrowed string" => "text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "a mapping",
        _ if expected.starts_with("struct ") => "a mapping",
        _ if expected.starts_with("enum ") || expected.starts_with("variant of enum") => "a known value",
        other => other,
    }
    .to_owned()
}

fn found_words(found: &Unexpected<'_>) -> String {
    match found {
        Unexpected::Str(text) => format!("text {text:?}"),
        Unexpected::Bool(truth) => truth.to_string(),
        Unexpected::Signed(number) => number.to_string(),
        Unexpected::Unsigned(number) => number.to_string(),
        Unexpected::Float(number) => number.to_string(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a mapping".to_owned(),
        Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
        other => other.to_string(),
    }
}

pub(super) fn unknown_words(field: &str, known: &[&str]) -> (String, String) {
    let message = format!("unknown field {field:?}");
    let remedy = match nearest(field, known) {
        _ if known.contains(&"uri") && ["exact", "prefix", "regex"].contains(&field) => {
            format!("indent {field} below uri")
        }
        _ if field == "spec" => "check the indentation: spec stands beside metadata".to_owned(),
        Some(near) => format!("did you mean {near}?"),
        None => format!("known fields: {}", known.join(", ")),
    };
    (message, remedy)
}

/// Deserializer of one node.
#[derive(Clone, Copy)]
struct NodeReader<'a> {
    node: &'a Node,
    /// Line of the node's key, where a reader looks for it.
    line: u32,
    path: Option<&'a Path<'a>>,
    unknown: &'a RefCell<Unknown>,
    /// The tree is a protobuf message.
    is_proto: bool,
}

impl<'a> NodeReader<'a> {
    fn fail(&self, failure: DecodeError) -> DecodeError {
        failure.at(self.path, self.line)
    }

    fn visit<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let result = match &self.node.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(truth) => visitor.visit_bool(*truth),
            Value::Int(number) => match (i64::try_from(*number), u64::try_from(*number)) {
                (Ok(number), _) => visitor.visit_i64(number),
                (_, Ok(number)) => visitor.visit_u64(number),
                _ => visitor.visit_f64(*number as f64),
            },
            Value::Float(number) => visitor.visit_f64(*number),
            Value::Text(text, _) => visitor.visit_str(text),
            Value::List(nodes) => visitor.visit_seq(Items { nodes: nodes.iter().enumerate(), reader: self }),
            Value::Map(entries) => {
                visitor.visit_map(Fields { entries: entries.iter(), value: None, reader: self, known: None })
            }
        };
        result.map_err(|failure| self.fail(failure))
    }

    /// Visits a number, which may be in quotes in a protobuf message.
    fn visit_number<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        let Value::Text(text, _) = &self.node.value else { return self.visit(visitor) };
        let result = match (text.parse::<i64>(), text.parse::<f64>()) {
            _ if !self.is_proto => return self.visit(visitor),
            (Ok(number), _) => visitor.visit_i64(number),
            (Err(_), Ok(number)) => visitor.visit_f64(number),
            (Err(_), Err(_)) => return self.visit(visitor),
        };
        result.map_err(|failure| self.fail(failure))
    }

    fn visit_text<'de, V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match &self.node.value {
            // As for the API server, `label:` is the empty text.
            Value::Null => visitor.visit_str("").map_err(|failure| self.fail(failure)),
            _ => self.visit(visitor),
        }
    }
}

/// Methods for types of numbers.
macro_rules! numbers {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
            self.visit_number(visitor)
        }
    )*};
}

impl<'de> Deserializer<'de> for NodeReader<'_> {
    type Error = DecodeError;

    numbers! {
        deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_u8 deserialize_u16 deserialize_u32
        deserialize_u64 deserialize_f32 deserialize_f64
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.visit(visitor)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.visit_text(visitor)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        self.visit_text(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        visitor.visit_newtype_struct(self).map_err(|failure| self.fail(failure))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        let Value::Map(entries) = &self.node.value else {
            return self.visit(visitor).map_err(|failure| failure.with_fields(self.node, fields));
        };
        let access = Fields { entries: entries.iter(), value: None, reader: self, known: Some(fields) };
        visitor.visit_map(access).map_err(|failure| self.fail(failure))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, DecodeError> {
        match &self.node.value {
            Value::Text(text, _) => visitor
                .visit_enum(text.as_str().into_deserializer())
                .map_err(|failure: DecodeError| self.fail(failure)),
            _ => self.visit(visitor),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, DecodeError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i128 u128 char bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier
    }
}

struct Items<'a, I> {
    nodes: I,
    reader: NodeReader<'a>,
}

impl<'de, 'a, I: Iterator<Item = (usize, &'a Node)>> de::SeqAccess<'de> for Items<'a, I> {
    type Error = DecodeError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, DecodeError> {
        let Some((index, node)) = self.nodes.next() else { return Ok(None) };
        let path = Path { parent: self.reader.path, key: None, index };
        let reader = NodeReader { node, line: node.line, path: Some(&path), ..self.reader };
        seed.deserialize(reader).map(Some).map_err(|failure| reader.fail(failure))
    }
}

struct Fields<'a> {
    entries: std::slice::Iter<'a, Entry>,
    value: Option<&'a Entry>,
    reader: NodeReader<'a>,
    /// Fields of the struct; `None` for a free mapping.
    known: Option<&'static [&'static str]>,
}

impl<'de> de::MapAccess<'de> for Fields<'_> {
    type Error = DecodeError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, DecodeError> {
        for entry in self.entries.by_ref() {
            let mut name = entry.key.as_str();
            if let Some(known) = self.known {
                if let Some(camel) = self.reader.is_proto.then(|| known_camel(name, known)).flatten() {
                    let path = Path { parent: self.reader.path, key: Some(name), index: 0 };
                    self.reader.unknown.borrow_mut().renamed.push((path.segments(), camel));
                    name = camel;
                }
                if !known.contains(&name) {
                    let mut unknown = self.reader.unknown.borrow_mut();
                    if unknown.fields.len() < unknown.max {
                        let path = Path { parent: self.reader.path, key: Some(&entry.key), index: 0 };
                        let (message, remedy) = unknown_words(&entry.key, known);
                        let (code, path) = (Code::UnknownField, path.segments());
                        unknown.fields.push(FieldError { code, path, line: entry.line, message, remedy });
                    }
                    continue;
                }
                // As for Kubernetes, a field without a value counts as absent.
                if entry.value.value == Value::Null {
                    continue;
                }
            }
            self.value = Some(entry);
            return seed.deserialize(name.into_deserializer()).map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, DecodeError> {
        let Some(entry) = self.value.take() else { return Err(de::Error::custom("value without a key")) };
        let path = Path { parent: self.reader.path, key: Some(&entry.key), index: 0 };
        let reader = NodeReader { node: &entry.value, line: entry.line, path: Some(&path), ..self.reader };
        seed.deserialize(reader).map_err(|failure| reader.fail(failure))
    }
}

/// Returns the known field whose name in snake case this is.
fn known_camel(name: &str, known: &'static [&'static str]) -> Option<&'static str> {
    let camel = name.contains('_').then(|| camel_case(name))?;
    known.iter().copied().find(|known| *known == camel)
}

#[cfg(test)]
mod tests {
    use skysail_yaml::documents;

    use super::*;
    use crate::{api::VirtualService, parse::field_error::path_text};

    fn read(text: &str) -> Decoded<VirtualService> {
        decode(&documents(text).next().unwrap().root.unwrap())
    }

    #[test]
    fn all_errors_are_reported_at_once_with_field_and_line() {
        let decoded = read(
            "hosts: reviews\nhttp:\n- route:\n  - weight: \"90\"\n    destination: {host: a}\n  timeout: 5\n",
        );
        assert_eq!(decoded.value.unwrap().http.len(), 1, "what has no error");
        let found: Vec<_> =
            decoded.errors.iter().map(|e| (path_text(&e.path), e.line, e.message.as_str())).collect();
        assert_eq!(
            found,
            [
                ("hosts".into(), 1, "expected a list, found text \"reviews\""),
                ("http[0].route[0].weight".into(), 4, "expected a whole number, found text \"90\""),
                (
                    "http[0].timeout".into(),
                    6,
                    "expected a duration such as \"1.5s\", \"250ms\" or \"1m\", found 5"
                ),
            ]
        );
        assert_eq!(decoded.errors[1].remedy, "remove the quotes");
    }

    #[test]
    fn unknown_fields_are_reported_with_a_suggestion() {
        let decoded = read(
            "hosts: [a]\nhttp:\n- timout: 5s\n  redirect: {derivePort: FROM_REQUEST_PORT, nonsense: 1}\n",
        );
        assert!(decoded.value.is_some());
        let found: Vec<_> =
            decoded.unknown.iter().map(|e| (path_text(&e.path), e.line, e.remedy.as_str())).collect();
        assert_eq!(found[0], ("http[0].timout".into(), 3, "did you mean timeout?"));
        assert_eq!(found[1].0, "http[0].redirect.nonsense");
        assert!(found[1].2.starts_with("known fields: uri,"), "{found:?}");
    }

    #[test]
    fn wrong_names_are_reported_with_the_right_ones() {
        let decoded = read("http: [{redirect: {derivePort: FROM_REQUESTS_PORT}}]\n");
        assert_eq!(decoded.errors[0].remedy, "did you mean FROM_REQUEST_PORT?");
    }
}
