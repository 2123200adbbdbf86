//! Limits of a text and of an object, so that time and memory are bounded.

use std::sync::Arc;

use skysail_yaml::{Node, Value, join};

use crate::{Code, Diagnostic};

/// Maximum number of objects in a text. A text with more is refused as a whole: what takes effect does not depend on
/// the order of its objects, and most such texts are refused before an object is read.
pub(super) const MAX_OBJECTS: usize = skysail_yaml::MAX_OBJECTS;
/// Number of errors in a text after which its rest is not read, and counts as unreadable.
pub(super) const MAX_ERRORS: usize = 1_000;
/// Maximum number of warnings that are kept for a text, and of unused kinds that are counted by name.
pub(super) const MAX_WARNINGS: usize = 1_000;
/// Maximum number of items of a list in an object: validation compares the items of some lists with each other.
const MAX_ITEMS: usize = 10_000;

/// Returns the error for a text with too many objects, the first of them on this line.
pub(super) fn too_many_objects(file: &Arc<str>, line: u32) -> Diagnostic {
    let message = format!("the text has more than {MAX_OBJECTS} objects; none of them is read");
    Diagnostic::new(Code::TooManyErrors, file, line, message).remedy("divide the file")
}

/// Returns an error if a list of an object is too long.
pub(super) fn check(node: &Node, file: &Arc<str>) -> Option<Diagnostic> {
    let (field, line, length) = long_list(node, "")?;
    let message = format!("has {length} items, at most {MAX_ITEMS} are allowed");
    let diagnostic = Diagnostic::new(Code::TooMany, file, line, message);
    Some(diagnostic.field(field).remedy("divide it into several objects"))
}

fn long_list(node: &Node, path: &str) -> Option<(String, u32, usize)> {
    match &node.value {
        Value::List(nodes) if nodes.len() > MAX_ITEMS => Some((path.to_owned(), node.line, nodes.len())),
        Value::List(nodes) => nodes.iter().find_map(|node| long_list(node, path)),
        Value::Map(entries) => {
            entries.iter().find_map(|entry| long_list(&entry.value, &join(path, &entry.key)))
        }
        _ => None,
    }
}
