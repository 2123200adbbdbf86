//! Kubernetes' types, against which objects are checked as by the API server.
//!
//! The file `kubernetes.txt` holds them, generated from the API server's OpenAPI document. A required field
//! that is missing refuses the object, and so does a field of another type or with a misspelt name, as with
//! `kubectl apply`. Other unknown fields are only reported: they may be newer than the types.

use std::{collections::HashMap, sync::LazyLock};

use chrono::DateTime;
use skysail_yaml::{Entry, Node, Value};

use super::{
    decode::{MAX_UNKNOWN, mismatch, not_one_of, unknown_words},
    field_error::{FieldError, Segment},
};
use crate::{analysis::Code, spelling::distance};

static TEXT: &str = include_str!("kubernetes.txt");

/// Fields of each type.
static TYPES: LazyLock<HashMap<&str, Vec<Field>>> = LazyLock::new(|| {
    let mut types = HashMap::new();
    let mut name = "";
    for line in TEXT.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix("  ").and_then(|line| line.split_once(' ')) {
            None => name = line,
            Some((field, of)) => {
                let (field, required) = field.strip_suffix('!').map_or((field, false), |field| (field, true));
                let fields: &mut Vec<Field> = types.entry(name).or_default();
                fields.push(Field { name: field, required, of });
            }
        }
    }
    types
});

/// A field of a type.
struct Field {
    name: &'static str,
    required: bool,
    /// Type of its value, in the notation of `kubernetes.txt`.
    of: &'static str,
}

/// Result of a check.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// Errors, which refuse the object.
    pub(super) errors: Vec<FieldError>,
    /// Other unknown fields, which are only reported.
    pub(super) unknown: Vec<FieldError>,
    /// Maximum number of unknown fields that are only reported.
    max_unknown: usize,
    path: Vec<Segment>,
}

/// Checks an object against one of Kubernetes' types. Reports at most this number of unknown fields.
pub(super) fn check(node: &Node, of: &'static str, max_unknown: usize) -> Checked {
    let mut checked = Checked { max_unknown: max_unknown.min(MAX_UNKNOWN), ..Checked::default() };
    checked.value(node, node.line, of);
    checked
}

impl Checked {
    fn value(&mut self, node: &Node, line: u32, of: &'static str) {
        if let Some(words) = of.strip_prefix('=') {
            return self.word(node, line, words);
        }
        if let Some(item) = inner(of, '[', ']') {
            let Value::List(nodes) = &node.value else { return self.refuse(node, line, "a list") };
            for (index, node) in nodes.iter().enumerate() {
                self.within(Segment::Index(index), |checked| checked.value(node, node.line, item));
            }
            return;
        }
        if let Some(item) = inner(of, '{', '}') {
            let Value::Map(entries) = &node.value else { return self.refuse(node, line, "a mapping") };
            for entry in entries.iter().filter(|entry| entry.value.value != Value::Null) {
                self.entry(entry, item);
            }
            return;
        }
        let (fits, expected) = match of {
            "any" => (true, ""),
            "text" => (matches!(node.value, Value::Text(..)), "text"),
            "bool" => (matches!(node.value, Value::Bool(_)), "true or false"),
            "int" => (matches!(node.value, Value::Int(_)), "a whole number"),
            "number" => (matches!(node.value, Value::Int(_) | Value::Float(_)), "a number"),
            "int-or-text" => {
                (matches!(node.value, Value::Int(_) | Value::Text(..)), "a whole number or text")
            }
            "quantity" => (
                match &node.value {
                    Value::Text(text, _) => is_quantity(text),
                    value => matches!(value, Value::Int(_) | Value::Float(_)),
                },
                "a quantity such as 500m or 64Mi",
            ),
            "time" => (
                node.text().is_some_and(|text| DateTime::parse_from_rfc3339(text).is_ok()),
                "a time such as \"2026-01-31T12:00:00Z\"",
            ),
            _ => return self.fields(node, line, of),
        };
        if !fits {
            self.refuse(node, line, expected);
        }
    }

    fn word(&mut self, node: &Node, line: u32, words: &'static str) {
        let Some(text) = node.text() else { return self.refuse(node, line, "text") };
        let known: Vec<&str> = words.split('|').collect();
        // The API server treats the empty text as absent.
        if !text.is_empty() && !known.contains(&text) {
            let (message, mut remedy) = not_one_of(text, &known);
            if words == "SCTP|TCP|UDP" {
                "remove protocol, and name the port by its application protocol, such as http"
                    .clone_into(&mut remedy);
            }
            self.error(Code::UnknownValue, line, message, remedy);
        }
    }

    fn fields(&mut self, node: &Node, line: u32, of: &'static str) {
        let Value::Map(entries) = &node.value else { return self.refuse(node, line, "a mapping") };
        let fields = TYPES.get(of).map_or(&[][..], Vec::as_slice);
        for entry in entries {
            let Some(field) = fields.iter().find(|field| field.name == entry.key) else {
                let known: Vec<&str> = fields.iter().map(|field| field.name).collect();
                let (found, max) = if is_typo(&entry.key, &known) {
                    (&mut self.errors, MAX_UNKNOWN)
                } else {
                    (&mut self.unknown, self.max_unknown)
                };
                if found.len() < max {
                    let (message, remedy) = unknown_words(&entry.key, &known);
                    let mut path = self.path.clone();
                    path.push(Segment::Key(entry.key.clone()));
                    let code = Code::UnknownField;
                    found.push(FieldError { code, path, line: entry.line, message, remedy });
                }
                continue;
            };
            // A field without a value counts as absent.
            if entry.value.value != Value::Null {
                self.entry(entry, field.of);
            }
        }
        for field in fields.iter().filter(|field| field.required) {
            if node.get(field.name).is_none_or(|node| node.value == Value::Null) {
                let name = field.name;
                self.within(Segment::Key(name.to_owned()), |checked| {
                    checked.error(Code::MissingField, line, "is missing".to_owned(), format!("add {name}"));
                });
            }
        }
    }

    fn entry(&mut self, entry: &Entry, of: &'static str) {
        self.within(Segment::Key(entry.key.clone()), |checked| checked.value(&entry.value, entry.line, of));
    }

    fn within(&mut self, segment: Segment, check: impl FnOnce(&mut Self)) {
        self.path.push(segment);
        check(self);
        self.path.pop();
    }

    fn refuse(&mut self, node: &Node, line: u32, expected: &str) {
        let (message, mut remedy) = mismatch(node, expected);
        let is_match_labels = matches!(self.path.last(), Some(Segment::Key(key)) if key == "matchLabels");
        if is_match_labels && expected == "text" {
            "write the labels directly below selector".clone_into(&mut remedy);
        }
        self.error(Code::WrongType, line, message, remedy);
    }

    fn error(&mut self, code: Code, line: u32, message: String, remedy: String) {
        if self.errors.len() >= MAX_UNKNOWN {
            return;
        }
        self.errors.push(FieldError { code, path: self.path.clone(), line, message, remedy });
    }
}

/// Returns whether a word is probably a misspelling of one of the known words.
pub(super) fn is_typo(word: &str, known: &[&str]) -> bool {
    let letters = if word.len() < 6 { 1 } else { 2 };
    known.iter().any(|known| distance(known, word) <= letters)
}

/// Returns whether a text is a quantity. Source: `k8s.io/apimachinery/pkg/api/resource`, the grammar of `Quantity`.
fn is_quantity(text: &str) -> bool {
    let number = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = number.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(number.len());
    let (digits, suffix) = number.split_at(end);
    let exponent = suffix.strip_prefix(['e', 'E']).is_some_and(|exponent| exponent.parse::<i32>().is_ok());
    let units = ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let numeric = digits.matches('.').count() <= 1 && digits.bytes().any(|byte| byte.is_ascii_digit());
    numeric && (exponent || units.contains(&suffix))
}

/// Returns the text between two brackets.
fn inner(of: &'static str, open: char, close: char) -> Option<&'static str> {
    of.strip_prefix(open)?.strip_suffix(close)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_follow_the_grammar_of_kubernetes() {
        for good in ["1", "0.5", ".5", "500m", "64Mi", "1e3", "1E3", "-1", "2E"] {
            assert!(is_quantity(good), "{good}");
        }
        for bad in ["", "64MB", "500mm", "1 Gi", "Mi", "1.2.3", "1ee3", "many", "."] {
            assert!(!is_quantity(bad), "{bad}");
        }
    }

    #[test]
    fn every_type_that_a_field_names_exists() {
        let plain = ["any", "text", "bool", "int", "number", "int-or-text", "quantity", "time"];
        assert!(TYPES.len() > 100);
        for field in TYPES.values().flatten() {
            let of = field.of.trim_matches(['[', ']', '{', '}']);
            let is_known = plain.contains(&of) || of.starts_with('=') || TEXT.lines().any(|line| line == of);
            assert!(is_known, "{}: {}", field.name, field.of);
        }
    }
}
