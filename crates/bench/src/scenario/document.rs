//! Reads the YAML document of a scenario, and checks bounds. An error names the line, the field and the remedy.

use std::path::Path;

use anyhow::Context as _;
use serde::de::DeserializeOwned;
use skysail_yaml::{Node, Value};

use crate::{document, results};

/// Content of a file, in messages.
const WHAT: &str = "scenario";
/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Reads the only document of a file.
///
/// # Errors
/// The file cannot be read, or is not one YAML document. The message names the line.
pub(super) fn read(file: &Path) -> anyhow::Result<Node> {
    let text = results::read_text(file, MAX_FILE).with_context(|| {
        format!(
            "cannot read the scenario {}; name a YAML file, such as those in benchmarks/scenarios",
            file.display()
        )
    })?;
    document::parse(&text, WHAT).map_err(|error| anyhow::anyhow!("{}:{error}", file.display()))
}

/// Decodes a document. An error begins with the number of the line and names the field.
pub(super) fn decode<T: DeserializeOwned>(root: &Node) -> Result<T, String> {
    serde_path_to_error::deserialize(root.to_json()).map_err(|error| {
        let field = error.path().to_string();
        let reason = error.into_inner().to_string();
        message(root, &field, &reason)
    })
}

/// Checks the fields that the scenarios of all studies have.
pub(super) fn heading(name: &str, title: &str, question: &str) -> Checked {
    is_name("name", name)?;
    text("title", title, 100)?;
    text("question", question, 500)
}

/// Checks a name that appears in files.
pub(super) fn is_name(field: &str, name: &str) -> Checked {
    let is_allowed = |character: char| matches!(character, 'a'..='z' | '0'..='9' | '-');
    ensure((1..=64).contains(&name.len()) && name.chars().all(is_allowed), field, || {
        "must be 1 to 64 lower-case letters, digits and hyphens".to_owned()
    })
}

/// Returns an error with the line of the field. A field that is missing has the line of the object that lacks it.
pub(super) fn message(root: &Node, field: &str, reason: &str) -> String {
    let (mut node, mut line) = (root, root.line);
    for part in field.split(['.', '[', ']']).filter(|part| !part.is_empty()) {
        let inner = match &node.value {
            Value::Map(entries) => {
                entries.iter().find(|entry| entry.key == part).map(|entry| (entry.line, &entry.value))
            }
            Value::List(items) => {
                part.parse().ok().and_then(|at: usize| items.get(at)).map(|item| (item.line, item))
            }
            _ => None,
        };
        let Some((at, inner)) = inner else { break };
        (line, node) = (at, inner);
    }
    let field = if field.is_empty() || field == "." { String::new() } else { format!("{field}: ") };
    format!("{line}: {field}{reason}; docs/scenarios.md has the format")
}

/// An error has the field and the reason.
pub(super) type Checked = Result<(), (String, String)>;

pub(super) fn ensure(is_valid: bool, field: &str, reason: impl FnOnce() -> String) -> Checked {
    if is_valid { Ok(()) } else { Err((field.to_owned(), reason())) }
}

pub(super) fn within(field: &str, value: f64, min: f64, max: f64) -> Checked {
    ensure((min..=max).contains(&value), field, || format!("{value} must be from {min} to {max}"))
}

pub(super) fn text(field: &str, text: &str, max: usize) -> Checked {
    let length = text.trim().chars().count();
    ensure((1..=max).contains(&length), field, || format!("must have 1 to {max} characters, has {length}"))
}

pub(super) fn distinct<T: PartialEq>(field: &str, values: &[T], max: usize) -> Checked {
    let is_repeated = |index: usize| values[..index].contains(&values[index]);
    let is_valid = (1..=max).contains(&values.len()) && !(0..values.len()).any(is_repeated);
    ensure(is_valid, field, || format!("must have 1 to {max} values, each once"))
}
